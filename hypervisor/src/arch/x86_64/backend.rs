//! The seam between x86-64 and the processor's extension for guests: what a back end gives, and which one is in use.
//!
//! `host/` knows the machine, `guest/` knows the PC that guests see. A back end (`svm/`) alone knows the extension: its
//! control block, its exit codes, its instructions. It implements four traits:
//!
//! | trait | for | subject |
//! |---|---|---|
//! | [`Backend`] | the machine | features, enabling them on a pCPU, masking of interrupts (GIF), the stage-2 format, entry, the match on exits |
//! | [`State`] | a vCPU's control block | registers and segments of the guest: the neutral view |
//! | [`WorldSwitch`] | a vCPU's control block | facts of the last exit, TLB tag and flush, TSC offset, intercepts |
//! | [`Injection`] | a vCPU's control block | events, interrupt window, single step |
//!
//! Permission maps of MSRs and ports are the back end's own affair: all guests are kept away from the same ones, but
//! for the ports of a VM that has the machine's devices. What leaves the guest goes to `guest/msr.rs` and
//! `guest/platform.rs`.
//!
//! A back end's `exit.rs` matches its exit codes and hands typed facts to `guest/`, such as [`PortAccess`]. Its
//! `tags.rs` and `tlb.rs` are modules of the contract. Back ends have the same file names.
//!
//! AMD's control block has the format of all. [`Chosen`] names its back end, whose calls are static. On a machine of
//! Intel [`vmx`](super::vmx) carries that block into its VMCS and back ([decision 0028]); [`is_vmx`] says whether it
//! does. The vCPU loop exists once for each ([`uses_second_back_end`](hwvirt::uses_second_back_end)).
//!
//! [decision 0028]: ../../../../../docs/decisions/0028-vt-x.md

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Display;
use core::ops::DerefMut;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use addr::Hpa;
use mitigations::LastVm;
use tlb_tag::{CpuTags, Flush, Tag};
use x86_defs::msr;
use x86_emulate::Vendor;
use x86_events::Event;

use super::guest::state::State;
use super::guest::vcpu::ArchVcpu;
use super::{svm, vmx};
use crate::check::Finding;
use crate::layout::OwnPages;
use crate::vcpu::Tally;
use crate::vcpu::run::{Next, Running};

/// The back end in use.
pub(crate) type Chosen = svm::Svm;

/// The part of a vCPU that the back end keeps.
pub(crate) type Hardware = <Chosen as Backend>::Vcpu;

/// A processor's extension for guests.
pub(crate) trait Backend {
    /// A vCPU's control block. It dereferences to the registers in it.
    type Vcpu: DerefMut<Target = Self::State> + Injection + WorldSwitch;
    /// The registers in a control block. Code that uses many of them borrows them once.
    type State: State;
    /// A pCPU's context for running guests.
    type Host;
    /// The format of stage-2 tables.
    type Stage2Format: stage2::Format;
    /// A missing requirement of the machine.
    type Missing: Display;

    /// Whose instructions the emulator follows where vendors differ.
    const VENDOR: Vendor;

    /// Checks the machine. Must be called first, and once.
    ///
    /// # Errors
    /// The first missing feature.
    fn check() -> Result<(), Self::Missing>;

    /// The results of `check` on the command line for the extension.
    fn findings() -> Vec<Finding>;

    /// The extension and the features in use, in words.
    fn describe() -> String;

    /// The optional features of the machine.
    fn features() -> Features;

    /// Whether the first pCPU must not run guests.
    fn spares_first_cpu() -> bool;

    /// Lets it look as if firmware had locked the extension off, for `selftest=svm-locked`.
    fn plant_lock();

    /// Turns the extension on for this pCPU. [`check`](Self::check) must have succeeded.
    fn enable() -> Self::Host;

    /// The format of the stage-2 tables that this machine walks.
    fn stage2_format() -> Self::Stage2Format;

