//! A group of replicas in this process, on disks that outlive them, over real connections on loopback
//! that can be cut.

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures_util::future::{BoxFuture, select_all};
use reach_protocol::{
    AgentId, Capability, Command, Entry, InstanceId, NodeId, Principal, Registration, Reply, Rules, Stamp,
    Tag, id::Name,
};
use reach_storage::{
    LogStore, Tables,
    memory::{self, MemoryDisk},
    rocks,
};
use reach_transport::{Authority, Connection, Credentials, Door, Duplex, Endpoint, Identity};
use tempfile::TempDir;
use tokio::{sync::mpsc, time::timeout};
use tokio_util::task::AbortOnDropHandle;

use crate::{AppliedAt, Dial, DialError, Leadership, Member, Options, ProposeError, RING_BYTES, Replica};

/// Far above what anything here takes, also on a busy machine.
const LIMIT: Duration = Duration::from_secs(90);

pub async fn within<T>(what: &str, work: impl Future<Output = T>) -> T {
    timeout(LIMIT, work).await.unwrap_or_else(|_| panic!("{what} took over {LIMIT:?}"))
}

pub struct Group {
    cluster: Name,
    authority: Authority,
    tune: fn(&mut Options),
    ring_bytes: usize,
    net: Arc<Net>,
    disks: BTreeMap<NodeId, Disk>,
    pub nodes: BTreeMap<NodeId, Node>,
}

pub struct Node {
    pub replica: Replica,
    /// Why the replica refused streams.
    refused: tokio::sync::Mutex<mpsc::Receiver<String>>,
    pub log: Arc<dyn LogStore>,
    endpoint: Endpoint,
    _dir: TempDir,
    _acceptor: AbortOnDropHandle<()>,
}

enum Disk {
    Memory(MemoryDisk),
    Rocks(TempDir),
}

impl Disk {
    async fn open(&self) -> (Arc<dyn LogStore>, Arc<dyn Tables>) {
        match self {
            Self::Memory(disk) => {
                let options = memory::Options { writer_thread: true, ..Default::default() };
                let opened = memory::open(disk, options).unwrap();
                (opened.log, opened.tables)
            }
            Self::Rocks(dir) => loop {
                let options = rocks::Options { ballast_bytes: 0, ..Default::default() };
                match rocks::open(dir.path(), options) {
                    Ok(opened) => return (opened.log, opened.tables),
                    // Tasks of the last replica on it are on their way out.
                    Err(reach_storage::Error::InUse { .. }) => tokio::task::yield_now().await,
                    Err(error) => panic!("{error}"),
                }
            },
        }
    }
}

/// Who is where, and who is cut off.
#[derive(Default)]
struct Net {
    state: Mutex<NetState>,
}

#[derive(Default)]
struct NetState {
    addrs: BTreeMap<NodeId, SocketAddr>,
    alone: BTreeSet<NodeId>,
    /// By the node that dialled and the one that was dialled.
    connections: BTreeMap<(NodeId, NodeId), Connection>,
    /// How often each node was dialled.
    dials: BTreeMap<NodeId, u64>,
}

struct Dialler {
    from: NodeId,
    cluster: Name,
    endpoint: Endpoint,
    net: Arc<Net>,
}

impl Net {
    fn place(&self, from: NodeId, to: NodeId) -> Result<(SocketAddr, Option<Connection>), DialError> {
        let mut state = self.state.lock().unwrap();
        *state.dials.entry(to).or_default() += 1;
        if state.alone.contains(&from) || state.alone.contains(&to) {
            return Err(DialError::new("cut off"));
        }
        let addr = state.addrs.get(&to).ok_or_else(|| DialError::new("down"))?;
        Ok((*addr, state.connections.get(&(from, to)).filter(|open| !open.is_closed()).cloned()))
    }

    fn cut(&self, node: NodeId) {
        let mut state = self.state.lock().unwrap();
        state.connections.retain(|(from, to), connection| {
            let touches = *from == node || *to == node;
            if touches {
                connection.close("cut off");
            }
            !touches
        });
    }
}

impl Dial for Dialler {
    fn dial(&self, to: NodeId, _member: &Member) -> BoxFuture<'static, Result<Duplex, DialError>> {
        let (from, cluster, endpoint, net) =
            (self.from, self.cluster.clone(), self.endpoint.clone(), self.net.clone());
        Box::pin(async move {
            let (addr, open) = net.place(from, to)?;
            let connection = match open {
                Some(open) => open,
                None => {
                    let made = endpoint.connect(addr, &cluster, Some(to)).await.map_err(DialError::new)?;
                    net.state.lock().unwrap().connections.insert((from, to), made.clone());
                    net.place(from, to)?;
                    made
                }
            };
            connection.open(1).await.map_err(DialError::new)
        })
    }
}

impl Group {
    /// Three replicas, not yet initialised.
    pub async fn new(tune: fn(&mut Options)) -> Self {
        Self::with_ring(tune, RING_BYTES).await
    }

