//! Revoked certificates: a list that only grows by an operator's word, and shrinks by time.

use std::sync::Arc;

use reach_protocol::{
    Code, ErrorReply, Fact, Principal, Reply, Revocation, Revoked,
    certificate::{REVOCATIONS_FEW, REVOCATIONS_MAX, TOLERANCE_S},
};

use crate::{change::Change, rows::Write};

/// By an operator. What is revoked already keeps its first author and time. Where many are kept, those
/// whose certificates have ended by themselves, by the entry's calendar, are dropped here; not before, since
/// that calendar may be wrong.
pub(crate) fn revoke(
    change: &mut Change<'_>,
    revoked: &Revoked,
    whose: Option<&Principal>,
    ends_s: Option<u64>,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    let known = change.rows.revocations();
    if let Some(first) = known.get(revoked) {
        return Ok(Reply::Revoked(Box::new((**first).clone())));
    }
    if !change.rules().rules.is_operator(author) {
        let message = format!("{author} may not revoke certificates: grants.operators does not name it");
        return Err(ErrorReply::new(Code::Forbidden, message));
    }
    if let Revoked::Identity { made_until_s, .. } = revoked
        && *made_until_s > change.stamp.wall_ms / 1_000 + TOLERANCE_S
    {
        // It would refuse certificates that are yet to be made.
        let message = format!(
            "it would be revoked until second {made_until_s}, and the cluster's calendar is at {}: check the clock of the host that asks",
            change.stamp.wall_ms / 1_000
        );
        return Err(ErrorReply::new(Code::Invalid, message));
    }
    let has_ended = |known: &&Arc<Revocation>| known.keep_until_ms() < change.stamp.wall_ms;
    let are_many = known.len() >= REVOCATIONS_FEW;
    let (ended, kept): (Vec<_>, Vec<_>) = known.values().partition(|known| are_many && has_ended(known));
    if kept.len() >= REVOCATIONS_MAX {
        let message = format!(
            "{REVOCATIONS_MAX} revocations are kept already: revoke an identity as a whole, or make the cluster new authorities"
        );
        return Err(ErrorReply::new(Code::TooLarge, message));
    }
    for ended in ended {
        change.write(Write::RemoveRevocation(ended.revoked.clone()));
    }
    let revocation = Arc::new(Revocation {
        revoked: revoked.clone(),
        whose: whose.cloned(),
        ends_s,
        author: author.clone(),
        at: change.stamp,
    });
    change.write(Write::PutRevocation(revocation.clone()));
    change.fact(Fact::Revoked(revocation.clone()));
    Ok(Reply::Revoked(Box::new((*revocation).clone())))
}
