//! The command line, and the help that teaches it.

mod all;
mod bench_dirty;
mod decode;
mod dirty;
mod layout;
mod tlb;

use std::path::PathBuf;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

use crate::config::Arch;

pub(crate) use all::{AllArgs, CompareArgs};
pub(crate) use bench_dirty::{DirtyBenchArgs, DirtyPart};
pub(crate) use decode::{DecodeArgs, Setting};
pub(crate) use dirty::{DirtyArgs, DirtyVerb, HowArgs, RateArgs, RoundArgs, StartArgs, WhichArgs};
pub(crate) use layout::{LayoutArgs, LayoutBenchArgs};
pub(crate) use tlb::{Part, Targets, TlbArgs};

const ABOUT: &str = "Runs virtual machines on the Dunlin hypervisor";

const LONG_ABOUT: &str = "\
Runs virtual machines on the Dunlin hypervisor and shows what they cost.

Dunlin is a type-1 hypervisor. `dunlin run` starts it in QEMU, hands it the VMs that a TOML file
describes, and stays until they have ended. `dunlin list`, `host`, `stats`, `top`, `metrics`, `trace`, `create`, `start`,
`stop`, `destroy`, `pause`, `resume` and `dirty` work from another terminal on hosts that run. Without a word, `dunlin` is `dunlin run`.";

const STATUSES: &str = "\
Exit statuses:
  0    the VMs ended as they should (with --exec: the command's own status, whatever it is)
  1    the run failed: a VM crashed, the hypervisor stopped, the command never finished
  2    bad input: nothing was started
  124  the time limit ended the run
  130  Ctrl-C; 143 for SIGTERM";

const EXAMPLES: &str = "\
Examples:
  dunlin run                              Debian's cloud kernel, 4 vCPUs on 2 pCPUs
  dunlin run vms/two.toml                 two VMs side by side
  dunlin run --vcpus 16 --exec 'nproc'    one command in a guest; its output, its status
  dunlin run --kernel bzImage --append 'debug' --exec 'dmesg | tail'
  dunlin run --json > run.json            a fixed script; all that was measured as one object
  dunlin stats --vm default               exits by reason, in the columns of perf kvm stat
  dunlin layout                           the hypervisor's own state, by who writes which cache line
  dunlin top                              the same, live
  dunlin create vms/guest.toml --start    one more VM on a host that runs
  dunlin image -o dunlin.iso              a host with its VMs for any PC, from a stick
  dunlin dirty rate                       pages that the VM writes in a second";

const BENCH_EXAMPLES: &str = "\
Examples:
  dunlin bench all                                    everything, about a quarter of an hour
  dunlin bench exits --check docs/exits.toml          fails when an exit has become longer
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

There is no password: listen on addresses that only those can reach who may know.";

const REPORT_HELP: &str = "\
Examples:
  dunlin report results.jsonl -o report.html
  dunlin report monday.jsonl tuesday.jsonl     taken together; the page says from which commits

Results are what 'dunlin bench all' writes, and '--record FILE' of each 'dunlin bench'. The page is one
file that needs no network. Lines that cannot be read and experiments that are missing are told there.";

const TAGS_HELP: &str = "\
A tag (ASID) tells the TLB entries of one vCPU from those of others. Three schemes hand them out (keys
`tags` and `tag_limit`, see vms/default.toml); each is run with 63 tags down to one, 8 vCPUs on 2 pCPUs.

What it prints:
  checks       entries into the guest: each compares the tag it has with what it must be
  assigned     entries that gave the vCPU another tag
  new gen.     entries that found no tag left and voided all of their pCPU
  own tag      entries that flushed the vCPU's own TLB entries
  all tags     entries that flushed everything, neighbours' entries too
Then the instructions of one exit under each scheme, and the same code natively, in cycles, beside
what was published of Xen. Takes some minutes; `--native` a second.

Examples:
  dunlin bench tags
  dunlin bench tags --native
  dunlin bench tags --json > tags.jsonl     \"emulated\" says which counts are an emulator's";

const IMAGE_HELP: &str = "\
The image starts from BIOS and from UEFI (with Secure Boot off), as a CD and as a USB stick:
  dd if=dunlin.iso of=/dev/sdX bs=4M conv=fsync
It writes to no disk of the computer. Messages are on the screen and on the first serial port, 115200 baud. The machine turns off
when the last VM has ended; where the hypervisor cannot start, it says why and stops.
With `--arch aarch64` it starts from UEFI on machines that are described by a device tree, and messages are on a PL011 only.

Examples:
  dunlin image
  dunlin image vms/two.toml -o two.iso
  qemu-system-x86_64 -machine q35 -cpu max -smp 2 -m 1G -cdrom dunlin.iso -nographic
  dunlin image --arch aarch64 -o dunlin-aarch64.iso

