//! The second filter: whether an agent can take a task now.

use reach_protocol::AgentState;

use crate::view::Agent;

/// How an agent stands towards new tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Ready, with a free slot.
    Free,
    /// Ready, at its `max_concurrency`.
    Saturated,
    /// Draining, offline, or about to change.
    NotReady,
}

impl Standing {
    pub(crate) fn of(agent: &Agent) -> Self {
        if agent.state != AgentState::Ready || agent.changing {
            Self::NotReady
        } else if agent.taken >= agent.max_concurrency {
            Self::Saturated
        } else {
            Self::Free
        }
    }
}
