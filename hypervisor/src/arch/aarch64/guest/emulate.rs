//! Emulated instructions: none. The syndrome of a fault gives the register of the load or store.

/// A decoded instruction; there are none to cache.
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
