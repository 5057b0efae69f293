//! The offline commands as they are used: a cluster's folders, certificates, contexts.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use clap::Parser;
use reach_config::{Contexts, NodeConfig, layout::ADMIN_DIR};
use reach_protocol::{AgentId, Principal, Revocation, Revoked, Stamp};
use reach_transport::{Credentials, describe};

use super::{
    Failure,
    args::{Args, CertsCommand, ClusterCommand, Command},
    certs, certs_renew, certs_revoke, cluster_new, context,
};
use crate::show::Shown;

struct Desk {
    dir: tempfile::TempDir,
    contexts: Contexts,
    known: certs::Known,
}

impl Desk {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let contexts = Contexts::open(dir.path().join("home"));
        Self { dir, contexts, known: Err("no node runs".into()) }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Runs a command line; `DIR` stands for the desk's folder.
    fn run(&self, line: &str) -> Result<Shown, Failure> {
        let line = line.replace("DIR", &self.dir.path().display().to_string());
        let args = Args::parse_from(std::iter::once("agent-reach").chain(line.split(' ')));
        let choice = args.global.context.as_deref();
        match &args.command {
            Command::Cluster(ClusterCommand::New(args)) => cluster_new::run(args),
            Command::Certs(CertsCommand::Issue(args)) => certs::issue(args, &self.contexts, choice),
            Command::Certs(CertsCommand::Ls { dir }) => {
                certs::ls(dir.as_deref(), &self.contexts, choice, &self.known)
            }
            Command::Certs(CertsCommand::Renew(args)) => certs_renew::run(args, &self.contexts, choice),
            Command::Context(command) => context::run(command, &self.contexts),
            _ => panic!("not an offline command: {line}"),
        }
    }

