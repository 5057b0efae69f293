//! `certs issue | ls`, and an agent's certificate on first use. An identity is one SAN URI; the client
//! CA's key is what makes a folder an admin folder.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::Timestamp;
use reach_config::{
    Context, Contexts, TlsFiles,
    context::{CONTEXT_FILE, ContextFile, make_private_dir, write_private},
    layout::{CLIENT_CA, CLIENT_CA_KEY, CLIENT_CERT, CLIENT_KEY, shell_word},
};
use reach_protocol::{AgentId, Principal, Revocation, Revoked, certificate::LIFETIME_MAX_S, id::Name};
use reach_transport::{Authority, CertificateInfo, Identity, Issued, describe, describe_authority};
use serde_json::{Value, json};

use super::{Failure, args::CertsIssue};
use crate::show::{self, Shown};

/// How long an agent's certificate is valid that was issued on first use.
const FIRST_USE_LIFETIME: Duration = Duration::from_secs(365 * 86_400);
/// The longest that can be asked for: the authority's own certificate ends then.
pub const LIFETIME_MAX: Duration = Duration::from_secs(LIFETIME_MAX_S);
/// From this long before its end a certificate's end is pointed out, and it is due to be renewed.
pub const SOON: Duration = Duration::from_secs(30 * 86_400);

/// Signs a new certificate and writes it, and its key (0600), replacing what is there. Makes the
/// folders.
pub fn issue_to(
    cert: &Path,
    key: &Path,
    authority: &Authority,
    identity: &Identity,
    lifetime: Duration,
) -> Result<Issued, Failure> {
    let issued = authority.issue(identity, lifetime)?;
    for path in [cert, key] {
        path.parent().map_or(Ok(()), make_private_dir)?;
    }
    write_private(key, issued.key_pem.as_bytes())?;
    write_private(cert, issued.cert_pem.as_bytes())?;
    Ok(issued)
}

/// The client CA in an admin folder, or in `dev`'s context.
pub fn client_authority(dir: &Path) -> Result<Authority, Failure> {
    let key_path = dir.join(CLIENT_CA_KEY);
    if !key_path.exists() {
        return Err(Failure::usage(format!(
            "{} holds no {CLIENT_CA_KEY}, so nothing can be issued there: give the admin folder that \
             `agent-reach cluster new` made, with --admin DIR",
            dir.display()
        )));
    }
    let read = |path: &Path| {
        fs::read_to_string(path)
            .map_err(|error| Failure::refused(format!("{} can't be read ({error})", path.display())))
    };
    Ok(Authority::from_pem(&read(&dir.join(CLIENT_CA))?, &read(&key_path)?)?)
}

/// The credentials to run `agent_id` with in this context: its own from an earlier time, or the
/// context's where they are the agent's, or new ones where the context may issue them.
pub fn for_agent(context: &Context, agent_id: &AgentId) -> Result<TlsFiles, Failure> {
    let own = context.credentials();
    if certificate(&own.cert).is_some_and(|info| info.identity.principal.acts_for(agent_id)) {
        return Ok(own);
    }
    let files = context.agent_credentials(agent_id);
    // Where it can be renewed, that is done before it ends.
    let early = context.client_ca_key().map_or(Duration::ZERO, |_| SOON);
    let is_good = |files: &TlsFiles| {
        certificate(&files.cert).is_some_and(|info| info.not_after > Timestamp::now() + early)
            && files.key.exists()
    };
    if is_good(&files) {
        return Ok(files);
    }
    if context.client_ca_key().is_none() {
        return Err(Failure::usage(format!(
            "context {} has no valid certificate for agent {agent_id}: where the admin folder is, run \
             `agent-reach certs issue --agent {agent_id} --admin DIR --out {agent_id}`, then here \
             `agent-reach context add {agent_id} --from {agent_id}`",
            context.name
        )));
    }
    let authority = client_authority(&context.dir)?;
    let agents = files.cert.parent().expect("the files stand in a folder of the context");
    make_private_dir(agents)?;
    // Two starts at once would leave the certificate of the one with the key of the other.
    let lock_path = agents.join(".lock");
    let lock = File::create(&lock_path).and_then(|lock| lock.lock().map(|()| lock));
    let _lock = lock.map_err(|source| reach_config::Error::Write { path: lock_path, source })?;
    if !is_good(&files) {
        let identity = Identity::new(context.cluster.clone(), Principal::Agent(agent_id.clone()));
        issue_to(&files.cert, &files.key, &authority, &identity, FIRST_USE_LIFETIME)?;
    }
    Ok(files)
}

