//! The message state machine: what each command about a message checks and does.
//!
//! A slot belongs to an attempt, from the choice until its result, its release or the end of the
//! run; a deadline that passes does not free it, so an agent of one slot never runs two tasks.

use std::sync::Arc;

use reach_protocol::{
    AgentId, AgentState, Code, ErrorReply, Json, MessageState, Money, MsgId, Reply, Target, Warning,
    command::{Decision, FailReason, Submit},
    error::Hint,
    message::{Holder, MessageRecord, Outcome, PendingReason},
};

use crate::{change::Change, event, registry::may_not_act, retry, rows::Write};

/// How long a submitter stays away when too much waits.
const OVERLOADED_RETRY_MS: u64 = 1_000;

/// Takes a message in, with the leader's choice.
///
/// Checked in this order: the author may speak as the source; the id is new (the same source and
/// content get the first submission's message, anything else `msg_id_conflict`); a parent was
/// delivered to the source; there is room to wait. A choice that no longer holds is no reason to
/// refuse: the message waits as `decision_stale` and the scheduler chooses again.
pub(crate) fn submit(change: &mut Change<'_>, submit: &Submit) -> Result<Reply, ErrorReply> {
    if !submit.author.acts_for(&submit.source) {
        return Err(may_not_act(&submit.author, &submit.source));
    }
    if let Some(known) = change.message(&submit.msg_id) {
        if known.content_hash == submit.content_hash && known.source == submit.source {
            return Ok(reply(&known));
        }
        let message = format!("{} is taken by a message with other content: use a new msg_id", submit.msg_id);
        return Err(ErrorReply::new(Code::MsgIdConflict, message));
    }
    if let Some(parent) = &submit.parent
        && (change.message(parent).is_none() || !change.rows.was_delivered(parent, &submit.source))
    {
        let message = format!("{parent} is no message that was delivered to {}", submit.source);
        return Err(ErrorReply {
            field: Some("parent_msg_id".into()),
            ..ErrorReply::new(Code::UnknownParent, message)
        });
    }
    let waiting = change.rows.waiting();
    let waiting_max = change.rules().rules.routing.waiting_max;
    if matches!(submit.decision, Decision::Wait { .. }) && waiting >= waiting_max {
        let message = format!("{waiting} messages wait for an agent; the limit is {waiting_max}");
        return Err(ErrorReply::new(Code::Overloaded, message)
            .with_retry_after_ms(OVERLOADED_RETRY_MS)
            .with_hint(Hint { queue_depth: Some(waiting), ..Hint::default() }));
    }

    change.write(Write::PutEnvelope { msg_id: submit.msg_id.clone(), envelope: submit.envelope.clone() });
    match &submit.decision {
        Decision::Give { holder, warnings } if can_take(change, &submit.target, holder) => {
            // The reason is never seen: the message leaves `pending` in this very command.
            let record = new_record(change, submit, PendingReason::DecisionStale, warnings.clone());
            change.accept_matched(record, holder);
        }
        Decision::Give { warnings, .. } => {
            // What the void choice would have meant for affinity is no longer true.
            let warnings = warnings.iter().copied().filter(|w| *w != Warning::AffinityUnmet).collect();
            change.accept(new_record(change, submit, PendingReason::DecisionStale, warnings));
        }
        Decision::Wait { reason, warnings } => {
            change.accept(new_record(change, submit, *reason, warnings.clone()));
        }
    }
    let record = change.message(&submit.msg_id).expect("it was just accepted");
    Ok(reply(&record))
}

fn new_record(
    change: &Change<'_>,
    submit: &Submit,
    reason: PendingReason,
    warnings: Vec<Warning>,
) -> MessageRecord {
    let next_flow_seq = change.trace(&submit.trace_id).last_flow_seq.saturating_add(1);
    MessageRecord {
        msg_id: submit.msg_id.clone(),
        trace_id: submit.trace_id.clone(),
        flow_seq: submit.flow_seq.unwrap_or(next_flow_seq),
        parent: submit.parent.clone(),
        source: submit.source.clone(),
        principal: submit.author.clone(),
        target: submit.target.clone(),
        content_hash: submit.content_hash,
        shape: submit.shape.clone(),
        accepted: change.stamp,
        expires_ms: change.stamp.cluster_ms.saturating_add(submit.expires_in_ms),
        state: MessageState::Pending { reason },
        since: change.stamp,
        attempt: 0,
        retries: 0,
        retry_at_ms: None,
        avoid: Vec::new(),
        warnings,
    }
}

