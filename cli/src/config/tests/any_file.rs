//! Any file of VMs is refused at a place that it names, or makes a payload that the hypervisor reads.

use abi::payload::{Builder, File, Payload};
use fuzz::Input;

use super::*;
use crate::payload::describe;

/// Lines of files, and pieces of lines. A byte of the input chooses one.
const PIECES: &[&str] = &[
    "[host]\n",
    "\n[[vm]]\nname = \"a\"\n",
    "\n[[vm]]\nname = \"b\"\n",
    "vcpus = ",
    "memory = ",
    "pcpus = ",
    "kernel = ",
    "initrd = ",
    "cmdline = ",
    "role = ",
    "devices = ",
    "apic = ",
    "hyperv = ",
    "flush = ",
    "tags = ",
    "tag_limit = ",
    "decode_cache = ",
    "populate = ",
    "split = ",
    "split_rate = ",
    "dirty_source = ",
    "weight = ",
    "cap = ",
    "arch = ",
    "accel = ",
    "time_limit = ",
    "require_iommu = ",
    "qemu = ",
    "name = ",
    "\"all\"\n",
    "\"rest\"\n",
    "\"none\"\n",
    "\"parent\"\n",
    "\"parent-stock\"\n",
    "\"measuring-guest\"\n",
    "\"module\"\n",
    "\"module:x.y\"\n",
    "\"x2apic\"\n",
    "\"xapic\"\n",
    "\"flush\"\n",
    "\"flush+ipi\"\n",
    "\"off\"\n",
    "\"ipi\"\n",
    "\"hypercall\"\n",
    "\"epoch\"\n",
    "\"generation\"\n",
    "\"bytes\"\n",
    "\"write-protect\"\n",
    "\"touch-2M\"\n",
    "\"at-start\"\n",
    "\"eager\"\n",
    "\"hardware\"\n",
    "\"x86_64\"\n",
    "\"aarch64\"\n",
    "\"512M\"\n",
    "\"0-3,6\"\n",
    "\"63\"\n",
    "\"60s\"\n",
    "[\"0000:00:04.0\", \"0000:3a:1f.7\"]\n",
    "[\"0000:00:05.0\"]\n",
    "true\n",
    "0\n",
    "1\n",
    "512\n",
    "0x7fff_ffff_ffff_ffff\n",
    "[]\n",
    "{}\n",
    "\"\"\n",
    "1.5\n",
    "# a remark\n",
    "\"\\u001b[31m\\n\\u0000é\"\n",
    "\"18014398509481983K\"\n",
    "\"16T\"\n",
];

/// A file of pieces, or of the bytes themselves.
fn file(bytes: &[u8]) -> String {
    let mut input = Input::new(bytes);
    if input.byte() & 1 == 0 {
        return String::from_utf8_lossy(input.rest()).into_owned();
    }
    input.rest().iter().map(|byte| PIECES[usize::from(*byte) % PIECES.len()]).collect()
}

fn read(bytes: &[u8]) {
    let text = file(bytes);
    let mut config = match parse(&text) {
        Ok(config) => config,
        Err(failure) => return names_its_place(&failure, &text),
    };
    makes_a_payload(&config);
    let on_arm = RunArgs { arch: Some(Arch::Aarch64), ..RunArgs::default() };
    match config.apply(&on_arm) {
        Ok(()) => makes_a_payload(&config),
        Err(failure) => names_its_place(&failure, &text),
    }
}

/// A message is a line that begins with a place of the file, and perhaps a line of help. It has the key, if it is
/// about one. Nothing in it has a meaning for a terminal.
fn names_its_place(failure: &Failure, text: &str) {
    let message = failure.to_string();
    let mut lines = message.split('\n');
    let first = lines.next().unwrap_or_default();
    let helps = lines.next().is_none_or(|help| help.starts_with("help: "));
    assert!(helps && lines.next().is_none(), "more than two lines: {message:?}");
    assert!(!message.contains(|c: char| c.is_control() && c != '\n'), "a control character: {message:?}");
    if first == "x.toml: no [[vm]]: there is nothing to run" {
        return;
    }
    let place = first.strip_prefix("x.toml:").unwrap_or_else(|| panic!("no place: {message:?}"));
    let digits = place.split(':').next().unwrap_or_default();
    let line: usize = digits.parse().unwrap_or_else(|_| panic!("no line: {message:?}"));
    let count = text.matches('\n').count() + 1;
    assert!((1..=count).contains(&line), "a file of {count} lines: {message:?}");
    assert!(first.contains(": not TOML: ") || first.contains("key '"), "no key: {message:?}");
}

/// What the hypervisor reads of these VMs is what the file says, and can be (`vm::spec` there).
fn makes_a_payload(config: &Config) {
    let mut builder = Builder::new(false);
    let kernel = builder.add_blob(b"kernel");
    let described: Vec<PackedVm> = config.vms.iter().map(|vm| describe(vm, File::Blob(kernel), None)).collect();
    described.iter().for_each(|vm| builder.add_vm(vm.clone()));
    let bytes = builder.finish().expect("its manifest is short");
    let payload = Payload::read(&bytes).expect("the tool has accepted it");
    assert_eq!(payload.manifest.vms.len(), described.len());
    for (mut read, described) in payload.manifest.vms.clone().into_iter().zip(described) {
        let File::Blob(blob) = read.kernel else { panic!("a blob becomes {:?}", read.kernel) };
        assert_eq!(payload.blob(&blob), b"kernel");
        read.kernel = File::Blob(kernel);
        assert_eq!(read, described);
        can_be(&read);
    }
}

/// What the hypervisor checks again.
fn can_be(vm: &PackedVm) {
    let has_all = vm.devices == Devices::All;
    assert!((1..=MAX_VCPUS).contains(&vm.vcpus) || has_all && vm.vcpus == PackedVm::ALL_CPUS, "{vm:?}");
    assert!(vm.memory_bytes.is_multiple_of(2 << 20) && vm.memory_bytes <= 1 << 44, "{vm:?}");
    assert!(vm.memory_bytes != 0 || has_all, "{vm:?}");
    let is_mapped = vm.populate == Populate::AtStart;
    assert!(is_mapped || (vm.role == Role::Guest && vm.devices == Devices::None), "{vm:?}");
    let protects = matches!(vm.decode_cache, DecodeCache::WriteProtect | DecodeCache::WriteProtectTables);
    assert!(!protects || vm.devices == Devices::None, "{vm:?}");
    assert!(!vm.cmdline.contains(char::is_control), "{vm:?}");
    assert!((1..=10_000).contains(&vm.share.weight) && vm.share.pcpus != Some(0), "{vm:?}");
    assert!(vm.tag_limit != Some(0) && vm.dirty.splits_per_second != Some(0), "{vm:?}");
}

#[test]
fn any_file_is_refused_at_a_place_that_it_names_or_makes_a_payload() {
    fuzz::target("vm_files", read);
}
