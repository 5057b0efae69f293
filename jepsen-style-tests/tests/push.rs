//! Events pushed over the sessions of three agents of one group, while one of them and then the leader
//! get `kill -9`: every event is handled, and each agent's first deliveries keep the topic's order.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use anyhow::Context;
use jepsen_style_tests::{
    Cluster,
    cluster::{binary, inbox_dir},
};
use reach_client::{Agent, Client, Done, RunningAgent, Task};
use reach_protocol::{
    AgentId, AgentState, Code, Envelope, EventType, Json, MsgId, Name,
    event::{GroupView, dead_letters},
    frame::{Answer, Request},
};
use tokio::sync::Semaphore;

const SHORT: Duration = Duration::from_secs(10);
const PROGRESS_MAX: Duration = Duration::from_secs(90);
const RULES: &str = "[events]\nack_wait_ms = 5000\n[grants]\noperators = [\"admin\"]\n";

/// Offset and count of each delivery, in the order in which an agent began with them.
type Ledger = Arc<Mutex<Vec<(u64, u32)>>>;

async fn agent(cluster: &Cluster, name: &str, ledger: Ledger) -> anyhow::Result<RunningAgent> {
    let running = Agent::builder(name)
        .capability("listen", 1.0)
        .inbox_dir(inbox_dir(cluster, name))
        .subscribe("load.*", Some("crew"))
        .events_at_once(1)
        .on_events(move |delivered, _| {
            let ledger = ledger.clone();
            async move {
                ledger.lock().expect("no panic").push((delivered.event.offset, delivered.deliveries));
                Ok(())
            }
        })
        .handler(|_: Task| async { Ok(Done::new(Json::null())) })
        .connect(cluster.agent_options(&AgentId::parse(name)?)?)
        .await?;
    Ok(running)
}

/// The same as a process, whose command writes the ledger.
fn process(cluster: &Cluster, name: &str, ledger: &Path) -> anyhow::Result<Child> {
    let (binary, home) = (binary()?, cluster.dir().join(format!("home-{name}")));
    let out = home.join("handed-over");
    let (admin, out) = (cluster.admin(), out.to_str().context("a plain path")?.to_owned());
    let admin = admin.to_str().context("a plain path")?;
    for args in [
        &["certs", "issue", "--agent", name, "--admin", admin, "--out", &out][..],
        &["context", "add", "agent", "--from", &out],
    ] {
        let made =
            Command::new(&binary).args(args).env("AGENT_REACH_HOME", &home).stdout(Stdio::null()).status()?;
        anyhow::ensure!(made.success(), "{args:?}: {made}");
    }
    let note = format!("echo $AGENT_REACH_OFFSET $AGENT_REACH_DELIVERIES >> {}", ledger.display());
    let args = ["agents", "run", "--id", name, "--capability", "listen", "--subscribe", "load.*=crew"];
    let child = Command::new(&binary)
        .args(args)
        .args(["--slots", "1", "--", "sh", "-c", &note])
        .env("AGENT_REACH_HOME", &home)
        .stdout(Stdio::null())
        .spawn()?;
    Ok(child)
}

