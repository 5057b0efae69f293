//! That the scheduler's work does not grow with what waits, what runs, or who is there.

use reach_protocol::Rules;

mod world;

use world::{World, agent_id, capabilities};

const WAITING: usize = 40_000;

#[test]
fn a_long_queue_is_worked_off_without_searching_it() {
    // With a search of the queue for each assignment this would take hours.
    let mut world = World::new(Rules::default());
    for n in 0..10 {
        world.register(&agent_id(&format!("a{n}")), &[("x", 1.0)], 400, "i");
    }
    world.apply(usize::MAX);
    for n in 0..WAITING {
        world.submit(&format!("m{n}"), capabilities(&["x"], &[]), 900_000);
    }
    world.apply(usize::MAX);
    assert_eq!(world.scheduler.figures().waiting, (WAITING - 4_000) as u64);
    let mut completed = 0;
    while completed < WAITING {
        let held = world.rows.live().messages.values().filter(|record| record.state.holder().is_some());
        let held: Vec<_> = held.map(|record| record.msg_id.clone()).collect();
        assert!(!held.is_empty(), "{completed} of {WAITING}");
        completed += held.len();
        for msg_id in &held {
            world.complete(msg_id);
        }
        while !world.log.is_empty() {
            world.apply(usize::MAX);
        }
    }
    assert_eq!(world.scheduler.figures(), Default::default());
    assert_eq!(world.scheduler.next_due(), None);
}
