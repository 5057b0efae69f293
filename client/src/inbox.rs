//! The agent's inbox: what it was given, on its own disk, until the cluster has the result. One
//! redb file; one thread writes it, and everything that is waiting shares its next fsync.

use std::{
    collections::VecDeque,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::Duration,
};

use reach_protocol::{AgentId, Envelope, MsgId, TraceId, codec};
use redb::{
    Database, DatabaseError, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep},
};

use crate::task::Outcome;

const META: TableDefinition<&str, &str> = TableDefinition::new("meta");
/// `msg_id` → [`Row`].
const TASKS: TableDefinition<&str, &[u8]> = TableDefinition::new("tasks");
/// `msg_id` → envelope; apart from the row, which is rewritten at every step.
const ENVELOPES: TableDefinition<&str, &[u8]> = TableDefinition::new("envelopes");
/// `msg_id` → [`Outcome`], of finished and of settled tasks.
const RESULTS: TableDefinition<&str, &[u8]> = TableDefinition::new("results");
/// The ring of settled tasks, oldest first: ordinal → [`Settled`].
const SETTLED: TableDefinition<u64, &[u8]> = TableDefinition::new("settled");
/// `msg_id` → ordinal.
const SETTLED_BY_ID: TableDefinition<&str, u64> = TableDefinition::new("settled_by_id");

/// Settled results are kept for repeats up to this many, and this many bytes.
const SETTLED_MAX: u64 = 1_000;
const SETTLED_BYTES_MAX: u64 = 16 << 20;
/// Writes that may share one fsync.
const BATCH_MAX: usize = 256;
/// A process that was killed holds its inbox until the system has cleared it away, which a busy machine
/// takes its time for; the next run of the agent may be there before.
const LOCKED_MAX: Duration = Duration::from_secs(2);
const LOCKED_POLL: Duration = Duration::from_millis(20);
const CACHE_BYTES: usize = 8 << 20;

#[derive(Debug, Clone, thiserror::Error)]
pub enum InboxError {
    #[error("the inbox {} is in use by another process; give every agent an inbox of its own", .path.display())]
    Locked { path: PathBuf },
    #[error("the inbox {} is damaged ({reason}); move it away to start with an empty one", .path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("the inbox {} belongs to agent {owner}, not to {wanted}", .path.display())]
    Foreign { path: PathBuf, owner: String, wanted: AgentId },
    #[error("the inbox {} can't be used: {reason}", .path.display())]
    Disk { path: PathBuf, reason: String },
}

/// How far a task is, on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Progress {
    Received,
    /// Its handler may have been started.
    Running,
    /// Its outcome is stored.
    Finished,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    trace_id: TraceId,
    flow_seq: u64,
    attempt: u32,
    progress: Progress,
    /// Tells a repeat from another message under an id that came round again.
    content_hash: [u8; 16],
    /// The deadline by this machine's calendar, for `Task::expires_in` after a restart only.
    expires_wall_ms: u64,
}

#[derive(Serialize, Deserialize)]
struct Settled {
    msg_id: MsgId,
    content_hash: [u8; 16],
    bytes: u64,
}

/// A task as it is put in and found again.
#[derive(Clone, PartialEq)]
pub(crate) struct StoredTask {
    pub(crate) msg_id: MsgId,
    pub(crate) trace_id: TraceId,
    pub(crate) flow_seq: u64,
    pub(crate) attempt: u32,
    pub(crate) progress: Progress,
    pub(crate) expires_wall_ms: u64,
    pub(crate) envelope: Envelope,
    pub(crate) outcome: Option<Arc<Outcome>>,
}

enum Op {
    Put(Box<StoredTask>),
    Adopt(MsgId, u32),
    Begin(MsgId),
    Finish(MsgId, Arc<Outcome>),
    Settle(MsgId),
    Remove(MsgId),
}

struct Write {
    op: Op,
    done: oneshot::Sender<Result<(), InboxError>>,
}

pub(crate) struct Inbox {
    writes: mpsc::Sender<Write>,
    database: Arc<Database>,
    path: PathBuf,
    closed: oneshot::Receiver<()>,
}

impl Inbox {
    /// As `open`; of an inbox that is in use it waits a moment for the end of who uses it.
    pub(crate) async fn open_when_free(
        dir: &Path,
        agent_id: Option<&AgentId>,
        writes_max: usize,
    ) -> Result<(Self, AgentId, Vec<StoredTask>), InboxError> {
        let deadline = Instant::now() + LOCKED_MAX;
        loop {
            match Self::open(dir, agent_id, writes_max) {
                Err(InboxError::Locked { .. }) if Instant::now() < deadline => sleep(LOCKED_POLL).await,
                opened => return opened,
            }
        }
    }

