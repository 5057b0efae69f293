//! A node that says what the test tells it to: real QUIC and mutual TLS on the loopback, scripted
//! answers.
#![allow(dead_code, missing_debug_implementations)]

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use reach_client::{
    Agent, AgentBuilder, Credentials, Options,
    protocol::{
        AgentId, Code, Envelope, ErrorReply, Json, MessageState, MsgId, NodeId, Principal, Stamp, codec,
        codec::Encoded,
        envelope::{Response, Target},
        frame::{Answer, ClientFrame, Delivery, Held, MessageView, NodeFrame, Request, Verdict, Welcome},
        id::Name,
        message::{Holder, MessageRecord, Outcome, PendingReason},
    },
};
use reach_transport::{
    Connection, Door, Endpoint, Identity, LinkTx, Options as TransportOptions, authority::Authority,
};
use tokio::{
    sync::{mpsc, watch},
    time::timeout,
};

/// No step of a test takes this long.
const LONG: Duration = Duration::from_secs(20);
pub const HEARTBEAT_MS: u64 = 50;

pub struct Cluster {
    name: Name,
    authority: Authority,
}

impl Cluster {
    pub fn new() -> Self {
        let name: Name = "test".parse().unwrap();
        Self { authority: Authority::new(&name, "client"), name }
    }

    fn credentials(&self, principal: Principal) -> Credentials {
        let identity = Identity::new(self.name.clone(), principal);
        let issued = self.authority.issue(&identity, Duration::from_secs(3600)).unwrap();
        Credentials {
            ca_pem: self.authority.cert_pem().into(),
            cert_pem: issued.cert_pem,
            key_pem: issued.key_pem,
        }
    }

    pub fn node(&self, number: u64) -> Node {
        let credentials = self.credentials(Principal::Node(NodeId(number)));
        let endpoint = Endpoint::server(
            "127.0.0.1:0".parse().unwrap(),
            Door::Client,
            self.name.clone(),
            &credentials,
            TransportOptions::client(),
        )
        .unwrap();
        Node { id: NodeId(number), endpoint }
    }

    /// A port of this cluster that is not for clients.
    pub fn peer_port(&self, number: u64) -> Endpoint {
        let credentials = self.credentials(Principal::Node(NodeId(number)));
        let options = TransportOptions::peer();
        Endpoint::server("127.0.0.1:0".parse().unwrap(), Door::Peer, self.name.clone(), &credentials, options)
            .unwrap()
    }

    pub fn user(&self, nodes: &[&Node]) -> Options {
        self.options(Principal::User("u".parse().unwrap()), nodes)
    }

    pub fn agent(&self, nodes: &[&Node]) -> Options {
        self.options(Principal::Agent(agent_id()), nodes)
    }

    /// A context folder, with a user's certificate.
    pub fn context(&self, nodes: &[&Node]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let endpoints: Vec<String> = nodes.iter().map(|node| node.address()).collect();
        let text = format!(
            "cluster = \"{}\"\nendpoints = {endpoints:?}\nca = \"ca.pem\"\ncert = \"user.pem\"\nkey = \"user.key\"\n",
            self.name
        );
        std::fs::write(dir.path().join("context.toml"), text).unwrap();
        std::fs::write(dir.path().join("ca.pem"), self.authority.cert_pem()).unwrap();
        self.issue("u").write(dir.path(), ["user.pem", "user.key"]);
        dir
    }

    /// Another certificate of the user's, with a key of its own.
    pub fn issue(&self, user: &str) -> Issued {
        Issued(self.credentials(Principal::User(user.parse().unwrap())))
    }

    fn options(&self, principal: Principal, nodes: &[&Node]) -> Options {
        let endpoints = nodes.iter().map(|node| node.address()).collect();
        let mut options = Options::new(self.name.clone(), endpoints, self.credentials(principal));
        options.pause_max = Duration::from_millis(100);
        options
    }
}

pub struct Issued(Credentials);

impl Issued {
    pub fn serial(&self) -> String {
        reach_transport::describe(&self.0.cert_pem).unwrap().serial.to_string()
    }

    /// Those of its two files that are named, `user.pem` and `user.key`.
    pub fn write<const N: usize>(&self, dir: &Path, names: [&str; N]) {
        for name in names {
            let text = if name.ends_with(".pem") { &self.0.cert_pem } else { &self.0.key_pem };
            std::fs::write(dir.join(name), text).unwrap();
        }
    }
}

pub fn agent_id() -> AgentId {
    "worker".parse().unwrap()
}

pub fn worker(dir: &tempfile::TempDir) -> AgentBuilder {
    Agent::builder("worker").capability("work", 1.0).inbox_dir(dir.path())
}

