//! Topics and groups at a node: what is published goes to the log, what is read comes from the tables
//! here, and whoever waits for an event is woken when it has been applied.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    ops::Bound,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use reach_machine::Live;
use reach_protocol::{
    AgentId, Code, Command, Envelope, ErrorReply, EventRow, EventType, Fact, Json, MsgId, Name, Principal,
    Reply, Topics, TraceId,
    command::TRIM_MAX,
    event::{
        DeliveredEvent, EVENTS_BYTES_MAX, EVENTS_MAX, GroupPosition, GroupRecord, GroupView, HandedOut,
        MemberView, NewEvent, OPEN_MAX, PositionView, PullId, Span, Start, TopicRecord, Word,
    },
    frame::Answer,
};
use reach_raft::Step;
use tokio::{sync::Notify, time::Instant};

use super::{Shared, ingress::made, read::page};

/// Bytes of events in one answer, so that it stays below the largest frame.
const ANSWER_BYTES_MAX: usize = 3 << 20;
/// How often a member at its cap looks whether it may have more.
pub const AT_CAP_EVERY: Duration = Duration::from_millis(250);

/// How often topics are looked at for what they need not keep.
const RETAIN_EVERY: Duration = Duration::from_secs(5);

/// Who waits for what, at this node.
#[derive(Debug, Default)]
pub struct Bells(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    topics: HashMap<EventType, Arc<Notify>>,
    groups: HashMap<Name, (Topics, Arc<Notify>)>,
}

impl Bells {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().expect("no panic while it is held")
    }

    fn topic(&self, event_type: &EventType) -> Arc<Notify> {
        self.lock().topics.entry(event_type.clone()).or_default().clone()
    }

    /// The bell of a group, whether there is one already or not.
    pub fn named(&self, group: &Name, topics: &Topics) -> Arc<Notify> {
        let new = || (topics.clone(), Arc::default());
        let mut waiting = self.lock();
        let entry = waiting.groups.entry(group.clone()).or_insert_with(new);
        entry.0 = topics.clone();
        entry.1.clone()
    }

    /// Forgets the bells of groups that nobody holds any longer.
    pub fn tidy(&self) {
        self.lock().groups.retain(|_, (_, bell)| Arc::strong_count(bell) > 1);
    }

    /// Forgets the bell of a topic once nobody holds it any longer; `group_left` that of a group.
    fn topic_left(&self, event_type: &EventType) {
        let mut waiting = self.lock();
        if waiting.topics.get(event_type).is_some_and(|bell| Arc::strong_count(bell) == 1) {
            waiting.topics.remove(event_type);
        }
    }

    fn group_left(&self, group: &Name) {
        let mut waiting = self.lock();
        if waiting.groups.get(group).is_some_and(|(_, bell)| Arc::strong_count(bell) == 1) {
            waiting.groups.remove(group);
        }
    }

    /// Everybody who reads the topic, and one member of each group, who passes it on while there is more.
    fn appended(&self, event_type: &EventType) {
        let waiting = self.lock();
        if let Some(bell) = waiting.topics.get(event_type) {
            bell.notify_waiters();
        }
        for (_, bell) in waiting.groups.values().filter(|(topics, _)| topics.covers(event_type)) {
            bell.notify_one();
        }
    }

    fn group_changed(&self, group: &Name) {
        if let Some((_, bell)) = self.lock().groups.get(group) {
            bell.notify_one();
        }
    }

    fn all(&self) {
        let waiting = self.lock();
        waiting.topics.values().for_each(|bell| bell.notify_waiters());
        waiting.groups.values().for_each(|(_, bell)| bell.notify_one());
    }
}

pub async fn run(shared: Arc<Shared>) {
    let mut facts = shared.replica.facts().cursor();
    loop {
        match facts.next().await {
            Step::Facts(entry) => {
                let mut appended = BTreeSet::new();
                for fact in &entry.facts {
                    match fact {
                        Fact::Appended(event_type) => drop(appended.insert(event_type)),
                        Fact::GroupChanged(group) => shared.bells.group_changed(group),
                        _ => {}
                    }
                }
                appended.into_iter().for_each(|event_type| shared.bells.appended(event_type));
            }
            Step::Reset(_) => shared.bells.all(),
            Step::Closed => return,
        }
    }
}

