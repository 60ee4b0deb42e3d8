//! Cases in which the code stays and its translation changes: leaf, table, large page, root; and two CPUs with two
//! roots.
//!
//! Frame 0 holds the first meaning, frame 1 the second.

use super::coherence::{Bench, NO_ANSWER, OPERAND, execute, must_fault, start, write};
use super::partner::{Partner, Place, Request};
use crate::arch::attempt::Fault;
use crate::arch::code_pages::{self, ALL, PAGE, PRESENT, UNCACHED, WRITABLE, Which};
use crate::arch::encode::{END, LOAD_RDI, LOAD_RSI, load_far};
use crate::arch::probe::{self, Level, RAX, RDI, RSI};
use crate::arch::{apic, tlb};

/// Bytes of an instruction on the first of its two pages.
const SPLIT: usize = 2;
/// The page through which CPL 3 reads the local APIC.
const USER_OPERAND: usize = 17;

pub(super) fn run(bench: &mut Bench) {
    write(code_pages::frame(0, 0), LOAD_RDI);
    write(code_pages::frame(0, 1), LOAD_RSI);

    leaf(bench);
    table(bench);
    large(bench);
    roots(bench);
    two_cpus_two_roots(bench);
    page_crossing(bench);
    operand(bench);
    levels(bench);
}

fn frame(second: bool) -> u64 {
    code_pages::frame(0, usize::from(second))
}

fn leaf(bench: &mut Bench) {
    let rip = code_pages::address(0, 4);
    bench.alternate("remap-leaf", "the page of the code moves to another frame", |bench, second| {
        code_pages::point(0, 4, frame(second) | ALL);
        tlb::flush_page(rip);
        (bench.of(second), execute(rip))
    });

    bench.alternate("unmap-leaf", "the page of the code is gone, and back", |bench, second| {
        code_pages::point(0, 4, if second { 0 } else { frame(false) | ALL });
        tlb::flush_page(rip);
        let end = probe::run(&start(rip), Level::Kernel);
        if second { must_fault(&end, Fault::PF, 0, rip) } else { (bench.of(false), end.value(RAX)) }
    });
}

fn table(bench: &mut Bench) {
    let rip = code_pages::address(0, 4);
    code_pages::point(0, 4, frame(false) | ALL);
    code_pages::point_spare(4, frame(true) | ALL);
    bench.alternate("remap-upper", "the upper entry leads to another table", |bench, second| {
        code_pages::use_table(0, Some(if second { Which::Spare } else { Which::Own }), ALL);
        tlb::flush_page(rip);
        (bench.of(second), execute(rip))
    });
    code_pages::use_table(0, Some(Which::Own), ALL);
    tlb::flush_all();
}

fn large(bench: &mut Bench) {
    let twins = code_pages::large_twins();
    // The first of them is frame 0 of CPU 0; the other belongs to a CPU that does nothing now.
    write(twins[1], LOAD_RSI);
    bench.alternate("remap-large", "a large page moves to another 2 MiB", |bench, second| {
        let rip = code_pages::use_large(0, twins[usize::from(second)]);
        tlb::flush_page(rip);
        (bench.of(second), execute(rip))
    });

    let rip = code_pages::use_large(0, twins[0]);
    let page = usize::try_from((rip - code_pages::address(0, 0)) / PAGE).unwrap_or(0);
    code_pages::point(0, page, frame(true) | ALL);
    bench.alternate("large-to-small", "a large page gives way to a table, and comes back", |bench, second| {
        if second {
            code_pages::use_table(0, Some(Which::Own), ALL);
        } else {
            code_pages::use_large(0, twins[0]);
        }
        tlb::flush_page(rip);
        (bench.of(second), execute(rip))
    });
    bench.map();
    write(code_pages::frame(0, 0), LOAD_RDI);
    write(code_pages::frame(0, 1), LOAD_RSI);
}

