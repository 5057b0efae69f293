//! An agent that counts words. Start it with a context folder and an inbox folder:
//! `cargo run --example word_count -- CONTEXT_DIR INBOX_DIR`.

use std::env;

use reach_client::{Agent, Done, Options, Stopped, Task, protocol::AgentId};
use serde_json::json;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = env::args().skip(1);
    let (Some(context), Some(inbox)) = (args.next(), args.next()) else {
        anyhow::bail!("usage: word_count CONTEXT_DIR INBOX_DIR");
    };
    let options = Options::from_context_as(context, &AgentId::parse("word_count")?)?;
    let agent = Agent::builder("word_count")
        .capability("text.word_count", 1.0)
        .inbox_dir(inbox)
        .handler(|task: Task| async move {
            let text: String = task.decode()?;
            let words = text.split_whitespace().count();
            Ok(Done::new(json!({ "words": words })).excerpt(format!("{words} words")))
        })
        .connect(options)
        .await?;
    println!("{} is ready; Ctrl-C ends it", agent.agent_id());
    match agent.serve().await {
        Stopped::Asked => Ok(()),
        stopped => anyhow::bail!("stopped: {stopped:?}"),
    }
}
