//! A `dev` cluster of a test's own.
#![allow(missing_debug_implementations)]

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, Command, Stdio},
};

pub struct Dev(Child);

impl Dev {
    /// Ready when it says so.
    pub fn start(home: &Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_agent-reach"))
            .arg("dev")
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
