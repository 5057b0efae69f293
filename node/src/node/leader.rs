//! Drives the scheduler while this node leads: one queue in, one entry at a time out. Proposals that
//! arrive while an entry is on its way ride in the next one.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use reach_protocol::{Code, Command, Entry, ErrorReply, Reply};
use reach_raft::{Cursor, ProposeError, Step};
use reach_scheduler::{Input, Output, Scheduler, Ticket};
use tokio::sync::{mpsc, oneshot};

use super::Shared;
use crate::clock::TICK_MS;

/// Requests that may wait for the driver; beyond that a caller is told to come back.
const QUEUE_MAX: usize = 16_384;
/// Commands in one entry.
const ENTRY_COMMANDS_MAX: usize = 1_024;
/// Bytes of bodies in one entry, roughly.
const ENTRY_BYTES_MAX: usize = 4 << 20;
/// When to come back after `overloaded`, in milliseconds.
const RETRY_AFTER_MS: u64 = 200;

/// What became of a request's commands: replies in their order, or why there are none.
pub type Proposed = Result<Vec<Reply>, ErrorReply>;

#[derive(Debug)]
pub struct Proposal {
    commands: Vec<Command>,
    answer: oneshot::Sender<Proposed>,
}

#[derive(Clone, Debug)]
pub struct Handle(mpsc::Sender<Proposal>);

impl Handle {
    pub fn new() -> (Self, mpsc::Receiver<Proposal>) {
        let (sender, inbox) = mpsc::channel(QUEUE_MAX);
        (Self(sender), inbox)
    }

    /// Proposes on this node. Refused with `no_leader` when it does not lead.
    pub async fn propose(&self, commands: Vec<Command>) -> Proposed {
        let (answer, answered) = oneshot::channel();
        self.0.try_send(Proposal { commands, answer }).map_err(|_| {
            ErrorReply::new(Code::Overloaded, "the leader's queue is full")
                .with_retry_after_ms(RETRY_AFTER_MS)
        })?;
        answered.await.unwrap_or_else(|_| Err(unknown()))
    }
}

pub fn no_leader() -> ErrorReply {
    ErrorReply::new(Code::NoLeader, "this node does not lead").with_retry_after_ms(50)
}

fn unknown() -> ErrorReply {
    ErrorReply::new(Code::OutcomeUnknown, "no answer came from the log: ask again with the same id")
}

pub async fn run(shared: Arc<Shared>, mut inbox: mpsc::Receiver<Proposal>) {
    let mut leadership = shared.replica.leadership();
    let mut applied = shared.replica.applied();
    let mut tick = tokio::time::interval(Duration::from_millis(TICK_MS));
    loop {
        let now = *leadership.borrow_and_update();
        if now.leading {
            shared.clock.applied(applied.borrow_and_update().stamp);
            Term::begin(&shared, now.term).run(&mut inbox).await;
            continue;
        }
        tokio::select! {
            changed = leadership.changed() => if changed.is_err() { return },
            Ok(()) = applied.changed() => shared.clock.applied(applied.borrow_and_update().stamp),
            Some(proposal) = inbox.recv() => drop(proposal.answer.send(Err(no_leader()))),
            _ = tick.tick() => shared.clock.tick(),
        }
    }
}

/// One term of leadership: the scheduler lives exactly as long.
struct Term<'a> {
    shared: &'a Shared,
    term: u64,
    began_ms: u64,
    scheduler: Scheduler,
    facts: Cursor,
    /// Facts up to here were in the tables that the scheduler began with.
    known: u64,
    next_ticket: Ticket,
    requests: HashMap<Ticket, Request>,
    queue: Batch,
}

/// Commands that wait for the next entry, with whom their replies answer.
type Batch = Vec<(Option<Ticket>, Command)>;

/// An entry on its way.
struct Sent {
    tickets: Vec<Option<Ticket>>,
    commands: Vec<Command>,
}

/// One request may carry several commands; it is answered when all of them are.
struct Request {
    first: Ticket,
    replies: Arc<std::sync::Mutex<Replies>>,
}

struct Replies {
    replies: Vec<Option<Reply>>,
    missing: usize,
    answer: Option<oneshot::Sender<Proposed>>,
}

