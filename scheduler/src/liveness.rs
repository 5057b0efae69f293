//! The ages of all agents' heartbeats, which every node keeps, and the changes of liveness that the
//! leader proposes from them. Time here is this node's monotonic clock, in milliseconds, unless it is
//! called cluster time.
//!
//! Since every node is told the same ages, a new leader knows at once who is silent: nothing is
//! granted anew at an election, and nothing is checkpointed.
//!
//! Sized for 100,000 agents that beat every 3 s: what is told names an agent by a number, and a scan
//! touches one small record an agent, looks nothing up and allocates nothing for those who are well.

use std::{collections::HashMap, sync::Arc};

use reach_machine::Live;
use reach_protocol::{
    AgentId, AgentState, Command, InstanceId, NodeId, RulesRecord, StateReason,
    agent::AgentRecord,
    command::ExpiryPause,
    frame::{Heard, Hearsay, Summary},
};

/// How often all agents are looked at, in milliseconds.
const SCAN_MS: u64 = 500;
/// The most that one gap between two calls counts, in milliseconds: a node that was stalled, and
/// heard nobody meanwhile, expires nobody.
const GAP_MAX_MS: u64 = 1_000;
/// When a change that was proposed and not applied is proposed again, in milliseconds.
const ASK_AGAIN_MS: u64 = 2_000;
/// A node that has told nothing for so long is lost, in milliseconds: it tells something every
/// second.
const NODE_SILENT_MS: u64 = 2_000;
/// How long after the start of its lead a node has been told by all others, in milliseconds.
const TOLD_MS: u64 = NODE_SILENT_MS + 1_000;
/// Runs of one agent remembered beside the current one. An earlier one goes on beating until its
/// fencing reaches it, and must not hide the current one.
const OTHER_RUNS_MAX: usize = 3;
/// Agents that one node may tell of: what it numbers beyond is not kept.
const TOLD_MAX: u32 = 1 << 22;

/// What carries a node's summaries: a connection's id, or this node's own word.
pub type LinkId = u64;

/// When each agent was last heard at both levels, by whichever node holds it.
#[derive(Debug, Default)]
pub struct Ages {
    clock: Clock,
    by_id: HashMap<AgentId, usize>,
    agents: Vec<Silence>,
    /// Places in `agents` that nobody has.
    free: Vec<usize>,
    told: HashMap<LinkId, Told>,
    /// When each node last told anything, over whichever link.
    last_words: HashMap<NodeId, u64>,
    /// When this node began to lead, in counted time, and what its driver called that moment.
    leading: Option<(u64, u64)>,
    mass: Mass,
    next_scan_ms: u64,
}

/// Monotonic time in which no gap is longer than `GAP_MAX_MS`.
#[derive(Debug, Default)]
struct Clock {
    last_mono_ms: Option<u64>,
    counted_ms: u64,
}

impl Clock {
    /// Ages reach back before the first call; counted time starts high enough for them.
    const START_MS: u64 = 1 << 40;

    fn advance(&mut self, mono_ms: u64) -> u64 {
        match self.last_mono_ms {
            None => self.counted_ms = Self::START_MS,
            Some(last) => self.counted_ms += mono_ms.saturating_sub(last).min(GAP_MAX_MS),
        }
        self.last_mono_ms = self.last_mono_ms.max(Some(mono_ms));
        self.counted_ms
    }

    /// Counted time without a call to account for.
    fn at(&self, mono_ms: u64) -> u64 {
        self.counted_ms + mono_ms.saturating_sub(self.last_mono_ms.unwrap_or(mono_ms)).min(GAP_MAX_MS)
    }
}

/// What is known of one agent. All times are counted time.
#[derive(Debug)]
struct Silence {
    agent_id: AgentId,
    /// None for one that is not registered here yet, or no more.
    registered: Option<Registered>,
    /// The run that the registry names, once it was heard.
    current: Option<Heartbeats>,
    others: Vec<(InstanceId, Heartbeats)>,
    /// Silence counts from here on: when the current run, not heard yet, was first seen, or when the
    /// node that held it was lost.
    granted_ms: u64,
    /// All its slots were taken when it was last looked at.
    full: bool,
    /// Numbers under which links tell of it.
    named: u32,
}

