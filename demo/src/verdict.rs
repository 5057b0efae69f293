//! The verdict: what the jobs left behind, held against a plain loop, a recomputation in one process,
//! the planner's own list and the ledger.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    process::Command,
};

use reach_protocol::{MsgId, message::MessageRecord, message::StateName};

use crate::{
    cluster::{Job, is_done},
    failover::Agreement,
    findings::Findings,
    jobs::{JobOne, JobTwo, percentages},
    ledger::{self, Start},
    planner::JobRecord,
    snapshot::FILE_BYTES_MAX,
};

/// Tasks that a share must be counted over.
const SHARE_TASKS_MIN: u64 = 60;
/// Percentage points that a counted share may be off.
const SHARE_OFF_MAX: f64 = 3.0;

/// One statement, and whether it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    pub holds: bool,
    pub text: String,
}

fn line(holds: bool, text: String) -> Line {
    Line { holds, text }
}

/// Regular files, and those of them that hold text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    pub tracked: u64,
    pub text: u64,
}

/// The plain loop. It shares nothing with the snapshot but what counts as text.
pub fn count_files(repo: &Path) -> anyhow::Result<Counted> {
    let listing = Command::new("git").arg("-C").arg(repo).args(["ls-files", "--stage", "-z"]).output();
    let listing = listing.ok().filter(|output| output.status.success());
    let mut paths = BTreeSet::new();
    match listing {
        Some(output) => {
            for entry in
                String::from_utf8_lossy(&output.stdout).split('\0').filter(|entry| entry.starts_with("100"))
            {
                paths.extend(entry.split_once('\t').map(|(_, path)| repo.join(path)));
            }
        }
        None => collect(repo, &mut paths)?,
    }
    let mut counted = Counted::default();
    for path in paths {
        if !fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
            continue;
        }
        counted.tracked += 1;
        let bytes = fs::read(&path).unwrap_or_default();
        let readable = !bytes.contains(&0) && std::str::from_utf8(&bytes).is_ok();
        if readable && !bytes.is_empty() && bytes.len() as u64 <= FILE_BYTES_MAX {
            counted.text += 1;
        }
    }
    Ok(counted)
}

fn collect(folder: &Path, paths: &mut BTreeSet<std::path::PathBuf>) -> anyhow::Result<()> {
    const LEFT_OUT: &[&str] = &["target", "node_modules", "demo-out"];
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let kind = entry.file_type()?;
        if kind.is_file() {
            paths.insert(entry.path());
        } else if kind.is_dir() && !name.starts_with('.') && !LEFT_OUT.contains(&name.as_str()) {
            collect(&entry.path(), paths)?;
        }
    }
    Ok(())
}

#[derive(Debug)]
pub struct Evidence {
    pub counted: Counted,
    pub recomputed: Findings,
    /// The planner's own, in the order of the jobs.
    pub records: Vec<JobRecord>,
    /// Every message that the cluster lists.
    pub listing: Vec<MessageRecord>,
    pub starts: Vec<Start>,
    /// Agents' processes that the demo killed.
    pub killed: BTreeSet<u32>,
    pub one: JobOne,
    pub two: JobTwo,
    pub agreement: Agreement,
}

impl Evidence {
    /// What must hold for the product.
    pub fn lines(&self) -> Vec<Line> {
        vec![
            self.files(),
            self.totals(),
            self.results(),
            self.ledger(),
            self.no_mistakes(),
            self.back_in_step(),
            self.hashes(),
        ]
    }

    fn files(&self) -> Line {
        let reported = self.records.iter().map(|record| record.summary.as_ref());
        let equal = |summary: &crate::summary::Summary| {
            let read = Counted { tracked: summary.tracked, text: summary.text };
            let looked_at = summary.totals.files == summary.text || !summary.remarks.is_empty();
            read == self.counted && looked_at && summary.totals.files == self.recomputed.scans.len() as u64
        };
        let holds = reported.clone().all(|summary| summary.is_some_and(equal));
        let in_report: Vec<String> = reported
            .map(|summary| summary.map_or("none".into(), |s| format!("{} of {}", s.totals.files, s.tracked)))
            .collect();
        let text = format!(
            "text files counted by a plain loop: {} of {} = in the reports: {}",
            self.counted.text,
            self.counted.tracked,
            in_report.join(" and ")
        );
        line(holds, text)
    }

    fn totals(&self) -> Line {
        let equal = self.records.iter().filter(|record| record.findings == self.recomputed).count();
        let one_report = self.records.windows(2).all(|pair| pair[0].report_digest == pair[1].report_digest);
        let copies = self.recomputed.copies().len();
        let text = format!(
            "findings recomputed in one process ({} lines, {} commits, {copies} copied blocks, …) equal those of {equal} of {} jobs; \
             their reports are {}",
            self.recomputed.lines(),
            self.recomputed.commits,
            self.records.len(),
            if one_report { "the same to the byte" } else { "DIFFERENT" }
        );
        line(equal == self.records.len() && equal > 0 && one_report, text)
    }

