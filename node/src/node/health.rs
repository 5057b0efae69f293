//! What the leader sees of the cluster and no entry caused, told as events: calendars that go wrong
//! and right again, another leader, nodes that fall silent and come back.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use reach_protocol::{Command, MsgId, NodeId, Principal, command::Observed};
use tokio::time::Instant;

use super::{
    Shared,
    ingress::made,
    skew::{Skewed, Who},
};

/// So often, and so there is one event at most about anybody in this time.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Nodes tell of themselves once a second; one that left out three is silent.
const SILENT_MS: u64 = 3_500;
/// Events about calendars in one look. What is left comes with the next.
const SKEWS_MAX: usize = 100;

/// What this leader has told. A new one knows nothing of it, and tells what it sees anew.
#[derive(Debug, Default)]
struct Told {
    term: u64,
    /// Since this node's monotonic clock said so.
    since_ms: u64,
    silent: Option<Vec<NodeId>>,
    skewed: BTreeMap<Who, Skewed>,
}

pub async fn run(shared: Arc<Shared>) {
    let mut every = tokio::time::interval(LOOK_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut told = Told::default();
    loop {
        every.tick().await;
        let now = *shared.replica.leadership().borrow();
        if !now.leading {
            continue;
        }
        if told.term != now.term {
            told = Told { term: now.term, since_ms: shared.clock.mono_ms(), ..Told::default() };
        }
        for observed in told.news(&shared) {
            let command = Command::Observe { msg_id: made("m_", MsgId::parse), observed };
            // One that got lost with this leader is seen again by the next.
            if let Err(error) = shared.propose(command, Instant::now() + LOOK_EVERY).await {
                tracing::debug!(code = %error.code, "an event about the cluster was not written");
                break;
            }
        }
    }
}

impl Told {
    fn news(&mut self, shared: &Shared) -> Vec<Observed> {
        let mut news = self.clocks(shared.skewed());
        let now_ms = shared.clock.mono_ms();
        // Before that this node may not have heard the others yet.
        if now_ms - self.since_ms >= SILENT_MS {
            let members = shared.members();
            let is_silent = |node: &&NodeId| {
                **node != shared.node_id
                    && shared.heartbeats.node_age_ms(**node, now_ms).is_none_or(|age_ms| age_ms > SILENT_MS)
            };
            let silent: Vec<NodeId> = members.keys().filter(is_silent).copied().collect();
            if self.silent.as_ref() != Some(&silent) {
                let (leader, nodes) = (shared.node_id, members.len() as u32);
                news.push(Observed::Health { leader, silent: silent.clone(), nodes });
                self.silent = Some(silent);
            }
        }
        news
    }

    fn clocks(&mut self, now: Vec<Skewed>) -> Vec<Observed> {
        let now: BTreeMap<Who, Skewed> = now.into_iter().map(|skewed| (skewed.who.clone(), skewed)).collect();
        let came = now.iter().filter(|(who, _)| !self.skewed.contains_key(who));
        let came: Vec<Skewed> = came.take(SKEWS_MAX).map(|(_, skewed)| skewed.clone()).collect();
        let went = self.skewed.keys().filter(|who| !now.contains_key(who)).take(SKEWS_MAX - came.len());
        let went: Vec<Skewed> =
            went.cloned().collect::<Vec<_>>().iter().filter_map(|who| self.skewed.remove(who)).collect();
        let mut news: Vec<Observed> = went.into_iter().map(|skewed| observed(&skewed, false)).collect();
        for skewed in came {
            news.push(observed(&skewed, true));
            self.skewed.insert(skewed.who.clone(), skewed);
        }
        news
    }
}

/// `offset_ms` of one that is right again is the last that was pointed out.
fn observed(skewed: &Skewed, is_off: bool) -> Observed {
    let who = match &skewed.who {
        Who::Node(node) => Principal::Node(*node),
        Who::Agent(agent_id) => Principal::Agent(agent_id.clone()),
    };
    let message = match is_off {
        true => skewed.to_string(),
        false => format!("the clock of {} is right again", skewed.who),
    };
    Observed::ClockSkew { who, host: skewed.host.clone(), offset_ms: skewed.offset_ms, is_off, message }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skewed(agent: usize) -> Skewed {
        Skewed {
            who: Who::Agent(format!("a{agent:03}").parse().unwrap()),
            host: None,
            offset_ms: 7_000,
            leader: Some(NodeId(1)),
            most_are: false,
        }
    }

    fn is_off(news: &[Observed]) -> Vec<bool> {
        let each = news.iter().map(|observed| match observed {
            Observed::ClockSkew { is_off, .. } => *is_off,
            other => panic!("{other:?}"),
        });
        each.collect()
    }

    #[test]
    fn a_calendar_is_told_once_and_its_end_once_and_many_bit_by_bit() {
        let mut told = Told::default();
        let all: Vec<Skewed> = (0..150).map(skewed).collect();
        assert_eq!(told.clocks(all.clone()).len(), SKEWS_MAX);
        assert_eq!(told.clocks(all.clone()).len(), 50);
        assert_eq!(told.clocks(all.clone()), []);
        assert_eq!(is_off(&told.clocks(all[1..].to_vec())), [false]);
        assert_eq!(is_off(&told.clocks(all.clone())), [true]);
        assert_eq!(is_off(&told.clocks(Vec::new())), [false; SKEWS_MAX]);
        assert_eq!(told.clocks(Vec::new()).len(), 50);
    }
}
