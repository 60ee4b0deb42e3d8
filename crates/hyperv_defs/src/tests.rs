//! Valid and invalid inputs, word by word, and the expected results. The letters and numbers above a test name the
//! conformance cases that it covers.

mod call;
mod data;
mod flush;
mod ipi;
mod layout;
mod request;
mod targets;
mod vmbus;

use alloc::vec::Vec;

use crate::{Call, Control, FlushCall, IpiCall, Offered, Refusal, Status, parse};

/// Words as bytes, in the format of guest memory.
fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn refusal(control: Control, words: &[u64], offered: Offered) -> Refusal {
    parse(control, &bytes(words), offered).expect_err("it is malformed")
}

/// The status of a call that is refused although everything is offered.
fn status(control: Control, words: &[u64]) -> Status {
    match refusal(control, words, Offered::all()) {
        Refusal::Status(status) => status,
        Refusal::InvalidOpcode => panic!("everything is offered"),
    }
}

fn flush_of(control: Control, input: &[u8]) -> FlushCall<'_> {
    match parse(control, input, Offered::all()) {
        Ok(Call::Flush(flush)) => flush,
        other => panic!("not a flush: {other:?}"),
    }
}

fn ipi_of(control: Control, input: &[u8]) -> IpiCall<'_> {
    match parse(control, input, Offered::all()) {
        Ok(Call::Ipi(ipi)) => ipi,
        other => panic!("not an IPI: {other:?}"),
    }
}
