//! What enters: a request becomes a checked command, the command finds the leader, and whoever asked
//! gets the answer or a clear error before their deadline.

use std::{sync::Arc, time::Duration};

use reach_protocol::{
    AgentId, Code, Command, Decision, Envelope, ErrorReply, InstanceId, Json, MsgId, Principal, Registration,
    Reply, Rules, TraceId,
    codec::Encoded,
    command::Submit,
    envelope::{EXPIRES_IN_MAX_MS, Source},
    frame::{Answer, MessageView},
    message::{Holder, MessageRecord, PendingReason, Warning},
};
use tokio::time::Instant;

use super::{Shared, leader};
use crate::clock::calendar_ms;

/// Before a command is proposed again to a leader that was not one.
const PROPOSE_AGAIN_AFTER: Duration = Duration::from_millis(25);
/// The least time in which an accepted message may expire: what has already passed is refused.
const ALREADY_EXPIRED: &str = "the deadline has already passed by the clock that made it";

impl Shared {
    /// Proposes one command, here or at the leader, again and again until the deadline: every
    /// command is safe to propose twice.
    pub async fn propose(&self, command: Command, deadline: Instant) -> Result<Reply, ErrorReply> {
        if !matches!(command, Command::Init { .. }) {
            self.must_be_initialised()?;
        }
        let mut maybe_done = false;
        let mut leadership = self.replica.leadership();
        loop {
            let now = *leadership.borrow_and_update();
            let attempt = async {
                match now.leader {
                    _ if now.leading => self.leader.propose(vec![command.clone()]).await,
                    Some(leader) if leader != self.node_id => {
                        self.peers.propose(leader, vec![command.clone()]).await
                    }
                    _ => Err(leader::no_leader()),
                }
            };
            match tokio::time::timeout_at(deadline, attempt).await {
                Ok(Ok(replies)) => match replies.into_iter().next() {
                    Some(Reply::Refused(error)) => return Err(*error),
                    Some(Reply::Void) => {}
                    Some(reply) => return Ok(reply),
                    None => return Err(ErrorReply::new(Code::Internal, "the leader gave no reply")),
                },
                Ok(Err(error)) => match error.code {
                    Code::NoLeader => {}
                    Code::OutcomeUnknown => maybe_done = true,
                    _ => return Err(error),
                },
                // It was under way when the time ran out.
                Err(_) => return Err(out_of_time(true)),
            }
            if Instant::now() >= deadline {
                return Err(out_of_time(maybe_done));
            }
            let pause = deadline.min(Instant::now() + PROPOSE_AGAIN_AFTER);
            let _ = tokio::time::timeout_at(pause, leadership.changed()).await;
        }
    }

    fn must_be_initialised(&self) -> Result<(), ErrorReply> {
        if self.replica.members().is_empty() {
            let message = "this cluster is not initialised yet: run `agent-reach cluster init`, once";
            return Err(ErrorReply::new(Code::NoLeader, message).with_retry_after_ms(1_000));
        }
        Ok(())
    }

    /// After this, the tables here hold everything that was acknowledged anywhere before the call.
    pub async fn read_barrier(&self, deadline: Instant) -> Result<(), ErrorReply> {
        self.must_be_initialised()?;
        let mut leadership = self.replica.leadership();
        loop {
            leadership.mark_unchanged();
            match tokio::time::timeout_at(deadline, self.barrier.index()).await {
                Ok(Ok(index)) => {
                    let mut applied = self.replica.applied();
                    let reached = applied.wait_for(|applied| applied.index >= index);
                    return match tokio::time::timeout_at(deadline, reached).await {
                        Ok(Ok(_)) => Ok(()),
                        _ => Err(ErrorReply::new(Code::NoLeader, "this node is too far behind the leader")
                            .with_retry_after_ms(500)),
                    };
                }
                Ok(Err(_)) if Instant::now() < deadline => {}
                _ => return Err(out_of_time(false)),
            }
            let pause = deadline.min(Instant::now() + PROPOSE_AGAIN_AFTER);
            let _ = tokio::time::timeout_at(pause, leadership.changed()).await;
        }
    }

