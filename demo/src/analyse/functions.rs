//! Functions and branches, found in text whose comments and strings are already blanked.

use super::language::Language;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    pub name: String,
    /// First and last line, from 1.
    pub line: u32,
    pub last: u32,
}

/// Every function with a body, in order of its first line.
pub fn functions(code: &str, language: Language) -> Vec<Function> {
    match language {
        Language::Python => by_indentation(code),
        Language::Rust | Language::Go | Language::Script | Language::CLike => by_braces(code, language),
        Language::Shell | Language::Other => Vec::new(),
    }
}

/// How many ways the code of one line can go.
pub fn branches(line: &str) -> u32 {
    const WORDS: &[&str] =
        &["if", "elif", "for", "while", "match", "case", "switch", "catch", "except", "select"];
    let words = words(line).filter(|word| WORDS.contains(word)).count();
    let signs = line.matches("&&").count() + line.matches("||").count() + line.matches(" ? ").count();
    (words + signs) as u32
}

fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

fn by_indentation(code: &str) -> Vec<Function> {
    let lines: Vec<&str> = code.lines().collect();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let start = line.trim_start().trim_start_matches("async ");
        let Some(rest) = start.strip_prefix("def ") else { continue };
        let name = words(rest).next().unwrap_or("?").to_string();
        let mut last = at;
        for (below, line) in lines.iter().enumerate().skip(at + 1) {
            let text = line.trim();
            // The closing bracket of a long parameter list stands at the indentation of its `def`.
            if !text.is_empty() && indent(line) <= indent(lines[at]) && !text.starts_with(')') {
                break;
            }
            if !text.is_empty() {
                last = below;
            }
        }
        found.push(Function { name, line: at as u32 + 1, last: last as u32 + 1 });
    }
    found
}

fn by_braces(code: &str, language: Language) -> Vec<Function> {
    let mut found = Vec::new();
    let mut start = 0;
    for (at, line) in code.split_inclusive('\n').enumerate() {
        let name = match language {
            Language::CLike => named_by_shape(line),
            _ => named_by_keyword(line, language),
        };
        if let Some(last) = name.as_ref().and_then(|_| last_line(&code[start..], at as u32 + 1)) {
            let name = name.expect("a body is looked for only behind a name");
            found.push(Function { name, line: at as u32 + 1, last });
        }
        start += line.len();
    }
    found
}

fn named_by_keyword(line: &str, language: Language) -> Option<String> {
    let keywords: &[&str] = match language {
        Language::Rust => &["fn"],
        Language::Go => &["func"],
        _ => &["function", "func", "fun"],
    };
    let keyword = |word: &str| keywords.contains(&word);
    let (at, word) = words(line)
        .map(|word| (word.as_ptr() as usize - line.as_ptr() as usize, word))
        .find(|(_, w)| keyword(w))?;
    let mut rest = line[at + word.len()..].trim_start();
    // A method of Go names its receiver first.
    if language == Language::Go && rest.starts_with('(') {
        rest = rest.split_once(')')?.1.trim_start();
    }
    let length = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
    // A function type or a closure has no name.
    (length > 0).then(|| rest[..length].to_string())
}

/// `type name(…` that is neither a statement nor a call.
fn named_by_shape(line: &str) -> Option<String> {
    const NOT_TYPES: &[&str] = &[
        "if",
        "for",
        "while",
        "switch",
        "else",
        "do",
        "return",
        "catch",
        "new",
        "throw",
        "case",
        "using",
        "namespace",
        "typedef",
        "define",
        "delete",
        "sizeof",
    ];
    let (before, _) = line.split_once('(')?;
    let text = before.trim();
    let first = words(text).next()?;
    let name = text.rsplit(|c: char| !c.is_alphanumeric() && !matches!(c, '_' | ':' | '~')).next()?;
    let plain = !text.contains(['=', ';', '#', '.', ')', '}', '{']) && !text.contains("->");
    let typed = text.len() > name.len() || name.contains("::");
    (plain && typed && !name.is_empty() && !NOT_TYPES.contains(&first)).then(|| name.to_string())
}

/// The line of the brace that closes the body which begins in `code`, or nothing when the statement
/// ends before any body does.
fn last_line(code: &str, first: u32) -> Option<u32> {
    let (mut depth, mut round, mut line) = (0u32, 0i32, first);
    for c in code.chars() {
        match c {
            '\n' => line += 1,
            '(' | '[' => round += 1,
            ')' | ']' => round -= 1,
            ';' if depth == 0 && round <= 0 => return None,
            '{' => depth += 1,
            '}' if depth <= 1 => return (depth == 1).then_some(line),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(language: Language, code: &str) -> Vec<(String, u32, u32)> {
        functions(code, language).into_iter().map(|f| (f.name, f.line, f.last)).collect()
    }

    fn of(name: &str, line: u32, last: u32) -> (String, u32, u32) {
        (name.to_string(), line, last)
    }

    #[test]
    fn functions_are_found_with_their_last_line() {
        assert_eq!(
            found(
                Language::Rust,
                "trait A {\n  fn a(&self) -> [u8; 4];\n  fn b() {\n    x({});\n  }\n}\npub async fn c(\n) {}\n"
            ),
            [of("b", 3, 5), of("c", 7, 8)]
        );
        assert_eq!(
            found(Language::Go, "func (s *T) Run(a int) error {\n\tgo func() {\n\t}()\n}\n"),
            [of("Run", 1, 4)]
        );
        assert_eq!(
            found(
                Language::CLike,
                "int f(int a)\n{\n  if (a) {\n  }\n}\nint g(void);\nvoid A::h() { f(1); }\n"
            ),
            [of("f", 1, 5), of("A::h", 7, 7)]
        );
        assert_eq!(
            found(
                Language::Python,
                "class A:\n  def f(self,\n  ):\n    x\n\n    y\n\n  def g(self): pass\nz\n"
            ),
            [of("f", 2, 6), of("g", 8, 8)]
        );
        assert_eq!(found(Language::Script, "function f() {\n}\nconst g = function () {}\n"), [of("f", 1, 2)]);
    }

    #[test]
    fn an_unfinished_body_is_not_a_function() {
        assert_eq!(found(Language::Rust, "fn f() {\n"), []);
        assert_eq!(found(Language::Rust, "fn f("), []);
        assert_eq!(found(Language::CLike, "f("), []);
    }

    #[test]
    fn branches_are_whole_words() {
        assert_eq!(branches("if a && b || c { for x in y {} }"), 4);
        assert_eq!(branches("diff(format, whiles)"), 0);
    }
}
