//! `report.write`: the summary as REPORT.md and as one self-contained page.

use std::{fmt::Write, fs, path::Path};

use anyhow::Context;
use sha2::{Digest, Sha256};

use crate::summary::Summary;

/// A heading, what to say when there are no rows, the names of the columns, and the rows.
struct Section {
    title: &'static str,
    none: &'static str,
    columns: &'static [&'static str],
    rows: Vec<Vec<String>>,
}

/// Writes both files and answers a digest of what is in them.
pub fn write(summary: &Summary, folder: &Path) -> anyhow::Result<String> {
    let (markdown, html) = (markdown(summary), html(summary));
    for (name, text) in [("REPORT.md", &markdown), ("report.html", &html)] {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("can't write {}", path.display()))?;
    }
    let digest = Sha256::new().chain_update(&markdown).chain_update(&html).finalize();
    Ok(digest[..8].iter().map(|byte| format!("{byte:02x}")).collect())
}

fn intro(summary: &Summary) -> Vec<String> {
    let totals = &summary.totals;
    let at =
        summary.head.as_ref().map_or(String::new(), |head| format!(" at {}", &head[..head.len().min(10)]));
    let mut lines = vec![
        format!(
            "{} files are tracked{at}; {} of them are text and were read: {} lines, {} functions, {} commits of history.",
            summary.tracked, totals.files, totals.lines, totals.functions, totals.commits
        ),
        format!(
            "{} long functions, {} unwraps and exits outside tests, {} notes to self, {} copied blocks, {} broken of {} links \
             and {} unparsable of {} fenced blocks in {} documents, {} places that look like secrets.",
            totals.long,
            totals.exits,
            totals.notes,
            totals.copies,
            totals.broken,
            totals.links,
            totals.unparsed,
            totals.blocks,
            totals.documents,
            totals.secrets
        ),
    ];
    lines.extend(summary.remarks.iter().cloned());
    lines
}

fn sections(summary: &Summary) -> Vec<Section> {
    let place = |file: &str, line: u32| format!("{file}:{line}");
    let span = |place: &crate::analyse::blocks::Place| format!("{}:{}-{}", place.file, place.from, place.to);
    vec![
        Section {
            title: "Most changed and most complex",
            none: "No code with a history.",
            columns: &["file", "commits", "lines changed", "branches"],
            rows: summary
                .hot
                .iter()
                .map(|h| {
                    vec![h.file.clone(), h.commits.to_string(), h.changed.to_string(), h.branches.to_string()]
                })
                .collect(),
        },
        Section {
            title: "Always change together",
            none: "No two files change together often.",
            columns: &["file", "and", "commits"],
            rows: summary
                .together
                .iter()
                .map(|(a, b, n)| vec![a.clone(), b.clone(), n.to_string()])
                .collect(),
        },
        Section {
            title: "Long functions",
            none: "None.",
            columns: &["function", "place", "lines", "branches"],
            rows: summary
                .long
                .iter()
                .map(|(file, long)| {
                    vec![
                        long.name.clone(),
                        place(file, long.line),
                        long.lines.to_string(),
                        long.branches.to_string(),
                    ]
                })
                .collect(),
        },
        Section {
            title: "Copied blocks",
            none: "None.",
            columns: &["lines", "here", "there"],
            rows: summary
                .copies
                .iter()
                .map(|c| vec![c.lines.to_string(), span(&c.here), span(&c.there)])
                .collect(),
        },
        Section {
            title: "Unwraps and exits",
            none: "None.",
            columns: &["file", "places"],
            rows: summary.exits.iter().map(|(file, count)| vec![file.clone(), count.to_string()]).collect(),
        },
        Section {
            title: "Notes to self",
            none: "None.",
            columns: &["word", "place"],
            rows: summary
                .notes
                .iter()
                .map(|(file, line, word)| vec![word.clone(), place(file, *line)])
                .collect(),
        },
        Section {
            title: "Broken links",
            none: "None.",
            columns: &["place", "target", "why"],
            rows: summary
                .broken
                .iter()
                .map(|(file, line, target, why)| vec![place(file, *line), target.clone(), why.clone()])
                .collect(),
        },
        Section {
            title: "Fenced blocks that don't parse",
            none: "None.",
            columns: &["place", "why"],
            rows: summary
                .unparsed
                .iter()
                .map(|(file, line, why)| vec![place(file, *line), why.clone()])
                .collect(),
        },
        Section {
            title: "Looks like a secret",
            none: "None.",
            columns: &["place", "kind"],
            rows: summary.secrets.iter().map(|s| vec![place(&s.file, s.line), s.kind.clone()]).collect(),
        },
    ]
}

