//! The results of a run, collected message by message and reported at the end as text or JSON.

use std::fmt::Write;
use std::time::Duration;

use abi::control::{HostInfo, StopReason};
use serde_json::{Value, json};

use crate::exec::Hello;
use crate::quantity::{seconds, show_count};
use crate::stats::{self, Snapshot};

/// The results of one VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct VmRecord {
    /// Its name.
    pub(crate) name: String,
    /// Its vCPUs.
    pub(crate) vcpus: u32,
    /// Its memory in bytes.
    pub(crate) memory_bytes: u64,
    /// When its creation began, in nanoseconds of the host since it came up.
    pub(crate) creating_ns: Option<u64>,
    /// When its first vCPU could run, likewise.
    pub(crate) started_ns: Option<u64>,
    /// Its report when it reached user space, and the time of the report.
    pub(crate) hello: Option<(Hello, u64)>,
    /// When that was heard here, since just before QEMU was started.
    pub(crate) hello_after: Option<Duration>,
    /// The counters as soon as they could be read after that.
    pub(crate) counters_at_hello: Option<Snapshot>,
    /// The last counters that were read.
    pub(crate) counters: Option<Snapshot>,
    /// Why it could not be created.
    pub(crate) failed: Option<String>,
    /// Why it ended, one line for people, and when.
    pub(crate) stopped: Option<(StopReason, String, u64)>,
    /// Status of the command that it ran.
    pub(crate) exit_status: Option<u8>,
    /// Output of the command, up to a limit.
    pub(crate) output: Vec<u8>,
}

/// The results of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Record {
    /// How QEMU ran the host: `tcg` or `kvm`.
    pub(crate) accel: String,
    /// Version of QEMU.
    pub(crate) qemu: String,
    /// The architecture of the host and its guests.
    pub(crate) arch: &'static str,
    /// The CPU model that QEMU was asked for.
    pub(crate) cpu_model: String,
    /// The host's description of itself.
    pub(crate) host: Option<HostInfo>,
    /// The VMs.
    pub(crate) vms: Vec<VmRecord>,
}

impl VmRecord {
    /// Whether it has ended, or never began.
    pub(crate) fn is_over(&self) -> bool {
        self.stopped.is_some() || self.failed.is_some()
    }

    /// Nanoseconds from the start of its creation to its first vCPU.
    fn creation_ns(&self) -> Option<u64> {
        self.started_ns?.checked_sub(self.creating_ns?)
    }

    /// Nanoseconds from its first vCPU to user space.
    pub(crate) fn boot_ns(&self) -> Option<u64> {
        self.hello.as_ref()?.1.checked_sub(self.started_ns?)
    }

