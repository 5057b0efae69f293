//! The HTTP door: every route, every kind of bad input, and an agent that has nothing but HTTP, on
//! three nodes.

mod support;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use agent_reach::{cli::cluster_new, node::Node};
use anyhow::{Context as _, ensure};
use reach_client::{Client, Options};
use reach_config::{Layout, NodeConfig, layout::NODE_FILE};
use reach_protocol::{NodeId, frame::Request};
use serde_json::{Value, json};
use tokio::{runtime::Runtime, sync::oneshot, task::JoinHandle};

/// Above what the door takes at all.
const BYTES_MAX: usize = 17 << 20;
const LONG: Duration = Duration::from_secs(60);

/// Three nodes in this process, and the addresses of their HTTP doors.
struct Cluster {
    runtime: Option<Runtime>,
    doors: Vec<String>,
    running: Vec<(oneshot::Sender<()>, JoinHandle<()>)>,
    dir: tempfile::TempDir,
}

impl Cluster {
    fn start() -> anyhow::Result<Self> {
        let dir = tempfile::tempdir()?;
        let out = dir.path().join("cluster");
        let hosts: Vec<String> =
            (1..=3).map(|id| format!("n{id}=127.0.0.1:{}", support::free_port() + 1)).collect();
        let layout = Layout::new("test".parse()?, &hosts)?;
        cluster_new::write(&layout, &out)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let (mut doors, mut running) = (Vec::new(), Vec::new());
        for id in 1..=3 {
            let config = NodeConfig::load(&out.join(NodeId(id).to_string()).join(NODE_FILE))?;
            doors.push(config.http_listen.context("HTTP is on by default")?.to_string());
            let node = runtime.block_on(Node::start(config))?;
            let (stop, stopped) = oneshot::channel::<()>();
            let task = runtime.spawn(async move {
                if let Err(exit) = node.run(async { drop(stopped.await) }).await {
                    panic!("a node ended: {exit:?}");
                }
            });
            running.push((stop, task));
        }
        let cluster = Self { runtime: Some(runtime), doors, running, dir };
        ensure!(cluster.ask(0, "GET", "/readyz", None).code() == "no_leader", "nothing to be ready for yet");
        cluster.runtime().block_on(async {
            let client = Client::connect(Options::from_context(out.join("admin"))?).await?;
            client.request(Request::Initialise, LONG).await
        })?;
        let deadline = Instant::now() + LONG;
        while (0..3).any(|node| cluster.ask(node, "GET", "/readyz", None).status != 200) {
            ensure!(Instant::now() < deadline, "the nodes never were ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(cluster)
    }

    fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().expect("it goes last")
    }

    fn stop(mut self) -> anyhow::Result<()> {
        for (stop, task) in std::mem::take(&mut self.running) {
            let _ = stop.send(());
            self.runtime().block_on(task)?;
        }
        Ok(())
    }

    fn ask(&self, node: usize, method: &str, path: &str, body: Option<Value>) -> Answer {
        let body = body.map(|body| ("application/json", body.to_string()));
        self.send(node, method, path, &[], body.as_ref().map(|(kind, body)| (*kind, body.as_bytes())))
    }

    fn get(&self, path: &str) -> Value {
        self.ask(0, "GET", path, None).ok()
    }

    /// One request over a connection of its own, written byte for byte.
    fn send(
        &self,
        node: usize,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<(&str, &[u8])>,
    ) -> Answer {
        let mut stream = TcpStream::connect(&self.doors[node]).expect("the door is open");
        stream.set_read_timeout(Some(LONG)).expect("a timeout above zero");
        let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "Host") {
            head += &format!("Host: {}\r\n", self.doors[node]);
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        if let Some((kind, body)) = body {
            head += &format!("Content-Type: {kind}\r\nContent-Length: {}\r\n", body.len());
        }
        stream.write_all(format!("{head}\r\n").as_bytes()).expect("the head is taken");
        if let Some((_, body)) = body {
            // Refused by its length, a body is not read to its end.
            let _ = stream.write_all(body);
        }
        Answer::read(stream)
    }

    /// Asks until the answer is as expected; fails after a minute.
    fn until(&self, path: &str, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + LONG;
        loop {
            let value = self.get(path);
            if is(&value) {
                return value;
            }
            assert!(Instant::now() < deadline, "{path} never {what}: {value}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn register(&self, agent_id: &str, instance: &str) {
        let body =
            json!({ "instance_id": instance, "capabilities": [{ "name": "echo" }], "max_concurrency": 1 });
        let said = self.ask(0, "PUT", &format!("/v1/agents/{agent_id}"), Some(body)).ok();
        assert_eq!(said, json!({ "instance_id": instance, "ttl_ms": 9000, "heartbeat_ms": 3000 }));
    }
}

/// A failed test must not wait for nodes that nobody stopped.
impl Drop for Cluster {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[derive(Debug)]
struct Answer {
    status: u16,
    headers: String,
    body: String,
}

impl Answer {
    fn read(mut stream: TcpStream) -> Self {
        let mut bytes = Vec::new();
        // A refused body leaves a reset behind the answer.
        let _ = stream.read_to_end(&mut bytes);
        let text = String::from_utf8(bytes).expect("answers are UTF-8");
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
        let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status");
        Self { status, headers: head.to_ascii_lowercase(), body: body.to_string() }
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|_| panic!("not JSON: {self:?}"))
    }

    fn ok(self) -> Value {
        assert_eq!(self.status, 200, "{self:?}");
        self.json()
    }

    fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_string()
    }
}

fn task() -> Value {
    json!({ "target": { "selector": { "capabilities": ["echo"] } }, "payload": { "text": "hello" } })
}

/// The members of an object, so that a test says which there are and not what a clock said.
fn keys(value: &Value) -> Vec<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn a_task_goes_there_and_back() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    assert_eq!(cluster.get("/healthz"), json!({ "status": "alive" }));
    assert_eq!(cluster.get("/readyz"), json!({ "status": "ready" }));

    let nobody = cluster.ask(0, "POST", "/v1/messages", Some(task()));
    assert_eq!((nobody.status, nobody.code().as_str()), (422, "no_candidate"));
    assert_eq!(nobody.json()["hint"]["missing"], json!(["echo"]));

    cluster.register("e1", "run1");
    let accepted = cluster.ask(1, "POST", "/v1/messages", Some(task()));
    assert_eq!(accepted.status, 202);
    let message = accepted.json();
    let id = message["msg_id"].as_str().context("an id")?;
    assert!(accepted.headers.contains(&format!("location: /v1/messages/{}", id.to_ascii_lowercase())));
    assert_eq!(
        (&message["source"], &message["sent_by"], &message["state"]),
        (&json!("http-loopback"), &json!("http-loopback"), &json!("matched"))
    );

    // Any node holds the session of an agent that polls.
    let inbox = cluster.ask(2, "GET", "/v1/agents/e1/inbox?instance=run1&wait=30s&max=5", None).ok();
    let fetched = &inbox["items"][0];
    assert_eq!(keys(fetched), ["attempt", "envelope", "expires_in_ms", "flow_seq", "msg_id", "trace_id"]);
    assert_eq!(
        (&fetched["msg_id"], &fetched["envelope"]["payload"]),
        (&json!(id), &json!({ "text": "hello" }))
    );
    let again = cluster.ask(2, "GET", "/v1/agents/e1/inbox?instance=run1", None).ok();
    assert_eq!(again, json!({ "items": [] }), "it was given a moment ago");

    let me = json!({ "agent_id": "e1", "instance_id": "run1", "attempt": 0 });
    let path = |verb: &str| format!("/v1/messages/{id}/{verb}");
    let early = cluster.ask(0, "POST", &path("progress"), Some(me.clone()));
    assert_eq!((early.status, early.code().as_str()), (409, "stale_attempt"));
    let received = cluster.ask(0, "POST", &path("received"), Some(me.clone())).ok();
    assert_eq!(received["state"], "acknowledged");
    assert_eq!(cluster.ask(1, "POST", &path("progress"), Some(me.clone())).ok()["state"], "acknowledged");
    let beat = json!({ "instance_id": "run1", "ready": true });
    let agent = cluster.ask(1, "POST", "/v1/agents/e1/heartbeat", Some(beat)).ok();
    assert_eq!((&agent["state"], &agent["running"]), (&json!("ready"), &json!(1)));

    // A caller that asks again by the id waits for the end.
    let door = cluster.doors[2].clone();
    let waiting = std::thread::spawn({
        let path = format!("/v1/messages/{id}?wait=60s");
        move || {
            let mut stream = TcpStream::connect(&door).expect("the door is open");
            let head = format!("GET {path} HTTP/1.1\r\nHost: {door}\r\nConnection: close\r\n\r\n");
            stream.write_all(head.as_bytes()).expect("the head is taken");
            Answer::read(stream).ok()
        }
    });
    let mut done = me.clone();
    done["result"] = json!(["hello"]);
    done["excerpt"] = json!("said hello");
    done["cost"] = json!(0.25);
    let completed = cluster.ask(0, "POST", &path("complete"), Some(done.clone())).ok();
    assert_eq!((&completed["state"], &completed["cost"]), (&json!("completed"), &json!(0.25)));
    assert_eq!(
        cluster.ask(2, "POST", &path("complete"), Some(done)).ok(),
        completed,
        "said twice, recorded once"
    );
    let ended = waiting.join().expect("the thread does not panic");
    assert_eq!(ended["response"]["result"], json!(["hello"]));
    assert_eq!(
        keys(&ended["response"]),
        ["cost", "excerpt", "in_reply_to", "msg_id", "msg_type", "result", "status", "trace_id", "warnings"]
    );
    let way: Vec<_> = ended["hops"].as_array().context("hops")?.iter().map(|hop| &hop["to"]).collect();
    assert_eq!(way, ["pending", "matched", "dispatched", "acknowledged", "completed"]);

    assert_eq!(cluster.get(&path("payload")), json!({ "text": "hello" }));
    assert_eq!(cluster.get(&path("result")), json!(["hello"]));
    let trace = cluster.get(&format!("/v1/traces/{}", message["trace_id"].as_str().context("a trace")?));
    assert_eq!(keys(&trace), ["as_of", "hops", "messages", "trace_id"]);
    let list = cluster.get("/v1/messages?limit=1");
    assert_eq!((&list["items"][0]["msg_id"], &list["next"]), (&json!(id), &Value::Null));
    let agents = cluster.get("/v1/agents?capability=echo&state=ready");
    assert_eq!(agents["items"][0]["agent_id"], "e1");
    assert_eq!(cluster.get("/v1/agents/e1")["instance_id"], "run1");
    assert_eq!(cluster.get("/v1/cluster")["nodes"].as_array().map(Vec::len), Some(3));

    // A caller that waits gets the response itself; one whose task fails gets 200 and the error.
    let fails = std::thread::scope(|scope| {
        let caller = scope.spawn(|| cluster.ask(0, "POST", "/v1/messages?wait=60s", Some(task())));
        let inbox = cluster.ask(1, "GET", "/v1/agents/e1/inbox?instance=run1&wait=30s", None).ok();
        let id = inbox["items"][0]["msg_id"].as_str().expect("a task").to_string();
        let mut body = me.clone();
        body["reason"] = json!("error");
        body["message"] = json!("no");
        let failed = cluster.ask(1, "POST", &format!("/v1/messages/{id}/fail"), Some(body)).ok();
        assert_eq!(failed["state"], "failed");
        caller.join().expect("the thread does not panic")
    });
    assert_eq!((fails.status, &fails.json()["error"]["code"]), (200, &json!("agent_error")));

    // A later run takes the agent over; the earlier one is told at once, where it waits.
    std::thread::scope(|scope| {
        let earlier =
            scope.spawn(|| cluster.ask(0, "GET", "/v1/agents/e1/inbox?instance=run1&wait=60s", None));
        cluster.until("/v1/agents/e1", "was heard", |agent| agent["node"].is_string());
        cluster.register("e1", "run2");
        let told = earlier.join().expect("the thread does not panic");
        assert_eq!((told.status, told.code().as_str()), (409, "stale_instance"));
    });
    let fenced = cluster.ask(0, "POST", "/v1/agents/e1/heartbeat", Some(json!({ "instance_id": "run1" })));
    assert_eq!((fenced.status, fenced.code().as_str()), (409, "stale_instance"));

    let metrics = cluster.send(0, "GET", "/metrics", &[], None);
    assert_eq!(metrics.status, 200);
    for line in ["agent_reach_agents{state=\"ready\"} 1", "agent_reach_messages_unfinished 0"] {
        assert!(metrics.body.lines().any(|found| found == line), "{line} is not in {}", metrics.body);
    }
    assert!(metrics.body.contains("agent_reach_http_answers_total{method=\"POST\",status=\"422\"} 1"));
    cluster.stop()
}

#[test]
fn a_fetched_task_without_received_goes_to_another() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let rules = cluster.send(0, "GET", "/v1/rules", &[], None);
    assert!(rules.headers.contains("etag: \"1\""), "{rules:?}");
    let quick = "[delivery]\ngive_back_after_ms = 1000\nresend_after_ms = 500\n";
    let put = |tag: &str| {
        let body = Some(("application/toml", quick.as_bytes()));
        cluster.send(0, "PUT", "/v1/rules", &[("If-Match", tag)], body)
    };
    let refused = put("\"7\"");
    assert_eq!((refused.status, refused.code().as_str()), (409, "revision_conflict"));
    let applied = put("\"1\"").ok();
    assert_eq!((&applied["revision"], &applied["author"]), (&json!(2), &json!("http-loopback")));

