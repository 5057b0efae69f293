//! How full the disk is: a low-water mark below which a node takes nothing new in, and a ballast
//! file that can be given up when it is full after all.

use std::{
    fs::{self, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use rustix::fs::{FallocateFlags, fallocate, statvfs};

/// Looks at the file system a node's folder lies on.
#[derive(Clone, Debug)]
pub struct Space {
    dir: PathBuf,
    low_bytes: u64,
}

impl Space {
    /// `low_bytes`: below this many free bytes the space is low.
    pub fn new(dir: impl Into<PathBuf>, low_bytes: u64) -> Self {
        Self { dir: dir.into(), low_bytes }
    }

    /// Bytes a process without privileges may still write.
    pub fn free_bytes(&self) -> io::Result<u64> {
        let file_system = statvfs(&self.dir)?;
        Ok(file_system.f_bavail.saturating_mul(file_system.f_frsize))
    }

    /// Whether submissions should be refused; acknowledgements and purges still go on.
    pub fn is_low(&self) -> io::Result<bool> {
        Ok(self.free_bytes()? < self.low_bytes)
    }

    /// Reserves `bytes` in a file, unless space is low: then a ballast of before is given up, so
    /// that the store can open and free some. Says whether the ballast is in place.
    pub fn set_ballast(&self, bytes: u64) -> io::Result<bool> {
        let path = self.ballast();
        let kept = fs::metadata(&path).map_or(0, |file| file.len());
        if bytes == 0 || self.free_bytes()? + kept < self.low_bytes.saturating_add(bytes) {
            self.release_ballast()?;
            return Ok(false);
        }
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path)?;
        match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
            Ok(()) => file.set_len(bytes).map(|()| true),
            // A file system without fallocate has no ballast; writing zeros would be no promise.
            Err(rustix::io::Errno::OPNOTSUPP) => self.release_ballast().map(|()| false),
            Err(error) => Err(error.into()),
        }
    }

    pub fn release_ballast(&self) -> io::Result<()> {
        match fs::remove_file(self.ballast()) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn ballast(&self) -> PathBuf {
        self.dir.join("ballast")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ballast_is_given_up_when_space_is_low() {
        let dir = tempfile::tempdir().unwrap();
        let ballast = dir.path().join("ballast");
        assert!(Space::new(dir.path(), 0).set_ballast(1 << 20).unwrap());
        assert_eq!(fs::metadata(&ballast).unwrap().len(), 1 << 20);
        assert!(!Space::new(dir.path(), 0).is_low().unwrap());
        let full = Space::new(dir.path(), u64::MAX);
        assert!(full.is_low().unwrap());
        assert!(!full.set_ballast(1 << 20).unwrap());
        assert!(!ballast.exists());
    }
}
