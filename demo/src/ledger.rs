//! The ledger: every agent appends one line when it starts a unit of work. It knows nothing of the
//! product, so the final check can count by it.

use std::{
    collections::BTreeMap,
    fs::{self, OpenOptions},
    io::Write,
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::Context;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// This machine's calendar, Unix milliseconds.
    pub at_ms: u64,
    pub job: u32,
    pub unit: String,
    pub agent: String,
    pub pid: u32,
    pub msg_id: String,
}

impl Start {
    pub fn now(job: u32, unit: &str, agent: &str, msg_id: &str) -> Self {
        Self {
            at_ms: now_ms(),
            job,
            unit: unit.into(),
            agent: agent.into(),
            pid: std::process::id(),
            msg_id: msg_id.into(),
        }
    }
}

pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// One write to the end of the file: lines of several processes do not mix.
pub fn append(ledger: &Path, start: &Start) -> anyhow::Result<()> {
    let mut line = serde_json::to_vec(start)?;
    line.push(b'\n');
    let mut file = OpenOptions::new().append(true).create(true).open(ledger)?;
    file.write_all(&line).with_context(|| format!("can't write {}", ledger.display()))
}

pub fn read(ledger: &Path) -> anyhow::Result<Vec<Start>> {
    let text = match fs::read_to_string(ledger) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| format!("can't read {}", ledger.display()))?,
    };
    text.lines()
        .map(|line| {
            serde_json::from_str(line).with_context(|| format!("a broken line in {}", ledger.display()))
        })
        .collect()
}

/// Units by job and name, with each of their starts in the order of the file.
pub fn by_unit(starts: &[Start]) -> BTreeMap<(u32, &str), Vec<&Start>> {
    let mut units: BTreeMap<(u32, &str), Vec<&Start>> = BTreeMap::new();
    for start in starts {
        units.entry((start.job, &start.unit)).or_default().push(start);
    }
    units
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_many_writers_do_not_mix() {
        let folder = tempfile::tempdir().unwrap();
        let ledger = folder.path().join("ledger");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let ledger = &ledger;
                scope.spawn(move || {
                    for unit in 0..50 {
                        let start = Start::now(1, &format!("u{unit}"), &format!("w{writer}"), "m");
                        append(ledger, &start).unwrap();
                    }
                });
            }
        });
        let starts = read(&ledger).unwrap();
        let units = by_unit(&starts);
        assert_eq!((starts.len(), units.len()), (200, 50));
        assert!(units.values().all(|starts| starts.len() == 4));
    }

    #[test]
    fn no_file_is_no_start_and_a_torn_line_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(&folder.path().join("none")).unwrap(), []);
        let torn = folder.path().join("torn");
        fs::write(&torn, "{\"at_ms\":1").unwrap();
        assert!(read(&torn).is_err());
    }
}
