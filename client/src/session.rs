//! An agent's session: attaches to a node, takes deliveries into the inbox, has them run, and
//! reports them until the cluster has recorded the end. It never waits for a single thing, so that
//! heartbeats, cancellations and a lost node are noticed whatever else is going on.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use reach_protocol::{
    Code, ErrorReply, MsgId, NodeId,
    command::FailReason,
    frame::{Delivery, Held, NodeFrame, Verdict},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};

use crate::{
    client::Client,
    connection::State,
    dispatch::{Ended, Work},
    entry::{Entry, Stage, wrong},
    error::Error,
    events::{Arrived, Door},
    inbox::{Inbox, InboxError, StoredTask},
    link::{Beat, Link, Push},
    steps::{self, Run, Step},
    task::Outcome,
};

/// How an agent stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// No node holds its session now; running tasks go on.
    Connecting,
    Attached {
        node: NodeId,
    },
    /// Attached, and asked for no new tasks.
    Draining {
        node: NodeId,
    },
    Stopped(Stopped),
}

/// Why a run is over. Its inbox is closed by then, and no handler of it runs any more unless it
/// blocks its thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stopped {
    /// By its own shutdown.
    Asked,
    /// At once, by `abort` or since the program let go of it; tasks stay in the inbox.
    Aborted,
    /// A later run of this agent took its place (`stale_instance`), or it was removed.
    Fenced(Box<ErrorReply>),
    /// The cluster won't have it: a permission, a wrong registration, or a certificate that was revoked
    /// (`unauthenticated`).
    Refused(Box<ErrorReply>),
    /// Its disk or its runtime failed.
    Failed(String),
}

impl From<InboxError> for Stopped {
    fn from(error: InboxError) -> Self {
        Self::Failed(error.to_string())
    }
}

pub(crate) enum Order {
    Drain(oneshot::Sender<Result<(), Error>>),
    /// Drain, let running tasks finish until then, and detach.
    Shutdown(Instant),
}

type Flow = Result<(), Stopped>;

/// How long an ending run waits for its handlers to be gone, and for its farewell to be answered.
const FAREWELL: Duration = Duration::from_secs(2);

pub(crate) struct Session {
    pub(crate) run: Run,
    pub(crate) client: Client,
    pub(crate) inbox: Inbox,
    pub(crate) tasks_max: usize,
    pub(crate) pushes: mpsc::Receiver<Push>,
    pub(crate) orders: mpsc::Receiver<Order>,
    pub(crate) abort: CancellationToken,
    pub(crate) work: mpsc::Sender<Work>,
    pub(crate) ended: mpsc::Receiver<Ended>,
    pub(crate) status: watch::Sender<Status>,
    pub(crate) book: Book,
    /// Of an agent that has a handler of events.
    pub(crate) events: Option<Door>,
}

/// What the session knows of its tasks.
#[derive(Default)]
pub(crate) struct Book {
    entries: BTreeMap<MsgId, Entry>,
    /// Said to be received, and waiting for a free handler.
    ready: VecDeque<MsgId>,
    running: u32,
    steps: JoinSet<Step>,
    /// The link that we attach or are attached to.
    generation: u64,
    attached: Option<Arc<Link>>,
    /// Deliveries and cancellations that came before the verdicts.
    early: Vec<NodeFrame>,
    draining: bool,
    leaving: Option<Instant>,
}

