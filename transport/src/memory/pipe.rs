//! One connection of the network in memory: streams with windows, silence that becomes an idle
//! timeout, and an end that each side learns in its own time.

use std::{
    collections::{BTreeMap, VecDeque},
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use super::Net;
use crate::{error::Error, options::Options};

const SILENT: &str = "nothing was heard from the other side for too long";
const RESET: &str = "the other side has restarted and does not know this connection";
const GONE: &str = "the other side has gone";
const KILLED: &str = "this process was killed";
const BROKEN: &str = "the connection was broken on its way";

pub(super) struct Pipe {
    net: Arc<Net>,
    addrs: [SocketAddr; 2],
    idle_timeout: Duration,
    /// What each side lets the other send ahead in a stream.
    windows: [usize; 2],
    /// One-way and two-way streams that each side lets the other have open.
    streams_max: [[usize; 2]; 2],
    state: Mutex<State>,
    changed: Notify,
}

const UNI: usize = 0;
const BI: usize = 1;

#[derive(Default)]
struct State {
    /// What this side sends does not arrive.
    blocked: [bool; 2],
    /// The process is gone: it neither hears nor says anything.
    vanished: [bool; 2],
    /// Since when this side has heard nothing.
    silent: [Option<Instant>; 2],
    closed: [Option<String>; 2],
    /// By number, both ways; a two-way stream is two of them.
    lanes: BTreeMap<u64, Lane>,
    lane_last: u64,
    /// Opened by the other side: when it is seen, its number, and that of the way back.
    incoming: [[VecDeque<(Instant, u64, u64)>; 2]; 2],
    /// Streams that this side has opened and that are not over.
    open: [[usize; 2]; 2],
}

struct Lane {
    opener: usize,
    /// The other direction of a two-way stream.
    back: Option<u64>,
    chunks: VecDeque<(Instant, Bytes)>,
    bytes: usize,
    last_arrival: Instant,
    finished: bool,
    abandoned: bool,
    /// The reader has seen the end.
    ended: bool,
    /// The reader has gone before the end.
    stopped: bool,
    sender_gone: bool,
    receiver_gone: bool,
}

impl Lane {
    fn is_over(&self) -> bool {
        self.ended || self.stopped
    }
}

/// Makes a connection: the dialer's side, the other one, and the pipe between them.
pub(super) fn connect(
    net: &Arc<Net>,
    addrs: [SocketAddr; 2],
    options: [&Options; 2],
) -> (Side, Side, Arc<Pipe>) {
    let pipe = Arc::new(Pipe {
        net: net.clone(),
        addrs,
        idle_timeout: options[0].idle_timeout.min(options[1].idle_timeout),
        windows: options.map(|options| options.stream_window_bytes.max(1) as usize),
        streams_max: options
            .map(|options| [options.big_frames_max.max(1) as usize + 1, options.streams_max as usize]),
        state: Mutex::default(),
        changed: Notify::new(),
    });
    let side = |which| {
        tokio::spawn(watch_silence(pipe.clone(), which));
        Side { handle: Arc::new(Handle { pipe: pipe.clone(), side: which }) }
    };
    (side(0), side(1), pipe)
}

async fn watch_silence(pipe: Arc<Pipe>, side: usize) {
    loop {
        let mut changed = std::pin::pin!(pipe.changed.notified());
        changed.as_mut().enable();
        let since = {
            let state = pipe.lock();
            if state.closed[side].is_some() {
                return;
            }
            state.silent[side]
        };
        match since {
            None => changed.await,
            Some(since) => {
                let deadline = since + pipe.idle_timeout;
                if timeout_at(deadline, changed).await.is_err() {
                    let mut state = pipe.lock();
                    if state.silent[side] == Some(since) {
                        // Without a word: the other side has to find out in the same way.
                        pipe.end(&mut state, side, SILENT, None);
                    }
                }
            }
        }
    }
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics under this lock")
    }

    pub(super) fn is_between(&self, a: SocketAddr, b: SocketAddr) -> bool {
        self.addrs == [a, b] || self.addrs == [b, a]
    }

    pub(super) fn is_open(&self) -> bool {
        self.lock().closed.iter().all(Option::is_none)
    }

    /// Ends `side` for `reason`; the other side reads `told`, if it can be told and is to be.
    fn end(&self, state: &mut State, side: usize, reason: &str, told: Option<&str>) {
        if state.closed[side].is_some() {
            return;
        }
        state.closed[side] = Some(reason.to_owned());
        let other = 1 - side;
        if state.closed[other].is_none() {
            match told {
                Some(told) if !state.blocked[side] && !state.vanished[side] => {
                    state.closed[other] = Some(told.to_owned());
                }
                _ => drop(state.silent[other].get_or_insert_with(Instant::now)),
            }
        }
        self.changed.notify_waiters();
    }

    pub(super) fn set_blocked(&self, blocked: impl Fn(SocketAddr, SocketAddr) -> bool) {
        let mut state = self.lock();
        for side in [0, 1] {
            state.blocked[side] = blocked(self.addrs[side], self.addrs[1 - side]);
        }
        for side in [0, 1] {
            let other = 1 - side;
            if state.closed[side].is_some() || state.vanished[other] {
                continue;
            }
            if state.blocked[other] {
                state.silent[side].get_or_insert_with(Instant::now);
            } else if state.closed[other].is_none() {
                state.silent[side] = None;
            } else if !state.blocked[side] {
                // It asks, and is answered by someone who knows nothing of this connection.
                self.end(&mut state, side, RESET, None);
            }
        }
        self.changed.notify_waiters();
    }

    /// The process at `addr` dies.
    pub(super) fn vanish(&self, addr: SocketAddr) {
        for side in self.sides_at(addr) {
            let mut state = self.lock();
            if state.closed[side].is_none() {
                state.vanished[side] = true;
                self.end(&mut state, side, KILLED, None);
            }
        }
    }

    pub(super) fn close_at(&self, addr: SocketAddr, reason: &str) {
        for side in self.sides_at(addr) {
            self.end(&mut self.lock(), side, reason, Some(reason));
        }
    }

    pub(super) fn reset(&self) {
        let mut state = self.lock();
        for side in [0, 1] {
            self.end(&mut state, side, BROKEN, Some(BROKEN));
        }
    }

    fn sides_at(&self, addr: SocketAddr) -> impl Iterator<Item = usize> {
        (0..2).filter(move |side| self.addrs[*side] == addr)
    }

    /// Looks at the state until `ready` has something, again after every change and at the time
    /// that `ready` asks for.
    async fn when<T>(
        &self,
        side: usize,
        mut ready: impl FnMut(&mut State) -> Result<Poll<T>, Error>,
    ) -> Result<T, Error> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let wait = {
                let mut state = self.lock();
                if let Some(reason) = &state.closed[side] {
                    return Err(Error::closed(reason.as_str()));
                }
                ready(&mut state)?
            };
            match wait {
                Poll::Ready(value) => return Ok(value),
                Poll::Changed => changed.await,
                Poll::At(at) => drop(timeout_at(at, changed).await),
            }
        }
    }
}

