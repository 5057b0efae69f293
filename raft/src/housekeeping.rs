//! When snapshots are made and how far the log is purged. Openraft decides neither: a purge goes no
//! further than what this node has applied and flushed (which is what a snapshot is here), and leaves
//! a tail for those who lag.

use std::time::Duration;

use openraft::async_runtime::watch::WatchReceiver;
use tokio::{
    sync::{mpsc, oneshot},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{Error, Options, applier::Applier, log_store::Log, types::Raft};

const CHECK_EVERY: Duration = Duration::from_millis(250);

/// Openraft drops a trigger that comes while a snapshot is being built, so it is repeated.
const TRIGGER_EVERY: Duration = Duration::from_secs(5);

/// Until a snapshot is made; it grows with the tables.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(600);

/// Requests that may wait for the one under way.
pub(crate) const REQUESTS_MAX: usize = 16;

/// Where to send the index of the snapshot.
pub(crate) type Request = oneshot::Sender<Result<u64, Error>>;

pub(crate) struct Housekeeping {
    pub raft: Raft,
    pub log: Log,
    pub applier: Applier,
    pub options: Options,
}

impl Housekeeping {
    pub async fn run(self, mut requests: mpsc::Receiver<Request>, stop: CancellationToken) {
        let mut ticks = interval(CHECK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut bytes_before = 0;
        loop {
            let request = tokio::select! {
                request = requests.recv() => match request {
                    Some(request) => Some(request),
                    None => return,
                },
                _ = ticks.tick() => None,
                () = stop.cancelled() => return,
            };
            if request.is_none() && !self.is_due(bytes_before) {
                continue;
            }
            let bytes = self.log.appended_bytes();
            let made = tokio::select! {
                made = self.snapshot() => made,
                () = stop.cancelled() => return,
            };
            match &made {
                Ok(index) => {
                    tracing::info!(index, "snapshot made");
                    bytes_before = bytes;
                }
                Err(error) => tracing::warn!(%error, "no snapshot"),
            }
            if let Some(request) = request {
                // Whoever asked may have stopped waiting.
                let _ = request.send(made);
            }
        }
    }

    fn is_due(&self, bytes_before: u64) -> bool {
        let applied = self.applier.applied().borrow().index;
        let entries = applied.saturating_sub(self.snapshot_index().unwrap_or(0));
        let bytes = self.log.appended_bytes() - bytes_before;
        entries > 0 && (entries >= self.options.snapshot_entries || bytes >= self.options.snapshot_log_bytes)
    }

    fn snapshot_index(&self) -> Option<u64> {
        let metrics = self.raft.data_metrics();
        let snapshot = metrics.borrow_watched().snapshot;
        snapshot.map(|log_id| log_id.index)
    }

    /// Makes one that holds everything applied by now, and purges what it makes needless.
    async fn snapshot(&self) -> Result<u64, Error> {
        let wanted = self.applier.applied().borrow().index;
        if wanted == 0 {
            return Ok(0);
        }
        let deadline = tokio::time::Instant::now() + SNAPSHOT_TIMEOUT;
        let index = loop {
            match self.snapshot_index() {
                Some(index) if index >= wanted => break index,
                _ => {}
            }
            self.raft.trigger().snapshot().await.map_err(|_| Error::Stopped)?;
            let made = self.raft.wait(Some(TRIGGER_EVERY));
            let reached = made
                .metrics(|now| now.snapshot.is_some_and(|log_id| log_id.index >= wanted), "a snapshot")
                .await;
            if reached.is_err() && tokio::time::Instant::now() >= deadline {
                return Err(Error::Late { what: "snapshot", waited: SNAPSHOT_TIMEOUT });
            }
        };
        if let Some(upto) = index.checked_sub(self.options.log_tail_entries) {
            self.raft.trigger().purge_log(upto).await.map_err(|_| Error::Stopped)?;
        }
        Ok(index)
    }
}
