//! Every word of the command line, with its help. Names are a contract (docs/surface.md): they are
//! added to, never renamed.

use std::{path::PathBuf, time::Duration};

use clap::{ArgGroup, CommandFactory, Parser, Subcommand, ValueEnum};
use reach_protocol::{
    AgentId, AgentState, Capability, EventType, MsgId, Tag, Topics, TraceId, agent,
    event::{Span, Start},
    id::Name,
};

use super::values::{self, Content};

/// Agents hand each other tasks through a cluster that loses none.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "agent-reach",
    version,
    disable_help_subcommand = true,
    after_help = "Begin with `agent-reach dev`: a cluster of three nodes on this machine, in a terminal of its own. Contexts and \
        the inboxes of `agents run` are kept in ~/.agent-reach, or in the folder AGENT_REACH_HOME.\n\n\
        Exit status: 0 done · 1 task not completed, or problems found · 2 usage · 3 refused, don't retry · \
        4 try later · 5 unknown (the message's id is printed, to ask again) · 10 internal."
)]
pub struct Args {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

impl Args {
    /// Writes completions for `shell`.
    pub fn completions(shell: clap_complete::Shell, to: &mut dyn std::io::Write) {
        clap_complete::generate(shell, &mut Self::command(), "agent-reach", to);
    }
}

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Options of every command")]
pub struct Global {
    /// The context to use. Default: the current one (`agent-reach context ls`).
    #[arg(long, global = true, value_name = "NAME", env = "AGENT_REACH_CONTEXT")]
    pub context: Option<String>,
    /// A node's client address, in place of those in the context.
    #[arg(long, global = true, value_name = "HOST:PORT", env = "AGENT_REACH_ENDPOINT")]
    pub endpoint: Option<reach_config::Address>,
    /// How answers are printed. `jsonl`: one line per item of a list.
    #[arg(short, long, global = true, value_name = "FORM", value_enum, default_value_t = Format::Table)]
    pub output: Format,
    /// How long a command may take, as in 250ms, 30s or 15m; then it says what is known.
    #[arg(long, global = true, value_name = "TIME", value_parser = values::duration, default_value = "30s")]
    pub timeout: Duration,
    /// Let any node answer from what it knows, without asking the leader: faster, may be a moment old.
    #[arg(long, global = true)]
    pub stale: bool,
    /// Answer every question with yes.
    #[arg(long, global = true)]
    pub yes: bool,
    /// No colours, also at a terminal. The environment variable NO_COLOR does the same.
    #[arg(long, global = true)]
    pub no_color: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    #[default]
    Table,
    Json,
    Jsonl,
}

#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Run a cluster on this machine, each node a process, and make it the current context.
    Dev(Dev),
    /// Run one node of a cluster.
    Node(Node),
    /// Print the version.
    Version,
    /// Print completions for a shell, to be sourced or put where it looks for them.
    Completions { shell: clap_complete::Shell },
    /// Which cluster is spoken to, and as whom.
    #[command(subcommand)]
    Context(ContextCommand),
    /// Make a cluster, and look at it.
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Certificates of agents, callers and operators.
    #[command(subcommand)]
    Certs(CertsCommand),
    /// Run agents, and see who is there.
    #[command(subcommand)]
    Agents(AgentsCommand),
    /// List what is wrong now, since when, with which effect, and the command to run. Exit status 1 when something is.
    Problems,
    /// Submit a task and wait for its result.
    Send(Send),
    /// Look at messages.
    #[command(subcommand)]
    Messages(MessagesCommand),
    /// Show every hop of a collaboration, in order.
    Trace {
        /// The trace's id, as `send` prints it.
        trace_id: TraceId,
    },
    /// Publish events, and read them.
    #[command(subcommand)]
    Events(EventsCommand),
    /// The durable logs of event types.
    #[command(subcommand)]
    Topics(TopicsCommand),
    /// Groups, within which one member gets each event.
    #[command(subcommand)]
    Groups(GroupsCommand),
    /// The rules in force on all nodes.
    #[command(subcommand)]
    Rules(RulesCommand),
    /// Kill what an agent that is gone has left running. Started by `agents run`.
    #[command(name = crate::guard::COMMAND, hide = true)]
    RunGuard,
}

