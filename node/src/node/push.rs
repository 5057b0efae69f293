//! Pushes events to the agents whose sessions this node holds: for each a task that hands out what the
//! agent's groups have, as far as it has room, and sends it over the session's link. What a session was
//! sent and has not answered is its window; at its end nothing more is asked for, so that who reads
//! slowly costs no memory.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use futures_util::future::select_all;
use reach_protocol::{
    AgentId, AgentState, Code, Command, EventType, InstanceId, Name, Reply,
    event::{DeliveredEvent, Handed, PullId, Span, TopicRecord, Word},
    frame::NodeFrame,
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until, timeout_at},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use ulid::Ulid;

use super::{
    Shared,
    delivery::Line,
    events::{AT_CAP_EVERY, Outlook, outlook},
};

/// Events that one session may have unanswered.
const WINDOW_MAX: u32 = 100;
/// Events of one hand-out: few, so that the members of a group share what comes.
const AT_ONCE_MAX: usize = 20;
/// Bytes that a session may have unanswered, besides a single event that is larger.
const UNANSWERED_BYTES_MAX: usize = 512 << 10;
/// Bytes of events in one frame. A longer frame takes a stream of its own and may be overtaken: a larger
/// event goes alone, with nothing before it or behind it on the way.
const FRAME_BYTES_MAX: usize = 32 << 10;
/// What an event weighs besides its content.
const EVENT_BYTES: usize = 256;
/// How long one proposal is waited for before it is made again.
const PROPOSAL_MAX: Duration = Duration::from_secs(5);
/// Before a full line is tried again, and a proposal that was not taken.
const AGAIN_AFTER: Duration = Duration::from_millis(50);
/// How long the tables here may be behind the leader's answer.
const BEHIND_MAX: Duration = Duration::from_secs(2);

/// The windows of the sessions here, by member.
#[derive(Debug, Default)]
pub struct Windows(Mutex<HashMap<Name, Arc<Window>>>);

impl Windows {
    fn lock(&self) -> MutexGuard<'_, HashMap<Name, Arc<Window>>> {
        self.0.lock().expect("no panic while it is held")
    }

    /// A member has said what it thinks of these.
    pub fn said(
        &self,
        group: &Name,
        member: &Name,
        about: &[(EventType, Vec<Span>)],
        word: &Word,
        ack_wait: Duration,
    ) {
        if let Some(window) = self.lock().get(member).cloned() {
            window.said(group, about, word, ack_wait);
        }
    }
}

/// What one session was sent and has not answered.
#[derive(Debug, Default)]
pub struct Window {
    sent: Mutex<BTreeMap<(Name, EventType, u64), Sent>>,
    /// There may be room, or the agent is another.
    changed: Notify,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    bytes: usize,
    /// By then its ack wait is over.
    until: Instant,
}

impl Window {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(Name, EventType, u64), Sent>> {
        self.sent.lock().expect("no panic while it is held")
    }

    pub fn look_again(&self) {
        self.changed.notify_one();
    }

    fn said(&self, group: &Name, about: &[(EventType, Vec<Span>)], word: &Word, ack_wait: Duration) {
        let until = Instant::now() + ack_wait;
        self.lock().retain(|(of, event_type, offset), sent| {
            let names = |span: &Span| (span.from..span.to).contains(offset);
            let is_meant = of == group
                && about.iter().any(|(topic, spans)| topic == event_type && spans.iter().any(names));
            if is_meant && *word == Word::Extend {
                sent.until = until;
            }
            !is_meant || *word == Word::Extend
        });
        self.changed.notify_one();
    }

    /// How many are unanswered, and their bytes, without those whose time is over.
    fn unanswered(&self) -> (usize, usize) {
        let now = Instant::now();
        let mut sent = self.lock();
        sent.retain(|_, sent| sent.until > now);
        (sent.len(), sent.values().map(|sent| sent.bytes).sum())
    }

