//! NATS JetStream: streams on three servers, file storage, and every confirmation awaited.

use std::{
    collections::HashMap,
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::Context as _;
use async_nats::{
    Client, ConnectOptions,
    jetstream::{
        self, Message,
        consumer::{AckPolicy, PullConsumer, pull},
        context::ContextBuilder,
        stream::{self, RetentionPolicy, StorageType},
    },
};
use futures_util::StreamExt as _;
use tokio::{
    sync::oneshot,
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

use super::{ANSWER_MAX, Acks, POLL, READY_MAX, SERVERS, Via, Work, Worker};
use crate::{
    load::Ask,
    process::{Servers, free_ports},
};

/// Streams and their subjects. One subject each: the server keeps books on every subject, and a
/// subject per message would cost it for nothing.
const REQUESTS: &str = "requests";
const REPLIES: &str = "replies";
/// The durable consumer of either stream.
const CONSUMER: &str = "all";
/// Publishes under way at once in one client, by far; beyond it the client refuses.
const PUBLISHES_MAX: usize = 100_000;
/// Given out and not yet acknowledged, and asked for at once: more than is ever under way, so that
/// neither holds the work up.
const UNCONFIRMED_MAX: i64 = 20_000;
const PULLED_MAX: usize = 2_000;

#[derive(Debug)]
pub(super) struct JetStream {
    pub(super) servers: Servers,
    urls: Vec<String>,
    acks: Acks,
}

impl JetStream {
    /// With its defaults, apart from addresses, the store's folder and, with `always`, when it is
    /// written through.
    pub(super) async fn start(
        program: &Path,
        mut servers: Servers,
        always: bool,
        acks: Acks,
    ) -> anyhow::Result<Self> {
        let ports = free_ports(3 * SERVERS)?;
        let (clients, rest) = ports.split_at(SERVERS);
        let (routes, monitors) = rest.split_at(SERVERS);
        let sync = if always { "sync_interval: always" } else { "" };
        let all: Vec<String> = routes.iter().map(|port| format!("nats://127.0.0.1:{port}")).collect();
        for i in 0..SERVERS {
            let store = servers.dir().join(format!("n{}", i + 1));
            let config = format!(
                "server_name: n{}\nlisten: 127.0.0.1:{}\nhttp: 127.0.0.1:{}\n\
                 jetstream {{ store_dir: {:?}\n {sync} }}\n\
                 cluster {{ name: bench, listen: 127.0.0.1:{}, routes: [{}] }}\n",
                i + 1,
                clients[i],
                monitors[i],
                store.display().to_string(),
                routes[i],
                all.join(", "),
            );
            let file = servers.dir().join(format!("n{}.conf", i + 1));
            fs::write(&file, config)?;
            servers.spawn(program, &["--config".into(), file.display().to_string()])?;
        }
        let urls = clients.iter().map(|port| format!("nats://127.0.0.1:{port}")).collect();
        let mut jetstream = Self { servers, urls, acks };
        jetstream.clustered(monitors).await?;
        for port in monitors {
            anyhow::ensure!(
                writes_through(&monitored(*port, "/varz")?) == always,
                "sync_interval is not in force"
            );
        }
        Ok(jetstream)
    }

    /// Waits until the servers are a cluster with a leader that has heard of all of them.
    async fn clustered(&mut self, monitors: &[u16]) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_MAX;
        loop {
            let complete = |port: &u16| monitored(*port, "/jsz").is_ok_and(|state| knows_all(&state));
            if monitors.iter().all(complete) && monitors.iter().any(|port| leads_all(*port)) {
                return Ok(());
            }
            self.servers.all_run()?;
            anyhow::ensure!(Instant::now() < deadline, "no JetStream cluster\n{}", self.servers.logs());
            sleep(POLL).await;
        }
    }

    /// Connects to that server; once it is gone the client finds another by itself.
    async fn connect(&self, server: usize) -> anyhow::Result<(Client, jetstream::Context)> {
        let options = ConnectOptions::new().request_timeout(Some(ANSWER_MAX));
        let client = options.connect(self.urls[server].as_str()).await?;
        let context = ContextBuilder::new().timeout(ANSWER_MAX).max_ack_inflight(PUBLISHES_MAX);
        Ok((client.clone(), context.build(client)))
    }

    pub(super) async fn prepare(&self, work: Work, via: Via) -> anyhow::Result<Worker> {
        let (_, context) = self.connect(0).await?;
        let retention = match work {
            Work::Submit => RetentionPolicy::Limits,
            Work::Worked | Work::RoundTrip => RetentionPolicy::WorkQueue,
        };
        self.stream(&context, REQUESTS, retention).await?;
        if work == Work::RoundTrip {
            self.stream(&context, REPLIES, RetentionPolicy::WorkQueue).await?;
        }
        let done = Arc::new(AtomicU64::new(0));
        let mut running: Vec<Box<dyn std::any::Any + Send>> = Vec::new();
        if work != Work::Submit {
            let (client, context) = self.connect(via.server(self.leader().await?)).await?;
            let requests = consumer(&context, REQUESTS).await?;
            let takes = Takes { client, acks: self.acks };
            let counted = done.clone();
            let taking = takes.each(requests, move |takes, message| {
                let (context, counted) = (context.clone(), counted.clone());
                async move {
                    if work == Work::RoundTrip {
                        publish(&context, REPLIES, message.payload.clone()).await?;
                    }
                    takes.ack(&message).await?;
                    counted.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                }
            });
            running.push(Box::new(taking));
        }
        Ok(Worker { done, _running: running })
    }

    /// Makes a stream of three replicas and waits until all are in step.
    async fn stream(
        &self,
        context: &jetstream::Context,
        name: &str,
        retention: RetentionPolicy,
    ) -> anyhow::Result<()> {
        let config = stream::Config {
            name: name.into(),
            subjects: vec![name.into()],
            retention,
            storage: StorageType::File,
            num_replicas: SERVERS,
            ..Default::default()
        };
        let deadline = Instant::now() + READY_MAX;
        while let Err(error) = context.create_stream(config.clone()).await {
            anyhow::ensure!(Instant::now() < deadline, "no stream: {error}\n{}", self.servers.logs());
            sleep(POLL).await;
        }
        loop {
            let info = context.get_stream(name).await?.get_info().await?;
            let is = &info.config;
            let as_wanted = is.num_replicas == SERVERS && is.storage == StorageType::File;
            anyhow::ensure!(as_wanted, "the stream was made otherwise: {is:?}");
            if let Some(cluster) = info.cluster
                && cluster.leader.is_some()
                && cluster.replicas.len() == SERVERS - 1
                && cluster.replicas.iter().all(|replica| replica.current && !replica.offline)
            {
                return Ok(());
            }
            anyhow::ensure!(Instant::now() < deadline, "{name} is not in step\n{}", self.servers.logs());
            sleep(POLL).await;
        }
    }

    /// Of the stream of requests.
    pub(super) async fn leader(&self) -> anyhow::Result<usize> {
        let (_, context) = self.connect(0).await?;
        let info = context.get_stream(REQUESTS).await?.get_info().await?;
        let leader = info.cluster.and_then(|cluster| cluster.leader).context("the stream has no leader")?;
        let number: usize = leader.trim_start_matches('n').parse()?;
        Ok(number - 1)
    }

    pub(super) async fn asker(&self, work: Work, size: usize, server: usize) -> anyhow::Result<Ask> {
        let (client, context) = self.connect(server).await?;
        if work != Work::RoundTrip {
            let payload = bytes::Bytes::from(vec![b'x'; size]);
            return Ok(Arc::new(move || {
                let (context, payload) = (context.clone(), payload.clone());
                Box::pin(async move { publish(&context, REQUESTS, payload).await })
            }));
        }
        let replies = consumer(&context, REPLIES).await?;
        let waiting: Arc<Mutex<HashMap<u64, oneshot::Sender<()>>>> = Arc::default();
        let takes = Takes { client, acks: self.acks };
        let waiters = waiting.clone();
        let running = takes.each(replies, move |takes, message| {
            let waiters = waiters.clone();
            async move {
                takes.ack(&message).await?;
                let number = number_of(&message.payload).context("a reply without a number")?;
                let waiter = waiters.lock().expect("no panic while it is held").remove(&number);
                // Without one its asker is over.
                waiter.map(|waiter| waiter.send(()));
                Ok(())
            }
        });
        let running = Arc::new(running);
        let next = Arc::new(AtomicU64::new(0));
        Ok(Arc::new(move || {
            let (context, waiting, running) = (context.clone(), waiting.clone(), running.clone());
            let number = next.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                let (answer, answered) = oneshot::channel();
                waiting.lock().expect("no panic while it is held").insert(number, answer);
                publish(&context, REQUESTS, numbered(number, size)).await?;
                timeout(ANSWER_MAX, answered).await.context("no reply")?.context("the replies ended")?;
                drop(running);
                Ok(())
            })
        }))
    }
}

