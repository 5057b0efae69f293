//! Runs `testdata/*.txt`; `REWRITE=1` writes the answers anew, and the diff is the review.

use std::{collections::BTreeMap, fmt::Write as _};

use datadriven::TestCase;
use reach_protocol::{
    AgentId, AgentState, Capability, InstanceId, Registration, Stamp, StateReason, Tag, Target,
    agent::AgentRecord,
};
use reach_routing::{Explanation, NoCandidate, Routed, Router};

#[test]
fn scripts_hold() {
    datadriven::walk("testdata", |file| {
        let mut router = Router::new();
        file.run(|case| run(&mut router, &mut case.clone()));
    });
}

fn run(router: &mut Router, case: &mut TestCase) -> String {
    let mut out = match case.directive.as_str() {
        // agent id=a tags=(x, y-0.5) [max=1 state=draining instance=i2 taken=0]
        "agent" => {
            let taken = case.try_take_arg("taken").unwrap().unwrap_or(0);
            router.put(&record(case), taken);
            "ok\n".to_string()
        }
        "remove" => {
            router.remove(&agent_id(&case.take_arg::<String>("id").unwrap()));
            "ok\n".to_string()
        }
        "take" => {
            let id = agent_id(&case.take_arg::<String>("id").unwrap());
            router.set_taken(&id, case.take_arg("n").unwrap());
            "ok\n".to_string()
        }
        "changing" => {
            let id = agent_id(&case.take_arg::<String>("id").unwrap());
            router.set_changing(&id, case.take_arg("is").unwrap());
            "ok\n".to_string()
        }
        // route tags=(x) [prefer=(a) avoid=(b) times=1] | route to=a
        "route" => {
            let times: u32 = case.try_take_arg("times").unwrap().unwrap_or(1);
            let (target, avoid) = target(case);
            (0..times).map(|_| describe(router.route(&target, &avoid))).collect()
        }
        "shares" => {
            let times: u32 = case.take_arg("times").unwrap();
            let (target, avoid) = target(case);
            let mut given = BTreeMap::<AgentId, u32>::new();
            for _ in 0..times {
                if let Routed::Give { holder, .. } = router.route(&target, &avoid) {
                    *given.entry(holder.agent_id).or_default() += 1;
                }
            }
            given.iter().fold(String::new(), |mut text, (id, count)| {
                writeln!(text, "{id} {count}").unwrap();
                text
            })
        }
        "outlook" => format!("{:?}\n", router.outlook(&target(case).0)),
        "explain" => {
            let (target, avoid) = target(case);
            explained(&router.explain(&target, &avoid))
        }
        other => format!("unknown directive {other}\n"),
    };
    case.expect_empty().unwrap();
    if out.is_empty() {
        out = "nothing\n".into();
    }
    out
}

fn agent_id(text: &str) -> AgentId {
    AgentId::parse(text).unwrap()
}

fn agent_ids(case: &mut TestCase, arg: &str) -> Vec<AgentId> {
    let words = case.try_take_args::<String>(arg).unwrap().unwrap_or_default();
    words.iter().map(|word| agent_id(word)).collect()
}

fn record(case: &mut TestCase) -> AgentRecord {
    let tags: Vec<String> = case.take_args("tags").unwrap();
    let capabilities = tags.iter().map(|word| {
        let (tag, weight) = word.split_once('-').unwrap_or((word, "1"));
        Capability::new(Tag::parse(tag).unwrap(), weight.parse().unwrap())
    });
    let id = agent_id(&case.take_arg::<String>("id").unwrap());
    let mut registration = Registration::new(id, capabilities.collect());
    registration.max_concurrency = case.try_take_arg("max").unwrap().unwrap_or(1);
    let state = case.try_take_arg::<String>("state").unwrap();
    let instance = case.try_take_arg::<String>("instance").unwrap().unwrap_or("i1".into());
    AgentRecord {
        registration,
        instance: InstanceId::parse(&instance).unwrap(),
        started_ms: 0,
        registered: Stamp::default(),
        state: match state.as_deref() {
            None => AgentState::Ready,
            Some("draining") => AgentState::Draining,
            Some("offline") => AgentState::Offline,
            Some(other) => panic!("unknown state {other}"),
        },
        reason: StateReason::Registered,
        since: Stamp::default(),
        liveness_seq: 0,
        drain: None,
        drain_seq: 0,
    }
}

fn target(case: &mut TestCase) -> (Target, Vec<AgentId>) {
    let avoid = agent_ids(case, "avoid");
    if let Some(id) = case.try_take_arg::<String>("to").unwrap() {
        return (Target::Agent(agent_id(&id)), avoid);
    }
    let tags: Vec<String> = case.take_args("tags").unwrap();
    let required = tags.iter().map(|tag| Tag::parse(tag).unwrap()).collect();
    (Target::Capabilities { required, preferred: agent_ids(case, "prefer") }, avoid)
}

fn describe(routed: Routed) -> String {
    match routed {
        Routed::Give { holder, warnings } => {
            format!("give {} {} {warnings:?}\n", holder.agent_id, holder.instance)
        }
        Routed::Wait { reason, warnings } => format!("wait {} {warnings:?}\n", reason.as_str()),
        Routed::NoCandidate(NoCandidate { missing, nearest }) => {
            format!("no candidate, missing {missing:?}, nearest {nearest:?}\n")
        }
    }
}

fn explained(explanation: &Explanation) -> String {
    let mut out = String::new();
    for stage in &explanation.stages {
        writeln!(out, "{}: {} of {}", stage.name, stage.passed, stage.entered).unwrap();
        for left_out in &stage.left_out {
            writeln!(out, "  {} {:?}", left_out.agent_id, left_out.why).unwrap();
        }
    }
    writeln!(out, "next: {:?}", explanation.next).unwrap();
    out
}
