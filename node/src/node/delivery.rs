//! Delivers to the agents whose sessions this node holds. One task owns the sessions and a cursor
//! over the facts: it sees `Matched` for an agent it holds, sends the task, and sends it again until
//! the agent has said `received`.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use reach_protocol::{
    AgentId, Code, Command, Envelope, ErrorReply, Fact, InstanceId, MessageState, MsgId,
    codec::{self, Encoded},
    frame::{self, Answer, ECHO_MAX, Held, NodeFrame, Verdict},
    message::{Holder, MessageRecord},
};
use reach_raft::Step;
use reach_transport::LinkTx;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use super::{Shared, heartbeat::POLLS_FORGOTTEN_MS, push::Push};

/// How often unreceived tasks are looked at.
const SWEEP_EVERY: Duration = Duration::from_millis(250);
/// Without `received` for this long after it was sent, the attempt is recorded as `dispatched`.
const DISPATCHED_AFTER_MS: u64 = 1_000;
/// Attach requests and closed connections that may wait for the task.
const QUEUE_MAX: usize = 4_096;
/// How long a command may take that nobody waits for.
const ASIDE_MAX: Duration = Duration::from_secs(5);

/// Where a session's frames go.
#[derive(Clone, Debug)]
pub struct Line {
    pub connection: u64,
    pub tx: LinkTx,
}

impl Line {
    pub fn send(&self, frame: &NodeFrame) -> bool {
        self.tx.send(codec::encode(frame)).is_ok()
    }

    pub fn respond(&self, id: u64, response: Result<Answer, ErrorReply>) -> bool {
        self.send(&NodeFrame::Response { id, response: response.map(Box::new).map_err(Box::new) })
    }
}

/// What a poll is answered with: tasks, or why there will be none for this run.
pub type Polled = Result<Vec<Delivery>, ErrorReply>;

type Delivery = frame::Delivery<Encoded<Envelope>>;

/// Polls of one agent that may wait at once; the oldest gives way, empty-handed.
const POLLS_MAX: usize = 16;

#[derive(Debug)]
enum Ask {
    Poll { agent_id: AgentId, instance: InstanceId, max: usize, waits: bool, answer: oneshot::Sender<Polled> },
    Attach { agent_id: AgentId, instance: InstanceId, held: Vec<Held>, window: u32, line: Line, request: u64 },
    Detach { agent_id: AgentId, instance: InstanceId },
    Closed { connection: u64 },
    Goodbye,
}

#[derive(Clone, Debug)]
pub struct Handle {
    asks: mpsc::Sender<Ask>,
    sessions: Arc<AtomicU64>,
}

#[derive(Debug)]
pub struct Inbox {
    asks: mpsc::Receiver<Ask>,
    sessions: Arc<AtomicU64>,
}

impl Handle {
    pub fn new() -> (Self, Inbox) {
        let (sender, asks) = mpsc::channel(QUEUE_MAX);
        let sessions = Arc::new(AtomicU64::new(0));
        (Self { asks: sender, sessions: sessions.clone() }, Inbox { asks, sessions })
    }

    /// Makes this line the agent's session; the answer to `request` goes over it, before any task.
    pub async fn attach(
        &self,
        agent_id: AgentId,
        instance: InstanceId,
        held: Vec<Held>,
        window: u32,
        line: Line,
        request: u64,
    ) {
        let _ = self.asks.send(Ask::Attach { agent_id, instance, held, window, line, request }).await;
    }

    /// Asks for tasks as an agent over HTTP does: for those that are there, or for the first that
    /// comes. The wait itself proves both heartbeats.
    pub async fn poll(&self, agent_id: AgentId, instance: InstanceId, max: usize, wait: Duration) -> Polled {
        let (answer, mut answered) = oneshot::channel();
        let waits = !wait.is_zero();
        let _ = self.asks.send(Ask::Poll { agent_id, instance, max, waits, answer }).await;
        match waits {
            false => answered.await.unwrap_or_else(|_| Ok(Vec::new())),
            true => match tokio::time::timeout(wait, &mut answered).await {
                Ok(answer) => answer.unwrap_or_else(|_| Ok(Vec::new())),
                Err(_) => {
                    // Tasks may have come in this very moment.
                    answered.close();
                    answered.try_recv().unwrap_or_else(|_| Ok(Vec::new()))
                }
            },
        }
    }

    pub async fn detach(&self, agent_id: AgentId, instance: InstanceId) {
        let _ = self.asks.send(Ask::Detach { agent_id, instance }).await;
    }

