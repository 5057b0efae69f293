//! `context ls | use | add`: which cluster is spoken to, and as whom.

use std::fs;

use reach_config::{Context, Contexts};
use reach_transport::describe;
use serde_json::json;

use super::{Failure, args::ContextCommand};
use crate::show::Shown;

pub fn run(command: &ContextCommand, contexts: &Contexts) -> Result<Shown, Failure> {
    match command {
        ContextCommand::Ls => ls(contexts),
        ContextCommand::Use { name } => Ok(current(&contexts.make_current(name)?)),
        ContextCommand::Add { name, from } => {
            contexts.add_from(name, from)?;
            Ok(current(&contexts.make_current(name)?))
        }
    }
}

fn ls(contexts: &Contexts) -> Result<Shown, Failure> {
    let current = contexts.current_name()?;
    let mut items = Vec::new();
    let mut rows = Vec::new();
    for name in contexts.list()? {
        let is_current = current.as_ref() == Some(&name);
        let mark = if is_current { "*" } else { "" }.to_string();
        // One that can't be read is listed with what is wrong: it must not hide the others.
        match contexts.load(&name) {
            Ok(context) => {
                let endpoints: Vec<String> = context.endpoints.iter().map(ToString::to_string).collect();
                let who = who(&context);
                items.push(json!({
                    "name": name, "current": is_current, "cluster": context.cluster, "endpoints": endpoints,
                    "identity": who, "dir": context.dir,
                }));
                rows.push(vec![
                    mark,
                    name.to_string(),
                    context.cluster.to_string(),
                    who,
                    endpoints.join(" "),
                ]);
            }
            Err(error) => {
                items.push(json!({ "name": name, "current": is_current, "error": error.to_string() }));
                rows.push(vec![mark, name.to_string(), "-".into(), "-".into(), error.to_string()]);
            }
        }
    }
    let mut notes = Vec::new();
    if rows.is_empty() {
        notes.push("`agent-reach dev` makes one for a cluster on this machine".to_string());
    } else if current.is_none_or(|current| !items.iter().any(|item| item["name"] == current.as_str())) {
        notes.push("none of them is current: `agent-reach context use NAME`".to_string());
    }
    let head = vec!["", "NAME", "CLUSTER", "AS", "ENDPOINTS"];
    Ok(Shown { json: json!({ "items": items }), head, rows, notes })
}

/// The identity that a context's certificate gives.
fn who(context: &Context) -> String {
    fs::read_to_string(&context.cert)
        .ok()
        .and_then(|pem| describe(&pem).ok())
        .map_or("no readable certificate".to_string(), |info| info.identity.principal.to_string())
}

fn current(context: &Context) -> Shown {
    let json =
        json!({ "name": context.name, "current": true, "cluster": context.cluster, "dir": context.dir });
    let notes = vec![format!(
        "context {} is current: cluster {}, as {}",
        context.name,
        context.cluster,
        who(context)
    )];
    Shown { json, notes, ..Shown::default() }
}
