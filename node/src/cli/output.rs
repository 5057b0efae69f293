//! How answers and errors are printed: tables for people, JSON for programs. Into a pipe nothing is
//! cut or coloured, and what agents wrote can't steer a terminal.

use std::{
    ffi::OsString,
    io::{self, IsTerminal, Write},
};

use clap::ValueEnum;
use reach_protocol::{Code, ErrorReply};

use super::{
    Failure,
    args::{Format, Global},
};
use crate::show::{self, Shown};

#[derive(Clone, Copy, Debug)]
pub struct Output {
    format: Format,
    color: bool,
    screen: bool,
}

impl Output {
    pub fn new(global: &Global) -> Self {
        let wanted = !global.no_color && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let screen = io::stdout().is_terminal();
        Self { format: global.output, color: wanted && screen, screen }
    }

    /// A form for programs, where arguments that could not be understood as a whole ask for one.
    pub fn wanted(args: impl Iterator<Item = OsString>) -> Option<Self> {
        let mut args = args.map_while(|arg| arg.into_string().ok()).take_while(|arg| arg != "--");
        let mut wanted = None;
        while let Some(arg) = args.next() {
            let value = match arg.as_str() {
                "-o" | "--output" => args.next(),
                arg => arg
                    .strip_prefix("--output=")
                    .or_else(|| arg.strip_prefix("-o").map(|value| value.strip_prefix('=').unwrap_or(value)))
                    .map(str::to_string),
            };
            let format = value.and_then(|value| Format::from_str(&value, false).ok());
            wanted = format.filter(|format| *format != Format::Table).or(wanted);
        }
        wanted.map(|format| Self { format, color: false, screen: false })
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Prints an answer to standard output. A reader that has gone away ends it quietly.
    pub fn print(&self, shown: &Shown) -> Result<(), Failure> {
        self.print_text(&self.render(shown))
    }

    /// A table at a terminal, which may be drawn over.
    pub fn is_screen(&self) -> bool {
        self.screen && self.format == Format::Table
    }

    /// Prints an answer in place of what the terminal shows.
    pub fn redraw(&self, shown: &Shown) -> Result<(), Failure> {
        self.print_text(&format!("\u{1b}[H\u{1b}[2J{}", self.render(shown)))
    }

    /// One line about something that changed.
    pub fn print_change(&self, shown: &Shown) -> Result<(), Failure> {
        match self.format {
            Format::Table => self.print(shown),
            Format::Json | Format::Jsonl => self.print_text(&format!("{}\n", shown.json)),
        }
    }

    /// Prints `text` as it is, such as a payload or a rules document.
    pub fn print_text(&self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) => Err(Failure::refused(format!("standard output can't be written ({error})"))),
            Ok(()) => Ok(()),
        }
    }

    /// A line on standard error, beside the answer.
    pub fn remark(&self, text: &str) {
        let _ = io::stderr().lock().write_all(format!("{}\n", visible(text)).as_bytes());
    }

    /// Prints an error to standard error and returns the exit status.
    pub fn fail(&self, failure: &Failure) -> u8 {
        // There is nowhere left to say that this could not be written.
        let _ = io::stderr().lock().write_all(self.render_error(failure).as_bytes());
        failure.exit
    }

    pub fn render(&self, shown: &Shown) -> String {
        match self.format {
            Format::Table => table(shown, self.color),
            Format::Json => format!("{:#}\n", shown.json),
            Format::Jsonl => match shown.json.get("items").and_then(|items| items.as_array()) {
                Some(items) => items.iter().map(|item| format!("{item}\n")).collect(),
                None => format!("{}\n", shown.json),
            },
        }
    }

    pub fn render_error(&self, failure: &Failure) -> String {
        match self.format {
            Format::Table => error_text(&failure.reply),
            Format::Json | Format::Jsonl => format!("{}\n", show::error(&failure.reply)),
        }
    }
}

