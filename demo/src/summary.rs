//! What the report says, chosen from the findings: the few places worth a look, worst first.

use serde::{Deserialize, Serialize};

use crate::{
    analyse::{blocks::Copy, scan::Long, secrets::Suspect},
    findings::Findings,
    snapshot::Snapshot,
};

/// Rows in one table of the report.
const TOP: usize = 15;
/// Fewer common commits than this are chance.
const TOGETHER_MIN: u64 = 3;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub repository: String,
    pub head: Option<String>,
    pub tracked: u64,
    pub text: u64,
    pub totals: Totals,
    pub hot: Vec<Hot>,
    pub together: Vec<(String, String, u64)>,
    pub long: Vec<(String, Long)>,
    /// File and how many.
    pub exits: Vec<(String, u64)>,
    /// File, line, word.
    pub notes: Vec<(String, u32, String)>,
    pub copies: Vec<Copy>,
    /// Document, line, target, why.
    pub broken: Vec<(String, u32, String, String)>,
    /// Document, line, why.
    pub unparsed: Vec<(String, u32, String)>,
    pub secrets: Vec<Suspect>,
    pub remarks: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Files that a scan reported on.
    pub files: u64,
    pub lines: u64,
    pub commits: u64,
    pub functions: u64,
    pub long: u64,
    pub exits: u64,
    pub notes: u64,
    pub copies: u64,
    pub documents: u64,
    pub links: u64,
    pub broken: u64,
    pub blocks: u64,
    pub unparsed: u64,
    pub secrets: u64,
}

/// A file that is changed often and hard to change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hot {
    pub file: String,
    pub commits: u64,
    pub changed: u64,
    pub branches: u32,
}

impl Summary {
    pub fn of(snapshot: &Snapshot, findings: &Findings) -> Self {
        let scans = &findings.scans;
        let copies = findings.copies();
        let mut long: Vec<(String, Long)> = each(scans, |scan| scan.long.clone());
        long.sort_by(|a, b| b.1.lines.cmp(&a.1.lines).then_with(|| a.cmp(b)));
        let notes: Vec<(String, u32, String)> = each(scans, |scan| scan.notes.clone())
            .into_iter()
            .map(|(file, (line, word))| (file, line, word))
            .collect();
        let broken: Vec<_> = each(&findings.documents, |document| document.broken.clone())
            .into_iter()
            .map(|(file, (line, target, why))| (file, line, target, why))
            .collect();
        let unparsed: Vec<_> = each(&findings.documents, |document| document.unparsed.clone())
            .into_iter()
            .map(|(file, (line, why))| (file, line, why))
            .collect();
        let secrets: Vec<Suspect> = findings.secrets.iter().cloned().collect();
        let mut exits: Vec<(String, u64)> = scans
            .iter()
            .map(|(file, scan)| (file.clone(), scan.exits.len() as u64))
            .filter(|(_, n)| *n > 0)
            .collect();
        exits.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.cmp(b)));
        let documents = findings.documents.values();
        let totals = Totals {
            files: scans.len() as u64,
            lines: findings.lines(),
            commits: findings.commits,
            functions: scans.values().map(|scan| u64::from(scan.functions)).sum(),
            long: long.len() as u64,
            exits: exits.iter().map(|(_, count)| count).sum(),
            notes: notes.len() as u64,
            copies: copies.len() as u64,
            documents: findings.documents.len() as u64,
            links: documents.clone().map(|document| u64::from(document.links)).sum(),
            broken: broken.len() as u64,
            blocks: documents.clone().map(|document| u64::from(document.blocks)).sum(),
            unparsed: unparsed.len() as u64,
            secrets: secrets.len() as u64,
        };
        let mut remarks: Vec<String> = findings.notes.iter().cloned().collect();
        let unchecked: u32 = documents.map(|document| document.unchecked).sum();
        if unchecked > 0 {
            remarks.push(format!(
                "{unchecked} fenced blocks were left unparsed: this machine lacks bash or Python 3.11"
            ));
        }
        if totals.files < snapshot.text {
            remarks.push(format!(
                "a large repository: {} of {} text files were looked at",
                totals.files, snapshot.text
            ));
        }
        Self {
            repository: snapshot.name(),
            head: snapshot.head.clone(),
            tracked: snapshot.tracked,
            text: snapshot.text,
            totals,
            hot: hot(findings),
            together: together(findings),
            long: top(long),
            exits: top(exits),
            notes: top(notes),
            copies: top(copies),
            broken: top(broken),
            unparsed: top(unparsed),
            secrets: top(secrets),
            remarks,
        }
    }
}