    fn first_lapses(&self) -> Option<Instant> {
        self.lock().values().map(|sent| sent.until).min()
    }
}

/// The push of one session; it ends when this is dropped.
#[derive(Debug)]
pub struct Push {
    pub window: Arc<Window>,
    _stop: DropGuard,
}

impl Push {
    /// None for an agent that takes no events over its link.
    pub fn start(
        shared: &Arc<Shared>,
        agent_id: &AgentId,
        instance: &InstanceId,
        line: &Line,
        window: u32,
    ) -> Option<Self> {
        let events_max = window.min(WINDOW_MAX) as usize;
        if events_max == 0 {
            return None;
        }
        let window = Arc::<Window>::default();
        let stop = CancellationToken::new();
        let mut session = Session {
            shared: shared.clone(),
            agent_id: agent_id.clone(),
            instance: instance.clone(),
            member: agent_id.as_name(),
            line: line.clone(),
            events_max,
            window: window.clone(),
            waiting: VecDeque::new(),
            first: 0,
        };
        shared.windows.lock().insert(session.member.clone(), window.clone());
        let stopped = stop.clone();
        shared.clone().spawn(async move {
            stopped.run_until_cancelled(session.run()).await;
            session.end().await;
        });
        Some(Self { window, _stop: stop.drop_guard() })
    }
}

struct Session {
    shared: Arc<Shared>,
    agent_id: AgentId,
    instance: InstanceId,
    member: Name,
    line: Line,
    events_max: usize,
    window: Arc<Window>,
    /// Handed out and not yet sent.
    waiting: VecDeque<Waiting>,
    /// Which of its groups is looked at first.
    first: usize,
}

/// A part of a hand-out that still has to be sent.
struct Waiting {
    group: Name,
    handed: Handed,
    ack_wait: Duration,
    at: Instant,
    /// Bytes of its first frame, once it has been read and was too large to go.
    bytes: usize,
}

impl Session {
    async fn run(&mut self) {
        // A bell that rang for this session, and that another member may have to hear.
        let mut heard: Option<Arc<Notify>> = None;
        loop {
            let Some(record) = self.shared.replica.tables().live().agents.get(&self.agent_id).cloned() else {
                return;
            };
            if record.instance != self.instance {
                return;
            }
            self.send_waiting().await;
            let (unanswered, _) = self.window.unanswered();
            let room = self.events_max.saturating_sub(unanswered);
            if record.state != AgentState::Ready || !self.waiting.is_empty() || room == 0 {
                if let Some(bell) = heard.take() {
                    bell.notify_one();
                }
                self.wait(None).await;
                continue;
            }
            let groups: Vec<_> = record.registration.groups().into_iter().collect();
            let bells: Vec<_> =
                groups.iter().map(|(group, topics)| self.shared.bells.named(group, topics)).collect();
            let mut rung: Vec<_> = bells.iter().map(|bell| Box::pin(bell.notified())).collect();
            // Before the look, so that what comes after it is heard.
            rung.iter_mut().for_each(|rung| {
                rung.as_mut().enable();
            });
            let (mut took, mut look_at) = (false, None::<Instant>);
            for nth in 0..groups.len() {
                let place = (self.first + nth) % groups.len();
                let (group, _) = &groups[place];
                match self.outlook(group) {
                    None => {}
                    Some(Outlook::Ready) => {
                        took = self.take(group, room.min(AT_ONCE_MAX)).await;
                        if took {
                            self.first = place + 1;
                            // There may be more, for others.
                            bells[place].notify_one();
                            break;
                        }
                        // Somebody else was faster; what is applied meanwhile says how it stands.
                        let soon = Instant::now() + Duration::from_millis(10);
                        look_at = Some(look_at.map_or(soon, |at| at.min(soon)));
                    }
                    Some(Outlook::AtCap) => {
                        let at = Instant::now() + AT_CAP_EVERY;
                        look_at = Some(look_at.map_or(at, |before| before.min(at)));
                    }
                    Some(Outlook::Later(due)) => {
                        let due = due.map(|due_ms| {
                            let in_ms = due_ms.saturating_sub(self.shared.clock.cluster_ms()).max(1);
                            Instant::now() + Duration::from_millis(in_ms)
                        });
                        look_at = look_at.into_iter().chain(due).min();
                    }
                }
            }
            heard = None;
            if took {
                continue;
            }
            if rung.is_empty() {
                self.wait(look_at).await;
                continue;
            }
            tokio::select! {
                (_, place, _) = select_all(rung) => heard = Some(bells[place].clone()),
                () = self.wait(look_at) => {}
            }
        }
    }

