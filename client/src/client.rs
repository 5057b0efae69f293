//! Callers: submit a message, wait for its end, look one up.

use std::{fmt, sync::Arc, time::Duration};

use reach_protocol::{
    AgentId, Envelope, MsgId, Principal, Source, TraceId,
    envelope::Response,
    frame::{Answer, MessageView, Request, Welcome},
};
use tokio::time::Instant;
use ulid::Ulid;

use crate::{
    connection::Connection,
    context::{self, Scope},
    error::Error,
    options::Options,
};

/// Asks the cluster. Cheap to clone; all clones share one connection, which ends with the last.
#[derive(Clone)]
pub struct Client {
    connection: Connection,
    /// The agent whose connection this is.
    agent_id: Option<AgentId>,
}

/// A message the cluster has taken.
#[derive(Clone)]
pub struct Submitted {
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    /// As it stood when it was answered; a repeat gets the first submission's present state.
    pub view: MessageView,
}

impl Client {
    /// Connects to any of the nodes. Fails with [`Error::Unreachable`] after `connect_timeout`, and with
    /// [`Error::Unauthenticated`] as soon as every node has refused; an established client comes back
    /// by itself after every loss.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let options = Arc::new(options);
        let deadline = Instant::now() + options.connect_timeout;
        let connection = Connection::start(options, None)?;
        connection.connected(deadline).await?;
        Ok(Self { connection, agent_id: None })
    }

    pub(crate) fn of_agent(connection: Connection, agent_id: AgentId) -> Self {
        Self { connection, agent_id: Some(agent_id) }
    }

    /// Hands in a message; returns when the cluster has it on the disks of a majority. Absent ids
    /// are made here, before the first send, so that every retry is the same submission.
    pub async fn submit(&self, envelope: Envelope) -> Result<Submitted, Error> {
        self.submit_in(context::current(), envelope).await
    }

    /// Hands in a message and waits for its end, whichever it is. Out of `timeout`,
    /// [`Error::Timeout`] says that the message goes on, and [`Error::Unknown`] that no node
    /// answered.
    pub async fn call(&self, envelope: Envelope, timeout: Duration) -> Result<Response, Error> {
        self.call_in(context::current(), envelope, timeout).await
    }

    pub(crate) async fn submit_in(
        &self,
        scope: Option<Scope>,
        envelope: Envelope,
    ) -> Result<Submitted, Error> {
        let deadline = self.by_default();
        let envelope = self.fill(scope, envelope, deadline).await;
        let request = Request::Submit { envelope: Box::new(envelope), sent_at_ms: None, wait_ms: None };
        let view = message(self.request_by(&request, deadline).await?)?;
        let record = &view.record;
        Ok(Submitted { msg_id: record.msg_id.clone(), trace_id: record.trace_id.clone(), view })
    }

    pub(crate) async fn call_in(
        &self,
        scope: Option<Scope>,
        envelope: Envelope,
        timeout: Duration,
    ) -> Result<Response, Error> {
        let deadline = Instant::now() + timeout;
        let envelope = self.fill(scope, envelope, deadline).await;
        let msg_id = envelope.msg_id.clone().expect("fill makes one");
        let wait_ms = Some(timeout.as_millis() as u64);
        let request = Request::Submit { envelope: Box::new(envelope), sent_at_ms: None, wait_ms };
        match message(self.request_by(&request, deadline).await?)?.response {
            Some(response) => Ok(response),
            None => match self.wait_by(&msg_id, deadline).await {
                // It was accepted: however the waiting failed, the message goes on.
                Err(error) if error.retryable() => Err(Error::Timeout { msg_id }),
                ended => ended,
            },
        }
    }

    /// The message as it stands, with its hops.
    pub async fn status(&self, msg_id: &MsgId) -> Result<MessageView, Error> {
        let request = Request::Message { msg_id: msg_id.clone(), wait_ms: None };
        message(self.request_by(&request, self.by_default()).await?)
    }

    /// Waits for the end of a message that anybody handed in, on any node.
    pub async fn wait(&self, msg_id: &MsgId, timeout: Duration) -> Result<Response, Error> {
        self.wait_by(msg_id, Instant::now() + timeout).await
    }

    async fn wait_by(&self, msg_id: &MsgId, deadline: Instant) -> Result<Response, Error> {
        loop {
            let remaining = deadline.saturating_duration_since(Instant::now());
            let wait_ms = Some(remaining.as_millis() as u64);
            let request = Request::Message { msg_id: msg_id.clone(), wait_ms };
            let answer = self.request_by(&request, deadline).await?;
            if let Some(response) = message(answer)?.response {
                return Ok(response);
            }
            // A wait ends a little early; what is left is too short for another.
            if deadline.saturating_duration_since(Instant::now()) < Duration::from_secs(1) {
                return Err(Error::Timeout { msg_id: msg_id.clone() });
            }
        }
    }

    /// Any request, as it is; sent again until it is answered or `timeout` is over.
    pub async fn request(&self, request: Request, timeout: Duration) -> Result<Answer, Error> {
        self.request_by(&request, Instant::now() + timeout).await
    }

    async fn request_by(&self, request: &Request, deadline: Instant) -> Result<Answer, Error> {
        self.connection.request(request, deadline).await
    }

    pub(crate) fn unreachable(&self) -> Error {
        self.connection.unreachable()
    }

    pub(crate) async fn refused(&self) -> Error {
        self.connection.refused().await
    }

    pub(crate) async fn revoked(&self) -> Error {
        self.connection.revoked().await
    }

    pub(crate) fn drain_timeout(&self) -> Duration {
        self.connection.options().drain_timeout
    }

    pub(crate) fn request_timeout(&self) -> Duration {
        self.connection.options().request_timeout
    }

    /// An agent's events are its own.
    pub(crate) fn sign(&self, envelope: &mut Envelope) {
        if let Some(agent_id) = &self.agent_id {
            envelope.source.get_or_insert_with(|| source_of(agent_id));
        }
    }

    fn by_default(&self) -> Instant {
        Instant::now() + self.request_timeout()
    }

    /// Who the cluster says we are.
    pub fn principal(&self) -> Principal {
        self.welcome().principal.clone()
    }

    /// The latest node's greeting.
    pub fn welcome(&self) -> Arc<Welcome> {
        self.connection.welcome().expect("a client is handed out after its first welcome")
    }

    /// Ends the connection for all clones. An agent's connection ends with the agent: here it stays.
    pub async fn close(self) {
        if self.agent_id.is_none() {
            self.connection.close().await;
        }
    }

    /// Makes what is absent. Inside a handler the message becomes a child of the one handled, if
    /// this identity may speak for the agent that was given it.
    async fn fill(&self, scope: Option<Scope>, mut envelope: Envelope, deadline: Instant) -> Envelope {
        // A caller that names its message and no trace gets one from the cluster: made up here it
        // would be new content each time the same message is sent.
        if envelope.msg_id.is_none() {
            envelope.msg_id = Some(made("m", MsgId::parse));
            if scope.is_none() {
                envelope.trace_id.get_or_insert_with(|| made("t", TraceId::parse));
            }
        }
        if let Some(scope) = scope {
            envelope.trace_id.get_or_insert_with(|| scope.trace_id.clone());
            let ours = self.connection.welcome().is_some_and(|w| w.principal.acts_for(&scope.agent_id));
            let same_trace = envelope.trace_id.as_ref() == Some(&scope.trace_id);
            let source = envelope.source.as_ref().map(|source| &source.agent_id);
            if ours && same_trace && source.is_none_or(|source| *source == scope.agent_id) {
                envelope.source.get_or_insert_with(|| source_of(&scope.agent_id));
                envelope.parent_msg_id.get_or_insert_with(|| scope.msg_id.clone());
            }
            if envelope.parent_msg_id.as_ref() == Some(&scope.msg_id) {
                scope.taken(deadline).await;
            }
        }
        self.sign(&mut envelope);
        envelope
    }
}

fn source_of(agent_id: &AgentId) -> Source {
    Source { agent_id: agent_id.clone(), session_id: None }
}

/// A new id: a letter and a ULID.
pub(crate) fn made<T, E: fmt::Debug>(letter: &str, parse: impl FnOnce(&str) -> Result<T, E>) -> T {
    parse(&format!("{letter}_{}", Ulid::generate())).expect("letters and digits are legal in an id")
}

fn message(answer: Answer) -> Result<MessageView, Error> {
    match answer {
        Answer::Message(view) => Ok(*view),
        _ => Err(Error::Unexpected { asked: "message" }),
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = self.connection.welcome().map(|welcome| welcome.node_id);
        f.debug_struct("Client")
            .field("agent_id", &self.agent_id)
            .field("node", &node)
            .finish_non_exhaustive()
    }
}

/// Without the view, which holds an excerpt.
impl fmt::Debug for Submitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Submitted")
            .field("msg_id", &self.msg_id)
            .field("trace_id", &self.trace_id)
            .field("state", &self.view.record.state.name())
            .finish_non_exhaustive()
    }
}
