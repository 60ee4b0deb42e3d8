//! `dunlin layout`: the memory layout of the hypervisor's own state, as a running host reports it.
//!
//! The host runs already, or the tool starts one without VMs ([`host`]). [`text`] prints its answer, and can compare it
//! with a file line by line; the answer also comes as JSON. [`mod@places`] checks the addresses of the blocks.

mod host;
mod picture;
mod places;
mod text;

use std::fs;
use std::io::{IsTerminal, stdout};
use std::path::Path;

use abi::control::{Answer, Command, HostInfo, PLACES_CHUNK, Refusal};
use abi::layout::{Layout, Place};
use serde_json::{Value, json};
use similar::TextDiff;

use self::host::Host;
use self::places::Placement;
use self::text::{Shares, blocks};
use crate::args::LayoutArgs;
use crate::control::{Client, refusal};
use crate::failure::{FAILED, Failure};
use crate::{share, stats};

/// Maximum number of kinds of blocks, and of addresses, that the tool accepts from a host.
const BELIEVABLE_KINDS: u32 = 64;
const BELIEVABLE_PLACES: usize = 1 << 18;

/// The answer of a host.
struct Told {
    host: HostInfo,
    layouts: Vec<Layout>,
    /// Where its blocks are, of a host that has VMs.
    places: Option<Vec<Place>>,
}

pub(crate) fn run(args: &LayoutArgs) -> Result<u8, Failure> {
    // Find errors of the file before anything is started.
    let golden = args.check.as_deref().map(|path| read(path).map(|text| (path, text))).transpose()?;
    let told = ask(args)?;
    let plain = blocks(&told.layouts).plain();

    if let Some((path, golden)) = golden {
        return Ok(check(path, &golden, &plain));
    }
    if let Some(path) = &args.write {
        return write(path, &plain);
    }
    if let Some(path) = &args.picture {
        let vcpu = told.layouts.first().ok_or_else(|| Failure::failed("the host has no blocks"))?;
        return write(path, &picture::svg(vcpu));
    }
    let placement = told.places.as_deref().map(|places| Placement::of(places, line_of(&told.layouts)));
    if args.json {
        println!("{:#}", told.json(placement.as_ref()));
    } else {
        let coloured = stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let blocks = blocks(&told.layouts);
        print!("{}", if coloured { blocks.coloured() } else { plain });
        if let Some(placement) = &placement {
            print!("\n{placement}");
        }
    }
    let is_good = told.layouts.iter().all(|layout| Shares::of(layout).shared.is_empty())
        && placement.is_none_or(|placement| placement.is_good());
    Ok(if is_good { 0 } else { FAILED })
}

fn ask(args: &LayoutArgs) -> Result<Told, Failure> {
    if let Some(running) = args.host {
        let mut client = share::attach(running)?;
        let host = stats::host(&mut client)?;
        let places = Some(places(&mut client)?);
        return Ok(Told { host, layouts: layouts(&mut client)?, places });
    }
    let mut started = Host::start(args.arch, args.qemu.as_ref())?;
    let layouts = layouts(started.client()).map_err(|failure| started.explain(failure))?;
    Ok(Told { host: started.end(), layouts, places: None })
}

fn layouts(client: &mut Client) -> Result<Vec<Layout>, Failure> {
    let mut layouts = Vec::new();
    for kind in 0..BELIEVABLE_KINDS {
        match client.ask(Command::Layout { kind })? {
            Ok(Answer::Layout(layout)) => layouts.push(layout),
            Err(Refusal::NoSuchLayout) => break,
            other => return Err(stats::unexpected(other.map_err(refusal))),
        }
    }
    Ok(layouts)
}

fn places(client: &mut Client) -> Result<Vec<Place>, Failure> {
    let mut places = Vec::new();
    while places.len() < BELIEVABLE_PLACES {
        let first = u32::try_from(places.len()).unwrap_or(u32::MAX);
        match client.ask(Command::Places { first })? {
            Ok(Answer::Places(more)) => {
                let is_last = more.len() < PLACES_CHUNK;
                places.extend(more);
                if is_last {
                    break;
                }
            }
            other => return Err(stats::unexpected(other.map_err(refusal))),
        }
    }
    Ok(places)
}

/// Bytes of a cache line, which is the same for all blocks of a host.
fn line_of(layouts: &[Layout]) -> u64 {
    layouts.first().map_or(1, |layout| u64::from(layout.line.max(1)))
}

fn write(path: &Path, text: &str) -> Result<u8, Failure> {
    fs::write(path, text).map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
    Ok(0)
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| {
        Failure::bad_input(format!("{}: {error}", path.display()))
            .help(format!("'dunlin layout --write {}' creates it", path.display()))
    })
}

/// Prints the differences from `golden`, the text of the file at `path`.
fn check(path: &Path, golden: &str, now: &str) -> u8 {
    if golden == now {
        println!("{}: up to date", path.display());
        return 0;
    }
    print!("{}", difference(&path.display().to_string(), golden, now));
    eprintln!(
        "{0}: the layout has changed; if this is intended, update the file with 'dunlin layout --write {0}'",
        path.display()
    );
    FAILED
}

/// Line by line, with the lines around each change.
fn difference(path: &str, old: &str, new: &str) -> String {
    TextDiff::from_lines(old, new).unified_diff().context_radius(2).header(path, "as it is").to_string()
}

impl Told {
    fn json(&self, placement: Option<&Placement>) -> Value {
        let layouts: Vec<Value> = self.layouts.iter().map(text::json).collect();
        json!({
            "host": { "version": self.host.version, "processor": self.host.processor, "pcpus": self.host.pcpus },
            "layouts": layouts,
            "places": self.places.as_deref().map(|places| places.iter().map(places::json).collect::<Vec<_>>()),
            "placement": placement.map(Placement::json),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shift_of_a_field_is_shown_as_the_lines_that_changed() {
        let old = "a\nb\nc\n   0  8  pending\n  16  8  registers\nd\ne\nf\n";
        let new = old.replace("  16  8", " 128  8");
        let difference = difference("docs/layout.txt", old, &new);
        let expected = "--- docs/layout.txt\n+++ as it is\n@@ -3,5 +3,5 @@\n c\n    0  8  pending\n\
                        -  16  8  registers\n+ 128  8  registers\n d\n e\n";
        assert_eq!(difference, expected);
    }

    #[test]
    fn only_the_very_same_text_passes() {
        let path = Path::new("x");
        assert_eq!(
            [check(path, "a\n", "a\n"), check(path, "a\n", "a \n"), check(path, "", "a\n")],
            [0, FAILED, FAILED]
        );
    }

    #[test]
    fn file_that_is_not_there_is_bad_input_and_told_how_to_make() {
        let failure = read(Path::new("/nowhere/layout.txt")).expect_err("is not there");
        assert_eq!(failure.status, crate::failure::BAD_INPUT);
        let text = failure.to_string();
        assert!(text.starts_with("/nowhere/layout.txt: ") && text.contains("--write /nowhere/layout.txt"), "{text}");
    }
}
