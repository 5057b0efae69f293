//! A message as the cluster keeps it: its state, who holds it, and the hops of its way.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    command::Principal,
    envelope::Target,
    error::{Code, ErrorReply},
    id::{AgentId, InstanceId, MsgId, TraceId},
    money::Money,
    stamp::Stamp,
};

/// The run of an agent that an attempt was given to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Holder {
    pub agent_id: AgentId,
    pub instance: InstanceId,
}

/// `pending → matched → dispatched → acknowledged → completed`, or another end. An end is final.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum MessageState {
    /// Waits for an agent.
    Pending {
        reason: PendingReason,
    },
    /// An agent was chosen and one of its slots taken.
    Matched {
        holder: Holder,
    },
    /// Sent to the agent; not yet answered.
    Dispatched {
        holder: Holder,
    },
    /// Stored at the agent: it may be running.
    Acknowledged {
        holder: Holder,
    },
    Completed {
        holder: Holder,
        outcome: Outcome,
    },
    Failed {
        holder: Option<Holder>,
        error: Box<ErrorReply>,
    },
    TimedOut {
        holder: Option<Holder>,
        cause: TimeoutCause,
    },
}

/// Why there is no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeoutCause {
    /// Its deadline passed.
    Expired,
    /// It was tried as often as it may be, and its agents were lost or not reached.
    AttemptsExhausted,
}

impl TimeoutCause {
    /// The code that its callers are told.
    pub fn code(self) -> Code {
        match self {
            Self::Expired => Code::Expired,
            Self::AttemptsExhausted => Code::AttemptsExhausted,
        }
    }
}

/// What the agent reported with its result; the result itself is a row of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub excerpt: String,
    pub cost: Option<Money>,
    pub result_bytes: u64,
}

impl MessageState {
    pub fn name(&self) -> StateName {
        match self {
            Self::Pending { .. } => StateName::Pending,
            Self::Matched { .. } => StateName::Matched,
            Self::Dispatched { .. } => StateName::Dispatched,
            Self::Acknowledged { .. } => StateName::Acknowledged,
            Self::Completed { .. } => StateName::Completed,
            Self::Failed { .. } => StateName::Failed,
            Self::TimedOut { .. } => StateName::Timeout,
        }
    }

    pub fn is_final(&self) -> bool {
        matches!(self, Self::Completed { .. } | Self::Failed { .. } | Self::TimedOut { .. })
    }

    /// Who holds the current attempt, or held the last one.
    pub fn holder(&self) -> Option<&Holder> {
        match self {
            Self::Pending { .. } => None,
            Self::Matched { holder }
            | Self::Dispatched { holder }
            | Self::Acknowledged { holder }
            | Self::Completed { holder, .. } => Some(holder),
            Self::Failed { holder, .. } | Self::TimedOut { holder, .. } => holder.as_ref(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateName {
    Pending,
    Matched,
    Dispatched,
    Acknowledged,
    Completed,
    Failed,
    Timeout,
}

impl StateName {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Matched => "matched",
            Self::Dispatched => "dispatched",
            Self::Acknowledged => "acknowledged",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Timeout => "timeout",
        }
    }
}

impl fmt::Display for StateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Why a message waits, or why an attempt ended without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PendingReason {
    /// Every agent with the required capabilities is at its `max_concurrency`.
    Saturated,
    /// Agents declare the capabilities, but none of them is ready.
    NoneReady,
    /// The choice no longer held when it was applied; it is made again.
    DecisionStale,
    /// The agent did not say `received` in time.
    DeliveryFailed,
    /// The agent went offline or was removed, or another run of it took over before it had said
    /// `received`.
    AgentLost,
}

impl PendingReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Saturated => "saturated",
            Self::NoneReady => "none_ready",
            Self::DecisionStale => "decision_stale",
            Self::DeliveryFailed => "delivery_failed",
            Self::AgentLost => "agent_lost",
        }
    }
}

/// A closed list: what the caller should know although the message went on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Warning {
    /// No preferred agent could take it.
    AffinityUnmet,
    /// Its deadline was read off the node's calendar, since the sender's clock was not given.
    ClockUnknown,
    /// It waits because all who could take it are busy.
    CapacityHint,
}

impl Warning {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AffinityUnmet => "affinity_unmet",
            Self::ClockUnknown => "clock_unknown",
            Self::CapacityHint => "capacity_hint",
        }
    }
}

/// The row of one message. Its envelope and its result are rows of their own, on disk only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MessageRecord {
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    /// Orders the trace; assigned by the cluster when the caller gave none.
    pub flow_seq: u64,
    pub parent: Option<MsgId>,
    pub source: AgentId,
    pub principal: Principal,
    pub target: Target,
    /// Of the caller's fields without transport times: tells a repeat from a conflict.
    pub content_hash: [u8; 16],
    pub shape: String,
    pub accepted: Stamp,
    /// Cluster time of its deadline.
    pub expires_ms: u64,
    pub state: MessageState,
    pub since: Stamp,
    /// The attempt's number (`retry_seq`), from 0.
    pub attempt: u32,
    /// Attempts that ended after `received`, or before it once `attempts_max` had: after each of them
    /// it waits longer. At most [`RETRY_AFTER_MS`] has.
    pub retries: u32,
    /// Cluster time before which its next attempt doesn't begin; set while it waits for that.
    pub retry_at_ms: Option<u64>,
    /// Agents that lost an attempt; left out of the next choice.
    pub avoid: Vec<AgentId>,
    pub warnings: Vec<Warning>,
}

/// How long after the loss of an attempt the next one begins at the earliest, in milliseconds: by how
/// many have been lost before. After so many it ends.
pub const RETRY_AFTER_MS: [u64; 3] = [1_000, 4_000, 16_000];

/// What is left to do by hand: a message that ended without a result although agents had been given
/// it. The message itself keeps its envelope.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeadLetter {
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    pub at: Stamp,
    pub cause: DeadCause,
    /// How many there were.
    pub attempts: u32,
    /// Who had the last one.
    pub agent_id: Option<AgentId>,
}

/// How the last attempt of a dead letter ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeadCause {
    /// Its agent was lost.
    AgentLost,
    /// Its agent did not say `received` in time.
    DeliveryFailed,
    /// The message's deadline passed.
    Expired,
}

impl DeadCause {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AgentLost => "agent_lost",
            Self::DeliveryFailed => "delivery_failed",
            Self::Expired => "expired",
        }
    }
}

/// One transition, as it stands in the trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hop {
    pub msg_id: MsgId,
    pub at: Stamp,
    pub from: Option<StateName>,
    pub to: StateName,
    pub attempt: u32,
    pub holder: Option<Holder>,
    /// A word of a closed list (`PendingReason`, an error code), or nothing.
    pub reason: Option<String>,
}
