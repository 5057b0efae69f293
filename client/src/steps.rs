//! What an agent's session asks for without waiting: each step is one write or one request, and
//! comes back to the session as a [`Step`].

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use reach_protocol::{
    AgentId, InstanceId, MsgId, Registration,
    frame::{Answer, Held, Request, Verdict},
};
use tokio::{sync::oneshot, time::Instant};

use crate::{
    connection::Connection,
    error::Error,
    inbox::{InboxError, Stored},
    link::{Beat, Link},
    task::Outcome,
    uptime::Started,
};

/// One request's retries last this long; then the session looks again whether it is still wanted.
const REPORT_MAX: Duration = Duration::from_secs(60);
/// Registering and attaching are for one link: after this long another node is tried.
const ATTACH_MAX: Duration = Duration::from_secs(10);

pub(crate) enum Step {
    Attached {
        link: Arc<Link>,
        held: Vec<Held>,
        answer: Result<(Vec<Verdict>, Beat), Error>,
    },
    /// A new task, or its new attempt, is on disk.
    Stored {
        msg_id: MsgId,
        attempt: u32,
        stored: Result<(), InboxError>,
    },
    /// `received` is on its way, and the mark that the handler may have been started is on disk.
    Said {
        msg_id: MsgId,
        attempt: u32,
    },
    /// `received` was answered.
    Reported {
        msg_id: MsgId,
        attempt: u32,
        answer: Result<(), Error>,
    },
    /// The outcome is on disk.
    Saved {
        msg_id: MsgId,
        stored: Result<(), InboxError>,
    },
    /// The outcome was answered.
    Recorded {
        msg_id: MsgId,
        attempt: u32,
        answer: Result<(), Error>,
    },
    /// It is in the ring, or gone if it was a failure.
    Settled {
        msg_id: MsgId,
        stored: Result<(), InboxError>,
    },
    /// Nothing follows from it, unless the disk failed or this run is stale.
    Asked {
        stored: Result<(), InboxError>,
        answer: Result<(), Error>,
    },
}

/// Who runs, and over what.
#[derive(Clone)]
pub(crate) struct Run {
    pub(crate) agent_id: AgentId,
    pub(crate) instance: InstanceId,
    pub(crate) registration: Arc<Registration>,
    pub(crate) started: Started,
    pub(crate) connection: Connection,
}

impl Run {
    pub(crate) async fn attach(self, link: Arc<Link>, held: Vec<Held>, window: u32) -> Step {
        let answer = self.attach_over(&link, held.clone(), window).await;
        Step::Attached { link, held, answer }
    }

    async fn attach_over(
        &self,
        link: &Link,
        held: Vec<Held>,
        window: u32,
    ) -> Result<(Vec<Verdict>, Beat), Error> {
        let deadline = Instant::now() + ATTACH_MAX;
        let (agent_id, instance) = (self.agent_id.clone(), self.instance.clone());
        let request = Request::Register {
            registration: Box::new((*self.registration).clone()),
            instance: instance.clone(),
            uptime_ms: self.started.uptime_ms(),
        };
        let heartbeat_ms = match self.connection.request_over(link, &request, deadline).await? {
            Answer::Registered { heartbeat_ms, .. } => heartbeat_ms,
            _ => return Err(Error::Unexpected { asked: "registration" }),
        };
        let expected = held.len();
        let request =
            Request::Attach { agent_id: agent_id.clone(), instance: instance.clone(), held, window };
        match self.connection.request_over(link, &request, deadline).await? {
            Answer::Attached { verdicts } if verdicts.len() == expected => {
                // Also with a TTL of its own: a beat that is not answered tells of a lost node.
                let every = Duration::from_millis(heartbeat_ms.min(link.welcome.heartbeat_ms).max(10));
                Ok((verdicts, Beat { generation: link.generation, agent_id, instance, every }))
            }
            _ => Err(Error::Unexpected { asked: "attachment" }),
        }
    }

