//! What is wrong now, since when, with which effect, and the command to run. It is asked when nothing
//! else works, so it goes by what this node knows.

use std::{collections::BTreeSet, sync::Arc};

use reach_protocol::{
    AgentState, StateReason, Tag,
    agent::AgentRecord,
    command::ExpiryPause,
    frame::{Answer, ClusterView, Problem, ProblemKind},
};

use super::Shared;
use crate::show::{count, span};

/// Problems of one kind that are told one by one; the rest are counted.
const SAME_KIND_MAX: usize = 100;
/// A node that has applied so many entries less than the leader is behind. An entry carries all that
/// came while the one before was on its way, so these are seconds, and a node in step is never so far.
const BEHIND_MIN: u64 = 1_000;

/// Where problems are looked for. Another kind of problem is another line here.
const SOURCES: &[fn(&Seen, &mut Vec<Problem>)] = &[leader, nodes, expiry, agents];

/// What the sources look at.
struct Seen {
    /// The cluster's calendar, Unix milliseconds.
    now_ms: u64,
    cluster: ClusterView,
    /// How long ago each node last told anything, in the order of `cluster.nodes`.
    silent_ms: Vec<Option<u64>>,
    agents: Vec<Arc<AgentRecord>>,
    ttl_ms: u64,
    /// With the calendar's time at which it began.
    expiry: Option<(ExpiryPause, u64)>,
}

impl Shared {
    pub async fn read_problems(&self) -> Answer {
        let Answer::Cluster(cluster) = self.read_cluster().await else {
            unreachable!("the cluster is answered with itself");
        };
        let (stamp, mono_ms) = (self.clock.stamp(), self.clock.mono_ms());
        let (agents, ttl_ms) = {
            let live = self.replica.tables().live();
            (live.agents.values().cloned().collect(), live.rules.rules.liveness.ttl_ms)
        };
        let began = |pause: ExpiryPause| {
            let age_ms = stamp.cluster_ms.saturating_sub(pause.since_ms);
            (pause, stamp.wall_ms.saturating_sub(age_ms))
        };
        let seen = Seen {
            now_ms: stamp.wall_ms,
            silent_ms: cluster
                .nodes
                .iter()
                .map(|node| self.heartbeats.node_age_ms(node.node_id, mono_ms))
                .collect(),
            agents,
            ttl_ms,
            expiry: self.expiry_waits().map(began),
            cluster: *cluster,
        };
        let as_of = seen.cluster.as_of;
        Answer::Problems { items: find(&seen), as_of }
    }
}

fn find(seen: &Seen) -> Vec<Problem> {
    let mut items = Vec::new();
    SOURCES.iter().for_each(|source| source(seen, &mut items));
    in_order(items)
}

/// The worst kind first, and not more of one than a person reads.
fn in_order(mut items: Vec<Problem>) -> Vec<Problem> {
    items.sort_by(|a, b| (a.kind, &a.about).cmp(&(b.kind, &b.about)));
    let mut shown: Vec<Problem> = Vec::new();
    for same in items.chunk_by(|a, b| a.kind == b.kind) {
        shown.extend(same.iter().take(SAME_KIND_MAX).cloned());
        if let Some(more) = same.len().checked_sub(SAME_KIND_MAX).filter(|more| *more > 0) {
            shown.push(Problem {
                about: String::new(),
                since_ms: None,
                what: format!("and {more} more like these"),
                ..same[0].clone()
            });
        }
    }
    shown
}

fn leader(seen: &Seen, items: &mut Vec<Problem>) {
    if seen.cluster.leader.is_some() {
        return;
    }
    let answering = seen.cluster.nodes.iter().filter(|node| node.report.is_some()).count();
    items.push(Problem {
        kind: ProblemKind::NoLeader,
        about: String::new(),
        since_ms: None,
        what: format!("no node leads; {answering} of {} answer", seen.cluster.nodes.len()),
        effect: "nothing can be accepted until a majority of the nodes runs".into(),
        command: match seen.cluster.rules_revision {
            0 => "agent-reach cluster init".into(),
            _ => "agent-reach cluster status".into(),
        },
    });
}

