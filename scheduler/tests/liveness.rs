//! What the leader proposes from the ages of heartbeats. Beats, TTL and clock are ours: 9 s of TTL,
//! a tick every 100 ms.

use std::sync::Arc;

use reach_machine::Live;
use reach_protocol::{
    AgentId, AgentState, Capability, Command, InstanceId, NodeId, Registration, Stamp, StateReason, Tag,
    agent::AgentRecord, frame::Age,
};
use reach_scheduler::Ages;

const N1: NodeId = NodeId(1);
const N2: NodeId = NodeId(2);

struct Node {
    ages: Ages,
    live: Live,
    now_ms: u64,
    leading_since_ms: Option<u64>,
    /// Whether what is proposed is applied at once.
    applies: bool,
    /// Each proposal as "time agent state".
    proposed: Vec<String>,
}

impl Node {
    fn new(agents: &[&str]) -> Self {
        let mut node = Self {
            ages: Ages::new(),
            live: Live::default(),
            now_ms: 1_000_000,
            leading_since_ms: None,
            applies: true,
            proposed: Vec::new(),
        };
        agents.iter().for_each(|id| node.put(id, "i1", AgentState::Ready, StateReason::Registered));
        node
    }

    /// One that has led for long.
    fn leader(agents: &[&str]) -> Self {
        Self { leading_since_ms: Some(1_000_000), ..Self::new(agents) }
    }

    fn put(&mut self, id: &str, instance: &str, state: AgentState, reason: StateReason) {
        let agent_id = AgentId::parse(id).unwrap();
        let capability = Capability::new(Tag::parse("x").unwrap(), 1.0);
        let record = AgentRecord {
            registration: Registration::new(agent_id.clone(), vec![capability]),
            instance: InstanceId::parse(instance).unwrap(),
            started_ms: 0,
            registered: Stamp::default(),
            state,
            reason,
            since: Stamp::default(),
            liveness_seq: 0,
        };
        self.live.agents.insert(agent_id, Arc::new(record));
    }

    fn report(&mut self, node: NodeId, id: &str, instance: &str, level1_age_ms: u64, level2_age_ms: u64) {
        let age = Age {
            agent_id: AgentId::parse(id).unwrap(),
            instance: InstanceId::parse(instance).unwrap(),
            level1_age_ms,
            level2_age_ms,
            offset_ms: None,
        };
        self.ages.report(self.now_ms, node, &[age]);
    }

    fn tick(&mut self) {
        for command in self.ages.tick(self.now_ms, &self.live, self.leading_since_ms) {
            let Command::SetLiveness { agent_id, instance, liveness_seq, state, reason } = command else {
                panic!("only liveness is proposed here");
            };
            self.proposed.push(format!("{} {agent_id} {state} ({})", self.now_ms, reason.as_str()));
            let record = self.live.agents.get_mut(&agent_id).unwrap();
            assert_eq!((&record.instance, record.liveness_seq), (&instance, liveness_seq));
            if self.applies {
                let record = Arc::make_mut(record);
                (record.state, record.reason, record.liveness_seq) = (state, reason, liveness_seq + 1);
            }
        }
    }

    /// Ticks through `ms`, with `beat` once a second.
    fn pass(&mut self, ms: u64, mut beat: impl FnMut(&mut Self)) {
        for _ in 0..ms / 100 {
            self.now_ms += 100;
            if self.now_ms.is_multiple_of(1_000) {
                beat(self);
            }
            self.tick();
        }
    }

    fn state(&self, id: &str) -> AgentState {
        self.live.agents[id].state
    }

    fn took(&mut self) -> Vec<String> {
        std::mem::take(&mut self.proposed)
    }
}

fn quiet(_: &mut Node) {}

