//! The little that both stores must know of a disk: sorted rows in named tables, changed by
//! all-or-nothing writes. Everything above this trait is one code for RocksDB and for memory.

use std::{fmt, io, ops::ControlFlow};

use crate::schema::Table;

/// One change of one row, or of a range of rows.
#[derive(Clone, PartialEq, Eq)]
pub enum Op {
    Put {
        table: Table,
        key: Vec<u8>,
        value: Vec<u8>,
    },
    Remove {
        table: Table,
        key: Vec<u8>,
    },
    /// Every row with `from <= key < to`.
    RemoveRange {
        table: Table,
        from: Vec<u8>,
        to: Vec<u8>,
    },
}

impl Op {
    /// Of its keys and its value.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Put { key, value, .. } => key.len() + value.len(),
            Self::Remove { key, .. } => key.len(),
            Self::RemoveRange { from, to, .. } => from.len() + to.len(),
        }
    }
}

/// Rows hold payloads, so only their place and size are shown.
impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Put { table, key, value } => {
                write!(f, "put {table:?} {} of {} bytes", key.escape_ascii(), value.len())
            }
            Self::Remove { table, key } => write!(f, "remove {table:?} {}", key.escape_ascii()),
            Self::RemoveRange { table, from, to } => {
                write!(f, "remove {table:?} {}..{}", from.escape_ascii(), to.escape_ascii())
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Up,
    Down,
}

/// Sees one row; `Break` ends the scan.
pub type Visit<'a> = dyn FnMut(&[u8], &[u8]) -> io::Result<ControlFlow<()>> + 'a;

pub trait Kv: Send + Sync + fmt::Debug + 'static {
    fn read(&self, table: Table, key: &[u8]) -> io::Result<Option<Vec<u8>>>;
    /// The rows with `from <= key < to`, in the order asked for.
    fn scan(
        &self,
        table: Table,
        from: &[u8],
        to: &[u8],
        order: Order,
        visit: &mut Visit<'_>,
    ) -> io::Result<()>;
    /// All of `ops` in their order, or none. With `sync` they are on the disk on return.
    fn write(&self, ops: &[Op], sync: bool) -> io::Result<()>;
}
