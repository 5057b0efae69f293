//! Nothing of its own: the crate exists to have its dependency built.
