//! Threads of their own for Raft and the links between nodes. Whatever the rest of the node is at, a
//! leader's heartbeat goes out in time and is answered in time: the operating system sees to that.

use std::{net::SocketAddr, sync::Arc};

use reach_protocol::{Name, NodeId};
use reach_raft::Replica;
use reach_transport::{Credentials, Door, Endpoint};
use tokio::runtime::Runtime;

use super::{Shared, Store, certificates::Certificates, is_taken, peers::Peers};
use crate::{exit::Exit, patience::when_free};

/// Enough that one of them is free while another one decodes.
const THREADS: usize = 2;

#[derive(Debug)]
pub struct Consensus(Option<Runtime>);

impl Consensus {
    pub fn new() -> Result<Self, Exit> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("consensus")
            .enable_all()
            .build();
        Ok(Self(Some(runtime.map_err(|error| Exit::new(crate::exit::RAFT, error))?)))
    }

    fn runtime(&self) -> &Runtime {
        self.0.as_ref().expect("it is there until it is dropped")
    }

    /// The door for the other nodes. A port that is taken may be free in a moment.
    pub async fn bind(
        &self,
        at: SocketAddr,
        cluster: Name,
        tls: Credentials,
        certificates: Arc<Certificates>,
    ) -> Result<Endpoint, Exit> {
        let bind = move || {
            let options = reach_transport::Options::peer();
            Endpoint::server_under(at, Door::Peer, cluster.clone(), &tls, options, certificates.clone())
        };
        self.run(when_free(bind, is_taken)).await?.map_err(Exit::transport)
    }

    pub async fn replica(
        &self,
        options: reach_raft::Options,
        node_id: NodeId,
        store: &Store,
        peers: Peers,
    ) -> Result<Replica, Exit> {
        let (log, tables) = (store.log.clone(), store.tables.clone());
        let start = Replica::start(options, node_id, log, tables, Arc::new(peers));
        self.run(start).await?.map_err(Exit::raft)
    }

    /// Until it ends or the node stops. What it spawns stays on these threads.
    pub fn spawn(&self, shared: &Shared, task: impl Future<Output = ()> + Send + 'static) {
        shared.spawn_on(self.runtime().handle(), task);
    }

    async fn run<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, Exit> {
        self.runtime().spawn(task).await.map_err(|error| Exit::new(crate::exit::RAFT, error))
    }
}

impl Drop for Consensus {
    /// A runtime is not waited for where others run: all of its tasks have ended by then.
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
