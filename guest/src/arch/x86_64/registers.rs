//! Register patterns that show whether preemption preserves registers.
//!
//! The compiler uses no SSE for this kernel, so only this file changes vector registers. A pattern must still be there
//! after any number of interrupts, halts and exits.

use core::arch::{asm, naked_asm};

use spin::Once;

use super::{apic, attempt, control, cpu_local, port, serial, tsc};

/// General registers under test: all but RSP, RDI, RSI and RCX, which the loop itself needs.
pub(crate) const GENERAL: usize = 12;
/// Vector registers outside of AVX-512.
pub(crate) const VECTORS: usize = 16;

/// Contents of the vector registers: 16 times 256 bits; without AVX the upper halves stay zero.
#[repr(C, align(32))]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct VectorPattern([[u64; 4]; VECTORS]);

impl VectorPattern {
    /// A pattern that differs by register, by lane and by `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        let lanes = if control::avx_is_on() { 4 } else { 2 };
        Self(core::array::from_fn(|register| {
            core::array::from_fn(|lane| {
                if lane < lanes {
                    seed.rotate_left(u32::try_from(register * 4 + lane).unwrap_or(0)).wrapping_add(lane as u64)
                } else {
                    0
                }
            })
        }))
    }

    /// Puts the pattern into this CPU's registers.
    pub(crate) fn load(&self) {
        let load = if control::avx_is_on() { load_avx } else { load_sse };
        // SAFETY: reads inside the pattern and writes vector registers. Compiled code of this target does not use them.
        // Uses AVX only if it is enabled.
        unsafe { load(self) };
    }

    /// What this CPU's registers contain now.
    pub(crate) fn held() -> Self {
        let mut held = Self([[0; 4]; VECTORS]);
        let store = if control::avx_is_on() { store_avx } else { store_sse };
        // SAFETY: writes inside the 512 bytes of `held`. Uses AVX only if it is enabled.
        unsafe { store(&mut held) };
        held
    }

    /// The first register that differs between two patterns.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<usize> {
        self.0.iter().zip(&other.0).position(|(a, b)| a != b)
    }
}

macro_rules! for_each_vector {
    ($name:ident, $argument:ty, $before:literal, $middle:literal, $after:literal) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name(pattern: $argument) {
            naked_asm!(
                concat!(".irp i, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n", $before, $middle, $after, "\n.endr"),
                "ret"
            )
        }
    };
}

for_each_vector!(load_sse, &VectorPattern, "movdqu xmm\\i", ", [rdi + 32*\\i]", "");
for_each_vector!(load_avx, &VectorPattern, "vmovdqu ymm\\i", ", [rdi + 32*\\i]", "");
for_each_vector!(store_sse, &mut VectorPattern, "movdqu [rdi + 32*\\i]", ", xmm\\i", "");
for_each_vector!(store_avx, &mut VectorPattern, "vmovdqu [rdi + 32*\\i]", ", ymm\\i", "");

/// Loads `pattern` into the general registers, spins `spins` times, and returns their contents afterwards.
pub(crate) fn hold_general(pattern: &[u64; GENERAL], spins: u32) -> [u64; GENERAL] {
    let mut held = [0; GENERAL];
    // SAFETY: reads and writes the two arrays, and preserves the registers that the calling convention preserves.
    unsafe { hold(pattern, &mut held, spins) };
    held
}

