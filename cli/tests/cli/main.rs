//! `dunlin` from outside: what it says to bad input, and whole runs against a host that only plays one.

mod bad_input;
mod browser;
mod console;
mod dirty;
mod layout;
mod played_log;
mod results;
mod rig;
mod run;
mod share;
