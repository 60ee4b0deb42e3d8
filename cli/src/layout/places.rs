//! Addresses of a running host's blocks: whether each begins with a cache line, and no line belongs to two.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use abi::layout::{Place, Whose};
use serde_json::{Value, json};

use crate::quantity::show_size;
use crate::stats::printable;

/// Bytes of a page, after which the sets of the innermost caches repeat.
const PAGE: u64 = 4096;
/// Maximum number of faults of each kind that are printed one by one.
const MOST_TOLD: usize = 10;

/// Findings about all addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Placement {
    owners: [usize; 3],
    places: usize,
    bytes: u64,
    /// For each kind of block: the number of blocks, and the number of different offsets within a page at which they
    /// begin.
    starts: BTreeMap<String, (usize, usize)>,
    /// Blocks that do not begin with a line.
    askew: Vec<String>,
    /// Pairs of blocks that share a line.
    shared: Vec<String>,
}

impl Placement {
    /// Checks these addresses, with lines of `line` bytes.
    pub(super) fn of(places: &[Place], line: u64) -> Self {
        let mut in_order: Vec<&Place> = places.iter().filter(|place| place.bytes > 0).collect();
        in_order.sort_by_key(|place| place.hva);
        let last_line = |place: &Place| place.hva.saturating_add(u64::from(place.bytes) - 1) / line;
        let mut shared = Vec::new();
        // The block that reaches furthest so far: a short block within it must not hide it.
        let mut furthest: Option<&Place> = None;
        for place in &in_order {
            if let Some(before) = furthest.filter(|before| last_line(before) >= place.hva / line) {
                shared.push(format!("{} and {}", describe(before), describe(place)));
            }
            if furthest.is_none_or(|before| last_line(place) > last_line(before)) {
                furthest = Some(place);
            }
        }
        let mut starts: BTreeMap<String, (usize, BTreeSet<u64>)> = BTreeMap::new();
        for place in &in_order {
            let (count, lines) = starts.entry(printable(&place.what)).or_default();
            *count += 1;
            lines.insert(place.hva % PAGE / line);
        }
        let askew = in_order.iter().filter(|place| !place.hva.is_multiple_of(line)).map(|place| describe(place));
        let owners: BTreeSet<Whose> = places.iter().map(|place| place.whose).collect();
        let count = |is: fn(&Whose) -> bool| owners.iter().filter(|whose| is(whose)).count();
        Self {
            owners: [
                count(|whose| matches!(whose, Whose::Pcpu(_))),
                count(|whose| matches!(whose, Whose::Vm(_))),
                count(|whose| matches!(whose, Whose::Vcpu(..))),
            ],
            places: places.len(),
            bytes: places.iter().map(|place| u64::from(place.bytes)).sum(),
            starts: starts.into_iter().map(|(what, (count, lines))| (what, (count, lines.len()))).collect(),
            askew: askew.collect(),
            shared,
        }
    }

    /// Whether all is as it should be.
    pub(super) fn is_good(&self) -> bool {
        self.askew.is_empty() && self.shared.is_empty()
    }

    pub(super) fn json(&self) -> Value {
        let starts: BTreeMap<_, _> = self
            .starts
            .iter()
            .map(|(what, (count, lines))| (what, json!({ "count": count, "different_lines_of_a_page": lines })))
            .collect();
        json!({ "places": self.places, "bytes": self.bytes, "starts": starts, "not_at_a_line": self.askew,
            "sharing_a_line": self.shared })
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [pcpus, vms, vcpus] = self.owners;
        let Self { places, bytes, .. } = self;
        writeln!(
            f,
            "Where they are: {places} places of {pcpus} pCPUs, {vms} VMs and {vcpus} vCPUs, {}",
            show_size(*bytes)
        )?;
        for (what, (count, lines)) in &self.starts {
            match lines {
                1 => writeln!(f, "  {what}: {count}, beginning with the same line of a page")?,
                _ => writeln!(f, "  {what}: {count}, beginning with {lines} different lines of a page")?,
            }
        }
        for (what, faults) in [("does not begin with a line", &self.askew), ("share a line", &self.shared)] {
            for fault in faults.iter().take(MOST_TOLD) {
                writeln!(f, "  WRONG: {fault}: {what}")?;
            }
            if faults.len() > MOST_TOLD {
                writeln!(f, "  WRONG: and {} more: {what}", faults.len() - MOST_TOLD)?;
            }
        }
        if self.is_good() {
            writeln!(f, "  Each begins with a line, and no line belongs to two.")?;
        }
        Ok(())
    }
}

fn describe(place: &Place) -> String {
    let whose = match place.whose {
        Whose::Pcpu(pcpu) => format!("pCPU {pcpu}"),
        Whose::Vm(vm) => format!("VM {vm}"),
        Whose::Vcpu(vm, vcpu) => format!("VM {vm} vCPU {vcpu}"),
        Whose::EachPcpu => "each pCPU".to_string(),
    };
    format!("{} of {whose} at {:#x}", printable(&place.what), place.hva)
}

pub(super) fn json(place: &Place) -> Value {
    let Place { whose, what, hva, bytes } = place;
    let (pcpu, vm, vcpu) = match *whose {
        Whose::Pcpu(pcpu) => (Some(pcpu), None, None),
        Whose::Vm(vm) => (None, Some(vm), None),
        Whose::Vcpu(vm, vcpu) => (None, Some(vm), Some(vcpu)),
        Whose::EachPcpu => (None, None, None),
    };
    json!({ "what": what, "pcpu": pcpu, "vm": vm, "vcpu": vcpu, "hva": hva, "bytes": bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(vcpu: u32, hva: u64, bytes: u32) -> Place {
        Place { whose: Whose::Vcpu(0, vcpu), what: "Vcpu".to_string(), hva, bytes }
    }

    #[test]
    fn blocks_side_by_side_are_in_order() {
        let placement = Placement::of(&[place(1, 0x2080, 256), place(0, 0x1000, 0x1080)], 128);
        assert!(placement.is_good(), "{placement}");
        assert_eq!((placement.owners, placement.starts["Vcpu"]), ([0, 0, 2], (2, 2)));
        assert!(placement.to_string().contains("no line belongs to two"));
    }

    #[test]
    fn line_of_two_and_block_within_another_are_told() {
        let shared = |places: &[Place]| Placement::of(places, 128).shared.len();
        assert_eq!(shared(&[place(0, 0x1000, 129), place(1, 0x1080, 128)]), 1);
        // The second is within the first, and so is the third, which does not touch the second.
        assert_eq!(shared(&[place(0, 0x1000, 0x1000), place(1, 0x1080, 128), place(2, 0x1800, 128)]), 2);
        let placement = Placement::of(&[place(0, 0x1040, 64)], 128);
        assert_eq!(placement.askew, ["Vcpu of VM 0 vCPU 0 at 0x1040"]);
        assert!(placement.to_string().contains("WRONG: Vcpu of VM 0 vCPU 0 at 0x1040: does not begin with a line"));
    }

    #[test]
    fn nonsense_from_a_host_does_no_harm() {
        let all = [place(0, u64::MAX, u32::MAX), place(1, u64::MAX - 1, 1), place(2, 0, 0)];
        assert!(!Placement::of(&all, 128).is_good());
        assert!(Placement::of(&[], 1).is_good());
    }
}