enum Poll<T> {
    Ready(T),
    Changed,
    At(Instant),
}

impl State {
    fn add_lane(&mut self, opener: usize) -> u64 {
        self.lane_last += 1;
        let lane = Lane {
            opener,
            back: None,
            chunks: VecDeque::new(),
            bytes: 0,
            last_arrival: Instant::now(),
            finished: false,
            abandoned: false,
            ended: false,
            stopped: false,
            sender_gone: false,
            receiver_gone: false,
        };
        self.lanes.insert(self.lane_last, lane);
        self.lane_last
    }

    fn lane(&mut self, number: u64) -> &mut Lane {
        self.lanes.get_mut(&number).expect("a lane stays while one of its ends is held")
    }

    /// After a lane's reader is through with it: makes room for another stream, if its way back is
    /// over as well.
    fn release(&mut self, number: u64) {
        let lane = self.lane(number);
        let (opener, back) = (lane.opener, lane.back);
        match back {
            None => self.open[opener][UNI] -= 1,
            Some(back) if self.lanes.get(&back).is_none_or(Lane::is_over) => self.open[opener][BI] -= 1,
            Some(_) => {}
        }
    }

    fn forget(&mut self, number: u64) {
        let lane = self.lane(number);
        if lane.sender_gone && lane.receiver_gone {
            self.lanes.remove(&number);
        }
    }
}

