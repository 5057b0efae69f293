//! What a start reads: the position, and the unfinished part of the tables. Finished messages are
//! never read here, so a start takes no longer after a long life.

use std::{io, ops::ControlFlow, sync::Arc};

use reach_machine::{Live, Write};
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