    pub async fn with_ring(tune: fn(&mut Options), ring_bytes: usize) -> Self {
        let disks = (1..=3).map(|id| (NodeId(id), Disk::Memory(MemoryDisk::new(id)))).collect();
        Self::on(disks, tune, ring_bytes).await
    }

    pub async fn on_rocksdb(tune: fn(&mut Options)) -> Self {
        let disks = (1..=3).map(|id| (NodeId(id), Disk::Rocks(tempfile::tempdir().unwrap()))).collect();
        Self::on(disks, tune, RING_BYTES).await
    }

    async fn on(disks: BTreeMap<NodeId, Disk>, tune: fn(&mut Options), ring_bytes: usize) -> Self {
        let _ = tracing_subscriber::fmt()
            .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
            .with_test_writer()
            .try_init();
        let cluster = Name::parse("test").unwrap();
        let mut group = Self {
            authority: Authority::new(&cluster, "peer"),
            cluster,
            tune,
            ring_bytes,
            net: Arc::default(),
            disks,
            nodes: BTreeMap::new(),
        };
        for id in group.ids() {
            group.start(id).await;
        }
        group
    }

    /// The same, initialised, with rules.
    pub async fn ready(tune: fn(&mut Options)) -> Self {
        let group = Self::new(tune).await;
        group.initialise().await;
        group
    }

    pub async fn initialise(&self) {
        self.nodes[&NodeId(1)].replica.initialise(self.members()).await.unwrap();
        let init = Command::Init { cluster: self.cluster.clone(), rules: Box::new(Rules::default()) };
        assert_eq!(self.propose(vec![init]).await, [Reply::Done]);
    }

    pub fn ids(&self) -> Vec<NodeId> {
        self.disks.keys().copied().collect()
    }

    pub fn members(&self) -> BTreeMap<NodeId, Member> {
        let member =
            |id: &NodeId| Member { peer_addr: format!("peer-{id}"), client_addr: format!("client-{id}") };
        self.disks.keys().map(|id| (*id, member(id))).collect()
    }

    pub fn disk(&self, id: NodeId) -> &MemoryDisk {
        match &self.disks[&id] {
            Disk::Memory(disk) => disk,
            Disk::Rocks(_) => panic!("only memory disks have faults"),
        }
    }

    pub fn dials(&self, to: NodeId) -> u64 {
        self.net.state.lock().unwrap().dials.get(&to).copied().unwrap_or_default()
    }

    pub fn replica(&self, id: NodeId) -> &Replica {
        &self.nodes[&id].replica
    }

    /// Starts a node on its disk as that is.
    pub async fn start(&mut self, id: NodeId) {
        let identity = Identity::new(self.cluster.clone(), Principal::Node(id));
        let issued = self.authority.issue(&identity, Duration::from_secs(3_600)).unwrap();
        let credentials = Credentials {
            ca_pem: self.authority.cert_pem().to_owned(),
            cert_pem: issued.cert_pem,
            key_pem: issued.key_pem,
        };
        let endpoint = Endpoint::server(
            SocketAddr::from(([127, 0, 0, 1], 0)),
            Door::Peer,
            self.cluster.clone(),
            &credentials,
            reach_transport::Options::peer(),
        )
        .unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut options = Options::new(dir.path().join("snapshots"));
        (self.tune)(&mut options);
        let (log, tables) = within("opening a store", self.disks[&id].open()).await;
        let dial = Dialler {
            from: id,
            cluster: self.cluster.clone(),
            endpoint: endpoint.clone(),
            net: self.net.clone(),
        };
        let replica =
            Replica::start_with_ring(options, id, log.clone(), tables, Arc::new(dial), self.ring_bytes);
        let replica = replica.await.unwrap();
        let (refusals, refused) = mpsc::channel(64);
        let acceptor = tokio::spawn(accept(endpoint.clone(), replica.clone(), refusals));
        self.net.state.lock().unwrap().addrs.insert(id, endpoint.local_addr());
        let acceptor = AbortOnDropHandle::new(acceptor);
        let refused = tokio::sync::Mutex::new(refused);
        self.nodes.insert(id, Node { replica, refused, log, endpoint, _dir: dir, _acceptor: acceptor });
    }

    /// Takes a node away as a crash would: what its disk had not synced may be gone.
    pub async fn crash(&mut self, id: NodeId) {
        let node = self.nodes.remove(&id).unwrap();
        if let Disk::Memory(disk) = &self.disks[&id] {
            disk.crash();
        }
        self.net.state.lock().unwrap().addrs.remove(&id);
        self.net.cut(id);
        within("closing an endpoint", node.endpoint.close()).await;
        within("a shutdown", node.replica.shutdown()).await;
    }

    /// Snapshots on `id`, and waits until its log begins above `index`.
    pub async fn purge(&self, id: NodeId, index: u64) {
        let snapshot = within("a snapshot", self.replica(id).snapshot()).await.unwrap();
        assert!(snapshot > index);
        self.purged(id, index).await;
    }

