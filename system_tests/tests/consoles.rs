//! Consoles of guests next to one that never stops writing.
//!
//! Without a control port, consoles go to the log's UART, which the first pCPU waits for. QEMU's UART is faster than
//! any guest, so `selftest=slow-log` makes the hypervisor treat it as slow as a real one.

use system_tests::{Host, measuring_vm, until};

/// How long the one talks, and the other floods.
const TALKS: u32 = 4;
const FLOODS: u32 = 10;

#[test]
fn guest_that_floods_the_log_delays_no_others() {
    let toml = measuring_vm("flood", 2, &format!("experiments=flood seconds={FLOODS} stall=60"))
        + &measuring_vm("chatter", 1, &format!("experiments=chatter seconds={TALKS}"));
    let host = Host::start(120, 3, &toml, |_| {
        ["--log", "--qemu-arg=-append", "--qemu-arg=selftest=slow-log"].map(String::from).to_vec()
    });
    // Joins what the flood has split.
    let said = || host.said().replace('#', "");
    until("the end of the flood", || said().contains("flood: power off").then_some(()));
    let said = said();
    let place = |what: &str| said.find(what).unwrap_or_else(|| panic!("no \"{what}\" in {said}"));
    let end = place("flood: power off");
    // The end of the flood may split the last line.
    for second in 1..TALKS {
        assert!(place(&format!("experiment=chatter second={second}")) < end, "{said}");
    }
    host.end();
}
