//! Openraft's state machine over our tables: committed entries go through `reach_machine::apply`,
//! then become visible, then facts, then replies.
//!
//! To openraft a snapshot is a position up to which the tables are durable. A copy of the tables is
//! made only when a follower needs one, and holds what has been applied by then.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex, MutexGuard},
};

use futures_util::{Stream, StreamExt};
use openraft::{
    EntryPayload, OptionalSend, RaftSnapshotBuilder,
    storage::{ApplyResponder, EntryResponder, RaftStateMachine},
};
use reach_machine::{Position, Rows};
use reach_protocol::{Reply, Stamp, codec};
use reach_storage::{Applied, Tables};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{
    error::Fatal,
    facts::{EntryFacts, FactRing},
    snapshot::{Folder, Folders},
    types::{Entry, Group, LogId, Membership, Proposal, Replies, Snapshot, SnapshotMeta, term},
};

/// Entries and bytes that become visible in one step at most.
const CHUNK_ENTRIES: usize = 256;
const CHUNK_BYTES: usize = 4 << 20;

/// A step ends at every multiple of this, so that replicas know their hash at equal positions.
const HASH_EVERY: u64 = 64;

/// Positions of which the hash is remembered.
const HASHES_MAX: usize = 4_096;

/// Where the tables stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AppliedAt {
    /// Index of the last applied entry.
    pub index: u64,
    /// Of the last command; never decreasing.
    pub stamp: Stamp,
    /// Of every write up to `index`: equal on all replicas at equal positions.
    pub state_hash: u64,
}

/// What the tables keep for us beside their position.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Mark {
    log_id: Option<LogId>,
    membership: Membership,
    stamp: Stamp,
}

impl Mark {
    fn of(applied: &Applied) -> io::Result<Self> {
        if applied.mark.is_empty() {
            return Ok(Self::default());
        }
        codec::decode("position of the tables", &applied.mark).map_err(invalid)
    }

    fn index(&self) -> u64 {
        self.log_id.map_or(0, |log_id| log_id.index)
    }

    fn meta(&self) -> SnapshotMeta {
        SnapshotMeta { last_log_id: self.log_id, last_membership: self.membership.clone() }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Applier {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    tables: Arc<dyn Tables>,
    folders: Arc<Folders>,
    fatal: Fatal,
    facts: FactRing,
    mark: Mutex<Mark>,
    snapshot: Mutex<Option<SnapshotMeta>>,
    applied: watch::Sender<AppliedAt>,
    applied_term: watch::Sender<u64>,
    hashes: Mutex<VecDeque<(u64, u64)>>,
}

type Answer = (ApplyResponder<Group>, Replies);

impl Applier {
    pub fn open(
        tables: Arc<dyn Tables>,
        folders: Arc<Folders>,
        ring_bytes: usize,
        fatal: Fatal,
    ) -> io::Result<Self> {
        let applied = tables.applied();
        let mark = Mark::of(&applied)?;
        let shared = Shared {
            tables,
            folders,
            fatal,
            facts: FactRing::new(mark.index(), ring_bytes),
            mark: Mutex::default(),
            snapshot: Mutex::default(),
            applied: watch::Sender::new(AppliedAt::default()),
            applied_term: watch::Sender::new(0),
            hashes: Mutex::default(),
        };
        shared.stand_at(mark, applied.state_hash);
        Ok(Self { shared: Arc::new(shared) })
    }

    pub fn facts(&self) -> &FactRing {
        &self.shared.facts
    }

    pub fn tables(&self) -> &Arc<dyn Tables> {
        &self.shared.tables
    }

    pub fn applied(&self) -> watch::Receiver<AppliedAt> {
        self.shared.applied.subscribe()
    }

    /// The term of the last applied entry.
    pub fn applied_term(&self) -> watch::Receiver<u64> {
        self.shared.applied_term.subscribe()
    }

    pub fn hash_at(&self, index: u64) -> Option<u64> {
        let hashes = self.shared.hashes();
        let place = hashes.binary_search_by_key(&index, |(index, _)| *index).ok()?;
        Some(hashes[place].1)
    }

    /// Runs `work` where it may block. Its failure, or its panic, ends the process.
    async fn blocking<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Shared) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let shared = self.shared.clone();
        let result = match tokio::task::spawn_blocking(move || work(&shared)).await {
            Ok(result) => result,
            Err(error) if error.is_panic() => Err(io::Error::other("a panic")),
            Err(error) => Err(io::Error::other(error)),
        };
        if let Err(error) = &result {
            self.shared.fatal.report(format!("{what}: {error}"));
        }
        result
    }
}