    /// Waits until the log of `id` begins above `index`. Openraft purges in its own time: when a
    /// snapshot has been installed, or no replication uses the entries any more.
    pub async fn purged(&self, id: NodeId, index: u64) {
        let purged = async {
            while self.nodes[&id].log.bounds().first <= index {
                self.register("purge", 1).await;
            }
        };
        within("the purge", purged).await;
    }

    /// Cuts a running node off from the others.
    pub fn isolate(&self, id: NodeId) {
        self.net.state.lock().unwrap().alone.insert(id);
        self.net.cut(id);
    }

    pub fn heal(&self) {
        self.net.state.lock().unwrap().alone.clear();
    }

    /// A node that leads and may act, of those that are not cut off; and how it leads.
    pub async fn leader(&self) -> (NodeId, Leadership) {
        let alone = self.net.state.lock().unwrap().alone.clone();
        let reachable = self.nodes.iter().filter(|(id, _)| !alone.contains(id));
        let waits = reachable.map(|(id, node)| {
            let (id, mut leadership) = (*id, node.replica.leadership());
            let wait = async move {
                let now = *leadership.wait_for(|now| now.leading).await.expect("the replica runs");
                (id, now)
            };
            Box::pin(wait)
        });
        within("an election", select_all(waits)).await.0
    }

    /// A stream from one node to another, as a replica opens it.
    pub async fn dial(&self, from: NodeId, to: NodeId) -> Duplex {
        let endpoint = self.nodes[&from].endpoint.clone();
        let dialler = Dialler { from, cluster: self.cluster.clone(), endpoint, net: self.net.clone() };
        within("dialling", dialler.dial(to, &Member::default())).await.unwrap()
    }

    /// The next reason for which a node refused a stream.
    pub async fn refusals(&self, id: NodeId) -> String {
        let mut refused = self.nodes[&id].refused.lock().await;
        refused.recv().await.expect("the node runs")
    }

    /// Proposes to whoever leads until it is done; for commands that may be done twice.
    pub async fn propose(&self, commands: Vec<Command>) -> Vec<Reply> {
        let proposed = async {
            loop {
                let (leader, now) = self.leader().await;
                let entry = Entry { stamp: Stamp::default(), term: now.term, commands: commands.clone() };
                match self.replica(leader).propose(&entry).await {
                    Ok(replies) => return replies,
                    Err(ProposeError::TooLarge { .. } | ProposeError::Stopped) => panic!("never done"),
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        within("a proposal", proposed).await
    }

    /// Proposes `count` registrations of agents called `name-…`, an entry each, in flight together.
    pub async fn register(&self, name: &str, count: usize) {
        for chunk in (0..count).collect::<Vec<_>>().chunks(64) {
            let all = chunk.iter().map(|i| self.propose(vec![register(&format!("{name}-{i}"))]));
            for replies in futures_util::future::join_all(all).await {
                assert!(matches!(&replies[..], [Reply::Agent(_)]));
            }
        }
    }

    /// Waits until every running node has applied what the leader has, and compares the hashes.
    pub async fn settle(&self) -> AppliedAt {
        let index = within("a read", self.read_index()).await;
        let mut at = BTreeMap::new();
        for (id, node) in &self.nodes {
            let mut applied = node.replica.applied();
            let now = within("catching up", applied.wait_for(|now| now.index >= index)).await;
            at.insert(*id, *now.expect("the replica runs"));
        }
        let first = at.values().next().copied().expect("a group has nodes");
        assert!(at.values().all(|other| *other == first), "{at:?}");
        first
    }

    pub async fn read_index(&self) -> u64 {
        loop {
            let (leader, _) = self.leader().await;
            match self.replica(leader).read_index().await {
                Ok(index) => return index,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    }
}

async fn accept(endpoint: Endpoint, replica: Replica, refusals: mpsc::Sender<String>) {
    let mut streams = tokio::task::JoinSet::new();
    while let Some(connection) = endpoint.accept().await {
        let (replica, refusals) = (replica.clone(), refusals.clone());
        streams.spawn(async move {
            let mut serving = tokio::task::JoinSet::new();
            while let Ok((_, duplex)) = connection.accept().await {
                let (replica, refusals) = (replica.clone(), refusals.clone());
                serving.spawn(async move {
                    if let Err(error) = replica.serve(duplex).await {
                        // Nobody may be interested.
                        let _ = refusals.try_send(error.to_string());
                    }
                });
                while serving.try_join_next().is_some() {}
            }
        });
    }
}

pub fn register(agent: &str) -> Command {
    let agent_id = AgentId::parse(agent).unwrap();
    let capability = Capability::new(Tag::parse("code_review").unwrap(), 1.0);
    Command::Register {
        registration: Box::new(Registration::new(agent_id.clone(), vec![capability])),
        instance: InstanceId::parse("run").unwrap(),
        started_ms: 0,
        author: Principal::Agent(agent_id),
    }
}