/// Whether a choice holds: the run is the agent's current one and ready, a slot is free, and it is
/// whom the target means.
pub(crate) fn can_take(change: &Change<'_>, target: &Target, holder: &Holder) -> bool {
    let Some(agent) = change.agent(&holder.agent_id) else { return false };
    let fits = match target {
        Target::Agent(agent_id) => *agent_id == holder.agent_id,
        Target::Capabilities { required, .. } => {
            required.iter().all(|tag| agent.registration.tags().any(|declared| declared == tag))
        }
    };
    fits && agent.instance == holder.instance
        && agent.state == AgentState::Ready
        && change.rows.slots_taken(&holder.agent_id) < agent.registration.max_concurrency
}

/// Gives a waiting message away. Does nothing when the message or the choice has changed since, or
/// before its retry is due: the scheduler decides again.
pub(crate) fn assign(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
    warnings: &[Warning],
) -> Result<Reply, ErrorReply> {
    let Some(record) = change.message(msg_id) else { return Ok(Reply::Done) };
    let waits = matches!(record.state, MessageState::Pending { .. }) && record.attempt == attempt;
    let is_due = record.retry_at_ms.is_none_or(|at_ms| change.stamp.cluster_ms >= at_ms);
    if waits && is_due && can_take(change, &record.target, holder) {
        change.give(warn(&record, warnings), holder);
    }
    Ok(Reply::Done)
}

pub(crate) fn warn(record: &MessageRecord, warnings: &[Warning]) -> MessageRecord {
    let mut record = record.clone();
    for warning in warnings {
        if !record.warnings.contains(warning) {
            record.warnings.push(*warning);
        }
    }
    record
}

/// `matched` becomes `dispatched`; anywhere else the note comes too late to matter.
pub(crate) fn dispatched(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
) -> Result<Reply, ErrorReply> {
    if let Some(record) = change.message(msg_id)
        && record.attempt == attempt
        && matches!(&record.state, MessageState::Matched { holder: held } if held == holder)
    {
        let to = MessageState::Dispatched { holder: holder.clone() };
        change.transition((*record).clone(), to, None);
    }
    Ok(Reply::Done)
}

/// The agent has it on its disk. From `matched` the hop of `dispatched` is written too: that it was
/// sent is implied. Said again by the same run it is answered with the message, also after that
/// attempt's own report ended it.
pub(crate) fn received(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
) -> Result<Reply, ErrorReply> {
    check_instance(change, holder)?;
    let record = known(change, msg_id)?;
    let is_own = record.attempt == attempt && record.state.holder() == Some(holder);
    match &record.state {
        MessageState::Acknowledged { .. } | MessageState::Completed { .. } | MessageState::Failed { .. }
            if is_own =>
        {
            Ok(reply(&record))
        }
        MessageState::Matched { .. } | MessageState::Dispatched { .. } if is_own => {
            Ok(reply(&acknowledge(change, &record, holder)))
        }
        _ => Err(stale_attempt(&record, attempt)),
    }
}

/// To `acknowledged` from `matched` or `dispatched`; stays there otherwise.
fn acknowledge(change: &mut Change<'_>, record: &Arc<MessageRecord>, holder: &Holder) -> Arc<MessageRecord> {
    let mut record = record.clone();
    if matches!(record.state, MessageState::Matched { .. }) {
        let to = MessageState::Dispatched { holder: holder.clone() };
        record = change.transition((*record).clone(), to, None);
    }
    if matches!(record.state, MessageState::Dispatched { .. }) {
        let to = MessageState::Acknowledged { holder: holder.clone() };
        record = change.transition((*record).clone(), to, None);
        change
            .write(Write::PutDelivered { msg_id: record.msg_id.clone(), agent_id: holder.agent_id.clone() });
    }
    record
}

