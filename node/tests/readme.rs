//! Runs the commands of the README's sections as a new user would, against a fresh `dev` cluster, and
//! holds what they print against what the README shows.

mod support;

use std::{path::Path, process::Command};

use support::{Dev, free_port};

/// In the order in which they are read: each goes on with what the ones before it made.
const SECTIONS: [&str; 6] = [
    "First agent",
    "An agent in Python",
    "When things break",
    "Over HTTP",
    "Telling everyone",
    "A real cluster",
];
const MARK: &str = "==== command";
/// Prints the process id of the node that leads.
const LEADER_PID: &str = "agent-reach cluster status -o json | python3 -c 'import json, sys; view = json.load(sys.stdin); \
    print(next(node[\"pid\"] for node in view[\"nodes\"] if node[\"node\"] == view[\"leader\"]))'";

/// What a reader sees before going on, and a busy machine may take longer for than the README says.
const WAITS: &str = r#"
within() { for _ in $(seq 600); do "$@" && return; sleep 0.1; done; echo "never: $*"; }
printed() { test "$(tac "$OUT" | sed '/^==== command$/Q' | grep -vc '^\[[0-9]\|^bash: line ')" -ge "$1"; }
answers() { agent-reach "${@:3}" -o json 2>/dev/null | grep -q "\"$1\": *\"$2\""; }
all_answer() { agent-reach cluster status -o json | python3 -c '
import json, sys
nodes = json.load(sys.stdin)["nodes"]
sys.exit(not (all(node["answers"] for node in nodes) and len({node["applied"] for node in nodes}) == 1))'; }
"#;

/// Prints the address of a node's HTTP door.
const HTTP_ADDR: &str = "agent-reach cluster status -o json | python3 -c 'import json, sys; \
    print(next(node[\"http_addr\"] for node in json.load(sys.stdin)[\"nodes\"] if node[\"answers\"]))'";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("node/ is in the workspace")
}

fn readme() -> String {
    std::fs::read_to_string(root().join("README.md")).expect("there is a README")
}

