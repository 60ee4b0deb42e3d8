//! Instructions per exit, exits of a boot, and the time of a boot.

use maud::{Markup, html};

use super::super::data::Data;
use super::super::number::number;
use super::super::plot::{Bar, Bars};
use super::{cell, table};
use crate::bench::kvm_instructions;

pub(super) fn exits(data: &Data) -> Markup {
    const QUANTITY: &str = "instructions of one exit";
    let mut rows: Vec<(f64, Vec<String>)> = Vec::new();
    for (key, series) in data.series("exits", QUANTITY) {
        let (exit, Some(spread)) = (key.setting("exit"), series.spread()) else { continue };
        let kvm = kvm_instructions(&key.arch, exit);
        let ratio = kvm.map_or("–".to_string(), |kvm| format!("{:.3}", spread.median / kvm as f64));
        let row = vec![
            key.setting("what").to_string(),
            cell(data, "exits", QUANTITY, &[("exit", exit)], 1.0),
            kvm.map_or("–".to_string(), |kvm| number(kvm as f64)),
            ratio,
        ];
        rows.push((spread.median, row));
    }
    rows.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    let rows: Vec<_> = rows.into_iter().map(|(_, row)| row).collect();
    html! {
        (table("Instructions of one exit, emulated, exact; KVM's (Linux 6.1, on AArch64 6.12) were counted in the same way on the same emulated machine, with a guest of its own.",
            &["exit", "Dunlin", "KVM", "ratio"], &rows))
    }
}

pub(super) fn budget(data: &Data) -> Markup {
    let mut bars: Vec<Bar> = data
        .series("budget", "exits of a boot, by reason")
        .filter_map(|(key, series)| Some((key.setting("reason").to_string(), series.spread()?)))
        .filter(|(_, spread)| spread.greatest > 0.0)
        .map(|(name, value)| Bar { name, colour: 0, value })
        .collect();
    bars.sort_by(|one, other| other.value.median.total_cmp(&one.value.median));
    let groups = vec![(String::new(), bars)];
    let title = "Exits of a boot by reason, emulated, median of the runs".to_string();
    let all = vec![vec!["all exits".to_string(), cell(data, "budget", "exits of a boot", &[], 1.0)]];
    html! {
        @if let Some(plot) = (Bars { title, unit: "exits", groups }).draw() { (plot) }
        (table("Exits up to user space, emulated.", &["", "median (least–greatest)"], &all))
    }
}

pub(super) fn boot(data: &Data) -> Markup {
    const QUANTITIES: [(&str, &str); 5] = [
        ("boot, from the start of the VM", "Dunlin, from the start of the VM"),
        ("boot, with the creation of the VM", "with the creation of the VM"),
        ("boot, from the start of QEMU and hypervisor", "from the start of QEMU and hypervisor"),
        ("boot of QEMU alone, from its start", "QEMU alone, from its start"),
        ("boot, Dunlin to QEMU alone", "ratio, pair by pair"),
    ];
    let mut rows = Vec::new();
    for (quantity, what) in QUANTITIES {
        for (key, series) in data.series("boot", quantity) {
            let settings = [("vcpus", key.setting("vcpus")), ("memory", key.setting("memory"))];
            rows.push(vec![
                what.to_string(),
                format!("{} on {}", key.setting("vcpus"), key.setting("pcpus")),
                cell(data, "boot", quantity, &settings, 1.0),
                series.samples.len().to_string(),
            ]);
        }
    }
    html! {
        (table("Boot to user space, seconds, emulated: median (least–greatest).",
            &["", "vCPUs on pCPUs", "seconds, or ratio", "boots"], &rows))
    }
}
