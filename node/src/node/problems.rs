//! What is wrong now, since when, with which effect, and the command to run. It is asked when nothing
//! else works, so it goes by what this node knows.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use reach_protocol::{
    AgentState, StateReason, Tag,
    agent::AgentRecord,
    command::ExpiryPause,
    frame::{Answer, ClusterView, Problem, ProblemKind},
};
use tokio::time::Instant;

use super::{
    Shared,
    skew::{Skewed, Who},
};
use crate::show::{count, span, time};

/// How long a question to the leader may hold up the answer.
const FRESH_MAX: Duration = Duration::from_secs(1);
/// Problems of one kind that are told one by one; the rest are counted.
const SAME_KIND_MAX: usize = 100;
/// A node that has applied so many entries less than the leader is behind. An entry carries all that
/// came while the one before was on its way, so these are seconds, and a node in step is never so far.
const BEHIND_MIN: u64 = 1_000;

/// Where problems are looked for. Another kind of problem is another line here.
const SOURCES: &[fn(&Seen, &mut Vec<Problem>)] =
    &[leader, nodes, disks, expiry, agents, clocks, certificates];

/// What the sources look at.
struct Seen {
    /// The cluster's calendar, Unix milliseconds.
    now_ms: u64,
    cluster: ClusterView,
    /// How long ago each node last told anything, in the order of `cluster.nodes`.
    silent_ms: Vec<Option<u64>>,
    agents: Vec<Arc<AgentRecord>>,
    skewed: Vec<Skewed>,
    ttl_ms: u64,
    /// With the calendar's time at which it began.
    expiry: Option<(ExpiryPause, u64)>,
}

impl Shared {
    /// It must work when nothing else does, and says itself when nobody leads; else it sees all that was
    /// acknowledged before.
    pub async fn read_problems(&self, stale: bool, deadline: Instant) -> Answer {
        let fresh = async {
            let within = deadline.min(Instant::now() + FRESH_MAX);
            (!stale).then_some(self.read_barrier(within))?.await.ok()
        };
        let (cluster, _) = tokio::join!(self.read_cluster(), fresh);
        let Answer::Cluster(cluster) = cluster else {
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
            skewed: self.skewed(),
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

fn disks(seen: &Seen, items: &mut Vec<Problem>) {
    for node in &seen.cluster.nodes {
        let Some(report) = node.report.as_ref().filter(|report| report.space_is_low) else { continue };
        let about = node.node_id.to_string();
        items.push(Problem {
            kind: ProblemKind::DiskLow,
            since_ms: None,
            what: match report.free_bytes {
                Some(bytes) => format!("the disk of {about} has {} MiB left", bytes >> 20),
                None => format!("the disk of {about} is nearly full"),
            },
            effect: format!("{about} takes no new work in; what is running goes on"),
            command: "df, on its host; free some space there".into(),
            about,
        });
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

fn clocks(seen: &Seen, items: &mut Vec<Problem>) {
    items.extend(seen.skewed.iter().map(|skewed| Problem {
        kind: ProblemKind::ClockSkew,
        about: match &skewed.who {
            Who::Node(node) => node.to_string(),
            Who::Agent(agent_id) => agent_id.to_string(),
        },
        since_ms: None,
        what: skewed.to_string(),
        effect: "no deadline goes by it; times that people compare are off, and dates of certificates may be misread"
            .into(),
        command: "timedatectl, on that host".into(),
    }));
}

fn certificates(seen: &Seen, items: &mut Vec<Problem>) {
    let mut first: BTreeMap<String, u64> = BTreeMap::new();
    let reports = seen.cluster.nodes.iter().filter_map(|node| node.report.as_ref());
    for ending in reports.flat_map(|report| &report.ending) {
        let at_ms = first.entry(ending.whose.to_string()).or_insert(ending.at_ms);
        *at_ms = ending.at_ms.min(*at_ms);
    }
    items.extend(first.into_iter().map(|(about, at_ms)| Problem {
        kind: ProblemKind::CertificateEnds,
        since_ms: None,
        what: match at_ms.checked_sub(seen.now_ms) {
            Some(left_ms) => format!("its certificate ends at {}, in {}", time(at_ms), span(left_ms)),
            None => format!("its certificate ended at {}", time(at_ms)),
        },
        effect: "new connections with it are refused from then on".into(),
        command: "agent-reach certs renew, with the admin folder".into(),
        about,
    }));
}

#[cfg(test)]
mod tests {
    use reach_protocol::{
        AgentId, NodeId, Principal, Stamp,
        frame::{Ending, NodeReport, NodeView, Role},
    };

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

    #[test]
    fn disks_clocks_and_certificates_are_told_with_what_to_do() {
        const DAY_MS: u64 = 86_400_000;
        let now_ms = 20_000 * DAY_MS;
        let ending = |days: u64, whose: &str| Ending {
            at_ms: now_ms + days * DAY_MS,
            whose: Principal::Agent(AgentId::parse(whose).unwrap()),
        };
        let node = |id: u64, ending: Vec<Ending>| NodeView {
            node_id: NodeId(id),
            client_addr: String::new(),
            peer_addr: String::new(),
            report: Some(NodeReport {
                pid: 1,
                role: Role::Follower,
                term: 1,
                applied: 1,
                state_hash: 0,
                offset_ms: None,
                sessions: 0,
                http_addr: None,
                ending,
                free_bytes: Some(5 << 20),
                space_is_low: id == 2,
            }),
        };
        let cluster = ClusterView {
            cluster: "c".parse().unwrap(),
            leader: Some(NodeId(1)),
            term: 1,
            // One agent is connected to both, with the certificate that it renewed on one of them.
            nodes: vec![node(1, vec![ending(9, "a")]), node(2, vec![ending(12, "a"), ending(20, "b")])],
            agents: 0,
            unfinished: 0,
            rules_revision: 1,
            as_of: Stamp::default(),
        };
        let skewed = Skewed {
            who: Who::Node(NodeId(2)),
            host: Some("10.0.0.2".into()),
            offset_ms: -3_000,
            leader: Some(NodeId(1)),
            most_are: false,
        };
        let seen = Seen {
            now_ms,
            silent_ms: vec![None, Some(10)],
            agents: Vec::new(),
            skewed: vec![skewed],
            ttl_ms: 9_000,
            expiry: None,
            cluster,
        };
        let found: Vec<_> = find(&seen).into_iter().map(|problem| (problem.about, problem.what)).collect();
        let what = |about: &str, what: &str| (about.to_string(), what.to_string());
        assert_eq!(
            found,
            [
                what("n2", "the disk of n2 has 5 MiB left"),
                what("n2", &seen.skewed[0].to_string()),
                what("agent/a", "its certificate ends at 2024-10-13T00:00:00.000Z, in 9 d 0 h"),
                what("agent/b", "its certificate ends at 2024-10-24T00:00:00.000Z, in 20 d 0 h"),
            ]
        );
    }
}
