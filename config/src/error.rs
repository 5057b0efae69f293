//! What can be wrong with a text an operator wrote, and with the files round it.

use std::{fmt, io, path::PathBuf};

use reach_protocol::id::Name;

/// One thing wrong in one text. `problem` says what it is and the way out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// From 1. None when the thing is absent from the whole text.
    pub line: Option<usize>,
    /// Dotted path of the key, such as `nodes.n1.peer`.
    pub key: Option<String>,
    pub problem: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        if let Some(key) = &self.key {
            write!(f, "{key}: ")?;
        }
        f.write_str(&self.problem)
    }
}

impl std::error::Error for Fault {}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} can't be read ({source}): {way_out}", path.display())]
    Read { path: PathBuf, source: io::Error, way_out: &'static str },
    #[error("{} can't be written ({source}): check the folder's owner and free space", path.display())]
    Write { path: PathBuf, source: io::Error },
    /// The file was read; its text is wrong.
    #[error("{}: {fault}", path.display())]
    Text { path: PathBuf, fault: Fault },
    #[error(
        "no context is current: `agent-reach dev` makes one for a cluster on this machine, \
         `agent-reach context add NAME --from DIR` one for another cluster"
    )]
    NoContext,
    #[error("there is no context {name} in {}: {known}", home.display())]
    UnknownContext { name: String, home: PathBuf, known: String },
    #[error("context {name} exists already: choose another name, or remove {} first", dir.display())]
    ContextExists { name: Name, dir: PathBuf },
    #[error(
        "{text:?} can't name a context: it must be 1 to 64 bytes of A-Z a-z 0-9 . _ : - and not begin with a dot"
    )]
    ContextName { text: String },
    #[error("neither AGENT_REACH_HOME nor HOME is set: set one to the folder that keeps your contexts")]
    NoHome,
    #[error("{0}")]
    Layout(String),
}

impl Error {
    /// The fault, when a text is what is wrong.
    pub fn fault(&self) -> Option<&Fault> {
        match self {
            Self::Text { fault, .. } => Some(fault),
            _ => None,
        }
    }
}
