//! Interrupts of devices that a VM has: they arrive with the vector that its guest has chosen.
//!
//! A handler only records the vector. Further ones of the same priority or below stay pending, because the local APIC
//! is not told that it ended. [`forward`] runs where the hypervisor has just taken interrupts. It hands each vector on,
//! and ends it after that: a level-triggered pin is masked by then and cannot raise it again at once.

#![expect(unsafe_code, reason = "interrupt entry")]

use core::arch::global_asm;
use core::mem::offset_of;

use vcpu_layout::Proof;
use x86_64::VirtAddr;

use super::apic;
use super::percpu::{ArchPerCpu, Arrived};
use crate::arch::x86_64::guest::own_machine;
use crate::cpu::{self, PerCpu};
use crate::io::pins::{FIRST_VECTOR, LAST_VECTOR};

/// The recorded vectors, from GS.
const ARRIVED: usize = PerCpu::OFFSET_ARCH + ArchPerCpu::OFFSET_ARRIVED + offset_of!(Arrived, 0);
/// Distance from one handler to the next.
const HANDLER_BYTES: u64 = 16;

// A handler for each vector: sets its bit, and returns.
global_asm!(
    r#"
    .section .text.device_vectors, "ax", @progbits
    .balign 16
    .global dunlin_device_vectors
    dunlin_device_vectors:
    .set dunlin_vector, {first}
    .rept {count}
        .balign {handler_bytes}
        btsq $(dunlin_vector & 63), %gs:{arrived} + ((dunlin_vector >> 6) << 3)
        iretq
        .set dunlin_vector, dunlin_vector + 1
    .endr
    .text
    "#,
    first = const FIRST_VECTOR,
    count = const LAST_VECTOR - FIRST_VECTOR + 1,
    handler_bytes = const HANDLER_BYTES,
    arrived = const ARRIVED,
    options(att_syntax),
);

unsafe extern "C" {
    static dunlin_device_vectors: u8;
}

/// The handler of each vector.
pub(super) fn handlers() -> impl Iterator<Item = (u8, VirtAddr)> {
    let first = (&raw const dunlin_device_vectors).addr() as u64;
    let address = move |vector: u8| VirtAddr::new(first + u64::from(vector - FIRST_VECTOR) * HANDLER_BYTES);
    (FIRST_VECTOR..=LAST_VECTOR).map(move |vector| (vector, address(vector)))
}

/// Hands on the interrupts that this pCPU has taken for a VM.
#[inline]
pub(in crate::arch::x86_64) fn forward() {
    let Arrived(words) = &cpu::this().arch.arrived;
    if words.iter().fold(0, |all, word| all | word.get()) != 0 {
        forward_all();
    }
}

/// The same, if there are some. Interrupts are masked.
#[cold]
fn forward_all() {
    let cpu = cpu::this();
    // The highest first, as the local APIC ends them.
    for (first, word) in [0, 64, 128, 192].into_iter().zip(&cpu.arch.arrived.0).rev() {
        let mut left = word.get();
        word.set(Proof::by_place(), 0);
        while let Some(bit) = left.checked_ilog2() {
            left &= !(1 << bit);
            if let Ok(vector) = u8::try_from(first + bit) {
                own_machine::interrupt(cpu, vector);
                apic::end_of_interrupt(vector);
            }
        }
    }
}
