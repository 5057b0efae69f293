//! The slots of every agent: those that are taken by what was applied, and those that a choice on
//! its way will take.

use std::collections::{BTreeMap, BTreeSet};

use reach_protocol::{AgentId, MsgId};

#[derive(Debug, Default)]
pub(crate) struct Slots {
    by_agent: BTreeMap<AgentId, BTreeMap<MsgId, Hold>>,
    reserved: u64,
    /// Slots whose attempt is over, by when they are freed by force.
    ended: BTreeSet<(u64, AgentId, MsgId)>,
}

#[derive(Debug, Default)]
struct Hold {
    /// By what was applied.
    taken: Option<Taken>,
    /// By a choice that is not applied yet.
    reserved: bool,
    ended_due_ms: Option<u64>,
}

#[derive(Debug)]
struct Taken {
    attempt: u32,
    since_ms: u64,
}

impl Slots {
    pub fn taken(&self, agent_id: &AgentId) -> u32 {
        self.by_agent.get(agent_id).map_or(0, |holds| holds.len() as u32)
    }

    /// Those that hold a slot of this agent.
    pub fn messages(&self, agent_id: &AgentId) -> Vec<MsgId> {
        self.by_agent.get(agent_id).map_or(Vec::new(), |holds| holds.keys().cloned().collect())
    }

    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Since when this attempt has its slot, by cluster time.
    pub fn since_ms(&self, agent_id: &AgentId, msg_id: &MsgId, attempt: u32) -> Option<u64> {
        let taken = self.by_agent.get(agent_id)?.get(msg_id)?.taken.as_ref()?;
        (taken.attempt == attempt).then_some(taken.since_ms)
    }

    pub fn reserve(&mut self, agent_id: &AgentId, msg_id: &MsgId) {
        let hold = self.hold(agent_id, msg_id);
        let before = std::mem::replace(&mut hold.reserved, true);
        self.reserved += u64::from(!before);
    }

    /// Takes a reservation back; does nothing to a slot that is taken.
    pub fn cancel(&mut self, agent_id: &AgentId, msg_id: &MsgId) {
        let Some(hold) = self.by_agent.get_mut(agent_id).and_then(|holds| holds.get_mut(msg_id)) else {
            return;
        };
        if std::mem::replace(&mut hold.reserved, false) {
            self.reserved -= 1;
        }
        self.drop_if_free(agent_id, msg_id);
    }

    /// The choice was applied. It takes the place of an earlier attempt's slot at the same agent.
    pub fn take(&mut self, agent_id: &AgentId, msg_id: &MsgId, attempt: u32, since_ms: u64) {
        let hold = self.by_agent.entry(agent_id.clone()).or_default().entry(msg_id.clone()).or_default();
        if let Some(due_ms) = hold.ended_due_ms.take() {
            self.ended.remove(&(due_ms, agent_id.clone(), msg_id.clone()));
        }
        hold.taken = Some(Taken { attempt, since_ms });
        if std::mem::replace(&mut hold.reserved, false) {
            self.reserved -= 1;
        }
    }

    pub fn free(&mut self, agent_id: &AgentId, msg_id: &MsgId, attempt: u32) {
        let Some(hold) = self.by_agent.get_mut(agent_id).and_then(|holds| holds.get_mut(msg_id)) else {
            return;
        };
        if hold.taken.as_ref().is_some_and(|taken| taken.attempt == attempt) {
            hold.taken = None;
            if let Some(due_ms) = hold.ended_due_ms.take() {
                self.ended.remove(&(due_ms, agent_id.clone(), msg_id.clone()));
            }
        }
        self.drop_if_free(agent_id, msg_id);
    }

    /// The attempt is over: the slot, if it is still taken, is due to be freed at `due_ms`.
    pub fn ended(&mut self, agent_id: &AgentId, msg_id: &MsgId, due_ms: u64) {
        let Some(hold) = self.by_agent.get_mut(agent_id).and_then(|holds| holds.get_mut(msg_id)) else {
            return;
        };
        if hold.taken.is_none() {
            return;
        }
        if let Some(before) = hold.ended_due_ms.replace(due_ms) {
            self.ended.remove(&(before, agent_id.clone(), msg_id.clone()));
        }
        self.ended.insert((due_ms, agent_id.clone(), msg_id.clone()));
    }

    pub fn next_due(&self) -> Option<u64> {
        self.ended.first().map(|(due_ms, ..)| *due_ms)
    }

    /// One slot that is due, put off to `again_ms` in case nothing comes of it.
    pub fn overdue(&mut self, now_ms: u64, again_ms: u64) -> Option<(AgentId, MsgId, u32)> {
        let (_, agent_id, msg_id) = self.ended.first().filter(|(due_ms, ..)| *due_ms <= now_ms)?.clone();
        self.ended(&agent_id, &msg_id, again_ms);
        let taken = self.by_agent[&agent_id][&msg_id].taken.as_ref();
        let attempt = taken.expect("only a taken slot is due").attempt;
        Some((agent_id, msg_id, attempt))
    }

    fn hold(&mut self, agent_id: &AgentId, msg_id: &MsgId) -> &mut Hold {
        self.by_agent.entry(agent_id.clone()).or_default().entry(msg_id.clone()).or_default()
    }

    fn drop_if_free(&mut self, agent_id: &AgentId, msg_id: &MsgId) {
        let Some(holds) = self.by_agent.get_mut(agent_id) else { return };
        if holds.get(msg_id).is_some_and(|hold| hold.taken.is_none() && !hold.reserved) {
            holds.remove(msg_id);
        }
        if holds.is_empty() {
            self.by_agent.remove(agent_id);
        }
    }
}
