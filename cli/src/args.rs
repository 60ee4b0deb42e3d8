//! The command line and its help texts.

mod all;
mod bench_dirty;
mod bounds;
mod check;
mod decode;
mod dirty;
mod layout;
mod machine;
mod moves;
mod parent;
mod payload;
mod saved;
mod setting;
mod storms;
mod tlb;

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use crate::config::{Accel, Arch};

pub(crate) use all::{AllArgs, CompareArgs};
pub(crate) use bench_dirty::{DirtyBenchArgs, DirtyPart};
pub(crate) use bounds::BoundsArgs;
pub(crate) use check::CheckArgs;
pub(crate) use decode::{DecodeArgs, SETTINGS};
pub(crate) use dirty::{DirtyArgs, DirtyVerb, HowArgs, RateArgs, RoundArgs, StartArgs, WhichArgs};
pub(crate) use layout::{LayoutArgs, LayoutBenchArgs};
pub(crate) use machine::{MachineBenchArgs, MachineClock, MachinePart};
pub(crate) use moves::MoveBenchArgs;
pub(crate) use parent::{ParentBenchArgs, ParentPart};
pub(crate) use payload::PayloadArgs;
pub(crate) use saved::{RestoreArgs, SaveArgs};
use setting::setting;
pub(crate) use storms::StormsArgs;
pub(crate) use tlb::{Part, Targets, TlbArgs};

const ABOUT: &str = "Runs virtual machines on the Dunlin hypervisor";

const LONG_ABOUT: &str = "\
Runs virtual machines on the Dunlin hypervisor and shows what they cost.

Dunlin is a type-1 hypervisor. `dunlin run` starts it in QEMU with the VMs of a TOML file, and waits
until they have ended. These commands control a running host from another terminal: `list`, `host`,
`stats`, `top`, `metrics`, `trace`, `create`, `start`, `stop`, `destroy`, `save`, `restore`, `pause`,
`resume`, `dirty`.
They also work inside of a parent VM, and control the host that it runs on.
Without a command, `dunlin` means `dunlin run`.";

const STATUSES: &str = "\
Exit statuses:
  0    all VMs ended normally (with --exec: the exit status of the command)
  1    the run failed: a VM crashed, the hypervisor stopped, the command never finished
  2    invalid input: nothing was started
  124  the time limit ended the run
  130  Ctrl-C; 143 for SIGTERM";

const EXAMPLES: &str = "\
Examples:
  dunlin run                              Debian's cloud kernel, 4 vCPUs on 2 pCPUs
  dunlin run vms/two.toml                 two VMs side by side
  dunlin run --vcpus 16 --exec 'nproc'    one command in a guest; its output, its status
  dunlin run --kernel bzImage --append 'debug' --exec 'dmesg | tail'
  dunlin run --json > run.json            a fixed script; all measurements as one JSON object
  dunlin stats --vm default               exits by reason, in the columns of perf kvm stat
  dunlin layout                           the hypervisor's data, by writer and cache line
  dunlin top                              exits and times of the VMs, live
  dunlin create vms/guest.toml --start    one more VM on a running host
  dunlin save guest guest.vm              a VM into a file; `dunlin restore guest.vm` brings it back
  dunlin check                            whether this machine can run Dunlin itself
  dunlin image -o dunlin.iso              a bootable USB stick: a host with its VMs for any PC
  dunlin dirty rate                       pages that the VM writes per second";

const BENCH_EXAMPLES: &str = "\
Examples:
  dunlin bench all                                    everything, about 15 minutes
  dunlin bench exits --check docs/exits.toml          fails if an exit needs more instructions
  dunlin bench boot --pairs 3
  dunlin bench boot --vcpus 48 --memory 1G --pairs 1 --only dunlin
  dunlin bench soak --seconds 3600
  dunlin bench tags --native
  dunlin bench tlb --vcpus 8 --overcommit 4
  dunlin bench decode --quick
  dunlin bench layout --native
  dunlin bench dirty --picture dirty.svg";

const METRICS_HELP: &str = "\
Examples:
  dunlin metrics                                 then http://127.0.0.1:9742/metrics
  dunlin metrics --once | promtool check metrics
  sum by (vm, reason) (rate(dunlin_vcpu_exits_total[1m]))
  sum by (vm) (rate(dunlin_vcpu_guest_seconds_total[1m]))

