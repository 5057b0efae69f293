//! One supervised connection: dials the cluster's nodes in turn, a silent one beside the next, comes back after every loss, and
//! sends a request again until it is answered or its deadline has passed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use reach_protocol::{
    Code, ErrorReply, MsgId,
    frame::{Answer, Request, Welcome},
};
use reach_transport::{Door, Endpoint};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout_at},
};
use tokio_util::sync::{CancellationToken, DropGuard};
use tracing::{debug, info, warn};

use crate::{
    error::Error,
    link::{Asked, Beat, Incoming, Link, Miss, Push},
    options::Options,
    renewal::CredentialFiles,
};

/// A link that lasted this long was a good one: the next loss starts with short pauses again.
const STEADY: Duration = Duration::from_secs(5);
/// A node that knows no leader for this long is left for another.
const LEADERLESS_MAX: Duration = Duration::from_secs(3);
/// The longest that one request waits for a message's end; then it is asked again.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// More than this many addresses learned from nodes are not kept.
const ADDRESSES_MAX: usize = 64;

/// Cheap to clone; the last clone's end closes it.
#[derive(Clone)]
pub(crate) struct Connection {
    shared: Arc<Shared>,
}

struct Shared {
    options: Arc<Options>,
    state: watch::Receiver<State>,
    welcome: Arc<Mutex<Option<Arc<Welcome>>>>,
    beat: watch::Sender<Option<Beat>>,
    closing: CancellationToken,
    _close: DropGuard,
}

#[derive(Clone)]
pub(crate) enum State {
    Down(Misses),
    Up(Arc<Link>),
    Closed,
}

impl Connection {
    /// Starts dialling, on the runtime of the caller. What nodes send of themselves goes to
    /// `pushes`.
    pub(crate) fn start(options: Arc<Options>, pushes: Option<mpsc::Sender<Push>>) -> Result<Self, Error> {
        if options.endpoints.is_empty() {
            return Err(Error::Invalid("endpoints is empty: name at least one host:port".into()));
        }
        let addresses = Addresses::of(&options.endpoints);
        let endpoint = Endpoint::client(Door::Client, &options.credentials, options.transport.clone())?;
        let closing = CancellationToken::new();
        let (state_tx, state) = watch::channel(State::Down(Misses::of(&addresses)));
        let (beat, beats) = watch::channel(None);
        let welcome = Arc::new(Mutex::new(None));
        let supervisor = Supervisor {
            addresses,
            files: options.credential_files.clone(),
            options: options.clone(),
            endpoint,
            state: state_tx,
            welcome: welcome.clone(),
            pushes,
            beats,
            closing: closing.clone(),
        };
        tokio::spawn(supervisor.run());
        let close = closing.clone().drop_guard();
        let shared = Shared { options, state, welcome, beat, closing, _close: close };
        Ok(Self { shared: Arc::new(shared) })
    }

    pub(crate) fn options(&self) -> &Options {
        &self.shared.options
    }

    pub(crate) fn states(&self) -> watch::Receiver<State> {
        self.shared.state.clone()
    }

    /// The latest greeting, once there was one.
    pub(crate) fn welcome(&self) -> Option<Arc<Welcome>> {
        self.shared.welcome.lock().expect("no panic holds this lock").clone()
    }

    /// Level 1 heartbeats from now on, as long as the link lasts; `None` ends them.
    pub(crate) fn beat(&self, beat: Option<Beat>) {
        self.shared.beat.send_replace(beat);
    }

    /// The first link, or why there is none by `deadline`; at once when no node accepts us.
    pub(crate) async fn connected(&self, deadline: Instant) -> Result<(), Error> {
        tokio::select! {
            linked = self.link(deadline) => linked.map(drop),
            error = self.refused() => Err(error),
        }
    }

    /// Waits until every node has refused us since the last link; for ever when none does.
    pub(crate) async fn refused(&self) -> Error {
        let mut states = self.states();
        let all = |state: &State| matches!(state, State::Down(misses) if misses.all_refused());
        if states.wait_for(all).await.is_err() {
            // Closed: whoever waits for a link or an end hears of it there.
            std::future::pending::<()>().await;
        }
        self.unreachable()
    }

