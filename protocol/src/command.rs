//! What may be proposed to the log. A command carries every input its effect needs: who asks, which
//! attempt and instance it means, and the choice that was made. Apply checks, it never chooses.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    agent::{AgentRecord, AgentState, Registration, StateReason},
    certificate::{Revocation, Revoked},
    codec::Encoded,
    envelope::{Envelope, Target},
    error::ErrorReply,
    event::{GroupPosition, GroupRecord, HandedOut, NewEvent, Published, PullId, Span, TopicRecord, Word},
    id::{AgentId, EventType, InstanceId, MsgId, Name, NodeId, Topics, TraceId},
    json::Json,
    message::{Holder, MessageRecord, PendingReason, Warning},
    money::Money,
    rules::{Rules, RulesRecord},
    stamp::Stamp,
};

/// One entry of the log: commands that were proposed together and share a stamp.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub stamp: Stamp,
    /// The term its proposer led in. Apply takes no notice of an entry that a later term committed:
    /// the decisions in it were made on a view that is gone.
    pub term: u64,
    pub commands: Vec<Command>,
}

/// Who asks, as the certificate says. Believed only from the node that checked it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Principal {
    Agent(AgentId),
    /// May act for every agent whose id begins with its name and a colon.
    Host(Name),
    User(Name),
    Node(NodeId),
    /// Whoever asks over HTTP from this machine, as long as that edge knows no tokens: the local
    /// operator, who may act for every agent.
    Loopback,
}

impl Principal {
    /// Whether this identity may speak as `agent_id`.
    pub fn acts_for(&self, agent_id: &AgentId) -> bool {
        match self {
            Self::Agent(own) => own == agent_id,
            Self::Host(name) => {
                agent_id.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with(':'))
            }
            Self::User(_) => *agent_id == self.own_agent_id(),
            Self::Node(_) => false,
            Self::Loopback => true,
        }
    }

    /// The `source.agent_id` of what this identity sends on its own account.
    pub fn own_agent_id(&self) -> AgentId {
        let text = match self {
            Self::Agent(id) => return id.clone(),
            Self::Host(name) => format!("host:{name}"),
            Self::User(name) => format!("user:{name}"),
            Self::Node(id) => format!("node:{id}"),
            Self::Loopback => "http-loopback".to_string(),
        };
        AgentId::parse(&text[..text.len().min(64)]).expect("names consist of id characters")
    }
}

