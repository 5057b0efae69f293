//! The agent's own loop, on the runtime of the agent's program: it takes tasks, starts their
//! handlers, and answers the cluster's echo. A program whose handlers block this runtime stops
//! answering, and gets no new tasks, while its process is still known to be alive.

use std::{panic::AssertUnwindSafe, sync::Arc};

use futures_util::{FutureExt, future::BoxFuture};
use reach_protocol::{AgentId, InstanceId, MsgId};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, error, info_span};

use crate::{
    context,
    link::Link,
    task::{Done, Failure, Outcome, Task},
};

pub(crate) type Handler = Arc<dyn Fn(Task) -> BoxFuture<'static, Result<Done, Failure>> + Send + Sync>;

pub(crate) enum Work {
    Run { task: Box<Task>, cancel: CancellationToken },
    Echo { link: Arc<Link>, seq: u64 },
}

/// A handler is gone; without an outcome, since it was told to stop.
pub(crate) struct Ended {
    pub(crate) msg_id: MsgId,
    pub(crate) outcome: Option<Outcome>,
}

/// Runs until the session lets go of its end.
pub(crate) async fn dispatch(
    agent_id: AgentId,
    instance: InstanceId,
    handler: Handler,
    mut work: mpsc::Receiver<Work>,
    ended: mpsc::Sender<Ended>,
) {
    while let Some(work) = work.recv().await {
        match work {
            Work::Echo { link, seq } => link.echo(&agent_id, &instance, seq),
            Work::Run { task, cancel } => {
                tokio::spawn(run(*task, cancel, handler.clone(), ended.clone()));
            }
        }
    }
}

async fn run(task: Task, cancel: CancellationToken, handler: Handler, ended: mpsc::Sender<Ended>) {
    let msg_id = task.msg_id.clone();
    let span = info_span!("task", trace_id = %task.trace_id, msg_id = %msg_id, attempt = task.attempt);
    let scope = task.scope();
    let handled = AssertUnwindSafe(async move { handler(task).await }).catch_unwind();
    let outcome = async {
        let handled = cancel.run_until_cancelled(context::within(scope, handled)).await?;
        Some(Outcome::of(handled.unwrap_or_else(|_| {
            // What it said while it panicked may be content; the panic hook has shown it already.
            error!("the handler panicked");
            Err(Failure::Error("the handler panicked".into()))
        })))
    };
    let outcome = outcome.instrument(span).await;
    // A session that is over has no use for it: the task is still in the inbox.
    let _ = ended.send(Ended { msg_id, outcome }).await;
}