    /// Waits until a node says that this certificate was revoked; for ever when none does. Nothing is
    /// dialled any more then.
    pub(crate) async fn revoked(&self) -> Error {
        let mut states = self.states();
        let is_revoked = |state: &State| matches!(state, State::Down(misses) if misses.any_revoked());
        if states.wait_for(is_revoked).await.is_err() {
            std::future::pending::<()>().await;
        }
        self.unreachable()
    }

    pub(crate) async fn close(&self) {
        self.shared.closing.cancel();
        let mut state = self.states();
        // The supervisor's own farewell is bounded by the transport.
        let _ = state.wait_for(|state| matches!(state, State::Closed)).await;
    }

    async fn link(&self, deadline: Instant) -> Result<Arc<Link>, Error> {
        let mut states = self.states();
        let up = states.wait_for(|state| match state {
            State::Up(link) => !link.is_lost(),
            State::Closed => true,
            State::Down(misses) => misses.any_revoked(),
        });
        let found = match timeout_at(deadline, up).await {
            Ok(Ok(state)) => Some(state.clone()),
            Ok(Err(_)) => Some(State::Closed),
            Err(_) => None,
        };
        match found {
            Some(State::Up(link)) => Ok(link),
            Some(State::Closed) => Err(Error::Closed),
            Some(State::Down(_)) | None => Err(self.unreachable()),
        }
    }

    pub(crate) fn unreachable(&self) -> Error {
        let endpoints = self.shared.options.endpoints.clone();
        match &*self.shared.state.borrow() {
            State::Down(misses) if misses.any_refused() => {
                Error::Unauthenticated { endpoints, reason: misses.to_string() }
            }
            State::Down(misses) => Error::Unreachable { endpoints, reason: misses.to_string() },
            State::Up(_) => Error::Unreachable { endpoints, reason: "connected, but no answer came".into() },
            State::Closed => Error::Unreachable { endpoints, reason: "closed".into() },
        }
    }

    /// Asks until it is answered, over as many links as it takes.
    pub(crate) async fn request(&self, request: &Request, deadline: Instant) -> Result<Answer, Error> {
        self.request_telling(request, deadline, &|| {}).await
    }

    /// As `request`; `sent` is called each time the request is on its way.
    pub(crate) async fn request_telling(
        &self,
        request: &Request,
        deadline: Instant,
        sent: &(dyn Fn() + Sync),
    ) -> Result<Answer, Error> {
        let mut pauses = self.shared.options.pauses();
        let mut pause = || pauses.next().unwrap_or(self.shared.options.pause_max);
        let mut fate = Fate { msg_id: msg_id(request).cloned(), unknown: false, refused: None };
        let mut leaderless: Option<(u64, Instant)> = None;
        loop {
            if Instant::now() >= deadline {
                return Err(fate.at_deadline(self.unreachable()));
            }
            let link = match self.link(deadline).await {
                Ok(link) => link,
                Err(Error::Closed) if !fate.unknown => return Err(Error::Closed),
                Err(error) => return Err(fate.at_deadline(error)),
            };
            let answer_timeout = self.shared.options.answer_timeout;
            let remaining = deadline.saturating_duration_since(Instant::now());
            let (request, wait) = at_send(request, remaining);
            let within = remaining.min(wait + answer_timeout);
            let patience = remaining.min(within + Duration::from_secs(1));
            let pause = match link.ask(request, self.shared.options.stale, within, patience, sent).await {
                Asked::Answered(Ok(answer)) => return Ok(*answer),
                Asked::Answered(Err(reply)) if !may_pass(&reply) => return Err(Error::Refused(reply)),
                Asked::Answered(Err(reply)) => {
                    match reply.code {
                        Code::NodeDraining => link.leave("the node is draining"),
                        Code::NoLeader | Code::NoMajority => match leaderless {
                            Some((generation, since)) if generation == link.generation => {
                                if since.elapsed() > LEADERLESS_MAX {
                                    link.leave("the node knows no leader");
                                }
                            }
                            _ => leaderless = Some((link.generation, Instant::now())),
                        },
                        _ => {}
                    }
                    let asked = Duration::from_millis(reply.retry_after_ms.unwrap_or(0));
                    fate.unknown |= reply.code == Code::OutcomeUnknown;
                    fate.refused = Some(reply);
                    pause().max(asked)
                }
                Asked::Lost => {
                    fate.unknown = true;
                    continue;
                }
                Asked::Late => {
                    fate.unknown = true;
                    // At the caller's own deadline the node may just be busy; past its own, it hangs.
                    if Instant::now() < deadline {
                        link.leave("a request was not answered in time");
                    }
                    continue;
                }
                Asked::NotSent => {
                    link.leave("the node closed the link");
                    continue;
                }
                Asked::Full => pause(),
            };
            if Instant::now() + pause >= deadline {
                return Err(fate.at_deadline(self.unreachable()));
            }
            sleep(pause).await;
        }
    }
}

