//! The systems that are measured. Each starts three servers on loopback, says who leads, and gives
//! out operations; what one operation promises is the same for all.

mod etcd;
mod jetstream;
mod ours;

use std::{
    any::Any,
    fmt,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use anyhow::Context as _;
use clap::ValueEnum;
use serde::Serialize;
use tokio::time::{Instant, sleep};

pub use self::ours::{Ours, Target, agents_in};
use self::{etcd::Etcd, jetstream::JetStream};
use crate::{load::Ask, process::Servers};

/// Every cluster has as many servers, and every write is on as many disks.
pub const SERVERS: usize = 3;
/// How long a cluster may take until it serves.
pub(crate) const READY_MAX: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(50);
/// For one operation. Nobody's default is used: it would decide what a fault looks like.
const ANSWER_MAX: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum System {
    Ours,
    /// NATS JetStream that writes through to the disk before it confirms.
    #[value(name = "jetstream-always")]
    JetstreamAlways,
    /// NATS JetStream as it comes: on the disk within two minutes.
    #[value(name = "jetstream-default")]
    JetstreamDefault,
    Etcd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// A message is stored, three times, and confirmed; nobody takes it.
    Submit,
    /// The same, with a worker that takes them away meanwhile.
    Worked,
    /// Stored, delivered, worked on, the answer stored, and back at the asker.
    RoundTrip,
}

/// What is said about acknowledgements between a rival and its workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Acks {
    /// The server confirms that it has taken note.
    Confirmed,
    /// Sent and hoped for.
    Plain,
}

/// Which server the load is connected to, asker and worker alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Via {
    Leader,
    Follower,
}

impl Via {
    pub fn server(self, leader: usize) -> usize {
        match self {
            Self::Leader => leader,
            Self::Follower => (leader + 1) % SERVERS,
        }
    }
}

/// The programs that were found.
#[derive(Clone, Debug)]
pub struct Programs {
    pub agent_reach: PathBuf,
    pub nats_server: PathBuf,
    pub etcd: PathBuf,
}

impl System {
    pub fn program(self, programs: &Programs) -> &Path {
        match self {
            Self::Ours => &programs.agent_reach,
            Self::JetstreamAlways | Self::JetstreamDefault => &programs.nats_server,
            Self::Etcd => &programs.etcd,
        }
    }

    /// What its program says it is; fails when there is none.
    pub fn version(self, programs: &Programs) -> anyhow::Result<String> {
        let program = self.program(programs);
        let output = Command::new(program)
            .arg("--version")
            .output()
            .with_context(|| format!("{} does not run", program.display()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().next().with_context(|| format!("{} has no version", program.display()))?;
        Ok(line.trim().to_owned())
    }

    pub fn does(self, work: Work) -> bool {
        self != Self::Etcd || work == Work::Submit
    }

    pub fn name(self) -> String {
        name_of(self)
    }
}

impl Work {
    pub fn name(self) -> String {
        name_of(self)
    }
}

fn name_of(value: impl ValueEnum) -> String {
    value.to_possible_value().expect("none is skipped").get_name().to_owned()
}

/// Whoever takes the messages, until it is dropped.
pub struct Worker {
    /// What it has finished.
    pub done: Arc<AtomicU64>,
    _running: Vec<Box<dyn Any + Send>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("done", &self.done).finish_non_exhaustive()
    }
}

/// A cluster of one of the systems, with nothing in it when it starts.
#[derive(Debug)]
pub struct Cluster {
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Ours(Ours),
    JetStream(JetStream),
    Etcd(Etcd),
}

impl Cluster {
    /// Returns when all three servers serve.
    pub async fn start(system: System, programs: &Programs, data: &Path, acks: Acks) -> anyhow::Result<Self> {
        let servers = Servers::none(data)?;
        let program = system.program(programs);
        let kind = match system {
            System::Ours => Kind::Ours(Ours::start(program, servers).await?),
            System::JetstreamAlways => Kind::JetStream(JetStream::start(program, servers, true, acks).await?),
            System::JetstreamDefault => {
                Kind::JetStream(JetStream::start(program, servers, false, acks).await?)
            }
            System::Etcd => Kind::Etcd(Etcd::start(program, servers).await?),
        };
        Ok(Self { kind })
    }

    pub fn servers(&self) -> &Servers {
        match &self.kind {
            Kind::Ours(ours) => &ours.servers,
            Kind::JetStream(jetstream) => &jetstream.servers,
            Kind::Etcd(etcd) => &etcd.servers,
        }
    }

    fn servers_mut(&mut self) -> &mut Servers {
        match &mut self.kind {
            Kind::Ours(ours) => &mut ours.servers,
            Kind::JetStream(jetstream) => &mut jetstream.servers,
            Kind::Etcd(etcd) => &mut etcd.servers,
        }
    }

    pub fn kill(&mut self, server: usize) -> anyhow::Result<()> {
        self.servers_mut().kill(server)
    }

    pub fn all_run(&mut self) -> anyhow::Result<()> {
        self.servers_mut().all_run()
    }

    /// Makes what the work needs, and starts who takes it.
    pub async fn prepare(&self, work: Work, in_flight: usize, via: Via) -> anyhow::Result<Worker> {
        match &self.kind {
            Kind::Ours(ours) => {
                let server = via.server(self.leader().await?);
                ours.target.prepare(work, in_flight, Some(server)).await
            }
            Kind::JetStream(jetstream) => jetstream.prepare(work, via).await,
            Kind::Etcd(_) => Ok(Worker { done: Arc::default(), _running: Vec::new() }),
        }
    }

    /// The server that orders the writes of what was prepared. On a busy machine there may be none
    /// for a moment, which is waited for.
    pub async fn leader(&self) -> anyhow::Result<usize> {
        let deadline = Instant::now() + READY_MAX;
        loop {
            let leader = match &self.kind {
                Kind::Ours(ours) => ours.leader().await,
                Kind::JetStream(jetstream) => jetstream.leader().await,
                Kind::Etcd(etcd) => etcd.leader().await,
            };
            if leader.is_ok() || Instant::now() > deadline {
                return leader;
            }
            sleep(POLL).await;
        }
    }

    /// Operations with messages of `size` bytes, over one connection to one of the servers.
    pub async fn asker(&self, work: Work, size: usize, server: usize) -> anyhow::Result<Ask> {
        match &self.kind {
            Kind::Ours(ours) => ours.asker(work, size, server).await,
            Kind::JetStream(jetstream) => jetstream.asker(work, size, server).await,
            Kind::Etcd(etcd) => etcd.asker(size, server).await,
        }
    }
}
