//! What a session knows of one task, and how that is read from a delivery or from the inbox.

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use reach_protocol::{
    AgentId, Envelope, MsgId, TraceId,
    frame::{Delivery, Held},
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    client::Client,
    inbox::{Progress, StoredTask},
    task::{Outcome, Task},
};

/// One task of this run.
pub(crate) struct Entry {
    pub(crate) trace_id: TraceId,
    pub(crate) envelope: Envelope,
    pub(crate) deadline: Instant,
    pub(crate) attempt: u32,
    pub(crate) resumed: bool,
    /// A row of it is on disk.
    pub(crate) stored: bool,
    /// That row says that the handler may have been started.
    pub(crate) begun: bool,
    /// `received` was sent for this attempt.
    pub(crate) said: bool,
    /// The cluster has taken it.
    pub(crate) received: bool,
    /// Whether it ever took it, for those who speak for this task.
    pub(crate) taken: watch::Sender<bool>,
    pub(crate) recording: bool,
    pub(crate) cancel: CancellationToken,
    pub(crate) stage: Stage,
}

/// How far it is, in this process.
pub(crate) enum Stage {
    /// From an earlier run: nothing happens before the cluster's verdict.
    Held(Option<Arc<Outcome>>),
    Storing,
    /// On disk, and `received` is not on its way yet.
    Reporting,
    /// Waits for a free handler.
    Ready,
    Running,
    Saving(Arc<Outcome>),
    Done(Arc<Outcome>),
    /// The cluster has recorded it, or wants it no more; on its way to the ring.
    Settling(Arc<Outcome>),
    /// Its handler was told to stop; then the slot is released, for this attempt.
    Cancelling(u32),
}

impl Entry {
    pub(crate) fn found(task: StoredTask) -> (MsgId, Self) {
        let now = wall_ms();
        let left = Duration::from_millis(task.expires_wall_ms.saturating_sub(now));
        let entry = Self {
            trace_id: task.trace_id,
            envelope: task.envelope,
            deadline: Instant::now() + left,
            attempt: task.attempt,
            resumed: task.progress == Progress::Running,
            stored: true,
            begun: task.progress == Progress::Running,
            said: false,
            received: false,
            taken: watch::Sender::new(false),
            recording: false,
            cancel: CancellationToken::new(),
            stage: Stage::Held(task.outcome),
        };
        (task.msg_id, entry)
    }

    /// With a handler that is free `at_once`, the one write says also that it may have been started.
    pub(crate) fn delivered(
        delivery: Delivery,
        outcome: Option<Arc<Outcome>>,
        at_once: bool,
    ) -> (StoredTask, Self) {
        let left = Duration::from_millis(delivery.expires_in_ms);
        let entry = Self {
            trace_id: delivery.trace_id.clone(),
            envelope: delivery.envelope.clone(),
            deadline: Instant::now() + left,
            attempt: delivery.attempt,
            resumed: false,
            stored: false,
            begun: at_once,
            said: false,
            received: false,
            taken: watch::Sender::new(false),
            recording: false,
            cancel: CancellationToken::new(),
            stage: outcome.clone().map_or(Stage::Storing, Stage::Done),
        };
        let task = StoredTask {
            msg_id: delivery.msg_id,
            trace_id: delivery.trace_id,
            flow_seq: delivery.flow_seq,
            attempt: delivery.attempt,
            progress: match (&outcome, at_once) {
                (Some(_), _) => Progress::Finished,
                (None, true) => Progress::Running,
                (None, false) => Progress::Received,
            },
            expires_wall_ms: wall_ms().saturating_add(delivery.expires_in_ms),
            envelope: delivery.envelope,
            outcome,
        };
        (task, entry)
    }

    /// The cluster has it that this agent was given the task.
    pub(crate) fn take(&mut self) {
        self.received = true;
        self.taken.send_replace(true);
    }

    /// What attaching says of it; nothing of what is not on disk, or is on its way out.
    pub(crate) fn held(&self, msg_id: &MsgId) -> Option<Held> {
        let finished = match &self.stage {
            Stage::Cancelling(_) | Stage::Settling(_) => return None,
            Stage::Held(outcome) => outcome.is_some(),
            Stage::Done(_) => true,
            _ => false,
        };
        let held = Held { msg_id: msg_id.clone(), attempt: self.attempt, finished };
        self.stored.then_some(held)
    }

    pub(crate) fn task(&self, msg_id: &MsgId, agent_id: &AgentId, client: &Client) -> Task {
        Task {
            msg_id: msg_id.clone(),
            trace_id: self.trace_id.clone(),
            attempt: self.attempt,
            resumed: self.resumed,
            envelope: self.envelope.clone(),
            agent_id: agent_id.clone(),
            deadline: self.deadline,
            client: client.clone(),
            taken: self.taken.subscribe(),
        }
    }
}

/// Why a delivery can't be handed to a handler.
pub(crate) fn wrong(delivery: &Delivery) -> Option<&'static str> {
    if delivery.envelope.msg_id.as_ref().is_some_and(|msg_id| *msg_id != delivery.msg_id) {
        return Some("the envelope is of another message");
    }
    delivery.envelope.payload.is_none().then_some("the envelope has no payload")
}

fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}