/// What a scan needs of the registry's record.
#[derive(Debug)]
struct Registered {
    instance: InstanceId,
    state: AgentState,
    reason: StateReason,
    liveness_seq: u64,
    /// Cluster time.
    since_ms: u64,
    /// Its own, where it asked for one.
    ttl_ms: Option<u64>,
    max_concurrency: u32,
    drained: bool,
    asked_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Heartbeats {
    node: NodeId,
    level1_ms: u64,
    level2_ms: u64,
    /// Its host's calendar minus the cluster's.
    offset_ms: Option<i64>,
}

/// What one link has told.
#[derive(Debug)]
struct Told {
    node: NodeId,
    /// By the number that the sender uses: whose run it is.
    names: Vec<Option<(usize, InstanceId)>>,
    last_ms: u64,
    lost: bool,
}

impl Told {
    /// Whom its node holds, as far as this link has told.
    fn held(&self) -> Vec<usize> {
        self.names.iter().flatten().map(|(index, _)| *index).collect()
    }
}

/// Expiry of many at once.
#[derive(Debug, Default)]
enum Mass {
    #[default]
    Calm,
    /// `since_ms` is cluster time, and names the pause.
    Waiting {
        since_ms: u64,
        until_ms: u64,
        asked_ms: u64,
        pause: ExpiryPause,
    },
    GoingAhead,
}

impl Ages {
    pub fn new() -> Self {
        Self::default()
    }

    /// The registry as a whole: at the start, and when facts were missed.
    pub fn reset(&mut self, now_mono_ms: u64, live: &Live) {
        let gone: Vec<AgentId> =
            self.by_id.keys().filter(|agent_id| !live.agents.contains_key(*agent_id)).cloned().collect();
        gone.iter().for_each(|agent_id| self.remove(agent_id));
        live.agents.values().for_each(|record| self.put(now_mono_ms, record));
    }

    /// Brings an agent to what the registry says of it. A new run has a TTL to be heard in; that the
    /// one before it is silent says nothing.
    pub fn put(&mut self, now_mono_ms: u64, record: &Arc<AgentRecord>) {
        let now_ms = self.clock.advance(now_mono_ms);
        let index = self.index(record.agent_id());
        let silence = &mut self.agents[index];
        let is_new =
            silence.registered.as_ref().is_none_or(|registered| registered.instance != record.instance);
        let asked_ms = silence
            .registered
            .as_ref()
            .filter(|registered| !is_new && registered.liveness_seq == record.liveness_seq)
            .and_then(|registered| registered.asked_ms);
        if is_new {
            if let (Some(before), Some(heard)) = (silence.registered.take(), silence.current.take()) {
                silence.put_other(before.instance, heard);
            }
            let heard = silence.others.iter().position(|(instance, _)| *instance == record.instance);
            silence.current = heard.map(|place| silence.others.swap_remove(place).1);
            if silence.current.is_none() {
                silence.granted_ms = now_ms;
            }
            silence.full = false;
        }
        silence.registered = Some(Registered {
            instance: record.instance.clone(),
            state: record.state,
            reason: record.reason,
            liveness_seq: record.liveness_seq,
            since_ms: record.since.cluster_ms,
            ttl_ms: record.registration.ttl_ms,
            max_concurrency: record.registration.max_concurrency,
            drained: record.drain.is_some(),
            asked_ms,
        });
    }

    pub fn remove(&mut self, agent_id: &AgentId) {
        let Some(index) = self.by_id.get(agent_id).copied() else { return };
        self.agents[index].registered = None;
        self.free_if_unused(index);
    }

    /// What a node tells every second, this one included: whom it names, who is gone, and the ages of
    /// those that were heard since the last time.
    pub fn told(&mut self, now_mono_ms: u64, link: LinkId, node: NodeId, summary: &Summary) {
        let now_ms = self.clock.advance(now_mono_ms);
        if summary.begins {
            self.forget_names(link);
        }
        let new = || Told { node, names: Vec::new(), last_ms: now_ms, lost: false };
        let mut told = self.told.remove(&link).unwrap_or_else(new);
        (told.last_ms, told.lost) = (now_ms, false);
        self.last_words.insert(node, now_ms);
        for number in &summary.gone {
            let name = told.names.get_mut(*number as usize).and_then(Option::take);
            self.unname(name);
        }
        for named in summary.names.iter().filter(|named| named.number < TOLD_MAX) {
            let index = self.index(&named.agent_id);
            self.agents[index].named += 1;
            let place = named.number as usize;
            if told.names.len() <= place {
                told.names.resize_with(place + 1, || None);
            }
            let before = told.names[place].replace((index, named.instance.clone()));
            self.unname(before);
        }
        for age in &summary.ages {
            if let Some(Some((index, instance))) = told.names.get(age.number as usize) {
                let level1_ms = now_ms.saturating_sub(age.level1_age_ms);
                let level2_ms = now_ms.saturating_sub(age.level2_age_ms);
                let offset_ms = age.offset_ms;
                self.agents[*index].heard(instance, Heartbeats { node, level1_ms, level2_ms, offset_ms });
            }
        }
        self.told.insert(link, told);
        for word in &summary.hearsay {
            // Its registration may still be on its way here.
            let index = self.index(&word.agent_id);
            self.agents[index].heard_by_others(now_ms, word);
        }
    }

