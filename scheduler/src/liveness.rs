//! The ages of all agents' heartbeats, which every node keeps, and the changes of liveness that the
//! leader proposes from them. Time here is this node's monotonic clock, in milliseconds.
//!
//! Since every node is told the same ages, a new leader knows at once who is silent: nothing is
//! granted anew at an election, and nothing is checkpointed.

use std::collections::HashMap;

use reach_machine::Live;
use reach_protocol::{
    AgentId, AgentState, Command, InstanceId, NodeId, StateReason,
    agent::AgentRecord,
    frame::{Age, Heard},
};

/// How often all agents are looked at, in milliseconds.
const SCAN_MS: u64 = 500;
/// The most that one gap between two calls counts, in milliseconds: a node that was stalled, and
/// heard nobody meanwhile, expires nobody.
const GAP_MAX_MS: u64 = 1_000;
/// When a change that was proposed and not applied is proposed again, in milliseconds.
const ASK_AGAIN_MS: u64 = 2_000;
/// Runs of one agent remembered at once. An earlier one goes on beating until its fencing reaches
/// it, and must not hide the current one.
const RUNS_MAX: usize = 4;

/// When each agent was last heard at both levels, by whichever node holds it.
#[derive(Debug, Default)]
pub struct Ages {
    clock: Clock,
    agents: HashMap<AgentId, Silence>,
    /// When this node began to lead, in counted time, and what its driver called that moment.
    leading: Option<(u64, u64)>,
    next_scan_ms: u64,
}

/// Monotonic time in which no gap is longer than `GAP_MAX_MS`.
#[derive(Debug, Default)]
struct Clock {
    last_mono_ms: Option<u64>,
    counted_ms: u64,
}

impl Clock {
    /// Ages reach back before the first call; counted time starts high enough for them.
    const START_MS: u64 = 1 << 40;

    fn advance(&mut self, mono_ms: u64) -> u64 {
        match self.last_mono_ms {
            None => self.counted_ms = Self::START_MS,
            Some(last) => self.counted_ms += mono_ms.saturating_sub(last).min(GAP_MAX_MS),
        }
        self.last_mono_ms = self.last_mono_ms.max(Some(mono_ms));
        self.counted_ms
    }

    /// Counted time without a call to account for.
    fn at(&self, mono_ms: u64) -> u64 {
        self.counted_ms + mono_ms.saturating_sub(self.last_mono_ms.unwrap_or(mono_ms)).min(GAP_MAX_MS)
    }
}

/// What is known of one agent. All times are counted time.
#[derive(Debug, Default)]
struct Silence {
    runs: Vec<Run>,
    /// The run that the registry names.
    current: Option<InstanceId>,
    /// Silence counts from here on: when the current run, not heard yet, was first seen, or when the
    /// node that held it was lost.
    granted_ms: u64,
    asked: Option<Asked>,
}

#[derive(Debug)]
struct Run {
    instance: InstanceId,
    node: NodeId,
    level1_ms: u64,
    level2_ms: u64,
}

#[derive(Debug)]
struct Asked {
    instance: InstanceId,
    liveness_seq: u64,
    at_ms: u64,
}

impl Ages {
    pub fn new() -> Self {
        Self::default()
    }

    /// A node's summary, its own included.
    pub fn report(&mut self, now_mono_ms: u64, node: NodeId, ages: &[Age]) {
        let now_ms = self.clock.advance(now_mono_ms);
        for age in ages {
            let level1_ms = now_ms.saturating_sub(age.level1_age_ms);
            let level2_ms = now_ms.saturating_sub(age.level2_age_ms);
            let silence = self.agents.entry(age.agent_id.clone()).or_default();
            silence.heard(node, &age.instance, level1_ms, level2_ms);
        }
    }

    /// The agents that `node` holds get one TTL from now to be heard elsewhere.
    pub fn node_lost(&mut self, now_mono_ms: u64, node: NodeId) {
        let now_ms = self.clock.advance(now_mono_ms);
        for silence in self.agents.values_mut() {
            if silence.latest().is_some_and(|run| run.node == node) {
                silence.granted_ms = now_ms;
            }
        }
    }

    /// The ages of the agent's last heard run.
    pub fn heard(&self, now_mono_ms: u64, agent_id: &AgentId) -> Option<Heard> {
        let now_ms = self.clock.at(now_mono_ms);
        let run = self.agents.get(agent_id)?.latest()?;
        Some(Heard {
            node: run.node,
            level1_age_ms: now_ms.saturating_sub(run.level1_ms),
            level2_age_ms: now_ms.saturating_sub(run.level2_ms),
        })
    }

