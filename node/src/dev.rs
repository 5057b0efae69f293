//! `agent-reach dev`: a whole cluster on this machine, each node a process of its own, for trying
//! things out and breaking them.

use std::{
    fs::File,
    net::UdpSocket,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use crate::{exit, patience::when_free};
use anyhow::{Context as _, bail};
use reach_client::Client;
use reach_config::{
    context::Contexts,
    layout::{ADMIN_DIR, CLIENT_CA, CLIENT_CA_KEY, Layout, NODE_FILE},
};
use reach_protocol::{
    Code, Name, NodeId,
    frame::{Answer, ClusterView, NodeView, Request, Role},
};
use tokio::{
    process::{Child, Command},
    time::Instant,
};

/// The name of the cluster and of the context that `dev` makes.
pub const DEV: &str = "dev";
/// A node that ended is started again after this long.
const RESTART_AFTER: Duration = Duration::from_secs(3);
/// Exit codes that say that starting again won't help.
const NOT_RESTARTED: [i32; 3] = [exit::USAGE as i32, exit::IDENTITY as i32, exit::DISK as i32];
/// How long the nodes may take to serve.
const READY_MAX: Duration = Duration::from_secs(30);
/// A new cluster whose ports somebody else took, between the choice and its start, is made so often.
const CHOICES_MAX: usize = 5;
/// How long a node may take to end by itself.
const STOP_MAX: Duration = Duration::from_secs(8);
/// How often the roles are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Kept back on the disk by each node: they share this machine's with everything else on it.
const BALLAST_MIB: u32 = 16;

#[derive(Clone, Debug)]
pub struct Options {
    /// Where the cluster's folders are; continued when they are there.
    pub dir: PathBuf,
    pub nodes: usize,
    /// The first port of a new cluster; where ports are taken, it has further ones.
    pub port: u16,
    /// Begin anew: what is in the folder is deleted.
    pub fresh: bool,
    pub restart: bool,
}

/// Runs until it is interrupted.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let _lock = lock(&options.dir).await?;
    if options.fresh {
        remove_cluster(&options.dir)?;
    }
    let is_new = !options.dir.join(ADMIN_DIR).exists();
    let contexts = Contexts::of_this_user()?;
    may_take_context(&contexts, &options.dir)?;
    if is_new {
        make_cluster(&options)?;
    }
    let what = if is_new { "a new cluster" } else { "the cluster" };
    println!("{what} in {}", options.dir.display());
    let started = Instant::now();
    let mut choices = 1;
    let (mut nodes, client, view) = loop {
        let mut nodes = Nodes::start(&options, is_new)?;
        let ready = tokio::select! {
            ready = bring_up(&mut nodes) => Some(ready),
            () = interrupted() => None,
        };
        match ready {
            Some(Ok((client, view))) => break (nodes, client, view),
            Some(Err(error)) if is_new && nodes.lost_a_port && choices < CHOICES_MAX => {
                println!("{error}; the cluster is made again, on other ports");
                nodes.stop().await;
                choices += 1;
                remove_cluster(&options.dir)?;
                make_cluster(&options)?;
            }
            Some(Err(error)) => {
                nodes.stop().await;
                return Err(error);
            }
            None => {
                nodes.stop().await;
                return Ok(());
            }
        }
    };
    make_context(&contexts, &options.dir)?;
    nodes.show(&view);
    println!("ready after {:.1} s. In another terminal:", started.elapsed().as_secs_f64());
    println!("  agent-reach agents run --capability text.echo -- cat");
    println!("  agent-reach send --capability text.echo --payload '\"hello\"'");
    if let Some(leader) = view.leader.and_then(|leader| nodes.pid(leader)) {
        println!("to see a failover: kill -9 {leader}");
    }
    println!("Ctrl-C stops the nodes; the next `agent-reach dev` goes on where they were.");
    let watched = nodes.watch(client, view).await;
    nodes.stop().await;
    watched
}

/// Two of them in one folder would fight over the nodes.
async fn lock(dir: &Path) -> anyhow::Result<File> {
    reach_config::context::make_private_dir(dir)?;
    let file =
        File::create(dir.join("lock")).with_context(|| format!("{} can't be written", dir.display()))?;
    if when_free(|| file.try_lock(), |_| true).await.is_err() {
        bail!(
            "another `agent-reach dev` is running in {}: stop it, or give another folder with --dir",
            dir.display()
        );
    }
    Ok(file)
}

