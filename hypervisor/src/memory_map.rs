//! The memory map from firmware and boot loader, and the RAM derived from it.
//!
//! Such maps come from outside and may be wrong: entries overlap, are in any order, and do not fill whole pages. The
//! result is conservative: a page is RAM only if some entry says so for the whole page, and no entry says otherwise for
//! any part.

use core::fmt;

use addr::{Hpa, HpaRange, PAGE_BYTES};

/// Maximum number of entries. Firmware of large servers makes more than a hundred, before a boot loader merges them.
const LIMIT: usize = 256;

/// Use of a range of physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Free for everyone.
    Ram,
    /// RAM that holds ACPI tables.
    Acpi,
    /// Not RAM, or firmware's own.
    Reserved,
}

impl Kind {
    /// From the number that BIOS call E820h and its descendants use (ACPI 15.1).
    pub const fn of_e820(number: u32) -> Self {
        match number {
            1 => Self::Ram,
            3 | 4 => Self::Acpi,
            _ => Self::Reserved,
        }
    }
}

/// The map.
pub struct MemoryMap {
    entries: [Option<(HpaRange, Kind)>; LIMIT],
    /// Entries of RAM for which there was no room.
    left_out: u32,
}

/// There is no room for an entry that is not RAM: without it the map claims RAM that is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full;

impl Default for MemoryMap {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryMap {
    /// A machine without memory.
    pub const fn new() -> Self {
        Self { entries: [None; LIMIT], left_out: 0 }
    }

    /// Adds an entry. Extends an entry of the same kind that ends where it begins. RAM without room is left out,
    /// because missing RAM does no harm.
    ///
    /// # Errors
    /// There is no room for a range that is not RAM.
    pub fn add(&mut self, range: HpaRange, kind: Kind) -> Result<(), Full> {
        let goes_on = |&&mut (before, other): &&mut (HpaRange, Kind)| other == kind && before.end() == range.start;
        if let Some((before, _)) = self.entries.iter_mut().flatten().find(goes_on)
            && let Some(both) = HpaRange::new(before.start, before.bytes() + range.bytes())
        {
            *before = both;
            return Ok(());
        }
        if let Some(free) = self.entries.iter_mut().find(|entry| entry.is_none()) {
            *free = Some((range, kind));
            return Ok(());
        }
        self.left_out += u32::from(kind == Kind::Ram);
        if kind == Kind::Ram { Ok(()) } else { Err(Full) }
    }

    /// Adds all entries of `other`, RAM last.
    ///
    /// # Errors
    /// There is no room for an entry other than RAM.
    pub fn add_all(&mut self, other: &Self) -> Result<(), Full> {
        let entries =
            |is_ram: bool| other.entries.iter().flatten().filter(move |(_, kind)| (*kind == Kind::Ram) == is_ram);
        entries(false).chain(entries(true)).try_for_each(|(range, kind)| self.add(*range, *kind))?;
        self.left_out += other.left_out;
        Ok(())
    }

    /// All entries, in no particular order.
    pub fn entries(&self) -> impl Iterator<Item = &(HpaRange, Kind)> {
        self.entries.iter().flatten()
    }

    /// The RAM that is lost because the map has no room for it, as a line for the log.
    pub fn loss(&self) -> Option<Loss> {
        (self.left_out != 0).then_some(Loss(self.left_out))
    }

    /// Whole pages of free RAM.
    pub fn ram(&self) -> Ranges {
        self.only(|kind| kind == Kind::Ram)
    }

    /// Whole pages of RAM, with those that hold ACPI tables.
    pub fn ram_and_acpi(&self) -> Ranges {
        self.only(|kind| kind != Kind::Reserved)
    }

    /// Whether all of `range` is free RAM.
    pub fn is_ram(&self, range: &HpaRange) -> bool {
        self.ram().iter().any(|ram| ram.start <= range.start && range.end() <= ram.end())
    }

