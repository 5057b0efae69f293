//! An endpoint at one of the two doors. What comes out of it, dialled or accepted, has proven its
//! identity and belongs to the cluster.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use reach_protocol::id::{Name, NodeId};
use tokio::{
    sync::{Mutex, mpsc},
    task::AbortHandle,
    time::timeout,
};

use crate::{
    connection::Connection,
    credentials::Credentials,
    error::Error,
    identity::Identity,
    memory,
    options::Options,
    quic::Quic,
    tls::{Material, OwnClock, Scrutiny},
};

/// Nodes meet at one, clients come to the other. Each has its own port, protocol and authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Door {
    Peer,
    Client,
}

impl Door {
    pub(crate) fn alpn(self) -> &'static [u8] {
        match self {
            Self::Peer => b"agent-reach-peer/1",
            Self::Client => b"agent-reach-client/1",
        }
    }

    pub(crate) fn authority(self) -> &'static str {
        match self {
            Self::Peer => "peer",
            Self::Client => "client",
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Peer => "peers",
            Self::Client => "clients",
        }
    }

    /// Whether someone with this identity may come in here.
    pub(crate) fn admits(self, identity: &Identity) -> Result<(), String> {
        match (self, identity.node()) {
            (Self::Peer, Some(_)) | (Self::Client, None) => Ok(()),
            (Self::Peer, None) => {
                Err(format!("this is the port for peers, {identity} is no node: use the client port"))
            }
            (Self::Client, Some(_)) => {
                Err(format!("this is the port for clients, {identity} is a node: use the peer port"))
            }
        }
    }
}

/// Connections that have proven themselves and wait for `accept`.
const ACCEPTED_MAX: usize = 256;

#[derive(Clone)]
pub struct Endpoint {
    shared: Arc<Shared>,
}

struct Shared {
    socket: Socket,
    door: Door,
    options: Options,
    accepted: Mutex<mpsc::Receiver<Connection>>,
    refused: Arc<AtomicU64>,
    acceptor: Option<AbortHandle>,
}

pub(crate) enum Socket {
    Quic(Quic),
    Memory(memory::Port),
}

impl Endpoint {
    /// Accepts at `addr`, and can dial. The certificate must be a node's, of `cluster`. Within a
    /// tokio runtime only.
    pub fn server(
        addr: SocketAddr,
        door: Door,
        cluster: Name,
        credentials: &Credentials,
        options: Options,
    ) -> Result<Self, Error> {
        Self::server_under(addr, door, cluster, credentials, options, Arc::new(OwnClock))
    }

    /// As `server`, with what the node knows about certificates.
    pub fn server_under(
        addr: SocketAddr,
        door: Door,
        cluster: Name,
        credentials: &Credentials,
        options: Options,
        scrutiny: Arc<dyn Scrutiny>,
    ) -> Result<Self, Error> {
        let material = Material::new(credentials, scrutiny)?;
        material.must_be_a_node_of(&cluster)?;
        let quic = Quic::server(addr, door, material, &options)?;
        let (gate, accepted) = Gate::new(door, cluster, options.clone());
        let refused = gate.refused();
        let acceptor = Some(quic.accept_for(gate));
        Ok(Self::new(Socket::Quic(quic), door, options, accepted, refused, acceptor))
    }

    /// Dials only. Within a tokio runtime only.
    pub fn client(door: Door, credentials: &Credentials, options: Options) -> Result<Self, Error> {
        let quic = Quic::client(door, Material::new(credentials, Arc::new(OwnClock))?, &options)?;
        // Nothing will come through this channel, and its `accept` says so at once.
        let (_, accepted) = mpsc::channel(1);
        Ok(Self::new(Socket::Quic(quic), door, options, accepted, Arc::default(), None))
    }

    pub(crate) fn new(
        socket: Socket,
        door: Door,
        options: Options,
        accepted: mpsc::Receiver<Connection>,
        refused: Arc<AtomicU64>,
        acceptor: Option<AbortHandle>,
    ) -> Self {
        let accepted = Mutex::new(accepted);
        Self { shared: Arc::new(Shared { socket, door, options, accepted, refused, acceptor }) }
    }

    pub fn local_addr(&self) -> SocketAddr {
        match &self.shared.socket {
            Socket::Quic(quic) => quic.local_addr(),
            Socket::Memory(port) => port.addr(),
        }
    }