    cluster.register("e1", "r1");
    let message = cluster.ask(0, "POST", "/v1/messages", Some(task())).json();
    let id = message["msg_id"].as_str().context("an id")?;
    let fetch = |agent: &str, instance: &str| {
        let path = format!("/v1/agents/{agent}/inbox?instance={instance}&wait=30s");
        cluster.ask(0, "GET", &path, None).ok()["items"][0].clone()
    };
    assert_eq!(fetch("e1", "r1")["msg_id"], json!(id));
    assert_eq!(fetch("e1", "r1")["attempt"], 0, "given again, the same attempt");
    cluster.register("e2", "r2");
    let moved = fetch("e2", "r2");
    assert_eq!((&moved["msg_id"], &moved["attempt"]), (&json!(id), &json!(1)));
    let late = json!({ "agent_id": "e1", "instance_id": "r1", "attempt": 0 });
    let late = cluster.ask(0, "POST", &format!("/v1/messages/{id}/received"), Some(late));
    assert_eq!((late.status, late.code().as_str()), (409, "stale_attempt"));
    cluster.stop()
}

#[test]
fn bad_input_has_one_clear_answer() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    cluster.register("e1", "r1");
    let json_kind = "application/json";
    let big = format!("{{\"payload\":\"{}\"}}", "x".repeat(BYTES_MAX));
    let over = format!(
        r#"{{"target":{{"selector":{{"capabilities":["echo"]}}}},"payload":"{}"}}"#,
        "x".repeat(1 << 20)
    );
    let secret = r#"{"target":{"selector":{"capabilities":["echo"]}},"payload":"hunter2","intent":7}"#;
    type Case<'a> =
        (&'a str, &'a str, &'a [(&'a str, &'a str)], Option<(&'a str, &'a [u8])>, u16, &'a str, &'a str);
    let cases: Vec<Case<'_>> = vec![
        ("GET", "/v1/nothing", &[], None, 404, "not_found", ""),
        ("GET", "/v1/agents/", &[], None, 404, "not_found", ""),
        ("DELETE", "/v1/agents", &[], None, 405, "method_not_allowed", ""),
        ("GET", "/v1/agents/none", &[], None, 404, "not_found", ""),
        ("GET", "/v1/agents/a%20b", &[], None, 400, "invalid", "agent_id"),
        ("GET", "/v1/agents?colour=red", &[], None, 400, "invalid", "query"),
        ("GET", "/v1/agents?state=asleep", &[], None, 400, "invalid", "query"),
        ("GET", "/v1/messages?limit=many", &[], None, 400, "invalid", "query"),
        ("GET", "/v1/agents/e1/inbox", &[], None, 400, "invalid", "query"),
        ("GET", "/v1/agents/e1/inbox?instance=r1&max=0", &[], None, 400, "invalid", "max"),
        ("GET", "/v1/agents/e1/inbox?instance=r1&wait=1", &[], None, 400, "invalid", "query"),
        ("GET", "/v1/agents/e1/inbox?instance=r1&wait=9h", &[], None, 400, "invalid", "wait"),
        ("GET", "/v1/agents/e1/inbox?instance=r0", &[], None, 409, "stale_instance", ""),
        ("GET", "/healthz", &[("Host", "evil.example")], None, 403, "forbidden", "Host"),
        ("GET", "/healthz", &[("Origin", "http://evil.example")], None, 403, "forbidden", "Origin"),
        ("POST", "/v1/messages", &[], None, 415, "unsupported_media_type", ""),
        ("POST", "/v1/messages", &[], Some(("text/plain", b"{}")), 415, "unsupported_media_type", ""),
        (
            "POST",
            "/v1/messages",
            &[("Content-Encoding", "gzip")],
            Some((json_kind, b"{}")),
            415,
            "unsupported_media_type",
            "",
        ),
        ("POST", "/v1/messages", &[], Some((json_kind, b"")), 400, "invalid", ""),
        ("POST", "/v1/messages", &[], Some((json_kind, b"{\"payload\"")), 400, "invalid", ""),
        ("POST", "/v1/messages", &[], Some((json_kind, b"\xff\xfe")), 400, "invalid", "body"),
        ("POST", "/v1/messages", &[], Some((json_kind, secret.as_bytes())), 400, "invalid", "intent"),
        ("POST", "/v1/messages", &[], Some((json_kind, big.as_bytes())), 413, "too_large", "body"),
        ("POST", "/v1/messages", &[], Some((json_kind, over.as_bytes())), 413, "too_large", "payload"),
        ("PUT", "/v1/agents/e1", &[], Some((json_kind, b"[]")), 400, "invalid", ""),
        (
            "PUT",
            "/v1/agents/e1",
            &[],
            Some((json_kind, br#"{"agent_id":"e2","capabilities":[{"name":"x"}]}"#)),
            400,
            "invalid",
            "agent_id",
        ),
        (
            "PUT",
            "/v1/agents/e1",
            &[],
            Some((json_kind, br#"{"capabilities":[{"name":"No"}]}"#)),
            400,
            "invalid",
            "capabilities[0].name",
        ),
        (
            "POST",
            "/v1/messages/none/received",
            &[],
            Some((json_kind, br#"{"agent_id":"e1","instance_id":"r1","attempt":0}"#)),
            404,
            "not_found",
            "",
        ),
        (
            "POST",
            "/v1/messages/none/fail",
            &[],
            Some((json_kind, br#"{"agent_id":"e1","instance_id":"r1","attempt":0,"reason":"tired"}"#)),
            400,
            "invalid",
            "reason",
        ),
        (
            "PUT",
            "/v1/rules",
            &[("If-Match", "new")],
            Some(("application/toml", b"")),
            400,
            "invalid",
            "If-Match",
        ),
        ("PUT", "/v1/rules", &[], Some(("application/toml", b"[delivery]\nspeed = 1\n")), 400, "invalid", ""),
    ];
    for (method, path, headers, body, status, code, field) in cases {
        let answer = cluster.send(0, method, path, headers, body);
        let said = answer.json();
        let found = (answer.status, said["code"].as_str(), said["field"].as_str().unwrap_or(""));
        assert_eq!(found, (status, Some(code), field), "{method} {path}: {said}");
        assert!(said["message"].as_str().is_some_and(|message| message.len() > 10), "{said}");
        assert!(!answer.body.contains("hunter2"), "content in an error: {said}");
    }

    // A body that never comes, beside many connections that never ask: both are ended, others serve.
    let door = &cluster.doors[0];
    let idle: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(door)).collect::<Result<_, _>>()?;
    let mut slow = TcpStream::connect(door)?;
    let head = format!(
        "POST /v1/messages HTTP/1.1\r\nHost: {door}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{{"
    );
    slow.write_all(head.as_bytes())?;
    assert_eq!(cluster.get("/healthz")["status"], "alive");
    slow.set_read_timeout(Some(LONG))?;
    let mut said = BufReader::new(slow);
    let mut line = String::new();
    said.read_line(&mut line)?;
    assert!(line.starts_with("HTTP/1.1 408"), "{line}");
    for mut stream in idle {
        stream.set_read_timeout(Some(LONG))?;
        let mut rest = Vec::new();
        stream.read_to_end(&mut rest)?;
    }
    cluster.stop()
}

/// Of a moment so many seconds from now.
fn date(seconds: i64) -> String {
    let now = std::time::SystemTime::now();
    let by = Duration::from_secs(seconds.unsigned_abs());
    httpdate::fmt_http_date(if seconds < 0 { now - by } else { now + by })
}

#[test]
fn an_agent_that_tells_its_date_is_told_from_one_whose_clock_is_off() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    for agent_id in ["late", "right", "silent"] {
        cluster.register(agent_id, "i1");
    }
    let beat = |agent_id: &str, date: Option<String>| {
        let body = json!({ "instance_id": "i1", "ready": true }).to_string();
        let headers: Vec<(&str, &str)> = date.iter().map(|date| ("Date", date.as_str())).collect();
        let path = format!("/v1/agents/{agent_id}/heartbeat");
        cluster.send(1, "POST", &path, &headers, Some(("application/json", body.as_bytes()))).ok()
    };
    let seen = |agent_id: &str| {
        beat("late", Some(date(-3_600)));
        beat("right", Some(date(0)));
        beat("silent", None);
        cluster.get(&format!("/v1/agents/{agent_id}"))
    };
    // On another node than the one that heard it, within the time of two heartbeats.
    let deadline = Instant::now() + LONG;
    let is_off =
        |value: &Value| value["offset_ms"].as_i64().is_some_and(|ms| (-3_602_000..-3_598_000).contains(&ms));
    while !is_off(&seen("late")) || seen("right")["offset_ms"].is_null() {
        ensure!(Instant::now() < deadline, "never seen: {}", seen("late"));
        std::thread::sleep(Duration::from_millis(100));
    }
    let right = seen("right")["offset_ms"].as_i64().context("it is known")?;
    ensure!(right.abs() <= 1_000, "{right}");
    ensure!(seen("silent")["offset_ms"].is_null(), "{}", seen("silent"));
    for node in 0..3 {
        let has = |line: &str| cluster.ask(node, "GET", "/metrics", None).body.lines().any(|own| own == line);
        while !has("agent_reach_agents_skewed 1") {
            ensure!(Instant::now() < deadline, "{}", cluster.ask(node, "GET", "/metrics", None).body);
            seen("late");
            std::thread::sleep(Duration::from_millis(100));
        }
    }
    cluster.stop()
}

struct Script(Child);

impl Script {
    /// The example agent, or a Python text that uses it, with what it prints.
    fn start(
        cluster: &Cluster,
        args: &[&str],
    ) -> anyhow::Result<(Self, impl Iterator<Item = String> + use<>)> {
        let doors: Vec<String> = cluster.doors.iter().map(|door| format!("http://{door}")).collect();
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples");
        let mut child = Command::new("python3")
            .args(args)
            .current_dir(&examples)
            .env("AGENT_REACH_HTTP", doors.join(","))
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .stdout(Stdio::piped())
            .spawn()
            .context("python3 runs the example")?;
        let lines = BufReader::new(child.stdout.take().context("its output is ours")?).lines();
        Ok((Self(child), lines.map_while(Result::ok)))
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn the_python_agent_finishes_what_it_stored_before_it_was_killed() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let inbox = cluster.dir.path().join("inbox");
    let inbox = inbox.to_str().context("a plain path")?;
    let hangs = "import sys, time, agent; agent.work = lambda payload: time.sleep(3600); agent.main()";
    let (first, mut said) = Script::start(&cluster, &["-c", hangs, "words", inbox])?;
    assert_eq!(said.next().as_deref(), Some("words is registered"));

    let envelope =
        json!({ "target": { "selector": { "capabilities": ["text.words"] } }, "payload": "to be or not" });
    let message = cluster.ask(0, "POST", "/v1/messages", Some(envelope.clone())).json();
    let path = format!("/v1/messages/{}", message["msg_id"].as_str().context("an id")?);
    cluster.until(&path, "was received", |message| message["state"] == "acknowledged");
    drop(first);

    let (_second, mut said) = Script::start(&cluster, &["agent.py", "words", inbox])?;
    assert_eq!(said.next().as_deref(), Some("words is registered"));
    let ended = cluster.get(&format!("{path}?wait=60s"));
    assert_eq!(ended["response"]["result"], json!({ "words": 4 }), "{ended}");
    assert_eq!(ended["retry_seq"], 0, "the same attempt, under a new run");

    let response = cluster.ask(1, "POST", "/v1/messages?wait=60s", Some(envelope)).ok();
    assert_eq!(response["result"], json!({ "words": 4 }));
    let bad = json!({ "target": { "selector": { "capabilities": ["text.words"] } }, "payload": 7 });
    let response = cluster.ask(1, "POST", "/v1/messages?wait=60s", Some(bad)).ok();
    assert_eq!(response["error"]["code"], "agent_error", "{response}");
    cluster.stop()
}

/// The registration of the contract, with every optional part.
const R1: &str = r#"{ "agent_id": "agent_redis_audit", "host": "10.20.1.15", "port": 9087,
  "capabilities": [ {"name": "redis_audit", "weight": 1.0}, {"name": "cache_tuning", "weight": 0.7} ],
  "metadata": { "model": "qwen-plus", "max_context": 32000, "owner": "sre_team" },
  "status": "ready" }"#;

#[test]
fn a_registration_is_shown_as_it_was_declared_and_a_bad_one_is_refused_whole() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let path = "/v1/agents/agent_redis_audit";
    let declared: Value = serde_json::from_str(R1)?;
    cluster.ask(0, "PUT", path, Some(declared.clone())).ok();
    let shown = cluster.ask(2, "GET", path, None).ok();
    for key in keys(&declared) {
        assert_eq!(shown[key], declared[key], "{key}");
    }
    assert_eq!((&shown["max_concurrency"], &shown["ttl_ms"]), (&json!(8), &json!(9000)));

    let mut full = declared.clone();
    full["instance_id"] = shown["instance_id"].clone();
    full["capabilities"][0] = json!({ "name": "redis_audit", "weight": 1.0, "version": "2.1", "cost": 0.05,
        "input_schema": { "type": "object" }, "output_schema": true });
    full["subscriptions"] = json!(["task.*", { "type": "task.completed.v1", "group": "audits" }]);
    full["ttl_ms"] = json!(60_000);
    full["max_concurrency"] = json!(1);
    let said = cluster.ask(1, "PUT", path, Some(full.clone())).ok();
    assert_eq!((&said["ttl_ms"], &said["heartbeat_ms"]), (&json!(60_000), &json!(20_000)));
    let shown = cluster.ask(0, "GET", path, None).ok();
    for key in keys(&full) {
        assert_eq!(shown[key], full[key], "{key}");
    }

    // Each of these is refused whole, naming its part; what was there stays.
    let many = |count: usize| (0..count).map(|i| json!({ "name": format!("t{i}") })).collect::<Vec<_>>();
    let long = "x".repeat(16 << 10);
    let bad: [(&str, Value, &str, &str); 13] = [
        ("capabilities", json!([{ "name": "Redis" }]), "capabilities[0].name", "a-z"),
        ("capabilities", json!([{ "name": "x".repeat(129) }]), "capabilities[0].name", "128"),
        ("capabilities", json!([{ "name": "x", "weight": 0 }]), "capabilities[0].weight", "0.001 to 1000"),
        ("capabilities", json!([{ "name": "x", "weight": -1 }]), "capabilities[0].weight", "0.001 to 1000"),
        (
            "capabilities",
            json!([{ "name": "x", "weight": 1e300 }]),
            "capabilities[0].weight",
            "0.001 to 1000",
        ),
        ("capabilities", json!([{ "name": "x" }, { "name": "x" }]), "capabilities[1].name", "twice"),
        ("capabilities", json!(many(257)), "capabilities", "1 to 256 capabilities, not 257"),
        (
            "capabilities",
            json!([{ "name": "x", "output_schema": { "t": long } }]),
            "capabilities[0].output_schema",
            "16384",
        ),
        ("metadata", json!({ "k": long }), "metadata", "16384"),
        ("subscriptions", json!(["task.completed"]), "subscriptions[0]", "version"),
        ("ttl_ms", json!(600_001), "ttl_ms", "1000 to 600000"),
        ("max_concurrency", json!(0), "max_concurrency", "1 to 10000"),
        ("agent_id", json!("another"), "agent_id", "another agent than the path"),
    ];
    for (part, value, field, limit) in bad {
        let mut body = full.clone();
        body[part] = value;
        let refused = cluster.ask(0, "PUT", path, Some(body));
        assert!(matches!(refused.status, 400 | 413), "{part}: {refused:?}");
        let said = refused.json();
        assert_eq!(said["field"], field, "{refused:?}");
        assert!(said["message"].as_str().is_some_and(|message| message.contains(limit)), "{limit}: {said}");
    }
    // What is no JSON at all has no field; the place is named.
    for weight in ["NaN", "Infinity", "1e999"] {
        let body = format!("{{\"capabilities\":[{{\"name\":\"x\",\"weight\":{weight}}}]}}");
        let refused = cluster.send(0, "PUT", path, &[], Some(("application/json", body.as_bytes())));
        assert_eq!((refused.status, refused.code().as_str()), (400, "invalid"), "{weight}: {refused:?}");
        assert!(refused.body.contains("column"), "{weight}: {refused:?}");
    }
    let after = cluster.ask(0, "GET", path, None).ok();
    assert_eq!((&after["capabilities"], &after["ttl_ms"]), (&full["capabilities"], &full["ttl_ms"]));
    cluster.stop()
}

#[test]
fn operators_drain_resume_and_remove_and_no_call_of_a_fenced_run_is_heard() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    // Links between the nodes may still be made.
    cluster.until("/v1/problems", "was empty", |problems| problems["items"] == json!([]));
    cluster.register("e1", "run1");
    let accepted = cluster.ask(0, "POST", "/v1/messages", Some(task())).json();
    let id = accepted["msg_id"].as_str().context("an id")?.to_string();
    cluster.ask(0, "GET", "/v1/agents/e1/inbox?instance=run1&wait=30s", None).ok();

    let drained = cluster.ask(1, "POST", "/v1/agents/e1/drain", None).ok();
    assert_eq!((&drained["state"], &drained["drain"]["by"]), (&json!("draining"), &json!("http-loopback")));
    assert_eq!(drained["way_back"], "`agent-reach agents resume e1`");
    let again = cluster.ask(2, "POST", "/v1/agents/e1/drain", None).ok();
    assert_eq!(again["drain"], drained["drain"], "the first author and time stay");
    let is_drain = |problems: &Value| problems["items"][0]["kind"] == "agent_draining";
    let problems = cluster.until("/v1/problems", "told of the drain", is_drain);
    let problem = &problems["items"][0];
    assert_eq!(keys(problem), ["about", "command", "effect", "kind", "since", "what"]);
    assert_eq!((&problem["kind"], &problem["about"]), (&json!("agent_draining"), &json!("e1")));
    assert_eq!(problem["since"], drained["drain"]["at"]);
    // A later run begins drained.
    cluster.register("e1", "run2");
    assert_eq!(cluster.get("/v1/agents/e1")["state"], "draining");

    let me = json!({ "agent_id": "e1", "instance_id": "run1", "attempt": 0 });
    let mut failed = me.clone();
    failed["reason"] = json!("error");
    let mut completed = me.clone();
    completed["result"] = json!(1);
    let mut from_it = task();
    from_it["source"] = json!({ "agent_id": "e1" });
    for (path, body) in [
        ("/v1/agents/e1/heartbeat".to_string(), json!({ "instance_id": "run1", "ready": true })),
        (format!("/v1/messages/{id}/received"), me.clone()),
        (format!("/v1/messages/{id}/progress"), me),
        (format!("/v1/messages/{id}/complete"), completed),
        (format!("/v1/messages/{id}/fail"), failed),
        ("/v1/messages?instance=run1".to_string(), from_it),
    ] {
        let refused = cluster.ask(2, "POST", &path, Some(body));
        assert_eq!((refused.status, refused.code().as_str()), (409, "stale_instance"), "{path}");
    }
    let polled = cluster.ask(2, "GET", "/v1/agents/e1/inbox?instance=run1", None);
    assert_eq!((polled.status, polled.code().as_str()), (409, "stale_instance"));
    let registered = json!({ "instance_id": "run1", "capabilities": [{ "name": "echo" }] });
    let refused = cluster.ask(2, "PUT", "/v1/agents/e1", Some(registered));
    assert_eq!((refused.status, refused.code().as_str()), (409, "stale_instance"));

    let resumed = cluster.ask(0, "POST", "/v1/agents/e1/resume", None).ok();
    assert_eq!((&resumed["state"], &resumed["drain"]), (&json!("ready"), &Value::Null));
    cluster.ask(0, "POST", "/v1/agents/e1/resume", None).ok();

    // A removal that means an earlier run removes nobody; the next one does, and may be repeated.
    cluster.ask(0, "DELETE", "/v1/agents/e1?instance=run1", None).ok();
    assert_eq!(cluster.get("/v1/agents/e1")["instance_id"], "run2");
    for _ in 0..2 {
        assert_eq!(cluster.ask(1, "DELETE", "/v1/agents/e1", None).ok()["removed"], true);
    }
    for (method, path) in [("DELETE", "/v1/agents/nobody"), ("POST", "/v1/agents/nobody/drain")] {
        assert_eq!(cluster.ask(0, method, path, None).code(), "not_found", "{path}");
    }
    assert_eq!(cluster.ask(0, "GET", "/v1/agents/e1", None).code(), "not_found");
    cluster.stop()
}

#[test]
fn an_agent_is_a_member_by_its_registration_and_leaves_with_it() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let register = |subscriptions: Value| {
        let body = json!({ "instance_id": "i1", "capabilities": [{ "name": "listen" }], "subscriptions": subscriptions });
        cluster.ask(0, "PUT", "/v1/agents/w1", Some(body))
    };
    register(json!([{ "type": "build.*", "group": "ci" }, "other.v1"])).ok();
    let event = json!({ "event_type": "build.done.v1", "payload": 1 });
    cluster.ask(1, "POST", "/v1/events", Some(event)).ok();
    let pulled = cluster.ask(2, "POST", "/v1/groups/ci/pull?member=w1", None).ok();
    assert_eq!(pulled["items"].as_array().map(Vec::len), Some(1));
    let shown = cluster.get("/v1/groups/ci");
    assert_eq!(
        (&shown["topics"], &shown["author"], &shown["members"]),
        (
            &json!("build.*"),
            &json!("http-loopback"),
            &json!([{ "member": "w1", "subscribed": true, "state": "ready", "unacknowledged": 1 }])
        )
    );
    assert_eq!(cluster.get("/v1/groups/w1")["topics"], "other.v1", "a group of its own");

    let refused = register(json!(["other.v1", { "type": "deploy.*", "group": "ci" }]));
    assert_eq!((refused.status, refused.code().as_str()), (409, "illegal_transition"), "{refused:?}");
    assert_eq!(refused.json()["field"], "subscriptions[1]");
    // What it holds goes back with its membership.
    register(json!(["other.v1"])).ok();
    let shown = cluster.get("/v1/groups/ci");
    assert_eq!((&shown["members"], &shown["lag"]), (&json!([]), &json!(1)));
    let pulled = cluster.ask(1, "POST", "/v1/groups/ci/pull?member=w2", None).ok();
    assert_eq!(pulled["items"][0]["deliveries"], 2);
    cluster.stop()
}

#[test]
fn events_are_published_read_handed_out_and_acknowledged() -> anyhow::Result<()> {
    let cluster = Cluster::start()?;
    let post = |path: &str, body: Value| cluster.ask(1, "POST", path, Some(body));
    let event = |n: u64| json!({ "event_type": "build.done.v1", "payload": { "n": n }, "key": "main" });

    let first = post("/v1/events", event(0)).ok();
    assert_eq!(keys(&first), ["duplicate", "event_type", "msg_id", "offset"]);
    assert_eq!((&first["offset"], &first["duplicate"]), (&json!(0), &json!(false)));
    let list = json!([event(1), event(2), { "event_type": "other.v1", "payload": {}, "msg_id": "o" }]);
    let published = post("/v1/events", list).ok();
    let offsets: Vec<_> =
        published["items"].as_array().into_iter().flatten().map(|one| &one["offset"]).collect();
    assert_eq!(offsets, [1, 2, 0]);
    let again = json!({ "event_type": "other.v1", "payload": {}, "msg_id": "o" });
    assert_eq!(post("/v1/events", again).ok()["duplicate"], true);

    let page = cluster.ask(2, "GET", "/v1/topics/build.done.v1/events?from=1", None).ok();
    assert_eq!((&page["next"], page["items"].as_array().map(Vec::len)), (&json!(3), Some(2)));
    let shown = &page["items"][0];
    assert_eq!(
        (&shown["offset"], &shown["payload"], &shown["key"]),
        (&json!(1), &json!({ "n": 1 }), &json!("main"))
    );
    assert_eq!(shown["source"], json!({ "agent_id": "http-loopback" }));
    let topics = cluster.get("/v1/topics");
    let names = topics["items"].as_array().into_iter().flatten().map(|topic| &topic["event_type"]);
    // Those of the cluster's own come when they come.
    let names = names.filter(|name| !name.as_str().is_some_and(|name| name.starts_with("cluster.")));
    assert_eq!(names.collect::<Vec<_>>(), ["build.done.v1", "other.v1"]);

    let made = cluster.ask(0, "PUT", "/v1/groups/ci", Some(json!({ "topics": "build.*", "from": 1 }))).ok();
    assert_eq!((&made["lag"], &made["positions"][0]["floor"]), (&json!(2), &json!(1)));
    let pulled = post("/v1/groups/ci/pull?max=1&member=w1&pull=p1", json!({})).ok();
    assert_eq!((&pulled["items"][0]["offset"], &pulled["items"][0]["deliveries"]), (&json!(1), &json!(1)));
    // Asked again by its name, through another node.
    let repeat = cluster.ask(2, "POST", "/v1/groups/ci/pull?max=1&member=w1&pull=p1", None).ok();
    assert_eq!(repeat, pulled);
    let nack = json!({ "event_type": "build.done.v1", "offsets": [1], "member": "w1", "cause": "not now" });
    assert_eq!(post("/v1/groups/ci/nack", nack).ok()["changed"], 1);
    let pulled = post("/v1/groups/ci/pull?member=w2", json!({})).ok();
    let handed: Vec<_> =
        pulled["items"].as_array().into_iter().flatten().map(|one| &one["deliveries"]).collect();
    assert_eq!(handed, [2, 1]);
    let all = json!({ "event_type": "build.done.v1", "offsets": [1, 2], "member": "w2" });
    assert_eq!(post("/v1/groups/ci/extend", all.clone()).ok()["changed"], 2);
    assert_eq!(post("/v1/groups/ci/ack", all.clone()).ok()["changed"], 2);
    assert_eq!(post("/v1/groups/ci/ack", all).ok()["changed"], 0);

    // Whoever waits is woken by the next event, at any node.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| cluster.ask(2, "POST", "/v1/groups/ci/pull?wait=30s", None).ok());
        let reading = scope
            .spawn(|| cluster.ask(0, "GET", "/v1/topics/build.done.v1/events?from=3&wait=30s", None).ok());
        post("/v1/events", event(3)).ok();
        assert_eq!(waiting.join().expect("no panic")["items"][0]["offset"], 3);
        assert_eq!(reading.join().expect("no panic")["items"][0]["offset"], 3);
    });

    // Retention by hand: who had not come so far is told, once.
    let late = json!({ "topics": "build.done.v1", "from": "earliest" });
    cluster.ask(0, "PUT", "/v1/groups/late", Some(late)).ok();
    let trimmed = post("/v1/topics/build.done.v1/trim", json!({ "below": 2 })).ok();
    assert_eq!((&trimmed["first"], &trimmed["next"]), (&json!(2), &json!(4)));
    let pulled = post("/v1/groups/late/pull", json!({})).ok();
    assert_eq!(
        pulled["gaps"],
        json!([{ "event_type": "build.done.v1", "from": 0, "to": 2, "reason": "retention" }])
    );
    assert_eq!(pulled["items"].as_array().map(Vec::len), Some(2));
    let reset = post("/v1/groups/late/reset", json!({ "from": "earliest" })).ok();
    assert_eq!(reset["positions"][0]["floor"], 2);
    cluster.ask(0, "DELETE", "/v1/groups/late", None).ok();

    // What is wrong has one answer, and changes nothing.
    let refused = |answer: Answer| (answer.status, answer.code(), answer.json()["field"].clone());
    let unversioned = json!({ "event_type": "build.done", "payload": 1 });
    assert_eq!(
        refused(post("/v1/events", unversioned)),
        (400, "unversioned_type".into(), json!("event_type"))
    );
    let second = json!([event(9), { "event_type": "build.done.v1" }]);
    assert_eq!(refused(post("/v1/events", second)), (400, "invalid".into(), json!("events[1].payload")));
    let targeted = json!({ "event_type": "a.v1", "payload": 1, "target": { "agent_id": "a" } });
    assert_eq!(refused(post("/v1/events", targeted)), (400, "invalid".into(), json!("target")));
    assert_eq!(refused(post("/v1/events", json!([]))).1, "invalid");
    let many: Vec<Value> = (0..1_001).map(event).collect();
    assert_eq!(refused(post("/v1/events", json!(many))), (413, "too_large".into(), json!("events")));
    let other = json!({ "event_type": "other.v1", "payload": 7, "msg_id": "o" });
    assert_eq!(refused(post("/v1/events", other)), (409, "msg_id_conflict".into(), json!("msg_id")));
    let beyond = cluster.ask(0, "GET", "/v1/topics/build.done.v1/events?from=99", None);
    assert!(beyond.json()["message"].as_str().is_some_and(|text| text.contains("2 to 3")), "{beyond:?}");
    assert_eq!(refused(beyond), (416, "offset_out_of_range".into(), json!("offset")));
    let not_handed = json!({ "event_type": "build.done.v1", "offsets": [77] });
    assert_eq!(refused(post("/v1/groups/ci/ack", not_handed)).1, "offset_out_of_range");
    assert_eq!(post("/v1/groups/nope/pull", json!({})).status, 404);
    assert_eq!(cluster.ask(0, "GET", "/v1/topics/nope.v1", None).status, 404);
    assert_eq!(cluster.ask(0, "DELETE", "/v1/topics/other.v1", None).code(), "illegal_transition");
    post("/v1/topics/other.v1/trim", json!({ "below": 1 })).ok();
    cluster.ask(0, "DELETE", "/v1/topics/other.v1", None).ok();
    assert_eq!(cluster.ask(0, "GET", "/v1/topics/other.v1", None).status, 404);
    let kept = cluster.ask(0, "PUT", "/v1/topics/build.done.v1", Some(json!({ "max_bytes": 4096 }))).ok();
    assert_eq!((&kept["max_bytes"], &kept["events"]), (&json!(4096), &json!(2)));
    cluster.stop()
}