    /// Whether RAM is in `range`, free or with ACPI's tables.
    pub fn touches_ram(&self, range: &HpaRange) -> bool {
        self.ram_and_acpi().iter().any(|ram| ram.overlaps(range))
    }

    /// A page of free RAM outside of `taken` at which a CPU can start. Page 0 is left to firmware.
    pub fn start_page<'a>(&self, taken: impl IntoIterator<Item = &'a HpaRange>) -> Option<StartPage> {
        let mut free = self.ram();
        taken.into_iter().for_each(|range| free.remove(range));
        let is_free = |page: &StartPage| free.iter().any(|range| range.contains(page.hpa()));
        (1..StartPage::END).map(StartPage).find(is_free)
    }

    fn only(&self, wanted: impl Fn(Kind) -> bool) -> Ranges {
        let mut ranges = Ranges::new();
        let entries = || self.entries.iter().flatten();
        for (range, _) in entries().filter(|(_, kind)| wanted(*kind)) {
            // A page that is listed twice is added once.
            ranges.remove(range);
            ranges.push(range);
        }
        for (range, _) in entries().filter(|(_, kind)| !wanted(*kind)) {
            ranges.remove(range);
        }
        ranges
    }
}

/// Entries of RAM that a map has no room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loss(u32);

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the memory map has too many ranges; {} ranges of RAM are not used", self.0)
    }
}

/// A page at which a start-up interrupt can make a CPU begin (Intel SDM vol. 3, 9.4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StartPage(u8);

impl StartPage {
    /// The page behind the last one: 640 KiB, from where a PC has its video memory.
    const END: u8 = 0xa0;

    /// The vector of the start-up interrupt.
    pub const fn vector(self) -> u8 {
        self.0
    }

    /// Where the page is.
    pub const fn hpa(self) -> Hpa {
        Hpa(self.0 as u64 * PAGE_BYTES)
    }
}

/// Disjoint ranges of whole pages.
pub struct Ranges {
    ranges: [Option<HpaRange>; 2 * LIMIT],
}

impl Ranges {
    const fn new() -> Self {
        Self { ranges: [None; 2 * LIMIT] }
    }

    /// The ranges, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = &HpaRange> {
        self.ranges.iter().flatten()
    }

    /// Takes out every page that `taken` touches.
    pub fn remove(&mut self, taken: &HpaRange) {
        if taken.bytes() == 0 {
            return;
        }
        let first = taken.start.0 & !(PAGE_BYTES - 1);
        let end = page_up(taken.end().0);
        for index in 0..self.ranges.len() {
            let Some(range) = self.ranges[index].filter(|range| range.start.0 < end && first < range.end().0) else {
                continue;
            };
            self.ranges[index] = None;
            for (from, to) in [(range.start.0, first), (end, range.end().0)] {
                if let Some(rest) = to.checked_sub(from).and_then(|bytes| HpaRange::new(Hpa(from), bytes)) {
                    self.push(&rest);
                }
            }
        }
    }

    /// Adds the whole pages of `range`, which are not in the map yet. Pages without room are not used.
    fn push(&mut self, range: &HpaRange) {
        let first = page_up(range.start.0);
        let end = range.end().0 & !(PAGE_BYTES - 1);
        let free = self.ranges.iter_mut().find(|slot| slot.is_none());
        if let (Some(slot), true) = (free, first < end) {
            *slot = HpaRange::new(Hpa(first), end - first);
        }
    }
}

/// The next page boundary; the last one of the address space when there is no next.
fn page_up(address: u64) -> u64 {
    address.checked_next_multiple_of(PAGE_BYTES).unwrap_or(!(PAGE_BYTES - 1))
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "tests run on 64-bit hosts")]
mod tests {
    use super::{Full, Kind, Loss, MemoryMap, Ranges};
    use addr::{Hpa, HpaRange, PAGE_BYTES};

    fn range(start: u64, end: u64) -> HpaRange {
        HpaRange::new(Hpa(start), end - start).expect("start is before end")
    }

