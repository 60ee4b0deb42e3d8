//! Counters as metrics, with names and units by Prometheus's rules.
//!
//! Units are base units (seconds, bytes) at the end of the name; counters that only grow end in `_total`. Each vCPU is
//! a series; a query makes sums (`sum by (vm) (...)`). The help text is the doc comment of the counter's declaration.

use std::fmt::{Error, Write as _};

use abi::control::VmState;
use abi::counters::{ExitReason, VcpuCounters};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::quantity::seconds;
use crate::stats::{Picture, Snapshot, printable, state};

/// All metrics as text. Without a host, only the metric that reports this.
pub(super) fn openmetrics(picture: Option<&Picture>) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape { picture: picture.cloned() }));
    let mut text = String::new();
    match encode(&mut text, &registry) {
        Ok(()) => text,
        // Writing to a String cannot fail. If it did, no text would be better than half a text.
        Err(Error) => "# EOF\n".to_string(),
    }
}

/// Values that a scrape reports once.
#[derive(Debug)]
struct Scrape {
    picture: Option<Picture>,
}

macro_rules! described {
    ($($(#[doc = $text:literal])* $name:ident,)*) => {
        /// All counters except the exits, with their descriptions.
        const COUNTERS: &[(&str, &str)] = &[$((stringify!($name), concat!($($text),*)),)*];
    };
}
abi::vcpu_counters!(described);

impl Collector for Scrape {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> Result<(), Error> {
        gauge(&mut to, "dunlin_up", "Whether a host answers", None, |it| {
            it.encode_gauge(&i64::from(self.picture.is_some()))
        })?;
        let Some(picture) = &self.picture else { return Ok(()) };
        of_host(&mut to, picture)?;
        let vms = labelled(picture);
        of_vms(&mut to, &vms)?;
        of_vcpus(&mut to, &vms, picture.host.clock_hz)
    }
}

fn gauge(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    encode: impl FnOnce(&mut MetricEncoder<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    encode(&mut to.encode_descriptor(name, help, unit, MetricType::Gauge)?)
}

fn of_host(to: &mut DescriptorEncoder<'_>, picture: &Picture) -> Result<(), Error> {
    let host = &picture.host;
    let labels = [("version", printable(&host.version)), ("processor", printable(&host.processor))];
    to.encode_descriptor("dunlin_host", "The host", None, MetricType::Info)?.encode_info(&labels)?;
    let count = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    gauge(to, "dunlin_host_pcpus", "Physical CPUs that run vCPUs", None, |it| {
        it.encode_gauge(&count(u64::from(host.pcpus)))
    })?;
    gauge(to, "dunlin_host_memory", "Memory of the host", Some(&Unit::Bytes), |it| {
        it.encode_gauge(&count(host.memory_bytes))
    })?;
    let up = picture.vms.iter().filter_map(|(_, snapshot)| snapshot.as_ref()).map(|snapshot| snapshot.at_ns).max();
    let Some(up) = up else { return Ok(()) };
    gauge(to, "dunlin_host_uptime", "Time since the host started", Some(&Unit::Seconds), |it| {
        it.encode_gauge(&seconds(up))
    })
}

/// A VM, under a name that no other has.
struct Labelled<'a> {
    name: String,
    info: &'a abi::control::VmInfo,
    snapshot: Option<&'a Snapshot>,
}

fn labelled(picture: &Picture) -> Vec<Labelled<'_>> {
    let mut vms: Vec<Labelled<'_>> = Vec::new();
    for (info, snapshot) in &picture.vms {
        let mut name = printable(&info.name);
        // Names are different; a host is shown, not believed.
        if vms.iter().any(|vm| vm.name == name) {
            let _ = write!(name, "#{}", info.number);
        }
        vms.push(Labelled { name, info, snapshot: snapshot.as_ref() });
    }
    vms
}

fn of_vms(to: &mut DescriptorEncoder<'_>, vms: &[Labelled<'_>]) -> Result<(), Error> {
    let mut each = |name: &str, help: &str, unit: Option<&Unit>, value: fn(&Labelled<'_>) -> u64| {
        gauge(to, name, help, unit, |it| {
            vms.iter().try_for_each(|vm| {
                let value = i64::try_from(value(vm)).unwrap_or(i64::MAX);
                it.encode_family(&[("vm", vm.name.as_str())])?.encode_gauge(&value)
            })
        })
    };
    each("dunlin_vm_running", "Whether the VM runs", None, |vm| u64::from(vm.info.state == VmState::Running))?;
    each("dunlin_vm_vcpus", "vCPUs of the VM", None, |vm| u64::from(vm.info.vcpus))?;
    each("dunlin_vm_memory", "Memory of the VM", Some(&Unit::Bytes), |vm| vm.info.memory_bytes)?;
    let mut info = to.encode_descriptor("dunlin_vm_state", "State of the VM", None, MetricType::Info)?;
    vms.iter().try_for_each(|vm| {
        let labels = [("vm", vm.name.clone()), ("state", state(&vm.info.state))];
        info.encode_info(&labels)
    })
}