#[derive(Clone, Debug, clap::Args)]
pub struct Dev {
    /// Where the cluster is kept; continued when it is there. Default: ~/.agent-reach/dev.
    #[arg(long, value_name = "D")]
    pub dir: Option<PathBuf>,
    /// Nodes of a new cluster. Three survive the loss of one.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub nodes: u8,
    /// First port of a new cluster: HTTP of the first node; its clients and peers have the next two, and
    /// further nodes theirs 10 apart. Where ports are taken, further ones are used.
    #[arg(long, value_name = "P", default_value_t = 7480)]
    pub port: u16,
    /// Delete what is there and begin anew.
    #[arg(long)]
    pub fresh: bool,
    /// Leave a node that ends as it is. Without this it is started again after 3 s.
    #[arg(long)]
    pub no_restart: bool,
}

#[derive(Clone, Debug, clap::Args)]
pub struct Node {
    /// The node's own file, node.toml in the folder that `cluster new` made for it.
    #[arg(long, value_name = "F")]
    pub config: PathBuf,
    /// Check the file and what it names, and stop.
    #[arg(long)]
    pub check: bool,
    /// End when standard input ends, so that a supervisor that is killed leaves no node behind.
    #[arg(long, hide = true)]
    pub with_stdin: bool,
}

#[derive(Clone, Debug, Subcommand)]
pub enum ContextCommand {
    /// List the contexts of this user.
    Ls,
    /// Make a context the current one.
    Use { name: String },
    /// Add a context and make it the current one.
    Add {
        name: String,
        /// A folder with context.toml, certificate and key: the admin folder of `cluster new`, or one that
        /// `certs issue --out` made.
        #[arg(long, value_name = "DIR")]
        from: PathBuf,
    },
}

#[derive(Clone, Debug, Subcommand)]
pub enum ClusterCommand {
    /// Write the folders of a new cluster: one per node, and one with the keys that sign certificates.
    New(ClusterNew),
    /// Bring the nodes of a new cluster together, once.
    Init,
    /// Show each node: role, applied position, state hash, clock offset.
    Status,
}

#[derive(Clone, Debug, clap::Args)]
pub struct ClusterNew {
    /// The cluster's name: part of every certificate, fixed for ever.
    #[arg(long, value_name = "N")]
    pub name: Name,
    /// A node and the host it runs on, once per node: n1=10.20.1.15, or n1=HOST:PORT with the port for clients
    /// (7481; that for peers is the next one). Nodes that share a host have ports 10 apart.
    #[arg(long = "node", value_name = "n1=HOST", required = true)]
    pub nodes: Vec<String>,
    /// The folder to make. It must not exist, or be empty.
    #[arg(long, value_name = "D")]
    pub out: PathBuf,
}

#[derive(Clone, Debug, Subcommand)]
pub enum CertsCommand {
    /// Issue a certificate. Needs the key of the client CA, in the admin folder.
    Issue(CertsIssue),
    /// List the certificates of a folder, with their dates, and the cluster's revoked ones.
    Ls {
        /// Default: the current context's folder.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
    },
    /// Issue certificates of a folder again: the same identities, new keys and dates.
    Renew(CertsRenew),
    /// Refuse certificates from now on: within a second on every node, on live connections too. For
    /// operators.
    Revoke {
        /// A certificate's file, its fingerprint or its serial number as `certs ls` shows them, or an
        /// identity: agent/ID, user/NAME, host/NAME or node/ID, which means every certificate of it that was
        /// made until now by this host's clock.
        what: String,
    },
}

