//! What is printed: a table a row of work, ratios against every rival, and the bars we set ourselves.

use std::fmt::Write as _;

use serde::Serialize;

use crate::{
    agents::{crowd::Crowd, detect::Detect},
    failover::Failover,
    host::Host,
    idle::Idle,
    side_by_side::{Cell, Failed, Row},
    statistics::Spread,
    system::{System, Work},
};

/// Everything one run found out; `--json` writes it as it is.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub host: Host,
    pub systems: Vec<Measured>,
    /// Asked for and not there, with the reason.
    pub left_out: Vec<(System, String)>,
    pub settings: Settings,
    pub rows: Vec<Row>,
    pub ratios: Vec<Ratio>,
    pub failover: Vec<Failover>,
    pub idle: Vec<Idle>,
    pub crowds: Vec<Crowd>,
    pub detect: Option<Detect>,
    pub bars: Vec<Bar>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    pub system: System,
    pub version: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    pub servers: usize,
    pub warm_up_s: f64,
    pub counted_s: f64,
    pub repetitions: usize,
    pub via: crate::system::Via,
    pub acks: crate::system::Acks,
}

/// Ours over a rival's, in one row.
#[derive(Clone, Debug, Serialize)]
pub struct Ratio {
    pub work: Work,
    pub size: usize,
    pub in_flight: usize,
    pub rival: System,
    /// Above 1 where we do more.
    pub per_s: Spread,
    /// Below 1 where we are quicker.
    pub p50: Spread,
    pub cpu: Option<Spread>,
}

/// Something we hold ourselves to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bar {
    pub what: String,
    pub found: f64,
    pub at_least: Option<f64>,
    pub at_most: Option<f64>,
    pub met: bool,
}

impl Bar {
    fn at_least(what: impl Into<String>, found: f64, bound: f64) -> Self {
        Self { what: what.into(), found, at_least: Some(bound), at_most: None, met: found >= bound }
    }

    fn at_most(what: impl Into<String>, found: f64, bound: f64) -> Self {
        Self { what: what.into(), found, at_least: None, at_most: Some(bound), met: found <= bound }
    }
}

/// Of one row, against every rival in it.
pub fn ratios(row: &Row) -> Vec<Ratio> {
    let Some(ours) = row.cell(System::Ours) else { return Vec::new() };
    let against = |theirs: &Cell| {
        Some(Ratio {
            work: row.work,
            size: row.size,
            in_flight: row.in_flight,
            rival: theirs.system,
            per_s: Spread::ratio(&ours.per_s, &theirs.per_s)?,
            p50: Spread::ratio(&ours.p50_ms, &theirs.p50_ms)?,
            cpu: ours.cpu_us.as_ref().zip(theirs.cpu_us.as_ref()).and_then(|(o, t)| Spread::ratio(o, t)),
        })
    };
    row.cells.iter().filter(|cell| cell.system != System::Ours).filter_map(against).collect()
}

/// The bars that what was found allows to judge.
pub fn bars(report: &Report) -> Vec<Bar> {
    let mut bars = bars_of_work(&report.rows, &report.ratios, &report.failover, &report.idle);
    // Agents with a connection each are looked at, and held to nothing.
    for crowd in report.crowds.iter().filter(|crowd| crowd.connections < crowd.agents) {
        let Crowd { agents, connections, .. } = crowd;
        let of = format!("{agents} agents over {connections} connections");
        bars.push(Bar::at_most(format!("{of}: CPU of the three nodes, cores"), crowd.cores, 1.0));
        bars.push(Bar::at_most(format!("{of}: memory per agent and node, KiB"), crowd.kib_per_agent, 2.0));
        bars.push(Bar::at_most(format!("{of}: Raft entries meanwhile"), crowd.entries as f64, 0.0));
        let what = format!("{of}: registered and attached per second");
        bars.push(Bar::at_least(what, crowd.joined_per_s, 5_000.0));
        let lost = crowd.agents - crowd.ready.min(crowd.agents);
        bars.push(Bar::at_most(format!("{of}: not ready afterwards"), lost as f64, 0.0));
    }
    if let Some(Detect { killed_s, frozen_s, wrong }) = &report.detect {
        // A TTL and a second.
        bars.push(Bar::at_most("agent killed: offline after, worst, s", killed_s.max, 10.0));
        bars.push(Bar::at_most("agent's loop frozen: draining after, worst, s", frozen_s.max, 10.0));
        bars.push(Bar::at_most("agents in a state that was not theirs", *wrong as f64, 0.0));
    }
    bars
}

