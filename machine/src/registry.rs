//! The registry: who an agent's current run is, whether it is ready, and what becomes of its
//! attempts when a run ends.

use std::sync::Arc;

use reach_protocol::{
    AgentId, AgentState, Code, ErrorReply, Fact, InstanceId, MessageState, Principal, Registration, Reply,
    RulesRecord, StateReason,
    agent::{AgentRecord, Drain, FENCED_MAX, Tombstone},
    command::ExpiryPause,
    message::{MessageRecord, PendingReason},
};

use crate::{change::Change, event, member, retry, rows::Write};

/// Registering is an upsert on the agent's id.
///
/// - A first run, or one that started later than the current one (ties: the larger instance id),
///   becomes the current run: `ready`, its liveness counted from 0. The run it replaces is fenced
///   for good.
/// - An operator's drain goes over to the next run: that one begins as `draining`.
/// - The current run keeps its start, its state and its liveness, whatever it declares anew; an
///   equal registration writes nothing. One that was `offline` stays so until `SetLiveness`.
/// - The groups of its subscriptions are made where there are none; what it holds of a group that it
///   no longer names goes back. Where such a group reads other topics, all of it is refused.
/// - An earlier run is refused with `stale_instance`. So is, whatever start it names, each of the last
///   runs that were removed or replaced: a start is computed once, at a run's first registration.
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
        return update(change, current, registration, author);
    }
    let start = (started_ms, instance);
    if let Some(gone) = change.rows.tombstone(agent_id)
        && (gone.names(instance) || (current.is_none() && (gone.started_ms, &gone.instance) >= start))
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
    member::join(change, registration, author)?;

    let drain = current.as_ref().and_then(|current| current.drain.clone());
    let (state, reason) = match &drain {
        None => (AgentState::Ready, StateReason::Registered),
        Some(_) => (AgentState::Draining, StateReason::Drained),
    };
    let record = Arc::new(AgentRecord {
        registration: registration.clone(),
        instance: instance.clone(),
        started_ms,
        registered: change.stamp,
        state,
        reason,
        since: change.stamp,
        liveness_seq: 0,
        drain,
        drain_seq: current.as_ref().map_or(0, |current| current.drain_seq),
    });
    if let Some(fenced) = &current {
        bury(change, fenced, None);
        change.fact(Fact::Fenced { agent_id: agent_id.clone(), instance: fenced.instance.clone() });
    }
    change.write(Write::PutAgent(record.clone()));
    change.fact(Fact::Registered(record.clone()));
    if current.as_ref().is_some_and(|current| current.state != state) {
        event::liveness_changed(change, &record);
    }
    if current.is_some() {
        end_attempts(change, agent_id, &End::Replaced { by: instance });
    }
    Ok(Reply::Agent(Box::new((*record).clone())))
}

fn update(
    change: &mut Change<'_>,
    current: &Arc<AgentRecord>,
    registration: &Registration,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    if current.registration == *registration {
        // A group may have been removed meanwhile.
        member::join(change, registration, author)?;
        return Ok(Reply::Agent(Box::new((**current).clone())));
    }
    registration.validate(&change.rules().rules.limits)?;
    member::join(change, registration, author)?;
    let left = member::left(&current.registration, registration);
    if !left.is_empty() {
        member::leave(change, &registration.agent_id, Some(&left));
    }
    let record = Arc::new(AgentRecord { registration: registration.clone(), ..(**current).clone() });
    change.write(Write::PutAgent(record.clone()));
    change.fact(Fact::Registered(record.clone()));
    Ok(Reply::Agent(Box::new((*record).clone())))
}

/// An operator, or whoever acts for the agent, takes it out of the registry. A tombstone stays, so
/// that neither this run nor an earlier one comes back. Nothing it held is lost: what it had
/// received waits again too. Only the run that was meant is removed: a repeat says nothing to one
/// that came after it.
pub(crate) fn remove(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    instance: Option<&InstanceId>,
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
            None => Err(unknown(agent_id)),
        };
    };
    if instance == Some(&current.instance) {
        take_out(change, &current, Some(author));
    }
    Ok(Reply::Done)
}

