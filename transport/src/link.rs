//! A link: one long-lived stream in each direction, frames coalesced into few writes. A frame over
//! 64 KiB travels on a stream of its own, so that small ones don't wait behind it; a mark in the
//! main stream counts it. Small frames keep their order among themselves, big ones keep none.

use std::{
    collections::VecDeque,
    fmt, mem,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::{BufMut, Bytes, BytesMut};
use reach_protocol::limits::FRAME_MAX;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    task::{AbortHandle, JoinError, JoinSet},
    time::timeout,
};

use crate::{
    error::{Error, SendError},
    framing::{Frames, HEADER, Item, MARK},
    options::Options,
    wire::{CloseCode, Receiver, Sender, Wire},
};

/// Larger frames travel on their own.
const SMALL_BYTES_MAX: usize = 64 * 1024;
/// A write is made when this much is together, or nothing more waits.
const WRITE_BYTES: usize = 64 * 1024;
/// What a queued frame is counted with beyond its bytes, so that empty ones are bounded too.
const FRAME_OVERHEAD: usize = 64;
/// How long a link that was let go may take to bring its last frames over.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The first byte of a one-way stream.
pub(crate) const TAG_WELCOME: u8 = 1;
const TAG_LINK: u8 = 2;
const TAG_BIG: u8 = 3;

/// Sends frames without ever waiting. When the last clone is dropped, what is queued is still sent
/// and the other side's `recv` ends.
pub struct LinkTx {
    queue: Arc<Queue>,
}

/// Reads from the network on demand: a reader that stops stops the sender.
pub struct LinkRx {
    wire: Wire,
    main: Main,
    frames: Frames,
    big: mpsc::Receiver<Big>,
    /// Big frames that the main stream has counted, less those that came.
    big_missing: i64,
    /// A big frame was read after the last chunk: the main stream's turn.
    main_next: bool,
    ended: bool,
    acceptor: AbortHandle,
}

enum Main {
    Awaited(oneshot::Receiver<MainStream>),
    Open(Receiver),
}

/// The stream and what came with its tag.
type MainStream = (Receiver, Bytes);

struct Big {
    frame: Bytes,
    /// Makes room for the next one when this one is read.
    _room: OwnedSemaphorePermit,
}

pub(crate) fn start(wire: &Wire, options: &Options) -> (LinkTx, LinkRx) {
    let queue = Arc::new(Queue::new(options.queue_bytes_max));
    tokio::spawn(run_writer(wire.clone(), queue.clone()));

    let (main_tx, main_rx) = oneshot::channel();
    let (big_tx, big_rx) = mpsc::channel(options.big_frames_max.max(1) as usize);
    let acceptor =
        tokio::spawn(run_acceptor(wire.clone(), main_tx, big_tx, options.big_frames_max.max(1) as usize));
    let rx = LinkRx {
        wire: wire.clone(),
        main: Main::Awaited(main_rx),
        frames: Frames::default().with_marks(),
        big: big_rx,
        big_missing: 0,
        main_next: false,
        ended: false,
        acceptor: acceptor.abort_handle(),
    };
    (LinkTx { queue }, rx)
}

impl LinkTx {
    /// Queues a frame. An error means that it was not sent; `Full` leaves it to the caller whether
    /// to wait or to close the connection.
    pub fn send(&self, frame: Bytes) -> Result<(), SendError> {
        if frame.len() > FRAME_MAX {
            return Err(SendError::TooLarge);
        }
        self.queue.push(frame)
    }

    /// Bytes that wait to be written.
    pub fn queued_bytes(&self) -> usize {
        self.queue.lock().bytes
    }

    pub fn is_closed(&self) -> bool {
        self.queue.lock().closed
    }
}

impl Clone for LinkTx {
    fn clone(&self) -> Self {
        self.queue.lock().senders += 1;
        Self { queue: self.queue.clone() }
    }
}

impl Drop for LinkTx {
    fn drop(&mut self) {
        let mut state = self.queue.lock();
        state.senders -= 1;
        if state.senders == 0 {
            state.closed = true;
            self.queue.changed.notify_one();
        }
    }
}

impl LinkRx {
    /// The next frame, or none when the other side has let its link go or the connection is closed
    /// (`Connection::closed` says why). Cancel-safe.
    pub async fn recv(&mut self) -> Option<Bytes> {
        match self.next().await {
            Ok(frame) => frame,
            Err(error) => {
                // A frame is missing: the link can't go on, and nobody must take it for whole.
                self.wire.close(CloseCode::Protocol, &error.to_string());
                None
            }
        }
    }

