//! From the loader into Rust, and the start of further CPUs.
//!
//! The loader enters by PVH: 32-bit protected mode, paging off, EBX = physical address of `hvm_start_info` (Xen
//! `arch-x86/hvm/start_info.h`). The guest reads all data of the loader before it writes the other CPUs' trampoline
//! below 1 MiB. It starts CPUs one after the other, so one set of boot variables is enough.

use core::arch::global_asm;
use core::slice;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use guest_model::acpi::{self, Physical};
use spin::Once;

use super::{apic, code_pages, control, cpu_local, descriptors, hypercall, tsc};
use crate::arch::ram;
use crate::arch::window::{self, Table};

/// CPUs that there is room for.
pub(crate) const MAX_CPUS: usize = 128;

/// Stack of each CPU, in bytes.
const STACK_BYTES: usize = 32 * 1024;

/// Where the trampoline is copied to; its page number is the vector of the SIPI.
const TRAMPOLINE: u64 = 0x8000;

global_asm!(include_str!("boot.s"), options(att_syntax));
global_asm!(".globl STACK_BYTES", ".set STACK_BYTES, {bytes}", bytes = const STACK_BYTES);

/// The kernel maps memory from here on as uncached.
const DEVICES: u64 = 3 << 30;

/// Root of the page tables that all CPUs share.
#[unsafe(no_mangle)]
pub(crate) static BOOT_ROOT: Table = Table::new();
/// Entries of 1 GiB below the root's first entry; four are used.
#[unsafe(no_mangle)]
static BOOT_POINTERS: Table = Table::new();
/// Entries of 2 MiB: the first 4 GiB.
#[unsafe(no_mangle)]
static BOOT_DIRECTORIES: [Table; 4] = [const { Table::new() }; 4];

#[repr(C, align(4096))]
struct Stacks([[AtomicU64; STACK_BYTES / 8]; MAX_CPUS]);

#[unsafe(no_mangle)]
static STACKS: Stacks = Stacks([const { [const { AtomicU64::new(0) }; STACK_BYTES / 8] }; MAX_CPUS]);

unsafe extern "C" {
    #[link_name = "boot_stack"]
    static BOOT_STACK: AtomicU64;
    #[link_name = "boot_index"]
    static BOOT_INDEX: AtomicU32;
    #[link_name = "trampoline_start"]
    static TRAMPOLINE_START: u8;
    #[link_name = "trampoline_end"]
    static TRAMPOLINE_END: u8;
}

/// What the loader passed.
pub(crate) struct BootInfo {
    command_line: [u8; 2048],
    length: usize,
    /// Physical address of the ACPI RSDP; zero if the loader passes none.
    rsdp: u64,
}

impl BootInfo {
    /// The command line; empty if it is not text.
    pub(crate) fn command_line(&self) -> &str {
        self.command_line.get(..self.length).and_then(|bytes| str::from_utf8(bytes).ok()).unwrap_or("")
    }
}

static BOOT_INFO: Once<BootInfo> = Once::new();

/// The lowest 4 GiB, as they are mapped.
struct IdentityMap;

impl Physical for IdentityMap {
    fn bytes(&self, at: u64, length: usize) -> Option<&[u8]> {
        let end = at.checked_add(u64::try_from(length).ok()?)?;
        if at == 0 || end > 1 << 32 {
            return None;
        }
        // SAFETY: the range is mapped one to one. Callers read firmware tables, which no one writes any more.
        Some(unsafe { slice::from_raw_parts(at as *const u8, length) })
    }
}

/// First Rust code of every CPU, called by `boot.s` with the CPU's index.
#[unsafe(no_mangle)]
extern "C" fn enter_rust(index: u32, start_info: u32) -> ! {
    descriptors::load(index as usize);
    cpu_local::load(index);
    control::enable_vector_state();

    if index == 0 {
        hypercall::prepare();
        let info = BOOT_INFO.call_once(|| read_start_info(u64::from(start_info)));
        window::prepare();
        code_pages::prepare(window::pointers());
        crate::main(info)
    } else {
        apic::enable_this_cpu();
        crate::cpu::serve(index as usize)
    }
}

/// Copies the needed fields of `hvm_start_info`: magic at 0, command line at 24, RSDP at 32, memory map at 40.
fn read_start_info(at: u64) -> BootInfo {
    let mut info = BootInfo { command_line: [0; 2048], length: 0, rsdp: 0 };
    let field =
        |offset: u64| -> Option<u64> { IdentityMap.bytes(at + offset, 8)?.try_into().ok().map(u64::from_le_bytes) };
    if field(0).is_none_or(|magic| magic & 0xffff_ffff != 0x336e_c578) {
        return info;
    }

    info.rsdp = field(32).unwrap_or(0);
    let entries = field(48).unwrap_or(0) & 0xffff_ffff;
    if let Some(map) = field(40).filter(|map| *map != 0) {
        ram::find((0..entries).map_while(|entry| memory_map_entry(map + entry * 24)));
    }
    if let Some(text) = field(24).and_then(|text| IdentityMap.bytes(text, info.command_line.len())) {
        info.length = text.iter().position(|byte| *byte == 0).unwrap_or(0);
        info.command_line[..info.length].copy_from_slice(&text[..info.length]);
    }
    info
}

