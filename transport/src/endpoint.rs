//! A socket at one of the two doors. What comes out of it, dialled or accepted, has proven its
//! identity and belongs to the cluster.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use quinn::{
    IdleTimeout, TransportConfig, VarInt,
    crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig},
};
use reach_protocol::id::{Name, NodeId};
use rustls_pki_types::CertificateDer;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{
    sync::{Mutex, Semaphore, mpsc},
    task::AbortHandle,
    time::timeout,
};

use crate::{
    connection::Connection,
    credentials::Credentials,
    error::Error,
    identity::Identity,
    link::{self, TAG_WELCOME},
    options::Options,
    tls::{self, Material},
    wire::{self, CloseCode, Wire},
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
    fn admits(self, identity: &Identity) -> Result<(), String> {
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

/// How long `close` waits for the other sides to hear of it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// From this many handshakes in flight on, a stranger must prove its address first.
const RETRY_FROM: usize = 64;
/// Connections that have proven themselves and wait for `accept`.
const ACCEPTED_MAX: usize = 256;

#[derive(Clone)]
pub struct Endpoint {
    shared: Arc<Shared>,
}

struct Shared {
    quic: quinn::Endpoint,
    door: Door,
    options: Options,
    client: quinn::ClientConfig,
    accepted: Mutex<mpsc::Receiver<Connection>>,
    refused: Arc<AtomicU64>,
    acceptor: Option<AbortHandle>,
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
        let material = Material::new(credentials)?;
        let own = &material.own.identity;
        if own.cluster != cluster {
            return Err(Error::WrongCluster { expected: cluster, found: own.cluster.clone() });
        }
        if own.node().is_none() {
            let reason = format!("{own} is no node: a node's port needs a node's certificate");
            return Err(Error::certificate("certificate (cert_pem)", reason));
        }
        let tls = QuicServerConfig::try_from(material.server_config(door)?)
            .expect("TLS 1.3 has the suite that QUIC starts with");
        let mut server = quinn::ServerConfig::with_crypto(Arc::new(tls));
        server.transport_config(transport_config(&options));
        // Handshakes are bounded here; what quinn keeps before we look at it need not be large.
        server.max_incoming(options.handshakes_max.max(1) * 2);
        server.incoming_buffer_size(64 << 10).incoming_buffer_size_total(16 << 20);
        let quic = bind(addr, Some(server), &options)?;
        Self::start(quic, door, Some(cluster), &material, options)
    }

    /// Dials only. Within a tokio runtime only.
    pub fn client(door: Door, credentials: &Credentials, options: Options) -> Result<Self, Error> {
        let material = Material::new(credentials)?;
        // One socket for both address families, where the host has both.
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let quic = bind(any, None, &options)
            .or_else(|_| bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), None, &options))?;
        Self::start(quic, door, None, &material, options)
    }

    fn start(
        quic: quinn::Endpoint,
        door: Door,
        cluster: Option<Name>,
        material: &Material,
        options: Options,
    ) -> Result<Self, Error> {
        let tls = QuicClientConfig::try_from(material.client_config(door)?)
            .expect("TLS 1.3 has the suite that QUIC starts with");
        let mut client = quinn::ClientConfig::new(Arc::new(tls));
        client.transport_config(transport_config(&options));
        let refused = Arc::new(AtomicU64::new(0));
        let (tx, rx) = mpsc::channel(ACCEPTED_MAX);
        let acceptor = cluster.map(|cluster| {
            let (quic, options, refused) = (quic.clone(), options.clone(), refused.clone());
            let gate = Arc::new(Gate { door, cluster, options, refused, accepted: tx });
            tokio::spawn(run_acceptor(quic, gate)).abort_handle()
        });
        let accepted = Mutex::new(rx);
        Ok(Self { shared: Arc::new(Shared { quic, door, options, client, accepted, refused, acceptor }) })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.shared.quic.local_addr().expect("the socket is bound")
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
        let limit = self.shared.options.connect_timeout;
        match timeout(limit, self.dial(addr, cluster, node)).await {
            Ok(result) => result,
            Err(_) => Err(Error::Timeout { addr, what: "connecting" }),
        }
    }

    async fn dial(
        &self,
        addr: SocketAddr,
        cluster: &Name,
        node: Option<NodeId>,
    ) -> Result<Connection, Error> {
        let Shared { quic, door, client, options, .. } = &*self.shared;
        let connecting = quic
            .connect_with(client.clone(), addr, tls::SERVER_NAME)
            .map_err(|error| wire::dial_error(addr, &error))?;
        let connection = connecting.await.map_err(|error| wire::handshake_error(addr, *door, &error))?;
        let checked = proven(&connection, *door)
            .map_err(|reason| Error::Handshake { addr, reason })
            .and_then(|identity| check_node(addr, &identity, cluster, node).map(|()| identity));
        let identity = checked.inspect_err(|error| {
            connection.close(VarInt::from_u32(CloseCode::Refused as u32), error.to_string().as_bytes());
        })?;
        welcomed(&connection).await.map_err(|error| wire::handshake_error(addr, *door, &error))?;
        Ok(Connection::new(Wire::quic(connection), identity, options.clone()))
    }

    /// Closes every connection, lets the other sides hear of it (for a second at most), and gives
    /// the port back.
    pub async fn close(&self) {
        let Shared { quic, .. } = &*self.shared;
        quic.close(VarInt::from_u32(CloseCode::Done as u32), b"the other side is shutting down");
        // A host that is down answers nothing; we don't wait for it.
        let _ = timeout(CLOSE_TIMEOUT, quic.wait_idle()).await;
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
struct Gate {
    door: Door,
    cluster: Name,
    options: Options,
    refused: Arc<AtomicU64>,
    accepted: mpsc::Sender<Connection>,
}

async fn run_acceptor(quic: quinn::Endpoint, gate: Arc<Gate>) {
    let slots = Arc::new(Semaphore::new(gate.options.handshakes_max));
    while let Some(incoming) = quic.accept().await {
        let addr = wire::canonical(incoming.remote_address());
        if quic.open_connections() >= gate.options.connections_max {
            gate.note_refusal(addr, "at the limit of connections");
            incoming.refuse();
            continue;
        }
        let busy = gate.options.handshakes_max - slots.available_permits();
        if busy >= RETRY_FROM && incoming.may_retry() {
            let _ = incoming.retry();
            continue;
        }
        let Ok(slot) = slots.clone().try_acquire_owned() else {
            gate.note_refusal(addr, "at the limit of handshakes");
            incoming.refuse();
            continue;
        };
        let gate = gate.clone();
        tokio::spawn(async move {
            let limit = gate.options.handshake_timeout;
            match timeout(limit, gate.admit(addr, incoming)).await {
                Ok(Ok(connection)) => gate.hand_over(connection).await,
                Ok(Err(reason)) => gate.note_refusal(addr, &reason),
                Err(_) => gate.note_refusal(addr, "the handshake took too long"),
            }
            drop(slot);
        });
    }
}

impl Gate {
    async fn admit(&self, addr: SocketAddr, incoming: quinn::Incoming) -> Result<Connection, String> {
        let words = |error: quinn::ConnectionError| match wire::handshake_error(addr, self.door, &error) {
            Error::Handshake { reason, .. } => reason,
            other => other.to_string(),
        };
        let connection = incoming.accept().map_err(words)?.await.map_err(words)?;
        let identity = proven(&connection, self.door)
            .and_then(|identity| self.check(&identity).map(|()| identity))
            .inspect_err(|reason| {
                connection.close(VarInt::from_u32(CloseCode::Refused as u32), reason.as_bytes());
            })?;
        // In TLS 1.3 the dialer can't know by itself that its certificate was accepted.
        let mut stream = connection.open_uni().await.map_err(words)?;
        stream.write_chunk(Bytes::from_static(&[TAG_WELCOME])).await.map_err(|error| error.to_string())?;
        let _ = stream.finish();
        Ok(Connection::new(Wire::quic(connection), identity, self.options.clone()))
    }

    fn check(&self, identity: &Identity) -> Result<(), String> {
        if identity.cluster != self.cluster {
            let (expected, found) = (self.cluster.clone(), identity.cluster.clone());
            return Err(Error::WrongCluster { expected, found }.to_string());
        }
        self.door.admits(identity)
    }

    async fn hand_over(&self, connection: Connection) {
        let limit = self.options.handshake_timeout;
        if self.accepted.send_timeout(connection.clone(), limit).await.is_err() {
            self.note_refusal(connection.remote_addr(), "nobody took the connection in time");
            connection.close("the node is too busy to take the connection: try another one");
        }
    }

    fn note_refusal(&self, addr: SocketAddr, reason: &str) {
        self.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(door = self.door.authority(), peer = %addr, reason, "connection refused");
    }
}

/// The identity that the other side's verified certificate carries.
fn proven(connection: &quinn::Connection, door: Door) -> Result<Identity, String> {
    let protocol = connection
        .handshake_data()
        .and_then(|data| data.downcast::<HandshakeData>().ok())
        .and_then(|data| data.protocol);
    if protocol.as_deref() != Some(door.alpn()) {
        return Err(format!("that is no port for {}", door.name()));
    }
    let chain = connection
        .peer_identity()
        .and_then(|data| data.downcast::<Vec<CertificateDer<'static>>>().ok())
        .ok_or("a certificate is needed and none was given")?;
    tls::identity_of(chain.first().ok_or("a certificate is needed and none was given")?)
}

fn check_node(
    addr: SocketAddr,
    identity: &Identity,
    cluster: &Name,
    node: Option<NodeId>,
) -> Result<(), Error> {
    if identity.cluster != *cluster {
        return Err(Error::WrongCluster { expected: cluster.clone(), found: identity.cluster.clone() });
    }
    match (identity.node(), node) {
        (Some(found), Some(expected)) if found != expected => Err(Error::WrongPeer {
            addr,
            expected: format!("node {expected}"),
            found: format!("node {found}"),
        }),
        (Some(_), _) => Ok(()),
        (None, _) => Err(Error::WrongPeer {
            addr,
            expected: node.map_or("a node".into(), |node| format!("node {node}")),
            found: identity.principal.to_string(),
        }),
    }
}

/// Waits for the byte that says that the other side accepted us.
async fn welcomed(connection: &quinn::Connection) -> Result<(), quinn::ConnectionError> {
    let stream = connection.accept_uni().await?;
    match link::first_byte(&mut wire::Receiver::Quic(stream)).await {
        Ok(Some((TAG_WELCOME, _))) => Ok(()),
        Ok(_) => Err(connection.close_reason().unwrap_or(quinn::ConnectionError::Reset)),
        Err(_) => Err(connection.closed().await),
    }
}

fn transport_config(options: &Options) -> Arc<TransportConfig> {
    let mut config = TransportConfig::default();
    let idle = IdleTimeout::try_from(options.idle_timeout).expect("an idle timeout is below 2^62 ms");
    config
        .max_idle_timeout(Some(idle))
        .keep_alive_interval(Some(options.keep_alive))
        .max_concurrent_bidi_streams(options.streams_max.into())
        // The main stream of a link and the welcome come on top. Not more: if big frames waited
        // unread for their turn, they could use up the window that those before them need.
        .max_concurrent_uni_streams((options.big_frames_max.max(1) + 2).into())
        .stream_receive_window(options.stream_window_bytes.into())
        .receive_window(options.connection_window_bytes.into())
        .send_window(options.send_window_bytes)
        .initial_rtt(options.initial_rtt)
        .datagram_receive_buffer_size(None)
        .enable_segmentation_offload(true);
    Arc::new(config)
}

fn bind(
    addr: SocketAddr,
    server: Option<quinn::ServerConfig>,
    options: &Options,
) -> Result<quinn::Endpoint, Error> {
    let failed = |error: std::io::Error| {
        let reason = match error.kind() {
            std::io::ErrorKind::AddrInUse => format!(
                "address already in use: another process has port {}, choose another port or stop it",
                addr.port()
            ),
            std::io::ErrorKind::AddrNotAvailable => "this machine does not have that address".into(),
            std::io::ErrorKind::PermissionDenied => {
                format!("not allowed to use port {}: choose one above 1023", addr.port())
            }
            _ => error.to_string(),
        };
        Error::Bind { addr, reason }
    };
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP)).map_err(failed)?;
    if addr.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        socket.set_only_v6(false).map_err(failed)?;
    }
    // The kernel cuts both to its own limit; a smaller buffer loses packets, which are sent again.
    let _ = socket.set_recv_buffer_size(options.receive_buffer_bytes);
    let _ = socket.set_send_buffer_size(options.receive_buffer_bytes);
    socket.set_nonblocking(true).map_err(failed)?;
    socket.bind(&addr.into()).map_err(failed)?;
    let runtime = Arc::new(quinn::TokioRuntime);
    quinn::Endpoint::new(quinn::EndpointConfig::default(), server, socket.into(), runtime).map_err(failed)
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("door", &self.shared.door)
            .field("local_addr", &self.local_addr())
            .finish_non_exhaustive()
    }
}
