//! What time alone brings: deadlines, attempts that nobody received, messages nobody is ready for,
//! slots that were never let go of. Apply decides each by its entry's stamp; here it is only asked.

use std::ops::Bound;

use reach_protocol::{
    AgentState, Command, MessageState, MsgId, Target,
    codec::digest,
    message::{MessageRecord, PendingReason, RETRY_AFTER_MS},
};
use reach_routing::Outlook;

use crate::{
    Output, Scheduler, is_pending,
    message::{Place, Tracked},
    refusal,
};

/// When an end that was proposed and not applied is proposed again, in milliseconds.
const ASK_AGAIN_MS: u64 = 1_000;
/// How often queues are looked at for messages that nobody is ready for, in milliseconds.
const OUTLOOK_MS: u64 = 500;
/// Deadlines handled in one tick; the rest is due at the next.
const DUE_MAX: usize = 8192;

impl Scheduler {
    pub(crate) fn tick(&mut self, outputs: &mut Vec<Output>) {
        self.drop_overdue_changes();
        self.free_stuck_slots(outputs);
        self.end_overdue(outputs);
        if self.now_ms >= self.next_outlook_ms {
            self.next_outlook_ms = self.now_ms + OUTLOOK_MS;
            self.look_out();
            self.give_up(outputs);
        }
        if std::mem::take(&mut self.readiness_fell) {
            self.dirty.extend(self.queues.avoiding().cloned());
        }
    }

    fn free_stuck_slots(&mut self, outputs: &mut Vec<Output>) {
        for _ in 0..DUE_MAX {
            let again_ms = self.now_ms + ASK_AGAIN_MS;
            let Some((agent_id, msg_id, attempt)) = self.slots.overdue(self.now_ms, again_ms) else { return };
            propose(outputs, Command::FreeSlot { agent_id, msg_id, attempt });
        }
    }

    fn end_overdue(&mut self, outputs: &mut Vec<Output>) {
        for _ in 0..DUE_MAX {
            let due = self.by_due.first().filter(|(due_ms, _)| *due_ms <= self.now_ms);
            let Some((_, msg_id)) = due.cloned() else { return };
            self.end(&msg_id, outputs);
            self.reckon(&msg_id);
        }
    }

    fn end(&mut self, msg_id: &MsgId, outputs: &mut Vec<Output>) {
        let now_ms = self.now_ms;
        let give_back_ms = self.give_back_ms(&self.messages[msg_id]);
        let retake_ms = self.retake_ms(&self.messages[msg_id]);
        let hand_on_ms = self.hand_on_ms(&self.messages[msg_id]);
        let tracked = self.messages.get_mut(msg_id).expect("only tracked messages are due");
        let record = tracked.record.clone();
        if now_ms >= record.expires_ms {
            tracked.asked_ms = Some(now_ms);
            return propose(outputs, Command::TimeOut { msg_id: msg_id.clone() });
        }
        if give_back_ms.is_some_and(|due_ms| now_ms >= due_ms)
            && let Some(holder) = record.state.holder().cloned()
        {
            tracked.asked_ms = Some(now_ms);
            let (attempt, reason) = (record.attempt, PendingReason::DeliveryFailed);
            return propose(outputs, Command::Return { msg_id: msg_id.clone(), attempt, holder, reason });
        }
        if retake_ms.is_some_and(|due_ms| now_ms >= due_ms)
            && let Some(holder) = record.state.holder().cloned()
        {
            tracked.asked_ms = Some(now_ms);
            let (msg_id, attempt) = (msg_id.clone(), record.attempt);
            let command = Command::Retake { msg_id, attempt, holder, to: None, warnings: Vec::new() };
            return propose(outputs, command);
        }
        if hand_on_ms.is_some_and(|due_ms| now_ms >= due_ms) {
            let place = self.enqueue(&record);
            self.messages.get_mut(msg_id).expect("as above").place = place;
            return;
        }
        self.rested(msg_id);
    }

    /// Puts a message where it is due next.
    pub(crate) fn reckon(&mut self, msg_id: &MsgId) {
        let tracked = &self.messages[msg_id];
        let mut due_ms = tracked.record.expires_ms;
        due_ms = due_ms.min(self.give_back_ms(tracked).unwrap_or(u64::MAX));
        due_ms = due_ms.min(self.retake_ms(tracked).unwrap_or(u64::MAX));
        due_ms = due_ms.min(self.hand_on_ms(tracked).unwrap_or(u64::MAX));
        due_ms = due_ms.min(tracked.rests_until_ms().unwrap_or(u64::MAX));
        if let Some(asked_ms) = tracked.asked_ms {
            due_ms = due_ms.max(asked_ms + ASK_AGAIN_MS);
        }
        let before = std::mem::replace(&mut self.messages.get_mut(msg_id).expect("as above").due_ms, due_ms);
        self.by_due.remove(&(before, msg_id.clone()));
        self.by_due.insert((due_ms, msg_id.clone()));
    }

    /// After a change of the rules.
    pub(crate) fn reckon_all(&mut self) {
        for msg_id in self.messages.keys().cloned().collect::<Vec<_>>() {
            self.reckon(&msg_id);
        }
    }

