//! What an agent's or a node's death means for the messages under way.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use jepsen_style_tests::{Cluster, Worker, cluster::inbox_dir};
use reach_client::{Agent, Client, Done, Failure, RunningAgent, Task};
use reach_protocol::{
    AgentId, AgentState, Code, Envelope, Json, MsgId, Tag,
    frame::{Answer, Request},
    message::StateName,
};
use tokio::sync::Semaphore;

const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(5);

/// An agent whose handler waits for a permit before it answers.
async fn gated(cluster: &Cluster, agent_id: &str, gate: Arc<Semaphore>) -> anyhow::Result<RunningAgent> {
    Ok(Agent::builder(agent_id)
        .capability("gated", 1.0)
        .max_concurrency(1)
        .inbox_dir(inbox_dir(cluster, agent_id))
        .handler(move |task: Task| {
            let gate = gate.clone();
            async move {
                let _permit = gate.acquire().await.map_err(|_| Failure::Error("the gate is gone".into()))?;
                Ok(Done::new(Json::from_value(&serde_json::json!({ "resumed": task.resumed }))))
            }
        })
        .connect(cluster.agent_options(&AgentId::parse(agent_id)?)?)
        .await?)
}

fn request(tag: &str) -> Envelope {
    Envelope::request(vec![Tag::parse(tag).expect("a legal tag")], Json::from_value(&7.into()))
}

