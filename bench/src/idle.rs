//! A cluster that nobody uses: what a node costs for being there.

use std::time::Duration;

use anyhow::Context as _;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::{
    process,
    side_by_side::Plan,
    statistics::Spread,
    system::{Cluster, System, Via, Work},
};

#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub system: System,
    /// One value a node.
    pub resident_mib: Spread,
    /// All nodes together, in per cent of one core.
    pub cpu_percent: f64,
}

/// After `settle`, over another such time.
pub async fn measure(plan: &Plan, settle: Duration) -> anyhow::Result<Vec<Idle>> {
    let mut found = Vec::new();
    for system in &plan.systems {
        let cluster = Cluster::start(*system, &plan.programs, &plan.data, plan.acks).await?;
        // A stream for JetStream, an agent for us: a cluster that could be used.
        let _worker = cluster.prepare(Work::Submit, 1, Via::Leader).await?;
        sleep(settle).await;
        let pids = cluster.servers().pids();
        let (before, started) = (process::cpu(&pids)?, Instant::now());
        sleep(settle).await;
        let cpu = process::cpu(&pids)? - before;
        let resident = pids.iter().map(|pid| process::memory(*pid).map(|memory| memory.resident));
        let resident: Vec<f64> = resident.collect::<anyhow::Result<_>>()?;
        found.push(Idle {
            system: *system,
            resident_mib: Spread::of(resident).context("a cluster without servers")?,
            cpu_percent: 100.0 * cpu.as_secs_f64() / started.elapsed().as_secs_f64(),
        });
    }
    Ok(found)
}