    /// From here on, interrupts stay pending until the guest runs or [`take_interrupts`](Self::take_interrupts) takes
    /// them. A pending interrupt ends the next entry before its first instruction.
    fn defer_interrupts();

    /// Takes pending interrupts, then masks them again.
    fn take_interrupts();

    /// Ends what [`defer_interrupts`](Self::defer_interrupts) began: interrupts are masked by IF again.
    fn stop_deferring_interrupts();

    /// Runs the vCPU's guest until its next exit. No TLB entry from before the VM's `epoch` is used. Interrupts are
    /// [deferred](Self::defer_interrupts).
    fn enter(vcpu: &mut ArchVcpu, host: &Self::Host, tags: &mut CpuTags, epoch: u64, tally: Tally<'_>);

    /// Handles the exit that the guest just made: the one match on its reason.
    fn handle(run: &mut Running<'_>) -> Next;
}

/// Optional features of the machine.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Features {
    /// The entries of one TLB tag can be flushed by themselves.
    pub(crate) can_flush_one_tag: bool,
    /// Number of TLB tags for guests: 1 to this.
    pub(crate) tags: u32,
}

/// What an entry needs of a vCPU, and the facts of its last exit.
pub(crate) trait WorldSwitch {
    /// A control block with all intercepts set and no registers. `stage2_root` is the HPA of the VM's stage-2 tables.
    fn new(stage2_root: Hpa) -> Self;

    /// The guest has all ports but these. Each call names the same.
    fn open_ports(&mut self, closed: impl Iterator<Item = u16>);

    /// Pages that only the processor that runs the vCPU writes.
    fn own_pages(&self) -> impl Iterator<Item = OwnPages>;

    /// Which registers of speculation the guest uses without an exit.
    fn passed(&self) -> Passed;

    /// From the next entry on it uses these.
    fn pass(&mut self, passed: Passed);

    /// The vCPU comes to this pCPU, whose TSC the guest reads with `tsc_offset` added.
    fn arrive(&mut self, tsc_offset: u64);

    /// The vCPU leaves this pCPU.
    fn leave(&mut self);

    /// HPA of the VM's stage-2 tables.
    fn root(&self) -> Hpa;

    /// Another than the guest has written CR0, CR3, CR4 or EFER. The vCPU is on no pCPU, or does not run.
    fn note_written_paging(&mut self);

    /// Whether that has happened since [`settle_paging`] was called.
    fn has_written_paging(&self) -> bool;

    /// Sets the intercepts that change at run time: PAUSE while other vCPUs wait for the pCPU, and those of the back
    /// end.
    fn renew_intercepts(&mut self, others_wait: bool);

    /// The next entry uses this TLB tag, and flushes this.
    fn set_tag(&mut self, tag: Tag, flush: Flush);

    /// The entry that [`set_tag`](Self::set_tag) prepared has ended. Returns whether it flushed: a refused entry does
    /// not.
    fn end_flush(&mut self) -> bool;

    /// This pCPU drops the TLB entries of a guest's page.
    fn flush_page(tag: Tag, address: u64);

    /// The class of the guest's task priority (CR8).
    fn task_priority(&self) -> u8;

    /// Writes the class of the guest's task priority.
    fn set_task_priority(&mut self, class: u8);

    /// The last exit; `None` if the processor refused to enter, and then no register can be believed.
    fn exit(&self) -> Option<Exit>;

    /// RIP behind the instruction that exited, if the processor saved it.
    fn next_rip(&self) -> Option<u64>;

    /// The bytes of the instruction that exited, as saved by the processor; mostly none.
    fn instruction_bytes(&self) -> &[u8];
}

/// Registers that control speculation, and that a guest uses without an exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Passed {
    /// None.
    #[default]
    Nothing,
    /// Writes of PRED_CMD.
    Commands,
    /// These, and SPEC_CTRL.
    Everything,
}

impl Passed {
    /// All of them.
    pub(super) const ALL: [Self; 3] = [Self::Nothing, Self::Commands, Self::Everything];

