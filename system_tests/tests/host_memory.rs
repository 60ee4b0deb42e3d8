//! Hosts with too little memory for all of their VMs: those that fit run, and the others are refused with a line that
//! says what is missing, for any amount of memory.

use system_tests::{dunlin_run_vms, vm};

const VMS: usize = 12;

fn name(number: usize) -> String {
    format!("v{number}")
}

/// The tool provides enough memory. This test overrides its QEMU arguments.
#[test]
fn host_that_is_too_small_says_what_it_lacks_and_runs_the_vms_that_fit() {
    let vms: Vec<_> = (0..VMS).map(|number| {
        format!(
            "[[vm]]\nname = \"{}\"\nvcpus = 250\nmemory = \"18M\"\nkernel = \"measuring-guest\"\ninitrd = \"none\"\n\
             cmdline = \"experiments=chatter seconds=2 cpus=1\"\n",
            name(number)
        )
    })
    .collect();
    let mut lacks_vcpus = 0;
    let mut lacks_memory = 0;
    for mebibytes in (222..=246).step_by(4) {
        let memory = format!("--qemu-arg={mebibytes}M");
        let run = dunlin_run_vms(120, &vms.join("\n"), &["--json", "--log", "--qemu-arg=-m", &memory]);
        assert!(run.stderr.contains("MiB free") && !run.stderr.contains("panic"), "{mebibytes} MiB: {}", run.stderr);
        let json = run.json();
        let mut fit = 0;
        for number in 0..VMS {
            let vm = vm(&json, &name(number));
            match vm["failure"].as_str() {
                None => {
                    let output = vm["output"].as_str().unwrap_or_default();
                    assert!(output.trim_end().ends_with("failures=0"), "{mebibytes} MiB, v{number}: {output}");
                    fit += 1;
                }
                Some(why) if why.starts_with("250 vCPUs: the host has no memory left") => lacks_vcpus += 1,
                Some(why) if why.starts_with("memory 18 MiB: the host has ") => lacks_memory += 1,
                Some(why) => panic!("{mebibytes} MiB, v{number}: {why}"),
            }
        }
        assert!((1..VMS).contains(&fit), "{mebibytes} MiB: {fit} VMs fit");
    }
    assert!(lacks_vcpus > 0 && lacks_memory > 0, "{lacks_vcpus}, {lacks_memory}: no host ends in such a place");
}