    /// When an attempt that nobody has received ends.
    fn give_back_ms(&self, tracked: &Tracked) -> Option<u64> {
        let record = &tracked.record;
        let (MessageState::Matched { holder } | MessageState::Dispatched { holder }) = &record.state else {
            return None;
        };
        // From the choice on; being sent once more doesn't give it more time.
        let since_ms = self.slots.since_ms(&holder.agent_id, &record.msg_id, record.attempt);
        let since_ms = since_ms.unwrap_or(record.since.cluster_ms);
        Some(since_ms + self.rules.rules.delivery.give_back_after_ms)
    }

    /// Since when the agent that has received a task has been lost.
    fn lost_since_ms(&self, record: &MessageRecord) -> Option<u64> {
        let MessageState::Acknowledged { holder } = &record.state else { return None };
        let agent = self.agents.get(&holder.agent_id)?;
        let is_away = agent.state == AgentState::Offline && agent.instance == holder.instance;
        is_away.then_some(agent.since.cluster_ms)
    }

    /// When a task is taken from a lost agent, though there is no other for it.
    fn retake_ms(&self, tracked: &Tracked) -> Option<u64> {
        let record = &tracked.record;
        let stays_ms = self.rules.rules.delivery.return_within_ms.max(retry_after_ms(record).unwrap_or(0));
        self.lost_since_ms(record).map(|since_ms| since_ms + stays_ms)
    }

    /// When a lost agent's task begins to look for another one. Until that has it, it is not taken from
    /// the lost one.
    fn hand_on_ms(&self, tracked: &Tracked) -> Option<u64> {
        let record = &tracked.record;
        if !matches!((&tracked.place, &record.target), (Place::Held, Target::Capabilities { .. })) {
            return None;
        }
        let since_ms = self.lost_since_ms(record)?;
        retry_after_ms(record).map(|after_ms| since_ms + after_ms + jitter_ms(record, after_ms))
    }

    /// Until when a message waits for its next attempt.
    pub(crate) fn waits_until_ms(&self, record: &MessageRecord) -> Option<u64> {
        let at_ms = record.retry_at_ms?;
        let waited_ms = at_ms.saturating_sub(record.since.cluster_ms);
        Some(at_ms.saturating_add(jitter_ms(record, waited_ms))).filter(|until_ms| *until_ms > self.now_ms)
    }

    /// Notes which queues have nobody ready. How long that has been so counts, rather than how long
    /// a message has waited: a message behind busy agents is not given up the moment they restart.
    fn look_out(&mut self) {
        if !std::mem::take(&mut self.outlook_moved) {
            return;
        }
        for (key, queue) in self.queues.iter_mut() {
            let outlook = self.router.outlook(&key.target);
            if matches!(outlook, Outlook::NoneReady | Outlook::NoCandidate) {
                queue.none_ready_since_ms.get_or_insert(self.now_ms);
            } else {
                (queue.none_ready_since_ms, queue.looked_at) = (None, None);
            }
        }
    }

    /// Ends messages that were never matched, when nobody was ready for them for too long.
    fn give_up(&mut self, outputs: &mut Vec<Output>) {
        let wait_ms = self.rules.rules.routing.wait_for_agent_ms;
        let mut left = DUE_MAX;
        for (key, queue) in self.queues.iter_mut() {
            let Some(since_ms) = queue.none_ready_since_ms else { continue };
            if since_ms + wait_ms > self.now_ms {
                continue;
            }
            let from = queue.looked_at.take().map_or(Bound::Unbounded, Bound::Excluded);
            for turn in queue.turns.range((from, Bound::Unbounded)) {
                let (accepted, msg_id) = turn;
                if accepted.cluster_ms + wait_ms > self.now_ms {
                    break;
                }
                if left == 0 {
                    // Goes on from here at the next look.
                    queue.looked_at = Some(turn.clone());
                    break;
                }
                left -= 1;
                let tracked = self.messages.get_mut(msg_id).expect("a queued message is tracked");
                let asked = tracked.asked_ms.is_some_and(|asked_ms| asked_ms + ASK_AGAIN_MS > self.now_ms);
                if tracked.record.attempt > 0 || !is_pending(&tracked.record) || asked {
                    continue;
                }
                tracked.asked_ms = Some(self.now_ms);
                let error = match self.router.outlook(&key.target) {
                    Outlook::NoCandidate => {
                        refusal::no_candidate(&key.target, self.router.no_candidate(&key.target))
                    }
                    _ => refusal::none_ready(&key.target, wait_ms),
                };
                let error = Box::new(error.with_msg_id(msg_id));
                propose(outputs, Command::GiveUp { msg_id: msg_id.clone(), error });
            }
        }
    }
}

/// None when its attempts are used up.
fn retry_after_ms(record: &MessageRecord) -> Option<u64> {
    RETRY_AFTER_MS.get(record.retries as usize).copied()
}

/// Up to a quarter more, so that what was lost together is not tried again together. By the message
/// and its attempt: every leader comes to the same.
fn jitter_ms(record: &MessageRecord, after_ms: u64) -> u64 {
    let digest = digest(format!("{}#{}", record.msg_id, record.attempt).as_bytes());
    let share = u64::from(u16::from_be_bytes([digest[0], digest[1]]));
    after_ms / 4 * share / u64::from(u16::MAX)
}

fn propose(outputs: &mut Vec<Output>, command: Command) {
    outputs.push(Output::Propose { ticket: None, command });
}
