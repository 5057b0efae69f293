//! Events, topics and groups over HTTP.

use std::sync::Arc;

use axum::{body::Body, extract::Path, http::Request, http::Uri};
use reach_protocol::{
    Envelope, ErrorReply, EventType, Name, Topics, codec,
    envelope::from_json,
    event::{Span, Start, Word},
    frame::{self, Answer},
};
use serde::Deserialize;
use serde_json::json;
use tokio::time::Instant;

use super::{
    LOCAL, REQUEST_MAX, State, input,
    output::{Answered, ok, unexpected},
};
use crate::{cli::values, node::Shared, show};

async fn ask(shared: &Arc<Shared>, request: frame::Request, stale: bool) -> Result<Answer, ErrorReply> {
    shared.answer(&LOCAL, request, stale, Instant::now() + REQUEST_MAX).await
}

/// One envelope, or a list of them: all are stored, or none.
pub async fn publish(axum::extract::State(shared): State, request: Request<Body>) -> Answered {
    let input::Nothing {} = input::query(request.uri())?;
    let text = input::json(request).await?;
    let is_list = text.trim_start().starts_with('[');
    let events: Vec<Envelope> = if is_list { from_json(&text)? } else { vec![from_json(&text)?] };
    if events.is_empty() {
        return Err(ErrorReply::invalid("body", "the list is empty: give at least one event").into());
    }
    let Answer::Published(published) = ask(&shared, frame::Request::Publish { events }, false).await? else {
        return Err(unexpected());
    };
    let mut items = published.iter().map(|published| show::published(published).json);
    match is_list {
        true => ok(&json!({ "items": items.collect::<Vec<_>>() })),
        false => ok(&items.next().ok_or_else(unexpected)?),
    }
}

pub async fn read(axum::extract::State(shared): State, Path(event_type): Path<String>, uri: Uri) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Query {
        from: Option<String>,
        #[serde(default = "input::page_limit")]
        limit: u32,
        #[serde(default)]
        wait: input::Wait,
        #[serde(default)]
        stale: bool,
    }
    let Query { from, limit, wait, stale } = input::query(&uri)?;
    let from = start(from.as_deref().unwrap_or("earliest"))?;
    let event_type = topic_type(&event_type)?;
    let request = frame::Request::Events { event_type, from, limit, wait_ms: wait.some() };
    match ask(&shared, request, stale).await? {
        Answer::Events { items, next, as_of } => ok(&show::events(&items, next, as_of).json),
        _ => Err(unexpected()),
    }
}

pub async fn topics(axum::extract::State(shared): State, uri: Uri) -> Answered {
    let input::Page { limit, after, stale } = input::query(&uri)?;
    let after = after.as_deref().map(|after| input::id("after", after)).transpose()?;
    match ask(&shared, frame::Request::Topics { limit, after }, stale).await? {
        Answer::Topics { items, next, as_of } => ok(&show::topics(&items, next.as_ref(), as_of).json),
        _ => Err(unexpected()),
    }
}

pub async fn topic(
    axum::extract::State(shared): State,
    Path(event_type): Path<String>,
    uri: Uri,
) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    one_topic(&shared, frame::Request::Topic { event_type: topic_type(&event_type)? }, stale).await
}

/// What is left out goes by the rules.
pub async fn set_topic(
    axum::extract::State(shared): State,
    Path(event_type): Path<String>,
    request: Request<Body>,
) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Declared {
        max_age_ms: Option<u64>,
        max_bytes: Option<u64>,
    }
    let input::Nothing {} = input::query(request.uri())?;
    let event_type = topic_type(&event_type)?;
    let Declared { max_age_ms, max_bytes } = from_json(&input::json(request).await?)?;
    one_topic(&shared, frame::Request::SetTopic { event_type, max_age_ms, max_bytes }, false).await
}

pub async fn trim(
    axum::extract::State(shared): State,
    Path(event_type): Path<String>,
    request: Request<Body>,
) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Trim {
        below: u64,
    }
    let input::Nothing {} = input::query(request.uri())?;
    let event_type = topic_type(&event_type)?;
    let Trim { below } = from_json(&input::json(request).await?)?;
    one_topic(&shared, frame::Request::Trim { event_type, to: below }, false).await
}

async fn one_topic(shared: &Arc<Shared>, request: frame::Request, stale: bool) -> Answered {
    match ask(shared, request, stale).await? {
        Answer::Topic(topic) => ok(&show::topic(&topic).json),
        _ => Err(unexpected()),
    }
}

pub async fn remove_topic(
    axum::extract::State(shared): State,
    Path(event_type): Path<String>,
    uri: Uri,
) -> Answered {
    let input::Nothing {} = input::query(&uri)?;
    let event_type = topic_type(&event_type)?;
    ask(&shared, frame::Request::RemoveTopic { event_type: event_type.clone() }, false).await?;
    ok(&json!({ "removed": event_type }))
}

pub async fn groups(axum::extract::State(shared): State, uri: Uri) -> Answered {
    let input::Page { limit, after, stale } = input::query(&uri)?;
    let after = after.as_deref().map(|after| input::id("after", after)).transpose()?;
    match ask(&shared, frame::Request::Groups { limit, after }, stale).await? {
        Answer::Groups { items, next, as_of } => ok(&show::groups(&items, next.as_ref(), as_of).json),
        _ => Err(unexpected()),
    }
}

