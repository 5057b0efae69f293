//! The replicated tables over any sorted disk: rows there, the unfinished part in memory as well.

mod batch;
mod load;

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read},
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, RwLock, RwLockReadGuard},
};

use reach_machine::Live;
use reach_protocol::{
    AgentId, Envelope, EventRow, EventType, Json, MsgId, TraceId,
    agent::Tombstone,
    codec::Encoded,
    message::{DeadLetter, Hop, MessageRecord},
};
use serde::de::DeserializeOwned;

use self::batch::OpenBatch;
use crate::{
    error::{Error, Latch},
    kv::{Kv, Order},
    schema::{self, Table},
    store::{Applied, Batch, Checkpoint, CheckpointFile, Tables},
};

/// What a store does with its tables as a whole.
pub trait Engine: Send + Sync + fmt::Debug + 'static {
    type Disk: Kv;

    /// Makes every write that was made before the call durable.
    fn flush(&self, disk: &Self::Disk) -> io::Result<()>;
    /// Writes a copy into the new folder `dir`, and reads its position from inside it.
    fn checkpoint(&self, disk: &Self::Disk, dir: &Path) -> io::Result<Applied>;
    /// Opens a copy in `dir` and makes it ours, though not yet the current one.
    fn adopt(&self, dir: &Path) -> io::Result<Self::Disk>;
    /// What was adopted is of no use.
    fn reject(&self, disk: Self::Disk);
    /// Makes an adopted disk the current one, durably and at once.
    fn promote(&self, disk: &Self::Disk) -> io::Result<()>;
    /// The disk is no longer the current one: its files go with the last reader.
    fn retire(&self, disk: &Self::Disk);
}

pub struct TableStore<E: Engine> {
    engine: E,
    latch: Arc<Latch>,
    disk: RwLock<Arc<E::Disk>>,
    live: RwLock<Live>,
    applied: RwLock<Applied>,
    /// Held while the rows change: by a commit or an install.
    changing: Mutex<()>,
}

impl<E: Engine> TableStore<E> {
    pub(crate) fn open(engine: E, disk: E::Disk, latch: Arc<Latch>) -> Result<Arc<Self>, Error> {
        let applied = load::applied(&disk).map_err(Error::io("the tables"))?;
        let live = load::live(&disk).map_err(Error::io("the tables"))?;
        Ok(Arc::new(Self {
            engine,
            latch,
            disk: RwLock::new(Arc::new(disk)),
            live: RwLock::new(live),
            applied: RwLock::new(applied),
            changing: Mutex::new(()),
        }))
    }

    fn disk(&self) -> Arc<E::Disk> {
        self.disk.read().expect(POISON).clone()
    }

    /// A disk error that ends the process.
    fn fatal<T>(&self, what: &'static str, done: io::Result<T>) -> io::Result<T> {
        done.map_err(|error| self.latch.trip(what, error))
    }

    fn row<T: DeserializeOwned>(
        &self,
        table: Table,
        key: &[u8],
        what: &'static str,
    ) -> io::Result<Option<T>> {
        self.fatal("reading the tables", row(&*self.disk(), table, key, what))
    }
}

const POISON: &str = "nothing panics while the tables change";

fn row<T: DeserializeOwned>(
    disk: &impl Kv,
    table: Table,
    key: &[u8],
    what: &'static str,
) -> io::Result<Option<T>> {
    disk.read(table, key)?.map(|value| schema::decode(what, &value)).transpose()
}

