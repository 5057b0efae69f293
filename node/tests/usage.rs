//! The binary with arguments that it can't carry out, and what is answered without a cluster: for
//! people and for programs.

use std::process::{Command, Output};

use serde_json::Value;

fn agent_reach(line: &str) -> Output {
    let home = tempfile::tempdir().expect("a temporary folder");
    Command::new(env!("CARGO_BIN_EXE_agent-reach"))
        .args(line.split(' '))
        .env("AGENT_REACH_HOME", home.path())
        .env_remove("AGENT_REACH_CONTEXT")
        .env_remove("AGENT_REACH_ENDPOINT")
        .output()
        .expect("the binary runs")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("text")
}

#[test]
fn a_usage_error_has_the_one_shape_when_a_program_asks() {
    for (line, field) in [
        ("cluster status --timeout 30 -o json", Some("--timeout")),
        ("-o json cluster status --timeout 30", Some("--timeout")),
        ("cluster status --output=jsonl --timeout 30", Some("--timeout")),
        ("-ojson nope", None),
        ("send -o json --payload 1", None),
        ("send -o json --nope", Some("--nope")),
        // Understood, and not to be carried out.
        ("-o json certs issue --agent a", None),
    ] {
        let output = agent_reach(line);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{line}: {text}");
        let error: Value = serde_json::from_str(&text).unwrap_or_else(|_| panic!("{line}: {text}"));
        assert_eq!((&error["code"], &error["retryable"]), (&"invalid".into(), &false.into()), "{line}");
        let message = error["message"].as_str().expect("a message");
        assert!(!message.contains("Usage:") && !message.contains('\n'), "{message}");
        if let Some(field) = field {
            assert_eq!(error["field"], field, "{line}");
        }
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn a_usage_error_shows_a_person_the_usage() {
    let output = agent_reach("cluster status --timeout 30");
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2));
    assert!(text.starts_with("error: invalid value '30'") && text.contains("--help"), "{text}");
    // What follows -- is somebody else's.
    let output = agent_reach("agents run --nope -- grep -o json");
    assert!(stderr(&output).starts_with("error: unexpected argument"), "{}", stderr(&output));
}

#[test]
fn the_version_and_help_are_no_errors() {
    let version = env!("CARGO_PKG_VERSION");
    let output = agent_reach("version -o json");
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(value, serde_json::json!({ "version": version }));
    for (line, start) in
        [("version", "agent-reach "), ("--version", "agent-reach "), ("--help -o json", "Agents hand")]
    {
        let output = agent_reach(line);
        assert_eq!(output.status.code(), Some(0), "{line}");
        assert!(String::from_utf8_lossy(&output.stdout).starts_with(start), "{line}");
    }
}

#[test]
fn what_is_given_is_checked_before_any_node_is_asked() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let run = |line: &str| {
        let line = line.replace("DIR", &home.path().display().to_string());
        let output = Command::new(env!("CARGO_BIN_EXE_agent-reach"))
            .args(line.split(' '))
            .env("AGENT_REACH_HOME", home.path().join("home"))
            .output()
            .expect("the binary runs");
        (output.status.code(), stderr(&output))
    };
    // Nobody listens there.
    let new = run("cluster new --name shop --node n1=127.0.0.1:9 --out DIR/shop");
    assert_eq!(new.0, Some(0), "{}", new.1);
    run("context add shop --from DIR/shop/admin");
    std::fs::write(home.path().join("bad"), "nope").expect("it is writable");
    for (line, exit, told) in [
        ("send --to a --payload {", 3, "the payload is not JSON"),
        ("send --to a --payload @DIR/none", 3, "can't be read"),
        ("send --to a --payload 1 --expire-in 31d", 2, "'--expire-in <TIME>': the most is 30d"),
        ("send --to a --payload 1 --expire-in 0s", 2, "'--expire-in <TIME>': the least is 1ms"),
        ("agents register DIR/bad", 3, "bad: "),
        ("rules apply DIR/bad", 3, "line 1"),
        ("rules apply DIR/none", 2, "can't be read"),
    ] {
        let (status, text) = run(line);
        assert_eq!(status, Some(exit), "{line}: {text}");
        assert!(text.contains(told) && !text.contains("expires_in_ms"), "{line}: {text}");
    }
}
