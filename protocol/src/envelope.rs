//! The envelope: the only thing that passes between agents, and the rules it must keep.

use serde::{Deserialize, Serialize};

use crate::{
    agent::not_yet,
    codec,
    error::{Code, ErrorReply},
    event,
    id::{AgentId, EventType, MsgId, Name, Tag, TraceId},
    json::Json,
    limits::Limits,
    message::{MessageRecord, MessageState, TimeoutCause},
    money::Money,
};

/// What a caller hands in. Ids that are absent are made by the node that takes it in. `Debug` shows
/// ids and the target only: intents and payloads never reach a log line.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Envelope {
    #[serde(default)]
    pub msg_id: Option<MsgId>,
    #[serde(default)]
    pub trace_id: Option<TraceId>,
    #[serde(default)]
    pub flow_seq: Option<u64>,
    #[serde(default)]
    pub parent_msg_id: Option<MsgId>,
    #[serde(default)]
    pub mode: Option<Mode>,
    #[serde(default)]
    pub msg_type: Option<MsgType>,
    #[serde(default)]
    /// Kept as it was written, so that one without a version has an error of its own.
    pub event_type: Option<String>,
    #[serde(default)]
    pub key: Option<String>,
    #[serde(default)]
    pub source: Option<Source>,
    #[serde(default)]
    pub target: Option<TargetFields>,
    #[serde(default)]
    pub intent: Option<String>,
    #[serde(default)]
    pub payload: Option<Json>,
    #[serde(default)]
    pub payload_version: Option<String>,
    /// RFC 3339, by the clock that also made the frame's `sent_at`.
    #[serde(default)]
    pub expire_at: Option<String>,
    #[serde(default)]
    pub expires_in_ms: Option<u64>,
    #[serde(default)]
    pub not_before: Option<String>,
    #[serde(default)]
    pub idle_timeout_ms: Option<u64>,
    #[serde(default)]
    pub priority: Option<Priority>,
    #[serde(default)]
    pub fairness_key: Option<String>,
    #[serde(default)]
    pub wait_for_agent_ms: Option<u64>,
    #[serde(default)]
    pub labels: Option<Vec<String>>,
    #[serde(default)]
    pub hold_until_understood: Option<bool>,
    #[serde(default)]
    pub traceparent: Option<String>,
    #[serde(default)]
    pub on_failure: Option<Json>,
    #[serde(default)]
    pub routing: Option<Json>,
    #[serde(default)]
    pub budget: Option<Budget>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Rpc,
    Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MsgType {
    RpcRequest,
    RpcResponse,
    Event,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    High,
    Normal,
    Low,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    pub agent_id: AgentId,
    #[serde(default)]
    pub session_id: Option<Name>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Budget {
    pub max_cost: Money,
}

/// The target as it is written; [`Target`] is what it means.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TargetFields {
    #[serde(default)]
    pub agent_id: Option<AgentId>,
    #[serde(default)]
    pub selector: Option<Selector>,
    #[serde(default)]
    pub affinity: Option<Affinity>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Selector {
    pub capabilities: Vec<Tag>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Affinity {
    pub preferred_agents: Vec<AgentId>,
}

/// Exactly one of the two ways to say who should do it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Target {
    Agent(AgentId),
    /// Required capabilities, sorted and distinct, and the agents to try first.
    Capabilities {
        required: Vec<Tag>,
        preferred: Vec<AgentId>,
    },
}

pub const REQUIRED_CAPABILITIES_MAX: usize = 32;
/// The shortest and the longest time a caller may give a message, in milliseconds.
pub const EXPIRES_IN_MIN_MS: u64 = 1;
pub const EXPIRES_IN_MAX_MS: u64 = 30 * 24 * 3600 * 1000;

impl std::fmt::Debug for Envelope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Envelope")
            .field("msg_id", &self.msg_id)
            .field("trace_id", &self.trace_id)
            .field("target", &self.target)
            .finish_non_exhaustive()
    }
}

impl Envelope {
    /// A request for whoever has all of `capabilities`.
    pub fn request(capabilities: Vec<Tag>, payload: Json) -> Self {
        let target = TargetFields { selector: Some(Selector { capabilities }), ..TargetFields::default() };
        Self { target: Some(target), payload: Some(payload), ..Self::empty() }
    }