    /// What a node tells on a new link beside whom it holds.
    pub fn hearsay(&self, now_mono_ms: u64) -> Vec<Hearsay> {
        let now_ms = self.clock.at(now_mono_ms);
        let of = |silence: &Silence| {
            let registered = silence.registered.as_ref()?;
            let is_held = silence.named > 0 || registered.state == AgentState::Offline;
            (!is_held).then(|| Hearsay {
                agent_id: silence.agent_id.clone(),
                instance: registered.instance.clone(),
                heard: silence.current.map(|heard| heard.ages(now_ms)),
                granted_age_ms: now_ms.saturating_sub(silence.granted_ms),
            })
        };
        self.agents.iter().filter_map(of).collect()
    }

    /// A link is gone. If it was the node's last one, the agents that it held get one TTL from now to
    /// be heard elsewhere.
    pub fn link_lost(&mut self, now_mono_ms: u64, link: LinkId) {
        let now_ms = self.clock.advance(now_mono_ms);
        let Some(told) = self.told.get(&link) else { return };
        let (node, held) = (told.node, if told.lost { Vec::new() } else { told.held() });
        self.forget_names(link);
        self.told.remove(&link);
        if !self.told.values().any(|told| told.node == node) {
            self.grant(now_ms, node, &held);
        }
    }

    /// Those that were last heard by a node which is lost. Whom it held at an earlier time has had
    /// its time.
    fn grant(&mut self, now_ms: u64, node: NodeId, held: &[usize]) {
        for index in held {
            let silence = &mut self.agents[*index];
            if silence.latest().is_some_and(|heard| heard.node == node) {
                silence.granted_ms = now_ms;
            }
        }
    }

    /// The ages of the agent's last heard run.
    pub fn age(&self, now_mono_ms: u64, agent_id: &AgentId) -> Option<Heard> {
        let now_ms = self.clock.at(now_mono_ms);
        Some(self.agents[*self.by_id.get(agent_id)?].latest()?.ages(now_ms))
    }

    /// Of an agent's calendar against the cluster's, as its last heard run told it; none while it is
    /// offline.
    pub fn offset(&self, agent_id: &AgentId) -> Option<i64> {
        self.agents[*self.by_id.get(agent_id)?].offset_ms()
    }

    /// Those that are known.
    pub fn offsets(&self) -> impl Iterator<Item = (&AgentId, i64)> {
        self.agents.iter().filter_map(|silence| Some((&silence.agent_id, silence.offset_ms()?)))
    }

    /// How long ago this node told anything; none when it never did.
    pub fn node_age(&self, now_mono_ms: u64, node: NodeId) -> Option<u64> {
        let now_ms = self.clock.at(now_mono_ms);
        let last = self.last_words.get(&node)?;
        Some(now_ms.saturating_sub(*last))
    }

