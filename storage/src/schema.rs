//! Every row on disk: its table, its key and its value. Kept on one screen, since a key that was
//! once written is read for years. Every key begins with the group (`u32`, big-endian).
//!
//! | table    | key after the group                    | value                              |
//! |----------|----------------------------------------|------------------------------------|
//! | registry | `r`                                    | `RulesRecord`                      |
//! | registry | `a` agent NUL                          | `AgentRecord`                      |
//! | registry | `t` agent NUL                          | `Tombstone`                        |
//! | registry | `c` revoked NUL                        | `Revocation`                       |
//! | live     | message NUL                            | `MessageRecord`, unfinished        |
//! | messages | message NUL                            | `MessageRecord`, finished          |
//! | bodies   | message NUL `e`                        | `Envelope`                         |
//! | bodies   | message NUL `r`                        | `Json`, the result                 |
//! | traces   | trace NUL                              | `TraceRecord`                      |
//! | traces   | trace NUL ordinal (`u64`)              | `Hop`                              |
//! | events   | type NUL                               | `TopicRecord`                      |
//! | events   | type NUL offset (`u64`)                | `EventRow`                         |
//! | index    | `o` accepted (`u64` ms) message NUL    | nothing: the order of acceptance   |
//! | index    | `d` message NUL agent NUL              | nothing: this agent received it    |
//! | index    | `e` message NUL                        | `EventMark`: where the event is    |
//! | groups   | `g` group NUL                          | `GroupRecord`                      |
//! | groups   | `p` group NUL type NUL                 | `GroupPosition`                    |
//! | index    | `x` message NUL                        | `DeadLetter`                       |
//! | slots    | agent NUL message NUL                  | `Slot`                             |
//! | meta     | `applied`                              | index, state hash, mark            |
//! | log      | index (`u64`)                          | sealed: the entry                  |
//! | log_meta | `vote`, `committed`, `identity`        | sealed: the caller's bytes         |
//! | log_meta | `purged`                               | sealed: index (`u64`), the mark    |
//!
//! Numbers in keys are big-endian; ids hold no NUL, so NUL ends them. Values are `codec` encodings;
//! *sealed* ones are a version byte, the crc32c of key and content, and the content.

use std::io;

use bytes::Bytes;
use reach_machine::Write;
use reach_protocol::{AgentId, EventType, MsgId, Name, Revoked, Stamp, TraceId, codec};
use serde::{Serialize, de::DeserializeOwned};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    error::damaged,
    kv::Op,
    store::{Applied, MetaKey},
};

/// Keys carry it so that several groups can share a disk; today there is one.
const GROUP: u32 = 0;

/// From so many rows on, one range is removed rather than each: every range that was removed slows readers
/// down a little.
const RANGE_MIN: u64 = 1_000;

/// The number is part of the state hash and of what `visit` shows: it never changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Table {
    Registry = 1,
    Live = 2,
    Messages = 3,
    Bodies = 4,
    Traces = 5,
    Events = 6,
    Index = 7,
    Slots = 8,
    Meta = 9,
    Groups = 10,
    Log = 100,
    LogMeta = 101,
}

impl Table {
    pub const TABLES: [Self; 10] = [
        Self::Registry,
        Self::Live,
        Self::Messages,
        Self::Bodies,
        Self::Traces,
        Self::Events,
        Self::Index,
        Self::Slots,
        Self::Meta,
        Self::Groups,
    ];
    pub const LOG: [Self; 2] = [Self::Log, Self::LogMeta];

    pub fn name(self) -> &'static str {
        match self {
            Self::Registry => "registry",
            Self::Live => "live",
            Self::Messages => "messages",
            Self::Bodies => "bodies",
            Self::Traces => "traces",
            Self::Events => "events",
            Self::Index => "index",
            Self::Slots => "slots",
            Self::Meta => "meta",
            Self::Groups => "groups",
            Self::Log => "log",
            Self::LogMeta => "log_meta",
        }
    }
}

struct Key(Vec<u8>);

impl Key {
    fn new() -> Self {
        let mut bytes = Vec::with_capacity(48);
        bytes.extend(GROUP.to_be_bytes());
        Self(bytes)
    }

    fn byte(mut self, byte: u8) -> Self {
        self.0.push(byte);
        self
    }

    fn id(mut self, id: &str) -> Self {
        self.0.extend(id.as_bytes());
        self.byte(0)
    }

    fn number(mut self, number: u64) -> Self {
        self.0.extend(number.to_be_bytes());
        self
    }

