//! Runs the commands of the README's section "First agent" as a new user would, against a fresh
//! `dev` cluster, and holds what they print against what the README shows.

mod support;

use std::{path::Path, process::Command};

use support::Dev;

const SECTION: &str = "## First agent";
const MARK: &str = "==== command";

/// Each command of the section with the lines the README shows below it.
fn commands(readme: &str) -> Vec<(String, Vec<String>)> {
    let section = readme.split_once(SECTION).expect("the README has the section").1;
    let section = section.split("\n## ").next().unwrap_or_default();
    let mut commands: Vec<(String, Vec<String>)> = Vec::new();
    let mut in_block = false;
    for line in section.lines() {
        match line {
            "```sh" => in_block = true,
            "```" => in_block = false,
            _ if !in_block => {}
            _ => match line.strip_prefix("$ ") {
                Some(command) => commands.push((command.to_string(), Vec::new())),
                None => commands.last_mut().expect("output follows a command").1.push(line.to_string()),
            },
        }
    }
    commands
}

/// What may differ from run to run is made equal: numbers, their units, node names, and the width of
/// columns and bars. A line that is nothing but JSON is left as it is.
fn comparable(line: &str) -> String {
    if serde_json::from_str::<serde_json::Value>(line).is_ok() {
        return line.to_string();
    }
    let mut text = String::new();
    for c in line.chars() {
        match c {
            '0'..='9' if text.ends_with('#') => {}
            '0'..='9' => text.push('#'),
            '░' | '▒' | '█' => {}
            _ => text.push(c),
        }
    }
    let text = text.replace("#.#", "#").replace("# min # s", "#");
    let words = text.split_whitespace().filter(|word| !matches!(*word, "ms" | "s"));
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn the_first_agent_of_the_readme_works_as_shown() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("node/ is in the workspace");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("there is a README");
    let commands = commands(&readme);
    assert!(commands.len() >= 6, "the section has lost its commands: {}", commands.len());

    let home = tempfile::tempdir().expect("a temporary folder");
    let _dev = Dev::start(home.path());
    // Job control, as in the shell of the person who reads: `kill %1` is one of the commands.
    let mut script = String::from("set -m\nexec 2>&1\n");
    for (command, _) in &commands {
        script.push_str(&format!("echo '{MARK}'\n{command}\n"));
    }
    let bin = Path::new(env!("CARGO_BIN_EXE_agent-reach")).parent().expect("it is in a folder");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    let output = Command::new("bash")
        .args(["-c", &script])
        .current_dir(root)
        .env("AGENT_REACH_HOME", home.path())
        .env("PATH", path)
        .output()
        .expect("there is a bash");
    let printed = String::from_utf8_lossy(&output.stdout);
    let printed: Vec<&str> = printed.split(&format!("{MARK}\n")).skip(1).collect();
    assert_eq!(printed.len(), commands.len());
    for ((command, shown), printed) in commands.iter().zip(printed) {
        let shown: Vec<String> = shown.iter().map(|line| comparable(line)).collect();
        // The shell's own notices about its jobs ("[1]+  Done …") are not ours.
        let ours = printed.lines().filter(|line| !line.starts_with("[1]"));
        let real: Vec<String> = ours.map(comparable).collect();
        assert_eq!(shown, real, "{command}\nprinted:\n{printed}");
    }
}
