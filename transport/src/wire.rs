//! One connection's streams of bytes, and what their ends mean in plain words. Everything above
//! (frames, links) is written once, over these types.

use std::{
    fmt,
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use quinn::{ConnectError, ConnectionError, ReadError, VarInt, WriteError};

use crate::{endpoint::Door, error::Error, memory, tls};

/// Why a connection is closed, as a number on the wire; the reason goes along as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CloseCode {
    Done = 0,
    /// The identity does not fit the door.
    Refused = 1,
    /// The other side broke the framing.
    Protocol = 2,
}

/// The longest reason sent or believed.
const REASON_BYTES_MAX: usize = 512;

/// From here on the error codes of QUIC are alerts of TLS.
const ALERTS: u64 = 0x100;

const REVOKED_ALERT: u64 = 0x12c;

/// The most bytes one read returns.
const READ_BYTES_MAX: usize = 256 * 1024;

#[derive(Clone)]
pub(crate) enum Wire {
    Quic {
        connection: quinn::Connection,
        /// Why this side closed it.
        own_reason: Arc<OnceLock<String>>,
    },
    Memory(memory::Side),
}

pub(crate) enum Sender {
    Quic(quinn::SendStream),
    Memory(memory::Sender),
}

pub(crate) enum Receiver {
    Quic(quinn::RecvStream),
    Memory(memory::Receiver),
}

impl Wire {
    pub(crate) fn quic(connection: quinn::Connection) -> Self {
        Self::Quic { connection, own_reason: Arc::default() }
    }

    pub(crate) async fn open_bi(&self) -> Result<(Sender, Receiver), Error> {
        match self {
            Self::Quic { connection, .. } => match connection.open_bi().await {
                Ok((tx, rx)) => Ok((Sender::Quic(tx), Receiver::Quic(rx))),
                Err(error) => Err(self.explain(&error)),
            },
            Self::Memory(side) => {
                let (tx, rx) = side.open_bi().await?;
                Ok((Sender::Memory(tx), Receiver::Memory(rx)))
            }
        }
    }

    pub(crate) async fn accept_bi(&self) -> Result<(Sender, Receiver), Error> {
        match self {
            Self::Quic { connection, .. } => match connection.accept_bi().await {
                Ok((tx, rx)) => Ok((Sender::Quic(tx), Receiver::Quic(rx))),
                Err(error) => Err(self.explain(&error)),
            },
            Self::Memory(side) => {
                let (tx, rx) = side.accept_bi().await?;
                Ok((Sender::Memory(tx), Receiver::Memory(rx)))
            }
        }
    }

    pub(crate) async fn open_uni(&self) -> Result<Sender, Error> {
        match self {
            Self::Quic { connection, .. } => {
                connection.open_uni().await.map(Sender::Quic).map_err(|error| self.explain(&error))
            }
            Self::Memory(side) => side.open_uni().await.map(Sender::Memory),
        }
    }

    pub(crate) async fn accept_uni(&self) -> Result<Receiver, Error> {
        match self {
            Self::Quic { connection, .. } => {
                connection.accept_uni().await.map(Receiver::Quic).map_err(|error| self.explain(&error))
            }
            Self::Memory(side) => side.accept_uni().await.map(Receiver::Memory),
        }
    }

    /// At once: what is queued or under way is lost. The first reason stays.
    pub(crate) fn close(&self, code: CloseCode, reason: &str) {
        let reason = cut(reason);
        match self {
            Self::Quic { connection, own_reason } => {
                // quinn would take this for the reason even after the other side has closed.
                if connection.close_reason().is_some() {
                    return;
                }
                own_reason.get_or_init(|| reason.to_owned());
                connection.close(VarInt::from_u32(code as u32), reason.as_bytes());
            }
            Self::Memory(side) => side.close(reason),
        }
    }

