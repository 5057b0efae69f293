//! What the scheduler keeps of agents: the registry's records, and which of them are about to
//! change.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use reach_protocol::{AgentId, AgentState, Command, agent::AgentRecord};

use crate::Scheduler;

/// How long an agent is held back for a change whose reply does not come, in milliseconds: longer than
/// the log ever stalls without losing its leader. Choices that meet the change after all are only
/// made again.
const CHANGE_MS: u64 = 60_000;

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
}

impl Changes {
    fn begin(&mut self, agent_id: &AgentId, command: &Command, due_ms: u64) {
        let changing = self.by_agent.entry(agent_id.clone()).or_default();
        changing.commands.push(command.clone());
        let before = std::mem::replace(&mut changing.due_ms, due_ms);
        self.by_due.remove(&(before, agent_id.clone()));
        self.by_due.insert((due_ms, agent_id.clone()));
    }

    /// Whether that was the last one on its way.
    fn end(&mut self, agent_id: &AgentId, command: &Command) -> bool {
        let Some(changing) = self.by_agent.get_mut(agent_id) else { return false };
        if let Some(index) = changing.commands.iter().position(|other| other == command) {
            changing.commands.swap_remove(index);
        }
        changing.commands.is_empty() && self.forget(agent_id)
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
        self.router.set_changing(agent_id, self.changes.contains(agent_id));
        self.agent_moved(agent_id);
    }

    pub(crate) fn remove_agent(&mut self, agent_id: &AgentId) {
        self.agents.remove(agent_id);
        self.router.remove(agent_id);
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
            Command::Remove { author, .. } => {
                author.acts_for(agent_id) || self.rules.rules.is_operator(author)
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

    pub(crate) fn change_settled(&mut self, command: &Command) {
        if let Some(agent_id) = changes_agent(command)
            && self.changes.end(agent_id, command)
        {
            self.router.set_changing(agent_id, false);
            self.agent_moved(agent_id);
        }
    }

    pub(crate) fn drop_overdue_changes(&mut self) {
        while let Some(agent_id) = self.changes.overdue(self.now_ms) {
            self.router.set_changing(&agent_id, false);
            self.agent_moved(&agent_id);
        }
    }
}

fn changes_agent(command: &Command) -> Option<&AgentId> {
    match command {
        Command::Register { registration, .. } => Some(&registration.agent_id),
        Command::Remove { agent_id, .. } | Command::SetLiveness { agent_id, .. } => Some(agent_id),
        _ => None,
    }
}
