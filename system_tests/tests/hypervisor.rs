//! The hypervisor alone: how it refuses to start, and how it ends after a bug of its own.

use abi::exit_code::{PANIC, REFUSED};
use system_tests::each_machine;

each_machine! {
    fn panic_tells_what_where_and_on_which_pcpu(machine) {
        let run = machine.bare_hypervisor(&["-smp", "2", "-append", "selftest=panic"]);
        let run = run.expect_status(machine.status_of(PANIC));
        assert!(run.stdout.contains("cpu0 panic"), "{run:#?}");
        assert!(run.stdout.contains("selftest.rs"), "{run:#?}");
    }

    fn stack_overflow_is_reported_and_not_a_reset(machine) {
        let run = machine.bare_hypervisor(&["-append", "selftest=overflow"]).expect_status(machine.status_of(PANIC));
        assert!(run.stdout.contains("panic"), "{run:#?}");
    }

    fn null_pointer_is_reported_with_its_address(machine) {
        let run = machine.bare_hypervisor(&["-append", "selftest=null"]).expect_status(machine.status_of(PANIC));
        let is_reported = ["page fault", "data abort"].iter().any(|text| run.stdout.contains(text));
        assert!(is_reported && run.stdout.contains("panic"), "{run:#?}");
    }

    fn host_that_cannot_virtualize_is_refused(machine) {
        let (arguments, reason) = machine.unable();
        let run = machine.bare_hypervisor_on(arguments, &[]).expect_status(machine.status_of(REFUSED));
        assert!(run.stdout.contains(reason) && !run.stdout.contains("panic"), "{run:#?}");
    }

    fn missing_payload_is_refused_with_a_hint(machine) {
        let run = machine.bare_hypervisor(&[]).expect_status(machine.status_of(REFUSED));
        assert!(run.stdout.contains("dunlin run"), "{run:#?}");
    }

    fn foreign_module_is_refused_by_name(machine) {
        let run = machine.bare_hypervisor(&["-initrd", "/etc/services"]).expect_status(machine.status_of(REFUSED));
        assert!(run.stdout.contains("not a Dunlin payload"), "{run:#?}");
    }

    fn every_number_of_pcpus_comes_up(machine) {
        for pcpus in ["1", "2", "4", "8"] {
            let run = machine.bare_hypervisor(&["-smp", pcpus]);
            assert!(run.stdout.contains(&format!("{pcpus} pCPUs")), "{run:#?}");
        }
    }
}