    pub async fn closed(&self, connection: u64) {
        let _ = self.asks.send(Ask::Closed { connection }).await;
    }

    /// The node is going: every session is told to move.
    pub fn goodbye(&self) {
        let _ = self.asks.try_send(Ask::Goodbye);
    }

    /// Sessions held now.
    pub fn sessions(&self) -> u64 {
        self.sessions.load(Ordering::Relaxed)
    }
}

pub async fn run(shared: Arc<Shared>, mut inbox: Inbox) {
    let mut facts = shared.replica.facts().cursor();
    let mut sweep = tokio::time::interval(SWEEP_EVERY);
    let mut sessions = Sessions::of(shared);
    loop {
        tokio::select! {
            step = facts.next() => match step {
                Step::Facts(entry) => entry.facts.iter().for_each(|fact| sessions.fact(fact)),
                // Facts were missed: every session lists its agent's open attempts again.
                Step::Reset(_) => sessions.list_all(),
                Step::Closed => return,
            },
            ask = inbox.asks.recv() => match ask {
                Some(Ask::Attach { agent_id, instance, held, window, line, request }) => {
                    sessions.attach(agent_id, instance, &held, window, line, request);
                }
                Some(Ask::Poll { agent_id, instance, max, waits, answer }) => {
                    sessions.poll(agent_id, instance, max, waits, answer);
                }
                Some(Ask::Detach { agent_id, instance }) => sessions.detach(&agent_id, &instance),
                Some(Ask::Closed { connection }) => sessions.closed(connection),
                Some(Ask::Goodbye) => sessions.goodbye(),
                None => return,
            },
            _ = sweep.tick() => sessions.sweep(),
        }
        inbox.sessions.store(sessions.sessions.len() as u64, Ordering::Relaxed);
    }
}

struct Sessions {
    shared: Arc<Shared>,
    sessions: HashMap<AgentId, Session>,
    /// By connection: who is attached over it.
    lines: HashMap<u64, Attached>,
    /// Who has an unreceived attempt at a message open here.
    open_at: HashMap<MsgId, AgentId>,
    echo: u64,
}

struct Session {
    instance: InstanceId,
    way: Way,
    /// Matched and not yet `received`; bounded by the agent's slots.
    open: BTreeMap<MsgId, Open>,
    /// Of events, where it takes them over its link.
    push: Option<Push>,
}

/// The agents of one connection, whose loops are asked together.
struct Attached {
    line: Line,
    agents: BTreeSet<AgentId>,
    echo_due_ms: u64,
}

/// How tasks come to the agent.
enum Way {
    /// Over its link, when they are there.
    Link(Line),
    /// Over HTTP, when it asks.
    Polls { waiting: VecDeque<oneshot::Sender<Polled>>, asked_ms: u64 },
}

impl Session {
    /// An agent that polls learns the same from the answer to its next request.
    fn tell(&self, frame: &NodeFrame) {
        if let Way::Link(line) = &self.way {
            line.send(frame);
        }
    }

    /// Ends every poll that waits.
    fn dismiss(&mut self, why: &ErrorReply) {
        if let Way::Polls { waiting, .. } = &mut self.way {
            for poll in waiting.drain(..) {
                let _ = poll.send(Err(why.clone()));
            }
        }
    }

    fn deliver(&mut self, delivery: Delivery) -> bool {
        match &mut self.way {
            Way::Link(line) => line.send(&NodeFrame::Deliver(Box::new(delivery))),
            Way::Polls { waiting, .. } => {
                let mut answer = Ok(vec![delivery]);
                // A poll whose client went away gives it back, for the next one.
                while let Some(poll) = waiting.pop_front() {
                    match poll.send(answer) {
                        Ok(()) => return true,
                        Err(unsent) => answer = unsent,
                    }
                }
                false
            }
        }
    }
}

struct Open {
    attempt: u32,
    first_sent_ms: Option<u64>,
    last_sent_ms: u64,
    dispatched: bool,
}

impl Open {
    /// Whether it should be sent, for the first time or again.
    fn is_due(&self, now_ms: u64, resend_after_ms: u64) -> bool {
        self.first_sent_ms.is_none() || now_ms >= self.last_sent_ms + resend_after_ms
    }

    fn sent(&mut self, now_ms: u64) {
        self.first_sent_ms.get_or_insert(now_ms);
        self.last_sent_ms = now_ms;
    }
}

