//! Translates an address by the page tables of a child, for its parent, which emulates an instruction.

use addr::{Gpa, Gva};
use hyperv_defs::vp::{TranslateFlags, TranslationCode};
use x86_emulate::{Access, CpuState, SegmentRegister, Stop};

use super::cpuid;
use super::state::State as _;
use crate::arch::hypercall::Held;
use crate::arch::x86_64::backend;

/// RFLAGS.AC: the supervisor may access user pages although SMAP is on.
const AC: u64 = 1 << 18;

/// The page of `gva`, if the accesses that `flags` name are allowed there.
///
/// Only the child's own tables decide. The page itself need not be there: it may be a device of the parent. Memory that
/// the parent has taken away comes back at the same address.
///
/// # Errors
/// Why there is no page.
pub(in crate::arch) fn translate(held: &mut Held<'_>, flags: TranslateFlags, gva: Gva) -> Result<Gpa, TranslationCode> {
    let arch = &mut held.owner.arch;
    let registers = arch.hardware.registers();
    let is_supervisor = flags.intersects(TranslateFlags::PRIVILEGE_EXEMPT | TranslateFlags::SUPERVISOR_ACCESS);
    let mut cpu = CpuState {
        gprs: [0; 16],
        rip: registers.rip,
        rflags: registers.rflags,
        segments: [SegmentRegister::default(); 6],
        cpl: registers.cpl & 3,
        cr0: registers.control.cr0,
        cr3: registers.cr3,
        cr4: registers.control.cr4,
        efer: registers.control.efer,
        pkru: arch.fpu.pkru(),
        physical_bits: cpuid::physical_address_bits(),
        vendor: backend::vendor(),
    };
    if flags.contains(TranslateFlags::USER_ACCESS) {
        cpu.cpl = 3;
    } else if is_supervisor {
        cpu.cpl = 0;
    }
    if flags.intersects(TranslateFlags::PRIVILEGE_EXEMPT | TranslateFlags::OVERRIDE_SMAP) {
        cpu.rflags |= AC;
    } else if flags.contains(TranslateFlags::ENFORCE_SMAP) {
        cpu.rflags &= !AC;
    }

    let sets_bits = flags.contains(TranslateFlags::SET_PAGE_TABLE_BITS);
    let wants = [
        (TranslateFlags::VALIDATE_READ, Access::Read),
        (TranslateFlags::VALIDATE_WRITE, Access::Write),
        (TranslateFlags::VALIDATE_EXECUTE, Access::Execute),
    ];
    let memory = &held.vm.memory;
    let mut accesses = wants.into_iter().filter(|(flag, _)| flags.contains(*flag)).peekable();
    if accesses.peek().is_none() {
        // The caller wants no check, only the address.
        return x86_emulate::path(&cpu, memory, gva.0).map(|path| path.gpa).ok_or(TranslationCode::PageNotPresent);
    }
    let mut found = Err(TranslationCode::PageNotPresent);
    for (_, access) in accesses {
        found = Ok(x86_emulate::probe(&cpu, memory, gva.0, access, sets_bits).map_err(code)?);
    }
    found
}

/// Bits of a page fault's error code (APM vol. 2, 8.4.2).
const PRESENT: u32 = 1 << 0;
const RESERVED: u32 = 1 << 3;

fn code(stop: Stop) -> TranslationCode {
    match stop {
        Stop::Fault(exception) if exception.error_code & RESERVED != 0 => TranslationCode::InvalidPageTableFlags,
        Stop::Fault(exception) if exception.error_code & PRESENT != 0 => TranslationCode::PrivilegeViolation,
        // The tables change all the time: no walk succeeds.
        Stop::Fault(_) | Stop::Contended => TranslationCode::PageNotPresent,
        Stop::Unbacked(_) => TranslationCode::GpaUnmapped,
    }
}
