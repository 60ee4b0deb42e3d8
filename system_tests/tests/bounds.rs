//! Bounds: a pCPU takes its interrupts soon, whatever a guest or a command asks for. Instructions are counted.

use system_tests::{dunlin, each_machine};

each_machine! {
    fn largest_vm_and_commands_about_it_keep_no_pcpu_from_its_interrupts(machine) {
        let run = dunlin(&["bench", "bounds", "--arch", machine.name(), "--json"]);
        assert_eq!(run.status, 0, "{run:#?}");
        let json = run.json();
        let longest: Vec<(&str, u64)> = json["longest"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|one| Some((one["work"].as_str()?, one["instructions"].as_u64()?)))
            .collect();
        println!("{}: {:?}", machine.name(), &longest[..longest.len().min(8)]);
        assert!(longest.iter().all(|(_, instructions)| *instructions <= 50_000), "{json:#}");
        let doors = ["hypercalls", "creation of a VM", "dirty log: harvest", "dirty log: large pages that come back", "VMs that have ended", "pause", "stats"];
        for door in doors {
            assert!(longest.iter().any(|(work, _)| *work == door), "nothing was measured of {door}: {json:#}");
        }
    }
}