    /// Says `received`, and tells `said` when it is on its way.
    pub(crate) async fn report(self, msg_id: MsgId, attempt: u32, said: oneshot::Sender<()>) -> Step {
        let request = Request::Received {
            agent_id: self.agent_id.clone(),
            instance: self.instance.clone(),
            msg_id: msg_id.clone(),
            attempt,
        };
        let said = Mutex::new(Some(said));
        let sent = || {
            let said = said.lock().expect("no panic holds this lock").take();
            // Nobody waits for it when the session has ended.
            let _ = said.map(|said| said.send(()));
        };
        let answer = self.ask_telling(request, &sent).await;
        Step::Reported { msg_id, attempt, answer }
    }

    pub(crate) async fn record(self, msg_id: MsgId, attempt: u32, outcome: Arc<Outcome>) -> Step {
        let (agent_id, instance) = (self.agent_id.clone(), self.instance.clone());
        let request = match (*outcome).clone() {
            Outcome::Done { excerpt, result, cost } => {
                let msg_id = msg_id.clone();
                Request::Complete { agent_id, instance, msg_id, attempt, excerpt, result, cost }
            }
            Outcome::Failed { reason, message } => {
                Request::Fail { agent_id, instance, msg_id: msg_id.clone(), attempt, reason, message }
            }
        };
        let answer = self.ask(request).await;
        Step::Recorded { msg_id, attempt, answer }
    }

    /// After `removed`: what the disk still holds, the cluster must not believe to be let go.
    pub(crate) async fn release(self, msg_id: MsgId, attempt: u32, removed: Option<Stored>) -> Step {
        let stored = match removed {
            Some(removed) => removed.done().await,
            None => Ok(()),
        };
        let (agent_id, instance) = (self.agent_id.clone(), self.instance.clone());
        let answer = self.ask(Request::Release { agent_id, instance, msg_id, attempt }).await;
        Step::Asked { stored, answer }
    }

    pub(crate) async fn drain(&self) -> Result<(), Error> {
        let (agent_id, instance) = (self.agent_id.clone(), self.instance.clone());
        self.ask(Request::Drain { agent_id, instance }).await
    }

    pub(crate) async fn detach(&self, deadline: Instant) -> Result<(), Error> {
        let (agent_id, instance) = (self.agent_id.clone(), self.instance.clone());
        self.connection.request(&Request::Detach { agent_id, instance }, deadline).await.map(drop)
    }

    async fn ask(&self, request: Request) -> Result<(), Error> {
        self.ask_telling(request, &|| {}).await
    }

    async fn ask_telling(&self, request: Request, sent: &(dyn Fn() + Sync)) -> Result<(), Error> {
        let deadline = Instant::now() + REPORT_MAX;
        let answer = self.connection.request_telling(&request, deadline, sent).await.map(drop);
        if answer.as_ref().is_err_and(Error::retryable) {
            // The session will ask again: not at once, since this may be an answer such as
            // `disk_full`, which comes quickly.
            tokio::time::sleep(self.connection.options().pause_max).await;
        }
        answer
    }
}

pub(crate) async fn store(msg_id: MsgId, attempt: u32, stored: Stored) -> Step {
    Step::Stored { msg_id, attempt, stored: stored.done().await }
}

/// After a `received` that was never sent nothing comes: it is said again. `begin` must be on disk
/// before the handler is started.
pub(crate) async fn said(
    msg_id: MsgId,
    attempt: u32,
    begin: Option<Stored>,
    said: oneshot::Receiver<()>,
) -> Step {
    let begun = match begin {
        Some(begin) => begin.done().await,
        None => Ok(()),
    };
    match begun.is_ok() && said.await.is_ok() {
        true => Step::Said { msg_id, attempt },
        false => Step::Asked { stored: begun, answer: Ok(()) },
    }
}

pub(crate) async fn save(msg_id: MsgId, stored: Stored) -> Step {
    Step::Saved { msg_id, stored: stored.done().await }
}

pub(crate) async fn settle(msg_id: MsgId, stored: Stored) -> Step {
    Step::Settled { msg_id, stored: stored.done().await }
}