    /// The MSRs that do not exit: number, whether reads do not, whether writes do not.
    pub(super) fn msrs(self) -> impl Iterator<Item = (u32, bool, bool)> {
        let commands = (self >= Self::Commands).then_some((msr::PRED_CMD, false, true));
        let control = (self >= Self::Everything).then_some((msr::SPEC_CTRL, true, true));
        commands.into_iter().chain(control)
    }
}

/// Why the guest was left, in the terms of the back end: for a log line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exit {
    /// The exit's number.
    pub(crate) reason: u32,
    /// The processor's details about it.
    pub(crate) details: [u64; 2],
}

/// Injection of events, and the exits that pending events need.
pub(crate) trait Injection {
    /// As after INIT: no event, no interrupt shadow, task priority zero, no intercept of IRET.
    fn reset(&mut self);

    /// Whether the last exit interrupted the delivery of an event.
    fn has_interrupted_delivery(&self) -> bool;

    /// The event whose delivery the last exit interrupted, if it must be delivered again. A second call returns `None`.
    fn take_interrupted(&mut self) -> Option<Event>;

    /// That event, if there is one. It is left where it is.
    fn interrupted(&self) -> Option<Event>;

    /// Lets it look as if the last exit had interrupted the delivery of this event.
    fn set_interrupted(&mut self, event: Option<Event>);

    /// The next entry delivers an interrupt.
    fn inject_interrupt(&mut self, vector: u8);

    /// The next entry delivers `event`, and ends the interrupt shadow.
    fn inject(&mut self, event: Event);

    /// DR6 and DR7 in the control block are the guest's after this.
    fn show_debug(&mut self);

    /// Whether an entry drops the interrupt shadow.
    fn loses_shadow(&self) -> bool;

    /// The guest leaves as soon as it can take an interrupt.
    fn open_window(&mut self);

    /// Takes back [`open_window`](Self::open_window).
    fn close_window(&mut self);

    /// The guest takes this interrupt by itself as soon as it can, without an exit, or leaves then. `vector` is not an
    /// exception's.
    fn offer_interrupt(&mut self, vector: u8);

    /// Ends [`offer_interrupt`](Self::offer_interrupt). Returns whether the guest has taken the interrupt. If the last
    /// exit interrupted its delivery, it is the [interrupted](Self::interrupted) event.
    fn end_offer(&mut self, vector: u8) -> bool;

    /// Whether writes of the task priority (CR8) leave the guest.
    fn intercept_task_priority(&mut self, leaves_guest: bool);

    /// Whether IRET leaves the guest.
    fn intercept_iret(&mut self, leaves_guest: bool);

    /// All exceptions leave the guest, and with `flags_leave_guest` instructions that save or load RFLAGS.
    fn begin_step(&mut self, flags_leave_guest: bool);

    /// Takes back [`begin_step`](Self::begin_step), IRET included.
    fn end_step(&mut self);
}

/// IN, OUT, INS or OUTS.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PortAccess {
    /// The port.
    pub(crate) port: u16,
    /// Bytes: 1, 2 or 4.
    pub(crate) bytes: u8,
    /// IN or INS.
    pub(crate) is_in: bool,
    /// INS or OUTS, with or without REP.
    pub(crate) is_string: bool,
    /// RIP behind the instruction.
    pub(crate) next_rip: u64,
}

/// The processor's decode of a MOV to a control register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ControlWrite {
    /// Number of the general register.
    pub(crate) from: u8,
    /// RIP behind the instruction.
    pub(crate) next_rip: u64,
}

/// Whether the machine is one of Intel.
static IS_VMX: AtomicBool = AtomicBool::new(false);

/// Whether [`vmx`](super::vmx) is in use, from [`hwvirt::check`] on.
#[inline(always)]
pub(super) fn is_vmx() -> bool {
    IS_VMX.load(Ordering::Relaxed)
}

