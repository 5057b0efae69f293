//! Cuts the check-up of any repository into 150 to 400 units: many files to a unit in a large one, a
//! few lines to a unit in a small one.

use anyhow::ensure;

use crate::{
    snapshot::Snapshot,
    unit::{Aspect, Range, Unit, Work},
};

const SCANS: u64 = 160;
const SECRETS: u64 = 40;
const DOCS: usize = 30;
const WINDOWS: u64 = 16;
/// Below this many lines a range is scanned for one aspect at a time, so that enough units come out.
const SMALL_LINES: u64 = 400;
const LINES_MIN: u64 = 40;
/// Fingerprints of copied blocks that all the scans of a job report together, at most about.
const PRINTS: u64 = 60_000;

/// The units of one job, the kinds mixed so that every agent has work from the beginning.
pub fn units(snapshot: &Snapshot) -> anyhow::Result<Vec<Unit>> {
    let lines = snapshot.lines();
    ensure!(
        lines >= LINES_MIN,
        "{} has {lines} lines of text; the demo needs at least {LINES_MIN} to cut into tasks",
        snapshot.repo.display()
    );
    let sampling = lines.div_ceil(PRINTS);
    let mut scans = Vec::new();
    for ranges in ranges(snapshot, SCANS) {
        let one_by_one = Aspect::ALL.iter().map(std::slice::from_ref).collect::<Vec<_>>();
        let cuts = if lines < SMALL_LINES { one_by_one } else { vec![Aspect::ALL] };
        for aspects in cuts {
            scans.push(Work::Scan { ranges: ranges.clone(), aspects: aspects.to_vec(), sampling });
        }
    }
    let secrets = ranges(snapshot, SECRETS).into_iter().map(|ranges| Work::Secrets { ranges }).collect();
    let kinds = [
        ("scan", scans),
        ("secrets", secrets),
        ("docs", documents(snapshot)),
        ("history", windows(snapshot)),
    ];
    Ok(mixed(kinds.map(|(name, works)| {
        let named = |(at, work)| Unit { id: format!("{name}-{at:03}"), work };
        works.into_iter().enumerate().map(named).collect()
    })))
}

/// The lines of the whole repository, in order, in at least `parts` parts of equal length; a part is
/// never less than a line.
fn ranges(snapshot: &Snapshot, parts: u64) -> Vec<Vec<Range>> {
    let small = snapshot.lines() < SMALL_LINES;
    let parts = if small { parts / 4 } else { parts };
    let length = ((snapshot.lines() / parts) as u32).max(1);
    let mut cut = Vec::new();
    let mut open: Vec<Range> = Vec::new();
    let mut room = length;
    for (file, lines) in &snapshot.files {
        let mut from = 1;
        while from <= *lines {
            let to = (from + room).min(lines + 1);
            open.push(Range { file: file.clone(), from, to });
            room -= to - from;
            from = to;
            if room == 0 {
                cut.push(std::mem::take(&mut open));
                room = length;
            }
        }
    }
    if !open.is_empty() {
        cut.push(open);
    }
    cut
}

fn documents(snapshot: &Snapshot) -> Vec<Work> {
    let documents: Vec<String> = snapshot
        .files
        .keys()
        .filter(|path| path.ends_with(".md") || path.ends_with(".markdown"))
        .cloned()
        .collect();
    let size = documents.len().div_ceil(DOCS).max(1);
    documents.chunks(size).map(|files| Work::Docs { files: files.to_vec() }).collect()
}

fn windows(snapshot: &Snapshot) -> Vec<Work> {
    let size = snapshot.commits.div_ceil(WINDOWS).max(1);
    let head = &snapshot.head;
    match snapshot.commits {
        0 => vec![Work::History { head: None, skip: 0, count: 0 }],
        commits => (0..commits)
            .step_by(size as usize)
            .map(|skip| Work::History { head: head.clone(), skip, count: size.min(commits - skip) })
            .collect(),
    }
}

/// Lays each kind evenly over the whole.
fn mixed<const N: usize>(kinds: [Vec<Unit>; N]) -> Vec<Unit> {
    let mut placed: Vec<(f64, usize, Unit)> = Vec::new();
    for (kind, units) in kinds.into_iter().enumerate() {
        let total = units.len() as f64;
        placed
            .extend(units.into_iter().enumerate().map(|(at, unit)| ((at as f64 + 0.5) / total, kind, unit)));
    }
    placed.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    placed.into_iter().map(|(_, _, unit)| unit).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    fn snapshot(files: u32, lines: u32, commits: u64) -> Snapshot {
        let name = |i| if i % 10 == 0 { format!("d{i:05}.md") } else { format!("f{i:05}.rs") };
        Snapshot {
            repo: "/r".into(),
            tree: "/t".into(),
            paths: "/p".into(),
            head: (commits > 0).then(|| "abc".into()),
            commits,
            tracked: u64::from(files),
            text: u64::from(files),
            files: (0..files).map(|i| (name(i), lines)).collect(),
        }
    }

    #[test]
    fn any_repository_gives_150_to_400_units_and_100_scans() {
        for (files, lines, commits) in [
            (1, 40, 0),
            (1, 399, 1),
            (1, 400, 1),
            (3, 150, 2),
            (10, 41, 17),
            (200, 120, 1000),
            (9000, 90, 1000),
        ] {
            let units = units(&snapshot(files, lines, commits)).unwrap();
            let scans = units.iter().filter(|unit| unit.capability() == crate::unit::SCAN).count();
            let what = format!("{files} files of {lines} lines: {} units, {scans} scans", units.len());
            assert!((150..=400).contains(&units.len()), "{what}");
            assert!((100..=250).contains(&scans), "{what}");
            let ids: BTreeSet<_> = units.iter().map(|unit| &unit.id).collect();
            assert_eq!(ids.len(), units.len());
        }
    }

    #[test]
    fn every_line_is_in_one_range() {
        for (files, lines) in [(1, 40), (7, 211), (300, 33)] {
            let snapshot = snapshot(files, lines, 0);
            let mut seen: BTreeMap<String, Vec<u32>> = BTreeMap::new();
            for range in ranges(&snapshot, SCANS).into_iter().flatten() {
                seen.entry(range.file.clone()).or_default().extend(range.lines());
            }
            assert_eq!(seen.len(), files as usize);
            assert!(seen.values().all(|seen| *seen == (1..=lines).collect::<Vec<_>>()));
        }
    }

    #[test]
    fn the_windows_hold_every_commit_once() {
        for commits in [1, 15, 16, 17, 1000] {
            let counted: u64 = windows(&snapshot(1, 40, commits))
                .iter()
                .map(|work| match work {
                    Work::History { count, .. } => *count,
                    _ => 0,
                })
                .sum();
            assert_eq!(counted, commits);
        }
    }

    #[test]
    fn too_little_text_is_said() {
        let error = units(&snapshot(1, 39, 0)).unwrap_err().to_string();
        assert!(error.contains("39 lines") && error.contains("at least 40"), "{error}");
    }
}
