//! An operator's commands on a `dev` cluster, as a person and as a program would run them.

mod support;

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::Stdio,
    time::Instant,
};

use serde_json::Value;
use support::{Agent, Dev, LONG, agent_reach};

/// What a command printed, and its exit status.
fn run(home: &Path, args: &[&str]) -> (i32, String) {
    let output = agent_reach(home, args).output().expect("the binary runs");
    let text = String::from_utf8(output.stdout).expect("text");
    (output.status.code().expect("it was not killed"), text)
}

fn json(home: &Path, args: &[&str]) -> Value {
    let (_, text) = run(home, &[args, &["-o", "json"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("{args:?}: {text}"))
}

/// The value of a row of `agents show`.
fn row(shown: &str, name: &str) -> String {
    let line =
        shown.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name}: {shown}"));
    line[name.len()..].trim().to_string()
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !is() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}

#[test]
fn what_is_wrong_is_told_with_the_command_that_helps() {
    let home = tempfile::tempdir().expect("a folder");
    let home = home.path();
    let _dev = Dev::start(home);
    // Links between the nodes may still be made; a loaded machine may answer late for a moment.
    let nothing_is_wrong = || {
        until("something stayed wrong", || run(home, &["problems"]) == (0, "nothing is wrong\n".to_string()))
    };
    nothing_is_wrong();
    assert_eq!(run(home, &["agents", "drain", "worker"]).0, 3, "there is none");

    // It holds a task for as long as the file is there.
    let hold = home.join("hold");
    std::fs::write(&hold, "").expect("a file");
    let agent = Agent::start(home, &format!("while [ -e {} ]; do sleep 0.05; done; echo 1", hold.display()));
    let (status, text) =
        run(home, &["send", "--capability", "work", "--payload", "1", "--msg-id", "m_1", "--detach"]);
    assert_eq!(status, 0, "{text}");
    let state = |id: &str| json(home, &["messages", "show", id])["state"].clone();
    until("the task never got there", || state("m_1") == "acknowledged");

    let mut watch =
        agent_reach(home, &["agents", "ls", "--watch"]).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut changes = BufReader::new(watch.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let mut next = |part: &str| {
        let line = changes.next().expect("a change");
        assert!(line.contains(part), "{line}");
    };
    next("worker ready: registered, running 1/8");

    let (status, shown) = run(home, &["agents", "drain", "worker"]);
    assert_eq!(status, 0);
    assert!(row(&shown, "state").starts_with("draining: drained by an operator, since "), "{shown}");
    assert!(row(&shown, "drained").starts_with("by user/admin at "), "{shown}");
    assert_eq!(row(&shown, "way back"), "`agent-reach agents resume worker`");
    assert_eq!(row(&shown, "running"), "1 of 8");
    assert!(row(&shown, "last act").starts_with("received m_1 at "), "{shown}");
    next("worker draining: drained by an operator, running 1/8");

    let (status, text) = run(home, &["problems"]);
    assert_eq!(status, 1);
    assert!(text.contains("agent-reach agents resume worker"), "{text}");
    assert!(text.contains("nobody is ready for work"), "{text}");
    let is_told = |kind: &str| {
        let problems = json(home, &["problems"]);
        let mut items = problems["items"].as_array().expect("a list").iter();
        assert!(items.any(|problem| problem["kind"] == kind), "{problems}");
    };
    is_told("agent_draining");

    // What it runs ends well while it is drained.
    std::fs::remove_file(&hold).expect("it is there");
    until("the task never ended", || state("m_1") == "completed");
    assert_eq!(json(home, &["agents", "show", "worker"])["state"], "draining");
    next("worker draining: drained by an operator, running 0/8");
    assert_eq!(run(home, &["agents", "resume", "worker"]).0, 0);
    next("worker ready: resumed by an operator, running 0/8");
    watch.kill().expect("it runs");
    watch.wait().expect("it ends");
    nothing_is_wrong();

    // A shutdown lets it end too: draining first, then offline.
    std::fs::write(&hold, "").expect("a file");
    run(home, &["send", "--capability", "work", "--payload", "1", "--msg-id", "m_2", "--detach"]);
    until("the task never got there", || state("m_2") == "acknowledged");
    let stops = std::thread::spawn(move || agent.interrupt());
    let shown = |field: &str| json(home, &["agents", "show", "worker"])[field].clone();
    until("it never said that it leaves", || {
        (shown("state"), shown("reason")) == ("draining".into(), "shutting down".into())
    });
    std::fs::remove_file(&hold).expect("it is there");
    stops.join().expect("it ends well");
    assert_eq!((state("m_2"), shown("state")), ("completed".into(), "offline".into()));

    // Nobody else declares its capability, so that it left is a problem; removed, it is none.
    is_told("agent_offline");
    for _ in 0..2 {
        assert_eq!(run(home, &["agents", "rm", "worker"]), (0, "worker is removed\n".to_string()));
    }
    nothing_is_wrong();
    assert_eq!(run(home, &["agents", "rm", "nobody"]).0, 3);
    let gone = agent_reach(home, &["agents", "show", "worker"]).output().expect("the binary runs");
    let said = String::from_utf8_lossy(&gone.stderr).into_owned();
    assert!(said.contains("no agent worker is registered; user/admin removed it at 20"), "{said}");
    let (status, text) = run(home, &["agents", "expire", "--now"]);
    assert_eq!(status, 0);
    assert!(text.starts_with("nothing waits"), "{text}");
}
