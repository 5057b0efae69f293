//! A running node: what its tasks share, and the list of the tasks.

mod barrier;
mod certificates;
mod connection;
mod consensus;
mod delivery;
mod events;
mod health;
mod heartbeat;
mod identity;
mod ingress;
mod leader;
mod peers;
mod problems;
mod push;
mod read;
mod requests;
mod skew;
mod waiters;

use std::{
    collections::BTreeMap, net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration,
};

use reach_config::NodeConfig;
use reach_protocol::{
    Limits, Name, NodeId, RulesRecord,
    frame::{Answer, MessageView, NodeReport},
};
use reach_raft::{Member, Replica};
use reach_storage::{Space, rocks};
use reach_transport::{Credentials, Door, Endpoint};
use tokio::sync::SetOnce;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    consensus::Consensus,
    identity::{Acquaintances, Identity},
};
use crate::{clock::Clock, exit::Exit, http, metrics::Metrics, patience::when_free, telemetry};

pub use requests::WAIT_MAX;
pub use skew::{SKEW_MS, Skewed, Who, is_skewed};

/// What the tasks of one node share. Cheap to clone as an `Arc`; every part locks for itself.
#[derive(Debug)]
pub struct Shared {
    pub node_id: NodeId,
    pub cluster: Name,
    pub data_dir: PathBuf,
    pub incarnation: String,
    pub initial_members: BTreeMap<NodeId, Member>,
    pub clock: Arc<Clock>,
    pub certificates: Arc<certificates::Certificates>,
    pub replica: Replica,
    pub leader: leader::Handle,
    pub barrier: barrier::Handle,
    pub peers: peers::Peers,
    pub delivery: delivery::Handle,
    pub waiters: waiters::Waiters,
    pub bells: events::Bells,
    pub windows: push::Windows,
    pub heartbeats: heartbeat::Heartbeats,
    pub space: Space,
    pub metrics: Metrics,
    pub http_addr: Option<SocketAddr>,
    /// Who told this node that its data is not what it had as a member.
    pub disowned: SetOnce<NodeId>,
    pub stop: CancellationToken,
    pub tracker: TaskTracker,
}

impl Shared {
    pub fn rules(&self) -> Arc<RulesRecord> {
        self.replica.tables().live().rules.clone()
    }

    pub fn limits(&self) -> Limits {
        self.rules().rules.limits.clone()
    }

    /// The members as they are replicated; before the cluster is initialised, as the file plans them.
    pub fn members(&self) -> BTreeMap<NodeId, Member> {
        match self.replica.members() {
            members if members.is_empty() => self.initial_members.clone(),
            members => members,
        }
    }

    /// What this node says of itself, its offset too where a leader can tell it.
    pub async fn full_report(&self) -> NodeReport {
        if self.clock.offset_ms().is_none() {
            self.learn_calendar().await;
        }
        self.report()
    }

    /// The same, as far as it is known now.
    pub fn report(&self) -> NodeReport {
        let leadership = *self.replica.leadership().borrow();
        let applied = *self.replica.applied().borrow();
        NodeReport {
            pid: std::process::id(),
            role: leadership.role,
            term: leadership.term,
            applied: applied.index,
            state_hash: applied.state_hash,
            offset_ms: self.clock.offset_ms(),
            sessions: self.delivery.sessions(),
            http_addr: self.http_addr.map(|addr| addr.to_string()),
            ending: self.certificates.ending(),
            free_bytes: self.space.free_bytes().ok(),
            space_is_low: self.space_is_low(),
        }
    }
}

/// The log and the tables on this node's disk.
type Store = reach_storage::Opened<rocks::RocksLog, rocks::RocksTables>;

/// A node that runs until it is told to stop, or a fault ends it.
#[derive(Debug)]
pub struct Node {
    shared: Arc<Shared>,
    store: Store,
    client_endpoint: Endpoint,
    peer_endpoint: Endpoint,
    consensus: Consensus,
}

/// How long a shutdown may take before it is cut short.
const SHUTDOWN_MAX: Duration = Duration::from_secs(10);

impl Node {
    /// Opens the folder, checks whose it is, binds both doors and starts the tasks.
    pub async fn start(config: NodeConfig) -> Result<Self, Exit> {
        Self::start_with(config, reach_raft::RING_BYTES).await
    }

