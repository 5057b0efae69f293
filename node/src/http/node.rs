//! The node and its cluster: whether it lives, whether work can flow, its figures, and the rules.

use std::time::Duration;

use axum::{
    body::Body,
    http::{HeaderMap, HeaderValue, Request, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use reach_protocol::{Code, ErrorReply, RulesRecord, frame};
use serde_json::json;
use tokio::time::Instant;

use super::{
    LOCAL, REQUEST_MAX, State, input,
    output::{Answered, Refusal, json as answer_json, ok, text, unexpected},
};
use crate::show;

/// How long a majority may take to confirm that work can flow.
const READY_MAX: Duration = Duration::from_secs(1);

pub async fn healthz() -> Response {
    answer_json(StatusCode::OK, &json!({ "status": "alive" }))
}

/// Green when a task submitted here now would be taken: a majority confirms the leader, and this
/// node has space.
pub async fn readyz(axum::extract::State(shared): State) -> Answered {
    let ready = match shared.stop.is_cancelled() {
        true => Err(ErrorReply::new(Code::NodeDraining, "this node is going").with_retry_after_ms(1_000)),
        false => shared.read_barrier(Instant::now() + READY_MAX).await,
    };
    ready.and_then(|()| shared.must_have_space())?;
    ok(&json!({ "status": "ready" }))
}

pub async fn metrics(axum::extract::State(shared): State) -> Response {
    text(StatusCode::OK, "text/plain; version=0.0.4", shared.metrics.render(&shared))
}

pub async fn cluster(axum::extract::State(shared): State, uri: Uri) -> Answered {
    let input::Fresh { .. } = input::query(&uri)?;
    match shared.read_cluster().await {
        frame::Answer::Cluster(view) => ok(&show::cluster(&view).json),
        _ => Err(unexpected()),
    }
}

pub async fn problems(axum::extract::State(shared): State, uri: Uri) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    match shared.read_problems(stale, Instant::now() + REQUEST_MAX).await {
        frame::Answer::Problems { items, as_of } => ok(&show::problems(&items, as_of).json),
        _ => Err(unexpected()),
    }
}

pub async fn rules(axum::extract::State(shared): State, uri: Uri) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    let deadline = Instant::now() + REQUEST_MAX;
    match shared.answer(&LOCAL, frame::Request::Rules, stale, deadline).await? {
        frame::Answer::Rules(record) => Ok(with_tag(&record)),
        _ => Err(unexpected()),
    }
}

/// The whole document as TOML; `If-Match` names the revision it is meant to replace.
pub async fn apply_rules(axum::extract::State(shared): State, request: Request<Body>) -> Answered {
    let input::Nothing {} = input::query(request.uri())?;
    let expect = expected(request.headers())?;
    let text = input::text(request, "application/toml").await?;
    let deadline = Instant::now() + REQUEST_MAX;
    match shared.answer(&LOCAL, frame::Request::ApplyRules { text, expect }, false, deadline).await? {
        frame::Answer::Rules(record) => Ok(with_tag(&record)),
        _ => Err(unexpected()),
    }
}

fn with_tag(record: &RulesRecord) -> Response {
    let mut response = ok(&show::rules(record).json).into_response();
    let tag = HeaderValue::from_str(&format!("\"{}\"", record.revision)).expect("a number in quotes");
    response.headers_mut().insert(header::ETAG, tag);
    response
}

fn expected(headers: &HeaderMap) -> Result<Option<u64>, Refusal> {
    let Some(tag) = headers.get(header::IF_MATCH) else { return Ok(None) };
    let revision = tag.to_str().ok().and_then(|tag| tag.trim_matches('"').parse().ok());
    let wrong = || ErrorReply::invalid("If-Match", "If-Match is a revision in quotes, such as \"7\"");
    Ok(Some(revision.ok_or_else(wrong)?))
}