    fn map(entries: &[(u64, u64, Kind)]) -> MemoryMap {
        let mut map = MemoryMap::new();
        for &(start, end, kind) in entries {
            assert_eq!(map.add(range(start, end), kind), Ok(()));
        }
        map
    }

    fn sorted(ranges: &Ranges) -> Vec<(u64, u64)> {
        let mut all: Vec<_> = ranges.iter().map(|range| (range.start.0, range.end().0)).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn page_that_is_only_partly_ram_is_not_used() {
        let map = map(&[(0, 0x9fc00, Kind::Ram), (0x10_0800, 0x20_0000, Kind::Ram)]);
        assert_eq!(sorted(&map.ram()), [(0, 0x9f000), (0x10_1000, 0x20_0000)]);
    }

    #[test]
    fn reserved_wins_over_ram_in_either_order() {
        let expected = [(0x1000, 0x3000), (0x5000, 0x9000)];
        for entries in [
            [(0x1000, 0x9000, Kind::Ram), (0x3800, 0x4001, Kind::Reserved)],
            [(0x3800, 0x4001, Kind::Reserved), (0x1000, 0x9000, Kind::Ram)],
        ] {
            assert_eq!(sorted(&map(&entries).ram()), expected);
        }
    }

    #[test]
    fn acpi_memory_is_mapped_but_not_free() {
        let map = map(&[(0x1000, 0x4000, Kind::Ram), (0x4000, 0x6000, Kind::Acpi)]);
        assert_eq!(sorted(&map.ram()), [(0x1000, 0x4000)]);
        assert_eq!(sorted(&map.ram_and_acpi()), [(0x1000, 0x4000), (0x4000, 0x6000)]);
        assert!(map.is_ram(&range(0x2001, 0x3fff)));
        assert!(!map.is_ram(&range(0x3000, 0x4001)));
    }

    #[test]
    fn cpus_start_at_the_first_free_page_below_640_kib() {
        let vector = |map: &MemoryMap, taken: &[HpaRange]| map.start_page(taken).map(super::StartPage::vector);
        let usual =
            map(&[(0, 0x9fc00, Kind::Ram), (0x9fc00, 0xa0000, Kind::Reserved), (0x10_0000, 0x20_0000, Kind::Ram)]);
        assert_eq!(vector(&usual, &[]), Some(1));
        assert_eq!(usual.start_page(&[]).map(super::StartPage::hpa), Some(Hpa(0x1000)));
        // A boot loader under UEFI leaves small modules there.
        assert_eq!(vector(&usual, &[range(0x1800, 0x9001)]), Some(0x0a));
        assert_eq!(vector(&usual, &[range(0x1800, 0x3001), range(0x4000, 0x5000), range(0x5000, 0x9000)]), Some(0x09));
        assert_eq!(vector(&usual, &[range(0x1000, 0x9f000)]), None);
        let crumbs = map(&[(0, 0x1000, Kind::Ram), (0x5800, 0x7800, Kind::Ram), (0x8000, 0x9000, Kind::Acpi)]);
        assert_eq!(vector(&crumbs, &[]), Some(6));
        let high = map(&[(0xa_0000, 0xb_0000, Kind::Ram), (0x10_0000, 0x20_0000, Kind::Ram)]);
        assert_eq!(vector(&high, &[]), None);
    }

    #[test]
    fn unknown_e820_types_are_reserved() {
        assert_eq!([0, 1, 2, 3, 4, 5, 0xf000_0000].map(Kind::of_e820), {
            [Kind::Reserved, Kind::Ram, Kind::Reserved, Kind::Acpi, Kind::Acpi, Kind::Reserved, Kind::Reserved]
        });
    }

    #[test]
    fn ram_beyond_the_limit_is_counted_and_what_is_no_ram_is_refused() {
        let mut map = crumbs(super::LIMIT as u64);
        assert_eq!(map.loss(), None);
        assert_eq!(map.add(range(0, 1), Kind::Reserved), Err(Full));
        for page in 1..4 {
            assert_eq!(map.add(range(page << 40, (page << 40) + 0x1000), Kind::Ram), Ok(()));
        }
        assert_eq!(map.ram().iter().count(), super::LIMIT);
        let told = map.loss().map(|loss| loss.to_string()).unwrap_or_default();
        assert_eq!(told, "the memory map has too many ranges; 3 ranges of RAM are not used");
    }

    #[test]
    fn map_that_is_added_to_another_passes_on_what_it_has_left_out() {
        let firmware = crumbs(super::LIMIT as u64 + 5);
        let mut both = map(&[(1 << 40, 2 << 40, Kind::Reserved), (3 << 40, 4 << 40, Kind::Reserved)]);
        assert_eq!(both.add_all(&firmware), Ok(()));
        assert_eq!(both.ram().iter().count(), super::LIMIT - 2);
        assert_eq!(both.loss(), Some(Loss(2 + 5)));

        let mut reserved = MemoryMap::new();
        for page in 0..super::LIMIT as u64 {
            assert_eq!(reserved.add(range(page * 0x2000, page * 0x2000 + 0x1000), Kind::Reserved), Ok(()));
        }
        assert_eq!(both.add_all(&reserved), Err(Full));
    }

    /// So many pages of RAM, each by itself.
    fn crumbs(count: u64) -> MemoryMap {
        let page = |at| (at * 0x2000, at * 0x2000 + 0x1000, Kind::Ram);
        map(&(0..count).map(page).collect::<Vec<_>>())
    }

    #[test]
    fn entries_that_go_on_where_others_end_need_no_room() {
        let mut map = MemoryMap::new();
        for page in 0..10_000 {
            let kind = if page < 5000 { Kind::Ram } else { Kind::Reserved };
            assert_eq!(map.add(range(page * 0x1000, (page + 1) * 0x1000), kind), Ok(()));
        }
        assert_eq!(sorted(&map.ram()), [(0, 5000 * 0x1000)]);
        assert_eq!(map.entries.iter().flatten().count(), 2);
    }

    #[test]
    fn ranges_at_the_end_of_the_address_space_do_no_harm() {
        let mut ranges = map(&[(0x1000, u64::MAX, Kind::Ram)]).ram();
        ranges.remove(&range(u64::MAX - 1, u64::MAX));
        ranges.remove(&range(0x2000, 0x2000));
        assert_eq!(sorted(&ranges)[0].0, 0x1000);
    }

    /// Random maps over 64 pages, in units of a quarter page, against a model with one flag per unit.
    #[test]
    fn random_maps_agree_with_a_model_that_knows_every_unit() {
        const UNITS: u64 = 256;
        const UNIT: u64 = PAGE_BYTES / 4;
        let mut rng = fastrand::Rng::with_seed(1);
        let mut below = |limit: u64| rng.u64(..limit);
        for _ in 0..500 {
            let mut map = MemoryMap::new();
            let mut ram = [false; UNITS as usize];
            let mut other = [false; UNITS as usize];
            for _ in 0..below(12) {
                let start = below(UNITS);
                let end = start + below(UNITS - start + 1);
                let kind = if below(3) == 0 { Kind::Reserved } else { Kind::Ram };
                assert_eq!(map.add(range(start * UNIT, end * UNIT), kind), Ok(()));
                let flags = if kind == Kind::Ram { &mut ram } else { &mut other };
                flags[start as usize..end as usize].fill(true);
            }

            let ranges = map.ram();
            for page in 0..UNITS / 4 {
                let units = page as usize * 4..page as usize * 4 + 4;
                let count = ranges.iter().filter(|range| range.contains(Hpa(page * PAGE_BYTES))).count();
                let blocked = other[units.clone()].contains(&true);
                assert!(count <= 1, "a page is listed once");
                // Two entries may cover a page only together: then it may be left out, never the other way round.
                if count == 1 {
                    assert!(!blocked && !ram[units].contains(&false));
                }
            }
        }
    }
}
