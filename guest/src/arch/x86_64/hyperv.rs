//! The Hyper-V interface as a guest kernel uses it: CPUID leaves, MSRs, the hypercall page, the calls (TLFS, chapters 2
//! "Feature and interface discovery" and 3 "Hypercall interface").
//!
//! [`call`] calls through the page, as a kernel does. [`exchange`] is for tests: it loads every register, executes one
//! instruction, and returns every register.

use core::arch::{asm, naked_asm};
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use spin::Once;

use super::attempt::{self, Fault};
use super::boot::MAX_CPUS;
use super::control::{self, cpuid};
use super::hypercall::{foreign_hypercall, hypercall};

/// Synthetic MSRs (TLFS, appendix "Virtual registers").
pub(crate) mod msr {
    pub(crate) const GUEST_OS_ID: u32 = 0x4000_0000;
    pub(crate) const HYPERCALL: u32 = 0x4000_0001;
    pub(crate) const VP_INDEX: u32 = 0x4000_0002;
    pub(crate) const VP_RUNTIME: u32 = 0x4000_0010;
    pub(crate) const TIME_REF_COUNT: u32 = 0x4000_0020;
    pub(crate) const REFERENCE_TSC: u32 = 0x4000_0021;
    pub(crate) const TSC_FREQUENCY: u32 = 0x4000_0022;
    pub(crate) const EOI: u32 = 0x4000_0070;
    pub(crate) const ICR: u32 = 0x4000_0071;
    pub(crate) const TPR: u32 = 0x4000_0072;
    pub(crate) const VP_ASSIST: u32 = 0x4000_0073;
    pub(crate) const SCONTROL: u32 = 0x4000_0080;
    pub(crate) const SVERSION: u32 = 0x4000_0081;
    pub(crate) const SIMP: u32 = 0x4000_0083;
    pub(crate) const EOM: u32 = 0x4000_0084;
    pub(crate) const SIRBP: u32 = 0x4000_0085;
    pub(crate) const SINT0: u32 = 0x4000_0090;
    pub(crate) const STIMER0_CONFIG: u32 = 0x4000_00b0;
    pub(crate) const TSC_INVARIANT: u32 = 0x4000_0118;
}

/// HYPERCALL: the page is there.
pub(crate) const ENABLE: u64 = 1;
/// HYPERCALL: cannot be changed until reset.
pub(crate) const LOCKED: u64 = 2;

/// This guest's identity: open source (bit 63), an operating system of no known vendor, version 1.
pub(crate) const OS_ID: u64 = 1 << 63 | 0x10 << 56 | 1 << 16;

/// The features in the leaves.
#[derive(Clone, Copy)]
pub(crate) struct Features {
    /// Leaf 4000_0003, EAX: which MSRs may be used.
    pub(crate) privileges: u32,
    /// Leaf 4000_0003, EDX.
    pub(crate) features: u32,
    /// Leaf 4000_0004, EAX: operations that the hypervisor recommends to do by hypercall.
    pub(crate) advice: u32,
}

/// Bits of [`Features::privileges`].
const MAY_READ_RUNTIME: u32 = 1 << 0;
const HAS_HYPERCALL_MSRS: u32 = 1 << 5;
const HAS_VP_INDEX: u32 = 1 << 6;
const HAS_FREQUENCIES: u32 = 1 << 11;

impl Features {
    /// Remote flush by hypercall is advised.
    pub(crate) fn flush(&self) -> bool {
        self.advice >> 2 & 1 != 0
    }

    /// Sending interrupts by hypercall is advised.
    pub(crate) fn cluster_ipi(&self) -> bool {
        self.advice >> 10 & 1 != 0
    }

    /// The calls that take sets of more than 64 processors exist.
    pub(crate) fn ex_sets(&self) -> bool {
        self.advice >> 11 & 1 != 0
    }

    /// Calls may take their input in XMM registers.
    pub(crate) fn xmm_input(&self) -> bool {
        self.features >> 4 & 1 != 0
    }

    /// There are a synthetic interrupt controller, synthetic timers, and their direct mode.
    pub(crate) fn timers(&self) -> bool {
        const CONTROLLER_AND_TIMERS: u32 = 1 << 2 | 1 << 3;
        const DIRECT: u32 = 1 << 19;
        self.privileges & CONTROLLER_AND_TIMERS == CONTROLLER_AND_TIMERS && self.features & DIRECT != 0
    }

    /// Lists may be in the extended format.
    pub(crate) fn extended_ranges(&self) -> bool {
        self.features >> 14 & 1 != 0
    }
}

