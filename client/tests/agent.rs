//! An agent against a scripted node: what it stores, says and runs, in which order, and what is
//! left after an end at any point.

mod fake;

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc as std_mpsc,
    },
    time::Duration,
};

use fake::{Cluster, Node, Peer, agent_id, envelope, finished, msg_id, worker};
use reach_client::{
    Done, Error, Failure, InboxError, RunningAgent, Status, Stopped, Task,
    protocol::{
        Capability, Code, ErrorReply, EventRow, Json, Stamp,
        event::{DeliveredEvent, Span, Word},
        frame::{Answer, ClientFrame, Held, NodeFrame, Request, Verdict},
    },
};
use tempfile::TempDir;
use tokio::sync::{Semaphore, mpsc};

/// One node, one inbox, and a handler that runs until the test lets it.
struct Bench {
    cluster: Cluster,
    node: Node,
    dir: TempDir,
    runs: Arc<AtomicU32>,
    /// Each permit lets one handler finish.
    go: Arc<Semaphore>,
    started: mpsc::Receiver<Started>,
    starting: mpsc::Sender<Started>,
    stopped: mpsc::Receiver<String>,
    stopping: mpsc::Sender<String>,
}

struct Started {
    msg_id: String,
    resumed: bool,
}

/// Tells when the handler it is part of has been dropped.
struct Guard(mpsc::Sender<String>, String);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.try_send(self.1.clone());
    }
}

impl Bench {
    fn new() -> Self {
        let cluster = Cluster::new();
        let node = cluster.node(1);
        let (starting, started) = mpsc::channel(64);
        let (stopping, stopped) = mpsc::channel(64);
        Self {
            cluster,
            node,
            dir: tempfile::tempdir().unwrap(),
            runs: Arc::default(),
            go: Arc::new(Semaphore::new(0)),
            started,
            starting,
            stopped,
            stopping,
        }
    }

    async fn connect(&self, slots: u32) -> Result<RunningAgent, Error> {
        let (runs, go) = (self.runs.clone(), self.go.clone());
        let (starting, stopping) = (self.starting.clone(), self.stopping.clone());
        worker(&self.dir)
            .max_concurrency(slots)
            .handler(move |task: Task| {
                let (runs, go) = (runs.clone(), go.clone());
                let (starting, stopping) = (starting.clone(), stopping.clone());
                async move {
                    let msg_id = task.msg_id.to_string();
                    let counts = u32::from(msg_id.starts_with('m'));
                    let run = runs.fetch_add(counts, Ordering::SeqCst) + counts;
                    let _guard = Guard(stopping, msg_id.clone());
                    let _ = starting.try_send(Started { msg_id, resumed: task.resumed });
                    go.acquire().await.unwrap().forget();
                    Ok(Done::new(Json::of(&run).unwrap()).excerpt("counted"))
                }
            })
            .connect(self.cluster.agent(&[&self.node]))
            .await
    }

    /// A running agent, the node's end of it, and what it held.
    async fn start(&self, verdict: Verdict) -> (RunningAgent, Peer, Vec<Held>) {
        let (agent, (peer, held)) = tokio::join!(self.connect(8), self.node.attach(verdict));
        (agent.unwrap(), peer, held)
    }

    async fn started(&mut self) -> Started {
        tokio::time::timeout(Duration::from_secs(20), self.started.recv()).await.expect("a start").unwrap()
    }

    /// Has another task taken and started: all answers that the node gave before have been seen.
    async fn sync(&mut self, peer: &mut Peer, id: &str) {
        assert!(id.starts_with('s'), "not counted as a run");
        peer.deliver(id, 0);
        peer.take(id, 0).await;
        self.started().await;
    }

    fn runs(&self) -> u32 {
        self.runs.load(Ordering::SeqCst)
    }
}

fn held(id: &str, attempt: u32, finished: bool) -> Held {
    Held { msg_id: msg_id(id), attempt, finished }
}