async fn publish(client: &Client, numbers: std::ops::Range<u64>) -> anyhow::Result<()> {
    let event_type = EventType::parse("load.step.v1")?;
    for number in numbers {
        let payload = Json::from_value(&number.into());
        let msg_id = Some(MsgId::parse(&format!("e_{number}"))?);
        let event = Envelope { msg_id, ..Envelope::event(&event_type, payload) };
        // An unknown outcome is asked for again by its key.
        loop {
            match client.publish(vec![event.clone()]).await {
                Ok(_) => break,
                Err(error) if error.retryable() || error.code() == Code::OutcomeUnknown => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}

async fn crew(client: &Client) -> anyhow::Result<GroupView> {
    match client.request(Request::Group { group: Name::parse("crew")? }, SHORT).await? {
        Answer::Group(view) => Ok(*view),
        _ => anyhow::bail!("something else than a group came back"),
    }
}

/// Asks until the group is as it should be.
async fn until(client: &Client, is: impl Fn(&GroupView) -> bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + PROGRESS_MAX;
    loop {
        let view = crew(client).await;
        if view.as_ref().is_ok_and(&is) {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < deadline, "it never came to that: {view:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_of_agents_handles_every_event_while_one_and_the_leader_die() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    client.request(Request::ApplyRules { text: RULES.into(), expect: None }, SHORT).await?;
    let ledgers = [Ledger::default(), Ledger::default()];
    let mut agents = Vec::new();
    for (name, ledger) in ["b", "c"].iter().zip(&ledgers) {
        agents.push(agent(&cluster, name, ledger.clone()).await?);
    }
    let file = cluster.dir().join("ledger-a");
    let mut victim = process(&cluster, "a", &file)?;
    // The first registration made the group, and all three are members of it by theirs.
    until(&client, |view| view.members.iter().filter(|member| member.subscribed).count() == 3).await?;

    publish(&client, 0..150).await?;
    victim.kill()?;
    victim.wait()?;
    publish(&client, 150..250).await?;
    let leader = cluster.leader().await?;
    cluster.kill(leader)?;
    publish(&client, 250..350).await?;
    cluster.spawn(leader)?;
    publish(&client, 350..400).await?;

    until(&client, |view| view.positions.iter().all(|shown| shown.lag == 0)).await?;
    let is_offline = |view: &GroupView| {
        view.members.iter().any(|member| &*member.member == "a" && member.state == Some(AgentState::Offline))
    };
    until(&client, is_offline).await?;
    for agent in agents {
        agent.shutdown().await;
    }

    let mut seen: BTreeMap<&str, Vec<(u64, u32)>> = BTreeMap::new();
    for (name, ledger) in ["b", "c"].into_iter().zip(&ledgers) {
        seen.insert(name, ledger.lock().expect("no panic").clone());
    }
    let lines = fs::read_to_string(&file)?;
    let line = |line: &str| -> Option<(u64, u32)> {
        let (offset, deliveries) = line.split_once(' ')?;
        Some((offset.parse().ok()?, deliveries.parse().ok()?))
    };
    seen.insert("a", lines.lines().filter_map(line).collect());
    for (name, seen) in &seen {
        let first: Vec<u64> =
            seen.iter().filter(|(_, count)| *count == 1).map(|(offset, _)| *offset).collect();
        println!("{name}: {} deliveries, {} of them again", seen.len(), seen.len() - first.len());
        assert!(!first.is_empty(), "{name} got nothing");
        assert!(first.windows(2).all(|pair| pair[0] < pair[1]), "{name} got {first:?}");
    }
    let handled: BTreeSet<u64> = seen.values().flatten().map(|(offset, _)| *offset).collect();
    assert!(handled.iter().copied().eq(0..400), "not every event was handled: {handled:?}");
    let dead = Request::Topic { event_type: dead_letters(&Name::parse("crew")?) };
    assert!(client.request(dead, SHORT).await.is_err(), "no event is a dead letter");
    Ok(())
}

/// An agent that works on one event at a time is sent two, however many there are; large ones, which take
/// streams of their own, keep their place among small ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_agent_is_sent_no_more_than_its_window_and_all_in_order() -> anyhow::Result<()> {
    const EVENTS: u64 = 30;
    let cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    let (go, ledger) = (Arc::new(Semaphore::new(0)), Ledger::default());
    let (gate, seen) = (go.clone(), ledger.clone());
    let agent = Agent::builder("slow")
        .capability("listen", 1.0)
        .inbox_dir(inbox_dir(&cluster, "slow"))
        .subscribe("load.*", Some("crew"))
        .events_at_once(1)
        .on_events(move |delivered, _| {
            let (gate, seen) = (gate.clone(), seen.clone());
            async move {
                seen.lock().expect("no panic").push((delivered.event.offset, delivered.deliveries));
                gate.acquire().await.expect("it stays open").forget();
                Ok(())
            }
        })
        .handler(|_: Task| async { Ok(Done::new(Json::null())) })
        .connect(cluster.agent_options(&AgentId::parse("slow")?)?)
        .await?;
    let event_type = EventType::parse("load.step.v1")?;
    for number in 0..EVENTS {
        let bytes = if number % 3 == 1 { 100 << 10 } else { 10 };
        let payload = Json::from_value(&"x".repeat(bytes).into());
        client.publish(vec![Envelope::event(&event_type, payload)]).await?;
    }
    let open = |view: &GroupView| view.members.iter().map(|member| member.open).sum::<u64>();
    until(&client, |view| open(view) == 2).await?;
    for _ in 0..EVENTS {
        go.add_permits(1);
        let view = crew(&client).await?;
        assert!(open(&view) <= 2, "{view:?}");
    }
    until(&client, |view| view.positions.iter().all(|shown| shown.lag == 0)).await?;
    let order: Vec<_> = (0..EVENTS).map(|offset| (offset, 1)).collect();
    assert_eq!(*ledger.lock().expect("no panic"), order);

    // What has not begun when it leaves goes back, and is not counted as a delivery.
    publish(&client, 0..3).await?;
    until(&client, |view| open(view) == 2).await?;
    let leaving = tokio::spawn(agent.shutdown());
    until(&client, |view| open(view) == 1).await?;
    go.add_permits(1);
    leaving.await?;
    let view = crew(&client).await?;
    assert_eq!((open(&view), view.positions[0].lag), (0, 2), "{view:?}");
    assert!(view.positions[0].position.open.iter().all(|open| open.deliveries == 0), "{view:?}");
    Ok(())
}
