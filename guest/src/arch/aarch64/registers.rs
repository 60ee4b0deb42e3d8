//! System registers, and register patterns that show whether preemption preserves registers.
//!
//! The compiler uses no vector instructions for this kernel, so only this file changes vector registers. A pattern must
//! still be there after any number of interrupts, halts and exits.

use core::arch::{asm, naked_asm};

use super::{attempt, control, cpu_local, gic, interrupts, power, serial, tlb};

/// Reads a system register.
macro_rules! read_register {
    ($name:literal) => {{
        let value: u64;
        // SAFETY: reading this register has no effect except those that its use explains.
        unsafe { core::arch::asm!(concat!("mrs {}, ", $name), out(reg) value, options(nostack, preserves_flags)) };
        value
    }};
}
pub(super) use read_register;

/// Writes a system register.
macro_rules! write_register {
    ($name:literal, $value:expr) => {
        core::arch::asm!(concat!("msr ", $name, ", {}"), in(reg) $value, options(nostack, preserves_flags))
    };
}
pub(super) use write_register;

/// Waits until writes to system registers take effect.
pub(super) fn isb() {
    // SAFETY: waits.
    unsafe { asm!("isb", options(nostack, preserves_flags)) };
}

/// General registers under test: all but those that the loop itself needs, the platform's, and the stack's.
pub(crate) const GENERAL: usize = 24;
/// Vector registers.
pub(crate) const VECTORS: usize = 32;

/// Contents of the vector registers: 32 times 128 bits.
#[repr(C, align(32))]
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct VectorPattern([[u64; 2]; VECTORS]);

impl VectorPattern {
    /// A pattern that differs by register, by lane and by `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self(core::array::from_fn(|register| {
            core::array::from_fn(|lane| {
                seed.rotate_left(u32::try_from(register * 2 + lane).unwrap_or(0)).wrapping_add(lane as u64)
            })
        }))
    }

    /// Puts the pattern into this CPU's registers.
    pub(crate) fn load(&self) {
        // SAFETY: reads inside the pattern and writes vector registers. Compiled code of this target does not use them.
        unsafe { load_vectors(self) };
    }

    /// What this CPU's registers contain now.
    pub(crate) fn held() -> Self {
        let mut held = Self([[0; 2]; VECTORS]);
        // SAFETY: writes inside the 512 bytes of `held`.
        unsafe { store_vectors(&mut held) };
        held
    }

    /// The first register that differs between two patterns.
    pub(crate) fn first_difference(&self, other: &Self) -> Option<usize> {
        self.0.iter().zip(&other.0).position(|(a, b)| a != b)
    }
}

macro_rules! all_vectors {
    ($name:ident, $argument:ty, $instruction:literal) => {
        #[unsafe(naked)]
        unsafe extern "C" fn $name(pattern: $argument) {
            naked_asm!(
                ".arch_extension fp",
                ".arch_extension simd",
                concat!(
                    ".irp i, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31\n",
                    $instruction,
                    " q\\i, [x0, #16*\\i]\n.endr"
                ),
                "ret"
            )
        }
    };
}

all_vectors!(load_vectors, &VectorPattern, "ldr");
all_vectors!(store_vectors, &mut VectorPattern, "str");

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
        "stp x19, x20, [sp, #-96]!",
        "stp x21, x22, [sp, #16]",
        "stp x23, x24, [sp, #32]",
        "stp x25, x26, [sp, #48]",
        "stp x27, x28, [sp, #64]",
        "stp x29, x30, [sp, #80]",
        "add w2, w2, #1",
        "ldp x3, x4, [x0]",
        "ldp x5, x6, [x0, #16]",
        "ldp x7, x8, [x0, #32]",
        "ldp x9, x10, [x0, #48]",
        "ldp x11, x12, [x0, #64]",
        "ldp x13, x14, [x0, #80]",
        "ldp x15, x16, [x0, #96]",
        "ldp x17, x19, [x0, #112]",
        "ldp x20, x21, [x0, #128]",
        "ldp x22, x23, [x0, #144]",
        "ldp x24, x25, [x0, #160]",
        "ldp x26, x27, [x0, #176]",
        "2:",
        "sub w2, w2, #1",
        "cbnz w2, 2b",
        "stp x3, x4, [x1]",
        "stp x5, x6, [x1, #16]",
        "stp x7, x8, [x1, #32]",
        "stp x9, x10, [x1, #48]",
        "stp x11, x12, [x1, #64]",
        "stp x13, x14, [x1, #80]",
        "stp x15, x16, [x1, #96]",
        "stp x17, x19, [x1, #112]",
        "stp x20, x21, [x1, #128]",
        "stp x22, x23, [x1, #144]",
        "stp x24, x25, [x1, #160]",
        "stp x26, x27, [x1, #176]",
        "ldp x21, x22, [sp, #16]",
        "ldp x23, x24, [sp, #32]",
        "ldp x25, x26, [sp, #48]",
        "ldp x27, x28, [sp, #64]",
        "ldp x29, x30, [sp, #80]",
        "ldp x19, x20, [sp], #96",
        "ret",
    )
}

/// FPCR and FPSR.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct FloatControl {
    control: u64,
    status: u64,
}

