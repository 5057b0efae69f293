//! The demo from beginning to end, in the order in which it prints.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, ensure};
use reach_protocol::{NodeId, frame::AgentView, frame::ClusterView};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
    time::Instant,
};

use crate::{
    cast::{CLUSTER, Cast, Folders, until},
    cluster::Cluster,
    cut, docs, failover,
    jobs::Stage,
    ledger,
    planner::JobRecord,
    recompute,
    screen::{Screen, table},
    scribe,
    snapshot::Snapshot,
    summary::Summary,
    unit, verdict,
    verdict::Evidence,
    waterfall,
};

/// How long three nodes may take to serve, on a slow machine.
const CLUSTER_MAX: Duration = Duration::from_secs(40);
/// How long the agents may take to be ready.
const AGENTS_MAX: Duration = Duration::from_secs(20);
/// How long the new leader may take to tell of itself, and the scribe to write.
const POSTMORTEM_MAX: Duration = Duration::from_secs(20);
/// The agents that are there from the beginning, with what the demo starts them as.
const AGENTS: &[(&str, &[&str])] = &[
    ("planner", &["planner"]),
    ("history", &["agent", "history"]),
    ("scan_a", &["agent", "scan", "--weight", "1.0"]),
    ("scan_b", &["agent", "scan", "--weight", "0.5"]),
    ("secrets", &["agent", "secrets"]),
    ("writer", &["agent", "writer"]),
    ("scribe", &["scribe"]),
];

/// Answers whether everything held.
pub async fn run(repo: &Path, out: &Path, agent_reach: PathBuf, keep: bool) -> anyhow::Result<bool> {
    let begun = Instant::now();
    let mut screen = Screen::new();
    let folders = Folders::make(out)?;
    let mut cast = Cast::new(folders, agent_reach, keep);
    let ended = tokio::select! {
        ended = show(&mut screen, &mut cast, repo) => Some(ended),
        () = interrupted() => None,
    };
    let shown = out.display();
    let keeps = keep && ended.as_ref().is_some_and(|ended| ended.is_ok());
    if keeps {
        say_what_to_try(&mut screen, &cast);
    } else {
        screen.live("ending the demo's own processes");
        for remark in cast.end().await {
            screen.line(remark);
        }
    }
    match ended {
        Some(Ok(true)) => {
            let seconds = begun.elapsed().as_secs_f64();
            screen.line(format!("PASS in {seconds:.0} s.   open {shown}/report.html"));
            Ok(true)
        }
        Some(Ok(false)) => {
            screen.line(format!(
                "FAIL after {:.0} s.   logs: {shown}/work/logs",
                begun.elapsed().as_secs_f64()
            ));
            Ok(false)
        }
        Some(Err(error)) => Err(error.context(format!("the demo broke off; logs: {shown}/work/logs"))),
        None => {
            screen.line(format!(
                "interrupted: the demo's own processes are ended; left are the files in {shown}, which the next run replaces"
            ));
            Ok(false)
        }
    }
}