/// Nothing is flushed but by the writes of CR3.
fn roots(bench: &mut Bench) {
    let rip = code_pages::address(0, 4);
    code_pages::point(0, 4, frame(false) | ALL);
    code_pages::point_spare(4, frame(true) | ALL);
    let second_root = code_pages::second_root();
    tlb::flush_all();
    bench.alternate("remap-cr3", "two roots, the same address, other code", |bench, second| {
        let seen = if second { probe::with_root(second_root, || execute(rip)) } else { execute(rip) };
        (bench.of(second), seen)
    });

    code_pages::point_spare(4, frame(false) | ALL);
    point_operand(false);
    code_pages::point_spare(OPERAND, apic::XAPIC_PAGE | PRESENT | WRITABLE | UNCACHED);
    tlb::flush_all();
    let begun = |offset| start(rip).with(RDI, code_pages::address(0, OPERAND) + offset);
    // One root has RAM where the other has the device, and the code is one and the same.
    bench.alternate("remap-cr3-same-frame", "two roots, the same code, other operands", |bench, second| {
        let run = || probe::run(&begun(apic::VERSION), Level::Kernel).value(RAX);
        if second { (bench.version, probe::with_root(second_root, run)) } else { (u64::from(IN_RAM), run()) }
    });
}

/// The contents of the operand's page when it is memory.
const IN_RAM: u32 = 0x0bad_cafe;

/// Points the operand's page at the local APIC, or at a frame that holds [`IN_RAM`] in its place.
fn point_operand(device: bool) {
    let ram = code_pages::frame(0, 3);
    code_pages::write(ram, apic::VERSION, &IN_RAM.to_le_bytes());
    let entry = if device { apic::XAPIC_PAGE | UNCACHED } else { ram };
    code_pages::point(0, OPERAND, entry | PRESENT | WRITABLE);
    tlb::flush_page(code_pages::address(0, OPERAND));
}

fn two_cpus_two_roots(bench: &mut Bench) {
    let (name, about) = ("two-vcpus-two-roots", "two CPUs at the same address, at once, with two roots");
    let rip = code_pages::address(0, 4);
    code_pages::point_spare(4, frame(true) | ALL);
    tlb::flush_all();
    let begun = start(rip);
    let place = Place { rip, frame: frame(true), rdi: begun.general[RDI], rsi: begun.general[RSI] };
    let Some(mut partner) = Partner::hire(place, bench.cases.patience()) else {
        bench.cases.skip(name, about, "needs two CPUs");
        return;
    };
    let second_root = code_pages::second_root();
    let mut wrong = None;
    // In the later half the roots are swapped.
    for half in [false, true] {
        let (own, its) = (bench.of(half), bench.of(!half));
        let own_root = if half { second_root } else { tlb::root() };
        let its_root = if half { tlb::root() } else { second_root };
        partner.begin(Request::RunWithRoot { root: its_root, times: bench.rounds * 4, expected: its });
        let mine = probe::with_root(own_root, || {
            (0..bench.rounds * 4).map(|round| (round, own, execute(rip))).find(|(_, own, seen)| *seen != Ok(*own))
        });
        let theirs = partner.end().unwrap_or(Err(NO_ANSWER));
        wrong = wrong.or(mine).or((theirs != Ok(its)).then_some((0, its, theirs)));
    }
    drop(partner);
    bench.close(name, about, wrong);
}

