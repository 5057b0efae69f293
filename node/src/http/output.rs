//! Answers: JSON with a status, and errors in their one shape.

use axum::{
    body::Body,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use reach_protocol::{Code, ErrorReply, Json};
use serde_json::Value;

use crate::show;

/// What a handler gives back.
pub type Answered = Result<Response, Refusal>;

/// An error on its way out: its code names the status.
#[derive(Debug)]
pub struct Refusal(pub ErrorReply);

impl From<ErrorReply> for Refusal {
    fn from(error: ErrorReply) -> Self {
        Self(error)
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(error) = self;
        let status = StatusCode::from_u16(error.code.http_status()).expect("the table holds statuses");
        let mut response = json(status, &show::error(&error));
        if let Some(ms) = error.retry_after_ms {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1_000)));
        }
        response
    }
}

pub fn ok(value: &Value) -> Answered {
    Ok(json(StatusCode::OK, value))
}

pub fn json(status: StatusCode, value: &Value) -> Response {
    text(status, "application/json", value.to_string())
}

/// A payload or a result, as it was given.
pub fn body(content: &Json) -> Answered {
    Ok(text(StatusCode::OK, "application/json", content.as_str().to_string()))
}

pub fn text(status: StatusCode, kind: &'static str, text: String) -> Response {
    let mut response = (status, Body::from(text)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

pub fn unexpected() -> Refusal {
    Refusal(ErrorReply::new(Code::Internal, "the node answered with something else"))
}