    fn text(mut self, text: &str) -> Vec<u8> {
        self.0.extend(text.as_bytes());
        self.0
    }
}

pub fn group() -> Vec<u8> {
    Key::new().0
}

pub fn rules() -> Vec<u8> {
    Key::new().byte(b'r').0
}

pub fn agents() -> Vec<u8> {
    Key::new().byte(b'a').0
}

pub fn agent(agent_id: &AgentId) -> Vec<u8> {
    Key::new().byte(b'a').id(agent_id).0
}

pub fn tombstone(agent_id: &AgentId) -> Vec<u8> {
    Key::new().byte(b't').id(agent_id).0
}

pub fn revocations() -> Vec<u8> {
    Key::new().byte(b'c').0
}

pub fn revocation(revoked: &Revoked) -> Vec<u8> {
    Key::new().byte(b'c').id(&revoked.to_string()).0
}

/// In `live` and in `messages` alike.
pub fn message(msg_id: &MsgId) -> Vec<u8> {
    Key::new().id(msg_id).0
}

pub fn envelope(msg_id: &MsgId) -> Vec<u8> {
    Key::new().id(msg_id).byte(b'e').0
}

pub fn result(msg_id: &MsgId) -> Vec<u8> {
    Key::new().id(msg_id).byte(b'r').0
}

pub fn trace(trace_id: &TraceId) -> Vec<u8> {
    Key::new().id(trace_id).0
}

pub fn hop(trace_id: &TraceId, ordinal: u64) -> Vec<u8> {
    Key::new().id(trace_id).number(ordinal).0
}

pub fn topic(event_type: &EventType) -> Vec<u8> {
    Key::new().id(event_type).0
}

pub fn event(event_type: &EventType, offset: u64) -> Vec<u8> {
    Key::new().id(event_type).number(offset).0
}

pub fn topics() -> Vec<u8> {
    Key::new().0
}

/// The key after `topic`'s last event: where the next topic is looked for.
pub fn after_events(event_type: &EventType) -> Vec<u8> {
    after(&topic(event_type))
}

pub fn event_mark(msg_id: &MsgId) -> Vec<u8> {
    Key::new().byte(b'e').id(msg_id).0
}

pub fn groups() -> Vec<u8> {
    Key::new().byte(b'g').0
}

pub fn group_record(name: &Name) -> Vec<u8> {
    Key::new().byte(b'g').id(name).0
}

pub fn positions() -> Vec<u8> {
    Key::new().byte(b'p').0
}

pub fn position(group: &Name, event_type: &EventType) -> Vec<u8> {
    Key::new().byte(b'p').id(group).id(event_type).0
}

pub fn accepted_all() -> Vec<u8> {
    Key::new().byte(b'o').0
}

/// Messages of one stamp were accepted in one entry; among them the id decides.
pub fn accepted(at: Stamp, msg_id: &MsgId) -> Vec<u8> {
    Key::new().byte(b'o').number(at.cluster_ms).id(msg_id).0
}

/// The message of an `accepted` key.
pub fn accepted_message(key: &[u8]) -> io::Result<MsgId> {
    let id = key.get(13..key.len().saturating_sub(1)).unwrap_or_default();
    let id = std::str::from_utf8(id).ok().and_then(|id| MsgId::parse(id).ok());
    id.ok_or_else(|| damaged("a key of the order of acceptance holds no msg_id"))
}

pub fn delivered(msg_id: &MsgId, agent_id: &AgentId) -> Vec<u8> {
    Key::new().byte(b'd').id(msg_id).id(agent_id).0
}

pub fn dead_letter(msg_id: &MsgId) -> Vec<u8> {
    Key::new().byte(b'x').id(msg_id).0
}

pub fn slot(agent_id: &AgentId, msg_id: &MsgId) -> Vec<u8> {
    Key::new().id(agent_id).id(msg_id).0
}

/// The two ids of a `slot` key.
pub fn slot_ids(key: &[u8]) -> io::Result<(AgentId, MsgId)> {
    let ids = || {
        let mut ids = key.get(4..)?.split(|byte| *byte == 0).map(std::str::from_utf8);
        let agent_id = AgentId::parse(ids.next()?.ok()?).ok()?;
        Some((agent_id, MsgId::parse(ids.next()?.ok()?).ok()?))
    };
    ids().ok_or_else(|| damaged("a slot's key holds no ids"))
}

pub fn applied() -> Vec<u8> {
    Key::new().text("applied")
}

