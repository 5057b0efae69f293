//! Answers as people and programs see them: one JSON value, and one table of the same.

mod events;

use reach_protocol::{
    AgentId, AgentState, InstanceId, MessageState, MsgId, RulesRecord, Stamp, StateReason,
    agent::AgentRecord,
    command::ExpiryPause,
    envelope::Response,
    error::ErrorReply,
    frame::{AgentView, ClusterView, Heard, MessageView, NodeView, Problem},
    json::without_nulls,
    message::{DeadLetter, Hop, MessageRecord, PendingReason, StateName, TimeoutCause},
};
use serde_json::{Value, json};

use crate::node;

pub use events::{
    delivered_json, done, event_line, events, group, groups, heard, published, pulled, topic, topics,
};

/// What a command prints: `-o json` takes the value, a table the rest.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shown {
    pub json: Value,
    pub head: Vec<&'static str>,
    pub rows: Vec<Vec<String>>,
    /// Sentences below the table.
    pub notes: Vec<String>,
}

/// RFC 3339 in UTC, to the millisecond.
pub fn time(wall_ms: u64) -> String {
    let at = jiff::Timestamp::from_millisecond(wall_ms as i64).unwrap_or_default();
    format!("{at:.3}")
}

/// A duration in the unit a person would choose.
pub fn span(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms} ms"),
        1_000..60_000 => format!("{:.1} s", ms as f64 / 1e3),
        60_000..3_600_000 => format!("{} min {} s", ms / 60_000, ms % 60_000 / 1_000),
        3_600_000..172_800_000 => format!("{} h {} min", ms / 3_600_000, ms % 3_600_000 / 60_000),
        _ => format!("{} d {} h", ms / 86_400_000, ms % 86_400_000 / 3_600_000),
    }
}

pub fn version() -> Shown {
    let version = env!("CARGO_PKG_VERSION");
    Shown {
        json: json!({ "version": version }),
        notes: vec![format!("agent-reach {version}")],
        ..Shown::default()
    }
}

/// `1 agent`, `2 agents`.
pub fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Why nobody has the message yet, where that may last.
pub fn why_it_waits(record: &MessageRecord) -> Option<&'static str> {
    let MessageState::Pending { reason } = &record.state else { return None };
    match reason {
        PendingReason::DeliveryFailed if record.retry_at_ms.is_some() => {
            Some("its agents did not receive it, it is tried again in a while")
        }
        PendingReason::AgentLost if record.retry_at_ms.is_some() => {
            Some("its agent was lost, it is tried again in a while")
        }
        PendingReason::Saturated => Some("every agent that can take it is busy"),
        PendingReason::NoneReady => Some("no agent that can take it is ready"),
        PendingReason::DeliveryFailed => Some("its agent did not receive it, another one is sought"),
        PendingReason::AgentLost => Some("its agent was lost, another one is sought"),
        PendingReason::DecisionStale => None,
    }
}

/// An error in its one shape, absent parts left out.
pub fn error(error: &ErrorReply) -> Value {
    let mut value = serde_json::to_value(error).expect("an error is plain data");
    without_nulls(&mut value, 1);
    value
}

pub fn agents(items: &[AgentView], next: Option<&AgentId>, as_of: Stamp) -> Shown {
    let rows = items
        .iter()
        .map(|view| {
            let registration = &view.record.registration;
            let tags: Vec<String> =
                registration.capabilities.iter().map(|tag| format!("{}={}", tag.name, tag.weight)).collect();
            let age = |age: Option<u64>| age.map_or("-".to_string(), span);
            vec![
                registration.agent_id.to_string(),
                view.record.state.to_string(),
                view.record.reason.as_str().to_string(),
                format!("{}/{}", view.running, registration.max_concurrency),
                age(view.heard.map(|heard| heard.level1_age_ms)),
                age(view.heard.map(|heard| heard.level2_age_ms)),
                view.heard.map_or("-".to_string(), |heard| heard.node.to_string()),
                offset(view.offset_ms),
                tags.join(" "),
            ]
        })
        .collect();
    let json = json!({
        "items": items.iter().map(agent_json).collect::<Vec<_>>(),
        "next": next,
        "as_of": time(as_of.wall_ms),
    });
    let skewed = items.iter().filter_map(skewed_agent);
    let notes = skewed.chain(next.map(|next| format!("more: --after {next}"))).collect();
    Shown {
        json,
        head: vec!["AGENT", "STATE", "WHY", "RUNNING", "L1", "L2", "NODE", "OFFSET", "CAPABILITIES"],
        rows,
        notes,
    }
}

