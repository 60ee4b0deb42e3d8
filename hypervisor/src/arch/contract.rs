//! The contract between the core and an architecture.
//!
//! [`Arch`] is a machine: its pCPUs, their interrupts and clock, and what it offers for guests. [`VcpuState`] is one
//! vCPU on it. The core calls [`Machine`](super::Machine), one type per build, so every call is direct and may be
//! inlined. All machines have modules of the same names, so the macro `implement` serves each of them.

use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use abi::control::Line;
use abi::payload::{PciFunction, VmConfig};
use addr::{Gpa, GpaRange, Hpa};
use sched::{CpuId, Pending};
use shootdown::{CpuSet, Pages};
use stage2::{Access, Format, Stale};
use tlb_tag::{Scheme, TagRange};

use crate::arch::block::Block;
use crate::check::Finding;
use crate::cpu::PerCpu;
use crate::device::serial::SerialDevice;
use crate::frames::Frames;
use crate::io::iommu::{Domain, Functions, Guard, RequesterId};
use crate::layout::OwnPages;
use crate::vcpu::activity::Activity;
use crate::vcpu::run::{Next, Running};
use crate::vcpu::{Owner, Tally, Vcpu};
use crate::vm::Vm;
use crate::vm::fault::Resolved;
use crate::vm::memory::Memory;
use crate::vm::spec::Spec;
use crate::vm::tool_port::ToolPort;

