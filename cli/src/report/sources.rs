//! Published figures of other systems, or our measurements of their software, each with its circumstances and its
//! comparability. ("Counted here" means: on the same emulated machine, with a guest of their own, see
//! docs/measuring.md.)

/// A figure of another system.
pub(super) struct Source {
    /// The measured quantity.
    pub(super) what: &'static str,
    /// The values.
    pub(super) figures: &'static str,
    /// The authors and the machine.
    pub(super) circumstances: &'static str,
}

/// All figures that are shown next to one of our experiments.
pub(super) struct Beside {
    /// Our experiment.
    pub(super) experiment: &'static str,
    /// Theirs.
    pub(super) sources: &'static [Source],
    /// The comparable part.
    pub(super) comparable: &'static str,
    /// The part that is not comparable.
    pub(super) not_comparable: &'static str,
}

const fn source(what: &'static str, figures: &'static str, circumstances: &'static str) -> Source {
    Source { what, figures, circumstances }
}

/// The published figures for an experiment.
pub(super) fn beside(experiment: &str) -> Option<&'static Beside> {
    ALL.iter().find(|beside| beside.experiment == experiment)
}

const ALL: [Beside; 8] = [
    Beside {
        experiment: "tlb",
        sources: &[
            source(
                "Mean of one shootdown, 48 vCPUs: IPI → hypercall",
                "27 → 14.7 µs (factor 1.84)",
                "FreeBSD in Azure, Xeon 8370C, hardware (talk “FreeBSD TLB shootdown enhancement in Azure”)",
            ),
            source(
                "The same, 48 vCPUs",
                "40.1 → 25 µs (1.60)",
                "FreeBSD in Azure, EPYC 7763, hardware (the same talk)",
            ),
            source(
                "The same, 16 vCPUs",
                "12 → 7.7 µs (1.56)",
                "FreeBSD in Azure, Xeon 8473C, hardware (the same talk)",
            ),
            source(
                "A shootdown, 32 vCPUs: IPI → hypercall",
                "112.4 → 8.33 µs (13.5)",
                "Xen as a guest of Xen, 80 hardware threads (commit 17b997aa1e of Xen)",
            ),
            source(
                "KVM's Hyper-V flush: mean, p50, p99 in µs",
                "2 vCPUs: 158, 133, 573; 4: 3 200, 81, 23 900; 8: 6 000, 122, 48 500",
                "Linux 6.1 on the same emulated machine, 2 pCPUs; a Linux guest, by mprotect; the first on a quiet computer, the others on a busy one",
            ),
            source(
                "KVM, flush by IPI: mean, p50, p99 in µs",
                "2 vCPUs: 102, 85, 444; 4: 17 000, 16 000, 28 000; 8: 42 600, 36 000, 88 800",
                "as above",
            ),
            source(
                "Xen HVM, flush by IPI: mean, p50, p99 in µs",
                "4 vCPUs: 3 000, 2 600, 10 500; 8: 9 000, 7 800, 25 400",
                "Xen 4.17 on the same emulated machine, 2 pCPUs, a busy computer",
            ),
        ],
        comparable: "Which way is faster, by what factor, and how that changes with more vCPUs than pCPUs. Exits, kicks and instructions of one shootdown: these are counts, and hold on hardware.",
        not_comparable: "Microseconds with those of hardware: an exit costs some 10 µs in the emulator and far less on a processor, so with one vCPU per pCPU the hypercall gains less here than on hardware. KVM's and Xen's figures are of other days and of a busier computer.",
    },
    Beside {
        experiment: "tags",
        sources: &[
            source(
                "Check of the tag",
                "20 cycles, at 100 % of VMRUNs",
                "Xen on AMD-V (Biemueller, 2007), 63 tags, hardware",
            ),
            source("Assignment of another tag", "42 cycles, at 30 % of VMRUNs", "the same"),
            source("New generation", "460–600 cycles, at 0.3 % of VMRUNs", "the same, with its flush"),
            source("Entries that flush", "1.5 % of VMRUNs, instead of 100 %", "the same"),
        ],
        comparable: "Which part of an entry is rare, and which is expensive. Shares of entries, where a guest changes its address space as seldom as ours.",
        not_comparable: "Cycles of a processor of 2007 with those of today's. Xen's guest changed its address space far more often than ours do. The later cost of a flush, when the TLB is empty, is in none of these figures.",
    },
    Beside {
        experiment: "layout",
        sources: &[source(
            "Build of Linux in a guest with 16 vCPUs: packed → padded",
            "11 min 32 s → 11 min 09 s (3.3 % less)",
            "bhyve on illumos (Gerdts, 2018), hardware; struct vcpu padded to 256 bytes and aligned",
        )],
        comparable: "That neighbours in one cache line slow each other down, and that separate lines prevent it.",
        not_comparable: "Factors: ours are of the exit path alone, natively and with nothing else to do; theirs is of a whole guest, which does other work between exits. The figures here are the loss of an exit, not of a guest.",
    },
    Beside {
        experiment: "decode",
        sources: &[
            source(
                "Read of the local APIC's ID: without → with the cache",
                "10 500 → 6 700 ticks (36 % less)",
                "bhyve's instruction cache (Carabas, Natu, AsiaBSDCon 2015), hardware",
            ),
            source("buildworld: without → with the cache", "13 938 → 13 900 s (0.3 % less)", "the same"),
            source("Hits in a shell loop", "98.5 %", "the same"),
            source(
                "Instructions of one access: version register, EOI, TPR",
                "3 758, 3 659, 81 574",
                "KVM of Linux 6.1, counted on the same emulated machine; nothing is cached, TPR goes to its user space",
            ),
            source(
                "One emulated instruction",
                "720–1 100 cycles",
                "KVM on Sandy Bridge (2014), after a series of optimisations",
            ),
        ],
        comparable: "By how many per cent a cache shortens an access; instructions of ours with those of KVM, which were counted in the same way.",
        not_comparable: "Ticks of an emulator with those of hardware: entry and exit are so expensive in the emulator that the work in between shows little. bhyve's 3 800 ticks were mostly its walk of the guest's page tables, each page held on the way, and a slow decoder.",
    },
    Beside {
        experiment: "dirty",
        sources: &[
            source(
                "A guest in migration: the time for which it is more than 99 % slower",
                "105 s (on x86: 6 s); 30 s after the lock was changed",
                "KVM/arm64, Ampere Altra, 48 vCPUs with 4 GB each, large pages, hardware (Jing Zhang's letter to the list, 2022; Linux 5.18)",
            ),
            source(
                "Time to write all memory with a log, 48 vCPUs with 4 GB each",
                "32.1 → 6.2 s",
                "KVM/arm64 before and after faults in parallel (Oliver Upton, Linux 6.2), hardware",
            ),
            source(
                "One write to each 2 MiB, 152 vCPUs; writes to 10 % of the memory: split in faults → ahead",
                "109.8 → 15.1 ms; 6.44 → 0.63 s",
                "KVM/arm64, eager split (Ricardo Koller, Marc Zyngier, Linux 6.5; off by default), hardware",
            ),
            source(
                "Time to write all memory, and to harvest: faults → the hardware's dirty bit",
                "4.22 → 0.41 s; harvest 0.0005 → 3.25 s",
                "KVM/arm64, 96 vCPUs, a proposal of 2023 that was not merged, hardware",
            ),
            source(
                "Speed before the log → first pass with it, 1 vCPU",
                "2.05–2.09 M → 20–21 k pages/s (99.0 % less); harvested every 100 ms 12–16 k, and never back",
                "KVM/arm64 of Linux 6.12, lazy split, 256 MiB in pages of 2 MiB, on the same emulator (its AArch64), quiet computer",
            ),
            source(
                "The same, 2 vCPUs",
                "2.0 M → 28 k pages/s (a good run); 9–14 k on a busy computer; 0.2–0.5 k where both shared a core",
                "as above",
            ),
            source(
                "Instructions of one fault: first pass, which splits; later rounds",
                "3 697; 3 276",
                "as above, counted exactly",
            ),
        ],
        comparable: "Instructions of a fault, and how many faults, splits and broadcasts there are: these are counts. How deep the speed falls within one run, and whether it comes back between two rounds.",
        not_comparable: "Pages per second, with any other. KVM's were measured on the emulated AArch64, where each of its exits drops the emulator's own TLB twice, which makes systems with fewer exits look better; it was harvested every 100 ms, ours every 500 ms. No count shows the cost of a broadcast on hardware.",
    },
    Beside {
        experiment: "exits",
        sources: &[
            source(
                "KVM's own round trips, in the table above",
                "CPUID 2 681, unknown call 2 826, EOI by x2APIC 2 822, by xAPIC 3 659",
                "Linux 6.1 with kvm-amd, on the same emulated machine, counted in the same way with a guest of its own",
            ),
            source(
                "A loop of only VMRUN and VMMCALL",
                "66",
                "the least that an exit takes on the same emulated machine; no policy, no C or Rust in between",
            ),
        ],
        comparable: "All of it: counts of the same instructions on the same emulated machine.",
        not_comparable: "Cycles. An instruction that misses a cache counts as one, and the processor's cost of VMRUN and #VMEXIT does not show.",
    },
    Beside {
        experiment: "boot",
        sources: &[
            source(
                "The same kernel under KVM and QEMU's microvm: 1, 2, 4 vCPUs",
                "2.56, 2.47, 2.75 s",
                "Linux 6.1 on the same emulated machine, quiet computer, one run each",
            ),
            source("The same under KVM and q35", "4.02, 3.76, 4.18 s", "the same"),
            source("The same kernel directly on the emulator", "2.1 s (1 and 2 CPUs), 2.5 s (4)", "the same"),
        ],
        comparable: "The ratio of both boots of a pair, which are taken in turn.",
        not_comparable: "Seconds, with any other: they are times of an emulator on a computer with other work.",
    },
    Beside {
        experiment: "budget",
        sources: &[
            source(
                "Exits of a boot to user space, 2 vCPUs",
                "5 560",
                "a small test hypervisor without I/O APIC and UART interrupts; the budget is 6 000",
            ),
            source(
                "The same on AArch64",
                "91 700, of which 90 098 are reads of one register",
                "KVM/arm64 of Linux 6.12 on the emulated AArch64",
            ),
        ],
        comparable: "The number of exits, and their reasons.",
        not_comparable: "Exits that depend on time (host interrupts, halts, timers): ours are of a boot by a clock of instructions, 1.4 s on x86-64; those of others are of boots by the wall clock.",
    },
];