impl<'a> Term<'a> {
    fn begin(shared: &'a Shared, term: u64) -> Self {
        // The cursor first: what is applied between the two is seen twice rather than never, and
        // skipped by its index.
        let facts = shared.replica.facts().cursor();
        let live = shared.replica.tables().live();
        let known = shared.replica.tables().applied().index;
        let scheduler = Scheduler::new(&live, shared.clock.cluster_ms());
        drop(live);
        tracing::info!(term, applied = known, "this node leads");
        Self {
            shared,
            term,
            began_ms: shared.clock.mono_ms(),
            scheduler,
            facts,
            known,
            next_ticket: 0,
            requests: HashMap::new(),
            queue: Vec::new(),
        }
    }

    async fn run(mut self, inbox: &mut mpsc::Receiver<Proposal>) {
        let mut leadership = self.shared.replica.leadership();
        let mut tick = tokio::time::interval(Duration::from_millis(TICK_MS));
        let mut liveness = tokio::time::interval(Duration::from_secs(1));
        let mut in_flight = FuturesUnordered::new();
        loop {
            if in_flight.is_empty() && !self.queue.is_empty() {
                in_flight.push(self.next_entry());
            }
            tokio::select! {
                biased;
                changed = leadership.changed() => {
                    let now = *leadership.borrow_and_update();
                    if changed.is_err() || !now.leading || now.term != self.term {
                        break;
                    }
                }
                step = self.facts.next() => match step {
                    Step::Facts(entry) if entry.index <= self.known => {}
                    Step::Facts(entry) => {
                        let now_ms = self.now_ms();
                        let outputs = self.scheduler.handle(Input::Applied { facts: &entry.facts }, now_ms);
                        self.take(outputs);
                    }
                    Step::Reset(_) => self.reset(),
                    Step::Closed => break,
                },
                Some((entry, result)) = in_flight.next() => self.answered(entry, result),
                Some(proposal) = inbox.recv() => self.accept(proposal),
                _ = tick.tick() => {
                    self.shared.clock.tick();
                    let now_ms = self.now_ms();
                    let outputs = self.scheduler.handle(Input::Tick, now_ms);
                    self.take(outputs);
                }
                _ = liveness.tick() => self.judge_liveness(),
            }
        }
        tracing::info!(term = self.term, "this node leads no more");
        // Whatever had no answer has an unknown outcome; the ingress that asked asks again.
        for request in self.requests.into_values() {
            let mut replies = request.replies.lock().expect("no panic while it is held");
            if let Some(answer) = replies.answer.take() {
                let _ = answer.send(Err(unknown()));
            }
        }
    }

    fn now_ms(&self) -> u64 {
        self.shared.clock.cluster_ms()
    }

    /// The ring has moved past the cursor: begin again from the tables, as a new leader would.
    fn reset(&mut self) {
        let live = self.shared.replica.tables().live();
        self.known = self.shared.replica.tables().applied().index;
        self.scheduler = Scheduler::new(&live, self.shared.clock.cluster_ms());
    }

    fn judge_liveness(&mut self) {
        let now_ms = self.shared.clock.mono_ms();
        let commands = {
            let live = self.shared.replica.tables().live();
            self.shared.heartbeats.judge(now_ms, self.now_ms(), &live, Some(self.began_ms))
        };
        let now_ms = self.now_ms();
        for command in commands {
            if let Command::PauseExpiry { pause } = &command {
                let (silent, of, wait_ms) = (pause.agents, pause.of, pause.wait_ms);
                tracing::warn!(silent, of, wait_ms, "most agents fell silent together: their expiry waits");
            }
            let outputs = self.scheduler.handle(Input::Propose { ticket: None, command }, now_ms);
            self.take(outputs);
        }
    }

    fn accept(&mut self, proposal: Proposal) {
        let count = proposal.commands.len();
        let replies = Replies { replies: vec![None; count], missing: count, answer: Some(proposal.answer) };
        let replies = Arc::new(std::sync::Mutex::new(replies));
        let first = self.next_ticket;
        self.next_ticket += count as u64;
        let now_ms = self.now_ms();
        for (i, command) in proposal.commands.into_iter().enumerate() {
            let ticket = first + i as u64;
            self.requests.insert(ticket, Request { first, replies: replies.clone() });
            let outputs = match command {
                Command::Submit(submit) => self.scheduler.handle(Input::Submit { ticket, submit }, now_ms),
                command => {
                    let command = begun(command, now_ms);
                    self.scheduler.handle(Input::Propose { ticket: Some(ticket), command }, now_ms)
                }
            };
            self.take(outputs);
        }
    }