/// A calendar minus the cluster's.
fn offset(offset_ms: Option<i64>) -> String {
    match offset_ms {
        None => "-".to_string(),
        Some(ms) if node::is_skewed(ms) => {
            format!("{}{}", if ms < 0 { "-" } else { "+" }, span(ms.unsigned_abs()))
        }
        Some(ms) => format!("{ms} ms"),
    }
}

fn skewed_agent(view: &AgentView) -> Option<String> {
    let offset_ms = view.offset_ms.filter(|ms| node::is_skewed(*ms))?;
    let registration = &view.record.registration;
    let skewed = node::Skewed {
        who: node::Who::Agent(registration.agent_id.clone()),
        host: registration.host.clone(),
        offset_ms,
        leader: None,
        most_are: false,
    };
    Some(format!("warning: {skewed}"))
}

fn agent_json(view: &AgentView) -> Value {
    let record = &view.record;
    let registration = &record.registration;
    let mut value = json!({
        "agent_id": registration.agent_id,
        "instance_id": record.instance,
        "state": record.state,
        "reason": record.reason.as_str(),
        "since": time(record.since.wall_ms),
        "registered": time(record.registered.wall_ms),
        "host": registration.host,
        "port": registration.port,
        "capabilities": registration.capabilities,
        "metadata": registration.metadata,
        "status": registration.status,
        "max_concurrency": registration.max_concurrency,
        "subscriptions": (!registration.subscriptions.is_empty()).then_some(&registration.subscriptions),
        "ttl_ms": view.ttl_ms,
        "drain": record.drain.as_ref().map(|drain| json!({ "by": drain.by.to_string(), "at": time(drain.at.wall_ms) })),
        "running": view.running,
        "last_act": view.last_act.as_ref().map(|act| json!({
            "did": act.did, "msg_id": act.msg_id, "at": time(act.at.wall_ms)
        })),
        "way_back": way_back(view),
        "level1_age_ms": view.heard.map(|heard| heard.level1_age_ms),
        "level2_age_ms": view.heard.map(|heard| heard.level2_age_ms),
        "node": view.heard.map(|heard| heard.node.to_string()),
        "offset_ms": view.offset_ms,
    });
    without_nulls(&mut value, 0);
    if let Some(capabilities) = value["capabilities"].as_array_mut() {
        capabilities.iter_mut().for_each(|capability| without_nulls(capability, 0));
    }
    value
}

