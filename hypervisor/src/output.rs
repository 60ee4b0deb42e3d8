//! Fair output: takes guests' console output in small pieces, in turn.
//!
//! The turn is remembered from one poll to the next, so with little room each guest gets its share. One poll takes at
//! most what its caller allows. The rest stays with the guests, whose UARTs tell them to wait.

/// The turn among sources with numbers from 0 on.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    next: usize,
}

impl Turns {
    /// No source has had a turn.
    pub(crate) const fn new() -> Self {
        Self { next: 0 }
    }

    /// Takes from `sources` in turn, until none has any output or the limit is reached. Returns whether there may be
    /// more.
    ///
    /// `allowed` returns how many bytes may be taken next, given the number taken so far. `take` takes at most this
    /// many from the source with that number, and returns the number of bytes taken.
    pub(crate) fn deal(
        &mut self,
        sources: usize,
        mut allowed: impl FnMut(usize) -> usize,
        mut take: impl FnMut(usize, usize) -> usize,
    ) -> bool {
        let mut taken = 0;
        let mut silent = 0;
        while silent < sources {
            let most = allowed(taken);
            if most == 0 {
                return true;
            }
            let source = self.next % sources;
            self.next = (source + 1) % sources;
            match take(source, most) {
                0 => silent += 1,
                bytes => {
                    silent = 0;
                    taken += bytes;
                }
            }
        }
        false
    }
}

/// The last bytes of an output, up to a maximum.
#[derive(Debug)]
pub(crate) struct Tail<const BYTES: usize> {
    bytes: [u8; BYTES],
    /// Number of bytes written in total.
    written: usize,
}

impl<const BYTES: usize> Tail<BYTES> {
    /// Nothing was written.
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; BYTES], written: 0 }
    }

    /// Keeps `more`, instead of the oldest.
    pub(crate) fn push(&mut self, more: &[u8]) {
        for &byte in more {
            self.bytes[self.written % BYTES] = byte;
            self.written += 1;
        }
    }

    /// The kept bytes, in two pieces, the older first.
    pub(crate) fn as_slices(&self) -> (&[u8], &[u8]) {
        let (newer, older) = self.bytes.split_at(self.written % BYTES);
        (if self.written < BYTES { &[] } else { older }, newer)
    }

    /// The same, from the first complete line on; all of it, if there is no such line.
    pub(crate) fn whole_lines(&self) -> impl Iterator<Item = u8> {
        let (older, newer) = self.as_slices();
        let kept = || older.iter().chain(newer).copied();
        let cut = if self.written <= BYTES { 0 } else { kept().position(|byte| byte == b'\n').map_or(0, |at| at + 1) };
        kept().skip(cut)
    }
}

#[cfg(test)]
mod tests {
    use super::{Tail, Turns};

    #[test]
    fn tail_is_what_was_written_last() {
        for pieces in [&[][..], &["abc"], &["abcd"], &["abcde"], &["abc", "", "defgh", "i"], &["0123456789abcdef"]] {
            let mut tail = Tail::<4>::new();
            pieces.iter().for_each(|piece| tail.push(piece.as_bytes()));
            let all = pieces.concat();
            let (older, newer) = tail.as_slices();
            assert_eq!([older, newer].concat(), &all.as_bytes()[all.len().saturating_sub(4)..], "{pieces:?}");
        }
    }

    /// Sources with this much output, and what each could write in one poll.
    fn poll(turns: &mut Turns, sources: &mut [usize], budget: usize, chunk: usize) -> (Vec<usize>, bool) {
        let mut said = vec![0; sources.len()];
        let allowed = |taken: usize| chunk.min(budget.saturating_sub(taken));
        let has_more = turns.deal(sources.len(), allowed, |source, most| {
            let bytes = most.min(sources[source]);
            sources[source] -= bytes;
            said[source] += bytes;
            bytes
        });
        (said, has_more)
    }

    #[test]
    fn all_is_taken_where_there_is_room() {
        let mut sources = [0, 1000, 7, 0];
        assert_eq!(poll(&mut Turns::new(), &mut sources, 4096, 100), (vec![0, 1000, 7, 0], false));
    }

    #[test]
    fn source_that_never_ends_leaves_room_for_the_others() {
        for flooding in 0..3 {
            let mut sources = [150; 3];
            sources[flooding] = usize::MAX;
            let (said, has_more) = poll(&mut Turns::new(), &mut sources, 1000, 100);
            assert!(has_more, "the flood goes on");
            assert!((0..3).all(|source| source == flooding || said[source] == 150), "{said:?}");
        }
    }

    #[test]
    fn one_poll_is_bounded_though_nothing_is_ever_empty() {
        let (said, has_more) = poll(&mut Turns::new(), &mut [usize::MAX; 5], 1000, 64);
        assert_eq!((said.iter().sum::<usize>(), has_more), (1000, true));
    }

    #[test]
    fn turns_go_on_where_the_last_poll_ended() {
        let mut turns = Turns::new();
        let mut sources = [usize::MAX; 4];
        let said: Vec<_> = (0..8).map(|_| poll(&mut turns, &mut sources, 64, 64).0).collect();
        for source in 0..4 {
            assert_eq!(said.iter().map(|said| said[source]).sum::<usize>(), 128, "{said:?}");
        }
    }

    #[test]
    fn sources_may_come_and_go_between_polls() {
        let mut turns = Turns::new();
        assert!(poll(&mut turns, &mut [usize::MAX; 4], 192, 64).1);
        assert_eq!(poll(&mut turns, &mut [10], 64, 64), (vec![10], false));
        assert_eq!(poll(&mut turns, &mut [], 64, 64), (vec![], false));
    }

    #[test]
    fn nothing_is_taken_without_room() {
        assert_eq!(poll(&mut Turns::new(), &mut [10; 2], 0, 64), (vec![0, 0], true));
    }
}
