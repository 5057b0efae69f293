//! The ids: newtypes that are parsed once at the edge and valid ever after.

use std::{fmt, ops::Deref, str::FromStr, sync::Arc};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// Why a text is not an id. The text itself is left out: it may be a payload that slipped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} must be {rule}")]
pub struct BadId {
    pub what: &'static str,
    pub rule: &'static str,
}

const ID_RULE: &str = "1 to 64 bytes of A-Z a-z 0-9 . _ : -";
const TAG_RULE: &str = "up to 128 bytes, words of a-z 0-9 _ joined by dots";
const SERIAL_RULE: &str = "2 to 64 hexadecimal digits in lower case, an even number of them";
const EVENT_RULE: &str =
    "up to 128 bytes, words of a-z 0-9 _ joined by dots, ending in a version such as .v1";

fn is_id(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b':' | b'-'))
}

fn is_tag(text: &str) -> bool {
    text.len() <= 128
        && text.split('.').all(|word| {
            !word.is_empty()
                && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
        })
}

fn is_event_type(text: &str) -> bool {
    let version = text.rsplit_once(".v").map(|(_, version)| version);
    is_tag(text) && version.is_some_and(|v| !v.is_empty() && v.bytes().all(|b| b.is_ascii_digit()))
}

const TOPICS_RULE: &str = "an event type with its version, such as task.completed.v1, or a prefix such as task.* (up to 128 bytes); several with commas between";

fn is_topics(text: &str) -> bool {
    text.split(',').all(|one| match one.strip_suffix(".*") {
        Some(prefix) => one.len() <= 128 && is_tag(prefix),
        None => is_event_type(one),
    })
}

fn is_serial(text: &str) -> bool {
    (2..=64).contains(&text.len())
        && text.len().is_multiple_of(2)
        && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $check:path, $rule:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn parse(text: &str) -> Result<Self, BadId> {
                if $check(text) {
                    Ok(Self(text.into()))
                } else {
                    Err(BadId { what: $what, rule: $rule })
                }
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = BadId;
            fn from_str(text: &str) -> Result<Self, BadId> {
                Self::parse(text)
            }
        }

        impl Deref for $name {
            type Target = str;
            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
                Self::parse(&text).map_err(de::Error::custom)
            }
        }
    };
}

text_id!(
    /// Names an agent across all its runs.
    AgentId, "an agent id", is_id, ID_RULE
);
text_id!(
    /// One run of an agent.
    InstanceId, "an instance id", is_id, ID_RULE
);
text_id!(
    /// Names a message; the idempotency key of its submission.
    MsgId, "a msg_id", is_id, ID_RULE
);
text_id!(
    /// Runs through a whole collaboration.
    TraceId, "a trace_id", is_id, ID_RULE
);
text_id!(
    /// The name of a user, a host, a session or a cluster.
    Name, "a name", is_id, ID_RULE
);
text_id!(
    /// A capability: a flat tag, matched whole, never as a tree.
    Tag, "a capability", is_tag, TAG_RULE
);
text_id!(
    /// The type of an event, with its version.
    EventType, "an event type", is_event_type, EVENT_RULE
);
text_id!(
    /// What a subscription is to: one event type, or all that begin alike (`task.*`); several with commas
    /// between.
    Topics, "a subscription", is_topics, TOPICS_RULE
);

text_id!(
    /// The serial number of a certificate.
    Serial, "a serial number", is_serial, SERIAL_RULE
);

impl AgentId {
    /// The member that an agent is in a group, and the group of its own.
    pub fn as_name(&self) -> Name {
        Name(self.0.clone())
    }
}

/// Names a node for ever; never used twice. Written `n1`, `n2`, …
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("n{}", self.0))
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for NodeId {
    type Err = BadId;
    fn from_str(text: &str) -> Result<Self, BadId> {
        text.strip_prefix('n')
            .and_then(|digits| digits.parse().ok())
            .filter(|number| *number > 0)
            .map(NodeId)
            .ok_or(BadId { what: "a node id", rule: "n and a number above 0, such as n1" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_checked_at_the_edge() {
        for good in ["a", "m_a1b2", "host:agent-1.x", &"x".repeat(64)] {
            assert!(AgentId::parse(good).is_ok(), "{good}");
        }
        for bad in ["", "a b", "a/b", "ä", &"x".repeat(65)] {
            assert!(AgentId::parse(bad).is_err(), "{bad}");
        }
        for good in ["code_review", "db.redis_audit", "9"] {
            assert!(Tag::parse(good).is_ok(), "{good}");
        }
        for bad in ["", "a..b", ".a", "a.", "A", "a-b"] {
            assert!(Tag::parse(bad).is_err(), "{bad}");
        }
        assert!(EventType::parse("task.completed.v1").is_ok());
        for bad in ["task.completed", "task.v", "task.vx"] {
            assert!(EventType::parse(bad).is_err(), "{bad}");
        }
        for good in ["task.completed.v1", "task.*", "task.completed.*", "a.v1,b.*"] {
            assert!(Topics::parse(good).is_ok(), "{good}");
        }
        for bad in ["*", ".*", "task.completed", "task*", "task.*.v1", "a.v1,", "a.v1, b.v1"] {
            assert!(Topics::parse(bad).is_err(), "{bad}");
        }
        assert_eq!("n12".parse::<NodeId>(), Ok(NodeId(12)));
        assert!("n0".parse::<NodeId>().is_err());
    }
}
