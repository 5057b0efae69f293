//! What both stores promise, checked on RocksDB in a temporary folder and on the memory disk.

mod disks;
mod faults;
mod history;
#[cfg(feature = "rocksdb")]
mod install;
mod log;
mod tables;