impl Session {
    /// Until it is stopped. Whatever the reason, the inbox is closed when this returns.
    pub(crate) async fn run(mut self, found: Vec<StoredTask>) -> Stopped {
        for task in found {
            let (msg_id, entry) = Entry::found(task);
            self.book.entries.insert(msg_id, entry);
        }
        let mut states = self.run.connection.states();
        states.mark_changed();
        let stopped = loop {
            let leaving = self.book.leaving;
            let is_done = self.book.entries.is_empty() && self.events.as_ref().is_none_or(Door::is_idle);
            if leaving.is_some_and(|deadline| is_done || deadline <= Instant::now()) {
                break Stopped::Asked;
            }
            let flow = tokio::select! {
                // What was answered before a delivery is looked at before it.
                biased;
                () = self.abort.cancelled() => Err(Stopped::Aborted),
                error = self.client.revoked() => {
                    Err(Stopped::Refused(Box::new(ErrorReply::new(error.code(), error.to_string()))))
                }
                Ok(()) = states.changed() => {
                    let state = states.borrow_and_update().clone();
                    self.on_state(state);
                    Ok(())
                }
                Some(order) = self.orders.recv() => {
                    self.on_order(order);
                    Ok(())
                }
                Some(step) = self.book.steps.join_next() => match step {
                    Ok(step) => self.on_step(step),
                    Err(error) => Err(Stopped::Failed(format!("a step of the session failed: {error}"))),
                },
                ended = self.ended.recv() => match ended {
                    Some(ended) => self.on_ended(ended),
                    None => Err(Stopped::Failed("the agent's runtime has ended".into())),
                },
                Some(push) = self.pushes.recv() => self.on_push(push),
                () = changed(&mut self.events), if leaving.is_some() => Ok(()),
                () = sleep_until(leaving.unwrap_or_else(Instant::now)), if leaving.is_some() => Ok(()),
            };
            if let Err(stopped) = flow {
                break stopped;
            }
        };
        info!(agent_id = %self.run.agent_id, ?stopped, "agent stopped");
        self.end(&stopped).await;
        stopped
    }

    async fn end(mut self, stopped: &Stopped) {
        self.book.steps.shutdown().await;
        self.book.entries.values().for_each(|entry| entry.cancel.cancel());
        let gone = async {
            while self.book.running > 0 && self.ended.recv().await.is_some() {
                self.book.running -= 1;
            }
        };
        let events = self.events.take();
        let closed = async {
            if let Some(events) = events {
                events.close().await;
            }
        };
        let _ = timeout(FAREWELL, async { tokio::join!(gone, closed) }).await;
        if *stopped == Stopped::Asked
            && let Err(error) = self.run.detach(Instant::now() + FAREWELL).await
        {
            debug!(%error, "not detached; the cluster will notice");
        }
        self.run.connection.close().await;
        self.inbox.close().await;
    }

    // The link.

    fn on_state(&mut self, state: State) {
        match state {
            State::Up(link) if link.generation != self.book.generation => {
                self.book.generation = link.generation;
                self.book.attached = None;
                self.book.early.clear();
                let held =
                    self.book.entries.iter().filter_map(|(msg_id, entry)| entry.held(msg_id)).collect();
                let events = self.events.as_ref().filter(|_| !self.book.draining);
                let window = events.map_or(0, |events| events.window);
                self.book.steps.spawn(self.run.clone().attach(link, held, window));
            }
            State::Up(_) => {}
            State::Down(_) | State::Closed => {
                self.book.attached = None;
                self.book.early.clear();
                self.status.send_replace(Status::Connecting);
            }
        }
    }

    fn on_attached(
        &mut self,
        link: Arc<Link>,
        held: Vec<Held>,
        answer: Result<(Vec<Verdict>, Beat), Error>,
    ) -> Flow {
        if link.generation != self.book.generation {
            return Ok(());
        }
        let (verdicts, beat) = match answer {
            Ok(answer) => answer,
            Err(error) => {
                unless_fenced(&error)?;
                if let Error::Refused(reply) = &error
                    && !reply.retryable
                {
                    return Err(Stopped::Refused(reply.clone()));
                }
                warn!(%error, node = %link.welcome.node_id, "not attached");
                link.leave("the agent could not be attached");
                return Ok(());
            }
        };
        info!(agent_id = %self.run.agent_id, node = %link.welcome.node_id, held = held.len(), "attached");
        self.run.connection.beat(Some(beat));
        for (held, verdict) in held.into_iter().zip(verdicts) {
            let Some(entry) = self.book.entries.get_mut(&held.msg_id) else { continue };
            match verdict {
                Verdict::Cancel => self.let_go(&held.msg_id, held.attempt),
                Verdict::Keep | Verdict::SendResult => match &entry.stage {
                    Stage::Held(Some(outcome)) => {
                        entry.stage = Stage::Done(outcome.clone());
                        match verdict {
                            Verdict::SendResult => {
                                entry.said = true;
                                entry.take();
                            }
                            _ => self.report(&held.msg_id),
                        }
                        self.record(&held.msg_id);
                    }
                    Stage::Held(None) => {
                        entry.stage = Stage::Reporting;
                        self.report(&held.msg_id);
                    }
                    // It goes on by itself.
                    _ => {}
                },
            }
        }
        if self.book.draining {
            let run = self.run.clone();
            self.book.steps.spawn(async move { Step::Asked { stored: Ok(()), answer: run.drain().await } });
        }
        self.book.attached = Some(link);
        self.show();
        let early = std::mem::take(&mut self.book.early);
        early.into_iter().try_for_each(|frame| self.on_frame(frame))
    }