impl Connection {
    /// As `request`, over this link alone: what is asked concerns the link itself.
    pub(crate) async fn request_over(
        &self,
        link: &Link,
        request: &Request,
        deadline: Instant,
    ) -> Result<Answer, Error> {
        let mut pauses = self.shared.options.pauses();
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let within = remaining.min(self.shared.options.answer_timeout);
            let refused = match link
                .ask(request.clone(), false, within, within + Duration::from_secs(1), &|| {})
                .await
            {
                Asked::Answered(Ok(answer)) => return Ok(*answer),
                Asked::Answered(Err(reply)) if !may_pass(&reply) => return Err(Error::Refused(reply)),
                Asked::Answered(Err(reply)) => Some(reply),
                Asked::Full => None,
                Asked::Lost | Asked::NotSent | Asked::Late => return Err(Error::Unknown { msg_id: None }),
            };
            let asked = refused.as_ref().and_then(|reply| reply.retry_after_ms).unwrap_or(0);
            let pause = pauses.next().unwrap_or(self.shared.options.pause_max);
            let pause = pause.max(Duration::from_millis(asked));
            if Instant::now() + pause >= deadline {
                return Err(refused.map_or(Error::Unknown { msg_id: None }, Error::Refused));
            }
            sleep(pause).await;
        }
    }
}

/// What is known of a request when its time is over.
struct Fate {
    msg_id: Option<MsgId>,
    /// It was sent, and no answer came back.
    unknown: bool,
    refused: Option<Box<ErrorReply>>,
}

impl Fate {
    fn at_deadline(self, otherwise: Error) -> Error {
        match (self.unknown, self.refused) {
            (true, _) => Error::Unknown { msg_id: self.msg_id },
            (false, Some(reply)) => Error::Refused(reply),
            (false, None) => otherwise,
        }
    }
}

/// Refusals that another node or a moment may turn into an answer. `overloaded` counts only when it
/// says when to come back.
fn may_pass(reply: &ErrorReply) -> bool {
    match reply.code {
        Code::NoLeader | Code::NoMajority | Code::NodeDraining | Code::OutcomeUnknown => true,
        Code::Overloaded => reply.retry_after_ms.is_some(),
        _ => false,
    }
}

/// The request as it is now: its wait ends a little before its deadline, so that the answer can
/// still tell accepted from unknown, and the sender's calendar is the present one.
fn at_send(request: &Request, remaining: Duration) -> (Request, Duration) {
    let margin = (remaining / 10).clamp(Duration::from_millis(10), Duration::from_millis(500));
    let longest = remaining.saturating_sub(margin).min(WAIT_MAX);
    let mut request = request.clone();
    let mut waits = Duration::ZERO;
    let shorten = |wait_ms: &mut Option<u64>| match wait_ms {
        Some(ms) => {
            let wait = longest.min(Duration::from_millis(*ms));
            *ms = wait.as_millis() as u64;
            wait
        }
        None => Duration::ZERO,
    };
    match &mut request {
        Request::Submit { sent_at_ms, wait_ms, .. } => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            *sent_at_ms = Some(now.as_millis() as u64);
            waits = shorten(wait_ms);
        }
        Request::Message { wait_ms, .. } => waits = shorten(wait_ms),
        _ => {}
    }
    (request, waits)
}

fn msg_id(request: &Request) -> Option<&MsgId> {
    match request {
        Request::Submit { envelope, .. } => envelope.msg_id.as_ref(),
        Request::Received { msg_id, .. }
        | Request::Complete { msg_id, .. }
        | Request::Fail { msg_id, .. }
        | Request::Release { msg_id, .. }
        | Request::Message { msg_id, .. }
        | Request::Payload { msg_id }
        | Request::Result { msg_id } => Some(msg_id),
        _ => None,
    }
}

