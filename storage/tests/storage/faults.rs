//! What the memory disk can break, and what must become of it.

use std::{
    io::ErrorKind,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::TryRecvError,
    },
    time::{Duration, Instant},
};

use reach_storage::{
    Error, FatalKind, LogStore, MetaKey, Tables,
    memory::{self, MemoryDisk, Options, Part},
};

use crate::{
    disks::{LogSteps, PATIENCE, Reports, content, done, entries},
    history::{apply, history, msg, rows},
};

fn options(reports: &Reports) -> Options {
    let mut options = Options { on_fatal: reports.on_fatal(), ..Options::default() };
    options.log.tail_bytes = 0;
    options
}

#[test]
fn an_entry_is_read_before_it_is_on_the_disk() {
    let disk = MemoryDisk::new(1);
    let log = memory::open(&disk, options(&Reports::default())).unwrap().log;
    log.fill(1..3);
    disk.hold_writes();
    let (done, wait) = done();
    log.append(entries(3..6), done);
    assert_eq!(log.all(), entries(1..6));
    assert_eq!(wait.try_recv().unwrap_err(), TryRecvError::Empty);
    disk.release_writes();
    wait.try_recv().unwrap().unwrap();
    assert_eq!(log.all(), entries(1..6));
}

#[test]
fn a_hung_disk_shows_in_the_age_of_the_oldest_write() {
    let disk = MemoryDisk::new(1);
    let log = memory::open(&disk, Options { writer_thread: true, ..Options::default() }).unwrap().log;
    log.fill(1..2);
    assert_eq!(log.oldest_write_age(), Duration::ZERO);
    disk.hold_writes();
    let (done, wait) = done();
    log.append(entries(2..3), done);
    let until = Instant::now() + PATIENCE;
    while log.oldest_write_age() < Duration::from_millis(2) {
        assert!(Instant::now() < until, "the age does not grow");
        std::thread::yield_now();
    }
    disk.release_writes();
    wait.recv_timeout(PATIENCE).unwrap().unwrap();
    assert_eq!(log.oldest_write_age(), Duration::ZERO);
}

#[test]
fn a_slow_disk_holds_its_callers_back_and_memory_does_not_grow() {
    const WRITES_MAX: usize = 8;
    let disk = MemoryDisk::new(1);
    let mut options = Options { writer_thread: true, ..Options::default() };
    options.log.tail_bytes = 0;
    options.log.queue_writes = WRITES_MAX;
    let log = memory::open(&disk, options).unwrap().log;
    disk.hold_writes();
    let sent = Arc::new(AtomicUsize::new(0));
    let (done, all_done) = std::sync::mpsc::sync_channel(500);
    let appender = std::thread::spawn({
        let (log, sent) = (log.clone(), sent.clone());
        move || {
            let mut bytes_max = 0;
            for index in 0..500 {
                let done = done.clone();
                let told = move |_| {
                    // One writer only: two of them would tell out of order.
                    assert_eq!(std::thread::current().name(), Some("log-writer"));
                    done.send(index).unwrap();
                };
                log.append(vec![(index, content(index))], Box::new(told));
                sent.fetch_add(1, Ordering::SeqCst);
                bytes_max = bytes_max.max(log.tail_bytes());
            }
            bytes_max
        }
    });
    let until = Instant::now() + PATIENCE;
    while sent.load(Ordering::SeqCst) < WRITES_MAX {
        assert!(Instant::now() < until, "the queue does not fill");
        std::thread::yield_now();
    }
    assert_eq!(sent.load(Ordering::SeqCst), WRITES_MAX);
    disk.release_writes();
    let bytes_max = appender.join().unwrap();
    assert!(bytes_max <= (WRITES_MAX + 1) * content(499).len(), "{bytes_max} bytes were held");
    assert!(all_done.iter().eq(0..500));
    assert!(disk.log_writes() <= 500);
    assert_eq!(log.all(), entries(0..500));
}

#[test]
fn what_waits_shares_one_write() {
    let disk = MemoryDisk::new(1);
    let log = memory::open(&disk, Options::default()).unwrap().log;
    disk.hold_writes();
    for index in 0..100 {
        log.append(vec![(index, content(index))], Box::new(|written| written.unwrap()));
    }
    let before = disk.log_writes();
    disk.release_writes();
    assert_eq!(disk.log_writes() - before, 1);
}

