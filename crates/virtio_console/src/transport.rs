//! Virtio over memory-mapped registers (4.2): what every device has, whatever it does.

use crate::queue::{Broken, QUEUE_SIZE, Queue};

/// Offsets of registers (table 4.1). The upper halves of addresses follow their lower halves.
pub(crate) mod register {
    pub(crate) const MAGIC: u16 = 0x000;
    pub(crate) const VERSION: u16 = 0x004;
    pub(crate) const DEVICE: u16 = 0x008;
    pub(crate) const VENDOR: u16 = 0x00c;
    pub(crate) const DEVICE_FEATURES: u16 = 0x010;
    pub(crate) const DEVICE_FEATURES_SELECT: u16 = 0x014;
    pub(crate) const DRIVER_FEATURES: u16 = 0x020;
    pub(crate) const DRIVER_FEATURES_SELECT: u16 = 0x024;
    pub(crate) const QUEUE_SELECT: u16 = 0x030;
    pub(crate) const QUEUE_SIZE_LIMIT: u16 = 0x034;
    pub(crate) const QUEUE_SIZE: u16 = 0x038;
    pub(crate) const QUEUE_READY: u16 = 0x044;
    pub(crate) const QUEUE_NOTIFY: u16 = 0x050;
    pub(crate) const INTERRUPT_STATUS: u16 = 0x060;
    pub(crate) const INTERRUPT_ACKNOWLEDGE: u16 = 0x064;
    pub(crate) const STATUS: u16 = 0x070;
    pub(crate) const QUEUE_DESCRIPTORS: u16 = 0x080;
    pub(crate) const QUEUE_DRIVER: u16 = 0x090;
    pub(crate) const QUEUE_DEVICE: u16 = 0x0a0;
    pub(crate) const SHARED_MEMORY_FIRST: u16 = 0x0b0;
    pub(crate) const SHARED_MEMORY_LAST: u16 = 0x0bc;
    pub(crate) const CONFIGURATION: u16 = 0x100;
}

/// "virt", little endian.
pub(crate) const MAGIC: u32 = 0x7472_6976;
/// Not a legacy device.
pub(crate) const VERSION: u32 = 2;
/// A console (5).
pub(crate) const DEVICE: u32 = 3;
/// "DNLN": no register of vendors exists for this transport.
const VENDOR: u32 = 0x4e4c_4e44;

/// Bits of the device status (2.1).
pub(crate) mod status {
    pub(crate) const ACKNOWLEDGE: u32 = 1;
    pub(crate) const DRIVER: u32 = 2;
    pub(crate) const DRIVER_OK: u32 = 4;
    pub(crate) const FEATURES_OK: u32 = 8;
    pub(crate) const NEEDS_RESET: u32 = 64;
    pub(crate) const FAILED: u32 = 128;
    /// Those that the driver sets.
    pub(crate) const BY_DRIVER: u32 = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED;
}

/// VIRTIO_F_VERSION_1 (6).
pub(crate) const VERSION_1: u64 = 1 << 32;

/// Bits of the interrupt status.
pub(crate) const USED_BUFFER: u32 = 1;
pub(crate) const CONFIGURATION_CHANGE: u32 = 2;

/// What a write to a register means to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// Nothing.
    Setting,
    /// The device was reset.
    Reset,
    /// The driver notifies of this queue, which is enabled and may be used.
    Notify(usize),
}

/// The registers of a device with `QUEUES` queues.
#[derive(Debug)]
pub(crate) struct Transport<const QUEUES: usize> {
    /// All of them are needed: the device refuses a driver that does not accept them.
    features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: u64,
    queue_select: u32,
    status: u32,
    interrupts: u32,
    pub(crate) queues: [Queue; QUEUES],
}

impl<const QUEUES: usize> Transport<QUEUES> {
    pub(crate) fn new(features: u64) -> Self {
        Self {
            features,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            queue_select: 0,
            status: 0,
            interrupts: 0,
            queues: core::array::from_fn(|_| Queue::default()),
        }
    }

    /// Whether the driver has finished its set-up, and nothing was wrong since (2.1.2): the queues may be used.
    pub(crate) fn is_live(&self) -> bool {
        let wanted = status::DRIVER_OK | status::FEATURES_OK;
        self.status & (wanted | status::NEEDS_RESET | status::FAILED) == wanted
    }

    /// Whether the device asks for an interrupt.
    pub(crate) fn interrupt(&self) -> bool {
        self.interrupts != 0
    }

    /// Used chains wait for the driver.
    pub(crate) fn notify_driver(&mut self) {
        self.interrupts |= USED_BUFFER;
    }

