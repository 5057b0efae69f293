//! What only real files can show: locks, folders, and an install cut off at each of its steps.

use std::{fs, path::Path};

use reach_storage::{Error, LogStore, Opened, Tables, rocks};

use crate::{
    disks::{LogSteps, entries},
    history::{apply, history, rows},
};

type Store = Opened<rocks::RocksLog, rocks::RocksTables>;

fn try_open(dir: &Path) -> Result<Store, Error> {
    rocks::open(dir, rocks::Options { ballast_bytes: 1 << 20, ..rocks::Options::default() })
}

fn open(dir: &Path) -> Store {
    try_open(dir).unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

type Step<'a> = &'a dyn Fn(&Path);

fn folders(state: &Path) -> Vec<String> {
    let names = fs::read_dir(state).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[test]
fn a_folder_is_used_by_one_store_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let error = try_open(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::InUse { dir: named } if named == dir.path()), "{error}");
    assert!(dir.path().join("ballast").exists());
    let Opened { log, tables, .. } = store;
    drop(log);
    try_open(dir.path()).unwrap_err();
    drop(tables);
    open(dir.path());
}

#[test]
fn an_install_cut_off_at_any_step_leaves_the_old_or_the_new() {
    let history = history(21, 120);
    let source = tempfile::tempdir().unwrap();
    let source = (open(source.path()), source);
    apply(&*source.0.tables, &history, 100, 10);
    let new = rows(&*source.0.tables);

    let base = tempfile::tempdir().unwrap();
    let old = {
        let store = open(base.path());
        apply(&*store.tables, &history, 40, 10);
        rows(&*store.tables)
    };
    let received = base.path().join("received");
    source.0.tables.checkpoint(received.clone()).unwrap();

    // Each step as the files are when the power fails right after it.
    let steps: [(&str, Step, bool); 5] = [
        ("received", &|_| {}, false),
        ("renamed", &|state| fs::rename(state.join("../received"), state.join("t-00000002")).unwrap(), false),
        (
            "half a new pointer",
            &|state| {
                fs::rename(state.join("../received"), state.join("t-00000002")).unwrap();
                fs::write(state.join("CURRENT.tmp"), "t-000").unwrap();
            },
            false,
        ),
        (
            "a whole new pointer beside the old one",
            &|state| {
                fs::rename(state.join("../received"), state.join("t-00000002")).unwrap();
                fs::write(state.join("CURRENT.tmp"), "t-00000002\n").unwrap();
            },
            false,
        ),
        (
            "switched, the old folder still there",
            &|state| {
                fs::rename(state.join("../received"), state.join("t-00000002")).unwrap();
                fs::write(state.join("CURRENT"), "t-00000002\n").unwrap();
            },
            true,
        ),
    ];
    for (step, files, is_new) in steps {
        println!("step: {step}");
        let dir = tempfile::tempdir().unwrap();
        copy(base.path(), dir.path());
        let state = dir.path().join("state");
        files(&state);
        for _ in 0..2 {
            let store = open(dir.path());
            assert_eq!(rows(&*store.tables) == new, is_new);
            assert_eq!(rows(&*store.tables) == old, !is_new);
            let current = if is_new { "t-00000002" } else { "t-00000001" };
            assert_eq!(folders(&state), ["CURRENT", current]);
        }
    }
}

#[test]
fn the_folder_of_replaced_tables_goes() {
    let history = history(22, 60);
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    for to in [20, 40, 60] {
        apply(&*store.tables, &history, to, 10);
        let copy = store.tables.checkpoint(dir.path().join("copies/copy")).unwrap();
        store.tables.install(copy.dir).unwrap();
        assert_eq!(store.tables.applied().index, to);
        let names = folders(&dir.path().join("state"));
        assert_eq!(names.len(), 2, "{names:?}");
    }
    let before = rows(&*store.tables);
    drop(store);
    assert_eq!(rows(&*open(dir.path()).tables), before);
}

