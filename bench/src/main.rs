//! `reach-bench`: `run` measures side by side, `drive` loads any cluster.

use std::{fs, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};
use reach_bench::{
    agents::{crowd, detect, hold},
    failover,
    host::Host,
    idle,
    load::Load,
    report::{self, Measured, Ratio, Report, Settings},
    side_by_side::{Cell, Plan, Row},
    system::{Acks, Programs, SERVERS, System, Target, Via, Work},
};
use tokio::signal::unix::{SignalKind, signal};

/// How long what `drive` has submitted may outlive the measurement.
const LEFT_MAX: Duration = Duration::from_secs(30);
/// How long a cluster settles before agents come, and after they did.
const SETTLE: Duration = Duration::from_secs(10);

#[derive(Debug, Parser)]
#[command(
    name = "reach-bench",
    version,
    about = "The same work against Agent-Reach and its rivals, side by side"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Everything: the work, the failover, the idle clusters, ratios and bars.
    Run(Run),
    /// Only `kill -9` of the leader.
    Failover(SideBySide),
    /// Only what idle clusters cost.
    Idle(SideBySide),
    /// Only agents that are there: a crowd's cost, and how soon it shows that one is not.
    Agents(AgentsOnly),
    /// The work against a cluster that runs already.
    Drive(Drive),
    /// For `agents`: one agent in a process of its own.
    #[command(hide = true)]
    Hold(hold::Hold),
}

#[derive(Debug, Args)]
struct Run {
    #[command(flatten)]
    side_by_side: SideBySide,
    #[command(flatten)]
    work: WorkOptions,
    #[command(flatten)]
    agents: Agents,
    /// Which server the load is connected to.
    #[arg(long, value_enum, default_value = "leader")]
    via: Via,
    /// Leave out the failover, the idle clusters and the agents.
    #[arg(long)]
    work_only: bool,
}

#[derive(Debug, Args)]
struct AgentsOnly {
    #[command(flatten)]
    side_by_side: SideBySide,
    #[command(flatten)]
    agents: Agents,
}

#[derive(Debug, Args)]
struct Agents {
    /// Agents and connections of each crowd.
    #[arg(long, value_parser = parse_crowd, value_name = "AGENTS/CONNECTIONS", value_delimiter = ',', default_values = ["100000/1000", "10000/10000"])]
    crowds: Vec<(usize, usize)>,
    /// Seconds that a crowd is watched.
    #[arg(long, default_value_t = 30)]
    watch_secs: u64,
    /// So many agents are killed, and as many frozen. 0: none.
    #[arg(long, default_value_t = 100)]
    detect: usize,
}

fn parse_crowd(text: &str) -> Result<(usize, usize), String> {
    let parts = text.split_once('/').and_then(|(agents, connections)| {
        Some((agents.parse::<usize>().ok()?, connections.parse::<usize>().ok()?))
    });
    parts
        .filter(|(agents, connections)| (1..=*agents).contains(connections))
        .ok_or_else(|| "give AGENTS/CONNECTIONS, such as 1000/10".into())
}

#[derive(Debug, Args)]
struct SideBySide {
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["ours", "jetstream-always", "jetstream-default", "etcd"])]
    systems: Vec<System>,
    /// Default: beside this program.
    #[arg(long)]
    agent_reach: Option<PathBuf>,
    #[arg(long, env = "NATS_SERVER", default_value = "nats-server")]
    nats_server: PathBuf,
    #[arg(long, env = "ETCD", default_value = "etcd")]
    etcd: PathBuf,
    /// Where servers keep their data, on a real disk; removed afterwards. Default: the folder for
    /// temporary files.
    #[arg(long)]
    data: Option<PathBuf>,
    /// Whether JetStream's workers wait until their acknowledgements are confirmed.
    #[arg(long, value_enum, default_value = "confirmed")]
    acks: Acks,
    /// How often the leader is killed, for each system.
    #[arg(long, default_value_t = 5)]
    kills: usize,
    /// Seconds that an idle cluster settles, and is then watched.
    #[arg(long, default_value_t = 10)]
    idle_secs: u64,
    /// Write everything that was found out.
    #[arg(long)]
    json: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
struct WorkOptions {
    #[arg(long, value_enum, value_delimiter = ',', default_values = ["submit", "worked", "round-trip"])]
    work: Vec<Work>,
    /// Operations under way at a time.
    #[arg(long, value_delimiter = ',', default_values = ["1", "64", "256"])]
    in_flight: Vec<usize>,
    /// Bytes of a message's content.
    #[arg(long, value_delimiter = ',', default_values = ["256", "1024"])]
    size: Vec<usize>,
    /// Seconds that count, of each repetition.
    #[arg(long, default_value_t = 5.0)]
    secs: f64,
    /// Seconds before them that don't.
    #[arg(long, default_value_t = 2.0)]
    warm_up: f64,
    #[arg(long, default_value_t = 3)]
    reps: usize,
}

