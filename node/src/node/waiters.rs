//! Callers that wait for a message's end: a cursor over the facts that wakes them, whichever node
//! the work was done through.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use reach_protocol::{Fact, MsgId, message::MessageRecord};
use reach_raft::Step;
use tokio::sync::oneshot;

use super::Shared;

#[derive(Debug, Default)]
pub struct Waiters {
    waiting: Mutex<HashMap<MsgId, Vec<oneshot::Sender<Arc<MessageRecord>>>>>,
}

impl Waiters {
    /// Resolves with the message's end. Register first, then look at the tables: an end between the
    /// two is seen by one of them.
    pub fn wait(&self, msg_id: &MsgId) -> oneshot::Receiver<Arc<MessageRecord>> {
        let (sender, receiver) = oneshot::channel();
        let mut waiting = self.lock();
        let senders = waiting.entry(msg_id.clone()).or_default();
        senders.retain(|sender| !sender.is_closed());
        senders.push(sender);
        receiver
    }

    /// A caller went away or has its answer: forget what nobody waits for.
    pub fn forget(&self, msg_id: &MsgId) {
        let mut waiting = self.lock();
        if let Some(senders) = waiting.get_mut(msg_id) {
            senders.retain(|sender| !sender.is_closed());
            if senders.is_empty() {
                waiting.remove(msg_id);
            }
        }
    }

    fn ended(&self, record: &Arc<MessageRecord>) {
        let senders = self.lock().remove(&record.msg_id);
        for sender in senders.into_iter().flatten() {
            let _ = sender.send(record.clone());
        }
    }

    fn all(&self) -> Vec<MsgId> {
        self.lock().keys().cloned().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<MsgId, Vec<oneshot::Sender<Arc<MessageRecord>>>>> {
        self.waiting.lock().expect("no panic while it is held")
    }
}

pub async fn run(shared: Arc<Shared>) {
    let mut facts = shared.replica.facts().cursor();
    loop {
        match facts.next().await {
            Step::Facts(entry) => {
                for fact in &entry.facts {
                    if let Fact::Completed(record) | Fact::Failed(record) | Fact::TimedOut(record) = fact {
                        shared.waiters.ended(record);
                    }
                }
            }
            // Facts were missed: every waiting caller's message is read again.
            Step::Reset(_) => {
                for msg_id in shared.waiters.all() {
                    match shared.replica.tables().message(&msg_id) {
                        Ok(Some(record)) if record.state.is_final() => shared.waiters.ended(&record),
                        Ok(_) => {}
                        Err(error) => {
                            tracing::warn!(%msg_id, %error, "a waiting caller's message can't be read")
                        }
                    }
                }
            }
            Step::Closed => return,
        }
    }
}