#[tokio::test]
async fn a_task_runs_beside_the_round_that_takes_its_receipt() {
    let mut bench = Bench::new();
    let (agent, mut peer, held) = bench.start(Verdict::Keep).await;
    assert_eq!((held.len(), agent.state()), (0, Status::Attached { node: "n1".parse().unwrap() }));
    peer.deliver("m1", 0);
    // Said first, then run; neither the run nor its end waits for the answer.
    let received = peer.received("m1", 0).await;
    assert!(!bench.started().await.resumed);
    bench.go.add_permits(1);
    let (id, result) = peer.completed("m1", 0).await;
    assert_eq!(result, "1");
    // Not now: both come again.
    peer.refuse(received, Code::NoLeader);
    let received = peer.received("m1", 0).await;
    peer.refuse(id, Code::NoLeader);
    let (id, _) = peer.completed("m1", 0).await;
    // In whichever order the cluster takes them.
    peer.answer(id, Answer::Done);
    peer.answer(received, Answer::Done);
    bench.sync(&mut peer, "s1").await;
    assert!(peer.pending().is_empty());
    assert_eq!(bench.runs(), 1);
    drop(agent);
}

#[tokio::test]
async fn a_repeated_delivery_is_answered_and_not_run_again() {
    let mut bench = Bench::new();
    let (_agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    // While it runs.
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.go.add_permits(1);
    let (id, _) = peer.completed("m1", 0).await;
    peer.answer(id, Answer::Done);
    bench.sync(&mut peer, "s1").await;
    // After it was recorded: the stored result, under whatever attempt is asked for.
    for (attempt, sync) in [(0, "s2"), (3, "s3")] {
        peer.deliver("m1", attempt);
        peer.take("m1", attempt).await;
        let (id, result) = peer.completed("m1", attempt).await;
        assert_eq!(result, "1");
        peer.answer(id, Answer::Done);
        bench.sync(&mut peer, sync).await;
    }
    assert_eq!(bench.runs(), 1);
}

#[tokio::test]
async fn a_later_attempt_takes_over_without_a_second_run() {
    let mut bench = Bench::new();
    let (_agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    peer.deliver("m1", 2);
    let received = peer.received("m1", 2).await;
    // The older one is not answered any more.
    peer.deliver("m1", 1);
    peer.settle().await;
    assert!(peer.pending().is_empty());
    peer.answer(received, Answer::Done);
    bench.go.add_permits(1);
    let (id, result) = peer.completed("m1", 2).await;
    assert_eq!(result, "1");
    // Too late after all; then the next attempt gets the stored result.
    peer.refuse(id, Code::StaleAttempt);
    peer.settle().await;
    peer.deliver("m1", 3);
    peer.take("m1", 3).await;
    assert_eq!(peer.completed("m1", 3).await.1, "1");
    assert_eq!(bench.runs(), 1);
}

#[tokio::test]
async fn a_run_whose_receipt_is_stale_is_stopped_and_reports_nothing() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    let received = peer.received("m1", 0).await;
    bench.started().await;
    peer.refuse(received, Code::StaleAttempt);
    // The message may have ended with the slot still taken.
    peer.released("m1", 0).await;
    assert_eq!(bench.stopped.recv().await.unwrap(), "m1");
    bench.sync(&mut peer, "s1").await;
    assert_eq!((bench.runs(), agent.abort().await), (1, Stopped::Aborted));
    let (_agent, _peer, found) = bench.start(Verdict::Keep).await;
    assert_eq!(found, [held("s1", 0, false)]);
}

#[tokio::test]
async fn after_a_death_while_running_it_runs_again_as_resumed() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 1);
    peer.take("m1", 1).await;
    bench.started().await;
    agent.abort().await;

    let node_side = async {
        let mut peer = bench.node.accept().await;
        peer.register().await;
        let (id, found) = peer.asked_to_attach().await;
        assert_eq!((found, bench.runs()), (vec![held("m1", 1, false)], 1));
        peer.settle().await;
        assert_eq!(bench.runs(), 1, "nothing runs before the verdict");
        peer.answer(id, Answer::Attached { verdicts: vec![Verdict::Keep] });
        peer
    };
    let (agent, mut peer) = tokio::join!(bench.connect(8), node_side);
    let _agent = agent.unwrap();
    peer.take("m1", 1).await;
    assert!(bench.started().await.resumed);
    bench.go.add_permits(1);
    assert_eq!(peer.completed("m1", 1).await.1, "2");
}

