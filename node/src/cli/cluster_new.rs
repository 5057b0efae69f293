//! `cluster new`: the folders of a cluster, with configuration and certificates. The keys that sign
//! certificates stand apart from what the nodes get.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use reach_config::{
    Layout,
    context::{CONTEXT_FILE, make_private_dir, write_private},
    layout,
};
use reach_protocol::{Principal, id::Name};
use reach_transport::{Authority, Identity};
use serde_json::json;

use super::{Failure, args::ClusterNew, certs};
use crate::show::Shown;

/// How long nodes' and the administrator's first certificates are valid.
pub const LIFETIME: Duration = Duration::from_secs(2 * 365 * 86_400);

pub fn run(args: &ClusterNew) -> Result<Shown, Failure> {
    let layout = Layout::new(args.name.clone(), &args.nodes)?;
    match fs::read_dir(&args.out).map(|mut entries| entries.next().is_none()) {
        Ok(true) => {}
        Ok(false) => {
            let message = format!(
                "{} is not empty, and nothing is overwritten: give another --out",
                args.out.display()
            );
            return Err(Failure::refused(message));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(Failure::refused(format!("{}: {error}", args.out.display()))),
    }
    write(&layout, &args.out)?;

    let json = json!({
        "cluster": layout.cluster,
        "out": args.out,
        "nodes": layout.nodes.iter().map(|(id, addresses)| json!({
            "node": id.to_string(), "dir": args.out.join(id.to_string()),
            "client": addresses.client.to_string(), "peer": addresses.peer.to_string(),
        })).collect::<Vec<_>>(),
        "admin": args.out.join(layout::ADMIN_DIR),
    });
    let survives = match layout.losses_survived() {
        0 => "every one of them is needed".to_string(),
        1 => "one may be lost while the rest goes on".to_string(),
        many => format!("{many} may be lost while the rest goes on"),
    };
    let nodes = match layout.nodes.len() {
        1 => "1 node".to_string(),
        many => format!("{many} nodes"),
    };
    let notes = vec![
        format!("cluster {} in {}: {nodes}; {survives}", layout.cluster, args.out.display()),
        format!(
            "{}/ holds the keys that sign certificates: keep it away from the nodes",
            args.out.join(layout::ADMIN_DIR).display()
        ),
        String::new(),
        layout.next_commands(&args.out),
    ];
    Ok(Shown { json, notes, ..Shown::default() })
}

/// Writes a folder per node and the admin folder into `out`, which may exist; none of them may. They
/// appear finished, the admin folder last: where it is, everything is.
pub fn write(layout: &Layout, out: &Path) -> Result<(), Failure> {
    let folders: Vec<String> =
        layout.nodes.keys().map(ToString::to_string).chain([layout::ADMIN_DIR.to_string()]).collect();
    if let Some(taken) = folders.iter().map(|folder| out.join(folder)).find(|path| path.exists()) {
        let message = format!("{} exists, and nothing is overwritten: give another folder", taken.display());
        return Err(Failure::refused(message));
    }
    let staging = Staging(out.join(format!(".new-{}", std::process::id())));
    make_private_dir(&staging.0)?;
    write_all(layout, &staging.0)?;
    for folder in &folders {
        let to = out.join(folder);
        fs::rename(staging.0.join(folder), &to)
            .map_err(|source| reach_config::Error::Write { path: to, source })?;
    }
    Ok(())
}

/// Goes away with whatever is left in it.
struct Staging(PathBuf);

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn write_all(layout: &Layout, out: &Path) -> Result<(), Failure> {
    let peer_ca = Authority::new(&layout.cluster, "peer");
    let client_ca = Authority::new(&layout.cluster, "client");
    let identity = |principal| Identity::new(layout.cluster.clone(), principal);

    for id in layout.nodes.keys() {
        let dir = out.join(id.to_string());
        make_private_dir(&dir)?;
        let file = layout.node_file(*id).expect("the id comes from the layout");
        write_private(&dir.join(layout::NODE_FILE), file.render().as_bytes())?;
        let node = identity(Principal::Node(*id));
        for (ca, ca_file, cert, key) in [
            (&peer_ca, layout::PEER_CA, layout::PEER_CERT, layout::PEER_KEY),
            (&client_ca, layout::CLIENT_CA, layout::CLIENT_CERT, layout::CLIENT_KEY),
        ] {
            write_private(&dir.join(ca_file), ca.cert_pem().as_bytes())?;
            certs::issue_to(&dir.join(cert), &dir.join(key), ca, &node, LIFETIME)?;
        }
    }

    let admin = out.join(layout::ADMIN_DIR);
    make_private_dir(&admin)?;
    for (ca, cert, key) in [
        (&peer_ca, layout::PEER_CA, layout::PEER_CA_KEY),
        (&client_ca, layout::CLIENT_CA, layout::CLIENT_CA_KEY),
    ] {
        write_private(&admin.join(cert), ca.cert_pem().as_bytes())?;
        write_private(&admin.join(key), ca.key_pem().as_bytes())?;
    }
    let user = Name::parse(layout::ADMIN_USER).expect("a constant that is a name");
    let (cert, key) = (admin.join(layout::ADMIN_CERT), admin.join(layout::ADMIN_KEY));
    certs::issue_to(&cert, &key, &client_ca, &identity(Principal::User(user)), LIFETIME)?;
    write_private(&admin.join(CONTEXT_FILE), layout.admin_context().render().as_bytes())?;
    Ok(())
}