There is no password: listen only on addresses that are reachable for trusted users alone.";

const REPORT_HELP: &str = "\
Examples:
  dunlin report results.jsonl -o report.html
  dunlin report monday.jsonl tuesday.jsonl     both in one page, which names their commits

'dunlin bench all' writes results, and so does each 'dunlin bench' with '--record FILE'. The page is one
file and needs no network. It lists unreadable lines and missing experiments.";

const TAGS_HELP: &str = "\
A tag (ASID) distinguishes the TLB entries of one vCPU from those of others. There are three schemes of
tags (keys `tags` and `tag_limit`, see vms/default.toml). Each runs with 63 tags down to one, with
8 vCPUs on 2 pCPUs.

Columns:
  checks       entries into the guest; each entry checks the vCPU's tag
  assigned     entries that assigned another tag to the vCPU
  new gen.     entries that found no free tag, and started a new generation on their pCPU
  own tag      entries that flushed the vCPU's own TLB entries
  all tags     entries that flushed the TLB entries of all vCPUs
Then it prints the instructions of one exit under each scheme, and the cycles of the same code on this
computer, next to published figures of Xen. It takes some minutes; `--native` takes a second.

Examples:
  dunlin bench tags
  dunlin bench tags --native
  dunlin bench tags --json > tags.jsonl     \"emulated\" marks counts of an emulator";

const IMAGE_HELP: &str = "\
The image boots from BIOS and from UEFI (with Secure Boot off), from a CD or a USB stick:
  dd if=dunlin.iso of=/dev/sdX bs=4M conv=fsync
It does not write to the computer's disks. Messages are on the screen and on the first serial port, at
115200 baud. The machine powers off when the last VM has ended. If the hypervisor cannot start, it
prints the reason and stops.
With `--arch aarch64` the image boots from UEFI on machines with a device tree, and messages are only
on a PL011.

Examples:
  dunlin image
  dunlin image vms/two.toml -o two.iso
  dunlin image --also vms/parent.toml           a second entry, with a parent VM (after `make parent`)
  qemu-system-x86_64 -machine q35 -cpu max -smp 2 -m 1G -cdrom dunlin.iso -nographic
  dunlin image --arch aarch64 -o dunlin-aarch64.iso

The tool needs GRUB's grub-mkrescue (Debian: grub-common, xorriso, mtools; grub-pc-bin and grub-efi-amd64-bin, or
grub-efi-arm64-bin).";

const RUN_HELP: &str = "\
What it does:
  On a terminal, with one VM and without --exec: shows the guest's console. Ctrl-] ends the VM.
  With --exec 'CMD': runs CMD in the guest with `sh`, prints its output, and exits with its status.
  Otherwise: runs a fixed script (kernel, CPUs, interrupts, errors, a small parallel job) and prints a
  summary. If a VM has your own initrd, its console is copied to standard output instead.

Options for VMs apply to every VM of the file.

Examples:
  dunlin run vms/large.toml --vcpus 64 --pcpus 2
  dunlin run --kernel /boot/vmlinuz-6.1.0 --initrd none --append 'panic=-1' --time-limit 30s
  dunlin run --exec 'cat /proc/interrupts' --json
  dunlin run --arch aarch64
  dunlin run --qemu-arg=-icount --qemu-arg=shift=0,sleep=off

Keys of the file (vms/default.toml explains each):
  [host]   arch, pcpus, memory, accel, time_limit, qemu
  [[vm]]   name, vcpus, memory, kernel, initrd, cmdline, role, devices, apic, hyperv, flush, tags, tag_limit,
           decode_cache, populate, split, split_rate, dirty_source, weight, cap, pcpus

Environment:
  DUNLIN_ASSETS    directory of the hypervisor, the initrd and the kernels
                   [default: `../dunlin`, relative to this program]
  XDG_RUNTIME_DIR  directory of the sockets of running hosts [default: a directory in /tmp]

";

/// `dunlin`.
#[derive(Debug, Parser)]
#[command(name = "dunlin", version, max_term_width = 110, about = ABOUT, long_about = LONG_ABOUT, after_help = EXAMPLES,
    after_long_help = format!("{EXAMPLES}\n\n{STATUSES}"))]
