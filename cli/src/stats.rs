//! Counters: sums, tables for users, JSON for programs. Also `dunlin list` and `stats`, which ask a running host.

mod emulation;
mod faults;
mod machine;
mod picture;

use std::fmt::Write;

use abi::control::{Answer, Command, HostInfo, VMS_CHUNK, VmInfo, VmState};
use abi::counters::{ExitReason, VcpuCounters};
use abi::dirty::DirtyInfo;
use serde_json::{Value, json};

use crate::args::{ListArgs, StatsArgs};
use crate::control::{Client, refusal};
use crate::dirty;
use crate::failure::Failure;
use crate::quantity::{percent, seconds, show_count, show_size};
use crate::share;
pub(crate) use emulation::Emulation;
pub(crate) use faults::Faults;
pub(crate) use picture::Picture;

/// Maximum number of vCPUs per VM that the tool accepts from a host.
pub(crate) const BELIEVABLE_VCPUS: u32 = abi::payload::MAX_VCPUS;

/// All counters of a VM at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    /// When, in nanoseconds of the host since it came up.
    pub(crate) at_ns: u64,
    /// Counters by vCPU.
    pub(crate) vcpus: Vec<VcpuCounters>,
}

impl Snapshot {
    /// The sums over all vCPUs. They saturate: a host that reports nonsense is shown, not believed.
    pub(crate) fn total(&self) -> VcpuCounters {
        let mut sum = VcpuCounters::default();
        for vcpu in &self.vcpus {
            sum.add(vcpu);
        }
        sum
    }
}

/// Sum of all exits, saturating.
pub(crate) fn exits(counters: &VcpuCounters) -> u64 {
    counters.exits.iter().fold(0, |sum, &count| sum.saturating_add(count))
}

/// Exit reasons that occurred with their counts, most frequent first.
pub(crate) fn ranking(counters: &VcpuCounters) -> Vec<(&'static str, u64)> {
    let mut ranking: Vec<_> = ExitReason::ALL
        .iter()
        .map(|&reason| (reason.name(), counters.exits_for(reason)))
        .filter(|&(_, count)| count > 0)
        .collect();
    ranking.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    ranking
}

macro_rules! difference {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The increase from `old` to `new`; zero where a counter decreased.
        pub(crate) fn difference(old: &VcpuCounters, new: &VcpuCounters) -> VcpuCounters {
            let mut difference = VcpuCounters::default();
            for (at, exits) in difference.exits.iter_mut().enumerate() {
                *exits = new.exits[at].saturating_sub(old.exits[at]);
            }
            $(difference.$name = new.$name.saturating_sub(old.$name);)*
            difference
        }
    };
}
abi::vcpu_counters!(difference);

/// Time in the guest, in the host and waiting, in per cent of their sum.
pub(crate) fn time_shares(counters: &VcpuCounters) -> [f64; 3] {
    let parts = [counters.guest_ticks, counters.host_ticks, counters.wait_ticks];
    let whole = parts.iter().fold(0, |sum: u64, &ticks| sum.saturating_add(ticks));
    parts.map(|part| percent(part, whole))
}

