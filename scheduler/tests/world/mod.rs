//! A cluster of one in memory, with our own clock: the scheduler, the log its proposals go into, and
//! the tables that apply writes.

// Each test crate uses its own part of it.
#![allow(dead_code)]

use std::collections::VecDeque;

use reach_machine::{MemoryRows, Outcome, Position, Rows, apply};
use reach_protocol::{
    AgentId, AgentState, Capability, Command, Envelope, Fact, InstanceId, Json, MessageState, MsgId,
    Principal, Registration, Reply, Rules, Stamp, StateReason, Tag, Target, TraceId,
    codec::Encoded,
    command::{Decision, Submit},
    id::Name,
    message::{Holder, PendingReason},
};
use reach_scheduler::{Input, Output, Scheduler, Ticket};

pub struct World {
    pub rows: MemoryRows,
    pub scheduler: Scheduler,
    pub now_ms: u64,
    /// Proposed, in order, and not applied yet.
    pub log: VecDeque<Command>,
    /// Whether the replies of an entry come before its facts.
    pub replies_first: bool,
    /// Counts what was ever proposed.
    pub proposed: usize,
    /// What was answered without the log.
    pub answers: Vec<(Ticket, Reply)>,
    index: u64,
    tickets: Ticket,
}

/// What one command did when it was applied.
pub struct Applied {
    pub command: Command,
    pub reply: Reply,
    pub facts: Vec<Fact>,
}

impl World {
    pub fn new(rules: Rules) -> Self {
        let mut world = Self {
            rows: MemoryRows::new(),
            scheduler: Scheduler::new(&Default::default(), 0),
            now_ms: 1_000,
            log: VecDeque::new(),
            replies_first: false,
            proposed: 0,
            answers: Vec::new(),
            index: 0,
            tickets: 0,
        };
        world.apply_one(&Command::Init { cluster: name("test"), rules: Box::new(rules) });
        world.lead();
        world
    }

    /// Another leader: what was on its way is lost, and the scheduler starts from the tables.
    pub fn lead(&mut self) {
        self.log.clear();
        self.scheduler = Scheduler::new(self.rows.live(), self.now_ms);
        self.handle(Input::Tick);
    }

    pub fn handle(&mut self, input: Input<'_>) {
        for output in self.scheduler.handle(input, self.now_ms) {
            match output {
                Output::Propose { command, .. } => {
                    self.proposed += 1;
                    self.log.push_back(command);
                }
                Output::Answer { ticket, reply } => self.answers.push((ticket, reply)),
            }
        }
    }

    pub fn propose(&mut self, command: Command) {
        self.handle(Input::Propose { ticket: None, command });
    }

    /// Applies up to `count` of the commands that are on their way, as one entry.
    pub fn apply(&mut self, count: usize) -> Vec<Applied> {
        let count = count.min(self.log.len());
        let commands: Vec<_> = self.log.drain(..count).collect();
        let applied: Vec<_> = commands
            .into_iter()
            .map(|command| {
                let Outcome { reply, facts, .. } = self.apply_one(&command);
                Applied { command, reply, facts }
            })
            .collect();
        let facts: Vec<_> = applied.iter().flat_map(|applied| applied.facts.clone()).collect();
        if !self.replies_first {
            self.handle(Input::Applied { facts: &facts });
        }
        for Applied { command, reply, .. } in &applied {
            self.handle(Input::Replied { command, reply });
        }
        if self.replies_first {
            self.handle(Input::Applied { facts: &facts });
        }
        applied
    }

    fn apply_one(&mut self, command: &Command) -> Outcome {
        self.index += 1;
        let stamp = Stamp { cluster_ms: self.now_ms, wall_ms: self.now_ms };
        let outcome = apply(&self.rows, Position { index: self.index, ordinal: 0 }, stamp, command);
        self.rows.write(outcome.writes.clone());
        outcome
    }

    pub fn advance(&mut self, ms: u64) {
        self.now_ms += ms;
        self.handle(Input::Tick);
    }

    pub fn submit(&mut self, msg_id: &str, target: Target, expires_in_ms: u64) -> Ticket {
        self.tickets += 1;
        let submit = Box::new(submission(msg_id, target, expires_in_ms));
        self.handle(Input::Submit { ticket: self.tickets, submit });
        self.tickets
    }