    /// A request for one agent.
    pub fn request_to(agent_id: AgentId, payload: Json) -> Self {
        let target = TargetFields { agent_id: Some(agent_id), ..TargetFields::default() };
        Self { target: Some(target), payload: Some(payload), ..Self::empty() }
    }

    fn empty() -> Self {
        serde_json::from_str("{}").expect("every field may be absent")
    }

    /// Reads the public form. An error names the path of the field that is wrong, and never quotes
    /// content.
    pub fn from_json(text: &str) -> Result<Self, ErrorReply> {
        from_json(text)
    }

    /// The public form, without the fields that are absent.
    pub fn to_json(&self) -> serde_json::Value {
        let mut value = serde_json::to_value(self).expect("an envelope is plain data");
        crate::json::without_nulls(&mut value, 0);
        if let Some(target) = value.get_mut("target") {
            crate::json::without_nulls(target, 0);
        }
        if let Some(source) = value.get_mut("source") {
            crate::json::without_nulls(source, 0);
        }
        value
    }

    /// Everything that can be said of an envelope without knowing the cluster's state.
    pub fn validate(&self, limits: &Limits) -> Result<(), ErrorReply> {
        self.refuse_what_comes_later()?;
        if self.msg_type.is_some_and(|msg_type| msg_type != MsgType::RpcRequest) {
            return Err(ErrorReply::invalid("msg_type", "a submission must be an rpc_request"));
        }
        self.target()?;
        let preferred = self.target.as_ref().and_then(|target| target.affinity.as_ref());
        if preferred.is_some_and(|affinity| affinity.preferred_agents.len() > limits.preferred_agents) {
            let message = format!("name at most {} preferred agents", limits.preferred_agents);
            return Err(ErrorReply::invalid("target.affinity.preferred_agents", message));
        }
        let payload = self.payload.as_ref().ok_or_else(|| {
            ErrorReply::invalid(
                "payload",
                "payload is missing: give any JSON value, {} when there is nothing to say",
            )
        })?;
        if payload.as_str().len() > limits.payload_bytes {
            return Err(ErrorReply::too_large("payload", payload.as_str().len(), limits.payload_bytes));
        }
        if let Some(intent) = self.intent.as_ref().filter(|intent| intent.len() > limits.intent_bytes) {
            return Err(ErrorReply::too_large("intent", intent.len(), limits.intent_bytes));
        }
        if self.payload_version.as_ref().is_some_and(|version| version.len() > 64) {
            return Err(ErrorReply::invalid("payload_version", "payload_version has at most 64 bytes"));
        }
        if self.expire_at.is_some() && self.expires_in_ms.is_some() {
            return Err(ErrorReply::invalid("expires_in_ms", "give expire_at or expires_in_ms, not both"));
        }
        if self.expires_in_ms.is_some_and(|ms| !(EXPIRES_IN_MIN_MS..=EXPIRES_IN_MAX_MS).contains(&ms)) {
            let message =
                format!("expires_in_ms must be from {EXPIRES_IN_MIN_MS} to {EXPIRES_IN_MAX_MS} (30 days)");
            return Err(ErrorReply::invalid("expires_in_ms", message));
        }
        Ok(())
    }

