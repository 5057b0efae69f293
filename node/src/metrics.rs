//! What `/metrics` shows: every name stands here, with its meaning and unit. Labels are closed lists;
//! no id, payload or result is one.

use std::{collections::BTreeMap, fmt};

use metrics::{counter, describe_counter, describe_gauge, gauge, with_local_recorder};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use reach_protocol::AgentState;

use crate::node::{Shared, is_skewed};

const HTTP_ANSWERS: &str = "agent_reach_http_answers_total";
const LEADING: &str = "agent_reach_leading";
const TERM: &str = "agent_reach_term";
const APPLIED: &str = "agent_reach_applied_index";
const OFFSET: &str = "agent_reach_clock_offset_seconds";
const SKEWED: &str = "agent_reach_agents_skewed";
const LARGEST_OFFSET: &str = "agent_reach_agents_clock_offset_seconds";
const SESSIONS: &str = "agent_reach_sessions";
const AGENTS: &str = "agent_reach_agents";
const UNFINISHED: &str = "agent_reach_messages_unfinished";
const WAITING: &str = "agent_reach_messages_waiting";
const RULES: &str = "agent_reach_rules_revision";
const DISK_FREE: &str = "agent_reach_disk_free_bytes";
const MEMORY: &str = "process_resident_memory_bytes";
const CPU: &str = "process_cpu_seconds_total";

/// The figures of one node. Each node of a process has its own.
pub struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
}

impl Default for Metrics {
    fn default() -> Self {
        let recorder = PrometheusBuilder::new().build_recorder();
        with_local_recorder(&recorder, describe);
        let handle = recorder.handle();
        Self { recorder, handle }
    }
}

fn describe() {
    describe_counter!(HTTP_ANSWERS, "HTTP answers by method and status.");
    describe_gauge!(LEADING, "1 on the node that leads, else 0.");
    describe_gauge!(TERM, "The Raft term this node knows.");
    describe_gauge!(APPLIED, "Index of the last log entry applied here.");
    describe_gauge!(OFFSET, "This node's calendar against the cluster's, in seconds.");
    describe_gauge!(SKEWED, "Agents that are not offline and whose calendar is off by more than 500 ms.");
    describe_gauge!(
        LARGEST_OFFSET,
        "Of those agents, the calendar that is furthest from the cluster's, in seconds."
    );
    describe_gauge!(SESSIONS, "Agents whose session this node holds.");
    describe_gauge!(AGENTS, "Registered agents by state.");
    describe_gauge!(UNFINISHED, "Messages without an end.");
    describe_gauge!(WAITING, "Of those, messages that wait for an agent.");
    describe_gauge!(RULES, "Revision of the rules in force here.");
    describe_gauge!(DISK_FREE, "What the disk of this node's folder still has, in bytes.");
    describe_gauge!(MEMORY, "Memory of this process that is resident, in bytes.");
    describe_counter!(CPU, "Processor time of this process, user and system, in seconds.");
}

impl Metrics {
    pub fn http_answered(&self, method: &'static str, status: u16) {
        with_local_recorder(&self.recorder, || {
            counter!(HTTP_ANSWERS, "method" => method, "status" => status.to_string()).increment(1);
        });
    }

    /// Everything in Prometheus' text format, as it stands now.
    pub fn render(&self, shared: &Shared) -> String {
        let report = shared.report();
        let leading = shared.replica.leadership().borrow().leading;
        let (agents, unfinished, waiting, rules) = {
            let live = shared.replica.tables().live();
            let states = [AgentState::Ready, AgentState::Draining, AgentState::Offline];
            let mut agents: BTreeMap<AgentState, u64> = states.map(|state| (state, 0)).into();
            for record in live.agents.values() {
                *agents.entry(record.state).or_default() += 1;
            }
            (agents, live.messages.len(), live.waiting, live.rules.revision)
        };
        let (mut skewed, mut largest) = (0u64, 0i64);
        shared.heartbeats.each_offset(|_, offset_ms| {
            skewed += u64::from(is_skewed(offset_ms));
            if offset_ms.unsigned_abs() > largest.unsigned_abs() {
                largest = offset_ms;
            }
        });
        with_local_recorder(&self.recorder, || {
            gauge!(LEADING).set(f64::from(u8::from(leading)));
            gauge!(TERM).set(report.term as f64);
            gauge!(APPLIED).set(report.applied as f64);
            if let Some(offset_ms) = report.offset_ms {
                gauge!(OFFSET).set(offset_ms as f64 / 1e3);
            }
            gauge!(SKEWED).set(skewed as f64);
            gauge!(LARGEST_OFFSET).set(largest as f64 / 1e3);
            gauge!(SESSIONS).set(report.sessions as f64);
            for (state, count) in agents {
                gauge!(AGENTS, "state" => state.to_string()).set(count as f64);
            }
            gauge!(UNFINISHED).set(unfinished as f64);
            gauge!(WAITING).set(waiting as f64);
            gauge!(RULES).set(rules as f64);
            if let Some(bytes) = report.free_bytes {
                gauge!(DISK_FREE).set(bytes as f64);
            }
            if let Some(bytes) = resident_bytes() {
                gauge!(MEMORY).set(bytes as f64);
            }
            let cpu = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
            counter!(CPU).absolute(cpu.tv_sec as u64);
        });
        self.handle.render()
    }
}

/// Linux tells it in pages; elsewhere it is left out.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}
