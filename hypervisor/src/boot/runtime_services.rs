//! UEFI's runtime services (UEFI Specification 2.10, chapter 8), for the VM that has the machine's devices: its kernel
//! calls them as it does without the hypervisor.
//!
//! A kernel finds them by the system table, and learns from the memory map which memory they use. The table is in such
//! memory, and stays as firmware has made it: the first call changes addresses in it, and the kernel reads them there.
//! But other tables that it leads to may be in RAM, which nobody keeps from now on. They are taken off its list. The
//! map is the boot loader's copy, in RAM as well, so the hypervisor copies what it needs, and writes it again for the
//! kernel ([`RuntimeServices::map`]): the memory of the services alone. All other memory is in the kernel's own map.

use core::mem::offset_of;

use addr::{Gpa, Hpa, HpaRange, PAGE_BYTES};
use uefi_raw::table::boot::{MemoryAttribute, MemoryDescriptor};
use uefi_raw::table::configuration::ConfigurationTable;
use uefi_raw::table::system::SystemTable;

/// Bytes of the system table, of an entry of its list of tables, and of a descriptor, all for 64 bits.
const SYSTEM_TABLE_SIZE: usize = size_of::<SystemTable>();
const TABLE_SIZE: usize = size_of::<ConfigurationTable>();
const DESCRIPTOR_SIZE: usize = size_of::<MemoryDescriptor>();
/// The size that descriptors have in [`RuntimeServices::map`]: that of version 1, as kernels know it.
pub const DESCRIPTOR_BYTES: u32 = 40;
/// Maximum number of tables on the list, and of descriptors. Firmware has 10 to 30 of each.
const TABLES_LIMIT: u64 = 256;
const DESCRIPTORS_LIMIT: usize = 128;

const _: () = assert!(SYSTEM_TABLE_SIZE == 120 && TABLE_SIZE == 24 && DESCRIPTOR_SIZE == DESCRIPTOR_BYTES as usize);

/// What firmware says about its runtime services.
pub struct RuntimeServices {
    system_table: Hpa,
    descriptors: [[u8; DESCRIPTOR_SIZE]; DESCRIPTORS_LIMIT],
    /// Zero: there are no services.
    count: usize,
}

/// Why a kernel does not get them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The system table, or the list in it, is out of reach.
    OutOfReach,
    /// There is no system table for 64 bits where it should be.
    NoSystemTable,
    /// The system table, or the list, is not in memory of the services.
    NotKept,
    /// There are too many tables or too much memory.
    TooMany,
}

impl core::fmt::Display for Refused {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::OutOfReach => f.write_str("UEFI's system table is out of reach"),
            Self::NoSystemTable => f.write_str("UEFI's system table is not where the boot loader says"),
            Self::NotKept => f.write_str("UEFI's system table is not in memory of its runtime services"),
            Self::TooMany => write!(
                f,
                "UEFI has more than {TABLES_LIMIT} configuration tables, or more than {DESCRIPTORS_LIMIT} pieces of \
                 memory for its runtime services"
            ),
        }
    }
}

/// Firmware's memory.
pub trait FirmwareMemory {
    /// Copies bytes. Returns whether they are within reach.
    fn read(&self, at: u64, into: &mut [u8]) -> bool;
    /// Clears bytes that were read.
    fn clear(&mut self, at: u64, bytes: usize);
}

impl RuntimeServices {
    /// None.
    pub const fn none() -> Self {
        Self { system_table: Hpa(0), descriptors: [[0; DESCRIPTOR_SIZE]; DESCRIPTORS_LIMIT], count: 0 }
    }

