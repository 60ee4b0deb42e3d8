//! Steps against speculative execution: which ones this machine needs (`crates/mitigations`), and their code.
//!
//! Each back end has its world switch twice: plain, and with the steps. The choice is made before the guest runs, so no
//! branch behind the exit can be led past the steps. In between, a step that this machine does not need is jumped over;
//! a wrong guess there ends at the LFENCE behind the last step, before any return or indirect branch.

#![expect(unsafe_code, reason = "writes MSRs")]

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use addr::Hpa;
use mitigations::{Ignored, Plan, Processor, Reports, Steps};
use sched::Smt;
use spin::Once;
use x86_64::registers::model_specific::Msr;
use x86_defs::msr;

use super::backend::HostContext;
use super::host::percpu::ArchPerCpu;
use super::host::processor;
use crate::arch::weaknesses;
use crate::cpu;
use crate::cpu::scheduler::{self, threads};

/// The plan's steps, for assembly.
pub(super) static STEPS: AtomicU32 = AtomicU32::new(0);
/// SPEC_CTRL while the hypervisor runs, for assembly.
pub(super) static HOST_SPEC_CTRL: AtomicU64 = AtomicU64::new(0);
/// What guests are told.
static TOLD: Once<Reports> = Once::new();
/// vCPUs that were ever made: a new VM may have the tables' root of one that is gone.
static VCPUS_MADE: AtomicU64 = AtomicU64::new(0);

/// Decides what is done on this machine: `auto`, or as the option `mitigations=` says, and nothing for weaknesses that
/// are `ignored`. Tells it.
///
/// An emulated processor speculates nothing. There the steps are off, so that counts of instructions are comparable,
/// unless the option asks for them.
///
/// `selftest`: with `spec-ctrl` registers of speculation count as
/// reported, which Bochs' AMD has without saying so; with `all-steps` an emulated processor takes all steps of entries
/// and exits, so that they can be counted.
pub(super) fn choose(option: Option<&str>, ignored: Ignored, selftest: Option<&str>) {
    /// CPUID leaf 8000_0008, EBX: IBPB, IBRS, STIBP, SSBD.
    const PLANTED: u32 = 1 << 12 | 1 << 14 | 1 << 15 | 1 << 24;
    let reported = |leaf, subleaf| {
        let mut answer = leaf_of(leaf, subleaf);
        if selftest == Some("spec-ctrl") && leaf == 0x8000_0008 {
            answer[1] |= PLANTED;
        }
        answer
    };
    let Some(found) = Processor::read(reported, read_capabilities) else {
        return weaknesses::tell_nothing("a processor of an unknown vendor, nothing is done");
    };
    let smt = threads::chosen();
    let threads_per_core = if smt == Smt::Off { 1 } else { found.threads_per_core };
    let found = Processor { threads_per_core, ..found };
    let plan = Plan::of_but(&found, ignored).with_vms_apart(smt == Smt::Core);
    let plan = match option {
        _ if selftest == Some("all-steps") && processor::is_emulated() => plan.with_steps(Steps::OF_SWITCHES),
        Some("off") => plan.off(),
        None if processor::is_emulated() => {
            return weaknesses::tell_nothing(weaknesses::EMULATED);
        }
        _ => plan,
    };
    STEPS.store(plan.steps.bits(), Ordering::Relaxed);
    HOST_SPEC_CTRL.store(plan.steps.spec_ctrl(), Ordering::Relaxed);
    TOLD.call_once(|| found.reports().for_guests(&plan));
    weaknesses::tell(&plan);
}

fn leaf_of(leaf: u32, subleaf: u32) -> [u32; 4] {
    let found = processor::subleaf(leaf, subleaf);
    [found.eax, found.ebx, found.ecx, found.edx]
}

fn read_capabilities(number: u32) -> u64 {
    // SAFETY: CPUID reports it. Reading it has no effect.
    unsafe { Msr::new(number).read() }
}