fn of_vcpus(to: &mut DescriptorEncoder<'_>, vms: &[Labelled<'_>], clock_hz: u64) -> Result<(), Error> {
    let help = "Exits from the guest, by reason";
    let mut exits = to.encode_descriptor("dunlin_vcpu_exits", help, None, MetricType::Counter)?;
    vcpus(vms, |vm, vcpu, counters| {
        ExitReason::ALL.iter().try_for_each(|&reason| {
            let labels = [("vm", vm), ("vcpu", vcpu), ("reason", reason.name())];
            count(&mut exits.encode_family(&labels)?, &counters.exits_for(reason))
        })
    })?;
    for &(name, help) in COUNTERS {
        let value =
            |counters: &VcpuCounters| counters.named().find(|(of, _)| *of == name).map_or(0, |(_, count)| count);
        let help = help.trim().trim_end_matches('.');
        match name.strip_suffix("_ticks") {
            // Without the clock's rate, ticks cannot be converted to time.
            Some(_) if clock_hz == 0 => {}
            Some(name) => {
                let (name, help) = (format!("dunlin_vcpu_{name}"), help.replacen("Ticks", "Time", 1));
                let mut family = to.encode_descriptor(&name, &help, Some(&Unit::Seconds), MetricType::Counter)?;
                vcpus(vms, |vm, vcpu, counters| {
                    let labels = [("vm", vm), ("vcpu", vcpu)];
                    count(&mut family.encode_family(&labels)?, &(value(counters) as f64 / clock_hz as f64))
                })?;
            }
            None => {
                let name = format!("dunlin_vcpu_{name}");
                let mut family = to.encode_descriptor(&name, help, None, MetricType::Counter)?;
                vcpus(vms, |vm, vcpu, counters| {
                    count(&mut family.encode_family(&[("vm", vm), ("vcpu", vcpu)])?, &value(counters))
                })?;
            }
        }
    }
    Ok(())
}

