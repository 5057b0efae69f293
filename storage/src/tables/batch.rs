//! An open batch: its own writes laid over the tables as of the last commit.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
};

use bytes::Bytes;
use reach_machine::{Live, Rows, Slot, TraceRecord, Write};
use reach_protocol::{
    AgentId, EventRow, EventType, MessageState, MsgId, Name, Revocation, Revoked, RulesRecord, TraceId,
    agent::{AgentRecord, Tombstone},
    event::{EventMark, GroupPosition, GroupRecord, TopicRecord},
    message::MessageRecord,
};
use serde::de::DeserializeOwned;

use super::{Engine, POISON, TableStore, read_events, row};
use crate::{
    kv::{Kv, Op},
    schema::{self, Table},
    store::{Applied, Batch, Tables},
};

pub(super) struct OpenBatch<'a, E: Engine> {
    store: &'a TableStore<E>,
    disk: Arc<E::Disk>,
    applied: Applied,
    writes: Vec<Write>,
    ops: Vec<Op>,
    over: Overlay,
    /// The first read that failed. `Rows` has no errors: apply goes on with what it was told, and
    /// the commit fails.
    failed: RefCell<Option<io::Error>>,
}

/// The rows this batch has written, by what reads them.
#[derive(Default)]
struct Overlay {
    rules: Option<Arc<RulesRecord>>,
    /// `None`: removed.
    agents: BTreeMap<AgentId, Option<Arc<AgentRecord>>>,
    tombstones: BTreeMap<AgentId, Tombstone>,
    messages: BTreeMap<MsgId, Arc<MessageRecord>>,
    /// Only those that changed, however many an agent has. `None`: freed.
    slots: BTreeMap<AgentId, Slots>,
    delivered: BTreeSet<(MsgId, AgentId)>,
    traces: BTreeMap<TraceId, TraceRecord>,
    topics: BTreeMap<EventType, Arc<TopicRecord>>,
    events: BTreeMap<EventType, BTreeMap<u64, EventRow>>,
    /// `None`: removed.
    event_marks: BTreeMap<MsgId, Option<EventMark>>,
    groups: BTreeMap<Name, Option<Arc<GroupRecord>>>,
    positions: BTreeMap<Name, BTreeMap<EventType, Option<Arc<GroupPosition>>>>,
    /// Members with open events in positions that were written. They may have none by now.
    held: BTreeMap<Name, BTreeSet<(Name, EventType)>>,
    waiting: i64,
    /// `None`: removed.
    revocations: BTreeMap<Revoked, Option<Arc<Revocation>>>,
}

#[derive(Default)]
struct Slots {
    changed: BTreeMap<MsgId, Option<Slot>>,
    /// How many more are taken than before the batch.
    more: i64,
}

impl<'a, E: Engine> OpenBatch<'a, E> {
    pub fn new(store: &'a TableStore<E>) -> Self {
        Self {
            store,
            disk: store.disk(),
            applied: store.applied(),
            writes: Vec::new(),
            ops: Vec::new(),
            over: Overlay::default(),
            failed: RefCell::default(),
        }
    }

    fn read<T: DeserializeOwned>(&self, table: Table, key: &[u8], what: &'static str) -> Option<T> {
        let read = row(&*self.disk, table, key, what);
        match self.store.fatal("reading the tables", read) {
            Ok(value) => value,
            Err(error) => {
                self.failed.borrow_mut().get_or_insert(error);
                None
            }
        }
    }
}

