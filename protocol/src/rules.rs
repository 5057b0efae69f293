//! The rules: one replicated, versioned document, in force on every node alike.

use serde::{Deserialize, Serialize};

use crate::{
    command::{ExpiryPause, Principal},
    id::Name,
    limits::Limits,
    stamp::Stamp,
};

/// Every key has a default, and an unknown key is an error.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rules {
    pub liveness: Liveness,
    pub delivery: Delivery,
    pub routing: Routing,
    pub events: Events,
    pub limits: Limits,
    pub grants: Grants,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Liveness {
    /// How often an agent beats at both levels, in milliseconds.
    pub heartbeat_ms: u64,
    /// Silence after which a level has lapsed, in milliseconds. An agent that registered a longer
    /// `ttl_ms` has that.
    pub ttl_ms: u64,
    /// How long a registration outlives its agent: offline for so long, in milliseconds of cluster
    /// time, it is removed.
    pub remove_after_ms: u64,
    /// When more than half of the agents, and at least so many, are about to expire together, their
    /// expiry waits one more TTL: more likely it is us who don't hear.
    pub mass_expiry_min: u32,
}

impl Default for Liveness {
    fn default() -> Self {
        Self {
            heartbeat_ms: 3_000,
            ttl_ms: 9_000,
            remove_after_ms: 7 * 24 * 60 * 60 * 1000,
            mass_expiry_min: 20,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Delivery {
    /// Without `received` for this long, the same attempt is sent again, in milliseconds.
    pub resend_after_ms: u64,
    /// Without `received` for this long, the attempt ends and another agent is tried.
    pub give_back_after_ms: u64,
    /// How long a task that an agent had received stays with it once it is offline, in milliseconds, as
    /// long as no other agent has taken it over.
    pub return_within_ms: u64,
    /// Attempts that may end before `received` and are followed by another at once; after further ones the
    /// message waits, as after one that was received.
    pub attempts_max: u32,
    /// The deadline of a message that names none, in milliseconds after acceptance.
    pub expires_in_ms: u64,
    /// How long a slot may stay taken by an attempt whose message has ended.
    pub stuck_slot_ms: u64,
}

impl Default for Delivery {
    fn default() -> Self {
        Self {
            resend_after_ms: 5_000,
            give_back_after_ms: 10_000,
            return_within_ms: 20_000,
            attempts_max: 5,
            expires_in_ms: 15 * 60 * 1000,
            stuck_slot_ms: 10 * 60 * 1000,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Routing {
    /// How long a new message waits while those who could take it are not ready, in milliseconds.
    pub wait_for_agent_ms: u64,
    /// Messages that may wait for an agent at once; at the cap submissions are refused with
    /// `overloaded`.
    pub waiting_max: u64,
}

impl Default for Routing {
    fn default() -> Self {
        Self { wait_for_agent_ms: 10_000, waiting_max: 1_000_000 }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Events {
    /// How long a topic keeps an event, in milliseconds of the cluster's calendar, where it has no
    /// `max_age_ms` of its own.
    pub max_age_ms: u64,
    /// How many bytes of content a topic keeps, where it has no `max_bytes` of its own.
    pub max_bytes: u64,
    /// Without a word on it for this long, an event is handed out again, in milliseconds.
    pub ack_wait_ms: u64,
    /// Times an event is handed out; then it goes to the group's dead letters.
    pub deliveries_max: u32,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            max_age_ms: 7 * 24 * 60 * 60 * 1000,
            max_bytes: 10 << 30,
            ack_wait_ms: 30_000,
            deliveries_max: 5,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Grants {
    /// Users that may change rules and remove agents.
    pub operators: Vec<Name>,
}

impl Rules {
    pub fn is_operator(&self, principal: &Principal) -> bool {
        match principal {
            Principal::User(name) => self.grants.operators.contains(name),
            Principal::Loopback => true,
            Principal::Agent(_) | Principal::Host(_) | Principal::Node(_) => false,
        }
    }

    /// What types alone can't say. The error names the key and the range.
    pub fn validate(&self) -> Result<(), String> {
        let ranges = [
            ("liveness.heartbeat_ms", self.liveness.heartbeat_ms, 100, 60_000),
            ("liveness.ttl_ms", self.liveness.ttl_ms, 300, 600_000),
            ("liveness.remove_after_ms", self.liveness.remove_after_ms, 1_000, 365 * 86_400_000),
            ("liveness.mass_expiry_min", self.liveness.mass_expiry_min.into(), 1, 1_000_000),
            ("delivery.resend_after_ms", self.delivery.resend_after_ms, 100, 600_000),
            ("delivery.give_back_after_ms", self.delivery.give_back_after_ms, 200, 600_000),
            ("delivery.return_within_ms", self.delivery.return_within_ms, 0, 86_400_000),
            ("delivery.attempts_max", self.delivery.attempts_max.into(), 1, 100),
            ("delivery.expires_in_ms", self.delivery.expires_in_ms, 1, crate::envelope::EXPIRES_IN_MAX_MS),
            ("delivery.stuck_slot_ms", self.delivery.stuck_slot_ms, 1_000, 86_400_000),
            ("routing.wait_for_agent_ms", self.routing.wait_for_agent_ms, 0, 3_600_000),
            ("routing.waiting_max", self.routing.waiting_max, 1, 100_000_000),
            ("events.max_age_ms", self.events.max_age_ms, 1_000, 10 * 365 * 86_400_000),
            ("events.max_bytes", self.events.max_bytes, 1 << 10, 1 << 50),
            ("events.ack_wait_ms", self.events.ack_wait_ms, 100, 86_400_000),
            ("events.deliveries_max", self.events.deliveries_max.into(), 1, 1_000),
            ("limits.payload_bytes", self.limits.payload_bytes as u64, 1_024, crate::limits::BODY_MAX as u64),
            ("limits.result_bytes", self.limits.result_bytes as u64, 1_024, crate::limits::BODY_MAX as u64),
            ("limits.intent_bytes", self.limits.intent_bytes as u64, 1, 65_536),
            ("limits.excerpt_bytes", self.limits.excerpt_bytes as u64, 1, 65_536),
            ("limits.capabilities", self.limits.capabilities as u64, 1, 10_000),
            ("limits.subscriptions", self.limits.subscriptions as u64, 1, 10_000),
            ("limits.schema_bytes", self.limits.schema_bytes as u64, 1, 1 << 20),
            ("limits.metadata_bytes", self.limits.metadata_bytes as u64, 1, 1 << 20),
            ("limits.preferred_agents", self.limits.preferred_agents as u64, 1, 1_000),
        ];
        for (key, value, min, max) in ranges {
            if !(min..=max).contains(&value) {
                return Err(format!("{key} is {value}; it must be from {min} to {max}"));
            }
        }
        if self.liveness.ttl_ms < 2 * self.liveness.heartbeat_ms {
            return Err(format!(
                "liveness.ttl_ms is {}; it must be at least twice liveness.heartbeat_ms ({})",
                self.liveness.ttl_ms, self.liveness.heartbeat_ms
            ));
        }
        if self.delivery.give_back_after_ms <= self.delivery.resend_after_ms {
            return Err(format!(
                "delivery.give_back_after_ms is {}; it must be above delivery.resend_after_ms ({})",
                self.delivery.give_back_after_ms, self.delivery.resend_after_ms
            ));
        }
        Ok(())
    }
}

/// The document in force, with who made it and when.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesRecord {
    /// Counts the documents, from 1. 0: the cluster has not been initialised.
    pub revision: u64,
    pub rules: Rules,
    /// As it was written, comments included; empty for the defaults.
    pub text: String,
    pub author: Option<Principal>,
    pub at: Stamp,
    pub cluster: Option<Name>,
    /// The last mass expiry that was made to wait. It stands here because this row is the cluster's
    /// own.
    pub expiry: Option<ExpiryPause>,
}
