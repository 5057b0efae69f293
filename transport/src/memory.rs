//! A network within the process, for tests of many nodes without sockets: the same endpoints and
//! connections, with faults on order. Chance comes from a seed, time from tokio's clock, so a test
//! on one thread with a paused clock runs the same way every time. Identities are taken as given
//! and held against the same rules as certificates are.

mod pipe;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Duration,
};

use tokio::time::{Instant, sleep_until};

use self::pipe::Pipe;
pub(crate) use self::pipe::{Receiver, Sender, Side};
use crate::{
    connection::{Connection, Proof},
    endpoint::{Door, Endpoint, Gate, Socket, Wanted},
    error::Error,
    identity::Identity,
    options::Options,
    wire::Wire,
};

/// Faults behave as they do below QUIC: what is lost is sent again, so that a partition that heals
/// within the idle timeout only delays, and one that lasts closes the connections it cuts.
#[derive(Clone)]
pub struct MemoryNetwork {
    net: Arc<Net>,
}

pub(crate) struct Net {
    state: Mutex<State>,
}

struct State {
    random: Random,
    delay_max: Duration,
    ports: BTreeMap<SocketAddr, (u64, Arc<Gate>, Identity)>,
    /// Counts the ports, to tell one from an earlier one at its address.
    opened: u64,
    /// What the first sends to the second does not arrive.
    blocked: BTreeSet<(SocketAddr, SocketAddr)>,
    pipes: Vec<Weak<Pipe>>,
}

impl MemoryNetwork {
    pub fn new(seed: u64) -> Self {
        let state = State {
            random: Random(seed),
            delay_max: Duration::ZERO,
            ports: BTreeMap::new(),
            opened: 0,
            blocked: BTreeSet::new(),
            pipes: Vec::new(),
        };
        Self { net: Arc::new(Net { state: Mutex::new(state) }) }
    }

    /// A node's peer port: accepts at `addr`, and dials from it. It takes the place of an earlier
    /// endpoint at this address, which is killed.
    pub fn endpoint(&self, addr: SocketAddr, identity: Identity) -> Endpoint {
        self.endpoint_with(addr, Door::Peer, identity, Options::peer())
    }

    pub fn endpoint_with(
        &self,
        addr: SocketAddr,
        door: Door,
        identity: Identity,
        options: Options,
    ) -> Endpoint {
        self.kill(addr);
        let (gate, accepted) = Gate::new(door, identity.cluster.clone(), options.clone());
        let refused = gate.refused();
        let gate = Arc::new(gate);
        let mut state = self.net.lock();
        state.opened += 1;
        let port = Port {
            net: self.net.clone(),
            addr,
            number: state.opened,
            door,
            identity: identity.clone(),
            options: options.clone(),
        };
        state.ports.insert(addr, (port.number, gate, identity));
        drop(state);
        Endpoint::new(Socket::Memory(port), door, options, accepted, refused, None)
    }

    /// Nothing passes between the two, in either direction.
    pub fn partition(&self, a: SocketAddr, b: SocketAddr) {
        self.block(&[(a, b), (b, a)]);
    }

    /// What `from` sends to `to` is lost; the other direction works.
    pub fn one_way(&self, from: SocketAddr, to: SocketAddr) {
        self.block(&[(from, to)]);
    }

    /// Ends every partition and one-way loss. What was killed stays dead.
    pub fn heal(&self) {
        let mut state = self.net.lock();
        state.blocked.clear();
        state.refresh();
    }

    /// The process at `addr` is gone from one moment to the next: its own handles are closed, and
    /// the others notice when their idle timeout is over.
    pub fn kill(&self, addr: SocketAddr) {
        let mut state = self.net.lock();
        state.ports.remove(&addr);
        for pipe in state.pipes() {
            pipe.vanish(addr);
        }
    }

    /// From now on every piece of data takes up to `delay_max`, by chance. The order within a stream
    /// stays, that between streams does not.
    pub fn delay(&self, delay_max: Duration) {
        self.net.lock().delay_max = delay_max;
    }

