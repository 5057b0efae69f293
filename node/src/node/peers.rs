//! Links between nodes. Each node dials every other one and asks over its own link; it answers over
//! the links that others dialled. Raft's streams are streams of the same connections.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::BoxFuture;
use reach_protocol::{
    Code, Command, ErrorReply, Name, NodeId, Principal, codec,
    frame::{NodeReport, PeerFrame},
};
use reach_raft::{Dial, DialError, Member};
use reach_transport::{Connection, Duplex, Endpoint, LinkTx};
use tokio::sync::oneshot;

use super::{Shared, certificates::Certificates, identity::Acquaintances, leader::Proposed};

/// The kind of a stream that carries Raft.
const RAFT_STREAM: u8 = 1;
/// Between two attempts to dial a node that does not answer.
const REDIAL_AFTER: Duration = Duration::from_millis(200);
const DIAL_MAX: Duration = Duration::from_secs(2);
/// How long a node's own figures may take.
const REPORT_MAX: Duration = Duration::from_millis(500);
/// Half of it is the most by which an answer can be off. Below `REPORT_MAX`, which may wait for it.
const CALENDAR_MAX: Duration = Duration::from_millis(300);

#[derive(Clone, Debug)]
pub struct Peers(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    node_id: NodeId,
    cluster: Name,
    endpoint: Endpoint,
    certificates: Arc<Certificates>,
    acquaintances: Acquaintances,
    links: Mutex<HashMap<NodeId, Outbound>>,
    /// What was asked and not yet answered, with the connection it went over.
    asked: Mutex<HashMap<u64, (u64, oneshot::Sender<PeerFrame>)>>,
    next_id: AtomicU64,
    addresses: Mutex<BTreeMap<NodeId, String>>,
}

#[derive(Clone, Debug)]
struct Outbound {
    connection: Connection,
    tx: LinkTx,
}

impl Peers {
    pub fn new(
        node_id: NodeId,
        cluster: Name,
        endpoint: Endpoint,
        certificates: Arc<Certificates>,
        acquaintances: Acquaintances,
        members: &BTreeMap<NodeId, Member>,
    ) -> Self {
        let addresses = members.iter().map(|(id, member)| (*id, member.peer_addr.clone())).collect();
        Self(Arc::new(Inner {
            node_id,
            cluster,
            endpoint,
            certificates,
            acquaintances,
            links: Mutex::default(),
            asked: Mutex::default(),
            next_id: AtomicU64::new(1),
            addresses: Mutex::new(addresses),
        }))
    }

    /// Passes commands on to the leader. No answer is *unknown*, never *failed*.
    pub async fn propose(&self, leader: NodeId, commands: Vec<Command>) -> Proposed {
        let id = self.next_id();
        match self.ask(leader, id, &PeerFrame::Propose { id, commands }).await? {
            PeerFrame::Proposed { result, .. } => result.map_err(|error| *error),
            _ => Err(ErrorReply::new(Code::Internal, "the leader answered something else")),
        }
    }

    pub async fn read_index(&self, leader: NodeId) -> Result<u64, ErrorReply> {
        let id = self.next_id();
        match self.ask(leader, id, &PeerFrame::ReadIndex { id }).await? {
            PeerFrame::ReadAt { result, .. } => result.map_err(|error| *error),
            _ => Err(ErrorReply::new(Code::Internal, "the leader answered something else")),
        }
    }

    /// None when the node does not answer within half a second.
    pub async fn report(&self, node: NodeId) -> Option<NodeReport> {
        let id = self.next_id();
        let frame = PeerFrame::Report { id };
        match tokio::time::timeout(REPORT_MAX, self.ask(node, id, &frame)).await {
            Ok(Ok(PeerFrame::Reported { report, .. })) => Some(report),
            _ => None,
        }
    }