    /// Takes the system table at this address, and those descriptors of the memory map that the services use. Tables
    /// that lead to memory for which `is_lost` holds are taken off the system table's list.
    ///
    /// # Errors
    /// They cannot be read or believed, or there is no room. Then there are no services.
    pub fn set(
        &mut self,
        system_table: u64,
        map: &[u8],
        descriptor_bytes: usize,
        is_lost: impl Fn(&HpaRange) -> bool,
        memory: &mut impl FirmwareMemory,
    ) -> Result<(), Refused> {
        self.count = 0;
        let mut table = [0; SYSTEM_TABLE_SIZE];
        if !memory.read(system_table, &mut table) {
            return Err(Refused::OutOfReach);
        }
        if number(&table, 0) != SystemTable::SIGNATURE {
            return Err(Refused::NoSystemTable);
        }

        let descriptors = map.chunks_exact(descriptor_bytes.max(DESCRIPTOR_SIZE)).filter_map(|one| one.first_chunk());
        let mut kept = 0;
        for descriptor in descriptors.filter(|one| memory_of(one).is_some_and(|memory| !is_lost(&memory))) {
            *self.descriptors.get_mut(kept).ok_or(Refused::TooMany)? = *descriptor;
            kept += 1;
        }
        let count = number(&table, offset_of!(SystemTable, number_of_configuration_table_entries));
        let list = number(&table, offset_of!(SystemTable, configuration_table));
        if count > TABLES_LIMIT {
            return Err(Refused::TooMany);
        }
        let list = HpaRange::new(Hpa(list), count * TABLE_SIZE as u64).ok_or(Refused::OutOfReach)?;
        let table = HpaRange::new(Hpa(system_table), SYSTEM_TABLE_SIZE as u64).ok_or(Refused::OutOfReach)?;
        for place in [table, list] {
            let has_all = |memory: HpaRange| memory.contains(place.start) && place.end() <= memory.end();
            if !self.descriptors[..kept].iter().filter_map(memory_of).any(has_all) {
                return Err(Refused::NotKept);
            }
        }

        for at in (list.start.0..list.end().0).step_by(TABLE_SIZE) {
            let mut entry = [0; TABLE_SIZE];
            if !memory.read(at, &mut entry) {
                return Err(Refused::OutOfReach);
            }
            // How long a table is only its reader knows.
            let start = Hpa(number(&entry, offset_of!(ConfigurationTable, vendor_table)));
            if HpaRange::new(start, 1).is_none_or(|first| is_lost(&first)) {
                memory.clear(at, TABLE_SIZE);
            }
        }
        (self.system_table, self.count) = (Hpa(system_table), kept);
        Ok(())
    }

    /// The system table, which is at the same address for the VM. `None`: there are no services.
    pub fn system_table(&self) -> Option<Gpa> {
        (self.count != 0).then_some(Gpa(self.system_table.0))
    }

    /// The memory map for a kernel: descriptors of [`DESCRIPTOR_BYTES`].
    pub fn map(&self) -> &[u8] {
        self.descriptors[..self.count].as_flattened()
    }
}

