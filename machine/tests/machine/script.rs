//! Scripts: `testdata/*.txt` hold commands, one a line, and what they did. `REWRITE=1 cargo test`
//! writes the outcomes anew; the diff is the review. Every command is proposed a second time
//! unseen; the script shows it when the repeat is answered otherwise or writes anything.

use std::{collections::BTreeMap, fmt::Write as _};

use reach_machine::{MemoryRows, Outcome, Position, Rows, Write, apply};
use reach_protocol::{
    AgentState, Code, Command, Envelope, ErrorReply, EventType, Fact, Fingerprint, Json, MessageState, MsgId,
    NodeId, Registration, Reply, Revocation, Revoked, Rules, StateReason, Target, TraceId, Warning,
    agent::{Since, Subscription},
    certificate::{REVOCATIONS_FEW, REVOCATIONS_MAX},
    codec::Encoded,
    command::{Decision, ExpiryPause, FailReason, Observed},
    event::{GroupPosition, NewEvent, Published, Span, TopicRecord, Word},
    id::Name,
    message::{Holder, Hop, MessageRecord, PendingReason},
};

use crate::build::{self, agent_id, instance, msg_id, principal, stamp, tags};

#[test]
fn every_script_does_what_it_says() {
    datadriven::walk("testdata", |file| {
        let mut script = Script::default();
        file.run(|case| -> String {
            assert_eq!(case.directive, "run", "the one directive is run");
            case.input.lines().map(|line| script.line(line)).collect()
        });
    });
}

#[derive(Default)]
struct Script {
    rows: MemoryRows,
    now_ms: u64,
    index: u64,
}

impl Script {
    fn line(&mut self, line: &str) -> String {
        let words = Words::of(line);
        match words.verb {
            "" | "#" => return format!("{line}\n"),
            "at" => {
                self.now_ms = words.number(0);
                return format!("> {line}\n");
            }
            "show" => return format!("> {line}\n{}", self.show()),
            _ => {}
        }
        let command = command(&words, &self.rows);
        let Outcome { reply, facts, writes } = self.apply(&command);
        let mut out = format!("> {line}\n  {}\n", reply_text(&reply));
        facts.iter().for_each(|fact| writeln!(out, "  fact {}", fact_text(fact)).unwrap());
        writes.iter().filter_map(other_write_text).for_each(|text| writeln!(out, "  {text}").unwrap());
        let debug = format!("{reply:?} {facts:?}");
        assert!(!debug.contains(build::SECRET), "{line}: content in the outcome");
        self.rows.write(writes);

        let again = self.apply(&command);
        if again.reply != reply {
            writeln!(out, "  REPEAT is answered {}", reply_text(&again.reply)).unwrap();
        }
        if !again.writes.is_empty() || !again.facts.is_empty() {
            writeln!(out, "  REPEAT writes {:?}, facts {:?}", again.writes, again.facts).unwrap();
        }
        out
    }

    fn apply(&mut self, command: &Command) -> Outcome {
        self.index += 1;
        apply(&self.rows, Position { index: self.index, ordinal: 0 }, stamp(self.now_ms), command)
    }