fn nodes(seen: &Seen, items: &mut Vec<Problem>) {
    let ClusterView { nodes, leader, .. } = &seen.cluster;
    let applied = |id| {
        nodes
            .iter()
            .find(|node| Some(node.node_id) == id)
            .and_then(|node| node.report.as_ref())
            .map(|of| of.applied)
    };
    let front = applied(*leader).unwrap_or_default();
    let majority = nodes.len() / 2 + 1;
    let answering = nodes.iter().filter(|node| node.report.is_some()).count();
    for (node, silent_ms) in nodes.iter().zip(&seen.silent_ms) {
        let about = node.node_id.to_string();
        let Some(report) = &node.report else {
            items.push(Problem {
                kind: ProblemKind::NodeUnreachable,
                since_ms: silent_ms.map(|ms| seen.now_ms.saturating_sub(ms)),
                what: format!("{about} does not answer at {}", node.peer_addr),
                effect: match answering.checked_sub(majority) {
                    Some(0) => "the cluster serves; the loss of one more node would stop it".into(),
                    Some(spare) => {
                        format!(
                            "the cluster serves, and survives the loss of {} more",
                            count(spare as u64, "node")
                        )
                    }
                    None => "fewer than a majority answer: nothing can be accepted".into(),
                },
                command: format!("agent-reach node --config {about}/node.toml, on its host"),
                about,
            });
            continue;
        };
        let behind = front.saturating_sub(report.applied);
        if behind >= BEHIND_MIN {
            items.push(Problem {
                kind: ProblemKind::NodeLagging,
                since_ms: None,
                what: format!("{about} is {behind} log entries behind the leader"),
                effect: "what it delivers and answers comes late".into(),
                command: "agent-reach cluster status".into(),
                about,
            });
        }
    }
}

fn expiry(seen: &Seen, items: &mut Vec<Problem>) {
    let Some((pause, since_ms)) = &seen.expiry else { return };
    items.push(Problem {
        kind: ProblemKind::MassExpiry,
        about: String::new(),
        since_ms: Some(*since_ms),
        what: format!("{} of {} agents fell silent together", pause.agents, pause.of),
        effect: format!(
            "none of them counts as lost for {}, in case it is we who don't hear",
            span(pause.wait_ms)
        ),
        command: "agent-reach agents expire --now".into(),
    });
}

fn agents(seen: &Seen, items: &mut Vec<Problem>) {
    let ready: BTreeSet<&Tag> = seen
        .agents
        .iter()
        .filter(|record| record.state == AgentState::Ready)
        .flat_map(|record| record.registration.tags())
        .collect();
    for record in &seen.agents {
        let alone: Vec<&str> =
            record.registration.tags().filter(|tag| !ready.contains(tag)).map(Tag::as_str).collect();
        let left = record.state == AgentState::Offline && record.reason == StateReason::Asked;
        // Who left in good order, and is not needed, is no problem.
        if record.state == AgentState::Ready || (left && alone.is_empty()) {
            continue;
        }
        let about = record.agent_id().to_string();
        let effect = match &alone[..] {
            [] => "others serve all that it declares".to_string(),
            [tags @ .., _] if tags.len() >= 5 => {
                format!(
                    "nobody is ready for {} and {} more: such tasks wait, or are refused",
                    alone[..5].join(", "),
                    alone.len() - 5
                )
            }
            _ => format!("nobody is ready for {}: such tasks wait, or are refused", alone.join(", ")),
        };
        let ttl = span(record.registration.ttl_ms(seen.ttl_ms));
        let (what, command) = match (&record.drain, record.state, record.reason) {
            (_, AgentState::Offline, StateReason::Asked) => {
                ("it has shut down".into(), format!("start it again, or agent-reach agents rm {about}"))
            }
            (_, AgentState::Offline, _) => (
                format!("its process was not heard for {ttl}"),
                format!("agent-reach agents show {about}; start it again, or agent-reach agents rm {about}"),
            ),
            (Some(drain), ..) => {
                (format!("drained by {}", drain.by), format!("agent-reach agents resume {about}"))
            }
            (None, _, StateReason::Asked) => {
                ("it is shutting down".into(), format!("agent-reach agents show {about}"))
            }
            (None, ..) => (
                format!("its process beats, its main loop did not answer for {ttl}"),
                format!("agent-reach agents show {about}; look what its loop waits for"),
            ),
        };
        items.push(Problem {
            kind: match record.state {
                AgentState::Offline => ProblemKind::AgentOffline,
                _ => ProblemKind::AgentDraining,
            },
            since_ms: Some(match &record.drain {
                Some(drain) if record.state == AgentState::Draining => drain.at.wall_ms,
                _ => record.since.wall_ms,
            }),
            about,
            what,
            effect,
            command,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_comes_first_and_many_alike_are_counted() {
        let problem = |kind, about: String| Problem {
            kind,
            about,
            since_ms: Some(1),
            what: "what".into(),
            effect: "effect".into(),
            command: "command".into(),
        };
        let mut items: Vec<_> =
            (0..150).map(|i| problem(ProblemKind::AgentOffline, format!("a{i:03}"))).collect();
        items.push(problem(ProblemKind::AgentDraining, "b".into()));
        items.push(problem(ProblemKind::NoLeader, String::new()));
        let shown = in_order(items);
        assert_eq!(shown.len(), 1 + SAME_KIND_MAX + 1 + 1);
        assert_eq!(shown[0].kind, ProblemKind::NoLeader);
        assert_eq!(shown[1].about, "a000");
        let more = &shown[1 + SAME_KIND_MAX];
        assert_eq!((more.about.as_str(), more.what.as_str()), ("", "and 50 more like these"));
        assert_eq!(shown.last().map(|problem| problem.about.as_str()), Some("b"));
    }
}
