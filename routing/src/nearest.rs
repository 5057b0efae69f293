//! Which declared capabilities look like the one that nobody declares: for a caller who mistyped.

use reach_protocol::Tag;

const NEAREST_MAX: usize = 3;
/// Declared capabilities looked at for one answer: refusals must stay cheap when there are many.
const LOOKED_AT_MAX: usize = 10_000;

/// Up to three declared tags, the most similar first. Only those within a third of the missing
/// tag's length in edits count as similar.
pub(crate) fn nearest<'a>(missing: &[Tag], declared: impl Iterator<Item = &'a Tag>) -> Vec<Tag> {
    if missing.is_empty() {
        return Vec::new();
    }
    let mut found: Vec<(usize, &Tag)> = declared
        .take(LOOKED_AT_MAX)
        .filter_map(|tag| {
            let edits = missing.iter().filter_map(|missing| {
                let most = missing.len() / 3;
                edits_up_to(missing.as_bytes(), tag.as_bytes(), most)
            });
            edits.min().map(|edits| (edits, tag))
        })
        .collect();
    found.sort();
    found.into_iter().take(NEAREST_MAX).map(|(_, tag)| tag.clone()).collect()
}

/// The edit distance, if it is at most `most`. Tags are ASCII.
fn edits_up_to(a: &[u8], b: &[u8], most: usize) -> Option<usize> {
    if a.len().abs_diff(b.len()) > most {
        return None;
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
        if row.iter().min().is_some_and(|least| *least > most) {
            return None;
        }
    }
    row.last().copied().filter(|edits| *edits <= most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        assert_eq!(edits_up_to(b"kitten", b"sitting", 3), Some(3));
        assert_eq!(edits_up_to(b"kitten", b"sitting", 2), None);
        assert_eq!(edits_up_to(b"same", b"same", 1), Some(0));
        assert_eq!(edits_up_to(b"", b"a", 1), Some(1));
    }
}
