//! One connection to one node, from its greeting to its loss: requests by id, pushes, heartbeats.
//! What happens after a loss is the business of `connection`.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use reach_protocol::{
    AgentId, ErrorReply, InstanceId, codec,
    frame::{Answer, ClientFrame, NodeFrame, Request, Welcome},
    limits::FRAME_MAX,
    message::Holder,
};
use reach_transport::{Connection as Wire, Endpoint, LinkRx, LinkTx, SendError};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::options::Options;

pub(crate) struct Link {
    /// Counts this client's links; a push or an answer of an older one is void.
    pub(crate) generation: u64,
    pub(crate) welcome: Arc<Welcome>,
    tx: LinkTx,
    calls: Mutex<Calls>,
    leave: CancellationToken,
    why: Mutex<String>,
}

#[derive(Default)]
struct Calls {
    next_id: u64,
    waiting: HashMap<u64, oneshot::Sender<Answered>>,
    lost: bool,
}

type Answered = Result<Box<Answer>, Box<ErrorReply>>;

/// What became of one try of one request.
pub(crate) enum Asked {
    Answered(Answered),
    /// Not sent: the link's queue is full.
    Full,
    /// The link was lost after it was sent: unknown whether it happened.
    Lost,
    /// Not sent: the link was lost before.
    NotSent,
    /// No answer in time.
    Late,
}

/// What a node sends of itself, with the link it came by.
pub(crate) struct Push {
    pub(crate) link: Arc<Link>,
    pub(crate) frame: NodeFrame,
}

/// Level 1 of an agent, on the link it is attached to.
#[derive(Clone)]
pub(crate) struct Beat {
    pub(crate) generation: u64,
    pub(crate) agent_id: AgentId,
    pub(crate) instance: InstanceId,
    pub(crate) every: Duration,
}

impl Beat {
    fn run(&self) -> Holder {
        Holder { agent_id: self.agent_id.clone(), instance: self.instance.clone() }
    }
}

/// Why an address gave no link.
#[derive(Clone, Debug)]
pub(crate) struct Miss {
    pub(crate) reason: String,
    /// The two sides don't accept each other; else it may pass.
    pub(crate) refused: bool,
    /// And never will.
    pub(crate) revoked: bool,
}

impl Miss {
    pub(crate) fn passing(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), refused: false, revoked: false }
    }

    /// Without the address, which stands before it.
    fn of(error: reach_transport::Error) -> Self {
        use reach_transport::Error;
        let refused = error.is_refusal();
        let revoked = matches!(error, Error::Revoked { .. });
        let reason = match error {
            Error::Handshake { reason, .. }
            | Error::Revoked { reason, .. }
            | Error::Unavailable { reason, .. } => reason,
            Error::Timeout { .. } => "no answer in time".into(),
            error => error.to_string(),
        };
        Self { reason, refused, revoked }
    }
}

/// The receiving half, for `serve`.
pub(crate) struct Incoming {
    wire: Wire,
    rx: LinkRx,
}

impl Link {
    /// Connects, says hello and waits for the welcome.
    pub(crate) async fn dial(
        endpoint: &Endpoint,
        address: &str,
        options: &Options,
        generation: u64,
    ) -> Result<(Arc<Self>, Incoming), Miss> {
        let greeting = async {
            let addrs: Vec<SocketAddr> = tokio::net::lookup_host(address)
                .await
                .map_err(|error| Miss::passing(format!("it can't be resolved ({error})")))?
                .collect();
            let mut miss = Miss::passing("it has no address");
            for addr in addrs {
                match endpoint.connect(addr, &options.cluster, None).await {
                    Ok(wire) => return Self::greet(wire, options, generation).await,
                    // A host has several addresses: a refusal says more than a silence.
                    Err(error) if miss.refused && !error.is_refusal() => {}
                    Err(error) => miss = Miss::of(error),
                }
            }
            Err(miss)
        };
        let late = |_| Miss::passing(format!("no welcome within {} ms", options.dial_timeout.as_millis()));
        timeout(options.dial_timeout, greeting).await.map_err(late)?
    }