pub(crate) struct Args {
    /// The command; without one, `run`.
    #[command(subcommand)]
    pub(crate) verb: Option<Verb>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Start a host with its VMs, and wait until they end
    #[command(after_long_help = format!("{RUN_HELP}{STATUSES}"))]
    Run(Box<RunArgs>),
    /// Write an image (USB stick, CD) that starts a host with its VMs on any PC, or on Arm machines with UEFI
    #[command(after_help = IMAGE_HELP)]
    Image(ImageArgs),
    /// Write the VMs of a host to a file, for a machine whose own GRUB starts the hypervisor
    #[command(after_help = payload::HELP)]
    Payload(PayloadArgs),
    /// Check whether this machine has what is needed to start Dunlin on it, and tell what to do if not
    #[command(after_long_help = check::HELP)]
    Check(CheckArgs),
    /// List the VMs of a running host
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show exits by reason, and the time spent in them
    Stats(StatsArgs),
    /// Watch a running host (q quits)
    #[command(
        after_help = "Keys: q quits; up/down choose a VM; v or 1 shows its vCPUs; P, E, M, N sort by time, exits, memory, number, R reverses; +/- change the delay."
    )]
    Top(TopArgs),
    /// Serve a running host's counters to Prometheus (OpenMetrics text over HTTP)
    #[command(after_help = METRICS_HELP)]
    Metrics(MetricsArgs),
    /// Create a VM on a running host
    #[command(after_help = CREATE_HELP)]
    Create(CreateArgs),
    /// Start a created VM
    Start(VmArgs),
    /// End a VM at once, like pulling its plug
    Stop(VmArgs),
    /// End a VM, free its resources and remove it from the list
    Destroy(VmArgs),
    /// Show the free resources of a running host: memory, heap, tables, TLB tags
    Host(ListArgs),
    /// Save a VM to a file, with its memory, and end it (or let it go on)
    #[command(after_help = saved::SAVE_HELP)]
    Save(SaveArgs),
    /// Bring a saved VM back: it goes on where it was
    #[command(after_help = saved::RESTORE_HELP)]
    Restore(RestoreArgs),
    /// Stop a VM's vCPUs until `dunlin resume`
    Pause(WhichArgs),
    /// Continue a paused VM
    Resume(WhichArgs),
    /// Record which pages a VM writes, and the cost of recording
    #[command(after_long_help = dirty::HELP)]
    Dirty(DirtyArgs),
    /// Record each exit, kick and flush of a running host for some time, to a file for Perfetto
    #[command(after_help = TRACE_HELP)]
    Trace(TraceArgs),
    /// Show the layout of the hypervisor's data, by writer and cache line
    #[command(after_long_help = layout::HELP)]
    Layout(LayoutArgs),
    /// Run benchmarks (docs/measuring.md) [default: exits, budget and boot]
    Bench(BenchArgs),
    /// Write a page with results, next to published results of other systems
    #[command(after_help = REPORT_HELP)]
    Report(ReportArgs),
    /// Write manual pages, and completions for shells, for a package
    #[command(hide = true)]
    Pages(PagesArgs),
}

/// `dunlin bench`.
#[derive(Debug, ClapArgs)]
#[command(after_help = BENCH_EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Append a record of each result to this file, one line of JSON each (docs/measuring.md)
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) record: Option<PathBuf>,
    /// The benchmark
    #[command(subcommand)]
    pub(crate) what: Option<Measurement>,
}

