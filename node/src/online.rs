//! The commands that ask a cluster.

mod events;

use std::{collections::BTreeMap, io::Read, path::Path, time::Duration};

use reach_client::{Client, CredentialFiles, Options};
use reach_config::Context;
use reach_protocol::{
    AgentId, Code, Envelope, ErrorReply, InstanceId, Json, MsgId, Name, Registration, Revocation,
    envelope::{Affinity, Response},
    frame::{AgentView, Answer, Request},
    message::MessageRecord,
};
use serde_json::json;

use crate::{
    cli::{
        Failure, Output,
        args::{
            AgentsCommand, AgentsLs, CertsCommand, ClusterCommand, Command, EventsCommand, Format, Global,
            MessagesCommand, RulesCommand, Send,
        },
        certs, certs_revoke,
    },
    show::{self, Shown},
};

/// Revocations asked for at once.
const REVOCATIONS_PAGE: u32 = 1_000;
/// When a caller that waits is told that nobody has the message yet.
const LOOK_AFTER: Duration = Duration::from_secs(1);
/// How often a list that is watched is asked for.
const WATCH_EVERY: Duration = Duration::from_millis(500);
/// A registration or a rules document is at most this long, in bytes.
const FILE_MAX: u64 = 4 << 20;

/// What the context says, the endpoint replaced where another was asked for.
pub fn options(context: &Context, global: &Global) -> Result<Options, Failure> {
    let mut options = Options::from_context(&context.dir)?;
    if let Some(endpoint) = &global.endpoint {
        options.endpoints = vec![endpoint.to_string()];
    }
    options.connect_timeout = options.connect_timeout.min(global.timeout);
    options.request_timeout = global.timeout;
    options.stale = global.stale;
    Ok(options)
}

/// The same with the agent's own certificate, issued on first use where the context may.
pub fn options_as(context: &Context, global: &Global, agent_id: &AgentId) -> Result<Options, Failure> {
    let files = certs::for_agent(context, agent_id)?;
    let (files, credentials) = CredentialFiles::load(files.ca, files.cert, files.key)?;
    Ok(Options { credentials, credential_files: Some(files), ..options(context, global)? })
}

pub async fn run(
    command: &Command,
    context: &Context,
    global: &Global,
    output: Output,
) -> Result<(), Failure> {
    // Wrong arguments and files are told before any node is asked.
    let given = Given::of(command, context, global.yes)?;
    let options = match &given {
        Given::Registration(registration) => options_as(context, global, &registration.agent_id)?,
        _ => options(context, global)?,
    };
    let session = Session { client: Client::connect(options).await?, timeout: global.timeout, output };
    match given {
        Given::Revocation(target) => return session.certs_revoke(*target).await,
        Given::Registration(registration) => return session.agents_register(*registration).await,
        Given::Envelope { envelope, detach } => return session.send(*envelope, detach).await,
        Given::Event(envelope) => return session.publish(*envelope).await,
        Given::Rules { text, expect } => return session.rules_apply(text, expect).await,
        Given::Nothing => {}
    }
    match command {
        Command::Cluster(ClusterCommand::Status) => session.cluster_status().await,
        Command::Cluster(ClusterCommand::Init) => session.cluster_init().await,
        Command::Agents(AgentsCommand::Ls(filter)) if filter.watch => session.agents_watch(filter).await,
        Command::Agents(AgentsCommand::Ls(filter)) => session.agents_ls(filter).await,
        Command::Agents(AgentsCommand::Show { agent_id }) => {
            session.agent(Request::Agent { agent_id: agent_id.clone() }).await
        }
        Command::Agents(AgentsCommand::Drain { agent_id }) => session.drain(agent_id, true).await,
        Command::Agents(AgentsCommand::Resume { agent_id }) => session.drain(agent_id, false).await,
        Command::Agents(AgentsCommand::Rm { agent_id }) => session.agents_rm(agent_id).await,
        Command::Agents(AgentsCommand::Expire { .. }) => session.agents_expire().await,
        Command::Messages(MessagesCommand::Ls { limit, after }) => {
            match session.ask(Request::Messages { limit: *limit, after: after.clone() }).await? {
                Answer::Messages { items, next, as_of } => {
                    output.print(&show::messages(&items, next.as_ref(), as_of))
                }
                _ => Err(unexpected()),
            }
        }
        Command::Messages(MessagesCommand::Show { msg_id, payload, result }) => {
            session.message(msg_id.clone(), *payload, *result).await
        }
        Command::Messages(MessagesCommand::Wait { msg_id }) => {
            let response = session.client.wait(msg_id, session.timeout).await?;
            session.ended(&response)
        }
        Command::Trace { trace_id } => match session
            .ask(Request::Trace { trace_id: trace_id.clone() })
            .await?
        {
            Answer::Trace { hops, messages, as_of } => output.print(&show::trace(&hops, &messages, as_of)),
            _ => Err(unexpected()),
        },
        Command::Events(command) => session.events(command).await,
        Command::Topics(command) => session.topics(command).await,
        Command::Groups(command) => session.groups(command).await,
        Command::Rules(RulesCommand::Show) => match session.ask(Request::Rules).await? {
            Answer::Rules(record) => session.rules(&record),
            _ => Err(unexpected()),
        },
        _ => Err(Failure::usage("this command does not ask a cluster")),
    }
}

