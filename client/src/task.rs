//! What a handler is given and what it gives back. `Debug` shows ids and sizes, never content.

use std::{
    fmt,
    time::{Duration, Instant},
};

use reach_protocol::{AgentId, Envelope, Json, Money, MsgId, TraceId, command::FailReason, limits::Limits};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::{
    client::Client,
    context::{Context, Scope},
    error::Error,
};

/// One attempt at one message, stored in the inbox and answered for.
#[derive(Clone)]
pub struct Task {
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    /// From 0. A later attempt that arrives while this one runs takes its place in the reports.
    pub attempt: u32,
    /// An earlier run of this process may have begun this task: effects outside may be there
    /// already.
    pub resumed: bool,
    pub envelope: Envelope,
    pub(crate) agent_id: AgentId,
    pub(crate) deadline: Instant,
    pub(crate) client: Client,
    pub(crate) taken: watch::Receiver<bool>,
}

impl Task {
    /// The payload as it was sent; `null` if there was none.
    pub fn payload(&self) -> Json {
        self.envelope.payload.clone().unwrap_or_else(Json::null)
    }

    /// The payload as a type of yours; ends as `unparseable` when it doesn't fit.
    pub fn decode<T: for<'a> Deserialize<'a>>(&self) -> Result<T, Failure> {
        Ok(self.payload().decode()?)
    }

    pub fn intent(&self) -> Option<&str> {
        self.envelope.intent.as_deref()
    }

    /// What is left until the message's deadline, by this machine's clock.
    pub fn expires_in(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// For asking other agents on behalf of this task.
    pub fn context(&self) -> Context {
        Context::new(self.client.clone(), self.scope())
    }

    pub(crate) fn scope(&self) -> Scope {
        Scope {
            trace_id: self.trace_id.clone(),
            msg_id: self.msg_id.clone(),
            agent_id: self.agent_id.clone(),
            taken: self.taken.clone(),
        }
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("msg_id", &self.msg_id)
            .field("trace_id", &self.trace_id)
            .field("attempt", &self.attempt)
            .field("resumed", &self.resumed)
            .finish_non_exhaustive()
    }
}

/// A finished task: its result, one line about it, and what it cost.
#[derive(Clone)]
pub struct Done {
    pub(crate) result: Json,
    pub(crate) excerpt: String,
    pub(crate) cost: Option<Money>,
}

impl Done {
    pub fn new(result: impl Into<Json>) -> Self {
        Self { result: result.into(), excerpt: String::new(), cost: None }
    }

    /// One line that people see in lists. Cut to 1 KiB.
    pub fn excerpt(mut self, excerpt: impl Into<String>) -> Self {
        self.excerpt = cut(excerpt.into(), Limits::default().excerpt_bytes);
        self
    }

    pub fn cost(mut self, cost: Money) -> Self {
        self.cost = Some(cost);
        self
    }
}

impl fmt::Debug for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Done").field("result", &self.result).field("cost", &self.cost).finish_non_exhaustive()
    }
}

/// Why there is no result. The text reaches the caller and the record: say no content in it. Cut
/// to 1 KiB.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// It was tried and went wrong.
    #[error("{0}")]
    Error(String),
    /// The content can't be read; trying again won't help.
    #[error("{0}")]
    Unparseable(String),
    /// This agent won't do it.
    #[error("{0}")]
    Refused(String),
    /// This agent can't do it now.
    #[error("{0}")]
    Busy(String),
}

/// A failed call to another agent fails the task.
impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Error(error.to_string())
    }
}

/// The place only: serde quotes what it found.
impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        let (line, column) = (error.line(), error.column());
        Self::Unparseable(format!("not of the expected form at line {line} column {column}"))
    }
}

/// How a task ended, as it stands in the inbox.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    Done { excerpt: String, result: Json, cost: Option<Money> },
    Failed { reason: FailReason, message: String },
}

impl Outcome {
    pub(crate) fn of(ended: Result<Done, Failure>) -> Self {
        let failed = |reason, message| Self::Failed { reason, message: cut(message, 1024) };
        match ended {
            Ok(Done { result, excerpt, cost }) => Self::Done { excerpt, result, cost },
            Err(Failure::Error(message)) => failed(FailReason::Error, message),
            Err(Failure::Unparseable(message)) => failed(FailReason::Unparseable, message),
            Err(Failure::Refused(message)) => failed(FailReason::Refused, message),
            Err(Failure::Busy(message)) => failed(FailReason::Busy, message),
        }
    }
}

/// At most `max` bytes, at a character's edge.
pub(crate) fn cut(mut text: String, max: usize) -> String {
    let end = (0..=max.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.truncate(end);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_excerpt_is_cut_between_characters() {
        let done = Done::new(Json::null()).excerpt("ä".repeat(600));
        assert_eq!(done.excerpt.len(), 1024);
        assert_eq!(cut("aä".into(), 2), "a");
    }

    #[test]
    fn a_parse_error_tells_the_place_and_no_content() {
        let json = Json::parse(r#""hunter2""#).unwrap();
        let failure = Failure::from(json.decode::<u64>().unwrap_err());
        assert!(matches!(&failure, Failure::Unparseable(text) if !text.contains("hunter2")), "{failure:?}");
        assert!(!format!("{:?}", Done::new(json).excerpt("hunter2")).contains("hunter2"));
    }
}
