//! Events: publishing them, and reading them as a member of a group.

use std::{collections::BTreeMap, time::Duration};

use reach_protocol::{
    Envelope, EventType, MsgId, Name, TraceId,
    event::{DeliveredEvent, Gap, Published, PullId, Span, Word},
    frame::{Answer, Request},
};
use ulid::Ulid;

use crate::{Client, client::made, error::Error};

impl Client {
    /// Publishes events, all of them or none; returns when they are on the disks of a majority. Ids that
    /// are absent are made here, before the first send, so that every retry is the same publication.
    pub async fn publish(&self, mut events: Vec<Envelope>) -> Result<Vec<Published>, Error> {
        for event in &mut events {
            if event.msg_id.is_none() {
                event.msg_id = Some(made("m", MsgId::parse));
                event.trace_id.get_or_insert_with(|| made("t", TraceId::parse));
            }
            self.sign(event);
        }
        match self.request(Request::Publish { events }, self.request_timeout()).await? {
            Answer::Published(published) => Ok(published),
            _ => Err(Error::Unexpected { asked: "publication" }),
        }
    }
}

/// A member of a group. An agent is a member under its own id; a user chooses a name.
#[derive(Clone, Debug)]
pub struct Consumer {
    client: Client,
    group: Name,
    member: Name,
}

/// What a pull gave. A gap tells of events that retention took before the group got them.
#[derive(Clone, Debug, Default)]
pub struct Pulled {
    pub events: Vec<DeliveredEvent>,
    pub gaps: Vec<(EventType, Gap)>,
}

impl Consumer {
    pub fn new(client: Client, group: Name, member: Name) -> Self {
        Self { client, group, member }
    }

    /// The next events, at most `max` (1 to 1,000); waits up to `wait` for the first. Each comes again,
    /// to any member, unless it is acknowledged within the rules' `ack_wait_ms`.
    pub async fn pull(&self, max: u32, wait: Duration) -> Result<Pulled, Error> {
        // One name for all retries, so that what was handed out and not heard is given again.
        let pull: PullId = Ulid::generate().into();
        let request = Request::Pull {
            group: self.group.clone(),
            member: self.member.clone(),
            pull,
            max,
            wait_ms: Some(wait.as_millis() as u64),
        };
        match self.client.request(request, wait + self.client.request_timeout()).await? {
            Answer::Pulled { events, gaps } => Ok(Pulled { events, gaps }),
            _ => Err(Error::Unexpected { asked: "pull" }),
        }
    }

    /// They are done. Idempotent; returns how many were not before.
    pub async fn ack<'a>(&self, events: impl IntoIterator<Item = &'a DeliveredEvent>) -> Result<u64, Error> {
        self.say(events, Word::Ack).await
    }

    /// They come again after `delay`, to any member; `cause` stands beside them in the dead letters once
    /// they were handed out too often.
    pub async fn nack<'a>(
        &self,
        events: impl IntoIterator<Item = &'a DeliveredEvent>,
        delay: Duration,
        cause: &str,
    ) -> Result<u64, Error> {
        let word = Word::Nack { delay_ms: delay.as_millis() as u64, cause: cause.to_string() };
        self.say(events, word).await
    }

    /// The ack wait of these begins anew.
    pub async fn extend<'a>(
        &self,
        events: impl IntoIterator<Item = &'a DeliveredEvent>,
    ) -> Result<u64, Error> {
        self.say(events, Word::Extend).await
    }

    async fn say<'a>(
        &self,
        events: impl IntoIterator<Item = &'a DeliveredEvent>,
        word: Word,
    ) -> Result<u64, Error> {
        let mut offsets: BTreeMap<EventType, Vec<u64>> = BTreeMap::new();
        for DeliveredEvent { event, .. } in events {
            offsets.entry(event.event_type.clone()).or_default().push(event.offset);
        }
        let about =
            offsets.into_iter().map(|(event_type, offsets)| (event_type, Span::of(offsets))).collect();
        self.tell(about, word).await
    }

    /// The same for offsets by topic.
    pub async fn tell(&self, about: Vec<(EventType, Vec<Span>)>, word: Word) -> Result<u64, Error> {
        let (group, member) = (self.group.clone(), self.member.clone());
        let request = Request::Say { group, member, about, word };
        match self.client.request(request, self.client.request_timeout()).await? {
            Answer::Heard(changed) => Ok(changed),
            _ => Err(Error::Unexpected { asked: "word on events" }),
        }
    }
}
