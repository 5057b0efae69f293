//! How soon a dead agent is `offline`, and one whose loop hangs `draining`: processes of the SDK,
//! killed and frozen one after another among those that live.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use reach_protocol::{AgentId, AgentState};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use super::hold::{FREEZE, HERE};
use crate::{
    process::{Servers, tied},
    statistics::Spread,
    system::{Ours, Programs, READY_MAX, agents_in},
};

/// How often all states are looked at: what is measured is known to that.
const LOOK_EVERY: Duration = Duration::from_millis(25);
/// Between two of them. No heartbeat divides it, so that all phases occur; and so few are silent at a
/// time that their expiry does not wait as that of many at once does.
const NEXT_AFTER: Duration = Duration::from_millis(371);
/// After the last one.
const SEEN_MAX: Duration = Duration::from_secs(30);

#[derive(Clone, Debug)]
pub struct Plan {
    /// So many are killed, and as many frozen.
    pub each: usize,
    /// Before the first.
    pub settle: Duration,
    /// `reach-bench` itself.
    pub holder: PathBuf,
}

#[derive(Clone, Debug, Serialize)]
pub struct Detect {
    /// Seconds from `kill -9` to `offline`.
    pub killed_s: Spread,
    /// Seconds from the loop's stop to `draining`.
    pub frozen_s: Spread,
    /// How many took a state that was not theirs, or not in time.
    pub wrong: usize,
}

pub async fn measure(programs: &Programs, data: &Path, plan: &Plan) -> anyhow::Result<Detect> {
    let ours = Ours::start(&programs.agent_reach, Servers::none(data)?).await?;
    let found = watch(&ours, plan).await;
    found.map_err(|error| anyhow::anyhow!("{error:#}\n{}", ours.servers.logs()))
}

async fn watch(ours: &Ours, plan: &Plan) -> anyhow::Result<Detect> {
    let mut held = Vec::new();
    for nth in 0..2 * plan.each {
        held.push(Held::start(ours, &plan.holder, nth)?);
    }
    // Started side by side, waited for one by one.
    for held in &mut held {
        held.is_here()?;
    }
    sleep(plan.settle).await;
    let client = ours.target.client(None, READY_MAX).await?;
    let here = agents_in(&client, AgentState::Ready).await?;
    anyhow::ensure!(here.len() == held.len(), "{} of {} agents are ready", here.len(), held.len());

    // By agent: when it was ended, and how soon it was seen in the state that follows.
    let mut ended: BTreeMap<AgentId, (Instant, AgentState)> = BTreeMap::new();
    let mut seen: BTreeMap<AgentId, Duration> = BTreeMap::new();
    let mut wrong: BTreeSet<AgentId> = BTreeSet::new();
    let mut next = Instant::now();
    let mut turn = held.iter_mut().enumerate();
    let mut deadline = None;
    loop {
        if Instant::now() >= next {
            next += NEXT_AFTER;
            match turn.next() {
                Some((nth, held)) if nth % 2 == 0 => {
                    held.child.kill()?;
                    ended.insert(held.agent_id.clone(), (Instant::now(), AgentState::Offline));
                }
                Some((_, held)) => {
                    writeln!(held.orders, "{FREEZE}")?;
                    ended.insert(held.agent_id.clone(), (Instant::now(), AgentState::Draining));
                }
                None if deadline.is_none() => deadline = Some(Instant::now() + SEEN_MAX),
                None => {}
            }
        }
        for state in [AgentState::Draining, AgentState::Offline] {
            for agent_id in agents_in(&client, state).await? {
                match ended.get(&agent_id) {
                    Some((at, follows)) if *follows == state => {
                        seen.entry(agent_id).or_insert_with(|| at.elapsed());
                    }
                    // The loop of a dead agent is silent first, as a rule.
                    Some((_, AgentState::Offline)) => {}
                    _ => drop(wrong.insert(agent_id)),
                }
            }
        }
        if seen.len() == 2 * plan.each || deadline.is_some_and(|deadline| Instant::now() > deadline) {
            break;
        }
        sleep(LOOK_EVERY).await;
    }
    wrong.extend(ended.keys().filter(|agent_id| !seen.contains_key(*agent_id)).cloned());
    let of = |state| {
        let those = seen.iter().filter(|(agent_id, _)| ended[*agent_id].1 == state);
        Spread::of(those.map(|(_, after)| after.as_secs_f64())).context("none was seen")
    };
    Ok(Detect { killed_s: of(AgentState::Offline)?, frozen_s: of(AgentState::Draining)?, wrong: wrong.len() })
}

/// A process that holds one agent; killed when it is dropped.
struct Held {
    agent_id: AgentId,
    child: Child,
    orders: ChildStdin,
}

impl Held {
    fn start(ours: &Ours, holder: &Path, nth: usize) -> anyhow::Result<Self> {
        let agent_id = AgentId::parse(&format!("bench_held_{nth:03}"))?;
        let mut command = tied(holder);
        command.args(["hold", "--agent", &agent_id, "--context"]).arg(&ours.target.context);
        command.arg("--inbox").arg(ours.target.inboxes.join(&*agent_id));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", holder.display()))?;
        let orders = child.stdin.take().context("it has no input")?;
        Ok(Self { agent_id, child, orders })
    }

    fn is_here(&mut self) -> anyhow::Result<()> {
        let said = self.child.stdout.take().context("it was waited for before")?;
        let mut line = String::new();
        BufReader::new(said).read_line(&mut line)?;
        anyhow::ensure!(line.trim() == HERE, "{} did not come", self.agent_id);
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
