//! Storms: a VM that keeps the hypervisor as busy as it can costs its neighbour little. `dunlin bench storms` has all
//! of them. Here are one that interrupts the pCPU all the time, the one whose vCPUs change most often, and the one for
//! which the hypervisor works most outside of its exits.

use system_tests::{dunlin, each_machine};

each_machine! {
    fn timer_that_always_expires_vcpus_that_wait_for_each_other_and_dirty_logs_cost_a_neighbour_little(machine) {
        let flushes = if machine.name() == "x86_64" { "flushes-by-ipi" } else { "flushes" };
        let only = format!("timer,{flushes},dirty-logs");
        let run = dunlin(&["bench", "storms", "--arch", machine.name(), "--only", &only, "--seconds", "2", "--json"]);
        assert_eq!(run.status, 0, "{run:#?}");
        let json = run.json();
        let storms = json["storms"].as_array().into_iter().flatten();
        let losses: Vec<f64> = storms.filter_map(|storm| storm["loss"].as_f64()).collect();
        println!("{}: {losses:?}", machine.name());
        assert_eq!(losses.len(), 3, "{json}");
        assert!(losses.iter().all(|loss| *loss <= 0.1), "{json}");
    }
}