    pub(crate) async fn closed(&self) -> Error {
        match self {
            Self::Quic { connection, .. } => {
                let error = connection.closed().await;
                self.explain(&error)
            }
            Self::Memory(side) => side.closed().await,
        }
    }

    pub(crate) fn close_reason(&self) -> Option<Error> {
        match self {
            Self::Quic { connection, .. } => connection.close_reason().map(|error| self.explain(&error)),
            Self::Memory(side) => side.close_reason(),
        }
    }

    pub(crate) fn remote_addr(&self) -> SocketAddr {
        match self {
            Self::Quic { connection, .. } => canonical(connection.remote_address()),
            Self::Memory(side) => side.remote_addr(),
        }
    }

    pub(crate) fn rtt(&self) -> Duration {
        match self {
            Self::Quic { connection, .. } => connection.rtt(),
            Self::Memory(_) => Duration::ZERO,
        }
    }

    fn explain(&self, error: &ConnectionError) -> Error {
        match (self, error) {
            (Self::Quic { own_reason, .. }, ConnectionError::LocallyClosed) => {
                Error::closed(own_reason.get().map_or("closed on this side", String::as_str))
            }
            _ => Error::closed(sentence(error, None)),
        }
    }
}

impl Sender {
    /// Waits while the other side does not read. A future dropped midway may have written a part.
    pub(crate) async fn write(&mut self, bytes: Bytes) -> Result<(), Error> {
        match self {
            Self::Quic(stream) => stream.write_chunk(bytes).await.map_err(|error| match error {
                WriteError::ConnectionLost(error) => Error::closed(sentence(&error, None)),
                WriteError::Stopped(_) => Error::closed("the other side stopped reading this stream"),
                WriteError::ClosedStream => Error::closed("this stream is finished"),
                WriteError::ZeroRttRejected => Error::closed("early data was rejected"),
            }),
            Self::Memory(stream) => stream.write(bytes).await,
        }
    }

    /// Nothing more will be written.
    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        match self {
            Self::Quic(stream) => {
                stream.finish().map_err(|_| Error::closed("this stream is finished or was given up"))
            }
            Self::Memory(stream) => stream.finish(),
        }
    }

    /// Waits until the other side has everything, or does not want it.
    pub(crate) async fn delivered(&mut self) -> Result<(), Error> {
        match self {
            Self::Quic(stream) => match stream.stopped().await {
                Ok(None) => Ok(()),
                Ok(Some(_)) => Err(Error::closed("the other side stopped reading this stream")),
                Err(error) => Err(Error::closed(error.to_string())),
            },
            Self::Memory(stream) => stream.delivered().await,
        }
    }

    /// Gives the stream up: the other side gets an error instead of an end.
    pub(crate) fn abandon(&mut self) {
        match self {
            Self::Quic(stream) => drop(stream.reset(VarInt::from_u32(CloseCode::Done as u32))),
            Self::Memory(stream) => stream.abandon(),
        }
    }
}

impl Receiver {
    /// Some bytes, or none at the stream's end. Cancel-safe.
    pub(crate) async fn read(&mut self) -> Result<Option<Bytes>, Error> {
        match self {
            Self::Quic(stream) => match stream.read_chunk(READ_BYTES_MAX, true).await {
                Ok(chunk) => Ok(chunk.map(|chunk| chunk.bytes)),
                Err(ReadError::ConnectionLost(error)) => Err(Error::closed(sentence(&error, None))),
                Err(ReadError::Reset(_)) => Err(Error::closed("the other side gave this stream up")),
                Err(error) => Err(Error::closed(error.to_string())),
            },
            Self::Memory(stream) => stream.read().await,
        }
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("remote", &self.remote_addr()).finish_non_exhaustive()
    }
}

