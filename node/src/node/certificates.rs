//! What this node knows of certificates besides what stands in them: the cluster's calendar, which
//! ones are revoked, the connections that stand on them, and its own files, which may be renewed
//! while it runs.

use std::{
    collections::{BTreeSet, HashMap},
    fs, io,
    path::Path,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, SystemTime},
};

use jiff::Timestamp;
use reach_config::TlsFiles;
use reach_protocol::{Fact, frame::Ending};
use reach_raft::Step;
use reach_storage::Tables;
use reach_transport::{CertificateInfo, Connection, Credentials, Endpoint, Now, Scrutiny, describe};

use super::Shared;
use crate::{
    cli::certs::SOON,
    clock::{Clock, calendar_ms},
    show,
};

/// How often the node's own files are looked at.
const FILES_EVERY: Duration = Duration::from_secs(1);
/// By the own clock alone, before a leader has told the cluster's calendar, a certificate ends so much later:
/// as at the handshake.
const OWN_CLOCK_SLACK: Duration = Duration::from_secs(48 * 3_600);
/// The most that is told of certificates that end.
const ENDING_MAX: usize = 100;

#[derive(Debug)]
pub struct Certificates {
    clock: Arc<Clock>,
    tables: Arc<dyn Tables>,
    /// Connections of either door, by their id.
    standing: Mutex<HashMap<u64, Connection>>,
    /// This node's own, of either door.
    own: Mutex<Vec<CertificateInfo>>,
}

impl Certificates {
    pub fn new(clock: Arc<Clock>, tables: Arc<dyn Tables>) -> Arc<Self> {
        Arc::new(Self { clock, tables, standing: Mutex::default(), own: Mutex::default() })
    }

    /// Until the answer is dropped, the connection is closed as soon as its certificate is revoked.
    pub fn watch(self: &Arc<Self>, connection: &Connection) -> Standing {
        self.standing().insert(connection.id(), connection.clone());
        // It may have been revoked since the handshake looked.
        self.close_if_revoked(connection);
        Standing { certificates: self.clone(), id: connection.id() }
    }

    fn close_revoked(&self) {
        let standing: Vec<Connection> = self.standing().values().cloned().collect();
        standing.iter().for_each(|connection| self.close_if_revoked(connection));
    }

    fn close_if_revoked(&self, connection: &Connection) {
        if let Some(why) = connection.certificate().and_then(|certificate| self.why_revoked(certificate)) {
            tracing::info!(identity = %connection.identity(), why, "connection closed");
            connection.refuse(&why);
        }
    }

    /// Whoever has a renewed one comes again with it, and nobody else gets in. The links between nodes stay:
    /// to close them all at one moment would be the end of the service, and `problems` tells 30 days ahead.
    fn close_ended(&self) {
        let now = self.now();
        for connection in self.standing().values() {
            let Some(certificate) = connection.certificate() else { continue };
            let CertificateInfo { identity, not_after, .. } = certificate;
            if identity.node().is_none() && has_ended(*not_after, now) {
                let why = format!("the certificate of {} ended at {not_after:.0}", identity.principal);
                tracing::info!(%identity, why, "connection closed");
                connection.close(&why);
            }
        }
    }

    fn why_revoked(&self, certificate: &CertificateInfo) -> Option<String> {
        let live = self.tables.live();
        let CertificateInfo { fingerprint, serial, identity, .. } = certificate;
        let revocation = live.revocation(*fingerprint, serial, &identity.principal, certificate.made_s())?;
        let at = show::time(revocation.at.wall_ms);
        Some(format!("the certificate of {} was revoked at {at}: have a new one issued", identity.principal))
    }

    /// Those at work that end within `SOON`, by the clock that dates are judged by.
    pub fn ending(&self) -> Vec<Ending> {
        let end = self.today() + SOON;
        let ending = |certificate: &CertificateInfo| {
            (certificate.not_after <= end).then(|| Ending {
                at_ms: certificate.not_after.as_millisecond().try_into().unwrap_or(0),
                whose: certificate.identity.principal.clone(),
            })
        };
        let mut found: BTreeSet<Ending> =
            self.standing().values().filter_map(|connection| ending(connection.certificate()?)).collect();
        found.extend(self.own().iter().filter_map(ending));
        found.into_iter().take(ENDING_MAX).collect()
    }

    fn today(&self) -> Timestamp {
        let (Now::Cluster(now) | Now::Own(now) | Now::Disputed { own: now, .. }) = self.now();
        now
    }

    fn own(&self) -> MutexGuard<'_, Vec<CertificateInfo>> {
        self.own.lock().expect("no panic while it is held")
    }

    fn standing(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        self.standing.lock().expect("no panic while it is held")
    }
}

impl Scrutiny for Certificates {
    fn now(&self) -> Now {
        let timestamp = |ms: u64| Timestamp::from_millisecond(ms as i64).unwrap_or(Timestamp::MAX);
        Now::of(self.clock.cluster_calendar_ms().map(timestamp), timestamp(calendar_ms()))
    }

    fn is_revoked(&self, certificate: &CertificateInfo) -> bool {
        self.why_revoked(certificate).is_some()
    }
}

/// As the handshake judges it.
fn has_ended(not_after: Timestamp, now: Now) -> bool {
    match now {
        Now::Cluster(now) => not_after < now,
        Now::Own(now) => now.duration_since(not_after) > OWN_CLOCK_SLACK.try_into().expect("two days fit"),
        Now::Disputed { cluster, own } => not_after < cluster && not_after < own,
    }
}

