//! A hung disk raises no error: heartbeats go on while nothing is written. This notices by the age
//! of the oldest unfinished write, gives the leadership away and stands for none until the disk is
//! back.

use std::time::Duration;

use openraft::{Instant as _, ServerState, async_runtime::watch::WatchReceiver};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::{Options, log_store::Log, types::Raft};

const CHECK_EVERY: Duration = Duration::from_millis(100);

pub(crate) async fn watch(raft: Raft, log: Log, options: Options, stop: CancellationToken) {
    let mut ticks = interval(CHECK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_hung = false;
    let mut handed_over: Option<Instant> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = stop.cancelled() => return,
        }
        let age = log.oldest_write_age();
        if is_hung && age < options.watchdog / 2 {
            tracing::info!("disk is back");
            raft.runtime_config().elect(true);
            raft.runtime_config().heartbeat(true);
            (is_hung, handed_over) = (false, None);
        }
        if age < options.watchdog {
            continue;
        }
        if !is_hung {
            tracing::error!(age_ms = age.as_millis() as u64, "disk hangs");
            raft.runtime_config().elect(false);
            is_hung = true;
        }
        if !leads(&raft) {
            continue;
        }
        match handed_over {
            None => {
                let Some(to) = successor(&raft, options.detection().1) else {
                    // Nobody to hand over to: the others elect one as soon as they miss this one.
                    raft.runtime_config().heartbeat(false);
                    continue;
                };
                tracing::warn!(to, "handing the leadership over");
                if raft.trigger().transfer_leader(to).await.is_err() {
                    return;
                }
                handed_over = Some(Instant::now());
            }
            Some(at) if at.elapsed() > options.detection().1 => raft.runtime_config().heartbeat(false),
            Some(_) => {}
        }
    }
}

fn leads(raft: &Raft) -> bool {
    raft.server_metrics().borrow_watched().state == ServerState::Leader
}

/// Of the other voters that answered lately, the one that has most of the log.
fn successor(raft: &Raft, lately: Duration) -> Option<u64> {
    let metrics = raft.metrics();
    let metrics = metrics.borrow_watched();
    let (matched, heard) = (metrics.replication.as_ref()?, metrics.heartbeat.as_ref()?);
    let answers = |id: &u64| matches!(heard.get(id), Some(Some(at)) if at.elapsed() < lately);
    let others = metrics.membership_config.voter_ids().filter(|id| *id != metrics.id && answers(id));
    others.max_by_key(|id| matched.get(id).copied().flatten().map(|log_id| log_id.index))
}
