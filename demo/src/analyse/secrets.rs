//! `secrets.scan`: private keys and strings that look like credentials. Reports the place and the
//! kind; the secret itself never leaves this file.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::language;
use crate::unit::Range;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Secrets {
    pub lines: u64,
    pub found: Vec<Suspect>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Suspect {
    pub file: String,
    pub line: u32,
    pub kind: String,
}

pub fn scan(tree: &Path, ranges: &[Range]) -> std::io::Result<Secrets> {
    let mut result = Secrets::default();
    for range in ranges {
        let text = std::fs::read_to_string(tree.join(&range.file))?;
        for (line, content) in (1..).zip(text.lines()) {
            if range.holds(line) {
                result.lines += 1;
                let kind = kind_of(content, language::is_generated(&range.file));
                let suspect = |kind: &str| Suspect { file: range.file.clone(), line, kind: kind.into() };
                result.found.extend(kind.map(suspect));
            }
        }
    }
    result.found.sort();
    Ok(result)
}

/// What the line seems to hold. Generated files are full of checksums, so there only what can't be
/// mistaken counts.
fn kind_of(line: &str, generated: bool) -> Option<&'static str> {
    if begins_private_key(line) {
        return Some("private key");
    }
    let tokens = || line.split(|c: char| !is_token_char(c)).filter(|token| token.len() >= 16);
    if let Some(kind) = tokens().find_map(known_token) {
        return Some(kind);
    }
    let lower = line.to_ascii_lowercase();
    let named = ["secret", "passwd", "password", "api_key", "apikey", "access_key", "auth_token"];
    if generated || !named.iter().any(|name| lower.contains(name)) {
        return None;
    }
    tokens().any(looks_random).then_some("high-entropy string")
}

/// `BEGIN`, capitals that name the algorithm, `PRIVATE KEY`, between dashes.
fn begins_private_key(line: &str) -> bool {
    let named = line.split_once("-----BEGIN ").and_then(|(_, rest)| rest.split_once("PRIVATE KEY-----"));
    named.is_some_and(|(name, _)| name.chars().all(|c| c.is_ascii_uppercase() || c == ' '))
}

fn is_token_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '_' | '-')
}

/// Tokens whose issuer marks them.
fn known_token(token: &str) -> Option<&'static str> {
    const MARKS: &[(&str, usize, &str)] = &[
        ("AKIA", 20, "AWS access key id"),
        ("ghp_", 40, "GitHub token"),
        ("github_pat_", 60, "GitHub token"),
        ("glpat-", 26, "GitLab token"),
        ("xoxb-", 24, "Slack token"),
        ("xoxp-", 24, "Slack token"),
        ("sk_live_", 24, "Stripe key"),
        ("AIza", 39, "Google API key"),
    ];
    let (_, _, kind) =
        MARKS.iter().find(|(mark, length, _)| token.starts_with(mark) && token.len() >= *length)?;
    Some(kind)
}

/// At least 20 characters of mixed classes with 4 bits of entropy each; hex, which has at most 4,
/// from 32 characters on with 3.
fn looks_random(token: &str) -> bool {
    let digit = token.bytes().any(|b| b.is_ascii_digit());
    let letter = token.bytes().any(|b| b.is_ascii_alphabetic());
    if !digit || !letter {
        return false;
    }
    let hex = token.bytes().all(|b| b.is_ascii_hexdigit());
    let (length, bits) = if hex { (32, 3.0) } else { (20, 4.0) };
    token.len() >= length && entropy(token) >= bits
}

/// Bits per character (Shannon), of the token's own distribution.
fn entropy(token: &str) -> f64 {
    let mut counts = [0u32; 256];
    token.bytes().for_each(|byte| counts[byte as usize] += 1);
    let total = token.len() as f64;
    counts
        .iter()
        .filter(|count| **count > 0)
        .map(|count| {
            let share = f64::from(*count) / total;
            -share * share.log2()
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    // Put together here, so that a scan of this repository does not stop at this file.
    fn key_line() -> String {
        format!("-----BEGIN {} KEY-----", "EC PRIVATE")
    }

    fn random_text() -> String {
        ["q7Zk9", "Xv2Lw", "8RtB4", "nYc6M", "dJ3pF"].concat()
    }

    #[test]
    fn what_looks_like_a_secret_is_told_by_kind() {
        assert_eq!(kind_of(&key_line(), true), Some("private key"));
        let aws = format!("id = {}{}", "AKIA", "ABCDEFGHIJKLMNOP");
        assert_eq!(kind_of(&aws, false), Some("AWS access key id"));
        let line = format!("password = \"{}\"", random_text());
        assert_eq!(kind_of(&line, false), Some("high-entropy string"));
        assert_eq!(kind_of(&line, true), None, "a lock file is full of checksums");
    }

    #[test]
    fn ordinary_lines_are_left_alone() {
        for line in [
            "contains(\"-----BEGIN \") && contains(\"PRIVATE KEY-----\")",
            "let password = read_password_from_terminal(prompt)?;",
            "the_secret_of_long_identifiers_is_that_they_have_no_digits()",
            "checksum = \"0123456789abcdef0123456789abcdef0123456789abcdef\"",
            "api_key = \"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa1\"",
        ] {
            assert_eq!(kind_of(line, false), None, "{line}");
        }
    }

    #[test]
    fn the_report_holds_the_place_and_never_the_secret() {
        let tree = tempfile::tempdir().unwrap();
        let secret = random_text();
        std::fs::write(tree.path().join("a.env"), format!("x\nAPI_KEY={secret}\n{}\n", key_line())).unwrap();
        let range = Range { file: "a.env".into(), from: 1, to: 3 };
        let found = scan(tree.path(), &[range]).unwrap();
        let place = Suspect { file: "a.env".into(), line: 2, kind: "high-entropy string".into() };
        assert_eq!((found.lines, found.found.clone()), (2, vec![place]));
        assert!(!serde_json::to_string(&found).unwrap().contains(&secret));
    }
}
