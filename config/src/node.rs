//! A node's own file: addresses, folders, certificates, caches, log level. Nothing that replicas
//! must share stands here; such a key is answered with the way to the rules.

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::{Path, PathBuf, absolute},
};

use reach_protocol::{id::Name, id::NodeId};
use serde::Deserialize;

use crate::{
    address::Address,
    document::Document,
    error::{Error, Fault},
    rules,
};

pub const PEER_PORT: u16 = 7482;
pub const CLIENT_PORT: u16 = 7481;
pub const HTTP_PORT: u16 = 7480;

/// The top-level keys of a node's file.
pub(crate) const KEYS: [&str; 13] = [
    "cluster",
    "node_id",
    "data_dir",
    "peer_listen",
    "client_listen",
    "http_listen",
    "peer_advertise",
    "client_advertise",
    "nodes",
    "peer_tls",
    "client_tls",
    "log",
    "storage",
];

/// Everything resolved: paths are absolute, addresses parsed, defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeConfig {
    /// Where it was read.
    pub file: PathBuf,
    pub cluster: Name,
    pub node_id: NodeId,
    pub data_dir: PathBuf,
    /// Where other nodes are listened for. Default 127.0.0.1:7482.
    pub peer_listen: SocketAddr,
    /// Where clients and agents are listened for. Default 127.0.0.1:7481.
    pub client_listen: SocketAddr,
    /// Where HTTP is listened for, on loopback only; none when it is switched off. Default 127.0.0.1,
    /// one port below `client_listen`.
    pub http_listen: Option<SocketAddr>,
    /// Where other nodes dial this one. Default: its entry in `[nodes]`, else `peer_listen`.
    pub peer_advertise: Address,
    /// Where clients and agents dial this one. Default: its entry in `[nodes]`, else `client_listen`.
    pub client_advertise: Address,
    /// The initial members, this node among them.
    pub nodes: BTreeMap<NodeId, Addresses>,
    pub peer_tls: TlsFiles,
    pub client_tls: TlsFiles,
    pub log: Log,
    pub storage: Storage,
}

/// Where one node is dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    pub peer: Address,
    pub client: Address,
}

