//! The synthetic interrupt controller and the synthetic timers of a vCPU, where its VM has the Hyper-V interface.
//!
//! The crate `synic` has the rules. This file applies them to the vCPU's local APIC, the guest's memory and the host's
//! timer. Only the pCPU that runs the vCPU writes this state, and it takes no lock of the VM.

use abi::payload::{Devices, Role, VmConfig};
use addr::{Gpa, PAGE_BYTES};
use hyperv_defs::page::TimersState;
use hyperv_defs::reference_tsc::{ReferenceTsc, tsc_at};
use hyperv_defs::{msr, vmbus};
use sched::Pending;
use stage2::Access;
use synic::{Absent, Expiry, Pumped, Refused, SINTS, Sint, Synic, Timers};
use x86_boot::layout::{SYNIC_BYTES, synic_ram};

use super::intercept::{self, Missing};
use super::{hyperv, own_machine};
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
    /// SINTs for which a message may wait, and [`owed`] pages.
    waiting: u32,
    /// Number of the page of messages after a reset. The page of event flags is behind it. Zero: the guest chooses.
    home: u32,
}

const ALL_SINTS: u32 = u16::MAX as u32;

/// Pages of a child to write before its next instruction. The parent may have taken them away before the guest or the
/// parent named them.
pub(super) mod owed {
    /// The page of REFERENCE_TSC, if its content is old.
    pub(in super::super) const CLOCK: u32 = 1 << 16;
    /// That of HYPERCALL.
    pub(in super::super) const HYPERCALL: u32 = 1 << 17;
    /// That of VP_ASSIST_PAGE.
    pub(in super::super) const ASSIST: u32 = 1 << 18;
}

/// Messages about children come in this SINT's slot.
const PARENTS_SINT: usize = 0;
/// Answers of the VMBus come in this SINT's slot.
const VMBUS_SINT: usize = vmbus::SINT as usize;
const _: () = assert!(SINTS == u16::BITS as usize);

impl VcpuSynic {
    /// Of vCPU `index`, as after power-on.
    pub(in crate::arch::x86_64) fn new(index: u32, config: &VmConfig) -> Self {
        let of_pc = || {
            let ram = synic_ram(config.memory_bytes, config.vcpus, config.role)?;
            Some(Gpa(ram.start.0 + u64::from(index) * SYNIC_BYTES))
        };
        let pages = match (config.role, &config.devices) {
            (Role::Parent, Devices::All) => Some(own_machine::synic_page(index)),
            _ => of_pc(),
        };
        let page = pages.map(|pages| pages.0 / PAGE_BYTES);
        // Below 4 GiB.
        Self::at(page.and_then(|page| page.try_into().ok()).unwrap_or(0))
    }

    /// As after a reset.
    pub(in crate::arch::x86_64) fn reset(&mut self) {
        let waiting = self.waiting & !ALL_SINTS;
        *self = Self { waiting, ..Self::at(self.home) };
    }

