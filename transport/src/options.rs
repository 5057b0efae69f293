//! The transport's settings, with defaults for each door. Every limit is met by waiting or by a
//! refusal that says so, never by growing.

use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Options {
    /// From dialling to being welcomed by the other side; then `Error::Timeout`.
    pub connect_timeout: Duration,
    /// How long an incoming connection may take to prove itself; then it is dropped.
    pub handshake_timeout: Duration,
    /// Silence after which a connection is closed.
    pub idle_timeout: Duration,
    /// How often a quiet connection says that it is there; a third of `idle_timeout` or less.
    pub keep_alive: Duration,
    /// Bytes that may wait in a link for a slow reader; then `SendError::Full`.
    pub queue_bytes_max: usize,
    /// Bytes of one stream that the other side may send ahead of its reader.
    pub stream_window_bytes: u32,
    /// The same for all streams of a connection together.
    pub connection_window_bytes: u32,
    /// Bytes of a connection that may be sent and not yet acknowledged; then writes wait.
    pub send_window_bytes: u64,
    /// Bidirectional streams the other side may hold open at once; its next `open` waits.
    pub streams_max: u32,
    /// Frames over 64 KiB that a link receives at once, finished but unread ones included; the
    /// next one waits at its sender.
    pub big_frames_max: u32,
    /// Incoming handshakes in flight; the next one is refused.
    pub handshakes_max: usize,
    /// Open connections of an endpoint; the next incoming one is refused.
    pub connections_max: usize,
    /// The round trip assumed before one is measured: decides how soon a lost first packet is
    /// sent again.
    pub initial_rtt: Duration,
    /// The socket's receive buffer, in bytes, as far as the kernel allows it.
    pub receive_buffer_bytes: usize,
}

impl Options {
    /// Between nodes. The idle timeout is one election timeout: after a one-way loss the deaf side's
    /// connection must die soon enough for an election to succeed.
    pub fn peer() -> Self {
        let idle_timeout = Duration::from_millis(1_200);
        Self {
            connect_timeout: Duration::from_secs(2),
            idle_timeout,
            keep_alive: idle_timeout / 3,
            stream_window_bytes: 16 << 20,
            connection_window_bytes: 64 << 20,
            send_window_bytes: 64 << 20,
            streams_max: 256,
            big_frames_max: 8,
            ..Self::client()
        }
    }

    /// Between clients and nodes.
    pub fn client() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(4),
            keep_alive: Duration::from_millis(1_300),
            queue_bytes_max: 16 << 20,
            stream_window_bytes: 2 << 20,
            connection_window_bytes: 8 << 20,
            send_window_bytes: 8 << 20,
            streams_max: 64,
            big_frames_max: 4,
            handshakes_max: 256,
            connections_max: 20_000,
            initial_rtt: Duration::from_millis(10),
            receive_buffer_bytes: 4 << 20,
        }
    }
}