    pub fn register(&mut self, agent_id: &AgentId, tags: &[(&str, f64)], max: u32, instance: &str) {
        let capabilities =
            tags.iter().map(|(tag, weight)| Capability::new(Tag::parse(tag).unwrap(), *weight)).collect();
        let mut registration = Registration::new(agent_id.clone(), capabilities);
        registration.max_concurrency = max;
        self.propose(Command::Register {
            registration: Box::new(registration),
            instance: InstanceId::parse(instance).unwrap(),
            started_ms: self.now_ms,
            author: Principal::Agent(agent_id.clone()),
        });
    }

    pub fn drain_seq(&self, agent_id: &AgentId) -> u64 {
        self.rows.agent(agent_id).map_or(0, |record| record.drain_seq)
    }

    /// The run that the registry names.
    pub fn instance(&self, agent_id: &AgentId) -> Option<InstanceId> {
        self.rows.agent(agent_id).map(|record| record.instance.clone())
    }

    pub fn set_liveness(&mut self, agent_id: &AgentId, state: AgentState, reason: StateReason) {
        let Some(record) = self.rows.agent(agent_id) else { return };
        self.propose(Command::SetLiveness {
            agent_id: agent_id.clone(),
            instance: record.instance.clone(),
            liveness_seq: record.liveness_seq,
            state,
            reason,
        });
    }

    /// The current attempt of a message and who holds it.
    pub fn attempt(&self, msg_id: &MsgId) -> Option<(u32, Holder)> {
        let record = self.rows.message(msg_id)?;
        record.state.holder().map(|holder| (record.attempt, holder.clone()))
    }

    pub fn receive(&mut self, msg_id: &MsgId) {
        let Some((attempt, holder)) = self.attempt(msg_id) else { return };
        self.propose(Command::Received { msg_id: msg_id.clone(), attempt, holder });
    }

    pub fn complete(&mut self, msg_id: &MsgId) {
        let Some((attempt, holder)) = self.attempt(msg_id) else { return };
        self.propose(Command::Complete {
            msg_id: msg_id.clone(),
            attempt,
            holder,
            excerpt: "done".into(),
            result: Json::null(),
            cost: None,
        });
    }

    /// The agents that declare what a target requires, by the tables alone.
    pub fn able(&self, target: &Target) -> Vec<AgentId> {
        let agents = &self.rows.live().agents;
        let able = agents.iter().filter(|(id, record)| match target {
            Target::Agent(named) => named == *id,
            Target::Capabilities { required, .. } => {
                required.iter().all(|tag| record.registration.tags().any(|declared| declared == tag))
            }
        });
        able.map(|(id, _)| id.clone()).collect()
    }

    /// Those of them that could take a message now.
    pub fn free_for(&self, target: &Target) -> Vec<AgentId> {
        let live = self.rows.live();
        let mut able = self.able(target);
        able.retain(|id| {
            let record = &live.agents[id];
            record.state == AgentState::Ready && live.slots_taken(id) < record.registration.max_concurrency
        });
        able
    }
}

pub fn submission(msg_id: &str, target: Target, expires_in_ms: u64) -> Submit {
    let author = Principal::User(name("u"));
    Submit {
        msg_id: MsgId::parse(msg_id).unwrap(),
        trace_id: TraceId::parse(&format!("t_{msg_id}")).unwrap(),
        envelope: Encoded::new(&Envelope::request(Vec::new(), Json::null())),
        parent: None,
        flow_seq: None,
        source: author.own_agent_id(),
        target,
        content_hash: [0; 16],
        shape: String::new(),
        expires_in_ms,
        author,
        decision: Decision::Wait { reason: PendingReason::NoneReady, warnings: Vec::new() },
    }
}

pub fn name(text: &str) -> Name {
    Name::parse(text).unwrap()
}

pub fn agent_id(text: &str) -> AgentId {
    AgentId::parse(text).unwrap()
}

pub fn msg_id(text: &str) -> MsgId {
    MsgId::parse(text).unwrap()
}

pub fn capabilities<T: AsRef<str>>(tags: &[T], preferred: &[T]) -> Target {
    Target::Capabilities {
        required: tags.iter().map(|tag| Tag::parse(tag.as_ref()).unwrap()).collect(),
        preferred: preferred.iter().map(|id| agent_id(id.as_ref())).collect(),
    }
}

pub fn describe_state(state: &MessageState) -> String {
    match state {
        MessageState::Pending { reason } => format!("pending ({})", reason.as_str()),
        MessageState::Failed { error, .. } => format!("failed ({})", error.code),
        other => match other.holder() {
            Some(holder) => format!("{} at {}/{}", other.name(), holder.agent_id, holder.instance),
            None => other.name().to_string(),
        },
    }
}
