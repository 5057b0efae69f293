//! The first filter: every required capability is declared. Set inclusion, never a tree.

use reach_protocol::{AgentId, Tag};

use crate::view::View;

pub(crate) fn passes(view: &View, agent_id: &AgentId, required: &[Tag]) -> bool {
    view.agent(agent_id).is_some_and(|agent| required.iter().all(|tag| agent.weight(tag).is_some()))
}

/// What an agent lacks of the required capabilities.
pub(crate) fn lacks(view: &View, agent_id: &AgentId, required: &[Tag]) -> Vec<Tag> {
    let has = |tag: &Tag| view.agent(agent_id).is_some_and(|agent| agent.weight(tag).is_some());
    required.iter().filter(|tag| !has(tag)).cloned().collect()
}

/// The agents that declare all of `required`, sorted. Costs as much as the rarest of the
/// capabilities is common.
pub(crate) fn candidates<'a>(view: &'a View, required: &'a [Tag]) -> impl Iterator<Item = &'a AgentId> {
    let declared: Option<Vec<_>> = required.iter().map(|tag| view.declared_by(tag)).collect();
    let rarest = declared.and_then(|sets| sets.into_iter().min_by_key(|set| set.len()));
    rarest.into_iter().flatten().filter(move |agent_id| passes(view, agent_id, required))
}