impl Overlay {
    fn write(&mut self, live: &Live, write: &Write) {
        match write {
            Write::PutRules(record) => self.rules = Some(record.clone()),
            Write::PutAgent(record) => {
                self.agents.insert(record.agent_id().clone(), Some(record.clone()));
            }
            Write::RemoveAgent { agent_id, tombstone } => {
                self.agents.insert(agent_id.clone(), None);
                self.tombstones.insert(agent_id.clone(), tombstone.clone());
            }
            Write::PutMessage(record) => {
                let waits =
                    |record: &MessageRecord| i64::from(matches!(record.state, MessageState::Pending { .. }));
                let before = self.messages.insert(record.msg_id.clone(), record.clone());
                let before = before.or_else(|| live.messages.get(&record.msg_id).cloned());
                self.waiting += waits(record) - before.map_or(0, |before| waits(&before));
            }
            Write::PutSlot { agent_id, msg_id, slot } => {
                self.put_slot(live, agent_id, msg_id, Some(slot.clone()));
            }
            Write::RemoveSlot { agent_id, msg_id } => self.put_slot(live, agent_id, msg_id, None),
            Write::PutDelivered { msg_id, agent_id } => {
                self.delivered.insert((msg_id.clone(), agent_id.clone()));
            }
            Write::PutTrace { trace_id, record } => {
                self.traces.insert(trace_id.clone(), record.clone());
            }
            Write::PutTopic(record) => {
                self.topics.insert(record.event_type.clone(), record.clone());
            }
            Write::PutEvent(row) => {
                self.events.entry(row.event_type.clone()).or_default().insert(row.offset, row.clone());
            }
            // Below the topic's floor nobody looks.
            Write::RemoveEvents { .. } => {}
            Write::PutEventMark { msg_id, mark } => {
                self.event_marks.insert(msg_id.clone(), Some(mark.clone()));
            }
            Write::RemoveEventMark { msg_id } => {
                self.event_marks.insert(msg_id.clone(), None);
            }
            Write::PutGroup(record) => {
                self.groups.insert(record.group.clone(), Some(record.clone()));
            }
            Write::RemoveGroup { group } => {
                self.groups.insert(group.clone(), None);
            }
            Write::PutPosition(position) => {
                let positions = self.positions.entry(position.group.clone()).or_default();
                positions.insert(position.event_type.clone(), Some(position.clone()));
                for member in position.open.iter().filter_map(|open| open.member.as_ref()) {
                    let place = (position.group.clone(), position.event_type.clone());
                    self.held.entry(member.clone()).or_default().insert(place);
                }
            }
            Write::RemovePosition { group, event_type } => {
                self.positions.entry(group.clone()).or_default().insert(event_type.clone(), None);
            }
            Write::PutRevocation(record) => {
                self.revocations.insert(record.revoked.clone(), Some(record.clone()));
            }
            Write::RemoveRevocation(revoked) => {
                self.revocations.insert(revoked.clone(), None);
            }
            Write::PutEnvelope { .. }
            | Write::PutResult { .. }
            | Write::PutHop { .. }
            | Write::PutDeadLetter(_) => {}
        }
    }

    fn put_slot(&mut self, live: &Live, agent_id: &AgentId, msg_id: &MsgId, slot: Option<Slot>) {
        let slots = self.slots.entry(agent_id.clone()).or_default();
        let is_taken = slot.is_some();
        let was_taken = match slots.changed.insert(msg_id.clone(), slot) {
            Some(before) => before.is_some(),
            None => live.slots.get(agent_id).is_some_and(|slots| slots.contains_key(msg_id)),
        };
        slots.more += i64::from(is_taken) - i64::from(was_taken);
    }
}

