//! A: the leaves of the interface, and its MSRs.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::{Cases, Context, NEEDS_TWO, NO_INTERFACE, Outcome, on_all};
use crate::arch::attempt::{Fault, rdmsr, wrmsr};
use crate::arch::boot::MAX_CPUS;
use crate::arch::control::{self, cpuid};
use crate::arch::hyperv::{self, ENABLE, Instruction, LOCKED, Registers, msr};
use crate::arch::{hypercall, tsc};
use crate::cpu;
use crate::shootdown;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    if hyperv::features().is_none() {
        return NO_INTERFACE;
    }
    let mut cases = Cases::new(context, "hv-discovery");
    leaves(&mut cases);
    vp_index(&mut cases);
    hypercall_page(&mut cases);
    clocks(&mut cases);
    invariant_tsc(&mut cases);
    assist_page(&mut cases);
    not_granted(&mut cases);
    // Last, because it holds until reset.
    locked_page(&mut cases);
    cases.done()
}

/// The values on each CPU: a digest of its leaves, its VP index, and whether it stayed the same.
static LEAVES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];
static INDICES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];
static STAYS: [AtomicBool; MAX_CPUS] = [const { AtomicBool::new(false) }; MAX_CPUS];

/// The job of each CPU.
fn look_around(cpu: usize) {
    let mut digest = 0xcbf2_9ce4_8422_2325u64;
    for leaf in 0x4000_0003..=0x4000_0006 {
        let answer = cpuid(leaf, 0);
        for word in [answer.eax, answer.ebx, answer.ecx, answer.edx] {
            digest = (digest ^ u64::from(word)).wrapping_mul(0x100_0000_01b3);
        }
    }
    LEAVES[cpu].store(digest, Ordering::SeqCst);
    let index = rdmsr(msr::VP_INDEX).unwrap_or(u64::MAX);
    INDICES[cpu].store(index, Ordering::SeqCst);
    STAYS[cpu].store((0..100).all(|_| rdmsr(msr::VP_INDEX) == Ok(index)), Ordering::SeqCst);
}

fn leaves(cases: &mut Cases) {
    let (first, second) = (cpuid(0x4000_0000, 0), cpuid(0x4000_0001, 0));
    let vendor = [first.ebx, first.ecx, first.edx] == [0x7263_694d, 0x666f_736f, 0x7648_2074];
    cases.check(
        "A1",
        "CPUID 0x40000000 and 1: vendor, last leaf, Hv#1",
        "Microsoft Hv, at least 0x40000005, Hv#1",
        format_args!("vendor {vendor} last leaf {:#x} leaf 1 {:#x}", first.eax, second.eax),
        vendor && (0x4000_0005..=0x4000_ffff).contains(&first.eax) && second.eax == 0x3123_7648,
    );

    let finished = on_all(look_around, cases.patience());
    let differ =
        (0..cpu::count()).filter(|cpu| LEAVES[*cpu].load(Ordering::SeqCst) != LEAVES[0].load(Ordering::SeqCst));
    let differ = differ.count();
    cases.check(
        "A2",
        "CPUID leaves 3 to 6 on every vCPU",
        "identical everywhere",
        format_args!("{differ} of {} differ, finished {finished}", cpu::count()),
        finished && differ == 0,
    );
}

fn vp_index(cases: &mut Cases) {
    let count = cpu::count();
    let dense = (0..count as u64)
        .all(|wanted| INDICES.iter().take(count).filter(|index| index.load(Ordering::SeqCst) == wanted).count() == 1);
    let stays = STAYS.iter().take(count).all(|stays| stays.load(Ordering::SeqCst));
    cases.check(
        "A3",
        "RDMSR VP_INDEX on each vCPU",
        "unique, dense, constant",
        format_args!("dense {dense} constant {stays}"),
        dense && stays,
    );
    gp(cases, "A4", "WRMSR VP_INDEX", wrmsr(msr::VP_INDEX, 0));
}

fn gp<T>(cases: &mut Cases, name: &str, about: &str, seen: Result<T, Fault>) {
    let fault = seen.err();
    let text = match fault {
        Some(Fault { vector: Fault::GP, .. }) => "#GP",
        Some(_) => "another exception",
        None => "no exception",
    };
    cases.check(name, about, "#GP", format_args!("{text}"), fault.is_some_and(|fault| fault.vector == Fault::GP));
}

