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
    monotonic: Monotonic,
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

/// Milliseconds since this process started.
#[derive(Debug)]
enum Monotonic {
    Since(Instant),
    /// A test's own.
    #[cfg(test)]
    Simulated(std::sync::Arc<std::sync::atomic::AtomicU64>),
}

impl Monotonic {
    fn ms(&self) -> u64 {
        match self {
            Self::Since(started) => started.elapsed().as_millis() as u64,
            #[cfg(test)]
            Self::Simulated(ms) => ms.load(std::sync::atomic::Ordering::Relaxed),
        }
    }
}

/// The cluster's calendar at a moment of this node's monotonic clock.
#[derive(Clone, Copy, Debug)]
struct Calendar {
    wall_ms: u64,
    at_ms: u64,
}

impl Default for Clock {
    fn default() -> Self {
        Self::of(Monotonic::Since(Instant::now()))
    }
}

impl Clock {
    fn of(monotonic: Monotonic) -> Self {
        let estimate = Estimate { cluster_ms: 0, wall_ms: 0, at_ms: 0, calendar: None };
        Self { monotonic, estimate: Mutex::new(estimate) }
    }

    /// Milliseconds since this process started, by the monotonic clock.
    pub fn mono_ms(&self) -> u64 {
        self.monotonic.ms()
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
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    };

    use reach_machine::{MemoryRows, Outcome, Position, Rows, apply};
    use reach_protocol::{
        Capability, Command, Envelope, Json, MsgId, Principal, Registration, Rules, Target, TraceId,
        codec::Encoded,
        command::{Decision, Submit},
        message::{Holder, StateName},
    };
    use reach_scheduler::{Input, Output, Scheduler};

    use super::*;

    const HOUR_MS: u64 = 3_600_000;

    /// The clocks of three nodes, in a time of our own, and the one state that all of them have.
    struct Nodes {
        time_ms: Arc<AtomicU64>,
        clocks: Vec<Clock>,
        leader: usize,
        /// Ticks of this node are left out: its process stands still.
        stopped: Option<usize>,
        rows: MemoryRows,
        applied: Position,
        stamp: Stamp,
    }

    impl Nodes {
        fn new() -> Self {
            let time_ms = Arc::new(AtomicU64::new(0));
            let clock = |_| Clock::of(Monotonic::Simulated(time_ms.clone()));
            let clocks = (0..3).map(clock).collect();
            let (rows, applied, stamp) = (MemoryRows::new(), Position::default(), Stamp::default());
            let mut nodes = Self { time_ms, clocks, leader: 0, stopped: None, rows, applied, stamp };
            let init = Command::Init { cluster: "test".parse().unwrap(), rules: Box::new(Rules::default()) };
            nodes.enter(&init);
            nodes
        }

        fn now_ms(&self) -> u64 {
            self.time_ms.load(Ordering::Relaxed)
        }

        /// One entry of the leader's, applied everywhere.
        fn enter(&mut self, command: &Command) {
            self.stamp = self.clocks[self.leader].stamp();
            self.applied.index += 1;
            let Outcome { writes, .. } = apply(&self.rows, self.applied, self.stamp, command);
            self.rows.write(writes);
            self.clocks.iter().for_each(|clock| clock.applied(self.stamp));
        }

        /// A tick of every node; once a second the leader tells the others its time.
        fn tick(&mut self) {
            self.time_ms.fetch_add(TICK_MS, Ordering::Relaxed);
            let runs = |node: usize| Some(node) != self.stopped;
            let told = self.now_ms().is_multiple_of(1_000).then(|| self.clocks[self.leader].stamp());
            for (_, clock) in self.clocks.iter().enumerate().filter(|(node, _)| runs(*node)) {
                clock.tick();
            }
            for (node, clock) in self.clocks.iter().enumerate() {
                if let Some(stamp) = told.filter(|_| runs(node) && node != self.leader) {
                    clock.told(stamp, self.stamp);
                }
            }
        }
    }

    #[test]
    fn an_idle_hour_and_then_another_leader_move_no_deadline() {
        let mut nodes = Nodes::new();
        // The cluster is as old as one that has been at work.
        (0..600).for_each(|_| nodes.tick());
        let msg_id = MsgId::parse("m").unwrap();
        let holder = Holder { agent_id: "works".parse().unwrap(), instance: "i1".parse().unwrap() };
        let capabilities = vec![Capability::new("x".parse().unwrap(), 1.0)];
        let submit = Submit {
            msg_id: msg_id.clone(),
            trace_id: TraceId::parse("t").unwrap(),
            envelope: Encoded::new(&Envelope::request(Vec::new(), Json::null())),
            parent: None,
            flow_seq: None,
            source: "asks".parse().unwrap(),
            target: Target::Agent(holder.agent_id.clone()),
            content_hash: [0; 16],
            shape: String::new(),
            expires_in_ms: HOUR_MS + 300_000,
            author: Principal::Loopback,
            decision: Decision::Give { holder: holder.clone(), warnings: Vec::new() },
        };
        nodes.enter(&Command::Register {
            registration: Box::new(Registration::new(holder.agent_id.clone(), capabilities)),
            instance: holder.instance.clone(),
            started_ms: 0,
            author: Principal::Agent(holder.agent_id.clone()),
        });
        nodes.enter(&Command::Submit(Box::new(submit)));
        nodes.enter(&Command::Received { msg_id: msg_id.clone(), attempt: 0, holder });
        assert_eq!(nodes.rows.message(&msg_id).unwrap().state.name(), StateName::Acknowledged);
        let due_ms = nodes.now_ms() + HOUR_MS + 300_000;

        // Not one entry for an hour. The next leader's process stands still for a minute of it.
        for second in 0..HOUR_MS / 1_000 {
            nodes.stopped = (600..660).contains(&second).then_some(1);
            (0..1_000 / TICK_MS).for_each(|_| nodes.tick());
        }
        // A clock that began anew would have lost the hour, and the deadline would come as much later.
        let anew = Clock::of(Monotonic::Simulated(Arc::default()));
        anew.applied(nodes.stamp);
        assert!(nodes.clocks[1].cluster_ms() - anew.cluster_ms() > HOUR_MS - TICK_MAX_MS);
        nodes.leader = 1;
        // As a leader begins.
        nodes.clocks[1].applied(nodes.stamp);
        let mut scheduler = Scheduler::new(nodes.rows.live(), nodes.clocks[1].cluster_ms());
        let ended_ms = loop {
            let outputs = scheduler.handle(Input::Tick, nodes.clocks[1].cluster_ms());
            for output in outputs {
                let Output::Propose { command, .. } = output else { panic!("nobody asked") };
                assert!(matches!(command, Command::TimeOut { .. }), "{command:?}");
                nodes.enter(&command);
            }
            if nodes.rows.message(&msg_id).unwrap().state.name() == StateName::Timeout {
                break nodes.now_ms();
            }
            assert!(nodes.now_ms() < due_ms + HOUR_MS, "it never ended");
            nodes.tick();
        };
        assert!((due_ms..=due_ms + TICK_MS).contains(&ended_ms), "due at {due_ms}, ended at {ended_ms}");
    }

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
