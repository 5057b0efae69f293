//! The folders of the tables. `CURRENT` names the one in force; any other is what an interrupted
//! install left, and goes at the next start.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use super::{Lock, kv::RocksKv, tuning::Tuning};
use crate::{
    error::Error,
    kv::Kv,
    schema::{self, Table},
    store::Applied,
    tables::{Engine, sync_dir},
};

#[derive(Debug)]
pub struct RocksEngine {
    root: PathBuf,
    tuning: Tuning,
    lock: Lock,
}

impl RocksEngine {
    /// `has_log`: this is not the first start, so the tables must be there.
    pub(super) fn open(
        root: &Path,
        tuning: Tuning,
        has_log: bool,
        lock: Lock,
    ) -> Result<(Self, RocksKv), Error> {
        let engine = Self { root: root.to_owned(), tuning, lock };
        let error = || Error::io(format!("the tables in {}", root.display()));
        fs::create_dir_all(root).map_err(error())?;
        let current = engine.current().map_err(error())?;
        if current.is_none() && has_log {
            let reason = "it is missing, though there is a log".to_owned();
            let what = root.join("CURRENT").display().to_string();
            return Err(Error::Damaged { what, reason });
        }
        engine.remove_leftovers(current.as_deref()).map_err(error())?;
        let disk = match current {
            Some(name) => engine.open_tables(&root.join(name)).map_err(error())?,
            None => {
                let made = engine.open_tables(&root.join(name_of(1)));
                made.and_then(|disk| engine.promote(&disk).map(|()| disk)).map_err(error())?
            }
        };
        Ok((engine, disk))
    }

    fn open_tables(&self, path: &Path) -> io::Result<RocksKv> {
        RocksKv::open(path, &Table::TABLES, &self.tuning, self.lock.clone())
    }

    fn current(&self) -> io::Result<Option<String>> {
        let path = self.root.join("CURRENT");
        let name = match fs::read_to_string(&path) {
            Ok(name) => name,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let name = name.trim_end();
        if number_of(OsStr::new(name)).is_none() || !self.root.join(name).is_dir() {
            let text = format!("{} names no folder of tables", path.display());
            return Err(crate::error::damaged(text));
        }
        Ok(Some(name.to_owned()))
    }

    fn remove_leftovers(&self, current: Option<&str>) -> io::Result<()> {
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            let name = entry.file_name();
            if number_of(&name).is_some() && Some(name.as_os_str()) != current.map(OsStr::new) {
                fs::remove_dir_all(entry.path())?;
            }
        }
        match fs::remove_file(self.root.join("CURRENT.tmp")) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// A folder's name above all that are there.
    fn next_path(&self) -> io::Result<PathBuf> {
        let mut highest = 0;
        for entry in fs::read_dir(&self.root)? {
            highest = highest.max(number_of(&entry?.file_name()).unwrap_or(0));
        }
        Ok(self.root.join(name_of(highest + 1)))
    }
}

impl Engine for RocksEngine {
    type Disk = RocksKv;

    fn flush(&self, disk: &RocksKv) -> io::Result<()> {
        disk.flush()
    }

    fn checkpoint(&self, disk: &RocksKv, dir: &Path) -> io::Result<Applied> {
        dir.parent().map_or(Ok(()), fs::create_dir_all)?;
        disk.checkpoint(dir)?;
        let applied = {
            let copy = RocksKv::open_to_read(dir, &Table::TABLES, &self.tuning, self.lock.clone())?;
            copy.read(Table::Meta, &schema::applied())?
        };
        // The log that RocksDB keeps of having been opened is no part of the copy.
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(b"LOG") {
                fs::remove_file(entry.path())?;
            }
        }
        applied.map_or(Ok(Applied::default()), |value| schema::decode_applied(&value))
    }

    fn adopt(&self, dir: &Path) -> io::Result<RocksKv> {
        let path = self.next_path()?;
        fs::rename(dir, &path)?;
        sync_dir(&self.root)?;
        let opened = self.open_tables(&path);
        if opened.is_err() {
            fs::remove_dir_all(&path)?;
        }
        opened
    }

    fn reject(&self, disk: RocksKv) {
        disk.remove_when_closed();
    }

    fn promote(&self, disk: &RocksKv) -> io::Result<()> {
        sync_dir(disk.path())?;
        let name = disk.path().file_name().expect("tables lie in a folder of ours");
        let tmp = self.root.join("CURRENT.tmp");
        let mut file = File::create(&tmp)?;
        file.write_all(name.as_encoded_bytes())?;
        file.write_all(b"\n")?;
        file.sync_all()?;
        fs::rename(&tmp, self.root.join("CURRENT"))?;
        sync_dir(&self.root)
    }

    fn retire(&self, disk: &RocksKv) {
        disk.remove_when_closed();
    }
}

fn name_of(number: u64) -> String {
    format!("t-{number:08}")
}

fn number_of(name: &OsStr) -> Option<u64> {
    name.to_str()?.strip_prefix("t-")?.parse().ok()
}
