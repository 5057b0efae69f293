//! The sizes that a rule may lower or raise, and those that nothing may.

use serde::{Deserialize, Serialize};

/// Bytes in a frame header's length word and everything a frame adds to a body.
const FRAME_OVERHEAD: usize = 64 * 1024;

/// The largest frame that any link accepts, in bytes. A longer one is refused before it is
/// allocated. Twice the largest body a rule can allow, since an envelope carries an intent,
/// labels and a payload.
pub const FRAME_MAX: usize = 2 * BODY_MAX + FRAME_OVERHEAD;

/// The most a rule may allow for a payload or a result, in bytes.
pub const BODY_MAX: usize = 4 << 20;

/// Sizes in bytes and counts, each a replicated rule (`[limits]`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    pub payload_bytes: usize,
    pub result_bytes: usize,
    pub intent_bytes: usize,
    pub excerpt_bytes: usize,
    pub capabilities: usize,
    pub subscriptions: usize,
    pub metadata_bytes: usize,
    /// Of each input and output schema of a capability.
    pub schema_bytes: usize,
    pub preferred_agents: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            payload_bytes: 1 << 20,
            result_bytes: 1 << 20,
            intent_bytes: 4 << 10,
            excerpt_bytes: 1 << 10,
            capabilities: 256,
            subscriptions: 256,
            metadata_bytes: 16 << 10,
            schema_bytes: 16 << 10,
            preferred_agents: 32,
        }
    }
}
