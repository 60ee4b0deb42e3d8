//! Instructions that are emulated: none. The syndrome of a fault says which register was to be loaded or stored.

/// A decoded instruction, of which there are none to remember.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decoded {}

impl decode_cache::Decoded for Decoded {
    fn length(&self) -> u8 {
        match *self {}
    }

    fn pack(&self) -> [u64; 4] {
        match *self {}
    }

    fn unpack(_: [u64; 4]) -> Option<Self> {
        None
    }
}
