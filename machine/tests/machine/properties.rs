//! What holds after any sequence of commands, sensible or not. A failing sequence is shrunk and its
//! seed printed and kept by proptest.

use std::{collections::BTreeMap, sync::Arc};

use proptest::{collection::vec, option, prelude::*};
use reach_machine::{MemoryRows, Outcome, Position, Rows, Slot, apply};
use reach_protocol::{
    AgentId, AgentState, Code, Command, ErrorReply, EventType, Fact, InstanceId, MessageState, MsgId,
    Principal, Reply, Rules, StateReason, Target, TraceId,
    command::{Decision, FailReason},
    id::Name,
    message::{Holder, MessageRecord, PendingReason, RETRY_AFTER_MS, StateName, TimeoutCause},
};

use crate::build::{self, agent_id, holder, instance, msg_id, principal, stamp, tags};

const AGENTS: [&str; 3] = ["a", "b", "c"];
const RUNS: [&str; 4] = ["i0", "i1", "i2", "i3"];
const MESSAGES: [&str; 8] = ["m0", "m1", "m2", "m3", "m4", "m5", "m6", "m7"];

/// The most that any rules of these tests allow; the first ones too.
const ATTEMPTS_MAX: u32 = 3;

/// A wish; what it asks for exactly depends on where the tables stand.
#[derive(Clone, Debug)]
enum Wish {
    Register {
        agent: usize,
        run: usize,
        started_ms: u64,
        slots: u32,
        both_tags: bool,
        by_other: bool,
    },
    Remove {
        agent: usize,
        by_operator: bool,
    },
    Liveness {
        agent: usize,
        state: AgentState,
        stale: bool,
    },
    Drain {
        agent: usize,
        drains: bool,
        stale: bool,
        by_operator: bool,
    },
    /// Its registration has outlived it, or not.
    RemoveOffline {
        agent: usize,
    },
    Submit {
        msg: usize,
        content: usize,
        give: Option<usize>,
        to: Option<usize>,
        by: Option<usize>,
        parent: Option<usize>,
        flow_seq: Option<u64>,
        other_trace: bool,
        expires_in_ms: u64,
    },
    Attempt {
        verb: Verb,
        msg: usize,
        aim: Aim,
    },
    TimeOut {
        msg: usize,
    },
    GiveUp {
        msg: usize,
    },
    Rules {
        attempts_max: u32,
        waiting_max: u64,
        keeps_operator: bool,
    },
    Pass {
        ms: u64,
    },
}

#[derive(Clone, Copy, Debug)]
enum Verb {
    Assign,
    Dispatched,
    Received,
    Complete { bytes: usize },
    Fail(FailReason),
    Release,
    Return,
    Retake { to: Option<usize> },
    FreeSlot,
}

/// Whom a command about an attempt names: mostly whoever holds it, or could.
#[derive(Clone, Copy, Debug)]
enum Aim {
    Holder { else_agent: usize },
    Any { agent: usize, run: usize, attempt: u32 },
}

