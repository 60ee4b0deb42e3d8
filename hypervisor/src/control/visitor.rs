//! Requests of a process in a parent VM, which has opened that VM's [port](crate::vm::tool_port).
//!
//! The process may send anything: no frames, half of one, frames without end, requests whose answers it never reads. So
//! a poll reads a limited number of bytes and works for a limited time, and no request is read while the answers to
//! earlier ones do not fit into their buffer. The machine's own port has its turn before, and is not disturbed.
//!
//! When the process closes the port, or dies, its requests are forgotten: no answer is sent to the next process. What
//! it has started and only it can end, ends: an unfinished upload, save or restore, a trace. A dirty log stays, because
//! commands of their own begin, continue and end it.

use alloc::sync::Arc;

use abi::control::Message;
use log::warn;

use super::port::Visitor;
use super::{Control, WORK_NANOS};
use crate::arch::{Arch, Machine};
use crate::vm::Vm;
use crate::vm::table::table;
use crate::vm::tool_port::Session;

impl Control {
    /// Reads the requests that have arrived. Returns whether there may be more.
    pub(super) fn listen_to_visitor(&mut self) -> bool {
        let Some((vm, session)) = open_port() else {
            self.farewell_to_visitor();
            return false;
        };
        if self.visitor.as_ref().is_none_or(|visitor| !visitor.is(vm.number, session)) {
            self.farewell_to_visitor();
            self.visitor = Some(Visitor::new(vm.number, session));
        }

        let until = Machine::now() + Machine::nanos_to_ticks(WORK_NANOS);
        let goes_on = || Machine::now() <= until;
        let mut budget = Visitor::BUDGET;
        while goes_on() {
            let Some(visitor) = &mut self.visitor else { return false };
            match visitor.next(&vm, &mut budget, goes_on) {
                Some(Ok(request)) => {
                    let peer = visitor.peer();
                    self.carry_out(peer, request);
                }
                Some(Err(error)) => {
                    // One line: a process that sends garbage must not fill the log.
                    if !core::mem::replace(&mut visitor.has_erred, true) {
                        warn!("{}: a program sent what is no request: {error}; refused", vm.name());
                    }
                    visitor.say(&Message::Refused(error));
                }
                None => return budget == 0 || !goes_on(),
            }
        }
        true
    }

    /// Sends answers, as far as the process has room for them. Returns whether there is more to do now.
    pub(super) fn answer_visitor(&mut self) -> bool {
        let Some(visitor) = &mut self.visitor else { return false };
        open_port().is_some_and(|(vm, session)| visitor.is(vm.number, session) && visitor.transmit(&vm))
    }

    /// The process has closed the port, or its VM has ended.
    fn farewell_to_visitor(&mut self) {
        let Some(visitor) = self.visitor.take() else { return };
        let peer = visitor.peer();
        self.sender_left(peer);
        self.saver_left(peer);
        self.restorer_left(peer);
        if self.tracer == Some(peer) {
            self.stop_trace();
        }
    }
}

/// The parent and the session, if a process has its port open.
fn open_port() -> Option<(Arc<Vm>, Session)> {
    let vm = table().all_alive().find(|vm| Machine::tool_port(vm).is_some()).cloned()?;
    let session = Machine::tool_port(&vm)?.look(&vm)?;
    Some((vm, session))
}