/// While this node leads, topics that keep too much lose a part of it.
pub async fn retain(shared: Arc<Shared>) {
    let mut every = tokio::time::interval(RETAIN_EVERY);
    loop {
        every.tick().await;
        // As long as there is more to take: a step takes a part only.
        while shared.replica.leadership().borrow().leading {
            let looked = shared.clone();
            let overdue = tokio::task::spawn_blocking(move || looked.overdue());
            // A table that can't be read has ended the process.
            let Ok(Ok(commands)) = overdue.await else { return };
            let mut trimmed = 0;
            for command in commands {
                trimmed += u32::from(shared.propose(command, Instant::now() + RETAIN_EVERY).await.is_ok());
            }
            if trimmed == 0 {
                break;
            }
        }
    }
}

/// Whether a member would be given something now, and otherwise when to look again.
pub enum Outlook {
    Ready,
    AtCap,
    /// Cluster time at which the first open event is due.
    Later(Option<u64>),
}

pub fn outlook(live: &Live, record: &GroupRecord, member: &Name, now_ms: u64) -> Outlook {
    let positions = live.positions.get(&record.group);
    let open = || positions.into_iter().flat_map(|positions| positions.values()).flat_map(|row| &row.open);
    let held: u64 = open()
        .filter(|open| open.member.as_ref() == Some(member) && open.due_ms > now_ms)
        .map(|open| open.to - open.from)
        .sum();
    if held >= OPEN_MAX {
        return Outlook::AtCap;
    }
    let is_new = |topic: &&Arc<TopicRecord>| {
        let position = positions.and_then(|positions| positions.get(&topic.event_type));
        topic.next > position.map_or(topic.floor, |position| position.next)
            || position.is_some_and(|position| position.floor() < topic.floor)
    };
    let due = open().map(|open| open.due_ms).min();
    let topics = live.topics.values().filter(|topic| record.reads(&topic.event_type));
    match due {
        Some(due_ms) if due_ms <= now_ms => Outlook::Ready,
        due if topics.clone().any(|topic| is_new(&topic)) => {
            debug_assert!(due.is_none_or(|due_ms| due_ms > now_ms));
            Outlook::Ready
        }
        due => Outlook::Later(due),
    }
}

impl Shared {
    pub async fn publish(
        &self,
        principal: &Principal,
        envelopes: Vec<Envelope>,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        self.must_have_space()?;
        let many = envelopes.len() > 1;
        if envelopes.len() > EVENTS_MAX {
            let message = format!("{} events in one publication: give at most {EVENTS_MAX}", envelopes.len());
            return Err(ErrorReply {
                field: Some("events".into()),
                ..ErrorReply::new(Code::TooLarge, message)
            });
        }
        let (limits, mut bytes) = (self.limits(), 0);
        let mut events = Vec::with_capacity(envelopes.len());
        for (place, envelope) in envelopes.into_iter().enumerate() {
            let event =
                new_event(principal, envelope, &limits).map_err(|error| match error.field.clone() {
                    Some(field) if many => {
                        ErrorReply { field: Some(format!("events[{place}].{field}")), ..error }
                    }
                    _ => error,
                })?;
            bytes += event.data.as_str().len();
            events.push(event);
        }
        if bytes > EVENTS_BYTES_MAX && many {
            return Err(ErrorReply::too_large("events", bytes, EVENTS_BYTES_MAX));
        }
        let command = Command::Publish { events, author: principal.clone() };
        match self.propose(command, deadline).await? {
            Reply::Published(published) => Ok(Answer::Published(published)),
            _ => Err(unexpected()),
        }
    }

    /// Events of a topic from `from` on; waits for the first until `wait_until`.
    pub async fn read_events(
        &self,
        event_type: &EventType,
        from: Start,
        limit: u32,
        wait_until: Option<Instant>,
    ) -> Result<Answer, ErrorReply> {
        let from = self.offset_of(&*self.topic(event_type)?, from)?;
        let bell = self.bells.topic(event_type);
        let rows = loop {
            let rung = bell.notified();
            tokio::pin!(rung);
            rung.as_mut().enable();
            let topic = self.topic(event_type)?;
            if !(topic.floor..=topic.next).contains(&from) {
                return Err(topic.out_of_range(from));
            }
            let to = topic.next.min(from.saturating_add(page(limit) as u64));
            let rows = self.rows(event_type, from, to, ANSWER_BYTES_MAX)?;
            let until = wait_until.filter(|until| rows.is_empty() && Instant::now() < *until);
            let Some(until) = until else { break rows };
            let _ = tokio::time::timeout_at(until, rung).await;
        };
        drop(bell);
        self.bells.topic_left(event_type);
        let next = rows.last().map_or(from, |row| row.offset + 1);
        Ok(Answer::Events { items: rows, next, as_of: self.as_of() })
    }