/// Steps that a pCPU takes once.
pub(super) fn enable() {
    for (number, bits) in Steps::from_bits_truncate(STEPS.load(Ordering::Relaxed)).at_start() {
        let mut register = Msr::new(number);
        // SAFETY: the plan has a step only if CPUID, or the family, says that its register exists. Reading it has no
        // effect.
        let value = unsafe { register.read() };
        // SAFETY: as above, and so do the bits. They change predictions, and let LFENCE wait.
        unsafe { register.write(value | bits) };
    }
}

/// What guests are told of this processor.
pub(super) fn told() -> Reports {
    TOLD.get().copied().unwrap_or_default()
}

/// Whether exits and entries switch SPEC_CTRL, and not the processor.
#[inline]
pub(super) fn switches_spec_ctrl() -> bool {
    STEPS.load(Ordering::Relaxed) & Steps::SWITCH_SPEC_CTRL.bits() != 0
}

/// Whether stage 2 must not have large pages that a guest can execute.
pub(super) fn code_is_small() -> bool {
    STEPS.load(Ordering::Relaxed) & Steps::SMALL_CODE.bits() != 0
}

/// A vCPU was made.
pub(super) fn vcpu_made() {
    VCPUS_MADE.fetch_add(1, Ordering::Relaxed);
}

/// A vCPU of the VM with these tables comes to this pCPU. If the last one was of another VM, its predictions go.
#[inline]
pub(super) fn arrive(host: &HostContext, root: Hpa) {
    if STEPS.load(Ordering::Relaxed) & Steps::IBPB_BETWEEN_VMS.bits() != 0 {
        change_vm(host, root);
    }
}

#[cold]
#[inline(never)]
fn change_vm(host: &HostContext, root: Hpa) {
    // What another VM did on the core in between may serve this thread.
    let events = VCPUS_MADE.load(Ordering::Relaxed).wrapping_add(scheduler::changes_of_core(cpu::this()));
    if !host.last_vm.is_another(root.0, events) {
        return;
    }
    // The plan has this step only if CPUID reports the register.
    forget(msr::PRED_CMD_IBPB);
}

/// Writes PRED_CMD, which exists and has these bits.
#[inline(never)]
pub(super) fn forget(command: u64) {
    // SAFETY: as the caller says. The write forgets predictions.
    unsafe { Msr::new(msr::PRED_CMD).write(command) };
}

/// Where the pCPU's block has SPEC_CTRL of the vCPU that is there.
pub(super) const GUEST_SPEC_CTRL: usize = ArchPerCpu::OFFSET_SPEC_CTRL;
/// And whether the guest writes it without an exit.
pub(super) const OWNS_SPEC_CTRL: usize = ArchPerCpu::OFFSET_OWNS_SPEC_CTRL;

/// Before an entry, with the guest's registers not loaded yet: changes RAX, RCX, RDX and flags. For `naked_asm!`, which
/// also needs the operands of [`guarded!`].
macro_rules! before_entry {
    () => {
        "test dword ptr [rip + {steps}], {switch_spec_ctrl}
         jz 801f
         mov rax, gs:[{guest_spec_ctrl}]
         cmp rax, [rip + {host_spec_ctrl}]
         je 801f
         mov rdx, rax
         shr rdx, 32
         mov ecx, {spec_ctrl}
         wrmsr
         801:
         test dword ptr [rip + {steps}], {flush_l1d}
         jz 802f
         mov ecx, {flush_cmd}
         mov eax, 1
         xor edx, edx
         wrmsr
         802:
         test dword ptr [rip + {steps}], {clear_buffers}
         jz 803f
         push 0
         mov word ptr [rsp], ds
         verw word ptr [rsp]
         add rsp, 8
         803:"
    };
}
pub(super) use before_entry;

