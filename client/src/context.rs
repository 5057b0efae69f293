//! Where a handler stands: what it asks for becomes part of the same trace, under its own message.

use std::{fmt, time::Duration};

use reach_protocol::{AgentId, Envelope, MsgId, TraceId, envelope::Response};

use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::{
    client::{Client, Submitted},
    error::Error,
};

tokio::task_local! {
    static SCOPE: Scope;
}

#[derive(Clone, Debug)]
pub(crate) struct Scope {
    pub(crate) trace_id: TraceId,
    pub(crate) msg_id: MsgId,
    pub(crate) agent_id: AgentId,
    pub(crate) taken: watch::Receiver<bool>,
}

impl Scope {
    /// Waits until the cluster has it that the agent was given this task: before, it may be nobody's
    /// parent. A task that is let go of is not waited for.
    pub(crate) async fn taken(&self, deadline: Instant) {
        let mut taken = self.taken.clone();
        // Whatever comes of it, the cluster judges what is sent next.
        let _ = timeout_at(deadline, taken.wait_for(|taken| *taken)).await;
    }
}

/// The scope of the handler that runs on this task. Tasks that a handler spawns are outside of it.
pub(crate) fn current() -> Option<Scope> {
    SCOPE.try_with(Scope::clone).ok()
}

pub(crate) async fn within<F: Future>(scope: Scope, future: F) -> F::Output {
    SCOPE.scope(scope, future).await
}

/// Asks on behalf of the task it was taken from, also from tasks that the handler spawns.
#[derive(Clone)]
pub struct Context {
    client: Client,
    scope: Scope,
}

impl Context {
    pub(crate) fn new(client: Client, scope: Scope) -> Self {
        Self { client, scope }
    }

    /// As [`Client::submit`]; trace and parent are this task's unless the envelope names others.
    pub async fn submit(&self, envelope: Envelope) -> Result<Submitted, Error> {
        self.client.submit_in(Some(self.scope.clone()), envelope).await
    }

    /// As [`Client::call`]; trace and parent are this task's unless the envelope names others.
    pub async fn call(&self, envelope: Envelope, timeout: Duration) -> Result<Response, Error> {
        self.client.call_in(Some(self.scope.clone()), envelope, timeout).await
    }

    /// The agent's own client.
    pub fn client(&self) -> &Client {
        &self.client
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("scope", &self.scope).finish_non_exhaustive()
    }
}