/// Events `from..to`, as many as have `bytes_max` bytes together, and at least one where there is one.
fn read_events(
    disk: &impl Kv,
    event_type: &EventType,
    from: u64,
    to: u64,
    bytes_max: usize,
) -> io::Result<Vec<EventRow>> {
    let (mut rows, mut bytes) = (Vec::new(), 0);
    if from >= to {
        return Ok(rows);
    }
    let (from, to) = (schema::event(event_type, from), schema::event(event_type, to));
    disk.scan(Table::Events, &from, &to, Order::Up, &mut |_, value| {
        bytes += value.len();
        if bytes > bytes_max && !rows.is_empty() {
            return Ok(ControlFlow::Break(()));
        }
        rows.push(schema::decode("event", value)?);
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(rows)
}

impl<E: Engine> Tables for TableStore<E> {
    fn applied(&self) -> Applied {
        self.applied.read().expect(POISON).clone()
    }

    fn batch(&self) -> Box<dyn Batch + '_> {
        Box::new(OpenBatch::new(self))
    }

    fn live(&self) -> RwLockReadGuard<'_, Live> {
        self.live.read().expect(POISON)
    }

    fn tombstone(&self, agent_id: &AgentId) -> io::Result<Option<Tombstone>> {
        self.row(Table::Registry, &schema::tombstone(agent_id), "tombstone")
    }

    fn message(&self, msg_id: &MsgId) -> io::Result<Option<Arc<MessageRecord>>> {
        if let Some(record) = self.live().messages.get(msg_id) {
            return Ok(Some(record.clone()));
        }
        Ok(self.row(Table::Messages, &schema::message(msg_id), "message")?.map(Arc::new))
    }

    fn envelope(&self, msg_id: &MsgId) -> io::Result<Option<Encoded<Envelope>>> {
        let read = self.disk().read(Table::Bodies, &schema::envelope(msg_id));
        let bytes = self.fatal("reading the tables", read)?;
        Ok(bytes.map(|bytes| Encoded::from_bytes(bytes.into())))
    }

    fn result(&self, msg_id: &MsgId) -> io::Result<Option<Json>> {
        self.row(Table::Bodies, &schema::result(msg_id), "result")
    }

    fn hops(&self, trace_id: &TraceId, max: usize) -> io::Result<Vec<Hop>> {
        let mut hops = Vec::new();
        if max == 0 {
            return Ok(hops);
        }
        let (from, to) = (schema::hop(trace_id, 0), schema::after(&schema::trace(trace_id)));
        let scanned = self.disk().scan(Table::Traces, &from, &to, Order::Up, &mut |_, value| {
            hops.push(schema::decode("hop", value)?);
            Ok(if hops.len() < max { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        });
        self.fatal("reading the tables", scanned)?;
        Ok(hops)
    }

    fn events(
        &self,
        event_type: &EventType,
        from: u64,
        to: u64,
        bytes_max: usize,
    ) -> io::Result<Vec<EventRow>> {
        let read = read_events(&*self.disk(), event_type, from, to, bytes_max);
        self.fatal("reading the tables", read)
    }

    fn was_delivered(&self, msg_id: &MsgId, agent_id: &AgentId) -> io::Result<bool> {
        let key = schema::delivered(msg_id, agent_id);
        Ok(self.row::<()>(Table::Index, &key, "delivery mark")?.is_some())
    }

    fn dead_letter(&self, msg_id: &MsgId) -> io::Result<Option<DeadLetter>> {
        self.row(Table::Index, &schema::dead_letter(msg_id), "dead letter")
    }

    fn messages(&self, after: Option<&MsgId>, max: usize) -> io::Result<Vec<Arc<MessageRecord>>> {
        let all = schema::accepted_all();
        let to = match after {
            None => schema::after(&all),
            Some(msg_id) => match self.message(msg_id)? {
                None => return Ok(Vec::new()),
                Some(record) => schema::accepted(record.accepted, msg_id),
            },
        };
        let mut ids = Vec::new();
        let scanned = self.disk().scan(Table::Index, &all, &to, Order::Down, &mut |key, _| {
            if ids.len() == max {
                return Ok(ControlFlow::Break(()));
            }
            ids.push(schema::accepted_message(key)?);
            Ok(ControlFlow::Continue(()))
        });
        self.fatal("reading the tables", scanned)?;
        let mut messages = Vec::with_capacity(ids.len());
        for msg_id in ids {
            messages.extend(self.message(&msg_id)?);
        }
        Ok(messages)
    }

    fn visit(&self, visit: &mut dyn FnMut(&[u8], &[u8])) -> io::Result<()> {
        // No commit may come between two tables.
        let _changing = self.changing.lock().expect(POISON);
        let disk = self.disk();
        let group = schema::group();
        for table in Table::TABLES {
            let mut tagged = vec![table as u8];
            let scanned = disk.scan(table, &group, &schema::after(&group), Order::Up, &mut |key, value| {
                tagged.truncate(1);
                tagged.extend(key);
                visit(&tagged, value);
                Ok(ControlFlow::Continue(()))
            });
            self.fatal("reading the tables", scanned)?;
        }
        Ok(())
    }

    fn checkpoint(&self, dir: PathBuf) -> io::Result<Checkpoint> {
        self.latch.check()?;
        let made = self.engine.checkpoint(&self.disk(), &dir).and_then(|applied| {
            let files = files(&dir)?;
            sync_dir(&dir)?;
            dir.parent().map_or(Ok(()), sync_dir)?;
            Ok(Checkpoint { dir, applied, files })
        });
        self.fatal("making a checkpoint", made)
    }

    fn install(&self, dir: PathBuf) -> io::Result<Applied> {
        self.latch.check()?;
        let _changing = self.changing.lock().expect(POISON);
        files(&dir)?;
        sync_dir(&dir)?;
        let disk = self.engine.adopt(&dir)?;
        let read = load::applied(&disk).and_then(|applied| {
            let here = self.applied().index;
            if applied.index < here {
                let text = format!("a checkpoint at {} can't replace tables at {here}", applied.index);
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
            Ok((applied, load::live(&disk)?))
        });
        let (applied, live) = match read {
            Ok(read) => read,
            Err(error) => {
                self.engine.reject(disk);
                return Err(error);
            }
        };
        self.fatal("installing a checkpoint", self.engine.promote(&disk))?;
        // Under the lock of `live`, so that whoever holds it sees one position.
        let mut live_now = self.live.write().expect(POISON);
        let old = std::mem::replace(&mut *self.disk.write().expect(POISON), Arc::new(disk));
        *live_now = live;
        *self.applied.write().expect(POISON) = applied.clone();
        drop(live_now);
        self.engine.retire(&old);
        Ok(applied)
    }

    fn flush(&self) -> io::Result<u64> {
        self.latch.check()?;
        // Read first: what is committed meanwhile may miss the flush.
        let applied = self.applied().index;
        self.fatal("flushing the tables", self.engine.flush(&self.disk()))?;
        Ok(applied)
    }
}

/// The files of a checkpoint, synced, with their sizes and checksums.
fn files(dir: &Path) -> io::Result<Vec<CheckpointFile>> {
    let mut files = Vec::new();
    let mut buffer = vec![0; 256 << 10];
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let mut file = File::open(entry.path())?;
        let (mut bytes, mut crc32c) = (0, 0);
        loop {
            let read = file.read(&mut buffer)?;
            if read == 0 {
                break;
            }
            bytes += read as u64;
            crc32c = crc32c::crc32c_append(crc32c, &buffer[..read]);
        }
        file.sync_all()?;
        let name = entry.file_name().into_string();
        let name = name.map_err(|_| io::Error::other("a checkpoint holds a file of a strange name"))?;
        files.push(CheckpointFile { name, bytes, crc32c });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

pub(crate) fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

impl<E: Engine> fmt::Debug for TableStore<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableStore")
            .field("engine", &self.engine)
            .field("applied", &self.applied().index)
            .finish_non_exhaustive()
    }
}
