//! The choice by weight in figures.

use std::collections::BTreeMap;

use proptest::prelude::*;
use reach_protocol::{
    AgentId, AgentState, Capability, InstanceId, Registration, Stamp, StateReason, Tag, Target,
    agent::AgentRecord,
};
use reach_routing::{Routed, Router};

fn record(id: &str, weight: f64, max_concurrency: u32) -> AgentRecord {
    let capability = Capability::new(Tag::parse("x").unwrap(), weight);
    let mut registration = Registration::new(AgentId::parse(id).unwrap(), vec![capability]);
    registration.max_concurrency = max_concurrency;
    AgentRecord {
        registration,
        instance: InstanceId::parse("i").unwrap(),
        started_ms: 0,
        registered: Stamp::default(),
        state: AgentState::Ready,
        reason: StateReason::Registered,
        since: Stamp::default(),
        liveness_seq: 0,
        drain: None,
        drain_seq: 0,
    }
}

fn x() -> Target {
    Target::Capabilities { required: vec![Tag::parse("x").unwrap()], preferred: Vec::new() }
}

fn give(router: &mut Router) -> Option<AgentId> {
    match router.route(&x(), &[]) {
        Routed::Give { holder, .. } => Some(holder.agent_id),
        _ => None,
    }
}

fn count(router: &mut Router, tasks: usize) -> BTreeMap<AgentId, u32> {
    let mut given = BTreeMap::new();
    for _ in 0..tasks {
        *given.entry(give(router).expect("somebody is free")).or_default() += 1;
    }
    given
}

fn assert_share(given: &BTreeMap<AgentId, u32>, id: &str, expected: f64) {
    let share = f64::from(given[id]) / f64::from(given.values().sum::<u32>());
    assert!((share / expected - 1.0).abs() < 0.03, "{id} got {share}, expected {expected}: {given:?}");
}

#[test]
fn shares_follow_weights_within_three_percent() {
    let mut router = Router::new();
    for (id, weight) in [("a", 1.0), ("b", 0.5), ("c", 2.0)] {
        router.put(&record(id, weight, 8), 0);
    }
    let given = count(&mut router, 10_000);
    for (id, weight) in [("a", 1.0), ("b", 0.5), ("c", 2.0)] {
        assert_share(&given, id, weight / 3.5);
    }
}

#[test]
fn time_spent_saturated_is_not_made_up_for() {
    let mut router = Router::new();
    for (id, weight) in [("a", 1.0), ("b", 0.5), ("c", 2.0)] {
        router.put(&record(id, weight, 8), 0);
    }
    let c = AgentId::parse("c").unwrap();
    let mut given = BTreeMap::<AgentId, u32>::new();
    for _ in 0..10 {
        router.set_taken(&c, 8);
        let without = count(&mut router, 300);
        assert_share(&without, "a", 2.0 / 3.0);
        assert!(!without.contains_key("c"));
        router.set_taken(&c, 0);
        // Right from the start of its return it gets its share and no more.
        let first = count(&mut router, 7);
        assert!((3..=5).contains(&first[&c]), "{first:?}");
        for (id, n) in count(&mut router, 700).into_iter().chain(first) {
            *given.entry(id).or_default() += n;
        }
    }
    for (id, weight) in [("a", 1.0), ("b", 0.5), ("c", 2.0)] {
        assert_share(&given, id, weight / 3.5);
    }
}

#[test]
fn a_crowd_that_joins_gets_no_burst() {
    let mut router = Router::new();
    for i in 0..10 {
        router.put(&record(&format!("old{i}"), 1.0, 8), 0);
    }
    count(&mut router, 12_345);
    for i in 0..90 {
        router.put(&record(&format!("new{i:02}"), 1.0, 8), 0);
    }
    let given = count(&mut router, 100);
    let old: u32 = given.iter().filter(|(id, _)| id.starts_with("old")).map(|(_, n)| n).sum();
    assert!((9..=20).contains(&old), "the old ones got {old} of 100: {given:?}");
    assert!(given.values().all(|n| *n <= 2), "{given:?}");
}