    /// Opens or makes `dir/inbox.redb`, locks it, and finds what an earlier run left. Without an id
    /// the agent gets the one kept beside it in `dir/agent_id`, or a new one. At most `writes_max`
    /// writes may wait.
    pub(crate) fn open(
        dir: &Path,
        agent_id: Option<&AgentId>,
        writes_max: usize,
    ) -> Result<(Self, AgentId, Vec<StoredTask>), InboxError> {
        let path = dir.join("inbox.redb");
        let disk = |error: std::io::Error| InboxError::Disk { path: path.clone(), reason: error.to_string() };
        std::fs::create_dir_all(dir).map_err(disk)?;
        let opened = catch_unwind(AssertUnwindSafe(|| open_database(&path)));
        let damaged = |reason: String| InboxError::Damaged { path: path.clone(), reason };
        let database = opened.map_err(|_| damaged("its structure makes no sense".into()))??;
        // The file's own entry must survive a power loss too.
        std::fs::File::open(dir).and_then(|dir| dir.sync_all()).map_err(disk)?;
        let store = Store { database: Arc::new(database), path: path.clone(), settled_bytes: 0 };
        let owner = store.owner().map_err(|error| store.failed(error))?;
        let agent_id = match (agent_id, &owner) {
            (Some(wanted), Some(owner)) if wanted.as_str() != owner => {
                return Err(InboxError::Foreign { path, owner: owner.clone(), wanted: wanted.clone() });
            }
            (Some(wanted), _) => wanted.clone(),
            (None, Some(owner)) => AgentId::parse(owner).map_err(|error| damaged(error.to_string()))?,
            (None, None) => kept_id(dir).map_err(disk)?,
        };
        if owner.is_none() {
            store.claim(&agent_id).map_err(|error| store.failed(error))?;
        }
        let tasks = catch_unwind(AssertUnwindSafe(|| store.load()))
            .map_err(|_| damaged("its rows make no sense".into()))??;
        let settled_bytes = store.settled_bytes().map_err(|error| store.failed(error))?;
        let store = Store { settled_bytes, ..store };
        let database = store.database.clone();
        let (writes, queue) = mpsc::channel(writes_max);
        let (closing, closed) = oneshot::channel();
        thread::Builder::new()
            .name("agent-reach-inbox".into())
            .spawn(move || {
                store.write_all(queue);
                let _ = closing.send(());
            })
            .map_err(disk)?;
        Ok((Self { writes, database, path, closed }, agent_id, tasks))
    }

    /// A new task; with an outcome, one that was done before and is answered again.
    pub(crate) fn put(&self, task: StoredTask) -> Stored {
        self.write(Op::Put(Box::new(task)))
    }

    /// A later attempt takes the place of an earlier one.
    pub(crate) fn adopt(&self, msg_id: &MsgId, attempt: u32) -> Stored {
        self.write(Op::Adopt(msg_id.clone(), attempt))
    }

    pub(crate) fn begin(&self, msg_id: &MsgId) -> Stored {
        self.write(Op::Begin(msg_id.clone()))
    }

    pub(crate) fn finish(&self, msg_id: &MsgId, outcome: Arc<Outcome>) -> Stored {
        self.write(Op::Finish(msg_id.clone(), outcome))
    }

    /// The cluster needs nothing more of it; a result goes to the ring, for repeats.
    pub(crate) fn settle(&self, msg_id: &MsgId) -> Stored {
        self.write(Op::Settle(msg_id.clone()))
    }

    pub(crate) fn remove(&self, msg_id: &MsgId) -> Stored {
        self.write(Op::Remove(msg_id.clone()))
    }

    /// Takes its place in the queue now; the answer comes when it is on disk.
    fn write(&self, op: Op) -> Stored {
        let (done, answer) = oneshot::channel();
        let sent = self.writes.try_send(Write { op, done }).is_ok();
        Stored { answer: sent.then_some(answer), path: self.path.clone() }
    }

    /// The result of a settled task with this content, if it is still in the ring.
    pub(crate) fn settled(
        &self,
        msg_id: &MsgId,
        content_hash: [u8; 16],
    ) -> Result<Option<Outcome>, InboxError> {
        settled(&self.database, msg_id, content_hash)
            .map_err(|error| InboxError::Disk { path: self.path.clone(), reason: error.to_string() })
    }