/// A machine, as the core needs it.
pub(crate) trait Arch: Sized + 'static {
    /// The architecture's part of a pCPU's block. It comes first in the block; a pCPU finds its block through it.
    type PerCpu;
    /// State that a pCPU needs to run guests, made by [`Arch::enable`].
    type HostContext;
    /// One vCPU.
    type Vcpu: VcpuState<Self>;
    /// Events that other pCPUs leave for a vCPU besides its mailbox. Each is complete before its [`Pending`] bit is
    /// posted.
    type Posted: Sync;
    /// Devices that the vCPUs of a VM share. They have locks of their own.
    type Platform: Sync;
    /// The consoles of the host.
    type Console: HostConsole;
    /// The control port.
    type ControlPort: ControlPort;
    /// The serial ports of guests.
    type Uart: SerialDevice;
    /// PCI functions that a VM was given.
    type Given: GivenFunctions;
    /// Where a VM's kernel begins.
    type KernelEntry;
    /// The format of stage-2 tables.
    type Format: Format;
    /// Tags for vCPUs' TLB entries, for VMs that count them in the same way.
    type TagPool: Sync;
    /// A pCPU's part of a pool of tags.
    type CpuTags;
    /// A VM's part.
    type VmTags: Sync;
    /// A vCPU's part.
    type VcpuTags;
    /// A decoded instruction in the cache of emulated ones.
    type Decoded: decode_cache::Decoded;

    /// Time slices per second.
    const SLICES_PER_SECOND: u64;

    /// The block of this pCPU. The answer never changes: no stack moves to another pCPU.
    fn this() -> &'static PerCpu;
    /// As [`Arch::this`], for code that may run before the pCPUs have their blocks.
    fn try_this() -> Option<&'static PerCpu>;
    /// Whether the first pCPU runs no vCPUs.
    fn spares_first_cpu() -> bool;
    /// The core that a pCPU is a thread of: the same number for all of its threads.
    fn core_of(cpu: &PerCpu) -> u64;
    /// What the machine does against speculative execution.
    fn speculation() -> abi::control::Speculation;
    /// Turns virtualization on, on this pCPU.
    fn enable() -> Self::HostContext;

    /// The clock, in ticks. It never goes back on one pCPU; the clocks of two may differ by a little.
    fn now() -> u64;
    /// Ticks per second; 0 before they are known.
    fn hz() -> u64;
    /// Nanoseconds since boot.
    fn nanos() -> u64;
    /// Nanoseconds that `ticks` take.
    fn ticks_to_nanos(ticks: u64) -> u64;
    /// Ticks that `nanos` nanoseconds take.
    fn nanos_to_ticks(nanos: u64) -> u64;

    /// Sleeps until an interrupt, and takes it. An interrupt that came before ends the sleep at once.
    fn wait();
    /// Interrupts another pCPU. When it takes the interrupt, it sees all stores from before this call.
    fn kick(cpu: CpuId);
    /// Interrupts several pCPUs at once.
    fn kick_all(cpus: CpuSet);
    /// Has this pCPU's timer interrupt it at this tick, and not at an earlier one.
    fn arm_timer(deadline: u64);
    /// From here on interrupts stay pending until the guest runs. A pending interrupt ends the next entry at once.
    fn defer_interrupts();
    /// Takes the pending interrupts, then defers further ones again.
    fn take_interrupts();
    /// The same wherever a pCPU is between two entries, whether interrupts are deferred or not.
    fn take_interrupts_anywhere();
    /// Ends what [`Arch::defer_interrupts`] began.
    fn stop_deferring_interrupts();
    /// Masks interrupts for good, to report a panic.
    fn mask_interrupts();
    /// Stops all other pCPUs, where they are.
    fn stop_others();
    /// Stops this pCPU.
    fn stop_this_cpu() -> !;
    /// The interrupt controller's page, if each pCPU has one at the same address.
    fn interrupts_page() -> Option<OwnPages>;

    /// Ends the machine with this exit code, if an emulator or a firmware takes one.
    fn exit(code: u8) -> !;
    /// Restarts the machine, or ends the emulator.
    fn restart() -> !;
    /// Ends a check with this exit code. The result stays on the screen.
    fn end_check(code: u8) -> !;
    /// The stack pointer, where the search of a report for return addresses begins.
    fn stack_pointer() -> u64;
    /// Calls `found` for all return addresses on the stack from `stack` on.
    fn for_each_return_address(stack: u64, found: &mut dyn FnMut(u64));
    /// Reads through a null pointer: a selftest of the report.
    fn read_null() -> u64;

    /// Whether the machine meets the requirements of guests.
    fn check() -> Result<(), impl fmt::Display>;
    /// The results of `check` on the boot command line for this machine.
    fn findings() -> Vec<Finding>;
    /// One line about the processor.
    fn describe() -> String;
    /// The architecture's name, as the tool calls it.
    fn name() -> &'static str;
    /// The number of tags for guests, and whether the machine can flush the entries of a single tag.
    fn tags() -> (u32, bool);
    /// A pool of tags. `inherits`: another pool had them before, so TLBs may hold entries under them.
    fn tag_pool(scheme: Scheme, range: TagRange, can_flush_one: bool, inherits: bool) -> Self::TagPool;
    /// A pCPU's part of a pool.
    fn cpu_tags(pool: &Self::TagPool, cpu: CpuId) -> Self::CpuTags;
    /// The format of the stage-2 tables that the machine walks.
    fn stage2_format() -> Self::Format;
    /// Makes stage-2 entries visible to all walkers.
    fn publish();
    /// Does the flush of all TLBs that a change of stage 2 requires. On return no pCPU uses `stale` translations.
    fn flush(memory: &Memory, tags: &Self::VmTags, vcpus: &[Block<Vcpu>], stale: Stale);

    /// Whether IOMMUs keep PCI functions to what they were granted. Without, the following functions do nothing.
    fn guard() -> Guard;
    /// From now on the functions reach what the stage-2 tables at `root` map, and nothing else. Nobody owns them yet,
    /// and no other tables have this domain.
    fn grant(functions: &Functions, domain: Domain, root: Hpa);
    /// The functions reach nothing any more. On return no access of theirs by this domain is under way.
    fn revoke(functions: &Functions, domain: Domain);
    /// Flushes `stale` from IOMMUs. On return no function of the domain uses a stale translation.
    fn flush_devices(domain: Domain, stale: Stale);
    /// Calls `tell` for each event that IOMMUs have reported since the last call.
    fn take_events(tell: &mut dyn FnMut(RequesterId, &dyn fmt::Display));

    /// The address ranges of a VM's memory of this length.
    fn ram_layout(bytes: u64) -> impl Iterator<Item = GpaRange>;
    /// Loads a VM's kernel into its memory, which is all zero.
    fn load(spec: &Spec<'_>, memory: &mut Memory) -> Result<Self::KernelEntry, impl fmt::Display>;
    /// The interrupt of a serial line has changed.
    fn serial_interrupt(vm: &Vm, line: Line, asserted: bool);
    /// Before an entry, and before the loop asks whether something ends a wait: chooses the events that the guest gets.
    fn prepare(run: &mut Running<'_>);
    /// Lets the vCPU's own timers expire that are due by `now`, in ticks of the host's clock.
    fn expire_timers(run: &mut Running<'_>, now: u64);
    /// Sends an interrupt to the vCPU `id`, if it exists: which one is in `what`.
    fn post_interrupt(vm: &Vm, id: u32, what: u64);
    /// One more step of what a change of the VM's devices tells its vCPUs. Returns whether there may be more.
    fn tell_more(vm: &Vm) -> bool;
    /// The owner takes over the events that `work` announces.
    fn take_posted(vcpu: &mut Self::Vcpu, posted: &Self::Posted, work: Pending);
    /// Whether guests run by the second of the architecture's two back ends. It does not change.
    fn uses_second_back_end() -> bool;
    /// Runs the vCPU's guest until its next exit. No TLB entry from before the VM's `epoch` is used. `second` is the
    /// answer of [`uses_second_back_end`](Self::uses_second_back_end), as a constant.
    fn enter(
        second: bool,
        vcpu: &mut Self::Vcpu,
        host: &Self::HostContext,
        tags: &mut Self::CpuTags,
        epoch: u64,
        tally: Tally<'_>,
    );
    /// Whether pCPUs list the writes that they record in stage 2.
    fn lists_writes() -> bool;
    /// After an exit, and before others may take the vCPU for out of its guest: reports what the pCPU has listed.
    /// `second` as in [`enter`](Self::enter).
    fn report_writes(second: bool, run: &mut Running<'_>);
    /// Handles the last exit. `second` as in [`enter`](Self::enter).
    fn handle_exit(second: bool, run: &mut Running<'_>) -> Next;

    /// The number of vCPUs of a VM with the machine's devices that has so many of the machine's CPUs. It is larger if
    /// the numbers by which devices name CPUs have gaps.
    fn vcpus_with_devices(cpus: u32) -> u32;
    /// Gives the machine's devices to a VM that is about to be created, with this number of vCPUs. Returns memory that
    /// only such a VM has.
    ///
    /// # Errors
    /// Why no VM, or not this one, can have them.
    fn take_devices(vcpus: u32) -> Result<Vec<Frames>, String>;
    /// The port by which programs in a VM speak to the hypervisor, if it is a parent.
    fn tool_port(vm: &Vm) -> Option<&ToolPort>;
    /// The interrupt of that port has changed.
    #[allow(dead_code, reason = "not every architecture has parents")]
    fn tool_port_interrupt(vm: &Vm, asserted: bool);
    /// Whether VMs can be saved to a file.
    ///
    /// # Errors
    /// Why not, for people.
    fn can_save() -> Result<(), &'static str>;
    /// What a file keeps of the devices and clocks that the vCPUs of a paused VM share, when the host's clock was
    /// `tick`.
    fn save_shared(vm: &Vm, tick: u64) -> Vec<u8>;
    /// A new VM that is paused takes this over, when the host's clock is `tick`. Comes before the vCPUs.
    ///
    /// # Errors
    /// Why such a VM cannot run here, for people.
    fn restore_shared(vm: &Vm, state: &[u8], tick: u64) -> Result<(), String>;
    /// What a file keeps of a vCPU of such a VM.
    fn save_vcpu(vm: &Vm, index: u32, owner: &mut Owner, tick: u64) -> Vec<u8>;
    /// A vCPU takes this over.
    ///
    /// # Errors
    /// Why it cannot have this state, for people.
    fn restore_vcpu(vm: &Vm, index: u32, owner: &mut Owner, state: &[u8], tick: u64) -> Result<(), String>;
    /// A paused VM's time stood still from one tick of the host's clock to another, and goes on.
    fn time_stood_still(vm: &Vm, from: u64, to: u64);
    /// Whether a VM has children that it will not end itself.
    fn has_orphans(vm: &Vm) -> bool;
    /// Does a part of the end of such children.
    fn end_orphans(vm: &Vm);
    /// Writes counters into pages of a parent that shall show them, if it is time.
    fn renew_statistics(vm: &Vm);
    /// The pCPU that runs a parent's vCPU delivers what its children have left for it; one that runs a child's, what
    /// the hypervisor owes its guest.
    fn deliver_messages(run: &mut Running<'_>);
    /// A vCPU that its VM or its parent has kept out of its guest goes on.
    fn held_no_more(run: &mut Running<'_>);
    /// The fault of a child's vCPU at `gpa`, by an access that needs these rights: its parent has said what is there.
    fn fault_of_child(run: &mut Running<'_>, gpa: Gpa, needs: Access) -> Resolved;
    /// One of a parent's children, a `sender` by its number, has a message for the parent's vCPU `vcpu`.
    #[allow(dead_code, reason = "not every architecture has parents")]
    fn post_message(parent: &Vm, vcpu: u32, sender: u32);
}

/// PCI functions of the machine that one VM has. When this is dropped, they are given back: then they are silent, and
/// the IOMMU may block them.
pub(crate) trait GivenFunctions: Sized + Send + Sync + fmt::Debug {
    /// Takes these functions for a VM that is about to be created. They are silent.
    ///
    /// # Errors
    /// Which of them no VM can have, or not this one, and why.
    fn take(functions: &[PciFunction]) -> Result<Self, String>;
    /// Whether all of them are ready for use. Asked again and again, until they are.
    ///
    /// # Errors
    /// One of them does not come back from its reset.
    fn is_ready(&mut self) -> Result<bool, String>;
    /// Their registers that the guest reaches without an exit.
    fn registers(&self) -> impl Iterator<Item = (GpaRange, Hpa)>;
    /// From now on their interrupts go to this VM.
    fn start(&self, vm: &Arc<Vm>);
}

/// The consoles of the host, as one sink for text and one source of input. They wait a limited time for the other end.
pub(crate) trait HostConsole: Send {
    /// Consoles that are not open yet, and swallow everything.
    const CLOSED: Self;

    /// Opens the machine's consoles. Missing ones stay closed. A panic opens them a second time, after the first owner
    /// was stopped for good.
    fn open() -> Self;
    /// Sends the bytes, or as many as the other end takes in time.
    fn send(&mut self, bytes: &[u8]);
    /// Waits until all of it has left.
    fn flush(&mut self);
    /// Takes input. Returns the number of bytes.
    fn receive(&mut self, into: &mut [u8]) -> usize;
}

/// A byte stream to the tool, in both directions. No function waits.
pub(crate) trait ControlPort: Sized + Send {
    /// The port that was opened at boot; `None` if there is none, or it was taken already.
    fn take() -> Option<Self>;
    /// Copies received bytes into `into`; 0 if there are none.
    fn receive(&mut self, into: &mut [u8]) -> usize;
    /// Sends as many of the bytes as fit, and returns their number.
    fn transmit(&mut self, bytes: &[u8]) -> usize;
    /// Whether the other end has taken all that was sent.
    fn is_drained(&mut self) -> bool;
}

/// A vCPU: registers, interrupts, timer. The pCPU that runs the vCPU owns it.
pub(crate) trait VcpuState<A: Arch>: Sized {
    /// A vCPU that waits for its start.
    fn new(index: u32, config: &VmConfig, stage2_root: Hpa, tags: A::VcpuTags) -> Self;
    /// Pages that only the pCPU that runs the vCPU writes.
    fn own_pages(&self) -> impl Iterator<Item = OwnPages>;
    /// Starts the first vCPU, at its VM's kernel.
    fn start_at(&mut self, entry: &A::KernelEntry);
    /// The vCPU comes to this pCPU. `came_back`: it ran here last and on no other pCPU since.
    fn load(&mut self, host: &A::HostContext, tags: &mut A::CpuTags, came_back: bool);
    /// The vCPU leaves this pCPU.
    fn unload(&mut self, tags: &mut A::CpuTags);
    /// Has instructions exit that are worth it only while other vCPUs wait for the pCPU.
    fn renew_intercepts(&mut self, others_wait: bool);
    /// No TLB entry of the guest on this pCPU is used by its next entry.
    fn flush_whole(&mut self);
    /// The same for some pages. Returns the number of pages that were flushed individually.
    fn flush_pages(&mut self, pages: Pages) -> u64;
    /// When the guest was last left, in ticks.
    fn left_at(&self) -> u64;
    /// Wakes a vCPU that waits, if something ends its wait.
    fn try_wake(&mut self) -> bool;
    /// What the vCPU does.
    fn activity(&mut self) -> &mut Activity;
    /// Whether only another vCPU can ever make this one run again.
    fn is_dormant(&self) -> bool;
    /// When the vCPU's own timer is due, if that is the core's business.
    fn deadline(&self) -> Option<u64>;
    /// Returns the tags, to be freed after the vCPU.
    fn into_tags(self) -> A::VcpuTags;
}

/// Implements the contract for a machine, by the functions of its modules.
macro_rules! implement {
    ($machine:ident) => {
        impl $crate::arch::Arch for $machine {
            type PerCpu = percpu::ArchPerCpu;
            type HostContext = hwvirt::HostContext;
            type Vcpu = vcpu::ArchVcpu;
            type Posted = delivery::Posted;
            type Platform = platform::Platform;
            type Console = serial::Serial;
            type ControlPort = control_port::ControlPort;
            type Uart = platform::Uart;
            type Given = platform::Given;
            type KernelEntry = loader::KernelEntry;
            type Format = format::Stage2Format;
            type TagPool = tags::Pool;
            type CpuTags = tags::CpuTags;
            type VmTags = tags::VmTags;
            type VcpuTags = tags::VcpuTags;
            type Decoded = emulate::Decoded;

            const SLICES_PER_SECOND: u64 = hwvirt::SLICES_PER_SECOND;

            $crate::arch::contract::forward! {
                fn this() -> &'static $crate::cpu::PerCpu = percpu::this;
                fn try_this() -> Option<&'static $crate::cpu::PerCpu> = percpu::try_this;
                fn spares_first_cpu() -> bool = hwvirt::spares_first_cpu;
                fn core_of(cpu: &$crate::cpu::PerCpu) -> u64 = percpu::core_of;
                fn speculation() -> abi::control::Speculation = $crate::arch::weaknesses::told;
                fn enable() -> Self::HostContext = hwvirt::enable;
                fn now() -> u64 = clock::now;
                fn hz() -> u64 = clock::hz;
                fn nanos() -> u64 = clock::nanos;
                fn ticks_to_nanos(ticks: u64) -> u64 = clock::ticks_to_nanos;
                fn nanos_to_ticks(nanos: u64) -> u64 = clock::nanos_to_ticks;
                fn wait() -> () = irq::wait;
                fn kick(cpu: sched::CpuId) -> () = interrupts::kick;
                fn kick_all(cpus: shootdown::CpuSet) -> () = interrupts::kick_all;
                fn arm_timer(deadline: u64) -> () = interrupts::arm_timer;
                fn defer_interrupts() -> () = irq_mask::defer;
                fn take_interrupts() -> () = irq_mask::take;
                fn take_interrupts_anywhere() -> () = irq_mask::take_anywhere;
                fn stop_deferring_interrupts() -> () = irq_mask::stop_deferring;
                fn mask_interrupts() -> () = irq::mask;
                fn stop_others() -> () = interrupts::stop_others;
                fn stop_this_cpu() -> ! = power::stop_this_cpu;
                fn interrupts_page() -> Option<$crate::layout::OwnPages> = interrupts::own_page;
                fn exit(code: u8) -> ! = power::exit;
                fn restart() -> ! = power::restart;
                fn end_check(code: u8) -> ! = power::end_check;
                fn stack_pointer() -> u64 = irq::stack_pointer;
                fn for_each_return_address(stack: u64, found: &mut dyn FnMut(u64)) -> () =
                    $crate::arch::stack::for_each_return_address;
                fn read_null() -> u64 = irq::read_null;
                fn check() -> Result<(), impl core::fmt::Display> = hwvirt::check;
                fn findings() -> alloc::vec::Vec<$crate::check::Finding> = hwvirt::findings;
                fn describe() -> alloc::string::String = hwvirt::describe;
                fn name() -> &'static str = hwvirt::name;
                fn tag_pool(
                    scheme: tlb_tag::Scheme,
                    range: tlb_tag::TagRange,
                    one: bool,
                    inherits: bool
                ) -> Self::TagPool = tags::pool;
                fn cpu_tags(pool: &Self::TagPool, cpu: sched::CpuId) -> Self::CpuTags = tags::cpu;
                fn stage2_format() -> Self::Format = format::stage2_format;
                fn publish() -> () = tlb::publish;
                fn flush(
                    memory: &$crate::vm::memory::Memory,
                    tags: &Self::VmTags,
                    vcpus: &[$crate::arch::block::Block<$crate::vcpu::Vcpu>],
                    stale: stage2::Stale
                ) -> () = tlb::flush;
                fn guard() -> $crate::io::iommu::Guard = iommu::guard;
                fn grant(functions: &$crate::io::iommu::Functions, domain: $crate::io::iommu::Domain, root: addr::Hpa) -> () =
                    iommu::grant;
                fn revoke(functions: &$crate::io::iommu::Functions, domain: $crate::io::iommu::Domain) -> () = iommu::revoke;
                fn flush_devices(domain: $crate::io::iommu::Domain, stale: stage2::Stale) -> () = iommu::flush;
                fn take_events(tell: &mut dyn FnMut($crate::io::iommu::RequesterId, &dyn core::fmt::Display)) -> () =
                    iommu::take_events;
                fn ram_layout(bytes: u64) -> impl Iterator<Item = addr::GpaRange> = loader::ram_layout;
                fn load(
                    spec: &$crate::vm::spec::Spec<'_>,
                    memory: &mut $crate::vm::memory::Memory
                ) -> Result<Self::KernelEntry, impl core::fmt::Display> = loader::load;
                fn serial_interrupt(vm: &$crate::vm::Vm, line: abi::control::Line, asserted: bool) -> () =
                    platform::serial_interrupt;
                fn prepare(run: &mut $crate::vcpu::run::Running<'_>) -> () = delivery::prepare;
                fn expire_timers(run: &mut $crate::vcpu::run::Running<'_>, now: u64) -> () = delivery::expire_timers;
                fn post_interrupt(vm: &$crate::vm::Vm, id: u32, what: u64) -> () = delivery::post_interrupt;
                fn tell_more(vm: &$crate::vm::Vm) -> bool = delivery::tell_more;
                fn take_posted(vcpu: &mut Self::Vcpu, posted: &Self::Posted, work: sched::Pending) -> () =
                    delivery::take_posted;
                fn deliver_messages(run: &mut $crate::vcpu::run::Running<'_>) -> () = delivery::deliver_messages;
                fn held_no_more(run: &mut $crate::vcpu::run::Running<'_>) -> () = delivery::held_no_more;
                fn uses_second_back_end() -> bool = hwvirt::uses_second_back_end;
                fn enter(
                    second: bool,
                    vcpu: &mut Self::Vcpu,
                    host: &Self::HostContext,
                    tags: &mut Self::CpuTags,
                    epoch: u64,
                    tally: $crate::vcpu::Tally<'_>
                ) -> () = entry::enter;
                fn lists_writes() -> bool = hwvirt::lists_writes;
                fn report_writes(second: bool, run: &mut $crate::vcpu::run::Running<'_>) -> () = entry::report_writes;
                fn handle_exit(
                    second: bool,
                    run: &mut $crate::vcpu::run::Running<'_>
                ) -> $crate::vcpu::run::Next = exit::handle;
                fn vcpus_with_devices(cpus: u32) -> u32 = platform::vcpus_with_devices;
                fn take_devices(vcpus: u32) -> Result<alloc::vec::Vec<$crate::frames::Frames>, alloc::string::String> =
                    platform::take_devices;
                fn tool_port(vm: &$crate::vm::Vm) -> Option<&$crate::vm::tool_port::ToolPort> = platform::tool_port;
                fn tool_port_interrupt(vm: &$crate::vm::Vm, asserted: bool) -> () = platform::tool_port_interrupt;
                fn can_save() -> Result<(), &'static str> = saved::can_save;
                fn save_shared(vm: &$crate::vm::Vm, tick: u64) -> alloc::vec::Vec<u8> = saved::save_shared;
                fn restore_shared(
                    vm: &$crate::vm::Vm,
                    state: &[u8],
                    tick: u64
                ) -> Result<(), alloc::string::String> = saved::restore_shared;
                fn save_vcpu(
                    vm: &$crate::vm::Vm,
                    index: u32,
                    owner: &mut $crate::vcpu::Owner,
                    tick: u64
                ) -> alloc::vec::Vec<u8> = saved::save_vcpu;
                fn restore_vcpu(
                    vm: &$crate::vm::Vm,
                    index: u32,
                    owner: &mut $crate::vcpu::Owner,
                    state: &[u8],
                    tick: u64
                ) -> Result<(), alloc::string::String> = saved::restore_vcpu;
                fn time_stood_still(vm: &$crate::vm::Vm, from: u64, to: u64) -> () = saved::time_stood_still;
                fn has_orphans(vm: &$crate::vm::Vm) -> bool = platform::has_orphans;
                fn end_orphans(vm: &$crate::vm::Vm) -> () = platform::end_orphans;
                fn renew_statistics(vm: &$crate::vm::Vm) -> () = platform::renew_statistics;
                fn fault_of_child(
                    run: &mut $crate::vcpu::run::Running<'_>,
                    gpa: addr::Gpa,
                    needs: stage2::Access
                ) -> $crate::vm::fault::Resolved = platform::fault_of_child;
                fn post_message(parent: &$crate::vm::Vm, vcpu: u32, sender: u32) -> () = delivery::post_message;
            }

            #[inline]
            fn tags() -> (u32, bool) {
                let features = hwvirt::features();
                (features.tags, features.can_flush_one_tag)
            }
        }
    };
}
pub(super) use implement;

/// Functions of the contract that are functions of a module.
macro_rules! forward {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty = $function:path;)*) => {$(
        #[inline(always)]
        fn $name($($argument: $kind),*) -> $result {
            $function($($argument),*)
        }
    )*};
}
pub(super) use forward;
