//! What the cluster keeps about certificates: which are revoked, by whom, and for how long that must
//! be known.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{command::Principal, id::Serial, stamp::Stamp};

/// A certificate begins so long before it is made, and a date that is wrong by less is taken for a
/// wrong clock where the cluster's calendar is not known. In seconds.
pub const TOLERANCE_S: u64 = 48 * 3_600;
/// The longest that a certificate is valid, and its authority. In seconds.
pub const LIFETIME_MAX_S: u64 = 10 * 365 * 86_400;
/// Revocations that are kept at once. From `REVOCATIONS_FEW` on, each goes when what it revokes has ended
/// by itself.
pub const REVOCATIONS_MAX: usize = 10_000;
pub const REVOCATIONS_FEW: usize = 1_000;

/// Of a certificate's bytes as they are on the wire (SHA-256 of the DER). Written in lower-case
/// hexadecimal; read with colons and capitals too, as other tools write it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    pub fn of(der: &[u8]) -> Self {
        Self(Sha256::digest(der).into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a fingerprint is 64 hexadecimal digits")]
pub struct BadFingerprint;

impl FromStr for Fingerprint {
    type Err = BadFingerprint;

    fn from_str(text: &str) -> Result<Self, BadFingerprint> {
        let digits: Option<Vec<u8>> =
            text.chars().filter(|c| *c != ':').map(|c| c.to_digit(16).map(|digit| digit as u8)).collect();
        let bytes: Vec<u8> = digits
            .ok_or(BadFingerprint)?
            .chunks(2)
            .map(|pair| pair.iter().fold(0, |n, d| n << 4 | d))
            .collect();
        let is_whole = text.chars().filter(|c| *c != ':').count() == 64;
        bytes.try_into().ok().filter(|_| is_whole).map(Self).ok_or(BadFingerprint)
    }
}

/// What is refused.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Revoked {
    Certificate(Fingerprint),
    Serial(Serial),
    /// Every certificate of this identity that was made until then, in seconds since 1970. One that
    /// is made later is good.
    Identity {
        principal: Principal,
        made_until_s: u64,
    },
}

/// Also the key of its row, so it never changes.
impl fmt::Display for Revoked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Certificate(fingerprint) => write!(f, "sha256:{fingerprint}"),
            Self::Serial(serial) => write!(f, "serial:{serial}"),
            Self::Identity { principal, made_until_s } => write!(f, "identity:{principal}:{made_until_s}"),
        }
    }
}

/// One line of the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    pub revoked: Revoked,
    /// Whose certificate it is, where the author knew it.
    pub whose: Option<Principal>,
    /// When the certificate ends by itself, in seconds since 1970, where the author knew it.
    pub ends_s: Option<u64>,
    pub author: Principal,
    pub at: Stamp,
}

impl Revocation {
    /// Until when it must be known, in Unix milliseconds: afterwards the dates alone refuse whatever
    /// it could revoke.
    pub fn keep_until_ms(&self) -> u64 {
        let made_latest_s = match self.revoked {
            Revoked::Identity { made_until_s, .. } => made_until_s,
            _ => self.at.wall_ms / 1_000,
        };
        let ends_s = self.ends_s.unwrap_or(made_latest_s.saturating_add(LIFETIME_MAX_S));
        ends_s.saturating_add(TOLERANCE_S).saturating_mul(1_000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Name;

    #[test]
    fn a_fingerprint_has_one_spelling_and_is_read_in_others() {
        let known = Fingerprint::of(b"abc");
        let text = known.to_string();
        assert_eq!(text, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(text.parse(), Ok(known));
        let pairs: Vec<String> =
            text.as_bytes().chunks(2).map(|pair| String::from_utf8_lossy(pair).to_uppercase()).collect();
        assert_eq!(pairs.join(":").parse(), Ok(known));
        for bad in ["", "ab", &text[1..], &format!("{text}0"), &format!("{text}00"), &text.replace('b', "g")]
        {
            assert_eq!(bad.parse::<Fingerprint>(), Err(BadFingerprint), "{bad}");
        }
    }

    #[test]
    fn a_revocation_is_kept_until_the_dates_alone_refuse() {
        let at = Stamp { cluster_ms: 5, wall_ms: 1_000_000 };
        let author = Principal::User(Name::parse("admin").unwrap());
        let revoked = Revoked::Certificate(Fingerprint::of(b"a"));
        let known = Revocation { revoked, whose: None, ends_s: Some(2_000), author, at };
        assert_eq!(known.keep_until_ms(), (2_000 + TOLERANCE_S) * 1_000);
        let unknown = Revocation { ends_s: None, ..known.clone() };
        assert_eq!(unknown.keep_until_ms(), (1_000 + LIFETIME_MAX_S + TOLERANCE_S) * 1_000);
        let principal = Principal::User(Name::parse("ann").unwrap());
        let whole = Revocation { revoked: Revoked::Identity { principal, made_until_s: 7 }, ..unknown };
        assert_eq!(whole.keep_until_ms(), (7 + LIFETIME_MAX_S + TOLERANCE_S) * 1_000);
        assert_eq!(whole.revoked.to_string(), "identity:user/ann:7");
    }
}
