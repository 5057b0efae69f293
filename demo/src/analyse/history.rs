//! `git.history`: how often and how much each file changed, and which files change together, from
//! one window of `git log --numstat`.

use std::{collections::BTreeMap, path::Path, process::Command};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

/// A commit that touches more files is a sweep: its files do not belong together.
const TOGETHER_MAX: usize = 12;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    pub commits: u64,
    /// Said instead of figures where there is no history.
    pub note: Option<String>,
    /// By file.
    pub churn: BTreeMap<String, Churn>,
    /// File, later file by name, commits that changed both.
    pub together: Vec<(String, String, u64)>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Churn {
    pub commits: u64,
    pub lines: u64,
}

/// `count` commits before `head`, without the first `skip`.
pub fn read(repo: &Path, head: Option<&str>, skip: u64, count: u64) -> anyhow::Result<History> {
    let Some(head) = head else {
        return Ok(History { note: Some("no history here".into()), ..History::default() });
    };
    let output = Command::new("git")
        .arg("-C")
        .arg(repo)
        .args([
            "-c",
            "core.quotePath=false",
            "log",
            "--no-merges",
            "--no-renames",
            "--numstat",
            "--relative",
            "-z",
        ])
        .args([format!("--skip={skip}"), format!("--max-count={count}"), "--format=%x01".into()])
        .args([head, "--"])
        .output()
        .context("git log can't be started")?;
    ensure!(output.status.success(), "git log failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(log: &str) -> History {
    let mut history = History::default();
    let mut together: BTreeMap<(String, String), u64> = BTreeMap::new();
    for commit in log.split('\u{1}').skip(1) {
        history.commits += 1;
        let mut files: Vec<&str> = Vec::new();
        for row in commit.split('\0') {
            let mut fields = row.trim_start_matches('\n').splitn(3, '\t');
            let (Some(added), Some(removed), Some(file)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            // A binary file has no line counts.
            let lines = |text: &str| text.parse::<u64>().unwrap_or(0);
            let churn = history.churn.entry(file.to_string()).or_default();
            churn.commits += 1;
            churn.lines += lines(added) + lines(removed);
            files.push(file);
        }
        files.sort_unstable();
        files.dedup();
        if files.len() > TOGETHER_MAX {
            continue;
        }
        for (at, first) in files.iter().enumerate() {
            for second in &files[at + 1..] {
                *together.entry((first.to_string(), second.to_string())).or_default() += 1;
            }
        }
    }
    history.together = together.into_iter().map(|((a, b), commits)| (a, b, commits)).collect();
    history
}

#[cfg(test)]
mod tests {
    use super::*;

    fn git(repo: &Path, args: &[&str]) {
        let identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"];
        let output = Command::new("git").arg("-C").arg(repo).args(identity).args(args).output().unwrap();
        assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn windows_add_up_to_the_whole_history() {
        let repo = tempfile::tempdir().unwrap();
        git(repo.path(), &["init", "-q"]);
        for round in 0..5 {
            std::fs::write(repo.path().join("a b.txt"), format!("{round}\n")).unwrap();
            std::fs::write(repo.path().join("c.txt"), "x\n".repeat(round + 1)).unwrap();
            if round == 4 {
                std::fs::write(repo.path().join("alone"), [0, 1]).unwrap();
            }
            git(repo.path(), &["add", "."]);
            git(repo.path(), &["commit", "-q", "-m", "round\n\n1\t2\tnot a file"]);
        }
        let all = read(repo.path(), Some("HEAD"), 0, 100).unwrap();
        assert_eq!(all.commits, 5);
        assert_eq!(all.churn["a b.txt"], Churn { commits: 5, lines: 9 });
        assert_eq!(all.churn["alone"], Churn { commits: 1, lines: 0 });
        assert_eq!(all.churn.len(), 3);
        assert!(all.together.contains(&("a b.txt".into(), "c.txt".into(), 5)));
        let windows: Vec<_> =
            [0, 2, 4].map(|skip| read(repo.path(), Some("HEAD"), skip, 2).unwrap()).into_iter().collect();
        assert_eq!(windows.iter().map(|w| w.commits).sum::<u64>(), 5);
        assert_eq!(windows.iter().map(|w| w.churn["c.txt"].lines).sum::<u64>(), all.churn["c.txt"].lines);
    }

    #[test]
    fn a_folder_without_git_has_no_history() {
        let history = read(Path::new("/"), None, 0, 10).unwrap();
        assert_eq!((history.commits, history.note.as_deref()), (0, Some("no history here")));
    }
}
