//! `certs renew`: the certificates of a folder are issued again where they stand.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use jiff::Timestamp;
use reach_config::{
    Contexts,
    layout::{ADMIN_DIR, CLIENT_CA, CLIENT_CA_KEY, PEER_CA, PEER_CA_KEY, shell_word},
};
use reach_protocol::Principal;
use reach_transport::{Authority, CertificateInfo, describe};
use serde_json::json;

use super::{
    Failure,
    args::CertsRenew,
    certs::{self, LIFETIME_MAX, SOON, date},
};
use crate::show::Shown;

/// A certificate that is to be issued again.
struct Due {
    cert: PathBuf,
    pem: String,
    info: CertificateInfo,
}

pub fn run(args: &CertsRenew, contexts: &Contexts, choice: Option<&str>) -> Result<Shown, Failure> {
    if args.lifetime.is_some_and(|lifetime| lifetime > LIFETIME_MAX) {
        return Err(Failure::usage("--lifetime is at most 3650d, the lifetime of the authority itself"));
    }
    let dir = match (&args.dir, args.files.is_empty()) {
        (Some(dir), _) => Some(dir.clone()),
        (None, true) => Some(contexts.current(choice)?.dir),
        (None, false) => None,
    };
    let (due, later) = due(args, dir.as_deref())?;
    let authorities = match due.is_empty() {
        true => Vec::new(),
        false => authorities(&admin(args, dir.as_deref(), contexts, choice)?)?,
    };
    // All or none, as far as it can be known beforehand.
    let mut plan = Vec::new();
    for due in due {
        let key = due.cert.with_extension("key");
        if !key.is_file() {
            let message = format!("{} has no key beside it, {}", due.cert.display(), key.display());
            return Err(Failure::refused(message));
        }
        let signs = |authority: &&Authority| authority.signed(&due.pem).unwrap_or(false);
        let Some(authority) = authorities.iter().find(signs) else {
            return Err(Failure::usage(format!(
                "{} was signed by a CA whose key is not here: give the admin folder that `agent-reach cluster new` \
                 made, with --admin DIR",
                due.cert.display()
            )));
        };
        plan.push((due, key, authority));
    }

    let (mut items, mut rows, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let mut nodes: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    let mut others = 0;
    for (due, key, authority) in &plan {
        let Due { cert, info: before, .. } = due;
        let lifetime = args.lifetime.unwrap_or_else(|| lifetime(before));
        let issued = certs::issue_to(cert, key, authority, &before.identity, lifetime)?;
        match before.identity.principal {
            Principal::Node(_) => {
                let folder = cert.parent().unwrap_or(Path::new("")).to_path_buf();
                nodes.entry(folder).or_default().extend([cert.clone(), key.clone()]);
            }
            _ => others += 1,
        }
        rows.push(vec![
            cert.display().to_string(),
            before.identity.to_string(),
            date(before.not_after),
            date(issued.not_after),
            before.serial.to_string(),
        ]);
        items.push(json!({
            "certificate": cert, "key": key, "identity": before.identity.to_string(),
            "not_after": date(issued.not_after), "serial": issued.serial,
            "fingerprint": issued.fingerprint.to_string(),
            "before": { "not_after": date(before.not_after), "serial": before.serial,
                "fingerprint": before.fingerprint.to_string() },
        }));
    }
    if plan.is_empty() {
        let first = later.map_or(String::new(), |at| format!("; the first ends on {}", date(at)));
        notes.push(format!("nothing ends within 30 days{first}: --all or a FILE renews all the same"));
    }
    if others > 0 {
        notes.push(
            "agents and clients use the new one from their next connection on; the old one is good until its end"
                .into(),
        );
    }
    if !nodes.is_empty() {
        notes.push(
            "a running node takes its new files into use within seconds, without a restart; where it runs"
                .into(),
        );
        notes.push("on another host, copy them into its folder there:".into());
        let word = |path: &Path| shell_word(&path.display().to_string());
        for (folder, files) in &nodes {
            let files: Vec<String> = files.iter().map(|path| word(path)).collect();
            let to = folder.file_name().map_or(folder.as_path(), Path::new);
            notes.push(format!("  scp {} HOST:{}/", files.join(" "), word(to)));
        }
    }
    if !plan.is_empty() {
        notes.push(
            "if an old key may be in wrong hands: `agent-reach certs revoke` with its old serial".into(),
        );
    }
    let head = vec!["CERTIFICATE", "IDENTITY", "OLD END", "NEW END", "OLD SERIAL"];
    Ok(Shown { json: json!({ "items": items }), head, rows, notes })
}

/// Which certificates are to be renewed, and when the first of the others ends.
fn due(args: &CertsRenew, dir: Option<&Path>) -> Result<(Vec<Due>, Option<Timestamp>), Failure> {
    let mut paths = args.files.clone();
    if let Some(dir) = dir {
        certs::collect(dir, 0, &mut paths)
            .map_err(|error| Failure::usage(format!("{} can't be read ({error})", dir.display())))?;
        paths.sort();
    }
    let soon = Timestamp::now() + SOON;
    let (mut due, mut later): (Vec<Due>, Option<Timestamp>) = (Vec::new(), None);
    for cert in paths {
        let pem = fs::read_to_string(&cert)
            .map_err(|error| Failure::usage(format!("{} can't be read ({error})", cert.display())))?;
        match describe(&pem) {
            Ok(info) if dir.is_none() || args.all || info.not_after <= soon => {
                due.push(Due { cert, pem, info })
            }
            Ok(info) => later = Some(later.map_or(info.not_after, |at| at.min(info.not_after))),
            // An authority, or no certificate of ours.
            Err(_) if dir.is_some() => {}
            Err(error) => {
                let message = format!("{} is no certificate of an identity ({error})", cert.display());
                return Err(Failure::usage(message));
            }
        }
    }
    Ok((due, later))
}

/// Where the CAs' keys are.
fn admin(
    args: &CertsRenew,
    dir: Option<&Path>,
    contexts: &Contexts,
    choice: Option<&str>,
) -> Result<PathBuf, Failure> {
    let has_key = |dir: &PathBuf| [CLIENT_CA_KEY, PEER_CA_KEY].iter().any(|key| dir.join(key).is_file());
    if let Some(admin) = &args.admin {
        return Ok(admin.clone());
    }
    let beside = dir.map(|dir| [dir.to_path_buf(), dir.join(ADMIN_DIR)]);
    match beside.into_iter().flatten().find(has_key) {
        Some(admin) => Ok(admin),
        None => Ok(contexts.current(choice)?.dir),
    }
}

/// Those of the two whose key is in this folder.
fn authorities(dir: &Path) -> Result<Vec<Authority>, Failure> {
    let mut found = Vec::new();
    for (cert, key) in [(CLIENT_CA, CLIENT_CA_KEY), (PEER_CA, PEER_CA_KEY)] {
        if dir.join(key).is_file() {
            let read = |name: &str| {
                let path = dir.join(name);
                fs::read_to_string(&path)
                    .map_err(|error| Failure::refused(format!("{} can't be read ({error})", path.display())))
            };
            found.push(Authority::from_pem(&read(cert)?, &read(key)?)?);
        }
    }
    Ok(found)
}

/// As long as it was when it was made.
fn lifetime(before: &CertificateInfo) -> Duration {
    let made = i64::try_from(before.made_s()).ok().and_then(|at| Timestamp::from_second(at).ok());
    let lifetime = before.not_after.duration_since(made.unwrap_or(before.not_before));
    Duration::try_from(lifetime).unwrap_or_default().clamp(Duration::from_secs(3_600), LIFETIME_MAX)
}
