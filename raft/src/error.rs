//! What can go wrong, apart for what the caller does about it, and the one place where a failure
//! that ends the process is announced.

use std::{future::Future, io, time::Duration};

use reach_protocol::{NodeId, codec::DecodeError};
use tokio::sync::watch;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("raft options: {0}")]
    Options(String),
    #[error("the group has been initialised before")]
    AlreadyInitialised,
    #[error("node {0} is not among the members")]
    NotAMember(NodeId),
    /// The disk failed: the process has to end.
    #[error("{what}: {error}")]
    Disk { what: &'static str, error: io::Error },
    /// This replica has stopped; `Replica::fatal` says why, unless it was asked to.
    #[error("the replica has stopped")]
    Stopped,
    #[error("no {what} within {waited:?}")]
    Late { what: &'static str, waited: Duration },
    /// An incoming stream ended early or said something unexpected.
    #[error("raft stream: {0}")]
    Stream(String),
    #[error("raft stream: {0}")]
    Decode(#[from] DecodeError),
    #[error("leadership did not go to node {to}: {reason}")]
    Transfer { to: NodeId, reason: &'static str },
}

/// Why a proposal has no replies.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProposeError {
    /// Certainly not done; `leader` is the place to ask, if one is known.
    #[error("this node does not lead")]
    NotLeader { leader: Option<NodeId> },
    /// Certainly not done: this node leads in another term than the entry names, or too many
    /// proposals are in flight.
    #[error("the proposal was discarded")]
    Discarded,
    /// Certainly not done, and never will be: larger than [`ENTRY_MAX`](crate::ENTRY_MAX).
    #[error("an entry of {bytes} bytes; at most {max} are allowed")]
    TooLarge { bytes: usize, max: usize },
    /// It entered the log, and may be done now, later or never.
    #[error("the outcome of the proposal is unknown")]
    Unknown,
    /// The replica has stopped; certainly not done.
    #[error("the replica has stopped")]
    Stopped,
}

/// The first failure that ends this replica.
#[derive(Clone, Debug)]
pub(crate) struct Fatal(watch::Sender<Option<String>>);

impl Fatal {
    pub fn new() -> Self {
        Self(watch::Sender::new(None))
    }

    pub fn report(&self, reason: impl Into<String>) {
        let reason = reason.into();
        self.0.send_if_modified(|first| {
            let is_first = first.is_none();
            if is_first {
                tracing::error!(reason, "replica failed");
                *first = Some(reason);
            }
            is_first
        });
    }

    /// Resolves with the reason; never, when nothing fails.
    pub fn wait(&self) -> impl Future<Output = String> + Send + use<> {
        let mut reason = self.0.subscribe();
        async move {
            let found = reason.wait_for(Option::is_some).await.ok().and_then(|reason| reason.clone());
            match found {
                Some(reason) => reason,
                None => std::future::pending().await,
            }
        }
    }
}
