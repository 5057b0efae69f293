//! What a start reads: the position, and the unfinished part of the tables. Finished messages are
//! never read here, so a start takes no longer after a long life.

use std::{io, ops::ControlFlow, sync::Arc};

use reach_machine::{Live, Write};
use reach_protocol::event::TopicRecord;
use serde::de::DeserializeOwned;

use super::row;
use crate::{
    kv::{Kv, Order},
    schema::{self, Table},
    store::Applied,
};

pub(super) fn applied(disk: &impl Kv) -> io::Result<Applied> {
    let value = disk.read(Table::Meta, &schema::applied())?;
    value.map_or(Ok(Applied::default()), |value| schema::decode_applied(&value))
}

pub(super) fn live(disk: &impl Kv) -> io::Result<Live> {
    let mut live = Live::default();
    if let Some(record) = row(disk, Table::Registry, &schema::rules(), "rules")? {
        live.write(&Write::PutRules(Arc::new(record)));
    }
    each(disk, Table::Registry, &schema::agents(), "agent", |_, record| {
        live.write(&Write::PutAgent(Arc::new(record)));
        Ok(())
    })?;
    each(disk, Table::Registry, &schema::revocations(), "revocation", |_, record| {
        live.write(&Write::PutRevocation(Arc::new(record)));
        Ok(())
    })?;
    each(disk, Table::Live, &schema::group(), "message", |_, record| {
        live.write(&Write::PutMessage(Arc::new(record)));
        Ok(())
    })?;
    each(disk, Table::Slots, &schema::group(), "slot", |key, slot| {
        let (agent_id, msg_id) = schema::slot_ids(key)?;
        live.write(&Write::PutSlot { agent_id, msg_id, slot });
        Ok(())
    })?;
    // One topic after the other: their events lie between them and are passed over.
    let mut from = schema::topics();
    let end = schema::after(&from);
    loop {
        let mut found: Option<TopicRecord> = None;
        disk.scan(Table::Events, &from, &end, Order::Up, &mut |_, value| {
            found = Some(schema::decode("topic", value)?);
            Ok(ControlFlow::Break(()))
        })?;
        let Some(record) = found else { break };
        from = schema::after_events(&record.event_type);
        live.write(&Write::PutTopic(Arc::new(record)));
    }
    each(disk, Table::Groups, &schema::groups(), "group", |_, record| {
        live.write(&Write::PutGroup(Arc::new(record)));
        Ok(())
    })?;
    each(disk, Table::Groups, &schema::positions(), "position", |_, position| {
        live.write(&Write::PutPosition(Arc::new(position)));
        Ok(())
    })?;
    Ok(live)
}

fn each<T: DeserializeOwned>(
    disk: &impl Kv,
    table: Table,
    prefix: &[u8],
    what: &'static str,
    mut visit: impl FnMut(&[u8], T) -> io::Result<()>,
) -> io::Result<()> {
    disk.scan(table, prefix, &schema::after(prefix), Order::Up, &mut |key, value| {
        visit(key, schema::decode(what, value)?)?;
        Ok(ControlFlow::Continue(()))
    })
}
