//! The tables' promises, the same on both disks.

use std::sync::Arc;

use reach_machine::Write;
use reach_protocol::{
    EventRow, Json, MessageState, Name,
    event::{EventMark, GroupPosition, Open, TopicRecord},
    message::StateName,
};
use reach_storage::Applied;

use crate::{
    disks::Disk,
    history::{
        agent, agent_id, apply, at, completed, dead_letter, envelope, event, event_type, history, holder,
        hop, mark, message, msg, pending, rows, slot, trace_id,
    },
};

#[test]
fn rows_position_and_memory_survive_a_reopen() {
    for disk in Disk::all() {
        let history = history(3, 400);
        let mut store = disk.open();
        for to in [0, 1, 150, 151, 400] {
            apply(&*store.tables, &history, to, 7);
            assert_eq!(store.tables.flush().unwrap(), to);
            let before = (store.tables.applied(), store.tables.live().clone(), rows(&*store.tables));
            drop(store);
            store = disk.open();
            let after = (store.tables.applied(), store.tables.live().clone(), rows(&*store.tables));
            assert_eq!(before, after);
            assert_eq!(before.0.index, to);
        }
        assert_eq!(store.tables.applied().mark, mark(400));
        let live = store.tables.live();
        assert!(!live.messages.is_empty() && !live.agents.is_empty() && !live.slots.is_empty());
        assert!(live.messages.values().all(|record| !record.state.is_final()));
    }
}

#[test]
fn replicas_are_equal_byte_by_byte_however_they_batch() {
    for seed in 0..5 {
        println!("seed {seed}");
        let history = history(seed, 300);
        let mut replicas: Vec<(Applied, _)> = Vec::new();
        for per_batch in [1, 3, 50, 300] {
            for disk in Disk::all() {
                let store = disk.open();
                apply(&*store.tables, &history, 300, per_batch);
                replicas.push((store.tables.applied(), rows(&*store.tables)));
            }
        }
        assert!(replicas.iter().all(|replica| *replica == replicas[0]));
    }
}

#[test]
fn a_batch_sees_its_own_writes_and_others_see_them_after_commit() {
    for disk in Disk::all() {
        let store = disk.open();
        let tables = &*store.tables;
        let mut batch = tables.batch();
        assert_eq!(batch.agent(&agent_id(1)), None);
        assert_eq!((batch.waiting(), batch.topic(&event_type())), (0, None));

        batch.write(vec![
            Write::PutAgent(agent(1, 5)),
            Write::PutMessage(message(1, 10, 10, pending())),
            Write::PutSlot { agent_id: agent_id(1), msg_id: msg(2), slot: slot(1) },
            Write::PutDelivered { msg_id: msg(2), agent_id: agent_id(1) },
        ]);
        assert_eq!(batch.agent(&agent_id(1)), Some(agent(1, 5)));
        assert_eq!(batch.message(&msg(1)), Some(message(1, 10, 10, pending())));
        assert_eq!(batch.waiting(), 1);
        assert_eq!(batch.slots(&agent_id(1)), [(msg(2), slot(1))]);
        assert_eq!(batch.slots_taken(&agent_id(1)), 1);
        assert!(batch.was_delivered(&msg(2), &agent_id(1)));
        assert!(!batch.was_delivered(&msg(1), &agent_id(1)));
        assert_eq!(tables.message(&msg(1)).unwrap(), None);
        assert!(tables.live().agents.is_empty());
        batch.advance(1, mark(1));
        batch.commit().unwrap();
        assert_eq!(tables.message(&msg(1)).unwrap(), Some(message(1, 10, 10, pending())));
        assert!(tables.was_delivered(&msg(2), &agent_id(1)).unwrap());

        // Over rows of an earlier batch: some go, some change.
        let mut batch = tables.batch();
        assert_eq!(batch.slot(&agent_id(1), &msg(2)), Some(slot(1)));
        batch.write(vec![
            Write::RemoveSlot { agent_id: agent_id(1), msg_id: msg(2) },
            Write::PutMessage(message(1, 10, 20, completed(1))),
        ]);
        assert_eq!(batch.slot(&agent_id(1), &msg(2)), None);
        assert_eq!((batch.slots_taken(&agent_id(1)), batch.waiting()), (0, 0));
        assert_eq!(batch.message(&msg(1)), Some(message(1, 10, 20, completed(1))));

        // Taken again, handed on, freed twice: counted once each.
        let put = |number, ms| Write::PutSlot { agent_id: agent_id(1), msg_id: msg(number), slot: slot(ms) };
        let free = |number| Write::RemoveSlot { agent_id: agent_id(1), msg_id: msg(number) };
        batch.write(vec![put(2, 7), put(3, 8), put(3, 9), free(4), put(4, 1), free(4), free(4)]);
        assert_eq!(batch.slots(&agent_id(1)), [(msg(2), slot(7)), (msg(3), slot(9))]);
        assert_eq!(batch.slots_taken(&agent_id(1)), 2);
        assert_eq!((batch.slot(&agent_id(1), &msg(4)), batch.slots_taken(&agent_id(2))), (None, 0));
        drop(batch);
        assert_eq!(tables.live().waiting, 1, "a dropped batch has done nothing");
        assert_eq!(tables.applied().index, 1);
    }
}

