//! Requests a second over one link on loopback, one at a time and many in flight.
//! `cargo run --release -p reach-transport --example ping`

use std::time::{Duration, Instant};

use bytes::Bytes;
use reach_protocol::{Principal, id::Name, id::NodeId};
use reach_transport::{Authority, Credentials, Door, Endpoint, Identity, Options};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cluster = Name::parse("ping")?;
    let authority = Authority::new(&cluster, "client");
    let credentials = |principal| {
        let identity = Identity::new(cluster.clone(), principal);
        let issued = authority.issue(&identity, Duration::from_secs(3600))?;
        let ca_pem = authority.cert_pem().to_owned();
        Ok::<_, reach_transport::Error>(Credentials {
            ca_pem,
            cert_pem: issued.cert_pem,
            key_pem: issued.key_pem,
        })
    };
    let node = credentials(Principal::Node(NodeId(1)))?;
    let user = credentials(Principal::User(Name::parse("ann")?))?;
    let addr = "127.0.0.1:0".parse()?;
    let server = Endpoint::server(addr, Door::Client, cluster.clone(), &node, Options::client())?;
    let addr = server.local_addr();
    tokio::spawn(async move {
        while let Some(connection) = server.accept().await {
            let (tx, mut rx) = connection.link();
            tokio::spawn(async move {
                while let Some(frame) = rx.recv().await {
                    if tx.send(frame).is_err() {
                        return;
                    }
                }
            });
        }
    });
    let client = Endpoint::client(Door::Client, &user, Options::client())?;
    for (size, in_flight) in [(200, 1), (200, 256), (4 << 10, 256), (1 << 20, 4)] {
        let connection = client.connect(addr, &cluster, None).await?;
        let (tx, mut rx) = connection.link();
        let frame = Bytes::from(vec![7; size]);
        for _ in 0..in_flight {
            tx.send(frame.clone())?;
        }
        let (start, mut count) = (Instant::now(), 0u64);
        while start.elapsed() < Duration::from_secs(3) {
            if rx.recv().await.is_none() {
                return Err(connection.closed().await.into());
            }
            count += 1;
            tx.send(frame.clone())?;
        }
        let rate = count as f64 / start.elapsed().as_secs_f64();
        println!("{size:>8} bytes, {in_flight:>3} in flight: {rate:>9.0} requests/s");
    }
    Ok(())
}
