//! Why a choice falls as it does: the stages, who was left out at each and why. Made on request by
//! the same filters that choose.

use reach_protocol::{AgentId, AgentState, Tag, Target};

use crate::{
    choose::{Requirement, Wheels},
    dynamic::Standing,
    hard_match,
    view::View,
};

/// Agents named in one stage; the others are only counted.
const LEFT_OUT_MAX: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explanation {
    pub stages: Vec<Stage>,
    /// On whom the choice by weight would fall now.
    pub next: Option<AgentId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    pub name: &'static str,
    pub entered: usize,
    pub passed: usize,
    /// The first few of them, by agent id.
    pub left_out: Vec<LeftOut>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftOut {
    pub agent_id: AgentId,
    pub why: Why,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    Lacks(Vec<Tag>),
    NotReady(AgentState),
    /// A change of it is on its way to the log.
    Changing,
    Saturated {
        taken: u32,
        max_concurrency: u32,
    },
    /// It lost an earlier attempt, and others are ready.
    LostAttempt,
    NotPreferred,
}

pub(crate) fn explain(wheels: &mut Wheels, view: &View, target: &Target, avoid: &[AgentId]) -> Explanation {
    let mut explanation = Explanation::default();
    let (declaring, required, preferred) = match target {
        Target::Agent(agent_id) => {
            (view.agent(agent_id).map(|_| agent_id).into_iter().collect(), &[][..], &[][..])
        }
        // Those who declare none of it are no part of the story.
        Target::Capabilities { required, preferred } => {
            let mut some: Vec<&AgentId> =
                required.iter().filter_map(|tag| view.declared_by(tag)).flatten().collect();
            some.sort();
            some.dedup();
            (some, required.as_slice(), preferred.as_slice())
        }
    };
    let mut stage = |name, entered: Vec<&AgentId>, why: &dyn Fn(&AgentId) -> Option<Why>| {
        let mut stage = Stage { name, entered: entered.len(), passed: 0, left_out: Vec::new() };
        let mut passed = Vec::new();
        for agent_id in entered {
            match why(agent_id) {
                None => passed.push(agent_id.clone()),
                Some(why) if stage.left_out.len() < LEFT_OUT_MAX => {
                    stage.left_out.push(LeftOut { agent_id: agent_id.clone(), why });
                }
                Some(_) => {}
            }
        }
        stage.passed = passed.len();
        explanation.stages.push(stage);
        passed
    };

    let able = stage("hard_match", declaring, &|agent_id| {
        let lacks = hard_match::lacks(view, agent_id, required);
        (!lacks.is_empty()).then_some(Why::Lacks(lacks))
    });
    let others_ready = able.iter().any(|agent_id| {
        !avoid.contains(agent_id) && view.standing(agent_id).is_some_and(|s| s != Standing::NotReady)
    });
    let skip = if others_ready { avoid } else { &[] };
    let free = stage("dynamic", able.iter().collect(), &|agent_id| {
        stops(view, agent_id).or_else(|| skip.contains(agent_id).then_some(Why::LostAttempt))
    });
    let any_preferred = free.iter().any(|agent_id| preferred.contains(agent_id));
    let last = stage("affinity", free.iter().collect(), &|agent_id| {
        (any_preferred && !preferred.contains(agent_id)).then_some(Why::NotPreferred)
    });
    explanation.next = match last.as_slice() {
        [only] => Some(only.clone()),
        [] => None,
        _ if any_preferred => {
            let mut among: Vec<_> = able.into_iter().filter(|id| preferred.contains(id)).collect();
            among.sort();
            wheels.of(Requirement::among(required, among), view).and_then(|wheel| wheel.next(skip).cloned())
        }
        _ => wheels.of(Requirement::any(required), view).and_then(|wheel| wheel.next(skip).cloned()),
    };
    explanation
}

fn stops(view: &View, agent_id: &AgentId) -> Option<Why> {
    let agent = view.agent(agent_id)?;
    match Standing::of(agent) {
        Standing::Free => None,
        Standing::Saturated => {
            Some(Why::Saturated { taken: agent.taken, max_concurrency: agent.max_concurrency })
        }
        Standing::NotReady if agent.state == AgentState::Ready => Some(Why::Changing),
        Standing::NotReady => Some(Why::NotReady(agent.state)),
    }
}