    async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            match self.frames.next()? {
                Some(Item::Frame(frame)) => return Ok(Some(frame)),
                Some(Item::Mark) => {
                    self.big_missing += 1;
                    continue;
                }
                None => {}
            }
            if self.ended && self.big_missing <= 0 {
                return Ok(None);
            }
            // In turns, so that neither kind starves the other, and without chance.
            if !mem::replace(&mut self.main_next, true)
                && let Ok(big) = self.big.try_recv()
            {
                return Ok(Some(self.arrived(big)));
            }
            tokio::select! {
                biased;
                chunk = self.main.read(), if !self.ended => match chunk? {
                    Some(chunk) => {
                        self.frames.feed(chunk);
                        self.main_next = false;
                    }
                    None if self.frames.is_between() => self.ended = true,
                    None => return Err(Error::closed("the link ended within a frame")),
                },
                big = self.big.recv() => {
                    let Some(big) = big else { return Ok(None) };
                    return Ok(Some(self.arrived(big)));
                }
            }
        }
    }

    fn arrived(&mut self, big: Big) -> Bytes {
        self.big_missing -= 1;
        big.frame
    }
}

impl Drop for LinkRx {
    fn drop(&mut self) {
        self.acceptor.abort();
    }
}

impl Main {
    async fn read(&mut self) -> Result<Option<Bytes>, Error> {
        if let Self::Awaited(stream) = self {
            let Ok((receiver, rest)) = stream.await else {
                // The acceptor has gone, so the connection has.
                return Ok(None);
            };
            *self = Self::Open(receiver);
            if !rest.is_empty() {
                return Ok(Some(rest));
            }
        }
        let Self::Open(receiver) = self else { unreachable!("opened above") };
        receiver.read().await
    }
}

/// Frames that wait for the writer. Bounded by bytes, not by their number.
struct Queue {
    state: Mutex<QueueState>,
    bytes_max: usize,
    /// There is something to write, or it is closed.
    changed: Notify,
}

struct QueueState {
    frames: VecDeque<Bytes>,
    /// Of the frames above, and of those in the writer's hands.
    bytes: usize,
    senders: usize,
    closed: bool,
}

