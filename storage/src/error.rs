//! Why a store can't be opened, and the report of a disk that failed while it was open.

use std::{
    fmt, io,
    path::PathBuf,
    sync::{Arc, OnceLock, atomic::AtomicBool, atomic::Ordering},
};

/// Opening failed. Nothing was changed but what a retry would do again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} is in use by another process", .dir.display())]
    InUse { dir: PathBuf },
    /// Entries that this node acknowledged are gone from its disk, so its vote and its
    /// acknowledgements can no longer be trusted.
    #[error(
        "the log in {} ends at {}, but entry {acknowledged} was acknowledged: the disk lost synced \
         data; remove this node from the cluster and bring it back empty under a new node id",
        .dir.display(), .last.map_or("nothing".to_owned(), |last| format!("entry {last}"))
    )]
    LostTail { dir: PathBuf, acknowledged: u64, last: Option<u64> },
    #[error("{what} is damaged: {reason}")]
    Damaged { what: String, reason: String },
    #[error("no space left for {what}")]
    StorageFull { what: String },
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
}

impl Error {
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| match source.kind() {
            io::ErrorKind::StorageFull => Self::StorageFull { what },
            io::ErrorKind::InvalidData => Self::Damaged { what, reason: source.to_string() },
            _ => Self::Io { what, source },
        }
    }
}

/// What kind of end this is: the process exits with a code of its own for a full disk, since a
/// restart after space was freed heals it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FatalKind {
    StorageFull,
    Damaged,
    Io,
}

/// The disk failed under an open store. The process must end: what the disk holds is known again
/// only after it was opened anew.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {reason}")]
pub struct FatalError {
    pub kind: FatalKind,
    /// What was being done.
    pub what: &'static str,
    pub reason: String,
}

/// Called at most once, from the thread that met the error, with no lock held that a reader needs.
pub type OnFatal = Arc<dyn Fn(FatalError) + Send + Sync>;

/// Remembers the first failure of the disk: from then on nothing is written any more, since a
/// repeated fsync can succeed although the pages it was for are gone.
pub(crate) struct Latch {
    failed: OnceLock<(io::ErrorKind, String)>,
    muted: AtomicBool,
    on_fatal: OnFatal,
}

impl Latch {
    pub fn new(on_fatal: OnFatal) -> Arc<Self> {
        Arc::new(Self { failed: OnceLock::new(), muted: AtomicBool::new(false), on_fatal })
    }

    pub fn check(&self) -> io::Result<()> {
        match self.failed.get() {
            None => Ok(()),
            Some((kind, reason)) => Err(io::Error::new(*kind, reason.clone())),
        }
    }

    /// Reports `error` if it is the first, and gives it back.
    pub fn trip(&self, what: &'static str, error: io::Error) -> io::Error {
        let reason = error.to_string();
        if self.failed.set((error.kind(), reason.clone())).is_ok() && !self.muted.load(Ordering::SeqCst) {
            let kind = match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => FatalKind::StorageFull,
                io::ErrorKind::InvalidData => FatalKind::Damaged,
                _ => FatalKind::Io,
            };
            (self.on_fatal)(FatalError { kind, what, reason });
        }
        error
    }

    /// Nobody is left to be told: the process this store belonged to is gone.
    pub fn mute(&self) {
        self.muted.store(true, Ordering::SeqCst);
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Latch").field("failed", &self.failed.get()).finish_non_exhaustive()
    }
}

pub(crate) fn damaged(text: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text.into())
}

/// For whoever has nobody to tell.
pub(crate) fn log_only() -> OnFatal {
    Arc::new(
        |error| tracing::error!(kind = ?error.kind, what = error.what, reason = error.reason, "disk_failed"),
    )
}