    /// About every 100 ms, on every node. Proposes nothing unless this node leads; `leading_since_ms`
    /// is when it began to, by the same clock as `now_mono_ms`.
    pub fn tick(&mut self, now_mono_ms: u64, live: &Live, leading_since_ms: Option<u64>) -> Vec<Command> {
        let now_ms = self.clock.advance(now_mono_ms);
        self.leading = match (leading_since_ms, self.leading) {
            (None, _) => None,
            (Some(since), Some((named, counted))) if since == named => Some((named, counted)),
            (Some(since), _) => Some((since, now_ms - now_mono_ms.saturating_sub(since).min(now_ms))),
        };
        if now_ms < self.next_scan_ms {
            return Vec::new();
        }
        self.next_scan_ms = now_ms + SCAN_MS;
        let ttl_ms = live.rules.rules.liveness.ttl_ms;
        // Those that were removed. One that is heard before its registration is applied here is only
        // forgotten until its next beat.
        self.agents.retain(|agent_id, _| live.agents.contains_key(agent_id));

        let mut commands = Vec::new();
        for (agent_id, record) in &live.agents {
            let silence = self.agents.entry(agent_id.clone()).or_default();
            silence.follow(&record.instance, now_ms);
            if live.slots_taken(agent_id) >= record.registration.max_concurrency {
                silence.is_full(&record.instance, now_ms);
            }
            let Some((_, leading_ms)) = self.leading else {
                silence.asked = None;
                continue;
            };
            let Some((state, reason)) = silence.verdict(record, now_ms, ttl_ms, leading_ms) else {
                silence.asked = None;
                continue;
            };
            if silence.may_ask(record, now_ms) {
                commands.push(Command::SetLiveness {
                    agent_id: agent_id.clone(),
                    instance: record.instance.clone(),
                    liveness_seq: record.liveness_seq,
                    state,
                    reason,
                });
            }
        }
        commands
    }
}

impl Silence {
    /// A new run has a TTL to be heard in; that the one before it is silent says nothing.
    fn follow(&mut self, instance: &InstanceId, now_ms: u64) {
        if self.current.as_ref() == Some(instance) {
            return;
        }
        self.current = Some(instance.clone());
        if !self.runs.iter().any(|run| run.instance == *instance) {
            self.granted_ms = now_ms;
        }
    }

    /// Two nodes may tell of one run while it moves; the later word counts, level by level.
    fn heard(&mut self, node: NodeId, instance: &InstanceId, level1_ms: u64, level2_ms: u64) {
        if let Some(run) = self.runs.iter_mut().find(|run| run.instance == *instance) {
            if level1_ms >= run.level1_ms {
                run.node = node;
            }
            run.level1_ms = run.level1_ms.max(level1_ms);
            run.level2_ms = run.level2_ms.max(level2_ms);
            return;
        }
        self.runs.push(Run { instance: instance.clone(), node, level1_ms, level2_ms });
        if self.runs.len() > RUNS_MAX {
            let stalest = self.runs.iter().enumerate().min_by_key(|(_, run)| run.level1_ms);
            let (index, _) = stalest.expect("there are several");
            self.runs.swap_remove(index);
        }
    }

    /// With all its slots taken an agent could take nothing anyway: level 2 is not asked for, and
    /// counts from when it has a slot again.
    fn is_full(&mut self, instance: &InstanceId, now_ms: u64) {
        if let Some(run) = self.runs.iter_mut().find(|run| run.instance == *instance) {
            run.level2_ms = now_ms;
        }
    }

    fn latest(&self) -> Option<&Run> {
        self.runs.iter().max_by_key(|run| run.level1_ms)
    }

    /// The state this agent should be in, when that is another.
    fn verdict(
        &self,
        record: &AgentRecord,
        now_ms: u64,
        ttl_ms: u64,
        leading_ms: u64,
    ) -> Option<(AgentState, StateReason)> {
        let run = self.runs.iter().find(|run| run.instance == record.instance);
        let is_fresh = |heard_ms: u64| now_ms.saturating_sub(heard_ms) <= ttl_ms;
        let (level1, level2) = match run {
            Some(run) => (is_fresh(run.level1_ms), is_fresh(run.level2_ms)),
            None => (false, false),
        };
        // Time granted keeps an agent where it is; only being heard brings it back.
        let granted = is_fresh(self.granted_ms) || (run.is_none() && is_fresh(leading_ms));
        match (record.state, record.reason) {
            (AgentState::Ready | AgentState::Draining, _) if !level1 && !granted => {
                Some((AgentState::Offline, StateReason::ProcessSilent))
            }
            (AgentState::Ready, _) if !level2 && !granted => {
                Some((AgentState::Draining, StateReason::LoopSilent))
            }
            // A run that said goodbye does not come back by the beats it sent before.
            (_, StateReason::Asked) => None,
            (AgentState::Offline | AgentState::Draining, _) if level1 && level2 => {
                Some((AgentState::Ready, StateReason::Returned))
            }
            _ => None,
        }
    }

    /// At most one proposal on its way for each step of an agent's liveness.
    fn may_ask(&mut self, record: &AgentRecord, now_ms: u64) -> bool {
        let on_its_way = self.asked.as_ref().is_some_and(|asked| {
            asked.instance == record.instance
                && asked.liveness_seq == record.liveness_seq
                && now_ms < asked.at_ms + ASK_AGAIN_MS
        });
        if !on_its_way {
            let (instance, liveness_seq) = (record.instance.clone(), record.liveness_seq);
            self.asked = Some(Asked { instance, liveness_seq, at_ms: now_ms });
        }
        !on_its_way
    }
}