#[test]
fn a_checkpoint_under_load_is_of_one_position() {
    let history = history(23, 3_000);
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    let copies: Vec<_> = std::thread::scope(|scope| {
        let applier = scope.spawn(|| apply(&*store.tables, &history, 3_000, 2));
        let mut copies = Vec::new();
        while !applier.is_finished() {
            let copy = dir.path().join(format!("copy-{}", copies.len()));
            copies.push(store.tables.checkpoint(copy).unwrap());
        }
        copies
    });
    println!("{} copies", copies.len());
    for copy in copies.into_iter().take(8) {
        let (reference, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir_in(dir.path()).unwrap());
        let (reference, target) = (open(reference.path()), open(target.path()));
        target.tables.install(copy.dir).unwrap();
        apply(&*reference.tables, &history, copy.applied.index, 100);
        assert_eq!(target.tables.applied(), reference.tables.applied());
        assert_eq!(rows(&*target.tables), rows(&*reference.tables));
    }
}

#[test]
fn files_that_are_missing_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path());
    store.log.fill(1..5);
    apply(&*store.tables, &history(1, 3), 3, 1);
    drop(store);

    let (current, aside) = (dir.path().join("state/CURRENT"), dir.path().join("aside"));
    fs::rename(&current, &aside).unwrap();
    let error = try_open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("state/CURRENT is damaged: it is missing, though there is a log"), "{error}");
    fs::write(&current, "t-7\n").unwrap();
    let error = try_open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("state/CURRENT names no folder of tables"), "{error}");
    fs::rename(&aside, &current).unwrap();

    fs::rename(dir.path().join("log"), &aside).unwrap();
    let error = try_open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("log is damaged: it is missing, though entries up to 3 were applied"), "{error}");
    fs::rename(&aside, dir.path().join("log")).unwrap();
    assert_eq!(open(dir.path()).log.all(), entries(1..5));
}

#[test]
fn a_log_put_back_to_yesterday_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).log.fill(1..6);
    let (log, yesterday) = (dir.path().join("log"), dir.path().join("yesterday"));
    copy(&log, &yesterday);
    open(dir.path()).log.fill(6..9);
    let marker = fs::read(log.join("ACKED")).unwrap();
    fs::remove_dir_all(&log).unwrap();
    fs::rename(&yesterday, &log).unwrap();
    fs::write(log.join("ACKED"), marker).unwrap();
    let error = try_open(dir.path()).unwrap_err();
    assert!(matches!(error, Error::LostTail { acknowledged: 8, last: Some(5), .. }), "{error}");
}

#[test]
fn a_flipped_byte_in_a_log_file_is_never_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    open(dir.path()).log.fill(1..200);
    let log = dir.path().join("log");
    let files = fs::read_dir(&log).unwrap().map(|entry| entry.unwrap().path());
    let data: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|kind| kind == "log" || kind == "sst"))
        .filter(|path| fs::metadata(path).unwrap().len() > 0)
        .collect();
    assert!(!data.is_empty());
    for path in data {
        let whole = fs::read(&path).unwrap();
        for part in 1..8 {
            let mut bytes = whole.clone();
            let at = bytes.len() * part / 8;
            bytes[at] ^= 0x40;
            let copied = tempfile::tempdir().unwrap();
            copy(dir.path(), copied.path());
            fs::write(copied.path().join("log").join(path.file_name().unwrap()), bytes).unwrap();
            let damage_is_found = match try_open(copied.path()) {
                Err(Error::Damaged { .. } | Error::LostTail { .. }) => true,
                Err(_) => false,
                Ok(store) => {
                    let bounds = store.log.bounds();
                    let read = store.log.read(bounds.first, bounds.next, usize::MAX);
                    // The byte may have been one that holds nothing, but nothing may be missing.
                    read.is_err() || read.unwrap() == entries(1..200)
                }
            };
            assert!(damage_is_found, "{} at byte {at}", path.display());
        }
    }
}