/// One side of a connection; it is closed when the last clone and the last of its streams are gone.
#[derive(Clone)]
pub(crate) struct Side {
    handle: Arc<Handle>,
}

struct Handle {
    pipe: Arc<Pipe>,
    side: usize,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.pipe.end(&mut self.pipe.lock(), self.side, GONE, Some(GONE));
    }
}

impl Side {
    pub(crate) async fn open_bi(&self) -> Result<(Sender, Receiver), Error> {
        let (there, back) = self.open(BI).await?;
        Ok((self.sender(there), self.receiver(back)))
    }

    pub(crate) async fn open_uni(&self) -> Result<Sender, Error> {
        let (there, _) = self.open(UNI).await?;
        Ok(self.sender(there))
    }

    pub(crate) async fn accept_bi(&self) -> Result<(Sender, Receiver), Error> {
        let (there, back) = self.accept(BI).await?;
        Ok((self.sender(back), self.receiver(there)))
    }

    pub(crate) async fn accept_uni(&self) -> Result<Receiver, Error> {
        let (there, _) = self.accept(UNI).await?;
        Ok(self.receiver(there))
    }

    /// The numbers of the lane to the other side and of the one back.
    async fn open(&self, kind: usize) -> Result<(u64, u64), Error> {
        let Handle { pipe, side } = &*self.handle;
        let (side, other) = (*side, 1 - *side);
        let arrival = pipe.net.arrival();
        let opened = pipe
            .when(side, |state| {
                if state.open[side][kind] >= pipe.streams_max[other][kind] {
                    return Ok(Poll::Changed);
                }
                state.open[side][kind] += 1;
                let there = state.add_lane(side);
                let back = if kind == BI { state.add_lane(side) } else { 0 };
                if kind == BI {
                    state.lane(there).back = Some(back);
                    state.lane(back).back = Some(there);
                }
                // In the order of their opening, as QUIC numbers them.
                let queue = &mut state.incoming[other][kind];
                let at = queue.back().map_or(arrival, |(last, ..)| arrival.max(*last));
                queue.push_back((at, there, back));
                Ok(Poll::Ready((there, back)))
            })
            .await?;
        pipe.changed.notify_waiters();
        Ok(opened)
    }

    async fn accept(&self, kind: usize) -> Result<(u64, u64), Error> {
        let Handle { pipe, side } = &*self.handle;
        let (side, other) = (*side, 1 - *side);
        pipe.when(side, |state| {
            let Some((at, there, back)) = state.incoming[side][kind].front().copied() else {
                return Ok(Poll::Changed);
            };
            if state.blocked[other] {
                return Ok(Poll::Changed);
            }
            if at > Instant::now() {
                return Ok(Poll::At(at));
            }
            state.incoming[side][kind].pop_front();
            Ok(Poll::Ready((there, back)))
        })
        .await
    }

    fn sender(&self, lane: u64) -> Sender {
        Sender { handle: self.handle.clone(), lane }
    }

    fn receiver(&self, lane: u64) -> Receiver {
        Receiver { handle: self.handle.clone(), lane }
    }

    pub(crate) fn close(&self, reason: &str) {
        let Handle { pipe, side } = &*self.handle;
        let told = if reason.is_empty() { GONE } else { reason };
        pipe.end(&mut pipe.lock(), *side, reason, Some(told));
    }

    pub(crate) async fn closed(&self) -> Error {
        let Handle { pipe, side } = &*self.handle;
        let never = pipe.when(*side, |_| Ok(Poll::<()>::Changed)).await;
        never.expect_err("only the connection's end ends this wait")
    }

    pub(crate) fn close_reason(&self) -> Option<Error> {
        let Handle { pipe, side } = &*self.handle;
        pipe.lock().closed[*side].as_deref().map(Error::closed)
    }

    pub(crate) fn remote_addr(&self) -> SocketAddr {
        self.handle.pipe.addrs[1 - self.handle.side]
    }
}

pub(crate) struct Sender {
    handle: Arc<Handle>,
    lane: u64,
}