async fn wait_for_state(client: &Client, msg_id: &MsgId, state: StateName) -> anyhow::Result<()> {
    let reached = async {
        while client.status(msg_id).await?.record.state.name() != state {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(LONG, reached).await?
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_dies_after_received_resumes_and_one_that_dies_before_is_replaced() -> anyhow::Result<()>
{
    let cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    let closed = Arc::new(Semaphore::new(0));

    // It has answered for the task and dies: the task waits for it, and runs again as resumed.
    let agent = gated(&cluster, "gate_keeper", closed.clone()).await?;
    let submitted = client.submit(request("gated")).await?;
    wait_for_state(&client, &submitted.msg_id, StateName::Acknowledged).await?;
    agent.abort().await;
    let open = Arc::new(Semaphore::new(1));
    let agent = gated(&cluster, "gate_keeper", open).await?;
    let response = client.wait(&submitted.msg_id, LONG).await?;
    assert_eq!(response.result.map(|result| result.to_value()), Some(serde_json::json!({ "resumed": true })));
    let record = client.status(&submitted.msg_id).await?.record;
    assert_eq!(record.attempt, 0, "the same attempt went on under the new run");

    // It is registered and ready, and never reads: the message goes to somebody else.
    agent.shutdown().await;
    let silent = AgentId::parse("silent")?;
    let registrar = Client::connect(cluster.agent_options(&silent)?).await?;
    let registration = serde_json::from_str(r#"{"agent_id":"silent","capabilities":[{"name":"square"}]}"#)?;
    let instance = reach_protocol::InstanceId::parse("i_silent")?;
    let register = Request::Register { registration: Box::new(registration), instance, uptime_ms: 0 };
    registrar.request(register, SHORT).await?;
    let mut square = request("square");
    square.expires_in_ms = Some(120_000);
    let submitted = client.submit(square).await?;
    wait_for_state(&client, &submitted.msg_id, StateName::Matched).await?;
    let ledger = Default::default();
    let _worker = Worker::start(&cluster, "worker", 4, ledger).await?;
    let response = client.wait(&submitted.msg_id, LONG).await?;
    assert_eq!(response.status, "completed");
    let view = client.status(&submitted.msg_id).await?;
    assert_eq!(view.record.attempt, 1);
    assert_eq!(view.record.avoid, [silent]);
    assert_eq!(view.record.state.holder().map(|holder| holder.agent_id.to_string()), Some("worker".into()));
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_is_cut_off_for_five_seconds_runs_nothing_twice_and_loses_nothing() -> anyhow::Result<()>
{
    const CUT: Duration = Duration::from_secs(5);
    let cluster = Cluster::start_behind_doors(3).await?;
    let client = cluster.client().await?;
    let gate = Arc::new(Semaphore::new(0));
    let runs: Arc<Mutex<BTreeMap<MsgId, u32>>> = Arc::default();
    let agent_id = AgentId::parse("cut_off")?;
    let mut options = cluster.agent_options(&agent_id)?;
    // Back soon after the cut: what is looked at is the cut.
    options.pause_max = Duration::from_millis(500);
    let (counted, opens) = (runs.clone(), gate.clone());
    let agent = Agent::builder(&*agent_id)
        .capability("gated", 1.0)
        .max_concurrency(2)
        .inbox_dir(inbox_dir(&cluster, "cut_off"))
        .handler(move |task: Task| {
            let (runs, gate) = (counted.clone(), opens.clone());
            async move {
                *runs.lock().expect("no panic while it is held").entry(task.msg_id.clone()).or_default() += 1;
                let permit = gate.acquire().await.map_err(|_| Failure::Error("the gate is gone".into()))?;
                permit.forget();
                Ok(Done::new(Json::null()))
            }
        })
        .connect(options)
        .await?;
    let attached = agent.state();

    // One runs when the cut comes and ends meanwhile; one is given to the agent meanwhile, and does not get
    // there; one more waits for a slot.
    let running = client.submit(request("gated")).await?.msg_id;
    wait_for_state(&client, &running, StateName::Acknowledged).await?;
    cluster.doors()?.cut(true);
    let cut = Instant::now();
    gate.add_permits(1);
    tokio::time::timeout(LONG, agent.changed(&attached)).await?;
    let sent = client.submit(request("gated")).await?.msg_id;
    let waiting = client.submit(request("gated")).await?.msg_id;
    let state = async |msg_id: &MsgId| anyhow::Ok(client.status(msg_id).await?.record.state.name());
    assert_eq!(state(&running).await?, StateName::Acknowledged, "its end was heard through the cut");
    assert!(matches!(state(&sent).await?, StateName::Matched | StateName::Dispatched));
    assert_eq!(state(&waiting).await?, StateName::Pending);
    tokio::time::sleep_until((cut + CUT).into()).await;
    cluster.doors()?.cut(false);

    gate.add_permits(2);
    for msg_id in [&running, &sent, &waiting] {
        assert_eq!(client.wait(msg_id, LONG).await?.status, "completed", "{msg_id}");
        let view = client.status(msg_id).await?;
        assert_eq!((view.record.attempt, &view.record.avoid[..]), (0, &[][..]), "{msg_id} was given again");
        let ended = view.record.state.holder().map(|holder| &holder.instance);
        assert_eq!(ended, Some(agent.instance()), "{msg_id}");
    }
    let runs = runs.lock().expect("no panic while it is held").clone();
    assert_eq!(runs, [running, sent, waiting].into_iter().map(|msg_id| (msg_id, 1)).collect());
    agent.shutdown().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeats_conflicts_deadlines_and_fenced_runs_are_told() -> anyhow::Result<()> {
    let cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    let closed = Arc::new(Semaphore::new(0));
    let first_run = gated(&cluster, "gate_keeper", closed.clone()).await?;

    // The same id and content is the same message, on any node; other content is refused.
    let msg_id = MsgId::parse("m_twice")?;
    let envelope = Envelope { msg_id: Some(msg_id.clone()), ..request("gated") };
    client.submit(envelope.clone()).await?;
    for node in cluster.node_ids() {
        let again = cluster.client_of(node).await?.submit(envelope.clone()).await?;
        assert_eq!(again.msg_id, msg_id);
    }
    let other = Envelope { intent: Some("something else".into()), ..envelope };
    assert_eq!(client.submit(other).await.map(|_| ()).unwrap_err().code(), Code::MsgIdConflict);

    // One slot: the second waits, and its deadline ends it while it waits.
    let waiting = Envelope { expires_in_ms: Some(1_500), ..request("gated") };
    let response = client.call(waiting, LONG).await?;
    assert_eq!(response.status, "timeout");
    assert_eq!(response.error.map(|error| error.code), Some(Code::Expired));

    // A later run takes the place of the first, which is told to stop and may say nothing more.
    let stale = first_run.instance().clone();
    let fenced = tokio::spawn(async move { first_run.stopped().await });
    let taken_over = Agent::builder("gate_keeper")
        .capability("gated", 1.0)
        .inbox_dir(inbox_dir(&cluster, "another_folder"))
        .handler(|_: Task| async { Ok(Done::new(Json::null())) })
        .connect(cluster.agent_options(&AgentId::parse("gate_keeper")?)?)
        .await?;
    let stopped = tokio::time::timeout(LONG, fenced).await??;
    assert!(format!("{stopped:?}").starts_with("Fenced"), "{stopped:?}");
    let as_agent = Client::connect(cluster.agent_options(&AgentId::parse("gate_keeper")?)?).await?;
    let late = Request::Complete {
        agent_id: AgentId::parse("gate_keeper")?,
        instance: stale,
        msg_id: msg_id.clone(),
        attempt: 0,
        excerpt: String::new(),
        result: Json::null(),
        cost: None,
    };
    assert_eq!(as_agent.request(late, SHORT).await.unwrap_err().code(), Code::StaleInstance);
    // What the first run had received is done by the second, though its inbox never held it.
    assert_eq!(client.wait(&msg_id, LONG).await?.status, "completed");

    // An identity acts only as itself.
    let stranger = Client::connect(cluster.agent_options(&AgentId::parse("stranger")?)?).await?;
    let drain =
        Request::Drain { agent_id: AgentId::parse("gate_keeper")?, instance: taken_over.instance().clone() };
    assert_eq!(stranger.request(drain, SHORT).await.unwrap_err().code(), Code::Forbidden);
    assert_eq!(stranger.status(&msg_id).await.map(|_| ()).unwrap_err().code(), Code::Forbidden);

    // A shutdown leaves the registration, offline.
    taken_over.shutdown().await;
    let Answer::Agent(view) =
        client.request(Request::Agent { agent_id: AgentId::parse("gate_keeper")? }, SHORT).await?
    else {
        anyhow::bail!("something else than an agent came back");
    };
    assert_eq!(view.record.state, AgentState::Offline);
    Ok(())
}