    fn take(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Propose { ticket, command } => self.push(ticket, command),
                Output::Answer { ticket, reply } => self.answer(ticket, reply),
            }
        }
    }

    fn push(&mut self, ticket: Option<Ticket>, command: Command) {
        self.queue.push((ticket, command));
    }

    /// Closes the open batch into an entry.
    fn next_entry(&mut self) -> impl Future<Output = (Sent, Result<Vec<Reply>, ProposeError>)> + use<> {
        let mut bytes = 0;
        let fits = |(_, command): &&(Option<Ticket>, Command)| {
            bytes += body_bytes(command);
            bytes <= ENTRY_BYTES_MAX
        };
        let count = self.queue.iter().take(ENTRY_COMMANDS_MAX).take_while(fits).count().max(1);
        let (tickets, commands) = self.queue.drain(..count).unzip();
        let entry = Entry { stamp: self.shared.clock.stamp(), term: self.term, commands };
        let proposed = self.shared.replica.propose(&entry);
        async move {
            let result = proposed.await;
            (Sent { tickets, commands: entry.commands }, result)
        }
    }

    fn answered(&mut self, sent: Sent, result: Result<Vec<Reply>, ProposeError>) {
        let now_ms = self.now_ms();
        let replies = match result {
            Ok(replies) => replies.into_iter().map(Ok).collect(),
            // Certainly not done: the requests may be proposed again, here or elsewhere.
            Err(ProposeError::NotLeader { .. } | ProposeError::Discarded) => {
                vec![Ok(Reply::Void); sent.tickets.len()]
            }
            Err(error @ ProposeError::TooLarge { .. }) => {
                vec![Err(ErrorReply::new(Code::TooLarge, error.to_string())); sent.tickets.len()]
            }
            Err(ProposeError::Unknown | ProposeError::Stopped) => vec![Err(unknown()); sent.tickets.len()],
        };
        for ((ticket, command), reply) in sent.tickets.into_iter().zip(sent.commands).zip(replies) {
            let told = reply.as_ref().unwrap_or(&Reply::Void);
            let outputs = self.scheduler.handle(Input::Replied { command: &command, reply: told }, now_ms);
            self.take(outputs);
            match (ticket, reply) {
                (Some(ticket), Ok(reply)) => self.answer(ticket, reply),
                (Some(ticket), Err(error)) => self.fail(ticket, error),
                (None, _) => {}
            }
        }
    }

    fn answer(&mut self, ticket: Ticket, reply: Reply) {
        let Some(request) = self.requests.remove(&ticket) else { return };
        let mut replies = request.replies.lock().expect("no panic while it is held");
        replies.replies[(ticket - request.first) as usize] = Some(reply);
        replies.missing -= 1;
        if replies.missing == 0
            && let Some(answer) = replies.answer.take()
        {
            let all = replies.replies.drain(..).flatten().collect();
            let _ = answer.send(Ok(all));
        }
    }

    fn fail(&mut self, ticket: Ticket, error: ErrorReply) {
        let Some(request) = self.requests.remove(&ticket) else { return };
        let mut replies = request.replies.lock().expect("no panic while it is held");
        if let Some(answer) = replies.answer.take() {
            let _ = answer.send(Err(error));
        }
    }
}

/// Before a leader has told its time, another node may be ahead by all it was up longer. A run that
/// started in the future would count as later than all that come until then.
fn begun(mut command: Command, now_ms: u64) -> Command {
    if let Command::Register { started_ms, .. } = &mut command {
        *started_ms = now_ms.min(*started_ms);
    }
    command
}

/// What a command's bodies weigh, for the bound on an entry.
fn body_bytes(command: &Command) -> usize {
    let body = match command {
        Command::Submit(submit) => submit.envelope.bytes().len(),
        Command::Complete { result, .. } => result.as_str().len(),
        Command::Publish { events, .. } => events.iter().map(|event| event.data.as_str().len() + 256).sum(),
        _ => 0,
    };
    body + 256
}

#[cfg(test)]
mod tests {
    use reach_protocol::{AgentId, InstanceId, Principal, Registration};

    use super::*;

    #[test]
    fn no_run_starts_in_the_future_of_the_leader() {
        let agent_id = AgentId::parse("a").unwrap();
        let start = |started_ms| {
            let register = Command::Register {
                registration: Box::new(Registration::new(agent_id.clone(), Vec::new())),
                instance: InstanceId::parse("i").unwrap(),
                started_ms,
                author: Principal::Agent(agent_id.clone()),
            };
            match begun(register, 1_000) {
                Command::Register { started_ms, .. } => started_ms,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((start(999), start(60_000)), (999, 1_000));
    }
}