    /// About every 100 ms, on every node. Proposes nothing unless this node leads; `leading_since_ms`
    /// is when it began to, by the same clock as `now_mono_ms`. `taken` tells the slots of an agent; it
    /// is asked for those alone whose loop is late.
    pub fn tick(
        &mut self,
        now_mono_ms: u64,
        cluster_ms: u64,
        rules: &RulesRecord,
        taken: impl Fn(&AgentId) -> u32,
        leading_since_ms: Option<u64>,
    ) -> Vec<Command> {
        let now_ms = self.clock.advance(now_mono_ms);
        self.leading = match (leading_since_ms, self.leading) {
            (None, _) => None,
            (Some(since), Some((named, counted))) if since == named => Some((named, counted)),
            (Some(since), _) => Some((since, now_ms - now_mono_ms.saturating_sub(since).min(now_ms))),
        };
        if now_ms < self.next_scan_ms {
            return Vec::new();
        }
        self.next_scan_ms = now_ms + SCAN_MS;
        self.find_lost_nodes(now_ms);

        let liveness = &rules.rules.liveness;
        let leading_ms = self.leading.map(|(_, counted_ms)| counted_ms);
        let mut scan = Scan {
            now_ms,
            cluster_ms,
            ttl_ms: liveness.ttl_ms,
            interval_ms: liveness.heartbeat_ms,
            remove_after_ms: liveness.remove_after_ms,
            leading_ms: leading_ms.unwrap_or(now_ms),
            present: 0,
            expiring: 0,
            lapsed: Vec::new(),
            others: Vec::new(),
        };
        for (index, silence) in self.agents.iter_mut().enumerate() {
            silence.look(index, &mut scan, &taken);
        }
        if leading_ms.is_none() {
            self.mass = Mass::Calm;
            return Vec::new();
        }

        let mut commands = Vec::new();
        let goes_ahead = self.mass_expiry(&scan, rules, &mut commands);
        let lapsed = if goes_ahead { scan.lapsed.as_slice() } else { &[] };
        for (index, verdict) in lapsed.iter().chain(&scan.others) {
            commands.extend(self.agents[*index].ask(*verdict, now_ms));
        }
        commands
    }

    fn find_lost_nodes(&mut self, now_ms: u64) {
        let silent: Vec<(NodeId, Vec<usize>)> = self
            .told
            .values_mut()
            .filter(|told| !told.lost && now_ms > told.last_ms + NODE_SILENT_MS)
            .map(|told| {
                told.lost = true;
                (told.node, told.held())
            })
            .collect();
        for (node, held) in silent {
            if !self.told.values().any(|told| told.node == node && !told.lost) {
                self.grant(now_ms, node, &held);
            }
        }
    }

    /// Whether those that have lapsed may expire now. When most would expire together it is likelier
    /// that they are not heard than that they are dead: then they get one more TTL, and one alarm is
    /// raised. A pause that an earlier leader began is gone on with.
    fn mass_expiry(&mut self, scan: &Scan, rules: &RulesRecord, commands: &mut Vec<Command>) -> bool {
        let liveness = &rules.rules.liveness;
        let is_mass = scan.expiring >= liveness.mass_expiry_min && 2 * scan.expiring > scan.present;
        let noted = rules.expiry.as_ref();
        match &mut self.mass {
            _ if !is_mass => {
                self.mass = Mass::Calm;
                true
            }
            Mass::GoingAhead => true,
            Mass::Calm if scan.lapsed.is_empty() => true,
            Mass::Calm => {
                let over_ms = noted.map_or(0, |noted| noted.since_ms + noted.wait_ms);
                let is_forced = noted.is_some_and(|noted| noted.forced_by.is_some());
                let (since_ms, wait_ms) = match noted {
                    // An earlier leader had them wait, and they have had their time.
                    Some(_)
                        if scan.cluster_ms < over_ms + liveness.ttl_ms
                            && (is_forced || scan.cluster_ms >= over_ms) =>
                    {
                        self.mass = Mass::GoingAhead;
                        return true;
                    }
                    Some(noted) if scan.cluster_ms < over_ms => (noted.since_ms, over_ms - scan.cluster_ms),
                    _ => (scan.cluster_ms, liveness.ttl_ms),
                };
                let pause = ExpiryPause {
                    since_ms,
                    agents: scan.expiring,
                    of: scan.present,
                    wait_ms: liveness.ttl_ms,
                    forced_by: None,
                };
                commands.push(Command::PauseExpiry { pause: pause.clone() });
                let until_ms = scan.now_ms + wait_ms;
                self.mass = Mass::Waiting { since_ms, until_ms, asked_ms: scan.now_ms, pause };
                false
            }
            Mass::Waiting { since_ms, until_ms, asked_ms, pause } => {
                let noted = noted.filter(|noted| noted.since_ms == *since_ms);
                let is_forced = noted.is_some_and(|noted| noted.forced_by.is_some());
                if is_forced || scan.now_ms >= *until_ms {
                    self.mass = Mass::GoingAhead;
                    return true;
                }
                if noted.is_none() && scan.now_ms >= *asked_ms + ASK_AGAIN_MS {
                    *asked_ms = scan.now_ms;
                    commands.push(Command::PauseExpiry { pause: pause.clone() });
                }
                false
            }
        }
    }