    /// The leader's calendar, in Unix milliseconds. None when it does not answer in time, or does not
    /// lead.
    pub async fn calendar(&self, leader: NodeId) -> Option<u64> {
        let id = self.next_id();
        let frame = PeerFrame::AskCalendar { id };
        match tokio::time::timeout(CALENDAR_MAX, self.ask(leader, id, &frame)).await {
            Ok(Ok(PeerFrame::Calendar { wall_ms, .. })) => wall_ms,
            _ => None,
        }
    }

    /// To every node that is linked now; a lost one is not waited for.
    pub fn broadcast(&self, frame: &PeerFrame) {
        let bytes = codec::encode(frame);
        for outbound in self.links().values() {
            let _ = outbound.tx.send(bytes.clone());
        }
    }

    /// Every node that is linked now, with the link's id.
    pub fn links_now(&self) -> Vec<(NodeId, u64, LinkTx)> {
        let links = self.links();
        links.iter().map(|(node, out)| (*node, out.connection.id(), out.tx.clone())).collect()
    }

    fn next_id(&self) -> u64 {
        self.0.next_id.fetch_add(1, Ordering::Relaxed)
    }

    async fn ask(&self, node: NodeId, id: u64, frame: &PeerFrame) -> Result<PeerFrame, ErrorReply> {
        let outbound = self.links().get(&node).cloned().ok_or_else(|| not_linked(node))?;
        self.ask_over(&outbound, node, id, frame).await
    }

    async fn ask_over(
        &self,
        outbound: &Outbound,
        node: NodeId,
        id: u64,
        frame: &PeerFrame,
    ) -> Result<PeerFrame, ErrorReply> {
        let (sender, answered) = oneshot::channel();
        self.asked().insert(id, (outbound.connection.id(), sender));
        // Whoever stops waiting (a deadline, a caller that left) takes its entry away.
        let _forget = Forget { peers: self, id };
        outbound.tx.send(codec::encode(frame)).map_err(|_| not_linked(node))?;
        answered
            .await
            .map_err(|_| ErrorReply::new(Code::OutcomeUnknown, format!("the link to {node} was lost")))
    }