#[tokio::test]
async fn after_a_death_before_the_report_the_result_is_sent_without_a_run() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    bench.go.add_permits(1);
    peer.completed("m1", 0).await;
    agent.abort().await;

    let (_agent, mut peer, found) = bench.start(Verdict::SendResult).await;
    assert_eq!(found, [held("m1", 0, true)]);
    let (id, result) = peer.completed("m1", 0).await;
    assert_eq!(result, "1");
    peer.answer(id, Answer::Done);
    bench.sync(&mut peer, "s1").await;
    assert_eq!(bench.runs(), 1);
}

#[tokio::test]
async fn what_the_cluster_gave_to_another_is_dropped_at_the_verdict() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.received("m1", 0).await;
    bench.started().await;
    agent.abort().await;

    let (agent, mut peer, found) = bench.start(Verdict::Cancel).await;
    assert_eq!(found, [held("m1", 0, false)]);
    peer.released("m1", 0).await;
    peer.settle().await;
    agent.abort().await;
    let (_agent, _peer, found) = bench.start(Verdict::Keep).await;
    assert_eq!((found, bench.runs()), (vec![], 1), "not run again");
}

#[tokio::test]
async fn a_lost_link_disturbs_no_handler() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    let instance = agent.instance().to_string();
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    peer.push(NodeFrame::Goodbye);
    let mut peer = bench.node.accept().await;
    assert_eq!(peer.register().await, instance, "the same run");
    let (id, found) = peer.asked_to_attach().await;
    assert_eq!(found, [held("m1", 0, false)]);
    // A delivery that overtakes the verdict waits for it.
    peer.deliver("m2", 0);
    peer.settle().await;
    assert!(peer.pending().is_empty());
    peer.answer(id, Answer::Attached { verdicts: vec![Verdict::Keep] });
    peer.take("m2", 0).await;
    bench.started().await;
    bench.go.add_permits(1);
    let (id, _) = peer.completed("m1", 0).await;
    peer.answer(id, Answer::Done);
    assert_eq!(bench.runs(), 2);
}

#[tokio::test]
async fn a_cancelled_task_is_stopped_and_its_slot_released() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    peer.push(NodeFrame::Cancel { agent_id: agent_id(), msg_id: msg_id("m1"), attempt: 0 });
    peer.released("m1", 0).await;
    assert_eq!(bench.stopped.recv().await.unwrap(), "m1");
    // Of a task it doesn't have, too: the cluster waits for the answer.
    peer.push(NodeFrame::Cancel { agent_id: agent_id(), msg_id: msg_id("m9"), attempt: 4 });
    peer.released("m9", 4).await;
    agent.abort().await;
    let (_agent, _peer, found) = bench.start(Verdict::Keep).await;
    assert_eq!(found, []);
}

#[tokio::test]
async fn more_tasks_than_slots_wait_their_turn() {
    let mut bench = Bench::new();
    let (agent, (mut peer, _)) = tokio::join!(bench.connect(1), bench.node.attach(Verdict::Keep));
    let _agent = agent.unwrap();
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    assert_eq!(bench.started().await.msg_id, "m1");
    peer.deliver("m2", 0);
    peer.take("m2", 0).await;
    peer.settle().await;
    assert_eq!(bench.runs(), 1);
    bench.go.add_permits(1);
    assert_eq!(bench.started().await.msg_id, "m2");
}