    /// A few lines of text.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("vm \"{}\": {} vCPUs", self.name, self.vcpus);
        // Writing to a String cannot fail.
        let _ = match &self.hello {
            Some((hello, _)) => writeln!(text, ", Linux {}, {} CPUs online", hello.kernel, hello.cpus),
            None => writeln!(text),
        };
        if let (Some(boot), Some(creation)) = (self.boot_ns(), self.creation_ns()) {
            let (boot, creation) = (seconds(boot), seconds(creation));
            let _ =
                writeln!(text, "  boot   {boot:.2} s from its start to user space, after {creation:.2} s of creation");
        }
        if let Some(counters) = &self.counters {
            let total = counters.total();
            let all = stats::exits(&total);
            let ranking = stats::ranking(&total).into_iter();
            let reasons = ranking.map(|(name, count)| format!("{name} {}", show_count(count))).collect::<Vec<_>>();
            let _ = writeln!(text, "  exits  {} ({})", show_count(all), reasons.join(", "));
            if let Some(emulation) = stats::Emulation::of(&total) {
                let _ = writeln!(text, "  {emulation}");
            }
            let [guest, host, wait] = stats::time_shares(&total);
            let _ = writeln!(text, "  time   guest {guest:.1} %, host {host:.1} %, waiting for a pCPU {wait:.1} %");
        }
        match (&self.stopped, &self.failed) {
            (Some((reason, detail, _)), _) => {
                let detail = stats::printable(detail);
                let colon = if detail.is_empty() { "" } else { ": " };
                let _ = writeln!(text, "  end    {}{colon}{detail}", reason.name());
            }
            (None, Some(why)) => {
                let _ = writeln!(text, "  end    it could not be created: {}", stats::printable(why));
            }
            (None, None) if self.started_ns.is_none() => {
                let _ = writeln!(text, "  end    it was not started when the host ended");
            }
            (None, None) => {
                let _ = writeln!(text, "  end    it was running when the host ended");
            }
        }
        text
    }

    fn json(&self, clock_hz: u64) -> Value {
        let hello = self.hello.as_ref().map(|(hello, _)| hello);
        let counters = self.counters.as_ref();
        json!({
            "name": self.name,
            "vcpus": self.vcpus,
            "memory_bytes": self.memory_bytes,
            "kernel": hello.map(|hello| &hello.kernel),
            "cpus_online": hello.map(|hello| hello.cpus),
            "guest_uptime_seconds": hello.map(|hello| hello.uptime),
            "creation_seconds": self.creation_ns().map(seconds),
            "boot_seconds": self.boot_ns().map(seconds),
            "hello_wall_seconds": self.hello_after.map(|after| after.as_secs_f64()),
            "run_seconds": self.stopped.as_ref().and_then(|(.., at)| at.checked_sub(self.started_ns?)).map(seconds),
            "exit_status": self.exit_status,
            "output": String::from_utf8_lossy(&self.output),
            "stop_reason": self.stopped.as_ref().map(|(reason, ..)| reason.name()),
            "stop_detail": self.stopped.as_ref().map(|(_, detail, _)| detail),
            "failure": self.failed,
            "counters": counters.map(|snapshot| stats::json(&snapshot.total(), clock_hz)),
            "counters_at_hello": self.counters_at_hello.as_ref().map(|snapshot| stats::json(&snapshot.total(), clock_hz)),
            "vcpu_counters": counters.map(|snapshot| {
                snapshot.vcpus.iter().map(|vcpu| stats::json(vcpu, clock_hz)).collect::<Vec<_>>()
            }),
        })
    }
}

impl Record {
    /// The whole run as one object.
    pub(crate) fn json(&self, status: u8, wall: Duration, errors: &[String]) -> Value {
        let clock_hz = self.host.as_ref().map_or(0, |host| host.clock_hz);
        json!({
            "status": status,
            "errors": errors,
            "wall_seconds": wall.as_secs_f64(),
            "accel": self.accel,
            "emulated": self.accel == "tcg",
            "qemu": self.qemu,
            "cpu_model": self.cpu_model,
            "arch": self.arch,
            "host": self.host.as_ref().map(|host| json!({
                "version": host.version,
                "pcpus": host.pcpus,
                "memory_bytes": host.memory_bytes,
                "tsc_hz": host.clock_hz,
                "processor": host.processor,
            })),
            "vms": self.vms.iter().map(|vm| vm.json(clock_hz)).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> VmRecord {
        let hello = Hello { kernel: "6.1.0".to_string(), cpus: 4, uptime: 0.5 };
        VmRecord {
            name: "default".to_string(),
            vcpus: 4,
            creating_ns: Some(1_000_000_000),
            started_ns: Some(1_500_000_000),
            hello: Some((hello, 4_000_000_000)),
            stopped: Some((StopReason::PowerOff, "vCPU 0".to_string(), 6_500_000_000)),
            ..VmRecord::default()
        }
    }

    #[test]
    fn boot_is_counted_from_the_first_vcpu() {
        let text = record().text();
        assert!(text.starts_with("vm \"default\": 4 vCPUs, Linux 6.1.0, 4 CPUs online\n"), "{text}");
        assert!(text.contains("2.50 s from its start to user space, after 0.50 s of creation"), "{text}");
        assert!(text.contains("power off: vCPU 0"), "{text}");
        let json = record().json(1);
        assert_eq!((&json["boot_seconds"], &json["run_seconds"]), (&json!(2.5), &json!(5.0)));
    }

    #[test]
    fn clock_that_runs_backwards_gives_no_times() {
        let mut record = record();
        record.started_ns = Some(u64::MAX);
        assert_eq!(record.boot_ns(), None);
        assert_eq!(record.json(0)["run_seconds"], Value::Null);
        assert!(!record.text().contains("boot "));
    }
}
