//! Heads and tails of the command buffer and of the event log (2.4, 2.5): both are rings of entries of 16 bytes.
//!
//! Registers hold them as offsets in bytes. The producer owns the tail, the consumer the head. A ring never has all of
//! its entries in use, because head and tail are equal when it is empty.

/// The sizes of a ring, and where the side of the driver stands.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    order: u32,
    /// Offset of the next entry that the driver writes or reads.
    at: u64,
}

/// log2 of an entry's bytes.
const ENTRY_ORDER: u32 = 4;

impl Ring {
    /// An empty ring of 2^`order` entries: 256 to 32768, by the manual.
    #[must_use]
    pub const fn new(order: u32) -> Self {
        assert!(order >= 8 && order <= 15, "the register has four bits for it, and 8 is the least");
        Self { order, at: 0 }
    }

    /// Bytes of its memory.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        1 << (self.order + ENTRY_ORDER)
    }

    /// The value of the base register for a ring at `base`, which is a multiple of 4 KiB.
    #[must_use]
    pub const fn base_register(&self, base: addr::Hpa) -> u64 {
        (self.order as u64) << 56 | base.0
    }

    /// Offset of the next entry, which is also the value for the driver's register.
    #[must_use]
    pub const fn at(&self) -> u64 {
        self.at
    }

    /// Moves on by one entry.
    pub const fn advance(&mut self) {
        self.at = self.after(self.at);
    }

    /// Whether the next entry can be written although the other side stands at `head`.
    #[must_use]
    pub const fn has_room(&self, head: u64) -> bool {
        self.after(self.at) != self.within(head)
    }

    /// Whether the other side, which writes, has passed the next entry. `tail` is what its register holds: any value.
    #[must_use]
    pub const fn has_more(&self, tail: u64) -> bool {
        self.at != self.within(tail)
    }

    const fn after(&self, offset: u64) -> u64 {
        self.within(offset + (1 << ENTRY_ORDER))
    }

    /// An offset from a register, as one of an entry of this ring.
    const fn within(&self, offset: u64) -> u64 {
        offset & (self.bytes() - 1) & !((1 << ENTRY_ORDER) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::Ring;

    #[test]
    fn full_ring_has_one_entry_free_and_wraps() {
        let mut ring = Ring::new(8);
        assert_eq!(ring.base_register(addr::Hpa(0x5000)), 0x0800_0000_0000_5000);
        let mut written = 0;
        while ring.has_room(0) {
            ring.advance();
            written += 1;
        }
        assert_eq!((written, ring.at()), (255, 4080));
        assert!(ring.has_room(16));
        ring.advance();
        assert_eq!(ring.at(), 0, "behind the last comes the first");
    }

    #[test]
    fn reader_ends_after_a_round_whatever_the_register_says() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..1000 {
            let (mut ring, tail) = (Ring::new(8), random.u64(..));
            let mut read = 0;
            while ring.has_more(tail) {
                ring.advance();
                read += 1;
                assert!(read < 256);
            }
        }
    }
}
