//! etcd: three members, and the two calls of its interface that are needed.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::Context as _;
use tokio::time::{Instant, sleep, timeout};
use tonic::{
    client::Grpc,
    codegen::http::uri::PathAndQuery,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use super::{ANSWER_MAX, POLL, READY_MAX, SERVERS};
use crate::{
    load::Ask,
    process::{Servers, free_ports},
};

#[derive(Debug)]
pub(super) struct Etcd {
    pub(super) servers: Servers,
    clients: Vec<String>,
}

impl Etcd {
    /// With its defaults, apart from addresses and the amount it logs.
    pub(super) async fn start(program: &Path, mut servers: Servers) -> anyhow::Result<Self> {
        let ports = free_ports(2 * SERVERS)?;
        let url = |port: &u16| format!("http://127.0.0.1:{port}");
        let (clients, peers) = ports.split_at(SERVERS);
        let all: Vec<String> =
            peers.iter().enumerate().map(|(i, port)| format!("n{}={}", i + 1, url(port))).collect();
        for i in 0..SERVERS {
            let (client, peer) = (url(&clients[i]), url(&peers[i]));
            let options = [
                ("name", format!("n{}", i + 1)),
                ("data-dir", servers.dir().join(format!("n{}", i + 1)).display().to_string()),
                ("listen-client-urls", client.clone()),
                ("advertise-client-urls", client),
                ("listen-peer-urls", peer.clone()),
                ("initial-advertise-peer-urls", peer),
                ("initial-cluster", all.join(",")),
                ("initial-cluster-state", "new".into()),
                ("logger", "zap".into()),
                ("log-level", "error".into()),
            ];
            let args: Vec<String> = options.iter().map(|(key, value)| format!("--{key}={value}")).collect();
            servers.spawn(program, &args)?;
        }
        let mut etcd = Self { servers, clients: clients.iter().map(url).collect() };
        let deadline = Instant::now() + READY_MAX;
        // A write is confirmed, and all three know who leads.
        loop {
            if etcd.leader().await.is_ok() && etcd.asker(1, 0).await?().await.is_ok() {
                return Ok(etcd);
            }
            etcd.servers.all_run()?;
            anyhow::ensure!(Instant::now() < deadline, "not serving\n{}", etcd.servers.logs());
            sleep(POLL).await;
        }
    }

    fn channel(&self, server: usize) -> anyhow::Result<Channel> {
        let endpoint = Endpoint::from_shared(self.clients[server].clone())?;
        Ok(endpoint.tcp_nodelay(true).connect_lazy())
    }

    /// Fails unless all members that run agree.
    pub(super) async fn leader(&self) -> anyhow::Result<usize> {
        let (mut members, mut leaders) = (Vec::new(), Vec::new());
        for server in 0..SERVERS {
            let path = "/etcdserverpb.Maintenance/Status";
            let status: Status = call(self.channel(server)?, path, Nothing {}).await?;
            members.push(status.header.context("a status without a header")?.member_id);
            leaders.push(status.leader);
        }
        let leader = members.iter().position(|member| leaders.iter().all(|leader| leader == member));
        leader.with_context(|| format!("the members do not agree who leads: {leaders:?}"))
    }

    /// Puts a new key each time.
    pub(super) async fn asker(&self, size: usize, server: usize) -> anyhow::Result<Ask> {
        let channel = self.channel(server)?;
        let number = Arc::new(AtomicU64::new(0));
        Ok(Arc::new(move || {
            let key = format!("{server}/{}", number.fetch_add(1, Ordering::Relaxed)).into_bytes();
            let put = Put { key, value: vec![b'x'; size] };
            let channel = channel.clone();
            Box::pin(async move {
                let done: Done = timeout(ANSWER_MAX, call(channel, "/etcdserverpb.KV/Put", put)).await??;
                done.header.context("a put without a header")?;
                Ok(())
            })
        }))
    }
}

async fn call<Q, A>(channel: Channel, path: &'static str, question: Q) -> anyhow::Result<A>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    let mut grpc = Grpc::new(channel);
    grpc.ready().await?;
    let path = PathAndQuery::from_static(path);
    let answer = grpc.unary(tonic::Request::new(question), path, ProstCodec::<Q, A>::default()).await?;
    Ok(answer.into_inner())
}

/// The fields we use of etcd's `rpc.proto`, version 3; others are skipped.
#[derive(Clone, PartialEq, prost::Message)]
struct Nothing {}

#[derive(Clone, PartialEq, prost::Message)]
struct Header {
    #[prost(uint64, tag = "2")]
    member_id: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Status {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
    #[prost(uint64, tag = "4")]
    leader: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Put {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Done {
    #[prost(message, optional, tag = "1")]
    header: Option<Header>,
}
