//! Runs code that was made at run time, with given values in all registers, until an interrupt or an exception ends it.
//! Reports how it ended.
//!
//! While such code runs, the CPU has its own IDT. All gates of it lead to one entry on a separate interrupt stack. So
//! the way back does not depend on the code's stack pointer, segments or privilege. Invalid code ends in the same way
//! as code that ends with INT3 as planned.
//!
//! The maker of the code decides what it may do to memory. Random code must run at CPL 3.

use core::arch::{asm, global_asm, naked_asm};
use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::attempt::Fault;
use super::boot::MAX_CPUS;
use super::{apic, attempt, cpu_local, descriptors, modes, tlb};
use crate::interrupt::{self, TIMER};

/// Registers by the number that instructions have for them.
pub(crate) const RAX: usize = 0;
pub(crate) const RCX: usize = 1;
pub(crate) const RDX: usize = 2;
pub(crate) const RBX: usize = 3;
pub(crate) const RSP: usize = 4;
pub(crate) const RBP: usize = 5;
pub(crate) const RSI: usize = 6;
pub(crate) const RDI: usize = 7;
pub(crate) const R15: usize = 15;

/// RFLAGS: always set, interrupts on, direction down.
pub(crate) const FLAGS: u64 = 2;
pub(crate) const INTERRUPTS: u64 = 1 << 9;
pub(crate) const DOWN: u64 = 1 << 10;

/// `#BP`: how code ends that ends as planned.
pub(crate) const PLANNED: u8 = 3;

/// The registers at the start and the end of a piece of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Registers {
    /// By number.
    pub(crate) general: [u64; 16],
    /// Where the code is.
    pub(crate) rip: u64,
    /// Flags.
    pub(crate) rflags: u64,
}

impl Registers {
    /// All zero, at `rip`, interrupts off.
    pub(crate) const fn at(rip: u64) -> Self {
        Self { general: [0; 16], rip, rflags: FLAGS }
    }

    /// With `value` in register `number`.
    pub(crate) const fn with(mut self, number: usize, value: u64) -> Self {
        self.general[number] = value;
        self
    }
}

/// In which code segment the code runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// 64-bit code, CPL 0.
    Kernel,
    /// 32-bit code (compatibility mode), CPL 0.
    Kernel32,
    /// 64-bit code, CPL 3.
    User,
}

/// How code ended.
#[derive(Clone, Copy)]
pub(crate) struct End {
    /// The exception, or [`TIMER`].
    pub(crate) vector: u8,
    /// Its error code; zero without one.
    pub(crate) error: u64,
    /// CR2: the last address whose translation failed.
    pub(crate) cr2: u64,
    /// The registers at that moment.
    pub(crate) registers: Registers,
}

impl End {
    /// Register `number`, if the code ended as planned.
    pub(crate) fn value(&self, number: usize) -> Result<u64, Fault> {
        if self.vector == PLANNED { Ok(self.registers.general[number]) } else { Err(self.fault()) }
    }

    /// As an exception.
    pub(crate) fn fault(&self) -> Fault {
        Fault { vector: self.vector, error: attempt::halves(self.error).0 }
    }

    /// Whether the timer ended it.
    pub(crate) fn is_timer(&self) -> bool {
        self.vector == TIMER
    }
}

const STACK_WORDS: usize = 1024 - 24;

/// The data of one CPU. Its alignment is its size, so any address in its stack leads to it.
#[repr(C, align(8192))]
struct Block {
    general: [AtomicU64; 16],
    /// RIP, CS, RFLAGS, RSP, SS, as IRETQ wants them.
    frame: [AtomicU64; 5],
    /// This kernel's stack pointer.
    stack_pointer: AtomicU64,
    reserved: [AtomicU64; 2],
    /// Its end contains, from the top: what the CPU pushed, the vector, the registers.
    stack: [AtomicU64; STACK_WORDS],
}

