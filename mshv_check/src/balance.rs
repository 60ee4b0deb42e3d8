//! Checks that the kernel has as much memory as before, and has logged no problem.

use std::fs;
use std::io::{ErrorKind, Read, Seek, SeekFrom};

use anyhow::{Context, Result, bail};

/// Words of kernel messages that report a problem. `withdraw`: a partition's pages were not given back.
const BAD: [&str; 9] = [
    "withdraw",
    "WARNING:",
    "BUG:",
    "Oops",
    "general protection",
    "soft lockup",
    "blocked for more than",
    "self-detected stall",
    "Bad page",
];
/// The kernel warns when a guest wants a page that its VMM has protected or unmapped. The check of memory does that.
const EXPECTED: &str = "mshv_region_handle_gfn_fault";
/// Free memory changes by itself. A smaller difference is no loss.
const NOISE_KIB: u64 = 3 * 1024;

/// The state before a check.
pub(crate) struct Balance {
    messages: fs::File,
    free_kib: u64,
}

/// What a check has cost.
pub(crate) struct Cost {
    pub(crate) lost_kib: u64,
}

impl Balance {
    pub(crate) fn before() -> Result<Self> {
        use std::os::unix::fs::OpenOptionsExt;

        let mut options = fs::File::options();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        let mut messages = options.open("/dev/kmsg").context("cannot read /dev/kmsg")?;
        messages.seek(SeekFrom::End(0))?;
        Ok(Self { messages, free_kib: free_kib()? })
    }

    /// Fails if memory was lost or the kernel has complained since.
    pub(crate) fn settle(mut self) -> Result<Cost> {
        let complaints = self.complaints()?;
        if !complaints.is_empty() {
            bail!("the kernel says: {}", complaints.join(" | "));
        }
        let mut lost_kib = u64::MAX;
        // Pages of ended processes and partitions come back a little later.
        for _ in 0..20 {
            lost_kib = lost_kib.min(self.free_kib.saturating_sub(free_kib()?));
            if lost_kib < NOISE_KIB {
                return Ok(Cost { lost_kib });
            }
            std::thread::sleep(std::time::Duration::from_millis(250));
        }
        bail!("{lost_kib} KiB of memory were not given back (before: {} KiB free)", self.free_kib)
    }

    fn complaints(&mut self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let mut record = [0; 8192];
        loop {
            match self.messages.read(&mut record) {
                Ok(0) => return Ok(found),
                Ok(bytes) => found.extend(complaint(&String::from_utf8_lossy(&record[..bytes]))),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(found),
                // The kernel has overwritten what was next.
                Err(error) if error.raw_os_error() == Some(libc::EPIPE) => {}
                Err(error) => return Err(error).context("cannot read /dev/kmsg"),
            }
        }
    }
}

/// The text of a record (`6,339,5140900,-;text`), if it is a complaint.
fn complaint(record: &str) -> Option<String> {
    let text = record.split_once(';')?.1.lines().next()?;
    (BAD.iter().any(|word| text.contains(word)) && !text.contains(EXPECTED)).then(|| text.to_owned())
}

fn free_kib() -> Result<u64> {
    // Memory that the kernel can reclaim at any time is no loss. Without the right to reclaim it, the figure stays
    // noisy.
    let _ = fs::write("/proc/sys/vm/drop_caches", "3");
    let text = fs::read_to_string("/proc/meminfo")?;
    number(&text, "MemFree:").context("no MemFree in /proc/meminfo")
}

fn number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_are_told_from_other_messages() {
        let record = "4,339,5140900,-;mshv: failed to withdraw 3 pages\n SUBSYSTEM=misc\n";
        assert_eq!(complaint(record), Some("mshv: failed to withdraw 3 pages".into()));
        assert_eq!(complaint("6,1,2,-;misc mshv: Hypervisor using core scheduler\n"), None);
        assert_eq!(complaint("4,1,2,-;WARNING: regions.c:455 at mshv_region_handle_gfn_fault+0xee/0x1b0\n"), None);
        assert_eq!(complaint("no record"), None);
    }

    #[test]
    fn free_memory_is_a_number_of_the_kernel() {
        assert_eq!(number("MemTotal:  10 kB\nMemFree:     123 kB\n", "MemFree:"), Some(123));
        assert_eq!(number("MemTotal:  10 kB\n", "MemFree:"), None);
    }
}
