//! The values that options take, read once here: durations, weights, pairs, and content that may not
//! be shown.

use std::{
    fmt, fs,
    io::{self, Read},
    str::FromStr,
    time::Duration,
};

use reach_protocol::{
    AgentState, Capability, ErrorReply, Json, Name, Tag, Topics, agent,
    envelope::EXPIRES_IN_MAX_MS,
    event::{Span, Start},
    limits::BODY_MAX,
};

use crate::clock::calendar_ms;

/// Reads `250ms`, `30s`, `15m`, `2h`, `7d`, or several of them as in `1m30s`.
pub fn duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || "a duration is a number with its unit, ms, s, m, h or d: write 250ms, 30s, 15m".to_string();
    let mut rest = text;
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
        let (number, after) = rest.split_at(digits);
        let letters = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, after) = after.split_at(letters);
        let unit_ms: u64 = match unit {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(wrong()),
        };
        let ms =
            number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit_ms)).ok_or_else(wrong)?;
        total = total.checked_add(Duration::from_millis(ms)).ok_or_else(wrong)?;
        rest = after;
    }
    match (text.is_empty(), total.is_zero()) {
        (true, _) => Err(wrong()),
        (_, true) => Err("the least is 1ms".to_string()),
        _ => Ok(total),
    }
}

/// A duration that a message may have.
pub fn expire_in(text: &str) -> Result<Duration, String> {
    let time = duration(text)?;
    match time <= Duration::from_millis(EXPIRES_IN_MAX_MS) {
        true => Ok(time),
        false => Err(format!("the most is {}d", EXPIRES_IN_MAX_MS / 86_400_000)),
    }
}

/// Reads where reading begins: `earliest`, `latest`, an offset, a time (RFC 3339), or how long ago
/// (`-15m`).
pub fn start(text: &str) -> Result<Start, String> {
    let wrong =
        || "write earliest, latest, an offset, a time as RFC 3339, or how long ago, as in -15m".to_string();
    match text {
        "earliest" => Ok(Start::Earliest),
        "latest" => Ok(Start::Latest),
        _ if text.bytes().all(|byte| byte.is_ascii_digit()) && !text.is_empty() => {
            text.parse().map(Start::Offset).map_err(|_| wrong())
        }
        _ => match text.strip_prefix('-') {
            Some(ago) => {
                let ago = duration(ago)?.as_millis() as u64;
                Ok(Start::At(calendar_ms().saturating_sub(ago)))
            }
            None => {
                let at: jiff::Timestamp = text.parse().map_err(|_| wrong())?;
                Ok(Start::At(u64::try_from(at.as_millisecond()).unwrap_or(0)))
            }
        },
    }
}

/// Reads `7`, or `3-9`, the last one included.
pub fn offsets(text: &str) -> Result<Span, String> {
    let wrong = || "offsets are numbers: write 7, or 3-9".to_string();
    let (from, last) = text.split_once('-').unwrap_or((text, text));
    let from: u64 = from.parse().map_err(|_| wrong())?;
    let to = last.parse::<u64>().ok().and_then(|last| last.checked_add(1)).ok_or_else(wrong)?;
    if from < to { Ok(Span { from, to }) } else { Err(wrong()) }
}

/// Reads `TAG` or `TAG=WEIGHT`.
pub fn capability(text: &str) -> Result<Capability, String> {
    let (tag, weight) = match text.split_once('=') {
        Some((tag, weight)) => (tag, weight.parse().ok()),
        None => (text, Some(1.0)),
    };
    let tag = Tag::parse(tag).map_err(|error| error.to_string())?;
    let weight = weight.filter(|weight| (agent::WEIGHT_MIN..=agent::WEIGHT_MAX).contains(weight));
    let weight = weight.ok_or_else(|| {
        format!("a weight is a number from {} to {}, as in {tag}=0.5", agent::WEIGHT_MIN, agent::WEIGHT_MAX)
    })?;
    Ok(Capability::new(tag, weight))
}

/// Reads `KEY=VALUE`.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_string(), value.to_string())),
        _ => Err("write KEY=VALUE, such as owner=sre_team".to_string()),
    }
}

/// Reads `TOPICS` or `TOPICS=GROUP`.
pub fn subscription(text: &str) -> Result<(Topics, Option<Name>), String> {
    let (topics, group) = text.split_once('=').map_or((text, None), |(topics, group)| (topics, Some(group)));
    let topics = Topics::parse(topics).map_err(|error| error.to_string())?;
    Ok((topics, group.map(Name::parse).transpose().map_err(|error| error.to_string())?))
}

