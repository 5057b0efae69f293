//! What a caller is told, whatever happens to the nodes it asks.

mod fake;

use std::time::Duration;

use fake::{Cluster, Peer, envelope, finished, waiting};
use reach_client::{
    Client, Error, Options,
    protocol::{Code, MsgId, frame::Request},
};

const LONG: Duration = Duration::from_secs(20);

/// The next submission; waits that go on meanwhile are left without an answer.
async fn submission(peer: &mut Peer) -> (u64, MsgId, Option<u64>) {
    loop {
        let (id, request) = peer.request().await;
        match request {
            Request::Submit { envelope, sent_at_ms, wait_ms } => {
                assert!(sent_at_ms.is_some());
                return (id, envelope.msg_id.clone().expect("made by the client"), wait_ms);
            }
            Request::Message { .. } => {}
            other => panic!("expected a submission, not {other:?}"),
        }
    }
}

#[tokio::test]
async fn a_call_returns_the_end_of_its_message() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let (client, mut peer) = tokio::join!(Client::connect(cluster.user(&[&node])), node.accept());
    let client = client.unwrap();
    assert_eq!(client.principal().to_string(), "user/u");
    let call = tokio::spawn(async move { client.call(envelope(), LONG).await });
    let (id, msg_id, wait_ms) = submission(&mut peer).await;
    assert!(wait_ms.is_some_and(|ms| ms < 20_000), "the node's wait ends before ours");
    // Accepted, no end yet: it goes on waiting by id.
    peer.answer(id, waiting(&msg_id));
    let (id, request) = peer.request().await;
    assert!(matches!(request, Request::Message { msg_id: asked, wait_ms: Some(_), .. } if asked == msg_id));
    peer.answer(id, finished(&msg_id, "{\"ok\":true}"));
    let response = call.await.unwrap().unwrap();
    assert_eq!((response.in_reply_to, response.result.unwrap().as_str()), (msg_id, "{\"ok\":true}"));
}

#[tokio::test]
async fn a_lost_node_is_replaced_and_asked_under_the_same_id() {
    let cluster = Cluster::new();
    let (first, second) = (cluster.node(1), cluster.node(2));

    // Two nodes; whichever is dialled first hangs up on the question.
    let connect = tokio::spawn(Client::connect(cluster.user(&[&first, &second])));
    let (mut peer, other) = tokio::select! {
        peer = first.accept() => (peer, &second),
        peer = second.accept() => (peer, &first),
    };
    let client = connect.await.unwrap().unwrap();
    let call = tokio::spawn(async move { client.call(envelope(), LONG).await });
    let (_, msg_id, _) = submission(&mut peer).await;
    peer.hang_up();
    let mut peer = other.accept().await;
    let (id, again, _) = submission(&mut peer).await;
    assert_eq!(again, msg_id);
    peer.answer(id, finished(&msg_id, "1"));
    assert_eq!(call.await.unwrap().unwrap().in_reply_to, msg_id);
}

#[tokio::test]
async fn a_refusal_that_may_pass_is_not_shown() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let (client, mut peer) = tokio::join!(Client::connect(cluster.user(&[&node])), node.accept());
    let client = client.unwrap();
    let submit = tokio::spawn(async move { client.submit(envelope()).await });
    let (id, msg_id, wait_ms) = submission(&mut peer).await;
    assert_eq!(wait_ms, None);
    peer.refuse(id, Code::NoLeader);
    let (id, again, _) = submission(&mut peer).await;
    assert_eq!(again, msg_id);
    peer.answer(id, waiting(&msg_id));
    let submitted = submit.await.unwrap().unwrap();
    assert_eq!(submitted.msg_id, msg_id);
    assert!(!format!("{submitted:?}").contains("done"));
}

#[tokio::test]
async fn a_draining_node_is_left() {
    let cluster = Cluster::new();
    let (first, second) = (cluster.node(1), cluster.node(2));
    let connect = tokio::spawn(Client::connect(cluster.user(&[&first, &second])));
    let (mut peer, other) = tokio::select! {
        peer = first.accept() => (peer, &second),
        peer = second.accept() => (peer, &first),
    };
    let client = connect.await.unwrap().unwrap();
    let submit = tokio::spawn(async move { client.submit(envelope()).await });
    let (id, ..) = submission(&mut peer).await;
    peer.refuse(id, Code::NodeDraining);
    let mut peer = other.accept().await;
    let (id, msg_id, _) = submission(&mut peer).await;
    peer.answer(id, waiting(&msg_id));
    submit.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_end_of_patience_says_what_is_known() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let (client, mut peer) = tokio::join!(Client::connect(cluster.user(&[&node])), node.accept());
    let client = client.unwrap();
    let short = Duration::from_millis(300);

    // Never answered: unknown.
    let (error, _) = tokio::join!(client.call(envelope(), short), submission(&mut peer));
    let error = error.unwrap_err();
    assert!(matches!(&error, Error::Unknown { msg_id: Some(_) }), "{error}");
    assert_eq!((error.code(), error.retryable()), (Code::OutcomeUnknown, true));

    // Accepted: the caller's own timeout.
    let accept = async {
        let (id, msg_id, _) = submission(&mut peer).await;
        peer.answer(id, waiting(&msg_id));
        msg_id
    };
    let (error, accepted) = tokio::join!(client.call(envelope(), short), accept);
    assert!(matches!(error, Err(Error::Timeout { msg_id }) if msg_id == accepted));

    // Refused to the end: the refusal.
    let refuse = async {
        let (id, ..) = submission(&mut peer).await;
        peer.refuse(id, Code::Invalid);
    };
    let (error, ()) = tokio::join!(client.call(envelope(), short), refuse);
    assert!(matches!(error, Err(Error::Refused(reply)) if reply.code == Code::Invalid));

    client.clone().close().await;
    assert!(matches!(client.submit(envelope()).await, Err(Error::Closed)));
}