    /// From the planner's list and the cluster's, page by page.
    fn results(&self) -> Line {
        let mut accepted: BTreeSet<&str> =
            self.records.iter().flat_map(|record| record.accepted.values().map(String::as_str)).collect();
        accepted.extend([&self.one.job.root, &self.two.job.root].map(|root| root.as_str()));
        let listed: BTreeMap<&str, &MessageRecord> =
            self.listing.iter().map(|record| (record.msg_id.as_str(), record)).collect();
        let recorded =
            accepted.iter().filter(|id| listed.get(*id).is_some_and(|record| is_done(record))).count();
        let lost = accepted.len() - recorded;
        let strangers = listed.keys().filter(|id| !accepted.contains(*id)).count();
        let twice = self.listing.len() - listed.len() + ended_twice(&[&self.one.job, &self.two.job]);
        let errors: usize = self.records.iter().map(|record| record.errors.len()).sum();
        let text = format!(
            "accepted {} = results recorded {recorded} · lost {lost} · recorded twice {twice} · unknown to the planner {strangers} \
             · errors seen by the planner {errors}",
            accepted.len()
        );
        line(lost == 0 && twice == 0 && strangers == 0 && errors == 0, text)
    }

    fn ledger(&self) -> Line {
        let units = ledger::by_unit(&self.starts);
        let planned: usize = self.records.iter().map(|record| record.accepted.len()).sum();
        let begun = units.keys().filter(|(_, unit)| *unit != "job").count();
        let mut twice = Vec::new();
        let mut unexplained = 0;
        for ((job, unit), starts) in units.iter().filter(|(_, starts)| starts.len() > 1) {
            // Whoever began it and did not end it must have been killed by us.
            let explained = starts[..starts.len() - 1].iter().all(|start| self.killed.contains(&start.pid));
            unexplained += usize::from(!explained);
            let who: Vec<String> = starts
                .iter()
                .map(|start| {
                    let end = if self.killed.contains(&start.pid) { ", killed holding it" } else { "" };
                    format!("{} pid {}{end}", start.agent, start.pid)
                })
                .collect();
            twice.push(format!("j{job}.{unit} ({})", who.join("; ")));
        }
        let list = if twice.is_empty() { String::new() } else { format!(": {}", twice.join(", ")) };
        let text = format!(
            "ledger: {begun} of {planned} units begun · begun twice {}{list} · unexplained {unexplained}",
            twice.len()
        );
        line(begun == planned && unexplained == 0, text)
    }

    fn no_mistakes(&self) -> Line {
        let names: Vec<&str> = self.two.mistaken.iter().map(|agent| agent.as_str()).collect();
        let list = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
        line(
            names.is_empty(),
            format!("agents declared dead by mistake while the leader was gone: {}{list}", names.len()),
        )
    }

    fn back_in_step(&self) -> Line {
        let failover = &self.two.failover;
        let node = failover.killed.map_or("nobody".into(), |(node, _)| node.to_string());
        match (failover.restarted, failover.in_step) {
            (Some((pid, restarted)), Some(in_step)) => {
                let (restarted, in_step) = (restarted.as_secs_f64(), in_step.as_secs_f64());
                line(
                    true,
                    format!(
                        "the killed {node} is back as pid {pid} after {restarted:.1} s, in step after {in_step:.1} s"
                    ),
                )
            }
            (Some((pid, _)), None) => {
                line(false, format!("the killed {node} is back as pid {pid} but not in step"))
            }
            (None, _) => line(false, format!("the killed {node} did not come back")),
        }
    }

    fn hashes(&self) -> Line {
        match &self.agreement {
            Agreement::Equal { applied, hash, nodes } => {
                let nodes: Vec<String> = nodes.iter().map(ToString::to_string).collect();
                line(
                    nodes.len() >= 3,
                    format!("state hash {hash:016x} at position {applied} equal on {}", nodes.join(" ")),
                )
            }
            Agreement::Different(words) => line(false, format!("the nodes' states differ: {words}")),
        }
    }

    /// What must have happened for the rest to mean something; each with the figure that shows it.
    pub fn exercised(&self) -> Vec<Line> {
        let choices: u64 = self.one.choices.values().sum();
        let shares = percentages(&self.one.choices, &self.one.weights);
        let off = shares.values().map(|(counted, declared)| (counted - declared).abs()).fold(0.0, f64::max);
        let not_received: Vec<_> = self.one.held.iter().filter(|held| !held.received).collect();
        let by_others = not_received
            .iter()
            .filter(|held| {
                let record = self.one.job.records.get(&held.msg_id);
                record
                    .is_some_and(|r| is_done(r) && r.state.holder().is_some_and(|h| &*h.agent_id != "scan_b"))
            })
            .count();
        let failover = &self.two.failover;
        let changed = matches!((failover.killed, failover.next), (Some((old, _)), Some(next)) if old != next);
        let (done, total) = (self.two.done_at_kill, self.two.job.done());
        vec![
            line(
                choices >= SHARE_TASKS_MIN && off <= SHARE_OFF_MAX,
                format!(
                    "shares off by {off:.1} points over {choices} tasks (at most {SHARE_OFF_MAX} over {SHARE_TASKS_MIN})"
                ),
            ),
            line(
                self.one.joined_after_ms.is_some() && self.one.others_unchanged,
                "scan_c joined in the middle and nobody else changed".into(),
            ),
            line(
                !not_received.is_empty() && by_others == not_received.len(),
                format!(
                    "{by_others} of {} tasks that scan_b had not received went to others",
                    not_received.len()
                ),
            ),
            line(
                changed && done > 0 && done < total,
                format!("the leader died at {done} of {total} tasks, and another led"),
            ),
        ]
    }
}

/// Messages with more than one end in their trace.
fn ended_twice(jobs: &[&Job]) -> usize {
    let mut ends: BTreeMap<&MsgId, usize> = BTreeMap::new();
    for hop in jobs.iter().flat_map(|job| &job.hops) {
        if matches!(hop.to, StateName::Completed | StateName::Failed | StateName::Timeout) {
            *ends.entry(&hop.msg_id).or_default() += 1;
        }
    }
    ends.values().filter(|count| **count > 1).count()
}
