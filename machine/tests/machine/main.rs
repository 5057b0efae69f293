//! The machine at the boundary its users see: commands in, replies, facts and rows out.

mod build;
mod properties;
mod script;