impl Shared {
    fn hashes(&self) -> MutexGuard<'_, VecDeque<(u64, u64)>> {
        self.hashes.lock().expect("no holder of the hashes' lock panics")
    }

    fn mark(&self) -> MutexGuard<'_, Mark> {
        self.mark.lock().expect("no holder of the mark's lock panics")
    }

    /// Lets everyone know that the tables have come to `mark`.
    fn stand_at(&self, mark: Mark, state_hash: u64) {
        let at = AppliedAt { index: mark.index(), stamp: mark.stamp, state_hash };
        let led = mark.log_id.as_ref().map_or(0, term);
        if mark.log_id.is_some() {
            let mut hashes = self.hashes();
            if hashes.len() == HASHES_MAX {
                hashes.pop_front();
            }
            hashes.push_back((at.index, at.state_hash));
        }
        *self.mark() = mark;
        self.applied.send_replace(at);
        self.applied_term.send_if_modified(|before| std::mem::replace(before, led) != led);
    }

    fn apply(&self, chunk: Vec<EntryResponder<Group>>) -> io::Result<()> {
        let mut mark = self.mark().clone();
        let mut facts = Vec::new();
        let mut answers: Vec<Answer> = Vec::new();
        let mut batch = self.tables.batch();
        for (Entry { log_id, payload }, responder) in chunk {
            let mut entry = EntryFacts { index: log_id.index, stamp: mark.stamp, facts: Vec::new() };
            let mut replies = Vec::new();
            match payload {
                EntryPayload::Blank => {}
                EntryPayload::Membership(members) => {
                    mark.membership = Membership::new(Some(log_id), members);
                }
                EntryPayload::Normal(proposal) => {
                    let proposed = decode(&proposal)?;
                    if proposed.term != term(&log_id) {
                        replies = proposed.commands.iter().map(|_| Reply::Void).collect();
                    } else {
                        mark.stamp = later(mark.stamp, proposed.stamp);
                        entry.stamp = mark.stamp;
                        for (ordinal, command) in (0..).zip(&proposed.commands) {
                            let position = Position { index: log_id.index, ordinal };
                            let rows: &dyn Rows = &*batch;
                            let outcome = reach_machine::apply(rows, position, mark.stamp, command);
                            batch.write(outcome.writes);
                            entry.facts.extend(outcome.facts);
                            replies.push(outcome.reply);
                        }
                    }
                }
            }
            mark.log_id = Some(log_id);
            batch.advance(log_id.index, codec::encode(&mark));
            if !entry.facts.is_empty() {
                facts.push(entry);
            }
            if let Some(responder) = responder {
                answers.push((responder, Replies(replies)));
            }
        }
        let applied = batch.commit()?;
        self.facts.publish(facts, applied.index);
        self.stand_at(mark, applied.state_hash);
        for (responder, replies) in answers {
            responder.send(replies);
        }
        Ok(())
    }

    fn snapshot(&self) -> MutexGuard<'_, Option<SnapshotMeta>> {
        self.snapshot.lock().expect("no holder of the snapshot's lock panics")
    }

    /// Makes the tables durable as they stand.
    fn settle(&self) -> io::Result<SnapshotMeta> {
        let applied = self.tables.applied();
        let flushed = self.tables.flush()?;
        assert!(flushed >= applied.index, "flushed up to {flushed}, applied before up to {}", applied.index);
        let meta = Mark::of(&applied)?.meta();
        let mut newest = self.snapshot();
        // An install may have come in between.
        if newest.as_ref().is_none_or(|newest| newest.last_log_id < meta.last_log_id) {
            *newest = Some(meta.clone());
        }
        Ok(meta)
    }

    fn copy(&self) -> io::Result<(SnapshotMeta, Folder)> {
        let checkpoint = self.tables.checkpoint(self.folders.next())?;
        let folder = Folder::new(checkpoint.dir, checkpoint.files);
        Ok((Mark::of(&checkpoint.applied)?.meta(), folder))
    }

    fn install(&self, meta: SnapshotMeta, folder: &Folder) -> io::Result<()> {
        let applied = self.tables.install(folder.dir().to_owned())?;
        let mark = Mark::of(&applied)?;
        if mark.log_id != meta.last_log_id {
            let reason = format!("tables at {:?} in a snapshot of {:?}", mark.log_id, meta.last_log_id);
            return Err(invalid(reason));
        }
        self.facts.jump(mark.index());
        self.hashes().clear();
        self.stand_at(mark, applied.state_hash);
        *self.snapshot() = Some(meta);
        Ok(())
    }
}

