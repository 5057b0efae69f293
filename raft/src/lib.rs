//! One replica of the group: proposals go in, facts come out, the tables follow the log. The only
//! crate that knows openraft; none of its types appear here.

mod applier;
mod error;
mod facts;
mod housekeeping;
mod leadership;
mod log_store;
mod membership;
mod network;
mod options;
mod propose;
mod serve;
mod snapshot;
#[cfg(test)]
mod tests;
mod types;
mod watchdog;
mod wire;

use std::{collections::BTreeMap, future::Future, io, sync::Arc};

use openraft::{
    ReadPolicy,
    async_runtime::watch::WatchReceiver,
    errors::{InitializeError, LinearizableReadError, RaftError},
};
use reach_protocol::{Entry, NodeId, Reply};
use reach_storage::{LogStore, Tables};
use reach_transport::Duplex;
use tokio::{
    sync::{Semaphore, mpsc, oneshot, watch},
    time::timeout,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

pub use applier::AppliedAt;
pub use error::{Error, ProposeError};
pub use facts::{Cursor, EntryFacts, FactRing, RING_BYTES, Step};
pub use leadership::Leadership;
pub use membership::{Dial, DialError, Member};
pub use options::Options;
pub use propose::ENTRY_MAX;
pub use reach_protocol::frame::Role;

use applier::Applier;
use error::Fatal;
use housekeeping::Housekeeping;
use log_store::Log;
use network::Network;
use propose::Proposals;
use serve::Incoming;
use snapshot::Folders;
use types::Raft;

/// A handle to the replica on this node. It runs until `shutdown`, or until the last handle goes.
#[derive(Clone)]
pub struct Replica {
    inner: Arc<Inner>,
}

struct Inner {
    node_id: NodeId,
    options: Options,
    raft: Raft,
    applier: Applier,
    proposals: Proposals,
    incoming: Incoming,
    snapshots: mpsc::Sender<housekeeping::Request>,
    leadership: watch::Receiver<Leadership>,
    fatal: Fatal,
    stop: CancellationToken,
    tasks: TaskTracker,
    _stop_on_drop: DropGuard,
}

impl Replica {
    /// Continues from what `log` and `tables` hold: entries known to be committed are applied before
    /// this returns.
    pub async fn start(
        options: Options,
        node_id: NodeId,
        log: Arc<dyn LogStore>,
        tables: Arc<dyn Tables>,
        dial: Arc<dyn Dial>,
    ) -> Result<Self, Error> {
        let fact_bytes = options.fact_bytes;
        Self::start_with_ring(options, node_id, log, tables, dial, fact_bytes).await
    }

    async fn start_with_ring(
        options: Options,
        node_id: NodeId,
        log: Arc<dyn LogStore>,
        tables: Arc<dyn Tables>,
        dial: Arc<dyn Dial>,
        ring_bytes: usize,
    ) -> Result<Self, Error> {
        let config = options.config()?;
        let fatal = Fatal::new();
        let stop = CancellationToken::new();

        let log = Log::open(log).map_err(|error| Error::Disk { what: "opening the log", error })?;
        let folders = Folders::open(options.snapshot_dir.clone())
            .map_err(|error| Error::Disk { what: "opening the snapshot folder", error })?;
        let folders = Arc::new(folders);
        let applier = Applier::open(tables, folders.clone(), ring_bytes, fatal.clone())
            .map_err(|error| Error::Disk { what: "opening the tables", error })?;
        let network = Network::new(node_id, dial);
        let raft = Raft::new(node_id.0, config, network, log.clone(), applier.clone())
            .await
            .map_err(|error| Error::Disk { what: "starting the replica", error: io::Error::other(error) })?;

        let tasks = TaskTracker::new();
        let proposals = Proposals::start(node_id, raft.clone(), &tasks, stop.clone());
        let (leadership_tx, leadership) = watch::channel(Leadership::unknown());
        tasks.spawn(leadership::follow(
            raft.clone(),
            applier.clone(),
            leadership_tx,
            fatal.clone(),
            stop.clone(),
        ));
        tasks.spawn(watchdog::watch(raft.clone(), log.clone(), options.clone(), stop.clone()));
        let (snapshots, requests) = mpsc::channel(housekeeping::REQUESTS_MAX);
        let housekeeping =
            Housekeeping { raft: raft.clone(), log, applier: applier.clone(), options: options.clone() };
        tasks.spawn(housekeeping.run(requests, stop.clone()));

        let (soonest, latest) = options.detection();
        let applied = applier.applied().borrow().index;
        tracing::info!(
            node = %node_id,
            applied,
            heartbeat_ms = options.heartbeat.as_millis() as u64,
            leader_missed_after_ms_min = soonest.as_millis() as u64,
            leader_missed_after_ms_max = latest.as_millis() as u64,
            "replica started"
        );
        let incoming = Incoming { raft: raft.clone(), folders, receiving: Semaphore::new(1) };
        let inner = Inner {
            node_id,
            options,
            raft,
            applier,
            proposals,
            incoming,
            snapshots,
            leadership,
            fatal,
            _stop_on_drop: stop.clone().drop_guard(),
            stop,
            tasks,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Makes these the members of a new group. Once, on one of them.
    pub async fn initialise(&self, members: BTreeMap<NodeId, Member>) -> Result<(), Error> {
        let members: BTreeMap<u64, Member> =
            members.into_iter().map(|(node_id, member)| (node_id.0, member)).collect();
        self.inner.raft.initialize(members).await.map_err(|error| match error {
            RaftError::APIError(InitializeError::NotAllowed(_)) => Error::AlreadyInitialised,
            RaftError::APIError(InitializeError::NotInMembers(_)) => Error::NotAMember(self.inner.node_id),
            RaftError::Fatal(_) => Error::Stopped,
        })
    }

    /// Serves one stream that another replica opened by its `Dial`, until it ends.
    pub async fn serve(&self, duplex: Duplex) -> Result<(), Error> {
        let served = self.inner.stop.run_until_cancelled(self.inner.incoming.serve(duplex));
        served.await.unwrap_or(Err(Error::Stopped))
    }

    /// Puts one entry into the log and waits until it has been applied here. There is one reply for
    /// each command. Calls made one after the other enter the log in that order, without waiting for
    /// each other. Dropping the future takes nothing back.
    pub fn propose(
        &self,
        entry: &Entry,
    ) -> impl Future<Output = Result<Vec<Reply>, ProposeError>> + Send + use<> {
        self.inner.proposals.propose(entry)
    }

    pub fn leadership(&self) -> watch::Receiver<Leadership> {
        self.inner.leadership.clone()
    }

    pub fn applied(&self) -> watch::Receiver<AppliedAt> {
        self.inner.applier.applied()
    }

    /// On the leader: an index such that tables applied up to it, on any node, hold everything that
    /// was answered before this call. Confirmed by a majority.
    pub async fn read_index(&self) -> Result<u64, ProposeError> {
        let read = || async {
            match self.inner.raft.get_read_linearizer(ReadPolicy::ReadIndex).await {
                Ok(read) => Ok(Ok(read.read_log_id().index())),
                Err(RaftError::APIError(LinearizableReadError::ForwardToLeader(refusal))) => Err(refusal),
                Err(RaftError::APIError(LinearizableReadError::QuorumNotEnough(_))) => {
                    Ok(Err(ProposeError::NotLeader { leader: None }))
                }
                Err(RaftError::Fatal(_)) => Ok(Err(ProposeError::Stopped)),
            }
        };
        propose::with_lease(read).await.map_err(|refusal| propose::refused(refusal, self.inner.node_id))?
    }

    pub fn facts(&self) -> &FactRing {
        self.inner.applier.facts()
    }

    pub fn tables(&self) -> &Arc<dyn Tables> {
        self.inner.applier.tables()
    }

    /// By the newest membership this node knows of; empty before the group is initialised.
    pub fn members(&self) -> BTreeMap<NodeId, Member> {
        let metrics = self.inner.raft.server_metrics();
        let membership = metrics.borrow_watched().membership_config.clone();
        membership.nodes().map(|(id, member)| (NodeId(*id), member.clone())).collect()
    }

    /// The state hash at a recent position. Not every position has one: entries applied together
    /// share that of the last, but every multiple of 64 ends such a step on every node.
    pub fn hash_at(&self, index: u64) -> Option<u64> {
        self.inner.applier.hash_at(index)
    }

    /// Makes a snapshot of everything applied by now, purges the log behind it, and returns its index.
    pub async fn snapshot(&self) -> Result<u64, Error> {
        let (request, made) = oneshot::channel();
        self.inner.snapshots.send(request).await.map_err(|_| Error::Stopped)?;
        made.await.map_err(|_| Error::Stopped)?
    }

    /// Hands the leadership to `to` and waits until it leads. If it doesn't, the others elect a leader
    /// as if this one had died.
    pub async fn transfer(&self, to: NodeId) -> Result<(), Error> {
        let refused = |reason| Error::Transfer { to, reason };
        if to == self.inner.node_id {
            return Err(refused("it is this node"));
        }
        if !self.members().contains_key(&to) {
            return Err(refused("it is not a member"));
        }
        if self.leadership().borrow().leader != Some(self.inner.node_id) {
            return Err(refused("this node does not lead"));
        }
        self.inner.raft.trigger().transfer_leader(to.0).await.map_err(|_| Error::Stopped)?;
        let waited = 2 * self.inner.options.detection().1;
        let mut leadership = self.leadership();
        let led = leadership.wait_for(|now| now.leader == Some(to));
        match timeout(waited, led).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(_)) => Err(Error::Stopped),
            Err(_) => Err(refused("it did not take over in time")),
        }
    }

    /// Ends every task of the replica and lets go of the log.
    pub async fn shutdown(&self) {
        self.inner.stop.cancel();
        if let Err(error) = self.inner.raft.shutdown().await {
            tracing::warn!(%error, "raft core ended badly");
        }
        self.inner.tasks.close();
        self.inner.tasks.wait().await;
        self.inner.applier.facts().close();
    }

    /// Resolves with the reason when openraft, the log or the tables have failed for good: the
    /// process then has to end. Pending for ever otherwise.
    pub fn fatal(&self) -> impl Future<Output = String> + Send + use<> {
        self.inner.fatal.wait()
    }
}

impl std::fmt::Debug for Replica {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Replica").field("node_id", &self.inner.node_id).finish_non_exhaustive()
    }
}
