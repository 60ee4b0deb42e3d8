//! J: ends of interrupts without an EOI (TLFS, "EOI Assist").
//!
//! The handler of [`ASSISTED`] ends its interrupt as Linux does: it clears the bit of the assist page, and writes to
//! the EOI register only if the bit was clear before.

use core::sync::atomic::{AtomicBool, Ordering};

use super::{Cases, Context, NEEDS_TWO, NO_INTERFACE, Outcome};
use crate::arch::attempt::{Fault, rdmsr, wrmsr};
use crate::arch::hyperv::{self, SharedPage, msr};
use crate::arch::interrupts::{self, ASSISTED, assisted};
use crate::arch::{apic, cpu_local, tsc};
use crate::cpu;
use crate::interrupt::{COUNTED, taken};

/// The privilege, in leaf 3.
const APIC_MSRS: u32 = 1 << 4;
/// The recommendation, in leaf 4.
const USE_APIC_MSRS: u32 = 1 << 3;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    let Some(features) = hyperv::features() else { return NO_INTERFACE };
    let mut cases = Cases::new(context, "hv-assist");
    let is_told = features.privileges & APIC_MSRS != 0 && features.advice & USE_APIC_MSRS == apic_is_recommended();
    cases.check(
        "J1",
        "EOI, ICR and TPR by MSR",
        "granted, and recommended where there is an x2APIC",
        format_args!("privileges {:#x} advice {:#x}", features.privileges, features.advice),
        is_told,
    );
    let page = hyperv::spare_page();
    page.words()[0].store(0, Ordering::SeqCst);
    assisted::use_page(page.address());
    let enabled = wrmsr(msr::VP_ASSIST, page.address() | 1).is_ok();
    cases.check("J2", "VP_ASSIST_PAGE", "no fault", format_args!("{enabled}"), enabled);
    alone(&mut cases, page);
    two(&mut cases, page);
    from_another(&mut cases);
    registers(&mut cases);
    withdrawn(&mut cases, page);
    cases.done()
}

fn apic_is_recommended() -> u32 {
    if apic::is_x2apic() { USE_APIC_MSRS } else { 0 }
}

fn bit(page: &SharedPage) -> u64 {
    page.words()[0].load(Ordering::SeqCst) & 1
}

fn counted() -> u64 {
    taken(cpu_local::index()).counted.load(Ordering::SeqCst)
}

fn is_in_service() -> bool {
    apic::is_in_service(ASSISTED) || apic::is_in_service(COUNTED)
}

/// Lets interrupts in until that is true.
fn let_in(done: impl Fn() -> bool) {
    cpu::wait_until(tsc::ticks(100_000), done);
    interrupts::disable();
}

/// One interrupt at a time needs no EOI.
fn alone(cases: &mut Cases, page: &SharedPage) {
    const ROUNDS: u64 = 100;
    let (taken, spared) = (assisted::taken(), assisted::spared());
    let (mut set, mut left) = (0, 0);
    interrupts::held_off(|| {
        for _ in 0..ROUNDS {
            let before = assisted::taken();
            apic::send_self(ASSISTED);
            set += bit(page);
            let_in(|| assisted::taken() != before);
            left += bit(page) + u64::from(is_in_service());
        }
    });
    let (taken, spared) = (assisted::taken() - taken, assisted::spared() - spared);
    cases.check(
        "J3",
        "an interrupt by itself, 100 times",
        "the bit is set before it, and clear behind it; nothing is in service then",
        format_args!("set {set} taken {taken} without EOI {spared}, left {left}"),
        set == ROUNDS && taken == ROUNDS && spared == ROUNDS && left == 0,
    );
}

/// With another one behind it, it needs one: otherwise the other would not go in.
fn two(cases: &mut Cases, page: &SharedPage) {
    const ROUNDS: u64 = 100;
    let (before, lower) = (assisted::taken(), counted());
    let (mut set, mut kept, mut left) = (0, 0, 0);
    interrupts::held_off(|| {
        for _ in 0..ROUNDS {
            let before = (assisted::taken(), counted());
            apic::send_self(ASSISTED);
            set += bit(page);
            apic::send_self(COUNTED);
            kept += bit(page);
            let_in(|| assisted::taken() != before.0 && counted() != before.1);
            left += u64::from(is_in_service());
        }
    });
    let (higher, lower) = (assisted::taken() - before, counted() - lower);
    cases.check(
        "J4",
        "another one is requested before it is taken, 100 times",
        "the bit is taken back, and both are taken",
        format_args!("set {set} not taken back {kept}, taken {higher} and {lower}, left {left}"),
        set == ROUNDS && kept == 0 && higher == ROUNDS && lower == ROUNDS && left == 0,
    );
}