/// Returns when the stream has it on a majority.
async fn publish(
    context: &jetstream::Context,
    subject: &'static str,
    payload: bytes::Bytes,
) -> anyhow::Result<()> {
    context.publish(subject, payload).await?.await?;
    Ok(())
}

/// A durable pull consumer, made when there is none.
async fn consumer(context: &jetstream::Context, stream: &str) -> anyhow::Result<PullConsumer> {
    let config = pull::Config {
        durable_name: Some(CONSUMER.into()),
        ack_policy: AckPolicy::Explicit,
        max_ack_pending: UNCONFIRMED_MAX,
        ..Default::default()
    };
    Ok(context.get_stream(stream).await?.create_consumer(config).await?)
}

/// Takes messages, each on a task of its own.
#[derive(Clone)]
struct Takes {
    client: Client,
    acks: Acks,
}

/// Ends the taking when it is dropped.
struct Taking(AbortHandle);

impl Drop for Taking {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Takes {
    fn each<F, R>(self, consumer: PullConsumer, handle: F) -> Taking
    where
        F: Fn(Self, Message) -> R + Send + 'static,
        R: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let task = tokio::spawn(async move {
            // With the taking, what is under way ends too.
            let mut under_way = JoinSet::new();
            loop {
                // Until the servers have told each other who leads a new consumer, a pull meets
                // nobody, and the library doesn't repeat it.
                let pulled = consumer.stream().max_messages_per_batch(PULLED_MAX);
                let Ok(mut messages) = pulled.messages().await else {
                    sleep(POLL).await;
                    continue;
                };
                while let Some(Ok(message)) = messages.next().await {
                    under_way.spawn(handle(self.clone(), message));
                    while let Some(handled) = under_way.try_join_next() {
                        // Whoever waits for it fails the measurement.
                        if let Ok(Err(error)) = handled {
                            eprintln!("reach-bench: a message of JetStream was lost on its way: {error:#}");
                        }
                    }
                }
                sleep(POLL).await;
            }
        });
        Taking(task.abort_handle())
    }