#[tokio::test]
async fn no_node_at_all_is_unreachable() {
    let cluster = Cluster::new();
    let (first, second) = (cluster.node(1), cluster.node(2));
    let mut options = cluster.user(&[&first, &second]);
    drop((first, second));
    options.connect_timeout = Duration::from_millis(1_500);
    options.dial_timeout = Duration::from_millis(300);
    let endpoints = options.endpoints.clone();
    let error = Client::connect(options).await.unwrap_err();
    assert!(matches!(&error, Error::Unreachable { .. }), "{error}");
    assert_eq!((error.code(), error.retryable()), (Code::NoLeader, true));
    let text = error.to_string();
    assert!(endpoints.iter().all(|endpoint| text.matches(endpoint.as_str()).count() == 1), "{text}");
}

#[tokio::test]
async fn a_silent_address_does_not_keep_the_next_one_waiting() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let silent = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let mut options = cluster.user(&[&node]);
    options.endpoints.push(silent.local_addr().unwrap().to_string());
    // No dial of this test can end by its own time.
    options.dial_timeout = Duration::from_secs(3_600);
    options.connect_timeout = Duration::from_secs(3_600);
    // A client begins anywhere in its list: until one has dialled the silent address first.
    for _ in 0..64 {
        let (client, _peer) = tokio::time::timeout(LONG, async {
            tokio::join!(Client::connect(options.clone()), node.accept())
        })
        .await
        .expect("connected to the one that answers");
        client.unwrap();
        if silent.try_recv(&mut [0; 2048]).is_ok() {
            return;
        }
    }
    panic!("64 clients began with the same address");
}

#[tokio::test]
async fn a_refusal_of_every_node_is_told_at_once_and_not_to_be_repeated() {
    let cluster = Cluster::new();
    let stranger = Cluster::new();
    let node = cluster.node(1);
    let peers = cluster.peer_port(2);

    // Another CA under the same cluster name; then the port next to the right one.
    let wrong_ca = stranger.user(&[&node]);
    let mut wrong_port = cluster.user(&[&node]);
    wrong_port.endpoints = vec![peers.local_addr().to_string()];
    for (mut options, why) in
        [(wrong_ca, "the node's certificate is not signed by"), (wrong_port, "that is no port for clients")]
    {
        // Nothing here waits for this time to be over.
        options.connect_timeout = Duration::from_secs(3_600);
        let endpoint = options.endpoints[0].clone();
        let refused = tokio::time::timeout(LONG, Client::connect(options.clone())).await.expect("at once");
        let error = refused.unwrap_err();
        assert!(matches!(&error, Error::Unauthenticated { .. }), "{error}");
        assert_eq!((error.code(), error.retryable()), (Code::Unauthenticated, false));
        let text = error.to_string();
        assert!(text.contains(why) && text.matches(&endpoint).count() == 1, "{text}");

        let dir = tempfile::tempdir().unwrap();
        let agent = fake::worker(&dir).handler(|_| async { unreachable!("nothing is delivered") });
        let refused = tokio::time::timeout(LONG, agent.connect(options)).await.expect("at once");
        assert!(matches!(refused, Err(Error::Unauthenticated { .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_shown_from_the_next_connection_on() {
    let cluster = Cluster::new();
    let node = cluster.node(1);
    let dir = cluster.context(&[&node]);
    let options = Options::from_context(dir.path()).unwrap();
    // Renewed between the reading and the first dial.
    let renewed = cluster.issue("u");
    renewed.write(dir.path(), ["user.pem", "user.key"]);
    let (client, mut peer) = tokio::join!(Client::connect(options), node.accept());
    let _client = client.unwrap();
    assert_eq!(peer.serial(), renewed.serial());

    let mut shown = renewed.serial();
    let again = cluster.issue("u");
    let foreign = cluster.issue("somebody_else");
    for (issued, names, is_shown) in [
        // One file after the other: half of them is nothing yet.
        (&again, &["user.pem"][..], false),
        (&again, &["user.key"], true),
        // Another identity is another client.
        (&foreign, &["user.pem", "user.key"], false),
    ] {
        names.iter().for_each(|name| issued.write(dir.path(), [*name]));
        peer.hang_up();
        peer = node.accept().await;
        if is_shown {
            shown = issued.serial();
        }
        assert_eq!(peer.serial(), shown, "{names:?}");
    }
}
