//! The one writer of the log: turns waiting jobs into one synced write, keeps the marker of what
//! was acknowledged, and tells the callers in their order.

use std::{
    fmt, io,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    Shared,
    queue::{Job, Round, Work},
};
use crate::{
    error::Latch,
    kv::{Kv, Op},
    schema::{self, Table},
    store::MetaKey,
};

/// Keeps, apart from the log, the index below which every entry was acknowledged. It is raised
/// late and lowered early, so a log that ends below it has lost what it had promised.
pub(crate) trait Marker: Send + fmt::Debug {
    /// Durable on return.
    fn write(&mut self, next: u64) -> io::Result<()>;
}

#[derive(Debug)]
pub(super) struct Writer {
    marker: Box<dyn Marker>,
    marker_every: Duration,
    /// What the marker says, and since when.
    marked: u64,
    marked_at: Instant,
    /// The end of the log on disk, all of it acknowledged.
    next: u64,
}

/// What a round of jobs does to the disk.
#[derive(Debug)]
pub(crate) struct Plan {
    pub ops: Vec<Op>,
    /// The end of the log after it.
    pub next: u64,
    /// The lowest end of the log on the way.
    pub lowest: u64,
    pub votes: bool,
}

impl Plan {
    pub fn of(jobs: &[Job], next: u64) -> Self {
        let mut plan = Self { ops: Vec::new(), next, lowest: next, votes: false };
        jobs.iter().for_each(|job| plan.add(&job.work));
        plan
    }

    fn add(&mut self, work: &Work) {
        match work {
            Work::Append(entries) => {
                for (index, content) in entries {
                    let key = schema::entry(*index);
                    let value = schema::seal(&key, content);
                    self.ops.push(Op::Put { table: Table::Log, key, value });
                    self.next = index + 1;
                }
            }
            Work::Truncate { from, next, end } => {
                self.remove(*from, *next);
                self.next = self.next.min(*end);
                self.lowest = self.lowest.min(self.next);
            }
            Work::Purge { first, next, to, mark } => {
                self.remove(*first, *next);
                let key = schema::purged();
                let content = [&to.to_be_bytes()[..], mark].concat();
                let value = schema::seal(&key, &content);
                self.ops.push(Op::Put { table: Table::LogMeta, key, value });
                self.next = self.next.max(to + 1);
            }
            Work::Meta(key, content) => {
                self.votes |= *key == MetaKey::Vote;
                let key = schema::meta(*key);
                let value = schema::seal(&key, content);
                self.ops.push(Op::Put { table: Table::LogMeta, key, value });
            }
        }
    }

    /// Removes entries `from..to`. Many by one range tombstone, few by their keys, since every
    /// range tombstone slows each later iterator.
    fn remove(&mut self, from: u64, to: u64) {
        const RANGE_MIN: u64 = 100;
        if to.saturating_sub(from) < RANGE_MIN {
            let keys = (from..to).map(schema::entry);
            self.ops.extend(keys.map(|key| Op::Remove { table: Table::Log, key }));
        } else {
            let (from, to) = (schema::entry(from), schema::entry(to));
            self.ops.push(Op::RemoveRange { table: Table::Log, from, to });
        }
    }
}

impl Writer {
    pub fn new(marker: Box<dyn Marker>, marker_every: Duration, marked: u64, next: u64) -> Self {
        Self { marker, marker_every, marked, marked_at: Instant::now(), next }
    }

    /// The life of the writer's thread.
    pub fn run<K: Kv>(shared: &Arc<Shared<K>>) {
        loop {
            let patience = shared.writer().patience();
            match shared.queue.wait(patience) {
                Round::Jobs(jobs) => shared.writer().write(shared, jobs),
                Round::Idle => shared.writer().mark_late(&shared.latch),
                Round::Closed => return shared.writer().mark_late(&shared.latch),
            }
        }
    }

    /// How long the marker may still wait: for ever when it says what is true.
    fn patience(&self) -> Option<Duration> {
        let waits = self.marked != self.next;
        waits.then(|| self.marker_every.saturating_sub(self.marked_at.elapsed()))
    }

    pub fn write<K: Kv>(&mut self, shared: &Shared<K>, jobs: Vec<Job>) {
        let written = shared.latch.check().and_then(|()| self.try_write(shared, &jobs));
        if written.is_ok()
            && let Some(last) = jobs.last()
        {
            shared.state_mut().tail.shrink(last.write);
        }
        shared.queue.finished(&jobs);
        for job in jobs {
            (job.done)(match &written {
                Ok(()) => Ok(()),
                Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
            });
        }
        if written.is_ok() && self.patience() == Some(Duration::ZERO) {
            self.mark_late(&shared.latch);
        }
    }

    fn try_write<K: Kv>(&mut self, shared: &Shared<K>, jobs: &[Job]) -> io::Result<()> {
        let plan = Plan::of(jobs, self.next);
        let lowers = plan.lowest < self.marked;
        if lowers || (plan.votes && self.marked != self.next) {
            let next = self.next.min(plan.lowest);
            self.mark(next).map_err(|error| shared.latch.trip("writing the log's marker", error))?;
        }
        let written = shared.disk.write(&plan.ops, true);
        written.map_err(|error| shared.latch.trip("writing the log", error))?;
        self.next = plan.next;
        Ok(())
    }

    fn mark_late(&mut self, latch: &Latch) {
        if self.marked != self.next
            && latch.check().is_ok()
            && let Err(error) = self.mark(self.next)
        {
            latch.trip("writing the log's marker", error);
        }
    }

    fn mark(&mut self, next: u64) -> io::Result<()> {
        self.marker.write(next)?;
        self.marked = next;
        self.marked_at = Instant::now();
        Ok(())
    }
}
