//! Instructions that may fault, as functions that return the fault.
//!
//! The section `.fixup` lists each such instruction, with the address at which to continue. The exception handler looks
//! there first. If the faulting address is in the list, it puts the fault into R11 and continues at that address. R11
//! is zero otherwise.

use core::arch::asm;
use core::fmt;

use super::hypercall::hypercall;

/// An exception that an instruction raised.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Exception vector.
    pub(crate) vector: u8,
    /// Error code, zero if the exception has none.
    pub(crate) error: u32,
}

impl Fault {
    /// `#UD`, invalid opcode.
    pub(crate) const UD: u8 = 6;
    /// `#GP`, general protection.
    pub(crate) const GP: u8 = 13;
    /// `#PF`, page fault.
    pub(crate) const PF: u8 = 14;

    /// As it is left in R11: never zero.
    pub(super) const fn encode(vector: u8, error: u64) -> u64 {
        1 << 63 | (vector as u64) << 32 | error & 0xffff_ffff
    }

    #[expect(clippy::cast_possible_truncation, reason = "fields cut out of a word")]
    pub(super) fn decode(r11: u64) -> Result<(), Self> {
        if r11 == 0 { Ok(()) } else { Err(Self { vector: (r11 >> 32) as u8, error: r11 as u32 }) }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.vector {
            1 => f.write_str("db"),
            6 => f.write_str("ud"),
            7 => f.write_str("nm"),
            13 => f.write_str("gp"),
            14 => f.write_str("pf"),
            other => write!(f, "{other}"),
        }
    }
}

/// One instruction with its operands; answers `Result<(), Fault>`.
///
/// The instruction must fault before it changes anything, and must not use R11.
macro_rules! attempt {
    ($instruction:expr $(, $($operand:tt)*)?) => {
        $crate::arch::attempt::attempt!(between "", $instruction, "" $(, $($operand)*)?)
    };
    // With something to do before and after, fault or not.
    (between $before:expr, $instruction:expr, $after:expr $(, $($operand:tt)*)?) => {{
        let fault: u64;
        // SAFETY: by the module's rule, the experiment wants the instruction's effect on the machine. The operands
        // declare all registers that it changes.
        unsafe {
            core::arch::asm!(
                "xor r11d, r11d",
                $before,
                "2:",
                $instruction,
                "3:",
                $after,
                ".pushsection .fixup, \"a\", @progbits",
                ".quad 2b",
                ".quad 3b",
                ".popsection",
                out("r11") fault,
                $($($operand)*)?
            );
        }
        $crate::arch::attempt::Fault::decode(fault)
    }};
}
pub(super) use attempt;

unsafe extern "C" {
    #[link_name = "fixup_start"]
    static FIXUP_START: [u64; 2];
    #[link_name = "fixup_end"]
    static FIXUP_END: [u64; 2];
}

/// Where to continue after a fault at `rip`, if the instruction there is in the list.
pub(super) fn resume_after(rip: u64) -> Option<u64> {
    let start = &raw const FIXUP_START;
    let bytes = (&raw const FIXUP_END) as usize - start as usize;
    // SAFETY: the linker script puts both symbols around the list, whose entries are pairs of 64-bit addresses.
    let list = unsafe { core::slice::from_raw_parts(start, bytes / 16) };
    list.iter().find(|[at, _]| *at == rip).map(|[_, resume]| *resume)
}

/// The low and the high half.
pub(super) const fn halves(value: u64) -> (u32, u32) {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    (value as u32, (value >> 32) as u32)
}

/// Reads an MSR.
pub(crate) fn rdmsr(msr: u32) -> Result<u64, Fault> {
    let (low, high): (u32, u32);
    attempt!("rdmsr", in("ecx") msr, out("eax") low, out("edx") high)?;
    Ok(u64::from(high) << 32 | u64::from(low))
}

/// Writes an MSR.
pub(crate) fn wrmsr(msr: u32, value: u64) -> Result<(), Fault> {
    let (low, high) = halves(value);
    attempt!("wrmsr", in("ecx") msr, in("eax") low, in("edx") high)
}

/// Writes an MSR that must exist. If it does not, the fault ends the guest with a record.
pub(crate) fn write_msr(msr: u32, value: u64) {
    let (low, high) = halves(value);
    // SAFETY: as the module says; the kernel writes only registers that it uses itself.
    unsafe { asm!("wrmsr", in("ecx") msr, in("eax") low, in("edx") high, options(nostack)) };
}