/// A5 to A8: the guest disables the interface and enables it again. In between, remote flushes use interrupts.
fn hypercall_page(cases: &mut Cases) {
    let abouts = [
        ("A5", "HYPERCALL enable with OS ID 0"),
        ("A6", "OS ID and enable: the page's first bytes, the MSR reads back"),
        ("A7", "then OS ID 0: enable reads 0, a hypercall raises #UD"),
        ("A8", "HYPERCALL page beyond the GPA space: #GP, old value kept"),
    ];
    if rdmsr(msr::HYPERCALL).is_ok_and(|value| value & LOCKED != 0) {
        for (name, about) in abouts {
            cases.skip(name, about, "the page is locked, by this experiment run before");
        }
        return;
    }
    let flushed_by = shootdown::chosen();
    shootdown::choose(guest_model::command_line::Approach::Ipi);
    let page = hyperv::hypercall_page();

    let prepared = wrmsr(msr::HYPERCALL, 0).is_ok() && wrmsr(msr::GUEST_OS_ID, 0).is_ok();
    let written = wrmsr(msr::HYPERCALL, page.address() | ENABLE);
    let value = rdmsr(msr::HYPERCALL);
    cases.check(
        abouts[0].0,
        abouts[0].1,
        "no fault, enable reads 0",
        format_args!("fault {} reads {:#x}", written.is_err(), value.unwrap_or(u64::MAX)),
        prepared && written.is_ok() && value.is_ok_and(|value| value & ENABLE == 0),
    );

    page.words()[0].store(0, Ordering::SeqCst);
    let up = hyperv::bring_up();
    let first = page.words()[0].load(Ordering::SeqCst);
    let begins = begins_with_call(first, page.words()[1].load(Ordering::SeqCst));
    cases.check(
        abouts[1].0,
        abouts[1].1,
        "0F 01 D9 C3, with or without ENDBR64 before; enabled",
        format_args!("enabled {up} first bytes {:#018x}", first.swap_bytes()),
        up && begins,
    );

    let enabled = rdmsr(msr::HYPERCALL);
    let beyond = [1 << control::physical_bits(), 1 << 52, 1 << 63].into_iter();
    // Bits above the width of a physical address, and the address at the end of it.
    let refused = beyond.filter(|at| wrmsr(msr::HYPERCALL, at | ENABLE).is_err_and(|fault| fault.vector == Fault::GP));
    let refused = refused.count();
    cases.check(
        abouts[3].0,
        abouts[3].1,
        "3 of 3 refused",
        format_args!("{refused} of 3 refused, kept {}", rdmsr(msr::HYPERCALL) == enabled),
        refused == 3 && rdmsr(msr::HYPERCALL) == enabled,
    );

    let zeroed = wrmsr(msr::GUEST_OS_ID, 0);
    let value = rdmsr(msr::HYPERCALL).unwrap_or(u64::MAX);
    let call = hyperv::exchange(Instruction::Own, &Registers::call(0xbeef, 0, 0)).err();
    cases.check(
        abouts[2].0,
        abouts[2].1,
        "enable 0, #UD",
        format_args!("enable {} #UD {}", value & ENABLE, call.is_some_and(|fault| fault.vector == Fault::UD)),
        zeroed.is_ok() && value & ENABLE == 0 && call.is_some_and(|fault| fault.vector == Fault::UD),
    );

    hyperv::bring_up();
    shootdown::choose(flushed_by);
}

/// A hypercall and RET, perhaps after ENDBR64, in the first 16 bytes of the page.
fn begins_with_call(first: u64, second: u64) -> bool {
    const RETURN: u8 = 0xc3;
    const ENDBR64: u64 = 0xfa1e_0ff3;
    let [first_byte, second_byte, third_byte] = hypercall::bytes();
    let call_and_return = u32::from_le_bytes([first_byte, second_byte, third_byte, RETURN]).into();
    let low = first & 0xffff_ffff;
    low == call_and_return || low == ENDBR64 && (first >> 32 == call_and_return || second == 0)
}

