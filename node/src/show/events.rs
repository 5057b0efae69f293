//! Events, topics and groups as people and programs see them.

use reach_protocol::{
    AgentId, EventRow, EventType, Name, Stamp,
    event::{DeliveredEvent, Gap, GroupView, MemberView, Published, TopicRecord},
    json::without_nulls,
};
use serde_json::{Value, json};

use super::{Shown, count, span, time};

/// An event in the envelope's public form, with its place.
pub fn event_json(row: &EventRow) -> Value {
    let mut value = json!({
        "msg_id": row.msg_id,
        "trace_id": row.trace_id,
        "mode": "event",
        "msg_type": "event",
        "event_type": row.event_type,
        "offset": row.offset,
        "at": time(row.at.wall_ms),
        "source": row.source.as_ref().map(|agent_id| json!({ "agent_id": agent_id })),
        "key": row.key,
    });
    without_nulls(&mut value, 0);
    // After the others, since a null is content here.
    value["payload"] = row.data.to_value();
    value
}

pub fn delivered_json(delivered: &DeliveredEvent) -> Value {
    let mut value = event_json(&delivered.event);
    value["deliveries"] = delivered.deliveries.into();
    value
}

pub fn gap_json((event_type, gap): &(EventType, Gap)) -> Value {
    json!({ "event_type": event_type, "from": gap.from, "to": gap.to, "reason": "retention" })
}

/// One event as a line of a list that goes on.
pub fn event_line(row: &EventRow) -> Shown {
    let source = row.source.as_ref().map_or("cluster", AgentId::as_str);
    let key = row.key.as_ref().map_or(String::new(), |key| format!(" key={key}"));
    let line = format!("{} {} {source}{key} {}", row.offset, time(row.at.wall_ms), row.data.as_str());
    Shown { json: event_json(row), notes: vec![line], ..Shown::default() }
}

pub fn events(rows: &[EventRow], next: u64, as_of: Stamp) -> Shown {
    let json = json!({
        "items": rows.iter().map(event_json).collect::<Vec<_>>(),
        "next": next,
        "as_of": time(as_of.wall_ms),
    });
    Shown { json, ..Shown::default() }
}

pub fn pulled(events: &[DeliveredEvent], gaps: &[(EventType, Gap)]) -> Shown {
    let rows = events
        .iter()
        .map(|delivered| {
            let row = &delivered.event;
            vec![
                row.event_type.to_string(),
                row.offset.to_string(),
                delivered.deliveries.to_string(),
                row.source.as_ref().map_or("cluster", AgentId::as_str).to_string(),
                row.data.as_str().to_string(),
            ]
        })
        .collect();
    let gap = |(event_type, gap): &(EventType, Gap)| {
        format!("gap: retention took {event_type} {} to {} before they were done", gap.from, gap.to - 1)
    };
    let notes = gaps.iter().map(gap).collect();
    let json = json!({
        "items": events.iter().map(delivered_json).collect::<Vec<_>>(),
        "gaps": gaps.iter().map(gap_json).collect::<Vec<_>>(),
    });
    Shown { json, head: vec!["TYPE", "OFFSET", "DELIVERIES", "SOURCE", "PAYLOAD"], rows, notes }
}

pub fn heard(changed: u64, said: &str) -> Shown {
    Shown {
        json: json!({ "changed": changed }),
        notes: vec![format!("{} {said}", count(changed, "event"))],
        ..Shown::default()
    }
}

pub fn published(published: &Published) -> Shown {
    let again = if published.duplicate { ", as it was before" } else { "" };
    let Published { msg_id, event_type, offset, .. } = published;
    Shown {
        json: serde_json::to_value(published).expect("it is plain data"),
        notes: vec![format!("{msg_id} is event {offset} of {event_type}{again}")],
        ..Shown::default()
    }
}

fn topic_json(topic: &TopicRecord) -> Value {
    let mut value = json!({
        "event_type": topic.event_type,
        "first": topic.floor,
        "next": topic.next,
        "events": topic.events_kept(),
        "bytes": topic.bytes_kept(),
        "max_age_ms": topic.max_age_ms,
        "max_bytes": topic.max_bytes,
        "created": time(topic.created.wall_ms),
    });
    without_nulls(&mut value, 0);
    value
}

fn topic_row(topic: &TopicRecord) -> Vec<String> {
    let declared = |value: Option<String>| value.unwrap_or_else(|| "by the rules".to_string());
    vec![
        topic.event_type.to_string(),
        topic.floor.to_string(),
        topic.next.to_string(),
        topic.events_kept().to_string(),
        topic.bytes_kept().to_string(),
        declared(topic.max_age_ms.map(span)),
        declared(topic.max_bytes.map(|bytes| format!("{bytes} bytes"))),
    ]
}

