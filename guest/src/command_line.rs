//! The guest's command line: `key=value` words, and the nearest known word for an unknown one.

/// The options of the command line. An absent one means the experiment's own default.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings<'a> {
    /// `experiments=a,b,c`: run these in this order; `list` prints all names.
    pub experiments: Option<&'a str>,
    /// `iterations=N`: rounds of each loop.
    pub iterations: Option<u64>,
    /// `iterations=endless`: a single exit is repeated for `seconds=`, as fast as it goes.
    pub endless: bool,
    /// `cpus=N`: use at most this many CPUs.
    pub cpus: Option<usize>,
    /// `seconds=N`: how long an experiment that is measured in time runs.
    pub seconds: Option<u64>,
    /// `seed=N`: start of the random numbers.
    pub seed: Option<u64>,
    /// `apic=xapic`: use the memory-mapped local APIC even if x2APIC is offered.
    pub force_xapic: bool,
    /// `tsc_khz=N`: the TSC's frequency, if it is better known outside.
    pub tsc_khz: Option<u64>,
    /// `stall=N`: seconds without progress after which a CPU counts as stuck.
    pub stall: Option<u64>,
    /// `approach=ipi,hypercall,broadcast`: the ways to flush remotely that are used.
    pub approach: Option<Choice<Approach>>,
    /// `pages=1,8,33,whole`: what one flush covers.
    pub pages: Option<Choice<Extent>>,
    /// `targets=idle`: the CPUs that are flushed are halted, not busy.
    pub idle_targets: bool,
    /// `form=mask`: name the CPUs one by one even when all are meant, in hypercalls and in interrupt commands.
    pub by_mask: bool,
    /// `rips=N`: different addresses from which a device is accessed.
    pub rips: Option<usize>,
    /// `forms=many`: the accesses differ in encoding and registers.
    pub many_forms: bool,
    /// `device=id|version|tpr|eoi|ioapic`: the register that is accessed.
    pub device: Option<Register>,
    /// `vcpus=all`: all CPUs at once.
    pub all_cpus: bool,
    /// `write=beside`: write data on the code's page, not the instruction itself.
    pub write_beside: bool,
    /// `every=N`: accesses between two writes.
    pub every: Option<u64>,
    /// `burst=N`: exits in a row, where `mixed` makes some (1).
    pub burst: Option<u64>,
    /// `variant=b`: the second of two meanings of the instruction at one address.
    pub second_variant: bool,
    /// `memory=N`: MiB of memory to use; without it, all.
    pub memory: Option<u64>,
    /// `writes=N`: of 100 accesses, this many write.
    pub writes: Option<u64>,
    /// `regions=N`: of 100 large pages, this many are used.
    pub regions: Option<u64>,
}

/// Up to four words of a list, in their written order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice<T>([Option<T>; 4]);

impl<T: Copy> Choice<T> {
    /// The chosen ones.
    pub fn iter(&self) -> impl Iterator<Item = T> + '_ {
        self.0.iter().filter_map(|word| *word)
    }

    /// `text` split at commas; `None` if it is empty, too long, or contains an invalid word.
    fn parse(text: &str, word: impl Fn(&str) -> Option<T>) -> Option<Self> {
        let mut chosen = [None; 4];
        for (at, name) in text.split(',').enumerate() {
            *chosen.get_mut(at)? = Some(word(name)?);
        }
        Some(Self(chosen))
    }
}

/// A way to flush the TLBs of other CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Approach {
    /// An interrupt to each, which answers.
    Ipi,
    /// A Hyper-V hypercall.
    Hypercall,
    /// An instruction that all CPUs hear.
    Broadcast,
}

impl Approach {
    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ipi => "ipi",
            Self::Hypercall => "hypercall",
            Self::Broadcast => "broadcast",
        }
    }
}

/// What one flush covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// So many pages.
    Pages(u64),
    /// The whole address space.
    Whole,
}

/// A device register in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// The local APIC's id, read.
    Id,
    /// The local APIC's version, read.
    Version,
    /// The local APIC's task priority, read.
    TaskPriority,
    /// The local APIC's end of interrupt, written.
    EndOfInterrupt,
    /// The I/O APIC's data window, read.
    IoApic,
}

impl Register {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Id, Self::Version, Self::TaskPriority, Self::EndOfInterrupt, Self::IoApic];

    /// As it is written.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Id => "id",
            Self::Version => "version",
            Self::TaskPriority => "tpr",
            Self::EndOfInterrupt => "eoi",
            Self::IoApic => "ioapic",
        }
    }
}

/// Maximum number of addresses that `rips` takes: as many instructions as fit into the code pages.
pub const MOST_RIPS: usize = 1024;

/// Maximum number of pages in [`Extent::Pages`]: as many as are mapped for flushes.
pub const MOST_PAGES: u64 = 64;

/// The keys that [`Settings::parse`] understands.
pub const KEYS: [&str; 23] = [
    "experiments",
    "iterations",
    "cpus",
    "seconds",
    "seed",
    "apic",
    "tsc_khz",
    "stall",
    "approach",
    "pages",
    "targets",
    "form",
    "rips",
    "forms",
    "device",
    "vcpus",
    "write",
    "every",
    "variant",
    "burst",
    "memory",
    "writes",
    "regions",
];

