//! `kill -9` of the leader: how long no write is accepted, whoever asks.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::Context as _;
use serde::Serialize;
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};

use crate::{
    load::Ask,
    side_by_side::Plan,
    statistics::Spread,
    system::{Cluster, SERVERS, System, Via, Work},
};

/// Every client begins a write this often, whatever became of the ones before: what is measured is
/// the cluster and no client's patience.
const EVERY: Duration = Duration::from_millis(20);
/// For one write; the next ones don't wait for it.
const WRITE_MAX: Duration = Duration::from_secs(10);
const SIZE: usize = 256;
/// Writes before the kill.
const STEADY: Duration = Duration::from_secs(2);
/// What counts as writing again: this long without a gap of `GAP_MAX`, not sooner than `WATCH_MIN`
/// after the kill.
const STEADY_AGAIN: Duration = Duration::from_secs(1);
const GAP_MAX: Duration = Duration::from_millis(200);
const WATCH_MIN: Duration = Duration::from_secs(3);
const WATCH_MAX: Duration = Duration::from_secs(60);

#[derive(Clone, Debug, Serialize)]
pub struct Failover {
    pub system: System,
    /// The longest time between two accepted writes, the second after the kill.
    pub without_write_s: Spread,
}

pub async fn measure(plan: &Plan, repetitions: usize) -> anyhow::Result<Vec<Failover>> {
    let mut gaps = vec![Vec::new(); plan.systems.len()];
    for _ in 0..repetitions {
        for (system, gaps) in plan.systems.iter().zip(&mut gaps) {
            let gap = once(plan, *system).await.with_context(|| format!("{}, failover", system.name()))?;
            gaps.push(gap.as_secs_f64());
        }
    }
    let found = plan.systems.iter().zip(gaps);
    Ok(found
        .filter_map(|(system, gaps)| Some(Failover { system: *system, without_write_s: Spread::of(gaps)? }))
        .collect())
}

/// A cluster of its own each time, with a client at each of its servers.
async fn once(plan: &Plan, system: System) -> anyhow::Result<Duration> {
    let mut cluster = Cluster::start(system, &plan.programs, &plan.data, plan.acks).await?;
    let _worker = cluster.prepare(Work::Submit, 1, Via::Leader).await?;
    let accepted: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let mut clients = JoinSet::new();
    for server in 0..SERVERS {
        let ask = cluster.asker(Work::Submit, SIZE, server).await?;
        clients.spawn(write_on(ask, accepted.clone()));
    }
    let steady = |since: Instant| {
        let accepted = accepted.lock().expect("no panic while it is held");
        let now = Instant::now();
        now - since >= STEADY_AGAIN && longest_gap(&accepted, now - STEADY_AGAIN, now) < GAP_MAX
    };
    let begun = Instant::now();
    while begun.elapsed() < STEADY || !steady(begun) {
        anyhow::ensure!(begun.elapsed() < WATCH_MAX, "no steady writes before the kill");
        sleep(EVERY).await;
    }
    let leader = cluster.leader().await?;
    let killed = Instant::now();
    cluster.kill(leader)?;
    while killed.elapsed() < WATCH_MIN || !steady(killed) {
        anyhow::ensure!(killed.elapsed() < WATCH_MAX, "no writes again\n{}", cluster.servers().logs());
        sleep(EVERY).await;
    }
    clients.shutdown().await;
    let accepted = accepted.lock().expect("no panic while it is held");
    Ok(longest_gap(&accepted, killed, Instant::now()))
}

async fn write_on(ask: Ask, accepted: Arc<Mutex<Vec<Instant>>>) {
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut writes = JoinSet::new();
    loop {
        ticks.tick().await;
        let (write, accepted) = (ask(), accepted.clone());
        writes.spawn(async move {
            // A write that fails, or gets no answer in time, is none: that is what is measured.
            if let Ok(Ok(())) = timeout(WRITE_MAX, write).await {
                accepted.lock().expect("no panic while it is held").push(Instant::now());
            }
        });
        while writes.try_join_next().is_some() {}
    }
}

/// The longest time without an acceptance that reaches past `from`, up to `until`. The times are in
/// order but for what two threads do to one lock.
fn longest_gap(accepted: &[Instant], from: Instant, until: Instant) -> Duration {
    let before = accepted.iter().filter(|at| **at <= from).max().copied().unwrap_or(from);
    let mut after: Vec<Instant> =
        accepted.iter().filter(|at| **at > from && **at <= until).copied().collect();
    after.sort();
    after.push(until);
    let mut last = before;
    let mut longest = Duration::ZERO;
    for at in after {
        longest = longest.max(at - last);
        last = at;
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gap_reaches_from_the_last_write_before_the_kill() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let accepted = [at(0), at(500), at(980), at(1_005), at(2_200), at(2_220)];
        // An answer that was on its way at the kill doesn't hide the gap behind it.
        assert_eq!(longest_gap(&accepted, at(1_000), at(2_230)), Duration::from_millis(1_195));
        // Nor does an early pause count.
        assert_eq!(longest_gap(&accepted, at(2_200), at(2_230)), Duration::from_millis(20));
        // Nothing at all up to the end is a gap as well.
        assert_eq!(longest_gap(&accepted, at(3_000), at(9_000)), Duration::from_millis(6_780));
    }
}