pub fn entry(index: u64) -> Vec<u8> {
    Key::new().number(index).0
}

pub fn entry_index(key: &[u8]) -> io::Result<u64> {
    let index = key.get(4..).and_then(|index| index.try_into().ok());
    index.map(u64::from_be_bytes).ok_or_else(|| damaged("a key of the log is not an index"))
}

pub fn meta(key: MetaKey) -> Vec<u8> {
    Key::new().text(match key {
        MetaKey::Vote => "vote",
        MetaKey::Committed => "committed",
        MetaKey::Identity => "identity",
        MetaKey::Acquaintances => "acquaintances",
    })
}

pub fn purged() -> Vec<u8> {
    Key::new().text("purged")
}

/// The first key after all that begin with `prefix`.
pub fn after(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    let last = end.iter().rposition(|byte| *byte != 0xff).expect("a group's number is not all ones");
    end.truncate(last + 1);
    end[last] += 1;
    end
}

/// The rows that a write changes, alike in every store.
pub fn ops(write: &Write) -> Vec<Op> {
    fn put<T: Serialize + ?Sized>(table: Table, key: Vec<u8>, value: &T) -> Op {
        Op::Put { table, key, value: codec::encode_vec(&value) }
    }
    match write {
        Write::PutRules(record) => vec![put(Table::Registry, rules(), &**record)],
        Write::PutAgent(record) => vec![put(Table::Registry, agent(record.agent_id()), &**record)],
        Write::RemoveAgent { agent_id, tombstone: left } => vec![
            Op::Remove { table: Table::Registry, key: agent(agent_id) },
            put(Table::Registry, tombstone(agent_id), left),
        ],
        Write::PutRevocation(record) => vec![put(Table::Registry, revocation(&record.revoked), &**record)],
        Write::RemoveRevocation(revoked) => {
            vec![Op::Remove { table: Table::Registry, key: revocation(revoked) }]
        }
        Write::PutMessage(record) => {
            let key = message(&record.msg_id);
            let mut ops = if record.state.is_final() {
                let unfinished = Op::Remove { table: Table::Live, key: key.clone() };
                vec![unfinished, put(Table::Messages, key, &**record)]
            } else {
                vec![put(Table::Live, key, &**record)]
            };
            // True of the first write of every message, so each gets its place in the order.
            if record.since == record.accepted {
                ops.push(put(Table::Index, accepted(record.accepted, &record.msg_id), &()));
            }
            ops
        }
        Write::PutEnvelope { msg_id, envelope: body } => {
            let value = body.bytes().to_vec();
            vec![Op::Put { table: Table::Bodies, key: envelope(msg_id), value }]
        }
        Write::PutResult { msg_id, result: body } => vec![put(Table::Bodies, result(msg_id), body)],
        Write::PutSlot { agent_id, msg_id, slot: taken } => {
            vec![put(Table::Slots, slot(agent_id, msg_id), taken)]
        }
        Write::RemoveSlot { agent_id, msg_id } => {
            vec![Op::Remove { table: Table::Slots, key: slot(agent_id, msg_id) }]
        }
        Write::PutDelivered { msg_id, agent_id } => {
            vec![put(Table::Index, delivered(msg_id, agent_id), &())]
        }
        Write::PutTrace { trace_id, record } => vec![put(Table::Traces, trace(trace_id), record)],
        Write::PutHop { trace_id, ordinal, hop: step } => {
            vec![put(Table::Traces, hop(trace_id, *ordinal), step)]
        }
        Write::PutTopic(record) => vec![put(Table::Events, topic(&record.event_type), &**record)],
        Write::PutEvent(row) => vec![put(Table::Events, event(&row.event_type, row.offset), row)],
        Write::RemoveEvents { event_type, from, to } if to - from < RANGE_MIN => (*from..*to)
            .map(|offset| Op::Remove { table: Table::Events, key: event(event_type, offset) })
            .collect(),
        Write::RemoveEvents { event_type, from, to } => {
            let (from, to) = (event(event_type, *from), event(event_type, *to));
            vec![Op::RemoveRange { table: Table::Events, from, to }]
        }
        Write::PutEventMark { msg_id, mark } => vec![put(Table::Index, event_mark(msg_id), mark)],
        Write::RemoveEventMark { msg_id } => {
            vec![Op::Remove { table: Table::Index, key: event_mark(msg_id) }]
        }
        Write::PutGroup(record) => vec![put(Table::Groups, group_record(&record.group), &**record)],
        Write::RemoveGroup { group } => {
            vec![Op::Remove { table: Table::Groups, key: group_record(group) }]
        }
        Write::PutPosition(row) => {
            vec![put(Table::Groups, position(&row.group, &row.event_type), &**row)]
        }
        Write::RemovePosition { group, event_type } => {
            vec![Op::Remove { table: Table::Groups, key: position(group, event_type) }]
        }
        Write::PutDeadLetter(letter) => vec![put(Table::Index, dead_letter(&letter.msg_id), letter)],
    }
}

