//! The product's own events: rows of a typed log, written in the entry that caused them, so that
//! nothing can happen without its event. They carry ids and figures, never content.

use reach_protocol::{
    AgentId, EventType, Json, Money, MsgId,
    message::{EventRow, Holder, MessageRecord},
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

/// A command completes at most one message, so the rows' next offset is free.
pub(crate) fn task_completed(
    change: &mut Change<'_>,
    record: &MessageRecord,
    holder: &Holder,
    cost: Option<Money>,
) {
    let event_type = EventType::parse("task.completed.v1").expect("the name keeps the rule");
    let data =
        TaskCompleted { msg_id: &record.msg_id, agent_id: &holder.agent_id, attempt: record.attempt, cost };
    let row = EventRow {
        offset: change.rows.next_offset(&event_type),
        event_type,
        at: change.stamp,
        trace_id: Some(record.trace_id.clone()),
        data: Json::of(&data).expect("ids and numbers are JSON"),
    };
    change.write(Write::PutEvent(row));
}
