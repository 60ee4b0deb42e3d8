//! Would the comparison find a wrong emulator? These tests alter the emulator's results.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod here {
    use x86_emulate::{Exception, Form, Instruction, MAX_LENGTH, Mode, Operation, Repeat, Vendor, Width, decode};
    use x86_oracle::{Alteration, Campaign, Case, Difference, Ended, Processor, Step, WINDOW, WINDOW_BYTES, compare};

    const CF: u64 = 1 << 0;
    const PF: u64 = 1 << 2;
    const AF: u64 = 1 << 4;
    const ZF: u64 = 1 << 6;
    const SF: u64 = 1 << 7;
    const DF: u64 = 1 << 10;
    const OF: u64 = 1 << 11;
    const RAX: usize = 0;
    const RCX: usize = 1;
    const RSP: usize = 4;
    const RSI: usize = 6;

    /// Something that an emulator could get wrong, as a change to a right answer.
    struct Mistake {
        what: &'static str,
        make: Alteration<'static>,
    }

    const MISTAKES: [Mistake; 20] = [
        Mistake {
            what: "32 bits do not clear the upper half of a register",
            make: &|case, instruction, ended, _| {
                let loads = instruction.operation == Operation::Move && instruction.form == Form::FromMemory;
                if loads && instruction.width == Width::Dword && ended.exception.is_none() {
                    let number = usize::from(instruction.register.number);
                    ended.gprs[number] |= case.gprs[number] & !0xffff_ffff;
                }
            },
        },
        Mistake {
            what: "16 bits clear the upper part of a register",
            make: &|_, instruction, ended, _| {
                let loads = instruction.operation == Operation::Move && instruction.form == Form::FromMemory;
                if loads && instruction.width == Width::Word && ended.exception.is_none() {
                    ended.gprs[usize::from(instruction.register.number)] &= 0xffff;
                }
            },
        },
        Mistake {
            what: "AH is taken for AL",
            make: &|case, instruction, ended, _| {
                let loads = instruction.operation == Operation::Move && instruction.form == Form::FromMemory;
                if loads && instruction.register.high {
                    let number = usize::from(instruction.register.number);
                    let loaded = ended.gprs[number] >> 8 & 0xff;
                    ended.gprs[number] = case.gprs[number] & !0xff | loaded;
                }
            },
        },
        Mistake {
            what: "MOVSX extends with zeros",
            make: &|_, instruction, ended, _| {
                if instruction.operation == Operation::MoveSignExtended {
                    let number = usize::from(instruction.register.number);
                    ended.gprs[number] &= u64::MAX >> (64 - instruction.width.bits());
                }
            },
        },
        Mistake {
            what: "INC clears CF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::Increment, ended, CF),
        },
        Mistake {
            what: "ADC clears AF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::AddWithCarry, ended, AF),
        },
        Mistake {
            what: "SBB clears OF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::SubtractWithBorrow, ended, OF),
        },
        Mistake {
            what: "NEG clears CF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::Negate, ended, CF),
        },
        Mistake {
            what: "XOR clears PF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::Xor, ended, PF),
        },
        Mistake {
            what: "BT clears ZF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::BitTest, ended, ZF),
        },
        Mistake {
            what: "CMPXCHG8B clears SF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::CompareExchangePair, ended, SF),
        },
        Mistake {
            what: "CMPXCHG leaves the accumulator",
            make: &|case, instruction, ended, _| {
                if instruction.operation == Operation::CompareExchange {
                    ended.gprs[RAX] = case.gprs[RAX];
                }
            },
        },
        Mistake {
            what: "LODS never goes down",
            make: &|case, instruction, ended, _| {
                if instruction.operation == Operation::LoadString && case.flags & DF != 0 {
                    let way = case.gprs[RSI].wrapping_sub(ended.gprs[RSI]);
                    ended.gprs[RSI] = case.gprs[RSI].wrapping_add(way);
                }
            },
        },
        Mistake {
            what: "a repeated STOS leaves the count",
            make: &|case, instruction, ended, _| {
                if instruction.operation == Operation::StoreString && instruction.repeat != Repeat::Never {
                    ended.gprs[RCX] = case.gprs[RCX];
                }
            },
        },
        Mistake {
            what: "SCAS clears DF",
            make: &|_, instruction, ended, _| unless(instruction, Operation::ScanString, ended, DF),
        },
        Mistake {
            what: "PUSH leaves the stack pointer",
            make: &|case, instruction, ended, _| {
                if instruction.operation == Operation::Push {
                    ended.gprs[RSP] = case.gprs[RSP];
                }
            },
        },
        Mistake {
            what: "the first byte of the window changes",
            make: &|_, _, _, window| {
                if let Some(byte) = window.first_mut() {
                    *byte ^= 1;
                }
            },
        },
        Mistake {
            what: "page faults are never writes",
            make: &|_, _, ended, _| {
                if let Some(exception) = &mut ended.exception
                    && exception.vector == 14
                {
                    exception.error_code &= !2;
                }
            },
        },
        Mistake {
            what: "the stack segment causes #GP",
            make: &|_, _, ended, _| {
                if let Some(exception) = &mut ended.exception
                    && exception.vector == 12
                {
                    exception.vector = 13;
                }
            },
        },
        Mistake {
            what: "CR2 has the start of the operand, not of its part on the page",
            make: &|_, _, ended, _| {
                if let Some(Exception { cr2: Some(address), .. }) = &mut ended.exception
                    && *address % 0x1000 == 0
                {
                    *address -= 1;
                }
            },
        },
    ];

    /// Clears a flag after an operation.
    fn unless(instruction: &Instruction, operation: Operation, ended: &mut Ended, flag: u64) {
        if instruction.operation == operation {
            ended.flags &= !flag;
        }
    }

    #[test]
    fn an_emulator_that_makes_a_mistake_is_found_out() {
        const MOST_STATES: u32 = 20_000;
        let processor = match Processor::take() {
            Ok(processor) => processor,
            Err(why) => return println!("skipped: the processor cannot be asked: {why}"),
        };
        let mut campaign = Campaign::new(processor, 5);
        for Mistake { what, make } in MISTAKES {
            // Those of segments show outside 64-bit mode, if at all.
            if what.contains("segment") && !campaign.has_segments() {
                continue;
            }
            let mut states = 0;
            let found = loop {
                match campaign.step(Some(make)) {
                    Step::Different(mismatch) => break Some(mismatch),
                    Step::Same => states += 1,
                    Step::Skipped | Step::Refused(..) => {}
                }
                if states == MOST_STATES {
                    break None;
                }
            };
            let mismatch = found.unwrap_or_else(|| panic!("not found out in {MOST_STATES} states: {what}"));
            println!("{what}: after {states} states, by {:?}", mismatch.differences);
            assert!(!mismatch.to_string().is_empty());
        }
    }

    /// Of an `add [rbx], eax` in 64-bit mode that went well.
    fn sample(code: &[u8]) -> (Case, Instruction, Ended) {
        let mut bytes = [0; MAX_LENGTH];
        bytes[..code.len()].copy_from_slice(code);
        let case = Case {
            mode: Mode::Bits64,
            bytes,
            length: u8::try_from(code.len()).expect("short"),
            place: 0,
            gprs: std::array::from_fn(|number| 0x1_0000_0000 + number as u64),
            flags: 0,
            segments: [0; 6],
            bases: [0; 2],
        };
        let instruction = decode(Mode::Bits64, code).expect("an instruction");
        let ended = Ended { gprs: case.gprs, rip: 0x1000, flags: 0x202, exception: None };
        (case, instruction, ended)
    }

    #[test]
    fn each_bit_that_is_defined_is_compared() {
        let (case, instruction, ended) = sample(&[0x01, 0x03]);
        let window = vec![0; WINDOW_BYTES];
        let against = |other: &Ended| compare(Vendor::Amd, &case, &instruction, (&ended, &window), (other, &window));
        assert_eq!(against(&ended), []);

        for number in 0..16 {
            for bit in 0..64 {
                let mut other = ended.clone();
                other.gprs[number] ^= 1 << bit;
                assert_eq!(against(&other), [Difference::Register(number, ended.gprs[number], other.gprs[number])]);
            }
        }
        for flag in [CF, PF, AF, ZF, SF, DF, OF] {
            let other = Ended { flags: ended.flags ^ flag, ..ended.clone() };
            assert_eq!(against(&other), [Difference::Flags(0, flag)]);
        }
        let other = Ended { rip: 0x1001, ..ended.clone() };
        assert_eq!(against(&other), [Difference::Rip(0x1000, 0x1001)]);
        let exception = Some(Exception { vector: 13, error_code: 0, cr2: None });
        let other = Ended { exception, ..ended.clone() };
        assert_eq!(against(&other), [Difference::Exception(None, exception)]);

        for at in [0, 1, 0x1fff, WINDOW_BYTES - 1] {
            let mut changed = window.clone();
            changed[at] = 1;
            let found = compare(Vendor::Amd, &case, &instruction, (&ended, &window), (&ended, &changed));
            assert_eq!(found, [Difference::Memory(WINDOW + at as u64, 0, 1)]);
        }
    }

    #[test]
    fn only_flags_that_are_undefined_are_not_compared() {
        let window = vec![0; WINDOW_BYTES];
        // xor [rbx], eax; bt [rbx], eax; cmpxchg8b [rbx]
        let codes: [(&[u8], u64); 3] =
            [(&[0x31, 0x03], AF), (&[0x0f, 0xa3, 0x03], OF | SF | AF | PF), (&[0x0f, 0xc7, 0x0b], 0)];
        for (code, undefined) in codes {
            let (case, instruction, ended) = sample(code);
            for flag in [CF, PF, AF, ZF, SF, DF, OF] {
                let other = Ended { flags: ended.flags ^ flag, ..ended.clone() };
                let found = compare(Vendor::Amd, &case, &instruction, (&ended, &window), (&other, &window));
                assert_eq!(found.is_empty(), undefined & flag != 0, "{:?}, flag {flag:#x}", instruction.operation);
            }
        }
    }

    #[test]
    fn upper_halves_count_except_where_a_processor_may_clear_them() {
        let window = vec![0; WINDOW_BYTES];
        let lost_on = |vendor, code: &[u8], count: u64, exception: Option<Exception>| {
            let (mut case, instruction, mut emulated) = sample(code);
            case.gprs[RCX] = 0xf_0000_0000 | count;
            emulated.gprs = case.gprs;
            emulated.exception = exception;
            let mut native = emulated.clone();
            native.gprs[RCX] &= 0xffff_ffff;
            compare(vendor, &case, &instruction, (&native, &window), (&emulated, &window)).is_empty()
        };
        let lost = |code, count, exception| {
            assert!(!lost_on(Vendor::Amd, code, count, exception), "only Intel's do");
            lost_on(Vendor::Intel, code, count, exception)
        };
        let fault = Some(Exception { vector: 14, error_code: 6, cr2: Some(0) });
        // rep stosb with 32-bit addresses, and with 64-bit ones.
        assert!(lost(&[0x67, 0xf3, 0xaa], 0, None));
        assert!(lost(&[0x67, 0xf3, 0xaa], 1, fault));
        assert!(!lost(&[0x67, 0xf3, 0xaa], 1, None));
        assert!(!lost(&[0xf3, 0xaa], 0, None));
        assert!(!lost(&[0x67, 0xaa], 0, None));
    }
}