/// A word of the command line that was not understood. The rest is used nevertheless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mistake<'a> {
    /// No such key; `nearest` is one that exists.
    UnknownKey {
        /// The key as it was written.
        key: &'a str,
        /// The most similar known key.
        nearest: &'static str,
    },
    /// The key exists, but does not take this value.
    BadValue {
        /// The key.
        key: &'a str,
        /// The value as it was written.
        value: &'a str,
    },
}

impl<'a> Settings<'a> {
    /// Reads `text`. Each word that is not understood is handed to `mistake`.
    pub fn parse(text: &'a str, mut mistake: impl FnMut(Mistake<'a>)) -> Self {
        let mut settings = Self::default();

        for word in text.split_ascii_whitespace() {
            let (key, value) = word.split_once('=').unwrap_or((word, ""));
            let understood = match key {
                "experiments" => set(&mut settings.experiments, Some(value).filter(|list| !list.is_empty())),
                "iterations" => {
                    settings.endless = value == "endless";
                    settings.endless || set(&mut settings.iterations, number(value).filter(|n| *n > 0))
                }
                "cpus" => {
                    set(&mut settings.cpus, number(value).filter(|n| *n > 0).and_then(|n| usize::try_from(n).ok()))
                }
                "seconds" => set(&mut settings.seconds, number(value)),
                "seed" => set(&mut settings.seed, number(value)),
                "tsc_khz" => set(&mut settings.tsc_khz, number(value).filter(|n| *n > 0)),
                "stall" => set(&mut settings.stall, number(value).filter(|n| *n > 0)),
                "apic" => {
                    settings.force_xapic = value == "xapic";
                    matches!(value, "xapic" | "x2apic")
                }
                "approach" => set(&mut settings.approach, Choice::parse(value, approach)),
                "pages" => set(&mut settings.pages, Choice::parse(value, extent)),
                "targets" => {
                    settings.idle_targets = value == "idle";
                    matches!(value, "idle" | "busy")
                }
                "form" => {
                    settings.by_mask = value == "mask";
                    matches!(value, "mask" | "all")
                }
                "rips" => {
                    let rips = number(value).and_then(|n| usize::try_from(n).ok());
                    set(&mut settings.rips, rips.filter(|n| (1..=MOST_RIPS).contains(n)))
                }
                "forms" => either(&mut settings.many_forms, value, "many", "one"),
                "device" => {
                    set(&mut settings.device, Register::ALL.into_iter().find(|register| register.name() == value))
                }
                "vcpus" => either(&mut settings.all_cpus, value, "all", "one"),
                "write" => either(&mut settings.write_beside, value, "beside", "instruction"),
                "every" => set(&mut settings.every, number(value).filter(|n| (1..=1_000_000).contains(n))),
                "burst" => set(&mut settings.burst, number(value).filter(|n| (1..=1_000_000).contains(n))),
                "variant" => either(&mut settings.second_variant, value, "b", "a"),
                "memory" => set(&mut settings.memory, number(value).filter(|n| *n > 0)),
                "writes" => set(&mut settings.writes, number(value).filter(|n| *n <= 100)),
                "regions" => set(&mut settings.regions, number(value).filter(|n| (1..=100).contains(n))),
                _ => {
                    mistake(Mistake::UnknownKey { key, nearest: nearest(key, KEYS).unwrap_or(KEYS[0]) });
                    true
                }
            };
            if !understood {
                mistake(Mistake::BadValue { key, value });
            }
        }

        settings
    }
}

fn set<T>(field: &mut Option<T>, value: Option<T>) -> bool {
    let understood = value.is_some();
    *field = value.or(field.take());
    understood
}

/// Sets `field` by one of two words.
fn either(field: &mut bool, value: &str, on: &str, off: &str) -> bool {
    let understood = value == on || value == off;
    if understood {
        *field = value == on;
    }
    understood
}

fn approach(word: &str) -> Option<Approach> {
    [Approach::Ipi, Approach::Hypercall, Approach::Broadcast].into_iter().find(|approach| approach.name() == word)
}

fn extent(word: &str) -> Option<Extent> {
    match word {
        "whole" => Some(Extent::Whole),
        _ => number(word).filter(|pages| (1..=MOST_PAGES).contains(pages)).map(Extent::Pages),
    }
}

/// A decimal number, or a hexadecimal one after `0x`.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// The candidate with the smallest edit distance to `word`.
pub fn nearest<'c>(word: &str, candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    candidates.into_iter().min_by_key(|candidate| distance(word.as_bytes(), candidate.as_bytes()))
}

/// Edit distance (insert, delete, replace) of the first bytes of two words.
fn distance(a: &[u8], b: &[u8]) -> usize {
    const LONGEST: usize = 40;
    let a = &a[..a.len().min(LONGEST)];
    let b = &b[..b.len().min(LONGEST)];

    // One row of the classic table: row[j] is the distance of the part of `a` read so far to the first j bytes of `b`.
    let mut row: [usize; LONGEST + 1] = core::array::from_fn(|j| j);
    for (i, &left) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &right) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(left != right);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
