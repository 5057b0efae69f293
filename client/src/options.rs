//! Where the cluster is, who we are, and how long to wait. Also the context folder that the
//! command line writes and every program on the machine can use.

use std::{fs, path::Path, time::Duration};

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use reach_protocol::{AgentId, id::Name};
use reach_transport::Credentials;
use serde::Deserialize;

use crate::{error::Error, renewal::CredentialFiles};

#[derive(Clone, Debug)]
pub struct Options {
    /// `host:port` of nodes' client doors; one is enough, the others are learned from it.
    pub endpoints: Vec<String>,
    pub cluster: Name,
    pub credentials: Credentials,
    /// Where the credentials were read from. When these files are renewed, the next connection is made
    /// with what they hold then; the identity must stay. Default none.
    pub credential_files: Option<CredentialFiles>,
    /// For the first connection, and for an agent's first registration. Default 10 s; then
    /// [`Error::Unreachable`].
    pub connect_timeout: Duration,
    /// For one address, greeting included. Default 3 s; then it counts as silent.
    pub dial_timeout: Duration,
    /// An address that has not answered for so long is dialled on beside the next one. Default 250 ms.
    pub stagger: Duration,
    /// For one answer of one node, besides the time it was asked to wait. Default 1 s; then the
    /// request goes to another node.
    pub answer_timeout: Duration,
    /// For requests that name no time of their own, retries included. Default 30 s.
    pub request_timeout: Duration,
    /// For the answer to a heartbeat. Default 1 s; then the agent moves to another node.
    pub beat_timeout: Duration,
    /// The first and the longest pause between rounds of dialling, and between retries of a
    /// request that was refused for now. Defaults 50 ms and 2 s, with jitter.
    pub pause_min: Duration,
    pub pause_max: Duration,
    /// How long an agent's shutdown lets running tasks finish. Default 30 s; then they are left in
    /// the inbox for the next run.
    pub drain_timeout: Duration,
    /// Reads are answered by any node from what it knows, which may be a moment old and needs no
    /// leader. Default false: they see everything that was acknowledged before.
    pub stale: bool,
    pub transport: reach_transport::Options,
}

/// `context.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContextFile {
    cluster: Name,
    endpoints: Vec<String>,
    ca: String,
    cert: String,
    key: String,
}

impl Options {
    pub fn new(cluster: Name, endpoints: Vec<String>, credentials: Credentials) -> Self {
        Self {
            endpoints,
            cluster,
            credentials,
            credential_files: None,
            connect_timeout: Duration::from_secs(10),
            dial_timeout: Duration::from_secs(3),
            stagger: Duration::from_millis(250),
            answer_timeout: Duration::from_secs(1),
            request_timeout: Duration::from_secs(30),
            beat_timeout: Duration::from_secs(1),
            pause_min: Duration::from_millis(50),
            pause_max: Duration::from_secs(2),
            drain_timeout: Duration::from_secs(30),
            stale: false,
            transport: reach_transport::Options::client(),
        }
    }

    /// Reads `context.toml` of a context folder; its file names are relative to the folder.
    pub fn from_context(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let file = ContextFile::read(dir)?;
        let (files, credentials) =
            CredentialFiles::load(dir.join(&file.ca), dir.join(&file.cert), dir.join(&file.key))?;
        Ok(Self::new(file.cluster, file.endpoints, credentials).of_files(files))
    }

    /// As [`Options::from_context`], with the agent's own certificate and key
    /// (`agents/ID.pem`, `agents/ID.key` in the folder).
    pub fn from_context_as(dir: impl AsRef<Path>, agent_id: &AgentId) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let file = ContextFile::read(dir)?;
        let own = |ending: &str| dir.join("agents").join(format!("{agent_id}.{ending}"));
        let (files, credentials) = CredentialFiles::load(dir.join(&file.ca), own("pem"), own("key"))?;
        Ok(Self::new(file.cluster, file.endpoints, credentials).of_files(files))
    }

    fn of_files(self, files: CredentialFiles) -> Self {
        Self { credential_files: Some(files), ..self }
    }

    pub(crate) fn pauses(&self) -> ExponentialBackoff {
        ExponentialBuilder::new()
            .with_min_delay(self.pause_min)
            .with_max_delay(self.pause_max)
            .with_factor(2.0)
            .with_jitter()
            .without_max_times()
            .build()
    }
}

impl ContextFile {
    fn read(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("context.toml");
        let wrong = |reason: String| Error::Invalid(format!("{}: {reason}", path.display()));
        let text = fs::read_to_string(&path).map_err(|error| wrong(error.to_string()))?;
        let file: Self = toml::from_str(&text).map_err(|error| wrong(error.message().to_owned()))?;
        if file.endpoints.is_empty() {
            return Err(wrong("endpoints is empty: name at least one host:port".into()));
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use reach_protocol::Principal;
    use reach_transport::{Identity, authority::Authority};

    use super::*;

    const FILES: &str = "ca = \"ca.pem\"\ncert = \"user.pem\"\nkey = \"user.key\"\n";

    fn folder(text: &str) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let cluster: Name = "dev".parse().unwrap();
        let authority = Authority::new(&cluster, "client");
        let user = Principal::User("u".parse().unwrap());
        let agent = Principal::Agent("a".parse().unwrap());
        fs::write(dir.path().join("ca.pem"), authority.cert_pem()).unwrap();
        fs::create_dir(dir.path().join("agents")).unwrap();
        for (name, principal) in [("user", user), ("agents/a", agent)] {
            let identity = Identity::new(cluster.clone(), principal);
            let issued = authority.issue(&identity, Duration::from_secs(3600)).unwrap();
            fs::write(dir.path().join(format!("{name}.pem")), issued.cert_pem).unwrap();
            fs::write(dir.path().join(format!("{name}.key")), issued.key_pem).unwrap();
        }
        fs::write(dir.path().join("context.toml"), text).unwrap();
        dir
    }

    #[test]
    fn a_context_folder_is_read() {
        let dir = folder(&format!("cluster = \"dev\"\nendpoints = [\"127.0.0.1:7481\"]\n{FILES}"));
        let options = Options::from_context(dir.path()).unwrap();
        assert_eq!(options.cluster.as_str(), "dev");
        assert_eq!(options.endpoints, ["127.0.0.1:7481"]);
        let agent = Options::from_context_as(dir.path(), &"a".parse().unwrap()).unwrap();
        assert_ne!(agent.credentials.cert_pem, options.credentials.cert_pem);
        assert!(Options::from_context_as(dir.path(), &"b".parse().unwrap()).is_err());
    }

    #[test]
    fn a_wrong_context_names_its_file() {
        for text in ["", "cluster = \"dev\"\nendpoints = []\n", "nope = 1\n"] {
            let dir = folder(&format!("{text}{FILES}"));
            let error = Options::from_context(dir.path()).unwrap_err().to_string();
            assert!(error.contains("context.toml"), "{error}");
        }
        let missing = Options::from_context("/nowhere/at/all").unwrap_err().to_string();
        assert!(missing.contains("/nowhere/at/all/context.toml"), "{missing}");
    }
}