/// Behind an exit, once the guest's registers are stored: clears all of them, and takes the steps. All general
/// registers but RSP change.
macro_rules! behind_exit {
    () => {
        "xor ebx, ebx
         xor esi, esi
         xor edi, edi
         xor ebp, ebp
         xor r8d, r8d
         xor r9d, r9d
         xor r10d, r10d
         xor r11d, r11d
         xor r12d, r12d
         xor r13d, r13d
         xor r14d, r14d
         xor r15d, r15d
         test dword ptr [rip + {steps}], {ibpb_at_exit}
         jz 811f
         mov ecx, {pred_cmd}
         mov eax, 1
         xor edx, edx
         wrmsr
         811:
         test dword ptr [rip + {steps}], {switch_spec_ctrl}
         jz 8122f
         cmp qword ptr gs:[{owns_spec_ctrl}], 0
         je 8121f
         mov ecx, {spec_ctrl}
         rdmsr
         shl rdx, 32
         or rax, rdx
         mov gs:[{guest_spec_ctrl}], rax
         8121:
         mov rax, gs:[{guest_spec_ctrl}]
         cmp rax, [rip + {host_spec_ctrl}]
         jne 8123f
         8122:
         test dword ptr [rip + {steps}], {ibrs_at_exit}
         jz 812f
         8123:
         mov rax, [rip + {host_spec_ctrl}]
         mov rdx, rax
         shr rdx, 32
         mov ecx, {spec_ctrl}
         wrmsr
         812:
         test dword ptr [rip + {steps}], {one_call}
         jz 813f
         call 8131f
         int3
         8131:
         add rsp, 8
         813:
         test dword ptr [rip + {steps}], {fill_return_stack}
         jz 814f
         mov ecx, 16
         8141:
         call 8142f
         int3
         8142:
         call 8143f
         int3
         8143:
         add rsp, 16
         dec ecx
         jnz 8141b
         814:
         test dword ptr [rip + {steps}], {clear_history}
         jz 815f
         mov ecx, 10
         8151:
         .rept 8
         jmp 8152f
         8152:
         .endr
         dec ecx
         jnz 8151b
         815:
         xor eax, eax
         xor ecx, ecx
         xor edx, edx
         lfence"
    };
}
pub(super) use behind_exit;

/// Makes a world switch with the steps, by a macro that makes one from what comes before the entry, what comes behind
/// the exit, and further operands.
macro_rules! guarded {
    ($world_switch:ident, $name:ident) => {
        $world_switch! {
            $name,
            $crate::arch::x86_64::speculation::before_entry!(),
            $crate::arch::x86_64::speculation::behind_exit!(),
            steps = sym $crate::arch::x86_64::speculation::STEPS,
            host_spec_ctrl = sym $crate::arch::x86_64::speculation::HOST_SPEC_CTRL,
            guest_spec_ctrl = const $crate::arch::x86_64::speculation::GUEST_SPEC_CTRL,
            owns_spec_ctrl = const $crate::arch::x86_64::speculation::OWNS_SPEC_CTRL,
            switch_spec_ctrl = const mitigations::Steps::SWITCH_SPEC_CTRL.bits(),
            ibrs_at_exit = const mitigations::Steps::IBRS_AT_EXIT.bits(),
            flush_l1d = const mitigations::Steps::FLUSH_L1D.bits(),
            clear_buffers = const mitigations::Steps::CLEAR_BUFFERS.bits(),
            ibpb_at_exit = const mitigations::Steps::IBPB_AT_EXIT.bits(),
            one_call = const mitigations::Steps::ONE_CALL.bits(),
            fill_return_stack = const mitigations::Steps::FILL_RETURN_STACK.bits(),
            clear_history = const mitigations::Steps::CLEAR_HISTORY.bits(),
            spec_ctrl = const x86_defs::msr::SPEC_CTRL,
            pred_cmd = const x86_defs::msr::PRED_CMD,
            flush_cmd = const x86_defs::msr::FLUSH_CMD,
        }
    };
}
pub(super) use guarded;

/// Whether the world switch with the steps is in use.
#[inline(always)]
pub(super) fn is_guarded() -> bool {
    STEPS.load(Ordering::Relaxed) != 0
}
