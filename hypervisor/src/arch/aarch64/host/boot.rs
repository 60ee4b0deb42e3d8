//! Entry from the boot loader into Rust.
//!
//! The loader uses Linux's boot protocol (Documentation/arch/arm64/booting.rst). The image begins with a header, is at
//! any multiple of 2 MiB, and is entered with translation off and the address of the device tree in X0. This code
//! copies the device tree and enables translation with tables that map the image twice (at its physical address, and
//! where it is linked). Then it makes the final tables and continues on a guarded stack.
//!
//! UEFI starts the same image in another way, which ends in the same entry ([`efi`]).
//!
//! The other pCPUs enter through [`smp`] and use the same boot tables for a few instructions.

#![expect(unsafe_code, reason = "entry from the loader, and what it left in memory")]

use core::arch::{asm, global_asm};

use aarch64_defs::registers::{mair, sctlr, tcr_el2};
use addr::{Hpa, HpaRange, Hva};
use spin::Once;

use super::device_tree::{self, Machine};
use super::paging::{self, direct_map};
use super::{counter, efi, gic, iommu, irq, percpu, power, smp};
use crate::arch::aarch64::guest::id_registers;
use crate::arch::aarch64::speculation;
use crate::arch::{control_port, weaknesses};
use crate::boot::Boot;
use crate::boot::handover::Handover;
use crate::cpu::{self, CpuId, scheduler};
use crate::log as uart_log;

/// Bytes of each pCPU's main stack.
pub(super) const STACK_BYTES: u64 = 128 << 10;

/// The boot protocol's limit for a device tree.
pub(super) const DEVICE_TREE_LIMIT: usize = 2 << 20;

