//! The bounded queue in front of the log's writer. It keeps the order of the calls, makes callers
//! wait when the disk is slow, and knows since when its oldest write has been waiting.

use std::{
    collections::VecDeque,
    fmt, io,
    sync::{Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use bytes::Bytes;

use crate::store::{Done, MetaKey};

pub(crate) struct Job {
    pub write: u64,
    pub since: Instant,
    pub work: Work,
    pub done: Done,
}

pub(crate) enum Work {
    Append(Vec<(u64, Bytes)>),
    /// Entries `from..next` go; the log then ends at `end`.
    Truncate {
        from: u64,
        next: u64,
        end: u64,
    },
    /// Entries `first..next` go, all at or below `to`; there may be none.
    Purge {
        first: u64,
        next: u64,
        to: u64,
        mark: Bytes,
    },
    Meta(MetaKey, Bytes),
}

impl Job {
    fn bytes(&self) -> usize {
        match &self.work {
            Work::Append(entries) => entries.iter().map(|(_, content)| content.len()).sum(),
            Work::Truncate { .. } => 0,
            Work::Purge { mark: content, .. } | Work::Meta(_, content) => content.len(),
        }
    }
}

/// How much may wait: writes, and bytes of entries. A single larger write is still taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    pub writes: usize,
    pub bytes: usize,
}

/// One round of the writer shares an fsync, and stays small enough for one.
const ROUND_BYTES: usize = 8 << 20;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Of the jobs waiting and of those being written.
    writes: usize,
    bytes: usize,
    writing_since: Option<Instant>,
    /// A caller is writing: whoever comes meanwhile leaves its job to it.
    drained: bool,
    held: bool,
    end: End,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum End {
    #[default]
    Open,
    /// What waits is still written, nothing more is taken.
    Closed,
    /// The process is gone: nothing is written, nobody is called.
    Dead,
}

pub(crate) enum Round {
    Jobs(Vec<Job>),
    /// Nothing came in time.
    Idle,
    Closed,
}

pub(crate) struct Queue {
    room: Room,
    state: Mutex<State>,
    came: Condvar,
    went: Condvar,
}

impl Queue {
    pub fn new(room: Room) -> Self {
        Self { room, state: Mutex::default(), came: Condvar::new(), went: Condvar::new() }
    }

    /// Waits until a write is welcome. Whoever calls this keeps others from pushing meanwhile.
    pub fn wait_for_room(&self) {
        let full = |state: &mut State| {
            state.end == End::Open && (state.writes >= self.room.writes || state.bytes >= self.room.bytes)
        };
        drop(self.went.wait_while(self.state(), full).expect(POISON));
    }

    /// Gives the job back when the queue is closed.
    pub fn push(&self, job: Job) -> Result<(), Job> {
        let mut state = self.state();
        match state.end {
            End::Open => {}
            End::Closed => return Err(job),
            End::Dead => return Ok(()),
        }
        state.writes += 1;
        state.bytes += job.bytes();
        state.jobs.push_back(job);
        drop(state);
        self.came.notify_one();
        Ok(())
    }

    /// For the writer's own thread: waits for jobs, no longer than `patience`.
    pub fn wait(&self, patience: Option<Duration>) -> Round {
        let nothing = |state: &mut State| state.end == End::Open && (state.jobs.is_empty() || state.held);
        let mut state = match patience {
            None => self.came.wait_while(self.state(), nothing).expect(POISON),
            Some(patience) => {
                let waited = self.came.wait_timeout_while(self.state(), patience, nothing);
                let (state, timeout) = waited.expect(POISON);
                if timeout.timed_out() {
                    return Round::Idle;
                }
                state
            }
        };
        if state.jobs.is_empty() { Round::Closed } else { Round::Jobs(take(&mut state)) }
    }

    /// For callers that write themselves: the next jobs, unless another caller is at it. Must be
    /// called again until it gives none.
    pub fn drain(&self, mine: bool) -> Option<Vec<Job>> {
        let mut state = self.state();
        if state.drained && !mine {
            return None;
        }
        state.drained = !state.jobs.is_empty() && (!state.held || state.end != End::Open);
        state.drained.then(|| take(&mut state))
    }

    /// The jobs of the last round are done with.
    pub fn finished(&self, jobs: &[Job]) {
        let mut state = self.state();
        state.writing_since = None;
        state.writes -= jobs.len();
        state.bytes -= jobs.iter().map(Job::bytes).sum::<usize>();
        drop(state);
        self.went.notify_all();
    }

    pub fn oldest_age(&self) -> Duration {
        let state = self.state();
        let oldest = state.writing_since.or_else(|| state.jobs.front().map(|job| job.since));
        oldest.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Jobs wait and nothing is written until they are let go again.
    pub fn hold(&self, held: bool) {
        self.state().held = held;
        self.came.notify_all();
    }

    pub fn close(&self) {
        let mut state = self.state();
        if state.end == End::Open {
            state.end = End::Closed;
        }
        drop(state);
        self.came.notify_all();
        self.went.notify_all();
    }

    /// Ends everything at once, and hands out what was not written.
    pub fn kill(&self) -> Vec<Job> {
        let mut state = self.state();
        state.end = End::Dead;
        let jobs = state.jobs.drain(..).collect();
        drop(state);
        self.came.notify_all();
        self.went.notify_all();
        jobs
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(POISON)
    }
}

const POISON: &str = "nothing panics under the queue's lock";

fn take(state: &mut State) -> Vec<Job> {
    let mut bytes = 0;
    let mut jobs = Vec::new();
    while bytes < ROUND_BYTES
        && let Some(job) = state.jobs.pop_front()
    {
        bytes += job.bytes();
        jobs.push(job);
    }
    state.writing_since = jobs.first().map(|job| job.since);
    jobs
}

/// What a write finds when the store was closed before it came.
pub(crate) fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "the log is closed")
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        f.debug_struct("Queue")
            .field("writes", &state.writes)
            .field("bytes", &state.bytes)
            .field("held", &state.held)
            .field("end", &state.end)
            .finish_non_exhaustive()
    }
}