    /// Until the window or the agent has changed, an event's time is over, or `until`.
    async fn wait(&self, until: Option<Instant>) {
        let unsent = self.waiting.front().map(|waiting| waiting.given_back_at());
        let first = until.into_iter().chain(self.window.first_lapses()).chain(unsent).min();
        match first {
            Some(at) => drop(timeout_at(at, self.window.changed.notified()).await),
            None => self.window.changed.notified().await,
        }
    }

    fn outlook(&self, group: &Name) -> Option<Outlook> {
        let live = self.shared.replica.tables().live();
        let record = live.groups.get(group)?;
        Some(outlook(&live, record, &self.member, self.shared.clock.cluster_ms()))
    }

    /// Has the next events handed out; false when there were none.
    async fn take(&mut self, group: &Name, max: usize) -> bool {
        // One name for every try, so that none is handed out twice.
        let pull: PullId = Ulid::generate().into();
        let ack_wait_ms = self.shared.rules().rules.events.ack_wait_ms;
        let at = Instant::now();
        let command = Command::HandOut {
            group: group.clone(),
            member: self.member.clone(),
            pull,
            max: max as u32,
            ack_wait_ms,
        };
        let handed = loop {
            match self.shared.propose(command.clone(), Instant::now() + PROPOSAL_MAX).await {
                Ok(Reply::HandedOut(handed)) => break handed,
                Ok(_) => return false,
                Err(error) if error.retryable || error.code == Code::OutcomeUnknown => {
                    sleep(AGAIN_AFTER).await;
                }
                // The group is gone.
                Err(_) => return false,
            }
        };
        for (event_type, gap) in &handed.gaps {
            tracing::info!(%group, %event_type, from = gap.from, to = gap.to, "events were trimmed before they were done");
        }
        let ack_wait = Duration::from_millis(ack_wait_ms);
        let took = !handed.spans.is_empty();
        for handed in handed.spans {
            self.applied(&handed).await;
            self.waiting.push_back(Waiting { group: group.clone(), handed, ack_wait, at, bytes: 0 });
        }
        took
    }

    /// The leader's answer may be ahead of the tables here.
    async fn applied(&self, handed: &Handed) {
        let mut applied = self.shared.replica.applied();
        let until = Instant::now() + BEHIND_MAX;
        loop {
            applied.mark_unchanged();
            let next = |topic: &Arc<TopicRecord>| topic.next;
            let known = self.shared.replica.tables().live().topics.get(&handed.event_type).map(next);
            if known.is_some_and(|next| next >= handed.to)
                || timeout_at(until, applied.changed()).await.is_err()
            {
                return;
            }
        }
    }

