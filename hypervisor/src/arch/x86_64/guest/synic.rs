//! The synthetic interrupt controller and the synthetic timers of a vCPU, where its VM has the Hyper-V interface.
//!
//! The crate `synic` knows the rules. Here they meet the vCPU's local APIC, the guest's memory and the host's timer.
//! All of it belongs to the pCPU that runs the vCPU: no other writes here, and no lock of the VM is taken.

use abi::payload::VmConfig;
use addr::{Gpa, PAGE_BYTES};
use hyperv_defs::msr;
use hyperv_defs::page::TimersState;
use hyperv_defs::reference_tsc::{ReferenceTsc, tsc_at};
use synic::{Expiry, Refused, SINTS, Sint, Synic, Timers};
use x86_boot::layout::{SYNIC_BYTES, synic_ram};

use crate::arch::hypercall::SynicPage;
use crate::arch::x86_64::host::{apic as host_apic, tsc};
use crate::device::local_apic::{GeneralProtection, LocalApic};
use crate::vcpu::run::Running;

/// What a vCPU has of it.
pub(in crate::arch::x86_64) struct VcpuSynic {
    registers: Synic,
    timers: Timers,
    /// Host clock ticks at which a timer expires next; the largest number when none runs.
    due: u64,
    /// The VM's reference time, from the last write of a timer's register on.
    clock: ReferenceTsc,
    /// SINTs for which a message may wait.
    waiting: u16,
    /// Number of the page of messages after a reset. The page of event flags is behind it. Zero: the guest chooses.
    home: u32,
}

const ALL_SINTS: u16 = u16::MAX;
/// A parent hears of its children in this SINT's slot.
const PARENTS_SINT: usize = 0;
const _: () = assert!(SINTS == u16::BITS as usize);

impl VcpuSynic {
    /// Of vCPU `index`, as after power-on.
    pub(in crate::arch::x86_64) fn new(index: u32, config: &VmConfig) -> Self {
        let ram = synic_ram(config.memory_bytes, config.vcpus, config.role);
        let page = ram.map(|ram| (ram.start.0 + u64::from(index) * SYNIC_BYTES) / PAGE_BYTES);
        // Below 4 GiB.
        Self::at(page.and_then(|page| page.try_into().ok()).unwrap_or(0))
    }

    /// As after a reset.
    pub(in crate::arch::x86_64) fn reset(&mut self) {
        *self = Self::at(self.home);
    }

    fn at(home: u32) -> Self {
        let messages = u64::from(home) * PAGE_BYTES;
        let registers = if home == 0 { Synic::new() } else { Synic::with_pages(messages, messages + PAGE_BYTES) };
        Self { registers, timers: Timers::new(), due: u64::MAX, clock: ReferenceTsc::INVALID, waiting: 0, home }
    }

    /// When a timer expires next, in host clock ticks.
    #[inline]
    pub(in crate::arch::x86_64) fn due(&self) -> u64 {
        self.due
    }

    /// Lets timers expire that are due: their vectors go to the local APIC; their messages wait for [`deliver`].
    #[cold]
    pub(in crate::arch::x86_64) fn expire(&mut self, apic: &mut LocalApic, now: u64) {
        let time = self.clock.time(now);
        while let Some(expiry) = self.timers.expire(time) {
            match expiry {
                Expiry::Direct(interrupt) => apic.accept(interrupt.vector, false),
                Expiry::Message(sint) => self.waiting |= 1 << sint,
            }
        }
        self.renew_due();
    }

    fn renew_due(&mut self) {
        let ReferenceTsc { scale, offset, .. } = self.clock;
        self.due = self.timers.deadline().map_or(u64::MAX, |time| tsc_at(time, scale, offset));
    }

    fn auto_eoi_vectors(&self) -> impl Iterator<Item = u8> {
        let sints = (0..SINTS).filter_map(|number| self.registers.sint(number));
        sints.filter(|sint| sint.is_auto_eoi() && !sint.is_masked()).map(Sint::vector)
    }
}

/// For the parent of a child, while the vCPU is on no pCPU.
impl VcpuSynic {
    /// Reads a register.
    pub(super) fn read(&self, number: u32) -> Option<u64> {
        if is_timer(number) { self.timers.read(number) } else { self.registers.read(number) }.ok()
    }

    /// Writes a register. `None` if a guest could not have this value. Messages that wait are delivered when the vCPU
    /// runs. `clock` is the reference time of its VM, which has no timers without one.
    pub(super) fn place(
        &mut self,
        apic: &mut LocalApic,
        number: u32,
        value: u64,
        clock: Option<ReferenceTsc>,
    ) -> Option<()> {
        if is_timer(number) {
            self.clock = clock.or((value == 0).then_some(self.clock))?;
            self.timers.write(number, value, self.clock.time(tsc::now())).ok()?;
            self.renew_due();
            return Some(());
        }
        self.registers.write(number, value).ok()?;
        apic.set_auto_eoi(self.auto_eoi_vectors());
        self.waiting = ALL_SINTS;
        Some(())
    }

