//! Made-up lives of messages and agents: writes as apply would make them, from a seed.

use std::sync::Arc;

use bytes::Bytes;
use reach_machine::{Slot, TraceRecord, Write};
use reach_protocol::{
    AgentId, AgentState, Capability, Envelope, EventRow, EventType, Json, MessageState, MsgId, Name,
    Principal, Registration, Revocation, Revoked, RulesRecord, StateReason, Tag, Target, TraceId,
    agent::{AgentRecord, Tombstone},
    codec::Encoded,
    event::{GroupPosition, TopicRecord},
    message::{DeadCause, DeadLetter, Holder, Hop, MessageRecord, Outcome, PendingReason, StateName},
    stamp::Stamp,
};
use reach_storage::Tables;

/// splitmix64: the same choices on every machine.
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

pub fn msg(number: u64) -> MsgId {
    MsgId::parse(&format!("m{number}")).unwrap()
}

pub fn agent_id(number: u64) -> AgentId {
    AgentId::parse(&format!("a{number}")).unwrap()
}

pub fn trace_id(number: u64) -> TraceId {
    TraceId::parse(&format!("t{number}")).unwrap()
}

pub fn event_type() -> EventType {
    EventType::parse("agent.changed.v1").unwrap()
}

pub fn at(ms: u64) -> Stamp {
    Stamp { cluster_ms: ms, wall_ms: 1_000_000 + ms }
}

pub fn agent(number: u64, ms: u64) -> Arc<AgentRecord> {
    let skills = vec![Capability::new(Tag::parse("code_review").unwrap(), 1.0)];
    Arc::new(AgentRecord {
        registration: Registration::new(agent_id(number), skills),
        instance: reach_protocol::InstanceId::parse("i1").unwrap(),
        started_ms: ms,
        registered: at(ms),
        state: AgentState::Ready,
        reason: StateReason::Registered,
        since: at(ms),
        liveness_seq: ms,
        drain: None,
        drain_seq: 0,
    })
}

pub fn holder(number: u64) -> Holder {
    Holder { agent_id: agent_id(number), instance: reach_protocol::InstanceId::parse("i1").unwrap() }
}

pub fn pending() -> MessageState {
    MessageState::Pending { reason: PendingReason::Saturated }
}

pub fn completed(by: u64) -> MessageState {
    let outcome = Outcome { excerpt: "done".to_owned(), cost: None, result_bytes: 2 };
    MessageState::Completed { holder: holder(by), outcome }
}

pub fn message(number: u64, accepted_ms: u64, since_ms: u64, state: MessageState) -> Arc<MessageRecord> {
    Arc::new(MessageRecord {
        msg_id: msg(number),
        trace_id: trace_id(number % 5),
        flow_seq: number,
        parent: None,
        source: agent_id(0),
        principal: Principal::Agent(agent_id(0)),
        target: Target::Agent(agent_id(1)),
        content_hash: [7; 16],
        shape: "s".to_owned(),
        accepted: at(accepted_ms),
        expires_ms: accepted_ms + 1_000,
        state,
        since: at(since_ms),
        attempt: 0,
        retries: 0,
        retry_at_ms: None,
        avoid: vec![],
        warnings: vec![],
    })
}

