//! What a caller or an agent can run into. No variant carries content of a message.

use reach_protocol::{Code, ErrorReply, MsgId};

use crate::inbox::InboxError;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The cluster said no, or still said "not now" at the deadline.
    #[error("{0}")]
    Refused(Box<ErrorReply>),
    /// The caller's own time is over. The message was accepted and goes on: ask by its id.
    #[error("no end of {msg_id} within the time given; it goes on: ask again by its id")]
    Timeout { msg_id: MsgId },
    /// No answer came. What was asked may have happened, or may still.
    #[error("no answer within the time given{}; whether it happened is unknown", of(.msg_id))]
    Unknown { msg_id: Option<MsgId> },
    /// Nothing was sent: no node took a connection. The reason names each node's own.
    #[error("no node could be reached: {reason}")]
    Unreachable { endpoints: Vec<String>, reason: String },
    /// Nothing was sent: the nodes that answered and this side don't accept each other's certificate,
    /// or the address is no port for clients. Trying again helps only after something changed.
    #[error("no node accepts this connection: {reason}")]
    Unauthenticated { endpoints: Vec<String>, reason: String },
    /// This client or agent was closed.
    #[error("the connection has been closed")]
    Closed,
    #[error(transparent)]
    Inbox(#[from] InboxError),
    /// An option, a context folder or an agent's declaration is wrong; nothing was tried.
    #[error("{0}")]
    Invalid(String),
    #[error(transparent)]
    Transport(#[from] reach_transport::Error),
    /// An answer of another kind than was asked for.
    #[error("a node answered a {asked} with something else")]
    Unexpected { asked: &'static str },
}

fn of(msg_id: &Option<MsgId>) -> String {
    msg_id.as_ref().map(|msg_id| format!(" for {msg_id}")).unwrap_or_default()
}

impl Error {
    /// Whether the same request, with the same `msg_id`, may be sent again.
    pub fn retryable(&self) -> bool {
        match self {
            Self::Refused(reply) => reply.retryable,
            Self::Timeout { .. } | Self::Unknown { .. } | Self::Unreachable { .. } => true,
            _ => false,
        }
    }

    /// The closed list's word for it. A node that can't be reached counts as `no_leader`.
    pub fn code(&self) -> Code {
        match self {
            Self::Refused(reply) => reply.code,
            Self::Timeout { .. } | Self::Unknown { .. } => Code::OutcomeUnknown,
            Self::Unreachable { .. } => Code::NoLeader,
            Self::Unauthenticated { .. } => Code::Unauthenticated,
            Self::Closed | Self::Invalid(_) | Self::Transport(_) => Code::Invalid,
            Self::Inbox(InboxError::Locked { .. }) => Code::Invalid,
            Self::Inbox(_) | Self::Unexpected { .. } => Code::Internal,
        }
    }

    /// The message to ask about, when there is one.
    pub fn msg_id(&self) -> Option<&MsgId> {
        match self {
            Self::Refused(reply) => reply.msg_id.as_ref(),
            Self::Timeout { msg_id } => Some(msg_id),
            Self::Unknown { msg_id } => msg_id.as_ref(),
            _ => None,
        }
    }

    /// The answer of a later run, or of a cluster that removed this agent.
    pub(crate) fn is(&self, code: Code) -> bool {
        matches!(self, Self::Refused(reply) if reply.code == code)
    }
}

impl From<Box<ErrorReply>> for Error {
    fn from(reply: Box<ErrorReply>) -> Self {
        Self::Refused(reply)
    }
}
