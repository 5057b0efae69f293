//! Asks whoever can count words: `cargo run --example ask -- CONTEXT_DIR "some text"`.

use std::{env, time::Duration};

use reach_client::{Client, Options, protocol::Envelope};
use serde_json::json;

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut args = env::args().skip(1);
    let (Some(context), Some(text)) = (args.next(), args.next()) else {
        anyhow::bail!("usage: ask CONTEXT_DIR TEXT");
    };
    let client = Client::connect(Options::from_context(context)?).await?;
    let envelope = Envelope::request(vec!["text.word_count".parse()?], json!(text).into());
    let response = client.call(envelope, Duration::from_secs(30)).await?;
    match (response.result, response.error) {
        (Some(result), _) => println!("{}", result.as_str()),
        (None, Some(error)) => println!("{} ended {}: {error}", response.in_reply_to, response.status),
        (None, None) => println!("{} ended {}", response.in_reply_to, response.status),
    }
    client.close().await;
    Ok(())
}
