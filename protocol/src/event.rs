//! Events, their topics, and the groups that read them: the rows, and what is asked of them.
//!
//! A *topic* is the durable log of one event type, under dense offsets that are never used twice.
//! A *group* has one position per topic it reads; what its members were handed and have not yet
//! acknowledged is open.

use std::{collections::BTreeSet, fmt};

use serde::{Deserialize, Serialize};

use crate::{
    agent::AgentState,
    command::Principal,
    error::{Code, ErrorReply},
    id::{AgentId, EventType, MsgId, Name, Tag, Topics, TraceId},
    json::Json,
    stamp::Stamp,
};

/// Events in one request, and in one hand-out.
pub const EVENTS_MAX: usize = 1_000;
/// Bytes of the contents of one request.
pub const EVENTS_BYTES_MAX: usize = 4 << 20;
/// Open events of one member in one group; at the cap it is handed nothing more.
pub const OPEN_MAX: u64 = 1_000;
/// The longest key that orders events, in bytes.
pub const KEY_MAX: usize = 128;

/// An event on its way into its topic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewEvent {
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    pub event_type: EventType,
    pub source: AgentId,
    pub key: Option<String>,
    /// Of the publisher's fields: tells a repeat from a conflict.
    pub content_hash: [u8; 16],
    pub data: Json,
}

/// An event in its topic.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventRow {
    pub event_type: EventType,
    pub offset: u64,
    pub at: Stamp,
    /// None of the product's own events, which need no key to be sent again by.
    pub msg_id: Option<MsgId>,
    pub trace_id: Option<TraceId>,
    /// Who published it; none: the cluster itself.
    pub source: Option<AgentId>,
    pub key: Option<String>,
    /// Bytes of content before it in its topic.
    pub bytes_before: u64,
    pub data: Json,
}

/// Where the event with a `msg_id` went.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventMark {
    pub event_type: EventType,
    pub offset: u64,
    pub content_hash: [u8; 16],
}

/// What became of one event of a publication.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    pub msg_id: MsgId,
    pub event_type: EventType,
    pub offset: u64,
    /// It was stored already: by an earlier publication, or by an earlier try of this one.
    pub duplicate: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TopicRecord {
    pub event_type: EventType,
    /// The first event that is kept.
    pub floor: u64,
    /// The offset of the next event.
    pub next: u64,
    /// Bytes of content of all events, and of those below the floor.
    pub bytes: u64,
    pub bytes_trimmed: u64,
    /// Declared for this topic alone; otherwise the rules' `[events]`.
    pub max_age_ms: Option<u64>,
    pub max_bytes: Option<u64>,
    /// When its first event came, or it was declared.
    pub created: Stamp,
    /// An operator removed it: not shown until the next event.
    pub removed: bool,
}

impl TopicRecord {
    pub fn new(event_type: EventType, created: Stamp) -> Self {
        Self {
            event_type,
            floor: 0,
            next: 0,
            bytes: 0,
            bytes_trimmed: 0,
            max_age_ms: None,
            max_bytes: None,
            created,
            removed: false,
        }
    }

    pub fn events_kept(&self) -> u64 {
        self.next - self.floor
    }

    pub fn bytes_kept(&self) -> u64 {
        self.bytes - self.bytes_trimmed
    }