    /// Takes a message in. With `wait_until` the answer waits for the message's end that long.
    pub async fn submit(
        self: &Arc<Self>,
        principal: &Principal,
        envelope: Envelope,
        sent_at_ms: Option<u64>,
        deadline: Instant,
        wait_until: Option<Instant>,
    ) -> Result<Answer, ErrorReply> {
        let submit = self.check(principal, envelope, sent_at_ms)?;
        let msg_id = submit.msg_id.clone();
        self.must_have_space()?;
        let known = self.known(&submit)?;
        let ended = wait_until.map(|_| self.waiters.wait(&msg_id));
        let accepted = match known {
            Some(record) => Ok(Reply::Message(record)),
            None => self.propose(Command::Submit(Box::new(submit)), deadline).await,
        };
        let answer = match accepted {
            Ok(Reply::Message(record)) => match (wait_until, ended) {
                (Some(until), Some(ended)) if !record.state.is_final() => {
                    self.wait_for_end(record, ended, until).await
                }
                _ => self.view(record, false).map(super::message_answer),
            },
            Ok(_) => Err(ErrorReply::new(Code::Internal, "a submission was answered with something else")),
            // What was refused does not exist; what is unknown may.
            Err(error) => match error.code {
                Code::OutcomeUnknown | Code::MsgIdConflict => Err(error.with_msg_id(&msg_id)),
                _ => Err(ErrorReply { msg_id: None, ..error }),
            },
        };
        self.waiters.forget(&msg_id);
        answer
    }

    /// A repeat of what this node already knows needs no entry; a conflict is told at once.
    fn known(&self, submit: &Submit) -> Result<Option<Arc<MessageRecord>>, ErrorReply> {
        let known = self.replica.tables().message(&submit.msg_id).map_err(|error| self.damaged(&error))?;
        match known {
            Some(record) if record.content_hash == submit.content_hash && record.source == submit.source => {
                Ok(Some(record))
            }
            Some(_) => Err(ErrorReply::new(
                Code::MsgIdConflict,
                "this msg_id is taken by a message with other content",
            )
            .with_msg_id(&submit.msg_id)),
            None => Ok(None),
        }
    }

    fn check(
        &self,
        principal: &Principal,
        mut envelope: Envelope,
        sent_at_ms: Option<u64>,
    ) -> Result<Submit, ErrorReply> {
        let rules = self.rules();
        envelope.validate(&rules.rules.limits)?;
        let source = match &envelope.source {
            Some(source) => source.agent_id.clone(),
            None => principal.own_agent_id(),
        };
        if !principal.acts_for(&source) {
            let message = format!(
                "{principal} may not send as {source}: leave source out, or use that agent's certificate"
            );
            return Err(ErrorReply {
                field: Some("source.agent_id".into()),
                ..ErrorReply::new(Code::Forbidden, message)
            });
        }
        let (expires_in_ms, warning) = time_left(&envelope, sent_at_ms, &rules.rules)?;
        let target = envelope.target()?;
        // Before ids are filled in: a repeat hashes what its caller wrote.
        let content_hash = envelope.content_hash();
        let msg_id = envelope.msg_id.get_or_insert_with(|| made("m_", MsgId::parse)).clone();
        let trace_id = envelope.trace_id.get_or_insert_with(|| made("t_", TraceId::parse)).clone();
        envelope.source.get_or_insert_with(|| Source { agent_id: source.clone(), session_id: None });
        let shape = envelope.payload.as_ref().map(Json::shape).unwrap_or_default();
        let warnings = warning.into_iter().collect();
        let decision = Decision::Wait { reason: PendingReason::DecisionStale, warnings };
        let author = principal.clone();
        Ok(Submit {
            msg_id,
            trace_id,
            envelope: Encoded::new(&envelope),
            parent: envelope.parent_msg_id,
            flow_seq: envelope.flow_seq,
            source,
            target,
            content_hash,
            shape,
            expires_in_ms,
            author,
            decision,
        })
    }

    /// Waits until the message ends, or as long as the caller wanted; then says how it stands.
    pub async fn wait_for_end(
        &self,
        record: Arc<MessageRecord>,
        ended: tokio::sync::oneshot::Receiver<Arc<MessageRecord>>,
        until: Instant,
    ) -> Result<Answer, ErrorReply> {
        // It may have ended before the wait was registered.
        let now = self.replica.tables().message(&record.msg_id).map_err(|error| self.damaged(&error))?;
        let record = match now {
            Some(now) if now.state.is_final() => now,
            _ => match tokio::time::timeout_at(until, ended).await {
                Ok(Ok(ended)) => ended,
                _ => self.message_now(&record.msg_id)?.unwrap_or(record),
            },
        };
        self.view(record, false).map(super::message_answer)
    }

    fn message_now(&self, msg_id: &MsgId) -> Result<Option<Arc<MessageRecord>>, ErrorReply> {
        self.replica.tables().message(msg_id).map_err(|error| self.damaged(&error))
    }

