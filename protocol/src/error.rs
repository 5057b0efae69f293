//! The one shape of an error and the closed list of its codes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::id::{MsgId, Tag, TraceId};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident $text:literal http $http:literal exit $exit:literal retry $retry:literal;)*) => {
        /// What went wrong, in one word that programs may rely on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Code { $($(#[$doc])* #[serde(rename = $text)] $name,)* }

        impl Code {
            pub const ALL: &'static [Code] = &[$(Code::$name),*];

            pub fn as_str(self) -> &'static str {
                match self { $(Code::$name => $text),* }
            }

            /// The status of an HTTP answer with this code. Ends of a message come with 200.
            pub fn http_status(self) -> u16 {
                match self { $(Code::$name => $http),* }
            }

            /// The exit status of a command that ends with this code.
            pub fn exit_status(self) -> u8 {
                match self { $(Code::$name => $exit),* }
            }

            /// Whether the same request, with the same `msg_id`, may be sent again.
            pub fn retryable(self) -> bool {
                match self { $(Code::$name => $retry),* }
            }
        }
    };
}

codes! {
    /// The request breaks a rule; `field` names where.
    Invalid "invalid" http 400 exit 3 retry false;
    UnversionedType "unversioned_type" http 400 exit 3 retry false;
    /// `parent_msg_id` names no message that was delivered to the sender.
    UnknownParent "unknown_parent" http 400 exit 3 retry false;
    Unauthenticated "unauthenticated" http 401 exit 3 retry false;
    Forbidden "forbidden" http 403 exit 3 retry false;
    NotFound "not_found" http 404 exit 3 retry false;
    Gone "gone" http 410 exit 3 retry false;
    /// The `msg_id` is taken by a message with other content.
    MsgIdConflict "msg_id_conflict" http 409 exit 3 retry false;
    IllegalTransition "illegal_transition" http 409 exit 3 retry false;
    RevisionConflict "revision_conflict" http 409 exit 3 retry false;
    /// A later run of this agent has taken its place: stop this one.
    StaleInstance "stale_instance" http 409 exit 3 retry false;
    /// The attempt is no longer the current one: drop it.
    StaleAttempt "stale_attempt" http 409 exit 3 retry false;
    TooLarge "too_large" http 413 exit 3 retry false;
    /// The topic has no such event; the message names the range.
    OffsetOutOfRange "offset_out_of_range" http 416 exit 3 retry false;
    NoCandidate "no_candidate" http 422 exit 3 retry false;
    /// The path exists, for another method.
    MethodNotAllowed "method_not_allowed" http 405 exit 3 retry false;
    /// A body that is not plain `application/json`.
    UnsupportedMediaType "unsupported_media_type" http 415 exit 3 retry false;
    /// The request did not arrive whole in time.
    RequestTimeout "request_timeout" http 408 exit 3 retry false;
    /// Too much is waiting; `retry_after_ms` says when to come back.
    Overloaded "overloaded" http 429 exit 4 retry true;
    NoLeader "no_leader" http 503 exit 4 retry true;
    NoMajority "no_majority" http 503 exit 4 retry true;
    DiskFull "disk_full" http 503 exit 4 retry true;
    NodeDraining "node_draining" http 503 exit 4 retry true;
    /// No answer came. What was asked may still happen: ask by `msg_id`.
    OutcomeUnknown "outcome_unknown" http 504 exit 5 retry true;
    /// An end of a message: its agent reported an error.
    AgentError "agent_error" http 200 exit 1 retry false;
    /// An end of a message: its agent could not parse the content.
    Unparseable "unparseable" http 200 exit 1 retry false;
    /// An end of a message, as `timeout`: every attempt was used up.
    AttemptsExhausted "attempts_exhausted" http 200 exit 1 retry false;
    /// An end of a message: its deadline passed.
    Expired "expired" http 200 exit 1 retry false;
    /// An end of a message: its agent refused it.
    Rejected "rejected" http 200 exit 1 retry false;
    /// A defect of the product; worth a report.
    Internal "internal" http 500 exit 10 retry false;
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What a person or a program needs besides the code to go on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hint {
    /// Required capabilities that no agent declares.
    pub missing: Option<Vec<Tag>>,
    /// Declared capabilities with the most similar names.
    pub nearest: Option<Vec<Tag>>,
    pub queue_depth: Option<u64>,
    pub free_slots: Option<u64>,
}

/// The one error shape. The message names the thing and the way out, never content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct ErrorReply {
    pub code: Code,
    pub message: String,
    pub field: Option<String>,
    pub retryable: bool,
    pub retry_after_ms: Option<u64>,
    pub trace_id: Option<TraceId>,
    pub msg_id: Option<MsgId>,
    pub hint: Option<Box<Hint>>,
}

impl ErrorReply {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            field: None,
            retryable: code.retryable(),
            retry_after_ms: None,
            trace_id: None,
            msg_id: None,
            hint: None,
        }
    }

    /// `invalid`, naming the field.
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self { field: Some(field.into()), ..Self::new(Code::Invalid, message) }
    }

    /// `too_large`, naming the field, its size and the limit, in bytes.
    pub fn too_large(field: impl Into<String>, size: usize, limit: usize) -> Self {
        let field = field.into();
        let message = format!("{field} has {size} bytes; the limit is {limit}");
        Self { field: Some(field), ..Self::new(Code::TooLarge, message) }
    }

    pub fn with_msg_id(self, msg_id: &MsgId) -> Self {
        Self { msg_id: Some(msg_id.clone()), ..self }
    }

    pub fn with_retry_after_ms(self, retry_after_ms: u64) -> Self {
        Self { retry_after_ms: Some(retry_after_ms), ..self }
    }

    pub fn with_hint(self, hint: Hint) -> Self {
        Self { hint: Some(Box::new(hint)), ..self }
    }
}

impl fmt::Display for ErrorReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_written_as_it_is_named() {
        for code in Code::ALL {
            assert_eq!(serde_json::to_string(code).unwrap(), format!("\"{}\"", code.as_str()));
        }
    }
}
