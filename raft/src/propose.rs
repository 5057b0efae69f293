//! The way into the log: one queue, so that proposals enter in the order in which they were made,
//! and an answer for each.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use openraft::{
    alias::OneshotReceiverOf,
    errors::{ClientWriteError, ForwardReason, ForwardToLeader},
    impls::ProgressResponder,
    raft::ClientWriteResult,
};
use reach_protocol::{Entry, NodeId, Reply, codec, limits::FRAME_MAX};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{Instant, sleep},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    ProposeError,
    types::{Group, Proposal, Raft},
};

/// The largest encoded entry, in bytes: one has to fit into a frame with what surrounds it.
pub const ENTRY_MAX: usize = FRAME_MAX - 32 * 1024;

/// Proposals that openraft has not taken yet, and KiB of all those without an answer. What comes on
/// top is discarded.
const QUEUE_MAX: usize = 4_096;
const IN_FLIGHT_KIB_MAX: usize = 64 << 10;

/// A leader whose lease lapsed has it back with the next heartbeats, or not for much longer.
const LEASE_WAIT: Duration = Duration::from_millis(500);
const LEASE_POLL: Duration = Duration::from_millis(20);

type Responder = ProgressResponder<Group, ClientWriteResult<Group>>;

struct Ask {
    term: u64,
    proposal: Proposal,
    responder: Responder,
}

/// A proposal whose answer is outstanding.
struct InFlight {
    answer: OneshotReceiverOf<Group, ClientWriteResult<Group>>,
    _room: OwnedSemaphorePermit,
}

#[derive(Clone, Debug)]
pub(crate) struct Proposals {
    node_id: NodeId,
    queue: mpsc::Sender<Ask>,
    /// In KiB.
    room: Arc<Semaphore>,
}

impl Proposals {
    pub fn start(node_id: NodeId, raft: Raft, tasks: &TaskTracker, stop: CancellationToken) -> Self {
        let (queue, asks) = mpsc::channel(QUEUE_MAX);
        tasks.spawn(stop.run_until_cancelled_owned(feed(raft, asks)));
        Self { node_id, queue, room: Arc::new(Semaphore::new(IN_FLIGHT_KIB_MAX)) }
    }

    /// Stands in the queue when this returns. Only an entry that met a lapsed lease, and had to be
    /// proposed again, may be overtaken by later ones.
    pub fn propose(
        &self,
        entry: &Entry,
    ) -> impl Future<Output = Result<Vec<Reply>, ProposeError>> + Send + use<> {
        let (term, bytes) = (entry.term, codec::encode(entry));
        let proposals = self.clone();
        let first = self.enqueue(term, &bytes);
        async move {
            let until = Instant::now() + LEASE_WAIT;
            let mut in_flight = first?;
            loop {
                // The core drops the answers it owes only when it stops.
                let answer = in_flight.answer.await.map_err(|_| ProposeError::Unknown)?;
                let refusal = match answer {
                    Ok(response) => return Ok(response.data.0),
                    Err(ClientWriteError::ForwardToLeader(refusal)) => refusal,
                    // Another node may have committed it before this one adopted that node's log.
                    Err(_) => return Err(ProposeError::Unknown),
                };
                if !is_lapsed(&refusal) || Instant::now() >= until {
                    return Err(refused(refusal, proposals.node_id));
                }
                sleep(LEASE_POLL).await;
                in_flight = proposals.enqueue(term, &bytes)?;
            }
        }
    }

    fn enqueue(&self, term: u64, bytes: &Bytes) -> Result<InFlight, ProposeError> {
        if bytes.len() > ENTRY_MAX {
            return Err(ProposeError::TooLarge { bytes: bytes.len(), max: ENTRY_MAX });
        }
        let kib = bytes.len().div_ceil(1 << 10) as u32;
        let room = self.room.clone().try_acquire_many_owned(kib).map_err(|_| ProposeError::Discarded)?;
        let (responder, answer) = ProgressResponder::complete_only();
        let ask = Ask { term, proposal: Proposal(bytes.clone()), responder };
        match self.queue.try_send(ask) {
            Ok(()) => Ok(InFlight { answer, _room: room }),
            Err(mpsc::error::TrySendError::Full(_)) => Err(ProposeError::Discarded),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(ProposeError::Stopped),
        }
    }
}

async fn feed(raft: Raft, mut asks: mpsc::Receiver<Ask>) {
    while let Some(Ask { term, proposal, responder }) = asks.recv().await {
        // An entry of another term would be void: it doesn't enter the log in the first place.
        if raft.write(proposal).with_leader(term).responder(responder).await.is_err() {
            return;
        }
    }
}

pub(crate) fn is_lapsed(refusal: &ForwardToLeader<Group>) -> bool {
    refusal.reason == ForwardReason::LeaseExpired
}

pub(crate) fn refused(refusal: ForwardToLeader<Group>, own: NodeId) -> ProposeError {
    match refusal.leader_id.map(NodeId) {
        Some(leader) if leader == own => ProposeError::Discarded,
        leader => ProposeError::NotLeader { leader },
    }
}

/// Asks again while `ask` meets a lapsed lease.
pub(crate) async fn with_lease<T, F>(mut ask: impl FnMut() -> F) -> Result<T, ForwardToLeader<Group>>
where
    F: Future<Output = Result<T, ForwardToLeader<Group>>>,
{
    let until = Instant::now() + LEASE_WAIT;
    loop {
        match ask().await {
            Err(refusal) if is_lapsed(&refusal) && Instant::now() < until => sleep(LEASE_POLL).await,
            result => return result,
        }
    }
}
