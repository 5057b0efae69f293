//! The types openraft is instantiated with, and short names for those it derives from them. Apart,
//! so that its generics are spelt once.

use std::fmt;

use bytes::Bytes;
use openraft::{alias, impls::leader_id_std, storage::RaftStateMachine};
use reach_protocol::Reply;
use serde::{Deserialize, Serialize};

use crate::{applier::Applier, membership::Member};

openraft::declare_raft_types!(
    /// At most one leader a term (`leader_id_std`): apply tells by the term alone whose decision an
    /// entry is.
    pub(crate) Group:
        D = Proposal,
        R = Replies,
        NodeId = u64,
        Node = Member,
        LeaderId = leader_id_std::LeaderId<u64, u64>,
);

pub(crate) type Raft = openraft::Raft<Group, Applier>;
pub(crate) type Entry = alias::EntryOf<Group>;
pub(crate) type LogId = alias::LogIdOf<Group>;
pub(crate) type Vote = alias::VoteOf<Group>;
pub(crate) type Membership = alias::StoredMembershipOf<Group>;
pub(crate) type SnapshotMeta = alias::SnapshotMetaOf<Group>;
pub(crate) type Snapshot = alias::SnapshotOf<Group, <Applier as RaftStateMachine<Group>>::SnapshotData>;
pub(crate) type AppendRequest = openraft::raft::AppendEntriesRequest<Group>;
pub(crate) type AppendResult = openraft::raft::StreamAppendResult<Group>;
pub(crate) type VoteRequest = openraft::raft::VoteRequest<Group>;
pub(crate) type VoteResponse = openraft::raft::VoteResponse<Group>;
pub(crate) type TransferRequest = openraft::raft::TransferLeaderRequest<Group>;
pub(crate) type TransferResponse = openraft::raft::TransferLeaderResponse<Group>;
pub(crate) type SnapshotResponse = openraft::raft::SnapshotResponse<Group>;

/// A `reach_protocol::Entry`, encoded once by its proposer and carried as it is from then on.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Proposal(pub Bytes);

impl fmt::Debug for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// One reply for each command of an entry. Openraft's own entries have none.
#[derive(PartialEq, Serialize, Deserialize)]
pub(crate) struct Replies(pub Vec<Reply>);

impl fmt::Debug for Replies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} replies", self.0.len())
    }
}

/// The term of the leader that appended the entry.
pub(crate) fn term(log_id: &LogId) -> u64 {
    log_id.committed_leader_id().term
}