    /// Writes what waits and lets go of the file.
    pub(crate) async fn close(self) {
        let Self { writes, database, closed, .. } = self;
        drop((writes, database));
        let _ = closed.await;
    }
}

/// The answer to one write.
pub(crate) struct Stored {
    answer: Option<oneshot::Receiver<Result<(), InboxError>>>,
    path: PathBuf,
}

impl Stored {
    pub(crate) async fn done(self) -> Result<(), InboxError> {
        let gone = |reason: &str| InboxError::Disk { path: self.path.clone(), reason: reason.into() };
        match self.answer {
            None => Err(gone("its writer is stuck or has ended")),
            Some(answer) => answer.await.unwrap_or_else(|_| Err(gone("its writer has ended"))),
        }
    }
}

fn open_database(path: &Path) -> Result<Database, InboxError> {
    let opened =
        Database::builder().set_cache_size(CACHE_BYTES).set_check_integrity_on_open(true).create(path);
    opened.map_err(|error| match error {
        DatabaseError::DatabaseAlreadyOpen | DatabaseError::LockProtocolMismatch => {
            InboxError::Locked { path: path.into() }
        }
        DatabaseError::Storage(redb::StorageError::Io(error))
            if error.kind() != std::io::ErrorKind::InvalidData =>
        {
            InboxError::Disk { path: path.into(), reason: error.to_string() }
        }
        error => InboxError::Damaged { path: path.into(), reason: error.to_string() },
    })
}

/// The id in `dir/agent_id`; a new UUID (version 7) when there is none.
fn kept_id(dir: &Path) -> std::io::Result<AgentId> {
    use std::io::{Error, ErrorKind, Write};

    let path = dir.join("agent_id");
    match std::fs::read_to_string(&path) {
        Ok(text) => AgentId::parse(text.trim()).map_err(|error| Error::new(ErrorKind::InvalidData, error)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            // A ULID is a time and chance, as a version 7 UUID is; six bits say which it is.
            let bits = ulid::Ulid::generate().0;
            let bits = bits & !(0xf << 76) & !(0x3 << 62) | (0x7 << 76) | (0x2 << 62);
            let hex = format!("{bits:032x}");
            let words = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
            let agent_id =
                AgentId::parse(&words.join("-")).expect("hex digits and hyphens are legal in an id");
            let beside = dir.join("agent_id.new");
            let mut file = std::fs::File::create(&beside)?;
            writeln!(file, "{agent_id}")?;
            file.sync_all()?;
            std::fs::rename(&beside, &path)?;
            std::fs::File::open(dir)?.sync_all()?;
            Ok(agent_id)
        }
        Err(error) => Err(error),
    }
}

/// The file, as its one writer sees it.
struct Store {
    database: Arc<Database>,
    path: PathBuf,
    settled_bytes: u64,
}

impl Store {
    fn failed(&self, error: redb::Error) -> InboxError {
        let (path, reason) = (self.path.clone(), error.to_string());
        match error {
            redb::Error::Corrupted(_) => InboxError::Damaged { path, reason },
            _ => InboxError::Disk { path, reason },
        }
    }

    /// Makes the tables, and says whose they are.
    fn owner(&self) -> Result<Option<String>, redb::Error> {
        let txn = self.database.begin_write()?;
        let owner = {
            txn.open_table(TASKS)?;
            txn.open_table(ENVELOPES)?;
            txn.open_table(RESULTS)?;
            txn.open_table(SETTLED)?;
            txn.open_table(SETTLED_BY_ID)?;
            txn.open_table(META)?.get("agent_id")?.map(|owner| owner.value().to_owned())
        };
        txn.commit()?;
        Ok(owner)
    }

    fn claim(&self, agent_id: &AgentId) -> Result<(), redb::Error> {
        let txn = self.database.begin_write()?;
        txn.open_table(META)?.insert("agent_id", agent_id.as_str())?;
        txn.commit()?;
        Ok(())
    }