    fn show(&self) -> String {
        let mut out = String::new();
        let live = self.rows.live();
        writeln!(out, "  rules revision={} waiting={}", live.rules.revision, live.waiting).unwrap();
        for record in live.agents.values() {
            let agent_id = record.agent_id();
            let (taken, max) = (self.rows.slots_taken(agent_id), record.registration.max_concurrency);
            writeln!(
                out,
                "  agent {} started={} {} ({}) seq={} slots={taken}/{max}{}",
                run(agent_id, &record.instance),
                record.started_ms,
                record.state,
                record.reason.as_str(),
                record.liveness_seq,
                record.drain.as_ref().map_or(String::new(), |drain| format!(
                    " drained by {} at {}, drain_seq={}",
                    drain.by, drain.at.cluster_ms, record.drain_seq
                ))
            )
            .unwrap();
        }
        for (agent_id, gone) in self.rows.tombstones() {
            let earlier = match gone.earlier.is_empty() {
                true => String::new(),
                false => format!(" earlier={:?}", gone.earlier),
            };
            let gone_run = run(agent_id, &gone.instance);
            let by = gone.by.as_ref().map_or(String::new(), |by| format!(" by={by}"));
            writeln!(out, "  gone {gone_run} started={}{by}{earlier}", gone.started_ms).unwrap();
        }
        for (agent_id, slots) in &live.slots {
            for (msg_id, slot) in slots {
                let run = run(agent_id, &slot.instance);
                writeln!(out, "  slot {run} {msg_id}#{} since={}", slot.attempt, slot.since_ms).unwrap();
            }
        }
        for record in live.revocations.values() {
            writeln!(out, "  {}", revocation_text(record)).unwrap();
        }
        for topic in live.topics.values() {
            writeln!(out, "  {}, {} kept", topic_text(topic), self.rows.events_of(&topic.event_type).count())
                .unwrap();
        }
        for group in live.groups.values() {
            writeln!(out, "  group {} of {}", group.group, group.topics).unwrap();
        }
        for position in live.positions.values().flat_map(BTreeMap::values) {
            writeln!(out, "  position {} {}", position.group, position_text(position)).unwrap();
        }
        for record in self.rows.messages() {
            writeln!(out, "  {}", message_text(&record)).unwrap();
        }
        out
    }
}

/// A line taken apart: the verb, the words, and `key=value` pairs.
struct Words<'a> {
    verb: &'a str,
    plain: Vec<&'a str>,
    named: BTreeMap<&'a str, &'a str>,
}

impl<'a> Words<'a> {
    fn of(line: &'a str) -> Self {
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap_or_default();
        let (named, plain): (Vec<_>, Vec<_>) = words.partition(|word| word.contains('='));
        let named = named.into_iter().map(|word| word.split_once('=').unwrap()).collect();
        Self { verb, plain, named }
    }

    fn word(&self, place: usize) -> &'a str {
        self.plain.get(place).unwrap_or_else(|| panic!("{} wants {} words", self.verb, place + 1))
    }

    fn number(&self, place: usize) -> u64 {
        self.word(place).parse().unwrap()
    }

    fn named(&self, key: &str) -> Option<&'a str> {
        self.named.get(key).copied()
    }

    fn named_number(&self, key: &str) -> Option<u64> {
        self.named(key).map(|value| value.parse().unwrap())
    }
}

