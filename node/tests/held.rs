//! What somebody else has for a moment, or takes in the last one: ports, folders.

mod support;

use std::{
    fs::File,
    io::{BufRead, BufReader},
    net::UdpSocket,
    path::Path,
    process::{Child, Stdio},
    time::{Duration, Instant},
};

use agent_reach::{cli::cluster_new, node::Node};
use reach_config::{Layout, NodeConfig, layout::NODE_FILE};
use support::{LONG, agent_reach, free_port};

/// A node that did not wait would have given up by then.
const NOT_YET: Duration = Duration::from_millis(300);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_waits_for_the_end_of_the_one_before_it_and_not_for_ever() -> anyhow::Result<()> {
    let dir = tempfile::tempdir()?;
    let out = dir.path().join("cluster");
    let layout = Layout::new("test".parse()?, &[format!("n1=127.0.0.1:{}", free_port() + 1)])?;
    cluster_new::write(&layout, &out)?;
    let config = NodeConfig::load(&out.join("n1").join(NODE_FILE))?;
    std::fs::create_dir_all(&config.data_dir)?;

    // As a process holds them that was killed.
    let folder = File::create(config.data_dir.join("LOCK"))?;
    folder.lock()?;
    let peers = UdpSocket::bind(config.peer_listen)?;
    let clients = UdpSocket::bind(config.client_listen)?;
    let http = std::net::TcpListener::bind(config.http_listen.expect("HTTP is on by default"))?;
    let mut starting = tokio::spawn(Node::start(config.clone()));
    for held in [Box::new(folder) as Box<dyn Send>, Box::new(peers), Box::new(clients), Box::new(http)] {
        let started = tokio::time::timeout(NOT_YET, &mut starting).await;
        assert!(started.is_err(), "it started without what it needs, or did not wait for it");
        drop(held);
    }
    let node = tokio::time::timeout(LONG, starting).await??.map_err(|exit| anyhow::anyhow!(exit))?;

    // This one stays.
    let refused = Node::start(config).await.expect_err("its folder is in use");
    assert!(refused.to_string().contains("in use"), "{refused}");
    node.run(async {}).await?;
    Ok(())
}

/// `dev` whose second node found its port for peers taken, and the first of the node's ports. None when the
/// node was there before us.
fn dev_with_a_taken_port(home: &Path) -> Option<(Child, UdpSocket, u16)> {
    let port = free_port();
    // Enough for a second choice.
    let _others: [u16; 5] = std::array::from_fn(|_| free_port());
    let mut dev = agent_reach(home, &["dev", "--port", &port.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    // Its folder is made after the choice and before the node's start.
    let deadline = Instant::now() + LONG;
    while !home.join("dev/n1/node.toml").exists() {
        assert!(Instant::now() < deadline, "no cluster was made");
        std::thread::sleep(Duration::from_millis(1));
    }
    match UdpSocket::bind(("127.0.0.1", port + 12)) {
        Ok(peers) => Some((dev, peers, port)),
        Err(_) => {
            let _ = dev.kill();
            let _ = dev.wait();
            None
        }
    }
}

#[test]
fn a_port_that_is_taken_after_it_was_chosen_makes_dev_choose_others() {
    // Between the choice and the node's start lie milliseconds: on a busy machine we may come too late.
    let homes: Vec<_> = (0..20).map(|_| tempfile::tempdir().expect("a temporary folder")).collect();
    let raced = homes.iter().find_map(|home| dev_with_a_taken_port(home.path()));
    let (mut dev, _peers, port) = raced.expect("we are the first once in twenty times");
    let lines = BufReader::new(dev.stdout.take().expect("it is piped")).lines().map_while(Result::ok);
    let mut said = Vec::new();
    for line in lines {
        said.push(line);
        if said.last().is_some_and(|line| line.starts_with("ready")) {
            break;
        }
    }
    let _ = dev.kill();
    let _ = dev.wait();
    let said = said.join("\n");
    assert!(said.contains(&format!("port {}", port + 12)) && said.contains("made again"), "{said}");
    assert!(said.contains(&format!("clients 127.0.0.1:{}", port + 21)), "{said}");
    assert!(said.ends_with("In another terminal:"), "{said}");
}
