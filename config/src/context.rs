//! Contexts: under a name, which cluster the command line speaks to and as whom. Each is a folder of
//! its own under the user's home, so that removing one is removing a folder.

use std::{
    env, fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf, absolute},
};

use reach_protocol::{AgentId, id::Name};
use serde::Deserialize;

use crate::{
    address::Address,
    document::Document,
    error::{Error, Fault},
    node::TlsFiles,
};

/// The file that says what a context is, in its folder.
pub const CONTEXT_FILE: &str = "context.toml";
/// The private key of the client CA, where this context may issue certificates itself.
pub const CLIENT_CA_KEY: &str = "client-ca.key";

/// One cluster, and the user's own certificate for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    pub name: Name,
    pub dir: PathBuf,
    pub cluster: Name,
    /// Client addresses, tried in order.
    pub endpoints: Vec<Address>,
    /// The cluster's client CA.
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Context {
    /// Reads `context.toml` in `dir`; relative paths in it start from there.
    pub fn load(name: Name, dir: &Path) -> Result<Self, Error> {
        let path = dir.join(CONTEXT_FILE);
        let way_out =
            "`agent-reach cluster new` writes it into the admin folder, `agent-reach dev` into its context";
        let text = fs::read_to_string(&path).map_err(|source| Error::Read {
            path: path.clone(),
            source,
            way_out,
        })?;
        let dir = absolute(dir).unwrap_or_else(|_| dir.to_path_buf());
        Self::parse(&text, name, dir).map_err(|fault| Error::Text { path, fault })
    }

    fn parse(text: &str, name: Name, dir: PathBuf) -> Result<Self, Fault> {
        let document = Document::parse(text)?;
        let form: Form = document.read(|_| None)?;
        if form.endpoints.is_empty() {
            let problem = "is empty: name at least one node's client address, such as 127.0.0.1:7481";
            return Err(document.fault("endpoints", problem));
        }
        let endpoints = form
            .endpoints
            .iter()
            .map(|text| text.parse::<Address>())
            .collect::<Result<_, _>>()
            .map_err(|error| document.fault("endpoints", error.to_string()))?;
        Ok(Self {
            endpoints,
            cluster: form.cluster,
            ca: dir.join(form.ca),
            cert: dir.join(form.cert),
            key: dir.join(form.key),
            name,
            dir,
        })
    }

    /// The user's own credentials.
    pub fn credentials(&self) -> TlsFiles {
        TlsFiles { ca: self.ca.clone(), cert: self.cert.clone(), key: self.key.clone() }
    }

    /// Where an agent's own certificate and key are kept in this context. They need not exist yet.
    pub fn agent_credentials(&self, agent_id: &AgentId) -> TlsFiles {
        let agents = self.dir.join("agents");
        TlsFiles {
            ca: self.ca.clone(),
            cert: agents.join(format!("{agent_id}.pem")),
            key: agents.join(format!("{agent_id}.key")),
        }
    }

    /// The client CA's private key, where this context holds it: `dev`'s does.
    pub fn client_ca_key(&self) -> Option<PathBuf> {
        let path = self.dir.join(CLIENT_CA_KEY);
        path.exists().then_some(path)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    cluster: Name,
    endpoints: Vec<String>,
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
}

/// A context as it is written down; [`Contexts::add`] keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextFile {
    pub cluster: Name,
    pub endpoints: Vec<Address>,
    /// Relative paths start from the context's folder.
    pub ca: PathBuf,
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl ContextFile {
    pub fn render(&self) -> String {
        let quoted = |text: String| toml::Value::String(text).to_string();
        let endpoints: Vec<String> =
            self.endpoints.iter().map(|address| quoted(address.to_string())).collect();
        format!(
            "# How `agent-reach` reaches this cluster, and as whom. Relative paths start from this folder.\n\
             cluster = {}\nendpoints = [{}]\nca = {}\ncert = {}\nkey = {}\n",
            quoted(self.cluster.to_string()),
            endpoints.join(", "),
            quoted(self.ca.display().to_string()),
            quoted(self.cert.display().to_string()),
            quoted(self.key.display().to_string()),
        )
    }
}

/// All contexts of this user.
#[derive(Clone, Debug)]
pub struct Contexts {
    home: PathBuf,
}

impl Contexts {
    /// In `home`, which need not exist yet.
    pub fn open(home: impl Into<PathBuf>) -> Self {
        Self { home: home.into() }
    }

    /// In `$AGENT_REACH_HOME`, or else `~/.agent-reach`.
    pub fn of_this_user() -> Result<Self, Error> {
        let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        set("AGENT_REACH_HOME")
            .or_else(|| set("HOME").map(|home| home.join(".agent-reach")))
            .map(Self::open)
            .ok_or(Error::NoHome)
    }

    pub fn home(&self) -> &Path {
        &self.home
    }

    /// The folder that `name` has or would have.
    pub fn dir(&self, name: &Name) -> PathBuf {
        self.home.join("contexts").join(name.as_str())
    }

    /// Names of all contexts, sorted.
    pub fn list(&self) -> Result<Vec<Name>, Error> {
        let path = self.home.join("contexts");
        let cant_read =
            |source| Error::Read { path: path.clone(), source, way_out: "check the folder's owner" };
        let entries = match fs::read_dir(&path) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(cant_read(source)),
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(cant_read)?;
            if entry.path().join(CONTEXT_FILE).is_file() {
                names.extend(entry.file_name().to_str().and_then(|name| name_of(name).ok()));
            }
        }
        names.sort();
        Ok(names)
    }

    pub fn load(&self, name: &str) -> Result<Context, Error> {
        let name = name_of(name)?;
        let dir = self.dir(&name);
        if !dir.join(CONTEXT_FILE).is_file() {
            let names: Vec<String> = self.list()?.iter().map(Name::to_string).collect();
            let known = match names.is_empty() {
                true => "there are none yet; `agent-reach dev` makes one".to_string(),
                false => format!("there are {}", names.join(", ")),
            };
            return Err(Error::UnknownContext { name: name.to_string(), home: self.home.clone(), known });
        }
        Context::load(name, &dir)
    }

    /// The context to use: `choice` (`--context`, `AGENT_REACH_CONTEXT`), or else the current one.
    pub fn current(&self, choice: Option<&str>) -> Result<Context, Error> {
        match choice {
            Some(name) => self.load(name),
            None => self.load(self.current_name()?.ok_or(Error::NoContext)?.as_str()),
        }
    }

    /// The name that commands without `--context` use. The context itself may be gone.
    pub fn current_name(&self) -> Result<Option<Name>, Error> {
        let path = self.home.join("current");
        match fs::read_to_string(&path) {
            Ok(text) if text.trim().is_empty() => Ok(None),
            Ok(text) => name_of(text.trim()).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => {
                Err(Error::Read { path, source, way_out: "`agent-reach context use NAME` writes it" })
            }
        }
    }

    /// From now on commands without `--context` use `name`, which must exist.
    pub fn make_current(&self, name: &str) -> Result<Context, Error> {
        let context = self.load(name)?;
        write_private(&self.home.join("current"), format!("{}\n", context.name).as_bytes())?;
        Ok(context)
    }

    /// Keeps a new context. Its files must be readable to be used, not to be added.
    pub fn add(&self, name: &str, file: &ContextFile) -> Result<Context, Error> {
        let name = name_of(name)?;
        let dir = self.dir(&name);
        if dir.exists() {
            return Err(Error::ContextExists { name, dir });
        }
        make_private_dir(&dir)?;
        write_private(&dir.join(CONTEXT_FILE), file.render().as_bytes())?;
        Context::load(name, &dir)
    }

    /// Keeps a copy of the context that stands in the folder `from` (an admin folder), with its
    /// certificate and key. A CA's key is never copied.
    pub fn add_from(&self, name: &str, from: &Path) -> Result<Context, Error> {
        let name = name_of(name)?;
        let source = Context::load(name.clone(), from)?;
        let files =
            [(&source.ca, "client-ca.pem"), (&source.cert, "client.pem"), (&source.key, "client.key")];
        let mut contents = Vec::new();
        for (path, copy) in files {
            let way_out = "the context that was to be copied names it: check its owner";
            let bytes =
                fs::read(path).map_err(|source| Error::Read { path: path.clone(), source, way_out })?;
            contents.push((copy, bytes));
        }
        let file = ContextFile {
            cluster: source.cluster,
            endpoints: source.endpoints,
            ca: "client-ca.pem".into(),
            cert: "client.pem".into(),
            key: "client.key".into(),
        };
        let context = self.add(name.as_str(), &file)?;
        for (copy, bytes) in contents {
            write_private(&context.dir.join(copy), &bytes)?;
        }
        Ok(context)
    }
}

