//! What callers are told when nobody can take their message. Names of capabilities and agents only,
//! never content.

use reach_protocol::{Code, ErrorReply, Tag, Target, error::Hint};
use reach_routing::NoCandidate;

/// How long a submitter stays away when too much waits.
const OVERLOADED_RETRY_MS: u64 = 1_000;

pub(crate) fn no_candidate(target: &Target, nobody: NoCandidate) -> ErrorReply {
    let NoCandidate { missing, nearest } = nobody;
    let mut message = match target {
        Target::Agent(agent_id) => format!("no agent {agent_id} is registered"),
        Target::Capabilities { required, .. } if missing.is_empty() => {
            format!("no single agent declares all of {}", list(required))
        }
        Target::Capabilities { .. } => format!("no agent declares {}", list(&missing)),
    };
    if !nearest.is_empty() {
        message += &format!("; the nearest declared: {}", list(&nearest));
    }
    let hint = Hint { missing: Some(missing), nearest: Some(nearest), ..Hint::default() };
    ErrorReply::new(Code::NoCandidate, message).with_hint(hint)
}

/// Somebody declares it, and nobody who does was ready for `waited_ms`.
pub(crate) fn none_ready(target: &Target, waited_ms: u64) -> ErrorReply {
    let message = match target {
        Target::Agent(agent_id) => format!("agent {agent_id} was not ready within {waited_ms} ms"),
        Target::Capabilities { required, .. } => {
            format!("no agent that declares {} was ready within {waited_ms} ms", list(required))
        }
    };
    let hint = Hint { missing: Some(Vec::new()), nearest: Some(Vec::new()), ..Hint::default() };
    ErrorReply::new(Code::NoCandidate, message).with_hint(hint)
}

pub(crate) fn overloaded(waiting: u64, waiting_max: u64) -> ErrorReply {
    let message = format!("{waiting} messages wait for an agent; the limit is {waiting_max}");
    ErrorReply::new(Code::Overloaded, message)
        .with_retry_after_ms(OVERLOADED_RETRY_MS)
        .with_hint(Hint { queue_depth: Some(waiting), ..Hint::default() })
}

fn list(tags: &[Tag]) -> String {
    tags.iter().map(Tag::as_str).collect::<Vec<_>>().join(", ")
}
