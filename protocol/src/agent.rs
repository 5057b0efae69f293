//! What an agent says of itself, and what the registry keeps of it.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{
    command::Principal,
    error::ErrorReply,
    id::{AgentId, InstanceId, Name, Tag, Topics},
    json::Json,
    limits::Limits,
    money::Money,
    stamp::Stamp,
};

/// Registering is an idempotent upsert on `agent_id`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Registration {
    pub agent_id: AgentId,
    /// For people and the record: agents dial in, nobody dials them.
    #[serde(default)]
    pub host: Option<String>,
    #[serde(default)]
    pub port: Option<u16>,
    pub capabilities: Vec<Capability>,
    #[serde(default)]
    pub metadata: BTreeMap<String, Json>,
    #[serde(default)]
    pub status: Option<DeclaredStatus>,
    /// Tasks it runs at once.
    #[serde(default = "default_max_concurrency")]
    pub max_concurrency: u32,
    #[serde(default)]
    pub subscriptions: Vec<Subscription>,
    /// How long it may be silent before it counts as gone, when that is longer than the rule's TTL:
    /// for an agent that can't beat while it works. The price is that its death is found later.
    #[serde(default)]
    pub ttl_ms: Option<u64>,
}

pub const MAX_CONCURRENCY_DEFAULT: u32 = 8;
/// The most slots one agent may declare.
pub const MAX_CONCURRENCY_MAX: u32 = 10_000;
/// The longest TTL an agent may ask for, in milliseconds.
pub const TTL_MAX_MS: u64 = 600_000;
/// The shortest; one below the rule's has no effect.
pub const TTL_MIN_MS: u64 = 1_000;
/// Bytes of a host's name, and of a capability's version.
const HOST_MAX: usize = 255;
const VERSION_MAX: usize = 64;

fn default_max_concurrency() -> u32 {
    MAX_CONCURRENCY_DEFAULT
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeclaredStatus {
    #[serde(rename = "ready")]
    Ready,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capability {
    pub name: Tag,
    /// Above 0. Twice the weight, twice the share.
    #[serde(default = "default_weight")]
    pub weight: f64,
    #[serde(default)]
    pub version: Option<String>,
    #[serde(default)]
    pub cost: Option<Money>,
    #[serde(default)]
    pub input_schema: Option<Json>,
    #[serde(default)]
    pub output_schema: Option<Json>,
}

/// Events that an agent wants, as a member of a group that is made where there is none. Without a group
/// it has one of its own, named by its id, and sees every event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subscription {
    pub to: Topics,
    pub group: Option<Name>,
    pub from: Since,
}

/// Where a group that a subscription makes begins in the topics that exist. In later ones it begins at
/// their first event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Since {
    /// What is published after the registration.
    #[default]
    Latest,
    /// The first event that is kept.
    Earliest,
}

impl Since {
    fn is_latest(&self) -> bool {
        *self == Self::Latest
    }
}

/// Its form in JSON when it says more than the bare type or prefix.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Grouped {
    #[serde(rename = "type")]
    to: Topics,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<Name>,
    #[serde(default, skip_serializing_if = "Since::is_latest")]
    from: Since,
}

impl Subscription {
    pub fn to(to: Topics) -> Self {
        Self { to, group: None, from: Since::Latest }
    }
}

impl Serialize for Subscription {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self { to, group, from } = self;
        match serializer.is_human_readable() {
            false => (to, group, from).serialize(serializer),
            true if group.is_none() && from.is_latest() => to.serialize(serializer),
            true => Grouped { to: to.clone(), group: group.clone(), from: *from }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Subscription {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            let (to, group, from) = Deserialize::deserialize(deserializer)?;
            return Ok(Self { to, group, from });
        }
        let value = serde_json::Value::deserialize(deserializer)?;
        if let serde_json::Value::String(text) = &value {
            return Ok(Self::to(Topics::parse(text).map_err(de::Error::custom)?));
        }
        let Grouped { to, group, from } = serde_json::from_value(value).map_err(de::Error::custom)?;
        Ok(Self { to, group, from })
    }
}

/// The largest weight; shares are kept in integers.
pub const WEIGHT_MAX: f64 = 1_000.0;
pub const WEIGHT_MIN: f64 = 0.001;

fn default_weight() -> f64 {
    1.0
}

impl Capability {
    pub fn new(name: Tag, weight: f64) -> Self {
        Self { name, weight, version: None, cost: None, input_schema: None, output_schema: None }
    }
}

