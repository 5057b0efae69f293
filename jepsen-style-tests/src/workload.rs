//! Callers that submit without pause and keep a history of what they were told.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use fastrand::Rng;
use reach_client::{Client, Error};
use reach_protocol::{Code, Envelope, Json, MsgId, Tag, message::MessageRecord};
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

/// What callers do besides submitting: a chaotic run's callers repeat, contradict and look back.
#[derive(Clone, Copy, Debug)]
pub struct Mix {
    pub seed: u64,
    /// Between two operations of one caller.
    pub pause: Duration,
}

/// What callers of a mix have seen.
#[derive(Debug, Default)]
pub struct Seen {
    /// Ends that were read while faults went on: they may never change.
    pub ends: BTreeMap<MsgId, MessageRecord>,
    pub repeats: u64,
    pub conflicts: u64,
    pub longest: Duration,
}

/// What one caller brings home.
type Told = anyhow::Result<(Vec<Entry>, Seen)>;

#[derive(Debug)]
pub struct Workload {
    stop: Arc<AtomicBool>,
    accepted: Arc<AtomicU64>,
    callers: Vec<JoinHandle<Told>>,
}

impl Workload {
    /// `callers` of them, each with one submission under way at a time.
    pub fn start(clients: Vec<Client>) -> Self {
        Self::start_with(clients, None)
    }

    pub fn start_mixed(clients: Vec<Client>, mix: Mix) -> Self {
        Self::start_with(clients, Some(mix))
    }

    fn start_with(clients: Vec<Client>, mix: Option<Mix>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let accepted = Arc::new(AtomicU64::new(0));
        let callers = clients
            .into_iter()
            .enumerate()
            .map(|(caller, client)| {
                let (stop, accepted) = (stop.clone(), accepted.clone());
                tokio::spawn(call(caller as u64, client, stop, accepted, mix))
            })
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
        Ok(self.finish_mixed().await?.0)
    }

    /// Fails when a caller saw what must not be.
    pub async fn finish_mixed(self) -> anyhow::Result<(Vec<Entry>, Seen)> {
        self.stop.store(true, Ordering::Relaxed);
        let (mut history, mut all) = (Vec::new(), Seen::default());
        for caller in self.callers {
            let (entries, seen) = caller.await??;
            history.extend(entries);
            all.ends.extend(seen.ends);
            all.repeats += seen.repeats;
            all.conflicts += seen.conflicts;
            all.longest = all.longest.max(seen.longest);
        }
        Ok((history, all))
    }
}

async fn call(
    caller: u64,
    client: Client,
    stop: Arc<AtomicBool>,
    accepted: Arc<AtomicU64>,
    mix: Option<Mix>,
) -> Told {
    let (mut history, mut seen) = (Vec::new(), Seen::default());
    let mut rng = Rng::with_seed(mix.map_or(0, |mix| mix.seed) ^ caller);
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
        let began = Instant::now();
        let outcome = outcome(client.submit(envelope.clone()).await.map(drop));
        seen.longest = seen.longest.max(began.elapsed());
        if outcome == Outcome::Accepted {
            accepted.fetch_add(1, Ordering::Relaxed);
        }
        history.push(Entry { msg_id, number, outcome: outcome.clone() });
        if let Some(mix) = mix {
            let began = Instant::now();
            if outcome == Outcome::Accepted {
                besides(&client, envelope, &history, &mut seen, &mut rng).await?;
            }
            seen.longest = seen.longest.max(began.elapsed());
            tokio::time::sleep(mix.pause).await;
        }
    }
    Ok((history, seen))
}

fn outcome(told: Result<(), Error>) -> Outcome {
    match told {
        Ok(()) => Outcome::Accepted,
        Err(error) if error.code() == Code::OutcomeUnknown => Outcome::Unknown,
        Err(error) => Outcome::Refused(error.code().to_string()),
    }
}

/// Says it again, says something else under the same id, or looks at what was acknowledged before.
async fn besides(
    client: &Client,
    envelope: Envelope,
    history: &[Entry],
    seen: &mut Seen,
    rng: &mut Rng,
) -> anyhow::Result<()> {
    let msg_id = envelope.msg_id.clone().expect("callers name their messages");
    match rng.u8(..10) {
        0 | 1 => match client.submit(envelope).await {
            Ok(again) => {
                anyhow::ensure!(
                    again.view.record.msg_id == msg_id,
                    "a repeat of {msg_id} made another message"
                );
                seen.repeats += 1;
            }
            Err(error) => may_fail(&msg_id, &error)?,
        },
        2 => {
            let other = Envelope { intent: Some("something else".into()), ..envelope };
            match client.submit(other).await {
                Ok(_) => anyhow::bail!("{msg_id} was taken twice, with different content"),
                Err(error) if error.code() == Code::MsgIdConflict => seen.conflicts += 1,
                Err(error) => may_fail(&msg_id, &error)?,
            }
        }
        3..6 => {
            let entry = &history[rng.usize(..history.len())];
            if entry.outcome != Outcome::Accepted {
                return Ok(());
            }
            match client.status(&entry.msg_id).await {
                Ok(view) if view.record.state.is_final() => {
                    let record = (*view.record).clone();
                    let before = seen.ends.insert(entry.msg_id.clone(), record.clone());
                    let same = before.is_none_or(|before| before == record);
                    anyhow::ensure!(same, "the end of {} has changed", entry.msg_id);
                }
                Ok(_) => {
                    let had_ended = seen.ends.contains_key(&entry.msg_id);
                    anyhow::ensure!(!had_ended, "{} had ended and runs again", entry.msg_id);
                }
                Err(error) => may_fail(&entry.msg_id, &error)?,
            }
        }
        _ => {}
    }
    Ok(())
}

/// Under faults there may be no answer; that an acknowledged message is not there is never one.
fn may_fail(msg_id: &MsgId, error: &Error) -> anyhow::Result<()> {
    let expected =
        [Code::OutcomeUnknown, Code::NoLeader, Code::NoMajority, Code::NodeDraining, Code::Overloaded];
    anyhow::ensure!(expected.contains(&error.code()), "{msg_id}, which was acknowledged: {error}");
    Ok(())
}
