//! E: the calls by which a parent creates VMs of its own (TLFS, "Partition Management"; Linux' `hvgdk_mini.h`). Any
//! other guest is denied them all.

use core::sync::atomic::Ordering;

use guest_model::hypercall::{
    ACCESS_DENIED, Control, INVALID_ALIGNMENT, INVALID_INPUT, INVALID_PARAMETER, SUCCESS, status,
};

use super::{Answer, Cases, Context, NO_INTERFACE, Outcome, ShownAnswer, ask, by_memory, by_registers, place};
use crate::arch::control::cpuid;
use crate::arch::hyperv::{self, Registers};

const CREATE: u16 = 0x40;
const INITIALIZE: u16 = 0x41;
const FINALIZE: u16 = 0x42;
const DELETE: u16 = 0x43;
const GET_PROPERTY: u16 = 0x44;
const SET_PROPERTY: u16 = 0x45;
const GET_PROPERTY_EX: u16 = 0x101;
/// All others: code and whether it has a list.
const OTHERS: [(u16, bool); 25] = [
    (0x48, true),
    (0x49, true),
    (0x4b, true),
    (0x4c, true),
    (0x4d, false),
    (0x4e, false),
    (0x4f, false),
    (0x50, true),
    (0x51, true),
    (0x52, false),
    (0x56, false),
    (0x58, false),
    (0x5b, false),
    (0x5c, false),
    (0x6d, false),
    (RING_EMPTY, false),
    (0x91, false),
    (0x94, false),
    (0x95, false),
    (0x96, false),
    (0xc9, true),
    (0xe1, false),
    (0xe3, false),
    (0xf4, true),
    (0x131, false),
];

/// About the caller's own event ring, and so about no partition.
const RING_EMPTY: u16 = 0x8b;

const INVALID_STATE: u16 = 7;
const UNKNOWN_PROPERTY: u16 = 9;
const OUT_OF_RANGE: u16 = 0xa;
const INVALID_PARTITION: u16 = 0xd;
const NO_RESOURCES: u16 = 0x1d;
const NOT_SUPPORTED: u16 = 0x20;

/// HV_PARTITION_ID_SELF.
const OWN: u64 = !0;
/// What QEMU's accelerator asks Linux for.
const FLAGS: u64 = 0x48_2110;
const COMPATIBILITY: u64 = 0x609;
/// Privileges in EBX of leaf 4000_0003.
const CREATE_PARTITIONS: u32 = 1 << 0;
const PARTITION_ID: u32 = 1 << 1;
const CPU_MANAGEMENT: u32 = 1 << 12;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if hyperv::features().is_none() {
        return NO_INTERFACE;
    }
    let mut cases = Cases::new(context, "hv-parent");
    let privileges = cpuid(0x4000_0003, 0).ebx;
    if privileges & CREATE_PARTITIONS == 0 {
        denied(&mut cases);
        cases.skip("F2-F9", "what a parent may do", "this VM is no parent");
        return cases.done();
    }

    // Linux takes such a machine for the parent that it is, and not for the root of the whole machine.
    let build = cpuid(0x4000_0002, 0).eax;
    cases.check(
        "F2",
        "CPUID of a parent: privileges, build",
        "creates partitions, is not the root, build 27744 to 27751",
        format_args!("privileges {privileges:#x} build {build}"),
        privileges & (PARTITION_ID | CPU_MANAGEMENT) == 0 && (27_744..=27_751).contains(&build),
    );
    own_properties(&mut cases);
    life(&mut cases);
    bad_inputs(&mut cases);
    cases.done()
}

/// A call whose output goes behind its input, in the same page. Answers with the first two words of it, too.
fn with_output(code: u16, words: &[u64]) -> (Answer, [u64; 2]) {
    const OUTPUT: usize = 64;
    let input = place(words);
    let page = hyperv::input_page(crate::arch::cpu_local::index());
    for word in &page.words()[OUTPUT..OUTPUT + 2] {
        word.store(!0, Ordering::SeqCst);
    }
    let answer = ask(&Registers::call(Control::simple(code).0, input, input + OUTPUT as u64 * 8));
    (answer, [0, 1].map(|at: usize| page.words()[OUTPUT + at].load(Ordering::SeqCst)))
}

fn create(flags: u64) -> (Answer, u64) {
    let (answer, [id, _]) = with_output(CREATE, &[flags, 0, COMPATIBILITY, 0, 0, 0, 0]);
    (answer, id)
}

fn denied(cases: &mut Cases) {
    let simple = [CREATE, INITIALIZE, FINALIZE, DELETE, GET_PROPERTY, SET_PROPERTY, GET_PROPERTY_EX];
    let controls = simple.iter().map(|code| Control::simple(*code));
    let others = OTHERS.iter().map(|(code, is_list)| Control::rep(*code, u64::from(*is_list)));
    let allowed = controls.chain(others).filter(|control| {
        let by_memory = by_memory(*control, &[OWN, 0, 0, 0, 0, 0, 0, 0, 0]);
        let by_registers = by_registers(*control, &[OWN, 0]);
        [by_memory, by_registers].iter().any(|answer| answer.map(status) != Ok(ACCESS_DENIED))
    });
    let count = allowed.count();
    cases.check(
        "F1",
        "a parent's calls by a guest that is none",
        "status 6 for each",
        format_args!("{count} answered otherwise"),
        count == 0,
    );
}

