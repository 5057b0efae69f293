//! Frames on a stream: four bytes of length, then as many bytes. A length is checked before
//! anything is allocated for it, and a frame's buffer grows only as its bytes arrive.

use std::fmt;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use reach_protocol::limits::FRAME_MAX;

use crate::{
    error::Error,
    wire::{Receiver, Sender},
};

pub(crate) const HEADER: usize = 4;

/// Up to this size header and body are written as one piece.
const COPY_BYTES_MAX: usize = 16 * 1024;

/// A stream of its own in both directions.
#[derive(Debug)]
pub struct Duplex {
    pub tx: FrameTx,
    pub rx: FrameRx,
}

pub struct FrameTx {
    sender: Sender,
    /// A `send` is under way, or was dropped midway.
    midway: bool,
}

pub struct FrameRx {
    receiver: Receiver,
    frames: Frames,
}

impl Duplex {
    pub(crate) fn new(sender: Sender, receiver: Receiver, frames: Frames) -> Self {
        Self { tx: FrameTx { sender, midway: false }, rx: FrameRx { receiver, frames } }
    }
}

impl FrameTx {
    /// Waits while the other side does not read. Not cancel-safe: after a `send` that was dropped
    /// midway the stream is given up, and both sides get `Error::Closed`.
    pub async fn send(&mut self, frame: Bytes) -> Result<(), Error> {
        if frame.len() > FRAME_MAX {
            return Err(Error::FrameTooLarge { bytes: frame.len(), max: FRAME_MAX });
        }
        if std::mem::replace(&mut self.midway, true) {
            self.sender.abandon();
            return Err(Error::closed("an earlier frame of this stream was not written to its end"));
        }
        let mut head = BytesMut::with_capacity(HEADER + frame.len().min(COPY_BYTES_MAX));
        head.put_u32(frame.len() as u32);
        if frame.len() <= COPY_BYTES_MAX {
            head.put_slice(&frame);
            self.sender.write(head.freeze()).await?;
        } else {
            self.sender.write(head.freeze()).await?;
            self.sender.write(frame).await?;
        }
        self.midway = false;
        Ok(())
    }

    /// Says that no frame follows. Does not wait for the other side: see `delivered`.
    pub async fn finish(&mut self) -> Result<(), Error> {
        if self.midway {
            self.sender.abandon();
            return Err(Error::closed("the last frame was not written to its end"));
        }
        self.sender.finish()
    }

    /// After `finish`: waits until the other side has everything. Ends with the connection at the
    /// latest.
    pub async fn delivered(&mut self) -> Result<(), Error> {
        self.sender.delivered().await
    }
}

impl Drop for FrameTx {
    fn drop(&mut self) {
        if self.midway {
            self.sender.abandon();
        }
    }
}

impl FrameRx {
    /// The next frame, or none when the other side has finished. Cancel-safe.
    pub async fn recv(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            match self.frames.next()? {
                Some(Item::Frame(frame)) => return Ok(Some(frame)),
                Some(Item::Mark) => unreachable!("only a link's main stream is read with marks"),
                None => {}
            }
            match self.receiver.read().await? {
                Some(chunk) => self.frames.feed(chunk),
                None if self.frames.is_between() => return Ok(None),
                None => return Err(Error::closed("the stream ended within a frame")),
            }
        }
    }
}

/// Cuts chunks of bytes into frames.
#[derive(Default)]
pub(crate) struct Frames {
    chunk: Bytes,
    /// The part of a header that came at the end of a chunk.
    header: BytesMut,
    /// The frame under way: what is there of it, and its length.
    body: Option<(BytesMut, usize)>,
    /// The length's top bit marks a frame that comes on a stream of its own.
    marks: bool,
}

pub(crate) enum Item {
    Frame(Bytes),
    Mark,
}

pub(crate) const MARK: u32 = 1 << 31;

impl Frames {
    pub(crate) fn new(rest: Bytes) -> Self {
        Self { chunk: rest, ..Self::default() }
    }

    pub(crate) fn with_marks(mut self) -> Self {
        self.marks = true;
        self
    }