const TOPIC_HEAD: [&str; 7] = ["TOPIC", "FIRST", "NEXT", "EVENTS", "BYTES", "MAX AGE", "MAX SIZE"];

pub fn topic(topic: &TopicRecord) -> Shown {
    Shown {
        json: topic_json(topic),
        head: TOPIC_HEAD.to_vec(),
        rows: vec![topic_row(topic)],
        ..Shown::default()
    }
}

pub fn topics(items: &[TopicRecord], next: Option<&EventType>, as_of: Stamp) -> Shown {
    Shown {
        json: json!({
            "items": items.iter().map(topic_json).collect::<Vec<_>>(),
            "next": next,
            "as_of": time(as_of.wall_ms),
        }),
        head: TOPIC_HEAD.to_vec(),
        rows: items.iter().map(topic_row).collect(),
        notes: next.map(|next| format!("more: --after {next}")).into_iter().collect(),
    }
}

fn group_json(view: &GroupView) -> Value {
    let positions: Vec<Value> = view
        .positions
        .iter()
        .map(|shown| {
            let position = &shown.position;
            json!({
                "event_type": position.event_type,
                "floor": position.floor(),
                "next": position.next,
                "unacknowledged": position.unacknowledged(),
                "lag": shown.lag,
                "dead": position.dead,
                "oldest": shown.oldest.map(|at| time(at.wall_ms)),
            })
        })
        .collect();
    json!({
        "group": view.record.group,
        "topics": view.record.topics,
        "author": view.record.author.to_string(),
        "created": time(view.record.created.wall_ms),
        "lag": view.positions.iter().map(|shown| shown.lag).sum::<u64>(),
        "dead_letters": reach_protocol::event::dead_letters(&view.record.group),
        "positions": positions,
    })
}

fn member_json(member: &MemberView) -> Value {
    let mut value = json!({
        "member": member.member,
        "subscribed": member.subscribed,
        "state": member.state,
        "unacknowledged": member.open,
    });
    without_nulls(&mut value, 0);
    value
}

pub fn group(view: &GroupView) -> Shown {
    let rows = view
        .positions
        .iter()
        .map(|shown| {
            let position = &shown.position;
            vec![
                position.event_type.to_string(),
                position.floor().to_string(),
                position.next.to_string(),
                position.unacknowledged().to_string(),
                shown.lag.to_string(),
                position.dead.to_string(),
                shown.oldest.map_or("-".to_string(), |at| time(at.wall_ms)),
            ]
        })
        .collect();
    let GroupView { record, .. } = view;
    let dead = reach_protocol::event::dead_letters(&record.group);
    let head = vec!["TOPIC", "DONE BELOW", "NEXT", "UNACKNOWLEDGED", "LAG", "DEAD", "OLDEST"];
    let note = format!(
        "group {} reads {}, made by {}; dead letters in {dead}",
        record.group, record.topics, record.author
    );
    let member = |member: &MemberView| {
        let by = if member.subscribed { "subscribed" } else { "pulls" };
        let state = member.state.map_or(String::new(), |state| format!(", {state}"));
        format!("member {}: {by}{state}, {} unacknowledged", member.member, member.open)
    };
    let notes = std::iter::once(note).chain(view.members.iter().map(member)).collect();
    let mut json = group_json(view);
    json["members"] = view.members.iter().map(member_json).collect();
    Shown { json, head, rows, notes }
}

pub fn groups(items: &[GroupView], next: Option<&Name>, as_of: Stamp) -> Shown {
    let rows = items
        .iter()
        .map(|view| {
            let sum = |figure: fn(&reach_protocol::event::PositionView) -> u64| {
                view.positions.iter().map(figure).sum::<u64>().to_string()
            };
            vec![
                view.record.group.to_string(),
                view.record.topics.to_string(),
                sum(|shown| shown.lag),
                sum(|shown| shown.position.unacknowledged()),
                sum(|shown| shown.position.dead),
            ]
        })
        .collect();
    Shown {
        json: json!({
            "items": items.iter().map(group_json).collect::<Vec<_>>(),
            "next": next,
            "as_of": time(as_of.wall_ms),
        }),
        head: vec!["GROUP", "TOPICS", "LAG", "UNACKNOWLEDGED", "DEAD"],
        rows,
        notes: next.map(|next| format!("more: --after {next}")).into_iter().collect(),
    }
}

pub fn done(json: Value, note: String) -> Shown {
    Shown { json, notes: vec![note], ..Shown::default() }
}