    async fn greet(wire: Wire, options: &Options, generation: u64) -> Result<(Arc<Self>, Incoming), Miss> {
        let (tx, mut rx) = wire.link();
        let hello = ClientFrame::Hello { cluster: options.cluster.clone() };
        tx.send(codec::encode(&hello)).map_err(|error| Miss::passing(error.to_string()))?;
        let Some(first) = rx.recv().await else {
            return Err(Miss::passing(lost(&wire).await));
        };
        let welcome = match codec::decode("frame", &first) {
            Ok(NodeFrame::Welcome(welcome)) => welcome,
            Ok(_) => return Err(Miss::passing("the first frame was no welcome")),
            Err(error) => return Err(Miss::passing(error.to_string())),
        };
        let link = Self {
            generation,
            welcome: Arc::new(welcome),
            tx,
            calls: Mutex::default(),
            leave: CancellationToken::new(),
            why: Mutex::default(),
        };
        Ok((Arc::new(link), Incoming { wire, rx }))
    }

    /// One try. The node gets `within` to answer; a second more, and it counts as hung. `sent` is
    /// called when the request is on its way.
    pub(crate) async fn ask(
        &self,
        request: Request,
        stale: bool,
        within: Duration,
        patience: Duration,
        sent: &(dyn Fn() + Sync),
    ) -> Asked {
        let (id, answer) = {
            let mut calls = self.calls.lock().expect("no panic holds this lock");
            if calls.lost {
                return Asked::NotSent;
            }
            calls.next_id += 1;
            let (tx, rx) = oneshot::channel();
            let id = calls.next_id;
            calls.waiting.insert(id, tx);
            (id, rx)
        };
        let _forget = Forget { link: self, id };
        let frame = codec::encode(&ClientFrame::Request {
            id,
            timeout_ms: (within.as_millis() as u64).max(1),
            stale,
            request,
        });
        let bytes = frame.len();
        match self.tx.send(frame) {
            Ok(()) => sent(),
            Err(SendError::TooLarge) => {
                return Asked::Answered(Err(ErrorReply::too_large("frame", bytes, FRAME_MAX).into()));
            }
            Err(SendError::Full) => return Asked::Full,
            Err(SendError::Closed) => return Asked::NotSent,
        }
        match timeout(patience, answer).await {
            Ok(Ok(answered)) => Asked::Answered(answered),
            Ok(Err(_)) => Asked::Lost,
            Err(_) => Asked::Late,
        }
    }

    /// The answer to a level 2 echo; lost silently when the link is.
    pub(crate) fn echo(&self, agent_id: &AgentId, instance: &InstanceId, seq: u64) {
        let run = Holder { agent_id: agent_id.clone(), instance: instance.clone() };
        let frame = ClientFrame::Echo { seq, runs: vec![run] };
        if let Err(error) = self.tx.send(codec::encode(&frame)) {
            debug!(%error, "echo not sent");
        }
    }

