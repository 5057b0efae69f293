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
    scribe,
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
    let listing = listing.ok().filter(|output| output.status.success() && !output.stdout.is_empty());
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
    /// The repository is so large that some files were left out on purpose.
    pub sampled: bool,
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
    /// How often the scribe's post-mortem tells of the loss of which node.
    pub told: BTreeMap<String, usize>,
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
            let looked_at = summary.totals.files == summary.text || self.sampled;
            read == self.counted && looked_at && summary.totals.files == self.recomputed.scans.len() as u64
        };
        let holds = reported.clone().all(|summary| summary.is_some_and(equal));
        let in_reports: Vec<String> = reported
            .map(|summary| {
                let of = |s: &crate::summary::Summary| {
                    format!("{} of {}, results for {}", s.text, s.tracked, s.totals.files)
                };
                summary.map_or("none".into(), of)
            })
            .collect();
        let text = format!(
            "text files counted by a plain loop: {} of {} = in the reports: {}",
            self.counted.text,
            self.counted.tracked,
            in_reports.join("; ")
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
            line(
                failover.killed.is_some_and(|(node, _)| self.told.contains_key(&node.to_string())),
                format!(
                    "{} woke scribe, and {} tells of the loss of the leader",
                    scribe::WAKES,
                    scribe::FILE
                ),
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reach_protocol::{AgentId, NodeId, TraceId};

    use super::*;
    use crate::{failover::Failover, jobs::Held, trace::tests::Script};

    /// Two tiny jobs in which everything went as planned.
    fn good() -> Evidence {
        let agent = |text: &str| AgentId::parse(text).unwrap();
        let mut jobs = Vec::new();
        let mut records = Vec::new();
        let mut starts = Vec::new();
        for number in 1..=2u32 {
            let mut script = Script::new();
            let mut record =
                JobRecord { summary: Some(crate::summary::tests::sample()), ..JobRecord::default() };
            for unit in ["job", "scan-0", "scan-1", "report"] {
                let id = format!("j{number}.{unit}");
                script.message(&id, "code.scan");
                script.hop(&id, 1, Some(StateName::Acknowledged), StateName::Completed, 0, Some("scan_a"));
                starts.push(Start { pid: 100, ..Start::now(number, unit, "scan_a", &id) });
                if unit != "job" {
                    record.accepted.insert(unit.into(), id);
                }
            }
            let job = Job {
                trace_id: TraceId::parse("t").unwrap(),
                root: MsgId::parse(&format!("j{number}.job")).unwrap(),
                records: script.records,
                hops: script.hops,
            };
            jobs.push(job);
            records.push(record);
        }
        let summary = records[0].summary.clone().unwrap();
        let listing = jobs.iter().flat_map(|job| job.records.values().cloned()).collect();
        let held = Held { msg_id: MsgId::parse("j1.scan-1").unwrap(), received: false };
        let mut recomputed = Findings::default();
        for file in 0..summary.totals.files {
            recomputed.scans.insert(format!("f{file}"), Default::default());
        }
        records.iter_mut().for_each(|record| record.findings = recomputed.clone());
        let two = jobs.pop().unwrap();
        let seconds = |s| Some(Duration::from_secs(s));
        Evidence {
            counted: Counted { tracked: summary.tracked, text: summary.text },
            sampled: true,
            recomputed,
            records,
            listing,
            starts,
            killed: BTreeSet::from([66]),
            one: JobOne {
                job: jobs.pop().unwrap(),
                weights: BTreeMap::from([(agent("scan_a"), 1.0), (agent("scan_b"), 0.5)]),
                choices: BTreeMap::from([(agent("scan_a"), 41), (agent("scan_b"), 20)]),
                joined_after_ms: Some(80),
                others_unchanged: true,
                held: vec![held],
            },
            two: JobTwo {
                job: two,
                done_at_kill: 1,
                failover: Failover {
                    killed: Some((NodeId(1), 7)),
                    next: Some(NodeId(2)),
                    served: seconds(1),
                    restarted: Some((8, Duration::from_secs(3))),
                    in_step: seconds(4),
                },
                mistaken: Vec::new(),
            },
            told: BTreeMap::from([("n1".to_string(), 1)]),
            agreement: Agreement::Equal { applied: 9, hash: 1, nodes: vec![NodeId(1), NodeId(2), NodeId(3)] },
        }
    }

    /// The statements that fail, by their beginning.
    fn failing(change: impl FnOnce(&mut Evidence)) -> Vec<String> {
        let mut evidence = good();
        change(&mut evidence);
        let lines = [evidence.lines(), evidence.exercised()].concat();
        lines.into_iter().filter(|line| !line.holds).map(|line| line.text).collect()
    }

    #[track_caller]
    fn fails_only(begins: &str, change: impl FnOnce(&mut Evidence)) {
        let failing = failing(change);
        assert!(failing.len() == 1 && failing[0].starts_with(begins), "{failing:?}");
    }

    #[test]
    fn a_good_run_passes() {
        assert_eq!(failing(|_| {}), Vec::<String>::new());
    }

    #[test]
    fn each_defect_of_the_product_fails_its_own_line() {
        fails_only("text files counted", |e| e.counted.text += 1);
        fails_only("text files counted", |e| e.sampled = false);
        fails_only("findings recomputed", |e| e.records[1].findings.commits += 1);
        fails_only("findings recomputed", |e| e.records[1].report_digest = "other".into());
        fails_only("accepted 8 = results recorded 7 · lost 1", |e| drop(e.listing.pop()));
        fails_only("accepted 8 = results recorded 8 · lost 0 · recorded twice 1", |e| {
            let hop = e.two.job.hops[0].clone();
            e.two.job.hops.push(hop);
        });
        fails_only("accepted", |e| e.records[0].errors.push("scan-0: no answer".into()));
        fails_only("ledger: 5 of 6", |e| e.starts.retain(|start| start.msg_id != "j2.report"));
        fails_only("agents declared dead by mistake while the leader was gone: 1 (a)", |e| {
            e.two.mistaken.push(AgentId::parse("a").unwrap());
        });
        fails_only("the killed n1 is back as pid 8 but", |e| e.two.failover.in_step = None);
        fails_only("the nodes' states differ", |e| e.agreement = Agreement::Different("n1 a, n2 b".into()));
    }

    #[test]
    fn a_unit_begun_twice_needs_a_death_to_explain_it() {
        let again = |pid| {
            move |e: &mut Evidence| {
                let first = Start { pid, ..e.starts[1].clone() };
                e.starts.insert(0, first);
            }
        };
        assert_eq!(failing(again(66)), Vec::<String>::new());
        fails_only("ledger: 6 of 6 units begun · begun twice 1", again(101));
    }

    #[test]
    fn what_was_not_exercised_is_said() {
        fails_only("shares off by", |e| e.one.choices.values_mut().for_each(|count| *count /= 2));
        fails_only("shares off by", |e| *e.one.choices.values_mut().next().unwrap() += 20);
        fails_only("scan_c joined", |e| e.one.joined_after_ms = None);
        fails_only("0 of 0 tasks", |e| e.one.held.clear());
        fails_only("the leader died at 1 of", |e| e.two.failover.next = Some(NodeId(1)));
        fails_only("the leader died at 3 of", |e| e.two.done_at_kill = 3);
    }

    #[test]
    fn the_plain_loop_counts_text() {
        let repo = tempfile::tempdir().unwrap();
        for (path, content) in [("a", "x"), ("d/b", "y"), ("bin", "a\0"), ("empty", ""), (".hidden/x", "x")] {
            let path = repo.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        assert_eq!(count_files(repo.path()).unwrap(), Counted { tracked: 4, text: 2 });
    }
}
