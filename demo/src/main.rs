//! The demo: agents as processes of their own check up a git repository through a three-node
//! cluster, a worker and then the leader are killed, and a check that does not use the product says
//! whether all is well.

mod agent;
mod analyse;
mod cast;
mod cluster;
mod cut;
mod docs;
mod failover;
mod findings;
mod jobs;
mod ledger;
mod orchestrator;
mod planner;
mod recompute;
mod report;
mod screen;
mod scribe;
mod snapshot;
mod summary;
mod trace;
mod unit;
mod verdict;
mod waterfall;

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(
    name = "reach-demo",
    about = "A check-up of a repository by agents, with things going wrong",
    version
)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    demo: Demo,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Clone, Debug, Args)]
struct Demo {
    /// The repository to check up; it is only read.
    #[arg(long, default_value = ".")]
    repo: PathBuf,
    /// Leave the cluster and the agents running, and print commands to try.
    #[arg(long)]
    keep: bool,
    /// The one folder that is written to.
    #[arg(long, default_value = "demo-out")]
    out: PathBuf,
    /// The product's binary. Default: beside this program, or else on the path.
    #[arg(long)]
    agent_reach: Option<PathBuf>,
}

/// What the demo starts itself as.
#[derive(Debug, Subcommand)]
enum Role {
    /// An agent of the cast.
    #[command(hide = true)]
    Agent {
        kind: agent::Kind,
        #[arg(long)]
        id: String,
        #[arg(long, default_value_t = 1.0)]
        weight: f64,
        #[command(flatten)]
        place: agent::Place,
    },
    /// The agent that plans.
    #[command(hide = true)]
    Planner {
        #[arg(long)]
        id: String,
        /// The folder for its own record of each job.
        #[arg(long)]
        jobs: PathBuf,
        #[command(flatten)]
        place: agent::Place,
    },
    /// The agent that writes the post-mortem.
    #[command(hide = true)]
    Scribe {
        #[arg(long)]
        id: String,
        /// The cluster's folder, with a log in each node's.
        #[arg(long)]
        logs: PathBuf,
        #[command(flatten)]
        place: agent::Place,
    },
}

#[tokio::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.role {
        Some(Role::Agent { kind, id, weight, place }) => {
            agent::run(kind, &id, weight, place).await.map(|()| true)
        }
        Some(Role::Planner { id, jobs, place }) => planner::run(&id, &jobs, place).await.map(|()| true),
        Some(Role::Scribe { id, logs, place }) => scribe::run(&id, logs, place).await.map(|()| true),
        None => {
            let agent_reach = cli.demo.agent_reach.unwrap_or_else(beside_this_program);
            orchestrator::run(&cli.demo.repo, &cli.demo.out, agent_reach, cli.demo.keep).await
        }
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("reach-demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn beside_this_program() -> PathBuf {
    let beside = std::env::current_exe().ok().map(|path| path.with_file_name("agent-reach"));
    beside.filter(|path| path.is_file()).unwrap_or_else(|| "agent-reach".into())
}
