//! Questions to a trace: who got how many, what became of one message, how far a job is.

use std::collections::BTreeMap;

use reach_protocol::{
    AgentId, MsgId, Target,
    message::{Hop, MessageRecord, StateName},
};

/// The capability that a message asks for; the demo asks for one at a time.
pub fn capability(record: &MessageRecord) -> String {
    match &record.target {
        Target::Agent(agent_id) => agent_id.to_string(),
        Target::Capabilities { required, .. } => {
            required.iter().map(ToString::to_string).collect::<Vec<_>>().join("+")
        }
    }
}

/// The hops of each message, in the order of the trace.
pub fn by_message(hops: &[Hop]) -> BTreeMap<&MsgId, Vec<&Hop>> {
    let mut by_message: BTreeMap<&MsgId, Vec<&Hop>> = BTreeMap::new();
    for hop in hops {
        by_message.entry(&hop.msg_id).or_default().push(hop);
    }
    by_message
}

/// How often each agent was chosen for a first attempt at a message with this capability, before
/// the cluster's time was `before_ms`.
pub fn choices(
    records: &BTreeMap<MsgId, MessageRecord>,
    hops: &[Hop],
    wanted: &str,
    before_ms: u64,
) -> BTreeMap<AgentId, u64> {
    let mut choices = BTreeMap::new();
    for hop in hops.iter().filter(|hop| hop.to == StateName::Matched && hop.attempt == 0) {
        let counts = hop.at.cluster_ms < before_ms
            && records.get(&hop.msg_id).is_some_and(|record| capability(record) == wanted);
        if let Some(holder) = hop.holder.as_ref().filter(|_| counts) {
            *choices.entry(holder.agent_id.clone()).or_default() += 1;
        }
    }
    choices
}

/// Every attempt with its agent and how it ended, on one line.
pub fn story(hops: &[&Hop]) -> String {
    let mut words: Vec<String> = Vec::new();
    let mut since_ms = 0;
    for hop in hops {
        let agent = hop.holder.as_ref().map_or("nobody", |holder| holder.agent_id.as_str());
        match hop.to {
            StateName::Matched => {
                words.push(format!("attempt {} to {agent}", hop.attempt));
                since_ms = hop.at.cluster_ms;
            }
            StateName::Acknowledged if hop.from == Some(StateName::Acknowledged) => {
                words.push(format!("taken up again by the next run of {agent}"));
            }
            StateName::Acknowledged => words.push("received".into()),
            StateName::Pending if hop.from.is_some() => {
                let after = hop.at.cluster_ms.saturating_sub(since_ms) as f64 / 1000.0;
                words.push(format!("{} after {after:.1} s", hop.reason.as_deref().unwrap_or("returned")));
            }
            StateName::Completed => words.push(format!("completed by {agent}")),
            StateName::Failed | StateName::Timeout => {
                words.push(format!("{} ({})", hop.to, hop.reason.as_deref().unwrap_or("no reason")));
            }
            StateName::Pending | StateName::Dispatched => {}
        }
    }
    words.join(" · ")
}

/// The longest time between two completions, in milliseconds.
pub fn longest_pause_ms(hops: &[Hop]) -> u64 {
    let mut ends: Vec<u64> =
        hops.iter().filter(|hop| hop.to == StateName::Completed).map(|hop| hop.at.wall_ms).collect();
    ends.sort_unstable();
    ends.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
}

#[cfg(test)]
pub mod tests {
    use reach_protocol::{
        InstanceId, MessageState, Principal, Stamp, Tag, TraceId,
        id::Name,
        message::{Holder, Outcome, PendingReason},
    };

    use super::*;

    /// A trace put together by hand.
    pub struct Script {
        pub records: BTreeMap<MsgId, MessageRecord>,
        pub hops: Vec<Hop>,
    }

    fn holder(agent: &str) -> Holder {
        Holder { agent_id: AgentId::parse(agent).unwrap(), instance: InstanceId::parse("i1").unwrap() }
    }