/// The benchmarks.
#[derive(Debug, Subcommand)]
pub(crate) enum Measurement {
    /// Count the exact number of instructions of each kind of exit
    Exits(ExitsArgs),
    /// Time a boot to user space, alternating with the same kernel on QEMU alone
    Boot(BootArgs),
    /// Count the exits of a boot to user space with 2 vCPUs
    Budget(BudgetArgs),
    /// Run a mixed load for a long time; the guest checks its results
    Soak(SoakArgs),
    /// Measure the cost of TLB tags, by scheme and number of tags
    #[command(after_help = TAGS_HELP)]
    Tags(TagsArgs),
    /// Compare TLB shootdowns by IPI and by hypercall: time, exits and instructions
    #[command(after_long_help = tlb::HELP)]
    Tlb(Box<TlbArgs>),
    /// Measure the cost of emulated accesses, by the kind of instruction cache
    #[command(after_long_help = decode::HELP)]
    Decode(DecodeArgs),
    /// Run all benchmarks in a short form, and write a page with the results
    #[command(after_long_help = all::ALL_HELP)]
    All(AllArgs),
    /// Compare two files of results, and judge which differences are significant
    #[command(after_long_help = all::COMPARE_HELP)]
    Compare(CompareArgs),
    /// Compare data of two vCPUs that is packed in an array with data that is laid out by writer
    #[command(after_long_help = layout::BENCH_HELP)]
    Layout(LayoutBenchArgs),
    /// Measure the cost of a dirty log for the guest: speed over time, instructions, tables
    #[command(after_long_help = bench_dirty::HELP)]
    Dirty(Box<DirtyBenchArgs>),
    /// Count what a VM that keeps the hypervisor busy costs its neighbour
    #[command(after_long_help = storms::HELP)]
    Storms(StormsArgs),
    /// Count how long the hypervisor works before it takes an interrupt
    #[command(after_long_help = bounds::HELP)]
    Bounds(BoundsArgs),
    /// Compare guests of a parent VM with guests of KVM: the same QEMU, the same emulated machine
    #[command(after_long_help = parent::HELP)]
    Parent(ParentBenchArgs),
    /// Compare a VM that has the machine's devices with the same Linux without Dunlin, on the same emulated machine
    #[command(after_long_help = machine::HELP)]
    Machine(MachineBenchArgs),
    /// Move a guest of a parent VM to another host while it writes, and compare with KVM
    #[command(after_long_help = moves::HELP)]
    Move(MoveBenchArgs),
}

/// `dunlin pages`.
#[derive(Debug, ClapArgs)]
pub(crate) struct PagesArgs {
    /// Directory for the files
    #[arg(value_name = "DIR")]
    pub(crate) folder: PathBuf,
}

/// `dunlin report`.
#[derive(Debug, ClapArgs)]
pub(crate) struct ReportArgs {
    /// Files of results
    #[arg(value_name = "RESULTS", required = true)]
    pub(crate) results: Vec<PathBuf>,
    /// File for the page
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: PathBuf,
}

/// `dunlin bench exits`.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct ExitsArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Fail if a figure is more than 2 % above its value in this file, or above its target
    #[arg(long, value_name = "FILE")]
    pub(crate) check: Option<PathBuf>,
    /// Write the figures to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) write: Option<PathBuf>,
}

/// `dunlin bench boot`.
#[derive(Debug, ClapArgs)]
pub(crate) struct BootArgs {
    /// vCPUs of the guest, and CPUs of QEMU alone
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) vcpus: u32,
    /// pCPUs of the host
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) pcpus: u32,
    /// Memory of the guest
    #[arg(long, value_name = "SIZE", default_value = "512M")]
    pub(crate) memory: String,
    /// Number of boots of each, alternating
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) pairs: u32,
    /// Measure only one of the two
    #[arg(long, value_name = "WHICH")]
    pub(crate) only: Option<Contender>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// The system that boots the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Contender {
    /// Dunlin, in QEMU
    Dunlin,
    /// QEMU alone
    Qemu,
}

impl Default for BootArgs {
    fn default() -> Self {
        Self { vcpus: 4, pcpus: 2, memory: "512M".to_string(), pairs: 5, only: None, json: false }
    }
}

/// `dunlin bench budget`.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct BudgetArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `dunlin bench soak`.
#[derive(Debug, ClapArgs)]
pub(crate) struct SoakArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// Duration, by the guest's clock
    #[arg(long, value_name = "N", conflicts_with = "exits")]
    pub(crate) seconds: Option<u32>,
    /// Run until the host has counted this number of exits [default: 10000000]
    #[arg(long, value_name = "N")]
    pub(crate) exits: Option<u64>,
    /// vCPUs of the guest
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub(crate) vcpus: u32,
    /// pCPUs of the host
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub(crate) pcpus: u32,
}