/// Each vCPU that has counters: its VM, its number, its counters.
fn vcpus(
    vms: &[Labelled<'_>],
    mut tell: impl FnMut(&str, &str, &VcpuCounters) -> Result<(), Error>,
) -> Result<(), Error> {
    for vm in vms {
        for (number, counters) in vm.snapshot.into_iter().flat_map(|snapshot| snapshot.vcpus.iter().enumerate()) {
            tell(&vm.name, &number.to_string(), counters)?;
        }
    }
    Ok(())
}

fn count<V: prometheus_client::encoding::EncodeCounterValue>(
    to: &mut MetricEncoder<'_>,
    value: &V,
) -> Result<(), Error> {
    to.encode_counter::<NoLabelSet, _, u64>(value, None)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use abi::control::{HostInfo, StopReason, VmInfo};

    use super::*;

    fn picture() -> Picture {
        let host = HostInfo {
            version: "0.1.0".to_string(),
            arch: "x86_64".to_string(),
            pcpus: 2,
            memory_bytes: 1 << 30,
            clock_hz: 1_000_000_000,
            processor: "Test\u{1b}\"\\".to_string(),
        };
        let info = |number, name: &str, state| {
            let name = name.to_string();
            VmInfo { number, name, vcpus: 2, memory_bytes: 512 << 20, state }
        };
        let mut counters = VcpuCounters { guest_ticks: 1_500_000_000, flush_kicks: 7, ..VcpuCounters::default() };
        counters.exits[ExitReason::Halt as usize] = 42;
        let snapshot = Snapshot { at_ns: 5_000_000_000, vcpus: vec![counters, VcpuCounters::default()] };
        let gone = info(1, "a", VmState::Stopped(StopReason::PowerOff));
        Picture { host, vms: vec![(info(0, "a", VmState::Running), Some(snapshot)), (gone, None)] }
    }

    #[test]
    fn counters_and_times_have_the_names_and_units_of_prometheus() {
        let text = openmetrics(Some(&picture()));
        for line in [
            "dunlin_up 1",
            "dunlin_vcpu_exits_total{vm=\"a\",vcpu=\"0\",reason=\"halt_exits\"} 42",
            "dunlin_vcpu_guest_seconds_total{vm=\"a\",vcpu=\"0\"} 1.5",
            "dunlin_vcpu_flush_kicks_total{vm=\"a\",vcpu=\"0\"} 7",
            "dunlin_vm_memory_bytes{vm=\"a\"} 536870912",
            "dunlin_vm_running{vm=\"a#1\"} 0",
            "dunlin_host_uptime_seconds 5.0",
            "# TYPE dunlin_vcpu_guest_seconds counter",
            "# UNIT dunlin_vcpu_guest_seconds seconds",
        ] {
            assert!(text.lines().any(|it| it == line), "no line {line} in\n{text}");
        }
        assert!(text.ends_with("# EOF\n") && !text.contains('\u{1b}'));
    }

    #[test]
    fn every_counter_is_there_once_with_help_and_for_every_vcpu() {
        let text = openmetrics(Some(&picture()));
        for &(name, help) in COUNTERS {
            assert!(!help.trim().is_empty(), "{name}");
            let name = name.strip_suffix("_ticks").map_or(name.to_string(), |name| format!("{name}_seconds"));
            let samples = text.lines().filter(|line| line.starts_with(&format!("dunlin_vcpu_{name}_total{{"))).count();
            assert_eq!(samples, 2, "{name}");
        }
        let series: Vec<&str> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.rsplit_once(' '))
            .map(|it| it.0)
            .collect();
        assert_eq!(series.iter().collect::<BTreeSet<_>>().len(), series.len(), "no series twice");
    }

    #[test]
    fn another_parser_reads_every_sample_with_its_labels() {
        let text = openmetrics(Some(&picture()));
        let lines = text.lines().map(|line| Ok(line.to_string()));
        let read = prometheus_parse::Scrape::parse(lines).expect("is read");
        assert_eq!(read.samples.len(), text.lines().filter(|line| !line.starts_with('#')).count());
        let halts = read.samples.iter().find(|sample| {
            sample.metric == "dunlin_vcpu_exits_total"
                && sample.labels.get("reason") == Some("halt_exits")
                && sample.labels.get("vcpu") == Some("0")
        });
        let value = halts.map(|sample| sample.value.clone());
        // In the older format `_total` belongs to the name of the type, so that parser finds no type for this metric.
        assert!(matches!(value, Some(prometheus_parse::Value::Untyped(count)) if count == 42.0), "{value:?}");
        let host = read.samples.iter().find(|sample| sample.metric == "dunlin_host_info").expect("is told");
        // The parser does not resolve escapes.
        assert_eq!(host.labels.get("processor"), Some("Test?\\\"\\\\"));
    }

    #[test]
    fn host_that_is_gone_is_down_and_has_nothing_else() {
        let text = openmetrics(None);
        assert!(text.contains("dunlin_up 0\n") && text.ends_with("# EOF\n"), "{text}");
        assert!(!text.contains("dunlin_vcpu") && !text.contains("dunlin_host"), "{text}");
    }

    #[test]
    fn host_without_a_clock_has_no_times() {
        let mut picture = picture();
        picture.host.clock_hz = 0;
        let text = openmetrics(Some(&picture));
        assert!(!text.contains("dunlin_vcpu_guest") && text.contains("dunlin_vcpu_entries_total"), "{text}");
    }
}