It is made by grub-mkrescue of GRUB (Debian: grub-common, xorriso, mtools; grub-pc-bin and grub-efi-amd64-bin, or
grub-efi-arm64-bin).";

const RUN_HELP: &str = "\
What it does:
  On a terminal, one VM without --exec: the guest's console. Ctrl-] leaves and ends the VM.
  With --exec 'CMD': CMD runs in the guest by `sh`; its output appears here, its status becomes ours.
  Otherwise: a fixed script (kernel, CPUs, interrupts, errors, a small parallel job) and a summary.
  A VM with an initrd of your own has its console copied to standard output instead.

Options that describe a VM apply to every VM of the file.

Examples:
  dunlin run vms/large.toml --vcpus 64 --pcpus 2
  dunlin run --kernel /boot/vmlinuz-6.1.0 --initrd none --append 'panic=-1' --time-limit 30s
  dunlin run --exec 'cat /proc/interrupts' --json
  dunlin run --arch aarch64
  dunlin run --qemu-arg=-icount --qemu-arg=shift=0,sleep=off

Keys of a file (vms/default.toml explains each):
  [host]   arch, pcpus, memory, accel, time_limit, qemu
  [[vm]]   name, vcpus, memory, kernel, initrd, cmdline, apic, hyperv, flush, tags, tag_limit, decode_cache,
           populate, split, split_rate, dirty_source

Environment:
  DUNLIN_ASSETS    directory of the hypervisor, the initrd and the kernels;
                   else `../dunlin`, seen from this program's directory
  XDG_RUNTIME_DIR  where other tools find a running host; else a directory in /tmp

";

/// `dunlin`.
#[derive(Debug, Parser)]
#[command(name = "dunlin", version, max_term_width = 110, about = ABOUT, long_about = LONG_ABOUT, after_help = EXAMPLES,
    after_long_help = format!("{EXAMPLES}\n\n{STATUSES}"))]
pub(crate) struct Args {
    /// What to do; without it, `run`.
    #[command(subcommand)]
    pub(crate) verb: Option<Verb>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Start a host and its VMs, stay until they end
    #[command(after_long_help = format!("{RUN_HELP}{STATUSES}"))]
    Run(Box<RunArgs>),
    /// Write an image that starts a host and its VMs on any PC, or an Arm machine with UEFI, from a stick or a CD
    #[command(after_help = IMAGE_HELP)]
    Image(ImageArgs),
    /// List the VMs of a running host
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Show exits by reason and where time went
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
    /// Let a VM run that was created
    Start(VmArgs),
    /// End a VM at once, as if its power were cut
    Stop(VmArgs),
    /// End a VM if it runs, give all that it had back to the host, and forget it
    Destroy(VmArgs),
    /// Show what a running host has left: memory, heap, tables, TLB tags
    Host(ListArgs),
    /// Stop a VM's vCPUs until `dunlin resume`
    Pause(WhichArgs),
    /// Let a paused VM go on
    Resume(WhichArgs),
    /// Record which pages a VM writes, and what that costs it
    #[command(after_long_help = dirty::HELP)]
    Dirty(DirtyArgs),
    /// Write down each exit, kick and flush of a running host for a while, as a file that Perfetto opens
    #[command(after_help = TRACE_HELP)]
    Trace(TraceArgs),
    /// Show how the hypervisor's own state lies in memory, by who writes it
    #[command(after_long_help = layout::HELP)]
    Layout(LayoutArgs),
    /// Measure (docs/measuring.md); without a word: exits, budget and boot
    Bench(BenchArgs),
    /// Make one page of results, beside those of others
    #[command(after_help = REPORT_HELP)]
    Report(ReportArgs),
}

/// `dunlin bench`.
#[derive(Debug, ClapArgs)]
#[command(after_help = BENCH_EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Append a record of each result to this file, one line of JSON each (docs/measuring.md)
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) record: Option<PathBuf>,
    /// What to measure
    #[command(subcommand)]
    pub(crate) what: Option<Measurement>,
}

