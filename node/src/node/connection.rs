//! One client connection: who it is, what it asks, and the agents whose sessions run over it.

use std::{sync::Arc, time::Duration};

use reach_protocol::{
    AgentId, AgentState, Code, Command, ErrorReply, InstanceId, Name, Principal, Rules, StateReason, codec,
    frame::{Answer, ClientFrame, NodeFrame, Request, Welcome},
    message::Holder,
};
use reach_transport::{Connection, Endpoint};
use tokio::{sync::Semaphore, time::Instant};

use super::{Shared, delivery::Line, read::AgentFilter};

/// A connection says hello within this time.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// Requests of one connection under way at once; the next one waits unread.
const REQUESTS_MAX: usize = 4_096;
/// The longest a request may ask to take, besides waiting for a message's end.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);
/// The longest a caller may wait for a message's end in one request.
const WAIT_MAX: Duration = Duration::from_secs(300);
/// The user that may initialise a new cluster and is its first operator.
pub const FIRST_OPERATOR: &str = "admin";

pub async fn run(shared: Arc<Shared>, endpoint: Endpoint) {
    while let Some(connection) = endpoint.accept().await {
        let task = serve(shared.clone(), connection);
        shared.clone().spawn(task);
    }
}

async fn serve(shared: Arc<Shared>, connection: Connection) {
    let (tx, mut rx) = connection.link();
    let line = Line { connection: connection.id(), tx };
    let principal = connection.identity().principal.clone();
    let reason = match tokio::time::timeout(HELLO_MAX, rx.recv()).await {
        Ok(Some(bytes)) => match codec::decode("client frame", &bytes) {
            Ok(ClientFrame::Hello { cluster }) if cluster == shared.cluster => None,
            Ok(ClientFrame::Hello { cluster }) => Some(format!(
                "this is cluster {}, not {cluster}: check the context's endpoints",
                shared.cluster
            )),
            Ok(_) => Some("the first frame must be a hello".into()),
            Err(error) => Some(error.to_string()),
        },
        Ok(None) => return,
        Err(_) => Some("no hello came".into()),
    };
    if let Some(reason) = reason {
        tracing::info!(%principal, reason, "connection refused");
        connection.close(&reason);
        return;
    }
    line.send(&NodeFrame::Welcome(welcome(&shared, &principal)));

    let slots = Arc::new(Semaphore::new(REQUESTS_MAX));
    let client = Client { shared: shared.clone(), principal, line, connection: connection.clone(), slots };
    while let Some(bytes) = rx.recv().await {
        match codec::decode("client frame", &bytes) {
            Ok(frame) => client.frame(frame).await,
            Err(error) => {
                tracing::info!(principal = %client.principal, %error, "connection dropped");
                connection.close(&error.to_string());
                break;
            }
        }
    }
    shared.delivery.closed(connection.id()).await;
}

fn welcome(shared: &Shared, principal: &Principal) -> Welcome {
    let (own, others): (Vec<_>, Vec<_>) =
        shared.members().into_iter().partition(|(id, _)| *id == shared.node_id);
    let rules = shared.rules();
    Welcome {
        node_id: shared.node_id,
        principal: principal.clone(),
        stamp: shared.clock.stamp(),
        endpoints: own.into_iter().chain(others).map(|(_, member)| member.client_addr).collect(),
        heartbeat_ms: rules.rules.liveness.heartbeat_ms,
        ttl_ms: rules.rules.liveness.ttl_ms,
    }
}

#[derive(Clone)]
struct Client {
    shared: Arc<Shared>,
    principal: Principal,
    line: Line,
    connection: Connection,
    slots: Arc<Semaphore>,
}

