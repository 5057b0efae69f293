//! What the demo prints: lines that stay, and on a terminal one live line below them.

use std::io::{IsTerminal, Write};

#[derive(Debug)]
pub struct Screen {
    terminal: bool,
    live: bool,
}

impl Screen {
    pub fn new() -> Self {
        Self { terminal: std::io::stdout().is_terminal(), live: false }
    }

    pub fn line(&mut self, text: impl AsRef<str>) {
        self.clear();
        self.write(&format!("{}\n", text.as_ref()));
    }

    /// `[1] CLUSTER   …`
    pub fn step(&mut self, number: u32, name: &str, text: impl AsRef<str>) {
        self.line(format!("[{number}] {name:<9} {}", text.as_ref()).trim_end());
    }

    pub fn detail(&mut self, text: impl AsRef<str>) {
        self.line(format!("    {}", text.as_ref()));
    }

    /// `███████░░░░░  71/198`, or the figures alone where nobody looks at it grow.
    pub fn bar(&self, done: usize, total: usize) -> String {
        let figures = format!("{done:>4}/{total}");
        if self.terminal { format!("{} {figures}", blocks(done, total)) } else { figures }
    }

    /// Replaced by whatever comes next. Without a terminal nothing is shown.
    pub fn live(&mut self, text: impl AsRef<str>) {
        if self.terminal {
            self.write(&format!("\r\x1b[2K    {}", text.as_ref()));
            self.live = true;
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.live) {
            self.write("\r\x1b[2K");
        }
    }

    /// A reader that went away (`| head`) ends the show and not the demo.
    fn write(&self, text: &str) {
        let mut out = std::io::stdout().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }
}

fn blocks(done: usize, total: usize) -> String {
    const WIDTH: usize = 24;
    let full = (done * WIDTH).checked_div(total).unwrap_or(WIDTH).min(WIDTH);
    format!("{}{}", "█".repeat(full), "░".repeat(WIDTH - full))
}

/// Columns as wide as their widest cell.
pub fn table(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|at| width(at).unwrap_or(0)).collect();
    rows.iter()
        .map(|row| {
            let cells: Vec<String> =
                row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
            cells.join("  ").trim_end().to_string()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_full_when_all_is_done() {
        assert!(blocks(0, 10).chars().all(|c| c == '░'));
        assert!(blocks(10, 10).chars().all(|c| c == '█'));
        assert!(blocks(0, 0).chars().all(|c| c == '█'));
        let plain = Screen { terminal: false, live: false };
        assert_eq!(plain.bar(3, 10), "   3/10");
    }

    #[test]
    fn columns_stand_below_each_other() {
        let rows = [vec!["a".to_string(), "b".into()], vec!["longer".into(), "c".into()]];
        assert_eq!(table(&rows), ["a       b", "longer  c"]);
    }
}
