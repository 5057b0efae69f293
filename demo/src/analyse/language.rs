//! What a file is written in, and its text with comments and strings blanked, so that the other
//! analysers see code alone. Rough on purpose: a check-up needs no compiler.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    Rust,
    Go,
    Script,
    CLike,
    Python,
    Shell,
    /// Text that is not read as code.
    Other,
}

impl Language {
    pub fn of(path: &str) -> Self {
        let name = path.rsplit('/').next().unwrap_or(path);
        match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
            "rs" => Self::Rust,
            "go" => Self::Go,
            "js" | "jsx" | "mjs" | "cjs" | "ts" | "tsx" | "php" | "kt" | "swift" => Self::Script,
            "c" | "h" | "cc" | "cpp" | "cxx" | "hh" | "hpp" | "java" | "cs" | "scala" => Self::CLike,
            "py" => Self::Python,
            "sh" | "bash" | "zsh" => Self::Shell,
            _ => Self::Other,
        }
    }

    pub fn is_code(self) -> bool {
        self != Self::Other
    }

    fn hash_comments(self) -> bool {
        matches!(self, Self::Python | Self::Shell)
    }

    /// Words that end the program, or hide that something went wrong.
    pub fn exits(self) -> &'static [&'static str] {
        match self {
            Self::Rust => &[".unwrap()", ".expect(", "panic!(", "unreachable!(", "todo!(", "unimplemented!("],
            Self::Go => &["panic(", "log.Fatal"],
            Self::Script => &["process.exit("],
            Self::CLike => &["abort(", "System.exit(", ".printStackTrace("],
            Self::Python => &["except:", "sys.exit("],
            Self::Shell | Self::Other => &[],
        }
    }
}

/// Whether the file is there to test others.
pub fn is_test(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let folder = path.split('/').any(|part| matches!(part, "test" | "tests" | "benches" | "testdata"));
    folder || name.contains("_test.") || name.contains(".test.") || name.starts_with("test_")
}

/// Whether people did not write the file themselves: lock files and minified code.
pub fn is_generated(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.ends_with(".lock")
        || name.ends_with("-lock.json")
        || name.ends_with("-lock.yaml")
        || name.contains(".min.")
        || name == "go.sum"
}

/// The same text with everything inside comments and strings replaced by blanks; line breaks stay
/// where they are.
pub fn code_only(text: &str, language: Language) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = match skipped_until(&chars, at, language) {
            Some(end) => end,
            None => {
                out.push(chars[at]);
                at += 1;
                continue;
            }
        };
        out.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
        at = end;
    }
    out
}

/// Where the comment or string that begins at `at` ends, if one begins there.
fn skipped_until(chars: &[char], at: usize, language: Language) -> Option<usize> {
    let begins = |text: &str| text.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    match chars[at] {
        '#' if language.hash_comments() => Some(line_end(chars, at)),
        '/' if language.hash_comments() => None,
        '/' if begins("//") => Some(line_end(chars, at)),
        '/' if begins("/*") => Some(after(chars, at + 2, "*/")),
        '"' | '\'' if language == Language::Python && (begins("\"\"\"") || begins("'''")) => {
            let fence: String = chars[at..at + 3].iter().collect();
            Some(after(chars, at + 3, &fence))
        }
        'r' if language == Language::Rust && !follows_word(chars, at) => raw_string_end(chars, at),
        '\'' if language == Language::Rust => char_end(chars, at),
        '`' if matches!(language, Language::Go | Language::Script) => Some(after(chars, at + 1, "`")),
        quote @ ('"' | '\'') => Some(quoted_end(chars, at + 1, quote, language)),
        _ => None,
    }
}

fn follows_word(chars: &[char], at: usize) -> bool {
    at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_')
}

fn line_end(chars: &[char], at: usize) -> usize {
    chars[at..].iter().position(|c| *c == '\n').map_or(chars.len(), |length| at + length)
}

fn after(chars: &[char], from: usize, end: &str) -> usize {
    let end: Vec<char> = end.chars().collect();
    let from = from.min(chars.len());
    chars[from..]
        .windows(end.len())
        .position(|window| window == end.as_slice())
        .map_or(chars.len(), |length| from + length + end.len())
}

/// A quoted string ends at its quote; outside Rust and the shell also at the end of its line, so
/// that a stray apostrophe costs one line and not the file.
fn quoted_end(chars: &[char], from: usize, quote: char, language: Language) -> usize {
    let spans_lines = matches!(language, Language::Rust | Language::Shell);
    let mut at = from;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '\n' if !spans_lines => return at,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// `r"…"` and `r#"…"#`; anything else that begins with an `r` is a word.
fn raw_string_end(chars: &[char], at: usize) -> Option<usize> {
    let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
    if chars.get(at + 1 + hashes) != Some(&'"') {
        return None;
    }
    Some(after(chars, at + 2 + hashes, &format!("\"{}", "#".repeat(hashes))))
}

/// A character literal of Rust; a lifetime is code.
fn char_end(chars: &[char], at: usize) -> Option<usize> {
    match (chars.get(at + 1)?, chars.get(at + 2)?) {
        ('\\', _) => chars[at + 3..].iter().position(|c| *c == '\'').map(|length| at + 3 + length + 1),
        (_, '\'') => Some(at + 3),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_strings_are_blanked() {
        for (language, text, code) in [
            (Language::Rust, "a // b\nc", "a     \nc"),
            (Language::Rust, "a /* { */ b", "a         b"),
            (Language::Rust, "f(\"{\", '{', 'a)", "f(   ,    , 'a)"),
            (Language::Rust, "r#\"{\"}\"# x", "         x"),
            (Language::Rust, "'\\'' }", "     }"),
            (Language::Go, "a `{\n{` b", "a   \n   b"),
            (Language::Python, "a # b\n'''x\ny''' c", "a    \n    \n     c"),
            (Language::CLike, "don't\nx", "don  \nx"),
            (Language::Shell, "a \"x\ny\" # z", "a   \n      "),
        ] {
            assert_eq!(code_only(text, language), code, "{language:?} {text}");
        }
    }

    #[test]
    fn unfinished_strings_end_with_the_file() {
        for text in ["\"abc\\", "r#\"abc", "/* abc", "'\\", "'"] {
            let code = code_only(text, Language::Rust);
            assert_eq!(code.chars().count(), text.chars().count(), "{text}");
        }
    }

    #[test]
    fn a_file_is_known_by_its_name() {
        assert_eq!(Language::of("a/b.rs"), Language::Rust);
        assert_eq!(Language::of("Makefile"), Language::Other);
        assert!(is_test("a/tests/b.rs") && is_test("x_test.go") && !is_test("src/attest.rs"));
        assert!(is_generated("Cargo.lock") && is_generated("a/package-lock.json") && !is_generated("a.rs"));
    }
}
