mod any_file;

use std::io::Write as _;

use abi::payload::{
    ApicMode, Blob, CpuShare, DecodeCache, Devices, DirtyLogging, File as Kernel, HyperV, Populate, RemoteFlush, Role,
    Split, TagScheme, VmConfig,
};
use abi::saved::{Header, Part};

use super::{MEMORY_CHUNK, Source, Target, runs};

fn header() -> Header {
    let config = VmConfig {
        name: "guest".into(),
        vcpus: 2,
        memory_bytes: 64 << 20,
        kernel: Kernel::Blob(Blob { offset: 0, bytes: 5 }),
        initrd: None,
        cmdline: String::new(),
        role: Role::Guest,
        devices: Devices::None,
        apic: ApicMode::X2Apic,
        hyperv: HyperV::Flush,
        flush: RemoteFlush::Hypercall,
        tags: TagScheme::Epoch,
        tag_limit: None,
        decode_cache: DecodeCache::Bytes,
        populate: Populate::AtStart,
        dirty: DirtyLogging { split: Split::Lazy, source: None, splits_per_second: None },
        share: CpuShare::DEFAULT,
    };
    Header { hypervisor: "1".into(), arch: "x86_64".into(), processor: "p".into(), config, state_bytes: 3 }
}

/// A file with a state and two pieces of memory.
fn write(path: &std::path::Path) {
    let mut target = Target::create(path).expect("it can be made");
    target.raw(&abi::saved::begin(&header()).expect("it fits")).expect("is written");
    target.part(Part::State, &[1, 2, 3]).expect("is written");
    target.part(Part::Memory { gpa: 0x1000 }, &[7; 5000]).expect("is written");
    target.part(Part::Memory { gpa: 0x9000 }, &[8; 4096]).expect("is written");
    let parts = target.parts;
    target.part(Part::End { parts }, &[]).expect("is written");
    target.sync().expect("is written");
    target.finish().expect("has its name");
}

#[test]
fn file_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().expect("can be made");
    let path = folder.path().join("guest.vm");
    write(&path);
    let mut source = Source::open(&path).expect("it is one");
    assert_eq!(source.header, header());
    assert_eq!(source.check().expect("all is right"), 5000 + 4096);
    source.rewind().expect("it can");
    assert_eq!(source.next().expect("the state"), (Part::State, vec![1, 2, 3]));
    assert_eq!(source.next().expect("memory"), (Part::Memory { gpa: 0x1000 }, vec![7; 5000]));
    let names: Vec<_> =
        std::fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("one").file_name()).collect();
    assert_eq!(names, ["guest.vm"], "no temporary file is left");
}

#[test]
fn file_with_any_changed_byte_or_any_shorter_one_is_refused() {
    let folder = tempfile::tempdir().expect("can be made");
    let path = folder.path().join("guest.vm");
    write(&path);
    let good = std::fs::read(&path).expect("it is there");
    let refusal_of = |bytes: &[u8]| {
        let path = folder.path().join("bad.vm");
        std::fs::File::create(&path).and_then(|mut file| file.write_all(bytes)).expect("is written");
        let checked = Source::open(&path).and_then(|mut source| source.check());
        checked.map(|_| ()).expect_err("it is damaged").to_string()
    };
    for at in (0..good.len()).step_by(7).chain(0..300) {
        let mut bytes = good.clone();
        bytes[at] ^= 1 << (at % 8);
        let said = refusal_of(&bytes);
        assert!(
            ["is damaged", "no saved VM", "version", "cut short"].iter().any(|text| said.contains(text)),
            "{at}: {said}"
        );
    }
    for length in (0..good.len()).step_by(97).chain([good.len() - 1]) {
        let said = refusal_of(&good[..length]);
        assert!(["cut short", "no saved VM"].iter().any(|text| said.contains(text)), "{length}: {said}");
    }
    // Parts that change places have the right sums of their contents.
    let end = good.len() - 17;
    let (first, second) = (end - (4096 + 17) - (5000 + 17), end - (4096 + 17));
    let swapped = [&good[..first], &good[second..end], &good[first..second], &good[end..]].concat();
    assert!(refusal_of(&swapped).contains("sum of part 1"));
    let missing = [&good[..first], &good[second..]].concat();
    assert!(refusal_of(&missing).contains("is damaged"));
}

#[test]
fn memory_behind_the_last_address_is_refused() {
    let folder = tempfile::tempdir().expect("can be made");
    for (gpa, is_good) in [(u64::MAX - 4096, true), (u64::MAX - 4095, false), (u64::MAX, false)] {
        let path = folder.path().join("guest.vm");
        let mut target = Target::create(&path).expect("it can be made");
        target.raw(&abi::saved::begin(&header()).expect("it fits")).expect("is written");
        target.part(Part::State, &[1, 2, 3]).expect("is written");
        target.part(Part::Memory { gpa }, &[7; 4096]).expect("is written");
        let parts = target.parts;
        target.part(Part::End { parts }, &[]).expect("is written");
        target.sync().expect("is written");
        target.finish().expect("has its name");
        let checked = Source::open(&path).and_then(|mut source| source.check()).map_err(|failure| failure.to_string());
        assert_eq!(checked.is_ok(), is_good, "{gpa:#x}: {checked:?}");
        assert!(checked.err().is_none_or(|said| said.contains("means nothing")));
    }
}

#[test]
fn interrupted_save_leaves_nothing() {
    let folder = tempfile::tempdir().expect("can be made");
    let mut target = Target::create(&folder.path().join("guest.vm")).expect("it can be made");
    target.raw(&[1; 100]).expect("is written");
    drop(target);
    assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0);
}

#[test]
fn used_pages_are_read_once_each_in_pieces_that_fit() {
    let mut rng = fastrand::Rng::with_seed(1);
    for _ in 0..500 {
        let used: Vec<u8> = (0..64).map(|_| rng.u8(..) & if rng.bool() { 0xff } else { rng.u8(..) }).collect();
        let runs = runs(0x20_0000, &used);
        let mut at = 0;
        let mut seen = vec![0_u64; 512];
        for (gpa, bytes) in runs {
            assert!(gpa >= at && bytes > 0 && bytes as usize <= MEMORY_CHUNK);
            at = gpa + u64::from(bytes);
            (gpa..at).for_each(|byte| seen[usize::try_from((byte - 0x20_0000) / 4096).expect("small")] += 1);
        }
        let expected: Vec<u64> =
            (0..512).map(|page: usize| if used[page / 8] >> (page % 8) & 1 != 0 { 4096 } else { 0 }).collect();
        assert_eq!(seen, expected);
    }
}