/// `problems`: prints them. Whether there are any.
pub async fn problems(context: &Context, global: &Global, output: Output) -> Result<bool, Failure> {
    let client = Client::connect(options(context, global)?).await?;
    match client.request(Request::Problems, global.timeout).await? {
        Answer::Problems { items, as_of } => {
            output.print(&show::problems(&items, as_of))?;
            Ok(!items.is_empty())
        }
        _ => Err(unexpected()),
    }
}

/// What a command brings along, read and checked.
enum Given {
    Nothing,
    Envelope { envelope: Box<Envelope>, detach: bool },
    Registration(Box<Registration>),
    Event(Box<Envelope>),
    Rules { text: String, expect: Option<u64> },
    Revocation(Box<certs_revoke::Target>),
}

impl Given {
    fn of(command: &Command, context: &Context, yes: bool) -> Result<Self, Failure> {
        Ok(match command {
            Command::Certs(CertsCommand::Revoke { what }) => {
                let target = certs_revoke::target(what, &context.cluster)?;
                if !yes {
                    target.must_not_be_own(context)?;
                }
                Self::Revocation(Box::new(target))
            }
            Command::Send(send) => {
                Self::Envelope { envelope: Box::new(envelope(send)?), detach: send.detach }
            }
            Command::Agents(AgentsCommand::Register { file }) => {
                let text = read(file)?;
                let registration =
                    reach_protocol::envelope::from_json(&text).map_err(|error: ErrorReply| ErrorReply {
                        message: format!("{}: {}", file.display(), error.message),
                        ..error
                    })?;
                Self::Registration(Box::new(registration))
            }
            Command::Events(EventsCommand::Publish { event_type, payload, key, msg_id, trace_id }) => {
                let envelope = Envelope {
                    key: key.clone(),
                    msg_id: msg_id.clone(),
                    trace_id: trace_id.clone(),
                    ..Envelope::event(event_type, payload.payload()?)
                };
                Self::Event(Box::new(envelope))
            }
            Command::Rules(RulesCommand::Apply { file, expect }) => {
                let text = read(file)?;
                // With its line.
                reach_config::rules::parse(&text).map_err(|error| {
                    ErrorReply::new(Code::Invalid, format!("{}: {error}", file.display()))
                })?;
                Self::Rules { text, expect: *expect }
            }
            _ => Self::Nothing,
        })
    }
}

fn envelope(send: &Send) -> Result<Envelope, Failure> {
    let payload = send.payload.payload()?;
    let mut envelope = match &send.to {
        Some(agent_id) => Envelope::request_to(agent_id.clone(), payload),
        None => Envelope::request(send.capabilities.clone(), payload),
    };
    envelope.intent = send.intent.as_ref().map(|intent| intent.0.clone());
    // Made here where none is given: it is asked about while we wait.
    let made = || MsgId::parse(&format!("m_{}", ulid::Ulid::generate())).expect("a ULID is legal in an id");
    envelope.msg_id = Some(send.msg_id.clone().unwrap_or_else(made));
    envelope.trace_id = send.trace_id.clone();
    envelope.expires_in_ms = send.expire_in.map(|time| time.as_millis() as u64);
    if let Some(target) = envelope.target.as_mut().filter(|_| !send.prefer.is_empty()) {
        target.affinity = Some(Affinity { preferred_agents: send.prefer.clone() });
    }
    Ok(envelope)
}