const _: () = assert!(size_of::<Block>() == 8192);

static BLOCKS: [Block; MAX_CPUS] = [const {
    Block {
        general: [const { AtomicU64::new(0) }; 16],
        frame: [const { AtomicU64::new(0) }; 5],
        stack_pointer: AtomicU64::new(0),
        reserved: [const { AtomicU64::new(0) }; 2],
        stack: [const { AtomicU64::new(0) }; STACK_WORDS],
    }
}; MAX_CPUS];

#[repr(C, align(4096))]
struct Idt([[AtomicU64; 2]; 256]);
static IDT: Idt = Idt([const { [const { AtomicU64::new(0) }; 2] }; 256]);
static IDT_IS_FILLED: AtomicBool = AtomicBool::new(false);

/// The interrupt stack's number.
const IST: u64 = 5;

/// Top of the interrupt stack of CPU `cpu`.
pub(super) fn stack_top(cpu: usize) -> u64 {
    BLOCKS[cpu].stack.as_ptr_range().end as u64
}

/// Runs code on this CPU, with interrupts off around it. Interrupts other than the timer's are handled, and the code
/// continues.
pub(crate) fn run(start: &Registers, level: Level) -> End {
    run_with_bases(start, level, None)
}

/// The same with these bases of FS and GS.
pub(crate) fn run_with_bases(start: &Registers, level: Level, bases: Option<[u64; 2]>) -> End {
    fill_idt();
    let cpu = cpu_local::index();
    let mut registers = *start;
    loop {
        let end = run_once(cpu, &registers, level, bases);
        match end.vector {
            TIMER => {
                apic::end_of_interrupt(0);
                return end;
            }
            2 => {}
            32.. => interrupt::handle(end.vector),
            _ => return end,
        }
        registers = end.registers;
    }
}

fn run_once(cpu: usize, start: &Registers, level: Level, bases: Option<[u64; 2]>) -> End {
    let block = &BLOCKS[cpu];
    for (word, value) in block.general.iter().zip(start.general) {
        word.store(value, Ordering::Relaxed);
    }
    let (cs, ss) = match level {
        Level::Kernel => (modes::CODE, modes::DATA),
        Level::Kernel32 => (modes::CODE_32, modes::DATA),
        Level::User => (modes::USER_CODE, modes::USER_DATA),
    };
    for (word, value) in block.frame.iter().zip([start.rip, cs, start.rflags, start.general[RSP], ss]) {
        word.store(value, Ordering::Relaxed);
    }

    descriptors::load_idt_at(&raw const IDT as u64);
    // From here to where GS is put back nothing asks for this CPU's index.
    if let Some([fs, gs]) = bases {
        attempt::write_msr(cpu_local::FS_BASE, fs);
        attempt::write_msr(cpu_local::GS_BASE, gs);
    }
    // SAFETY: loads the registers from the block and jumps to the code. The gates bring the CPU back with all registers
    // that the calling convention preserves. What the code does to memory is its maker's decision, as this file says.
    unsafe { enter(block) };
    if bases.is_some() || level == Level::User {
        attempt::write_msr(cpu_local::FS_BASE, 0);
        attempt::write_msr(cpu_local::GS_BASE, cpu_local::gs_base(cpu));
    }
    let cr2 = attempt::read_cr2();
    descriptors::load_idt(4095);

    end_of(block, cr2)
}

/// From the top of the stack: SS, RSP, RFLAGS, CS, RIP, error code, vector; then registers in the order of the pushes.
fn end_of(block: &Block, cr2: u64) -> End {
    const ORDER: [usize; 15] = [RAX, RCX, RDX, RBX, RBP, RSI, RDI, 8, 9, 10, 11, 12, 13, 14, 15];
    let from_top = |words: usize| block.stack[STACK_WORDS - words].load(Ordering::Relaxed);
    let mut registers = Registers::at(from_top(5));
    registers.rflags = from_top(3);
    registers.general[RSP] = from_top(2);
    for (place, number) in ORDER.into_iter().enumerate() {
        registers.general[number] = from_top(8 + place);
    }
    let [vector, ..] = from_top(7).to_le_bytes();
    End { vector, error: from_top(6), cr2, registers }
}

