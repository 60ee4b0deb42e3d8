//! INS and OUTS, by bytes, on a port that keeps written values: COM1's scratch register.

use crate::arch::code_pages;
use crate::arch::encode::END;
use crate::arch::probe::{self, DOWN, Level, PLANNED, RCX, RDI, RDX, RSI, Registers};
use crate::arch::{port, serial};
use crate::experiments::cases::Cases;

/// A form, its count in RCX, and the direction.
struct Form {
    name: &'static str,
    code: &'static [u8],
    count: u64,
    down: bool,
}

const FORMS: [Form; 8] = [
    Form { name: "outsb", code: &[0x6e], count: 7, down: false },
    Form { name: "rep-outsb", code: &[0xf3, 0x6e], count: 5, down: false },
    Form { name: "rep-outsb-down", code: &[0xf3, 0x6e], count: 5, down: true },
    Form { name: "rep-outsb-none", code: &[0xf3, 0x6e], count: 0, down: false },
    Form { name: "insb", code: &[0x6c], count: 7, down: false },
    Form { name: "rep-insb", code: &[0xf3, 0x6c], count: 300, down: false },
    Form { name: "rep-insb-down", code: &[0xf3, 0x6c], count: 9, down: true },
    Form { name: "rep-insb-none", code: &[0xf3, 0x6c], count: 0, down: false },
];

/// Where in the scratch page (see `forms`) bytes begin.
const AT: u64 = 0x400;
const BEFORE: u8 = 0xa5;

/// Code in frame 0 at page 0, scratch memory in frame 2 at page 16, as `forms` maps them.
pub(super) fn run(cases: &mut Cases) {
    let (code, scratch) = (code_pages::frame(0, 0), code_pages::frame(0, 2));
    for Form { name, code: bytes, count, down } in FORMS {
        code_pages::write(code, 0, bytes);
        code_pages::write(code, bytes.len() as u64, &[END]);
        let is_output = bytes.ends_with(&[0x6e]);
        // Bytes that depend on their place.
        for place in 0..code_pages::PAGE {
            code_pages::write(scratch, place, &[place_byte(place)]);
        }
        port::write(serial::SCRATCH, 1, u32::from(BEFORE));

        let at = code_pages::address(0, 16) + AT;
        let mut start = Registers::at(code_pages::address(0, 0))
            .with(RCX, count)
            .with(RDX, u64::from(serial::SCRATCH))
            .with(RSI, at)
            .with(RDI, at);
        start.rflags |= if down { DOWN } else { 0 };
        let end = probe::run(&start, Level::Kernel);

        let moves = if bytes[0] == 0xf3 { count } else { 1 };
        let after = |distance: u64| if down { at - distance } else { at + distance };
        let [moved, other] = if is_output { [RSI, RDI] } else { [RDI, RSI] };
        let registers_fit = end.registers.general[moved] == after(moves)
            && end.registers.general[other] == at
            && end.registers.general[RCX] == if moves == count { 0 } else { count };

        let last = if down { AT - moves.saturating_sub(1) } else { AT + moves.saturating_sub(1) };
        let sent = if is_output && moves > 0 { place_byte(last) } else { BEFORE };
        let port_fits = port::read(serial::SCRATCH, 1) == u32::from(sent);

        let received = |place: u64| {
            let distance = if down { AT.checked_sub(place) } else { place.checked_sub(AT) };
            !is_output && distance.is_some_and(|distance| distance < moves)
        };
        let memory_fits = (0..code_pages::PAGE).step_by(8).all(|place| {
            let wanted = core::array::from_fn(|byte| {
                let place = place + byte as u64;
                if received(place) { BEFORE } else { place_byte(place) }
            });
            code_pages::word(scratch, place) == u64::from_le_bytes(wanted)
        });

        cases.check(
            name,
            "string instruction on a port that keeps its byte",
            "bytes moved, registers and memory as counted",
            format_args!("vector {} registers {registers_fit} port {port_fits} memory {memory_fits}", end.vector),
            end.vector == PLANNED && registers_fit && port_fits && memory_fits,
        );
    }
}

fn place_byte(place: u64) -> u8 {
    let [low, high, ..] = place.to_le_bytes();
    low ^ high.rotate_left(4)
}