    /// `offset_out_of_range`, naming the range.
    pub fn out_of_range(&self, offset: u64) -> ErrorReply {
        let Self { event_type, floor, next, .. } = self;
        let message = match floor == next {
            true => format!("{event_type} has no event {offset}: it is empty, and its next offset is {next}"),
            false => format!("{event_type} has no event {offset}: it holds {floor} to {}", next - 1),
        };
        ErrorReply { field: Some("offset".into()), ..ErrorReply::new(Code::OffsetOutOfRange, message) }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupRecord {
    pub group: Name,
    pub topics: Topics,
    pub author: Principal,
    pub created: Stamp,
    /// Counts its resets, so that none is done twice.
    pub resets: u64,
}

impl GroupRecord {
    /// Whether it reads this topic. Its own dead letters it never does.
    pub fn reads(&self, event_type: &EventType) -> bool {
        self.topics.covers(event_type) && *event_type != dead_letters(&self.group)
    }
}

/// The topic that takes what a group's members could not work on: `dead.GROUP.v1`, every character
/// of the name that no topic may have replaced by `_`.
pub fn dead_letters(group: &Name) -> EventType {
    let word: String = group
        .chars()
        .map(|c| match c.to_ascii_lowercase() {
            c if c.is_ascii_lowercase() || c.is_ascii_digit() => c,
            _ => '_',
        })
        .collect();
    EventType::parse(&format!("dead.{word}.v1")).expect("a name has at most 64 of these characters")
}

/// A group's place in one topic: everything below `next` has been handed out at least once, and what
/// of it is neither done nor lost is open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPosition {
    pub group: Name,
    pub event_type: EventType,
    pub next: u64,
    /// In order, without overlap.
    pub open: Vec<Open>,
    /// The newest stretch that retention took before it was handed out, and the hand-out that told it.
    pub gap: Option<(PullId, Gap)>,
    /// Events that went to the dead letters, of all time.
    pub dead: u64,
}

/// Events that were handed out together and are not done yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Open {
    pub from: u64,
    /// The first after them.
    pub to: u64,
    /// Who works on them; none once they were given back.
    pub member: Option<Name>,
    pub pull: PullId,
    /// Times they were handed out.
    pub deliveries: u32,
    /// Cluster time from which another hand-out may take them.
    pub due_ms: u64,
}

/// Names a hand-out, so that it can be asked for twice.
pub type PullId = u128;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    pub from: u64,
    /// The first after it.
    pub to: u64,
}

impl GroupPosition {
    pub fn new(group: Name, event_type: EventType, next: u64) -> Self {
        Self { group, event_type, next, open: Vec::new(), gap: None, dead: 0 }
    }

    /// Every event below it is done.
    pub fn floor(&self) -> u64 {
        self.open.first().map_or(self.next, |open| open.from)
    }

    pub fn unacknowledged(&self) -> u64 {
        self.open.iter().map(|open| open.to - open.from).sum()
    }

    /// Events of its topic that are not done.
    pub fn lag(&self, topic: &TopicRecord) -> u64 {
        topic.next.saturating_sub(self.next.max(topic.floor)) + self.unacknowledged()
    }

    /// Takes the offsets out of what is open and hands each part that was to `keep`, which says what
    /// is open instead. How many offsets were.
    pub fn change(&mut self, spans: &[Span], mut keep: impl FnMut(Open) -> Option<Open>) -> u64 {
        let mut changed = 0;
        let mut left = Vec::with_capacity(self.open.len());
        for open in self.open.drain(..) {
            let mut from = open.from;
            for span in spans {
                let (start, end) = (span.from.max(from), span.to.min(open.to));
                if start >= end {
                    continue;
                }
                if from < start {
                    left.push(Open { from, to: start, ..open.clone() });
                }
                changed += end - start;
                left.extend(keep(Open { from: start, to: end, ..open.clone() }));
                from = end;
            }
            if from < open.to {
                left.push(Open { from, ..open });
            }
        }
        self.open = left;
        changed
    }
}

/// Offsets `from..to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    pub from: u64,
    pub to: u64,
}

impl Span {
    /// Of these offsets, sorted and joined.
    pub fn of(offsets: impl IntoIterator<Item = u64>) -> Vec<Self> {
        Self::joined(offsets.into_iter().map(|from| Self { from, to: from + 1 }).collect())
    }

    /// Sorted and joined, without the empty ones.
    pub fn joined(mut spans: Vec<Self>) -> Vec<Self> {
        spans.retain(|span| span.from < span.to);
        spans.sort_unstable();
        let mut joined: Vec<Self> = Vec::new();
        for span in spans {
            match joined.last_mut() {
                Some(last) if span.from <= last.to => last.to = last.to.max(span.to),
                _ => joined.push(span),
            }
        }
        joined
    }
}

/// Where reading begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Start {
    /// The first event that is kept.
    Earliest,
    /// What is published from now on.
    Latest,
    Offset(u64),
    /// The first event at this time of the cluster's calendar or later, in Unix milliseconds.
    At(u64),
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Earliest => f.write_str("earliest"),
            Self::Latest => f.write_str("latest"),
            Self::Offset(offset) => write!(f, "{offset}"),
            Self::At(wall_ms) => write!(f, "{wall_ms} ms"),
        }
    }
}

