//! What heartbeats cost: many agents that share a few connections, as agents of one host do, beat at
//! both levels and do nothing else. Measured, so it is run by hand:
//!
//! `AGENTS=100000 cargo test -p jepsen-style-tests --test scale -- --ignored --nocapture`

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use jepsen_style_tests::Cluster;
use reach_client::Options;
use reach_protocol::{
    AgentId, AgentState, Capability, InstanceId, Registration, Tag, codec,
    frame::{Answer, ClientFrame, NodeFrame, Request},
};
use reach_transport::{Door, Endpoint, LinkRx, LinkTx};
use tokio::sync::oneshot;

const LONG: Duration = Duration::from_secs(60);
const CONNECTIONS: usize = 12;
/// Requests of one connection under way at once.
const WINDOW: usize = 256;
const BEAT_EVERY: Duration = Duration::from_secs(3);
/// Beats go out in so many portions, as those of independent agents would.
const PORTIONS: usize = 60;
const SETTLE: Duration = Duration::from_secs(12);
const MEASURED: Duration = Duration::from_secs(30);

struct Line {
    tx: LinkTx,
    rx: LinkRx,
    agents: Vec<AgentId>,
}

fn run() -> InstanceId {
    InstanceId::parse("i1").expect("a legal id")
}

impl Line {
    async fn open(options: &Options, node: usize, agents: Vec<AgentId>) -> anyhow::Result<Self> {
        let endpoint = Endpoint::client(Door::Client, &options.credentials, options.transport.clone())?;
        let addr = options.endpoints[node].parse()?;
        let connection = endpoint.connect(addr, &options.cluster, None).await?;
        let (tx, rx) = connection.link();
        let mut line = Self { tx, rx, agents };
        line.send(&ClientFrame::Hello { cluster: options.cluster.clone() })?;
        anyhow::ensure!(matches!(line.next().await?, NodeFrame::Welcome(_)), "no welcome");
        Ok(line)
    }

    fn send(&self, frame: &ClientFrame) -> anyhow::Result<()> {
        Ok(self.tx.send(codec::encode(frame))?)
    }

    async fn next(&mut self) -> anyhow::Result<NodeFrame> {
        let bytes = self.rx.recv().await.context("the link was lost")?;
        Ok(codec::decode("frame", &bytes)?)
    }

    /// Asks the same of every agent; what was refused for now is asked again.
    async fn ask_all(&mut self, request: impl Fn(&AgentId) -> Request) -> anyhow::Result<()> {
        let mut left: VecDeque<usize> = (0..self.agents.len()).collect();
        let mut asked = BTreeMap::new();
        let mut id = 0;
        while !left.is_empty() || !asked.is_empty() {
            while asked.len() < WINDOW
                && let Some(index) = left.pop_front()
            {
                id += 1;
                asked.insert(id, index);
                let request = request(&self.agents[index]);
                self.send(&ClientFrame::Request { id, timeout_ms: 30_000, stale: false, request })?;
            }
            match self.next().await? {
                NodeFrame::Response { id, response } => {
                    let index = asked.remove(&id).context("an answer to nothing")?;
                    match response {
                        Ok(_) => {}
                        Err(error) if error.retryable => left.push_back(index),
                        Err(error) => anyhow::bail!("{error}"),
                    }
                }
                frame => self.echo(frame)?,
            }
        }
        Ok(())
    }

    fn echo(&self, frame: NodeFrame) -> anyhow::Result<()> {
        match frame {
            NodeFrame::Echo { agent_id, seq } => {
                self.send(&ClientFrame::Echo { agent_id, instance: run(), seq })
            }
            NodeFrame::Fenced { agent_id, error } => anyhow::bail!("{agent_id}: {error}"),
            _ => Ok(()),
        }
    }