fn cancel(agent_id: &AgentId, msg_id: &MsgId, attempt: u32) -> NodeFrame {
    NodeFrame::Cancel { agent_id: agent_id.clone(), msg_id: msg_id.clone(), attempt }
}

/// None when the message is gone, or its row can't be read and the process is ending.
fn delivery_of(shared: &Shared, agent_id: &AgentId, record: &MessageRecord) -> Option<Delivery> {
    let envelope = match shared.replica.tables().envelope(&record.msg_id) {
        Ok(envelope) => envelope?,
        Err(error) => {
            shared.damaged(&error);
            return None;
        }
    };
    Some(Delivery {
        agent_id: agent_id.clone(),
        msg_id: record.msg_id.clone(),
        trace_id: record.trace_id.clone(),
        flow_seq: record.flow_seq,
        attempt: record.attempt,
        expires_in_ms: record.expires_ms.saturating_sub(shared.clock.cluster_ms()),
        envelope,
    })
}

impl Sessions {
    fn of(shared: Arc<Shared>) -> Self {
        Self { shared, sessions: HashMap::new(), lines: HashMap::new(), open_at: HashMap::new(), echo: 0 }
    }

    fn fact(&mut self, fact: &Fact) {
        match fact {
            Fact::Matched(record) => {
                self.cancel_earlier(record);
                self.matched(record);
            }
            Fact::Acknowledged(record)
            | Fact::Returned(record)
            | Fact::Completed(record)
            | Fact::Failed(record) => {
                self.forget(&record.msg_id);
            }
            Fact::TimedOut(record) => {
                self.forget(&record.msg_id);
                self.cancel(record);
            }
            Fact::Fenced { agent_id, instance } => {
                self.fence(agent_id, instance, "a later run of this agent took its place")
            }
            Fact::Removed { agent_id, instance } => self.fence(agent_id, instance, "this agent was removed"),
            // It may have other groups now, or be ready for events again.
            Fact::Registered(record) | Fact::LivenessChanged(record) | Fact::DrainChanged(record) => {
                if let Some(push) = self.sessions.get(record.agent_id()).and_then(|known| known.push.as_ref())
                {
                    push.window.look_again();
                }
            }
            Fact::Submitted(_)
            | Fact::Dispatched(_)
            | Fact::Freed { .. }
            | Fact::RulesChanged(_)
            | Fact::Revoked(_)
            | Fact::Appended(_)
            | Fact::GroupChanged(_) => {}
        }
    }

    fn matched(&mut self, record: &MessageRecord) {
        let Some(holder) = record.state.holder() else { return };
        let Some(session) = self.sessions.get_mut(&holder.agent_id) else { return };
        if session.instance != holder.instance {
            return;
        }
        let open = Open { attempt: record.attempt, first_sent_ms: None, last_sent_ms: 0, dispatched: false };
        session.open.insert(record.msg_id.clone(), open);
        self.open_at.insert(record.msg_id.clone(), holder.agent_id.clone());
        self.send(&holder.agent_id.clone(), record);
    }

    /// Sends the task, or leaves it to the next sweep when the line is full.
    fn send(&mut self, agent_id: &AgentId, record: &MessageRecord) {
        let now_ms = self.shared.clock.mono_ms();
        let Some(session) = self.sessions.get_mut(agent_id) else { return };
        if matches!(&session.way, Way::Polls { waiting, .. } if waiting.is_empty()) {
            return;
        }
        let Some(delivery) = delivery_of(&self.shared, agent_id, record) else { return };
        if session.deliver(delivery)
            && let Some(open) = session.open.get_mut(&record.msg_id)
        {
            open.sent(now_ms);
        }
    }

