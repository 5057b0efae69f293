//! Every fault in a seeded order, under a mixed load, then everything healed and judged.
//!
//! `make chaos SECS=600 SEED=7`; SECS is how long faults go on, 75 by default, and at least until
//! each kind was done once. KEEP=1 keeps the folder of a run that held.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    io::{Read, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use jepsen_style_tests::{
    Cluster, RegistryLoad, Worker, Workload, check,
    nemesis::{self, Fault, Schedule, faketime},
    worker::Ledger,
    workload::{Mix, Outcome},
};
use reach_client::{Client, Options};
use reach_protocol::{Envelope, Json, Tag};

const CALLERS: usize = 6;
const SECS: u64 = 75;
const PAUSE: Duration = Duration::from_millis(100);
/// How long a caller is ready to wait for an answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// What its answer may take beyond that, on a machine that does other things too.
const MARGIN: Duration = Duration::from_secs(10);
/// HTTP gives up by itself after 10 s.
const HTTP_MAX: Duration = Duration::from_secs(20);
/// Between two faults.
const CALM: Duration = Duration::from_millis(1_500);

fn setting(name: &str, default: u64) -> anyhow::Result<u64> {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => {
            text.parse().with_context(|| format!("{name} is a number, not {text}"))
        }
        _ => Ok(default),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_acknowledged_is_lost_whatever_breaks() -> anyhow::Result<()> {
    let secs = setting("SECS", SECS)?;
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos() as u64;
    let seed = setting("SEED", clock % 1_000_000)?;
    println!("repeat with: make chaos SECS={secs} SEED={seed}");
    let mut cluster = Cluster::start_breakable(3, Some(faketime()?)).await?;
    let mut story = format!("seed {seed}, {secs} s\n");
    let told = run(&mut cluster, secs, seed, &mut story).await;
    print!("{story}");
    if told.is_err() || std::env::var_os("KEEP").is_some_and(|keep| !keep.is_empty()) {
        std::fs::write(cluster.dir().join("story.txt"), &story)?;
        println!("kept: {}", cluster.keep().display());
    }
    told.with_context(|| format!("seed {seed}\n{}", cluster.logs()))
}

async fn run(cluster: &mut Cluster, secs: u64, seed: u64, story: &mut String) -> anyhow::Result<()> {
    let ledger = Ledger::default();
    let _first = Worker::start(cluster, "worker_1", 8, ledger.clone()).await?;
    let _second = Worker::start(cluster, "worker_2", 8, ledger.clone()).await?;
    let mut clients = Vec::new();
    for _ in 0..CALLERS {
        let options = Options { request_timeout: TIMEOUT, ..Options::from_context(cluster.admin())? };
        clients.push(Client::connect(options).await?);
    }
    let load = Workload::start_mixed(clients, Mix { seed, pause: PAUSE });
    let registry = RegistryLoad::start(cluster, seed).await?;
    let first_term = cluster.view().await?.term;

    // Faults, one at a time.
    let began = Instant::now();
    let mut schedule = Schedule::new(seed);
    let mut done: BTreeMap<Fault, u64> = BTreeMap::new();
    let mut refused_by_minorities = 0;
    while began.elapsed() < Duration::from_secs(secs) || done.len() < Fault::ALL.len() {
        let fault = schedule.next_fault();
        let lasts = schedule.lasts();
        let struck = nemesis::strike(cluster, &mut schedule, fault).await?;
        let _ = writeln!(
            story,
            "{:>7.2} s  {fault} {:?} for {lasts:?}",
            began.elapsed().as_secs_f64(),
            struck.nodes
        );
        tokio::time::sleep(lasts).await;
        if let Some(node) = struck.minority {
            refused_by_minorities +=
                u64::from(minority_refuses(cluster.http(node)?, seed ^ done.len() as u64).await?);
        }
        nemesis::undo(cluster, &struck)?;
        *done.entry(fault).or_default() += 1;
        tokio::time::sleep(CALM).await;
    }

    // Healed, everything must work again.
    cluster.proxy()?.heal();
    cluster.wait_until_serving().await?;
    let elections = cluster.view().await?.term - first_term;
    let dropped = cluster.proxy()?.dropped();
    let (mut history, seen) = load.finish_mixed().await?;
    let registry = registry.finish().await?;
    let client = cluster.client().await?;
    for number in 0..20 {
        let envelope = Envelope::request(vec![Tag::parse("square")?], Json::from_value(&number.into()));
        let response = client.call(envelope, Duration::from_secs(30)).await?;
        ensure!(response.status == "completed", "healed, a task ended {}", response.status);
    }
    write_history(cluster.dir(), &history)?;

    // What was refused is not there, or was taken by the same caller's later try: only ends count.
    history.retain(|entry| !matches!(entry.outcome, Outcome::Refused(_)));
    let verdict = check::judge(cluster, &history, &ledger).await?;
    for (msg_id, end) in &seen.ends {
        ensure!(
            *client.status(msg_id).await?.record == *end,
            "the end of {msg_id} has changed since it was read"
        );
    }
    let _ = writeln!(
        story,
        "{verdict:?}\n{registry:?}\nelections {elections} · datagrams cut {dropped} · ends read under faults {} · repeats {} · \
         conflicts {} · longest answer {:?} · refused by minorities {refused_by_minorities}\nfaults {done:?}",
        seen.ends.len(),
        seen.repeats,
        seen.conflicts,
        seen.longest,
    );

    ensure!(seen.longest < TIMEOUT + MARGIN, "a caller was kept waiting for {:?}", seen.longest);
    // A run that exercised too little says nothing.
    let rounds = done.values().sum::<u64>() / Fault::ALL.len() as u64;
    let floors = [
        ("elections", elections, 2 * rounds),
        ("acknowledged", verdict.accepted, 4 * secs),
        ("ends read under faults", seen.ends.len() as u64, secs / 2),
        ("repeats", seen.repeats, secs / 2),
        ("conflicts", seen.conflicts, secs / 5),
        ("registry operations", registry.operations as u64, secs),
        ("datagrams cut", dropped, 20 * rounds),
        ("refusals by a minority", refused_by_minorities, rounds),
    ];
    for (what, count, floor) in floors {
        ensure!(count >= floor, "the run exercised too little: {what} {count} of at least {floor}");
    }
    Ok(())
}

/// A node without a majority answers within a bounded time, and takes nothing. False when the cut
/// came to an end by itself, as it does when leadership moves late.
async fn minority_refuses(door: SocketAddr, number: u64) -> anyhow::Result<bool> {
    let body = format!(
        "{{\"msg_id\":\"minority_{number}_{}\",\"target\":{{\"selector\":{{\"capabilities\":[\"square\"]}}}},\"payload\":{number}}}",
        fastrand::u64(..)
    );
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nHost: {door}\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let asked = tokio::task::spawn_blocking(move || {
        let mut stream = TcpStream::connect_timeout(&door, HTTP_MAX)?;
        stream.set_read_timeout(Some(HTTP_MAX))?;
        stream.write_all(head.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        anyhow::Ok(answer)
    });
    let answer = asked.await?.context("a node without a majority gave no answer in time")?;
    let status = answer.split(' ').nth(1).unwrap_or_default();
    ensure!(matches!(status, "503" | "504"), "a node without a majority answered {status}");
    Ok(true)
}

fn write_history(dir: &Path, history: &[jepsen_style_tests::workload::Entry]) -> anyhow::Result<()> {
    let mut lines = String::new();
    for entry in history {
        let line = serde_json::json!({
            "msg_id": entry.msg_id, "number": entry.number, "outcome": format!("{:?}", entry.outcome),
        });
        let _ = writeln!(lines, "{line}");
    }
    Ok(std::fs::write(dir.join("history.jsonl"), lines)?)
}
