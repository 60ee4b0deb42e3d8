//! Starts the other pCPUs: PSCI CPU_ON (Arm DEN0022, 5.6).
//!
//! A pCPU starts at `boot_secondary` with translation off and the address of its block in X0. The code there enables
//! translation with the boot tables. Then this code loads the final ones, and the pCPU continues on its own stack.

#![expect(unsafe_code, reason = "the change of tables and stacks")]

use core::arch::global_asm;
use core::sync::atomic::Ordering;

use addr::Hva;

use super::{counter, gic, irq, paging, percpu, power};
use crate::arch::aarch64::guest::id_registers;
use crate::arch::aarch64::speculation;
use crate::cpu::{self, PerCpu};

/// Time limit for the others to start, in nanoseconds. An emulator may have few threads for many of them.
const PATIENCE_NANOS: u64 = 10_000_000_000;

global_asm!(
    r#"
    .section .text.smp, "ax"
    .global smp_high
    smp_high:
        /* The block and the guarded stack are only in the real tables; this code is in both. */
        ldr x1, ={root}
        ldr x1, [x1]
        msr ttbr0_el2, x1
        isb
        tlbi alle2
        dsb nsh
        isb
        ldr x1, [x19, #{stack}]
        mov sp, x1
        mov x29, xzr
        mov x30, xzr
        mov x0, x19
        bl {main}
        brk #1
    .ltorg
    "#,
    root = sym paging::ROOT,
    stack = const percpu::STACK,
    main = sym main,
);

/// Starts all pCPUs but this one and waits until they are up.
pub(super) fn start_others() {
    unsafe extern "C" {
        static boot_secondary: u8;
    }
    cpu::this().online.store(true, Ordering::Release);
    let entry = paging::image_hpa(Hva((&raw const boot_secondary).addr() as u64));
    let others = || cpu::all().iter().filter(|cpu| cpu.id != cpu::this().id);
    for cpu in others() {
        if !power::cpu_on(cpu.arch.affinity, entry, core::ptr::from_ref(&**cpu) as u64) {
            log::error!("the firmware refuses to start {} (affinity {:#x})", cpu.id, cpu.arch.affinity);
            power::exit(abi::exit_code::REFUSED)
        }
    }

    let deadline = counter::now() + counter::nanos_to_ticks(PATIENCE_NANOS);
    while !cpu::all_online() {
        if counter::now() > deadline {
            for cpu in others().filter(|cpu| !cpu.online.load(Ordering::Acquire)) {
                log::error!("{} (affinity {:#x}) does not start", cpu.id, cpu.arch.affinity);
            }
            power::exit(abi::exit_code::REFUSED)
        }
        core::hint::spin_loop();
    }
}

/// The rest of a pCPU's way, on its own stack.
extern "C" fn main(cpu: &'static PerCpu) -> ! {
    paging::activate();
    irq::load();
    percpu::install(cpu);
    if let Err(why) = gic::init() {
        log::error!("cannot use the interrupt controller: {why}");
        power::exit(abi::exit_code::REFUSED)
    }
    id_registers::add_this_cpu();
    speculation::add_this_cpu();
    cpu.online.store(true, Ordering::Release);
    crate::run_cpu()
}
