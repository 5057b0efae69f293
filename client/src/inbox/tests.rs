//! The inbox is closed and opened again after every step, and must hold what the step promised.

use reach_protocol::Json;

use super::*;

fn task(id: &str) -> StoredTask {
    StoredTask {
        msg_id: MsgId::parse(id).unwrap(),
        trace_id: TraceId::parse("t1").unwrap(),
        flow_seq: 1,
        attempt: 0,
        progress: Progress::Received,
        expires_wall_ms: 99,
        envelope: Envelope::request(vec!["x".parse().unwrap()], Json::parse("{\"a\":1}").unwrap()),
        outcome: None,
    }
}

fn done(text: &str) -> Arc<Outcome> {
    Arc::new(Outcome::Done { excerpt: "e".into(), result: Json::of(&text).unwrap(), cost: None })
}

fn open(dir: &Path) -> (Inbox, Vec<StoredTask>) {
    let (inbox, _, tasks) = Inbox::open(dir, Some(&AgentId::parse("agent").unwrap()), 4096).unwrap();
    (inbox, tasks)
}

#[tokio::test]
async fn every_step_is_found_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let put = task("m1");
    let id = &put.msg_id.clone();
    let (inbox, tasks) = open(dir.path());
    assert!(tasks.is_empty());
    inbox.put(put.clone()).done().await.unwrap();
    inbox.close().await;

    let (inbox, tasks) = open(dir.path());
    assert!(tasks == [put.clone()]);
    inbox.begin(id).done().await.unwrap();
    inbox.close().await;

    let (inbox, tasks) = open(dir.path());
    assert_eq!(tasks[0].progress, Progress::Running);
    inbox.adopt(id, 3).done().await.unwrap();
    inbox.close().await;

    let (inbox, tasks) = open(dir.path());
    assert_eq!((tasks[0].progress, tasks[0].attempt), (Progress::Running, 3));
    inbox.finish(id, done("r")).done().await.unwrap();
    inbox.close().await;

    let (inbox, tasks) = open(dir.path());
    assert!(tasks[0].outcome == Some(done("r")));
    assert_eq!((tasks[0].progress, tasks[0].attempt), (Progress::Finished, 3));
    inbox.settle(id).done().await.unwrap();
    inbox.close().await;

    let (inbox, tasks) = open(dir.path());
    assert!(tasks.is_empty());
    let hash = put.envelope.content_hash();
    assert!(inbox.settled(id, hash).unwrap().as_ref() == Some(&*done("r")));
    assert!(inbox.settled(id, [0; 16]).unwrap().is_none(), "another message came under the same id");

    // A repeat takes it out of the ring again, as finished.
    let again = StoredTask { attempt: 4, progress: Progress::Finished, outcome: Some(done("r")), ..put };
    inbox.put(again.clone()).done().await.unwrap();
    assert!(inbox.settled(id, hash).unwrap().is_none());
    inbox.close().await;

    let (inbox, tasks) = open(dir.path());
    assert!(tasks == [again]);
    inbox.remove(id).done().await.unwrap();
    inbox.close().await;
    assert!(open(dir.path()).1.is_empty());
}

#[tokio::test]
async fn a_failure_is_not_kept_for_repeats() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, _) = open(dir.path());
    let put = task("m1");
    inbox.put(put.clone()).done().await.unwrap();
    let failed = Outcome::of(Err(crate::Failure::Error("no".into())));
    inbox.finish(&put.msg_id, Arc::new(failed)).done().await.unwrap();
    inbox.settle(&put.msg_id).done().await.unwrap();
    assert!(inbox.settled(&put.msg_id, put.envelope.content_hash()).unwrap().is_none());
}

#[tokio::test]
async fn the_ring_forgets_the_oldest_by_count_and_by_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, _) = open(dir.path());
    let hash = task("m").envelope.content_hash();
    let settle = async |id: &str, outcome: Arc<Outcome>| {
        let put = task(id);
        let steps = [inbox.put(put.clone()), inbox.finish(&put.msg_id, outcome), inbox.settle(&put.msg_id)];
        for step in steps {
            step.done().await.unwrap();
        }
    };
    for batch in 0..11 {
        let ids: Vec<String> = (0..100).map(|i| format!("m{}", batch * 100 + i)).collect();
        let all = ids.iter().map(|id| settle(id, done("small")));
        futures_util::future::join_all(all).await;
    }
    let kept = |id: &str| inbox.settled(&MsgId::parse(id).unwrap(), hash).unwrap().is_some();
    assert!(!kept("m0") && !kept("m99") && kept("m1000") && kept("m1099"));

    let big = "x".repeat(6 << 20);
    for id in ["b0", "b1", "b2"] {
        settle(id, done(&big)).await;
    }
    assert!(!kept("m1099") && !kept("b0") && kept("b1") && kept("b2"));
}

#[tokio::test]
async fn a_second_holder_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, _) = open(dir.path());
    let refused = Inbox::open(dir.path(), None, 16).err().unwrap();
    assert!(matches!(refused, InboxError::Locked { .. }), "{refused}");
    inbox.close().await;
    let other = AgentId::parse("other").unwrap();
    let refused = Inbox::open(dir.path(), Some(&other), 16).err().unwrap();
    assert!(matches!(&refused, InboxError::Foreign { owner, .. } if owner == "agent"), "{refused}");
}

#[tokio::test]
async fn the_end_of_a_holder_is_waited_for_and_not_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, _) = open(dir.path());
    let refused = Inbox::open_when_free(dir.path(), None, 16).await.err().unwrap();
    assert!(matches!(refused, InboxError::Locked { .. }), "{refused}");

    // Asked for before it is free.
    let mut next = Box::pin(Inbox::open_when_free(dir.path(), None, 16));
    assert!(futures_util::poll!(&mut next).is_pending());
    inbox.close().await;
    assert_eq!(next.await.unwrap().1.as_str(), "agent");
}

#[tokio::test]
async fn a_generated_id_is_kept_beside_the_inbox() {
    let dir = tempfile::tempdir().unwrap();
    let (inbox, made, _) = Inbox::open(dir.path(), None, 16).unwrap();
    assert_eq!((made.len(), &made[14..15]), (36, "7"), "{made}");
    inbox.close().await;
    assert_eq!(Inbox::open(dir.path(), None, 16).unwrap().1, made);
}

#[tokio::test]
async fn a_damaged_file_is_named_and_not_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("inbox.redb");
    std::fs::write(&path, vec![7u8; 64 << 10]).unwrap();
    let refused = Inbox::open(dir.path(), None, 16).err().unwrap();
    assert!(matches!(refused, InboxError::Damaged { .. }), "{refused}");
    std::fs::remove_file(&path).unwrap();

    let (inbox, _) = open(dir.path());
    for i in 0..50 {
        inbox.put(task(&format!("m{i}"))).done().await.unwrap();
    }
    inbox.close().await;
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes.windows(7).rposition(|window| window == b"{\"a\":1}").unwrap();
    bytes.iter_mut().skip(at & !0xfff).take(4096).for_each(|byte| *byte ^= 0x55);
    std::fs::write(&path, bytes).unwrap();
    // Whatever page that was: either it was in use, and the file is refused, or it was not.
    match Inbox::open(dir.path(), None, 16) {
        Err(refused) => assert!(matches!(refused, InboxError::Damaged { .. }), "{refused}"),
        Ok((_, _, tasks)) => assert_eq!(tasks.len(), 50),
    }
}
