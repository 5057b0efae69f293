//! The rules document as text: read with line numbers, written with comments. What the keys mean
//! and their ranges belong to `reach_protocol::rules`.

use std::fmt::Write;

use reach_protocol::{Rules, id::Name};

use crate::{document::Document, error::Fault, node};

/// The longest rules text, in bytes: it is replicated with its comments.
pub const TEXT_MAX: usize = 256 << 10;

/// Reads and checks a whole document. Keys that are absent have their defaults.
pub fn parse(text: &str) -> Result<Rules, Fault> {
    if text.len() > TEXT_MAX {
        let problem = format!("the rules have {} bytes; the limit is {TEXT_MAX}", text.len());
        return Err(Fault { line: None, key: None, problem });
    }
    let document = Document::parse(text)?;
    let rules: Rules = document.read(not_in_the_rules)?;
    rules.validate().map_err(|problem| {
        // The message begins with the key it is about.
        let (key, rest) = problem.split_once(' ').unwrap_or(("", &problem));
        document.fault(key, rest)
    })?;
    Ok(rules)
}

/// The defaults as a commented document: the text to start one's own from.
pub fn default_text() -> String {
    render(&Rules::default())
}

/// Any rules as a commented document. Read again it gives the same rules.
pub fn render(rules: &Rules) -> String {
    let Rules { liveness, delivery, routing, events, limits, grants } = rules;
    let mut text = String::from(
        "# The rules of an Agent-Reach cluster, in force on all nodes alike within a second of\n\
         #     agent-reach rules apply rules.toml\n\
         # A key that is left out has its default. Names ending in _ms are milliseconds, in _bytes bytes.\n",
    );
    let mut line = |comment: &str, key: &str, value: String| {
        let _ = writeln!(text, "{comment}{key}{}{value}", if value.is_empty() { "" } else { " = " });
    };
    line("\n", "[liveness]", String::new());
    line("# How often an agent beats, at both levels.\n", "heartbeat_ms", number(liveness.heartbeat_ms));
    line(
        "# Silence after which an agent is offline; at least twice heartbeat_ms.\n",
        "ttl_ms",
        number(liveness.ttl_ms),
    );
    line(
        "# Offline for so long, a registration is removed.\n",
        "remove_after_ms",
        number(liveness.remove_after_ms),
    );
    line(
        "# More than half of the agents, and at least so many, that are about to expire together get one more ttl_ms.\n",
        "mass_expiry_min",
        number(liveness.mass_expiry_min.into()),
    );
    line("\n", "[delivery]", String::new());
    line(
        "# Without the agent's `received` for this long, the same attempt is sent again.\n",
        "resend_after_ms",
        number(delivery.resend_after_ms),
    );
    line(
        "# Without `received` for this long, another agent is tried; above resend_after_ms.\n",
        "give_back_after_ms",
        number(delivery.give_back_after_ms),
    );
    line(
        "# How long a task that an agent had received stays with it once it is offline, while no other can take it.\n",
        "return_within_ms",
        number(delivery.return_within_ms),
    );
    line(
        "# Attempts that may end before `received` and are followed by another at once; further ones wait.\n",
        "attempts_max",
        number(delivery.attempts_max.into()),
    );
    line(
        "# The deadline of a message that names none, counted from its acceptance.\n",
        "expires_in_ms",
        number(delivery.expires_in_ms),
    );
    line(
        "# How long an attempt whose message has ended may keep its agent's slot.\n",
        "stuck_slot_ms",
        number(delivery.stuck_slot_ms),
    );
    line("\n", "[routing]", String::new());
    line(
        "# How long a message waits while none of the agents that could take it is ready.\n",
        "wait_for_agent_ms",
        number(routing.wait_for_agent_ms),
    );
    line(
        "# Messages that may wait for an agent at once; above it submissions are `overloaded`.\n",
        "waiting_max",
        number(routing.waiting_max),
    );
    line("\n", "[events]", String::new());
    line(
        "# How long a topic keeps an event, and how many bytes; `topics set` declares others for one topic.\n",
        "max_age_ms",
        number(events.max_age_ms),
    );
    line("", "max_bytes", number(events.max_bytes));
    line(
        "# Without a word on it for this long, an event is handed out again.\n",
        "ack_wait_ms",
        number(events.ack_wait_ms),
    );
    line(
        "# Times an event is handed out; then it goes to the group's dead letters.\n",
        "deliveries_max",
        number(events.deliveries_max.into()),
    );
    line("\n", "[limits]", String::new());
    line("# Of a message.\n", "payload_bytes", number(limits.payload_bytes as u64));
    line("", "result_bytes", number(limits.result_bytes as u64));
    line("", "intent_bytes", number(limits.intent_bytes as u64));
    line("", "excerpt_bytes", number(limits.excerpt_bytes as u64));
    line("# Of a registration: counts, and bytes.\n", "capabilities", number(limits.capabilities as u64));
    line("", "subscriptions", number(limits.subscriptions as u64));
    line("", "metadata_bytes", number(limits.metadata_bytes as u64));
    line("# Of each schema of a capability.\n", "schema_bytes", number(limits.schema_bytes as u64));
    line("# Agents that a message may prefer.\n", "preferred_agents", number(limits.preferred_agents as u64));
    line("\n", "[grants]", String::new());
    line(
        "# Users (the NAME of `agent-reach certs issue --operator NAME`) that may change rules and remove agents.\n",
        "operators",
        names(&grants.operators),
    );
    text
}