fn command(words: &Words<'_>, rows: &MemoryRows) -> Command {
    let attempt = || words.number(1) as u32;
    let held = || holder(words.word(2));
    let message = || msg_id(words.word(0));
    match words.verb {
        "init" => Command::Init {
            cluster: Name::parse("demo").unwrap(),
            rules: Box::new(rules(words, Rules::default())),
        },
        "rules" => Command::ApplyRules {
            rules: Box::new(rules(words, rows.live().rules.rules.clone())),
            text: words.named("text").unwrap_or_default().into(),
            expect: words.named_number("expect"),
            author: principal(words.named("by").unwrap_or("user:op")),
        },
        "register" => {
            let (agent, run) = words.word(0).split_once('/').unwrap();
            let declared = tags(words.named("tags").unwrap_or("x"));
            let slots = words.named_number("slots").unwrap_or(1) as u32;
            Command::Register {
                registration: Box::new(Registration {
                    subscriptions: subscriptions(words),
                    ..build::registration(agent, declared, slots)
                }),
                instance: instance(run),
                started_ms: words.named_number("started").unwrap_or(10),
                author: words
                    .named("by")
                    .map_or_else(|| reach_protocol::Principal::Agent(agent_id(agent)), principal),
            }
        }
        "revoke" => Command::Revoke {
            revoked: match words.word(0).split_once(':').unwrap() {
                ("cert", text) => Revoked::Certificate(Fingerprint::of(text.as_bytes())),
                ("serial", text) => Revoked::Serial(text.parse().unwrap()),
                (kind, name) => Revoked::Identity {
                    principal: principal(&format!("{kind}:{name}")),
                    made_until_s: words.named_number("until").unwrap(),
                },
            },
            whose: words.named("whose").map(principal),
            ends_s: words.named_number("ends"),
            author: principal(words.named("by").unwrap_or("user:op")),
        },
        "remove" => {
            let (agent, run) = match words.word(0).split_once('/') {
                Some((agent, run)) => (agent, Some(instance(run))),
                None => {
                    let current = rows.agent(&agent_id(words.word(0)));
                    (words.word(0), current.map(|record| record.instance.clone()))
                }
            };
            let author = principal(words.named("by").unwrap_or("user:op"));
            Command::Remove { agent_id: agent_id(agent), instance: run, author }
        }
        "remove_offline" => {
            let Holder { agent_id, instance } = holder(words.word(0));
            Command::RemoveOffline { agent_id, instance, liveness_seq: words.named_number("seq").unwrap() }
        }
        verb @ ("drain" | "resume") => {
            let agent_id = agent_id(words.word(0));
            let drain_seq = words.named_number("seq").unwrap();
            let author = principal(words.named("by").unwrap_or("user:op"));
            match verb {
                "drain" => Command::Drain { agent_id, drain_seq, author },
                _ => Command::Resume { agent_id, drain_seq, author },
            }
        }
        "pause_expiry" => {
            let (since_ms, agents) = (words.number(0), words.number(1) as u32);
            let pause = ExpiryPause { since_ms, agents, of: 30, wait_ms: 9_000, forced_by: None };
            Command::PauseExpiry { pause }
        }
        "skew" => Command::Observe {
            msg_id: msg_id(words.word(0)),
            observed: Observed::ClockSkew {
                who: principal(words.word(1)),
                host: words.named("host").map(str::to_string),
                offset_ms: words.word(2).parse().expect("an offset"),
                is_off: words.named("off") != Some("no"),
                message: "check that clock".into(),
            },
        },
        "health" => Command::Observe {
            msg_id: msg_id(words.word(0)),
            observed: Observed::Health {
                leader: NodeId(words.number(1)),
                silent: words.named_number("silent").map(NodeId).into_iter().collect(),
                nodes: 3,
            },
        },
        "expire_now" => Command::ExpireNow {
            since_ms: words.number(0),
            author: principal(words.named("by").unwrap_or("user:op")),
        },
        "liveness" => {
            let Holder { agent_id, instance } = holder(words.word(0));
            let (state, reason) = match words.word(1) {
                "ready" => (AgentState::Ready, StateReason::Returned),
                "leaving" => (AgentState::Draining, StateReason::Asked),
                "draining" => (AgentState::Draining, StateReason::LoopSilent),
                "offline" => (AgentState::Offline, StateReason::ProcessSilent),
                other => panic!("no state {other}"),
            };
            let liveness_seq = words.named_number("seq").unwrap();
            Command::SetLiveness { agent_id, instance, liveness_seq, state, reason }
        }
        "publish" => Command::Publish {
            // `TYPE:ID`, one or several, `TYPE:ID:CONTENT` where the content matters.
            events: words.plain.iter().map(|text| new_event(text, words)).collect(),
            author: principal(words.named("by").unwrap_or("user:u")),
        },
        "topic" => Command::SetTopic {
            event_type: event_type(words.word(0)),
            max_age_ms: words.named_number("age"),
            max_bytes: words.named_number("bytes"),
            author: principal(words.named("by").unwrap_or("user:op")),
        },
        "trim" => Command::Trim {
            event_type: event_type(words.word(0)),
            to: words.number(1),
            author: words.named("by").map(principal),
        },
        "remove_topic" => Command::RemoveTopic {
            event_type: event_type(words.word(0)),
            author: principal(words.named("by").unwrap_or("user:op")),
        },
        verb @ ("group" | "reset") => {
            let group = Name::parse(words.word(0)).unwrap();
            let starts = words.plain[1..].iter().map(|text| text.split_once('@').unwrap());
            let starts = starts.map(|(topic, at)| (event_type(topic), at.parse().unwrap())).collect();
            let author = principal(words.named("by").unwrap_or("user:u"));
            match verb {
                "group" => Command::CreateGroup {
                    group,
                    topics: words.named("topics").unwrap().parse().unwrap(),
                    starts,
                    author,
                },
                _ => {
                    let resets = words.named_number("resets").unwrap_or(0);
                    Command::ResetGroup { group, resets, starts, author }
                }
            }
        }
        "remove_group" => Command::RemoveGroup {
            group: Name::parse(words.word(0)).unwrap(),
            author: principal(words.named("by").unwrap_or("user:u")),
        },
        "hand_out" => Command::HandOut {
            group: Name::parse(words.word(0)).unwrap(),
            member: Name::parse(words.word(1)).unwrap(),
            pull: words.number(2).into(),
            max: words.named_number("max").unwrap_or(10) as u32,
            ack_wait_ms: 30_000,
        },
        verb @ ("ack" | "nack" | "extend" | "give_back") => Command::Say {
            group: Name::parse(words.word(0)).unwrap(),
            member: Name::parse(words.word(1)).unwrap(),
            about: vec![(
                event_type(words.word(2)),
                Span::of(words.plain[3..].iter().map(|offset| offset.parse::<u64>().unwrap())),
            )],
            word: match verb {
                "ack" => Word::Ack,
                "extend" => Word::Extend,
                "give_back" => Word::GiveBack,
                _ => Word::Nack {
                    delay_ms: words.named_number("delay").unwrap_or(0),
                    cause: words.named("cause").unwrap_or("no").to_string(),
                },
            },
        },
        "submit" => submit(words),
        "assign" => Command::Assign {
            msg_id: message(),
            attempt: attempt(),
            holder: held(),
            warnings: warnings(words),
        },
        "dispatched" => Command::Dispatched { msg_id: message(), attempt: attempt(), holder: held() },
        "received" => Command::Received { msg_id: message(), attempt: attempt(), holder: held() },
        "complete" => Command::Complete {
            msg_id: message(),
            attempt: attempt(),
            holder: held(),
            excerpt: words.named("excerpt").unwrap_or("fine").into(),
            result: match words.named_number("bytes") {
                Some(bytes) => Json::parse(&format!("\"{}\"", "r".repeat(bytes as usize - 2))).unwrap(),
                None => build::payload(),
            },
            cost: words.named("cost").map(|cost| cost.parse().unwrap()),
        },
        "fail" => Command::Fail {
            msg_id: message(),
            attempt: attempt(),
            holder: held(),
            reason: match words.word(3) {
                "error" => FailReason::Error,
                "unparseable" => FailReason::Unparseable,
                "refused" => FailReason::Refused,
                "busy" => FailReason::Busy,
                other => panic!("no reason {other}"),
            },
            message: words.named("text").unwrap_or_default().into(),
        },
        "release" => Command::Release { msg_id: message(), attempt: attempt(), holder: held() },
        "return" => Command::Return {
            msg_id: message(),
            attempt: attempt(),
            holder: held(),
            reason: pending_reason(words.plain.get(3).unwrap_or(&"delivery_failed")),
        },
        "retake" => Command::Retake {
            msg_id: message(),
            attempt: attempt(),
            holder: held(),
            to: words.named("to").map(holder),
            warnings: warnings(words),
        },
        "timeout" => Command::TimeOut { msg_id: message() },
        "giveup" => Command::GiveUp {
            msg_id: message(),
            error: Box::new(ErrorReply::new(Code::NoCandidate, "nobody declares x")),
        },
        "freeslot" => Command::FreeSlot {
            agent_id: agent_id(words.word(0)),
            msg_id: msg_id(words.word(1)),
            attempt: words.number(2) as u32,
        },
        other => panic!("no command {other}"),
    }
}

