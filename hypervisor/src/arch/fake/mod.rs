//! A simulated machine: the core's unit tests run on it, on any computer.
//!
//! Its pCPUs are threads, its RAM is the process's, and its TLBs are `hw_model`'s, which keep every entry until it is
//! flushed. It resembles SVM: each vCPU has its own tag, a guest flushes other vCPUs by hypercall, the hardware walks
//! nested pages, and interrupts are deferred from the test for pending work until the guest runs. A vCPU executes a
//! list of [`Op`](program::Op)s.
//!
//! [`run`](machine::run) creates such a machine and turns it off again. In [`interleave::explore`] a seed decides which
//! pCPU takes the next step; elsewhere the pCPUs are threads of the operating system.

#![expect(unsafe_code, reason = "guest memory and tables are raw memory, as on any machine")]

pub(crate) mod delivery;
pub(crate) mod exit;
pub(crate) mod iommu;
pub(crate) mod machine;
pub(crate) mod program;
pub(crate) mod registers;
pub(crate) mod saved;
pub(crate) mod tags;
pub(crate) mod vcpu;

pub(crate) use machine::PerHost;
pub(crate) use registers as translate;
pub(crate) use registers as vp_state;

/// This machine.
pub(crate) struct Machine;

super::contract::implement!(Machine);

/// The core of a pCPU: two threads to a core, and the first pCPU, which runs no vCPUs, has one of its own.
const fn core_of_number(number: usize) -> usize {
    number.div_ceil(2)
}

/// The block of a pCPU.
pub(crate) mod percpu {
    use vcpu_layout::lay_out;

    use super::machine;
    use crate::cpu::PerCpu;
    use crate::layout::OwnPages;

    /// A pCPU's own data besides the core's: nothing.
    #[lay_out]
    pub(crate) struct ArchPerCpu {
        #[layout(frozen)]
        nothing: u64,
    }

    impl ArchPerCpu {
        pub(crate) fn new() -> Self {
            Self::lay_out(ArchPerCpuFields { nothing: 0 })
        }

        pub(crate) fn own_pages(&self) -> impl Iterator<Item = OwnPages> {
            core::iter::empty()
        }
    }

    pub(crate) fn this() -> &'static PerCpu {
        try_this().expect("only pCPUs come here")
    }

    pub(crate) const fn core_of(cpu: &PerCpu) -> u64 {
        super::core_of_number(cpu.id.index()) as u64
    }

    pub(crate) fn try_this() -> Option<&'static PerCpu> {
        machine::try_this()
    }
}

/// The direct map: the identity.
pub(crate) mod paging {
    use addr::{Hpa, Hva};

    pub(crate) const fn direct_map(hpa: Hpa) -> Hva {
        Hva(hpa.0)
    }

    pub(crate) const fn direct_map_inverse(hva: Hva) -> Hpa {
        Hpa(hva.0)
    }

    pub(crate) const fn is_mapped(_: Hva) -> bool {
        false
    }
}

/// Exceptions: none.
pub(crate) mod irq {
    use super::machine::machine;

    pub(crate) fn wait() {
        machine().sleep();
    }

    pub(crate) fn mask() {}

    pub(crate) fn stack_pointer() -> u64 {
        0
    }

    pub(crate) fn follows_call(_: u64) -> bool {
        false
    }

    pub(crate) fn read_null() -> u64 {
        panic!("a null pointer was read");
    }
}

/// Kicks and timers.
pub(crate) mod interrupts {
    use sched::CpuId;
    use shootdown::CpuSet;

    use super::machine::machine;
    use crate::layout::OwnPages;

    pub(crate) fn kick(cpu: CpuId) {
        machine().kick(cpu);
    }

    pub(crate) fn kick_all(cpus: CpuSet) {
        cpus.iter().for_each(|cpu| kick(CpuId(cpu)));
    }

    pub(crate) fn arm_timer(deadline: u64) {
        machine().arm(deadline);
    }

    pub(crate) fn stop_others() {}

    pub(crate) fn own_page() -> Option<OwnPages> {
        None
    }
}

/// The clock: a nanosecond a tick.
pub(crate) mod clock {
    use super::machine::{HZ, machine};

    pub(crate) fn now() -> u64 {
        machine().pass(1)
    }

    pub(crate) const fn hz() -> u64 {
        HZ
    }

    pub(crate) fn nanos() -> u64 {
        now()
    }

    pub(crate) const fn ticks_to_nanos(ticks: u64) -> u64 {
        ticks
    }

    pub(crate) const fn nanos_to_ticks(nanos: u64) -> u64 {
        nanos
    }
}

/// The log's UART: not there.
pub(crate) mod serial {
    use crate::arch::HostConsole;

    pub(crate) struct Serial;

