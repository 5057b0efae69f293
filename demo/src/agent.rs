//! The agents of the cast that are written in Rust, each a process of its own.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use reach_client::{Agent, AgentBuilder, Credentials, Done, Failure, Options, RunningAgent, Stopped, Task};
use reach_protocol::Json;
use serde::Serialize;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::oneshot,
    time::Instant,
};

use crate::{
    analyse::{history, scan, secrets},
    findings::Part,
    ledger::{self, Start},
    report,
    snapshot::Snapshot,
    summary::Summary,
    unit::{self, Work},
};

/// How long an agent that is asked to end lets its tasks finish.
const DRAIN_MAX: Duration = Duration::from_secs(3);

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    History,
    Scan,
    Secrets,
    Writer,
}

impl Kind {
    fn capability(self) -> &'static str {
        match self {
            Self::History => unit::HISTORY,
            Self::Scan => unit::SCAN,
            Self::Secrets => unit::SECRETS,
            Self::Writer => unit::WRITE,
        }
    }
}

/// What every process of the cast is told.
#[derive(Clone, Debug, clap::Args)]
pub struct Place {
    /// The folder of the context: where the cluster is, and the agents' certificates.
    #[arg(long)]
    pub context: PathBuf,
    /// A folder for the agent's inbox.
    #[arg(long)]
    pub inbox: PathBuf,
    /// What `Snapshot::take` found, as JSON.
    #[arg(long)]
    pub snapshot: PathBuf,
    /// The file that gets one line for each unit of work started.
    #[arg(long)]
    pub ledger: PathBuf,
    /// Where reports go.
    #[arg(long)]
    pub out: PathBuf,
    /// End when the standard input ends: whoever started this is gone.
    #[arg(long)]
    pub with_stdin: bool,
}

impl Place {
    pub fn snapshot(&self) -> anyhow::Result<Snapshot> {
        let text = fs::read_to_string(&self.snapshot)
            .with_context(|| format!("can't read {}", self.snapshot.display()))?;
        Ok(serde_json::from_str(&text)?)
    }
}

pub async fn run(kind: Kind, id: &str, weight: f64, place: Place) -> anyhow::Result<()> {
    let work = Arc::new(Worker { id: id.to_string(), snapshot: place.snapshot()?, place: place.clone() });
    let builder = Agent::builder(id).capability(kind.capability(), weight).handler(move |task| {
        let work = work.clone();
        async move { work.handle(task).await }
    });
    live(builder, id, &place).await
}

/// Connects, and works until it is asked to end.
pub async fn live(builder: AgentBuilder, id: &str, place: &Place) -> anyhow::Result<()> {
    let mut options = Options::from_context(&place.context)?;
    options.credentials = credentials(&place.context, id)?;
    options.drain_timeout = DRAIN_MAX;
    let asked = asked_to_end(place.with_stdin)?;
    let agent = builder.inbox_dir(&place.inbox).connect(options).await?;
    println!("{id} pid {} is attached", std::process::id());
    until_the_end(agent, asked).await
}

async fn until_the_end(agent: RunningAgent, asked: impl Future<Output = ()>) -> anyhow::Result<()> {
    let stopped = tokio::select! {
        stopped = agent.stopped() => stopped,
        () = asked => agent.shutdown().await,
    };
    match stopped {
        Stopped::Asked => Ok(()),
        other => anyhow::bail!("the run ended: {other:?}"),
    }
}

/// The agent's own certificate: it can act as itself and as nobody else.
fn credentials(context: &Path, id: &str) -> anyhow::Result<Credentials> {
    let file = |name: &str| context.join("agents").join(format!("{id}.{name}"));
    Credentials::load(context.join("client-ca.pem"), file("pem"), file("key"))
        .with_context(|| format!("no certificate for {id}: agent-reach certs issue --agent {id}"))
}

