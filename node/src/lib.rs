//! The node, and the command line around it.

pub mod cli;
pub mod clock;
pub mod dev;
pub mod exec;
pub mod exit;
pub mod guard;
mod http;
mod metrics;
pub mod node;
pub mod online;
mod patience;
pub mod show;
pub mod telemetry;
