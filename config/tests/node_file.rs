//! A node's file as its operator meets it: what is filled in, and what each mistake is answered with.

use std::{fs, path::Path};

use reach_config::{NodeConfig, node::Format, node::Level};
use reach_protocol::NodeId;

const SMALLEST: &str = r#"
cluster = "shop"
node_id = "n2"
[peer_tls]
ca = "peer-ca.pem"
cert = "peer.pem"
key = "peer.key"
[client_tls]
ca = "client-ca.pem"
cert = "client.pem"
key = "/etc/reach/client.key"
"#;

fn parse(text: &str) -> NodeConfig {
    NodeConfig::parse(text, Path::new("/srv/n2/node.toml")).unwrap_or_else(|fault| panic!("{fault}"))
}

/// The complaint about the smallest file with `before` put at its head and `after` at its end.
fn complaint(before: &str, after: &str) -> String {
    let text = format!("{before}{SMALLEST}{after}");
    NodeConfig::parse(&text, Path::new("node.toml")).unwrap_err().to_string()
}

#[test]
fn the_smallest_file_has_every_default() {
    let config = parse(SMALLEST);
    assert_eq!(config.node_id, NodeId(2));
    assert_eq!(config.data_dir, Path::new("/srv/n2/data"));
    assert_eq!(config.peer_tls.cert, Path::new("/srv/n2/peer.pem"));
    assert_eq!(config.client_tls.key, Path::new("/etc/reach/client.key"));
    assert_eq!(config.client_listen.to_string(), "127.0.0.1:7481");
    assert_eq!(config.peer_advertise.to_string(), "127.0.0.1:7482");
    assert_eq!(config.nodes.len(), 1);
    assert_eq!(config.nodes[&NodeId(2)].client, config.client_advertise);
    assert_eq!((config.log.level, config.log.format), (Level::Info, Format::Json));
    assert_eq!(
        (config.storage.cache_mib, config.storage.ballast_mib, config.storage.low_water_mib),
        (128, 256, 256)
    );
}

#[test]
fn a_member_is_dialled_as_the_members_say() {
    let members =
        "[nodes.n1]\npeer = \"a:1\"\nclient = \"a:2\"\n[nodes.n2]\npeer = \"b:1\"\nclient = \"b:2\"\n";
    let config = parse(&format!("peer_listen = \"0.0.0.0:7482\"{SMALLEST}{members}"));
    assert_eq!(config.peer_advertise.to_string(), "b:1");
    assert_eq!(config.nodes[&NodeId(1)].client.to_string(), "a:2");
}

#[test]
fn a_rule_in_a_nodes_file_is_shown_its_way() {
    let way = "put it into rules.toml and run `agent-reach rules apply rules.toml`";
    for section in ["liveness", "delivery", "routing", "limits", "grants"] {
        assert_eq!(
            complaint("", &format!("[{section}]\n")),
            format!("line 12: {section}: [{section}] is a rule, in force on all nodes alike: {way}")
        );
    }
    assert_eq!(
        complaint("ttl_ms = 9000", ""),
        format!("line 1: ttl_ms: ttl_ms in [liveness] is a rule, in force on all nodes alike: {way}")
    );
    assert!(complaint("", "[storage]\npayload_bytes = 1").contains("payload_bytes in [limits] is a rule"));
}

#[test]
fn each_mistake_names_line_key_and_way_out() {
    let cases = [
        ("peer_listn = \"x\"", "", "line 1: peer_listn: there is no such key; did you mean peer_listen?"),
        (
            "peer_listen = \"localhost:7482\"",
            "",
            "line 1: peer_listen: \"localhost:7482\" is not an IP address with a port: write 127.0.0.1:7482, or \
             0.0.0.0:7482 to listen on every interface",
        ),
        (
            "client_listen = \"127.0.0.1:7482\"",
            "",
            "line 1: client_listen: 127.0.0.1:7482 is peer_listen as well: nodes and clients need a port each",
        ),
        (
            "client_listen = \"0.0.0.0:7481\"",
            "",
            "client_advertise: is missing: 0.0.0.0:7481 can't be dialled, so say by which HOST:PORT others reach \
             this node",
        ),
        (
            "peer_advertise = \"x\"",
            "",
            "line 1: peer_advertise: \"x\" is not an address: write HOST:PORT, such as 10.20.1.15:7481 or \
             n1.example.org:7481",
        ),
        (
            "",
            "[nodes.n1]\npeer = \"a:1\"\nclient = \"a:2\"",
            "line 12: nodes: n2, this node, is not among n1: add [nodes.n2] with peer and client",
        ),
        ("", "[nodes.n2]\npeer = \"a:1\"", "nodes.n2.client: is missing: write HOST:PORT"),
        (
            "",
            "[nodes.node2]\npeer = \"a:1\"\nclient = \"a:2\"",
            "line 12: nodes.node2: \"node2\" is not a node id: a node id must be n and a number above 0, such as n1",
        ),
        (
            "",
            "[nodes.n2]\npeer = \"a:1\"\nclient = \"a:1\"",
            "line 14: nodes.n2.client: a:1 is taken by nodes.n2.peer: every one needs a port of its own",
        ),
        (
            "peer_advertise = \"b:1\"",
            "[nodes.n2]\npeer = \"a:1\"\nclient = \"a:2\"",
            "line 1: peer_advertise: is b:1, but [nodes.n2] says a:1: leave one of the two out",
        ),
        ("", "[log]\nlevel = \"loud\"", "line 13: log.level: unknown variant `loud`"),
        (
            "",
            "[storage]\ncache_mib = 1",
            "line 13: storage.cache_mib: is 1; it must be from 8 to 1048576 (MiB)",
        ),
    ];
    for (before, after, expected) in cases {
        let complaint = complaint(before, after);
        assert!(complaint.starts_with(expected), "{before}{after}:\n  {complaint}\n  {expected}");
    }
    let without = |line: &str| {
        NodeConfig::parse(&SMALLEST.replace(line, ""), Path::new("node.toml")).unwrap_err().to_string()
    };
    assert_eq!(without("cluster = \"shop\""), "cluster: is missing: write cluster = \"NAME\"");
    assert!(without("node_id = \"n2\"").starts_with("node_id: is missing: write node_id = \"n1\""));
    assert!(without("cert = \"peer.pem\"").starts_with("peer_tls.cert: is missing: name a PEM file"));
}

#[test]
fn an_unreadable_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("node.toml");
    let error = NodeConfig::load(&file).unwrap_err().to_string();
    assert!(
        error.contains("node.toml can't be read") && error.contains("`agent-reach cluster new`"),
        "{error}"
    );

    fs::write(&file, SMALLEST).unwrap();
    for name in ["peer-ca.pem", "peer.key"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let error = NodeConfig::load(&file).unwrap_err().to_string();
    assert!(
        error.contains("node.toml: line 6: peer_tls.cert: ") && error.contains("peer.pem can't be read"),
        "{error}"
    );
}