/// The exit table, in the columns of `perf kvm stat`, and where time went.
pub(crate) fn table(snapshot: &Snapshot, per_vcpu: bool) -> String {
    let total = snapshot.total();
    let all = exits(&total);
    let [guest, host, wait] = time_shares(&total);
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "  {:<22}{:>16}{:>10}", "VM-EXIT", "Samples", "Samples%");
    for (name, count) in ranking(&total) {
        let _ = writeln!(text, "  {name:<22}{:>16}{:>9.2}%", show_count(count), percent(count, all));
    }
    let _ = writeln!(text, "  {:<22}{:>16}{:>9.2}%", "all", show_count(all), percent(all, all));
    let _ = writeln!(
        text,
        "  entries {}, injected {} interrupts, {} NMIs, {} exceptions; {} halts that blocked, {} migrations",
        show_count(total.entries),
        show_count(total.irq_injections),
        show_count(total.nmi_injections),
        show_count(total.exception_injections),
        show_count(total.blocks),
        show_count(total.migrations)
    );
    let _ = writeln!(
        text,
        "  tags: {} entries flushed TLB entries ({} of them those of all tags), {} assignments, {} new generations",
        show_count(total.tlb_flushes),
        show_count(total.tlb_flushes_all),
        show_count(total.tag_assignments),
        show_count(total.tag_generations)
    );
    if total.flush_calls.max(total.ipi_calls) > 0 {
        let _ = writeln!(
            text,
            "  shootdowns: {} calls for {} other vCPUs, {} of them kicked; flushed {} pages, {} times everything; {} calls sent IPIs",
            show_count(total.flush_calls),
            show_count(total.flush_targets),
            show_count(total.flush_kicks),
            show_count(total.flush_pages),
            show_count(total.flush_whole),
            show_count(total.ipi_calls)
        );
    }
    if let Some(emulation) = Emulation::of(&total) {
        let _ = writeln!(text, "  {emulation}");
    }
    if let Some(faults) = Faults::of(&total) {
        let _ = writeln!(text, "  {faults}");
    }
    let _ = writeln!(text, "  time: guest {guest:.1} %, host {host:.1} %, waiting {wait:.1} %");
    if per_vcpu {
        let _ =
            writeln!(text, "  {:>5}{:>14}{:>14}{:>9}{:>9}{:>9}", "vCPU", "exits", "injected", "guest", "host", "wait");
        for (number, vcpu) in snapshot.vcpus.iter().enumerate() {
            let [guest, host, wait] = time_shares(vcpu);
            let _ = writeln!(
                text,
                "  {number:>5}{:>14}{:>14}{guest:>8.1}%{host:>8.1}%{wait:>8.1}%",
                show_count(exits(vcpu)),
                show_count(vcpu.irq_injections)
            );
        }
    }
    text
}

/// Counters as JSON; times in seconds if the host's clock is known.
pub(crate) fn json(counters: &VcpuCounters, clock_hz: u64) -> Value {
    let by_reason: serde_json::Map<_, _> =
        ExitReason::ALL.iter().map(|&reason| (reason.name().to_string(), json!(counters.exits_for(reason)))).collect();
    let time = |ticks: u64| if clock_hz == 0 { Value::Null } else { json!(ticks as f64 / clock_hz as f64) };
    let mut all = serde_json::Map::new();
    all.insert("exits_total".to_string(), json!(exits(counters)));
    all.insert("exits".to_string(), Value::Object(by_reason));
    for (name, count) in counters.named() {
        match name.strip_suffix("_ticks") {
            Some(name) => all.insert(format!("{name}_seconds"), time(count)),
            None => all.insert(name.to_string(), json!(count)),
        };
    }
    Value::Object(all)
}

/// The host's description of itself.
pub(crate) fn host(client: &mut Client) -> Result<HostInfo, Failure> {
    match client.ask(Command::Hello)? {
        Ok(Answer::Host(info)) => Ok(info),
        other => Err(unexpected(other.map_err(refusal))),
    }
}

/// The VMs of the host.
pub(crate) fn list(client: &mut Client) -> Result<Vec<VmInfo>, Failure> {
    let mut all: Vec<VmInfo> = Vec::new();
    loop {
        let first = all.last().map_or(0, |vm| vm.number.saturating_add(1));
        match client.ask(Command::List { first })? {
            // Numbers only increase, so this ends whatever the host answers.
            Ok(Answer::Vms(vms)) if vms.iter().all(|vm| vm.number >= first) => {
                let is_last = vms.len() < VMS_CHUNK;
                all.extend(vms);
                all.sort_by_key(|vm| vm.number);
                all.dedup_by_key(|vm| vm.number);
                if is_last || all.last().is_none_or(|vm| vm.number == u32::MAX) {
                    return Ok(all);
                }
            }
            other => return Err(unexpected(other.map_err(refusal))),
        }
    }
}

