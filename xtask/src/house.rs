//! The house rules, which the compiler does not know. Each has a permanent name and a reason.
//!
//! A check reads a [`Tree`] (the repository's text files in memory) and returns the places that break its rule. The
//! checks use code with blanked comments and strings (see [`source`]), so a text about something does not count as
//! code. Clippy checks that each unsafe block says why it is sound.

mod figures;
mod source;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use source::{blank, identifiers, line_of};

/// A rule.
struct Check {
    name: &'static str,
    why: &'static str,
    find: fn(&Tree) -> Vec<Broken>,
}

const CHECKS: [Check; 14] = [
    Check {
        name: "unsafe-in-arch",
        why: "what can break memory safety is read in few places: folders called arch, and single files of some programs",
        find: unsafe_in_arch,
    },
    Check {
        name: "arch-named-once",
        why: "code outside src/arch, and libraries that are not called after one, hold for every architecture and name none",
        find: arch_named_once,
    },
    Check {
        name: "contract",
        why: "the core reaches a machine by the contract's traits, and unsafe code by the files that all machines share",
        find: contract,
    },
    Check {
        name: "arrows",
        why: "binaries use algorithms, algorithms use the vocabulary, and never each other: each is useful alone",
        find: arrows,
    },
    Check {
        name: "std-on-host-only",
        why: "only programs for a host or for Linux guests, fuzz, hw_model, interleave and tests have an operating system below them",
        find: std_on_host_only,
    },
    Check {
        name: "library-attributes",
        why: "a library crate is no_std and forbids unsafe, so that a stranger may use it anywhere",
        find: library_attributes,
    },
    Check {
        name: "module-names",
        why: "a module called util, common, helpers or misc says nothing about what is in it",
        find: module_names,
    },
    Check {
        name: "reasons",
        why: "a lint is switched off for a reason, and the reader wants to know it",
        find: reasons,
    },
    Check { name: "links", why: "a link in a document leads somewhere", find: links },
    Check {
        name: "vm-comments",
        why: "the description of a VM is its manual page, so it opens with a comment",
        find: vm_comments,
    },
    Check {
        name: "opening",
        why: "a source file opens by telling its idea (`//!`); unit tests are of the file beside them",
        find: opening,
    },
    Check {
        name: "crates-explained",
        why: "a crate of a third party is there for a reason, given in docs/decisions/0002-crates.md",
        find: crates_explained,
    },
    Check {
        name: "figures",
        why: "instructions per exit in prose are those of docs/exits*.toml, or say of which day they are",
        find: figures::find,
    },
    Check {
        name: "line-length",
        why: "documents and comments are read beside each other: their lines have at most 120 characters, like code",
        find: line_length,
    },
];

const CRATES_DOCUMENT: &str = "docs/decisions/0002-crates.md";
const VOCABULARY: [&str; 7] = ["addr", "abi", "x86_defs", "aarch64_defs", "hyperv_defs", "amd_vi", "vt_d"];
/// An algorithm and its macros. For a user they are one crate; the compiler requires a separate crate for macros. They
/// are `no_std` like all libraries, though they only run inside the compiler.
const MACROS: (&str, &str) = ("vcpu_layout", "vcpu_layout_derive");
/// Crates that join algorithm crates because two programs need the same join: the crate, and the algorithms.
const JOINS: [(&str, &[&str]); 1] = [("emulator", &["decode_cache", "x86_emulate"])];
/// The machine that tests run against: it may use std, and is a dev-dependency only.
const MODEL: &str = "hw_model";
/// Turns a program's threads into a simulation for its tests: it may use std, and is for tests or behind a feature.
const SIMULATION: &str = "interleave";
/// Programs with std; nothing imports them.
const STD_PROGRAMS: [&str; 7] = ["cli", "xtask", "guest_move", "mshv_check", "system_tests", "workloads", "x86_oracle"];
/// Makes fuzz targets of tests: it has std, and is a dev-dependency only.
const FUZZER: &str = "fuzz";
const BAD_MODULE_NAMES: [&str; 6] = ["util", "utils", "common", "helper", "helpers", "misc"];

/// The repository's text files, by path from its root.
#[derive(Default)]
struct Tree {
    files: BTreeMap<String, String>,
}

/// A place where a rule is broken.
#[derive(Debug, PartialEq, Eq)]
struct Broken {
    path: String,
    /// Counted from 1.
    line: usize,
    what: String,
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.what)
    }
}