fn locked_page(cases: &mut Cases) {
    let about = "HYPERCALL locked, then moved";
    let home = hyperv::hypercall_page().address();
    let locked = wrmsr(msr::HYPERCALL, home | ENABLE | LOCKED);
    let moved = wrmsr(msr::HYPERCALL, hyperv::spare_page().address() | ENABLE);
    let value = rdmsr(msr::HYPERCALL).unwrap_or(u64::MAX);
    cases.check(
        "A9",
        about,
        "where it was",
        format_args!("move faults {} page stays {} locked {}", moved.is_err(), value & !0xfff == home, value >> 1 & 1),
        locked.is_ok() && value & !0xffc == home | ENABLE | LOCKED,
    );
}

/// Readings of the reference counter that went backwards, the latest reading, and whose turn it is.
static BACKWARDS: AtomicU64 = AtomicU64::new(0);
static LATEST: AtomicU64 = AtomicU64::new(0);
static TURN: AtomicU64 = AtomicU64::new(0);
const TURNS: u64 = 2000;

/// Reads the counter each time that it is this CPU's turn; CPUs 0 and 1 take turns.
fn read_in_turn(cpu: usize) {
    loop {
        let turn = TURN.load(Ordering::Acquire);
        if turn >= TURNS {
            return;
        }
        if turn & 1 == cpu as u64 {
            let now = rdmsr(msr::TIME_REF_COUNT).unwrap_or(0);
            if now < LATEST.swap(now, Ordering::Relaxed) {
                BACKWARDS.fetch_add(1, Ordering::Relaxed);
            }
            TURN.store(turn + 1, Ordering::Release);
        }
        core::hint::spin_loop();
    }
}

fn clocks(cases: &mut Cases) {
    let about = "RDMSR TIME_REF_COUNT from two vCPUs in turn; a write";
    for counter in [&BACKWARDS, &LATEST, &TURN] {
        counter.store(0, Ordering::SeqCst);
    }
    if cpu::count() > 1 && cpu::give(1, read_in_turn) {
        read_in_turn(0);
        let finished = cpu::wait_for_all(cases.patience()).is_none();
        let backwards = BACKWARDS.load(Ordering::SeqCst);
        let written = wrmsr(msr::TIME_REF_COUNT, 0).err();
        let refused = written.is_some_and(|fault| fault.vector == Fault::GP);
        let latest = LATEST.load(Ordering::SeqCst);
        cases.check(
            "A10",
            about,
            "never backwards, #GP",
            format_args!("{backwards} of {TURNS} backwards, write refused {refused}, at {latest}"),
            finished && backwards == 0 && refused && latest != 0,
        );
    } else {
        cases.skip("A10", about, NEEDS_TWO);
    }

    reference_page(cases);

    // The counter runs at 10 MHz by definition, so it gives the TSC's rate.
    let hz = rdmsr(msr::TSC_FREQUENCY).unwrap_or(0);
    let (first_count, start) = both_clocks();
    tsc::pause_until(start + hz / 4);
    let (last_count, end) = both_clocks();
    let (count, ticks) = (last_count.saturating_sub(first_count), end - start);
    let measured = u128::from(ticks) * 10_000_000 / u128::from(count.max(1));
    let difference = measured.abs_diff(u128::from(hz));
    let refused = wrmsr(msr::TSC_FREQUENCY, hz).err().is_some_and(|fault| fault.vector == Fault::GP);
    cases.check(
        "A12",
        "TSC_FREQUENCY against the reference counter; a write",
        "within 0.1 %, #GP",
        format_args!("{hz} Hz, measured {measured} Hz, write refused {refused}"),
        hz != 0 && difference * 1000 <= u128::from(hz) && refused,
    );
}

/// The reference counter and the TSC at nearly the same moment: of several readings the one with the least delay.
fn both_clocks() -> (u64, u64) {
    let readings = (0..20).map(|_| {
        let before = tsc::now();
        let count = rdmsr(msr::TIME_REF_COUNT).unwrap_or(0);
        let after = tsc::now();
        (after - before, count, before + (after - before) / 2)
    });
    let (_, count, ticks) = readings.min().unwrap_or_default();
    (count, ticks)
}

