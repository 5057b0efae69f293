//! Events that the cluster hands to an agent over its session: runs the agent's handler on each, so many
//! at once, and says what became of it. What has not begun goes back when the agent is leaving, or when
//! half of its ack wait is over, so that another member may have it.

use std::{
    collections::{BTreeMap, VecDeque},
    fmt,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt, future::BoxFuture};
use reach_protocol::{
    AgentId, Envelope, EventType, Name, TraceId,
    envelope::Response,
    event::{DeliveredEvent, Published, Span, Word},
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tracing::{Instrument, debug, error, info_span};

use crate::{
    client::{Client, Submitted},
    consumer::Consumer,
    error::Error,
    task::{Failure, cut},
};

pub(crate) type Handler =
    Arc<dyn Fn(DeliveredEvent, EventContext) -> BoxFuture<'static, Result<(), Failure>> + Send + Sync>;

/// The longest text of an error that goes with an event, in bytes.
const CAUSE_MAX: usize = 1 << 10;
/// Events that an agent may have unanswered, at most.
const WINDOW_MAX: usize = 100;

/// An agent's handler of events, and how many of them run at once.
#[derive(Clone)]
pub(crate) struct Declared {
    pub(crate) handler: Handler,
    pub(crate) concurrency: usize,
}

impl Declared {
    /// Those that run, and as many more as hide the way.
    pub(crate) fn window(&self) -> usize {
        (2 * self.concurrency).min(WINDOW_MAX)
    }
}

/// What a handler of events is told besides the event, and what it asks the cluster by.
#[derive(Clone)]
pub struct EventContext {
    group: Name,
    trace_id: Option<TraceId>,
    client: Client,
}

impl EventContext {
    /// The group that handed the event out.
    pub fn group(&self) -> &Name {
        &self.group
    }

    /// The agent's own client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// As [`Client::submit`], in the event's trace unless the envelope names another.
    pub async fn submit(&self, envelope: Envelope) -> Result<Submitted, Error> {
        self.client.submit(self.traced(envelope)).await
    }

    /// As [`Client::call`], in the event's trace unless the envelope names another.
    pub async fn call(&self, envelope: Envelope, timeout: Duration) -> Result<Response, Error> {
        self.client.call(self.traced(envelope), timeout).await
    }

    /// As [`Client::publish`], in the event's trace unless an envelope names another.
    pub async fn publish(&self, events: Vec<Envelope>) -> Result<Vec<Published>, Error> {
        let events = events.into_iter().map(|envelope| self.traced(envelope)).collect();
        self.client.publish(events).await
    }

    fn traced(&self, envelope: Envelope) -> Envelope {
        Envelope { trace_id: envelope.trace_id.or_else(|| self.trace_id.clone()), ..envelope }
    }
}

impl fmt::Debug for EventContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventContext")
            .field("group", &self.group)
            .field("trace_id", &self.trace_id)
            .finish_non_exhaustive()
    }
}

/// Events of one frame.
pub(crate) struct Arrived {
    pub(crate) group: Name,
    pub(crate) ack_wait: Duration,
    pub(crate) events: Vec<DeliveredEvent>,
}

/// The session's end of it. Dropped, the handlers end.
pub(crate) struct Door {
    arrivals: mpsc::Sender<Arrived>,
    takes: watch::Sender<bool>,
    /// Events and words that are still on their way.
    busy: watch::Receiver<usize>,
    pub(crate) window: u32,
}

/// The handlers' end of it.
pub(crate) struct Queue {
    arrivals: mpsc::Receiver<Arrived>,
    takes: watch::Receiver<bool>,
    busy: watch::Sender<usize>,
}

pub(crate) fn door(window: usize) -> (Door, Queue) {
    // No frame is empty, so that there are no more of them than events.
    let (arrivals, arriving) = mpsc::channel(2 * window);
    let (takes, taking) = watch::channel(true);
    let (busy, is_busy) = watch::channel(0);
    let door = Door { arrivals, takes, busy: is_busy, window: window as u32 };
    (door, Queue { arrivals: arriving, takes: taking, busy })
}

