//! What the commands say on standard error beside their answers, so that nobody has to guess why
//! nothing happens.

mod support;

use support::{Agent, Dev, agent_reach};

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
    let line = agent.remarks.recv_timeout(support::LONG).expect("a line on standard error");
    assert_eq!(line, "worker: failed at m_1 (attempt 0); `agent-reach messages show m_1` says why");
    agent.interrupt();

    // Nobody is ready: said at once when detached, and soon when waited for.
    let waits = "waits: no agent that can take it is ready; `agent-reach messages show";
    let (status, text) = send(&["--msg-id", "m_2", "--detach"]);
    assert!(status == Some(0) && text.contains(&format!("m_2 {waits} m_2`")), "{text}");
    let shown = agent_reach(home, &["messages", "show", "m_2"]).output().expect("the binary runs");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("waits because  no agent that can take it is ready\n"), "{shown}");
    let (status, text) = send(&["--msg-id", "m_3", "--timeout", "6s"]);
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
