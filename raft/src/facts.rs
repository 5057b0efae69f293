//! The facts of the last applied entries, in memory, and the cursors that read them. A cursor that
//! can't go on from where it stands is told so once and continues from the present.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

use reach_protocol::{Fact, MessageState, Stamp, agent::AgentRecord, message::MessageRecord};
use tokio::sync::watch;

/// What the ring holds at most, by estimate.
pub const RING_BYTES: usize = 64 << 20;

/// What one entry did. Addressed by `(index, place in facts)`.
#[derive(Clone, Debug, PartialEq)]
pub struct EntryFacts {
    pub index: u64,
    pub stamp: Stamp,
    /// Never empty: entries without facts are passed over.
    pub facts: Vec<Fact>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    Facts(Arc<EntryFacts>),
    /// Facts are missing: derive the state from the tables, which stand at this index or later, and
    /// go on. Facts above it follow, so some may be in the tables already.
    Reset(u64),
    /// The replica has stopped.
    Closed,
}

#[derive(Clone)]
pub struct FactRing {
    shared: Arc<Shared>,
}

struct Shared {
    ring: Mutex<Ring>,
    changed: watch::Sender<()>,
    bytes_max: usize,
}

struct Ring {
    entries: VecDeque<(Arc<EntryFacts>, usize)>,
    bytes: usize,
    /// Facts of every entry above it are here.
    floor: u64,
    /// The last applied index.
    tip: u64,
    /// Counts the times that the tables jumped.
    jumps: u64,
    closed: bool,
}

impl FactRing {
    pub(crate) fn new(applied: u64, bytes_max: usize) -> Self {
        let ring = Ring {
            entries: VecDeque::new(),
            bytes: 0,
            floor: applied,
            tip: applied,
            jumps: 0,
            closed: false,
        };
        Self {
            shared: Arc::new(Shared { ring: Mutex::new(ring), changed: watch::Sender::new(()), bytes_max }),
        }
    }

    /// Reads what is applied from now on.
    pub fn cursor(&self) -> Cursor {
        let after = self.shared.lock().tip;
        self.cursor_at(after)
    }

    /// Reads the facts of every entry above `index`, as state derived from the tables at `index`
    /// needs them.
    pub fn cursor_at(&self, index: u64) -> Cursor {
        let jumps = self.shared.lock().jumps;
        Cursor { shared: self.shared.clone(), changed: self.shared.changed.subscribe(), after: index, jumps }
    }

    /// `entries` are those with facts among the ones up to `tip`.
    pub(crate) fn publish(&self, entries: Vec<EntryFacts>, tip: u64) {
        {
            let mut ring = self.shared.lock();
            for entry in entries {
                debug_assert!(entry.index > ring.tip || ring.tip == 0);
                let bytes = weight(&entry);
                ring.bytes += bytes;
                ring.entries.push_back((Arc::new(entry), bytes));
            }
            ring.tip = tip;
            while ring.bytes > self.shared.bytes_max {
                let Some((entry, bytes)) = ring.entries.pop_front() else { break };
                ring.bytes -= bytes;
                ring.floor = entry.index;
            }
        }
        self.shared.changed.send_replace(());
    }

    /// The tables were replaced by those of a snapshot at `index`.
    pub(crate) fn jump(&self, index: u64) {
        {
            let mut ring = self.shared.lock();
            ring.entries.clear();
            ring.bytes = 0;
            ring.floor = index;
            ring.tip = index;
            ring.jumps += 1;
        }
        self.shared.changed.send_replace(());
    }

    pub(crate) fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.changed.send_replace(());
    }
}

impl fmt::Debug for FactRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ring = self.shared.lock();
        f.debug_struct("FactRing").field("floor", &ring.floor).field("tip", &ring.tip).finish()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().expect("no holder of the ring's lock panics")
    }
}

/// A reader of the ring, in order, from a position of its own.
pub struct Cursor {
    shared: Arc<Shared>,
    changed: watch::Receiver<()>,
    after: u64,
    jumps: u64,
}

impl Cursor {
    /// Waits for the next step. Cancel safe. `Closed` comes after the last facts.
    pub async fn next(&mut self) -> Step {
        loop {
            self.changed.mark_unchanged();
            if let Some(step) = self.step() {
                return step;
            }
            if self.changed.changed().await.is_err() {
                return Step::Closed;
            }
        }
    }

