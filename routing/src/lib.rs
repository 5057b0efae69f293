//! Who gets a task: the hard match on capabilities, the dynamic filter, affinity, then a choice by
//! weight. Pure: the same calls give the same choices, and neither clock nor chance has a say.

use reach_protocol::{
    AgentId, Tag, Target, Warning,
    agent::AgentRecord,
    message::{Holder, PendingReason},
};

mod affinity;
mod choose;
mod dynamic;
mod explain;
mod hard_match;
mod nearest;
mod view;

use choose::{Requirement, Wheels};
pub use dynamic::Standing;
pub use explain::{Explanation, LeftOut, Stage, Why};
use view::View;

/// Where a message goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Routed {
    Give {
        holder: Holder,
        warnings: Vec<Warning>,
    },
    /// Somebody declares all that is required, but can't take it now.
    Wait {
        reason: PendingReason,
        warnings: Vec<Warning>,
    },
    NoCandidate(NoCandidate),
}

/// Why there is nobody. With nothing missing, either each capability is declared by somebody and
/// no single agent has them all, or the agent that the target names is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NoCandidate {
    /// Required capabilities that nobody declares.
    pub missing: Vec<Tag>,
    /// The declared capabilities with the most similar names, the nearest first.
    pub nearest: Vec<Tag>,
}

/// How a target stands, without choosing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outlook {
    /// Somebody could take it now.
    Free,
    Saturated,
    NoneReady,
    NoCandidate,
}

/// The view of the agents and the shares given out so far. The slots taken are told to it
/// ([`Router::set_taken`]), since only the scheduler knows those that are still on their way.
#[derive(Debug, Default)]
pub struct Router {
    view: View,
    wheels: Wheels,
}

impl Router {
    pub fn new() -> Self {
        Self::default()
    }

    /// Brings an agent to what the registry says of it.
    pub fn put(&mut self, record: &AgentRecord, taken: u32) {
        let agent_id = record.agent_id();
        if self.view.put(record, taken) {
            self.wheels.leave(agent_id);
            self.wheels.join(agent_id, &self.view);
        } else {
            self.wheels.update(agent_id, &self.view);
        }
    }

    pub fn remove(&mut self, agent_id: &AgentId) {
        self.wheels.leave(agent_id);
        self.view.remove(agent_id);
    }

    /// Slots of this agent that are taken or about to be. Says nothing of an unknown agent.
    pub fn set_taken(&mut self, agent_id: &AgentId, taken: u32) {
        if let Some(agent) = self.view.agent_mut(agent_id) {
            agent.taken = taken;
            self.wheels.update(agent_id, &self.view);
        }
    }

    /// While a change of this agent is on its way to the log it gets nothing new: what is chosen
    /// now would be applied after the change.
    pub fn set_changing(&mut self, agent_id: &AgentId, changing: bool) {
        if let Some(agent) = self.view.agent_mut(agent_id) {
            agent.changing = changing;
            self.wheels.update(agent_id, &self.view);
        }
    }

    /// The choice. It counts: asked again, it falls on the next one by weight. `avoid` names agents
    /// that lost an earlier attempt; they are left out while anybody else is ready.
    pub fn route(&mut self, target: &Target, avoid: &[AgentId]) -> Routed {
        match target {
            Target::Agent(agent_id) => self.route_to(agent_id),
            Target::Capabilities { required, preferred } => self.route_by(required, preferred, avoid),
        }
    }

    fn route_to(&self, agent_id: &AgentId) -> Routed {
        match self.view.standing(agent_id) {
            None => Routed::NoCandidate(NoCandidate::default()),
            Some(Standing::Free) => self.give(agent_id.clone(), Vec::new()),
            Some(Standing::Saturated) => wait(PendingReason::Saturated),
            Some(Standing::NotReady) => wait(PendingReason::NoneReady),
        }
    }

