//! The faults: which there are, in which order they come, and how each is done and undone.

use std::{
    fmt, fs,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Context as _;
use fastrand::Rng;
use reach_protocol::NodeId;

use crate::Cluster;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    KillLeader,
    KillFollower,
    KillAll,
    PauseLeader,
    PauseFollower,
    /// The leader alone on one side.
    CutLeaderOff,
    /// A follower alone on one side; the leader keeps its majority.
    CutFollowerOff,
    /// What the leader says does not arrive at one follower.
    LeaderUnheardByOne,
    /// What one follower says does not arrive at the leader.
    LeaderDeafToOne,
    /// One node's calendar jumps by hours.
    ClockStep,
}

impl Fault {
    pub const ALL: [Self; 10] = [
        Self::KillLeader,
        Self::KillFollower,
        Self::KillAll,
        Self::PauseLeader,
        Self::PauseFollower,
        Self::CutLeaderOff,
        Self::CutFollowerOff,
        Self::LeaderUnheardByOne,
        Self::LeaderDeafToOne,
        Self::ClockStep,
    ];
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Every kind once, in an order of its own, then again and again.
#[derive(Debug)]
pub struct Schedule {
    rng: Rng,
    round: Vec<Fault>,
}

impl Schedule {
    pub fn new(seed: u64) -> Self {
        Self { rng: Rng::with_seed(seed), round: Vec::new() }
    }

    pub fn next_fault(&mut self) -> Fault {
        if self.round.is_empty() {
            self.round = Fault::ALL.to_vec();
            self.rng.shuffle(&mut self.round);
        }
        self.round.pop().expect("it was just filled")
    }

    /// How long it lasts: around the second in which a lost leader is replaced, and well beyond.
    pub fn lasts(&mut self) -> Duration {
        Duration::from_millis(self.rng.u64(500..3_500))
    }

    pub fn choose(&mut self, from: &[NodeId]) -> NodeId {
        from[self.rng.usize(..from.len())]
    }

    /// Hours, forth or back.
    fn step(&mut self) -> String {
        let hours = self.rng.u64(2..30);
        format!("{}{hours}h", if self.rng.bool() { '+' } else { '-' })
    }
}

/// What was done, so that it can be undone and looked at.
#[derive(Debug)]
pub struct Done {
    pub fault: Fault,
    /// Who suffers it.
    pub nodes: Vec<NodeId>,
    /// Without a majority, or a majority's ear: work there is refused.
    pub minority: Option<NodeId>,
}

/// Does one fault. The leader is asked for just before.
pub async fn strike(cluster: &mut Cluster, schedule: &mut Schedule, fault: Fault) -> anyhow::Result<Done> {
    let leader = cluster.leader().await?;
    let followers: Vec<NodeId> = cluster.node_ids().into_iter().filter(|id| *id != leader).collect();
    let follower = schedule.choose(&followers);
    let (nodes, minority) = match fault {
        Fault::KillLeader | Fault::PauseLeader => (vec![leader], None),
        Fault::KillFollower | Fault::PauseFollower => (vec![follower], None),
        Fault::KillAll => (cluster.node_ids(), None),
        Fault::CutLeaderOff => (vec![leader], Some(leader)),
        Fault::CutFollowerOff => (vec![follower], Some(follower)),
        Fault::LeaderUnheardByOne | Fault::LeaderDeafToOne => (vec![leader, follower], None),
        Fault::ClockStep => (vec![schedule.choose(&cluster.node_ids())], None),
    };
    match fault {
        Fault::KillLeader | Fault::KillFollower | Fault::KillAll => {
            nodes.iter().try_for_each(|id| cluster.kill(*id))?;
        }
        Fault::PauseLeader | Fault::PauseFollower => cluster.pause(nodes[0])?,
        Fault::CutLeaderOff | Fault::CutFollowerOff => cluster.proxy()?.isolate(index(nodes[0])),
        Fault::LeaderUnheardByOne => cluster.proxy()?.cut(index(leader), index(follower), true),
        Fault::LeaderDeafToOne => cluster.proxy()?.cut(index(follower), index(leader), true),
        Fault::ClockStep => {
            let file = cluster.clock_file(nodes[0]);
            write_clock(&file, &schedule.step())?;
        }
    }
    Ok(Done { fault, nodes, minority })
}

/// Undoes it. A stepped clock stays as it is until its next step: nobody puts clocks right at once.
pub fn undo(cluster: &mut Cluster, done: &Done) -> anyhow::Result<()> {
    match done.fault {
        Fault::KillLeader | Fault::KillFollower | Fault::KillAll => {
            done.nodes.iter().try_for_each(|id| cluster.spawn(*id))
        }
        Fault::PauseLeader | Fault::PauseFollower => cluster.resume(done.nodes[0]),
        Fault::ClockStep => Ok(()),
        _ => {
            cluster.proxy()?.heal();
            Ok(())
        }
    }
}

fn index(id: NodeId) -> usize {
    id.0 as usize - 1
}

/// In one step, so that no node reads half of it.
/// The library that shows a process another calendar.
pub fn faketime() -> anyhow::Result<PathBuf> {
    let folders = ["/usr/lib", "/usr/local/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu"];
    let mut files = folders.iter().map(|folder| Path::new(folder).join("faketime/libfaketimeMT.so.1"));
    let found = files.find(|file| file.exists());
    found.context("no calendar can be stepped: install faketime (scripts/setup.sh does)")
}

pub fn write_clock(file: &PathBuf, offset: &str) -> anyhow::Result<()> {
    let new = file.with_extension("new");
    fs::write(&new, offset)?;
    fs::rename(&new, file).context("the clock's file is replaced")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_holds_every_fault_and_a_seed_fixes_it() {
        let round = |seed| {
            let mut schedule = Schedule::new(seed);
            (0..Fault::ALL.len()).map(|_| schedule.next_fault()).collect::<Vec<_>>()
        };
        let mut sorted = round(7);
        sorted.sort();
        assert_eq!(sorted, Fault::ALL);
        assert_eq!(round(7), round(7));
        assert_ne!(round(7), round(8));
    }
}