    /// An agent over HTTP asks for tasks: what is due is given at once, else the poll waits.
    fn poll(
        &mut self,
        agent_id: AgentId,
        instance: InstanceId,
        max: usize,
        waits: bool,
        answer: oneshot::Sender<Polled>,
    ) {
        if let Err(error) = self.shared.must_be_current(&agent_id, &instance) {
            let _ = answer.send(Err(error));
            return;
        }
        let now_ms = self.shared.clock.mono_ms();
        self.shared.heartbeats.heard_over_http(&agent_id, &instance, now_ms, true);
        let polls_already = self
            .sessions
            .get(&agent_id)
            .is_some_and(|session| session.instance == instance && matches!(session.way, Way::Polls { .. }));
        if !polls_already {
            self.drop_session(&agent_id);
            let way = Way::Polls { waiting: VecDeque::new(), asked_ms: now_ms };
            let session = Session { instance, way, open: BTreeMap::new(), push: None };
            self.sessions.insert(agent_id.clone(), session);
            self.list_unreceived(&agent_id);
        }
        let shared = self.shared.clone();
        let resend_after_ms = shared.rules().rules.delivery.resend_after_ms;
        let session = self.sessions.get_mut(&agent_id).expect("it was just made");
        let mut tasks = Vec::new();
        for (msg_id, open) in &mut session.open {
            if tasks.len() == max {
                break;
            }
            if open.is_due(now_ms, resend_after_ms)
                && let Some(record) = shared.replica.tables().live().messages.get(msg_id).cloned()
                && let Some(delivery) = delivery_of(&shared, &agent_id, &record)
            {
                open.sent(now_ms);
                tasks.push(delivery);
            }
        }
        let Way::Polls { waiting, asked_ms } = &mut session.way else { return };
        *asked_ms = now_ms;
        if !tasks.is_empty() || !waits {
            let _ = answer.send(Ok(tasks));
            return;
        }
        if waiting.len() >= POLLS_MAX
            && let Some(oldest) = waiting.pop_front()
        {
            let _ = oldest.send(Ok(Vec::new()));
        }
        waiting.push_back(answer);
    }

    fn forget(&mut self, msg_id: &MsgId) {
        if let Some(agent_id) = self.open_at.remove(msg_id)
            && let Some(session) = self.sessions.get_mut(&agent_id)
        {
            session.open.remove(msg_id);
        }
    }

    /// Its time is up: the agent may stop, and its slot is free when it says so.
    fn cancel(&self, record: &MessageRecord) {
        let Some(holder) = record.state.holder() else { return };
        if let Some(session) =
            self.sessions.get(&holder.agent_id).filter(|session| session.instance == holder.instance)
        {
            session.tell(&cancel(&holder.agent_id, &record.msg_id, record.attempt));
        }
    }

    /// Others lost an earlier attempt and may still be at it, if they were only not heard. Whoever is at
    /// it when it attaches learns the same from the verdict.
    fn cancel_earlier(&self, record: &MessageRecord) {
        let now_with = record.state.holder().map(|holder| &holder.agent_id);
        for agent_id in record.avoid.iter().filter(|agent_id| Some(*agent_id) != now_with) {
            if let Some(session) = self.sessions.get(agent_id) {
                session.tell(&cancel(agent_id, &record.msg_id, record.attempt.saturating_sub(1)));
            }
        }
    }

    fn fence(&mut self, agent_id: &AgentId, instance: &InstanceId, why: &str) {
        let is_it = |session: &Session| session.instance == *instance;
        if !self.sessions.get(agent_id).is_some_and(is_it) {
            return;
        }
        let error = ErrorReply::new(Code::StaleInstance, format!("{why}: stop this run"));
        if let Some(mut session) = self.drop_session(agent_id) {
            session.dismiss(&error);
            session.tell(&NodeFrame::Fenced { agent_id: agent_id.clone(), error: Box::new(error) });
            self.shared.heartbeats.detached(agent_id, instance);
        }
    }

    fn attach(
        &mut self,
        agent_id: AgentId,
        instance: InstanceId,
        held: &[Held],
        window: u32,
        line: Line,
        request: u64,
    ) {
        if let Err(error) = self.shared.must_be_current(&agent_id, &instance) {
            line.respond(request, Err(error));
            return;
        }
        self.drop_session(&agent_id);
        let now_ms = self.shared.clock.mono_ms();
        self.shared.heartbeats.attached(&agent_id, &instance, now_ms);
        let verdicts = held.iter().map(|held| self.verdict(&agent_id, &instance, held)).collect();
        line.respond(request, Ok(Answer::Attached { verdicts }));
        let attached = self.lines.entry(line.connection).or_insert_with(|| Attached {
            line: line.clone(),
            agents: BTreeSet::new(),
            echo_due_ms: now_ms,
        });
        attached.agents.insert(agent_id.clone());
        let push = Push::start(&self.shared, &agent_id, &instance, &line, window);
        let session = Session { instance, way: Way::Link(line), open: BTreeMap::new(), push };
        self.sessions.insert(agent_id.clone(), session);
        self.list(&agent_id, held);
        self.release_what_is_over(&agent_id, held);
    }