/// The first and only result. A `received` that got lost on the way is implied by it. On a message
/// that has ended it changes nothing but the slot this attempt still held, and is answered with what
/// was recorded.
pub(crate) fn complete(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
    excerpt: &str,
    result: &Json,
    cost: Option<Money>,
) -> Result<Reply, ErrorReply> {
    let record = match report(change, msg_id, attempt, holder)? {
        Report::Late(record) => return Ok(reply(&record)),
        Report::Current(record) => record,
    };
    let limits = &change.rules().rules.limits;
    let result_bytes = result.as_str().len();
    if result_bytes > limits.result_bytes {
        return Err(ErrorReply::too_large("result", result_bytes, limits.result_bytes));
    }
    if excerpt.len() > limits.excerpt_bytes {
        return Err(ErrorReply::too_large("excerpt", excerpt.len(), limits.excerpt_bytes));
    }

    let record = acknowledge(change, &record, holder);
    change.write(Write::PutResult { msg_id: msg_id.clone(), result: result.clone() });
    let outcome = Outcome { excerpt: excerpt.to_string(), cost, result_bytes: result_bytes as u64 };
    let to = MessageState::Completed { holder: holder.clone(), outcome };
    let record = change.transition((*record).clone(), to, None);
    change.free(&holder.agent_id, msg_id, attempt);
    event::task_completed(change, &record, holder, cost);
    Ok(reply(&record))
}

/// The agent could not do it: the message ends. `text` is the agent's own words to the caller, cut
/// to an excerpt's length; it is stored with the message and never logged. Repeats and late reports
/// as for `complete`.
pub(crate) fn fail(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
    reason: FailReason,
    text: &str,
) -> Result<Reply, ErrorReply> {
    let record = match report(change, msg_id, attempt, holder)? {
        Report::Late(record) => return Ok(reply(&record)),
        Report::Current(record) => record,
    };
    let words = &text[..text.floor_char_boundary(change.rules().rules.limits.excerpt_bytes)];
    let (code, said) = match reason {
        FailReason::Error => (Code::AgentError, "the agent reported an error"),
        FailReason::Unparseable => (Code::Unparseable, "the agent could not parse the content"),
        FailReason::Refused => (Code::Rejected, "the agent refused the task"),
        FailReason::Busy => (Code::Rejected, "the agent is busy"),
    };
    let message = match (reason, words) {
        (_, "") => said.to_string(),
        (FailReason::Busy, _) => format!("{said}: {words}"),
        _ => words.to_string(),
    };

    let record = acknowledge(change, &record, holder);
    let error = Box::new(ErrorReply::new(code, message).with_msg_id(msg_id));
    let to = MessageState::Failed { holder: Some(holder.clone()), error };
    let record = change.transition((*record).clone(), to, Some(code.as_str()));
    change.free(&holder.agent_id, msg_id, attempt);
    Ok(reply(&record))
}

/// What a report on an attempt meets.
enum Report {
    /// The current attempt, held by the reporting run.
    Current(Arc<MessageRecord>),
    /// The message had ended before.
    Late(Arc<MessageRecord>),
}

/// Only the current run of an agent may report. A late report is for agents that had the message;
/// others are told nothing of it.
fn report(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
) -> Result<Report, ErrorReply> {
    check_instance(change, holder)?;
    let record = known(change, msg_id)?;
    if record.state.is_final() {
        let slot = change.rows.slot(&holder.agent_id, msg_id);
        let had_it = slot.is_some()
            || record.state.holder().is_some_and(|held| held.agent_id == holder.agent_id)
            || record.avoid.contains(&holder.agent_id)
            || change.rows.was_delivered(msg_id, &holder.agent_id);
        if !had_it {
            return Err(stale_attempt(&record, attempt));
        }
        if slot.is_some_and(|slot| slot.attempt == attempt && slot.instance == holder.instance) {
            change.free(&holder.agent_id, msg_id, attempt);
        }
        return Ok(Report::Late(record));
    }
    if record.attempt == attempt && record.state.holder() == Some(holder) {
        Ok(Report::Current(record))
    } else {
        Err(stale_attempt(&record, attempt))
    }
}

