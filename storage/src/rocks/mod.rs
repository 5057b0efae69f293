//! The store on RocksDB: one database for the log, whose every write is synced, and one for the
//! tables, rebuilt from the log after a crash.
//!
//! ```text
//! dir/LOCK            held while the store is open
//! dir/ballast         given up when the disk is full
//! dir/log/            the log's database
//! dir/log/ACKED       the marker of acknowledged entries
//! dir/state/CURRENT   the name of the tables' folder
//! dir/state/t-…/      the tables' database
//! ```

mod engine;
mod kv;
mod marker;
mod tuning;

use std::{
    fs::{self, File, TryLockError},
    io,
    path::Path,
};

use self::marker::MarkerFile;
pub use self::{engine::RocksEngine, kv::RocksKv};
use crate::{
    Opened,
    error::{Error, Latch, OnFatal},
    log::{Log, LogOptions, WrittenBy},
    schema::Table,
    space::Space,
    store::{LogStore, MetaKey, Tables},
    tables::{TableStore, sync_dir},
};

pub type RocksLog = Log<RocksKv>;
pub type RocksTables = TableStore<RocksEngine>;

pub struct Options {
    pub log: LogOptions,
    /// Block cache shared by both databases, index and filter blocks included. Default 64 MiB.
    pub cache_bytes: usize,
    /// Size of the ballast file; 0 for none. Default 64 MiB.
    pub ballast_bytes: u64,
    /// With less free space than this, nothing new is taken in. Default 256 MiB.
    pub low_space_bytes: u64,
    /// Told of a failing disk: the process must end. Default: only logs it.
    pub on_fatal: OnFatal,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            log: LogOptions::default(),
            cache_bytes: 64 << 20,
            ballast_bytes: 64 << 20,
            low_space_bytes: 256 << 20,
            on_fatal: crate::error::log_only(),
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("log", &self.log)
            .field("cache_bytes", &self.cache_bytes)
            .field("ballast_bytes", &self.ballast_bytes)
            .field("low_space_bytes", &self.low_space_bytes)
            .finish_non_exhaustive()
    }
}

/// Opens the store in `dir`, or makes a new one there. It closes when both handles are dropped.
pub fn open(dir: &Path, options: Options) -> Result<Opened<RocksLog, RocksTables>, Error> {
    fs::create_dir_all(dir).map_err(Error::io(format!("the folder {}", dir.display())))?;
    let lock = lock(dir)?;
    let space = Space::new(dir, options.low_space_bytes);
    let ballast = space.set_ballast(options.ballast_bytes);
    if !ballast.map_err(Error::io("the ballast file"))? && options.ballast_bytes > 0 {
        tracing::warn!(dir = %dir.display(), "no_ballast");
    }
    match open_databases(dir, &options, &lock) {
        // Recovery writes before it frees: this is what the ballast is kept for.
        Err(Error::StorageFull { what }) => {
            tracing::warn!(dir = %dir.display(), what, "ballast_released");
            space.release_ballast().map_err(Error::io("the ballast file"))?;
            open_databases(dir, &options, &lock)
        }
        opened => opened,
    }
}

fn open_databases(
    dir: &Path,
    options: &Options,
    lock: &Lock,
) -> Result<Opened<RocksLog, RocksTables>, Error> {
    let latch = Latch::new(options.on_fatal.clone());
    let tuning = tuning::Tuning::new(options.cache_bytes);
    let log_dir = dir.join("log");
    let has_log = log_dir.join("CURRENT").exists();
    let (engine, disk) = RocksEngine::open(&dir.join("state"), tuning.clone(), has_log, lock.clone())?;
    let tables = TableStore::open(engine, disk, latch.clone())?;
    let applied = tables.applied().index;
    if !has_log && applied > 0 {
        let reason = format!("it is missing, though entries up to {applied} were applied");
        return Err(Error::Damaged { what: log_dir.display().to_string(), reason });
    }

    let log_error = || Error::io(format!("the log in {}", log_dir.display()));
    let disk = RocksKv::open(&log_dir, &Table::LOG, &tuning, lock.clone()).map_err(log_error())?;
    let (marker, marked) = MarkerFile::open(&log_dir.join("ACKED")).map_err(log_error())?;
    sync_dir(&log_dir).and_then(|()| sync_dir(dir)).map_err(log_error())?;
    let marker = (Box::new(marker) as Box<_>, marked);
    let log = Log::open(disk, marker, latch, options.log, WrittenBy::Thread, &log_dir)?;
    let identity = log.meta(MetaKey::Identity).map_err(log_error())?;
    Ok(Opened { log, tables, identity })
}

/// Held by both databases: free when both are closed.
type Lock = std::sync::Arc<File>;

fn lock(dir: &Path) -> Result<Lock, Error> {
    let path = dir.join("LOCK");
    let file = File::create(&path).map_err(Error::io(path.display().to_string()))?;
    match file.try_lock() {
        Ok(()) => Ok(file.into()),
        Err(TryLockError::WouldBlock) => Err(Error::InUse { dir: dir.to_owned() }),
        Err(TryLockError::Error(source)) => Err(Error::io(path.display().to_string())(source)),
    }
}

fn io_error(error: rocksdb::Error) -> io::Error {
    let text = error.to_string();
    let kind = match error.kind() {
        rocksdb::ErrorKind::Corruption => io::ErrorKind::InvalidData,
        // The library hands out no code for it, only the system's own words.
        _ if text.contains("No space left on device") => io::ErrorKind::StorageFull,
        _ if text.contains("Disk quota exceeded") => io::ErrorKind::QuotaExceeded,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, text)
}
