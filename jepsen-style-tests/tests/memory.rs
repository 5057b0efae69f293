//! Those who don't keep up cost a bounded amount of memory: an agent that answers nothing but its
//! heartbeats, a caller that never reads its answers, and a follower that stands still, all at once.

use std::{
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use jepsen_style_tests::{Cluster, Worker};
use reach_client::{Client, Options};
use reach_protocol::{
    AgentId, Envelope, InstanceId, Json, MsgId, NodeId, Registration, Tag, codec,
    frame::{Answer, ClientFrame, NodeFrame, Request},
    message::Holder,
};
use reach_transport::{Connection, Door, Endpoint, LinkRx, LinkTx, SendError};
use tokio::{task::JoinSet, time::Instant};

const LONG: Duration = Duration::from_secs(60);
/// Submissions of each phase, and how many are under way at once.
const MESSAGES: u64 = 3_000;
const IN_FLIGHT: u64 = 64;
/// How long the follower stands still, at least.
const STILL: Duration = Duration::from_secs(10);
/// What a node may need more than for the same load without them.
const MORE_MAX_KIB: u64 = 64 << 10;
/// What the caller that doesn't read asks for: 1,000 times 256 KiB.
const UNREAD: u64 = 1_000;
const BODY_BYTES: usize = 256 << 10;

/// A client without the library, which would read, answer and come back.
struct Raw {
    connection: Connection,
    tx: LinkTx,
    rx: LinkRx,
    heartbeat: Duration,
    // Ends its connections when it is dropped.
    _endpoint: Endpoint,
}

impl Raw {
    async fn connect(options: &Options) -> anyhow::Result<Self> {
        let endpoint = Endpoint::client(Door::Client, &options.credentials, options.transport.clone())?;
        let addr = options.endpoints[0].parse()?;
        let connection = endpoint.connect(addr, &options.cluster, None).await?;
        let (tx, mut rx) = connection.link();
        tx.send(codec::encode(&ClientFrame::Hello { cluster: options.cluster.clone() }))?;
        let frame = rx.recv().await.context("no welcome")?;
        let NodeFrame::Welcome(welcome) = codec::decode("frame", &frame)? else {
            anyhow::bail!("the first frame is no welcome");
        };
        let heartbeat = Duration::from_millis(welcome.heartbeat_ms);
        Ok(Self { connection, tx, rx, heartbeat, _endpoint: endpoint })
    }

    fn ask(&self, id: u64, request: Request) -> Result<(), SendError> {
        self.tx.send(codec::encode(&ClientFrame::Request { id, timeout_ms: 10_000, stale: false, request }))
    }

    async fn answered(&mut self, id: u64, request: Request) -> anyhow::Result<Answer> {
        self.ask(id, request)?;
        loop {
            let frame = self.rx.recv().await.context("the node let go")?;
            match codec::decode("frame", &frame)? {
                NodeFrame::Response { id: of, response } if of == id => return Ok(*response?),
                _ => {}
            }
        }
    }

    /// Registers, attaches, and from then on only shows that it lives. It counts what it is given.
    async fn agent_that_takes_nothing(
        mut self,
        agent_id: AgentId,
        given: Arc<AtomicU64>,
    ) -> anyhow::Result<()> {
        let instance = InstanceId::parse("i_stuck")?;
        let capabilities = vec![reach_protocol::Capability::new(Tag::parse("square")?, 1.0)];
        let registration =
            Registration { max_concurrency: 256, ..Registration::new(agent_id.clone(), capabilities) };
        let registration = Box::new(registration);
        let register = Request::Register { registration, instance: instance.clone(), uptime_ms: 0 };
        self.answered(1, register).await?;
        let attach = Request::Attach {
            agent_id: agent_id.clone(),
            instance: instance.clone(),
            held: Vec::new(),
            window: 0,
        };
        self.answered(2, attach).await?;
        let run = Holder { agent_id, instance };
        let mut beats = tokio::time::interval(self.heartbeat);
        let mut seq = 0;
        loop {
            tokio::select! {
                _ = beats.tick() => {
                    seq += 1;
                    self.tx.send(codec::encode(&ClientFrame::Beat { seq, runs: vec![run.clone()] }))?;
                }
                frame = self.rx.recv() => {
                    let Some(frame) = frame else { return Ok(()) };
                    match codec::decode("frame", &frame)? {
                        NodeFrame::Echo { seq, .. } => {
                            self.tx.send(codec::encode(&ClientFrame::Echo { seq, runs: vec![run.clone()] }))?;
                        }
                        NodeFrame::Deliver(_) => drop(given.fetch_add(1, Ordering::Relaxed)),
                        _ => {}
                    }
                }
            }
        }
    }

    /// Asks for far more than any queue holds, and reads none of it, until the node has had enough.
    async fn caller_that_reads_nothing(self, big: MsgId) -> anyhow::Result<Self> {
        for id in 0..UNREAD {
            let submit = Request::Submit {
                envelope: Box::new(task(10_000_000 + id)),
                sent_at_ms: None,
                wait_ms: None,
            };
            for request in [submit, Request::Payload { msg_id: big.clone() }] {
                loop {
                    match self.ask(id, request.clone()) {
                        Ok(()) => break,
                        Err(SendError::Full) => tokio::time::sleep(Duration::from_millis(10)).await,
                        Err(SendError::Closed) => return Ok(self),
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        Ok(self)
    }
}

fn task(number: u64) -> Envelope {
    let tag = Tag::parse("square").expect("a legal tag");
    let intent = Some("x".repeat(2 << 10));
    let msg_id = Some(MsgId::parse(&format!("m_{number}")).expect("a legal id"));
    Envelope { msg_id, intent, ..Envelope::request(vec![tag], Json::from_value(&number.into())) }
}

/// Submits them all, and fails unless each is acknowledged.
async fn load(client: &Client, first: u64) -> anyhow::Result<()> {
    let mut callers = JoinSet::new();
    for caller in 0..IN_FLIGHT {
        let client = client.clone();
        callers.spawn(async move {
            for number in (first + caller..first + MESSAGES).step_by(IN_FLIGHT as usize) {
                client.submit(task(number)).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller??;
    }
    Ok(())
}

/// Waits for the end of each.
async fn all_end(client: &Client, first: u64) -> anyhow::Result<()> {
    let mut callers = JoinSet::new();
    for caller in 0..IN_FLIGHT {
        let client = client.clone();
        callers.spawn(async move {
            for number in (first + caller..first + MESSAGES).step_by(IN_FLIGHT as usize) {
                let msg_id = task(number).msg_id.expect("it has one");
                let response = client.wait(&msg_id, LONG).await?;
                anyhow::ensure!(response.status == "completed", "{msg_id} ended {}", response.status);
            }
            anyhow::Ok(())
        });
    }
    while let Some(caller) = callers.join_next().await {
        caller??;
    }
    Ok(())
}

/// The most that a process had in memory since it began, in KiB.
fn peak_kib(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}

fn signal(pid: u32, signal: &str) -> anyhow::Result<()> {
    anyhow::ensure!(
        Command::new("kill").args([signal, &pid.to_string()]).status()?.success(),
        "kill {signal}"
    );
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_does_not_keep_up_costs_no_more_than_a_bound() -> anyhow::Result<()> {
    let cluster = Cluster::start(3).await?;
    let _worker = Worker::start(&cluster, "worker", 256, Default::default()).await?;
    let leader = cluster.leader().await?;
    let pids: Vec<(NodeId, u32)> = cluster
        .view()
        .await?
        .nodes
        .iter()
        .map(|node| Ok((node.node_id, node.report.as_ref().context("a node does not answer")?.pid)))
        .collect::<anyhow::Result<_>>()?;
    let (still, still_pid) = *pids.iter().find(|(id, _)| *id != leader).context("three nodes")?;
    let others: Vec<(NodeId, u32)> = pids.iter().copied().filter(|(id, _)| *id != still).collect();
    // No request goes by way of the node that will stand still.
    let mut options = Options::from_context(cluster.admin())?;
    let at_leader =
        options.endpoints[cluster.node_ids().iter().position(|id| *id == leader).expect("a node")].clone();
    options.endpoints = vec![at_leader.clone()];
    let client = Client::connect(options.clone()).await?;

    // The same load without them, twice: what is kept of recent work grows with the first ones too.
    let mut peaks = Vec::new();
    for first in [0, 1_000_000] {
        load(&client, first).await?;
        all_end(&client, first).await?;
        peaks.push(others.iter().map(|(_, pid)| peak_kib(*pid)).collect::<anyhow::Result<Vec<_>>>()?);
    }

    let big = client
        .submit(Envelope {
            payload: Some(Json::from_value(&"x".repeat(BODY_BYTES).into())),
            ..task(9_999_999)
        })
        .await?;
    let stuck = AgentId::parse("stuck")?;
    let mut as_stuck = cluster.agent_options(&stuck)?;
    as_stuck.endpoints = vec![at_leader];
    let given = Arc::new(AtomicU64::new(0));
    let agent =
        tokio::spawn(Raw::connect(&as_stuck).await?.agent_that_takes_nothing(stuck.clone(), given.clone()));
    let ready = async {
        while client.request(Request::Agent { agent_id: stuck.clone() }, LONG).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, ready).await?;
    let unread = tokio::spawn(Raw::connect(&options).await?.caller_that_reads_nothing(big.msg_id.clone()));
    signal(still_pid, "-STOP")?;
    let stopped = Instant::now();
    load(&client, 2_000_000).await?;
    tokio::time::sleep_until(stopped + STILL).await;
    signal(still_pid, "-CONT")?;
    all_end(&client, 2_000_000).await?;
    let unread = unread.await??;
    // The node let go of who read nothing.
    tokio::time::timeout(LONG, unread.connection.closed()).await?;
    anyhow::ensure!(given.load(Ordering::Relaxed) > 0, "the stuck agent was given nothing");
    anyhow::ensure!(!agent.is_finished(), "the stuck agent was to stay attached: {:?}", agent.await);

    for (i, (id, pid)) in others.iter().enumerate() {
        let (first, second, third) = (peaks[0][i], peaks[1][i], peak_kib(*pid)?);
        println!("{id}: {} MiB, {} MiB, then {} MiB", first >> 10, second >> 10, third >> 10);
        let bound = second + (second - first) + MORE_MAX_KIB;
        anyhow::ensure!(third <= bound, "{id} had {first}, {second}, then {third} KiB; at most {bound} KiB");
    }
    let ended = async {
        while cluster.view().await?.unfinished > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LONG, ended).await??;
    cluster.converged().await?;
    Ok(())
}