impl<E: Engine> Rows for OpenBatch<'_, E> {
    fn rules(&self) -> Arc<RulesRecord> {
        self.over.rules.clone().unwrap_or_else(|| self.store.live().rules.clone())
    }

    fn agent(&self, agent_id: &AgentId) -> Option<Arc<AgentRecord>> {
        match self.over.agents.get(agent_id) {
            Some(written) => written.clone(),
            None => self.store.live().agents.get(agent_id).cloned(),
        }
    }

    fn tombstone(&self, agent_id: &AgentId) -> Option<Tombstone> {
        let written = self.over.tombstones.get(agent_id).cloned();
        written.or_else(|| self.read(Table::Registry, &schema::tombstone(agent_id), "tombstone"))
    }

    fn message(&self, msg_id: &MsgId) -> Option<Arc<MessageRecord>> {
        if let Some(record) = self.over.messages.get(msg_id) {
            return Some(record.clone());
        }
        if let Some(record) = self.store.live().messages.get(msg_id) {
            return Some(record.clone());
        }
        self.read(Table::Messages, &schema::message(msg_id), "message").map(Arc::new)
    }

    fn slots(&self, agent_id: &AgentId) -> Vec<(MsgId, Slot)> {
        let mut slots = self.store.live().slots.get(agent_id).cloned().unwrap_or_default();
        for (msg_id, slot) in self.over.slots.get(agent_id).into_iter().flat_map(|slots| &slots.changed) {
            match slot {
                Some(slot) => slots.insert(msg_id.clone(), slot.clone()),
                None => slots.remove(msg_id),
            };
        }
        slots.into_iter().collect()
    }

    fn slot(&self, agent_id: &AgentId, msg_id: &MsgId) -> Option<Slot> {
        match self.over.slots.get(agent_id).and_then(|slots| slots.changed.get(msg_id)) {
            Some(written) => written.clone(),
            None => self.store.live().slots.get(agent_id)?.get(msg_id).cloned(),
        }
    }

    fn slots_taken(&self, agent_id: &AgentId) -> u32 {
        let more = self.over.slots.get(agent_id).map_or(0, |slots| slots.more);
        let taken = i64::from(self.store.live().slots_taken(agent_id)) + more;
        u32::try_from(taken).expect("no more slots are freed than were taken")
    }

    fn was_delivered(&self, msg_id: &MsgId, agent_id: &AgentId) -> bool {
        // A tuple of borrowed ids can't be looked up; ids are cheap to clone.
        self.over.delivered.contains(&(msg_id.clone(), agent_id.clone()))
            || self.read::<()>(Table::Index, &schema::delivered(msg_id, agent_id), "delivery mark").is_some()
    }

    fn trace(&self, trace_id: &TraceId) -> Option<TraceRecord> {
        let written = self.over.traces.get(trace_id).cloned();
        written.or_else(|| self.read(Table::Traces, &schema::trace(trace_id), "trace"))
    }

    fn topic(&self, event_type: &EventType) -> Option<Arc<TopicRecord>> {
        let written = self.over.topics.get(event_type).cloned();
        written.or_else(|| self.store.live().topics.get(event_type).cloned())
    }

    fn topics(&self) -> Vec<Arc<TopicRecord>> {
        let live = self.store.live();
        let mut all: BTreeMap<_, _> = live.topics.iter().collect();
        all.extend(&self.over.topics);
        all.into_values().cloned().collect()
    }

    fn events(&self, event_type: &EventType, from: u64, to: u64) -> Vec<EventRow> {
        let written = self.over.events.get(event_type);
        let on_disk_to = written.and_then(|rows| rows.keys().next()).map_or(to, |first| to.min(*first));
        let read = read_events(&*self.disk, event_type, from, on_disk_to, usize::MAX);
        let mut rows = match self.store.fatal("reading the tables", read) {
            Ok(rows) => rows,
            Err(error) => {
                self.failed.borrow_mut().get_or_insert(error);
                Vec::new()
            }
        };
        let written = written.into_iter().flat_map(|rows| rows.range(from.min(to)..to));
        rows.extend(written.map(|(_, row)| row.clone()));
        rows
    }

    fn event_mark(&self, msg_id: &MsgId) -> Option<EventMark> {
        match self.over.event_marks.get(msg_id) {
            Some(written) => written.clone(),
            None => self.read(Table::Index, &schema::event_mark(msg_id), "event mark"),
        }
    }

    fn group(&self, group: &Name) -> Option<Arc<GroupRecord>> {
        match self.over.groups.get(group) {
            Some(written) => written.clone(),
            None => self.store.live().groups.get(group).cloned(),
        }
    }

    fn positions(&self, group: &Name) -> Vec<Arc<GroupPosition>> {
        let live = self.store.live();
        let known = live.positions.get(group).into_iter().flatten();
        let mut all: BTreeMap<_, _> = known.map(|(topic, position)| (topic, Some(position))).collect();
        let written = self.over.positions.get(group).into_iter().flatten();
        all.extend(written.map(|(topic, position)| (topic, position.as_ref())));
        all.into_values().flatten().cloned().collect()
    }

    fn position(&self, group: &Name, event_type: &EventType) -> Option<Arc<GroupPosition>> {
        match self.over.positions.get(group).and_then(|positions| positions.get(event_type)) {
            Some(written) => written.clone(),
            None => self.store.live().positions.get(group)?.get(event_type).cloned(),
        }
    }

    fn held(&self, member: &Name) -> Vec<Arc<GroupPosition>> {
        let mut places = self.store.live().held.get(member).cloned().unwrap_or_default();
        places.extend(self.over.held.get(member).into_iter().flatten().cloned());
        let positions = places.iter().filter_map(|(group, event_type)| self.position(group, event_type));
        let is_held = |position: &Arc<GroupPosition>| {
            position.open.iter().any(|open| open.member.as_ref() == Some(member))
        };
        positions.filter(is_held).collect()
    }

    fn waiting(&self) -> u64 {
        let waiting = self.store.live().waiting.checked_add_signed(self.over.waiting);
        waiting.expect("no more messages stop waiting than waited")
    }

    fn revocations(&self) -> BTreeMap<Revoked, Arc<Revocation>> {
        let mut all = self.store.live().revocations.clone();
        for (revoked, written) in &self.over.revocations {
            match written {
                Some(record) => all.insert(revoked.clone(), record.clone()),
                None => all.remove(revoked),
            };
        }
        all
    }
}

impl<E: Engine> Batch for OpenBatch<'_, E> {
    fn write(&mut self, writes: Vec<Write>) {
        let live = self.store.live();
        for write in &writes {
            let ops = schema::ops(write);
            self.applied.state_hash = schema::chain(self.applied.state_hash, &ops);
            self.ops.extend(ops);
            self.over.write(&live, write);
        }
        drop(live);
        self.writes.extend(writes);
    }

    fn advance(&mut self, index: u64, mark: Bytes) {
        self.applied.index = index;
        self.applied.mark = mark;
    }

    fn commit(mut self: Box<Self>) -> io::Result<Applied> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let store = self.store;
        store.latch.check()?;
        let _changing = store.changing.lock().expect(POISON);
        assert!(Arc::ptr_eq(&self.disk, &store.disk()), "the tables were replaced under an open batch");
        self.ops.push(schema::put_applied(&self.applied));
        store.fatal("writing the tables", self.disk.write(&self.ops, false))?;
        let mut live = store.live.write().expect(POISON);
        self.writes.iter().for_each(|write| live.write(write));
        *store.applied.write().expect(POISON) = self.applied.clone();
        drop(live);
        Ok(self.applied)
    }
}