impl Registration {
    pub fn new(agent_id: AgentId, capabilities: Vec<Capability>) -> Self {
        Self {
            agent_id,
            host: None,
            port: None,
            capabilities,
            metadata: BTreeMap::new(),
            status: None,
            max_concurrency: MAX_CONCURRENCY_DEFAULT,
            subscriptions: Vec::new(),
            ttl_ms: None,
        }
    }

    pub fn validate(&self, limits: &Limits) -> Result<(), ErrorReply> {
        if self.capabilities.is_empty() || self.capabilities.len() > limits.capabilities {
            let message =
                format!("declare 1 to {} capabilities, not {}", limits.capabilities, self.capabilities.len());
            return Err(ErrorReply::invalid("capabilities", message));
        }
        for (i, capability) in self.capabilities.iter().enumerate() {
            let field = |name: &str| format!("capabilities[{i}].{name}");
            if !(WEIGHT_MIN..=WEIGHT_MAX).contains(&capability.weight) {
                let message = format!("a weight must be from {WEIGHT_MIN} to {WEIGHT_MAX}");
                return Err(ErrorReply::invalid(field("weight"), message));
            }
            if self.capabilities[..i].iter().any(|other| other.name == capability.name) {
                return Err(ErrorReply::invalid(
                    field("name"),
                    format!("{} is declared twice", capability.name),
                ));
            }
            if capability.version.as_ref().is_some_and(|text| text.is_empty() || text.len() > VERSION_MAX) {
                let message = format!("a version has 1 to {VERSION_MAX} bytes");
                return Err(ErrorReply::invalid(field("version"), message));
            }
            for (name, schema) in
                [("input_schema", &capability.input_schema), ("output_schema", &capability.output_schema)]
            {
                let Some(schema) = schema else { continue };
                let size = schema.as_str().len();
                if size > limits.schema_bytes {
                    return Err(ErrorReply::too_large(field(name), size, limits.schema_bytes));
                }
                // A schema is an object, or true or false.
                if !matches!(schema.as_str().as_bytes().first(), Some(b'{' | b't' | b'f')) {
                    return Err(ErrorReply::invalid(field(name), "a JSON schema is an object or a boolean"));
                }
            }
        }
        if self.max_concurrency == 0 || self.max_concurrency > MAX_CONCURRENCY_MAX {
            let message = format!("max_concurrency must be from 1 to {MAX_CONCURRENCY_MAX}");
            return Err(ErrorReply::invalid("max_concurrency", message));
        }
        if self.host.as_ref().is_some_and(|host| host.len() > HOST_MAX) {
            return Err(ErrorReply::invalid("host", format!("a host has at most {HOST_MAX} bytes")));
        }
        let metadata: usize = self.metadata.iter().map(|(key, value)| key.len() + value.as_str().len()).sum();
        if metadata > limits.metadata_bytes {
            return Err(ErrorReply::too_large("metadata", metadata, limits.metadata_bytes));
        }
        if self.subscriptions.len() > limits.subscriptions {
            let message =
                format!("{} subscriptions; the limit is {}", self.subscriptions.len(), limits.subscriptions);
            return Err(ErrorReply::invalid("subscriptions", message));
        }
        for (i, subscription) in self.subscriptions.iter().enumerate() {
            let is_same =
                |other: &Subscription| (&other.to, &other.group) == (&subscription.to, &subscription.group);
            if self.subscriptions[..i].iter().any(is_same) {
                let message = format!("{} is subscribed to twice", subscription.to);
                return Err(ErrorReply::invalid(format!("subscriptions[{i}]"), message));
            }
        }
        if self.ttl_ms.is_some_and(|ttl_ms| !(TTL_MIN_MS..=TTL_MAX_MS).contains(&ttl_ms)) {
            let message = format!("ttl_ms must be from {TTL_MIN_MS} to {TTL_MAX_MS} (10 minutes)");
            return Err(ErrorReply::invalid("ttl_ms", message));
        }
        Ok(())
    }

    /// Its TTL where the rule's is `ttl_ms`: the longer of the two.
    pub fn ttl_ms(&self, ttl_ms: u64) -> u64 {
        self.ttl_ms.map_or(ttl_ms, |own| own.max(ttl_ms))
    }

    pub fn tags(&self) -> impl Iterator<Item = &Tag> {
        self.capabilities.iter().map(|capability| &capability.name)
    }

