//! The TLS side of a door: which authority signs, which certificates pass, and what is said to
//! those that don't. A verifier checks the chain; whom the certificate speaks for is read from it
//! afterwards by [`identity_of`], before the connection is handed to anyone.

use std::{fmt, sync::Arc, time::Duration};

use jiff::Timestamp;
use reach_protocol::{
    Fingerprint,
    certificate::TOLERANCE_S,
    id::{Name, Serial},
};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, OtherError, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring},
    server::danger::{ClientCertVerified, ClientCertVerifier},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, TrustAnchor, UnixTime, pem::PemObject};
use webpki::{EndEntityCert, KeyUsage};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::{
    authority::{AuthorityInfo, CertificateInfo},
    endpoint::Door,
    error::Error,
    identity::Identity,
};

/// Nodes are known by the identity in their certificate, not by a host name; TLS wants one anyway.
pub(crate) const SERVER_NAME: &str = "agent-reach";

/// A date that is wrong by less than this is taken for a wrong clock and accepted, where only this
/// machine's own calendar is known.
const SKEW_MAX: Duration = Duration::from_secs(TOLERANCE_S);

/// What someone with a revoked certificate is told.
pub(crate) const REVOKED: &str = "the certificate was revoked: have a new one issued";

/// What its process knows of certificates besides what stands in them. Asked at every handshake.
pub trait Scrutiny: Send + Sync + fmt::Debug {
    /// By which dates are judged.
    fn now(&self) -> Now;
    /// Whether this certificate is refused although its chain is good.
    fn is_revoked(&self, certificate: &CertificateInfo) -> bool;
}

/// What time it is, and how well that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Now {
    /// The cluster's calendar: dates are judged by it to the second.
    Cluster(Timestamp),
    /// A machine's own calendar, which may be wrong: a date that fails by less than 48 h is accepted,
    /// with a warning in the log.
    Own(Timestamp),
    /// The two are further apart than 48 h, so one of them is badly wrong, and it may be the cluster's: a
    /// date that holds by either is accepted, with a warning in the log.
    Disputed { cluster: Timestamp, own: Timestamp },
}

impl Now {
    pub fn of(cluster: Option<Timestamp>, own: Timestamp) -> Self {
        match cluster {
            None => Self::Own(own),
            Some(cluster) if cluster.duration_since(own).unsigned_abs() < SKEW_MAX => Self::Cluster(cluster),
            Some(cluster) => Self::Disputed { cluster, own },
        }
    }
}

/// A client's: it knows no more than its own clock.
#[derive(Debug)]
pub(crate) struct OwnClock;

impl Scrutiny for OwnClock {
    fn now(&self) -> Now {
        Now::Own(Timestamp::now())
    }

    fn is_revoked(&self, _: &CertificateInfo) -> bool {
        false
    }
}

/// Credentials, read and found to belong together.
pub(crate) struct Material {
    provider: Arc<CryptoProvider>,
    anchors: Arc<Vec<TrustAnchor<'static>>>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    pub(crate) own: CertificateInfo,
    scrutiny: Arc<dyn Scrutiny>,
}

impl Material {
    pub(crate) fn new(credentials: &crate::Credentials, scrutiny: Arc<dyn Scrutiny>) -> Result<Self, Error> {
        let names = ["authority (ca_pem)", "certificate (cert_pem)", "key (key_pem)"];
        Ok(Self { scrutiny, ..Self::named(credentials, names)? })
    }

    /// `names` stand in the errors for the authority, the certificate and the key.
    pub(crate) fn named(credentials: &crate::Credentials, [ca, cert, key]: [&str; 3]) -> Result<Self, Error> {
        let authorities = certificates(&credentials.ca_pem, ca)?;
        let chain = certificates(&credentials.cert_pem, cert)?;
        let private = PrivateKeyDer::from_pem_slice(credentials.key_pem.as_bytes())
            .map_err(|_| Error::certificate(key, "not a private key in PEM form"))?;
        let anchors: Vec<_> = authorities
            .iter()
            .map(|der| webpki::anchor_from_trusted_cert(der).map(|anchor| anchor.to_owned()))
            .collect::<Result<_, _>>()
            .map_err(|error| Error::certificate(ca, format!("not a usable authority ({error})")))?;
        let own = describe(&chain[0]).map_err(|reason| Error::certificate(cert, reason))?;
        same_key(&chain[0], private.secret_der())
            .map_err(|reason| Error::certificate(key, format!("{reason} ({cert})")))?;
        let material = Self {
            provider: Arc::new(ring::default_provider()),
            anchors: Arc::new(anchors),
            chain,
            key: private,
            own,
            scrutiny: Arc::new(OwnClock),
        };
        let verifier = material.verifier(Whose::Own);
        verifier.check(&material.chain[0], &material.chain[1..], KeyUsage::client_auth()).map_err(
            |refusal| match refusal {
                Refusal::Unsigned(_) => {
                    Error::certificate(cert, format!("not signed by the authority in {ca}"))
                }
                other => Error::certificate(cert, other.to_string()),
            },
        )?;
        Ok(material)
    }

