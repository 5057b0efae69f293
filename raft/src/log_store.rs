//! Openraft's log over our `LogStore`: entries encoded once, vote and commit position beside them.

use std::{
    collections::VecDeque,
    fmt::Debug,
    io,
    ops::{Bound, RangeBounds},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures_util::{Stream, stream};
use openraft::{
    LogState, OptionalSend, RaftLogReader,
    storage::{IOFlushed, RaftLogStorage},
};
use reach_protocol::codec;
use reach_storage::{Done, LogStore, MetaKey};
use tokio::sync::oneshot;

use crate::types::{Entry, Group, LogId, Vote};

/// Bytes that one read for replication or apply asks for. An entry above it comes alone.
const READ_BYTES: usize = 1 << 20;

/// The commit position is only a help after a restart, so it is written this often at most.
const COMMITTED_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone, Debug)]
pub(crate) struct Log {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Arc<dyn LogStore>,
    meta: Mutex<Meta>,
    appended_bytes: AtomicU64,
}

/// What was last written beside the log.
#[derive(Debug)]
struct Meta {
    vote: Option<Vote>,
    committed: Option<LogId>,
    committed_written: Option<Instant>,
}

impl Log {
    pub fn open(store: Arc<dyn LogStore>) -> io::Result<Self> {
        let vote = store.meta(MetaKey::Vote)?.map(|bytes| decode("vote", &bytes)).transpose()?;
        let committed = store.meta(MetaKey::Committed)?.map(|bytes| decode("commit position", &bytes));
        let meta = Meta { vote, committed: committed.transpose()?, committed_written: None };
        Ok(Self {
            shared: Arc::new(Shared { store, meta: Mutex::new(meta), appended_bytes: AtomicU64::new(0) }),
        })
    }

    /// Bytes appended since this process started.
    pub fn appended_bytes(&self) -> u64 {
        self.shared.appended_bytes.load(Ordering::Relaxed)
    }

    pub fn oldest_write_age(&self) -> Duration {
        self.shared.store.oldest_write_age()
    }

    fn meta(&self) -> MutexGuard<'_, Meta> {
        self.shared.meta.lock().expect("no holder of the meta lock panics")
    }

    /// Those of `from..to` that the log holds, at least one if any, cut at `bytes_max`.
    fn read(&self, from: u64, to: u64, bytes_max: usize) -> io::Result<Vec<Entry>> {
        let bounds = self.shared.store.bounds();
        let (from, to) = (from.max(bounds.first), to.min(bounds.next));
        if from >= to {
            return Ok(Vec::new());
        }
        let rows = self.shared.store.read(from, to, bytes_max)?;
        let mut entries = Vec::with_capacity(rows.len());
        let mut expected = None;
        for (index, bytes) in rows {
            let entry: Entry = decode("log entry", &bytes)?;
            if entry.log_id.index != index || expected.is_some_and(|expected| expected != index) {
                let found = entry.log_id.index;
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("log entry {index} calls itself {found}, and {expected:?} was expected"),
                ));
            }
            expected = Some(index + 1);
            entries.push(entry);
        }
        Ok(entries)
    }

    async fn written(&self, write: impl FnOnce(&dyn LogStore, Done)) -> io::Result<()> {
        let (done, written) = oneshot::channel();
        write(&*self.shared.store, Box::new(move |result| drop(done.send(result))));
        written.await.unwrap_or_else(|_| Err(io::Error::other("the log's writer has stopped")))
    }
}

