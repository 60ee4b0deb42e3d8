//! CPUID as guests see it, of any processor: no feature that the processor lacks, none that the hypervisor cannot hold.

use fuzz::{Input, target};
use x86_defs::control::{Leaves, Offered, State};
use x86_defs::cpuid::Registers;
use x86_defs::features::{BASIC_MAX, EXTENDED_FIRST, EXTENDED_MAX, Guest, subleaves};

/// What a guest never sees, as the bits of EAX to EDX (SDM vol. 2, CPUID; APM vol. 3, appendix E).
const NEVER: [(u32, [u32; 4]); 5] = [
    // DTES64, MONITOR, DS-CPL, VMX, SMX, EIST, TM2, CNXT-ID, SDBG, xTPR, PDCM, PCID, DCA, OSXSAVE.
    // MCE, MCA, PSN, DS, ACPI, TM, PBE.
    (1, [0, 0, 0x0806_c9fc, 1 << 7 | 1 << 14 | 1 << 18 | 1 << 21 | 1 << 22 | 1 << 29]),
    // TSC_ADJUST, SGX, PQM, PQE, MPX, PT. OSPKE, WAITPKG, CET, TME, LA57, bus-lock detection, SGX_LC, PKS.
    // HYBRID, PCONFIG, LBR, CET_IBT, AMX, IBRS, STIBP, L1D_FLUSH, capabilities, SSBD.
    (7, [!0, 1 << 1 | 1 << 2 | 1 << 12 | 1 << 14 | 1 << 15 | 1 << 25, 0xc101_20b0, 0xfdd4_8000]),
    // SVM, OSVW, IBS, SKINIT, WDT, LWP, NodeId, performance counters, MONITORX. MCE, MCA.
    (
        0x8000_0001,
        [0, 0, 1 << 2 | 1 << 9 | 1 << 10 | 0xb000 | 1 << 19 | 1 << 23 | 1 << 24 | 1 << 28 | 1 << 29, 1 << 7 | 1 << 14],
    ),
    // Only an invariant counter: no power management.
    (0x8000_0007, [!0, !0, !0, !(1 << 8)]),
    // RDPRU, MCOMMIT, IBPB, INT_WBINVD, IBRS, STIBP and similar.
    (0x8000_0008, [0, 1 << 4 | 1 << 8 | 0xffff_f000, 0, 0]),
];

/// What the hypervisor adds to the processor's features: x2APIC, TSC deadline, a hypervisor; several logical
/// processors in a package.
const ADDED: [(u32, [u32; 4]); 2] =
    [(1, [0, 0, 1 << 21 | 1 << 24 | 1 << 31, 1 << 28]), (0x8000_0001, [0, 0, 1 << 1, 0])];
/// Registers with features.
const FEATURES: [(u32, u32, [bool; 4]); 5] = [
    (1, 0, [false, false, true, true]),
    (7, 0, [true, true, true, true]),
    (0xd, 1, [true, true, true, true]),
    (0x8000_0001, 0, [false, false, true, true]),
    (0x8000_0008, 0, [false, true, false, true]),
];

fn words(Registers { eax, ebx, ecx, edx }: Registers) -> [u32; 4] {
    [eax, ebx, ecx, edx]
}