pub struct Node {
    id: NodeId,
    endpoint: Endpoint,
}

impl Node {
    pub fn address(&self) -> String {
        self.endpoint.local_addr().to_string()
    }

    /// The next connection, greeted.
    pub async fn accept(&self) -> Peer {
        let wire = timeout(LONG, self.endpoint.accept()).await.expect("a connection").unwrap();
        let (tx, mut rx) = wire.link();
        let hello = timeout(LONG, rx.recv()).await.expect("a hello").unwrap();
        assert!(matches!(codec::decode("frame", &hello), Ok(ClientFrame::Hello { .. })));
        let welcome = Welcome {
            node_id: self.id,
            principal: wire.identity().principal.clone(),
            stamp: Stamp::default(),
            endpoints: vec![self.address()],
            heartbeat_ms: HEARTBEAT_MS,
            ttl_ms: 3 * HEARTBEAT_MS,
        };
        tx.send(codec::encode(&NodeFrame::Welcome(welcome))).unwrap();
        let (frames, incoming) = mpsc::channel(1024);
        let (beaten, beats) = watch::channel(0);
        let deaf = Arc::new(AtomicBool::new(false));
        let peer = Peer { wire, tx: tx.clone(), incoming, beats, deaf: deaf.clone() };
        tokio::spawn(async move {
            while let Some(frame) = rx.recv().await {
                match codec::decode("frame", &frame).unwrap() {
                    ClientFrame::Beat { seq, .. } => {
                        beaten.send_modify(|beats| *beats += 1);
                        if !deaf.load(Ordering::Relaxed) {
                            let _ = tx.send(codec::encode(&NodeFrame::Beaten { seq, calendar_ms: None }));
                        }
                    }
                    frame => {
                        let _ = frames.send(frame).await;
                    }
                }
            }
        });
        peer
    }

    /// The next connection, with its agent registered and attached; every attempt it holds gets
    /// `verdict`.
    pub async fn attach(&self, verdict: Verdict) -> (Peer, Vec<Held>) {
        let mut peer = self.accept().await;
        peer.register().await;
        let (id, held) = peer.asked_to_attach().await;
        peer.answer(id, Answer::Attached { verdicts: vec![verdict; held.len()] });
        (peer, held)
    }
}

/// One client, as the node sees it.
pub struct Peer {
    wire: Connection,
    tx: LinkTx,
    incoming: mpsc::Receiver<ClientFrame>,
    beats: watch::Receiver<u64>,
    /// Heartbeats are not answered.
    pub deaf: Arc<AtomicBool>,
}

impl Peer {
    /// Of the certificate that the client showed.
    pub fn serial(&self) -> String {
        self.wire.certificate().expect("it is QUIC").serial.to_string()
    }

    pub async fn frame(&mut self) -> ClientFrame {
        timeout(LONG, self.incoming.recv()).await.expect("a frame in time").expect("a link that lasts")
    }

    pub async fn request(&mut self) -> (u64, Request) {
        match self.frame().await {
            ClientFrame::Request { id, request, .. } => (id, request),
            other => panic!("expected a request, not {other:?}"),
        }
    }

    /// Waits for so many more heartbeats.
    pub async fn beats(&mut self, more: u64) {
        let goal = *self.beats.borrow() + more;
        timeout(LONG, self.beats.wait_for(|beats| *beats >= goal)).await.expect("heartbeats").unwrap();
    }

    /// What came and wasn't looked at.
    pub fn pending(&mut self) -> Vec<ClientFrame> {
        std::iter::from_fn(|| self.incoming.try_recv().ok()).collect()
    }

    pub fn push(&self, frame: NodeFrame) {
        self.tx.send(codec::encode(&frame)).unwrap();
    }

    pub fn answer(&self, id: u64, answer: Answer) {
        self.push(NodeFrame::Response { id, response: Ok(Box::new(answer)) });
    }

    pub fn refuse(&self, id: u64, code: Code) {
        let error = ErrorReply::new(code, "as the test says");
        self.push(NodeFrame::Response { id, response: Err(Box::new(error)) });
    }

    pub fn hang_up(self) {
        self.wire.close("as the test says");
    }

    /// Waits until the client has left this node.
    pub async fn left(mut self) {
        let gone = async { while self.incoming.recv().await.is_some() {} };
        timeout(LONG, gone).await.expect("the client leaves");
    }