/// A connection under watch.
#[derive(Debug)]
pub struct Standing {
    certificates: Arc<Certificates>,
    id: u64,
}

impl Drop for Standing {
    fn drop(&mut self) {
        self.certificates.standing().remove(&self.id);
    }
}

/// The files of one door.
#[derive(Debug)]
pub struct Files {
    files: TlsFiles,
    endpoint: Endpoint,
    /// As they were when they were last read.
    seen: Option<Seen>,
    own: Option<CertificateInfo>,
    told_revoked: bool,
    told_end: bool,
}

/// Enough of a file to tell that it was replaced.
type Seen = [(SystemTime, u64); 3];

impl Files {
    pub fn new(files: TlsFiles, endpoint: Endpoint) -> Self {
        let own = fs::read_to_string(&files.cert).ok().and_then(|pem| describe(&pem).ok());
        let seen = look(&files).ok();
        Self { files, endpoint, seen, own, told_revoked: false, told_end: false }
    }

    /// Takes renewed files into use. Files that don't belong together yet, since they are being
    /// replaced one by one, are looked at again when they have changed once more.
    fn refresh(&mut self) {
        let Ok(now) = look(&self.files) else { return };
        if self.seen == Some(now) {
            return;
        }
        self.seen = Some(now);
        let cert = self.files.cert.display();
        let renewed = Credentials::load(&self.files.ca, &self.files.cert, &self.files.key)
            .and_then(|credentials| self.endpoint.renew(&credentials).map(|()| credentials))
            .and_then(|credentials| describe(&credentials.cert_pem));
        match renewed {
            Ok(own) => {
                tracing::info!(%cert, until = %format_args!("{:.0}", own.not_after), "certificate renewed");
                self.own = Some(own);
                (self.told_revoked, self.told_end) = (false, false);
            }
            Err(error) => {
                tracing::warn!(%cert, %error, "a changed certificate is not used; the one before still is");
            }
        }
    }

    /// The other nodes close the door on us: that is worth a line here.
    fn tell_if_revoked(&mut self, certificates: &Certificates) {
        let why = self.own.as_ref().and_then(|own| certificates.why_revoked(own));
        if let Some(why) = why.filter(|_| !self.told_revoked) {
            self.told_revoked = true;
            tracing::error!(cert = %self.files.cert.display(), why, "this node's own certificate is revoked");
        }
    }

    /// While there is time to renew it.
    fn tell_if_it_ends_soon(&mut self, certificates: &Certificates) {
        let soon = certificates.today() + SOON;
        let ends = self.own.as_ref().map(|own| own.not_after).filter(|ends| *ends <= soon);
        if let Some(ends) = ends.filter(|_| !self.told_end) {
            self.told_end = true;
            tracing::warn!(
                cert = %self.files.cert.display(), until = %format_args!("{ends:.0}"),
                "this node's certificate ends soon: `agent-reach certs renew` issues it again, no restart is needed"
            );
        }
    }
}

fn look(files: &TlsFiles) -> io::Result<Seen> {
    let of = |path: &Path| -> io::Result<(SystemTime, u64)> {
        let metadata = fs::metadata(path)?;
        Ok((metadata.modified()?, metadata.len()))
    };
    Ok([of(&files.ca)?, of(&files.cert)?, of(&files.key)?])
}

pub async fn run(shared: Arc<Shared>, mut doors: Vec<Files>) {
    let mut facts = shared.replica.facts().cursor();
    let mut every = tokio::time::interval(FILES_EVERY);
    // What was revoked while the cursor was made is in the tables.
    shared.certificates.close_revoked();
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            step = facts.next() => match step {
                Step::Facts(entry) => {
                    if entry.facts.iter().any(|fact| matches!(fact, Fact::Revoked(_))) {
                        shared.certificates.close_revoked();
                    }
                }
                Step::Reset(_) => shared.certificates.close_revoked(),
                Step::Closed => return,
            },
            _ = every.tick() => {
                for door in &mut doors {
                    door.refresh();
                    door.tell_if_revoked(&shared.certificates);
                    door.tell_if_it_ends_soon(&shared.certificates);
                }
                shared.certificates.close_ended();
                *shared.certificates.own() = doors.iter().filter_map(|door| door.own.clone()).collect();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_judged_as_at_the_handshake() {
        let end = Timestamp::from_second(1_000_000).unwrap();
        let after = |seconds: i64| Timestamp::from_second(1_000_000 + seconds).unwrap();
        const DAYS: i64 = 86_400;
        assert!(!has_ended(end, Now::Cluster(after(0))) && has_ended(end, Now::Cluster(after(1))));
        assert!(!has_ended(end, Now::Own(after(2 * DAYS))) && has_ended(end, Now::Own(after(2 * DAYS + 1))));
        assert!(!has_ended(end, Now::Own(after(-2 * DAYS))));
        let disputed = |cluster, own| Now::Disputed { cluster: after(cluster), own: after(own) };
        assert!(!has_ended(end, disputed(9 * DAYS, -1)) && !has_ended(end, disputed(-1, 9 * DAYS)));
        assert!(has_ended(end, disputed(9 * DAYS, 1)));
    }
}