#[derive(Clone, Debug, clap::Args)]
pub struct CertsRenew {
    /// Certificates to renew whenever they end. Their keys stand beside them, NAME.pem and NAME.key. Default: those
    /// of the folder that end within 30 days.
    #[arg(value_name = "FILE", conflicts_with_all = ["dir", "all"])]
    pub files: Vec<PathBuf>,
    /// A folder with certificates: a context, a node's folder, or the one that `cluster new` made. Default:
    /// the current context's.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Every certificate of the folder, whenever it ends.
    #[arg(long)]
    pub all: bool,
    /// The folder with the keys of the CAs. Default: the folder itself, or admin in it, or the current context's.
    #[arg(long, value_name = "DIR")]
    pub admin: Option<PathBuf>,
    /// How long the new ones are valid. Default: as long as the one before was.
    #[arg(long, value_name = "TIME", value_parser = values::duration)]
    pub lifetime: Option<Duration>,
}

#[derive(Clone, Debug, clap::Args)]
#[command(group = ArgGroup::new("whom").required(true))]
pub struct CertsIssue {
    /// For an agent: it may act as this id and as no other.
    #[arg(long, value_name = "ID", group = "whom")]
    pub agent: Option<AgentId>,
    /// For a user who sends tasks and reads.
    #[arg(long, value_name = "NAME", group = "whom")]
    pub client: Option<Name>,
    /// For a user who may also change rules, once the rules name them in [grants] operators.
    #[arg(long, value_name = "NAME", group = "whom")]
    pub operator: Option<Name>,
    /// The folder with client-ca.pem, client-ca.key and context.toml. Default: the current context's, which
    /// has the key for a `dev` cluster only.
    #[arg(long, value_name = "DIR")]
    pub admin: Option<PathBuf>,
    /// Write a context folder of its own, to be handed over. Default: agents/ID.pem and .key in the admin folder for
    /// an agent, a context folder users/NAME there for a user.
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// How long it is valid.
    #[arg(long, value_name = "TIME", value_parser = values::duration, default_value = "365d")]
    pub lifetime: Duration,
}

#[derive(Clone, Debug, Subcommand)]
pub enum AgentsCommand {
    /// Run a command per task, as an agent. It reads the envelope as JSON from standard input and writes the
    /// result to standard output.
    Run(AgentsRun),
    /// Register an agent from a JSON file, without running it.
    Register {
        /// The registration as JSON; - for standard input.
        #[arg(value_name = "F")]
        file: PathBuf,
    },
    /// List the agents.
    Ls(AgentsLs),
    /// Show one agent, why it is in its state, and what would bring it back.
    Show { agent_id: AgentId },
    /// Give an agent nothing new until `resume`, also when it restarts. What it runs goes on to its end.
    Drain { agent_id: AgentId },
    /// Take a drain back.
    Resume { agent_id: AgentId },
    /// Remove an agent. This run of it, and those before, don't come back; a new one may register. What it was
    /// working on goes to others.
    Rm { agent_id: AgentId },
    /// Don't wait any longer for agents that fell silent together: they count as lost now.
    Expire {
        /// Needed, since their unfinished tasks go to others.
        #[arg(long, required = true)]
        now: bool,
    },
}