pub fn agent(view: &AgentView) -> Shown {
    let record = &view.record;
    let registration = &record.registration;
    let heard = |age: fn(&Heard) -> u64| {
        let Some(heard) = &view.heard else { return "not heard".to_string() };
        let age_ms = age(heard);
        let late = match age_ms.checked_sub(view.ttl_ms).filter(|late_ms| *late_ms > 0) {
            Some(late_ms) => format!(" · late by {}", span(late_ms)),
            None => String::new(),
        };
        format!("{} ago, by {}{late}", span(age_ms), heard.node)
    };
    let mut rows = vec![
        vec!["agent".into(), registration.agent_id.to_string()],
        vec![
            "state".into(),
            format!("{}: {}, since {}", record.state, record.reason.as_str(), time(record.since.wall_ms)),
        ],
    ];
    if let Some(drain) = &record.drain {
        rows.push(vec!["drained".into(), format!("by {} at {}", drain.by, time(drain.at.wall_ms))]);
    }
    rows.extend(way_back(view).map(|way| vec!["way back".into(), way]));
    rows.extend([
        vec!["instance".into(), record.instance.to_string()],
        vec!["level 1, process".into(), heard(|heard| heard.level1_age_ms)],
        vec!["level 2, main loop".into(), heard(|heard| heard.level2_age_ms)],
        vec![
            "late after".into(),
            match registration.ttl_ms {
                Some(_) => format!(
                    "{}: it asked for more than others have, so its death is found later",
                    span(view.ttl_ms)
                ),
                None => span(view.ttl_ms),
            },
        ],
        vec!["running".into(), format!("{} of {}", view.running, registration.max_concurrency)],
        vec![
            "last act".into(),
            view.last_act.as_ref().map_or("none since the answering node started".into(), |act| {
                format!("{} {} at {}", act.did.as_str(), act.msg_id, time(act.at.wall_ms))
            }),
        ],
        vec!["registered".into(), time(record.registered.wall_ms)],
    ]);
    if let Some(offset_ms) = view.offset_ms {
        let way = if offset_ms < 0 { "behind" } else { "ahead of" };
        let by = span(offset_ms.unsigned_abs());
        rows.push(vec!["clock".into(), format!("{by} {way} the cluster's")]);
    }
    for capability in &registration.capabilities {
        let mut words = format!("{} weight {}", capability.name, capability.weight);
        if let Some(version) = &capability.version {
            words += &format!(" version {version}");
        }
        if let Some(cost) = &capability.cost {
            words += &format!(" cost {cost}");
        }
        let schemas =
            [("input schema", &capability.input_schema), ("output schema", &capability.output_schema)];
        for (name, _) in schemas.iter().filter(|(_, schema)| schema.is_some()) {
            words += &format!(" · {name}");
        }
        rows.push(vec!["capability".into(), words]);
    }
    for (group, topics) in registration.groups() {
        rows.push(vec!["member of".into(), format!("{group}, which reads {topics}")]);
    }
    for (key, value) in &registration.metadata {
        rows.push(vec!["metadata".into(), format!("{key} = {}", value.as_str())]);
    }
    if let (Some(host), port) = (&registration.host, registration.port) {
        let port = port.map_or(String::new(), |port| format!(":{port}"));
        rows.push(vec!["says it is at".into(), format!("{host}{port}")]);
    }
    let notes = skewed_agent(view).into_iter().collect();
    Shown { json: agent_json(view), rows, notes, ..Shown::default() }
}

/// What would make it `ready` again; none when it is.
fn way_back(view: &AgentView) -> Option<String> {
    let record = &view.record;
    let agent_id = record.agent_id();
    let resume = format!("`agent-reach agents resume {agent_id}`");
    let then = |way: String| match &record.drain {
        Some(_) => format!("{way}, and {resume}"),
        None => way,
    };
    Some(match (record.state, record.reason) {
        (AgentState::Ready, _) => return None,
        (_, StateReason::Asked) => then("a new run: it has said goodbye".into()),
        (AgentState::Offline, _) => then("heartbeats of both levels".into()),
        (AgentState::Draining, StateReason::Drained) => resume,
        (AgentState::Draining, _) => then(
            "its main loop: an answer to the echo, or over HTTP a poll, `progress` or `ready: true`".into(),
        ),
    })
}

pub fn removed(agent_id: &AgentId) -> Shown {
    Shown {
        json: json!({ "agent_id": agent_id, "removed": true }),
        notes: vec![format!("{agent_id} is removed")],
        ..Shown::default()
    }
}

pub fn expired(pause: Option<&ExpiryPause>) -> Shown {
    let note = match pause {
        Some(pause) => {
            format!(
                "the wait for {} is over: those that are silent count as lost",
                count(pause.agents.into(), "agent")
            )
        }
        None => "nothing waits: agents that are silent for their TTL count as lost anyway".into(),
    };
    Shown {
        json: json!({ "ended": pause.is_some(), "agents": pause.map(|pause| pause.agents) }),
        notes: vec![note],
        ..Shown::default()
    }
}

