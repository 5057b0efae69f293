//! `kill -9` of the leader, of a follower, then of all nodes, under load.

use std::time::Duration;

use jepsen_style_tests::{Cluster, Worker, Workload, check};
use reach_protocol::frame::{Answer, Request};

const CALLERS: usize = 8;
/// Submissions that must be acknowledged between two faults: a run that exercised less fails.
const PROGRESS: u64 = 50;
const PROGRESS_MAX: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_work_survives_kill_9_of_leader_follower_and_all() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    let ledger = check_ledger();
    let _first = Worker::start(&cluster, "worker_1", 8, ledger.clone()).await?;
    let _second = Worker::start(&cluster, "worker_2", 8, ledger.clone()).await?;
    let mut clients = Vec::new();
    for _ in 0..CALLERS {
        clients.push(cluster.client().await?);
    }
    let load = Workload::start(clients);
    load.progress(PROGRESS, PROGRESS_MAX).await?;

    // The leader goes: the others go on without it.
    let leader = cluster.leader().await?;
    cluster.kill(leader)?;
    load.progress(PROGRESS, PROGRESS_MAX).await?;
    cluster.spawn(leader)?;
    cluster.wait_until_serving().await?;

    // A follower goes: nobody should notice.
    let leader = cluster.leader().await?;
    let follower = cluster.node_ids().into_iter().find(|id| *id != leader).expect("three nodes");
    cluster.kill(follower)?;
    load.progress(PROGRESS, PROGRESS_MAX).await?;
    cluster.spawn(follower)?;
    load.progress(PROGRESS, PROGRESS_MAX).await?;

    // All of them at once: nothing that was acknowledged may be gone.
    for id in cluster.node_ids() {
        cluster.kill(id)?;
    }
    for id in cluster.node_ids() {
        cluster.spawn(id)?;
    }
    load.progress(PROGRESS, PROGRESS_MAX).await?;

    let history = load.finish().await?;
    let verdict = check::judge(&cluster, &history, &ledger).await?;
    println!("{verdict:?}");
    assert!(verdict.accepted >= 5 * PROGRESS, "the run exercised too little: {verdict:?}");

    // The registry came through without anybody registering again.
    let client = cluster.client().await?;
    let request = Request::Agents { state: None, capability: None, metadata: None, limit: 10, after: None };
    let Answer::Agents { items, .. } = client.request(request, Duration::from_secs(5)).await? else {
        anyhow::bail!("something else than agents came back");
    };
    let ids: Vec<_> = items.iter().map(|item| item.record.agent_id().to_string()).collect();
    assert_eq!(ids, ["worker_1", "worker_2"]);
    Ok(())
}

fn check_ledger() -> jepsen_style_tests::worker::Ledger {
    Default::default()
}
