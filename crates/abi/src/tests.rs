use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::{any, prop, proptest};

use crate::control::{self, Command, FRAME_LIMIT, FrameError, Line, MEMORY_CHUNK, Message, Receiver, Request};
use crate::counters::{ExitReason, VcpuCounters};
use crate::payload::{
    ApicMode, Blob, Builder, CpuShare, DecodeCache, Devices, DirtyLogging, DirtySource, File, HyperV, Payload,
    PayloadError, PciFunction, Populate, RemoteFlush, Role, Split, TagScheme, VmConfig,
};
use crate::setting::Setting;
use crate::vcpu_counters;

fn vm(kernel: Blob, initrd: Option<Blob>) -> VmConfig {
    VmConfig {
        name: "test".to_string(),
        vcpus: 4,
        memory_bytes: 512 << 20,
        kernel: File::Blob(kernel),
        initrd: initrd.map(File::Blob),
        cmdline: "console=ttyS0".to_string(),
        role: Role::Guest,
        devices: Devices::None,
        apic: ApicMode::X2Apic,
        hyperv: HyperV::FlushIpi,
        flush: RemoteFlush::Hypercall,
        tags: TagScheme::Epoch,
        tag_limit: Some(63),
        decode_cache: DecodeCache::Bytes,
        populate: Populate::Touch4K,
        dirty: DirtyLogging { split: Split::Eager, source: Some(DirtySource::Hardware), splits_per_second: Some(100) },
        share: CpuShare::DEFAULT,
    }
}

fn payload_with(kernel: &[u8], initrd: &[u8]) -> Vec<u8> {
    let mut builder = Builder::new(true);
    let kernel = builder.add_blob(kernel);
    let initrd = builder.add_blob(initrd);
    builder.add_vm(vm(kernel, Some(initrd)));
    builder.finish().expect("encodes")
}

#[test]
fn payload_gives_back_what_was_put_in() {
    let bytes = payload_with(b"kernel", &[7; 5000]);
    let payload = Payload::read(&bytes).expect("reads");
    let vm = &payload.manifest.vms[0];
    let [kernel, initrd] = [Some(&vm.kernel), vm.initrd.as_ref()].map(|file| file.and_then(File::blob));
    assert_eq!(payload.blob(kernel.expect("was added")), b"kernel");
    assert_eq!(payload.blob(initrd.expect("was added")), &[7; 5000]);
    assert_eq!(kernel.map(|blob| blob.offset % 4096), Some(0));
}

#[test]
fn payload_names_functions_of_a_vm_as_the_machine_numbers_them() {
    let functions: Vec<PciFunction> = [0, 0x20, 0x3aff, u16::MAX].map(PciFunction::at).to_vec();
    assert_eq!(functions.iter().map(|function| function.index()).collect::<Vec<_>>(), [0, 0x20, 0x3aff, u16::MAX]);
    assert_eq!(functions.iter().map(ToString::to_string).collect::<Vec<_>>()[1..3], ["0000:00:04.0", "0000:3a:1f.7"]);
    let mut builder = Builder::new(true);
    let kernel = builder.add_blob(b"kernel");
    builder.add_vm(VmConfig { devices: Devices::These(functions.clone()), ..vm(kernel, None) });
    let bytes = builder.finish().expect("encodes");
    assert_eq!(Payload::read(&bytes).expect("reads").manifest.vms[0].devices, Devices::These(functions));
}

#[test]
fn payload_names_modules_that_are_not_in_it() {
    let mut builder = Builder::new(true);
    let initrd = builder.add_blob(b"initrd");
    let module = File::Module("kernel".to_string());
    builder.add_vm(VmConfig { kernel: module.clone(), ..vm(initrd, Some(initrd)) });
    let bytes = builder.finish().expect("encodes");
    let vm = &Payload::read(&bytes).expect("reads").manifest.vms[0];
    assert_eq!(vm.kernel, module);
    assert_eq!(vm.initrd.as_ref().and_then(File::blob).map(|blob| blob.bytes), Some(6));
}

#[test]
fn payload_cut_anywhere_is_refused_without_panic() {
    let bytes = payload_with(b"kernel", &[7; 100]);
    let needed = bytes.len() - (4096 - 100);
    for end in 0..needed {
        assert!(Payload::read(&bytes[..end]).is_err(), "accepted when cut at {end}");
    }
}

#[test]
fn payload_of_another_version_is_named() {
    let mut bytes = payload_with(b"k", b"i");
    bytes[8] = 99;
    assert_eq!(Payload::read(&bytes).err(), Some(PayloadError::Version(99)));
}

#[test]
fn blob_whose_end_wraps_around_is_refused() {
    let mut builder = Builder::new(true);
    builder.add_vm(vm(Blob { offset: 8, bytes: u64::MAX - 4 }, None));
    let bytes = builder.finish().expect("encodes");
    assert_eq!(Payload::read(&bytes).err(), Some(PayloadError::BlobOutside(0)));
}

#[test]
fn frame_survives_the_line() {
    let request = Request { id: 7, command: Command::Input { vm: 0, line: Line::Console, bytes: vec![0, 1, 0, 255] } };
    let frame = control::encode(&request).expect("fits");
    assert_eq!(frame.iter().position(|&b| b == 0), Some(frame.len() - 1));
    assert_eq!(received::<Request>(&frame), vec![Ok(request)]);
}