    fn with_cluster() -> Self {
        let desk = Self::new();
        desk.run("cluster new --name shop --node n1=127.0.0.1 --node n2=127.0.0.1 --node n3=127.0.0.1 --out DIR/shop")
            .unwrap();
        desk
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn a_new_clusters_nodes_can_start_from_their_folders() {
    let desk = Desk::with_cluster();
    for node in ["n1", "n2", "n3"] {
        let config = NodeConfig::load(&desk.path("shop").join(node).join("node.toml")).unwrap();
        assert_eq!(config.node_id.to_string(), node);
        for files in [&config.peer_tls, &config.client_tls] {
            let credentials = Credentials::load(&files.ca, &files.cert, &files.key).unwrap();
            let info = describe(&credentials.cert_pem).unwrap();
            assert_eq!(info.identity.to_string(), format!("reach://shop/node/{node}"));
            assert_eq!(mode(&files.key), 0o600);
        }
        let names: Vec<String> = fs::read_dir(desk.path("shop").join(node))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert!(!names.iter().any(|name| name.ends_with("ca.key")), "{names:?}");
    }
    let admin = desk.path("shop").join(ADMIN_DIR);
    assert_eq!(
        (mode(&admin), mode(&admin.join("peer-ca.key")), mode(&admin.join("client-ca.key"))),
        (0o700, 0o600, 0o600)
    );
    assert_eq!(fs::read_dir(desk.path("shop")).unwrap().count(), 4, "nothing is left over");
}

#[test]
fn nothing_is_overwritten() {
    let desk = Desk::with_cluster();
    let before = fs::read(desk.path("shop/admin/client-ca.key")).unwrap();
    let error = desk.run("cluster new --name shop --node n1=127.0.0.1 --out DIR/shop").unwrap_err();
    assert!(error.to_string().contains("nothing is overwritten"), "{error}");
    let layout =
        reach_config::Layout::new(reach_protocol::id::Name::parse("shop").unwrap(), &["n1=a".into()])
            .unwrap();
    assert_eq!(cluster_new::write(&layout, &desk.path("shop")).unwrap_err().exit, 3);
    assert_eq!(fs::read(desk.path("shop/admin/client-ca.key")).unwrap(), before);

    desk.run("certs issue --agent a1 --admin DIR/shop/admin").unwrap();
    let error = desk.run("certs issue --agent a1 --admin DIR/shop/admin").unwrap_err();
    assert!(error.to_string().contains("a1.pem exists"), "{error}");
}

#[test]
fn the_next_commands_are_the_ones_that_work() {
    let desk = Desk::new();
    let shown = desk.run("cluster new --name shop --node n1=127.0.0.1 --out DIR/shop").unwrap();
    let text = shown.notes.join("\n");
    let typed = |start: &str| {
        let line = text
            .lines()
            .map(str::trim)
            .find(|line| line.starts_with(start))
            .unwrap_or_else(|| panic!("{text}"));
        line.strip_prefix("agent-reach ").unwrap().to_string()
    };
    desk.run(&typed("agent-reach context add")).unwrap();
    desk.run(&typed("agent-reach certs issue").replace("ID", "counter")).unwrap();
    let file = typed("agent-reach node").replace("node --config ", "");
    NodeConfig::load(Path::new(&file)).unwrap();
    assert_eq!(desk.contexts.current(None).unwrap().name.as_str(), "shop");
}

#[test]
fn an_issued_certificate_names_its_identity_and_can_be_handed_over() {
    let desk = Desk::with_cluster();
    let shown =
        desk.run("certs issue --operator ann --admin DIR/shop/admin --out DIR/ann --lifetime 20d").unwrap();
    let text = shown.notes.join("\n");
    assert!(text.contains("add \"ann\" to operators in [grants]"), "{text}");
    desk.run("context add ann --from DIR/ann").unwrap();
    let context = desk.contexts.current(None).unwrap();
    let credentials = Credentials::load(&context.ca, &context.cert, &context.key).unwrap();
    let info = describe(&credentials.cert_pem).unwrap();
    assert_eq!(info.identity.to_string(), "reach://shop/user/ann");
    let days = info.not_after.duration_since(info.not_before).as_hours() / 24;
    assert_eq!(days, 22, "20 days, and 48 hours early");
    assert_eq!(context.endpoints.len(), 3);

    let list = desk.run("certs ls --dir DIR/shop/admin").unwrap();
    let files: Vec<&str> =
        list.json["items"].as_array().unwrap().iter().map(|item| item["file"].as_str().unwrap()).collect();
    assert_eq!(files, ["admin.pem", "client-ca.pem", "peer-ca.pem"]);
    assert_eq!(list.json["items"][0]["identity"], "reach://shop/user/admin");
    let authority = &list.json["items"][1];
    assert_eq!((&authority["authority"], &authority["expired"]), (&true.into(), &false.into()));
    let years = |key: &str| authority[key].as_str().unwrap()[..4].parse::<i32>().unwrap();
    assert!((9..=11).contains(&(years("not_after") - years("not_before"))), "{authority}");
    assert_eq!(list.rows[1][1], "certificate authority");
    assert_eq!(list.rows[1][3], authority["not_after"].as_str().unwrap());
    let notes = desk.run("certs ls").unwrap().notes;
    assert!(notes.len() == 2 && notes[0].starts_with("client.pem ends soon"), "{notes:?}");
    assert_eq!(notes[1], "which are revoked is not known: no node runs");
    assert_eq!(list.rows[0][5], "unknown");

    let error = desk.run("certs issue --agent a").unwrap_err();
    assert!(error.to_string().contains("holds no client-ca.key") && error.exit == 2, "{error}");
}

#[test]
fn an_agents_certificate_is_issued_on_first_use_and_kept() {
    let desk = Desk::with_cluster();
    desk.run("context add shop --from DIR/shop/admin").unwrap();
    let agent_id = AgentId::parse("counter").unwrap();
    let context = desk.contexts.current(None).unwrap();
    let error = certs::for_agent(&context, &agent_id).unwrap_err();
    assert!(error.to_string().contains("certs issue --agent counter"), "{error}");

    fs::copy(desk.path("shop/admin/client-ca.key"), context.dir.join("client-ca.key")).unwrap();
    let files = std::thread::scope(|scope| {
        let starts: Vec<_> =
            (0..8).map(|_| scope.spawn(|| certs::for_agent(&context, &agent_id).unwrap())).collect();
        starts.into_iter().map(|start| start.join().unwrap()).next_back().unwrap()
    });
    let credentials = Credentials::load(&files.ca, &files.cert, &files.key).unwrap();
    let info = describe(&credentials.cert_pem).unwrap();
    assert_eq!(info.identity.principal, Principal::Agent(agent_id.clone()));
    let again = certs::for_agent(&context, &agent_id).unwrap();
    assert_eq!(describe(&fs::read_to_string(again.cert).unwrap()).unwrap().serial, info.serial);
}

#[test]
fn a_context_that_is_an_agents_own_needs_no_other_certificate() {
    let desk = Desk::with_cluster();
    desk.run("certs issue --agent counter --admin DIR/shop/admin --out DIR/counter").unwrap();
    desk.run("context add counter --from DIR/counter").unwrap();
    let context = desk.contexts.current(None).unwrap();
    let files = certs::for_agent(&context, &AgentId::parse("counter").unwrap()).unwrap();
    assert_eq!(files.cert, context.cert);
    assert!(certs::for_agent(&context, &AgentId::parse("other").unwrap()).is_err());
}

#[test]
fn a_broken_context_does_not_hide_the_others() {
    let desk = Desk::with_cluster();
    assert_eq!(desk.run("context ls").unwrap().rows.len(), 0);
    desk.run("context add one --from DIR/shop/admin").unwrap();
    desk.run("context add two --from DIR/shop/admin").unwrap();
    desk.run("context use one").unwrap();
    fs::write(desk.path("home/contexts/two/context.toml"), "nope").unwrap();
    let list = desk.run("context ls").unwrap();
    assert_eq!(list.rows[0][..4], ["*", "one", "shop", "user/admin"]);
    assert!(list.rows[1][4].contains("line 1"), "{:?}", list.rows[1]);
    assert_eq!(desk.run("context use three").unwrap_err().exit, 2);
}

#[test]
fn a_renewed_certificate_is_the_same_identity_with_a_new_key_and_end() {
    let desk = Desk::with_cluster();
    desk.run("certs issue --agent counter --admin DIR/shop/admin --lifetime 20d").unwrap();
    let read = |name: &str| {
        let (cert, key) = (desk.path(name), desk.path(name).with_extension("key"));
        (describe(&fs::read_to_string(cert).unwrap()).unwrap(), fs::read(key).unwrap())
    };
    let names = ["shop/n1/peer.pem", "shop/n1/client.pem", "shop/admin/admin.pem"];
    let agent = "shop/admin/agents/counter.pem";
    let before: Vec<_> = names.iter().map(|name| read(name)).collect();
    let agent_before = read(agent);

    // Only what ends within 30 days, unless more is asked for.
    let shown = desk.run("certs renew --dir DIR/shop").unwrap();
    assert_eq!(shown.rows.len(), 1, "{:?}", shown.rows);
    let agent_after = read(agent);
    assert_eq!(agent_after.0.identity, agent_before.0.identity);
    assert!(agent_after.0.serial != agent_before.0.serial && agent_after.1 != agent_before.1);
    let days = agent_after.0.not_after.duration_since(agent_after.0.not_before).as_hours() / 24;
    assert_eq!(days, 22, "as long as before: 20 days, and 48 hours early");
    assert_eq!(shown.rows[0][4], agent_before.0.serial.to_string());

    let shown = desk.run("certs renew --dir DIR/shop --all --lifetime 90d").unwrap();
    assert_eq!(shown.rows.len(), 8, "two a node, the administrator's and the agent's: {:?}", shown.rows);
    for (name, before) in names.iter().zip(&before) {
        let after = read(name);
        assert_eq!(after.0.identity, before.0.identity);
        assert!(after.0.serial != before.0.serial && after.0.not_after < before.0.not_after, "{name}");
        assert_eq!(mode(&desk.path(name).with_extension("key")), 0o600);
    }
    for node in ["n1", "n2", "n3"] {
        let config = NodeConfig::load(&desk.path("shop").join(node).join("node.toml")).unwrap();
        for files in [&config.peer_tls, &config.client_tls] {
            Credentials::load(&files.ca, &files.cert, &files.key).unwrap();
        }
    }
    let text = shown.notes.join("\n");
    assert!(text.contains("without a restart") && text.contains("n1/peer.pem"), "{text}");

    // One file, with the keys elsewhere; and nothing is written when one of several can't be.
    desk.run("certs renew DIR/shop/n2/peer.pem --admin DIR/shop/admin").unwrap();
    let before = read("shop/n1/peer.pem");
    fs::remove_file(desk.path("shop/admin/peer-ca.key")).unwrap();
    let error = desk
        .run("certs renew DIR/shop/n1/client.pem DIR/shop/n1/peer.pem --admin DIR/shop/admin")
        .unwrap_err();
    assert!(error.to_string().contains("whose key is not here") && error.exit == 2, "{error}");
    assert_eq!(read("shop/n1/peer.pem"), before);
}

#[test]
fn revoked_certificates_are_listed_here_and_elsewhere() {
    let mut desk = Desk::with_cluster();
    let [ann, bob] = ["ann", "bob"].map(|name| {
        desk.run(&format!("certs issue --client {name} --admin DIR/shop/admin")).unwrap();
        let file = desk.path("shop/admin/users").join(name).join("client.pem");
        describe(&fs::read_to_string(file).unwrap()).unwrap()
    });
    let revocation = |revoked| Revocation {
        revoked,
        whose: None,
        ends_s: None,
        author: Principal::Loopback,
        at: Stamp { cluster_ms: 0, wall_ms: 1_790_000_000_000 },
    };
    let principal = |of: &reach_transport::CertificateInfo| of.identity.principal.clone();
    let all = vec![
        revocation(Revoked::Certificate(ann.fingerprint)),
        revocation(Revoked::Serial("0a1b".parse().unwrap())),
        // Made before the certificate was, so that it is not meant.
        revocation(Revoked::Identity { principal: principal(&bob), made_until_s: bob.made_s() - 1 }),
    ];
    desk.known = Ok(("shop".parse().unwrap(), all.clone()));
    let shown = desk.run("certs ls --dir DIR/shop/admin").unwrap();
    let row = |start: &str| shown.rows.iter().find(|row| row[0].starts_with(start)).unwrap();
    assert_eq!(row("users/ann/client.pem")[5], "2026-09-21T14:13:20.000Z");
    assert_eq!(row("users/bob/client.pem")[5], "-");
    assert_eq!(row("client-ca.pem")[5], "-");
    let elsewhere: Vec<_> = shown.rows.iter().filter(|row| row[0] == "(not here)").collect();
    assert_eq!(elsewhere.len(), 2);
    assert_eq!(elsewhere[0][4], "serial:0a1b");
    assert!(elsewhere[1][1].starts_with("user/bob, made until 20"), "{elsewhere:?}");
    assert_eq!(shown.json["revoked"].as_array().unwrap().len(), 3);
    assert!(shown.notes.iter().any(|note| note.contains("ann/client.pem is revoked")), "{:?}", shown.notes);

    let made_until_s = bob.made_s();
    let all = vec![revocation(Revoked::Identity { principal: principal(&bob), made_until_s })];
    desk.known = Ok(("shop".parse().unwrap(), all.clone()));
    let shown = desk.run("certs ls --dir DIR/shop/admin").unwrap();
    let is_revoked = |row: &&Vec<String>| row[0].starts_with("users/bob") && row[5] != "-";
    assert!(shown.rows.iter().any(|row| is_revoked(&row)), "{:?}", shown.rows);
    // Another cluster's list says nothing of these.
    desk.known = Ok(("other".parse().unwrap(), all));
    let shown = desk.run("certs ls --dir DIR/shop/admin").unwrap();
    assert!(!shown.rows.iter().any(|row| is_revoked(&row)), "{:?}", shown.rows);
}

#[test]
fn the_certificate_in_use_is_not_revoked_by_the_way() {
    let desk = Desk::with_cluster();
    desk.run("context add shop --from DIR/shop/admin").unwrap();
    let context = desk.contexts.current(None).unwrap();
    let own = describe(&fs::read_to_string(&context.cert).unwrap()).unwrap();
    let file = context.cert.display().to_string();
    let check = |what: &str| certs_revoke::target(what, &context.cluster).unwrap().must_not_be_own(&context);
    for what in ["user/admin", &file, &own.serial, &own.fingerprint.to_string()] {
        let error = check(what).unwrap_err();
        assert!(error.to_string().contains("context shop uses") && error.exit == 2, "{what}: {error}");
    }
    check("user/ann").unwrap();
    check(&desk.path("shop/n1/peer.pem").display().to_string()).unwrap();
}
