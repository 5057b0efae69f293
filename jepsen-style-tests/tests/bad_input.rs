//! Wrong files, wrong folders, wrong envelopes, no majority: one clear error each, naming the thing
//! and the way out, within a bounded time.

use std::{
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use jepsen_style_tests::{Cluster, cluster};
use reach_client::Client;
use reach_protocol::{
    AgentId, Code, Envelope, InstanceId, Json, NodeId, Tag,
    frame::{Answer, Request},
};

fn node(config: &Path) -> anyhow::Result<Output> {
    Ok(Command::new(cluster::binary()?).args(["node", "--config"]).arg(config).output()?)
}

/// The last line on standard error, and the exit code.
fn said(output: &Output) -> (String, Option<i32>) {
    let text = String::from_utf8_lossy(&output.stderr);
    (text.lines().last().unwrap_or_default().to_string(), output.status.code())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_can_not_start_says_why_and_what_to_do() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    let n1 = cluster.root().join("n1");
    let config = std::fs::read_to_string(n1.join("node.toml"))?;
    let with = |name: &str, text: String| -> anyhow::Result<(String, Option<i32>)> {
        let path = n1.join(name);
        std::fs::write(&path, text)?;
        Ok(said(&node(&path)?))
    };

    let (error, code) = with("a.toml", format!("nonsense = 1\n{config}"))?;
    assert!(error.contains("nonsense") && error.contains("a.toml"), "{error}");
    assert_eq!(code, Some(2));

    let (error, code) = with("b.toml", format!("{config}\n[delivery]\nattempts_max = 3\n"))?;
    assert!(error.contains("rule") && error.contains("rules apply"), "{error}");
    assert_eq!(code, Some(2));

    // The running node holds folder and ports.
    let (error, code) = with("c.toml", config.clone())?;
    assert!(error.contains("in use"), "{error}");
    assert_eq!(code, Some(20));
    let (error, code) =
        with("d.toml", format!("data_dir = \"elsewhere\"\n{}", without(&config, "data_dir")))?;
    assert!(error.contains("in use") && error.contains("port"), "{error}");
    assert_eq!(code, Some(24));

    // Another node's folder.
    cluster.kill(NodeId(1))?;
    cluster.kill(NodeId(2))?;
    let n2_data = cluster.root().join("n2").join("data");
    let text = format!("data_dir = \"{}\"\n{}", n2_data.display(), without(&config, "data_dir"));
    let (error, code) = with("e.toml", text)?;
    assert!(error.contains("belongs to node n2") && error.contains("data_dir"), "{error}");
    assert_eq!(code, Some(20));

    // A certificate that is none.
    std::fs::write(n1.join("broken.pem"), "no certificate")?;
    let text = config.replace("client.pem", "broken.pem");
    let (error, code) = with("f.toml", text)?;
    assert!(error.contains("broken.pem"), "{error}");
    assert_eq!(code, Some(24));
    Ok(())
}

fn without(config: &str, key: &str) -> String {
    config.lines().filter(|line| !line.starts_with(key)).map(|line| format!("{line}\n")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_majority_writes_are_refused_in_time_and_with_one_they_go_on() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    let client = cluster.client_of(NodeId(1)).await?;
    let unknown = Envelope::request(vec![Tag::parse("nobody.declares.this")?], Json::null());
    assert_eq!(client.submit(unknown).await.map(|_| ()).unwrap_err().code(), Code::NoCandidate);

    let agent_id = AgentId::parse("silent")?;
    let agent = Client::connect(cluster.agent_options(&agent_id)?).await?;
    let registration = serde_json::from_str(r#"{"agent_id":"silent","capabilities":[{"name":"known"}]}"#)?;
    let instance = InstanceId::parse("i_silent")?;
    let register = Request::Register { registration: Box::new(registration), instance, uptime_ms: 0 };
    agent.request(register, Duration::from_secs(5)).await?;

    cluster.kill(NodeId(2))?;
    cluster.kill(NodeId(3))?;
    let started = Instant::now();
    let submit = Request::Submit {
        envelope: Box::new(Envelope::request(vec![Tag::parse("known")?], Json::null())),
        sent_at_ms: None,
        wait_ms: None,
    };
    let error = client.request(submit, Duration::from_secs(3)).await.unwrap_err();
    assert!(matches!(error.code(), Code::NoLeader | Code::NoMajority | Code::OutcomeUnknown), "{error}");
    assert!(started.elapsed() < Duration::from_secs(8), "{:?}", started.elapsed());
    // What this node knows can still be read.
    assert!(matches!(client.request(Request::Cluster, Duration::from_secs(5)).await?, Answer::Cluster(_)));

    cluster.spawn(NodeId(2))?;
    cluster.wait_until_serving().await?;
    Ok(())
}