#[tokio::test]
async fn a_fenced_run_stops() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    let error = ErrorReply::new(Code::StaleInstance, "a later run has taken over");
    peer.push(NodeFrame::Fenced { agent_id: agent_id(), error: Box::new(error.clone()) });
    assert_eq!(agent.stopped().await, Stopped::Fenced(Box::new(error)));
    assert_eq!(bench.stopped.recv().await.unwrap(), "m1");
    assert!(matches!(agent.client().submit(envelope()).await, Err(Error::Closed)));
}

#[tokio::test]
async fn any_stale_instance_answer_stops_the_run() {
    let bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    let received = peer.received("m1", 0).await;
    peer.refuse(received, Code::StaleInstance);
    assert!(matches!(agent.stopped().await, Stopped::Fenced(_)));

    let refuse = async {
        let mut peer = bench.node.accept().await;
        let (id, _) = peer.request().await;
        peer.refuse(id, Code::Forbidden);
        peer
    };
    let (refused, _peer) = tokio::join!(bench.connect(1), refuse);
    assert!(matches!(refused, Err(Error::Refused(reply)) if reply.code == Code::Forbidden));
}

#[tokio::test]
async fn an_unanswered_heartbeat_moves_the_agent_to_another_node() {
    let cluster = Cluster::new();
    let (first, second) = (cluster.node(1), cluster.node(2));
    let dir = tempfile::tempdir().unwrap();
    let mut options = cluster.agent(&[&first, &second]);
    options.beat_timeout = Duration::from_millis(200);
    let idle = |_: Task| async { Ok(Done::new(Json::null())) };
    let agent = tokio::spawn(worker(&dir).handler(idle).connect(options));
    let ((peer, _), other) = tokio::select! {
        peer = first.attach(Verdict::Keep) => (peer, &second),
        peer = second.attach(Verdict::Keep) => (peer, &first),
    };
    let _agent = agent.await.unwrap().unwrap();
    peer.deaf.store(true, Ordering::Relaxed);
    peer.left().await;
    other.attach(Verdict::Keep).await;
}

