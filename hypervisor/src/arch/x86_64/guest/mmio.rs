//! Emulated accesses: device registers in memory (the local APIC in xAPIC mode, the I/O APIC, PCI's configuration
//! spaces, tables of functions of the VM, the port of a parent's programs), and strings to and from ports.
//!
//! The CPU reports the guest physical address of the access; the crate `emulator` executes the instruction.

use abi::control::StopReason;
use abi::counters::ExitReason;
use addr::{Gpa, PageSize};
use emulator::ExitInfo;
use log::debug;
use x86_boot::layout::{PCI_ECAM, PCI_ECAM_BYTES, TOOL_PORT_BYTES};
use x86_emulate::{
    Access, Cause, Cpu as _, Device, Emulation, Fetched, Mode, Outcome, Segment, SegmentRegister, Walks, Width, Window,
};

use super::apic::{Origin, apply};
use super::emulate::{self, Registers};
use super::own_machine::{self, MachineOfVm};
use super::state::{State as _, gpr};
use super::vcpu::{ArchVcpu, stop};
use super::{delivery, intercept, platform};
use crate::arch::x86_64::backend::{Injection as _, WorldSwitch as _};
use crate::arch::x86_64::host::tsc;
use crate::device::io_apic;
use crate::device::local_apic::{Effect, LocalApic};
use crate::vcpu::Vcpu;
use crate::vcpu::run::{Next, Running};
use crate::vm::fault::{Needs, Problem};
use crate::vm::tool_port::ToolPort;

/// The guest accessed `gpa`, where it has no memory.
#[inline(always)]
pub(in crate::arch::x86_64) fn access(run: &mut Running<'_>, gpa: Gpa, needs: Needs) -> Next {
    run.tally.exit(ExitReason::Mmio);
    if run.vm.platform().own_machine.is_some()
        && let Some(next) = own_machine::access(run, gpa)
    {
        return next;
    }
    if run.owner.arch.hardware.has_interrupted_delivery() {
        // Not an instruction's access: the guest's descriptor tables or its stack are at an address without memory. A
        // retry would fail again, before any interrupt of the host is taken.
        return stop(run, StopReason::Unsupported, "delivers an event through addresses where there is no memory");
    }
    let is_fetch = needs.access.execute;
    if is_fetch || needs.is_table_walk {
        if run.vm.as_child().is_some() {
            return intercept::unrecoverable(run, "has code or page tables at its local APIC");
        }
        // Code or page tables where there is no memory: on a PC, ones from an empty bus, and soon a triple fault.
        let what = if is_fetch { "fetched an instruction from" } else { "keeps page tables at" };
        run.vm.stop_by(
            run.index,
            StopReason::Unsupported,
            format_args!(
                "vCPU {}: {what} GPA {gpa}, where there is no memory, {}",
                run.index,
                run.owner.arch.whereabouts()
            ),
        );
        return Next::Resume;
    }
    carry_out(run, Cause::Access(gpa))
}

/// As [`access`], by a child.
#[cold]
#[inline(never)]
pub(in crate::arch::x86_64) fn access_of_child(run: &mut Running<'_>, gpa: Gpa, needs: Needs) -> Next {
    if intercept::handles(run, gpa) {
        run.tally.exit(ExitReason::Mmio);
        return intercept::device(run, gpa, needs);
    }
    access(run, gpa, needs)
}

/// A parent reads memory that it has deposited: ones, as where there is no memory.
#[cold]
pub(in crate::arch::x86_64) fn read_of_deposited(run: &mut Running<'_>, gpa: Gpa) -> Next {
    if run.owner.arch.hardware.has_interrupted_delivery() {
        return stop(run, StopReason::Unsupported, Problem::Deposited.text());
    }
    carry_out(run, Cause::Access(gpa))
}

/// The guest is at INS or OUTS, to a port that it may use.
pub(super) fn port_string(run: &mut Running<'_>) -> Next {
    carry_out(run, Cause::Port)
}

