//! Both heartbeats of the agents this node holds, and the record of all agents' ages that every
//! node keeps, so that whoever leads next judges by the same figures.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use reach_machine::Live;
use reach_protocol::{
    AgentId, Command, Fact, InstanceId, MessageState, NodeId, codec,
    frame::{Act, Age, Did, Heard, Hearsay, Named, PeerFrame, Summary},
    message::MessageRecord,
};
use reach_raft::Step;
use reach_scheduler::{Ages, LinkId};

use super::Shared;

/// How often every node tells the others of the agents it holds.
const SUMMARY_EVERY: Duration = Duration::from_secs(1);
/// Parts of a summary stay below the size from which frames lose their order.
const NAMES_MAX: usize = 256;
const AGES_MAX: usize = 4_096;
/// What this node tells itself.
const OWN: LinkId = LinkId::MAX;

/// An agent that polls and was silent for so long is another node's, or nobody's.
pub const POLLS_FORGOTTEN_MS: u64 = 60_000;

#[derive(Debug, Default)]
pub struct Heartbeats {
    held: Mutex<Holding>,
    ages: Mutex<Ages>,
    /// What each node said last of its own calendar: when, and by how much it is off.
    offsets: Mutex<BTreeMap<NodeId, (u64, i64)>>,
    /// The last thing each agent was seen to do with a task, since this node started.
    acts: Mutex<HashMap<AgentId, Act>>,
}

/// The agents whose heartbeats come here, each under a number that is told to other nodes once.
#[derive(Debug, Default)]
struct Holding {
    agents: HashMap<AgentId, Held>,
    numbers: u32,
    free: Vec<u32>,
    /// Numbers that mean nobody any more, until that is told.
    gone: Vec<u32>,
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
    number: u32,
    named: bool,
    /// Heard since it was last told of.
    heard: bool,
}

impl Holding {
    fn put(&mut self, agent_id: &AgentId, instance: &InstanceId, polls: bool) -> &mut Held {
        self.remove(agent_id);
        let number = self.free.pop().unwrap_or_else(|| {
            self.numbers += 1;
            self.numbers - 1
        });
        let held = Held {
            instance: instance.clone(),
            level1_ms: 0,
            level2_ms: 0,
            offset_ms: None,
            polls,
            number,
            named: false,
            heard: true,
        };
        self.agents.entry(agent_id.clone()).insert_entry(held).into_mut()
    }

    fn remove(&mut self, agent_id: &AgentId) {
        if let Some(held) = self.agents.remove(agent_id) {
            self.gone.push(held.number);
        }
    }

    fn run(&mut self, agent_id: &AgentId, instance: &InstanceId) -> Option<&mut Held> {
        self.agents.get_mut(agent_id).filter(|held| held.instance == *instance)
    }
}

impl Held {
    fn hear(&mut self, now_ms: u64, both: bool) {
        self.heard = true;
        self.level1_ms = now_ms;
        if both {
            self.level2_ms = now_ms;
        }
    }
}

impl Heartbeats {
    /// A session begins: both levels were just proven.
    pub fn attached(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64) {
        self.held().put(agent_id, instance, false).hear(now_ms, true);
    }

    pub fn detached(&self, agent_id: &AgentId, instance: &InstanceId) {
        let mut held = self.held();
        if held.run(agent_id, instance).is_some() {
            held.remove(agent_id);
        }
    }

    /// Level 1. False when this run has no session here: it may be fenced.
    pub fn beat(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64) -> bool {
        self.held().run(agent_id, instance).map(|held| held.hear(now_ms, false)).is_some()
    }

    /// An answer from the agent's own loop proves both levels.
    pub fn echoed(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64) {
        if let Some(held) = self.held().run(agent_id, instance) {
            held.hear(now_ms, true);
        }
    }

    /// An agent without a session of its own was heard here, at level 1 or at both.
    pub fn heard_over_http(&self, agent_id: &AgentId, instance: &InstanceId, now_ms: u64, ready: bool) {
        let mut held = self.held();
        match held.run(agent_id, instance) {
            Some(held) => held.hear(now_ms, ready),
            None => held.put(agent_id, instance, true).hear(now_ms, ready),
        }
    }

    /// Another node's summary.
    pub fn told(&self, now_ms: u64, link: LinkId, node: NodeId, summary: &Summary) {
        self.ages().told(now_ms, link, node, summary);
    }

    pub fn link_lost(&self, now_ms: u64, link: LinkId) {
        self.ages().link_lost(now_ms, link);
    }

