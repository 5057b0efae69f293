//! What a process proves itself with at one door: its certificate and key, and the authority that
//! the other side must be signed by.

use std::{fmt, fs, path::Path};

use crate::{error::Error, tls};

#[derive(Clone)]
pub struct Credentials {
    /// The door's authority; several certificates while it is being replaced.
    pub ca_pem: String,
    /// The own certificate, then intermediate ones if there are any.
    pub cert_pem: String,
    pub key_pem: String,
}

impl Credentials {
    /// Reads three PEM files and checks that they belong together; an error names the file.
    pub fn load(ca: impl AsRef<Path>, cert: impl AsRef<Path>, key: impl AsRef<Path>) -> Result<Self, Error> {
        let paths = [ca.as_ref(), cert.as_ref(), key.as_ref()];
        let read = |path: &Path| {
            fs::read_to_string(path).map_err(|error| {
                let reason = match error.kind() {
                    std::io::ErrorKind::InvalidData => "not a PEM file".to_owned(),
                    _ => error.to_string(),
                };
                Error::certificate(path.display().to_string(), reason)
            })
        };
        let credentials =
            Self { ca_pem: read(paths[0])?, cert_pem: read(paths[1])?, key_pem: read(paths[2])? };
        let [ca, cert, key] = paths.map(|path| path.display().to_string());
        tls::Material::named(&credentials, [&ca, &cert, &key])?;
        Ok(credentials)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}
