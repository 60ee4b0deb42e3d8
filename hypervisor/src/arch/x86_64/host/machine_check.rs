//! Machine checks: errors that the hardware found in itself (APM vol. 2, chapter 9).
//!
//! Every pCPU has banks of error registers. A corrected error is only recorded there, and logged when the pCPU starts.
//! An uncorrected one raises #MC. In the hypervisor this is vector 18, on a stack of its own. In a guest it is an exit:
//! the intercept replaces the exception, which is not pending any more (APM vol. 2, 15.12.15).
//! [`x86_defs::machine_check`] decides who may continue. The banks are always logged and cleared, and MCIP after them,
//! because the next machine check would be a shutdown while it is set.
//!
//! A guest without CR4.MCE gets a shutdown instead of #MC. This code checks such exits as well.

#![expect(unsafe_code, reason = "error registers are MSRs, and CR4 makes their exception one")]

use core::arch::naked_asm;

use abi::control::StopReason;
use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_64::registers::model_specific::Msr;
use x86_defs::cpuid::{leaf_1_edx, leaf_8000_0007_ebx};
use x86_defs::machine_check::{GlobalStatus, Interrupted, Report, Status, Verdict, explains_shutdown, verdict};
use x86_defs::msr;

use super::irq;
use super::processor::leaf;
use crate::arch::x86_64::guest::vcpu::stop;
use crate::panic;
use crate::vcpu::run::{Next, Running};

/// Enables this pCPU's error reports. Logs errors left in its banks, for example the one that restarted the machine.
pub(super) fn enable() {
    let Some(banks) = Banks::of_this_cpu() else { return };
    for report in banks.reports() {
        log::warn!("machine check from before the start: {report}");
    }
    banks.clear();
    banks.allow_reports();
    // SAFETY: the processor has machine checks, and this pCPU's interrupt table and stack for them.
    unsafe { Cr4::update(|cr4| cr4.insert(Cr4Flags::MACHINE_CHECK_EXCEPTION)) };
}

/// A machine check came while the guest ran, and its intercept ended the run.
#[cold]
pub(in crate::arch::x86_64) fn intercepted(run: &mut Running<'_>) -> Next {
    let Some(banks) = Banks::of_this_cpu() else {
        return stop(run, StopReason::HardwareError, "met a machine check on a processor without error registers");
    };
    let decided = banks.judge(Interrupted::Guest);
    for report in banks.reports() {
        log::error!("{} vCPU {}: machine check: {report}", run.vm.name(), run.index);
    }
    match decided {
        Verdict::GoesOn => {}
        Verdict::EndsVm => {
            banks.clear();
            return stop(run, StopReason::HardwareError, "met a machine check");
        }
        Verdict::EndsHost(why) => panic::hardware_error(
            format_args!("machine check in {} vCPU {}: {why}{}", run.vm.name(), run.index, All(&banks)),
            irq::stack_pointer(),
        ),
    }
    banks.clear();
    Next::Resume
}

/// The guest has shut down. Handles it if a machine check did that.
#[cold]
pub(in crate::arch::x86_64) fn explain_shutdown(run: &mut Running<'_>) -> Option<Next> {
    let banks = Banks::of_this_cpu()?;
    explains_shutdown(banks.statuses()).then(|| intercepted(run))
}

/// Entry of a machine check in the hypervisor.
#[unsafe(naked)]
pub(super) extern "C" fn entry() {
    naked_asm!(
        "push rax", "push rcx", "push rdx", "push rsi", "push rdi", "push r8", "push r9", "push r10", "push r11",
        "cld",
        // The processor pushed RIP and RSP before the nine registers.
        "mov rdi, [rsp + 72]",
        "mov rsi, [rsp + 96]",
        "call {handle}",
        "pop r11", "pop r10", "pop r9", "pop r8", "pop rdi", "pop rsi", "pop rdx", "pop rcx", "pop rax",
        "iretq",
        handle = sym handle,
    )
}

/// A machine check in the hypervisor. The interrupted code may hold the log's lock, so nothing is logged but the end.
extern "sysv64" fn handle(rip: u64, stack: u64) {
    let Some(banks) = Banks::of_this_cpu() else { return };
    match banks.judge(Interrupted::Host) {
        Verdict::GoesOn | Verdict::EndsVm => banks.clear(),
        Verdict::EndsHost(why) => {
            panic::hardware_error(format_args!("machine check at rip {rip:#x}: {why}{}", All(&banks)), stack)
        }
    }
}

