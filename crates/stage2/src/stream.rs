//! Whether a vCPU writes to one large leaf after the other.
//!
//! A leaf that a dirty log has closed costs a fault when the guest first writes to it, and where the processor wants entries broken
//! before they are made, a broadcast. A vCPU that walks through its memory meets one after the other: it pays for some of
//! them at once, as files are read ahead. One that writes here and there is not taken for such a vCPU, and nothing is split
//! for it that it does not write to.

use addr::Gpa;

/// Most leaves that are split ahead of one fault.
const MOST: u64 = 15;

/// The faults of one vCPU that had to split.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stream {
    /// Where the last splits have ended.
    end: Gpa,
    /// How many leaves were split ahead of the last fault.
    ahead: u64,
}

impl Stream {
    /// Nothing was seen yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { end: Gpa(0), ahead: 0 }
    }

    /// A fault at `gpa` has to split the leaf of `bytes` around it. How many leaves behind it should be split with it: none,
    /// unless this is where the last splits have ended, and twice as many as then and one, but not more than 15, if it is.
    #[must_use]
    pub fn ahead_of(&self, gpa: Gpa, bytes: u64) -> u64 {
        let goes_on = self.end.0 != 0 && gpa.0 & !(bytes - 1) == self.end.0;
        if goes_on { (2 * self.ahead + 1).min(MOST) } else { 0 }
    }

    /// So many leaves were to be split ahead, and the last that was looked at ends at `end`.
    pub const fn has_split(&mut self, ahead: u64, end: Gpa) {
        self.ahead = ahead;
        self.end = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB_2: u64 = 2 << 20;

    /// Leaves split ahead at each of these faults, when all that are asked for are split.
    fn ahead<const N: usize>(faults: [u64; N]) -> [u64; N] {
        let mut stream = Stream::new();
        faults.map(|leaf| {
            let ahead = stream.ahead_of(Gpa(leaf * MIB_2 + 0x1234), MIB_2);
            stream.has_split(ahead, Gpa((leaf + 1 + ahead) * MIB_2));
            ahead
        })
    }

    #[test]
    fn vcpu_that_walks_on_pays_for_more_and_more_at_once() {
        assert_eq!(ahead([0, 1, 3, 7, 15, 31]), [0, 1, 3, 7, 15, 15]);
    }

    #[test]
    fn vcpu_that_writes_here_and_there_pays_for_what_it_writes() {
        assert_eq!(ahead([0, 10, 20, 5, 40, 39, 3]), [0; 7]);
        // Until it turns elsewhere, one that walks on is believed.
        assert_eq!(ahead([4, 5, 90, 91, 80]), [0, 1, 0, 1, 0]);
    }
}