/// The task that keeps a link up.
struct Supervisor {
    addresses: Addresses,
    files: Option<CredentialFiles>,
    options: Arc<Options>,
    endpoint: Endpoint,
    state: watch::Sender<State>,
    welcome: Arc<Mutex<Option<Arc<Welcome>>>>,
    pushes: Option<mpsc::Sender<Push>>,
    beats: watch::Receiver<Option<Beat>>,
    closing: CancellationToken,
}

impl Supervisor {
    async fn run(mut self) {
        let closing = self.closing.clone();
        closing.run_until_cancelled(self.keep_up()).await;
        if let State::Up(link) = &*self.state.borrow() {
            link.lose();
        }
        self.endpoint.close().await;
        self.state.send_replace(State::Closed);
    }

    async fn keep_up(&mut self) {
        let mut pauses = self.options.pauses();
        let mut failures = 0;
        let mut misses = Misses::of(&self.addresses);
        for generation in 1.. {
            if let Some(files) = &mut self.files {
                files.renew(&self.endpoint);
            }
            match self.dial(generation, &mut misses).await {
                Some((address, link, incoming)) => {
                    info!(node = %link.welcome.node_id, "connected");
                    let began = Instant::now();
                    self.addresses.learn(&link.welcome.endpoints);
                    *self.welcome.lock().expect("no panic holds this lock") = Some(link.welcome.clone());
                    self.state.send_replace(State::Up(link.clone()));
                    let reason = link
                        .serve(incoming, self.pushes.as_ref(), &mut self.beats, self.options.beat_timeout)
                        .await;
                    info!(node = %link.welcome.node_id, reason, "disconnected");
                    if began.elapsed() > STEADY {
                        pauses = self.options.pauses();
                        failures = 0;
                    }
                    misses = Misses::of(&self.addresses);
                    misses.set(address, Miss::passing(reason));
                    self.state.send_replace(State::Down(misses.clone()));
                    failures += 1;
                }
                None => failures += self.addresses.len(),
            }
            if misses.any_revoked() {
                // What a node has said of this certificate no later dial will change.
                warn!(reason = %misses, "the certificate was revoked");
                return std::future::pending().await;
            }
            if failures >= self.addresses.len() {
                sleep(pauses.next().unwrap_or(self.options.pause_max)).await;
            }
        }
    }

    /// Every address once, until one gives a link. One that keeps silent delays the next by
    /// `stagger` only: its own time runs on beside them.
    async fn dial(&mut self, generation: u64, misses: &mut Misses) -> Option<(String, Arc<Link>, Incoming)> {
        let (endpoint, options) = (self.endpoint.clone(), self.options.clone());
        let mut dials = FuturesUnordered::new();
        let mut left = self.addresses.len();
        while left > 0 || !dials.is_empty() {
            if left > 0 {
                left -= 1;
                let address = self.addresses.next();
                let (endpoint, options) = (&endpoint, &options);
                dials.push(
                    async move { (Link::dial(endpoint, &address, options, generation).await, address) },
                );
            }
            let stagger = async {
                match left {
                    0 => std::future::pending().await,
                    _ => sleep(options.stagger).await,
                }
            };
            tokio::select! {
                Some((dialled, address)) = dials.next() => match dialled {
                    Ok((link, incoming)) => return Some((address, link, incoming)),
                    Err(miss) => {
                        debug!(address, reason = miss.reason, "not connected");
                        misses.set(address, miss);
                        self.state.send_replace(State::Down(misses.clone()));
                    }
                },
                () = stagger => {}
            }
        }
        None
    }
}

/// Why there is no link: what each address last came to since there was one, if anything.
#[derive(Clone)]
pub(crate) struct Misses(BTreeMap<String, Option<Miss>>);

impl Misses {
    fn of(addresses: &Addresses) -> Self {
        Self(addresses.all.iter().map(|address| (address.clone(), None)).collect())
    }

    fn set(&mut self, address: String, miss: Miss) {
        self.0.insert(address, Some(miss));
    }

    fn any_refused(&self) -> bool {
        self.0.values().flatten().any(|miss| miss.refused)
    }

    fn any_revoked(&self) -> bool {
        self.0.values().flatten().any(|miss| miss.revoked)
    }

    fn all_refused(&self) -> bool {
        self.0.values().all(|miss| miss.as_ref().is_some_and(|miss| miss.refused))
    }
}

