//! What an agent says of itself, and what the registry keeps of it.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use crate::{
    error::ErrorReply,
    id::{AgentId, InstanceId, Tag},
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
    pub subscriptions: Vec<Json>,
    #[serde(default)]
    pub ttl_ms: Option<u64>,
}

pub const MAX_CONCURRENCY_DEFAULT: u32 = 8;
/// The most slots one agent may declare.
pub const MAX_CONCURRENCY_MAX: u32 = 10_000;

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
            let later = [
                ("version", capability.version.is_some()),
                ("cost", capability.cost.is_some()),
                ("input_schema", capability.input_schema.is_some()),
                ("output_schema", capability.output_schema.is_some()),
            ];
            if let Some((name, _)) = later.iter().find(|(_, given)| *given) {
                return Err(not_yet(field(name)));
            }
        }
        if self.max_concurrency == 0 || self.max_concurrency > MAX_CONCURRENCY_MAX {
            let message = format!("max_concurrency must be from 1 to {MAX_CONCURRENCY_MAX}");
            return Err(ErrorReply::invalid("max_concurrency", message));
        }
        if self.host.as_ref().is_some_and(|host| host.len() > 255) {
            return Err(ErrorReply::invalid("host", "a host has at most 255 bytes"));
        }
        let metadata: usize = self.metadata.iter().map(|(key, value)| key.len() + value.as_str().len()).sum();
        if metadata > limits.metadata_bytes {
            return Err(ErrorReply::too_large("metadata", metadata, limits.metadata_bytes));
        }
        if !self.subscriptions.is_empty() {
            return Err(not_yet("subscriptions"));
        }
        if self.ttl_ms.is_some() {
            return Err(not_yet("ttl_ms"));
        }
        Ok(())
    }

    pub fn tags(&self) -> impl Iterator<Item = &Tag> {
        self.capabilities.iter().map(|capability| &capability.name)
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
}

impl StateReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Registered => "registered",
            Self::Returned => "heartbeats returned",
            Self::ProcessSilent => "process heartbeat (level 1) late",
            Self::LoopSilent => "main loop heartbeat (level 2) late",
            Self::Asked => "shutting down",
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
}

impl AgentRecord {
    pub fn agent_id(&self) -> &AgentId {
        &self.registration.agent_id
    }
}

/// What is kept of a removed agent, so that no run that started earlier can come back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    pub instance: InstanceId,
    pub started_ms: u64,
    pub removed: Stamp,
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
        assert_eq!(
            field(r#"{"agent_id":"a","capabilities":[{"name":"x","cost":0.1}]}"#),
            "capabilities[0].cost"
        );
        assert!(
            serde_json::from_str::<Registration>(r#"{"agent_id":"a","capabilities":[],"nope":1}"#).is_err()
        );
    }
}