/// What a hand-out gave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandedOut {
    pub spans: Vec<Handed>,
    pub gaps: Vec<(EventType, Gap)>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handed {
    pub event_type: EventType,
    pub from: u64,
    pub to: u64,
    pub deliveries: u32,
}

/// An event as a member gets it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeliveredEvent {
    pub event: EventRow,
    /// 1 the first time.
    pub deliveries: u32,
}

/// What a member says of events it was handed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Word {
    /// They are done.
    Ack,
    /// They come again, to anybody, after this time. `cause` goes with them to the dead letters.
    Nack { delay_ms: u64, cause: String },
    /// It still works on them: the ack wait begins anew.
    Extend,
    /// They were handed out and never sent: as if that had not been.
    GiveBack,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupView {
    pub record: GroupRecord,
    pub positions: Vec<PositionView>,
    /// Told of one group, not in lists.
    pub members: Vec<MemberView>,
}

/// Who has joined by a subscription, or holds events of the group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberView {
    pub member: Name,
    /// By its registration's `subscriptions`.
    pub subscribed: bool,
    /// None of who is no agent.
    pub state: Option<AgentState>,
    /// Events it was handed and has not acknowledged.
    pub open: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PositionView {
    pub position: GroupPosition,
    pub lag: u64,
    /// Calendar of the oldest event that is not done.
    pub oldest: Option<Stamp>,
}

impl Topics {
    /// Whether one of the patterns names this topic.
    pub fn covers(&self, event_type: &EventType) -> bool {
        self.as_str().split(',').any(|one| match one.strip_suffix('*') {
            Some(prefix) => event_type.starts_with(prefix),
            None => one == event_type.as_str(),
        })
    }

    /// All of these together, in order and each once: two that mean the same are equal.
    pub fn all_of<'a>(topics: impl IntoIterator<Item = &'a Self>) -> Self {
        let all: BTreeSet<&str> = topics.into_iter().flat_map(|topics| topics.as_str().split(',')).collect();
        let text: Vec<&str> = all.into_iter().collect();
        Self::parse(&text.join(",")).expect("its parts keep the rule")
    }
}

/// The event type of an envelope's text, or the error that says what is missing.
pub fn event_type(text: &str) -> Result<EventType, ErrorReply> {
    EventType::parse(text).map_err(|error| {
        let code = if Tag::parse(text).is_ok() { Code::UnversionedType } else { Code::Invalid };
        ErrorReply { field: Some("event_type".into()), ..ErrorReply::new(code, error.to_string()) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(from: u64, to: u64) -> Open {
        Open { from, to, member: None, pull: 0, deliveries: 1, due_ms: 0 }
    }

    #[test]
    fn spans_join_what_touches() {
        let spans = Span::of([5, 1, 2, 2, 4]);
        assert_eq!(spans, [Span { from: 1, to: 3 }, Span { from: 4, to: 6 }]);
    }

    #[test]
    fn a_change_splits_what_is_open() {
        let group = Name::parse("g").unwrap();
        let mut position = GroupPosition::new(group, EventType::parse("a.v1").unwrap(), 10);
        position.open = vec![open(0, 4), open(6, 10)];
        let changed = position.change(&Span::of([1, 2, 5, 6, 9]), |_| None);
        assert_eq!(changed, 4);
        assert_eq!(position.open, [open(0, 1), open(3, 4), open(7, 9)]);
        assert_eq!((position.floor(), position.unacknowledged()), (0, 4));
        position.change(&[Span { from: 0, to: 10 }], |_| None);
        assert_eq!(position.floor(), 10);
    }

    #[test]
    fn a_prefix_covers_whole_words() {
        let covers = |topics: &str, event_type: &str| {
            Topics::parse(topics).unwrap().covers(&EventType::parse(event_type).unwrap())
        };
        assert!(covers("task.*", "task.completed.v1"));
        assert!(!covers("task.*", "tasks.v1"));
        assert!(covers("a.v1", "a.v1"));
        assert!(!covers("a.v1", "a.v2"));
        assert!(covers("a.v1,b.*", "b.c.v1") && !covers("a.v1,b.*", "a.v2"));
    }

    #[test]
    fn dead_letters_have_a_legal_name() {
        let name = |group: &str| dead_letters(&Name::parse(group).unwrap()).to_string();
        assert_eq!(name("Ops:team-1.x"), "dead.ops_team_1_x.v1");
        assert!(name(&"x".repeat(64)).len() < 128);
    }
}
