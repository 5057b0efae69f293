//! What a cluster looks like on disk before it runs: a folder for each node and one for its
//! administrator, described without touching any of them. Issuing and writing is the command's part.

use std::{
    collections::BTreeMap,
    fmt::Write,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
};

use reach_protocol::{id::Name, id::NodeId};

use crate::{
    address::Address,
    context::ContextFile,
    error::Error,
    node::{Addresses, CLIENT_PORT, Format, Level, Log, PEER_PORT, Storage, http_beside},
};

/// Files in a node's folder.
pub const NODE_FILE: &str = "node.toml";
pub const PEER_CA: &str = "peer-ca.pem";
pub const PEER_CERT: &str = "peer.pem";
pub const PEER_KEY: &str = "peer.key";
pub const CLIENT_CA: &str = "client-ca.pem";
pub const CLIENT_CERT: &str = "client.pem";
pub const CLIENT_KEY: &str = "client.key";

/// The administrator's folder, and what it holds besides both CAs' certificates and `context.toml`.
pub const ADMIN_DIR: &str = "admin";
pub const PEER_CA_KEY: &str = "peer-ca.key";
pub use crate::context::CLIENT_CA_KEY;
pub const ADMIN_CERT: &str = "admin.pem";
pub const ADMIN_KEY: &str = "admin.key";
/// The operator whose certificate `cluster new` issues.
pub const ADMIN_USER: &str = "admin";

/// Nodes that share a host have their ports this far apart.
pub const PORT_STEP: u16 = 10;
pub const NODES_MAX: usize = 9;

/// The text of a node's file, before it is one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFile {
    pub cluster: Name,
    pub node_id: NodeId,
    /// Relative to the file's folder.
    pub data_dir: PathBuf,
    pub peer_listen: SocketAddr,
    pub client_listen: SocketAddr,
    pub nodes: BTreeMap<NodeId, Addresses>,
    pub log: Log,
    pub storage: Storage,
}

impl NodeFile {
    /// Certificates are named as [`PEER_CERT`] and its like, in the file's folder.
    pub fn render(&self) -> String {
        let quoted = |text: &str| toml::Value::String(text.to_string()).to_string();
        let mut text = format!(
            "# Node {id} of the cluster {cluster}. Relative paths start from this folder. What all nodes must share\n\
             # is a rule: see `agent-reach rules show`.\n\
             cluster = {cluster_text}\n\
             node_id = \"{id}\"\n\
             data_dir = {data_dir}\n\
             \n\
             # Where this node listens, for other nodes and for clients; every link is mutual TLS.\n\
             peer_listen = \"{peer_listen}\"\n\
             client_listen = \"{client_listen}\"\n\
             # HTTP, for this machine only; \"off\" closes it.\n\
             http_listen = \"{http_listen}\"\n\
             \n\
             [peer_tls]\n\
             ca = \"{PEER_CA}\"\n\
             cert = \"{PEER_CERT}\"\n\
             key = \"{PEER_KEY}\"\n\
             \n\
             [client_tls]\n\
             ca = \"{CLIENT_CA}\"\n\
             cert = \"{CLIENT_CERT}\"\n\
             key = \"{CLIENT_KEY}\"\n\
             \n\
             [log]\n\
             # error, warn, info, debug or trace.\n\
             level = \"{level}\"\n\
             # json (one object a line) or text.\n\
             format = \"{format}\"\n\
             \n\
             [storage]\n\
             # MiB of memory for blocks read from the disk.\n\
             cache_mib = {cache}\n\
             # MiB kept back on the disk, given up when it is full so that what is running can end.\n\
             ballast_mib = {ballast}\n\
             # With less free than so many MiB the node takes no new work in.\n\
             low_water_mib = {low_water}\n\
             \n\
             # The members the cluster starts with, and where each is dialled.\n",
            id = self.node_id,
            cluster = self.cluster,
            cluster_text = quoted(&self.cluster),
            data_dir = quoted(&self.data_dir.display().to_string()),
            peer_listen = self.peer_listen,
            client_listen = self.client_listen,
            http_listen = http_beside(self.client_listen),
            level = Level::as_str(self.log.level),
            format = match self.log.format {
                Format::Json => "json",
                Format::Text => "text",
            },
            cache = self.storage.cache_mib,
            ballast = self.storage.ballast_mib,
            low_water = self.storage.low_water_mib,
        );
        for (id, Addresses { peer, client }) in &self.nodes {
            let _ = write!(text, "[nodes.{id}]\npeer = \"{peer}\"\nclient = \"{client}\"\n\n");
        }
        text.truncate(text.trim_end().len() + 1);
        text
    }
}

/// A cluster as it is planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub cluster: Name,
    pub nodes: BTreeMap<NodeId, Addresses>,
    /// Of every node.
    pub storage: Storage,
}

