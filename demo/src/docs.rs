//! `docs.py`, the agent that is no Rust program: carried along in the binary, so that the demo runs
//! from anywhere.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, ensure};

use crate::{findings::Part, snapshot::Snapshot, unit::Work};

const SCRIPT: &str = include_str!("../docs.py");

/// Writes the script into `folder`.
pub fn unpack(folder: &Path) -> anyhow::Result<PathBuf> {
    let path = folder.join("docs.py");
    std::fs::write(&path, SCRIPT).with_context(|| format!("can't write {}", path.display()))?;
    Ok(path)
}

/// What `agents run` starts for each task, after the interpreter.
pub fn arguments(script: &Path, snapshot: &Snapshot) -> Vec<String> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    vec![text(script), "--tree".into(), text(&snapshot.tree), "--paths".into(), text(&snapshot.paths)]
}

/// All the works in one process, for the final check.
pub fn many(script: &Path, snapshot: &Snapshot, works: &[&Work]) -> anyhow::Result<Vec<Part>> {
    let mut lines = Vec::new();
    for work in works {
        serde_json::to_writer(&mut lines, work)?;
        lines.push(b'\n');
    }
    let mut child = Command::new("python3")
        .args(arguments(script, snapshot))
        .arg("--many")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("python3 can't be started")?;
    let mut input = child.stdin.take().expect("it was asked for");
    // Beside the reading: a pipe holds less than everything.
    let feed = std::thread::spawn(move || input.write_all(&lines));
    let output = child.wait_with_output()?;
    feed.join().expect("a write does not panic")?;
    ensure!(output.status.success(), "docs.py failed: {}", output.status);
    let text = String::from_utf8(output.stdout)?;
    text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::findings::{Docs, Document};

    /// What docs.py finds in `text` beside a few other files.
    fn check(text: &str) -> Document {
        let repo = tempfile::tempdir().unwrap();
        let work = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(repo.path().join("doc/deep")).unwrap();
        for (path, content) in
            [("README.md", "# One\n"), ("doc/a.md", text), ("doc/deep/b.md", "## Two, `three`!\n# A\n# A\n")]
        {
            std::fs::write(repo.path().join(path), content).unwrap();
        }
        let snapshot = Snapshot::take(repo.path(), work.path()).unwrap();
        let script = unpack(work.path()).unwrap();
        let parts = many(&script, &snapshot, &[&Work::Docs { files: vec!["doc/a.md".into()] }]).unwrap();
        let [Part::Docs(Docs { files })] = &parts[..] else { panic!("{parts:?}") };
        BTreeMap::clone(files).remove("doc/a.md").unwrap()
    }

    #[test]
    fn links_that_lead_somewhere_are_fine() {
        let found = check(
            "[a](../README.md) [b](deep/b.md#two-three) [c](deep/) [d](#here) <https://x> [e](https://x/y.md)\n\
             [f](/README.md \"t\") ![i](deep/b.md#a-1) `[code](none.md)`\n# Here\n[r]: ../README.md\n",
        );
        assert_eq!((found.links, found.broken), (8, vec![]));
    }

    #[test]
    fn links_that_lead_nowhere_are_named_with_their_line() {
        let found = check("x\n[a](none.md)\n```\n[no](link.md)\n```\n[b](deep/b.md#no) [c](#gone)\n");
        let broken: Vec<_> =
            found.broken.iter().map(|(line, target, why)| (*line, &**target, &**why)).collect();
        assert_eq!(
            broken,
            [
                (2, "none.md", "no such file"),
                (6, "deep/b.md#no", "no such heading"),
                (6, "#gone", "no such heading")
            ]
        );
    }

    #[test]
    fn fenced_blocks_must_parse() {
        let found = check(
            "```json\n{\"a\": 1}\n```\n```json\n{a: 1}\n```\n```sh\n$ echo hi\nhi (there\n```\n```bash\nif true; then\n```\n\
             ```json\n{}\n{}\n```\n~~~text\nanything (\n~~~\n",
        );
        let lines: Vec<u32> = found.unparsed.iter().map(|(line, _)| *line).collect();
        assert_eq!((found.blocks, lines), (5, vec![4, 11]));
        assert!(found.unparsed[0].1.starts_with("json: ") && found.unparsed[1].1.starts_with("bash -n"));
    }
}
