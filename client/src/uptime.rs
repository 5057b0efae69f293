//! How long this run has lasted: monotonic, and going on while the machine is suspended, so that no
//! wrong calendar can make an old run look like the later one.

use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Started(Duration);

impl Started {
    pub(crate) fn now() -> Self {
        Self(boot_time())
    }

    pub(crate) fn uptime_ms(self) -> u64 {
        boot_time().saturating_sub(self.0).as_millis() as u64
    }
}

#[cfg(target_os = "linux")]
fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

/// Elsewhere suspension may not count: the standard library's clock is the best there is.
#[cfg(not(target_os = "linux"))]
fn boot_time() -> Duration {
    use std::{sync::OnceLock, time::Instant};
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed()
}
