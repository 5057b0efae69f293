//! The marker as a file beside the log: two slots written in turn, so that one is always whole.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::Path,
};

use crate::{error::damaged, log::Marker};

/// Each slot lies in a disk sector of its own.
const SLOT: u64 = 512;
const VERSION: u8 = 1;
/// Version, turn, index, checksum.
const BYTES: usize = 1 + 8 + 8 + 4;

#[derive(Debug)]
pub(super) struct MarkerFile {
    file: File,
    /// Counts the writes; its parity is the slot.
    turn: u64,
}

impl MarkerFile {
    /// Opens or makes the file; the second value is what it says.
    pub fn open(path: &Path) -> io::Result<(Self, u64)> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path)?;
        let mut slots = Vec::new();
        for slot in 0..2 {
            let mut bytes = [0; BYTES];
            match file.read_exact_at(&mut bytes, slot * SLOT) {
                Ok(()) => slots.extend(decode(&bytes)),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
                Err(error) => return Err(error),
            }
        }
        match slots.into_iter().max() {
            Some((turn, next)) => Ok((Self { file, turn }, next)),
            None if file.metadata()?.len() == 0 => Ok((Self { file, turn: 0 }, 0)),
            None => Err(damaged(format!("no slot of {} is whole", path.display()))),
        }
    }
}

impl Marker for MarkerFile {
    fn write(&mut self, next: u64) -> io::Result<()> {
        self.turn += 1;
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.push(VERSION);
        bytes.extend(self.turn.to_be_bytes());
        bytes.extend(next.to_be_bytes());
        bytes.extend(crc32c::crc32c(&bytes).to_be_bytes());
        self.file.write_all_at(&bytes, self.turn % 2 * SLOT)?;
        self.file.sync_data()
    }
}

/// The turn and the index of a whole slot.
fn decode(bytes: &[u8; BYTES]) -> Option<(u64, u64)> {
    let (content, stored) = bytes.split_at(BYTES - 4);
    let number = |at: usize| u64::from_be_bytes(content[at..at + 8].try_into().expect("eight bytes"));
    let whole = content[0] == VERSION && stored == crc32c::crc32c(content).to_be_bytes();
    whole.then(|| (number(1), number(9)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_write_leaves_the_marker_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ACKED");
        let (mut marker, next) = MarkerFile::open(&path).unwrap();
        assert_eq!(next, 0);
        for next in [5, 9, 3] {
            marker.write(next).unwrap();
            assert_eq!(MarkerFile::open(&path).unwrap().1, next);
        }
        marker.file.write_all_at(&[0xff; 3], marker.turn % 2 * SLOT + 9).unwrap();
        assert_eq!(MarkerFile::open(&path).unwrap().1, 9);
        marker.file.write_all_at(&[0xff; 3], (marker.turn + 1) % 2 * SLOT + 9).unwrap();
        let error = MarkerFile::open(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
