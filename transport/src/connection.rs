//! A connection to a proven identity. It lives as long as a clone, a half of its link or one of its
//! streams does.

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::{Mutex, mpsc},
    task::{AbortHandle, JoinSet},
    time::timeout,
};

use crate::{
    authority::CertificateInfo,
    error::Error,
    framing::{Duplex, Frames},
    identity::Identity,
    link::{self, LinkRx, LinkTx},
    options::Options,
    wire::{CloseCode, Wire},
};

/// How long an opened stream may take to say its kind.
const KIND_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct Connection {
    shared: Arc<Shared>,
}

/// How the other side has shown who it is.
pub(crate) enum Proof {
    Certificate(Box<CertificateInfo>),
    /// In a network of memory, where nobody lies.
    Named(Identity),
}

impl Proof {
    pub(crate) fn identity(&self) -> &Identity {
        match self {
            Self::Certificate(certificate) => &certificate.identity,
            Self::Named(identity) => identity,
        }
    }
}

struct Shared {
    id: u64,
    wire: Wire,
    proof: Proof,
    options: Options,
    linked: AtomicBool,
    acceptor: OnceLock<Acceptor>,
}

/// Reads the kinds of incoming streams beside each other, so that one whose first packet was lost
/// holds up no other.
struct Acceptor {
    streams: Mutex<mpsc::Receiver<(u8, Duplex)>>,
    task: AbortHandle,
}

impl Connection {
    pub(crate) fn new(wire: Wire, proof: Proof, options: Options) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        let id = IDS.fetch_add(1, Ordering::Relaxed);
        let (linked, acceptor) = (AtomicBool::new(false), OnceLock::new());
        Self { shared: Arc::new(Shared { id, wire, proof, options, linked, acceptor }) }
    }

    /// Who the other side is, as its certificate says.
    pub fn identity(&self) -> &Identity {
        self.shared.proof.identity()
    }

    /// The certificate that it showed.
    pub fn certificate(&self) -> Option<&CertificateInfo> {
        match &self.shared.proof {
            Proof::Certificate(certificate) => Some(certificate),
            Proof::Named(_) => None,
        }
    }

    pub fn remote_addr(&self) -> SocketAddr {
        self.shared.wire.remote_addr()
    }

    pub fn rtt(&self) -> Duration {
        self.shared.wire.rtt()
    }

    /// Unique in this process.
    pub fn id(&self) -> u64 {
        self.shared.id
    }

    /// A bidirectional stream of its own. Waits while the other side has `Options::streams_max` open.
    pub async fn open(&self, kind: u8) -> Result<Duplex, Error> {
        let (mut sender, receiver) = self.shared.wire.open_bi().await?;
        sender.write(Bytes::copy_from_slice(&[kind])).await?;
        Ok(Duplex::new(sender, receiver, Frames::default()))
    }

    /// The next stream that the other side opens. Cancel-safe.
    pub async fn accept(&self) -> Result<(u8, Duplex), Error> {
        let acceptor = self.shared.acceptor.get_or_init(|| {
            let (tx, rx) = mpsc::channel(16);
            let task = tokio::spawn(run_acceptor(self.shared.wire.clone(), tx)).abort_handle();
            Acceptor { streams: Mutex::new(rx), task }
        });
        match acceptor.streams.lock().await.recv().await {
            Some(stream) => Ok(stream),
            None => Err(self.closed().await),
        }
    }

    /// The link, once on each side.
    ///
    /// # Panics
    /// At the second call, and outside a tokio runtime.
    pub fn link(&self) -> (LinkTx, LinkRx) {
        let again = self.shared.linked.swap(true, Ordering::Relaxed);
        assert!(!again, "a connection has one link");
        link::start(&self.shared.wire, &self.shared.options)
    }

    /// Waits for the connection's end and says why it came.
    pub async fn closed(&self) -> Error {
        self.shared.wire.closed().await
    }

    pub fn is_closed(&self) -> bool {
        self.shared.wire.close_reason().is_some()
    }

    /// Closes at once, for all clones; frames under way are lost. The other side reads `reason`.
    /// To have the last frames of a link arrive, drop its `LinkTx` and wait for the other side.
    pub fn close(&self, reason: &str) {
        self.shared.wire.close(CloseCode::Done, reason);
    }

    /// As `close`, for a side that is not welcome again.
    pub fn refuse(&self, reason: &str) {
        self.shared.wire.close(CloseCode::Refused, reason);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(acceptor) = self.acceptor.get() {
            acceptor.task.abort();
        }
    }
}

async fn run_acceptor(wire: Wire, streams: mpsc::Sender<(u8, Duplex)>) {
    let mut opening = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            Some(_) = opening.join_next() => {}
            stream = wire.accept_bi() => {
                let Ok((sender, mut receiver)) = stream else { return };
                let streams = streams.clone();
                // The other side can hold `Options::streams_max` of these open.
                opening.spawn(async move {
                    let first = timeout(KIND_TIMEOUT, link::first_byte(&mut receiver)).await;
                    if let Ok(Ok(Some((kind, rest)))) = first {
                        let duplex = Duplex::new(sender, receiver, Frames::new(rest));
                        let _ = streams.send((kind, duplex)).await;
                    }
                });
            }
        }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("id", &self.id())
            .field("identity", &self.identity().to_string())
            .field("remote_addr", &self.remote_addr())
            .finish()
    }
}