#[test]
fn after_a_failed_write_nothing_is_written_any_more() {
    for (kind, fatal) in [(ErrorKind::StorageFull, FatalKind::StorageFull), (ErrorKind::Other, FatalKind::Io)]
    {
        let (disk, reports) = (MemoryDisk::new(1), Reports::default());
        let store = memory::open(&disk, options(&reports)).unwrap();
        store.log.fill(1..3);
        disk.fail_next_write(Part::Log, kind);
        let before = disk.log_writes();
        for index in 3..6 {
            let (done, wait) = done();
            store.log.append(entries(index..index + 1), done);
            assert_eq!(wait.recv().unwrap().unwrap_err().kind(), kind);
        }
        assert_eq!(disk.log_writes(), before);
        let mut batch = store.tables.batch();
        batch.advance(1, "m".into());
        assert_eq!(batch.commit().unwrap_err().kind(), kind);
        assert_eq!(store.tables.flush().unwrap_err().kind(), kind);
        let kinds: Vec<_> = reports.all().iter().map(|report| report.kind).collect();
        assert_eq!(kinds, [fatal], "the process is told once");

        let store = memory::open(&disk, Options::default()).unwrap();
        assert_eq!(store.log.all(), entries(1..3));
    }
}

#[test]
fn once_a_write_has_failed_every_later_one_fails_in_its_turn() {
    let disk = MemoryDisk::new(1);
    let options = Options { writer_thread: true, ..Options::default() };
    let log = memory::open(&disk, options).unwrap().log;
    let (done, outcomes) = std::sync::mpsc::sync_channel(2_000);
    for index in 0..2_000 {
        if index == 1_000 {
            disk.fail_next_write(Part::Log, ErrorKind::Other);
        }
        let done = done.clone();
        let called = move |written: std::io::Result<()>| done.send((index, written.is_ok())).unwrap();
        log.append(vec![(index, content(index))], Box::new(called));
    }
    let outcomes: Vec<_> = outcomes.iter().take(2_000).collect();
    let durable = outcomes.iter().take_while(|(_, ok)| *ok).count() as u64;
    assert!(outcomes.iter().copied().eq((0..2_000).map(|index| (index, index < durable))));
    drop(log);
    assert_eq!(memory::open(&disk, Options::default()).unwrap().log.bounds().next, durable);
}

#[test]
fn a_failed_commit_has_done_nothing() {
    let (disk, reports) = (MemoryDisk::new(1), Reports::default());
    let store = memory::open(&disk, options(&reports)).unwrap();
    let history = history(2, 40);
    apply(&*store.tables, &history, 20, 5);
    let before = (store.tables.applied(), store.tables.live().clone(), rows(&*store.tables));
    disk.fail_next_write(Part::Tables, ErrorKind::StorageFull);
    let mut batch = store.tables.batch();
    batch.write(history[20].clone());
    batch.advance(21, "m".into());
    batch.commit().unwrap_err();
    assert_eq!((store.tables.applied(), store.tables.live().clone(), rows(&*store.tables)), before);
    assert_eq!(reports.all()[0].kind, FatalKind::StorageFull);
}

#[test]
fn a_damaged_entry_is_an_error_and_never_skipped() {
    let (disk, reports) = (MemoryDisk::new(1), Reports::default());
    let log = memory::open(&disk, options(&reports)).unwrap().log;
    log.fill(1..10);
    disk.damage_entry(5);
    assert_eq!(log.read(1, 5, usize::MAX).unwrap(), entries(1..5));
    assert_eq!(log.read(1, 10, usize::MAX).unwrap_err().kind(), ErrorKind::InvalidData);
    assert_eq!(log.read(5, 6, 0).unwrap_err().kind(), ErrorKind::InvalidData);
    let text = reports.all()[0].to_string();
    assert!(text.starts_with("reading the log: entry 5 of the log has checksum"), "{text}");
    assert!(!text.contains("content"), "an entry's content shows in an error");

    // At an edge of the log it is found at the next start already.
    disk.damage_entry(9);
    let error = memory::open(&disk, Options::default()).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
}

#[test]
fn a_damaged_row_fails_the_reader_and_the_commit() {
    let (disk, reports) = (MemoryDisk::new(1), Reports::default());
    let tables = memory::open(&disk, options(&reports)).unwrap().tables;
    let history = history(4, 100);
    apply(&*tables, &history, 100, 10);
    // The first row of finished messages: known on disk only.
    let all = rows(&*tables);
    let nth = all.iter().position(|(key, _)| key[0] == 3).unwrap();
    let key = &all[nth].0;
    let number = std::str::from_utf8(&key[6..key.len() - 1]).unwrap().parse().unwrap();
    disk.damage_row(nth);
    assert_eq!(tables.message(&msg(number)).unwrap_err().kind(), ErrorKind::InvalidData);
    assert_eq!(reports.all()[0].kind, FatalKind::Damaged);
    let mut batch = tables.batch();
    assert_eq!(reach_machine::Rows::message(&*batch, &msg(number)), None);
    batch.advance(101, "m".into());
    assert_eq!(batch.commit().unwrap_err().kind(), ErrorKind::InvalidData);
}