    fn index(&mut self, agent_id: &AgentId) -> usize {
        if let Some(index) = self.by_id.get(agent_id) {
            return *index;
        }
        let silence = Silence::new(agent_id.clone());
        let index = match self.free.pop() {
            Some(index) => {
                self.agents[index] = silence;
                index
            }
            None => {
                self.agents.push(silence);
                self.agents.len() - 1
            }
        };
        self.by_id.insert(agent_id.clone(), index);
        index
    }

    fn forget_names(&mut self, link: LinkId) {
        let names = self.told.get_mut(&link).map(|told| std::mem::take(&mut told.names));
        names.into_iter().flatten().for_each(|name| self.unname(name));
    }

    fn unname(&mut self, name: Option<(usize, InstanceId)>) {
        let Some((index, _)) = name else { return };
        self.agents[index].named -= 1;
        self.free_if_unused(index);
    }

    /// A place is given on only when no number means it any more.
    fn free_if_unused(&mut self, index: usize) {
        let silence = &self.agents[index];
        if silence.registered.is_none()
            && silence.named == 0
            && self.by_id.remove(&silence.agent_id).is_some()
        {
            self.free.push(index);
        }
    }
}

/// One look at all agents.
struct Scan {
    now_ms: u64,
    cluster_ms: u64,
    ttl_ms: u64,
    interval_ms: u64,
    remove_after_ms: u64,
    leading_ms: u64,
    /// Agents that are not offline, and those of them that will lapse within one interval unless they
    /// are heard.
    present: u32,
    expiring: u32,
    lapsed: Vec<(usize, Verdict)>,
    others: Vec<(usize, Verdict)>,
}

#[derive(Clone, Copy, Debug)]
enum Verdict {
    Change(AgentState, StateReason),
    Remove,
}

impl Silence {
    fn new(agent_id: AgentId) -> Self {
        Self {
            agent_id,
            registered: None,
            current: None,
            others: Vec::new(),
            granted_ms: 0,
            full: false,
            named: 0,
        }
    }

    /// Two nodes may tell of one run while it moves; the later word counts, level by level.
    fn heard(&mut self, instance: &InstanceId, heard: Heartbeats) {
        let is_current = self.registered.as_ref().is_some_and(|registered| registered.instance == *instance);
        if is_current {
            match &mut self.current {
                Some(before) => before.merge(heard),
                None => self.current = Some(heard),
            }
        } else {
            self.put_other(instance.clone(), heard);
        }
    }

    /// What others heard of a run, before this node could. That it was not heard here grants it
    /// nothing then.
    fn heard_by_others(&mut self, now_ms: u64, word: &Hearsay) {
        let at = |age_ms: u64| now_ms.saturating_sub(age_ms);
        let current = self.registered.as_ref().map(|registered| &registered.instance);
        if current.is_none_or(|current| *current == word.instance) && self.current.is_none() {
            let granted_ms = at(word.granted_age_ms);
            self.granted_ms = if current.is_some() { self.granted_ms.min(granted_ms) } else { granted_ms };
        }
        if let Some(Heard { node, level1_age_ms, level2_age_ms }) = word.heard {
            let (level1_ms, level2_ms) = (at(level1_age_ms), at(level2_age_ms));
            self.heard(&word.instance, Heartbeats { node, level1_ms, level2_ms, offset_ms: None });
        }
    }

    fn put_other(&mut self, instance: InstanceId, heard: Heartbeats) {
        if let Some((_, before)) = self.others.iter_mut().find(|(other, _)| *other == instance) {
            before.merge(heard);
            return;
        }
        self.others.push((instance, heard));
        if self.others.len() > OTHER_RUNS_MAX {
            let stalest = self.others.iter().enumerate().min_by_key(|(_, (_, heard))| heard.level1_ms);
            let (place, _) = stalest.expect("there are several");
            self.others.swap_remove(place);
        }
    }

    fn latest(&self) -> Option<&Heartbeats> {
        let others = self.others.iter().map(|(_, heard)| heard);
        self.current.iter().chain(others).max_by_key(|heard| heard.level1_ms)
    }

    fn offset_ms(&self) -> Option<i64> {
        let registered = self.registered.as_ref()?;
        if registered.state == AgentState::Offline { None } else { self.latest()?.offset_ms }
    }