    /// What an agent held here, or its request, says of its host's calendar.
    pub fn off_by(&self, agent_id: &AgentId, instance: &InstanceId, offset_ms: i64) {
        if let Some(held) = self.held().run(agent_id, instance) {
            held.heard = true;
            held.offset_ms = Some(offset_ms);
        }
    }

    pub fn node_off_by(&self, now_ms: u64, node: NodeId, offset_ms: i64) {
        self.offsets().insert(node, (now_ms, offset_ms));
    }

    /// Of a node's calendar against the cluster's, as it said itself within the last seconds.
    pub fn offset_of_node(&self, now_ms: u64, node: NodeId) -> Option<i64> {
        let (said_ms, offset_ms) = *self.offsets().get(&node)?;
        (now_ms < said_ms + OFFSET_HOLDS_MS).then_some(offset_ms)
    }

    /// Of an agent's calendar against the cluster's, as it was heard last; none while it is offline.
    pub fn offset_of(&self, agent_id: &AgentId) -> Option<i64> {
        self.ages().offset(agent_id)
    }

    /// Of every agent that is not offline, where it is known.
    pub fn each_offset(&self, mut each: impl FnMut(&AgentId, i64)) {
        self.ages().offsets().for_each(|(agent_id, offset_ms)| each(agent_id, offset_ms));
    }

    pub fn heard(&self, agent_id: &AgentId, now_ms: u64) -> Option<Heard> {
        self.ages().age(now_ms, agent_id)
    }

    /// How long ago another node told anything; none when it has not since this one started.
    pub fn node_age_ms(&self, node: NodeId, now_ms: u64) -> Option<u64> {
        self.ages().node_age(now_ms, node)
    }

    pub fn last_act(&self, agent_id: &AgentId) -> Option<Act> {
        self.acts().get(agent_id).cloned()
    }

    /// What the leader proposes by the ages it knows; a follower keeps them ready.
    pub fn judge(
        &self,
        now_ms: u64,
        cluster_ms: u64,
        live: &Live,
        leading_since_ms: Option<u64>,
    ) -> Vec<Command> {
        let taken = |agent_id: &AgentId| live.slots_taken(agent_id);
        self.ages().tick(now_ms, cluster_ms, &live.rules, taken, leading_since_ms)
    }

    fn reset(&self, now_ms: u64, live: &Live) {
        self.ages().reset(now_ms, live);
        self.acts().retain(|agent_id, _| live.agents.contains_key(agent_id));
    }

    fn fact(&self, now_ms: u64, fact: &Fact) {
        match fact {
            Fact::Registered(record) | Fact::LivenessChanged(record) | Fact::DrainChanged(record) => {
                self.ages().put(now_ms, record);
            }
            Fact::Removed { agent_id, .. } => {
                self.ages().remove(agent_id);
                self.acts().remove(agent_id);
            }
            Fact::Acknowledged(record) => self.acted(record, Did::Received),
            Fact::Completed(record) => self.acted(record, Did::Completed),
            Fact::Failed(record) => self.acted(record, Did::Failed),
            _ => {}
        }
    }

    fn acted(&self, record: &MessageRecord, did: Did) {
        let (MessageState::Acknowledged { holder }
        | MessageState::Completed { holder, .. }
        | MessageState::Failed { holder: Some(holder), .. }) = &record.state
        else {
            return;
        };
        let act = Act { did, msg_id: record.msg_id.clone(), at: record.since };
        let mut acts = self.acts();
        match acts.get_mut(&holder.agent_id) {
            Some(last) => *last = act,
            None => drop(acts.insert(holder.agent_id.clone(), act)),
        }
    }

    /// What is new since the last time and, for whoever has heard nothing yet, the whole.
    fn summaries(&self, now_ms: u64, with_whole: bool) -> (Vec<Summary>, Vec<Summary>) {
        let mut held = self.held();
        let Holding { agents, gone, free, .. } = &mut *held;
        let age = |heard_ms: u64| now_ms.saturating_sub(heard_ms);
        let forgotten = agents.extract_if(|_, held| held.polls && age(held.level1_ms) >= POLLS_FORGOTTEN_MS);
        gone.extend(forgotten.map(|(_, held)| held.number));

        let mut new = Parts::new(Summary { gone: std::mem::take(gone), ..Summary::default() });
        let mut whole = Parts::new(Summary { begins: true, ..Summary::default() });
        if with_whole {
            whole.hearsay(self.ages().hearsay(now_ms));
        }
        for (agent_id, held) in agents {
            let named =
                || Named { number: held.number, agent_id: agent_id.clone(), instance: held.instance.clone() };
            let age = Age {
                number: held.number,
                level1_age_ms: age(held.level1_ms),
                level2_age_ms: age(held.level2_ms),
                offset_ms: held.offset_ms,
            };
            if with_whole {
                whole.push(Some(named()), Some(age));
            }
            let name = (!held.named).then(named);
            new.push(name, held.heard.then_some(age));
            (held.named, held.heard) = (true, false);
        }
        // Whoever is told of these numbers' end before they are given out again, is told in order.
        free.extend(new.parts[0].gone.iter().copied());
        (new.parts, whole.parts)
    }

