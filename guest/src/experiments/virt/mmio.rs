//! Accesses to devices, and to addresses without any, by all kinds of instructions. The guest gets a result or an
//! abort.

use super::Seen;
use crate::arch::attempt::{self, Fault};
use crate::arch::{boot, code, control, controller, cpu_local, entries, serial, window};
use crate::experiments::cases::Cases;
use crate::experiments::{Context, Outcome};
use crate::record::record;

/// An instruction that accesses memory at X0, with data in X1.
struct Form {
    name: &'static str,
    instruction: u32,
    /// Whether the syndrome describes the instruction, so that the hypervisor can emulate it.
    is_described: bool,
    /// Whether it may do no access, as a store-exclusive without its load.
    is_hint: bool,
    needs_atomics: bool,
}

const fn form(name: &'static str, instruction: u32) -> Form {
    Form { name, instruction, is_described: false, is_hint: false, needs_atomics: false }
}

const fn described(name: &'static str, instruction: u32) -> Form {
    Form { is_described: true, ..form(name, instruction) }
}

const fn hint(name: &'static str, instruction: u32) -> Form {
    Form { is_hint: true, ..form(name, instruction) }
}

const fn atomic(name: &'static str, instruction: u32) -> Form {
    Form { needs_atomics: true, ..form(name, instruction) }
}

const FORMS: [Form; 26] = [
    form("ldp", 0xa940_7c01),
    form("stp", 0xa900_7c01),
    form("ldnp", 0xa840_7c01),
    form("ldr-post-index", 0xf840_8401),
    form("str-pre-index", 0xf800_8c01),
    form("ldr-q", 0x3dc0_0000),
    form("str-q", 0x3d80_0000),
    form("ld1", 0x4c40_7000),
    form("st1", 0x4c00_7000),
    form("ldxr", 0xc85f_7c01),
    hint("stxr", 0xc801_7c1f),
    form("ldaxp", 0xc87f_fc01),
    described("ldar", 0xc8df_fc01),
    described("stlr", 0xc89f_fc01),
    described("ldursw", 0xb880_0001),
    atomic("ldadd", 0xf821_0001),
    atomic("swp", 0xf821_8001),
    atomic("cas", 0xc8a1_7c1f),
    form("dc-zva", 0xd50b_7420),
    hint("dc-ivac", 0xd508_7620),
    hint("dc-civac", 0xd50b_7e20),
    hint("dc-cvau", 0xd50b_7b20),
    hint("ic-ivau", 0xd50b_7520),
    hint("at-s1e1r", 0xd508_7800),
    hint("prfm", 0xf980_0000),
    described("ldr", 0xf940_0001),
];

pub(super) fn forms(context: &Context) -> Outcome {
    let mut cases = Cases::new(context, "mmio-forms");
    let cpu = cpu_local::index();
    for (target, at) in [
        ("distributor", controller::distributor()),
        ("redistributor", controller::redistributor()),
        ("serial", serial::base() + 0x100),
        ("nowhere", 0xd000_0000),
        ("end", (1 << control::physical_bits()) - 4096),
    ] {
        // As a device, and as if it were memory, so that the guest's own tables let everything through.
        for (kind, entry) in [("device", entries::device(at & !0xfff)), ("memory", entries::page(at & !0xfff))] {
            let place = window::map(cpu, entry) + at % 4096;
            for offset in [0, 1, 4] {
                FORMS.iter().for_each(|form| try_form(&mut cases, form, target, kind, place + offset));
            }
        }
    }
    window::map(cpu, 0);
    cases.done()
}

fn try_form(cases: &mut Cases, form: &Form, target: &str, kind: &str, at: u64) {
    // QEMU's own machine does with its devices as it likes.
    if form.needs_atomics && !control::has_atomics() || !cases.context.judged {
        return;
    }
    let seen = code::execute(cpu_local::index(), form.instruction, [at, 0]);
    let matches = match seen {
        Ok(_) => form.is_hint || form.is_described && target != "nowhere" && target != "end",
        Err(fault) => fault.is_external() || fault.class() == Fault::DATA && matches!(fault.status(), 0x21 | 0x35),
    };
    // One record each would be too many.
    if !matches {
        let seen = format_args!("{target} as {kind}: {}", Seen(seen.map(|[_, x1]| x1)));
        cases.check(form.name, "an access to a device", "an abort", seen, false);
    } else if at.is_multiple_of(4096) && kind == "memory" {
        let seen = format_args!("{target}: {}", Seen(seen.map(|[_, x1]| x1)));
        cases.check(form.name, "an access to a device", "an abort", seen, true);
    }
}

