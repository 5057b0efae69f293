//! The product's own events: rows of a typed log, written in the entry that caused them, so that
//! nothing can happen without its event. They carry ids and figures, never content.

use reach_protocol::{
    AgentId, AgentState, ErrorReply, EventRow, EventType, InstanceId, Json, Money, MsgId, NodeId, Reply,
    Stamp, TraceId,
    agent::AgentRecord,
    command::{ExpiryPause, Observed},
    event::EventMark,
    message::{Holder, MessageRecord},
};
use serde::Serialize;

use crate::{change::Change, rows::Write};

/// The data of `task.completed.v1`.
#[derive(Serialize)]
struct TaskCompleted<'a> {
    msg_id: &'a MsgId,
    agent_id: &'a AgentId,
    attempt: u32,
    /// As the agent reported it; null when it did not.
    cost: Option<Money>,
}

pub(crate) fn task_completed(
    change: &mut Change<'_>,
    record: &MessageRecord,
    holder: &Holder,
    cost: Option<Money>,
) {
    let data =
        TaskCompleted { msg_id: &record.msg_id, agent_id: &holder.agent_id, attempt: record.attempt, cost };
    put(change, "task.completed.v1", Some(record), &data);
}

/// The data of `agent.liveness_changed.v1`.
#[derive(Serialize)]
struct LivenessChanged<'a> {
    agent_id: &'a AgentId,
    instance_id: &'a InstanceId,
    state: AgentState,
    reason: &'a str,
}

pub(crate) fn liveness_changed(change: &mut Change<'_>, record: &AgentRecord) {
    let data = LivenessChanged {
        agent_id: record.agent_id(),
        instance_id: &record.instance,
        state: record.state,
        reason: record.reason.as_str(),
    };
    put(change, "agent.liveness_changed.v1", None, &data);
}

/// The data of `cluster.mass_expiry.v1`.
#[derive(Serialize)]
struct MassExpiry {
    agents: u32,
    of: u32,
    wait_ms: u64,
}

pub(crate) fn mass_expiry(change: &mut Change<'_>, pause: &ExpiryPause) {
    let data = MassExpiry { agents: pause.agents, of: pause.of, wait_ms: pause.wait_ms };
    put(change, "cluster.mass_expiry.v1", None, &data);
}

/// The data of `cluster.clock_skew.v1`.
#[derive(Serialize)]
struct ClockSkew<'a> {
    who: String,
    host: Option<&'a str>,
    offset_ms: i64,
    is_off: bool,
    message: &'a str,
}

/// The data of `cluster.health_changed.v1`.
#[derive(Serialize)]
struct HealthChanged {
    leader: String,
    /// Nodes that the leader doesn't hear.
    silent: Vec<String>,
    nodes: u32,
}

pub(crate) fn observed(
    change: &mut Change<'_>,
    msg_id: &MsgId,
    observed: &Observed,
) -> Result<Reply, ErrorReply> {
    if change.rows.event_mark(msg_id).is_some() {
        return Ok(Reply::Done);
    }
    let row = match observed {
        Observed::ClockSkew { who, host, offset_ms, is_off, message } => {
            let (who, host) = (who.to_string(), host.as_deref());
            let data = ClockSkew { who, host, offset_ms: *offset_ms, is_off: *is_off, message };
            row("cluster.clock_skew.v1", None, &data)
        }
        Observed::Health { leader, silent, nodes } => {
            let silent = silent.iter().map(NodeId::to_string).collect();
            let data = HealthChanged { leader: leader.to_string(), silent, nodes: *nodes };
            row("cluster.health_changed.v1", None, &data)
        }
    };
    let event_type = row.event_type.clone();
    let offset = change.append_row(Row { msg_id: Some(msg_id.clone()), ..row });
    let mark = EventMark { event_type, offset, content_hash: [0; 16] };
    change.write(Write::PutEventMark { msg_id: msg_id.clone(), mark });
    Ok(Reply::Done)
}

fn put(change: &mut Change<'_>, event_type: &str, of: Option<&MessageRecord>, data: &impl Serialize) {
    change.append_row(row(event_type, of, data));
}

fn row(event_type: &str, of: Option<&MessageRecord>, data: &impl Serialize) -> Row {
    Row {
        event_type: EventType::parse(event_type).expect("the name keeps the rule"),
        msg_id: None,
        trace_id: of.map(|record| record.trace_id.clone()),
        source: None,
        key: None,
        data: Json::of(data).expect("ids and numbers are JSON"),
    }
}

/// An event that has no place yet.
pub(crate) struct Row {
    pub event_type: EventType,
    pub msg_id: Option<MsgId>,
    pub trace_id: Option<TraceId>,
    pub source: Option<AgentId>,
    pub key: Option<String>,
    pub data: Json,
}

impl Row {
    pub fn at(self, offset: u64, bytes_before: u64, at: Stamp) -> EventRow {
        let Self { event_type, msg_id, trace_id, source, key, data } = self;
        EventRow { event_type, offset, at, msg_id, trace_id, source, key, bytes_before, data }
    }
}
