//! A frozen copy of the repository's text, so that a job, its repetition and the final check read
//! the same bytes while somebody works in the original.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

/// A longer file, in bytes, is data rather than text that people read.
pub const FILE_BYTES_MAX: u64 = 512 << 10;
/// Of a repository with more text than this, in bytes, every second, third, … file is looked at.
pub const TEXT_BYTES_MAX: u64 = 32 << 20;
/// Files of a folder without git that are looked at.
const WALK_MAX: usize = 20_000;
/// Folders that hold what programs made.
const LEFT_OUT: &[&str] = &["target", "node_modules", "demo-out"];
/// The newest commits that are read.
pub const COMMITS_MAX: u64 = 1_000;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub repo: PathBuf,
    /// The copies of `files`.
    pub tree: PathBuf,
    /// Every tracked path, with a NUL between two.
    pub paths: PathBuf,
    /// Without git, or before the first commit, there is none.
    pub head: Option<String>,
    /// Commits that are looked at.
    pub commits: u64,
    /// Regular files that the repository tracks.
    pub tracked: u64,
    /// Those that hold text: neither binary, nor empty, nor larger than [`FILE_BYTES_MAX`].
    pub text: u64,
    /// Text that is looked at, by path; all of `text` but in a very large repository.
    pub files: BTreeMap<String, u32>,
}

impl Snapshot {
    /// `folder` is made and gets the copies.
    pub fn take(repo: &Path, folder: &Path) -> anyhow::Result<Self> {
        let repo =
            fs::canonicalize(repo).with_context(|| format!("there is no folder {}", repo.display()))?;
        let folder = std::path::absolute(folder)?;
        let tracked = match tracked_by_git(&repo) {
            Some(paths) => paths,
            None => walked(&repo)?,
        };
        let mut text: Vec<(String, u64)> = Vec::new();
        let mut regular = 0;
        for path in &tracked {
            let Ok(metadata) = fs::symlink_metadata(repo.join(path)) else { continue };
            if !metadata.is_file() {
                continue;
            }
            regular += 1;
            if (1..=FILE_BYTES_MAX).contains(&metadata.len()) && read_text(&repo.join(path)).is_some() {
                text.push((path.clone(), metadata.len()));
            }
        }
        let bytes: u64 = text.iter().map(|(_, bytes)| bytes).sum();
        let step = bytes.div_ceil(TEXT_BYTES_MAX).max(1);
        let tree = folder.join("tree");
        let mut files = BTreeMap::new();
        for (path, _) in text.iter().step_by(step as usize) {
            let Some(content) = read_text(&repo.join(path)) else { continue };
            let copy = tree.join(path);
            fs::create_dir_all(copy.parent().expect("a copy stands below its tree"))?;
            fs::write(&copy, &content).with_context(|| format!("can't write {}", copy.display()))?;
            files.insert(path.clone(), content.lines().count() as u32);
        }
        ensure!(!files.is_empty(), "{} holds no text to look at", repo.display());
        let paths = folder.join("paths");
        fs::write(&paths, tracked.join("\0"))?;
        let head =
            git(&repo, &["rev-parse", "--verify", "--quiet", "HEAD"]).map(|text| text.trim().to_string());
        let commits = head.as_ref().and_then(|head| {
            let limit = format!("--max-count={COMMITS_MAX}");
            git(&repo, &["rev-list", "--count", "--no-merges", &limit, head, "--", "."])?.trim().parse().ok()
        });
        Ok(Self {
            repo,
            tree,
            paths,
            head,
            commits: commits.unwrap_or(0),
            tracked: regular,
            text: text.len() as u64,
            files,
        })
    }

    pub fn lines(&self) -> u64 {
        self.files.values().map(|lines| u64::from(*lines)).sum()
    }

    /// What people call it.
    pub fn name(&self) -> String {
        self.repo.file_name().map_or_else(|| "/".into(), |name| name.to_string_lossy().into_owned())
    }
}

/// The file's content when it is text: UTF-8 without a NUL.
fn read_text(path: &Path) -> Option<String> {
    let text = String::from_utf8(fs::read(path).ok()?).ok()?;
    (!text.contains('\0')).then_some(text)
}

fn git(repo: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(repo).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn tracked_by_git(repo: &Path) -> Option<Vec<String>> {
    let listing = git(repo, &["ls-files", "-z"])?;
    let mut paths: Vec<String> =
        listing.split('\0').filter(|path| !path.is_empty()).map(Into::into).collect();
    paths.sort();
    paths.dedup();
    // A folder that a repository above leaves out is looked at as if there were none.
    (!paths.is_empty()).then_some(paths)
}

/// Without git: every file below, hidden folders and the usual build folders left out.
fn walked(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut paths = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(root.join(&folder)) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = folder.join(&name);
            let is_left_out = name.starts_with('.') || LEFT_OUT.contains(&&*name);
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && !is_left_out => folders.push(path),
                Ok(kind) if kind.is_file() => paths.push(path.to_string_lossy().into_owned()),
                _ => {}
            }
        }
        ensure!(
            paths.len() <= WALK_MAX,
            "{} has no git and over {WALK_MAX} files: name a smaller folder",
            root.display()
        );
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_git_is_frozen_as_it_stands() {
        let repo = tempfile::tempdir().unwrap();
        let out = tempfile::tempdir().unwrap();
        for (path, content) in
            [("a.rs", "fn a() {}\n"), ("d/b.md", "x\ny"), ("c.bin", "a\0b"), ("empty", ""), (".git2/x", "x")]
        {
            let path = repo.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let snapshot = Snapshot::take(repo.path(), out.path()).unwrap();
        fs::write(repo.path().join("a.rs"), "changed\n").unwrap();
        assert_eq!((snapshot.tracked, snapshot.text, snapshot.commits), (4, 2, 0));
        assert_eq!(snapshot.head, None);
        assert_eq!(snapshot.files, BTreeMap::from([("a.rs".into(), 1), ("d/b.md".into(), 2)]));
        assert_eq!(fs::read_to_string(snapshot.tree.join("a.rs")).unwrap(), "fn a() {}\n");
        assert_eq!(fs::read_to_string(&snapshot.paths).unwrap(), "a.rs\0c.bin\0d/b.md\0empty");
    }

    #[test]
    fn nothing_to_look_at_is_said() {
        let (repo, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let error = Snapshot::take(repo.path(), out.path()).unwrap_err().to_string();
        assert!(error.contains("holds no text"), "{error}");
        assert!(Snapshot::take(&repo.path().join("none"), out.path()).is_err());
    }
}