/// `subscribe=TOPICS`, `TOPICS@GROUP`, `TOPICS@GROUP@earliest`, several with `+` between.
fn subscriptions(words: &Words<'_>) -> Vec<Subscription> {
    let all = words.named("subscribe").into_iter().flat_map(|text| text.split('+'));
    let subscription = |text: &str| {
        let mut parts = text.split('@');
        let to = parts.next().unwrap().parse().unwrap();
        let group = parts.next().filter(|group| !group.is_empty()).map(|group| Name::parse(group).unwrap());
        let from = if parts.next() == Some("earliest") { Since::Earliest } else { Since::Latest };
        Subscription { to, group, from }
    };
    all.map(subscription).collect()
}

fn event_type(text: &str) -> EventType {
    EventType::parse(text).unwrap()
}

fn new_event(text: &str, words: &Words<'_>) -> NewEvent {
    let (topic, rest) = text.split_once(':').unwrap();
    let (id, content) = rest.split_once(':').unwrap_or((rest, "c"));
    NewEvent {
        msg_id: msg_id(id),
        trace_id: TraceId::parse("t").unwrap(),
        event_type: event_type(topic),
        source: agent_id(words.named("source").unwrap_or("user:u")),
        key: words.named("key").map(str::to_string),
        content_hash: reach_protocol::codec::digest(content.as_bytes()),
        data: build::payload(),
    }
}

