//! Arm's system registers: the syndromes of trapped accesses, and the ID registers that guests read.

use aarch64_defs::features::IdRegisters;
use aarch64_defs::syndrome::{DataAccess, Limit, Rest, Syndrome, SystemRegister, Wait};
use fuzz::{Input, target};

/// Bits `high` to `low`, as the manual writes them.
fn bits(word: u64, high: u32, low: u32) -> u64 {
    (low..=high).filter(|bit| word >> bit & 1 != 0).fold(0, |bits, bit| bits | 1 << (bit - low))
}

fn read(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let count = input.byte() % 4;
    (0..count).for_each(|_| syndrome(input.u64(), input.u64(), input.u64()));
    id_registers(input.rest());
}

/// ESR_EL2 (Arm ARM DDI 0487, D24.2.40), and a wait at the count `now` whose time is `end`.
fn syndrome(word: u64, now: u64, end: u64) {
    let syndrome = Syndrome(word);
    assert_eq!(u64::from(syndrome.class()), bits(word, 31, 26));
    assert_eq!(syndrome.is_long(), bits(word, 25, 25) == 1);

    // MSR, MRS and system instructions: Op0, Op2, Op1, CRn, Rt, CRm, Direction.
    let access = syndrome.system();
    let (op0, op1, crn, crm, op2) = access.register.parts();
    let encoding = [op0, op2, op1, crn, access.general, crm].map(u64::from);
    let fields = [(21, 20), (19, 17), (16, 14), (13, 10), (9, 5), (4, 1)];
    assert_eq!(encoding, fields.map(|(high, low)| bits(word, high, low)));
    assert_eq!(access.is_read, bits(word, 0, 0) == 1);
    assert_eq!(SystemRegister::new(op0, op1, crn, crm, op2), access.register, "parts and whole");

    // Data aborts: ISV, SAS, SSE, SRT, SF, WnR, S1PTW, FnV, DFSC.
    let expected = (bits(word, 24, 24) == 1).then(|| DataAccess {
        bytes: 1 << bits(word, 23, 22),
        is_signed: bits(word, 21, 21) == 1,
        general: u8::try_from(bits(word, 20, 16)).expect("five bits"),
        is_64_bit: bits(word, 15, 15) == 1,
        is_write: bits(word, 6, 6) == 1,
    });
    assert_eq!(syndrome.data_access(), expected);
    assert_eq!(syndrome.is_write(), bits(word, 6, 6) == 1);
    assert_eq!(syndrome.is_table_walk(), bits(word, 7, 7) == 1);
    assert_eq!(syndrome.has_no_address(), bits(word, 10, 10) == 1);
    let kind = match bits(word, 5, 0) {
        0b00_0100..=0b00_0111 => "Translation",
        0b00_1000..=0b00_1011 => "AccessFlag",
        0b00_1100..=0b00_1111 => "Permission",
        0b11_0000 => "TlbConflict",
        _ => "Other",
    };
    assert_eq!(format!("{:?}", syndrome.fault()), kind);

    // Waits: TI, RV, RN.
    let Wait { is_event, limit } = syndrome.wait();
    let (has_time, is_known) = (bits(word, 1, 1) == 1, bits(word, 2, 2) == 1);
    assert_eq!(is_event, bits(word, 0, 0) == 1);
    match limit {
        Limit::None => assert!(!has_time),
        Limit::Unknown => assert!(has_time && !is_known),
        Limit::General(number) => assert!(has_time && is_known && u64::from(number) == bits(word, 9, 5)),
    }
    let rest = syndrome.wait().rest(now, |_| end);
    match rest {
        Rest::Yield => assert!(is_event),
        Rest::Sleep(None) => assert!(!is_event && !has_time, "nothing but an interrupt ends it"),
        Rest::Sleep(Some(until)) => assert!(!is_event && until == end && now < end),
        Rest::Over => assert!(!is_event && has_time && (now >= end || !is_known)),
    }
}

