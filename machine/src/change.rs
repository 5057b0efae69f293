//! The change one command is making: its writes and facts so far, laid over the rows it reads, so
//! that transitions which follow each other in one command see each other. The one place where a
//! message changes its state.

use std::{collections::BTreeMap, sync::Arc};

use reach_protocol::{
    AgentId, EventType, Fact, InstanceId, MessageState, MsgId, Reply, RulesRecord, Stamp, TraceId,
    agent::AgentRecord,
    event::TopicRecord,
    message::{Holder, Hop, MessageRecord, StateName},
};

use crate::rows::{Outcome, Rows, Slot, TraceRecord, Write};

pub(crate) struct Change<'a> {
    pub rows: &'a dyn Rows,
    pub stamp: Stamp,
    facts: Vec<Fact>,
    writes: Vec<Write>,
    /// Each is written once, as it stands at the end of the command.
    messages: BTreeMap<MsgId, Arc<MessageRecord>>,
    traces: BTreeMap<TraceId, TraceRecord>,
    topics: BTreeMap<EventType, Arc<TopicRecord>>,
}

impl<'a> Change<'a> {
    pub fn new(rows: &'a dyn Rows, stamp: Stamp) -> Self {
        Self {
            rows,
            stamp,
            facts: Vec::new(),
            writes: Vec::new(),
            messages: BTreeMap::new(),
            traces: BTreeMap::new(),
            topics: BTreeMap::new(),
        }
    }

    pub fn into_outcome(self, reply: Reply) -> Outcome {
        let Self { facts, mut writes, messages, traces, topics, .. } = self;
        writes.extend(messages.into_values().map(Write::PutMessage));
        writes.extend(traces.into_iter().map(|(trace_id, record)| Write::PutTrace { trace_id, record }));
        writes.extend(topics.into_values().map(Write::PutTopic));
        let refused = matches!(reply, Reply::Refused(_));
        assert!(!refused || (writes.is_empty() && facts.is_empty()), "a refused command changes nothing");
        Outcome { reply, facts, writes }
    }

    pub fn rules(&self) -> Arc<RulesRecord> {
        self.rows.rules()
    }

    pub fn agent(&self, agent_id: &AgentId) -> Option<Arc<AgentRecord>> {
        self.rows.agent(agent_id)
    }

    pub fn message(&self, msg_id: &MsgId) -> Option<Arc<MessageRecord>> {
        self.messages.get(msg_id).cloned().or_else(|| self.rows.message(msg_id))
    }

    pub fn trace(&self, trace_id: &TraceId) -> TraceRecord {
        self.traces.get(trace_id).cloned().or_else(|| self.rows.trace(trace_id)).unwrap_or_default()
    }

    pub fn topic(&self, event_type: &EventType) -> Option<Arc<TopicRecord>> {
        self.topics.get(event_type).cloned().or_else(|| self.rows.topic(event_type))
    }

    pub fn put_topic(&mut self, record: TopicRecord) {
        self.topics.insert(record.event_type.clone(), Arc::new(record));
    }

    pub fn write(&mut self, write: Write) {
        self.writes.push(write);
    }

    pub fn fact(&mut self, fact: Fact) {
        self.facts.push(fact);
    }

    /// A fact that says the same however often it is told in one command.
    pub fn fact_once(&mut self, fact: Fact) {
        if self.facts.last() != Some(&fact) {
            self.facts.push(fact);
        }
    }

    /// A new message that waits: its first hop, from nothing to `pending`.
    pub fn accept(&mut self, record: MessageRecord) {
        let MessageState::Pending { reason } = record.state else { unreachable!("a new message waits") };
        self.enter(&record, Some(reason.as_str()));
        let record = self.put(record);
        self.fact(Fact::Submitted(record));
    }

    /// A new message that was given away in the same command: it has a hop of waiting all the same,
    /// so that every trace begins alike, but nobody is told that it waits.
    pub fn accept_matched(&mut self, record: MessageRecord, holder: &Holder) -> Arc<MessageRecord> {
        self.enter(&record, None);
        self.give(record, holder)
    }

    fn enter(&mut self, record: &MessageRecord, reason: Option<&str>) {
        let mut trace = self.trace(&record.trace_id);
        trace.last_flow_seq = trace.last_flow_seq.max(record.flow_seq);
        self.traces.insert(record.trace_id.clone(), trace);
        self.hop(record, None, StateName::Pending, None, reason);
    }

