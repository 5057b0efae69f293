//! Bringing waiting messages and free agents together: oldest first.

use std::{collections::BTreeSet, sync::Arc};

use reach_protocol::{AgentId, Command, message::Holder};
use reach_routing::Routed;

use crate::{
    Output, Scheduler,
    message::Place,
    queue::{QueueKey, Turn, avoided},
};

/// Assignments made for one input: the rest waits for the next, so that a long queue that meets
/// many free agents holds nothing else up.
const ASSIGN_MAX: usize = 4096;

impl Scheduler {
    /// Makes every assignment that has become possible. Afterwards no message waits for somebody
    /// who is free, unless the bound was reached.
    pub(crate) fn assign(&mut self, outputs: &mut Vec<Output>) {
        let mut left = ASSIGN_MAX;
        if self.queues.is_empty() {
            self.wake.clear();
            self.dirty.clear();
        }
        while left > 0
            && let Some(agent_id) = self.wake.first().cloned()
        {
            let served = match self.oldest_for(&agent_id) {
                Some(key) => self.assign_head(&key, outputs),
                None => false,
            };
            left -= usize::from(served);
            if !served {
                self.wake.remove(&agent_id);
            }
        }
        self.assign_dirty(left, outputs);
    }

    /// The queue whose head this agent should take next.
    fn oldest_for(&mut self, agent_id: &AgentId) -> Option<Arc<QueueKey>> {
        if !self.router.is_free(agent_id) {
            return None;
        }
        let tags = self.router.tags(agent_id).cloned().collect();
        let router = &mut self.router;
        self.queues.oldest(agent_id, tags, |key| router.accepts(agent_id, &key.target, &key.avoid))
    }

    /// The queues that were marked, the oldest head first, each until nobody can take its head.
    fn assign_dirty(&mut self, mut left: usize, outputs: &mut Vec<Output>) {
        let dirty = std::mem::take(&mut self.dirty);
        let mut heads: BTreeSet<(Turn, Arc<QueueKey>)> = dirty
            .into_iter()
            .filter_map(|key| self.queues.head(&key).cloned().map(|head| (head, key)))
            .collect();
        while left > 0
            && let Some((_, key)) = heads.pop_first()
        {
            if self.assign_head(&key, outputs) {
                left -= 1;
                heads.extend(self.queues.head(&key).cloned().map(|head| (head, key)));
            }
        }
        self.dirty.extend(heads.into_iter().map(|(_, key)| key));
    }

    /// Gives the oldest message of a queue to whom the choice falls on, if there is anybody.
    fn assign_head(&mut self, key: &Arc<QueueKey>, outputs: &mut Vec<Output>) -> bool {
        let Some(turn) = self.queues.head(key).cloned() else { return false };
        let (_, msg_id) = &turn;
        let tracked = self.messages.get_mut(msg_id).expect("a queued message is tracked");
        let record = tracked.record.clone();
        let Routed::Give { holder, warnings } = self.router.route(&record.target, &avoided(&record)) else {
            return false;
        };
        let Holder { agent_id, .. } = &holder;
        tracked.place = Place::Assigning { agent_id: agent_id.clone(), until_ms: None };
        self.queues.remove(key, &turn);
        self.slots.reserve(agent_id, msg_id);
        self.slots_moved(agent_id);
        let (msg_id, attempt) = (msg_id.clone(), record.attempt);
        let command = match record.state.holder().cloned() {
            None => Command::Assign { msg_id, attempt, holder, warnings },
            Some(lost) => Command::Retake { msg_id, attempt, holder: lost, to: Some(holder), warnings },
        };
        outputs.push(Output::Propose { ticket: None, command });
        true
    }
}
