//! The socket of an endpoint on a real network: QUIC, its settings, its handshakes.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use quinn::{
    IdleTimeout, TransportConfig, VarInt,
    crypto::rustls::{HandshakeData, QuicClientConfig, QuicServerConfig},
};
use rustls_pki_types::CertificateDer;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::{sync::Semaphore, time::timeout};

use crate::{
    connection::{Connection, Proof},
    credentials::Credentials,
    endpoint::{Door, Gate, Wanted},
    error::Error,
    link::{self, TAG_WELCOME},
    options::Options,
    tls::{self, Material},
    wire::{self, CloseCode, Wire},
};

/// How long `close` waits for the other sides to hear of it.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// From this many handshakes in flight on, a stranger must prove its address first.
const RETRY_FROM: usize = 64;

pub(crate) struct Quic {
    endpoint: quinn::Endpoint,
    own: Mutex<Own>,
    door: Door,
    accepts: bool,
}

/// What this side shows of itself; replaced as a whole when its certificate is renewed.
struct Own {
    material: Material,
    client: quinn::ClientConfig,
}

impl Quic {
    pub(crate) fn server(
        addr: SocketAddr,
        door: Door,
        material: Material,
        options: &Options,
    ) -> Result<Self, Error> {
        let server = server_config(door, &material, options)?;
        Self::new(bind(addr, Some(server), options)?, door, material, options, true)
    }

    pub(crate) fn client(door: Door, material: Material, options: &Options) -> Result<Self, Error> {
        // One socket for both address families, where the host has both.
        let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
        let endpoint = bind(any, None, options)
            .or_else(|_| bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)), None, options))?;
        Self::new(endpoint, door, material, options, false)
    }

    fn new(
        endpoint: quinn::Endpoint,
        door: Door,
        material: Material,
        options: &Options,
        accepts: bool,
    ) -> Result<Self, Error> {
        let client = client_config(door, &material, options)?;
        Ok(Self { endpoint, own: Mutex::new(Own { material, client }), door, accepts })
    }

    pub(crate) fn renew(&self, credentials: &Credentials, options: &Options) -> Result<(), Error> {
        let mut own = self.own();
        let material = own.material.renewed(credentials)?;
        let client = client_config(self.door, &material, options)?;
        if self.accepts {
            self.endpoint.set_server_config(Some(server_config(self.door, &material, options)?));
        }
        *own = Own { material, client };
        Ok(())
    }

    fn own(&self) -> MutexGuard<'_, Own> {
        self.own.lock().expect("no panic while it is held")
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.endpoint.local_addr().expect("the socket is bound")
    }

    pub(crate) async fn dial(&self, addr: SocketAddr, wanted: &Wanted<'_>) -> Result<(Wire, Proof), Error> {
        let config = self.own().client.clone();
        let connecting = self
            .endpoint
            .connect_with(config, addr, tls::SERVER_NAME)
            .map_err(|error| wire::dial_error(addr, &error))?;
        let failed = |error| wire::handshake_error(addr, self.door, &error);
        let connection = connecting.await.map_err(failed)?;
        let checked = proven(&connection, self.door)
            .map_err(|reason| Error::Handshake { addr, reason })
            .and_then(|proof| wanted.check(addr, proof.identity()).map(|()| proof));
        let proof = checked.inspect_err(|error| refuse(&connection, &error.to_string()))?;
        welcomed(&connection).await.map_err(failed)?;
        Ok((Wire::quic(connection), proof))
    }

    pub(crate) fn accept_for(&self, gate: Gate) -> tokio::task::AbortHandle {
        tokio::spawn(run_acceptor(self.endpoint.clone(), Arc::new(gate))).abort_handle()
    }

    pub(crate) async fn close(&self, reason: &str) {
        self.endpoint.close(VarInt::from_u32(CloseCode::Done as u32), reason.as_bytes());
        // A host that is down answers nothing; we don't wait for it.
        let _ = timeout(CLOSE_TIMEOUT, self.endpoint.wait_idle()).await;
    }
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
            match timeout(limit, admit(&gate, addr, incoming)).await {
                Ok(Ok(connection)) => gate.hand_over(connection).await,
                Ok(Err(reason)) => gate.note_refusal(addr, &reason),
                Err(_) => gate.note_refusal(addr, "the handshake took too long"),
            }
            drop(slot);
        });
    }
}

async fn admit(gate: &Gate, addr: SocketAddr, incoming: quinn::Incoming) -> Result<Connection, String> {
    let words = |error: quinn::ConnectionError| match wire::handshake_error(addr, gate.door, &error) {
        Error::Handshake { reason, .. }
        | Error::Revoked { reason, .. }
        | Error::Unavailable { reason, .. } => reason,
        other => other.to_string(),
    };
    let connection = incoming.accept().map_err(words)?.await.map_err(words)?;
    let proof = proven(&connection, gate.door)
        .and_then(|proof| gate.check(proof.identity()).map(|()| proof))
        .inspect_err(|reason| refuse(&connection, reason))?;
    // In TLS 1.3 the dialer can't know by itself that its certificate was accepted.
    let mut stream = connection.open_uni().await.map_err(words)?;
    stream.write_chunk(Bytes::from_static(&[TAG_WELCOME])).await.map_err(|error| error.to_string())?;
    let _ = stream.finish();
    Ok(Connection::new(Wire::quic(connection), proof, gate.options.clone()))
}

fn refuse(connection: &quinn::Connection, reason: &str) {
    connection.close(VarInt::from_u32(CloseCode::Refused as u32), reason.as_bytes());
}

/// The other side's verified certificate, and with it whom it speaks for.
fn proven(connection: &quinn::Connection, door: Door) -> Result<Proof, String> {
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
    tls::describe(chain.first().ok_or("a certificate is needed and none was given")?)
        .map(|certificate| Proof::Certificate(Box::new(certificate)))
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

fn server_config(door: Door, material: &Material, options: &Options) -> Result<quinn::ServerConfig, Error> {
    let tls = QuicServerConfig::try_from(material.server_config(door)?)
        .expect("TLS 1.3 has the suite that QUIC starts with");
    let mut server = quinn::ServerConfig::with_crypto(Arc::new(tls));
    server.transport_config(transport_config(options));
    // Handshakes are bounded here; what quinn keeps before we look at it need not be large.
    server.max_incoming(options.handshakes_max.max(1) * 2);
    server.incoming_buffer_size(64 << 10).incoming_buffer_size_total(16 << 20);
    Ok(server)
}

fn client_config(door: Door, material: &Material, options: &Options) -> Result<quinn::ClientConfig, Error> {
    let tls = QuicClientConfig::try_from(material.client_config(door)?)
        .expect("TLS 1.3 has the suite that QUIC starts with");
    let mut client = quinn::ClientConfig::new(Arc::new(tls));
    client.transport_config(transport_config(options));
    Ok(client)
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