    fn show(&self) {
        if let Some(link) = &self.book.attached {
            let node = link.welcome.node_id;
            let draining = self.book.draining;
            self.status.send_replace(if draining {
                Status::Draining { node }
            } else {
                Status::Attached { node }
            });
        }
    }

    fn on_push(&mut self, Push { link, frame }: Push) -> Flow {
        if link.generation < self.book.generation {
            return Ok(());
        }
        match frame {
            NodeFrame::Echo { seq, agents } if agents.contains(&self.run.agent_id) => {
                // The room of `max_concurrency` is for tasks. A loop that lets echoes pile up has
                // nothing to prove anyway.
                if self.work.capacity() > self.run.registration.max_concurrency as usize {
                    let _ = self.work.try_send(Work::Echo { link, seq });
                }
                Ok(())
            }
            NodeFrame::Fenced { agent_id, error } if agent_id == self.run.agent_id => {
                Err(Stopped::Fenced(error))
            }
            NodeFrame::Events { agent_id, group, ack_wait_ms, events } if agent_id == self.run.agent_id => {
                if let Some(door) = &self.events {
                    door.take(Arrived { group, ack_wait: Duration::from_millis(ack_wait_ms), events });
                }
                Ok(())
            }
            frame @ (NodeFrame::Deliver(_) | NodeFrame::Cancel { .. }) => {
                if self.book.attached.is_some() {
                    self.on_frame(frame)
                } else if self.book.early.len() < self.tasks_max {
                    self.book.early.push(frame);
                    Ok(())
                } else {
                    Ok(())
                }
            }
            _ => Ok(()),
        }
    }