    /// As `start`, with so many bytes for recent facts: with none, every cursor is always behind.
    pub async fn start_with(config: NodeConfig, fact_bytes: usize) -> Result<Self, Exit> {
        let peer_tls = credentials(&config.peer_tls)?;
        let client_tls = credentials(&config.client_tls)?;
        let (cluster, node_id) = (config.cluster.clone(), config.node_id);

        let store = open_store(&config).await?;
        let cluster_id = identity::fingerprint(&peer_tls.ca_pem);
        let identity = Identity::of_folder(&config, cluster_id, &*store.log, &*store.tables).await?;

        let clock = Arc::new(Clock::default());
        let certificates = certificates::Certificates::new(clock.clone(), store.tables.clone());
        let consensus = Consensus::new()?;
        let at = config.peer_listen;
        let peer_endpoint = consensus.bind(at, cluster.clone(), peer_tls, certificates.clone()).await?;
        let bind = || {
            let options = reach_transport::Options::client();
            let (at, cluster) = (config.client_listen, cluster.clone());
            Endpoint::server_under(at, Door::Client, cluster, &client_tls, options, certificates.clone())
        };
        let client_endpoint = when_free(bind, is_taken).await.map_err(Exit::transport)?;

        let http_listener = match config.http_listen {
            Some(at) => Some(http::bind(at).await?),
            None => None,
        };

        let initial_members: BTreeMap<NodeId, Member> = config
            .nodes
            .iter()
            .map(|(id, node)| {
                (*id, Member { peer_addr: node.peer.to_string(), client_addr: node.client.to_string() })
            })
            .collect();

        let stop = CancellationToken::new();
        let tracker = TaskTracker::new();
        let peers = peers::Peers::new(
            node_id,
            cluster.clone(),
            peer_endpoint.clone(),
            certificates.clone(),
            Acquaintances::load(store.log.clone())?,
            &initial_members,
        );
        let snapshots = config.data_dir.join("snapshots");
        let raft_options = reach_raft::Options { fact_bytes, ..reach_raft::Options::new(snapshots) };
        let replica = consensus.replica(raft_options, node_id, &store, peers.clone()).await?;
        clock.applied(replica.applied().borrow().stamp);

        let (leader, leader_inbox) = leader::Handle::new();
        let (barrier, barrier_queue) = barrier::Handle::new();
        let (delivery, delivery_inbox) = delivery::Handle::new();
        let shared = Arc::new(Shared {
            node_id,
            cluster,
            data_dir: config.data_dir.clone(),
            incarnation: identity.incarnation,
            initial_members,
            clock,
            certificates,
            replica,
            leader,
            barrier,
            peers,
            delivery,
            waiters: waiters::Waiters::default(),
            bells: events::Bells::default(),
            windows: push::Windows::default(),
            heartbeats: heartbeat::Heartbeats::default(),
            space: Space::new(&config.data_dir, u64::from(config.storage.low_water_mib) << 20),
            metrics: Metrics::default(),
            http_addr: config.http_listen,
            disowned: SetOnce::new(),
            stop,
            tracker,
        });

        shared.clone().spawn(leader::run(shared.clone(), leader_inbox));
        shared.clone().spawn(barrier::run(shared.clone(), barrier_queue));
        shared.clone().spawn(delivery::run(shared.clone(), delivery_inbox));
        shared.clone().spawn(waiters::run(shared.clone()));
        shared.clone().spawn(events::run(shared.clone()));
        shared.clone().spawn(events::retain(shared.clone()));
        shared.clone().spawn(heartbeat::run(shared.clone()));
        shared.clone().spawn(skew::run(shared.clone()));
        shared.clone().spawn(health::run(shared.clone()));
        consensus.spawn(&shared, peers::run(shared.clone(), peer_endpoint.clone()));
        let doors = vec![
            certificates::Files::new(config.peer_tls, peer_endpoint.clone()),
            certificates::Files::new(config.client_tls, client_endpoint.clone()),
        ];
        shared.clone().spawn(certificates::run(shared.clone(), doors));
        shared.clone().spawn(connection::run(shared.clone(), client_endpoint.clone()));
        if let Some(listener) = http_listener {
            shared.clone().spawn(http::run(shared.clone(), listener));
        }

        tracing::info!(
            node = %node_id,
            cluster = %shared.cluster,
            client_addr = %client_endpoint.local_addr(),
            peer_addr = %peer_endpoint.local_addr(),
            http_addr = shared.http_addr.map(tracing::field::display),
            "node started"
        );
        Ok(Self { shared, store, client_endpoint, peer_endpoint, consensus })
    }