#[derive(Clone, Debug, clap::Args)]
#[command(
    after_help = "The command's exit status says how the task went: 0 completed · 65 can't parse it · 69 refused · 75 busy · \
        any other failed, with its last words on standard error as the reason. An event is done with 0, and comes again with any \
        other; the command knows it by AGENT_REACH_EVENT_TYPE, AGENT_REACH_OFFSET, AGENT_REACH_GROUP and \
        AGENT_REACH_DELIVERIES. On file descriptor 3 it may write one JSON \
        object a line: {\"excerpt\": \"…\"}, {\"cost\": 0.02}, {\"progress\": …}."
)]
pub struct AgentsRun {
    /// What it can do, with an optional weight: twice the weight, twice the share. Once per capability.
    #[arg(long = "capability", value_name = "T[=W]", required = true, value_parser = values::capability)]
    pub capabilities: Vec<Capability>,
    /// Its id. Default: made of the host's name and the command's.
    #[arg(long, value_name = "ID")]
    pub id: Option<AgentId>,
    /// Events that the command is run for too: a type with its version or a prefix as in task.*, and the group whose
    /// members share them. Without a group, one named by the agent's id. May be repeated.
    #[arg(long = "subscribe", value_name = "TOPICS[=GROUP]", value_parser = values::subscription)]
    pub subscriptions: Vec<(Topics, Option<Name>)>,
    /// Tasks it runs at once, and as many events.
    #[arg(long, value_name = "N", default_value_t = agent::MAX_CONCURRENCY_DEFAULT,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(agent::MAX_CONCURRENCY_MAX)))]
    pub slots: u32,
    /// Something to be found by, as in owner=sre_team. May be repeated.
    #[arg(long, value_name = "K=V", value_parser = values::pair)]
    pub metadata: Vec<(String, String)>,
    /// Which line of the output is the excerpt, where the command gives none itself.
    #[arg(long, value_name = "LINE", value_enum, default_value_t = ExcerptFrom::FirstLine)]
    pub excerpt_from: ExcerptFrom,
    /// The command and its arguments, after --.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ExcerptFrom {
    #[default]
    FirstLine,
    LastLine,
}

impl ExcerptFrom {
    /// The chosen line of `text` that holds something.
    pub fn choose(self, text: &str) -> &str {
        let mut lines = text.lines().map(str::trim_end).filter(|line| !line.is_empty());
        match self {
            Self::FirstLine => lines.next(),
            Self::LastLine => lines.next_back(),
        }
        .unwrap_or_default()
    }
}

#[derive(Clone, Debug, clap::Args)]
pub struct AgentsLs {
    /// Only those in this state: ready, draining or offline.
    #[arg(long, value_name = "STATE", value_parser = values::agent_state)]
    pub state: Option<AgentState>,
    /// Only those that declare it.
    #[arg(long, value_name = "T")]
    pub capability: Option<Tag>,
    /// Only those with this in their metadata.
    #[arg(long, value_name = "K=V", value_parser = values::pair)]
    pub metadata: Option<(String, String)>,
    /// The most to list.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
    pub limit: u32,
    /// Go on after this one, the `next` of the list before.
    #[arg(long, value_name = "ID")]
    pub after: Option<AgentId>,
    /// Go on showing them until Ctrl-C: at a terminal the list, twice a second; elsewhere a line for each change.
    #[arg(long)]
    pub watch: bool,
}

#[derive(Clone, Debug, clap::Args)]
#[command(group = ArgGroup::new("target").required(true))]
pub struct Send {
    /// What it takes; repeated, all of them. The cluster chooses among the agents that declare them.
    #[arg(long = "capability", value_name = "T", group = "target")]
    pub capabilities: Vec<Tag>,
    /// One agent, whatever it declares.
    #[arg(long, value_name = "AGENT", group = "target")]
    pub to: Option<AgentId>,
    /// The content: a JSON value, @FILE, or @- for standard input.
    #[arg(long, value_name = "JSON|@F|@-")]
    pub payload: Content,
    /// What it is for, in a sentence.
    #[arg(long, value_name = "TEXT")]
    pub intent: Option<Content>,
    /// An agent to try before others; repeated, in this order.
    #[arg(long, value_name = "AGENT", conflicts_with = "to")]
    pub prefer: Vec<AgentId>,
    /// The time it has from its acceptance, as in 30s. Default: the rules' [delivery] expires_in_ms (15m).
    /// At most 30d.
    #[arg(long, value_name = "TIME", value_parser = values::expire_in)]
    pub expire_in: Option<Duration>,
    /// Its id, and the key to send it again by: the same id is the same message. Default: a new one.
    #[arg(long, value_name = "ID")]
    pub msg_id: Option<MsgId>,
    /// The collaboration it belongs to. Default: a new one.
    #[arg(long, value_name = "ID")]
    pub trace_id: Option<TraceId>,
    /// Return when it is accepted, without its result; `messages wait ID` gets that later.
    #[arg(long)]
    pub detach: bool,
}