/// The leader's verdict on a registration that has outlived its agent. Void when the agent was heard
/// since, or has not been offline for long enough by the entry's own stamp.
pub(crate) fn remove_offline(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    instance: &InstanceId,
    liveness_seq: u64,
) -> Result<Reply, ErrorReply> {
    let Some(current) = change.agent(agent_id) else { return Ok(Reply::Done) };
    let is_current = current.instance == *instance && current.liveness_seq == liveness_seq;
    let silent_ms = change.stamp.cluster_ms.saturating_sub(current.since.cluster_ms);
    let is_due = silent_ms >= change.rules().rules.liveness.remove_after_ms;
    if is_current && is_due && current.state == AgentState::Offline {
        take_out(change, &current, None);
    }
    Ok(Reply::Done)
}

fn take_out(change: &mut Change<'_>, current: &AgentRecord, by: Option<&Principal>) {
    bury(change, current, by);
    let agent_id = current.agent_id();
    change.fact(Fact::Removed { agent_id: agent_id.clone(), instance: current.instance.clone() });
    end_attempts(change, agent_id, &End::Removed);
}

/// An operator takes an agent out of the choice, whatever its runs say, until `resume`. What it runs
/// goes on to its end. Void, and answered with the agent as it is, when somebody drained or resumed
/// it since the operator looked.
pub(crate) fn drain(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    drain_seq: u64,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    let drain = Box::new(Drain { by: author.clone(), at: change.stamp });
    set_drain(change, agent_id, drain_seq, author, Some(drain))
}

/// Takes the drain back. An agent that left by itself, or is silent, stays as it is.
pub(crate) fn resume(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    drain_seq: u64,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    set_drain(change, agent_id, drain_seq, author, None)
}

fn set_drain(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    drain_seq: u64,
    author: &Principal,
    drain: Option<Box<Drain>>,
) -> Result<Reply, ErrorReply> {
    if !change.rules().rules.is_operator(author) {
        let message = format!("{author} may not drain or resume agents: grants.operators does not name it");
        return Err(ErrorReply::new(Code::Forbidden, message));
    }
    let Some(current) = change.agent(agent_id) else { return Err(unknown(agent_id)) };
    if current.drain_seq != drain_seq || current.drain.is_some() == drain.is_some() {
        return Ok(Reply::Agent(Box::new((*current).clone())));
    }
    let mut record = AgentRecord { drain_seq: drain_seq + 1, ..(*current).clone() };
    let moved = match (&drain, current.state, current.reason) {
        (Some(_), AgentState::Ready, _) => Some((AgentState::Draining, StateReason::Drained)),
        (None, AgentState::Draining, StateReason::Drained) => Some((AgentState::Ready, StateReason::Resumed)),
        _ => None,
    };
    record.drain = drain;
    if let Some((state, reason)) = moved {
        (record.state, record.reason, record.since) = (state, reason, change.stamp);
        record.liveness_seq += 1;
    }
    let record = Arc::new(record);
    change.write(Write::PutAgent(record.clone()));
    change.fact(Fact::DrainChanged(record.clone()));
    if moved.is_some() {
        event::liveness_changed(change, &record);
    }
    Ok(Reply::Agent(Box::new((*record).clone())))
}

/// The leader has a mass expiry wait: noted where every node sees it, with an event, once.
pub(crate) fn pause_expiry(change: &mut Change<'_>, pause: &ExpiryPause) -> Result<Reply, ErrorReply> {
    let current = change.rules();
    if current.expiry.as_ref().is_none_or(|last| last.since_ms < pause.since_ms) {
        put_expiry(change, &current, pause.clone());
        event::mass_expiry(change, pause);
    }
    Ok(Reply::Done)
}

