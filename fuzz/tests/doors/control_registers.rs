//! Writes of CR0, CR4 and EFER by a guest, and the instructions that write control registers, against another decoder.

use fuzz::{Input, target};
use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Register};
use x86_defs::control::{Leaves, Offered, State, Write, decode, with_status_word};
use x86_defs::cpuid::Registers;

/// Bits by the manual (APM vol. 2, 3.1.1, 3.1.3 and 3.1.7).
const PE: u64 = 1 << 0;
const ET: u64 = 1 << 4;
const NW: u64 = 1 << 29;
const CD: u64 = 1 << 30;
const PG: u64 = 1 << 31;
const CR0_EXISTING: u64 = 0xe005_003f;
const PAE: u64 = 1 << 5;
const LME: u64 = 1 << 8;
const LMA: u64 = 1 << 10;
const SVME: u64 = 1 << 12;
const EFER_IGNORED: u64 = 0xfe;

/// Each bit of CR4 and EFER, and where CPUID shows it: leaf, register (EAX to EDX), bit.
const CR4_SHOWN: [(u32, (usize, usize, u32)); 18] = [
    (0, (0, 3, 1)),
    (1, (0, 3, 1)),
    (2, (0, 3, 4)),
    (3, (0, 3, 2)),
    (4, (0, 3, 3)),
    (5, (0, 3, 6)),
    (7, (0, 3, 13)),
    (9, (0, 3, 24)),
    (10, (0, 3, 25)),
    (11, (1, 2, 2)),
    (12, (1, 2, 16)),
    (16, (1, 1, 0)),
    (17, (0, 2, 17)),
    (18, (0, 2, 26)),
    (20, (1, 1, 7)),
    (21, (1, 1, 20)),
    (22, (1, 2, 3)),
    (23, (1, 2, 7)),
];
/// Machine checks and RDPMC are always there.
const CR4_ALWAYS: u64 = 1 << 6 | 1 << 8;
const EFER_SHOWN: [(u32, (usize, usize, u32)); 9] = [
    (0, (2, 3, 11)),
    (8, (2, 3, 29)),
    (11, (2, 3, 20)),
    (14, (2, 3, 25)),
    (15, (2, 2, 17)),
    (17, (3, 1, 8)),
    (18, (3, 1, 13)),
    (20, (4, 0, 7)),
    (21, (4, 0, 8)),
];

fn shown(bits: &[(u32, (usize, usize, u32))], leaves: &[[u32; 4]; 5]) -> u64 {
    bits.iter().fold(0, |all, &(bit, (leaf, register, at))| all | u64::from(leaves[leaf][register] >> at & 1) << bit)
}

/// What VMRUN refuses in these registers (APM vol. 2, 15.5.1). A processor that runs the guest natively raises #GP
/// before it comes to that.
fn contradicts_itself(State { cr0, cr4, efer }: State) -> bool {
    let is_long = efer & LME != 0 && cr0 & PG != 0;
    cr0 >> 32 != 0
        || cr0 & (CD | NW) == NW
        || cr0 & (PG | PE) == PG
        || (is_long && cr4 & PAE == 0)
        || is_long != (efer & LMA != 0)
}

