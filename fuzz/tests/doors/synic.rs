//! MSRs of the synthetic interrupt controller, and of its timers.

use fuzz::{Input, target};
use synic::{Expiry, Synic, Timers};

/// The registers of both begin here (TLFS, appendix F).
const FIRST: u32 = 0x4000_0080;
const VERSION: u32 = 0x4000_0081;
const END_OF_MESSAGE: u32 = 0x4000_0084;

fn access(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (mut synic, mut timers, mut now) = (Synic::new(), Timers::new(), 0_u64);
    while !input.is_empty() {
        let operation = input.byte() % 8;
        let number = FIRST + u32::from(input.byte()) % 0x40;
        let value = if input.byte() & 1 == 0 { input.u16().into() } else { input.u64() };
        match operation {
            0..3 => {
                if synic.write(number, value).is_ok() && number != END_OF_MESSAGE {
                    assert_eq!(synic.read(number), Ok(value), "{number:#x} keeps what it was given");
                    assert_ne!(number, VERSION, "it can only be read");
                }
            }
            3..6 => {
                let is_count = number & 1 != 0;
                if timers.write(number, value, now).is_ok() && is_count {
                    assert_eq!(timers.read(number), Ok(value), "{number:#x} keeps what it was given");
                }
            }
            6 => {
                now = now.saturating_add(value >> (number & 63));
                let expiries: Vec<Expiry> = std::iter::from_fn(|| timers.expire(now)).take(9).collect();
                assert!(expiries.len() <= 4, "at most once for each timer: {expiries:?}");
                assert!(timers.deadline().is_none_or(|deadline| deadline > now));
            }
            _ => {
                let state = timers.state();
                let mut other = Timers::new();
                assert!(other.set_state(&state, now).is_ok(), "what it says of itself can be taken over");
                assert_eq!(format!("{:?}", other.state()), format!("{state:?}"));
                assert_eq!(other.deadline(), timers.deadline());
            }
        }
        for sint in (0..16).filter_map(|number| synic.sint(number)).filter_map(synic::Sint::interrupt) {
            assert!(sint.vector >= 16, "vectors below are the processor's own");
        }
        assert!(synic.message_page().is_none_or(|page| page & 0xfff == 0));
    }
}

#[test]
fn any_msrs_keep_what_they_were_given() {
    target("synic", access);
}
