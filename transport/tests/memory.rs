//! The network in memory keeps the promises of the real one, and breaks them on order. The clock is
//! ours: it stands still while anyone has something to do.

mod support;

use std::{net::SocketAddr, time::Duration};

use bytes::Bytes;
use reach_protocol::{id::NodeId, limits::FRAME_MAX};
use reach_transport::{Connection, Door, Endpoint, Error, LinkRx, LinkTx, MemoryNetwork, Options, SendError};
use support::{agent, name, node, user, within};
use tokio::time::Instant;

fn addr(id: u64) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, id as u8], 7482))
}

struct Two {
    network: MemoryNetwork,
    endpoints: [Endpoint; 2],
    /// Node 1 dialled node 2.
    sides: [Connection; 2],
}

async fn dial(from: &Endpoint, to: &Endpoint) -> [Connection; 2] {
    let prod = name("prod");
    let (dialled, accepted) = tokio::join!(from.connect(to.local_addr(), &prod, None), to.accept());
    [dialled.unwrap(), accepted.unwrap()]
}

async fn two(seed: u64) -> Two {
    let network = MemoryNetwork::new(seed);
    let endpoints = [1, 2].map(|id| network.endpoint(addr(id), node(id)));
    let sides = dial(&endpoints[0], &endpoints[1]).await;
    Two { network, endpoints, sides }
}

fn number(i: u32) -> Bytes {
    Bytes::copy_from_slice(&i.to_be_bytes())
}

#[tokio::test(start_paused = true)]
async fn identities_are_held_against_the_same_rules() {
    let network = MemoryNetwork::new(1);
    let prod = name("prod");
    let peers = network.endpoint(addr(1), node(1));
    let clients = network.endpoint_with(addr(2), Door::Client, node(1), Options::client());
    let second = network.endpoint(addr(3), node(2));
    let ann = network.endpoint_with(addr(4), Door::Client, user("ann"), Options::client());
    let mole = network.endpoint(addr(5), agent("mole"));

    let [dialled, accepted] = dial(&second, &peers).await;
    assert_eq!((dialled.identity(), dialled.remote_addr()), (&node(1), addr(1)));
    assert_eq!((accepted.identity(), accepted.remote_addr()), (&node(2), addr(3)));
    dial(&ann, &clients).await;

    let wrong_node = second.connect(addr(1), &prod, Some(NodeId(7))).await.unwrap_err();
    assert!(matches!(wrong_node, Error::WrongPeer { .. }), "{wrong_node}");
    let wrong_cluster = second.connect(addr(1), &name("staging"), None).await.unwrap_err();
    assert!(matches!(wrong_cluster, Error::WrongCluster { .. }), "{wrong_cluster}");
    let no_node = mole.connect(addr(1), &prod, None).await.unwrap_err();
    assert!(no_node.to_string().contains("is no node"), "{no_node}");
    let wrong_door = ann.connect(addr(1), &prod, None).await.unwrap_err();
    assert!(wrong_door.to_string().contains("no port for clients"), "{wrong_door}");
    let nobody = second.connect(addr(9), &prod, None).await.unwrap_err();
    assert!(matches!(nobody, Error::Timeout { .. }), "{nobody}");
    assert_eq!(peers.refused(), 1);
}

#[tokio::test(start_paused = true)]
async fn frames_pass_links_and_streams_whatever_the_delays() {
    for seed in 0..20 {
        println!("seed {seed}");
        let Two { network, endpoints: _endpoints, sides: [a, b] } = two(seed).await;
        network.delay(Duration::from_millis(50));
        let (tx, _rx) = a.link();
        let (_tx, mut rx) = b.link();
        for i in 0..500 {
            tx.send(number(i)).unwrap();
        }
        tx.send(Bytes::from(vec![7; 3 << 20])).unwrap();
        drop(tx);
        let (mut small, mut big) = (0, 0);
        while let Some(frame) = rx.recv().await {
            match frame.len() {
                4 => {
                    assert_eq!(frame, number(small));
                    small += 1;
                }
                bytes => big += bytes,
            }
        }
        assert_eq!((small, big), (500, 3 << 20));

        let mut duplex = a.open(5).await.unwrap();
        let (kind, mut other) = b.accept().await.unwrap();
        assert_eq!(kind, 5);
        let frame = Bytes::from(vec![1; FRAME_MAX]);
        let sending = async {
            duplex.tx.send(frame.clone()).await.unwrap();
            duplex.tx.finish().await.unwrap();
            duplex.tx.delivered().await.unwrap();
        };
        let receiving = async {
            assert_eq!(other.rx.recv().await.unwrap().unwrap(), frame);
            assert_eq!(other.rx.recv().await.unwrap(), None);
        };
        tokio::join!(sending, receiving);
    }
}