impl fmt::Display for Principal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agent(id) => write!(f, "agent/{id}"),
            Self::Host(name) => write!(f, "host/{name}"),
            Self::User(name) => write!(f, "user/{name}"),
            Self::Node(id) => write!(f, "node/{id}"),
            Self::Loopback => f.write_str("http-loopback"),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// The cluster's first entry: its first rules. A second one changes nothing.
    Init {
        cluster: Name,
        rules: Box<Rules>,
    },
    /// Upsert of an agent. `started_ms` is used only when the instance is new here.
    Register {
        registration: Box<Registration>,
        instance: InstanceId,
        started_ms: u64,
        author: Principal,
    },
    /// Takes this run out of the registry; void when another one is there by then.
    Remove {
        agent_id: AgentId,
        /// None where none was registered when it was asked for: then it removes nobody.
        instance: Option<InstanceId>,
        author: Principal,
    },
    /// A change of liveness; void unless instance and sequence are the current ones.
    SetLiveness {
        agent_id: AgentId,
        instance: InstanceId,
        liveness_seq: u64,
        state: AgentState,
        reason: StateReason,
    },
    Submit(Box<Submit>),
    /// The scheduler's choice for a waiting message.
    Assign {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
        warnings: Vec<Warning>,
    },
    /// It was sent to the agent and `received` has not come back yet.
    Dispatched {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
    },
    /// The agent has it on its disk.
    Received {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
    },
    Complete {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
        excerpt: String,
        result: Json,
        cost: Option<Money>,
    },
    Fail {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
        reason: FailReason,
        message: String,
    },
    /// The agent has let go of an attempt that is no longer its own: its slot is free.
    Release {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
    },
    /// The attempt ends before `received`; the message waits again.
    Return {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
        reason: PendingReason,
    },
    /// The agent that had received it is lost. With `to` the next attempt goes to that agent, in the
    /// same entry; without, nobody else could take it for the rules' `return_within_ms`, and it waits.
    /// Void when the lost one was heard since, before its retry is due, and when `to` can't take it.
    Retake {
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
        to: Option<Holder>,
        warnings: Vec<Warning>,
    },
    /// The deadline has passed by the entry's stamp.
    TimeOut {
        msg_id: MsgId,
    },
    /// Nobody can take a message that was never matched; `error` is its end.
    GiveUp {
        msg_id: MsgId,
        error: Box<ErrorReply>,
    },
    /// The slot was held for too long by an attempt that ended.
    FreeSlot {
        agent_id: AgentId,
        msg_id: MsgId,
        attempt: u32,
    },
    /// A whole new rules document, checked at the edge.
    ApplyRules {
        rules: Box<Rules>,
        text: String,
        expect: Option<u64>,
        author: Principal,
    },
    /// An operator's drain; void unless `drain_seq` is the current one.
    Drain {
        agent_id: AgentId,
        drain_seq: u64,
        author: Principal,
    },
    /// Takes an operator's drain back; void unless `drain_seq` is the current one.
    Resume {
        agent_id: AgentId,
        drain_seq: u64,
        author: Principal,
    },
    /// The registration has outlived its agent by the rules' `remove_after_ms`; void when the agent's
    /// liveness has changed since.
    RemoveOffline {
        agent_id: AgentId,
        instance: InstanceId,
        liveness_seq: u64,
    },
    /// Too many agents are about to expire together: the leader has their expiry wait. Raises the
    /// alarm, once per `pause`.
    PauseExpiry {
        pause: ExpiryPause,
    },
    /// An operator ends that wait; void when it is another one by then.
    ExpireNow {
        since_ms: u64,
        author: Principal,
    },
    /// Refuses certificates from now on. `whose` and `ends_s` as in [`Revocation`].
    Revoke {
        revoked: Revoked,
        whose: Option<Principal>,
        ends_s: Option<u64>,
        author: Principal,
    },
    /// All of them, or none where one is refused.
    Publish {
        events: Vec<NewEvent>,
        author: Principal,
    },
    /// Declares a topic, or its retention anew.
    SetTopic {
        event_type: EventType,
        max_age_ms: Option<u64>,
        max_bytes: Option<u64>,
        author: Principal,
    },
    /// Events below `to` are kept no longer: at most `TRIM_MAX` of them in one command. Without an author
    /// it is retention's.
    Trim {
        event_type: EventType,
        to: u64,
        author: Option<Principal>,
    },
    /// Takes a topic off the lists, once it has been trimmed; its offsets go on where they stopped.
    RemoveTopic {
        event_type: EventType,
        author: Principal,
    },
    /// `starts`: where it begins in the topics that exist; in later ones at their first event.
    CreateGroup {
        group: Name,
        topics: Topics,
        starts: Vec<(EventType, u64)>,
        author: Principal,
    },
    /// Everything is forgotten that its members were handed; void unless `resets` is the current number.
    ResetGroup {
        group: Name,
        resets: u64,
        starts: Vec<(EventType, u64)>,
        author: Principal,
    },
    RemoveGroup {
        group: Name,
        author: Principal,
    },
    /// Hands a member the next events: first those that came back, then new ones.
    HandOut {
        group: Name,
        member: Name,
        pull: PullId,
        max: u32,
        ack_wait_ms: u64,
    },
    /// The leader saw something that no entry caused; it becomes one event, under this key.
    Observe {
        msg_id: MsgId,
        observed: Observed,
    },
    /// What a member says of events it was handed, topic by topic.
    Say {
        group: Name,
        member: Name,
        about: Vec<(EventType, Vec<Span>)>,
        word: Word,
    },
}

/// What a leader sees of the cluster itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Observed {
    /// A calendar went wrong, or right again.
    ClockSkew {
        who: Principal,
        host: Option<String>,
        /// Its calendar minus the cluster's.
        offset_ms: i64,
        is_off: bool,
        /// A sentence for people: whose clock, by how much, and what to check.
        message: String,
    },
    /// Another node leads, or other nodes are silent than before.
    Health { leader: NodeId, silent: Vec<NodeId>, nodes: u32 },
}

/// Events that one `Trim` takes at most.
pub const TRIM_MAX: u64 = 10_000;

/// A mass expiry that waits. Named by the cluster time at which it began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpiryPause {
    pub since_ms: u64,
    /// How many agents were about to expire, and of how many.
    pub agents: u32,
    pub of: u32,
    /// How long it waits, in milliseconds.
    pub wait_ms: u64,
    /// Who ended the wait before its time.
    pub forced_by: Option<Principal>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Submit {
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    /// Whole, as the caller gave it, ids and source filled in.
    pub envelope: Encoded<Envelope>,
    /// Both as in the envelope, which apply doesn't open.
    pub parent: Option<MsgId>,
    pub flow_seq: Option<u64>,
    pub source: AgentId,
    pub target: Target,
    pub content_hash: [u8; 16],
    pub shape: String,
    /// Time it has from acceptance, in milliseconds.
    pub expires_in_ms: u64,
    pub author: Principal,
    pub decision: Decision,
}

/// What the leader chose for a submission.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Decision {
    Give { holder: Holder, warnings: Vec<Warning> },
    Wait { reason: PendingReason, warnings: Vec<Warning> },
}

/// Why an agent could not do it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailReason {
    Error,
    Unparseable,
    Refused,
    Busy,
}

/// What apply answers. A refusal is a reply like any other; a repeat gets the first one's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Agent(Box<AgentRecord>),
    Message(Arc<MessageRecord>),
    Rules(Box<RulesRecord>),
    Refused(Box<ErrorReply>),
    /// A later term committed the entry: nothing happened, propose again.
    Void,
    Revoked(Box<Revocation>),
    Published(Vec<Published>),
    Topic(Box<TopicRecord>),
    Group {
        record: Box<GroupRecord>,
        positions: Vec<GroupPosition>,
    },
    HandedOut(HandedOut),
    /// How many events it changed something for.
    Heard(u64),
}