/// The offered features, read once; `None` without those that both Linux and FreeBSD require.
pub(crate) fn features() -> Option<Features> {
    static FEATURES: Once<Option<Features>> = Once::new();
    *FEATURES.call_once(|| {
        if !control::hypervisor()?.is(b"Microsoft Hv") || cpuid(0x4000_0001, 0).eax.to_le_bytes() != *b"Hv#1" {
            return None;
        }
        let last_leaf = cpuid(0x4000_0000, 0).eax;
        let granted = cpuid(0x4000_0003, 0);
        let needed = HAS_HYPERCALL_MSRS | HAS_VP_INDEX;
        if !(0x4000_0005..=0x4000_ffff).contains(&last_leaf) || granted.eax & needed != needed {
            return None;
        }
        Some(Features { privileges: granted.eax, features: granted.edx, advice: cpuid(0x4000_0004, 0).eax })
    })
}

/// A page whose address the hypervisor gets.
#[repr(C, align(4096))]
pub(crate) struct SharedPage([AtomicU64; 512]);

impl SharedPage {
    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; 512])
    }

    /// Its physical address, which is its virtual one.
    pub(crate) fn address(&self) -> u64 {
        &raw const *self as u64
    }

    /// The words of the page.
    pub(crate) fn words(&self) -> &[AtomicU64; 512] {
        &self.0
    }
}

static HYPERCALL_PAGE: SharedPage = SharedPage::new();
static SPARE_PAGE: SharedPage = SharedPage::new();
static INPUT_PAGES: [SharedPage; MAX_CPUS] = [const { SharedPage::new() }; MAX_CPUS];
/// One more than each CPU's VP index; zero while it is not known.
static VP_INDICES: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];

/// The page that calls go through.
pub(crate) fn hypercall_page() -> &'static SharedPage {
    &HYPERCALL_PAGE
}

/// A page for data that a test passes to the hypervisor.
pub(crate) fn spare_page() -> &'static SharedPage {
    &SPARE_PAGE
}

/// The page for the input of CPU `cpu`'s calls.
pub(crate) fn input_page(cpu: usize) -> &'static SharedPage {
    &INPUT_PAGES[cpu]
}

/// Identifies the guest and enables the hypercall page. Returns whether the page is enabled; changes nothing on a
/// machine without the interface.
pub(crate) fn bring_up() -> bool {
    if features().is_none() || attempt::wrmsr(msr::GUEST_OS_ID, OS_ID).is_err() {
        return false;
    }
    let Ok(old) = attempt::rdmsr(msr::HYPERCALL) else { return false };
    if old & (ENABLE | LOCKED) != ENABLE | LOCKED
        && attempt::wrmsr(msr::HYPERCALL, old & 0xffc | HYPERCALL_PAGE.address() | ENABLE).is_err()
    {
        return false;
    }
    is_up()
}

/// Whether the hypercall page is where [`call`] goes.
pub(crate) fn is_up() -> bool {
    attempt::rdmsr(msr::HYPERCALL).is_ok_and(|value| value & ENABLE != 0 && value & !0xfff == HYPERCALL_PAGE.address())
}

/// Reads this CPU's VP index, if it has one.
pub(crate) fn prepare_cpu(cpu: usize) {
    if features().is_none() {
        return;
    }
    let index = attempt::rdmsr(msr::VP_INDEX).ok().and_then(|index| u32::try_from(index).ok());
    VP_INDICES[cpu].store(index.map_or(0, |index| index.saturating_add(1)), Ordering::Relaxed);
}

/// VP index of CPU `cpu`.
pub(crate) fn vp_index(cpu: usize) -> Option<usize> {
    VP_INDICES.get(cpu)?.load(Ordering::Relaxed).checked_sub(1).map(|index| index as usize)
}

/// How long this CPU's vCPU has run, in units of 100 ns.
pub(crate) fn runtime() -> Option<u64> {
    if features()?.privileges & MAY_READ_RUNTIME == 0 {
        return None;
    }
    attempt::rdmsr(msr::VP_RUNTIME).ok()
}

/// The TSC's frequency in Hz, as the hypervisor gives it.
pub(crate) fn clock_hz() -> Option<u64> {
    let features = features()?;
    if features.privileges & HAS_FREQUENCIES == 0 || features.features >> 8 & 1 == 0 {
        return None;
    }
    attempt::rdmsr(msr::TSC_FREQUENCY).ok()
}

/// A hypercall, through the page. Only while [`is_up`].
pub(crate) fn call(control: u64, input: u64, output: u64) -> u64 {
    let result;
    // SAFETY: the page holds a hypercall and RET. The call reads the input, and changes RAX and RCX; the other
    // registers that a kernel gives up at a call are given up here too.
    unsafe {
        asm!(
            "call {page}",
            page = in(reg) HYPERCALL_PAGE.address(),
            inout("rcx") control => _, inout("rdx") input => _, inout("r8") output => _,
            out("rax") result, out("r9") _, out("r10") _, out("r11") _,
        );
    }
    result
}