#[derive(Clone, Debug, Subcommand)]
pub enum MessagesCommand {
    /// List messages, newest first.
    Ls {
        /// The most to list.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        limit: u32,
        /// Go on after this one, the `next` of the list before.
        #[arg(long, value_name = "ID")]
        after: Option<MsgId>,
    },
    /// Show one message with its hops.
    Show {
        msg_id: MsgId,
        /// Print its payload and nothing else.
        #[arg(long, conflicts_with = "result")]
        payload: bool,
        /// Print its result and nothing else.
        #[arg(long)]
        result: bool,
    },
    /// Wait for a message's end and print it as `send` does.
    Wait { msg_id: MsgId },
}

#[derive(Clone, Debug, Subcommand)]
pub enum EventsCommand {
    /// Publish an event: durable when this returns. Its topic is made by its first event.
    Publish {
        /// The event's type, with its version, such as build.finished.v1.
        #[arg(value_name = "TYPE")]
        event_type: EventType,
        /// The content: a JSON value, @FILE, or @- for standard input.
        #[arg(long, value_name = "JSON|@F|@-")]
        payload: Content,
        /// What it is about.
        #[arg(long, value_name = "K")]
        key: Option<String>,
        /// Its id, and the key to publish it again by. Default: a new one.
        #[arg(long, value_name = "ID")]
        msg_id: Option<MsgId>,
        /// The collaboration it belongs to. Default: a new one.
        #[arg(long, value_name = "ID")]
        trace_id: Option<TraceId>,
    },
    /// Show a topic's events in order, and go on with new ones until Ctrl-C. No group is moved by it.
    Tail {
        #[arg(value_name = "TYPE")]
        event_type: EventType,
        /// Where to begin: earliest, latest, an offset, or a time, as RFC 3339 or such as -15m.
        #[arg(long, value_name = "FROM", default_value = "latest", allow_hyphen_values = true, value_parser = values::start)]
        from: Start,
        /// End after so many.
        #[arg(long, value_name = "N")]
        limit: Option<u64>,
        /// End at the last event there is.
        #[arg(long)]
        once: bool,
    },
    /// Take the next events for a member of a group. Each comes again unless it is acknowledged within the rules'
    /// [events] ack_wait_ms (30s).
    Pull {
        #[arg(value_name = "G")]
        group: Name,
        /// The member's name. Default: who asks.
        #[arg(long, value_name = "NAME")]
        member: Option<Name>,
        /// The most to take.
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        max: u32,
        /// How long to wait for the first. Default: not at all.
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        wait: Option<Duration>,
        /// Acknowledge them once they are printed.
        #[arg(long)]
        ack: bool,
    },
    /// Say that events are done.
    Ack {
        #[command(flatten)]
        about: About,
    },
    /// Give events back: they come again, to any member.
    Nack {
        #[command(flatten)]
        about: About,
        /// Not before this time has passed. Default: at once.
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        delay: Option<Duration>,
        /// Why: it stands beside them in the dead letters.
        #[arg(long, value_name = "TEXT")]
        cause: Option<String>,
    },
    /// Say that events are still being worked on: their ack wait begins anew.
    Extend {
        #[command(flatten)]
        about: About,
    },
}

/// Events that a member was handed.
#[derive(Clone, Debug, clap::Args)]
pub struct About {
    #[arg(value_name = "G")]
    pub group: Name,
    #[arg(value_name = "TYPE")]
    pub event_type: EventType,
    /// Offsets: 7, or 3-9 for several, the last one included.
    #[arg(value_name = "OFFSETS", required = true, value_parser = values::offsets)]
    pub offsets: Vec<Span>,
    /// The member's name. Default: who asks.
    #[arg(long, value_name = "NAME")]
    pub member: Option<Name>,
}