/// All errors, a line each.
struct All<'a>(&'a Banks);

impl core::fmt::Display for All<'_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        self.0.reports().try_for_each(|report| write!(f, "\n    {report}"))
    }
}

/// The error registers of a pCPU.
#[derive(Clone, Copy)]
struct Banks {
    count: u8,
    /// Position of CTL, STATUS, ADDR and MISC of bank 0, and the distance to the next bank.
    first: u32,
    stride: u32,
    is_scalable: bool,
    overflow_recovers: bool,
}

/// Places of registers from a bank's CTL on; the last two are scalable banks' only.
const STATUS: u32 = 1;
const ADDRESS: u32 = 2;
const MISC: u32 = 3;
const IDENTITY: u32 = 5;
const SYNDROME: u32 = 6;

/// MCG_CAP: MCG_CTL is there.
const HAS_GLOBAL_CONTROL: u64 = 1 << 8;

impl Banks {
    fn of_this_cpu() -> Option<Self> {
        const NEEDED: u32 = leaf_1_edx::MCE | leaf_1_edx::MCA;
        if leaf(1).edx & NEEDED != NEEDED {
            return None;
        }
        let [count, ..] = read(msr::MCG_CAP).to_le_bytes();
        let features = leaf(0x8000_0007).ebx;
        let is_scalable = features & leaf_8000_0007_ebx::SCALABLE_MCA != 0;
        let (first, stride) = if is_scalable { (msr::MCA_CTL_0, 16) } else { (msr::MC0_CTL, 4) };
        let overflow_recovers = features & leaf_8000_0007_ebx::MCA_OVERFLOW_RECOV != 0;
        Some(Self { count, first, stride, is_scalable, overflow_recovers })
    }

    fn register(&self, bank: u8, place: u32) -> u32 {
        self.first + u32::from(bank) * self.stride + place
    }

    fn statuses(&self) -> impl Iterator<Item = Status> {
        (0..self.count).map(|bank| Status(read(self.register(bank, STATUS))))
    }

    fn judge(&self, interrupted: Interrupted) -> Verdict {
        verdict(GlobalStatus(read(msr::MCG_STATUS)), self.statuses(), interrupted, self.overflow_recovers)
    }

    /// Content of the banks. Invalid registers are not read: some processors raise #GP.
    fn reports(&self) -> impl Iterator<Item = Report> {
        (0..self.count).zip(self.statuses()).filter(|(_, status)| status.is_valid()).map(|(bank, status)| {
            let if_valid = |bit, place| if status.has(bit) { read(self.register(bank, place)) } else { 0 };
            Report {
                bank,
                status,
                address: if_valid(Status::ADDRV, ADDRESS),
                misc: if_valid(Status::MISCV, MISC),
                scalable: self
                    .is_scalable
                    .then(|| (read(self.register(bank, IDENTITY)), read(self.register(bank, SYNDROME)))),
            }
        })
    }

    /// Forgets all errors, and then that one is being handled.
    fn clear(&self) {
        for bank in 0..self.count {
            write(self.register(bank, STATUS), 0);
        }
        write(msr::MCG_STATUS, 0);
    }

    /// Report all kinds of errors. Firmware masks those that are not errors (APM vol. 2, 9.4).
    fn allow_reports(&self) {
        if read(msr::MCG_CAP) & HAS_GLOBAL_CONTROL != 0 {
            write(msr::MCG_CTL, u64::MAX);
        }
        for bank in 0..self.count {
            write(self.register(bank, 0), u64::MAX);
        }
    }
}

/// Reads one of the registers that [`Banks`] names.
fn read(number: u32) -> u64 {
    // SAFETY: CPUID reports machine checks, and MCG_CAP the number of banks; reading has no effect.
    unsafe { Msr::new(number).read() }
}

/// Writes one of them.
fn write(number: u32, value: u64) {
    // SAFETY: as for `read`. Control registers accept any value, and status registers zero (APM vol. 2, 9.3.2.1 and
    // 9.3.2.3).
    unsafe { Msr::new(number).write(value) };
}
