//! Which devices of QEMU a guest accesses in a boot, on both hosts: each access is an exit to QEMU.
//!
//! QEMU counts them itself, by a trace of its devices' registers. What KVM has in the kernel never gets there.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::host::{Host, Outcome};

/// Numbers of accesses, on Dunlin and on KVM, by device and register.
#[derive(Debug, Default)]
pub(super) struct Accesses {
    counts: BTreeMap<(String, String), [u64; 2]>,
}

/// Devices with fewer accesses on both hosts are shown together.
const FEW: u64 = 100;

impl Accesses {
    /// Adds what a host has counted.
    pub(super) fn add(&mut self, host: Host, outcome: &Outcome) {
        for access in outcome.measured("access") {
            let [device, register] = ["device", "register"].map(|key| access.text(key).unwrap_or_default().to_string());
            let count = access.number::<u64>("count").unwrap_or_default();
            *of(host, self.counts.entry((device, register)).or_default()) += count;
        }
    }

    /// By device, the most frequent on Dunlin first, and the rare ones together.
    fn by_device(&self) -> Vec<(&str, [u64; 2])> {
        let mut devices = BTreeMap::<&str, [u64; 2]>::new();
        for ((device, _), counts) in &self.counts {
            let entry = devices.entry(device).or_default();
            *entry = sum([*entry, *counts].into_iter());
        }
        let is_shown = |(_, counts): &(&str, [u64; 2])| counts.iter().any(|count| *count >= FEW);
        let (mut shown, rare): (Vec<_>, Vec<_>) = devices.into_iter().partition(is_shown);
        shown.sort_by_key(|(_, [dunlin, _])| Reverse(*dunlin));
        shown.push(("others", sum(rare.into_iter().map(|(_, counts)| counts))));
        shown
    }

    pub(super) fn text(&self) -> String {
        let mut text = "Accesses of a q35's 4 vCPUs to QEMU's devices in a boot (emulated)\n".to_string();
        let all = sum(self.counts.values().copied());
        let _ = writeln!(text, "  {:40} {:>10} {:>10}", "device", "Dunlin", "KVM");
        for (device, [dunlin, kvm]) in self.by_device().into_iter().chain([("together", all)]) {
            let _ = writeln!(text, "  {device:40} {dunlin:>10} {kvm:>10}");
        }
        text
    }

    /// One line for each register.
    pub(super) fn json(&self) -> Vec<Value> {
        let line = |((device, register), [dunlin, kvm]): (&(String, String), &[u64; 2])| {
            json!({ "part": "access", "emulated": true, "device": device, "register": register,
                "dunlin": dunlin, "kvm": kvm })
        };
        self.counts.iter().map(line).collect()
    }
}

fn of(host: Host, counts: &mut [u64; 2]) -> &mut u64 {
    match host {
        Host::Dunlin => &mut counts[0],
        Host::Kvm => &mut counts[1],
    }
}

fn sum(counts: impl Iterator<Item = [u64; 2]>) -> [u64; 2] {
    counts.fold([0; 2], |[dunlin, kvm], [more, more_of_kvm]| [dunlin + more, kvm + more_of_kvm])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_added_by_device_and_rare_devices_are_shown_together() {
        let outcome = |output: &str| Outcome { output: output.into(), vmm_exits: None, run: Value::Null };
        let mut accesses = Accesses::default();
        accesses.add(
            Host::Dunlin,
            &outcome(
                "measured name=access register=0x0 device=\"pic\" count=90\n\
                 measured name=access register=0x1 device=\"pic\" count=60\n\
                 measured name=access register=0x0 device=\"fwcfg.dma\" count=7\nnoise\n",
            ),
        );
        accesses.add(
            Host::Kvm,
            &outcome(
                "measured name=access register=0x0 device=\"serial\" count=500\n\
                 measured name=access register=0x0 device=\"rtc\" count=3\n",
            ),
        );
        assert_eq!(accesses.by_device(), [("pic", [150, 0]), ("serial", [0, 500]), ("others", [7, 3])]);
        assert!(accesses.text().contains("together                                        157        503"));
        assert_eq!(accesses.json().len(), 5);
    }
}
