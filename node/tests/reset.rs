//! Every cursor's way back: nodes that keep no facts at all, so that sessions, waiting callers and
//! the scheduler derive their state from the tables again and again. The work must come out the same.

mod support;

use std::{
    collections::BTreeMap,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use agent_reach::{cli::cluster_new, node::Node};
use reach_client::{Agent, Client, Done, Options, Stopped, Task};
use reach_config::{Layout, NodeConfig, layout::NODE_FILE};
use reach_protocol::{AgentId, Code, Envelope, Json, NodeId, Principal, Revoked, Tag, frame::Request};
use reach_transport::{Authority, Identity};
use tokio::sync::oneshot;

const LONG: Duration = Duration::from_secs(60);
const MESSAGES: u64 = 60;

fn agent_options(admin: &Path, agent_id: &str) -> anyhow::Result<Options> {
    let mut options = Options::from_context(admin)?;
    let read = |name: &str| std::fs::read_to_string(admin.join(name));
    let authority = Authority::from_pem(&read("client-ca.pem")?, &read("client-ca.key")?)?;
    let identity = Identity::new(options.cluster.clone(), Principal::Agent(AgentId::parse(agent_id)?));
    let issued = authority.issue(&identity, Duration::from_secs(3600))?;
    options.credentials.cert_pem = issued.cert_pem;
    options.credentials.key_pem = issued.key_pem;
    Ok(options)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_remember_no_facts_lose_nothing() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let out = dir.path().join("cluster");
    let hosts: Vec<String> =
        (1..=3).map(|id| format!("n{id}=127.0.0.1:{}", support::free_port() + 1)).collect();
    let layout = Layout::new("test".parse()?, &hosts)?;
    cluster_new::write(&layout, &out)?;

    let mut stops = BTreeMap::new();
    let mut running = Vec::new();
    for id in 1..=3 {
        let config = NodeConfig::load(&out.join(NodeId(id).to_string()).join(NODE_FILE))?;
        let node = Node::start_with(config, 0).await?;
        let (stop, stopped) = oneshot::channel::<()>();
        stops.insert(id, stop);
        running.push(tokio::spawn(node.run(async { drop(stopped.await) })));
    }
    let admin = out.join("admin");
    let client = Client::connect(Options::from_context(&admin)?).await?;
    client.request(Request::Initialise, LONG).await?;

    let agent = Agent::builder("doubler")
        .capability("double", 1.0)
        .max_concurrency(3)
        .inbox_dir(dir.path().join("inbox"))
        .handler(|task: Task| async move {
            let number: u64 = task.decode()?;
            Ok(Done::new(Json::from_value(&(2 * number).into())))
        })
        .connect(agent_options(&admin, "doubler")?)
        .await?;

    // Three slots, so most of them wait: the scheduler has to remember them without facts.
    let callers: Vec<_> = (0..MESSAGES)
        .map(|number| {
            let client = client.clone();
            tokio::spawn(async move {
                let tag = Tag::parse("double").expect("a legal tag");
                let envelope = Envelope::request(vec![tag], Json::from_value(&number.into()));
                client.call(envelope, LONG).await
            })
        })
        .collect();
    for (number, caller) in callers.into_iter().enumerate() {
        let response = caller.await??;
        assert_eq!(response.result.map(|result| result.to_value()), Some((2 * number).into()));
    }

    // No fact tells of the revocation either; the tables do.
    let made_until_s = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    let principal = Principal::Agent(AgentId::parse("doubler")?);
    let revoked = Revoked::Identity { principal, made_until_s };
    client.request(Request::Revoke { revoked, whose: None, ends_s: None }, LONG).await?;
    match tokio::time::timeout(LONG, agent.stopped()).await? {
        Stopped::Refused(reply) => assert_eq!(reply.code, Code::Unauthenticated, "{reply}"),
        other => panic!("stopped otherwise: {other:?}"),
    }
    drop(stops);
    for node in running {
        node.await??;
    }
    Ok(())
}