#[derive(Debug, Args)]
struct Drive {
    /// A context folder: `~/.agent-reach/contexts/dev`, or a cluster's `admin` folder.
    #[arg(long)]
    context: PathBuf,
    #[command(flatten)]
    work: WorkOptions,
    /// The nodes' processes, when they run on this machine: for CPU and memory.
    #[arg(long, value_delimiter = ',')]
    pids: Vec<u32>,
    /// Where the load's agent keeps its inbox.
    #[arg(long)]
    data: Option<PathBuf>,
    #[arg(long)]
    json: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    let work = async {
        match Cli::parse().command {
            Command::Run(options) => run(options).await,
            Command::Failover(options) => part(options, Part::Failover).await,
            Command::Idle(options) => part(options, Part::Idle).await,
            Command::Agents(options) => agents_only(options).await,
            Command::Drive(options) => drive(options).await,
            Command::Hold(options) => tokio::task::spawn_blocking(move || hold::run(&options)).await?,
        }
    };
    let ended = tokio::select! {
        ended = work => ended,
        // Dropping the work ends the servers and removes their data.
        signal = asked_to_stop() => Err(anyhow::anyhow!("stopped by {signal}")),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("reach-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn asked_to_stop() -> &'static str {
    let terminated = async {
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => terminate.recv().await,
            // Without it there is still Ctrl-C.
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = terminated => "SIGTERM",
        _ = tokio::signal::ctrl_c() => "Ctrl-C",
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Part {
    Failover,
    Idle,
}

/// Resolves what was asked for, and says what is measured on what.
fn plan(options: &SideBySide, work: Option<&WorkOptions>, via: Via) -> anyhow::Result<(Plan, Report)> {
    let beside = || Ok::<_, anyhow::Error>(std::env::current_exe()?.with_file_name("agent-reach"));
    let programs = Programs {
        agent_reach: options.agent_reach.clone().map_or_else(beside, Ok)?,
        nats_server: options.nats_server.clone(),
        etcd: options.etcd.clone(),
    };
    let data = options.data.clone().unwrap_or_else(std::env::temp_dir);
    let host = Host::of(&data);
    println!("{host}");
    for doubt in host.doubts() {
        println!("! {doubt}");
    }
    let (mut systems, mut left_out) = (Vec::new(), Vec::new());
    for system in &options.systems {
        match system.version(&programs) {
            Ok(version) => {
                println!("  {:<18} {version}", system.name());
                systems.push(Measured { system: *system, version });
            }
            Err(error) => {
                println!("  {:<18} left out: {error:#}", system.name());
                left_out.push((*system, format!("{error:#}")));
            }
        }
    }
    anyhow::ensure!(!systems.is_empty(), "none of the systems can be started");
    let seconds = |value: fn(&WorkOptions) -> f64| work.map(value).unwrap_or_default();
    let plan = Plan {
        systems: systems.iter().map(|measured| measured.system).collect(),
        works: work.map(|work| work.work.clone()).unwrap_or_default(),
        in_flight: work.map(|work| work.in_flight.clone()).unwrap_or_default(),
        sizes: work.map(|work| work.size.clone()).unwrap_or_default(),
        warm_up: Duration::try_from_secs_f64(seconds(|work| work.warm_up))?,
        counted: Duration::try_from_secs_f64(seconds(|work| work.secs))?,
        repetitions: work.map_or(0, |work| work.reps),
        via,
        acks: options.acks,
        programs,
        data,
    };
    let settings = Settings {
        servers: SERVERS,
        warm_up_s: plan.warm_up.as_secs_f64(),
        counted_s: plan.counted.as_secs_f64(),
        repetitions: plan.repetitions,
        via,
        acks: options.acks,
    };
    let report = Report {
        host,
        systems,
        left_out,
        settings,
        rows: Vec::new(),
        ratios: Vec::new(),
        failover: Vec::new(),
        idle: Vec::new(),
        crowds: Vec::new(),
        detect: None,
        bars: Vec::new(),
    };
    Ok((plan, report))
}

async fn run(options: Run) -> anyhow::Result<()> {
    let side_by_side = &options.side_by_side;
    let (plan, mut report) = plan(side_by_side, Some(&options.work), options.via)?;
    let each = plan.warm_up + plan.counted;
    println!(
        "{} measurements of {each:?}, every one on a cluster of its own; median (range) of {}",
        plan.measurements(),
        plan.repetitions
    );
    report.rows = plan.run(|row| print!("{}", report::row(row))).await;
    let parts = async {
        if !options.work_only {
            report.failover = failover(&plan, side_by_side).await?;
            report.idle = idle(&plan, side_by_side).await?;
            agents(&plan, &options.agents, &mut report).await?;
        }
        Ok(())
    };
    // What was measured is said and written, whatever became of the rest.
    let parts = parts.await;
    finish(report, side_by_side.json.as_deref()).and(parts)
}

async fn part(options: SideBySide, part: Part) -> anyhow::Result<()> {
    let (plan, mut report) = plan(&options, None, Via::Leader)?;
    match part {
        Part::Failover => report.failover = failover(&plan, &options).await?,
        Part::Idle => report.idle = idle(&plan, &options).await?,
    }
    finish(report, options.json.as_deref())
}

async fn agents_only(options: AgentsOnly) -> anyhow::Result<()> {
    let (plan, mut report) = plan(&options.side_by_side, None, Via::Leader)?;
    let measured = agents(&plan, &options.agents, &mut report).await;
    finish(report, options.side_by_side.json.as_deref()).and(measured)
}

async fn agents(plan: &Plan, options: &Agents, report: &mut Report) -> anyhow::Result<()> {
    for (agents, connections) in options.crowds.iter().copied() {
        let watched = Duration::from_secs(options.watch_secs);
        let crowd = crowd::Plan { agents, connections, settle: SETTLE, watched };
        let found = crowd::measure(&plan.programs, &plan.data, &crowd).await;
        let found = found.with_context(|| format!("{agents} agents over {connections} connections"))?;
        print!("{}", report::crowd(&found));
        report.crowds.push(found);
    }
    if options.detect > 0 {
        let holder = std::env::current_exe()?;
        let detect = detect::Plan { each: options.detect, settle: SETTLE, holder };
        let found =
            detect::measure(&plan.programs, &plan.data, &detect).await.context("killed and frozen agents")?;
        print!("{}", report::detect(&found));
        report.detect = Some(found);
    }
    Ok(())
}

async fn failover(plan: &Plan, options: &SideBySide) -> anyhow::Result<Vec<failover::Failover>> {
    let found = failover::measure(plan, options.kills).await?;
    print!("{}", report::failovers(&found));
    Ok(found)
}

async fn idle(plan: &Plan, options: &SideBySide) -> anyhow::Result<Vec<idle::Idle>> {
    let found = idle::measure(plan, Duration::from_secs(options.idle_secs)).await?;
    print!("{}", report::idles(&found));
    Ok(found)
}

fn finish(mut report: Report, json: Option<&std::path::Path>) -> anyhow::Result<()> {
    report.ratios = report.rows.iter().flat_map(report::ratios).collect::<Vec<Ratio>>();
    report.bars = report::bars(&report);
    if !report.bars.is_empty() {
        print!("{}", report::judged(&report.bars));
    }
    write_json(&report, json)?;
    let failed: usize = report.rows.iter().map(|row| row.failed.len()).sum();
    anyhow::ensure!(failed == 0, "{failed} could not be measured; FAILED above says why");
    Ok(())
}

fn write_json(value: &impl serde::Serialize, path: Option<&std::path::Path>) -> anyhow::Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = serde_json::to_string_pretty(value)?;
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

async fn drive(options: Drive) -> anyhow::Result<()> {
    let Drive { context, work, pids, data, json } = options;
    let inboxes = tempfile::tempdir_in(data.unwrap_or_else(std::env::temp_dir))?;
    let (warm_up, counted) =
        (Duration::try_from_secs_f64(work.warm_up)?, Duration::try_from_secs_f64(work.secs)?);
    // The cluster is somebody's: what nobody takes goes soon.
    let expires_in = warm_up + counted + LEFT_MAX;
    let target = Target { context, inboxes: inboxes.path().to_owned(), expires_in };
    let view = target.view().await?;
    println!("cluster {} · {} nodes · term {}", view.cluster, view.nodes.len(), view.term);
    let mut rows = Vec::new();
    for kind in &work.work {
        for size in &work.size {
            for in_flight in &work.in_flight {
                let load = Load { in_flight: *in_flight, warm_up, counted };
                let mut windows = Vec::new();
                for _ in 0..work.reps {
                    let worker = target.prepare(*kind, *in_flight, None).await?;
                    let ask = target.asker(*kind, *size, None).await?;
                    let worked = (*kind == Work::Worked).then_some(&*worker.done);
                    windows.push(load.run(&ask, &pids, worked).await?);
                }
                let cells = Cell::of(System::Ours, &windows).into_iter().collect();
                let row = Row { work: *kind, size: *size, in_flight: *in_flight, cells, failed: Vec::new() };
                print!("{}", report::row(&row));
                rows.push(row);
            }
        }
    }
    write_json(&rows, json.as_deref())
}
