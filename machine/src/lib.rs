//! The replicated rules of Agent-Reach: what a command does is a function of the log.
//!
//! [`apply`] reads the tables just before a position and returns a reply, the facts and the writes
//! that lead to the next position. It has no clock, no chance and no choice: those come in with the
//! command and the stamp, and `clippy.toml` bans the rest. A refused command is a reply and changes
//! nothing. Every command is safe to propose twice: the repeat gets the first reply and writes
//! nothing.

mod certificates;
mod change;
mod event;
mod group;
pub mod live;
mod member;
pub mod memory;
mod message;
mod registry;
mod retry;
pub mod rows;
mod rules;
mod topic;

use reach_protocol::{Code, Command, ErrorReply, MsgId, Reply, Stamp};

pub use live::Live;
pub use memory::MemoryRows;
pub use rows::{Outcome, Position, Rows, Slot, TraceRecord, Write};

use change::Change;

/// What `command` does at `position`. `rows` are the tables just before it, `stamp` is its entry's.
/// The position itself decides nothing.
///
/// Until the first `Init` every other command is refused with `no_leader`: there are no rules to
/// go by. What a refusal says never quotes a payload, a result or an intent.
pub fn apply(rows: &dyn Rows, _position: Position, stamp: Stamp, command: &Command) -> Outcome {
    let mut change = Change::new(rows, stamp);
    let reply = match perform(&mut change, command) {
        Ok(reply) => reply,
        Err(mut refusal) => {
            refusal.msg_id = refusal.msg_id.or_else(|| msg_id(command).cloned());
            Reply::Refused(Box::new(refusal))
        }
    };
    change.into_outcome(reply)
}

fn perform(change: &mut Change<'_>, command: &Command) -> Result<Reply, ErrorReply> {
    if change.rules().revision == 0 && !matches!(command, Command::Init { .. }) {
        let message = "the cluster has not been initialised: run agent-reach cluster init";
        return Err(ErrorReply::new(Code::NoLeader, message));
    }
    match command {
        Command::Init { cluster, rules } => rules::init(change, cluster, rules),
        Command::ApplyRules { rules, text, expect, author } => {
            rules::apply_rules(change, rules, text, *expect, author)
        }

        Command::Revoke { revoked, whose, ends_s, author } => {
            certificates::revoke(change, revoked, whose.as_ref(), *ends_s, author)
        }

        Command::Publish { events, author } => topic::publish(change, events, author),
        Command::SetTopic { event_type, max_age_ms, max_bytes, author } => {
            topic::set(change, event_type, *max_age_ms, *max_bytes, author)
        }
        Command::Trim { event_type, to, author } => topic::trim(change, event_type, *to, author.as_ref()),
        Command::RemoveTopic { event_type, author } => topic::remove(change, event_type, author),
        Command::CreateGroup { group, topics, starts, author } => {
            group::create(change, group, topics, starts, author)
        }
        Command::ResetGroup { group, resets, starts, author } => {
            group::reset(change, group, *resets, starts, author)
        }
        Command::RemoveGroup { group, author } => group::remove(change, group, author),
        Command::HandOut { group, member, pull, max, ack_wait_ms } => {
            group::hand_out(change, group, member, *pull, *max, *ack_wait_ms)
        }
        Command::Observe { msg_id, observed } => event::observed(change, msg_id, observed),
        Command::Say { group, member, about, word } => group::say(change, group, member, about, word),

        Command::Register { registration, instance, started_ms, author } => {
            registry::register(change, registration, instance, *started_ms, author)
        }
        Command::Remove { agent_id, instance, author } => {
            registry::remove(change, agent_id, instance.as_ref(), author)
        }
        Command::RemoveOffline { agent_id, instance, liveness_seq } => {
            registry::remove_offline(change, agent_id, instance, *liveness_seq)
        }
        Command::Drain { agent_id, drain_seq, author } => {
            registry::drain(change, agent_id, *drain_seq, author)
        }
        Command::Resume { agent_id, drain_seq, author } => {
            registry::resume(change, agent_id, *drain_seq, author)
        }
        Command::PauseExpiry { pause } => registry::pause_expiry(change, pause),
        Command::ExpireNow { since_ms, author } => registry::expire_now(change, *since_ms, author),
        Command::SetLiveness { agent_id, instance, liveness_seq, state, reason } => {
            registry::set_liveness(change, agent_id, instance, *liveness_seq, *state, *reason)
        }

        Command::Submit(submit) => message::submit(change, submit),
        Command::Assign { msg_id, attempt, holder, warnings } => {
            message::assign(change, msg_id, *attempt, holder, warnings)
        }
        Command::Dispatched { msg_id, attempt, holder } => {
            message::dispatched(change, msg_id, *attempt, holder)
        }
        Command::Received { msg_id, attempt, holder } => message::received(change, msg_id, *attempt, holder),
        Command::Complete { msg_id, attempt, holder, excerpt, result, cost } => {
            message::complete(change, msg_id, *attempt, holder, excerpt, result, *cost)
        }
        Command::Fail { msg_id, attempt, holder, reason, message } => {
            message::fail(change, msg_id, *attempt, holder, *reason, message)
        }
        Command::Release { msg_id, attempt, holder } => message::release(change, msg_id, *attempt, holder),
        Command::Return { msg_id, attempt, holder, reason } => {
            message::return_attempt(change, msg_id, *attempt, holder, *reason)
        }
        Command::Retake { msg_id, attempt, holder, to, warnings } => {
            retry::retake(change, msg_id, *attempt, holder, to.as_ref(), warnings)
        }
        Command::TimeOut { msg_id } => retry::time_out(change, msg_id),
        Command::GiveUp { msg_id, error } => message::give_up(change, msg_id, error),
        Command::FreeSlot { agent_id, msg_id, attempt } => {
            message::free_slot(change, agent_id, msg_id, *attempt)
        }
    }
}

/// The message a command is about.
fn msg_id(command: &Command) -> Option<&MsgId> {
    match command {
        Command::Submit(submit) => Some(&submit.msg_id),
        Command::Assign { msg_id, .. }
        | Command::Dispatched { msg_id, .. }
        | Command::Received { msg_id, .. }
        | Command::Complete { msg_id, .. }
        | Command::Fail { msg_id, .. }
        | Command::Release { msg_id, .. }
        | Command::Return { msg_id, .. }
        | Command::Retake { msg_id, .. }
        | Command::TimeOut { msg_id }
        | Command::GiveUp { msg_id, .. }
        | Command::FreeSlot { msg_id, .. } => Some(msg_id),
        Command::Init { .. }
        | Command::ApplyRules { .. }
        | Command::Revoke { .. }
        | Command::Register { .. }
        | Command::Remove { .. }
        | Command::RemoveOffline { .. }
        | Command::Drain { .. }
        | Command::Resume { .. }
        | Command::PauseExpiry { .. }
        | Command::ExpireNow { .. }
        | Command::Publish { .. }
        | Command::SetTopic { .. }
        | Command::Trim { .. }
        | Command::RemoveTopic { .. }
        | Command::CreateGroup { .. }
        | Command::ResetGroup { .. }
        | Command::RemoveGroup { .. }
        | Command::HandOut { .. }
        | Command::Observe { .. }
        | Command::Say { .. }
        | Command::SetLiveness { .. } => None,
    }
}
