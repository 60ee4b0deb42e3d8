use super::{Answer, Call, Mitigations, PowerState, decode};

const VCPUS: u32 = 40;

fn call(number: u32, arguments: [u64; 3]) -> Call {
    decode(0, &[number.into(), arguments[0], arguments[1], arguments[2]], VCPUS, Mitigations::NONE)
}

#[test]
fn versions_are_those_that_let_linux_use_the_convention() {
    assert_eq!(call(0x8400_0000, [0; 3]), Call::Answer(Answer(0x1_0001)));
    assert_eq!(call(0x8000_0000, [0; 3]), Call::Answer(Answer(0x1_0001)));
    assert_eq!(call(0x8400_0006, [0; 3]), Call::Answer(Answer(2)));
}

#[test]
fn errors_are_negative_in_either_width() {
    assert_eq!(Answer::NOT_SUPPORTED.0, u64::MAX);
    assert_eq!(Answer::INVALID_PARAMETERS.0, u64::MAX - 1);
    assert_eq!(Answer::ALREADY_ON.0, u64::MAX - 3);
    assert_eq!(Answer::ON_PENDING.0, u64::MAX - 4);
    assert_eq!(Answer::INVALID_ADDRESS.0, u64::MAX - 8);
}

#[test]
fn features_tell_what_decode_knows() {
    let numbers = (0x8400_0000..0x8400_0040).chain(0xc400_0000..0xc400_0040);
    let mut known = 0;
    for number in numbers {
        let claimed = call(0x8400_000a, [number.into(), 0, 0]) == Call::Answer(Answer::SUCCESS);
        assert_eq!(claimed, call(number, [0; 3]) != Call::Unknown, "{number:#x}");
        known += u32::from(claimed);
    }
    assert_eq!(known, 14);
    assert_eq!(call(0x8400_000a, [0x8000_0000, 0, 0]), Call::Answer(Answer::SUCCESS), "SMCCC_VERSION");
    assert_eq!(call(0x8000_0001, [0x8000_0001, 0, 0]), Call::Answer(Answer::SUCCESS));
    assert_eq!(call(0x8000_0001, [0x8000_8000, 0, 0]), Call::Answer(Answer::NOT_SUPPORTED));
}

#[test]
fn cpu_on_takes_64_bits_in_one_form_and_the_lower_halves_in_the_other() {
    let high = 0x1_0000_0000;
    let on = Call::CpuOn { vcpu: 17, entry: high | 0x8000_0000, context: u64::MAX };
    assert_eq!(call(0xc400_0003, [0x101, high | 0x8000_0000, u64::MAX]), on);
    let on = Call::CpuOn { vcpu: 17, entry: 0x8000_0000, context: 0xffff_ffff };
    assert_eq!(call(0x8400_0003, [high | 0x101, high | 0x8000_0000, u64::MAX]), on);
}

#[test]
fn cpu_on_of_what_cannot_be_is_refused() {
    for target in [0x208, 0x300, 0x10, 1 << 24, 1 << 32, 1 << 40, u64::MAX] {
        assert_eq!(call(0xc400_0003, [target, 0x1000, 0]), Call::Answer(Answer::INVALID_PARAMETERS), "{target:#x}");
    }
    assert!(matches!(call(0xc400_0003, [0x207, 0x1000, 0]), Call::CpuOn { vcpu: 39, .. }));
    for entry in [1, 2, 3, u64::MAX] {
        assert_eq!(call(0xc400_0003, [0, entry, 0]), Call::Answer(Answer::INVALID_ADDRESS));
    }
}

#[test]
fn affinity_info_is_about_single_cpus() {
    assert_eq!(call(0xc400_0004, [0x100, 0, 0]), Call::AffinityInfo { vcpu: 16 });
    assert_eq!(call(0x8400_0004, [1 << 32 | 1, 1 << 32, 0]), Call::AffinityInfo { vcpu: 1 });
    for (target, level) in [(0x100, 1), (0, 4), (0, u64::MAX), (0x300, 0)] {
        assert_eq!(call(0xc400_0004, [target, level, 0]), Call::Answer(Answer::INVALID_PARAMETERS));
    }
    let answers = [PowerState::On, PowerState::Off, PowerState::OnPending].map(|state| Answer::affinity_info(state).0);
    assert_eq!(answers, [0, 1, 2]);
}

#[test]
fn suspend_waits_unless_the_state_has_reserved_bits() {
    for state in [0, 0x1_0000, 0x0301_ffff] {
        assert_eq!(call(0xc400_0001, [state, 0x1000, 0]), Call::Suspend);
        assert_eq!(call(0x8400_0001, [state | 1 << 32, 0, 0]), Call::Suspend);
    }
    for bit in (17..24).chain(26..32) {
        assert_eq!(call(0xc400_0001, [1 << bit, 0, 0]), Call::Answer(Answer::INVALID_PARAMETERS), "bit {bit}");
    }
}

