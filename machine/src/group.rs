//! Consumer groups: within a group one member gets each event, until it says that it is done.
//!
//! A hand-out is no choice: it gives the first events that are due, in order, so apply does it by
//! itself. An ack wait that has lapsed needs no entry of its own either: what is due is seen by the
//! entry's stamp when somebody next asks.

use std::sync::Arc;

use reach_protocol::{
    Code, ErrorReply, EventType, Fact, Json, Name, Principal, Reply, Topics,
    event::{
        EVENTS_MAX, Gap, GroupPosition, GroupRecord, Handed, HandedOut, OPEN_MAX, Open, PullId, Span,
        TopicRecord, Word, dead_letters,
    },
};
use serde::Serialize;

use crate::{change::Change, event, member, rows::Write, topic};

/// The longest text that says why an event could not be worked on, in bytes.
const CAUSE_MAX: usize = 1 << 10;
/// The longest time an event that was given back may wait, in milliseconds.
const DELAY_MAX_MS: u64 = 24 * 3600 * 1000;

pub(crate) fn create(
    change: &mut Change<'_>,
    group: &Name,
    topics: &Topics,
    starts: &[(EventType, u64)],
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    if let Some(record) = change.rows.group(group) {
        if record.topics != *topics {
            let message = format!("group {group} exists, and reads {}: remove it first", record.topics);
            return Err(ErrorReply::new(Code::IllegalTransition, message));
        }
        return Ok(shown(change, record));
    }
    let (topics, author, created) = (topics.clone(), author.clone(), change.stamp);
    let record = Arc::new(GroupRecord { group: group.clone(), topics, author, created, resets: 0 });
    place(change, &record, starts)?;
    change.write(Write::PutGroup(record.clone()));
    change.fact(Fact::GroupChanged(group.clone()));
    let positions = starts
        .iter()
        .map(|(event_type, next)| GroupPosition::new(group.clone(), event_type.clone(), *next))
        .collect();
    Ok(Reply::Group { record: Box::new((*record).clone()), positions })
}

/// By its author or an operator.
pub(crate) fn reset(
    change: &mut Change<'_>,
    group: &Name,
    resets: u64,
    starts: &[(EventType, u64)],
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    let record = known(change, group)?;
    must_own(change, &record, author)?;
    if record.resets != resets {
        return Ok(Reply::Done);
    }
    place(change, &record, starts)?;
    change.write(Write::PutGroup(Arc::new(GroupRecord { resets: resets + 1, ..(*record).clone() })));
    change.fact(Fact::GroupChanged(group.clone()));
    Ok(Reply::Done)
}

/// Puts the group's positions where `starts` says, which was read a moment ago.
fn place(
    change: &mut Change<'_>,
    record: &GroupRecord,
    starts: &[(EventType, u64)],
) -> Result<(), ErrorReply> {
    for (event_type, next) in starts {
        let topic = topic::known(change, event_type)?;
        if !record.reads(event_type) {
            let message = format!("group {} does not read {event_type}", record.group);
            return Err(ErrorReply::invalid("topic", message));
        }
        if *next > topic.next {
            return Err(topic.out_of_range(*next));
        }
    }
    for (event_type, next) in starts {
        let dead = change.rows.position(&record.group, event_type).map_or(0, |before| before.dead);
        let position = GroupPosition::new(record.group.clone(), event_type.clone(), *next);
        change.write(Write::PutPosition(Arc::new(GroupPosition { dead, ..position })));
    }
    Ok(())
}

/// One that is not there is removed already; who asks for it by a wrong name is told at the edge.
pub(crate) fn remove(change: &mut Change<'_>, group: &Name, author: &Principal) -> Result<Reply, ErrorReply> {
    let Some(record) = change.rows.group(group) else { return Ok(Reply::Done) };
    must_own(change, &record, author)?;
    for position in change.rows.positions(group) {
        let (group, event_type) = (group.clone(), position.event_type.clone());
        change.write(Write::RemovePosition { group, event_type });
    }
    change.write(Write::RemoveGroup { group: group.clone() });
    change.fact(Fact::GroupChanged(group.clone()));
    Ok(Reply::Done)
}