pub fn agent_state(text: &str) -> Result<AgentState, String> {
    match text {
        "ready" => Ok(AgentState::Ready),
        "draining" => Ok(AgentState::Draining),
        "offline" => Ok(AgentState::Offline),
        _ => Err("a state is ready, draining or offline".to_string()),
    }
}

/// Text of a message: an intent, or where a payload is found. `Debug` shows its size only, and no
/// usage error quotes it.
#[derive(Clone, PartialEq, Eq)]
pub struct Content(pub String);

impl FromStr for Content {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_string()))
    }
}

impl fmt::Debug for Content {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "content of {} bytes", self.0.len())
    }
}

impl Content {
    /// The payload it stands for: `@FILE` and `@-` (standard input) are read, anything else is the
    /// JSON itself. At most as much is read as any cluster could allow.
    pub fn payload(&self) -> Result<Json, ErrorReply> {
        let unreadable = |name: &str, error: io::Error| {
            ErrorReply::invalid("payload", format!("{name} can't be read as text ({error})"))
        };
        let text = match self.0.strip_prefix('@') {
            None => self.0.clone(),
            Some("-") => read(io::stdin().lock()).map_err(|error| unreadable("standard input", error))?,
            Some(path) => fs::File::open(path).and_then(read).map_err(|error| unreadable(path, error))?,
        };
        if text.len() > BODY_MAX {
            let message = format!("payload has more than {BODY_MAX} bytes, the most that any rule allows");
            return Err(ErrorReply {
                field: Some("payload".into()),
                ..ErrorReply::new(reach_protocol::Code::TooLarge, message)
            });
        }
        // The reason is about the form alone ("expected value at line 1 column 1").
        Json::parse(&text).map_err(|error| {
            let message = format!(
                "the payload is not JSON ({error}): give a JSON value (a text in double quotes, '\"…\"'), @FILE, or @- \
                 for standard input"
            );
            ErrorReply::invalid("payload", message)
        })
    }
}

fn read(from: impl Read) -> io::Result<String> {
    let mut text = String::new();
    from.take(BODY_MAX as u64 + 1).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_has_a_unit() {
        for (text, ms) in
            [("250ms", 250), ("30s", 30_000), ("15m", 900_000), ("1m30s", 90_000), ("2h", 7_200_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        assert_eq!(duration("365d"), Ok(Duration::from_secs(365 * 86_400)));
        for bad in [
            "",
            "30",
            "s",
            "0s",
            "-1s",
            "1.5s",
            "1 s",
            "1y",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_message_lives_from_a_millisecond_to_thirty_days() {
        assert_eq!(expire_in("1ms"), Ok(Duration::from_millis(1)));
        assert_eq!(expire_in("30d"), Ok(Duration::from_secs(30 * 86_400)));
        assert_eq!(expire_in("31d"), Err("the most is 30d".to_string()));
        assert_eq!(expire_in("0s"), Err("the least is 1ms".to_string()));
    }

    #[test]
    fn a_capability_may_carry_its_weight() {
        assert_eq!(capability("code.scan").unwrap().weight, 1.0);
        assert_eq!(capability("code.scan=0.5").unwrap().weight, 0.5);
        for bad in ["", "Code", "x=", "x=0", "x=-1", "x=NaN", "x=heavy", "x=1001"] {
            assert!(capability(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_payload_is_json_or_a_file_of_it_and_never_quoted() {
        assert_eq!(Content(r#"{ "a": 1 }"#.into()).payload().unwrap().as_str(), r#"{"a":1}"#);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("payload.json");
        fs::write(&file, "[1, 2]").unwrap();
        assert_eq!(Content(format!("@{}", file.display())).payload().unwrap().as_str(), "[1,2]");

        let error = Content("hunter2".into()).payload().unwrap_err();
        assert_eq!(error.field.as_deref(), Some("payload"));
        assert!(!error.message.contains("hunter2"), "{error}");
        assert!(
            Content("@/nowhere".into()).payload().unwrap_err().message.contains("/nowhere can't be read")
        );
        let big = Content(format!("\"{}\"", "x".repeat(BODY_MAX)));
        assert_eq!(big.payload().unwrap_err().code, reach_protocol::Code::TooLarge);
        assert!(!format!("{big:?}").contains('x'));
    }
}
