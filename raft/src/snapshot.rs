//! Snapshots on their way: folders of files, and how one crosses a stream, file by file, each with
//! its checksum.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use reach_storage::CheckpointFile;
use reach_transport::{FrameRx, FrameTx};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use crate::Error;

/// Bytes of a file in one frame.
const CHUNK_BYTES: usize = 256 << 10;

/// A chunk that takes longer than this to pass ends the transfer.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(10);

/// A snapshot's files. Deleted when nobody uses it any more, unless they were moved away.
#[derive(Clone, Debug)]
pub(crate) struct Folder(Arc<Owned>);

#[derive(Debug)]
struct Owned {
    dir: PathBuf,
    files: Vec<CheckpointFile>,
}

impl Folder {
    pub fn new(dir: PathBuf, files: Vec<CheckpointFile>) -> Self {
        Self(Arc::new(Owned { dir, files }))
    }

    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    pub fn files(&self) -> &[CheckpointFile] {
        &self.0.files
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(%error, dir = %self.dir.display(), "snapshot not deleted");
            }
            _ => {}
        }
    }
}

/// Makes names for the folders of one replica. No folder outlives the process: what a restart
/// begins with are the tables themselves.
#[derive(Debug)]
pub(crate) struct Folders {
    root: PathBuf,
    made: AtomicU64,
}

impl Folders {
    pub fn open(root: PathBuf) -> io::Result<Self> {
        match fs::remove_dir_all(&root) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => fs::create_dir_all(&root)?,
        }
        Ok(Self { root, made: AtomicU64::new(0) })
    }

    /// A folder that does not exist yet.
    pub fn next(&self) -> PathBuf {
        self.root.join(format!("snapshot-{}", self.made.fetch_add(1, Ordering::Relaxed)))
    }
}

/// Why a snapshot was not sent.
pub(crate) enum SendError {
    Disk(io::Error),
    Stream(String),
}

pub(crate) async fn send(folder: &Folder, tx: &mut FrameTx) -> Result<(), SendError> {
    for file in folder.files() {
        let mut content =
            tokio::fs::File::open(folder.dir().join(&file.name)).await.map_err(SendError::Disk)?;
        let mut left = file.bytes;
        while left > 0 {
            let chunk = read_chunk(&mut content, left).await.map_err(SendError::Disk)?;
            left -= chunk.len() as u64;
            match timeout(CHUNK_TIMEOUT, tx.send(chunk)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(SendError::Stream(error.to_string())),
                Err(_) => return Err(SendError::Stream(format!("a chunk took over {CHUNK_TIMEOUT:?}"))),
            }
        }
    }
    Ok(())
}

async fn read_chunk(content: &mut tokio::fs::File, left: u64) -> io::Result<Bytes> {
    let wanted = left.min(CHUNK_BYTES as u64) as usize;
    let mut chunk = BytesMut::zeroed(wanted);
    content.read_exact(&mut chunk).await?;
    Ok(chunk.freeze())
}

/// Receives `files` into `dir`, checked and on the disk.
pub(crate) async fn receive(
    dir: PathBuf,
    files: Vec<CheckpointFile>,
    rx: &mut FrameRx,
) -> Result<Folder, Error> {
    let folder = Folder::new(dir, files);
    let disk = |error| Error::Disk { what: "receiving a snapshot", error };
    tokio::fs::create_dir(folder.dir()).await.map_err(disk)?;
    for file in folder.files() {
        let is_plain = Path::new(&file.name).file_name().is_some_and(|name| name == file.name.as_str());
        if !is_plain {
            return Err(Error::Stream(format!("a snapshot file is called {:?}", file.name)));
        }
        let mut content = tokio::fs::File::create_new(folder.dir().join(&file.name)).await.map_err(disk)?;
        let (mut left, mut crc32c) = (file.bytes, 0);
        while left > 0 {
            let chunk = next_chunk(rx).await?;
            left = left.checked_sub(chunk.len() as u64).filter(|_| !chunk.is_empty()).ok_or_else(|| {
                Error::Stream(format!("a chunk of {} bytes where {left} were left", chunk.len()))
            })?;
            crc32c = crc32c::crc32c_append(crc32c, &chunk);
            content.write_all(&chunk).await.map_err(disk)?;
        }
        if crc32c != file.crc32c {
            let reason = format!("{} has checksum {crc32c:08x}, not {:08x}", file.name, file.crc32c);
            return Err(Error::Stream(reason));
        }
        content.flush().await.map_err(disk)?;
        content.sync_all().await.map_err(disk)?;
    }
    let names = tokio::fs::File::open(folder.dir()).await.map_err(disk)?;
    names.sync_all().await.map_err(disk)?;
    Ok(folder)
}

async fn next_chunk(rx: &mut FrameRx) -> Result<Bytes, Error> {
    let frame = timeout(CHUNK_TIMEOUT, rx.recv())
        .await
        .map_err(|_| Error::Late { what: "snapshot chunk", waited: CHUNK_TIMEOUT })?;
    frame
        .map_err(|error| Error::Stream(error.to_string()))?
        .ok_or_else(|| Error::Stream("a snapshot ended early".to_owned()))
}
