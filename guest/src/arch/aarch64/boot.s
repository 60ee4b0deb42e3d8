/*
 * The header of a Linux Image (Linux, Documentation/arch/arm64/booting.rst), the entry from the loader with the device
 * tree in X0, the entry of further CPUs with their index in X0, and the common way to translation and Rust.
 */
.section .text.head, "ax"
    b boot_first
    .long 0
    .quad 0x80000                       /* behind the start of RAM */
    .quad image_bytes
    .quad 2                             /* little-endian, 4 KiB pages, at the start of RAM */
    .quad 0, 0, 0
    .ascii "ARM\x64"
    .long 0

boot_first:
    msr daifset, #0xf
    mov x19, x0
    mov x20, #0
    b boot_any

.globl boot_further
boot_further:
    msr daifset, #0xf
    mov x19, #0
    mov x20, x0

boot_any:
    /* Attribute 0: normal memory, written back. Attribute 1: a device (nGnRE). */
    mov x0, #0x04ff
    msr mair_el1, x0
    /* 48 bits by TTBR0 alone, 4 KiB, walks written back and inner shareable; addresses as wide as the processor has. */
    ldr x0, =0x803510
    mrs x1, id_aa64mmfr0_el1
    and x1, x1, #7
    orr x0, x0, x1, lsl #32
    msr tcr_el1, x0
    adrp x0, boot_root
    msr ttbr0_el1, x0
    msr ttbr1_el1, xzr
    dsb sy
    tlbi vmalle1
    ic iallu
    dsb nsh
    isb
    /* What must be one, translation, caches. */
    ldr x0, =0x30d01805
    msr sctlr_el1, x0
    /* Vector registers are for use. So would SVE and SME be: that they are not there is for others to say. */
    ldr x0, =0x3330000
    msr cpacr_el1, x0
    isb

    cbnz x20, 2f
    adrp x0, bss_start
    adrp x1, image_end
1:  stp xzr, xzr, [x0], #16
    cmp x0, x1
    b.lo 1b

2:  msr spsel, #1
    adrp x0, STACKS
    add x1, x20, #1
    ldr x2, =STACK_BYTES
    madd x0, x1, x2, x0
    mov sp, x0
    mov x29, #0
    mov x30, #0
    mov x0, x20
    mov x1, x19
    bl enter_rust
3:  wfi
    b 3b
.ltorg

/*
 * Tables: of the first 4 GiB, one to one. The first of them holds devices, which nobody executes. A table ends in 3, a
 * block in 1; 0x400 is its access flag, 0x300 inner shareable, 4 attribute 1.
 */
.section .data.boot, "aw"
.balign 4096
.globl boot_root
boot_root:
    .quad boot_pointers + 3
    .fill 511, 8, 0
boot_pointers:
    .quad 0x0060000000000405
    .quad 0x0000000040000701
    .quad 0x0000000080000701
    .quad 0x00000000c0000701
    .fill 508, 8, 0
.text
