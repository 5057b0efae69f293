//! The replicated tables in memory: the whole of [`Rows`], for stores without a disk and for tests.
//! It is also the plainest statement of what each write means.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use reach_protocol::{
    AgentId, Envelope, EventRow, EventType, Json, MsgId, Name, Revocation, Revoked, RulesRecord, TraceId,
    agent::{AgentRecord, Tombstone},
    codec::Encoded,
    event::{EventMark, GroupPosition, GroupRecord, TopicRecord},
    message::{DeadLetter, Hop, MessageRecord},
};

use crate::{
    live::Live,
    rows::{Rows, Slot, TraceRecord, Write},
};

/// Every table, each ordered by its key. A function of the writes alone: equal writes, equal rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryRows {
    live: Live,
    finished: BTreeMap<MsgId, Arc<MessageRecord>>,
    /// Every message by the cluster time of its acceptance, then by id.
    accepted: BTreeSet<(u64, MsgId)>,
    envelopes: BTreeMap<MsgId, Encoded<Envelope>>,
    results: BTreeMap<MsgId, Json>,
    delivered: BTreeSet<(MsgId, AgentId)>,
    traces: BTreeMap<TraceId, TraceRecord>,
    hops: BTreeMap<TraceId, Vec<Hop>>,
    tombstones: BTreeMap<AgentId, Tombstone>,
    events: BTreeMap<EventType, BTreeMap<u64, EventRow>>,
    event_marks: BTreeMap<MsgId, EventMark>,
    dead_letters: BTreeMap<MsgId, DeadLetter>,
}

impl MemoryRows {
    pub fn new() -> Self {
        Self::default()
    }

    /// Does `writes` in order. What may be written once only, and what must be dense, is asserted:
    /// a breach is a defect of apply.
    pub fn write(&mut self, writes: Vec<Write>) {
        for write in writes {
            self.live.write(&write);
            self.write_tables(write);
        }
    }

    fn write_tables(&mut self, write: Write) {
        match write {
            Write::PutRules(_)
            | Write::PutAgent(_)
            | Write::PutSlot { .. }
            | Write::RemoveSlot { .. }
            | Write::PutRevocation(_)
            | Write::PutTopic(_)
            | Write::PutGroup(_)
            | Write::RemoveGroup { .. }
            | Write::PutPosition(_)
            | Write::RemovePosition { .. }
            | Write::RemoveRevocation(_) => {}
            Write::RemoveAgent { agent_id, tombstone } => {
                self.tombstones.insert(agent_id, tombstone);
            }
            Write::PutMessage(record) => {
                self.accepted.insert((record.accepted.cluster_ms, record.msg_id.clone()));
                if record.state.is_final() {
                    self.finished.insert(record.msg_id.clone(), record);
                } else {
                    assert!(!self.finished.contains_key(&record.msg_id), "an end is final");
                }
            }
            Write::PutEnvelope { msg_id, envelope } => {
                let before = self.envelopes.insert(msg_id, envelope);
                assert!(before.is_none(), "an envelope is written once");
            }
            Write::PutResult { msg_id, result } => {
                let before = self.results.insert(msg_id, result);
                assert!(before.is_none(), "a message has one result");
            }
            Write::PutDelivered { msg_id, agent_id } => {
                self.delivered.insert((msg_id, agent_id));
            }
            Write::PutTrace { trace_id, record } => {
                self.traces.insert(trace_id, record);
            }
            Write::PutHop { trace_id, ordinal, hop } => {
                let hops = self.hops.entry(trace_id).or_default();
                assert_eq!(ordinal, hops.len() as u64, "the hops of a trace are dense");
                hops.push(hop);
            }
            Write::PutEvent(row) => {
                let rows = self.events.entry(row.event_type.clone()).or_default();
                if let Some(last) = rows.last_key_value() {
                    assert_eq!(row.offset, last.0 + 1, "the offsets of a topic are dense");
                }
                rows.insert(row.offset, row);
            }
            Write::RemoveEvents { event_type, from, to } => {
                let rows = self.events.entry(event_type).or_default();
                assert!(rows.keys().next().is_none_or(|first| *first == from), "the first ones go first");
                *rows = rows.split_off(&to);
            }
            Write::PutEventMark { msg_id, mark } => {
                let before = self.event_marks.insert(msg_id, mark);
                assert!(before.is_none(), "an event has one place");
            }
            Write::RemoveEventMark { msg_id } => {
                self.event_marks.remove(&msg_id);
            }
            Write::PutDeadLetter(letter) => {
                let before = self.dead_letters.insert(letter.msg_id.clone(), letter);
                assert!(before.is_none(), "a message has one end");
            }
        }
    }

    /// Registry, unfinished messages, slots, rules.
    pub fn live(&self) -> &Live {
        &self.live
    }

    /// Ended messages, by id.
    pub fn finished(&self) -> &BTreeMap<MsgId, Arc<MessageRecord>> {
        &self.finished
    }

