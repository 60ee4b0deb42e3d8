//! Converts between events and lines.

use std::fmt;
use std::str::FromStr;

use super::{Event, Mistake, Step, Trace};
use crate::walks::{Barrier, Invalidate, Rules};

/// The mark before an event in the hypervisor's log.
const MARK: &str = "stage2: ";
const PAGE_BYTES: u64 = 4096;

const BARRIERS: [(&str, Barrier); 4] =
    [("nshst", Barrier::LocalStores), ("ishst", Barrier::Stores), ("nsh", Barrier::Local), ("ish", Barrier::Full)];

/// TLBIs without an address. The suffix `is` means all pCPUs.
const WHOLE: [(&str, Invalidate); 3] =
    [("vmalle1", Invalidate::Combined), ("vmalls12e1", Invalidate::All), ("alle1", Invalidate::Everything)];

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exchange { table, index, old, new } => {
                write!(f, "exchange table={table:#x} index={index} old={old:#x} new={new:#x}")
            }
            Self::Store { table, index, bits } => write!(f, "store table={table:#x} index={index} bits={bits:#x}"),
            Self::Allocate { table, count } => write!(f, "allocate table={table:#x} count={count}"),
            Self::Free { table } => write!(f, "free table={table:#x}"),
            Self::Barrier(barrier) => {
                let name = BARRIERS.iter().find(|(_, other)| *other == barrier).map_or("", |(name, _)| name);
                write!(f, "barrier {name}")
            }
            Self::Tlbi { invalidate: Invalidate::Guest { start, end, level, leaves }, everywhere } => {
                let bytes = end - start;
                let range = if bytes == PAGE_BYTES { "" } else { "r" };
                let leaves = if leaves { "l" } else { "" };
                write!(f, "tlbi {range}ipas2{leaves}e1{} start={start:#x} bytes={bytes:#x}", suffix(everywhere))?;
                level.map_or(Ok(()), |level| write!(f, " level={level}"))
            }
            Self::Tlbi { invalidate, everywhere } => {
                let name = WHOLE.iter().find(|(_, other)| *other == invalidate).map_or("", |(name, _)| name);
                write!(f, "tlbi {name}{}", suffix(everywhere))
            }
            Self::EntryFlushes { all } => write!(f, "entry-flushes {}", if all { "all" } else { "tag" }),
            Self::Load { vmid, root } => write!(f, "load vmid={vmid} root={root:#x}"),
            Self::Enter { vmid, root } => write!(f, "enter vmid={vmid} root={root:#x}"),
            Self::Leave => f.write_str("leave"),
            Self::Flush { root } => write!(f, "flush root={root:#x}"),
            Self::Flushed { root, start, end } => write!(f, "flushed root={root:#x} start={start:#x} end={end:#x}"),
        }
    }
}

fn suffix(everywhere: bool) -> &'static str {
    if everywhere { "is" } else { "" }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "machine cpus={} ", self.cpus)?;
        match self.rules {
            Rules::Nested => write!(f, "rules=nested")?,
            Rules::Extended => write!(f, "rules=extended")?,
            Rules::Arm { bbm, hafdbs } => write!(f, "rules=arm bbm={bbm} hafdbs={}", u32::from(hafdbs))?,
        }
        writeln!(f, " levels={}", self.levels)?;
        self.steps.iter().try_for_each(|step| writeln!(f, "cpu={} {}", step.cpu, step.event))
    }
}

impl FromStr for Event {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let mut words = Words(line.split_whitespace());
        let event = match words.word()? {
            "exchange" => Self::Exchange {
                table: words.number("table")?,
                index: words.index()?,
                old: words.number("old")?,
                new: words.number("new")?,
            },
            "store" => {
                Self::Store { table: words.number("table")?, index: words.index()?, bits: words.number("bits")? }
            }
            "allocate" => Self::Allocate { table: words.number("table")?, count: words.number("count")? },
            "free" => Self::Free { table: words.number("table")? },
            "barrier" => {
                let name = words.word()?;
                let barrier = BARRIERS.iter().find(|(known, _)| *known == name);
                Self::Barrier(barrier.ok_or_else(|| format!("no barrier is called `{name}`"))?.1)
            }
            "tlbi" => words.tlbi()?,
            "entry-flushes" => match words.word()? {
                "all" => Self::EntryFlushes { all: true },
                "tag" => Self::EntryFlushes { all: false },
                other => return Err(format!("an entry flushes `all` or `tag`, not `{other}`")),
            },
            "load" => Self::Load { vmid: words.small("vmid")?, root: words.number("root")? },
            "enter" => Self::Enter { vmid: words.small("vmid")?, root: words.number("root")? },
            "leave" => Self::Leave,
            "flush" => Self::Flush { root: words.number("root")? },
            "flushed" => {
                Self::Flushed { root: words.number("root")?, start: words.number("start")?, end: words.number("end")? }
            }
            other => return Err(format!("`{other}` is no event")),
        };
        words.end()?;
        Ok(event)
    }
}

