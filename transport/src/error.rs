//! What can go wrong on the way to another process, in sentences that name the way out. The words
//! of TLS and QUIC stay in `wire` and `tls`.

use std::net::SocketAddr;

use reach_protocol::id::Name;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A certificate, key or authority that can't be used. `path` is the file, or which of the
    /// credentials it is when they came as text.
    #[error("{path}: {reason}")]
    Certificate { path: String, reason: String },
    #[error("cannot listen on {addr}: {reason}")]
    Bind { addr: SocketAddr, reason: String },
    /// The two sides did not agree on each other. Trying again helps only after something changed.
    #[error("{addr}: {reason}")]
    Handshake { addr: SocketAddr, reason: String },
    /// The other side has this side's certificate on its list: no later try will do.
    #[error("{addr}: {reason}")]
    Revoked { addr: SocketAddr, reason: String },
    /// It answered, and takes no connection just now: later, or another one may.
    #[error("{addr}: {reason}")]
    Unavailable { addr: SocketAddr, reason: String },
    #[error(
        "the certificate belongs to cluster {found}, this is cluster {expected}: check the address and the context"
    )]
    WrongCluster { expected: Name, found: Name },
    #[error("{addr} is {found}, expected {expected}: check the addresses of the nodes")]
    WrongPeer { addr: SocketAddr, expected: String, found: String },
    #[error("{addr}: no answer in time ({what})")]
    Timeout { addr: SocketAddr, what: &'static str },
    #[error("connection closed: {reason}")]
    Closed { reason: String },
    /// The frame was not sent, or not read; nothing of it was allocated.
    #[error("a frame of {bytes} bytes, at most {max} are allowed")]
    FrameTooLarge { bytes: usize, max: usize },
}

impl Error {
    /// Whether the two sides don't agree on each other, so that trying again helps only after
    /// something changed.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            Self::Certificate { .. }
                | Self::Handshake { .. }
                | Self::Revoked { .. }
                | Self::WrongCluster { .. }
                | Self::WrongPeer { .. }
        )
    }

    pub(crate) fn closed(reason: impl Into<String>) -> Self {
        Self::Closed { reason: reason.into() }
    }

    pub(crate) fn certificate(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Certificate { path: path.into(), reason: reason.into() }
    }
}

/// Why a link did not take a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("the link is closed")]
    Closed,
    /// `Options::queue_bytes_max` bytes wait already: the other side does not keep up.
    #[error("the link's queue is full")]
    Full,
    /// Above `reach_protocol::limits::FRAME_MAX`; no link takes it.
    #[error("the frame is larger than any link accepts")]
    TooLarge,
}
