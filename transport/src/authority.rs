//! A cluster's certificate authority: makes keys and signs identities. Each door has its own, so
//! that a client's certificate can never open the peers' door.

use std::{fmt, time::Duration};

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType,
};
use reach_protocol::{
    Fingerprint, Principal,
    certificate::{LIFETIME_MAX_S, TOLERANCE_S},
    id::{Name, Serial},
};
use rustls_pki_types::{CertificateDer, pem::PemObject};

use crate::{error::Error, identity::Identity, tls};

/// How long before its making a certificate becomes valid: a host whose clock is late by up to
/// this is not cut off.
pub const EARLY: Duration = Duration::from_secs(TOLERANCE_S);
const AUTHORITY_LIFETIME: Duration = Duration::from_secs(LIFETIME_MAX_S);

pub struct Authority {
    cert_pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A new certificate with its key.
#[derive(Clone)]
pub struct Issued {
    pub cert_pem: String,
    pub key_pem: String,
    pub not_after: Timestamp,
    pub serial: Serial,
    pub fingerprint: Fingerprint,
}

impl Authority {
    /// Makes a new one with a new key. `label` tells authorities of a cluster apart: `client`, `peer`.
    pub fn new(cluster: &Name, label: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::CommonName, format!("Agent-Reach {cluster} {label} authority"));
        let now = Timestamp::now();
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + since_epoch(now - EARLY);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_epoch(now + AUTHORITY_LIFETIME);
        let key = KeyPair::generate().expect("the system's random source works");
        let cert = params.self_signed(&key).expect("our own parameters are signable");
        Self { cert_pem: cert.pem(), issuer: Issuer::new(params, key) }
    }

    pub fn from_pem(cert_pem: &str, key_pem: &str) -> Result<Self, Error> {
        let bad = |path: &str, error: &dyn fmt::Display| Error::certificate(path, error.to_string());
        let key =
            KeyPair::from_pem(key_pem).map_err(|_| bad("authority key", &"not a private key in PEM form"))?;
        let der = CertificateDer::from_pem_slice(cert_pem.as_bytes())
            .map_err(|_| bad("authority certificate", &"not a certificate in PEM form"))?;
        tls::same_key(&der, &key.serialize_der()).map_err(|reason| bad("authority key", &reason))?;
        let issuer =
            Issuer::from_ca_cert_der(&der, key).map_err(|error| bad("authority certificate", &error))?;
        Ok(Self { cert_pem: cert_pem.to_owned(), issuer })
    }

    pub fn cert_pem(&self) -> &str {
        &self.cert_pem
    }

    pub fn key_pem(&self) -> String {
        self.issuer.key().serialize_pem()
    }

    /// Whether it signed this certificate, whatever its dates.
    pub fn signed(&self, cert_pem: &str) -> Result<bool, Error> {
        tls::signed_by(&first(cert_pem)?, &first(&self.cert_pem)?).map_err(bad)
    }

    /// A certificate for one identity, valid from 48 h ago until `lifetime` from now.
    pub fn issue(&self, identity: &Identity, lifetime: Duration) -> Result<Issued, Error> {
        let now = Timestamp::now();
        self.issue_between(identity, now - EARLY, now + lifetime)
    }

    /// The same with both dates given.
    pub fn issue_between(
        &self,
        identity: &Identity,
        not_before: Timestamp,
        not_after: Timestamp,
    ) -> Result<Issued, Error> {
        let bad = |error: rcgen::Error| Error::certificate(identity.to_string(), error.to_string());
        let key = KeyPair::generate().map_err(bad)?;
        let mut params = CertificateParams::default();
        let uri = identity.to_string();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, identity.principal.to_string());
        params.subject_alt_names = vec![SanType::URI(uri.try_into().expect("ids are ASCII"))];
        params.use_authority_key_identifier_extension = true;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = match identity.principal {
            Principal::Node(_) => {
                vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
            }
            _ => vec![ExtendedKeyUsagePurpose::ClientAuth],
        };
        params.not_before = rcgen::date_time_ymd(1970, 1, 1) + since_epoch(not_before);
        params.not_after = rcgen::date_time_ymd(1970, 1, 1) + since_epoch(not_after);
        let cert_pem = params.signed_by(&key, &self.issuer).map_err(bad)?.pem();
        let info = describe(&cert_pem)?;
        let CertificateInfo { not_after, serial, fingerprint, .. } = info;
        Ok(Issued { cert_pem, key_pem: key.serialize_pem(), not_after, serial, fingerprint })
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").finish_non_exhaustive()
    }
}

impl fmt::Debug for Issued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Issued")
            .field("serial", &self.serial)
            .field("not_after", &self.not_after)
            .finish_non_exhaustive()
    }
}

/// What a certificate says of itself; nothing is verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateInfo {
    pub identity: Identity,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    pub serial: Serial,
    pub issuer: String,
    pub fingerprint: Fingerprint,
}

impl CertificateInfo {
    /// When it was made, in seconds since 1970: each begins `EARLY`.
    pub fn made_s(&self) -> u64 {
        u64::try_from((self.not_before + EARLY).as_second()).unwrap_or(0)
    }
}

/// What an authority's certificate says of itself; nothing is verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuthorityInfo {
    pub subject: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    pub serial: Serial,
}

/// Reads the first certificate of a PEM text.
pub fn describe(cert_pem: &str) -> Result<CertificateInfo, Error> {
    tls::describe(&first(cert_pem)?).map_err(bad)
}

/// Reads the first certificate of a PEM text, which must be an authority's.
pub fn describe_authority(cert_pem: &str) -> Result<AuthorityInfo, Error> {
    tls::describe_authority(&first(cert_pem)?).map_err(bad)
}

fn first(cert_pem: &str) -> Result<CertificateDer<'static>, Error> {
    CertificateDer::from_pem_slice(cert_pem.as_bytes())
        .map_err(|_| bad("not a certificate in PEM form".into()))
}

fn bad(reason: String) -> Error {
    Error::certificate("certificate", reason)
}

/// rcgen counts time in a type of another crate; seconds since its epoch carry it over.
fn since_epoch(at: Timestamp) -> Duration {
    at.duration_since(Timestamp::UNIX_EPOCH).max(SignedDuration::ZERO).unsigned_abs()
}
