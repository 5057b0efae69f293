//! The HTTP door: the same requests as over QUIC, as routes and JSON. Nothing outside this folder
//! names axum or hyper.
//!
//! It is open to this machine alone, and whoever comes through it acts as the local operator
//! ([`Principal::Loopback`]). `Host` and `Origin` are checked, so that no web page can ask anything.

mod agents;
mod events;
mod guard;
mod input;
mod messages;
mod node;
mod output;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router, middleware,
    routing::{get, post, put},
};
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use reach_protocol::Principal;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};

use crate::{exit::Exit, node::Shared, patience::when_free};

/// Connections served at once; further ones wait to be accepted.
const CONNECTIONS_MAX: usize = 1_024;
/// A request's head must be there within this time, and an idle connection is closed after it.
const HEAD_MAX: Duration = Duration::from_secs(10);
/// A peer that takes none of the bytes we owe it for so long is gone.
const UNREAD_MAX: Duration = Duration::from_secs(30);
/// How long a request may take, besides the time it asks to wait.
const REQUEST_MAX: Duration = Duration::from_secs(10);

/// Everyone who comes through this door.
const LOCAL: Principal = Principal::Loopback;

type State = axum::extract::State<Arc<Shared>>;

fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/healthz", get(node::healthz))
        .route("/readyz", get(node::readyz))
        .route("/metrics", get(node::metrics))
        .route("/v1/cluster", get(node::cluster))
        .route("/v1/rules", get(node::rules).put(node::apply_rules))
        .route("/v1/agents", get(agents::list))
        .route("/v1/problems", get(node::problems))
        .route("/v1/agents/{agent_id}", put(agents::register).get(agents::show).delete(agents::remove))
        .route("/v1/agents/{agent_id}/drain", post(agents::drain))
        .route("/v1/agents/{agent_id}/resume", post(agents::resume))
        .route("/v1/agents/{agent_id}/heartbeat", post(agents::heartbeat))
        .route("/v1/agents/{agent_id}/inbox", get(agents::inbox))
        .route("/v1/messages", get(messages::list).post(messages::submit))
        .route("/v1/messages/{msg_id}", get(messages::show))
        .route("/v1/messages/{msg_id}/payload", get(messages::payload))
        .route("/v1/messages/{msg_id}/result", get(messages::result))
        .route("/v1/messages/{msg_id}/received", post(messages::received))
        .route("/v1/messages/{msg_id}/complete", post(messages::complete))
        .route("/v1/messages/{msg_id}/fail", post(messages::fail))
        .route("/v1/messages/{msg_id}/progress", post(messages::progress))
        .route("/v1/traces/{trace_id}", get(messages::trace))
        .route("/v1/events", post(events::publish))
        .route("/v1/topics", get(events::topics))
        .route("/v1/topics/{type}", get(events::topic).put(events::set_topic).delete(events::remove_topic))
        .route("/v1/topics/{type}/events", get(events::read))
        .route("/v1/topics/{type}/trim", post(events::trim))
        .route("/v1/groups", get(events::groups))
        .route("/v1/groups/{group}", get(events::group).put(events::make_group).delete(events::drop_group))
        .route("/v1/groups/{group}/reset", post(events::reset_group))
        .route("/v1/groups/{group}/pull", post(events::pull))
        .route("/v1/groups/{group}/ack", post(events::ack))
        .route("/v1/groups/{group}/nack", post(events::nack))
        .route("/v1/groups/{group}/extend", post(events::extend))
        .fallback(guard::unknown_path)
        .method_not_allowed_fallback(guard::wrong_method)
        .layer(middleware::from_fn_with_state(shared.clone(), guard::check))
        .with_state(shared)
}

/// Binds the door, so that a port that is taken, and is not free in a moment, ends the start.
pub async fn bind(addr: SocketAddr) -> Result<TcpListener, Exit> {
    let listen = || {
        let listener = std::net::TcpListener::bind(addr)?;
        listener.set_nonblocking(true)?;
        TcpListener::from_std(listener)
    };
    let is_taken = |error: &io::Error| error.kind() == io::ErrorKind::AddrInUse;
    when_free(listen, is_taken).await.map_err(|error| {
        let message =
            format!("HTTP can't listen on {addr} ({error}): free the port, or name another as http_listen");
        Exit::new(crate::exit::TRANSPORT, message)
    })
}

pub async fn run(shared: Arc<Shared>, listener: TcpListener) {
    let router = router(shared.clone());
    let free = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let permit = free.clone().acquire_owned().await.expect("nobody closes it");
        match listener.accept().await {
            Ok((stream, _)) => {
                shared.clone().tracker.spawn(serve(shared.clone(), router.clone(), stream, permit));
            }
            // Too many open files, most of all: the others go on, and one of them ends some time.
            Err(error) => {
                tracing::warn!(%error, "an HTTP connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(shared: Arc<Shared>, router: Router, stream: TcpStream, permit: OwnedSemaphorePermit) {
    let _ = stream.set_nodelay(true);
    let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(UNREAD_MAX));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => {}
        () = shared.stop.cancelled() => {
            // What is being answered is answered; nothing new is read.
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(Duration::from_secs(2), connection).await;
        }
    }
    drop(permit);
}
