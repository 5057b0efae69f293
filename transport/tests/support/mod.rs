//! A cluster's authorities, endpoints on loopback, and a stranger who speaks QUIC without our rules.
#![allow(dead_code)]

use std::{future::Future, net::SocketAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use reach_protocol::{
    Principal,
    id::{AgentId, Name, NodeId},
};
use reach_transport::{Authority, Connection, Credentials, Door, Endpoint, Identity, Issued, Options};
use rustls::{
    DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject};

pub const HOUR: Duration = Duration::from_secs(3600);

pub fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

pub fn node(id: u64) -> Identity {
    Identity::new(name("prod"), Principal::Node(NodeId(id)))
}

pub fn user(text: &str) -> Identity {
    Identity::new(name("prod"), Principal::User(name(text)))
}

pub fn agent(text: &str) -> Identity {
    Identity::new(name("prod"), Principal::Agent(AgentId::parse(text).unwrap()))
}

pub fn loopback() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

/// Nothing here takes long; what hangs fails.
pub async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(Duration::from_secs(30), future).await.expect("done within 30 s")
}

pub struct Cluster {
    pub clients: Authority,
    pub peers: Authority,
}

impl Cluster {
    pub fn new() -> Self {
        let prod = name("prod");
        Self { clients: Authority::new(&prod, "client"), peers: Authority::new(&prod, "peer") }
    }

    pub fn authority(&self, door: Door) -> &Authority {
        match door {
            Door::Client => &self.clients,
            Door::Peer => &self.peers,
        }
    }

    pub fn credentials(&self, door: Door, identity: &Identity) -> Credentials {
        let authority = self.authority(door);
        credentials(authority, authority.issue(identity, 24 * HOUR).unwrap())
    }

    pub fn server(&self, door: Door, id: u64) -> Endpoint {
        self.server_with(door, id, options(door))
    }

    pub fn server_with(&self, door: Door, id: u64, options: Options) -> Endpoint {
        let credentials = self.credentials(door, &node(id));
        Endpoint::server(loopback(), door, name("prod"), &credentials, options).unwrap()
    }

    pub fn dialer(&self, door: Door, identity: &Identity) -> Endpoint {
        self.dialer_with(door, identity, options(door))
    }

    pub fn dialer_with(&self, door: Door, identity: &Identity, options: Options) -> Endpoint {
        Endpoint::client(door, &self.credentials(door, identity), options).unwrap()
    }

    /// A connection at the client door, both sides of it, and the endpoints that carry it.
    pub async fn pair(&self, server: Options, client: Options) -> Pair {
        let listener = self.server_with(Door::Client, 1, server);
        let dialer = self.dialer_with(Door::Client, &user("ann"), client);
        let prod = name("prod");
        let (accepted, dialled) = within(async {
            tokio::join!(listener.accept(), dialer.connect(listener.local_addr(), &prod, None))
        })
        .await;
        Pair { server: accepted.unwrap(), client: dialled.unwrap(), listener, dialer }
    }
}

pub struct Pair {
    pub server: Connection,
    pub client: Connection,
    pub listener: Endpoint,
    pub dialer: Endpoint,
}

pub fn options(door: Door) -> Options {
    match door {
        Door::Client => Options::client(),
        // The default is for real networks; a busy test machine pauses for longer.
        Door::Peer => Options { idle_timeout: Duration::from_secs(10), ..Options::peer() },
    }
}

pub fn credentials(authority: &Authority, issued: Issued) -> Credentials {
    Credentials {
        ca_pem: authority.cert_pem().to_owned(),
        cert_pem: issued.cert_pem,
        key_pem: issued.key_pem,
    }
}

pub fn hours_from_now(hours: i64) -> Timestamp {
    Timestamp::now() + jiff::SignedDuration::from_hours(hours)
}

/// A certificate with any alternative names, signed by `authority`.
pub fn forge(authority: &Authority, names: Vec<rcgen::SanType>) -> Credentials {
    use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, Issuer, KeyPair};
    let ca_key = KeyPair::from_pem(&authority.key_pem()).unwrap();
    let issuer = Issuer::from_ca_cert_pem(authority.cert_pem(), ca_key).unwrap();
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.subject_alt_names = names;
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    Credentials {
        ca_pem: authority.cert_pem().to_owned(),
        cert_pem: params.signed_by(&key, &issuer).unwrap().pem(),
        key_pem: key.serialize_pem(),
    }
}

pub fn uri(text: &str) -> rcgen::SanType {
    rcgen::SanType::URI(text.try_into().unwrap())
}

/// Dials without checking anything, and shows whatever certificate it was given.
pub async fn stranger(
    addr: SocketAddr,
    alpn: &[u8],
    credentials: Option<&Credentials>,
) -> Result<(quinn::Endpoint, quinn::Connection), quinn::ConnectionError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Trusting));
    let mut config = match credentials {
        None => builder.with_no_client_auth(),
        Some(credentials) => {
            let chain = vec![CertificateDer::from_pem_slice(credentials.cert_pem.as_bytes()).unwrap()];
            let key = PrivateKeyDer::from_pem_slice(credentials.key_pem.as_bytes()).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    let config = quinn::crypto::rustls::QuicClientConfig::try_from(config).unwrap();
    let endpoint = quinn::Endpoint::client(loopback()).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(config));
    let connection = endpoint.connect_with(config, addr, "anything").unwrap().await?;
    Ok((endpoint, connection))
}

#[derive(Debug)]
struct Trusting;

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