/// Runs all checks on the repository at `root` and prints the violations.
pub(crate) fn report(root: &Path) -> Result<ExitCode> {
    let tree = Tree::read(root)?;
    let mut broken = 0;
    for check in &CHECKS {
        let found = (check.find)(&tree);
        if found.is_empty() {
            println!("{:18} holds", check.name);
            continue;
        }
        println!("{:18} broken: {}", check.name, check.why);
        for place in &found {
            println!("    {place}");
        }
        broken += found.len();
    }
    println!("house: {} rules, {} files, {broken} places to mend", CHECKS.len(), tree.files.len());
    Ok(if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Updates the figures in documents and comments from `docs/exits*.toml`, and prints the changed files.
pub(crate) fn renew_figures(root: &Path) -> Result<()> {
    let tree = Tree::read(root)?;
    let texts = tree.with_extension("md").chain(tree.rust());
    for (path, text) in texts {
        if let Some(renewed) = figures::renewed(&tree, text) {
            fs::write(root.join(path), renewed).with_context(|| format!("cannot write {path}"))?;
            println!("{path}: renewed");
        }
    }
    Ok(())
}

impl Tree {
    /// Reads all that git would: no build output, no hidden directories except those that belong to us.
    fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        let mut open = vec![String::new()];
        while let Some(prefix) = open.pop() {
            let directory = root.join(&prefix);
            for entry in fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))? {
                let entry = entry?;
                let Ok(name) = entry.file_name().into_string() else { continue };
                let hidden = name.starts_with('.') && ![".ci", ".cargo"].contains(&name.as_str());
                let path = format!("{prefix}{name}");
                if entry.file_type()?.is_dir() {
                    if !hidden && name != "target" {
                        open.push(format!("{path}/"));
                    }
                } else {
                    // A file that is not text has no lines to check, but may be linked to.
                    let text = fs::read_to_string(entry.path()).unwrap_or_default();
                    tree.files.insert(path, text);
                }
            }
        }
        Ok(tree)
    }

    fn with_extension<'a>(&'a self, extension: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let files = self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()));
        files.filter(move |(path, _)| path.rsplit_once('.').is_some_and(|(_, found)| found == extension))
    }

    fn rust(&self) -> impl Iterator<Item = (&str, &str)> {
        self.with_extension("rs")
    }

    /// Is there a file or a directory of this name?
    fn has(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        path.is_empty()
            || self.files.contains_key(path)
            || self
                .files
                .range(format!("{path}/")..)
                .next()
                .is_some_and(|(next, _)| next.starts_with(&format!("{path}/")))
    }
}

fn broken(path: &str, line: usize, what: impl Into<String>) -> Broken {
    Broken { path: path.to_owned(), line, what: what.into() }
}

fn below(path: &str, directories: &[&str]) -> bool {
    directories.iter().any(|directory| path.strip_prefix(directory).is_some_and(|rest| rest.starts_with('/')))
}

fn unsafe_in_arch(tree: &Tree) -> Vec<Broken> {
    let folders = ["hypervisor/src/arch", "guest/src/arch", "x86_oracle/src/arch"];
    let files = [
        "fuzz/src/libfuzzer.rs",
        "guest_move/src/system.rs",
        "mshv_check/src/system.rs",
        "workloads/src/memory.rs",
        "workloads/src/registers.rs",
    ];
    let listed = |path: &str| below(path, &folders) || files.contains(&path);
    let elsewhere = tree.rust().filter(|(path, _)| !listed(path));
    let mut found = Vec::new();
    for (path, text) in elsewhere {
        let code = blank(text);
        let words = identifiers(&code).filter(|(_, word)| *word == "unsafe");
        found.extend(words.map(|(at, _)| broken(path, line_of(&code, at), "unsafe outside of arch")));
    }
    found
}

fn arch_named_once(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        if !holds_everywhere(path) {
            continue;
        }
        // A device may belong to the PC; it must still not depend on the target.
        let device = below(path, &["hypervisor/src/device"]);
        // The one switch of a library to the processor's atomics may know which of two right ways is the cheap one.
        let atomics = path.ends_with("/src/sync.rs");
        let code = blank(text);
        for (at, word) in identifiers(&code) {
            let lower = word.to_ascii_lowercase();
            let names = ["x86_64", "aarch64", "arm64", "amd64", "svm"].iter().any(|name| lower.contains(name));
            if (word == "target_arch" && !atomics) || (names && !device) {
                found.push(broken(path, line_of(&code, at), format!("`{word}` names an architecture")));
            }
        }
    }
    found
}

