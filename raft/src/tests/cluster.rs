//! What a group of three replicas promises, with crashes, cuts, hung disks and snapshots.

use std::time::{Duration, Instant};

use bytes::Bytes;
use reach_protocol::{Entry, Fact, NodeId, Reply, Stamp, codec};
use reach_storage::{CheckpointFile, memory::Part};

use super::group::{Group, register, within};
use crate::{
    Cursor, Error, Options, ProposeError, Role, Step,
    types::{Proposal, Replies, SnapshotMeta, Vote},
    wire::{self, Ask, Offer},
};

fn defaults(_: &mut Options) {}

fn small_log(options: &mut Options) {
    options.log_tail_entries = 4;
}

fn quick_watchdog(options: &mut Options) {
    options.watchdog = Duration::from_millis(600);
}

fn snapshots_by_count(options: &mut Options) {
    options.log_tail_entries = 4;
    options.snapshot_entries = 50;
    options.snapshot_log_bytes = u64::MAX;
}

fn snapshots_by_bytes(options: &mut Options) {
    options.log_tail_entries = 4;
    options.snapshot_entries = u64::MAX;
    options.snapshot_log_bytes = 8 << 10;
}

/// The agent ids registered by the next entry with facts.
async fn registered(cursor: &mut Cursor) -> Vec<String> {
    match within("a fact", cursor.next()).await {
        Step::Facts(entry) => entry
            .facts
            .iter()
            .filter_map(|fact| match fact {
                Fact::Registered(record) => Some(record.agent_id().to_string()),
                _ => None,
            })
            .collect(),
        step => panic!("{step:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_is_initialised_once_and_agrees() {
    let group = Group::new(defaults).await;
    let first = group.replica(NodeId(1));
    assert!(first.members().is_empty());
    assert!(first.leadership().borrow().leader.is_none());
    group.initialise().await;
    assert!(matches!(first.initialise(group.members()).await, Err(Error::AlreadyInitialised)));

    group.register("a", 200).await;
    let at = group.settle().await;
    let (leader, now) = group.leader().await;
    assert_eq!((now.leader, now.role), (Some(leader), Role::Leader));
    for id in group.ids() {
        let replica = group.replica(id);
        assert_eq!(replica.members(), group.members());
        assert_eq!(replica.hash_at(at.index), Some(at.state_hash));
        assert!(replica.hash_at(64).is_some(), "every multiple of 64 has a hash");
        assert_eq!(replica.hash_at(64), first.hash_at(64));
    }

    let follower = group.ids().into_iter().find(|id| *id != leader).unwrap();
    let entry = Entry { stamp: Stamp::default(), term: now.term, commands: vec![register("b")] };
    let refused = group.replica(follower).propose(&entry).await;
    assert_eq!(refused, Err(ProposeError::NotLeader { leader: Some(leader) }));
    let refused = group.replica(follower).read_index().await;
    assert_eq!(refused, Err(ProposeError::NotLeader { leader: Some(leader) }));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn proposals_in_flight_together_keep_their_order() {
    let group = Group::ready(defaults).await;
    let (leader, now) = group.leader().await;
    let mut cursor = group.replica(leader).facts().cursor();
    let names: Vec<String> = (0..300).map(|i| format!("a-{i}")).collect();
    let in_flight: Vec<_> = names
        .iter()
        .map(|name| Entry { stamp: Stamp::default(), term: now.term, commands: vec![register(name)] })
        .map(|entry| group.replica(leader).propose(&entry))
        .collect();
    for replies in within("the proposals", futures_util::future::join_all(in_flight)).await {
        assert!(matches!(&replies.unwrap()[..], [Reply::Agent(_)]));
    }
    for name in names {
        assert_eq!(registered(&mut cursor).await, [name]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_leader_takes_over_from_a_dead_one() {
    let mut group = Group::ready(defaults).await;
    group.register("a", 20).await;
    let (dead, before) = group.leader().await;
    group.crash(dead).await;

    let (_, after) = group.leader().await;
    assert!(after.term > before.term);
    group.register("b", 20).await;

    group.start(dead).await;
    group.register("c", 20).await;
    group.settle().await;
    assert_eq!(group.replica(dead).tables().live().agents.len(), 60);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_node_is_not_dialled_without_pause() {
    let mut group = Group::ready(defaults).await;
    let (leader, _) = group.leader().await;
    let dead = group.ids().into_iter().find(|id| *id != leader).unwrap();
    group.crash(dead).await;
    let (before, since) = (group.dials(dead), Instant::now());
    group.register("a", 300).await;
    let dials = group.dials(dead) - before;
    // Heartbeats, and replication that waits 50 ms at first; either may dial anew for each attempt.
    let most = 40 + 40 * since.elapsed().as_secs();
    assert!(dials <= most, "{dials} dials in {:?}", since.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn everything_survives_a_crash_of_all() {
    let mut group = Group::ready(defaults).await;
    group.register("a", 100).await;
    let before = group.settle().await;
    for id in group.ids() {
        group.crash(id).await;
    }
    for id in group.ids() {
        group.start(id).await;
    }
    let after = group.settle().await;
    assert!(after.index > before.index, "a new term begins with an entry of its own");
    assert_eq!(after.state_hash, before.state_hash);
    for id in group.ids() {
        assert_eq!(group.replica(id).tables().live().agents.len(), 100);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_behind_the_log_gets_a_snapshot_and_its_cursors_are_reset() {
    let group = Group::ready(small_log).await;
    let (leader, _) = group.leader().await;
    let away = group.ids().into_iter().find(|id| *id != leader).unwrap();
    group.settle().await;
    let mut cursor = group.replica(away).facts().cursor();
    let left_at = group.replica(away).applied().borrow().index;
    group.isolate(away);

    group.register("a", 100).await;
    for id in group.ids().into_iter().filter(|id| *id != away) {
        group.purge(id, left_at + 1).await;
    }
    group.heal();

    group.settle().await;
    let Step::Reset(reset) = within("a reset", cursor.next()).await else { panic!("facts were passed over") };
    assert!(reset > left_at + 50);
    group.purged(away, left_at + 1).await;
    group.register("c", 1).await;
    loop {
        if registered(&mut cursor).await == ["c-0"] {
            break;
        }
    }
    group.settle().await;
    assert_eq!(group.replica(away).tables().live().agents.len(), 102, "a, purge and c");
}

/// Nobody asks for a snapshot here. Answers where the leader's log begins once it was purged.
async fn makes_snapshots_by_itself(group: Group) -> u64 {
    let (leader, _) = group.leader().await;
    let away = group.ids().into_iter().find(|id| *id != leader).unwrap();
    group.settle().await;
    let mut cursor = group.replica(away).facts().cursor();
    let left_at = group.replica(away).applied().borrow().index;
    group.isolate(away);

    group.register("a", 100).await;
    // Openraft purges no further than a snapshot reaches.
    for id in group.ids().into_iter().filter(|id| *id != away) {
        group.purged(id, left_at + 1).await;
    }
    let first = group.nodes[&leader].log.bounds().first;
    group.heal();

    group.settle().await;
    let Step::Reset(reset) = within("a reset", cursor.next()).await else { panic!("it came by the log") };
    assert!(reset > left_at + 1);
    first
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn so_many_entries_make_a_snapshot_and_the_log_ends_behind_it() {
    let first = makes_snapshots_by_itself(Group::ready(snapshots_by_count).await).await;
    assert!(first > 50 - 4, "no sooner than the threshold says: {first}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn so_many_bytes_make_a_snapshot_and_the_log_ends_behind_it() {
    makes_snapshots_by_itself(Group::ready(snapshots_by_bytes).await).await;
}

/// The same on both stores: what is sent is theirs.
async fn survives_a_snapshot_and_a_restart(mut group: Group) {
    group.initialise().await;
    let (leader, _) = group.leader().await;
    let away = group.ids().into_iter().find(|id| *id != leader).unwrap();
    let left_at = group.settle().await.index;
    group.crash(away).await;
    group.register("a", 100).await;
    for id in group.ids().into_iter().filter(|id| *id != away) {
        group.purge(id, left_at + 1).await;
    }
    group.start(away).await;
    group.settle().await;
    // It came by a snapshot: nothing else purges this log.
    group.purged(away, left_at + 1).await;
    group.crash(away).await;
    group.start(away).await;
    group.register("b", 10).await;
    group.settle().await;
    assert_eq!(group.replica(away).tables().live().agents.len(), 111);

    let mut rows = Vec::new();
    for id in group.ids() {
        let mut all = Vec::new();
        let mut keep = |key: &[u8], value: &[u8]| all.push((key.to_vec(), value.to_vec()));
        group.replica(id).tables().visit(&mut keep).unwrap();
        rows.push(all);
    }
    assert!(rows[0].len() > 100);
    assert!(rows.iter().all(|other| *other == rows[0]), "replicas are equal byte by byte");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_got_a_snapshot_survives_its_next_restart() {
    survives_a_snapshot_and_a_restart(Group::new(small_log).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_got_a_snapshot_of_rocksdb_survives_its_next_restart() {
    survives_a_snapshot_and_a_restart(Group::on_rocksdb(small_log).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_snapshot_is_refused() {
    let group = Group::ready(defaults).await;
    let (leader, _) = group.leader().await;
    let to = group.ids().into_iter().find(|id| *id != leader).unwrap();
    let before = group.settle().await;
    for (sent, reason) in
        [(&b"content"[..], "checksum"), (b"conten", "ended early"), (b"contents", "were left")]
    {
        let mut duplex = group.dial(leader, to).await;
        let file = CheckpointFile { name: "rows".to_owned(), bytes: 7, crc32c: 1 };
        let offer =
            Offer { vote: Vote::new_committed(1, 1), meta: SnapshotMeta::default(), files: vec![file] };
        duplex.tx.send(wire::open(Ask::Snapshot(Box::new(offer)))).await.unwrap();
        duplex.tx.send(Bytes::from_static(sent)).await.unwrap();
        duplex.tx.finish().await.unwrap();
        let error = within("a refusal", group.refusals(to)).await;
        assert!(error.contains(reason), "{error}");
    }
    assert_eq!(group.settle().await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cursor_that_is_too_slow_is_reset() {
    let group = Group::with_ring(defaults, 16 << 10).await;
    group.initialise().await;
    let (leader, _) = group.leader().await;
    let mut slow = group.replica(leader).facts().cursor();
    group.register("a", 100).await;
    let Step::Reset(index) = within("a reset", slow.next()).await else { panic!("the ring kept too much") };
    assert!(index > 50);
    group.register("b", 1).await;
    loop {
        if registered(&mut slow).await == ["b-0"] {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_entry_of_another_term_does_nothing() {
    let group = Group::ready(defaults).await;
    let (leader, now) = group.leader().await;
    let before = group.settle().await;
    let stale = Entry {
        stamp: Stamp { cluster_ms: 9, wall_ms: 9 },
        term: now.term - 1,
        commands: vec![register("a"), register("b")],
    };

    let refused = group.replica(leader).propose(&stale).await;
    assert_eq!(refused, Err(ProposeError::Discarded), "it doesn't enter the log");

    // One that did, since its leader was deposed between the look and the append.
    let proposal = Proposal(codec::encode(&stale));
    let written = within("an entry", group.replica(leader).inner.raft.client_write(proposal)).await.unwrap();
    assert_eq!(written.data, Replies(vec![Reply::Void, Reply::Void]));
    let after = group.settle().await;
    assert_eq!(after.index, before.index + 1);
    assert_eq!((after.state_hash, after.stamp), (before.state_hash, before.stamp));
    assert!(group.replica(leader).tables().live().agents.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_never_goes_back() {
    let group = Group::ready(defaults).await;
    let (leader, now) = group.leader().await;
    let mut cursor = group.replica(leader).facts().cursor();
    for (name, cluster_ms, wall_ms) in [("a", 50, 500), ("b", 40, 600), ("c", 60, 550)] {
        let stamp = Stamp { cluster_ms, wall_ms };
        let entry = Entry { stamp, term: now.term, commands: vec![register(name)] };
        within("a proposal", group.replica(leader).propose(&entry)).await.unwrap();
    }
    let mut stamps = Vec::new();
    for _ in 0..3 {
        match within("a fact", cursor.next()).await {
            Step::Facts(entry) => stamps.push((entry.stamp.cluster_ms, entry.stamp.wall_ms)),
            step => panic!("{step:?}"),
        }
    }
    assert_eq!(stamps, [(50, 500), (50, 600), (60, 600)]);
    assert_eq!(group.settle().await.stamp, Stamp { cluster_ms: 60, wall_ms: 600 });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_moves_the_leadership() {
    let group = Group::ready(defaults).await;
    let (leader, before) = group.leader().await;
    let next = group.ids().into_iter().find(|id| *id != leader).unwrap();
    within("a transfer", group.replica(leader).transfer(next)).await.unwrap();
    let mut leadership = group.replica(next).leadership();
    let now = *within("leading", leadership.wait_for(|now| now.leading)).await.unwrap();
    assert!(now.term > before.term);
    let refused = group.replica(leader).transfer(next).await;
    assert!(matches!(refused, Err(Error::Transfer { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_with_a_hung_disk_is_replaced() {
    let group = Group::ready(quick_watchdog).await;
    let (hung, before) = group.leader().await;
    group.disk(hung).hold_writes();
    let entry = Entry { stamp: Stamp::default(), term: before.term, commands: vec![register("a")] };
    let waiting = group.replica(hung).propose(&entry);

    let others = group.ids().into_iter().filter(|id| *id != hung);
    let elected = others.map(|id| {
        let mut leadership = group.replica(id).leadership();
        Box::pin(async move { leadership.wait_for(|now| now.leading).await.map(|now| *now) })
    });
    let (now, ..) = within("an election", futures_util::future::select_all(elected)).await;
    assert!(now.unwrap().term > before.term);

    group.disk(hung).release_writes();
    // Both followers had it, so it was committed; its proposer may or may not have heard of that.
    let outcome = within("an outcome", waiting).await;
    assert!(matches!(&outcome, Ok(_) | Err(ProposeError::Unknown)), "{outcome:?}");
    group.register("b", 5).await;
    group.settle().await;
    assert_eq!(group.replica(hung).tables().live().agents.len(), 6);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_disk_ends_the_replica() {
    for part in [Part::Log, Part::Tables] {
        let group = Group::ready(defaults).await;
        let (leader, now) = group.leader().await;
        let fatal = group.replica(leader).fatal();
        group.disk(leader).fail_next_write(part, std::io::ErrorKind::Other);
        let entry = Entry { stamp: Stamp::default(), term: now.term, commands: vec![register("a")] };
        let outcome = within("an outcome", group.replica(leader).propose(&entry)).await;
        assert_eq!(outcome, Err(ProposeError::Unknown), "{part:?}");
        let reason = within("the failure", fatal).await;
        assert!(!reason.is_empty());
        let leadership = group.replica(leader).leadership();
        within("stepping down", async move {
            let mut leadership = leadership;
            let _ = leadership.wait_for(|now| !now.leading && now.leader.is_none()).await;
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_minority_leader_commits_nothing_and_catches_up() {
    let group = Group::ready(defaults).await;
    let (old, before) = group.leader().await;
    group.isolate(old);
    let entry = Entry { stamp: Stamp::default(), term: before.term, commands: vec![register("lost")] };
    let lost = group.replica(old).propose(&entry);
    let (_, after) = group.leader().await;
    assert!(after.term > before.term);
    assert!(group.replica(old).read_index().await.is_err());
    let late = Entry { stamp: Stamp::default(), term: before.term, commands: vec![register("late")] };
    let refused = within("a refusal", group.replica(old).propose(&late)).await;
    assert_eq!(refused, Err(ProposeError::NotLeader { leader: None }), "its lease has lapsed");
    group.register("a", 5).await;
    group.heal();
    group.settle().await;
    let outcome = within("an outcome", lost).await;
    assert!(outcome.is_err(), "{outcome:?}");
    assert_eq!(group.replica(old).tables().live().agents.len(), 5);
}