fn markdown(summary: &Summary) -> String {
    let mut out = format!("# Check-up of {}\n\n", summary.repository);
    for line in intro(summary) {
        let _ = writeln!(out, "{line}\n");
    }
    let cell = |text: &str| text.replace('|', "\\|").replace(['<', '>'], " ");
    for section in sections(summary) {
        let _ = writeln!(out, "## {}\n", section.title);
        if section.rows.is_empty() {
            let _ = writeln!(out, "{}\n", section.none);
            continue;
        }
        let _ = writeln!(out, "| {} |", section.columns.join(" | "));
        let _ = writeln!(out, "|{}", " --- |".repeat(section.columns.len()));
        for row in section.rows {
            let cells: Vec<String> = row.iter().map(|text| cell(text)).collect();
            let _ = writeln!(out, "| {} |", cells.join(" | "));
        }
        out.push('\n');
    }
    out
}

const STYLE: &str = "\
:root{color-scheme:light dark;--line:#8884;--soft:#8882}\
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;width:100%;font-size:14px}\
th,td{text-align:left;padding:.3rem .6rem;border-bottom:1px solid var(--line);overflow-wrap:anywhere}\
th{font-weight:600}tr:hover td{background:var(--soft)}h2{margin-top:2rem;font-size:1.15rem}";

fn html(summary: &Summary) -> String {
    let escape = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let name = escape(&summary.repository);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Check-up of {name}</title>\n\
         <style>{STYLE}</style></head><body>\n<h1>Check-up of {name}</h1>\n"
    );
    for line in intro(summary) {
        let _ = writeln!(out, "<p>{}</p>", escape(&line));
    }
    for section in sections(summary) {
        let _ = writeln!(out, "<h2>{}</h2>", section.title);
        if section.rows.is_empty() {
            let _ = writeln!(out, "<p>{}</p>", section.none);
            continue;
        }
        let cells = |tag: &str, texts: Vec<String>| -> String {
            texts.iter().map(|text| format!("<{tag}>{}</{tag}>", escape(text))).collect()
        };
        let head = section.columns.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "<table><tr>{}</tr>", cells("th", head));
        for row in section.rows {
            let _ = writeln!(out, "<tr>{}</tr>", cells("td", row));
        }
        out.push_str("</table>\n");
    }
    out.push_str("</body></html>\n");
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_hold_every_section_and_escape_what_they_quote() {
        let summary = crate::summary::tests::sample();
        let (markdown, html) = (markdown(&summary), html(&summary));
        for text in
            ["Most changed and most complex", "b.rs", "README.md:4", "private key", "2 of them are text"]
        {
            assert!(markdown.contains(text) && html.contains(text), "{text}");
        }
        assert!(html.contains("a&lt;b&gt;.md") && !html.contains("a<b>"));
        assert!(markdown.contains("No such") || markdown.contains("no such file"));
    }

    #[test]
    fn the_same_summary_gives_the_same_files() {
        let folder = tempfile::tempdir().unwrap();
        let summary = crate::summary::tests::sample();
        let first = write(&summary, folder.path()).unwrap();
        assert_eq!(write(&summary, folder.path()).unwrap(), first);
        assert!(folder.path().join("report.html").is_file());
    }
}