#[test]
fn silence_is_found_within_a_ttl_and_a_second_and_a_return_at_once() {
    let mut node = Node::leader(&["a", "b", "c"]);
    node.pass(20_000, |node| ["a", "b", "c"].iter().for_each(|id| node.report(N1, id, "i1", 0, 0)));
    assert_eq!(node.took(), [""; 0]);
    let silent_since = node.now_ms;
    // a: nothing; b: its loop hangs; c: all is well. The ages go on growing in the summaries.
    node.pass(12_000, |node| {
        let age = node.now_ms - silent_since;
        node.report(N1, "a", "i1", age, age);
        node.report(N1, "b", "i1", 0, age);
        node.report(N1, "c", "i1", 0, 0);
    });
    let took = node.took();
    assert_eq!(took.len(), 2, "{took:?}");
    for (line, expected) in took.iter().zip([
        "a offline (process heartbeat (level 1) late)",
        "b draining (main loop heartbeat (level 2) late)",
    ]) {
        let (at, what) = line.split_once(' ').unwrap();
        let age = at.parse::<u64>().unwrap() - silent_since;
        assert_eq!(what, expected);
        assert!((9_000..=10_000).contains(&age), "after {age} ms");
    }
    // One level alone brings an offline agent nowhere.
    node.pass(2_000, |node| {
        node.report(N1, "a", "i1", 0, 60_000);
        node.report(N1, "b", "i1", 0, 60_000);
        node.report(N1, "c", "i1", 0, 0);
    });
    assert_eq!(node.took(), [""; 0]);
    node.pass(2_000, |node| ["a", "b", "c"].iter().for_each(|id| node.report(N1, id, "i1", 0, 0)));
    assert_eq!(node.took().len(), 2);
    assert!(["a", "b", "c"].iter().all(|id| node.state(id) == AgentState::Ready));
}

#[test]
fn a_draining_process_that_falls_silent_goes_offline() {
    let mut node = Node::leader(&["a"]);
    node.put("a", "i1", AgentState::Draining, StateReason::Asked);
    node.report(N1, "a", "i1", 0, 0);
    node.pass(5_000, |node| node.report(N1, "a", "i1", 0, 0));
    assert_eq!(node.state("a"), AgentState::Draining, "who asked to drain stays draining");
    node.pass(11_000, quiet);
    assert_eq!(node.state("a"), AgentState::Offline);
}

#[test]
fn a_run_that_said_goodbye_is_not_brought_back_by_its_last_beats() {
    let mut node = Node::leader(&["a"]);
    node.pass(5_000, |node| node.report(N1, "a", "i1", 0, 0));
    node.put("a", "i1", AgentState::Offline, StateReason::Asked);
    node.pass(30_000, |node| node.report(N1, "a", "i1", 500, 500));
    assert_eq!(node.took(), [""; 0]);
}

#[test]
fn a_new_leader_grants_nothing_anew() {
    let mut node = Node::new(&["a", "b"]);
    let beat = |node: &mut Node| node.report(N2, "b", "i1", 0, 0);
    node.report(N2, "a", "i1", 0, 0);
    node.pass(20_000, beat);
    assert_eq!(node.took(), [""; 0], "a follower proposes nothing");
    node.leading_since_ms = Some(node.now_ms);
    node.pass(1_000, beat);
    let took = node.took();
    assert_eq!(took.len(), 1, "{took:?}");
    assert_eq!(node.state("a"), AgentState::Offline);
}

#[test]
fn a_leader_that_never_judged_before_grants_nothing_either() {
    let mut node = Node::new(&["a", "b"]);
    for second in 0..20 {
        node.now_ms += 1_000;
        node.report(N2, "a", "i1", second * 1_000, second * 1_000);
        node.report(N2, "b", "i1", 0, 0);
    }
    node.leading_since_ms = Some(node.now_ms);
    node.tick();
    assert_eq!(node.took().len(), 1);
    assert_eq!((node.state("a"), node.state("b")), (AgentState::Offline, AgentState::Ready));
}

#[test]
fn who_was_never_heard_gets_one_ttl_from_the_start_of_the_lead() {
    // It was known here for long, but no node has told of it.
    let mut node = Node::new(&["a"]);
    node.pass(60_000, quiet);
    node.leading_since_ms = Some(node.now_ms);
    let since = node.now_ms;
    node.pass(20_000, quiet);
    let took = node.took();
    let (at, _) = took[0].split_once(' ').unwrap();
    assert!((9_000..=10_000).contains(&(at.parse::<u64>().unwrap() - since)), "{took:?}");
    assert_eq!(took.len(), 1);
}