#[tokio::test(start_paused = true)]
async fn a_partition_that_heals_in_time_only_delays() {
    let Two { network, endpoints: _endpoints, sides: [a, b] } = two(1).await;
    let (tx, _rx) = a.link();
    let (_tx, mut rx) = b.link();
    tx.send(number(0)).unwrap();
    assert_eq!(rx.recv().await.unwrap(), number(0));
    network.partition(addr(1), addr(2));
    tx.send(number(1)).unwrap();
    let blocked = tokio::time::timeout(Duration::from_secs(1), rx.recv()).await;
    assert!(blocked.is_err(), "nothing passes");
    network.heal();
    assert_eq!(rx.recv().await.unwrap(), number(1));
    assert!(!a.is_closed() && !b.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_partition_that_lasts_closes_both_sides_after_the_idle_timeout() {
    let Two { network, endpoints: [first, second], sides: [a, b] } = two(1).await;
    let start = Instant::now();
    network.partition(addr(1), addr(2));
    let (ours, theirs) = tokio::join!(a.closed(), b.closed());
    assert_eq!(start.elapsed().as_millis() / 10, 120, "the idle timeout of peers");
    for error in [ours, theirs] {
        assert!(error.to_string().contains("nothing was heard"), "{error}");
    }
    let cut = first.connect(addr(2), &name("prod"), None).await.unwrap_err();
    assert!(matches!(cut, Error::Timeout { .. }), "{cut}");
    network.heal();
    dial(&first, &second).await;
}

#[tokio::test(start_paused = true)]
async fn one_way_loss_kills_the_deaf_side_first() {
    let Two { network, endpoints: _endpoints, sides: [a, b] } = two(1).await;
    let (_a_tx, mut a_rx) = a.link();
    let (b_tx, mut b_rx) = b.link();
    let start = Instant::now();
    network.one_way(addr(1), addr(2));
    b_tx.send(number(1)).unwrap();
    assert_eq!(a_rx.recv().await.unwrap(), number(1), "the other direction works");
    assert_eq!(b_rx.recv().await, None);
    assert_eq!(start.elapsed().as_millis() / 10, 120);
    assert!(b.is_closed() && !a.is_closed());
    a.closed().await;
    assert_eq!(start.elapsed().as_millis() / 10, 240);
}

#[tokio::test(start_paused = true)]
async fn who_comes_back_to_a_connection_given_up_is_told_so() {
    let Two { network, endpoints: _endpoints, sides: [a, b] } = two(1).await;
    network.one_way(addr(1), addr(2));
    b.closed().await;
    network.heal();
    let error = a.closed().await;
    assert!(error.to_string().contains("does not know this connection"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_killed_node_is_missed_and_another_takes_its_address() {
    let Two { network, endpoints: [first, second], sides: [a, b] } = two(1).await;
    let start = Instant::now();
    network.kill(addr(2));
    assert!(b.is_closed(), "the dead know at once");
    assert!(second.accept().await.is_none());
    assert!(!a.is_closed());
    a.closed().await;
    assert_eq!(start.elapsed().as_millis() / 10, 120);
    let reborn = network.endpoint(addr(2), node(2));
    dial(&first, &reborn).await;
    // What is left of the old one does no harm.
    drop(second);
    dial(&first, &reborn).await;
}

#[tokio::test(start_paused = true)]
async fn closing_and_letting_go_are_seen_by_the_other_side() {
    let Two { network, endpoints: [first, second], sides: [a, b] } = two(1).await;
    a.close("moved");
    assert_eq!(b.closed().await, Error::Closed { reason: "moved".into() });
    assert_eq!(a.closed().await, Error::Closed { reason: "moved".into() });

    let [a, b] = dial(&first, &second).await;
    let (tx, rx) = a.link();
    drop(a);
    assert!(!b.is_closed(), "its link holds it");
    drop((tx, rx));
    b.closed().await;

    let [_a, b] = dial(&first, &second).await;
    first.close().await;
    assert_eq!(b.closed().await, Error::Closed { reason: "the other side is shutting down".into() });

    let third = network.endpoint(addr(3), node(3));
    let [c, d] = dial(&third, &second).await;
    assert!(!network.break_one(addr(1), addr(2)));
    assert!(network.break_one(addr(2), addr(3)));
    c.closed().await;
    d.closed().await;
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_stops_fills_the_senders_queue() {
    let Two { network: _network, endpoints: _endpoints, sides: [a, b] } = two(1).await;
    let (tx, _rx) = a.link();
    let (_tx, mut rx) = b.link();
    let frame = Bytes::from(vec![7; 10_000]);
    // 16 MiB in the window, 16 MiB in the queue; a tick of the clock lets everyone do what they can.
    let mut sent = 0;
    for _ in 0..20 {
        while tx.send(frame.clone()).is_ok() {
            sent += 1;
        }
        assert_eq!(tx.send(frame.clone()), Err(SendError::Full));
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert!((3_000..3_500).contains(&sent), "{sent} frames were taken");
    for _ in 0..sent {
        assert_eq!(rx.recv().await.unwrap(), frame);
    }
}

/// What happened on a busy link under faults, with times: equal for equal seeds.
async fn history(seed: u64) -> Vec<(u128, u32)> {
    let Two { network, endpoints: _endpoints, sides: [a, b] } = two(seed).await;
    network.delay(Duration::from_millis(20));
    let start = Instant::now();
    let (tx, _rx): (LinkTx, LinkRx) = a.link();
    let (_tx, mut rx) = b.link();
    let sending = async {
        for i in 0..200u32 {
            tx.send(Bytes::from(i.to_be_bytes().repeat(1 + 20_000 * (i as usize % 3 / 2)))).unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(tx);
    };
    let receiving = async {
        let mut seen = Vec::new();
        while let Some(frame) = rx.recv().await {
            let i = u32::from_be_bytes(frame[..4].try_into().unwrap());
            seen.push((start.elapsed().as_millis(), i));
        }
        seen
    };
    let ((), seen) = tokio::join!(sending, receiving);
    assert_eq!(seen.len(), 200);
    seen
}

#[tokio::test(start_paused = true)]
async fn an_equal_seed_gives_an_equal_history() {
    let first = within(history(7)).await;
    assert_eq!(first, within(history(7)).await);
    assert_ne!(first, within(history(8)).await);
}
