//! The writers of each cache line: each store of the hypervisor from a guest's exit to its next entry, looked up in the
//! blocks of the running host.
//!
//! `cargo test -p dunlin-system-tests --test layout -- --nocapture` prints the result.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use abi::layout::{Content, Layout, Place, Whose};
use serde_json::{Value, from_value};
use system_tests::stores::{Exit, Map, Store, Target, Text, Tracer, exits};
use system_tests::{Host, assets, dunlin, each_machine, measuring_vm, until, workspace};
use tempfile::TempDir;

/// Time between two queries of a VM: long enough for many exits, even on a busy computer.
const A_WHILE: Duration = Duration::from_millis(300);
/// More operations than a test ever runs.
const FOR_EVER: u32 = 20_000_000;
/// A vCPU announces that it enters its guest, and that it has left. A vCPU with an emulated instruction announces that
/// too.
const ONCE_IN_AND_OUT: usize = 2;
/// Fewer exits than this say nothing.
const LEAST_EXITS: usize = 20;

/// The hypervisor's stores while a guest runs one experiment.
struct Traced {
    map: Map,
    exits: Vec<Exit>,
}

/// Traces the hypervisor below a VM, once its guest runs the experiment's own operations: then it makes `pace` exits
/// between two queries. It stops when `is_enough` returns true.
fn trace(vcpus: u32, pcpus: u32, apic: &str, cmdline: &str, pace: u64, is_enough: fn(&[Exit]) -> bool) -> Traced {
    let text = Text::of(&assets().join("hypervisor"));
    let vm = format!("{}apic = \"{apic}\"\n", measuring_vm("measuring", vcpus, cmdline));
    let host = Host::start(120, pcpus, &vm, |folder| Tracer::qemu_arguments(folder, &text.range()));
    let mut tracer = Tracer::attach(host.folder());
    // Without the operation the guest's loop exits only for the host's tick.
    let entries = || host.ask("stats")[0]["total"]["entries"].as_u64().unwrap_or(0);
    until("the experiment", || {
        let before = entries();
        sleep(A_WHILE);
        (entries() > before + pace).then_some(())
    });
    let map = map(&host.ask("layout"));
    // On a busy computer one trace is short, so several are joined.
    let mut all = Vec::new();
    until("exits", || {
        all.extend(exits(&tracer.trace(A_WHILE), &text, &map));
        is_enough(&all).then_some(())
    });
    tracer.quit();
    host.wait();
    Traced { map, exits: all }
}

/// The host's description of its blocks.
fn map(answer: &Value) -> Map {
    let array = |of: &Value| of.as_array().cloned().unwrap_or_default();
    let number = |of: &Value| u32::try_from(of.as_u64().unwrap_or_default()).unwrap_or_default();
    let layouts = array(&answer["layouts"]).into_iter().map(|mut layout| Layout {
        name: layout["name"].as_str().unwrap_or_default().to_string(),
        bytes: number(&layout["bytes"]),
        align: number(&layout["align"]),
        line: number(&layout["line_bytes"]),
        rows: from_value(layout["rows"].take()).expect("rows are as in abi"),
    });
    let places = array(&answer["places"]).into_iter().map(|place| Place {
        whose: match (&place["pcpu"], &place["vm"], &place["vcpu"]) {
            (Value::Null, Value::Null, _) => Whose::EachPcpu,
            (Value::Null, vm, Value::Null) => Whose::Vm(number(vm)),
            (Value::Null, vm, vcpu) => Whose::Vcpu(number(vm), number(vcpu)),
            (pcpu, ..) => Whose::Pcpu(number(pcpu)),
        },
        what: place["what"].as_str().unwrap_or_default().to_string(),
        hva: place["hva"].as_u64().unwrap_or_default(),
        bytes: number(&place["bytes"]),
    });
    Map::new(layouts.collect(), places.collect())
}

/// Whether a store is to memory of the pCPU itself.
fn is_own(exit: &Exit, target: &Target) -> bool {
    match target.whose {
        // One vCPU per VM here: the pCPU runs this one.
        Some(Whose::Vcpu(..) | Whose::EachPcpu) => true,
        Some(whose) => whose == exit.cpu,
        None => false,
    }
}

