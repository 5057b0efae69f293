//! Runs `testdata/*.txt`; `REWRITE=1` writes the answers anew, and the diff is the review.

use std::fmt::Write as _;

use datadriven::TestCase;
use reach_machine::Rows;
use reach_protocol::{
    AgentState, Command, Fact, Principal, Reply, Rules, StateReason, Target,
    command::{Decision, FailReason},
    message::{Holder, Warning},
};

mod world;

use world::{World, agent_id, capabilities, describe_state, msg_id, name};

#[test]
fn scripts_hold() {
    datadriven::walk("testdata", |file| {
        let mut world = World::new(rules());
        file.run(|case| {
            let mut case = case.clone();
            let before = world.proposed;
            let mut out = run(&mut world, &mut case);
            case.expect_empty().unwrap();
            // What was proposed by this and waits to be applied.
            let new = (world.proposed - before).min(world.log.len());
            for command in world.log.iter().skip(world.log.len() - new) {
                writeln!(out, "propose {}", describe(command)).unwrap();
            }
            for (ticket, reply) in world.answers.drain(..) {
                let Reply::Refused(error) = reply else { panic!("only refusals are answered here") };
                writeln!(out, "answer {ticket}: {error}").unwrap();
                let hint = error.hint.unwrap_or_default();
                writeln!(out, "  hint {hint:?}").unwrap();
            }
            if out.is_empty() { "ok\n".into() } else { out }
        });
    });
}

fn rules() -> Rules {
    let mut rules = Rules::default();
    rules.grants.operators.push(name("root"));
    rules
}