/// Nodes with the same reason share it: `a:1, b:1: no answer in time; c:1: …`.
impl fmt::Display for Misses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of one node it is the word of all.
        if let Some(miss) = self.0.values().flatten().find(|miss| miss.revoked) {
            return f.write_str(&miss.reason);
        }
        let mut by_reason: Vec<(&str, Vec<&str>)> = Vec::new();
        for (address, miss) in &self.0 {
            let reason = miss.as_ref().map_or("no answer yet", |miss| &miss.reason);
            match by_reason.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, addresses)) => addresses.push(address),
                None => by_reason.push((reason, vec![address])),
            }
        }
        let parts = by_reason.iter().map(|(reason, addresses)| format!("{}: {reason}", addresses.join(", ")));
        f.write_str(&parts.collect::<Vec<_>>().join("; "))
    }
}

/// Where nodes may be found, taken in turn.
struct Addresses {
    all: Vec<String>,
    next: usize,
}

impl Addresses {
    /// Begins anywhere, so that many clients with one list spread over the nodes.
    fn of(endpoints: &[String]) -> Self {
        let mut seen = BTreeSet::new();
        let all: Vec<String> = endpoints.iter().filter(|address| seen.insert(*address)).cloned().collect();
        let next = RandomState::new().hash_one(0) as usize % all.len();
        Self { all, next }
    }

    fn next(&mut self) -> String {
        let address = self.all[self.next % self.all.len()].clone();
        self.next = (self.next + 1) % self.all.len();
        address
    }

    fn learn(&mut self, endpoints: &[String]) {
        for address in endpoints {
            if self.all.len() < ADDRESSES_MAX && !self.all.contains(address) {
                self.all.push(address.clone());
            }
        }
    }

    fn len(&self) -> usize {
        self.all.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_in_turn_and_learned_once() {
        let mut addresses = Addresses::of(&["a:1".into(), "b:1".into(), "a:1".into()]);
        addresses.learn(&["b:1".into(), "c:1".into()]);
        let mut round: Vec<_> = (0..3).map(|_| addresses.next()).collect();
        round.sort();
        assert_eq!(round, ["a:1", "b:1", "c:1"]);
    }

    #[test]
    fn every_node_is_named_with_its_reason() {
        let addresses = Addresses::of(&["a:1".into(), "b:1".into(), "c:1".into(), "d:1".into()]);
        let mut misses = Misses::of(&addresses);
        misses.set("a:1".into(), Miss::passing("no answer in time"));
        misses.set(
            "b:1".into(),
            Miss { reason: "that is no port for clients".into(), refused: true, revoked: false },
        );
        misses.set("c:1".into(), Miss::passing("no answer in time"));
        assert!(misses.any_refused() && !misses.all_refused());
        let text = "a:1, c:1: no answer in time; b:1: that is no port for clients; d:1: no answer yet";
        assert_eq!(misses.to_string(), text);
        for address in &addresses.all {
            assert!(!misses.all_refused());
            misses.set(address.clone(), Miss { reason: "no".into(), refused: true, revoked: false });
        }
        assert!(misses.all_refused() && !misses.any_revoked());
        let revoked = Miss { reason: "the certificate was revoked".into(), refused: true, revoked: true };
        misses.set("c:1".into(), revoked);
        assert!(misses.any_revoked());
        assert_eq!(misses.to_string(), "the certificate was revoked");
    }

    #[test]
    fn a_wait_ends_before_its_deadline() {
        let msg_id = MsgId::parse("m1").unwrap();
        let request = Request::Message { msg_id, wait_ms: Some(60_000) };
        let (sent, wait) = at_send(&request, Duration::from_secs(4));
        assert_eq!(wait, Duration::from_millis(3_600));
        assert!(matches!(sent, Request::Message { wait_ms: Some(3_600), .. }));
        assert_eq!(at_send(&request, Duration::from_secs(600)).1, WAIT_MAX);
    }

    #[test]
    fn what_was_sent_without_an_answer_is_unknown() {
        let refused = Some(Box::new(ErrorReply::new(Code::NoLeader, "no leader")));
        let fate = |unknown, refused| Fate { msg_id: None, unknown, refused }.at_deadline(Error::Closed);
        assert!(matches!(fate(true, refused.clone()), Error::Unknown { .. }));
        assert!(matches!(fate(false, refused), Error::Refused(_)));
        assert!(matches!(fate(false, None), Error::Closed));
    }
}
