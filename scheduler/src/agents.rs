//! What the scheduler keeps of agents: the registry's records, and which of them are about to
//! change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use reach_protocol::{AgentId, AgentState, Command, Reply, agent::AgentRecord};

use crate::{Scheduler, message::Place};

/// How long an agent is held back for a change whose reply does not come, in milliseconds: longer than
/// the log ever stalls without losing its leader. Choices that meet the change after all are only
/// made again.
const CHANGE_MS: u64 = 60_000;
/// How long the facts of a change may come after its reply, in milliseconds.
const SETTLE_MS: u64 = 200;

/// Changes of agents that are proposed and not applied yet.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    by_agent: BTreeMap<AgentId, Changing>,
    by_due: BTreeSet<(u64, AgentId)>,
}

#[derive(Debug, Default)]
struct Changing {
    commands: Vec<Command>,
    due_ms: u64,
    /// One of them was replied to, and what it did is not seen yet.
    unseen: bool,
}

impl Changes {
    fn begin(&mut self, agent_id: &AgentId, command: &Command, due_ms: u64) {
        self.by_agent.entry(agent_id.clone()).or_default().commands.push(command.clone());
        self.put_off(agent_id, due_ms);
    }

    fn put_off(&mut self, agent_id: &AgentId, due_ms: u64) {
        let Some(changing) = self.by_agent.get_mut(agent_id) else { return };
        let before = std::mem::replace(&mut changing.due_ms, due_ms);
        self.by_due.remove(&(before, agent_id.clone()));
        self.by_due.insert((due_ms, agent_id.clone()));
    }

    /// A reply to one that is on its way, and whether what it did is seen. After the last one: whether
    /// all is seen.
    fn end(&mut self, agent_id: &AgentId, command: &Command, is_seen: bool) -> Option<bool> {
        let changing = self.by_agent.get_mut(agent_id)?;
        let index = changing.commands.iter().position(|other| other == command)?;
        changing.commands.swap_remove(index);
        changing.unseen |= !is_seen;
        changing.commands.is_empty().then_some(!changing.unseen)
    }

    /// A fact about the agent: this is what was awaited, if anything was.
    fn seen(&mut self, agent_id: &AgentId) {
        let Some(changing) = self.by_agent.get_mut(agent_id) else { return };
        changing.unseen = false;
        if changing.commands.is_empty() {
            self.forget(agent_id);
        }
    }

    fn contains(&self, agent_id: &AgentId) -> bool {
        self.by_agent.contains_key(agent_id)
    }

    fn forget(&mut self, agent_id: &AgentId) -> bool {
        let known = self.by_agent.remove(agent_id);
        known.is_some_and(|changing| self.by_due.remove(&(changing.due_ms, agent_id.clone())))
    }

    pub fn next_due(&self) -> Option<u64> {
        self.by_due.first().map(|(due_ms, _)| *due_ms)
    }

    fn overdue(&mut self, now_ms: u64) -> Option<AgentId> {
        let (_, agent_id) = self.by_due.first().filter(|(due_ms, _)| *due_ms <= now_ms)?;
        let agent_id = agent_id.clone();
        self.forget(&agent_id);
        Some(agent_id)
    }
}

impl Scheduler {
    pub(crate) fn put_agent(&mut self, record: &Arc<AgentRecord>) {
        let agent_id = record.agent_id();
        self.agents.insert(agent_id.clone(), record.clone());
        self.router.put(record, self.slots.taken(agent_id));
        self.changes.seen(agent_id);
        self.router.set_changing(agent_id, self.changes.contains(agent_id));
        for msg_id in self.slots.messages(agent_id) {
            match self.messages.get(&msg_id).map(|tracked| (&tracked.place, tracked.record.clone())) {
                None => {}
                // What it holds is now due another time.
                Some((Place::Held, _)) => self.reckon(&msg_id),
                // It is back: what it has looks for nobody else.
                Some((_, held)) if held.state.holder().is_some_and(|held| held.agent_id == *agent_id) => {
                    self.put_message(&held);
                }
                Some(_) => {}
            }
        }
        self.agent_moved(agent_id);
    }

    pub(crate) fn remove_agent(&mut self, agent_id: &AgentId) {
        self.agents.remove(agent_id);
        self.router.remove(agent_id);
        self.changes.seen(agent_id);
        self.agent_moved(agent_id);
    }