pub fn problems(items: &[Problem], as_of: Stamp) -> Shown {
    let since = |problem: &Problem| problem.since_ms.map(time);
    let rows = items
        .iter()
        .map(|problem| {
            vec![
                problem.kind.as_str().to_string(),
                if problem.about.is_empty() { "-".to_string() } else { problem.about.clone() },
                since(problem).unwrap_or_else(|| "-".to_string()),
                problem.what.clone(),
                problem.effect.clone(),
                problem.command.clone(),
            ]
        })
        .collect();
    let items_json = items.iter().map(|problem| {
        let mut value = json!({
            "kind": problem.kind,
            "about": (!problem.about.is_empty()).then_some(&problem.about),
            "since": since(problem),
            "what": problem.what,
            "effect": problem.effect,
            "command": problem.command,
        });
        without_nulls(&mut value, 0);
        value
    });
    let json = json!({ "items": items_json.collect::<Vec<_>>(), "as_of": time(as_of.wall_ms) });
    if items.is_empty() {
        return Shown { json, notes: vec!["nothing is wrong".into()], ..Shown::default() };
    }
    let head = vec!["PROBLEM", "ABOUT", "SINCE", "WHAT", "EFFECT", "RUN"];
    Shown { json, head, rows, ..Shown::default() }
}

/// What makes a line of `agents ls --watch`: heartbeats alone don't.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Standing {
    state: AgentState,
    reason: StateReason,
    instance: InstanceId,
    running: u32,
}

impl Standing {
    pub fn of(view: &AgentView) -> Self {
        let AgentRecord { state, reason, instance, .. } = &view.record;
        Self { state: *state, reason: *reason, instance: instance.clone(), running: view.running }
    }
}

/// An agent that changed, in one line.
pub fn change(view: &AgentView) -> Shown {
    let record = &view.record;
    let note = format!(
        "{} {} {}: {}, running {}/{}",
        time(record.since.wall_ms),
        record.agent_id(),
        record.state,
        record.reason.as_str(),
        view.running,
        record.registration.max_concurrency
    );
    Shown { json: agent_json(view), notes: vec![note], ..Shown::default() }
}

/// An agent that is no longer in the list.
pub fn gone(agent_id: &AgentId) -> Shown {
    Shown {
        json: json!({ "agent_id": agent_id, "gone": true }),
        notes: vec![format!("{agent_id} is not in the list any more")],
        ..Shown::default()
    }
}

/// One message as JSON. Its excerpt is there, its payload and result are not.
pub fn message_json(record: &MessageRecord) -> Value {
    let (excerpt, cost) = match &record.state {
        MessageState::Completed { outcome, .. } => (Some(outcome.excerpt.clone()), outcome.cost),
        _ => (None, None),
    };
    let failure = match &record.state {
        MessageState::Failed { error: reply, .. } => Some(error(reply)),
        MessageState::TimedOut { cause: TimeoutCause::AttemptsExhausted, .. } => {
            Response::of(record, None).and_then(|response| response.error).map(|reply| error(&reply))
        }
        _ => None,
    };
    // Not to be tried before: the calendar's way of saying it.
    let retry_at = record
        .retry_at_ms
        .map(|at_ms| time(record.since.wall_ms + at_ms.saturating_sub(record.since.cluster_ms)));
    let pending = match &record.state {
        MessageState::Pending { reason } => Some(reason.as_str()),
        _ => None,
    };
    let target = match &record.target {
        reach_protocol::Target::Agent(agent_id) => json!({ "agent_id": agent_id }),
        reach_protocol::Target::Capabilities { required, preferred } => {
            json!({ "capabilities": required, "preferred_agents": preferred })
        }
    };
    let mut value = json!({
        "msg_id": record.msg_id,
        "trace_id": record.trace_id,
        "flow_seq": record.flow_seq,
        "parent_msg_id": record.parent,
        "source": record.source,
        "sent_by": record.principal.to_string(),
        "target": target,
        "state": record.state.name(),
        "pending_reason": pending,
        "agent_id": record.state.holder().map(|holder| holder.agent_id.clone()),
        "instance_id": record.state.holder().map(|holder| holder.instance.clone()),
        "retry_seq": record.attempt,
        "retry_at": retry_at,
        "accepted": time(record.accepted.wall_ms),
        "since": time(record.since.wall_ms),
        "shape": record.shape,
        "warnings": record.warnings,
        "excerpt": excerpt,
        "cost": cost,
        "error": failure,
    });
    without_nulls(&mut value, 0);
    value
}

