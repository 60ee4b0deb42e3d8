//! `cargo xtask fuzz-calls` and `fuzz-invalidations`: what a parent VM can do to its children, ten million times.
//!
//! Both run tests of the hypervisor on the fake machine. `make test` runs them with small numbers.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::artifacts::{Places, run};

/// A command.
pub(crate) struct Fuzz {
    help: &'static str,
    test: &'static str,
}

/// Any calls of a parent.
pub(crate) const CALLS: Fuzz = Fuzz {
    help: "\
cargo xtask fuzz-calls [--calls N] [--seed S] [--help]

Makes all calls that a parent VM has, in any order, with right, strange and random arguments, while its children run on
the fake machine. The host must answer each call. In the end all children are ended, and each page must be the parent's
own again.

  --calls N   how many (10000000)
  --seed S    another sequence of calls (1592590341)

Shows progress every two seconds, and ends with one line of figures. 10000000 calls take some minutes.
",
    test: "tests::lent::calls::ten_million_calls_of_a_parent_are_answered_and_all_pages_come_back",
};

/// Pages that are taken away.
pub(crate) const INVALIDATIONS: Fuzz = Fuzz {
    help: "\
cargo xtask fuzz-invalidations [--calls N] [--seed S] [--help]

Lets a parent VM take pages away from a child, by calls that forbid all access, forbid writes, unmap, or map other pages
in their place, while the child's 4 vCPUs and the hypervisor use the pages on 2 pCPUs of the fake machine. The parent
copies each page and uses it for something else. No page may be written to after it was taken, and the child must find
what it has written last. A seed decides which pCPU goes on at each step. First, four planted mistakes must be found.

  --calls N   calls that take something away, not interleavings (10000000)
  --seed S    other interleavings (1592590337)

Shows progress every two seconds, and ends with one line of figures. 10000000 calls take about 20 minutes of one core.
",
    test: "tests::lent::taken::ten_million_times_pages_are_taken_from_a_child_and_none_is_written_to",
};

/// Runs a command.
pub(crate) fn command(places: &Places, fuzz: &Fuzz, arguments: &[String]) -> Result<ExitCode> {
    let mut chosen = Vec::new();
    let mut words = arguments.iter().map(String::as_str);
    while let Some(word) = words.next() {
        let (name, joined) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
        let variable = match name {
            "--help" | "-h" => {
                print!("{}", fuzz.help);
                return Ok(ExitCode::SUCCESS);
            }
            "--calls" => "FUZZ_CALLS",
            "--seed" => "FUZZ_SEED",
            _ => bail!("no argument `{word}`\n\n{}", fuzz.help),
        };
        let value = joined.or_else(|| words.next()).with_context(|| format!("{name} wants a value"))?;
        chosen.push((variable, value.parse::<u64>().with_context(|| format!("{name} wants a number"))?.to_string()));
    }
    let mut test = places.cargo(&["test", "--release", "--quiet", "--package", "dunlin-hypervisor", "--lib", "--"]);
    test.args(["--ignored", "--exact", "--nocapture", fuzz.test]).envs(chosen);
    run(&mut test)?;
    Ok(ExitCode::SUCCESS)
}
