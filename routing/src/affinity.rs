//! The third filter: preferred agents that passed the others come first, by the same weighted
//! choice among them.

use reach_protocol::{AgentId, Tag};

use crate::{
    choose::{Requirement, Wheels},
    dynamic::Standing,
    hard_match,
    view::View,
};

/// One of the preferred agents, or none when none of them passed. Such choices have shares of their
/// own: being preferred by some costs an agent nothing of its share of the others.
pub(crate) fn choose(
    wheels: &mut Wheels,
    view: &View,
    required: &[Tag],
    preferred: &[AgentId],
    skip: &[AgentId],
) -> Option<AgentId> {
    let mut able: Vec<_> =
        preferred.iter().filter(|agent_id| hard_match::passes(view, agent_id, required)).cloned().collect();
    able.sort();
    able.dedup();
    match able.as_slice() {
        [] => None,
        // The usual case, a caller with its one agent, needs no shares to be kept.
        [only] => (view.standing(only) == Some(Standing::Free) && !skip.contains(only)).then(|| only.clone()),
        _ => wheels.of(Requirement::among(required, able), view)?.choose(skip),
    }
}