/// All counters of a VM, or the reason why there are none.
pub(crate) fn snapshot(client: &mut Client, vm: u32, vcpus: u32) -> Result<Result<Snapshot, &'static str>, Failure> {
    let mut snapshot = Snapshot::default();
    let vcpus = vcpus.min(BELIEVABLE_VCPUS);
    while let Some(first) = u32::try_from(snapshot.vcpus.len()).ok().filter(|&first| first < vcpus) {
        match client.ask(Command::Stats { vm, first })? {
            Ok(Answer::Stats { vm: of, first: from, at_ns, vcpus: counters })
                if of == vm && from == first && !counters.is_empty() =>
            {
                snapshot.at_ns = at_ns;
                snapshot.vcpus.extend(counters);
            }
            Err(why) => return Ok(Err(refusal(why))),
            other => return Err(unexpected(other.map_err(refusal))),
        }
    }
    Ok(Ok(snapshot))
}

/// A VM's stage-2 tables, if it runs.
fn tables(client: &mut Client, vm: u32) -> Result<Option<DirtyInfo>, Failure> {
    match client.ask(Command::DirtyInfo { vm })? {
        Ok(Answer::Dirty(info)) => Ok(Some(info)),
        Ok(other) => Err(unexpected(Ok(other))),
        Err(_) => Ok(None),
    }
}

/// A VM's state in words.
pub(crate) fn state(state: &VmState) -> String {
    match state {
        VmState::Created => "created".to_string(),
        VmState::Running => "running".to_string(),
        VmState::Stopped(reason) => format!("ended: {}", reason.name()),
        VmState::Failed => "could not be created".to_string(),
    }
}

/// `dunlin list`.
pub(crate) fn run_list(args: &ListArgs) -> Result<(), Failure> {
    let vms = list(&mut share::attach(args.host.host)?)?;
    if args.json {
        let vms: Vec<_> = vms
            .iter()
            .map(|vm| {
                json!({ "vm": vm.number, "name": vm.name, "vcpus": vm.vcpus, "memory_bytes": vm.memory_bytes,
                        "state": state(&vm.state) })
            })
            .collect();
        println!("{}", Value::from(vms));
        return Ok(());
    }
    println!("{:>3}  {:<20}{:>6}{:>12}  STATE", "VM", "NAME", "vCPUs", "MEMORY");
    for vm in &vms {
        let (number, memory) = (vm.number, show_size(vm.memory_bytes));
        println!("{number:>3}  {:<20}{:>6}{memory:>12}  {}", printable(&vm.name), vm.vcpus, state(&vm.state));
    }
    Ok(())
}

/// `dunlin stats`.
pub(crate) fn run_stats(args: &StatsArgs) -> Result<(), Failure> {
    let mut client = share::attach(args.host.flatten())?;
    let info = host(&mut client)?;
    let only_host = args.host == Some(None);
    if only_host || args.verbose && !args.json {
        machine::show(&mut client, &info, args.json)?;
    }
    if only_host {
        return Ok(());
    }
    let vms = list(&mut client)?;
    let chosen = match &args.vm {
        Some(name) => vec![find(&vms, name)?],
        None => vms.iter().collect(),
    };

    let mut all = Vec::new();
    for vm in chosen {
        let snapshot = match snapshot(&mut client, vm.number, vm.vcpus)? {
            Ok(snapshot) => snapshot,
            Err(why) if args.vm.is_some() => return Err(Failure::failed(format!("vm \"{}\": {why}", vm.name))),
            Err(why) => {
                eprintln!("vm \"{}\": {why}", printable(&vm.name));
                continue;
            }
        };
        let tables = tables(&mut client, vm.number)?;
        if args.json {
            let vcpus: Vec<_> = snapshot.vcpus.iter().map(|vcpu| json(vcpu, info.clock_hz)).collect();
            let tables = tables.map(|info| json!({ "table_bytes": info.table_bytes, "joined": info.collapses }));
            all.push(json!({ "vm": vm.number, "name": vm.name, "state": state(&vm.state), "stage2": tables,
                "at_seconds": seconds(snapshot.at_ns), "total": json(&snapshot.total(), info.clock_hz), "vcpus": vcpus }));
        } else {
            let (name, state) = (printable(&vm.name), state(&vm.state));
            println!("vm \"{name}\", {} vCPUs, {state}, {:.1} s", vm.vcpus, seconds(snapshot.at_ns));
            print!("{}", table(&snapshot, args.verbose));
            if let Some(info) = tables {
                println!("  {}", dirty::tables_in_words(&info));
            }
        }
    }
    if args.json {
        println!("{}", Value::from(all));
    }
    Ok(())
}

