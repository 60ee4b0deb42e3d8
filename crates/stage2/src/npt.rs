//! Nested page tables (NPT) of AMD SVM: the format of long-mode page tables (APM vol. 2, 5.3 and 15.25).
//!
//! Two things are special to nested tables. The processor walks them as if the access came from user mode, so every
//! entry has the User bit (15.25.5). And it uses the *host's* CR4 and EFER for them at VMRUN: four levels because
//! the host runs with four, and No-Execute exists because the host sets EFER.NXE.

use crate::{Access, Entry, Format, Memory};
use addr::{Hpa, PageSize};

/// Bits of an entry (APM vol. 2, 5.3.3 and 5.4).
const PRESENT: u64 = 1 << 0;
const WRITE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const WRITE_THROUGH: u64 = 1 << 3;
const CACHE_DISABLE: u64 = 1 << 4;
/// Leaf above level 0. At level 0 the same bit is a part of the memory type and stays clear.
const LARGE: u64 = 1 << 7;
const NO_EXECUTE: u64 = 1 << 63;
/// Bits 51:12.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The nested page-table format of SVM with four levels: GPAs below 2^48.
#[derive(Clone, Copy, Debug)]
pub struct Npt {
    /// Whether the processor has 1 GiB pages (CPUID 8000_0001 EDX bit 26).
    pub one_gib_pages: bool,
}

impl Format for Npt {
    fn levels(&self) -> u32 {
        4
    }

    fn input_bits(&self) -> u32 {
        48
    }

    fn largest_leaf(&self) -> PageSize {
        if self.one_gib_pages { PageSize::Size1G } else { PageSize::Size2M }
    }

    fn host_limit(&self) -> Hpa {
        Hpa(1 << 52)
    }

    /// Present means readable, so only a page that can be read can be written or executed.
    fn expresses(&self, access: Access) -> bool {
        access.read
    }

    fn table(&self, hpa: Hpa) -> u64 {
        hpa.0 | PRESENT | WRITE | USER
    }

    fn leaf(&self, hpa: Hpa, size: PageSize, access: Access, memory: Memory) -> u64 {
        let large = if size == PageSize::Size4K { 0 } else { LARGE };
        let cache = match memory {
            Memory::Normal => 0,
            // Entry 3 of the host's PAT, which is uncacheable from reset on.
            Memory::Device => WRITE_THROUGH | CACHE_DISABLE,
        };
        hpa.0 | PRESENT | USER | large | cache | rights(access)
    }

    fn decode(&self, level: u32, bits: u64) -> Entry {
        if bits & PRESENT == 0 {
            return Entry::Empty;
        }
        let hpa = Hpa(bits & ADDRESS);
        if level == 0 || bits & LARGE != 0 {
            let access = Access { read: true, write: bits & WRITE != 0, execute: bits & NO_EXECUTE == 0 };
            Entry::Leaf { hpa, access }
        } else {
            Entry::Table(hpa)
        }
    }

    fn with_access(&self, bits: u64, access: Access) -> u64 {
        bits & !(WRITE | NO_EXECUTE) | rights(access)
    }

    fn part(&self, bits: u64, size: PageSize, index: u64) -> u64 {
        let offset = index << size.shift();
        let large = if size == PageSize::Size4K { 0 } else { LARGE };
        (bits & !LARGE | large) + offset
    }
}

fn rights(access: Access) -> u64 {
    let write = if access.write { WRITE } else { 0 };
    let no_execute = if access.execute { 0 } else { NO_EXECUTE };
    write | no_execute
}
