//! Openraft's view of the other replicas: every exchange is a stream of its own, opened by `Dial`.

use std::{
    future::Future,
    io,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{
    Stream, StreamExt,
    future::{self, Either},
    stream,
};
use openraft::{
    OptionalSend, RPCTypes, RaftNetworkFactory, RaftNetworkV2, StorageError,
    base::{BoxFuture, BoxStream},
    errors::{ErrorSource, NetworkError, ReplicationClosed, StreamingError, Timeout, Unreachable},
    network::RPCOption,
};
use reach_protocol::NodeId;
use reach_transport::{Duplex, FrameRx};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use crate::{
    applier::Content,
    membership::{Dial, Member},
    snapshot::{self, SendError},
    types::{
        AppendRequest, AppendResult, Group, Snapshot, SnapshotResponse, TransferRequest, TransferResponse,
        Vote, VoteRequest, VoteResponse,
    },
    wire::{self, Ask, Offer},
};

/// Opening a stream may need a new connection first.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);

/// An append that is not answered for this long ends its stream; the next one starts over.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// From the last chunk of a snapshot to its answer: the receiver installs it in between.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(300);

type RpcError = openraft::errors::RPCError<Group>;

#[derive(Clone)]
pub(crate) struct Network {
    node_id: NodeId,
    dial: Arc<dyn Dial>,
}

impl Network {
    pub fn new(node_id: NodeId, dial: Arc<dyn Dial>) -> Self {
        Self { node_id, dial }
    }
}

impl RaftNetworkFactory<Group> for Network {
    type Network = Peer;

    async fn new_client(&mut self, to: u64, member: &Member) -> Peer {
        Peer { from: self.node_id, to: NodeId(to), member: member.clone(), dial: self.dial.clone() }
    }
}

/// Another replica, as this one reaches it.
pub(crate) struct Peer {
    from: NodeId,
    to: NodeId,
    member: Member,
    dial: Arc<dyn Dial>,
}

impl Peer {
    async fn open(&self, ask: Ask, limit: Duration) -> Result<Duplex, RpcError> {
        let opened = async {
            let mut duplex = self.dial.dial(self.to, &self.member).await.map_err(unreachable)?;
            duplex.tx.send(wire::open(ask)).await.map_err(unreachable)?;
            Ok(duplex)
        };
        timeout(limit, opened)
            .await
            .unwrap_or_else(|_| Err(unreachable(format!("no stream to {} within {limit:?}", self.to))))
    }

    /// One question, one answer.
    async fn ask<A: DeserializeOwned>(
        &self,
        kind: RPCTypes,
        ask: Ask,
        limit: Duration,
    ) -> Result<A, RpcError> {
        let answered = async {
            let mut duplex = self.open(ask, limit).await?;
            duplex.tx.finish().await.map_err(broken)?;
            answer(&mut duplex.rx).await
        };
        timeout(limit, answered).await.unwrap_or_else(|_| Err(self.late(kind, limit)))
    }

    fn late(&self, action: RPCTypes, timeout: Duration) -> RpcError {
        Timeout { action, id: self.from.0, target: self.to.0, timeout }.into()
    }

    async fn offer(&self, vote: Vote, snapshot: Snapshot) -> Result<SnapshotResponse, StreamingError<Group>> {
        let (meta, folder) = snapshot.snapshot.files(snapshot.meta).await.map_err(disk)?;
        let offer = Offer { vote, meta, files: folder.files().to_vec() };
        let mut duplex = self.open(Ask::Snapshot(Box::new(offer)), DIAL_TIMEOUT).await?;
        snapshot::send(&folder, &mut duplex.tx).await.map_err(|error| match error {
            SendError::Stream(reason) => broken(reason).into(),
            SendError::Disk(error) => disk(error),
        })?;
        duplex.tx.finish().await.map_err(broken)?;
        let answered = timeout(INSTALL_TIMEOUT, answer(&mut duplex.rx)).await;
        Ok(answered.unwrap_or_else(|_| Err(self.late(RPCTypes::InstallSnapshot, INSTALL_TIMEOUT)))?)
    }
}

/// The stream or the node behind it is not there: openraft waits before it tries again.
fn unreachable(reason: impl ToString) -> RpcError {
    Unreachable::from_string(reason).into()
}

/// The stream broke while in use: openraft tries again at once.
fn broken(reason: impl ToString) -> RpcError {
    NetworkError::from_string(reason).into()
}

/// This node's own disk: openraft stops.
fn disk(error: io::Error) -> StreamingError<Group> {
    StorageError::read_snapshot(None, ErrorSource::from_error(&error)).into()
}

async fn answer<A: DeserializeOwned>(rx: &mut FrameRx) -> Result<A, RpcError> {
    let frame: Bytes =
        rx.recv().await.map_err(broken)?.ok_or_else(|| broken("the stream ended without an answer"))?;
    wire::decode("raft answer", &frame).map_err(broken)
}

/// The answers to what has been sent on an append stream.
struct Answers {
    rx: FrameRx,
    sent: Arc<AtomicU64>,
    answered: u64,
    _pump: AbortOnDropHandle<()>,
}

impl Answers {
    /// None at the end of the stream. Without a question under way it waits for as long as it takes.
    async fn next(&mut self) -> Option<Result<AppendResult, RpcError>> {
        loop {
            let unanswered = self.sent.load(Ordering::Acquire) > self.answered;
            match timeout(ANSWER_TIMEOUT, self.rx.recv()).await {
                Ok(Ok(Some(frame))) => {
                    self.answered += 1;
                    return Some(wire::decode("append result", &frame).map_err(broken));
                }
                Ok(Ok(None)) => return None,
                Ok(Err(error)) => return Some(Err(broken(error))),
                Err(_) if unanswered => {
                    return Some(Err(unreachable(format!("no answer for {ANSWER_TIMEOUT:?}"))));
                }
                Err(_) => {}
            }
        }
    }
}

impl RaftNetworkV2<Group> for Peer {
    type SnapshotData = Content;

    async fn append_entries(
        &mut self,
        request: AppendRequest,
        option: RPCOption,
    ) -> Result<openraft::raft::AppendEntriesResponse<Group>, RpcError> {
        let mut results = self.stream_append(stream::iter([request]), option).await?;
        let result = results.next().await.unwrap_or_else(|| Err(broken("no append result")))?;
        Ok(result.into())
    }

    fn stream_append<'s, S>(
        &'s mut self,
        mut input: S,
        _option: RPCOption,
    ) -> BoxFuture<'s, Result<BoxStream<'s, Result<AppendResult, RpcError>>, RpcError>>
    where
        S: Stream<Item = AppendRequest> + OptionalSend + Unpin + 'static,
    {
        Box::pin(async move {
            // Openraft waits between attempts where it makes the next request: whoever dials before
            // asking for one spins on a node that is down.
            let mut next = input.next().await;
            if next.is_none() {
                return Ok(Box::pin(stream::empty()) as BoxStream<'s, _>);
            }
            let Duplex { mut tx, rx } = self.open(Ask::Append, DIAL_TIMEOUT).await?;
            let sent = Arc::new(AtomicU64::new(0));
            let counted = sent.clone();
            // Requests leave as they come; answers are read below at the same time.
            let pump = tokio::spawn(async move {
                while let Some(request) = next {
                    counted.fetch_add(1, Ordering::Release);
                    if tx.send(wire::encode(&request)).await.is_err() {
                        return;
                    }
                    next = input.next().await;
                }
                // A stream that is gone has nobody left to tell.
                let _ = tx.finish().await;
            });
            let answers = Answers { rx, sent, answered: 0, _pump: AbortOnDropHandle::new(pump) };
            let results = stream::unfold(Some(answers), |answers| async move {
                let mut answers = answers?;
                match answers.next().await? {
                    Ok(result) => Some((Ok(result), Some(answers))),
                    Err(error) => Some((Err(error), None)),
                }
            });
            Ok(Box::pin(results) as BoxStream<'s, _>)
        })
    }

    async fn vote(&mut self, request: VoteRequest, option: RPCOption) -> Result<VoteResponse, RpcError> {
        self.ask(RPCTypes::Vote, Ask::Vote(request), option.hard_ttl()).await
    }

    async fn pre_vote(&mut self, request: VoteRequest, option: RPCOption) -> Result<VoteResponse, RpcError> {
        self.ask(RPCTypes::Vote, Ask::PreVote(request), option.hard_ttl()).await
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote,
        snapshot: Snapshot,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse, StreamingError<Group>> {
        match future::select(pin!(self.offer(vote, snapshot)), pin!(cancel)).await {
            Either::Left((result, _)) => result,
            Either::Right((closed, _)) => Err(closed.into()),
        }
    }

    async fn transfer_leader(
        &mut self,
        request: TransferRequest,
        option: RPCOption,
    ) -> Result<TransferResponse, RpcError> {
        self.ask(RPCTypes::TransferLeader, Ask::Transfer(request), option.hard_ttl()).await
    }
}