#[test]
fn a_log_that_lost_acknowledged_entries_is_refused() {
    let disk = MemoryDisk::new(1);
    memory::open(&disk, Options::default()).unwrap().log.fill(1..10);
    disk.lose_synced_entries(3);
    let error = memory::open(&disk, Options::default()).unwrap_err();
    assert!(matches!(error, Error::LostTail { acknowledged: 9, last: Some(6), .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("ends at entry 6, but entry 9 was acknowledged"), "{text}");
    assert!(text.contains("under a new node id"), "{text}");
}

#[test]
fn a_vote_is_written_after_the_marker_of_what_was_acknowledged() {
    for votes in [false, true] {
        let disk = MemoryDisk::new(1);
        let mut options = Options::default();
        options.log.marker_every = Duration::from_secs(3_600);
        let log = memory::open(&disk, options).unwrap().log;
        log.fill(1..10);
        if votes {
            log.put(MetaKey::Vote, "term 2").unwrap();
        }
        disk.crash();
        disk.lose_synced_entries(1);
        let opened = memory::open(&disk, Options::default());
        assert_eq!(matches!(opened, Err(Error::LostTail { acknowledged: 9, .. })), votes);
    }
}

#[test]
fn entries_that_were_truncated_are_not_missed() {
    let disk = MemoryDisk::new(1);
    let log = memory::open(&disk, Options::default()).unwrap().log;
    log.fill(1..10);
    log.cut(4).unwrap();
    assert_eq!(memory::open(&disk, Options::default()).unwrap().log.all(), entries(1..4));

    // The marker is lowered before the truncation, which may fail.
    let log = memory::open(&disk, Options::default()).unwrap().log;
    log.fill(4..10);
    disk.fail_next_write(Part::Log, ErrorKind::Other);
    log.cut(2).unwrap_err();
    let log = memory::open(&disk, Options::default()).unwrap().log;
    assert_eq!(log.all(), entries(1..10));
    log.drop_to(30, "snapshot");
    assert_eq!(memory::open(&disk, Options::default()).unwrap().log.bounds().next, 31);
}

#[test]
fn a_power_cut_leaves_the_first_of_the_waiting_writes() {
    let mut ends = std::collections::BTreeSet::new();
    for seed in 0..40 {
        println!("seed {seed}");
        let disk = MemoryDisk::new(seed);
        let log = memory::open(&disk, Options::default()).unwrap().log;
        log.fill(1..4);
        disk.hold_writes();
        for index in 4..8 {
            let called = move |_| panic!("write {index} was not done, nor was anybody left to be told");
            log.append(entries(index..index + 1), Box::new(called));
        }
        log.truncate(2, Box::new(|_| panic!("a truncation was not done")));
        disk.crash();
        log.append(entries(2..3), Box::new(|_| panic!("the process is gone")));

        let log = memory::open(&disk, Options::default()).unwrap().log;
        let next = log.bounds().next;
        assert_eq!(log.all(), entries(1..next));
        ends.insert(next);
        log.fill(next..next + 3);
        assert_eq!(log.all(), entries(1..next + 3));
    }
    assert_eq!(ends.into_iter().collect::<Vec<_>>(), [2, 4, 5, 6, 7, 8]);
}

#[test]
fn a_power_cut_takes_the_tables_back_no_further_than_the_flush() {
    let history = history(8, 100);
    let mut positions = std::collections::BTreeSet::new();
    for seed in 0..30 {
        println!("seed {seed}");
        let disk = MemoryDisk::new(seed);
        let tables = memory::open(&disk, Options::default()).unwrap().tables;
        apply(&*tables, &history, 50, 5);
        assert_eq!(tables.flush().unwrap(), 50);
        apply(&*tables, &history, 100, 5);
        let whole = (tables.applied(), rows(&*tables));
        disk.crash();

        let tables = memory::open(&disk, Options::default()).unwrap().tables;
        let index = tables.applied().index;
        assert!((50..=100).contains(&index) && index.is_multiple_of(5), "{index}");
        positions.insert(index);
        apply(&*tables, &history, 100, 3);
        assert_eq!((tables.applied(), rows(&*tables)), whole, "replayed from {index}");
    }
    assert!(positions.len() > 3, "{positions:?}");
}
