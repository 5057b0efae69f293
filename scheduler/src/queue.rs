//! The waiting messages: one queue for each requirement, oldest first, and the way from an agent to
//! the oldest message it could take.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use reach_protocol::{AgentId, MsgId, Stamp, Tag, Target, message::MessageRecord};

/// A place in the order of arrival.
pub(crate) type Turn = (Stamp, MsgId);

/// What the messages of a queue have in common, so that whoever can take one of them can take its
/// oldest: the target without its preferences, and the agents to leave out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    pub target: Target,
    pub avoid: Vec<AgentId>,
}

impl QueueKey {
    pub fn new(target: &Target, avoid: &[AgentId]) -> Self {
        match target {
            Target::Agent(_) => Self { target: target.clone(), avoid: Vec::new() },
            Target::Capabilities { required, .. } => {
                let mut avoid = avoid.to_vec();
                avoid.sort();
                let target = Target::Capabilities { required: required.clone(), preferred: Vec::new() };
                Self { target, avoid }
            }
        }
    }

    pub fn of(record: &MessageRecord) -> Self {
        Self::new(&record.target, &avoided(record))
    }

    fn anchor(&self) -> Anchor {
        match &self.target {
            Target::Agent(agent_id) => Anchor::Agent(agent_id.clone()),
            Target::Capabilities { required, .. } => Anchor::Tag(required[0].clone()),
        }
    }
}

/// Whom to leave out of the choice: who lost it before, and who has lost it now.
pub(crate) fn avoided(record: &MessageRecord) -> Vec<AgentId> {
    let mut avoid = record.avoid.clone();
    let lost = record.state.holder().map(|holder| &holder.agent_id);
    avoid.extend(lost.filter(|agent_id| !record.avoid.contains(agent_id)).cloned());
    avoid
}

pub(crate) fn turn(record: &MessageRecord) -> Turn {
    (record.accepted, record.msg_id.clone())
}

/// Where an agent looks for queues: under its own id and under each of its capabilities. A queue
/// stands under the first of those it requires.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Anchor {
    Agent(AgentId),
    Tag(Tag),
}

/// Never empty.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub turns: BTreeSet<Turn>,
    /// Since when nobody who could take its messages has been ready.
    pub none_ready_since_ms: Option<u64>,
    /// Up to here its messages were looked at for giving up.
    pub looked_at: Option<Turn>,
}

#[derive(Debug, Default)]
pub(crate) struct Queues {
    queues: BTreeMap<Arc<QueueKey>, Queue>,
    by_anchor: BTreeMap<Anchor, BTreeSet<(Turn, Arc<QueueKey>)>>,
    /// Those that leave somebody out.
    avoiding: BTreeSet<Arc<QueueKey>>,
}

impl Queues {
    /// The queue it stands in, and whether that is new.
    pub fn push(&mut self, key: QueueKey, turn: Turn) -> (Arc<QueueKey>, bool) {
        let key = match self.queues.get_key_value(&key) {
            Some((known, _)) => known.clone(),
            None => Arc::new(key),
        };
        let queue = self.queues.entry(key.clone()).or_default();
        let before = queue.turns.first().cloned();
        queue.turns.insert(turn);
        let head = queue.turns.first().cloned();
        self.move_head(&key, before.clone(), head);
        if before.is_none() && !key.avoid.is_empty() {
            self.avoiding.insert(key.clone());
        }
        (key, before.is_none())
    }

    pub fn remove(&mut self, key: &Arc<QueueKey>, turn: &Turn) {
        let Some(queue) = self.queues.get_mut(key) else { return };
        let before = queue.turns.first().cloned();
        queue.turns.remove(turn);
        let head = queue.turns.first().cloned();
        if head.is_none() {
            self.queues.remove(key);
            self.avoiding.remove(key);
        }
        self.move_head(key, before, head);
    }

    fn move_head(&mut self, key: &Arc<QueueKey>, from: Option<Turn>, to: Option<Turn>) {
        if from == to {
            return;
        }
        let anchor = key.anchor();
        let heads = self.by_anchor.entry(anchor.clone()).or_default();
        if let Some(from) = from {
            heads.remove(&(from, key.clone()));
        }
        if let Some(to) = to {
            heads.insert((to, key.clone()));
        }
        if heads.is_empty() {
            self.by_anchor.remove(&anchor);
        }
    }

    pub fn is_empty(&self) -> bool {
        self.queues.is_empty()
    }

    pub fn contains(&self, key: &QueueKey) -> bool {
        self.queues.contains_key(key)
    }

    pub fn head(&self, key: &QueueKey) -> Option<&Turn> {
        self.queues.get(key)?.turns.first()
    }

    /// Of the queues that an agent with these capabilities may serve and that `accepts`, the one
    /// whose head has waited longest.
    pub fn oldest(
        &self,
        agent_id: &AgentId,
        tags: Vec<Tag>,
        mut accepts: impl FnMut(&QueueKey) -> bool,
    ) -> Option<Arc<QueueKey>> {
        let anchors =
            std::iter::once(Anchor::Agent(agent_id.clone())).chain(tags.into_iter().map(Anchor::Tag));
        let mut oldest: Option<&(Turn, Arc<QueueKey>)> = None;
        for heads in anchors.filter_map(|anchor| self.by_anchor.get(&anchor)) {
            let found = heads
                .iter()
                .take_while(|(turn, _)| oldest.is_none_or(|(oldest, _)| turn < oldest))
                .find(|(_, key)| accepts(key));
            oldest = found.or(oldest);
        }
        oldest.map(|(_, key)| key.clone())
    }

    pub fn avoiding(&self) -> impl Iterator<Item = &Arc<QueueKey>> {
        self.avoiding.iter()
    }

    pub fn queue_mut(&mut self, key: &QueueKey) -> Option<&mut Queue> {
        self.queues.get_mut(key)
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&Arc<QueueKey>, &mut Queue)> {
        self.queues.iter_mut()
    }
}