/// Whether the code at `path` is for every architecture: the hypervisor except its folder `arch`, and libraries except
/// those named after an architecture. (A *format* of one architecture is a name like any other: NPT and VMSA in
/// `stage2` compile and are tested anywhere. The tool and `xtask` choose among architectures and name them.)
fn holds_everywhere(path: &str) -> bool {
    let is_of_one = |folder: &str| ["x86", "aarch64"].iter().any(|name| folder.contains(name));
    match path.strip_prefix("crates/").and_then(|path| path.split_once('/')) {
        Some((library, _)) => !is_of_one(library),
        None => below(path, &["hypervisor/src"]) && !below(path, &["hypervisor/src/arch"]),
    }
}

/// What the hypervisor's core may name of `arch`: the contract and the machine behind it; shared files around unsafe
/// code; and the machine that exists in tests only.
const NAMED_OF_ARCH: [&str; 13] = [
    "Arch",
    "ControlPort",
    "GivenFunctions",
    "HostConsole",
    "Machine",
    "VcpuState",
    "block",
    "growing",
    "guest_ram",
    "ram",
    "tables",
    "trace",
    "fake",
];

fn contract(tree: &Tree) -> Vec<Broken> {
    let is_core = |path: &str| below(path, &["hypervisor/src"]) && !below(path, &["hypervisor/src/arch"]);
    let mut found = Vec::new();
    for (path, text) in tree.rust().filter(|(path, _)| is_core(path)) {
        let code = blank(text);
        for (at, word) in identifiers(&code).filter(|(_, word)| *word == "arch") {
            // Another crate may have a module of this name.
            let before = &code[..at];
            let is_ours = before.ends_with("crate::") || !before.ends_with("::");
            let Some(path_within) = code[at + word.len()..].strip_prefix("::").filter(|_| is_ours) else { continue };
            let names = first_names(path_within).into_iter().filter(|name| !NAMED_OF_ARCH.contains(name));
            let line = line_of(&code, at);
            found.extend(names.map(|name| broken(path, line, format!("`{name}` is not of the contract"))));
        }
    }
    found
}

/// The first name of a path, or of each path in braces.
fn first_names(path: &str) -> Vec<&str> {
    let first = |text| identifiers(text).next().filter(|(at, _)| !text[..*at].contains('}')).map(|(_, name)| name);
    if !path.starts_with('{') {
        return first(path).into_iter().collect();
    }
    let mut depth = 0_usize;
    let mut names = Vec::new();
    for (at, letter) in path.char_indices() {
        match letter {
            '{' => depth += 1,
            '}' if depth == 1 => break,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 1 && ['{', ','].contains(&letter) {
            names.extend(first(&path[at..]));
        }
    }
    names
}

/// Which folder's package a dependency means, if it is ours.
fn our_folder<'a>(tree: &'a Tree, dependency: &str) -> Option<&'a str> {
    let folder = dependency.strip_prefix("dunlin-").unwrap_or(dependency).replace('-', "_");
    let manifests = tree.files.keys().filter_map(|path| path.strip_suffix("/Cargo.toml"));
    let mut names = manifests.map(|directory| directory.strip_prefix("crates/").unwrap_or(directory));
    names.find(|name| *name == folder)
}

fn arrows(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| path.ends_with("/Cargo.toml")) {
        let Ok(manifest) = text.parse::<toml::Table>() else {
            found.push(broken(path, 1, "is not valid TOML"));
            continue;
        };
        let directory = path.trim_end_matches("/Cargo.toml");
        // A program that drives a crate from outside may be in the crate's folder.
        let user = directory.strip_prefix("crates/").filter(|user| !user.contains('/'));
        for (dependency, dev, optional) in dependencies(&manifest) {
            let Some(used) = our_folder(tree, &dependency) else { continue };
            if let Some(what) = forbidden_arrow(user, used, dev, optional) {
                let line = text.lines().position(|line| line.starts_with(&dependency)).map_or(1, |line| line + 1);
                found.push(broken(path, line, what));
            }
        }
    }
    found
}