    /// After `next` has returned nothing.
    pub(crate) fn feed(&mut self, chunk: Bytes) {
        debug_assert!(self.chunk.is_empty(), "the last chunk is used up");
        self.chunk = chunk;
    }

    /// Whether the stream may end here.
    pub(crate) fn is_between(&self) -> bool {
        self.chunk.is_empty() && self.header.is_empty() && self.body.is_none()
    }

    pub(crate) fn next(&mut self) -> Result<Option<Item>, Error> {
        if self.body.is_none() {
            let Some(word) = self.take_header() else { return Ok(None) };
            if self.marks && word & MARK != 0 {
                return Ok(Some(Item::Mark));
            }
            let bytes = word as usize;
            if bytes > FRAME_MAX {
                return Err(Error::FrameTooLarge { bytes, max: FRAME_MAX });
            }
            if self.chunk.len() >= bytes {
                // Copied, so that a small frame that is kept does not keep a whole chunk.
                let frame = Bytes::copy_from_slice(&self.chunk[..bytes]);
                self.chunk.advance(bytes);
                return Ok(Some(Item::Frame(frame)));
            }
            self.body = Some((BytesMut::new(), bytes));
        }
        let (body, bytes) = self.body.as_mut().expect("set above");
        let part = self.chunk.split_to(self.chunk.len().min(*bytes - body.len()));
        body.extend_from_slice(&part);
        if body.len() < *bytes {
            return Ok(None);
        }
        let (body, _) = self.body.take().expect("set above");
        Ok(Some(Item::Frame(body.freeze())))
    }

    fn take_header(&mut self) -> Option<u32> {
        if self.header.is_empty() && self.chunk.len() >= HEADER {
            return Some(self.chunk.get_u32());
        }
        let part = self.chunk.split_to(self.chunk.len().min(HEADER - self.header.len()));
        self.header.extend_from_slice(&part);
        (self.header.len() == HEADER).then(|| {
            let word = u32::from_be_bytes(self.header[..].try_into().expect("four bytes"));
            self.header.clear();
            word
        })
    }
}

impl fmt::Debug for FrameTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameTx").finish_non_exhaustive()
    }
}

impl fmt::Debug for FrameRx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameRx").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(chunks: &[&[u8]]) -> Result<Vec<Bytes>, Error> {
        let mut frames = Frames::default();
        let mut found = Vec::new();
        for chunk in chunks {
            frames.feed(Bytes::copy_from_slice(chunk));
            while let Some(item) = frames.next()? {
                match item {
                    Item::Frame(frame) => found.push(frame),
                    Item::Mark => unreachable!(),
                }
            }
        }
        assert!(frames.is_between());
        Ok(found)
    }

    #[test]
    fn frames_are_the_same_however_the_bytes_are_cut() {
        let mut stream = Vec::new();
        for body in [&b""[..], b"a", b"hello", &[7; 300]] {
            stream.put_u32(body.len() as u32);
            stream.put_slice(body);
        }
        let whole = cut(&[&stream]).unwrap();
        assert_eq!(whole.len(), 4);
        for size in 1..20 {
            let chunks: Vec<&[u8]> = stream.chunks(size).collect();
            assert_eq!(cut(&chunks).unwrap(), whole);
        }
    }

    #[test]
    fn a_length_over_the_limit_is_refused_from_its_header_alone() {
        let header = (FRAME_MAX as u32 + 1).to_be_bytes();
        assert_eq!(cut(&[&header]), Err(Error::FrameTooLarge { bytes: FRAME_MAX + 1, max: FRAME_MAX }));
        assert!(cut(&[&u32::MAX.to_be_bytes()]).is_err());
    }

    #[test]
    fn an_announced_frame_takes_no_memory_before_its_bytes() {
        let mut frames = Frames::default();
        frames.feed(Bytes::copy_from_slice(&(FRAME_MAX as u32).to_be_bytes()));
        assert!(frames.next().unwrap().is_none());
        frames.feed(Bytes::from_static(&[0; 10]));
        assert!(frames.next().unwrap().is_none());
        assert!(frames.body.unwrap().0.capacity() < 1024);
    }
}
