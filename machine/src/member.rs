//! Agents as members of groups: by the subscriptions of their registration, or since they pull. Joining
//! and leaving are part of the entry that registers the agent, or ends it.

use std::{collections::BTreeSet, sync::Arc};

use reach_protocol::{
    AgentId, Code, ErrorReply, Fact, Name, Principal, Registration, Topics,
    agent::{Since, Subscription},
    event::{GroupPosition, GroupRecord, Open},
};

use crate::{change::Change, rows::Write};

/// The groups that the registration's subscriptions name are there afterwards. Refused where one reads
/// other topics: nothing has been written by then.
pub(crate) fn join(
    change: &mut Change<'_>,
    registration: &Registration,
    author: &Principal,
) -> Result<(), ErrorReply> {
    let own = registration.agent_id.as_name();
    let is_of =
        |group: &Name, subscription: &Subscription| subscription.group.as_ref().unwrap_or(&own) == group;
    let mut missing = Vec::new();
    for (group, topics) in registration.groups() {
        match change.rows.group(&group) {
            None => missing.push((group, topics)),
            Some(record) if Topics::all_of([&record.topics]) == topics => {}
            Some(record) => {
                let place = registration.subscriptions.iter().position(|one| is_of(&group, one));
                let place = place.expect("a group of the registration is that of a subscription");
                let message = format!(
                    "group {group} exists, and reads {}, not {topics}: subscribe to what it reads, name another \
                     group, or remove this one first",
                    record.topics
                );
                let error = ErrorReply::new(Code::IllegalTransition, message);
                return Err(ErrorReply { field: Some(format!("subscriptions[{place}]")), ..error });
            }
        }
    }
    for (group, topics) in missing {
        let (author, created) = (author.clone(), change.stamp);
        let record = GroupRecord { group: group.clone(), topics, author, created, resets: 0 };
        for topic in change.rows.topics() {
            let event_type = &topic.event_type;
            let covers = |one: &&Subscription| is_of(&group, one) && one.to.covers(event_type);
            let from = registration.subscriptions.iter().find(covers).map(|subscription| subscription.from);
            let next = match from {
                Some(Since::Latest) => topic.next,
                Some(Since::Earliest) => topic.floor,
                None => continue,
            };
            if record.reads(event_type) && !topic.removed {
                let position = GroupPosition::new(group.clone(), event_type.clone(), next);
                change.write(Write::PutPosition(Arc::new(position)));
            }
        }
        change.write(Write::PutGroup(Arc::new(record)));
        change.fact(Fact::GroupChanged(group));
    }
    Ok(())
}

/// The agent has left: what it holds goes back at once, in these groups or in all of them. The
/// deliveries stay counted, since it may have worked on them.
pub(crate) fn leave(change: &mut Change<'_>, agent_id: &AgentId, groups: Option<&BTreeSet<Name>>) {
    let member = agent_id.as_name();
    let mut changed = BTreeSet::new();
    for position in change.rows.held(&member) {
        if groups.is_some_and(|groups| !groups.contains(&position.group)) {
            continue;
        }
        let mut position = (*position).clone();
        for open in position.open.iter_mut().filter(|open| open.member.as_ref() == Some(&member)) {
            open.member = None;
            open.due_ms = change.stamp.cluster_ms;
        }
        changed.insert(position.group.clone());
        change.write(Write::PutPosition(Arc::new(position)));
    }
    changed.into_iter().for_each(|group| change.fact(Fact::GroupChanged(group)));
}

/// Of groups that one registration names and the next does not.
pub(crate) fn left(before: &Registration, after: &Registration) -> BTreeSet<Name> {
    let after = after.groups();
    before.groups().into_keys().filter(|group| !after.contains_key(group)).collect()
}

/// Why an event went to the dead letters that nobody said a word on.
pub(crate) fn silence(open: &Open) -> &'static str {
    match open.member {
        Some(_) => "the ack wait passed, every time",
        None => "who had it left, or the ack wait passed, every time",
    }
}