/// What can be measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Measurement {
    /// Count the instructions of each kind of exit, exactly
    Exits(ExitsArgs),
    /// Boot to user space, in turn with the same kernel on QEMU alone
    Boot(BootArgs),
    /// Count the exits of one boot with 2 vCPUs, up to user space
    Budget(BudgetArgs),
    /// Mixed load that the guest checks, for a long time
    Soak(SoakArgs),
    /// What the tags of TLB entries cost, by scheme and by how many there are
    #[command(after_help = TAGS_HELP)]
    Tags(TagsArgs),
    /// Shoot down TLBs by IPI and by hypercall: time, exits and instructions of one
    #[command(after_long_help = tlb::HELP)]
    Tlb(Box<TlbArgs>),
    /// What emulated accesses cost, by what is remembered of their instructions
    #[command(after_long_help = decode::HELP)]
    Decode(DecodeArgs),
    /// All of these in a short form, and a page of what they say
    #[command(after_long_help = all::ALL_HELP)]
    All(AllArgs),
    /// What differs between two files of results, and whether that means something
    #[command(after_long_help = all::COMPARE_HELP)]
    Compare(CompareArgs),
    /// State of two vCPUs side by side, packed as it comes and laid out by who writes it
    #[command(after_long_help = layout::BENCH_HELP)]
    Layout(LayoutBenchArgs),
    /// What it costs a guest that its writes are logged: speed over time, instructions, tables
    #[command(after_long_help = bench_dirty::HELP)]
    Dirty(Box<DirtyBenchArgs>),
}

/// `dunlin report`.
#[derive(Debug, ClapArgs)]
pub(crate) struct ReportArgs {
    /// Files of results
    #[arg(value_name = "RESULTS", required = true)]
    pub(crate) results: Vec<PathBuf>,
    /// The page
    #[arg(short, long, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: PathBuf,
}

/// `dunlin bench exits`.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct ExitsArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value = "x86_64")]
    pub(crate) arch: Arch,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Fail when a figure is more than 2 % above this file's, or above its target
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
    /// How often, in turn
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) pairs: u32,
    /// Measure only one of the two
    #[arg(long, value_name = "WHICH")]
    pub(crate) only: Option<Contender>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What boots the kernel.
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
    #[arg(long, value_name = "ARCH", default_value = "x86_64")]
    pub(crate) arch: Arch,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// `dunlin bench soak`.
#[derive(Debug, ClapArgs)]
pub(crate) struct SoakArgs {
    /// Architecture of the host and its guests
    #[arg(long, value_name = "ARCH", default_value = "x86_64")]
    pub(crate) arch: Arch,
    /// For how long, by the guest's clock
    #[arg(long, value_name = "N", conflicts_with = "exits")]
    pub(crate) seconds: Option<u32>,
    /// Until the host has counted so many exits [default: 10000000]
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
    #[arg(long, value_name = "ARCH", default_value = "x86_64")]
    pub(crate) arch: Arch,
    /// Print JSON, one record a line
    #[arg(long)]
    pub(crate) json: bool,
    /// Only time the code for tags on this computer; no emulator is started
    #[arg(long)]
    pub(crate) native: bool,
    /// One load and fewer limits, about a minute
    #[arg(long, conflicts_with = "native")]
    pub(crate) quick: bool,
}

/// What starts a PC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Firmware {
    Bios,
    Uefi,
}

/// `dunlin run`.
#[derive(Debug, Default, ClapArgs)]
pub(crate) struct RunArgs {
    /// What to run [default: one VM, the text of vms/default.toml]
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: Option<PathBuf>,

    /// Kernel: debian-cloud, debian, measuring-guest, or a path
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
    /// Kernel command line, in place of the file's
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "For every VM")]
    pub(crate) cmdline: Option<String>,
    /// More kernel command line, after the file's or after --cmdline
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "For every VM")]
    pub(crate) append: Option<String>,
    /// Run CMD in the guest by our initrd, print its output, end with its status
    #[arg(long, value_name = "CMD", allow_hyphen_values = true, help_heading = "For every VM")]
    pub(crate) exec: Option<String>,

    /// Architecture of the host and its guests: x86_64 or aarch64
    #[arg(long, value_name = "ARCH", help_heading = "For the host")]
    pub(crate) arch: Option<String>,
    /// Number of physical CPUs of the host
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "For the host")]
    pub(crate) pcpus: Option<i64>,
    /// auto, tcg (emulation) or kvm (needs nested SVM)
    #[arg(long, value_name = "ACCEL", help_heading = "For the host")]
    pub(crate) accel: Option<String>,
    /// End the run after this long, such as 60s [default: none on a terminal, else 120s]
    #[arg(long, value_name = "TIME", help_heading = "For the host")]
    pub(crate) time_limit: Option<String>,
    /// QEMU to use [default: qemu-system-x86_64 or -aarch64]
    #[arg(long, value_name = "PATH", help_heading = "For the host")]
    pub(crate) qemu: Option<PathBuf>,
    /// Start as a PC does: this firmware, then GRUB from an image as `dunlin image` makes it [default: QEMU loads the
    /// hypervisor]
    #[arg(long, value_name = "bios|uefi", value_enum, help_heading = "For the host")]
    pub(crate) firmware: Option<Firmware>,
    /// One more argument for QEMU, as it is; may be given several times
    #[arg(long, value_name = "ARG", allow_hyphen_values = true, help_heading = "For the host")]
    pub(crate) qemu_arg: Vec<String>,

    /// Print one JSON object at the end on standard output; everything else goes to standard error
    #[arg(long, help_heading = "What to show")]
    pub(crate) json: bool,
    /// Show the hypervisor's log as it comes, on standard error
    #[arg(long, help_heading = "What to show")]
    pub(crate) log: bool,
    /// Print QEMU's command line and start nothing
    #[arg(long, help_heading = "What to show")]
    pub(crate) dry_run: bool,
    /// Show the guests' consoles too, on standard error
    #[arg(short, long, help_heading = "What to show")]
    pub(crate) verbose: bool,
}

