//! Bytes that no one of ours would send: the process stays up, nothing large is allocated, and who
//! sent them is cut off with a reason. Any panic in any task fails these tests.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};

use reach_protocol::limits::FRAME_MAX;
use reach_transport::{Connection, Door, Endpoint};
use support::*;

const ALPN: &[u8] = b"agent-reach-client/1";

static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            print(info);
        }));
    });
}

/// A small generator of its own, so that a failing seed can be run again.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn bytes(&mut self, bytes_max: u64) -> Vec<u8> {
        (0..self.next() % bytes_max).map(|_| self.next() as u8).collect()
    }
}

/// A stranger with a good certificate, and the server's side of its connection.
async fn guest(cluster: &Cluster, listener: &Endpoint) -> (quinn::Endpoint, quinn::Connection, Connection) {
    let shown = cluster.credentials(Door::Client, &user("ann"));
    let dial = stranger(listener.local_addr(), ALPN, Some(&shown));
    let (dialled, accepted) = within(async { tokio::join!(dial, listener.accept()) }).await;
    let (endpoint, connection) = dialled.unwrap();
    (endpoint, connection, accepted.unwrap())
}

#[tokio::test]
async fn a_length_over_the_limit_closes_a_link_before_its_bytes_come() {
    count_panics();
    let cluster = Cluster::new();
    let listener = cluster.server(Door::Client, 1);
    // On the main stream, and on a stream for one big frame.
    for tag in [2u8, 3] {
        let (_endpoint, raw, served) = guest(&cluster, &listener).await;
        let (_tx, mut rx) = served.link();
        let mut stream = raw.open_uni().await.unwrap();
        let mut head = vec![tag];
        head.extend((FRAME_MAX as u32 + 1).to_be_bytes());
        stream.write_all(&head).await.unwrap();
        assert_eq!(within(rx.recv()).await, None);
        let told = within(raw.closed()).await.to_string();
        assert!(told.contains(&format!("a frame of {} bytes, at most {FRAME_MAX}", FRAME_MAX + 1)), "{told}");
    }
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_length_over_the_limit_is_an_error_on_a_stream() {
    count_panics();
    let cluster = Cluster::new();
    let listener = cluster.server(Door::Client, 1);
    let (_endpoint, raw, served) = guest(&cluster, &listener).await;
    let (mut tx, _rx) = raw.open_bi().await.unwrap();
    tx.write_all(&[9, 0xff, 0xff, 0xff, 0xff]).await.unwrap();
    let (kind, mut duplex) = within(served.accept()).await.unwrap();
    assert_eq!(kind, 9);
    let error = within(duplex.rx.recv()).await.unwrap_err();
    assert!(error.to_string().contains("a frame of 4294967295 bytes"), "{error}");
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_broken_link_is_closed_rather_than_continued() {
    count_panics();
    let cluster = Cluster::new();
    let listener = cluster.server(Door::Client, 1);
    for (streams, told) in [
        (&[&[2u8, 0, 0, 0, 9, 1, 2][..]][..], "ended within a frame"),
        (&[&[3u8, 0, 0, 0, 9, 1, 2][..]][..], "ended within its frame"),
        (&[&[3u8, 0, 0, 0, 1, 1, 2][..]][..], "bytes after a stream's frame"),
        (&[&[2u8, 0, 0, 0, 0][..], &[2u8][..]][..], "a second link"),
        (&[&[77u8][..]][..], "unknown tag"),
        (&[&[][..]][..], "without a tag"),
    ] {
        let (_endpoint, raw, served) = guest(&cluster, &listener).await;
        let (_tx, mut rx) = served.link();
        for bytes in streams {
            let mut stream = raw.open_uni().await.unwrap();
            stream.write_all(bytes).await.unwrap();
            stream.finish().unwrap();
        }
        within(async { while rx.recv().await.is_some() {} }).await;
        let heard = within(raw.closed()).await.to_string();
        assert!(heard.contains(told), "{told}: {heard}");
    }
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn random_bytes_on_streams_never_panic() {
    count_panics();
    let cluster = Cluster::new();
    let listener = cluster.server(Door::Client, 1);
    for seed in 0..60 {
        println!("seed {seed}");
        let mut random = Random(seed);
        let (_endpoint, raw, served) = guest(&cluster, &listener).await;
        let (_tx, mut link) = served.link();
        let reading = tokio::spawn(async move {
            let frames = async { while link.recv().await.is_some() {} };
            let streams = async {
                while let Ok((_, mut duplex)) = served.accept().await {
                    while let Ok(Some(_)) = duplex.rx.recv().await {}
                }
            };
            tokio::join!(frames, streams);
        });
        for _ in 0..6 {
            let mut bytes = random.bytes(3_000);
            if let Some(tag) = bytes.first_mut()
                && random.next().is_multiple_of(2)
            {
                *tag = 1 + random.next() as u8 % 3;
            }
            // The other side may have closed the connection by now, which is what it should do.
            match random.next() % 2 {
                0 => {
                    let Ok(mut stream) = raw.open_uni().await else { break };
                    let _ = stream.write_all(&bytes).await;
                }
                _ => {
                    let Ok((mut stream, _rx)) = raw.open_bi().await else { break };
                    let _ = stream.write_all(&bytes).await;
                }
            }
        }
        raw.close(0u32.into(), b"");
        within(reading).await.unwrap();
    }
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn random_datagrams_leave_the_door_open() {
    count_panics();
    let cluster = Cluster::new();
    let listener = cluster.server(Door::Client, 1);
    let socket = tokio::net::UdpSocket::bind(loopback()).await.unwrap();
    let mut random = Random(1);
    for i in 0..2_000 {
        let mut datagram = random.bytes(1_400);
        // Half of them look like first packets of QUIC version 1.
        if i % 2 == 0 && datagram.len() > 1_200 {
            datagram[..6].copy_from_slice(&[0xc0, 0, 0, 0, 1, 8]);
        }
        socket.send_to(&datagram, listener.local_addr()).await.unwrap();
    }
    let (_endpoint, raw, served) = guest(&cluster, &listener).await;
    drop(raw);
    within(served.closed()).await;
    assert_eq!(PANICS.load(Ordering::Relaxed), 0);
}
