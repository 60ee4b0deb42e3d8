//! Detects that a vCPU writes to one large leaf after the other.
//!
//! The first write to a leaf that a dirty log has write-protected costs a fault, and with break-before-make a
//! broadcast. A vCPU that walks through its memory hits one leaf after the other. So one fault splits several leaves
//! ahead, like file readahead. For a vCPU with scattered writes nothing is split ahead.

use addr::Gpa;

/// Maximum number of leaves that one fault splits ahead.
const MOST: u64 = 15;

/// The splitting faults of one vCPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stream {
    /// End of the last splits.
    end: Gpa,
    /// Number of leaves that the last fault split ahead.
    ahead: u64,
}

impl Stream {
    /// No fault seen yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { end: Gpa(0), ahead: 0 }
    }

    /// The number of leaves to split ahead, for a fault at `gpa` in a leaf of `bytes`. It is zero unless the last
    /// splits ended here. Then it is twice the last number plus one, at most 15.
    #[must_use]
    pub fn ahead_of(&self, gpa: Gpa, bytes: u64) -> u64 {
        let goes_on = self.end.0 != 0 && gpa.0 & !(bytes - 1) == self.end.0;
        if goes_on { (2 * self.ahead + 1).min(MOST) } else { 0 }
    }

    /// Records that `ahead` leaves were to be split ahead, and that the last one looked at ends at `end`.
    pub const fn has_split(&mut self, ahead: u64, end: Gpa) {
        self.ahead = ahead;
        self.end = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB_2: u64 = 2 << 20;

    /// Leaves split ahead at each of these faults, if all are split as asked.
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
        // A vCPU that walks on counts as a stream until it goes elsewhere.
        assert_eq!(ahead([4, 5, 90, 91, 80]), [0, 1, 0, 1, 0]);
    }
}