/// `dunlin image`.
#[derive(Debug, ClapArgs)]
pub(crate) struct ImageArgs {
    /// What to run [default: one VM, the text of vms/default.toml]
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: Option<PathBuf>,
    /// The image
    #[arg(short, long, value_name = "FILE", default_value = "dunlin.iso")]
    pub(crate) output: PathBuf,
    /// Architecture of the host and its guests: x86_64 or aarch64
    #[arg(long, value_name = "ARCH")]
    pub(crate) arch: Option<String>,
    /// Run CMD in each guest by our initrd, in place of a script that shows a few facts
    #[arg(long, value_name = "CMD", allow_hyphen_values = true)]
    pub(crate) exec: Option<String>,
    /// Give a shell on each guest's console, in place of that script
    #[arg(long, conflicts_with = "exec")]
    pub(crate) shell: bool,
    /// Number of vCPUs of each VM
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) vcpus: Option<i64>,
    /// Memory of each VM, such as 512M
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
}

/// Which running host.
#[derive(Debug, ClapArgs)]
pub(crate) struct HostArgs {
    /// Process id of the `dunlin run`, when several run
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
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Only this VM (name or number)
    #[arg(long, value_name = "VM")]
    pub(crate) vm: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// One line per vCPU too
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
    /// Print one picture, of all that was counted so far, and end
    #[arg(long, conflicts_with_all = ["batch", "iterations"])]
    pub(crate) once: bool,
    /// Print JSON, one line for each picture
    #[arg(long)]
    pub(crate) json: bool,
    /// End after N pictures
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) iterations: Option<u64>,
    /// Time between two pictures
    #[arg(short, long, value_name = "TIME", default_value = "1s")]
    pub(crate) delay: String,
}

/// `dunlin metrics`.
#[derive(Debug, ClapArgs)]
pub(crate) struct MetricsArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Where to listen; port 0 is any that is free, and is told on standard error
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9742")]
    pub(crate) listen: String,
    /// Print the text once, and listen nowhere
    #[arg(long, conflicts_with = "listen")]
    pub(crate) once: bool,
}

/// `dunlin trace`.
#[derive(Debug, ClapArgs)]
pub(crate) struct TraceArgs {
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// For how long; Ctrl-C ends it earlier and keeps what was seen
    #[arg(short, long, value_name = "TIME", default_value = "2s")]
    pub(crate) time: String,
    /// The file to write
    #[arg(short, long, value_name = "FILE", default_value = "trace.json")]
    pub(crate) output: PathBuf,
    /// Print what was seen as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const TRACE_HELP: &str = "\
Open the file at https://ui.perfetto.dev (nothing is sent anywhere) or in chrome://tracing. There is a row for each
pCPU, with the vCPUs that it ran, and one for each vCPU, with its exits by reason; in between it was in its guest.
Kicks are marks on the pCPU that sent them. While nobody traces, an exit costs nothing more; while somebody does, the
host is slower, and events that come faster than they are read are lost and counted.";

/// `dunlin create`.
#[derive(Debug, ClapArgs)]
pub(crate) struct CreateArgs {
    /// What to create: each `[[vm]]` of the file
    #[arg(value_name = "FILE.toml")]
    pub(crate) file: PathBuf,
    #[command(flatten)]
    pub(crate) host: HostArgs,
    /// Let it run at once
    #[arg(long)]
    pub(crate) start: bool,
    /// Run CMD in the guest by our initrd
    #[arg(long, value_name = "CMD", allow_hyphen_values = true)]
    pub(crate) exec: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const CREATE_HELP: &str = "\
The file is one for `dunlin run` (vms/default.toml explains the keys). What it says of [host] is not for the
host that runs, but an `arch` that it names has to be right. The host needs memory for the VM: give it some
with the key `memory` of [host] when it is started. A VM that is created does not run yet: `dunlin start`
lets it, or --start. Of several VMs either all are created, or none. What guests write to their consoles
appears where `dunlin run` is.

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
