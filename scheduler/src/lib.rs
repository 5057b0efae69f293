//! The leader's mind, without I/O: what to propose, and what to answer without proposing. Its
//! driver feeds it inputs in order and does as the outputs say.
//!
//! Its view is what was applied plus what it has proposed itself: a slot is taken the moment a
//! choice falls on it, and free again only when apply says so. So a choice made here holds when it
//! is applied, unless somebody else had a say in between; apply checks, and a choice that no longer
//! holds is made again.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use reach_machine::Live;
use reach_protocol::{
    AgentId, Command, Fact, MsgId, Reply, RulesRecord,
    agent::AgentRecord,
    command::Submit,
    message::{MessageRecord, MessageState},
};
use reach_routing::Router;

mod agents;
mod assign;
mod deadline;
mod liveness;
mod message;
mod queue;
mod refusal;
mod slots;
mod submit;

use agents::Changes;
pub use liveness::{Ages, LinkId};
use message::Tracked;
use queue::{QueueKey, Queues};
use slots::Slots;
use submit::{Coming, OnItsWay};

/// The driver's name for a request that waits for an answer.
pub type Ticket = u64;

/// What happens to the scheduler. The facts of an entry may come shortly before or after the replies
/// to its commands.
#[derive(Debug)]
pub enum Input<'a> {
    /// A submission. Its decision is filled in here; warnings already in it are kept.
    Submit { ticket: Ticket, submit: Box<Submit> },
    /// Any other command on its way to the log; without a ticket when nobody waits for the reply.
    Propose { ticket: Option<Ticket>, command: Command },
    /// What an applied entry did, in log order.
    Applied { facts: &'a [Fact] },
    /// What came of a command that an output proposed: apply's reply, or `Void` when the driver
    /// could not bring it into the log. Every proposal gets exactly one.
    Replied { command: &'a Command, reply: &'a Reply },
    /// Time has passed: about every 100 ms, and at `next_due`.
    Tick,
}

/// What the driver must do, in this order.
#[derive(Debug, PartialEq)]
pub enum Output {
    /// Put it into the log; with a ticket, its reply answers that request.
    Propose { ticket: Option<Ticket>, command: Command },
    /// Answer the request; nothing goes into the log.
    Answer { ticket: Ticket, reply: Reply },
}

/// What the metrics show of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Messages that wait for an agent.
    pub waiting: u64,
    /// Slots taken by choices that are not applied yet.
    pub reserved: u64,
    /// Choices that no longer held when they were applied; 0 is normal.
    pub decision_stale: u64,
}

/// Starts from the applied tables when the first entry of its own term has been applied, and is
/// dropped with the leadership. Everything it holds is about unfinished messages and registered
/// agents, so that is what bounds its memory.
#[derive(Debug)]
pub struct Scheduler {
    now_ms: u64,
    rules: Arc<RulesRecord>,
    router: Router,
    agents: BTreeMap<AgentId, Arc<AgentRecord>>,
    changes: Changes,
    slots: Slots,
    /// Every unfinished message that was applied.
    messages: BTreeMap<MsgId, Tracked>,
    /// Those of `messages` that are pending.
    pending: u64,
    by_due: BTreeSet<(u64, MsgId)>,
    queues: Queues,
    /// Submissions proposed and not applied yet.
    on_their_way: BTreeMap<MsgId, OnItsWay>,
    coming: Coming,
    /// Agents that may have become able to take something that waits.
    wake: BTreeSet<AgentId>,
    /// Queues whose head may have somebody to go to.
    dirty: BTreeSet<Arc<QueueKey>>,
    /// An agent is no longer ready: messages that avoided others for it may go to those now.
    readiness_fell: bool,
    /// The outlook of the queues may be other than it was.
    outlook_moved: bool,
    next_outlook_ms: u64,
    decision_stale: u64,
}

