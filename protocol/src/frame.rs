//! What passes over a link. A client's link carries [`ClientFrame`]s up and [`NodeFrame`]s down, a
//! link between nodes carries [`PeerFrame`]s both ways. Each is one codec value.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    agent::{AgentRecord, AgentState, Registration},
    certificate::{Revocation, Revoked},
    codec::{DecodeError, Encoded},
    command::{Command, ExpiryPause, FailReason, Principal, Reply},
    envelope::{Envelope, Response},
    error::ErrorReply,
    event::{DeliveredEvent, EventRow, Gap, GroupView, Published, PullId, Span, Start, TopicRecord, Word},
    id::{AgentId, EventType, InstanceId, MsgId, Name, NodeId, Topics, TraceId},
    json::Json,
    message::{DeadLetter, Holder, Hop, MessageRecord},
    money::Money,
    rules::RulesRecord,
    stamp::Stamp,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ClientFrame {
    /// First on every link.
    Hello { cluster: Name },
    /// Answered by a `NodeFrame::Response` with the same id, within `timeout_ms`. A `stale` read is
    /// answered from what the node knows, without asking the leader.
    Request { id: u64, timeout_ms: u64, stale: bool, request: Request },
    /// Level 1: the processes behind this link are alive. `seq` comes back in `Beaten`.
    Beat { seq: u64, runs: Vec<Holder> },
    /// Level 2: the agents whose own loop answered an echo from their dispatch stream.
    Echo { seq: u64, runs: Vec<Holder> },
    /// The calendar of these agents' host minus the cluster's, in milliseconds, by a beat's round trip
    /// halved. Said when it is first known on a link and when it has changed.
    Offset { runs: Vec<Holder>, offset_ms: i64 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum NodeFrame {
    Welcome(Welcome),
    Response {
        id: u64,
        response: Result<Box<Answer>, Box<ErrorReply>>,
    },
    Beaten {
        seq: u64,
        /// The cluster's calendar, in Unix milliseconds, once the node knows it.
        calendar_ms: Option<u64>,
    },
    /// Asks the loops of these agents, all attached to this link, at most `ECHO_MAX`.
    Echo {
        seq: u64,
        agents: Vec<AgentId>,
    },
    /// A task for an agent attached to this link; sent again until it is `received`.
    Deliver(Box<Delivery<Encoded<Envelope>>>),
    /// Events for an agent attached to this link, as a member of a group. Each is answered by a
    /// `Request::Say` within the ack wait, or may go to another member.
    Events {
        agent_id: AgentId,
        group: Name,
        ack_wait_ms: u64,
        events: Vec<DeliveredEvent>,
    },
    /// Stop the attempt, forget it, and answer with `Request::Release`.
    Cancel {
        agent_id: AgentId,
        msg_id: MsgId,
        attempt: u32,
    },
    /// This run has been replaced or removed: stop it.
    Fenced {
        agent_id: AgentId,
        error: Box<ErrorReply>,
    },
    /// The node is going: move to another one.
    Goodbye,
}

/// Agents that one echo asks, so that it stays a small frame.
pub const ECHO_MAX: usize = 256;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    pub node_id: NodeId,
    pub principal: Principal,
    pub stamp: Stamp,
    /// Client addresses of the cluster's nodes, the answering one first.
    pub endpoints: Vec<String>,
    pub heartbeat_ms: u64,
    pub ttl_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delivery<E = Envelope> {
    pub agent_id: AgentId,
    pub msg_id: MsgId,
    pub trace_id: TraceId,
    pub flow_seq: u64,
    pub attempt: u32,
    /// Time it has left, in milliseconds; agents get remaining times, never instants.
    pub expires_in_ms: u64,
    pub envelope: E,
}

impl Delivery<Encoded<Envelope>> {
    /// Opens the envelope, which no node on the way had to.
    pub fn open(self) -> Result<Delivery, DecodeError> {
        let envelope = self.envelope.decode("envelope")?;
        let Self { agent_id, msg_id, trace_id, flow_seq, attempt, expires_in_ms, .. } = self;
        Ok(Delivery { agent_id, msg_id, trace_id, flow_seq, attempt, expires_in_ms, envelope })
    }
}

/// An attempt that a starting or re-attaching agent finds in its inbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub msg_id: MsgId,
    pub attempt: u32,
    /// Its result is stored, and waits to be sent.
    pub finished: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// It is yours: run it, or go on.
    Keep,
    /// It is not yours any more: drop it.
    Cancel,
    /// It is yours and you are done: send the result.
    SendResult,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    Register {
        registration: Box<Registration>,
        instance: InstanceId,
        uptime_ms: u64,
    },
    /// Makes this link the agent's session and says which attempts it holds. `window`: events of its
    /// groups that it takes unanswered over this link; 0 where it asks for them itself.
    Attach {
        agent_id: AgentId,
        instance: InstanceId,
        held: Vec<Held>,
        window: u32,
    },
    /// No new tasks, please.
    Drain {
        agent_id: AgentId,
        instance: InstanceId,
    },
    /// The run ends cleanly.
    Detach {
        agent_id: AgentId,
        instance: InstanceId,
    },
    /// `instance`: the run that is meant; without it, the one that is there when the node looks. With
    /// it the request is safe to send again.
    Remove {
        agent_id: AgentId,
        instance: Option<InstanceId>,
    },
    Received {
        agent_id: AgentId,
        instance: InstanceId,
        msg_id: MsgId,
        attempt: u32,
    },
    Complete {
        agent_id: AgentId,
        instance: InstanceId,
        msg_id: MsgId,
        attempt: u32,
        excerpt: String,
        result: Json,
        cost: Option<Money>,
    },
    Fail {
        agent_id: AgentId,
        instance: InstanceId,
        msg_id: MsgId,
        attempt: u32,
        reason: FailReason,
        message: String,
    },
    Release {
        agent_id: AgentId,
        instance: InstanceId,
        msg_id: MsgId,
        attempt: u32,
    },

    /// `sent_at_ms`: the sender's calendar (Unix milliseconds), to read `expire_at` by. With
    /// `wait_ms` the answer waits that long for the message's end.
    Submit {
        envelope: Box<Envelope>,
        sent_at_ms: Option<u64>,
        wait_ms: Option<u64>,
    },
    Message {
        msg_id: MsgId,
        wait_ms: Option<u64>,
    },
    Payload {
        msg_id: MsgId,
    },
    Result {
        msg_id: MsgId,
    },
    Trace {
        trace_id: TraceId,
    },
    Messages {
        limit: u32,
        after: Option<MsgId>,
    },
    Agents {
        state: Option<AgentState>,
        capability: Option<crate::id::Tag>,
        metadata: Option<(String, String)>,
        limit: u32,
        after: Option<AgentId>,
    },
    Agent {
        agent_id: AgentId,
    },
    Cluster,
    Initialise,
    Rules,
    ApplyRules {
        text: String,
        expect: Option<u64>,
    },
    /// An operator's: no new tasks for this agent, whatever its runs say, until it is resumed.
    /// `drain_seq` as the operator saw it; without it, as it is when the node looks. With it the request
    /// is safe to send again.
    DrainAgent {
        agent_id: AgentId,
        drain_seq: Option<u64>,
    },
    ResumeAgent {
        agent_id: AgentId,
        drain_seq: Option<u64>,
    },
    /// Ends the wait of a mass expiry: of the one that began at `since_ms`, or the one that is there.
    ExpireNow {
        since_ms: Option<u64>,
    },
    Problems,
    Revoke {
        revoked: Revoked,
        whose: Option<Principal>,
        ends_s: Option<u64>,
    },
    Revocations {
        limit: u32,
        after: Option<Revoked>,
    },

    /// Events, each of which names its type: all are stored, or none.
    Publish {
        events: Vec<Envelope>,
    },
    /// Events of one topic. Without any, the answer waits `wait_ms` for the first.
    Events {
        event_type: EventType,
        from: Start,
        limit: u32,
        wait_ms: Option<u64>,
    },
    Topics {
        limit: u32,
        after: Option<EventType>,
    },
    Topic {
        event_type: EventType,
    },
    SetTopic {
        event_type: EventType,
        max_age_ms: Option<u64>,
        max_bytes: Option<u64>,
    },
    /// Events below `to` are kept no longer.
    Trim {
        event_type: EventType,
        to: u64,
    },
    RemoveTopic {
        event_type: EventType,
    },
    Groups {
        limit: u32,
        after: Option<Name>,
    },
    Group {
        group: Name,
    },
    CreateGroup {
        group: Name,
        topics: Topics,
        from: Start,
    },
    ResetGroup {
        group: Name,
        from: Start,
    },
    RemoveGroup {
        group: Name,
    },
    /// The next events for a member. Asked again with the same `pull` it gives the same ones.
    Pull {
        group: Name,
        member: Name,
        pull: PullId,
        max: u32,
        wait_ms: Option<u64>,
    },
    Say {
        group: Name,
        member: Name,
        about: Vec<(EventType, Vec<Span>)>,
        word: Word,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Registered {
        instance: InstanceId,
        heartbeat_ms: u64,
        ttl_ms: u64,
    },
    Attached {
        verdicts: Vec<Verdict>,
    },
    /// The message as it stands; with its end, `response` is the caller's answer.
    Message(Box<MessageView>),
    Body(Json),
    Trace {
        hops: Vec<Hop>,
        messages: Vec<MessageRecord>,
        as_of: Stamp,
    },
    Messages {
        items: Vec<MessageRecord>,
        next: Option<MsgId>,
        as_of: Stamp,
    },
    Agents {
        items: Vec<AgentView>,
        next: Option<AgentId>,
        as_of: Stamp,
    },
    Agent(Box<AgentView>),
    Cluster(Box<ClusterView>),
    Rules(Box<RulesRecord>),
    /// The mass expiry whose wait was ended.
    Expired(Option<ExpiryPause>),
    /// Those of the worst kind first.
    Problems {
        items: Vec<Problem>,
        as_of: Stamp,
    },
    Revoked(Box<Revocation>),
    Revocations {
        items: Vec<Revocation>,
        next: Option<Revoked>,
    },
    Published(Vec<Published>),
    Events {
        items: Vec<EventRow>,
        /// The offset to go on from.
        next: u64,
        as_of: Stamp,
    },
    Topics {
        items: Vec<TopicRecord>,
        next: Option<EventType>,
        as_of: Stamp,
    },
    Topic(Box<TopicRecord>),
    Groups {
        items: Vec<GroupView>,
        next: Option<Name>,
        as_of: Stamp,
    },
    Group(Box<GroupView>),
    Pulled {
        events: Vec<DeliveredEvent>,
        gaps: Vec<(EventType, Gap)>,
    },
    /// How many events it changed something for.
    Heard(u64),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MessageView {
    pub record: Arc<MessageRecord>,
    pub response: Option<Response>,
    /// The message's own transitions, when they were asked for by `Request::Message` without a wait.
    pub hops: Vec<Hop>,
    /// Its record, when it is a dead letter; told together with the hops.
    pub dead_letter: Option<DeadLetter>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AgentView {
    pub record: AgentRecord,
    /// Slots taken now.
    pub running: u32,
    /// Ages of both heartbeats, in milliseconds, and the node that heard them; none when no node has.
    pub heard: Option<Heard>,
    /// Silence after which a level of its has lapsed, in milliseconds.
    pub ttl_ms: u64,
    /// The last thing it did with a task, if the answering node has seen one since it started.
    pub last_act: Option<Act>,
    /// Its host's calendar minus the cluster's, in milliseconds; none when it is not known.
    pub offset_ms: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Act {
    pub did: Did,
    pub msg_id: MsgId,
    pub at: Stamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Did {
    Received,
    Completed,
    Failed,
}

impl Did {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Received => "received",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }
}

/// Something that is wrong now, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    pub kind: ProblemKind,
    /// The agent, the node: whom it is about. Empty for the cluster as a whole.
    pub about: String,
    /// The cluster's calendar, Unix milliseconds; none when that is not known.
    pub since_ms: Option<u64>,
    pub what: String,
    pub effect: String,
    /// The command to run.
    pub command: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemKind {
    NoLeader,
    NodeUnreachable,
    NodeLagging,
    DiskLow,
    MassExpiry,
    AgentOffline,
    AgentDraining,
    ClockSkew,
    CertificateEnds,
}

impl ProblemKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoLeader => "no_leader",
            Self::NodeUnreachable => "node_unreachable",
            Self::NodeLagging => "node_lagging",
            Self::DiskLow => "disk_low",
            Self::MassExpiry => "mass_expiry",
            Self::AgentOffline => "agent_offline",
            Self::AgentDraining => "agent_draining",
            Self::ClockSkew => "clock_skew",
            Self::CertificateEnds => "certificate_ends",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heard {
    pub node: NodeId,
    pub level1_age_ms: u64,
    pub level2_age_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClusterView {
    pub cluster: Name,
    pub leader: Option<NodeId>,
    pub term: u64,
    pub nodes: Vec<NodeView>,
    pub agents: u64,
    pub unfinished: u64,
    pub rules_revision: u64,
    pub as_of: Stamp,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeView {
    pub node_id: NodeId,
    pub client_addr: String,
    pub peer_addr: String,
    /// None when it did not answer.
    pub report: Option<NodeReport>,
}

/// What a node says of itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    pub pid: u32,
    pub role: Role,
    pub term: u64,
    pub applied: u64,
    /// Of every write up to `applied`: equal on all nodes at the same position.
    pub state_hash: u64,
    /// This node's calendar minus the cluster's, in milliseconds; none until a leader was heard.
    pub offset_ms: Option<i64>,
    pub sessions: u64,
    /// None when its HTTP door is closed.
    pub http_addr: Option<String>,
    /// Certificates it sees at work, its own and those of its connections, that end within 30 days; the
    /// first to end first, at most 100.
    pub ending: Vec<Ending>,
    /// What its disk still has; none where that can't be asked.
    pub free_bytes: Option<u64>,
    /// Less than its file's `low_water_mib`: it takes no new work in.
    pub space_is_low: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Ending {
    /// Unix milliseconds.
    pub at_ms: u64,
    pub whose: Principal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Leader,
    Follower,
    Learner,
    Candidate,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::Follower => "follower",
            Self::Learner => "learner",
            Self::Candidate => "candidate",
        }
    }
}

/// Between nodes, besides the Raft streams.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PeerFrame {
    /// Commands for the leader, of clients attached to the sender. Answered by `Proposed`.
    Propose {
        id: u64,
        commands: Vec<Command>,
    },
    Proposed {
        id: u64,
        result: Result<Vec<Reply>, Box<ErrorReply>>,
    },
    /// Asks the leader for a position up to which a read must wait. Answered by `ReadAt`.
    ReadIndex {
        id: u64,
    },
    ReadAt {
        id: u64,
        result: Result<u64, Box<ErrorReply>>,
    },
    /// The heartbeats of the agents that the sender holds, once a second, also when there is nothing
    /// new. A long one comes in parts.
    Summary(Summary),
    /// The sender's estimate of cluster time; only the leader's counts.
    Clock {
        term: u64,
        stamp: Stamp,
    },
    Report {
        id: u64,
    },
    Reported {
        id: u64,
        report: NodeReport,
    },
    /// Asks the leader for its calendar; the asker halves the round trip. Answered by `Calendar`.
    AskCalendar {
        id: u64,
    },
    Calendar {
        id: u64,
        /// None where the asked node does not lead.
        wall_ms: Option<u64>,
    },
    /// The sender's calendar minus the cluster's, once a second, where it is known.
    Offset {
        offset_ms: i64,
    },
    /// First on a new link: by which data the other node is a member. Answered by `Incarnation`.
    AskIncarnation {
        id: u64,
    },
    Incarnation {
        id: u64,
        incarnation: String,
    },
    /// It is not the data by which the sender knows the other node, which therefore has to stop.
    Disowned,
}

/// A node's word on the agents it holds. On a new link it begins with all of them; after that it
/// tells who came, who went, and the ages of those that were heard since the last one. Each is named
/// once and then known by a number, which is the sender's own.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// What was told before on this link is void.
    pub begins: bool,
    /// Their numbers may be given to others, from this very summary on.
    pub gone: Vec<u32>,
    pub names: Vec<Named>,
    pub ages: Vec<Age>,
    /// On a new link: those whom nobody holds any more, so that a node that was away knows of their
    /// silence too.
    pub hearsay: Vec<Hearsay>,
}

/// When a run that nobody holds was last heard, and by which node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hearsay {
    pub agent_id: AgentId,
    pub instance: InstanceId,
    /// None when the teller never knew of anybody who heard it.
    pub heard: Option<Heard>,
    /// How long ago its silence began to count.
    pub granted_age_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    pub number: u32,
    pub agent_id: AgentId,
    pub instance: InstanceId,
}

/// How long ago both levels were heard, in milliseconds: a duration, since no two clocks agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Age {
    pub number: u32,
    pub level1_age_ms: u64,
    pub level2_age_ms: u64,
    /// Of its host's calendar, where it is known.
    pub offset_ms: Option<i64>,
}
