//! The load: a closed loop with a fixed number of operations under way, a warm-up that isn't
//! counted, and a window that is.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU8, AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Context as _;
use futures_util::future::BoxFuture;
use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::process;

/// One operation, from its begin to its confirmation.
pub type Ask = Arc<dyn Fn() -> BoxFuture<'static, anyhow::Result<()>> + Send + Sync>;

/// The longest that operations under way at the end are waited for.
const LAST_MAX: Duration = Duration::from_secs(60);

const WARM_UP: u8 = 0;
const COUNTED: u8 = 1;
const OVER: u8 = 2;

#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub in_flight: usize,
    pub warm_up: Duration,
    pub counted: Duration,
}

/// What one window measured.
#[derive(Clone, Debug, Serialize)]
pub struct Window {
    /// Operations confirmed within the window.
    pub operations: u64,
    pub per_s: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub p999_ms: f64,
    /// CPU of all servers for one operation, in microseconds (so many tenths of a second for
    /// 100,000). None when the servers' processes are not known.
    pub cpu_us: Option<f64>,
    /// Of the server that had the most.
    pub peak_mib: Option<f64>,
    /// CPU of this process, clients and workers, for one operation, in microseconds.
    pub load_cpu_us: f64,
    /// What workers finished beside the operations, where the work has such.
    pub worked_per_s: Option<f64>,
}

impl Load {
    /// `worked` counts what is finished beside the operations. The first operation that fails
    /// fails the measurement.
    pub async fn run(self, ask: &Ask, pids: &[u32], worked: Option<&AtomicU64>) -> anyhow::Result<Window> {
        let phase = Arc::new(AtomicU8::new(WARM_UP));
        let askers: Vec<_> =
            (0..self.in_flight).map(|_| tokio::spawn(ask_on(ask.clone(), phase.clone()))).collect();
        sleep(self.warm_up).await;

        for pid in pids {
            process::reset_peak(*pid)?;
        }
        let worked_before = worked.map(|worked| worked.load(Ordering::Relaxed));
        let this = [std::process::id()];
        let (cpu_before, load_before) = (process::cpu(pids)?, process::cpu(&this)?);
        let started = Instant::now();
        phase.store(COUNTED, Ordering::SeqCst);
        sleep(self.counted).await;
        phase.store(OVER, Ordering::SeqCst);
        let took = started.elapsed();
        let (cpu, load_cpu) = (process::cpu(pids)? - cpu_before, process::cpu(&this)? - load_before);
        let worked_after = worked.map(|worked| worked.load(Ordering::Relaxed));
        let peaks = pids.iter().map(|pid| process::memory(*pid).map(|memory| memory.peak));
        let peak_mib = peaks.collect::<anyhow::Result<Vec<_>>>()?.into_iter().reduce(f64::max);

        let mut times = histogram();
        for asker in askers {
            let ended = tokio::time::timeout(LAST_MAX, asker).await;
            let of_one = ended.with_context(|| format!("no answer for {LAST_MAX:?}"))???;
            times.add(of_one).expect("they are made alike");
        }
        let operations = times.len();
        anyhow::ensure!(operations > 0, "not one operation was confirmed within {took:?}");
        let at = |quantile: f64| times.value_at_quantile(quantile) as f64 / 1e3;
        let each_us = |cpu: Duration| cpu.as_secs_f64() * 1e6 / operations as f64;
        let per_s = |count: u64| count as f64 / took.as_secs_f64();
        Ok(Window {
            operations,
            per_s: per_s(operations),
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            p999_ms: at(0.999),
            cpu_us: (!pids.is_empty()).then(|| each_us(cpu)),
            peak_mib,
            load_cpu_us: each_us(load_cpu),
            worked_per_s: worked_before.zip(worked_after).map(|(before, after)| per_s(after - before)),
        })
    }
}

/// One operation after the other. Counts those that end within the window, in microseconds.
async fn ask_on(ask: Ask, phase: Arc<AtomicU8>) -> anyhow::Result<Histogram<u64>> {
    let mut times = histogram();
    while phase.load(Ordering::SeqCst) != OVER {
        let asked = Instant::now();
        ask().await?;
        let took = asked.elapsed();
        if phase.load(Ordering::SeqCst) == COUNTED {
            times.saturating_record(took.as_micros() as u64);
        }
    }
    Ok(times)
}

/// From 1 µs to 10 minutes, with three digits.
fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 600_000_000, 3).expect("the bounds are in order")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn only_the_window_counts_and_the_loop_is_closed() {
        let (under_way, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let ask: Ask = {
            let most = most.clone();
            Arc::new(move || {
                let (under_way, most) = (under_way.clone(), most.clone());
                Box::pin(async move {
                    most.fetch_max(under_way.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    sleep(Duration::from_millis(10)).await;
                    under_way.fetch_sub(1, Ordering::SeqCst);
                    Ok(())
                })
            })
        };
        let load = Load { in_flight: 4, warm_up: Duration::from_secs(5), counted: Duration::from_secs(1) };
        let window = load.run(&ask, &[], None).await.unwrap();
        assert_eq!(most.load(Ordering::SeqCst), 4);
        // A hundred each, less or more at the window's edges; none of the five seconds before.
        assert!((392..=404).contains(&window.operations), "{window:?}");
        assert!((9.9..10.2).contains(&window.p50_ms) && window.per_s >= 390.0, "{window:?}");
        assert_eq!((window.cpu_us, window.peak_mib, window.worked_per_s), (None, None, None));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_operation_fails_the_measurement() {
        let ask: Ask = Arc::new(|| Box::pin(async { anyhow::bail!("refused") }));
        let load = Load { in_flight: 2, warm_up: Duration::ZERO, counted: Duration::from_secs(1) };
        assert_eq!(load.run(&ask, &[], None).await.unwrap_err().to_string(), "refused");
    }
}