/// `certs issue`. `choice` is `--context`.
pub fn issue(args: &CertsIssue, contexts: &Contexts, choice: Option<&str>) -> Result<Shown, Failure> {
    if args.lifetime > LIFETIME_MAX {
        return Err(Failure::usage("--lifetime is at most 3650d, the lifetime of the authority itself"));
    }
    let (admin, is_current) = match &args.admin {
        Some(dir) => (Context::load(admin_name(), dir)?, false),
        None => (contexts.current(choice)?, true),
    };
    let authority = client_authority(&admin.dir)?;
    let whom = match (&args.agent, &args.client, &args.operator) {
        (Some(agent_id), _, _) => Principal::Agent(agent_id.clone()),
        (_, Some(name), _) | (_, _, Some(name)) => Principal::User(name.clone()),
        _ => return Err(Failure::usage("say for whom: --agent ID, --client NAME or --operator NAME")),
    };
    let identity = Identity::new(admin.cluster.clone(), whom.clone());

    let (files, handed_over) = match (&args.out, &args.agent) {
        (None, Some(agent_id)) => (admin.agent_credentials(agent_id), None),
        (out, _) => {
            let user = whom.own_agent_id();
            let name = user.strip_prefix("user:").unwrap_or(&user);
            let dir = out.clone().unwrap_or_else(|| admin.dir.join("users").join(name));
            (
                TlsFiles { ca: dir.join(CLIENT_CA), cert: dir.join(CLIENT_CERT), key: dir.join(CLIENT_KEY) },
                Some(dir),
            )
        }
    };
    let context_file = handed_over.as_ref().map(|dir| dir.join(CONTEXT_FILE));
    if let Some(taken) = [Some(&files.cert), Some(&files.key), context_file.as_ref()]
        .into_iter()
        .flatten()
        .find(|path| path.exists())
    {
        let message = format!(
            "{} exists, and nothing is overwritten: remove it, or give another --out",
            taken.display()
        );
        return Err(Failure::refused(message));
    }
    let issued = issue_to(&files.cert, &files.key, &authority, &identity, args.lifetime)?;
    if let Some(path) = &context_file {
        write_private(&files.ca, authority.cert_pem().as_bytes())?;
        let file = ContextFile {
            cluster: admin.cluster.clone(),
            endpoints: admin.endpoints.clone(),
            ca: CLIENT_CA.into(),
            cert: CLIENT_CERT.into(),
            key: CLIENT_KEY.into(),
        };
        write_private(path, file.render().as_bytes())?;
    }

    let mut notes = vec![format!("{identity}, until {}", date(issued.not_after))];
    notes.push(format!("certificate {}", files.cert.display()));
    notes.push(format!("key         {}  (keep it secret)", files.key.display()));
    match (&handed_over, &whom) {
        (Some(dir), Principal::Agent(agent_id)) => {
            notes.push("hand the folder over to the agent's host; there:".into());
            notes.push(format!("  agent-reach context add {} --from {}", context_name(agent_id), shown(dir)));
            notes.push(format!("  agent-reach agents run --id {agent_id} --capability T -- CMD"));
        }
        (Some(dir), _) => {
            notes.push("hand the folder over to its user; there:".into());
            notes.push(format!("  agent-reach context add {} --from {}", admin.cluster, shown(dir)));
        }
        (None, Principal::Agent(agent_id)) if is_current => {
            notes.push(format!("next: agent-reach agents run --id {agent_id} --capability T -- CMD"));
        }
        (None, _) => notes.push("with --out DIR it is written as a folder to be handed over".into()),
    }
    if let Some(name) = &args.operator {
        notes.push(format!(
            "{name} is an operator when the rules say so: add \"{name}\" to operators in [grants] of rules.toml, then"
        ));
        notes.push("  agent-reach rules apply rules.toml".into());
    }
    let json = json!({
        "identity": identity.to_string(), "certificate": files.cert, "key": files.key,
        "not_after": date(issued.not_after), "serial": issued.serial,
        "fingerprint": issued.fingerprint.to_string(), "context_dir": handed_over,
    });
    Ok(Shown { json, notes, ..Shown::default() })
}

/// What the cluster has revoked, or why that is not known here.
pub type Known = Result<(Name, Vec<Revocation>), String>;