    /// The same for one that is published.
    pub fn validate_event(&self, limits: &Limits) -> Result<EventType, ErrorReply> {
        if self.mode == Some(Mode::Rpc) || self.msg_type.is_some_and(|msg_type| msg_type != MsgType::Event) {
            return Err(ErrorReply::invalid("mode", "a publication must be an event"));
        }
        let Some(event_type) = &self.event_type else {
            return Err(ErrorReply::invalid("event_type", "event_type is missing"));
        };
        let event_type = event::event_type(event_type)?;
        let for_requests = [
            ("target", self.target.is_some()),
            ("intent", self.intent.is_some()),
            ("expire_at", self.expire_at.is_some()),
            ("expires_in_ms", self.expires_in_ms.is_some()),
            ("not_before", self.not_before.is_some()),
            ("idle_timeout_ms", self.idle_timeout_ms.is_some()),
            ("wait_for_agent_ms", self.wait_for_agent_ms.is_some()),
            ("hold_until_understood", self.hold_until_understood.is_some()),
            ("on_failure", self.on_failure.is_some()),
            ("routing", self.routing.is_some()),
            ("budget", self.budget.is_some()),
        ];
        if let Some((field, _)) = for_requests.iter().find(|(_, given)| *given) {
            return Err(ErrorReply::invalid(*field, format!("an event has no {field}: leave it out")));
        }
        let later = [
            ("flow_seq", self.flow_seq.is_some()),
            ("parent_msg_id", self.parent_msg_id.is_some()),
            ("priority", self.priority.is_some_and(|priority| priority != Priority::Normal)),
            ("fairness_key", self.fairness_key.is_some()),
            ("labels", self.labels.is_some()),
            ("traceparent", self.traceparent.is_some()),
            ("payload_version", self.payload_version.is_some()),
        ];
        if let Some((field, _)) = later.iter().find(|(_, given)| *given) {
            return Err(not_yet(*field));
        }
        if self.key.as_ref().is_some_and(|key| key.is_empty() || key.len() > event::KEY_MAX) {
            return Err(ErrorReply::invalid("key", format!("key has 1 to {} bytes", event::KEY_MAX)));
        }
        let missing =
            || ErrorReply::invalid("payload", "payload is missing: give any JSON value, {} for none");
        let bytes = self.payload.as_ref().ok_or_else(missing)?.as_str().len();
        if bytes > limits.payload_bytes {
            return Err(ErrorReply::too_large("payload", bytes, limits.payload_bytes));
        }
        Ok(event_type)
    }

    /// An event of this type.
    pub fn event(event_type: &EventType, payload: Json) -> Self {
        let event_type = Some(event_type.to_string());
        Self { mode: Some(Mode::Event), event_type, payload: Some(payload), ..Self::empty() }
    }

    fn refuse_what_comes_later(&self) -> Result<(), ErrorReply> {
        if self.mode == Some(Mode::Event) || self.msg_type == Some(MsgType::Event) {
            return Err(ErrorReply::invalid(
                "mode",
                "an event is published, not sent: `events publish`, POST /v1/events",
            ));
        }
        for (field, given) in [("event_type", self.event_type.is_some()), ("key", self.key.is_some())] {
            if given {
                return Err(ErrorReply::invalid(field, format!("only an event has a {field}: leave it out")));
            }
        }
        let later = [
            ("not_before", self.not_before.is_some()),
            ("idle_timeout_ms", self.idle_timeout_ms.is_some()),
            ("priority", self.priority.is_some_and(|priority| priority != Priority::Normal)),
            ("fairness_key", self.fairness_key.is_some()),
            ("wait_for_agent_ms", self.wait_for_agent_ms.is_some()),
            ("labels", self.labels.is_some()),
            ("hold_until_understood", self.hold_until_understood == Some(true)),
            ("traceparent", self.traceparent.is_some()),
            ("on_failure", self.on_failure.is_some()),
            ("routing", self.routing.is_some()),
            ("budget", self.budget.is_some()),
        ];
        match later.iter().find(|(_, given)| *given) {
            Some((field, _)) => Err(not_yet(*field)),
            None => Ok(()),
        }
    }

    /// What the target means: exactly one of an agent and a set of capabilities.
    pub fn target(&self) -> Result<Target, ErrorReply> {
        let fields = self.target.as_ref().ok_or_else(|| {
            ErrorReply::invalid("target", "target is missing: name an agent_id or selector.capabilities")
        })?;
        match (&fields.agent_id, &fields.selector) {
            (Some(_), None) if fields.affinity.is_some() => Err(ErrorReply::invalid(
                "target.affinity",
                "affinity goes with selector.capabilities, not with agent_id",
            )),
            (Some(agent_id), None) => Ok(Target::Agent(agent_id.clone())),
            (None, Some(selector)) => {
                let mut required = selector.capabilities.clone();
                required.sort();
                required.dedup();
                if required.is_empty() || selector.capabilities.len() > REQUIRED_CAPABILITIES_MAX {
                    let message = format!("require 1 to {REQUIRED_CAPABILITIES_MAX} capabilities");
                    return Err(ErrorReply::invalid("target.selector.capabilities", message));
                }
                let preferred = fields
                    .affinity
                    .as_ref()
                    .map(|affinity| affinity.preferred_agents.clone())
                    .unwrap_or_default();
                Ok(Target::Capabilities { required, preferred })
            }
            _ => Err(ErrorReply::invalid("target", "target must hold exactly one of agent_id and selector")),
        }
    }