    fn held(&self) -> MutexGuard<'_, Holding> {
        self.held.lock().expect("no panic while it is held")
    }

    fn offsets(&self) -> MutexGuard<'_, BTreeMap<NodeId, (u64, i64)>> {
        self.offsets.lock().expect("no panic while it is held")
    }

    fn ages(&self) -> MutexGuard<'_, Ages> {
        self.ages.lock().expect("no panic while it is held")
    }

    fn acts(&self) -> MutexGuard<'_, HashMap<AgentId, Act>> {
        self.acts.lock().expect("no panic while it is held")
    }
}

/// A summary, cut into parts of a bounded size. There is always one, so that silence means something.
struct Parts {
    parts: Vec<Summary>,
}

impl Parts {
    fn new(first: Summary) -> Self {
        Self { parts: vec![first] }
    }

    fn hearsay(&mut self, words: Vec<Hearsay>) {
        let parts =
            words.chunks(NAMES_MAX).map(|words| Summary { hearsay: words.to_vec(), ..Summary::default() });
        self.parts.extend(parts);
    }

    fn push(&mut self, named: Option<Named>, age: Option<Age>) {
        let last = self.parts.last().expect("there is always one");
        if last.names.len() >= NAMES_MAX || last.ages.len() >= AGES_MAX {
            self.parts.push(Summary::default());
        }
        let last = self.parts.last_mut().expect("there is always one");
        last.names.extend(named);
        last.ages.extend(age);
    }
}

pub async fn run(shared: Arc<Shared>) {
    // The cursor first, for the same reason.
    let mut facts = shared.replica.facts().cursor();
    let mut known = reset(&shared);
    let mut every = tokio::time::interval(SUMMARY_EVERY);
    // By node, the link on which it was told the whole.
    let mut told: BTreeMap<NodeId, LinkId> = BTreeMap::new();
    loop {
        tokio::select! {
            step = facts.next() => match step {
                Step::Facts(entry) if entry.index <= known => {}
                Step::Facts(entry) => {
                    let now_ms = shared.clock.mono_ms();
                    entry.facts.iter().for_each(|fact| shared.heartbeats.fact(now_ms, fact));
                }
                Step::Reset(_) => known = reset(&shared),
                Step::Closed => return,
            },
            _ = every.tick() => {
                tell(&shared, &mut told);
                tell_calendar(&shared);
                let leadership = *shared.replica.leadership().borrow();
                if leadership.leading {
                    let stamp = shared.clock.stamp();
                    shared.peers.broadcast(&PeerFrame::Clock { term: leadership.term, stamp });
                } else {
                    let live = shared.replica.tables().live();
                    let (now_ms, cluster_ms) = (shared.clock.mono_ms(), shared.clock.cluster_ms());
                    shared.heartbeats.judge(now_ms, cluster_ms, &live, None);
                }
            }
        }
    }
}