    /// Beats for all, and answers every echo.
    async fn live(mut self, mut stop: oneshot::Receiver<()>) -> anyhow::Result<()> {
        let mut every = tokio::time::interval(BEAT_EVERY / PORTIONS as u32);
        let mut portion = 0;
        loop {
            tokio::select! {
                _ = &mut stop => return Ok(()),
                frame = self.rx.recv() => {
                    self.echo(codec::decode("frame", &frame.context("the link was lost")?)?)?;
                }
                _ = every.tick() => {
                    portion = (portion + 1) % PORTIONS;
                    for agent_id in self.agents.iter().skip(portion).step_by(PORTIONS) {
                        self.send(&ClientFrame::Beat { agent_id: agent_id.clone(), instance: run(), seq: 1 })?;
                    }
                }
            }
        }
    }
}

/// Processor time of a process, user and system.
fn cpu(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
    Ok(Duration::from_millis(ticks * 10))
}

#[ignore = "measured by hand"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_of_many_agents_cost_little_and_no_log_entry() -> anyhow::Result<()> {
    let agents: usize = std::env::var("AGENTS").map_or(Ok(10_000), |text| text.parse())?;
    let cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    let options = cluster.host_options("crowd")?;
    let began = Instant::now();
    let lines = (0..CONNECTIONS).map(|number| {
        let options = options.clone();
        let own = (number..agents).step_by(CONNECTIONS).map(|i| AgentId::parse(&format!("crowd:{i}")));
        let own: Result<Vec<_>, _> = own.collect();
        async move {
            let mut line = Line::open(&options, number % 3, own?).await?;
            let tag = Tag::parse("crowd")?;
            line.ask_all(|agent_id| Request::Register {
                registration: Box::new(Registration::new(
                    agent_id.clone(),
                    vec![Capability::new(tag.clone(), 1.0)],
                )),
                instance: run(),
                uptime_ms: 0,
            })
            .await?;
            let attach = |agent_id: &AgentId| Request::Attach {
                agent_id: agent_id.clone(),
                instance: run(),
                held: Vec::new(),
            };
            line.ask_all(attach).await?;
            let (stop, stopped) = oneshot::channel();
            anyhow::Ok((stop, tokio::spawn(line.live(stopped))))
        }
    });
    let mut stops = Vec::new();
    let mut living = Vec::new();
    // All at once: whoever is attached already has to beat while others come.
    let tasks: Vec<_> = lines.map(tokio::spawn).collect();
    for task in tasks {
        let (stop, line) = task.await??;
        stops.push(stop);
        living.push(line);
    }
    println!("{agents} agents registered and attached after {:?}", began.elapsed());
    tokio::time::sleep(SETTLE).await;

    let view = cluster.view().await?;
    let pids: Vec<u32> =
        view.nodes.iter().filter_map(|node| node.report.as_ref()).map(|report| report.pid).collect();
    let before: Vec<Duration> = pids.iter().map(|pid| cpu(*pid)).collect::<Result<_, _>>()?;
    let began = Instant::now();
    tokio::time::sleep(MEASURED).await;
    let (after, took) =
        (pids.iter().map(|pid| cpu(*pid)).collect::<Result<Vec<_>, _>>()?, began.elapsed().as_secs_f64());
    let shares: Vec<f64> =
        before.iter().zip(&after).map(|(before, after)| (*after - *before).as_secs_f64() / took).collect();
    let applied =
        cluster.view().await?.nodes.iter().filter_map(|node| node.report.clone()).map(|of| of.applied).max();
    let applied_before = view.nodes.iter().filter_map(|node| node.report.as_ref()).map(|of| of.applied).max();
    println!("cores per node {shares:.2?}, together {:.2}", shares.iter().sum::<f64>());
    println!("log entries in {took:.0} s: {:?}", applied.zip(applied_before).map(|(a, b)| a - b));

    let mut after = None;
    let mut ready = 0;
    loop {
        let request = Request::Agents {
            state: Some(AgentState::Ready),
            capability: None,
            metadata: None,
            limit: 1_000,
            after,
        };
        let Answer::Agents { items, next, .. } = client.request(request, LONG).await? else {
            anyhow::bail!("no agents")
        };
        ready += items.len();
        after = next;
        if after.is_none() {
            break;
        }
    }
    for stop in stops {
        // One that has ended already tells so below.
        let _ = stop.send(());
    }
    for line in living {
        line.await??;
    }
    assert_eq!(ready, agents, "all of them are ready");
    assert_eq!(applied, applied_before, "nobody changed");
    Ok(())
}
