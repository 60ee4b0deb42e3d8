//! The addresses of the machine that its owner reaches besides its memory: registers of devices, firmware's memory.
//!
//! Everything is within reach that was not closed: RAM of the hypervisor and of other VMs, and registers that an access
//! must not reach. An address is mapped at its first access, with the largest page around it that touches nothing
//! closed. So the whole machine needs few tables, and how many they are does not depend on the owner: at most four for
//! each end of a closed range, and one for each 512 GiB.

use alloc::vec::Vec;

use addr::{Gpa, GpaRange, Hpa, HpaRange, PAGE_BYTES};

/// Page sizes of stage 2, the largest first.
const PAGE_SIZES: [u64; 3] = [1 << 30, 2 << 20, PAGE_BYTES];

/// What is within reach.
pub struct Reach {
    /// Ranges out of reach.
    closed: Vec<HpaRange>,
    /// Behind the last address of the machine.
    end: Hpa,
}

impl Reach {
    /// All addresses below `end` but those in `closed`.
    pub fn new(closed: impl Iterator<Item = HpaRange>, end: Hpa) -> Self {
        Self { closed: closed.collect(), end }
    }

    /// The page to map for an access to `gpa`, which is at the same address of the machine; `None` out of reach.
    pub fn page_at(&self, gpa: Gpa) -> Option<GpaRange> {
        PAGE_SIZES.iter().find_map(|&bytes| {
            let page = HpaRange::new(Hpa(gpa.0 & !(bytes - 1)), bytes)?;
            let is_open = page.end() <= self.end && !self.closed.iter().any(|closed| closed.overlaps(&page));
            is_open.then(|| GpaRange::new(Gpa(page.start.0), bytes)).flatten()
        })
    }

    /// The pages that cover a range of the machine, as accesses to all of it would map them; where it is out of reach,
    /// its next address, as the last.
    pub fn pages_of(&self, range: &HpaRange) -> impl Iterator<Item = Result<GpaRange, Hpa>> {
        let mut rest = Some((range.start, range.end()));
        core::iter::from_fn(move || {
            let (at, end) = rest.take_if(|(at, end)| at < end)?;
            let Some(page) = self.page_at(Gpa(at.0)) else { return Some(Err(at)) };
            rest = Some((Hpa(page.end().0), end));
            Some(Ok(page))
        })
    }
}

#[cfg(test)]
mod tests {
    use addr::{Gpa, Hpa, HpaRange};

    use super::{PAGE_SIZES, Reach};

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    fn reach(closed: &[(u64, u64)], end: u64) -> Reach {
        let ranges = closed.iter().map(|&(start, end)| HpaRange::new(Hpa(start), end - start).expect("a range"));
        Reach::new(ranges, Hpa(end))
    }

    fn page(reach: &Reach, gpa: u64) -> Option<(u64, u64)> {
        reach.page_at(Gpa(gpa)).map(|page| (page.start.0, page.bytes()))
    }

    #[test]
    fn page_is_the_largest_that_touches_nothing_closed() {
        let reach = reach(&[(0x10_0000, 3 * GIB), (0xfee0_0000, 0xfee0_1000)], 1 << 40);
        assert_eq!(page(&reach, 0xb_8000), Some((0xb_8000, 4096)), "beside RAM in the same 2 MiB");
        assert_eq!(page(&reach, 0x10_0000), None);
        assert_eq!(page(&reach, 3 * GIB - 1), None);
        assert_eq!(page(&reach, 0xfec0_0123), Some((0xfec0_0000, 2 * MIB)));
        assert_eq!(page(&reach, 0xfee0_0000), None);
        assert_eq!(page(&reach, 0xfee0_1fff), Some((0xfee0_1000, 4096)));
        assert_eq!(page(&reach, 0x38_0000_1234), Some((0x38_0000_0000, GIB)));
        assert_eq!(page(&reach, 1 << 40), None);
        assert_eq!(page(&reach, u64::MAX), None);
    }

    #[test]
    fn range_is_covered_by_the_pages_that_accesses_would_map() {
        let reach = reach(&[(0x10_0000, 0x7f00_0000), (0xfee0_0000, 0xfee0_1000)], 1 << 40);
        let pages = |start: u64, end: u64| {
            let range = HpaRange::new(Hpa(start), end - start).expect("a range");
            reach.pages_of(&range).map(|page| page.map(|page| (page.start.0, page.bytes()))).collect::<Vec<_>>()
        };
        let large = |at: u64| Ok((at, 2 * MIB));
        assert_eq!(pages(0x7f00_1000, 0x7f20_1000), [large(0x7f00_0000), large(0x7f20_0000)]);
        assert_eq!(pages(0xf_f000, 0x11_0000), [Ok((0xf_f000, 4096)), Err(Hpa(0x10_0000))]);
        assert_eq!(pages(0xfedf_f000, 0xfee0_0000), [large(0xfec0_0000)]);
        assert_eq!(pages((1 << 40) - 1, 1 << 40), [Ok(((1 << 40) - GIB, GIB))]);
        assert_eq!(pages(1 << 40, 2 << 40), [Err(Hpa(1 << 40))]);
    }

    #[test]
    fn pages_are_of_one_size_in_each_place_and_never_closed() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..300 {
            let closed: Vec<_> = (0..random.usize(..12))
                .map(|_| {
                    let start = random.u64(..4 * GIB) & !4095;
                    (start, start + (1 << random.u32(12..31)))
                })
                .collect();
            let reach = reach(&closed, 4 * GIB);
            for _ in 0..300 {
                let gpa = random.u64(..5 * GIB);
                let is_closed = gpa >= 4 * GIB || closed.iter().any(|&(start, end)| (start..end).contains(&gpa));
                let Some((start, bytes)) = page(&reach, gpa) else {
                    assert!(is_closed, "{gpa:#x}");
                    continue;
                };
                assert!(!is_closed && (start..start + bytes).contains(&gpa) && PAGE_SIZES.contains(&bytes));
                // All of a page gives the same page: two faults never map overlapping ones.
                assert_eq!(page(&reach, start + random.u64(..bytes)), Some((start, bytes)));
            }
        }
    }
}