#[tokio::test]
async fn a_blocked_loop_does_not_answer_the_echo_while_the_process_beats() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let dir = tempfile::tempdir().unwrap();
    let (block, blocked) = std_mpsc::sync_channel::<()>(1);
    let blocked = std::sync::Mutex::new(blocked);
    let (inside, is_inside) = std_mpsc::sync_channel(1);
    let options = cluster.agent(&[&node]);
    let (quit, quitting) = tokio::sync::oneshot::channel::<()>();
    let builder = worker(&dir).handler(move |_: Task| {
        // Blocks the only thread of its runtime, as programs do.
        inside.send(()).unwrap();
        let _ = blocked.lock().unwrap().recv();
        async { Ok(Done::new(Json::null())) }
    });
    let program = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let agent = builder.connect(options).await.unwrap();
            let _ = quitting.await;
            agent.abort().await;
        });
    });
    let (mut peer, _) = node.attach(Verdict::Keep).await;
    peer.settle().await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    tokio::task::spawn_blocking(move || is_inside.recv().unwrap()).await.unwrap();

    peer.push(NodeFrame::Echo { seq: 5, agents: vec![agent_id()] });
    peer.beats(5).await;
    let answered = peer.pending().into_iter().any(|frame| matches!(frame, ClientFrame::Echo { .. }));
    assert!(!answered, "the loop was blocked");

    block.send(()).unwrap();
    let mut frames = Vec::new();
    while frames.len() < 2 {
        match peer.frame().await {
            ClientFrame::Echo { seq, .. } => frames.push(format!("echo {seq}")),
            ClientFrame::Request { id, request: Request::Complete { .. }, .. } => {
                peer.answer(id, Answer::Done);
                frames.push("complete".into());
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    frames.sort();
    assert_eq!(frames, ["complete", "echo 5"]);
    quit.send(()).unwrap();
    tokio::task::spawn_blocking(|| program.join().unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_second_process_on_an_inbox_is_refused() {
    let bench = Bench::new();
    let (agent, _peer, _) = bench.start(Verdict::Keep).await;
    let refused = bench.connect(1).await.unwrap_err();
    assert!(matches!(refused, Error::Inbox(InboxError::Locked { .. })), "{refused}");
    agent.abort().await;
    bench.start(Verdict::Keep).await;
}

#[tokio::test]
async fn shutdown_drains_finishes_and_detaches() {
    let mut bench = Bench::new();
    let (agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    let shutdown = tokio::spawn(agent.shutdown());
    let (id, request) = peer.request().await;
    assert!(matches!(request, Request::Drain { .. }));
    peer.answer(id, Answer::Done);
    assert!(!shutdown.is_finished());
    bench.go.add_permits(1);
    let (id, _) = peer.completed("m1", 0).await;
    peer.answer(id, Answer::Done);
    let (id, request) = peer.request().await;
    assert!(matches!(request, Request::Detach { .. }));
    peer.answer(id, Answer::Done);
    assert_eq!(shutdown.await.unwrap(), Stopped::Asked);
}

#[tokio::test]
async fn what_a_handler_asks_for_is_a_child_of_its_task() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let dir = tempfile::tempdir().unwrap();
    let (start, mut started) = mpsc::channel(1);
    let handler = move |task: Task| {
        let start = start.clone();
        async move {
            start.send(()).await.unwrap();
            let by_context = task.context().call(envelope(), Duration::from_secs(20)).await?;
            // A plain client learns of the task from where it is called.
            let by_place = task.context().client().call(envelope(), Duration::from_secs(20)).await?;
            let both = [by_context.result.unwrap().to_value(), by_place.result.unwrap().to_value()];
            Ok(Done::new(serde_json::Value::from(both.to_vec())))
        }
    };
    let connect = worker(&dir).handler(handler).connect(cluster.agent(&[&node]));
    let (agent, (mut peer, _)) = tokio::join!(connect, node.attach(Verdict::Keep));
    let _agent = agent.unwrap();
    peer.deliver("m1", 0);
    let received = peer.received("m1", 0).await;
    // It runs; but a parent must be known as delivered before it has children.
    started.recv().await.unwrap();
    peer.settle().await;
    assert!(peer.pending().is_empty());
    peer.answer(received, Answer::Done);
    for result in ["1", "2"] {
        let (id, request) = peer.request().await;
        let Request::Submit { envelope, .. } = request else { panic!("{request:?}") };
        assert_eq!(envelope.trace_id.as_deref(), Some("t1"));
        assert_eq!(envelope.parent_msg_id.as_deref(), Some("m1"));
        assert_eq!(envelope.source.unwrap().agent_id, agent_id());
        peer.answer(id, finished(&envelope.msg_id.unwrap(), result));
    }
    assert_eq!(peer.completed("m1", 0).await.1, "[1,2]");
}

#[tokio::test]
async fn failures_and_panics_are_reported_and_a_next_attempt_runs() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let dir = tempfile::tempdir().unwrap();
    let handler = |task: Task| async move {
        match (task.attempt, task.msg_id.as_str()) {
            (0, "m1") => Err(Failure::Busy("come back".into())),
            (0, _) => panic!("as the test says"),
            _ => Ok(Done::new(Json::null())),
        }
    };
    let connect = worker(&dir).handler(handler).connect(cluster.agent(&[&node]));
    let (agent, (mut peer, _)) = tokio::join!(connect, node.attach(Verdict::Keep));
    let _agent = agent.unwrap();
    for (id, reason, text) in [("m1", "busy", "come back"), ("m2", "error", "the handler panicked")] {
        peer.deliver(id, 0);
        peer.take(id, 0).await;
        let (request_id, request) = peer.request().await;
        let Request::Fail { reason: said, message, .. } = request else { panic!("{request:?}") };
        assert_eq!((serde_json::to_value(said).unwrap(), message.as_str()), (reason.into(), text));
        // The next attempt may come before the answer has been looked at.
        peer.deliver(id, 1);
        peer.answer(request_id, Answer::Done);
        peer.take(id, 1).await;
        let (request_id, _) = peer.completed(id, 1).await;
        peer.answer(request_id, Answer::Done);
        peer.settle().await;
    }
}

#[tokio::test]
async fn a_result_that_is_too_large_ends_the_task_as_failed() {
    let mut bench = Bench::new();
    let (_agent, mut peer, _) = bench.start(Verdict::Keep).await;
    peer.deliver("m1", 0);
    peer.take("m1", 0).await;
    bench.started().await;
    bench.go.add_permits(1);
    let (id, _) = peer.completed("m1", 0).await;
    peer.refuse(id, Code::TooLarge);
    let (_, request) = peer.request().await;
    assert!(matches!(request, Request::Fail { .. }), "{request:?}");
}

#[tokio::test]
async fn what_an_agent_declares_is_what_it_registers() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let dir = tempfile::tempdir().unwrap();
    let idle = |_: Task| async { Ok(Done::new(Json::null())) };
    let audit = Capability {
        version: Some("2.1".into()),
        cost: Some("0.05".parse().unwrap()),
        input_schema: Some(Json::parse(r#"{"type":"object"}"#).unwrap()),
        ..Capability::new("audit".parse().unwrap(), 2.0)
    };
    let builder = worker(&dir)
        .declare(audit.clone())
        .subscribe("task.*", None)
        .subscribe("task.completed.v1", Some("audits"))
        .ttl(Duration::from_secs(60))
        .handler(idle);
    let agent = tokio::spawn(builder.connect(cluster.agent(&[&node])));
    let mut peer = node.accept().await;
    let (_, request) = peer.request().await;
    let Request::Register { registration, .. } = request else { panic!("{request:?}") };
    assert_eq!(registration.capabilities[1], audit);
    assert_eq!(registration.ttl_ms, Some(60_000));
    let subscriptions = serde_json::to_string(&registration.subscriptions).unwrap();
    assert_eq!(subscriptions, r#"["task.*",{"type":"task.completed.v1","group":"audits"}]"#);
    agent.abort();

    // What is against the rules is told before any node is asked.
    for (wrong, part) in [
        (worker(&dir).subscribe("task.completed", None), "subscription task.completed"),
        (worker(&dir).ttl(Duration::from_secs(601)), "ttl_ms"),
    ] {
        let error = wrong.handler(idle).connect(cluster.agent(&[&node])).await.map(|_| ()).unwrap_err();
        assert!(matches!(&error, Error::Invalid(reason) if reason.contains(part)), "{error}");
    }
}

fn pushed(ack_wait_ms: u64, offsets: std::ops::Range<u64>) -> NodeFrame {
    let event = |offset| EventRow {
        event_type: "load.v1".parse().unwrap(),
        offset,
        at: Stamp::default(),
        msg_id: None,
        trace_id: Some("t9".parse().unwrap()),
        source: None,
        key: None,
        bytes_before: 0,
        data: Json::null(),
    };
    let events = offsets.map(|offset| DeliveredEvent { event: event(offset), deliveries: 1 }).collect();
    NodeFrame::Events { agent_id: agent_id(), group: "crew".parse().unwrap(), ack_wait_ms, events }
}

/// The next word on events, answered: its name, and the offsets that it is on.
async fn word(peer: &mut Peer) -> (String, Vec<Span>) {
    let (id, request) = peer.request().await;
    let Request::Say { group, member, about, word } = request else { panic!("{request:?}") };
    assert_eq!((group.as_str(), member.as_str()), ("crew", agent_id().as_str()));
    peer.answer(id, Answer::Heard(1));
    let name = match word {
        Word::Nack { delay_ms, cause } => format!("nack after {delay_ms} ms: {cause}"),
        other => format!("{other:?}"),
    };
    (name, about.into_iter().flat_map(|(_, spans)| spans).collect())
}

#[tokio::test]
async fn an_event_is_worked_on_and_answered_for() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let dir = tempfile::tempdir().unwrap();
    let go = Arc::new(Semaphore::new(0));
    let gate = go.clone();
    let builder = worker(&dir)
        .subscribe("load.*", Some("crew"))
        .events_at_once(1)
        .on_events(move |delivered, context| {
            let gate = gate.clone();
            async move {
                assert_eq!(context.group().as_str(), "crew");
                gate.acquire().await.unwrap().forget();
                match delivered.event.offset {
                    1 => Err(Failure::Error("no use".into())),
                    3 => panic!("on purpose"),
                    _ => Ok(()),
                }
            }
        })
        .handler(|_: Task| async { Ok(Done::new(Json::null())) });
    let agent = tokio::spawn(builder.connect(cluster.agent(&[&node])));
    let mut peer = node.accept().await;
    peer.register().await;
    let (id, request) = peer.request().await;
    assert!(matches!(request, Request::Attach { window: 2, .. }), "{request:?}");
    peer.answer(id, Answer::Attached { verdicts: vec![] });
    let agent = agent.await.unwrap().unwrap();
    let span = |from| vec![Span { from, to: from + 1 }];

    peer.push(pushed(60_000, 0..1));
    go.add_permits(1);
    assert_eq!(word(&mut peer).await, ("Ack".into(), span(0)));
    peer.push(pushed(60_000, 1..2));
    go.add_permits(1);
    assert_eq!(word(&mut peer).await, ("nack after 1000 ms: no use".into(), span(1)));
    peer.push(pushed(60_000, 3..4));
    go.add_permits(1);
    assert_eq!(word(&mut peer).await, ("nack after 1000 ms: the handler panicked".into(), span(3)));

    // What runs for long keeps its place; what has not begun goes to others.
    peer.push(pushed(400, 4..6));
    let mut words = [word(&mut peer).await, word(&mut peer).await];
    words.sort();
    assert_eq!(words, [("Extend".into(), span(4)), ("GiveBack".into(), span(5))]);

    // Who leaves begins nothing, and ends what runs.
    peer.push(pushed(60_000, 6..7));
    peer.settle().await;
    let stopped = tokio::spawn(agent.shutdown());
    let (mut given_back, mut drained) = (false, false);
    while !(given_back && drained) {
        let (id, request) = peer.request().await;
        let answer = match request {
            Request::Say { word: Word::GiveBack, .. } => {
                given_back = true;
                Answer::Heard(1)
            }
            Request::Say { word: Word::Extend, .. } => Answer::Heard(1),
            Request::Drain { .. } => {
                drained = true;
                Answer::Done
            }
            other => panic!("{other:?}"),
        };
        peer.answer(id, answer);
    }
    go.add_permits(1);
    loop {
        let (id, request) = peer.request().await;
        match request {
            Request::Say { word: Word::Ack, about, .. } => {
                assert_eq!(about[0].1, span(4));
                peer.answer(id, Answer::Heard(1));
                break;
            }
            Request::Say { word: Word::Extend, .. } => peer.answer(id, Answer::Heard(1)),
            other => panic!("{other:?}"),
        }
    }
    let (id, request) = peer.request().await;
    assert!(matches!(request, Request::Detach { .. }), "{request:?}");
    peer.answer(id, Answer::Done);
    assert_eq!(stopped.await.unwrap(), Stopped::Asked);
}