fn bars_of_work(rows: &[Row], ratios: &[Ratio], failover: &[Failover], idle: &[Idle]) -> Vec<Bar> {
    const SIZE: usize = 256;
    let ratio = |work, in_flight, rival| {
        ratios.iter().find(|ratio: &&Ratio| {
            (ratio.work, ratio.in_flight, ratio.size, ratio.rival) == (work, in_flight, SIZE, rival)
        })
    };
    let mut bars = Vec::new();
    let always = System::JetstreamAlways;
    let default = System::JetstreamDefault;
    for (work, rival, bound) in
        [(Work::Submit, always, 1.5), (Work::RoundTrip, always, 6.0), (Work::RoundTrip, default, 3.0)]
    {
        if let Some(ratio) = ratio(work, 256, rival) {
            let what = format!("{} per second, 256 B, 256 in flight, times {}", work.name(), rival.name());
            bars.push(Bar::at_least(what, ratio.per_s.median, bound));
        }
    }
    let submit = rows.iter().find(|row| (row.work, row.in_flight, row.size) == (Work::Submit, 256, SIZE));
    if let Some(cpu) = submit.and_then(|row| row.cell(System::Ours)).and_then(|cell| cell.cpu_us.as_ref()) {
        let what = "server CPU per accepted submission, 256 B, 256 in flight, all nodes, µs";
        bars.push(Bar::at_most(what, cpu.median, 40.0));
    }
    for work in [Work::Submit, Work::RoundTrip] {
        for (rival, bound) in [(always, 0.5), (default, 1.0)] {
            if let Some(ratio) = ratio(work, 1, rival) {
                let what = format!("{} p50, 256 B, 1 in flight, share of {}", work.name(), rival.name());
                bars.push(Bar::at_most(what, ratio.p50.median, bound));
            }
        }
    }
    if let Some(ours) = failover.iter().find(|failover| failover.system == System::Ours) {
        let what = "leader killed: longest time without an accepted write, median, s";
        bars.push(Bar::at_most(what, ours.without_write_s.median, 2.0));
    }
    if let Some(ours) = idle.iter().find(|idle| idle.system == System::Ours) {
        bars.push(Bar::at_most("memory of an idle node, MiB", ours.resident_mib.max, 80.0));
    }
    bars
}

/// A row as a table, with the ratios below it.
pub fn row(row: &Row) -> String {
    let Row { work, size, in_flight, .. } = row;
    let mut text = format!("\n{} · {size} B · {in_flight} in flight\n", work.name());
    table(
        &mut text,
        [
            "",
            "per s",
            "p50 ms",
            "p99 ms",
            "p99.9 ms",
            "server CPU µs",
            "peak MiB",
            "load CPU µs",
            "worked per s",
        ],
    );
    for cell in &row.cells {
        let or_dash = |spread: &Option<Spread>| spread.as_ref().map_or("–".into(), Spread::to_string);
        let columns = [
            cell.system.name(),
            cell.per_s.to_string(),
            cell.p50_ms.to_string(),
            cell.p99_ms.to_string(),
            cell.p999_ms.to_string(),
            or_dash(&cell.cpu_us),
            or_dash(&cell.peak_mib),
            or_dash(&cell.load_cpu_us),
            or_dash(&cell.worked_per_s),
        ];
        table(&mut text, columns.each_ref().map(String::as_str));
    }
    for Failed { system, reason } in &row.failed {
        let what = reason.lines().next().unwrap_or_default();
        writeln!(text, "  {:<18}  FAILED: {what}", system.name()).expect("a string takes all");
    }
    for ratio in ratios(row) {
        let cpu = ratio.cpu.map(|cpu| format!(" · CPU × {cpu}")).unwrap_or_default();
        let (rival, per_s, p50) = (ratio.rival.name(), &ratio.per_s, &ratio.p50);
        writeln!(text, "  ours : {rival:<18} per s × {per_s} · p50 × {p50}{cpu}")
            .expect("a string takes all");
    }
    text
}

pub fn failovers(failovers: &[Failover]) -> String {
    let mut text = String::from("\nleader killed with kill -9: longest time without an accepted write, s\n");
    for failover in failovers {
        let (name, spread) = (failover.system.name(), &failover.without_write_s);
        writeln!(text, "  {name:<18} {spread}").expect("a string takes all");
    }
    text
}

