//! The rules document: the cluster's first one and each that follows it.

use std::sync::Arc;

use reach_protocol::{Code, ErrorReply, Fact, Principal, Reply, Rules, RulesRecord, id::Name};

use crate::{change::Change, rows::Write};

/// Revision 1 and the cluster's name. Once it is there, another `Init` changes nothing.
pub(crate) fn init(change: &mut Change<'_>, cluster: &Name, rules: &Rules) -> Result<Reply, ErrorReply> {
    if change.rules().revision > 0 {
        return Ok(Reply::Done);
    }
    validate(rules)?;
    put(
        change,
        RulesRecord {
            revision: 1,
            rules: rules.clone(),
            text: String::new(),
            author: None,
            at: change.stamp,
            cluster: Some(cluster.clone()),
            expiry: None,
        },
    );
    Ok(Reply::Done)
}

/// A whole new document, by an operator. The document in force given again is no new revision, and
/// that is looked at before `expect`, so that a repeat is answered like the first: also when its
/// author is no operator under the new rules.
pub(crate) fn apply_rules(
    change: &mut Change<'_>,
    rules: &Rules,
    text: &str,
    expect: Option<u64>,
    author: &Principal,
) -> Result<Reply, ErrorReply> {
    let current = change.rules();
    let is_in_force = current.text == text && current.rules == *rules;
    if is_in_force && current.author.as_ref() == Some(author) {
        return Ok(Reply::Rules(Box::new((*current).clone())));
    }
    if !current.rules.is_operator(author) {
        let message = format!("{author} may not change the rules: grants.operators does not name it");
        return Err(ErrorReply::new(Code::Forbidden, message));
    }
    validate(rules)?;
    if is_in_force {
        return Ok(Reply::Rules(Box::new((*current).clone())));
    }
    if let Some(expected) = expect.filter(|expected| *expected != current.revision) {
        let message = format!(
            "the rules are at revision {}, not {expected}: look at them again before you change them",
            current.revision
        );
        return Err(ErrorReply::new(Code::RevisionConflict, message));
    }
    let record = put(
        change,
        RulesRecord {
            revision: current.revision + 1,
            rules: rules.clone(),
            text: text.to_string(),
            author: Some(author.clone()),
            at: change.stamp,
            cluster: current.cluster.clone(),
            expiry: current.expiry.clone(),
        },
    );
    Ok(Reply::Rules(Box::new((*record).clone())))
}

fn validate(rules: &Rules) -> Result<(), ErrorReply> {
    rules.validate().map_err(|message| ErrorReply::new(Code::Invalid, message))
}

fn put(change: &mut Change<'_>, record: RulesRecord) -> Arc<RulesRecord> {
    let record = Arc::new(record);
    change.write(Write::PutRules(record.clone()));
    change.fact(Fact::RulesChanged(record.clone()));
    record
}