    pub async fn register(
        &self,
        principal: &Principal,
        registration: Registration,
        instance: InstanceId,
        uptime_ms: u64,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        let rules = self.rules();
        registration.validate(&rules.rules.limits)?;
        // No machine's calendar takes part: cluster time now, minus how long the run has lasted.
        let started_ms = self.clock.cluster_ms().saturating_sub(uptime_ms);
        let author = principal.clone();
        let command =
            Command::Register { registration: Box::new(registration), instance, started_ms, author };
        match self.propose(command, deadline).await? {
            Reply::Agent(record) => {
                let liveness = &rules.rules.liveness;
                let ttl_ms = record.registration.ttl_ms(liveness.ttl_ms);
                // Who may be silent for longer need not beat as often.
                let heartbeat_ms = liveness.heartbeat_ms.max(match record.registration.ttl_ms {
                    Some(_) => ttl_ms / 3,
                    None => 0,
                });
                Ok(Answer::Registered { instance: record.instance, heartbeat_ms, ttl_ms })
            }
            _ => Err(ErrorReply::new(Code::Internal, "a registration was answered with something else")),
        }
    }

    pub async fn complete(
        &self,
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
        outcome: (String, Json, Option<reach_protocol::Money>),
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        let (excerpt, result, cost) = outcome;
        self.must_fit(&msg_id, &excerpt, &result)?;
        self.report_on(Command::Complete { msg_id, attempt, holder, excerpt, result, cost }, deadline).await
    }

    pub fn must_fit(&self, msg_id: &MsgId, excerpt: &str, result: &Json) -> Result<(), ErrorReply> {
        let limits = self.limits();
        for (field, size, limit) in [
            ("result", result.as_str().len(), limits.result_bytes),
            ("excerpt", excerpt.len(), limits.excerpt_bytes),
        ] {
            if size > limit {
                return Err(ErrorReply::too_large(field, size, limit).with_msg_id(msg_id));
            }
        }
        Ok(())
    }

    /// An agent's word on an attempt; what it gets back is that it was taken.
    pub async fn report_on(&self, command: Command, deadline: Instant) -> Result<Answer, ErrorReply> {
        let ended = match &command {
            Command::Complete { msg_id, attempt, holder, .. }
            | Command::Fail { msg_id, attempt, holder, .. } => {
                Some((msg_id.clone(), *attempt, holder.clone()))
            }
            _ => None,
        };
        let done = self.propose(command, deadline).await;
        if let (Err(error), Some((msg_id, attempt, holder))) = (&done, ended) {
            self.release_stale(error, msg_id, attempt, holder, deadline).await;
        }
        done.map(|_| Answer::Done)
    }

    /// An agent that was told that its attempt is over is done with it: the slot that the attempt may still
    /// hold is free. If this gets lost, the slot's own time frees it.
    pub async fn release_stale(
        &self,
        told: &ErrorReply,
        msg_id: MsgId,
        attempt: u32,
        holder: Holder,
        deadline: Instant,
    ) {
        if told.code == Code::StaleAttempt {
            let _ = self.propose(Command::Release { msg_id, attempt, holder }, deadline).await;
        }
    }

    /// New work needs space; what is running goes on without.
    pub fn must_have_space(&self) -> Result<(), ErrorReply> {
        if self.space_is_low() {
            let message = format!("the disk of {} is nearly full: free some space on it", self.node_id);
            return Err(ErrorReply::new(Code::DiskFull, message).with_retry_after_ms(5_000));
        }
        Ok(())
    }

    /// What can't be asked is not known to be low.
    pub fn space_is_low(&self) -> bool {
        self.space.is_low().unwrap_or(false)
    }

    /// Only the current run of an agent gets tasks.
    pub fn must_be_current(&self, agent_id: &AgentId, instance: &InstanceId) -> Result<(), ErrorReply> {
        let current = self.replica.tables().live().agents.get(agent_id).map(|record| record.instance.clone());
        match current {
            Some(current) if current == *instance => Ok(()),
            Some(_) => Err(ErrorReply::new(
                Code::StaleInstance,
                "a later run of this agent took its place: stop this run",
            )),
            None => {
                let message = format!("{agent_id} is not registered: register it first");
                Err(ErrorReply::new(Code::NotFound, message))
            }
        }
    }

    /// A table that can't be read is never answered from; the process ends with the disk's own code.
    pub fn damaged(&self, error: &std::io::Error) -> ErrorReply {
        crate::exit::now(&crate::exit::Exit::disk(std::io::Error::new(error.kind(), error.to_string())))
    }