impl FloatControl {
    /// Those of a CPU: a rounding mode and a sticky flag that differ by index.
    pub(crate) fn of(cpu: usize) -> Self {
        let index = cpu as u64;
        Self { control: (index & 3) << 22, status: (index >> 2 & 1) << 27 | index >> 3 & 1 }
    }

    /// Puts them into this CPU.
    pub(crate) fn set(self) {
        // SAFETY: compiled code of this target uses neither.
        unsafe { write_register!("s3_3_c4_c4_0", self.control) };
        // SAFETY: as above.
        unsafe { write_register!("s3_3_c4_c4_1", self.status) };
    }

    /// What this CPU's registers contain now.
    pub(crate) fn held() -> Self {
        Self { control: read_register!("s3_3_c4_c4_0"), status: read_register!("s3_3_c4_c4_1") }
    }
}

/// Writes `mark` to registers that each CPU has for itself and that this kernel does not use. Returns whether all of
/// them took it.
pub(crate) fn mark(mark: u64) -> bool {
    // SAFETY: no code relies on the contents of these registers.
    unsafe { write_register!("tpidr_el0", mark | 1) };
    // SAFETY: as above.
    unsafe { write_register!("tpidrro_el0", mark | 2) };
    // SAFETY: as above.
    unsafe { write_register!("sp_el0", mark | 8) };
    // SAFETY: as above.
    unsafe { write_register!("contextidr_el1", mark & 0xffff_ffff) };
    // SAFETY: as above: nothing uses TTBR1.
    unsafe { write_register!("ttbr1_el1", mark & 0xffff_f000) };
    isb();
    marks(mark, cpu_local::index()).all(|(_, held, kept)| held == kept)
}

/// Each of those registers and some of the kernel's own: its contents, and the contents that it must have on CPU `cpu`.
pub(crate) fn marks(mark: u64, cpu: usize) -> impl Iterator<Item = (&'static str, u64, u64)> {
    [
        ("tpidr-el0", read_register!("tpidr_el0"), mark | 1),
        ("tpidrro-el0", read_register!("tpidrro_el0"), mark | 2),
        ("sp-el0", read_register!("sp_el0"), mark | 8),
        ("contextidr", read_register!("contextidr_el1"), mark & 0xffff_ffff),
        ("ttbr1", read_register!("ttbr1_el1"), mark & 0xffff_f000),
        ("tpidr-el1", read_register!("tpidr_el1"), cpu_local::address(cpu)),
        ("vbar", read_register!("vbar_el1"), interrupts::vectors()),
    ]
    .into_iter()
}

/// Root of the page tables in use on this CPU.
pub(crate) fn root() -> u64 {
    read_register!("ttbr0_el1") & 0x0000_ffff_ffff_f000
}

/// Removes this CPU's tables: it takes aborts for ever.
pub(crate) fn lose_tables() {
    // SAFETY: no other CPU uses this CPU's data, and it does not come back.
    unsafe { write_register!("ttbr0_el1", 0xd000_0000u64) };
    isb();
    tlb::flush_all();
}

/// Removes this CPU's vectors, then causes an exception.
pub(crate) fn lose_vectors() {
    // SAFETY: as above.
    unsafe { write_register!("vbar_el1", 0xd000_0000u64) };
    isb();
    power::invalid_opcode();
}

/// Returns to a mode that does not exist. The CPU sets the bit for an illegal return, and its exception finds no
/// vectors.
pub(crate) fn return_illegally() {
    /// EL2, which this kernel must not enter; illegal state.
    const ILLEGAL: u64 = 0x3c9 | 1 << 20;
    // SAFETY: as above.
    unsafe { write_register!("vbar_el1", 0xd000_0000u64) };
    // SAFETY: as above.
    unsafe { write_register!("spsr_el1", ILLEGAL) };
    // SAFETY: as above.
    unsafe { asm!("adr {0}, 2f", "msr elr_el1, {0}", "eret", "2:", "b 2b", out(reg) _, options(nostack)) };
}

/// Number of exits whose result [`ask`] knows.
pub(crate) const QUESTIONS: usize = 6;

/// Causes an exit with a known result on the CPU with this affinity. Returns its name and whether the result was right.
pub(crate) fn ask(question: usize, own: u32) -> (&'static str, bool) {
    match question {
        0 => ("affinity", control::hardware_id() == own),
        1 => ("id-register-repeats", read_register!("id_aa64pfr0_el1") == read_register!("id_aa64pfr0_el1")),
        2 => ("psci-version", power::call(power::PSCI_VERSION, [0; 3]) >> 16 == 1),
        3 => {
            let kind = attempt::load_u64(gic::redistributor() + gic::GICR_TYPER);
            ("redistributor", kind.is_ok_and(|kind| kind >> 32 == own.into()))
        }
        4 => {
            ("distributor", attempt::load_u32(gic::distributor() + gic::GICD_TYPER).is_ok_and(|kind| kind & 0x1f != 0))
        }
        _ => ("serial-flags", attempt::load_u32(serial::base() + serial::FLAGS).is_ok_and(|flags| flags >> 9 == 0)),
    }
}