/// The word that says whether the vCPU is in its guest: its owner writes it, on the line where others read it.
fn is_handshake(target: &Target) -> bool {
    target.what == "Vcpu.shared"
}

fn targets<'a>(exits: impl Iterator<Item = &'a Exit>, map: &Map) -> BTreeMap<String, (usize, Store)> {
    let mut found = BTreeMap::new();
    for store in exits.flat_map(|exit| &exit.stores) {
        let Target { whose, what, class } = map.target(store.address);
        let class = class.map_or("nobody's", Content::name);
        let name = format!("{:8} {what}, {}", class, whose.map_or(String::from("-"), |whose| format!("{whose:?}")));
        found.entry(name).or_insert((0, *store)).0 += 1;
    }
    found
}

fn show(name: &str, exits: &[&Exit], map: &Map) {
    let instructions = exits.iter().map(|exit| exit.instructions).sum::<u64>() / exits.len().max(1) as u64;
    println!("\n{name}: {} exits, {instructions} instructions each; stores per exit:", exits.len());
    for (target, (count, example)) in targets(exits.iter().copied(), map) {
        let per_exit = count as f64 / exits.len() as f64;
        println!("  {per_exit:7.2}  {target}  (such as from {:#x} to {:#x})", example.rip, example.address);
    }
}

/// Each of the `exits` wrote only lines of its own vCPU's and its own pCPU's owner, and so often the handshake.
fn assert_own_lines_only(name: &str, exits: &[&Exit], map: &Map, handshakes_allowed: usize) {
    for exit in exits {
        let mut handshakes = 0;
        for store in &exit.stores {
            let target = map.target(store.address);
            if is_handshake(&target) {
                handshakes += 1;
                continue;
            }
            let is_right = is_own(exit, &target) && target.class == Some(Content::Owner);
            assert!(is_right, "{name}: {store:x?} writes {target:?}");
        }
        assert_eq!(handshakes, handshakes_allowed, "{name}: writes of the handshake");
    }
}

each_machine! {
    fn layout_is_as_it_is_in_the_documents(machine) {
        let arch = machine.name();
        let run = dunlin(&["layout", "--arch", arch, "--check", &machine.document("layout", "txt")]);
        assert_eq!(run.status, 0, "{run:#?}");
    }

    fn blocks_of_many_vcpus_share_no_line_and_begin_at_all_lines_of_their_pages(machine) {
        let vm = measuring_vm("measuring", 64, "experiments=mixed seconds=20");
        let host = Host::start_on(machine, 60, 2, &vm, |_| Vec::new());
        until("64 vCPUs", || {
            let placement = &host.ask("layout")["placement"];
            let is_whole = placement["starts"]["Vcpu"]["count"] == 64;
            is_whole.then(|| {
                assert_eq!(placement["sharing_a_line"], Value::Array(Vec::new()));
                assert_eq!(placement["not_at_a_line"], Value::Array(Vec::new()));
                let all = placement["starts"].as_object().expect("there are blocks");
                for what in ["Vcpu", "decoded instructions"].into_iter().filter(|what| all.contains_key(*what)) {
                    // All 32 lines that a page has.
                    assert_eq!(all[what]["different_lines_of_a_page"], 32, "{what}: {placement}");
                }
            })
        });
        host.end();
    }

    fn sums_of_counters_are_exact_while_vcpus_run_and_after(machine) {
        let vm = measuring_vm("measuring", 4, "experiments=mixed seconds=4");
        let host = Host::start_on(machine, 60, 2, &vm, |_| Vec::new());
        for _ in 0..5 {
            let stats = host.ask("stats");
            let (total, vcpus) = (&stats[0]["total"], stats[0]["vcpus"].as_array().expect("one for each vCPU"));
            assert_eq!(vcpus.len(), 4);
            for name in ["entries", "exits_total", "irq_injections", "blocks", "migrations", "tlb_flushes"] {
                assert_eq!(count(total, name), vcpus.iter().map(|vcpu| count(vcpu, name)).sum::<u64>(), "{name}: {stats}");
            }
            for vcpu in vcpus {
                // The counters of a vCPU are read one by one while it runs: exits first, then entries.
                assert!(count(vcpu, "exits_total") <= count(vcpu, "entries"), "{vcpu}");
            }
        }
        host.wait();

        // After the end no entry lacks its exit.
        let json = machine.run_vms(60, &vm, &["--json"]).expect_status(0).json();
        let counters = &system_tests::vm(&json, "measuring")["counters"];
        assert_eq!(count(counters, "entries"), count(counters, "exits_total"), "{counters}");
    }

    fn as_many_exits_are_counted_as_the_guest_has_made(machine) {
        let (experiment, counter) = machine.quickest_exit();
        let counted = |iterations: u32| {
            let vm = measuring_vm("measuring", 2, &format!("experiments={experiment} iterations={iterations}"));
            let json = machine.run_vms(60, &vm, &["--json"]).expect_status(0).json();
            count(&system_tests::vm(&json, "measuring")["counters"]["exits"], counter)
        };
        // The boot's own are the same each time, and each further operation is one exit in each batch.
        let [some, more, most] = [1000, 2000, 4000].map(counted);
        assert!(more > some + 1000, "{some}, {more}, {most}");
        assert_eq!(2 * (more - some), most - more, "{some}, {more}, {most}");
    }
}

