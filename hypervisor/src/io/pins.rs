//! The I/O APIC of the VM that has the machine's devices.
//!
//! The owner writes its redirection entries here. What an entry says is then written to the machine's I/O APIC, with
//! the vector unchanged. So the machine's interrupt arrives at the pCPU with the number of the wanted vCPU, with the
//! wanted vector, as those do that devices send themselves (MSI). An entry that would do anything else to a pCPU than
//! deliver a [forwarded](FIRST_VECTOR) vector stays masked at the machine: an NMI, an INIT, the hypervisor's vectors.
//!
//! A level-triggered interrupt must not arrive again before the owner has served the device. So its pin is *held*:
//! masked at the machine from the arrival until the owner's local APIC ends the interrupt. Xen's old way to acknowledge
//! does the same. If the line is still asserted then, the machine sends again.
//!
//! The hypervisor emulates some devices for the owner as well, at pins of their own. Those are masked at the machine
//! for good.

use crate::device::interrupt::{Kind, Message, Target};
use crate::device::io_apic::{IoApic, PINS, Route};

/// The first vector that arrives for the owner. Those below are the processor's.
pub const FIRST_VECTOR: u8 = 0x20;
/// The last one. Those above are the hypervisor's own; Linux gives none of them to a device.
pub const LAST_VECTOR: u8 = 0xef;

/// The owner's I/O APIC.
#[derive(Debug)]
pub struct Pins {
    /// As the owner sees it. A line of the machine's is asserted while it is held.
    io_apic: IoApic,
    /// Pins of emulated devices.
    emulated: u32,
}

/// A redirection entry for the machine's I/O APIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineEntry {
    /// Its pin.
    pub pin: usize,
    /// Its two halves (82093AA, 3.2.4).
    pub value: u64,
}

/// What changes when a vector arrives or ends.
#[derive(Clone, Copy, Debug, Default)]
pub struct Changes {
    /// For the owner's local APICs.
    pub messages: [Option<Message>; PINS],
    /// For the machine's I/O APIC.
    pub entries: [Option<MachineEntry>; PINS],
}

const POLARITY: u64 = 1 << 13;
const LEVEL_TRIGGERED: u64 = 1 << 15;
const MASK: u64 = 1 << 16;
const DESTINATION_SHIFT: u32 = 56;

impl Pins {
    /// As after reset, with the devices at these pins emulated.
    #[must_use]
    pub fn new(emulated: impl IntoIterator<Item = u32>) -> Self {
        let emulated = emulated.into_iter().filter(|pin| (*pin as usize) < PINS).fold(0, |set, pin| set | 1 << pin);
        Self { io_apic: IoApic::new(0), emulated }
    }

    /// The owner reads at `offset` in the page of registers.
    #[must_use]
    pub fn read(&self, offset: u16) -> u32 {
        self.io_apic.read(offset)
    }

    /// The owner writes there. `cpu_of` finds the pCPU for a target, if there is one.
    pub fn write(
        &mut self,
        offset: u16,
        value: u32,
        cpu_of: impl Fn(Target) -> Option<u8>,
    ) -> (Option<Message>, Option<MachineEntry>) {
        let message = self.io_apic.write(offset, value);
        let entry = self.io_apic.selected_pin().map(|pin| self.machine_entry(pin, cpu_of));
        (message, entry)
    }

    /// An emulated device asserts its line, or ceases to.
    pub fn set_line(&mut self, pin: usize, asserted: bool) -> Option<Message> {
        self.io_apic.set_line(pin, asserted)
    }

    /// The machine has delivered `vector` to the pCPU `cpu`: holds the level-triggered pins that do so. Without one, it
    /// is the vector of an edge or a message.
    pub fn arrived(&mut self, vector: u8, cpu: u8, cpu_of: impl Fn(Target) -> Option<u8> + Copy) -> Changes {
        let mut changes = Changes::default();
        for pin in 0..PINS {
            let sends = |route: &Route| route.is_level && route.vector == vector && cpu_of(route.target) == Some(cpu);
            if self.is_machines(pin) && self.io_apic.route(pin).is_some_and(|route| sends(&route)) {
                changes.messages[pin] = self.io_apic.set_line(pin, true);
                changes.entries[pin] = Some(self.machine_entry(pin, cpu_of));
            }
        }
        changes
    }

