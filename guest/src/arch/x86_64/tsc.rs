//! Time: the TSC and its frequency.
//!
//! The guest takes the frequency from the first source that has it, in this order: the command line, CPUID leaf 15h,
//! Hyper-V's MSR, the timing leaf of hypervisors (4000_0010), VMware's hypercall, KVM's clock page. The last source
//! counts the TSC against the PIT.

use core::arch::asm;
use core::sync::atomic::{AtomicU64, Ordering};

use super::{attempt, control, hyperv, port};

static KHZ: AtomicU64 = AtomicU64::new(1_000_000);

/// Ticks of the TSC now. Earlier instructions have completed.
pub(crate) fn now() -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: reads a counter.
    unsafe { asm!("lfence", "rdtsc", out("rax") low, out("rdx") high, options(nostack, nomem, preserves_flags)) };
    high << 32 | low
}

/// TSC_AUX.
pub(super) fn aux() -> u32 {
    let aux: u32;
    // SAFETY: reads registers; callers know from CPUID that RDTSCP exists.
    unsafe { asm!("rdtscp", out("rax") _, out("rdx") _, out("ecx") aux, options(nostack, nomem)) };
    aux
}

/// The TSC's frequency in kHz.
pub(crate) fn khz() -> u64 {
    KHZ.load(Ordering::Relaxed)
}

/// Ticks in `microseconds`.
pub(crate) fn ticks(microseconds: u64) -> u64 {
    microseconds.saturating_mul(khz()) / 1000
}

/// Ticks in `seconds`.
pub(crate) fn seconds(seconds: u64) -> u64 {
    seconds.saturating_mul(khz()).saturating_mul(1000)
}

/// Microseconds in `ticks`.
pub(crate) fn microseconds(ticks: u64) -> u64 {
    ticks.saturating_mul(1000) / khz().max(1)
}

/// Spins until the TSC has reached `deadline`.
pub(crate) fn pause_until(deadline: u64) {
    while now() < deadline {
        core::hint::spin_loop();
    }
}

/// Finds the frequency and answers the name of the source.
pub(crate) fn calibrate(from_command_line: Option<u64>) -> &'static str {
    let sources: [(&str, &dyn Fn() -> Option<u64>); 7] = [
        ("command-line", &|| from_command_line),
        ("cpuid-15h", &from_crystal),
        ("hyperv-msr", &|| hyperv::clock_hz().map(|hz| hz / 1000)),
        ("hypervisor-leaf", &from_hypervisor_leaf),
        ("vmware-hypercall", &from_vmware),
        ("kvmclock", &from_kvmclock),
        ("pit", &from_pit),
    ];
    for (name, source) in sources {
        if let Some(khz) = source().filter(|khz| (10_000..100_000_000).contains(khz)) {
            KHZ.store(khz, Ordering::Relaxed);
            return name;
        }
    }
    "assumed"
}

/// Leaf 15h: crystal Hz times EBX/EAX.
fn from_crystal() -> Option<u64> {
    let leaf = control::cpuid(0x15, 0);
    (u64::from(leaf.ecx) * u64::from(leaf.ebx)).checked_div(u64::from(leaf.eax)).map(|hz| hz / 1000)
}

/// Leaf 4000_0010: EAX = TSC in kHz (VMware's proposal; KVM's user space and others fill it too).
fn from_hypervisor_leaf() -> Option<u64> {
    control::hypervisor()?;
    Some(u64::from(control::cpuid(0x4000_0010, 0).eax))
}

fn from_vmware() -> Option<u64> {
    if control::hypervisor()?.is(b"VMwareVMware") { attempt::vmware_tsc_hz().map(|hz| hz / 1000) } else { None }
}

#[repr(C, align(64))]
struct ClockPage([AtomicU64; 4]);

static CLOCK_PAGE: ClockPage = ClockPage([const { AtomicU64::new(0) }; 4]);

/// KVM's clock (feature bit 3, MSR 4b56_4d01): nanoseconds = ticks << shift * multiplier >> 32.
fn from_kvmclock() -> Option<u64> {
    const SYSTEM_TIME: u32 = 0x4b56_4d01;
    if !control::hypervisor()?.is(b"KVMKVMKVM") || control::cpuid(0x4000_0001, 0).eax >> 3 & 1 == 0 {
        return None;
    }
    attempt::wrmsr(SYSTEM_TIME, &raw const CLOCK_PAGE as u64 | 1).ok()?;
    let word = CLOCK_PAGE.0[3].load(Ordering::SeqCst);
    attempt::wrmsr(SYSTEM_TIME, 0).ok()?;

    let multiplier = word & 0xffff_ffff;
    let shift = (word >> 32 & 0xff) as u8 as i8;
    let khz = (1_000_000u64 << 32).checked_div(multiplier)?;
    Some(if shift >= 0 {
        khz >> u32::from(shift.unsigned_abs()).min(63)
    } else {
        khz << u32::from(shift.unsigned_abs()).min(16)
    })
}

/// Counts the TSC while channel 2 of the PIT (1.193182 MHz, ports 42h, 43h, 61h) counts down 10 ms.
fn from_pit() -> Option<u64> {
    const COUNT: u16 = 11_932;
    const OUT: u32 = 1 << 5;
    // Gate on, speaker off; mode 0: OUT goes up when the count ends.
    port::write(0x61, 1, (port::read(0x61, 1) & 0xfc) | 1);
    port::write(0x43, 1, 0xb0);
    port::write(0x42, 1, u32::from(COUNT & 0xff));
    let start = now();
    port::write(0x42, 1, u32::from(COUNT >> 8));

    // Without a PIT the port reads all ones or zero for ever.
    if port::read(0x61, 1) & OUT != 0 {
        return None;
    }
    for _ in 0..1_000_000 {
        if port::read(0x61, 1) & OUT != 0 {
            return Some((now() - start) / 10);
        }
        if now() - start > 2_000_000_000 {
            return None;
        }
    }
    None
}
