//! Real node processes, real faults, histories that are checked.

pub mod check;
pub mod cluster;
pub mod linearizable;
pub mod nemesis;
pub mod proxy;
pub mod registry;
pub mod worker;
pub mod workload;

pub use check::Verdict;
pub use cluster::Cluster;
pub use proxy::{Doors, Proxy};
pub use registry::RegistryLoad;
pub use worker::Worker;
pub use workload::{Outcome, Workload};
