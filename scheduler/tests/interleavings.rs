//! Any order of events leaves every accepted message with an end, or waiting for somebody who is not
//! there; and while nobody else decides, no choice made here is found stale.

use proptest::prelude::*;
use reach_protocol::{
    AgentId, AgentState, Command, Fact, MessageState, MsgId, Principal, Reply, Rules, StateReason, Target,
    command::FailReason,
    message::{Holder, PendingReason, RETRY_AFTER_MS},
};
use reach_scheduler::{Figures, Input};

mod world;

use world::{World, agent_id, capabilities};

type Tags = &'static [(&'static str, f64)];

/// Who there is, what they declare, and how many tasks each runs.
const AGENTS: [(&str, Tags, u32); 4] = [
    ("a", &[("x", 1.0)], 1),
    ("b", &[("x", 1.0), ("y", 2.0)], 2),
    ("c", &[("y", 1.0)], 1),
    ("d", &[("x", 0.5), ("z", 1.0)], 1),
];

#[derive(Clone, Debug)]
enum Step {
    Submit {
        target: usize,
        expires_in_ms: u64,
    },
    /// One more proposal of a submission that was made before.
    Repeat(usize),
    Apply(usize),
    Advance(u64),
    Liveness {
        agent: usize,
        state: AgentState,
    },
    /// A later run, with other capabilities or slots than before.
    Restart {
        agent: usize,
        as_agent: usize,
    },
    Remove(usize),
    /// By an operator, or taken back.
    Drain {
        agent: usize,
        drains: bool,
    },
    Receive(usize),
    Complete(usize),
    Fail(usize),
    /// Lets go of a slot whose attempt is over.
    Release(usize),
    /// The latest proposals do not get into the log.
    Void(usize),
    Lead,
}

fn step() -> impl Strategy<Value = Step> {
    let any_agent = || 0..AGENTS.len();
    prop_oneof![
        6 => (0..TARGETS, prop_oneof![4 => Just(60_000u64), 1 => 1..5_000u64])
            .prop_map(|(target, expires_in_ms)| Step::Submit { target, expires_in_ms }),
        1 => (0..100usize).prop_map(Step::Repeat),
        8 => prop_oneof![1..5usize, Just(usize::MAX)].prop_map(Step::Apply),
        3 => prop_oneof![3 => 1..500u64, 1 => 1_000..25_000u64].prop_map(Step::Advance),
        2 => (any_agent(), prop_oneof![
                2 => Just(AgentState::Ready), 1 => Just(AgentState::Draining), 1 => Just(AgentState::Offline)
            ])
            .prop_map(|(agent, state)| Step::Liveness { agent, state }),
        1 => (any_agent(), any_agent()).prop_map(|(agent, as_agent)| Step::Restart { agent, as_agent }),
        1 => any_agent().prop_map(Step::Remove),
        2 => (any_agent(), any::<bool>()).prop_map(|(agent, drains)| Step::Drain { agent, drains }),
        3 => (0..100usize).prop_map(Step::Receive),
        3 => (0..100usize).prop_map(Step::Complete),
        1 => (0..100usize).prop_map(Step::Fail),
        1 => (0..100usize).prop_map(Step::Release),
        1 => (1..4usize).prop_map(Step::Void),
        1 => Just(Step::Lead),
    ]
}

const TARGETS: usize = 6;

fn target(index: usize) -> Target {
    match index {
        0 => capabilities(&["x"], &[]),
        1 => capabilities(&["y"], &[]),
        2 => capabilities(&["x", "y"], &[]),
        3 => capabilities(&["x"], &["b", "d"]),
        4 => Target::Agent(agent_id("b")),
        _ => capabilities(&["z"], &["a"]),
    }
}

struct Run {
    world: World,
    submitted: Vec<(String, Target, u64)>,
    runs: u64,
}

impl Run {
    fn new() -> Self {
        let mut run = Self { world: World::new(Rules::default()), submitted: Vec::new(), runs: 0 };
        for (id, ..) in AGENTS {
            let index = AGENTS.iter().position(|agent| agent.0 == id).expect("it is one of them");
            run.restart(index, index);
        }
        run
    }

