//! Interrupts of devices to all CPUs at once: the I/O APIC's pins of COM1 and COM2, with destination FFh.

use core::sync::atomic::Ordering;

use crate::arch::attempt::{self, Fault};
use crate::arch::{boot, port, tsc};
use crate::cpu;
use crate::experiments::{Context, Outcome};
use crate::interrupt::{COUNTED, taken};
use crate::record::record;

/// Registers of the I/O APIC: which one, and its value.
const INDEX: u64 = 0;
const DATA: u64 = 0x10;
/// The pins of COM1 and COM2, as on each PC.
const PINS: [u32; 2] = [4, 3];
const MASKED: u32 = 1 << 16;
const LEVEL: u32 = 1 << 15;
const LOGICAL: u32 = 1 << 11;
/// As a physical and as a logical destination: everybody.
const EVERYBODY: u32 = 0xff << 24;
/// Which interrupts a UART raises; bit 1: the transmitter is empty. And the modem's control: bit 3 connects them.
const ENABLE: [u16; 2] = [0x3f9, 0x2f9];
const TRANSMITTER: u32 = 2;
const MODEM: [u16; 2] = [0x3fc, 0x2fc];
const CONNECT: u32 = 8;

fn write(at: u64, register: u32, value: u32) -> Result<(), Fault> {
    attempt::store_u32(at + INDEX, register)?;
    attempt::store_u32(at + DATA, value)
}

/// Sets the entry of a pin.
fn route(at: u64, pin: u32, entry: u32) -> Result<(), Fault> {
    let register = 0x10 + 2 * pin;
    write(at, register, MASKED | entry)?;
    write(at, register + 1, EVERYBODY)?;
    write(at, register, entry)
}

/// Each CPU gets each interrupt once, whether it works or sleeps. A line that stays asserted comes again and again, so
/// each CPU gets it once at least.
pub(super) fn to_all(context: &Context) -> Outcome {
    let Some(at) = boot::io_apic() else { return Outcome::Unsupported("needs an I/O APIC") };
    if !context.judged {
        return Outcome::Unsupported("needs UARTs that nobody else uses");
    }
    let mut failures = 0;
    for (enable, modem) in ENABLE.into_iter().zip(MODEM) {
        port::write(enable, 1, 0);
        port::write(modem, 1, CONNECT | port::read(modem, 1) & 0xff);
    }
    let rounds = context.settings.iterations.unwrap_or(9);
    for round in 0..rounds {
        // Lines that stay asserted come last: nobody knows how many of their interrupts are on their way.
        let (about, lines, mode): (_, &[usize], _) = match round % 2 {
            _ if round >= rounds - rounds / 3 => ("two-levels", &[0, 1], LOGICAL | LEVEL),
            0 => ("edge-physical", &[1], 0),
            _ => ("edge-logical", &[1], LOGICAL),
        };
        let is_level = mode & LEVEL != 0;
        let set = |mode: u32| lines.iter().try_for_each(|line| route(at, PINS[*line], mode | u32::from(COUNTED)));
        let assert = |value: u32| lines.iter().for_each(|line| port::write(ENABLE[*line], 1, value));
        if set(mode).is_err() {
            return Outcome::Unsupported("the I/O APIC is not where the firmware says");
        }
        let before: [u64; boot::MAX_CPUS] = core::array::from_fn(counted);
        let gained = |cpu: usize| counted(cpu) - before[cpu];
        assert(TRANSMITTER);
        if is_level {
            // It comes again at each end of an interrupt. Who takes it does nothing else then, so this CPU does later.
            let last = tsc::now() + tsc::seconds(10);
            while (1..cpu::count()).all(|cpu| gained(cpu) == 0) && tsc::now() < last {
                core::hint::spin_loop();
            }
        }
        assert(0);
        cpu::wait_until(tsc::seconds(10), || (0..cpu::count()).all(|cpu| gained(cpu) > 0));
        // Time for one too many.
        tsc::pause_until(tsc::now() + tsc::ticks(2_000));
        let is_right = |cpu: &usize| if is_level { gained(*cpu) > 0 } else { gained(*cpu) == 1 };
        let right = (0..cpu::count()).filter(is_right).count();
        let wanted = format_args!("{}-cpus", cpu::count());
        let seen = format_args!("{right}-cpus");
        failures += context.expect("pin-to-all", format_args!("{about}"), wanted, seen, right == cpu::count());
        let _masked = set(MASKED);
    }
    record!("record", experiment = "pin-to-all", failures = failures);
    Outcome::Done { failures }
}

fn counted(cpu: usize) -> u64 {
    taken(cpu).counted.load(Ordering::SeqCst)
}
