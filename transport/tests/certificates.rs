//! The certificate matrix: who comes in at which door, and what the others are told.

mod support;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use reach_protocol::{
    Fingerprint, Principal,
    id::{Name, NodeId},
};
use reach_transport::{
    Authority, CertificateInfo, Credentials, Door, Endpoint, Error, Identity, Now, Options, Scrutiny,
    describe,
};
use support::*;

const CLIENT_ALPN: &[u8] = b"agent-reach-client/1";
const PEER_ALPN: &[u8] = b"agent-reach-peer/1";

#[tokio::test]
async fn both_sides_learn_who_the_other_is() {
    let cluster = Cluster::new();
    for (door, dialer) in
        [(Door::Client, user("ann")), (Door::Client, agent("redis-1")), (Door::Peer, node(2))]
    {
        let listener = cluster.server(door, 1);
        let endpoint = cluster.dialer(door, &dialer);
        let prod = name("prod");
        let dial = endpoint.connect(listener.local_addr(), &prod, Some(NodeId(1)));
        let (accepted, dialled) = within(async { tokio::join!(listener.accept(), dial) }).await;
        let (accepted, dialled) = (accepted.unwrap(), dialled.unwrap());
        assert_eq!(accepted.identity(), &dialer);
        assert_eq!(dialled.identity(), &node(1));
        assert_eq!(dialled.remote_addr(), listener.local_addr());
        assert_ne!(accepted.id(), dialled.id());
        assert_eq!(listener.refused(), 0);
    }
}

/// One row: what a stranger shows, and a part of what the server tells it.
struct Row {
    what: &'static str,
    door: Door,
    alpn: &'static [u8],
    shows: Option<Credentials>,
    told: &'static str,
}