#[test]
fn picture_of_a_vcpu_is_as_it_is_in_the_documents() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let file = folder.path().join("layout.svg").to_string_lossy().into_owned();
    let run = dunlin(&["layout", "--picture", &file]);
    assert_eq!(run.status, 0, "{run:#?}");
    let read = |path: &Path| fs::read_to_string(path).expect("there is a picture");
    let is_same = read(&workspace().join("docs/layout.svg")) == read(file.as_ref());
    assert!(is_same, "`dunlin layout --picture docs/layout.svg` renews the picture");
}

/// The counter `name` in `counters`.
fn count(counters: &Value, name: &str) -> u64 {
    counters[name].as_u64().unwrap_or_else(|| panic!("no {name} in {counters}"))
}

#[test]
fn fast_exits_write_lines_of_their_owner_only() {
    for (apic, experiment, handshakes) in [
        ("x2apic", "cpuid", ONCE_IN_AND_OUT),
        ("x2apic", "rdmsr", ONCE_IN_AND_OUT),
        ("x2apic", "wrmsr", ONCE_IN_AND_OUT),
        ("x2apic", "x2apic-eoi", ONCE_IN_AND_OUT),
        ("x2apic", "self-ipi", ONCE_IN_AND_OUT),
        ("xapic", "xapic-read", 2 * ONCE_IN_AND_OUT),
        ("xapic", "xapic-eoi", 2 * ONCE_IN_AND_OUT),
    ] {
        let Traced { map, exits } =
            trace(1, 1, apic, &format!("experiments={experiment} iterations={FOR_EVER}"), 2000, |exits| {
                let timer = exits.iter().filter(|exit| exit.interrupted).count();
                timer > 0 && exits.len() >= timer + LEAST_EXITS
            });
        let (timer, fast): (Vec<&Exit>, Vec<&Exit>) = exits.iter().partition(|exit| exit.interrupted);
        show(experiment, &fast, &map);
        show("the host's timer meanwhile", &timer, &map);
        assert_own_lines_only(experiment, &fast, &map, handshakes);
        assert_own_lines_only("timer", &timer, &map, ONCE_IN_AND_OUT);
    }
}

/// Devices of the VM have locks of their own, which an access to one of them takes.
const DEVICES: [&str; 2] = ["Vm.serial", "Vm.platform"];

#[test]
fn interrupts_halts_and_wakes_write_nothing_of_the_vm() {
    // Four vCPUs on two pCPUs send each other interrupts, arm timers and halt.
    let Traced { map, exits } =
        trace(4, 2, "x2apic", "experiments=mixed seconds=40", 200, |exits| exits.len() >= LEAST_EXITS);
    show("mixed", &exits.iter().collect::<Vec<_>>(), &map);
    for store in exits.iter().flat_map(|exit| &exit.stores) {
        let target = map.target(store.address);
        let is_of_vm = matches!(target.whose, Some(Whose::Vm(_))) && !DEVICES.contains(&target.what.as_str());
        // The counts of references to it are on the line before.
        let is_count = target.whose.is_none() && matches!(map.owner(store.address + 128), Some(Whose::Vm(_)));
        assert!(!is_of_vm && !is_count, "{store:x?} writes {target:?}");
    }
}