/// Features that guests have: at most what each processor has, and the same on all of them.
fn id_registers(bytes: &[u8]) {
    let at = |from: usize| {
        move |crm: u8, op2: u8| {
            let at = from + (usize::from(crm) * 8 + usize::from(op2)) * 8;
            u64::from_le_bytes(std::array::from_fn(|byte| bytes.get(at + byte).copied().unwrap_or(0)))
        }
    };
    let hosts = [at(0), at(1), at(64)];
    let [a, b, c] = hosts.map(IdRegisters::offered);
    for (offered, host) in [a, b, c].iter().zip(hosts) {
        each_field(|crm, op2, shift| {
            let (shown, there) = (field(offered.get(crm, op2), shift), field(host(crm, op2), shift));
            let least = kind(crm, op2, shift);
            assert!(least.is_at_most(shown, there), "S3_0_C0_C{crm}_{op2} bit {shift}: {shown:#x}, not {there:#x}");
        });
        // Features that need what the hypervisor does not do: EL2, RAS, SVE, MPAM, AMU; MTE, SME; PMU, SPE; NV.
        let never: [(u8, u8, &[u32]); 6] = [
            (4, 0, &[8, 12, 28, 32, 36, 40, 44, 52]),
            (4, 1, &[8, 12, 16, 24, 32, 36, 40, 44, 48, 60]),
            (4, 4, &[0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 52, 56, 60]),
            (5, 0, &[4, 8, 32, 40, 44, 52]),
            (7, 1, &[4, 8, 16, 24, 28, 32, 40, 52, 56]),
            (7, 2, &[12, 24, 40, 56]),
        ];
        for (crm, op2, shifts) in never {
            for shift in shifts {
                assert_eq!(field(offered.get(crm, op2), *shift), 0, "S3_0_C0_C{crm}_{op2} bit {shift}");
            }
        }
    }
    // What guests have on two kinds of processors does not depend on which one started first, and is offered by both.
    assert_eq!(a.common(&b), b.common(&a));
    assert_eq!(a.common(&b).common(&c), a.common(&b.common(&c)));
    assert_eq!(a.common(&a), a);
    let both = a.common(&b);
    assert_eq!(both.common(&a), both);
    each_field(|crm, op2, shift| {
        for one in [&a, &b] {
            let (shown, there) = (field(both.get(crm, op2), shift), field(one.get(crm, op2), shift));
            assert!(kind(crm, op2, shift).is_at_most(shown, there), "S3_0_C0_C{crm}_{op2} bit {shift}");
        }
    });
}

fn each_field(act: impl Fn(u8, u8, u32)) {
    for place in 8..64_u8 {
        (0..64).step_by(4).for_each(|shift| act(place / 8, place % 8, shift));
    }
}

fn field(word: u64, shift: u32) -> u64 {
    word >> shift & 0xf
}

/// How the values of a field are ordered.
enum Order {
    /// More is more.
    Unsigned,
    /// 0xf is less than zero: AdvSIMD and FP, the granules of 4 and 64 KiB.
    Signed,
    /// A value that does not depend on the processor: it says that something is absent, or that another field counts.
    Fixed(u64),
}

fn kind(crm: u8, op2: u8, shift: u32) -> Order {
    match (crm, op2, shift) {
        (4, 0, 16 | 20) | (7, 0, 24 | 28) => Order::Signed,
        (5, 0, 36) => Order::Fixed(0xf),
        (7, 0, 32 | 36 | 40) => Order::Fixed(1),
        _ => Order::Unsigned,
    }
}

impl Order {
    fn is_at_most(&self, shown: u64, there: u64) -> bool {
        let signed = |field: u64| if field < 8 { field.cast_signed() } else { field.cast_signed() - 16 };
        match self {
            Self::Unsigned => shown <= there,
            Self::Signed => signed(shown) <= signed(there),
            Self::Fixed(value) => shown == *value,
        }
    }
}

#[test]
fn any_syndrome_is_read_as_the_manual_writes_it_and_no_feature_is_offered_that_is_not_there() {
    target("system_registers", read);
}