/// The agent has let go of an attempt that is over. The current attempt can't be let go of this way:
/// its slot goes with its result.
pub(crate) fn release(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
) -> Result<Reply, ErrorReply> {
    check_instance(change, holder)?;
    let slot = change.rows.slot(&holder.agent_id, msg_id);
    if slot.is_none_or(|slot| slot.attempt != attempt || slot.instance != holder.instance) {
        return Ok(Reply::Done);
    }
    if !is_over(change, msg_id, attempt) {
        let message = format!("attempt {attempt} of {msg_id} is the current one: report its result instead");
        return Err(ErrorReply::new(Code::IllegalTransition, message));
    }
    change.free(&holder.agent_id, msg_id, attempt);
    Ok(Reply::Done)
}

/// Ends an attempt that was not received. One that is over already is as it should be; one that was
/// received meanwhile stays, and the proposer is told so.
pub(crate) fn return_attempt(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
    reason: PendingReason,
) -> Result<Reply, ErrorReply> {
    let record = known(change, msg_id)?;
    if record.attempt > attempt || (record.attempt == attempt && record.state.is_final()) {
        return Ok(Reply::Done);
    }
    check_instance(change, holder)?;
    let is_own = record.attempt == attempt && record.state.holder() == Some(holder);
    if !is_own {
        return Err(stale_attempt(&record, attempt));
    }
    if matches!(record.state, MessageState::Acknowledged { .. }) {
        let message = format!("attempt {attempt} of {msg_id} has been received: it is not given back");
        return Err(ErrorReply::new(Code::StaleAttempt, message));
    }
    retry::give_back(change, &record, reason);
    Ok(Reply::Done)
}

/// Ends a message that nobody could be found for. One that was ever matched is not given up: its
/// attempts and its deadline decide.
pub(crate) fn give_up(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    error: &ErrorReply,
) -> Result<Reply, ErrorReply> {
    if let Some(record) = change.message(msg_id)
        && matches!(record.state, MessageState::Pending { .. })
        && record.attempt == 0
    {
        let code = error.code.as_str();
        let error = Box::new(error.clone().with_msg_id(msg_id));
        change.transition((*record).clone(), MessageState::Failed { holder: None, error }, Some(code));
    }
    Ok(Reply::Done)
}

/// Frees a slot that an attempt held for too long after its end.
pub(crate) fn free_slot(
    change: &mut Change<'_>,
    agent_id: &AgentId,
    msg_id: &MsgId,
    attempt: u32,
) -> Result<Reply, ErrorReply> {
    let held = change.rows.slot(agent_id, msg_id).is_some_and(|slot| slot.attempt == attempt);
    if held && is_over(change, msg_id, attempt) {
        change.free(agent_id, msg_id, attempt);
    }
    Ok(Reply::Done)
}

/// The message has ended, or a later attempt has taken the place of this one.
fn is_over(change: &Change<'_>, msg_id: &MsgId, attempt: u32) -> bool {
    change.message(msg_id).is_none_or(|record| record.state.is_final() || record.attempt != attempt)
}

/// Only the current run of an agent is heard.
fn check_instance(change: &Change<'_>, holder: &Holder) -> Result<(), ErrorReply> {
    let Holder { agent_id, instance } = holder;
    let message = match change.agent(agent_id) {
        Some(agent) if agent.instance == *instance => return Ok(()),
        Some(agent) => {
            format!("agent {agent_id} runs as instance {}, not {instance}: stop this run", agent.instance)
        }
        None => format!("agent {agent_id} is not registered, so instance {instance} is not heard"),
    };
    Err(ErrorReply::new(Code::StaleInstance, message))
}

fn known(change: &Change<'_>, msg_id: &MsgId) -> Result<Arc<MessageRecord>, ErrorReply> {
    change.message(msg_id).ok_or_else(|| ErrorReply::new(Code::NotFound, format!("no message {msg_id}")))
}

fn stale_attempt(record: &MessageRecord, attempt: u32) -> ErrorReply {
    let MessageRecord { msg_id, attempt: current, .. } = record;
    let message = if record.attempt != attempt {
        format!("attempt {attempt} of {msg_id} is not the current one ({current}): drop it")
    } else if record.state.is_final() {
        format!("{msg_id} has ended ({}): drop it", record.state.name())
    } else {
        format!("attempt {attempt} of {msg_id} is not this agent's: drop it")
    };
    ErrorReply::new(Code::StaleAttempt, message)
}

fn reply(record: &Arc<MessageRecord>) -> Reply {
    Reply::Message(record.clone())
}
