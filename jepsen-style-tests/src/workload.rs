//! Callers that submit without pause and keep a history of what they were told.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use reach_client::Client;
use reach_protocol::{Envelope, Json, MsgId, Tag};
use tokio::task::JoinHandle;

/// What the caller was told about one submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Acknowledged: from here on it may not be lost.
    Accepted,
    /// Refused with a code that says nothing was done.
    Refused(String),
    /// No answer: it may be there or not.
    Unknown,
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub msg_id: MsgId,
    pub number: u64,
    pub outcome: Outcome,
}

#[derive(Debug)]
pub struct Workload {
    stop: Arc<AtomicBool>,
    accepted: Arc<AtomicU64>,
    callers: Vec<JoinHandle<Vec<Entry>>>,
}

impl Workload {
    /// `callers` of them, each with one submission under way at a time.
    pub fn start(clients: Vec<Client>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let accepted = Arc::new(AtomicU64::new(0));
        let callers = clients
            .into_iter()
            .enumerate()
            .map(|(caller, client)| tokio::spawn(call(caller as u64, client, stop.clone(), accepted.clone())))
            .collect();
        Self { stop, accepted, callers }
    }

    /// Submissions acknowledged so far.
    pub fn accepted(&self) -> u64 {
        self.accepted.load(Ordering::Relaxed)
    }

    /// Waits until that many more were acknowledged: progress, whatever is broken just now.
    pub async fn progress(&self, more: u64, within: Duration) -> anyhow::Result<()> {
        let goal = self.accepted() + more;
        let reached = async {
            while self.accepted() < goal {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let stuck =
            |_| anyhow::anyhow!("{} of {goal} submissions acknowledged after {within:?}", self.accepted());
        tokio::time::timeout(within, reached).await.map_err(stuck)
    }

    pub async fn finish(self) -> anyhow::Result<Vec<Entry>> {
        self.stop.store(true, Ordering::Relaxed);
        let mut history = Vec::new();
        for caller in self.callers {
            history.extend(caller.await?);
        }
        Ok(history)
    }
}

async fn call(caller: u64, client: Client, stop: Arc<AtomicBool>, accepted: Arc<AtomicU64>) -> Vec<Entry> {
    let mut history = Vec::new();
    let tag = Tag::parse("square").expect("a legal tag");
    for i in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let number = caller * 1_000_000 + i;
        let msg_id = MsgId::parse(&format!("m_{caller}_{i}")).expect("a legal id");
        let payload = Json::from_value(&number.into());
        let envelope =
            Envelope { msg_id: Some(msg_id.clone()), ..Envelope::request(vec![tag.clone()], payload) };
        let outcome = match client.submit(envelope).await {
            Ok(_) => {
                accepted.fetch_add(1, Ordering::Relaxed);
                Outcome::Accepted
            }
            Err(error) if error.code() == reach_protocol::Code::OutcomeUnknown => Outcome::Unknown,
            Err(error) => Outcome::Refused(error.code().to_string()),
        };
        history.push(Entry { msg_id, number, outcome });
    }
    history
}