pub fn envelope(number: u64) -> Encoded<Envelope> {
    let text = format!(r#"{{"msg_id":"m{number}","intent":"review","payload":{{"n":{number}}}}}"#);
    Encoded::new(&Envelope::from_json(&text).unwrap())
}

pub fn name() -> Name {
    Name::parse("g").unwrap()
}

pub fn event(offset: u64, ms: u64) -> EventRow {
    EventRow {
        event_type: event_type(),
        offset,
        at: at(ms),
        msg_id: Some(msg(offset)),
        trace_id: None,
        source: None,
        key: None,
        bytes_before: offset * 4,
        data: Json::null(),
    }
}

pub fn slot(ms: u64) -> Slot {
    Slot { instance: holder(0).instance, attempt: 0, since_ms: ms }
}

pub fn dead_letter(number: u64, ms: u64) -> DeadLetter {
    DeadLetter {
        msg_id: msg(number),
        trace_id: trace_id(number % 5),
        at: at(ms),
        cause: DeadCause::AgentLost,
        attempts: 4,
        agent_id: Some(agent_id(number % 6)),
    }
}

pub fn hop(number: u64, ms: u64, to: StateName) -> Hop {
    Hop { msg_id: msg(number), at: at(ms), from: None, to, attempt: 0, holder: None, reason: None }
}

/// The writes of each entry, from index 1 on.
pub fn history(seed: u64, entries: u64) -> Vec<Vec<Write>> {
    let mut chance = Chance::new(seed);
    let mut hops = [0u64; 5];
    // Of every message: when it was accepted, and its step (0 pending, 1 matched, 2 finished).
    let mut messages: Vec<(u64, u8)> = Vec::new();
    let (mut offset, mut floor) = (0, 0);
    let mut all = Vec::new();
    for index in 1..=entries {
        let ms = index * 10;
        let mut writes = Vec::new();
        for _ in 0..chance.below(4) {
            match chance.below(10) {
                0 => writes.push(Write::PutAgent(agent(chance.below(6), ms))),
                1 => {
                    let tombstone = Tombstone {
                        instance: holder(0).instance,
                        started_ms: ms,
                        removed: at(ms),
                        by: None,
                        earlier: vec![],
                    };
                    let agent_id = agent_id(chance.below(6));
                    writes.push(Write::RemoveAgent { agent_id, tombstone });
                }
                2 => {
                    let record = RulesRecord { revision: index, at: at(ms), ..RulesRecord::default() };
                    writes.push(Write::PutRules(Arc::new(record)));
                }
                3 => {
                    writes.push(Write::PutEvent(event(offset, ms)));
                    offset += 1;
                    let topic = TopicRecord::new(event_type(), at(0));
                    let topic = TopicRecord { next: offset, bytes: offset * 4, floor, ..topic };
                    writes.push(Write::PutTopic(Arc::new(topic)));
                    let position = GroupPosition::new(name(), event_type(), offset);
                    writes.push(Write::PutPosition(Arc::new(position)));
                    if offset - floor > 5 {
                        writes.push(Write::RemoveEvents {
                            event_type: event_type(),
                            from: floor,
                            to: floor + 3,
                        });
                        floor += 3;
                    }
                }
                4..7 => {
                    let number = messages.len() as u64;
                    messages.push((ms, 0));
                    let body = envelope(number);
                    writes.push(Write::PutMessage(message(number, ms, ms, pending())));
                    writes.push(Write::PutEnvelope { msg_id: msg(number), envelope: body });
                    push_hop(&mut writes, &mut hops, number, ms, StateName::Pending);
                }
                7 => {
                    let revoked = Revoked::Serial(format!("{:02x}", chance.below(6)).parse().unwrap());
                    let author = Principal::Loopback;
                    let record = Revocation { revoked, whose: None, ends_s: None, author, at: at(ms) };
                    writes.push(match chance.below(3) {
                        0 => Write::RemoveRevocation(record.revoked),
                        _ => Write::PutRevocation(Arc::new(record)),
                    });
                }
                _ if !messages.is_empty() => {
                    let number = chance.below(messages.len() as u64);
                    let (accepted, step) = &mut messages[number as usize];
                    let by = number % 6;
                    let (agent_id, msg_id) = (agent_id(by), msg(number));
                    if *step == 0 {
                        let state = MessageState::Matched { holder: holder(by) };
                        writes.push(Write::PutMessage(message(number, *accepted, ms, state)));
                        writes.push(Write::PutSlot { agent_id, msg_id, slot: slot(ms) });
                        push_hop(&mut writes, &mut hops, number, ms, StateName::Matched);
                    } else if *step == 1 {
                        writes.push(Write::PutMessage(message(number, *accepted, ms, completed(by))));
                        let delivered = (msg_id.clone(), agent_id.clone());
                        writes.push(Write::PutDelivered { msg_id: delivered.0, agent_id: delivered.1 });
                        let result = Json::parse("[1]").unwrap();
                        writes.push(Write::PutResult { msg_id: msg_id.clone(), result });
                        writes.push(Write::RemoveSlot { agent_id, msg_id });
                        push_hop(&mut writes, &mut hops, number, ms, StateName::Completed);
                        if number.is_multiple_of(7) {
                            writes.push(Write::PutDeadLetter(dead_letter(number, ms)));
                        }
                    }
                    *step += 1;
                }
                _ => {}
            }
        }
        all.push(writes);
    }
    all
}

fn push_hop(writes: &mut Vec<Write>, hops: &mut [u64; 5], number: u64, ms: u64, to: StateName) {
    let of = &mut hops[(number % 5) as usize];
    let trace_id = trace_id(number % 5);
    writes.push(Write::PutHop { trace_id: trace_id.clone(), ordinal: *of, hop: hop(number, ms, to) });
    *of += 1;
    writes.push(Write::PutTrace { trace_id, record: TraceRecord { last_flow_seq: number, hops: *of } });
}

pub fn mark(index: u64) -> Bytes {
    format!("log id {index}").into()
}

/// Applies entries after `applied` up to `to`, `per_batch` of them in a batch.
pub fn apply(tables: &dyn Tables, history: &[Vec<Write>], to: u64, per_batch: usize) {
    let from = tables.applied().index;
    let entries: Vec<_> = (1..).zip(history).filter(|(index, _)| (from + 1..=to).contains(index)).collect();
    for some in entries.chunks(per_batch) {
        let mut batch = tables.batch();
        for (index, writes) in some {
            batch.write(writes.to_vec());
            batch.advance(*index, mark(*index));
        }
        batch.commit().unwrap();
    }
}

pub type Rows = Vec<(Vec<u8>, Vec<u8>)>;

pub fn rows(tables: &dyn Tables) -> Rows {
    let mut rows = Rows::new();
    tables.visit(&mut |key, value| rows.push((key.to_vec(), value.to_vec()))).unwrap();
    rows
}
