//! What the demo asks the cluster, through the SDK: who is there, who leads, how a job stands.

use std::{collections::BTreeMap, path::Path, time::Duration};

use anyhow::{Context, bail};
use reach_client::{Client, Options};
use reach_protocol::{
    AgentId, AgentState, MsgId, NodeId, TraceId,
    frame::{AgentView, Answer, ClusterView, NodeReport, NodeView, Request},
    message::{Hop, MessageRecord, StateName},
};

use crate::trace::capability;

/// For a question that a cluster with a leader answers at once.
const ASK_MAX: Duration = Duration::from_secs(10);
/// For a look that is repeated anyhow.
const LOOK_MAX: Duration = Duration::from_secs(5);
/// A node that has not answered for this long is left for another one.
const ANSWER_MAX: Duration = Duration::from_secs(1);
const PAGE: u32 = 200;

#[derive(Clone, Debug)]
pub struct Cluster {
    pub client: Client,
}

impl Cluster {
    /// As the user of a context, by any of its nodes but `without`.
    pub async fn connect(context: &Path, without: Option<&NodeView>) -> anyhow::Result<Self> {
        let mut options = Options::from_context(context)?;
        options.answer_timeout = ANSWER_MAX;
        if let Some(node) = without {
            options.endpoints.retain(|endpoint| *endpoint != node.client_addr);
        }
        Ok(Self { client: Client::connect(options).await? })
    }

    pub async fn view(&self, within: Duration) -> anyhow::Result<ClusterView> {
        match self.client.request(Request::Cluster, within).await? {
            Answer::Cluster(view) => Ok(*view),
            _ => bail!("a question for the cluster got another answer"),
        }
    }

    pub async fn agents(&self) -> anyhow::Result<BTreeMap<AgentId, AgentView>> {
        let request =
            Request::Agents { state: None, capability: None, metadata: None, limit: PAGE, after: None };
        match self.client.request(request, ASK_MAX).await? {
            Answer::Agents { items, .. } => {
                Ok(items.into_iter().map(|view| (view.record.agent_id().clone(), view)).collect())
            }
            _ => bail!("a question for the agents got another answer"),
        }
    }

    /// Whether all of `names` can be given work.
    pub async fn all_ready(&self, names: &[&str]) -> anyhow::Result<Option<BTreeMap<AgentId, AgentView>>> {
        let agents = self.agents().await?;
        let is_ready = |name: &&str| {
            agents
                .get(*name)
                .is_some_and(|view| view.record.state == AgentState::Ready && view.heard.is_some())
        };
        Ok(names.iter().all(is_ready).then_some(agents))
    }

    /// Every message that the cluster knows, page by page.
    pub async fn messages(&self) -> anyhow::Result<Vec<MessageRecord>> {
        let mut all = Vec::new();
        let mut after = None;
        loop {
            let request = Request::Messages { limit: PAGE, after };
            let Answer::Messages { items, next, .. } = self.client.request(request, ASK_MAX).await? else {
                bail!("a question for the messages got another answer");
            };
            all.extend(items);
            match next {
                Some(next) => after = Some(next),
                None => return Ok(all),
            }
        }
    }
}

/// A job as its trace shows it.
#[derive(Clone, Debug)]
pub struct Job {
    pub trace_id: TraceId,
    pub root: MsgId,
    pub records: BTreeMap<MsgId, MessageRecord>,
    pub hops: Vec<Hop>,
}

impl Job {
    pub fn new(number: u32) -> anyhow::Result<Self> {
        Ok(Self {
            trace_id: TraceId::parse(&format!("t_checkup_{number}"))?,
            root: MsgId::parse(&format!("j{number}.job"))?,
            records: BTreeMap::new(),
            hops: Vec::new(),
        })
    }

    /// Reads the trace again. Before the first submission there is none. Answers whether it could be
    /// read: while nobody leads, it stands as it was.
    pub async fn refresh(&mut self, cluster: &Cluster) -> anyhow::Result<bool> {
        let request = Request::Trace { trace_id: self.trace_id.clone() };
        match cluster.client.request(request, LOOK_MAX).await {
            Ok(Answer::Trace { hops, messages, .. }) => {
                self.records = messages.into_iter().map(|record| (record.msg_id.clone(), record)).collect();
                self.hops = hops;
                Ok(true)
            }
            Ok(_) => bail!("a question for a trace got another answer"),
            Err(error) if error.code() == reach_protocol::Code::NotFound => Ok(true),
            Err(error) if error.retryable() => Ok(false),
            Err(error) => Err(error).with_context(|| format!("the trace {}", self.trace_id)),
        }
    }

    pub fn of_capability<'a>(&'a self, wanted: &'a str) -> impl Iterator<Item = &'a MessageRecord> {
        self.records.values().filter(move |record| capability(record) == wanted)
    }

    /// Completed units, the job itself left out.
    pub fn done(&self) -> usize {
        self.records.values().filter(|record| record.msg_id != self.root && is_done(record)).count()
    }

    /// What an agent holds now: unfinished, by whether it has been received.
    pub fn held_by(&self, agent: &str) -> Vec<(&MessageRecord, bool)> {
        let unfinished = self.records.values().filter(|record| !record.state.is_final());
        unfinished
            .filter(|record| record.state.holder().is_some_and(|holder| &*holder.agent_id == agent))
            .map(|record| (record, record.state.name() == StateName::Acknowledged))
            .collect()
    }

    pub fn hops_of(&self, msg_id: &MsgId) -> Vec<&Hop> {
        self.hops.iter().filter(|hop| hop.msg_id == *msg_id).collect()
    }
}

pub fn is_done(record: &MessageRecord) -> bool {
    record.state.name() == StateName::Completed
}

pub fn node_of(view: &ClusterView, node: NodeId) -> Option<&NodeView> {
    view.nodes.iter().find(|candidate| candidate.node_id == node)
}

pub fn report_of(view: &ClusterView, node: NodeId) -> Option<&NodeReport> {
    node_of(view, node)?.report.as_ref()
}