pub fn messages(items: &[MessageRecord], next: Option<&MsgId>, as_of: Stamp) -> Shown {
    let rows = items
        .iter()
        .map(|record| {
            vec![
                record.msg_id.to_string(),
                record.state.name().to_string(),
                what(record),
                record.state.holder().map_or("-".to_string(), |holder| holder.agent_id.to_string()),
                record.attempt.to_string(),
                record.source.to_string(),
                time(record.accepted.wall_ms),
                record.trace_id.to_string(),
            ]
        })
        .collect();
    let json = json!({
        "items": items.iter().map(message_json).collect::<Vec<_>>(),
        "next": next,
        "as_of": time(as_of.wall_ms),
    });
    let notes = next.map(|next| format!("more: --after {next}")).into_iter().collect();
    let head = vec!["MESSAGE", "STATE", "FOR", "AGENT", "RETRY", "FROM", "ACCEPTED", "TRACE"];
    Shown { json, head, rows, notes }
}

fn what(record: &MessageRecord) -> String {
    match &record.target {
        reach_protocol::Target::Agent(agent_id) => format!("agent {agent_id}"),
        reach_protocol::Target::Capabilities { required, .. } => {
            required.iter().map(|tag| tag.as_str()).collect::<Vec<_>>().join(" + ")
        }
    }
}

/// As whom it was sent; by whom only where that says more.
fn sender(record: &MessageRecord) -> String {
    match record.principal.own_agent_id() == record.source {
        true => record.source.to_string(),
        false => format!("{}, sent by {}", record.source, record.principal),
    }
}

pub fn message(view: &MessageView) -> Shown {
    let record = &view.record;
    let mut json = message_json(record);
    json["hops"] = view.hops.iter().map(hop_json).collect();
    if let Some(letter) = &view.dead_letter {
        json["dead_letter"] = dead_letter_json(letter);
    }
    let mut rows = vec![
        vec!["message".into(), record.msg_id.to_string()],
        vec!["trace".into(), format!("{} (number {})", record.trace_id, record.flow_seq)],
        vec!["for".into(), what(record)],
        vec!["from".into(), sender(record)],
        vec!["state".into(), format!("{}, since {}", record.state.name(), time(record.since.wall_ms))],
    ];
    match &record.state {
        MessageState::Pending { reason } => {
            let why = why_it_waits(record).map_or(reason.as_str().replace('_', " "), str::to_string);
            rows.push(vec!["waits because".into(), why])
        }
        MessageState::Completed { outcome, .. } => {
            rows.push(vec!["excerpt".into(), outcome.excerpt.clone()]);
            rows.extend(outcome.cost.map(|cost| vec!["cost".into(), cost.to_string()]));
        }
        MessageState::Failed { error, .. } => rows.push(vec!["error".into(), error.to_string()]),
        MessageState::TimedOut { .. } => {
            let error = Response::of(record, None).and_then(|response| response.error);
            rows.extend(error.map(|error| vec!["error".into(), error.to_string()]));
        }
        _ => {}
    }
    rows.extend(
        view.dead_letter.as_ref().map(|letter| vec!["dead letter".into(), dead_letter_words(letter)]),
    );
    for warning in &record.warnings {
        rows.push(vec!["warning".into(), warning.as_str().to_string()]);
    }
    let started_ms = record.accepted.cluster_ms;
    for hop in &view.hops {
        rows.push(vec![format!("+{}", span(hop.at.cluster_ms.saturating_sub(started_ms))), hop_words(hop)]);
    }
    Shown { json, rows, ..Shown::default() }
}

