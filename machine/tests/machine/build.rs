//! Short ways to say commands, shared by the scripts and the properties.

use reach_protocol::{
    AgentId, Capability, Envelope, InstanceId, Json, MsgId, Principal, Registration, Stamp, Tag, Target,
    TraceId,
    codec::{Encoded, digest},
    command::{Decision, Submit},
    id::Name,
    message::Holder,
};

/// What stands for all content in tests: no output may show it.
pub const SECRET: &str = "hunter2";

pub fn agent_id(text: &str) -> AgentId {
    AgentId::parse(text).unwrap()
}

pub fn instance(text: &str) -> InstanceId {
    InstanceId::parse(text).unwrap()
}

pub fn msg_id(text: &str) -> MsgId {
    MsgId::parse(text).unwrap()
}

pub fn holder(agent: &str, run: &str) -> Holder {
    Holder { agent_id: agent_id(agent), instance: instance(run) }
}

pub fn tags(text: &str) -> Vec<Tag> {
    text.split(',').map(|tag| Tag::parse(tag).unwrap()).collect()
}

/// `agent:a`, `user:u`, `host:h`.
pub fn principal(text: &str) -> Principal {
    let (kind, name) = text.split_once(':').unwrap();
    match kind {
        "agent" => Principal::Agent(agent_id(name)),
        "user" => Principal::User(Name::parse(name).unwrap()),
        "host" => Principal::Host(Name::parse(name).unwrap()),
        _ => panic!("no principal of kind {kind}"),
    }
}

pub fn stamp(cluster_ms: u64) -> Stamp {
    Stamp { cluster_ms, wall_ms: 1_000_000 + cluster_ms }
}

pub fn registration(agent: &str, declared: Vec<Tag>, slots: u32) -> Registration {
    let capabilities = declared.into_iter().map(|tag| Capability::new(tag, 1.0)).collect();
    Registration { max_concurrency: slots, ..Registration::new(agent_id(agent), capabilities) }
}

pub fn payload() -> Json {
    Json::parse(&format!("{{\"password\":\"{SECRET}\"}}")).unwrap()
}

/// A submission of `content` by `author` on its own account, in trace `t1`, with a second to live.
pub fn submit(msg: &str, target: Target, content: &str, author: Principal, decision: Decision) -> Submit {
    let envelope = match &target {
        Target::Agent(agent_id) => Envelope::request_to(agent_id.clone(), payload()),
        Target::Capabilities { required, .. } => Envelope::request(required.clone(), payload()),
    };
    Submit {
        msg_id: msg_id(msg),
        trace_id: TraceId::parse("t1").unwrap(),
        shape: envelope.payload.as_ref().unwrap().shape(),
        envelope: Encoded::new(&envelope),
        parent: envelope.parent_msg_id,
        flow_seq: envelope.flow_seq,
        source: author.own_agent_id(),
        target,
        content_hash: digest(content.as_bytes()),
        expires_in_ms: 1_000,
        author,
        decision,
    }
}
