//! The disk itself and its faults. Every choice a fault leaves open is made from the seed.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt, io,
    sync::{Arc, Mutex, MutexGuard, Weak},
};

use bytes::Bytes;

use super::kv::MemoryKv;
use crate::{
    error::Latch,
    kv::Op,
    log::{Marker, Plan, Shared},
    schema::{self, Table},
};

/// A disk that can be opened again and again. Clones are the same disk.
#[derive(Clone)]
pub struct MemoryDisk(Arc<Mutex<State>>);

/// The two databases of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Log,
    Tables,
}

/// A value with the checksum that stands for the one a real store keeps of its blocks.
#[derive(Clone)]
pub(super) struct Row {
    pub value: Bytes,
    pub crc32c: u32,
}

#[derive(Clone, Default)]
pub(super) struct RowSet(pub BTreeMap<Table, BTreeMap<Vec<u8>, Row>>);

/// The tables' rows: what a reader sees, what a power cut leaves for certain, and the writes
/// between the two, of which it leaves some of the first.
#[derive(Default)]
pub(super) struct TableRows {
    pub now: RowSet,
    durable: RowSet,
    unsynced: VecDeque<Vec<Op>>,
}

/// Where the operating system has written older pages back by itself.
const UNSYNCED_MAX: usize = 4_096;

struct State {
    chance: u64,
    /// Counts the openings; a store of an earlier one is cut off.
    opened: u64,
    log: RowSet,
    /// What the marker of acknowledged entries says.
    marked: u64,
    tables: Arc<Mutex<TableRows>>,
    fail_log: Option<io::ErrorKind>,
    fail_tables: Option<io::ErrorKind>,
    held: bool,
    log_writes: u64,
    open_log: Weak<Shared<MemoryKv>>,
    open_latch: Weak<Latch>,
}

impl MemoryDisk {
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            chance: seed,
            opened: 0,
            log: RowSet::default(),
            marked: 0,
            tables: Arc::default(),
            fail_log: None,
            fail_tables: None,
            held: false,
            log_writes: 0,
            open_log: Weak::new(),
            open_latch: Weak::new(),
        })))
    }

    /// Cuts the power. Of the log's writes that wait, the first few survive; of the tables' writes
    /// since the last flush, the first few. The open store is cut off: its writes go nowhere and
    /// nobody is called back.
    pub fn crash(&self) {
        self.kill();
        let mut state = self.state();
        let tables = state.tables.clone();
        let mut tables = tables.lock().expect(POISON);
        let survive = state.choose(tables.unsynced.len());
        tables.now = tables.durable.clone();
        for ops in tables.unsynced.drain(..survive).collect::<Vec<_>>() {
            ops.iter().for_each(|op| tables.now.apply(op));
        }
        tables.sync();
    }

    /// Ends the process alone: what the tables wrote is safe with the operating system. Also what
    /// `open` does to a store that is still open.
    pub fn kill(&self) {
        let (log, latch) = {
            let mut state = self.state();
            state.opened += 1;
            state.held = false;
            state.fail_log = None;
            state.fail_tables = None;
            (state.open_log.upgrade(), state.open_latch.upgrade())
        };
        if let Some(latch) = latch {
            latch.mute();
        }
        let waiting = log.map(|log| log.queue.kill()).unwrap_or_default();
        let mut state = self.state();
        let survive = state.choose(waiting.len());
        // Written one by one, as rounds of one job each.
        for job in &waiting[..survive] {
            let next = state.log_next();
            let plan = Plan::of(std::slice::from_ref(job), next);
            state.marked = state.marked.min(plan.lowest);
            plan.ops.iter().for_each(|op| state.log.apply(op));
        }
        // Dropping the callbacks can drop much else: not under our lock.
        drop(state);
        drop(waiting);
    }

    /// The next write fails with `kind`, and nothing of it reaches the disk.
    pub fn fail_next_write(&self, part: Part, kind: io::ErrorKind) {
        let mut state = self.state();
        match part {
            Part::Log => state.fail_log = Some(kind),
            Part::Tables => state.fail_tables = Some(kind),
        }
    }

    /// A hung disk: the log's writes wait until `release_writes`.
    pub fn hold_writes(&self) {
        let log = {
            let mut state = self.state();
            state.held = true;
            state.open_log.upgrade()
        };
        if let Some(log) = log {
            log.queue.hold(true);
        }
    }

    pub fn release_writes(&self) {
        let log = {
            let mut state = self.state();
            state.held = false;
            state.open_log.upgrade()
        };
        if let Some(log) = log {
            log.queue.hold(false);
            log.write_own();
        }
    }

    /// A disk that lied about its fsyncs: the last entries of the log are gone. For a closed store.
    pub fn lose_synced_entries(&self, entries: usize) {
        let mut state = self.state();
        let log = state.log.0.entry(Table::Log).or_default();
        (0..entries).for_each(|_| drop(log.pop_last()));
    }

    /// Flips one bit of an entry. For one that is no longer in the log's memory.
    pub fn damage_entry(&self, index: u64) {
        let mut state = self.state();
        let key = schema::entry(index);
        let row = state.log.0.get_mut(&Table::Log).and_then(|log| log.get_mut(&key));
        let row = row.expect("there is such an entry on the disk");
        // The disk's own checksum does not notice, so the log's must.
        row.value = flipped(&row.value);
        row.crc32c = crc32c::crc32c(&row.value);
    }

    /// Flips one bit of the `nth` row of the tables, in the order of `Tables::visit`.
    pub fn damage_row(&self, nth: usize) {
        let tables = self.state().tables.clone();
        let mut tables = tables.lock().expect(POISON);
        let row = tables.now.0.values_mut().flat_map(|rows| rows.values_mut()).nth(nth);
        let row = row.expect("there are as many rows");
        row.value = flipped(&row.value);
    }

    /// How many writes the log has made: one fsync each.
    pub fn log_writes(&self) -> u64 {
        self.state().log_writes
    }

    pub(super) fn opened(&self) -> u64 {
        self.state().opened
    }

    pub(super) fn tables(&self) -> Arc<Mutex<TableRows>> {
        self.state().tables.clone()
    }

    pub(super) fn set_tables(&self, rows: Arc<Mutex<TableRows>>) {
        self.state().tables = rows;
    }

    pub(super) fn marked(&self) -> u64 {
        self.state().marked
    }

    pub(super) fn marker(&self) -> MemoryMarker {
        MemoryMarker { disk: self.clone(), opened: self.opened() }
    }

    pub(super) fn attach(&self, log: &Arc<Shared<MemoryKv>>, latch: &Arc<Latch>) {
        let mut state = self.state();
        state.open_log = Arc::downgrade(log);
        state.open_latch = Arc::downgrade(latch);
        log.queue.hold(state.held);
    }

    pub(super) fn log_rows<T>(&self, read: impl FnOnce(&RowSet) -> T) -> T {
        read(&self.state().log)
    }

    pub(super) fn write_log(&self, opened: u64, ops: &[Op]) -> io::Result<()> {
        let mut state = self.state();
        state.check(opened)?;
        if let Some(kind) = state.fail_log.take() {
            return Err(io::Error::new(kind, "a fault that was asked for"));
        }
        state.log_writes += 1;
        ops.iter().for_each(|op| state.log.apply(op));
        Ok(())
    }

    /// Whether a write of the tables may go on.
    pub(super) fn check_tables(&self, opened: u64) -> io::Result<()> {
        let mut state = self.state();
        state.check(opened)?;
        match state.fail_tables.take() {
            Some(kind) => Err(io::Error::new(kind, "a fault that was asked for")),
            None => Ok(()),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect(POISON)
    }
}