#[test]
fn a_topic_keeps_its_place_whatever_goes_and_whoever_reads() {
    for disk in Disk::all() {
        let store = disk.open();
        let topic = |floor, next| {
            let topic = TopicRecord::new(event_type(), at(1));
            Arc::new(TopicRecord { floor, next, bytes: next * 4, ..topic })
        };
        let offsets = |rows: Vec<EventRow>| rows.iter().map(|row| row.offset).collect::<Vec<_>>();
        let mut batch = store.tables.batch();
        batch.write((0..2_500).map(|offset| Write::PutEvent(event(offset, 1))).collect());
        batch.write(vec![Write::PutTopic(topic(0, 2_500))]);
        assert_eq!(offsets(batch.events(&event_type(), 2_498, 9_999)), [2_498, 2_499]);
        batch.advance(1, mark(1));
        batch.commit().unwrap();

        // Some on the disk, some in the batch; few of them go one by one, many as a range.
        let mut batch = store.tables.batch();
        batch.write(vec![Write::PutEvent(event(2_500, 2)), Write::PutTopic(topic(0, 2_501))]);
        assert_eq!(offsets(batch.events(&event_type(), 2_499, 9_999)), [2_499, 2_500]);
        for (from, to) in [(0, 10), (10, 2_400)] {
            batch.write(vec![Write::RemoveEvents { event_type: event_type(), from, to }]);
        }
        let mark_of = EventMark { event_type: event_type(), offset: 2_500, content_hash: [1; 16] };
        batch.write(vec![
            Write::PutTopic(topic(2_400, 2_501)),
            Write::PutEventMark { msg_id: msg(1), mark: mark_of.clone() },
        ]);
        assert_eq!(batch.event_mark(&msg(1)), Some(mark_of.clone()));
        batch.advance(2, mark(2));
        batch.commit().unwrap();

        drop(store);
        let store = disk.open();
        let tables = &*store.tables;
        assert_eq!(tables.live().topics.get(&event_type()), Some(&topic(2_400, 2_501)));
        let all = offsets(tables.events(&event_type(), 0, u64::MAX, usize::MAX).unwrap());
        assert_eq!(all, (2_400..2_501).collect::<Vec<_>>());
        assert_eq!(tables.events(&event_type(), 2_400, u64::MAX, 1).unwrap().len(), 1, "at least one");
        assert_eq!(tables.batch().event_mark(&msg(1)), Some(mark_of));
    }
}

#[test]
fn who_holds_events_is_known_in_the_batch_and_after_it() {
    for disk in Disk::all() {
        let mut store = disk.open();
        let (group, member) = (Name::parse("g").unwrap(), Name::parse("w").unwrap());
        let position = |holder: Option<&Name>| {
            let open = Open { from: 0, to: 2, member: holder.cloned(), pull: 1, deliveries: 1, due_ms: 9 };
            let position = GroupPosition::new(group.clone(), event_type(), 2);
            Arc::new(GroupPosition { open: vec![open], ..position })
        };
        let held = position(Some(&member));
        let mut batch = store.tables.batch();
        batch.write(vec![Write::PutPosition(held.clone())]);
        assert_eq!(batch.held(&member), std::slice::from_ref(&held));
        batch.advance(1, mark(1));
        batch.commit().unwrap();
        store.tables.flush().unwrap();
        drop(store);
        store = disk.open();

        let mut batch = store.tables.batch();
        assert_eq!(batch.held(&member), [held]);
        batch.write(vec![Write::PutPosition(position(None))]);
        assert_eq!(batch.held(&member), []);
        batch.advance(2, mark(2));
        batch.commit().unwrap();
        assert!(store.tables.live().held.is_empty());
    }
}

