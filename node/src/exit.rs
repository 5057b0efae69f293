//! How the process ends: a code a supervisor can tell apart, and one sentence for a person.

use std::{fmt, io};

/// A reason to end, with its exit code.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Exit {
    pub code: u8,
    pub message: String,
}

/// Wrong arguments or configuration.
pub const USAGE: u8 = 2;
/// The folder belongs to somebody else, is in use, was emptied, or lost its identity or its tail.
pub const IDENTITY: u8 = 20;
/// The disk failed: a write, an fsync, or a read that found damage.
pub const DISK: u8 = 21;
/// The disk is full.
pub const DISK_FULL: u8 = 22;
/// The replicated core stopped.
pub const RAFT: u8 = 23;
/// A port is taken, or a certificate can't be used.
pub const TRANSPORT: u8 = 24;

impl Exit {
    pub fn new(code: u8, message: impl fmt::Display) -> Self {
        Self { code, message: message.to_string() }
    }

    pub fn identity(message: String) -> Self {
        Self::new(IDENTITY, message)
    }

    pub fn disk(error: io::Error) -> Self {
        let code = if error.kind() == io::ErrorKind::StorageFull { DISK_FULL } else { DISK };
        Self::new(code, format!("the disk failed: {error}"))
    }

    pub fn transport(error: reach_transport::Error) -> Self {
        Self::new(TRANSPORT, error)
    }

    pub fn storage(error: reach_storage::Error) -> Self {
        use reach_storage::Error;
        let code = match &error {
            Error::LostTail { .. } | Error::InUse { .. } => IDENTITY,
            _ if error.to_string().contains("No space left") => DISK_FULL,
            _ => DISK,
        };
        match &error {
            Error::Damaged { .. } => Self::new(
                code,
                format!(
                    "{error}. Restore the folder from a copy, or replace this node under a new node id; don't start it empty under the old one"
                ),
            ),
            _ => Self::new(code, error),
        }
    }

    pub fn storage_fatal(error: &reach_storage::FatalError) -> Self {
        let code = if error.kind == reach_storage::FatalKind::StorageFull { DISK_FULL } else { DISK };
        Self::new(code, format!("the disk failed: {error}"))
    }

    pub fn raft(error: reach_raft::Error) -> Self {
        match error {
            reach_raft::Error::Disk { error, .. } => Self::disk(error),
            error => Self::new(RAFT, error),
        }
    }

    pub fn fatal(reason: String) -> Self {
        Self::new(RAFT, format!("the replicated core stopped: {reason}"))
    }
}

/// Ends the process at once: nothing may be written after a disk error.
pub fn now(exit: &Exit) -> ! {
    tracing::error!(code = exit.code, reason = %exit.message, "node stops");
    eprintln!("agent-reach: {}", exit.message);
    std::process::exit(exit.code.into());
}