/// Reads an MSR that must exist. If it does not, the fault ends the guest with a record.
pub(crate) fn read_msr(msr: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reading an MSR changes nothing.
    unsafe { asm!("rdmsr", in("ecx") msr, out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

macro_rules! control_register {
    ($(#[$doc:meta])* $write:ident, $read:ident, $register:literal) => {
        $(#[$doc])*
        pub(crate) fn $write(value: u64) -> Result<(), Fault> {
            attempt!(concat!("mov ", $register, ", rax"), in("rax") value)
        }

        /// Reads the register.
        pub(crate) fn $read() -> u64 {
            let value;
            // SAFETY: reading a control or debug register changes nothing.
            unsafe { asm!(concat!("mov {}, ", $register), out(reg) value, options(nostack)) };
            value
        }
    };
}

control_register!(
    /// Writes CR0 (APM vol. 2, 3.1.1).
    write_cr0, read_cr0, "cr0");
control_register!(
    /// Writes CR3.
    write_cr3, read_cr3, "cr3");
control_register!(
    /// Writes CR4.
    write_cr4, read_cr4, "cr4");
control_register!(
    /// Writes CR8, the task priority.
    write_cr8, read_cr8, "cr8");
control_register!(
    /// Writes DR0, a breakpoint address; breakpoints are enabled in DR7 only.
    write_dr0, read_dr0, "dr0");
control_register!(
    /// Writes DR6.
    write_dr6, read_dr6, "dr6");
control_register!(
    /// Writes DR7.
    write_dr7, read_dr7, "dr7");

/// CR2: the last address whose translation failed on this CPU.
pub(crate) fn read_cr2() -> u64 {
    let value;
    // SAFETY: reading CR2 changes nothing.
    unsafe { asm!("mov {}, cr2", out(reg) value, options(nostack)) };
    value
}

/// Writes an extended control register.
pub(crate) fn xsetbv(register: u32, value: u64) -> Result<(), Fault> {
    let (low, high) = halves(value);
    attempt!("xsetbv", in("ecx") register, in("eax") low, in("edx") high)
}

/// Reads XCR0; CR4.OSXSAVE must be set.
pub(crate) fn xgetbv() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reads a register; without OSXSAVE it faults and the guest ends with a record.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// Loads a byte.
pub(crate) fn load_u8(at: u64) -> Result<u8, Fault> {
    let value: u8;
    attempt!("mov al, byte ptr [rdx]", out("al") value, in("rdx") at)?;
    Ok(value)
}

/// Loads 16 bits.
pub(crate) fn load_u16(at: u64) -> Result<u16, Fault> {
    let value: u16;
    attempt!("mov ax, word ptr [rdx]", out("ax") value, in("rdx") at)?;
    Ok(value)
}

/// Loads 32 bits.
pub(crate) fn load_u32(at: u64) -> Result<u32, Fault> {
    let value: u32;
    attempt!("mov eax, dword ptr [rdx]", out("eax") value, in("rdx") at)?;
    Ok(value)
}

/// Loads 64 bits.
pub(crate) fn load_u64(at: u64) -> Result<u64, Fault> {
    let value: u64;
    attempt!("mov rax, qword ptr [rdx]", out("rax") value, in("rdx") at)?;
    Ok(value)
}

/// Stores 32 bits.
pub(crate) fn store_u32(at: u64, value: u32) -> Result<(), Fault> {
    attempt!("mov dword ptr [rdx], eax", in("rdx") at, in("eax") value)
}

/// Stores 64 bits.
pub(crate) fn store_u64(at: u64, value: u64) -> Result<(), Fault> {
    attempt!("mov qword ptr [rdx], rax", in("rdx") at, in("rax") value)
}

/// A hypercall with RAX, RCX, RDX, RSI, RDI, R8 to R10; answers RAX.
pub(crate) fn hypercall(rax: u64, rcx: u64, rdx: u64, others: [u64; 5]) -> Result<u64, Fault> {
    let answer;
    let [rsi, rdi, r8, r9, r10] = others;
    attempt!(
        hypercall!(),
        inout("rax") rax => answer, inout("rcx") rcx => _, inout("rdx") rdx => _,
        inout("rsi") rsi => _, inout("rdi") rdi => _, inout("r8") r8 => _, inout("r9") r9 => _, inout("r10") r10 => _
    )?;
    Ok(answer)
}

/// VMware's question for the TSC frequency: command 45 by hypercall, answered in EBX:EAX as Hz.
pub(crate) fn vmware_tsc_hz() -> Option<u64> {
    let (low, high): (u64, u64);
    // RBX belongs to the compiler, so it is kept in R9.
    attempt!(
        between "mov r9, rbx\n mov ebx, 0xffffffff", hypercall!(), "mov r8, rbx\n mov rbx, r9",
        inout("rax") 0x564d_5868u64 => low, inout("rcx") 45u64 => _, inout("rdx") 0u64 => _, out("r8") high,
        out("r9") _
    )
    .ok()?;
    let hz = (high & 0xffff_ffff) << 32 | low & 0xffff_ffff;
    (1_000_000..100_000_000_000).contains(&hz).then_some(hz)
}

/// The SVM instructions (APM vol. 2, 15), by name, with operands of zero.
pub(crate) fn svm_instructions() -> [(&'static str, Result<(), Fault>); 7] {
    [
        ("vmrun", attempt!("vmrun rax", inout("rax") 0u64 => _)),
        ("vmload", attempt!("vmload rax", inout("rax") 0u64 => _)),
        ("vmsave", attempt!("vmsave rax", inout("rax") 0u64 => _)),
        ("stgi", attempt!("stgi")),
        ("clgi", attempt!("clgi")),
        ("skinit", attempt!("skinit eax", inout("eax") 0u32 => _)),
        ("invlpga", attempt!("invlpga rax, ecx", in("rax") 0u64, in("ecx") 0u32)),
    ]
}