    /// Breaks one connection between the two, chosen by chance, as if a middlebox forgot it. Says
    /// whether there was one.
    pub fn break_one(&self, a: SocketAddr, b: SocketAddr) -> bool {
        let mut state = self.net.lock();
        let between: Vec<_> =
            state.pipes().into_iter().filter(|pipe| pipe.is_between(a, b) && pipe.is_open()).collect();
        if between.is_empty() {
            return false;
        }
        let chosen = state.random.below(between.len() as u64) as usize;
        between[chosen].reset();
        true
    }

    fn block(&self, directions: &[(SocketAddr, SocketAddr)]) {
        let mut state = self.net.lock();
        state.blocked.extend(directions);
        state.refresh();
    }
}

impl Net {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under this lock")
    }

    /// When a piece of data that is sent now arrives.
    fn arrival(&self) -> Instant {
        let mut state = self.lock();
        let delay_max = state.delay_max.as_micros() as u64;
        let delay = if delay_max == 0 { 0 } else { state.random.below(delay_max + 1) };
        Instant::now() + Duration::from_micros(delay)
    }
}

impl State {
    /// Those that someone still holds.
    fn pipes(&mut self) -> Vec<Arc<Pipe>> {
        self.pipes.retain(|pipe| pipe.strong_count() > 0);
        self.pipes.iter().filter_map(Weak::upgrade).collect()
    }

    fn refresh(&mut self) {
        for pipe in self.pipes() {
            pipe.set_blocked(|from, to| self.blocked.contains(&(from, to)));
        }
    }
}

/// The socket of an endpoint in this network.
pub(crate) struct Port {
    net: Arc<Net>,
    addr: SocketAddr,
    number: u64,
    door: Door,
    identity: Identity,
    options: Options,
}

impl Port {
    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub(crate) async fn dial(&self, addr: SocketAddr, wanted: &Wanted<'_>) -> Result<(Wire, Proof), Error> {
        if !self.is_bound() {
            return Err(Error::Handshake { addr, reason: "this endpoint is closed".into() });
        }
        sleep_until(self.net.arrival()).await;
        match self.meet(addr, wanted)? {
            Some(met) => Ok(met),
            // Like a datagram into the void: nobody answers until the caller's time is up.
            None => std::future::pending().await,
        }
    }

    /// The handshake, if there is someone within reach.
    fn meet(&self, addr: SocketAddr, wanted: &Wanted<'_>) -> Result<Option<(Wire, Proof)>, Error> {
        let mut state = self.net.lock();
        let cut = [(self.addr, addr), (addr, self.addr)].iter().any(|way| state.blocked.contains(way));
        let Some((_, gate, identity)) = state.ports.get(&addr).filter(|_| !cut).cloned() else {
            return Ok(None);
        };
        let refused = |reason| Error::Handshake { addr, reason };
        if gate.door != self.door {
            return Err(refused(format!("that is no port for {}", self.door.name())));
        }
        wanted.check(addr, &identity)?;
        gate.check(&self.identity).map_err(|reason| {
            gate.note_refusal(self.addr, &reason);
            refused(reason)
        })?;
        let options = [&self.options, &gate.options];
        let (side, other, pipe) = pipe::connect(&self.net, [self.addr, addr], options);
        state.pipes.push(Arc::downgrade(&pipe));
        drop(state);
        let accepted =
            Connection::new(Wire::Memory(other), Proof::Named(self.identity.clone()), gate.options.clone());
        tokio::spawn(async move { gate.hand_over(accepted).await });
        Ok(Some((Wire::Memory(side), Proof::Named(identity))))
    }

    pub(crate) fn close(&self, reason: &str) {
        let mut state = self.net.lock();
        if self.is_bound_in(&state) {
            state.ports.remove(&self.addr);
            for pipe in state.pipes() {
                pipe.close_at(self.addr, reason);
            }
        }
    }

    fn is_bound(&self) -> bool {
        self.is_bound_in(&self.net.lock())
    }

    fn is_bound_in(&self, state: &State) -> bool {
        state.ports.get(&self.addr).is_some_and(|(number, ..)| *number == self.number)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        let mut state = self.net.lock();
        if self.is_bound_in(&state) {
            state.ports.remove(&self.addr);
        }
    }
}

/// SplitMix64: enough for faults, the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

impl fmt::Debug for MemoryNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryNetwork").finish_non_exhaustive()
    }
}
