//! `dunlin` from outside: its answers to bad input, and whole runs against a simulated host.

mod bad_input;
mod browser;
mod check;
mod console;
mod dirty;
mod layout;
mod played_log;
mod results;
mod rig;
mod run;
mod share;