    /// Runs until `until` is done or a fault ends the node.
    pub async fn run(self, until: impl Future<Output = ()>) -> Result<(), Exit> {
        let fault = tokio::select! {
            () = until => None,
            reason = self.shared.replica.fatal() => Some(Exit::fatal(reason)),
            by = self.shared.disowned.wait() => Some(identity::lost_data(&self.shared.data_dir, self.shared.node_id, *by)),
        };
        self.stop().await;
        fault.map_or(Ok(()), Err)
    }

    async fn stop(self) {
        let Self { shared, store, client_endpoint, peer_endpoint, consensus } = self;
        shared.delivery.goodbye();
        shared.stop.cancel();
        shared.tracker.close();
        if tokio::time::timeout(SHUTDOWN_MAX, shared.tracker.wait()).await.is_err() {
            tracing::warn!("some tasks did not stop in time");
        }
        client_endpoint.close().await;
        shared.replica.shutdown().await;
        peer_endpoint.close().await;
        drop(consensus);
        drop(shared);
        // Whoever waits for the folder finds the ports free.
        drop((client_endpoint, peer_endpoint));
        // The databases go before the process does: RocksDB's threads must not outlive main.
        drop(store);
    }
}

impl Shared {
    /// Runs a task until it ends or the node stops.
    pub fn spawn(self: Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_on(&tokio::runtime::Handle::current(), task);
    }

    fn spawn_on(&self, runtime: &tokio::runtime::Handle, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.stop.clone();
        let until_stopped = async move {
            tokio::select! {
                () = stop.cancelled() => {}
                () = task => {}
            }
        };
        self.tracker.spawn_on(until_stopped, runtime);
    }
}

/// `agent-reach node`: the whole life of the process.
pub fn process(args: &crate::cli::args::Node) -> ExitCode {
    match process_or_exit(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(exit) => crate::exit::now(&exit),
    }
}

fn process_or_exit(args: &crate::cli::args::Node) -> Result<(), Exit> {
    let config = NodeConfig::load(&args.config).map_err(|error| Exit::new(crate::exit::USAGE, error))?;
    if args.check {
        credentials(&config.peer_tls)?;
        credentials(&config.client_tls)?;
        println!("{} is in order", config.file.display());
        return Ok(());
    }
    telemetry::start(&config.log);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Exit::new(crate::exit::RAFT, error))?;
    let with_stdin = args.with_stdin;
    let ended = runtime.block_on(async {
        let node = Node::start(config).await?;
        node.run(async {
            tokio::select! {
                () = crate::dev::interrupted() => {}
                () = stdin_ends(), if with_stdin => {}
            }
        })
        .await
    });
    // A read of standard input can't be cancelled; don't wait for it.
    runtime.shutdown_background();
    ended
}

/// Whoever started us holds the other end, and its end is ours.
async fn stdin_ends() {
    let mut stdin = tokio::io::stdin();
    let _ = tokio::io::copy(&mut stdin, &mut tokio::io::sink()).await;
}

/// A message's view as an answer.
fn message_answer(view: MessageView) -> Answer {
    Answer::Message(Box::new(view))
}

fn credentials(files: &reach_config::TlsFiles) -> Result<Credentials, Exit> {
    Credentials::load(&files.ca, &files.cert, &files.key).map_err(Exit::transport)
}

fn is_taken(error: &reach_transport::Error) -> bool {
    matches!(error, reach_transport::Error::Bind { .. })
}

/// A folder that is in use may be free in a moment.
async fn open_store(config: &NodeConfig) -> Result<Store, Exit> {
    let options = || rocks::Options {
        cache_bytes: (config.storage.cache_mib as usize) << 20,
        ballast_bytes: u64::from(config.storage.ballast_mib) << 20,
        on_fatal: Arc::new(|error| crate::exit::now(&Exit::storage_fatal(&error))),
        ..rocks::Options::default()
    };
    let is_in_use = |error: &reach_storage::Error| matches!(error, reach_storage::Error::InUse { .. });
    let opened = when_free(|| rocks::open(&config.data_dir, options()), is_in_use).await;
    opened.map_err(Exit::storage)
}
