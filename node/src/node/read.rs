//! Reads: linearizable unless the caller asked for `stale`, paged, and only what the identity may
//! see.

use std::{collections::BTreeMap, sync::Arc};

use reach_protocol::{
    AgentId, AgentState, Code, ErrorReply, MsgId, Principal, Stamp, Tag, TraceId,
    agent::AgentRecord,
    frame::{AgentView, Answer, ClusterView, NodeView},
    message::MessageRecord,
};
use tokio::time::Instant;

use super::{Shared, ingress::HOPS_MAX};
use crate::show;

/// Rows on one page of a list.
const PAGE_MAX: usize = 1_000;

/// Which agents a list shows.
#[derive(Debug, Default)]
pub struct AgentFilter {
    pub state: Option<AgentState>,
    pub capability: Option<Tag>,
    pub metadata: Option<(String, String)>,
}

impl AgentFilter {
    fn shows(&self, record: &AgentRecord) -> bool {
        let has_tag = |tag: &Tag| record.registration.tags().any(|own| own == tag);
        let has_metadata = |(key, value): &(String, String)| {
            record.registration.metadata.get(key).is_some_and(|own| {
                own.as_str() == value || own.decode::<String>().is_ok_and(|text| text == *value)
            })
        };
        self.state.is_none_or(|state| state == record.state)
            && self.capability.as_ref().is_none_or(has_tag)
            && self.metadata.as_ref().is_none_or(has_metadata)
    }
}

impl Shared {
    pub fn as_of(&self) -> Stamp {
        self.replica.applied().borrow().stamp
    }

    /// A message, with its end when there is one; waits for the end until `wait_until`.
    pub async fn read_message(
        &self,
        principal: &Principal,
        msg_id: MsgId,
        wait_until: Option<Instant>,
    ) -> Result<Answer, ErrorReply> {
        let ended = wait_until.map(|_| self.waiters.wait(&msg_id));
        let answer = match (self.visible(principal, &msg_id), wait_until, ended) {
            (Ok(record), Some(until), Some(ended)) if !record.state.is_final() => {
                self.wait_for_end(record, ended, until).await
            }
            (Ok(record), waited, _) => self.view(record, waited.is_none()).map(super::message_answer),
            (Err(error), ..) => Err(error),
        };
        self.waiters.forget(&msg_id);
        answer
    }

    pub fn read_payload(&self, principal: &Principal, msg_id: &MsgId) -> Result<Answer, ErrorReply> {
        self.visible(principal, msg_id)?;
        let envelope = self.replica.tables().envelope(msg_id).map_err(|error| self.damaged(&error))?;
        let envelope = envelope.map(|envelope| envelope.decode("envelope")).transpose();
        let envelope = envelope.map_err(|error| self.damaged(&std::io::Error::other(error)))?;
        envelope
            .and_then(|envelope| envelope.payload)
            .map(Answer::Body)
            .ok_or_else(|| not_found("payload for ", msg_id))
    }

    pub fn read_result(&self, principal: &Principal, msg_id: &MsgId) -> Result<Answer, ErrorReply> {
        self.visible(principal, msg_id)?;
        let result = self.replica.tables().result(msg_id).map_err(|error| self.damaged(&error))?;
        result.map(Answer::Body).ok_or_else(|| not_found("result for ", msg_id))
    }

    pub fn read_trace(&self, principal: &Principal, trace_id: &TraceId) -> Result<Answer, ErrorReply> {
        let tables = self.replica.tables();
        let hops = tables.hops(trace_id, HOPS_MAX).map_err(|error| self.damaged(&error))?;
        let mut messages: BTreeMap<MsgId, MessageRecord> = BTreeMap::new();
        for hop in &hops {
            if messages.contains_key(&hop.msg_id) {
                continue;
            }
            let record = tables.message(&hop.msg_id).map_err(|error| self.damaged(&error))?;
            if let Some(record) = record {
                messages.insert(hop.msg_id.clone(), (*record).clone());
            }
        }
        if messages.is_empty() {
            return Err(ErrorReply::new(Code::NotFound, format!("no trace {trace_id}")));
        }
        if !messages.values().any(|record| self.may_see(principal, record)) {
            return Err(ErrorReply::new(
                Code::Forbidden,
                format!("{principal} takes no part in trace {trace_id}"),
            ));
        }
        let mut messages: Vec<_> = messages.into_values().collect();
        messages.sort_by(|a, b| (a.flow_seq, &a.msg_id).cmp(&(b.flow_seq, &b.msg_id)));
        Ok(Answer::Trace { hops, messages, as_of: self.as_of() })
    }