    /// The owner has ended the level-triggered interrupt `vector`: the machine may send it again.
    pub fn end_of_interrupt(&mut self, vector: u8, cpu_of: impl Fn(Target) -> Option<u8> + Copy) -> Changes {
        let mut changes = Changes::default();
        let held = |pins: &Self, pin| pins.is_machines(pin) && pins.io_apic.is_asserted(pin);
        let has_vector = |pins: &Self, pin| pins.io_apic.route(pin).is_some_and(|route| route.vector == vector);
        for pin in 0..PINS {
            if held(self, pin) && has_vector(self, pin) {
                self.io_apic.set_line(pin, false);
                changes.entries[pin] = Some(self.machine_entry(pin, cpu_of));
            }
        }
        for (slot, message) in changes.messages.iter_mut().zip(self.io_apic.end_of_interrupt(vector)) {
            *slot = Some(message);
        }
        changes
    }

    /// The vectors of level-triggered pins, bit n of word w for vector `w * 64 + n`.
    #[must_use]
    pub fn level_vectors(&self) -> [u64; 4] {
        let mut set = [0; 4];
        for route in (0..PINS).filter_map(|pin| self.io_apic.route(pin)).filter(|route| route.is_level) {
            set[usize::from(route.vector >> 6)] |= 1 << (route.vector & 63);
        }
        set
    }

    const fn is_machines(&self, pin: usize) -> bool {
        self.emulated >> pin & 1 == 0
    }

    /// The entry that the machine's I/O APIC needs.
    fn machine_entry(&self, pin: usize, cpu_of: impl Fn(Target) -> Option<u8>) -> MachineEntry {
        MachineEntry { pin, value: self.machine_value(pin, cpu_of).unwrap_or(MASK) }
    }

    fn machine_value(&self, pin: usize, cpu_of: impl Fn(Target) -> Option<u8>) -> Option<u64> {
        let route = self.io_apic.route(pin)?;
        let is_silent = route.is_masked || self.io_apic.is_asserted(pin);
        let is_vector = matches!(route.kind, Kind::Fixed | Kind::LowestPriority);
        let is_forwarded = (FIRST_VECTOR..=LAST_VECTOR).contains(&route.vector);
        if !self.is_machines(pin) || !is_vector || !is_forwarded {
            return None;
        }
        // Fixed delivery to one physical id. A masked entry keeps its trigger mode: a pin that became edge-triggered
        // would not notice that its line is no longer asserted.
        let bits = [(route.is_active_low, POLARITY), (route.is_level, LEVEL_TRIGGERED), (is_silent, MASK)];
        let flags = bits.iter().filter(|(is_set, _)| *is_set).fold(0, |flags, (_, bit)| flags | bit);
        Some(u64::from(cpu_of(route.target)?) << DESTINATION_SHIFT | flags | u64::from(route.vector))
    }
}

#[cfg(test)]
mod tests {
    use super::{Changes, MachineEntry, Pins};
    use crate::device::interrupt::{Message, Target};

    const MASKED: u32 = 1 << 16;
    const LEVEL: u32 = 1 << 15;
    const LOW: u32 = 1 << 13;

    /// A machine of two pCPUs.
    fn cpu_of(target: Target) -> Option<u8> {
        match target {
            Target::Physical(id) if id < 2 => u8::try_from(id).ok(),
            Target::AllIncludingSelf => Some(0),
            _ => None,
        }
    }

    /// The owner writes an entry; what becomes of the machine's.
    fn program(pins: &mut Pins, pin: u32, low: u32, destination: u32) -> MachineEntry {
        let mut last = None;
        for (register, value) in [(0x11 + 2 * pin, destination << 24), (0x10 + 2 * pin, low)] {
            assert_eq!(pins.write(0, register, cpu_of).0, None);
            last = pins.write(0x10, value, cpu_of).1;
        }
        last.expect("an entry was written")
    }

    fn messages(changes: &Changes) -> Vec<Message> {
        changes.messages.iter().flatten().copied().collect()
    }

    fn entries(changes: &Changes) -> Vec<(usize, u64)> {
        changes.entries.iter().flatten().map(|entry| (entry.pin, entry.value)).collect()
    }

    #[test]
    fn entry_goes_to_the_machine_with_its_vector_and_its_cpu() {
        let mut pins = Pins::new([4]);
        let entry = program(&mut pins, 9, 0x31 | LEVEL | LOW, 1);
        assert_eq!(entry, MachineEntry { pin: 9, value: 1 << 56 | 1 << 15 | 1 << 13 | 0x31 });
        assert_eq!(program(&mut pins, 8, 0x4f, 0), MachineEntry { pin: 8, value: 0x4f });
        assert_eq!(program(&mut pins, 8, 0x4f | MASKED, 0), MachineEntry { pin: 8, value: 0x4f | 1 << 16 });
    }

