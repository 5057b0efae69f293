//! The Raft log over any sorted disk: bounds and newest entries in memory, one writer behind a
//! bounded queue.

mod queue;
mod tail;
mod writer;

use std::{
    collections::BTreeMap,
    fmt, io,
    ops::ControlFlow,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use bytes::Bytes;

pub(crate) use self::{
    queue::Queue,
    writer::{Marker, Plan},
};
use self::{
    queue::{Job, Room, Work, closed},
    tail::Tail,
    writer::Writer,
};
use crate::{
    error::{Error, Latch, damaged},
    kv::{Kv, Order},
    schema::{self, Table},
    store::{Done, LogBounds, LogStore, MetaKey},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogOptions {
    /// Newest entries kept in memory, in bytes of content; what is not yet on the disk is kept on
    /// top of it. Default 64 MiB.
    pub tail_bytes: usize,
    /// Writes and bytes that may wait for the disk; whoever comes then waits. Defaults 4,096 and
    /// 64 MiB.
    pub queue_writes: usize,
    pub queue_bytes: usize,
    /// How far the marker of acknowledged entries may lag behind. Default 100 ms.
    pub marker_every: Duration,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self {
            tail_bytes: 64 << 20,
            queue_writes: 4_096,
            queue_bytes: 64 << 20,
            marker_every: Duration::from_millis(100),
        }
    }
}

/// Who writes: a thread of the log's own, or, for a clock that only moves when nobody works, the
/// caller itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WrittenBy {
    Thread,
    Caller,
}

/// Dropping it writes what waits and ends the writer.
pub struct Log<K: Kv> {
    shared: Arc<Shared<K>>,
    /// Whoever holds it is adding a write: the order of the queue is the order of the bounds.
    order: Mutex<()>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

pub(crate) struct Shared<K: Kv> {
    disk: K,
    latch: Arc<Latch>,
    pub(crate) queue: Arc<Queue>,
    state: RwLock<State>,
    written_by: WrittenBy,
    writer: Mutex<Writer>,
}

/// The log as it is once every queued write is done.
struct State {
    bounds: LogBounds,
    /// Everything below it was purged; where an empty log begins.
    floor: u64,
    tail: Tail,
    metas: BTreeMap<MetaKey, Bytes>,
    /// Numbers the writes.
    writes: u64,
    /// Counts truncations and purges: a read of the disk that met one looks again.
    removals: u64,
}

impl<K: Kv> Log<K> {
    /// Reads where the log on `disk` stands. `marked` is what the marker says; `dir` is for errors.
    pub(crate) fn open(
        disk: K,
        (marker, marked): (Box<dyn Marker>, u64),
        latch: Arc<Latch>,
        options: LogOptions,
        written_by: WrittenBy,
        dir: &Path,
    ) -> Result<Arc<Self>, Error> {
        let (bounds, floor, metas) =
            load(&disk).map_err(Error::io(format!("the log in {}", dir.display())))?;
        if bounds.next < marked {
            let last = bounds.next.checked_sub(1);
            return Err(Error::LostTail { dir: dir.to_owned(), acknowledged: marked - 1, last });
        }
        let room = Room { writes: options.queue_writes.max(1), bytes: options.queue_bytes.max(1) };
        let shared = Arc::new(Shared {
            disk,
            latch,
            queue: Arc::new(Queue::new(room)),
            writer: Mutex::new(Writer::new(marker, options.marker_every, marked, bounds.next)),
            state: RwLock::new(State {
                bounds,
                floor,
                tail: Tail::new(options.tail_bytes),
                metas,
                writes: 0,
                removals: 0,
            }),
            written_by,
        });
        let thread = match written_by {
            WrittenBy::Caller => None,
            WrittenBy::Thread => {
                let shared = shared.clone();
                let thread = std::thread::Builder::new().name("log-writer".to_owned());
                let spawned = thread.spawn(move || Writer::run(&shared));
                Some(spawned.map_err(Error::io("starting the log's writer"))?)
            }
        };
        Ok(Arc::new(Self { shared, order: Mutex::new(()), thread: Mutex::new(thread) }))
    }