    fn on_frame(&mut self, frame: NodeFrame) -> Flow {
        match frame {
            NodeFrame::Deliver(delivery) if delivery.agent_id == self.run.agent_id => match delivery.open() {
                Ok(delivery) => self.on_deliver(delivery),
                Err(error) => {
                    tracing::error!(%error, "a delivery could not be read");
                    Ok(())
                }
            },
            NodeFrame::Cancel { agent_id, msg_id, attempt } if agent_id == self.run.agent_id => {
                self.let_go(&msg_id, attempt);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    // Tasks, in the order of their life.

    fn on_deliver(&mut self, delivery: Delivery) -> Flow {
        let Delivery { msg_id, attempt, .. } = &delivery;
        let Some(entry) = self.book.entries.get_mut(msg_id) else {
            let known = self.inbox.settled(msg_id, delivery.envelope.content_hash())?;
            self.accept(delivery, known.map(Arc::new));
            return Ok(());
        };
        if *attempt < entry.attempt {
            return Ok(());
        }
        let failed = |outcome: &Outcome| matches!(outcome, Outcome::Failed { .. });
        match &entry.stage {
            // It comes again when the slot is free.
            Stage::Cancelling(_) => return Ok(()),
            // Recorded, but not yet where an earlier result is looked for.
            Stage::Settling(outcome) => {
                let known = (!failed(outcome)).then(|| outcome.clone());
                self.accept(delivery, known);
                return Ok(());
            }
            _ if *attempt == entry.attempt => {
                // The answer got lost. While it is still on its way, it isn't doubled.
                if entry.received {
                    self.report(&delivery.msg_id);
                }
                return Ok(());
            }
            // A failure was the earlier attempt's; this one begins anew.
            Stage::Saving(outcome) | Stage::Done(outcome) if failed(outcome) => {
                self.accept(delivery, None);
                return Ok(());
            }
            _ => {}
        }
        info!(%msg_id, attempt, "a later attempt takes over");
        entry.attempt = *attempt;
        entry.said = false;
        entry.received = false;
        entry.recording = false;
        let stored = self.inbox.adopt(msg_id, *attempt);
        self.book.steps.spawn(steps::store(msg_id.clone(), *attempt, stored));
        Ok(())
    }

    /// Stores a new task, or an attempt that begins anew; with a `known` outcome it won't run.
    fn accept(&mut self, delivery: Delivery, known: Option<Arc<Outcome>>) {
        let (msg_id, attempt) = (delivery.msg_id.clone(), delivery.attempt);
        if self.book.entries.len() >= self.tasks_max && !self.book.entries.contains_key(&msg_id) {
            warn!(%msg_id, tasks_max = self.tasks_max, "the inbox is full: not taken");
            return;
        }
        let wrong = wrong(&delivery).map(|what| {
            Arc::new(Outcome::Failed { reason: FailReason::Unparseable, message: what.to_owned() })
        });
        let busy = self.book.running as usize + self.book.ready.len();
        let at_once = busy < self.run.registration.max_concurrency as usize;
        let (task, entry) = Entry::delivered(delivery, wrong.or(known), at_once);
        let stored = self.inbox.put(task);
        self.book.entries.insert(msg_id.clone(), entry);
        self.book.steps.spawn(steps::store(msg_id, attempt, stored));
    }

    fn on_step(&mut self, step: Step) -> Flow {
        match step {
            Step::Attached { link, held, answer } => self.on_attached(link, held, answer),
            Step::Stored { msg_id, attempt, stored } => {
                stored?;
                self.on_stored(&msg_id, attempt);
                Ok(())
            }
            Step::Said { msg_id, attempt } => self.on_said(&msg_id, attempt),
            Step::Reported { msg_id, attempt, answer } => self.on_reported(&msg_id, attempt, answer),
            Step::Saved { msg_id, stored } => {
                stored?;
                if let Some(entry) = self.book.entries.get_mut(&msg_id)
                    && let Stage::Saving(outcome) = &entry.stage
                {
                    entry.stage = Stage::Done(outcome.clone());
                    self.record(&msg_id);
                }
                Ok(())
            }
            Step::Recorded { msg_id, attempt, answer } => self.on_recorded(&msg_id, attempt, answer),
            Step::Settled { msg_id, stored } => {
                stored?;
                if self
                    .book
                    .entries
                    .get(&msg_id)
                    .is_some_and(|entry| matches!(entry.stage, Stage::Settling(_)))
                {
                    self.book.entries.remove(&msg_id);
                }
                Ok(())
            }
            Step::Asked { stored, answer } => {
                stored?;
                match answer {
                    Err(error) => {
                        debug!(%error, "not answered");
                        unless_fenced(&error)
                    }
                    Ok(()) => Ok(()),
                }
            }
        }
    }

    fn on_stored(&mut self, msg_id: &MsgId, attempt: u32) {
        let Some(entry) = self.book.entries.get_mut(msg_id) else { return };
        entry.stored = true;
        if entry.attempt != attempt || matches!(entry.stage, Stage::Cancelling(_)) {
            return;
        }
        if matches!(entry.stage, Stage::Storing) {
            entry.stage = Stage::Reporting;
        }
        self.report(msg_id);
    }

    /// Says `received`; nothing runs before that is on its way.
    fn report(&mut self, msg_id: &MsgId) {
        let Some(entry) = self.book.entries.get_mut(msg_id) else { return };
        let begin =
            (matches!(entry.stage, Stage::Reporting) && !entry.begun).then(|| self.inbox.begin(msg_id));
        entry.begun |= begin.is_some();
        let (said, is_said) = oneshot::channel();
        self.book.steps.spawn(self.run.clone().report(msg_id.clone(), entry.attempt, said));
        self.book.steps.spawn(steps::said(msg_id.clone(), entry.attempt, begin, is_said));
    }

    /// Starts it, beside the round in which the cluster takes `received`. Its end may overtake that:
    /// a result implies the receipt.
    fn on_said(&mut self, msg_id: &MsgId, attempt: u32) -> Flow {
        let Some(entry) = self.book.entries.get_mut(msg_id) else { return Ok(()) };
        if entry.attempt != attempt {
            return Ok(());
        }
        entry.said = true;
        if matches!(entry.stage, Stage::Reporting) {
            entry.stage = Stage::Ready;
        }
        match entry.stage {
            Stage::Ready => {
                if !self.book.ready.contains(msg_id) {
                    self.book.ready.push_back(msg_id.clone());
                }
                self.start_ready()
            }
            _ => {
                self.record(msg_id);
                Ok(())
            }
        }
    }

    fn on_reported(&mut self, msg_id: &MsgId, attempt: u32, answer: Result<(), Error>) -> Flow {
        let Some(entry) = self.book.entries.get_mut(msg_id) else {
            return answer.or_else(|error| unless_fenced(&error));
        };
        if entry.attempt != attempt || matches!(entry.stage, Stage::Cancelling(_)) {
            return answer.or_else(|error| unless_fenced(&error));
        }
        match answer {
            Ok(()) => {
                entry.take();
                Ok(())
            }
            Err(error) => {
                unless_fenced(&error)?;
                if error.retryable() {
                    if !entry.received {
                        self.report(msg_id);
                    }
                } else if !matches!(entry.stage, Stage::Saving(_) | Stage::Done(_) | Stage::Settling(_)) {
                    // Stale, ended, or gone: not ours. A message that ended may still hold a slot.
                    // What was finished meanwhile hears the same of its result, and keeps that.
                    info!(%msg_id, attempt, code = %error.code(), "not ours any more");
                    self.let_go(msg_id, attempt);
                }
                Ok(())
            }
        }
    }

    fn start_ready(&mut self) -> Flow {
        while self.book.running < self.run.registration.max_concurrency {
            let Some(msg_id) = self.book.ready.pop_front() else { return Ok(()) };
            let Some(entry) = self.book.entries.get_mut(&msg_id) else { continue };
            if !(entry.said && matches!(entry.stage, Stage::Ready)) {
                continue;
            }
            let task = entry.task(&msg_id, &self.run.agent_id, &self.client);
            let work = Work::Run { task: Box::new(task), cancel: entry.cancel.clone() };
            if self.work.try_send(work).is_err() {
                return Err(Stopped::Failed("the agent's runtime has ended".into()));
            }
            entry.stage = Stage::Running;
            self.book.running += 1;
        }
        Ok(())
    }

    fn on_ended(&mut self, Ended { msg_id, outcome }: Ended) -> Flow {
        self.book.running -= 1;
        if let Some(entry) = self.book.entries.get_mut(&msg_id) {
            match (&entry.stage, outcome) {
                (Stage::Running, Some(outcome)) => self.save(&msg_id, outcome),
                (Stage::Cancelling(release), _) => {
                    let release = *release;
                    self.forget(&msg_id, release);
                }
                // Without an outcome only after `cancel`, which sets the stage.
                _ => {}
            }
        }
        self.start_ready()
    }

    fn save(&mut self, msg_id: &MsgId, outcome: Outcome) {
        let Some(entry) = self.book.entries.get_mut(msg_id) else { return };
        let outcome = Arc::new(outcome);
        entry.stage = Stage::Saving(outcome.clone());
        self.book.steps.spawn(steps::save(msg_id.clone(), self.inbox.finish(msg_id, outcome)));
    }

    /// Reports the outcome, once it is on disk and `received` was sent before it.
    fn record(&mut self, msg_id: &MsgId) {
        let Some(entry) = self.book.entries.get_mut(msg_id) else { return };
        if let Stage::Done(outcome) = &entry.stage
            && entry.said
            && !entry.recording
        {
            entry.recording = true;
            self.book.steps.spawn(self.run.clone().record(msg_id.clone(), entry.attempt, outcome.clone()));
        }
    }

    fn on_recorded(&mut self, msg_id: &MsgId, attempt: u32, answer: Result<(), Error>) -> Flow {
        let Some(entry) = self.book.entries.get_mut(msg_id) else {
            return answer.or_else(|error| unless_fenced(&error));
        };
        if entry.attempt != attempt {
            // A later attempt has taken over, and reports for itself.
            return answer.or_else(|error| unless_fenced(&error));
        }
        entry.recording = false;
        let Stage::Done(outcome) = &entry.stage else { return Ok(()) };
        let outcome = outcome.clone();
        match answer {
            Ok(()) => {
                entry.take();
                debug!(%msg_id, attempt, "recorded");
            }
            Err(error) => {
                unless_fenced(&error)?;
                if error.retryable() {
                    self.record(msg_id);
                    return Ok(());
                }
                let not_taken = error.is(Code::TooLarge) || error.is(Code::Invalid);
                if not_taken && let Outcome::Done { excerpt, result, cost } = &*outcome {
                    if !excerpt.is_empty()
                        && matches!(&error, Error::Refused(reply) if reply.field.as_deref() == Some("excerpt"))
                    {
                        // A rule allows less than the usual length. The result is worth more.
                        let (excerpt, result, cost) = (String::new(), result.clone(), *cost);
                        self.save(msg_id, Outcome::Done { excerpt, result, cost });
                        return Ok(());
                    }
                    warn!(%msg_id, attempt, %error, "the result was not taken: the task fails");
                    let message = format!("the result was not taken: {error}");
                    self.save(msg_id, Outcome::Failed { reason: FailReason::Error, message });
                    return Ok(());
                }
                info!(%msg_id, attempt, code = %error.code(), "the outcome is not wanted any more");
            }
        }
        entry.stage = Stage::Settling(outcome);
        self.book.steps.spawn(steps::settle(msg_id.clone(), self.inbox.settle(msg_id)));
        Ok(())
    }

    /// Stops and forgets an attempt, then frees its slot. A later attempt goes on.
    fn let_go(&mut self, msg_id: &MsgId, attempt: u32) {
        match self.book.entries.get_mut(msg_id) {
            Some(Entry { stage: Stage::Cancelling(release), .. }) => *release = attempt.max(*release),
            Some(entry) if attempt >= entry.attempt && matches!(entry.stage, Stage::Running) => {
                entry.stage = Stage::Cancelling(attempt);
                entry.cancel.cancel();
            }
            // What was recorded stays for repeats.
            Some(entry) if attempt < entry.attempt || matches!(entry.stage, Stage::Settling(_)) => {
                self.book.steps.spawn(self.run.clone().release(msg_id.clone(), attempt, None));
            }
            _ => self.forget(msg_id, attempt),
        }
    }

    fn forget(&mut self, msg_id: &MsgId, attempt: u32) {
        self.book.entries.remove(msg_id);
        let removed = self.inbox.remove(msg_id);
        self.book.steps.spawn(self.run.clone().release(msg_id.clone(), attempt, Some(removed)));
    }

    // The run itself.

    fn on_order(&mut self, order: Order) {
        self.book.draining = true;
        if let Some(events) = &self.events {
            events.drain();
        }
        self.show();
        let run = self.run.clone();
        match order {
            Order::Drain(answer) => {
                self.book.steps.spawn(async move {
                    // Whoever asked may have stopped waiting.
                    let _ = answer.send(run.drain().await);
                    Step::Asked { stored: Ok(()), answer: Ok(()) }
                });
            }
            Order::Shutdown(deadline) => {
                self.book.leaving = Some(deadline);
                self.book
                    .steps
                    .spawn(async move { Step::Asked { stored: Ok(()), answer: run.drain().await } });
            }
        }
    }
}

async fn changed(events: &mut Option<Door>) {
    match events {
        Some(events) => events.changed().await,
        None => std::future::pending().await,
    }
}

/// Ends the run when the answer says that a later one has taken its place.
fn unless_fenced(error: &Error) -> Flow {
    match error {
        Error::Refused(reply) if reply.code == Code::StaleInstance => Err(Stopped::Fenced(reply.clone())),
        _ => Ok(()),
    }
}
