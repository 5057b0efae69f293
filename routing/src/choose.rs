//! The choice by weight: stride scheduling, which is smooth (no runs of one agent) and costs
//! O(log n), whatever the number of agents.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use reach_protocol::{AgentId, Tag};

use crate::{Outlook, dynamic::Standing, hard_match, view::View};

/// A pass of a weight of one thousandth. Divided by the largest weight, 10^6 thousandths, it still
/// leaves six digits, so that shares are exact to a millionth.
const SCALE: u128 = 1 << 40;

/// Wheels kept at once, and the memberships in all of them. Beyond, the one that was not used for
/// longest is forgotten, and with it the shares it had given out.
const WHEELS_MAX: usize = 1024;
const MEMBERSHIPS_MAX: usize = 4_000_000;

/// What the members of a wheel have in common. Empty `among` stands for everybody.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Requirement {
    required: Vec<Tag>,
    among: Vec<AgentId>,
}

impl Requirement {
    pub fn any(required: &[Tag]) -> Self {
        Self { required: required.to_vec(), among: Vec::new() }
    }

    /// `among` is sorted.
    pub fn among(required: &[Tag], among: Vec<AgentId>) -> Self {
        Self { required: required.to_vec(), among }
    }

    fn admits(&self, view: &View, agent_id: &AgentId) -> bool {
        (self.among.is_empty() || self.among.binary_search(agent_id).is_ok())
            && hard_match::passes(view, agent_id, &self.required)
    }

    /// For several capabilities an agent's weight is the mean of its weights for them.
    fn stride(&self, view: &View, agent_id: &AgentId) -> u128 {
        let agent = view.agent(agent_id).expect("a member is a known agent");
        let weight = |tag| agent.weight(tag).expect("a member declares what is required");
        let sum: u64 = self.required.iter().map(weight).sum();
        SCALE * self.required.len() as u128 / u128::from(sum.max(1))
    }
}

/// The shares of those who meet one requirement. Each choice falls on the free member with the
/// lowest pass, which then advances by its stride, the inverse of its weight.
#[derive(Debug)]
pub(crate) struct Wheel {
    members: BTreeMap<AgentId, Member>,
    free: BTreeSet<(u128, AgentId)>,
    ready: usize,
    /// The lowest pass of a free member at the last choice: where those who (re)join begin, so that
    /// time spent away is not made up for in a burst.
    virtual_time: u128,
}

#[derive(Debug)]
struct Member {
    pass: u128,
    stride: u128,
    standing: Standing,
}

impl Wheel {
    fn new() -> Self {
        Self { members: BTreeMap::new(), free: BTreeSet::new(), ready: 0, virtual_time: 0 }
    }

    fn join(&mut self, agent_id: &AgentId, stride: u128, standing: Standing) {
        // As if it had just been served: a crowd that joins together doesn't come before all others.
        let member = Member { pass: self.virtual_time + stride, stride, standing: Standing::NotReady };
        self.members.insert(agent_id.clone(), member);
        self.stand(agent_id, standing);
    }

    fn leave(&mut self, agent_id: &AgentId) {
        self.stand(agent_id, Standing::NotReady);
        self.members.remove(agent_id);
    }

    fn stand(&mut self, agent_id: &AgentId, standing: Standing) {
        let Some(member) = self.members.get_mut(agent_id) else { return };
        if member.standing == standing {
            return;
        }
        self.ready -= usize::from(member.standing != Standing::NotReady);
        self.ready += usize::from(standing != Standing::NotReady);
        if member.standing == Standing::Free {
            self.free.remove(&(member.pass, agent_id.clone()));
        }
        if standing == Standing::Free {
            member.pass = member.pass.max(self.virtual_time);
            self.free.insert((member.pass, agent_id.clone()));
        }
        member.standing = standing;
    }

    /// The free member whose turn it is, `skip` left out; equal turns go by agent id.
    pub fn choose(&mut self, skip: &[AgentId]) -> Option<AgentId> {
        let chosen = self.next(skip)?.clone();
        let (lowest, _) = self.free.first().expect("somebody was chosen");
        self.virtual_time = self.virtual_time.max(*lowest);
        let member = self.members.get_mut(&chosen).expect("a free one is a member");
        self.free.remove(&(member.pass, chosen.clone()));
        member.pass += member.stride;
        self.free.insert((member.pass, chosen.clone()));
        Some(chosen)
    }

    pub fn next(&self, skip: &[AgentId]) -> Option<&AgentId> {
        self.free.iter().map(|(_, agent_id)| agent_id).find(|agent_id| !skip.contains(agent_id))
    }

    pub fn any_ready(&self) -> bool {
        self.ready > 0
    }

    pub fn has_ready_beside(&self, avoid: &[AgentId]) -> bool {
        self.ready > self.count(avoid, |standing| standing != Standing::NotReady)
    }

    pub fn any_free_beside(&self, skip: &[AgentId]) -> bool {
        self.free.len() > self.count(skip, |standing| standing == Standing::Free)
    }

    fn count(&self, agents: &[AgentId], counts: impl Fn(Standing) -> bool) -> usize {
        let distinct = agents.iter().enumerate().filter(|(i, agent_id)| !agents[..*i].contains(agent_id));
        distinct
            .filter_map(|(_, agent_id)| self.members.get(agent_id))
            .filter(|member| counts(member.standing))
            .count()
    }