    /// Writes what waits, then refuses every further write. Returns when the writer is done.
    pub fn close(&self) {
        self.shared.queue.close();
        self.shared.write_own();
        let thread = self.thread.lock().expect(POISON).take();
        // The last handle may go in a callback, on the writer's own thread.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            thread.join().expect("a callback of the log panicked");
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared<K>> {
        &self.shared
    }

    /// Bytes of entries held in memory.
    pub fn tail_bytes(&self) -> usize {
        self.shared.state().tail.bytes()
    }

    /// Queues the write that `plan` makes of the state, which it also brings up to date.
    fn submit(&self, done: Done, plan: impl FnOnce(&mut State) -> Work) {
        let order = self.order.lock().expect(POISON);
        if self.shared.written_by == WrittenBy::Thread {
            self.shared.queue.wait_for_room();
        }
        let mut state = self.shared.state_mut();
        state.writes += 1;
        // After a failure nothing changes any more, but this write too waits for its turn to fail.
        let work = match self.shared.latch.check() {
            Ok(()) => plan(&mut state),
            Err(_) => Work::Append(Vec::new()),
        };
        let job = Job { write: state.writes, since: Instant::now(), work, done };
        drop(state);
        let refused = self.shared.queue.push(job);
        drop(order);
        match refused {
            Ok(()) => self.shared.write_own(),
            Err(job) => (job.done)(Err(closed())),
        }
    }

    fn try_read(&self, from: u64, to: u64, bytes_max: usize) -> io::Result<Vec<(u64, Bytes)>> {
        loop {
            let (from, on_disk_to, tail, removals) = {
                let state = self.shared.state();
                let (from, to) = (from.max(state.bounds.first), to.min(state.bounds.next));
                if from >= to {
                    return Ok(Vec::new());
                }
                let held = state.tail.first().unwrap_or(state.bounds.next);
                (from, held.clamp(from, to), state.tail.read(from, to, bytes_max), state.removals)
            };
            let mut entries = Vec::new();
            let mut bytes = 0usize;
            if from < on_disk_to {
                let read = self.shared.read_disk(from, on_disk_to, bytes_max);
                // What was read may be of before or after a removal: only a quiet read counts.
                if self.shared.state().removals != removals {
                    continue;
                }
                entries = read?;
                bytes = entries.iter().map(|(_, content)| content.len()).sum();
                if entries.len() as u64 != on_disk_to - from {
                    return Ok(entries);
                }
            }
            for (index, content) in tail {
                bytes = bytes.saturating_add(content.len());
                if bytes > bytes_max && !entries.is_empty() {
                    break;
                }
                entries.push((index, content));
            }
            return Ok(entries);
        }
    }
}

impl<K: Kv> LogStore for Log<K> {
    fn bounds(&self) -> LogBounds {
        self.shared.state().bounds.clone()
    }

    fn read(&self, from: u64, to: u64, bytes_max: usize) -> io::Result<Vec<(u64, Bytes)>> {
        let read = self.try_read(from, to, bytes_max);
        read.map_err(|error| self.shared.latch.trip("reading the log", error))
    }

    fn append(&self, entries: Vec<(u64, Bytes)>, done: Done) {
        self.submit(done, |state| {
            for (index, content) in &entries {
                let LogBounds { first, next, .. } = &mut state.bounds;
                if first == next {
                    assert!(*index >= state.floor, "entry {index} is below the floor {}", state.floor);
                    (*first, *next) = (*index, *index);
                }
                assert_eq!(index, next, "an append leaves a hole in the log");
                *next += 1;
                state.tail.push(*index, content.clone(), state.writes);
            }
            Work::Append(entries)
        });
    }

    fn truncate(&self, from: u64, done: Done) {
        self.submit(done, |state| {
            let LogBounds { first, next, .. } = state.bounds;
            let from = from.clamp(first, next);
            let end = if from > first { from } else { state.floor };
            if from < next {
                state.removals += 1;
                state.bounds.first = first.min(end);
                state.bounds.next = end;
                state.tail.remove_from(from);
            }
            Work::Truncate { from, next, end }
        });
    }

    fn purge(&self, to: u64, mark: Bytes, done: Done) {
        self.submit(done, |state| {
            let floor = to + 1;
            if floor <= state.floor {
                return Work::Append(Vec::new());
            }
            let LogBounds { first, next, .. } = state.bounds;
            let bounds =
                LogBounds { first: first.max(floor), next: next.max(floor), purged: Some(mark.clone()) };
            state.bounds = bounds;
            state.floor = floor;
            state.removals += 1;
            state.tail.remove_below(floor);
            Work::Purge { first, next: next.min(floor), to, mark }
        });
    }

