//! Agents: what one declares, how it is started, and how it is ended.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use futures_util::FutureExt;
use reach_protocol::{
    AgentId, Capability, ErrorReply, InstanceId, Json, Name, Registration, Tag, Topics,
    agent::{MAX_CONCURRENCY_DEFAULT, Since, Subscription},
    event::DeliveredEvent,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout_at},
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    client::{Client, made},
    connection::Connection,
    dispatch::{self, Ended, Handler, Work},
    error::Error,
    events::{self, EventContext},
    inbox::Inbox,
    options::Options,
    session::{Book, Order, Session, Status, Stopped},
    steps::Run,
    task::{Done, Failure, Task},
    uptime::Started,
};

/// Tasks that the inbox holds at most: all slots twice, for attempts that overlap, and some.
const fn tasks_max(max_concurrency: u32) -> usize {
    2 * max_concurrency as usize + 256
}

/// Room for echoes beside the tasks.
const ECHOES_MAX: usize = 16;

/// The way to an [`AgentBuilder`].
#[derive(Debug)]
pub struct Agent;

impl Agent {
    /// An agent of this name. The name stays the same across all its runs.
    pub fn builder(agent_id: impl AsRef<str>) -> AgentBuilder {
        AgentBuilder::new(Some(agent_id.as_ref().to_owned()))
    }

    /// An agent with a generated name, kept in `agent_id` beside its inbox: a restart with the same
    /// `inbox_dir` is the same agent.
    pub fn unnamed() -> AgentBuilder {
        AgentBuilder::new(None)
    }
}

/// What an agent declares, and what it does with a task.
pub struct AgentBuilder {
    agent_id: Option<String>,
    capabilities: Vec<(String, f64)>,
    declared: Vec<Capability>,
    metadata: Vec<(String, Json)>,
    subscriptions: Vec<(String, Option<String>, Since)>,
    ttl: Option<Duration>,
    max_concurrency: u32,
    host: Option<String>,
    port: Option<u16>,
    inbox_dir: Option<PathBuf>,
    handler: Option<Handler>,
    on_events: Option<events::Handler>,
    events_at_once: usize,
}

/// Events that an agent works on at once, unless it says otherwise.
const EVENTS_AT_ONCE_DEFAULT: usize = 8;

impl AgentBuilder {
    fn new(agent_id: Option<String>) -> Self {
        Self {
            agent_id,
            capabilities: Vec::new(),
            declared: Vec::new(),
            metadata: Vec::new(),
            subscriptions: Vec::new(),
            ttl: None,
            max_concurrency: MAX_CONCURRENCY_DEFAULT,
            host: None,
            port: None,
            inbox_dir: None,
            handler: None,
            on_events: None,
            events_at_once: EVENTS_AT_ONCE_DEFAULT,
        }
    }

    /// At least one. Twice the weight, twice the share of tasks.
    pub fn capability(mut self, name: impl Into<String>, weight: f64) -> Self {
        self.capabilities.push((name.into(), weight));
        self
    }

    /// A capability with all that may be said of it: version, cost per call, schemas.
    pub fn declare(mut self, capability: Capability) -> Self {
        self.declared.push(capability);
        self
    }

    /// Events it wants: a type with its version, or a prefix such as `task.*`. Without a group it has
    /// one of its own and sees every event. A group that is not there is made, and begins with what is
    /// published from then on. The events go to the handler given by [`AgentBuilder::on_events`];
    /// without one, the agent pulls them by itself.
    pub fn subscribe(self, to: impl Into<String>, group: Option<&str>) -> Self {
        self.subscribe_from(to, group, Since::Latest)
    }

    /// The same, where a group that is made may begin with the first event that is kept.
    pub fn subscribe_from(mut self, to: impl Into<String>, group: Option<&str>, from: Since) -> Self {
        self.subscriptions.push((to.into(), group.map(str::to_owned), from));
        self
    }

