//! What agents cost that only are there, and how soon it is seen that one is not.

pub mod crowd;
pub mod detect;
pub mod hold;
