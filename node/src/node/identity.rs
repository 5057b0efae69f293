//! Whose data a folder holds. A node that comes back without what it had acknowledged must not vote
//! again under its old id: what a majority wrote could be lost by it. It is told from one that kept its
//! data by its incarnation, which every folder gets when it is first used and which the others remember.

use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{Arc, Mutex},
};

use reach_config::NodeConfig;
use reach_protocol::{Name, NodeId, codec};
use reach_storage::{LogStore, MetaKey, Tables};
use serde::{Deserialize, Serialize};

use crate::exit::Exit;

const WAY_OUT: &str = "Restore the folder from a copy, or replace this node under a new node id; don't start it empty under the old one";

/// Written once, compared at every start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    cluster: Name,
    cluster_id: String,
    node_id: NodeId,
    pub incarnation: String,
}

impl Identity {
    /// Refuses another cluster's or another node's data, and data that lost its identity. A new folder
    /// becomes this node's.
    pub async fn of_folder(
        config: &NodeConfig,
        cluster_id: String,
        log: &dyn LogStore,
        tables: &dyn Tables,
    ) -> Result<Self, Exit> {
        let stored = log.meta(MetaKey::Identity).map_err(Exit::disk)?;
        let dir = config.data_dir.display();
        let Some(bytes) = stored else {
            if has_entries(log) || tables.applied().index > 0 {
                return Err(Exit::identity(format!("{dir} holds data but not whose it is. {WAY_OUT}")));
            }
            let identity = Self {
                cluster: config.cluster.clone(),
                cluster_id,
                node_id: config.node_id,
                incarnation: ulid::Ulid::generate().to_string(),
            };
            put(log, MetaKey::Identity, &identity).await.map_err(Exit::disk)?;
            return Ok(identity);
        };
        let identity: Self =
            codec::decode("identity", &bytes).map_err(|error| Exit::identity(error.to_string()))?;
        let mine = (&config.cluster, &cluster_id, config.node_id);
        let theirs = (&identity.cluster, &identity.cluster_id, identity.node_id);
        if mine == theirs {
            return Ok(identity);
        }
        Err(Exit::identity(format!(
            "{dir} belongs to node {} of cluster {} ({}), and this is node {} of cluster {} ({cluster_id}). Point data_dir \
             at this node's own folder, or at an empty one if the node is new",
            identity.node_id, identity.cluster, identity.cluster_id, config.node_id, config.cluster
        )))
    }
}

/// What a node ends with that another one has known by other data.
pub fn lost_data(dir: &Path, node_id: NodeId, by: NodeId) -> Exit {
    Exit::identity(format!(
        "{by} knows {node_id} by other data than {} holds: what {node_id} had acknowledged is gone from there. {WAY_OUT}",
        dir.display()
    ))
}

/// The incarnation of every other node, as this one last met it, on its disk.
#[derive(Debug)]
pub struct Acquaintances {
    log: Arc<dyn LogStore>,
    known: Mutex<BTreeMap<NodeId, String>>,
}

impl Acquaintances {
    pub fn load(log: Arc<dyn LogStore>) -> Result<Self, Exit> {
        let stored = log.meta(MetaKey::Acquaintances).map_err(Exit::disk)?;
        let known = match stored {
            Some(bytes) => {
                codec::decode("acquaintances", &bytes).map_err(|error| Exit::identity(error.to_string()))?
            }
            None => BTreeMap::new(),
        };
        Ok(Self { log, known: Mutex::new(known) })
    }

    /// Whether `node` still is who it was. Before the cluster is initialised nobody has anything to lose,
    /// and whoever comes is who it is. Remembered on the disk when this returns.
    pub async fn is_itself(&self, node: NodeId, incarnation: String) -> io::Result<bool> {
        let written = {
            let mut known = self.known.lock().expect("no panic while it is held");
            match known.get(&node) {
                Some(before) if *before == incarnation => return Ok(true),
                Some(_) if has_entries(&*self.log) => return Ok(false),
                _ => {}
            }
            known.insert(node, incarnation);
            // Handed in under the lock: the newest is written last.
            put(&*self.log, MetaKey::Acquaintances, &*known)
        };
        written.await?;
        Ok(true)
    }
}

/// The log of a member of an initialised cluster never becomes empty again.
fn has_entries(log: &dyn LogStore) -> bool {
    let bounds = log.bounds();
    bounds.next > bounds.first || bounds.purged.is_some()
}

/// Handed in at once; on the disk when the answer is there.
fn put<T: Serialize>(
    log: &dyn LogStore,
    key: MetaKey,
    value: &T,
) -> impl Future<Output = io::Result<()>> + use<T> {
    let (done, written) = tokio::sync::oneshot::channel();
    log.put_meta(key, codec::encode(value), Box::new(move |result| drop(done.send(result))));
    async { written.await.map_err(|_| io::Error::other("the log's writer is gone"))? }
}

/// Tells one cluster from another of the same name: of its peer CA, which `cluster new` makes.
pub fn fingerprint(ca_pem: &str) -> String {
    codec::digest(ca_pem.trim().as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}