/// The next events for `member`: in each topic those that came back, then new ones, shared out
/// evenly among the topics while all of them have some.
pub(crate) fn hand_out(
    change: &mut Change<'_>,
    group: &Name,
    member: &Name,
    pull: PullId,
    max: u32,
    ack_wait_ms: u64,
) -> Result<Reply, ErrorReply> {
    let record = known(change, group)?;
    let positions = change.rows.positions(group);
    let said = said_before(&positions, pull);
    if said != HandedOut::default() {
        return Ok(Reply::HandedOut(said));
    }
    let now_ms = change.stamp.cluster_ms;
    let deliveries_max = change.rules().rules.events.deliveries_max;
    let own = |open: &&Open| open.member.as_ref() == Some(member) && open.due_ms > now_ms;
    let taken: u64 = positions
        .iter()
        .flat_map(|position| &position.open)
        .filter(own)
        .map(|open| open.to - open.from)
        .sum();
    let mut room = u64::from(max).min(EVENTS_MAX as u64).min(OPEN_MAX.saturating_sub(taken));

    let mut work: Vec<Work> = Vec::new();
    for topic in change.rows.topics().into_iter().filter(|topic| record.reads(&topic.event_type)) {
        let before = positions.iter().find(|position| position.event_type == topic.event_type).cloned();
        work.push(Work::new(group, topic, before, pull));
    }
    let given = Given { member, pull, due_ms: now_ms + ack_wait_ms, now_ms, deliveries_max };
    let mut left = work.len() as u64;
    // Those with little to give leave more for the others.
    work.sort_by_key(|work| work.ready(now_ms));
    for work in &mut work {
        room -= work.hand_out(&given, room.div_ceil(left));
        left -= 1;
    }
    work.sort_by(|a, b| a.topic.event_type.cmp(&b.topic.event_type));
    let mut all = HandedOut::default();
    for Work { topic, before, mut position, handed, dead } in work {
        for open in &dead {
            bury(change, &record, &topic.event_type, open, member::silence(open));
            position.dead += open.to - open.from;
        }
        if let Some((_, gap)) = position.gap.clone().filter(|(told, _)| *told == pull) {
            all.gaps.push((topic.event_type.clone(), gap));
        }
        let (event_type, of) = (&topic.event_type, |open: &Open| Handed {
            event_type: topic.event_type.clone(),
            from: open.from,
            to: open.to,
            deliveries: open.deliveries,
        });
        debug_assert_eq!(*event_type, position.event_type);
        all.spans.extend(handed.iter().map(of));
        if before.as_deref() != Some(&position) && (before.is_some() || position.next > topic.floor) {
            change.write(Write::PutPosition(Arc::new(position)));
        }
    }
    Ok(Reply::HandedOut(all))
}

/// What the same hand-out gave the first time, as far as it is still open.
fn said_before(positions: &[Arc<GroupPosition>], pull: PullId) -> HandedOut {
    let mut said = HandedOut::default();
    for position in positions {
        if let Some((_, gap)) = position.gap.as_ref().filter(|(told, _)| *told == pull) {
            said.gaps.push((position.event_type.clone(), gap.clone()));
        }
        for open in position.open.iter().filter(|open| open.pull == pull && open.member.is_some()) {
            let (event_type, deliveries) = (position.event_type.clone(), open.deliveries);
            said.spans.push(Handed { event_type, from: open.from, to: open.to, deliveries });
        }
    }
    said
}

struct Given<'a> {
    member: &'a Name,
    pull: PullId,
    due_ms: u64,
    now_ms: u64,
    deliveries_max: u32,
}

/// One topic of a hand-out.
struct Work {
    topic: Arc<TopicRecord>,
    before: Option<Arc<GroupPosition>>,
    position: GroupPosition,
    handed: Vec<Open>,
    /// Handed out as often as may be, and never done.
    dead: Vec<Open>,
}

impl Work {
    fn new(group: &Name, topic: Arc<TopicRecord>, before: Option<Arc<GroupPosition>>, pull: PullId) -> Self {
        let start = || GroupPosition::new(group.clone(), topic.event_type.clone(), topic.floor);
        let mut position = before.as_deref().cloned().unwrap_or_else(start);
        let lost_from = position.floor();
        if lost_from < topic.floor {
            // Retention was faster. One gap tells of all that was not done.
            position.change(&[Span { from: 0, to: topic.floor }], |_| None);
            position.next = position.next.max(topic.floor);
            position.gap = Some((pull, Gap { from: lost_from, to: topic.floor }));
        }
        Self { topic, before, position, handed: Vec::new(), dead: Vec::new() }
    }

    /// Events that could be handed out now.
    fn ready(&self, now_ms: u64) -> u64 {
        let due = self.position.open.iter().filter(|open| open.due_ms <= now_ms);
        due.map(|open| open.to - open.from).sum::<u64>() + (self.topic.next - self.position.next)
    }

    /// Hands out at most `max`, and returns how many.
    fn hand_out(&mut self, given: &Given<'_>, max: u64) -> u64 {
        let mut room = max;
        let mut open_now = Vec::with_capacity(self.position.open.len() + 1);
        for open in std::mem::take(&mut self.position.open) {
            if open.due_ms > given.now_ms {
                open_now.push(open);
                continue;
            }
            if open.deliveries >= given.deliveries_max {
                self.dead.push(open);
                continue;
            }
            let count = room.min(open.to - open.from);
            room -= count;
            let split = open.from + count;
            if count > 0 {
                let again = given.open(open.from, split, open.deliveries + 1);
                self.handed.push(again.clone());
                open_now.push(again);
            }
            if split < open.to {
                open_now.push(Open { from: split, ..open });
            }
        }
        let count = room.min(self.topic.next - self.position.next);
        if count > 0 {
            let new = given.open(self.position.next, self.position.next + count, 1);
            self.position.next = new.to;
            self.handed.push(new.clone());
            open_now.push(new);
            room -= count;
        }
        self.position.open = open_now;
        max - room
    }
}