impl Scheduler {
    /// `now_ms` is cluster time, here and everywhere in this crate but in [`Ages`].
    pub fn new(live: &Live, now_ms: u64) -> Self {
        let mut scheduler = Self {
            now_ms,
            rules: live.rules.clone(),
            router: Router::new(),
            agents: BTreeMap::new(),
            changes: Changes::default(),
            slots: Slots::default(),
            messages: BTreeMap::new(),
            pending: 0,
            by_due: BTreeSet::new(),
            queues: Queues::default(),
            on_their_way: BTreeMap::new(),
            coming: Coming::default(),
            wake: BTreeSet::new(),
            dirty: BTreeSet::new(),
            readiness_fell: false,
            outlook_moved: false,
            next_outlook_ms: now_ms,
            decision_stale: 0,
        };
        for (agent_id, slots) in &live.slots {
            for (msg_id, slot) in slots {
                scheduler.slots.take(agent_id, msg_id, slot.attempt, slot.since_ms);
                if live.messages.get(msg_id).is_none_or(|record| record.attempt != slot.attempt) {
                    // When its attempt ended is not in the tables. The whole time again is the safe
                    // side: an agent of one slot never runs two tasks.
                    let due_ms = now_ms + scheduler.rules.rules.delivery.stuck_slot_ms;
                    scheduler.slots.ended(agent_id, msg_id, due_ms);
                }
            }
        }
        for record in live.agents.values() {
            scheduler.put_agent(record);
        }
        for record in live.messages.values() {
            scheduler.put_message(record);
        }
        scheduler
    }

    pub fn handle(&mut self, input: Input<'_>, now_ms: u64) -> Vec<Output> {
        self.now_ms = self.now_ms.max(now_ms);
        let mut outputs = Vec::new();
        match input {
            Input::Submit { ticket, submit } => self.submit(Some(ticket), submit, &mut outputs),
            Input::Propose { ticket, command: Command::Submit(submit) } => {
                self.submit(ticket, submit, &mut outputs);
            }
            Input::Propose { ticket, command } => {
                self.note_change(&command);
                outputs.push(Output::Propose { ticket, command });
            }
            Input::Applied { facts } => facts.iter().for_each(|fact| self.fact(fact)),
            Input::Replied { command, reply } => self.replied(command, reply),
            Input::Tick => self.tick(&mut outputs),
        }
        self.assign(&mut outputs);
        outputs
    }

    fn fact(&mut self, fact: &Fact) {
        match fact {
            Fact::Registered(record) | Fact::LivenessChanged(record) | Fact::DrainChanged(record) => {
                self.put_agent(record);
            }
            Fact::Removed { agent_id, .. } => self.remove_agent(agent_id),
            // The new run's own fact follows.
            Fact::Fenced { .. } => {}
            Fact::Revoked(_) | Fact::Appended(_) | Fact::GroupChanged(_) => {}
            Fact::Freed { agent_id, msg_id, attempt } => {
                self.slots.free(agent_id, msg_id, *attempt);
                self.slots_moved(agent_id);
            }
            Fact::RulesChanged(rules) => {
                self.rules = rules.clone();
                self.reckon_all();
            }
            Fact::Submitted(record)
            | Fact::Matched(record)
            | Fact::Dispatched(record)
            | Fact::Acknowledged(record)
            | Fact::Returned(record)
            | Fact::Completed(record)
            | Fact::Failed(record)
            | Fact::TimedOut(record) => self.put_message(record),
        }
    }

    fn replied(&mut self, command: &Command, reply: &Reply) {
        match command {
            Command::Submit(submit) => self.submission_replied(submit, reply),
            Command::Assign { msg_id, attempt, .. }
            | Command::Retake { msg_id, attempt, to: Some(_), .. } => {
                self.assignment_replied(msg_id, *attempt, *reply == Reply::Void);
            }
            _ => self.change_replied(command, reply),
        }
    }

    /// Cluster time at which a `Tick` has something to do.
    pub fn next_due(&self) -> Option<u64> {
        if !self.wake.is_empty() || !self.dirty.is_empty() {
            return Some(self.now_ms);
        }
        let message = self.by_due.first().map(|(due_ms, _)| *due_ms);
        let outlook = (!self.queues.is_empty()).then_some(self.next_outlook_ms);
        [message, outlook, self.slots.next_due(), self.changes.next_due()].into_iter().flatten().min()
    }

    pub fn figures(&self) -> Figures {
        Figures {
            waiting: self.pending,
            reserved: self.slots.reserved(),
            decision_stale: self.decision_stale,
        }
    }
}

fn is_pending(record: &MessageRecord) -> bool {
    matches!(record.state, MessageState::Pending { .. })
}