    /// The groups that its subscriptions make it a member of, and what each of them then reads.
    pub fn groups(&self) -> BTreeMap<Name, Topics> {
        let own = self.agent_id.as_name();
        let mut groups: BTreeMap<Name, Vec<&Topics>> = BTreeMap::new();
        for Subscription { to, group, .. } in &self.subscriptions {
            groups.entry(group.clone().unwrap_or_else(|| own.clone())).or_default().push(to);
        }
        groups.into_iter().map(|(group, topics)| (group, Topics::all_of(topics))).collect()
    }
}

/// A field of the contract whose behaviour this version does not have: refused rather than ignored.
pub(crate) fn not_yet(field: impl Into<String>) -> ErrorReply {
    let field = field.into();
    let message = format!("{field} is not supported by this version: leave it out");
    ErrorReply::invalid(field, message)
}

/// `ready` alone gets new tasks; a `draining` agent goes on with what it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentState {
    Ready,
    Draining,
    Offline,
}

impl fmt::Display for AgentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Offline => "offline",
        })
    }
}

/// Why an agent is in its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateReason {
    Registered,
    /// Both heartbeats are back.
    Returned,
    /// Level 1, the process, was not heard for a TTL.
    ProcessSilent,
    /// Level 2, the main loop, was not heard for a TTL.
    LoopSilent,
    /// It asked to be left alone: its own shutdown.
    Asked,
    /// An operator drained it.
    Drained,
    /// An operator took the drain back.
    Resumed,
}

impl StateReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Returned => "heartbeats returned",
            Self::ProcessSilent => "process heartbeat (level 1) late",
            Self::LoopSilent => "main loop heartbeat (level 2) late",
            Self::Asked => "shutting down",
            Self::Drained => "drained by an operator",
            Self::Resumed => "resumed by an operator",
        }
    }
}

/// The registry's row of one agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentRecord {
    pub registration: Registration,
    pub instance: InstanceId,
    /// Cluster time at which this instance started; computed once, at its first registration.
    pub started_ms: u64,
    pub registered: Stamp,
    pub state: AgentState,
    pub reason: StateReason,
    pub since: Stamp,
    /// Counts the changes of liveness of this instance; a proposal that names another is void.
    pub liveness_seq: u64,
    /// An operator's drain. It outlives runs and restarts, until it is taken back.
    pub drain: Option<Box<Drain>>,
    /// Counts drains and resumes; a command that names another is void.
    pub drain_seq: u64,
}

/// Who drained an agent, and when.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Drain {
    pub by: Principal,
    pub at: Stamp,
}

impl AgentRecord {
    pub fn agent_id(&self) -> &AgentId {
        &self.registration.agent_id
    }
}

/// What is kept of an agent's run that was removed or replaced, and of those before it, so that
/// none of them can come back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    pub instance: InstanceId,
    pub started_ms: u64,
    pub removed: Stamp,
    /// Who took the agent out of the registry; none where a later run took its place, or its registration had
    /// outlived it.
    pub by: Option<Principal>,
    /// Fenced before this one, the newest first; at most `FENCED_MAX`.
    pub earlier: Vec<InstanceId>,
}

/// Fenced runs of one agent that are refused by name, whatever start they claim. One that is older
/// still is refused by its start.
pub const FENCED_MAX: usize = 16;