struct Session {
    client: Client,
    timeout: Duration,
    output: Output,
}

impl Session {
    async fn ask(&self, request: Request) -> Result<Answer, Failure> {
        Ok(self.client.request(request, self.timeout).await?)
    }

    async fn cluster_status(&self) -> Result<(), Failure> {
        match self.ask(Request::Cluster).await? {
            Answer::Cluster(view) => self.output.print(&show::cluster(&view)),
            _ => Err(unexpected()),
        }
    }

    async fn cluster_init(&self) -> Result<(), Failure> {
        self.ask(Request::Initialise).await?;
        self.cluster_status().await
    }

    /// An answer that is one agent.
    async fn agent(&self, request: Request) -> Result<(), Failure> {
        match self.ask(request).await? {
            Answer::Agent(view) => self.output.print(&show::agent(&view)),
            _ => Err(unexpected()),
        }
    }

    /// What is there now is meant: asked again after a lost answer, it does nothing to what came after.
    async fn drain(&self, agent_id: &AgentId, drains: bool) -> Result<(), Failure> {
        let agent_id = agent_id.clone();
        let drain_seq = match self.ask(Request::Agent { agent_id: agent_id.clone() }).await? {
            Answer::Agent(view) => Some(view.record.drain_seq),
            _ => return Err(unexpected()),
        };
        self.agent(match drains {
            true => Request::DrainAgent { agent_id, drain_seq },
            false => Request::ResumeAgent { agent_id, drain_seq },
        })
        .await
    }

    async fn agents_rm(&self, agent_id: &AgentId) -> Result<(), Failure> {
        let instance = match self.ask(Request::Agent { agent_id: agent_id.clone() }).await {
            Ok(Answer::Agent(view)) => view.record.instance.clone(),
            Ok(_) => return Err(unexpected()),
            // Removed before, or never there: the answer tells the two apart, and removes nobody.
            Err(error) if error.reply.code == Code::NotFound => {
                InstanceId::parse("none").expect("a legal id")
            }
            Err(error) => return Err(error),
        };
        match self.ask(Request::Remove { agent_id: agent_id.clone(), instance: Some(instance) }).await? {
            Answer::Done => self.output.print(&show::removed(agent_id)),
            _ => Err(unexpected()),
        }
    }

    async fn agents_expire(&self) -> Result<(), Failure> {
        let since_ms = match self.ask(Request::Rules).await? {
            Answer::Rules(record) => record.expiry.map_or(0, |pause| pause.since_ms),
            _ => return Err(unexpected()),
        };
        match self.ask(Request::ExpireNow { since_ms: Some(since_ms) }).await? {
            Answer::Expired(pause) => self.output.print(&show::expired(pause.as_ref())),
            _ => Err(unexpected()),
        }
    }

    async fn agents(&self, filter: &AgentsLs) -> Result<(Vec<AgentView>, Shown), Failure> {
        let request = Request::Agents {
            state: filter.state,
            capability: filter.capability.clone(),
            metadata: filter.metadata.clone(),
            limit: filter.limit,
            after: filter.after.clone(),
        };
        match self.ask(request).await? {
            Answer::Agents { items, next, as_of } => {
                let shown = show::agents(&items, next.as_ref(), as_of);
                Ok((items, shown))
            }
            _ => Err(unexpected()),
        }
    }

    async fn agents_ls(&self, filter: &AgentsLs) -> Result<(), Failure> {
        let (_, shown) = self.agents(filter).await?;
        self.output.print(&shown)
    }

