//! A plain measurement against the context's cluster: submissions and whole round trips per second.
//!
//! `cargo run -p reach-client --example measure -- CONTEXT_DIR AGENT_ID IN_FLIGHT SECONDS`
//! with a context that may act as AGENT_ID (`agents/AGENT_ID.pem`).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use reach_client::{
    Agent, Client, Done, Error, Options, Task,
    protocol::{AgentId, Envelope, Json, Tag},
};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [dir, agent_id, in_flight, seconds] = &args[..] else {
        return Err(Error::Invalid("give CONTEXT_DIR AGENT_ID IN_FLIGHT SECONDS".into()));
    };
    let in_flight: usize = in_flight.parse().map_err(|_| Error::Invalid("IN_FLIGHT is a number".into()))?;
    let seconds: u64 = seconds.parse().map_err(|_| Error::Invalid("SECONDS is a number".into()))?;
    let agent_id = AgentId::parse(agent_id).map_err(|error| Error::Invalid(error.to_string()))?;

    let inbox = std::env::temp_dir().join(format!("measure-{}", std::process::id()));
    let agent = Agent::builder(agent_id.as_str())
        .capability("measure.echo", 1.0)
        .max_concurrency(10_000)
        .inbox_dir(&inbox)
        .handler(|_: Task| async { Ok(Done::new(Json::null())) })
        .connect(Options::from_context_as(dir, &agent_id)?)
        .await?;
    let client = Client::connect(Options::from_context(dir)?).await?;

    for (name, wait) in [("submissions", false), ("round trips", true)] {
        let stop = Arc::new(AtomicBool::new(false));
        let tasks: Vec<_> =
            (0..in_flight).map(|_| tokio::spawn(ask(client.clone(), wait, stop.clone()))).collect();
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        stop.store(true, Ordering::Relaxed);
        let mut times = Vec::new();
        for task in tasks {
            times.extend(task.await.expect("the task does not panic")?);
        }
        times.sort();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e3;
        println!(
            "{name}: {in_flight} in flight · {:.0}/s · p50 {:.2} ms · p99 {:.2} ms",
            times.len() as f64 / seconds as f64,
            at(0.5),
            at(0.99)
        );
    }
    agent.shutdown().await;
    let _ = std::fs::remove_dir_all(&inbox);
    Ok(())
}

async fn ask(client: Client, wait: bool, stop: Arc<AtomicBool>) -> Result<Vec<Duration>, Error> {
    let payload = Json::from_value(&"x".repeat(254).into());
    let tag = Tag::parse("measure.echo").expect("a legal capability");
    let mut times = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let envelope = Envelope::request(vec![tag.clone()], payload.clone());
        let started = Instant::now();
        match wait {
            true => drop(client.call(envelope, Duration::from_secs(30)).await?),
            false => drop(client.submit(envelope).await?),
        }
        times.push(started.elapsed());
    }
    Ok(times)
}