    pub fn view(&self, record: Arc<MessageRecord>, with_hops: bool) -> Result<MessageView, ErrorReply> {
        let tables = self.replica.tables();
        let result = match record.state.is_final() {
            true => tables.result(&record.msg_id).map_err(|error| self.damaged(&error))?,
            false => None,
        };
        let hops = match with_hops {
            true => {
                let all = tables.hops(&record.trace_id, HOPS_MAX).map_err(|error| self.damaged(&error))?;
                all.into_iter().filter(|hop| hop.msg_id == record.msg_id).collect()
            }
            false => Vec::new(),
        };
        let dead_letter = match with_hops && record.state.is_final() {
            true => tables.dead_letter(&record.msg_id).map_err(|error| self.damaged(&error))?,
            false => None,
        };
        let response = reach_protocol::envelope::Response::of(&record, result);
        Ok(MessageView { record, response, hops, dead_letter })
    }
}

/// Hops read for one answer.
pub const HOPS_MAX: usize = 10_000;

fn out_of_time(maybe_done: bool) -> ErrorReply {
    if maybe_done {
        ErrorReply::new(
            Code::OutcomeUnknown,
            "no majority of the nodes confirmed it in time: it may still happen. Ask again with the same id",
        )
    } else {
        ErrorReply::new(
            Code::NoLeader,
            "no node leads: fewer than a majority may be running or reachable. See `agent-reach cluster status`",
        )
        .with_retry_after_ms(500)
    }
}

/// A new id.
pub fn made<T>(prefix: &str, parse: impl Fn(&str) -> Result<T, reach_protocol::id::BadId>) -> T {
    parse(&format!("{prefix}{}", ulid::Ulid::generate())).expect("a ULID is legal in an id")
}

/// The time a message has, in milliseconds. A sender that does not tell its clock is read by this
/// node's calendar, and warned.
fn time_left(
    envelope: &Envelope,
    sent_at_ms: Option<u64>,
    rules: &Rules,
) -> Result<(u64, Option<Warning>), ErrorReply> {
    match (envelope.expires_in_ms, &envelope.expire_at) {
        (Some(ms), _) => Ok((ms, None)),
        (None, Some(expire_at)) => {
            let warning = sent_at_ms.is_none().then_some(Warning::ClockUnknown);
            Ok((remaining_ms(expire_at, sent_at_ms.unwrap_or_else(calendar_ms))?, warning))
        }
        (None, None) => Ok((rules.delivery.expires_in_ms, None)),
    }
}

/// Time left by the clock that made both times: only their difference counts.
fn remaining_ms(expire_at: &str, sent_at_ms: u64) -> Result<u64, ErrorReply> {
    let bad = |message: &str| ErrorReply::invalid("expire_at", message);
    let at: jiff::Timestamp = expire_at
        .parse()
        .map_err(|_| bad("expire_at must be an RFC 3339 time, such as 2026-12-01T12:00:00Z"))?;
    let remaining = at.as_millisecond().saturating_sub(sent_at_ms as i64);
    match u64::try_from(remaining) {
        Ok(0) | Err(_) => Err(bad(ALREADY_EXPIRED)),
        Ok(ms) if ms > EXPIRES_IN_MAX_MS => Err(bad("expire_at may be at most 30 days away")),
        Ok(ms) => Ok(ms),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(json: &str, sent_at_ms: Option<u64>) -> Result<(u64, Option<Warning>), ErrorReply> {
        time_left(&Envelope::from_json(json)?, sent_at_ms, &Rules::default())
    }

    #[test]
    fn a_deadline_is_read_by_the_clock_that_made_it() {
        let by_the_senders_clock = r#"{"expire_at":"1970-01-01T00:01:00Z"}"#;
        assert_eq!(left(by_the_senders_clock, Some(50_000)), Ok((10_000, None)));
        assert_eq!(left(by_the_senders_clock, Some(60_000)).unwrap_err().field.as_deref(), Some("expire_at"));
        assert_eq!(left(r#"{"expire_at":"tomorrow"}"#, Some(0)).unwrap_err().code, Code::Invalid);
        assert_eq!(left(r#"{"expires_in_ms":7}"#, None), Ok((7, None)));
        assert_eq!(left("{}", None), Ok((15 * 60 * 1000, None)));

        let soon = calendar_ms() + 60_000;
        let at = jiff::Timestamp::from_millisecond(soon as i64).unwrap();
        let (ms, warning) = left(&format!(r#"{{"expire_at":"{at}"}}"#), None).unwrap();
        assert!((1..=60_000).contains(&ms), "{ms}");
        assert_eq!(warning, Some(Warning::ClockUnknown));
    }
}
