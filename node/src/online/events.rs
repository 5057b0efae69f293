//! The commands about events, topics and groups.

use std::time::Duration;

use reach_client::Consumer;
use reach_protocol::{
    Envelope, EventType, Name,
    event::{Span, Start, Word},
    frame::{Answer, Request},
};
use serde_json::json;

use super::{Session, unexpected};
use crate::{
    cli::{
        Failure,
        args::{EventsCommand, GroupsCommand, TopicsCommand},
    },
    show,
};

/// How long one question of `events tail` waits.
const TAIL_WAIT: Duration = Duration::from_secs(30);
/// Events that one question of `events tail` asks for.
const TAIL_PAGE: u32 = 500;

impl Session {
    pub(super) async fn publish(&self, envelope: Envelope) -> Result<(), Failure> {
        let published = self.client.publish(vec![envelope]).await?;
        self.output.print(&show::published(published.first().ok_or_else(unexpected)?))
    }

    pub(super) async fn events(&self, command: &EventsCommand) -> Result<(), Failure> {
        match command {
            EventsCommand::Publish { .. } => unreachable!("it brings an envelope"),
            EventsCommand::Tail { event_type, from, limit, once } => {
                self.tail(event_type, *from, *limit, *once).await
            }
            EventsCommand::Pull { group, member, max, wait, ack } => {
                let consumer = self.consumer(group, member.as_ref());
                let wait = wait.unwrap_or(Duration::ZERO);
                let pulled = consumer.pull(*max, wait).await?;
                self.output.print(&show::pulled(&pulled.events, &pulled.gaps))?;
                if *ack && !pulled.events.is_empty() {
                    consumer.ack(&pulled.events).await?;
                }
                Ok(())
            }
            EventsCommand::Ack { about } => {
                self.say(&about.group, &about.member, &about.event_type, &about.offsets, Word::Ack).await
            }
            EventsCommand::Nack { about, delay, cause } => {
                let delay_ms = delay.map_or(0, |delay| delay.as_millis() as u64);
                let word = Word::Nack { delay_ms, cause: cause.clone().unwrap_or_default() };
                self.say(&about.group, &about.member, &about.event_type, &about.offsets, word).await
            }
            EventsCommand::Extend { about } => {
                self.say(&about.group, &about.member, &about.event_type, &about.offsets, Word::Extend).await
            }
        }
    }

    fn consumer(&self, group: &Name, member: Option<&Name>) -> Consumer {
        let own = || Name::parse(&self.client.principal().own_agent_id()).expect("an id is a name");
        Consumer::new(self.client.clone(), group.clone(), member.cloned().unwrap_or_else(own))
    }

    async fn say(
        &self,
        group: &Name,
        member: &Option<Name>,
        event_type: &EventType,
        offsets: &[Span],
        word: Word,
    ) -> Result<(), Failure> {
        let spans = Span::joined(offsets.to_vec());
        let about = vec![(event_type.clone(), spans)];
        let said = match word {
            Word::Ack => "acknowledged",
            Word::Extend => "extended",
            Word::Nack { .. } | Word::GiveBack => "given back",
        };
        let changed = self.consumer(group, member.as_ref()).tell(about, word).await?;
        self.output.print(&show::heard(changed, said))
    }

    /// Event by event, until it is interrupted, or has shown as many as were asked for.
    async fn tail(
        &self,
        event_type: &EventType,
        from: Start,
        limit: Option<u64>,
        once: bool,
    ) -> Result<(), Failure> {
        let mut interrupted = std::pin::pin!(crate::dev::interrupted());
        let (mut from, mut left) = (from, limit.unwrap_or(u64::MAX));
        while left > 0 {
            let request = Request::Events {
                event_type: event_type.clone(),
                from,
                limit: TAIL_PAGE.min(u32::try_from(left).unwrap_or(TAIL_PAGE)),
                wait_ms: (!once).then_some(TAIL_WAIT.as_millis() as u64),
            };
            let answer = tokio::select! {
                () = &mut interrupted => return Ok(()),
                answer = self.client.request(request, TAIL_WAIT + self.timeout) => answer?,
            };
            let Answer::Events { items, next, .. } = answer else { return Err(unexpected()) };
            if once && items.is_empty() {
                break;
            }
            for row in &items {
                self.output.print_change(&show::event_line(row))?;
            }
            left = left.saturating_sub(items.len() as u64);
            from = Start::Offset(next);
        }
        Ok(())
    }

    pub(super) async fn topics(&self, command: &TopicsCommand) -> Result<(), Failure> {
        let request = match command {
            TopicsCommand::Ls { limit, after } => Request::Topics { limit: *limit, after: after.clone() },
            TopicsCommand::Show { event_type } => Request::Topic { event_type: event_type.clone() },
            TopicsCommand::Set { event_type, max_age, max_bytes } => Request::SetTopic {
                event_type: event_type.clone(),
                max_age_ms: max_age.map(|age| age.as_millis() as u64),
                max_bytes: *max_bytes,
            },
            TopicsCommand::Trim { event_type, below } => {
                Request::Trim { event_type: event_type.clone(), to: *below }
            }
            TopicsCommand::Rm { event_type } => Request::RemoveTopic { event_type: event_type.clone() },
        };
        match self.ask(request).await? {
            Answer::Topics { items, next, as_of } => {
                self.output.print(&show::topics(&items, next.as_ref(), as_of))
            }
            Answer::Topic(topic) => self.output.print(&show::topic(&topic)),
            Answer::Done => {
                let TopicsCommand::Rm { event_type } = command else { return Err(unexpected()) };
                let note = format!("topic {event_type} is removed");
                self.output.print(&show::done(json!({ "removed": event_type }), note))
            }
            _ => Err(unexpected()),
        }
    }

    pub(super) async fn groups(&self, command: &GroupsCommand) -> Result<(), Failure> {
        let request = match command {
            GroupsCommand::Ls { limit, after } => Request::Groups { limit: *limit, after: after.clone() },
            GroupsCommand::Show { group } => Request::Group { group: group.clone() },
            GroupsCommand::Create { group, topics, from } => {
                Request::CreateGroup { group: group.clone(), topics: topics.clone(), from: *from }
            }
            GroupsCommand::Reset { group, from } => Request::ResetGroup { group: group.clone(), from: *from },
            GroupsCommand::Rm { group } => Request::RemoveGroup { group: group.clone() },
        };
        match self.ask(request).await? {
            Answer::Groups { items, next, as_of } => {
                self.output.print(&show::groups(&items, next.as_ref(), as_of))
            }
            Answer::Group(view) => self.output.print(&show::group(&view)),
            Answer::Done => {
                let GroupsCommand::Rm { group } = command else { return Err(unexpected()) };
                let note = format!("group {group} is removed");
                self.output.print(&show::done(json!({ "removed": group }), note))
            }
            _ => Err(unexpected()),
        }
    }
}