/// The state hash after one more write: a chain, so that equal hashes mean equal histories.
pub fn chain(before: u64, ops: &[Op]) -> u64 {
    let mut bytes = Vec::with_capacity(256);
    let mut field = |field: &[u8]| {
        bytes.extend((field.len() as u32).to_be_bytes());
        bytes.extend(field);
    };
    for op in ops {
        match op {
            Op::Put { table, key, value } => {
                field(&[*table as u8, 1]);
                field(key);
                field(value);
            }
            Op::Remove { table, key } => {
                field(&[*table as u8, 2]);
                field(key);
            }
            Op::RemoveRange { table, from, to } => {
                field(&[*table as u8, 3]);
                field(from);
                field(to);
            }
        }
    }
    xxh3_64_with_seed(&bytes, before)
}

pub fn put_applied(applied_now: &Applied) -> Op {
    let value = codec::encode_vec(&(applied_now.index, applied_now.state_hash, &applied_now.mark));
    Op::Put { table: Table::Meta, key: applied(), value }
}

pub fn decode_applied(value: &[u8]) -> io::Result<Applied> {
    let (index, state_hash, mark) = decode("position", value)?;
    Ok(Applied { index, state_hash, mark })
}

pub fn decode<T: DeserializeOwned>(what: &'static str, value: &[u8]) -> io::Result<T> {
    codec::decode(what, value).map_err(|error| damaged(error.to_string()))
}

const SEAL_VERSION: u8 = 1;

/// A value that its own key and checksum vouch for.
pub fn seal(key: &[u8], content: &[u8]) -> Vec<u8> {
    let mut value = Vec::with_capacity(5 + content.len());
    value.push(SEAL_VERSION);
    value.extend(checksum(key, content).to_be_bytes());
    value.extend(content);
    value
}

/// What was sealed under this key, or an error for any other bytes.
pub fn unseal(what: &str, key: &[u8], value: &[u8]) -> io::Result<Bytes> {
    let Some((header, content)) = value.split_at_checked(5) else {
        return Err(damaged(format!("{what} has {} bytes", value.len())));
    };
    if header[0] != SEAL_VERSION {
        let found = header[0];
        let text = format!("{what} is of format version {found}; this build reads {SEAL_VERSION}");
        return Err(damaged(text));
    }
    let (stored, found) = (&header[1..5], checksum(key, content));
    if stored != found.to_be_bytes() {
        let stored = u32::from_be_bytes(stored.try_into().expect("four bytes"));
        return Err(damaged(format!("{what} has checksum {found:08x} where {stored:08x} was stored")));
    }
    Ok(Bytes::copy_from_slice(content))
}