    /// From now on these are shown to whoever comes or is dialled; connections that stand go on. The
    /// identity must be the one this endpoint has.
    pub fn renew(&self, credentials: &Credentials) -> Result<(), Error> {
        match &self.shared.socket {
            Socket::Quic(quic) => quic.renew(credentials, &self.shared.options),
            Socket::Memory(_) => Ok(()),
        }
    }

    /// Incoming connections that were turned away: bad credentials, too slow, over a limit.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// The next connection that has proven itself; none when the endpoint is closed, or only dials.
    /// Cancel-safe.
    pub async fn accept(&self) -> Option<Connection> {
        self.shared.accepted.lock().await.recv().await
    }

    /// Dials. The other side must be a node of `cluster`, and `node` if one is named; it has
    /// accepted our identity when this returns.
    pub async fn connect(
        &self,
        addr: SocketAddr,
        cluster: &Name,
        node: Option<NodeId>,
    ) -> Result<Connection, Error> {
        let Shared { socket, options, .. } = &*self.shared;
        let wanted = Wanted { cluster, node };
        let dial = async {
            match socket {
                Socket::Quic(quic) => quic.dial(addr, &wanted).await,
                Socket::Memory(port) => port.dial(addr, &wanted).await,
            }
        };
        let (wire, proof) = timeout(options.connect_timeout, dial)
            .await
            .unwrap_or(Err(Error::Timeout { addr, what: "connecting" }))?;
        Ok(Connection::new(wire, proof, options.clone()))
    }

    /// Closes every connection, lets the other sides hear of it (for a second at most), and gives
    /// the port back.
    pub async fn close(&self) {
        const REASON: &str = "the other side is shutting down";
        match &self.shared.socket {
            Socket::Quic(quic) => quic.close(REASON).await,
            Socket::Memory(port) => port.close(REASON),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(acceptor) = &self.acceptor {
            acceptor.abort();
        }
    }
}

/// What every incoming connection must pass.
pub(crate) struct Gate {
    pub(crate) door: Door,
    pub(crate) options: Options,
    cluster: Name,
    refused: Arc<AtomicU64>,
    accepted: mpsc::Sender<Connection>,
}

impl Gate {
    pub(crate) fn new(door: Door, cluster: Name, options: Options) -> (Self, mpsc::Receiver<Connection>) {
        let (accepted, receiver) = mpsc::channel(ACCEPTED_MAX);
        (Self { door, options, cluster, refused: Arc::default(), accepted }, receiver)
    }

    pub(crate) fn refused(&self) -> Arc<AtomicU64> {
        self.refused.clone()
    }

    pub(crate) fn check(&self, identity: &Identity) -> Result<(), String> {
        if identity.cluster != self.cluster {
            let (expected, found) = (self.cluster.clone(), identity.cluster.clone());
            return Err(Error::WrongCluster { expected, found }.to_string());
        }
        self.door.admits(identity)
    }

    pub(crate) async fn hand_over(&self, connection: Connection) {
        let limit = self.options.handshake_timeout;
        if self.accepted.send_timeout(connection.clone(), limit).await.is_err() {
            self.note_refusal(connection.remote_addr(), "nobody took the connection in time");
            connection.close("the node is too busy to take the connection: try another one");
        }
    }

    pub(crate) fn note_refusal(&self, addr: SocketAddr, reason: &str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(door = self.door.authority(), peer = %addr, reason, "connection refused");
    }
}

/// Whom a dialer expects to meet.
pub(crate) struct Wanted<'a> {
    pub(crate) cluster: &'a Name,
    pub(crate) node: Option<NodeId>,
}

impl Wanted<'_> {
    pub(crate) fn check(&self, addr: SocketAddr, identity: &Identity) -> Result<(), Error> {
        if identity.cluster != *self.cluster {
            let (expected, found) = (self.cluster.clone(), identity.cluster.clone());
            return Err(Error::WrongCluster { expected, found });
        }
        let wrong = |found: String| {
            let expected = self.node.map_or("a node".into(), |node| format!("node {node}"));
            Error::WrongPeer { addr, expected, found }
        };
        match (identity.node(), self.node) {
            (None, _) => Err(wrong(identity.principal.to_string())),
            (Some(found), Some(expected)) if found != expected => Err(wrong(format!("node {found}"))),
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("door", &self.shared.door)
            .field("local_addr", &self.local_addr())
            .finish_non_exhaustive()
    }
}
