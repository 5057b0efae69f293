//! Any program as an agent: a command per task, and per event it subscribes to. It reads the envelope as JSON from its standard
//! input and writes its result to standard output; file descriptor 3 takes one JSON object a line
//! (`excerpt`, `cost`, `progress`); its exit status says how it went.

use std::{process::Stdio, sync::Arc, time::Duration};

use command_fds::{CommandFdExt, FdMapping};
use reach_client::{Agent, Done, Failure, RunningAgent, Status, Stopped, Task};
use reach_config::Contexts;
use reach_protocol::{AgentId, Json, Limits, Money, Name, event::DeliveredEvent};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    process::Command,
};

use crate::{
    cli::{
        self,
        args::{AgentsRun, ExcerptFrom, Global},
    },
    guard::Guard,
    show,
};

/// The descriptor for what is said beside the result.
const SIDE_FD: i32 = 3;
/// Bytes kept of what the command writes to standard error: its last words.
const STDERR_KEPT: usize = 4 << 10;

/// Moving to another node is faster, and needs no word.
const LOST_AFTER: Duration = Duration::from_secs(3);

/// From sysexits.h: `EX_DATAERR`, `EX_UNAVAILABLE`, `EX_TEMPFAIL`.
const UNPARSEABLE: i32 = 65;
const REFUSED: i32 = 69;
const BUSY: i32 = 75;

/// A command line that is run once per task.
#[derive(Debug)]
pub struct Program {
    pub program: String,
    pub args: Vec<String>,
    pub excerpt_from: ExcerptFrom,
}

/// `agents run`: attaches the agent and serves until it is interrupted or fenced.
pub async fn serve(args: &AgentsRun, contexts: &Contexts, global: &Global) -> Result<(), cli::Failure> {
    let [program, rest @ ..] = &args.command[..] else {
        return Err(cli::Failure::usage("give the command after --"));
    };
    if !is_there(program) {
        return Err(cli::Failure::usage(format!(
            "there is no command {program}: check its path, or the PATH"
        )));
    }
    let agent_id = args.id.clone().map_or_else(|| default_id(program), Ok)?;
    let context = contexts.current(global.context.as_deref())?;
    let options = crate::online::options_as(&context, global, &agent_id)?;
    let program =
        Arc::new(Program { program: program.clone(), args: rest.to_vec(), excerpt_from: args.excerpt_from });

    // Not in the context's folder: what an agent has answered for outlives a context.
    let inbox = contexts.home().join("inboxes").join(context.cluster.as_str()).join(agent_id.as_str());
    let mut agent = Agent::builder(&*agent_id).max_concurrency(args.slots).inbox_dir(inbox);
    for capability in &args.capabilities {
        agent = agent.capability(capability.name.as_str(), capability.weight);
    }
    for (key, value) in &args.metadata {
        agent = agent.metadata(key, Json::from_value(&value.as_str().into()));
    }
    if let Ok(host) = std::fs::read_to_string("/etc/hostname") {
        agent = agent.host(host.trim());
    }
    if !args.subscriptions.is_empty() {
        agent = agent.events_at_once(args.slots as usize);
        for (to, group) in &args.subscriptions {
            agent = agent.subscribe(to.as_str(), group.as_deref());
        }
        let (program, agent_id) = (program.clone(), agent_id.clone());
        agent = agent.on_events(move |event, context| {
            let (program, agent_id) = (program.clone(), agent_id.clone());
            async move {
                let place = format!("event {} of {}", event.event.offset, event.event.event_type);
                let ended = program.run_on_event(&event, context.group()).await;
                if let Err(failure) = &ended {
                    eprintln!("{agent_id}: {} {place}; it comes again, or is a dead letter", what(failure));
                }
                ended
            }
        });
    }
    let remarks = agent_id.clone();
    let handler = move |task: Task| {
        let (program, agent_id) = (program.clone(), remarks.clone());
        async move {
            let (msg_id, attempt) = (task.msg_id.clone(), task.attempt);
            let ended = program.run(task).await;
            if let Err(failure) = &ended {
                let what = what(failure);
                eprintln!(
                    "{agent_id}: {what} {msg_id} (attempt {attempt}); `agent-reach messages show {msg_id}` says why"
                );
            }
            ended
        }
    };
    let running = agent.handler(handler).connect(options).await?;
    let tags: Vec<&str> = args.capabilities.iter().map(|capability| capability.name.as_str()).collect();
    println!("{agent_id} serves {} · Ctrl-C lets running tasks end and stops it", tags.join(", "));
    tokio::select! {
        () = crate::dev::interrupted() => {
            tokio::select! {
                _ = running.shutdown() => println!("{agent_id} stopped"),
                // Who asks twice does not want to wait; what runs stays in the inbox for the next run.
                () = crate::dev::interrupted() => println!("{agent_id} stopped at once"),
            }
            Ok(())
        }
        stopped = watch(&running) => match stopped {
            Stopped::Fenced(reply) | Stopped::Refused(reply) => Err(reply.into()),
            Stopped::Failed(reason) => Err(cli::Failure::refused(reason)),
            Stopped::Asked | Stopped::Aborted => Ok(()),
        },
    }
}

