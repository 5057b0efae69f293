//! The same work against every system in turn: A, B, C, A, B, C, so that what disturbs the machine
//! for a while disturbs all of them. Every measurement has a cluster of its own, with nothing in it.

use std::{path::PathBuf, time::Duration};

use serde::Serialize;

use crate::{
    load::{Load, Window},
    statistics::Spread,
    system::{Acks, Cluster, Programs, System, Via, Work},
};

#[derive(Clone, Debug)]
pub struct Plan {
    pub systems: Vec<System>,
    pub works: Vec<Work>,
    pub in_flight: Vec<usize>,
    pub sizes: Vec<usize>,
    pub warm_up: Duration,
    pub counted: Duration,
    pub repetitions: usize,
    pub via: Via,
    pub acks: Acks,
    pub programs: Programs,
    /// Where servers keep their data.
    pub data: PathBuf,
}

/// One row of a table: a kind of work, and what each system made of it.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub work: Work,
    pub size: usize,
    pub in_flight: usize,
    pub cells: Vec<Cell>,
    /// What could not be measured, and why: the other systems' figures stand.
    pub failed: Vec<Failed>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Failed {
    pub system: System,
    /// Its first line says what; the servers' last words may follow.
    pub reason: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Cell {
    pub system: System,
    pub per_s: Spread,
    pub p50_ms: Spread,
    pub p99_ms: Spread,
    pub p999_ms: Spread,
    pub cpu_us: Option<Spread>,
    pub peak_mib: Option<Spread>,
    pub load_cpu_us: Option<Spread>,
    pub worked_per_s: Option<Spread>,
}

impl Cell {
    pub fn of(system: System, windows: &[Window]) -> Option<Self> {
        let spread = |value: fn(&Window) -> f64| Spread::of(windows.iter().map(value));
        let partly = |value: fn(&Window) -> Option<f64>| {
            let values: Option<Vec<f64>> = windows.iter().map(value).collect();
            values.and_then(Spread::of)
        };
        Some(Self {
            system,
            per_s: spread(|window| window.per_s)?,
            p50_ms: spread(|window| window.p50_ms)?,
            p99_ms: spread(|window| window.p99_ms)?,
            p999_ms: spread(|window| window.p999_ms)?,
            cpu_us: partly(|window| window.cpu_us),
            peak_mib: partly(|window| window.peak_mib),
            load_cpu_us: spread(|window| window.load_cpu_us),
            worked_per_s: partly(|window| window.worked_per_s),
        })
    }
}

impl Row {
    pub fn cell(&self, system: System) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.system == system)
    }
}

impl Plan {
    /// Every combination, the quick ones to look at first.
    fn rows(&self) -> Vec<(Work, usize, usize)> {
        let mut rows = Vec::new();
        for work in &self.works {
            for size in &self.sizes {
                rows.extend(self.in_flight.iter().map(|in_flight| (*work, *size, *in_flight)));
            }
        }
        rows
    }

    pub fn measurements(&self) -> usize {
        let of_row = |work: Work| self.systems.iter().filter(|system| system.does(work)).count();
        self.rows().into_iter().map(|(work, ..)| of_row(work) * self.repetitions).sum()
    }

    /// Hands over each row as it is complete.
    pub async fn run(&self, mut each: impl FnMut(&Row)) -> Vec<Row> {
        let mut rows = Vec::new();
        for (work, size, in_flight) in self.rows() {
            let systems: Vec<System> =
                self.systems.iter().copied().filter(|system| system.does(work)).collect();
            let mut windows: Vec<Vec<Window>> = vec![Vec::new(); systems.len()];
            let mut failed: Vec<Failed> = Vec::new();
            for _ in 0..self.repetitions {
                for (system, windows) in systems.iter().zip(&mut windows) {
                    if failed.iter().any(|failed| failed.system == *system) {
                        continue;
                    }
                    match self.measure(*system, work, size, in_flight).await {
                        Ok(window) => windows.push(window),
                        Err(error) => failed.push(Failed { system: *system, reason: format!("{error:#}") }),
                    }
                }
            }
            let whole = systems.iter().zip(&windows).filter(|(_, windows)| windows.len() == self.repetitions);
            let cells = whole.filter_map(|(system, windows)| Cell::of(*system, windows)).collect();
            let row = Row { work, size, in_flight, cells, failed };
            each(&row);
            rows.push(row);
        }
        rows
    }

    async fn measure(
        &self,
        system: System,
        work: Work,
        size: usize,
        in_flight: usize,
    ) -> anyhow::Result<Window> {
        let mut cluster = Cluster::start(system, &self.programs, &self.data, self.acks).await?;
        let worker = cluster.prepare(work, in_flight, self.via).await?;
        let leader = cluster.leader().await?;
        let ask = cluster.asker(work, size, self.via.server(leader)).await?;
        let load = Load { in_flight, warm_up: self.warm_up, counted: self.counted };
        let worked = (work == Work::Worked).then_some(&*worker.done);
        let window = load.run(&ask, &cluster.servers().pids(), worked).await;
        cluster.all_run()?;
        window.map_err(|error| anyhow::anyhow!("{error:#}\n{}", cluster.servers().logs()))
    }
}
