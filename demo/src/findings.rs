//! What the units found, merged: equal whatever the order in which results came in, so that a
//! recomputation in one process can be held against it.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::analyse::{
    blocks::{Copy, Place, copies},
    history::{Churn, History},
    scan::{FileScan, Scan},
    secrets::{Secrets, Suspect},
};

/// The result of one unit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Part {
    History(History),
    Scan(Scan),
    Docs(Docs),
    Secrets(Secrets),
}

/// As `docs.py` reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Docs {
    pub files: BTreeMap<String, Document>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Document {
    pub links: u32,
    /// Fenced blocks that were parsed.
    pub blocks: u32,
    /// Fenced blocks whose parser this machine lacks.
    pub unchecked: u32,
    /// Line, target, why.
    pub broken: Vec<(u32, String, String)>,
    /// Line, why.
    pub unparsed: Vec<(u32, String)>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Findings {
    pub commits: u64,
    pub notes: BTreeSet<String>,
    pub churn: BTreeMap<String, Churn>,
    /// A list rather than a map: a pair is no key in JSON.
    pub together: Vec<(String, String, u64)>,
    pub scans: BTreeMap<String, FileScan>,
    pub documents: BTreeMap<String, Document>,
    pub secret_lines: u64,
    pub secrets: BTreeSet<Suspect>,
}

impl Findings {
    pub fn merge(parts: impl IntoIterator<Item = Part>) -> Self {
        let mut all = Self::default();
        let mut together: BTreeMap<(String, String), u64> = BTreeMap::new();
        for part in parts {
            match part {
                Part::History(history) => {
                    all.commits += history.commits;
                    all.notes.extend(history.note);
                    for (file, churn) in history.churn {
                        let sum = all.churn.entry(file).or_default();
                        sum.commits += churn.commits;
                        sum.lines += churn.lines;
                    }
                    for (first, second, commits) in history.together {
                        *together.entry((first, second)).or_default() += commits;
                    }
                }
                Part::Scan(scan) => {
                    for (file, found) in scan.files {
                        all.scans.entry(file).or_default().add(found);
                    }
                }
                Part::Docs(docs) => all.documents.extend(docs.files),
                Part::Secrets(secrets) => {
                    all.secret_lines += secrets.lines;
                    all.secrets.extend(secrets.found);
                }
            }
        }
        all.together = together.into_iter().map(|((a, b), commits)| (a, b, commits)).collect();
        all
    }

    pub fn copies(&self) -> Vec<Copy> {
        let mut prints: BTreeMap<u64, BTreeSet<Place>> = BTreeMap::new();
        for (file, scan) in &self.scans {
            for print in &scan.prints {
                let place = Place { file: file.clone(), from: print.from, to: print.to };
                prints.entry(print.hash).or_default().insert(place);
            }
        }
        copies(&prints)
    }

    pub fn lines(&self) -> u64 {
        self.scans.values().map(|scan| u64::from(scan.lines)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analyse::scan::Long;

    fn parts() -> Vec<Part> {
        let mut parts = Vec::new();
        for i in 0..6u32 {
            let churn = Churn { commits: 1, lines: u64::from(i) };
            parts.push(Part::History(History {
                commits: 2,
                churn: BTreeMap::from([("a".into(), churn)]),
                together: vec![("a".into(), "b".into(), 1)],
                ..History::default()
            }));
            let long = vec![Long { line: 10 - i, lines: 70, branches: i, name: "f".into() }];
            let scan = FileScan { lines: 3, long, ..FileScan::default() };
            parts.push(Part::Scan(Scan { files: BTreeMap::from([(format!("f{}", i % 2), scan)]) }));
        }
        parts
    }

    #[test]
    fn the_order_of_arrival_changes_nothing() {
        let forward = Findings::merge(parts());
        let backward = Findings::merge(parts().into_iter().rev());
        assert_eq!(forward, backward);
        assert_eq!(forward.churn["a"], Churn { commits: 6, lines: 15 });
        assert_eq!(forward.together, [("a".to_string(), "b".to_string(), 6)]);
        assert_eq!((forward.lines(), forward.scans.len()), (18, 2));
    }

    #[test]
    fn a_part_survives_its_way_as_json() {
        for part in parts() {
            let text = serde_json::to_string(&part).unwrap();
            assert_eq!(serde_json::from_str::<Part>(&text).unwrap(), part);
        }
        let docs = r#"{"kind":"docs","files":{"a.md":{"links":2,"blocks":1,"unchecked":0,"broken":[[3,"x","no such file"]],"unparsed":[]}}}"#;
        assert!(
            matches!(serde_json::from_str(docs), Ok(Part::Docs(docs)) if docs.files["a.md"].broken.len() == 1)
        );
    }
}
