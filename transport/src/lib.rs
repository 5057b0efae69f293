//! Authenticated connections between nodes and from clients: QUIC with mutual TLS. This crate alone
//! names quinn, rustls, webpki and rcgen; what it offers is identities, frames and links.

pub mod authority;
mod connection;
mod credentials;
mod endpoint;
mod error;
mod framing;
mod identity;
mod link;
mod memory;
mod options;
mod quic;
mod tls;
mod wire;

pub use authority::{Authority, AuthorityInfo, CertificateInfo, Issued, describe, describe_authority};
pub use connection::Connection;
pub use credentials::Credentials;
pub use endpoint::{Door, Endpoint};
pub use error::{Error, SendError};
pub use framing::{Duplex, FrameRx, FrameTx};
pub use identity::{BadIdentity, Identity};
pub use link::{LinkRx, LinkTx};
pub use memory::MemoryNetwork;
pub use options::Options;
pub use tls::{Now, Scrutiny};
