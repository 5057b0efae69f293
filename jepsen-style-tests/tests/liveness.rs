//! Two-level liveness on real processes: who is found silent, what goes on, and who comes back.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use jepsen_style_tests::{Cluster, cluster::inbox_dir};
use reach_client::{Agent, Client, Done, Failure, RunningAgent, Task};
use reach_protocol::{
    AgentId, AgentState, Code, Envelope, Json, MsgId, NodeId, StateReason, Tag,
    frame::{AgentView, Answer, Problem, ProblemKind, Request},
    message::{DeadCause, RETRY_AFTER_MS, StateName},
};
use serde_json::{Value, json};
use tokio::sync::Semaphore;

const LONG: Duration = Duration::from_secs(60);
/// Beats every half second and a TTL of two, so that a test sees them lapse.
const FAST: &str = "[liveness]\nheartbeat_ms = 500\nttl_ms = 2000\n[grants]\noperators = [\"admin\"]\n";
const TTL: Duration = Duration::from_secs(2);

async fn fast_cluster() -> anyhow::Result<(Cluster, Client)> {
    let cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    client.request(Request::ApplyRules { text: FAST.into(), expect: None }, LONG).await?;
    Ok((cluster, client))
}

/// An agent of two slots whose handler waits for a permit before it answers.
async fn gated(cluster: &Cluster, agent_id: &str, gate: &Arc<Semaphore>) -> anyhow::Result<RunningAgent> {
    let gate = gate.clone();
    Ok(Agent::builder(agent_id)
        .capability("gated", 1.0)
        .max_concurrency(2)
        .inbox_dir(inbox_dir(cluster, agent_id))
        .handler(move |_: Task| {
            let gate = gate.clone();
            async move {
                let permit = gate.acquire().await.map_err(|_| Failure::Error("the gate is gone".into()))?;
                permit.forget();
                Ok(Done::new(Json::null()))
            }
        })
        .connect(cluster.agent_options(&AgentId::parse(agent_id)?)?)
        .await?)
}

fn request(tag: &str) -> Envelope {
    let tag = Tag::parse(tag).expect("a legal tag");
    Envelope { expires_in_ms: Some(120_000), ..Envelope::request(vec![tag], Json::null()) }
}

async fn agent(client: &Client, agent_id: &str) -> anyhow::Result<AgentView> {
    let agent_id = AgentId::parse(agent_id)?;
    match client.request(Request::Agent { agent_id }, LONG).await? {
        Answer::Agent(view) => Ok(*view),
        other => anyhow::bail!("no agent: {other:?}"),
    }
}