    /// Runs on every event that the groups of its subscriptions hand to it, on the runtime that
    /// `connect` is called on. `Ok`: it is done. An error: it comes again, to any member, after 1 s, 4 s,
    /// 16 s, then a minute, and its text stands in the dead letters; say no content in it. An event comes
    /// at least once; while the handler runs, its ack wait is extended. What has not begun when the agent
    /// drains goes back.
    pub fn on_events<F, R>(mut self, handler: F) -> Self
    where
        F: Fn(DeliveredEvent, EventContext) -> R + Send + Sync + 'static,
        R: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        self.on_events = Some(Arc::new(move |event, context| handler(event, context).boxed()));
        self
    }

    /// Events it works on at once. Default 8; with 1 they are worked on in their order.
    pub fn events_at_once(mut self, events: usize) -> Self {
        self.events_at_once = events;
        self
    }

    /// How long it may be silent before it counts as gone, when that is longer than the rule's TTL. At
    /// most 10 min. Its death is found as much later.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Tasks it runs at once. Default 8.
    pub fn max_concurrency(mut self, tasks: u32) -> Self {
        self.max_concurrency = tasks;
        self
    }

    pub fn metadata(mut self, key: impl Into<String>, value: impl Into<Json>) -> Self {
        self.metadata.push((key.into(), value.into()));
        self
    }

    /// For people and the record: nobody dials an agent.
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = Some(host.into());
        self
    }

    /// For people and the record: nobody dials an agent.
    pub fn port(mut self, port: u16) -> Self {
        self.port = Some(port);
        self
    }

    /// A folder of its own on a local disk, made when it is missing. Required: what the agent was
    /// given is kept there until the cluster has the result.
    pub fn inbox_dir(mut self, dir: impl AsRef<Path>) -> Self {
        self.inbox_dir = Some(dir.as_ref().to_owned());
        self
    }

    /// Runs every task, on the runtime that `connect` is called on. A handler whose task was taken
    /// away is dropped at its next `await`; one that panics fails its task.
    pub fn handler<F, R>(mut self, handler: F) -> Self
    where
        F: Fn(Task) -> R + Send + Sync + 'static,
        R: Future<Output = Result<Done, Failure>> + Send + 'static,
    {
        self.handler = Some(Arc::new(move |task| handler(task).boxed()));
        self
    }

    /// Opens the inbox, connects, registers and attaches; fails when that isn't done within
    /// `connect_timeout`. Tasks of an earlier run go on as the cluster decides.
    pub async fn connect(self, options: Options) -> Result<RunningAgent, Error> {
        let started = Started::now();
        let deadline = Instant::now() + options.connect_timeout;
        let concurrency = self.events_at_once;
        let on_events = self.on_events.clone().map(|handler| events::Declared { handler, concurrency });
        let (agent_id, registration, inbox_dir, handler) = self.checked()?;
        let (door, events_queue) = on_events.as_ref().map(|declared| events::door(declared.window())).unzip();
        let instance: InstanceId = made("i", InstanceId::parse);
        let slots = registration.max_concurrency as usize;
        let (work, work_queue) = mpsc::channel(slots + ECHOES_MAX);
        let (ended, ended_queue) = mpsc::channel(slots + ECHOES_MAX);
        let (orders, order_queue) = mpsc::channel(8);
        let (status, statuses) = watch::channel(Status::Connecting);
        let abort = CancellationToken::new();
        let start = Start {
            agent_id,
            registration,
            inbox_dir,
            instance: instance.clone(),
            started,
            options,
            work,
            ended: ended_queue,
            orders: order_queue,
            status,
            abort: abort.clone(),
            events: door,
        };
        let (opened, opening) = oneshot::channel();
        // A thread of its own, so that heartbeats go on whatever the handlers do to their runtime.
        thread::Builder::new()
            .name("agent-reach".into())
            .spawn(move || start.run(opened))
            .map_err(|error| Error::Invalid(format!("no thread for the agent: {error}")))?;
        let guard = abort.clone().drop_guard();
        let (agent_id, client) = opening.await.map_err(|_| Error::Closed)??;
        tokio::spawn(dispatch::dispatch(agent_id.clone(), instance.clone(), handler, work_queue, ended));
        if let (Some(declared), Some(queue)) = (on_events, events_queue) {
            tokio::spawn(events::run(declared, client.clone(), agent_id.clone(), queue));
        }
        let agent = RunningAgent { agent_id, instance, client, orders, statuses, abort, _guard: guard };
        match agent.attached(deadline).await {
            Ok(()) => Ok(agent),
            Err(error) => {
                // The inbox is free again when the caller hears of it.
                agent.abort().await;
                Err(error)
            }
        }
    }

    fn checked(self) -> Result<(Option<AgentId>, Registration, PathBuf, Handler), Error> {
        let invalid = |what: &str, error: &dyn fmt::Display| Error::Invalid(format!("{what}: {error}"));
        let agent_id = self.agent_id.as_deref().map(AgentId::parse).transpose();
        let agent_id = agent_id.map_err(|error| invalid("agent id", &error))?;
        let capabilities = self.capabilities.iter().map(|(name, weight)| {
            let name = Tag::parse(name).map_err(|error| invalid(&format!("capability {name}"), &error))?;
            Ok(Capability::new(name, *weight))
        });
        // The generated name is filled in when the inbox is open.
        let placeholder = AgentId::parse("unnamed").expect("letters are legal in an id");
        let mut capabilities = capabilities.collect::<Result<Vec<_>, Error>>()?;
        capabilities.extend(self.declared);
        let subscriptions = self.subscriptions.iter().map(|(to, group, from)| {
            let wrong = |error| invalid(&format!("subscription {to}"), &error);
            let group = group.as_deref().map(Name::parse).transpose().map_err(wrong)?;
            Ok(Subscription { to: Topics::parse(to).map_err(wrong)?, group, from: *from })
        });
        let mut registration = Registration::new(agent_id.clone().unwrap_or(placeholder), capabilities);
        registration.max_concurrency = self.max_concurrency;
        registration.subscriptions = subscriptions.collect::<Result<_, Error>>()?;
        registration.ttl_ms = self.ttl.map(|ttl| ttl.as_millis() as u64);
        registration.metadata = self.metadata.into_iter().collect();
        registration.host = self.host;
        registration.port = self.port;
        registration
            .validate(&reach_protocol::Limits::default())
            .map_err(|error| invalid("registration", &error))?;
        let missing = |what: &str| Error::Invalid(format!("an agent needs {what}"));
        let inbox_dir = self.inbox_dir.ok_or_else(|| missing("an inbox_dir of its own"))?;
        let handler = self.handler.ok_or_else(|| missing("a handler"))?;
        if self.events_at_once == 0 {
            return Err(Error::Invalid("events_at_once: give at least 1".into()));
        }
        Ok((agent_id, registration, inbox_dir, handler))
    }
}