    impl Script {
        pub fn new() -> Self {
            Self { records: BTreeMap::new(), hops: Vec::new() }
        }

        pub fn message(&mut self, name: &str, capability: &str) {
            let msg_id = MsgId::parse(name).unwrap();
            let record = MessageRecord {
                msg_id: msg_id.clone(),
                trace_id: TraceId::parse("t").unwrap(),
                flow_seq: self.records.len() as u64,
                parent: None,
                source: AgentId::parse("planner").unwrap(),
                principal: Principal::User(Name::parse("me").unwrap()),
                target: Target::Capabilities {
                    required: vec![Tag::parse(capability).unwrap()],
                    preferred: Vec::new(),
                },
                content_hash: [0; 16],
                shape: String::new(),
                accepted: Stamp::default(),
                expires_ms: 0,
                state: MessageState::Pending { reason: PendingReason::Saturated },
                since: Stamp::default(),
                attempt: 0,
                retries: 0,
                retry_at_ms: None,
                avoid: Vec::new(),
                warnings: Vec::new(),
            };
            self.records.insert(msg_id, record);
        }

        pub fn hop(
            &mut self,
            name: &str,
            at_ms: u64,
            from: Option<StateName>,
            to: StateName,
            attempt: u32,
            agent: Option<&str>,
        ) {
            let msg_id = MsgId::parse(name).unwrap();
            let record = self.records.get_mut(&msg_id).expect("the message comes before its hops");
            record.attempt = attempt;
            if let (Some(agent), StateName::Completed) = (agent, to) {
                let outcome = Outcome { excerpt: String::new(), cost: None, result_bytes: 0 };
                record.state = MessageState::Completed { holder: holder(agent), outcome };
            }
            let returned = (to == StateName::Pending && from.is_some()).then(|| "agent_lost".to_string());
            let at = Stamp { cluster_ms: at_ms, wall_ms: at_ms };
            self.hops.push(Hop {
                msg_id,
                at,
                from,
                to,
                attempt,
                holder: agent.map(holder),
                reason: returned,
            });
        }
    }

    #[test]
    fn first_choices_of_the_capability_are_counted_until_the_time() {
        let mut script = Script::new();
        for (at, agent) in ["a", "a", "b", "a"].into_iter().enumerate() {
            let name = format!("m{at}");
            script.message(&name, if at == 1 { "docs.check" } else { "code.scan" });
            script.hop(&name, at as u64 * 10, Some(StateName::Pending), StateName::Matched, 0, Some(agent));
        }
        script.hop("m2", 25, Some(StateName::Pending), StateName::Matched, 1, Some("a"));
        let choices = choices(&script.records, &script.hops, "code.scan", 30);
        let choices: Vec<_> = choices.iter().map(|(agent, count)| (agent.as_str(), *count)).collect();
        assert_eq!(choices, [("a", 1), ("b", 1)]);
    }

    #[test]
    fn a_story_names_each_attempt_and_its_end() {
        let mut script = Script::new();
        script.message("m", "code.scan");
        script.hop("m", 0, None, StateName::Pending, 0, None);
        script.hop("m", 0, Some(StateName::Pending), StateName::Matched, 0, Some("scan_b"));
        script.hop("m", 9500, Some(StateName::Matched), StateName::Pending, 1, Some("scan_b"));
        script.hop("m", 9510, Some(StateName::Pending), StateName::Matched, 1, Some("scan_a"));
        script.hop("m", 9520, Some(StateName::Matched), StateName::Acknowledged, 1, Some("scan_a"));
        script.hop("m", 9800, Some(StateName::Acknowledged), StateName::Completed, 1, Some("scan_a"));
        let hops: Vec<&Hop> = script.hops.iter().collect();
        assert_eq!(
            story(&hops),
            "attempt 0 to scan_b · agent_lost after 9.5 s · attempt 1 to scan_a · received · completed by scan_a"
        );
        assert_eq!(longest_pause_ms(&script.hops), 0);
    }
}