pub async fn group(axum::extract::State(shared): State, Path(group): Path<String>, uri: Uri) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    one_group(&shared, frame::Request::Group { group: input::id("group", &group)? }, stale).await
}

pub async fn make_group(
    axum::extract::State(shared): State,
    Path(group): Path<String>,
    request: Request<Body>,
) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Group {
        topics: Topics,
        from: Option<From>,
    }
    let input::Nothing {} = input::query(request.uri())?;
    let group = input::id("group", &group)?;
    let Group { topics, from } = from_json(&input::json(request).await?)?;
    let from = from.map_or(Ok(Start::Latest), From::start)?;
    one_group(&shared, frame::Request::CreateGroup { group, topics, from }, false).await
}

pub async fn reset_group(
    axum::extract::State(shared): State,
    Path(group): Path<String>,
    request: Request<Body>,
) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Reset {
        from: From,
    }
    let input::Nothing {} = input::query(request.uri())?;
    let group = input::id("group", &group)?;
    let Reset { from } = from_json(&input::json(request).await?)?;
    one_group(&shared, frame::Request::ResetGroup { group, from: from.start()? }, false).await
}

async fn one_group(shared: &Arc<Shared>, request: frame::Request, stale: bool) -> Answered {
    match ask(shared, request, stale).await? {
        Answer::Group(view) => ok(&show::group(&view).json),
        _ => Err(unexpected()),
    }
}

pub async fn drop_group(
    axum::extract::State(shared): State,
    Path(group): Path<String>,
    uri: Uri,
) -> Answered {
    let input::Nothing {} = input::query(&uri)?;
    let group: Name = input::id("group", &group)?;
    ask(&shared, frame::Request::RemoveGroup { group: group.clone() }, false).await?;
    ok(&json!({ "removed": group }))
}

/// `?pull=ID` names the hand-out: asked again with it, the answer is the same.
pub async fn pull(
    axum::extract::State(shared): State,
    Path(group): Path<String>,
    request: Request<Body>,
) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Query {
        #[serde(default = "input::page_limit")]
        max: u32,
        #[serde(default)]
        wait: input::Wait,
        member: Option<Name>,
        pull: Option<Name>,
    }
    let Query { max, wait, member, pull } = input::query(request.uri())?;
    let group = input::id("group", &group)?;
    let pull = match pull {
        Some(name) => u128::from_be_bytes(codec::digest(name.as_bytes())),
        None => ulid::Ulid::generate().into(),
    };
    let request =
        frame::Request::Pull { group, member: member.unwrap_or_else(local), pull, max, wait_ms: wait.some() };
    match ask(&shared, request, false).await? {
        Answer::Pulled { events, gaps } => ok(&show::pulled(&events, &gaps).json),
        _ => Err(unexpected()),
    }
}

/// Events that a member was handed: one offset, or a list of them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct About {
    event_type: EventType,
    offsets: Vec<u64>,
    member: Option<Name>,
    delay_ms: Option<u64>,
    cause: Option<String>,
}

pub async fn ack(state: State, path: Path<String>, request: Request<Body>) -> Answered {
    say(state, path, request, |about| match (about.delay_ms, &about.cause) {
        (None, None) => Ok(Word::Ack),
        _ => Err(ErrorReply::invalid("delay_ms", "delay_ms and cause go with nack")),
    })
    .await
}

pub async fn nack(state: State, path: Path<String>, request: Request<Body>) -> Answered {
    say(state, path, request, |about| {
        let cause = about.cause.clone().unwrap_or_default();
        Ok(Word::Nack { delay_ms: about.delay_ms.unwrap_or(0), cause })
    })
    .await
}

pub async fn extend(state: State, path: Path<String>, request: Request<Body>) -> Answered {
    say(state, path, request, |about| match (about.delay_ms, &about.cause) {
        (None, None) => Ok(Word::Extend),
        _ => Err(ErrorReply::invalid("delay_ms", "delay_ms and cause go with nack")),
    })
    .await
}

async fn say(
    axum::extract::State(shared): State,
    Path(group): Path<String>,
    request: Request<Body>,
    word: impl Fn(&About) -> Result<Word, ErrorReply>,
) -> Answered {
    let input::Nothing {} = input::query(request.uri())?;
    let group = input::id("group", &group)?;
    let about: About = from_json(&input::json(request).await?)?;
    let word = word(&about)?;
    let member = about.member.unwrap_or_else(local);
    let about = vec![(about.event_type, Span::of(about.offsets))];
    match ask(&shared, frame::Request::Say { group, member, about, word }, false).await? {
        Answer::Heard(changed) => ok(&show::heard(changed, "").json),
        _ => Err(unexpected()),
    }
}

fn local() -> Name {
    Name::parse(&LOCAL.own_agent_id()).expect("an id is a name")
}

fn topic_type(text: &str) -> Result<EventType, ErrorReply> {
    reach_protocol::event::event_type(text)
}

fn start(text: &str) -> Result<Start, ErrorReply> {
    values::start(text).map_err(|why| ErrorReply::invalid("from", why))
}

/// `earliest`, `latest`, an offset as a number, a time.
#[derive(Deserialize)]
#[serde(untagged)]
enum From {
    Offset(u64),
    Text(String),
}

impl From {
    fn start(self) -> Result<Start, ErrorReply> {
        match self {
            Self::Offset(offset) => Ok(Start::Offset(offset)),
            Self::Text(text) => start(&text),
        }
    }
}