/// Why a dependency on the package in folder `used` is wrong. `user` is the depending library crate, or `None` for a
/// program. `dev` marks a dev-dependency, `optional` one that only a feature enables.
fn forbidden_arrow(user: Option<&str>, used: &str, dev: bool, optional: bool) -> Option<String> {
    if STD_PROGRAMS.contains(&used) || ["hypervisor", "guest"].contains(&used) {
        return Some(format!("{used} is a program; nothing imports it"));
    }
    if used == MODEL {
        return (!dev).then(|| format!("{MODEL} is for tests: a dev-dependency"));
    }
    if used == FUZZER {
        return (!dev).then(|| format!("{FUZZER} is for tests: a dev-dependency"));
    }
    if used == SIMULATION {
        return (!dev && !optional).then(|| format!("{SIMULATION} is for tests: a dev-dependency, or an optional one"));
    }
    let user = user?;
    let is_joined = JOINS.iter().any(|(join, parts)| *join == user && parts.contains(&used));
    if VOCABULARY.contains(&used) || (user, used) == MACROS || is_joined {
        return None;
    }
    let kind = if VOCABULARY.contains(&user) { "the vocabulary" } else { "an algorithm" };
    (user != MODEL).then(|| format!("{kind} ({user}) imports the algorithm {used}"))
}

/// All dependencies of a manifest, by the name of their package, and whether they are for tests only, or optional.
fn dependencies(manifest: &toml::Table) -> Vec<(String, bool, bool)> {
    let mut tables = vec![manifest];
    let targets = manifest.get("target").and_then(toml::Value::as_table);
    tables.extend(targets.iter().flat_map(|targets| targets.values()).filter_map(toml::Value::as_table));

    let mut all = Vec::new();
    for table in tables {
        for (kind, dev) in [("dependencies", false), ("build-dependencies", false), ("dev-dependencies", true)] {
            for (name, detail) in table.get(kind).and_then(toml::Value::as_table).into_iter().flatten() {
                let package = detail.get("package").and_then(toml::Value::as_str);
                let optional = detail.get("optional").and_then(toml::Value::as_bool) == Some(true);
                all.push((package.unwrap_or(name).to_owned(), dev, optional));
            }
        }
    }
    all
}

/// Does this file run with an operating system below it?
fn on_host(path: &str) -> bool {
    below(path, &STD_PROGRAMS)
        || below(path, &[FUZZER])
        || below(path, &["crates/hw_model", "crates/interleave", "hypervisor/src/arch/fake"])
        || path.split('/').any(|part| ["tests", "benches", "tests.rs", "build.rs"].contains(&part))
}

fn std_on_host_only(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.rust().filter(|(path, _)| !on_host(path)) {
        let code = blank(text);
        let tests_from = code.find("#[cfg(test)]\nmod tests {").unwrap_or(code.len());
        for (at, word) in identifiers(&code).filter(|(at, _)| *at < tests_from) {
            let before = code[..at].trim_end();
            let imported = before.ends_with("crate") || code[at + word.len()..].trim_start().starts_with("::");
            let for_tests = before.ends_with("#[cfg(test)]\nextern crate");
            if word == "std" && imported && !for_tests {
                found.push(broken(path, line_of(&code, at), "std is not there on bare metal"));
            }
        }
    }
    found
}

fn library_attributes(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        let Some(name) = path.strip_prefix("crates/").and_then(|rest| rest.strip_suffix("/src/lib.rs")) else {
            continue;
        };
        let code = blank(text);
        let wanted = [("no_std", name != MODEL && name != SIMULATION), ("forbid(unsafe_code)", true)];
        let missing = wanted.into_iter().filter(|(attribute, needed)| *needed && !code.contains(attribute));
        found.extend(missing.map(|(attribute, _)| broken(path, 1, format!("`{attribute}` is missing"))));
    }
    found
}

fn module_names(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        let stem = path.trim_end_matches(".rs");
        if let Some(part) = stem.split('/').find(|part| BAD_MODULE_NAMES.contains(part)) {
            found.push(broken(path, 1, format!("`{part}` is no name for a file or folder")));
        }
        let code = blank(text);
        let mut words = identifiers(&code).peekable();
        while let Some((_, word)) = words.next() {
            if let Some((at, name)) = words.peek()
                && word == "mod"
                && BAD_MODULE_NAMES.contains(name)
            {
                found.push(broken(path, line_of(&code, *at), format!("`{name}` is no name for a module")));
            }
        }
    }
    found
}

fn reasons(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.rust() {
        let code = blank(text);
        for (at, word) in identifiers(&code).filter(|(_, word)| ["allow", "expect"].contains(word)) {
            // An attribute, possibly within `cfg_attr`; a method has a dot or a path before its name.
            let line_start = code[..at].rfind('\n').map_or(0, |newline| newline + 1);
            let before = code[line_start..at].trim();
            let attribute = before.starts_with("#[") || before.starts_with("#![");
            if !attribute || before.contains(']') || before.ends_with(['.', ':']) {
                continue;
            }
            let arguments = parenthesised(&code[at + word.len()..]);
            if !identifiers(arguments).any(|(_, word)| word == "reason") {
                found.push(broken(path, line_of(&code, at), format!("`{word}` gives no reason")));
            }
        }
    }
    found
}

