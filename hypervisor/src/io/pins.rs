//! The I/O APICs of the VM that has the machine's devices.
//!
//! The owner has as many as the machine, each with the machine's pins. It writes its redirection entries here. What an
//! entry says is then written to the machine's I/O APIC, with the vector unchanged. So the machine's interrupt arrives
//! at the pCPU with the number of the wanted vCPU, with the wanted vector, as those do that devices send themselves
//! (MSI). An entry that would do anything else to a pCPU than deliver a [forwarded](FIRST_VECTOR) vector stays masked
//! at the machine: an NMI, an INIT, the hypervisor's vectors.
//!
//! A level-triggered interrupt must not arrive again before the owner has served the device. So its pin is *held*:
//! masked at the machine from the arrival until the owner's local APIC ends the interrupt. Xen's old way to acknowledge
//! does the same. If the line is still asserted then, the machine sends again.
//!
//! The hypervisor emulates some devices for the owner as well, at pins of their own of the first I/O APIC. Those are
//! masked at the machine for good.

use alloc::vec::Vec;

use crate::device::interrupt::{Kind, Message, Target};
use crate::device::io_apic::{self, IoApic, PINS, Route};

/// The first vector that arrives for the owner. Those below are the processor's.
pub const FIRST_VECTOR: u8 = 0x20;
/// The last one. Those above are the hypervisor's own; Linux gives none of them to a device.
pub const LAST_VECTOR: u8 = 0xef;

/// The most pins that an I/O APIC has: the number of a register has eight bits, and a pin has two registers.
pub const MOST_PINS: usize = 120;

/// The owner's I/O APICs.
#[derive(Debug)]
pub struct Pins {
    controllers: Vec<Controller>,
    /// Pins of emulated devices, of the first one.
    emulated: u32,
}

/// One of them.
#[derive(Debug)]
struct Controller {
    /// 24 pins each, as the owner sees them, but for the last one's that do not exist. A line of the machine's is
    /// asserted while it is held.
    parts: Vec<IoApic>,
    pins: usize,
    /// Register that the window shows.
    selected: u8,
}

/// A pin of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Number of its I/O APIC.
    pub controller: usize,
    /// Its number there.
    pub number: usize,
}

/// A redirection entry for one of the machine's I/O APICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineEntry {
    /// Its pin.
    pub pin: Pin,
    /// Its two halves (82093AA, 3.2.4).
    pub value: u64,
}

const POLARITY: u64 = 1 << 13;
const LEVEL_TRIGGERED: u64 = 1 << 15;
const MASK: u64 = 1 << 16;
const DESTINATION_SHIFT: u32 = 56;

impl Controller {
    fn new(pins: usize) -> Self {
        let parts = (0..pins.div_ceil(PINS)).map(|_| IoApic::new(0)).collect();
        Self { parts, pins, selected: 0 }
    }

    /// The part with this pin, and the pin's number there.
    fn part(&self, pin: usize) -> Option<(&IoApic, usize)> {
        Some((self.parts.get(pin / PINS)?, pin % PINS)).filter(|_| pin < self.pins)
    }

    fn part_mut(&mut self, pin: usize) -> Option<(&mut IoApic, usize)> {
        Some((self.parts.get_mut(pin / PINS)?, pin % PINS)).filter(|_| pin < self.pins)
    }

    fn route(&self, pin: usize) -> Option<Route> {
        self.part(pin).and_then(|(part, pin)| part.route(pin))
    }

    fn is_asserted(&self, pin: usize) -> bool {
        self.part(pin).is_some_and(|(part, pin)| part.is_asserted(pin))
    }

    fn set_line(&mut self, pin: usize, asserted: bool) -> Option<Message> {
        self.part_mut(pin).and_then(|(part, pin)| part.set_line(pin, asserted))
    }

    /// The pin whose entry the window shows.
    fn selected_pin(&self) -> Option<usize> {
        let pin = usize::from(self.selected.checked_sub(io_apic::FIRST_ENTRY)?) / 2;
        (pin < self.pins).then_some(pin)
    }

    /// The part that has the selected register, with that register selected. The first one has those of all.
    fn window(&mut self) -> Option<&mut IoApic> {
        let (part, register) = match self.selected.checked_sub(io_apic::FIRST_ENTRY) {
            None => (self.parts.first_mut()?, self.selected),
            Some(half) => {
                let (part, pin) = self.part_mut(usize::from(half) / 2)?;
                (part, io_apic::FIRST_ENTRY + u8::try_from(2 * pin).ok()? + half % 2)
            }
        };
        part.write(io_apic::SELECT, register.into());
        Some(part)
    }

