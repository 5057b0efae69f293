//! The SDK. A [`Client`] asks; an [`Agent`] answers, and keeps what it was given in an inbox on its
//! own disk until the cluster has the result.
//!
//! Both keep one connection, to any node, and move to another node by themselves. Every request is
//! safe to send twice: it carries its own key, so it is sent again until its deadline.

mod agent;
mod client;
mod connection;
mod consumer;
mod context;
mod dispatch;
mod entry;
mod error;
mod events;
mod inbox;
mod link;
mod options;
mod renewal;
mod session;
mod steps;
mod task;
mod uptime;

pub use agent::{Agent, AgentBuilder, RunningAgent};
pub use client::{Client, Submitted};
pub use consumer::{Consumer, Pulled};
pub use context::Context;
pub use error::Error;
pub use events::EventContext;
pub use inbox::InboxError;
pub use options::Options;
pub use reach_protocol as protocol;
pub use reach_transport::Credentials;
pub use renewal::CredentialFiles;
pub use session::{Status, Stopped};
pub use task::{Done, Failure, Task};