    /// Every message, unfinished or finished, oldest acceptance first.
    pub fn messages(&self) -> impl DoubleEndedIterator<Item = Arc<MessageRecord>> + '_ {
        self.accepted.iter().map(|(_, msg_id)| self.message(msg_id).expect("an accepted message has a row"))
    }

    /// Messages accepted before `after`, newest first; from the newest when `after` is absent or
    /// unknown.
    pub fn messages_before(
        &self,
        after: Option<&MsgId>,
    ) -> impl Iterator<Item = Arc<MessageRecord>> + use<'_> {
        let end = after
            .and_then(|msg_id| self.message(msg_id))
            .map(|record| (record.accepted.cluster_ms, record.msg_id.clone()));
        let before = match end {
            Some(end) => self.accepted.range(..end),
            None => self.accepted.range(..),
        };
        before.rev().map(|(_, msg_id)| self.message(msg_id).expect("an accepted message has a row"))
    }

    pub fn envelope(&self, msg_id: &MsgId) -> Option<&Encoded<Envelope>> {
        self.envelopes.get(msg_id)
    }

    pub fn result(&self, msg_id: &MsgId) -> Option<&Json> {
        self.results.get(msg_id)
    }

    /// The hops of a trace, in order.
    pub fn hops(&self, trace_id: &TraceId) -> &[Hop] {
        self.hops.get(trace_id).map_or(&[], Vec::as_slice)
    }

    /// What a topic keeps, in order.
    pub fn events_of(&self, event_type: &EventType) -> impl Iterator<Item = &EventRow> + use<'_> {
        self.events.get(event_type).into_iter().flat_map(BTreeMap::values)
    }

    pub fn event_types(&self) -> impl Iterator<Item = &EventType> {
        self.events.keys()
    }

    pub fn event_marks(&self) -> &BTreeMap<MsgId, EventMark> {
        &self.event_marks
    }

    pub fn envelopes(&self) -> &BTreeMap<MsgId, Encoded<Envelope>> {
        &self.envelopes
    }

    pub fn results(&self) -> &BTreeMap<MsgId, Json> {
        &self.results
    }

    pub fn delivered(&self) -> &BTreeSet<(MsgId, AgentId)> {
        &self.delivered
    }

    pub fn traces(&self) -> &BTreeMap<TraceId, TraceRecord> {
        &self.traces
    }

    pub fn dead_letters(&self) -> &BTreeMap<MsgId, DeadLetter> {
        &self.dead_letters
    }

    pub fn tombstones(&self) -> &BTreeMap<AgentId, Tombstone> {
        &self.tombstones
    }
}

impl Rows for MemoryRows {
    fn rules(&self) -> Arc<RulesRecord> {
        self.live.rules.clone()
    }

    fn agent(&self, agent_id: &AgentId) -> Option<Arc<AgentRecord>> {
        self.live.agents.get(agent_id).cloned()
    }

    fn tombstone(&self, agent_id: &AgentId) -> Option<Tombstone> {
        self.tombstones.get(agent_id).cloned()
    }

    fn message(&self, msg_id: &MsgId) -> Option<Arc<MessageRecord>> {
        self.live.messages.get(msg_id).or_else(|| self.finished.get(msg_id)).cloned()
    }

    fn slots(&self, agent_id: &AgentId) -> Vec<(MsgId, Slot)> {
        let slots = self.live.slots.get(agent_id);
        slots.into_iter().flatten().map(|(msg_id, slot)| (msg_id.clone(), slot.clone())).collect()
    }

    fn slot(&self, agent_id: &AgentId, msg_id: &MsgId) -> Option<Slot> {
        self.live.slots.get(agent_id)?.get(msg_id).cloned()
    }

    fn slots_taken(&self, agent_id: &AgentId) -> u32 {
        self.live.slots_taken(agent_id)
    }

    fn was_delivered(&self, msg_id: &MsgId, agent_id: &AgentId) -> bool {
        self.delivered.contains(&(msg_id.clone(), agent_id.clone()))
    }

    fn trace(&self, trace_id: &TraceId) -> Option<TraceRecord> {
        self.traces.get(trace_id).cloned()
    }

    fn topic(&self, event_type: &EventType) -> Option<Arc<TopicRecord>> {
        self.live.topics.get(event_type).cloned()
    }

    fn topics(&self) -> Vec<Arc<TopicRecord>> {
        self.live.topics.values().cloned().collect()
    }

    fn events(&self, event_type: &EventType, from: u64, to: u64) -> Vec<EventRow> {
        let rows = self.events.get(event_type).into_iter();
        rows.flat_map(|rows| rows.range(from..to)).map(|(_, row)| row.clone()).collect()
    }

    fn event_mark(&self, msg_id: &MsgId) -> Option<EventMark> {
        self.event_marks.get(msg_id).cloned()
    }

    fn group(&self, group: &Name) -> Option<Arc<GroupRecord>> {
        self.live.groups.get(group).cloned()
    }

    fn positions(&self, group: &Name) -> Vec<Arc<GroupPosition>> {
        self.live.positions.get(group).into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    fn position(&self, group: &Name, event_type: &EventType) -> Option<Arc<GroupPosition>> {
        self.live.positions.get(group)?.get(event_type).cloned()
    }

    fn held(&self, member: &Name) -> Vec<Arc<GroupPosition>> {
        let held = self.live.held.get(member).into_iter().flatten();
        held.map(|(group, event_type)| self.live.positions[group][event_type].clone()).collect()
    }

    fn waiting(&self) -> u64 {
        self.live.waiting
    }

    fn revocations(&self) -> BTreeMap<Revoked, Arc<Revocation>> {
        self.live.revocations.clone()
    }
}