#[test]
fn a_finished_message_is_found_on_disk_only() {
    for disk in Disk::all() {
        let store = disk.open();
        let mut batch = store.tables.batch();
        let result = Json::parse(r#"{"score":1}"#).unwrap();
        batch.write(vec![
            Write::PutMessage(message(1, 10, 10, pending())),
            Write::PutEnvelope { msg_id: msg(1), envelope: envelope(1) },
            Write::PutMessage(message(1, 10, 15, MessageState::Matched { holder: holder(1) })),
            Write::PutMessage(message(1, 10, 20, completed(1))),
            Write::PutResult { msg_id: msg(1), result: result.clone() },
            Write::PutDeadLetter(dead_letter(2, 20)),
            Write::PutHop { trace_id: trace_id(1), ordinal: 0, hop: hop(1, 10, StateName::Pending) },
            Write::PutHop { trace_id: trace_id(1), ordinal: 1, hop: hop(1, 15, StateName::Matched) },
            Write::PutHop { trace_id: trace_id(1), ordinal: 2, hop: hop(1, 20, StateName::Completed) },
            Write::PutHop { trace_id: trace_id(10), ordinal: 0, hop: hop(9, 20, StateName::Pending) },
        ]);
        batch.advance(1, mark(1));
        batch.commit().unwrap();
        drop(store);

        let store = disk.open();
        let tables = &*store.tables;
        assert!(tables.live().messages.is_empty());
        assert_eq!(tables.message(&msg(1)).unwrap(), Some(message(1, 10, 20, completed(1))));
        assert_eq!(tables.envelope(&msg(1)).unwrap(), Some(envelope(1)));
        assert_eq!(tables.result(&msg(1)).unwrap(), Some(result));
        assert_eq!(tables.result(&msg(2)).unwrap(), None);
        assert_eq!(tables.dead_letter(&msg(2)).unwrap(), Some(dead_letter(2, 20)));
        assert_eq!(tables.dead_letter(&msg(1)).unwrap(), None);
        let states = |max| {
            let hops = tables.hops(&trace_id(1), max).unwrap();
            hops.iter().map(|hop| hop.to).collect::<Vec<_>>()
        };
        assert_eq!(states(9), [StateName::Pending, StateName::Matched, StateName::Completed]);
        assert_eq!(states(2), [StateName::Pending, StateName::Matched]);
    }
}

#[test]
fn messages_are_listed_by_acceptance_newest_first() {
    for disk in Disk::all() {
        let tables = disk.open().tables;
        let mut batch = tables.batch();
        // Ids say nothing about the order; a later change of state moves nothing.
        for (number, ms) in [(7, 10), (3, 20), (9, 20), (1, 300)] {
            batch.write(vec![Write::PutMessage(message(number, ms, ms, pending()))]);
        }
        batch.write(vec![Write::PutMessage(message(7, 10, 400, completed(1)))]);
        batch.advance(1, mark(1));
        batch.commit().unwrap();

        let list = |after: Option<u64>, max| {
            let messages = tables.messages(after.map(msg).as_ref(), max).unwrap();
            messages.iter().map(|record| record.msg_id.clone()).collect::<Vec<_>>()
        };
        assert_eq!(list(None, 10), [msg(1), msg(9), msg(3), msg(7)]);
        assert_eq!(list(None, 2), [msg(1), msg(9)]);
        assert_eq!(list(Some(9), 2), [msg(3), msg(7)]);
        assert_eq!(list(Some(7), 2), []);
        assert_eq!(list(Some(77), 2), [], "nothing comes after an unknown message");
        assert_eq!(tables.messages(None, 1).unwrap()[0].accepted, at(300));
    }
}

#[test]
fn a_checkpoint_installed_elsewhere_is_the_same_tables() {
    for (from, to) in Disk::all().into_iter().zip(Disk::all()) {
        let history = history(11, 200);
        let source = from.open();
        apply(&*source.tables, &history, 120, 10);
        let folder = to.folder();
        let checkpoint = source.tables.checkpoint(folder.path().join("copy")).unwrap();
        assert_eq!(checkpoint.applied, source.tables.applied());
        assert!(checkpoint.files.iter().all(|file| !file.name.starts_with("LOG")));
        let copied = rows(&*source.tables);
        apply(&*source.tables, &history, 200, 10);

        let target = to.open();
        apply(&*target.tables, &history, 30, 10);
        assert_eq!(target.tables.install(checkpoint.dir).unwrap(), checkpoint.applied);
        assert_eq!(rows(&*target.tables), copied);
        apply(&*target.tables, &history, 150, 10);
        target.tables.flush().unwrap();
        drop(target);

        // A second start finds the installed ones, and they go on like the source's.
        for _ in 0..2 {
            let target = to.open();
            assert_eq!(target.tables.applied().index, 150);
        }
        let target = to.open();
        apply(&*target.tables, &history, 200, 10);
        assert_eq!(target.tables.applied(), source.tables.applied());
        assert_eq!(rows(&*target.tables), rows(&*source.tables));
        assert_eq!(*target.tables.live(), *source.tables.live());
    }
}

#[test]
fn a_checkpoint_that_is_older_or_broken_changes_nothing() {
    for disk in Disk::all() {
        let history = history(5, 60);
        let store = disk.open();
        apply(&*store.tables, &history, 20, 1);
        let folder = disk.folder();
        let old = store.tables.checkpoint(folder.path().join("old")).unwrap();
        apply(&*store.tables, &history, 60, 1);
        let before = (store.tables.applied(), rows(&*store.tables));

        let refused = store.tables.install(old.dir).unwrap_err();
        assert_eq!(refused.to_string(), "a checkpoint at 20 can't replace tables at 60");
        let broken = folder.path().join("broken");
        std::fs::create_dir(&broken).unwrap();
        std::fs::write(broken.join("rows"), b"no rows").unwrap();
        std::fs::write(broken.join("CURRENT"), b"MANIFEST-000009\n").unwrap();
        store.tables.install(broken).unwrap_err();
        assert_eq!((store.tables.applied(), rows(&*store.tables)), before);
        store.tables.flush().unwrap();
        drop(store);
        assert_eq!(disk.open().tables.applied(), before.0);
    }
}
