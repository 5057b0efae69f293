//! The agents as the choice sees them, and the index from a capability to those who declare it.

use std::collections::{BTreeMap, BTreeSet};

use reach_protocol::{
    AgentId, AgentState, InstanceId, Tag,
    agent::{AgentRecord, WEIGHT_MAX, WEIGHT_MIN},
};

use crate::dynamic::Standing;

#[derive(Debug)]
pub(crate) struct Agent {
    pub instance: InstanceId,
    pub state: AgentState,
    pub max_concurrency: u32,
    pub taken: u32,
    /// A change of it is on its way to the log.
    pub changing: bool,
    /// In thousandths, so that shares are integers; by tag, sorted.
    weights: Box<[(Tag, u64)]>,
}

impl Agent {
    pub fn tags(&self) -> impl Iterator<Item = &Tag> {
        self.weights.iter().map(|(tag, _)| tag)
    }

    pub fn weight(&self, tag: &Tag) -> Option<u64> {
        let place = self.weights.binary_search_by(|(own, _)| own.cmp(tag)).ok()?;
        Some(self.weights[place].1)
    }
}

#[derive(Debug, Default)]
pub(crate) struct View {
    agents: BTreeMap<AgentId, Agent>,
    by_tag: BTreeMap<Tag, BTreeSet<AgentId>>,
}

impl View {
    /// Whether the capabilities or their weights are other than before.
    pub fn put(&mut self, record: &AgentRecord, taken: u32) -> bool {
        let agent_id = record.agent_id();
        let registration = &record.registration;
        let mut weights: Box<[_]> = registration
            .capabilities
            .iter()
            .map(|capability| (capability.name.clone(), thousandths(capability.weight)))
            .collect();
        weights.sort();
        let before = self.agents.get(agent_id);
        let changed = before.is_none_or(|before| before.weights != weights);
        let changing = before.is_some_and(|before| before.changing);
        if changed {
            self.forget_tags(agent_id);
            for (tag, _) in &weights {
                self.by_tag.entry(tag.clone()).or_default().insert(agent_id.clone());
            }
        }
        let agent = Agent {
            instance: record.instance.clone(),
            state: record.state,
            max_concurrency: registration.max_concurrency,
            taken,
            changing,
            weights,
        };
        self.agents.insert(agent_id.clone(), agent);
        changed
    }

    pub fn remove(&mut self, agent_id: &AgentId) {
        self.forget_tags(agent_id);
        self.agents.remove(agent_id);
    }

    fn forget_tags(&mut self, agent_id: &AgentId) {
        let Some(agent) = self.agents.get(agent_id) else { return };
        for tag in agent.tags() {
            let declared_by = self.by_tag.get_mut(tag).expect("a declared tag is indexed");
            declared_by.remove(agent_id);
            if declared_by.is_empty() {
                self.by_tag.remove(tag);
            }
        }
    }

    pub fn agent(&self, agent_id: &AgentId) -> Option<&Agent> {
        self.agents.get(agent_id)
    }

    pub fn agent_mut(&mut self, agent_id: &AgentId) -> Option<&mut Agent> {
        self.agents.get_mut(agent_id)
    }

    pub fn standing(&self, agent_id: &AgentId) -> Option<Standing> {
        self.agents.get(agent_id).map(Standing::of)
    }

    pub fn declares(&self, tag: &Tag) -> bool {
        self.by_tag.contains_key(tag)
    }

    pub fn declared_by(&self, tag: &Tag) -> Option<&BTreeSet<AgentId>> {
        self.by_tag.get(tag)
    }

    /// Every declared capability, sorted.
    pub fn tags(&self) -> impl Iterator<Item = &Tag> {
        self.by_tag.keys()
    }
}

fn thousandths(weight: f64) -> u64 {
    // A weight outside the range is refused at registration; the clamp keeps a row from elsewhere harmless.
    (weight.clamp(WEIGHT_MIN, WEIGHT_MAX) * 1000.0).round() as u64
}