impl Door {
    /// What finds no room comes again when its ack wait is over.
    pub(crate) fn take(&self, arrived: Arrived) {
        if self.arrivals.try_send(arrived).is_err() {
            debug!("events were not taken: they come again");
        }
    }

    /// Nothing begins any more; what has not begun goes back.
    pub(crate) fn drain(&self) {
        self.takes.send_replace(false);
    }

    pub(crate) fn is_idle(&self) -> bool {
        *self.busy.borrow() == 0 || self.busy.has_changed().is_err()
    }

    pub(crate) async fn changed(&mut self) {
        if self.busy.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Ends the handlers and waits until they are gone.
    pub(crate) async fn close(self) {
        let Self { arrivals, mut busy, .. } = self;
        drop(arrivals);
        while busy.changed().await.is_ok() {}
    }
}

type Place = (Name, EventType, u64);

struct Held {
    /// Until its handler is started.
    event: Option<DeliveredEvent>,
    deliveries: u32,
    ack_wait: Duration,
    /// When its ack wait began.
    since: Instant,
}

struct Desk {
    declared: Declared,
    client: Client,
    member: Name,
    takes: bool,
    held: BTreeMap<Place, Held>,
    /// Those that have not begun, in the order in which they came.
    queue: VecDeque<Place>,
    running: JoinSet<(Place, Result<(), Failure>)>,
    done: BTreeMap<Name, BTreeMap<EventType, Vec<u64>>>,
    /// Words on their way; `true`: acks, of which one lot goes at a time so that the next is larger.
    saying: JoinSet<bool>,
    acking: bool,
}

/// Runs until the session lets go of its end.
pub(crate) async fn run(declared: Declared, client: Client, agent_id: AgentId, queue: Queue) {
    let Queue { mut arrivals, mut takes, busy } = queue;
    let mut desk = Desk {
        declared,
        client,
        member: agent_id.as_name(),
        takes: true,
        held: BTreeMap::new(),
        queue: VecDeque::new(),
        running: JoinSet::new(),
        done: BTreeMap::new(),
        saying: JoinSet::new(),
        acking: false,
    };
    loop {
        desk.begin();
        desk.acknowledge();
        busy.send_replace(desk.held.len() + desk.done.len() + desk.saying.len());
        let due = desk.due();
        tokio::select! {
            arrived = arrivals.recv() => match arrived {
                Some(arrived) => desk.arrived(arrived),
                None => break,
            },
            Ok(()) = takes.changed() => {
                desk.takes = *takes.borrow_and_update();
                desk.give_back_unless_taking();
            }
            Some(ended) = desk.running.join_next() => match ended {
                Ok((place, result)) => desk.ended(place, result),
                Err(error) => error!(%error, "a handler of events is gone"),
            },
            Some(said) = desk.saying.join_next() => desk.acking &= !said.unwrap_or(true),
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => desk.keep(),
        }
    }
    desk.running.shutdown().await;
    desk.saying.shutdown().await;
}

impl Desk {
    fn arrived(&mut self, Arrived { group, ack_wait, events }: Arrived) {
        for event in events {
            let place = (group.clone(), event.event.event_type.clone(), event.event.offset);
            // One that is being worked on, and came again since its ack wait was over.
            if let Some(held) = self.held.get_mut(&place) {
                held.since = Instant::now();
                continue;
            }
            if self.held.len() >= 2 * self.declared.window() {
                debug!("too many events are held: one is left for later");
                continue;
            }
            let (deliveries, since) = (event.deliveries, Instant::now());
            self.queue.push_back(place.clone());
            self.held.insert(place, Held { event: Some(event), deliveries, ack_wait, since });
        }
        self.give_back_unless_taking();
    }

    fn begin(&mut self) {
        while self.takes && self.running.len() < self.declared.concurrency {
            let Some(place) = self.queue.pop_front() else { return };
            let Some(event) = self.held.get_mut(&place).and_then(|held| held.event.take()) else { continue };
            let trace_id = event.event.trace_id.clone();
            let context = EventContext { group: place.0.clone(), trace_id, client: self.client.clone() };
            let span = info_span!("event", group = %place.0, event_type = %place.1, offset = place.2);
            let handler = self.declared.handler.clone();
            let handled = AssertUnwindSafe(async move { handler(event, context).await }).catch_unwind();
            let ended = async move {
                let result = handled.await.unwrap_or_else(|_| {
                    // What it said while it panicked may be content; the panic hook has shown it already.
                    error!("the handler panicked");
                    Err(Failure::Error("the handler panicked".into()))
                });
                (place, result)
            };
            self.running.spawn(ended.instrument(span));
        }
    }