    /// To `matched`, with a slot of the holder's.
    pub fn give(&mut self, record: MessageRecord, holder: &Holder) -> Arc<MessageRecord> {
        let slot = Slot {
            instance: holder.instance.clone(),
            attempt: record.attempt,
            since_ms: self.stamp.cluster_ms,
        };
        self.write(Write::PutSlot { agent_id: holder.agent_id.clone(), msg_id: record.msg_id.clone(), slot });
        self.transition(record, MessageState::Matched { holder: holder.clone() }, None)
    }

    /// The only way from one state to another: row, hop and fact, never one without the others. On
    /// the way back to `pending` the hop tells of the attempt that ended and the row gets the next
    /// one's number.
    pub fn transition(
        &mut self,
        mut record: MessageRecord,
        to: MessageState,
        reason: Option<&str>,
    ) -> Arc<MessageRecord> {
        let (from, name) = (record.state.name(), to.name());
        assert!(is_legal(from, name), "no way from {from} to {name}");
        let holder = to.holder().or(record.state.holder()).cloned();
        self.hop(&record, Some(from), name, holder, reason);
        if name == StateName::Pending {
            record.attempt += 1;
        } else {
            record.retry_at_ms = None;
        }
        record.state = to;
        record.since = self.stamp;
        let record = self.put(record);
        self.fact(match name {
            StateName::Pending => Fact::Returned(record.clone()),
            StateName::Matched => Fact::Matched(record.clone()),
            StateName::Dispatched => Fact::Dispatched(record.clone()),
            StateName::Acknowledged => Fact::Acknowledged(record.clone()),
            StateName::Completed => Fact::Completed(record.clone()),
            StateName::Failed => Fact::Failed(record.clone()),
            StateName::Timeout => Fact::TimedOut(record.clone()),
        });
        record
    }

    fn put(&mut self, record: MessageRecord) -> Arc<MessageRecord> {
        let record = Arc::new(record);
        self.messages.insert(record.msg_id.clone(), record.clone());
        record
    }

    fn hop(
        &mut self,
        record: &MessageRecord,
        from: Option<StateName>,
        to: StateName,
        holder: Option<Holder>,
        reason: Option<&str>,
    ) {
        let mut trace = self.trace(&record.trace_id);
        let ordinal = trace.hops;
        trace.hops += 1;
        self.traces.insert(record.trace_id.clone(), trace);
        let hop = Hop {
            msg_id: record.msg_id.clone(),
            at: self.stamp,
            from,
            to,
            attempt: record.attempt,
            holder,
            reason: reason.map(str::to_string),
        };
        self.write(Write::PutHop { trace_id: record.trace_id.clone(), ordinal, hop });
    }

    /// Frees the slot that an attempt took at an agent. The caller knows that it is there.
    pub fn free(&mut self, agent_id: &AgentId, msg_id: &MsgId, attempt: u32) {
        self.write(Write::RemoveSlot { agent_id: agent_id.clone(), msg_id: msg_id.clone() });
        self.fact(Fact::Freed { agent_id: agent_id.clone(), msg_id: msg_id.clone(), attempt });
    }

    /// Hands a received attempt and its slot to a later run of the same agent.
    pub fn hand_over(&mut self, record: &MessageRecord, agent_id: &AgentId, slot: Slot, to: &InstanceId) {
        let slot = Slot { instance: to.clone(), ..slot };
        self.write(Write::PutSlot { agent_id: agent_id.clone(), msg_id: record.msg_id.clone(), slot });
        let holder = Holder { agent_id: agent_id.clone(), instance: to.clone() };
        self.transition(record.clone(), MessageState::Acknowledged { holder }, Some("instance_replaced"));
    }
}

/// The edges of the state machine. `acknowledged` to itself is the hand-over to a later run.
fn is_legal(from: StateName, to: StateName) -> bool {
    use StateName::*;
    match from {
        Pending => matches!(to, Matched | Failed | Timeout),
        Matched => matches!(to, Dispatched | Pending | Failed | Timeout),
        Dispatched => matches!(to, Acknowledged | Pending | Failed | Timeout),
        Acknowledged => matches!(to, Acknowledged | Completed | Pending | Failed | Timeout),
        Completed | Failed | Timeout => false,
    }
}