// The header, the entry, the boot tables. Code up to `boot_high` runs at physical addresses and uses only relative
// addresses.
global_asm!(
    r#"
    .section .boot.head, "ax"
    ccmp x18, #0, #0xd, pl              /* "MZ", which only changes flags */
    b boot_entry
    .quad 0                             /* offset from a multiple of 2 MiB */
    .quad image_bytes
    .quad 0xa                           /* little-endian, 4 KiB pages, anywhere */
    .quad 0, 0, 0
    .ascii "ARM\x64"
    .long pe_header

    .section .boot.text, "ax"
    boot_entry:
        msr daifset, #0xf
        mov x19, x0
        bl boot_check_level

        /* What is written before caches are on must not be hidden by lines that are in them already. */
        adrp x0, boot_l0
        adrp x1, boot_bss_end
        bl boot_invalidate

        /* The device tree, if it is one: magic and length are big-endian. Its length goes into X20, or zero. */
        mov x20, #0
        tst x19, #7
        b.ne 3f
        ldr w1, [x19]
        rev w1, w1
        movz w2, #0xd00d, lsl #16
        movk w2, #0xfeed
        cmp w1, w2
        b.ne 3f
        ldr w1, [x19, #4]
        rev w1, w1
        mov w2, #{device_tree_limit}
        cmp w1, w2
        b.hi 3f
        mov w20, w1
        adrp x2, boot_device_tree
        add x1, x1, #15
        and x1, x1, #~15
        add x1, x2, x1
    2:  cmp x2, x1
        b.hs 3f
        ldp x3, x4, [x19], #16
        stp x3, x4, [x2], #16
        b 2b

        /* Tables. X21: where the image is. A descriptor of a table ends in 3; a block of normal memory is 0x701. */
    3:  adrp x21, image_start
        adrp x0, boot_l0
        adrp x1, boot_bss_tables_end
    4:  stp xzr, xzr, [x0], #16
        cmp x0, x1
        b.lo 4b

        adrp x0, boot_l0
        adrp x1, boot_l1_low
        orr x2, x1, #3
        ubfx x3, x21, #39, #9
        str x2, [x0, x3, lsl #3]
        and x2, x21, #~0x3fffffff
        mov x4, #0x701
        orr x2, x2, x4
        ubfx x3, x21, #30, #9
        str x2, [x1, x3, lsl #3]

        adrp x1, boot_l1_high
        orr x2, x1, #3
        str x2, [x0, #511 * 8]
        adrp x2, boot_l2_high
        orr x3, x2, #3
        str x3, [x1, #510 * 8]
        orr x3, x21, x4
        mov x4, #{image_blocks}
    5:  str x3, [x2], #8
        add x3, x3, #0x200000
        subs x4, x4, #1
        b.ne 5b
        dsb sy

        bl boot_translate
        ldr x1, =boot_high
        br x1

    boot_high:
        ldr x0, =bss_start
        ldr x1, =bss_end
    6:  cmp x0, x1
        b.hs 7f
        stp xzr, xzr, [x0], #16
        b 6b
    7:  ldr x0, ={stack} + {stack_bytes}
        mov sp, x0
        mov x29, xzr
        mov x30, xzr
        mov x0, x21
        mov x1, x20
        bl {main}
        brk #1

    /* Entry of the other pCPUs; X0 is what they were started with. */
    .global boot_secondary
    boot_secondary:
        msr daifset, #0xf
        mov x19, x0
        mov x0, xzr
        bl boot_check_level
        bl boot_translate
        ldr x1, =smp_high
        br x1

    /* The processor must be at EL2, where it can be turned into one without VHE. Elsewhere this cannot run. */
    boot_check_level:
        mrs x1, CurrentEL
        cmp x1, #0x8
        b.ne boot_refuse
        msr tpidr_el2, xzr
        mov x1, #(1 << 31)
        msr hcr_el2, x1
        ldr x1, ={sctlr_off}
        msr sctlr_el2, x1
        isb
        ret

    /* Says so, where there is anybody to hear it: in the device tree at X0, if there is one, the name of the UART of QEMU's
       `virt` is looked for. Then off. */
    boot_refuse:
        cbz x0, 9f
        tst x0, #7
        b.ne 9f
        ldr w1, [x0]
        rev w1, w1
        movz w2, #0xd00d, lsl #16
        movk w2, #0xfeed
        cmp w1, w2
        b.ne 9f
        ldr w1, [x0, #4]
        rev w1, w1
        mov w2, #{device_tree_limit}
        cmp w1, w2
        b.hi 9f
        add x1, x0, x1
        adr x2, boot_uart_name
    2:  cmp x0, x1
        b.hs 9f
        mov x3, #0
    3:  ldrb w4, [x2, x3]
        cbz w4, 4f
        ldrb w5, [x0, x3]
        add x3, x3, #1
        cmp w4, w5
        b.eq 3b
        add x0, x0, #1
        b 2b
    4:  adr x2, boot_refusal
        mov x1, #0x09000000
    5:  ldrb w3, [x2], #1
        cbz w3, 9f
    6:  ldr w4, [x1, #0x18]             /* its flags: full */
        tbnz w4, #5, 6b
        str w3, [x1]
        b 5b
    9:  movz w0, #0x8
        movk w0, #0x8400, lsl #16       /* PSCI SYSTEM_OFF */
        mov w19, w0
        hvc #0
        mov w0, w19
        smc #0
    8:  wfe
        b 8b

    /* Turns translation on with the boot tables. */
    boot_translate:
        ldr x1, ={mair}
        msr mair_el2, x1
        ldr x1, ={tcr}
        mrs x2, id_aa64mmfr0_el1
        and x2, x2, #0xf
        mov x3, #5                      /* no more than 48 bits */
        cmp x2, x3
        csel x2, x2, x3, lo
        orr x1, x1, x2, lsl #{ps_shift}
        msr tcr_el2, x1
        adrp x1, boot_l0
        msr ttbr0_el2, x1
        isb
        tlbi alle2
        ic iallu
        dsb nsh
        isb
        ldr x1, ={sctlr_boot}
        msr sctlr_el2, x1
        isb
        ret

    /* Drops cached lines from X0 up to X1. */
    boot_invalidate:
        mrs x2, ctr_el0
        ubfx x2, x2, #16, #4
        mov x3, #4
        lsl x2, x3, x2
    1:  dc ivac, x0
        add x0, x0, x2
        cmp x0, x1
        b.lo 1b
        dsb sy
        ret
    .ltorg

    boot_uart_name:
        .asciz "pl011@9000000"
    boot_refusal:
        .ascii "[    0.000000] cpu0 error cannot start: this machine boots at EL1, where no guests can be run "
        .ascii "(on QEMU: `-machine virt,virtualization=on`)\r\n"
        .asciz "[    0.000000] cpu0 end   the machine ends with status {refused}\r\n"
    .balign 4

    .section .boot.bss, "aw", @nobits
    .balign 4096
    .global boot_l0
    boot_l0: .skip 4096
    boot_l1_low: .skip 4096
    boot_l1_high: .skip 4096
    boot_l2_high: .skip 4096
    boot_bss_tables_end:
    .global boot_device_tree
    boot_device_tree: .skip {device_tree_limit} + 16
    .balign 4096
    boot_bss_end:
    "#,
    device_tree_limit = const DEVICE_TREE_LIMIT,
    image_blocks = const IMAGE_BLOCKS,
    stack = sym BOOT_STACK,
    stack_bytes = const BOOT_STACK_BYTES,
    main = sym boot_main,
    mair = const mair::VALUE,
    tcr = const tcr_el2::FOUR_LEVELS,
    ps_shift = const tcr_el2::PS_SHIFT,
    sctlr_off = const sctlr::EL2_RES1,
    refused = const abi::exit_code::qemu_status(abi::exit_code::REFUSED),
    sctlr_boot = const sctlr::EL2_RES1 | sctlr::M | sctlr::C | sctlr::I | sctlr::SA,
);

/// Blocks of 2 MiB that the boot tables map for the image.
const IMAGE_BLOCKS: u64 = 16;

/// Bytes of the stack that is used until a guarded one exists.
const BOOT_STACK_BYTES: usize = 128 << 10;

/// The stack until a guarded one exists.
#[repr(C, align(16))]
struct BootStack(core::cell::UnsafeCell<[u8; BOOT_STACK_BYTES]>);

// SAFETY: nothing in Rust touches it; it is memory for the boot pCPU's stack pointer.
unsafe impl Sync for BootStack {}

static BOOT_STACK: BootStack = BootStack(core::cell::UnsafeCell::new([0; BOOT_STACK_BYTES]));

/// Content of the device tree, once it was read.
static MACHINE: Once<Machine> = Once::new();

/// UEFI's data, if UEFI has started the image.
static HANDOVER: Once<Handover> = Once::new();

/// The first function in Rust: on the boot stack and the boot tables.
extern "C" fn boot_main(image: u64, device_tree_bytes: usize) -> ! {
    irq::load();
    counter::start();
    let handover = efi::handed_over().map(|handover| HANDOVER.call_once(|| handover));
    let Ok(machine) = device_tree::read(device_tree(device_tree_bytes), handover) else {
        // The address of a UART is unknown.
        power::exit(abi::exit_code::REFUSED)
    };
    let machine = MACHINE.call_once(|| machine);
    power::init(machine);
    // SAFETY: once, on the boot tables; the device tree is the only source.
    unsafe { paging::init(&machine.memory, Hpa(image), machine.payload) };
    uart_log::init();
    uart_log::open();
    let top = paging::map_stack(STACK_BYTES);
    // SAFETY: a fresh stack, and nothing on the old one is needed by `on_guarded_stack`.
    unsafe {
        asm!(
            "mov sp, x0",
            "mov x29, xzr",
            "mov x30, xzr",
            "bl {main}",
            "brk #1",
            in("x0") top.0,
            main = sym on_guarded_stack,
            options(noreturn),
        )
    }
}

/// The rest of the boot pCPU's way, on its final stack.
extern "C" fn on_guarded_stack(stack: u64) -> ! {
    let machine = MACHINE.get().expect("set before the stack was switched");
    let boot = Boot { payload: payload(machine), command_line: machine.command_line };
    if let Some(level) = boot.option("log") {
        uart_log::set_level(level);
    }
    if let Some(loss) = machine.memory.loss() {
        log::warn!("{loss}");
    }

    percpu::make(machine, Hva(stack));
    percpu::install(cpu::by_id(CpuId(0)));
    if let Err(why) = gic::init_boot(machine) {
        log::error!("cannot use the interrupt controller: {why}");
        power::exit(abi::exit_code::REFUSED)
    }
    iommu::init(machine);
    control_port::open();
    id_registers::add_this_cpu();
    scheduler::threads::choose(boot.option("smt"));
    let all_steps = boot.option("selftest") == Some("all-steps");
    speculation::choose(boot.option("mitigations"), weaknesses::ignored(&boot), all_steps, machine);
    speculation::add_this_cpu();
    smp::start_others();
    log::info!(
        "{} pCPUs, {} MiB free, counter {} kHz, PSCI by {}",
        cpu::count(),
        crate::frames::free_bytes() >> 20,
        counter::hz() / 1000,
        machine.conduit.name(),
    );
    speculation::report();

    // A loader for AArch64 passes one file, the payload.
    crate::start(&boot, core::iter::empty().collect())
}

/// Content of the device tree.
pub(in crate::arch::aarch64) fn machine() -> Option<&'static Machine> {
    MACHINE.get()
}

/// The copy of the device tree that the entry has made.
fn device_tree(bytes: usize) -> &'static [u8] {
    unsafe extern "C" {
        static boot_device_tree: u8;
    }
    // SAFETY: the entry code has filled this many bytes of its reserved space, and nothing changes them any more.
    unsafe { core::slice::from_raw_parts(&raw const boot_device_tree, bytes.min(DEVICE_TREE_LIMIT)) }
}

/// The boot module's bytes, if they are in RAM.
fn payload(machine: &'static Machine) -> Option<&'static [u8]> {
    let range: HpaRange = machine.payload?;
    if !machine.memory.is_ram(&range) {
        log::warn!("the initrd at {} is not in RAM, ignored", range.start);
        return None;
    }
    let start = direct_map(range.start).0 as *const u8;
    // SAFETY: RAM in the direct map that was kept out of the pool, so no code ever writes it.
    Some(unsafe { core::slice::from_raw_parts(start, usize::try_from(range.bytes()).ok()?) })
}
