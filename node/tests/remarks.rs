//! What the commands say on standard error beside their answers, so that nobody has to guess why
//! nothing happens.

mod support;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Child, ChildStderr, Command, Stdio},
    sync::mpsc,
    time::Duration,
};

use support::Dev;

/// No step of the test takes this long.
const LONG: Duration = Duration::from_secs(60);

fn agent_reach(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_agent-reach"));
    command.args(args).env("AGENT_REACH_HOME", home);
    command
}

/// `agents run`, ready when it says so, and what it writes to standard error.
struct Agent {
    child: Child,
    remarks: mpsc::Receiver<String>,
}

impl Agent {
    fn start(home: &Path, command: &str) -> Self {
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

    fn says(&self, part: &str) {
        let line = self.remarks.recv_timeout(LONG).expect("a line on standard error");
        assert!(line.contains(part), "{line}");
    }

    fn interrupt(mut self) {
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

#[test]
fn nothing_waits_fails_or_is_lost_in_silence() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let home = home.path();
    let dev = Dev::start(home);
    let send = |more: &[&str]| {
        let args = [&["send", "--capability", "work", "--payload", "1"], more].concat();
        let output = agent_reach(home, &args).output().expect("the binary runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };

    // A task fails: the agent's own terminal says so, without the reason, which may be content.
    let agent = Agent::start(home, "echo secret >&2; exit 1");
    assert_eq!(send(&["--msg-id", "m_1"]).0, Some(1));
    let line = agent.remarks.recv_timeout(LONG).expect("a line on standard error");
    assert_eq!(line, "worker: failed at m_1 (attempt 0); `agent-reach messages show m_1` says why");
    agent.interrupt();

    // Nobody is ready: said at once when detached, and soon when waited for.
    let waits = "waits: no agent that can take it is ready; `agent-reach messages show";
    let (status, text) = send(&["--msg-id", "m_2", "--detach"]);
    assert!(status == Some(0) && text.contains(&format!("m_2 {waits} m_2`")), "{text}");
    let (status, text) = send(&["--msg-id", "m_3", "--timeout", "3s"]);
    assert!(status == Some(5) && text.contains(&format!("m_3 {waits} m_3`")), "{text}");
    let (_, text) = send(&["--msg-id", "m_2", "--detach", "-o", "json"]);
    assert_eq!(text, "", "a program reads it in the answer");

    // The cluster goes, and comes back.
    let agent = Agent::start(home, "cat");
    drop(dev);
    agent.says("worker: no node answers");
    let _dev = Dev::start(home);
    agent.says("worker: attached again, at n");
}
