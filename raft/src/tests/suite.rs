//! Openraft's own storage suite, on both stores.

use std::sync::Arc;

use openraft::{
    StorageError,
    errors::ErrorSource,
    testing::log::{StoreBuilder, Suite},
};
use reach_storage::{LogStore, Tables, memory, rocks};
use tempfile::TempDir;

use crate::{RING_BYTES, applier::Applier, error::Fatal, log_store::Log, snapshot::Folders, types::Group};

struct Memory;
struct Rocks;

fn adapters(dir: TempDir, log: Arc<dyn LogStore>, tables: Arc<dyn Tables>) -> (TempDir, Log, Applier) {
    let folders = Arc::new(Folders::open(dir.path().join("snapshots")).unwrap());
    let applier = Applier::open(tables, folders, RING_BYTES, Fatal::new()).unwrap();
    (dir, Log::open(log).unwrap(), applier)
}

impl StoreBuilder<Group, Log, Applier, TempDir> for Memory {
    async fn build(&self) -> Result<(TempDir, Log, Applier), StorageError<Group>> {
        let options = memory::Options { writer_thread: true, ..Default::default() };
        let opened = memory::open(&memory::MemoryDisk::new(1), options)
            .map_err(|error| StorageError::read(ErrorSource::from_error(&error)))?;
        Ok(adapters(tempfile::tempdir().unwrap(), opened.log, opened.tables))
    }
}

impl StoreBuilder<Group, Log, Applier, TempDir> for Rocks {
    async fn build(&self) -> Result<(TempDir, Log, Applier), StorageError<Group>> {
        let dir = tempfile::tempdir().unwrap();
        let options = rocks::Options { ballast_bytes: 0, ..Default::default() };
        let opened = rocks::open(&dir.path().join("store"), options)
            .map_err(|error| StorageError::read(ErrorSource::from_error(&error)))?;
        Ok(adapters(dir, opened.log, opened.tables))
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_in_memory_passes_openrafts_suite() {
    Suite::test_all(Memory).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_on_rocksdb_passes_openrafts_suite() {
    Suite::test_all(Rocks).await.unwrap();
}
