//! The only place that asks what time it is (R14). Everyone else is handed a value from here.

use std::{
    sync::Mutex,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use reach_protocol::Stamp;

/// How often the clock ticks, in milliseconds.
pub const TICK_MS: u64 = 100;
/// The most that one tick may add, in milliseconds: a process that was stopped for longer has not
/// lived through that time, and nothing expires because of it.
const TICK_MAX_MS: u64 = 1_000;

/// This node's estimate of cluster time, and its calendar.
#[derive(Debug)]
pub struct Clock {
    started: Instant,
    estimate: Mutex<Estimate>,
}

#[derive(Debug)]
struct Estimate {
    cluster_ms: u64,
    wall_ms: u64,
    /// When the two were last advanced, on the monotonic clock.
    at_ms: u64,
    /// None until a leader has told it to this process: what the log holds may be long ago.
    calendar: Option<Calendar>,
}

/// The cluster's calendar at a moment of this node's monotonic clock.
#[derive(Clone, Copy, Debug)]
struct Calendar {
    wall_ms: u64,
    at_ms: u64,
}

impl Default for Clock {
    fn default() -> Self {
        let estimate = Estimate { cluster_ms: 0, wall_ms: 0, at_ms: 0, calendar: None };
        Self { started: Instant::now(), estimate: Mutex::new(estimate) }
    }
}

impl Clock {
    /// Milliseconds since this process started, by the monotonic clock.
    pub fn mono_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Cluster time now, as this node believes.
    pub fn cluster_ms(&self) -> u64 {
        self.advance(|estimate| estimate.cluster_ms)
    }

    /// The stamp of an entry that this node proposes as leader.
    pub fn stamp(&self) -> Stamp {
        let calendar = calendar_ms();
        self.advance(|estimate| {
            // Never decreasing, whatever happens to this machine's calendar.
            estimate.wall_ms = estimate.wall_ms.max(calendar);
            Stamp { cluster_ms: estimate.cluster_ms, wall_ms: estimate.wall_ms }
        })
    }

    /// An applied stamp: time can't be before it.
    pub fn applied(&self, stamp: Stamp) {
        self.advance(|estimate| {
            estimate.cluster_ms = estimate.cluster_ms.max(stamp.cluster_ms);
            estimate.wall_ms = estimate.wall_ms.max(stamp.wall_ms);
        });
    }

    /// The leader's word, once a second: the estimate follows it, except below what was applied.
    pub fn told(&self, stamp: Stamp, applied: Stamp) {
        self.advance(|estimate| {
            estimate.cluster_ms = stamp.cluster_ms.max(applied.cluster_ms);
            estimate.wall_ms = stamp.wall_ms.max(applied.wall_ms);
        });
    }

    /// The leader's calendar was `wall_ms` when this node's monotonic clock said `at_ms`.
    pub fn calendar_told(&self, wall_ms: u64, at_ms: u64) {
        self.advance(|estimate| estimate.calendar = Some(Calendar { wall_ms, at_ms }));
    }

    /// The cluster's calendar now: the leader's last word, and the monotonic time since. None until
    /// this process heard one.
    pub fn cluster_calendar_ms(&self) -> Option<u64> {
        let calendar = self.advance(|estimate| estimate.calendar)?;
        Some(calendar.wall_ms + self.mono_ms().saturating_sub(calendar.at_ms))
    }

    /// This machine's calendar minus the cluster's.
    pub fn offset_ms(&self) -> Option<i64> {
        Some(calendar_ms() as i64 - self.cluster_calendar_ms()? as i64)
    }

    /// Called every `TICK_MS`, so that a longer gap can only be a process that did not run.
    pub fn tick(&self) {
        self.advance(|_| ());
    }

    fn advance<T>(&self, read: impl FnOnce(&mut Estimate) -> T) -> T {
        let mut estimate = self.estimate.lock().expect("no panic while it is held");
        let now_ms = self.mono_ms();
        let passed_ms = (now_ms - estimate.at_ms.min(now_ms)).min(TICK_MAX_MS);
        estimate.cluster_ms += passed_ms;
        estimate.at_ms = now_ms;
        read(&mut estimate)
    }
}

/// This machine's calendar, in Unix milliseconds. Shown and compared with the cluster's; decides
/// nothing.
pub fn calendar_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clusters_calendar_is_a_leaders_word_and_goes_on_by_itself() {
        let clock = Clock::default();
        clock.applied(Stamp { cluster_ms: 5, wall_ms: 5_000 });
        clock.told(Stamp { cluster_ms: 6, wall_ms: 6_000 }, Stamp::default());
        assert_eq!(clock.cluster_calendar_ms(), None, "a stamp may be long ago");
        assert_eq!(clock.offset_ms(), None);
        let ahead_ms = 7_200_000;
        clock.calendar_told(calendar_ms() + ahead_ms, clock.mono_ms());
        let offset_ms = clock.offset_ms().unwrap() + ahead_ms as i64;
        assert!((-200..=200).contains(&offset_ms), "{offset_ms}");
        clock.calendar_told(1_000, clock.mono_ms());
        let later_ms = clock.cluster_calendar_ms().unwrap();
        assert!((1_000..1_500).contains(&later_ms), "{later_ms}");
        assert!(clock.cluster_calendar_ms().unwrap() >= later_ms);
    }

    #[test]
    fn applied_time_is_a_floor_and_the_leaders_word_is_followed() {
        let clock = Clock::default();
        let stamp = |cluster_ms| Stamp { cluster_ms, wall_ms: cluster_ms };
        clock.applied(stamp(5_000));
        assert!((5_000..5_500).contains(&clock.cluster_ms()));
        clock.told(stamp(9_000), stamp(5_000));
        assert!((9_000..9_500).contains(&clock.cluster_ms()));
        clock.told(stamp(4_000), stamp(5_000));
        assert!((5_000..5_500).contains(&clock.cluster_ms()));
        assert!(clock.stamp() <= clock.stamp());
    }
}