    /// Asks for another node.
    pub(crate) fn leave(&self, why: &str) {
        if !self.leave.is_cancelled() {
            why.clone_into(&mut self.why.lock().expect("no panic holds this lock"));
            self.leave.cancel();
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.leave.is_cancelled() || self.calls.lock().expect("no panic holds this lock").lost
    }

    /// Reads until the link is lost, and says why it was. Requests that wait are let go.
    pub(crate) async fn serve(
        self: &Arc<Self>,
        incoming: Incoming,
        pushes: Option<&mpsc::Sender<Push>>,
        beats: &mut watch::Receiver<Option<Beat>>,
        beat_timeout: Duration,
    ) -> String {
        let Incoming { wire, mut rx } = incoming;
        let mut heart =
            Heart { beat: None, seq: 0, next: Instant::now(), unanswered: None, sent: None, told_ms: None };
        heart.set(beats.borrow_and_update().clone().filter(|beat| beat.generation == self.generation));
        let why = loop {
            let due = heart.due();
            tokio::select! {
                // Answers before deadlines: after a pause of the whole process both are ready.
                biased;
                () = self.leave.cancelled() => break self.why.lock().expect("no panic holds this lock").clone(),
                frame = rx.recv() => {
                    let Some(frame) = frame else { break lost(&wire).await };
                    match codec::decode("frame", &frame) {
                        Ok(NodeFrame::Beaten { seq, calendar_ms }) => {
                            if let Some(frame) = heart.answered(seq, calendar_ms) {
                                // Lost when the link is; the next one tells it anew.
                                let _ = self.tx.send(codec::encode(&frame));
                            }
                        }
                        Ok(NodeFrame::Goodbye) => break "the node is going".into(),
                        Ok(frame) => self.take(frame, pushes),
                        Err(error) => break error.to_string(),
                    }
                }
                changed = beats.changed() => {
                    if changed.is_err() {
                        break "closed".into();
                    }
                    let beat = beats.borrow_and_update().clone();
                    heart.set(beat.filter(|beat| beat.generation == self.generation));
                }
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    if heart.is_late() {
                        break format!("a heartbeat was not answered within {} ms", beat_timeout.as_millis());
                    }
                    if let Some(frame) = heart.beat(beat_timeout) && self.tx.send(codec::encode(&frame)).is_err() {
                        break "a heartbeat could not be sent".into();
                    }
                }
            }
        };
        self.lose();
        wire.close(&why);
        why
    }

    fn take(self: &Arc<Self>, frame: NodeFrame, pushes: Option<&mpsc::Sender<Push>>) {
        if let NodeFrame::Response { id, response } = frame {
            let waiting = self.calls.lock().expect("no panic holds this lock").waiting.remove(&id);
            // Nobody waits any more: the caller's time was over.
            let _ = waiting.map(|waiting| waiting.send(response));
            return;
        }
        let Some(pushes) = pushes else { return };
        let repeated =
            matches!(frame, NodeFrame::Deliver(_) | NodeFrame::Echo { .. } | NodeFrame::Events { .. });
        if pushes.try_send(Push { link: self.clone(), frame }).is_err() && !repeated {
            // Deliveries, echoes and events come again by themselves. Anything else would be missed;
            // attaching anew makes up for it.
            warn!(node = %self.welcome.node_id, "the agent's session fell behind its node");
            self.leave("the session fell behind");
        }
    }

    /// From now on nothing is sent here, and nobody waits here.
    pub(crate) fn lose(&self) {
        let mut calls = self.calls.lock().expect("no panic holds this lock");
        calls.lost = true;
        calls.waiting.clear();
    }
}

/// Why nothing more comes: the connection's end, or a node that let the link alone go.
async fn lost(wire: &Wire) -> String {
    match timeout(Duration::from_millis(500), wire.closed()).await {
        Ok(error) => error.to_string(),
        Err(_) => "the node let the link go".into(),
    }
}

struct Forget<'a> {
    link: &'a Link,
    id: u64,
}

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.link.calls.lock().expect("no panic holds this lock").waiting.remove(&self.id);
    }
}

/// The level 1 heartbeat of one link.
struct Heart {
    beat: Option<Beat>,
    seq: u64,
    next: Instant,
    unanswered: Option<(u64, Instant)>,
    /// The last beat, by this host's calendar and by the clock that only runs forward.
    sent: Option<(u64, u64, Instant)>,
    /// The offset that the node was told last.
    told_ms: Option<i64>,
}

/// A round trip that took longer says too little about the time at its other end.
const ROUND_TRIP_MAX: Duration = Duration::from_secs(1);
/// An offset is told again when it has changed by more than this, in milliseconds.
const OFFSET_STEP_MS: u64 = 50;