impl Client {
    async fn frame(&self, frame: ClientFrame) {
        let now_ms = self.shared.clock.mono_ms();
        match frame {
            ClientFrame::Hello { .. } => {}
            ClientFrame::Beat { agent_id, instance, seq } => {
                if self.principal.acts_for(&agent_id) {
                    self.shared.heartbeats.beat(&agent_id, &instance, now_ms);
                    self.line.send(&NodeFrame::Beaten { agent_id, seq });
                }
            }
            ClientFrame::Echo { agent_id, instance, .. } => {
                if self.principal.acts_for(&agent_id) {
                    self.shared.heartbeats.echoed(&agent_id, &instance, now_ms);
                }
            }
            ClientFrame::Request { id, timeout_ms, stale, request } => {
                let Ok(slot) = self.slots.clone().acquire_owned().await else { return };
                let client = self.clone();
                self.shared.clone().spawn(async move {
                    let deadline = Instant::now() + Duration::from_millis(timeout_ms).min(TIMEOUT_MAX);
                    let answered = match client.request(id, request, stale, deadline).await {
                        Some(response) => client.line.respond(id, response),
                        None => true,
                    };
                    // A client that no longer reads its answers would be owed more and more of them.
                    if !answered {
                        client.connection.close("too many unread answers");
                    }
                    drop(slot);
                });
            }
        }
    }

    /// None when the answer is sent by somebody else.
    async fn request(
        &self,
        id: u64,
        request: Request,
        stale: bool,
        deadline: Instant,
    ) -> Option<Result<Answer, ErrorReply>> {
        if let Request::Attach { agent_id, instance, held } = request {
            let ready = match self.acts_for(&agent_id) {
                Ok(()) => self.shared.read_barrier(deadline).await,
                Err(error) => Err(error),
            };
            return match ready {
                Ok(()) => {
                    self.shared.delivery.attach(agent_id, instance, held, self.line.clone(), id).await;
                    None
                }
                Err(error) => Some(Err(error)),
            };
        }
        Some(self.answer(request, stale, deadline).await)
    }

    async fn answer(&self, request: Request, stale: bool, deadline: Instant) -> Result<Answer, ErrorReply> {
        let (shared, principal) = (&self.shared, &self.principal);
        match request {
            Request::Register { registration, instance, uptime_ms } => {
                self.acts_for(&registration.agent_id)?;
                shared.register(principal, *registration, instance, uptime_ms, deadline).await
            }
            Request::Attach { .. } => {
                Err(ErrorReply::new(Code::Internal, "an attach is answered by its session"))
            }
            Request::Drain { agent_id, instance } => {
                self.acts_for(&agent_id)?;
                self.set_liveness(&agent_id, instance, AgentState::Draining, deadline).await
            }
            Request::Detach { agent_id, instance } => {
                self.acts_for(&agent_id)?;
                shared.delivery.detach(agent_id.clone(), instance.clone()).await;
                self.set_liveness(&agent_id, instance, AgentState::Offline, deadline).await
            }
            Request::Remove { agent_id } => {
                let command = Command::Remove { agent_id, author: principal.clone() };
                shared.propose(command, deadline).await.map(|_| Answer::Done)
            }
            Request::Received { agent_id, instance, msg_id, attempt } => {
                let holder = self.holder(agent_id, instance)?;
                shared.report_on(Command::Received { msg_id, attempt, holder }, deadline).await
            }
            Request::Complete { agent_id, instance, msg_id, attempt, excerpt, result, cost } => {
                let holder = self.holder(agent_id, instance)?;
                shared.complete(msg_id, attempt, holder, (excerpt, result, cost), deadline).await
            }
            Request::Fail { agent_id, instance, msg_id, attempt, reason, message } => {
                let holder = self.holder(agent_id, instance)?;
                shared.report_on(Command::Fail { msg_id, attempt, holder, reason, message }, deadline).await
            }
            Request::Release { agent_id, instance, msg_id, attempt } => {
                let holder = self.holder(agent_id, instance)?;
                shared.report_on(Command::Release { msg_id, attempt, holder }, deadline).await
            }
            Request::Submit { envelope, sent_at_ms, wait_ms } => {
                shared.submit(principal, *envelope, sent_at_ms, deadline, until(wait_ms)).await
            }
            Request::Message { msg_id, wait_ms } => {
                self.fresh(stale, deadline).await?;
                shared.read_message(principal, msg_id, until(wait_ms)).await
            }
            Request::Payload { msg_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_payload(principal, &msg_id)
            }
            Request::Result { msg_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_result(principal, &msg_id)
            }
            Request::Trace { trace_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_trace(principal, &trace_id)
            }
            Request::Messages { limit, after } => {
                self.fresh(stale, deadline).await?;
                shared.list_messages(principal, limit, after.as_ref())
            }
            Request::Agents { state, capability, metadata, limit, after } => {
                self.fresh(stale, deadline).await?;
                Ok(shared.list_agents(&AgentFilter { state, capability, metadata }, limit, after.as_ref()))
            }
            Request::Agent { agent_id } => {
                self.fresh(stale, deadline).await?;
                shared.read_agent(&agent_id)
            }
            // The one read that must work when nothing else does.
            Request::Cluster => Ok(shared.read_cluster().await),
            Request::Initialise => self.initialise(deadline).await,
            Request::Rules => {
                self.fresh(stale, deadline).await?;
                Ok(Answer::Rules(Box::new((*shared.rules()).clone())))
            }
            Request::ApplyRules { text, expect } => {
                let rules = reach_config::rules::parse(&text)
                    .map_err(|error| ErrorReply::new(Code::Invalid, error.to_string()))?;
                let command =
                    Command::ApplyRules { rules: Box::new(rules), text, expect, author: principal.clone() };
                match shared.propose(command, deadline).await? {
                    reach_protocol::Reply::Rules(record) => Ok(Answer::Rules(record)),
                    _ => Ok(Answer::Rules(Box::new((*shared.rules()).clone()))),
                }
            }
        }
    }

