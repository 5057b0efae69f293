//! A crowd of agents with both heartbeats and no work, over few connections or over one each: what
//! they cost the three nodes.
//!
//! It speaks the frames itself: a hundred thousand agents of the SDK, with an inbox each, would
//! measure this machine and not the nodes.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, bail};
use reach_client::Options;
use reach_protocol::{
    AgentId, AgentState, Capability, Code, InstanceId, Principal, Registration, Tag, codec,
    frame::{ClientFrame, NodeFrame, Request},
    message::Holder,
};
use reach_transport::{Door, Endpoint, LinkRx, LinkTx};
use serde::Serialize;
use tokio::{
    sync::{Semaphore, watch},
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    process::{self, Servers},
    system::{Ours, Programs, READY_MAX, SERVERS, agents_in},
};

/// The host whose agents they are; its certificate speaks for all of them.
const HOST: &str = "bench";
/// Different capabilities among the crowd.
const TAGS: usize = 100;
/// Handshakes under way at once.
const DIALS_MAX: usize = 64;
/// Connections that share a socket, so that its buffer holds what comes for them.
const SOCKET_SHARED_BY: usize = 100;
/// Requests of one connection under way at once.
const ASKED_MAX: usize = 32;
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// How long everyone may take to be there.
const GATHER_MAX: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub struct Plan {
    pub agents: usize,
    pub connections: usize,
    /// Before the first comes, and after the last one: time for what its coming left to do.
    pub settle: Duration,
    pub watched: Duration,
}

#[derive(Clone, Debug, Serialize)]
pub struct Crowd {
    pub agents: usize,
    pub connections: usize,
    /// Registered and attached, from the first to the last.
    pub joined_per_s: f64,
    /// CPU of the three nodes, in cores, while nothing but heartbeats happens.
    pub cores: f64,
    /// The same of the load.
    pub load_cores: f64,
    /// Resident memory that each agent adds to a node, in KiB; of the node that it adds most to.
    pub kib_per_agent: f64,
    pub watched_s: f64,
    /// Raft entries meanwhile.
    pub entries: u64,
    /// Agents that are `ready` afterwards.
    pub ready: usize,
}

pub async fn measure(programs: &Programs, data: &Path, plan: &Plan) -> anyhow::Result<Crowd> {
    let mut ours = Ours::start(&programs.agent_reach, Servers::none(data)?).await?;
    let found = gather(&ours, plan).await;
    ours.servers.all_run()?;
    found.map_err(|error| anyhow::anyhow!("{error:#}\n{}", ours.servers.logs()))
}

async fn gather(ours: &Ours, plan: &Plan) -> anyhow::Result<Crowd> {
    let pids = ours.servers.pids();
    let memory = || -> anyhow::Result<Vec<f64>> {
        pids.iter().map(|pid| Ok(process::memory(*pid)?.resident)).collect()
    };
    sleep(plan.settle).await;
    let memory_before = memory()?;

    let options = ours.target.options_of(Principal::Host(HOST.parse()?))?;
    let joined = Arc::new(AtomicUsize::new(0));
    let (stop, stopped) = watch::channel(());
    let dials = Arc::new(Semaphore::new(DIALS_MAX));
    let mut hosts = JoinSet::new();
    let mut endpoint = None;
    let began = Instant::now();
    for nth in 0..plan.connections {
        if nth % SOCKET_SHARED_BY == 0 {
            let opened = Endpoint::client(Door::Client, &options.credentials, options.transport.clone())?;
            endpoint = Some(Arc::new(opened));
        }
        let host = Host {
            endpoint: endpoint.clone().context("no socket")?,
            address: options.endpoints[nth % SERVERS].clone(),
            agents: (nth..plan.agents).step_by(plan.connections).collect(),
            joined: joined.clone(),
            dials: dials.clone(),
        };
        hosts.spawn(host.run(options.clone(), stopped.clone()));
    }
    while joined.load(Ordering::Relaxed) < plan.agents {
        if let Some(ended) = hosts.try_join_next() {
            ended??;
        }
        let here = joined.load(Ordering::Relaxed);
        anyhow::ensure!(began.elapsed() < GATHER_MAX, "only {here} of {} agents came", plan.agents);
        sleep(POLL).await;
    }
    let joined_per_s = plan.agents as f64 / began.elapsed().as_secs_f64();

    sleep(plan.settle).await;
    let own = [std::process::id()];
    let applied_before = ours.applied().await?;
    let (cpu_before, own_before, watched) = (process::cpu(&pids)?, process::cpu(&own)?, Instant::now());
    sleep(plan.watched).await;
    let (cpu, own_cpu) = (process::cpu(&pids)? - cpu_before, process::cpu(&own)? - own_before);
    let watched_s = watched.elapsed().as_secs_f64();
    let entries = ours.applied().await? - applied_before;
    let more = memory()?.into_iter().zip(memory_before).map(|(after, before)| after - before);
    let client = ours.target.client(None, READY_MAX).await?;
    let ready = agents_in(&client, AgentState::Ready).await?.len();
    if let Some(ended) = hosts.try_join_next() {
        ended??;
        bail!("a connection of the crowd ended by itself");
    }
    drop(stop);
    while let Some(ended) = hosts.join_next().await {
        ended??;
    }
    Ok(Crowd {
        agents: plan.agents,
        connections: plan.connections,
        joined_per_s,
        cores: cpu.as_secs_f64() / watched_s,
        load_cores: own_cpu.as_secs_f64() / watched_s,
        kib_per_agent: more.fold(0.0, f64::max) * 1024.0 / plan.agents as f64,
        watched_s,
        entries,
        ready,
    })
}

