//! What a request says, read once: its path's id, its query, its body. Whatever is wrong with it is
//! one error that names the part.

use std::{fmt::Display, str::FromStr, time::Duration};

use axum::{
    body::Body,
    extract::Query,
    http::{HeaderMap, Request, Uri, header},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use reach_protocol::{AgentState, Code, ErrorReply, Tag, limits::BODY_MAX};
use serde::{Deserialize, Deserializer, de::DeserializeOwned};

use crate::cli::values;

/// A payload or a result of the greatest size, and the rest of an envelope around it.
pub const BYTES_MAX: usize = BODY_MAX + (256 << 10);
/// A body must be there within this time.
const BODY_TIME_MAX: Duration = Duration::from_secs(10);

/// The id in a path.
pub fn id<T: FromStr>(field: &str, text: &str) -> Result<T, ErrorReply>
where
    T::Err: Display,
{
    text.parse().map_err(|error: T::Err| ErrorReply::invalid(field, error.to_string()))
}

/// The query, every part of which must be known.
pub fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T, ErrorReply> {
    let Query(query) = Query::<T>::try_from_uri(uri).map_err(|error| {
        let mut cause: &dyn std::error::Error = &error;
        while let Some(source) = cause.source() {
            cause = source;
        }
        ErrorReply::invalid("query", format!("the query can't be read: {cause}"))
    })?;
    Ok(query)
}

/// A body as text of this kind.
pub async fn text(request: Request<Body>, kind: &str) -> Result<String, ErrorReply> {
    let headers = request.headers();
    let given = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let (given, charset) = given.split_once(';').unwrap_or((given, ""));
    let charset = charset.trim().to_ascii_lowercase();
    let is_utf8 = matches!(charset.as_str(), "" | "charset=utf-8" | "charset=\"utf-8\"");
    if !given.trim().eq_ignore_ascii_case(kind) || !is_utf8 {
        let message = format!("send the body as UTF-8 with the header Content-Type: {kind}");
        return Err(ErrorReply::new(Code::UnsupportedMediaType, message));
    }
    if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
        let message = "send the body as it is, without a Content-Encoding";
        return Err(ErrorReply::new(Code::UnsupportedMediaType, message));
    }
    if let Some(length) = length(headers).filter(|length| *length > BYTES_MAX) {
        return Err(ErrorReply::too_large("body", length, BYTES_MAX));
    }
    let body = Limited::new(request.into_body(), BYTES_MAX).collect();
    let body = tokio::time::timeout(BODY_TIME_MAX, body).await.map_err(|_| {
        let message = format!("the body was not there whole after {} s", BODY_TIME_MAX.as_secs());
        ErrorReply::new(Code::RequestTimeout, message)
    })?;
    let body = body.map_err(|error| match error.is::<LengthLimitError>() {
        true => ErrorReply::too_large("body", BYTES_MAX + 1, BYTES_MAX),
        false => ErrorReply::invalid("body", "the body ended too early"),
    })?;
    String::from_utf8(body.to_bytes().into())
        .map_err(|_| ErrorReply::invalid("body", "the body is not UTF-8"))
}

pub async fn json(request: Request<Body>) -> Result<String, ErrorReply> {
    text(request, "application/json").await
}

fn length(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

/// The sender's clock, Unix milliseconds, when it was told.
pub fn date_ms(headers: &HeaderMap) -> Option<u64> {
    let date = httpdate::parse_http_date(headers.get(header::DATE)?.to_str().ok()?).ok()?;
    let since = date.duration_since(std::time::UNIX_EPOCH).ok()?;
    u64::try_from(since.as_millis()).ok()
}

/// `wait=30s`; none, or `0s`, does not wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wait(pub Duration);

impl Wait {
    /// None when there is nothing to wait for.
    pub fn some(self) -> Option<u64> {
        (!self.0.is_zero()).then_some(self.0.as_millis() as u64)
    }
}

impl<'de> Deserialize<'de> for Wait {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if matches!(text.as_str(), "0" | "0s" | "0ms") {
            return Ok(Self::default());
        }
        values::duration(&text).map(Self).map_err(|why| serde::de::Error::custom(format!("wait: {why}")))
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fresh {
    /// Answer from what this node knows.
    #[serde(default)]
    pub stale: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WaitFor {
    #[serde(default)]
    pub wait: Wait,
    #[serde(default)]
    pub stale: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Page {
    #[serde(default = "page_limit")]
    pub limit: u32,
    pub after: Option<String>,
    #[serde(default)]
    pub stale: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentsPage {
    pub state: Option<AgentState>,
    pub capability: Option<Tag>,
    /// `KEY=VALUE`.
    pub metadata: Option<String>,
    #[serde(default = "page_limit")]
    pub limit: u32,
    pub after: Option<String>,
    #[serde(default)]
    pub stale: bool,
}

pub fn page_limit() -> u32 {
    100
}
