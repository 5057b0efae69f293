//! What the first frame of a stream between replicas says, and the bytes of every other one.

use bytes::Bytes;
use reach_protocol::codec::{self, DecodeError};
use reach_storage::CheckpointFile;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::types::{SnapshotMeta, TransferRequest, Vote, VoteRequest};

/// The one group there is today.
pub(crate) const GROUP: u32 = 0;

/// First on every stream.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Opening {
    pub group: u32,
    pub ask: Ask,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Followed by `AppendRequest`s, answered by an `AppendResult` each, in order.
    Append,
    /// Answered by a `VoteResponse`.
    Vote(VoteRequest),
    PreVote(VoteRequest),
    /// Answered by a `TransferResponse`.
    Transfer(TransferRequest),
    /// Followed by the files' bytes in order, answered by a `SnapshotResponse` once installed.
    Snapshot(Box<Offer>),
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    pub vote: Vote,
    pub meta: SnapshotMeta,
    pub files: Vec<CheckpointFile>,
}

pub(crate) fn open(ask: Ask) -> Bytes {
    codec::encode(&Opening { group: GROUP, ask })
}

pub(crate) fn encode<T: Serialize>(value: &T) -> Bytes {
    codec::encode(value)
}

pub(crate) fn decode<T: DeserializeOwned>(what: &'static str, frame: &[u8]) -> Result<T, DecodeError> {
    codec::decode(what, frame)
}