fn wish() -> impl Strategy<Value = Wish> {
    let agent = 0..AGENTS.len();
    let msg = 0..MESSAGES.len();
    let state = prop_oneof![Just(AgentState::Ready), Just(AgentState::Draining), Just(AgentState::Offline)];
    let reason = prop_oneof![
        Just(FailReason::Error),
        Just(FailReason::Unparseable),
        Just(FailReason::Refused),
        Just(FailReason::Busy)
    ];
    let verb = prop_oneof![
        4 => Just(Verb::Assign),
        2 => Just(Verb::Dispatched),
        3 => Just(Verb::Received),
        3 => prop_oneof![Just(20usize), Just(2_000)].prop_map(|bytes| Verb::Complete { bytes }),
        1 => reason.prop_map(Verb::Fail),
        2 => Just(Verb::Release),
        3 => Just(Verb::Return),
        1 => Just(Verb::FreeSlot),
        3 => option::weighted(0.7, agent.clone()).prop_map(|to| Verb::Retake { to }),
    ];
    let aim = prop_oneof![
        5 => agent.clone().prop_map(|else_agent| Aim::Holder { else_agent }),
        1 => (agent.clone(), 0..RUNS.len(), 0u32..3)
            .prop_map(|(agent, run, attempt)| Aim::Any { agent, run, attempt }),
    ];
    let submit = (
        msg.clone(),
        0usize..4,
        option::of(agent.clone()),
        option::weighted(0.2, agent.clone()),
        option::weighted(0.3, agent.clone()),
        option::weighted(0.2, msg.clone()),
        (option::weighted(0.1, prop_oneof![Just(u64::MAX), 0u64..50]), any::<bool>()),
        prop_oneof![Just(5u64), Just(50), Just(u64::MAX)],
    );
    prop_oneof![
        4 => (agent.clone(), 0..RUNS.len(), 0u64..4, 1u32..4, prop::bool::weighted(0.8), prop::bool::weighted(0.1))
            .prop_map(|(agent, run, started_ms, slots, both_tags, by_other)| {
                Wish::Register { agent, run, started_ms, slots, both_tags, by_other }
            }),
        1 => (agent.clone(), any::<bool>())
            .prop_map(|(agent, by_operator)| Wish::Remove { agent, by_operator }),
        3 => (agent, state, prop::bool::weighted(0.2))
            .prop_map(|(agent, state, stale)| Wish::Liveness { agent, state, stale }),
        2 => (0..AGENTS.len(), any::<bool>(), prop::bool::weighted(0.2), prop::bool::weighted(0.9)).prop_map(
            |(agent, drains, stale, by_operator)| Wish::Drain { agent, drains, stale, by_operator }
        ),
        1 => (0..AGENTS.len()).prop_map(|agent| Wish::RemoveOffline { agent }),
        8 => submit.prop_map(
            |(msg, content, give, to, by, parent, (flow_seq, other_trace), expires_in_ms)| {
                let content = content / 3;
                Wish::Submit { msg, content, give, to, by, parent, flow_seq, other_trace, expires_in_ms }
            }
        ),
        16 => (verb, msg.clone(), aim).prop_map(|(verb, msg, aim)| Wish::Attempt { verb, msg, aim }),
        1 => msg.clone().prop_map(|msg| Wish::TimeOut { msg }),
        1 => msg.prop_map(|msg| Wish::GiveUp { msg }),
        1 => (1u32..=ATTEMPTS_MAX, 1u64..5, prop::bool::weighted(0.9)).prop_map(
            |(attempts_max, waiting_max, keeps_operator)| {
                Wish::Rules { attempts_max, waiting_max, keeps_operator }
            }
        ),
        2 => prop_oneof![8 => 0u64..20, 2 => Just(1_000), 1 => Just(16_000)].prop_map(|ms| Wish::Pass { ms }),
    ]
}

/// The command that a wish comes to.
fn command(wish: &Wish, rows: &MemoryRows) -> Option<Command> {
    Some(match *wish {
        Wish::Register { agent, run, started_ms, slots, both_tags, by_other } => {
            let declared = tags(if both_tags { "x,y" } else { "y" });
            Command::Register {
                registration: Box::new(build::registration(AGENTS[agent], declared, slots)),
                instance: instance(RUNS[run]),
                started_ms,
                author: if by_other {
                    principal("user:u")
                } else {
                    Principal::Agent(agent_id(AGENTS[agent]))
                },
            }
        }
        Wish::Remove { agent, by_operator } => Command::Remove {
            agent_id: agent_id(AGENTS[agent]),
            instance: rows.agent(&agent_id(AGENTS[agent])).map(|record| record.instance.clone()),
            author: principal(if by_operator { "user:op" } else { "user:u" }),
        },
        Wish::Liveness { agent, state, stale } => {
            let record = rows.agent(&agent_id(AGENTS[agent]))?;
            Command::SetLiveness {
                agent_id: record.agent_id().clone(),
                instance: record.instance.clone(),
                liveness_seq: record.liveness_seq + u64::from(stale),
                state,
                reason: StateReason::LoopSilent,
            }
        }
        Wish::Drain { agent, drains, stale, by_operator } => {
            let agent_id = agent_id(AGENTS[agent]);
            let drain_seq = rows.agent(&agent_id).map_or(0, |record| record.drain_seq) + u64::from(stale);
            let author = principal(if by_operator { "user:op" } else { "user:u" });
            match drains {
                true => Command::Drain { agent_id, drain_seq, author },
                false => Command::Resume { agent_id, drain_seq, author },
            }
        }
        Wish::RemoveOffline { agent } => {
            let record = rows.agent(&agent_id(AGENTS[agent]))?;
            Command::RemoveOffline {
                agent_id: record.agent_id().clone(),
                instance: record.instance.clone(),
                liveness_seq: record.liveness_seq,
            }
        }
        Wish::Submit { msg, content, give, to, by, parent, flow_seq, other_trace, expires_in_ms } => {
            let target = match to {
                Some(agent) => Target::Agent(agent_id(AGENTS[agent])),
                None => Target::Capabilities { required: tags("x"), preferred: Vec::new() },
            };
            let decision = match give {
                Some(agent) => Decision::Give { holder: current_or_first(rows, agent), warnings: Vec::new() },
                None => Decision::Wait { reason: PendingReason::Saturated, warnings: Vec::new() },
            };
            let author = match by {
                Some(agent) => Principal::Agent(agent_id(AGENTS[agent])),
                None => principal("user:u"),
            };
            let content = format!("content {content}");
            let mut submit = build::submit(MESSAGES[msg], target, &content, author, decision);
            submit.parent = parent.map(|parent| msg_id(MESSAGES[parent]));
            submit.flow_seq = flow_seq;
            submit.expires_in_ms = expires_in_ms;
            if other_trace {
                submit.trace_id = TraceId::parse("t2").unwrap();
            }
            Command::Submit(Box::new(submit))
        }
        Wish::Attempt { verb, msg, aim } => attempt_command(verb, msg_id(MESSAGES[msg]), aim, rows),
        Wish::TimeOut { msg } => Command::TimeOut { msg_id: msg_id(MESSAGES[msg]) },
        Wish::GiveUp { msg } => Command::GiveUp {
            msg_id: msg_id(MESSAGES[msg]),
            error: Box::new(ErrorReply::new(Code::NoCandidate, "nobody can")),
        },
        Wish::Rules { attempts_max, waiting_max, keeps_operator } => {
            let mut rules = first_rules();
            rules.delivery.attempts_max = attempts_max;
            rules.routing.waiting_max = waiting_max;
            if !keeps_operator {
                rules.grants.operators.clear();
            }
            let author = principal("user:op");
            Command::ApplyRules { rules: Box::new(rules), text: String::new(), expect: None, author }
        }
        Wish::Pass { .. } => return None,
    })
}

