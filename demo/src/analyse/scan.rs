//! `code.scan`: long functions, exits and unwraps, notes to self, and the fingerprints of copied
//! blocks, each reported by the one range that its first line stands in.

use std::{collections::BTreeMap, path::Path};

use serde::{Deserialize, Serialize};

use super::{
    blocks::{self, Fingerprint},
    functions,
    language::{self, Language},
};
use crate::unit::{Aspect, Range};

/// A function of more lines is called long.
pub const LONG_LINES: u32 = 60;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scan {
    /// By file.
    pub files: BTreeMap<String, FileScan>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FileScan {
    pub lines: u32,
    pub branches: u32,
    pub functions: u32,
    pub long: Vec<Long>,
    /// Line and word.
    pub exits: Vec<(u32, String)>,
    pub notes: Vec<(u32, String)>,
    pub prints: Vec<Fingerprint>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Long {
    pub line: u32,
    pub lines: u32,
    pub branches: u32,
    pub name: String,
}

pub fn scan(tree: &Path, ranges: &[Range], aspects: &[Aspect], sampling: u64) -> std::io::Result<Scan> {
    let mut found = Scan::default();
    for range in ranges {
        let text = std::fs::read_to_string(tree.join(&range.file))?;
        let part = scan_range(&text, range, aspects, sampling);
        found.files.entry(range.file.clone()).or_default().add(part);
    }
    Ok(found)
}

impl FileScan {
    pub fn add(&mut self, other: FileScan) {
        self.lines += other.lines;
        self.branches += other.branches;
        self.functions += other.functions;
        self.long.extend(other.long);
        self.exits.extend(other.exits);
        self.notes.extend(other.notes);
        self.prints.extend(other.prints);
        self.long.sort();
        self.exits.sort();
        self.notes.sort();
        self.prints.sort();
    }
}

fn scan_range(text: &str, range: &Range, aspects: &[Aspect], sampling: u64) -> FileScan {
    let language = Language::of(&range.file);
    let code = if language.is_code() { language::code_only(text, language) } else { String::new() };
    let code_lines: Vec<&str> = code.lines().collect();
    let mut found = FileScan::default();
    for aspect in aspects {
        match aspect {
            Aspect::Functions => {
                found.lines = range.to - range.from;
                found.branches = range
                    .lines()
                    .filter_map(|line| code_lines.get(line as usize - 1))
                    .map(|l| functions::branches(l))
                    .sum();
                for function in functions::functions(&code, language) {
                    if !range.holds(function.line) {
                        continue;
                    }
                    found.functions += 1;
                    let lines = function.last - function.line + 1;
                    if lines > LONG_LINES {
                        let body = &code_lines[function.line as usize - 1..function.last as usize];
                        let branches = body.iter().map(|line| functions::branches(line)).sum();
                        found.long.push(Long { line: function.line, lines, branches, name: function.name });
                    }
                }
            }
            Aspect::Exits => found.exits = exits(&code_lines, range, language),
            Aspect::Notes => found.notes = notes(text, range),
            Aspect::Copies if language.is_code() && !language::is_generated(&range.file) => {
                found.prints = blocks::fingerprints(text, &code, sampling);
                found.prints.retain(|print| range.holds(print.from));
            }
            Aspect::Copies => {}
        }
    }
    found
}

/// Outside tests only: a test may panic.
fn exits(code_lines: &[&str], range: &Range, language: Language) -> Vec<(u32, String)> {
    if language::is_test(&range.file) {
        return Vec::new();
    }
    let tests_from = code_lines.iter().position(|line| line.trim() == "#[cfg(test)]").unwrap_or(usize::MAX);
    let mut found = Vec::new();
    for line in range.lines().filter(|line| (*line as usize) <= tests_from) {
        let Some(code) = code_lines.get(line as usize - 1) else { break };
        for word in language.exits() {
            for (at, _) in code.match_indices(word) {
                let before = code[..at].chars().next_back();
                let whole = word.starts_with('.')
                    || !before.is_some_and(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | ':'));
                if whole {
                    found.push((line, word.trim_matches(['.', '(', ')', ':', '!']).to_string()));
                }
            }
        }
    }
    found
}

fn notes(text: &str, range: &Range) -> Vec<(u32, String)> {
    const WORDS: &[&str] = &["TODO", "FIXME", "XXX", "HACK"];
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line_number = at as u32 + 1;
        if !range.holds(line_number) {
            continue;
        }
        for word in line.split(|c: char| !c.is_alphanumeric() && c != '_') {
            if WORDS.contains(&word) {
                found.push((line_number, word.to_string()));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> String {
        let mut text = String::from("fn short() { a.unwrap(); }\n// TODO: one\nfn long() {\n");
        text.push_str(&"    if a { b.expect(\"x.unwrap()\"); }\n".repeat(70));
        text.push_str("}\n#[cfg(test)]\nmod tests {\n    fn t() { c.unwrap(); }\n}\n");
        text
    }

    fn whole(file: &str, text: &str) -> Range {
        Range { file: file.into(), from: 1, to: text.lines().count() as u32 + 1 }
    }

    #[test]
    fn what_is_found_has_its_place() {
        let text = sample();
        let found = scan_range(&text, &whole("a.rs", &text), Aspect::ALL, 1);
        assert_eq!((found.functions, found.branches), (3, 70));
        assert_eq!(found.long, [Long { line: 3, lines: 72, branches: 70, name: "long".into() }]);
        assert_eq!(found.notes, [(2, "TODO".to_string())]);
        assert_eq!(found.exits.len(), 71, "strings and tests are left out");
        assert!(scan_range(&text, &whole("tests/a.rs", &text), Aspect::ALL, 1).exits.is_empty());
    }

    #[test]
    fn parts_add_up_to_the_whole_however_it_is_cut() {
        let text = sample();
        let mut all = FileScan::default();
        all.add(scan_range(&text, &whole("a.rs", &text), Aspect::ALL, 1));
        for step in [1, 7, 40] {
            let mut sum = FileScan::default();
            let end = whole("a.rs", &text).to;
            for from in (1..end).step_by(step) {
                let range = Range { file: "a.rs".into(), from, to: (from + step as u32).min(end) };
                for aspect in Aspect::ALL {
                    sum.add(scan_range(&text, &range, &[*aspect], 1));
                }
            }
            assert_eq!(sum, all, "cut every {step} lines");
        }
    }
}