fn decode<T: serde::de::DeserializeOwned>(what: &'static str, bytes: &[u8]) -> io::Result<T> {
    codec::decode(what, bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn bounds(range: &impl RangeBounds<u64>) -> (u64, u64) {
    let from = match range.start_bound() {
        Bound::Included(index) => *index,
        Bound::Excluded(index) => index + 1,
        Bound::Unbounded => 0,
    };
    let to = match range.end_bound() {
        Bound::Included(index) => index + 1,
        Bound::Excluded(index) => *index,
        Bound::Unbounded => u64::MAX,
    };
    (from, to)
}

impl RaftLogReader<Group> for Log {
    async fn try_get_log_entries<RB: RangeBounds<u64> + Clone + Debug + OptionalSend>(
        &mut self,
        range: RB,
    ) -> io::Result<Vec<Entry>> {
        let (from, to) = bounds(&range);
        self.read(from, to, usize::MAX)
    }

    async fn limited_get_log_entries(&mut self, from: u64, to: u64) -> io::Result<Vec<Entry>> {
        self.read(from, to, READ_BYTES)
    }

    async fn entries_stream<RB>(&mut self, range: RB) -> impl Stream<Item = io::Result<Entry>> + OptionalSend
    where
        RB: RangeBounds<u64> + Clone + Debug + OptionalSend,
    {
        let (from, to) = bounds(&range);
        let to = to.min(self.shared.store.bounds().next);
        let state = Some((self.clone(), from, VecDeque::new()));
        stream::unfold(state, move |state| async move {
            let (log, next, mut read) = state?;
            if read.is_empty() {
                match log.read(next, to, READ_BYTES) {
                    Ok(entries) => read.extend(entries),
                    Err(error) => return Some((Err(error), None)),
                }
            }
            let entry: Entry = read.pop_front()?;
            let next = entry.log_id.index + 1;
            Some((Ok(entry), Some((log, next, read))))
        })
    }

    async fn read_vote(&mut self) -> io::Result<Option<Vote>> {
        Ok(self.meta().vote)
    }
}

impl RaftLogStorage<Group> for Log {
    type LogReader = Self;

    async fn get_log_state(&mut self) -> io::Result<LogState<Group>> {
        let bounds = self.shared.store.bounds();
        let purged = bounds.purged.map(|mark| decode("purge mark", &mark)).transpose()?;
        let last = match bounds.next > bounds.first {
            true => self.read(bounds.next - 1, bounds.next, usize::MAX)?.last().map(|entry| entry.log_id),
            false => None,
        };
        Ok(LogState { last_purged_log_id: purged, last_log_id: last.or(purged) })
    }

    async fn get_log_reader(&mut self) -> Self {
        self.clone()
    }

    async fn save_vote(&mut self, vote: &Vote) -> io::Result<()> {
        let bytes = codec::encode(vote);
        self.written(|store, done| store.put_meta(MetaKey::Vote, bytes, done)).await?;
        self.meta().vote = Some(*vote);
        Ok(())
    }

    /// Not waited for: the position stands behind its entries in the writer's one queue, so it is
    /// never ahead of them on the disk, and it may lag.
    async fn save_committed(&mut self, committed: Option<LogId>) -> io::Result<()> {
        {
            let mut meta = self.meta();
            meta.committed = committed;
            if meta.committed_written.is_some_and(|written| written.elapsed() < COMMITTED_EVERY) {
                return Ok(());
            }
            meta.committed_written = Some(Instant::now());
        }
        if let Some(committed) = committed {
            let done: Done = Box::new(|result| {
                if let Err(error) = result {
                    tracing::error!(%error, "commit position not written");
                }
            });
            self.shared.store.put_meta(MetaKey::Committed, codec::encode(&committed), done);
        }
        Ok(())
    }

    async fn read_committed(&mut self) -> io::Result<Option<LogId>> {
        Ok(self.meta().committed)
    }

    async fn append<I>(&mut self, entries: I, callback: IOFlushed<Group>) -> io::Result<()>
    where
        I: IntoIterator<Item = Entry> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let rows: Vec<(u64, Bytes)> =
            entries.into_iter().map(|entry| (entry.log_id.index, codec::encode(&entry))).collect();
        let bytes: usize = rows.iter().map(|(_, bytes)| bytes.len()).sum();
        self.shared.appended_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.shared.store.append(rows, Box::new(move |result| callback.io_completed(result)));
        Ok(())
    }

    async fn truncate_after(&mut self, last: Option<LogId>) -> io::Result<()> {
        let from = last.map_or(0, |last| last.index + 1);
        self.written(|store, done| store.truncate(from, done)).await
    }

    async fn purge(&mut self, to: LogId) -> io::Result<()> {
        let mark = codec::encode(&to);
        self.written(|store, done| store.purge(to.index, mark, done)).await
    }
}
