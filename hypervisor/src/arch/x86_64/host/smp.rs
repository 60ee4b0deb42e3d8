//! Starts the other pCPUs.
//!
//! A pCPU starts in real mode, on a free page below 1 MiB from the memory map; which one is free differs by firmware
//! and boot loader. A few instructions are copied there, which run at any address. They enter protected mode and the
//! image. There the pCPU enters long mode on the boot page tables, then loads the final ones, finds its block by the id
//! of its local APIC, and continues on its own stack. All pCPUs are started at once; a lock guards the few steps on the
//! shared boot stack.

#![expect(unsafe_code, reason = "code for a CPU that is in real mode, and the change of stacks after it")]

use core::arch::global_asm;
use core::sync::atomic::{AtomicU8, Ordering};

use addr::PAGE_BYTES;
use x86_64::registers::control::Cr0;

use super::boot::{BOOT_STACK, BOOT_STACK_BYTES};
use super::paging::{CR0, ROOT, direct_map};
use super::{apic, irq, machine_check, paging, percpu, power, tsc};
use crate::cpu::{self, PerCpu};
use crate::memory_map::StartPage;

/// Time limit for the others to start, in microseconds. An emulator may have few threads for many of them.
const PATIENCE_MICROS: u64 = 10_000_000;

global_asm!(
    r#"
    .section .rodata.smp, "a"
    .global smp_code
    .global smp_code_end
    smp_code:
    .code16
        cli
        cld
        mov ax, cs
        mov ds, ax
        .byte 0x66, 0x0f, 0x01, 0x16    /* lgdt with a 32-bit base */
        .word smp_gdt_pointer - smp_code
        mov eax, cr0
        or eax, 1
        mov cr0, eax
        .byte 0x66, 0xea                /* far jump with a 32-bit offset */
        .long smp_32
        .word 0x18
    .balign 4
    smp_gdt_pointer:
        .word 31
        .long boot_gdt
    smp_code_end:

    .section .boot.text, "ax"
    .code32
    smp_32:
        mov ax, 0x10
        mov ds, ax
        mov es, ax
        mov ss, ax
        /* Several may be here at once: what they push is the same for all. */
        lea esp, [boot_stack_low]
        call boot_long_mode
        .byte 0xea
        .long smp_64
        .word 0x08
    .code64
    smp_64:
        xor eax, eax
        mov ds, eax
        mov es, eax
        mov ss, eax
        mov fs, eax
        mov gs, eax
        movabs rax, offset smp_high
        jmp rax

    .text
    smp_high:
        /* The real page tables: the guarded stacks are only there. */
        mov rax, [rip + {root}]
        mov cr3, rax
    2:  mov al, 1
        xchg [rip + {lock}], al
        test al, al
        jz 3f
        pause
        jmp 2b
    3:  movabs rsp, offset {boot_stack} + {boot_stack_bytes}
        xor ebp, ebp
        call {find}
        mov rsp, rax
        mov byte ptr [rip + {lock}], 0
        mov rdi, rdx
        call {main}
        ud2
    "#,
    root = sym ROOT,
    lock = sym LOCK,
    boot_stack = sym BOOT_STACK,
    boot_stack_bytes = const BOOT_STACK_BYTES,
    find = sym find_block,
    main = sym main,
);

/// Held by the pCPU that is on the boot stack.
static LOCK: AtomicU8 = AtomicU8::new(0);

/// Starts all other pCPUs and waits until they have started. `start` is a page for their code.
pub(super) fn start_others(start: Option<StartPage>) {
    cpu::this().online.store(true, Ordering::Release);
    let others = || cpu::all().iter().filter(|cpu| cpu.id != cpu::this().id);
    if others().next().is_none() {
        return;
    }
    let Some(start) = start else {
        log::error!("there is no free RAM below 640 KiB for the start-up code of the pCPUs");
        power::exit(abi::exit_code::REFUSED)
    };
    copy_start_code(start);

    // INIT, 10 ms, start-up IPI; and a second one for CPUs that have missed the first (Intel SDM vol. 3, 9.4.4).
    others().for_each(|cpu| apic::send_init(cpu.arch.apic_id));
    tsc::delay(10_000);
    for _ in 0..2 {
        let asleep = || others().filter(|cpu| !cpu.online.load(Ordering::Acquire));
        asleep().for_each(|cpu| apic::send_startup(cpu.arch.apic_id, start.vector()));
        tsc::delay(200);
    }

    let deadline = tsc::now() + tsc::nanos_to_ticks(PATIENCE_MICROS * 1000);
    while !cpu::all_online() {
        if tsc::now() > deadline {
            for cpu in others().filter(|cpu| !cpu.online.load(Ordering::Acquire)) {
                log::error!("{} (local APIC {:#x}) does not start", cpu.id, cpu.arch.apic_id);
            }
            power::exit(abi::exit_code::REFUSED)
        }
        core::hint::spin_loop();
    }
    // One after the other: pCPUs sleep until their turn, because an emulator may have few threads for many pCPUs.
    others().for_each(|cpu| tsc::answer(cpu));
}

fn copy_start_code(start_page: StartPage) {
    unsafe extern "C" {
        static smp_code: u8;
        static smp_code_end: u8;
    }
    let start = &raw const smp_code;
    let bytes = (&raw const smp_code_end).addr() - start.addr();
    let page = direct_map(start_page.hpa());
    assert!(bytes as u64 <= PAGE_BYTES, "the start-up code fits into its page");
    assert!(paging::is_mapped(page), "RAM is in the direct map");
    // SAFETY: the code is part of the image. The page is RAM that nothing else uses: it is below 1 MiB, not the
    // payload's, and the loader's data there was copied. The code fits.
    unsafe { core::ptr::copy_nonoverlapping(start, page.0 as *mut u8, bytes) };
}

/// Where a pCPU continues: returned in RAX and RDX.
#[repr(C)]
struct Start {
    stack: u64,
    block: &'static PerCpu,
}

/// Finds the block of the running pCPU, before GS is set.
extern "sysv64" fn find_block() -> Start {
    let apic_id = apic::id_by_cpuid();
    match cpu::all().iter().find(|cpu| cpu.arch.apic_id == apic_id) {
        Some(block) => {
            percpu::find_by_gs(block);
            Start { stack: block.arch.stack.0, block }
        }
        // No pCPU has started this one.
        None => {
            LOCK.store(0, Ordering::Release);
            power::stop_this_cpu()
        }
    }
}

/// The rest of a pCPU's way, on its own stack.
extern "sysv64" fn main(cpu: &'static PerCpu) -> ! {
    // SAFETY: read-only means read-only, as on the boot pCPU.
    unsafe { Cr0::write(CR0) };
    irq::load();
    percpu::install(cpu);
    machine_check::enable();
    apic::init();
    apic::take_logical_id(cpu.id);
    apic::start_timer();
    cpu.online.store(true, Ordering::Release);
    tsc::meet(cpu.id);
    crate::run_cpu()
}