pub fn idles(idles: &[Idle]) -> String {
    let mut text = String::from("\nidle cluster: memory of a node, MiB, and CPU of all, % of a core\n");
    for idle in idles {
        let (name, memory, cpu) = (idle.system.name(), &idle.resident_mib, idle.cpu_percent);
        writeln!(text, "  {name:<18} {memory:<24} {cpu:.1}").expect("a string takes all");
    }
    text
}

pub fn crowd(crowd: &Crowd) -> String {
    let Crowd { agents, connections, joined_per_s, cores, load_cores, kib_per_agent, .. } = crowd;
    let Crowd { watched_s, entries, ready, .. } = crowd;
    format!(
        "\n{agents} agents over {connections} connections, both heartbeats, {watched_s:.0} s
  registered and attached    {joined_per_s:.0} per s
  CPU of the three nodes     {cores:.2} cores, {:.1} µs per agent and second (load: {load_cores:.2} cores)
  memory per agent and node  {kib_per_agent:.2} KiB
  Raft entries               {entries}
  ready afterwards           {ready}\n",
        1e6 * cores / *agents as f64,
    )
}

pub fn detect(detect: &Detect) -> String {
    let Detect { killed_s, frozen_s, wrong } = detect;
    format!(
        "\nagents killed and frozen, seconds until it shows: median (range)
  kill -9 → offline          {killed_s}
  loop frozen → draining     {frozen_s}
  in a wrong state           {wrong}\n"
    )
}

pub fn judged(bars: &[Bar]) -> String {
    let mut text = String::from("\nbars\n");
    for bar in bars {
        let mark = if bar.met { "✓" } else { "✗" };
        let bound = match (bar.at_least, bar.at_most) {
            (Some(bound), _) => format!("at least {bound}"),
            (None, Some(bound)) => format!("at most {bound}"),
            (None, None) => String::new(),
        };
        writeln!(text, "  {mark} {}: {:.2} ({bound})", bar.what, bar.found).expect("a string takes all");
    }
    text
}

fn table(text: &mut String, columns: [&str; 9]) {
    let [name, rest @ ..] = columns;
    write!(text, "  {name:<18}").expect("a string takes all");
    for column in rest {
        write!(text, "  {column:<20}").expect("a string takes all");
    }
    text.truncate(text.trim_end_matches(' ').len());
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Window;

    fn window(per_s: f64, p50_ms: f64, cpu_us: f64) -> Window {
        Window {
            operations: per_s as u64,
            per_s,
            p50_ms,
            p99_ms: 2.0 * p50_ms,
            p999_ms: 3.0 * p50_ms,
            cpu_us: Some(cpu_us),
            peak_mib: None,
            load_cpu_us: 50.0,
            worked_per_s: None,
        }
    }

    fn row_of(work: Work, in_flight: usize, cells: &[(System, Window)]) -> Row {
        let cells =
            cells.iter().map(|(system, window)| Cell::of(*system, std::slice::from_ref(window)).unwrap());
        Row { work, size: 256, in_flight, cells: cells.collect(), failed: Vec::new() }
    }

    #[test]
    fn bars_are_judged_against_the_right_rival() {
        let rows = [
            row_of(
                Work::Submit,
                256,
                &[
                    (System::Ours, window(60_000.0, 4.0, 30.0)),
                    (System::JetstreamAlways, window(30_000.0, 8.0, 47.0)),
                    (System::JetstreamDefault, window(66_000.0, 3.0, 23.0)),
                ],
            ),
            row_of(
                Work::RoundTrip,
                1,
                &[
                    (System::Ours, window(500.0, 2.0, 100.0)),
                    (System::JetstreamAlways, window(190.0, 5.0, 490.0)),
                    (System::JetstreamDefault, window(330.0, 1.0, 210.0)),
                ],
            ),
        ];
        let ratios: Vec<Ratio> = rows.iter().flat_map(super::ratios).collect();
        let judged: Vec<(f64, bool)> =
            bars_of_work(&rows, &ratios, &[], &[]).iter().map(|bar| (bar.found, bar.met)).collect();
        // Submissions, CPU, then the round trip's p50 against `always` and against the default.
        assert_eq!(judged, [(2.0, true), (30.0, true), (0.4, true), (2.0, false)]);
    }

    #[test]
    fn a_row_without_us_has_no_ratios() {
        let row = row_of(Work::Submit, 256, &[(System::Etcd, window(1.0, 1.0, 1.0))]);
        assert!(ratios(&row).is_empty());
        assert!(super::row(&row).contains("etcd"));
    }
}