    pub fn list_topics(&self, limit: u32, after: Option<&EventType>) -> Answer {
        let limit = page(limit);
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let live = self.replica.tables().live();
        let shown = live.topics.range::<EventType, _>((from, Bound::Unbounded)).map(|(_, topic)| topic);
        let mut items: Vec<TopicRecord> =
            shown.filter(|topic| !topic.removed).map(|topic| (**topic).clone()).take(limit + 1).collect();
        drop(live);
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(|topic| topic.event_type.clone());
        Answer::Topics { items, next, as_of: self.as_of() }
    }

    pub fn read_topic(&self, event_type: &EventType) -> Result<Answer, ErrorReply> {
        Ok(Answer::Topic(Box::new((*self.topic(event_type)?).clone())))
    }

    /// One entry for every `TRIM_MAX` events.
    pub async fn trim(
        &self,
        principal: &Principal,
        event_type: EventType,
        to: u64,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        loop {
            self.read_barrier(deadline).await?;
            let step = to.min(self.topic(&event_type)?.floor.saturating_add(TRIM_MAX));
            let author = Some(principal.clone());
            let command = Command::Trim { event_type: event_type.clone(), to: step, author };
            match self.propose(command, deadline).await? {
                Reply::Topic(topic) if topic.floor >= to => return Ok(Answer::Topic(topic)),
                Reply::Topic(_) => {}
                _ => return Err(unexpected()),
            }
        }
    }

    pub fn list_groups(&self, limit: u32, after: Option<&Name>) -> Result<Answer, ErrorReply> {
        let limit = page(limit);
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut groups: Vec<_> = {
            let live = self.replica.tables().live();
            live.groups
                .range::<Name, _>((from, Bound::Unbounded))
                .map(|(_, group)| group.clone())
                .take(limit + 1)
                .collect()
        };
        let more = groups.len() > limit;
        groups.truncate(limit);
        let next = groups.last().filter(|_| more).map(|group| group.group.clone());
        let items = groups.iter().map(|record| self.group_view(record)).collect::<Result<_, _>>()?;
        Ok(Answer::Groups { items, next, as_of: self.as_of() })
    }

    pub fn read_group(&self, group: &Name) -> Result<Answer, ErrorReply> {
        let record = self.group(group)?;
        let members = self.members_of(&record);
        Ok(Answer::Group(Box::new(GroupView { members, ..self.group_view(&record)? })))
    }

    fn members_of(&self, record: &GroupRecord) -> Vec<MemberView> {
        let live = self.replica.tables().live();
        let mut members: BTreeMap<Name, (bool, u64)> = BTreeMap::new();
        for agent in live.agents.values().filter(|agent| !agent.registration.subscriptions.is_empty()) {
            if agent.registration.groups().contains_key(&record.group) {
                members.insert(agent.agent_id().as_name(), (true, 0));
            }
        }
        let positions = live.positions.get(&record.group).into_iter().flat_map(BTreeMap::values);
        for open in positions.flat_map(|position| &position.open) {
            if let Some(member) = &open.member {
                members.entry(member.clone()).or_default().1 += open.to - open.from;
            }
        }
        let state = |member: &Name| {
            let agent = AgentId::parse(member).ok().and_then(|agent_id| live.agents.get(&agent_id));
            agent.map(|agent| agent.state)
        };
        let view = |(member, (subscribed, open)): (Name, (bool, u64))| MemberView {
            state: state(&member),
            member,
            subscribed,
            open,
        };
        members.into_iter().map(view).collect()
    }