impl FromStr for Trace {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        let mut machine: Option<Self> = None;
        let is_log = text.contains(MARK);
        for (number, line) in (1..).zip(text.lines()) {
            let line = match line.split_once(MARK) {
                Some((_, event)) => event.trim(),
                None if is_log || line.starts_with('#') => continue,
                None => line.trim(),
            };
            let mistake = |why| Mistake { line: number, why };
            match &mut machine {
                _ if line.is_empty() => {}
                Some(_) if line == "full" => break,
                // Each VM that ends prints it again.
                Some(_) if line.starts_with("machine ") => {}
                Some(trace) => trace.steps.push(step(line, number, trace.cpus).map_err(mistake)?),
                None => machine = Some(first_line(line).map_err(mistake)?),
            }
        }
        machine.ok_or(Mistake { line: 1, why: "there is no trace".into() })
    }
}

/// `machine cpus=2 rules=arm bbm=2 hafdbs=1 levels=3`, or `rules=nested` without the Arm fields.
fn first_line(line: &str) -> Result<Trace, String> {
    let mut words = Words(line.split_whitespace());
    if words.word()? != "machine" {
        return Err("a trace begins with `machine`".into());
    }
    let cpus = words.index_of("cpus", 1..=256)?;
    let rules = match words.value("rules")? {
        "nested" => Rules::Nested,
        "arm" => Rules::Arm { bbm: words.small("bbm")?, hafdbs: words.number("hafdbs")? != 0 },
        other => return Err(format!("no rules are called `{other}`")),
    };
    let levels = words.small("levels")?;
    if !(2..=4).contains(&levels) {
        return Err(format!("tables have 2 to 4 levels, not {levels}"));
    }
    words.end()?;
    Ok(Trace { cpus, rules, levels, steps: Vec::new() })
}

fn step(line: &str, number: usize, cpus: usize) -> Result<Step, String> {
    let (cpu, event) = line.split_once(' ').ok_or("an event is `cpu=` and what it does")?;
    let cpu = Words(cpu.split_whitespace()).index_of("cpu", 0..=cpus - 1)?;
    Ok(Step { line: number, cpu, event: event.parse()? })
}

/// The rest of a line's words.
struct Words<'a, I: Iterator<Item = &'a str>>(I);

impl<'a, I: Iterator<Item = &'a str>> Words<'a, I> {
    fn word(&mut self) -> Result<&'a str, String> {
        self.0.next().ok_or_else(|| "the line is too short".into())
    }

    fn end(mut self) -> Result<(), String> {
        self.0.next().map_or(Ok(()), |word| Err(format!("`{word}` is too much")))
    }

    fn value(&mut self, name: &str) -> Result<&'a str, String> {
        let word = self.word()?;
        let value = word.strip_prefix(name).and_then(|rest| rest.strip_prefix('='));
        value.ok_or_else(|| format!("`{name}=` is wanted, not `{word}`"))
    }

    fn number(&mut self, name: &str) -> Result<u64, String> {
        let value = self.value(name)?;
        let number = match value.strip_prefix("0x") {
            Some(digits) => u64::from_str_radix(digits, 16),
            None => value.parse(),
        };
        number.map_err(|_| format!("`{name}` is a number, not `{value}`"))
    }

    fn small(&mut self, name: &str) -> Result<u32, String> {
        let number = self.number(name)?;
        number.try_into().map_err(|_| format!("`{name}` is not as large as {number}"))
    }

    fn index(&mut self) -> Result<usize, String> {
        self.index_of("index", 0..=511)
    }

    fn index_of(&mut self, name: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize, String> {
        let number = self.number(name)?;
        let index = usize::try_from(number).ok().filter(|index| range.contains(index));
        index.ok_or_else(|| format!("`{name}` is one of {} to {}, not {number}", range.start(), range.end()))
    }

    fn tlbi(&mut self) -> Result<Event, String> {
        let name = self.word()?;
        let (kind, everywhere) = name.strip_suffix("is").map_or((name, false), |kind| (kind, true));
        if let Some(&(_, invalidate)) = WHOLE.iter().find(|(known, _)| *known == kind) {
            return Ok(Event::Tlbi { invalidate, everywhere });
        }
        let leaves = match kind {
            "ipas2e1" | "ripas2e1" => false,
            "ipas2le1" | "ripas2le1" => true,
            _ => return Err(format!("no TLBI is called `{name}`")),
        };
        let start = self.number("start")?;
        let bytes = self.number("bytes")?;
        let end = start.checked_add(bytes).ok_or("the range is too long")?;
        let level = match self.0.next() {
            Some(word) => Some(Words([word].into_iter()).small("level")?),
            None => None,
        };
        Ok(Event::Tlbi { invalidate: Invalidate::Guest { start, end, level, leaves }, everywhere })
    }
}
