//! PUSH and POP with an operand in memory.

use super::{DATA, DEVICE, GENERAL_PROTECTION, Guest, RBX, RSP, STACK_FAULT, Seen};
use crate::{Exception, Mode, Outcome, Segment, SegmentRegister, Width};

const VALUE: u64 = 0x8877_6655_4433_2211;

#[test]
fn push_reads_the_device_and_writes_the_stack() {
    let mut guest = Guest::long(&[0xff, 0x73, 0x20]).set(RSP, DATA + 0x100); // push qword [rbx + 0x20]
    guest.ram.put(DATA, &[0]);
    guest.device.value = VALUE;
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE + 0x20, Width::Qword)]);
    assert_eq!((guest.ram.get_u64(DATA + 0xf8), guest.state.gprs[RSP]), (VALUE, DATA + 0xf8));
}

#[test]
fn pop_reads_the_stack_and_writes_the_device() {
    let guest = Guest::long(&[0x66, 0x8f, 0x43, 0x20]).set(RSP, DATA + 0x100); // pop word [rbx + 0x20]
    guest.ram.put_u64(DATA + 0x100, VALUE);
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Write(DEVICE + 0x20, Width::Word, 0x2211)]);
    assert_eq!(guest.state.gprs[RSP], DATA + 0x102);
}

#[test]
fn stack_may_be_the_device_and_the_operand_ram() {
    let guest = Guest::long(&[0xff, 0x33]).set(RBX, DATA).set(RSP, DEVICE + 0x10); // push qword [rbx]
    guest.ram.put_u64(DATA, VALUE);
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Write(DEVICE + 8, Width::Qword, VALUE)]);
    assert_eq!(guest.state.gprs[RSP], DEVICE + 8);

    let mut guest = Guest::long(&[0x8f, 0x03]).set(RBX, DATA).set(RSP, DEVICE + 0x10); // pop qword [rbx]
    guest.ram.put_u64(DATA, 0);
    guest.device.value = VALUE;
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Read(DEVICE + 0x10, Width::Qword)]);
    assert_eq!((guest.ram.get_u64(DATA), guest.state.gprs[RSP]), (VALUE, DEVICE + 0x18));
}

#[test]
fn address_by_the_stack_pointer_is_old_for_push_and_new_for_pop() {
    let guest = Guest::long(&[0xff, 0x34, 0x24]).set(RSP, DEVICE + 0x10).done(); // push qword [rsp]
    let expected = [Seen::Read(DEVICE + 0x10, Width::Qword), Seen::Write(DEVICE + 8, Width::Qword, 0)];
    assert_eq!(guest.device.seen, expected);
    let guest = Guest::long(&[0x8f, 0x44, 0x24, 0x20]).set(RSP, DEVICE + 0x10).done(); // pop qword [rsp + 0x20]
    let expected = [Seen::Read(DEVICE + 0x10, Width::Qword), Seen::Write(DEVICE + 0x38, Width::Qword, 0)];
    assert_eq!(guest.device.seen, expected);
    // pop qword [r12]: encoded like RSP, but another register
    let mut guest = Guest::long(&[0x41, 0x8f, 0x04, 0x24]).set(RSP, DEVICE + 0x10);
    guest.state.gprs[12] = DEVICE + 0x40;
    assert_eq!(guest.done().device.seen[1], Seen::Write(DEVICE + 0x40, Width::Qword, 0));
}

#[test]
fn stack_pointer_is_as_wide_as_the_stack_segment_says() {
    // push dword [ebx], 32-bit code on a 16-bit stack: SP wraps, the rest of ESP stays.
    let mut guest = Guest::flat(Mode::Bits32, &[0xff, 0x33]).set(RSP, 0xabcd_0000);
    guest.state.segments[Segment::Ss as usize].attributes &= !SegmentRegister::BIG;
    guest.ram.put(0xfffc, &[0; 4]);
    guest.device.value = 0x4433_2211;
    let guest = guest.done();
    assert_eq!((guest.state.gprs[RSP], guest.ram.get(0xfffc)), (0xabcd_fffc, [0x11, 0x22, 0x33, 0x44]));

    // pop word [bx], 16-bit code on a 32-bit stack.
    let mut guest =
        Guest::flat(Mode::Bits16, &[0x8f, 0x07]).set(RBX, 0x20).set(RSP, DATA | 0xffff_0000 << 32 | 0x1_0000);
    guest.state.segments[Segment::Ss as usize].attributes |= SegmentRegister::BIG;
    guest.state.segments[Segment::Ds as usize].base = DEVICE;
    guest.ram.put(DATA | 0x1_0000, &[0x34, 0x12]);
    let guest = guest.done();
    assert_eq!(guest.device.seen, [Seen::Write(DEVICE + 0x20, Width::Word, 0x1234)]);
    assert_eq!(guest.state.gprs[RSP], DATA + 0x1_0002);
}

#[test]
fn stack_that_cannot_be_used_is_a_stack_fault_and_nothing_is_read() {
    let mut guest = Guest::long(&[0xff, 0x33]).set(RSP, 1 << 47 | 8);
    assert_eq!(guest.refused(), Outcome::Fault(STACK_FAULT), "not canonical");
    let mut guest = Guest::flat(Mode::Bits32, &[0xff, 0x33]).set(RSP, 0x1002);
    guest.state.segments[Segment::Ss as usize].limit = 0x1000;
    assert_eq!(guest.refused(), Outcome::Fault(STACK_FAULT), "beyond the limit");
    let mut guest = Guest::flat(Mode::Bits16, &[0xff, 0x37]).set(RBX, 0).set(RSP, 1);
    guest.state.segments[Segment::Ds as usize].base = DEVICE;
    guest.state.segments[Segment::Ss as usize].limit = 0xffff;
    assert_eq!(guest.refused(), Outcome::Fault(STACK_FAULT), "a word at 0xffff");
    let mut guest = Guest::long(&[0xff, 0x33]).set(RSP, 0x40_0000);
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 2, cr2: Some(0x3f_fff8) }));
}

#[test]
fn pop_that_cannot_write_leaves_the_stack_pointer() {
    let mut guest = Guest::long(&[0x8f, 0x03]).set(RBX, 0x40_0000).set(RSP, DEVICE);
    assert_eq!(guest.refused(), Outcome::Fault(Exception { vector: 14, error_code: 2, cr2: Some(0x40_0000) }));
    let mut guest = Guest::long(&[0x8f, 0x03]).set(RBX, 1 << 60).set(RSP, DEVICE);
    assert_eq!(guest.refused(), Outcome::Fault(GENERAL_PROTECTION));
}

#[test]
fn neither_operand_on_the_reported_page_is_retried() {
    let mut guest = Guest::long(&[0xff, 0x33]).set(RBX, DATA).set(RSP, DATA + 0x100);
    guest.ram.put_u64(DATA, VALUE);
    assert_eq!(guest.refused(), Outcome::Retry);
    assert_eq!(guest.ram.get_u64(DATA + 0xf8), 0);
}