    pub(crate) fn must_be_a_node_of(&self, cluster: &Name) -> Result<(), Error> {
        let own = &self.own.identity;
        if own.cluster != *cluster {
            return Err(Error::WrongCluster { expected: cluster.clone(), found: own.cluster.clone() });
        }
        if own.node().is_none() {
            let reason = format!("{own} is no node: a node's port needs a node's certificate");
            return Err(Error::certificate("certificate (cert_pem)", reason));
        }
        Ok(())
    }

    /// Of a later certificate: it must be the same identity's.
    pub(crate) fn renewed(&self, credentials: &crate::Credentials) -> Result<Self, Error> {
        let new = Self::new(credentials, self.scrutiny.clone())?;
        if new.own.identity != self.own.identity {
            let reason = format!("it is {}'s, and this is {}", new.own.identity, self.own.identity);
            return Err(Error::certificate("certificate (cert_pem)", reason));
        }
        Ok(new)
    }

    pub(crate) fn server_config(&self, door: Door) -> Result<rustls::ServerConfig, Error> {
        let mut config = rustls::ServerConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("ring has TLS 1.3")
            .with_client_cert_verifier(Arc::new(self.verifier(Whose::Dialer(door))))
            .with_single_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| Error::certificate("certificate", error.to_string()))?;
        config.alpn_protocols = vec![door.alpn().to_vec()];
        // A resumed session would skip the certificate check, and early data can be replayed.
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        config.max_early_data_size = 0;
        Ok(config)
    }

    pub(crate) fn client_config(&self, door: Door) -> Result<rustls::ClientConfig, Error> {
        let mut config = rustls::ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("ring has TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(self.verifier(Whose::Node)))
            .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            .map_err(|error| Error::certificate("certificate", error.to_string()))?;
        config.alpn_protocols = vec![door.alpn().to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        config.enable_early_data = false;
        config.enable_sni = false;
        Ok(config)
    }

    fn verifier(&self, whose: Whose) -> Verifier {
        Verifier {
            provider: self.provider.clone(),
            anchors: self.anchors.clone(),
            scrutiny: self.scrutiny.clone(),
            whose,
        }
    }
}

/// Whose certificate a verifier looks at: decides the words of a refusal.
#[derive(Clone, Copy, Debug)]
enum Whose {
    Own,
    Dialer(Door),
    Node,
}

#[derive(Debug)]
struct Verifier {
    provider: Arc<CryptoProvider>,
    anchors: Arc<Vec<TrustAnchor<'static>>>,
    scrutiny: Arc<dyn Scrutiny>,
    whose: Whose,
}

/// Why a chain did not pass. The text reaches the other side as the reason of the closing, so it
/// tells nothing but what that side sent, and the time.
enum Refusal {
    Unsigned(Whose),
    Expired { at: Timestamp, now: Timestamp },
    NotYet { at: Timestamp, now: Timestamp },
    Revoked(Whose),
    Purpose,
    Broken(webpki::Error),
}

impl std::error::Error for Refusal {}

/// rustls puts this into the text that goes to the other side.
impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The sentence of a [`Refusal`] in what rustls says of it.
pub(crate) fn refusal(text: &str) -> Option<&str> {
    text.strip_prefix("invalid peer certificate: Other(OtherError(")?.strip_suffix("))")
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsigned(Whose::Node) => f.write_str(
                "the node's certificate is not signed by the authority this side trusts: check the address, and that the CA file is of this cluster",
            ),
            Self::Unsigned(Whose::Dialer(door)) => write!(
                f,
                "the certificate is not signed by this cluster's {} CA: have one issued with `agent-reach certs issue`",
                door.authority()
            ),
            Self::Unsigned(Whose::Own) => f.write_str("not signed by its authority"),
            Self::Expired { at, now } => write!(
                f,
                "the certificate expired at {at} and the clock of who checked it says {now}: check the clock of both machines, then have a new one issued"
            ),
            Self::NotYet { at, now } => write!(
                f,
                "the certificate is not valid before {at} and the clock of who checked it says {now}: check the clock of both machines"
            ),
            Self::Revoked(Whose::Node) => f.write_str("the node's certificate was revoked"),
            Self::Revoked(_) => f.write_str(REVOKED),
            Self::Purpose => f.write_str(
                "the certificate was not issued for this use: only a node's certificate can stand behind an address",
            ),
            Self::Broken(error) => write!(f, "the certificate can't be read ({error})"),
        }
    }
}

