//! The memory disk's tables as a whole. A checkpoint is one real file, so that whoever sends and
//! receives checkpoints needs no second way.

use std::{fs, io, path::Path};

use super::{
    disk::{MemoryDisk, POISON, RowSet},
    kv::MemoryKv,
};
use crate::{
    error::damaged,
    kv::{Kv, Op},
    schema::{self, Table},
    store::Applied,
    tables::Engine,
};

#[derive(Debug)]
pub struct MemoryEngine {
    disk: MemoryDisk,
}

/// A file's rows: table, key, value.
type FileRows = Vec<(u8, Vec<u8>, Vec<u8>)>;

const FILE: &str = "rows";

impl MemoryEngine {
    pub(super) fn new(disk: &MemoryDisk) -> Self {
        Self { disk: disk.clone() }
    }
}

impl Engine for MemoryEngine {
    type Disk = MemoryKv;

    fn flush(&self, disk: &MemoryKv) -> io::Result<()> {
        disk.check()?;
        let tables = disk.tables.as_ref().expect("only tables are flushed");
        tables.lock().expect(POISON).sync();
        Ok(())
    }

    fn checkpoint(&self, disk: &MemoryKv, dir: &Path) -> io::Result<Applied> {
        self.flush(disk)?;
        let rows = disk.rows(Clone::clone);
        let mut file = FileRows::new();
        for (table, rows) in &rows.0 {
            file.extend(rows.iter().map(|(key, row)| (*table as u8, key.clone(), row.value.to_vec())));
        }
        dir.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::create_dir(dir)?;
        fs::write(dir.join(FILE), reach_protocol::codec::encode(&file))?;
        let copy = MemoryKv::adopted(&self.disk, rows);
        let applied = copy.read(Table::Meta, &schema::applied())?;
        applied.map_or(Ok(Applied::default()), |value| schema::decode_applied(&value))
    }

    fn adopt(&self, dir: &Path) -> io::Result<MemoryKv> {
        let file: FileRows = schema::decode("checkpoint", &fs::read(dir.join(FILE))?)?;
        let mut rows = RowSet::default();
        for (number, key, value) in file {
            let table = Table::TABLES.into_iter().find(|table| *table as u8 == number);
            let table = table.ok_or_else(|| damaged(format!("a checkpoint names table {number}")))?;
            rows.apply(&Op::Put { table, key, value });
        }
        fs::remove_dir_all(dir)?;
        Ok(MemoryKv::adopted(&self.disk, rows))
    }

    fn reject(&self, disk: MemoryKv) {
        drop(disk);
    }

    fn promote(&self, disk: &MemoryKv) -> io::Result<()> {
        disk.check()?;
        self.disk.set_tables(disk.tables.clone().expect("only tables are installed"));
        Ok(())
    }

    fn retire(&self, _disk: &MemoryKv) {}
}