    fn route_by(&mut self, required: &[Tag], preferred: &[AgentId], avoid: &[AgentId]) -> Routed {
        let Some(wheel) = self.wheels.of(Requirement::any(required), &self.view) else {
            return Routed::NoCandidate(self.no_candidate_by(required));
        };
        let skip = if wheel.has_ready_beside(avoid) { avoid } else { &[] };
        let (any_ready, any_free) = (wheel.any_ready(), wheel.any_free_beside(skip));
        if !any_free {
            return wait(if any_ready { PendingReason::Saturated } else { PendingReason::NoneReady });
        }
        if let Some(chosen) = affinity::choose(&mut self.wheels, &self.view, required, preferred, skip) {
            return self.give(chosen, Vec::new());
        }
        let wheel = self.wheels.of(Requirement::any(required), &self.view).expect("it was there above");
        let chosen = wheel.choose(skip).expect("somebody is free beside those to skip");
        let unmet = !preferred.is_empty();
        self.give(chosen, if unmet { vec![Warning::AffinityUnmet] } else { Vec::new() })
    }

    fn give(&self, agent_id: AgentId, warnings: Vec<Warning>) -> Routed {
        let instance = self.view.agent(&agent_id).expect("only known agents are chosen").instance.clone();
        Routed::Give { holder: Holder { agent_id, instance }, warnings }
    }

    /// How this target stands; chooses nothing and counts nothing.
    pub fn outlook(&self, target: &Target) -> Outlook {
        let standings: &mut dyn Iterator<Item = Standing> = match target {
            Target::Agent(agent_id) => &mut self.view.standing(agent_id).into_iter(),
            Target::Capabilities { required, .. } => {
                if let Some(outlook) = self.wheels.outlook(required) {
                    return outlook;
                }
                &mut hard_match::candidates(&self.view, required)
                    .filter_map(|agent_id| self.view.standing(agent_id))
            }
        };
        let mut outlook = Outlook::NoCandidate;
        for standing in standings {
            match standing {
                Standing::Free => return Outlook::Free,
                Standing::Saturated => outlook = Outlook::Saturated,
                Standing::NotReady if outlook == Outlook::NoCandidate => outlook = Outlook::NoneReady,
                Standing::NotReady => {}
            }
        }
        outlook
    }

    /// Whether this agent could take it now.
    pub fn accepts(&mut self, agent_id: &AgentId, target: &Target, avoid: &[AgentId]) -> bool {
        if !self.is_free(agent_id) {
            return false;
        }
        match target {
            Target::Agent(named) => named == agent_id,
            Target::Capabilities { required, .. } => {
                hard_match::passes(&self.view, agent_id, required)
                    && (!avoid.contains(agent_id)
                        || self
                            .wheels
                            .of(Requirement::any(required), &self.view)
                            .is_some_and(|wheel| !wheel.has_ready_beside(avoid)))
            }
        }
    }

    /// Ready, with a free slot, and not about to change.
    pub fn is_free(&self, agent_id: &AgentId) -> bool {
        self.view.standing(agent_id) == Some(Standing::Free)
    }

    /// The capabilities of an agent, sorted.
    pub fn tags(&self, agent_id: &AgentId) -> impl Iterator<Item = &Tag> {
        self.view.agent(agent_id).into_iter().flat_map(|agent| agent.tags())
    }

    /// What to tell a caller whose target nobody meets.
    pub fn no_candidate(&self, target: &Target) -> NoCandidate {
        match target {
            Target::Agent(_) => NoCandidate::default(),
            Target::Capabilities { required, .. } => self.no_candidate_by(required),
        }
    }

    fn no_candidate_by(&self, required: &[Tag]) -> NoCandidate {
        let missing: Vec<_> = required.iter().filter(|tag| !self.view.declares(tag)).cloned().collect();
        let nearest = nearest::nearest(&missing, self.view.tags());
        NoCandidate { missing, nearest }
    }

    /// The stages of the choice that `route` would make now, and who was left out at each.
    pub fn explain(&mut self, target: &Target, avoid: &[AgentId]) -> Explanation {
        explain::explain(&mut self.wheels, &self.view, target, avoid)
    }
}

fn wait(reason: PendingReason) -> Routed {
    let warnings = match reason {
        PendingReason::Saturated => vec![Warning::CapacityHint],
        _ => Vec::new(),
    };
    Routed::Wait { reason, warnings }
}