impl Verifier {
    /// Strict in all but the dates where the cluster's calendar is not known: those are looked at as
    /// of the nearest time at which they hold, as long as that is less than `SKEW_MAX` away.
    fn check(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        usage: KeyUsage,
    ) -> Result<(), Refusal> {
        let check = |now: Timestamp, tolerance| {
            self.check_chain(leaf, intermediates, usage, unix_time(now), tolerance)
        };
        match self.scrutiny.now() {
            Now::Cluster(now) => check(now, Duration::ZERO)?,
            Now::Own(now) => check(now, SKEW_MAX)?,
            Now::Disputed { cluster, own } => match check(cluster, Duration::ZERO) {
                Err(refusal @ (Refusal::Expired { .. } | Refusal::NotYet { .. })) => {
                    check(own, Duration::ZERO).map_err(|_| refusal)?;
                    tracing::warn!(%cluster, %own, "clock skew: certificate dates hold by this host's clock only");
                }
                checked => checked?,
            },
        }
        // One that can't be read is refused, with its own words, when its identity is.
        match describe(leaf).is_ok_and(|info| self.scrutiny.is_revoked(&info)) {
            true => Err(Refusal::Revoked(self.whose)),
            false => Ok(()),
        }
    }

    fn check_chain(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        usage: KeyUsage,
        now: UnixTime,
        tolerance: Duration,
    ) -> Result<(), Refusal> {
        let cert = EndEntityCert::try_from(leaf).map_err(Refusal::Broken)?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        let mut at = now;
        // Each certificate of a chain can move the time once.
        for _ in 0..=intermediates.len() + 1 {
            let result =
                cert.verify_for_usage(algorithms, &self.anchors, intermediates, at, usage, None, None);
            let limit = match result {
                Ok(_) if at == now => return Ok(()),
                Ok(_) => {
                    tracing::warn!(
                        certificate_time = %timestamp(at),
                        now = %timestamp(now),
                        "clock skew: certificate dates accepted within 48 h"
                    );
                    return Ok(());
                }
                Err(webpki::Error::CertExpired { not_after, .. }) => not_after,
                Err(webpki::Error::CertNotValidYet { not_before, .. }) => not_before,
                Err(webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey) => {
                    return Err(Refusal::Unsigned(self.whose));
                }
                Err(webpki::Error::RequiredEkuNotFoundContext(_)) => return Err(Refusal::Purpose),
                Err(error) => return Err(Refusal::Broken(error)),
            };
            if now.as_secs().abs_diff(limit.as_secs()) >= tolerance.as_secs() {
                let (at, now) = (timestamp(limit), timestamp(now));
                return Err(match at < now {
                    true => Refusal::Expired { at, now },
                    false => Refusal::NotYet { at, now },
                });
            }
            at = limit;
        }
        Err(Refusal::Broken(webpki::Error::InvalidCertValidity))
    }

    fn check_for_tls(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        usage: KeyUsage,
    ) -> Result<(), rustls::Error> {
        self.check(leaf, intermediates, usage).map_err(|refusal| {
            rustls::Error::InvalidCertificate(match refusal {
                // An alert of its own, so that the other side knows that no later try will do.
                Refusal::Revoked(Whose::Dialer(_)) => CertificateError::Revoked,
                refusal => CertificateError::Other(OtherError(Arc::new(refusal))),
            })
        })
    }

    fn check_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }
}