    /// Sends what was handed out as far as there is room. What does not find any goes back.
    async fn send_waiting(&mut self) {
        while let Some(mut waiting) = self.waiting.pop_front() {
            if Instant::now() >= waiting.given_back_at() {
                self.give_back(&waiting).await;
                continue;
            }
            if !self.has_room(waiting.bytes) {
                self.waiting.push_front(waiting);
                return;
            }
            let Handed { event_type, from, to, deliveries } = waiting.handed.clone();
            let Ok(mut rows) = self.shared.rows(&event_type, from, to, FRAME_BYTES_MAX) else { return };
            let mut bytes = 0;
            let fits = rows.iter().take_while(|row| {
                bytes += row.data.as_str().len() + EVENT_BYTES;
                bytes <= FRAME_BYTES_MAX
            });
            let count = fits.count().max(1);
            rows.truncate(count);
            let Some(last) = rows.last() else {
                // Retention took them, or this node is too far behind: then they go back.
                let floor = |topic: &Arc<TopicRecord>| topic.floor;
                let floor = self.shared.replica.tables().live().topics.get(&event_type).map_or(0, floor);
                waiting.handed.from = from.max(floor);
                if waiting.handed.from < to {
                    self.give_back(&waiting).await;
                }
                continue;
            };
            waiting.handed.from = last.offset + 1;
            let weights = rows.iter().map(|row| (row.offset, row.data.as_str().len() + EVENT_BYTES));
            let weights: Vec<(u64, usize)> = weights.collect();
            let bytes = weights.iter().map(|(_, bytes)| bytes).sum();
            if !self.has_room(bytes) {
                waiting.handed.from = from;
                waiting.bytes = bytes;
                self.waiting.push_front(waiting);
                return;
            }
            let events = rows.into_iter().map(|event| DeliveredEvent { event, deliveries }).collect();
            let frame = NodeFrame::Events {
                agent_id: self.agent_id.clone(),
                group: waiting.group.clone(),
                ack_wait_ms: waiting.ack_wait.as_millis() as u64,
                events,
            };
            let until = waiting.at + waiting.ack_wait;
            // Before it goes: the answer may be faster than we are.
            for (offset, bytes) in &weights {
                let place = (waiting.group.clone(), event_type.clone(), *offset);
                self.window.lock().insert(place, Sent { bytes: *bytes, until });
            }
            let is_sent = self.line.send(&frame);
            if !is_sent {
                for (offset, _) in weights {
                    self.window.lock().remove(&(waiting.group.clone(), event_type.clone(), offset));
                }
                waiting.handed.from = from;
            }
            waiting.bytes = 0;
            if waiting.handed.from < to {
                self.waiting.push_front(waiting);
            }
            if !is_sent {
                // A line that stays full is closed by those who wait for their answers.
                sleep_until(Instant::now() + AGAIN_AFTER).await;
            }
        }
    }

    /// Whether a frame of so many bytes may go now.
    fn has_room(&self, bytes: usize) -> bool {
        let (_, unanswered_bytes) = self.window.unanswered();
        unanswered_bytes == 0
            || bytes <= FRAME_BYTES_MAX
                && unanswered_bytes + bytes <= UNANSWERED_BYTES_MAX
                && self.window.lock().values().all(|sent| sent.bytes <= FRAME_BYTES_MAX)
    }

    async fn give_back(&self, waiting: &Waiting) {
        let Handed { event_type, from, to, .. } = &waiting.handed;
        let about = vec![(event_type.clone(), vec![Span { from: *from, to: *to }])];
        let (group, member) = (waiting.group.clone(), self.member.clone());
        let command = Command::Say { group, member, about, word: Word::GiveBack };
        // Where it fails, the ack wait does the same.
        let _ = self.shared.propose(command, Instant::now() + PROPOSAL_MAX).await;
    }

    async fn end(mut self) {
        {
            // The next session of this agent has a window of its own.
            let mut windows = self.shared.windows.lock();
            if windows.get(&self.member).is_some_and(|window| Arc::ptr_eq(window, &self.window)) {
                windows.remove(&self.member);
            }
        }
        while let Some(waiting) = self.waiting.pop_front() {
            self.give_back(&waiting).await;
        }
        self.shared.bells.tidy();
    }
}

impl Waiting {
    /// Not sent by then, others may have it: early enough for the next one's ack wait to be whole.
    fn given_back_at(&self) -> Instant {
        self.at + self.ack_wait / 2
    }
}
