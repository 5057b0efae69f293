//! Openraft's own storage suite on our adapters, and whole groups in one process.

mod cluster;
mod group;
mod suite;
