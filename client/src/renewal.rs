//! The files that credentials came from. They are looked at before every dial, so that a renewed
//! certificate is taken into use without a restart.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use reach_protocol::codec;
use reach_transport::{Credentials, Endpoint};
use tracing::{info, warn};

use crate::error::Error;

/// Three PEM files, as they were when they were last read.
#[derive(Clone, Debug)]
pub struct CredentialFiles {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
    seen: Option<Seen>,
}

/// What each of them held, as a digest: a time of change may be the same for two that follow each other
/// closely.
type Seen = [[u8; 16]; 3];

impl CredentialFiles {
    /// Reads them and checks that they belong together; an error names the file.
    pub fn load(
        ca: impl Into<PathBuf>,
        cert: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
    ) -> Result<(Self, Credentials), Error> {
        let mut files = Self { ca: ca.into(), cert: cert.into(), key: key.into(), seen: None };
        // Before they are read: what is replaced meanwhile is found replaced later.
        files.seen = files.look().ok();
        let credentials = Credentials::load(&files.ca, &files.cert, &files.key)?;
        Ok((files, credentials))
    }

    /// Takes renewed files into use, for the connections that are made from now on. Files that don't
    /// belong together yet, since they are being replaced one by one, are looked at again when they
    /// have changed once more.
    pub(crate) fn renew(&mut self, endpoint: &Endpoint) {
        let Ok(now) = self.look() else { return };
        if self.seen.replace(now) == Some(now) {
            return;
        }
        let cert = self.cert.display();
        let renewed = Credentials::load(&self.ca, &self.cert, &self.key)
            .and_then(|credentials| endpoint.renew(&credentials));
        match renewed {
            Ok(()) => info!(%cert, "certificate renewed"),
            Err(error) => warn!(%cert, %error, "a changed certificate is not used; the one before still is"),
        }
    }

    fn look(&self) -> io::Result<Seen> {
        let of = |path: &Path| fs::read(path).map(|bytes| codec::digest(&bytes));
        Ok([of(&self.ca)?, of(&self.cert)?, of(&self.key)?])
    }
}