fn answer(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let guest = Guest {
        vcpus: u32::from(input.u16()) % 512 + 1,
        has_x2apic: input.byte() & 1 != 0,
        has_invariant_tsc: input.byte() & 1 != 0,
        xcr0: input.u64(),
    };
    let asked = (input.u32(), input.u32());
    let rest = input.rest();
    // A processor of these bytes. Its state components end below 4 GiB.
    let host = |leaf: u32, subleaf: u32| {
        let at = (leaf as usize & 0x1f) * 16 + (subleaf as usize & 0x3f) * 8;
        let word = |index: usize| {
            u32::from_le_bytes(std::array::from_fn(|byte| rest.get(at + 4 * index + byte).copied().unwrap_or(0)))
        };
        let [eax, ebx, ecx, edx] = [0, 1, 2, 3].map(word);
        if leaf == 0xd && subleaf > 1 {
            return Registers { eax: eax & 0xffff, ebx: ebx & 0xffff, ecx, edx };
        }
        Registers { eax, ebx, ecx, edx }
    };
    let shown = |leaf: u32, subleaf: u32| words(guest.answer(leaf, subleaf, host));

    for (leaf, subleaf, which) in FEATURES {
        let (told, there) = (shown(leaf, subleaf), words(host(leaf, subleaf)));
        let added = ADDED.iter().find(|(of, _)| *of == leaf && subleaf == 0).map_or([0; 4], |(_, bits)| *bits);
        for register in (0..4).filter(|register| which[*register]) {
            let invented = told[register] & !(there[register] | added[register]);
            assert_eq!(invented, 0, "leaf {leaf:#x} register {register}: {told:x?} of {there:x?}");
        }
    }
    for (leaf, bits) in NEVER {
        let told = shown(leaf, 0);
        for register in 0..4 {
            assert_eq!(told[register] & bits[register], 0, "leaf {leaf:#x} register {register}: {told:x?}");
        }
    }
    let is_there = |leaf: u32, register: usize, bit: u32| shown(leaf, 0)[register] >> bit & 1 != 0;
    assert_eq!(is_there(1, 2, 21), guest.has_x2apic);
    assert_eq!(is_there(0x8000_0007, 3, 8), guest.has_invariant_tsc);

    extended_state(&guest, shown, host);
    topology(&guest, shown);
    control_registers(shown);

    // Leaves that are not listed, and subleaves that a leaf does not have, are zero.
    let (leaf, subleaf) = asked;
    let listed = [0, 1, 6, 7, 0xb, 0xd].contains(&leaf) || (EXTENDED_FIRST..=EXTENDED_MAX).contains(&leaf);
    if !listed || subleaf >= subleaves(leaf).unwrap_or(1) {
        assert_eq!(shown(leaf, subleaf), [0; 4], "leaf {leaf:#x}.{subleaf:#x}");
    }
    assert_eq!((shown(0, 0)[0], shown(EXTENDED_FIRST, 0)[0]), (BASIC_MAX, EXTENDED_MAX));
}

/// XSAVE: exactly the components that the hypervisor switches, in an area that holds them.
fn extended_state(guest: &Guest, shown: impl Fn(u32, u32) -> [u32; 4], host: impl Fn(u32, u32) -> Registers) {
    let [low, bytes, most, high] = shown(0xd, 0);
    assert_eq!(u64::from(high) << 32 | u64::from(low), guest.xcr0);
    assert!(bytes >= 576 && most == bytes, "{bytes} of {most}");
    for component in 2..64 {
        let told = shown(0xd, component);
        if guest.xcr0 >> component & 1 != 0 {
            assert_eq!(told, words(host(0xd, component)), "component {component}");
            assert!(told[0] + told[1] <= bytes, "component {component} ends behind the area");
        } else {
            assert_eq!(told, [0; 4], "component {component} is not switched");
        }
    }
    assert_eq!(shown(0xd, 1)[0] & !0b101, 0, "XSAVES would need a register");
}

/// All vCPUs are cores of one package, and their ids fit.
fn topology(guest: &Guest, shown: impl Fn(u32, u32) -> [u32; 4]) {
    let [shift, count, level, _] = shown(0xb, 1);
    assert_eq!((count, level >> 8), (guest.vcpus, 2));
    assert!(1_u64 << shift >= u64::from(guest.vcpus) && (shift == 0 || 1 << (shift - 1) < guest.vcpus), "{shift}");
    assert_eq!(shown(0xb, 0)[..2], [0, 1], "a thread for each core");
    assert_eq!(shown(0x8000_0008, 0)[2] >> 12 & 0xf, shift);
}

/// Whatever a guest sees, it cannot set a bit whose feature belongs to the host, or is not there.
fn control_registers(shown: impl Fn(u32, u32) -> [u32; 4]) {
    let leaf = |number| {
        let [eax, ebx, ecx, edx] = shown(number, 0);
        Registers { eax, ebx, ecx, edx }
    };
    let offered = Offered::by(&Leaves {
        leaf_1: leaf(1),
        leaf_7: leaf(7),
        leaf_8000_0001: leaf(0x8000_0001),
        leaf_8000_0008: leaf(0x8000_0008),
        leaf_8000_0021: leaf(0x8000_0021),
    });
    let state = State { cr0: 0x10, cr4: 0, efer: 1 << 12 };
    // VMXE, SMXE, LA57, PCIDE, CET, PKS, UINTR; SVME, LMSLE, MCOMMIT, INTWB, UAIE, AIBRSE.
    for bit in [12, 13, 14, 17, 23, 24, 25] {
        assert!(state.write_cr4(1 << bit, &offered).is_err(), "CR4 bit {bit}");
    }
    for bit in [12, 13, 17, 18, 20, 21] {
        assert!(state.write_efer(1 << bit, &offered).is_err(), "EFER bit {bit}");
    }
}

#[test]
fn no_guest_sees_a_feature_that_is_not_there_or_not_held() {
    target("cpuid", answer);
}
