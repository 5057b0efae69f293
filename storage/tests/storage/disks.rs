//! One face for both stores, so that a script is written once.

use std::{
    io,
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use bytes::Bytes;
use reach_storage::{Done, Error, FatalError, LogStore, MetaKey, Tables, memory};

pub struct Store {
    pub log: Arc<dyn LogStore>,
    pub tables: Arc<dyn Tables>,
    pub identity: Option<Bytes>,
}

pub enum Disk {
    Memory(memory::MemoryDisk),
    #[cfg(feature = "rocksdb")]
    Rocks(tempfile::TempDir),
}

impl Disk {
    /// One of each kind.
    pub fn all() -> Vec<Self> {
        vec![
            Self::Memory(memory::MemoryDisk::new(1)),
            #[cfg(feature = "rocksdb")]
            Self::rocks(),
        ]
    }

    #[cfg(feature = "rocksdb")]
    pub fn rocks() -> Self {
        Self::Rocks(tempfile::tempdir().unwrap())
    }

    /// Opens what is there. The store that was open before must be dropped.
    pub fn open(&self) -> Store {
        self.try_open().unwrap()
    }

    /// Without a tail in memory, so that every read of the log goes to the disk.
    pub fn try_open(&self) -> Result<Store, Error> {
        match self {
            Self::Memory(disk) => {
                let mut options = memory::Options::default();
                options.log.tail_bytes = 0;
                let opened = memory::open(disk, options)?;
                Ok(Store { log: opened.log, tables: opened.tables, identity: opened.identity })
            }
            #[cfg(feature = "rocksdb")]
            Self::Rocks(dir) => {
                let mut options = reach_storage::rocks::Options::default();
                options.log.tail_bytes = 0;
                options.ballast_bytes = 0;
                let opened = reach_storage::rocks::open(dir.path(), options)?;
                Ok(Store { log: opened.log, tables: opened.tables, identity: opened.identity })
            }
        }
    }

    /// A folder beside the tables, for checkpoints.
    pub fn folder(&self) -> tempfile::TempDir {
        match self {
            Self::Memory(_) => tempfile::tempdir().unwrap(),
            #[cfg(feature = "rocksdb")]
            Self::Rocks(dir) => tempfile::tempdir_in(dir.path()).unwrap(),
        }
    }
}

/// A callback, and where its outcome arrives.
pub fn done() -> (Done, mpsc::Receiver<io::Result<()>>) {
    let (sender, receiver) = mpsc::sync_channel(1);
    (Box::new(move |written| drop(sender.send(written))), receiver)
}

/// Longer than any disk here takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub trait LogSteps {
    /// Appends one entry after the other and waits for each to be durable.
    fn fill(&self, indexes: std::ops::Range<u64>);
    fn cut(&self, from: u64) -> io::Result<()>;
    fn drop_to(&self, to: u64, mark: &str);
    fn put(&self, key: MetaKey, value: &str) -> io::Result<()>;
    fn all(&self) -> Vec<(u64, Bytes)>;
}

impl<L: LogStore + ?Sized> LogSteps for L {
    fn fill(&self, indexes: std::ops::Range<u64>) {
        let waits: Vec<_> = indexes
            .map(|index| {
                let (done, wait) = done();
                self.append(vec![(index, content(index))], done);
                wait
            })
            .collect();
        for wait in waits {
            wait.recv_timeout(PATIENCE).unwrap().unwrap();
        }
    }

    fn cut(&self, from: u64) -> io::Result<()> {
        let (done, wait) = done();
        self.truncate(from, done);
        wait.recv_timeout(PATIENCE).unwrap()
    }

    fn drop_to(&self, to: u64, mark: &str) {
        let (done, wait) = done();
        self.purge(to, Bytes::copy_from_slice(mark.as_bytes()), done);
        wait.recv_timeout(PATIENCE).unwrap().unwrap();
    }

    fn put(&self, key: MetaKey, value: &str) -> io::Result<()> {
        let (done, wait) = done();
        self.put_meta(key, Bytes::copy_from_slice(value.as_bytes()), done);
        wait.recv_timeout(PATIENCE).unwrap()
    }

    fn all(&self) -> Vec<(u64, Bytes)> {
        let bounds = self.bounds();
        self.read(bounds.first, bounds.next, usize::MAX).unwrap()
    }
}

pub fn content(index: u64) -> Bytes {
    format!("content of {index}").into()
}

pub fn entries(indexes: std::ops::Range<u64>) -> Vec<(u64, Bytes)> {
    indexes.map(|index| (index, content(index))).collect()
}

/// Keeps the reports of a failing disk.
#[derive(Clone, Default)]
pub struct Reports(Arc<Mutex<Vec<FatalError>>>);

impl Reports {
    pub fn on_fatal(&self) -> reach_storage::OnFatal {
        let reports = self.0.clone();
        Arc::new(move |error| reports.lock().unwrap().push(error))
    }

    pub fn all(&self) -> Vec<FatalError> {
        self.0.lock().unwrap().clone()
    }
}
