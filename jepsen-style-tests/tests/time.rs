//! No clock decides who is there, and no change of leader either: calendars that jump, leaders that
//! come and go, nodes that stand still.

use std::{
    collections::BTreeMap,
    process::Child,
    time::{Duration, Instant},
};

use anyhow::ensure;
use futures_util::{StreamExt, TryStreamExt};
use jepsen_style_tests::{
    Cluster, Worker, Workload,
    nemesis::{faketime, write_clock},
};
use reach_client::Client;
use reach_protocol::{
    AgentId, AgentState, Envelope, InstanceId, Json, NodeId,
    frame::{AgentView, Answer, Request},
    message::StateName,
};

const LONG: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// Of the rules' defaults.
const TTL: Duration = Duration::from_secs(9);

async fn agent(client: &Client, agent_id: &str) -> anyhow::Result<AgentView> {
    match client.request(Request::Agent { agent_id: AgentId::parse(agent_id)? }, LONG).await? {
        Answer::Agent(view) => Ok(*view),
        other => anyhow::bail!("no agent: {other:?}"),
    }
}

/// By agent: the run, its state, and how often its liveness changed.
async fn liveness(client: &Client) -> anyhow::Result<BTreeMap<AgentId, (InstanceId, AgentState, u64)>> {
    let request =
        Request::Agents { state: None, capability: None, metadata: None, limit: 1_000, after: None };
    let Answer::Agents { items, .. } = client.request(request, LONG).await? else {
        anyhow::bail!("a question for agents got another answer");
    };
    let of = |view: AgentView| {
        let record = view.record;
        (record.agent_id().clone(), (record.instance, record.state, record.liveness_seq))
    };
    Ok(items.into_iter().map(of).collect())
}