/// An operator knows better: the wait that began at `since_ms` ends now.
pub(crate) fn expire_now(
    change: &mut Change<'_>,
    since_ms: u64,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    let current = change.rules();
    if !current.rules.is_operator(author) {
        let message = format!("{author} may not end the wait: grants.operators does not name it");
        return Err(ErrorReply::new(Code::Forbidden, message));
    }
    let waits = |pause: &&ExpiryPause| pause.since_ms == since_ms && pause.forced_by.is_none();
    if let Some(pause) = current.expiry.as_ref().filter(waits) {
        put_expiry(change, &current, ExpiryPause { forced_by: Some(author.clone()), ..pause.clone() });
    }
    Ok(Reply::Done)
}

fn put_expiry(change: &mut Change<'_>, current: &RulesRecord, pause: ExpiryPause) {
    let record = RulesRecord { expiry: Some(pause), ..current.clone() };
    change.write(Write::PutRules(Arc::new(record)));
}

/// Void unless instance and sequence are the current ones: a late verdict on a run that has changed
/// since says nothing. The state it already has is no change. What an operator drained becomes
/// `draining` where another would become `ready`. `offline` gives back what was not yet
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
    let (state, reason) = match (state, &current.drain) {
        (AgentState::Ready, Some(_)) => (AgentState::Draining, StateReason::Drained),
        _ => (state, reason),
    };
    let is_current = current.instance == *instance && current.liveness_seq == liveness_seq;
    if !is_current || (current.state, current.reason) == (state, reason) {
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
    change.fact(Fact::LivenessChanged(record.clone()));
    event::liveness_changed(change, &record);
    if state == AgentState::Offline && current.state != AgentState::Offline {
        end_attempts(change, agent_id, &End::Silent);
    }
    Ok(Reply::Done)
}

/// The row goes and the tombstone remembers whose it was, who took it away, and whose were before it.
fn bury(change: &mut Change<'_>, record: &AgentRecord, by: Option<&Principal>) {
    let mut earlier = Vec::new();
    if let Some(before) = change.rows.tombstone(record.agent_id()) {
        earlier.push(before.instance);
        earlier.extend(before.earlier);
        earlier.truncate(FENCED_MAX);
    }
    let tombstone = Tombstone {
        instance: record.instance.clone(),
        started_ms: record.started_ms,
        removed: change.stamp,
        by: by.cloned(),
        earlier,
    };
    change.write(Write::RemoveAgent { agent_id: record.agent_id().clone(), tombstone });
}

/// How a run stopped serving.
enum End<'a> {
    Silent,
    Replaced { by: &'a InstanceId },
    Removed,
}

/// What becomes of the attempts an agent holds. Not yet received: they wait again. Received: they
/// stay with a silent run for now, go over to a later run of the same agent (it has the same inbox),
/// and are lost when the agent is removed. Those that are over only held a slot; it is freed with the
/// run. Events that it holds as a member of groups go back, whatever ended it.
fn end_attempts(change: &mut Change<'_>, agent_id: &AgentId, end: &End<'_>) {
    member::leave(change, agent_id, None);
    for (msg_id, slot) in change.rows.slots(agent_id) {
        let is_current =
            |record: &Arc<MessageRecord>| !record.state.is_final() && record.attempt == slot.attempt;
        let Some(record) = change.message(&msg_id).filter(is_current) else {
            if !matches!(end, End::Silent) {
                change.free(agent_id, &msg_id, slot.attempt);
            }
            continue;
        };
        match (&record.state, end) {
            (MessageState::Matched { .. } | MessageState::Dispatched { .. }, _) => {
                retry::give_back(change, &record, PendingReason::AgentLost);
            }
            (_, End::Silent) => {}
            (_, End::Replaced { by }) => change.hand_over(&record, agent_id, slot, by),
            (_, End::Removed) => retry::removed(change, &record),
        }
    }
}

fn unknown(agent_id: &AgentId) -> ErrorReply {
    ErrorReply::new(Code::NotFound, format!("no agent {agent_id} is registered"))
}

pub(crate) fn may_not_act(author: &Principal, agent_id: &AgentId) -> ErrorReply {
    ErrorReply::new(Code::Forbidden, format!("{author} may not act for {agent_id}"))
}
