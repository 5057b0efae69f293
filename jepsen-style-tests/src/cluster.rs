//! A cluster of node processes on loopback, made with the product's own commands, and the faults
//! that can be done to it.

use std::{
    fs::File,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use reach_client::{Client, Options};
use reach_config::{NodeConfig, ports::Stretch};
use reach_protocol::{
    AgentId, NodeId, Principal,
    frame::{Answer, ClusterView, Request},
};
use reach_transport::{Identity, authority::Authority};
use rustix::process::{Pid, Signal, kill_process};

use crate::{Doors, Proxy};

/// How long a healthy cluster may take to serve, by far.
const READY_MAX: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(50);

/// What can be cut.
#[derive(Clone, Copy, Debug)]
enum Cuts {
    None,
    Nodes,
    Clients,
}

#[derive(Debug)]
pub struct Cluster {
    dir: tempfile::TempDir,
    binary: PathBuf,
    nodes: Vec<(NodeId, Option<Child>)>,
    /// Between the nodes, where faults of the network are wanted.
    proxy: Option<Proxy>,
    /// Before the nodes' doors for clients, where those are to be cut off.
    doors: Option<Doors>,
    /// The library that shows a node another calendar, where it is to be shown one.
    faketime: Option<PathBuf>,
}

impl Cluster {
    /// Makes the folders, starts every node and initialises the cluster.
    pub async fn start(nodes: u64) -> anyhow::Result<Self> {
        Self::start_with(nodes, Cuts::None, None).await
    }

    /// As `start`, with doors for clients that can be cut off from all nodes at once.
    pub async fn start_behind_doors(nodes: u64) -> anyhow::Result<Self> {
        Self::start_with(nodes, Cuts::Clients, None).await
    }

    /// As `start`, with a network that can be cut, and calendars that can be stepped.
    pub async fn start_breakable(nodes: u64, faketime: Option<PathBuf>) -> anyhow::Result<Self> {
        Self::start_with(nodes, Cuts::Nodes, faketime).await
    }

    async fn start_with(nodes: u64, cuts: Cuts, faketime: Option<PathBuf>) -> anyhow::Result<Self> {
        let binary = binary()?;
        let dir = tempfile::tempdir()?;
        let mut command = Command::new(&binary);
        command.args(["cluster", "new", "--name", "test", "--out"]).arg(dir.path().join("cluster"));
        for id in 1..=nodes {
            // HTTP has the port before the clients'.
            let port = Stretch::of_this_process()?.take()? + 1;
            command.args(["--node", &format!("n{id}=127.0.0.1:{port}")]);
        }
        run(command.env("AGENT_REACH_HOME", dir.path().join("home")))?;
        let ids = (1..=nodes).map(|id| (NodeId(id), None)).collect();
        let mut cluster = Self { dir, binary, nodes: ids, proxy: None, doors: None, faketime };
        match cuts {
            Cuts::None => {}
            Cuts::Nodes => {
                let (doors, real) = cluster.moved("peer_listen", |config| config.peer_listen)?;
                cluster.proxy = Some(Proxy::start(&doors, &real).await?);
            }
            Cuts::Clients => {
                let (doors, real) = cluster.moved("client_listen", |config| config.client_listen)?;
                cluster.doors = Some(Doors::start(&doors, &real).await?);
            }
        }
        for id in 1..=nodes {
            cluster.spawn(NodeId(id))?;
        }
        let client = cluster.client().await?;
        let deadline = Instant::now() + READY_MAX;
        while let Err(error) = client.request(Request::Initialise, Duration::from_secs(5)).await {
            if error.code() == reach_protocol::Code::IllegalTransition {
                break;
            }
            if Instant::now() > deadline {
                bail!("the cluster could not be initialised: {error}\n{}", cluster.logs());
            }
            tokio::time::sleep(POLL).await;
        }
        cluster.wait_until_serving().await?;
        Ok(cluster)
    }

    pub fn root(&self) -> PathBuf {
        self.dir.path().join("cluster")
    }

    fn node_dir(&self, id: NodeId) -> PathBuf {
        self.root().join(id.to_string())
    }

    pub fn admin(&self) -> PathBuf {
        self.root().join("admin")
    }

    pub fn node_ids(&self) -> Vec<NodeId> {
        self.nodes.iter().map(|(id, _)| *id).collect()
    }

    pub fn spawn(&mut self, id: NodeId) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.node_dir(id).join("node.log"))?;
        let mut command = Command::new(&self.binary);
        if let Some(library) = &self.faketime {
            let file = self.clock_file(id);
            if !file.exists() {
                crate::nemesis::write_clock(&file, "+0")?;
            }
            command
                .env("LD_PRELOAD", library)
                .env("FAKETIME_TIMESTAMP_FILE", file)
                .env("FAKETIME_CACHE_DURATION", "1")
                // Only the calendar is wrong, as on a real host.
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        }
        let child = command
            .args(["node", "--with-stdin", "--config"])
            .arg(self.node_dir(id).join("node.toml"))
            // Ends with this process, whatever happens to it.
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        self.child(id).replace(child);
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(&mut self, id: NodeId) -> anyhow::Result<()> {
        let mut child = self.child(id).take().with_context(|| format!("{id} does not run"))?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Where a node's calendar is set, as an offset such as `+3h`.
    pub fn clock_file(&self, id: NodeId) -> PathBuf {
        self.node_dir(id).join("clock")
    }

    /// SIGSTOP: it holds its sockets and does nothing.
    pub fn pause(&mut self, id: NodeId) -> anyhow::Result<()> {
        self.signal(id, Signal::STOP)
    }

    pub fn resume(&mut self, id: NodeId) -> anyhow::Result<()> {
        self.signal(id, Signal::CONT)
    }

    fn signal(&mut self, id: NodeId, signal: Signal) -> anyhow::Result<()> {
        let child = self.child(id).as_ref().with_context(|| format!("{id} does not run"))?;
        Ok(kill_process(Pid::from_child(child), signal)?)
    }

    pub fn proxy(&self) -> anyhow::Result<&Proxy> {
        self.proxy.as_ref().context("this cluster has no proxy between its nodes")
    }

    pub fn doors(&self) -> anyhow::Result<&Doors> {
        self.doors.as_ref().context("this cluster has no doors that can be cut")
    }

    /// Nodes go on being dialled where the plan says, and there a proxy will listen; they themselves
    /// move to other ports. Both, in their order.
    fn moved(
        &self,
        key: &str,
        listen: impl Fn(&NodeConfig) -> SocketAddr,
    ) -> anyhow::Result<(Vec<SocketAddr>, Vec<SocketAddr>)> {
        let (mut doors, mut real) = (Vec::new(), Vec::new());
        for (id, _) in &self.nodes {
            let file = self.node_dir(*id).join("node.toml");
            let door = listen(&NodeConfig::load(&file)?);
            let free = SocketAddr::from(([127, 0, 0, 1], Stretch::of_this_process()?.take()?));
            let text = std::fs::read_to_string(&file)?;
            let moved = text.replace(&format!("{key} = \"{door}\""), &format!("{key} = \"{free}\""));
            anyhow::ensure!(moved != text, "{} names no {key}", file.display());
            std::fs::write(&file, moved)?;
            doors.push(door);
            real.push(free);
        }
        Ok((doors, real))
    }

    /// The address of a node's HTTP door.
    pub fn http(&self, id: NodeId) -> anyhow::Result<SocketAddr> {
        let config = NodeConfig::load(&self.node_dir(id).join("node.toml"))?;
        config.http_listen.context("HTTP is on by default")
    }

    /// The folder of the whole run stays behind, to understand a failure by.
    pub fn keep(&mut self) -> PathBuf {
        self.dir.disable_cleanup(true);
        self.dir.path().to_owned()
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    fn child(&mut self, id: NodeId) -> &mut Option<Child> {
        &mut self.nodes.iter_mut().find(|(node, _)| *node == id).expect("a node of this cluster").1
    }

    /// The operator's client, to any node; past the doors, where there are some.
    pub async fn client(&self) -> anyhow::Result<Client> {
        let mut options = Options::from_context(self.admin())?;
        options.connect_timeout = READY_MAX;
        if let Some(doors) = &self.doors {
            options.endpoints = doors.real().iter().map(SocketAddr::to_string).collect();
        }
        Ok(Client::connect(options).await?)
    }

    /// A client that talks to one node only, and is answered from what that node knows.
    pub async fn client_of(&self, id: NodeId) -> anyhow::Result<Client> {
        let mut options = Options::from_context(self.admin())?;
        let at = self.nodes.iter().position(|(node, _)| *node == id).context("no such node")?;
        options.endpoints = vec![options.endpoints[at].clone()];
        options.stale = true;
        Ok(Client::connect(options).await?)
    }

    /// Options with a certificate of the agent's own.
    pub fn agent_options(&self, agent_id: &AgentId) -> anyhow::Result<Options> {
        self.options_of(Principal::Agent(agent_id.clone()))
    }

    /// Options of a host, which acts for every agent `NAME:…`.
    pub fn host_options(&self, name: &str) -> anyhow::Result<Options> {
        self.options_of(Principal::Host(name.parse()?))
    }

    fn options_of(&self, principal: Principal) -> anyhow::Result<Options> {
        let mut options = Options::from_context(self.admin())?;
        let read = |name: &str| std::fs::read_to_string(self.admin().join(name));
        let authority = Authority::from_pem(&read("client-ca.pem")?, &read("client-ca.key")?)?;
        let identity = Identity { cluster: options.cluster.clone(), principal };
        let issued = authority.issue(&identity, Duration::from_secs(24 * 3600))?;
        options.credentials.cert_pem = issued.cert_pem;
        options.credentials.key_pem = issued.key_pem;
        Ok(options)
    }

    pub async fn view(&self) -> anyhow::Result<ClusterView> {
        let client = self.client().await?;
        match client.request(Request::Cluster, Duration::from_secs(5)).await? {
            Answer::Cluster(view) => Ok(*view),
            _ => bail!("something else than a cluster view came back"),
        }
    }

    /// The product's own command line, as the operator, on a host whose calendar is off by `offset`
    /// where one is given. Its answer as JSON, or what it says of its failure.
    pub fn cli(
        &self,
        args: &[&str],
        offset: Option<&str>,
    ) -> anyhow::Result<Result<serde_json::Value, String>> {
        let home = self.dir.path().join("home");
        if !home.join("contexts").exists() {
            let mut add = Command::new(&self.binary);
            add.args(["context", "add", "test", "--from"]).arg(self.admin());
            run(add.env("AGENT_REACH_HOME", &home))?;
        }
        let mut command = Command::new(&self.binary);
        command.args(args).args(["-o", "json"]).env("AGENT_REACH_HOME", &home);
        if let Some(offset) = offset {
            command
                .env("LD_PRELOAD", crate::nemesis::faketime()?)
                .env("FAKETIME", offset)
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        }
        let output = command.output()?;
        Ok(match output.status.success() {
            true => Ok(serde_json::from_slice(&output.stdout)?),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        })
    }

    /// `agents run` as a process of its own, on a host of its own whose calendar is off by `offset`.
    pub fn agent_process(&self, agent_id: &str, offset: &str) -> anyhow::Result<Child> {
        let folder = self.dir.path().join(format!("agent-{agent_id}{offset}"));
        let home = folder.join("home");
        let (admin, out) = (self.admin(), folder.join("handed-over"));
        let (admin, out) = (admin.to_str().context("a plain path")?, out.to_str().context("a plain path")?);
        for args in [
            &["certs", "issue", "--agent", agent_id, "--admin", admin, "--out", out][..],
            &["context", "add", "agent", "--from", out],
        ] {
            run(Command::new(&self.binary).args(args).env("AGENT_REACH_HOME", &home))?;
        }
        let child = Command::new(&self.binary)
            .args(["agents", "run", "--id", agent_id, "--capability", "text.echo", "--", "cat"])
            .env("AGENT_REACH_HOME", &home)
            .env("LD_PRELOAD", crate::nemesis::faketime()?)
            .env("FAKETIME", offset)
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .stdout(Stdio::null())
            .spawn()?;
        Ok(child)
    }

    /// Waits until a node leads, and names it.
    pub async fn leader(&self) -> anyhow::Result<NodeId> {
        let deadline = Instant::now() + READY_MAX;
        while Instant::now() < deadline {
            if let Ok(view) = self.view().await
                && let Some(leader) = view.leader
                && view.nodes.iter().any(|node| node.node_id == leader && node.report.is_some())
            {
                return Ok(leader);
            }
            tokio::time::sleep(POLL).await;
        }
        bail!("no leader\n{}", self.logs())
    }

    /// Waits until a linearizable read succeeds.
    pub async fn wait_until_serving(&self) -> anyhow::Result<()> {
        let client = self.client().await?;
        let deadline = Instant::now() + READY_MAX;
        loop {
            match client.request(Request::Rules, Duration::from_secs(5)).await {
                Ok(_) => return Ok(()),
                Err(error) if Instant::now() > deadline => bail!("not serving: {error}\n{}", self.logs()),
                Err(_) => tokio::time::sleep(POLL).await,
            }
        }
    }

    /// Waits until every node stands at the same position, and compares their state hashes.
    pub async fn converged(&self) -> anyhow::Result<u64> {
        let deadline = Instant::now() + READY_MAX;
        loop {
            let view = self.view().await?;
            let reports: Vec<_> = view.nodes.iter().filter_map(|node| node.report.clone()).collect();
            let all = reports.len() == self.nodes.len();
            if all && reports.iter().all(|report| report.applied == reports[0].applied) {
                anyhow::ensure!(
                    reports.iter().all(|report| report.state_hash == reports[0].state_hash),
                    "replicas differ at {}: {:?}",
                    reports[0].applied,
                    reports.iter().map(|report| report.state_hash).collect::<Vec<_>>()
                );
                return Ok(reports[0].applied);
            }
            anyhow::ensure!(Instant::now() < deadline, "replicas do not meet: {reports:?}\n{}", self.logs());
            tokio::time::sleep(POLL).await;
        }
    }

    /// The last lines of every node's log: what a failed run is understood by.
    pub fn logs(&self) -> String {
        let tail = |id: &NodeId| {
            let text = std::fs::read_to_string(self.node_dir(*id).join("node.log")).unwrap_or_default();
            let lines: Vec<&str> = text.lines().rev().take(15).collect();
            format!("--- {id}\n{}", lines.into_iter().rev().collect::<Vec<_>>().join("\n"))
        };
        self.nodes.iter().map(|(id, _)| tail(id)).collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for (_, child) in &mut self.nodes {
            if let Some(mut child) = child.take() {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// The node's binary of this very build.
pub fn binary() -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let profile_dir = test.ancestors().find(|dir| dir.join("agent-reach").is_file());
    let dir =
        profile_dir.context("the binary agent-reach is not built: run `cargo build -p agent-reach` first")?;
    Ok(dir.join("agent-reach"))
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output()?;
    anyhow::ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// A folder under the cluster's own, for an agent's inbox.
pub fn inbox_dir(cluster: &Cluster, agent_id: &str) -> PathBuf {
    let dir: &Path = cluster.dir.path();
    dir.join("inboxes").join(agent_id)
}
