//! B: the form of a hypercall: privilege, control words, the input's location, registers.

use core::sync::atomic::{AtomicBool, Ordering};

use guest_model::hypercall::{
    ACCESS_DENIED, ALL_SPACES, Control, FLUSH_LIST, FLUSH_LIST_EX, FLUSH_SPACE, FLUSH_SPACE_EX, INVALID_ALIGNMENT,
    INVALID_CODE, INVALID_INPUT, INVALID_PARAMETER, SPARSE, SUCCESS, reps, status,
};
use guest_model::random::Random;

use super::{
    Answer, CHANGED, CHANGED_REGISTER, Cases, Context, FLUSH_WITHHELD, NEEDS_TWO, NO_INTERFACE, Outcome, SETS_WITHHELD,
    ask, at, bit, by_memory, by_registers, place,
};
use crate::arch::attempt::Fault;
use crate::arch::hyperv::{self, Instruction, Registers};
use crate::arch::modes::{self, RealModeCall};
use crate::arch::{control, remap, tsc};
use crate::cpu;

pub(in crate::experiments::pc) fn run(context: &Context) -> Outcome {
    let Some(features) = hyperv::features() else { return NO_INTERFACE };
    let mut cases = Cases::new(context, "hv-abi");
    CHANGED.store(0, Ordering::SeqCst);

    privilege(&mut cases);
    cases.status("B4", "code 0xBEEF", &[INVALID_CODE], by_memory(Control::simple(0xbeef), &[]));
    withheld(&mut cases, features);
    if features.flush() {
        control_words(&mut cases);
        super::abi_list::lists(&mut cases);
        where_input_lies(&mut cases);
        in_registers(&mut cases, features);
        from_32_bit(&mut cases);
        results(&mut cases);
        long_list(&mut cases);
        changing_input(&mut cases);
    } else {
        cases.skip("B7-B30", "all that needs a flush call", FLUSH_WITHHELD);
    }
    registers_kept(&mut cases);
    cases.done()
}

/// A flush of this CPU: any space, by mask.
fn own_flush() -> [u64; 3] {
    [0, ALL_SPACES, bit(0)]
}

fn privilege(cases: &mut Cases) {
    let call = modes::hypercall_at_cpl3(remap::frame(0, 0));
    let ud = call.fault.is_some_and(|fault| fault.vector == Fault::UD);
    cases.check(
        "B1",
        "hypercall at CPL 3",
        "#UD, RIP at the call",
        format_args!("#UD {ud} RIP at the call {}", call.at_call),
        ud && call.at_call,
    );

    let about = "hypercall in real mode";
    let last = cpu::count() - 1;
    if last > 0 {
        cpu::retire(last);
        let seen = modes::hypercall_in_real_mode(cpu::hardware_id(last), tsc::seconds(5));
        let text = match seen {
            RealModeCall::InvalidOpcode => "#UD at the call",
            RealModeCall::ElsewhereInvalidOpcode => "#UD elsewhere",
            RealModeCall::CarriedOut => "carried out",
            RealModeCall::NoAnswer => "no answer",
        };
        let back = cpu::start(last);
        cases.check(
            "B2",
            about,
            "#UD",
            format_args!("{text}, CPU came back {back}"),
            seen == RealModeCall::InvalidOpcode && back,
        );
    } else {
        cases.skip("B2", about, NEEDS_TWO);
    }

    let fault = hyperv::exchange(Instruction::Foreign, &Registers::call(0xbeef, 0, 0)).err();
    let ud = fault.is_some_and(|fault| fault.vector == Fault::UD);
    cases.check("B3", "the other vendor's instruction", "#UD", format_args!("#UD {ud}"), ud);
}

fn withheld(cases: &mut Cases, features: hyperv::Features) {
    let about = "0x0002 where flushing is withheld";
    if features.flush() {
        cases.skip("B5", about, "flushing is offered to this VM");
    } else {
        cases.status(
            "B5",
            about,
            &[ACCESS_DENIED, INVALID_CODE],
            by_memory(Control::simple(FLUSH_SPACE), &own_flush()),
        );
    }
    let about = "0x0013 where sets are withheld";
    if features.ex_sets() {
        cases.skip("B6", about, "sets are offered to this VM");
    } else {
        let words = [0, ALL_SPACES, SPARSE, 1, bit(0)];
        let answer = by_memory(Control::simple(FLUSH_SPACE_EX).variable(1), &words);
        cases.status("B6", about, &[ACCESS_DENIED, INVALID_CODE], answer);
    }
}