/// Words of the page: sequence, scale, offset (TLFS, "Reference TSC page").
fn reference_page(cases: &mut Cases) {
    let page = hyperv::spare_page();
    let written = wrmsr(msr::REFERENCE_TSC, page.address() | 1);
    let word = |at: usize| page.words()[at].load(Ordering::SeqCst);
    let time = || {
        let product = u128::from(tsc::now()) * u128::from(word(1));
        u64::try_from(product >> 64).unwrap_or(0).wrapping_add(word(2))
    };
    let sequence = word(0) & 0xffff_ffff;

    // In units of 100 ns; the counter is read between two readings of the page.
    let mut worst = 0;
    for _ in 0..100 {
        let before = time();
        let count = rdmsr(msr::TIME_REF_COUNT).unwrap_or(0);
        let after = time();
        worst = worst.max(before.saturating_sub(count)).max(count.saturating_sub(after));
    }
    cases.check(
        "A11",
        "reference TSC page against TIME_REF_COUNT",
        "sequence not 0, within 1 us",
        format_args!("fault {} sequence {sequence} off by {worst} units of 100 ns", written.is_err()),
        written.is_ok() && sequence != 0 && sequence != 0xffff_ffff && worst <= 10,
    );
    let _ = wrmsr(msr::REFERENCE_TSC, 0);
}

fn invariant_tsc(cases: &mut Cases) {
    let about = "TSC_INVARIANT_CONTROL written with 1, 0, 2";
    if hyperv::features().is_none_or(|features| features.privileges >> 15 & 1 == 0) {
        cases.skip("A13", about, "the privilege is not granted");
        return;
    }
    let invariant = || cpuid(0x8000_0007, 0).edx >> 8 & 1;
    let before = invariant();
    let gp = |seen: Result<(), Fault>| seen.is_err_and(|fault| fault.vector == Fault::GP);
    let set = wrmsr(msr::TSC_INVARIANT, 1);
    let (cleared, other) = (gp(wrmsr(msr::TSC_INVARIANT, 0)), gp(wrmsr(msr::TSC_INVARIANT, 2)));
    let after = invariant();
    cases.check(
        "A13",
        about,
        "ok, #GP, #GP, and CPUID 0x80000007.EDX[8] is 1",
        format_args!("ok {} #GP {cleared} #GP {other}, EDX[8] {before} then {after}", set.is_ok()),
        set.is_ok() && cleared && other && after == 1,
    );
}

fn assist_page(cases: &mut Cases) {
    let page = hyperv::spare_page();
    page.words()[0].store(u64::MAX, Ordering::SeqCst);
    let written = wrmsr(msr::VP_ASSIST, page.address() | 1);
    let word = page.words()[0].load(Ordering::SeqCst) & 0xffff_ffff;
    cases.check(
        "A14",
        "WRMSR VP_ASSIST_PAGE with a page",
        "no fault, the first word is 0",
        format_args!("fault {} first word {word:#x}", written.is_err()),
        written.is_ok() && word == 0,
    );
    let _ = wrmsr(msr::VP_ASSIST, 0);
}

/// An MSR of each privilege, by its bit in leaf 3, EAX; 32 and more are bits of EDX.
const BY_PRIVILEGE: [(u32, u32); 13] = [
    (2, 0x4000_0080),
    (2, 0x4000_0084),
    (2, 0x4000_0090),
    (2, 0x4000_009f),
    (3, 0x4000_00b0),
    (3, 0x4000_00b7),
    (4, 0x4000_0070),
    (4, 0x4000_0072),
    (7, 0x4000_0003),
    (10, 0x4000_00f0),
    (13, 0x4000_0106),
    (32 + 10, 0x4000_0100),
    (32 + 10, 0x4000_0105),
];

fn not_granted(cases: &mut Cases) {
    let features = hyperv::features();
    let granted = features.map_or(0, |it| u64::from(it.privileges) | u64::from(it.features) << 32);
    let (mut tried, mut refused, mut last) = (0, 0, 0);
    let listed = BY_PRIVILEGE.into_iter().filter(|(bit, _)| granted >> bit & 1 == 0).map(|(_, msr)| msr);
    // And some that no specification defines.
    for msr in listed.chain([0x4000_0004, 0x4000_0120, 0x4000_0fff]) {
        tried += 1;
        let faults = [rdmsr(msr).err(), wrmsr(msr, 0).err()];
        if faults.iter().all(|fault| fault.is_some_and(|fault| fault.vector == Fault::GP)) {
            refused += 1;
        } else {
            last = msr;
        }
    }
    cases.check(
        "A15",
        "MSRs of privileges that are not granted",
        "#GP for each",
        format_args!("{refused} of {tried} refused, last accepted {last:#x}"),
        refused == tried,
    );
}
