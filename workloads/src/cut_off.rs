//! Flush page by page, or everything: the cost of both on the CPU that runs this program.
//!
//! The kernel flushes up to 33 pages one by one, and everything above that. So `mprotect` of more and more pages shows
//! the cost of a page. The step between 33 and 34 pages shows the cost of a full flush. Reads of other pages
//! afterwards, in random order, show the cost of their lost translations. Run this natively, not in an emulator.

use std::hint::black_box;
use std::time::Instant;

use anyhow::Result;

use crate::Verdict;
use crate::memory::{Access, Region};
use crate::options::Options;

pub(crate) const OPTIONS: [&str; 1] = ["--rounds"];

/// Pages that lose a right.
const FLUSHED: [usize; 9] = [1, 2, 4, 8, 16, 32, 33, 34, 64];
/// Number of pages read afterwards.
const READ: [usize; 5] = [0, 64, 256, 512, 1536];

pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let rounds = options.number("--rounds", 501) as usize;
    let mut subject = Region::map(Region::MAX_PAGES)?;
    let regions = READ[READ.len() - 1] / Region::MAX_PAGES;
    let mut others = (0..regions).map(|_| Region::map(Region::MAX_PAGES)).collect::<Result<Vec<_>, _>>()?;
    // Written once, so that each page has a frame of its own.
    others.iter_mut().for_each(|region| (0..Region::MAX_PAGES).for_each(|page| region.set_word(page, 1)));
    // A step that has no divisor with the number of pages visits all of them, in no order that a prefetcher knows.
    let visit = |count: usize| (0..count).map(move |at| at * 389 % count);

    println!("ns, median of {rounds}: mprotect of so many pages, then reading so many others");
    println!("pages{}", READ.map(|count| format!("{:>9}", format!("+{count}"))).concat());
    for flushed in FLUSHED {
        let mut row = String::new();
        for read in READ {
            let mut times: Vec<u128> = Vec::with_capacity(rounds);
            for _ in 0..rounds {
                subject.protect(0..flushed, Access::ReadWrite)?;
                (0..flushed).for_each(|page| subject.set_word(page, 1));
                let look = || visit(read).map(|page| word(&others, page)).fold(0, u64::wrapping_add);
                black_box(look());

                let start = Instant::now();
                subject.protect(0..flushed, Access::Read)?;
                black_box(look());
                times.push(start.elapsed().as_nanos());
            }
            times.sort_unstable();
            row += &format!("{:>9}", times[rounds / 2]);
        }
        println!("{flushed:>5}{row}");
    }
    Ok(Verdict::Right)
}

fn word(regions: &[Region], page: usize) -> u64 {
    regions[page / Region::MAX_PAGES].word(page % Region::MAX_PAGES)
}