pub(super) const POISON: &str = "nothing panics under the disk's lock";

impl State {
    fn check(&self, opened: u64) -> io::Result<()> {
        if self.opened == opened {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::NotConnected, "this store's process is gone"))
    }

    /// A number from 0 to `max`, both included: splitmix64.
    fn choose(&mut self, max: usize) -> usize {
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.chance;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % (max as u64 + 1)) as usize
    }

    fn log_next(&self) -> u64 {
        let last = self.log.0.get(&Table::Log).and_then(|log| log.last_key_value());
        last.map_or(0, |(key, _)| schema::entry_index(key).expect("keys of the log are indexes") + 1)
    }
}

impl RowSet {
    pub fn apply(&mut self, op: &Op) {
        match op {
            Op::Put { table, key, value } => {
                let row = Row { crc32c: crc32c::crc32c(value), value: value.clone().into() };
                self.0.entry(*table).or_default().insert(key.clone(), row);
            }
            Op::Remove { table, key } => {
                self.0.entry(*table).or_default().remove(key);
            }
            Op::RemoveRange { table, from, to } => {
                let rows = self.0.entry(*table).or_default();
                let mut above = rows.split_off(from);
                if above.last_key_value().is_some_and(|(last, _)| last >= to) {
                    rows.append(&mut above.split_off(to));
                }
            }
        }
    }
}

impl TableRows {
    /// Rows that are on the disk already.
    pub fn durable(rows: RowSet) -> Self {
        Self { now: rows.clone(), durable: rows, unsynced: VecDeque::new() }
    }

    pub fn write(&mut self, ops: &[Op]) {
        ops.iter().for_each(|op| self.now.apply(op));
        self.unsynced.push_back(ops.to_vec());
        if self.unsynced.len() > UNSYNCED_MAX {
            let oldest = self.unsynced.drain(..UNSYNCED_MAX / 2).flatten();
            oldest.for_each(|op| self.durable.apply(&op));
        }
    }

    pub fn sync(&mut self) {
        self.durable = self.now.clone();
        self.unsynced.clear();
    }
}

#[derive(Debug)]
pub(super) struct MemoryMarker {
    disk: MemoryDisk,
    opened: u64,
}

impl Marker for MemoryMarker {
    fn write(&mut self, next: u64) -> io::Result<()> {
        let mut state = self.disk.state();
        state.check(self.opened)?;
        state.marked = next;
        Ok(())
    }
}

fn flipped(value: &[u8]) -> Bytes {
    let mut value = value.to_vec();
    let middle = value.len() / 2;
    value[middle] ^= 0x10;
    value.into()
}

impl fmt::Debug for MemoryDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDisk").field("opened", &self.opened()).finish_non_exhaustive()
    }
}
