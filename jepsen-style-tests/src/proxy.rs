//! The network between the nodes, and between them and their clients: every datagram passes here, where
//! each direction of each pair of nodes can be cut on its own, and all clients at once. Needs no
//! privileges, unlike a firewall.

use std::{
    collections::{HashMap, hash_map::Entry},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use tokio::{net::UdpSocket, task::JoinSet};

/// Larger than any datagram on loopback.
const DATAGRAM_MAX: usize = 65_535;

/// Nodes are counted from 0 here.
#[derive(Debug)]
pub struct Proxy {
    cuts: Arc<Cuts>,
    /// Ends with the proxy.
    _tasks: JoinSet<()>,
}

#[derive(Debug)]
struct Cuts {
    nodes: usize,
    cut: Vec<AtomicBool>,
    dropped: AtomicU64,
}

impl Cuts {
    fn at(&self, from: usize, to: usize) -> &AtomicBool {
        &self.cut[from * self.nodes + to]
    }

    fn passes(&self, from: usize, to: usize) -> bool {
        let cut = self.at(from, to).load(Ordering::Relaxed);
        self.dropped.fetch_add(u64::from(cut), Ordering::Relaxed);
        !cut
    }
}

impl Proxy {
    /// `doors` are where the nodes are dialled, `real` where they listen and dial from.
    pub async fn start(doors: &[SocketAddr], real: &[SocketAddr]) -> std::io::Result<Self> {
        let nodes = real.len();
        let cut = (0..nodes * nodes).map(|_| AtomicBool::new(false)).collect();
        let cuts = Arc::new(Cuts { nodes, cut, dropped: AtomicU64::new(0) });
        let mut tasks = JoinSet::new();
        for (to, door) in doors.iter().enumerate() {
            let door = Arc::new(UdpSocket::bind(door).await?);
            // A socket for each sender, so that the answers find their way back.
            let mut ways = Vec::new();
            for (from, sender) in real.iter().enumerate() {
                let way = Arc::new(UdpSocket::bind("127.0.0.1:0").await?);
                way.connect(real[to]).await?;
                tasks.spawn(back(cuts.clone(), way.clone(), door.clone(), (to, from), *sender));
                ways.push(way);
            }
            tasks.spawn(forth(cuts.clone(), door, ways, to, real.to_vec()));
        }
        Ok(Self { cuts, _tasks: tasks })
    }

    /// Cuts one direction, or joins it again.
    pub fn cut(&self, from: usize, to: usize, cut: bool) {
        self.cuts.at(from, to).store(cut, Ordering::Relaxed);
    }

    /// Nobody hears `node` and it hears nobody.
    pub fn isolate(&self, node: usize) {
        for other in (0..self.cuts.nodes).filter(|other| *other != node) {
            self.cut(node, other, true);
            self.cut(other, node, true);
        }
    }

    pub fn heal(&self) {
        self.cuts.cut.iter().for_each(|cut| cut.store(false, Ordering::Relaxed));
    }

    /// Datagrams that a cut took so far.
    pub fn dropped(&self) -> u64 {
        self.cuts.dropped.load(Ordering::Relaxed)
    }
}

async fn forth(
    cuts: Arc<Cuts>,
    door: Arc<UdpSocket>,
    ways: Vec<Arc<UdpSocket>>,
    to: usize,
    real: Vec<SocketAddr>,
) {
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        // Errors here are what earlier datagrams met, such as a node that does not run.
        let Ok((bytes, sender)) = door.recv_from(&mut buffer).await else { continue };
        if let Some(from) = real.iter().position(|addr| *addr == sender)
            && cuts.passes(from, to)
        {
            let _ = ways[from].send(&buffer[..bytes]).await;
        }
    }
}

async fn back(
    cuts: Arc<Cuts>,
    way: Arc<UdpSocket>,
    door: Arc<UdpSocket>,
    (from, to): (usize, usize),
    sender: SocketAddr,
) {
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let Ok(bytes) = way.recv(&mut buffer).await else { continue };
        if cuts.passes(from, to) {
            let _ = door.send_to(&buffer[..bytes], sender).await;
        }
    }
}

/// The nodes' doors for clients. Clients are told apart by where they send from, which nobody knows
/// before they do.
#[derive(Debug)]
pub struct Doors {
    real: Vec<SocketAddr>,
    cut: Arc<AtomicBool>,
    _tasks: JoinSet<()>,
}

impl Doors {
    /// As of [`Proxy::start`].
    pub async fn start(doors: &[SocketAddr], real: &[SocketAddr]) -> std::io::Result<Self> {
        let cut = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for (door, real) in doors.iter().zip(real) {
            tasks.spawn(admit(cut.clone(), Arc::new(UdpSocket::bind(door).await?), *real));
        }
        Ok(Self { real: real.to_vec(), cut, _tasks: tasks })
    }

