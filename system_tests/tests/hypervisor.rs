//! The hypervisor by itself: how it refuses to start, and how it ends when it is at fault.

use abi::exit_code::{PANIC, REFUSED, qemu_status};
use system_tests::bare_hypervisor;

#[test]
fn panic_tells_what_where_and_on_which_pcpu() {
    let run =
        bare_hypervisor(&["-cpu", "max", "-smp", "2", "-append", "selftest=panic"]).expect_status(qemu_status(PANIC));
    assert!(run.stdout.contains("cpu0 panic"), "{run:#?}");
    assert!(run.stdout.contains("selftest.rs"), "{run:#?}");
}

#[test]
fn stack_overflow_is_reported_and_not_a_reset() {
    let run = bare_hypervisor(&["-cpu", "max", "-append", "selftest=overflow"]).expect_status(qemu_status(PANIC));
    assert!(run.stdout.contains("panic"), "{run:#?}");
}

#[test]
fn null_pointer_is_reported_with_its_address() {
    let run = bare_hypervisor(&["-cpu", "max", "-append", "selftest=null"]).expect_status(qemu_status(PANIC));
    assert!(run.stdout.contains("page fault"), "{run:#?}");
}

#[test]
fn host_without_svm_is_refused_by_name() {
    let run = bare_hypervisor(&["-cpu", "max,-svm"]).expect_status(qemu_status(REFUSED));
    assert!(run.stdout.contains("no AMD SVM"), "{run:#?}");
}

#[test]
fn missing_payload_is_refused_with_a_hint() {
    let run = bare_hypervisor(&["-cpu", "max"]).expect_status(qemu_status(REFUSED));
    assert!(run.stdout.contains("dunlin run"), "{run:#?}");
}

#[test]
fn foreign_module_is_refused_by_name() {
    let run = bare_hypervisor(&["-cpu", "max", "-initrd", "/etc/services"]).expect_status(qemu_status(REFUSED));
    assert!(run.stdout.contains("not a Dunlin payload"), "{run:#?}");
}

#[test]
fn every_number_of_pcpus_comes_up() {
    for pcpus in ["1", "2", "4", "8"] {
        let run = bare_hypervisor(&["-cpu", "max", "-smp", pcpus]);
        assert!(run.stdout.contains(&format!("{pcpus} pCPUs")), "{run:#?}");
    }
}