    fn group_view(&self, record: &GroupRecord) -> Result<GroupView, ErrorReply> {
        // Topics it has not come to yet have their events before it as well.
        let rows: Vec<(Arc<TopicRecord>, GroupPosition)> = {
            let live = self.replica.tables().live();
            let topics = live.topics.values();
            topics
                .filter(|topic| record.reads(&topic.event_type) && !topic.removed)
                .map(|topic| {
                    let positions = live.positions.get(&record.group);
                    let known = positions.and_then(|positions| positions.get(&topic.event_type));
                    let (group, event_type) = (record.group.clone(), topic.event_type.clone());
                    let fresh = || GroupPosition::new(group, event_type, topic.floor);
                    (topic.clone(), known.map_or_else(fresh, |known| (**known).clone()))
                })
                .collect()
        };
        let mut positions = Vec::with_capacity(rows.len());
        for (topic, position) in rows {
            let floor = position.floor().max(topic.floor);
            let oldest = self.rows(&topic.event_type, floor, floor + 1, 1)?.first().map(|row| row.at);
            positions.push(PositionView { lag: position.lag(&topic), position, oldest });
        }
        Ok(GroupView { record: record.clone(), positions, members: Vec::new() })
    }

    pub async fn create_group(
        &self,
        principal: &Principal,
        group: Name,
        topics: Topics,
        from: Start,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        self.read_barrier(deadline).await?;
        let (author, created) = (principal.clone(), self.as_of());
        let record = GroupRecord { group: group.clone(), topics: topics.clone(), author, created, resets: 0 };
        let starts = self.starts(&record, from)?;
        let author = principal.clone();
        let command = Command::CreateGroup { group: group.clone(), topics, starts, author };
        self.propose(command, deadline).await?;
        self.read_barrier(deadline).await?;
        self.read_group(&group)
    }

    pub async fn reset_group(
        &self,
        principal: &Principal,
        group: Name,
        from: Start,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        self.read_barrier(deadline).await?;
        let record = self.group(&group)?;
        let (resets, starts) = (record.resets, self.starts(&record, from)?);
        let command = Command::ResetGroup { group: group.clone(), resets, starts, author: principal.clone() };
        self.propose(command, deadline).await?;
        self.read_barrier(deadline).await?;
        self.read_group(&group)
    }

    pub async fn remove_group(
        &self,
        principal: &Principal,
        group: Name,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        self.read_barrier(deadline).await?;
        self.group(&group)?;
        let command = Command::RemoveGroup { group, author: principal.clone() };
        self.propose(command, deadline).await.map(|_| Answer::Done)
    }

    /// Where a group begins in the topics that exist.
    fn starts(&self, record: &GroupRecord, from: Start) -> Result<Vec<(EventType, u64)>, ErrorReply> {
        let topics: Vec<_> = {
            let live = self.replica.tables().live();
            let topics = live.topics.values().filter(|topic| !topic.removed);
            topics.filter(|topic| record.reads(&topic.event_type)).cloned().collect()
        };
        if let Start::Offset(_) = from
            && topics.len() != 1
        {
            let message = format!(
                "an offset is a place in one topic, and {} names {}: give earliest, latest or a time",
                record.topics,
                topics.len()
            );
            return Err(ErrorReply::invalid("from", message));
        }
        topics.iter().map(|topic| Ok((topic.event_type.clone(), self.offset_of(topic, from)?))).collect()
    }

    /// The next events for `member`, or none until `wait_until`.
    pub async fn pull(
        &self,
        principal: &Principal,
        (group, member, pull): (Name, Name, PullId),
        max: u32,
        wait_until: Option<Instant>,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        must_be_member(principal, &member)?;
        if max == 0 || max as usize > EVENTS_MAX {
            return Err(ErrorReply::invalid("max", format!("max must be from 1 to {EVENTS_MAX}")));
        }
        self.read_barrier(deadline).await?;
        let wait_until = wait_until.unwrap_or_else(Instant::now);
        let ack_wait_ms = self.rules().rules.events.ack_wait_ms;
        let record = self.group(&group)?;
        let bell = self.bells.named(&group, &record.topics);
        let handed = loop {
            let rung = bell.notified();
            tokio::pin!(rung);
            rung.as_mut().enable();
            let record = self.group(&group)?;
            let now_ms = self.clock.cluster_ms();
            let outlook = outlook(&self.replica.tables().live(), &record, &member, now_ms);
            if let Outlook::Ready = outlook {
                let (group, member) = (group.clone(), member.clone());
                let command = Command::HandOut { group, member, pull, max, ack_wait_ms };
                let until = deadline.max(wait_until + Duration::from_secs(1));
                let Reply::HandedOut(handed) = self.propose(command, until).await? else {
                    return Err(unexpected());
                };
                // There may be more, for others.
                bell.notify_one();
                if handed != HandedOut::default() {
                    break handed;
                }
            }
            if Instant::now() >= wait_until {
                break HandedOut::default();
            }
            match outlook {
                // Somebody else was faster; what is applied meanwhile says how it stands.
                Outlook::Ready => {
                    let mut applied = self.replica.applied();
                    applied.mark_unchanged();
                    let soon = wait_until.min(Instant::now() + Duration::from_millis(10));
                    let _ = tokio::time::timeout_at(soon, applied.changed()).await;
                }
                Outlook::AtCap => {
                    // Whoever rings means somebody with room.
                    tokio::time::sleep_until(wait_until.min(Instant::now() + AT_CAP_EVERY)).await;
                }
                Outlook::Later(due_ms) => {
                    let due = due_ms.map(|due_ms| {
                        Instant::now() + Duration::from_millis(due_ms.saturating_sub(now_ms).max(1))
                    });
                    let until = due.map_or(wait_until, |due| due.min(wait_until));
                    let _ = tokio::time::timeout_at(until, rung).await;
                }
            }
        };
        drop(bell);
        self.bells.group_left(&group);
        self.handed(group, member, handed, deadline).await
    }