/// What openraft hands on as a snapshot's data.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    /// The tables of this node.
    Tables(Applier),
    /// Files that came from another one.
    Files(Folder),
}

impl Content {
    /// Its files, and the position they hold: that of `meta`, or a later one.
    pub async fn files(self, meta: SnapshotMeta) -> io::Result<(SnapshotMeta, Folder)> {
        match self {
            Self::Tables(applier) => applier.blocking("copying the tables", Shared::copy).await,
            Self::Files(folder) => Ok((meta, folder)),
        }
    }
}

fn decode(proposal: &Proposal) -> io::Result<reach_protocol::Entry> {
    codec::decode("entry of commands", &proposal.0).map_err(invalid)
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Neither time goes back, whatever a new leader's clock says.
fn later(last: Stamp, next: Stamp) -> Stamp {
    Stamp { cluster_ms: last.cluster_ms.max(next.cluster_ms), wall_ms: last.wall_ms.max(next.wall_ms) }
}

impl RaftStateMachine<Group> for Applier {
    type SnapshotData = Content;
    type SnapshotBuilder = Self;

    async fn applied_state(&mut self) -> io::Result<(Option<LogId>, Membership)> {
        let mark = self.shared.mark();
        Ok((mark.log_id, mark.membership.clone()))
    }

    async fn apply<S>(&mut self, entries: S) -> io::Result<()>
    where
        S: Stream<Item = io::Result<EntryResponder<Group>>> + Unpin + OptionalSend,
    {
        let mut entries = entries.fuse();
        loop {
            let (mut chunk, mut bytes) = (Vec::new(), 0);
            while chunk.len() < CHUNK_ENTRIES && bytes < CHUNK_BYTES {
                let Some(next) = entries.next().await else { break };
                let (entry, responder) = next?;
                if let EntryPayload::Normal(proposal) = &entry.payload {
                    bytes += proposal.0.len();
                }
                let ends_here = entry.log_id.index.is_multiple_of(HASH_EVERY);
                chunk.push((entry, responder));
                if ends_here {
                    break;
                }
            }
            if chunk.is_empty() {
                return Ok(());
            }
            self.blocking("applying entries", move |shared| shared.apply(chunk)).await?;
        }
    }

    async fn get_snapshot_builder(&mut self) -> Self {
        self.clone()
    }

    async fn install_snapshot(&mut self, meta: &SnapshotMeta, content: Content) -> io::Result<()> {
        let (meta, folder) = content.files(meta.clone()).await?;
        self.blocking("installing a snapshot", move |shared| shared.install(meta, &folder)).await
    }

    async fn get_current_snapshot(&mut self) -> io::Result<Option<Snapshot>> {
        let newest = self.shared.snapshot().clone();
        Ok(newest.map(|meta| Snapshot { meta, snapshot: Content::Tables(self.clone()) }))
    }
}

impl RaftSnapshotBuilder<Group> for Applier {
    type SnapshotData = Content;

    async fn build_snapshot(&mut self) -> io::Result<Snapshot> {
        let meta = self.blocking("making a snapshot", Shared::settle).await?;
        Ok(Snapshot { meta, snapshot: Content::Tables(self.clone()) })
    }
}
