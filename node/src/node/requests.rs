//! What may be asked of a node, whichever door it came through: one match from requests to the work,
//! with the identity's right to ask it.

use std::{ops::Bound, sync::Arc, time::Duration};

use reach_protocol::{
    AgentId, AgentState, Code, Command, ErrorReply, InstanceId, Name, Principal, Reply, Revoked, Rules,
    StateReason,
    agent::AgentRecord,
    command::ExpiryPause,
    frame::{Answer, Request},
    message::Holder,
};
use tokio::time::Instant;

use super::{Shared, read::AgentFilter};

/// The longest a caller may wait for a message's end in one request.
pub const WAIT_MAX: Duration = Duration::from_secs(300);
/// The user that may initialise a new cluster and is its first operator.
pub const FIRST_OPERATOR: &str = "admin";

impl Shared {
    /// Answers within `deadline`, besides the time a request asks to wait for a message's end. A
    /// `stale` read is answered from what this node knows.
    pub async fn answer(
        self: &Arc<Self>,
        principal: &Principal,
        request: Request,
        stale: bool,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        let shared = self;
        match request {
            Request::Register { registration, instance, uptime_ms } => {
                acts_for(principal, &registration.agent_id)?;
                shared.register(principal, *registration, instance, uptime_ms, deadline).await
            }
            Request::Attach { .. } => {
                Err(ErrorReply::new(Code::Internal, "an attach is answered by its session"))
            }
            Request::Drain { agent_id, instance } => {
                acts_for(principal, &agent_id)?;
                self.set_liveness(&agent_id, instance, AgentState::Draining, deadline).await
            }
            Request::Detach { agent_id, instance } => {
                acts_for(principal, &agent_id)?;
                shared.delivery.detach(agent_id.clone(), instance.clone()).await;
                self.set_liveness(&agent_id, instance, AgentState::Offline, deadline).await
            }
            Request::Remove { agent_id, instance } => {
                self.read_barrier(deadline).await?;
                let current = || self.registered(&agent_id).map(|record| record.instance.clone());
                let instance = instance.or_else(current);
                let author = principal.clone();
                let command = Command::Remove { agent_id: agent_id.clone(), instance, author };
                shared.propose(command, deadline).await?;
                tracing::info!(%agent_id, by = %principal, "agent removed");
                Ok(Answer::Done)
            }
            Request::DrainAgent { agent_id, drain_seq } => {
                self.set_drain(principal, agent_id, drain_seq, true, deadline).await
            }
            Request::ResumeAgent { agent_id, drain_seq } => {
                self.set_drain(principal, agent_id, drain_seq, false, deadline).await
            }
            Request::ExpireNow { since_ms } => self.expire_now(principal, since_ms, deadline).await,
            Request::Problems => Ok(shared.read_problems(stale, deadline).await),
            Request::Received { agent_id, instance, msg_id, attempt } => {
                let holder = holder(principal, agent_id, instance)?;
                shared.report_on(Command::Received { msg_id, attempt, holder }, deadline).await
            }
            Request::Complete { agent_id, instance, msg_id, attempt, excerpt, result, cost } => {
                let holder = holder(principal, agent_id, instance)?;
                shared.complete(msg_id, attempt, holder, (excerpt, result, cost), deadline).await
            }
            Request::Fail { agent_id, instance, msg_id, attempt, reason, message } => {
                let holder = holder(principal, agent_id, instance)?;
                shared.report_on(Command::Fail { msg_id, attempt, holder, reason, message }, deadline).await
            }
            Request::Release { agent_id, instance, msg_id, attempt } => {
                let holder = holder(principal, agent_id, instance)?;
                shared.report_on(Command::Release { msg_id, attempt, holder }, deadline).await
            }
            Request::Submit { envelope, sent_at_ms, wait_ms } => {
                shared.submit(principal, *envelope, sent_at_ms, deadline, until(wait_ms)).await
            }
            Request::Message { msg_id, wait_ms } => {
                self.fresh(stale, deadline).await?;
                shared.read_message(principal, msg_id, until(wait_ms)).await
            }
            Request::Payload { msg_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_payload(principal, &msg_id)
            }
            Request::Result { msg_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_result(principal, &msg_id)
            }
            Request::Trace { trace_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_trace(principal, &trace_id)
            }
            Request::Messages { limit, after } => {
                self.fresh(stale, deadline).await?;
                shared.list_messages(principal, limit, after.as_ref())
            }
            Request::Agents { state, capability, metadata, limit, after } => {
                self.fresh(stale, deadline).await?;
                Ok(shared.list_agents(&AgentFilter { state, capability, metadata }, limit, after.as_ref()))
            }
            Request::Agent { agent_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_agent(&agent_id)
            }
            // The one read that must work when nothing else does.
            Request::Cluster => Ok(shared.read_cluster().await),
            Request::Initialise => self.initialise(principal, deadline).await,
            Request::Rules => {
                self.fresh(stale, deadline).await?;
                Ok(Answer::Rules(Box::new((*shared.rules()).clone())))
            }
            Request::ApplyRules { text, expect } => {
                let rules = reach_config::rules::parse(&text)
                    .map_err(|error| ErrorReply::new(Code::Invalid, error.to_string()))?;
                let command =
                    Command::ApplyRules { rules: Box::new(rules), text, expect, author: principal.clone() };
                match shared.propose(command, deadline).await? {
                    reach_protocol::Reply::Rules(record) => Ok(Answer::Rules(record)),
                    _ => Ok(Answer::Rules(Box::new((*shared.rules()).clone()))),
                }
            }
            Request::Revoke { revoked, whose, ends_s } => {
                let command = Command::Revoke { revoked, whose, ends_s, author: principal.clone() };
                match shared.propose(command, deadline).await? {
                    reach_protocol::Reply::Revoked(revocation) => Ok(Answer::Revoked(revocation)),
                    _ => {
                        Err(ErrorReply::new(Code::Internal, "a revocation was answered with something else"))
                    }
                }
            }
            Request::Revocations { limit, after } => {
                self.fresh(stale, deadline).await?;
                shared.list_revocations(principal, limit, after.as_ref())
            }
            Request::Publish { events } => self.publish(principal, events, deadline).await,
            Request::Events { event_type, from, limit, wait_ms } => {
                self.fresh(stale, deadline).await?;
                self.read_events(&event_type, from, limit, until(wait_ms)).await
            }
            Request::Topics { limit, after } => {
                self.fresh(stale, deadline).await?;
                Ok(self.list_topics(limit, after.as_ref()))
            }
            Request::Topic { event_type } => {
                self.fresh(stale, deadline).await?;
                self.read_topic(&event_type)
            }
            Request::SetTopic { event_type, max_age_ms, max_bytes } => {
                let author = principal.clone();
                let command = Command::SetTopic { event_type, max_age_ms, max_bytes, author };
                match self.propose(command, deadline).await? {
                    Reply::Topic(topic) => Ok(Answer::Topic(topic)),
                    _ => Err(ErrorReply::new(Code::Internal, "a topic was answered with something else")),
                }
            }
            Request::Trim { event_type, to } => self.trim(principal, event_type, to, deadline).await,
            Request::RemoveTopic { event_type } => {
                let command = Command::RemoveTopic { event_type, author: principal.clone() };
                self.propose(command, deadline).await.map(|_| Answer::Done)
            }
            Request::Groups { limit, after } => {
                self.fresh(stale, deadline).await?;
                self.list_groups(limit, after.as_ref())
            }
            Request::Group { group } => {
                self.fresh(stale, deadline).await?;
                self.read_group(&group)
            }
            Request::CreateGroup { group, topics, from } => {
                self.create_group(principal, group, topics, from, deadline).await
            }
            Request::ResetGroup { group, from } => self.reset_group(principal, group, from, deadline).await,
            Request::RemoveGroup { group } => self.remove_group(principal, group, deadline).await,
            Request::Pull { group, member, pull, max, wait_ms } => {
                self.pull(principal, (group, member, pull), max, until(wait_ms), deadline).await
            }
            Request::Say { group, member, about, word } => {
                self.say(principal, Command::Say { group, member, about, word }, deadline).await
            }
        }
    }