    /// Answers the registration and returns the instance.
    pub async fn register(&mut self) -> String {
        let (id, request) = self.request().await;
        let Request::Register { registration, instance, .. } = request else { panic!("{request:?}") };
        assert_eq!(registration.agent_id, agent_id());
        let answer = Answer::Registered {
            instance: instance.clone(),
            heartbeat_ms: HEARTBEAT_MS,
            ttl_ms: 3 * HEARTBEAT_MS,
        };
        self.answer(id, answer);
        instance.to_string()
    }

    pub async fn asked_to_attach(&mut self) -> (u64, Vec<Held>) {
        let (id, request) = self.request().await;
        let Request::Attach { held, .. } = request else { panic!("{request:?}") };
        (id, held)
    }

    pub fn deliver(&self, id: &str, attempt: u32) {
        let delivery = Delivery {
            agent_id: agent_id(),
            msg_id: msg_id(id),
            trace_id: "t1".parse().unwrap(),
            flow_seq: 1,
            attempt,
            expires_in_ms: 60_000,
            envelope: Encoded::new(&Envelope { msg_id: Some(msg_id(id)), ..envelope() }),
        };
        self.push(NodeFrame::Deliver(Box::new(delivery)));
    }

    /// The next request must be `received`; it is not answered yet.
    pub async fn received(&mut self, id: &str, attempt: u32) -> u64 {
        let (request_id, request) = self.request().await;
        match &request {
            Request::Received { msg_id, attempt: which, .. }
                if msg_id.as_str() == id && *which == attempt =>
            {
                request_id
            }
            _ => panic!("expected received of {id}, not {request:?}"),
        }
    }

    /// The next request must be `received`; it is answered.
    pub async fn take(&mut self, id: &str, attempt: u32) {
        let request_id = self.received(id, attempt).await;
        self.answer(request_id, Answer::Done);
    }

    /// The next request must be a result; it is not answered yet.
    pub async fn completed(&mut self, id: &str, attempt: u32) -> (u64, String) {
        let (request_id, request) = self.request().await;
        match request {
            Request::Complete { msg_id, attempt: which, result, .. }
                if msg_id.as_str() == id && which == attempt =>
            {
                (request_id, result.as_str().to_owned())
            }
            _ => panic!("expected complete of {id}, not {request:?}"),
        }
    }

    pub async fn released(&mut self, id: &str, attempt: u32) {
        let (request_id, request) = self.request().await;
        match &request {
            Request::Release { msg_id, attempt: which, .. } if msg_id.as_str() == id && *which == attempt => {
                self.answer(request_id, Answer::Done);
            }
            _ => panic!("expected release of {id}, not {request:?}"),
        }
    }

    /// A full round trip through the session's loop: what it was sent before has been looked at.
    pub async fn settle(&mut self) {
        self.push(NodeFrame::Echo { seq: 77, agents: vec![agent_id()] });
        match self.frame().await {
            ClientFrame::Echo { seq: 77, .. } => {}
            other => panic!("expected an echo, not {other:?}"),
        }
    }
}

pub fn msg_id(id: &str) -> MsgId {
    id.parse().unwrap()
}

pub fn envelope() -> Envelope {
    Envelope::request(vec!["work".parse().unwrap()], Json::parse("{\"n\":1}").unwrap())
}

fn record(id: &MsgId, state: MessageState) -> MessageRecord {
    MessageRecord {
        msg_id: id.clone(),
        trace_id: "t1".parse().unwrap(),
        flow_seq: 1,
        parent: None,
        source: "user:u".parse().unwrap(),
        principal: Principal::User("u".parse().unwrap()),
        target: Target::Agent(agent_id()),
        content_hash: [0; 16],
        shape: String::new(),
        accepted: Stamp::default(),
        expires_ms: 1,
        state,
        since: Stamp::default(),
        attempt: 0,
        retries: 0,
        retry_at_ms: None,
        avoid: Vec::new(),
        warnings: Vec::new(),
    }
}

/// Accepted, and not at its end.
pub fn waiting(id: &MsgId) -> Answer {
    let record = record(id, MessageState::Pending { reason: PendingReason::Saturated });
    Answer::Message(Box::new(MessageView {
        record: record.into(),
        response: None,
        hops: Vec::new(),
        dead_letter: None,
    }))
}

pub fn finished(id: &MsgId, result: &str) -> Answer {
    let holder = Holder { agent_id: agent_id(), instance: "i1".parse().unwrap() };
    let outcome = Outcome { excerpt: "done".into(), cost: None, result_bytes: 1 };
    let record = record(id, MessageState::Completed { holder, outcome });
    let response = Response::of(&record, Some(Json::parse(result).unwrap()));
    Answer::Message(Box::new(MessageView {
        record: record.into(),
        response,
        hops: Vec::new(),
        dead_letter: None,
    }))
}