#[test]
fn machine_is_turned_off_and_reset() {
    assert_eq!(call(0x8400_0002, [0; 3]), Call::CpuOff);
    assert_eq!(call(0x8400_0008, [0; 3]), Call::SystemOff);
    assert_eq!(call(0x8400_0009, [0; 3]), Call::SystemReset);
    assert_eq!(call(0x8400_0012, [0; 3]), Call::SystemReset);
    assert_eq!(call(0xc400_0012, [0x8000_0000, 0, 0]), Call::Answer(Answer::INVALID_PARAMETERS));
}

#[test]
fn nonsense_is_unknown() {
    // Yielding calls, other owners, 64-bit forms of functions with one form only, random generator, vendor's.
    for number in [0, 1, 0x0400_0000, 0xc400_0000, 0xc400_0008, 0x8400_0050, 0x8600_ff01, 0xc500_0020, u32::MAX] {
        assert_eq!(call(number, [0; 3]), Call::Unknown, "{number:#x}");
    }
    assert_eq!(decode(1, &[0x8400_0008, 0, 0, 0], VCPUS, Mitigations::NONE), Call::Unknown, "another immediate");
    let dirty = [0xdead_beef_8400_0008, 0, 0, 0];
    assert_eq!(decode(0, &dirty, VCPUS, Mitigations::NONE), Call::SystemOff, "the number is in W0");
}

#[test]
fn mitigations_are_those_of_the_host_and_a_switch_stays_on() {
    const FUNCTIONS: [u64; 3] = [0x8000_8000, 0x8000_7fff, 0x8000_3fff];
    let call = |number, argument, answers| decode(0, &[number, argument, 0, 0], VCPUS, Mitigations(answers));
    for function in FUNCTIONS {
        assert_eq!(call(0x8000_0001, function, [-1; 3]), Call::Answer(Answer::NOT_SUPPORTED));
        assert_eq!(call(function, 0, [-1; 3]), Call::Unknown);
        assert_eq!(call(0x8000_0001, function, [1; 3]), Call::Answer(Answer(1)));
        assert_eq!(call(function, 0, [1; 3]), Call::Answer(Answer::SUCCESS));
        // Functions that firmware must not have are not passed on.
        assert_eq!(call(0x8000_0001, function, [7; 3]), Call::Answer(Answer::NOT_SUPPORTED));
    }
    let features = FUNCTIONS.map(|function| call(0x8000_0001, function, [0; 3]));
    assert_eq!(features, [Answer::SUCCESS, Answer(1), Answer::SUCCESS].map(Call::Answer));
    assert_eq!(call(FUNCTIONS[0], 0, [0; 3]), Call::Mitigate(0x8000_8000));
    assert_eq!(call(FUNCTIONS[1], 0, [0; 3]), Call::Answer(Answer::SUCCESS), "a guest does not turn it off");
    assert_eq!(call(FUNCTIONS[2], 0, [0; 3]), Call::Mitigate(0x8000_3fff));
}

#[test]
fn services_that_do_not_exist_say_so() {
    // Random numbers, the hypervisor's own, stolen time, identity of the chip, trusted firmware.
    for number in [0x8400_0050, 0xc400_0053, 0x8600_ff01, 0xc500_0020, 0x8000_0002, 0x8200_0000, 0xbf00_ff01] {
        assert_eq!(call(number, [0; 3]), Call::Unknown, "{number:#x}");
        assert_eq!(call(0x8000_0001, [number.into(), 0, 0]), Call::Answer(Answer::NOT_SUPPORTED));
    }
}

/// A call is for a vCPU that there is, and nothing but the registers that it has decides.
#[test]
fn any_call_is_decoded_or_unknown() {
    fuzz::target("psci", |bytes| {
        let mut input = fuzz::Input::new(bytes);
        let immediate = input.u16() & u16::from(input.byte() & 1);
        let vcpus = 1 + u32::from(input.u16()) % 512;
        let family = input.pick(&[0x8400_0000_u64, 0xc400_0000, 0x8000_0000, 0xc000_0000, 0]);
        let number = family | u64::from(input.u16()) & 0x7fff;
        let x = [number, input.u64(), input.u64(), input.u64()];
        let call = decode(immediate, &x, vcpus, Mitigations::NONE);
        // The upper half of a 32-bit call's registers means nothing.
        if number & 1 << 30 == 0 {
            assert_eq!(call, decode(immediate, &x.map(|word| word | !0xffff_ffff), vcpus, Mitigations::NONE));
        }
        match call {
            Call::CpuOn { vcpu, .. } | Call::AffinityInfo { vcpu, .. } => assert!(vcpu < vcpus, "{call:?}"),
            _ => assert!(immediate == 0 || call == Call::Unknown, "{call:?}"),
        }
    });
}