async fn workers(cluster: &Cluster, count: usize) -> anyhow::Result<Vec<Worker>> {
    // Some at a time: a burst of handshakes would be slower.
    let started = futures_util::stream::iter(0..count).map(async |nth: usize| {
        Worker::start(cluster, &format!("worker_{nth}"), 4, Default::default()).await
    });
    started.buffer_unordered(16).try_collect().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calendars_that_jump_by_an_hour_expire_nobody_and_move_no_deadline() -> anyhow::Result<()> {
    const AGENTS: usize = 200;
    const STEPS: usize = 24;
    let cluster = Cluster::start_breakable(3, Some(faketime()?)).await?;
    let client = cluster.client().await?;
    let workers = workers(&cluster, AGENTS).await?;
    let load = Workload::start(vec![cluster.client().await?]);
    load.progress(20, LONG).await?;
    let before = liveness(&client).await?;
    ensure!(before.len() == AGENTS, "{before:?}");

    // One that nobody takes: whom it names is a run that will never come.
    let held = AgentId::parse("held")?;
    let held_worker = Worker::start(&cluster, "held", 4, Default::default()).await?;
    held_worker.running.drain().await?;
    let deadline = Duration::from_secs(8);
    let envelope = Envelope {
        expires_in_ms: Some(deadline.as_millis() as u64),
        ..Envelope::request_to(held.clone(), Json::from_value(&7.into()))
    };
    let waiting = client.submit(envelope).await?.view.record.msg_id.clone();
    let submitted = Instant::now();
    let ended = {
        let (client, msg_id) = (client.clone(), waiting);
        tokio::spawn(async move {
            loop {
                let state = client.status(&msg_id).await?.record.state.name();
                if state != StateName::Pending {
                    return anyhow::Ok((state, submitted.elapsed()));
                }
                tokio::time::sleep(POLL).await;
            }
        })
    };

    // Every half second another node, the leader too, there and back again.
    let ids = cluster.node_ids();
    for step in 0..STEPS {
        let offset = ["+1h", "-1h", "+0", "-3600s", "+61m"][step % 5];
        write_clock(&cluster.clock_file(ids[step % ids.len()]), offset)?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let (state, after) = ended.await??;
    ensure!(state == StateName::Timeout, "{state}");
    ensure!(
        (deadline..deadline + Duration::from_secs(3)).contains(&after),
        "a deadline of {deadline:?} came after {after:?}"
    );
    load.progress(20, LONG).await?;
    let history = load.finish().await?;
    ensure!(!history.is_empty(), "no work was done meanwhile");

    // Nobody's liveness changed even once, back and forth included.
    let mut after = liveness(&client).await?;
    after.remove(&held);
    ensure!(before == after, "{before:?}\n{after:?}\n{}", cluster.logs());
    drop(workers);
    Ok(())
}

/// A process that ends with the test.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_live_runs_the_later_started_stays_whatever_their_calendars_say() -> anyhow::Result<()> {
    let cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    for (nth, (first, second)) in [("+10h", "-10h"), ("-5m", "+5m")].into_iter().enumerate() {
        let agent_id = format!("twin_{nth}");
        let current = async |not: Option<&InstanceId>| {
            let deadline = Instant::now() + LONG;
            loop {
                if let Ok(view) = agent(&client, &agent_id).await
                    && view.record.state == AgentState::Ready
                    && Some(&view.record.instance) != not
                {
                    return anyhow::Ok(view.record.instance);
                }
                ensure!(Instant::now() < deadline, "{agent_id} did not come\n{}", cluster.logs());
                tokio::time::sleep(POLL).await;
            }
        };
        let mut earlier = Process(cluster.agent_process(&agent_id, first)?);
        let earlier_run = current(None).await?;
        let mut later = Process(cluster.agent_process(&agent_id, second)?);
        let later_run = current(Some(&earlier_run)).await?;

        // The earlier one is told, and ends.
        let deadline = Instant::now() + LONG;
        let status = loop {
            match earlier.0.try_wait()? {
                Some(status) => break status,
                None => tokio::time::sleep(POLL).await,
            }
            ensure!(Instant::now() < deadline, "the earlier run goes on");
        };
        ensure!(status.code() == Some(3), "{status}");

        // The later one stays, beats, and works.
        let envelope = Envelope::request_to(AgentId::parse(&agent_id)?, Json::from_value(&"hello".into()));
        let response = client.call(envelope, LONG).await?;
        ensure!(response.status == "completed", "{response:?}");
        tokio::time::sleep(TTL + Duration::from_secs(2)).await;
        let view = agent(&client, &agent_id).await?;
        ensure!((&view.record.instance, view.record.state) == (&later_run, AgentState::Ready), "{view:?}");
        ensure!(later.0.try_wait()?.is_none(), "the later run ended");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_leaders_change_a_dead_agent_is_found_in_time_and_nobody_else_is_lost() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    let workers = workers(&cluster, 5).await?;
    let dies = Worker::start(&cluster, "dies", 4, Default::default()).await?;
    let mut before = liveness(&client).await?;
    before.remove(&AgentId::parse("dies")?);

    dies.running.abort().await;
    let died = Instant::now();
    let found = {
        let client = client.clone();
        tokio::spawn(async move {
            while agent(&client, "dies").await?.record.state != AgentState::Offline {
                tokio::time::sleep(POLL).await;
            }
            anyhow::Ok(died.elapsed())
        })
    };
    // Twice within each TTL, until it is found and once more.
    let mut killed: Vec<NodeId> = Vec::new();
    while !found.is_finished() || killed.len() < 4 {
        ensure!(died.elapsed() < LONG, "never found\n{}", cluster.logs());
        let leader = cluster.leader().await?;
        cluster.kill(leader)?;
        killed.push(leader);
        cluster.wait_until_serving().await?;
        cluster.spawn(leader)?;
        tokio::time::sleep(TTL / 2).await;
    }
    let took = found.await??;
    // Its node may have died with it; then an election or two may come, on a machine with other work.
    let bound = TTL + Duration::from_secs(3 + 2 * 2 + 3);
    ensure!(took < bound, "found after {took:?}");
    let mut after = liveness(&client).await?;
    after.remove(&AgentId::parse("dies")?);
    ensure!(before == after, "{before:?}\n{after:?}\n{}", cluster.logs());
    for worker in workers {
        worker.running.shutdown().await;
    }
    Ok(())
}
