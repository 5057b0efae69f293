//! The planner: an agent whose one task is a whole check-up, and who does it by asking others.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::Context as _;
use reach_client::{Agent, Failure, Task};
use reach_protocol::{Envelope, MsgId, Tag};
use serde::{Deserialize, Serialize};
use tokio::{sync::Semaphore, task::JoinSet};

use crate::{
    agent::{self, Place, WRITE_UNIT, WriteOrder, Written, json},
    cut,
    findings::{Findings, Part},
    ledger::{self, Start},
    snapshot::Snapshot,
    summary::Summary,
    unit::{self, Unit, Work},
};

/// Scans in flight: fewer than the slots of any two agents, so that weights decide and not room.
pub const SCANS_MAX: usize = 6;
/// Everything else in flight.
const OTHERS_MAX: usize = 4;
/// How long one unit may take, whatever happens to the cluster meanwhile.
const UNIT_MAX: Duration = Duration::from_secs(120);

/// The payload of `repo.checkup`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    pub job: u32,
    /// The least time that a scan takes.
    pub pace_ms: u64,
}

/// The result of `repo.checkup`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done {
    pub units: usize,
    pub errors: usize,
}

/// What the planner keeps of a job for itself, in a file that the final check reads.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct JobRecord {
    /// Message ids by unit, of every submission that the cluster accepted.
    pub accepted: BTreeMap<String, String>,
    pub errors: Vec<String>,
    pub findings: Findings,
    pub summary: Option<Summary>,
    pub report_digest: String,
}

impl JobRecord {
    pub fn path(folder: &Path, job: u32) -> std::path::PathBuf {
        folder.join(format!("job-{job}.json"))
    }

    pub fn read(folder: &Path, job: u32) -> anyhow::Result<Self> {
        let path = Self::path(folder, job);
        let text = fs::read_to_string(&path).with_context(|| format!("can't read {}", path.display()))?;
        Ok(serde_json::from_str(&text)?)
    }
}

pub async fn run(id: &str, jobs: &Path, place: Place) -> anyhow::Result<()> {
    let planner = Arc::new(Planner {
        id: id.to_string(),
        snapshot: place.snapshot()?,
        jobs: jobs.to_path_buf(),
        place: place.clone(),
    });
    let builder = Agent::builder(id).capability(unit::PLAN, 1.0).max_concurrency(1).handler(move |task| {
        let planner = planner.clone();
        async move { planner.handle(task).await }
    });
    agent::live(builder, id, &place).await
}

struct Planner {
    id: String,
    snapshot: Snapshot,
    jobs: std::path::PathBuf,
    place: Place,
}

/// One job under way.
struct Job {
    order: Order,
    task: Task,
    scans: Semaphore,
    others: Semaphore,
    record: Mutex<JobRecord>,
}

impl Planner {
    async fn handle(&self, task: Task) -> Result<reach_client::Done, Failure> {
        let order: Order = task.decode()?;
        let failed = |error: anyhow::Error| Failure::Error(format!("{error:#}"));
        let start = Start::now(order.job, "job", &self.id, task.msg_id.as_str());
        ledger::append(&self.place.ledger, &start).map_err(failed)?;
        let units = cut::units(&self.snapshot).map_err(failed)?;
        let job = Arc::new(Job {
            order,
            task,
            scans: Semaphore::new(SCANS_MAX),
            others: Semaphore::new(OTHERS_MAX),
            record: Mutex::default(),
        });
        let parts = job.clone().check_up(units).await;
        let findings = Findings::merge(parts);
        let summary = Summary::of(&self.snapshot, &findings);
        let written = job.report(&summary).await;
        let record = {
            let mut record = job.record.lock().expect("nothing panics while it holds this");
            record.findings = findings;
            record.summary = Some(summary);
            record.report_digest = written.map(|written| written.digest).unwrap_or_default();
            record.clone()
        };
        let text = serde_json::to_string(&record)?;
        fs::write(JobRecord::path(&self.jobs, job.order.job), text).map_err(|error| failed(error.into()))?;
        let excerpt = format!("{} units, {} errors", record.accepted.len(), record.errors.len());
        let done = Done { units: record.accepted.len(), errors: record.errors.len() };
        Ok(reach_client::Done::new(json(&done).map_err(failed)?).excerpt(excerpt))
    }
}

impl Job {
    /// Asks for every unit; what fails stands in the record.
    async fn check_up(self: Arc<Self>, units: Vec<Unit>) -> Vec<Part> {
        let mut running = JoinSet::new();
        for unit in units {
            let job = self.clone();
            running.spawn(async move {
                let room = if unit.capability() == unit::SCAN { &job.scans } else { &job.others };
                let _permit = room.acquire().await.expect("the semaphores are never closed");
                let pace_ms = match unit.work {
                    Work::Scan { .. } => job.order.pace_ms,
                    Work::History { .. } | Work::Docs { .. } | Work::Secrets { .. } => 0,
                };
                let capability = unit.capability();
                let order = unit::Task { job: job.order.job, unit: unit.id, work: unit.work, pace_ms };
                let part = job.ask(capability, &order.unit, &order).await;
                part.map_err(|error| job.note_error(&order.unit, &error)).ok()
            });
        }
        running.join_all().await.into_iter().flatten().collect()
    }

    async fn report(&self, summary: &Summary) -> Option<Written> {
        let order = WriteOrder { job: self.order.job, summary: summary.clone() };
        let written = self.ask(unit::WRITE, WRITE_UNIT, &order).await;
        written.map_err(|error| self.note_error(WRITE_UNIT, &error)).ok()
    }

    /// Hands in one unit, notes that it was accepted, and waits for its result.
    async fn ask<O: Serialize, R: for<'a> Deserialize<'a>>(
        &self,
        capability: &str,
        unit: &str,
        order: &O,
    ) -> anyhow::Result<R> {
        let mut envelope = Envelope::request(vec![Tag::parse(capability)?], json(order)?);
        envelope.msg_id = Some(MsgId::parse(&format!("j{}.{unit}", self.order.job))?);
        envelope.intent = Some(format!("check up {unit}"));
        let context = self.task.context();
        let submitted = context.submit(envelope).await?;
        {
            let mut record = self.record.lock().expect("nothing panics while it holds this");
            record.accepted.insert(unit.to_string(), submitted.msg_id.to_string());
        }
        let response = context.client().wait(&submitted.msg_id, UNIT_MAX).await?;
        match (response.result, response.error) {
            (Some(result), None) => Ok(result.decode()?),
            (_, Some(error)) => Err(error.into()),
            (None, None) => anyhow::bail!("{} without a result", response.status),
        }
    }

    fn note_error(&self, unit: &str, error: &anyhow::Error) {
        eprintln!("{unit}: {error:#}");
        let mut record = self.record.lock().expect("nothing panics while it holds this");
        record.errors.push(format!("{unit}: {error:#}"));
    }
}
