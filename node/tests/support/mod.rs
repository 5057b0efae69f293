//! A `dev` cluster of a test's own, and agents at it.
#![allow(dead_code, missing_debug_implementations)]

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, ChildStderr, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

/// No step of a test takes this long.
pub const LONG: Duration = Duration::from_secs(60);

/// Of this process alone, so that a cluster finds its ports free when it is started again.
pub fn free_port() -> u16 {
    let stretch = reach_config::ports::Stretch::of_this_process().expect("few run at a time");
    stretch.take().expect("not all are in use")
}

pub struct Dev(Child);

impl Dev {
    /// Ready when it says so. The nodes have ten ports each.
    pub fn start(home: &Path) -> Self {
        let port = free_port();
        let _others = [free_port(), free_port()];
        let mut child = Command::new(env!("CARGO_BIN_EXE_agent-reach"))
            .args(["dev", "--port", &port.to_string()])
            .env("AGENT_REACH_HOME", home)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        let ready = lines.by_ref().map_while(Result::ok).any(|line| line.starts_with("ready"));
        assert!(ready, "dev did not get ready");
        // Keep reading, so that it never waits for us.
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        Self(child)
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        // Its nodes end with their standard input, which ends with it.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn agent_reach(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agent-reach"));
    command.args(args).env("AGENT_REACH_HOME", home);
    command
}

/// `agents run`, ready when it says so, and what it writes to standard error.
pub struct Agent {
    child: Child,
    pub remarks: mpsc::Receiver<String>,
}

impl Agent {
    pub fn start(home: &Path, command: &str) -> Self {
        let args = ["agents", "run", "--id", "worker", "--capability", "work", "--", "sh", "-c", command];
        let mut child = agent_reach(home, &args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let stdout = child.stdout.take().expect("it is piped");
        let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("serves work")), "the agent did not get ready");
        std::thread::spawn(move || lines.for_each(drop));
        let remarks = lines_of(child.stderr.take().expect("it is piped"));
        Self { child, remarks }
    }

    pub fn says(&self, part: &str) {
        let line = self.remarks.recv_timeout(LONG).expect("a line on standard error");
        assert!(line.contains(part), "{line}");
    }

    pub fn interrupt(mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("it runs");
        assert!(self.child.wait().expect("it ends").success());
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lines_of(stderr: ChildStderr) -> mpsc::Receiver<String> {
    let (line, lines) = mpsc::sync_channel(64);
    std::thread::spawn(move || {
        BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|text| line.send(text))
    });
    lines
}
