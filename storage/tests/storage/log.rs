//! The log's promises, the same on both disks.

use bytes::Bytes;
use reach_storage::{LogBounds, MetaKey};

use crate::disks::{Disk, LogSteps, content, done, entries};

#[test]
fn entries_and_metas_survive_a_reopen() {
    for disk in Disk::all() {
        let store = disk.open();
        assert_eq!(store.log.bounds(), LogBounds::default());
        assert_eq!(store.identity, None);
        store.log.put(MetaKey::Identity, "c1 n1 3").unwrap();
        store.log.fill(1..8);
        store.log.put(MetaKey::Vote, "term 1").unwrap();
        store.log.put(MetaKey::Vote, "term 2").unwrap();
        drop(store);

        let store = disk.open();
        assert_eq!(store.log.bounds(), LogBounds { first: 1, next: 8, purged: None });
        assert_eq!(store.log.all(), entries(1..8));
        assert_eq!(store.log.meta(MetaKey::Vote).unwrap(), Some("term 2".into()));
        assert_eq!(store.log.meta(MetaKey::Committed).unwrap(), None);
        assert_eq!(store.identity, Some("c1 n1 3".into()));
    }
}

#[test]
fn a_read_ends_at_its_bytes_but_gives_at_least_one() {
    for disk in Disk::all() {
        let log = disk.open().log;
        log.fill(1..100);
        let one = content(1).len();
        assert_eq!(log.read(1, 100, 0).unwrap(), entries(1..2));
        assert_eq!(log.read(1, 100, 3 * one).unwrap(), entries(1..4));
        assert_eq!(log.read(1, 100, 3 * one + 1).unwrap(), entries(1..4));
        assert_eq!(log.read(40, 60, usize::MAX).unwrap(), entries(40..60));
        assert_eq!(log.read(98, 200, usize::MAX).unwrap(), entries(98..100));
        assert_eq!(log.read(7, 7, usize::MAX).unwrap(), []);
    }
}

#[test]
fn a_truncated_log_goes_on_from_its_new_end() {
    for disk in Disk::all() {
        let store = disk.open();
        store.log.fill(1..10);
        store.log.cut(6).unwrap();
        assert_eq!(store.log.bounds().next, 6);
        drop(store);

        let store = disk.open();
        assert_eq!(store.log.all(), entries(1..6));
        let (done, wait) = done();
        store.log.append(vec![(6, Bytes::from_static(b"another 6"))], done);
        wait.recv().unwrap().unwrap();
        store.log.cut(100).unwrap();
        drop(store);

        let store = disk.open();
        assert_eq!(store.log.bounds().next, 7);
        assert_eq!(store.log.read(6, 7, 0).unwrap(), [(6, Bytes::from_static(b"another 6"))]);
    }
}

#[test]
fn removing_many_entries_leaves_no_hole() {
    for disk in Disk::all() {
        let store = disk.open();
        store.log.fill(0..1_000);
        store.log.cut(700).unwrap();
        store.log.fill(700..900);
        store.log.drop_to(499, "mark of 499");
        assert_eq!(store.log.all(), entries(500..900));
        drop(store);

        let store = disk.open();
        let purged = Some("mark of 499".into());
        assert_eq!(store.log.bounds(), LogBounds { first: 500, next: 900, purged });
        assert_eq!(store.log.all(), entries(500..900));
        store.log.cut(0).unwrap();
        drop(store);

        let store = disk.open();
        assert_eq!((store.log.bounds().first, store.log.bounds().next), (500, 500));
        store.log.fill(500..502);
        assert_eq!(store.log.all(), entries(500..502));
    }
}