    /// Of the caller's fields without the id and the transport times: equal for a repeat, whatever
    /// node takes it in.
    pub fn content_hash(&self) -> [u8; 16] {
        let content = Self { msg_id: None, expire_at: None, expires_in_ms: None, ..self.clone() };
        codec::digest(&codec::encode_vec(&content))
    }
}

/// Reads any public JSON form; an error names the path of what is wrong, and never quotes content.
pub fn from_json<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, ErrorReply> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        let reason = without_content(&inner);
        match path.as_str() {
            "." => ErrorReply::new(Code::Invalid, reason),
            _ => ErrorReply::invalid(path, reason),
        }
    })?;
    deserializer.end().map_err(|error| ErrorReply::new(Code::Invalid, without_content(&error)))?;
    Ok(value)
}

/// serde quotes the offending value ("invalid type: string \"…\", expected u64"): what was
/// expected stays, what was found goes.
fn without_content(error: &serde_json::Error) -> String {
    let text = error.to_string();
    if let Some((unknown, _)) =
        text.split_once(", expected one of").filter(|_| text.starts_with("unknown field"))
    {
        return unknown.to_string();
    }
    let quotes_content = ["invalid type", "invalid value", "unknown variant"];
    if !quotes_content.iter().any(|start| text.starts_with(start)) {
        return text;
    }
    match text.split_once("expected ") {
        Some((_, expected)) => format!("expected {expected}"),
        None => format!("a value of the wrong kind at line {} column {}", error.line(), error.column()),
    }
}

/// The answer's envelope, made by the cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Response {
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    pub msg_type: MsgType,
    pub in_reply_to: MsgId,
    /// `completed`, `failed` or `timeout`.
    pub status: String,
    pub excerpt: Option<String>,
    pub result: Option<Json>,
    pub cost: Option<Money>,
    pub warnings: Vec<crate::message::Warning>,
    pub error: Option<ErrorReply>,
}

