//! The newest entries in memory: what followers and apply read, nearly always. An entry that is
//! not yet on the disk is never dropped, so the disk is only asked for what it surely has.

use std::collections::VecDeque;

use bytes::Bytes;

#[derive(Default)]
pub(super) struct Tail {
    first: u64,
    entries: VecDeque<Held>,
    bytes: usize,
    bytes_max: usize,
}

struct Held {
    content: Bytes,
    /// The write that brings it to the disk.
    write: u64,
}

impl Tail {
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, ..Self::default() }
    }

    /// The lowest index held, `None` when there is none.
    pub fn first(&self) -> Option<u64> {
        (!self.entries.is_empty()).then_some(self.first)
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Entries must follow each other; the caller checks.
    pub fn push(&mut self, index: u64, content: Bytes, write: u64) {
        if self.entries.is_empty() {
            self.first = index;
        }
        self.bytes += content.len();
        self.entries.push_back(Held { content, write });
    }

    pub fn remove_from(&mut self, index: u64) {
        let keep = index.saturating_sub(self.first).min(self.entries.len() as u64);
        for held in self.entries.drain(keep as usize..) {
            self.bytes -= held.content.len();
        }
    }

    pub fn remove_below(&mut self, index: u64) {
        while !self.entries.is_empty() && self.first < index {
            self.drop_first();
        }
    }

    /// Everything up to `write` is on the disk: what is above the limit may go.
    pub fn shrink(&mut self, write: u64) {
        while self.bytes > self.bytes_max && self.entries.front().is_some_and(|held| held.write <= write) {
            self.drop_first();
        }
    }

    /// Entries `from..to` as far as they are held, until `bytes_max` is passed.
    pub fn read(&self, from: u64, to: u64, bytes_max: usize) -> Vec<(u64, Bytes)> {
        let mut bytes = 0usize;
        let skip = from.saturating_sub(self.first);
        let held = (self.first + skip..to).zip(self.entries.iter().skip(skip as usize));
        held.take_while(|(_, held)| {
            let fits = bytes <= bytes_max;
            bytes = bytes.saturating_add(held.content.len());
            fits
        })
        .map(|(index, held)| (index, held.content.clone()))
        .collect()
    }

    fn drop_first(&mut self) {
        if let Some(held) = self.entries.pop_front() {
            self.bytes -= held.content.len();
            self.first += 1;
        }
    }
}
