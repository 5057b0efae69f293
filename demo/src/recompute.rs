//! The whole job again in this one process, without the product: what the cluster's answer is held
//! against.

use std::path::Path;

use crate::{
    agent, cut, docs,
    findings::Findings,
    snapshot::Snapshot,
    unit::{Unit, Work},
};

pub fn findings(snapshot: &Snapshot, docs_script: &Path) -> anyhow::Result<Findings> {
    let units: Vec<Unit> = cut::units(snapshot)?;
    let mut parts = Vec::new();
    let mut documents = Vec::new();
    for unit in &units {
        match &unit.work {
            work @ Work::Docs { .. } => documents.push(work),
            work => parts.push(agent::part_of(snapshot, work)?.0),
        }
    }
    if !documents.is_empty() {
        parts.extend(docs::many(docs_script, snapshot, &documents)?);
    }
    Ok(Findings::merge(parts))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_computations_are_equal() {
        // Some real code without a history: this package's own.
        let (repo, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for file in ["agent.rs", "cut.rs", "main.rs"] {
            let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
            std::fs::copy(own, repo.path().join(file)).unwrap();
        }
        std::fs::write(repo.path().join("README.md"), "# A\n[a](#a) [b](none)\n").unwrap();
        let snapshot = Snapshot::take(repo.path(), work.path()).unwrap();
        let script = docs::unpack(work.path()).unwrap();
        let first = findings(&snapshot, &script).unwrap();
        assert_eq!(findings(&snapshot, &script).unwrap(), first);
        assert_eq!(first.scans.len(), snapshot.files.len(), "every file was reported on");
        assert_eq!(first.lines(), snapshot.lines());
        assert_eq!(first.documents["README.md"].broken.len(), 1);
    }
}