/// The instruction begins two bytes before the end of its page: the displacement lies on the next one.
fn page_crossing(bench: &mut Bench) {
    let (first, rip) = (code_pages::frame(0, 5), code_pages::address(0, 6) - SPLIT as u64);
    code_pages::point(0, 5, first | ALL);
    for (second, displacement) in [(false, 0), (true, 0x80 - 0x30)] {
        let code = load_far(displacement);
        code_pages::write(first, PAGE - SPLIT as u64, &code[..SPLIT]);
        write(code_pages::frame(0, 6 + usize::from(second)), &code[SPLIT..]);
    }
    bench.alternate("page-crossing", "the page of the instruction's end moves to another frame", |bench, second| {
        code_pages::point(0, 6, code_pages::frame(0, 6 + usize::from(second)) | ALL);
        tlb::flush_page(code_pages::address(0, 6));
        (bench.of(second), execute(rip))
    });

    bench.alternate("page-crossing-write", "the bytes beyond the page's end are written", |bench, second| {
        let code = load_far(if second { 0x80 - 0x30 } else { 0 });
        code_pages::point(0, 6, code_pages::frame(0, 6) | ALL);
        tlb::flush_page(code_pages::address(0, 6));
        code_pages::write(code_pages::frame(0, 6), 0, &code[SPLIT..]);
        (bench.of(second), execute(rip))
    });

    bench.alternate("page-crossing-unmap", "the page of the instruction's end is gone, and back", |bench, second| {
        let page = code_pages::address(0, 6);
        code_pages::write(code_pages::frame(0, 6), 0, &[0, 0, 0, 0, END]);
        code_pages::point(0, 6, if second { 0 } else { code_pages::frame(0, 6) | ALL });
        tlb::flush_page(page);
        let end = probe::run(&start(rip), Level::Kernel);
        if second { must_fault(&end, Fault::PF, 0, page) } else { (bench.of(false), end.value(RAX)) }
    });
}

fn operand(bench: &mut Bench) {
    let rip = code_pages::address(0, 0);
    write(code_pages::frame(0, 0), LOAD_RDI);
    bench.alternate("remap-operand", "the instruction stays, what it reads is a device or memory", |bench, second| {
        point_operand(second);
        let begun = start(rip).with(RDI, code_pages::address(0, OPERAND) + apic::VERSION);
        let seen = probe::run(&begun, Level::Kernel).value(RAX);
        (if second { bench.version } else { u64::from(IN_RAM) }, seen)
    });
}

/// CPL 3 may not fetch from a page that CPL 0 has executed and still may.
fn levels(bench: &mut Bench) {
    let rip = code_pages::address(0, 4);
    code_pages::point(0, 4, frame(false) | ALL);
    code_pages::point(0, USER_OPERAND, apic::XAPIC_PAGE | ALL | UNCACHED);
    tlb::flush_all();
    let begun = start(rip).with(RDI, code_pages::address(0, USER_OPERAND) + apic::VERSION);
    bench.alternate("user-versus-supervisor", "CPL 0 and CPL 3 in turn at one address", |bench, second| {
        let end = probe::run(&begun, if second { Level::User } else { Level::Kernel });
        (bench.version, end.value(RAX))
    });

    bench.alternate("user-loses-code", "the page of the code is taken from CPL 3, not from CPL 0", |bench, second| {
        let bits = if second { PRESENT | WRITABLE } else { ALL };
        code_pages::point(0, 4, frame(false) | bits);
        tlb::flush_page(rip);
        let kernel = probe::run(&begun, Level::Kernel).value(RAX);
        let end = probe::run(&begun, Level::User);
        match (second, kernel == Ok(bench.version)) {
            (_, false) => (bench.version, kernel),
            // Present, user. The error code reports a fetch only if NX or SMEP is on.
            (true, true) => must_fault(&end, Fault::PF, 5, rip),
            (false, true) => (bench.version, end.value(RAX)),
        }
    });

    bench.alternate("user-loses-operand", "the page of the operand is taken from CPL 3", |bench, second| {
        code_pages::point(0, 4, frame(false) | ALL);
        let bits = if second { PRESENT | WRITABLE } else { ALL };
        code_pages::point(0, USER_OPERAND, apic::XAPIC_PAGE | bits | UNCACHED);
        tlb::flush_all();
        let end = probe::run(&begun, Level::User);
        if second { must_fault(&end, Fault::PF, 5, begun.general[RDI]) } else { (bench.version, end.value(RAX)) }
    });
}