    fn read(&mut self, offset: u16) -> u32 {
        match offset {
            io_apic::SELECT => self.selected.into(),
            io_apic::WINDOW if self.selected == io_apic::VERSION_REGISTER => io_apic::version(self.pins),
            io_apic::WINDOW => self.window().map_or(0, |part| part.read(io_apic::WINDOW)),
            _ => 0,
        }
    }

    fn write(&mut self, offset: u16, value: u32) -> Option<Message> {
        match offset {
            io_apic::SELECT => self.selected = value.to_le_bytes()[0],
            io_apic::WINDOW => return self.window()?.write(io_apic::WINDOW, value),
            _ => {}
        }
        None
    }
}

impl Pins {
    /// As after reset: an I/O APIC for each number of pins, with the devices at `emulated` pins of the first one
    /// emulated.
    #[must_use]
    pub fn new(pins: impl IntoIterator<Item = usize>, emulated: impl IntoIterator<Item = u32>) -> Self {
        let emulated = emulated.into_iter().filter(|pin| (*pin as usize) < PINS).fold(0, |set, pin| set | 1 << pin);
        Self { controllers: pins.into_iter().map(|pins| Controller::new(pins.min(MOST_PINS))).collect(), emulated }
    }

    /// The owner reads at `offset` in the page of registers of this I/O APIC.
    pub fn read(&mut self, controller: usize, offset: u16) -> u32 {
        self.controllers.get_mut(controller).map_or(0, |controller| controller.read(offset))
    }

    /// The owner writes there. `cpu_of` finds the pCPU for a target, if there is one.
    pub fn write(
        &mut self,
        controller: usize,
        offset: u16,
        value: u32,
        cpu_of: impl Fn(Target) -> Option<u8>,
    ) -> (Option<Message>, Option<MachineEntry>) {
        let Some(at) = self.controllers.get_mut(controller) else { return (None, None) };
        let message = at.write(offset, value);
        let entry = at.selected_pin().map(|number| self.machine_entry(Pin { controller, number }, cpu_of));
        (message, entry)
    }

    /// An emulated device asserts its line, or ceases to.
    pub fn set_line(&mut self, pin: usize, asserted: bool) -> Option<Message> {
        self.controllers.first_mut()?.set_line(pin, asserted)
    }

    /// The machine has delivered `vector` to the pCPU `cpu`: holds the level-triggered pins that do so. Calls `change`
    /// for each, with what is for the machine's I/O APIC and for the owner's local APICs, in this order. Without one,
    /// it is the vector of an edge or a message.
    pub fn arrived(
        &mut self,
        vector: u8,
        cpu: u8,
        cpu_of: impl Fn(Target) -> Option<u8> + Copy,
        mut change: impl FnMut(Option<MachineEntry>, Option<Message>),
    ) {
        let sends = |route: &Route| route.is_level && route.vector == vector && cpu_of(route.target) == Some(cpu);
        for controller in 0..self.controllers.len() {
            for number in 0..self.controllers[controller].pins {
                let pin = Pin { controller, number };
                if self.is_machines(pin) && self.controllers[controller].route(number).as_ref().is_some_and(sends) {
                    let message = self.controllers[controller].set_line(number, true);
                    change(Some(self.machine_entry(pin, cpu_of)), message);
                }
            }
        }
    }

    /// The owner has ended the level-triggered interrupt `vector`: the machine may send it again. Calls `change` as
    /// [`Self::arrived`] does.
    pub fn end_of_interrupt(
        &mut self,
        vector: u8,
        cpu_of: impl Fn(Target) -> Option<u8> + Copy,
        mut change: impl FnMut(Option<MachineEntry>, Option<Message>),
    ) {
        for controller in 0..self.controllers.len() {
            for number in 0..self.controllers[controller].pins {
                let (pin, at) = (Pin { controller, number }, &self.controllers[controller]);
                let has_vector = at.route(number).is_some_and(|route| route.vector == vector);
                if self.is_machines(pin) && at.is_asserted(number) && has_vector {
                    self.controllers[controller].set_line(number, false);
                    change(Some(self.machine_entry(pin, cpu_of)), None);
                }
            }
            for part in &mut self.controllers[controller].parts {
                part.end_of_interrupt(vector).for_each(|message| change(None, Some(message)));
            }
        }
    }

    /// The vectors of level-triggered pins, bit n of word w for vector `w * 64 + n`.
    #[must_use]
    pub fn level_vectors(&self) -> [u64; 4] {
        let mut set = [0; 4];
        let routes = self.controllers.iter().flat_map(|at| (0..at.pins).filter_map(|pin| at.route(pin)));
        for route in routes.filter(|route| route.is_level) {
            set[usize::from(route.vector >> 6)] |= 1 << (route.vector & 63);
        }
        set
    }

