//! Agent-Reach: node processes made with the product's own commands, and the SDK against any
//! cluster.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, bail};
use reach_client::{Agent, Client, Done, Options, Task};
use reach_protocol::{
    AgentId, AgentState, Code, Envelope, Json, Principal, Tag,
    frame::{Answer, ClusterView, Request},
};
use reach_transport::{Authority, Identity};
use tokio::time::{Instant, sleep};

use super::{ANSWER_MAX, POLL, READY_MAX, SERVERS, Work, Worker};
use crate::{
    load::Ask,
    process::{Servers, free_ports},
};

/// For messages that nobody takes: the cluster is gone before.
const EXPIRES_IN: Duration = Duration::from_secs(15 * 60);

#[derive(Debug)]
pub struct Ours {
    pub servers: Servers,
    pub target: Target,
}

impl Ours {
    pub async fn start(program: &Path, mut servers: Servers) -> anyhow::Result<Self> {
        let root = servers.dir().join("cluster");
        let mut command = Command::new(program);
        command.args(["cluster", "new", "--name", "bench", "--out"]).arg(&root);
        for (i, port) in free_ports(SERVERS)?.into_iter().enumerate() {
            // HTTP has the port before the clients'.
            command.args(["--node", &format!("n{}=127.0.0.1:{}", i + 1, port + 1)]);
        }
        let made = command.env("AGENT_REACH_HOME", servers.dir().join("home")).output()?;
        anyhow::ensure!(made.status.success(), "{command:?}: {}", String::from_utf8_lossy(&made.stderr));
        for i in 1..=SERVERS {
            let config = root.join(format!("n{i}/node.toml"));
            servers.spawn(program, &["node".into(), "--config".into(), config.display().to_string()])?;
        }
        let inboxes = servers.dir().join("inboxes");
        let target = Target { inboxes, ..Target::of(root.join("admin")) };
        let ours = Self { servers, target };
        let client = ours.target.client(None, READY_MAX).await.with_context(|| ours.servers.logs())?;
        let deadline = Instant::now() + READY_MAX;
        while let Err(error) = client.request(Request::Initialise, READY_MAX).await {
            if error.code() == Code::IllegalTransition {
                break;
            }
            anyhow::ensure!(Instant::now() < deadline, "no cluster: {error}\n{}", ours.servers.logs());
            sleep(POLL).await;
        }
        loop {
            let view = ours.target.view().await?;
            if view.leader.is_some()
                && view.nodes.iter().filter(|node| node.report.is_some()).count() == SERVERS
            {
                return Ok(ours);
            }
            anyhow::ensure!(Instant::now() < deadline, "not all serve\n{}", ours.servers.logs());
            sleep(POLL).await;
        }
    }

    pub(super) async fn leader(&self) -> anyhow::Result<usize> {
        let leader = self.target.view().await?.leader.context("nobody leads")?;
        Ok(leader.0 as usize - 1)
    }

    /// The last entry that every node has applied.
    pub async fn applied(&self) -> anyhow::Result<u64> {
        let view = self.target.view().await?;
        let applied = view.nodes.iter().map(|node| node.report.as_ref().map(|report| report.applied));
        applied.min().flatten().context("a node does not answer")
    }

    pub(super) async fn asker(&self, work: Work, size: usize, server: usize) -> anyhow::Result<Ask> {
        self.target.asker(work, size, Some(server)).await
    }
}

/// Any cluster, by a context folder.
#[derive(Clone, Debug)]
pub struct Target {
    pub context: PathBuf,
    /// Where agents of the load keep their inboxes.
    pub inboxes: PathBuf,
    /// How long a message lives that nobody takes. Longer than a measurement: its end costs work of
    /// its own.
    pub expires_in: Duration,
}

impl Target {
    /// A cluster's own folders decide the rest.
    pub fn of(context: PathBuf) -> Self {
        Self { context, inboxes: std::env::temp_dir(), expires_in: EXPIRES_IN }
    }

    /// Over a node of that position in the context, or over any.
    pub async fn client(&self, server: Option<usize>, within: Duration) -> anyhow::Result<Client> {
        let mut options = Options::from_context(&self.context)?;
        options.connect_timeout = within;
        Ok(Client::connect(through(options, server)?).await?)
    }

    pub async fn view(&self) -> anyhow::Result<ClusterView> {
        let client = self.client(None, READY_MAX).await?;
        match client.request(Request::Cluster, READY_MAX).await? {
            Answer::Cluster(view) => Ok(*view),
            _ => bail!("a question for the cluster got another answer"),
        }
    }