    /// Address of the message page and the event flags page, where they are enabled.
    pub(super) fn pages(&self) -> [Option<Gpa>; 2] {
        [self.registers.message_page(), self.registers.flags_page()].map(|page| page.map(Gpa))
    }

    /// State of the timers.
    pub(super) fn timers(&self) -> TimersState {
        self.timers.state()
    }

    /// Takes over a state of the timers. `None` if no guest could have it.
    pub(super) fn set_timers(&mut self, state: &TimersState, clock: ReferenceTsc) -> Option<()> {
        self.clock = clock;
        self.timers.set_state(state, clock.time(tsc::now())).ok()?;
        self.renew_due();
        self.waiting = ALL_SINTS;
        Some(())
    }
}

/// Reads a register for the guest.
///
/// # Errors
/// When it cannot be read: the guest gets #GP.
pub(super) fn read_msr(run: &Running<'_>, number: u32) -> Result<u64, GeneralProtection> {
    let synic = &run.owner.arch.synic;
    let value = if is_timer(number) { synic.timers.read(number) } else { synic.registers.read(number) };
    value.map_err(|Refused| GeneralProtection)
}

/// Writes a register for the guest. `clock` is the reference time of its VM.
///
/// # Errors
/// When it cannot be written, or not with this value: the guest gets #GP and nothing has changed.
pub(super) fn write_msr(
    run: &mut Running<'_>,
    number: u32,
    value: u64,
    clock: ReferenceTsc,
) -> Result<(), GeneralProtection> {
    let arch = &mut run.owner.arch;
    if is_timer(number) {
        let now = tsc::now();
        arch.synic.clock = clock;
        arch.synic.timers.write(number, value, clock.time(now)).map_err(|Refused| GeneralProtection)?;
        arch.synic.renew_due();
        if arch.synic.due <= now {
            arch.synic.expire(&mut arch.apic, now);
        }
        if arch.synic.due != u64::MAX {
            host_apic::arm_timer(arch.synic.due);
        }
        deliver(run);
        return Ok(());
    }
    arch.synic.registers.write(number, value).map_err(|Refused| GeneralProtection)?;
    if matches!(number, msr::SINT0..=msr::SINT15) {
        arch.apic.set_auto_eoi(arch.synic.auto_eoi_vectors());
    }
    if number == msr::SIRBP
        && let Some(children) = run.vm.platform().children()
    {
        children.mail.restart_rings(run.index);
    }
    // A slot may be free now, or the page be there.
    arch.synic.waiting = ALL_SINTS;
    deliver(run);
    Ok(())
}

fn is_timer(number: u32) -> bool {
    matches!(number, msr::STIMER0_CONFIG..=msr::STIMER3_COUNT)
}

/// Whether a register belongs here.
pub(super) const fn has(number: u32) -> bool {
    matches!(number, msr::SCONTROL..=msr::SIRBP | msr::SINT0..=msr::SINT15 | msr::STIMER0_CONFIG..=msr::STIMER3_COUNT)
}

/// Delivers messages that wait and whose slots are free. Those of occupied slots wait for the guest's EOM.
#[inline]
pub(super) fn deliver(run: &mut Running<'_>) {
    if run.owner.arch.synic.waiting != 0 {
        deliver_waiting(run);
    }
}

/// Delivers messages and doorbells of a parent's children, as far as there is room.
pub(super) fn deliver_posted(run: &mut Running<'_>) {
    run.owner.arch.synic.waiting |= 1 << PARENTS_SINT;
    deliver_waiting(run);
}

#[inline(never)]
fn deliver_waiting(run: &mut Running<'_>) {
    let arch = &mut run.owner.arch;
    let mut waiting = core::mem::take(&mut arch.synic.waiting);
    let mail = run.vm.platform().children().map(|children| &children.mail);
    if let Some(mail) = mail {
        mail.fill_rings(run.vm, run.index, &arch.synic.registers, |vector| arch.apic.accept(vector, false));
    }
    let Some(page) = arch.synic.registers.message_page() else {
        if let Some(mail) = mail {
            mail.close(run.vm, run.index);
        }
        return;
    };
    if let Some(mail) = mail {
        mail.open(run.vm, run.index);
    }
    let page = SynicPage { memory: &run.vm.memory, gpa: Gpa(page) };
    let mut has_pumped = false;
    while waiting != 0 {
        let sint = waiting.trailing_zeros() as usize;
        waiting &= waiting - 1;
        let VcpuSynic { registers, timers, .. } = &mut arch.synic;
        if let Some(interrupt) = registers.pump(sint, &page, timers) {
            arch.apic.accept(interrupt.vector, false);
            has_pumped = true;
        }
        // Timers never send there.
        if sint == PARENTS_SINT
            && let Some(mail) = mail
            && let Some(inbox) = mail.inbox(run.index)
            && let Some(interrupt) =
                registers.pump_posted(sint, &page, &inbox.senders, |sender| mail.message_of(sender))
        {
            arch.apic.accept(interrupt.vector, false);
        }
    }
    // A periodic timer goes on when its message has been delivered.
    if !has_pumped {
        return;
    }
    arch.synic.renew_due();
    if arch.synic.due != u64::MAX {
        host_apic::arm_timer(arch.synic.due);
    }
}
