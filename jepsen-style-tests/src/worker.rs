//! Agents of the workload: they square a number, and write every start of a unit of work into a
//! ledger that no part of the product sees.

use std::sync::{Arc, Mutex};

use reach_client::{Agent, Done, Failure, RunningAgent, Task};
use reach_protocol::{AgentId, Json, MsgId};

use crate::cluster::{Cluster, inbox_dir};

/// Which message was started, in order. A handler may run again; a result is recorded once.
pub type Ledger = Arc<Mutex<Vec<MsgId>>>;

#[derive(Debug)]
pub struct Worker {
    pub running: RunningAgent,
}

impl Worker {
    /// Attaches an agent with the capability `square`.
    pub async fn start(
        cluster: &Cluster,
        agent_id: &str,
        slots: u32,
        ledger: Ledger,
    ) -> anyhow::Result<Self> {
        let options = cluster.agent_options(&AgentId::parse(agent_id)?)?;
        let running = Agent::builder(agent_id)
            .capability("square", 1.0)
            .max_concurrency(slots)
            .inbox_dir(inbox_dir(cluster, agent_id))
            .handler(move |task: Task| {
                let ledger = ledger.clone();
                async move { square(&ledger, &task) }
            })
            .connect(options)
            .await?;
        Ok(Self { running })
    }
}

fn square(ledger: &Ledger, task: &Task) -> Result<Done, Failure> {
    ledger.lock().expect("no panic while it is held").push(task.msg_id.clone());
    let number: u64 = task.decode()?;
    Ok(Done::new(Json::from_value(&squared(number))))
}

/// What a correct answer to `number` is.
pub fn squared(number: u64) -> serde_json::Value {
    serde_json::json!({ "number": number, "square": number * number })
}