async fn interrupted() {
    let mut terminate = signal(SignalKind::terminate()).expect("signals can be listened for");
    let mut interrupt = signal(SignalKind::interrupt()).expect("signals can be listened for");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

async fn show(screen: &mut Screen, cast: &mut Cast, repo: &Path) -> anyhow::Result<bool> {
    needs("python3", "docs.py").await?;
    cast.run_agent_reach(&["version"])
        .await
        .context("build it with `cargo build -p agent-reach`, or name it with --agent-reach")?;
    let (repo, work) = (repo.to_path_buf(), cast.folders.work.clone());
    let snapshot = tokio::task::spawn_blocking(move || Snapshot::take(&repo, &work)).await??;
    let counted = verdict::count_files(&snapshot.repo)?;
    let units = cut::units(&snapshot)?;
    let scans = units.iter().filter(|unit| unit.capability() == unit::SCAN).count();
    fs::write(cast.folders.file("snapshot.json"), serde_json::to_string(&snapshot)?)?;
    let script = docs::unpack(&cast.folders.work)?;
    screen.line(format!(
        "agent-reach demo · repository {} ({} files) · writes only to {}",
        snapshot.repo.display(),
        snapshot.tracked,
        cast.folders.out.display()
    ));

    let cluster = start_cluster(screen, cast).await?;
    start_agents(screen, cast, &cluster, &snapshot, &script).await?;

    // The report is a unit of its own.
    let units = units.len() + 1;
    let mut stage = Stage { screen, cast, cluster, units, scans };
    let one = stage.job_one().await?;
    let first = JobRecord::read(&stage.cast.folders.file("jobs"), 1)?;
    let summary = first.summary.clone().context("the planner left no summary")?;
    say_result(stage.screen, &summary);
    let chosen: BTreeSet<_> = one.held.iter().map(|held| held.msg_id.clone()).collect();
    let command = format!("agent-reach trace {}", one.job.trace_id);
    stage.screen.step(
        6,
        "TRACE",
        format!("{command}   (some rows)   queue ░  waiting for receipt ▒  running █  retry ·"),
    );
    for line in waterfall::lines(&one.job.records, &one.job.hops, &chosen) {
        stage.screen.detail(line);
    }
    let ready = Duration::from_millis(100);
    let names: Vec<&str> = AGENTS.iter().map(|(name, _)| *name).chain(["docs", "scan_c"]).collect();
    let cluster = stage.cluster.clone();
    until("every agent is ready again", AGENTS_MAX, ready, async || cluster.all_ready(&names).await).await?;
    let two = stage.job_two().await?;
    let second = JobRecord::read(&stage.cast.folders.file("jobs"), 2)?;

    let told = say_postmortem(&mut stage, two.failover.killed).await?;

    stage.screen.step(9, "CHECKED WITHOUT AGENT-REACH", "");
    let recomputed = {
        let (snapshot, script) = (snapshot.clone(), script.clone());
        tokio::task::spawn_blocking(move || recompute::findings(&snapshot, &script)).await??
    };
    let evidence = Evidence {
        counted,
        sampled: (snapshot.files.len() as u64) < snapshot.text,
        recomputed,
        records: vec![first, second],
        listing: stage.cluster.messages().await?,
        starts: ledger::read(&stage.cast.folders.file("ledger.jsonl"))?,
        killed: stage.cast.killed.clone(),
        one,
        two,
        agreement: failover::agreement(&stage.cluster, Duration::from_secs(10)).await?,
        told,
    };
    Ok(say_verdict(stage.screen, &evidence))
}

/// Waits until the scribe, woken by an event, has told of the leader's loss, and shows its words.
async fn say_postmortem(
    stage: &mut Stage<'_>,
    killed: Option<(NodeId, u32)>,
) -> anyhow::Result<BTreeMap<String, usize>> {
    let out = stage.cast.folders.out.clone();
    let node = killed.map_or_else(String::new, |(node, _)| node.to_string());
    stage.screen.live("the scribe writes");
    let every = Duration::from_millis(100);
    let told = until("the post-mortem", POSTMORTEM_MAX, every, async || {
        Ok(Some(scribe::told(&out)).filter(|told| told.contains_key(&node)))
    });
    let told = told.await.unwrap_or_else(|_| scribe::told(&out));
    let place = out.join(scribe::FILE);
    stage.screen.step(8, "EVENT", format!("{} wakes scribe: {}", scribe::WAKES, place.display()));
    let text = fs::read_to_string(&place).unwrap_or_else(|_| "it was not woken".into());
    let sentences =
        text.lines().filter(|line| line.starts_with("At ")).flat_map(|line| line.split_inclusive(". "));
    sentences.for_each(|sentence| stage.screen.detail(sentence.trim()));
    Ok(told)
}

/// Says which program is missing before anything else is started.
async fn needs(program: &str, by: &str) -> anyhow::Result<()> {
    let status =
        Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().await;
    ensure!(
        status.is_ok_and(|status| status.success()),
        "{program} is missing, and {by} needs it: install it, for example with apt-get install {program}"
    );
    Ok(())
}

async fn start_cluster(screen: &mut Screen, cast: &mut Cast) -> anyhow::Result<Cluster> {
    let begun = Instant::now();
    let mut command = cast.agent_reach();
    command.args(["dev", "--fresh", "--dir"]).arg(cast.folders.file("cluster"));
    cast.start(CLUSTER, "agent-reach dev", command)?;
    cast.guard(CLUSTER)?;
    screen.live("three nodes start");
    let log = cast.folders.log(CLUSTER);
    let is_ready =
        || fs::read_to_string(&log).is_ok_and(|text| text.lines().any(|line| line.starts_with("ready")));
    until("the cluster serves", CLUSTER_MAX, Duration::from_millis(20), async || {
        cast.check()?;
        Ok(is_ready().then_some(()))
    })
    .await?;
    let cluster = Cluster::connect(&cast.folders.context(), None).await?;
    let view = until("all nodes report", CLUSTER_MAX, Duration::from_millis(50), async || {
        let view = cluster.view(Duration::from_secs(2)).await.ok();
        Ok(view.filter(|view| view.leader.is_some() && view.nodes.iter().all(|node| node.report.is_some())))
    })
    .await?;
    let seconds = begun.elapsed().as_secs_f64();
    let nodes = view.nodes.len();
    screen.step(1, "CLUSTER", format!("{}     {nodes} nodes, mutual TLS, {seconds:.1} s", nodes_of(&view)));
    Ok(cluster)
}

fn nodes_of(view: &ClusterView) -> String {
    let nodes: Vec<String> = view
        .nodes
        .iter()
        .map(|node| {
            let pid = node.report.as_ref().map_or("-".into(), |report| report.pid.to_string());
            let leads = if view.leader == Some(node.node_id) { " LEADER" } else { "" };
            format!("{} pid {pid}{leads}", node.node_id)
        })
        .collect();
    nodes.join(" · ")
}

async fn start_agents(
    screen: &mut Screen,
    cast: &mut Cast,
    cluster: &Cluster,
    snapshot: &Snapshot,
    script: &Path,
) -> anyhow::Result<()> {
    screen.live("the agents start");
    for id in AGENTS.iter().map(|(id, _)| *id).chain(["scan_c"]) {
        cast.run_agent_reach(&["certs", "issue", "--agent", id]).await?;
    }
    for (id, arguments) in AGENTS {
        let mut command = cast.myself(id, arguments)?;
        match *id {
            "planner" => drop(command.arg("--jobs").arg(cast.folders.file("jobs"))),
            "scribe" => drop(command.arg("--logs").arg(cast.folders.file("cluster"))),
            _ => {}
        }
        cast.start(id, "Rust SDK", command)?;
    }
    let mut command = cast.agent_reach();
    command.args(["agents", "run", "--capability", unit::DOCS, "--id", "docs", "--", "python3"]);
    command.args(docs::arguments(script, snapshot)).arg("--ledger").arg(cast.folders.file("ledger.jsonl"));
    cast.start("docs", "agents run -- python3 docs.py", command)?;
    cast.guard("docs")?;

    let names: Vec<&str> = AGENTS.iter().map(|(name, _)| *name).chain(["docs"]).collect();
    let agents = until("every agent is ready", AGENTS_MAX, Duration::from_millis(50), async || {
        cast.check()?;
        cluster.all_ready(&names).await
    })
    .await?;
    screen.step(2, "WHO IS THERE", "");
    let head = ["agent", "capability", "weight", "state", "L1", "L2", "at", "connected by"];
    let mut rows = vec![head.map(String::from).to_vec()];
    rows.extend(agents.values().map(|view| row_of(view, cast)));
    for line in table(&rows) {
        screen.detail(line);
    }
    Ok(())
}

fn row_of(view: &AgentView, cast: &Cast) -> Vec<String> {
    let record = &view.record;
    let capabilities = &record.registration.capabilities;
    let names: Vec<String> = capabilities.iter().map(|capability| capability.name.to_string()).collect();
    let weights: Vec<String> = capabilities.iter().map(|capability| capability.weight.to_string()).collect();
    let age = |ms: u64| format!("{:.1} s", ms as f64 / 1000.0);
    let (level1, level2, at) = match view.heard {
        Some(heard) => (age(heard.level1_age_ms), age(heard.level2_age_ms), heard.node.to_string()),
        None => ("-".into(), "-".into(), "-".into()),
    };
    let member = cast.member(record.agent_id());
    let by = member.map_or("?".into(), |member| format!("{} (pid {})", member.what, member.pid));
    vec![
        record.agent_id().to_string(),
        names.join(" "),
        weights.join(" "),
        record.state.to_string(),
        level1,
        level2,
        at,
        by,
    ]
}

fn say_result(screen: &mut Screen, summary: &Summary) {
    let totals = &summary.totals;
    screen.step(
        4,
        "RESULT",
        format!(
            "REPORT.md and report.html: {} text files, {} lines, {} functions, {} commits",
            totals.files, totals.lines, totals.functions, totals.commits
        ),
    );
    let none = || "nothing found".to_string();
    let hot = summary.hot.first().map_or_else(none, |hot| {
        format!("{} ({} commits, {} branches)", hot.file, hot.commits, hot.branches)
    });
    let together =
        summary.together.first().map_or_else(none, |(a, b, n)| format!("{a} and {b} ({n} commits)"));
    let broken = summary.broken.first().map_or_else(none, |(file, line, target, why)| {
        format!("{} of {}, first {file}:{line} → {target} ({why})", totals.broken, totals.links)
    });
    let copies = summary.copies.first().map_or_else(none, |copy| {
        format!(
            "{}, longest {} lines: {}:{} and {}:{}",
            totals.copies, copy.lines, copy.here.file, copy.here.from, copy.there.file, copy.there.from
        )
    });
    let secrets = summary.secrets.first().map_or_else(none, |secret| {
        format!("{}, first {}:{} ({})", totals.secrets, secret.file, secret.line, secret.kind)
    });
    let rows = [
        ("most changed and most complex", hot),
        ("always change together", together),
        ("broken links", broken),
        ("copied blocks", copies),
        ("looks like a secret", secrets),
    ];
    for (name, text) in rows {
        screen.detail(format!("{name:<30} {text}"));
    }
    for remark in &summary.remarks {
        screen.detail(remark);
    }
}

fn say_verdict(screen: &mut Screen, evidence: &Evidence) -> bool {
    let lines = evidence.lines();
    for line in &lines {
        screen.detail(format!("{} {}", if line.holds { "✓" } else { "✗" }, line.text));
    }
    let too_little: Vec<_> = evidence.exercised().into_iter().filter(|line| !line.holds).collect();
    for line in &too_little {
        screen.detail(format!("✗ demo exercised too little: {}", line.text));
    }
    too_little.is_empty() && lines.iter().all(|line| line.holds)
}

fn say_what_to_try(screen: &mut Screen, cast: &Cast) {
    let home = cast.folders.file("home");
    screen.line("The cluster and the agents stay up. To try:");
    screen.line(format!("  export AGENT_REACH_HOME={}", home.display()));
    for command in [
        "cluster status",
        "agents ls",
        "trace t_checkup_1",
        "messages ls",
        "messages show j1.scan-000 --result",
    ] {
        screen.line(format!("  agent-reach {command}"));
    }
    let pids: Vec<String> = cast.pids().iter().map(ToString::to_string).collect();
    screen.line(format!("To end them: kill {}", pids.join(" ")));
}
