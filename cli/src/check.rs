//! `dunlin check`: whether a machine has what Dunlin needs, seen from the Linux that runs on it.
//!
//! It only reads files ([`tree`]) and changes nothing. The list follows the hypervisor's own requirements; each item
//! names the code that refuses to start without it. The hypervisor's option `check` sees more, but needs a restart of
//! the machine.

mod firmware;
mod kernels;
mod machine;
mod processor;
#[cfg(test)]
mod tests;
mod tree;

use std::fmt::Write;
use std::path::Path;

use serde_json::{Value, json};

use self::processor::Processor;
use self::tree::Tree;
use crate::args::CheckArgs;
use crate::assets::Assets;
use crate::failure::{FAILED, Failure};

pub(crate) fn run(args: &CheckArgs) -> Result<u8, Failure> {
    let tree = Tree::open(&args.root)?;
    if args.kernels {
        kernels::able(&tree).iter().for_each(|release| println!("{release}"));
        return Ok(0);
    }
    // Our own kernels are on this machine, so they say nothing about another tree.
    let built = if args.root == Path::new("/") { Assets::locate().parent_kernels() } else { Vec::new() };
    let report = Report::of(&tree, &built);
    if args.json {
        println!("{:#}", report.json());
    } else {
        print!("{}", report.text());
    }
    Ok(if report.is_good() { 0 } else { FAILED })
}

/// All items of a machine.
struct Report {
    items: Vec<Item>,
}

/// One checked item.
#[derive(Clone, Debug)]
struct Item {
    subject: Subject,
    state: State,
    /// How it is here.
    found: String,
    /// What to do.
    remedy: Option<String>,
}

/// What is checked.
#[derive(Clone, Copy, Debug)]
struct Subject {
    name: &'static str,
    need: Need,
}

/// What does not work without the item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// The hypervisor does not start, or starts no VM.
    Start,
    /// No VM can be a parent. Other VMs run.
    Parent,
    /// Everything works.
    Nothing,
}

/// The result for an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ok,
    Missing,
    Unknown,
    Note,
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Missing => "missing",
            Self::Unknown => "unknown",
            Self::Note => "note",
        }
    }
}

impl Subject {
    /// Nothing starts without it.
    const fn needed(name: &'static str) -> Self {
        Self { name, need: Need::Start }
    }

    /// Something is worse without it.
    const fn useful(name: &'static str) -> Self {
        Self { name, need: Need::Nothing }
    }

    fn item(self, state: State, found: impl Into<String>) -> Item {
        Item { subject: self, state, found: printable(&found.into()), remedy: None }
    }

    fn ok(self, found: impl Into<String>) -> Item {
        self.item(State::Ok, found)
    }

    fn note(self, found: impl Into<String>) -> Item {
        self.item(State::Note, found)
    }

    fn unknown(self, found: impl Into<String>) -> Item {
        self.item(State::Unknown, found)
    }

    fn missing(self, found: impl Into<String>, remedy: impl Into<String>) -> Item {
        self.item(State::Missing, found).remedy(remedy)
    }
}

impl Item {
    fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }

    fn json(&self) -> Value {
        let needed_for = match self.subject.need {
            Need::Start => Some("start"),
            Need::Parent => Some("parent"),
            Need::Nothing => None,
        };
        json!({
            "name": self.subject.name,
            "state": self.state.name(),
            "found": self.found,
            "remedy": self.remedy,
            "needed_for": needed_for,
        })
    }
}

/// Maximum length of text from the machine, in characters.
const LONGEST: usize = 300;

/// `text` without control characters, for a terminal. It may come from firmware or from a damaged file.
fn printable(text: &str) -> String {
    text.chars().take(LONGEST).map(|letter| if letter.is_control() { '?' } else { letter }).collect()
}

impl Report {
    /// Checks the machine whose files are in `tree`. `built` names kernels for a parent that the build has left.
    fn of(tree: &Tree, built: &[String]) -> Self {
        let processor = Processor::read(tree);
        let arch = processor.as_ref().map(|processor| processor.arch).or_else(|| kernels::arch(tree));
        let outer = machine::outer(tree, processor.as_ref());
        let mut items = processor::items(tree, arch, processor.as_ref(), outer.as_ref());
        items.extend(machine::items(tree, arch, processor.as_ref(), outer.as_ref()));
        items.extend(firmware::items(tree, arch));
        items.push(kernels::item(tree, arch, built));
        Self { items }
    }

    /// Everything that is needed is there.
    fn is_good(&self) -> bool {
        self.items
            .iter()
            .all(|item| item.subject.need == Need::Nothing || matches!(item.state, State::Ok | State::Note))
    }

    /// Names of the items in a state that are needed for something.
    fn names(&self, need: Need, state: State) -> Vec<&'static str> {
        let these = self.items.iter().filter(|item| item.subject.need == need && item.state == state);
        these.map(|item| item.subject.name).collect()
    }

    /// The result in one line.
    fn verdict(&self) -> String {
        let missing = self.names(Need::Start, State::Missing);
        let unknown = self.names(Need::Start, State::Unknown);
        if !missing.is_empty() {
            return format!("Dunlin cannot run on this machine as it is. Missing: {}.", missing.join(", "));
        }
        if !unknown.is_empty() {
            return format!("Whether Dunlin can run on this machine is not known. Unknown: {}.", unknown.join(", "));
        }
        if !self.names(Need::Parent, State::Missing).is_empty() {
            return "Dunlin can run on this machine. A parent VM cannot: it has no kernel for one.".to_string();
        }
        if !self.names(Need::Parent, State::Unknown).is_empty() {
            return "Dunlin can run on this machine. Whether it has a kernel for a parent VM is not known.".to_string();
        }
        "Dunlin can run on this machine, and has all that it needs.".to_string()
    }

    fn text(&self) -> String {
        let width = self.items.iter().map(|item| item.subject.name.len()).max().unwrap_or_default();
        let mut text = format!("{}\n\n", self.verdict());
        for Item { subject, state, found, remedy } in &self.items {
            // Writing to a String cannot fail.
            let _ = write!(text, "{:<width$}  {:<7}  {found}", subject.name, state.name());
            let _ = match remedy {
                Some(remedy) => writeln!(text, ": {remedy}"),
                None => writeln!(text),
            };
        }
        text
    }

    fn json(&self) -> Value {
        let items: Vec<Value> = self.items.iter().map(Item::json).collect();
        json!({ "verdict": self.verdict(), "good": self.is_good(), "items": items })
    }
}