/// The VM of that name, or else of that number.
pub(crate) fn find<'a>(vms: &'a [VmInfo], wanted: &str) -> Result<&'a VmInfo, Failure> {
    let by_name = vms.iter().find(|vm| vm.name == wanted);
    let by_number = || vms.iter().find(|vm| wanted.parse() == Ok(vm.number));
    by_name.or_else(by_number).ok_or_else(|| {
        let names = vms.iter().map(|vm| printable(&vm.name)).collect::<Vec<_>>().join(", ");
        Failure::bad_input(format!("there is no VM '{wanted}'")).help(format!("this host has: {names}"))
    })
}

/// Text from a host, without characters that could move a terminal's cursor.
pub(crate) fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The message for a refusal, or for an answer that does not match the question.
pub(crate) fn unexpected(answer: Result<Answer, &'static str>) -> Failure {
    match answer {
        Ok(_) => Failure::failed("the answer does not match the request").help("does it have another version?"),
        Err(why) => Failure::failed(why),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_nonsense_saturate() {
        let most = VcpuCounters { exits: [u64::MAX; ExitReason::COUNT], guest_ticks: u64::MAX, ..Default::default() };
        let snapshot = Snapshot { at_ns: 0, vcpus: vec![most, most] };
        assert_eq!(exits(&snapshot.total()), u64::MAX);
        assert!(table(&snapshot, true).contains("guest 100.0 %"));
    }

    #[test]
    fn reasons_are_ranked_and_absent_ones_left_out() {
        let mut counters = VcpuCounters::default();
        counters.count_exit(ExitReason::Halt);
        counters.count_exit(ExitReason::PortIo);
        counters.count_exit(ExitReason::PortIo);
        assert_eq!(ranking(&counters), [("io_exits", 2), ("halt_exits", 1)]);
        let text = table(&Snapshot { at_ns: 0, vcpus: vec![counters] }, false);
        assert!(text.contains("io_exits") && text.contains("66.67%") && !text.contains("mmio"), "{text}");
    }

    #[test]
    fn emulation_has_a_line_only_if_there_was_any() {
        let mut counters = VcpuCounters::default();
        counters.count_exit(ExitReason::Halt);
        let table_of = |counters| table(&Snapshot { at_ns: 0, vcpus: vec![counters, counters] }, false);
        assert!(!table_of(counters).contains("emulation"));
        counters.count_exit(ExitReason::Mmio);
        assert!(table_of(counters).contains("\n  emulation: 2 accesses\n"));
    }

    #[test]
    fn difference_is_of_every_counter_and_never_below_nothing() {
        let old = VcpuCounters { entries: 5, decode_hits: 9, ..VcpuCounters::default() };
        let mut new = VcpuCounters { entries: 7, decode_hits: 8, emulations_refused: 3, ..VcpuCounters::default() };
        new.count_exit(ExitReason::Mmio);
        let mut expected = VcpuCounters { entries: 2, emulations_refused: 3, ..VcpuCounters::default() };
        expected.count_exit(ExitReason::Mmio);
        assert_eq!(difference(&old, &new), expected);
    }

    #[test]
    fn vm_that_never_ran_has_a_table() {
        let text = table(&Snapshot::default(), true);
        assert!(text.contains("guest 0.0 %, host 0.0 %, waiting 0.0 %"), "{text}");
    }

    #[test]
    fn names_from_a_host_cannot_move_the_cursor() {
        assert_eq!(printable("a\u{1b}[2Jb\n"), "a?[2Jb?");
    }
}