fn write(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let leaves: [[u32; 4]; 5] = std::array::from_fn(|_| match input.byte() {
        0..=0x7f => [u32::MAX; 4],
        0x80..=0xbf => [0; 4],
        _ => std::array::from_fn(|_| input.u32()),
    });
    let [leaf_1, leaf_7, leaf_8000_0001, leaf_8000_0008, leaf_8000_0021] =
        leaves.map(|[eax, ebx, ecx, edx]| Registers { eax, ebx, ecx, edx });
    let offered = Offered::by(&Leaves { leaf_1, leaf_7, leaf_8000_0001, leaf_8000_0008, leaf_8000_0021 });
    let (cr4_bits, efer_bits) = (CR4_ALWAYS | shown(&CR4_SHOWN, &leaves), shown(&EFER_SHOWN, &leaves));

    let mut state = State { cr0: ET | CD | NW, cr4: 0, efer: SVME };
    let mut in_long_code = false;
    while !input.is_empty() {
        let (what, which) = (input.byte(), input.byte());
        let old = match what % 3 {
            0 => state.cr0,
            1 => state.cr4,
            _ => state.efer & !SVME,
        };
        // One bit changes, or two neighbours, or all of them.
        let value = match which >> 6 {
            0 | 1 => old ^ 1 << (which & 63),
            2 => old ^ 3 << (which & 63),
            _ => input.u64(),
        };
        let after = match what % 3 {
            0 => state.write_cr0(value, in_long_code),
            1 => state.write_cr4(value, &offered),
            _ => state.write_efer(value, &offered),
        };
        // What the register would have, and what the guest may not have in it.
        let (naive, is_reserved) = match what % 3 {
            0 => (State { cr0: value & (CR0_EXISTING | !0xffff_ffff) | ET, ..state }, false),
            1 => (State { cr4: value, ..state }, value & !cr4_bits != 0),
            _ => {
                let kept = state.efer & (SVME | LMA);
                let value = value & !EFER_IGNORED;
                (State { efer: kept | value & efer_bits, ..state }, value & !(efer_bits | LMA) != 0)
            }
        };
        let (paged, long) = (state.cr0 & PG != 0, state.efer & LME != 0);
        let changes_paging = (naive.cr0 ^ state.cr0) & PG != 0;
        let moves_lme = (naive.efer ^ state.efer) & LME != 0 && paged;
        let lma = if naive.efer & LME != 0 && naive.cr0 & PG != 0 { LMA } else { 0 };
        let naive = State { efer: naive.efer & !LMA | lma, ..naive };
        let is_refused =
            is_reserved || contradicts_itself(naive) || moves_lme || (changes_paging && long && in_long_code);
        assert_eq!(
            after.ok(),
            (!is_refused).then_some(naive),
            "{state:x?}, {} = {value:#x}",
            ["CR0", "CR4", "EFER"][usize::from(what % 3)]
        );
        if let Ok(after) = after {
            assert!(state.makes_stale(after) || (state.cr0 ^ after.cr0) & PG == 0, "paging changes what is cached");
            state = after;
        }
        assert!(!contradicts_itself(state), "{state:x?}");
        if what & 0x80 != 0 {
            in_long_code = what & 0x40 != 0;
        }
        let word = with_status_word(state.cr0, value);
        assert_eq!((word ^ state.cr0) & !0xf, 0, "LMSW has four bits");
        assert!(word & PE >= state.cr0 & PE, "LMSW does not leave protected mode");
    }
    instruction(bytes);
}

/// An instruction, as another decoder sees it. What is not valid is not compared: there the processor raises #UD.
fn instruction(bytes: &[u8]) {
    for bitness in [64, 32] {
        let mut decoder = Decoder::new(bitness, bytes, DecoderOptions::NONE);
        let instruction = decoder.decode();
        let found = decode(&bytes[..bytes.len().min(15)], bitness == 64);
        if instruction.is_invalid() {
            continue;
        }
        assert_eq!(found, writes(&instruction, bytes), "{instruction:?} {bytes:02x?}");
    }
}

fn writes(instruction: &Instruction, bytes: &[u8]) -> Option<Write> {
    let length = u8::try_from(instruction.len()).expect("at most 15");
    let from = |register: Register| u8::try_from(register.number()).expect("at most 15");
    match instruction.code() {
        Code::Mov_cr_r32 | Code::Mov_cr_r64 => Some(Write::Move {
            control: from(instruction.op0_register()),
            from: from(instruction.op1_register()),
            length,
        }),
        Code::Lmsw_rm16 | Code::Lmsw_r32m16 | Code::Lmsw_r64m16 => {
            Some(if instruction.op0_register() == Register::None {
                let opcode = bytes.windows(2).position(|pair| pair == [0x0f, 0x01]).expect("it has an opcode");
                Write::StatusWordInMemory { opcode: u8::try_from(opcode).expect("at most 15") }
            } else {
                Write::StatusWord { from: from(instruction.op0_register()), length }
            })
        }
        _ => None,
    }
}

#[test]
fn any_write_of_a_control_register_is_as_the_manual_says() {
    target("control_registers", write);
}