fn table(shown: &Shown, color: bool) -> String {
    let mut lines: Vec<Vec<String>> = Vec::new();
    if !shown.head.is_empty() && !shown.rows.is_empty() {
        lines.push(shown.head.iter().map(|cell| cell.to_string()).collect());
    }
    let has_head = !lines.is_empty();
    lines.extend(shown.rows.iter().map(|row| row.iter().map(|cell| visible(cell)).collect()));
    let columns = lines.iter().map(Vec::len).max().unwrap_or_default();
    let widths: Vec<usize> = (0..columns)
        .map(|column| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max())
        .map(Option::unwrap_or_default)
        .collect();
    let mut text = String::new();
    for (i, line) in lines.iter().enumerate() {
        let mut row = String::new();
        for (cell, width) in line.iter().zip(&widths) {
            row.push_str(&format!("{cell:<width$}  "));
        }
        match color && has_head && i == 0 {
            true => text.push_str(&format!("\u{1b}[1m{}\u{1b}[0m\n", row.trim_end())),
            false => text.push_str(&format!("{}\n", row.trim_end())),
        }
    }
    if shown.rows.is_empty() && !shown.head.is_empty() {
        text.push_str("none\n");
    }
    for note in &shown.notes {
        // A note may be several lines of our own, such as the next commands.
        text.push_str(&note.lines().map(visible).collect::<Vec<_>>().join("\n"));
        text.push('\n');
    }
    text
}

/// Control characters and such as change the direction of writing are written as escapes.
fn visible(text: &str) -> String {
    let steers = |c: char| {
        c.is_control()
            || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match steers(c) {
            true => shown.extend(c.escape_default()),
            false => shown.push(c),
        }
    }
    shown
}

fn error_text(reply: &ErrorReply) -> String {
    let mut text = format!("error: {}: {}\n", reply.code, visible(&reply.message));
    let mut line = |name: &str, value: String| text.push_str(&format!("  {name}: {}\n", visible(&value)));
    if let Some(field) = reply.field.as_ref().filter(|field| !reply.message.starts_with(field.as_str())) {
        line("field", field.clone());
    }
    if let Some(hint) = &reply.hint {
        for (name, tags) in [("nobody declares", &hint.missing), ("similar ones", &hint.nearest)] {
            let tags = tags.iter().flatten().map(|tag| tag.as_str()).collect::<Vec<_>>().join(", ");
            // Most messages say it themselves.
            if !tags.is_empty() && !reply.message.contains(&tags) {
                line(name, tags);
            }
        }
        if let Some(depth) = hint.queue_depth {
            line("waiting", depth.to_string());
        }
        if let Some(slots) = hint.free_slots {
            line("free slots", slots.to_string());
        }
    }
    if let Some(ms) = reply.retry_after_ms {
        line("try again in", show::span(ms));
    }
    if let Some(msg_id) = &reply.msg_id {
        line("message", msg_id.to_string());
    }
    if let Some(trace_id) = &reply.trace_id {
        line("trace", trace_id.to_string());
    }
    if let Some(way_out) = way_out(reply) {
        line("next", way_out);
    }
    text
}