/// A name that is also safe as a folder's.
fn name_of(text: &str) -> Result<Name, Error> {
    Name::parse(text)
        .ok()
        .filter(|name| !name.starts_with('.'))
        .ok_or_else(|| Error::ContextName { text: text.to_string() })
}

/// Makes `path` and the folders above it, readable by the user alone.
pub fn make_private_dir(path: &Path) -> Result<(), Error> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|source| Error::Write { path: path.to_path_buf(), source })
}

/// Replaces the file at `path` as a whole, readable and writable by the user alone (0600).
pub fn write_private(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    use io::Write;

    let mut beside = path.as_os_str().to_os_string();
    beside.push(format!(".{}.new", std::process::id()));
    let beside = PathBuf::from(beside);
    let written = (|| {
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&beside, path)
    })();
    written.map_err(|source| {
        let _ = fs::remove_file(&beside);
        Error::Write { path: path.to_path_buf(), source }
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file() -> ContextFile {
        ContextFile {
            cluster: Name::parse("shop").unwrap(),
            endpoints: vec!["127.0.0.1:7481".parse().unwrap(), "[::1]:7491".parse().unwrap()],
            ca: "client-ca.pem".into(),
            cert: "admin.pem".into(),
            key: "/elsewhere/\"admin\".key".into(),
        }
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_context_is_kept_listed_and_made_current() {
        let home = tempfile::tempdir().unwrap();
        let contexts = Contexts::open(home.path().join("none-yet"));
        assert_eq!(contexts.list().unwrap(), []);
        assert!(matches!(contexts.current(None), Err(Error::NoContext)));

        let added = contexts.add("shop", &file()).unwrap();
        assert_eq!(added.ca, contexts.dir(&added.name).join("client-ca.pem"));
        assert_eq!(added.key, PathBuf::from("/elsewhere/\"admin\".key"));
        assert_eq!(mode(&added.dir.join(CONTEXT_FILE)), 0o600);
        contexts.add("other", &file()).unwrap();
        assert_eq!(
            contexts.list().unwrap().iter().map(|name| name.as_str()).collect::<Vec<_>>(),
            ["other", "shop"]
        );

        contexts.make_current("shop").unwrap();
        assert_eq!(contexts.current(None).unwrap(), added);
        assert_eq!(contexts.current(Some("other")).unwrap().name.as_str(), "other");
        assert!(matches!(contexts.add("shop", &file()), Err(Error::ContextExists { .. })));
    }

    #[test]
    fn an_unknown_context_is_answered_with_the_known_ones() {
        let home = tempfile::tempdir().unwrap();
        let contexts = Contexts::open(home.path());
        contexts.add("shop", &file()).unwrap();
        let error = contexts.make_current("shup").unwrap_err().to_string();
        assert!(
            error.starts_with("there is no context shup in ") && error.ends_with("there are shop"),
            "{error}"
        );
        for bad in ["..", ".", "a/b", ""] {
            assert!(matches!(contexts.load(bad), Err(Error::ContextName { .. })), "{bad}");
        }
    }

    #[test]
    fn an_admin_folder_is_copied_without_the_keys_of_its_cas() {
        let home = tempfile::tempdir().unwrap();
        let admin = tempfile::tempdir().unwrap();
        let written = ContextFile { key: "admin.key".into(), ..file() };
        fs::write(admin.path().join(CONTEXT_FILE), written.render()).unwrap();
        for name in ["client-ca.pem", CLIENT_CA_KEY, "admin.pem", "admin.key"] {
            fs::write(admin.path().join(name), name).unwrap();
        }
        let contexts = Contexts::open(home.path());
        let context = contexts.add_from("shop", admin.path()).unwrap();
        assert_eq!(fs::read_to_string(&context.key).unwrap(), "admin.key");
        assert_eq!(mode(&context.key), 0o600);
        assert_eq!(context.client_ca_key(), None);
        assert_eq!(context.endpoints, written.endpoints);
    }

    #[test]
    fn an_agents_certificate_has_its_place() {
        let home = tempfile::tempdir().unwrap();
        let context = Contexts::open(home.path()).add("shop", &file()).unwrap();
        let files = context.agent_credentials(&AgentId::parse("host:counter.1").unwrap());
        assert_eq!(files.cert, context.dir.join("agents/host:counter.1.pem"));
        assert_eq!((files.key, files.ca), (context.dir.join("agents/host:counter.1.key"), context.ca));
    }

    #[test]
    fn a_wrong_context_file_names_its_line() {
        let fault = |text: &str| {
            Context::parse(text, Name::parse("x").unwrap(), "/x".into()).unwrap_err().to_string()
        };
        let good = file().render();
        assert!(
            fault(&good.replace("[\"127.0.0.1:7481\", \"[::1]:7491\"]", "[]"))
                .starts_with("line 3: endpoints: is empty")
        );
        assert!(
            fault(&good.replace("127.0.0.1:7481", "nowhere"))
                .starts_with("line 3: endpoints: \"nowhere\" is not")
        );
        assert!(
            fault(&good.replace("ca =", "c ="))
                .starts_with("line 4: c: there is no such key; did you mean ca?")
        );
    }
}
