//! The yardstick: a load driver against any cluster, and the same work side by side against what a
//! user would take instead.

pub mod agents;
pub mod failover;
pub mod host;
pub mod idle;
pub mod load;
pub mod process;
pub mod report;
pub mod side_by_side;
pub mod statistics;
pub mod system;
