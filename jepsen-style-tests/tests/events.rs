//! Topics and groups while leaders, and then all nodes, get `kill -9`: what was acknowledged is there
//! once and in order, everybody gets every event, and a poison event is a dead letter after exactly as
//! many deliveries as the rules say.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use jepsen_style_tests::Cluster;
use reach_client::{Client, Consumer};
use reach_protocol::{
    Code, Envelope, EventRow, EventType, Json, MsgId, Name,
    event::Start,
    frame::{Answer, Request},
};

const SHORT: Duration = Duration::from_secs(10);
const PROGRESS_MAX: Duration = Duration::from_secs(60);
const ACK_WAIT: Duration = Duration::from_secs(2);
const DELIVERIES_MAX: u32 = 5;
const RULES: &str = "[events]\nack_wait_ms = 2000\n[grants]\noperators = [\"admin\"]\n";

fn topic() -> EventType {
    EventType::parse("load.step.v1").expect("a legal type")
}

/// What nobody ever gets done.
fn is_poison(number: u64) -> bool {
    number % 50 == 7
}

fn number(row: &EventRow) -> u64 {
    row.data.to_value()["n"].as_u64().expect("the publishers wrote it")
}

/// Publishes one event after the other, each until it is acknowledged, and returns their offsets.
async fn publish(
    client: Client,
    publisher: u64,
    stop: Arc<AtomicBool>,
    acknowledged: Arc<AtomicU64>,
) -> anyhow::Result<Vec<(MsgId, u64)>> {
    let mut offsets = Vec::new();
    for n in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let msg_id = MsgId::parse(&format!("e_{publisher}_{n}"))?;
        let payload = Json::from_value(&serde_json::json!({ "by": publisher, "n": n }));
        let event = Envelope { msg_id: Some(msg_id.clone()), ..Envelope::event(&topic(), payload) };
        // An unknown outcome is asked for again by its key.
        let published = loop {
            match client.publish(vec![event.clone()]).await {
                Ok(published) => break published,
                Err(error) if error.retryable() || error.code() == Code::OutcomeUnknown => {}
                Err(error) => anyhow::bail!("{msg_id} was refused: {error}"),
            }
        };
        offsets.push((msg_id, published[0].offset));
        acknowledged.fetch_add(1, Ordering::Relaxed);
    }
    Ok(offsets)
}

/// What the members of a group have seen together.
#[derive(Default)]
struct Ledger {
    /// Acknowledged, with the answer in hand.
    done: BTreeSet<u64>,
    /// When the last pull that gave the event was sent, and its count.
    handed: BTreeMap<u64, (Instant, u32)>,
    redelivered: u64,
}

async fn consume(
    consumer: Consumer,
    ledger: Arc<Mutex<Ledger>>,
    stop: Arc<AtomicBool>,
) -> anyhow::Result<()> {
    let mut forget = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let (sent, done_before) = (Instant::now(), ledger.lock().expect("no panic").done.clone());
        let pulled = match consumer.pull(20, Duration::from_millis(500)).await {
            Ok(pulled) => pulled,
            Err(error) if error.retryable() || error.code() == Code::OutcomeUnknown => continue,
            Err(error) => return Err(error.into()),
        };
        anyhow::ensure!(pulled.gaps.is_empty(), "nothing was trimmed: {:?}", pulled.gaps);
        let (mut good, mut bad) = (Vec::new(), Vec::new());
        for delivered in pulled.events {
            let (offset, count) = (delivered.event.offset, delivered.deliveries);
            let mut ledger = ledger.lock().expect("no panic");
            anyhow::ensure!(!done_before.contains(&offset), "{offset} came again after its acknowledgement");
            anyhow::ensure!(count <= DELIVERIES_MAX, "{offset} was delivered {count} times");
            if let Some((earlier, before)) = ledger.handed.insert(offset, (sent, count)) {
                anyhow::ensure!(count > before, "{offset}: delivery {count} after {before}");
                ledger.redelivered += 1;
                // A poison event is given back at once; any other comes again by its ack wait alone.
                let waited = sent.elapsed() + sent.duration_since(earlier.min(sent));
                let is_early =
                    !is_poison(number(&delivered.event)) && count == before + 1 && waited < ACK_WAIT;
                anyhow::ensure!(!is_early, "{offset} came again after {waited:?}");
            }
            if is_poison(number(&delivered.event)) { bad.push(delivered) } else { good.push(delivered) }
        }
        // Now and then a member forgets what it was given.
        forget += 1;
        if forget.is_multiple_of(7) && good.len() > 1 {
            good.pop();
        }
        // A word that is lost is no failure: the event comes again.
        if !good.is_empty() && consumer.ack(&good).await.is_ok() {
            ledger.lock().expect("no panic").done.extend(good.iter().map(|delivered| delivered.event.offset));
        }
        if !bad.is_empty() {
            let _ = consumer.nack(&bad, Duration::ZERO, "poison").await;
        }
    }
    Ok(())
}

async fn read_all(client: &Client, event_type: &EventType) -> anyhow::Result<Vec<EventRow>> {
    let (mut rows, mut from) = (Vec::new(), Start::Earliest);
    loop {
        let request = Request::Events { event_type: event_type.clone(), from, limit: 1_000, wait_ms: None };
        let Answer::Events { items, next, .. } = client.request(request, SHORT).await? else {
            anyhow::bail!("something else than events came back");
        };
        if items.is_empty() {
            return Ok(rows);
        }
        rows.extend(items);
        from = Start::Offset(next);
    }
}