    impl HostConsole for Serial {
        const CLOSED: Self = Self;

        fn open() -> Self {
            Self
        }

        fn send(&mut self, _: &[u8]) {}

        fn flush(&mut self) {}

        fn receive(&mut self, _: &mut [u8]) -> usize {
            0
        }
    }
}

/// The power switch: the test fails.
pub(crate) mod power {
    pub(crate) fn restart() -> ! {
        panic!("the host has restarted its machine");
    }

    pub(crate) fn exit(code: u8) -> ! {
        panic!("the host has turned its machine off, with code {code}");
    }

    pub(crate) fn end_check(code: u8) -> ! {
        exit(code)
    }

    pub(crate) fn stop_this_cpu() -> ! {
        panic!("a pCPU has stopped");
    }
}

/// Features of the machine for guests.
pub(crate) mod hwvirt {
    use alloc::string::String;
    use alloc::vec::Vec;

    use crate::check::Finding;

    pub(crate) struct HostContext;

    pub(crate) struct Features {
        pub(crate) tags: u32,
        pub(crate) can_flush_one_tag: bool,
    }

    pub(crate) const SLICES_PER_SECOND: u64 = 200;

    pub(crate) fn check() -> Result<(), &'static str> {
        Ok(())
    }

    pub(crate) fn findings() -> Vec<Finding> {
        Vec::new()
    }

    pub(crate) fn features() -> Features {
        Features { tags: 7, can_flush_one_tag: true }
    }

    pub(crate) const fn name() -> &'static str {
        "none"
    }

    pub(crate) fn describe() -> String {
        String::from("no machine at all")
    }

    pub(crate) fn enable() -> HostContext {
        HostContext
    }

    /// There is one back end.
    pub(crate) const fn uses_second_back_end() -> bool {
        false
    }

    pub(crate) fn lists_writes() -> bool {
        super::machine::machine().hardware().lists_writes
    }

    /// The first pCPU runs the test's script.
    pub(crate) const fn spares_first_cpu() -> bool {
        true
    }
}

/// The world switch: none.
pub(crate) mod entry {
    use super::hwvirt::HostContext;
    use super::tags::CpuTags;
    use super::vcpu::ArchVcpu;
    use crate::arch::{Arch as _, Machine};
    use crate::vcpu::Tally;
    use crate::vcpu::run::Running;
    use crate::vm::address_space::AllTlbs;
    use addr::Gpa;

    pub(crate) fn enter(
        _: bool,
        vcpu: &mut ArchVcpu,
        _: &HostContext,
        tags: &mut CpuTags,
        epoch: u64,
        tally: Tally<'_>,
    ) {
        vcpu.enter(tags, epoch, tally);
    }

    pub(crate) fn report_writes(_: bool, run: &mut Running<'_>) {
        let pages = run.owner.arch.take_list();
        if pages.is_empty() || !Machine::lists_writes() {
            return;
        }
        let (tlbs, walking) = (AllTlbs::of(run.vm), run.vm.memory.announce(run.cpu.id));
        let walk = run.vm.memory.walk(&tlbs, &walking);
        pages.into_iter().for_each(|page| walk.report(Gpa(page)));
    }
}

/// Interrupts are held off in the hypervisor, always: a kick waits until the guest runs, or the pCPU sleeps.
pub(crate) mod irq_mask {
    use super::machine::machine;

    pub(crate) fn defer() {}

    pub(crate) fn take() {
        machine().take_interrupts();
    }

    pub(crate) fn take_anywhere() {
        machine().take_interrupts_in_between();
    }

    pub(crate) fn stop_deferring() {}
}

/// Shared devices of a VM's vCPUs: none.
pub(crate) mod platform {
    use abi::control::Line;
    use abi::payload::{PciFunction, Role, VmConfig};
    use addr::{Gpa, GpaRange, Hpa};
    use alloc::sync::Arc;
    use alloc::vec::Vec;
    use hyperv_defs::property::{ProcessorFeatures, SyntheticFeatures, XsaveFeatures};
    use hyperv_defs::{Answer, Call, Code, Control, Offered, PartitionId, Refusal, check};
    use partition::{Entry, Features, Host, PageUse};
    use sched::Pending;
    use stage2::Access;

    use crate::arch::GivenFunctions;
    use crate::arch::hypercall::{self, Children, Ended};
    pub(crate) use crate::device::uart::Uart;
    use crate::frames::Frames;
    use crate::sync::{AtomicU64, relax};
    use crate::vcpu::run::Running;
    use crate::vcpu::unannounced::Unannounced;
    use crate::vm::Vm;
    use crate::vm::fault::Resolved;
    use crate::vm::memory::Memory;
    use crate::vm::tool_port::ToolPort;