#[test]
fn a_choice_among_100_000_agents_is_not_a_search() {
    // With a search for each this would take hours.
    let mut router = Router::new();
    for i in 0..100_000 {
        router.put(&record(&format!("a{i}"), 1.0, 1), 0);
    }
    for round in 0..2 {
        let mut taken = Vec::new();
        while let Some(agent_id) = give(&mut router) {
            router.set_taken(&agent_id, 1);
            taken.push(agent_id);
        }
        assert_eq!(taken.len(), 100_000, "round {round}");
        for agent_id in taken {
            router.set_taken(&agent_id, 0);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Put { agent: u8, weight: u8, ready: bool, max: u8 },
    Remove(u8),
    Take { agent: u8, taken: u8 },
    Route { avoid: Vec<u8>, prefer: Vec<u8> },
}

fn step() -> impl Strategy<Value = Step> {
    let few = || proptest::collection::vec(0..6u8, 0..3);
    prop_oneof![
        (0..6u8, 1..5u8, any::<bool>(), 1..3u8).prop_map(|(agent, weight, ready, max)| Step::Put {
            agent,
            weight,
            ready,
            max
        }),
        (0..6u8).prop_map(Step::Remove),
        (0..6u8, 0..3u8).prop_map(|(agent, taken)| Step::Take { agent, taken }),
        (few(), few()).prop_map(|(avoid, prefer)| Step::Route { avoid, prefer }),
    ]
}

proptest! {
    /// Whatever happened before, a choice is the one that a search through a plain list allows.
    #[test]
    fn the_index_agrees_with_a_plain_list(steps in proptest::collection::vec(step(), 1..60)) {
        let id = |n: &u8| AgentId::parse(&format!("a{n}")).unwrap();
        let mut router = Router::new();
        let mut plain = BTreeMap::<AgentId, (bool, u32, u32)>::new();
        for step in steps {
            match step {
                Step::Put { agent, weight, ready, max } => {
                    let taken = plain.get(&id(&agent)).map_or(0, |agent| agent.1);
                    let mut record = record(&id(&agent), f64::from(weight), u32::from(max));
                    record.state = if ready { AgentState::Ready } else { AgentState::Offline };
                    router.put(&record, taken);
                    plain.insert(id(&agent), (ready, taken, u32::from(max)));
                }
                Step::Remove(agent) => {
                    router.remove(&id(&agent));
                    plain.remove(&id(&agent));
                }
                Step::Take { agent, taken } => {
                    router.set_taken(&id(&agent), u32::from(taken));
                    if let Some(agent) = plain.get_mut(&id(&agent)) {
                        agent.1 = u32::from(taken);
                    }
                }
                Step::Route { avoid, prefer } => {
                    let avoid: Vec<_> = avoid.iter().map(id).collect();
                    let preferred: Vec<_> = prefer.iter().map(id).collect();
                    let ready: Vec<_> = plain.iter().filter(|(_, a)| a.0).map(|(id, _)| id).collect();
                    let others: Vec<_> = ready.iter().copied().filter(|id| !avoid.contains(id)).collect();
                    let pool = if others.is_empty() { &ready } else { &others };
                    let free: Vec<_> = pool.iter().copied().filter(|id| plain[*id].1 < plain[*id].2).collect();
                    let first: Vec<_> = free.iter().copied().filter(|id| preferred.contains(id)).collect();
                    let target = Target::Capabilities {
                        required: vec![Tag::parse("x").unwrap()],
                        preferred: preferred.clone(),
                    };
                    let explained = router.explain(&target, &avoid).next;
                    match router.route(&target, &avoid) {
                        Routed::Give { holder, warnings } => {
                            let allowed = if first.is_empty() { &free } else { &first };
                            prop_assert!(allowed.contains(&&holder.agent_id));
                            prop_assert_eq!(warnings.is_empty(), preferred.is_empty() || !first.is_empty());
                            prop_assert_eq!(explained, Some(holder.agent_id));
                        }
                        Routed::Wait { reason, .. } => {
                            prop_assert!(free.is_empty() && !plain.is_empty());
                            prop_assert_eq!(reason.as_str() == "saturated", !ready.is_empty());
                            prop_assert_eq!(explained, None);
                        }
                        Routed::NoCandidate(_) => prop_assert!(plain.is_empty()),
                    }
                }
            }
        }
    }
}