async fn until_state(client: &Client, agent_id: &str, state: AgentState) -> anyhow::Result<AgentView> {
    let reached = async {
        loop {
            let view = agent(client, agent_id).await?;
            if view.record.state == state {
                return anyhow::Ok(view);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(LONG, reached).await?
}

async fn until_message(client: &Client, msg_id: &MsgId, state: StateName) -> anyhow::Result<()> {
    let reached = async {
        while client.status(msg_id).await?.record.state.name() != state {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LONG, reached).await?
}

async fn until_problem(client: &Client, kind: ProblemKind) -> anyhow::Result<Problem> {
    let found = async {
        loop {
            if let Answer::Problems { items, .. } = client.request(Request::Problems, LONG).await?
                && let Some(problem) = items.into_iter().find(|problem| problem.kind == kind)
            {
                return anyhow::Ok(problem);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(LONG, found).await?
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operators_drain_outlives_every_node_and_every_run_until_it_is_taken_back() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    let agent_id = AgentId::parse("worker")?;
    let gate = Arc::new(Semaphore::new(0));
    let first = gated(&cluster, "worker", &gate).await?;
    let running = client.submit(request("gated")).await?.msg_id;
    until_message(&client, &running, StateName::Acknowledged).await?;

    // Nothing new, and what runs ends as it would have. Not the agent's own right, nor any user's.
    let as_agent = Client::connect(cluster.agent_options(&agent_id)?).await?;
    let drain = Request::DrainAgent { agent_id: agent_id.clone(), drain_seq: Some(0) };
    assert_eq!(as_agent.request(drain.clone(), LONG).await.unwrap_err().code(), Code::Forbidden);
    let Answer::Agent(drained) = client.request(drain.clone(), LONG).await? else { panic!("no agent") };
    assert_eq!((drained.record.state, drained.record.reason), (AgentState::Draining, StateReason::Drained));
    let waiting = client.submit(request("gated")).await?.msg_id;
    gate.add_permits(1);
    until_message(&client, &running, StateName::Completed).await?;
    let record = client.status(&waiting).await?.record;
    assert_eq!(record.state.name(), StateName::Pending, "it waits, nobody else declares it");

    // One node is missed.
    let missed = NodeId(2);
    cluster.kill(missed)?;
    let problem = until_problem(&client, ProblemKind::NodeUnreachable).await?;
    assert_eq!(problem.about, "n2");
    assert!(problem.effect.contains("the loss of one more node would stop it"), "{}", problem.effect);

    // Every node is killed at once, and the agent starts anew.
    for node in cluster.node_ids().into_iter().filter(|node| *node != missed) {
        cluster.kill(node)?;
    }
    for node in cluster.node_ids() {
        cluster.spawn(node)?;
    }
    cluster.wait_until_serving().await?;
    first.abort().await;
    let second = gated(&cluster, "worker", &gate).await?;
    let view = agent(&client, "worker").await?;
    assert_eq!(view.record.instance, *second.instance());
    assert_eq!((view.record.state, view.record.reason), (AgentState::Draining, StateReason::Drained));
    assert_eq!(view.record.drain.as_ref().map(|drain| drain.by.to_string()).as_deref(), Some("user/admin"));
    let problem = until_problem(&client, ProblemKind::AgentDraining).await?;
    assert_eq!(problem.command, "agent-reach agents resume worker");

    let resume = Request::ResumeAgent { agent_id: agent_id.clone(), drain_seq: Some(1) };
    client.request(resume, LONG).await?;
    // The first drain, delivered late, is not a new one.
    client.request(drain, LONG).await?;
    assert_eq!(agent(&client, "worker").await?.record.state, AgentState::Ready);
    // What waited comes first; it was given up if nobody was ready for 10 s.
    gate.add_permits(2);
    assert_eq!(client.call(request("gated"), LONG).await?.status, "completed");
    second.shutdown().await;
    Ok(())
}

/// A request of an agent that has nothing but HTTP.
async fn http(door: SocketAddr, method: &str, path: &str, body: Value) -> anyhow::Result<(u16, Value)> {
    let body = body.to_string();
    let text = format!(
        "{method} {path} HTTP/1.1\r\nHost: {door}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect_timeout(&door, LONG)?;
        stream.set_read_timeout(Some(LONG))?;
        stream.write_all(text.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let status = answer.split(' ').nth(1).unwrap_or_default().parse()?;
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        Ok((status, serde_json::from_str(body).unwrap_or(Value::Null)))
    })
    .await?
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_loop_drains_its_agent_which_ends_what_it_runs_and_thaws_to_ready() -> anyhow::Result<()> {
    let (cluster, client) = fast_cluster().await?;
    let door = cluster.http(NodeId(2))?;
    let declared =
        json!({ "instance_id": "i1", "capabilities": [{ "name": "gated" }], "max_concurrency": 2 });
    let (status, said) = http(door, "PUT", "/v1/agents/frozen", declared).await?;
    assert_eq!((status, said["ttl_ms"].as_u64()), (200, Some(2_000)), "{said}");
    let running = client.submit(request("gated")).await?.msg_id;
    let (_, tasks) = http(door, "GET", "/v1/agents/frozen/inbox?instance=i1&wait=30s", Value::Null).await?;
    assert_eq!(tasks["items"][0]["msg_id"], json!(running));
    let attempt = json!({ "agent_id": "frozen", "instance_id": "i1", "attempt": 0 });
    let report = |what: &str| format!("/v1/messages/{running}/{what}");
    assert_eq!(http(door, "POST", &report("received"), attempt.clone()).await?.0, 200);

    // Its process beats on; its loop says nothing any more.
    let frozen_at = Instant::now();
    let beats = tokio::spawn(async move {
        loop {
            let beat = json!({ "instance_id": "i1" });
            if http(door, "POST", "/v1/agents/frozen/heartbeat", beat).await.is_err() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    let view = until_state(&client, "frozen", AgentState::Draining).await?;
    let took = frozen_at.elapsed();
    assert_eq!(view.record.reason, StateReason::LoopSilent);
    assert!(took < TTL + Duration::from_secs(3), "found after {took:?}");
    let heard = view.heard.expect("its process is heard");
    assert!(heard.level1_age_ms < heard.level2_age_ms, "{heard:?}");

    // Nothing new goes to it, and what it runs ends well.
    let waiting = client.submit(request("gated")).await?.msg_id;
    let mut result = attempt.clone();
    result["result"] = json!("done");
    let (status, ended) = http(door, "POST", &report("complete"), result).await?;
    assert_eq!((status, ended["state"].as_str()), (200, Some("completed")), "{ended}");
    assert_eq!(client.status(&waiting).await?.record.state.name(), StateName::Pending);
    assert_eq!(agent(&client, "frozen").await?.record.state, AgentState::Draining);

    // It thaws: it polls, is ready again, and gets what waited.
    let (_, tasks) = http(door, "GET", "/v1/agents/frozen/inbox?instance=i1&wait=30s", Value::Null).await?;
    assert_eq!(tasks["items"][0]["msg_id"], json!(waiting), "{tasks}");
    until_state(&client, "frozen", AgentState::Ready).await?;
    beats.abort();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_agents_on_one_host_the_killed_one_is_found_in_time_and_alone() -> anyhow::Result<()> {
    let (cluster, client) = fast_cluster().await?;
    let gate = Arc::new(Semaphore::new(0));
    let mut agents = Vec::new();
    for name in ["one", "two", "three"] {
        agents.push(gated(&cluster, name, &gate).await?);
    }
    for name in ["one", "two", "three"] {
        until_state(&client, name, AgentState::Ready).await?;
    }
    // As if its process had died: nobody is told.
    let killed_at = Instant::now();
    agents.remove(1).abort().await;
    until_state(&client, "two", AgentState::Offline).await?;
    let took = killed_at.elapsed();
    assert!(
        took >= TTL - Duration::from_millis(600),
        "its last beat was at most half a second old: {took:?}"
    );
    assert!(took < TTL + Duration::from_secs(3), "found after {took:?}");
    for name in ["one", "three"] {
        let record = agent(&client, name).await?.record;
        assert_eq!(
            (record.state, record.liveness_seq),
            (AgentState::Ready, 0),
            "{name} never was anything else"
        );
    }
    for agent in agents {
        agent.shutdown().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_all_fall_silent_together_expiry_waits_is_told_and_ends_by_an_operators_word()
-> anyhow::Result<()> {
    const AGENTS: usize = 24;
    let cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    // A wait that is long enough to be looked at.
    let rules = "[liveness]\nheartbeat_ms = 1000\nttl_ms = 6000\n[grants]\noperators = [\"admin\"]\n";
    client.request(Request::ApplyRules { text: rules.into(), expect: None }, LONG).await?;
    let host = Client::connect(cluster.host_options("crowd")?).await?;
    for i in 0..AGENTS {
        let registration = json!({ "agent_id": format!("crowd:{i}"), "capabilities": [{ "name": "gated" }] });
        let registration = Box::new(serde_json::from_value(registration)?);
        let request = Request::Register { registration, instance: "i1".parse()?, uptime_ms: 0 };
        host.request(request, LONG).await?;
    }

    let problem = until_problem(&client, ProblemKind::MassExpiry).await?;
    assert_eq!(problem.command, "agent-reach agents expire --now");
    assert!(problem.what.starts_with("24 of 24 agents"), "{}", problem.what);
    assert_eq!(agent(&client, "crowd:0").await?.record.state, AgentState::Ready, "nobody counts as lost yet");

    let forced_at = Instant::now();
    let Answer::Expired(Some(_)) = client.request(Request::ExpireNow { since_ms: None }, LONG).await? else {
        panic!("nothing waited")
    };
    for i in 0..AGENTS {
        until_state(&client, &format!("crowd:{i}"), AgentState::Offline).await?;
    }
    assert!(forced_at.elapsed() < Duration::from_secs(5), "without the word it would have waited on");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_in_the_hands_of_an_agent_that_stays_away_goes_to_another_after_a_second() -> anyhow::Result<()>
{
    let (cluster, client) = fast_cluster().await?;
    let closed = Arc::new(Semaphore::new(0));
    let lost = gated(&cluster, "lost", &closed).await?;
    let msg_id = client.submit(request("gated")).await?.msg_id;
    until_message(&client, &msg_id, StateName::Acknowledged).await?;
    let open = Arc::new(Semaphore::new(1));
    let other = gated(&cluster, "other", &open).await?;
    lost.abort().await;

    let response = client.wait(&msg_id, LONG).await?;
    assert_eq!(response.status, "completed");
    let view = client.status(&msg_id).await?;
    let record = &view.record;
    assert_eq!((record.attempt, record.retries), (1, 1));
    assert_eq!(record.avoid, [AgentId::parse("lost")?]);
    assert_eq!(record.state.holder().map(|holder| holder.agent_id.to_string()).as_deref(), Some("other"));
    let taken =
        view.hops.iter().find(|hop| hop.reason.as_deref() == Some("agent_lost")).expect("it was lost");
    let offline_ms = agent(&client, "lost").await?.record.since.cluster_ms;
    let after_ms = taken.at.cluster_ms - offline_ms;
    assert!((1_000..5_000).contains(&after_ms), "taken {after_ms} ms after the loss");
    assert_eq!(agent(&client, "lost").await?.running, 1, "it may still be at it");

    // It returns with the task still in its inbox, is told to drop it, and takes the next one.
    other.shutdown().await;
    let lost = gated(&cluster, "lost", &open).await?;
    open.add_permits(1);
    assert_eq!(client.call(request("gated"), LONG).await?.status, "completed");
    assert_eq!(agent(&client, "lost").await?.running, 0);
    lost.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_returns_before_another_has_its_task_keeps_it() -> anyhow::Result<()> {
    let (cluster, client) = fast_cluster().await?;
    let closed = Arc::new(Semaphore::new(0));
    let first = gated(&cluster, "alone", &closed).await?;
    let msg_id = client.submit(request("gated")).await?.msg_id;
    until_message(&client, &msg_id, StateName::Acknowledged).await?;
    first.abort().await;
    until_state(&client, "alone", AgentState::Offline).await?;
    let open = Arc::new(Semaphore::new(1));
    let second = gated(&cluster, "alone", &open).await?;
    assert_eq!(client.wait(&msg_id, LONG).await?.status, "completed");
    let record = client.status(&msg_id).await?.record;
    assert_eq!((record.attempt, record.retries), (0, 0), "no retry was spent on it");
    second.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_agent_that_was_only_silent_keeps_its_slot_until_its_late_report() -> anyhow::Result<()> {
    let (cluster, client) = fast_cluster().await?;
    let door = cluster.http(NodeId(2))?;
    let declared =
        json!({ "instance_id": "i1", "capabilities": [{ "name": "gated" }], "max_concurrency": 1 });
    assert_eq!(http(door, "PUT", "/v1/agents/silent", declared).await?.0, 200);
    let msg_id = client.submit(request("gated")).await?.msg_id;
    let inbox = "/v1/agents/silent/inbox?instance=i1&wait=30s";
    let (_, tasks) = http(door, "GET", inbox, Value::Null).await?;
    assert_eq!(tasks["items"][0]["msg_id"], json!(msg_id));
    let mut report = json!({ "agent_id": "silent", "instance_id": "i1", "attempt": 0 });
    let path = |what: &str| format!("/v1/messages/{msg_id}/{what}");
    assert_eq!(http(door, "POST", &path("received"), report.clone()).await?.0, 200);

    // It works on and says nothing: another one does the same.
    let open = Arc::new(Semaphore::new(1));
    let other = gated(&cluster, "other", &open).await?;
    assert_eq!(client.wait(&msg_id, LONG).await?.status, "completed");

    // It is heard again, and busy. Its report is answered with what was recorded.
    let beat = json!({ "instance_id": "i1", "ready": true });
    assert_eq!(http(door, "POST", "/v1/agents/silent/heartbeat", beat).await?.0, 200);
    until_state(&client, "silent", AgentState::Ready).await?;
    assert_eq!(agent(&client, "silent").await?.running, 1);
    report["result"] = json!("late");
    let (status, ended) = http(door, "POST", &path("complete"), report.clone()).await?;
    assert_eq!((status, &ended["agent_id"]), (200, &json!("other")), "{ended}");
    assert_eq!(agent(&client, "silent").await?.running, 0);

    // The same while the other one still has it: the report is refused, and the slot is free too.
    other.shutdown().await;
    let msg_id = client.submit(request("gated")).await?.msg_id;
    let (_, tasks) = http(door, "GET", inbox, Value::Null).await?;
    assert_eq!(tasks["items"][0]["msg_id"], json!(msg_id), "{tasks}");
    let path = |what: &str| format!("/v1/messages/{msg_id}/{what}");
    report.as_object_mut().expect("it is one").remove("result");
    assert_eq!(http(door, "POST", &path("received"), report.clone()).await?.0, 200);
    let gate = Arc::new(Semaphore::new(0));
    let another = gated(&cluster, "another", &gate).await?;
    let taken_over = async {
        while client.status(&msg_id).await?.record.attempt == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LONG, taken_over).await??;
    let (status, refused) = http(door, "POST", &path("complete"), report).await?;
    assert_eq!((status, &refused["code"]), (409, &json!("stale_attempt")), "{refused}");
    assert_eq!(agent(&client, "silent").await?.running, 0);
    gate.add_permits(1);
    assert_eq!(client.wait(&msg_id, LONG).await?.status, "completed");
    another.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_loses_four_agents_ends_as_a_dead_letter() -> anyhow::Result<()> {
    let (cluster, client) = fast_cluster().await?;
    let rules = format!("{FAST}[delivery]\nreturn_within_ms = 1000\n");
    client.request(Request::ApplyRules { text: rules, expect: None }, LONG).await?;
    let closed = Arc::new(Semaphore::new(0));
    let mut holder = gated(&cluster, "lost-0", &closed).await?;
    let msg_id = client.submit(request("gated")).await?.msg_id;
    until_message(&client, &msg_id, StateName::Acknowledged).await?;
    for attempt in 1..=3 {
        let next = gated(&cluster, &format!("lost-{attempt}"), &closed).await?;
        holder.abort().await;
        let begun = async {
            loop {
                let record = client.status(&msg_id).await?.record;
                if record.attempt == attempt && record.state.name() == StateName::Acknowledged {
                    return anyhow::Ok(());
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(LONG, begun).await??;
        holder = next;
    }
    holder.abort().await;

    let response = client.wait(&msg_id, LONG).await?;
    assert_eq!(response.status, "timeout");
    assert_eq!(response.error.map(|error| error.code), Some(Code::AttemptsExhausted));
    let view = client.status(&msg_id).await?;
    let letter = view.dead_letter.expect("it left one");
    assert_eq!((letter.cause, letter.attempts), (DeadCause::AgentLost, 4));
    assert_eq!(letter.agent_id, Some(AgentId::parse("lost-3")?));
    assert_eq!(letter.at, view.record.since);
    // 1 s, 4 s and 16 s after each loss, and never earlier.
    let waits = view.hops.iter().filter(|hop| hop.reason.as_deref() == Some("agent_lost"));
    for (hop, after_ms) in waits.zip(RETRY_AFTER_MS) {
        let agent_id = &hop.holder.as_ref().expect("an attempt has a holder").agent_id;
        let lost_ms = agent(&client, agent_id).await?.record.since.cluster_ms;
        let waited_ms = hop.at.cluster_ms - lost_ms;
        assert!((after_ms..after_ms * 5 / 4 + 3_000).contains(&waited_ms), "{waited_ms} after {agent_id}");
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_was_suspended_for_longer_than_a_ttl_expires_nobody() -> anyhow::Result<()> {
    // The TTL of the defaults: after the pause there must be time to connect again.
    let mut cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    let gate = Arc::new(Semaphore::new(0));
    let names = ["one", "two"];
    let mut agents = Vec::new();
    for name in names {
        agents.push(gated(&cluster, name, &gate).await?);
        until_state(&client, name, AgentState::Ready).await?;
    }
    for node in cluster.node_ids() {
        cluster.pause(node)?;
    }
    // The fault itself: longer than the TTL.
    tokio::time::sleep(Duration::from_secs(11)).await;
    for node in cluster.node_ids() {
        cluster.resume(node)?;
    }
    cluster.wait_until_serving().await?;
    gate.add_permits(2);
    for name in names {
        let envelope = Envelope {
            expires_in_ms: Some(60_000),
            ..Envelope::request_to(AgentId::parse(name)?, Json::null())
        };
        assert_eq!(client.call(envelope, LONG).await?.status, "completed");
        let record = agent(&client, name).await?.record;
        assert_eq!(
            (record.state, record.liveness_seq),
            (AgentState::Ready, 0),
            "{name} never was anything else"
        );
    }
    for agent in agents {
        agent.shutdown().await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_registration_goes_when_it_has_outlived_its_agent() -> anyhow::Result<()> {
    let (cluster, client) = fast_cluster().await?;
    let rules = FAST.replace("[grants]", "remove_after_ms = 1500\n[grants]");
    client.request(Request::ApplyRules { text: rules, expect: None }, LONG).await?;
    let gate = Arc::new(Semaphore::new(0));
    let stays = gated(&cluster, "stays", &gate).await?;
    gated(&cluster, "goes", &gate).await?.abort().await;
    until_state(&client, "goes", AgentState::Offline).await?;
    let gone = async {
        let agent_id = AgentId::parse("goes")?;
        loop {
            match client.request(Request::Agent { agent_id: agent_id.clone() }, LONG).await {
                Err(error) if error.code() == Code::NotFound => return anyhow::Ok(()),
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    tokio::time::timeout(LONG, gone).await??;
    assert_eq!(agent(&client, "stays").await?.record.state, AgentState::Ready);
    // Its next run registers anew.
    gated(&cluster, "goes", &gate).await?.shutdown().await;
    stays.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_dies_with_its_node_is_found_within_a_ttl_three_seconds_and_an_election()
-> anyhow::Result<()> {
    let (mut cluster, client) = fast_cluster().await?;
    let gate = Arc::new(Semaphore::new(0));
    let dies = gated(&cluster, "dies", &gate).await?;
    let moves = gated(&cluster, "moves", &gate).await?;
    // Whether the node that holds it leads or not, the leader dies too: an election is part of it.
    let leader = cluster.leader().await?;
    let held_by = async {
        loop {
            if let Some(heard) = agent(&client, "dies").await?.heard {
                return anyhow::Ok(heard.node);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let node = tokio::time::timeout(LONG, held_by).await??;
    cluster.kill(node)?;
    let killed_at = Instant::now();
    dies.abort().await;
    if node != leader {
        cluster.kill(leader)?;
        cluster.spawn(node)?;
    }
    until_state(&client, "dies", AgentState::Offline).await?;
    let took = killed_at.elapsed();
    // An election takes two seconds at most, and this machine does other things too.
    assert!(took < TTL + Duration::from_secs(3 + 2 + 3), "found after {took:?}");
    assert_eq!(agent(&client, "moves").await?.record.state, AgentState::Ready);
    moves.shutdown().await;
    Ok(())
}
