//! A trace as a waterfall: one row a message, time from left to right.

use std::collections::{BTreeMap, BTreeSet};

use reach_protocol::{
    MsgId,
    message::{Hop, MessageRecord, StateName},
};

use crate::trace::{by_message, capability};

/// Characters of the time axis.
const WIDTH: usize = 56;
/// Rows that are shown, the chosen ones and a few of each capability.
const ROWS: usize = 32;

/// Lines to print. `chosen` messages are always among the rows.
pub fn lines(
    records: &BTreeMap<MsgId, MessageRecord>,
    hops: &[Hop],
    chosen: &BTreeSet<MsgId>,
) -> Vec<String> {
    let (Some(first), Some(last)) =
        (hops.iter().map(|hop| hop.at.wall_ms).min(), hops.iter().map(|hop| hop.at.wall_ms).max())
    else {
        return Vec::new();
    };
    let span = (last - first).max(1);
    let by_message = by_message(hops);
    let mut lines: Vec<String> = rows(records, chosen)
        .into_iter()
        .filter_map(|record| {
            let hops = by_message.get(&record.msg_id)?;
            let agent = record.state.holder().map_or("-", |holder| holder.agent_id.as_str());
            let retries =
                if record.attempt > 0 { format!("  attempt {}", record.attempt) } else { String::new() };
            Some(format!(
                "{:<16} {:<13} {:<8} {}{retries}",
                record.msg_id.as_str(),
                capability(record),
                agent,
                bar(hops, first, span)
            ))
        })
        .collect();
    let seconds = span as f64 / 1000.0;
    lines.push(format!("{:<39} 0 s{:>width$}", "", format!("{seconds:.1} s"), width = WIDTH - 3));
    lines
}

/// The chosen, then messages spread evenly over each capability, in order of acceptance.
fn rows<'a>(records: &'a BTreeMap<MsgId, MessageRecord>, chosen: &BTreeSet<MsgId>) -> Vec<&'a MessageRecord> {
    let mut kinds: BTreeMap<String, Vec<&MessageRecord>> = BTreeMap::new();
    for record in records.values() {
        kinds.entry(capability(record)).or_default().push(record);
    }
    let mut shown: BTreeSet<&MsgId> =
        records.keys().filter(|msg_id| chosen.contains(*msg_id)).take(ROWS).collect();
    let each = (ROWS.saturating_sub(shown.len()) / kinds.len().max(1)).max(1);
    for kind in kinds.values_mut() {
        kind.sort_by_key(|record| (record.accepted, record.flow_seq));
        let step = kind.len().div_ceil(each).max(1);
        shown.extend(kind.iter().step_by(step).map(|record| &record.msg_id));
    }
    let mut rows: Vec<&MessageRecord> =
        records.values().filter(|record| shown.contains(&record.msg_id)).collect();
    rows.sort_by_key(|record| (record.accepted, record.flow_seq));
    rows
}

/// Queue ░, waiting for receipt ▒, running █, waiting for another attempt ·.
fn bar(hops: &[&Hop], first: u64, span: u64) -> String {
    let column = |ms: u64| ((ms - first) * (WIDTH as u64 - 1) / span) as usize;
    let mut bar = vec![' '; WIDTH];
    for (at, hop) in hops.iter().enumerate() {
        let sign = match hop.to {
            StateName::Pending if hop.from.is_none() => '░',
            StateName::Pending => '·',
            StateName::Matched | StateName::Dispatched => '▒',
            StateName::Acknowledged => '█',
            StateName::Completed | StateName::Failed | StateName::Timeout => continue,
        };
        let until = hops.get(at + 1).map_or(first + span, |next| next.at.wall_ms);
        bar[column(hop.at.wall_ms)..=column(until)].fill(sign);
    }
    bar.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::tests::Script;

    #[test]
    fn each_phase_has_its_sign() {
        let mut script = Script::new();
        script.message("m1", "code.scan");
        script.hop("m1", 0, None, StateName::Pending, 0, None);
        script.hop("m1", 1000, Some(StateName::Pending), StateName::Matched, 0, Some("a"));
        script.hop("m1", 2000, Some(StateName::Matched), StateName::Pending, 1, None);
        script.hop("m1", 3000, Some(StateName::Pending), StateName::Matched, 1, Some("b"));
        script.hop("m1", 4000, Some(StateName::Matched), StateName::Acknowledged, 1, Some("b"));
        script.hop("m1", 5000, Some(StateName::Acknowledged), StateName::Completed, 1, Some("b"));
        let lines = lines(&script.records, &script.hops, &BTreeSet::new());
        let mut signs: Vec<char> = lines[0].chars().filter(|c| "░▒█·".contains(*c)).collect();
        assert_eq!(signs.len(), WIDTH);
        signs.dedup();
        assert_eq!(signs.into_iter().collect::<String>(), "░▒·▒█");
        assert!(lines.last().unwrap().ends_with("5.0 s"));
    }

    #[test]
    fn a_long_trace_shows_a_few_dozen_rows_and_the_chosen_ones() {
        let mut script = Script::new();
        for at in 0..300u64 {
            let name = format!("m{at:03}");
            script.message(&name, if at % 5 == 0 { "docs.check" } else { "code.scan" });
            script.hop(&name, at, None, StateName::Pending, 0, None);
            script.hop(&name, at + 5, Some(StateName::Pending), StateName::Completed, 0, Some("a"));
        }
        let chosen = BTreeSet::from([MsgId::parse("m123").unwrap()]);
        let lines = lines(&script.records, &script.hops, &chosen);
        assert!((20..=36).contains(&lines.len()), "{}", lines.len());
        assert!(lines.iter().any(|line| line.starts_with("m123")));
        assert_eq!(super::lines(&BTreeMap::new(), &[], &chosen), Vec::<String>::new());
    }
}
