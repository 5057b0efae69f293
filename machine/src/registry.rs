//! The registry: who an agent's current run is, whether it is ready, and what becomes of its
//! attempts when a run ends.

use std::sync::Arc;

use reach_protocol::{
    AgentId, AgentState, Code, ErrorReply, Fact, InstanceId, MessageState, Principal, Registration, Reply,
    StateReason,
    agent::{AgentRecord, Tombstone},
    message::PendingReason,
};

use crate::{change::Change, message, rows::Write};

/// Registering is an upsert on the agent's id.
///
/// - A first run, or one that started later than the current one (ties: the larger instance id),
///   becomes the current run: `ready`, its liveness counted from 0. The run it replaces is fenced
///   for good.
/// - The current run keeps its start, its state and its liveness, whatever it declares anew; an
///   equal registration writes nothing. One that was `offline` stays so until `SetLiveness`.
/// - An earlier run is refused with `stale_instance`. So is, whatever start it names, a run that was
///   removed or replaced last: its start was computed once, at its first registration.
pub(crate) fn register(
    change: &mut Change<'_>,
    registration: &Registration,
    instance: &InstanceId,
    started_ms: u64,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    let agent_id = &registration.agent_id;
    if !author.acts_for(agent_id) {
        return Err(may_not_act(author, agent_id));
    }
    let current = change.agent(agent_id);
    if let Some(current) = current.as_ref().filter(|current| current.instance == *instance) {
        return update(change, current, registration);
    }
    let start = (started_ms, instance);
    if let Some(gone) = change.rows.tombstone(agent_id)
        && (gone.instance == *instance || (current.is_none() && (gone.started_ms, &gone.instance) >= start))
    {
        let message = format!(
            "instance {instance} of agent {agent_id} was removed, or started before one that was: stop this run"
        );
        return Err(ErrorReply::new(Code::StaleInstance, message));
    }
    if let Some(current) = current.as_ref().filter(|current| (current.started_ms, &current.instance) > start)
    {
        let message = format!(
            "agent {agent_id} runs as instance {}, which started later than {instance}: stop this run",
            current.instance
        );
        return Err(ErrorReply::new(Code::StaleInstance, message));
    }
    registration.validate(&change.rules().rules.limits)?;

    let record = Arc::new(AgentRecord {
        registration: registration.clone(),
        instance: instance.clone(),
        started_ms,
        registered: change.stamp,
        state: AgentState::Ready,
        reason: StateReason::Registered,
        since: change.stamp,
        liveness_seq: 0,
    });
    if let Some(fenced) = &current {
        bury(change, fenced);
        change.fact(Fact::Fenced { agent_id: agent_id.clone(), instance: fenced.instance.clone() });
    }
    change.write(Write::PutAgent(record.clone()));
    change.fact(Fact::Registered(record.clone()));
    if current.is_some() {
        end_attempts(change, agent_id, &End::Replaced { by: instance });
    }
    Ok(Reply::Agent(Box::new((*record).clone())))
}

fn update(
    change: &mut Change<'_>,
    current: &Arc<AgentRecord>,
    registration: &Registration,
) -> Result<Reply, ErrorReply> {
    if current.registration == *registration {
        return Ok(Reply::Agent(Box::new((**current).clone())));
    }
    registration.validate(&change.rules().rules.limits)?;
    let record = Arc::new(AgentRecord { registration: registration.clone(), ..(**current).clone() });
    change.write(Write::PutAgent(record.clone()));
    change.fact(Fact::Registered(record.clone()));
    Ok(Reply::Agent(Box::new((*record).clone())))
}

/// An operator, or whoever acts for the agent, takes it out of the registry. A tombstone stays, so
/// that neither this run nor an earlier one comes back. Nothing it held is lost: what it had
/// received waits again too.
pub(crate) fn remove(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    if !author.acts_for(agent_id) && !change.rules().rules.is_operator(author) {
        let message =
            format!("{author} may not remove agent {agent_id}: it is neither its own nor an operator");
        return Err(ErrorReply::new(Code::Forbidden, message));
    }
    let Some(current) = change.agent(agent_id) else {
        return match change.rows.tombstone(agent_id) {
            Some(_) => Ok(Reply::Done),
            None => Err(ErrorReply::new(Code::NotFound, format!("no agent {agent_id} is registered"))),
        };
    };
    bury(change, &current);
    change.fact(Fact::Removed { agent_id: agent_id.clone(), instance: current.instance.clone() });
    end_attempts(change, agent_id, &End::Removed);
    Ok(Reply::Done)
}

/// Void unless instance and sequence are the current ones: a late verdict on a run that has changed
/// since says nothing. The state it already has is no change. `offline` gives back what was not yet
/// received; received attempts stay with their slots, since the inbox outlives the silence.
pub(crate) fn set_liveness(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    instance: &InstanceId,
    liveness_seq: u64,
    state: AgentState,
    reason: StateReason,
) -> Result<Reply, ErrorReply> {
    let Some(current) = change.agent(agent_id) else { return Ok(Reply::Done) };
    let is_current = current.instance == *instance && current.liveness_seq == liveness_seq;
    if !is_current || current.state == state {
        return Ok(Reply::Done);
    }
    let record = Arc::new(AgentRecord {
        state,
        reason,
        since: change.stamp,
        liveness_seq: liveness_seq + 1,
        ..(*current).clone()
    });
    change.write(Write::PutAgent(record.clone()));
    change.fact(Fact::LivenessChanged(record));
    if state == AgentState::Offline {
        end_attempts(change, agent_id, &End::Silent);
    }
    Ok(Reply::Done)
}

/// The row goes and the tombstone remembers whose it was.
fn bury(change: &mut Change<'_>, record: &AgentRecord) {
    let tombstone =
        Tombstone { instance: record.instance.clone(), started_ms: record.started_ms, removed: change.stamp };
    change.write(Write::RemoveAgent { agent_id: record.agent_id().clone(), tombstone });
}

/// How a run stopped serving.
enum End<'a> {
    Silent,
    Replaced { by: &'a InstanceId },
    Removed,
}

/// What becomes of the attempts an agent holds. Not yet received: they wait again. Received: they
/// stay with a silent run, go over to a later run of the same agent (it has the same inbox), and
/// wait again when the agent is removed. Ended ones only held a slot; it is freed with the run.
fn end_attempts(change: &mut Change<'_>, agent_id: &AgentId, end: &End<'_>) {
    for (msg_id, slot) in change.rows.slots(agent_id) {
        let record = change.message(&msg_id).filter(|record| !record.state.is_final());
        let Some(record) = record else {
            if !matches!(end, End::Silent) {
                change.free(agent_id, &msg_id, slot.attempt);
            }
            continue;
        };
        assert_eq!(record.attempt, slot.attempt, "an unfinished message's slot is its current attempt's");
        match (&record.state, end) {
            (MessageState::Matched { .. } | MessageState::Dispatched { .. }, _) => {
                message::give_back(change, &record, PendingReason::AgentLost);
            }
            (_, End::Silent) => {}
            (_, End::Replaced { by }) => change.hand_over(&record, agent_id, slot, by),
            (_, End::Removed) => {
                let lost = PendingReason::AgentLost;
                let to = MessageState::Pending { reason: lost };
                change.transition((*record).clone(), to, Some(lost.as_str()));
                change.free(agent_id, &msg_id, slot.attempt);
            }
        }
    }
}

pub(crate) fn may_not_act(author: &Principal, agent_id: &AgentId) -> ErrorReply {
    ErrorReply::new(Code::Forbidden, format!("{author} may not act for {agent_id}"))
}