    fn list_revocations(
        &self,
        principal: &Principal,
        limit: u32,
        after: Option<&Revoked>,
    ) -> Result<Answer, ErrorReply> {
        if !matches!(principal, Principal::User(_) | Principal::Loopback) {
            return Err(ErrorReply::new(
                Code::Forbidden,
                "lists of certificates are for users, not for agents",
            ));
        }
        let limit = super::read::page(limit);
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let live = self.replica.tables().live();
        let mut items: Vec<_> = live
            .revocations
            .range::<Revoked, _>((from, Bound::Unbounded))
            .map(|(_, revocation)| (**revocation).clone())
            .take(limit + 1)
            .collect();
        drop(live);
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| last.revoked.clone());
        Ok(Answer::Revocations { items, next })
    }

    async fn fresh(&self, stale: bool, deadline: Instant) -> Result<(), ErrorReply> {
        if stale { Ok(()) } else { self.read_barrier(deadline).await }
    }

    /// The first entry of a new cluster: its members, its first rules and its first operator.
    async fn initialise(&self, principal: &Principal, deadline: Instant) -> Result<Answer, ErrorReply> {
        let shared = self;
        let operator = Name::parse(FIRST_OPERATOR).expect("a legal name");
        if *principal != Principal::User(operator.clone()) {
            let message = format!(
                "only user/{FIRST_OPERATOR} may initialise a cluster: use the context in its admin folder"
            );
            return Err(ErrorReply::new(Code::Forbidden, message));
        }
        if shared.rules().revision > 0 {
            return Err(ErrorReply::new(Code::IllegalTransition, "this cluster is initialised already"));
        }
        if shared.replica.members().is_empty() {
            let members = shared.initial_members.clone();
            shared.replica.initialise(members).await.map_err(|error| {
                ErrorReply::new(Code::NoMajority, format!("the nodes could not be brought together: {error}"))
            })?;
        }
        let mut rules = Rules::default();
        rules.grants.operators.push(operator);
        let command = Command::Init { cluster: shared.cluster.clone(), rules: Box::new(rules) };
        shared.propose(command, deadline).await.map(|_| Answer::Done)
    }

    fn registered(&self, agent_id: &AgentId) -> Option<Arc<AgentRecord>> {
        self.replica.tables().live().agents.get(agent_id).cloned()
    }

    /// An operator's drain, or its end. One that is as it should be already is answered as it is.
    async fn set_drain(
        &self,
        principal: &Principal,
        agent_id: AgentId,
        drain_seq: Option<u64>,
        drains: bool,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        self.must_operate(principal)?;
        self.read_barrier(deadline).await?;
        let current = self.registered(&agent_id);
        let Some(record) = current else { return self.read_agent(&agent_id) };
        if record.drain.is_some() == drains {
            return self.read_agent(&agent_id);
        }
        let (drain_seq, author) = (drain_seq.unwrap_or(record.drain_seq), principal.clone());
        let command = match drains {
            true => Command::Drain { agent_id, drain_seq, author },
            false => Command::Resume { agent_id, drain_seq, author },
        };
        match self.propose(command, deadline).await? {
            Reply::Agent(record) => Ok(Answer::Agent(Box::new(self.view_of(*record)))),
            _ => Err(ErrorReply::new(Code::Internal, "a drain was answered with something else")),
        }
    }

    async fn expire_now(
        &self,
        principal: &Principal,
        since_ms: Option<u64>,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        self.must_operate(principal)?;
        self.read_barrier(deadline).await?;
        let is_meant = |pause: &ExpiryPause| since_ms.is_none_or(|since_ms| since_ms == pause.since_ms);
        let Some(pause) = self.expiry_waits().filter(is_meant) else { return Ok(Answer::Expired(None)) };
        let command = Command::ExpireNow { since_ms: pause.since_ms, author: principal.clone() };
        self.propose(command, deadline).await?;
        Ok(Answer::Expired(Some(pause)))
    }

    /// The mass expiry that waits now.
    pub fn expiry_waits(&self) -> Option<ExpiryPause> {
        let now_ms = self.clock.cluster_ms();
        let waits =
            |pause: &ExpiryPause| pause.forced_by.is_none() && now_ms < pause.since_ms + pause.wait_ms;
        self.rules().expiry.clone().filter(waits)
    }

    fn must_operate(&self, principal: &Principal) -> Result<(), ErrorReply> {
        if self.rules().rules.is_operator(principal) {
            return Ok(());
        }
        let message = format!("{principal} is no operator: the rules' [grants] operators does not name it");
        Err(ErrorReply::new(Code::Forbidden, message))
    }

    async fn set_liveness(
        &self,
        agent_id: &AgentId,
        instance: InstanceId,
        state: AgentState,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        // The heartbeats may change it in between: then the change is asked for again.
        loop {
            self.read_barrier(deadline).await?;
            let record = self.registered(agent_id);
            let Some(record) = record.filter(|record| record.instance == instance) else {
                return Err(ErrorReply::new(
                    Code::StaleInstance,
                    "a later run of this agent took its place: stop this run",
                ));
            };
            // Offline is further than draining. Whoever drained it, its own goodbye is one more reason.
            if (record.state, record.reason == StateReason::Asked) >= (state, true) {
                return Ok(Answer::Done);
            }
            let command = Command::SetLiveness {
                agent_id: agent_id.clone(),
                instance: instance.clone(),
                liveness_seq: record.liveness_seq,
                state,
                reason: StateReason::Asked,
            };
            self.propose(command, deadline).await?;
        }
    }
}

fn holder(principal: &Principal, agent_id: AgentId, instance: InstanceId) -> Result<Holder, ErrorReply> {
    acts_for(principal, &agent_id)?;
    Ok(Holder { agent_id, instance })
}

pub fn acts_for(principal: &Principal, agent_id: &AgentId) -> Result<(), ErrorReply> {
    if principal.acts_for(agent_id) {
        return Ok(());
    }
    let message = format!(
        "{principal} may not act as agent {agent_id}: use a certificate issued with `agent-reach certs issue --agent {agent_id}`"
    );
    Err(ErrorReply { field: Some("agent_id".into()), ..ErrorReply::new(Code::Forbidden, message) })
}

fn until(wait_ms: Option<u64>) -> Option<Instant> {
    wait_ms.map(|ms| Instant::now() + Duration::from_millis(ms).min(WAIT_MAX))
}