fn run(world: &mut World, case: &mut TestCase) -> String {
    let mut out = String::new();
    match case.directive.as_str() {
        // agent id=a tags=(x, y-0.5) [max=1 instance=i1]
        "agent" => {
            let id = agent_id(&case.take_arg::<String>("id").unwrap());
            let words = case.take_args::<String>("tags").unwrap();
            let tags: Vec<_> = words
                .iter()
                .map(|word| word.split_once('-').unwrap_or((word, "1")))
                .map(|(tag, weight)| (tag, weight.parse().unwrap()))
                .collect();
            let max = case.try_take_arg("max").unwrap().unwrap_or(1);
            let instance = case.try_take_arg::<String>("instance").unwrap();
            world.register(&id, &tags, max, instance.as_deref().unwrap_or("i1"));
        }
        "remove" => {
            let agent_id = agent_id(&case.take_arg::<String>("id").unwrap());
            let author = Principal::Agent(agent_id.clone());
            let instance = world.instance(&agent_id);
            world.propose(Command::Remove { agent_id, instance, author });
        }
        "drain" | "resume" => {
            let drains = case.directive == "drain";
            let agent_id = agent_id(&case.take_arg::<String>("id").unwrap());
            let drain_seq = world.drain_seq(&agent_id);
            let author = Principal::Loopback;
            world.propose(match drains {
                true => Command::Drain { agent_id, drain_seq, author },
                false => Command::Resume { agent_id, drain_seq, author },
            });
        }
        "liveness" => {
            let id = agent_id(&case.take_arg::<String>("id").unwrap());
            let (state, reason) = match case.take_arg::<String>("is").unwrap().as_str() {
                "ready" => (AgentState::Ready, StateReason::Returned),
                "draining" => (AgentState::Draining, StateReason::LoopSilent),
                "offline" => (AgentState::Offline, StateReason::ProcessSilent),
                other => panic!("unknown state {other}"),
            };
            world.set_liveness(&id, state, reason);
        }
        // submit id=m1 tags=(x) [prefer=(a)] | to=a [expires=900000]
        "submit" => {
            let id = case.take_arg::<String>("id").unwrap();
            let expires_in_ms = case.try_take_arg("expires").unwrap().unwrap_or(900_000);
            let target = target(case);
            world.submit(&id, target, expires_in_ms);
        }
        "received" => world.receive(&msg_id(&case.take_arg::<String>("id").unwrap())),
        "complete" => world.complete(&msg_id(&case.take_arg::<String>("id").unwrap())),
        "fail" => {
            let msg_id = msg_id(&case.take_arg::<String>("id").unwrap());
            let (attempt, holder) = world.attempt(&msg_id).unwrap();
            let (reason, message) = (FailReason::Error, String::new());
            world.propose(Command::Fail { msg_id, attempt, holder, reason, message });
        }
        // release id=m1 [of=a attempt=0]: by default of whoever has it.
        "release" => {
            let msg_id = msg_id(&case.take_arg::<String>("id").unwrap());
            let (attempt, holder) = match case.try_take_arg::<String>("of").unwrap() {
                None => world.attempt(&msg_id).unwrap(),
                Some(id) => {
                    let (agent_id, attempt) = (agent_id(&id), case.take_arg("attempt").unwrap());
                    let instance = world.instance(&agent_id).unwrap();
                    (attempt, Holder { agent_id, instance })
                }
            };
            world.propose(Command::Release { msg_id, attempt, holder });
        }
        // rules [wait-for-agent-ms=N waiting-max=N]
        "rules" => {
            let mut rules = rules();
            if let Some(ms) = case.try_take_arg("wait-for-agent-ms").unwrap() {
                rules.routing.wait_for_agent_ms = ms;
            }
            if let Some(max) = case.try_take_arg("waiting-max").unwrap() {
                rules.routing.waiting_max = max;
            }
            let author = Principal::User(name("root"));
            let text = format!("{rules:?}");
            world.propose(Command::ApplyRules { rules: Box::new(rules), text, expect: None, author });
        }
        // apply [n=1]: the next entry, by default everything that is on its way.
        "apply" => {
            let count = case.try_take_arg("n").unwrap().unwrap_or(usize::MAX);
            for applied in world.apply(count) {
                if let Reply::Refused(error) = &applied.reply {
                    writeln!(out, "refused {}: {}", describe(&applied.command), error.code).unwrap();
                }
                for fact in &applied.facts {
                    writeln!(out, "{}", describe_fact(fact)).unwrap();
                }
            }
        }
        // void: what is on its way does not get into the log.
        "void" => {
            let lost: Vec<_> = world.log.drain(..).collect();
            for command in &lost {
                world.handle(reach_scheduler::Input::Replied { command, reply: &Reply::Void });
            }
        }
        // unseen: the latest proposal stands first in the log, as if the scheduler had not known of it.
        "unseen" => {
            let command = world.log.pop_back().unwrap();
            world.handle(reach_scheduler::Input::Replied { command: &command, reply: &Reply::Void });
            world.log.push_front(command);
        }
        "advance" => world.advance(case.take_arg("ms").unwrap()),
        "lead" => world.lead(),
        "show" => {
            let id = msg_id(&case.take_arg::<String>("id").unwrap());
            let record = world.rows.message(&id).unwrap();
            let state = describe_state(&record.state);
            writeln!(out, "{id} {state} attempt {} {:?}", record.attempt, record.warnings).unwrap();
        }
        "figures" => {
            let due = world.scheduler.next_due().map(|due_ms| due_ms as i64 - world.now_ms as i64);
            writeln!(out, "{:?} next due in {due:?}", world.scheduler.figures()).unwrap();
        }
        other => panic!("unknown directive {other}"),
    }
    out
}

fn target(case: &mut TestCase) -> Target {
    if let Some(id) = case.try_take_arg::<String>("to").unwrap() {
        return Target::Agent(agent_id(&id));
    }
    let tags: Vec<String> = case.take_args("tags").unwrap();
    let prefer: Vec<String> = case.try_take_args("prefer").unwrap().unwrap_or_default();
    capabilities(&tags, &prefer)
}