    fn load(&self) -> Result<Vec<StoredTask>, InboxError> {
        let damaged = |reason: &dyn fmt::Display| InboxError::Damaged {
            path: self.path.clone(),
            reason: reason.to_string(),
        };
        let rows = || -> Result<Vec<[Option<Vec<u8>>; 4]>, redb::Error> {
            let txn = self.database.begin_read()?;
            let (tasks, envelopes, results) =
                (txn.open_table(TASKS)?, txn.open_table(ENVELOPES)?, txn.open_table(RESULTS)?);
            let mut rows = Vec::new();
            for row in tasks.iter()? {
                let (key, row) = row?;
                let bytes = |found: Option<redb::AccessGuard<'_, &[u8]>>| found.map(|v| v.value().to_vec());
                rows.push([
                    Some(key.value().as_bytes().to_vec()),
                    Some(row.value().to_vec()),
                    bytes(envelopes.get(key.value())?),
                    bytes(results.get(key.value())?),
                ]);
            }
            Ok(rows)
        };
        let mut tasks = Vec::new();
        for [key, row, envelope, outcome] in rows().map_err(|error| self.failed(error))? {
            let key = String::from_utf8(key.unwrap_or_default()).map_err(|error| damaged(&error))?;
            let msg_id = MsgId::parse(&key).map_err(|error| damaged(&error))?;
            let row: Row =
                codec::decode("inbox row", &row.unwrap_or_default()).map_err(|error| damaged(&error))?;
            let envelope = envelope.ok_or_else(|| damaged(&format!("{msg_id} has no envelope")))?;
            let envelope = codec::decode("stored envelope", &envelope).map_err(|error| damaged(&error))?;
            let outcome = match (row.progress, outcome) {
                (Progress::Finished, Some(bytes)) => {
                    Some(codec::decode("stored result", &bytes).map_err(|error| damaged(&error))?)
                }
                (Progress::Finished, None) => return Err(damaged(&format!("{msg_id} has no result"))),
                _ => None,
            };
            tasks.push(StoredTask {
                msg_id,
                trace_id: row.trace_id,
                flow_seq: row.flow_seq,
                attempt: row.attempt,
                progress: row.progress,
                expires_wall_ms: row.expires_wall_ms,
                envelope,
                outcome: outcome.map(Arc::new),
            });
        }
        Ok(tasks)
    }

    fn settled_bytes(&self) -> Result<u64, redb::Error> {
        let txn = self.database.begin_read()?;
        let mut bytes = 0;
        for entry in txn.open_table(SETTLED)?.iter()? {
            bytes += decoded::<Settled>(entry?.1.value())?.bytes;
        }
        Ok(bytes)
    }

    /// Until the last handle is dropped. After a failed commit nothing more is taken: what the disk
    /// holds is no longer known.
    fn write_all(mut self, mut queue: mpsc::Receiver<Write>) {
        while let Some(first) = queue.blocking_recv() {
            let mut batch = VecDeque::from([first]);
            while batch.len() < BATCH_MAX {
                let Ok(next) = queue.try_recv() else { break };
                batch.push_back(next);
            }
            let committed = self.commit(&batch).map_err(|error| self.failed(error));
            for write in batch {
                // Whoever asked may have gone with its run.
                let _ = write.done.send(committed.clone());
            }
            if committed.is_err() {
                return;
            }
        }
    }

    fn commit(&mut self, batch: &VecDeque<Write>) -> Result<(), redb::Error> {
        let database = self.database.clone();
        let txn = database.begin_write()?;
        {
            let mut tables = Tables {
                tasks: txn.open_table(TASKS)?,
                envelopes: txn.open_table(ENVELOPES)?,
                results: txn.open_table(RESULTS)?,
                settled: txn.open_table(SETTLED)?,
                settled_by_id: txn.open_table(SETTLED_BY_ID)?,
                settled_bytes: &mut self.settled_bytes,
            };
            for write in batch {
                tables.apply(&write.op)?;
            }
        }
        txn.commit()?;
        Ok(())
    }
}

/// The tables inside one write transaction.
struct Tables<'a> {
    tasks: redb::Table<'a, &'static str, &'static [u8]>,
    envelopes: redb::Table<'a, &'static str, &'static [u8]>,
    results: redb::Table<'a, &'static str, &'static [u8]>,
    settled: redb::Table<'a, u64, &'static [u8]>,
    settled_by_id: redb::Table<'a, &'static str, u64>,
    settled_bytes: &'a mut u64,
}

