//! One unit of work: what a task's payload says, and which capability it asks for.

use std::ops;

use serde::{Deserialize, Serialize};

/// Lines `from..to` of a file, from 1. A finding belongs to the range that its first line is in.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Range {
    pub file: String,
    pub from: u32,
    pub to: u32,
}

impl Range {
    pub fn holds(&self, line: u32) -> bool {
        self.lines().contains(&line)
    }

    pub fn lines(&self) -> ops::Range<u32> {
        self.from..self.to
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Aspect {
    Functions,
    Exits,
    Notes,
    Copies,
}

impl Aspect {
    pub const ALL: &'static [Aspect] = &[Self::Functions, Self::Exits, Self::Notes, Self::Copies];
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Work {
    History { head: Option<String>, skip: u64, count: u64 },
    Scan { ranges: Vec<Range>, aspects: Vec<Aspect>, sampling: u64 },
    Docs { files: Vec<String> },
    Secrets { ranges: Vec<Range> },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Unit {
    /// Unique in a job.
    pub id: String,
    pub work: Work,
}

pub const HISTORY: &str = "git.history";
pub const SCAN: &str = "code.scan";
pub const DOCS: &str = "docs.check";
pub const SECRETS: &str = "secrets.scan";
pub const WRITE: &str = "report.write";
pub const POSTMORTEM: &str = "postmortem.write";
pub const PLAN: &str = "repo.checkup";

impl Unit {
    pub fn capability(&self) -> &'static str {
        match self.work {
            Work::History { .. } => HISTORY,
            Work::Scan { .. } => SCAN,
            Work::Docs { .. } => DOCS,
            Work::Secrets { .. } => SECRETS,
        }
    }
}

/// The payload of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub job: u32,
    pub unit: String,
    pub work: Work,
    /// The least time that the task takes, in milliseconds, so that one can watch.
    pub pace_ms: u64,
}
