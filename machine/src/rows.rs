//! The replicated tables as apply sees them: a read-only view just before a position, and the
//! writes that bring them to the next one. Where they are kept is nobody's business here.

use std::{collections::BTreeMap, sync::Arc};

use reach_protocol::{
    AgentId, Envelope, EventRow, EventType, Fact, InstanceId, Json, MsgId, Name, Reply, Revocation, Revoked,
    RulesRecord, TraceId,
    agent::{AgentRecord, Tombstone},
    codec::Encoded,
    event::{EventMark, GroupPosition, GroupRecord, TopicRecord},
    message::{DeadLetter, Hop, MessageRecord},
};
use serde::{Deserialize, Serialize};

/// Point look-ups and bounded scans of the tables, the open batch's own writes included.
pub trait Rows {
    fn rules(&self) -> Arc<RulesRecord>;
    fn agent(&self, agent_id: &AgentId) -> Option<Arc<AgentRecord>>;
    fn tombstone(&self, agent_id: &AgentId) -> Option<Tombstone>;
    /// Unfinished or finished.
    fn message(&self, msg_id: &MsgId) -> Option<Arc<MessageRecord>>;
    /// The slots of one agent, ordered by message; at most its `max_concurrency` and the attempts
    /// that ended while it was busy.
    fn slots(&self, agent_id: &AgentId) -> Vec<(MsgId, Slot)>;
    fn slot(&self, agent_id: &AgentId, msg_id: &MsgId) -> Option<Slot>;
    fn slots_taken(&self, agent_id: &AgentId) -> u32;
    /// Whether an attempt at this message was ever `received` by this agent.
    fn was_delivered(&self, msg_id: &MsgId, agent_id: &AgentId) -> bool;
    fn trace(&self, trace_id: &TraceId) -> Option<TraceRecord>;
    fn topic(&self, event_type: &EventType) -> Option<Arc<TopicRecord>>;
    /// Every topic, in order of their types.
    fn topics(&self) -> Vec<Arc<TopicRecord>>;
    /// Events `from..to` of a topic, as far as they are kept.
    fn events(&self, event_type: &EventType, from: u64, to: u64) -> Vec<EventRow>;
    fn event_mark(&self, msg_id: &MsgId) -> Option<EventMark>;
    fn group(&self, group: &Name) -> Option<Arc<GroupRecord>>;
    /// A group's positions, in order of the topics' types.
    fn positions(&self, group: &Name) -> Vec<Arc<GroupPosition>>;
    fn position(&self, group: &Name, event_type: &EventType) -> Option<Arc<GroupPosition>>;
    /// Positions in which this member has open events, by group and topic.
    fn held(&self, member: &Name) -> Vec<Arc<GroupPosition>>;
    /// Messages that wait for an agent.
    fn waiting(&self) -> u64;
    /// Every revocation; at most `REVOCATIONS_MAX`.
    fn revocations(&self) -> BTreeMap<Revoked, Arc<Revocation>>;
}

/// A slot belongs to an attempt: from the choice until its result, its release, or the end of the
/// instance. It may outlive its attempt: while a lost agent has not said that it let go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    pub instance: InstanceId,
    pub attempt: u32,
    pub since_ms: u64,
}

/// What a trace keeps besides its hops.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRecord {
    pub last_flow_seq: u64,
    /// Hops written so far: the ordinal of the next one.
    pub hops: u64,
}

/// One change of one row. A list of them, in order, is all that a command does.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    PutRules(Arc<RulesRecord>),
    PutAgent(Arc<AgentRecord>),
    /// Takes the agent's row away and leaves the tombstone.
    RemoveAgent {
        agent_id: AgentId,
        tombstone: Tombstone,
    },
    PutMessage(Arc<MessageRecord>),
    /// The envelope as the caller gave it; written once.
    PutEnvelope {
        msg_id: MsgId,
        envelope: Encoded<Envelope>,
    },
    /// The first and only result.
    PutResult {
        msg_id: MsgId,
        result: Json,
    },
    PutSlot {
        agent_id: AgentId,
        msg_id: MsgId,
        slot: Slot,
    },
    RemoveSlot {
        agent_id: AgentId,
        msg_id: MsgId,
    },
    /// Notes that this agent once said `received` to this message.
    PutDelivered {
        msg_id: MsgId,
        agent_id: AgentId,
    },
    PutTrace {
        trace_id: TraceId,
        record: TraceRecord,
    },
    PutHop {
        trace_id: TraceId,
        ordinal: u64,
        hop: Hop,
    },
    PutTopic(Arc<TopicRecord>),
    PutEvent(EventRow),
    /// Events `from..to`, which are the first that are kept.
    RemoveEvents {
        event_type: EventType,
        from: u64,
        to: u64,
    },
    /// Notes where the event with this key went.
    PutEventMark {
        msg_id: MsgId,
        mark: EventMark,
    },
    RemoveEventMark {
        msg_id: MsgId,
    },
    PutGroup(Arc<GroupRecord>),
    RemoveGroup {
        group: Name,
    },
    PutPosition(Arc<GroupPosition>),
    RemovePosition {
        group: Name,
        event_type: EventType,
    },
    /// Written once, with the message's end.
    PutDeadLetter(DeadLetter),
    PutRevocation(Arc<Revocation>),
    RemoveRevocation(Revoked),
}

/// What one command did.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub reply: Reply,
    pub facts: Vec<Fact>,
    pub writes: Vec<Write>,
}

/// Where a command stands in the log: the entry's index and its place in the entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    pub index: u64,
    pub ordinal: u32,
}
