//! From the loader into Rust, and the start of further CPUs.
//!
//! The loader enters by the boot protocol of Linux: translation off, X0 = device tree. The guest reads all that it
//! needs from the tree at once. `boot.s` turns translation on with tables in the image. A further CPU starts with
//! caches off, and reads only these tables and its own stack.

use core::arch::global_asm;
use core::sync::atomic::AtomicU64;

use spin::Once;

use super::firmware_tables::{self, Machine};
use super::{cpu_local, gic, interrupts, power, serial, tsc};
use crate::arch::ram;
use crate::arch::window::{self, Table};

/// CPUs that there is room for.
pub(crate) const MAX_CPUS: usize = 128;

/// Stack of each CPU, in bytes.
const STACK_BYTES: usize = 32 * 1024;

global_asm!(include_str!("boot.s"));
global_asm!(".globl STACK_BYTES", ".set STACK_BYTES, {bytes}", bytes = const STACK_BYTES);

unsafe extern "C" {
    /// Root of the page tables that all CPUs share.
    #[link_name = "boot_root"]
    static ROOT: Table;
    #[link_name = "boot_further"]
    static FURTHER: u8;
    #[link_name = "image_end"]
    static IMAGE_END: u8;
}

/// Root of the page tables that all CPUs share.
pub(crate) struct BootRoot;
pub(crate) static BOOT_ROOT: BootRoot = BootRoot;

impl BootRoot {
    /// The value of an entry.
    #[expect(clippy::unused_self, reason = "as below")]
    pub(crate) fn get(&self, index: usize) -> u64 {
        // SAFETY: as below.
        let root = unsafe { &ROOT };
        root.get(index)
    }

    /// Its address.
    #[expect(clippy::unused_self, reason = "as below")]
    pub(crate) fn address(&self) -> u64 {
        &raw const ROOT as u64
    }

    /// Sets an entry.
    #[expect(clippy::unused_self, reason = "stands for the table, which another file defines")]
    pub(crate) fn set(&self, index: usize, entry: u64) {
        // SAFETY: boot.s defines the table, which is accessed by atomic operations only.
        let root = unsafe { &ROOT };
        root.set(index, entry);
    }
}

#[repr(C, align(4096))]
struct Stacks([[AtomicU64; STACK_BYTES / 8]; MAX_CPUS]);

#[unsafe(no_mangle)]
static STACKS: Stacks = Stacks([const { [const { AtomicU64::new(0) }; STACK_BYTES / 8] }; MAX_CPUS]);

/// What the loader passed.
pub(crate) struct BootInfo {
    machine: Machine,
}

impl BootInfo {
    /// The command line; empty if it is not text.
    pub(crate) fn command_line(&self) -> &str {
        self.machine.command_line
    }

    pub(super) fn machine(&self) -> &Machine {
        &self.machine
    }
}

static BOOT_INFO: Once<BootInfo> = Once::new();

/// The contents of the device tree; `None` before it is read.
pub(super) fn machine() -> Option<&'static Machine> {
    BOOT_INFO.get().map(|info| &info.machine)
}

/// First Rust code of every CPU, called by `boot.s` with the CPU's index.
#[unsafe(no_mangle)]
extern "C" fn enter_rust(index: u64, device_tree: u64) -> ! {
    let index = usize::try_from(index).unwrap_or(0);
    cpu_local::load(index);
    interrupts::load_vectors();

    if index == 0 {
        let info = BOOT_INFO.call_once(|| BootInfo { machine: firmware_tables::read(device_tree) });
        power::choose(info.machine.conduit);
        serial::choose(info.machine.serial);
        window::prepare();
        let (start, bytes) = spare_memory();
        ram::set(start, bytes);
        crate::main(info)
    } else {
        gic::enable_this_cpu();
        crate::cpu::serve(index)
    }
}

/// Affinities of the CPUs in the device tree but `own`.
pub(crate) fn find_others(info: &BootInfo, own: u32) -> Option<[Option<u32>; MAX_CPUS]> {
    let mut others = info.machine.cpus().iter().copied().filter(|id| *id != own);
    (!info.machine.cpus().is_empty()).then(|| core::array::from_fn(|_| others.next()))
}

/// Starts the CPU with this affinity, which is off, as CPU `index`, and waits for `is_up`. Returns whether it came up
/// within five seconds.
pub(crate) fn start_cpu(index: usize, affinity: u32, is_up: impl Fn() -> bool) -> bool {
    if index >= MAX_CPUS || power::cpu_on(affinity.into(), entry_of_further(), index as u64) != 0 {
        return false;
    }
    let last = tsc::now() + tsc::ticks(5_000_000);
    while !is_up() {
        if tsc::now() > last {
            return false;
        }
        core::hint::spin_loop();
    }
    true
}

/// Where further CPUs start.
pub(crate) fn entry_of_further() -> u64 {
    &raw const FURTHER as u64
}

/// Unused memory: first address and bytes, both multiples of 2 MiB.
fn spare_memory() -> (u64, u64) {
    const GRAIN: u64 = 2 << 20;
    let Some(machine) = machine() else { return (0, 0) };
    let (start, bytes) = machine.memory;
    // The tree may be behind the image, or anywhere else.
    let image_end = (&raw const IMAGE_END as u64).next_multiple_of(GRAIN);
    let (tree, tree_end) = (machine.tree.0 / GRAIN * GRAIN, (machine.tree.0 + machine.tree.1).next_multiple_of(GRAIN));
    let end = (start + bytes) / GRAIN * GRAIN;
    if tree < image_end || tree >= end {
        (image_end, end.saturating_sub(image_end))
    } else if tree - image_end > end.saturating_sub(tree_end) {
        (image_end, tree - image_end)
    } else {
        (tree_end, end.saturating_sub(tree_end))
    }
}
