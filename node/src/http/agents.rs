//! Agents over HTTP: the registry, and an agent's own side of it without an SDK.

use axum::{
    body::Body,
    extract::Path,
    http::{HeaderMap, Request, Uri},
};
use reach_protocol::{
    AgentId, Code, Envelope, ErrorReply, InstanceId, Registration,
    codec::Encoded,
    envelope::from_json,
    frame::{self, Delivery},
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    LOCAL, REQUEST_MAX, State, input,
    output::{Answered, ok, unexpected},
};
use crate::{cli::values, node::Shared, show};

/// Tasks that one poll may ask for.
const TASKS_MAX: usize = 100;

pub async fn list(axum::extract::State(shared): State, uri: Uri) -> Answered {
    let page: input::AgentsPage = input::query(&uri)?;
    let metadata = page.metadata.as_deref().map(values::pair).transpose();
    let metadata = metadata.map_err(|why| ErrorReply::invalid("metadata", why))?;
    let after = page.after.as_deref().map(|after| input::id("after", after)).transpose()?;
    let input::AgentsPage { state, capability, limit, stale, .. } = page;
    let request = frame::Request::Agents { state, capability, metadata, limit, after };
    match shared.answer(&LOCAL, request, stale, Instant::now() + REQUEST_MAX).await? {
        frame::Answer::Agents { items, next, as_of } => ok(&show::agents(&items, next.as_ref(), as_of).json),
        _ => Err(unexpected()),
    }
}

pub async fn show(axum::extract::State(shared): State, Path(agent_id): Path<String>, uri: Uri) -> Answered {
    let input::Fresh { stale } = input::query(&uri)?;
    agent(&shared, input::id("agent_id", &agent_id)?, stale).await
}

async fn agent(shared: &std::sync::Arc<Shared>, agent_id: AgentId, stale: bool) -> Answered {
    answer_agent(shared, frame::Request::Agent { agent_id }, stale).await
}

async fn answer_agent(shared: &std::sync::Arc<Shared>, request: frame::Request, stale: bool) -> Answered {
    match shared.answer(&LOCAL, request, stale, Instant::now() + REQUEST_MAX).await? {
        frame::Answer::Agent(view) => ok(&show::agent(&view).json),
        _ => Err(unexpected()),
    }
}

pub async fn drain(axum::extract::State(shared): State, Path(agent_id): Path<String>, uri: Uri) -> Answered {
    let input::Nothing {} = input::query(&uri)?;
    let agent_id = input::id("agent_id", &agent_id)?;
    answer_agent(&shared, frame::Request::DrainAgent { agent_id, drain_seq: None }, false).await
}

pub async fn resume(axum::extract::State(shared): State, Path(agent_id): Path<String>, uri: Uri) -> Answered {
    let input::Nothing {} = input::query(&uri)?;
    let agent_id = input::id("agent_id", &agent_id)?;
    answer_agent(&shared, frame::Request::ResumeAgent { agent_id, drain_seq: None }, false).await
}

/// Said again, it is as it should be. With `instance` it says nothing to a later run.
pub async fn remove(axum::extract::State(shared): State, Path(agent_id): Path<String>, uri: Uri) -> Answered {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Meant {
        instance: Option<InstanceId>,
    }
    let Meant { instance } = input::query(&uri)?;
    let agent_id: AgentId = input::id("agent_id", &agent_id)?;
    let request = frame::Request::Remove { agent_id: agent_id.clone(), instance };
    match shared.answer(&LOCAL, request, false, Instant::now() + REQUEST_MAX).await? {
        frame::Answer::Done => ok(&show::removed(&agent_id).json),
        _ => Err(unexpected()),
    }
}

/// What a run adds to its registration: a name for itself, so that the same run may register again,
/// and how long it has been running.
#[derive(Deserialize)]
struct Run {
    instance_id: Option<InstanceId>,
    uptime_ms: Option<u64>,
}