    fn meta(&self, key: MetaKey) -> io::Result<Option<Bytes>> {
        Ok(self.shared.state().metas.get(&key).cloned())
    }

    fn put_meta(&self, key: MetaKey, value: Bytes, done: Done) {
        self.submit(done, |state| {
            state.metas.insert(key, value.clone());
            Work::Meta(key, value)
        });
    }

    fn oldest_write_age(&self) -> Duration {
        self.shared.queue.oldest_age()
    }
}

impl<K: Kv> Shared<K> {
    /// Lets the calling thread be the writer where the callers write, unless another one is.
    pub(crate) fn write_own(&self) {
        if self.written_by == WrittenBy::Thread {
            return;
        }
        let mut mine = false;
        while let Some(jobs) = self.queue.drain(mine) {
            mine = true;
            self.writer().write(self, jobs);
        }
    }

    fn read_disk(&self, from: u64, to: u64, bytes_max: usize) -> io::Result<Vec<(u64, Bytes)>> {
        let mut entries = Vec::new();
        let (mut expected, mut bytes) = (from, 0usize);
        self.disk.scan(
            Table::Log,
            &schema::entry(from),
            &schema::entry(to),
            Order::Up,
            &mut |key, value| {
                let index = schema::entry_index(key)?;
                if index != expected {
                    return Err(damaged(format!("entry {index} stands where entry {expected} was written")));
                }
                let content = schema::unseal(&format!("entry {index} of the log"), key, value)?;
                bytes = bytes.saturating_add(content.len());
                if bytes > bytes_max && !entries.is_empty() {
                    return Ok(ControlFlow::Break(()));
                }
                entries.push((index, content));
                expected += 1;
                Ok(ControlFlow::Continue(()))
            },
        )?;
        if expected < to && bytes <= bytes_max {
            return Err(damaged(format!("entry {expected} is missing from the log")));
        }
        Ok(entries)
    }

    fn state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().expect(POISON)
    }

    fn state_mut(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().expect(POISON)
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().expect(POISON)
    }
}

const POISON: &str = "a wrong use of the log panicked before";

fn load<K: Kv>(disk: &K) -> io::Result<(LogBounds, u64, BTreeMap<MetaKey, Bytes>)> {
    let mut metas = BTreeMap::new();
    for key in [MetaKey::Vote, MetaKey::Committed, MetaKey::Identity, MetaKey::Acquaintances] {
        let row = schema::meta(key);
        if let Some(value) = disk.read(Table::LogMeta, &row)? {
            metas.insert(key, schema::unseal(&format!("{key:?} beside the log"), &row, &value)?);
        }
    }
    let (mut floor, mut purged) = (0, None);
    let row = schema::purged();
    if let Some(value) = disk.read(Table::LogMeta, &row)? {
        let mut content = schema::unseal("the mark of the last purge", &row, &value)?;
        if content.len() < 8 {
            return Err(damaged("the mark of the last purge is cut short"));
        }
        let to = content.split_to(8);
        floor = u64::from_be_bytes(to[..].try_into().expect("eight bytes")) + 1;
        purged = Some(content);
    }
    // From the floor on, since below it lie tombstones only.
    let edge = |order| -> io::Result<Option<u64>> {
        let mut found = None;
        let end = schema::after(&schema::group());
        disk.scan(Table::Log, &schema::entry(floor), &end, order, &mut |key, value| {
            let index = schema::entry_index(key)?;
            schema::unseal(&format!("entry {index} of the log"), key, value)?;
            found = Some(index);
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    };
    let first = edge(Order::Up)?.unwrap_or(floor);
    let next = edge(Order::Down)?.map_or(floor, |last| last + 1);
    Ok((LogBounds { first, next, purged }, floor, metas))
}

impl<K: Kv> Drop for Log<K> {
    fn drop(&mut self) {
        self.close();
    }
}

impl<K: Kv> fmt::Debug for Log<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log")
            .field("disk", &self.shared.disk)
            .field("bounds", &self.shared.state().bounds)
            .field("queue", &self.shared.queue)
            .finish_non_exhaustive()
    }
}
