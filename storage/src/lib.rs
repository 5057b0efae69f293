//! Where a node keeps the Raft log and the replicated tables.

mod error;
mod kv;
mod log;
pub mod memory;
#[cfg(feature = "rocksdb")]
pub mod rocks;
mod schema;
mod space;
pub mod store;
mod tables;

pub use error::{Error, FatalError, FatalKind, OnFatal};
pub use log::{Log, LogOptions};
pub use space::Space;
pub use store::{Applied, Batch, Checkpoint, CheckpointFile, Done, LogBounds, LogStore, MetaKey, Tables};
pub use tables::TableStore;

/// An open store. `identity` is what `MetaKey::Identity` holds; none on a new disk.
#[derive(Debug)]
pub struct Opened<L, T> {
    pub log: std::sync::Arc<L>,
    pub tables: std::sync::Arc<T>,
    pub identity: Option<bytes::Bytes>,
}