/// Whether CPU 1 also sends the other vector, and interrupts that it sends.
static SENDS_BOTH: AtomicBool = AtomicBool::new(false);
const SENT: u64 = 300;

/// The job of CPU 1: waits for each of its interrupts to be taken.
fn send(_: usize) {
    let both = SENDS_BOTH.load(Ordering::SeqCst);
    let target = cpu::hardware_id(0);
    let of_target = || taken(0).counted.load(Ordering::SeqCst);
    let deadline = tsc::now() + tsc::ticks(20_000_000);
    for _ in 0..SENT {
        let (first, second) = (assisted::taken(), of_target());
        apic::send(target, ASSISTED);
        if both {
            apic::send(target, COUNTED);
        }
        while (assisted::taken() == first || both && of_target() == second) && tsc::now() < deadline {
            core::hint::spin_loop();
        }
    }
}

/// Another CPU sends them to this one, which is busy.
fn from_another(cases: &mut Cases) {
    for (name, both, about) in [
        ("J5", false, "another CPU sends 300 of them"),
        ("J6", true, "another CPU sends 300 of them, each with another vector behind it"),
    ] {
        if cpu::count() < 2 {
            cases.skip(name, about, NEEDS_TWO);
            continue;
        }
        SENDS_BOTH.store(both, Ordering::SeqCst);
        let (before, lower, spared) = (assisted::taken(), counted(), assisted::spared());
        let given = cpu::give(1, send);
        let finished = cpu::wait_for_all(cases.patience()).is_none();
        let (taken, lower, spared) = (assisted::taken() - before, counted() - lower, assisted::spared() - spared);
        let in_service = is_in_service();
        cases.check(
            name,
            about,
            "each is taken once, most without an EOI if they come alone",
            format_args!("taken {taken} and {lower}, without EOI {spared}, in service {in_service}"),
            given
                && finished
                && !in_service
                && taken == SENT
                && lower == if both { SENT } else { 0 }
                && (both || spared > SENT / 2),
        );
    }
}

/// The other MSRs of the privilege.
fn registers(cases: &mut Cases) {
    let gp = |fault: Fault| fault.vector == Fault::GP;
    let (lower, priority) = (counted(), rdmsr(msr::TPR));
    interrupts::held_off(|| {
        // To this CPU by the shorthand, assert.
        let sent = wrmsr(msr::ICR, 0x4_4000 | u64::from(COUNTED));
        let requested = apic::is_requested(COUNTED);
        let raised = wrmsr(msr::TPR, 0x50).is_ok() && rdmsr(msr::TPR) == Ok(0x50);
        let start = tsc::now();
        let_in(|| tsc::now() - start > tsc::ticks(1000));
        let held = apic::is_requested(COUNTED);
        let lowered = wrmsr(msr::TPR, 0).is_ok();
        let_in(|| counted() != lower);
        let command = rdmsr(msr::ICR);
        cases.check(
            "J7",
            "ICR sends, TPR holds back",
            "requested, held while the priority is above it, then taken",
            format_args!("fault {} requested {requested} held {held} ICR {:#x}", sent.is_err(), command.unwrap_or(0)),
            sent.is_ok()
                && requested
                && raised
                && held
                && lowered
                && priority == Ok(0)
                && command == Ok(0x4_4000 | u64::from(COUNTED))
                && counted() == lower + 1,
        );
    });
    let refused = [rdmsr(msr::EOI).is_err_and(gp), wrmsr(msr::TPR, 0x100).is_err_and(gp)];
    cases.check("J8", "EOI read, TPR 0x100", "#GP", format_args!("{refused:?}"), refused == [true; 2]);
}

/// Without the page nothing is written to it, and EOI is a register.
fn withdrawn(cases: &mut Cases, page: &SharedPage) {
    let (before, spared) = (assisted::taken(), assisted::spared());
    interrupts::held_off(|| {
        apic::send_self(ASSISTED);
        let set = bit(page);
        let off = wrmsr(msr::VP_ASSIST, 0).is_ok();
        let taken_back = bit(page) == 0;
        let_in(|| assisted::taken() != before);
        let left = is_in_service();
        apic::send_self(ASSISTED);
        let again = bit(page);
        let_in(|| assisted::taken() == before + 2);
        let (taken, spared) = (assisted::taken() - before, assisted::spared() - spared);
        cases.check(
            "J9",
            "the page is given up while the bit is set",
            "the bit is taken back; both interrupts are ended by the register",
            format_args!("set {set} taken back {taken_back} left {left} set again {again} taken {taken} {spared}"),
            set == 1 && off && taken_back && !left && again == 0 && taken == 2 && spared == 0 && !is_in_service(),
        );
    });
}
