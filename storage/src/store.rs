//! What the replicated core asks of a disk: an ordered log with one writer, and tables whose rows
//! and position move together. Two implementations keep these promises: RocksDB and memory.

use std::{fmt::Debug, io, path::PathBuf, sync::Arc};

use bytes::Bytes;
use reach_machine::{Live, Rows, Write};
use reach_protocol::{
    AgentId, Envelope, EventRow, EventType, Json, MsgId, TraceId,
    agent::Tombstone,
    codec::Encoded,
    message::{DeadLetter, Hop, MessageRecord},
};

/// Called once, when the write is on the disk, or with the error that ends the process. Runs on the
/// writer's thread: it neither waits nor writes to the log itself.
pub type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Small facts beside the log, each replaced as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MetaKey {
    Vote,
    Committed,
    /// Cluster id, node id and incarnation: whose log this is.
    Identity,
    /// The incarnations of the other nodes.
    Acquaintances,
}

/// What the log holds: entries `first..next`, everything below `first` purged. `purged` is the
/// caller's own mark of the last purged entry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogBounds {
    pub first: u64,
    pub next: u64,
    pub purged: Option<Bytes>,
}

/// The Raft log. Entries are opaque bytes under dense indexes; each is stored with a checksum over
/// index and content, and a read that finds another one fails rather than skips. All writes go
/// through one thread in the order of the calls, as many as are waiting under one fsync; votes,
/// truncation and purge are barriers in that same order.
pub trait LogStore: Send + Sync + Debug + 'static {
    /// As they are once every write that was handed in is done; so are `meta` and what `read` sees.
    fn bounds(&self) -> LogBounds;
    /// Entries `from..to`, fewer only when `bytes_max` is reached (at least one is returned when
    /// there is one). The newest entries come from memory, also before they are on the disk.
    fn read(&self, from: u64, to: u64, bytes_max: usize) -> io::Result<Vec<(u64, Bytes)>>;
    /// Adds entries at the end; the first index must be `bounds().next`, or anything when the log
    /// is empty.
    fn append(&self, entries: Vec<(u64, Bytes)>, done: Done);
    /// Removes every entry at `from` and above.
    fn truncate(&self, from: u64, done: Done);
    /// Removes every entry up to and including `to`, and remembers `mark`. May go past the end: then
    /// the log is empty and continues at `to + 1`.
    fn purge(&self, to: u64, mark: Bytes, done: Done);
    fn meta(&self, key: MetaKey) -> io::Result<Option<Bytes>>;
    /// Durable when `done` is called.
    fn put_meta(&self, key: MetaKey, value: Bytes, done: Done);
    /// How long the oldest unfinished write has been waiting for the disk: what a watchdog watches.
    fn oldest_write_age(&self) -> std::time::Duration;
}

/// Where the tables stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Index of the last applied entry, 0 for none.
    pub index: u64,
    /// Chain over every write since the beginning: equal on all nodes at equal positions.
    pub state_hash: u64,
    /// The caller's own bytes (log id, membership), stored and given back as they are.
    pub mark: Bytes,
}

/// A copy of the tables at one position, in a folder of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    pub dir: PathBuf,
    pub applied: Applied,
    pub files: Vec<CheckpointFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct CheckpointFile {
    pub name: String,
    pub bytes: u64,
    pub crc32c: u32,
}

/// The tables. One thread at a time opens a batch; any number read.
pub trait Tables: Send + Sync + Debug + 'static {
    fn applied(&self) -> Applied;
    /// Starts a batch: what is written to it is seen by its own reads at once, by others after
    /// `commit`.
    fn batch(&self) -> Box<dyn Batch + '_>;
    /// The part in memory, as of the last commit. The guard blocks `commit`: keep it short.
    fn live(&self) -> std::sync::RwLockReadGuard<'_, Live>;

    /// What is left of an agent that was removed or replaced.
    fn tombstone(&self, agent_id: &AgentId) -> io::Result<Option<Tombstone>>;
    fn message(&self, msg_id: &MsgId) -> io::Result<Option<Arc<MessageRecord>>>;
    fn envelope(&self, msg_id: &MsgId) -> io::Result<Option<Encoded<Envelope>>>;
    fn result(&self, msg_id: &MsgId) -> io::Result<Option<Json>>;
    /// Hops of a trace in order, at most `max`.
    fn hops(&self, trace_id: &TraceId, max: usize) -> io::Result<Vec<Hop>>;
    /// Events `from..to` of a topic, as far as they are kept: as many as have `bytes_max` bytes together,
    /// and at least one where there is one.
    fn events(
        &self,
        event_type: &EventType,
        from: u64,
        to: u64,
        bytes_max: usize,
    ) -> io::Result<Vec<EventRow>>;
    /// Whether this message was ever received by this agent.
    fn was_delivered(&self, msg_id: &MsgId, agent_id: &AgentId) -> io::Result<bool>;
    /// What is left of a message that came to nothing, when it is one.
    fn dead_letter(&self, msg_id: &MsgId) -> io::Result<Option<DeadLetter>>;
    /// Messages in order of acceptance, newest first, those accepted before `after` (exclusive).
    fn messages(&self, after: Option<&MsgId>, max: usize) -> io::Result<Vec<Arc<MessageRecord>>>;
    /// Every row, keys and values as bytes in key order, fed to `visit`: what a byte-by-byte
    /// comparison of two replicas reads.
    fn visit(&self, visit: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()>;

    /// Flushes everything and makes a checkpoint in `dir` (which must not exist), its files synced.
    fn checkpoint(&self, dir: PathBuf) -> io::Result<Checkpoint>;
    /// Replaces the tables by a checkpoint whose files have been copied to `dir` on the same file
    /// system and checked. Atomic: after a crash at any step the tables are the old or the new ones.
    fn install(&self, dir: PathBuf) -> io::Result<Applied>;
    /// Makes everything up to `applied()` durable; the log may be purged up to the returned index.
    fn flush(&self) -> io::Result<u64>;
}

/// Writes that become visible and durable together with the position they lead to.
pub trait Batch: Rows {
    fn write(&mut self, writes: Vec<Write>);
    /// An entry ends here: `index` and the caller's `mark` are the position.
    fn advance(&mut self, index: u64, mark: Bytes);
    fn commit(self: Box<Self>) -> io::Result<Applied>;
}