    /// Until it is interrupted. The whole list anew at a terminal; elsewhere who is there first, and
    /// then each change.
    async fn agents_watch(&self, filter: &AgentsLs) -> Result<(), Failure> {
        let mut every = tokio::time::interval(WATCH_EVERY);
        let mut known: BTreeMap<AgentId, show::Standing> = BTreeMap::new();
        let mut interrupted = std::pin::pin!(crate::dev::interrupted());
        loop {
            tokio::select! {
                () = &mut interrupted => return Ok(()),
                _ = every.tick() => {}
            }
            let (items, shown) = self.agents(filter).await?;
            if self.output.is_screen() {
                self.output.redraw(&shown)?;
                continue;
            }
            let now: BTreeMap<_, _> =
                items.iter().map(|view| (view.record.agent_id().clone(), show::Standing::of(view))).collect();
            for view in &items {
                let agent_id = view.record.agent_id();
                if known.get(agent_id) != now.get(agent_id) {
                    self.output.print_change(&show::change(view))?;
                }
            }
            for agent_id in known.keys().filter(|agent_id| !now.contains_key(*agent_id)) {
                self.output.print_change(&show::gone(agent_id))?;
            }
            known = now;
        }
    }

    async fn agents_register(&self, registration: Registration) -> Result<(), Failure> {
        let agent_id = registration.agent_id.clone();
        let instance =
            InstanceId::parse(&format!("i_{}", ulid::Ulid::generate())).expect("a ULID is legal in an id");
        let request = Request::Register { registration: Box::new(registration), instance, uptime_ms: 0 };
        match self.ask(request).await? {
            Answer::Registered { instance, heartbeat_ms, ttl_ms } => {
                let json = json!({
                    "agent_id": agent_id, "instance_id": instance, "heartbeat_ms": heartbeat_ms, "ttl_ms": ttl_ms
                });
                let note = format!(
                    "{agent_id} is registered as {instance}; without heartbeats it is offline after {}",
                    show::span(ttl_ms)
                );
                self.output.print(&Shown { json, notes: vec![note], ..Shown::default() })
            }
            _ => Err(unexpected()),
        }
    }

    async fn send(&self, envelope: Envelope, detach: bool) -> Result<(), Failure> {
        if detach {
            let submitted = self.client.submit(envelope).await?;
            let record = &submitted.view.record;
            let note =
                format!("{} accepted in trace {}: {}", record.msg_id, record.trace_id, record.state.name());
            let next = format!("`agent-reach messages wait {}` gets its result", record.msg_id);
            self.output.print(&Shown {
                json: show::message_json(record),
                notes: vec![note, next],
                ..Shown::default()
            })?;
            self.tell_why_it_waits(record);
            return Ok(());
        }
        let msg_id = envelope.msg_id.clone().expect("one was made");
        let call = self.client.call(envelope, self.timeout);
        let mut call = std::pin::pin!(call);
        let response = tokio::select! {
            response = &mut call => response,
            () = self.look_why_it_waits(&msg_id) => call.await,
        };
        self.ended(&response?)
    }

    /// Looks once, after the time in which nearly every task has found its agent.
    async fn look_why_it_waits(&self, msg_id: &MsgId) {
        tokio::time::sleep(LOOK_AFTER).await;
        if let Ok(view) = self.client.status(msg_id).await {
            self.tell_why_it_waits(&view.record);
        }
    }

    /// For a person; a program reads `pending_reason`.
    fn tell_why_it_waits(&self, record: &MessageRecord) {
        if let Some(why) = show::why_it_waits(record)
            && self.output.format() == Format::Table
        {
            let msg_id = &record.msg_id;
            self.output
                .remark(&format!("{msg_id} waits: {why}; `agent-reach messages show {msg_id}` shows more"));
        }
    }

    /// The result of a message that completed; the error of one that did not.
    fn ended(&self, response: &Response) -> Result<(), Failure> {
        if let Some(error) = &response.error {
            let error = ErrorReply {
                msg_id: Some(response.in_reply_to.clone()),
                trace_id: Some(response.trace_id.clone()),
                ..error.clone()
            };
            // It was accepted and ended without a result, whatever the reason's own status.
            return Err(Failure { exit: 1, reply: Box::new(error) });
        }
        let mut json = serde_json::to_value(response).expect("a response is plain data");
        reach_protocol::json::without_nulls(&mut json, 0);
        let mut notes = vec![response.result.as_ref().map_or("null", Json::as_str).to_string()];
        notes.extend(response.warnings.iter().map(|warning| format!("warning: {}", warning.as_str())));
        notes.push(format!("({} in trace {})", response.in_reply_to, response.trace_id));
        self.output.print(&Shown { json, notes, ..Shown::default() })
    }