    fn links(&self) -> std::sync::MutexGuard<'_, HashMap<NodeId, Outbound>> {
        self.0.links.lock().expect("no panic while it is held")
    }

    fn asked(&self) -> std::sync::MutexGuard<'_, HashMap<u64, (u64, oneshot::Sender<PeerFrame>)>> {
        self.0.asked.lock().expect("no panic while it is held")
    }

    async fn dial_now(&self, node: NodeId, address: &str) -> Result<(), String> {
        let mut addresses =
            tokio::net::lookup_host(address).await.map_err(|error| format!("{address}: {error}"))?;
        let address = addresses.next().ok_or_else(|| format!("{address} has no address"))?;
        let connect = self.0.endpoint.connect(address, &self.0.cluster, Some(node));
        let connection = in_time(connect).await?.map_err(|error| error.to_string())?;
        let (tx, rx) = connection.link();
        let outbound = Outbound { connection: connection.clone(), tx };
        tokio::spawn(self.clone().read_answers(node, connection.clone(), rx));
        match in_time(self.meet(node, &outbound)).await.flatten() {
            Ok(()) => {
                self.links().insert(node, outbound);
                tracing::info!(peer = %node, "linked");
                Ok(())
            }
            Err(reason) => {
                connection.close(&reason);
                Err(reason)
            }
        }
    }

    /// Nothing else is asked of a node before it is known to be the one that it was.
    async fn meet(&self, node: NodeId, outbound: &Outbound) -> Result<(), String> {
        let id = self.next_id();
        let answer = self.ask_over(outbound, node, id, &PeerFrame::AskIncarnation { id }).await;
        let incarnation = match answer.map_err(|error| error.to_string())? {
            PeerFrame::Incarnation { incarnation, .. } => incarnation,
            _ => return Err("it did not say who it is".to_owned()),
        };
        match self.0.acquaintances.is_itself(node, incarnation).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                tracing::error!(peer = %node, "it came back without the data that it had: it has to be replaced under a new id");
                let _ = outbound.tx.send(codec::encode(&PeerFrame::Disowned));
                // It hangs up when it has read that.
                outbound.connection.closed().await;
                Err("it lost its data".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    async fn read_answers(self, node: NodeId, connection: Connection, mut rx: reach_transport::LinkRx) {
        let _standing = self.0.certificates.watch(&connection);
        while let Some(bytes) = rx.recv().await {
            let frame = match codec::decode::<PeerFrame>("peer frame", &bytes) {
                Ok(frame) => frame,
                Err(error) => {
                    tracing::error!(peer = %node, %error, "link dropped");
                    connection.close("a frame could not be read");
                    break;
                }
            };
            let id = match &frame {
                PeerFrame::Proposed { id, .. }
                | PeerFrame::ReadAt { id, .. }
                | PeerFrame::Reported { id, .. }
                | PeerFrame::Calendar { id, .. }
                | PeerFrame::Incarnation { id, .. } => *id,
                _ => continue,
            };
            let asked = self.asked().remove(&id);
            if let Some((_, sender)) = asked {
                let _ = sender.send(frame);
            }
        }
        connection.close("the link ended");
        // Dropping the senders tells everyone who waits that the outcome is unknown.
        self.asked().retain(|_, (over, _)| *over != connection.id());
    }

    /// The only one that dials `node`, and that takes its lost link away.
    async fn keep_linked(self, node: NodeId) {
        loop {
            let outbound = self.links().get(&node).cloned();
            if let Some(outbound) = outbound {
                outbound.connection.closed().await;
                self.links().remove(&node);
                tracing::info!(peer = %node, "link lost");
            } else {
                let address = self.0.addresses.lock().expect("no panic while it is held").get(&node).cloned();
                let Some(address) = address else { return };
                match self.dial_now(node, &address).await {
                    Ok(()) => continue,
                    Err(reason) => tracing::debug!(peer = %node, reason, "not linked"),
                }
            }
            tokio::time::sleep(REDIAL_AFTER).await;
        }
    }
}

fn not_linked(node: NodeId) -> ErrorReply {
    ErrorReply::new(Code::NoLeader, format!("no link to {node}")).with_retry_after_ms(50)
}

async fn in_time<T>(answer: impl Future<Output = T>) -> Result<T, String> {
    tokio::time::timeout(DIAL_MAX, answer).await.map_err(|_| "no answer in time".to_owned())
}

struct Forget<'a> {
    peers: &'a Peers,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.peers.asked().remove(&self.id);
    }
}

impl Dial for Peers {
    fn dial(&self, to: NodeId, member: &Member) -> BoxFuture<'static, Result<Duplex, DialError>> {
        let peers = self.clone();
        peers.0.addresses.lock().expect("no panic while it is held").insert(to, member.peer_addr.clone());
        Box::pin(async move {
            let outbound = peers.links().get(&to).cloned();
            let outbound = outbound.ok_or_else(|| DialError::new(format!("no link to {to}")))?;
            outbound.connection.open(RAFT_STREAM).await.map_err(DialError::new)
        })
    }
}

/// Keeps a link to every other member and serves the ones that others dial.
pub async fn run(shared: Arc<Shared>, endpoint: Endpoint) {
    let mut dialling = std::collections::BTreeSet::new();
    let mut look_again = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            accepted = endpoint.accept() => {
                let Some(connection) = accepted else { return };
                shared.clone().spawn(serve(shared.clone(), connection));
            }
            // Members may be added while we run.
            _ = look_again.tick() => {
                let members = shared.replica.members();
                let known = shared.initial_members.keys().chain(members.keys()).copied();
                for node in known.filter(|node| *node != shared.peers.0.node_id) {
                    if dialling.insert(node) {
                        shared.clone().spawn(shared.peers.clone().keep_linked(node));
                    }
                }
            }
        }
    }
}

