//! GDT, TSS and interrupt stacks of each CPU, and the IDT that all share (APM vol. 2, 4.7, 8.9, 12.2.5).

use core::arch::asm;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::boot::MAX_CPUS;
use super::{interrupts, modes, probe};
use crate::arch::window;

/// Selector of the TSS.
const TSS: u16 = 0x20;

/// Interrupt stacks 1 (double fault), 2 (NMI), 3 (machine check).
const OWN_STACKS: usize = 3;
const STACK_WORDS: usize = 1024;

#[repr(C, align(16))]
struct Tables {
    gdt: [AtomicU64; 8],
    /// 104 bytes; as 32-bit words because its 64-bit fields are not aligned.
    tss: [AtomicU32; 26],
    stacks: [[AtomicU64; STACK_WORDS]; OWN_STACKS],
}

static TABLES: [Tables; MAX_CPUS] = [const {
    Tables {
        gdt: [const { AtomicU64::new(0) }; 8],
        tss: [const { AtomicU32::new(0) }; 26],
        stacks: [const { [const { AtomicU64::new(0) }; STACK_WORDS] }; OWN_STACKS],
    }
}; MAX_CPUS];

#[repr(C, align(4096))]
struct Idt([[AtomicU64; 2]; 256]);

static IDT: Idt = Idt([const { [const { AtomicU64::new(0) }; 2] }; 256]);

#[repr(C, packed)]
struct Pointer {
    limit: u16,
    base: u64,
}

/// Fills and loads the tables of CPU `index`.
pub(super) fn load(index: usize) {
    let tables = &TABLES[index];

    // I/O permission map beyond the limit: none. Stack 4 lies in the window, where its page may be missing.
    tables.tss[25].store(104 << 16, Ordering::Relaxed);
    for (ist, stack) in tables.stacks.iter().enumerate() {
        set_ist(tables, ist, stack.as_ptr_range().end as u64);
    }
    set_ist(tables, OWN_STACKS, window::stack_top(index));
    // Stack 5: code made at run time ends there, for any value of its own stack pointer.
    set_ist(tables, OWN_STACKS + 1, probe::stack_top(index));
    // From CPL 3 comes only the exception that ends a short run: it may use the double fault's stack.
    set_stack(tables, 1, tables.stacks[0].as_ptr_range().end as u64);

    let tss = &raw const tables.tss as u64;
    let descriptors = [
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        // 32-bit code.
        0x00cf_9b00_0000_ffff,
        // A 64-bit TSS, available: limit 103, base in four parts.
        103 | (tss & 0x00ff_ffff) << 16 | 0x89 << 40 | (tss >> 24 & 0xff) << 56,
        tss >> 32,
        // Data and 64-bit code of CPL 3.
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
    ];
    for (entry, value) in tables.gdt.iter().zip(descriptors) {
        entry.store(value, Ordering::Relaxed);
    }

    for vector in 0..=255u8 {
        let ist = match vector {
            8 => 1,
            2 => 2,
            18 => 3,
            interrupts::WINDOW_STACK => 4,
            _ => 0,
        };
        for (word, value) in IDT.0[usize::from(vector)].iter().zip(gate(interrupts::entry(vector), ist, 0)) {
            word.store(value, Ordering::Relaxed);
        }
    }

    let gdt = Pointer { limit: 63, base: &raw const tables.gdt as u64 };
    // SAFETY: the table is static and holds, at the selectors in use, the same segments as before, plus a TSS.
    unsafe { asm!("lgdt [{}]", in(reg) &raw const gdt, options(nostack, readonly)) };
    // SAFETY: the selector names the TSS descriptor just written, not yet busy.
    unsafe { asm!("ltr {:x}", in(reg) TSS, options(nostack)) };
    load_idt(4095);
}

/// Loads the IDT with `limit`; anything but 4095 makes deliveries fail.
pub(super) fn load_idt(limit: u16) {
    let idt = Pointer { limit, base: &raw const IDT as u64 };
    // SAFETY: every gate within the limit names an entry stub. With a short limit a fault ends the VM, which the caller
    // wants to test.
    unsafe { asm!("lidt [{}]", in(reg) &raw const idt, options(nostack, readonly)) };
}

/// Loads an IDT of 256 gates at `base`, which handle every vector.
pub(super) fn load_idt_at(base: u64) {
    let idt = Pointer { limit: 4095, base };
    // SAFETY: every gate of the caller's table names an entry stub.
    unsafe { asm!("lidt [{}]", in(reg) &raw const idt, options(nostack, readonly)) };
}

/// The two words of an interrupt gate (delivery clears IF) to `handler` on interrupt stack `ist`, for CPL up to
/// `level`.
pub(super) const fn gate(handler: u64, ist: u64, level: u64) -> [u64; 2] {
    let low = handler & 0xffff | modes::CODE << 16 | ist << 32 | (0x8e | level << 5) << 40;
    [low | (handler >> 16 & 0xffff) << 48, handler >> 32]
}

/// Sets the interrupt stack of `vector`'s gate, and makes it a trap gate (delivery keeps IF) or an interrupt gate.
pub(super) fn change_gate(vector: u8, ist: u64, is_trap: bool) {
    let mut words = gate(interrupts::entry(vector), ist, 0);
    words[0] |= u64::from(is_trap) << 40;
    for (word, value) in IDT.0[usize::from(vector)].iter().zip(words) {
        word.store(value, Ordering::SeqCst);
    }
}

fn set_ist(tables: &Tables, ist: usize, top: u64) {
    // IST1 begins at byte 36 of the TSS.
    set_stack(tables, 9 + 2 * ist, top);
}

/// Writes the stack pointer at 32-bit word `word` of the TSS; RSP0 is at 1.
fn set_stack(tables: &Tables, word: usize, top: u64) {
    #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
    for (half, value) in [top as u32, (top >> 32) as u32].into_iter().enumerate() {
        tables.tss[word + half].store(value, Ordering::Relaxed);
    }
}
