//! Where a node keeps the Raft log and the replicated tables.

pub mod store;

pub use store::{Applied, Batch, Checkpoint, CheckpointFile, Done, LogBounds, LogStore, MetaKey, Tables};