/// One connection, and the agents behind it.
struct Host {
    endpoint: Arc<Endpoint>,
    address: String,
    agents: Vec<usize>,
    joined: Arc<AtomicUsize>,
    dials: Arc<Semaphore>,
}

impl Host {
    async fn run(self, options: Options, mut stopped: watch::Receiver<()>) -> anyhow::Result<()> {
        let dial = self.dials.acquire().await?;
        let connection = self.endpoint.connect(self.address.parse()?, &options.cluster, None).await?;
        let (tx, rx) = connection.link();
        tx.send(codec::encode(&ClientFrame::Hello { cluster: options.cluster.clone() }))?;
        let mut link = Link { tx, rx, next_id: 0, runs: Vec::new(), seq: 0 };
        let frame = link.rx.recv().await.context("no welcome")?;
        let NodeFrame::Welcome(welcome) = codec::decode("frame", &frame)? else {
            bail!("the first frame is no welcome");
        };
        drop(dial);
        let runs: Vec<Holder> = self.agents.iter().map(|nth| run_of(*nth)).collect::<anyhow::Result<_>>()?;
        for group in runs.chunks(ASKED_MAX) {
            let registers = self.agents.iter().skip(link.runs.len()).zip(group);
            let registers: Vec<Request> =
                registers.map(|(nth, run)| register(*nth, run)).collect::<anyhow::Result<_>>()?;
            link.answered(registers).await?;
            let attaches = group.iter().map(|run| Request::Attach {
                agent_id: run.agent_id.clone(),
                instance: run.instance.clone(),
                held: Vec::new(),
                window: 0,
            });
            link.answered(attaches.collect()).await?;
            link.runs.extend_from_slice(group);
            self.joined.fetch_add(group.len(), Ordering::Relaxed);
        }
        let mut beats = tokio::time::interval(Duration::from_millis(welcome.heartbeat_ms));
        loop {
            tokio::select! {
                _ = beats.tick() => link.beat()?,
                frame = link.rx.recv() => link.take(&frame.context("the node let go")?)?,
                _ = stopped.changed() => return Ok(()),
            }
        }
    }
}

struct Link {
    tx: LinkTx,
    rx: LinkRx,
    next_id: u64,
    /// Those that are attached.
    runs: Vec<Holder>,
    seq: u64,
}

impl Link {
    /// Asks all of it at once, and again what the node has no room for; the heartbeats of those that
    /// are here go on meanwhile.
    async fn answered(&mut self, mut requests: Vec<Request>) -> anyhow::Result<()> {
        let deadline = Instant::now() + ANSWER_MAX;
        while !requests.is_empty() {
            let mut open = BTreeMap::new();
            for request in requests.drain(..) {
                self.next_id += 1;
                let (id, timeout_ms) = (self.next_id, ANSWER_MAX.as_millis() as u64);
                let frame = ClientFrame::Request { id, timeout_ms, stale: false, request: request.clone() };
                self.tx.send(codec::encode(&frame))?;
                open.insert(id, request);
            }
            let mut pause = Duration::ZERO;
            while !open.is_empty() {
                let frame = tokio::time::timeout_at(deadline, self.rx.recv()).await.context("no answer")?;
                let frame = frame.context("the node let go")?;
                match codec::decode("frame", &frame)? {
                    NodeFrame::Response { id, response } => {
                        let request = open.remove(&id).context("an answer to no question")?;
                        match response {
                            Err(error) if error.code == Code::Overloaded => {
                                let asked = Duration::from_millis(error.retry_after_ms.unwrap_or_default());
                                pause = pause.max(asked);
                                requests.push(request);
                            }
                            response => drop(response?),
                        }
                    }
                    _ => self.take(&frame)?,
                }
            }
            sleep(pause).await;
            self.beat()?;
        }
        Ok(())
    }

    fn beat(&mut self) -> anyhow::Result<()> {
        self.seq += 1;
        let frame = ClientFrame::Beat { seq: self.seq, runs: self.runs.clone() };
        Ok(self.tx.send(codec::encode(&frame))?)
    }

    fn take(&mut self, frame: &[u8]) -> anyhow::Result<()> {
        match codec::decode("frame", frame)? {
            NodeFrame::Echo { seq, agents } => {
                let is_asked = |run: &&Holder| agents.binary_search(&run.agent_id).is_ok();
                let runs = self.runs.iter().filter(is_asked).cloned().collect();
                Ok(self.tx.send(codec::encode(&ClientFrame::Echo { seq, runs }))?)
            }
            NodeFrame::Fenced { agent_id, error } => bail!("{agent_id} was fenced: {}", error.message),
            NodeFrame::Goodbye => bail!("the node is going"),
            _ => Ok(()),
        }
    }
}

fn run_of(nth: usize) -> anyhow::Result<Holder> {
    let agent_id = AgentId::parse(&format!("{HOST}:agent_{nth:06}"))?;
    Ok(Holder { agent_id, instance: InstanceId::parse(&format!("i_{nth:06}"))? })
}

fn register(nth: usize, run: &Holder) -> anyhow::Result<Request> {
    let tag = Tag::parse(&format!("bench.crowd_{}", nth % TAGS))?;
    let registration = Box::new(Registration::new(run.agent_id.clone(), vec![Capability::new(tag, 1.0)]));
    Ok(Request::Register { registration, instance: run.instance.clone(), uptime_ms: 0 })
}