    const fn is_machines(&self, pin: Pin) -> bool {
        pin.controller != 0 || pin.number >= PINS || self.emulated >> pin.number & 1 == 0
    }

    /// The entry that the machine's I/O APIC needs.
    fn machine_entry(&self, pin: Pin, cpu_of: impl Fn(Target) -> Option<u8>) -> MachineEntry {
        MachineEntry { pin, value: self.machine_value(pin, cpu_of).unwrap_or(MASK) }
    }

    fn machine_value(&self, pin: Pin, cpu_of: impl Fn(Target) -> Option<u8>) -> Option<u64> {
        let at = self.controllers.get(pin.controller)?;
        let route = at.route(pin.number)?;
        let is_silent = route.is_masked || at.is_asserted(pin.number);
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
    use alloc::vec::Vec;

    use super::{MachineEntry, Pin, Pins};
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

    /// One I/O APIC of 24 pins.
    fn usual(emulated: impl IntoIterator<Item = u32>) -> Pins {
        Pins::new([24], emulated)
    }

    fn at(controller: usize, number: usize) -> Pin {
        Pin { controller, number }
    }

    /// The owner writes an entry; what becomes of the machine's.
    fn program(pins: &mut Pins, pin: u32, low: u32, destination: u32) -> MachineEntry {
        program_at(pins, 0, pin, low, destination)
    }

    fn program_at(pins: &mut Pins, controller: usize, pin: u32, low: u32, destination: u32) -> MachineEntry {
        let mut last = None;
        for (register, value) in [(0x11 + 2 * pin, destination << 24), (0x10 + 2 * pin, low)] {
            assert_eq!(pins.write(controller, 0, register, cpu_of).0, None);
            last = pins.write(controller, 0x10, value, cpu_of).1;
        }
        last.expect("an entry was written")
    }

    #[derive(Default)]
    struct Changes {
        entries: Vec<MachineEntry>,
        messages: Vec<Message>,
    }

    fn arrive(pins: &mut Pins, vector: u8, cpu: u8) -> Changes {
        let mut changes = Changes::default();
        pins.arrived(vector, cpu, cpu_of, |entry, message| {
            changes.entries.extend(entry);
            changes.messages.extend(message);
        });
        changes
    }

    fn end(pins: &mut Pins, vector: u8) -> Changes {
        let mut changes = Changes::default();
        pins.end_of_interrupt(vector, cpu_of, |entry, message| {
            changes.entries.extend(entry);
            changes.messages.extend(message);
        });
        changes
    }

    fn messages(changes: &Changes) -> Vec<Message> {
        changes.messages.clone()
    }

    fn entries(changes: &Changes) -> Vec<(usize, u64)> {
        changes.entries.iter().map(|entry| (entry.pin.number, entry.value)).collect()
    }

    #[test]
    fn entry_goes_to_the_machine_with_its_vector_and_its_cpu() {
        let mut pins = usual([4]);
        let entry = program(&mut pins, 9, 0x31 | LEVEL | LOW, 1);
        assert_eq!(entry, MachineEntry { pin: at(0, 9), value: 1 << 56 | 1 << 15 | 1 << 13 | 0x31 });
        assert_eq!(program(&mut pins, 8, 0x4f, 0), MachineEntry { pin: at(0, 8), value: 0x4f });
        assert_eq!(program(&mut pins, 8, 0x4f | MASKED, 0), MachineEntry { pin: at(0, 8), value: 0x4f | 1 << 16 });
    }

    #[test]
    fn entry_that_would_disturb_the_hypervisor_stays_masked_at_the_machine() {
        let mut pins = usual([4]);
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
            let (_, entry) = pins.write(0, 0, 0x10 + 2 * pin, cpu_of);
            assert!(entry.is_none_or(|entry| entry.pin.number < 24));
            assert_eq!(pins.write(0, 0x10, 0x30, cpu_of).1, None, "there is no such pin");
        }
    }

    #[test]
    fn level_triggered_pin_is_held_from_its_arrival_to_the_end_of_the_interrupt() {
        let mut pins = usual([]);
        let open = program(&mut pins, 9, 0x31 | LEVEL, 1);
        assert_eq!(pins.level_vectors(), [1 << 0x31, 0, 0, 0]);

        let arrived = arrive(&mut pins, 0x31, 1);
        assert_eq!(entries(&arrived), [(9, open.value | 1 << 16)], "masked, and still level-triggered");
        let [message] = messages(&arrived)[..] else { panic!("one message") };
        assert_eq!((message.vector, message.target, message.level), (0x31, Target::Physical(1), true));
        // It was under way twice: the owner learns of it once.
        assert!(messages(&arrive(&mut pins, 0x31, 1)).is_empty());

        let ended = end(&mut pins, 0x31);
        assert_eq!(entries(&ended), [(9, open.value)]);
        assert!(messages(&ended).is_empty());
        assert!(entries(&end(&mut pins, 0x31)).is_empty());
        assert_eq!(messages(&arrive(&mut pins, 0x31, 1)).len(), 1);
    }