/// An IPv4 address that came in over a dual-stack socket, as itself.
pub(crate) fn canonical(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

/// A failed dial or handshake at `door`.
pub(crate) fn handshake_error(addr: SocketAddr, door: Door, error: &ConnectionError) -> Error {
    match error {
        ConnectionError::TimedOut => Error::Timeout { addr, what: "the handshake" },
        ConnectionError::ConnectionClosed(close) if u64::from(close.error_code) == REVOKED_ALERT => {
            Error::Revoked { addr, reason: sentence(error, Some(door)) }
        }
        error if passes(error) => Error::Unavailable { addr, reason: sentence(error, Some(door)) },
        _ => Error::Handshake { addr, reason: sentence(error, Some(door)) },
    }
}

/// Whether the other side did not judge us at all: it is full, going, or was started anew.
fn passes(error: &ConnectionError) -> bool {
    match error {
        ConnectionError::ConnectionClosed(close) => u64::from(close.error_code) < ALERTS,
        ConnectionError::TransportError(error) => u64::from(error.code) < ALERTS,
        ConnectionError::ApplicationClosed(close) => {
            close.error_code.into_inner() != CloseCode::Refused as u64
        }
        ConnectionError::VersionMismatch => false,
        _ => true,
    }
}

pub(crate) fn dial_error(addr: SocketAddr, error: &ConnectError) -> Error {
    let reason = match error {
        ConnectError::EndpointStopping => "this endpoint is closed".into(),
        ConnectError::InvalidRemoteAddress(_) => {
            "this address can't be reached from an endpoint of the other address family".into()
        }
        error => error.to_string(),
    };
    Error::Unavailable { addr, reason }
}

fn sentence(error: &ConnectionError, door: Option<Door>) -> String {
    match error {
        ConnectionError::TimedOut => "nothing was heard from the other side for too long".into(),
        ConnectionError::LocallyClosed => "closed on this side".into(),
        ConnectionError::Reset => "the other side has restarted and does not know this connection".into(),
        ConnectionError::CidsExhausted => "too many connections on this endpoint".into(),
        ConnectionError::VersionMismatch => "no Agent-Reach port: it speaks another version of QUIC".into(),
        ConnectionError::ApplicationClosed(close) if close.reason.is_empty() => {
            "the other side has gone".into()
        }
        ConnectionError::ApplicationClosed(close) => printable(&close.reason),
        ConnectionError::TransportError(error) => {
            spoken(error.code.into(), &error.reason, door).unwrap_or_else(|| error.to_string())
        }
        ConnectionError::ConnectionClosed(close) => {
            let reason = printable(&close.reason);
            spoken(close.error_code.into(), &reason, door)
                .unwrap_or_else(|| format!("the other side closed it ({})", close.error_code))
        }
    }
}

/// Says in words what a QUIC error code, or the TLS alert in it, means between our doors.
fn spoken(code: u64, reason: &str, door: Option<Door>) -> Option<String> {
    const CONNECTION_REFUSED: u64 = 2;
    if code >= ALERTS
        && let Some(sentence) = tls::refusal(reason)
    {
        return Some(sentence.to_owned());
    }
    let what = door.map_or("this port", Door::name);
    let text = match code {
        CONNECTION_REFUSED => {
            "it takes no new connections now, it is at its limit or shutting down: try again, or another node"
                .into()
        }
        0x12a | 0x12e => "the other side can't read or does not accept the certificate".into(),
        0x12b => "the certificate was not issued for this use".into(),
        REVOKED_ALERT => tls::REVOKED.into(),
        0x12d => "the certificate is out of date for the other side: check both clocks".into(),
        0x130 => "the certificate is not signed by the CA that the other side trusts".into(),
        0x133 => "the other side can't verify the certificate's signature".into(),
        0x146 => "the other side has no TLS 1.3".into(),
        0x174 => "a certificate is needed and none was given".into(),
        0x178 => {
            format!("that is no port for {what}: check the address, clients and peers have a port each")
        }
        _ => return None,
    };
    Some(text)
}

fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(REASON_BYTES_MAX)]);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn cut(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}
