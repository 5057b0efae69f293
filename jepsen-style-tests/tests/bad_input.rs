//! Wrong files, wrong folders, wrong envelopes, no majority: one clear error each, naming the thing
//! and the way out, within a bounded time.

use std::{
    path::Path,
    process::{Command, Output},
    time::{Duration, Instant},
};

use jepsen_style_tests::{Cluster, cluster};
use reach_client::{Client, Error};
use reach_protocol::{
    AgentId, Capability, Code, Envelope, InstanceId, Json, NodeId, Registration, Tag,
    frame::{Answer, Request},
};

const SHORT: Duration = Duration::from_secs(5);

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

/// It could vote for a leader that lacks what it had acknowledged itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_lost_its_folder_is_turned_away_and_the_others_go_on() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    cluster.wait_until_serving().await?;
    let leader = cluster.leader().await?;
    let others = cluster.node_ids().into_iter().filter(|id| *id != leader).collect::<Vec<_>>();
    let (emptied, kept) = (others[0], others[1]);
    let folder = cluster.root().join(emptied.to_string());
    let (data, aside) = (folder.join("data"), folder.join("aside"));

    cluster.kill(emptied)?;
    std::fs::rename(&data, &aside)?;
    let (error, code) = said(&node(&folder.join("node.toml"))?);
    assert!(error.contains(&format!("knows {emptied} by other data")), "{error}");
    assert!(error.contains("under a new node id"), "{error}");
    assert_eq!(code, Some(20));

    // The leader has stayed what it is, and its word is enough to know the emptied one after a restart too.
    assert_eq!(cluster.leader().await?, leader);
    cluster.kill(kept)?;
    cluster.kill(leader)?;
    cluster.spawn(leader)?;
    let (error, code) = said(&node(&folder.join("node.toml"))?);
    assert!(error.contains(&format!("{leader} knows {emptied}")), "{error}");
    assert_eq!(code, Some(20));
    cluster.spawn(kept)?;
    cluster.wait_until_serving().await?;

    // With its own data it is welcome.
    std::fs::remove_dir_all(&data)?;
    std::fs::rename(&aside, &data)?;
    cluster.spawn(emptied)?;
    cluster.converged().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_with_a_nearly_full_disk_takes_nothing_new_in_and_is_a_problem() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    cluster.wait_until_serving().await?;
    let (full, fine) = (NodeId(1), NodeId(2));
    let file = cluster.root().join("n1").join("node.toml");
    let config = std::fs::read_to_string(&file)?;
    // More than any disk has.
    std::fs::write(
        &file,
        without(&config, "low_water_mib").replace("[storage]", "[storage]\nlow_water_mib = 1_048_576"),
    )?;
    cluster.kill(full)?;
    cluster.spawn(full)?;
    let client = cluster.client_of(full).await?;
    let submit = || -> anyhow::Result<Request> {
        let envelope = Box::new(Envelope::request(vec![Tag::parse("nobody.declares.this")?], Json::null()));
        Ok(Request::Submit { envelope, sent_at_ms: None, wait_ms: None })
    };
    let refused = client.request(submit()?, SHORT).await.unwrap_err();
    assert_eq!(refused.code(), Code::DiskFull, "{refused}");
    assert!(refused.to_string().contains("the disk of n1 is nearly full"), "{refused}");
    let Answer::Problems { items, .. } = client.request(Request::Problems, SHORT).await? else {
        anyhow::bail!("something else than problems came back");
    };
    assert!(
        items.iter().any(|problem| problem.kind.as_str() == "disk_low" && problem.about == "n1"),
        "{items:?}"
    );

    // Another one takes it as far as to find that there is no agent for it.
    let refused = cluster.client_of(fine).await?.request(submit()?, SHORT).await.unwrap_err();
    assert_eq!(refused.code(), Code::NoCandidate, "{refused}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_registration_is_refused_whole_with_its_field_and_its_limit() -> anyhow::Result<()> {
    let cluster = Cluster::start(1).await?;
    let agent_id = AgentId::parse("declares")?;
    let client = Client::connect(cluster.agent_options(&agent_id)?).await?;
    let instance = InstanceId::parse("i_1")?;
    let register = async |registration: Registration| {
        let (registration, instance) = (Box::new(registration), instance.clone());
        client.request(Request::Register { registration, instance, uptime_ms: 0 }, SHORT).await
    };
    let capability =
        |name: &str, weight: f64| Capability::new(Tag::parse(name).expect("a legal tag"), weight);
    let good = Registration::new(agent_id.clone(), vec![capability("good", 1.0)]);
    register(good.clone()).await?;

    let text = |bytes: usize| Json::from_value(&"x".repeat(bytes).into());
    let with = |change: &dyn Fn(&mut Registration)| {
        let mut registration = good.clone();
        change(&mut registration);
        registration
    };
    let weight = |weight: f64| with(&|bad| bad.capabilities.push(capability("bad", weight)));
    let many = (0..257).map(|nth| capability(&format!("t{nth}"), 1.0)).collect::<Vec<_>>();
    let bad = [
        (weight(0.0), "capabilities[1].weight", "0.001 to 1000"),
        (weight(-1.0), "capabilities[1].weight", "0.001 to 1000"),
        (weight(1_000.1), "capabilities[1].weight", "0.001 to 1000"),
        // JSON has no words for these; a program has.
        (weight(f64::NAN), "capabilities[1].weight", "0.001 to 1000"),
        (weight(f64::INFINITY), "capabilities[1].weight", "0.001 to 1000"),
        (
            with(&|bad| bad.capabilities.push(capability("good", 2.0))),
            "capabilities[1].name",
            "good is declared twice",
        ),
        (with(&|bad| bad.capabilities.clear()), "capabilities", "1 to 256"),
        (with(&|bad| bad.capabilities = many.clone()), "capabilities", "1 to 256 capabilities, not 257"),
        (with(&|bad| bad.capabilities[0].version = Some("v".repeat(65))), "capabilities[0].version", "64"),
        (
            with(&|bad| bad.capabilities[0].input_schema = Some(text(1))),
            "capabilities[0].input_schema",
            "an object",
        ),
        (with(&|bad| drop(bad.metadata.insert("k".into(), text(16 << 10)))), "metadata", "16384"),
        (with(&|bad| bad.host = Some("h".repeat(256))), "host", "255"),
        (with(&|bad| bad.max_concurrency = 10_001), "max_concurrency", "1 to 10000"),
        (with(&|bad| bad.ttl_ms = Some(600_001)), "ttl_ms", "1000 to 600000"),
    ];
    for (registration, field, limit) in bad {
        let refused = match register(registration).await {
            Err(Error::Refused(reply)) => reply,
            other => anyhow::bail!("{field}: {other:?}"),
        };
        assert!(matches!(refused.code, Code::Invalid | Code::TooLarge), "{refused:?}");
        assert_eq!(refused.field.as_deref(), Some(field), "{refused:?}");
        assert!(refused.message.contains(limit), "{field}: {refused}");
    }
    // Another agent's name, with this one's certificate.
    let foreign = register(Registration::new(AgentId::parse("another")?, good.capabilities.clone())).await;
    assert_eq!(foreign.map(drop).unwrap_err().code(), Code::Forbidden);

    let operator = cluster.client().await?;
    let request = Request::Agents { state: None, capability: None, metadata: None, limit: 10, after: None };
    let Answer::Agents { items, .. } = operator.request(request, SHORT).await? else {
        anyhow::bail!("a question for agents got another answer");
    };
    let known: Vec<_> = items.into_iter().map(|view| view.record.registration.clone()).collect();
    assert_eq!(known, [good], "what was there stays, and nothing else came");
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