fn submit(words: &Words<'_>) -> Command {
    let target = match words.named("to") {
        Some(agent) => Target::Agent(agent_id(agent)),
        None => {
            Target::Capabilities { required: tags(words.named("tags").unwrap_or("x")), preferred: Vec::new() }
        }
    };
    let decision = match words.named("give") {
        Some(run) => Decision::Give { holder: holder(run), warnings: warnings(words) },
        None => Decision::Wait {
            reason: pending_reason(words.named("wait").unwrap_or("none_ready")),
            warnings: warnings(words),
        },
    };
    let author = principal(words.named("by").unwrap_or("user:u"));
    let content = words.named("content").unwrap_or("c");
    let mut submit = build::submit(words.word(0), target, content, author, decision);
    if let Some(source) = words.named("source") {
        submit.source = agent_id(source);
    }
    if let Some(trace) = words.named("trace") {
        submit.trace_id = TraceId::parse(trace).unwrap();
    }
    submit.parent = words.named("parent").map(msg_id);
    submit.flow_seq = words.named_number("flow");
    let envelope = submit.envelope.decode("envelope").unwrap();
    submit.envelope = Encoded::new(&Envelope { intent: Some(build::SECRET.into()), ..envelope });
    submit.expires_in_ms = words.named_number("expires").unwrap_or(submit.expires_in_ms);
    Command::Submit(Box::new(submit))
}

fn rules(words: &Words<'_>, mut rules: Rules) -> Rules {
    for (key, value) in &words.named {
        let number = || value.parse::<u64>().unwrap();
        match *key {
            "operators" => {
                rules.grants.operators = value.split(',').map(|name| Name::parse(name).unwrap()).collect()
            }
            "attempts_max" => rules.delivery.attempts_max = number() as u32,
            "return_within_ms" => rules.delivery.return_within_ms = number(),
            "remove_after_ms" => rules.liveness.remove_after_ms = number(),
            "deliveries_max" => rules.events.deliveries_max = number() as u32,
            "waiting_max" => rules.routing.waiting_max = number(),
            "result_bytes" => rules.limits.result_bytes = number() as usize,
            "excerpt_bytes" => rules.limits.excerpt_bytes = number() as usize,
            "capabilities" => rules.limits.capabilities = number() as usize,
            "by" | "text" | "expect" => {}
            other => panic!("no rule {other}"),
        }
    }
    rules
}

