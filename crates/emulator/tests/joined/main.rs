//! The emulator that ships, in a small machine: its corners, and random lives beside an emulator without caches.

#![expect(clippy::cast_possible_truncation, reason = "the numbers of a machine of twelve pages are small")]

mod corners;
mod lives;
mod machine;
