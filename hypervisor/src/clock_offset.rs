//! Measures the difference of two CPUs' clocks by messages.
//!
//! A CPU reads its clock, sends a request, gets a reading of the other's clock, and reads its own again. The other's
//! clock was read between the two. So each exchange bounds the difference from both sides, and all of them together
//! bound it better. A difference within the bounds contradicts no exchange: no message arrives before it was sent.

/// One question and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// When it was asked, by the asking CPU's clock.
    pub asked: u64,
    /// When it was answered, by the other's.
    pub answered: u64,
    /// When the answer was there, by the asking CPU's.
    pub heard: u64,
}

/// Result for the asking CPU's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// Nothing speaks against its being the same.
    Same,
    /// The difference is this.
    Apart {
        /// To be added to it.
        offset: i64,
        /// How much more or less that may be.
        error: u64,
    },
    /// No one difference explains all exchanges: the two do not run at one rate.
    Drifts,
    /// Nothing was asked.
    Unknown,
}

/// A comparison of two clocks: the differences that all exchanges so far allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// The minimum and the maximum of the value to add to the asking CPU's clock.
    bounds: Option<(i64, i64)>,
}

impl Comparison {
    /// Takes one more exchange into account.
    pub fn take(&mut self, exchange: Exchange) {
        let Exchange { asked, answered, heard } = exchange;
        // Clocks may have passed the end of their numbers: only differences mean anything.
        let ahead = |of: u64, by: u64| of.wrapping_sub(by).cast_signed();
        let (low, high) = (ahead(answered, heard), ahead(answered, asked));
        let (least, most) = self.bounds.unwrap_or((low, high));
        self.bounds = Some((least.max(low), most.min(high)));
    }

    /// Maximum error of the middle of the bounds.
    pub fn error(&self) -> u64 {
        match self.bounds {
            Some((least, most)) if least <= most => most.wrapping_sub(least).cast_unsigned().div_ceil(2),
            Some(_) => 0,
            None => u64::MAX,
        }
    }

    /// The result of the exchanges.
    pub fn agreement(&self) -> Agreement {
        match self.bounds {
            None => Agreement::Unknown,
            Some((least, most)) if least > most => Agreement::Drifts,
            Some((least, most)) if least <= 0 && most >= 0 => Agreement::Same,
            Some((least, most)) => {
                let half = most.wrapping_sub(least) / 2;
                Agreement::Apart { offset: least.wrapping_add(half), error: self.error() }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compare(exchanges: impl IntoIterator<Item = Exchange>) -> Agreement {
        let mut comparison = Comparison::default();
        exchanges.into_iter().for_each(|exchange| comparison.take(exchange));
        comparison.agreement()
    }

    /// Two CPUs whose clocks differ by `apart`, and messages with these times there and back.
    fn exchanges(apart: i64, start: u64, ways: &[(u64, u64)]) -> Vec<Exchange> {
        let mut now = start;
        ways.iter()
            .map(|(there, back)| {
                let asked = now;
                let answered = now.wrapping_add(*there).wrapping_add_signed(apart);
                now = now.wrapping_add(there + back + 7);
                Exchange { asked, answered, heard: now.wrapping_sub(7) }
            })
            .collect()
    }

    #[test]
    fn clocks_that_agree_are_left_alone_however_long_messages_take() {
        for ways in [&[(10, 10)][..], &[(500, 3), (3, 900)], &[(1, 100_000)]] {
            assert_eq!(compare(exchanges(0, 1000, ways)), Agreement::Same);
        }
        // A difference that no message is quick enough to show.
        assert_eq!(compare(exchanges(9, 1000, &[(10, 10), (400, 20)])), Agreement::Same);
    }

    #[test]
    fn difference_is_found_within_its_error() {
        for apart in [-5_000_000_000, -3000, 3000, 1 << 40] {
            let found = compare(exchanges(apart, 77, &[(900, 100), (60, 4000), (250, 250)]));
            let Agreement::Apart { offset, error } = found else { panic!("{found:?}") };
            assert!(offset.abs_diff(apart) <= error, "{found:?} for {apart}");
            // The quickest way there is 60, the quickest back 100.
            assert_eq!(error, 80);
        }
    }

    #[test]
    fn more_exchanges_never_make_it_worse() {
        let ways = [(900, 100), (60, 4000), (250, 250), (55, 2000), (3000, 30)];
        let errors: Vec<u64> = (1..=ways.len())
            .map(|count| match compare(exchanges(1_000_000, 0, &ways[..count])) {
                Agreement::Apart { error, .. } => error,
                other => panic!("{other:?}"),
            })
            .collect();
        assert!(errors.is_sorted_by(|before, after| before >= after), "{errors:?}");
    }

    #[test]
    fn applying_the_difference_makes_clocks_agree() {
        let measured = exchanges(-123_456, 50, &[(40, 90), (70, 35), (300, 300)]);
        let Agreement::Apart { offset, .. } = compare(measured.iter().copied()) else { panic!("{measured:?}") };
        let corrected = measured.into_iter().map(|exchange| Exchange {
            asked: exchange.asked.wrapping_add_signed(offset),
            heard: exchange.heard.wrapping_add_signed(offset),
            ..exchange
        });
        assert_eq!(compare(corrected), Agreement::Same);
    }

    #[test]
    fn clocks_beyond_the_end_of_their_numbers_are_compared_all_the_same() {
        let ways = [(10, 10), (20, 30)];
        assert_eq!(compare(exchanges(0, u64::MAX - 25, &ways)), Agreement::Same);
        assert!(matches!(
            compare(exchanges(50_000, u64::MAX - 25, &ways)),
            Agreement::Apart { offset: 49_995..=50_005, .. }
        ));
    }

    #[test]
    fn clock_of_another_rate_is_found_out() {
        let mut measured = exchanges(1000, 0, &[(10, 10)]);
        measured.extend(exchanges(2000, 1_000_000, &[(10, 10)]));
        assert_eq!(compare(measured), Agreement::Drifts);
    }

    #[test]
    fn nothing_is_known_without_a_question() {
        assert_eq!(compare([]), Agreement::Unknown);
    }
}
