//! What becomes of a message whose attempt came to nothing: another agent at once, another attempt
//! after a while, or the end.
//!
//! - Before `received` another candidate gets it at once, `attempts_max` times; after that as below.
//! - After `received` the next attempt begins [`RETRY_AFTER_MS`] after the loss, never earlier: the
//!   leader adds its jitter by asking later. When these are used up the message ends as `timeout` and
//!   leaves a dead letter.
//!
//! A task that its agent had received stays with it, slot and all, until somebody else takes it over:
//! being offline ends nothing. So an agent that returns within `return_within_ms` goes on with it as
//! if nothing had been, at no cost in retries; and the entry that ends an attempt is the one that
//! begins the next, so that between the two nobody's work is thrown away for nothing. Once those
//! `return_within_ms` are over the attempt ends also without another agent. Its slot stays taken until
//! the agent lets go of it or its run ends: it may still be at work.

use std::sync::Arc;

use reach_protocol::{
    AgentId, AgentState, Code, ErrorReply, MessageState, MsgId, Reply, Warning,
    message::{DeadCause, DeadLetter, Holder, MessageRecord, PendingReason, RETRY_AFTER_MS, TimeoutCause},
};

use crate::{
    change::Change,
    message::{can_take, warn},
    rows::Write,
};

/// An attempt ends before `received`. Its slot is free: the agent does not have the task.
pub(crate) fn give_back(change: &mut Change<'_>, record: &MessageRecord, reason: PendingReason) {
    let agent_id = record.state.holder().expect("an attempt has a holder").agent_id.clone();
    let quick = record.attempt + 1 - record.retries;
    if quick <= change.rules().rules.delivery.attempts_max {
        let record = avoiding(record, &agent_id);
        change.transition(record, MessageState::Pending { reason }, Some(reason.as_str()));
    } else {
        lose(change, record, reason, Next::Waits);
    }
    change.free(&agent_id, &record.msg_id, record.attempt);
}

/// A received attempt ends with its agent's registration.
pub(crate) fn removed(change: &mut Change<'_>, record: &MessageRecord) {
    let agent_id = record.state.holder().expect("an attempt has a holder").agent_id.clone();
    lose(change, record, PendingReason::AgentLost, Next::Waits);
    change.free(&agent_id, &record.msg_id, record.attempt);
}

/// An agent that had received a task is lost: another one takes it over, or nobody could for so long
/// that it waits like any other message. Void when the attempt is over, when its agent was heard
/// since, and when it is too early.
pub(crate) fn retake(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    attempt: u32,
    holder: &Holder,
    to: Option<&Holder>,
    warnings: &[Warning],
) -> Result<Reply, ErrorReply> {
    let record = change.message(msg_id).filter(|record| {
        record.attempt == attempt
            && matches!(&record.state, MessageState::Acknowledged { holder: held } if held == holder)
    });
    let agent = change
        .agent(&holder.agent_id)
        .filter(|agent| agent.instance == holder.instance && agent.state == AgentState::Offline);
    let (Some(record), Some(agent)) = (record, agent) else { return Ok(Reply::Done) };

    let away_ms = change.stamp.cluster_ms.saturating_sub(agent.since.cluster_ms);
    let return_within_ms = change.rules().rules.delivery.return_within_ms;
    let after_ms = retry_after_ms(&record);
    let is_due = match (to, after_ms) {
        (Some(to), Some(after_ms)) => away_ms >= after_ms && can_take(change, &record.target, to),
        // It has had its last attempt.
        (Some(_), None) => false,
        (None, after_ms) => away_ms >= return_within_ms.max(after_ms.unwrap_or(0)),
    };
    if !is_due || change.stamp.cluster_ms >= record.expires_ms {
        return Ok(Reply::Done);
    }
    let record = lose(change, &record, PendingReason::AgentLost, Next::Begins);
    if let Some(to) = to {
        change.give(warn(&record, warnings), to);
    }
    Ok(Reply::Done)
}

/// When the attempt after a lost one begins.
enum Next {
    /// Its time has been waited for already.
    Begins,
    Waits,
}

/// The attempt was lost: the message waits for the next one, or ends when this was the last.
fn lose(
    change: &mut Change<'_>,
    record: &MessageRecord,
    reason: PendingReason,
    next: Next,
) -> Arc<MessageRecord> {
    let holder = record.state.holder().expect("an attempt has a holder").clone();
    let mut record = avoiding(record, &holder.agent_id);
    let Some(after_ms) = retry_after_ms(&record) else {
        let cause = match reason {
            PendingReason::DeliveryFailed => DeadCause::DeliveryFailed,
            _ => DeadCause::AgentLost,
        };
        bury(change, &record, cause);
        let cause = TimeoutCause::AttemptsExhausted;
        let to = MessageState::TimedOut { holder: Some(holder), cause };
        return change.transition(record, to, Some(cause.code().as_str()));
    };
    record.retries += 1;
    record.retry_at_ms = match next {
        Next::Begins => None,
        Next::Waits => Some(change.stamp.cluster_ms.saturating_add(after_ms)),
    };
    change.transition(record, MessageState::Pending { reason }, Some(reason.as_str()))
}

/// None when its attempts are used up.
fn retry_after_ms(record: &MessageRecord) -> Option<u64> {
    RETRY_AFTER_MS.get(record.retries as usize).copied()
}

fn avoiding(record: &MessageRecord, agent_id: &AgentId) -> MessageRecord {
    let mut record = record.clone();
    if !record.avoid.contains(agent_id) {
        record.avoid.push(agent_id.clone());
    }
    record
}

/// Ends a message whose deadline the entry's stamp has reached. An agent that holds it keeps its
/// slot until it reports, lets go, or its run ends. One that an agent had received leaves a dead
/// letter; one that nobody ever had was no agent's.
pub(crate) fn time_out(change: &mut Change<'_>, msg_id: &MsgId) -> Result<Reply, ErrorReply> {
    if let Some(record) = change.message(msg_id)
        && !record.state.is_final()
        && change.stamp.cluster_ms >= record.expires_ms
    {
        if record.retries > 0 || matches!(record.state, MessageState::Acknowledged { .. }) {
            bury(change, &record, DeadCause::Expired);
        }
        let holder = record.state.holder().cloned();
        let to = MessageState::TimedOut { holder, cause: TimeoutCause::Expired };
        change.transition((*record).clone(), to, Some(Code::Expired.as_str()));
    }
    Ok(Reply::Done)
}

fn bury(change: &mut Change<'_>, record: &MessageRecord, cause: DeadCause) {
    let waits = matches!(record.state, MessageState::Pending { .. });
    let holder = record.state.holder().map(|holder| &holder.agent_id);
    change.write(Write::PutDeadLetter(DeadLetter {
        msg_id: record.msg_id.clone(),
        trace_id: record.trace_id.clone(),
        at: change.stamp,
        cause,
        // While it waits, its number is that of the attempt that has not begun.
        attempts: if waits { record.attempt } else { record.attempt + 1 },
        agent_id: holder.or(record.avoid.last()).cloned(),
    }));
}