#[derive(Clone, Debug, Subcommand)]
pub enum TopicsCommand {
    /// List the topics.
    Ls {
        /// The most to list.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        limit: u32,
        /// Go on after this one, the `next` of the list before.
        #[arg(long, value_name = "TYPE")]
        after: Option<EventType>,
    },
    /// Show one topic.
    Show {
        #[arg(value_name = "TYPE")]
        event_type: EventType,
    },
    /// Make a topic, or say anew what it keeps. What is left out goes by the rules' [events]. For operators.
    Set {
        #[arg(value_name = "TYPE")]
        event_type: EventType,
        /// How long it keeps an event.
        #[arg(long, value_name = "TIME", value_parser = values::duration)]
        max_age: Option<Duration>,
        /// How many bytes of content it keeps.
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1_024..))]
        max_bytes: Option<u64>,
    },
    /// Keep events no longer. For operators.
    Trim {
        #[arg(value_name = "TYPE")]
        event_type: EventType,
        /// The first offset that stays.
        #[arg(long, value_name = "OFFSET")]
        below: u64,
    },
    /// Take a trimmed topic off the list. Should it get events again, their offsets go on where they stopped. For
    /// operators.
    Rm {
        #[arg(value_name = "TYPE")]
        event_type: EventType,
    },
}

#[derive(Clone, Debug, Subcommand)]
pub enum GroupsCommand {
    /// List the groups.
    Ls {
        /// The most to list.
        #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        limit: u32,
        /// Go on after this one, the `next` of the list before.
        #[arg(long, value_name = "G")]
        after: Option<Name>,
    },
    /// Show a group's place in each of its topics, and its members.
    Show {
        #[arg(value_name = "G")]
        group: Name,
    },
    /// Make a group. The same again changes nothing.
    Create {
        #[arg(value_name = "G")]
        group: Name,
        /// What it reads: an event type, or all that begin alike, as in task.*; several with commas between.
        #[arg(long = "topic", value_name = "T")]
        topics: Topics,
        /// Where it begins in the topics there are: earliest, latest, an offset, or a time, as RFC 3339 or such as
        /// -15m. In later topics it begins at the first event.
        #[arg(long, value_name = "FROM", default_value = "latest", allow_hyphen_values = true, value_parser = values::start)]
        from: Start,
    },
    /// Put a group elsewhere; what its members were handed is forgotten. For who made it, and operators.
    Reset {
        #[arg(value_name = "G")]
        group: Name,
        /// As with `create`.
        #[arg(long, value_name = "FROM", allow_hyphen_values = true, value_parser = values::start)]
        from: Start,
    },
    /// Remove a group. For who made it, and operators.
    Rm {
        #[arg(value_name = "G")]
        group: Name,
    },
}

