//! How values become bytes: one version byte, then postcard. Trailing bytes are an error, and so
//! is a version this build does not know; both are named, neither is guessed at.

use std::{fmt, marker::PhantomData};

use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::DeserializeOwned};
use sha2::{Digest, Sha256};

/// The version written by this build, for the wire and the disk alike.
pub const VERSION: u8 = 1;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("no bytes where a {what} was expected")]
    Empty { what: &'static str },
    #[error("a {what} of format version {found}; this build reads up to {VERSION}: upgrade this node first")]
    Version { what: &'static str, found: u8 },
    #[error("a damaged or foreign {what} ({reason})")]
    Malformed { what: &'static str, reason: String },
    #[error("{extra} bytes after a {what}")]
    Trailing { what: &'static str, extra: usize },
}

pub fn encode<T: Serialize>(value: &T) -> Bytes {
    encode_vec(value).into()
}

pub fn encode_vec<T: Serialize>(value: &T) -> Vec<u8> {
    let start = vec![VERSION];
    postcard::to_extend(value, start).expect("our own types have no unencodable values")
}

/// Decodes what `encode` made. `what` names the thing in errors.
pub fn decode<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, DecodeError> {
    let (version, body) = bytes.split_first().ok_or(DecodeError::Empty { what })?;
    if *version != VERSION {
        return Err(DecodeError::Version { what, found: *version });
    }
    let (value, rest) = postcard::take_from_bytes(body)
        .map_err(|error| DecodeError::Malformed { what, reason: error.to_string() })?;
    if rest.is_empty() { Ok(value) } else { Err(DecodeError::Trailing { what, extra: rest.len() }) }
}

/// A value that passes through in its encoded form: made once where it enters, read where somebody
/// looks inside, and carried by everyone between as bytes. Cheap to clone. `Debug` shows its size
/// only.
#[derive(Clone, PartialEq, Eq)]
pub struct Encoded<T> {
    bytes: Bytes,
    of: PhantomData<fn() -> T>,
}

impl<T: Serialize + DeserializeOwned> Encoded<T> {
    pub fn new(value: &T) -> Self {
        Self::from_bytes(encode(value))
    }

    /// Takes bytes that `new` made; whether they are that is seen when they are decoded.
    pub fn from_bytes(bytes: Bytes) -> Self {
        Self { bytes, of: PhantomData }
    }

    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    pub fn decode(&self, what: &'static str) -> Result<T, DecodeError> {
        decode(what, &self.bytes)
    }
}

impl<T> fmt::Debug for Encoded<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} encoded bytes", self.bytes.len())
    }
}

impl<T> Serialize for Encoded<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.bytes.serialize(serializer)
    }
}

impl<'de, T> Deserialize<'de> for Encoded<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self { bytes: Bytes::deserialize(deserializer)?, of: PhantomData })
    }
}

/// SHA-256, cut to 16 bytes: equal content has equal digests.
pub fn digest(bytes: &[u8]) -> [u8; 16] {
    let full = Sha256::digest(bytes);
    full[..16].try_into().expect("a SHA-256 has 32 bytes")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frame::{ClientFrame, NodeFrame};

    #[test]
    fn foreign_bytes_are_named() {
        assert_eq!(decode::<u8>("number", &[]), Err(DecodeError::Empty { what: "number" }));
        assert_eq!(decode::<u8>("number", &[9, 1]), Err(DecodeError::Version { what: "number", found: 9 }));
        assert_eq!(
            decode::<u8>("number", &[1, 1, 2]),
            Err(DecodeError::Trailing { what: "number", extra: 1 })
        );
        assert_eq!(decode::<u8>("number", &encode(&7u8)), Ok(7));
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = bytes;
            bytes.insert(0, VERSION);
            let _ = decode::<ClientFrame>("frame", &bytes);
            let _ = decode::<NodeFrame>("frame", &bytes);
            let _ = decode::<crate::command::Entry>("entry", &bytes);
        }
    }
}
