//! The yardstick on our own system, as a whole: every kind of work is done, measured and reported.

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use reach_bench::{
    agents::{crowd, detect},
    idle, report,
    side_by_side::Plan,
    system::{Acks, Programs, System, Via, Work},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_work_is_measured_on_our_own_cluster() -> anyhow::Result<()> {
    let nowhere = PathBuf::from("/nowhere/at/all");
    let data = tempfile::tempdir()?;
    let plan = Plan {
        systems: vec![System::Ours],
        works: vec![Work::Submit, Work::Worked, Work::RoundTrip],
        in_flight: vec![4],
        sizes: vec![256],
        warm_up: Duration::from_millis(100),
        counted: Duration::from_millis(400),
        repetitions: 1,
        via: Via::Follower,
        acks: Acks::Confirmed,
        programs: Programs { agent_reach: binary()?, nats_server: nowhere.clone(), etcd: nowhere },
        data: data.path().to_owned(),
    };
    assert!(System::Etcd.version(&plan.programs).is_err(), "a missing rival says so");
    let mut shown = String::new();
    let rows = plan.run(|row| shown += &report::row(row)).await;
    assert_eq!(rows.len(), 3);
    for row in &rows {
        assert!(row.failed.is_empty(), "{:?}", row.failed);
        let cell = row.cell(System::Ours).context("a row without us")?;
        assert!(cell.per_s.median > 0.0 && cell.p50_ms.median <= cell.p999_ms.median, "{cell:?}");
        // Three processes of some MiB, whose CPU was counted.
        assert!(cell.peak_mib.as_ref().is_some_and(|peak| peak.median > 1.0), "{cell:?}");
        assert!(cell.cpu_us.as_ref().is_some_and(|cpu| cpu.median > 0.0), "{cell:?}");
        assert_eq!(cell.worked_per_s.is_some(), row.work == Work::Worked);
        assert!(shown.contains(&format!("{} · 256 B · 4 in flight", row.work.name())), "{shown}");
    }
    let idle = idle::measure(&plan, Duration::from_millis(200)).await?;
    assert_eq!(idle[0].resident_mib.values.len(), 3);
    let watched = Duration::from_millis(500);
    let crowd = crowd::Plan { agents: 60, connections: 6, settle: Duration::ZERO, watched };
    let crowd = crowd::measure(&plan.programs, &plan.data, &crowd).await?;
    assert_eq!(crowd.ready, 60);
    let holder = PathBuf::from(env!("CARGO_BIN_EXE_reach-bench"));
    let detect = detect::Plan { each: 2, settle: Duration::ZERO, holder };
    let detect = detect::measure(&plan.programs, &plan.data, &detect).await?;
    assert_eq!((detect.killed_s.values.len(), detect.frozen_s.values.len(), detect.wrong), (2, 2, 0));
    // Nothing is left behind.
    assert_eq!(std::fs::read_dir(data.path())?.count(), 0);
    Ok(())
}

/// The node's binary of this very build.
fn binary() -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    let dir = test.ancestors().find(|dir| dir.join("agent-reach").is_file());
    let dir = dir.context("the binary agent-reach is not built: run `cargo build -p agent-reach` first")?;
    Ok(dir.join("agent-reach"))
}
