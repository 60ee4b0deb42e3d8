//! Damaged files: any result is right, except a panic, or a write outside the guest's memory.

use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::{MIB, boot, bzimage, pvh_elf};
use crate::layout::ram_layout;
use crate::{Boot, GuestMemory, Mode, OutsideMemory, check, load, probe};

/// RAM that stores nothing and only checks addresses.
struct Checked {
    memory_bytes: u64,
}

impl GuestMemory for Checked {
    fn write(&mut self, gpa: addr::Gpa, bytes: &[u8]) -> Result<(), OutsideMemory> {
        let end = gpa.checked_add(bytes.len() as u64).expect("writes stay in the address space");
        let inside = ram_layout(self.memory_bytes).any(|ram| ram.start <= gpa && end <= ram.end());
        assert!(inside, "{gpa} to {end}");
        Ok(())
    }
}

/// Values that make sums overflow and comparisons fail, besides arbitrary ones.
fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        any::<u8>().prop_map(|value| vec![value]),
        prop_oneof![Just(0), Just(u32::MAX), Just(0x7fff_ffff), any::<u32>()]
            .prop_map(|value: u32| value.to_le_bytes().to_vec()),
        prop_oneof![Just(u64::MAX), Just(1 << 63), Just(3 << 30), Just(MIB - 1), Just(u64::MAX - 4095), any::<u64>()]
            .prop_map(|value: u64| value.to_le_bytes().to_vec()),
    ]
}

/// `file` with some values overwritten within its first `headers` bytes, and perhaps truncated.
fn damaged(file: Vec<u8>, headers: usize) -> impl Strategy<Value = Vec<u8>> {
    let length = file.len();
    let changes = prop::collection::vec((0..headers, value()), 1..6);
    (changes, prop_oneof![3 => Just(length), 1 => 0..length]).prop_map(move |(changes, cut)| {
        let mut file = file.clone();
        for (offset, value) in changes {
            file.iter_mut().skip(offset).zip(value).for_each(|(to, from)| *to = from);
        }
        file.truncate(cut);
        file
    })
}

/// Damages the fields of a bzImage that are read, one by one instead of by luck.
fn damaged_bzimage() -> impl Strategy<Value = Vec<u8>> {
    let fields = [0x1f1, 0x1f4, 0x201, 0x206, 0x20e, 0x211, 0x22c, 0x236, 0x238, 0x258, 0x260];
    let changes = prop::collection::vec((prop::sample::select(fields.to_vec()), value()), 1..4);
    changes.prop_map(|changes| {
        let mut file = bzimage();
        for (offset, value) in changes {
            crate::bytes::put(&mut file, offset, &value);
        }
        file
    })
}

fn survives(kernel: &[u8], initrd: &[u8], memory_bytes: u64) {
    let boot = Boot { initrd: Some(initrd), memory_bytes, ..boot(kernel) };
    let checked = check(&boot);
    let loaded = load(&boot, &mut Checked { memory_bytes });
    assert_eq!(checked.is_ok(), loaded.is_ok(), "check foretells load");
    if checked.is_ok() {
        assert!(probe(kernel).is_ok());
    }
    if let Ok(entry) = loaded {
        let start = match entry.mode {
            Mode::Long64 { rip, .. } => rip,
            Mode::Protected32 { eip, .. } => addr::Gpa(u64::from(eip)),
        };
        assert!(entry.kernel.contains(start));
        assert!(entry.kernel.end().0 <= memory_bytes);
        assert!(entry.initrd.is_none_or(|initrd| !initrd.overlaps(&entry.kernel)));
    }
}

fn memory_bytes() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(MIB), Just(64 * MIB), Just(3 << 30), Just(8 << 30), Just(u64::MAX), any::<u64>()]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_bzimages_are_refused_or_loaded_inside_the_ram(
        kernel in prop_oneof![damaged(bzimage(), 0x268), damaged_bzimage()],
        memory_bytes in memory_bytes(),
        initrd in prop::collection::vec(any::<u8>(), 0..9000),
    ) {
        survives(&kernel, &initrd, memory_bytes);
    }

    #[test]
    fn damaged_elf_files_are_refused_or_loaded_inside_the_ram(
        kernel in damaged(pvh_elf(), 0x180),
        memory_bytes in memory_bytes(),
        initrd in prop::collection::vec(any::<u8>(), 0..9000),
    ) {
        survives(&kernel, &initrd, memory_bytes);
    }

    #[test]
    fn noise_is_refused(noise in prop::collection::vec(any::<u8>(), 0..2048)) {
        survives(&noise, &[], 64 * MIB);
        let magic = [b"\x7fELF".as_slice(), &noise].concat();
        survives(&magic, &[], 64 * MIB);
    }
}