fn dead_letter_words(letter: &DeadLetter) -> String {
    let last =
        letter.agent_id.as_ref().map_or(String::new(), |agent_id| format!(", the last with {agent_id}"));
    format!("{} after {}{last}", letter.cause.as_str(), count(letter.attempts.into(), "attempt"))
}

fn dead_letter_json(letter: &DeadLetter) -> Value {
    let mut value = json!({
        "cause": letter.cause,
        "at": time(letter.at.wall_ms),
        "attempts": letter.attempts,
        "agent_id": letter.agent_id,
    });
    without_nulls(&mut value, 0);
    value
}

fn hop_words(hop: &Hop) -> String {
    let holder = hop.holder.as_ref().map_or(String::new(), |holder| format!(" · {}", holder.agent_id));
    let reason = hop.reason.as_ref().map_or(String::new(), |reason| format!(" · {reason}"));
    let retry = if hop.attempt > 0 { format!(" · retry {}", hop.attempt) } else { String::new() };
    format!("{}{holder}{retry}{reason}", hop.to)
}

fn hop_json(hop: &Hop) -> Value {
    let mut value = json!({
        "msg_id": hop.msg_id,
        "at": time(hop.at.wall_ms),
        "cluster_ms": hop.at.cluster_ms,
        "from": hop.from,
        "to": hop.to,
        "retry_seq": hop.attempt,
        "agent_id": hop.holder.as_ref().map(|holder| holder.agent_id.clone()),
        "instance_id": hop.holder.as_ref().map(|holder| holder.instance.clone()),
        "reason": hop.reason,
    });
    without_nulls(&mut value, 0);
    value
}

/// Width of the waterfall, in characters.
const WATERFALL: usize = 40;

/// A trace as a waterfall: queue ░, waiting for receipt ▒, running █.
pub fn trace(hops: &[Hop], messages: &[MessageRecord], as_of: Stamp) -> Shown {
    let from = hops.iter().map(|hop| hop.at.cluster_ms).min().unwrap_or_default();
    let until = hops.iter().map(|hop| hop.at.cluster_ms).max().unwrap_or_default();
    let rows = messages
        .iter()
        .map(|record| {
            let own: Vec<&Hop> = hops.iter().filter(|hop| hop.msg_id == record.msg_id).collect();
            let first = own.first().map_or(from, |hop| hop.at.cluster_ms);
            let last = if record.state.is_final() {
                own.last().map_or(until, |hop| hop.at.cluster_ms)
            } else {
                until
            };
            vec![
                record.flow_seq.to_string(),
                record.msg_id.to_string(),
                what(record),
                record.state.holder().map_or("-".to_string(), |holder| holder.agent_id.to_string()),
                record.state.name().to_string(),
                record.attempt.to_string(),
                format!("+{}", span(first - from)),
                span(last - first),
                waterfall(&own, from, until, last),
            ]
        })
        .collect();
    let json = json!({
        "trace_id": messages.first().map(|record| record.trace_id.clone()),
        "messages": messages.iter().map(message_json).collect::<Vec<_>>(),
        "hops": hops.iter().map(hop_json).collect::<Vec<_>>(),
        "as_of": time(as_of.wall_ms),
    });
    let notes = vec![format!(
        "{} in {}   queue ░ waiting for receipt ▒ running █",
        count(messages.len() as u64, "message"),
        span(until - from)
    )];
    let head = vec!["NO", "MESSAGE", "FOR", "AGENT", "STATE", "RETRY", "START", "TOOK", "WAY"];
    Shown { json, head, rows, notes }
}