fn attempt_command(verb: Verb, msg_id: MsgId, aim: Aim, rows: &MemoryRows) -> Command {
    let (attempt, holder) = match aim {
        Aim::Any { agent, run, attempt } => (attempt, holder(AGENTS[agent], RUNS[run])),
        Aim::Holder { else_agent } => {
            let record = rows.message(&msg_id);
            let held = record.as_ref().and_then(|record| record.state.holder().cloned());
            let attempt = record.map_or(0, |record| record.attempt);
            (attempt, held.unwrap_or_else(|| current_or_first(rows, else_agent)))
        }
    };
    match verb {
        Verb::Assign => Command::Assign { msg_id, attempt, holder, warnings: Vec::new() },
        Verb::Dispatched => Command::Dispatched { msg_id, attempt, holder },
        Verb::Received => Command::Received { msg_id, attempt, holder },
        Verb::Complete { bytes } => Command::Complete {
            msg_id,
            attempt,
            holder,
            excerpt: "fine".into(),
            result: reach_protocol::Json::parse(&format!("\"{}\"", "r".repeat(bytes))).unwrap(),
            cost: None,
        },
        Verb::Fail(reason) => Command::Fail { msg_id, attempt, holder, reason, message: "no".into() },
        Verb::Release => Command::Release { msg_id, attempt, holder },
        Verb::Return => Command::Return { msg_id, attempt, holder, reason: PendingReason::DeliveryFailed },
        Verb::Retake { to } => {
            let to = to.map(|agent| current_or_first(rows, agent));
            Command::Retake { msg_id, attempt, holder, to, warnings: Vec::new() }
        }
        Verb::FreeSlot => Command::FreeSlot { agent_id: holder.agent_id, msg_id, attempt },
    }
}

fn current_or_first(rows: &MemoryRows, agent: usize) -> Holder {
    let agent_id = agent_id(AGENTS[agent]);
    let instance = rows.agent(&agent_id).map_or_else(|| instance(RUNS[0]), |record| record.instance.clone());
    Holder { agent_id, instance }
}

fn first_rules() -> Rules {
    let mut rules = Rules::default();
    rules.grants.operators = vec![Name::parse("op").unwrap()];
    rules.limits.result_bytes = 1_024;
    rules.delivery.attempts_max = ATTEMPTS_MAX;
    rules.delivery.return_within_ms = 10;
    rules.liveness.remove_after_ms = 1_000;
    rules
}

fn init() -> Command {
    Command::Init { cluster: Name::parse("demo").unwrap(), rules: Box::new(first_rules()) }
}