fn control_words(cases: &mut Cases) {
    let space = Control::simple(FLUSH_SPACE);
    let with = |bits: u64| by_memory(Control(space.0 | bits), &own_flush());
    cases.status("B7a", "control bit 27", &[INVALID_INPUT], with(1 << 27));
    cases.status("B7b", "control bit 44", &[INVALID_INPUT], with(1 << 44));
    cases.status("B7c", "control bit 60", &[INVALID_INPUT], with(1 << 60));
    cases.status("B8", "control bit 31, nested", &[INVALID_INPUT], with(1 << 31));
    cases.status("B9", "0x0002 with rep count 1", &[INVALID_INPUT], with(1 << 32));
    cases.status("B10", "0x0002 with rep start 1", &[INVALID_INPUT], with(1 << 48));
    cases.status("B11", "0x0002 with variable size 1", &[INVALID_INPUT], by_memory(space.variable(1), &own_flush()));
}

fn where_input_lies(cases: &mut Cases) {
    let space = Control::simple(FLUSH_SPACE);
    let home = place(&own_flush());
    cases.status("B15", "input misaligned by 4", &[INVALID_ALIGNMENT], at(space, home + 4));
    cases.status("B16", "input crosses the end of its page", &[INVALID_ALIGNMENT], at(space, home + 0xff0));
    cases.status(
        "B17",
        "0x0003 with 510 entries: 24 + 4080 bytes",
        &[INVALID_ALIGNMENT],
        at(Control::rep(FLUSH_LIST, 510), home),
    );
    let beyond = 1 << control::physical_bits();
    cases.status(
        "B18",
        "input at the first address beyond what CPUID 0x80000008 gives",
        &[INVALID_ALIGNMENT],
        at(space, beyond),
    );
    cases.status("B18b", "input at GPA bit 63", &[INVALID_ALIGNMENT], at(space, 1 << 63));
    cases.status("B19", "input in an MMIO hole", &[INVALID_INPUT], at(space, 0xfec0_0000));
    cases.status("B19b", "input where the local APIC is", &[INVALID_INPUT], at(space, 0xfee0_0000));
    let garbage = Registers::call(space.0, home, 0x1234_5677_89ab_cdef);
    cases.result("B20", "output address garbage, for a call without output", 0, ask(&garbage));
}

fn in_registers(cases: &mut Cases, features: hyperv::Features) {
    let space = Control::simple(FLUSH_SPACE);
    let about = "0x0002 in registers where XMM input is not offered";
    if features.xmm_input() {
        cases.skip("B21", about, "XMM input is offered to this VM");
        let changed = CHANGED.load(Ordering::SeqCst);
        let answer = by_registers(space, &own_flush());
        let kept = CHANGED.load(Ordering::SeqCst) == changed;
        cases.result("B22", "0x0002 in RDX, R8, XMM0", 0, answer);
        cases.check("B22b", "the same: RDX, R8, XMM0 to 5", "unchanged", format_args!("unchanged {kept}"), kept);

        let mut words = [remap::address(remap::WATCHED); 15];
        words[..3].copy_from_slice(&own_flush());
        let answer = by_registers(Control::rep(FLUSH_LIST, 11), &words[..14]);
        cases.result("B23a", "0x0003 in registers, 11 entries", 11 << 32, answer);
        let answer = by_registers(Control::rep(FLUSH_LIST, 12), &words);
        cases.status("B23b", "0x0003 in registers, 12 entries", &[INVALID_INPUT], answer);
        let about = "0x0014 in registers, 5 banks and 6 entries";
        if features.ex_sets() {
            let answer = by_registers(Control::rep(FLUSH_LIST_EX, 6).variable(5), &[0, ALL_SPACES, SPARSE, 0x1f]);
            cases.status("B24", about, &[INVALID_INPUT], answer);
        } else {
            cases.skip("B24", about, SETS_WITHHELD);
        }
    } else {
        let answer = by_registers(space, &own_flush());
        let ud = answer.is_err_and(|fault| fault.vector == Fault::UD);
        cases.check("B21", about, "#UD", format_args!("{}", super::ShownAnswer(answer)), ud);
        cases.skip("B22-B24", "input in XMM registers", "XMM input is not offered to this VM");
    }
}

fn from_32_bit(cases: &mut Cases) {
    let space = Control::simple(FLUSH_SPACE);
    let list = [0, ALL_SPACES, bit(0), remap::address(remap::WATCHED), remap::address(remap::WATCHED)];
    let home = place(&list);
    let mut all_kept = true;
    let mut call = |control: Control| -> Answer {
        let (result, kept) = modes::hypercall_from_32_bit(control.0, home, 0)?;
        all_kept &= kept;
        Ok(result)
    };
    let (simple, rep) = (call(space), call(Control::rep(FLUSH_LIST, 2)));
    let (unknown, shape) = (call(Control::simple(0xbeef)), call(Control::rep(FLUSH_SPACE, 1)));
    cases.result("B25a", "32-bit code: 0x0002", 0, simple);
    cases.result("B25b", "32-bit code: 0x0003 with 2 entries, result in EDX:EAX", 2 << 32, rep);
    cases.status("B25c", "32-bit code: code 0xBEEF", &[INVALID_CODE], unknown);
    cases.status("B25d", "32-bit code: 0x0002 with rep count 1", &[INVALID_INPUT], shape);
    cases.check("B25e", "32-bit code: other registers", "unchanged", format_args!("unchanged {all_kept}"), all_kept);
}