#[tokio::test]
async fn whoever_does_not_fit_the_door_is_refused_with_a_reason() {
    let cluster = Cluster::new();
    let rogue = Authority::new(&name("prod"), "client");
    let dated = |from: i64, until: i64| {
        let issued = cluster.clients.issue_between(&user("ann"), hours_from_now(from), hours_from_now(until));
        Some(credentials(&cluster.clients, issued.unwrap()))
    };
    let elsewhere = Identity::new(name("staging"), Principal::User(name("ann")));
    let elsewhere = cluster.clients.issue(&elsewhere, HOUR).unwrap();
    let named = |names| Some(forge(&cluster.clients, names));
    let dns = rcgen::SanType::DnsName("n1.example.org".try_into().unwrap());

    let client = |what, shows, told| Row { what, door: Door::Client, alpn: CLIENT_ALPN, shows, told };
    let peer = |what, shows, told| Row { what, door: Door::Peer, alpn: PEER_ALPN, shows, told };
    let rows = [
        client("expired beyond 48 h", dated(-200, -60), "expired at"),
        client("not valid for another 60 h", dated(60, 200), "not valid before"),
        client(
            "another authority",
            Some(credentials(&rogue, rogue.issue(&user("ann"), HOUR).unwrap())),
            "not signed by this cluster's client CA",
        ),
        client(
            "a peer's certificate at the client door",
            Some(cluster.credentials(Door::Peer, &node(2))),
            "not signed by this cluster's client CA",
        ),
        peer(
            "a client's certificate at the peer door",
            Some(cluster.credentials(Door::Client, &user("ann"))),
            "not signed by this cluster's peer CA",
        ),
        peer(
            "no node at the peer door",
            Some(cluster.credentials(Door::Peer, &user("ann"))),
            "this is the port for peers, reach://prod/user/ann is no node",
        ),
        client(
            "a node at the client door",
            Some(cluster.credentials(Door::Client, &node(2))),
            "this is the port for clients, reach://prod/node/n2 is a node",
        ),
        client(
            "another cluster",
            Some(credentials(&cluster.clients, elsewhere)),
            "belongs to cluster staging, this is cluster prod",
        ),
        client("no name", named(vec![]), "has 0 alternative names"),
        client(
            "two names",
            named(vec![uri("reach://prod/user/ann"), uri("reach://prod/user/bob")]),
            "has 2 alternative names",
        ),
        client("a name beside the host's", named(vec![uri("reach://prod/user/ann"), dns.clone()]), "has 2"),
        client("a host's name only", named(vec![dns]), "the URI of its identity"),
        client("a pattern", named(vec![uri("reach://prod/agent/*")]), "the identity is not"),
        client("a foreign URI", named(vec![uri("spiffe://prod/agent/a")]), "the identity is not"),
        client("no certificate", None, "none was given"),
        Row {
            what: "the peers' protocol at the client door",
            door: Door::Client,
            alpn: PEER_ALPN,
            shows: Some(cluster.credentials(Door::Client, &user("ann"))),
            told: "no port for",
        },
        Row {
            what: "the clients' protocol at the peer door",
            door: Door::Peer,
            alpn: CLIENT_ALPN,
            shows: Some(cluster.credentials(Door::Peer, &node(2))),
            told: "no port for",
        },
    ];
    let doors = [cluster.server(Door::Client, 1), cluster.server(Door::Peer, 1)];
    for row in rows {
        let listener = &doors[(row.door == Door::Peer) as usize];
        let before = listener.refused();
        let error = within(async {
            match stranger(listener.local_addr(), row.alpn, row.shows.as_ref()).await {
                Err(error) => error,
                Ok((_endpoint, connection)) => connection.closed().await,
            }
        })
        .await;
        // What the wire carries is put into words by the dialer; alerts without words are ours to name.
        let heard = error.to_string();
        let by_alert = match row.told {
            "none was given" => "error 116",
            "no port for" => "error 120",
            told => told,
        };
        assert!(heard.contains(by_alert), "{}: {heard}", row.what);
        // The refusal is counted when its task ends, a moment after the stranger hears of it.
        within(async {
            while listener.refused() == before {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
    // Nobody came through, and those who may still can.
    let dialer = cluster.dialer(Door::Client, &user("ann"));
    let prod = name("prod");
    let dial = dialer.connect(doors[0].local_addr(), &prod, None);
    let (accepted, dialled) = within(async { tokio::join!(doors[0].accept(), dial) }).await;
    assert_eq!(accepted.unwrap().identity(), &user("ann"));
    dialled.unwrap();
}

#[tokio::test]
async fn a_clock_wrong_by_less_than_48_hours_cuts_nobody_off() {
    let cluster = Cluster::new();
    let prod = name("prod");
    for (from, until) in [(-100, -40), (40, 100)] {
        let issue = |identity: &Identity| {
            let issued =
                cluster.clients.issue_between(identity, hours_from_now(from), hours_from_now(until)).unwrap();
            credentials(&cluster.clients, issued)
        };
        let listener =
            Endpoint::server(loopback(), Door::Client, prod.clone(), &issue(&node(1)), Options::client())
                .unwrap();
        let dialer = Endpoint::client(Door::Client, &issue(&user("ann")), Options::client()).unwrap();
        let dial = dialer.connect(listener.local_addr(), &prod, None);
        let (accepted, dialled) = within(async { tokio::join!(listener.accept(), dial) }).await;
        accepted.unwrap();
        dialled.unwrap();
    }
}

#[tokio::test]
async fn a_dialer_is_told_why_in_its_own_error() {
    let cluster = Cluster::new();
    let prod = name("prod");
    let client_door = cluster.server(Door::Client, 1);
    let peer_door = cluster.server(Door::Peer, 1);
    let connect = async |endpoint: Endpoint, addr, cluster: &Name, node| {
        within(endpoint.connect(addr, cluster, node)).await.unwrap_err()
    };
    let ann = || cluster.dialer(Door::Client, &user("ann"));

    let error = connect(ann(), client_door.local_addr(), &prod, Some(NodeId(2))).await;
    assert!(matches!(error, Error::WrongPeer { .. }), "{error}");
    assert!(error.to_string().contains("is node n1, expected node n2"), "{error}");

    let error = connect(ann(), client_door.local_addr(), &name("staging"), None).await;
    assert_eq!(error, Error::WrongCluster { expected: name("staging"), found: prod.clone() });

    let error = connect(ann(), peer_door.local_addr(), &prod, None).await;
    assert!(error.to_string().contains("no port for clients"), "{error}");

    // The same name, another authority: a cluster that was made anew.
    let remade = Cluster::new();
    let error =
        connect(remade.dialer(Door::Client, &user("ann")), client_door.local_addr(), &prod, None).await;
    assert!(error.to_string().contains("not signed by the authority this side trusts"), "{error}");

    let elsewhere = Identity::new(name("staging"), Principal::User(name("ann")));
    let error =
        connect(cluster.dialer(Door::Client, &elsewhere), client_door.local_addr(), &prod, None).await;
    assert!(error.to_string().contains("belongs to cluster staging, this is cluster prod"), "{error}");

    let error = connect(cluster.dialer(Door::Client, &node(2)), client_door.local_addr(), &prod, None).await;
    assert!(error.to_string().contains("use the peer port"), "{error}");
}

#[tokio::test]
async fn an_agents_certificate_can_stand_behind_no_address() {
    let cluster = Cluster::new();
    let shown = cluster.credentials(Door::Client, &agent("a"));
    let chain = vec![rustls_pki_types::pem::PemObject::from_pem_slice(shown.cert_pem.as_bytes()).unwrap()];
    let key = rustls_pki_types::pem::PemObject::from_pem_slice(shown.key_pem.as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .unwrap();
    tls.alpn_protocols = vec![CLIENT_ALPN.to_vec()];
    let tls = quinn::crypto::rustls::QuicServerConfig::try_from(tls).unwrap();
    let config = quinn::ServerConfig::with_crypto(Arc::new(tls));
    let imposter = quinn::Endpoint::server(config, loopback()).unwrap();
    let addr = imposter.local_addr().unwrap();
    let serving = tokio::spawn(async move { imposter.accept().await.unwrap().await.map(drop) });

    let dialer = cluster.dialer(Door::Client, &user("ann"));
    let error = within(dialer.connect(addr, &name("prod"), None)).await.unwrap_err();
    assert!(error.to_string().contains("only a node's certificate"), "{error}");
    within(serving).await.unwrap().unwrap_err();
}

#[tokio::test]
async fn a_dial_into_the_void_ends_with_a_timeout() {
    let cluster = Cluster::new();
    let silent = std::net::UdpSocket::bind(loopback()).unwrap();
    let options = Options { connect_timeout: Duration::from_millis(200), ..Options::client() };
    let dialer = cluster.dialer_with(Door::Client, &user("ann"), options);
    let addr = silent.local_addr().unwrap();
    let error = within(dialer.connect(addr, &name("prod"), None)).await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
}

#[tokio::test]
async fn a_taken_port_is_named_with_the_way_out() {
    let cluster = Cluster::new();
    let first = cluster.server(Door::Client, 1);
    let taken = first.local_addr();
    let credentials = cluster.credentials(Door::Client, &node(2));
    let server = || Endpoint::server(taken, Door::Client, name("prod"), &credentials, Options::client());
    let error = server().unwrap_err();
    assert!(matches!(error, Error::Bind { .. }), "{error}");
    assert!(error.to_string().contains("address already in use"), "{error}");
    assert!(error.to_string().contains("choose another port"), "{error}");

    // The port is free again as soon as the endpoint is closed and gone.
    within(first.close()).await;
    assert!(within(first.accept()).await.is_none());
    drop(first);
    within(async {
        while server().is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn over_the_limit_of_connections_the_next_is_refused() {
    let cluster = Cluster::new();
    let listener = cluster.server_with(Door::Client, 1, Options { connections_max: 1, ..Options::client() });
    let dialer = cluster.dialer(Door::Client, &user("ann"));
    let prod = name("prod");
    let first = within(dialer.connect(listener.local_addr(), &prod, None)).await.unwrap();
    let error = within(dialer.connect(listener.local_addr(), &prod, None)).await.unwrap_err();
    assert!(error.to_string().contains("at its limit"), "{error}");
    drop(first);
}

#[tokio::test]
async fn credentials_that_do_not_belong_together_name_their_file() {
    let cluster = Cluster::new();
    let dir = tempfile::tempdir().unwrap();
    let good = cluster.credentials(Door::Client, &user("ann"));
    let other = cluster.credentials(Door::Client, &user("bob"));
    let rogue = Authority::new(&name("prod"), "client");
    let stale = cluster.clients.issue_between(&user("ann"), hours_from_now(-200), hours_from_now(-60));
    let nameless = forge(&cluster.clients, vec![]);
    let write = |file: &str, text: &str| {
        let path = dir.path().join(file);
        std::fs::write(&path, text).unwrap();
        path
    };
    let load = |ca: &str, cert: &str, key: &str| {
        let [ca, cert, key] =
            [("ca.pem", ca), ("cert.pem", cert), ("key.pem", key)].map(|(file, text)| write(file, text));
        Credentials::load(ca, cert, key).map_err(|error| match error {
            Error::Certificate { path, reason } => (path.rsplit('/').next().unwrap().to_owned(), reason),
            other => panic!("{other}"),
        })
    };
    assert!(load(&good.ca_pem, &good.cert_pem, &good.key_pem).is_ok());
    let (ca, stale) = (&good.ca_pem, stale.unwrap());
    for (given, file, reason) in [
        (load("nonsense", &good.cert_pem, &good.key_pem), "ca.pem", "holds no certificate"),
        (load(ca, "", &good.key_pem), "cert.pem", "holds no certificate"),
        (load(ca, &good.key_pem, &good.key_pem), "cert.pem", "holds no certificate"),
        (load(ca, &good.cert_pem, &good.cert_pem), "key.pem", "not a private key"),
        (load(ca, &good.cert_pem, &other.key_pem), "key.pem", "does not belong to the certificate"),
        (load(rogue.cert_pem(), &good.cert_pem, &good.key_pem), "cert.pem", "not signed by the authority"),
        (load(ca, &stale.cert_pem, &stale.key_pem), "cert.pem", "check the clock"),
        (load(ca, &nameless.cert_pem, &nameless.key_pem), "cert.pem", "has 0 alternative names"),
    ] {
        let (found, why) = given.unwrap_err();
        assert_eq!(found, file, "{why}");
        assert!(why.contains(reason), "{why}");
    }
    let error = Credentials::load("/nowhere/ca.pem", "/nowhere/c.pem", "/nowhere/k.pem").unwrap_err();
    assert!(error.to_string().contains("/nowhere/ca.pem: No such file"), "{error}");
    assert!(!format!("{good:?}").contains("PRIVATE"));
}

#[tokio::test]
async fn a_server_needs_a_nodes_certificate_of_its_cluster() {
    let cluster = Cluster::new();
    let server = |cluster_name: &str, identity: &Identity| {
        let credentials = cluster.credentials(Door::Client, identity);
        Endpoint::server(loopback(), Door::Client, name(cluster_name), &credentials, Options::client())
    };
    assert!(server("prod", &node(1)).is_ok());
    assert!(matches!(server("staging", &node(1)), Err(Error::WrongCluster { .. })));
    let error = server("prod", &user("ann")).unwrap_err();
    assert!(error.to_string().contains("needs a node's certificate"), "{error}");
}

#[tokio::test]
async fn an_issued_certificate_describes_itself_and_begins_early() {
    let cluster = Cluster::new();
    let issued = cluster.clients.issue(&agent("redis-1"), 24 * HOUR).unwrap();
    let info = describe(&issued.cert_pem).unwrap();
    assert_eq!(info.identity, agent("redis-1"));
    assert_eq!(info.serial, issued.serial);
    assert_eq!(info.not_after, issued.not_after);
    assert!(info.issuer.contains("Agent-Reach prod client authority"), "{}", info.issuer);
    let early = info.not_before.duration_until(hours_from_now(0)).as_hours();
    assert!((47..=48).contains(&early), "{early}");

    // An authority comes back from its files, and signs what the cluster accepts.
    let again = Authority::from_pem(cluster.clients.cert_pem(), &cluster.clients.key_pem()).unwrap();
    assert_eq!(again.cert_pem(), cluster.clients.cert_pem());
    let issued = again.issue(&user("bob"), HOUR).unwrap();
    let shown = credentials(&cluster.clients, issued.clone());
    assert!(Endpoint::client(Door::Client, &shown, Options::client()).is_ok());
    assert!(Authority::from_pem(cluster.clients.cert_pem(), &cluster.peers.key_pem()).is_err());
    assert!(!format!("{issued:?}").contains("PRIVATE"));
}

/// A node that knows what time it is in the cluster, and which certificates are revoked.
#[derive(Debug)]
struct Knows {
    now: Mutex<Now>,
    revoked: Mutex<Vec<Fingerprint>>,
}

impl Knows {
    fn new(now: Now) -> Arc<Self> {
        Arc::new(Self { now: Mutex::new(now), revoked: Mutex::default() })
    }
}

impl Scrutiny for Knows {
    fn now(&self) -> Now {
        *self.now.lock().unwrap()
    }

    fn is_revoked(&self, certificate: &CertificateInfo) -> bool {
        self.revoked.lock().unwrap().contains(&certificate.fingerprint)
    }
}

fn server_under(cluster: &Cluster, knows: &Arc<Knows>) -> Endpoint {
    let credentials = cluster.credentials(Door::Client, &node(1));
    let options = Options::client();
    Endpoint::server_under(loopback(), Door::Client, name("prod"), &credentials, options, knows.clone())
        .unwrap()
}

#[tokio::test]
async fn dates_are_judged_by_the_clusters_calendar_to_the_second_once_it_is_known() {
    let cluster = Cluster::new();
    let prod = name("prod");
    let fresh = || cluster.dialer(Door::Client, &user("ann"));
    let dated = |from: i64, until: i64| {
        let issued = cluster.clients.issue_between(&user("ann"), hours_from_now(from), hours_from_now(until));
        let shown = credentials(&cluster.clients, issued.unwrap());
        Endpoint::client(Door::Client, &shown, Options::client()).unwrap()
    };
    // What the node takes for the time, in hours from now; who comes; what it is told, if anything.
    let own = |hours: i64| Now::Own(hours_from_now(hours));
    let known = |hours: i64| Now::Cluster(hours_from_now(hours));
    let disputed =
        |cluster: i64, own: i64| Now::Disputed { cluster: hours_from_now(cluster), own: hours_from_now(own) };
    let rows: [(Now, Endpoint, Option<&str>); 14] = [
        // Made a moment ago, on a host that is right.
        (own(10), fresh(), None),
        (own(-10), fresh(), None),
        (known(10), fresh(), None),
        (known(-10), fresh(), None),
        (known(-47), fresh(), None),
        // Out of date by less than 48 h: its own clock may be wrong, the cluster's is not.
        (own(0), dated(-100, -1), None),
        (known(0), dated(-100, -1), Some("expired at")),
        (known(0), dated(1, 100), Some("not valid before")),
        (own(-50), dated(0, 100), Some("not valid before")),
        (known(-50), fresh(), Some("not valid before")),
        // Years apart: whichever of the two is right, nobody is cut off for it; good by neither is not good.
        (disputed(50_000, 0), fresh(), None),
        (disputed(0, -50_000), fresh(), None),
        (disputed(50_000, 0), dated(-100, -1), Some("expired at")),
        (disputed(0, -50_000), dated(-100, -1), Some("expired at")),
    ];
    for (nth, (now, dialer, told)) in rows.into_iter().enumerate() {
        let knows = Knows::new(now);
        let listener = server_under(&cluster, &knows);
        let dial = within(dialer.connect(listener.local_addr(), &prod, None)).await;
        let (Now::Own(time) | Now::Cluster(time) | Now::Disputed { cluster: time, .. }) = now;
        match (dial, told) {
            (Ok(_), None) => {}
            (Err(error), Some(told)) => {
                let text = error.to_string();
                let both = text.contains(told) && text.contains(&time.to_string()[..13]);
                assert!(both && text.contains("check the clock"), "row {nth}: {text}");
            }
            (dial, told) => panic!("row {nth}: {dial:?}, and not {told:?}"),
        }
    }
}

#[test]
fn two_calendars_are_disputed_only_when_they_are_far_apart() {
    let at = hours_from_now;
    let (near, far, own) = (at(47), at(-49), at(0));
    assert_eq!(Now::of(None, own), Now::Own(own));
    assert_eq!(Now::of(Some(near), own), Now::Cluster(near));
    assert_eq!(Now::of(Some(far), own), Now::Disputed { cluster: far, own });
}

#[tokio::test]
async fn a_revoked_certificate_is_refused_whatever_its_dates_and_others_are_not() {
    let cluster = Cluster::new();
    let prod = name("prod");
    let knows = Knows::new(Now::Cluster(hours_from_now(0)));
    let listener = server_under(&cluster, &knows);
    let shown = cluster.credentials(Door::Client, &user("ann"));
    let dialer = Endpoint::client(Door::Client, &shown, Options::client()).unwrap();
    let addr = listener.local_addr();
    let connect = || within(dialer.connect(addr, &prod, None));

    let (accepted, dialled) = within(async { tokio::join!(listener.accept(), connect()) }).await;
    let (accepted, dialled) = (accepted.unwrap(), dialled.unwrap());
    let fingerprint = describe(&shown.cert_pem).unwrap().fingerprint;
    assert_eq!(accepted.certificate().unwrap().fingerprint, fingerprint);
    assert_eq!(dialled.certificate().unwrap().identity, node(1));
    // A connection that stands is closed by whoever watches over it, with the reason.
    accepted.refuse("the certificate was revoked");
    let error = within(dialled.closed()).await;
    assert!(error.to_string().contains("the certificate was revoked"), "{error}");

    knows.revoked.lock().unwrap().push(fingerprint);
    let error = connect().await.unwrap_err();
    assert!(matches!(error, Error::Revoked { .. }) && error.is_refusal(), "{error:?}");
    assert!(error.to_string().contains("revoked: have a new one issued"), "{error}");

    let again = cluster.dialer(Door::Client, &user("ann"));
    within(again.connect(addr, &prod, None)).await.unwrap();
}

#[tokio::test]
async fn a_revoked_node_is_not_dialled_by_those_who_know() {
    let cluster = Cluster::new();
    let prod = name("prod");
    let listener = cluster.server(Door::Peer, 1);
    let knows = Knows::new(Now::Cluster(hours_from_now(0)));
    let credentials = cluster.credentials(Door::Peer, &node(2));
    let options = options(Door::Peer);
    let dialer =
        Endpoint::server_under(loopback(), Door::Peer, prod.clone(), &credentials, options, knows.clone())
            .unwrap();
    let connect = || within(dialer.connect(listener.local_addr(), &prod, Some(NodeId(1))));
    let fingerprint = connect().await.unwrap().certificate().unwrap().fingerprint;
    knows.revoked.lock().unwrap().push(fingerprint);
    let error = connect().await.unwrap_err();
    assert!(error.to_string().contains("the node's certificate was revoked"), "{error}");
}

#[tokio::test]
async fn a_renewed_certificate_is_shown_from_then_on_at_both_ends() {
    let cluster = Cluster::new();
    let prod = name("prod");
    let [one, two] = [1, 2].map(|id| cluster.server(Door::Peer, id));
    let meet = async || {
        let dial = one.connect(two.local_addr(), &prod, Some(NodeId(2)));
        let (accepted, dialled) = within(async { tokio::join!(two.accept(), dial) }).await;
        let (accepted, dialled) = (accepted.unwrap(), dialled.unwrap());
        let serials = [&accepted, &dialled].map(|side| side.certificate().unwrap().serial.clone());
        ((accepted, dialled), serials)
    };
    let (standing, before) = meet().await;
    let new = [(&one, 1), (&two, 2)].map(|(endpoint, id)| {
        let credentials = cluster.credentials(Door::Peer, &node(id));
        endpoint.renew(&credentials).unwrap();
        describe(&credentials.cert_pem).unwrap().serial
    });
    let (_new, after) = meet().await;
    assert_eq!(after, new);
    assert!(before.iter().all(|serial| !after.contains(serial)));
    assert!(!standing.0.is_closed() && !standing.1.is_closed(), "what stands goes on");

    let error = one.renew(&cluster.credentials(Door::Peer, &node(3))).unwrap_err();
    assert!(
        error.to_string().contains("it is reach://prod/node/n3's, and this is reach://prod/node/n1"),
        "{error}"
    );
    assert_eq!(meet().await.1, new, "the one before goes on");
}

#[tokio::test]
async fn an_authority_knows_what_it_signed() {
    let cluster = Cluster::new();
    let issued = cluster.clients.issue(&user("ann"), HOUR).unwrap();
    let old =
        cluster.clients.issue_between(&user("ann"), hours_from_now(-900), hours_from_now(-800)).unwrap();
    for cert in [&issued.cert_pem, &old.cert_pem] {
        assert!(cluster.clients.signed(cert).unwrap());
        assert!(!cluster.peers.signed(cert).unwrap());
        assert!(!Cluster::new().clients.signed(cert).unwrap());
    }
    assert!(cluster.clients.signed("nonsense").is_err());
}