fn top<T>(mut rows: Vec<T>) -> Vec<T> {
    rows.truncate(TOP);
    rows
}

fn each<F, T>(
    files: &std::collections::BTreeMap<String, F>,
    rows: impl Fn(&F) -> Vec<T>,
) -> Vec<(String, T)> {
    files.iter().flat_map(|(file, found)| rows(found).into_iter().map(|row| (file.clone(), row))).collect()
}

/// Commits times branches, of code that still stands.
fn hot(findings: &Findings) -> Vec<Hot> {
    let mut hot: Vec<Hot> = findings
        .churn
        .iter()
        .filter_map(|(file, churn)| {
            let branches = findings.scans.get(file)?.branches;
            Some(Hot { file: file.clone(), commits: churn.commits, changed: churn.lines, branches })
        })
        .filter(|hot| hot.branches > 0)
        .collect();
    let score = |hot: &Hot| hot.commits * u64::from(hot.branches);
    hot.sort_by(|a, b| score(b).cmp(&score(a)).then_with(|| a.file.cmp(&b.file)));
    top(hot)
}

fn together(findings: &Findings) -> Vec<(String, String, u64)> {
    let stands = |file: &String| findings.scans.contains_key(file);
    let mut pairs: Vec<(String, String, u64)> = findings
        .together
        .iter()
        .filter(|(first, second, commits)| *commits >= TOGETHER_MIN && stands(first) && stands(second))
        .cloned()
        .collect();
    pairs.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.cmp(b)));
    top(pairs)
}

#[cfg(test)]
pub mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        analyse::{
            history::{Churn, History},
            scan::{FileScan, Scan},
            secrets::Secrets,
        },
        findings::{Docs, Document, Part},
    };

    pub fn sample() -> Summary {
        let snapshot = Snapshot {
            repo: "/home/me/shop".into(),
            tree: "/t".into(),
            paths: "/p".into(),
            head: Some("abcdef0123".into()),
            commits: 9,
            tracked: 4,
            text: 3,
            files: BTreeMap::new(),
        };
        let scan = |branches, lines| FileScan {
            lines,
            branches,
            functions: 2,
            long: vec![Long { line: 3, lines: 80, branches, name: "run".into() }],
            exits: vec![(5, "unwrap".into())],
            notes: vec![(6, "TODO".into())],
            ..FileScan::default()
        };
        let churn = |commits| Churn { commits, lines: 10 * commits };
        let document = Document {
            links: 2,
            blocks: 1,
            unchecked: 0,
            broken: vec![(4, "a<b>.md".into(), "no such file".into())],
            unparsed: vec![(9, "json: Expecting value".into())],
        };
        let pair = |a: &str, b: &str, n| (a.to_string(), b.to_string(), n);
        let findings = Findings::merge([
            Part::Scan(Scan {
                files: BTreeMap::from([("a.rs".into(), scan(9, 90)), ("b.rs".into(), scan(4, 85))]),
            }),
            Part::History(History {
                commits: 9,
                note: None,
                churn: BTreeMap::from([
                    ("a.rs".into(), churn(2)),
                    ("b.rs".into(), churn(7)),
                    ("gone".into(), churn(8)),
                ]),
                together: vec![pair("a.rs", "b.rs", 3), pair("a.rs", "gone", 5), pair("b.rs", "c", 2)],
            }),
            Part::Docs(Docs { files: BTreeMap::from([("README.md".into(), document)]) }),
            Part::Secrets(Secrets {
                lines: 175,
                found: vec![Suspect { file: "a.rs".into(), line: 8, kind: "private key".into() }],
            }),
        ]);
        Summary::of(&snapshot, &findings)
    }

    #[test]
    fn the_worst_stands_first_and_what_is_gone_is_left_out() {
        let summary = sample();
        let hot: Vec<_> = summary.hot.iter().map(|hot| (hot.file.as_str(), hot.commits)).collect();
        assert_eq!(hot, [("b.rs", 7), ("a.rs", 2)], "28 points before 18");
        assert_eq!(summary.together, [("a.rs".into(), "b.rs".into(), 3)]);
        assert_eq!((summary.totals.files, summary.totals.lines, summary.totals.long), (2, 175, 2));
        assert_eq!(summary.remarks, ["a large repository: 2 of 3 text files were looked at"]);
    }
}