impl fmt::Debug for AgentBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentBuilder")
            .field("agent_id", &self.agent_id)
            .field("capabilities", &self.capabilities)
            .field("max_concurrency", &self.max_concurrency)
            .finish_non_exhaustive()
    }
}

/// Everything the session's thread is started with.
struct Start {
    agent_id: Option<AgentId>,
    registration: Registration,
    inbox_dir: PathBuf,
    instance: InstanceId,
    started: Started,
    options: Options,
    work: mpsc::Sender<Work>,
    ended: mpsc::Receiver<Ended>,
    orders: mpsc::Receiver<Order>,
    status: watch::Sender<Status>,
    abort: CancellationToken,
    events: Option<events::Door>,
}

impl Start {
    fn run(self, opened: oneshot::Sender<Result<(AgentId, Client), Error>>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = opened.send(Err(Error::Invalid(format!("no runtime for the agent: {error}"))));
                return;
            }
        };
        runtime.block_on(async move {
            let status = self.status.clone();
            let (session, found) = match self.open().await {
                Ok(session) => session,
                Err(error) => {
                    // Without a receiver the caller is gone, and there is nobody to tell.
                    let _ = opened.send(Err(error));
                    return;
                }
            };
            let started = (session.run.agent_id.clone(), session.client.clone());
            let _ = opened.send(Ok(started));
            let stopped = session.run(found).await;
            status.send_replace(Status::Stopped(stopped));
        });
    }

    async fn open(self) -> Result<(Session, Vec<crate::inbox::StoredTask>), Error> {
        let tasks_max = tasks_max(self.registration.max_concurrency);
        let (pushed, pushes) = mpsc::channel(2 * tasks_max);
        // No task has more than four writes under way.
        let (inbox, agent_id, found) =
            Inbox::open_when_free(&self.inbox_dir, self.agent_id.as_ref(), 4 * tasks_max).await?;
        // Not before: who has no inbox has nothing to say to a node.
        let connection = Connection::start(Arc::new(self.options), Some(pushed))?;
        let registration = Registration { agent_id: agent_id.clone(), ..self.registration };
        let run = Run {
            agent_id: agent_id.clone(),
            instance: self.instance,
            registration: Arc::new(registration),
            started: self.started,
            connection: connection.clone(),
        };
        let session = Session {
            run,
            client: Client::of_agent(connection, agent_id),
            inbox,
            tasks_max,
            pushes,
            orders: self.orders,
            abort: self.abort,
            work: self.work,
            ended: self.ended,
            status: self.status,
            book: Book::default(),
            events: self.events,
        };
        Ok((session, found))
    }
}