    async fn fresh(&self, stale: bool, deadline: Instant) -> Result<(), ErrorReply> {
        if stale { Ok(()) } else { self.shared.read_barrier(deadline).await }
    }

    /// The first entry of a new cluster: its members, its first rules and its first operator.
    async fn initialise(&self, deadline: Instant) -> Result<Answer, ErrorReply> {
        let shared = &self.shared;
        let operator = Name::parse(FIRST_OPERATOR).expect("a legal name");
        if self.principal != Principal::User(operator.clone()) {
            let message = format!(
                "only user/{FIRST_OPERATOR} may initialise a cluster: use the context in its admin folder"
            );
            return Err(ErrorReply::new(Code::Forbidden, message));
        }
        if shared.rules().revision > 0 {
            return Err(ErrorReply::new(Code::IllegalTransition, "this cluster is initialised already"));
        }
        if shared.replica.members().is_empty() {
            let members = shared.initial_members.clone();
            shared.replica.initialise(members).await.map_err(|error| {
                ErrorReply::new(Code::NoMajority, format!("the nodes could not be brought together: {error}"))
            })?;
        }
        let mut rules = Rules::default();
        rules.grants.operators.push(operator);
        let command = Command::Init { cluster: shared.cluster.clone(), rules: Box::new(rules) };
        shared.propose(command, deadline).await.map(|_| Answer::Done)
    }

    async fn set_liveness(
        &self,
        agent_id: &AgentId,
        instance: InstanceId,
        state: AgentState,
        deadline: Instant,
    ) -> Result<Answer, ErrorReply> {
        // The heartbeats may change it in between: then the change is asked for again.
        loop {
            self.shared.read_barrier(deadline).await?;
            let record = self.shared.replica.tables().live().agents.get(agent_id).cloned();
            let Some(record) = record.filter(|record| record.instance == instance) else {
                return Err(ErrorReply::new(
                    Code::StaleInstance,
                    "a later run of this agent took its place: stop this run",
                ));
            };
            // Offline is further than draining.
            if record.state >= state {
                return Ok(Answer::Done);
            }
            let command = Command::SetLiveness {
                agent_id: agent_id.clone(),
                instance: instance.clone(),
                liveness_seq: record.liveness_seq,
                state,
                reason: StateReason::Asked,
            };
            self.shared.propose(command, deadline).await?;
        }
    }

    fn holder(&self, agent_id: AgentId, instance: InstanceId) -> Result<Holder, ErrorReply> {
        self.acts_for(&agent_id)?;
        Ok(Holder { agent_id, instance })
    }

    fn acts_for(&self, agent_id: &AgentId) -> Result<(), ErrorReply> {
        if self.principal.acts_for(agent_id) {
            return Ok(());
        }
        let message = format!(
            "{} may not act as agent {agent_id}: use a certificate issued with `agent-reach certs issue --agent {agent_id}`",
            self.principal
        );
        Err(ErrorReply::new(Code::Forbidden, message))
    }
}

fn until(wait_ms: Option<u64>) -> Option<Instant> {
    wait_ms.map(|ms| Instant::now() + Duration::from_millis(ms).min(WAIT_MAX))
}