/// Fills the table once. Two CPUs that do it at once write the same.
fn fill_idt() {
    if IDT_IS_FILLED.load(Ordering::Acquire) {
        return;
    }
    for vector in 0..256usize {
        let handler = &raw const ENTRIES as u64 + vector as u64 * 16;
        // Code at CPL 3 may end as planned, by INT3.
        let level = if vector == usize::from(PLANNED) { 3 } else { 0 };
        for (word, value) in IDT.0[vector].iter().zip(descriptors::gate(handler, IST, level)) {
            word.store(value, Ordering::Relaxed);
        }
    }
    IDT_IS_FILLED.store(true, Ordering::Release);
}

unsafe extern "C" {
    #[link_name = "probe_entries"]
    static ENTRIES: [[u8; 16]; 256];
}

global_asm!(
    ".balign 16",
    ".globl probe_entries",
    "probe_entries:",
    ".set probe_vector, 0",
    ".rept 256",
    ".balign 16",
    // As in `interrupts`: those that push an error code.
    ".if !(probe_vector == 8 || (probe_vector >= 10 && probe_vector <= 14) || probe_vector == 17 || probe_vector == 21 || probe_vector == 29 || probe_vector == 30)",
    "push 0",
    ".endif",
    "push probe_vector",
    "jmp probe_end",
    ".set probe_vector, probe_vector + 1",
    ".endr",
    "probe_end:",
    "push rax",
    "push rcx",
    "push rdx",
    "push rbx",
    "push rbp",
    "push rsi",
    "push rdi",
    "push r8",
    "push r9",
    "push r10",
    "push r11",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    // The block begins where its size divides the address.
    "mov rdi, rsp",
    "and rdi, -8192",
    "mov rsp, [rdi + {stack_pointer}]",
    // Flags and segments may be anything.
    "push 2",
    "popfq",
    "mov eax, {data}",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
    stack_pointer = const offset_of!(Block, stack_pointer),
    data = const modes::DATA,
);

#[unsafe(naked)]
unsafe extern "C" fn enter(block: &Block) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi + {stack_pointer}], rsp",
        "lea rsp, [rdi + {frame}]",
        "mov rax, [rdi]",
        "mov rcx, [rdi + 8]",
        "mov rdx, [rdi + 16]",
        "mov rbx, [rdi + 24]",
        "mov rbp, [rdi + 40]",
        "mov rsi, [rdi + 48]",
        "mov r8, [rdi + 64]",
        "mov r9, [rdi + 72]",
        "mov r10, [rdi + 80]",
        "mov r11, [rdi + 88]",
        "mov r12, [rdi + 96]",
        "mov r13, [rdi + 104]",
        "mov r14, [rdi + 112]",
        "mov r15, [rdi + 120]",
        "mov rdi, [rdi + 56]",
        "iretq",
        stack_pointer = const offset_of!(Block, stack_pointer),
        frame = const offset_of!(Block, frame),
    )
}

/// Runs `work` with another root of the page tables, which maps this kernel as the common one does.
pub(crate) fn with_root<T>(root: u64, work: impl FnOnce() -> T) -> T {
    let own = tlb::root();
    // If the processor refuses a root, the result of the work shows it.
    let _ = attempt::write_cr3(root);
    let result = work();
    let _ = attempt::write_cr3(own);
    result
}

/// Resets the x87 unit, including pending exceptions.
pub(crate) fn reset_x87() {
    // SAFETY: changes x87 state, which no compiled code of this kernel uses.
    unsafe { asm!("fninit", options(nomem, nostack)) };
}
