//! Empty. See Cargo.toml.
