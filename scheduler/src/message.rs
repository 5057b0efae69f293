//! The unfinished messages, each in its place: waiting in a queue, on its way to an agent, or held
//! by one. Follows the facts.

use std::sync::Arc;

use reach_protocol::{
    AgentId, MessageState, MsgId,
    message::{Holder, MessageRecord},
};
use reach_routing::Outlook;

use crate::{
    Scheduler, is_pending,
    queue::{QueueKey, turn},
};

/// How long a message rests after an assignment that was replied to and moved nothing, in
/// milliseconds: its facts may still be to come, and whatever stood in its way is not asked at the
/// speed of the log.
const REST_MS: u64 = 200;

#[derive(Debug)]
pub(crate) struct Tracked {
    pub record: Arc<MessageRecord>,
    pub place: Place,
    /// Its entry in `by_due`.
    pub due_ms: u64,
    /// When an end of it, or of its attempt, was last proposed.
    pub asked_ms: Option<u64>,
}

#[derive(Debug)]
pub(crate) enum Place {
    Queued(Arc<QueueKey>),
    /// An assignment to this agent is on its way, or was replied to and its facts are awaited.
    Assigning {
        agent_id: AgentId,
        until_ms: Option<u64>,
    },
    /// Its next attempt has a time of its own, or an assignment did not get into the log.
    Resting {
        until_ms: u64,
    },
    Held,
}

impl Scheduler {
    /// Brings a message to where a fact says it is.
    pub(crate) fn put_message(&mut self, record: &Arc<MessageRecord>) {
        self.submission_applied(record);
        self.attempt_over(record);
        self.displace(&record.msg_id, record.state.holder());
        if record.state.is_final() {
            if let Some(holder) = record.state.holder() {
                let due_ms = record.since.cluster_ms + self.rules.rules.delivery.stuck_slot_ms;
                self.slots.ended(&holder.agent_id, &record.msg_id, due_ms);
            }
            return;
        }
        let place = match &record.state {
            MessageState::Matched { holder } => {
                let Holder { agent_id, .. } = holder;
                self.slots.take(agent_id, &record.msg_id, record.attempt, record.since.cluster_ms);
                self.slots_moved(agent_id);
                Place::Held
            }
            MessageState::Pending { .. } => match self.waits_until_ms(record) {
                Some(until_ms) => Place::Resting { until_ms },
                None => self.enqueue(record),
            },
            _ => Place::Held,
        };
        self.pending += u64::from(is_pending(record));
        let tracked = Tracked { record: record.clone(), place, due_ms: 0, asked_ms: None };
        self.messages.insert(record.msg_id.clone(), tracked);
        self.reckon(&record.msg_id);
    }

    /// The slot of an attempt that a later one has taken the place of may stay with its agent, for as
    /// long as that of an ended message. Where it does not, the fact that frees it follows.
    fn attempt_over(&mut self, record: &MessageRecord) {
        let Some(before) = self.messages.get(&record.msg_id).map(|tracked| tracked.record.clone()) else {
            return;
        };
        if let MessageState::Acknowledged { holder } = &before.state
            && before.attempt < record.attempt
        {
            let due_ms = record.since.cluster_ms + self.rules.rules.delivery.stuck_slot_ms;
            self.slots.ended(&holder.agent_id, &record.msg_id, due_ms);
        }
    }

    /// Takes a message out of its place. A slot reserved for it is given back, unless it went to
    /// `holder` now.
    fn displace(&mut self, msg_id: &MsgId, holder: Option<&Holder>) {
        let Some(tracked) = self.messages.remove(msg_id) else { return };
        self.by_due.remove(&(tracked.due_ms, msg_id.clone()));
        self.pending -= u64::from(is_pending(&tracked.record));
        match tracked.place {
            Place::Queued(key) => self.queues.remove(&key, &turn(&tracked.record)),
            Place::Assigning { agent_id, .. } if holder.is_none_or(|holder| holder.agent_id != agent_id) => {
                self.slots.cancel(&agent_id, msg_id);
                self.slots_moved(&agent_id);
            }
            Place::Assigning { .. } | Place::Resting { .. } | Place::Held => {}
        }
    }

    /// Puts a message in its queue, and has the queue looked at.
    pub(crate) fn enqueue(&mut self, record: &MessageRecord) -> Place {
        let (key, is_new) = self.queues.push(QueueKey::of(record), turn(record));
        if is_new {
            let none_ready =
                matches!(self.router.outlook(&record.target), Outlook::NoneReady | Outlook::NoCandidate);
            let queue = self.queues.queue_mut(&key).expect("it was just made");
            queue.none_ready_since_ms = none_ready.then_some(self.now_ms);
        }
        self.dirty.insert(key.clone());
        Place::Queued(key)
    }

    /// The answer to an assignment. It says nothing: the facts do, and when they don't come the
    /// choice no longer held.
    pub(crate) fn assignment_replied(&mut self, msg_id: &MsgId, attempt: u32, is_void: bool) {
        let Some(tracked) = self.messages.get_mut(msg_id) else { return };
        if tracked.record.attempt != attempt {
            return;
        }
        let Place::Assigning { agent_id, until_ms } = &mut tracked.place else { return };
        let rest_until_ms = self.now_ms + REST_MS;
        if is_void {
            let agent_id = agent_id.clone();
            tracked.place = Place::Resting { until_ms: rest_until_ms };
            self.slots.cancel(&agent_id, msg_id);
            self.slots_moved(&agent_id);
        } else {
            *until_ms = Some(rest_until_ms);
        }
        self.reckon(msg_id);
    }

    /// Has a message chosen for again, when the assignment before came to nothing.
    pub(crate) fn rested(&mut self, msg_id: &MsgId) {
        let Some(tracked) = self.messages.get_mut(msg_id) else { return };
        let agent_id = match &tracked.place {
            Place::Resting { until_ms } if *until_ms <= self.now_ms => None,
            Place::Assigning { agent_id, until_ms: Some(until_ms) } if *until_ms <= self.now_ms => {
                Some(agent_id.clone())
            }
            _ => return,
        };
        let record = tracked.record.clone();
        if let Some(agent_id) = agent_id {
            self.decision_stale += 1;
            self.slots.cancel(&agent_id, msg_id);
            self.slots_moved(&agent_id);
        }
        let place = self.enqueue(&record);
        self.messages.get_mut(msg_id).expect("it was there above").place = place;
    }
}

impl Tracked {
    pub fn rests_until_ms(&self) -> Option<u64> {
        match &self.place {
            Place::Resting { until_ms } => Some(*until_ms),
            Place::Assigning { until_ms, .. } => *until_ms,
            Place::Queued(_) | Place::Held => None,
        }
    }
}