/// Digits in groups of three, as TOML allows.
fn number(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push('_');
        }
        text.push(digit);
    }
    text
}

fn names(names: &[Name]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
    format!("[{}]", quoted.join(", "))
}

/// The answer to a rule's key in a node's file; None when `path` is no rule.
pub(crate) fn not_in_a_nodes_file(path: &str) -> Option<String> {
    let all = toml::Table::try_from(Rules::default()).expect("rules are plain tables");
    let key = path.rsplit('.').next().unwrap_or(path);
    let what = if all.contains_key(path) {
        format!("[{path}]")
    } else {
        let holds = |table: &toml::Value| table.as_table().is_some_and(|table| table.contains_key(key));
        let (section, _) = all.iter().find(|(_, table)| holds(table))?;
        format!("{key} in [{section}]")
    };
    Some(format!(
        "{what} is a rule, in force on all nodes alike: put it into rules.toml and run \
         `agent-reach rules apply rules.toml`"
    ))
}

/// The answer to a node's key in the rules; None when `path` is no node's key either.
fn not_in_the_rules(path: &str) -> Option<String> {
    let top = path.split('.').next().unwrap_or(path);
    node::KEYS.contains(&top).then(|| {
        format!(
            "{top} belongs to one node: put it into that node's own file (the F of `agent-reach node --config F`) \
             and leave it out of the rules"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commented_defaults_are_the_defaults() {
        assert_eq!(parse(&default_text()), Ok(Rules::default()));
        assert_eq!(parse(""), Ok(Rules::default()));
        expect_test::expect_file!["../examples/rules.toml"].assert_eq(&default_text());
    }

    #[test]
    fn every_rule_stands_in_the_text() {
        let written: toml::Table = toml::from_str(&default_text()).unwrap();
        let all = toml::Table::try_from(Rules::default()).unwrap();
        assert_eq!(written, all);
    }

    #[test]
    fn what_is_written_is_read_again() {
        let mut rules = Rules::default();
        rules.grants.operators = vec![Name::parse("admin").unwrap(), Name::parse("ops:2").unwrap()];
        rules.liveness.ttl_ms = 30_000;
        assert_eq!(parse(&render(&rules)), Ok(rules));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        let fault = |text: &str| parse(text).unwrap_err().to_string();
        assert_eq!(
            fault("[liveness]\n\nttl_ms = 10"),
            "line 3: liveness.ttl_ms: is 10; it must be from 300 to 600000"
        );
        assert_eq!(
            fault("[liveness]\nttl_m = 10"),
            "line 2: liveness.ttl_m: there is no such key; did you mean ttl_ms?"
        );
        assert_eq!(
            fault("[delivery]\nresend_after_ms = 20_000"),
            "delivery.give_back_after_ms: is 10000; it must be above delivery.resend_after_ms (20000)"
        );
        assert!(
            fault("[grants]\noperators = [\"a b\"]").starts_with("line 2: grants.operators: a name must be")
        );
        assert!(fault("[delivery]\nattempts_max = -1").starts_with("line 2: delivery.attempts_max: "));
        assert!(
            fault("[storage]\ncache_mib = 5")
                .starts_with("line 1: storage: storage belongs to one node: put it")
        );
        assert!(fault("node_id = \"n1\"").contains("belongs to one node"));
        assert!(fault("[liveness").starts_with("line 1: not TOML: "));
        assert!(fault(&"#".repeat(TEXT_MAX + 1)).contains("the limit is 262144"));
    }
}