    /// The driver has made a mistake: nothing of it is used before a reset (2.1.2).
    pub(crate) fn break_down(&mut self) {
        self.status |= status::NEEDS_RESET;
        if self.status & status::DRIVER_OK != 0 {
            self.interrupts |= CONFIGURATION_CHANGE;
        }
    }

    /// A 32-bit read. Registers that are only written, and those that do not exist, are zero.
    pub(crate) fn read(&self, offset: u16) -> u32 {
        let queue = self.selected();
        match offset {
            register::MAGIC => MAGIC,
            register::VERSION => VERSION,
            register::DEVICE => DEVICE,
            register::VENDOR => VENDOR,
            register::DEVICE_FEATURES => half(self.features, self.device_features_select),
            register::QUEUE_SIZE_LIMIT => queue.map_or(0, |_| QUEUE_SIZE.into()),
            register::QUEUE_READY => queue.is_some_and(Queue::is_ready).into(),
            register::INTERRUPT_STATUS => self.interrupts,
            register::STATUS => self.status,
            // There is no shared memory: its length and address are ones (4.2.2.1).
            register::SHARED_MEMORY_FIRST..=register::SHARED_MEMORY_LAST => u32::MAX,
            _ => 0,
        }
    }

    /// A 32-bit write.
    pub(crate) fn write(&mut self, offset: u16, value: u32) -> Written {
        match offset {
            register::DEVICE_FEATURES_SELECT => self.device_features_select = value,
            register::DRIVER_FEATURES_SELECT => self.driver_features_select = value,
            register::DRIVER_FEATURES if self.status & status::FEATURES_OK == 0 => {
                set_half(&mut self.driver_features, self.driver_features_select, value);
            }
            register::QUEUE_SELECT => self.queue_select = value,
            register::QUEUE_READY => self.write_ready(value),
            register::QUEUE_NOTIFY => {
                let number = usize::try_from(value).unwrap_or(usize::MAX);
                if self.is_live() && self.queues.get(number).is_some_and(Queue::is_ready) {
                    return Written::Notify(number);
                }
            }
            register::INTERRUPT_ACKNOWLEDGE => self.interrupts &= !value,
            register::STATUS if value == 0 => {
                *self = Self::new(self.features);
                return Written::Reset;
            }
            register::STATUS => self.write_status(value),
            _ => self.write_place(offset, value),
        }
        Written::Setting
    }

    fn selected(&self) -> Option<&Queue> {
        self.queues.get(usize::try_from(self.queue_select).ok()?)
    }

    /// The selected queue.
    fn selected_mut(&mut self) -> Option<&mut Queue> {
        self.queues.get_mut(usize::try_from(self.queue_select).ok()?)
    }

    /// Bits stay until a reset (2.1.1). The device does not confirm features that it cannot work with (2.2.2).
    fn write_status(&mut self, value: u32) {
        self.status |= value & status::BY_DRIVER & !status::FEATURES_OK;
        if value & status::FEATURES_OK != 0 && self.driver_features == self.features {
            self.status |= status::FEATURES_OK;
        }
    }

    fn write_ready(&mut self, value: u32) {
        let Some(queue) = self.selected_mut() else { return };
        let enabled = match (value & 1 != 0, queue.is_ready()) {
            (true, false) => queue.enable(),
            (false, true) => {
                queue.disable();
                Ok(())
            }
            _ => Ok(()),
        };
        if enabled == Err(Broken) {
            self.break_down();
        }
    }

    /// Size and addresses of the selected queue. They stay while it is enabled (4.2.2.2).
    fn write_place(&mut self, offset: u16, value: u32) {
        let Some(queue) = self.selected_mut().filter(|queue| !queue.is_ready()) else { return };
        let place = &mut queue.place;
        let (field, upper) = match offset {
            register::QUEUE_SIZE => {
                place.size = value;
                return;
            }
            register::QUEUE_DESCRIPTORS..=0x087 => (&mut place.descriptors, offset - register::QUEUE_DESCRIPTORS),
            register::QUEUE_DRIVER..=0x097 => (&mut place.driver, offset - register::QUEUE_DRIVER),
            register::QUEUE_DEVICE..=0x0a7 => (&mut place.device, offset - register::QUEUE_DEVICE),
            _ => return,
        };
        set_half(field, u32::from(upper / 4), value);
    }
}

/// The half of a 64-bit value that is selected by 0 or 1.
fn half(value: u64, select: u32) -> u32 {
    let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([a, b, c, d]),
        1 => u32::from_le_bytes([e, f, g, h]),
        _ => 0,
    }
}

fn set_half(value: &mut u64, select: u32, half: u32) {
    let half = u64::from(half);
    match select {
        0 => *value = *value & !0xffff_ffff | half,
        1 => *value = *value & 0xffff_ffff | half << 32,
        _ => {}
    }
}