impl Sender {
    pub(crate) async fn write(&mut self, mut bytes: Bytes) -> Result<(), Error> {
        let Handle { pipe, side } = &*self.handle;
        let window = pipe.windows[1 - *side];
        while !bytes.is_empty() {
            let arrival = pipe.net.arrival();
            pipe.when(*side, |state| {
                let lane = state.lane(self.lane);
                if lane.stopped {
                    return Err(Error::closed("the other side stopped reading this stream"));
                }
                if lane.finished || lane.abandoned {
                    return Err(Error::closed("this stream is finished"));
                }
                if lane.bytes >= window {
                    return Ok(Poll::Changed);
                }
                let part = bytes.split_to(bytes.len().min(window - lane.bytes));
                lane.bytes += part.len();
                lane.last_arrival = arrival.max(lane.last_arrival);
                lane.chunks.push_back((lane.last_arrival, part));
                Ok(Poll::Ready(()))
            })
            .await?;
            pipe.changed.notify_waiters();
        }
        Ok(())
    }

    pub(crate) fn finish(&mut self) -> Result<(), Error> {
        let pipe = &self.handle.pipe;
        let mut state = pipe.lock();
        let lane = state.lane(self.lane);
        if lane.finished || lane.abandoned || lane.stopped {
            return Err(Error::closed("this stream is finished or was given up"));
        }
        lane.finished = true;
        pipe.changed.notify_waiters();
        Ok(())
    }

    pub(crate) async fn delivered(&mut self) -> Result<(), Error> {
        let Handle { pipe, side } = &*self.handle;
        pipe.when(*side, |state| {
            let (to, from) = (state.blocked[*side], state.blocked[1 - *side]);
            let lane = state.lane(self.lane);
            if lane.stopped {
                return Err(Error::closed("the other side stopped reading this stream"));
            }
            if to || from || !lane.finished {
                return Ok(Poll::Changed);
            }
            let at = lane.last_arrival;
            if at > Instant::now() { Ok(Poll::At(at)) } else { Ok(Poll::Ready(())) }
        })
        .await
    }

    pub(crate) fn abandon(&mut self) {
        let pipe = &self.handle.pipe;
        let mut state = pipe.lock();
        let lane = state.lane(self.lane);
        if !lane.finished && !lane.is_over() {
            lane.abandoned = true;
            lane.chunks.clear();
            lane.bytes = 0;
        }
        pipe.changed.notify_waiters();
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let pipe = &self.handle.pipe;
        let mut state = pipe.lock();
        let lane = state.lane(self.lane);
        // As QUIC does it: to let go of a stream is to finish it.
        lane.finished |= !lane.abandoned;
        lane.sender_gone = true;
        state.forget(self.lane);
        pipe.changed.notify_waiters();
    }
}

pub(crate) struct Receiver {
    handle: Arc<Handle>,
    lane: u64,
}

impl Receiver {
    pub(crate) async fn read(&mut self) -> Result<Option<Bytes>, Error> {
        let Handle { pipe, side } = &*self.handle;
        let got = pipe
            .when(*side, |state| {
                let blocked = state.blocked[1 - *side];
                let lane = state.lane(self.lane);
                if lane.ended {
                    return Ok(Poll::Ready(None));
                }
                if blocked {
                    return Ok(Poll::Changed);
                }
                if let Some((at, _)) = lane.chunks.front() {
                    if *at > Instant::now() {
                        return Ok(Poll::At(*at));
                    }
                    let (_, chunk) = lane.chunks.pop_front().expect("just seen");
                    lane.bytes -= chunk.len();
                    return Ok(Poll::Ready(Some(chunk)));
                }
                if lane.abandoned {
                    return Err(Error::closed("the other side gave this stream up"));
                }
                if !lane.finished {
                    return Ok(Poll::Changed);
                }
                lane.ended = true;
                state.release(self.lane);
                Ok(Poll::Ready(None))
            })
            .await;
        pipe.changed.notify_waiters();
        got
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        let pipe = &self.handle.pipe;
        let mut state = pipe.lock();
        let lane = state.lane(self.lane);
        lane.receiver_gone = true;
        if !lane.ended {
            lane.stopped = true;
            lane.chunks.clear();
            lane.bytes = 0;
            state.release(self.lane);
        }
        state.forget(self.lane);
        pipe.changed.notify_waiters();
    }
}