/// Deletes the folders that `dev` makes and nothing else.
fn remove_cluster(dir: &Path) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let path = entry?.path();
        let is_ours =
            path.join(NODE_FILE).is_file() || path.file_name().is_some_and(|name| name == ADMIN_DIR);
        if path.is_dir() && is_ours {
            std::fs::remove_dir_all(&path).with_context(|| format!("{} can't be deleted", path.display()))?;
        }
    }
    Ok(())
}

fn make_cluster(options: &Options) -> anyhow::Result<()> {
    let (ports, taken) = reach_config::ports::free(options.port, options.nodes)
        .context("no free ports: give lower ones with --port")?;
    if !taken.is_empty() {
        let words: Vec<String> = taken.iter().map(u16::to_string).collect();
        println!("taken by somebody else, so not used: port {}", words.join(", "));
    }
    // HTTP has the port before the one that is named, for clients; peers have the next.
    let hosts: Vec<String> =
        ports.iter().enumerate().map(|(i, port)| format!("n{}=127.0.0.1:{}", i + 1, port + 1)).collect();
    let mut layout = Layout::new(Name::parse(DEV)?, &hosts)?;
    layout.storage.ballast_mib = BALLAST_MIB;
    crate::cli::cluster_new::write(&layout, &options.dir)?;
    Ok(())
}

/// Makes the context `dev` and makes it current, so that the next command needs no option. It holds
/// the client CA's key: an agent's certificate is issued on first use.
fn make_context(contexts: &Contexts, dir: &Path) -> anyhow::Result<()> {
    let admin = dir.join(ADMIN_DIR);
    let folder = contexts.dir(&Name::parse(DEV)?);
    if folder.exists() && !is_context_of(&folder, dir) {
        println!("the context {DEV} pointed at another cluster; from now on it is this one's");
        std::fs::remove_dir_all(&folder)
            .with_context(|| format!("{} can't be replaced", folder.display()))?;
    }
    if folder.exists() {
        contexts.make_current(DEV)?;
        return Ok(());
    }
    let context = contexts.add_from(DEV, &admin)?;
    let key = std::fs::read(admin.join(CLIENT_CA_KEY))?;
    reach_config::context::write_private(&context.dir.join(CLIENT_CA_KEY), &key)?;
    contexts.make_current(DEV)?;
    Ok(())
}

/// An agent's certificate in it is good as long as the CA is the same.
fn is_context_of(folder: &Path, dir: &Path) -> bool {
    let ca = |folder: &Path| std::fs::read(folder.join(CLIENT_CA)).ok();
    ca(folder).is_some_and(|theirs| ca(&dir.join(ADMIN_DIR)) == Some(theirs))
}

/// Taking the context of a cluster that runs would cut its user off from it.
fn may_take_context(contexts: &Contexts, dir: &Path) -> anyhow::Result<()> {
    let folder = contexts.dir(&Name::parse(DEV)?);
    if !folder.exists() || is_context_of(&folder, dir) {
        return Ok(());
    }
    for endpoint in &contexts.load(DEV)?.endpoints {
        if UdpSocket::bind((endpoint.host(), endpoint.port())).is_err() {
            bail!(
                "the context {DEV} belongs to another cluster, and something runs at its address {endpoint}: stop that \
                 first, or give this one contexts of its own with the environment variable AGENT_REACH_HOME"
            );
        }
    }
    Ok(())
}

