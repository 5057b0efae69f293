//! One RocksDB database, a column family for each table.

use std::{
    fmt, fs, io,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use rocksdb::{
    ColumnFamily, ColumnFamilyDescriptor, DB, FlushOptions, ReadOptions, WriteBatch, WriteOptions,
};

use super::{Lock, io_error, tuning::Tuning};
use crate::{
    kv::{Kv, Op, Order, Visit},
    schema::Table,
};

/// What a record of a write batch takes beside its key and value, at most: kind, family, two lengths.
const RECORD_OVERHEAD: usize = 16;

/// Fields go in their order: the database is closed before its folder or the lock go.
pub struct RocksKv {
    db: DB,
    tables: &'static [Table],
    folder: Folder,
    _lock: Lock,
}

struct Folder {
    path: PathBuf,
    /// Nobody needs it any more once the database is closed.
    goes: AtomicBool,
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.goes.load(Ordering::SeqCst)
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            // The next start removes it.
            tracing::warn!(dir = %self.path.display(), %error, "old_tables_left");
        }
    }
}

impl RocksKv {
    pub(super) fn open(
        path: &Path,
        tables: &'static [Table],
        tuning: &Tuning,
        lock: Lock,
    ) -> io::Result<Self> {
        let families =
            tables.iter().map(|table| ColumnFamilyDescriptor::new(table.name(), tuning.table(*table)));
        let db = DB::open_cf_descriptors(&tuning.database(tables), path, families).map_err(io_error)?;
        let folder = Folder { path: path.to_owned(), goes: AtomicBool::new(false) };
        Ok(Self { db, tables, folder, _lock: lock })
    }

    /// Opens it without writing to its files.
    pub(super) fn open_to_read(
        path: &Path,
        tables: &'static [Table],
        tuning: &Tuning,
        lock: Lock,
    ) -> io::Result<Self> {
        let families =
            tables.iter().map(|table| ColumnFamilyDescriptor::new(table.name(), tuning.table(*table)));
        let db = DB::open_cf_descriptors_read_only(&tuning.database(tables), path, families, false);
        let folder = Folder { path: path.to_owned(), goes: AtomicBool::new(false) };
        Ok(Self { db: db.map_err(io_error)?, tables, folder, _lock: lock })
    }

    pub(super) fn flush(&self) -> io::Result<()> {
        let families: Vec<_> = self.tables.iter().map(|table| self.family(*table)).collect();
        let mut options = FlushOptions::default();
        options.set_wait(true);
        self.db.flush_cfs_opt(&families, &options).map_err(io_error)
    }

    pub(super) fn checkpoint(&self, dir: &Path) -> io::Result<()> {
        let checkpoint = rocksdb::checkpoint::Checkpoint::new(&self.db).map_err(io_error)?;
        checkpoint.create_checkpoint(dir).map_err(io_error)
    }

    pub(super) fn path(&self) -> &Path {
        &self.folder.path
    }

    /// Lets the folder go with the last user.
    pub(super) fn remove_when_closed(&self) {
        self.folder.goes.store(true, Ordering::SeqCst);
    }

    fn family(&self, table: Table) -> &ColumnFamily {
        self.db.cf_handle(table.name()).expect("all families were named when it was opened")
    }
}

impl Kv for RocksKv {
    fn read(&self, table: Table, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        self.db.get_cf(self.family(table), key).map_err(io_error)
    }

    fn scan(
        &self,
        table: Table,
        from: &[u8],
        to: &[u8],
        order: Order,
        visit: &mut Visit<'_>,
    ) -> io::Result<()> {
        let mut options = ReadOptions::default();
        options.set_iterate_lower_bound(from);
        options.set_iterate_upper_bound(to);
        let mut rows = self.db.raw_iterator_cf_opt(self.family(table), options);
        match order {
            Order::Up => rows.seek_to_first(),
            Order::Down => rows.seek_to_last(),
        }
        while let Some((key, value)) = rows.item() {
            if let ControlFlow::Break(()) = visit(key, value)? {
                return Ok(());
            }
            match order {
                Order::Up => rows.next(),
                Order::Down => rows.prev(),
            }
        }
        rows.status().map_err(io_error)
    }

    fn write(&self, ops: &[Op], sync: bool) -> io::Result<()> {
        // Grown step by step, a large batch would be copied as often.
        let bytes: usize = ops.iter().map(|op| op.bytes() + RECORD_OVERHEAD).sum();
        let mut batch = WriteBatch::with_capacity_bytes(bytes);
        for op in ops {
            match op {
                Op::Put { table, key, value } => batch.put_cf(self.family(*table), key, value),
                Op::Remove { table, key } => batch.delete_cf(self.family(*table), key),
                Op::RemoveRange { table, from, to } => {
                    batch.delete_range_cf(self.family(*table), from, to);
                }
            }
        }
        let mut options = WriteOptions::default();
        options.set_sync(sync);
        // What need not be durable at once is rebuilt from the log after a crash; a write-ahead log
        // of its own would be the same bytes once more.
        options.disable_wal(!sync);
        self.db.write_opt(batch, &options).map_err(io_error)
    }
}

impl fmt::Debug for RocksKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RocksKv").field("path", &self.folder.path).finish_non_exhaustive()
    }
}
