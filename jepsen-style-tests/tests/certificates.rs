//! Certificates on real processes: what is revoked stays out, what is renewed is taken into use, and
//! no host's wrong calendar cuts anybody off.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use jepsen_style_tests::{
    Cluster,
    cluster::inbox_dir,
    nemesis::{faketime, write_clock},
};
use reach_client::{Agent, Client, Done, Error, Options, Stopped, Task};
use reach_protocol::{
    AgentId, Code, EventType, Json, NodeId, Principal, Revocation,
    event::Start,
    frame::{Answer, Request},
};
use reach_transport::{Authority, Identity, describe};

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_secs(5);

fn on_node(options: &Options, at: usize) -> Options {
    Options { endpoints: vec![options.endpoints[at].clone()], stale: true, ..options.clone() }
}

async fn revocations(client: &Client) -> anyhow::Result<Vec<Revocation>> {
    match client.request(Request::Revocations { limit: 100, after: None }, SHORT).await? {
        Answer::Revocations { items, .. } => Ok(items),
        _ => anyhow::bail!("something else than revocations came back"),
    }
}

/// Waits until a request over this client is refused for good, and says in which words.
async fn told(client: &Client) -> String {
    loop {
        match client.request(Request::Cluster, SHORT).await {
            Err(error @ Error::Unauthenticated { .. }) => return error.to_string(),
            _ => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_revoked_is_out_on_every_node_within_a_second_and_after_kill_9_of_all() -> anyhow::Result<()>
{
    let mut cluster = Cluster::start(3).await?;
    let operator = cluster.client().await?;
    let mole = AgentId::parse("mole")?;
    let options = cluster.agent_options(&mole)?;
    let certificate = describe(&options.credentials.cert_pem)?;

    // An agent at work, and one live connection of the same certificate to each node.
    let agent = Agent::builder("mole")
        .capability("dig", 1.0)
        .inbox_dir(inbox_dir(&cluster, "mole"))
        .handler(|_: Task| async { Ok(Done::new(Json::null())) })
        .connect(options.clone())
        .await?;
    let mut clients = Vec::new();
    for at in 0..3 {
        clients.push(Client::connect(on_node(&options, at)).await?);
    }

    let revoke = Request::Revoke {
        revoked: reach_protocol::Revoked::Certificate(certificate.fingerprint),
        whose: Some(Principal::Agent(mole.clone())),
        ends_s: u64::try_from(certificate.not_after.as_second()).ok(),
    };
    // Not for everybody to do.
    let refused = clients[0].request(revoke.clone(), SHORT).await.unwrap_err();
    ensure!(refused.code() == Code::Forbidden, "{refused}");

    operator.request(revoke, SHORT).await?;
    let began = Instant::now();
    for client in &clients {
        let words = tokio::time::timeout(LONG, told(client)).await.context("a revoked client goes on")?;
        ensure!(words.contains("the certificate was revoked"), "{words}");
    }
    let took = began.elapsed();
    println!("out on three nodes after {took:?}");
    ensure!(took < Duration::from_secs(1), "out on every node after {took:?}");
    let Stopped::Refused(reply) = tokio::time::timeout(LONG, agent.stopped()).await? else {
        anyhow::bail!("the agent did not stop as refused");
    };
    ensure!(reply.code == Code::Unauthenticated && reply.message.contains("was revoked"), "{reply}");

    for id in cluster.node_ids() {
        cluster.kill(id)?;
    }
    for id in cluster.node_ids() {
        cluster.spawn(id)?;
    }
    cluster.wait_until_serving().await?;
    for at in 0..3 {
        let deadline = Instant::now() + LONG;
        let error = loop {
            match Client::connect(on_node(&options, at)).await {
                Err(error) if error.code() == Code::Unauthenticated => break error,
                // Still starting.
                Err(_) if Instant::now() < deadline => {}
                other => anyhow::bail!("node {at} after the restart: {:?}", other.map(|_| "connected")),
            }
        };
        ensure!(error.to_string().contains("the certificate was revoked"), "{error}");
    }
    let listed = revocations(&cluster.client().await?).await?;
    ensure!(listed.len() == 1 && listed[0].author.to_string() == "user/admin", "{listed:?}");
    ensure!(
        listed[0].at.wall_ms > 0 && listed[0].whose == Some(Principal::Agent(mole.clone())),
        "{listed:?}"
    );

    // The identity itself is welcome, with another certificate.
    Client::connect(cluster.agent_options(&mole)?).await?;
    cluster.converged().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_node_is_cut_off_until_its_files_are_renewed_without_a_restart() -> anyhow::Result<()> {
    let cluster = Cluster::start(3).await?;
    // The leader itself: the others need a new one.
    let out = cluster.leader().await?;
    let other = cluster.node_ids().into_iter().find(|id| *id != out).context("a follower")?;
    let others = cluster.client_of(other).await?;
    let answers = async |wanted: bool| {
        let deadline = Instant::now() + LONG;
        loop {
            if let Answer::Cluster(view) = others.request(Request::Cluster, SHORT).await?
                && view.nodes.iter().any(|node| node.node_id == out && node.report.is_some() == wanted)
            {
                return anyhow::Ok(());
            }
            ensure!(Instant::now() < deadline, "{out} answers is not {wanted}\n{}", cluster.logs());
        }
    };
    answers(true).await?;

    let revoked = cluster.cli(&["certs", "revoke", &format!("node/{out}")], None)?;
    let revoked = revoked.map_err(anyhow::Error::msg)?;
    ensure!(revoked["author"] == "user/admin", "{revoked}");
    answers(false).await?;
    // The others go on.
    cluster.wait_until_serving().await?;

    let dir = cluster.root().join(out.to_string()).display().to_string();
    let admin = cluster.admin().display().to_string();
    let renewed = cluster
        .cli(&["certs", "renew", "--all", "--lifetime", "20d", "--dir", &dir, "--admin", &admin], None)?;
    let renewed = renewed.map_err(anyhow::Error::msg)?;
    ensure!(renewed["items"].as_array().is_some_and(|items| items.len() == 2), "{renewed}");
    answers(true).await?;
    cluster.converged().await?;

    logged(&cluster, out, &["this node's certificate ends soon", "peer.pem"])?;

    // Its clients' door has the new one too.
    let client = cluster.client_of(out).await?;
    client.request(Request::Cluster, SHORT).await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_has_renewed_its_files_goes_on_past_the_end_of_its_certificate_and_who_has_not_is_out()
-> anyhow::Result<()> {
    const LIFETIME: Duration = Duration::from_secs(8);
    let cluster = Cluster::start(3).await?;
    let read = |name: &str| std::fs::read_to_string(cluster.admin().join(name));
    let authority = Authority::from_pem(&read("client-ca.pem")?, &read("client-ca.key")?)?;
    let name = Options::from_context(cluster.admin())?.cluster;
    // A folder as `certs issue --out` makes it, whose certificate ends soon.
    let issue = |folder: &Path, user: &str, lifetime: Duration| -> anyhow::Result<()> {
        let identity = Identity::new(name.clone(), Principal::User(user.parse()?));
        let issued = authority.issue(&identity, lifetime)?;
        std::fs::write(folder.join("admin.key"), issued.key_pem)?;
        std::fs::write(folder.join("admin.pem"), issued.cert_pem)?;
        Ok(())
    };
    let folder = |user: &str| -> anyhow::Result<PathBuf> {
        let folder = cluster.dir().join(user);
        std::fs::create_dir(&folder)?;
        for file in ["context.toml", "client-ca.pem"] {
            std::fs::copy(cluster.admin().join(file), folder.join(file))?;
        }
        issue(&folder, user, LIFETIME)?;
        Ok(folder)
    };
    let (renews, forgets) = (folder("renews")?, folder("forgets")?);
    let began = Instant::now();
    let going_on = Client::connect(Options::from_context(&renews)?).await?;
    let left_out = Client::connect(Options::from_context(&forgets)?).await?;
    issue(&renews, "renews", Duration::from_secs(3_600))?;
    for client in [&going_on, &left_out] {
        client.request(Request::Cluster, SHORT).await.context("its certificate is good")?;
    }

    // Its standing connection is closed, and no other is made.
    let words = tokio::time::timeout(LONG, told(&left_out)).await.context("it goes on past its end")?;
    ensure!(words.contains("expired"), "{words}");
    ensure!(began.elapsed() >= LIFETIME - Duration::from_secs(2), "out after {:?}", began.elapsed());
    logged_anywhere(&cluster, &["the certificate of user/forgets ended"])?;
    logged_anywhere(&cluster, &["the certificate of user/renews ended"])?;
    for _ in 0..3 {
        going_on.request(Request::Cluster, SHORT).await.context("it has a renewed one")?;
    }
    cluster.converged().await?;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_calendar_off_by_ten_hours_cuts_nobody_off_and_one_off_by_100_is_told() -> anyhow::Result<()> {
    let mut cluster = Cluster::start_breakable(3, Some(faketime()?)).await?;
    for (id, offset) in cluster.node_ids().into_iter().zip(["+10h", "-10h", "+0"]) {
        cluster.kill(id)?;
        write_clock(&cluster.clock_file(id), offset)?;
    }
    for id in cluster.node_ids() {
        cluster.spawn(id)?;
    }
    cluster.wait_until_serving().await?;
    // Whoever leads, with whichever calendar.
    for leader in [cluster.leader().await?, NodeId(0)] {
        if leader == NodeId(0) {
            let now = cluster.leader().await?;
            cluster.kill(now)?;
            cluster.wait_until_serving().await?;
            cluster.spawn(now)?;
        }
        let fresh = cluster.agent_options(&AgentId::parse("fresh")?)?;
        for at in 0..3 {
            let options = Options { connect_timeout: LONG, ..on_node(&fresh, at) };
            Client::connect(options).await.with_context(|| cluster.logs())?;
        }
        for offset in [None, Some("+10h"), Some("-10h")] {
            let status = cluster.cli(&["cluster", "status", "--timeout", "20s"], offset)?;
            ensure!(status.is_ok(), "{offset:?}: {status:?}\n{}", cluster.logs());
        }
    }
    cluster.converged().await?;

    let told = cluster.cli(&["cluster", "status"], Some("-100h"))?.err().context("it is too far off")?;
    let ours = |text: &str| text.contains("is not valid before 20") && text.contains("says 20");
    ensure!(ours(&told) && told.contains("check the clock"), "{told}");
    Ok(())
}

/// Waits until some node's log holds it.
fn logged_anywhere(cluster: &Cluster, words: &[&str]) -> anyhow::Result<()> {
    let deadline = Instant::now() + LONG;
    let found = |id: NodeId| -> anyhow::Result<bool> {
        let log = std::fs::read_to_string(cluster.root().join(id.to_string()).join("node.log"))?;
        Ok(log.lines().any(|line| words.iter().all(|word| line.contains(word))))
    };
    while !cluster.node_ids().into_iter().map(found).collect::<anyhow::Result<Vec<_>>>()?.contains(&true) {
        ensure!(Instant::now() < deadline, "no node said {words:?}\n{}", cluster.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Waits until the node's own log holds it.
fn logged(cluster: &Cluster, id: NodeId, words: &[&str]) -> anyhow::Result<String> {
    let deadline = Instant::now() + LONG;
    loop {
        let log = std::fs::read_to_string(cluster.root().join(id.to_string()).join("node.log"))?;
        if let Some(line) = log.lines().find(|line| words.iter().all(|word| line.contains(word))) {
            return Ok(line.to_string());
        }
        ensure!(Instant::now() < deadline, "{id} never said {words:?}\n{}", cluster.logs());
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whose_clock_is_off_is_seen_within_two_heartbeats_and_nobody_is_harmed() -> anyhow::Result<()> {
    let cluster = Cluster::start_breakable(3, Some(faketime()?)).await?;
    let leader = cluster.leader().await?;
    let off = cluster.node_ids().into_iter().find(|id| *id != leader).context("a follower")?;
    let offset_of = async |node: NodeId| -> anyhow::Result<Option<i64>> {
        let view = cluster.view().await?;
        let node = view.nodes.iter().find(|view| view.node_id == node).context("a node")?;
        Ok(node.report.as_ref().and_then(|report| report.offset_ms))
    };
    let until = async |node: NodeId, range: std::ops::Range<i64>| -> anyhow::Result<Duration> {
        let began = Instant::now();
        while !offset_of(node).await?.is_some_and(|ms| range.contains(&ms)) {
            ensure!(began.elapsed() < LONG, "{:?}\n{}", offset_of(node).await?, cluster.logs());
        }
        Ok(began.elapsed())
    };
    for id in cluster.node_ids() {
        until(id, -500..500).await?;
    }

    write_clock(&cluster.clock_file(off), "+2h")?;
    // The library looks at its file once a second.
    let took = until(off, 7_199_000..7_201_000).await?;
    ensure!(took < Duration::from_secs(6), "seen after {took:?}");
    let line = logged(&cluster, off, &["clock skew", &format!("node {off}")])?;
    ensure!(line.contains("ahead of the cluster's") && line.contains("check that host's clock"), "{line}");
    let client = cluster.client().await?;
    let whose = format!("node/{off}");
    let told = skew_told(&client, &whose, true).await?;
    let offset_ms = told["offset_ms"].as_i64().context("an offset")?;
    ensure!((7_199_000..7_201_000).contains(&offset_ms) && told["host"] == "127.0.0.1", "{told}");
    ensure!(told["message"].as_str().is_some_and(|text| text.contains("check that host's clock")), "{told}");
    let status = cluster.cli(&["cluster", "status"], None)?.map_err(anyhow::Error::msg)?;
    ensure!(status["nodes"].as_array().is_some_and(|nodes| nodes.len() == 3), "{status}");

    // An agent on a host whose clock is late: by its own process, and by the library's whole path.
    let mut agent = cluster.agent_process("late", "-3s")?;
    let began = Instant::now();
    let agent_id = AgentId::parse("late")?;
    let seen = loop {
        let request = Request::Agent { agent_id: agent_id.clone() };
        if let Ok(Answer::Agent(view)) = client.request(request, SHORT).await
            && let Some(offset_ms) = view.offset_ms
        {
            break offset_ms;
        }
        ensure!(began.elapsed() < LONG, "never known\n{}", cluster.logs());
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    println!("{seen} ms after {:?}", began.elapsed());
    ensure!((-3_500..-2_500).contains(&seen), "{seen}");
    ensure!(began.elapsed() < Duration::from_secs(7), "known after {:?}", began.elapsed());
    skew_told(&client, "agent/late", true).await?;
    agent.kill()?;
    agent.wait()?;

    write_clock(&cluster.clock_file(off), "+0")?;
    until(off, -500..500).await?;
    logged(&cluster, off, &["clock skew is over", &format!("node {off}")])?;
    skew_told(&client, &whose, false).await?;
    Ok(())
}

/// Waits for the event that says that somebody's clock is off, or right again.
async fn skew_told(client: &Client, who: &str, is_off: bool) -> anyhow::Result<serde_json::Value> {
    let event_type: EventType = "cluster.clock_skew.v1".parse()?;
    let began = Instant::now();
    let mut from = Start::Earliest;
    loop {
        ensure!(began.elapsed() < LONG, "no event about {who}");
        let request =
            Request::Events { event_type: event_type.clone(), from, limit: 100, wait_ms: Some(1_000) };
        // Without any event so far there is no such topic.
        let Ok(Answer::Events { items, next, .. }) = client.request(request, SHORT).await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        for event in items {
            let data: serde_json::Value = serde_json::from_str(event.data.as_str())?;
            if data["who"] == who && data["is_off"] == is_off {
                return Ok(data);
            }
        }
        from = Start::Offset(next);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_months_without_any_node_what_was_issued_meanwhile_is_good() -> anyhow::Result<()> {
    let mut cluster = Cluster::start_breakable(3, Some(faketime()?)).await?;
    let (dir, admin) = (cluster.root().display().to_string(), cluster.admin().display().to_string());
    for id in cluster.node_ids() {
        cluster.kill(id)?;
        write_clock(&cluster.clock_file(id), "+80d")?;
    }
    // All of it begins long after the last calendar in the log.
    let renewed =
        cluster.cli(&["certs", "renew", "--all", "--dir", &dir, "--admin", &admin], Some("+80d"))?;
    let renewed = renewed.map_err(anyhow::Error::msg)?;
    ensure!(renewed["items"].as_array().is_some_and(|items| items.len() == 7), "{renewed}");
    for id in cluster.node_ids() {
        cluster.spawn(id)?;
    }
    let context = cluster.dir().join("home/contexts");
    std::fs::remove_dir_all(context)?;
    let deadline = Instant::now() + LONG;
    loop {
        let told = cluster.cli(&["rules", "show", "--timeout", "5s"], Some("+80d"))?;
        if told.is_ok() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{told:?}\n{}", cluster.logs());
    }
}