fn no_tls12() -> rustls::Error {
    rustls::Error::PeerIncompatible(rustls::PeerIncompatible::Tls13RequiredForQuic)
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check_for_tls(end_entity, intermediates, KeyUsage::server_auth())?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check_for_tls(end_entity, intermediates, KeyUsage::client_auth())?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(no_tls12())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// What a certificate says of itself; once it is verified, whom it speaks for: it has exactly one
/// alternative name, and that is one of our URIs. The error is a sentence about the certificate.
pub(crate) fn describe(der: &CertificateDer<'_>) -> Result<CertificateInfo, String> {
    let cert = parse(der)?;
    Ok(CertificateInfo {
        identity: identity(&cert)?,
        not_before: time(cert.validity().not_before)?,
        not_after: time(cert.validity().not_after)?,
        serial: serial(&cert)?,
        issuer: cert.issuer().to_string(),
        fingerprint: Fingerprint::of(der),
    })
}

pub(crate) fn describe_authority(der: &CertificateDer<'_>) -> Result<AuthorityInfo, String> {
    let cert = parse(der)?;
    if !cert.is_ca() {
        return Err("the certificate is not an authority's".into());
    }
    Ok(AuthorityInfo {
        subject: cert.subject().to_string(),
        not_before: time(cert.validity().not_before)?,
        not_after: time(cert.validity().not_after)?,
        serial: serial(&cert)?,
    })
}

fn time(at: x509_parser::time::ASN1Time) -> Result<Timestamp, String> {
    Timestamp::from_second(at.timestamp()).map_err(|_| "the certificate's dates can't be read".into())
}

fn serial(cert: &X509Certificate<'_>) -> Result<Serial, String> {
    let text: String = cert.raw_serial().iter().map(|byte| format!("{byte:02x}")).collect();
    text.parse().map_err(|_| "the certificate's serial number is too long".into())
}

/// Whether `authority` signed this certificate, whatever its dates.
pub(crate) fn signed_by(der: &CertificateDer<'_>, authority: &CertificateDer<'_>) -> Result<bool, String> {
    let cert = EndEntityCert::try_from(der).map_err(|_| "the certificate can't be read")?;
    let anchor = webpki::anchor_from_trusted_cert(authority).map_err(|_| "the authority can't be read")?;
    let algorithms = ring::default_provider().signature_verification_algorithms.all;
    let at = unix_time(describe(der)?.not_after);
    let usage = KeyUsage::client_auth();
    Ok(cert.verify_for_usage(algorithms, &[anchor], &[], at, usage, None, None).is_ok())
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], cert)) => Ok(cert),
        _ => Err("the certificate can't be read".into()),
    }
}

fn identity(cert: &X509Certificate<'_>) -> Result<Identity, String> {
    let names = cert
        .subject_alternative_name()
        .map_err(|_| "the certificate's alternative names can't be read")?
        .map(|extension| extension.value.general_names.as_slice())
        .unwrap_or_default();
    let [GeneralName::URI(uri)] = names else {
        return Err(format!(
            "the certificate has {} alternative names, it must have one, the URI of its identity: issue it with `agent-reach certs issue`",
            names.len()
        ));
    };
    uri.parse().map_err(|error: crate::BadIdentity| error.to_string())
}

/// Whether a private key is the one a certificate was made for.
pub(crate) fn same_key(cert: &CertificateDer<'_>, key: &[u8]) -> Result<(), &'static str> {
    let key = PrivateKeyDer::try_from(key).map_err(|_| "not a private key")?;
    let key = ring::sign::any_supported_type(&key).map_err(|_| "not a key of a supported kind")?;
    let own = key.public_key().ok_or("not a key of a supported kind")?;
    let cert = EndEntityCert::try_from(cert).map_err(|_| "the certificate can't be read")?;
    match own == cert.subject_public_key_info() {
        true => Ok(()),
        false => Err("the key does not belong to the certificate"),
    }
}

fn certificates(pem: &str, name: &str) -> Result<Vec<CertificateDer<'static>>, Error> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|_| Error::certificate(name, "not a PEM file"))?;
    match found.is_empty() {
        true => Err(Error::certificate(name, "holds no certificate in PEM form")),
        false => Ok(found),
    }
}

fn unix_time(at: Timestamp) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(at.as_second()).unwrap_or(0)))
}

fn timestamp(at: UnixTime) -> Timestamp {
    Timestamp::from_second(at.as_secs().min(253_402_207_200) as i64).unwrap_or(Timestamp::MAX)
}
