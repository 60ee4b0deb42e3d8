//! Replays a trace of stage 2 from the log of a hypervisor with debug assertions, and prints the errors.
//!
//! `cargo run --release -p dunlin-hw-model --example replay FILE [SEEDS]`. With `--without-tlbis` before the file, it
//! leaves out all TLB invalidations, to prove that the replay would find missing ones.

use std::process::ExitCode;

use hw_model::trace::{Event, Trace};

fn main() -> ExitCode {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let spoiled = arguments.first().is_some_and(|first| first == "--without-tlbis");
    if spoiled {
        arguments.remove(0);
    }
    let seeds = arguments.get(1).map_or(Ok(8), |text| text.parse());
    let (Some(file), Ok(seeds)) = (arguments.first(), seeds) else {
        eprintln!("usage: replay [--without-tlbis] FILE [SEEDS]");
        return ExitCode::from(2);
    };
    match replay(file, seeds, spoiled) {
        Ok(is_clean) => ExitCode::from(u8::from(!is_clean)),
        Err(why) => {
            eprintln!("{file}: {why}");
            ExitCode::from(2)
        }
    }
}

fn replay(file: &str, seeds: u64, spoiled: bool) -> Result<bool, Box<dyn std::error::Error>> {
    let whole: Trace = std::fs::read_to_string(file)?.parse()?;
    let trace = if spoiled { whole.without(Event::invalidates) } else { whole };
    println!("{} events of {} pCPUs, {:?}, {} levels", trace.steps.len(), trace.cpus, trace.rules, trace.levels);
    let mut is_clean = true;
    for seed in 1..=seeds {
        let outcome = trace.replay(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))?;
        println!("seed {seed}: {} walks, {} stale entries looked for", outcome.walks, outcome.checked);
        outcome.violations.iter().for_each(|(line, what)| println!("  line {line}: {what}"));
        is_clean &= outcome.violations.is_empty();
    }
    println!("{}", if is_clean { "clean" } else { "violated" });
    Ok(is_clean)
}