fn checksum(key: &[u8], content: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(key), content)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn keys_keep_their_bytes() {
        let (agent_id, msg_id) = (AgentId::parse("agent-1").unwrap(), MsgId::parse("m_1").unwrap());
        let trace_id = TraceId::parse("t:1").unwrap();
        let event_type = EventType::parse("task.done.v1").unwrap();
        let name = Name::parse("g").unwrap();
        let at = Stamp { cluster_ms: 258, wall_ms: 7 };
        let keys = [
            ("rules", rules()),
            ("agent", agent(&agent_id)),
            ("tombstone", tombstone(&agent_id)),
            ("revocation", revocation(&Revoked::Serial("0a1b".parse().unwrap()))),
            ("message", message(&msg_id)),
            ("envelope", envelope(&msg_id)),
            ("result", result(&msg_id)),
            ("trace", trace(&trace_id)),
            ("hop", hop(&trace_id, 1)),
            ("topic", topic(&event_type)),
            ("event", event(&event_type, 66)),
            ("event mark", event_mark(&msg_id)),
            ("group", group_record(&name)),
            ("position", position(&name, &event_type)),
            ("accepted", accepted(at, &msg_id)),
            ("delivered", delivered(&msg_id, &agent_id)),
            ("dead letter", dead_letter(&msg_id)),
            ("slot", slot(&agent_id, &msg_id)),
            ("applied", applied()),
            ("entry", entry(65)),
            ("vote", meta(MetaKey::Vote)),
            ("committed", meta(MetaKey::Committed)),
            ("identity", meta(MetaKey::Identity)),
            ("acquaintances", meta(MetaKey::Acquaintances)),
            ("purged", purged()),
        ];
        let text: String =
            keys.iter().map(|(name, key)| format!("{name:12} {}\n", key.escape_ascii())).collect();
        expect![[r#"
            rules        \x00\x00\x00\x00r
            agent        \x00\x00\x00\x00aagent-1\x00
            tombstone    \x00\x00\x00\x00tagent-1\x00
            revocation   \x00\x00\x00\x00cserial:0a1b\x00
            message      \x00\x00\x00\x00m_1\x00
            envelope     \x00\x00\x00\x00m_1\x00e
            result       \x00\x00\x00\x00m_1\x00r
            trace        \x00\x00\x00\x00t:1\x00
            hop          \x00\x00\x00\x00t:1\x00\x00\x00\x00\x00\x00\x00\x00\x01
            topic        \x00\x00\x00\x00task.done.v1\x00
            event        \x00\x00\x00\x00task.done.v1\x00\x00\x00\x00\x00\x00\x00\x00B
            event mark   \x00\x00\x00\x00em_1\x00
            group        \x00\x00\x00\x00gg\x00
            position     \x00\x00\x00\x00pg\x00task.done.v1\x00
            accepted     \x00\x00\x00\x00o\x00\x00\x00\x00\x00\x00\x01\x02m_1\x00
            delivered    \x00\x00\x00\x00dm_1\x00agent-1\x00
            dead letter  \x00\x00\x00\x00xm_1\x00
            slot         \x00\x00\x00\x00agent-1\x00m_1\x00
            applied      \x00\x00\x00\x00applied
            entry        \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00A
            vote         \x00\x00\x00\x00vote
            committed    \x00\x00\x00\x00committed
            identity     \x00\x00\x00\x00identity
            acquaintances \x00\x00\x00\x00acquaintances
            purged       \x00\x00\x00\x00purged
        "#]]
        .assert_eq(&text);
    }

    #[test]
    fn values_keep_their_bytes() {
        let position = Applied { index: 300, state_hash: 7, mark: Bytes::from_static(b"mark") };
        let ops = [put_applied(&position)];
        let Op::Put { value, .. } = &ops[0] else { panic!("a position is put") };
        expect![[r#"\x01\xac\x02\x07\x04mark"#]].assert_eq(&value.escape_ascii().to_string());
        assert_eq!(decode_applied(value).unwrap(), position);
        expect![[r#"\x01&>\r$content"#]].assert_eq(&seal(&entry(1), b"content").escape_ascii().to_string());
        expect!["02e25a6283e47a07"].assert_eq(&format!("{:016x}", chain(chain(0, &ops), &ops)));
    }

    #[test]
    fn keys_give_their_ids_back() {
        let (agent_id, msg_id) = (AgentId::parse("a").unwrap(), MsgId::parse("m").unwrap());
        assert_eq!(slot_ids(&slot(&agent_id, &msg_id)).unwrap(), (agent_id, msg_id.clone()));
        assert_eq!(accepted_message(&accepted(Stamp::default(), &msg_id)).unwrap(), msg_id);
        assert_eq!(entry_index(&entry(u64::MAX)).unwrap(), u64::MAX);
        for key in [&b""[..], b"\0\0\0\0", b"\0\0\0\0o"] {
            assert!(slot_ids(key).is_err() && accepted_message(key).is_err() && entry_index(key).is_err());
        }
    }

    #[test]
    fn the_end_of_a_prefix_is_above_all_its_keys() {
        assert_eq!(after(b"\0\0\0\0"), b"\0\0\0\x01");
        assert_eq!(after(b"\0a\xff"), b"\0b");
        assert!(entry(u64::MAX) < after(&group()));
    }

    #[test]
    fn a_seal_holds_for_its_own_key_only() {
        let sealed = seal(&entry(1), b"content");
        assert_eq!(unseal("entry 1", &entry(1), &sealed).unwrap(), &b"content"[..]);
        unseal("entry 2", &entry(2), &sealed).unwrap_err();
        for nth in 0..sealed.len() {
            let mut damaged = sealed.clone();
            damaged[nth] ^= 1;
            unseal("entry 1", &entry(1), &damaged).unwrap_err();
            unseal("entry 1", &entry(1), &sealed[..nth]).unwrap_err();
        }
    }
}