    /// Which state this agent should be in, when that is another.
    fn look(&mut self, index: usize, scan: &mut Scan, taken: &impl Fn(&AgentId) -> u32) {
        let Some(registered) = &self.registered else { return };
        let (state, reason) = (registered.state, registered.reason);
        let ttl_ms = registered.ttl_ms.map_or(scan.ttl_ms, |own| own.max(scan.ttl_ms));
        let is_fresh = |heard_ms: u64| scan.now_ms.saturating_sub(heard_ms) <= ttl_ms;

        // With all its slots taken an agent could take nothing anyway: level 2 is not asked for, and
        // counts from when it has a slot again.
        if let Some(current) = &mut self.current
            && state != AgentState::Offline
            && (self.full || !is_fresh(current.level2_ms))
        {
            self.full = taken(&self.agent_id) >= registered.max_concurrency;
            if self.full {
                current.level2_ms = scan.now_ms;
            }
        }

        let heard = self.current.map_or((0, 0), |heard| (heard.level1_ms, heard.level2_ms));
        let (level1, level2) = (is_fresh(heard.0), is_fresh(heard.1));
        // Time granted keeps an agent where it is; only being heard brings it back.
        let granted_ms = match self.current {
            Some(_) => self.granted_ms,
            // Whoever holds it has told a new leader by then.
            None => self.granted_ms.max((scan.leading_ms + TOLD_MS).saturating_sub(ttl_ms)),
        };
        if state != AgentState::Offline {
            scan.present += 1;
            let heard_ms = if state == AgentState::Ready { heard.0.min(heard.1) } else { heard.0 };
            let silent_ms = scan.now_ms.saturating_sub(heard_ms.max(granted_ms));
            if silent_ms + scan.interval_ms > ttl_ms {
                scan.expiring += 1;
            } else if state == AgentState::Ready {
                // Nearly all, nearly always.
                return;
            }
        }
        let granted = is_fresh(granted_ms);
        let drained = registered.drained;
        match (state, reason) {
            (AgentState::Ready | AgentState::Draining, _) if !level1 && !granted => {
                let verdict = Verdict::Change(AgentState::Offline, StateReason::ProcessSilent);
                scan.lapsed.push((index, verdict));
            }
            (AgentState::Ready, _) if !level2 && !granted => {
                let verdict = Verdict::Change(AgentState::Draining, StateReason::LoopSilent);
                scan.lapsed.push((index, verdict));
            }
            (AgentState::Offline, _)
                if scan.cluster_ms >= registered.since_ms.saturating_add(scan.remove_after_ms) =>
            {
                scan.others.push((index, Verdict::Remove));
            }
            // A run that said goodbye does not come back by the beats it sent before.
            (_, StateReason::Asked) => {}
            // What an operator drained is where it belongs.
            (AgentState::Draining, StateReason::Drained) if drained => {}
            (AgentState::Offline | AgentState::Draining, _) if level1 && level2 => {
                scan.others.push((index, Verdict::Change(AgentState::Ready, StateReason::Returned)));
            }
            _ => {}
        }
    }

    /// At most one proposal on its way for each step of an agent's liveness.
    fn ask(&mut self, verdict: Verdict, now_ms: u64) -> Option<Command> {
        let registered = self.registered.as_mut()?;
        if registered.asked_ms.is_some_and(|asked_ms| now_ms < asked_ms + ASK_AGAIN_MS) {
            return None;
        }
        registered.asked_ms = Some(now_ms);
        let (agent_id, instance) = (self.agent_id.clone(), registered.instance.clone());
        let liveness_seq = registered.liveness_seq;
        Some(match verdict {
            Verdict::Change(state, reason) => {
                Command::SetLiveness { agent_id, instance, liveness_seq, state, reason }
            }
            Verdict::Remove => Command::RemoveOffline { agent_id, instance, liveness_seq },
        })
    }
}

impl Heartbeats {
    fn ages(&self, now_ms: u64) -> Heard {
        let age = |heard_ms: u64| now_ms.saturating_sub(heard_ms);
        Heard { node: self.node, level1_age_ms: age(self.level1_ms), level2_age_ms: age(self.level2_ms) }
    }

    fn merge(&mut self, later: Self) {
        if later.level1_ms >= self.level1_ms {
            (self.node, self.offset_ms) = (later.node, later.offset_ms);
        }
        self.level1_ms = self.level1_ms.max(later.level1_ms);
        self.level2_ms = self.level2_ms.max(later.level2_ms);
    }
}