/// `certs ls`: every certificate in `dir`, and in its folders `agents` and `users`; and the revoked
/// ones, here or elsewhere.
pub fn ls(
    dir: Option<&Path>,
    contexts: &Contexts,
    choice: Option<&str>,
    known: &Known,
) -> Result<Shown, Failure> {
    let dir = match dir {
        Some(dir) => dir.to_path_buf(),
        None => contexts.current(choice)?.dir,
    };
    let mut paths = Vec::new();
    collect(&dir, 0, &mut paths)
        .map_err(|error| Failure::usage(format!("{} can't be read ({error})", dir.display())))?;
    paths.sort();
    let now = Timestamp::now();
    let (mut items, mut rows, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let mut elsewhere = known.as_ref().map_or(Vec::new(), |(_, all)| all.iter().collect());
    for path in paths {
        let name = path.strip_prefix(&dir).unwrap_or(&path).display().to_string();
        let text = fs::read_to_string(&path).unwrap_or_default();
        let (own, from, until, serial) = match (describe(&text), describe_authority(&text)) {
            (Ok(info), _) => (Some(info.clone()), info.not_before, info.not_after, info.serial),
            // It signs identities and has none.
            (_, Ok(info)) => (None, info.not_before, info.not_after, info.serial),
            _ => {
                items.push(json!({ "file": name, "authority": false }));
                rows.push(vec![
                    name,
                    "not one of our certificates".into(),
                    "-".into(),
                    "-".into(),
                    "-".into(),
                    "-".into(),
                ]);
                continue;
            }
        };
        let mut item = json!({
            "file": name, "not_before": date(from), "not_after": date(until), "serial": serial,
            "expired": until <= now,
        });
        let mut revoked = None;
        let again = match &own {
            Some(own) => {
                item["identity"] = own.identity.to_string().into();
                item["fingerprint"] = own.fingerprint.to_string().into();
                revoked = revocation(known, own);
                if let Some(revocation) = revoked {
                    item["revoked"] = revocation_json(revocation);
                    elsewhere.retain(|other| other.revoked != revocation.revoked);
                }
                "`agent-reach certs renew` issues it again"
            }
            None => {
                item["authority"] = true.into();
                "what it signed ends with it"
            }
        };
        items.push(item);
        if revoked.is_some() {
            notes.push(format!("{name} is revoked: no node accepts it"));
        } else if until <= now {
            notes.push(format!("{name} has expired: {again}"));
        } else if until <= now + SOON {
            notes.push(format!("{name} ends soon, on {}: {again}", date(until)));
        }
        let shown = match (&own, known) {
            (None, _) => "-".into(),
            (Some(_), Err(_)) => "unknown".into(),
            (Some(_), Ok(_)) => revoked.map_or("-".into(), |revocation| show::time(revocation.at.wall_ms)),
        };
        let whose = own.map_or("certificate authority".into(), |own| own.identity.to_string());
        rows.push(vec![name, whose, date(from), date(until), serial.to_string(), shown]);
    }
    for revocation in elsewhere {
        let whose = match (&revocation.revoked, &revocation.whose) {
            (Revoked::Identity { principal, made_until_s }, _) => {
                format!("{principal}, made until {}", second(*made_until_s))
            }
            (_, Some(whose)) => whose.to_string(),
            (_, None) => "-".into(),
        };
        let until = revocation.ends_s.map_or("-".into(), second);
        let serial = match &revocation.revoked {
            Revoked::Identity { .. } => "-".into(),
            other => other.to_string(),
        };
        let at = show::time(revocation.at.wall_ms);
        rows.push(vec!["(not here)".into(), whose, "-".into(), until, serial, at]);
    }
    let mut json = json!({ "dir": dir, "items": items });
    match known {
        Ok((_, all)) => json["revoked"] = all.iter().map(revocation_json).collect(),
        Err(why) => notes.push(format!("which are revoked is not known: {why}")),
    }
    let head = vec!["FILE", "IDENTITY", "FROM", "UNTIL", "SERIAL", "REVOKED"];
    Ok(Shown { json, head, rows, notes })
}

/// What revokes it, of its own cluster's list.
fn revocation<'a>(known: &'a Known, own: &CertificateInfo) -> Option<&'a Revocation> {
    let (_, all) = known.as_ref().ok().filter(|(cluster, _)| *cluster == own.identity.cluster)?;
    all.iter().find(|revocation| match &revocation.revoked {
        Revoked::Certificate(fingerprint) => *fingerprint == own.fingerprint,
        Revoked::Serial(serial) => *serial == own.serial,
        Revoked::Identity { principal, made_until_s } => {
            *principal == own.identity.principal && own.made_s() <= *made_until_s
        }
    })
}

pub fn revocation_json(revocation: &Revocation) -> Value {
    json!({
        "revoked": revocation.revoked.to_string(),
        "whose": revocation.whose.as_ref().map(ToString::to_string),
        "ends": revocation.ends_s.map(second),
        "author": revocation.author.to_string(),
        "at": show::time(revocation.at.wall_ms),
    })
}

/// A time in seconds since 1970.
pub fn second(at_s: u64) -> String {
    i64::try_from(at_s).ok().and_then(|at| Timestamp::from_second(at).ok()).map_or("-".into(), date)
}

/// `.pem` files, down to `users/NAME/`; a cluster's folder is three levels as well.
pub fn collect(dir: &Path, depth: usize, paths: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            // A node's data is none of ours to read.
            if depth < 3 && path.file_name().is_some_and(|name| name != "data") {
                collect(&path, depth + 1, paths)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "pem") {
            paths.push(path);
        }
    }
    Ok(())
}

fn certificate(path: &Path) -> Option<CertificateInfo> {
    describe(&fs::read_to_string(path).ok()?).ok()
}

pub fn date(at: Timestamp) -> String {
    format!("{at:.0}")
}

fn shown(dir: &Path) -> String {
    shell_word(&dir.display().to_string())
}

/// A context can't be named with a leading dot; an agent can.
fn context_name(agent_id: &AgentId) -> String {
    agent_id.trim_start_matches('.').to_string()
}

pub fn admin_name() -> Name {
    Name::parse("admin").expect("a constant that is a name")
}
