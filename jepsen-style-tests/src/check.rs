//! Judges a history after everything was healed: what was acknowledged must have ended in exactly
//! one recorded result, the right one, and every node must say the same.

use std::{collections::BTreeMap, time::Duration};

use anyhow::ensure;
use reach_protocol::{
    MessageState, MsgId,
    frame::{Answer, Request},
    message::MessageRecord,
};

use crate::{
    cluster::Cluster,
    worker::{Ledger, squared},
    workload::{Entry, Outcome},
};

/// How long a message may take to end once everything is healed.
const END_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub accepted: u64,
    pub refused: u64,
    pub unknown: u64,
    /// Unknown to the caller, and done.
    pub unknown_done: u64,
    /// Starts of work beyond the first: allowed, and counted.
    pub run_again: u64,
}

/// Fails with the first thing that must not be.
pub async fn judge(cluster: &Cluster, history: &[Entry], ledger: &Ledger) -> anyhow::Result<Verdict> {
    let client = cluster.client().await?;
    let mut verdict = Verdict::default();
    let mut ends: BTreeMap<MsgId, MessageRecord> = BTreeMap::new();
    for entry in history {
        match &entry.outcome {
            Outcome::Accepted => verdict.accepted += 1,
            Outcome::Refused(_) => {
                verdict.refused += 1;
                continue;
            }
            Outcome::Unknown => verdict.unknown += 1,
        }
        match client.wait(&entry.msg_id, END_MAX).await {
            Ok(response) => {
                ensure!(
                    response.status == "completed",
                    "{} ended {}: {:?}",
                    entry.msg_id,
                    response.status,
                    response.error
                );
                let result = response.result.map(|result| result.to_value());
                ensure!(
                    result == Some(squared(entry.number)),
                    "{} has another message's result",
                    entry.msg_id
                );
                ends.insert(entry.msg_id.clone(), (*client.status(&entry.msg_id).await?.record).clone());
                verdict.unknown_done += u64::from(entry.outcome == Outcome::Unknown);
            }
            Err(error)
                if error.code() == reach_protocol::Code::NotFound && entry.outcome == Outcome::Unknown => {}
            Err(error) => anyhow::bail!("{} ({:?}) has no end: {error}", entry.msg_id, entry.outcome),
        }
    }

    // Every node's own tables say the same, and saying it again changes nothing.
    cluster.converged().await?;
    for node in cluster.node_ids() {
        let client = cluster.client_of(node).await?;
        for (msg_id, end) in &ends {
            let request = Request::Message { msg_id: msg_id.clone(), wait_ms: None };
            let Answer::Message(view) = client.request(request, Duration::from_secs(5)).await? else {
                anyhow::bail!("{node} answered something else");
            };
            ensure!(*view.record == *end, "{node} has another end for {msg_id}");
            ensure!(
                matches!(view.record.state, MessageState::Completed { .. }),
                "{msg_id} is not completed at {node}"
            );
            let ended = view
                .hops
                .iter()
                .filter(|hop| hop.to == reach_protocol::message::StateName::Completed)
                .count();
            ensure!(ended == 1, "{msg_id} was completed {ended} times at {node}");
        }
    }

    let mut started: BTreeMap<MsgId, u64> = BTreeMap::new();
    for msg_id in ledger.lock().expect("no panic while it is held").iter() {
        *started.entry(msg_id.clone()).or_default() += 1;
    }
    for msg_id in ends.keys() {
        ensure!(started.contains_key(msg_id), "{msg_id} has a result and nobody did the work");
    }
    verdict.run_again = started.values().map(|count| count - 1).sum();
    Ok(verdict)
}