#[test]
fn receiver_finds_the_next_frame_after_garbage() {
    let request = Request { id: 1, command: Command::List { first: 0 } };
    let mut stream = vec![3, 1, 4, 1, 5, 0];
    stream.extend(vec![9; 3 * FRAME_LIMIT]);
    stream.push(0);
    stream.extend(control::encode(&request).expect("fits"));
    let got = received::<Request>(&stream);
    assert!(matches!(got[0], Err(FrameError::Malformed | FrameError::Damaged)));
    assert_eq!(got[1], Err(FrameError::TooLong));
    assert_eq!(got[2], Ok(request));
}

#[test]
fn any_flipped_bit_is_noticed() {
    let request = Request { id: 5, command: Command::Stop { vm: 3 } };
    let frame = control::encode(&request).expect("fits");
    for bit in 0..(frame.len() - 1) * 8 {
        let mut damaged = frame.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(received::<Request>(&damaged).iter().all(Result::is_err), "bit {bit} went unnoticed");
    }
}

#[test]
fn frame_of_another_version_is_named() {
    let mut plain = vec![42];
    plain.extend(crc::Crc::<u32>::new(&crc::CRC_32_ISO_HDLC).checksum(&[42]).to_le_bytes());
    assert_eq!(control::decode::<Request>(&cobs::encode_vec(&plain)), Err(FrameError::Version(42)));
}

#[test]
fn largest_messages_fit_a_frame() {
    macro_rules! largest {
        ($($(#[$doc:meta])* $name:ident,)*) => {
            VcpuCounters { exits: [u64::MAX; ExitReason::COUNT], $($name: u64::MAX,)* }
        };
    }
    let counters = vcpu_counters!(largest);
    let vcpus = vec![counters; control::STATS_CHUNK];
    let stats = control::Answer::Stats { vm: u32::MAX, first: u32::MAX, at_ns: u64::MAX, vcpus };
    control::encode(&Message::Reply { id: u32::MAX, result: Ok(stats) }).expect("fits");

    let info = control::VmInfo {
        number: u32::MAX,
        name: "x".repeat(64),
        vcpus: u32::MAX,
        memory_bytes: u64::MAX,
        state: control::VmState::Stopped(control::StopReason::HardwareError),
    };
    let vms = control::Answer::Vms(vec![info; control::VMS_CHUNK]);
    control::encode(&Message::Reply { id: u32::MAX, result: Ok(vms) }).expect("fits");

    let why = "x".repeat(control::WHY_LIMIT);
    let answer = control::Answer::NotCreated { about: control::About::Kernel, why };
    control::encode(&Message::Reply { id: u32::MAX, result: Ok(answer) }).expect("fits");

    for byte in [0, 255] {
        let (upload, offset, bytes) = (u32::MAX, u64::MAX, vec![byte; control::UPLOAD_CHUNK]);
        let command = Command::CreateData { upload, part: control::Part::Initrd, offset, bytes };
        control::encode(&Request { id: u32::MAX, command }).expect("fits");
    }

    let bytes = vec![255; control::CONSOLE_CHUNK];
    control::encode(&Message::Console { vm: u32::MAX, line: Line::Agent, at_ns: u64::MAX, bytes }).expect("fits");
}

proptest! {
    #[test]
    fn no_byte_stream_makes_the_receiver_panic(stream in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = received::<Request>(&stream);
        let _ = received::<Message>(&stream);
        let _ = Payload::read(&stream);
    }
}

fn received<T: serde::de::DeserializeOwned>(stream: &[u8]) -> Vec<Result<T, FrameError>> {
    let mut receiver = Receiver::default();
    stream.iter().filter_map(|&byte| receiver.push(byte)).collect()
}

#[test]
fn status_is_told_by_the_last_words_and_by_nothing_else() {
    use crate::exit_code::{PANIC, last_words, qemu_status, told_status};

    let line = alloc::format!("[    1.234567] cpu0 end   {}\r", last_words(PANIC));
    assert_eq!(told_status(&line), Some(qemu_status(PANIC)));
    for other in ["", "cpu0 info  all well", "the machine ends with status ", "the machine ends with status 6x"] {
        assert_eq!(told_status(other), None, "{other}");
    }
}

#[test]
fn values_of_settings_have_names_of_their_own_by_which_they_are_found() {
    fn check<S: Setting + core::fmt::Debug + core::fmt::Display>() {
        assert_eq!((S::ALL.len(), S::ALL[0] == S::DEFAULT), (S::NAMES.len(), true));
        for (value, name) in S::ALL.iter().zip(S::NAMES) {
            assert_eq!(S::named(name), Some(*value));
            assert_eq!(value.to_string(), *name);
        }
        assert_eq!(S::named(""), None);
        assert_eq!(S::named(&S::NAMES[0].to_uppercase()), None);
    }
    check::<ApicMode>();
    check::<DecodeCache>();
    check::<DirtySource>();
    check::<HyperV>();
    check::<Populate>();
    check::<RemoteFlush>();
    check::<Split>();
    check::<TagScheme>();
}

#[test]
fn largest_pieces_of_a_saved_vm_fit_into_a_frame() {
    let bytes = vec![0xff; MEMORY_CHUNK];
    let command = Command::RestoreMemory { upload: u32::MAX, gpa: u64::MAX, bytes: bytes.clone() };
    assert!(control::encode(&Request { id: u32::MAX, command }).is_ok());
    assert!(control::encode(&Message::Reply { id: u32::MAX, result: Ok(control::Answer::Bytes(bytes)) }).is_ok());
}
