//! Both heartbeats of the agents this node holds, and the record of all agents' ages that every
//! node keeps, so that whoever leads next judges by the same figures.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use reach_machine::Live;
use reach_protocol::{
    AgentId, Command, InstanceId, NodeId,
    frame::{Age, Heard, PeerFrame},
};
use reach_scheduler::Ages;

use super::Shared;

/// How often the ages go to every node.
const SUMMARY_EVERY: Duration = Duration::from_secs(1);

/// An agent that polls and was silent for so long is another node's, or nobody's.
pub const POLLS_FORGOTTEN_MS: u64 = 60_000;

#[derive(Debug, Default)]
pub struct Heartbeats {
    held: Mutex<HashMap<AgentId, Held>>,
    ages: Mutex<Ages>,
    offsets: Mutex<BTreeMap<NodeId, Offsets>>,
}

/// What a node has said of calendars, and when.
#[derive(Debug, Default)]
struct Offsets {
    own: Option<(u64, i64)>,
    /// Of the agents it holds.
    agents: HashMap<AgentId, i64>,
}

/// A node's word on its own offset holds for so long: it comes every second.
const OFFSET_HOLDS_MS: u64 = 5_000;

#[derive(Debug)]
struct Held {
    instance: InstanceId,
    level1_ms: u64,
    level2_ms: u64,
    /// Its host's calendar minus the cluster's.
    offset_ms: Option<i64>,
    /// Over HTTP: there is no connection whose end would tell that it is gone.
    polls: bool,
}

impl Held {
    /// Just heard for the first time, over HTTP.
    fn polling(instance: &InstanceId, now_ms: u64) -> Self {
        Self { instance: instance.clone(), level1_ms: now_ms, level2_ms: 0, offset_ms: None, polls: true }
    }
}

impl Heartbeats {
    /// A session begins: both levels were just proven.
    pub fn attached(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64) {
        let held = Held { level2_ms: now_ms, polls: false, ..Held::polling(instance, now_ms) };
        self.held().insert(agent_id.clone(), held);
    }

    pub fn detached(&self, agent_id: &AgentId, instance: &InstanceId) {
        let mut held = self.held();
        if held.get(agent_id).is_some_and(|entry| entry.instance == *instance) {
            held.remove(agent_id);
        }
    }

    pub fn beat(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64) {
        if let Some(entry) = self.held().get_mut(agent_id).filter(|entry| entry.instance == *instance) {
            entry.level1_ms = now_ms;
        }
    }

    /// An answer from the agent's own loop proves both levels.
    pub fn echoed(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64) {
        if let Some(entry) = self.held().get_mut(agent_id).filter(|entry| entry.instance == *instance) {
            entry.level1_ms = now_ms;
            entry.level2_ms = now_ms;
        }
    }

    /// An agent without a session of its own was heard here, at level 1 or at both.
    pub fn heard_over_http(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64, ready: bool) {
        let mut held = self.held();
        let entry = held.entry(agent_id.clone()).or_insert_with(|| Held::polling(instance, now_ms));
        if entry.instance != *instance {
            *entry = Held::polling(instance, now_ms);
        }
        entry.level1_ms = now_ms;
        if ready {
            entry.level2_ms = now_ms;
        }
    }

    /// What an agent held here, or its request, says of its host's calendar.
    pub fn off_by(&self, agent_id: &AgentId, instance: &InstanceId, offset_ms: i64) {
        if let Some(entry) = self.held().get_mut(agent_id).filter(|entry| entry.instance == *instance) {
            entry.offset_ms = Some(offset_ms);
        }
    }

    pub fn report(&self, now_ms: u64, node: NodeId, ages: &[Age]) {
        self.ages().report(now_ms, node, ages);
        let known = ages.iter().filter_map(|age| Some((age.agent_id.clone(), age.offset_ms?)));
        self.offsets().entry(node).or_default().agents = known.collect();
    }

    pub fn node_off_by(&self, now_ms: u64, node: NodeId, offset_ms: i64) {
        self.offsets().entry(node).or_default().own = Some((now_ms, offset_ms));
    }

