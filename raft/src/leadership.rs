//! Who leads, as this replica knows it, and whether it may act as the leader itself.

use openraft::{ServerState, async_runtime::watch::WatchReceiver, vote::RaftLeaderId};
use reach_protocol::{NodeId, frame::Role};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{applier::Applier, error::Fatal, types::Raft};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leadership {
    pub term: u64,
    pub leader: Option<NodeId>,
    /// This node leads, and the first entry of its own term has been applied here: its tables hold
    /// everything that earlier leaders decided.
    pub leading: bool,
    pub role: Role,
}

impl Leadership {
    pub(crate) fn unknown() -> Self {
        Self { term: 0, leader: None, leading: false, role: Role::Follower }
    }
}

/// Follows openraft until it stops, and reports when that was a failure.
pub(crate) async fn follow(
    raft: Raft,
    applier: Applier,
    leadership: watch::Sender<Leadership>,
    fatal: Fatal,
    stop: CancellationToken,
) {
    let mut server = raft.server_metrics();
    let mut applied_term = applier.applied_term();
    let failed = loop {
        let now = {
            let applied_term = *applied_term.borrow_and_update();
            let server = server.borrow_and_update();
            let term = server.vote.leader_id().term();
            let leads = server.state == ServerState::Leader;
            Leadership {
                term,
                leader: server.current_leader.map(NodeId),
                leading: leads && applied_term == term,
                role: role(server.state),
            }
        };
        leadership.send_if_modified(|before| std::mem::replace(before, now) != now);
        let core_lives = tokio::select! {
            changed = server.changed() => changed.is_ok(),
            changed = applied_term.changed() => changed.is_ok(),
            () = stop.cancelled() => break false,
        };
        if !core_lives {
            break true;
        }
    };
    leadership.send_modify(|now| *now = Leadership { leader: None, leading: false, ..*now });
    if !failed {
        return;
    }
    let reason = match &raft.metrics().borrow_watched().running_state {
        Ok(()) => "the raft core ended".to_owned(),
        Err(error) => error.to_string(),
    };
    fatal.report(reason);
}

fn role(state: ServerState) -> Role {
    match state {
        ServerState::Leader => Role::Leader,
        ServerState::Candidate => Role::Candidate,
        ServerState::Learner => Role::Learner,
        ServerState::Follower | ServerState::Shutdown => Role::Follower,
    }
}
