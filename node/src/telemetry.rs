//! The node's log: one JSON object a line, or text for a person at a terminal. Payloads, results and
//! intents have no field here.

use reach_config::node::{Format, Log};
use tracing_subscriber::{EnvFilter, fmt};

/// Starts logging to standard output. The environment variable `RUST_LOG` goes before the level.
pub fn start(log: &Log) {
    let level = format!("{},openraft=warn,quinn=warn,rustls=warn", log.level.as_str());
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    let builder = fmt().with_env_filter(filter).with_target(false);
    match log.format {
        Format::Json => builder.json().flatten_event(true).init(),
        Format::Text => builder.init(),
    }
}