/// Upsert. The path names the agent; the body may name it too, and nobody else.
pub async fn register(
    axum::extract::State(shared): State,
    Path(agent_id): Path<String>,
    request: Request<Body>,
) -> Answered {
    let input::Nothing {} = input::query(request.uri())?;
    let agent_id: AgentId = input::id("agent_id", &agent_id)?;
    let text = input::json(request).await?;
    let run: Run = from_json(&text)?;
    let mut body: serde_json::Map<String, Value> = from_json(&text)?;
    body.remove("instance_id");
    body.remove("uptime_ms");
    let named = body.entry("agent_id").or_insert_with(|| json!(agent_id));
    if named.as_str() != Some(agent_id.as_str()) {
        return Err(ErrorReply::invalid("agent_id", "the body names another agent than the path").into());
    }
    let registration: Registration = from_json(&Value::Object(body).to_string())?;
    let instance = run
        .instance_id
        .unwrap_or_else(|| InstanceId::parse(&format!("i_{}", ulid::Ulid::generate())).expect("a legal id"));
    let request = frame::Request::Register {
        registration: Box::new(registration),
        instance,
        uptime_ms: run.uptime_ms.unwrap_or(0),
    };
    match shared.answer(&LOCAL, request, false, Instant::now() + REQUEST_MAX).await? {
        frame::Answer::Registered { instance, heartbeat_ms, ttl_ms } => {
            ok(&json!({ "instance_id": instance, "ttl_ms": ttl_ms, "heartbeat_ms": heartbeat_ms }))
        }
        _ => Err(unexpected()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Heartbeat {
    instance_id: InstanceId,
    /// Said by the agent's own loop: it would take a task now.
    #[serde(default)]
    ready: bool,
}

pub async fn heartbeat(
    axum::extract::State(shared): State,
    Path(agent_id): Path<String>,
    request: Request<Body>,
) -> Answered {
    let input::Nothing {} = input::query(request.uri())?;
    let agent_id: AgentId = input::id("agent_id", &agent_id)?;
    let date_ms = input::date_ms(request.headers());
    let Heartbeat { instance_id, ready } = from_json(&input::json(request).await?)?;
    must_be_current(&shared, &agent_id, &instance_id).await?;
    shared.heartbeats.heard_over_http(&agent_id, &instance_id, shared.clock.mono_ms(), ready);
    note_date(&shared, &agent_id, &instance_id, date_ms);
    agent(&shared, agent_id, true).await
}

/// What the sender's `Date` says of its calendar. It counts whole seconds: in the middle of its second
/// a right clock is at most half a second off, which is nobody's fault.
fn note_date(shared: &Shared, agent_id: &AgentId, instance: &InstanceId, date_ms: Option<u64>) {
    if let (Some(date_ms), Some(calendar_ms)) = (date_ms, shared.clock.cluster_calendar_ms()) {
        let offset_ms = (date_ms + 500) as i64 - calendar_ms as i64;
        shared.heartbeats.off_by(agent_id, instance, offset_ms);
    }
}

/// A node that lags may not know the newest run yet: it asks the leader before it says no.
pub async fn must_be_current(
    shared: &Shared,
    agent_id: &AgentId,
    instance: &InstanceId,
) -> Result<(), ErrorReply> {
    if shared.must_be_current(agent_id, instance).is_ok() {
        return Ok(());
    }
    shared.read_barrier(Instant::now() + REQUEST_MAX).await?;
    shared.must_be_current(agent_id, instance)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inbox {
    instance: InstanceId,
    #[serde(default)]
    wait: input::Wait,
    #[serde(default = "one")]
    max: usize,
}

fn one() -> usize {
    1
}

/// The dispatch stream of an agent without an SDK. A task that was fetched and not `received` is
/// given again after 5 s, and to another agent after 10 s.
pub async fn inbox(
    axum::extract::State(shared): State,
    Path(agent_id): Path<String>,
    uri: Uri,
    headers: HeaderMap,
) -> Answered {
    let agent_id: AgentId = input::id("agent_id", &agent_id)?;
    let Inbox { instance, wait, max } = input::query(&uri)?;
    if !(1..=TASKS_MAX).contains(&max) {
        return Err(ErrorReply::invalid("max", format!("max is a number from 1 to {TASKS_MAX}")).into());
    }
    if wait.0 > crate::node::WAIT_MAX {
        let message = format!("a poll waits for at most {} s", crate::node::WAIT_MAX.as_secs());
        return Err(ErrorReply::invalid("wait", message).into());
    }
    must_be_current(&shared, &agent_id, &instance).await?;
    note_date(&shared, &agent_id, &instance, input::date_ms(&headers));
    let tasks = shared.delivery.poll(agent_id, instance, max, wait.0).await?;
    let items = tasks.into_iter().map(task).collect::<Result<Vec<_>, _>>()?;
    ok(&json!({ "items": items }))
}

fn task(delivery: Delivery<Encoded<Envelope>>) -> Result<Value, ErrorReply> {
    let unreadable = |_| ErrorReply::new(Code::Internal, "a stored envelope could not be read");
    let delivery = delivery.open().map_err(unreadable)?;
    Ok(json!({
        "msg_id": delivery.msg_id,
        "trace_id": delivery.trace_id,
        "flow_seq": delivery.flow_seq,
        "attempt": delivery.attempt,
        "expires_in_ms": delivery.expires_in_ms,
        "envelope": delivery.envelope.to_json(),
    }))
}