    /// Slots of attempts that ended while the agent was away, and that it knows nothing of: nobody
    /// else will say that they are free.
    fn release_what_is_over(&self, agent_id: &AgentId, held: &[Held]) {
        let Some(session) = self.sessions.get(agent_id) else { return };
        let live = self.shared.replica.tables().live();
        let over: Vec<Command> = live
            .slots
            .get(agent_id)
            .into_iter()
            .flatten()
            .filter(|(msg_id, slot)| {
                let is_over = |record: &Arc<MessageRecord>| record.attempt != slot.attempt;
                slot.instance == session.instance && live.messages.get(*msg_id).is_none_or(is_over)
            })
            .filter(|(msg_id, _)| !held.iter().any(|held| held.msg_id == **msg_id))
            .map(|(msg_id, slot)| Command::Release {
                msg_id: msg_id.clone(),
                attempt: slot.attempt,
                holder: Holder { agent_id: agent_id.clone(), instance: slot.instance.clone() },
            })
            .collect();
        drop(live);
        for command in over {
            self.propose_aside(command);
        }
    }

    /// Proposes what nobody waits for. Lost, a slot stays taken until its own time is over, or a
    /// record is missing.
    fn propose_aside(&self, command: Command) {
        let shared = self.shared.clone();
        self.shared.clone().spawn(async move {
            if let Err(error) = shared.propose(command, Instant::now() + ASIDE_MAX).await {
                tracing::debug!(code = %error.code, "a command that nobody waits for was not taken");
            }
        });
    }

    fn verdict(&self, agent_id: &AgentId, instance: &InstanceId, held: &Held) -> Verdict {
        let record = match self.shared.replica.tables().message(&held.msg_id) {
            Ok(record) => record,
            Err(error) => {
                self.shared.damaged(&error);
                return Verdict::Keep;
            }
        };
        let is_its_own = record.is_some_and(|record| {
            let holder = record.state.holder();
            !record.state.is_final()
                && record.attempt == held.attempt
                && holder.is_some_and(|holder| holder.agent_id == *agent_id && holder.instance == *instance)
        });
        match (is_its_own, held.finished) {
            (true, true) => Verdict::SendResult,
            (true, false) => Verdict::Keep,
            (false, _) => Verdict::Cancel,
        }
    }

    /// The agent's open attempts, from the tables: what is not yet `received` is sent, and so is
    /// what it once received and no longer has.
    fn list(&mut self, agent_id: &AgentId, held: &[Held]) {
        let Some(session) = self.sessions.get(agent_id) else { return };
        let instance = session.instance.clone();
        let live = self.shared.replica.tables().live();
        let attempts: Vec<Arc<MessageRecord>> = live
            .slots
            .get(agent_id)
            .into_iter()
            .flat_map(|slots| slots.keys())
            .filter_map(|msg_id| live.messages.get(msg_id).cloned())
            .collect();
        drop(live);
        for record in attempts {
            let is_held =
                held.iter().any(|held| held.msg_id == record.msg_id && held.attempt == record.attempt);
            // A slot may be that of an attempt that is over: another agent may have the message.
            let is_its_own = record
                .state
                .holder()
                .is_some_and(|holder| holder.agent_id == *agent_id && holder.instance == instance);
            let is_due = match &record.state {
                MessageState::Matched { .. } | MessageState::Dispatched { .. } => is_its_own,
                MessageState::Acknowledged { .. } => is_its_own && !is_held,
                _ => false,
            };
            if is_due {
                self.matched(&record);
            }
        }
    }

    fn list_all(&mut self) {
        let agents: Vec<AgentId> = self.sessions.keys().cloned().collect();
        for agent_id in agents {
            let current = self
                .shared
                .replica
                .tables()
                .live()
                .agents
                .get(&agent_id)
                .map(|record| record.instance.clone());
            let instance = self.sessions[&agent_id].instance.clone();
            if current.as_ref() != Some(&instance) {
                self.fence(&agent_id, &instance, "a later run of this agent took its place");
                continue;
            }
            let open: Vec<MsgId> = self.sessions[&agent_id].open.keys().cloned().collect();
            open.iter().for_each(|msg_id| self.forget(msg_id));
            self.list_unreceived(&agent_id);
            if let Some(push) = self.sessions.get(&agent_id).and_then(|session| session.push.as_ref()) {
                push.window.look_again();
            }
        }
    }

    /// Like `list`, when the agent's own list is not at hand: what it received it still has.
    fn list_unreceived(&mut self, agent_id: &AgentId) {
        let live = self.shared.replica.tables().live();
        let received: Vec<Held> = live
            .slots
            .get(agent_id)
            .into_iter()
            .flat_map(|slots| slots.iter())
            .map(|(msg_id, slot)| Held { msg_id: msg_id.clone(), attempt: slot.attempt, finished: false })
            .collect();
        drop(live);
        self.list(agent_id, &received);
    }