    fn at(home: u32) -> Self {
        let messages = u64::from(home) * PAGE_BYTES;
        let registers = if home == 0 { Synic::new() } else { Synic::with_pages(messages, messages + PAGE_BYTES) };
        // Its VM may owe a page from before it had this vCPU.
        let waiting = owed::CLOCK;
        Self { registers, timers: Timers::new(), due: u64::MAX, clock: ReferenceTsc::INVALID, waiting, home }
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
        self.waiting |= ALL_SINTS;
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

    /// Takes over a state of the timers when the host's clock is `now`. `None` if no guest could have it.
    pub(super) fn set_timers(&mut self, state: &TimersState, clock: ReferenceTsc, now: u64) -> Option<()> {
        self.clock = clock;
        self.timers.set_state(state, clock.time(now)).ok()?;
        self.renew_due();
        self.waiting |= ALL_SINTS;
        Some(())
    }

    /// The reference time of its VM has changed, or its TSC.
    pub(super) fn set_clock(&mut self, clock: ReferenceTsc) {
        self.clock = clock;
        self.renew_due();
        self.waiting |= owed::CLOCK;
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
        deliver_within_exit(run);
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
    // A slot may be free now, or the page may be back.
    arch.synic.waiting |= ALL_SINTS;
    deliver_within_exit(run);
    Ok(())
}

fn is_timer(number: u32) -> bool {
    matches!(number, msr::STIMER0_CONFIG..=msr::STIMER3_COUNT)
}

/// Whether a register belongs here.
pub(super) const fn has(number: u32) -> bool {
    matches!(number, msr::SCONTROL..=msr::SIRBP | msr::SINT0..=msr::SINT15 | msr::STIMER0_CONFIG..=msr::STIMER3_COUNT)
}

/// The guest has named a page that must be written before its next instruction, and the page was not there.
pub(super) fn owe(run: &mut Running<'_>, page: u32) {
    run.owner.arch.synic.waiting |= page;
    run.vm.post(run.index, Pending::MESSAGE);
}

/// Delivers messages that wait and whose slots are free. Those of occupied slots wait for the guest's EOM. If a page is
/// away that a child must have, the vCPU stays out of its guest until it is back.
#[inline]
pub(super) fn deliver(run: &mut Running<'_>) {
    if run.owner.arch.synic.waiting != 0 {
        deliver_or_wait(run);
    }
}

fn deliver_or_wait(run: &mut Running<'_>) {
    if let Some(gpa) = deliver_waiting(run) {
        intercept::wait_for(run, gpa);
    }
}

/// The same while an instruction is carried out: a child waits after it.
fn deliver_within_exit(run: &mut Running<'_>) {
    if run.owner.arch.synic.waiting != 0 && deliver_waiting(run).is_some() {
        run.vm.post(run.index, Pending::MESSAGE);
    }
}

/// Delivers messages and doorbells of a parent's children, and answers of its VMBus, as far as there is room. For a
/// child, writes the pages that the hypervisor owes it.
pub(super) fn deliver_posted(run: &mut Running<'_>) {
    let answers = run.vm.platform().children().is_some_and(|children| children.bus.has_answers());
    run.owner.arch.synic.waiting |= 1 << PARENTS_SINT | u32::from(answers) << VMBUS_SINT | owed::CLOCK;
    deliver_or_wait(run);
}

/// Delivers waiting messages, as far as possible. Returns the child's page that is away, if messages still wait for it.
#[inline(never)]
fn deliver_waiting(run: &mut Running<'_>) -> Option<Gpa> {
    let waiting = core::mem::take(&mut run.owner.arch.synic.waiting);
    let mut absent = deliver_messages(run, waiting);
    // Only a child's pages come and go. Any other guest repeats its request.
    run.vm.as_child()?;
    let mut away = None;
    if absent != 0 {
        until_there(run, absent, &mut away, |run| {
            absent = deliver_messages(run, absent);
            run.owner.arch.synic.registers.message_page().filter(|_| absent != 0).map(Gpa)
        });
    }
    for page in [owed::CLOCK, owed::HYPERCALL, owed::ASSIST] {
        if waiting & page != 0 {
            until_there(run, page, &mut away, |run| hyperv::write_owed(run, page));
        }
    }
    away
}

/// Maximum number of tries for a page that is taken away and brought back all the time.
const ATTEMPTS: u32 = 64;

/// Writes to a page of a child: `write` returns its address if it was not there. If it is `away`, this waits.
fn until_there(
    run: &mut Running<'_>,
    this: u32,
    away: &mut Option<Gpa>,
    mut write: impl FnMut(&mut Running<'_>) -> Option<Gpa>,
) {
    for _ in 0..ATTEMPTS {
        let Some(gpa) = write(run) else { return };
        match intercept::missing(run, gpa, Access::READ_WRITE) {
            Missing::Back => {}
            // The guest's loss, as in any VM.
            Missing::Nowhere => return,
            Missing::Away => {
                run.owner.arch.synic.waiting |= this;
                *away = Some(gpa);
                return;
            }
        }
    }
}

/// Delivers messages that wait for these SINTs. Returns those whose messages still wait, because there is no page.
fn deliver_messages(run: &mut Running<'_>, waiting: u32) -> u32 {
    let arch = &mut run.owner.arch;
    let children = run.vm.platform().children();
    let mail = children.map(|children| &children.mail);
    if let Some(mail) = mail {
        mail.fill_rings(run.vm, run.index, &arch.synic.registers, |vector| arch.apic.accept(vector, false));
    }
    let Some(page) = arch.synic.registers.message_page() else {
        if let Some(mail) = mail {
            mail.close(run.vm, run.index);
        }
        return 0;
    };
    if let Some(mail) = mail {
        mail.open(run.vm, run.index);
    }
    let page = SynicPage { memory: &run.vm.memory, gpa: Gpa(page) };
    let (mut left, mut absent, mut has_pumped) = (waiting & ALL_SINTS, 0, false);
    while left != 0 {
        let sint = left.trailing_zeros() as usize;
        left &= left - 1;
        let VcpuSynic { registers, timers, .. } = &mut arch.synic;
        match registers.pump(sint, &page, timers) {
            Ok(Pumped::Nothing) => {}
            Ok(Pumped::Message(interrupt)) => {
                has_pumped = true;
                if let Some(interrupt) = interrupt {
                    arch.apic.accept(interrupt.vector, false);
                }
            }
            Err(Absent) => absent |= 1 << sint,
        }
        if sint == VMBUS_SINT
            && let Some(mut answers) = children.and_then(|children| children.bus.outbox(run.index))
            && let Ok(Pumped::Message(Some(interrupt))) = registers.pump(sint, &page, &mut answers)
        {
            arch.apic.accept(interrupt.vector, false);
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
    if has_pumped {
        arch.synic.renew_due();
        if arch.synic.due != u64::MAX {
            host_apic::arm_timer(arch.synic.due);
        }
    }
    absent
}
