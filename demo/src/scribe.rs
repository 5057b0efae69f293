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

/// A line of a node's log that tells of its role or of its links.
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
    LinkLost { peer: String },
}

/// One leader gone, and the next.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    lost: String,
    /// When the first of the others lost its link to it.
    lost_at: Timestamp,
    next: String,
    term: u64,
    at: Timestamp,
    /// When the lost one's process was there again.
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
        peer: Option<String>,
    }
    let logged: Logged = serde_json::from_str(text).ok()?;
    let said = match (logged.message.as_str(), logged.term, logged.peer) {
        ("node started", ..) => Said::Started,
        ("this node leads", Some(term), _) => Said::Leads { term },
        ("link lost", _, Some(peer)) => Said::LinkLost { peer },
        _ => return None,
    };
    Some(Line { at: logged.timestamp, node: node.into(), said })
}

fn changes(lines: &[Line]) -> Vec<Change> {
    let leads = lines.iter().filter_map(|line| match line.said {
        Said::Leads { term } => Some((line, term)),
        _ => None,
    });
    let leads: Vec<(&Line, u64)> = leads.collect();
    let change = |pair: &[(&Line, u64)]| {
        let [(before, _), (next, term)] = pair else { return None };
        let lost = Said::LinkLost { peer: before.node.clone() };
        let between = |line: &&Line| (before.at..=next.at).contains(&line.at);
        let lost_at = lines.iter().filter(between).find(|line| line.said == lost).map(|line| line.at)?;
        let is_back =
            |line: &&Line| line.node == before.node && line.said == Said::Started && line.at > lost_at;
        Some(Change {
            lost: before.node.clone(),
            lost_at,
            next: next.node.clone(),
            term: *term,
            at: next.at,
            back_at: lines.iter().find(is_back).map(|line| line.at),
        })
    };
    leads.windows(2).filter_map(change).collect()
}

fn text(changes: &[Change], completed: &[Timestamp], offline: &[Timestamp]) -> String {
    let mut text = String::from("# Post-mortem\n\n");
    if changes.is_empty() {
        text.push_str("No leader was lost.\n");
    }
    for change in changes {
        let Change { lost, lost_at, next, term, at, back_at } = change;
        let gap = lost_at.duration_until(*at).as_secs_f64();
        let within = |times: &[Timestamp]| times.iter().filter(|time| (lost_at..at).contains(time)).count();
        let after = completed.iter().filter(|time| *time >= at).count();
        text.push_str(&format!(
            "At {} the leader {lost} was lost. {next} led {gap:.1} s later, in term {term}. ",
            clock(*lost_at)
        ));
        text.push_str(&format!(
            "Tasks completed before: {}; while nobody led: {}; since: {after}. ",
            completed.iter().filter(|time| *time < lost_at).count(),
            within(completed)
        ));
        text.push_str(&format!("Agents taken for lost while nobody led: {}. ", within(offline)));
        match back_at {
            Some(back_at) => {
                let after = lost_at.duration_until(*back_at).as_secs_f64();
                text.push_str(&format!("{lost} was started again after {after:.1} s.\n\n"));
            }
            None => text.push_str(&format!("{lost} is not back yet.\n\n")),
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

/// How many changes of the leader of which node the file tells of, for the verdict.
pub fn told(out: &Path) -> BTreeMap<String, usize> {
    let text = fs::read_to_string(out.join(FILE)).unwrap_or_default();
    let mut told = BTreeMap::new();
    for (_, rest) in text.match_indices("the leader ").map(|(at, found)| text.split_at(at + found.len())) {
        if let Some((node, _)) = rest.split_once(" was lost") {
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
            log("n3", 10, r#""message":"link lost","peer":"n1""#),
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
        let sentence = "At 03:04:10.500 UTC the leader n1 was lost. n2 led 2.0 s later, in term 2. Tasks completed before: 1; \
                        while nobody led: 1; since: 2. Agents taken for lost while nobody led: 0. n1 was started again after 4.0 s.";
        assert!(text.contains(sentence), "{text}");

        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join(FILE), &text).unwrap();
        assert_eq!(told(place.path()), BTreeMap::from([("n1".to_string(), 1)]));
    }
}
