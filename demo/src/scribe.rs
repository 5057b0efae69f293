//! The scribe: `cluster.health_changed.v1` wakes it, and it writes from the nodes' own logs and from the
//! cluster's events what happened, in sentences.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use jiff::Timestamp;
use reach_client::{Agent, Client, Done, Failure};
use reach_protocol::{
    AgentState, Code, EventRow, EventType,
    event::Start,
    frame::{Answer, Request},
};
use serde::Deserialize;

use crate::{
    agent::{Place, json, live},
    unit,
};

pub const WAKES: &str = "cluster.health_changed.v1";
pub const FILE: &str = "POSTMORTEM.md";

const ASK_MAX: Duration = Duration::from_secs(5);
const PAGE: u32 = 500;

/// A line of a node's log that tells of its role.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    at: Timestamp,
    node: String,
    said: Said,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    Started,
    Leads { term: u64 },
}

/// One leader after another.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    before: String,
    next: String,
    term: u64,
    at: Timestamp,
    /// When the process of the one before was there again.
    back_at: Option<Timestamp>,
}

/// Lives as an agent: an event or a task makes it write.
pub async fn run(id: &str, logs: PathBuf, place: Place) -> anyhow::Result<()> {
    let (out, logs) = (Arc::new(place.out.clone()), Arc::new(logs));
    let task = (out.clone(), logs.clone());
    let builder = Agent::builder(id)
        .capability(unit::POSTMORTEM, 1.0)
        .handler(move |given| {
            let (out, logs) = task.clone();
            async move {
                let changes = write(&logs, given.context().client(), &out).await.map_err(failed)?;
                Ok(Done::new(json(&changes).map_err(failed)?).excerpt(FILE))
            }
        })
        .subscribe(WAKES, None)
        .events_at_once(1)
        .on_events(move |_, context| {
            let (out, logs) = (out.clone(), logs.clone());
            async move { write(&logs, context.client(), &out).await.map(|_| ()).map_err(failed) }
        });
    live(builder, id, &place).await
}

fn failed(error: anyhow::Error) -> Failure {
    Failure::Error(format!("{error:#}"))
}

/// Writes the post-mortem anew and answers how many changes of the leader it tells of.
pub async fn write(logs: &Path, client: &Client, out: &Path) -> anyhow::Result<usize> {
    let changes = changes(&read(logs)?);
    let completed = at_times(&events(client, "task.completed.v1").await?, |_| true);
    let lost = at_times(&events(client, "agent.liveness_changed.v1").await?, |row| {
        let data: Result<Liveness, _> = serde_json::from_str(row.data.as_str());
        data.is_ok_and(|data| data.state == AgentState::Offline)
    });
    fs::write(out.join(FILE), text(&changes, &completed, &lost))?;
    Ok(changes.len())
}

#[derive(Deserialize)]
struct Liveness {
    state: AgentState,
}

fn at_times(rows: &[EventRow], is: impl Fn(&EventRow) -> bool) -> Vec<Timestamp> {
    let times = rows.iter().filter(|row| is(row)).map(|row| row.at.wall_ms as i64);
    times.filter_map(|wall_ms| Timestamp::from_millisecond(wall_ms).ok()).collect()
}

/// All events of a topic, page by page; none where nothing was published yet.
async fn events(client: &Client, event_type: &str) -> anyhow::Result<Vec<EventRow>> {
    let event_type = EventType::parse(event_type)?;
    let (mut all, mut from) = (Vec::new(), Start::Earliest);
    loop {
        let request = Request::Events { event_type: event_type.clone(), from, limit: PAGE, wait_ms: None };
        match client.request(request, ASK_MAX).await {
            Ok(Answer::Events { items, .. }) if items.is_empty() => return Ok(all),
            Ok(Answer::Events { items, next, .. }) => {
                all.extend(items);
                from = Start::Offset(next);
            }
            Ok(_) => anyhow::bail!("a question for events got another answer"),
            Err(error) if error.code() == Code::NotFound => return Ok(all),
            Err(error) => return Err(error.into()),
        }
    }
}

/// The logs of all nodes, in order of time.
fn read(logs: &Path) -> anyhow::Result<Vec<Line>> {
    let mut lines = Vec::new();
    for entry in fs::read_dir(logs).with_context(|| format!("{}", logs.display()))? {
        let entry = entry?;
        let node = entry.file_name().to_string_lossy().into_owned();
        if let Ok(text) = fs::read_to_string(entry.path().join("node.log")) {
            lines.extend(text.lines().filter_map(|text| line(&node, text)));
        }
    }
    lines.sort_by_key(|line| line.at);
    Ok(lines)
}

