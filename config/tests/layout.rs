//! The plan of a new cluster: what is rendered parses, and the next commands can be typed as printed.

use std::path::Path;

use expect_test::{expect, expect_file};
use reach_config::{Layout, NodeConfig, context::ContextFile, rules};
use reach_protocol::{NodeId, id::Name};

fn layout(hosts: &[&str]) -> Layout {
    let hosts: Vec<String> = hosts.iter().map(|host| host.to_string()).collect();
    Layout::new(Name::parse("shop").unwrap(), &hosts).unwrap_or_else(|error| panic!("{error}"))
}

fn complaint(hosts: &[&str]) -> String {
    let hosts: Vec<String> = hosts.iter().map(|host| host.to_string()).collect();
    Layout::new(Name::parse("shop").unwrap(), &hosts).unwrap_err().to_string()
}

/// The node's file as the node would read it.
fn config(layout: &Layout, node: u64) -> NodeConfig {
    let file = layout.node_file(NodeId(node)).unwrap();
    let config = NodeConfig::parse(&file.render(), Path::new("/srv/node.toml"))
        .unwrap_or_else(|fault| panic!("{fault}\n{}", file.render()));
    assert_eq!((config.cluster.clone(), config.node_id), (file.cluster, file.node_id));
    assert_eq!((config.peer_listen, config.client_listen), (file.peer_listen, file.client_listen));
    assert_eq!((config.log.clone(), config.storage.clone()), (file.log, file.storage));
    assert_eq!(config.nodes, file.nodes);
    config
}

#[test]
fn the_examples_are_what_cluster_new_writes() {
    let layout = layout(&["n1=n1.example.org", "n2=n2.example.org", "n3=n3.example.org"]);
    for (node, expected) in [
        (1, expect_file!["../examples/n1.toml"]),
        (2, expect_file!["../examples/n2.toml"]),
        (3, expect_file!["../examples/n3.toml"]),
    ] {
        expected.assert_eq(&layout.node_file(NodeId(node)).unwrap().render());
    }
}

#[test]
fn the_examples_parse() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let read = |name: &str| std::fs::read_to_string(examples.join(name)).unwrap();
    let mut members = Vec::new();
    for node in 1..=3 {
        let name = format!("n{node}.toml");
        let config = NodeConfig::parse(&read(&name), &examples.join(&name)).unwrap();
        assert_eq!(config.node_id, NodeId(node));
        assert_eq!(config.client_tls.key, examples.join("client.key"));
        members.push(config.nodes);
    }
    assert!(members.iter().all(|nodes| *nodes == members[0]), "the three agree on who they are");
    rules::parse(&read("rules.toml")).unwrap();
}

#[test]
fn what_is_rendered_parses() {
    let far = layout(&["n1=10.0.0.1", "n2=n2.example.org", "n3=fd00::3"]);
    assert_eq!(config(&far, 1).client_listen.to_string(), "0.0.0.0:7481");
    assert_eq!(config(&far, 2).peer_advertise.to_string(), "n2.example.org:7482");
    assert_eq!(config(&far, 3).peer_listen.to_string(), "[::]:7482");
    assert_eq!(config(&far, 3).client_advertise.to_string(), "[fd00::3]:7481");

    let near = layout(&["n1=127.0.0.1", "n2=127.0.0.1", "n3=127.0.0.1:9000"]);
    assert_eq!(config(&near, 2).client_listen.to_string(), "127.0.0.1:7491");
    assert_eq!(config(&near, 3).peer_listen.to_string(), "127.0.0.1:9001");
}

#[test]
fn a_plan_that_can_not_work_is_refused() {
    assert_eq!(complaint(&["n1"]), "--node n1: there is no =: write n1=HOST, such as n1=10.20.1.15");
    assert!(complaint(&["1=a"]).contains("a node id is n and a number above 0"));
    assert!(complaint(&["n1=a b"]).contains("that is not a host"));
    assert!(complaint(&["n1=0.0.0.0"]).contains("others can't dial that host"));
    assert!(complaint(&["n1=a:65535"]).contains("would be too large"));
    assert!(complaint(&["n1=a", "n1=b"]).contains("named twice"));
    assert!(complaint(&["n1=a:9000", "n2=a:9001"]).contains("another node has that host and port"));
    assert!(complaint(&[]).contains("name 1 to 9"));
}

#[test]
fn the_admin_context_reaches_every_node() {
    let context: ContextFile = layout(&["n1=10.0.0.1", "n2=10.0.0.2"]).admin_context();
    expect![[r##"
        # How `agent-reach` reaches this cluster, and as whom. Relative paths start from this folder.
        cluster = "shop"
        endpoints = ["10.0.0.1:7481", "10.0.0.2:7481"]
        ca = "client-ca.pem"
        cert = "admin.pem"
        key = "admin.key"
    "##]]
    .assert_eq(&context.render());
}

#[test]
fn the_next_commands_can_be_typed_as_they_stand() {
    expect![[r#"
        1. Copy each node's folder to its host, and nothing else:
             scp -r './my shop'/n1 10.0.0.1:
             scp -r './my shop'/n2 [fd00::2]:
        2. On each host, start its node:
             agent-reach node --config n1/node.toml
             agent-reach node --config n2/node.toml
        3. Here, once, while more than half of the nodes run:
             agent-reach context add shop --from './my shop'/admin
             agent-reach cluster init
             agent-reach cluster status
        4. For each agent, a certificate of its own:
             agent-reach certs issue --agent ID --admin './my shop'/admin
    "#]]
    .assert_eq(&layout(&["n1=10.0.0.1", "n2=fd00::2"]).next_commands(Path::new("./my shop")));
    expect![[r#"
        1. Start the nodes, each in a terminal of its own:
             agent-reach node --config shop/n1/node.toml
             agent-reach node --config shop/n2/node.toml
        2. Here, once, while more than half of the nodes run:
             agent-reach context add shop --from shop/admin
             agent-reach cluster init
             agent-reach cluster status
        3. For each agent, a certificate of its own:
             agent-reach certs issue --agent ID --admin shop/admin
    "#]]
    .assert_eq(&layout(&["n1=127.0.0.1", "n2=127.0.0.1"]).next_commands(Path::new("shop")));
}
