//! What streams and links promise: every frame whole, small ones in order, bounded memory, an end
//! that both sides see.

mod support;

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use reach_protocol::limits::FRAME_MAX;
use reach_transport::{Door, Error, LinkTx, Options, SendError};
use support::*;

const KIB: usize = 1024;
const SIZES: [usize; 7] = [0, 1, 1000, 64 * KIB, 64 * KIB + 1, KIB * KIB, FRAME_MAX];

async fn pair() -> Pair {
    Cluster::new().pair(Options::client(), Options::client()).await
}

/// A frame of `size` bytes that tells its place.
fn body(size: usize, seed: u8) -> Bytes {
    (0..size).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect::<Vec<_>>().into()
}

/// Sends as a patient caller does: a full queue is waited for.
async fn send_all(tx: &LinkTx, frames: impl IntoIterator<Item = Bytes>) {
    for frame in frames {
        while tx.send(frame.clone()) == Err(SendError::Full) {
            tokio::task::yield_now().await;
        }
    }
}

/// Sends until the link stays full although whatever could move has had the time of several round
/// trips on another stream. Returns how many frames were taken.
async fn fill(pair: &Pair, tx: &LinkTx, frame: impl Fn(u32) -> Bytes) -> u32 {
    let server = pair.server.clone();
    let echo = tokio::spawn(async move {
        let (_, mut duplex) = server.accept().await.unwrap();
        while let Some(frame) = duplex.rx.recv().await.unwrap() {
            duplex.tx.send(frame).await.unwrap();
        }
    });
    let mut probe = pair.client.open(0).await.unwrap();
    let (mut sent, mut still) = (0, 0);
    while still < 20 {
        match tx.send(frame(sent)) {
            Ok(()) => (sent, still) = (sent + 1, 0),
            Err(SendError::Full) => {
                still += 1;
                probe.tx.send(Bytes::from_static(b"probe")).await.unwrap();
                probe.rx.recv().await.unwrap().unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
    probe.tx.finish().await.unwrap();
    echo.await.unwrap();
    sent
}

#[tokio::test]
async fn frames_of_all_sizes_pass_a_stream() {
    let pair = pair().await;
    let echo = tokio::spawn(async move {
        let (kind, mut duplex) = pair.server.accept().await.unwrap();
        assert_eq!(kind, 7);
        while let Some(frame) = duplex.rx.recv().await.unwrap() {
            duplex.tx.send(frame).await.unwrap();
        }
        duplex.tx.finish().await.unwrap();
        duplex.tx.delivered().await.unwrap();
    });
    within(async {
        let mut duplex = pair.client.open(7).await.unwrap();
        for (i, size) in SIZES.into_iter().enumerate() {
            let sent = body(size, i as u8);
            // Both directions at once: a large frame does not fit the windows.
            let (sending, got) = tokio::join!(duplex.tx.send(sent.clone()), duplex.rx.recv());
            sending.unwrap();
            assert_eq!(got.unwrap().unwrap(), sent, "{size} bytes");
        }
        duplex.tx.finish().await.unwrap();
        assert_eq!(duplex.rx.recv().await, Ok(None));
        let too_large = duplex.tx.send(body(FRAME_MAX + 1, 0)).await;
        assert_eq!(too_large, Err(Error::FrameTooLarge { bytes: FRAME_MAX + 1, max: FRAME_MAX }));
        echo.await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn frames_of_all_sizes_pass_a_link() {
    let pair = pair().await;
    let (tx, _rx) = pair.client.link();
    let (_tx, mut rx) = pair.server.link();
    within(async {
        for (i, size) in SIZES.into_iter().enumerate() {
            tx.send(body(size, i as u8)).unwrap();
            assert_eq!(rx.recv().await.unwrap(), body(size, i as u8), "{size} bytes");
        }
        assert_eq!(tx.send(body(FRAME_MAX + 1, 0)), Err(SendError::TooLarge));
    })
    .await;
}

#[tokio::test]
async fn small_frames_keep_their_order_in_both_directions() {
    const COUNT: u32 = 20_000;
    let pair = pair().await;
    let (client_tx, mut client_rx) = pair.client.link();
    let (server_tx, mut server_rx) = pair.server.link();
    let numbered = || (0..COUNT).map(|i| Bytes::from(i.to_be_bytes().repeat(1 + i as usize % 50)));
    let client = async {
        send_all(&client_tx, numbered()).await;
        for frame in numbered() {
            assert_eq!(client_rx.recv().await.unwrap(), frame);
        }
    };
    let server = async {
        send_all(&server_tx, numbered()).await;
        for frame in numbered() {
            assert_eq!(server_rx.recv().await.unwrap(), frame);
        }
    };
    within(async { tokio::join!(client, server) }).await;
}

#[tokio::test]
async fn many_big_frames_at_once_all_arrive_and_hold_up_no_small_one() {
    const COUNT: usize = 100;
    let pair = pair().await;
    let (tx, _rx) = pair.client.link();
    let (_tx, mut rx) = pair.server.link();
    let sending = async {
        send_all(&tx, (0..COUNT).map(|i| body(300 * KIB + i, i as u8))).await;
        tx.send(Bytes::from_static(b"last")).unwrap();
    };
    let receiving = async {
        let mut missing: BTreeSet<usize> = (0..COUNT).collect();
        let mut last = false;
        while !missing.is_empty() || !last {
            let frame = rx.recv().await.unwrap();
            if frame == "last" {
                last = true;
                continue;
            }
            let i = frame.len() - 300 * KIB;
            assert_eq!(frame, body(300 * KIB + i, i as u8));
            assert!(missing.remove(&i), "frame {i} came twice");
        }
    };
    within(async { tokio::join!(sending, receiving) }).await;
}

#[tokio::test]
async fn a_reader_that_stops_stops_the_sender_within_its_bounds() {
    let options = || Options { queue_bytes_max: 1 << 20, ..Options::client() };
    let pair = Cluster::new().pair(options(), options()).await;
    let (tx, _rx) = pair.client.link();
    let (_tx, mut rx) = pair.server.link();
    let frame = |i: u32| Bytes::from(i.to_be_bytes().repeat(2_500));
    let sent = within(fill(&pair, &tx, frame)).await;
    assert!(tx.queued_bytes() <= 1 << 20);
    // The queue, the stream's window, and what the writer has in its hands.
    let bound = (1 << 20) + (2 << 20) + 256 * KIB;
    assert!((sent as usize) * 10_000 <= bound, "{sent} frames were taken");

    // Once it reads again, nothing is missing.
    within(async {
        for i in 0..sent {
            assert_eq!(rx.recv().await.unwrap(), frame(i));
        }
    })
    .await;
    tx.send(frame(sent)).unwrap();
    assert_eq!(within(rx.recv()).await.unwrap(), frame(sent));
}

#[tokio::test]
async fn big_frames_that_nobody_reads_stay_at_their_sender() {
    let pair = pair().await;
    let (tx, _rx) = pair.client.link();
    let (_tx, mut rx) = pair.server.link();
    let sent = within(fill(&pair, &tx, |i| body(KIB * KIB, i as u8))).await as u8;
    // 16 MiB in the queue, 4 frames received and one more on its way, 8 MiB in the window.
    assert!((20..=31).contains(&sent), "{sent} frames were taken");
    within(async {
        let mut missing: BTreeSet<u8> = (0..sent).collect();
        while !missing.is_empty() {
            assert!(missing.remove(&rx.recv().await.unwrap()[0]));
        }
    })
    .await;
}

#[tokio::test]
async fn what_was_queued_arrives_after_the_sender_let_go() {
    let pair = pair().await;
    let (tx, _rx) = pair.client.link();
    let (_tx, mut rx) = pair.server.link();
    let twin = tx.clone();
    for i in 0..1000u32 {
        tx.send(Bytes::copy_from_slice(&i.to_be_bytes())).unwrap();
    }
    twin.send(body(200 * KIB, 3)).unwrap();
    drop((tx, twin));
    within(async {
        let (mut small, mut big) = (0u32, 0);
        while let Some(frame) = rx.recv().await {
            match frame.len() {
                4 => {
                    assert_eq!(frame, small.to_be_bytes()[..]);
                    small += 1;
                }
                _ => big += 1,
            }
        }
        assert_eq!((small, big), (1000, 1));
        assert!(!pair.client.is_closed(), "the connection goes on without this direction");
    })
    .await;
}

#[tokio::test]
async fn closing_is_seen_by_the_other_side_with_its_reason() {
    let pair = pair().await;
    let (client_tx, mut client_rx) = pair.client.link();
    let (server_tx, mut server_rx) = pair.server.link();
    pair.server.close("moved to another node");
    within(async {
        let reason = Error::Closed { reason: "moved to another node".into() };
        assert_eq!(pair.client.closed().await, reason);
        assert_eq!(pair.server.closed().await, reason);
        assert!(pair.client.is_closed() && pair.server.is_closed());
        assert_eq!(client_rx.recv().await, None);
        assert_eq!(server_rx.recv().await, None);
        assert_eq!(pair.client.open(1).await.err(), Some(reason.clone()));
        assert_eq!(pair.client.accept().await.err(), Some(reason));
        for tx in [client_tx, server_tx] {
            while tx.send(Bytes::new()) != Err(SendError::Closed) {
                tokio::task::yield_now().await;
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_connection_ends_with_its_last_holder() {
    let pair = pair().await;
    let (tx, rx) = pair.client.link();
    let second = pair.client.clone();
    drop(pair.client);
    drop(second);
    assert!(!pair.server.is_closed(), "its link holds it");
    drop((tx, rx));
    within(pair.server.closed()).await;
}

#[tokio::test]
async fn a_closed_endpoint_closes_its_connections() {
    let pair = pair().await;
    within(pair.listener.close()).await;
    let error = within(pair.client.closed()).await;
    assert_eq!(error, Error::Closed { reason: "the other side is shutting down".into() });
    assert!(within(pair.listener.accept()).await.is_none());
}

#[tokio::test]
async fn a_vanished_side_is_noticed_after_the_idle_timeout() {
    let quick = || Options {
        idle_timeout: Duration::from_millis(300),
        keep_alive: Duration::from_millis(100),
        ..Options::client()
    };
    let cluster = Cluster::new();
    let listener = cluster.server_with(Door::Client, 1, quick());
    let addr = listener.local_addr();
    // The dialer's runtime stands still: no keep-alive, no closing.
    let stop = Arc::new(AtomicBool::new(false));
    let (dialer_stop, credentials) = (stop.clone(), cluster.credentials(Door::Client, &user("ann")));
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let connection = runtime.block_on(async {
            let dialer = reach_transport::Endpoint::client(Door::Client, &credentials, quick()).unwrap();
            (dialer.connect(addr, &name("prod"), None).await.unwrap(), dialer)
        });
        while !dialer_stop.load(Ordering::Relaxed) {
            std::thread::park_timeout(Duration::from_millis(10));
        }
        drop(connection);
    });
    let accepted = within(listener.accept()).await.unwrap();
    let error = within(accepted.closed()).await;
    assert!(error.to_string().contains("nothing was heard"), "{error}");
    stop.store(true, Ordering::Relaxed);
    thread.join().unwrap();
}

#[tokio::test]
async fn a_stream_given_up_midway_ends_with_an_error() {
    let pair = pair().await;
    within(async {
        let mut duplex = pair.client.open(1).await.unwrap();
        let (_, mut other) = pair.server.accept().await.unwrap();
        // Larger than the window, and nobody reads: the send can't finish.
        let sending = duplex.tx.send(body(FRAME_MAX, 0));
        assert!(tokio::time::timeout(Duration::from_millis(50), sending).await.is_err());
        assert!(duplex.tx.send(Bytes::new()).await.is_err());
        assert!(other.rx.recv().await.is_err());
    })
    .await;
}