async fn serve(shared: Arc<Shared>, connection: Connection) {
    let Principal::Node(node) = connection.identity().principal else { return };
    let _standing = shared.certificates.watch(&connection);
    let (tx, mut rx) = connection.link();
    let streams = accept_raft(shared.clone(), connection.clone());
    let frames = async {
        while let Some(bytes) = rx.recv().await {
            match codec::decode::<PeerFrame>("peer frame", &bytes) {
                Ok(PeerFrame::Summary(summary)) => {
                    shared.heartbeats.told(shared.clock.mono_ms(), connection.id(), node, &summary);
                }
                Ok(frame) => answer(&shared, node, &tx, frame),
                Err(error) => {
                    tracing::error!(peer = %node, %error, "link dropped");
                    return;
                }
            }
        }
    };
    tokio::select! {
        () = streams => {}
        () = frames => {}
    }
    connection.close("done");
    // Agents it held get one whole TTL from here to attach to another node.
    shared.heartbeats.link_lost(shared.clock.mono_ms(), connection.id());
}

async fn accept_raft(shared: Arc<Shared>, connection: Connection) {
    while let Ok((kind, duplex)) = connection.accept().await {
        if kind != RAFT_STREAM {
            continue;
        }
        let replica = shared.replica.clone();
        shared.clone().spawn(async move {
            if let Err(error) = replica.serve(duplex).await {
                tracing::debug!(%error, "a raft stream ended");
            }
        });
    }
}

fn answer(shared: &Arc<Shared>, node: NodeId, tx: &LinkTx, frame: PeerFrame) {
    match frame {
        PeerFrame::Propose { id, commands } => {
            let (tx, leader) = (tx.clone(), shared.leader.clone());
            shared.clone().spawn(async move {
                let result = leader.propose(commands).await.map_err(Box::new);
                let _ = tx.send(codec::encode(&PeerFrame::Proposed { id, result }));
            });
        }
        PeerFrame::ReadIndex { id } => {
            let (tx, replica) = (tx.clone(), shared.replica.clone());
            shared.clone().spawn(async move {
                let result = replica.read_index().await.map_err(|_| Box::new(super::leader::no_leader()));
                let _ = tx.send(codec::encode(&PeerFrame::ReadAt { id, result }));
            });
        }
        PeerFrame::Summary(_) => unreachable!("it is taken above"),
        PeerFrame::Offset { offset_ms } => {
            shared.heartbeats.node_off_by(shared.clock.mono_ms(), node, offset_ms)
        }
        PeerFrame::Clock { term, stamp } => {
            let leadership = *shared.replica.leadership().borrow();
            if leadership.term == term && leadership.leader == Some(node) {
                shared.clock.told(stamp, shared.replica.applied().borrow().stamp);
            }
        }
        PeerFrame::Report { id } => {
            let (tx, asked) = (tx.clone(), shared.clone());
            shared.clone().spawn(async move {
                let report = asked.full_report().await;
                let _ = tx.send(codec::encode(&PeerFrame::Reported { id, report }));
            });
        }
        PeerFrame::AskCalendar { id } => {
            let leading = shared.replica.leadership().borrow().leading;
            let wall_ms = leading.then(|| shared.clock.stamp().wall_ms);
            let _ = tx.send(codec::encode(&PeerFrame::Calendar { id, wall_ms }));
        }
        PeerFrame::AskIncarnation { id } => {
            let incarnation = shared.incarnation.clone();
            let _ = tx.send(codec::encode(&PeerFrame::Incarnation { id, incarnation }));
        }
        // The first who says so is enough.
        PeerFrame::Disowned => drop(shared.disowned.set(node)),
        // Answers come over the link that we dialled.
        PeerFrame::Proposed { .. }
        | PeerFrame::ReadAt { .. }
        | PeerFrame::Reported { .. }
        | PeerFrame::Calendar { .. }
        | PeerFrame::Incarnation { .. } => {}
    }
}