    /// The events of a hand-out, as many as fit; the rest goes back at once.
    async fn handed(
        &self,
        group: Name,
        member: Name,
        handed: HandedOut,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        let (mut events, mut bytes) = (Vec::new(), 0);
        let mut back: Vec<(EventType, Vec<Span>)> = Vec::new();
        for span in handed.spans {
            let room = ANSWER_BYTES_MAX.saturating_sub(bytes);
            let mut rows = match room {
                0 => Vec::new(),
                room => self.rows(&span.event_type, span.from, span.to, room)?,
            };
            let read: usize = rows.iter().map(|row| row.data.as_str().len() + 256).sum();
            if !events.is_empty() && read > room {
                rows.clear();
            } else {
                bytes += read;
            }
            // What retention took meanwhile has no row, and does not come back.
            let from = match rows.last() {
                Some(last) => last.offset + 1,
                None => self.topic(&span.event_type)?.floor.max(span.from),
            };
            if from < span.to {
                bytes = ANSWER_BYTES_MAX;
                back.push((span.event_type.clone(), vec![Span { from, to: span.to }]));
            }
            let deliveries = span.deliveries;
            events.extend(rows.into_iter().map(|event| DeliveredEvent { event, deliveries }));
        }
        if !back.is_empty() {
            let command = Command::Say { group, member, about: back, word: Word::GiveBack };
            self.propose(command, deadline.max(Instant::now() + Duration::from_secs(2))).await?;
        }
        Ok(Answer::Pulled { events, gaps: handed.gaps })
    }

    pub async fn say(
        &self,
        principal: &Principal,
        command: Command,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        let Command::Say { group, member, about, word } = &command else { return Err(unexpected()) };
        must_be_member(principal, member)?;
        match self.propose(command.clone(), deadline).await? {
            Reply::Heard(changed) => {
                let ack_wait = Duration::from_millis(self.rules().rules.events.ack_wait_ms);
                self.windows.said(group, member, about, word, ack_wait);
                Ok(Answer::Heard(changed))
            }
            _ => Err(unexpected()),
        }
    }

    fn topic(&self, event_type: &EventType) -> Result<Arc<TopicRecord>, ErrorReply> {
        let found = self.replica.tables().live().topics.get(event_type).cloned();
        found.filter(|topic| !topic.removed).ok_or_else(|| {
            let message = format!("no topic {event_type}: nothing has been published under this type");
            ErrorReply::new(Code::NotFound, message)
        })
    }

    fn group(&self, group: &Name) -> Result<Arc<GroupRecord>, ErrorReply> {
        self.replica.tables().live().groups.get(group).cloned().ok_or_else(|| {
            let message = format!("no group {group}: `groups create {group} --topic TYPE` makes it");
            ErrorReply::new(Code::NotFound, message)
        })
    }

    pub fn rows(
        &self,
        event_type: &EventType,
        from: u64,
        to: u64,
        bytes_max: usize,
    ) -> Result<Vec<EventRow>, ErrorReply> {
        let rows = self.replica.tables().events(event_type, from, to, bytes_max);
        rows.map_err(|error| self.damaged(&error))
    }