    fn restart(&mut self, agent: usize, as_agent: usize) {
        self.runs += 1;
        // The start of a later run lies later.
        self.world.now_ms += 1;
        let (_, tags, max) = AGENTS[as_agent];
        self.world.register(&agent_id(AGENTS[agent].0), tags, max, &format!("i{}", self.runs));
    }

    fn apply(&mut self, count: usize) {
        for applied in self.world.apply(count) {
            for fact in &applied.facts {
                if let Fact::Submitted(record) = fact {
                    let stale = MessageState::Pending { reason: PendingReason::DecisionStale };
                    assert_ne!(record.state, stale, "{} was given away on a wrong view", record.msg_id);
                }
            }
        }
        let Figures { decision_stale, .. } = self.world.scheduler.figures();
        assert_eq!(decision_stale, 0, "an assignment was made on a wrong view");
    }

    /// The n-th of the attempts that agents hold.
    fn held(&self, n: usize) -> Option<MsgId> {
        let live = self.world.rows.live();
        let held: Vec<_> = live.messages.values().filter(|record| record.state.holder().is_some()).collect();
        held.get(n % held.len().max(1)).map(|record| record.msg_id.clone())
    }

    fn ended_slots(&self) -> Vec<(MsgId, u32, Holder)> {
        let live = self.world.rows.live();
        let slots = live.slots.iter().flat_map(|(id, slots)| slots.iter().map(move |slot| (id, slot)));
        slots
            .filter(|(_, (msg_id, slot))| {
                live.messages.get(*msg_id).is_none_or(|record| record.attempt != slot.attempt)
            })
            .map(|(id, (msg_id, slot))| {
                let holder = Holder { agent_id: id.clone(), instance: slot.instance.clone() };
                (msg_id.clone(), slot.attempt, holder)
            })
            .collect()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Submit { target: index, expires_in_ms } => {
                let msg_id = format!("m{}", self.submitted.len());
                self.world.submit(&msg_id, target(index), expires_in_ms);
                self.submitted.push((msg_id, target(index), expires_in_ms));
            }
            Step::Repeat(n) => {
                let known = self.submitted.get(n % self.submitted.len().max(1)).cloned();
                // Ingress answers repeats of ended messages.
                if let Some((msg_id, target, expires_in_ms)) = known
                    && !self.world.rows.finished().contains_key(msg_id.as_str())
                {
                    self.world.submit(&msg_id, target, expires_in_ms);
                }
            }
            Step::Apply(count) => self.apply(count),
            Step::Advance(ms) => {
                // The log does not stall for long.
                if ms >= 1_000 {
                    self.apply(usize::MAX);
                }
                self.world.advance(ms);
            }
            Step::Liveness { agent, state } => {
                let reason = match state {
                    AgentState::Ready => StateReason::Returned,
                    AgentState::Draining => StateReason::LoopSilent,
                    AgentState::Offline => StateReason::ProcessSilent,
                };
                self.world.set_liveness(&agent_id(AGENTS[agent].0), state, reason);
            }
            Step::Restart { agent, as_agent } => self.restart(agent, as_agent),
            Step::Remove(agent) => {
                let agent_id = agent_id(AGENTS[agent].0);
                let author = Principal::Agent(agent_id.clone());
                let instance = self.world.instance(&agent_id);
                self.world.propose(Command::Remove { agent_id, instance, author });
            }
            Step::Drain { agent, drains } => {
                let agent_id = agent_id(AGENTS[agent].0);
                let (drain_seq, author) = (self.world.drain_seq(&agent_id), Principal::Loopback);
                self.world.propose(match drains {
                    true => Command::Drain { agent_id, drain_seq, author },
                    false => Command::Resume { agent_id, drain_seq, author },
                });
            }
            Step::Receive(n) => self.held(n).iter().for_each(|msg_id| self.world.receive(msg_id)),
            Step::Complete(n) => self.held(n).iter().for_each(|msg_id| self.world.complete(msg_id)),
            Step::Fail(n) => {
                let Some(msg_id) = self.held(n) else { return };
                let (attempt, holder) = self.world.attempt(&msg_id).expect("it is held");
                let (reason, message) = (FailReason::Error, String::new());
                self.world.propose(Command::Fail { msg_id, attempt, holder, reason, message });
            }
            Step::Release(n) => {
                let ended = self.ended_slots();
                let Some((msg_id, attempt, holder)) = ended.get(n % ended.len().max(1)).cloned() else {
                    return;
                };
                self.world.propose(Command::Release { msg_id, attempt, holder });
            }
            Step::Void(count) => {
                for _ in 0..count {
                    let Some(command) = self.world.log.pop_back() else { return };
                    self.world.handle(Input::Replied { command: &command, reply: &Reply::Void });
                }
            }
            Step::Lead => self.world.lead(),
        }
    }

    /// Everything on its way arrives, and time passes for what rests.
    fn settle(&mut self) {
        for _ in 0..4 {
            self.apply(usize::MAX);
            self.world.advance(250);
        }
        while !self.world.log.is_empty() {
            self.apply(usize::MAX);
        }
    }

    /// What waits has nobody to go to, by the tables alone.
    fn assert_nobody_is_free_for_what_waits(&self) {
        let (live, now_ms) = (self.world.rows.live(), self.world.now_ms);
        for record in live.messages.values() {
            let mut avoid = record.avoid.clone();
            match &record.state {
                // The jitter adds a quarter at most.
                MessageState::Pending { .. } => {
                    let since_ms = record.since.cluster_ms;
                    if record.retry_at_ms.is_some_and(|at_ms| now_ms <= at_ms + (at_ms - since_ms) / 4) {
                        continue;
                    }
                }
                MessageState::Acknowledged { holder } => {
                    let agent = &live.agents[&holder.agent_id];
                    let after_ms = RETRY_AFTER_MS.get(record.retries as usize).copied();
                    let is_due = |after_ms| now_ms > agent.since.cluster_ms + after_ms + after_ms / 4;
                    let is_lost = agent.state == AgentState::Offline && after_ms.is_some_and(is_due);
                    if !is_lost || matches!(record.target, Target::Agent(_)) {
                        continue;
                    }
                    avoid.push(holder.agent_id.clone());
                }
                _ => continue,
            }
            let is_ready = |id: &AgentId| live.agents[id].state == AgentState::Ready;
            let able = self.world.able(&record.target);
            let others_ready = able.iter().any(|id| is_ready(id) && !avoid.contains(id));
            let avoids = !matches!(record.target, Target::Agent(_)) && others_ready;
            for id in self.world.free_for(&record.target) {
                assert!(avoids && avoid.contains(&id), "{} waits, and {id} is free", record.msg_id);
            }
        }
        assert_eq!(self.world.scheduler.figures().waiting, live.waiting);
    }

    /// With everybody back and working, everything ends.
    fn heal(&mut self) {
        for agent in 0..AGENTS.len() {
            self.step(Step::Drain { agent, drains: false });
            self.restart(agent, agent);
        }
        self.apply(usize::MAX);
        for _ in 0..400 {
            let live = self.world.rows.live();
            if live.messages.is_empty() && live.slots.is_empty() {
                break;
            }
            let held: Vec<_> = live.messages.keys().cloned().collect();
            for msg_id in held {
                self.world.complete(&msg_id);
            }
            for (msg_id, attempt, holder) in self.ended_slots() {
                self.world.propose(Command::Release { msg_id, attempt, holder });
            }
            self.apply(usize::MAX);
            self.world.advance(100);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_accepted_message_ends_or_waits_for_nobody(
        steps in proptest::collection::vec(step(), 1..120),
        replies_first in any::<bool>(),
    ) {
        let mut run = Run::new();
        run.world.replies_first = replies_first;
        for step in steps {
            run.step(step);
        }
        run.settle();
        run.assert_nobody_is_free_for_what_waits();
        run.heal();
        let live = run.world.rows.live();
        prop_assert!(live.messages.is_empty(), "unfinished: {:?}", live.messages.keys());
        prop_assert!(live.slots.is_empty());
        prop_assert_eq!(run.world.scheduler.figures(), Figures::default());
        // Nothing is kept of what has ended.
        prop_assert_eq!(run.world.scheduler.next_due(), None);
    }
}
