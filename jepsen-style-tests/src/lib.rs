//! Real node processes, real faults, histories that are checked.

pub mod check;
pub mod cluster;
pub mod worker;
pub mod workload;

pub use check::Verdict;
pub use cluster::Cluster;
pub use worker::Worker;
pub use workload::{Outcome, Workload};