#[derive(Clone, Debug, Subcommand)]
pub enum RulesCommand {
    /// Print the rules in force, comments included.
    Show,
    /// Put a whole rules document in force. Keys that it leaves out have their defaults.
    Apply {
        /// A TOML file; - for standard input.
        #[arg(value_name = "F")]
        file: PathBuf,
        /// Only if this is the revision in force now.
        #[arg(long, value_name = "REV")]
        expect: Option<u64>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("agent-reach").chain(line.split_whitespace()))
    }

    #[test]
    fn the_tree_is_sound_and_every_word_has_its_help() {
        fn check(command: &clap::Command, path: &str) {
            assert!(command.get_about().is_some(), "{path} has no help");
            for arg in command.get_arguments().filter(|arg| !arg.is_positional()) {
                assert!(arg.get_help().is_some(), "{path} {} has no help", arg.get_id());
            }
            command.get_subcommands().for_each(|sub| check(sub, &format!("{path} {}", sub.get_name())));
        }
        Args::command().debug_assert();
        check(&Args::command(), "agent-reach");
    }

    #[test]
    fn the_contract_s_lines_are_understood() {
        for line in [
            "dev",
            "dev --dir D --nodes 3 --fresh --no-restart",
            "node --config F --check",
            "version",
            "completions bash",
            "context ls",
            "context use NAME",
            "context add NAME --from DIR",
            "cluster new --name N --node n1=a --node n2=b --out D",
            "cluster init",
            "cluster status -o json",
            "certs issue --agent ID",
            "certs issue --client NAME --admin D --out E --lifetime 30d",
            "certs issue --operator NAME",
            "certs ls",
            "certs renew",
            "certs renew a.pem b.pem --lifetime 90d",
            "certs renew --dir D --all --admin A",
            "certs revoke agent/x",
            "agents run --capability text.count=2 --capability x --id ID -- ./count.sh --fast",
            "agents register F",
            "agents ls --state ready --capability t --metadata k=v",
            "agents ls --watch -o jsonl",
            "agents show ID",
            "agents drain ID",
            "agents resume ID",
            "agents rm ID",
            "agents expire --now",
            "problems -o json",
            "send --capability a --capability b --payload {} --intent i --prefer p --expire-in 30s --detach",
            "send --to AGENT --payload @- --msg-id m --trace-id t",
            "messages ls --limit 5 --after m",
            "messages show ID --payload",
            "messages wait ID --timeout 5m",
            "trace ID --stale --context c --endpoint h:1 --yes --no-color",
            "events publish a.v1 --payload {} --key k --msg-id m --trace-id t",
            "events tail a.v1 --from -15m --limit 3 --once",
            "events pull g --member m --max 5 --wait 3s --ack",
            "events ack g a.v1 3-9 12",
            "events nack g a.v1 3 --delay 5s --cause no",
            "events extend g a.v1 3",
            "topics ls",
            "topics show a.v1",
            "topics set a.v1 --max-age 7d --max-bytes 100000",
            "topics trim a.v1 --below 7",
            "topics rm a.v1",
            "groups ls",
            "groups show g",
            "groups create g --topic task.* --from earliest",
            "groups reset g --from 7",
            "groups rm g",
            "rules show",
            "rules apply F --expect 3",
        ] {
            parse(line).unwrap_or_else(|error| panic!("{line}\n{error}"));
        }
    }

    #[test]
    fn what_makes_no_sense_is_a_usage_error() {
        for line in [
            "",
            "nope",
            "dev --nodes 0",
            "node",
            "certs issue",
            "certs issue --agent a --client b",
            "certs revoke",
            "certs renew a.pem --all",
            "agents run --capability x",
            "agents run -- cmd",
            "agents expire",
            "agents drain",
            "agents run --capability x --slots 0 -- cmd",
            "send --payload 1",
            "send --capability x",
            "send --capability x --to y --payload 1",
            "send --to y --prefer z --payload 1",
            "messages show ID --payload --result",
            "trace a/b",
            "cluster status --timeout 30",
        ] {
            assert_eq!(parse(line).map(|_| ()).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn a_commands_own_options_stay_its_own() {
        let Command::Agents(AgentsCommand::Run(run)) =
            parse("agents run --capability x -- grep --timeout -o json").unwrap().command
        else {
            panic!("another command");
        };
        assert_eq!(run.command, ["grep", "--timeout", "-o", "json"]);
    }

    #[test]
    fn content_is_not_in_the_debug_form() {
        let args = parse("send --to a --payload \"hunter2\" --intent hunter2").unwrap();
        assert!(!format!("{args:?}").contains("hunter2"));
    }

    #[test]
    fn an_excerpt_is_a_line_that_holds_something() {
        let text = "\nfirst  \nmiddle\nlast\n\n";
        assert_eq!(ExcerptFrom::FirstLine.choose(text), "first");
        assert_eq!(ExcerptFrom::LastLine.choose(text), "last");
        assert_eq!(ExcerptFrom::FirstLine.choose(""), "");
    }
}