fn waterfall(own: &[&Hop], from: u64, until: u64, end: u64) -> String {
    let width = (until - from).max(1) as f64;
    let at = |ms: u64| (((ms - from) as f64 / width) * WATERFALL as f64) as usize;
    let mut bar = vec![' '; WATERFALL];
    for (i, hop) in own.iter().enumerate() {
        let sign = match hop.to {
            StateName::Pending => '░',
            StateName::Matched | StateName::Dispatched => '▒',
            StateName::Acknowledged => '█',
            StateName::Completed | StateName::Failed | StateName::Timeout => break,
        };
        let next = own.get(i + 1).map_or(end, |hop| hop.at.cluster_ms);
        let (start, stop) = (at(hop.at.cluster_ms).min(WATERFALL - 1), at(next).min(WATERFALL));
        bar[start..stop.max(start + 1)].fill(sign);
    }
    bar.into_iter().collect::<String>().trim_end().to_string()
}

pub fn cluster(view: &ClusterView) -> Shown {
    let rows = view
        .nodes
        .iter()
        .map(|node| {
            let mut row = vec![node.node_id.to_string()];
            match &node.report {
                Some(report) => row.extend([
                    report.role.as_str().to_string(),
                    report.pid.to_string(),
                    report.term.to_string(),
                    report.applied.to_string(),
                    format!("{:016x}", report.state_hash),
                    offset(report.offset_ms),
                    report.sessions.to_string(),
                    report.http_addr.clone().unwrap_or_else(|| "off".to_string()),
                ]),
                None => row.extend(["not answering", "-", "-", "-", "-", "-", "-", "-"].map(String::from)),
            }
            row.extend([node.client_addr.clone(), node.peer_addr.clone()]);
            row
        })
        .collect();
    let nodes: Vec<Value> = view
        .nodes
        .iter()
        .map(|node| {
            let report = node.report.as_ref();
            let mut value = json!({
                "node": node.node_id.to_string(),
                "client_addr": node.client_addr,
                "peer_addr": node.peer_addr,
                "answers": report.is_some(),
                "role": report.map(|report| report.role.as_str()),
                "pid": report.map(|report| report.pid),
                "term": report.map(|report| report.term),
                "applied": report.map(|report| report.applied),
                "state_hash": report.map(|report| format!("{:016x}", report.state_hash)),
                "offset_ms": report.and_then(|report| report.offset_ms),
                "sessions": report.map(|report| report.sessions),
                "http_addr": report.and_then(|report| report.http_addr.clone()),
            });
            without_nulls(&mut value, 0);
            value
        })
        .collect();
    let json = json!({
        "cluster": view.cluster,
        "leader": view.leader.map(|leader| leader.to_string()),
        "term": view.term,
        "nodes": nodes,
        "agents": view.agents,
        "unfinished": view.unfinished,
        "rules_revision": view.rules_revision,
        "as_of": time(view.as_of.wall_ms),
    });
    let mut notes = vec![format!(
        "cluster {} · {} · {} · rules revision {}",
        view.cluster,
        count(view.agents, "agent"),
        count(view.unfinished, "unfinished message"),
        view.rules_revision
    )];
    let off: Vec<_> = view.nodes.iter().filter(|node| offset_of(node).is_some_and(node::is_skewed)).collect();
    notes.extend(off.iter().map(|node| {
        let skewed = node::Skewed {
            who: node::Who::Node(node.node_id),
            host: node.peer_addr.rsplit_once(':').map(|(host, _)| host.to_string()),
            offset_ms: offset_of(node).unwrap_or_default(),
            leader: view.leader,
            most_are: off.len() * 2 > view.nodes.len(),
        };
        format!("warning: {skewed}")
    }));
    if view.rules_revision == 0 {
        notes.push("not initialised yet: `agent-reach cluster init`".into());
    } else if view.leader.is_none() {
        notes.push("no node leads: nothing can be accepted until a majority of the nodes runs".into());
    }
    let head = vec![
        "NODE",
        "ROLE",
        "PID",
        "TERM",
        "APPLIED",
        "STATE HASH",
        "OFFSET",
        "SESSIONS",
        "HTTP",
        "CLIENTS",
        "PEERS",
    ];
    Shown { json, head, rows, notes }
}