    fn outlook(&self) -> Outlook {
        match () {
            () if !self.free.is_empty() => Outlook::Free,
            () if self.ready > 0 => Outlook::Saturated,
            () if !self.members.is_empty() => Outlook::NoneReady,
            () => Outlook::NoCandidate,
        }
    }
}

/// The wheels that were asked for lately.
#[derive(Debug, Default)]
pub(crate) struct Wheels {
    wheels: BTreeMap<u64, Entry>,
    by_requirement: BTreeMap<Arc<Requirement>, u64>,
    /// By the first required capability: a new agent finds its wheels through its tags.
    by_tag: BTreeMap<Tag, BTreeSet<u64>>,
    by_agent: BTreeMap<AgentId, BTreeSet<u64>>,
    by_use: BTreeSet<(u64, u64)>,
    memberships: usize,
    last_id: u64,
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    requirement: Arc<Requirement>,
    wheel: Wheel,
    used: u64,
}

impl Wheels {
    /// The wheel of this requirement, made when it is new; none when nobody meets it.
    pub fn of(&mut self, requirement: Requirement, view: &View) -> Option<&mut Wheel> {
        let id = match self.by_requirement.get(&requirement) {
            Some(id) => *id,
            None => self.make(requirement, view)?,
        };
        if self.wheels[&id].wheel.members.is_empty() {
            self.forget(id);
            return None;
        }
        self.uses += 1;
        let entry = self.wheels.get_mut(&id).expect("an indexed wheel is there");
        self.by_use.remove(&(entry.used, id));
        entry.used = self.uses;
        self.by_use.insert((entry.used, id));
        Some(&mut entry.wheel)
    }

    pub fn outlook(&self, required: &[Tag]) -> Option<Outlook> {
        let id = self.by_requirement.get(&Requirement::any(required))?;
        Some(self.wheels[id].wheel.outlook())
    }

    fn make(&mut self, requirement: Requirement, view: &View) -> Option<u64> {
        let mut wheel = Wheel::new();
        let members: Vec<&AgentId> = if requirement.among.is_empty() {
            hard_match::candidates(view, &requirement.required).collect()
        } else {
            requirement.among.iter().filter(|agent_id| requirement.admits(view, agent_id)).collect()
        };
        if members.is_empty() {
            return None;
        }
        self.last_id += 1;
        let id = self.last_id;
        for agent_id in members {
            let standing = view.standing(agent_id).expect("a candidate is a known agent");
            wheel.join(agent_id, requirement.stride(view, agent_id), standing);
            self.by_agent.entry(agent_id.clone()).or_default().insert(id);
        }
        self.memberships += wheel.members.len();
        let requirement = Arc::new(requirement);
        self.by_requirement.insert(requirement.clone(), id);
        self.by_tag.entry(requirement.required[0].clone()).or_default().insert(id);
        self.by_use.insert((0, id));
        self.wheels.insert(id, Entry { requirement, wheel, used: 0 });
        while self.wheels.len() > 1
            && (self.wheels.len() > WHEELS_MAX || self.memberships > MEMBERSHIPS_MAX)
            && let Some((_, oldest)) = self.by_use.iter().find(|(_, other)| *other != id)
        {
            self.forget(*oldest);
        }
        Some(id)
    }

    fn forget(&mut self, id: u64) {
        let Some(entry) = self.wheels.remove(&id) else { return };
        self.by_requirement.remove(&entry.requirement);
        self.by_use.remove(&(entry.used, id));
        self.memberships -= entry.wheel.members.len();
        remove_from(&mut self.by_tag, &entry.requirement.required[0], id);
        for agent_id in entry.wheel.members.keys() {
            remove_from(&mut self.by_agent, agent_id, id);
        }
    }

    /// Puts a new agent, or one with new capabilities, on the wheels whose requirement it meets.
    pub fn join(&mut self, agent_id: &AgentId, view: &View) {
        let Some(agent) = view.agent(agent_id) else { return };
        let standing = Standing::of(agent);
        for id in agent.tags().filter_map(|tag| self.by_tag.get(tag)).flatten() {
            let entry = self.wheels.get_mut(id).expect("an indexed wheel is there");
            if entry.requirement.admits(view, agent_id) {
                entry.wheel.join(agent_id, entry.requirement.stride(view, agent_id), standing);
                self.by_agent.entry(agent_id.clone()).or_default().insert(*id);
                self.memberships += 1;
            }
        }
    }

    /// Takes an agent off all wheels.
    pub fn leave(&mut self, agent_id: &AgentId) {
        for id in self.by_agent.remove(agent_id).unwrap_or_default() {
            self.wheels.get_mut(&id).expect("an indexed wheel is there").wheel.leave(agent_id);
            self.memberships -= 1;
        }
    }

    /// Brings an agent's standing up to date on all its wheels.
    pub fn update(&mut self, agent_id: &AgentId, view: &View) {
        let Some(standing) = view.standing(agent_id) else { return };
        for id in self.by_agent.get(agent_id).into_iter().flatten() {
            self.wheels.get_mut(id).expect("an indexed wheel is there").wheel.stand(agent_id, standing);
        }
    }
}

fn remove_from<K: Ord>(index: &mut BTreeMap<K, BTreeSet<u64>>, key: &K, id: u64) {
    if let Some(ids) = index.get_mut(key) {
        ids.remove(&id);
        if ids.is_empty() {
            index.remove(key);
        }
    }
}