/// PEM files: whom to believe, and what to show.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    pub level: Level,
    pub format: Format,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl Level {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One JSON object a line.
    #[default]
    Json,
    /// For people at a terminal.
    Text,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Storage {
    /// Block cache in MiB. Default 128.
    pub cache_mib: u32,
    /// Space kept back in MiB, given up when the disk is full so that what is running can end.
    /// Default 256; 0 keeps none.
    pub ballast_mib: u32,
    /// With less free space than this, in MiB, a node takes no new work in. Default 256.
    pub low_water_mib: u32,
}

/// A size beyond it, 1 TiB, is a slip.
const MIB_MAX: u32 = 1 << 20;

impl Default for Storage {
    fn default() -> Self {
        Self { cache_mib: 128, ballast_mib: 256, low_water_mib: 256 }
    }
}

impl NodeConfig {
    /// Reads the file and makes sure that the files it names can be read.
    pub fn load(file: &Path) -> Result<Self, Error> {
        let way_out =
            "give the file that `agent-reach cluster new` wrote for this node, node.toml in its folder";
        let text = fs::read_to_string(file).map_err(|source| Error::Read {
            path: file.to_path_buf(),
            source,
            way_out,
        })?;
        let in_file = |fault| Error::Text { path: file.to_path_buf(), fault };
        let config = Self::parse(&text, file).map_err(in_file)?;
        config.check_files(&text).map_err(in_file)?;
        Ok(config)
    }

    /// `file` says where the text stands: relative paths in it start from that folder.
    pub fn parse(text: &str, file: &Path) -> Result<Self, Fault> {
        let document = Document::parse(text)?;
        let form: Form = document.read(rules::not_in_a_nodes_file)?;
        form.resolve(&document, file)
    }

    fn check_files(&self, text: &str) -> Result<(), Fault> {
        let document = Document::parse(text)?;
        for (table, files) in [("peer_tls", &self.peer_tls), ("client_tls", &self.client_tls)] {
            for (key, path) in [("ca", &files.ca), ("cert", &files.cert), ("key", &files.key)] {
                fs::read(path).map_err(|error| {
                    let problem = format!(
                        "{} can't be read ({error}): put this node's file from `agent-reach cluster new` there, \
                         readable by the user that runs the node",
                        path.display()
                    );
                    document.fault(&format!("{table}.{key}"), problem)
                })?;
            }
        }
        Ok(())
    }
}

/// The file as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    cluster: Option<String>,
    node_id: Option<String>,
    data_dir: Option<PathBuf>,
    peer_listen: Option<String>,
    client_listen: Option<String>,
    http_listen: Option<String>,
    peer_advertise: Option<String>,
    client_advertise: Option<String>,
    nodes: Option<BTreeMap<String, AddressesForm>>,
    peer_tls: Option<TlsForm>,
    client_tls: Option<TlsForm>,
    #[serde(default)]
    log: Log,
    #[serde(default)]
    storage: Storage,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddressesForm {
    peer: Option<String>,
    client: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct TlsForm {
    ca: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
}

impl Form {
    fn resolve(self, document: &Document<'_>, file: &Path) -> Result<NodeConfig, Fault> {
        let file = absolute(file).unwrap_or_else(|_| file.to_path_buf());
        let folder = file.parent().unwrap_or(Path::new("/")).to_path_buf();

        let cluster =
            self.cluster.ok_or_else(|| document.fault("cluster", "is missing: write cluster = \"NAME\""))?;
        let cluster = Name::parse(&cluster)
            .map_err(|error| document.fault("cluster", format!("{cluster:?} is not a name: {error}")))?;
        let node_id = self.node_id.ok_or_else(|| {
            document.fault("node_id", "is missing: write node_id = \"n1\", a number of its own for each node")
        })?;
        let node_id = node_id_in(document, "node_id", &node_id)?;

        let peer_listen = listen(document, "peer_listen", self.peer_listen, PEER_PORT)?;
        let client_listen = listen(document, "client_listen", self.client_listen, CLIENT_PORT)?;
        if peer_listen == client_listen {
            let problem =
                format!("{client_listen} is peer_listen as well: nodes and clients need a port each");
            return Err(document.fault("client_listen", problem));
        }

        let http_listen = http(document, self.http_listen, client_listen)?;

        let mut nodes = BTreeMap::new();
        for (name, form) in self.nodes.unwrap_or_default() {
            let id = node_id_in(document, &format!("nodes.{name}"), &name)?;
            let peer = address(document, &format!("nodes.{name}.peer"), form.peer)?;
            let client = address(document, &format!("nodes.{name}.client"), form.client)?;
            nodes.insert(id, Addresses { peer, client });
        }
        let own = nodes.get(&node_id).cloned();
        if own.is_none() && !nodes.is_empty() {
            let problem = format!(
                "{node_id}, this node, is not among {}: add [nodes.{node_id}] with peer and client",
                nodes.keys().map(NodeId::to_string).collect::<Vec<_>>().join(", ")
            );
            return Err(document.fault("nodes", problem));
        }
        let advertise = |key: &str, text: Option<String>, listed: Option<&Address>, listen: SocketAddr| {
            let named = text.map(|text| address(document, key, Some(text))).transpose()?;
            match (named, listed) {
                (Some(named), Some(listed)) if named != *listed => {
                    let problem =
                        format!("is {named}, but [nodes.{node_id}] says {listed}: leave one of the two out");
                    Err(document.fault(key, problem))
                }
                (Some(named), _) => Ok(named),
                (None, Some(listed)) => Ok(listed.clone()),
                (None, None) if listen.ip().is_unspecified() => {
                    let problem = format!(
                        "is missing: {listen} can't be dialled, so say by which HOST:PORT others reach this node"
                    );
                    Err(document.fault(key, problem))
                }
                (None, None) => Ok(Address::from(listen)),
            }
        };
        let peer_advertise =
            advertise("peer_advertise", self.peer_advertise, own.as_ref().map(|own| &own.peer), peer_listen)?;
        let client_advertise = advertise(
            "client_advertise",
            self.client_advertise,
            own.as_ref().map(|own| &own.client),
            client_listen,
        )?;
        let own = Addresses { peer: peer_advertise.clone(), client: client_advertise.clone() };
        nodes.insert(node_id, own);
        no_address_twice(document, &nodes)?;

        if !(8..=MIB_MAX).contains(&self.storage.cache_mib) {
            let problem = format!("is {}; it must be from 8 to {MIB_MAX} (MiB)", self.storage.cache_mib);
            return Err(document.fault("storage.cache_mib", problem));
        }
        let Storage { ballast_mib, low_water_mib, .. } = self.storage;
        for (key, mib) in [("storage.ballast_mib", ballast_mib), ("storage.low_water_mib", low_water_mib)] {
            if mib > MIB_MAX {
                return Err(document.fault(key, format!("is {mib}; it must be from 0 to {MIB_MAX} (MiB)")));
            }
        }

        Ok(NodeConfig {
            data_dir: folder.join(self.data_dir.unwrap_or_else(|| PathBuf::from("data"))),
            peer_tls: tls(document, "peer_tls", self.peer_tls, &folder)?,
            client_tls: tls(document, "client_tls", self.client_tls, &folder)?,
            log: self.log,
            storage: self.storage,
            file,
            cluster,
            node_id,
            peer_listen,
            client_listen,
            http_listen,
            peer_advertise,
            client_advertise,
            nodes,
        })
    }
}

fn node_id_in(document: &Document<'_>, key: &str, text: &str) -> Result<NodeId, Fault> {
    text.parse().map_err(|error| document.fault(key, format!("{text:?} is not a node id: {error}")))
}

fn listen(document: &Document<'_>, key: &str, text: Option<String>, port: u16) -> Result<SocketAddr, Fault> {
    let Some(text) = text else {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    };
    text.parse::<SocketAddr>().ok().filter(|addr| addr.port() != 0).ok_or_else(|| {
        let problem = format!(
            "{text:?} is not an IP address with a port: write 127.0.0.1:{port}, or 0.0.0.0:{port} to listen on \
             every interface"
        );
        document.fault(key, problem)
    })
}

/// Until the HTTP door has TLS and tokens it is open to this machine alone.
fn http(
    document: &Document<'_>,
    text: Option<String>,
    client_listen: SocketAddr,
) -> Result<Option<SocketAddr>, Fault> {
    let Some(text) = text else {
        return Ok(Some(http_beside(client_listen)));
    };
    if text == "off" {
        return Ok(None);
    }
    let http_listen = listen(document, "http_listen", Some(text), HTTP_PORT)?;
    if !http_listen.ip().is_loopback() {
        let problem = format!(
            "is {http_listen}, but HTTP has neither TLS nor tokens yet, so it is for this machine alone: write \
             127.0.0.1:{port}, or \"off\"",
            port = http_listen.port()
        );
        return Err(document.fault("http_listen", problem));
    }
    Ok(Some(http_listen))
}

/// Where HTTP is listened for when nothing else is said: on loopback, one port below the clients'.
pub fn http_beside(client_listen: SocketAddr) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], client_listen.port().wrapping_sub(1).max(1)))
}

