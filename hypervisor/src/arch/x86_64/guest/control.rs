//! Writes of CR0, CR4 and CR8.
//!
//! Each write of CR4 exits, because CR4 enables features that the guest's CPUID hides. A write of CR0 exits if it
//! changes more than TS and MP, which a lazy switch of x87 state writes. [`x86_defs::control`] has the rules.
//!
//! The processor does nothing for an intercepted write, so this code also updates EFER.LMA and the TLB. It need not
//! load the page-directory pointers of PAE paging: with nested paging the processor reads them when it needs them (APM
//! vol. 2, 15.25.10).

use x86_defs::control::{self, Refused, State, Write};
use x86_defs::registers::efer;
use x86_emulate::{Cpu as _, Segment, SegmentRegister};

use super::emulate::Registers;
use super::mmio;
use super::state::State as _;
use super::vcpu::ArchVcpu;
use crate::arch::VcpuState as _;
use crate::arch::x86_64::backend::ControlWrite;
use crate::vcpu::run::{Next, Running};

/// The guest writes control register `number`. If the processor does not report the operands, the instruction is read.
pub(in crate::arch::x86_64) fn write(run: &mut Running<'_>, number: u8, told: Option<ControlWrite>) -> Next {
    if let Some(ControlWrite { from, next_rip }) = told {
        move_to(run, number, from, next_rip);
        return Next::Resume;
    }

    // If the code cannot be read, or is another instruction by now, another vCPU has changed it. The guest then
    // executes the new code.
    let Some(window) = mmio::bytes_at_rip(run) else { return Next::Resume };
    let bytes = &window.to_bytes()[..usize::from(window.length())];
    let rip = run.owner.arch.hardware.rip();
    match control::decode(bytes, is_64_bit(&run.owner.arch)) {
        Some(Write::Move { control, from, length }) if control == number => {
            move_to(run, number, from, rip.wrapping_add(length.into()));
        }
        Some(Write::StatusWord { from, length }) if number == 0 => {
            let word = register(&mut run.owner.arch, from);
            load_status_word(run, word, rip.wrapping_add(length.into()));
        }
        Some(Write::StatusWordInMemory { opcode }) if number == 0 => {
            let mut load = window.to_bytes();
            load[usize::from(opcode) + 1] = MOVZX;
            if let Some((word, length)) = mmio::load_word(run, &load[..usize::from(window.length())]) {
                load_status_word(run, word, rip.wrapping_add(length.into()));
            }
        }
        _ => {}
    }
    Next::Resume
}

/// Second byte of MOVZX from a word, which has the operands of LMSW.
const MOVZX: u8 = 0xb7;

/// MOV from CR8 to the general register `to`, on a processor that lets it exit.
pub(in crate::arch::x86_64) fn read_task_priority(arch: &mut ArchVcpu, to: u8, next_rip: u64) {
    let class = arch.apic.cr8();
    let mut registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    registers.gprs_mut()[usize::from(to & 15)] = class.into();
    registers.put_back();
    arch.skip_to(next_rip);
}

/// EFER is written.
pub(super) fn write_efer(run: &mut Running<'_>, value: u64) -> Result<(), Refused> {
    let offered = run.vm.platform().cpuid.offered();
    let arch = &mut run.owner.arch;
    let next = arch.hardware.control().write_efer(value, offered)?;
    enter_state(arch, next);
    Ok(())
}

/// MOV to the control register `number`; the next instruction is at `next_rip`.
fn move_to(run: &mut Running<'_>, number: u8, from: u8, next_rip: u64) {
    let arch = &mut run.owner.arch;
    let value = register(arch, from);
    // The operand has 64 bits in 64-bit mode and 32 elsewhere, regardless of prefixes (APM vol. 3, MOV CRn).
    let value = if is_64_bit(arch) { value } else { value & 0xffff_ffff };
    let before = arch.hardware.control();
    let after = match number {
        0 => before.write_cr0(value, has_64_bit_code(arch)),
        4 => before.write_cr4(value, run.vm.platform().cpuid.offered()),
        _ => {
            // The task priority has four bits (APM vol. 2, 3.1.5).
            let [class, ..] = value.to_le_bytes();
            if value >> 4 == 0 {
                arch.write_cr8(class);
                Ok(before)
            } else {
                Err(Refused)
            }
        }
    };
    match after {
        Ok(after) => {
            enter_state(arch, after);
            arch.skip_to(next_rip);
        }
        Err(Refused) => arch.general_protection(),
    }
}

/// LMSW: any value of its four bits of the machine status word is valid.
fn load_status_word(run: &mut Running<'_>, word: u64, next_rip: u64) {
    let arch = &mut run.owner.arch;
    let state = arch.hardware.control();
    arch.hardware.set_control(State { cr0: control::with_status_word(state.cr0, word), ..state });
    arch.skip_to(next_rip);
}

/// Sets the guest's state, and flushes entries that the change makes stale.
#[inline(always)]
fn enter_state(arch: &mut ArchVcpu, next: State) {
    let is_stale = arch.hardware.control().makes_stale(next);
    arch.hardware.set_control(next);
    if is_stale {
        arch.flush_whole();
    }
}

fn is_64_bit(arch: &ArchVcpu) -> bool {
    arch.hardware.control().efer & efer::LMA != 0 && has_64_bit_code(arch)
}

/// Whether CS is one of 64-bit code, in long mode.
fn has_64_bit_code(arch: &ArchVcpu) -> bool {
    arch.hardware.segment(Segment::Cs).attributes & SegmentRegister::LONG != 0
}

/// A general register of the guest.
fn register(arch: &mut ArchVcpu, number: u8) -> u64 {
    let registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    registers.gprs()[usize::from(number & 15)]
}
