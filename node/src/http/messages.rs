//! Messages over HTTP: a caller's side, an agent's reports, and traces.

use std::sync::Arc;

use axum::{
    body::Body,
    extract::Path,
    http::{HeaderValue, Request, StatusCode, Uri, header},
};
use reach_protocol::{
    AgentId, Code, Command, Envelope, ErrorReply, InstanceId, Json, MessageState, Money, MsgId, Reply,
    command::FailReason,
    envelope::{Response, from_json},
    frame::{self, Answer, MessageView},
    json::without_nulls,
    message::Holder,
};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use super::{
    LOCAL, REQUEST_MAX, State, agents, input,
    output::{Answered, body, json, ok, unexpected},
};
use crate::{node::Shared, show};

/// 200 with the response when the message has ended, else 202 with where to ask.
pub async fn submit(axum::extract::State(shared): State, request: Request<Body>) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Query {
        #[serde(default)]
        wait: input::Wait,
        /// The run of `source.agent_id` that submits it.
        instance: Option<InstanceId>,
    }
    let Query { wait, instance } = input::query(request.uri())?;
    let sent_at_ms = input::date_ms(request.headers());
    let envelope = Box::new(Envelope::from_json(&input::json(request).await?)?);
    if let Some(instance) = instance {
        let missing =
            || ErrorReply::invalid("source", "a run submits as its agent: name it in source.agent_id");
        let agent_id = &envelope.source.as_ref().ok_or_else(missing)?.agent_id;
        agents::must_be_current(&shared, agent_id, &instance).await?;
    }
    let request = frame::Request::Submit { envelope, sent_at_ms, wait_ms: wait.some() };
    match shared.answer(&LOCAL, request, false, Instant::now() + REQUEST_MAX).await? {
        Answer::Message(view) => match &view.response {
            Some(response) => ok(&response_json(response)),
            None => Ok(accepted(&view)),
        },
        _ => Err(unexpected()),
    }
}

fn accepted(view: &MessageView) -> axum::response::Response {
    let mut response = json(StatusCode::ACCEPTED, &show::message_json(&view.record));
    let location = format!("/v1/messages/{}", view.record.msg_id);
    let location = HeaderValue::from_str(&location).expect("ids consist of header characters");
    response.headers_mut().insert(header::LOCATION, location);
    response
}

fn response_json(response: &Response) -> Value {
    let mut value = serde_json::to_value(response).expect("a response is plain data");
    without_nulls(&mut value, 0);
    if let Some(error) = &response.error {
        value["error"] = show::error(error);
    }
    value
}

/// The message with its hops, and once it has ended with its response.
pub async fn show(axum::extract::State(shared): State, Path(msg_id): Path<String>, uri: Uri) -> Answered {
    let input::WaitFor { wait, stale } = input::query(&uri)?;
    let msg_id: MsgId = input::id("msg_id", &msg_id)?;
    let ask = |wait_ms, stale| {
        let request = frame::Request::Message { msg_id: msg_id.clone(), wait_ms };
        let shared = shared.clone();
        async move { shared.answer(&LOCAL, request, stale, Instant::now() + REQUEST_MAX).await }
    };
    // Waiting answers without the hops.
    if wait.some().is_some() {
        ask(wait.some(), stale).await?;
    }
    let Answer::Message(view) = ask(None, stale || wait.some().is_some()).await? else {
        return Err(unexpected());
    };
    let mut value = show::message(&view).json;
    if let Some(response) = &view.response {
        value["response"] = response_json(response);
    }
    ok(&value)
}

pub async fn list(axum::extract::State(shared): State, uri: Uri) -> Answered {
    let input::Page { limit, after, stale } = input::query(&uri)?;
    let after = after.as_deref().map(|after| input::id("after", after)).transpose()?;
    let request = frame::Request::Messages { limit, after };
    match shared.answer(&LOCAL, request, stale, Instant::now() + REQUEST_MAX).await? {
        Answer::Messages { items, next, as_of } => ok(&show::messages(&items, next.as_ref(), as_of).json),
        _ => Err(unexpected()),
    }
}

pub async fn payload(axum::extract::State(shared): State, Path(msg_id): Path<String>, uri: Uri) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    content(&shared, frame::Request::Payload { msg_id: input::id("msg_id", &msg_id)? }, stale).await
}

pub async fn result(axum::extract::State(shared): State, Path(msg_id): Path<String>, uri: Uri) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    content(&shared, frame::Request::Result { msg_id: input::id("msg_id", &msg_id)? }, stale).await
}

async fn content(shared: &Arc<Shared>, request: frame::Request, stale: bool) -> Answered {
    match shared.answer(&LOCAL, request, stale, Instant::now() + REQUEST_MAX).await? {
        Answer::Body(content) => body(&content),
        _ => Err(unexpected()),
    }
}

