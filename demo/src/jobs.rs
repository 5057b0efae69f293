//! The two jobs and what goes wrong in them: an agent joins and a worker is killed in the first, the
//! leader is killed in the second.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use anyhow::{Context, ensure};
use reach_protocol::{
    AgentId, Envelope, MsgId, Tag, envelope::Response, frame::AgentView, message::StateName,
};
use tokio::{task::JoinHandle, time::Instant};

use crate::{
    agent::json,
    cast::{Cast, until},
    cluster::{Cluster, Job, is_done, node_of, report_of},
    failover::Failover,
    planner,
    screen::Screen,
    trace, unit,
};

/// The least time that a scan takes, so that one can watch and there is a middle to disturb.
pub const PACE_MS: u64 = 240;
/// A whole job, everything that goes wrong in it included.
const JOB_MAX: Duration = Duration::from_secs(110);
/// Scans given out before `scan_c` joins: enough to judge the weights by.
const JOIN_AFTER: u64 = 66;
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Everything that the demo has at hand.
#[derive(Debug)]
pub struct Stage<'a> {
    pub screen: &'a mut Screen,
    pub cast: &'a mut Cast,
    pub cluster: Cluster,
    pub units: usize,
    pub scans: usize,
}

/// What an agent held when it was killed.
#[derive(Clone, Debug)]
pub struct Held {
    pub msg_id: MsgId,
    pub received: bool,
}

#[derive(Debug)]
pub struct JobOne {
    pub job: Job,
    pub weights: BTreeMap<AgentId, f64>,
    /// Scans given to each before the third joined.
    pub choices: BTreeMap<AgentId, u64>,
    /// How long after its registration the third got its first task, in milliseconds.
    pub joined_after_ms: Option<u64>,
    pub others_unchanged: bool,
    pub held: Vec<Held>,
}

#[derive(Debug)]
pub struct JobTwo {
    pub job: Job,
    pub done_at_kill: usize,
    pub failover: Failover,
    /// Agents that were declared dead or draining although they ran.
    pub mistaken: Vec<AgentId>,
}

