//! A second process beside each command of `agents run`, so that no command outlives its agent,
//! however that ends: `kill -9` leaves it no time to end its commands itself. The guard leads the
//! process group the command is started into, and kills that group, itself included, when the agent's
//! end of its pipe is gone. There is no moment in which the command runs and nobody would end it.

use std::{
    io::{self, Read},
    process::Stdio,
};

use rustix::process::{Pid, Signal, getpgrp, getpid, kill_process_group};
use tokio::{
    io::AsyncWriteExt,
    process::{Child, Command},
};

/// The hidden subcommand.
pub const COMMAND: &str = "run-guard";

/// One command and everything it starts. Dropped, it kills what is left of them.
#[derive(Debug)]
pub struct Guard {
    process: Child,
    /// Nobody, once the guard has been told to leave them.
    group: Option<Pid>,
}

impl Guard {
    pub fn start() -> io::Result<Self> {
        let process = Command::new(std::env::current_exe()?)
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for the agent, which lets its tasks end.
            .process_group(0)
            .spawn()?;
        let group = process.id().and_then(|pid| Pid::from_raw(pid as i32));
        Ok(Self { process, group })
    }

    /// The process group to start the command in.
    pub fn group(&self) -> i32 {
        self.group.map_or(0, Pid::as_raw_pid)
    }

    /// The command has ended by itself; what it left running on purpose goes on.
    pub async fn leave(mut self) {
        self.group = None;
        if let Some(mut told) = self.process.stdin.take() {
            // A guard that is gone already leaves them too.
            let _ = told.write_all(b"\n").await;
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // Nobody has waited for the guard yet, so the number is still its own.
        if let Some(group) = self.group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// The guard itself: until it is told to leave, or there is nobody left to tell it.
pub fn run(mut told: impl Read) {
    let told_to_leave = matches!(told.read(&mut [0]), Ok(1..));
    // Started by hand it may stand in somebody else's group.
    if !told_to_leave && getpgrp() == getpid() {
        let _ = kill_process_group(getpgrp(), Signal::KILL);
    }
}