impl Layout {
    /// `hosts` in the form `n1=HOST` or `n1=HOST:PORT` (the port for clients; peers have the next).
    /// Nodes that share a host and name no port have theirs 10 apart.
    pub fn new(cluster: Name, hosts: &[String]) -> Result<Self, Error> {
        let wrong = |text: &str, why: &str| {
            Error::Layout(format!("--node {text}: {why}: write n1=HOST, such as n1=10.20.1.15"))
        };
        let mut nodes: BTreeMap<NodeId, Addresses> = BTreeMap::new();
        let mut on_host: BTreeMap<String, u16> = BTreeMap::new();
        for text in hosts {
            let (id, host) = text.split_once('=').ok_or_else(|| wrong(text, "there is no ="))?;
            let id: NodeId = id.parse().map_err(|_| wrong(text, "a node id is n and a number above 0"))?;
            let client = match host.parse::<Address>() {
                Ok(address) => address,
                Err(_) => {
                    let host = host.trim_start_matches('[').trim_end_matches(']');
                    let before = on_host.entry(host.to_string()).or_default();
                    let port = CLIENT_PORT + PORT_STEP * *before;
                    *before += 1;
                    Address::new(host, port).map_err(|_| wrong(text, "that is not a host"))?
                }
            };
            if client.ip().is_some_and(|ip| ip.is_unspecified()) {
                return Err(wrong(text, "others can't dial that host"));
            }
            let peer_port = client
                .port()
                .checked_add(PEER_PORT - CLIENT_PORT)
                .ok_or_else(|| wrong(text, "the port for peers, one above, would be too large"))?;
            let peer =
                Address::new(client.host(), peer_port).expect("the host was checked with the client's port");
            let taken = nodes.values().any(|other| {
                [&other.peer, &other.client].iter().any(|address| **address == peer || **address == client)
            });
            if taken {
                return Err(wrong(text, "another node has that host and port"));
            }
            if nodes.insert(id, Addresses { peer, client }).is_some() {
                return Err(wrong(text, "that node is named twice"));
            }
        }
        if nodes.is_empty() || nodes.len() > NODES_MAX {
            let message =
                format!("{} nodes: name 1 to {NODES_MAX}, three as a rule, with --node n1=HOST", nodes.len());
            return Err(Error::Layout(message));
        }
        Ok(Self { cluster, nodes, storage: Storage::default() })
    }

    /// Nodes that may be lost while the rest goes on.
    pub fn losses_survived(&self) -> usize {
        (self.nodes.len() - 1) / 2
    }

    /// The file of one node; None when the plan has no such node.
    pub fn node_file(&self, node_id: NodeId) -> Option<NodeFile> {
        let Addresses { peer, client } = self.nodes.get(&node_id)?;
        Some(NodeFile {
            cluster: self.cluster.clone(),
            node_id,
            data_dir: "data".into(),
            peer_listen: listen_for(peer),
            client_listen: listen_for(client),
            nodes: self.nodes.clone(),
            log: Log::default(),
            storage: self.storage.clone(),
        })
    }

    /// `context.toml` of the admin folder.
    pub fn admin_context(&self) -> ContextFile {
        ContextFile {
            cluster: self.cluster.clone(),
            endpoints: self.nodes.values().map(|addresses| addresses.client.clone()).collect(),
            ca: CLIENT_CA.into(),
            cert: ADMIN_CERT.into(),
            key: ADMIN_KEY.into(),
        }
    }

    /// What to type next, when the folders stand in `out`.
    pub fn next_commands(&self, out: &Path) -> String {
        let out = shell_word(&out.display().to_string());
        let mut text = String::new();
        let local = self.nodes.values().all(|addresses| addresses.client.is_loopback());
        let mut step = 0;
        let mut title = |text: &mut String, words: &str| {
            step += 1;
            let _ = writeln!(text, "{step}. {words}");
        };
        if !local {
            title(&mut text, "Copy each node's folder to its host, and nothing else:");
            for (id, addresses) in &self.nodes {
                let host = match addresses.client.host() {
                    host if host.contains(':') => format!("[{host}]"),
                    host => host.to_string(),
                };
                let _ = writeln!(text, "     scp -r {out}/{id} {host}:");
            }
        }
        let of_each = if local {
            "Start the nodes, each in a terminal of its own:"
        } else {
            "On each host, start its node:"
        };
        title(&mut text, of_each);
        for id in self.nodes.keys() {
            let folder = if local { format!("{out}/{id}") } else { id.to_string() };
            let _ = writeln!(text, "     agent-reach node --config {folder}/{NODE_FILE}");
        }
        title(&mut text, "Here, once, while more than half of the nodes run:");
        let _ = writeln!(text, "     agent-reach context add {} --from {out}/{ADMIN_DIR}", self.cluster);
        let _ = writeln!(text, "     agent-reach cluster init");
        let _ = writeln!(text, "     agent-reach cluster status");
        title(&mut text, "For each agent, a certificate of its own:");
        let _ = writeln!(text, "     agent-reach certs issue --agent ID --admin {out}/{ADMIN_DIR}");
        text
    }
}

/// A host that is this machine is listened on as it is, every other one through all interfaces.
fn listen_for(address: &Address) -> SocketAddr {
    let ip = match address.ip() {
        Some(ip) if ip.is_loopback() => ip,
        Some(IpAddr::V6(_)) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        _ => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    };
    SocketAddr::new(ip, address.port())
}

/// `text` as one word of a shell command.
pub fn shell_word(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"/._-+,:@%=".contains(&b);
    match !text.is_empty() && text.bytes().all(plain) {
        true => text.to_string(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}