#[test]
fn a_stalled_node_expires_nobody() {
    let mut node = Node::leader(&["a"]);
    node.pass(5_000, |node| node.report(N1, "a", "i1", 0, 0));
    // Suspended for an hour: one gap, which counts as a second. Then its agents have time to beat.
    node.now_ms += 3_600_000;
    node.tick();
    node.pass(5_000, quiet);
    assert_eq!(node.took(), [""; 0]);
    // What other nodes measured meanwhile counts in full.
    node.report(N2, "a", "i1", 3_000_000, 3_000_000);
    node.pass(1_000, quiet);
    assert_eq!(node.took(), [""; 0], "an older word says nothing against a later one");
    node.pass(5_000, quiet);
    assert_eq!(node.state("a"), AgentState::Offline);
}

#[test]
fn the_agents_of_a_lost_node_get_one_ttl_to_be_heard_elsewhere() {
    let mut node = Node::leader(&["a", "b", "c"]);
    node.pass(10_000, |node| {
        node.report(N2, "a", "i1", 0, 0);
        node.report(N2, "b", "i1", 0, 0);
        node.report(N1, "c", "i1", 0, 0);
    });
    node.pass(2_000, |node| node.report(N1, "c", "i1", 0, 0));
    node.ages.node_lost(node.now_ms, N2);
    let lost = node.now_ms;
    node.pass(8_900, |node| node.report(N1, "c", "i1", 0, 0));
    assert_eq!(node.took(), [""; 0]);
    node.pass(3_000, |node| {
        node.report(N1, "b", "i1", 0, 0);
        node.report(N1, "c", "i1", 0, 0);
    });
    let took = node.took();
    assert_eq!(took.len(), 1, "{took:?}");
    let (at, what) = took[0].split_once(' ').unwrap();
    assert!(what.starts_with("a offline") && at.parse::<u64>().unwrap() - lost <= 10_000, "{took:?}");
    // Being granted time is not being heard: it brings nobody back.
    node.ages.node_lost(node.now_ms, N2);
    node.pass(2_000, |node| {
        node.report(N1, "b", "i1", 0, 0);
        node.report(N1, "c", "i1", 0, 0);
    });
    assert_eq!(node.took(), [""; 0]);
}

#[test]
fn an_earlier_run_neither_hides_nor_replaces_the_current_one() {
    let mut node = Node::leader(&["a"]);
    node.pass(20_000, |node| node.report(N1, "a", "i1", 0, 0));
    // The later run is registered; the earlier one goes on beating elsewhere.
    node.put("a", "i2", AgentState::Ready, StateReason::Registered);
    node.pass(8_000, |node| node.report(N1, "a", "i1", 0, 0));
    assert_eq!(node.took(), [""; 0], "a new run has a TTL to be heard in");
    node.pass(5_000, |node| {
        node.report(N2, "a", "i2", 0, 0);
        node.report(N1, "a", "i1", 0, 0);
    });
    assert_eq!(node.took(), [""; 0]);
    node.pass(11_000, |node| node.report(N1, "a", "i1", 0, 0));
    assert_eq!(node.state("a"), AgentState::Offline, "the current run is silent, whoever else beats");
}

#[test]
fn one_change_at_a_time_is_proposed_and_again_after_two_seconds() {
    let mut node = Node::leader(&["a"]);
    node.applies = false;
    node.pass(16_000, quiet);
    let took = node.took();
    let times: Vec<u64> = took.iter().map(|line| line.split_once(' ').unwrap().0.parse().unwrap()).collect();
    assert!(times.len() >= 3, "{took:?}");
    assert!(times.windows(2).all(|pair| (2_000..=2_500).contains(&(pair[1] - pair[0]))), "{took:?}");
}

#[test]
fn what_was_heard_is_told_with_its_node_and_its_ages() {
    let mut node = Node::new(&["a"]);
    let a = AgentId::parse("a").unwrap();
    assert_eq!(node.ages.heard(node.now_ms, &a), None);
    node.report(N2, "a", "i1", 100, 300);
    node.pass(500, quiet);
    let heard = node.ages.heard(node.now_ms, &a).unwrap();
    assert_eq!((heard.node, heard.level1_age_ms, heard.level2_age_ms), (N2, 600, 800));
    // It moved to another node.
    node.report(N1, "a", "i1", 0, 0);
    assert_eq!(node.ages.heard(node.now_ms, &a).unwrap().node, N1);
    node.live.agents.clear();
    node.pass(1_000, quiet);
    assert_eq!(node.ages.heard(node.now_ms, &a), None, "a removed agent is forgotten");
}