fn at(index: usize) -> Position {
    Position { index: index as u64, ordinal: 0 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_keeps_the_invariants_and_replays_alike(wishes in vec(wish(), 0..120)) {
        let mut rows = MemoryRows::new();
        let mut log = Vec::new();
        let mut now_ms = 0;
        let mut starts = BTreeMap::new();
        rows.write(apply(&rows, at(0), stamp(0), &init()).writes);
        log.push((stamp(0), init()));
        for wish in &wishes {
            if let Wish::Pass { ms } = wish {
                now_ms += ms;
            }
            let Some(command) = command(wish, &rows) else { continue };
            let before = rows.clone();
            let outcome = apply(&rows, at(log.len()), stamp(now_ms), &command);
            rows.write(outcome.writes.clone());
            check_step(&before, &rows, &outcome);
            check_rows(&rows);
            check_retries(&before, &rows, now_ms);
            check_starts(&mut starts, &rows);

            // Safe to propose twice, also later than the first time.
            let again = apply(&rows, at(log.len() + 1), stamp(now_ms), &command);
            prop_assert_eq!(&again.reply, &outcome.reply);
            prop_assert!(again.writes.is_empty() && again.facts.is_empty(), "{:?}", again);
            log.push((stamp(now_ms), command));
        }

        let mut replayed = MemoryRows::new();
        for (index, (stamp, command)) in log.iter().enumerate() {
            let writes = apply(&replayed, at(index), *stamp, command).writes;
            replayed.write(writes);
        }
        prop_assert_eq!(&replayed, &rows);
    }
}

/// What one command may do to the tables.
fn check_step(before: &MemoryRows, after: &MemoryRows, outcome: &Outcome) {
    if matches!(outcome.reply, Reply::Refused(_)) {
        assert_eq!(before, after, "a refused command changes nothing");
    }
    for (msg_id, ended) in before.finished() {
        assert_eq!(after.finished().get(msg_id), Some(ended), "an end is final");
    }
    for record in before.messages() {
        let now = after.message(&record.msg_id).expect("a message never disappears");
        assert!(now.attempt >= record.attempt, "attempts count up");
    }
    for (agent_id, record) in &after.live().agents {
        let taken = after.slots_taken(agent_id);
        if taken > before.slots_taken(agent_id) {
            assert!(taken <= record.registration.max_concurrency, "{agent_id} has no slot to give");
            assert_eq!(record.state, AgentState::Ready, "only a ready agent gets work");
        }
        if let Some(earlier) = before.live().agents.get(agent_id)
            && earlier.instance == record.instance
        {
            assert!(record.liveness_seq >= earlier.liveness_seq, "liveness counts up");
            assert_eq!(record.started_ms, earlier.started_ms, "a start is computed once");
        }
    }
    let mut last = BTreeMap::new();
    for fact in &outcome.facts {
        if let Some(record) = fact.message() {
            last.insert(&record.msg_id, record);
        }
        if let Fact::Freed { agent_id, msg_id, .. } = fact {
            assert!(before.slot(agent_id, msg_id).is_some(), "a slot that was taken");
            assert!(after.slot(agent_id, msg_id).is_none(), "a slot that is free");
        }
    }
    for (msg_id, told) in last {
        assert_eq!(after.message(msg_id).as_ref(), Some(told), "facts tell of the rows");
    }
    let changed = after.messages().filter(|record| before.message(&record.msg_id).as_ref() != Some(record));
    for record in changed {
        let told = |fact: &&Fact| fact.message().is_some_and(|told| *told == record);
        assert!(outcome.facts.iter().any(|fact| told(&fact)), "no change without its fact");
    }
}

/// What holds in any tables.
fn check_rows(rows: &MemoryRows) {
    let live = rows.live();
    let all: Vec<Arc<MessageRecord>> = rows.messages().collect();
    let pending =
        all.iter().filter(|record| matches!(record.state, MessageState::Pending { .. })).count() as u64;
    assert_eq!(rows.waiting(), pending);

    let mut slots: BTreeMap<(&AgentId, &MsgId), &Slot> = BTreeMap::new();
    for (agent_id, of_agent) in &live.slots {
        let agent = live.agents.get(agent_id).expect("a slot's agent is registered");
        for (msg_id, slot) in of_agent {
            assert_eq!(slot.instance, agent.instance, "a slot goes with its run");
            slots.insert((agent_id, msg_id), slot);
        }
    }
    for record in all.iter().filter(|record| !record.state.is_final()) {
        // A lost agent's slot outlives its attempt.
        let of_attempt = |slot: &Slot| slot.attempt == record.attempt;
        let of_message: Vec<_> = slots
            .iter()
            .filter(|((_, msg_id), slot)| **msg_id == record.msg_id && of_attempt(slot))
            .collect();
        match record.state.holder() {
            None => assert!(of_message.is_empty(), "what waits has no slot"),
            Some(held) => {
                let [((agent_id, _), slot)] = of_message[..] else { panic!("exactly its slot") };
                assert_eq!((*agent_id, &slot.instance), (&held.agent_id, &held.instance));
            }
        }
        if let MessageState::Acknowledged { holder } = &record.state {
            assert!(rows.was_delivered(&record.msg_id, &holder.agent_id));
        }
    }

    let completed: Vec<_> = all.iter().filter(|record| record.state.name() == StateName::Completed).collect();
    assert_eq!(completed.len(), rows.results().len(), "one result for each completed message");
    assert!(completed.iter().all(|record| rows.result(&record.msg_id).is_some()));
    let events = rows.events_of(&EventType::parse("task.completed.v1").unwrap());
    assert_eq!(events.count(), completed.len());
    assert_eq!(rows.envelopes().len(), all.len(), "an envelope for each message");

    let mut places: BTreeMap<&MsgId, (StateName, u32)> = BTreeMap::new();
    for (trace_id, trace) in rows.traces() {
        assert_eq!(trace.hops, rows.hops(trace_id).len() as u64);
        for hop in rows.hops(trace_id) {
            let place = places.insert(&hop.msg_id, (hop.to, hop.attempt));
            assert_eq!(place.map(|(state, _)| state), hop.from, "each hop begins where the last one ended");
        }
    }
    for record in &all {
        let (state, attempt) = places[&record.msg_id];
        assert_eq!(state, record.state.name(), "the last hop is the state");
        assert!(attempt == record.attempt || attempt + 1 == record.attempt);
        assert!(rows.traces()[&record.trace_id].last_flow_seq >= record.flow_seq);
    }
}

/// No attempt begins before its time, and what ends for want of a result after it was received is
/// noted.
fn check_retries(before: &MemoryRows, after: &MemoryRows, now_ms: u64) {
    for record in after.messages() {
        let Some(earlier) = before.message(&record.msg_id) else { continue };
        assert!(record.retries as usize <= RETRY_AFTER_MS.len());
        assert!(record.attempt >= record.retries && record.attempt <= record.retries + ATTEMPTS_MAX);
        assert!(record.retry_at_ms.is_none() || matches!(record.state, MessageState::Pending { .. }));
        let began = record.state.name() == StateName::Matched && earlier.state.name() != StateName::Matched;
        assert!(!began || earlier.retry_at_ms.is_none_or(|at_ms| now_ms >= at_ms), "an attempt too early");
        if record.retries > earlier.retries {
            let after_ms = RETRY_AFTER_MS[earlier.retries as usize];
            let waits = record.retry_at_ms.is_some_and(|at_ms| at_ms == now_ms + after_ms);
            // Otherwise it has waited for as long as its agent has been away.
            let away_ms = || {
                let holder = earlier.state.holder().expect("an attempt has a holder");
                now_ms - before.agent(&holder.agent_id).expect("it is registered").since.cluster_ms
            };
            assert!(waits || away_ms() >= after_ms, "a retry too early");
        }
        if earlier.state.name() == StateName::Acknowledged
            && record.attempt > earlier.attempt
            && let Some(agent_id) = earlier.state.holder().map(|holder| &holder.agent_id)
            && after.agent(agent_id).is_some()
        {
            assert!(after.slot(agent_id, &record.msg_id).is_some(), "a lost agent may still be at work");
        }
    }
    for record in after.finished().values() {
        let MessageState::TimedOut { cause, .. } = &record.state else {
            assert!(!after.dead_letters().contains_key(&record.msg_id));
            continue;
        };
        let was_received = after.delivered().iter().any(|(msg_id, _)| *msg_id == record.msg_id);
        let dead = after.dead_letters().get(&record.msg_id);
        let must = *cause == TimeoutCause::AttemptsExhausted || was_received;
        assert!(dead.is_some() || !must, "{} left no dead letter", record.msg_id);
        if let Some(dead) = dead {
            assert_eq!((dead.at, dead.agent_id.is_some()), (record.since, true));
            assert!(must || record.retries > 0);
        }
    }
}

/// Each agent's start, and with it its run, only ever goes up: across runs and removals.
fn check_starts(starts: &mut BTreeMap<AgentId, (u64, InstanceId)>, rows: &MemoryRows) {
    for (agent_id, record) in &rows.live().agents {
        let start = (record.started_ms, record.instance.clone());
        if let Some(before) = starts.insert(agent_id.clone(), start.clone()) {
            assert!(before <= start, "{agent_id} went back from {before:?} to {start:?}");
        }
    }
}