fn holder(text: &str) -> Holder {
    let (agent, run) = text.split_once('/').unwrap();
    build::holder(agent, run)
}

fn warnings(words: &Words<'_>) -> Vec<Warning> {
    let named = words.named("warn").into_iter().flat_map(|text| text.split(','));
    named
        .map(|warning| match warning {
            "affinity_unmet" => Warning::AffinityUnmet,
            "clock_unknown" => Warning::ClockUnknown,
            "capacity_hint" => Warning::CapacityHint,
            other => panic!("no warning {other}"),
        })
        .collect()
}

fn pending_reason(text: &str) -> PendingReason {
    match text {
        "saturated" => PendingReason::Saturated,
        "none_ready" => PendingReason::NoneReady,
        "delivery_failed" => PendingReason::DeliveryFailed,
        "agent_lost" => PendingReason::AgentLost,
        other => panic!("no reason {other}"),
    }
}

fn run(agent_id: &str, instance: &str) -> String {
    format!("{agent_id}/{instance}")
}

fn holder_text(holder: Option<&Holder>) -> String {
    holder.map_or("-".into(), |holder| run(&holder.agent_id, &holder.instance))
}

fn message_text(record: &MessageRecord) -> String {
    let mut text = format!(
        "message {}#{} {} {}",
        record.msg_id,
        record.attempt,
        record.state.name(),
        holder_text(record.state.holder())
    );
    let detail = match &record.state {
        MessageState::Pending { reason } => format!(" ({})", reason.as_str()),
        MessageState::Failed { error, .. } => format!(" ({error})"),
        MessageState::TimedOut { cause, .. } => format!(" ({})", cause.code()),
        MessageState::Completed { outcome, .. } => {
            let cost = outcome.cost.map_or("-".into(), |cost| cost.to_string());
            format!(" ({}, {} bytes, cost {cost})", outcome.excerpt, outcome.result_bytes)
        }
        _ => String::new(),
    };
    text.push_str(&detail);
    write!(text, " flow={} expires={}", record.flow_seq, record.expires_ms).unwrap();
    if !record.avoid.is_empty() {
        write!(text, " avoid={:?}", record.avoid).unwrap();
    }
    if record.retries > 0 {
        write!(text, " retries={}", record.retries).unwrap();
    }
    if let Some(at_ms) = record.retry_at_ms {
        write!(text, " retry_at={at_ms}").unwrap();
    }
    if !record.warnings.is_empty() {
        let warnings: Vec<_> = record.warnings.iter().map(|warning| warning.as_str()).collect();
        write!(text, " warnings={}", warnings.join(",")).unwrap();
    }
    text
}

fn reply_text(reply: &Reply) -> String {
    match reply {
        Reply::Done => "done".into(),
        Reply::Void => "void".into(),
        Reply::Agent(record) => format!(
            "agent {} started={} {} seq={}",
            run(record.agent_id(), &record.instance),
            record.started_ms,
            record.state,
            record.liveness_seq
        ),
        Reply::Message(record) => message_text(record),
        Reply::Rules(record) => format!("rules revision={}", record.revision),
        Reply::Revoked(record) => revocation_text(record),
        Reply::Published(published) => {
            let text = |one: &Published| {
                let again = if one.duplicate { " again" } else { "" };
                format!("{} {}@{}{again}", one.msg_id, one.event_type, one.offset)
            };
            format!("published {}", published.iter().map(text).collect::<Vec<_>>().join(", "))
        }
        Reply::Topic(topic) => topic_text(topic),
        Reply::Group { record, positions } => {
            let places = positions.iter().map(position_text).collect::<Vec<_>>().join(", ");
            format!("group {} of {} by {} {places}", record.group, record.topics, record.author)
        }
        Reply::HandedOut(handed) => {
            let mut text = "handed out".to_string();
            for span in &handed.spans {
                write!(text, " {}@{}..{}#{}", span.event_type, span.from, span.to, span.deliveries).unwrap();
            }
            for (event_type, gap) in &handed.gaps {
                write!(text, " gap {event_type}@{}..{}", gap.from, gap.to).unwrap();
            }
            text
        }
        Reply::Heard(changed) => format!("heard, {changed} changed"),
        Reply::Refused(error) => {
            let mut text = format!("REFUSED {error}");
            let about = |id: &Option<MsgId>| id.as_ref().map_or("-".into(), MsgId::to_string);
            write!(text, " [msg_id={}", about(&error.msg_id)).unwrap();
            if let Some(field) = &error.field {
                write!(text, " field={field}").unwrap();
            }
            if let Some(after) = error.retry_after_ms {
                write!(text, " retry_after_ms={after}").unwrap();
            }
            if let Some(depth) = error.hint.as_ref().and_then(|hint| hint.queue_depth) {
                write!(text, " queue_depth={depth}").unwrap();
            }
            text + "]"
        }
    }
}

