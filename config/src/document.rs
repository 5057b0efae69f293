//! A TOML text whose keys know their lines, so that every complaint about a value, ours or serde's,
//! can say where it stands.

use std::ops::Range;

use serde::de::DeserializeOwned;
use toml::de::{DeTable, DeValue};

use crate::error::Fault;

pub(crate) struct Document<'a> {
    text: &'a str,
    keys: Vec<Key>,
}

/// A key with the dotted path that leads to it, and the bytes that it and its value take.
struct Key {
    path: String,
    at: usize,
    value: Range<usize>,
}

impl<'a> Document<'a> {
    pub(crate) fn parse(text: &'a str) -> Result<Self, Fault> {
        let table = DeTable::parse(text).map_err(|error| Fault {
            line: error.span().map(|span| line_of(text, span.start)),
            key: None,
            problem: format!("not TOML: {}", error.message()),
        })?;
        let mut keys = Vec::new();
        collect(table.get_ref(), "", &mut keys);
        Ok(Self { text, keys })
    }

    /// The whole text as a `T`. `way_out` is asked about each unknown key (its dotted path) before
    /// the usual complaint is made.
    pub(crate) fn read<T: DeserializeOwned>(
        &self,
        way_out: impl Fn(&str) -> Option<String>,
    ) -> Result<T, Fault> {
        toml::from_str(self.text).map_err(|error| {
            let key = error.span().and_then(|span| self.key_at(&span));
            let path = key.map(|key| key.path.clone());
            let problem = path
                .as_deref()
                .filter(|_| error.message().starts_with("unknown field"))
                .and_then(way_out)
                .unwrap_or_else(|| reworded(error.message()));
            Fault { line: error.span().map(|span| line_of(self.text, span.start)), key: path, problem }
        })
    }

    /// A complaint about the value of `path`, with its line when it is in the text.
    pub(crate) fn fault(&self, path: &str, problem: impl Into<String>) -> Fault {
        let line = self.keys.iter().find(|key| key.path == path).map(|key| line_of(self.text, key.at));
        Fault { line, key: Some(path.to_string()), problem: problem.into() }
    }

    /// The innermost key that `span` belongs to: its own name, or else its value.
    fn key_at(&self, span: &Range<usize>) -> Option<&Key> {
        self.keys.iter().find(|key| key.at == span.start).or_else(|| {
            let holds = |key: &&Key| key.value.start <= span.start && span.end <= key.value.end;
            self.keys.iter().filter(holds).min_by_key(|key| key.value.len())
        })
    }
}

fn collect(table: &DeTable<'_>, prefix: &str, keys: &mut Vec<Key>) {
    for (name, value) in table {
        let path = match prefix {
            "" => name.get_ref().to_string(),
            _ => format!("{prefix}.{}", name.get_ref()),
        };
        keys.push(Key { path: path.clone(), at: name.span().start, value: value.span() });
        if let DeValue::Table(inner) = value.get_ref() {
            collect(inner, &path, keys);
        }
    }
}

fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

/// serde's words for an unknown key, with the nearest known one.
fn reworded(message: &str) -> String {
    let Some(rest) = message.strip_prefix("unknown field ") else {
        return message.to_string();
    };
    let mut names = rest.split('`').skip(1).step_by(2);
    let unknown = names.next().unwrap_or_default();
    let known: Vec<&str> = names.collect();
    let nearest = known.iter().map(|name| (distance(unknown, name), name)).min();
    match nearest {
        Some((distance, name)) if distance <= 1 + unknown.len() / 4 => {
            format!("there is no such key; did you mean {name}?")
        }
        _ if known.is_empty() => "there is no such key: take it out".to_string(),
        _ => format!("there is no such key: take it out, or use one of {}", known.join(", ")),
    }
}

/// Levenshtein's: single letters to add, drop or change.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Form {
        size: u8,
        inner: Option<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Inner {
        names: Vec<u8>,
    }

    fn fault(text: &str) -> (Option<usize>, Option<String>) {
        let fault = match Document::parse(text) {
            Ok(document) => document.read::<Form>(|_| None).unwrap_err(),
            Err(fault) => fault,
        };
        (fault.line, fault.key)
    }

    #[test]
    fn every_fault_knows_its_line_and_key() {
        let key = |line: usize, key: &str| (Some(line), Some(key.to_string()));
        assert_eq!(fault("size = 'x'"), key(1, "size"));
        assert_eq!(fault("\nsize = 1\nnope = 1"), key(3, "nope"));
        assert_eq!(fault("size = 1\n[inner]\nnames = [1,\n 2,\n 'x']"), key(5, "inner.names"));
        assert_eq!(fault("size = 1\n[inner]\nnames = []\nnope = 1"), key(4, "inner.nope"));
        assert_eq!(fault("size = 1\ninner = { nope = 1 }"), key(2, "inner.nope"));
        assert_eq!(fault("size = 1\nsize = 2").0, Some(2));
        assert_eq!(fault("size =").0, Some(1));
    }

    #[test]
    fn a_slip_of_the_pen_is_answered_with_the_nearest_key() {
        let message = |unknown: &str| {
            reworded(&format!("unknown field `{unknown}`, expected one of `peer_listen`, `cluster`"))
        };
        assert_eq!(message("peer_listn"), "there is no such key; did you mean peer_listen?");
        assert_eq!(message("zzz"), "there is no such key: take it out, or use one of peer_listen, cluster");
    }
}