/// An agent at work. Dropping it ends the run at once, as [`RunningAgent::abort`] does.
pub struct RunningAgent {
    agent_id: AgentId,
    instance: InstanceId,
    client: Client,
    orders: mpsc::Sender<Order>,
    statuses: watch::Receiver<Status>,
    abort: CancellationToken,
    _guard: DropGuard,
}

impl RunningAgent {
    async fn attached(&self, deadline: Instant) -> Result<(), Error> {
        let mut statuses = self.statuses.clone();
        let first = statuses.wait_for(|status| *status != Status::Connecting);
        let status = tokio::select! {
            status = timeout_at(deadline, first) => status.map(|status| status.map(|status| status.clone())),
            error = self.client.refused() => return Err(error),
        };
        match status {
            Ok(Ok(Status::Stopped(Stopped::Fenced(reply) | Stopped::Refused(reply)))) => {
                Err(Error::Refused(reply))
            }
            Ok(Ok(Status::Stopped(Stopped::Failed(reason)))) => Err(Error::Invalid(reason)),
            Ok(Ok(Status::Stopped(_)) | Err(_)) => Err(Error::Closed),
            Ok(Ok(_)) => Ok(()),
            Err(_) => Err(self.client.unreachable()),
        }
    }

    pub fn agent_id(&self) -> &AgentId {
        &self.agent_id
    }

    /// This run of the agent.
    pub fn instance(&self) -> &InstanceId {
        &self.instance
    }

    /// A client that speaks as this agent, over the agent's own connection.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    pub fn state(&self) -> Status {
        self.statuses.borrow().clone()
    }

    /// Waits until the state is another than `from`, and returns it.
    pub async fn changed(&self, from: &Status) -> Status {
        let mut statuses = self.statuses.clone();
        match statuses.wait_for(|status| status != from).await {
            Ok(status) => status.clone(),
            // The session ends with its last state: there is none after it.
            Err(_) => std::future::pending().await,
        }
    }

    /// Asks for no new tasks; what runs goes on. Returns when the cluster has taken note.
    pub async fn drain(&self) -> Result<(), Error> {
        let (answer, answered) = oneshot::channel();
        self.orders.send(Order::Drain(answer)).await.map_err(|_| Error::Closed)?;
        answered.await.map_err(|_| Error::Closed)?
    }

    /// Drains, lets running tasks finish for up to `drain_timeout`, and detaches. What was not
    /// finished by then is dropped and stays in the inbox for the next run.
    pub async fn shutdown(self) -> Stopped {
        let deadline = Instant::now() + self.client.drain_timeout();
        // A session that is over already has said why.
        let _ = self.orders.send(Order::Shutdown(deadline)).await;
        self.stopped().await
    }

    /// Serves until SIGTERM or SIGINT, then shuts down as [`RunningAgent::shutdown`] does: running tasks
    /// end first, for up to `drain_timeout`. A second signal ends the run at once.
    pub async fn serve(self) -> Stopped {
        use tokio::signal::unix::{SignalKind, signal};
        let (Ok(mut terminate), Ok(mut interrupt)) =
            (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
        else {
            return self.stopped().await;
        };
        tokio::select! {
            stopped = self.stopped() => return stopped,
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let deadline = Instant::now() + self.client.drain_timeout();
        let _ = self.orders.send(Order::Shutdown(deadline)).await;
        tokio::select! {
            stopped = self.stopped() => return stopped,
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        self.abort().await
    }

    /// Ends the run at once and tells nobody, as if the process had died; returns when the inbox is
    /// free again.
    pub async fn abort(self) -> Stopped {
        self.abort.cancel();
        self.stopped().await
    }

    /// Waits for the end of this run, whatever ends it.
    pub async fn stopped(&self) -> Stopped {
        let mut statuses = self.statuses.clone();
        let status = statuses.wait_for(|status| matches!(status, Status::Stopped(_))).await;
        match status.as_deref() {
            Ok(Status::Stopped(stopped)) => stopped.clone(),
            _ => Stopped::Failed("the agent's session has ended".into()),
        }
    }

    /// What the cluster said when it fenced this run, if it has.
    pub fn fenced(&self) -> Option<ErrorReply> {
        match &*self.statuses.borrow() {
            Status::Stopped(Stopped::Fenced(reply)) => Some((**reply).clone()),
            _ => None,
        }
    }
}

impl fmt::Debug for RunningAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunningAgent")
            .field("agent_id", &self.agent_id)
            .field("instance", &self.instance)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}