    /// What children can have.
    const HOST: Host = Host {
        features: ProcessorFeatures::SSE3,
        xsave_features: XsaveFeatures::XSAVE,
        xsave_states: 7,
        max_xsave_bytes: 832,
        synthetic_features: SyntheticFeatures::empty(),
        physical_address_width: 48,
        tsc_hertz: 1_000_000_000,
        vps: 4,
        pages_per_vp: 1,
    };

    pub(crate) struct Platform {
        /// The VMs that it has created, if it may.
        pub(in crate::arch) children: Option<Children>,
        /// For programs in a parent.
        tool_port: Option<ToolPort>,
        /// Added to its reference time.
        pub(in crate::arch) time_offset: AtomicU64,
        /// What its devices have sent to many vCPUs.
        pub(super) unannounced: Unannounced,
    }

    impl Platform {
        pub(crate) fn new(config: &VmConfig, _: Option<&Features>, memory: &Memory) -> Self {
            let ram = memory.backing.regions.iter().copied();
            let children = || Children::new(HOST, config.vcpus, ram).expect("there is memory");
            let children = (config.role == Role::Parent).then(children);
            let tool_port = (config.role == Role::Parent).then(ToolPort::new);
            let unannounced = Unannounced::default();
            Self { children, tool_port, time_offset: AtomicU64::new(0), unannounced }
        }
    }

    /// No VM has the machine's devices here.
    pub(crate) fn vcpus_with_devices(cpus: u32) -> u32 {
        cpus
    }

    /// Says so.
    pub(crate) fn take_devices(_: u32) -> Result<Vec<Frames>, String> {
        Err(String::from("the fake machine has no devices"))
    }

    /// No VM has PCI functions here.
    #[derive(Debug)]
    pub(crate) enum Given {}

    impl GivenFunctions for Given {
        fn take(_: &[PciFunction]) -> Result<Self, String> {
            Err(String::from("the fake machine has no PCI functions"))
        }

        fn is_ready(&mut self) -> Result<bool, String> {
            match *self {}
        }

        fn registers(&self) -> impl Iterator<Item = (GpaRange, Hpa)> {
            core::iter::empty()
        }

        fn start(&self, _: &Arc<Vm>) {
            match *self {}
        }
    }

    /// A parent's call, until it has ended: as its first vCPU makes it.
    pub(crate) fn hypercall(vm: &Vm, control: Control, input: &[u8], output: Gpa) -> Answer {
        let mut control = control;
        loop {
            match begin_hypercall(vm, control, input, output) {
                Ok(answer) => return answer,
                Err(next) => control = next,
            }
            relax();
        }
    }

    /// A parent's call until it ends, or until the parent must call again, with another control word.
    pub(crate) fn begin_hypercall(vm: &Vm, control: Control, input: &[u8], output: Gpa) -> Result<Answer, Control> {
        let checked = match check(control, Offered::all()) {
            Ok(checked) => checked,
            Err(Refusal::Status(status)) => return Ok(status.into()),
            Err(Refusal::InvalidOpcode) => panic!("everything is offered"),
        };
        let children = vm.platform().children.as_ref();
        let ended = match checked.parse(input) {
            Ok(Call::Partition(request)) => hypercall::perform_of_parent(vm, 0, &checked, &request, children, output),
            Ok(other) => panic!("{other:?}"),
            Err(status) => Err(status),
        };
        match ended {
            Ok(Ended::With(answer) | Ended::Yielding(answer)) => Ok(answer),
            Ok(Ended::NotYet(next)) => Err(next),
            Ok(other) => panic!("{other:?}"),
            Err(status) => Ok(checked.failure(status)),
        }
    }

    /// Creates the first vCPU of a parent's only child. Returns the status.
    pub(crate) fn create_vp(vm: &Vm) -> u16 {
        let id = vm.platform().children.as_ref().and_then(Children::first).expect("there is a child");
        let input: Vec<u8> = [id.0, 0, !0, 0, 0].into_iter().flat_map(u64::to_le_bytes).collect();
        hypercall(vm, Control::new(Code::CreateVp), &input, Gpa(0)).status()
    }

    /// The VM of a parent's child.
    pub(crate) fn child_of(parent: &Vm, id: PartitionId) -> Option<Arc<Vm>> {
        parent.platform().children.as_ref()?.vm(id).ok()
    }

    /// Ends all children of a parent, as its own end does.
    pub(crate) fn end_all(parent: &Vm) {
        let Some(children) = parent.platform().children.as_ref() else { return };
        while children.count() != 0 {
            children.end_all(parent);
            relax();
        }
    }

    /// Pages of a parent that are deposited, or used by children.
    pub(crate) fn pages_in_use(parent: &Vm) -> Vec<(u64, PageUse)> {
        parent.platform().children.as_ref().map_or(Vec::new(), Children::pages_in_use)
    }