/// What to do about it, where the message can't know: which command helps.
fn way_out(reply: &ErrorReply) -> Option<String> {
    let msg_id = reply.msg_id.as_ref();
    Some(match reply.code {
        Code::OutcomeUnknown => match msg_id {
            Some(msg_id) => format!("`agent-reach messages wait {msg_id}` asks again"),
            None => "the same command again is safe".to_string(),
        },
        Code::NoCandidate => "`agent-reach agents ls` shows who declares what".to_string(),
        Code::NoLeader | Code::NoMajority => {
            "start the nodes that don't run (`agent-reach dev` starts those of a dev cluster); once one answers, \
             `agent-reach cluster status` shows the others"
                .to_string()
        }
        Code::Unauthenticated => {
            "`agent-reach context ls` shows the addresses and the identity in use, `agent-reach certs ls` the \
             certificates; a folder that `agent-reach certs issue --out` made for you is taken by \
             `agent-reach context add NAME --from DIR`"
                .to_string()
        }
        Code::RevisionConflict => "`agent-reach rules show` prints the revision in force".to_string(),
        Code::AgentError | Code::Unparseable | Code::AttemptsExhausted | Code::Expired | Code::Rejected => {
            format!("`agent-reach messages show {}` shows its way", msg_id?)
        }
        Code::Internal => "this is a defect of Agent-Reach: please report it with the node's log".to_string(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use reach_protocol::{MsgId, Tag, error::Hint};
    use serde_json::json;

    use super::*;

    fn output(format: Format) -> Output {
        Output { format, color: false, screen: false }
    }

    fn list() -> Shown {
        Shown {
            json: json!({ "items": [{ "a": 1 }, { "a": 2 }], "next": null }),
            head: vec!["AGENT", "STATE"],
            rows: vec![
                vec!["a-long-name".into(), "ready".into()],
                vec!["b".into(), "of\x1b[31mf\nline".into()],
            ],
            notes: vec!["2 agents".into()],
        }
    }

    #[test]
    fn a_table_is_aligned_and_can_not_steer_the_terminal() {
        let expected =
            "AGENT        STATE\na-long-name  ready\nb            of\\u{1b}[31mf\\nline\n2 agents\n";
        assert_eq!(output(Format::Table).render(&list()), expected);
        let empty = Shown { rows: vec![], notes: vec![], ..list() };
        assert_eq!(output(Format::Table).render(&empty), "none\n");
        let bold = Output { format: Format::Table, color: true, screen: false }.render(&list());
        assert!(bold.starts_with("\u{1b}[1mAGENT        STATE\u{1b}[0m\n"), "{bold}");
    }

    #[test]
    fn a_list_is_one_line_an_item_as_jsonl() {
        assert_eq!(output(Format::Jsonl).render(&list()), "{\"a\":1}\n{\"a\":2}\n");
        let one = Shown { json: json!({ "a": [1] }), ..Shown::default() };
        assert_eq!(output(Format::Jsonl).render(&one), "{\"a\":[1]}\n");
        assert_eq!(output(Format::Json).render(&one), "{\n  \"a\": [\n    1\n  ]\n}\n");
    }

    #[test]
    fn an_error_says_code_hint_and_way_out() {
        let hint = Hint {
            missing: Some(vec![Tag::parse("code_revew").unwrap()]),
            nearest: Some(vec![Tag::parse("code_review").unwrap()]),
            ..Hint::default()
        };
        let failure = Failure::from(ErrorReply::new(Code::NoCandidate, "nobody can do that").with_hint(hint));
        assert_eq!(
            output(Format::Table).render_error(&failure),
            "error: no_candidate: nobody can do that\n  nobody declares: code_revew\n  similar ones: code_review\n  \
             next: `agent-reach agents ls` shows who declares what\n"
        );
        assert_eq!(
            output(Format::Json).render_error(&failure),
            "{\"code\":\"no_candidate\",\"hint\":{\"missing\":[\"code_revew\"],\"nearest\":[\"code_review\"]},\
             \"message\":\"nobody can do that\",\"retryable\":false}\n"
        );
    }

    #[test]
    fn a_hint_repeats_nothing() {
        let hint = Hint { missing: Some(vec![Tag::parse("a.b").unwrap()]), ..Hint::default() };
        let reply = ErrorReply::new(Code::NoCandidate, "no agent declares a.b").with_hint(hint);
        let text = output(Format::Table).render_error(&Failure::from(reply));
        assert_eq!(text.matches("a.b").count(), 1, "{text}");
    }

    #[test]
    fn who_is_not_let_in_is_pointed_to_the_certificates() {
        let refused = reach_client::Error::Unauthenticated {
            endpoints: vec!["h:1".into()],
            reason: "h:1: that is no port for clients".into(),
        };
        let failure = Failure::from(refused);
        let text = output(Format::Table).render_error(&failure);
        assert_eq!(failure.exit, 3);
        assert!(text.starts_with("error: unauthenticated: ") && text.contains("certs ls"), "{text}");
        assert!(!text.contains("start the nodes"), "{text}");
    }

    #[test]
    fn an_unknown_outcome_prints_the_id_to_ask_by() {
        let msg_id = MsgId::parse("m_1").unwrap();
        let failure = Failure::from(ErrorReply::new(Code::OutcomeUnknown, "no answer").with_msg_id(&msg_id));
        let text = output(Format::Table).render_error(&failure);
        assert!(
            text.ends_with("message: m_1\n  next: `agent-reach messages wait m_1` asks again\n"),
            "{text}"
        );
        assert_eq!(failure.exit, 5);
    }

    #[test]
    fn every_code_has_its_exit_status() {
        for code in Code::ALL {
            assert_eq!(Failure::from(ErrorReply::new(*code, "x")).exit, code.exit_status());
        }
        assert_eq!(Failure::usage("x").exit, 2);
    }
}
