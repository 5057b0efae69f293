//! Before and after every route: who may ask at all, what is counted, and the answer where there is
//! no route.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, Method, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use reach_protocol::{Code, ErrorReply};

use super::{State, output::Refusal};

/// Refuses what a web page could send, and counts every answer.
pub async fn check(axum::extract::State(shared): State, request: Request<Body>, next: Next) -> Response {
    let method = known(request.method());
    let response = match is_local(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => Refusal(error).into_response(),
    };
    shared.metrics.http_answered(method, response.status().as_u16());
    response
}

/// A method as a label: callers can't make up new ones.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        _ => "other",
    }
}

/// A page from elsewhere has its own `Origin`, and a name that was pointed here its own `Host`.
fn is_local(headers: &HeaderMap) -> Result<(), ErrorReply> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let host = text(header::HOST).unwrap_or("");
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(""),
        None => host.split(':').next().unwrap_or(""),
    };
    if !matches!(name, "127.0.0.1" | "localhost" | "::1") {
        let message = "HTTP is for this machine: ask 127.0.0.1 or localhost by that name (the Host header)";
        return Err(forbidden("Host", message));
    }
    match text(header::ORIGIN) {
        Some(origin) if origin.strip_prefix("http://") != Some(host) => {
            Err(forbidden("Origin", "pages of another origin may not ask this node"))
        }
        _ => Ok(()),
    }
}

fn forbidden(field: &str, message: &str) -> ErrorReply {
    ErrorReply { field: Some(field.into()), ..ErrorReply::new(Code::Forbidden, message) }
}

pub async fn unknown_path(uri: Uri) -> Refusal {
    // An id may stand in it, and a very long one too.
    let path: String = uri.path().chars().take(128).collect();
    Refusal(ErrorReply::new(Code::NotFound, format!("there is no {path}: see docs/surface.md")))
}

pub async fn wrong_method(method: Method, uri: Uri) -> Refusal {
    let path: String = uri.path().chars().take(128).collect();
    Refusal(ErrorReply::new(Code::MethodNotAllowed, format!("{} does not take {}", path, known(&method))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(pairs: &[(header::HeaderName, &str)]) -> Option<String> {
        let headers = pairs.iter().map(|(name, value)| (name.clone(), value.parse().unwrap())).collect();
        is_local(&headers).err().and_then(|error| error.field)
    }

    #[test]
    fn only_this_machine_and_no_foreign_page_may_ask() {
        let host = |value| (header::HOST, value);
        let origin = |value| (header::ORIGIN, value);
        for good in ["127.0.0.1:7480", "localhost:7480", "localhost", "[::1]:7480"] {
            assert_eq!(field(&[host(good)]), None, "{good}");
        }
        assert_eq!(field(&[host("127.0.0.1:7480"), origin("http://127.0.0.1:7480")]), None);
        for bad in ["evil.example", "127.0.0.1.evil.example:7480", "", "localhost.evil.example"] {
            assert_eq!(field(&[host(bad)]).as_deref(), Some("Host"), "{bad}");
        }
        assert_eq!(field(&[]).as_deref(), Some("Host"));
        for bad in ["http://evil.example", "null", "https://127.0.0.1:7480", "http://127.0.0.1:9999"] {
            assert_eq!(field(&[host("127.0.0.1:7480"), origin(bad)]).as_deref(), Some("Origin"), "{bad}");
        }
    }
}
