use super::*;

extern crate std;
use std::vec;
use std::vec::Vec;

const AVX: u64 = 1 << 2;
const KEYS: u64 = 1 << 9;
const STATES: u64 = X87 | SSE | AVX | KEYS;
const MASK: u32 = 0xffff;

/// AVX and protection keys, as on real processors. The others do not exist.
fn component(number: u32) -> Component {
    match number {
        2 => Component { bytes: 256, offset: 576, is_aligned: false },
        9 => Component { bytes: 8, offset: 2688, is_aligned: true },
        _ => Component::default(),
    }
}

const AREA: usize = 2696;

/// What makes an image a bad one, and its name.
type Spoil = (&'static str, fn(&mut Vec<u8>));

/// An area in which every component has a value of its own.
fn area() -> Vec<u8> {
    let mut area = vec![0; AREA];
    let mut random = fastrand::Rng::with_seed(7);
    for range in [0..24, X87_REGISTERS, XMM_REGISTERS, 576..832, 2688..2696] {
        area[range].iter_mut().for_each(|byte| *byte = random.u8(..));
    }
    area[MXCSR..MXCSR + 4].copy_from_slice(&0x1fa0_u32.to_le_bytes());
    put(&mut area, XSTATE_BV, STATES);
    area
}

fn image_of(area: &[u8]) -> Vec<u8> {
    let mut image = vec![0xaa; 4096];
    let bytes = compact(area, STATES, component, MASK, &mut image).expect("it fits");
    image.truncate(bytes);
    image
}

fn fresh() -> Vec<u8> {
    let mut area = vec![0; AREA];
    area[..2].copy_from_slice(&FCW_RESET.to_le_bytes());
    area[MXCSR..MXCSR + 4].copy_from_slice(&MXCSR_RESET.to_le_bytes());
    put(&mut area, XSTATE_BV, X87 | SSE);
    area
}

#[test]
fn image_comes_back_as_it_was() {
    let area = area();
    let image = image_of(&area);
    assert_eq!(image.len(), 832 + 8, "the keys are right behind AVX's part, which ends at a multiple of 64");
    assert_eq!(word(&image, XCOMP_BV), Some(COMPACTED | STATES));
    let mut back = fresh();
    assert_eq!(expand(&image, STATES, component, MASK, &mut back), Ok(()));
    assert_eq!(back, area);
}

#[test]
fn image_in_the_standard_format_is_taken_too() {
    let area = area();
    let mut back = fresh();
    assert_eq!(expand(&area, STATES, component, MASK, &mut back), Ok(()));
    assert_eq!(back, area);
}

#[test]
fn component_that_is_absent_becomes_initial() {
    let mut image = image_of(&area());
    image[..LEGACY_BYTES].fill(0);
    put(&mut image, XSTATE_BV, AVX);
    let mut back = area();
    assert_eq!(expand(&image, STATES, component, MASK, &mut back), Ok(()));
    assert_eq!(back[..32], fresh()[..32], "control words");
    assert!(back[X87_REGISTERS].iter().chain(&back[XMM_REGISTERS]).all(|&byte| byte == 0));
    assert_eq!(back[576..832], area()[576..832]);
    assert_eq!(word(&back, XSTATE_BV), Some(X87 | SSE | AVX), "the first part is told by its bytes");

    let mut image = image_of(&area());
    put(&mut image, XSTATE_BV, X87 | AVX);
    assert_eq!(expand(&image, STATES, component, MASK, &mut back), Ok(()));
    assert_eq!(back[X87_REGISTERS], area()[X87_REGISTERS]);
    assert!(back[XMM_REGISTERS].iter().all(|&byte| byte == 0), "one of the two bits is set, so the other one counts");
}

#[test]
fn first_part_counts_without_a_bit_because_qemus_model_of_a_cpu_may_have_no_xsave() {
    for (present, layout) in [(0, 0), (0, X87 | SSE), (AVX, STATES)] {
        let mut image = image_of(&area());
        put(&mut image, XSTATE_BV, present);
        put(&mut image, XCOMP_BV, COMPACTED | layout);
        let mut back = fresh();
        assert_eq!(expand(&image, STATES, component, MASK, &mut back), Ok(()));
        assert_eq!(back[..USED_LEGACY_BYTES], area()[..USED_LEGACY_BYTES], "{present:#x}, {layout:#x}");
        assert_eq!(word(&back, XSTATE_BV), Some(X87 | SSE | present));
    }
    // Of components that are not asked for, nothing counts.
    let mut image = image_of(&area());
    put(&mut image, XSTATE_BV, 0);
    put(&mut image, XCOMP_BV, COMPACTED);
    let mut back = fresh();
    put(&mut back, XSTATE_BV, 0);
    assert_eq!(expand(&image, AVX, component, MASK, &mut back), Ok(()));
    assert_eq!(word(&back, XSTATE_BV), Some(0));
}

#[test]
fn component_that_is_not_asked_for_stays() {
    let image = {
        let mut image = vec![0; 4096];
        let bytes = compact(&area(), X87 | SSE | AVX, component, MASK, &mut image).expect("it fits");
        image.truncate(bytes);
        image
    };
    assert_eq!(image.len(), 832);
    let mut back = fresh();
    put(&mut back, XSTATE_BV, X87 | SSE | KEYS);
    back[2688] = 0x55;
    assert_eq!(expand(&image, X87 | SSE | AVX, component, MASK, &mut back), Ok(()));
    assert_eq!(back[..832][..512], area()[..512]);
    assert_eq!((back[2688], word(&back, XSTATE_BV)), (0x55, Some(STATES)));
}

#[test]
fn control_word_of_sse_is_kept_though_its_registers_are_initial() {
    let mut area = area();
    put(&mut area, XSTATE_BV, X87);
    let image = image_of(&area);
    let mut back = fresh();
    assert_eq!(expand(&image, STATES, component, MASK, &mut back), Ok(()));
    assert_eq!(half_word(&back, MXCSR), Some(0x1fa0));
}

#[test]
fn equal_registers_give_equal_images() {
    // Never loaded; saved by a processor that marks all components; and by one that marks none that is initial.
    let never = fresh();
    let mut all = fresh();
    put(&mut all, XSTATE_BV, STATES);
    all[MXCSR + 4..MXCSR + 8].copy_from_slice(&MASK.to_le_bytes());
    let mut none = all.clone();
    put(&mut none, XSTATE_BV, 0);
    // What such a processor leaves in the area of an initial component does not count, and nor does software's part.
    none[600] = 0x77;
    none[470] = 0x77;
    assert_eq!(image_of(&never), image_of(&all));
    assert_eq!(image_of(&none), image_of(&all));
    // What was set is what is there.
    let mut back = area();
    assert_eq!(expand(&image_of(&never), STATES, component, MASK, &mut back), Ok(()));
    assert_eq!(image_of(&back), image_of(&never));
}

#[test]
fn image_that_xrstor_refuses_changes_nothing() {
    let good = image_of(&area());
    let bad: [Spoil; 9] = [
        ("a component beyond those of the image", |image| put(image, XSTATE_BV, STATES | 1 << 3)),
        ("a component that is not offered", |image| put(image, XCOMP_BV, COMPACTED | STATES | 1 << 3)),
        ("a supervisor's component", |image| put(image, XCOMP_BV, COMPACTED | STATES | 1 << 62)),
        ("neither format", |image| put(image, XCOMP_BV, STATES)),
        ("a reserved byte of the header", |image| image[528] = 1),
        ("the header's last byte", |image| image[575] = 1),
        ("a reserved bit of MXCSR", |image| image[MXCSR + 2] = 1),
        ("a part of a component", |image| image.truncate(835)),
        ("a part of the header", |image| image.truncate(530)),
    ];
    for (what, spoil) in bad {
        let mut image = good.clone();
        spoil(&mut image);
        let mut back = fresh();
        assert_eq!(expand(&image, STATES, component, MASK, &mut back), Err(Invalid), "{what}");
        assert_eq!(back, fresh(), "{what}");
    }
}

/// Whatever bytes come, what remains has a header that XRSTOR takes.
#[test]
fn random_images_leave_a_valid_header() {
    let mut random = fastrand::Rng::with_seed(0x5eed);
    let good = image_of(&area());
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut image = good.clone();
        for _ in 0..random.usize(..3) {
            let at = if random.bool() { random.usize(512..576) } else { random.usize(..image.len()) };
            image[at] ^= 1 << random.u8(..8);
        }
        image.truncate(if random.u8(..8) == 0 { random.usize(..image.len()) } else { image.len() });
        let mut back = fresh();
        match expand(&image, STATES, component, MASK, &mut back) {
            Ok(()) => taken += 1,
            Err(Invalid) => refused += 1,
        }
        assert!(word(&back, XSTATE_BV).is_some_and(|present| present & !STATES == 0));
        assert_eq!(word(&back, XCOMP_BV), Some(0));
        assert!(back[528..576].iter().all(|&byte| byte == 0));
        assert!(half_word(&back, MXCSR).is_some_and(|mxcsr| mxcsr & !MASK == 0));
    }
    assert!(taken > 1000 && refused > 1000);
}

#[test]
fn image_that_does_not_fit_is_not_written() {
    assert_eq!(compact(&area(), STATES, component, MASK, &mut [0; 839]), None);
}