/// Says when the cluster is out of reach for longer than a change of nodes takes, and when it is
/// back. Returns at the run's end.
async fn watch(running: &RunningAgent) -> Stopped {
    let mut status = running.state();
    let mut lost = false;
    loop {
        let next = running.changed(&status);
        status = match (&status, lost) {
            (Status::Stopped(stopped), _) => return stopped.clone(),
            (Status::Connecting, false) => match tokio::time::timeout(LOST_AFTER, next).await {
                Ok(next) => next,
                Err(_) => {
                    lost = true;
                    eprintln!(
                        "{}: no node answers; running tasks go on, and it comes back when one does",
                        running.agent_id()
                    );
                    continue;
                }
            },
            _ => next.await,
        };
        if let Status::Attached { node } | Status::Draining { node } = &status
            && std::mem::take(&mut lost)
        {
            eprintln!("{}: attached again, at {node}", running.agent_id());
        }
    }
}

/// Without the reason, which may be content.
fn what(failure: &Failure) -> &'static str {
    match failure {
        Failure::Error(_) => "failed at",
        Failure::Unparseable(_) => "can't parse",
        Failure::Refused(_) => "refused",
        Failure::Busy(_) => "was too busy for",
    }
}

/// As the system would look for it: by its path, or in the folders of `PATH`.
fn is_there(program: &str) -> bool {
    if program.contains('/') {
        return std::path::Path::new(program).is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

/// The host's name and the command's: the same on every start.
fn default_id(program: &str) -> Result<AgentId, cli::Failure> {
    let host = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
    let command = std::path::Path::new(program).file_stem().and_then(|stem| stem.to_str()).unwrap_or("agent");
    let text: String = format!("{}.{command}", host.trim())
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' })
        .take(64)
        .collect();
    AgentId::parse(text.trim_matches('.'))
        .map_err(|error| cli::Failure::usage(format!("{error}: give one with --id")))
}

/// What a command may say on descriptor 3, one object a line. `progress` is read and goes nowhere
/// in this version.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Said {
    excerpt: Option<String>,
    cost: Option<Money>,
    #[allow(dead_code, reason = "a legal line whose content this version has no use for")]
    progress: Option<serde_json::Value>,
}

impl Program {
    pub async fn run(self: Arc<Self>, task: Task) -> Result<Done, Failure> {
        let variables = [
            ("AGENT_REACH_MSG_ID", task.msg_id.to_string()),
            ("AGENT_REACH_TRACE_ID", task.trace_id.to_string()),
            ("AGENT_REACH_ATTEMPT", task.attempt.to_string()),
            ("AGENT_REACH_RESUMED", u8::from(task.resumed).to_string()),
        ];
        let (result, said) = self.execute(&variables, task.envelope.to_json().to_string()).await?;
        let result = result.map_err(|error| Failure::Error(format!("its output: {error}")))?;
        let said = said.map_err(Failure::Error)?;
        let text = String::from_utf8(result)
            .map_err(|_| Failure::Error("its output is not UTF-8 text: write JSON or text".into()))?;
        Ok(self.done(&text, said, Limits::default().excerpt_bytes))
    }

    /// The same for an event. What it writes goes nowhere; its exit status says whether it is done.
    async fn run_on_event(self: Arc<Self>, delivered: &DeliveredEvent, group: &Name) -> Result<(), Failure> {
        let event = &delivered.event;
        let mut variables = vec![
            ("AGENT_REACH_EVENT_TYPE", event.event_type.to_string()),
            ("AGENT_REACH_OFFSET", event.offset.to_string()),
            ("AGENT_REACH_GROUP", group.to_string()),
            ("AGENT_REACH_DELIVERIES", delivered.deliveries.to_string()),
        ];
        variables.extend(event.msg_id.as_ref().map(|msg_id| ("AGENT_REACH_MSG_ID", msg_id.to_string())));
        variables.extend(event.trace_id.as_ref().map(|id| ("AGENT_REACH_TRACE_ID", id.to_string())));
        self.execute(&variables, show::delivered_json(delivered).to_string()).await.map(|_| ())
    }

    /// Runs the command once: its output, and what it said on the side.
    async fn execute(
        &self,
        variables: &[(&str, String)],
        input: String,
    ) -> Result<(std::io::Result<Vec<u8>>, Result<Said, String>), Failure> {
        let limits = Limits::default();
        let failed = |what: &str, error: std::io::Error| Failure::Error(format!("{what}: {error}"));

        let (mut side, side_writer) = tokio_pipe().map_err(|error| failed("no pipe", error))?;
        let guard = Guard::start().map_err(|error| failed("no guard process", error))?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A group of its own: Ctrl-C is for us, who let it end, and a cancelled task takes along
            // whatever its command has started.
            .process_group(guard.group());
        command
            .fd_mappings(vec![FdMapping { parent_fd: side_writer, child_fd: SIDE_FD }])
            .map_err(|error| Failure::Error(format!("descriptor {SIDE_FD} can't be given: {error}")))?;
        let mut child = command.spawn().map_err(|error| failed(&self.program, error))?;
        // The command object keeps our end of the pipe; without this the side channel never ends.
        drop(command);

        let mut stdin = child.stdin.take().expect("asked for above");
        let feed = async move {
            // A command that doesn't read its input is within its rights.
            let _ = stdin.write_all(input.as_bytes()).await;
            let _ = stdin.shutdown().await;
        };
        let stdout = child.stdout.take().expect("asked for above");
        let stderr = child.stderr.take().expect("asked for above");
        let (_, result, last_words, said, status) = tokio::join!(
            feed,
            read_at_most(stdout, limits.result_bytes),
            read_tail(stderr),
            read_side(&mut side),
            child.wait()
        );
        let status = status.map_err(|error| failed(&self.program, error))?;
        guard.leave().await;
        match status.code() {
            Some(0) => Ok((result, said)),
            Some(UNPARSEABLE) => Err(Failure::Unparseable(words(&last_words, "it can't parse the content"))),
            Some(REFUSED) => Err(Failure::Refused(words(&last_words, "it refuses the task"))),
            Some(BUSY) => Err(Failure::Busy(words(&last_words, "it is busy"))),
            _ => Err(Failure::Error(format!("{status}; {}", words(&last_words, "it said nothing")))),
        }
    }

    /// JSON output is the result; any other text is a JSON string of it. The excerpt is a line of it
    /// unless the command gave one.
    fn done(&self, text: &str, said: Said, excerpt_bytes: usize) -> Done {
        let text = text.trim_end();
        let result = match Json::parse(text) {
            Ok(json) => json,
            Err(_) => Json::from_value(&serde_json::Value::String(text.to_string())),
        };
        let excerpt = said.excerpt.unwrap_or_else(|| self.excerpt_from.choose(text).to_string());
        let done = Done::new(result).excerpt(cut(&excerpt, excerpt_bytes));
        match said.cost {
            Some(cost) => done.cost(cost),
            None => done,
        }
    }
}

fn cut(text: &str, bytes: usize) -> String {
    let mut end = bytes.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_string()
}

fn words(last: &[u8], otherwise: &str) -> String {
    let text = String::from_utf8_lossy(last);
    text.lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .map_or(otherwise.to_string(), |line| cut(line.trim(), 512))
}

fn tokio_pipe() -> std::io::Result<(tokio::net::unix::pipe::Receiver, std::os::fd::OwnedFd)> {
    let (reader, writer) = std::io::pipe()?;
    let reader = tokio::net::unix::pipe::Receiver::from_owned_fd(reader.into())?;
    Ok((reader, writer.into()))
}

async fn read_at_most(mut from: impl AsyncReadExt + Unpin, bytes_max: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    (&mut from).take(bytes_max as u64 + 1).read_to_end(&mut bytes).await?;
    if bytes.len() > bytes_max {
        // The rest is read and dropped, so that the command does not hang on a full pipe.
        tokio::io::copy(&mut from, &mut tokio::io::sink()).await?;
        return Err(std::io::Error::other(format!("more than the limit of {bytes_max} bytes")));
    }
    Ok(bytes)
}

async fn read_tail(mut from: impl AsyncReadExt + Unpin) -> Vec<u8> {
    let mut tail = Vec::new();
    let mut chunk = [0; 4096];
    while let Ok(count) = from.read(&mut chunk).await
        && count > 0
    {
        tail.extend_from_slice(&chunk[..count]);
        let extra = tail.len().saturating_sub(STDERR_KEPT);
        tail.drain(..extra);
    }
    tail
}

/// The last word on each subject counts.
async fn read_side(from: &mut tokio::net::unix::pipe::Receiver) -> Result<Said, String> {
    let mut said = Said::default();
    let mut lines = BufReader::new(from).lines();
    let mut problem = None;
    while let Ok(Some(line)) = lines.next_line().await {
        if line.trim().is_empty() {
            continue;
        }
        match serde_json::from_str::<Said>(&line) {
            Ok(more) => {
                said.excerpt = more.excerpt.or(said.excerpt);
                said.cost = more.cost.or(said.cost);
            }
            Err(_) => {
                problem.get_or_insert(format!(
                    "a line on descriptor {SIDE_FD} is not an object with excerpt, cost or progress"
                ));
            }
        }
    }
    problem.map_or(Ok(said), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_never_splits_a_character() {
        assert_eq!(cut("aéb", 2), "a");
        assert_eq!(cut("aéb", 3), "aé");
        assert_eq!(cut("ab", 9), "ab");
    }
}