/// Each command of the section with the lines the README shows below it.
fn commands(readme: &str, section: &str) -> Vec<(String, Vec<String>)> {
    let section = readme.split_once(&format!("\n## {section}\n")).expect("the README has the section").1;
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

/// What may differ from run to run is made equal: numbers, their units, hashes and made ids, roles of
/// nodes, and the width of columns and bars. A line that is nothing but JSON is left as it is.
fn comparable(line: &str) -> String {
    if serde_json::from_str::<serde_json::Value>(line).is_ok() {
        return line.to_string();
    }
    let words = line.split_whitespace().map(|word| match word {
        "leader" | "follower" => "ROLE".to_string(),
        _ if matches!(word.len(), 16 | 40) && word.bytes().all(|b| b.is_ascii_hexdigit()) => {
            "HASH".to_string()
        }
        _ => without_ulid(word),
    });
    let mut text = String::new();
    for c in words.collect::<Vec<_>>().join(" ").chars() {
        match c {
            '0'..='9' if text.ends_with('#') => {}
            '0'..='9' => text.push('#'),
            '░' | '▒' | '█' => {}
            _ => text.push(c),
        }
    }
    let text = text.replace("#.#", "#").replace("# min # s", "#").replace(" -#", " #");
    let words = text.split_whitespace().filter(|word| !matches!(*word, "ms" | "s"));
    words.collect::<Vec<_>>().join(" ")
}

/// Of a made id, such as `t_01M8QZ54NGKYF0ZMEPNPG9MQYC`, its letter is left.
fn without_ulid(word: &str) -> String {
    let is_made = |rest: &str| {
        rest.len() >= 26 && rest.bytes().take(26).all(|b| b.is_ascii_digit() || b.is_ascii_uppercase())
    };
    match word.split_once('_') {
        Some((before, rest)) if is_made(rest) => format!("{before}_ULID{}", &rest[26..]),
        _ => word.to_string(),
    }
}

/// The shell's own notices about its jobs, as in `[1]+  Done …`, are not ours.
fn is_ours(line: &str) -> bool {
    let of_a_job = line.strip_prefix('[').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    !of_a_job && !line.starts_with("bash: line ")
}

/// Waits, after the command, for what the reader of `shown` waits for.
fn seen(command: &str, shown: usize) -> String {
    let word_after = |before: &str| command.split_once(before)?.1.split_whitespace().next();
    if let Some(agent_id) = word_after("agent.py ") {
        return format!("within answers state ready agents show {agent_id}");
    }
    if command.contains(" & done") {
        return "for n in n1 n2 n3; do within grep -q 'node started' ~/shop/$n.log; done".to_string();
    }
    match word_after("--msg-id ") {
        Some(msg_id) if command.contains("--detach") => {
            format!("within answers state 'acknowledged\\|completed' messages show {msg_id}; sleep 0.2")
        }
        _ if command.contains(" & sleep ") => format!("within printed {shown}"),
        _ => String::new(),
    }
}

/// What depends on the machine of who reads: ports may be taken, and a process id is another one.
fn here(command: &str) -> String {
    if command.strip_prefix("kill -9 ").is_some_and(|pid| pid.bytes().all(|b| b.is_ascii_digit())) {
        return format!("kill -9 $({LEADER_PID})");
    }
    let mut command = command.replace("sleep 5; agent-reach", "within all_answer; agent-reach");
    command = command.replace("127.0.0.1:7480", &format!("$({HTTP_ADDR})"));
    // What holds JSON is quoted; the address is not.
    command = command.replace(&format!("'http://$({HTTP_ADDR})"), &format!("http://$({HTTP_ADDR})'"));
    for port in ["8481", "8491", "8501"] {
        command = command.replace(&format!("127.0.0.1:{port}"), &format!("127.0.0.1:{}", free_port() + 1));
    }
    command
}

#[test]
fn the_commands_of_the_readme_work_as_shown() {
    let readme = readme();
    let home = tempfile::tempdir().expect("a temporary folder");
    let home = home.path();
    let _dev = Dev::start(&home.join(".agent-reach"));
    let bin = Path::new(env!("CARGO_BIN_EXE_agent-reach")).parent().expect("it is in a folder");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    for section in SECTIONS {
        let commands = commands(&readme, section);
        assert!(commands.len() >= 4, "the section {section} has lost its commands: {}", commands.len());
        // Job control, as in the shell of the person who reads: `kill %1` is one of the commands.
        let mut script = String::from("set -m\ntrap 'kill $(jobs -p) 2>/dev/null' EXIT\nexec 2>&1\n");
        script.push_str(WAITS);
        for (command, shown) in &commands {
            script.push_str(&format!("echo '{MARK}'\n{}\n{}\n", here(command), seen(command, shown.len())));
        }
        let out = home.join("printed");
        Command::new("bash")
            .args(["-c", &script])
            .current_dir(root())
            .env("HOME", home)
            .env_remove("AGENT_REACH_HOME")
            .env("PATH", &path)
            .env("OUT", &out)
            .stdout(std::fs::File::create(&out).expect("a file in it"))
            .status()
            .expect("there is a bash");
        let printed =
            std::fs::read_to_string(&out).expect("text").replace(&home.display().to_string(), "/home/you");
        let printed: Vec<&str> = printed.split(&format!("{MARK}\n")).skip(1).collect();
        assert_eq!(printed.len(), commands.len(), "{section}: {printed:?}");
        for ((command, shown), printed) in commands.iter().zip(printed) {
            let shown: Vec<String> = shown.iter().map(|line| comparable(line)).collect();
            let real: Vec<String> = printed.lines().filter(|line| is_ours(line)).map(comparable).collect();
            assert_eq!(shown, real, "{section}: {command}\nprinted:\n{printed}");
        }
    }
}

/// The example is compiled with the tests of its crate.
#[test]
fn the_rust_of_the_readme_stands_in_the_example() {
    let readme = readme();
    let block = readme.split_once("\n```rust\n").expect("the README shows some Rust").1;
    let block = block.split_once("\n```").expect("the block ends").0;
    let example = std::fs::read_to_string(root().join("client/examples/word_count.rs")).expect("there it is");
    let indented: Vec<String> = block.lines().map(|line| format!("    {line}")).collect();
    assert!(block.lines().count() > 5 && example.contains(&indented.join("\n")), "{block}");
}
