//! Ports of loopback, for nodes that share this machine with whatever else runs on it.

use std::{
    io,
    net::{Ipv4Addr, TcpListener, UdpSocket},
    ops::Range,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    sync::{
        OnceLock,
        atomic::{AtomicU16, Ordering},
    },
};

use crate::layout::PORT_STEP;

/// A node's ports follow each other: HTTP, clients, peers.
const PORTS_OF_A_NODE: u16 = 3;
/// Below what systems hand out for outgoing connections (from 32,768 on): such a port may be taken between a
/// node's end and its next start.
const STRETCHES: Range<u16> = 10_000..32_000;
const STRETCH: u16 = 400;
const BLOCKS: u16 = STRETCH / PORT_STEP;

/// The first free port of each of so many nodes from `first` on, [`PORT_STEP`] apart; and those that
/// were passed over since they are taken.
pub fn free(first: u16, nodes: usize) -> Option<(Vec<u16>, Vec<u16>)> {
    let (mut found, mut taken) = (Vec::new(), Vec::new());
    let mut port = first;
    while found.len() < nodes {
        let end = port.checked_add(PORTS_OF_A_NODE)?;
        if (port..end).all(is_free) {
            found.push(port)
        } else {
            taken.push(port)
        }
        port = port.checked_add(PORT_STEP)?;
    }
    Some((found, taken))
}

fn is_free(port: u16) -> bool {
    let at = (Ipv4Addr::LOCALHOST, port);
    TcpListener::bind(at).is_ok() && UdpSocket::bind(at).is_ok()
}

/// Ports that are this process's as long as it lives, for clusters that it starts, stops and starts
/// again. Processes that ask in the same way never get the same ones.
#[derive(Debug)]
pub struct Stretch {
    first: u16,
    taken: AtomicU16,
    /// A name that one process of this machine can have, and that is free again when it ends.
    _held: UnixListener,
}

impl Stretch {
    /// Fails when every stretch is another process's.
    pub fn of_this_process() -> io::Result<&'static Self> {
        static OURS: OnceLock<Result<Stretch, io::ErrorKind>> = OnceLock::new();
        OURS.get_or_init(|| Self::claim().map_err(|error| error.kind()))
            .as_ref()
            .map_err(|kind| (*kind).into())
    }

    fn claim() -> io::Result<Self> {
        for first in STRETCHES.step_by(STRETCH.into()) {
            let name = SocketAddr::from_abstract_name(format!("agent-reach-ports-{first}"))?;
            match UnixListener::bind_addr(&name) {
                Ok(held) => {
                    return Ok(Self { first, taken: AtomicU16::new(0), _held: held });
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }

    /// The first of [`PORT_STEP`] ports that nobody uses now: those that were not given out before, then
    /// those that were given out longest ago.
    pub fn take(&self) -> io::Result<u16> {
        for _ in 0..BLOCKS {
            let nth = self.taken.fetch_add(1, Ordering::Relaxed) % BLOCKS;
            let first = self.first + nth * PORT_STEP;
            if (first..first + PORT_STEP).all(is_free) {
                return Ok(first);
            }
        }
        Err(io::ErrorKind::AddrInUse.into())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ports_that_are_taken_are_passed_over_and_named() {
        let stretch = Stretch::of_this_process().unwrap();
        let first = stretch.take().unwrap();
        assert_eq!(stretch.take().unwrap(), first + PORT_STEP);
        assert_eq!(free(first, 1), Some((vec![first], vec![])));
        // A node's HTTP door is TCP, its others are UDP.
        let http = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).unwrap();
        assert_eq!(free(first, 1), Some((vec![first + PORT_STEP], vec![first])));
        drop(http);
        let _peers = UdpSocket::bind((Ipv4Addr::LOCALHOST, first + 2)).unwrap();
        assert_eq!(free(first, 1), Some((vec![first + PORT_STEP], vec![first])));
        assert_eq!(free(u16::MAX - 1, 1), None);
    }

    #[test]
    fn two_that_ask_have_no_port_in_common() {
        let (one, other) = (Stretch::claim().unwrap(), Stretch::claim().unwrap());
        let mut given = BTreeSet::new();
        for _ in 0..BLOCKS / 2 {
            for stretch in [&one, &other] {
                assert!(given.insert(stretch.take().unwrap()), "given twice: {given:?}");
            }
        }
        // All were given out once: those that are free again come round.
        let again = (0..BLOCKS).map(|_| one.take().unwrap()).find(|port| given.contains(port));
        assert!(again.is_some(), "{given:?}");
    }
}
