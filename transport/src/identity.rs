//! Who a certificate speaks for: one SAN URI, read exactly or not at all.

use std::{fmt, str::FromStr};

use reach_protocol::{
    Principal,
    id::{AgentId, Name, NodeId},
};

/// Written `reach://CLUSTER/agent/ID`, `/host/NAME`, `/user/NAME` or `/node/ID`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    pub cluster: Name,
    pub principal: Principal,
}

impl Identity {
    pub fn new(cluster: Name, principal: Principal) -> Self {
        Self { cluster, principal }
    }

    pub fn node(&self) -> Option<NodeId> {
        match self.principal {
            Principal::Node(id) => Some(id),
            _ => None,
        }
    }
}

/// The text is left out: it came from a stranger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the identity is not reach://CLUSTER/ and one of agent/ID, host/NAME, user/NAME, node/ID: issue the certificate with `agent-reach certs issue`"
)]
pub struct BadIdentity;

impl FromStr for Identity {
    type Err = BadIdentity;

    fn from_str(text: &str) -> Result<Self, BadIdentity> {
        let rest = text.strip_prefix("reach://").ok_or(BadIdentity)?;
        let mut parts = rest.split('/');
        let (Some(cluster), Some(kind), Some(id), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(BadIdentity);
        };
        let name = |text: &str| Name::parse(text).map_err(|_| BadIdentity);
        let principal = match kind {
            "agent" => Principal::Agent(AgentId::parse(id).map_err(|_| BadIdentity)?),
            "host" => Principal::Host(name(id)?),
            "user" => Principal::User(name(id)?),
            "node" => Principal::Node(id.parse().map_err(|_| BadIdentity)?),
            _ => return Err(BadIdentity),
        };
        let identity = Self { cluster: name(cluster)?, principal };
        // One identity has one spelling: `n01` must not pass for `n1`.
        if identity.to_string() == text { Ok(identity) } else { Err(BadIdentity) }
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "reach://{}/{}", self.cluster, self.principal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_has_one_spelling() {
        for text in [
            "reach://prod/agent/host-1:redis",
            "reach://prod/host/build.7",
            "reach://prod/user/ann",
            "reach://prod/node/n3",
        ] {
            assert_eq!(text.parse::<Identity>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            "reach://",
            "reach://prod",
            "reach://prod/",
            "reach://prod/agent",
            "reach://prod/agent/",
            "reach://prod/agent/a/",
            "reach://prod/agent/a/b",
            "reach:///agent/a",
            "reach://prod//a",
            "Reach://prod/agent/a",
            "reach://prod/Agent/a",
            "reach://prod/root/a",
            "reach://prod/agent/*",
            "reach://prod/agent/a?x",
            "reach://prod/agent/a%2Fb",
            " reach://prod/agent/a",
            "reach://prod/agent/a ",
            "reach://prod@evil/agent/a/..",
            "reach://prod/node/1",
            "reach://prod/node/n01",
            "reach://prod/node/n+1",
            "reach://prod/node/n0",
            "https://prod/agent/a",
        ] {
            assert_eq!(text.parse::<Identity>(), Err(BadIdentity), "{text}");
        }
    }
}