/// The running vCPU's registers of paging were [written](WorldSwitch::note_written_paging): what the processor keeps
/// beside them follows. Its memory is as the next entry finds it.
#[inline]
pub(super) fn settle_paging(run: &mut Running<'_>) {
    if run.owner.arch.hardware.has_written_paging() && is_vmx() {
        vmx::load_directory_pointers(run);
    }
}

/// Whose instructions the emulator follows where vendors differ.
#[inline]
pub(super) fn vendor() -> Vendor {
    if is_vmx() { Vendor::Intel } else { Chosen::VENDOR }
}

/// A missing requirement of the machine.
pub(crate) enum Missing {
    Svm(<Chosen as Backend>::Missing),
    Vmx(vmx::Missing),
}

impl Display for Missing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Svm(missing) => missing.fmt(f),
            Self::Vmx(missing) => missing.fmt(f),
        }
    }
}

/// A pCPU's context for running guests.
pub(crate) struct HostContext {
    /// The part of AMD's back end, if it is in use.
    pub(super) own: Option<<Chosen as Backend>::Host>,
    /// Identity of the [`FpuState`](super::guest::fpu::FpuState) that the vector registers hold; 0 for none.
    pub(super) fpu_holder: AtomicU64,
    /// The VM that ran here last.
    pub(super) last_vm: LastVm,
}

/// Hardware virtualization of this machine.
pub(crate) mod hwvirt {
    use alloc::format;
    use alloc::string::String;
    use alloc::vec::Vec;
    use core::sync::atomic::{AtomicU64, Ordering};

    pub(crate) use super::HostContext;
    use super::{Backend, Chosen, Features, IS_VMX, LastVm, Missing, is_vmx};
    use crate::arch::x86_64::guest::fpu;
    use crate::arch::x86_64::host::{acpi, apic, iommu, processor, tsc};
    use crate::arch::x86_64::{speculation, vmx};
    use crate::check::{Finding, Verdict};
    use crate::io::iommu::Guard;

    /// A vCPU runs for at most 5 ms while others wait. A spinning vCPU is detected earlier (PAUSE).
    pub(crate) const SLICES_PER_SECOND: u64 = 200;

    /// See [`Backend::check`].
    ///
    /// # Errors
    /// The first missing feature. A machine with neither extension lacks AMD's.
    pub(crate) fn check() -> Result<(), Missing> {
        choose();
        if is_vmx() { vmx::check().map_err(Missing::Vmx) } else { Chosen::check().map_err(Missing::Svm) }
    }

    /// Looks which extension the machine has.
    fn choose() {
        IS_VMX.store(vmx::is_there(), Ordering::Relaxed);
    }

    /// Whether the machine is one of Intel.
    pub(crate) fn uses_second_back_end() -> bool {
        is_vmx()
    }

    /// Whether pCPUs list the writes that they record in stage 2.
    pub(crate) fn lists_writes() -> bool {
        is_vmx() && vmx::lists_writes()
    }

    /// See [`Backend::features`].
    pub(crate) fn features() -> Features {
        if is_vmx() { vmx::features() } else { Chosen::features() }
    }

    /// See [`Backend::spares_first_cpu`].
    pub(crate) fn spares_first_cpu() -> bool {
        Chosen::spares_first_cpu()
    }

    /// Makes this pCPU ready for guests. [`check`] must have succeeded.
    pub(crate) fn enable() -> HostContext {
        let own = if is_vmx() {
            vmx::enable();
            None
        } else {
            Some(Chosen::enable())
        };
        fpu::enable();
        speculation::enable();
        HostContext { own, fpu_holder: AtomicU64::new(0), last_vm: LastVm::new() }
    }