fn topic_text(topic: &TopicRecord) -> String {
    let mut text = format!("topic {} {}..{}", topic.event_type, topic.floor, topic.next);
    if topic.removed {
        text.push_str(" removed");
    }
    for (name, value) in [("age", topic.max_age_ms), ("bytes", topic.max_bytes)] {
        if let Some(value) = value {
            write!(text, " {name}={value}").unwrap();
        }
    }
    text
}

fn position_text(position: &GroupPosition) -> String {
    let mut text = format!("{}@{} next={}", position.event_type, position.floor(), position.next);
    for open in &position.open {
        let member = open.member.as_deref().unwrap_or("nobody");
        write!(text, " [{}..{} {member}#{} due={}]", open.from, open.to, open.deliveries, open.due_ms)
            .unwrap();
    }
    if position.dead > 0 {
        write!(text, " dead={}", position.dead).unwrap();
    }
    text
}

fn fact_text(fact: &Fact) -> String {
    match fact {
        Fact::Registered(record) => format!("registered {}", run(record.agent_id(), &record.instance)),
        Fact::Fenced { agent_id, instance } => format!("fenced {}", run(agent_id, instance)),
        Fact::Removed { agent_id, instance } => format!("removed {}", run(agent_id, instance)),
        Fact::LivenessChanged(record) => {
            format!("liveness {} {}", run(record.agent_id(), &record.instance), record.state)
        }
        Fact::DrainChanged(record) => {
            let drained = if record.drain.is_some() { "drained" } else { "resumed" };
            format!("{drained} {} {}", run(record.agent_id(), &record.instance), record.state)
        }
        Fact::Submitted(record) => format!("submitted {}", record.msg_id),
        Fact::Matched(record) => format!("matched {}", record.msg_id),
        Fact::Dispatched(record) => format!("dispatched {}", record.msg_id),
        Fact::Acknowledged(record) => format!("acknowledged {}", record.msg_id),
        Fact::Returned(record) => format!("returned {}#{}", record.msg_id, record.attempt),
        Fact::Completed(record) => format!("completed {}", record.msg_id),
        Fact::Failed(record) => format!("failed {}", record.msg_id),
        Fact::TimedOut(record) => format!("timed_out {}", record.msg_id),
        Fact::Freed { agent_id, msg_id, attempt } => format!("freed {agent_id} {msg_id}#{attempt}"),
        Fact::RulesChanged(record) => format!("rules_changed {}", record.revision),
        Fact::Revoked(record) => format!("revoked {}", record.revoked),
        Fact::Appended(event_type) => format!("appended {event_type}"),
        Fact::GroupChanged(group) => format!("group_changed {group}"),
    }
}

