//! What the leader proposes from the ages of heartbeats. Beats, TTL and clock are ours: 9 s of TTL,
//! a tick every 100 ms.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use reach_machine::{Live, Slot, Write};
use reach_protocol::{
    AgentId, AgentState, Capability, Command, InstanceId, MsgId, NodeId, Principal, Registration, Stamp,
    StateReason, Tag,
    agent::{AgentRecord, Drain},
    codec,
    command::ExpiryPause,
    frame::{Age, Named, Summary},
};
use reach_scheduler::Ages;

const N1: NodeId = NodeId(1);
const N2: NodeId = NodeId(2);

struct Node {
    ages: Ages,
    live: Live,
    now_ms: u64,
    leading_since_ms: Option<u64>,
    /// Numbers that were given out, by node, agent and run.
    names: BTreeMap<(NodeId, String, String), u32>,
    /// A node that is gone, or hangs.
    mute: Option<NodeId>,
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
            names: BTreeMap::new(),
            mute: None,
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
            drain: None,
            drain_seq: 0,
        };
        self.set(record);
    }

    fn set(&mut self, record: AgentRecord) {
        let record = Arc::new(record);
        self.ages.put(self.now_ms, &record);
        self.live.agents.insert(record.agent_id().clone(), record);
    }

    /// As an apply would.
    fn change(&mut self, id: &str, change: impl FnOnce(&mut AgentRecord)) {
        let mut record = (*self.live.agents[id]).clone();
        change(&mut record);
        self.set(record);
    }

    fn report(&mut self, node: NodeId, id: &str, instance: &str, level1_age_ms: u64, level2_age_ms: u64) {
        let next = self.names.len() as u32;
        let key = (node, id.to_string(), instance.to_string());
        let number = *self.names.entry(key).or_insert(next);
        let named = Named {
            number,
            agent_id: AgentId::parse(id).unwrap(),
            instance: InstanceId::parse(instance).unwrap(),
        };
        let names = if number == next { vec![named] } else { Vec::new() };
        let ages = vec![Age { number, level1_age_ms, level2_age_ms, offset_ms: None }];
        self.ages.told(self.now_ms, node.0, node, &Summary { names, ages, ..Summary::default() });
    }

    /// The node's link is gone, and with it what was named on it.
    fn lose(&mut self, node: NodeId) {
        self.ages.link_lost(self.now_ms, node.0);
        self.mute = Some(node);
        self.names.retain(|(named_by, ..), _| *named_by != node);
    }

    /// The node tells that it no longer holds this run.
    fn gone(&mut self, node: NodeId, id: &str, instance: &str) {
        let number = self.names[&(node, id.to_string(), instance.to_string())];
        let summary = Summary { gone: vec![number], ..Summary::default() };
        self.ages.told(self.now_ms, node.0, node, &summary);
    }

    fn tick(&mut self) {
        let live = &self.live;
        let taken = |agent_id: &AgentId| live.slots_taken(agent_id);
        let commands = self.ages.tick(self.now_ms, self.now_ms, &live.rules, taken, self.leading_since_ms);
        for command in commands {
            match command {
                Command::SetLiveness { agent_id, instance, liveness_seq, state, reason } => {
                    self.proposed.push(format!("{} {agent_id} {state} ({})", self.now_ms, reason.as_str()));
                    let record = &self.live.agents[&agent_id];
                    assert_eq!((&record.instance, record.liveness_seq), (&instance, liveness_seq));
                    if self.applies {
                        self.change(&agent_id, |record| {
                            (record.state, record.reason, record.liveness_seq) =
                                (state, reason, liveness_seq + 1);
                        });
                    }
                }
                Command::RemoveOffline { agent_id, .. } => {
                    self.proposed.push(format!("{} {agent_id} removed", self.now_ms));
                    self.live.agents.remove(&agent_id);
                    self.ages.remove(&agent_id);
                }
                Command::PauseExpiry { pause } => {
                    let ExpiryPause { agents, of, wait_ms, .. } = pause;
                    self.proposed.push(format!("{} {agents} of {of} wait {wait_ms} ms", self.now_ms));
                    Arc::make_mut(&mut self.live.rules).expiry = Some(pause);
                }
                other => panic!("not proposed here: {other:?}"),
            }
        }
    }

    /// Ticks through `ms`, with `beat` once a second.
    fn pass(&mut self, ms: u64, mut beat: impl FnMut(&mut Self)) {
        for _ in 0..ms / 100 {
            self.now_ms += 100;
            if self.now_ms.is_multiple_of(1_000) {
                // Every node tells something every second.
                for node in [N1, N2].into_iter().filter(|node| self.mute != Some(*node)) {
                    self.ages.told(self.now_ms, node.0, node, &Summary::default());
                }
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
fn a_node_that_was_away_takes_the_others_word_for_a_silence() {
    let mut node = Node::new(&["a", "b"]);
    node.report(N2, "a", "i1", 0, 0);
    node.report(N2, "b", "i1", 0, 0);
    node.gone(N2, "a", "i1");
    node.pass(7_000, |node| node.report(N2, "b", "i1", 0, 0));
    let word = node.ages.hearsay(node.now_ms);
    let told: Vec<_> = word.iter().map(|word| (&*word.agent_id, word.heard.unwrap().level1_age_ms)).collect();
    assert_eq!(told, [("a", 7_000)]);

    // It starts now, and is told before it has read its own log. Soon it leads.
    let mut fresh = Node::new(&[]);
    fresh.ages.told(fresh.now_ms, 9, N2, &Summary { hearsay: word, ..Summary::default() });
    for id in ["a", "b"] {
        fresh.put(id, "i1", AgentState::Ready, StateReason::Registered);
    }
    fresh.report(N2, "b", "i1", 0, 0);
    fresh.leading_since_ms = Some(fresh.now_ms);
    let since = fresh.now_ms;
    fresh.pass(5_000, |node| node.report(N2, "b", "i1", 0, 0));
    let took = fresh.took();
    let (at, _) = took[0].split_once(' ').unwrap();
    assert!((2_000..=3_000).contains(&(at.parse::<u64>().unwrap() - since)), "{took:?}");
    assert_eq!((fresh.state("a"), fresh.state("b")), (AgentState::Offline, AgentState::Ready));
}

#[test]
fn a_node_lost_again_grants_nothing_to_whom_it_no_longer_held() {
    let mut node = Node::leader(&["a", "b"]);
    node.report(N2, "a", "i1", 0, 0);
    node.lose(N2);
    let since = node.now_ms;
    for _ in 0..3 {
        node.pass(3_000, |node| node.report(N1, "b", "i1", 0, 0));
        node.mute = None;
        node.ages.told(node.now_ms, N2.0, N2, &Summary { begins: true, ..Summary::default() });
        node.lose(N2);
    }
    node.pass(2_000, |node| node.report(N1, "b", "i1", 0, 0));
    let took = node.took();
    let (at, _) = took[0].split_once(' ').unwrap();
    assert!((9_000..=10_000).contains(&(at.parse::<u64>().unwrap() - since)), "{took:?}");
}

#[test]
fn who_was_never_heard_has_three_seconds_from_the_start_of_the_lead() {
    // It was known here for long, but no node has told of it.
    let mut node = Node::new(&["a"]);
    node.pass(60_000, quiet);
    node.leading_since_ms = Some(node.now_ms);
    let since = node.now_ms;
    node.pass(20_000, quiet);
    let took = node.took();
    let (at, _) = took[0].split_once(' ').unwrap();
    assert!((3_000..=4_000).contains(&(at.parse::<u64>().unwrap() - since)), "{took:?}");
    assert_eq!(took.len(), 1);
}

#[test]
fn who_was_never_heard_by_anybody_is_found_however_leaders_change() {
    // Registered, and dead before any node told of it.
    let mut node = Node::new(&["a"]);
    node.pass(8_000, quiet);
    let word = node.ages.hearsay(node.now_ms);
    let mut fresh = Node::new(&["a"]);
    fresh.ages.told(fresh.now_ms, 9, N2, &Summary { hearsay: word, ..Summary::default() });
    fresh.leading_since_ms = Some(fresh.now_ms);
    fresh.pass(4_000, quiet);
    assert_eq!(fresh.state("a"), AgentState::Offline);
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
    node.lose(N2);
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
    node.lose(N2);
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
    assert_eq!(node.ages.age(node.now_ms, &a), None);
    node.report(N2, "a", "i1", 100, 300);
    node.pass(500, quiet);
    let heard = node.ages.age(node.now_ms, &a).unwrap();
    assert_eq!((heard.node, heard.level1_age_ms, heard.level2_age_ms), (N2, 600, 800));
    // It moved to another node.
    node.report(N1, "a", "i1", 0, 0);
    assert_eq!(node.ages.age(node.now_ms, &a).unwrap().node, N1);
    node.ages.remove(&a);
    assert!(node.ages.age(node.now_ms, &a).is_some(), "a number still means it");
    node.lose(N1);
    node.lose(N2);
    assert_eq!(node.ages.age(node.now_ms, &a), None, "a removed agent is forgotten");
}

#[test]
fn an_agent_that_asked_for_a_longer_ttl_has_it() {
    let mut node = Node::leader(&["a", "b"]);
    node.change("a", |record| record.registration.ttl_ms = Some(60_000));
    node.change("b", |record| record.registration.ttl_ms = Some(1_000));
    node.pass(5_000, |node| ["a", "b"].iter().for_each(|id| node.report(N1, id, "i1", 0, 0)));
    let silent_since = node.now_ms;
    node.pass(70_000, quiet);
    let after = |line: &str| line.split_once(' ').unwrap().0.parse::<u64>().unwrap() - silent_since;
    let took = node.took();
    assert!(took[0].contains("b offline") && (9_000..=10_000).contains(&after(&took[0])), "{took:?}");
    assert!(took[1].contains("a offline") && (60_000..=61_000).contains(&after(&took[1])), "{took:?}");
    assert_eq!(took.len(), 2);
}

#[test]
fn what_an_operator_drained_is_left_alone_until_it_is_silent() {
    let mut node = Node::leader(&["a"]);
    let beat = |node: &mut Node| node.report(N1, "a", "i1", 0, 0);
    node.pass(2_000, beat);
    node.change("a", |record| {
        record.drain = Some(Box::new(Drain { by: Principal::Loopback, at: Stamp::default() }));
        (record.state, record.reason) = (AgentState::Draining, StateReason::Drained);
    });
    node.pass(20_000, beat);
    assert_eq!(node.took(), [""; 0]);
    node.pass(11_000, quiet);
    assert!(node.took()[0].ends_with("a offline (process heartbeat (level 1) late)"));
}

#[test]
fn an_agent_without_a_free_slot_owes_no_level_2() {
    let mut node = Node::leader(&["a"]);
    let slot = |node: &mut Node| {
        let slot = Slot { instance: InstanceId::parse("i1").unwrap(), attempt: 0, since_ms: 0 };
        node.live.write(&Write::PutSlot {
            agent_id: AgentId::parse("a").unwrap(),
            msg_id: MsgId::parse("m").unwrap(),
            slot,
        });
    };
    node.change("a", |record| record.registration.max_concurrency = 1);
    slot(&mut node);
    let start = node.now_ms;
    let process_only = |node: &mut Node| node.report(N1, "a", "i1", 0, node.now_ms - start);
    node.pass(60_000, process_only);
    assert_eq!(node.took(), [""; 0]);
    // It has a slot again, and a TTL from then on to say so.
    let (agent_id, msg_id) = (AgentId::parse("a").unwrap(), MsgId::parse("m").unwrap());
    node.live.write(&Write::RemoveSlot { agent_id, msg_id });
    let freed = node.now_ms;
    node.pass(12_000, process_only);
    let took = node.took();
    let (at, what) = took[0].split_once(' ').unwrap();
    assert!(what.starts_with("a draining"), "{took:?}");
    assert!((8_400..=10_000).contains(&(at.parse::<u64>().unwrap() - freed)), "{took:?}");
}

#[test]
fn a_node_that_tells_nothing_for_two_seconds_is_lost_though_its_link_stands() {
    let mut node = Node::leader(&["a", "b"]);
    let both = |node: &mut Node| {
        node.report(N2, "a", "i1", 3_000, 3_000);
        node.report(N1, "b", "i1", 0, 0);
    };
    node.pass(10_000, both);
    let last = node.now_ms;
    node.mute = Some(N2);
    node.pass(12_000, |node| node.report(N1, "b", "i1", 0, 0));
    let took = node.took();
    let (at, what) = took[0].split_once(' ').unwrap();
    assert!(what.starts_with("a offline"), "{took:?}");
    // Without it, 6 s after the last word: it was 3 s old then.
    assert!((11_000..=12_000).contains(&(at.parse::<u64>().unwrap() - last)), "{took:?}");
}

#[test]
fn a_registration_outlives_its_agent_by_seven_days() {
    let mut node = Node::leader(&[]);
    let week_ms = 7 * 24 * 60 * 60 * 1000;
    node.now_ms += week_ms;
    let now_ms = node.now_ms;
    for (id, ago_ms) in [("a", week_ms + 1), ("b", week_ms - 5_000)] {
        node.put(id, "i1", AgentState::Offline, StateReason::ProcessSilent);
        node.change(id, |record| record.since.cluster_ms = now_ms - ago_ms);
    }
    node.put("c", "i1", AgentState::Draining, StateReason::Asked);
    node.tick();
    assert_eq!(node.took(), [format!("{now_ms} a removed")]);
    node.pass(8_000, |node| node.report(N1, "c", "i1", 0, 0));
    assert!(matches!(&node.took()[..], [one] if one.ends_with("b removed")));
}

fn crowd(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("a{i:03}")).collect()
}

fn all_beat(ids: &[String]) -> impl Fn(&mut Node) {
    let ids = ids.to_vec();
    move |node: &mut Node| ids.iter().for_each(|id| node.report(N1, id, "i1", 0, 0))
}

#[test]
fn when_most_fall_silent_together_expiry_waits_a_ttl_then_goes_ahead() {
    let ids = crowd(30);
    let mut node = Node::leader(&[]);
    ids.iter().for_each(|id| node.put(id, "i1", AgentState::Ready, StateReason::Registered));
    node.pass(5_000, all_beat(&ids));
    let silent_since = node.now_ms;
    // 4 of them are well.
    node.pass(30_000, all_beat(&ids[..4]));
    let took = node.took();
    let at = |line: &str| line.split_once(' ').unwrap().0.parse::<u64>().unwrap() - silent_since;
    assert!(took[0].ends_with("26 of 30 wait 9000 ms"), "{}", took[0]);
    assert!((9_000..=10_000).contains(&at(&took[0])));
    assert_eq!(took.len(), 27, "one alarm, and each expires once");
    assert!(took[1..].iter().all(|line| line.contains("offline") && (18_000..=19_600).contains(&at(line))));
    // They return, and the next time is a time of its own.
    node.pass(2_000, all_beat(&ids));
    assert_eq!(node.took().len(), 26);
    node.pass(30_000, quiet);
    assert!(node.took()[0].ends_with("30 of 30 wait 9000 ms"));
}

#[test]
fn a_pause_ends_when_they_are_heard_again_and_nobody_expires() {
    let ids = crowd(25);
    let mut node = Node::leader(&[]);
    ids.iter().for_each(|id| node.put(id, "i1", AgentState::Ready, StateReason::Registered));
    node.pass(5_000, all_beat(&ids));
    node.pass(15_000, quiet);
    node.pass(20_000, all_beat(&ids));
    assert_eq!(node.took().len(), 1, "the alarm alone");
}

#[test]
fn an_operator_ends_the_pause_and_a_new_leader_goes_on_with_it() {
    let ids = crowd(20);
    let mut node = Node::leader(&[]);
    ids.iter().for_each(|id| node.put(id, "i1", AgentState::Ready, StateReason::Registered));
    node.pass(5_000, all_beat(&ids));
    node.pass(12_000, quiet);
    assert_eq!(node.took().len(), 1);
    // Another leader, 2 to 3 s later, which knows the pause from the registry alone.
    node.leading_since_ms = None;
    node.tick();
    node.pass(1_000, quiet);
    node.leading_since_ms = Some(node.now_ms);
    node.pass(4_000, quiet);
    assert!(node.took().iter().all(|line| line.contains("wait 9000 ms")), "its time is not over");
    let rules = Arc::make_mut(&mut node.live.rules);
    rules.expiry.as_mut().unwrap().forced_by = Some(Principal::Loopback);
    node.pass(1_000, quiet);
    let took = node.took();
    assert_eq!(took.iter().filter(|line| line.contains("offline")).count(), 20, "{took:?}");
}

#[test]
fn fewer_than_twenty_or_the_smaller_half_expire_at_once() {
    for (count, silent) in [(19, 19), (60, 30)] {
        let ids = crowd(count);
        let mut node = Node::leader(&[]);
        ids.iter().for_each(|id| node.put(id, "i1", AgentState::Ready, StateReason::Registered));
        node.pass(5_000, all_beat(&ids));
        node.pass(11_000, all_beat(&ids[silent..]));
        let took = node.took();
        assert_eq!(took.len(), silent, "{took:?}");
        assert!(took.iter().all(|line| line.contains("offline")));
    }
}

/// The figures that ARCHITECTURE.md claims, with room for a slow machine: one look at 100,000 agents
/// that are well, and one second's summaries of them.
#[test]
fn a_hundred_thousand_agents_cost_a_small_part_of_a_core() {
    const AGENTS: u32 = 100_000;
    let ids: Vec<String> = (0..AGENTS).map(|i| format!("agent_{i:06}")).collect();
    let mut node = Node::leader(&[]);
    ids.iter().for_each(|id| node.put(id, "i1", AgentState::Ready, StateReason::Registered));
    let names = ids.iter().zip(0..).map(|(id, number)| Named {
        number,
        agent_id: AgentId::parse(id).unwrap(),
        instance: InstanceId::parse("i1").unwrap(),
    });
    let first = Summary { begins: true, names: names.collect(), ..Summary::default() };
    node.ages.told(node.now_ms, 2, N2, &first);
    let (mut told, mut looked) = (Duration::ZERO, Duration::ZERO);
    let mut bytes = 0;
    let rounds = 30;
    for second in 0..rounds {
        node.now_ms += 1_000;
        // Two beats of each within three seconds.
        let ages = (0..AGENTS).filter(|number| (number + second) % 3 != 0);
        let ages =
            ages.map(|number| Age { number, level1_age_ms: 300, level2_age_ms: 1_500, offset_ms: None });
        let summary = Summary { ages: ages.collect(), ..Summary::default() };
        bytes += codec::encode(&summary).len();
        let began = Instant::now();
        node.ages.told(node.now_ms, 2, N2, &summary);
        told += began.elapsed();
        let began = Instant::now();
        node.tick();
        looked += began.elapsed();
    }
    assert_eq!(node.took(), [""; 0], "nobody changes, so nothing is proposed");
    let a_second = |total: Duration| total / rounds;
    println!(
        "100,000 agents, a second: told {:?}, looked at {:?}, {} bytes a link",
        a_second(told),
        a_second(looked),
        bytes / rounds as usize
    );
    assert!(a_second(told + looked) < Duration::from_millis(200));
    assert!(bytes / (rounds as usize) < 800_000);
}
