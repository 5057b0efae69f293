//! The words of Agent-Reach. Everything that passes between two parts of the product, or onto a
//! disk, is a type of this crate, and this crate alone knows how it is encoded.

pub mod agent;
pub mod certificate;
pub mod codec;
pub mod command;
pub mod envelope;
pub mod error;
pub mod event;
pub mod fact;
pub mod frame;
pub mod id;
pub mod json;
pub mod limits;
pub mod message;
pub mod money;
pub mod rules;
pub mod stamp;

pub use agent::{AgentState, Capability, Registration, StateReason};
pub use certificate::{Fingerprint, Revocation, Revoked};
pub use command::{Command, Decision, Entry, Principal, Reply};
pub use envelope::{Envelope, Selector, Source, Target};
pub use error::{Code, ErrorReply};
pub use event::EventRow;
pub use fact::Fact;
pub use id::{AgentId, EventType, InstanceId, MsgId, Name, NodeId, Tag, Topics, TraceId};
pub use json::Json;
pub use limits::Limits;
pub use message::{MessageState, Warning};
pub use money::Money;
pub use rules::{Rules, RulesRecord};
pub use stamp::Stamp;