#[unsafe(naked)]
unsafe extern "C" fn hold(pattern: &[u64; GENERAL], held: &mut [u64; GENERAL], spins: u32) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov ecx, edx",
        "inc ecx",
        "mov rax, [rdi]",
        "mov rdx, [rdi + 8]",
        "mov rbx, [rdi + 16]",
        "mov rbp, [rdi + 24]",
        "mov r8, [rdi + 32]",
        "mov r9, [rdi + 40]",
        "mov r10, [rdi + 48]",
        "mov r11, [rdi + 56]",
        "mov r12, [rdi + 64]",
        "mov r13, [rdi + 72]",
        "mov r14, [rdi + 80]",
        "mov r15, [rdi + 88]",
        "2:",
        "dec ecx",
        "jnz 2b",
        "mov [rsi], rax",
        "mov [rsi + 8], rdx",
        "mov [rsi + 16], rbx",
        "mov [rsi + 24], rbp",
        "mov [rsi + 32], r8",
        "mov [rsi + 40], r9",
        "mov [rsi + 48], r10",
        "mov [rsi + 56], r11",
        "mov [rsi + 64], r12",
        "mov [rsi + 72], r13",
        "mov [rsi + 80], r14",
        "mov [rsi + 88], r15",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}

/// MXCSR and the x87 control word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FloatControl {
    mxcsr: u32,
    x87: u16,
}

impl FloatControl {
    /// Those of a CPU: all exceptions masked, and a rounding mode that differs by index.
    pub(crate) fn of(cpu: usize) -> Self {
        let mode = u16::try_from(cpu & 3).unwrap_or(0);
        Self { mxcsr: 0x1f80 | u32::from(mode) << 13, x87: 0x037f | mode << 10 }
    }

    /// Puts them into this CPU.
    pub(crate) fn set(self) {
        // SAFETY: compiled code of this target uses neither.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const self.mxcsr, options(nostack)) };
        // SAFETY: as above.
        unsafe { asm!("fldcw [{}]", in(reg) &raw const self.x87, options(nostack)) };
    }

    /// What this CPU's registers contain now.
    pub(crate) fn held() -> Self {
        let (mut mxcsr, mut x87) = (0u32, 0u16);
        // SAFETY: writes the variable.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack)) };
        // SAFETY: writes the variable.
        unsafe { asm!("fnstcw [{}]", in(reg) &raw mut x87, options(nostack)) };
        Self { mxcsr, x87 }
    }
}

/// Writes `mark`, a canonical address with its low bits clear, to registers that each CPU has for itself. Returns
/// whether all of them took it.
pub(crate) fn mark(mark: u64) -> bool {
    attempt::write_msr(cpu_local::FS_BASE, mark | 1);
    attempt::write_msr(cpu_local::KERNEL_GS_BASE, mark | 2);
    attempt::write_dr0(mark | 3).is_ok()
}

/// Each of those registers: its contents, and the contents that it must have on this CPU, with index `cpu`.
pub(crate) fn marks(mark: u64, cpu: usize) -> impl Iterator<Item = (&'static str, u64, u64)> {
    let aux = has_rdtscp().then(|| ("tsc-aux", u64::from(tsc::aux()), cpu as u64));
    [
        ("fs-base", attempt::read_msr(cpu_local::FS_BASE), mark | 1),
        ("kernel-gs-base", attempt::read_msr(cpu_local::KERNEL_GS_BASE), mark | 2),
        ("gs-base", attempt::read_msr(cpu_local::GS_BASE), cpu_local::gs_base(cpu)),
        ("dr0", attempt::read_dr0(), mark | 3),
    ]
    .into_iter()
    .chain(aux)
}

/// CPUID exits, so it is asked once.
fn has_rdtscp() -> bool {
    static ANSWER: Once<bool> = Once::new();
    *ANSWER.call_once(control::has_rdtscp)
}

/// Number of exits whose result [`ask`] knows.
pub(crate) const QUESTIONS: usize = 5;

/// Causes an exit with a known result on the CPU with this APIC id. Returns its name and whether the result was right.
pub(crate) fn ask(question: usize, own: u32) -> (&'static str, bool) {
    match question {
        0 => ("cpuid-apic-id", control::hardware_id() == own),
        1 => ("cpuid-repeats", control::maker() == control::maker()),
        2 => ("apic-base", attempt::rdmsr(apic::APIC_BASE).is_ok_and(|base| base >> 11 & 1 == 1)),
        3 => ("apic-id", apic::id() == own),
        _ => ("line-status", port::read(serial::LINE_STATUS, 1) != 0xff),
    }
}
