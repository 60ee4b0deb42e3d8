//! The time of a call that must flush the TLBs of busy CPUs.
//!
//! One thread write-protects pages that it has just written, again and again. All other threads of the process compute,
//! each on a CPU of its own. So the kernel must reach every one of these CPUs before the call may return. The time
//! depends on IPI or hypercall, and on which vCPUs run. (Making the pages writable again is not timed. Linux flushes
//! for that as well, so by IPI there are two interrupts per call and CPU.)

use std::hint::black_box;
use std::io;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::Verdict;
use crate::affinity::{cpus, stay_on};
use crate::interrupts::{Change, Interrupts};
use crate::latencies::Latencies;
use crate::memory::{Access, Region};
use crate::options::Options;

pub(crate) const OPTIONS: [&str; 3] = ["--threads", "--calls", "--pages"];

/// Calls before the first timed one.
const WARM_UP: u32 = 10;

/// Measures and prints the line.
pub(crate) fn run(options: &Options) -> Result<Verdict> {
    let cpus = cpus();
    let threads = options.number_or_cpus("--threads") as usize;
    let calls = options.number("--calls", 1000);
    let pages = options.number("--pages", 1) as usize;
    if threads > cpus.len() {
        bail!("--threads {threads} are more than the {} CPUs; each thread needs one of its own", cpus.len());
    }
    if pages > Region::MAX_PAGES {
        bail!("--pages goes up to {}", Region::MAX_PAGES);
    }

    let before = Interrupts::show("before")?;
    let started = Instant::now();
    let latencies = measure(&cpus[..threads], calls, pages).context("a call has failed")?;
    let took = started.elapsed().as_secs_f64();
    let after = Interrupts::show("after")?;
    println!(
        "latency threads={threads} calls={calls} pages={pages} seconds={took:.1} {latencies} {}",
        Change { before, after }
    );
    Ok(Verdict::Right)
}

/// One thread on each of `cpus`; that on the first one makes the calls.
fn measure(cpus: &[usize], calls: u32, pages: usize) -> io::Result<Latencies> {
    let all_run = Barrier::new(cpus.len());
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for &cpu in &cpus[1..] {
            let (all_run, over) = (&all_run, &over);
            scope.spawn(move || {
                // The thread is busy on any CPU; a CPU of its own only makes the result steadier.
                stay_on(&[cpu]);
                all_run.wait();
                compute_until(over);
            });
        }
        stay_on(&cpus[..1]);
        all_run.wait();
        let result = call(calls, pages);
        over.store(true, Ordering::Relaxed);
        result
    })
}

fn call(calls: u32, pages: usize) -> io::Result<Latencies> {
    let mut region = Region::map(pages)?;
    let mut latencies = Latencies::new();
    for number in 0..WARM_UP + calls {
        // Only pages that may be written and are in use cost a flush when that right goes.
        region.protect(0..pages, Access::ReadWrite)?;
        (0..pages).for_each(|page| region.set_word(page, number.into()));

        let started = Instant::now();
        region.protect(0..pages, Access::Read)?;
        let took = started.elapsed();
        if number >= WARM_UP {
            latencies.record(took);
        }
    }
    Ok(latencies)
}

/// Computes, without a pause or system call that a hypervisor or kernel could treat as idle.
fn compute_until(over: &AtomicBool) {
    let mut number = 0_u64;
    while !over.load(Ordering::Relaxed) {
        number = black_box(number.wrapping_mul(5).wrapping_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_that_counts_is_measured() {
        let cpus = cpus();
        let latencies = measure(&cpus[..cpus.len().min(2)], 50, 3).expect("memory is there");
        assert_eq!(latencies.count(), 50);
    }
}
