//! What an operator may say, and where it is written: a node's own file, the rules document, the
//! contexts of the command line, and the folders that make a cluster. Every text is checked here
//! once, and an error names file, line, key and the way out.

pub mod address;
pub mod context;
mod document;
mod error;
pub mod layout;
pub mod node;
pub mod ports;
pub mod rules;

pub use address::Address;
pub use context::{Context, Contexts};
pub use error::{Error, Fault};
pub use layout::{Layout, NodeFile};
pub use node::{Addresses, NodeConfig, TlsFiles};
