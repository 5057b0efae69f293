//! What may be tuned, and openraft's configuration made from it.

use std::{path::PathBuf, sync::Arc, time::Duration};

use openraft::{Config, SnapshotPolicy};

use crate::Error;

/// Entries in one append to a follower; bytes are bounded by the log reader.
const APPEND_ENTRIES_MAX: u64 = 256;

/// Messages that may wait for openraft's core.
const CORE_QUEUE_MAX: u64 = 4_096;

/// From nothing to the whole snapshot installed on a follower.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(600);

#[derive(Clone, Debug)]
pub struct Options {
    /// How often a leader is heard when there is nothing to replicate; default 150 ms.
    pub heartbeat: Duration,
    /// A follower waits `election_max` after it last heard a leader and then a random time between
    /// `election_min` (default 400 ms) and `election_max` (default 600 ms) before it stands itself.
    pub election_min: Duration,
    pub election_max: Duration,
    /// Entries applied since the last snapshot after which the next one is made; default 100 000.
    pub snapshot_entries: u64,
    /// Bytes appended since the last snapshot after which the next one is made; default 256 MiB.
    pub snapshot_log_bytes: u64,
    /// Entries below the last snapshot that stay in the log, so that a follower that was away for a
    /// while needs no snapshot; default 20 000.
    pub log_tail_entries: u64,
    /// Age of an unfinished write at which the disk counts as hung and a leader hands over; default
    /// 2.4 s. Above the slowest fsync of a healthy disk.
    pub watchdog: Duration,
    /// Bytes of recent facts kept for cursors, by estimate; default 64 MiB. A cursor that falls below
    /// them derives its state anew.
    pub fact_bytes: usize,
    /// Snapshots are made and received here. On the tables' file system; emptied at start.
    pub snapshot_dir: PathBuf,
}

impl Options {
    pub fn new(snapshot_dir: impl Into<PathBuf>) -> Self {
        Self {
            heartbeat: Duration::from_millis(150),
            election_min: Duration::from_millis(400),
            election_max: Duration::from_millis(600),
            snapshot_entries: 100_000,
            snapshot_log_bytes: 256 << 20,
            log_tail_entries: 20_000,
            watchdog: Duration::from_millis(2_400),
            fact_bytes: crate::RING_BYTES,
            snapshot_dir: snapshot_dir.into(),
        }
    }

    /// The shortest and the longest time after which a follower misses a leader that went silent.
    pub(crate) fn detection(&self) -> (Duration, Duration) {
        (self.election_max + self.election_min, 2 * self.election_max)
    }

    pub(crate) fn config(&self) -> Result<Arc<Config>, Error> {
        let config = Config {
            cluster_name: "agent-reach".to_owned(),
            heartbeat_interval: millis(self.heartbeat),
            election_timeout_min: millis(self.election_min),
            election_timeout_max: millis(self.election_max),
            enable_pre_vote: Some(true),
            // A leader that came back under its old term would not know what it had proposed.
            enable_leader_restore: Some(false),
            allow_log_reversion: Some(false),
            // A leader without a majority falls silent, so that one that has it can be elected.
            quorum_loss_probe_interval: Some(2 * millis(self.election_max)),
            max_payload_entries: APPEND_ENTRIES_MAX,
            api_channel_size: Some(CORE_QUEUE_MAX),
            install_snapshot_timeout: millis(SNAPSHOT_TIMEOUT),
            // Snapshots and purges are triggered by `housekeeping` alone.
            snapshot_policy: SnapshotPolicy::Never,
            max_in_snapshot_log_to_keep: u64::MAX,
            backoff: "50ms 100ms 200ms ...500ms".to_owned(),
            ..Config::default()
        };
        config.validate().map(Arc::new).map_err(|error| Error::Options(error.to_string()))
    }
}

fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().expect("durations of our options are far below 2^64 ms")
}