/// Carries out the instruction at RIP.
fn carry_out(run: &mut Running<'_>, cause: Cause) -> Next {
    // A vCPU that changes the guest's page tables and then flushes waits until this instruction has finished with them.
    run.vcpu.presence().emulate(run.cpu.id.0);
    let origin = Origin::of(run);
    let arch = &mut run.owner.arch;
    let saved;
    let given = if arch.hardware.instruction_bytes().is_empty() {
        &[][..]
    } else {
        let (bytes, count) = saved_bytes(arch, run.vcpu, run.vm.memory.epoch());
        saved = bytes;
        &saved[..count]
    };
    let mut registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    let mut bus = Bus { origin, apic: &mut arch.apic, nobody: None };
    let (memory, exit) = (&run.vm.memory, ExitInfo { cause, bytes: given });
    let outcome = arch.emulator.emulate(&mut registers, memory, &mut bus, exit, || memory.decoded(), run.tally);
    let nobody = bus.nobody;
    registers.put_back();
    run.vcpu.presence().leave();
    if run.owner.arch.emulator.has_pending_insert() {
        emulate::insert_pending(run);
    }

    if let Outcome::Done { .. } | Outcome::Again = outcome {
        let rip = run.owner.arch.hardware.rip();
        run.owner.arch.skip_to(rip);
        if let Some(gpa) = nobody {
            tell_of_nobody(run, gpa);
        }
        return Next::Resume;
    }
    end(run, cause, outcome)
}

/// The instruction's bytes as saved by the CPU. None if they may be older than a flush that was requested since the
/// exit. A sender that requested it before this vCPU announced the emulation does not wait for this vCPU.
#[cold]
fn saved_bytes(arch: &ArchVcpu, vcpu: &Vcpu, epoch: u64) -> ([u8; 15], usize) {
    let is_current = !vcpu.mailbox().has_work() && arch.has_seen(epoch);
    let bytes = if is_current { arch.hardware.instruction_bytes() } else { &[] };
    let mut saved = [0; 15];
    saved.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    (saved, bytes.len().min(saved.len()))
}

/// Informs the guest about an instruction that was not executed.
#[cold]
fn end(run: &mut Running<'_>, cause: Cause, outcome: Outcome) -> Next {
    match outcome {
        Outcome::Done { .. } | Outcome::Again => {}
        Outcome::Retry => run.owner.arch.before_instruction(),
        Outcome::Fault(exception) => {
            let arch = &mut run.owner.arch;
            if let Some(address) = exception.cr2 {
                arch.hardware.set_cr2(address);
            }
            arch.raise(exception.vector, exception.error_code);
        }
        Outcome::Unsupported { bytes, length } => refuse(run, cause, &bytes, length),
        Outcome::Unbacked(at) if run.vm.as_child().is_some() => return intercept::unbacked(run, at),
        Outcome::Unbacked(at) => {
            run.vm.stop_by(
                run.index,
                StopReason::Unsupported,
                format_args!("vCPU {}: keeps code or page tables at GPA {at}, where there is no memory", run.index),
            );
        }
    }
    Next::Resume
}

/// Logs an access to an address without a device.
#[cold]
fn tell_of_nobody(run: &Running<'_>, gpa: Gpa) {
    let whereabouts = run.owner.arch.whereabouts();
    debug!("{} vCPU {}: no device at GPA {gpa}, {whereabouts}", run.vm.name(), run.index);
}

/// An instruction that is not emulated.
#[cold]
fn refuse(run: &mut Running<'_>, cause: Cause, bytes: &[u8], length: u8) {
    let shown = &bytes[..usize::from(length).min(bytes.len())];
    debug!("{} vCPU {}: cannot emulate {shown:02x?} for {cause:x?}: #UD", run.vm.name(), run.index);
    run.tally.add(|count| &count.emulations_refused, 1);
    run.owner.arch.undefined();
}

/// Executes the load of a word, encoded in `bytes`. Returns the word and the instruction's length. `None` if the guest
/// must get an exception first.
#[cold]
pub(super) fn load_word(run: &mut Running<'_>, bytes: &[u8]) -> Option<(u64, u8)> {
    run.vcpu.presence().emulate(run.cpu.id.0);
    let origin = Origin::of(run);
    let arch = &mut run.owner.arch;
    let mut registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    let mut bus = Bus { origin, apic: &mut arch.apic, nobody: None };
    let mut walks = Walks::forgetful();
    let mut emulation = Emulation::new(&mut registers, &run.vm.memory, &mut bus, &mut walks, Cause::Port);
    let outcome = match x86_emulate::decode(emulation.mode(), bytes) {
        Ok(instruction) => emulation.load(&instruction).map(|word| (word, instruction.length)),
        Err(_) => Err(Outcome::Retry),
    };
    run.vcpu.presence().leave();
    outcome
        .map_err(|outcome| {
            let _ = end(run, Cause::Port, outcome);
        })
        .ok()
}

/// The guest's next bytes of code and their address, if they can be fetched.
pub(in crate::arch::x86_64) fn fetch(run: &mut Running<'_>) -> Option<Fetched> {
    let arch = &mut run.owner.arch;
    let registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    x86_emulate::fetch(&registers, &run.vm.memory, &mut Walks::forgetful()).ok()
}

/// The guest's next bytes of code, if they can be fetched. They may continue on the next page.
pub(in crate::arch::x86_64) fn bytes_at_rip(run: &mut Running<'_>) -> Option<Window> {
    code_at_rip(run).ok()
}

