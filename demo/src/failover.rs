//! The death of the leader: who leads next, and when the killed node is back and in step.

use std::time::Duration;

use anyhow::Context;
use reach_protocol::{
    NodeId,
    frame::{ClusterView, Request},
};
use tokio::time::{Instant, sleep};

use crate::cluster::{Cluster, report_of};

/// How long the whole story may take.
const STORY_MAX: Duration = Duration::from_secs(40);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Times are since the kill.
#[derive(Clone, Debug, Default)]
pub struct Failover {
    pub killed: Option<(NodeId, u32)>,
    pub next: Option<NodeId>,
    /// When a read that needs a leader was answered again.
    pub served: Option<Duration>,
    /// The new process id.
    pub restarted: Option<(u32, Duration)>,
    pub in_step: Option<Duration>,
}

impl Failover {
    /// Watches from the moment of the kill until the killed node is in step again, or for as long as
    /// it can reasonably take.
    pub async fn watch(cluster: Cluster, killed: (NodeId, u32), at: Instant) -> Self {
        let (served, mut story) = tokio::join!(served_again(&cluster, at), async {
            let mut story = Self { killed: Some(killed), ..Self::default() };
            while at.elapsed() < STORY_MAX && story.in_step.is_none() {
                // A node waits for the dead one's report before it answers.
                if let Ok(view) = cluster.view(Duration::from_secs(2)).await {
                    story.look(&view, at.elapsed());
                }
                sleep(LOOK_EVERY).await;
            }
            story
        });
        story.served = served;
        story
    }

    fn look(&mut self, view: &ClusterView, after: Duration) {
        let Some((node, old_pid)) = self.killed else { return };
        let leader = view.leader.filter(|leader| *leader != node || self.restarted.is_some());
        if let Some(leader) = leader {
            self.next.get_or_insert(leader);
        }
        let Some(report) = report_of(view, node).filter(|report| report.pid != old_pid) else { return };
        self.restarted.get_or_insert((report.pid, after));
        let leads_at = view.leader.and_then(|leader| report_of(view, leader)).map(|leader| leader.applied);
        if self.next.is_some() && leads_at.is_some_and(|position| report.applied >= position) {
            self.in_step.get_or_insert(after);
        }
    }
}

/// Reads that only a leader can vouch for, asked until one is answered.
async fn served_again(cluster: &Cluster, at: Instant) -> Option<Duration> {
    while at.elapsed() < STORY_MAX {
        if cluster.client.request(Request::Rules, Duration::from_millis(400)).await.is_ok() {
            return Some(at.elapsed());
        }
        sleep(Duration::from_millis(10)).await;
    }
    None
}

/// Nodes at one position with one hash of their state, or what is different about them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Position, hash, and who holds them.
    Equal {
        applied: u64,
        hash: u64,
        nodes: Vec<NodeId>,
    },
    Different(String),
}

/// Asks until every node reports the same position; a different hash at one position is final.
pub async fn agreement(cluster: &Cluster, within: Duration) -> anyhow::Result<Agreement> {
    let deadline = Instant::now() + within;
    loop {
        let view = cluster.view(Duration::from_secs(5)).await.context("no view of the cluster")?;
        let answer = compare(&view);
        let final_answer = matches!(answer, (true, _));
        if final_answer || Instant::now() >= deadline {
            return Ok(answer.1);
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Whether all stand at one position, and what is to say.
fn compare(view: &ClusterView) -> (bool, Agreement) {
    let reports: Vec<_> = view.nodes.iter().map(|node| (node.node_id, node.report.as_ref())).collect();
    let words: Vec<String> = reports
        .iter()
        .map(|(node, report)| match report {
            Some(report) => format!("{node} {:016x} at {}", report.state_hash, report.applied),
            None => format!("{node} does not answer"),
        })
        .collect();
    let different = Agreement::Different(words.join(", "));
    let known: Vec<_> = reports.iter().filter_map(|(_, report)| *report).collect();
    let Some(first) = known.first().filter(|_| known.len() == reports.len()) else {
        return (false, different);
    };
    if known.iter().any(|report| report.applied != first.applied) {
        return (false, different);
    }
    if known.iter().any(|report| report.state_hash != first.state_hash) {
        return (true, different);
    }
    let nodes = reports.iter().map(|(node, _)| *node).collect();
    (true, Agreement::Equal { applied: first.applied, hash: first.state_hash, nodes })
}

#[cfg(test)]
mod tests {
    use reach_protocol::{
        Stamp,
        frame::{NodeReport, NodeView, Role},
        id::Name,
    };

    use super::*;

    /// Node, process id, position, hash; a node without them does not answer.
    fn view(leader: Option<u64>, nodes: [Option<(u32, u64, u64)>; 3]) -> ClusterView {
        let node = |(at, report): (usize, Option<(u32, u64, u64)>)| NodeView {
            node_id: NodeId(at as u64 + 1),
            client_addr: String::new(),
            peer_addr: String::new(),
            report: report.map(|(pid, applied, state_hash)| NodeReport {
                pid,
                role: Role::Follower,
                term: 1,
                applied,
                state_hash,
                offset_ms: Some(0),
                sessions: 0,
                http_addr: None,
                ending: Vec::new(),
                free_bytes: None,
                space_is_low: false,
            }),
        };
        ClusterView {
            cluster: Name::parse("dev").unwrap(),
            leader: leader.map(NodeId),
            term: 1,
            nodes: nodes.into_iter().enumerate().map(node).collect(),
            agents: 0,
            unfinished: 0,
            rules_revision: 1,
            as_of: Stamp::default(),
        }
    }

    #[test]
    fn the_story_has_its_times() {
        let mut story = Failover { killed: Some((NodeId(1), 11)), ..Failover::default() };
        let ms = Duration::from_millis;
        story.look(&view(Some(1), [None, Some((12, 5, 0)), Some((13, 5, 0))]), ms(100));
        assert_eq!((story.next, story.restarted), (None, None), "the old view still names the dead");
        story.look(&view(Some(3), [None, Some((12, 6, 0)), Some((13, 6, 0))]), ms(900));
        story.look(&view(Some(3), [Some((21, 4, 0)), Some((12, 9, 0)), Some((13, 9, 0))]), ms(3200));
        assert_eq!(story.in_step, None, "it is behind");
        story.look(&view(Some(3), [Some((21, 9, 0)), Some((12, 9, 0)), Some((13, 9, 0))]), ms(3500));
        assert_eq!(story.next, Some(NodeId(3)));
        assert_eq!(story.restarted, Some((21, ms(3200))));
        assert_eq!(story.in_step, Some(ms(3500)));
    }

    #[test]
    fn hashes_are_compared_at_one_position_only() {
        let (settled, answer) = compare(&view(Some(1), [Some((1, 7, 5)), Some((2, 7, 5)), Some((3, 7, 5))]));
        assert!(
            settled
                && matches!(answer, Agreement::Equal { applied: 7, hash: 5, ref nodes } if nodes.len() == 3)
        );
        assert!(!compare(&view(Some(1), [Some((1, 7, 5)), Some((2, 8, 6)), Some((3, 7, 5))])).0);
        assert!(!compare(&view(Some(1), [Some((1, 7, 5)), None, Some((3, 7, 5))])).0);
        let (settled, answer) = compare(&view(Some(1), [Some((1, 7, 5)), Some((2, 7, 6)), Some((3, 7, 5))]));
        assert!(settled && matches!(answer, Agreement::Different(words) if words.contains("n2")));
    }
}
