//! The command line: its words, how answers and errors are printed, and the commands that need no
//! cluster.

pub mod args;
pub mod certs;
pub mod certs_renew;
pub mod certs_revoke;
pub mod cluster_new;
pub mod context;
pub mod failure;
pub mod output;
pub mod values;

#[cfg(test)]
mod tests;

pub use args::Args;
pub use failure::Failure;
pub use output::Output;