impl Stage<'_> {
    /// Hands in a job; its answer comes when all is done.
    fn begin(&self, job: &Job, number: u32) -> anyhow::Result<JoinHandle<anyhow::Result<Response>>> {
        let order = planner::Order { job: number, pace_ms: PACE_MS };
        let mut envelope = Envelope::request(vec![Tag::parse(unit::PLAN)?], json(&order)?);
        envelope.msg_id = Some(job.root.clone());
        envelope.trace_id = Some(job.trace_id.clone());
        envelope.intent = Some("check up this repository".into());
        let client = self.cluster.client.clone();
        Ok(tokio::spawn(async move { Ok(client.call(envelope, JOB_MAX).await?) }))
    }

    /// Reads the trace again until `seen` says something, and shows how the job stands meanwhile.
    async fn watch<T>(
        &mut self,
        job: &mut Job,
        what: &str,
        within: Duration,
        every: Duration,
        mut seen: impl FnMut(&Job) -> Option<T>,
    ) -> anyhow::Result<T> {
        let deadline = Instant::now() + within;
        loop {
            self.cast.check()?;
            let fresh = job.refresh(&self.cluster).await?;
            let progress = self.screen.bar(job.done(), self.units);
            let note = if fresh { what } else { "no answer from the cluster now" };
            self.screen.live(format!("{progress}   {note}"));
            if let Some(answer) = seen(job) {
                return Ok(answer);
            }
            ensure!(Instant::now() < deadline, "{what}: not within {} s", within.as_secs());
            tokio::time::sleep(every).await;
        }
    }

    async fn finish(
        &mut self,
        job: &mut Job,
        call: JoinHandle<anyhow::Result<Response>>,
    ) -> anyhow::Result<Response> {
        self.watch(job, "under way", JOB_MAX, LOOK_EVERY, |_| call.is_finished().then_some(())).await?;
        let response = call.await?.context("the job")?;
        until("the finished trace", Duration::from_secs(20), LOOK_EVERY, async || {
            Ok(job.refresh(&self.cluster).await?.then_some(()))
        })
        .await?;
        Ok(response)
    }

    pub async fn job_one(&mut self) -> anyhow::Result<JobOne> {
        let mut job = Job::new(1)?;
        let trace_id = job.trace_id.clone();
        let about = format!(
            "\"check up this repository\"   trace {trace_id}   {} tasks, {} of them {} (paced: {PACE_MS} ms at least)",
            self.units,
            self.scans,
            unit::SCAN
        );
        self.screen.step(3, "JOB 1", about);
        let before = self.cluster.agents().await?;
        let call = self.begin(&job, 1)?;
        let given =
            |job: &Job| trace::choices(&job.records, &job.hops, unit::SCAN, u64::MAX).values().sum::<u64>();
        self.watch(&mut job, "scan_a and scan_b share the work", JOB_MAX, LOOK_EVERY, |job| {
            (given(job) >= JOIN_AFTER).then_some(())
        })
        .await?;

        let (joined_after_ms, registered_ms, others_unchanged) = self.third_joins(&mut job, &before).await?;
        let choices = trace::choices(&job.records, &job.hops, unit::SCAN, registered_ms);
        let weights = weights(&before);
        let scanned = job.of_capability(unit::SCAN).filter(|record| is_done(record)).count();
        let progress = self.screen.bar(scanned, self.scans);
        self.screen.detail(format!("{} {progress}   {}", unit::SCAN, shares(&choices, &weights)));
        self.screen.detail(format!(
            "+ scan_c joins with {} 1.0: first task {} later; {}",
            unit::SCAN,
            seconds_of(joined_after_ms),
            if others_unchanged { "no other program was changed or restarted" } else { "OTHERS CHANGED" }
        ));

        let held = self.worker_dies(&mut job).await?;
        let response = self.finish(&mut job, call).await?;
        self.tell_held(&job, &held);
        self.tell_end(&job, &response);
        Ok(JobOne { job, weights, choices, joined_after_ms, others_unchanged, held })
    }

    /// `scan_c` starts in the middle of the job. Answers after how long it had a task, when the
    /// cluster registered it, and whether everybody else is the run that they were.
    async fn third_joins(
        &mut self,
        job: &mut Job,
        before: &BTreeMap<AgentId, AgentView>,
    ) -> anyhow::Result<(Option<u64>, u64, bool)> {
        let third = AgentId::parse("scan_c")?;
        let command = self.cast.myself("scan_c", &["agent", "scan", "--weight", "1.0"])?;
        self.cast.start("scan_c", "Rust SDK", command)?;
        let first_ms = self
            .watch(job, "scan_c joins", Duration::from_secs(15), Duration::from_millis(100), |job| {
                let given = |hop: &&reach_protocol::message::Hop| {
                    hop.to == StateName::Matched && hop.holder.as_ref().is_some_and(|h| h.agent_id == third)
                };
                job.hops.iter().find(given).map(|hop| hop.at.cluster_ms)
            })
            .await?;
        let now = self.cluster.agents().await?;
        let registered_ms =
            now.get(&third).context("scan_c is not in the registry")?.record.registered.cluster_ms;
        let same = before.iter().all(|(agent_id, view)| {
            now.get(agent_id).is_some_and(|now| now.record.instance == view.record.instance)
        });
        Ok((first_ms.checked_sub(registered_ms), registered_ms, same))
    }

    /// Stops `scan_b`, waits until it was given tasks that it can't take, kills it, waits until they
    /// are with somebody else, and starts it again. Answers what it held when it was killed.
    async fn worker_dies(&mut self, job: &mut Job) -> anyhow::Result<Vec<Held>> {
        let pid = self.cast.member("scan_b").context("scan_b was never started")?.pid;
        // A stopped process keeps its connection and answers nothing: what it is given now is given
        // before it can be received.
        self.cast.guard("scan_b")?;
        self.cast.kill("-STOP", pid).await?;
        let mut last_seen: BTreeSet<MsgId> = BTreeSet::new();
        self.watch(job, "scan_b is stopped", Duration::from_secs(10), Duration::from_millis(100), |job| {
            let held = job.held_by("scan_b");
            let waiting: BTreeSet<MsgId> = held
                .iter()
                .filter(|(_, received)| !received)
                .map(|(record, _)| record.msg_id.clone())
                .collect();
            // Seen twice: nothing that it sent before it stopped is still on its way.
            let sure = waiting.intersection(&last_seen).count();
            last_seen = waiting;
            (sure >= 2).then_some(())
        })
        .await?;
        self.cast.kill("-9", pid).await?;
        let died = Instant::now();
        self.cast.unguard("scan_b").await;
        let held: Vec<Held> = job
            .held_by("scan_b")
            .into_iter()
            .map(|(record, received)| Held { msg_id: record.msg_id.clone(), received })
            .collect();
        let received = held.iter().filter(|held| held.received).count();
        self.screen.detail(format!(
            "! kill -9 scan_b (pid {pid}), holding {} tasks: {received} received, {} given to it and not yet received",
            held.len(),
            held.len() - received
        ));
        self.watch(job, "the cluster notices", Duration::from_secs(25), LOOK_EVERY, |job| {
            let elsewhere = |held: &Held| {
                job.hops_of(&held.msg_id).iter().any(|hop| {
                    hop.to == StateName::Matched
                        && hop.holder.as_ref().is_some_and(|h| &*h.agent_id != "scan_b")
                })
            };
            held.iter().filter(|held| !held.received).all(elsewhere).then_some(())
        })
        .await?;
        self.screen.detail(format!(
            "  {:.1} s after the kill all that it had not received is with others; scan_b is started again on its inbox",
            died.elapsed().as_secs_f64()
        ));
        let command = self.cast.myself("scan_b", &["agent", "scan", "--weight", "0.5"])?;
        self.cast.start("scan_b", "Rust SDK", command)?;
        Ok(held)
    }

    fn tell_end(&mut self, job: &Job, response: &Response) {
        let progress = self.screen.bar(job.done(), self.units);
        let done: Option<planner::Done> = response.result.as_ref().and_then(|result| result.decode().ok());
        let said = match (done, &response.error) {
            (Some(done), _) => {
                format!("errors seen by the planner: {} · job {}", done.errors, response.status)
            }
            (None, Some(error)) => format!("job {}: {error}", response.status),
            (None, None) => format!("job {}", response.status),
        };
        self.screen.detail(format!("all tasks {progress}   {said}"));
    }

    fn tell_held(&mut self, job: &Job, held: &[Held]) {
        for held in held {
            let kind = if held.received { "received" } else { "not received" };
            let story = trace::story(&job.hops_of(&held.msg_id));
            self.screen.detail(format!("  {} ({kind}): {story}", held.msg_id));
        }
    }

    pub async fn job_two(&mut self) -> anyhow::Result<JobTwo> {
        let mut job = Job::new(2)?;
        let trace_id = job.trace_id.clone();
        self.screen.step(7, "JOB 2", format!("the same again   trace {trace_id}"));
        let before = self.cluster.agents().await?;
        let call = self.begin(&job, 2)?;
        let goal = self.units * 2 / 5;
        self.watch(&mut job, "until 40 % are done", JOB_MAX, Duration::from_millis(150), |job| {
            (job.done() >= goal).then_some(())
        })
        .await?;
        let view = self.cluster.view(Duration::from_secs(10)).await?;
        let leader = view.leader.context("nobody leads")?;
        let pid = report_of(&view, leader).context("the leader does not report")?.pid;
        // A witness whose own connection survives, so that its times are the cluster's.
        let witness = Cluster::connect(&self.cast.folders.context(), node_of(&view, leader)).await?;
        let done_at_kill = job.done();
        self.cast.kill("-9", pid).await?;
        let watcher = tokio::spawn(Failover::watch(witness, (leader, pid), Instant::now()));
        self.screen.detail(format!(
            "! kill -9 {leader}, the LEADER (pid {pid}), at {done_at_kill} of {} tasks",
            self.units
        ));
        let response = self.finish(&mut job, call).await?;
        self.screen.live("waiting for the killed node");
        let failover = watcher.await?;
        let after = self.cluster.agents().await?;
        let mistaken: Vec<AgentId> = before
            .iter()
            .filter(|(agent_id, before)| {
                after.get(*agent_id).is_none_or(|after| {
                    after.record.liveness_seq != before.record.liveness_seq
                        || after.record.instance != before.record.instance
                })
            })
            .map(|(agent_id, _)| agent_id.clone())
            .collect();
        let next = match (failover.next, failover.served) {
            (Some(next), Some(after)) => {
                format!("{next} leads, serving again {:.1} s after the kill", after.as_secs_f64())
            }
            _ => "nobody was seen to lead".into(),
        };
        self.screen.detail(format!(
            "  {next} · longest time without a result {:.1} s · agents declared dead by mistake: {}",
            trace::longest_pause_ms(&job.hops) as f64 / 1000.0,
            mistaken.len()
        ));
        self.tell_end(&job, &response);
        Ok(JobTwo { job, done_at_kill, failover, mistaken })
    }
}