    /// Whoever came by a door hears nothing from behind it and is not heard there, or is again.
    pub fn cut(&self, cut: bool) {
        self.cut.store(cut, Ordering::Relaxed);
    }

    /// Where the nodes listen: past the doors, for those who are never cut.
    pub fn real(&self) -> &[SocketAddr] {
        &self.real
    }
}

/// One door, with a socket for each client, so that the answers find their way back.
async fn admit(cut: Arc<AtomicBool>, door: Arc<UdpSocket>, real: SocketAddr) {
    let mut ways: HashMap<SocketAddr, Arc<UdpSocket>> = HashMap::new();
    let mut backs = JoinSet::new();
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let Ok((bytes, client)) = door.recv_from(&mut buffer).await else { continue };
        if cut.load(Ordering::Relaxed) {
            continue;
        }
        if let Entry::Vacant(unknown) = ways.entry(client) {
            let Ok(way) = UdpSocket::bind("127.0.0.1:0").await else { continue };
            if way.connect(real).await.is_err() {
                continue;
            }
            let way = Arc::new(way);
            backs.spawn(answer(cut.clone(), way.clone(), door.clone(), client));
            unknown.insert(way);
        }
        let _ = ways[&client].send(&buffer[..bytes]).await;
    }
}

async fn answer(cut: Arc<AtomicBool>, way: Arc<UdpSocket>, door: Arc<UdpSocket>, client: SocketAddr) {
    let mut buffer = vec![0; DATAGRAM_MAX];
    loop {
        let Ok(bytes) = way.recv(&mut buffer).await else { continue };
        if !cut.load(Ordering::Relaxed) {
            let _ = door.send_to(&buffer[..bytes], client).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn heard(socket: &UdpSocket) -> Option<(u8, SocketAddr)> {
        let mut buffer = [0; 8];
        let heard = tokio::time::timeout(Duration::from_millis(500), socket.recv_from(&mut buffer)).await;
        heard.ok().map(|heard| (buffer[0], heard.expect("loopback works").1))
    }

    #[tokio::test]
    async fn clients_are_cut_off_together_and_told_apart() {
        let socket = async || UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (node, one, other) = (socket().await, socket().await, socket().await);
        let door = socket().await.local_addr().unwrap();
        let doors = Doors::start(&[door], &[node.local_addr().unwrap()]).await.unwrap();

        one.send_to(&[1], door).await.unwrap();
        let (_, way_to_one) = heard(&node).await.expect("it passes");
        other.send_to(&[2], door).await.unwrap();
        let (_, way_to_other) = heard(&node).await.expect("it passes");
        node.send_to(&[3], way_to_one).await.unwrap();
        node.send_to(&[4], way_to_other).await.unwrap();
        assert_eq!((heard(&one).await, heard(&other).await), (Some((3, door)), Some((4, door))));

        doors.cut(true);
        one.send_to(&[5], door).await.unwrap();
        node.send_to(&[6], way_to_one).await.unwrap();
        assert_eq!((heard(&node).await, heard(&one).await), (None, None));
        doors.cut(false);
        one.send_to(&[7], door).await.unwrap();
        assert_eq!(heard(&node).await, Some((7, way_to_one)), "the same way as before");
    }

    #[tokio::test]
    async fn each_direction_is_cut_on_its_own() {
        let node = async || UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (a, b) = (node().await, node().await);
        let doors = [node().await.local_addr().unwrap(), node().await.local_addr().unwrap()];
        let real = [a.local_addr().unwrap(), b.local_addr().unwrap()];
        let proxy = Proxy::start(&doors, &real).await.unwrap();

        a.send_to(&[1], doors[1]).await.unwrap();
        let (byte, way) = heard(&b).await.expect("it passes");
        assert_eq!(byte, 1);
        b.send_to(&[2], way).await.unwrap();
        assert_eq!(heard(&a).await, Some((2, doors[1])), "the answer comes from the door that was dialled");

        proxy.cut(0, 1, true);
        a.send_to(&[3], doors[1]).await.unwrap();
        assert_eq!(heard(&b).await, None);
        b.send_to(&[4], way).await.unwrap();
        assert_eq!(heard(&a).await, Some((4, doors[1])), "the other direction is open");
        assert_eq!(proxy.dropped(), 1);

        proxy.isolate(1);
        b.send_to(&[5], doors[0]).await.unwrap();
        assert_eq!(heard(&a).await, None);
        proxy.heal();
        b.send_to(&[6], doors[0]).await.unwrap();
        assert_eq!(heard(&a).await.map(|(byte, _)| byte), Some(6));
    }
}