/// Instructions from devices and from nowhere.
pub(super) fn fetches(context: &Context) -> Outcome {
    let mut cases = Cases::new(context, "fetch-nowhere");
    let cpu = cpu_local::index();
    if !context.judged {
        return Outcome::Unsupported("needs a hypervisor below");
    }
    for (name, at) in [
        ("fetch-distributor", controller::distributor()),
        ("fetch-serial", serial::base()),
        ("fetch-nowhere", 0xd000_0000),
        ("fetch-zero", 0),
        ("fetch-end", (1 << control::physical_bits()) - 4096),
    ] {
        let seen = code::fetch(window::map(cpu, entries::page(at)));
        let matches = seen.is_err_and(|fault| fault.class() == Fault::FETCH && fault.is_external());
        let seen = Seen(seen.map(|()| 0));
        cases.check(name, "an instruction from there", "an external abort", format_args!("{seen}"), matches);
    }
    let device = window::map(cpu, entries::device(controller::distributor()));
    let seen = code::fetch(device);
    let matches = seen.is_err_and(|fault| fault.class() == Fault::FETCH && fault.is_own());
    let seen = Seen(seen.map(|()| 0));
    cases.check("fetch-forbidden", "one that the guest forbids", "its own abort", format_args!("{seen}"), matches);
    let seen = code::fetch(boot::entry_of_further() + 2);
    let matches = seen.is_err_and(|fault| fault.class() == Fault::ALIGNED_PC);
    let seen = Seen(seen.map(|()| 0));
    cases.check("fetch-odd", "one that is not aligned", "an alignment fault", format_args!("{seen}"), matches);
    window::map(cpu, 0);
    cases.done()
}

/// All devices at all widths, at random offsets, with random data; but nothing that is written where the records go.
pub(super) fn random(context: &Context) -> Outcome {
    if !context.judged {
        return Outcome::Unsupported("needs a hypervisor below");
    }
    let mut random = context.random(0);
    let (redistributors, bytes) = controller::redistributors();
    let places = [
        (controller::distributor(), 0x1_0000),
        (controller::distributor(), 0x1000),
        (redistributors, bytes),
        // The redistributors of CPUs that do not exist, and what follows.
        (redistributors + bytes, 0x4_0000),
        (serial::base() + 8, 0xff8),
        (serial::base() + 0x1_0000, 0x1000),
        (0x0a00_0000, 0x1000),
        (0, 0x1000),
    ];
    let (mut reads, mut writes, mut aborts, mut others) = (0u64, 0u64, 0u64, 0u64);
    for _ in 0..context.settings.iterations.unwrap_or(100_000) {
        let (start, bytes) = places[random.index(places.len())];
        let width = 1 << random.below(4);
        let at = (start + random.below(bytes)) & !(width - 1);
        let data = random.bits() >> random.below(64);
        let is_write = random.below(2) == 0;
        let answer = match (is_write, width) {
            (false, 1) => attempt::load_u8(at).map(|_| ()),
            (false, 2) => attempt::load_u16(at).map(|_| ()),
            (false, 4) => attempt::load_u32(at).map(|_| ()),
            (false, _) => attempt::load_u64(at).map(|_| ()),
            (true, 1) => attempt::store_u8(at, (data & 0xff) as u8),
            (true, 2) => attempt::store_u16(at, (data & 0xffff) as u16),
            (true, 4) => attempt::store_u32(at, (data & 0xffff_ffff) as u32),
            (true, _) => attempt::store_u64(at, data),
        };
        if is_write {
            writes += 1;
        } else {
            reads += 1;
        }
        match answer {
            Ok(()) => {}
            Err(fault) if fault.is_external() => aborts += 1,
            Err(_) => others += 1,
        }
    }
    controller::restore();
    serial::prepare();
    // Records begin on a new line, after any sent bytes.
    serial::send(b"\r\n");
    record!("record", experiment = "mmio-fuzz", reads = reads, writes = writes, aborts = aborts, others = others);
    let of = format_args!("exceptions");
    let mut failures = context.expect("mmio-fuzz", of, 0, format_args!("{others}"), others == 0);
    failures += super::interrupts::still_work(context, "mmio-fuzz");
    Outcome::Done { failures }
}