fn offset_of(node: &NodeView) -> Option<i64> {
    node.report.as_ref()?.offset_ms
}

pub fn rules(record: &RulesRecord) -> Shown {
    let json = json!({
        "revision": record.revision,
        "rules": record.rules,
        "author": record.author.as_ref().map(ToString::to_string),
        "at": time(record.at.wall_ms),
        "text": record.text,
    });
    let by = record.author.as_ref().map_or("the cluster's start".to_string(), ToString::to_string);
    let notes = vec![format!("# revision {}, by {by}, {}", record.revision, time(record.at.wall_ms))];
    Shown { json, notes, ..Shown::default() }
}

#[cfg(test)]
mod tests {
    use reach_protocol::{
        Principal, Target, TraceId,
        message::{DeadCause, Holder},
    };

    use super::*;

    #[test]
    fn a_dead_letter_is_told_with_its_cause() {
        let at = |ms| Stamp { cluster_ms: ms, wall_ms: 1_000_000 + ms };
        let agent_id = AgentId::parse("a").unwrap();
        let holder = Holder { agent_id: agent_id.clone(), instance: InstanceId::parse("i").unwrap() };
        let record = MessageRecord {
            msg_id: MsgId::parse("m").unwrap(),
            trace_id: TraceId::parse("t").unwrap(),
            flow_seq: 1,
            parent: None,
            source: AgentId::parse("u").unwrap(),
            principal: Principal::Loopback,
            target: Target::Agent(agent_id.clone()),
            content_hash: [0; 16],
            shape: String::new(),
            accepted: at(0),
            expires_ms: 100_000,
            state: MessageState::TimedOut { holder: Some(holder), cause: TimeoutCause::AttemptsExhausted },
            since: at(7),
            attempt: 3,
            retries: 3,
            retry_at_ms: None,
            avoid: vec![agent_id.clone()],
            warnings: Vec::new(),
        };
        let letter = DeadLetter {
            msg_id: record.msg_id.clone(),
            trace_id: record.trace_id.clone(),
            at: at(7),
            cause: DeadCause::AgentLost,
            attempts: 4,
            agent_id: Some(agent_id),
        };
        let waiting = MessageRecord {
            state: MessageState::Pending { reason: PendingReason::AgentLost },
            retry_at_ms: Some(1_007),
            ..record.clone()
        };
        assert_eq!(message_json(&waiting)["retry_at"], time(1_001_007));
        assert_eq!(why_it_waits(&waiting), Some("its agent was lost, it is tried again in a while"));

        let view = MessageView {
            record: record.into(),
            response: None,
            hops: Vec::new(),
            dead_letter: Some(letter),
        };
        let shown = message(&view);
        let row = |name: &str| shown.rows.iter().find(|row| row[0] == name).map(|row| row[1].as_str());
        assert_eq!(row("dead letter"), Some("agent_lost after 4 attempts, the last with a"));
        assert_eq!(row("error"), Some("attempts_exhausted: no result after 4 attempts; tried: a"));
        let dead = json!({ "cause": "agent_lost", "at": time(1_000_007), "attempts": 4, "agent_id": "a" });
        assert_eq!(shown.json["dead_letter"], dead);
        assert_eq!(shown.json["error"]["code"], "attempts_exhausted");
    }

    #[test]
    fn one_is_not_many() {
        assert_eq!(count(0, "agent"), "0 agents");
        assert_eq!(count(1, "unfinished message"), "1 unfinished message");
        assert_eq!(count(2, "agent"), "2 agents");
    }
}
