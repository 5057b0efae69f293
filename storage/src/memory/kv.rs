//! A store's handle on the memory disk: of one opening, and of one of its two parts.

use std::{
    fmt, io,
    ops::ControlFlow,
    sync::{Arc, Mutex},
};

use super::disk::{MemoryDisk, POISON, Row, RowSet, TableRows};
use crate::{
    error::damaged,
    kv::{Kv, Op, Order, Visit},
    schema::Table,
};

pub struct MemoryKv {
    pub(super) disk: MemoryDisk,
    opened: u64,
    /// The tables' rows; `None` for the log, whose rows the disk keeps itself.
    pub(super) tables: Option<Arc<Mutex<TableRows>>>,
}

impl MemoryKv {
    pub(super) fn log(disk: &MemoryDisk) -> Self {
        Self { disk: disk.clone(), opened: disk.opened(), tables: None }
    }

    pub(super) fn tables(disk: &MemoryDisk) -> Self {
        Self { disk: disk.clone(), opened: disk.opened(), tables: Some(disk.tables()) }
    }

    /// Tables that are not yet the disk's.
    pub(super) fn adopted(disk: &MemoryDisk, rows: RowSet) -> Self {
        let tables = Arc::new(Mutex::new(TableRows::durable(rows)));
        Self { disk: disk.clone(), opened: disk.opened(), tables: Some(tables) }
    }

    pub(super) fn check(&self) -> io::Result<()> {
        self.disk.check_tables(self.opened)
    }

    pub(super) fn rows<T>(&self, read: impl FnOnce(&RowSet) -> T) -> T {
        match &self.tables {
            None => self.disk.log_rows(read),
            Some(tables) => read(&tables.lock().expect(POISON).now),
        }
    }
}

impl Kv for MemoryKv {
    fn read(&self, table: Table, key: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let row = self.rows(|rows| rows.0.get(&table).and_then(|rows| rows.get(key)).cloned());
        row.map(|row| checked(table, &row).map(<[u8]>::to_vec)).transpose()
    }

    fn scan(
        &self,
        table: Table,
        from: &[u8],
        to: &[u8],
        order: Order,
        visit: &mut Visit<'_>,
    ) -> io::Result<()> {
        // In steps, so that neither the lock is held while rows are seen nor all of them copied.
        const STEP: usize = 64;
        let (mut from, mut to) = (from.to_vec(), to.to_vec());
        loop {
            let step: Vec<(Vec<u8>, Row)> = self.rows(|rows| {
                let Some(rows) = rows.0.get(&table).filter(|_| from < to) else {
                    return Vec::new();
                };
                let range = rows.range(from.clone()..to.clone());
                let copy = |(key, row): (&Vec<u8>, &Row)| (key.clone(), row.clone());
                match order {
                    Order::Up => range.take(STEP).map(copy).collect(),
                    Order::Down => range.rev().take(STEP).map(copy).collect(),
                }
            });
            for (key, row) in &step {
                if let ControlFlow::Break(()) = visit(key, checked(table, row)?)? {
                    return Ok(());
                }
            }
            match step.into_iter().nth(STEP - 1) {
                None => return Ok(()),
                Some((key, _)) if order == Order::Down => to = key,
                Some((mut key, _)) => {
                    key.push(0);
                    from = key;
                }
            }
        }
    }

    fn write(&self, ops: &[Op], _sync: bool) -> io::Result<()> {
        match &self.tables {
            None => self.disk.write_log(self.opened, ops),
            Some(tables) => {
                self.check()?;
                tables.lock().expect(POISON).write(ops);
                Ok(())
            }
        }
    }
}

fn checked(table: Table, row: &Row) -> io::Result<&[u8]> {
    if crc32c::crc32c(&row.value) == row.crc32c {
        return Ok(&row.value);
    }
    Err(damaged(format!("a row of {} does not have its checksum", table.name())))
}

impl fmt::Debug for MemoryKv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = if self.tables.is_some() { "tables" } else { "log" };
        f.debug_struct("MemoryKv").field("part", &part).field("opened", &self.opened).finish_non_exhaustive()
    }
}
