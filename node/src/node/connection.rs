//! One client connection: who it is, what it asks, and the agents whose sessions run over it.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use reach_protocol::{
    AgentId, Code, ErrorReply, InstanceId, Principal, codec,
    frame::{Answer, ClientFrame, NodeFrame, Request, Welcome},
};
use reach_transport::{Connection, Endpoint};
use tokio::{sync::Semaphore, time::Instant};

use super::{Shared, delivery::Line, requests::acts_for};

/// A connection says hello within this time.
const HELLO_MAX: Duration = Duration::from_secs(5);
/// Requests of one connection under way at once; the next one waits unread.
const REQUESTS_MAX: usize = 4_096;
/// The longest a request may ask to take, besides waiting for a message's end.
const TIMEOUT_MAX: Duration = Duration::from_secs(60);

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
    let _standing = shared.certificates.watch(&connection);
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
    let client = Client {
        shared: shared.clone(),
        principal,
        line,
        connection: connection.clone(),
        slots,
        runs: Arc::default(),
    };
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
    /// The runs that attached over this connection.
    runs: Arc<Mutex<HashMap<AgentId, InstanceId>>>,
}

impl Client {
    async fn frame(&self, frame: ClientFrame) {
        let now_ms = self.shared.clock.mono_ms();
        match frame {
            ClientFrame::Hello { .. } => {}
            ClientFrame::Beat { seq, runs } => {
                for run in runs.iter().filter(|run| self.principal.acts_for(&run.agent_id)) {
                    if !self.shared.heartbeats.beat(&run.agent_id, &run.instance, now_ms) {
                        self.fence_if_stale(&run.agent_id, &run.instance);
                    }
                }
                let calendar_ms = self.shared.clock.cluster_calendar_ms();
                self.line.send(&NodeFrame::Beaten { seq, calendar_ms });
            }
            ClientFrame::Echo { runs, .. } => {
                for run in runs.iter().filter(|run| self.principal.acts_for(&run.agent_id)) {
                    self.shared.heartbeats.echoed(&run.agent_id, &run.instance, now_ms);
                }
            }
            ClientFrame::Offset { runs, offset_ms } => {
                for run in runs.iter().filter(|run| self.principal.acts_for(&run.agent_id)) {
                    self.shared.heartbeats.off_by(&run.agent_id, &run.instance, offset_ms);
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

    fn attaches(&self, agent_id: &AgentId, instance: &InstanceId) {
        let mut runs = self.runs.lock().expect("no panic while it is held");
        runs.insert(agent_id.clone(), instance.clone());
    }

    /// A run that beats and has no session here: it may not know yet that it lost its place.
    fn fence_if_stale(&self, agent_id: &AgentId, instance: &InstanceId) {
        let Ok(slot) = self.slots.clone().try_acquire_owned() else { return };
        let (client, agent_id, instance) = (self.clone(), agent_id.clone(), instance.clone());
        self.shared.clone().spawn(async move {
            // This node may be behind: what it knows alone fences nobody.
            let fresh = client.shared.read_barrier(Instant::now() + TIMEOUT_MAX).await;
            if fresh.is_ok()
                && let Err(error) = client.shared.must_be_current(&agent_id, &instance)
            {
                let error = Box::new(ErrorReply::new(Code::StaleInstance, error.message));
                client.line.send(&NodeFrame::Fenced { agent_id, error });
            }
            drop(slot);
        });
    }

    /// None when the answer is sent by somebody else.
    async fn request(
        &self,
        id: u64,
        request: Request,
        stale: bool,
        deadline: Instant,
    ) -> Option<Result<Answer, ErrorReply>> {
        if let Request::Submit { envelope, .. } = &request {
            let source = envelope.source.as_ref().map(|source| source.agent_id.clone());
            let source = source.unwrap_or_else(|| self.principal.own_agent_id());
            let run = self.runs.lock().expect("no panic while it is held").get(&source).cloned();
            // What it calls on its own account goes with its place.
            if let Some(Err(error)) = run.map(|run| self.shared.must_be_current(&source, &run)) {
                return Some(Err(ErrorReply::new(Code::StaleInstance, error.message)));
            }
        }
        if let Request::Attach { agent_id, instance, held, window } = request {
            let ready = match acts_for(&self.principal, &agent_id) {
                Ok(()) => self.shared.read_barrier(deadline).await,
                Err(error) => Err(error),
            };
            return match ready {
                Ok(()) => {
                    self.attaches(&agent_id, &instance);
                    let line = self.line.clone();
                    self.shared.delivery.attach(agent_id, instance, held, window, line, id).await;
                    None
                }
                Err(error) => Some(Err(error)),
            };
        }
        Some(self.shared.answer(&self.principal, request, stale, deadline).await)
    }
}