fn own_properties(cases: &mut Cases) {
    let (answer, [head, capabilities]) = with_output(GET_PROPERTY_EX, &[OWN, 0x9_0007, 0]);
    cases.check(
        "F3",
        "capabilities of a monitor: one word, it provides pages",
        "status 0, 1, 0x2",
        format_args!("success {} {head:#x} {capabilities:#x}", answer == Ok(0)),
        answer == Ok(0) && head == 1 && capabilities == 2,
    );

    let (answer, [features, behind]) = with_output(GET_PROPERTY, &[OWN, 0x6_000a]);
    let leaf_1 = cpuid(1, 0).ecx;
    // SSE3, CMPXCHG16B, AES: bits 0, 8, 16 there; 0, 13, 25 here.
    let as_told =
        [(0, 0), (8, 13), (16, 25)].iter().all(|(there, here)| features >> there & 1 == u64::from(leaf_1 >> here & 1));
    cases.check(
        "F4",
        "features of the processor are those of CPUID",
        "status 0, as CPUID says, 8 bytes",
        format_args!("success {} features {features:#x} behind {behind:#x}", answer == Ok(0)),
        answer == Ok(0) && as_told && behind == !0,
    );
    let unknown = with_output(GET_PROPERTY, &[OWN, 0x5_000c]).0;
    cases.status("F4.1", "unknown property", &[UNKNOWN_PROPERTY], unknown);
    let of_nobody = with_output(GET_PROPERTY, &[7, 0x6_000a]).0;
    cases.status("F4.2", "property of no partition", &[INVALID_PARTITION], of_nobody);
}

/// F5 to F8: a partition from its creation to its end.
fn life(cases: &mut Cases) {
    let (first, id) = create(FLAGS);
    let (second, other) = create(FLAGS);
    cases.check(
        "F5",
        "two partitions are created",
        "two ids",
        format_args!("{} {id:#x} {} {other:#x}", first == Ok(0), second == Ok(0)),
        first == Ok(0) && second == Ok(0) && id != other && id != 0 && other != 0,
    );

    let set = |property, value| by_memory(Control::simple(SET_PROPERTY), &[id, property, value]);
    cases.status("F6", "synthetic features are set before INITIALIZE", &[SUCCESS], set(0x1_0001, 0x640_0ffb));
    let (read, [value, _]) = with_output(GET_PROPERTY, &[id, 0x1_0001]);
    cases.check(
        "F6.1",
        "and read back",
        "0x6400ffb",
        format_args!("success {} {value:#x}", read == Ok(0)),
        read == Ok(0) && value == 0x640_0ffb,
    );
    cases.status("F6.2", "a value that it cannot have", &[OUT_OF_RANGE], set(0x3_0003, 2));

    let by_id = |code, id| by_registers(Control::simple(code), &[id]);
    cases.status("F7", "DELETE of one that was only created", &[SUCCESS], by_id(DELETE, other));
    cases.status("F7.1", "DELETE again", &[INVALID_PARTITION], by_id(DELETE, other));
    cases.status("F7.2", "FINALIZE", &[SUCCESS], by_id(FINALIZE, id));
    cases.status("F7.3", "FINALIZE again", &[INVALID_STATE], by_id(FINALIZE, id));
    cases.status("F7.4", "a property, too late", &[INVALID_STATE], set(0x3_0003, 1));
    let withdrawn = ask(&Registers::call(Control::rep(0x49, 512).0, place(&[id, 0]), hyperv::spare_page().address()));
    cases.check(
        "F7.5",
        "WITHDRAW of nothing",
        "status 29 reps 0",
        format_args!("{}", ShownAnswer(withdrawn)),
        withdrawn == Ok(u64::from(NO_RESOURCES)),
    );
    cases.status("F7.6", "DELETE", &[SUCCESS], by_id(DELETE, id));

    let (third, newest) = create(FLAGS);
    cases.check(
        "F8",
        "an id is never used again",
        "a third id",
        format_args!("{} {newest:#x}", third == Ok(0)),
        third == Ok(0) && newest != id && newest != other,
    );
    cases.status("F8.1", "DELETE", &[SUCCESS], by_id(DELETE, newest));
}

fn bad_inputs(cases: &mut Cases) {
    cases.status("F9", "nested virtualization", &[NOT_SUPPORTED], create(FLAGS | 2).0);
    cases.status("F9.1", "unknown flag", &[INVALID_PARAMETER], create(FLAGS | 1 << 40).0);
    let old = with_output(CREATE, &[FLAGS, 0, 0x608, 0, 0, 0, 0]).0;
    cases.status("F9.2", "another version of the interface", &[INVALID_PARAMETER], old);

    let input = place(&[OWN, 0x6_000a]);
    let to = |output| ask(&Registers::call(Control::simple(GET_PROPERTY).0, input, output));
    cases.status("F9.3", "output at an odd address", &[INVALID_ALIGNMENT], to(input + 4));
    cases.status("F9.4", "output across a page", &[INVALID_ALIGNMENT], to(input + 4092));
    cases.status("F9.5", "output beyond the address space", &[INVALID_ALIGNMENT], to(!7));
    cases.status("F9.6", "output where there is no memory", &[INVALID_INPUT, INVALID_ALIGNMENT], to(0xf_0000_0000));
    let fast = by_registers(Control::simple(GET_PROPERTY), &[OWN, 0x6_000a]);
    cases.status("F9.7", "output in registers", &[INVALID_INPUT], fast);

    let about_partitions = OTHERS.iter().filter(|(code, _)| *code != RING_EMPTY);
    let others = about_partitions.filter(|(code, is_list)| {
        let answer = by_memory(Control::rep(*code, u64::from(*is_list)), &[7, 0, 0, 0, 0, 0, 0, 0, 0]);
        answer.map(status) == Ok(SUCCESS)
    });
    let count = others.count();
    cases.check(
        "F9.8",
        "all other calls about a partition that does not exist",
        "none succeeds",
        format_args!("{count} succeeded"),
        count == 0,
    );
}