    /// A confirmed one is a request over the client's one inbox. (The library's `double_ack`
    /// subscribes and unsubscribes for each, which would cost all three servers.)
    async fn ack(&self, message: &Message) -> anyhow::Result<()> {
        let to = message.reply.clone().context("a message that can't be acknowledged")?;
        match self.acks {
            Acks::Confirmed => drop(self.client.request(to, "+ACK".into()).await?),
            Acks::Plain => self.client.publish(to, "+ACK".into()).await?,
        }
        Ok(())
    }
}

/// `size` bytes that begin with the number.
fn numbered(number: u64, size: usize) -> bytes::Bytes {
    let mut payload = format!("{number} ").into_bytes();
    payload.resize(size.max(payload.len()), b'x');
    payload.into()
}

fn number_of(payload: &[u8]) -> Option<u64> {
    let end = payload.iter().position(|byte| *byte == b' ')?;
    std::str::from_utf8(&payload[..end]).ok()?.parse().ok()
}

/// What a server's monitoring port says, as JSON.
fn monitored(port: u16, path: &str) -> anyhow::Result<serde_json::Value> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(ANSWER_MAX))?;
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer.split_once("\r\n\r\n").context("no answer of HTTP")?;
    Ok(serde_json::from_str(body)?)
}

fn knows_all(jsz: &serde_json::Value) -> bool {
    jsz["meta_cluster"]["cluster_size"].as_u64() == Some(SERVERS as u64)
        && jsz["meta_cluster"]["leader"].as_str().is_some_and(|leader| !leader.is_empty())
}

/// Whether this server leads, with all others in step.
fn leads_all(port: u16) -> bool {
    let Ok(jsz) = monitored(port, "/jsz") else { return false };
    let replicas = jsz["meta_cluster"]["replicas"].as_array().map(Vec::as_slice).unwrap_or_default();
    replicas.len() == SERVERS - 1 && replicas.iter().all(|replica| replica["current"] == true)
}

fn writes_through(varz: &serde_json::Value) -> bool {
    varz["jetstream"]["config"]["sync_always"] == true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_survives_in_a_payload_of_any_size() {
        for (number, size) in [(0, 256), (u64::MAX, 1024), (12_345, 3)] {
            let payload = numbered(number, size);
            assert_eq!(number_of(&payload), Some(number));
            assert!(payload.len() == size || size < 6);
        }
        assert_eq!(number_of(b"xxx"), None);
    }
}