impl Tables<'_> {
    fn apply(&mut self, op: &Op) -> Result<(), redb::Error> {
        match op {
            Op::Put(task) => self.put(task),
            Op::Adopt(msg_id, attempt) => self.change(msg_id, |row| row.attempt = *attempt),
            Op::Begin(msg_id) => self.change(msg_id, |row| row.progress = Progress::Running),
            Op::Finish(msg_id, outcome) => {
                self.results.insert(msg_id.as_str(), codec::encode(&**outcome).as_ref())?;
                self.change(msg_id, |row| row.progress = Progress::Finished)
            }
            Op::Settle(msg_id) => self.settle(msg_id),
            Op::Remove(msg_id) => self.remove(msg_id),
        }
    }

    fn put(&mut self, task: &StoredTask) -> Result<(), redb::Error> {
        self.unsettle(&task.msg_id)?;
        let row = Row {
            trace_id: task.trace_id.clone(),
            flow_seq: task.flow_seq,
            attempt: task.attempt,
            progress: task.progress,
            content_hash: task.envelope.content_hash(),
            expires_wall_ms: task.expires_wall_ms,
        };
        let key = task.msg_id.as_str();
        self.tasks.insert(key, codec::encode(&row).as_ref())?;
        self.envelopes.insert(key, codec::encode(&task.envelope).as_ref())?;
        match &task.outcome {
            Some(outcome) => self.results.insert(key, codec::encode(&**outcome).as_ref())?,
            None => self.results.remove(key)?,
        };
        Ok(())
    }

    fn row(&self, msg_id: &MsgId) -> Result<Option<Row>, redb::Error> {
        self.tasks.get(msg_id.as_str())?.map(|row| decoded(row.value())).transpose()
    }

    /// A row that is gone stays gone.
    fn change(&mut self, msg_id: &MsgId, change: impl FnOnce(&mut Row)) -> Result<(), redb::Error> {
        if let Some(mut row) = self.row(msg_id)? {
            change(&mut row);
            self.tasks.insert(msg_id.as_str(), codec::encode(&row).as_ref())?;
        }
        Ok(())
    }

    fn remove(&mut self, msg_id: &MsgId) -> Result<(), redb::Error> {
        // The result of a settled message is the ring's.
        if self.tasks.remove(msg_id.as_str())?.is_some() {
            self.envelopes.remove(msg_id.as_str())?;
            self.results.remove(msg_id.as_str())?;
        }
        Ok(())
    }

    fn settle(&mut self, msg_id: &MsgId) -> Result<(), redb::Error> {
        let key = msg_id.as_str();
        let Some(row) = self.row(msg_id)? else { return Ok(()) };
        let result = self.results.get(key)?.map(|bytes| bytes.value().to_vec());
        let Some(result) = result else { return self.remove(msg_id) };
        if !matches!(decoded::<Outcome>(&result)?, Outcome::Done { .. }) {
            // A failure is no work to return: the next attempt may do better.
            return self.remove(msg_id);
        }
        self.tasks.remove(key)?;
        self.envelopes.remove(key)?;
        let bytes = result.len() as u64;
        let settled = Settled { msg_id: msg_id.clone(), content_hash: row.content_hash, bytes };
        let ordinal = self.settled.last()?.map_or(0, |(last, _)| last.value() + 1);
        self.settled.insert(ordinal, codec::encode(&settled).as_ref())?;
        self.settled_by_id.insert(key, ordinal)?;
        *self.settled_bytes += bytes;
        while self.settled.len()? > SETTLED_MAX || *self.settled_bytes > SETTLED_BYTES_MAX {
            let oldest = self.settled.first()?.map(|(_, settled)| decoded::<Settled>(settled.value()));
            let Some(oldest) = oldest.transpose()? else { break };
            self.unsettle(&oldest.msg_id)?;
        }
        Ok(())
    }

    /// Out of the ring, result included.
    fn unsettle(&mut self, msg_id: &MsgId) -> Result<(), redb::Error> {
        let ordinal = self.settled_by_id.remove(msg_id.as_str())?.map(|ordinal| ordinal.value());
        if let Some(ordinal) = ordinal {
            let settled = self.settled.remove(ordinal)?.map(|row| decoded::<Settled>(row.value()));
            *self.settled_bytes -= settled.transpose()?.map_or(0, |settled| settled.bytes);
            self.results.remove(msg_id.as_str())?;
        }
        Ok(())
    }
}

fn settled(
    database: &Database,
    msg_id: &MsgId,
    content_hash: [u8; 16],
) -> Result<Option<Outcome>, redb::Error> {
    let txn = database.begin_read()?;
    let Some(ordinal) = txn.open_table(SETTLED_BY_ID)?.get(msg_id.as_str())? else { return Ok(None) };
    let Some(row) = txn.open_table(SETTLED)?.get(ordinal.value())? else { return Ok(None) };
    if decoded::<Settled>(row.value())?.content_hash != content_hash {
        return Ok(None);
    }
    let result = txn.open_table(RESULTS)?.get(msg_id.as_str())?;
    result.map(|bytes| decoded(bytes.value())).transpose()
}

fn decoded<T: for<'a> Deserialize<'a>>(bytes: &[u8]) -> Result<T, redb::Error> {
    codec::decode("inbox row", bytes).map_err(|error| redb::Error::Corrupted(error.to_string()))
}

#[cfg(test)]
mod tests;