fn address(document: &Document<'_>, key: &str, text: Option<String>) -> Result<Address, Fault> {
    let text = text.ok_or_else(|| document.fault(key, "is missing: write HOST:PORT"))?;
    let address: Address =
        text.parse().map_err(|error: crate::address::BadAddress| document.fault(key, error.to_string()))?;
    if address.ip().is_some_and(|ip| ip.is_unspecified()) {
        let problem = format!("{address} can't be dialled: write the host by which others reach the node");
        return Err(document.fault(key, problem));
    }
    Ok(address)
}

fn no_address_twice(document: &Document<'_>, nodes: &BTreeMap<NodeId, Addresses>) -> Result<(), Fault> {
    let mut seen: BTreeMap<&Address, String> = BTreeMap::new();
    for (id, addresses) in nodes {
        for (kind, address) in [("peer", &addresses.peer), ("client", &addresses.client)] {
            let key = format!("nodes.{id}.{kind}");
            if let Some(first) = seen.insert(address, key.clone()) {
                let problem = format!("{address} is taken by {first}: every one needs a port of its own");
                return Err(document.fault(&key, problem));
            }
        }
    }
    Ok(())
}

fn tls(
    document: &Document<'_>,
    table: &str,
    form: Option<TlsForm>,
    folder: &Path,
) -> Result<TlsFiles, Fault> {
    let form = form.ok_or_else(|| {
        let problem =
            "is missing: it names the files ca, cert and key (PEM) that `agent-reach cluster new` wrote";
        document.fault(table, problem)
    })?;
    let path = |key: &str, path: Option<PathBuf>| {
        path.map(|path| folder.join(path)).ok_or_else(|| {
            document.fault(
                &format!("{table}.{key}"),
                "is missing: name a PEM file, relative to this file's folder",
            )
        })
    };
    Ok(TlsFiles { ca: path("ca", form.ca)?, cert: path("cert", form.cert)?, key: path("key", form.key)? })
}