    pub fn list_messages(
        &self,
        principal: &Principal,
        limit: u32,
        after: Option<&MsgId>,
    ) -> Result<Answer, ErrorReply> {
        if !matches!(principal, Principal::User(_) | Principal::Loopback) {
            return Err(ErrorReply::new(Code::Forbidden, "lists of messages are for users, not for agents"));
        }
        let limit = page(limit);
        let mut items =
            self.replica.tables().messages(after, limit + 1).map_err(|error| self.damaged(&error))?;
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| last.msg_id.clone());
        let items = items.into_iter().map(|record| (*record).clone()).collect();
        Ok(Answer::Messages { items, next, as_of: self.as_of() })
    }

    pub fn list_agents(&self, filter: &AgentFilter, limit: u32, after: Option<&AgentId>) -> Answer {
        let limit = page(limit);
        let now_ms = self.clock.mono_ms();
        let live = self.replica.tables().live();
        let ttl_ms = live.rules.rules.liveness.ttl_ms;
        let from = after.map_or(std::ops::Bound::Unbounded, std::ops::Bound::Excluded);
        let mut items: Vec<AgentView> = live
            .agents
            .range::<AgentId, _>((from, std::ops::Bound::Unbounded))
            .map(|(_, record)| record)
            .filter(|record| filter.shows(record))
            .take(limit + 1)
            .map(|record| self.agent_view(record, live.slots_taken(record.agent_id()), ttl_ms, now_ms))
            .collect();
        drop(live);
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|last| last.record.agent_id().clone());
        Answer::Agents { items, next, as_of: self.as_of() }
    }

    pub fn read_agent(&self, agent_id: &AgentId) -> Result<Answer, ErrorReply> {
        let now_ms = self.clock.mono_ms();
        let live = self.replica.tables().live();
        let record = live.agents.get(agent_id).cloned();
        let (running, ttl_ms) = (live.slots_taken(agent_id), live.rules.rules.liveness.ttl_ms);
        drop(live);
        match record {
            Some(record) => Ok(Answer::Agent(Box::new(self.agent_view(&record, running, ttl_ms, now_ms)))),
            None => Err(self.no_agent(agent_id)),
        }
    }

    /// With who took it out of the registry, where somebody did.
    fn no_agent(&self, agent_id: &AgentId) -> ErrorReply {
        let gone = match self.replica.tables().tombstone(agent_id) {
            Ok(gone) => gone,
            Err(error) => return self.damaged(&error),
        };
        let removed = gone.map(|gone| match (gone.by, show::time(gone.removed.wall_ms)) {
            (Some(by), at) => format!("; {by} removed it at {at}"),
            (None, at) => format!("; offline for too long, it was removed at {at}"),
        });
        let removed = removed.unwrap_or_default();
        let message = format!(
            "no agent {agent_id} is registered{removed}: `agent-reach agents ls` lists those that are"
        );
        ErrorReply::new(Code::NotFound, message)
    }

    fn agent_view(
        &self,
        record: &Arc<AgentRecord>,
        running: u32,
        rule_ttl_ms: u64,
        now_ms: u64,
    ) -> AgentView {
        let heard = self.heartbeats.heard(record.agent_id(), now_ms);
        let last_act = self.heartbeats.last_act(record.agent_id());
        let ttl_ms = record.registration.ttl_ms(rule_ttl_ms);
        let offset_ms = self.heartbeats.offset_of(record.agent_id());
        AgentView { record: (**record).clone(), running, heard, ttl_ms, last_act, offset_ms }
    }

    /// An agent as a command's reply has it, which may be ahead of the tables here.
    pub fn view_of(&self, record: AgentRecord) -> AgentView {
        let (running, ttl_ms) = {
            let live = self.replica.tables().live();
            (live.slots_taken(record.agent_id()), live.rules.rules.liveness.ttl_ms)
        };
        self.agent_view(&Arc::new(record), running, ttl_ms, self.clock.mono_ms())
    }

    /// The cluster as this node sees it, each node's own figures asked for now.
    pub async fn read_cluster(&self) -> Answer {
        let members = self.members();
        let reports = members.keys().map(|node_id| async {
            match *node_id == self.node_id {
                true => Some(self.full_report().await),
                false => self.peers.report(*node_id).await,
            }
        });
        let reports = futures_util::future::join_all(reports).await;
        // After the reports: a node that does not answer takes its time, and the leader may have changed.
        let leadership = *self.replica.leadership().borrow();
        let nodes = members
            .iter()
            .zip(reports)
            .map(|((node_id, member), report)| NodeView {
                node_id: *node_id,
                client_addr: member.client_addr.clone(),
                peer_addr: member.peer_addr.clone(),
                report,
            })
            .collect();
        let live = self.replica.tables().live();
        Answer::Cluster(Box::new(ClusterView {
            cluster: self.cluster.clone(),
            leader: leadership.leader,
            term: leadership.term,
            nodes,
            agents: live.agents.len() as u64,
            unfinished: live.messages.len() as u64,
            rules_revision: live.rules.revision,
            as_of: self.as_of(),
        }))
    }

    /// The message, if it exists and this identity has to do with it.
    fn visible(&self, principal: &Principal, msg_id: &MsgId) -> Result<Arc<MessageRecord>, ErrorReply> {
        let record = self.replica.tables().message(msg_id).map_err(|error| self.damaged(&error))?;
        let record = record.ok_or_else(|| not_found("message ", msg_id))?;
        if self.may_see(principal, &record) {
            Ok(record)
        } else {
            let message = format!("{principal} neither sent this message nor works on it");
            Err(ErrorReply::new(Code::Forbidden, message).with_msg_id(msg_id))
        }
    }

    /// Users see every message; an agent those it sent and those it was given.
    fn may_see(&self, principal: &Principal, record: &MessageRecord) -> bool {
        let was_delivered = |agent_id: &AgentId| {
            record.state.holder().is_some_and(|holder| holder.agent_id == *agent_id)
                || self.replica.tables().was_delivered(&record.msg_id, agent_id).unwrap_or(false)
        };
        match principal {
            Principal::User(_) | Principal::Loopback => true,
            Principal::Agent(agent_id) => record.source == *agent_id || was_delivered(agent_id),
            Principal::Host(_) => {
                principal.acts_for(&record.source)
                    || record.state.holder().is_some_and(|holder| principal.acts_for(&holder.agent_id))
            }
            Principal::Node(_) => false,
        }
    }
}

pub fn page(limit: u32) -> usize {
    (limit as usize).clamp(1, PAGE_MAX)
}

fn not_found(what: &str, msg_id: &MsgId) -> ErrorReply {
    ErrorReply::new(Code::NotFound, format!("no {what}{msg_id}")).with_msg_id(msg_id)
}
