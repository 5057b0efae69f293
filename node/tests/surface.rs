//! Holds docs/surface.md against the code: every command and every code, in both directions.

use std::collections::BTreeSet;

use agent_reach::cli::Args;
use clap::CommandFactory;
use reach_protocol::Code;

fn surface() -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/surface.md");
    std::fs::read_to_string(path).expect("docs/surface.md stands beside the crates")
}

fn leaves(command: &clap::Command, path: &str, into: &mut BTreeSet<String>) {
    let path = format!("{path}{}", command.get_name());
    // What only our own processes call is no surface.
    let mut subs = command.get_subcommands().filter(|sub| !sub.is_hide_set()).peekable();
    if subs.peek().is_none() {
        into.insert(path);
        return;
    }
    subs.for_each(|sub| leaves(sub, &format!("{path} "), into));
}

#[test]
fn the_documented_commands_are_the_commands() {
    let documented: BTreeSet<String> = surface()
        .lines()
        .filter_map(|line| line.strip_prefix("| `agent-reach ")?.split_once('`'))
        .map(|(words, _)| format!("agent-reach {words}"))
        .collect();
    let mut existing = BTreeSet::new();
    leaves(&Args::command(), "", &mut existing);
    assert_eq!(documented, existing);
}

#[test]
fn the_documented_codes_are_the_codes() {
    let documented: BTreeSet<[String; 4]> = surface()
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.split('|').map(str::trim).collect();
            let [_, code, http, exit, retry, _, _] = cells[..] else { return None };
            let code = code.strip_prefix('`')?.strip_suffix('`')?;
            Some([code, http, exit, retry].map(str::to_string))
        })
        .collect();
    let existing = Code::ALL
        .iter()
        .map(|code| {
            let retry = if code.retryable() { "yes" } else { "no" };
            [
                code.to_string(),
                code.http_status().to_string(),
                code.exit_status().to_string(),
                retry.to_string(),
            ]
        })
        .collect();
    assert_eq!(documented, existing);
}

/// The router itself can't be asked, so its source is.
#[test]
fn the_documented_routes_are_the_routes() {
    let documented: BTreeSet<String> = surface()
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once('`'))
        .filter(|(route, _)| {
            ["GET ", "PUT ", "POST ", "DELETE "].iter().any(|method| route.starts_with(method))
        })
        .map(|(route, _)| route.to_string())
        .collect();
    let source = include_str!("../src/http/mod.rs");
    let mut existing = BTreeSet::new();
    for line in source.lines() {
        let Some((path, handlers)) =
            line.trim().strip_prefix(".route(\"").and_then(|rest| rest.split_once("\", "))
        else {
            continue;
        };
        for (method, name) in [("get(", "GET"), ("put(", "PUT"), ("post(", "POST"), ("delete(", "DELETE")] {
            if handlers.contains(method) {
                existing.insert(format!("{name} {path}"));
            }
        }
    }
    assert!(existing.len() > 15, "{existing:?}");
    assert_eq!(documented, existing);
}