async fn bring_up(nodes: &mut Nodes) -> anyhow::Result<(Client, ClusterView)> {
    let options = reach_client::Options::from_context(nodes.dir.join(ADMIN_DIR))?;
    let deadline = Instant::now() + READY_MAX;
    let mut last_problem = "no node answered".to_string();
    while Instant::now() < deadline {
        nodes.must_all_run()?;
        match tokio::time::timeout(Duration::from_secs(3), try_once(&options)).await {
            Ok(Ok(ready)) => return Ok(ready),
            Ok(Err(error)) => last_problem = error.to_string(),
            Err(_) => {}
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    bail!(
        "the nodes did not get ready in {} s: {last_problem}. Their logs: {}",
        READY_MAX.as_secs(),
        nodes.logs()
    )
}

async fn try_once(options: &reach_client::Options) -> anyhow::Result<(Client, ClusterView)> {
    let timeout = Duration::from_secs(2);
    let client = Client::connect(options.clone()).await?;
    match client.request(Request::Initialise, timeout).await {
        Ok(_) => {}
        Err(error) if error.code() == Code::IllegalTransition => {}
        Err(error) => return Err(error.into()),
    }
    // A linearizable read: it succeeds when somebody leads and a majority follows.
    client.request(Request::Rules, timeout).await?;
    match client.request(Request::Cluster, timeout).await? {
        Answer::Cluster(view) if view.leader.is_some() && view.nodes.iter().all(takes_part) => {
            Ok((client, *view))
        }
        _ => bail!("not every node takes part yet"),
    }
}

/// A new node learns the membership before it votes.
fn takes_part(node: &NodeView) -> bool {
    node.report.as_ref().is_some_and(|report| matches!(report.role, Role::Leader | Role::Follower))
}

struct Nodes {
    dir: PathBuf,
    restart: bool,
    is_new: bool,
    started: Instant,
    /// One of them could not start, since a port was taken.
    lost_a_port: bool,
    children: Vec<Node>,
}

struct Node {
    id: NodeId,
    child: Option<Child>,
    restart_at: Option<Instant>,
}

impl Nodes {
    fn start(options: &Options, is_new: bool) -> anyhow::Result<Self> {
        let mut ids = Vec::new();
        for entry in std::fs::read_dir(&options.dir)? {
            let path = entry?.path();
            let id =
                path.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse::<NodeId>().ok());
            ids.extend(id.filter(|_| path.join(NODE_FILE).is_file()));
        }
        ids.sort();
        let mut nodes = Self {
            dir: options.dir.clone(),
            restart: options.restart,
            is_new,
            started: Instant::now(),
            lost_a_port: false,
            children: Vec::new(),
        };
        for id in ids {
            let child = Some(nodes.spawn(id)?);
            nodes.children.push(Node { id, child, restart_at: None });
        }
        Ok(nodes)
    }

    /// The node reads its standard input and ends with it: a `dev` that is killed leaves none behind.
    fn spawn(&self, id: NodeId) -> anyhow::Result<Child> {
        let folder = self.dir.join(id.to_string());
        let log = File::options().create(true).append(true).open(self.log(id))?;
        Command::new(std::env::current_exe()?)
            .args(["node", "--with-stdin", "--config"])
            .arg(folder.join(NODE_FILE))
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| format!("{id} can't be started"))
    }

    fn log(&self, id: NodeId) -> PathBuf {
        self.dir.join(id.to_string()).join("node.log")
    }

    fn logs(&self) -> String {
        let logs: Vec<String> =
            self.children.iter().map(|node| self.log(node.id).display().to_string()).collect();
        logs.join(", ")
    }

    fn pid(&self, id: NodeId) -> Option<u32> {
        self.children.iter().find(|node| node.id == id)?.child.as_ref()?.id()
    }

    fn must_all_run(&mut self) -> anyhow::Result<()> {
        for i in 0..self.children.len() {
            let id = self.children[i].id;
            let ended = match self.children[i].child.as_mut() {
                Some(child) => child.try_wait()?,
                None => None,
            };
            let Some(status) = ended else { continue };
            let is_in_use = |code| [exit::IDENTITY, exit::TRANSPORT].contains(&code);
            let code = status.code().and_then(|code| u8::try_from(code).ok());
            // The nodes of a `dev` that was killed may still be ending, and have the folders and the ports.
            if code.is_some_and(is_in_use) && !self.is_new && self.started.elapsed() < STOP_MAX {
                self.children[i].child = Some(self.spawn(id)?);
                continue;
            }
            self.lost_a_port = code == Some(exit::TRANSPORT);
            let way_out = match self.lost_a_port && !self.is_new {
                true => "; `agent-reach dev --fresh` deletes the cluster and begins anew, on free ports",
                false => "",
            };
            bail!("{id} ended at once ({status}): {}{way_out}", last_line(&self.log(id)));
        }
        Ok(())
    }

    fn show(&self, view: &ClusterView) {
        for node in &view.nodes {
            let role = match node.report.as_ref().map(|report| report.role) {
                Some(Role::Leader) => "LEADER",
                Some(role) => role.as_str(),
                None => "not answering",
            };
            let http = node.report.as_ref().and_then(|report| report.http_addr.as_deref()).unwrap_or("-");
            let pid = self.pid(node.node_id).map_or("-".to_string(), |pid| pid.to_string());
            println!(
                "{} pid {pid} · HTTP {http} · clients {} · peers {} · {role}",
                node.node_id, node.client_addr, node.peer_addr
            );
        }
    }

    /// Restarts what ends and tells who leads, until interrupted.
    async fn watch(&mut self, client: Client, view: ClusterView) -> anyhow::Result<()> {
        let (leaders, mut led_by) = tokio::sync::watch::channel((view.leader, view.term));
        let asking = tokio::spawn(follow_leader(client, leaders));
        let mut look = tokio::time::interval(LOOK_EVERY);
        let interrupted = interrupted();
        tokio::pin!(interrupted);
        loop {
            tokio::select! {
                () = &mut interrupted => break,
                Ok(()) = led_by.changed() => {
                    if let (Some(id), term) = *led_by.borrow_and_update() {
                        let pid = self.pid(id).map_or("-".to_string(), |pid| pid.to_string());
                        println!("{id} pid {pid} · LEADER (term {term})");
                    }
                }
                _ = look.tick() => self.look_after_children()?,
            }
        }
        asking.abort();
        Ok(())
    }

    fn look_after_children(&mut self) -> anyhow::Result<()> {
        for i in 0..self.children.len() {
            let id = self.children[i].id;
            if let Some(child) = self.children[i].child.as_mut()
                && let Some(status) = child.try_wait()?
            {
                self.children[i].child = None;
                let is_for_a_person = status.code().is_some_and(|code| NOT_RESTARTED.contains(&code));
                if is_for_a_person {
                    println!("{id} ended ({status}) and stays down: {}", last_line(&self.log(id)));
                } else if self.restart {
                    println!("{id} ended ({status}); it is started again in {} s", RESTART_AFTER.as_secs());
                    self.children[i].restart_at = Some(Instant::now() + RESTART_AFTER);
                } else {
                    println!("{id} ended ({status}); --no-restart leaves it at that");
                }
            }
            if self.children[i].restart_at.is_some_and(|at| Instant::now() >= at) {
                let child = self.spawn(id)?;
                println!("{id} pid {} · started again", child.id().unwrap_or_default());
                self.children[i] = Node { id, child: Some(child), restart_at: None };
            }
        }
        Ok(())
    }

    /// Closes their standard input, which ends them in order; kills what does not end.
    async fn stop(&mut self) {
        for node in &mut self.children {
            node.child.as_mut().map(|child| child.stdin.take());
        }
        let deadline = Instant::now() + STOP_MAX;
        for node in &mut self.children {
            let Some(child) = node.child.as_mut() else { continue };
            if tokio::time::timeout_at(deadline, child.wait()).await.is_err() {
                println!("{} does not end; it is killed", node.id);
                let _ = child.kill().await;
            }
        }
        println!("stopped");
    }
}

/// Asks any node who leads, and tells when that is somebody else.
async fn follow_leader(client: Client, leaders: tokio::sync::watch::Sender<(Option<NodeId>, u64)>) {
    loop {
        if let Ok(Answer::Cluster(view)) = client.request(Request::Cluster, Duration::from_secs(5)).await
            && view.leader.is_some()
        {
            leaders.send_if_modified(|known| {
                let changed = known.0 != view.leader;
                *known = (view.leader, view.term);
                changed
            });
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn last_line(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    text.lines().last().unwrap_or("its log is empty").to_string()
}

/// Ctrl-C, or the request to end that a supervisor sends.
pub async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).expect("signals can be listened for");
    let mut interrupt = signal(SignalKind::interrupt()).expect("signals can be listened for");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_on_this_machine_keeps_little_of_its_disk_back() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().to_path_buf();
        make_cluster(&Options { dir: dir.clone(), nodes: 3, port: 7480, fresh: false, restart: true })
            .unwrap();
        for node in ["n1", "n2", "n3"] {
            let config = reach_config::NodeConfig::load(&dir.join(node).join(NODE_FILE)).unwrap();
            assert_eq!(config.storage.ballast_mib, BALLAST_MIB);
        }
    }
}