/// Places of registers in [`Registers::general`].
pub(crate) const RAX: usize = 0;
pub(crate) const RCX: usize = 1;
pub(crate) const RDX: usize = 2;
pub(crate) const R8: usize = 7;
const R11: usize = 10;

/// All registers that a hypercall could change, but RSP: RAX, RCX, RDX, RBX, RBP, RSI, RDI, R8 to R15, and XMM0 to 5.
#[repr(C)]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Registers {
    /// General registers.
    pub(crate) general: [u64; 15],
    /// RFLAGS.
    pub(crate) flags: u64,
    /// XMM0 to 5, low half first.
    pub(crate) vectors: [[u64; 2]; 6],
}

impl Registers {
    /// A different value in every register; all status flags set. R11 is zero, as [`attempt`] wants it.
    pub(crate) fn pattern() -> Self {
        let mut registers = Self {
            general: core::array::from_fn(|at| 0x0101_0101_0101_0101 * (at as u64 + 1)),
            flags: 0x8d7,
            vectors: core::array::from_fn(|at| [0x1010_2020_3030_4000 + at as u64, 0x5050_6060_7070_8000 + at as u64]),
        };
        registers.general[R11] = 0;
        registers
    }

    /// A pattern with a call in it.
    pub(crate) fn call(control: u64, input: u64, output: u64) -> Self {
        let mut registers = Self::pattern();
        registers.general[RCX] = control;
        registers.general[RDX] = input;
        registers.general[R8] = output;
        registers
    }
}

/// An instruction that asks the hypervisor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Instruction {
    /// That of the processor: VMMCALL on AMD's, VMCALL on Intel's.
    Own,
    /// The other one.
    Foreign,
}

/// Executes `instruction` with `before` in the registers, interrupts off, and returns the registers afterwards.
pub(crate) fn exchange(instruction: Instruction, before: &Registers) -> Result<Registers, Fault> {
    let mut after = before.clone();
    let exchange = match instruction {
        Instruction::Own => exchange_own,
        Instruction::Foreign => exchange_foreign,
    };
    // SAFETY: reads and writes the two blocks, and preserves the registers that the calling convention preserves. The
    // caller wants the effect of the hypercall.
    unsafe { exchange(before, &mut after) };
    Fault::decode(after.general[R11])?;
    Ok(after)
}

macro_rules! exchange {
    ($name:ident, $instruction:expr) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name(before: &Registers, after: &mut Registers) {
            naked_asm!(
                "pushfq",
                "cli",
                "push rbx",
                "push rbp",
                "push r12",
                "push r13",
                "push r14",
                "push r15",
                "push rsi",
                ".irp i, 0,1,2,3,4,5",
                "movdqu xmm\\i, [rdi + 128 + 16*\\i]",
                ".endr",
                "push qword ptr [rdi + 120]",
                "popfq",
                "mov rax, [rdi]",
                "mov rcx, [rdi + 8]",
                "mov rdx, [rdi + 16]",
                "mov rbx, [rdi + 24]",
                "mov rbp, [rdi + 32]",
                "mov rsi, [rdi + 40]",
                "mov r8, [rdi + 56]",
                "mov r9, [rdi + 64]",
                "mov r10, [rdi + 72]",
                "mov r11, [rdi + 80]",
                "mov r12, [rdi + 88]",
                "mov r13, [rdi + 96]",
                "mov r14, [rdi + 104]",
                "mov r15, [rdi + 112]",
                "mov rdi, [rdi + 48]",
                "2:",
                $instruction,
                "3:",
                ".pushsection .fixup, \"a\", @progbits",
                ".quad 2b",
                ".quad 3b",
                ".popsection",
                // On the stack, from the top: RDI, RFLAGS, the address of `after`.
                "pushfq",
                "push rdi",
                "mov rdi, [rsp + 16]",
                "mov [rdi], rax",
                "mov [rdi + 8], rcx",
                "mov [rdi + 16], rdx",
                "mov [rdi + 24], rbx",
                "mov [rdi + 32], rbp",
                "mov [rdi + 40], rsi",
                "mov [rdi + 56], r8",
                "mov [rdi + 64], r9",
                "mov [rdi + 72], r10",
                "mov [rdi + 80], r11",
                "mov [rdi + 88], r12",
                "mov [rdi + 96], r13",
                "mov [rdi + 104], r14",
                "mov [rdi + 112], r15",
                "pop rax",
                "mov [rdi + 48], rax",
                "pop rax",
                "mov [rdi + 120], rax",
                ".irp i, 0,1,2,3,4,5",
                "movdqu [rdi + 128 + 16*\\i], xmm\\i",
                ".endr",
                "pop rsi",
                "pop r15",
                "pop r14",
                "pop r13",
                "pop r12",
                "pop rbp",
                "pop rbx",
                "popfq",
                "ret",
            )
        }
    };
}

exchange!(exchange_own, hypercall!());
exchange!(exchange_foreign, foreign_hypercall!());
