//! One agent of the SDK in a process of its own, to be killed or frozen.

use std::{io::BufRead as _, path::PathBuf, time::Duration};

use clap::Args;
use reach_client::{Agent, Done, Task};
use reach_protocol::{AgentId, Principal};

use crate::system::Target;

/// What stops the agent's own loop, on a line of its own; its heartbeats go on.
pub const FREEZE: &str = "freeze";
/// What it says once it is there.
pub const HERE: &str = "here";

#[derive(Clone, Debug, Args)]
pub struct Hold {
    #[arg(long)]
    pub context: PathBuf,
    #[arg(long)]
    pub agent: AgentId,
    #[arg(long)]
    pub inbox: PathBuf,
}

/// Until its input ends. On a runtime of one thread, which `freeze` stops.
pub fn run(hold: &Hold) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let target = Target::of(hold.context.clone());
        let options = target.options_of(Principal::Agent(hold.agent.clone()))?;
        let _running = Agent::builder(&*hold.agent)
            .capability("bench.hold", 1.0)
            .inbox_dir(&hold.inbox)
            .handler(|task: Task| async move { Ok(Done::new(task.payload())) })
            .connect(options)
            .await?;
        println!("{HERE}");
        let (said, order) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            let order = std::io::stdin().lock().lines().next();
            // Without a receiver the process is ending.
            let _ = said.send(order);
        });
        match order.await?.transpose()? {
            None => Ok(()),
            Some(order) if order == FREEZE => loop {
                std::thread::sleep(Duration::from_secs(3600));
            },
            Some(order) => anyhow::bail!("{order:?} is no order: {FREEZE} is"),
        }
    })
}