    /// The architecture's name, as the tool calls it.
    pub(crate) const fn name() -> &'static str {
        "x86_64"
    }

    /// The processor in words, with the features in use.
    pub(crate) fn describe() -> String {
        format!("{}; {}", processor::name(), if is_vmx() { vmx::describe() } else { Chosen::describe() })
    }

    /// The results of `check` for the machine.
    pub(crate) fn findings() -> Vec<Finding> {
        let mut findings = Vec::from([processor::finding()]);
        choose();
        findings.extend(if is_vmx() { vmx::findings() } else { Chosen::findings() });

        let clock = format!("{} kHz, {}", tsc::hz() / 1000, tsc::describe());
        findings.push(Finding {
            about: "TSC",
            found: clock,
            verdict: if tsc::is_invariant() {
                Verdict::Good
            } else {
                Verdict::Worse(String::from("guests will take another clock, which costs exits"))
            },
        });
        findings.push(Finding::good("interrupts", format!("timer: {}", apic::timer_name())));
        findings.push(match iommu::guard() {
            Guard::On(by) => Finding::good("IOMMU", by),
            Guard::Off(why) => {
                let effect = String::from("a VM that owns devices can have them write to Dunlin's memory");
                Finding { about: "IOMMU", found: format!("none: {why}"), verdict: Verdict::Worse(effect) }
            }
        });
        let off = acpi::machine().is_some_and(|machine| machine.soft_off.is_some());
        findings.push(if off {
            Finding::good("power off", String::from("by ACPI"))
        } else {
            let why = String::from("when all VMs have ended, turn it off by hand");
            Finding { about: "power off", found: String::from("ACPI does not say how"), verdict: Verdict::Worse(why) }
        });
        findings
    }
}

/// Masking of interrupts in the vCPU loop.
pub(crate) mod irq_mask {
    use super::{Backend, Chosen, is_vmx};
    use crate::arch::x86_64::host::{device_vectors, irq};

    /// See [`Backend::defer_interrupts`].
    #[inline]
    pub(crate) fn defer() {
        if !is_vmx() {
            Chosen::defer_interrupts();
        }
    }

    /// See [`Backend::stop_deferring_interrupts`].
    #[inline]
    pub(crate) fn stop_deferring() {
        if !is_vmx() {
            Chosen::stop_deferring_interrupts();
        }
    }

    /// Takes pending interrupts, wherever it is called.
    pub(crate) fn take_anywhere() {
        // IF is set only while GIF masks interrupts.
        if irq::are_on() {
            Chosen::take_interrupts();
        } else {
            irq::take();
        }
        device_vectors::forward();
    }

    /// See [`Backend::take_interrupts`]. Those of devices are handed on.
    #[inline]
    pub(crate) fn take() {
        if is_vmx() {
            irq::take();
        } else {
            Chosen::take_interrupts();
        }
        device_vectors::forward();
    }
}

/// Entries.
pub(crate) mod entry {
    use tlb_tag::CpuTags;

    use super::{Backend, Chosen, HostContext};
    use crate::arch::x86_64::guest::vcpu::ArchVcpu;
    use crate::arch::x86_64::vmx;
    use crate::vcpu::Tally;
    use crate::vcpu::run::Running;

    /// See [`Backend::enter`].
    #[inline(always)]
    pub(crate) fn enter(
        is_vmx: bool,
        vcpu: &mut ArchVcpu,
        host: &HostContext,
        tags: &mut CpuTags,
        epoch: u64,
        tally: Tally<'_>,
    ) {
        if is_vmx {
            vmx::enter(vcpu, tags, epoch, tally);
        } else if let Some(own) = &host.own {
            Chosen::enter(vcpu, own, tags, epoch, tally);
        }
    }

    /// Reports what an Intel processor has listed since the entry.
    #[inline(always)]
    pub(crate) fn report_writes(is_vmx: bool, run: &mut Running<'_>) {
        if is_vmx {
            vmx::report_writes(run);
        }
    }
}

/// Exits.
pub(crate) mod exit {
    use super::{Backend, Chosen};
    use crate::arch::x86_64::vmx;
    use crate::vcpu::run::{Next, Running};

    /// See [`Backend::handle`].
    #[inline(always)]
    pub(crate) fn handle(is_vmx: bool, run: &mut Running<'_>) -> Next {
        if is_vmx { vmx::handle(run) } else { Chosen::handle(run) }
    }
}