    /// An agent of the load, by its own certificate: the folder has it, or the authority's key.
    fn agent_options(&self, agent_id: &AgentId) -> anyhow::Result<Options> {
        let has_key = self.context.join("client-ca.key").is_file();
        if self.context.join("agents").join(format!("{agent_id}.pem")).is_file() || !has_key {
            return Options::from_context_as(&self.context, agent_id).with_context(|| {
                format!("the load has an agent of its own: run `agent-reach certs issue --agent {agent_id}`")
            });
        }
        self.options_of(Principal::Agent(agent_id.clone()))
    }

    /// With a new certificate, where the folder has the authority's key.
    pub fn options_of(&self, principal: Principal) -> anyhow::Result<Options> {
        let key = self.context.join("client-ca.key");
        let mut options = Options::from_context(&self.context)?;
        let ca = fs::read_to_string(self.context.join("client-ca.pem"))?;
        let authority = Authority::from_pem(&ca, &fs::read_to_string(key)?)?;
        let identity = Identity::new(options.cluster.clone(), principal);
        let issued = authority.issue(&identity, Duration::from_secs(24 * 3600))?;
        options.credentials.cert_pem = issued.cert_pem;
        options.credentials.key_pem = issued.key_pem;
        Ok(options)
    }

    /// Connects the agent that takes the messages of this work.
    pub async fn prepare(
        &self,
        work: Work,
        in_flight: usize,
        server: Option<usize>,
    ) -> anyhow::Result<Worker> {
        let agent_id = AgentId::parse(agent_of(work))?;
        fs::create_dir_all(&self.inboxes)?;
        let inbox = tempfile::tempdir_in(&self.inboxes)?;
        let done = Arc::new(AtomicU64::new(0));
        let builder =
            Agent::builder(agent_id.as_str()).capability(capability_of(work), 1.0).inbox_dir(&inbox);
        let builder = match work {
            // One slot, and the task in it never ends: all others wait.
            Work::Submit => builder.max_concurrency(1).handler(|_| std::future::pending()),
            Work::Worked | Work::RoundTrip => {
                let done = done.clone();
                builder.max_concurrency((2 * in_flight).max(64) as u32).handler(move |task: Task| {
                    done.fetch_add(1, Ordering::Relaxed);
                    async move { Ok(Done::new(task.payload())) }
                })
            }
        };
        let running = builder.connect(through(self.agent_options(&agent_id)?, server)?).await?;
        // The agent first: its inbox is closed before the folder goes.
        Ok(Worker { done, _running: vec![Box::new(running), Box::new(inbox)] })
    }

    pub async fn asker(&self, work: Work, size: usize, server: Option<usize>) -> anyhow::Result<Ask> {
        let client = self.client(server, READY_MAX).await?;
        let required = vec![Tag::parse(capability_of(work))?];
        let payload = payload(size);
        let expires_in_ms = Some(self.expires_in.as_millis() as u64);
        Ok(Arc::new(move || {
            let client = client.clone();
            let envelope = Envelope { expires_in_ms, ..Envelope::request(required.clone(), payload.clone()) };
            Box::pin(async move {
                if work != Work::RoundTrip {
                    client.submit(envelope).await?;
                    return Ok(());
                }
                let response = client.call(envelope, ANSWER_MAX).await?;
                anyhow::ensure!(response.status == "completed", "a task ended {}", response.status);
                Ok(())
            })
        }))
    }
}

/// All agents in this state.
pub async fn agents_in(client: &Client, state: AgentState) -> anyhow::Result<Vec<AgentId>> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let limit = 1_000;
        let (state, capability, metadata) = (Some(state), None, None);
        let request = Request::Agents { state, capability, metadata, limit, after };
        let Answer::Agents { items, next, .. } = client.request(request, READY_MAX).await? else {
            bail!("a question for agents got another answer");
        };
        found.extend(items.into_iter().map(|agent| agent.record.agent_id().clone()));
        match next {
            Some(next) => after = Some(next),
            None => return Ok(found),
        }
    }
}

/// Dials only the node of that position; others are learned from it, for when it is gone.
fn through(mut options: Options, server: Option<usize>) -> anyhow::Result<Options> {
    if let Some(server) = server {
        options.endpoints = vec![options.endpoints.get(server).context("no such node")?.clone()];
    }
    Ok(options)
}

/// A JSON string that is `size` bytes long as it is sent.
fn payload(size: usize) -> Json {
    Json::from_value(&"x".repeat(size.saturating_sub(2)).into())
}

fn agent_of(work: Work) -> &'static str {
    match work {
        Work::Submit => "bench_hold",
        Work::Worked | Work::RoundTrip => "bench_echo",
    }
}

fn capability_of(work: Work) -> &'static str {
    match work {
        Work::Submit => "bench.hold",
        Work::Worked | Work::RoundTrip => "bench.echo",
    }
}
