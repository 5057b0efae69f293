//! Why a command did not do what it was asked: the product's one error shape, and an exit status.

use clap::error::{ContextKind, ContextValue};
use reach_protocol::{Code, ErrorReply};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reply}")]
pub struct Failure {
    pub exit: u8,
    pub reply: Box<ErrorReply>,
}

impl Failure {
    /// The command can't be carried out as it was given; nothing was tried.
    pub fn usage(message: impl Into<String>) -> Self {
        Self { exit: crate::exit::USAGE, reply: Box::new(ErrorReply::new(Code::Invalid, message)) }
    }

    /// The arguments were not understood.
    pub fn arguments(error: &clap::Error) -> Self {
        let text = error.render().to_string();
        let text = text.strip_prefix("error: ").unwrap_or(&text);
        let text = ["\n\nUsage:", "\n\nFor more information"]
            .iter()
            .fold(text, |text, end| text.split_once(end).map_or(text, |(before, _)| before));
        let mut failure = Self::usage(text.split_whitespace().collect::<Vec<_>>().join(" "));
        if let Some(ContextValue::String(argument)) = error.get(ContextKind::InvalidArg) {
            failure.reply.field = argument.split(' ').next().map(str::to_string);
        }
        failure
    }

    /// Refused here, before any node was asked.
    pub fn refused(message: impl Into<String>) -> Self {
        ErrorReply::new(Code::Invalid, message).into()
    }
}

impl From<ErrorReply> for Failure {
    fn from(reply: ErrorReply) -> Self {
        Self { exit: reply.code.exit_status(), reply: Box::new(reply) }
    }
}

impl From<Box<ErrorReply>> for Failure {
    fn from(reply: Box<ErrorReply>) -> Self {
        Self { exit: reply.code.exit_status(), reply }
    }
}

impl From<reach_client::Error> for Failure {
    fn from(error: reach_client::Error) -> Self {
        let reply = match error {
            reach_client::Error::Refused(reply) => *reply,
            error => ErrorReply {
                msg_id: error.msg_id().cloned(),
                retryable: error.retryable(),
                ..ErrorReply::new(error.code(), error.to_string())
            },
        };
        reply.into()
    }
}

impl From<reach_config::Error> for Failure {
    fn from(error: reach_config::Error) -> Self {
        use reach_config::Error;
        match error {
            Error::Write { .. } | Error::ContextExists { .. } => Self::refused(error.to_string()),
            _ => Self::usage(error.to_string()),
        }
    }
}

impl From<reach_transport::Error> for Failure {
    fn from(error: reach_transport::Error) -> Self {
        Self::refused(error.to_string())
    }
}

/// What came through code that needs no finer word keeps the word it began with.
impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        let error = match error.downcast::<Self>() {
            Ok(failure) => return failure,
            Err(error) => error,
        };
        let error = match error.downcast::<reach_client::Error>() {
            Ok(error) => return error.into(),
            Err(error) => error,
        };
        match error.downcast::<reach_config::Error>() {
            Ok(error) => error.into(),
            Err(error) => Self::refused(format!("{error:#}")),
        }
    }
}
