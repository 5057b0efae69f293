//! The store in memory, for tests: the same code as on RocksDB, over a disk whose faults are ours.
//! The disk outlives the store, as a real one outlives the process.

mod disk;
mod engine;
mod kv;

use std::sync::Arc;

pub use self::{
    disk::{MemoryDisk, Part},
    engine::MemoryEngine,
    kv::MemoryKv,
};
use crate::{
    Opened,
    error::{Error, Latch, OnFatal},
    log::{Log, LogOptions, WrittenBy},
    store::{LogStore, MetaKey},
    tables::TableStore,
};

pub type MemoryLog = Log<MemoryKv>;
pub type MemoryTables = TableStore<MemoryEngine>;

pub struct Options {
    pub log: LogOptions,
    /// Writes on a thread of the log's own, as on a real disk. Without it (the default) every
    /// write is done, and its `done` called, before the call returns: what a paused clock needs,
    /// since it would run ahead of a thread it can't see.
    pub writer_thread: bool,
    /// Told of a failing disk. Default: only logs it.
    pub on_fatal: OnFatal,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            log: LogOptions { marker_every: std::time::Duration::ZERO, ..LogOptions::default() },
            writer_thread: false,
            on_fatal: crate::error::log_only(),
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("log", &self.log)
            .field("writer_thread", &self.writer_thread)
            .finish_non_exhaustive()
    }
}

/// Opens what is on `disk`. A store that is still open on it is cut off, as by a kill.
pub fn open(disk: &MemoryDisk, options: Options) -> Result<Opened<MemoryLog, MemoryTables>, Error> {
    disk.kill();
    let latch = Latch::new(options.on_fatal);
    let written_by = if options.writer_thread { WrittenBy::Thread } else { WrittenBy::Caller };
    let tables = TableStore::open(MemoryEngine::new(disk), MemoryKv::tables(disk), latch.clone())?;
    let marker = (Box::new(disk.marker()) as Box<_>, disk.marked());
    let dir = std::path::Path::new("memory");
    let log = Log::open(MemoryKv::log(disk), marker, latch.clone(), options.log, written_by, dir)?;
    disk.attach(log.shared(), &latch);
    let identity = log.meta(MetaKey::Identity).map_err(Error::io("the identity"))?;
    Ok(Opened { log, tables: Arc::clone(&tables), identity })
}