    fn detach(&mut self, agent_id: &AgentId, instance: &InstanceId) {
        if self.sessions.get(agent_id).is_some_and(|session| session.instance == *instance) {
            self.drop_session(agent_id);
            self.shared.heartbeats.detached(agent_id, instance);
        }
    }

    fn closed(&mut self, connection: u64) {
        let gone = self.lines.remove(&connection).map(|attached| attached.agents);
        for agent_id in gone.into_iter().flatten() {
            if let Some(session) = self.drop_session(&agent_id) {
                self.shared.heartbeats.detached(&agent_id, &session.instance);
            }
        }
    }

    fn drop_session(&mut self, agent_id: &AgentId) -> Option<Session> {
        let session = self.sessions.remove(agent_id)?;
        for msg_id in session.open.keys() {
            self.open_at.remove(msg_id);
        }
        if let Way::Link(line) = &session.way
            && let Some(attached) = self.lines.get_mut(&line.connection)
        {
            attached.agents.remove(agent_id);
            if attached.agents.is_empty() {
                self.lines.remove(&line.connection);
            }
        }
        Some(session)
    }

    fn goodbye(&mut self) {
        let error = ErrorReply::new(Code::NodeDraining, "this node is going: ask another one")
            .with_retry_after_ms(100);
        for session in self.sessions.values_mut() {
            session.dismiss(&error);
            session.tell(&NodeFrame::Goodbye);
        }
    }

    /// A poll that waits proves both heartbeats; an agent that has not asked for long is no longer
    /// ours.
    fn sweep_polls(&mut self, now_ms: u64) {
        let heartbeats = &self.shared.heartbeats;
        let mut gone = Vec::new();
        for (agent_id, session) in &mut self.sessions {
            let Way::Polls { waiting, asked_ms } = &mut session.way else { continue };
            waiting.retain(|poll| !poll.is_closed());
            if !waiting.is_empty() {
                *asked_ms = now_ms;
                heartbeats.heard_over_http(agent_id, &session.instance, now_ms, true);
            } else if now_ms >= *asked_ms + POLLS_FORGOTTEN_MS {
                gone.push(agent_id.clone());
            }
        }
        gone.iter().for_each(|agent_id| drop(self.drop_session(agent_id)));
    }

    /// Echoes for level 2, for all agents of a connection at once.
    fn ask_loops(&mut self, now_ms: u64, heartbeat_ms: u64) {
        for attached in self.lines.values_mut().filter(|attached| now_ms >= attached.echo_due_ms) {
            attached.echo_due_ms = now_ms + heartbeat_ms;
            let mut agents = attached.agents.iter().cloned().peekable();
            while agents.peek().is_some() {
                self.echo += 1;
                let agents = agents.by_ref().take(ECHO_MAX).collect();
                attached.line.send(&NodeFrame::Echo { seq: self.echo, agents });
            }
        }
    }

    /// Echoes, second deliveries, and the record that a task is under way.
    fn sweep(&mut self) {
        let now_ms = self.shared.clock.mono_ms();
        let rules = self.shared.rules();
        let mut again: Vec<(AgentId, MsgId)> = Vec::new();
        let mut aside: Vec<Command> = Vec::new();
        self.sweep_polls(now_ms);
        self.ask_loops(now_ms, rules.rules.liveness.heartbeat_ms);
        for (agent_id, session) in &mut self.sessions {
            for (msg_id, open) in &mut session.open {
                if open.is_due(now_ms, rules.rules.delivery.resend_after_ms) {
                    again.push((agent_id.clone(), msg_id.clone()));
                }
                let sent_long_ago =
                    open.first_sent_ms.is_some_and(|sent_ms| now_ms >= sent_ms + DISPATCHED_AFTER_MS);
                if sent_long_ago && !open.dispatched {
                    open.dispatched = true;
                    let holder = Holder { agent_id: agent_id.clone(), instance: session.instance.clone() };
                    let command =
                        Command::Dispatched { msg_id: msg_id.clone(), attempt: open.attempt, holder };
                    aside.push(command);
                }
            }
        }
        aside.into_iter().for_each(|command| self.propose_aside(command));
        for (agent_id, msg_id) in again {
            let record = self.shared.replica.tables().live().messages.get(&msg_id).cloned();
            match record {
                Some(record) => self.send(&agent_id, &record),
                None => self.forget(&msg_id),
            }
        }
    }
}