    /// Of a node's calendar against the cluster's, as it said itself within the last seconds.
    pub fn offset_of_node(&self, now_ms: u64, node: NodeId) -> Option<i64> {
        let (said_ms, offset_ms) = self.offsets().get(&node)?.own?;
        (now_ms < said_ms + OFFSET_HOLDS_MS).then_some(offset_ms)
    }

    /// Of an agent's calendar against the cluster's, as the node said that heard it last.
    pub fn offset_of(&self, agent_id: &AgentId, heard_by: NodeId) -> Option<i64> {
        self.offsets().get(&heard_by)?.agents.get(agent_id).copied()
    }

    pub fn heard(&self, agent_id: &AgentId, now_ms: u64) -> Option<Heard> {
        self.ages().heard(now_ms, agent_id)
    }

    /// What the leader proposes by the ages it knows; a follower forgets who is gone.
    pub fn judge(&self, now_ms: u64, live: &Live, leading_since_ms: Option<u64>) -> Vec<Command> {
        self.ages().tick(now_ms, live, leading_since_ms)
    }

    pub fn node_lost(&self, now_ms: u64, node: NodeId) {
        self.ages().node_lost(now_ms, node);
    }

    fn summary(&self, now_ms: u64) -> Vec<Age> {
        let age = |heard_ms: u64| now_ms.saturating_sub(heard_ms);
        let mut held = self.held();
        held.retain(|_, held| !held.polls || age(held.level1_ms) < POLLS_FORGOTTEN_MS);
        held.iter()
            .map(|(agent_id, held)| Age {
                agent_id: agent_id.clone(),
                instance: held.instance.clone(),
                level1_age_ms: age(held.level1_ms),
                level2_age_ms: age(held.level2_ms),
                offset_ms: held.offset_ms,
            })
            .collect()
    }

    fn held(&self) -> MutexGuard<'_, HashMap<AgentId, Held>> {
        self.held.lock().expect("no panic while it is held")
    }

    fn offsets(&self) -> MutexGuard<'_, BTreeMap<NodeId, Offsets>> {
        self.offsets.lock().expect("no panic while it is held")
    }

    fn ages(&self) -> MutexGuard<'_, Ages> {
        self.ages.lock().expect("no panic while it is held")
    }
}

pub async fn run(shared: Arc<Shared>) {
    let mut every = tokio::time::interval(SUMMARY_EVERY);
    loop {
        every.tick().await;
        summarise(&shared);
        let leadership = *shared.replica.leadership().borrow();
        if leadership.leading {
            shared.peers.broadcast(&PeerFrame::Clock { term: leadership.term, stamp: shared.clock.stamp() });
        }
        // Beside the next summary: an answer may take its time.
        let asking = shared.clone();
        shared.clone().spawn(async move { asking.learn_calendar().await });
    }
}

fn summarise(shared: &Shared) {
    let now_ms = shared.clock.mono_ms();
    let ages = shared.heartbeats.summary(now_ms);
    shared.heartbeats.report(now_ms, shared.node_id, &ages);
    if !ages.is_empty() {
        shared.peers.broadcast(&PeerFrame::Ages { ages });
    }
    if let Some(offset_ms) = shared.clock.offset_ms() {
        shared.heartbeats.node_off_by(now_ms, shared.node_id, offset_ms);
        shared.peers.broadcast(&PeerFrame::Offset { offset_ms });
    }
    if !shared.replica.leadership().borrow().leading {
        let live = shared.replica.tables().live();
        shared.heartbeats.judge(now_ms, &live, None);
    }
}

impl Shared {
    /// The cluster's calendar is the leader's: this node's own stamps, or the leader's word, with half
    /// the round trip between its answer and now.
    pub async fn learn_calendar(&self) {
        let leadership = *self.replica.leadership().borrow();
        let asked_ms = self.clock.mono_ms();
        let wall_ms = match leadership.leader {
            _ if leadership.leading => Some(self.clock.stamp().wall_ms),
            Some(leader) => self.peers.calendar(leader).await,
            None => None,
        };
        if let Some(wall_ms) = wall_ms {
            self.clock.calendar_told(wall_ms, asked_ms.midpoint(self.clock.mono_ms()));
        }
    }
}
