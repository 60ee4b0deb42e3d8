//! Debian's memtest86+ as a guest: a program with two CPUs that is not Linux.
//!
//! It uses the boot protocol of Linux, in long mode or in protected mode, with an image that ends within the last
//! paragraph. It starts its second CPU itself, measures the TSC by counter 2 of the interval timer, and wakes halted
//! CPUs by NMIs.

use std::thread;
use std::time::{Duration, Instant};

use system_tests::{Host, assets};

/// How long one may take to test with both CPUs, and how long it is watched from then on.
const PATIENCE: Duration = Duration::from_secs(200);
const WATCHED: Duration = Duration::from_secs(8);

#[test]
fn memtest_for_64_bit_processors_tests_memory_with_both_cpus() {
    tests_memory_with_both_cpus("memtest86+x64.bin", "x64");
}

#[test]
fn memtest_for_32_bit_processors_tests_memory_with_both_cpus() {
    tests_memory_with_both_cpus("memtest86+ia32.bin", "x32");
}

fn tests_memory_with_both_cpus(image: &str, width: &str) {
    let kernel = assets().join(image);
    assert!(kernel.is_file(), "{} is missing: run `cargo xtask test build` first", kernel.display());
    let toml = format!(
        "[[vm]]\nname = \"memtest\"\nvcpus = 2\nmemory = \"32M\"\nkernel = \"{}\"\ninitrd = \"none\"\n\
         cmdline = \"console=ttyS0,115200\"\n",
        kernel.display()
    );
    let host = Host::start(300, 2, &toml, |_| Vec::new());
    let begun = Instant::now();
    while !host.said().contains("All Cores") {
        assert!(begun.elapsed() < PATIENCE, "it does not test with both CPUs: {}", host.said());
        thread::sleep(Duration::from_millis(200));
    }
    thread::sleep(WATCHED);

    let stats = host.ask("stats");
    let nmis = stats[0]["total"]["exits"]["nmi_window_exits"].as_u64();
    let screen = host.said();
    host.end();

    assert!(screen.contains(&format!(".unknown.{width}")), "{screen}");
    assert!(screen.contains("SMP: 2T"), "{screen}");
    // From the interval timer; without it there is neither a frequency nor a time.
    let (_, clock) = screen.split_once("CLK/Temp: ").expect("the line of the clock");
    assert!(
        clock.trim_start().split("MHz").next().is_some_and(|mhz| mhz.parse().is_ok_and(|mhz: u32| mhz > 0)),
        "{screen}"
    );
    assert!(screen.contains("Time:  0:00:0"), "{screen}");
    let errors: Vec<&str> =
        screen.split("Errors: ").skip(1).map(|rest| rest.split_whitespace().next().unwrap_or("")).collect();
    assert!(errors.len() > 1 && errors.iter().all(|count| *count == "0"), "{errors:?} in {screen}");
    assert!(nmis.is_some_and(|count| count > 0), "CPUs that wait are woken by NMIs: {stats:#}");
}
