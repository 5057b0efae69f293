//! The other end of `network`: one incoming stream, from its first frame to its last.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use reach_transport::{Duplex, FrameRx, FrameTx};
use serde::Serialize;
use tokio::{sync::Semaphore, time::timeout};

use crate::{
    Error,
    applier::Content,
    snapshot::{self, Folders},
    types::{AppendRequest, Raft, Snapshot},
    wire::{self, Ask, GROUP, Offer, Opening},
};

/// The first frame follows at once on the stream's opening.
const OPENING_TIMEOUT: Duration = Duration::from_secs(5);

/// Answers are small and the asker waits for them.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct Incoming {
    pub raft: Raft,
    pub folders: Arc<Folders>,
    /// One snapshot at a time: a second one is refused, and offered again by its sender.
    pub receiving: Semaphore,
}

impl Incoming {
    pub async fn serve(&self, duplex: Duplex) -> Result<(), Error> {
        let Duplex { mut tx, mut rx } = duplex;
        let frame = timeout(OPENING_TIMEOUT, rx.recv())
            .await
            .map_err(|_| Error::Late { what: "first frame", waited: OPENING_TIMEOUT })?
            .map_err(broken)?
            .ok_or_else(|| Error::Stream("nothing was asked".to_owned()))?;
        let opening: Opening = wire::decode("raft opening", &frame)?;
        if opening.group != GROUP {
            return Err(Error::Stream(format!("group {} is asked; there is group {GROUP}", opening.group)));
        }
        match opening.ask {
            Ask::Append => self.append(&mut tx, rx).await?,
            Ask::Vote(request) => {
                let response = self.raft.vote(request).await.map_err(|_| Error::Stopped)?;
                answer(&mut tx, &response).await?;
            }
            Ask::PreVote(request) => {
                let response = self.raft.pre_vote(request).await.map_err(|_| Error::Stopped)?;
                answer(&mut tx, &response).await?;
            }
            Ask::Transfer(request) => {
                let response = self.raft.handle_transfer_leader(request).await.map_err(|_| Error::Stopped)?;
                answer(&mut tx, &response).await?;
            }
            Ask::Snapshot(offer) => self.snapshot(*offer, &mut tx, &mut rx).await?,
        }
        tx.finish().await.map_err(broken)
    }

    async fn append(&self, tx: &mut FrameTx, rx: FrameRx) -> Result<(), Error> {
        let requests = stream::unfold(rx, |mut rx| async move {
            let frame: Bytes = match rx.recv().await {
                Ok(frame) => frame?,
                Err(error) => {
                    tracing::debug!(%error, "append stream broke");
                    return None;
                }
            };
            match wire::decode::<AppendRequest>("append request", &frame) {
                Ok(request) => Some((request, rx)),
                Err(error) => {
                    tracing::error!(%error, "append stream not understood");
                    None
                }
            }
        });
        let mut results = pin!(self.raft.stream_append(requests));
        while let Some(result) = results.next().await {
            answer(tx, &result.map_err(|_| Error::Stopped)?).await?;
        }
        Ok(())
    }

    async fn snapshot(&self, offer: Offer, tx: &mut FrameTx, rx: &mut FrameRx) -> Result<(), Error> {
        let Ok(_alone) = self.receiving.try_acquire() else {
            return Err(Error::Stream("another snapshot is being received".to_owned()));
        };
        let bytes: u64 = offer.files.iter().map(|file| file.bytes).sum();
        tracing::info!(bytes, files = offer.files.len(), "receiving a snapshot");
        let folder = snapshot::receive(self.folders.next(), offer.files, rx).await?;
        let snapshot = Snapshot { meta: offer.meta, snapshot: Content::Files(folder) };
        let installed = self.raft.install_full_snapshot(offer.vote, snapshot).await;
        answer(tx, &installed.map_err(|_| Error::Stopped)?).await
    }
}

async fn answer<T: Serialize>(tx: &mut FrameTx, value: &T) -> Result<(), Error> {
    timeout(ANSWER_TIMEOUT, tx.send(wire::encode(value)))
        .await
        .map_err(|_| Error::Late { what: "way out for an answer", waited: ANSWER_TIMEOUT })?
        .map_err(broken)
}

fn broken(error: reach_transport::Error) -> Error {
    Error::Stream(error.to_string())
}
