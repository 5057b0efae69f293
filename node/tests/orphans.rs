//! No command outlives its agent: `kill -9` of `agents run` takes along what its tasks have started.

mod support;

use std::{
    path::Path,
    time::{Duration, Instant},
};

use support::{Agent, Dev, LONG, agent_reach};

/// Waits until `found` is there.
fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LONG;
    loop {
        match found() {
            Some(found) => return found,
            None if Instant::now() > deadline => panic!("{what} took too long"),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// A dead process that nobody has asked after yet is gone too.
fn is_gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|after| after.trim_start().starts_with('Z') || after.is_empty())
}

fn pids(file: &Path) -> Option<Vec<u32>> {
    let text = std::fs::read_to_string(file).ok()?;
    let pids: Vec<u32> = text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect();
    (pids.len() == 2 && text.ends_with('\n')).then_some(pids)
}

#[test]
fn a_killed_agent_leaves_no_command_behind() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let _dev = Dev::start(home.path());
    let file = home.path().join("pids");
    // A shell and what it started, as most commands are.
    let command = format!("sleep 1000 & echo $$ $! > {}; wait", file.display());
    let agent = Agent::start(home.path(), &command);
    let send = ["send", "--capability", "work", "--payload", "1", "--detach"];
    assert!(agent_reach(home.path(), &send).status().expect("the binary runs").success());
    let pids = wait_for("the command", || pids(&file));
    assert!(pids.iter().all(|pid| !is_gone(*pid)));
    // As `kill -9`.
    drop(agent);
    wait_for("the end of its command", || pids.iter().all(|pid| is_gone(*pid)).then_some(()));
}