/// `dunlin bench tags`.
#[derive(Debug, ClapArgs)]
pub(crate) struct TagsArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value_t, value_parser = setting::<Arch>())]
    pub(crate) arch: Arch,
    /// Print JSON, one record a line
    #[arg(long)]
    pub(crate) json: bool,
    /// Only time the code for tags on this computer; no emulator is started
    #[arg(long)]
    pub(crate) native: bool,
    /// Run one load with fewer limits; about a minute
    #[arg(long, conflicts_with = "native")]
    pub(crate) quick: bool,
}

/// The firmware of a PC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Firmware {
    Bios,
    Uefi,
}

/// `dunlin run`.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct RunArgs {
    /// File that describes the host and its VMs [default: one VM, as in vms/default.toml]
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: Option<PathBuf>,

    /// Kernel: debian-cloud, debian, measuring-guest, parent, parent-stock, or a path
    #[arg(long, value_name = "KERNEL", help_heading = "For every VM")]
    pub(crate) kernel: Option<String>,
    /// Initial RAM disk: dunlin, workloads, compile, none, or a path
    #[arg(long, value_name = "INITRD", help_heading = "For every VM")]
    pub(crate) initrd: Option<String>,
    /// Number of vCPUs
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "For every VM")]
    pub(crate) vcpus: Option<i64>,
    /// Memory, such as 512M
    #[arg(long, value_name = "SIZE", help_heading = "For every VM")]
    pub(crate) memory: Option<String>,
    /// Kernel command line; replaces that of the file
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "For every VM")]
    pub(crate) cmdline: Option<String>,
    /// Text to append to the kernel command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "For every VM")]
    pub(crate) append: Option<String>,
    /// Run CMD in the guest (with Dunlin's initrd), print its output, exit with its status
    #[arg(long, value_name = "CMD", allow_hyphen_values = true, help_heading = "For every VM")]
    pub(crate) exec: Option<String>,

    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", value_parser = setting::<Arch>(), help_heading = "For the host")]
    pub(crate) arch: Option<Arch>,
    /// Number of physical CPUs of the host
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "For the host")]
    pub(crate) pcpus: Option<i64>,
    /// How QEMU runs the host: `tcg` emulates, `tcg-single` by one thread, `kvm` needs nested SVM
    #[arg(long, value_name = "ACCEL", value_parser = setting::<Accel>(), help_heading = "For the host")]
    pub(crate) accel: Option<Accel>,
    /// End the run after this long, such as 60s [default: none on a terminal, else 120s]
    #[arg(long, value_name = "TIME", help_heading = "For the host")]
    pub(crate) time_limit: Option<String>,
    /// QEMU to use [default: qemu-system-x86_64 or -aarch64]
    #[arg(long, value_name = "PATH", help_heading = "For the host")]
    pub(crate) qemu: Option<PathBuf>,
    /// Boot as a real PC: this firmware, then GRUB from an image like that of `dunlin image` [default: QEMU loads the
    /// hypervisor]
    #[arg(long, value_name = "bios|uefi", value_enum, help_heading = "For the host")]
    pub(crate) firmware: Option<Firmware>,
    /// Additional argument for QEMU; may be repeated
    #[arg(long, value_name = "ARG", allow_hyphen_values = true, help_heading = "For the host")]
    pub(crate) qemu_arg: Vec<String>,

    /// Print one JSON object at the end; all other output goes to standard error
    #[arg(long, help_heading = "What to show")]
    pub(crate) json: bool,
    /// Copy the hypervisor's log to standard error
    #[arg(long, help_heading = "What to show")]
    pub(crate) log: bool,
    /// Print QEMU's command line, but do not start it
    #[arg(long, help_heading = "What to show")]
    pub(crate) dry_run: bool,
    /// Also copy the guests' consoles to standard error
    #[arg(short, long, help_heading = "What to show")]
    pub(crate) verbose: bool,
}

/// `dunlin image`.
#[derive(Debug, ClapArgs)]
pub(crate) struct ImageArgs {
    /// File that describes the host and its VMs [default: one VM, as in vms/default.toml]
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: Option<PathBuf>,
    /// File for the image
    #[arg(short, long, value_name = "FILE", default_value = "dunlin.iso")]
    pub(crate) output: PathBuf,
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", value_parser = setting::<Arch>())]
    pub(crate) arch: Option<Arch>,
    /// Run CMD in each guest (with Dunlin's initrd) instead of a script that prints a few facts
    #[arg(long, value_name = "CMD", allow_hyphen_values = true)]
    pub(crate) exec: Option<String>,
    /// Start a shell on each guest's console instead of that script
    #[arg(long, conflicts_with = "exec")]
    pub(crate) shell: bool,
    /// Number of vCPUs of each VM
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) vcpus: Option<i64>,
    /// Memory of each VM, such as 512M
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// One more entry of the menu, for a host with the VMs of this file; each guest has a shell. May be repeated
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) also: Vec<PathBuf>,
}

