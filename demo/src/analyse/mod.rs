//! The analysers: plain, deterministic functions from a unit of work to what was found. The agents
//! run them through the cluster and the final check runs them again in one process.

pub mod blocks;
pub mod functions;
pub mod history;
pub mod language;
pub mod scan;
pub mod secrets;
