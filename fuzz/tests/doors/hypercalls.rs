//! Hypercalls of the Hyper-V interface: from the control word and the input to a call, or to a refusal.

use fuzz::{Input, target};
use hyperv_defs::call::FAST_WORDS;
use hyperv_defs::{Call, Code, Control, Offered, Scope, check, fast_input};

const VPS: u32 = 512;

fn call(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let offered = Offered::from_bits_truncate(input.u16());
    // Mostly a known code, which 16 bits hardly hit.
    let code = input.byte();
    let mut control = Control(input.u64());
    if code < 0xf0 {
        control.0 = control.0 & !0xffff | Control::new(Code::ALL[usize::from(code) % Code::ALL.len()]).0 & 0xffff;
    }
    let Ok(checked) = check(control, offered) else { return };
    let words: [u64; FAST_WORDS] = std::array::from_fn(|_| input.u64());
    let registers = fast_input(&words);
    let memory = [&registers[..], input.rest()].concat();
    let given = if checked.is_fast() { &registers[..] } else { &memory[..] };

    let parsed = checked.parse(given);
    // Exactly the input decides: not what is behind it, and not less than all of it.
    let length = checked.input_bytes();
    let behind = [&given[..length.min(given.len())], &[0xff; 64]].concat();
    if length <= given.len() {
        assert_eq!(format!("{parsed:?}"), format!("{:?}", checked.parse(&behind)));
    }
    if let Some(shorter) = length.checked_sub(1) {
        assert!(checked.parse(&given[..shorter.min(given.len())]).is_err(), "a byte is missing");
    }

    let targets = match &parsed {
        Ok(Call::Flush(flush)) => {
            if let Scope::List(ranges) = &flush.scope {
                let left = usize::from(control.rep_count() - control.rep_start());
                assert_eq!(ranges.clone().count(), left, "an element for each repetition");
            }
            flush.targets
        }
        Ok(Call::Ipi(ipi)) => ipi.targets,
        _ => return,
    };
    // The walk by banks finds those that the question for each one finds.
    let walked: Vec<u32> = targets.indices(VPS).collect();
    let asked: Vec<u32> = (0..VPS).filter(|vp| targets.contains(*vp)).collect();
    assert_eq!(walked, asked);
}

#[test]
fn any_hypercall_is_a_call_or_a_refusal_by_exactly_its_input() {
    target("hypercalls", call);
}