impl Heart {
    fn set(&mut self, beat: Option<Beat>) {
        self.beat = beat;
        self.unanswered = None;
        self.told_ms = None;
        self.next = Instant::now();
    }

    fn due(&self) -> Option<Instant> {
        self.beat.as_ref()?;
        Some(self.unanswered.map_or(self.next, |(_, deadline)| deadline.min(self.next)))
    }

    fn is_late(&self) -> bool {
        self.unanswered.is_some_and(|(_, deadline)| deadline <= Instant::now())
    }

    fn beat(&mut self, answer_within: Duration) -> Option<ClientFrame> {
        let beat = self.beat.as_ref()?;
        let now = Instant::now();
        if now < self.next {
            return None;
        }
        self.seq += 1;
        self.next = now + beat.every;
        // The oldest unanswered beat decides.
        self.unanswered.get_or_insert((self.seq, now + answer_within));
        let calendar = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.sent = Some((self.seq, calendar.as_millis() as u64, now));
        Some(ClientFrame::Beat { seq: self.seq, runs: vec![beat.run()] })
    }

    /// What the node is to be told of this host's calendar, when that is news.
    fn answered(&mut self, seq: u64, calendar_ms: Option<u64>) -> Option<ClientFrame> {
        if self.unanswered.is_some_and(|(oldest, _)| seq >= oldest) {
            self.unanswered = None;
        }
        let (_, sent_ms, sent) = self.sent.filter(|(last, ..)| *last == seq)?;
        let round_trip = sent.elapsed();
        let offset_ms = (sent_ms + round_trip.as_millis() as u64 / 2) as i64 - calendar_ms? as i64;
        let is_news = self.told_ms.is_none_or(|told_ms| offset_ms.abs_diff(told_ms) > OFFSET_STEP_MS);
        if round_trip > ROUND_TRIP_MAX || !is_news {
            return None;
        }
        self.told_ms = Some(offset_ms);
        Some(ClientFrame::Offset { runs: vec![self.beat.as_ref()?.run()], offset_ms })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_offset_is_half_a_round_trip_from_the_answer_and_told_when_it_is_news() {
        let (agent_id, instance) = (AgentId::parse("a").unwrap(), InstanceId::parse("i").unwrap());
        let every = Duration::from_secs(3);
        let beat = Beat { generation: 1, agent_id, instance, every };
        let mut heart =
            Heart { beat: None, seq: 0, next: Instant::now(), unanswered: None, sent: None, told_ms: None };
        heart.set(Some(beat));
        let mut round = async |ahead_ms: i64, round_trip_ms: u64| {
            tokio::time::advance(every).await;
            heart.beat(Duration::from_secs(10)).expect("a beat is due");
            let (seq, sent_ms, _) = heart.sent.expect("it was just sent");
            tokio::time::advance(Duration::from_millis(round_trip_ms)).await;
            // What a node says half way, when this host is ahead of it by so much.
            let calendar_ms = (sent_ms + round_trip_ms / 2) as i64 - ahead_ms;
            match heart.answered(seq, Some(calendar_ms as u64)) {
                Some(ClientFrame::Offset { offset_ms, .. }) => Some(offset_ms),
                Some(_) => panic!("another frame"),
                None => None,
            }
        };
        assert_eq!(round(700, 80).await, Some(700));
        assert_eq!(round(720, 400).await, None, "no news");
        assert_eq!(round(-3_600_000, 900).await, Some(-3_600_000));
        assert_eq!(round(0, 1_100).await, None, "too slow to tell");
        assert_eq!(round(0, 10).await, Some(0));
        assert_eq!(heart.answered(1, Some(5)), None, "the answer to an older beat");
        assert_eq!(heart.answered(heart.seq, None), None, "a node that does not know");
    }
}
