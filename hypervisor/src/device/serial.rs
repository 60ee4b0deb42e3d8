//! A guest's serial port, whichever chip its machine has.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::pl011::{self, Pl011};
use super::uart::{self, Uart};
use super::wired::Interrupts;

/// A UART that guests drive. Each function may change its interrupt line.
pub trait SerialDevice: Interrupts + Default {
    /// The value of a register.
    type Register;
    /// What a file keeps of it.
    type State: Serialize + DeserializeOwned;

    /// Bytes that a driver may write after it has read once that there is room.
    const FIFO_BYTES: usize;

    /// The guest reads the register at `offset`.
    fn read(&mut self, offset: u16) -> Self::Register;
    /// The guest writes the register at `offset`. Returns the byte that this sends, if it does.
    #[must_use = "a byte that was sent must reach its consumer"]
    fn write(&mut self, offset: u16, value: Self::Register) -> Option<u8>;
    /// Bytes arrive for the guest. Returns how many were accepted; the caller keeps the rest for later.
    #[must_use = "bytes that were not taken must be offered again"]
    fn receive(&mut self, bytes: &[u8]) -> usize;
    /// Whether the consumer of sent bytes has room. Without room the transmitter looks full to the guest. The caller
    /// must say so while it still has room for [`FIFO_BYTES`](Self::FIFO_BYTES) bytes.
    fn set_transmit_room(&mut self, room: bool);
    /// Its state.
    fn state(&self) -> Self::State;
    /// Takes over a state. `None` for one that no UART has: then nothing has changed.
    fn set_state(&mut self, state: &Self::State) -> Option<()>;
}

macro_rules! serial_device {
    ($device:ty, $register:ty, $state:ty, $fifo_bytes:expr) => {
        impl Interrupts for $device {
            #[inline]
            fn interrupt(&self) -> bool {
                self.interrupt()
            }
        }

        impl SerialDevice for $device {
            type Register = $register;
            type State = $state;

            const FIFO_BYTES: usize = $fifo_bytes;

            #[inline]
            fn read(&mut self, offset: u16) -> $register {
                self.read(offset)
            }

            #[inline]
            fn write(&mut self, offset: u16, value: $register) -> Option<u8> {
                self.write(offset, value)
            }

            #[inline]
            fn receive(&mut self, bytes: &[u8]) -> usize {
                self.receive(bytes)
            }

            #[inline]
            fn set_transmit_room(&mut self, room: bool) {
                self.set_transmit_room(room);
            }

            fn state(&self) -> $state {
                self.state()
            }

            fn set_state(&mut self, state: &$state) -> Option<()> {
                self.set_state(state)
            }
        }
    };
}

serial_device!(Uart, u8, uart::State, uart::FIFO_BYTES);
serial_device!(Pl011, u32, pl011::State, pl011::FIFO_BYTES);