/// Physical address of the I/O APIC; zero if there is none.
static IO_APIC: AtomicU64 = AtomicU64::new(0);

/// Physical address of PCI's configuration space (ECAM); zero if there is none.
static ECAM: AtomicU64 = AtomicU64::new(0);

/// Physical address of the configuration spaces of PCI bus 0, where the MCFG names them.
pub(crate) fn ecam() -> Option<u64> {
    Some(ECAM.load(Ordering::Relaxed)).filter(|at| *at != 0)
}

/// Physical address of the I/O APIC that the MADT names.
pub(crate) fn io_apic() -> Option<u64> {
    Some(IO_APIC.load(Ordering::Relaxed)).filter(|at| *at != 0)
}

/// APIC ids of the CPUs in the MADT except `own`, if interrupts can reach them. Call it once: afterwards further CPUs
/// can start, and no code reads the tables again.
pub(crate) fn find_others(info: &BootInfo, own: u32) -> Option<[Option<u32>; MAX_CPUS]> {
    let madt = acpi::madt(&IdentityMap, info.rsdp)?;
    IO_APIC.store(madt.io_apic().unwrap_or(0), Ordering::SeqCst);
    ECAM.store(acpi::ecam(&IdentityMap, info.rsdp).unwrap_or(0), Ordering::SeqCst);
    let reachable = if apic::is_x2apic() { u32::MAX } else { 0xfe };
    let mut others = madt.cpus().filter(|id| *id != own && *id <= reachable);
    let others = core::array::from_fn(|_| others.next());
    write_trampoline();
    Some(others)
}

/// Begin and end of an entry of the memory map: address, size, type (1 is RAM). The range is empty for an entry that is
/// no RAM, or that lies above 3 GiB, where devices are mapped.
fn memory_map_entry(at: u64) -> Option<(u64, u64)> {
    let word =
        |offset: u64| -> Option<u64> { IdentityMap.bytes(at + offset, 8)?.try_into().ok().map(u64::from_le_bytes) };
    let (start, bytes, kind) = (word(0)?, word(8)?, word(16)? & 0xffff_ffff);
    Some(if kind == 1 { (start, start.saturating_add(bytes).min(DEVICES)) } else { (0, 0) })
}

/// Puts the code that further CPUs start in below 1 MiB. Call it when nothing that the loader left there, ACPI tables
/// included, is needed any more, and before [`start_cpu`].
fn write_trampoline() {
    let start = (&raw const TRAMPOLINE_START) as usize;
    let end = (&raw const TRAMPOLINE_END) as usize;
    // SAFETY: the source is the code between two labels of boot.s. The destination is conventional memory below 1 MiB,
    // identity-mapped, whose former content the caller no longer needs.
    unsafe { core::ptr::copy_nonoverlapping(start as *const u8, TRAMPOLINE as *mut u8, end - start) };
}

/// Starts the CPU with `apic_id` as CPU `index` by INIT, SIPI, SIPI (APM vol. 2, 16.9), and waits for `is_up`. Returns
/// whether it came up within five seconds.
pub(crate) fn start_cpu(index: usize, apic_id: u32, is_up: impl Fn() -> bool) -> bool {
    let top = STACKS.0.get(index).map(|stack| stack.as_ptr_range().end as u64);
    let (Some(top), Ok(index)) = (top, u32::try_from(index)) else { return false };

    // SAFETY: boot.s defines the variable, and CPUs read it only between here and the wait below.
    let (boot_stack, boot_index) = unsafe { (&BOOT_STACK, &BOOT_INDEX) };
    boot_stack.store(top, Ordering::SeqCst);
    boot_index.store(index, Ordering::SeqCst);

    apic::send_init(apic_id);
    tsc::pause_until(tsc::now() + tsc::ticks(200));
    apic::send_startup(apic_id, TRAMPOLINE);
    let second = tsc::now() + tsc::ticks(20_000);
    let last = tsc::now() + tsc::ticks(5_000_000);

    let mut repeated = false;
    loop {
        if is_up() {
            return true;
        }
        let now = tsc::now();
        if now > second && !repeated {
            repeated = true;
            apic::send_startup(apic_id, TRAMPOLINE);
        }
        if now > last {
            return false;
        }
        core::hint::spin_loop();
    }
}
