//! What VMs get of pCPUs that are short: by weight, cap and pinning, not by the number of their vCPUs.
//!
//! Time is that which the hypervisor's counters give: in the guest, and for it in the hypervisor. Each case has a host
//! of its own with two pCPUs. A case takes 3 seconds, or as many as SHARES_SECONDS says.

use std::thread::sleep;
use std::time::{Duration, Instant};

use abi::control::Command;
use system_tests::port::Port;
use system_tests::{Host, Machine, each_machine, measuring_vm, until, vm};

/// A VM of a case: vCPUs, keys of its description, and what it is to get, in pCPUs.
struct Vm {
    does: &'static str,
    vcpus: u32,
    keys: &'static str,
    gets: f64,
}

const fn busy(vcpus: u32, keys: &'static str, gets: f64) -> Vm {
    Vm { does: "compute", vcpus, keys, gets }
}

/// The time that each VM takes, in the guest and in all, in pCPUs.
fn measure(machine: Machine, vms: &[Vm]) -> Vec<(f64, f64)> {
    measure_on(machine, 2, &[], vms)
}

/// The same, on a machine with so many pCPUs and these arguments.
fn measure_on(machine: Machine, pcpus: u32, more: &[&str], vms: &[Vm]) -> Vec<(f64, f64)> {
    let seconds = std::env::var("SHARES_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let describe = |(number, vm): (usize, &Vm)| {
        let cmdline = format!("experiments={} seconds=0", vm.does);
        measuring_vm(&format!("vm{number}"), vm.vcpus, &cmdline) + vm.keys + "\n"
    };
    let toml: String = vms.iter().enumerate().map(describe).collect();
    let more = ["--memory=1G"].iter().chain(more).map(ToString::to_string).collect();
    let host = Host::start_on(machine, 120, pcpus, &toml, |_| more);
    let mut port = Port::of(&host);
    let hz = port.clock_hz();
    let mut look = || -> Vec<(f64, f64)> {
        let counters = (0..).zip(vms).map(|(number, vm)| port.counters_of(number, vm.vcpus));
        counters.map(|now| (now.guest_ticks as f64, (now.guest_ticks + now.host_ticks) as f64)).collect()
    };
    // All VMs have started when the one with the most vCPUs has none that has never run.
    until("guests that run", || look().iter().all(|(guest, _)| *guest > hz * 0.02).then_some(()));
    sleep(Duration::from_secs(1));
    let (begun, before) = (Instant::now(), look());
    sleep(Duration::from_secs(seconds));
    let (after, ticks) = (look(), begun.elapsed().as_secs_f64() * hz);
    host.end();
    before.iter().zip(&after).map(|(then, now)| ((now.0 - then.0) / ticks, (now.1 - then.1) / ticks)).collect()
}

/// Each VM gets what it is to get, within this part of it, of the time that all have got.
fn gets(machine: Machine, within: f64, vms: &[Vm]) {
    compare(machine, within, 0.9, vms, &measure(machine, vms));
}

/// The same for times that were measured. Together they got at least this part of all.
fn compare(machine: Machine, within: f64, least: f64, vms: &[Vm], times: &[(f64, f64)]) {
    let got: Vec<f64> = times.iter().map(|(_, all)| *all).collect();
    let shown: Vec<String> = got.iter().zip(vms).map(|(got, vm)| format!("{got:.3} of {}", vm.gets)).collect();
    println!("{}: {}", machine.name(), shown.join(", "));
    // Switches and housekeeping are nobody's time. But a cap is a cap, whatever others get.
    let (sum, wanted): (f64, f64) = (got.iter().sum(), vms.iter().map(|vm| vm.gets).sum());
    assert!(sum > least * wanted, "{shown:?}");
    for (got, vm) in got.iter().zip(vms) {
        let part = if vm.keys.contains("cap") { *got } else { got / sum * wanted };
        assert!((part - vm.gets).abs() <= within * vm.gets, "{shown:?}: {part:.3}");
    }
}