    #[test]
    fn edges_messages_and_other_cpus_interrupts_hold_no_pin() {
        let mut pins = usual([4]);
        program(&mut pins, 9, 0x31 | LEVEL, 1);
        program(&mut pins, 8, 0x32, 0);
        program(&mut pins, 4, 0x33 | LEVEL, 0);
        for (vector, cpu) in [(0x31, 0), (0x32, 0), (0x33, 0), (0x40, 1)] {
            let changes = arrive(&mut pins, vector, cpu);
            assert!(entries(&changes).is_empty() && messages(&changes).is_empty(), "{vector:#x}");
        }
    }

    #[test]
    fn pin_that_the_owner_masks_while_it_is_held_sends_again_once_it_is_unmasked() {
        let mut pins = usual([]);
        let open = program(&mut pins, 9, 0x31 | LEVEL, 1).value;
        arrive(&mut pins, 0x31, 1);
        assert_eq!(program(&mut pins, 9, 0x31 | LEVEL | MASKED, 1).value, open | 1 << 16);
        assert_eq!(entries(&end(&mut pins, 0x31)), [(9, open | 1 << 16)], "masked by the owner");
        assert_eq!(program(&mut pins, 9, 0x31 | LEVEL, 1).value, open);
    }

    #[test]
    fn emulated_devices_send_from_their_own_pins() {
        let mut pins = usual([4, 5, 99]);
        assert_eq!(program(&mut pins, 4, 0x35, 0).value, 1 << 16);
        assert_eq!(pins.set_line(4, true).map(|message| message.vector), Some(0x35));
        program(&mut pins, 5, 0x36 | LEVEL, 1);
        assert!(pins.set_line(5, true).is_some_and(|message| message.level));
        let again = end(&mut pins, 0x36);
        assert_eq!(messages(&again).len(), 1, "the device still asks");
        assert!(entries(&again).is_empty());
    }

    #[test]
    fn owner_finds_as_many_io_apics_and_pins_as_the_machine_has() {
        let mut pins = Pins::new([24, 120, 32], []);
        let mut read = |controller: usize, register: u32| {
            assert_eq!(pins.write(controller, 0, register, cpu_of).0, None);
            pins.read(controller, 0x10)
        };
        assert_eq!([0, 1, 2, 3].map(|controller| read(controller, 1) >> 16 & 0xff), [23, 119, 31, 0]);
        assert_eq!((read(1, 0x10 + 2 * 119), read(2, 0x10 + 2 * 31)), (MASKED, MASKED));
        assert_eq!((read(2, 0x10 + 2 * 32), read(1, 0x10 + 2 * 119 + 2), read(3, 0x10)), (0, 0, 0), "no such pin");
        for (controller, number) in [(1, 0), (1, 23), (1, 24), (1, 119), (2, 31)] {
            let pin = u32::try_from(number).expect("small");
            let entry = program_at(&mut pins, controller, pin, 0x41 | LEVEL, 1);
            assert_eq!(entry, MachineEntry { pin: at(controller, number), value: 1 << 56 | 1 << 15 | 0x41 });
        }
        assert_eq!(pins.write(1, 0, 0x10 + 2 * 24, cpu_of).0, None);
        assert_eq!(pins.read(1, 0x10), 0x41 | LEVEL, "each has an entry of its own");
        assert_eq!(pins.read(1, 0), 0x10 + 2 * 24);
    }

    #[test]
    fn pin_of_any_io_apic_is_held_and_only_that() {
        let mut pins = Pins::new([24, 120], [4]);
        let open = program_at(&mut pins, 1, 4, 0x51 | LEVEL, 0).value;
        program_at(&mut pins, 1, 77, 0x52 | LEVEL, 0);
        program(&mut pins, 9, 0x53 | LEVEL, 0);
        let arrived = arrive(&mut pins, 0x51, 0);
        assert_eq!(arrived.entries, [MachineEntry { pin: at(1, 4), value: open | 1 << 16 }], "4 is emulated elsewhere");
        assert_eq!(messages(&arrived).len(), 1);
        let far = arrive(&mut pins, 0x52, 0);
        assert_eq!(far.entries[0].pin, at(1, 77));
        assert_eq!(end(&mut pins, 0x51).entries, [MachineEntry { pin: at(1, 4), value: open }]);
        assert_eq!(pins.level_vectors(), [0, 1 << (0x51 - 64) | 1 << (0x52 - 64) | 1 << (0x53 - 64), 0, 0]);
    }
}