    async fn message(&self, msg_id: MsgId, payload: bool, result: bool) -> Result<(), Failure> {
        let request = match (payload, result) {
            (true, _) => Request::Payload { msg_id },
            (_, true) => Request::Result { msg_id },
            _ => Request::Message { msg_id, wait_ms: None },
        };
        match self.ask(request).await? {
            Answer::Body(body) => self.output.print_text(&format!("{}\n", body.as_str())),
            Answer::Message(view) => self.output.print(&show::message(&view)),
            _ => Err(unexpected()),
        }
    }

    /// As a document that can be edited and applied, unless a program asks.
    fn rules(&self, record: &reach_protocol::RulesRecord) -> Result<(), Failure> {
        let shown = show::rules(record);
        if self.output.format() != Format::Table {
            return self.output.print(&shown);
        }
        let text = match record.text.is_empty() {
            true => reach_config::rules::render(&record.rules),
            // A document that was shown before begins with that revision's line.
            false => record
                .text
                .lines()
                .skip_while(|line| line.starts_with("# revision "))
                .collect::<Vec<_>>()
                .join("\n"),
        };
        self.output.print_text(&format!("{}\n\n{}\n", shown.notes.join("\n"), text.trim_end()))
    }

    async fn certs_revoke(&self, target: certs_revoke::Target) -> Result<(), Failure> {
        match self.ask(target.request()).await? {
            Answer::Revoked(revocation) => {
                target.until_the_next_is_good().await;
                self.output.print(&certs_revoke::shown(&revocation))
            }
            _ => Err(unexpected()),
        }
    }

    async fn rules_apply(&self, text: String, expect: Option<u64>) -> Result<(), Failure> {
        match self.ask(Request::ApplyRules { text, expect }).await? {
            Answer::Rules(record) => {
                let mut shown = show::rules(&record);
                shown.notes = vec![format!("revision {} is in force", record.revision)];
                self.output.print(&shown)
            }
            _ => Err(unexpected()),
        }
    }
}

/// The most that `certs ls` waits for a node: what it lists besides needs none.
const REVOCATIONS_WAIT: Duration = Duration::from_secs(3);

/// Every revocation the cluster knows, page by page; or why that is not known here.
pub async fn revocations(
    context: Result<Context, reach_config::Error>,
    global: &Global,
) -> Result<(Name, Vec<Revocation>), String> {
    let context = context.map_err(|error| error.to_string())?;
    let global = Global { timeout: global.timeout.min(REVOCATIONS_WAIT), ..global.clone() };
    let all = async {
        let client = Client::connect(options(&context, &global)?).await?;
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let request = Request::Revocations { limit: REVOCATIONS_PAGE, after };
            let Answer::Revocations { items, next } = client.request(request, global.timeout).await? else {
                return Err(unexpected());
            };
            all.extend(items);
            after = next;
            if after.is_none() {
                return Ok(all);
            }
        }
    };
    match all.await {
        Ok(all) => Ok((context.cluster.clone(), all)),
        Err(failure) => Err(failure.to_string()),
    }
}

fn unexpected() -> Failure {
    ErrorReply::new(Code::Internal, "a node answered with something else").into()
}

/// The text of a file, or of standard input for `-`.
fn read(file: &Path) -> Result<String, Failure> {
    let unreadable = |error| Failure::usage(format!("{} can't be read ({error})", file.display()));
    let mut text = String::new();
    let read = match file.to_str() {
        Some("-") => std::io::stdin().lock().take(FILE_MAX).read_to_string(&mut text),
        _ => std::fs::File::open(file).and_then(|file| file.take(FILE_MAX).read_to_string(&mut text)),
    };
    read.map_err(unreadable)?;
    Ok(text)
}
