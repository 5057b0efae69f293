//! The network between the nodes: every datagram of theirs passes here, where each direction of each
//! pair can be cut on its own. Needs no privileges, unlike a firewall.

use std::{
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