fn tell_calendar(shared: &Arc<Shared>) {
    if let Some(offset_ms) = shared.clock.offset_ms() {
        shared.heartbeats.node_off_by(shared.clock.mono_ms(), shared.node_id, offset_ms);
        shared.peers.broadcast(&PeerFrame::Offset { offset_ms });
    }
    // Beside the next word: an answer may take its time.
    let asking = shared.clone();
    shared.clone().spawn(async move { asking.learn_calendar().await });
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

/// Up to which entry the registry is known now.
fn reset(shared: &Shared) -> u64 {
    // The position first: what is applied between the two is seen again, in order, and ends where the
    // tables stand.
    let known = shared.replica.tables().applied().index;
    let live = shared.replica.tables().live();
    shared.heartbeats.reset(shared.clock.mono_ms(), &live);
    known
}

fn tell(shared: &Shared, told: &mut BTreeMap<NodeId, LinkId>) {
    let now_ms = shared.clock.mono_ms();
    let links = shared.peers.links_now();
    let knows = |told: &BTreeMap<NodeId, LinkId>, node, link| told.get(&node) == Some(&link);
    let with_whole = links.iter().any(|(node, link, _)| !knows(told, *node, *link));
    let (new, whole) = shared.heartbeats.summaries(now_ms, with_whole);
    new.iter().for_each(|part| shared.heartbeats.told(now_ms, OWN, shared.node_id, part));
    let [new, whole] = [new, whole].map(|parts| {
        parts.into_iter().map(|part| codec::encode(&PeerFrame::Summary(part))).collect::<Vec<_>>()
    });
    for (node, link, tx) in links {
        let parts = if knows(told, node, link) { &new } else { &whole };
        // A link that can't take it all is told the whole again.
        match parts.iter().try_for_each(|part| tx.send(part.clone())) {
            Ok(()) => drop(told.insert(node, link)),
            Err(_) => drop(told.remove(&node)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(name: &str, run: &str) -> (AgentId, InstanceId) {
        (AgentId::parse(name).unwrap(), InstanceId::parse(run).unwrap())
    }

    /// What a node believes that was told these parts.
    fn ages_after(parts: &[Summary]) -> Ages {
        let mut ages = Ages::new();
        parts.iter().for_each(|part| ages.told(0, 1, NodeId(2), part));
        ages
    }

    #[test]
    fn after_the_first_word_only_changes_are_told() {
        let heartbeats = Heartbeats::default();
        let (a, i1) = ids("a", "i1");
        let (b, _) = ids("b", "i1");
        heartbeats.attached(&a, &i1, 1_000);
        heartbeats.attached(&b, &i1, 1_000);
        let (new, whole) = heartbeats.summaries(1_500, true);
        assert_eq!((new[0].names.len(), new[0].ages.len()), (2, 2));
        assert_eq!((whole[0].begins, whole[0].names.len(), whole[0].ages.len()), (true, 2, 2));

        assert!(heartbeats.beat(&b, &i1, 2_000));
        assert!(!heartbeats.beat(&b, &InstanceId::parse("i0").unwrap(), 2_000), "another run");
        let (new, whole) = heartbeats.summaries(2_500, false);
        assert_eq!(whole[0].ages, []);
        assert_eq!(new.len(), 1);
        assert_eq!((new[0].names.len(), new[0].gone.len()), (0, 0));
        assert_eq!(new[0].ages.iter().map(|age| age.level1_age_ms).collect::<Vec<_>>(), [500]);
        let (new, _) = heartbeats.summaries(3_500, false);
        assert_eq!(new, [Summary::default()], "a word every second, though nothing is new");
    }

    #[test]
    fn a_number_means_the_next_one_only_after_its_end_was_told() {
        let heartbeats = Heartbeats::default();
        let (a, i1) = ids("a", "i1");
        let (b, i2) = ids("b", "i2");
        heartbeats.attached(&a, &i1, 0);
        let (mut parts, _) = heartbeats.summaries(0, false);
        heartbeats.detached(&a, &i1);
        heartbeats.attached(&b, &i2, 0);
        let (second, _) = heartbeats.summaries(0, false);
        assert_eq!(second[0].gone, [0]);
        assert_ne!(second[0].names[0].number, 0);
        parts.extend(second);
        heartbeats.attached(&a, &i2, 0);
        let (third, _) = heartbeats.summaries(0, false);
        assert_eq!(third[0].names[0].number, 0, "it is free again");
        parts.extend(third);
        let ages = ages_after(&parts);
        assert!(ages.age(0, &a).is_some() && ages.age(0, &b).is_some());
    }

    #[test]
    fn a_long_word_comes_in_parts_that_keep_their_order() {
        let heartbeats = Heartbeats::default();
        for i in 0..10_000 {
            let (agent_id, instance) = ids(&format!("{i:064}"), &"i".repeat(64));
            heartbeats.attached(&agent_id, &instance, 0);
        }
        let (_, whole) = heartbeats.summaries(u64::MAX / 2, true);
        assert_eq!(whole.iter().filter(|part| part.begins).count(), 1);
        let longest = whole.iter().map(|part| codec::encode(&PeerFrame::Summary(part.clone())).len()).max();
        assert!(longest.unwrap() < 64 << 10, "{longest:?}");
        let ages = ages_after(&whole);
        assert!(ages.age(0, &AgentId::parse(&format!("{:064}", 9_999)).unwrap()).is_some());
    }
}
