//! The time an entry carries.

use serde::{Deserialize, Serialize};

/// `cluster_ms` alone decides deadlines and TTLs. `wall_ms` is the leader's calendar (Unix
/// milliseconds), never decreasing in the log; it is shown and searched, and decides nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    pub cluster_ms: u64,
    pub wall_ms: u64,
}
