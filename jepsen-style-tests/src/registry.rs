//! The registry as a register: agents are registered and read by several callers at once, and each
//! agent's history must be linearizable. A removal names the run it means, so that one that is asked
//! again after a lost answer does nothing to what was registered meanwhile.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use fastrand::Rng;
use reach_client::{Client, Error};
use reach_protocol::{
    AgentId, Capability, Code, InstanceId, Json, Registration, Tag,
    frame::{Answer, Request},
};
use tokio::task::JoinHandle;

use crate::{
    Cluster,
    linearizable::{Action, Operation, is_linearizable},
};

/// Callers of one agent at a time, and operations on it before the next agent's turn: histories stay
/// short enough to be searched.
const CALLERS: usize = 3;
const TURN: usize = 12;
const TIMEOUT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(120);

type Histories = Arc<Mutex<BTreeMap<AgentId, Vec<Operation>>>>;

#[derive(Debug)]
pub struct RegistryLoad {
    stop: Arc<AtomicBool>,
    histories: Histories,
    driver: JoinHandle<anyhow::Result<()>>,
}

/// What was looked at, all of it linearizable.
#[derive(Debug, Default)]
pub struct RegistryVerdict {
    pub agents: usize,
    pub operations: usize,
    pub unknown: usize,
}

impl RegistryLoad {
    pub async fn start(cluster: &Cluster, seed: u64) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let histories = Histories::default();
        // One certificate may act for every agent `reg:…`.
        let mut clients = Vec::new();
        for _ in 0..CALLERS {
            clients.push(Client::connect(cluster.host_options("reg")?).await?);
        }
        let driver = tokio::spawn(drive(clients, stop.clone(), histories.clone(), seed));
        Ok(Self { stop, histories, driver })
    }

    /// Stops, and fails with the first history that could not have happened.
    pub async fn finish(self) -> anyhow::Result<RegistryVerdict> {
        self.stop.store(true, Ordering::Relaxed);
        self.driver.await??;
        let histories = self.histories.lock().expect("no panic while it is held").clone();
        let mut verdict = RegistryVerdict::default();
        for (agent_id, history) in histories {
            anyhow::ensure!(is_linearizable(&history), "{agent_id} is not linearizable: {history:#?}");
            verdict.agents += 1;
            verdict.operations += history.len();
            verdict.unknown += history.iter().filter(|operation| operation.ended.is_none()).count();
        }
        Ok(verdict)
    }
}

async fn drive(
    clients: Vec<Client>,
    stop: Arc<AtomicBool>,
    histories: Histories,
    seed: u64,
) -> anyhow::Result<()> {
    let began = Instant::now();
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let agent_id = AgentId::parse(&format!("reg:{turn}"))?;
        let callers: Vec<_> = clients
            .iter()
            .enumerate()
            .map(|(number, client)| {
                let caller = Caller {
                    client: client.clone(),
                    agent_id: agent_id.clone(),
                    number: number as u64,
                    rng: Rng::with_seed(seed ^ (turn * 16 + number as u64)),
                    began,
                };
                tokio::spawn(caller.run(stop.clone()))
            })
            .collect();
        let mut history = Vec::new();
        for caller in callers {
            history.extend(caller.await??);
        }
        histories.lock().expect("no panic while it is held").insert(agent_id, history);
    }
    Ok(())
}

struct Caller {
    client: Client,
    agent_id: AgentId,
    number: u64,
    rng: Rng,
    began: Instant,
}

impl Caller {
    async fn run(mut self, stop: Arc<AtomicBool>) -> anyhow::Result<Vec<Operation>> {
        let mut history = Vec::new();
        let mut seen = None;
        for i in 0..TURN as u64 {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let began = self.now();
            let value = self.number * 1_000 + i;
            let (asked, action) = match (self.rng.u8(..10), seen) {
                (0..5, _) => (self.register(value).await, Action::Write(Some(value))),
                (5..7, Some(held)) => (self.remove(held).await, Action::RemoveIf(held)),
                _ => match self.read().await {
                    Ok(read) => {
                        seen = read;
                        (Ok(()), Action::Read(read))
                    }
                    Err(error) => (Err(error), Action::Read(None)),
                },
            };
            match asked {
                Ok(()) => history.push(Operation { action, began, ended: Some(self.now()) }),
                // A client asks again by itself. `stale_instance` may be the answer to the second time,
                // when a later run has replaced what the first one wrote.
                Err(error) if matches!(error.code(), Code::OutcomeUnknown | Code::StaleInstance) => {
                    history.push(Operation { action, began, ended: None });
                }
                // Refused: nothing was done.
                Err(error) => {
                    let is_no = [Code::NoLeader, Code::NoMajority, Code::Overloaded];
                    anyhow::ensure!(is_no.contains(&error.code()), "{}: {error}", self.agent_id);
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(history)
    }

    fn now(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    async fn register(&self, value: u64) -> Result<(), Error> {
        let tag = Tag::parse("registry.test").expect("a legal tag");
        let mut registration = Registration::new(self.agent_id.clone(), vec![Capability::new(tag, 1.0)]);
        registration.metadata.insert("value".into(), Json::from_value(&value.into()));
        let instance = InstanceId::parse(&format!("i_{value}")).expect("a legal id");
        let request = Request::Register { registration: Box::new(registration), instance, uptime_ms: 0 };
        self.client.request(request, TIMEOUT).await.map(drop)
    }

    async fn remove(&self, value: u64) -> Result<(), Error> {
        let instance = InstanceId::parse(&format!("i_{value}")).expect("a legal id");
        let request = Request::Remove { agent_id: self.agent_id.clone(), instance: Some(instance) };
        self.client.request(request, TIMEOUT).await.map(drop)
    }

    async fn read(&self) -> Result<Option<u64>, Error> {
        match self.client.request(Request::Agent { agent_id: self.agent_id.clone() }, TIMEOUT).await {
            Ok(Answer::Agent(view)) => {
                let value = view.record.registration.metadata.get("value");
                Ok(value.and_then(|value| value.decode().ok()))
            }
            Ok(_) => Ok(None),
            Err(error) if error.code() == Code::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}