    /// What a parent has said about a page of its child.
    pub(crate) fn described(parent: &Vm, id: PartitionId, page: u64) -> Option<Entry> {
        parent.platform().children.as_ref()?.described(&parent.memory, id, page)
    }

    pub(crate) fn fault_of_child(run: &mut Running<'_>, gpa: Gpa, needs: Access) -> Resolved {
        let vm = run.vm;
        let parent = vm.as_child().map(|child| child.parent.platform());
        match parent.and_then(|platform| platform.children.as_ref()) {
            Some(children) => hypercall::fault(run, children, gpa, needs),
            None => Resolved::Device,
        }
    }

    /// No VM has children by itself here; tests make some.
    pub(crate) fn has_orphans(_: &Vm) -> bool {
        false
    }

    /// There are none.
    pub(crate) fn end_orphans(_: &Vm) {}

    pub(crate) fn renew_statistics(vm: &Vm) {
        if let Some(children) = &vm.platform().children {
            children.renew_statistics(vm);
        }
    }

    pub(crate) fn tool_port(vm: &Vm) -> Option<&ToolPort> {
        vm.platform().tool_port.as_ref()
    }

    /// Its driver is the test's script, which polls.
    pub(crate) fn tool_port_interrupt(_: &Vm, _: bool) {}

    pub(crate) fn serial_interrupt(vm: &Vm, _: Line, asserted: bool) {
        if asserted {
            vm.vcpus()[0].posted().interrupt();
            vm.post(0, Pending::INTERRUPT);
        }
    }
}

/// Memory from address 0 on, with nothing in it.
pub(crate) mod loader {
    use addr::{Gpa, GpaRange};

    use crate::vm::memory::Memory;
    use crate::vm::spec::Spec;

    pub(crate) struct KernelEntry;

    pub(crate) fn ram_layout(bytes: u64) -> impl Iterator<Item = GpaRange> {
        GpaRange::new(Gpa(0), bytes).into_iter()
    }

    pub(crate) fn load(_: &Spec<'_>, _: &mut Memory) -> Result<KernelEntry, &'static str> {
        Ok(KernelEntry)
    }
}

/// The flush that a change of stage 2 requires: of all vCPUs of the VM, as with SVM.
pub(crate) mod tlb {
    use alloc::string::String;

    use stage2::Stale;

    use super::tags::VmTags;
    use crate::arch::block::Block;
    use crate::vcpu::Vcpu;
    use crate::vm::memory::Memory;

    pub(crate) fn publish() {}

    pub(crate) fn flush(memory: &Memory, _: &VmTags, vcpus: &[Block<Vcpu>], _: Stale) {
        memory.flush_everybody(vcpus);
    }

    pub(crate) fn rules() -> String {
        String::from("rules=nested levels=4")
    }
}

/// Tables of stage 2 are SVM's.
pub(crate) mod format {
    use stage2::{Iommu, Npt};

    pub(crate) type Stage2Format = Npt;

    macro_rules! with_known_format {
        ($tree:expr, |$known:ident| $work:expr) => {{
            let $known = $tree;
            $work
        }};
    }
    pub(crate) use with_known_format;

    pub(crate) const fn stage2_format() -> Npt {
        Npt { one_gib_pages: false, iommu: Iommu::AmdVi }
    }
}

/// Emulated instructions: none.
pub(crate) mod emulate {
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Decoded {}

    impl decode_cache::Decoded for Decoded {
        fn length(&self) -> u8 {
            match *self {}
        }

        fn pack(&self) -> [u64; 4] {
            match *self {}
        }

        fn unpack(_: [u64; 4]) -> Option<Self> {
            None
        }
    }
}

/// The processor's features for guests.
pub(crate) mod cpuid {
    use addr::Gpa;

    pub(crate) const fn physical_addresses_end() -> Gpa {
        Gpa(1 << 46)
    }
}

/// The byte stream to the tool.
pub(crate) mod control_port {
    use super::machine::machine;
    use crate::arch::contract;

    pub(crate) struct ControlPort;

    impl contract::ControlPort for ControlPort {
        fn take() -> Option<Self> {
            Some(Self)
        }

        fn receive(&mut self, into: &mut [u8]) -> usize {
            let wire = &mut machine().hardware().to_host;
            let count = wire.len().min(into.len());
            into.iter_mut().zip(wire.drain(..count)).for_each(|(to, byte)| *to = byte);
            count
        }

        fn transmit(&mut self, from: &[u8]) -> usize {
            machine().hardware().from_host.extend(from);
            from.len()
        }

        fn is_drained(&mut self) -> bool {
            true
        }
    }
}
