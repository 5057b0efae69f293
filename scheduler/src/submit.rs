//! Submissions: the choice is made here, once, before the log sees them.

use std::collections::BTreeMap;

use reach_protocol::{
    AgentId, Command, ErrorReply, MessageState, MsgId, Reply, Warning,
    command::{Decision, Submit},
    message::{MessageRecord, PendingReason},
};
use reach_routing::{Outlook, Routed};

use crate::{Output, Scheduler, Ticket, queue::QueueKey, refusal};

/// A submission between its proposal and its fact.
#[derive(Debug, Default)]
pub(crate) struct OnItsWay {
    /// Who was chosen; its slot is reserved.
    reserved: Option<AgentId>,
    /// The queue it will join.
    waits_in: Option<QueueKey>,
    /// Repeats included; each is replied to.
    proposals: u32,
}

/// How many submissions on their way will wait, by the queue they will join.
#[derive(Debug, Default)]
pub(crate) struct Coming {
    by_queue: BTreeMap<QueueKey, u64>,
    total: u64,
}

impl Coming {
    fn add(&mut self, key: &QueueKey) {
        *self.by_queue.entry(key.clone()).or_default() += 1;
        self.total += 1;
    }

    fn remove(&mut self, key: &QueueKey) {
        let Some(count) = self.by_queue.get_mut(key) else { return };
        *count -= 1;
        self.total -= 1;
        if *count == 0 {
            self.by_queue.remove(key);
        }
    }

    fn contains(&self, key: &QueueKey) -> bool {
        self.by_queue.contains_key(key)
    }

    fn total(&self) -> u64 {
        self.total
    }
}

impl Scheduler {
    pub(crate) fn submit(
        &mut self,
        ticket: Option<Ticket>,
        mut submit: Box<Submit>,
        outputs: &mut Vec<Output>,
    ) {
        let mut own_warnings = match &mut submit.decision {
            Decision::Give { warnings, .. } | Decision::Wait { warnings, .. } => std::mem::take(warnings),
        };
        match self.decide(&submit) {
            Ok(decision) => {
                submit.decision = decision;
                let (Decision::Give { warnings, .. } | Decision::Wait { warnings, .. }) =
                    &mut submit.decision;
                own_warnings.retain(|warning| !warnings.contains(warning));
                warnings.splice(..0, own_warnings);
                outputs.push(Output::Propose { ticket, command: Command::Submit(submit) });
            }
            Err(refusal) => {
                let reply = Reply::Refused(Box::new(refusal.with_msg_id(&submit.msg_id)));
                outputs.extend(ticket.map(|ticket| Output::Answer { ticket, reply }));
            }
        }
    }

    /// Where it goes, or why it goes nowhere. A repeat of a message that has *ended* is not told from
    /// a new one here, and may be refused: ingress looks the `msg_id` up in the tables first and
    /// answers such a repeat from there.
    fn decide(&mut self, submit: &Submit) -> Result<Decision, ErrorReply> {
        if let Some(on_its_way) = self.on_their_way.get_mut(&submit.msg_id) {
            on_its_way.proposals += 1;
            return Ok(repeat());
        }
        if self.messages.contains_key(&submit.msg_id) {
            return Ok(repeat());
        }
        let key = QueueKey::new(&submit.target, &[]);
        let (reason, warnings) = match self.route(submit, &key) {
            Routed::Give { holder, warnings } => {
                self.slots.reserve(&holder.agent_id, &submit.msg_id);
                self.slots_moved(&holder.agent_id);
                let reserved = Some(holder.agent_id.clone());
                self.send(submit, OnItsWay { reserved, waits_in: None, proposals: 1 });
                return Ok(Decision::Give { holder, warnings });
            }
            Routed::Wait { reason, warnings } => (reason, warnings),
            Routed::NoCandidate(nobody) => return Err(refusal::no_candidate(&submit.target, nobody)),
        };

        let routing = &self.rules.rules.routing;
        if reason == PendingReason::NoneReady && routing.wait_for_agent_ms == 0 {
            return Err(refusal::none_ready(&submit.target, 0));
        }
        let waiting = self.pending + self.coming.total();
        if waiting >= routing.waiting_max {
            return Err(refusal::overloaded(waiting, routing.waiting_max));
        }
        self.coming.add(&key);
        self.send(submit, OnItsWay { reserved: None, waits_in: Some(key), proposals: 1 });
        Ok(Decision::Wait { reason, warnings })
    }

    /// The choice, unless others with the same requirement wait already: those come first.
    fn route(&mut self, submit: &Submit, key: &QueueKey) -> Routed {
        if !self.queues.contains(key) && !self.coming.contains(key) {
            return self.router.route(&submit.target, &[]);
        }
        match self.router.outlook(&submit.target) {
            Outlook::NoCandidate => Routed::NoCandidate(self.router.no_candidate(&submit.target)),
            Outlook::NoneReady => Routed::Wait { reason: PendingReason::NoneReady, warnings: Vec::new() },
            Outlook::Free | Outlook::Saturated => {
                Routed::Wait { reason: PendingReason::Saturated, warnings: vec![Warning::CapacityHint] }
            }
        }
    }

    fn send(&mut self, submit: &Submit, on_its_way: OnItsWay) {
        self.on_their_way.insert(submit.msg_id.clone(), on_its_way);
    }

    /// A fact about a message: if it was on its way, it has arrived.
    pub(crate) fn submission_applied(&mut self, record: &MessageRecord) {
        let Some(on_its_way) = self.on_their_way.get_mut(&record.msg_id) else { return };
        let (reserved, waits_in) = (on_its_way.reserved.take(), on_its_way.waits_in.take());
        let holder = record.state.holder().map(|holder| &holder.agent_id);
        // A reservation that became the slot is taken over by the message itself.
        let unused = reserved.filter(|agent_id| Some(agent_id) != holder);
        let stale = MessageState::Pending { reason: PendingReason::DecisionStale };
        self.decision_stale += u64::from(unused.is_some() && record.state == stale);
        if on_its_way.proposals == 0 {
            self.on_their_way.remove(&record.msg_id);
        }
        self.take_back(&record.msg_id, unused, waits_in);
    }

    /// The answer to a submission. After the last one nothing of it is on its way, unless it was
    /// accepted and the fact that says so is still to come.
    pub(crate) fn submission_replied(&mut self, submit: &Submit, reply: &Reply) {
        let Some(on_its_way) = self.on_their_way.get_mut(&submit.msg_id) else { return };
        // A repeat that came after the last answer stands for none.
        on_its_way.proposals = on_its_way.proposals.saturating_sub(1);
        let has_arrived = on_its_way.reserved.is_none() && on_its_way.waits_in.is_none();
        let arrives = matches!(reply, Reply::Message(record) if !record.state.is_final());
        if on_its_way.proposals == 0
            && (has_arrived || !arrives)
            && let Some(OnItsWay { reserved, waits_in, .. }) = self.on_their_way.remove(&submit.msg_id)
        {
            self.take_back(&submit.msg_id, reserved, waits_in);
        }
    }

    fn take_back(&mut self, msg_id: &MsgId, reserved: Option<AgentId>, waits_in: Option<QueueKey>) {
        if let Some(agent_id) = reserved {
            self.slots.cancel(&agent_id, msg_id);
            self.slots_moved(&agent_id);
        }
        if let Some(key) = waits_in {
            self.coming.remove(&key);
        }
    }
}

/// Apply answers a repeat with the first submission's message, whatever the choice; it takes no
/// slot.
fn repeat() -> Decision {
    Decision::Wait { reason: PendingReason::DecisionStale, warnings: Vec::new() }
}