fn results(cases: &mut Cases) {
    cases.result("B26", "success of 0x0002: all of RAX", 0, by_memory(Control::simple(FLUSH_SPACE), &own_flush()));
    let mut words = [remap::address(remap::WATCHED); 8];
    words[..3].copy_from_slice(&own_flush());
    let answer = by_memory(Control::rep(FLUSH_LIST, 5), &words);
    cases.result("B27", "success of 0x0003 with 5 entries: all of RAX", 5 << 32, answer);

    let home = place(&own_flush());
    let same = if hyperv::is_up() { hyperv::call(Control::simple(FLUSH_SPACE).0, home, 0) } else { u64::MAX };
    cases.result("B26b", "the same through the hypercall page", 0, Ok(same));
}

/// The longest list there can be. Whether it goes over the hypervisor's time and is continued shows in RCX only.
fn long_list(cases: &mut Cases) {
    let mut words = [0; 512];
    words[..3].copy_from_slice(&own_flush());
    for (index, entry) in words[3..].iter_mut().enumerate() {
        *entry = 1 << 40 | (index as u64) << 24 | 0xfff;
    }
    let control = Control::rep(FLUSH_LIST, 509);
    let home = place(&words);
    let start = tsc::now();
    let after = hyperv::exchange(Instruction::Own, &Registers::call(control.0, home, 0));
    let microseconds = tsc::microseconds(tsc::now() - start);
    let (result, rcx) = after.map_or((u64::MAX, 0), |it| (it.general[hyperv::RAX], it.general[hyperv::RCX]));
    cases.check(
        "B29",
        "0x0003 with 509 entries of 4096 pages: done in the end, continued or not",
        "status 0 reps 509; RCX as it was but for the start",
        format_args!(
            "status {} reps {} start in RCX {} after {microseconds} us",
            status(result),
            reps(result),
            rcx >> 48 & 0xfff
        ),
        result == 509 << 32 && (rcx ^ control.0) & !(0xfff << 48) == 0,
    );
}

static STOP: AtomicBool = AtomicBool::new(false);

/// Writes random words into CPU 0's input page, good and bad ones.
fn rewrite_input(cpu: usize) {
    let mut random = Random::new(0xb30, cpu as u64);
    let words = hyperv::input_page(0).words();
    while !STOP.load(Ordering::Relaxed) {
        let value = match random.below(4) {
            0 => random.bits(),
            1 => 1 << random.below(64),
            2 => ALL_SPACES,
            _ => 0,
        };
        words[random.index(8)].store(value, Ordering::Relaxed);
    }
}

fn changing_input(cases: &mut Cases) {
    let about = "another vCPU rewrites the input during the calls";
    STOP.store(false, Ordering::SeqCst);
    if cpu::count() < 2 || !cpu::give(1, rewrite_input) {
        cases.skip("B30", about, NEEDS_TWO);
        return;
    }
    let calls = cases.context.settings.iterations.unwrap_or(2000);
    let home = place(&own_flush());
    let (mut wrong, mut refused) = (0, 0);
    for call in 0..calls {
        let answer =
            if call % 2 == 0 { at(Control::simple(FLUSH_SPACE), home) } else { at(Control::rep(FLUSH_LIST, 5), home) };
        match answer.map(|result| (status(result), reps(result))) {
            Ok((SUCCESS, done)) if done == if call % 2 == 0 { 0 } else { 5 } => {}
            Ok((INVALID_PARAMETER, 0)) => refused += 1,
            _ => wrong += 1,
        }
    }
    STOP.store(true, Ordering::SeqCst);
    let finished = cpu::wait_for_all(cases.patience()).is_none();
    cases.check(
        "B30",
        about,
        "each result is that of one consistent input",
        format_args!("{wrong} wrong, {refused} refused, of {calls}"),
        finished && wrong == 0,
    );
}

fn registers_kept(cases: &mut Cases) {
    let changed = CHANGED.load(Ordering::SeqCst);
    cases.check(
        "B28",
        "registers but RAX and RCX, and RFLAGS, after each call of these cases",
        "unchanged",
        format_args!("{changed} calls changed one, last {}", CHANGED_REGISTER.load(Ordering::SeqCst)),
        changed == 0,
    );
}
