//! The part of the tables that is kept in memory: registry, unfinished messages, slots, rules, revocations,
//! topics and groups. A
//! function of the writes alone, so every store and every test can share it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use reach_protocol::{
    AgentId, EventType, MessageState, MsgId, Name, Principal, Revocation, Revoked, RulesRecord,
    agent::AgentRecord,
    certificate::Fingerprint,
    event::{GroupPosition, GroupRecord, TopicRecord},
    id::Serial,
    message::MessageRecord,
};

use crate::rows::{Slot, Write};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Live {
    pub rules: Arc<RulesRecord>,
    pub agents: BTreeMap<AgentId, Arc<AgentRecord>>,
    /// Unfinished ones only.
    pub messages: BTreeMap<MsgId, Arc<MessageRecord>>,
    pub slots: BTreeMap<AgentId, BTreeMap<MsgId, Slot>>,
    /// How many of `messages` are pending.
    pub waiting: u64,
    pub revocations: BTreeMap<Revoked, Arc<Revocation>>,
    pub topics: BTreeMap<EventType, Arc<TopicRecord>>,
    pub groups: BTreeMap<Name, Arc<GroupRecord>>,
    pub positions: BTreeMap<Name, BTreeMap<EventType, Arc<GroupPosition>>>,
    /// By member: the positions in which it has open events.
    pub held: BTreeMap<Name, BTreeSet<(Name, EventType)>>,
}

impl Live {
    /// Brings the memory to where `write` brings the tables.
    pub fn write(&mut self, write: &Write) {
        match write {
            Write::PutRules(rules) => self.rules = rules.clone(),
            Write::PutAgent(record) => {
                self.agents.insert(record.agent_id().clone(), record.clone());
            }
            Write::RemoveAgent { agent_id, .. } => {
                self.agents.remove(agent_id);
            }
            Write::PutMessage(record) => {
                let is_waiting =
                    |record: &MessageRecord| matches!(record.state, MessageState::Pending { .. });
                let before = if record.state.is_final() {
                    self.messages.remove(&record.msg_id)
                } else {
                    self.messages.insert(record.msg_id.clone(), record.clone())
                };
                self.waiting += u64::from(is_waiting(record));
                self.waiting -= u64::from(before.is_some_and(|before| is_waiting(&before)));
            }
            Write::PutSlot { agent_id, msg_id, slot } => {
                self.slots.entry(agent_id.clone()).or_default().insert(msg_id.clone(), slot.clone());
            }
            Write::RemoveSlot { agent_id, msg_id } => {
                if let Some(slots) = self.slots.get_mut(agent_id) {
                    slots.remove(msg_id);
                    if slots.is_empty() {
                        self.slots.remove(agent_id);
                    }
                }
            }
            Write::PutRevocation(revocation) => {
                self.revocations.insert(revocation.revoked.clone(), revocation.clone());
            }
            Write::RemoveRevocation(revoked) => {
                self.revocations.remove(revoked);
            }
            Write::PutTopic(record) => {
                self.topics.insert(record.event_type.clone(), record.clone());
            }
            Write::PutGroup(record) => {
                self.groups.insert(record.group.clone(), record.clone());
            }
            Write::RemoveGroup { group } => {
                self.groups.remove(group);
            }
            Write::PutPosition(position) => {
                let positions = self.positions.entry(position.group.clone()).or_default();
                let before = positions.insert(position.event_type.clone(), position.clone());
                self.hold(before.as_deref(), Some(position));
            }
            Write::RemovePosition { group, event_type } => {
                if let Some(positions) = self.positions.get_mut(group) {
                    let before = positions.remove(event_type);
                    if positions.is_empty() {
                        self.positions.remove(group);
                    }
                    self.hold(before.as_deref(), None);
                }
            }
            Write::PutEnvelope { .. }
            | Write::PutResult { .. }
            | Write::PutDelivered { .. }
            | Write::PutTrace { .. }
            | Write::PutHop { .. }
            | Write::PutEvent(_)
            | Write::RemoveEvents { .. }
            | Write::PutEventMark { .. }
            | Write::RemoveEventMark { .. }
            | Write::PutDeadLetter(_) => {}
        }
    }

    /// Notes who holds events in a position that is another now.
    fn hold(&mut self, before: Option<&GroupPosition>, now: Option<&GroupPosition>) {
        let members = |position: Option<&GroupPosition>| -> BTreeSet<Name> {
            let open = position.into_iter().flat_map(|position| &position.open);
            open.filter_map(|open| open.member.clone()).collect()
        };
        let Some(position) = now.or(before) else { return };
        let (before, now) = (members(before), members(now));
        let place = || (position.group.clone(), position.event_type.clone());
        for member in before.difference(&now) {
            if let Some(held) = self.held.get_mut(member) {
                held.remove(&place());
                if held.is_empty() {
                    self.held.remove(member);
                }
            }
        }
        for member in now.difference(&before) {
            self.held.entry(member.clone()).or_default().insert(place());
        }
    }

    /// What revokes this certificate, if anything does. `made_s`: when it was made, in seconds since
    /// 1970.
    pub fn revocation(
        &self,
        fingerprint: Fingerprint,
        serial: &Serial,
        principal: &Principal,
        made_s: u64,
    ) -> Option<&Arc<Revocation>> {
        let until = |made_until_s| Revoked::Identity { principal: principal.clone(), made_until_s };
        self.revocations
            .get(&Revoked::Certificate(fingerprint))
            .or_else(|| self.revocations.get(&Revoked::Serial(serial.clone())))
            .or_else(|| {
                self.revocations.range(until(made_s)..=until(u64::MAX)).map(|(_, found)| found).next()
            })
    }

    pub fn slots_taken(&self, agent_id: &AgentId) -> u32 {
        self.slots.get(agent_id).map_or(0, |slots| slots.len() as u32)
    }
}
