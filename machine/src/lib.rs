//! The replicated rules of Agent-Reach: what a command does is a function of the log.

pub mod live;
pub mod rows;

pub use live::Live;
pub use rows::{Outcome, Position, Rows, Slot, TraceRecord, Write};
