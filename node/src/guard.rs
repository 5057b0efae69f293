//! A second process beside `agents run`, so that no command outlives its agent, however that ends:
//! `kill -9` leaves it no time to end its commands itself. The guard is told which process groups
//! run, and kills what is left of them when nobody is there to tell it more.

use std::{
    collections::BTreeSet,
    io::{self, BufRead, Write},
    os::unix::process::CommandExt,
    process::{Child, ChildStdin, Command, Stdio},
    sync::Mutex,
};

use rustix::process::{Pid, Signal, kill_process_group};

/// The hidden subcommand.
pub const COMMAND: &str = "run-guard";

/// The agent's end. Dropped, or gone with its process, it lets the guard do its work.
#[derive(Debug)]
pub struct Guard {
    told: Mutex<ChildStdin>,
    // Kept, so that its id is not another's while we run.
    _process: Child,
}

impl Guard {
    pub fn start() -> io::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg(COMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C is for the agent, which lets its tasks end.
            .process_group(0)
            .spawn()?;
        let told = Mutex::new(process.stdin.take().expect("asked for above"));
        Ok(Self { told, _process: process })
    }

    /// From now on the group goes with this process.
    pub fn watch(&self, leader: Pid) {
        self.tell('+', leader);
    }

    /// The group is over.
    pub fn forget(&self, leader: Pid) {
        self.tell('-', leader);
    }

    fn tell(&self, sign: char, leader: Pid) {
        let line = format!("{sign}{}\n", leader.as_raw_pid());
        // Without its guard an agent works on: it only can't be cleaned up after.
        let _ = self.told.lock().expect("no panic holds this lock").write_all(line.as_bytes());
    }
}

/// The guard itself: until `told` ends.
pub fn run(told: impl BufRead) {
    let mut groups = BTreeSet::new();
    for line in told.lines().map_while(Result::ok) {
        let group = line.get(1..).and_then(|pid| pid.parse::<i32>().ok()).filter(|pid| *pid > 1);
        match (line.chars().next(), group) {
            (Some('+'), Some(group)) => drop(groups.insert(group)),
            (Some('-'), Some(group)) => drop(groups.remove(&group)),
            _ => {}
        }
    }
    for group in groups.into_iter().filter_map(Pid::from_raw) {
        // One that is gone already is what we want.
        let _ = kill_process_group(group, Signal::KILL);
    }
}