fn number(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The memory of a descriptor, if the services use it and it is a range.
fn memory_of(descriptor: &[u8; DESCRIPTOR_SIZE]) -> Option<HpaRange> {
    let field = |at: usize| number(descriptor, at);
    let is_used = MemoryAttribute::from_bits_retain(field(offset_of!(MemoryDescriptor, att)));
    let bytes = field(offset_of!(MemoryDescriptor, page_count)).checked_mul(PAGE_BYTES)?;
    let range = HpaRange::new(Hpa(field(offset_of!(MemoryDescriptor, phys_start))), bytes)?;
    (is_used.contains(MemoryAttribute::RUNTIME) && range.bytes() > 0).then_some(range)
}

#[cfg(test)]
mod tests {
    use addr::{Gpa, Hpa, HpaRange, PAGE_BYTES};

    use super::{DESCRIPTORS_LIMIT, FirmwareMemory, Refused, RuntimeServices, TABLES_LIMIT, number};

    const SYSTEM_TABLE: u64 = 0x1000;
    const LIST: u64 = 0x1100;
    const RUNTIME: u64 = 1 << 63;
    /// The page with both.
    const HOME: (u64, u64, u64) = (1, 1, RUNTIME | 0xf);

    struct Memory(Vec<u8>);

    impl Memory {
        /// From 0 on, with a system table and a list with these tables.
        fn new(tables: &[u64]) -> Self {
            let mut memory = Self(vec![0; 0x4000]);
            let list =
                (0..).zip(tables).flat_map(|(at, table)| [(LIST + at * 24, at + 1), (LIST + at * 24 + 16, *table)]);
            for (at, value) in list {
                memory.put(at, value);
            }
            for (at, value) in [(0, 0x5453_5953_2049_4249), (104, tables.len() as u64), (112, LIST)] {
                memory.put(SYSTEM_TABLE + at, value);
            }
            memory
        }

        fn put(&mut self, at: u64, value: u64) {
            let at = usize::try_from(at).expect("is small");
            self.0[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }

        fn tables(&self) -> Vec<[u64; 2]> {
            let count = number(&self.0, 0x1000 + 104);
            let word = |at: u64| number(&self.0, usize::try_from(at).expect("is small"));
            (0..count).map(|at| [word(LIST + at * 24), word(LIST + at * 24 + 16)]).collect()
        }
    }

    impl FirmwareMemory for Memory {
        fn read(&self, at: u64, into: &mut [u8]) -> bool {
            let from = usize::try_from(at).ok().and_then(|at| self.0.get(at..)?.get(..into.len()));
            from.map(|from| into.copy_from_slice(from)).is_some()
        }

        fn clear(&mut self, at: u64, bytes: usize) {
            let at = usize::try_from(at).expect("was read");
            self.0[at..at + bytes].fill(0);
        }
    }

    /// A map of these ranges: first page, pages, attributes. Descriptors are longer than they must be, as in firmware.
    fn map(ranges: &[(u64, u64, u64)]) -> Vec<u8> {
        let descriptor = |&(first, pages, attributes): &(u64, u64, u64)| {
            let mut bytes = [0xa5; 48];
            for (at, value) in [(0, 6), (8, first * PAGE_BYTES), (16, 0), (24, pages), (32, attributes)] {
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
            bytes
        };
        ranges.iter().flat_map(descriptor).collect()
    }

    fn set(memory: &mut Memory, map: &[u8]) -> Result<RuntimeServices, Refused> {
        let mut services = RuntimeServices::none();
        services.set(SYSTEM_TABLE, map, 48, is_lost, memory).map(|()| services)
    }

    /// RAM that is free after the start.
    fn is_lost(range: &HpaRange) -> bool {
        HpaRange::new(Hpa(0x10_0000), 0x10_0000).expect("a range").overlaps(range)
    }

    #[test]
    fn kernel_finds_the_memory_of_the_services_and_the_tables_that_are_still_there() {
        let all = [(0x20, 1, 0xf), HOME, (0x300, 2, RUNTIME | 0xf), (0x180, 1, RUNTIME), (0x400, 0x100, RUNTIME | 1)];
        let mut memory = Memory::new(&[0x3_0000, 0x10_8000, 0x4_0008]);
        let services = set(&mut memory, &map(&all)).expect("all is well");
        assert_eq!(services.system_table(), Some(Gpa(SYSTEM_TABLE)));
        assert_eq!(memory.tables(), [[1, 0x3_0000], [0, 0], [3, 0x4_0008]]);
        let map = services.map();
        assert_eq!(map.len(), 3 * 40, "neither memory without services, nor memory that is lost");
        let shown: Vec<_> = map.chunks(40).map(|one| [number(one, 8), number(one, 24), number(one, 32)]).collect();
        assert_eq!(shown, [[0x1000, 1, RUNTIME | 0xf], [0x30_0000, 2, RUNTIME | 0xf], [0x40_0000, 0x100, RUNTIME | 1]]);
    }

    #[test]
    fn without_services_there_is_no_system_table() {
        let none = RuntimeServices::none();
        assert_eq!((none.system_table(), none.map()), (None, &[][..]));
        let mut memory = Memory::new(&[0x10_8000]);
        for ranges in [&[(0x20, 1, 0xf)][..], &[(1, 1, 0xf)], &[(1, 0, RUNTIME)], &[(2, 9, RUNTIME)]] {
            assert_eq!(set(&mut memory, &map(ranges)).err(), Some(Refused::NotKept), "{ranges:x?}");
        }
        // Ends beyond the address space, and half a descriptor.
        let mut broken = map(&[(1, u64::MAX, RUNTIME), (1, 1 << 52, RUNTIME)]);
        broken.extend([0xff; 30]);
        assert_eq!(set(&mut memory, &broken).err(), Some(Refused::NotKept));
        assert_eq!(memory.tables(), [[1, 0x10_8000]], "nothing has changed");
    }

    #[test]
    fn system_table_that_cannot_be_one_is_refused() {
        let map = map(&[HOME]);
        let with = |at: u64, value: u64| {
            let mut memory = Memory::new(&[0x3_0000]);
            memory.put(SYSTEM_TABLE + at, value);
            set(&mut memory, &map).err()
        };
        assert_eq!(with(104, 1), None);
        assert_eq!(with(0, 1), Some(Refused::NoSystemTable));
        assert_eq!(with(112, u64::MAX - 8), Some(Refused::OutOfReach));
        assert_eq!(with(112, 0x3000), Some(Refused::NotKept), "it may be anything");
        assert_eq!(with(112, 0x1ff0), Some(Refused::NotKept));
        assert_eq!(with(104, u64::MAX), Some(Refused::TooMany));
        assert_eq!(with(104, TABLES_LIMIT + 1), Some(Refused::TooMany));
        let mut short = Memory::new(&[]);
        short.0.truncate(0x1010);
        assert_eq!(set(&mut short, &map).err(), Some(Refused::OutOfReach));

        let mut many: Vec<_> = (0..DESCRIPTORS_LIMIT as u64).map(|at| (0x300 + 2 * at, 1, RUNTIME)).collect();
        many.push(HOME);
        let mut memory = Memory::new(&[]);
        assert_eq!(set(&mut memory, &self::map(&many)).err(), Some(Refused::TooMany));
        assert!(set(&mut memory, &self::map(&many[1..])).is_ok());
    }
}