    fn step(&mut self) -> Option<Step> {
        let ring = self.shared.lock();
        if self.jumps != ring.jumps || self.after < ring.floor {
            self.jumps = ring.jumps;
            self.after = ring.tip;
            return Some(Step::Reset(ring.tip));
        }
        let place = ring.entries.partition_point(|(entry, _)| entry.index <= self.after);
        match ring.entries.get(place) {
            Some((entry, _)) => {
                self.after = entry.index;
                Some(Step::Facts(entry.clone()))
            }
            None => ring.closed.then_some(Step::Closed),
        }
    }
}

impl fmt::Debug for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cursor").field("after", &self.after).finish()
    }
}

/// Bytes an entry keeps from being freed, roughly: records are shared with the tables for a while,
/// and strings are counted only where they can be long.
fn weight(entry: &EntryFacts) -> usize {
    let agent = |record: &AgentRecord| {
        let registration = &record.registration;
        let metadata: usize = registration.metadata.values().map(|value| value.as_str().len() + 64).sum();
        512 + registration.capabilities.len() * 128 + metadata
    };
    let message = |record: &MessageRecord| {
        let excerpt = match &record.state {
            MessageState::Completed { outcome, .. } => outcome.excerpt.len(),
            _ => 0,
        };
        1024 + excerpt + record.avoid.len() * 64
    };
    let fact = |fact: &Fact| match fact {
        Fact::Registered(record) | Fact::LivenessChanged(record) | Fact::DrainChanged(record) => {
            agent(record)
        }
        Fact::RulesChanged(record) => 1024 + record.text.len(),
        Fact::Fenced { .. } | Fact::Removed { .. } | Fact::Freed { .. } => 128,
        Fact::Appended(_) | Fact::GroupChanged(_) => 192,
        Fact::Revoked(_) => 512,
        other => other.message().map_or(1024, |record| message(record)),
    };
    64 + entry.facts.iter().map(fact).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use reach_protocol::{AgentId, InstanceId};

    use super::*;

    fn entry(index: u64) -> EntryFacts {
        let removed = Fact::Removed {
            agent_id: AgentId::parse("a").unwrap(),
            instance: InstanceId::parse("i").unwrap(),
        };
        EntryFacts { index, stamp: Stamp::default(), facts: vec![removed] }
    }

    async fn indexes(cursor: &mut Cursor, count: usize) -> Vec<u64> {
        let mut seen = Vec::new();
        for _ in 0..count {
            match cursor.next().await {
                Step::Facts(facts) => seen.push(facts.index),
                step => panic!("{step:?} after {seen:?}"),
            }
        }
        seen
    }

    #[tokio::test]
    async fn a_cursor_sees_every_entry_with_facts_in_order() {
        let ring = FactRing::new(5, RING_BYTES);
        let mut late = ring.cursor();
        ring.publish(vec![entry(7)], 9);
        let mut later = ring.cursor();
        ring.publish(vec![entry(10), entry(11)], 11);
        assert_eq!(indexes(&mut late, 3).await, [7, 10, 11]);
        assert_eq!(indexes(&mut later, 2).await, [10, 11]);
        assert_eq!(indexes(&mut ring.cursor_at(7), 2).await, [10, 11]);
        ring.close();
        assert_eq!(late.next().await, Step::Closed);
    }

    #[tokio::test]
    async fn a_cursor_below_the_floor_is_reset_once() {
        let ring = FactRing::new(5, 2 * weight(&entry(0)));
        let mut before_the_restart = ring.cursor_at(4);
        let mut slow = ring.cursor();
        assert_eq!(before_the_restart.next().await, Step::Reset(5));
        ring.publish((6..=9).map(entry).collect(), 9);
        assert_eq!(slow.next().await, Step::Reset(9));
        ring.publish(vec![entry(10)], 10);
        assert_eq!(indexes(&mut slow, 1).await, [10]);
        assert_eq!(indexes(&mut ring.cursor_at(8), 2).await, [9, 10]);
    }

    #[tokio::test]
    async fn a_jump_of_the_tables_resets_every_cursor_once() {
        let ring = FactRing::new(5, RING_BYTES);
        let mut cursor = ring.cursor();
        ring.publish(vec![entry(6)], 6);
        ring.jump(20);
        assert_eq!(cursor.next().await, Step::Reset(20));
        ring.publish(vec![entry(21)], 21);
        assert_eq!(indexes(&mut cursor, 1).await, [21]);
        assert_eq!(indexes(&mut ring.cursor_at(20), 1).await, [21]);
    }

    #[tokio::test]
    async fn a_waiting_cursor_wakes_up() {
        let ring = FactRing::new(0, RING_BYTES);
        let mut cursor = ring.cursor();
        let (seen, ()) = tokio::join!(indexes(&mut cursor, 1), async { ring.publish(vec![entry(1)], 1) });
        assert_eq!(seen, [1]);
    }
}
