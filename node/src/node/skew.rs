//! Whose calendar is off: nodes and agents by their offsets against the cluster's. Nothing is decided by
//! it; people compare times, and an expired date is first of all a wrong clock.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use reach_protocol::{AgentId, NodeId};

use super::Shared;

/// From here on, either way, an offset is pointed out. In milliseconds.
pub const SKEW_MS: u64 = 500;
/// How often offsets are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    Node(NodeId),
    Agent(AgentId),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => write!(f, "node {node}"),
            Self::Agent(agent_id) => write!(f, "agent {agent_id}"),
        }
    }
}

/// A calendar that is off by more than `SKEW_MS`. As text, a sentence that says what to check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skewed {
    pub who: Who,
    /// As it is known here: a node's address, or what the agent's registration says.
    pub host: Option<String>,
    /// Its calendar minus the cluster's.
    pub offset_ms: i64,
    /// Whose calendar is the cluster's.
    pub leader: Option<NodeId>,
    /// Most nodes are off, so it is rather the leader's calendar that is wrong.
    pub most_are: bool,
}

impl fmt::Display for Skewed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, host, offset_ms, leader, most_are } = self;
        let host = host.as_ref().map_or(String::new(), |host| format!(" on {host}"));
        let way = if *offset_ms > 0 { "ahead of" } else { "behind" };
        let by = crate::show::span(offset_ms.unsigned_abs());
        let leaders = leader.map_or(String::new(), |leader| format!(" (node {leader}'s)"));
        write!(f, "the clock of {who}{host} is {by} {way} the cluster's{leaders}: ")?;
        match leader.filter(|_| *most_are) {
            Some(leader) => write!(
                f,
                "most nodes differ, so check the clock of node {leader} first, whether NTP runs there"
            ),
            None => f.write_str("check that host's clock, whether NTP runs there"),
        }
    }
}

pub fn is_skewed(offset_ms: i64) -> bool {
    offset_ms.unsigned_abs() > SKEW_MS
}

impl Shared {
    /// Every node and every agent that is not offline whose calendar is off, nodes first. Known on
    /// every node alike, a second after the node that holds the agent.
    pub fn skewed(&self) -> Vec<Skewed> {
        let now_ms = self.clock.mono_ms();
        let leader = self.replica.leadership().borrow().leader;
        let members = self.members();
        let nodes: Vec<_> = members
            .iter()
            .filter_map(|(id, member)| {
                let offset_ms = self.heartbeats.offset_of_node(now_ms, *id).filter(|ms| is_skewed(*ms))?;
                let host = member.peer_addr.rsplit_once(':').map(|(host, _)| host.to_string());
                Some(Skewed { who: Who::Node(*id), host, offset_ms, leader, most_are: false })
            })
            .collect();
        let most_are = nodes.len() * 2 > members.len();
        let mut agents = Vec::new();
        self.heartbeats.each_offset(|agent_id, offset_ms| {
            if is_skewed(offset_ms) {
                agents.push((agent_id.clone(), offset_ms));
            }
        });
        agents.sort();
        let live = self.replica.tables().live();
        let agents = agents.into_iter().map(|(agent_id, offset_ms)| {
            let record = live.agents.get(&agent_id);
            let host = record.and_then(|record| record.registration.host.clone());
            Skewed { who: Who::Agent(agent_id), host, offset_ms, leader, most_are }
        });
        nodes.into_iter().map(|node| Skewed { most_are, ..node }).chain(agents).collect()
    }
}

/// Says in the log whose clock goes wrong and right again; of agents on the node that hears them.
pub async fn run(shared: Arc<Shared>) {
    let mut every = tokio::time::interval(LOOK_EVERY);
    let mut told: BTreeSet<Who> = BTreeSet::new();
    loop {
        every.tick().await;
        let now_ms = shared.clock.mono_ms();
        let is_ours = |skewed: &Skewed| match &skewed.who {
            Who::Node(node) => *node == shared.node_id,
            Who::Agent(agent_id) => {
                shared.heartbeats.heard(agent_id, now_ms).is_some_and(|heard| heard.node == shared.node_id)
            }
        };
        let now: Vec<Skewed> = shared.skewed().into_iter().filter(is_ours).collect();
        for skewed in &now {
            if told.insert(skewed.who.clone()) {
                tracing::warn!(who = %skewed.who, offset_ms = skewed.offset_ms, "clock skew: {skewed}");
            }
        }
        told.retain(|who| {
            let still = now.iter().any(|skewed| skewed.who == *who);
            if !still {
                tracing::info!(%who, "clock skew is over");
            }
            still
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_names_host_offset_and_what_to_check() {
        let agent = Skewed {
            who: Who::Agent(AgentId::parse("redis_1").unwrap()),
            host: Some("10.20.1.15".into()),
            offset_ms: -7_200_000,
            leader: Some(NodeId(1)),
            most_are: false,
        };
        assert_eq!(
            agent.to_string(),
            "the clock of agent redis_1 on 10.20.1.15 is 2 h 0 min behind the cluster's (node n1's): check that host's clock, whether NTP runs there"
        );
        let node = Skewed { who: Who::Node(NodeId(3)), host: None, offset_ms: 900, most_are: true, ..agent };
        assert_eq!(
            node.to_string(),
            "the clock of node n3 is 900 ms ahead of the cluster's (node n1's): most nodes differ, so check the clock of node n1 first, whether NTP runs there"
        );
        assert!(
            !is_skewed(500) && !is_skewed(-500) && is_skewed(501) && is_skewed(-501) && is_skewed(i64::MIN)
        );
    }
}
