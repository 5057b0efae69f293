//! `certs revoke`: what its argument means, and what is said when it is done.

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use reach_config::Context;
use reach_protocol::{
    Fingerprint, Principal, Revocation, Revoked,
    frame::Request,
    id::{Name, Serial},
};
use reach_transport::{Identity, describe};

use super::{Failure, certs};
use crate::show::{self, Shown};

/// What is to be revoked, and what is known of it here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    revoked: Revoked,
    whose: Option<Principal>,
    ends_s: Option<u64>,
}

/// A file first, since nothing else says more; then what the text looks like.
pub fn target(what: &str, cluster: &Name) -> Result<Target, Failure> {
    if Path::new(what).is_file() {
        let unreadable =
            |error: &dyn std::fmt::Display| Failure::usage(format!("{what} can't be read ({error})"));
        let text = fs::read_to_string(what).map_err(|error| unreadable(&error))?;
        let info = describe(&text).map_err(|error| unreadable(&error))?;
        if info.identity.cluster != *cluster {
            return Err(Failure::usage(format!(
                "{what} is of cluster {}, and this is cluster {cluster}: choose another --context",
                info.identity.cluster
            )));
        }
        return Ok(Target {
            revoked: Revoked::Certificate(info.fingerprint),
            whose: Some(info.identity.principal),
            ends_s: u64::try_from(info.not_after.as_second()).ok(),
        });
    }
    if let Ok(fingerprint) = what.parse::<Fingerprint>() {
        return Ok(Target { revoked: Revoked::Certificate(fingerprint), whose: None, ends_s: None });
    }
    if let Ok(serial) = what.to_ascii_lowercase().replace(':', "").parse::<Serial>() {
        return Ok(Target { revoked: Revoked::Serial(serial), whose: None, ends_s: None });
    }
    let uri = match what.starts_with("reach://") {
        true => what.to_string(),
        false => format!("reach://{cluster}/{what}"),
    };
    match uri.parse::<Identity>() {
        Ok(identity) if identity.cluster == *cluster => {
            let revoked = Revoked::Identity { principal: identity.principal, made_until_s: now_s() };
            Ok(Target { revoked, whose: None, ends_s: None })
        }
        Ok(identity) => Err(Failure::usage(format!(
            "{what} is of cluster {}, and this is cluster {cluster}: choose another --context",
            identity.cluster
        ))),
        Err(_) => Err(Failure::usage(
            "say what to revoke: a certificate's file, its fingerprint or serial number as `agent-reach certs ls` \
             shows them, or an identity such as agent/ID, user/NAME, host/NAME or node/n2",
        )),
    }
}

impl Target {
    pub fn request(&self) -> Request {
        Request::Revoke { revoked: self.revoked.clone(), whose: self.whose.clone(), ends_s: self.ends_s }
    }

    /// Whoever revokes the certificate in use can't do the next thing with it.
    pub fn must_not_be_own(&self, context: &Context) -> Result<(), Failure> {
        let pem = fs::read_to_string(&context.cert).unwrap_or_default();
        let is_own = describe(&pem).is_ok_and(|own| match &self.revoked {
            Revoked::Certificate(fingerprint) => *fingerprint == own.fingerprint,
            Revoked::Serial(serial) => *serial == own.serial,
            Revoked::Identity { principal, .. } => *principal == own.identity.principal,
        });
        match is_own {
            false => Ok(()),
            true => Err(Failure::usage(format!(
                "that is the certificate which context {} uses, and it could do nothing more: revoke it as another \
                 operator, or all the same with --yes",
                context.name
            ))),
        }
    }

    /// A certificate's dates count seconds: one made for the same identity right after this returns
    /// must not fall into the second that was revoked.
    pub async fn until_the_next_is_good(&self) {
        if let Revoked::Identity { made_until_s, .. } = self.revoked {
            while now_s() == made_until_s {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

pub fn shown(revocation: &Revocation) -> Shown {
    let what = match (&revocation.revoked, &revocation.whose) {
        (Revoked::Identity { principal, made_until_s }, _) => {
            format!("every certificate of {principal} that was made until {}", certs::second(*made_until_s))
        }
        (revoked, Some(whose)) => format!("the certificate {revoked} of {whose}"),
        (revoked, None) => format!("the certificate {revoked}"),
    };
    let notes = vec![
        format!("revoked: {what}"),
        format!(
            "by {} at {}; every node refuses it within a second, live connections too",
            revocation.author,
            show::time(revocation.at.wall_ms)
        ),
    ];
    Shown { json: certs::revocation_json(revocation), notes, ..Shown::default() }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_revoked_can_be_said_in_four_ways() {
        let cluster = Name::parse("shop").unwrap();
        let revoked = |what: &str| target(what, &cluster).map(|target| target.revoked.to_string());
        let digits = Fingerprint::of(b"a").to_string();
        assert_eq!(revoked(&digits).unwrap(), format!("sha256:{digits}"));
        assert_eq!(revoked("0A:1B").unwrap(), "serial:0a1b");
        for what in ["agent/x", "reach://shop/agent/x"] {
            assert!(revoked(what).unwrap().starts_with("identity:agent/x:"), "{what}");
        }
        assert!(revoked("node/n2").unwrap().starts_with("identity:node/n2:"));
        for (what, why) in [
            ("reach://other/agent/x", "is of cluster other"),
            ("x", "say what to revoke"),
            ("agents/x.pem", "say what to revoke"),
            ("", "say what to revoke"),
        ] {
            let failure = revoked(what).unwrap_err();
            assert!(failure.to_string().contains(why) && failure.exit == 2, "{what}: {failure}");
        }
    }
}