    fn agent_moved(&mut self, agent_id: &AgentId) {
        self.outlook_moved = true;
        if self.router.is_free(agent_id) {
            self.wake.insert(agent_id.clone());
        } else {
            self.readiness_fell = true;
        }
    }

    /// After a change in the slots of an agent.
    pub(crate) fn slots_moved(&mut self, agent_id: &AgentId) {
        self.router.set_taken(agent_id, self.slots.taken(agent_id));
        if self.router.is_free(agent_id) {
            self.wake.insert(agent_id.clone());
        }
    }

    /// A command on its way that will take an agent out of the choice, or make it another: what is
    /// chosen from now on would be applied after it.
    pub(crate) fn note_change(&mut self, command: &Command) {
        let Some(agent_id) = changes_agent(command) else { return };
        let record = self.agents.get(agent_id);
        let matters = match command {
            Command::Register { registration, instance, author, .. } => {
                let is_same = |record: &Arc<AgentRecord>| {
                    record.instance == *instance && record.registration == **registration
                };
                // Equal to what is there now says nothing while another change comes before it.
                author.acts_for(agent_id) && (self.changes.contains(agent_id) || !record.is_some_and(is_same))
            }
            Command::Remove { instance, author, .. } => {
                let is_meant = record.is_some_and(|record| Some(&record.instance) == instance.as_ref());
                // What is on its way before it may be what is meant.
                (is_meant || self.changes.contains(agent_id))
                    && (author.acts_for(agent_id) || self.rules.rules.is_operator(author))
            }
            Command::Drain { drain_seq, author, .. } => {
                let is_new =
                    |record: &Arc<AgentRecord>| record.drain_seq == *drain_seq && record.drain.is_none();
                (record.is_some_and(is_new) || self.changes.contains(agent_id))
                    && self.rules.rules.is_operator(author)
            }
            Command::SetLiveness { instance, liveness_seq, state, .. } => {
                let is_current = |record: &Arc<AgentRecord>| {
                    record.instance == *instance && record.liveness_seq == *liveness_seq
                };
                *state != AgentState::Ready && record.is_some_and(is_current)
            }
            _ => false,
        };
        if matters {
            self.changes.begin(agent_id, command, self.now_ms + CHANGE_MS);
            self.router.set_changing(agent_id, true);
        }
    }

    pub(crate) fn change_replied(&mut self, command: &Command, reply: &Reply) {
        let Some(agent_id) = changes_agent(command) else { return };
        let is_seen = is_seen(command, reply, self.agents.get(agent_id));
        let Some(all_seen) = self.changes.end(agent_id, command, is_seen) else { return };
        if all_seen {
            self.changes.forget(agent_id);
            self.router.set_changing(agent_id, false);
            self.agent_moved(agent_id);
        } else {
            self.changes.put_off(agent_id, self.now_ms + SETTLE_MS);
        }
    }

    pub(crate) fn drop_overdue_changes(&mut self) {
        while let Some(agent_id) = self.changes.overdue(self.now_ms) {
            self.router.set_changing(&agent_id, false);
            self.agent_moved(&agent_id);
        }
    }
}

/// Whether what this command did is in the record already, or it did nothing for certain. Some that
/// did nothing can't be told from those whose facts are still to come.
fn is_seen(command: &Command, reply: &Reply, record: Option<&Arc<AgentRecord>>) -> bool {
    match (command, reply) {
        (_, Reply::Void | Reply::Refused(_)) => true,
        // By their starts, since the record may still be that of the run before the replied one.
        (Command::Drain { .. }, Reply::Agent(replied)) => record.is_none_or(|record| {
            let of = |record: &AgentRecord| (record.started_ms, record.instance.clone(), record.drain_seq);
            of(record) >= of(replied)
        }),
        (_, Reply::Agent(replied)) => record.is_some_and(|record| {
            record.instance == replied.instance && record.registration == replied.registration
        }),
        (Command::SetLiveness { instance, liveness_seq, .. }, _) => {
            record.is_none_or(|record| record.instance != *instance || record.liveness_seq > *liveness_seq)
        }
        _ => record.is_none(),
    }
}

fn changes_agent(command: &Command) -> Option<&AgentId> {
    match command {
        Command::Register { registration, .. } => Some(&registration.agent_id),
        Command::Remove { agent_id, .. }
        | Command::SetLiveness { agent_id, .. }
        | Command::Drain { agent_id, .. } => Some(agent_id),
        _ => None,
    }
}