impl Tombstone {
    pub fn names(&self, instance: &InstanceId) -> bool {
        self.instance == *instance || self.earlier.contains(instance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration(json: &str) -> Registration {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_registration_is_read_from_its_public_form() {
        let registration = registration(
            r#"{ "agent_id": "agent_redis_audit", "host": "10.20.1.15", "port": 9087,
                 "capabilities": [ {"name": "redis_audit", "weight": 1.0}, {"name": "cache_tuning", "weight": 0.7} ],
                 "metadata": { "model": "qwen-plus", "max_context": 32000, "owner": "sre_team" },
                 "status": "ready" }"#,
        );
        assert_eq!(registration.validate(&Limits::default()), Ok(()));
        assert_eq!(registration.max_concurrency, 8);
        assert_eq!(registration.capabilities[1].weight, 0.7);
    }

    #[test]
    fn every_limit_is_named_with_its_field() {
        let limits = Limits::default();
        let refused = |registration: &Registration| {
            let error = registration.validate(&limits).unwrap_err();
            (error.field.unwrap_or_default(), error.message)
        };
        let tag = |i: usize| Capability::new(Tag::parse(&format!("t{i}")).unwrap(), 1.0);
        let full = Registration::new(AgentId::parse("a").unwrap(), (0..256).map(tag).collect());
        assert_eq!(full.validate(&limits), Ok(()));

        let mut one_more = full.clone();
        one_more.capabilities.push(tag(256));
        assert_eq!(refused(&one_more).0, "capabilities");

        let text = |bytes: usize| Json::from_value(&"x".repeat(bytes - 2).into());
        let mut metadata = full.clone();
        metadata.metadata.insert("k".into(), text(16 << 10));
        let (field, message) = refused(&metadata);
        assert_eq!(field, "metadata");
        assert!(message.contains("16385") && message.contains("16384"), "{message}");

        let mut schema = full.clone();
        schema.capabilities[3].output_schema =
            Some(Json::from_value(&serde_json::json!({ "title": "x".repeat(16 << 10) })));
        assert_eq!(refused(&schema).0, "capabilities[3].output_schema");

        let mut subscribed = full.clone();
        let to = |i: usize| Topics::parse(&format!("t{i}.*")).unwrap();
        subscribed.subscriptions = (0..256).map(|i| Subscription::to(to(i))).collect();
        assert_eq!(subscribed.validate(&limits), Ok(()));
        subscribed.subscriptions.push(Subscription::to(to(256)));
        assert_eq!(refused(&subscribed).0, "subscriptions");
    }

    #[test]
    fn what_is_stored_is_what_was_declared() {
        let declared = registration(
            r#"{"agent_id":"a","capabilities":[{"name":"x","version":"2.1","cost":0.25,"input_schema":{"type":"object"},
                "output_schema":true}],"subscriptions":["task.*",{"type":"task.completed.v1","group":"g"},{"type":"a.v1","from":"earliest"}],"ttl_ms":60000}"#,
        );
        assert_eq!(declared.validate(&Limits::default()), Ok(()));
        let bytes = crate::codec::encode(&declared);
        let stored: Registration = crate::codec::decode("registration", &bytes).unwrap();
        assert_eq!(stored, declared);
        let shown = serde_json::to_value(&stored).unwrap();
        assert_eq!(
            shown["subscriptions"],
            serde_json::json!(["task.*", { "type": "task.completed.v1", "group": "g" }, { "type": "a.v1", "from": "earliest" }])
        );
        let groups: Vec<_> =
            stored.groups().into_iter().map(|(group, topics)| format!("{group}: {topics}")).collect();
        assert_eq!(groups, ["a: a.v1,task.*", "g: task.completed.v1"]);
        assert_eq!((stored.ttl_ms(9_000), stored.ttl_ms(90_000)), (60_000, 90_000));
        for bad in [r#"["task.completed"]"#, r#"[{"type":"t.*","gruop":"g"}]"#, "[7]"] {
            let json = format!(r#"{{"agent_id":"a","capabilities":[{{"name":"x"}}],"subscriptions":{bad}}}"#);
            assert!(serde_json::from_str::<Registration>(&json).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_bad_registration_names_its_field() {
        let field = |json: &str| registration(json).validate(&Limits::default()).unwrap_err().field.unwrap();
        assert_eq!(field(r#"{"agent_id":"a","capabilities":[]}"#), "capabilities");
        assert_eq!(
            field(r#"{"agent_id":"a","capabilities":[{"name":"x","weight":0}]}"#),
            "capabilities[0].weight"
        );
        assert_eq!(
            field(r#"{"agent_id":"a","capabilities":[{"name":"x"},{"name":"x"}]}"#),
            "capabilities[1].name"
        );
        assert_eq!(
            field(r#"{"agent_id":"a","capabilities":[{"name":"x"}],"max_concurrency":0}"#),
            "max_concurrency"
        );
        assert_eq!(field(r#"{"agent_id":"a","capabilities":[{"name":"x"}],"ttl_ms":1}"#), "ttl_ms");
        assert_eq!(field(r#"{"agent_id":"a","capabilities":[{"name":"x"}],"ttl_ms":600001}"#), "ttl_ms");
        assert_eq!(
            field(r#"{"agent_id":"a","capabilities":[{"name":"x","version":""}]}"#),
            "capabilities[0].version"
        );
        assert_eq!(
            field(r#"{"agent_id":"a","capabilities":[{"name":"x","input_schema":[1]}]}"#),
            "capabilities[0].input_schema"
        );
        assert_eq!(
            field(r#"{"agent_id":"a","capabilities":[{"name":"x"}],"subscriptions":["t.*","t.*"]}"#),
            "subscriptions[1]"
        );
        assert!(
            serde_json::from_str::<Registration>(r#"{"agent_id":"a","capabilities":[],"nope":1}"#).is_err()
        );
    }
}
