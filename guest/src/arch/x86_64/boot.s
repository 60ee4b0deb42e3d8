# Entry by PVH, entry of further CPUs, and the common way into long mode (AT&T syntax).

# The note by which a loader recognises the entry: owner "Xen", type 18 = XEN_ELFNOTE_PHYS32_ENTRY, an 8-byte address.
.section .note.pvh, "a", @note
.balign 4
    .long 4
    .long 8
    .long 18
    .asciz "Xen"
    .quad pvh_entry

.section .text.boot, "ax", @progbits
.code32
.globl pvh_entry
pvh_entry:
    cli
    cld
    # EBX: physical address of hvm_start_info.
    movl %ebx, boot_start_info

    # Identity map of the first 4 GiB by 2 MiB pages. The last GiB holds devices: uncached (PCD, PWT).
    movl $BOOT_DIRECTORIES, %edi
    movl $0x83, %eax
    xorl %ecx, %ecx
1:  movl %eax, (%edi)
    movl $0, 4(%edi)
    addl $0x200000, %eax
    addl $8, %edi
    incl %ecx
    cmpl $1536, %ecx
    jne 2f
    orl $0x18, %eax
2:  cmpl $2048, %ecx
    jne 1b

    movl $BOOT_DIRECTORIES + 3, %eax
    movl $BOOT_POINTERS, %edi
    movl $4, %ecx
3:  movl %eax, (%edi)
    addl $0x1000, %eax
    addl $8, %edi
    decl %ecx
    jnz 3b
    movl $BOOT_POINTERS + 3, BOOT_ROOT

# Both the first CPU and those from the trampoline come here, in flat protected mode.
enter_long_mode:
    movl $BOOT_ROOT, %eax
    movl %eax, %cr3
    # PAE, OSFXSR, OSXMMEXCPT.
    movl $0x620, %eax
    movl %eax, %cr4
    # EFER.LME
    movl $0xc0000080, %ecx
    rdmsr
    orl $0x100, %eax
    wrmsr
    # PG, WP, NE, MP, PE; caches on.
    movl $0x80010033, %eax
    movl %eax, %cr0
    lgdt boot_gdt_pointer
    ljmpl $0x08, $long_mode

.code64
long_mode:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    xorl %eax, %eax
    movw %ax, %fs
    movw %ax, %gs
    movq boot_stack(%rip), %rsp
    movl boot_index(%rip), %edi
    movl boot_start_info(%rip), %esi
    xorl %ebp, %ebp
    call enter_rust
    ud2

# Copied to TRAMPOLINE (0x8000); a further CPU starts here in real mode with CS:IP = 0800:0000.
.globl trampoline_start, trampoline_end
.balign 16
trampoline_start:
.code16
    cli
    cld
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl 0x8000 + trampoline_gdt_pointer - trampoline_start
    movl %cr0, %eax
    andl $0x9fffffff, %eax
    orl $1, %eax
    movl %eax, %cr0
    ljmpl $0x18, $(0x8000 + trampoline_protected - trampoline_start)
.code32
trampoline_protected:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    movl $enter_long_mode, %eax
    jmp *%eax
.balign 8
trampoline_gdt_pointer:
    .word 31
    .long boot_gdt
trampoline_end:

.section .data.boot, "aw", @progbits
.balign 16
# Null, 64-bit code, data, 32-bit code.
boot_gdt:
    .quad 0
    .quad 0x00af9b000000ffff
    .quad 0x00cf93000000ffff
    .quad 0x00cf9b000000ffff
boot_gdt_pointer:
    .word 31
    .long boot_gdt
    .long 0
.balign 8
.globl boot_stack, boot_index, boot_start_info
boot_stack:
    .quad STACKS + STACK_BYTES
boot_index:
    .long 0
boot_start_info:
    .long 0
.text
.code64