pub async fn trace(axum::extract::State(shared): State, Path(trace_id): Path<String>, uri: Uri) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    let request = frame::Request::Trace { trace_id: input::id("trace_id", &trace_id)? };
    match shared.answer(&LOCAL, request, stale, Instant::now() + REQUEST_MAX).await? {
        Answer::Trace { hops, messages, as_of } => ok(&show::trace(&hops, &messages, as_of).json),
        _ => Err(unexpected()),
    }
}

/// The attempt a report is about.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Attempt {
    agent_id: AgentId,
    instance_id: InstanceId,
    attempt: u32,
}

pub async fn received(
    axum::extract::State(shared): State,
    Path(msg_id): Path<String>,
    request: Request<Body>,
) -> Answered {
    let input::Nothing {} = input::query(request.uri())?;
    let msg_id = input::id("msg_id", &msg_id)?;
    let Attempt { agent_id, instance_id, attempt } = from_json(&input::json(request).await?)?;
    let holder = Holder { agent_id, instance: instance_id };
    report(&shared, Command::Received { msg_id, attempt, holder }).await
}

pub async fn complete(
    axum::extract::State(shared): State,
    Path(msg_id): Path<String>,
    request: Request<Body>,
) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Complete {
        agent_id: AgentId,
        instance_id: InstanceId,
        attempt: u32,
        #[serde(default = "Json::null")]
        result: Json,
        #[serde(default)]
        excerpt: String,
        cost: Option<Money>,
    }
    let input::Nothing {} = input::query(request.uri())?;
    let msg_id = input::id("msg_id", &msg_id)?;
    let said: Complete = from_json(&input::json(request).await?)?;
    shared.must_fit(&msg_id, &said.excerpt, &said.result)?;
    let Complete { agent_id, instance_id, attempt, result, excerpt, cost } = said;
    let holder = Holder { agent_id, instance: instance_id };
    report(&shared, Command::Complete { msg_id, attempt, holder, excerpt, result, cost }).await
}

pub async fn fail(
    axum::extract::State(shared): State,
    Path(msg_id): Path<String>,
    request: Request<Body>,
) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Fail {
        agent_id: AgentId,
        instance_id: InstanceId,
        attempt: u32,
        reason: FailReason,
        #[serde(default)]
        message: String,
    }
    let input::Nothing {} = input::query(request.uri())?;
    let msg_id = input::id("msg_id", &msg_id)?;
    let Fail { agent_id, instance_id, attempt, reason, message } = from_json(&input::json(request).await?)?;
    let holder = Holder { agent_id, instance: instance_id };
    report(&shared, Command::Fail { msg_id, attempt, holder, reason, message }).await
}

/// Proposes an agent's word and answers with the message's new state.
async fn report(shared: &Shared, command: Command) -> Answered {
    let deadline = Instant::now() + REQUEST_MAX;
    let about = match &command {
        Command::Received { msg_id, attempt, holder }
        | Command::Complete { msg_id, attempt, holder, .. }
        | Command::Fail { msg_id, attempt, holder, .. } => (msg_id.clone(), *attempt, holder.clone()),
        _ => return Err(unexpected()),
    };
    match shared.propose(command, deadline).await {
        Ok(Reply::Message(record)) => ok(&show::message_json(&record)),
        Ok(_) => Err(unexpected()),
        Err(error) => {
            let (msg_id, attempt, holder) = about;
            shared.release_stale(&error, msg_id, attempt, holder, deadline).await;
            Err(error.into())
        }
    }
}

/// The run still works on the attempt: both its heartbeats are heard.
pub async fn progress(
    axum::extract::State(shared): State,
    Path(msg_id): Path<String>,
    request: Request<Body>,
) -> Answered {
    let input::Nothing {} = input::query(request.uri())?;
    let msg_id: MsgId = input::id("msg_id", &msg_id)?;
    let Attempt { agent_id, instance_id, attempt } = from_json(&input::json(request).await?)?;
    agents::must_be_current(&shared, &agent_id, &instance_id).await?;
    let request = frame::Request::Message { msg_id: msg_id.clone(), wait_ms: None };
    let Answer::Message(view) = shared.answer(&LOCAL, request, false, Instant::now() + REQUEST_MAX).await?
    else {
        return Err(unexpected());
    };
    let record = &view.record;
    let is_running = matches!(&record.state, MessageState::Acknowledged { holder }
        if holder.agent_id == agent_id && holder.instance == instance_id && record.attempt == attempt);
    if !is_running {
        let message = format!("attempt {attempt} of {msg_id} is not running at this agent: drop it");
        let error = ErrorReply::new(Code::StaleAttempt, message).with_msg_id(&msg_id);
        let holder = Holder { agent_id, instance: instance_id };
        shared.release_stale(&error, msg_id, attempt, holder, Instant::now() + REQUEST_MAX).await;
        return Err(error.into());
    }
    shared.heartbeats.heard_over_http(&agent_id, &instance_id, shared.clock.mono_ms(), true);
    ok(&show::message_json(record))
}