/// The text from an opening parenthesis to its partner.
fn parenthesised(code: &str) -> &str {
    let mut depth = 0_usize;
    for (at, letter) in code.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return &code[..at];
        }
    }
    code
}

fn links(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.with_extension("md") {
        let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
        let mut in_listing = false;
        for (number, line) in text.lines().enumerate() {
            if line.trim_start().starts_with("```") {
                in_listing = !in_listing;
            }
            if in_listing {
                continue;
            }
            // Splitting at backquotes leaves text outside of `code` at the even places.
            let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
            for target in prose.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
                let file = target.split(['#', ' ']).next().unwrap_or_default();
                let elsewhere = file.contains("://") || file.starts_with("mailto:");
                if !file.is_empty() && !elsewhere && !resolved(directory, file).is_some_and(|path| tree.has(&path)) {
                    found.push(broken(path, number + 1, format!("`{target}` leads nowhere")));
                }
            }
        }
    }
    found
}

/// `link` relative to `directory`, as a path from the root; `None` if it leaves the repository.
fn resolved(directory: &str, link: &str) -> Option<String> {
    let mut parts: Vec<&str> = directory.split('/').filter(|part| !part.is_empty()).collect();
    for part in link.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            name => parts.push(name),
        }
    }
    Some(parts.join("/"))
}

fn vm_comments(tree: &Tree) -> Vec<Broken> {
    let descriptions = tree.with_extension("toml").filter(|(path, _)| below(path, &["vms"]));
    let silent = descriptions.filter(|(_, text)| !text.starts_with('#'));
    silent.map(|(path, _)| broken(path, 1, "opens without a comment")).collect()
}

fn opening(tree: &Tree) -> Vec<Broken> {
    let telling = tree.rust().filter(|(path, _)| !path.ends_with("/tests.rs") && !path.contains("/src/tests/"));
    let silent = telling.filter(|(_, text)| !text.starts_with("//!"));
    silent.map(|(path, _)| broken(path, 1, "the first line is not `//!`")).collect()
}

fn crates_explained(tree: &Tree) -> Vec<Broken> {
    let Some(manifest) = tree.files.get("Cargo.toml") else { return Vec::new() };
    let Ok(parsed) = manifest.parse::<toml::Table>() else {
        return vec![broken("Cargo.toml", 1, "is not valid TOML")];
    };
    let explained = tree.files.get(CRATES_DOCUMENT).map_or("", String::as_str);
    let all = parsed.get("workspace").and_then(|workspace| workspace.get("dependencies"));

    let mut found = Vec::new();
    for (name, detail) in all.and_then(toml::Value::as_table).into_iter().flatten() {
        let ours = detail.get("path").is_some();
        if !ours && !explained.contains(&format!("`{name}`")) {
            let line =
                manifest.lines().position(|line| line.starts_with(&format!("{name} "))).map_or(1, |line| line + 1);
            found.push(broken("Cargo.toml", line, format!("`{name}` is not in {CRATES_DOCUMENT}")));
        }
    }
    found
}

const LONGEST_LINE: usize = 120;

/// Lines of prose that are too long. Tables and listings cannot be wrapped; neither can a line without a space, such as
/// one link.
fn line_length(tree: &Tree) -> Vec<Broken> {
    let mut found = Vec::new();
    for (path, text) in tree.with_extension("md").chain(tree.rust()) {
        let markdown = path.ends_with(".md");
        let mut in_listing = false;
        for (number, line) in text.lines().enumerate() {
            let comment = line.trim_start().strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!']));
            let Some(prose) = comment.or(markdown.then_some(line)).map(str::trim) else {
                in_listing = false;
                continue;
            };
            if prose.starts_with("```") {
                in_listing = !in_listing;
                continue;
            }
            let wraps = !in_listing && !prose.starts_with('|') && outside_links(prose).contains(' ');
            let length = line.chars().count();
            if wraps && length > LONGEST_LINE {
                found.push(broken(path, number + 1, format!("{length} characters")));
            }
        }
    }
    found
}

/// `prose` without the links and images that it consists of or contains: `[text](target)`, nested or not.
fn outside_links(prose: &str) -> String {
    let mut outside = String::new();
    let mut depth = 0_usize;
    for letter in prose.chars() {
        match letter {
            '[' | '(' => depth += 1,
            ']' | ')' => depth = depth.saturating_sub(1),
            _ if depth == 0 => outside.push(letter),
            _ => {}
        }
    }
    outside
}