/// SIGTERM, SIGINT, or the end of the standard input.
fn asked_to_end(with_stdin: bool) -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (gone, parent_gone) = oneshot::channel::<()>();
    if with_stdin {
        std::thread::spawn(move || {
            let mut input = std::io::stdin().lock();
            let mut bytes = [0; 64];
            while matches!(input.read(&mut bytes), Ok(1..)) {}
            drop(gone);
        });
    } else {
        // It must never fire: it lives as long as the process.
        std::mem::forget(gone);
    }
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = parent_gone => {}
        }
    })
}

struct Worker {
    id: String,
    snapshot: Snapshot,
    place: Place,
}

impl Worker {
    async fn handle(self: Arc<Self>, task: Task) -> Result<Done, Failure> {
        if let Ok(order) = task.payload().decode::<WriteOrder>() {
            return blocking(move || self.write(&task, &order)).await;
        }
        let order: unit::Task = task.decode()?;
        let ends = Instant::now() + Duration::from_millis(order.pace_ms);
        let done = blocking(move || self.analyse(&task, &order)).await?;
        tokio::time::sleep_until(ends).await;
        Ok(done)
    }

    fn note_start(&self, task: &Task, job: u32, unit: &str) -> anyhow::Result<()> {
        ledger::append(&self.place.ledger, &Start::now(job, unit, &self.id, task.msg_id.as_str()))
    }

    fn analyse(&self, task: &Task, order: &unit::Task) -> anyhow::Result<Done> {
        self.note_start(task, order.job, &order.unit)?;
        let (part, excerpt) = part_of(&self.snapshot, &order.work)?;
        Ok(Done::new(json(&part)?).excerpt(excerpt))
    }

    fn write(&self, task: &Task, order: &WriteOrder) -> anyhow::Result<Done> {
        self.note_start(task, order.job, WRITE_UNIT)?;
        let digest = report::write(&order.summary, &self.place.out)?;
        let written = Written { digest };
        Ok(Done::new(json(&written)?).excerpt("REPORT.md and report.html"))
    }
}

/// The unit of work that the report is, in the ledger and in message ids.
pub const WRITE_UNIT: &str = "report";

/// The payload of `report.write`.
#[derive(Clone, Debug, Serialize, serde::Deserialize)]
pub struct WriteOrder {
    pub job: u32,
    pub summary: Summary,
}

/// The result of `report.write`.
#[derive(Clone, Debug, Serialize, serde::Deserialize)]
pub struct Written {
    pub digest: String,
}

/// The result of one unit and a line about it. `docs.check` is not done in Rust.
pub fn part_of(snapshot: &Snapshot, work: &Work) -> anyhow::Result<(Part, String)> {
    Ok(match work {
        Work::History { head, skip, count } => {
            let found = history::read(&snapshot.repo, head.as_deref(), *skip, *count)?;
            let counted = format!("{} commits, {} files", found.commits, found.churn.len());
            let excerpt = found.note.clone().unwrap_or(counted);
            (Part::History(found), excerpt)
        }
        Work::Scan { ranges, aspects, sampling } => {
            let found = scan::scan(&snapshot.tree, ranges, aspects, *sampling)?;
            let long: usize = found.files.values().map(|file| file.long.len()).sum();
            let excerpt = format!("{} files, {long} long functions", found.files.len());
            (Part::Scan(found), excerpt)
        }
        Work::Secrets { ranges } => {
            let found = secrets::scan(&snapshot.tree, ranges)?;
            let excerpt = format!("{} lines, {} suspects", found.lines, found.found.len());
            (Part::Secrets(found), excerpt)
        }
        Work::Docs { .. } => anyhow::bail!("docs.check is done by docs.py"),
    })
}

pub fn json<T: Serialize>(value: &T) -> anyhow::Result<Json> {
    Ok(Json::of(value)?)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(error)) => Err(Failure::Error(format!("{error:#}"))),
        Err(_) => Err(Failure::Error("the analyser panicked".into())),
    }
}
