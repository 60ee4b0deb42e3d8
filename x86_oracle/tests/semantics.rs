//! The emulator against the processor, over many random states.
//!
//! `ORACLE_STATES=10000000 cargo test --release -p dunlin-x86-oracle -- --nocapture` compares this many, and prints the
//! progress; `ORACLE_SEED` selects others.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod here {
    use std::time::Instant;
    use x86_emulate::Mode;
    use x86_oracle::{Campaign, Class, Processor, Step};

    /// Default number.
    const STATES: u64 = if cfg!(debug_assertions) { 60_000 } else { 200_000 };
    /// How often each class is compared at least, per million states. Chance matters with few states: one class came
    /// 133 times per million.
    const LEAST_PER_MILLION: u64 = 75;
    const MOST_SHOWN: usize = 10;

    /// Events that must happen as often, with any instruction.
    const EVENTS: [&str; 13] = [
        "AH, CH, DH or BH",
        "address of the other size",
        "address relative to RIP",
        "code over the end of a page",
        "operand over the end of a page",
        "pair over the end of a page",
        "from what was learnt of the place",
        "locked",
        "string, not repeated",
        "string, repeated (while equal)",
        "string, repeated (while different)",
        "string, downwards",
        "exception 14",
    ];

    /// And that, where FS and GS can have any base and linear addresses have 48 bits.
    const WITH_BASES: [&str; 1] = ["effective address not canonical, linear is"];

    fn number(variable: &str) -> Option<u64> {
        let text = std::env::var(variable).ok()?;
        Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")))
    }

    #[test]
    fn the_emulator_does_what_the_processor_does() {
        let processor = match Processor::take() {
            Ok(processor) => processor,
            Err(why) => return println!("skipped: the processor cannot be asked: {why}"),
        };
        let states = number("ORACLE_STATES").unwrap_or(STATES);
        let mut campaign = Campaign::new(processor, number("ORACLE_SEED").unwrap_or(4));
        let (mut compared, mut differed, mut skipped, mut refused) = (0, 0, 0_u64, 0);
        let mut shown = Vec::new();
        let started = Instant::now();
        while compared < states {
            match campaign.step(None) {
                Step::Skipped => {
                    skipped += 1;
                    continue;
                }
                Step::Refused(mode, bytes) => {
                    refused += 1;
                    if refused <= MOST_SHOWN {
                        println!("{mode:?} {bytes:02x?} is refused");
                    }
                    continue;
                }
                Step::Same => {}
                Step::Different(mismatch) => {
                    differed += 1;
                    if shown.len() < MOST_SHOWN {
                        println!("{mismatch}\n");
                        shown.push(mismatch);
                    }
                }
            }
            compared += 1;
            if compared % 1_000_000 == 0 {
                let seconds = started.elapsed().as_secs_f64();
                println!("{compared} states compared, {differed} differ, {seconds:.1} s");
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        println!(
            "{compared} states compared, {differed} differ, {skipped} attempts skipped, {refused} refused, {seconds:.1} s"
        );
        println!("{}", campaign.coverage());
        assert_eq!(refused, 0, "instructions that the emulator should know; the first are above");
        assert_eq!(differed, 0, "the emulator did otherwise; the first cases are above");

        let mut modes = vec![Mode::Bits64];
        if campaign.has_segments() {
            modes.extend([Mode::Bits32, Mode::Bits16]);
        } else {
            println!("16- and 32-bit code was left out: the kernel gives no segments");
        }
        let bases = if campaign.has_bases() { &WITH_BASES[..] } else { &[] };
        let least = states * LEAST_PER_MILLION / 1_000_000;
        for class in modes.into_iter().flat_map(Class::all) {
            let count = campaign.coverage().of(class);
            assert!(count >= least, "{class:?} was compared {count} times, not {least}");
        }
        for event in EVENTS.iter().chain(bases) {
            let count = campaign.coverage().events(event);
            assert!(count >= least, "`{event}` happened {count} times, not {least}");
        }
    }
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[test]
fn the_emulator_does_what_the_processor_does() {
    println!("skipped: this is not an x86-64 processor with Linux");
}
