//! `cargo bench -p dunlin-tlb-tag --features measure --bench entry [-- --json]`: cycles per entry, natively.

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    for figure in tlb_tag::measure::all() {
        let tlb_tag::measure::Figure { name, cycles, min, max } = figure;
        if json {
            println!(
                r#"{{"bench":"tags","name":"{name}","cycles":{cycles:.2},"min":{min:.2},"max":{max:.2},"unit":"cycles","emulated":false}}"#
            );
        } else {
            println!("{name:34} {cycles:7.1} cycles ({min:.1} to {max:.1})");
        }
    }
}