    #[test]
    fn entry_that_would_disturb_the_hypervisor_stays_masked_at_the_machine() {
        let mut pins = Pins::new([4]);
        let [smi, nmi, init, ext_int] = [2 << 8, 4 << 8, 5 << 8, 7 << 8];
        for (pin, low, destination) in [
            (4, 0x30, 0),
            (9, 0x1f, 0),
            (9, 0xf0, 0),
            (9, 0xff, 0),
            (9, 0x02, 0),
            (9, 0x30, 2),
            (9, 0x30, 0xfe),
            (9, 0x30 | smi, 0),
            (9, 0x30 | nmi, 0),
            (9, 0x30 | init, 0),
            (9, 0x30 | ext_int, 0),
            (9, 0x30 | 1 << 11, 3),
        ] {
            assert_eq!(program(&mut pins, pin, low, destination).value, 1 << 16, "{low:#x} to {destination}");
        }
        for pin in [24, 100, 119] {
            let (_, entry) = pins.write(0, 0x10 + 2 * pin, cpu_of);
            assert!(entry.is_none_or(|entry| entry.pin < 24));
            assert_eq!(pins.write(0x10, 0x30, cpu_of).1, None, "there is no such pin");
        }
    }

    #[test]
    fn level_triggered_pin_is_held_from_its_arrival_to_the_end_of_the_interrupt() {
        let mut pins = Pins::new([]);
        let open = program(&mut pins, 9, 0x31 | LEVEL, 1);
        assert_eq!(pins.level_vectors(), [1 << 0x31, 0, 0, 0]);

        let arrived = pins.arrived(0x31, 1, cpu_of);
        assert_eq!(entries(&arrived), [(9, open.value | 1 << 16)], "masked, and still level-triggered");
        let [message] = messages(&arrived)[..] else { panic!("one message") };
        assert_eq!((message.vector, message.target, message.level), (0x31, Target::Physical(1), true));
        // It was under way twice: the owner learns of it once.
        assert!(messages(&pins.arrived(0x31, 1, cpu_of)).is_empty());

        let ended = pins.end_of_interrupt(0x31, cpu_of);
        assert_eq!(entries(&ended), [(9, open.value)]);
        assert!(messages(&ended).is_empty());
        assert!(entries(&pins.end_of_interrupt(0x31, cpu_of)).is_empty());
        assert_eq!(messages(&pins.arrived(0x31, 1, cpu_of)).len(), 1);
    }

    #[test]
    fn edges_messages_and_other_cpus_interrupts_hold_no_pin() {
        let mut pins = Pins::new([4]);
        program(&mut pins, 9, 0x31 | LEVEL, 1);
        program(&mut pins, 8, 0x32, 0);
        program(&mut pins, 4, 0x33 | LEVEL, 0);
        for (vector, cpu) in [(0x31, 0), (0x32, 0), (0x33, 0), (0x40, 1)] {
            let changes = pins.arrived(vector, cpu, cpu_of);
            assert!(entries(&changes).is_empty() && messages(&changes).is_empty(), "{vector:#x}");
        }
    }

    #[test]
    fn pin_that_the_owner_masks_while_it_is_held_sends_again_once_it_is_unmasked() {
        let mut pins = Pins::new([]);
        let open = program(&mut pins, 9, 0x31 | LEVEL, 1).value;
        pins.arrived(0x31, 1, cpu_of);
        assert_eq!(program(&mut pins, 9, 0x31 | LEVEL | MASKED, 1).value, open | 1 << 16);
        assert_eq!(entries(&pins.end_of_interrupt(0x31, cpu_of)), [(9, open | 1 << 16)], "masked by the owner");
        assert_eq!(program(&mut pins, 9, 0x31 | LEVEL, 1).value, open);
    }

    #[test]
    fn emulated_devices_send_from_their_own_pins() {
        let mut pins = Pins::new([4, 5, 99]);
        assert_eq!(program(&mut pins, 4, 0x35, 0).value, 1 << 16);
        assert_eq!(pins.set_line(4, true).map(|message| message.vector), Some(0x35));
        program(&mut pins, 5, 0x36 | LEVEL, 1);
        assert!(pins.set_line(5, true).is_some_and(|message| message.level));
        let again = pins.end_of_interrupt(0x36, cpu_of);
        assert_eq!(messages(&again).len(), 1, "the device still asks");
        assert!(entries(&again).is_empty());
    }
}
