//! What the leader sees of the cluster and no entry caused, told as events: calendars that go wrong
//! and right again, another leader, nodes that fall silent and come back.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

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
        for news in told.news(&shared) {
            let observed = news.observed(&shared);
            let command = Command::Observe { msg_id: made("m_", MsgId::parse), observed };
            // What is not known to be written is news with the next look as well, or to the next leader.
            if let Err(error) = shared.propose(command, Instant::now() + LOOK_EVERY).await {
                tracing::debug!(code = %error.code, "an event about the cluster was not written");
                break;
            }
            told.heard(news);
        }
    }
}

/// Something that nobody was told yet.
#[derive(Debug)]
enum News {
    Off(Skewed),
    /// As it was pointed out last.
    RightAgain(Skewed),
    Silent(Vec<NodeId>),
}

impl Told {
    fn news(&self, shared: &Shared) -> Vec<News> {
        let mut news = self.clocks(shared.skewed());
        let now_ms = shared.clock.mono_ms();
        // Before that this node may not have heard the others yet.
        if now_ms - self.since_ms >= SILENT_MS {
            let is_silent = |node: &NodeId| {
                *node != shared.node_id
                    && shared.heartbeats.node_age_ms(*node, now_ms).is_none_or(|age_ms| age_ms > SILENT_MS)
            };
            let silent: Vec<NodeId> = shared.members().into_keys().filter(is_silent).collect();
            if self.silent.as_ref() != Some(&silent) {
                news.push(News::Silent(silent));
            }
        }
        news
    }

    fn clocks(&self, now: Vec<Skewed>) -> Vec<News> {
        let off: BTreeSet<&Who> = now.iter().map(|skewed| &skewed.who).collect();
        let went = self.skewed.values().filter(|skewed| !off.contains(&skewed.who));
        let went: Vec<News> = went.cloned().map(News::RightAgain).collect();
        let came = now.into_iter().filter(|skewed| !self.skewed.contains_key(&skewed.who));
        went.into_iter().chain(came.map(News::Off)).take(SKEWS_MAX).collect()
    }

    fn heard(&mut self, news: News) {
        match news {
            News::Off(skewed) => drop(self.skewed.insert(skewed.who.clone(), skewed)),
            News::RightAgain(skewed) => drop(self.skewed.remove(&skewed.who)),
            News::Silent(silent) => self.silent = Some(silent),
        }
    }
}

impl News {
    fn observed(&self, shared: &Shared) -> Observed {
        let (skewed, is_off) = match self {
            Self::Silent(silent) => {
                let (leader, nodes) = (shared.node_id, shared.members().len() as u32);
                return Observed::Health { leader, silent: silent.clone(), nodes };
            }
            Self::Off(skewed) => (skewed, true),
            Self::RightAgain(skewed) => (skewed, false),
        };
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

    /// Tells all of it; how many calendars went wrong, and how many right again.
    fn tell(told: &mut Told, now: &[Skewed]) -> (usize, usize) {
        let news = told.clocks(now.to_vec());
        let off = news.iter().filter(|news| matches!(news, News::Off(_))).count();
        let counts = (off, news.len() - off);
        news.into_iter().for_each(|news| told.heard(news));
        counts
    }

    #[test]
    fn a_calendar_is_told_once_and_its_end_once_and_many_bit_by_bit() {
        let mut told = Told::default();
        let all: Vec<Skewed> = (0..150).map(skewed).collect();
        assert_eq!(tell(&mut told, &all), (SKEWS_MAX, 0));
        assert_eq!(tell(&mut told, &all), (50, 0));
        assert_eq!(tell(&mut told, &all), (0, 0));
        assert_eq!(tell(&mut told, &all[1..]), (0, 1));
        assert_eq!(tell(&mut told, &all), (1, 0));
        assert_eq!(tell(&mut told, &[]), (0, SKEWS_MAX));
        assert_eq!(tell(&mut told, &[]), (0, 50));
    }

    #[test]
    fn what_was_not_written_is_news_again() {
        let mut told = Told::default();
        let all = [skewed(0)];
        assert_eq!(told.clocks(all.to_vec()).len(), 1);
        assert_eq!(tell(&mut told, &all), (1, 0));
        assert_eq!(told.clocks(Vec::new()).len(), 1);
        assert_eq!(tell(&mut told, &[]), (0, 1));
    }
}
