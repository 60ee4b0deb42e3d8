//! Accesses to device registers in memory: the local APIC in xAPIC mode and the I/O APIC.
//!
//! The CPU says at which guest physical address the guest was stopped, the crate `x86_emulate` finds out what it wanted.

use abi::control::StopReason;
use addr::{Gpa, PageSize};
use core::sync::atomic::Ordering;
use log::debug;
use x86_defs::vmcb::{Event, Segment};
use x86_emulate::{Access, CpuState, Device, Mode, Outcome, Width};

use super::entry::gpr;
use super::exit::{apply, stop};
use super::routing;
use super::svm;
use super::tsc;
use super::vcpu::ArchVcpu;
use crate::device::interrupt::Message;
use crate::device::local_apic::{Effect, LocalApic};
use crate::device::{io_apic, local_apic};
use crate::vcpu::run::{Next, Running};
use crate::vm::Vm;
use crate::vm::memory::Memory;

/// The guest accessed `gpa`, where it has no memory.
pub(super) fn access(run: &mut Running<'_>, gpa: Gpa) -> Next {
    let mut state = state_of(&run.owner.arch);
    let mut bus = Bus { vm: run.vm, apic: &mut run.owner.arch.apic, effect: Effect::None, message: None, nobody: None };
    let control = &run.owner.arch.vmcb.control;
    let bytes = &control.instruction_bytes[..usize::from(control.instruction_length.min(15))];
    // Whoever changes the guest's page tables and then flushes waits until this instruction is through with them.
    run.vcpu.presence().emulate(run.cpu.id.0);
    let outcome = x86_emulate::emulate_fetched(&mut state, bytes, &run.vm.memory, &mut bus, gpa);
    run.vcpu.presence().leave();
    let Bus { effect, message, nobody, .. } = bus;

    match outcome {
        Outcome::Done { .. } => {
            store(&mut run.owner.arch, &state);
            if let Some(gpa) = nobody {
                debug!(
                    "{} vCPU {}: nothing answers at GPA {gpa}, {}",
                    run.vm.name(),
                    run.index,
                    run.owner.arch.whereabouts()
                );
            }
            apply(run, effect);
            if let Some(message) = message {
                routing::send(run.vm, None, &message);
            }
        }
        Outcome::Retry => {}
        Outcome::Fault(exception) => {
            let arch = &mut run.owner.arch;
            if let Some(address) = exception.cr2 {
                arch.vmcb.save.cr2 = address;
            }
            arch.exception = Event::exception_with_code(exception.vector, exception.error_code);
        }
        Outcome::Unsupported { bytes, length } => {
            let shown = &bytes[..usize::from(length).min(bytes.len())];
            debug!("{} vCPU {}: cannot emulate {shown:02x?} at GPA {gpa}: #UD", run.vm.name(), run.index);
            run.owner.arch.undefined();
        }
        Outcome::Unbacked(at) => {
            run.vm.stop(
                StopReason::Unsupported,
                format_args!("vCPU {}: keeps code or page tables at GPA {at}, where there is no memory", run.index),
            );
        }
    }
    Next::Resume
}

/// MOV to CR8, which leaves the guest only while an interrupt waits for a window or for a lower task priority.
pub(super) fn write_cr8(run: &mut Running<'_>) -> Next {
    let state = state_of(&run.owner.arch);
    // The instruction is MOV CR8, reg: F0 as a prefix before MOV CR0 on old code, or REX.R; 0F 22 /0.
    let mut bytes = [0; 15];
    let mut length = 0;
    for at in 0..bytes.len() {
        match fetch_byte(&state, &run.vm.memory, at as u64) {
            Some(byte) => bytes[at] = byte,
            None => break,
        }
        length = at + 1;
        if at >= 2 && bytes[at - 2] == 0x0f && bytes[at - 1] == 0x22 {
            break;
        }
    }
    let code = &bytes[..length];
    let [.., 0x0f, 0x22, modrm] = *code else {
        return stop(run, StopReason::Unsupported, "wrote CR8 by an instruction that cannot be read");
    };
    let rex = code.iter().copied().find(|byte| byte & 0xf0 == 0x40).unwrap_or(0);
    let register = usize::from(modrm & 7 | (rex & 1) << 3);

    let arch = &mut run.owner.arch;
    let [class, ..] = state.gprs[register].to_le_bytes();
    arch.write_cr8(class);
    arch.skip(length as u64);
    Next::Resume
}

/// The byte that the guest fetches next, if it can be fetched.
pub(super) fn next_byte(run: &Running<'_>) -> Option<u8> {
    fetch_byte(&state_of(&run.owner.arch), &run.vm.memory, 0)
}

fn fetch_byte(state: &CpuState, memory: &Memory, offset: u64) -> Option<u8> {
    let linear = match state.mode() {
        Mode::Bits64 => state.rip.wrapping_add(offset),
        _ => state.segment_bases[1].wrapping_add(state.rip).wrapping_add(offset) & 0xffff_ffff,
    };
    let gpa = x86_emulate::translate(state, memory, linear, Access::Execute).ok()?;
    let mut byte = [0];
    Memory::read(memory, gpa, &mut byte).then_some(byte[0])
}

