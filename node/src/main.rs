//! The binary: reads the arguments, runs the command, and ends with its exit status.

use std::process::ExitCode;

use agent_reach::{
    cli::{
        Args, Failure, Output,
        args::{CertsCommand, ClusterCommand, Command},
        certs, certs_renew, cluster_new, context,
    },
    dev, exec, online, show,
};
use clap::Parser;
use reach_config::Contexts;

/// The C library's allocator keeps what a burst needed, and costs a tenth more CPU under load.
/// RocksDB keeps that one: a library that is preloaded, as `faketime` is, may not get on with another.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => return usage(&error),
    };
    let output = Output::new(&args.global);
    if let Command::Node(node) = &args.command {
        return agent_reach::node::process(node);
    }
    if let Command::RunGuard = &args.command {
        agent_reach::guard::run(std::io::stdin().lock());
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let result = match runtime {
        Ok(runtime) => runtime.block_on(run(args, output)),
        Err(error) => Err(Failure::refused(format!("no runtime: {error}"))),
    };
    match result {
        Ok(status) => status,
        Err(failure) => ExitCode::from(output.fail(&failure)),
    }
}

/// As clap says it, unless a program reads it. Help is no error.
fn usage(error: &clap::Error) -> ExitCode {
    match Output::wanted(std::env::args_os().skip(1)).filter(|_| error.use_stderr()) {
        Some(output) => ExitCode::from(output.fail(&Failure::arguments(error))),
        None => {
            // There is nowhere left to say that this could not be written.
            let _ = error.print();
            ExitCode::from(error.exit_code() as u8)
        }
    }
}

async fn run(args: Args, output: Output) -> Result<ExitCode, Failure> {
    if let Command::Problems = &args.command {
        let context = Contexts::of_this_user()?.current(args.global.context.as_deref())?;
        let found = online::problems(&context, &args.global, output).await?;
        return Ok(ExitCode::from(u8::from(found)));
    }
    perform(args, output).await.map(|()| ExitCode::SUCCESS)
}

async fn perform(args: Args, output: Output) -> Result<(), Failure> {
    let choice = args.global.context.as_deref();
    let contexts = || Contexts::of_this_user();
    match &args.command {
        Command::Node(_) | Command::RunGuard => unreachable!("they have no runtime, or one of their own"),
        Command::Dev(options) => {
            let dir =
                options.dir.clone().map_or_else(|| contexts().map(|all| all.home().join(dev::DEV)), Ok)?;
            let (fresh, restart) = (options.fresh, !options.no_restart);
            let options =
                dev::Options { dir, nodes: options.nodes.into(), port: options.port, fresh, restart };
            dev::run(options).await.map_err(Failure::from)
        }
        Command::Version => output.print(&show::version()),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            Args::completions(*shell, &mut text);
            output.print_text(&String::from_utf8_lossy(&text))
        }
        Command::Context(command) => output.print(&context::run(command, &contexts()?)?),
        Command::Cluster(ClusterCommand::New(new)) => output.print(&cluster_new::run(new)?),
        Command::Certs(CertsCommand::Issue(issue)) => {
            output.print(&certs::issue(issue, &contexts()?, choice)?)
        }
        Command::Certs(CertsCommand::Ls { dir }) => {
            let contexts = contexts()?;
            let known = online::revocations(contexts.current(choice), &args.global).await;
            output.print(&certs::ls(dir.as_deref(), &contexts, choice, &known)?)
        }
        Command::Certs(CertsCommand::Renew(renew)) => {
            output.print(&certs_renew::run(renew, &contexts()?, choice)?)
        }
        Command::Agents(agent_reach::cli::args::AgentsCommand::Run(run)) => {
            exec::serve(run, &contexts()?, &args.global).await
        }
        command => online::run(command, &contexts()?.current(choice)?, &args.global, output).await,
    }
}
