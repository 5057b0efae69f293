//! Who belongs to the group, and how a replica reaches the others.

use std::fmt;

use futures_util::future::BoxFuture;
use reach_protocol::NodeId;
use reach_transport::Duplex;
use serde::{Deserialize, Serialize};

/// What the group knows of a node: replicated with the membership.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Where other nodes reach it.
    pub peer_addr: String,
    /// Where clients reach it.
    pub client_addr: String,
}

/// Opens streams to other nodes. A stream it returns arrives at the other node's
/// [`Replica::serve`](crate::Replica::serve).
///
/// Callers put a deadline on the future and drop it when that passes, so a connection under way
/// should go on without it.
pub trait Dial: Send + Sync + 'static {
    fn dial(&self, to: NodeId, member: &Member) -> BoxFuture<'static, Result<Duplex, DialError>>;
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct DialError(String);

impl DialError {
    pub fn new(reason: impl fmt::Display) -> Self {
        Self(reason.to_string())
    }
}