    fn ended(&mut self, place: Place, result: Result<(), Failure>) {
        let Some(held) = self.held.remove(&place) else { return };
        let (group, event_type, offset) = place;
        match result {
            Ok(()) => {
                let done = self.done.entry(group).or_default();
                done.entry(event_type).or_default().push(offset);
            }
            Err(failure) => {
                let delay_ms = nack_delay(held.deliveries).as_millis() as u64;
                let word = Word::Nack { delay_ms, cause: cut(failure.to_string(), CAUSE_MAX) };
                self.say([(group, event_type, offset)], &word);
            }
        }
    }

    fn acknowledge(&mut self) {
        if self.acking || self.done.is_empty() {
            return;
        }
        self.acking = true;
        let (client, member) = (self.client.clone(), self.member.clone());
        let done = std::mem::take(&mut self.done);
        self.saying.spawn(async move {
            for (group, about) in done {
                tell(&client, &member, group, about, Word::Ack).await;
            }
            true
        });
    }

    fn say(&mut self, places: impl IntoIterator<Item = Place>, word: &Word) {
        let mut groups: BTreeMap<Name, BTreeMap<EventType, Vec<u64>>> = BTreeMap::new();
        for (group, event_type, offset) in places {
            groups.entry(group).or_default().entry(event_type).or_default().push(offset);
        }
        for (group, about) in groups {
            let (client, member, word) = (self.client.clone(), self.member.clone(), word.clone());
            self.saying.spawn(async move {
                tell(&client, &member, group, about, word).await;
                false
            });
        }
    }

    /// When the first of them has had half of its ack wait.
    fn due(&self) -> Option<Instant> {
        self.held.values().map(|held| held.since + held.ack_wait / 2).min()
    }

    /// The ack wait of what runs begins anew; what has not begun may go to others.
    fn keep(&mut self) {
        let now = Instant::now();
        let mut run = Vec::new();
        for (place, held) in &mut self.held {
            if held.event.is_none() && held.since + held.ack_wait / 2 <= now {
                held.since = now;
                run.push(place.clone());
            }
        }
        self.say(run, &Word::Extend);
        self.give_back(|held| held.since + held.ack_wait / 2 <= now);
    }

    fn give_back_unless_taking(&mut self) {
        if !self.takes {
            self.give_back(|_| true);
        }
    }

    fn give_back(&mut self, which: impl Fn(&Held) -> bool) {
        let is_meant = |held: &Held| held.event.is_some() && which(held);
        let places: Vec<Place> =
            self.held.iter().filter(|(_, held)| is_meant(held)).map(|(place, _)| place.clone()).collect();
        self.held.retain(|_, held| !is_meant(held));
        self.queue.retain(|place| self.held.contains_key(place));
        self.say(places, &Word::GiveBack);
    }
}

/// What the cluster does not hear, it learns by the ack wait.
async fn tell(client: &Client, member: &Name, group: Name, about: BTreeMap<EventType, Vec<u64>>, word: Word) {
    let about = about.into_iter().map(|(event_type, offsets)| (event_type, Span::of(offsets))).collect();
    let consumer = Consumer::new(client.clone(), group, member.clone());
    if let Err(error) = consumer.tell(about, word).await {
        debug!(code = %error.code(), "a word on events was not taken");
    }
}

/// 1 s, 4 s, 16 s, then a minute.
fn nack_delay(deliveries: u32) -> Duration {
    Duration::from_secs(4_u64.saturating_pow(deliveries.saturating_sub(1)).min(60))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_that_failed_waits_longer_each_time() {
        let delays: Vec<u64> = (1..=6).map(|deliveries| nack_delay(deliveries).as_secs()).collect();
        assert_eq!(delays, [1, 4, 16, 60, 60, 60]);
    }
}