fn revocation_text(record: &Revocation) -> String {
    let whose = record.whose.as_ref().map_or(String::new(), |whose| format!(" of {whose}"));
    format!(
        "revoked {}{whose} by {} at {} kept until {}",
        record.revoked,
        record.author,
        record.at.wall_ms,
        record.keep_until_ms()
    )
}

/// The writes that neither the reply nor `show` tells of.
fn other_write_text(write: &Write) -> Option<String> {
    match write {
        Write::PutHop { ordinal, hop, .. } => Some(hop_text(*ordinal, hop)),
        Write::PutResult { msg_id, result } => {
            Some(format!("result {msg_id} {} bytes", result.as_str().len()))
        }
        Write::PutDelivered { msg_id, agent_id } => Some(format!("delivered {msg_id} {agent_id}")),
        Write::PutDeadLetter(letter) => Some(format!(
            "dead letter {} ({}) after {} attempts, the last by {}",
            letter.msg_id,
            letter.cause.as_str(),
            letter.attempts,
            letter.agent_id.as_ref().map_or("-", |agent_id| agent_id.as_str())
        )),
        Write::PutEvent(row) => {
            let own = row.source.is_none() || row.event_type.starts_with("dead.");
            let data = if own { row.data.as_str() } else { "(content)" };
            Some(format!("event {} {} {data}", row.event_type, row.offset))
        }
        _ => None,
    }
}

fn hop_text(ordinal: u64, hop: &Hop) -> String {
    let from = hop.from.map_or("-", |from| from.as_str());
    let holder = holder_text(hop.holder.as_ref());
    let reason = hop.reason.as_ref().map_or(String::new(), |reason| format!(" ({reason})"));
    format!("hop {ordinal} {}#{} {from} -> {} {holder}{reason}", hop.msg_id, hop.attempt, hop.to)
}

#[test]
fn events_and_rows_never_show_content() {
    let mut script = Script::default();
    for line in
        ["init", "register a/i1", "submit m1 give=a/i1", "received m1 0 a/i1", "complete m1 0 a/i1 cost=0.21"]
    {
        script.line(line);
    }
    let events: Vec<_> = script.rows.events_of(&event_type("task.completed.v1")).collect();
    assert_eq!(events.len(), 1);
    let data = events[0].data.as_str();
    assert_eq!(data, r#"{"msg_id":"m1","agent_id":"a","attempt":0,"cost":0.21}"#);
    assert_eq!(script.rows.result(&msg_id("m1")), Some(&build::payload()));
    let envelope = script.rows.envelope(&msg_id("m1")).unwrap().decode("envelope").unwrap();
    assert_eq!(envelope.payload, Some(build::payload()));
}

#[test]
fn many_revocations_go_when_what_they_revoke_has_ended_and_the_list_has_an_end() {
    let mut script = Script::default();
    script.line("init operators=op");
    let revoke = |script: &mut Script, line: String| {
        let said = script.line(&line);
        (said, script.rows.live().revocations.len())
    };
    // Half of them end at once, half never soon.
    for nth in 0..REVOCATIONS_FEW {
        let ends = if nth % 2 == 0 { 0 } else { 1_000_000_000 };
        revoke(&mut script, format!("revoke cert:{nth} ends={ends}"));
    }
    assert_eq!(script.rows.live().revocations.len(), REVOCATIONS_FEW);
    script.line("at 172800001");
    let (_, left) = revoke(&mut script, "revoke cert:last ends=1000000000".into());
    assert_eq!(left, REVOCATIONS_FEW / 2 + 1);

    for nth in left..REVOCATIONS_MAX {
        revoke(&mut script, format!("revoke cert:more{nth} ends=1000000000"));
    }
    let (said, left) = revoke(&mut script, "revoke cert:one_too_many".into());
    assert!(said.contains("REFUSED too_large") && left == REVOCATIONS_MAX, "{said}");
    let (said, _) = revoke(&mut script, "revoke cert:last".into());
    assert!(said.contains("revoked sha256:"), "a repeat has its first answer: {said}");
}
