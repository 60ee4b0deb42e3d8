//! Random changes of page tables and of stage 2, with the invalidations of [`Scope`], on a machine that keeps every
//! translation that the manual allows.
//!
//! Two vCPUs of one VM move between two pCPUs. Who changes a table leaves a debt at each vCPU or pCPU that may have
//! translations of it, and the debt is paid before that guest runs there again. An access may see nothing but what the
//! tables say then.

use fastrand::Rng;
use hw_model::ept::{Eptp, Machine, Tables, Vpid};
use vmx_image::{Instruction, Scope};

const CPUS: usize = 2;
const VCPUS: usize = 2;
const PAGES: u64 = 3;
const ROOT: Eptp = Eptp(0x5000);

/// How debts are paid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Payment {
    /// As the hypervisor does.
    Right,
    /// A change of stage 2 is followed by INVVPID only.
    NoInvept,
    /// A change of the guest's tables is followed by nothing.
    NoInvvpid,
    /// INVVPID of one address is taken for the other page.
    OtherAddress,
    /// A vCPU that comes to another pCPU keeps what was cached there.
    KeptAtArrival,
}

fn execute(machine: &mut Machine, cpu: usize, instruction: Instruction) {
    let vpid = |number: u64| Vpid(u32::try_from(number).expect("16 bits"));
    match instruction {
        Instruction::Invvpid(0, [number, gva]) => machine.invvpid_address(cpu, vpid(number), gva),
        Instruction::Invvpid(1, [number, 0]) => machine.invvpid(cpu, vpid(number)),
        Instruction::Invvpid(2, [0, 0]) => machine.invvpid_all(cpu),
        Instruction::Invept(1, [root, 0]) => machine.invept(cpu, Eptp(root)),
        Instruction::Invept(2, [0, 0]) => machine.invept_all(cpu),
        other => panic!("no such instruction: {other:?}"),
    }
}

fn pay(machine: &mut Machine, cpu: usize, scope: Scope, payment: Payment) {
    for instruction in scope.instructions().into_iter().flatten() {
        let is_left_out = match payment {
            Payment::NoInvept => matches!(instruction, Instruction::Invept(..)),
            Payment::NoInvvpid => true,
            Payment::Right | Payment::OtherAddress | Payment::KeptAtArrival => false,
        };
        if !is_left_out {
            execute(machine, cpu, instruction);
        }
    }
}

/// Whether no access has seen what it must not.
fn is_clean(seed: u64, payment: Payment) -> bool {
    let mut random = Rng::with_seed(seed);
    let mut machine = Machine::new(CPUS);
    let mut guest = [0, 1, 2];
    let mut stage2 = [10, 11, 12];
    let mut next_page = 100;
    // Where a vCPU ran last, and what it owes.
    let mut places = [0; VCPUS];
    let mut is_new_here = [true; VCPUS];
    let mut owes = [false; VCPUS];
    for _ in 0..200 {
        let vcpu = random.usize(..VCPUS);
        let vpid = u32::try_from(vcpu + 1).expect("small");
        let scope = Scope::Vcpu { vpid, eptp: ROOT.0 };
        match random.u8(..10) {
            // The guest changes an entry and invalidates the address on its own vCPU (INVLPG) and on the other one (a
            // hypercall).
            0 => {
                let gva = random.u64(..PAGES);
                guest[usize::try_from(gva).expect("small")] = random.u64(..PAGES);
                for (vpid, place) in (1..).zip(places) {
                    let gva = if payment == Payment::OtherAddress { (gva + 1) % PAGES } else { gva };
                    pay(&mut machine, place, Scope::Address { vpid, gva }, payment);
                }
            }
            // The same by a flush of the whole space, paid at the next entry.
            1 => {
                guest[random.usize(..3)] = random.u64(..PAGES);
                owes = [true; VCPUS];
            }
            // Stage 2 changes.
            2 => {
                next_page += 1;
                stage2[random.usize(..3)] = next_page;
                owes = [true; VCPUS];
            }
            3 => {
                let cpu = random.usize(..CPUS);
                is_new_here[vcpu] |= cpu != places[vcpu];
                places[vcpu] = cpu;
            }
            _ => {
                let is_kept = payment == Payment::KeptAtArrival;
                if owes[vcpu] || is_new_here[vcpu] && !is_kept {
                    pay(&mut machine, places[vcpu], scope, payment);
                }
                (owes[vcpu], is_new_here[vcpu]) = (false, false);
                let gva = random.u64(..PAGES);
                let at = |page: u64| usize::try_from(page).expect("small");
                let tables = Tables { guest: |gva| Some(guest[at(gva)]), stage2: |gpa| Some(stage2[at(gpa)]) };
                let seen = machine.access(places[vcpu], Vpid(vpid), ROOT, gva, &tables);
                if seen != [Some(stage2[at(guest[at(gva)])])] {
                    return false;
                }
            }
        }
    }
    true
}

/// As many schedules as `DUNLIN_SCHEDULES` says.
#[test]
fn guests_see_nothing_old_after_the_invalidations() {
    let schedules = std::env::var("DUNLIN_SCHEDULES").ok().and_then(|count| count.parse().ok()).unwrap_or(2_000);
    for seed in 0..schedules {
        assert!(is_clean(seed, Payment::Right), "seed {seed}");
    }
}

#[test]
fn each_planted_mistake_is_seen() {
    for payment in [Payment::NoInvept, Payment::NoInvvpid, Payment::OtherAddress, Payment::KeptAtArrival] {
        assert!((0..200).any(|seed| !is_clean(seed, payment)), "{payment:?}");
    }
}

#[test]
fn all_means_all() {
    let mut machine = Machine::new(1);
    let tables = |page: u64| Tables { guest: |gva| Some(gva), stage2: move |_| Some(page) };
    for root in [ROOT, Eptp(0x9000)] {
        machine.access(0, Vpid(3), root, 1, &tables(7));
    }
    pay(&mut machine, 0, Scope::All, Payment::Right);
    for root in [ROOT, Eptp(0x9000)] {
        assert_eq!(machine.access(0, Vpid(3), root, 1, &tables(8)), [Some(8)]);
    }
}
