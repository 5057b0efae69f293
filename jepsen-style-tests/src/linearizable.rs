//! Whether a history of one register could have happened one operation at a time: the search of
//! Wing and Gong, with Lowe's memory of configurations already tried.

use std::collections::{BTreeSet, HashSet};

/// What an operation did to the register, as far as its caller was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// To a value, or to nothing.
    Write(Option<u64>),
    Read(Option<u64>),
    /// To nothing, if it held this value.
    RemoveIf(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub action: Action,
    pub began: u64,
    /// None: no answer came, so it may take effect at any time from `began` on, or never.
    pub ended: Option<u64>,
}

/// The register begins with nothing in it.
pub fn is_linearizable(history: &[Operation]) -> bool {
    // A read without an answer says nothing.
    let history: Vec<Operation> = history
        .iter()
        .filter(|operation| operation.ended.is_some() || !matches!(operation.action, Action::Read(_)))
        .copied()
        .collect();
    let mut tried: HashSet<(BTreeSet<usize>, Option<u64>)> = HashSet::new();
    let mut open = vec![(BTreeSet::new(), None)];
    while let Some((done, value)) = open.pop() {
        let missing = |index: &usize| !done.contains(index);
        // Nothing that began after another operation had ended can come before that one.
        let Some(first_end) =
            (0..history.len()).filter(missing).filter_map(|index| history[index].ended).min()
        else {
            return true;
        };
        for index in (0..history.len()).filter(missing) {
            let operation = history[index];
            if operation.began > first_end {
                continue;
            }
            let next = match operation.action {
                Action::Write(value) => value,
                Action::RemoveIf(held) if value == Some(held) => None,
                Action::RemoveIf(_) => value,
                Action::Read(read) if read == value => value,
                Action::Read(_) => continue,
            };
            let mut done = done.clone();
            done.insert(index);
            if tried.insert((done.clone(), next)) {
                open.push((done, next));
            }
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(value: u64, began: u64, ended: Option<u64>) -> Operation {
        Operation { action: Action::Write(Some(value)), began, ended }
    }

    fn read(value: Option<u64>, began: u64, ended: u64) -> Operation {
        Operation { action: Action::Read(value), began, ended: Some(ended) }
    }

    #[test]
    fn what_could_have_happened_is_accepted() {
        assert!(is_linearizable(&[]));
        assert!(is_linearizable(&[write(1, 0, Some(1)), read(Some(1), 2, 3)]));
        // Two at once: either order.
        assert!(is_linearizable(&[write(1, 0, Some(5)), write(2, 0, Some(5)), read(Some(1), 6, 7)]));
        // A late removal of what is no longer there removes nothing.
        let removal = |began, ended| Operation { action: Action::RemoveIf(1), began, ended };
        let history = [write(1, 0, Some(1)), removal(2, Some(3)), write(2, 4, Some(5)), removal(6, Some(7))];
        assert!(is_linearizable(&[&history[..], &[read(Some(2), 8, 9)]].concat()));
        assert!(!is_linearizable(&[&history[..], &[read(None, 8, 9)]].concat()));
        // A read beside the write may see either.
        assert!(is_linearizable(&[write(1, 0, Some(9)), read(None, 1, 2), read(Some(1), 3, 4)]));
        // Without an answer it may have happened late, or not at all.
        assert!(is_linearizable(&[write(1, 0, None), read(None, 1, 2), read(Some(1), 3, 4)]));
        assert!(is_linearizable(&[write(1, 0, None), read(None, 1, 2)]));
        let removed = Operation { action: Action::Write(None), began: 2, ended: Some(3) };
        assert!(is_linearizable(&[write(1, 0, Some(1)), removed, read(None, 4, 5)]));
    }

    #[test]
    fn what_could_not_is_not() {
        // An acknowledged write is gone.
        assert!(!is_linearizable(&[write(1, 0, Some(1)), read(None, 2, 3)]));
        // A value nobody wrote.
        assert!(!is_linearizable(&[write(1, 0, Some(1)), read(Some(2), 2, 3)]));
        // Back to what was overwritten.
        let back = [write(1, 0, Some(1)), write(2, 2, Some(3)), read(Some(2), 4, 5), read(Some(1), 6, 7)];
        assert!(!is_linearizable(&back));
        // Seen, then not seen any more.
        assert!(!is_linearizable(&[write(1, 0, None), read(Some(1), 1, 2), read(None, 3, 4)]));
    }
}