impl Given<'_> {
    fn open(&self, from: u64, to: u64, deliveries: u32) -> Open {
        Open { from, to, member: Some(self.member.clone()), pull: self.pull, deliveries, due_ms: self.due_ms }
    }
}

/// What a member says. An ack counts whoever had the event last: done is done. Anything else counts only
/// for what this member still holds.
pub(crate) fn say(
    change: &mut Change<'_>,
    group: &Name,
    member: &Name,
    about: &[(EventType, Vec<Span>)],
    word: &Word,
) -> Result<Reply, ErrorReply> {
    let record = known(change, group)?;
    if let Word::Nack { delay_ms, cause } = word {
        if *delay_ms > DELAY_MAX_MS {
            let message = format!("delay_ms is {delay_ms}; it must be up to {DELAY_MAX_MS} (a day)");
            return Err(ErrorReply::invalid("delay_ms", message));
        }
        if cause.len() > CAUSE_MAX {
            return Err(ErrorReply::too_large("cause", cause.len(), CAUSE_MAX));
        }
    }
    let mut positions = Vec::new();
    for (event_type, spans) in about {
        let nothing = || GroupPosition::new(group.clone(), event_type.clone(), 0);
        let position = change.rows.position(group, event_type).map_or_else(nothing, |known| (*known).clone());
        if let Some(span) = spans.iter().find(|span| span.to > position.next) {
            let message = match position.next {
                0 => format!("group {group} was handed nothing of {event_type}"),
                next => format!(
                    "group {group} was not handed event {} of {event_type}: what it was handed ends at {}",
                    span.to - 1,
                    next - 1
                ),
            };
            let error = ErrorReply::new(Code::OffsetOutOfRange, message);
            return Err(ErrorReply { field: Some("offset".into()), ..error });
        }
        positions.push((position, spans));
    }
    let now_ms = change.stamp.cluster_ms;
    let rules = change.rules().rules.events.clone();
    let (mut changed, mut came_back) = (0, false);
    for (mut position, spans) in positions {
        let before = position.clone();
        let mut dead = Vec::new();
        let mut counted = 0;
        position.change(spans, |open| {
            let count = open.to - open.from;
            if *word == Word::Ack {
                counted += count;
                return None;
            }
            if open.member.as_ref() != Some(member) {
                return Some(open);
            }
            counted += count;
            let left = match word {
                Word::Ack => unreachable!("taken above"),
                Word::Extend => Open { due_ms: now_ms + rules.ack_wait_ms, ..open },
                Word::GiveBack => {
                    Open { deliveries: open.deliveries - 1, member: None, due_ms: now_ms, ..open }
                }
                Word::Nack { .. } if open.deliveries >= rules.deliveries_max => {
                    dead.push(open);
                    return None;
                }
                Word::Nack { delay_ms, .. } => Open { member: None, due_ms: now_ms + delay_ms, ..open },
            };
            came_back |= left.member.is_none();
            Some(left)
        });
        if let Word::Nack { cause, .. } = word {
            for open in &dead {
                bury(change, &record, &position.event_type, open, cause);
                position.dead += open.to - open.from;
            }
        }
        changed += counted;
        if position != before {
            change.write(Write::PutPosition(Arc::new(position)));
        }
    }
    if came_back {
        change.fact(Fact::GroupChanged(group.clone()));
    }
    Ok(Reply::Heard(changed))
}

/// The data of `dead.GROUP.v1`.
#[derive(Serialize)]
struct Dead<'a> {
    group: &'a Name,
    topic: &'a EventType,
    offset: u64,
    deliveries: u32,
    /// As the member said it.
    cause: &'a str,
    event: Json,
}

fn bury(change: &mut Change<'_>, record: &GroupRecord, event_type: &EventType, open: &Open, cause: &str) {
    for row in change.rows.events(event_type, open.from, open.to) {
        let data = Dead {
            group: &record.group,
            topic: event_type,
            offset: row.offset,
            deliveries: open.deliveries,
            cause,
            event: row.data.clone(),
        };
        change.append_row(event::Row {
            event_type: dead_letters(&record.group),
            msg_id: None,
            trace_id: row.trace_id,
            source: row.source,
            key: row.key,
            data: Json::of(&data).expect("it is plain data"),
        });
    }
}

fn shown(change: &Change<'_>, record: Arc<GroupRecord>) -> Reply {
    let positions =
        change.rows.positions(&record.group).iter().map(|position| (**position).clone()).collect();
    Reply::Group { record: Box::new((*record).clone()), positions }
}

fn known(change: &Change<'_>, group: &Name) -> Result<Arc<GroupRecord>, ErrorReply> {
    let unknown = || ErrorReply::new(Code::NotFound, format!("no group {group}: create it first"));
    change.rows.group(group).ok_or_else(unknown)
}

fn must_own(change: &Change<'_>, record: &GroupRecord, author: &Principal) -> Result<(), ErrorReply> {
    if record.author == *author || change.rules().rules.is_operator(author) {
        return Ok(());
    }
    let message =
        format!("{author} may not change group {}: it is neither its own nor an operator", record.group);
    Err(ErrorReply::new(Code::Forbidden, message))
}