each_machine! {
    fn vm_of_64_vcpus_takes_no_more_than_one_of_one(machine) {
        gets(machine, 0.03, &[busy(1, "", 1.0), busy(64, "", 1.0)]);
    }

    fn three_vms_share_two_pcpus(machine) {
        gets(machine, 0.03, &[busy(1, "", 2. / 3.), busy(1, "", 2. / 3.), busy(3, "", 2. / 3.)]);
    }

    fn weights_decide_where_pcpus_are_short(machine) {
        gets(machine, 0.05, &[busy(2, "weight = 100", 0.5), busy(2, "weight = 300", 1.5)]);
    }

    fn weights_count_for_vms_not_for_vcpus(machine) {
        gets(machine, 0.05, &[busy(16, "weight = 50", 0.5), busy(2, "weight = 150", 1.5)]);
    }

    fn cap_holds_on_an_idle_machine(machine) {
        gets(machine, 0.05, &[busy(2, "cap = 25", 0.25)]);
    }

    fn cap_of_more_than_one_pcpu_holds_beside_a_busy_vm(machine) {
        gets(machine, 0.05, &[busy(2, "cap = 25", 0.25), busy(4, "weight = 10\ncap = 125", 1.25)]);
    }

    fn pinned_vms_share_their_pcpu_by_weight(machine) {
        let vms = [
            busy(2, "pcpus = \"0\"\nweight = 100", 0.25),
            busy(2, "pcpus = \"0\"\nweight = 300", 0.75),
            busy(3, "pcpus = \"1\"", 1.0),
        ];
        gets(machine, 0.05, &vms);
    }

    fn vm_gets_what_another_leaves(machine) {
        gets(machine, 0.05, &[busy(1, "pcpus = \"1\"\ncap = 40", 0.4), busy(2, "", 1.6)]);
    }

    fn vcpu_that_sleeps_and_wakes_as_fast_as_it_can_costs_a_neighbour_little(machine) {
        // In the guest: what the neighbour waits for to be switched to is its loss.
        let neighbour_of = |does| {
            let other = Vm { does, vcpus: 1, keys: "pcpus = \"1\"", gets: 0.5 };
            let times = measure(machine, &[other, busy(1, "pcpus = \"1\"", 0.5)]);
            println!("{}, beside {does}: {times:.3?}", machine.name());
            times[1].0
        };
        let (beside_naps, beside_compute) = (neighbour_of("naps"), neighbour_of("compute"));
        assert!(beside_naps >= 0.95 * beside_compute, "{beside_naps:.3} of {beside_compute:.3}");
    }

    /// Most of the time its vCPUs wait for another period, where no post wakes them.
    fn vm_that_waits_for_its_cap_is_paused_and_ends_as_any_other(machine) {
        let toml = measuring_vm("slow", 4, "experiments=compute seconds=0") + "cap = 2\n";
        let host = Host::start_on(machine, 120, 2, &toml, |_| Vec::new());
        let mut port = Port::of(&host);
        until("a guest that runs", || (port.counters(4).guest_ticks > 0).then_some(()));
        for _ in 0..10 {
            port.done(Command::Pause { vm: 0 });
            let before = port.counters(4).guest_ticks;
            sleep(Duration::from_millis(60));
            assert_eq!(port.counters(4).guest_ticks, before, "it is paused");
            port.done(Command::Resume { vm: 0 });
            until("a guest that goes on", || (port.counters(4).guest_ticks > before).then_some(()));
        }
        port.done(Command::Stop { vm: 0 });
        let json = host.finish().json();
        assert_eq!(vm(&json, "slow")["stop_reason"], "stopped by command", "{json:#}");
    }

    fn pcpu_that_does_not_exist_is_refused_by_its_number(machine) {
        let toml = measuring_vm("far", 1, "experiments=empty") + "pcpus = \"1,5\"\n";
        let run = machine.run_vms(60, &toml, &["--pcpus=2"]);
        assert!(run.status != 0 && run.stderr.contains("there is no pCPU 5: those that run vCPUs are 0 to 1"), "{run:?}");
    }
}

/// Two threads of a core, besides a pCPU that has a core of its own: QEMU's first pCPU, which runs no vCPUs, has the
/// other thread of that. Only x86 has threads here: QEMU's Arm processors do not report them.
const ONE_CORE_AND_A_HALF: [&str; 5] =
    ["--log", "--qemu-arg=-smp", "--qemu-arg=4,threads=2", "--qemu-arg=-append", "--qemu-arg=log=info smt=core"];

/// A VM of one vCPU keeps the core's other thread from a VM of two, and pays for that too.
#[test]
fn vms_get_cores_by_their_weights_where_a_core_runs_one_vm_at_a_time() {
    let on_core = "pcpus = \"1,2\"";
    let vms = [busy(1, on_core, 0.5), busy(2, on_core, 1.0)];
    let times = measure_on(Machine::X86_64, 3, &ONE_CORE_AND_A_HALF, &vms);
    // With each thread for itself, both would get a whole pCPU. At a change of the VM the threads wait for each other,
    // which takes long where QEMU's have to wait for a processor of a busy computer.
    compare(Machine::X86_64, 0.35, 0.7, &vms, &times);
}

/// The guests check their memory, their clocks, IPIs and interrupts, while VMs take turns on the core.
#[test]
fn guests_run_clean_where_a_core_runs_one_vm_at_a_time() {
    let vms = ["one", "other"].map(|name| measuring_vm(name, 4, "experiments=mixed seconds=5 seed=9"));
    let host =
        Host::start_on(Machine::X86_64, 200, 3, &vms.concat(), |_| ONE_CORE_AND_A_HALF.map(String::from).to_vec());
    let run = host.finish();
    assert_eq!(run.status, 0, "{run:#?}");
    assert!(run.stderr.contains("smt=core: 3 pCPUs run vCPUs, on 2 cores with one VM at a time"), "{run:#?}");
    for name in ["one", "other"] {
        assert!(run.stderr.contains(&format!("{name}| result experiment=mixed failures=0")), "{run:#?}");
    }
}