impl Queue {
    fn new(bytes_max: usize) -> Self {
        let state = QueueState { frames: VecDeque::new(), bytes: 0, senders: 1, closed: false };
        Self { state: Mutex::new(state), bytes_max, changed: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().expect("nothing panics under this lock")
    }

    fn push(&self, frame: Bytes) -> Result<(), SendError> {
        let bytes = frame.len() + FRAME_OVERHEAD;
        let mut state = self.lock();
        if state.closed {
            return Err(SendError::Closed);
        }
        // An empty queue takes any frame, or a small queue could never carry a big one.
        if state.bytes > 0 && state.bytes + bytes > self.bytes_max {
            return Err(SendError::Full);
        }
        state.bytes += bytes;
        state.frames.push_back(frame);
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// All that waits; none when no more can come.
    async fn take(&self) -> Option<VecDeque<Bytes>> {
        loop {
            {
                let mut state = self.lock();
                if !state.frames.is_empty() {
                    return Some(mem::take(&mut state.frames));
                }
                if state.closed {
                    return None;
                }
            }
            self.changed.notified().await;
        }
    }

    fn written(&self, bytes: usize) {
        self.lock().bytes -= bytes;
    }

    fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.frames.clear();
    }
}

async fn run_writer(wire: Wire, queue: Arc<Queue>) {
    let result = tokio::select! {
        biased;
        result = write(&wire, &queue) => result,
        error = wire.closed() => Err(error),
    };
    queue.close();
    if let Err(error) = result {
        tracing::debug!(peer = %wire.remote_addr(), reason = %error, "link closed");
        // After a failed write the other side misses frames: it must not wait for them.
        wire.close(CloseCode::Done, &format!("the link was lost: {error}"));
    }
}

async fn write(wire: &Wire, queue: &Arc<Queue>) -> Result<(), Error> {
    let mut stream = wire.open_uni().await?;
    let mut big = JoinSet::new();
    let mut buffer = BytesMut::new();
    buffer.put_u8(TAG_LINK);
    while let Some(frames) = queue.take().await {
        // Nothing is kept for the next time: a quiet link costs no memory.
        let bytes = |frame: &Bytes| frame.len().min(SMALL_BYTES_MAX) + FRAME_OVERHEAD;
        buffer.reserve(frames.iter().map(bytes).sum::<usize>().min(2 * WRITE_BYTES));
        let mut pending = 0;
        for frame in frames {
            if frame.len() <= SMALL_BYTES_MAX {
                pending += frame.len() + FRAME_OVERHEAD;
                buffer.put_u32(frame.len() as u32);
                buffer.put_slice(&frame);
            } else {
                buffer.put_u32(frame.len() as u32 | MARK);
                big.spawn(write_big(wire.clone(), queue.clone(), frame));
            }
            if buffer.len() >= WRITE_BYTES {
                stream.write(mem::take(&mut buffer).freeze()).await?;
                queue.written(mem::take(&mut pending));
            }
        }
        stream.write(mem::take(&mut buffer).freeze()).await?;
        queue.written(pending);
        while let Some(done) = big.try_join_next() {
            joined(done)?;
        }
    }
    let flush = async {
        while let Some(done) = big.join_next().await {
            joined(done)?;
        }
        finish(&mut stream).await
    };
    match timeout(FLUSH_TIMEOUT, flush).await {
        Ok(result) => result,
        Err(_) => Err(Error::closed("the last frames of the link were not taken in time")),
    }
}

/// A task is cancelled only when the whole runtime ends.
fn joined(done: Result<Result<(), Error>, JoinError>) -> Result<(), Error> {
    done.unwrap_or_else(|_| Err(Error::closed("this process is ending")))
}

/// The other side bounds how many of these are open at once.
async fn write_big(wire: Wire, queue: Arc<Queue>, frame: Bytes) -> Result<(), Error> {
    let bytes = frame.len();
    let mut stream = wire.open_uni().await?;
    let mut head = BytesMut::with_capacity(1 + HEADER);
    head.put_u8(TAG_BIG);
    head.put_u32(bytes as u32);
    stream.write(head.freeze()).await?;
    stream.write(frame).await?;
    queue.written(bytes + FRAME_OVERHEAD);
    finish(&mut stream).await
}

async fn finish(stream: &mut Sender) -> Result<(), Error> {
    stream.finish()?;
    stream.delivered().await
}

/// Takes the one-way streams of the other side: its link's main stream and its big frames.
async fn run_acceptor(wire: Wire, main: oneshot::Sender<MainStream>, big: mpsc::Sender<Big>, big_max: usize) {
    // One more, so that the main stream finds room among big frames that overtook it.
    let room = Arc::new(Semaphore::new(big_max + 1));
    let main = Arc::new(Mutex::new(Some(main)));
    let mut readers: JoinSet<Result<(), Error>> = JoinSet::new();
    loop {
        let permit = room.clone().acquire_owned().await.expect("never closed");
        let stream = tokio::select! {
            biased;
            Some(done) = readers.join_next() => {
                // A frame is missing: the link can't go on.
                if let Ok(Err(error)) = done {
                    wire.close(CloseCode::Protocol, &error.to_string());
                }
                continue;
            }
            stream = wire.accept_uni() => stream,
        };
        let Ok(stream) = stream else { return };
        readers.spawn(read_stream(stream, main.clone(), big.clone(), permit));
    }
}

async fn read_stream(
    mut stream: Receiver,
    main: Arc<Mutex<Option<oneshot::Sender<MainStream>>>>,
    big: mpsc::Sender<Big>,
    room: OwnedSemaphorePermit,
) -> Result<(), Error> {
    let Some((tag, rest)) = first_byte(&mut stream).await? else {
        return Err(Error::closed("a stream without a tag"));
    };
    match tag {
        TAG_LINK => {
            let Some(main) = main.lock().expect("nothing panics under this lock").take() else {
                return Err(Error::closed("a second link on one connection"));
            };
            // Unread when the `LinkRx` was dropped: nobody wants it.
            let _ = main.send((stream, rest));
            Ok(())
        }
        TAG_BIG => {
            let mut frames = Frames::new(rest);
            let frame = loop {
                if let Some(Item::Frame(frame)) = frames.next()? {
                    break frame;
                }
                match stream.read().await? {
                    Some(chunk) => frames.feed(chunk),
                    None => return Err(Error::closed("a stream ended within its frame")),
                }
            };
            // Read to its end: to let go of a stream before that is to refuse it.
            if !frames.is_between() || stream.read().await?.is_some() {
                return Err(Error::closed("bytes after a stream's frame"));
            }
            let _ = big.send(Big { frame, _room: room }).await;
            Ok(())
        }
        _ => Err(Error::closed("a stream with an unknown tag")),
    }
}

/// The tag of a stream and what came with it; none when it ended before.
pub(crate) async fn first_byte(stream: &mut Receiver) -> Result<Option<(u8, Bytes)>, Error> {
    loop {
        let Some(mut chunk) = stream.read().await? else { return Ok(None) };
        if !chunk.is_empty() {
            let rest = chunk.split_off(1);
            return Ok(Some((chunk[0], rest)));
        }
    }
}

impl fmt::Debug for LinkTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkTx").field("queued_bytes", &self.queued_bytes()).finish_non_exhaustive()
    }
}

impl fmt::Debug for LinkRx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LinkRx").finish_non_exhaustive()
    }
}