/// The same.
///
/// # Errors
/// Why they cannot be fetched.
pub(super) fn code_at_rip(run: &mut Running<'_>) -> Result<Window, Outcome> {
    // As during an emulation: words in a child's memory stay valid.
    let is_child = run.vm.as_child().is_some();
    if is_child {
        run.vcpu.presence().emulate(run.cpu.id.0);
    }
    let arch = &mut run.owner.arch;
    let registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    let window = x86_emulate::fetch_whole(&registers, &run.vm.memory, arch.emulator.walks());
    if is_child {
        run.vcpu.presence().leave();
    }
    window
}

/// An instruction that does nothing but write to memory.
pub(super) struct Store {
    pub(super) width: Width,
    pub(super) value: u64,
    /// RIP behind the instruction.
    pub(super) next_rip: u64,
}

/// The instruction at RIP, if it is of this kind.
pub(super) fn store(run: &mut Running<'_>) -> Option<Store> {
    let (saved, count) = saved_bytes(&run.owner.arch, run.vcpu, run.vm.memory.epoch());
    let window = if count != 0 { Window::of(&saved[..count]) } else { bytes_at_rip(run)? };
    let arch = &mut run.owner.arch;
    let registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    let mode = registers.mode();
    let instruction = x86_emulate::decode(mode, window.to_bytes().get(..usize::from(window.length()))?).ok()?;
    let value = instruction.stored(registers.gprs())?;
    let next_rip = registers.rip().wrapping_add(instruction.length.into());
    let next_rip = if mode == Mode::Bits64 { next_rip } else { Width::Dword.truncate(next_rip) };
    Some(Store { width: instruction.width, value, next_rip })
}

/// Clears TF in the flags that the guest's PUSHF has just saved, because TF was the hypervisor's. If the stack cannot
/// be written any more, the guest has changed its page tables, and keeps the flags.
pub(in crate::arch::x86_64) fn clear_saved_trap_flag(run: &mut Running<'_>) {
    const TF_IN_SECOND_BYTE: u8 = 1;
    let arch = &mut run.owner.arch;
    let registers = Registers::of(&mut arch.gprs, &mut arch.hardware);
    let stack = registers.segment(Segment::Ss);
    let linear = match registers.mode() {
        Mode::Bits64 => registers.gprs()[gpr::RSP].wrapping_add(1),
        _ => {
            let width = if stack.attributes & SegmentRegister::BIG != 0 { 0xffff_ffff } else { 0xffff };
            stack.base.wrapping_add(registers.gprs()[gpr::RSP].wrapping_add(1) & width) & 0xffff_ffff
        }
    };
    let memory = &run.vm.memory;
    let found = x86_emulate::translate(&registers, memory, &mut Walks::forgetful(), linear, Access::Write);
    let mut byte = [0];
    if let Ok(gpa) = found
        && memory.read(gpa, &mut byte)
    {
        byte[0] &= !TF_IN_SECOND_BYTE;
        let _ = memory.write(gpa, &byte);
    }
}

/// The devices. Requests of an access to other vCPUs are sent at once; nothing waits.
struct Bus<'a> {
    origin: Origin<'a>,
    apic: &'a mut LocalApic,
    nobody: Option<Gpa>,
}