#[test]
fn a_purge_past_the_end_moves_the_end() {
    for disk in Disk::all() {
        let store = disk.open();
        store.log.fill(1..5);
        store.log.drop_to(20, "snapshot at 20");
        let bounds = LogBounds { first: 21, next: 21, purged: Some("snapshot at 20".into()) };
        assert_eq!(store.log.bounds(), bounds);
        drop(store);

        let store = disk.open();
        assert_eq!(store.log.bounds(), bounds);
        store.log.fill(21..24);
        store.log.drop_to(3, "older than the last");
        drop(store);

        let store = disk.open();
        assert_eq!(store.log.bounds(), LogBounds { next: 24, ..bounds });
        assert_eq!(store.log.read(0, 100, usize::MAX).unwrap(), entries(21..24));
    }
}

#[test]
fn callbacks_come_in_the_order_of_the_calls() {
    for disk in Disk::all() {
        let log = disk.open().log;
        let (sender, receiver) = std::sync::mpsc::sync_channel(7);
        let called = |number: u32| {
            let sender = sender.clone();
            Box::new(move |written: std::io::Result<()>| {
                written.unwrap();
                sender.send(number).unwrap();
            })
        };
        log.append(entries(1..3), called(0));
        log.put_meta(MetaKey::Vote, "v".into(), called(1));
        log.append(vec![], called(2));
        log.truncate(2, called(3));
        log.append(entries(2..9), called(4));
        log.purge(4, "m".into(), called(5));
        log.put_meta(MetaKey::Committed, "c".into(), called(6));
        let order: Vec<u32> = receiver.iter().take(7).collect();
        assert_eq!(order, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(log.all(), entries(5..9));
    }
}

#[test]
fn a_closed_log_still_writes_what_waited() {
    for disk in Disk::all() {
        let store = disk.open();
        for index in 0..500 {
            store.log.append(vec![(index, content(index))], Box::new(|written| written.unwrap()));
        }
        drop(store);
        assert_eq!(disk.open().log.all(), entries(0..500));
    }
}

#[test]
fn the_log_is_what_a_simple_model_says() {
    for disk in Disk::all() {
        let seeds = if matches!(disk, Disk::Memory(_)) { 0..300 } else { 0..4 };
        for seed in seeds {
            println!("seed {seed}");
            let disk = match &disk {
                Disk::Memory(_) => Disk::Memory(reach_storage::memory::MemoryDisk::new(seed)),
                #[cfg(feature = "rocksdb")]
                Disk::Rocks(_) => Disk::rocks(),
            };
            follow_model(&disk, seed);
        }
    }
}

fn follow_model(disk: &Disk, seed: u64) {
    let mut chance = crate::history::Chance::new(seed);
    let (mut first, mut model): (u64, Vec<Bytes>) = (0, Vec::new());
    let mut purged = None;
    let mut log = disk.open().log;
    for step in 0..60 {
        let next = first + model.len() as u64;
        match chance.below(10) {
            0..5 => {
                let count = if chance.below(8) == 0 { 200 } else { chance.below(5) };
                let new: Vec<_> = (next..next + count)
                    .map(|index| (index, Bytes::from(format!("{index} of step {step}"))))
                    .collect();
                model.extend(new.iter().map(|(_, content)| content.clone()));
                log.append(new, Box::new(|written| written.unwrap()));
            }
            5..7 => {
                let from = first + chance.below(model.len() as u64 + 3);
                model.truncate((from - first) as usize);
                log.truncate(from, Box::new(|written| written.unwrap()));
            }
            7..9 => {
                let to = first + chance.below(model.len() as u64 + 3);
                let mark = Bytes::from(format!("mark of {to}"));
                model.drain(..model.len().min((to + 1 - first) as usize));
                (first, purged) = (to + 1, Some(mark.clone()));
                log.purge(to, mark, Box::new(|written| written.unwrap()));
            }
            _ => {
                drop(log);
                log = disk.open().log;
            }
        }
        let next = first + model.len() as u64;
        assert_eq!(log.bounds(), LogBounds { first, next, purged: purged.clone() }, "step {step}");
        let expected: Vec<_> = (first..).zip(model.iter().cloned()).collect();
        assert_eq!(log.all(), expected, "step {step}");
    }
}