/// As each agent declares them for scans.
fn weights(agents: &BTreeMap<AgentId, AgentView>) -> BTreeMap<AgentId, f64> {
    let mut weights = BTreeMap::new();
    for (agent_id, view) in agents {
        let scan =
            view.record.registration.capabilities.iter().find(|capability| &*capability.name == unit::SCAN);
        weights.extend(scan.map(|capability| (agent_id.clone(), capability.weight)));
    }
    weights
}

/// Counted and declared shares of each agent, in percent.
pub fn percentages(
    choices: &BTreeMap<AgentId, u64>,
    weights: &BTreeMap<AgentId, f64>,
) -> BTreeMap<AgentId, (f64, f64)> {
    let counted: u64 = choices.values().sum();
    let declared: f64 = weights.values().sum();
    let share = |(agent_id, weight): (&AgentId, &f64)| {
        let count = choices.get(agent_id).copied().unwrap_or(0);
        (agent_id.clone(), (100.0 * count as f64 / counted.max(1) as f64, 100.0 * weight / declared))
    };
    weights.iter().map(share).collect()
}

fn shares(choices: &BTreeMap<AgentId, u64>, weights: &BTreeMap<AgentId, f64>) -> String {
    let shares = percentages(choices, weights);
    let counted: Vec<String> =
        shares.iter().map(|(agent, (counted, _))| format!("{agent} {counted:.0} %")).collect();
    let declared: Vec<String> = shares.values().map(|(_, declared)| format!("{declared:.0}")).collect();
    let total: u64 = choices.values().sum();
    format!("{}   (of {total} tasks; weights say {})", counted.join("  "), declared.join(" : "))
}

fn seconds_of(ms: Option<u64>) -> String {
    ms.map_or("an unknown time".into(), |ms| format!("{:.2} s", ms as f64 / 1000.0))
}