async fn progress(counter: &AtomicU64, more: u64) -> anyhow::Result<()> {
    let goal = counter.load(Ordering::Relaxed) + more;
    let deadline = Instant::now() + PROGRESS_MAX;
    while counter.load(Ordering::Relaxed) < goal {
        anyhow::ensure!(Instant::now() < deadline, "no progress for {PROGRESS_MAX:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_acknowledged_event_is_lost_and_everybody_gets_each() -> anyhow::Result<()> {
    let mut cluster = Cluster::start(3).await?;
    let client = cluster.client().await?;
    client.request(Request::ApplyRules { text: RULES.into(), expect: None }, SHORT).await?;
    let groups = ["crew", "audit"].map(|name| Name::parse(name).expect("a legal name"));
    for group in &groups {
        let (group, topics) = (group.clone(), "load.*".parse()?);
        client.request(Request::CreateGroup { group, topics, from: Start::Earliest }, SHORT).await?;
    }

    let (stop_publishers, stop_members) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let acknowledged = Arc::<AtomicU64>::default();
    let mut publishers = Vec::new();
    for publisher in 0..3 {
        let (client, stop) = (cluster.client().await?, stop_publishers.clone());
        publishers.push(tokio::spawn(publish(client, publisher, stop, acknowledged.clone())));
    }
    let (mut members, mut ledgers) = (Vec::new(), Vec::new());
    for group in &groups {
        let ledger = Arc::<Mutex<Ledger>>::default();
        for member in ["a", "b"] {
            let client = cluster.client().await?;
            let consumer = Consumer::new(client, group.clone(), Name::parse(member)?);
            members.push(tokio::spawn(consume(consumer, ledger.clone(), stop_members.clone())));
        }
        ledgers.push(ledger);
    }

    progress(&acknowledged, 100).await?;
    for _ in 0..3 {
        let leader = cluster.leader().await?;
        cluster.kill(leader)?;
        progress(&acknowledged, 100).await?;
        cluster.spawn(leader)?;
        progress(&acknowledged, 100).await?;
    }
    for id in cluster.node_ids() {
        cluster.kill(id)?;
    }
    for id in cluster.node_ids() {
        cluster.spawn(id)?;
    }
    progress(&acknowledged, 100).await?;

    stop_publishers.store(true, Ordering::Relaxed);
    let mut published = Vec::new();
    for publisher in publishers {
        let offsets = publisher.await??;
        assert!(
            offsets.windows(2).all(|pair| pair[0].1 < pair[1].1),
            "a publisher's events keep their order"
        );
        published.extend(offsets);
    }
    cluster.wait_until_serving().await?;

    // The members go on until nothing is left for either group.
    let deadline = Instant::now() + PROGRESS_MAX;
    loop {
        let request = Request::Groups { limit: 10, after: None };
        let Answer::Groups { items, .. } = client.request(request, SHORT).await? else {
            anyhow::bail!("something else than groups came back");
        };
        if items.iter().flat_map(|view| &view.positions).all(|shown| shown.lag == 0) {
            break;
        }
        anyhow::ensure!(Instant::now() < deadline, "the groups never came to the end: {items:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stop_members.store(true, Ordering::Relaxed);
    for member in members {
        member.await??;
    }

    // The topic: dense, and each acknowledged event where its publisher was told.
    cluster.converged().await?;
    let rows = read_all(&client, &topic()).await?;
    assert!(rows.iter().map(|row| row.offset).eq(0..rows.len() as u64), "offsets are dense");
    let ids: BTreeSet<_> = rows.iter().filter_map(|row| row.msg_id.clone()).collect();
    assert_eq!(ids.len(), rows.len(), "one event for each msg_id");
    for (msg_id, offset) in &published {
        assert_eq!(rows[*offset as usize].msg_id.as_ref(), Some(msg_id), "{offset}");
    }
    assert_eq!(published.len(), rows.len(), "every publisher had its answer in the end");
    for id in cluster.node_ids() {
        let own = read_all(&cluster.client_of(id).await?, &topic()).await?;
        assert!(own == rows, "{id} reads something else");
    }

    // The groups: what is no poison was acknowledged, the rest is a dead letter, each once.
    let poison: BTreeSet<u64> =
        rows.iter().filter(|row| is_poison(number(row))).map(|row| row.offset).collect();
    for (group, ledger) in groups.iter().zip(&ledgers) {
        let dead = read_all(&client, &reach_protocol::event::dead_letters(group)).await?;
        let ledger = ledger.lock().expect("no panic");
        let handed: BTreeSet<u64> = ledger.handed.keys().copied().collect();
        let never: Vec<_> =
            rows.iter().map(|row| row.offset).filter(|offset| !handed.contains(offset)).collect();
        println!(
            "{group}: {} events, {} acknowledged with an answer, {} redelivered, {} unseen",
            rows.len(),
            ledger.done.len(),
            ledger.redelivered,
            never.len()
        );
        assert!(never.is_empty(), "{group} never got {never:?}");
        assert!(ledger.redelivered > 0, "the run exercised too little");
        let mut buried = BTreeMap::new();
        for row in &dead {
            let data = row.data.to_value();
            let offset = data["offset"].as_u64().expect("a dead letter names its event");
            let before = buried.insert(offset, data["deliveries"].clone());
            assert_eq!(before, None, "{offset} was buried twice");
        }
        let unexpected: Vec<_> = buried.keys().filter(|offset| !poison.contains(offset)).collect();
        assert!(unexpected.is_empty(), "{group} buried {unexpected:?}, which were no poison");
        assert_eq!(buried.len(), poison.len(), "every poison event is a dead letter");
        assert!(buried.values().all(|count| *count == DELIVERIES_MAX), "{buried:?}");
    }
    Ok(())
}