/// The choice of a running host.
#[derive(Debug, ClapArgs)]
pub(crate) struct HostArgs {
    /// Process id of `dunlin run`, if several are running
    #[arg(long, value_name = "PID")]
    pub(crate) host: Option<u32>,
}

/// `dunlin list`.
#[derive(Debug, ClapArgs)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `dunlin stats`.
#[derive(Debug, ClapArgs)]
pub(crate) struct StatsArgs {
    /// Process id of `dunlin run`, if several are running. Without one: about the host itself, and what it does
    /// against speculative execution
    #[arg(long, value_name = "PID", num_args = 0..=1)]
    pub(crate) host: Option<Option<u32>>,
    /// Only this VM (name or number)
    #[arg(long, value_name = "VM")]
    pub(crate) vm: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Also print a line per vCPU, and first the host
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

/// `dunlin top`.
#[derive(Debug, ClapArgs)]
pub(crate) struct TopArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Print plain text instead of drawing
    #[arg(short, long)]
    pub(crate) batch: bool,
    /// Print the totals since the start once, and exit
    #[arg(long, conflicts_with_all = ["batch", "iterations"])]
    pub(crate) once: bool,
    /// Print JSON, one line per update
    #[arg(long)]
    pub(crate) json: bool,
    /// Exit after N updates
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) iterations: Option<u64>,
    /// Time between two updates
    #[arg(short, long, value_name = "TIME", default_value = "1s")]
    pub(crate) delay: String,
}

/// `dunlin metrics`.
#[derive(Debug, ClapArgs)]
pub(crate) struct MetricsArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Address to listen on; with port 0, a free port is chosen and printed on standard error
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9742")]
    pub(crate) listen: String,
    /// Print the metrics once, without a server
    #[arg(long, conflicts_with = "listen")]
    pub(crate) once: bool,
}

/// `dunlin trace`.
#[derive(Debug, ClapArgs)]
pub(crate) struct TraceArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Duration; Ctrl-C ends the trace earlier and keeps its events
    #[arg(short, long, value_name = "TIME", default_value = "2s")]
    pub(crate) time: String,
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "trace.json")]
    pub(crate) output: PathBuf,
    /// Print the summary as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const TRACE_HELP: &str = "\
Open the file at https://ui.perfetto.dev (no data leaves the browser) or in chrome://tracing. Each pCPU
has a row with the vCPUs that it ran. Each vCPU has a row with its exits by reason; between them it was
in its guest. Kicks are marks on the pCPU that sent them. Without a trace, an exit costs nothing extra.
During a trace the host is slower. Events that arrive faster than they are read are lost, and counted.";

/// `dunlin create`.
#[derive(Debug, ClapArgs)]
pub(crate) struct CreateArgs {
    /// File whose VMs to create: each `[[vm]]`
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Start the VMs at once
    #[arg(long)]
    pub(crate) start: bool,
    /// Run CMD in the guest (with Dunlin's initrd)
    #[arg(long, value_name = "CMD", allow_hyphen_values = true)]
    pub(crate) exec: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const CREATE_HELP: &str = "\
The file is one for `dunlin run` (vms/default.toml explains the keys). Its [host] section does not change the
running host, but `arch` must match. The host needs memory for the VM: reserve it with the key `memory` of
[host] when you start the host. A created VM does not run until `dunlin start`, or at once with --start.
Either all VMs of the file are created, or none. `dunlin run` shows the guests' consoles.

Examples:
  dunlin create vms/guest.toml
  dunlin create vms/guest.toml --start --exec 'uname -a'
  dunlin start guest
  dunlin destroy guest";

/// `dunlin start`, `stop` and `destroy`.
#[derive(Debug, ClapArgs)]
pub(crate) struct VmArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// The VM (name or number)
    #[arg(value_name = "VM")]
    pub(crate) vm: String,
}
