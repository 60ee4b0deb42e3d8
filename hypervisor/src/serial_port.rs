//! Drives a host UART like a 16550, without interrupts.
//!
//! A UART may be missing, or accept nothing because its other end does not. So each wait has a limit, and after a
//! failed wait there is no further wait until the UART accepts bytes again. Registers and their bits are those of the
//! data sheet (National Semiconductor PC16550D, table 2).

/// The eight registers, by their offsets.
pub trait Registers {
    /// Reads a register.
    fn read(&mut self, offset: u8) -> u8;
    /// Writes a register.
    fn write(&mut self, offset: u8, value: u8);
}

const DATA: u8 = 0;
const INTERRUPT_ENABLE: u8 = 1;
const FIFO_CONTROL: u8 = 2;
/// The same register, when it is read.
const INTERRUPT_IDENTIFICATION: u8 = 2;
const LINE_CONTROL: u8 = 3;
const MODEM_CONTROL: u8 = 4;
const LINE_STATUS: u8 = 5;
const MODEM_STATUS: u8 = 6;
const SCRATCH: u8 = 7;

mod fcr {
    /// FIFOs on, both empty, the receiver's level at 8 bytes.
    pub(super) const ON: u8 = 0x87;
}

mod iir {
    /// Both bits are set where there are FIFOs that work.
    pub(super) const FIFOS: u8 = 0xc0;
}

mod lcr {
    /// 8 bits, no parity, one stop bit.
    pub(super) const EIGHT_BITS: u8 = 0x03;
    /// The first two registers are the divisor's.
    pub(super) const DIVISOR: u8 = 0x80;
}

mod mcr {
    /// DTR and RTS: ready.
    pub(super) const READY: u8 = 0x03;
    pub(super) const RTS: u8 = 0x02;
    pub(super) const OUT2: u8 = 0x08;
    pub(super) const LOOPBACK: u8 = 0x10;
}

mod lsr {
    pub(super) const DATA_READY: u8 = 1 << 0;
    /// The next byte has a wrong parity or no stop bit, or is a break.
    pub(super) const BAD: u8 = 7 << 2;
    /// The transmitter takes bytes: one, or as many as its FIFO has.
    pub(super) const TRANSMITTER_READY: u8 = 1 << 5;
    /// All that was written has been sent.
    pub(super) const ALL_SENT: u8 = 1 << 6;
    /// A read from a bus without a device; a UART never sets all of these bits at once.
    pub(super) const NOTHING_THERE: u8 = 0xff;
}

mod msr {
    pub(super) const CTS: u8 = 1 << 4;
    pub(super) const DCD: u8 = 1 << 7;
    /// The four inputs.
    pub(super) const LINES: u8 = 0xf0;
}

/// Maximum number of polls of a busy transmitter per call; then the rest is dropped. An access takes about a
/// microsecond on real machines, so this is a fifth of a second. A full FIFO leaves in 1.4 ms at 115 200 Bd. In Bochs a
/// poll takes ten instructions of 20 ns: 40 ms in all, and the longest piece that is written at once, 256 bytes, takes
/// 22 ms.
const PATIENCE: u32 = 200_000;
/// Bytes that a transmitter's FIFO holds.
const FIFO_BYTES: usize = 16;
/// The divisor of 115 200 Bd, with the clock that all PCs have.
const FASTEST: u8 = 1;

/// A UART that is there.
pub struct SerialPort<R> {
    registers: R,
    /// Bytes that an empty transmitter takes.
    room: usize,
    /// Bytes that it surely takes now.
    free: usize,
    /// The last wait reached its limit.
    is_stuck: bool,
}

impl<R: Registers> SerialPort<R> {
    /// Whether a device exists where the firmware reports a UART. UARTs of some management controllers do not have all
    /// registers.
    pub fn is_there(registers: &mut R) -> bool {
        registers.read(LINE_STATUS) != lsr::NOTHING_THERE
    }

    /// Whether a UART answers: its scratch register keeps a value, and in loopback its outputs are its inputs. Nothing
    /// is sent.
    pub fn answers(registers: &mut R) -> bool {
        if !Self::is_there(registers) {
            return false;
        }
        let old = registers.read(SCRATCH);
        let keeps = [0x5a, 0xa5].into_iter().all(|value| {
            registers.write(SCRATCH, value);
            registers.read(SCRATCH) == value
        });
        registers.write(SCRATCH, old);

        let old = registers.read(MODEM_CONTROL);
        registers.write(MODEM_CONTROL, mcr::LOOPBACK | mcr::OUT2 | mcr::RTS);
        let loops = registers.read(MODEM_STATUS) & msr::LINES == msr::DCD | msr::CTS;
        registers.write(MODEM_CONTROL, old);
        keeps && loops
    }

    /// Takes over a UART that has answered: 8N1, without interrupts. `keeps_speed`: at its current speed, if it has
    /// one; else at 115 200 Bd.
    pub fn open(mut registers: R, keeps_speed: bool) -> Self {
        // Does not cut off the boot loader's last output.
        let is_stuck = !(0..PATIENCE).any(|_| registers.read(LINE_STATUS) & lsr::ALL_SENT != 0);

        registers.write(LINE_CONTROL, lcr::DIVISOR);
        let is_set = registers.read(DATA) != 0 || registers.read(INTERRUPT_ENABLE) != 0;
        if !(keeps_speed && is_set) {
            registers.write(DATA, FASTEST);
            registers.write(INTERRUPT_ENABLE, 0);
        }
        registers.write(LINE_CONTROL, lcr::EIGHT_BITS);
        registers.write(INTERRUPT_ENABLE, 0);
        registers.write(FIFO_CONTROL, fcr::ON);
        registers.write(MODEM_CONTROL, mcr::READY);
        let has_fifos = registers.read(INTERRUPT_IDENTIFICATION) & iir::FIFOS == iir::FIFOS;
        Self { registers, room: if has_fifos { FIFO_BYTES } else { 1 }, free: 0, is_stuck }
    }

    /// Sends as many of the bytes as the UART accepts within the limit. Returns their number.
    pub fn send(&mut self, bytes: &[u8]) -> usize {
        let mut patience = if self.is_stuck { 1 } else { PATIENCE };
        for (at, &byte) in bytes.iter().enumerate() {
            while self.free == 0 {
                if patience == 0 {
                    self.is_stuck = true;
                    return at;
                }
                patience -= 1;
                if self.registers.read(LINE_STATUS) & lsr::TRANSMITTER_READY != 0 {
                    self.free = self.room;
                    self.is_stuck = false;
                }
            }
            self.free -= 1;
            self.registers.write(DATA, byte);
        }
        bytes.len()
    }

    /// Waits a limited time until all output has left: power-off would lose the rest.
    pub fn flush(&mut self) {
        let patience = if self.is_stuck { 1 } else { PATIENCE };
        let _ = (0..patience).any(|_| self.registers.read(LINE_STATUS) & lsr::ALL_SENT != 0);
    }

    /// Takes received bytes. Returns their number.
    pub fn receive(&mut self, into: &mut [u8]) -> usize {
        let mut taken = 0;
        // Damaged bytes count as well: a line that is always low must not cause an endless loop.
        for _ in 0..into.len() {
            let status = self.registers.read(LINE_STATUS);
            if status & lsr::DATA_READY == 0 || status == lsr::NOTHING_THERE {
                break;
            }
            let byte = self.registers.read(DATA);
            if status & lsr::BAD == 0 {
                into[taken] = byte;
                taken += 1;
            }
        }
        taken
    }
}

#[cfg(test)]
mod tests;
