//! Copied blocks: fingerprints of runs of lines, which one analyser takes from its part of the
//! repository, and the blocks that come out when everybody's are laid side by side.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

/// Lines with content in one fingerprint; a shorter copy is not reported.
pub const WINDOW: usize = 8;

/// A hash that stands in more places than this is boilerplate, not a copy.
const PLACES_MAX: usize = 8;

/// The hash of [`WINDOW`] lines with content, and the first and last of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fingerprint {
    pub hash: u64,
    pub from: u32,
    pub to: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    pub file: String,
    pub from: u32,
    pub to: u32,
}

/// Two places with the same lines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Copy {
    pub lines: u32,
    pub here: Place,
    pub there: Place,
}

/// One in `sampling` fingerprints of a file, chosen by their own hash, so that both ends of a copy
/// choose the same ones. `code` is `text` without comments: a line that is all comment has no content.
pub fn fingerprints(text: &str, code: &str, sampling: u64) -> Vec<Fingerprint> {
    let lines: Vec<(u32, &str)> = text
        .lines()
        .zip(code.lines())
        .enumerate()
        .filter(|(_, (_, code))| has_content(code))
        .map(|(at, (text, _))| (at as u32 + 1, text.trim()))
        .collect();
    lines
        .windows(WINDOW)
        .map(|window| {
            let joined = window.iter().map(|(_, line)| *line).collect::<Vec<_>>().join("\n");
            Fingerprint { hash: xxh3_64(joined.as_bytes()), from: window[0].0, to: window[WINDOW - 1].0 }
        })
        .filter(|print| print.hash % sampling.max(1) == 0)
        .collect()
}

fn has_content(code: &str) -> bool {
    let code = code.trim();
    let import = ["use ", "import ", "from ", "#include", "pub use ", "mod ", "package "];
    code.chars().filter(|c| c.is_alphanumeric()).count() >= 3
        && !import.iter().any(|word| code.starts_with(word))
}

/// Fingerprints that two files share, by the files and the distance between the places.
type Runs<'a> = BTreeMap<(&'a str, &'a str, i64), Vec<(&'a Place, &'a Place)>>;

/// Joins neighbouring fingerprints that two places share into blocks, the longest first.
pub fn copies(prints: &BTreeMap<u64, BTreeSet<Place>>) -> Vec<Copy> {
    // Two files at a constant distance: what moves along it is one block.
    let mut runs = Runs::new();
    for places in prints.values().filter(|places| (2..=PLACES_MAX).contains(&places.len())) {
        for (here, there) in places.iter().zip(places.iter().skip(1)) {
            let distance = i64::from(there.from) - i64::from(here.from);
            runs.entry((&here.file, &there.file, distance)).or_default().push((here, there));
        }
    }
    let mut found = Vec::new();
    for mut pairs in runs.into_values() {
        pairs.sort();
        let mut open: Option<Copy> = None;
        for (here, there) in pairs {
            match &mut open {
                Some(copy) if here.from <= copy.here.to + WINDOW as u32 => {
                    copy.here.to = copy.here.to.max(here.to);
                    copy.there.to = copy.there.to.max(there.to);
                }
                _ => {
                    found.extend(open.take());
                    open = Some(Copy { lines: 0, here: here.clone(), there: there.clone() });
                }
            }
        }
        found.extend(open);
    }
    // A run of equal lines overlaps itself; that is repetition and not a copy.
    found.retain(|copy| copy.here.file != copy.there.file || copy.here.to < copy.there.from);
    for copy in &mut found {
        copy.lines = copy.here.to - copy.here.from + 1;
    }
    found.sort_by(|a, b| b.lines.cmp(&a.lines).then_with(|| a.cmp(b)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(name: &str, lines: usize) -> String {
        (0..lines).map(|i| format!("    let {name}_{i} = call_{i}();\n\n")).collect()
    }

    fn laid_side_by_side(files: &[(&str, String)], sampling: u64) -> Vec<Copy> {
        let mut prints: BTreeMap<u64, BTreeSet<Place>> = BTreeMap::new();
        for (file, text) in files {
            for print in fingerprints(text, text, sampling) {
                let place = Place { file: file.to_string(), from: print.from, to: print.to };
                prints.entry(print.hash).or_default().insert(place);
            }
        }
        copies(&prints)
    }

    #[test]
    fn a_copied_block_is_found_once_and_whole() {
        let copied = block("shared", 12);
        let files = [
            ("a", format!("{}{copied}", block("own", 9))),
            ("b", format!("x = 123;\n{copied}{}", block("b", 3))),
        ];
        let found = laid_side_by_side(&files, 1);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!((found[0].here.from, found[0].here.to), (19, 41));
        assert_eq!((found[0].there.from, found[0].there.to), (2, 24));
        assert_eq!(found[0].lines, 23);
    }

    #[test]
    fn sampling_chooses_the_same_prints_at_both_ends() {
        let copied = block("shared", 60);
        let files = [("a", copied.clone()), ("b", format!("one more line;\n{copied}"))];
        let found = laid_side_by_side(&files, 4);
        assert!(!found.is_empty());
        assert!(found.iter().all(|copy| copy.there.from == copy.here.from + 1));
    }

    #[test]
    fn short_copies_and_repetition_are_not_reported() {
        assert_eq!(laid_side_by_side(&[("a", block("x", 7)), ("b", block("x", 7))], 1), []);
        assert_eq!(laid_side_by_side(&[("a", "same_line();\n".repeat(30))], 1), []);
    }
}
