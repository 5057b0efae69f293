//! Topics: what is published gets the next offsets, and what nobody keeps any longer goes.

use std::{collections::BTreeMap, sync::Arc};

use reach_protocol::{
    Code, ErrorReply, EventType, Fact, MsgId, Principal, Reply,
    command::TRIM_MAX,
    event::{EVENTS_MAX, EventMark, NewEvent, Published, TopicRecord},
};

use crate::{change::Change, registry::may_not_act, rows::Write};

/// All events, or none. One whose `msg_id` is known already keeps its first offset.
pub(crate) fn publish(
    change: &mut Change<'_>,
    events: &[NewEvent],
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    if events.is_empty() || events.len() > EVENTS_MAX {
        let message = format!("{} events in one publication: give 1 to {EVENTS_MAX}", events.len());
        return Err(ErrorReply::new(Code::TooLarge, message));
    }
    // Everything is looked at before anything is written.
    let mut marks: BTreeMap<&MsgId, Option<EventMark>> = BTreeMap::new();
    for (place, event) in events.iter().enumerate() {
        let at = |error: ErrorReply| {
            let field = if events.len() > 1 { format!("events[{place}].msg_id") } else { "msg_id".into() };
            ErrorReply { field: Some(field), ..error.with_msg_id(&event.msg_id) }
        };
        if !author.acts_for(&event.source) {
            return Err(may_not_act(author, &event.source));
        }
        let taken = || {
            let message = "this msg_id is taken by a message or an event with other content";
            at(ErrorReply::new(Code::MsgIdConflict, message))
        };
        let twin = events[..place].iter().find(|earlier| earlier.msg_id == event.msg_id);
        if twin.is_some_and(|twin| twin.content_hash != event.content_hash) {
            return Err(taken());
        }
        let mark = change.rows.event_mark(&event.msg_id);
        if mark.as_ref().is_some_and(|mark| mark.content_hash != event.content_hash)
            || change.rows.message(&event.msg_id).is_some()
        {
            return Err(taken());
        }
        marks.insert(&event.msg_id, mark);
    }
    let mut published = Vec::with_capacity(events.len());
    for event in events {
        let known = marks.get(&event.msg_id).cloned().flatten();
        let duplicate = known.is_some();
        let offset = match known {
            Some(mark) => mark.offset,
            None => {
                let offset = change.append(event);
                let content_hash = event.content_hash;
                let mark = EventMark { event_type: event.event_type.clone(), offset, content_hash };
                marks.insert(&event.msg_id, Some(mark.clone()));
                change.write(Write::PutEventMark { msg_id: event.msg_id.clone(), mark });
                offset
            }
        };
        let (msg_id, event_type) = (event.msg_id.clone(), event.event_type.clone());
        published.push(Published { msg_id, event_type, offset, duplicate });
    }
    Ok(Reply::Published(published))
}

pub(crate) fn set(
    change: &mut Change<'_>,
    event_type: &EventType,
    max_age_ms: Option<u64>,
    max_bytes: Option<u64>,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    must_operate(change, author, "change topics")?;
    let before = change.topic(event_type);
    let created = change.stamp;
    let record = before.as_deref().cloned().unwrap_or_else(|| TopicRecord::new(event_type.clone(), created));
    let record = TopicRecord { max_age_ms, max_bytes, removed: false, ..record };
    if before.as_deref() != Some(&record) {
        change.put_topic(record.clone());
    }
    Ok(Reply::Topic(Box::new(record)))
}

/// Moves the floor. Positions of groups stay where they are: they are told the gap when they come to
/// it.
pub(crate) fn trim(
    change: &mut Change<'_>,
    event_type: &EventType,
    to: u64,
    author: Option<&Principal>,
) -> Result<Reply, ErrorReply> {
    if let Some(author) = author {
        must_operate(change, author, "trim topics")?;
    }
    let record = known(change, event_type)?;
    if to > record.next {
        return Err(record.out_of_range(to));
    }
    if to <= record.floor {
        return Ok(Reply::Topic(Box::new((*record).clone())));
    }
    if to - record.floor > TRIM_MAX {
        let message = format!("{} events at once: trim at most {TRIM_MAX}", to - record.floor);
        return Err(ErrorReply::new(Code::TooLarge, message));
    }
    let mut bytes_trimmed = record.bytes_trimmed;
    for row in change.rows.events(event_type, record.floor, to) {
        bytes_trimmed = row.bytes_before + row.data.as_str().len() as u64;
        if let Some(msg_id) = row.msg_id {
            change.write(Write::RemoveEventMark { msg_id });
        }
    }
    change.write(Write::RemoveEvents { event_type: event_type.clone(), from: record.floor, to });
    let record = TopicRecord { floor: to, bytes_trimmed, ..(*record).clone() };
    change.put_topic(record.clone());
    Ok(Reply::Topic(Box::new(record)))
}

pub(crate) fn remove(
    change: &mut Change<'_>,
    event_type: &EventType,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    must_operate(change, author, "remove topics")?;
    let Some(record) = change.topic(event_type) else { return Err(unknown(event_type)) };
    if record.floor < record.next {
        let message = format!("{event_type} still holds {} events: trim it first", record.events_kept());
        return Err(ErrorReply::new(Code::IllegalTransition, message));
    }
    if !record.removed {
        let record = TopicRecord { removed: true, max_age_ms: None, max_bytes: None, ..(*record).clone() };
        change.put_topic(record);
    }
    Ok(Reply::Done)
}

pub(crate) fn known(change: &Change<'_>, event_type: &EventType) -> Result<Arc<TopicRecord>, ErrorReply> {
    change.topic(event_type).filter(|record| !record.removed).ok_or_else(|| unknown(event_type))
}

fn unknown(event_type: &EventType) -> ErrorReply {
    ErrorReply::new(Code::NotFound, format!("no topic {event_type}"))
}

pub(crate) fn must_operate(change: &Change<'_>, author: &Principal, what: &str) -> Result<(), ErrorReply> {
    if change.rules().rules.is_operator(author) {
        return Ok(());
    }
    let message = format!("{author} may not {what}: grants.operators does not name it");
    Err(ErrorReply::new(Code::Forbidden, message))
}

impl Change<'_> {
    /// Puts an event at the end of its topic.
    pub fn append(&mut self, event: &NewEvent) -> u64 {
        let row = crate::event::Row {
            event_type: event.event_type.clone(),
            msg_id: Some(event.msg_id.clone()),
            trace_id: Some(event.trace_id.clone()),
            source: Some(event.source.clone()),
            key: event.key.clone(),
            data: event.data.clone(),
        };
        self.append_row(row)
    }

    pub fn append_row(&mut self, row: crate::event::Row) -> u64 {
        let before = self.topic(&row.event_type);
        let created = self.stamp;
        let topic =
            before.as_deref().cloned().unwrap_or_else(|| TopicRecord::new(row.event_type.clone(), created));
        let (offset, bytes_before) = (topic.next, topic.bytes);
        let bytes = bytes_before + row.data.as_str().len() as u64;
        self.fact_once(Fact::Appended(row.event_type.clone()));
        self.put_topic(TopicRecord { next: offset + 1, bytes, removed: false, ..topic });
        self.write(Write::PutEvent(row.at(offset, bytes_before, self.stamp)));
        offset
    }
}