impl Response {
    /// `None` while the message has no end. `result` is its body's row, when it has one.
    pub fn of(record: &MessageRecord, result: Option<Json>) -> Option<Self> {
        let (excerpt, cost, error) = match &record.state {
            MessageState::Completed { outcome, .. } => (Some(outcome.excerpt.clone()), outcome.cost, None),
            MessageState::Failed { error, .. } => (None, None, Some((**error).clone())),
            MessageState::TimedOut { cause, .. } => {
                let message = match cause {
                    TimeoutCause::Expired => "no result before the message's deadline".to_string(),
                    TimeoutCause::AttemptsExhausted => {
                        let tried = record.avoid.iter().map(AgentId::as_str).collect::<Vec<_>>().join(", ");
                        format!("no result after {} attempts; tried: {tried}", record.attempt + 1)
                    }
                };
                let error = ErrorReply::new(cause.code(), message);
                (None, None, Some(error.with_msg_id(&record.msg_id)))
            }
            _ => return None,
        };
        // Its own id is derived, so that asking twice gives the same envelope.
        let digest = codec::digest(record.msg_id.as_bytes());
        let hex: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Some(Self {
            msg_id: MsgId::parse(&format!("r_{hex}")).expect("hex digits are legal in an id"),
            trace_id: record.trace_id.clone(),
            msg_type: MsgType::RpcResponse,
            in_reply_to: record.msg_id.clone(),
            status: record.state.name().to_string(),
            excerpt,
            result,
            cost,
            warnings: record.warnings.clone(),
            error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(json: &str) -> Result<(), ErrorReply> {
        Envelope::from_json(json).and_then(|envelope| envelope.validate(&Limits::default()))
    }

    fn field(json: &str) -> String {
        let error = check(json).expect_err(json);
        assert!(error.message.len() < 200, "{}", error.message);
        error.field.clone().unwrap_or_else(|| panic!("no field in {error:?}"))
    }

    #[test]
    fn the_public_form_is_read() {
        let envelope = Envelope::from_json(
            r#"{ "msg_id": "m_a1b2", "trace_id": "t_7e9a", "flow_seq": 3, "mode": "rpc", "msg_type": "rpc_request",
                 "source": {"agent_id": "agent_planner", "session_id": "s_88"},
                 "target": {"selector": {"capabilities": ["code_review"]},
                            "affinity": {"preferred_agents": ["agent_reviewer_v2"]}},
                 "intent": "review branch refactor_001",
                 "payload": {"content": "please review branch refactor_001", "language": "python"},
                 "expire_at": "2026-12-01T12:00:00Z" }"#,
        )
        .unwrap();
        assert_eq!(envelope.validate(&Limits::default()), Ok(()));
        let again = Envelope::from_json(&envelope.to_json().to_string()).unwrap();
        assert_eq!(again.to_json(), envelope.to_json());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let to = r#""target":{"selector":{"capabilities":["x"]}}"#;
        let body = r#""payload":{}"#;
        assert_eq!(field(&format!("{{{body}}}")), "target");
        assert_eq!(field(&format!("{{{to}}}")), "payload");
        assert_eq!(field(&format!("{{{to},{body},\"nope\":1}}")), "nope");
        assert_eq!(
            field(r#"{"target":{"agent_id":"a","selector":{"capabilities":["x"]}},"payload":1}"#),
            "target"
        );
        assert_eq!(
            field(r#"{"target":{"selector":{"capabilities":["Bad Tag"]}},"payload":1}"#),
            "target.selector.capabilities[0]"
        );
        assert_eq!(
            field(r#"{"target":{"selector":{"capabilities":[]}},"payload":1}"#),
            "target.selector.capabilities"
        );
        assert_eq!(field(&format!("{{{to},{body},\"msg_id\":\"a b\"}}")), "msg_id");
        assert_eq!(field(&format!("{{{to},{body},\"expires_in_ms\":0}}")), "expires_in_ms");
        for later in [
            r#""budget":{"max_cost":1}"#,
            r#""labels":[]"#,
            r#""priority":"high""#,
            r#""routing":{}"#,
            r#""key":"k""#,
        ] {
            let name = later.split('"').nth(1).unwrap();
            assert_eq!(field(&format!("{{{to},{body},{later}}}")), name);
        }
        assert_eq!(field(&format!("{{{to},{body},\"mode\":\"event\"}}")), "mode");
    }

    #[test]
    fn an_error_never_quotes_content() {
        let secret = r#"{"target":{"selector":{"capabilities":["x"]}},"payload":{},"flow_seq":"hunter2"}"#;
        let error = check(secret).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("flow_seq"));
        assert!(!error.message.contains("hunter2"), "{}", error.message);
        let error = check(r#"{"mode":"hunter2"}"#).unwrap_err();
        assert!(!error.message.contains("hunter2"), "{}", error.message);
    }

    #[test]
    fn an_oversized_payload_says_size_and_limit() {
        let big = "x".repeat(1 << 20);
        let json = format!(r#"{{"target":{{"agent_id":"a"}},"payload":"{big}"}}"#);
        let error = check(&json).unwrap_err();
        assert_eq!(
            (error.code, error.message.as_str()),
            (Code::TooLarge, "payload has 1048578 bytes; the limit is 1048576")
        );
    }

    #[test]
    fn content_decides_the_hash_and_transport_does_not() {
        let hash = |rest: &str| {
            let json = format!(r#"{{"target":{{"agent_id":"a"}},"payload":{{ "x": 1 }}{rest}}}"#);
            Envelope::from_json(&json).unwrap().content_hash()
        };
        assert_eq!(hash(""), hash(r#","expires_in_ms":5"#));
        assert_eq!(hash(""), hash(r#","msg_id":"m1""#));
        assert_ne!(hash(""), hash(r#","intent":"other""#));
    }
}