/// The state that the emulator works on.
fn state_of(arch: &ArchVcpu) -> CpuState {
    let save = &arch.vmcb.save;
    let mut gprs = arch.gprs;
    gprs[gpr::RAX] = save.rax;
    gprs[gpr::RSP] = save.rsp;
    CpuState {
        gprs,
        rip: save.rip,
        rflags: save.rflags,
        segment_bases: [save.es.base, save.cs.base, save.ss.base, save.ds.base, save.fs.base, save.gs.base],
        cs_long: save.cs.attributes & Segment::LONG != 0,
        cs_default_32: save.cs.attributes & Segment::BIG != 0,
        cpl: save.cpl,
        cr0: save.cr0,
        cr3: save.cr3,
        cr4: save.cr4,
        efer: save.efer,
        physical_bits: svm::leaf(0x8000_0008).eax.to_le_bytes()[0],
    }
}

/// What an emulated instruction may have changed goes back.
fn store(arch: &mut ArchVcpu, state: &CpuState) {
    arch.gprs = state.gprs;
    arch.vmcb.save.rax = state.gprs[gpr::RAX];
    arch.vmcb.save.rsp = state.gprs[gpr::RSP];
    arch.vmcb.save.rflags = state.rflags;
    arch.skip_to(state.rip);
}

/// The devices behind memory addresses. What they ask for is carried out after the instruction.
struct Bus<'a> {
    vm: &'a Vm,
    apic: &'a mut LocalApic,
    effect: Effect,
    message: Option<Message>,
    nobody: Option<Gpa>,
}

const LOCAL_APIC: Gpa = Gpa(local_apic::MMIO_BASE);
const IO_APIC: Gpa = Gpa(io_apic::MMIO_BASE);

impl Device for Bus<'_> {
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        // Registers have 32 bits and begin at multiples of 16. A narrower read takes its part of one; a wider one finds
        // nothing behind it.
        let (register, shift) = (gpa.0 & !3, (gpa.0 & 3) * 8);
        #[expect(clippy::cast_possible_truncation, reason = "an offset in a page")]
        let offset = Gpa(register).offset_in(PageSize::Size4K) as u16;
        let value = match gpa.page(PageSize::Size4K) {
            LOCAL_APIC => self.apic.read_mmio(offset, tsc::now()),
            IO_APIC => self.vm.platform().io_apic.lock().read(offset),
            _ => {
                self.nobody = Some(gpa);
                return u64::MAX;
            }
        };
        width.truncate(u64::from(value) >> shift)
    }

    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "an offset in a page")]
        let offset = gpa.offset_in(PageSize::Size4K) as u16;
        #[expect(clippy::cast_possible_truncation, reason = "registers have 32 bits")]
        let low = value as u32;
        match gpa.page(PageSize::Size4K) {
            // The manuals define 32-bit accesses only; narrower ones and ones between registers are ignored.
            LOCAL_APIC | IO_APIC if width < Width::Dword || !gpa.0.is_multiple_of(4) => {}
            LOCAL_APIC => self.effect = self.apic.write_mmio(offset, low, tsc::now()),
            IO_APIC => self.message = self.vm.platform().io_apic.lock().write(offset, low),
            _ => self.nobody = Some(gpa),
        }
    }
}

/// Guest memory as the emulator sees it.
impl x86_emulate::Memory for Memory {
    fn read(&self, gpa: Gpa, bytes: &mut [u8]) -> Option<()> {
        Self::read(self, gpa, bytes).then_some(())
    }

    fn read_u32(&self, gpa: Gpa) -> Option<u32> {
        let mut bytes = [0; 4];
        Self::read(self, gpa, &mut bytes).then(|| u32::from_le_bytes(bytes))
    }

    fn read_u64(&self, gpa: Gpa) -> Option<u64> {
        Some(self.word(gpa)?.load(Ordering::Relaxed))
    }

    fn compare_exchange_u32(&self, gpa: Gpa, current: u32, new: u32) -> Option<bool> {
        // The entry is one half of a 64-bit word; the other half must stay as it is.
        let word = self.word(Gpa(gpa.0 & !7))?;
        let shift = (gpa.0 & 4) * 8;
        let old = word.load(Ordering::Relaxed);
        #[expect(clippy::cast_possible_truncation, reason = "takes one half")]
        let half = (old >> shift) as u32;
        let replaced = old & !(0xffff_ffff << shift) | u64::from(new) << shift;
        Some(half == current && word.compare_exchange(old, replaced, Ordering::SeqCst, Ordering::Relaxed).is_ok())
    }

    fn compare_exchange_u64(&self, gpa: Gpa, current: u64, new: u64) -> Option<bool> {
        Some(self.word(gpa)?.compare_exchange(current, new, Ordering::SeqCst, Ordering::Relaxed).is_ok())
    }
}
