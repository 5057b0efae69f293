//! What apply says has happened: history, in the past tense. Facts stay in memory; every node sees
//! the same ones in the same order. Not to be confused with events, which are users' data.

use std::sync::Arc;

use crate::{
    agent::AgentRecord,
    certificate::Revocation,
    id::{AgentId, EventType, InstanceId, MsgId, Name},
    message::MessageRecord,
    rules::RulesRecord,
};

#[derive(Clone, Debug, PartialEq)]
pub enum Fact {
    /// A new instance, or a changed registration of the current one.
    Registered(Arc<AgentRecord>),
    /// `instance` lost its place to a later run and is refused from now on.
    Fenced {
        agent_id: AgentId,
        instance: InstanceId,
    },
    Removed {
        agent_id: AgentId,
        instance: InstanceId,
    },
    LivenessChanged(Arc<AgentRecord>),
    /// An operator drained the agent, or took that back; its state may be another.
    DrainChanged(Arc<AgentRecord>),
    /// Accepted, and waiting for an agent.
    Submitted(Arc<MessageRecord>),
    Matched(Arc<MessageRecord>),
    Dispatched(Arc<MessageRecord>),
    Acknowledged(Arc<MessageRecord>),
    /// The attempt ended without a result; the message waits again under the next attempt's number.
    Returned(Arc<MessageRecord>),
    Completed(Arc<MessageRecord>),
    Failed(Arc<MessageRecord>),
    TimedOut(Arc<MessageRecord>),
    /// A slot is free again.
    Freed {
        agent_id: AgentId,
        msg_id: MsgId,
        attempt: u32,
    },
    RulesChanged(Arc<RulesRecord>),
    Revoked(Arc<Revocation>),
    /// A topic has new events.
    Appended(EventType),
    /// Events of a group came back, or its positions are others.
    GroupChanged(Name),
}

impl Fact {
    /// The message this is about, in its new state.
    pub fn message(&self) -> Option<&Arc<MessageRecord>> {
        match self {
            Self::Submitted(record)
            | Self::Matched(record)
            | Self::Dispatched(record)
            | Self::Acknowledged(record)
            | Self::Returned(record)
            | Self::Completed(record)
            | Self::Failed(record)
            | Self::TimedOut(record) => Some(record),
            _ => None,
        }
    }
}
