//! Reads see everything that was acknowledged before them. One question to the leader answers all who
//! came before it was asked; those who come meanwhile share the next one.

use std::{sync::Arc, time::Duration};

use reach_protocol::ErrorReply;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{Shared, leader};

/// Reads that may wait to share a question; whoever comes on top waits to be let in.
const QUEUE_MAX: usize = 16_384;
/// For one question. Then those who waited for it ask again, whoever leads by then.
const ANSWER_MAX: Duration = Duration::from_secs(1);

type Waiter = oneshot::Sender<Result<u64, ErrorReply>>;

#[derive(Clone, Debug)]
pub struct Handle(mpsc::Sender<Waiter>);

impl Handle {
    pub fn new() -> (Self, mpsc::Receiver<Waiter>) {
        let (waiters, queue) = mpsc::channel(QUEUE_MAX);
        (Self(waiters), queue)
    }

    /// A position that holds everything acknowledged anywhere before the call.
    pub async fn index(&self) -> Result<u64, ErrorReply> {
        let (waiter, answered) = oneshot::channel();
        // A node that is stopping leads nobody any more.
        self.0.send(waiter).await.map_err(|_| leader::no_leader())?;
        answered.await.unwrap_or_else(|_| Err(leader::no_leader()))
    }
}

pub async fn run(shared: Arc<Shared>, mut queue: mpsc::Receiver<Waiter>) {
    let mut waiters = Vec::new();
    while queue.recv_many(&mut waiters, QUEUE_MAX).await > 0 {
        let index = ask(&shared).await;
        for waiter in waiters.drain(..) {
            // Some are gone: their time was over.
            let _ = waiter.send(index.clone());
        }
    }
}

async fn ask(shared: &Shared) -> Result<u64, ErrorReply> {
    let mut leadership = shared.replica.leadership();
    let now = *leadership.borrow_and_update();
    let index = async {
        match now.leader {
            _ if now.leading => shared.replica.read_index().await.map_err(|_| leader::no_leader()),
            Some(leader) if leader != shared.node_id => shared.peers.read_index(leader).await,
            _ => Err(leader::no_leader()),
        }
    };
    tokio::select! {
        index = timeout(ANSWER_MAX, index) => index.unwrap_or_else(|_| Err(leader::no_leader())),
        _ = leadership.changed() => Err(leader::no_leader()),
    }
}