impl Bus<'_> {
    /// Address of the registers of the vCPU's local APIC.
    #[inline]
    fn local_apic(&self) -> Gpa {
        Gpa(self.apic.mmio_base())
    }

    /// The port of a parent's programs, PCI's configuration spaces, functions of the VM, or nothing.
    #[cold]
    fn read_elsewhere(&mut self, gpa: Gpa, width: Width) -> u64 {
        if let Some((port, offset)) = self.tool_port(gpa) {
            return port.read(self.origin.vm, offset, bytes(width)).into();
        }
        let Some(offset) = self.offset_in_ecam(gpa) else {
            let given = platform::given(self.origin.vm).and_then(|given| given.read(gpa, width.bytes()));
            return given.unwrap_or_else(|| {
                self.nobody = Some(gpa);
                u64::MAX
            });
        };
        self.origin.vm.platform().pci.lock().read_memory(offset, width.bytes())
    }

    #[cold]
    fn write_elsewhere(&mut self, gpa: Gpa, width: Width, value: u64) {
        if let Some((port, offset)) = self.tool_port(gpa) {
            #[expect(clippy::cast_possible_truncation, reason = "registers have 32 bits")]
            port.write(self.origin.vm, offset, bytes(width), value as u32);
            return;
        }
        let Some(offset) = self.offset_in_ecam(gpa) else {
            let given = platform::given(self.origin.vm);
            if !given.is_some_and(|given| given.write(gpa, width.bytes(), value)) {
                self.nobody = Some(gpa);
            }
            return;
        };
        platform::write_pci(self.origin.vm, |pci| pci.write_memory(offset, width.bytes(), value));
    }

    /// The offset in the memory window to PCI's configuration, if this address is there. A VM with the machine's
    /// devices has the machine's window.
    fn offset_in_ecam(&self, gpa: Gpa) -> Option<u64> {
        let offset = gpa.0.checked_sub(PCI_ECAM.0).filter(|offset| *offset < PCI_ECAM_BYTES)?;
        self.origin.vm.platform().own_machine.is_none().then_some(offset)
    }

    /// The machine's I/O APIC with this page, if the VM has the machine's devices.
    #[cold]
    fn io_apic_of_machine(&self, page: Gpa) -> Option<(&MachineOfVm, usize)> {
        let machine = self.origin.vm.platform().own_machine.as_deref()?;
        machine.io_apic_at(page).map(|number| (machine, number))
    }

    /// The port of a parent's programs, and the offset in its page, if this address is there.
    fn tool_port(&self, gpa: Gpa) -> Option<(&ToolPort, u16)> {
        let port = platform::tool_port(self.origin.vm)?;
        let offset = gpa.0.checked_sub(platform::tool_port_at(self.origin.vm).0)?;
        let offset = u16::try_from(offset).ok().filter(|offset| u32::from(*offset) < TOOL_PORT_BYTES)?;
        Some((port, offset))
    }
}

/// As ports count it.
fn bytes(width: Width) -> u8 {
    width.bytes().to_le_bytes()[0]
}

const IO_APIC: Gpa = Gpa(io_apic::MMIO_BASE);

impl Device for Bus<'_> {
    #[inline]
    fn read(&mut self, gpa: Gpa, width: Width) -> u64 {
        // Registers have 32 bits and begin at multiples of 16. A narrower read takes its part of one; a wider one finds
        // nothing behind it.
        let (register, shift) = (gpa.0 & !3, (gpa.0 & 3) * 8);
        #[expect(clippy::cast_possible_truncation, reason = "an offset in a page")]
        let offset = Gpa(register).offset_in(PageSize::Size4K) as u16;
        let value = match gpa.page(PageSize::Size4K) {
            page if page == self.local_apic() => self.apic.read_mmio(offset, tsc::now),
            IO_APIC => match &self.origin.vm.platform().own_machine {
                Some(machine) => machine.read_io_apic(0, offset),
                None => self.origin.vm.platform().io_apic.lock().read(offset),
            },
            page if let Some((machine, number)) = self.io_apic_of_machine(page) => machine.read_io_apic(number, offset),
            _ => return self.read_elsewhere(gpa, width),
        };
        u64::from(value) >> shift
    }

    #[inline]
    fn write(&mut self, gpa: Gpa, width: Width, value: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "an offset in a page")]
        let offset = gpa.offset_in(PageSize::Size4K) as u16;
        #[expect(clippy::cast_possible_truncation, reason = "registers have 32 bits")]
        let low = value as u32;
        let (page, local_apic) = (gpa.page(PageSize::Size4K), self.local_apic());
        let is_register = width >= Width::Dword && gpa.0.is_multiple_of(4);
        match page {
            // The manuals define 32-bit accesses only; narrower ones and ones between registers are ignored.
            page if !is_register && (page == local_apic || page == IO_APIC) => {}
            page if page == local_apic => {
                let effect = self.apic.write_mmio(offset, low, tsc::now());
                if effect != Effect::None {
                    apply(self.origin, self.apic, effect);
                }
            }
            IO_APIC if let Some(machine) = &self.origin.vm.platform().own_machine => {
                machine.write_io_apic(self.origin.vm, 0, offset, low);
            }
            page if let Some((machine, number)) = self.io_apic_of_machine(page) => {
                if is_register {
                    machine.write_io_apic(self.origin.vm, number, offset, low);
                }
            }
            IO_APIC => {
                let message = self.origin.vm.platform().io_apic.lock().write(offset, low);
                if let Some(message) = message {
                    delivery::send(self.origin.vm, None, &message);
                }
            }
            _ => self.write_elsewhere(gpa, width, value),
        }
    }

    fn read_port(&mut self, port: u16, width: Width) -> u64 {
        width.truncate(platform::read(self.origin.vm, port, bytes(width)).into())
    }

    fn write_port(&mut self, port: u16, width: Width, value: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "at most 32 bits")]
        platform::write(self.origin.vm, self.origin.index, port, bytes(width), value as u32);
    }
}