    fn offset_of(&self, topic: &TopicRecord, from: Start) -> Result<u64, ErrorReply> {
        match from {
            Start::Earliest => Ok(topic.floor),
            Start::Latest => Ok(topic.next),
            Start::Offset(offset) if (topic.floor..=topic.next).contains(&offset) => Ok(offset),
            Start::Offset(offset) => Err(topic.out_of_range(offset)),
            Start::At(wall_ms) => self.first_offset(topic, |row| row.at.wall_ms >= wall_ms),
        }
    }

    /// The first kept event for which `is` holds, as it then does for all after it.
    fn first_offset(&self, topic: &TopicRecord, is: impl Fn(&EventRow) -> bool) -> Result<u64, ErrorReply> {
        let (mut low, mut high) = (topic.floor, topic.next);
        while low < high {
            let middle = low + (high - low) / 2;
            // One that was trimmed meanwhile lies before.
            match self.rows(&topic.event_type, middle, middle + 1, 1)?.first() {
                Some(row) if is(row) => high = middle,
                _ => low = middle + 1,
            }
        }
        Ok(low)
    }

    /// What retention takes now: one step for each topic that keeps too much.
    fn overdue(&self) -> Result<Vec<Command>, ErrorReply> {
        let (rules, topics) = {
            let live = self.replica.tables().live();
            (live.rules.rules.events.clone(), live.topics.values().cloned().collect::<Vec<_>>())
        };
        let now_ms = self.clock.stamp().wall_ms;
        let mut commands = Vec::new();
        for topic in topics.iter().filter(|topic| topic.floor < topic.next) {
            let born_before = now_ms.saturating_sub(topic.max_age_ms.unwrap_or(rules.max_age_ms));
            let bytes_from = topic.bytes.saturating_sub(topic.max_bytes.unwrap_or(rules.max_bytes));
            let first = self.rows(&topic.event_type, topic.floor, topic.floor + 1, 1)?;
            let keeps = |row: &EventRow| row.at.wall_ms >= born_before && row.bytes_before >= bytes_from;
            if first.first().is_none_or(keeps) {
                continue;
            }
            let to = self.first_offset(topic, keeps)?.min(topic.floor + TRIM_MAX);
            commands.push(Command::Trim { event_type: topic.event_type.clone(), to, author: None });
        }
        Ok(commands)
    }
}

fn new_event(
    principal: &Principal,
    envelope: Envelope,
    limits: &reach_protocol::Limits,
) -> Result<NewEvent, ErrorReply> {
    let event_type = envelope.validate_event(limits)?;
    let source = envelope.source.as_ref().map(|source| source.agent_id.clone());
    let source = source.unwrap_or_else(|| principal.own_agent_id());
    if !principal.acts_for(&source) {
        let message = format!(
            "{principal} may not publish as {source}: leave source out, or use that agent's certificate"
        );
        let error = ErrorReply::new(Code::Forbidden, message);
        return Err(ErrorReply { field: Some("source.agent_id".into()), ..error });
    }
    // Before ids are filled in: a repeat hashes what its publisher wrote.
    let content_hash = envelope.content_hash();
    Ok(NewEvent {
        msg_id: envelope.msg_id.unwrap_or_else(|| made("m_", MsgId::parse)),
        trace_id: envelope.trace_id.unwrap_or_else(|| made("t_", TraceId::parse)),
        event_type,
        source,
        key: envelope.key,
        content_hash,
        data: envelope.payload.unwrap_or_else(Json::null),
    })
}

/// An agent is a member under its own id; a user may name its members.
fn must_be_member(principal: &Principal, member: &Name) -> Result<(), ErrorReply> {
    let is = match principal {
        Principal::User(_) | Principal::Loopback => true,
        Principal::Agent(_) | Principal::Host(_) => {
            AgentId::parse(member).is_ok_and(|agent_id| principal.acts_for(&agent_id))
        }
        Principal::Node(_) => false,
    };
    if is {
        return Ok(());
    }
    let message = format!("{principal} may not be member {member}: an agent is a member under its own id");
    Err(ErrorReply { field: Some("member".into()), ..ErrorReply::new(Code::Forbidden, message) })
}

fn unexpected() -> ErrorReply {
    ErrorReply::new(Code::Internal, "the log answered with something else")
}