fn line(node: &str, text: &str) -> Option<Line> {
    #[derive(Deserialize)]
    struct Logged {
        timestamp: Timestamp,
        message: String,
        term: Option<u64>,
    }
    let logged: Logged = serde_json::from_str(text).ok()?;
    let said = match (logged.message.as_str(), logged.term) {
        ("node started", _) => Said::Started,
        ("this node leads", Some(term)) => Said::Leads { term },
        _ => return None,
    };
    Some(Line { at: logged.timestamp, node: node.into(), said })
}

fn changes(lines: &[Line]) -> Vec<Change> {
    let leads = lines.iter().filter_map(|line| match line.said {
        Said::Leads { term } => Some((line, term)),
        Said::Started => None,
    });
    let leads: Vec<(&Line, u64)> = leads.collect();
    let changes = leads.windows(2).filter(|pair| pair[0].0.node != pair[1].0.node).map(|pair| {
        let (before, (next, term)) = (pair[0].0, pair[1]);
        let is_back =
            |line: &&Line| line.node == before.node && line.said == Said::Started && line.at > next.at;
        Change {
            before: before.node.clone(),
            next: next.node.clone(),
            term,
            at: next.at,
            back_at: lines.iter().find(is_back).map(|line| line.at),
        }
    });
    changes.collect()
}

fn text(changes: &[Change], completed: &[Timestamp], offline: &[Timestamp]) -> String {
    let mut text = String::from("# Post-mortem\n\n");
    if changes.is_empty() {
        text.push_str("No leader was lost.\n");
    }
    for Change { before, next, term, at, back_at } in changes {
        text.push_str(&format!("At {} {next} took over from {before}, in term {term}. ", clock(*at)));
        let last = completed.iter().filter(|time| *time < at).max();
        let first = completed.iter().filter(|time| *time >= at).min();
        if let (Some(last), Some(first)) = (last, first) {
            let gap = last.duration_until(*first).as_secs_f64();
            let lost = offline.iter().filter(|time| (last..=first).contains(time)).count();
            text.push_str(&format!(
                "The last result before was recorded at {}, the next {gap:.1} s later. ",
                clock(*last)
            ));
            text.push_str(&format!("Agents taken for lost between the two: {lost}. "));
        }
        let earlier = completed.iter().filter(|time| *time < at).count();
        text.push_str(&format!("Results recorded before: {earlier}; since: {}. ", completed.len() - earlier));
        match back_at {
            Some(back_at) => {
                let after = at.duration_until(*back_at).as_secs_f64();
                text.push_str(&format!("{before} was started again {after:.1} s after that.\n\n"));
            }
            None => text.push_str(&format!("{before} is not back yet.\n\n")),
        }
    }
    text.push_str(
        "Sources: the nodes' logs, and the topics `task.completed.v1` and `agent.liveness_changed.v1`.\n",
    );
    text
}

fn clock(at: Timestamp) -> String {
    at.strftime("%H:%M:%S%.3f UTC").to_string()
}

/// How often the file tells of the loss of which leader, for the verdict.
pub fn told(out: &Path) -> BTreeMap<String, usize> {
    let text = fs::read_to_string(out.join(FILE)).unwrap_or_default();
    let mut told = BTreeMap::new();
    for part in text.split("took over from ").skip(1) {
        if let Some((node, _)) = part.split_once(',') {
            *told.entry(node.to_string()).or_default() += 1;
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_logs_of_a_lost_leader_become_sentences() {
        let log = |node: &str, second: u32, rest: &str| {
            let text = format!(r#"{{"timestamp":"2026-01-02T03:04:{second:02}.5Z","level":"INFO",{rest}}}"#);
            line(node, &text)
        };
        let leads = |term: u64| format!(r#""message":"this node leads","term":{term},"applied":1"#);
        let lines: Vec<Line> = [
            log("n1", 1, r#""message":"node started","node":"n1""#),
            log("n1", 2, &leads(1)),
            log("n3", 11, r#""message":"another line""#),
            log("n2", 12, &leads(2)),
            log("n1", 14, r#""message":"node started","node":"n1""#),
        ]
        .into_iter()
        .flatten()
        .collect();
        let changes = changes(&lines);
        let at = |second: u32| format!("2026-01-02T03:04:{second:02}Z").parse::<Timestamp>().unwrap();
        let text = text(&changes, &[at(5), at(11), at(13), at(20)], &[at(3)]);
        let sentence = "At 03:04:12.500 UTC n2 took over from n1, in term 2. The last result before was recorded at \
                        03:04:11.000 UTC, the next 2.0 s later. Agents taken for lost between the two: 0. \
                        Results recorded before: 2; since: 2. n1 was started again 2.0 s after that.";
        assert!(text.contains(sentence), "{text}");

        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join(FILE), &text).unwrap();
        assert_eq!(told(place.path()), BTreeMap::from([("n1".to_string(), 1)]));
    }
}