fn describe(command: &Command) -> String {
    let warned = |warnings: &[Warning]| match warnings {
        [] => String::new(),
        _ => format!(" {warnings:?}"),
    };
    match command {
        Command::Submit(submit) => match &submit.decision {
            Decision::Give { holder, warnings } => {
                format!("submit {} to {}{}", submit.msg_id, holder.agent_id, warned(warnings))
            }
            Decision::Wait { reason, warnings } => {
                format!("submit {} waits ({}){}", submit.msg_id, reason.as_str(), warned(warnings))
            }
        },
        Command::Assign { msg_id, attempt, holder, warnings } => {
            format!("assign {msg_id} attempt {attempt} to {}{}", holder.agent_id, warned(warnings))
        }
        Command::Return { msg_id, attempt, holder, reason } => {
            format!("return {msg_id} attempt {attempt} of {} ({})", holder.agent_id, reason.as_str())
        }
        Command::Retake { msg_id, attempt, holder, to, warnings } => {
            let to = to.as_ref().map_or(String::new(), |to| format!(" for {}", to.agent_id));
            format!("retake {msg_id} attempt {attempt} of {}{to}{}", holder.agent_id, warned(warnings))
        }
        Command::TimeOut { msg_id } => format!("time out {msg_id}"),
        Command::GiveUp { msg_id, error } => format!("give up {msg_id}: {error}"),
        Command::FreeSlot { agent_id, msg_id, attempt } => {
            format!("free slot of {msg_id} attempt {attempt} at {agent_id}")
        }
        Command::Register { registration, instance, .. } => {
            format!("register {} {instance}", registration.agent_id)
        }
        Command::Remove { agent_id, .. } => format!("remove {agent_id}"),
        Command::SetLiveness { agent_id, state, .. } => format!("liveness {agent_id} {state}"),
        Command::Received { msg_id, .. } => format!("received {msg_id}"),
        Command::Complete { msg_id, .. } => format!("complete {msg_id}"),
        Command::Fail { msg_id, .. } => format!("fail {msg_id}"),
        Command::Release { msg_id, .. } => format!("release {msg_id}"),
        Command::Dispatched { msg_id, .. } => format!("dispatched {msg_id}"),
        Command::Drain { agent_id, .. } => format!("drain {agent_id}"),
        Command::Resume { agent_id, .. } => format!("resume {agent_id}"),
        Command::RemoveOffline { agent_id, .. } => format!("remove offline {agent_id}"),
        Command::PauseExpiry { .. } => "pause expiry".into(),
        Command::ExpireNow { .. } => "expire now".into(),
        Command::Observe { .. } => "observe".into(),
        Command::Init { .. } => "init".into(),
        Command::ApplyRules { .. } => "apply rules".into(),
        Command::Revoke { revoked, .. } => format!("revoke {revoked}"),
        Command::Publish { events, .. } => format!("publish {} events", events.len()),
        Command::SetTopic { event_type, .. }
        | Command::Trim { event_type, .. }
        | Command::RemoveTopic { event_type, .. } => format!("change topic {event_type}"),
        Command::CreateGroup { group, .. }
        | Command::ResetGroup { group, .. }
        | Command::RemoveGroup { group, .. }
        | Command::HandOut { group, .. }
        | Command::Say { group, .. } => format!("change group {group}"),
    }
}

fn describe_fact(fact: &Fact) -> String {
    match fact {
        Fact::Registered(record) => format!("registered {}/{}", record.agent_id(), record.instance),
        Fact::LivenessChanged(record) => format!("{} is {}", record.agent_id(), record.state),
        Fact::DrainChanged(record) => format!("{} is {}", record.agent_id(), record.state),
        Fact::Fenced { agent_id, instance } => format!("fenced {agent_id}/{instance}"),
        Fact::Removed { agent_id, .. } => format!("removed {agent_id}"),
        Fact::Freed { agent_id, msg_id, .. } => format!("freed {msg_id} at {agent_id}"),
        Fact::RulesChanged(rules) => format!("rules {}", rules.revision),
        Fact::Revoked(record) => format!("revoked {}", record.revoked),
        Fact::Appended(event_type) => format!("appended {event_type}"),
        Fact::GroupChanged(group) => format!("group_changed {group}"),
        message => {
            let record = message.message().expect("all others are about messages");
            format!("{} {}", record.msg_id, describe_state(&record.state))
        }
    }
}
