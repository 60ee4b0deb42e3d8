mod any_file;

use proptest::prelude::{prop, proptest};

use abi::payload::{DirtyLogging, DirtySource, HyperV, PciFunction, Populate, RemoteFlush, Split, TagScheme};

use super::*;

/// What files are made of, and what they are not.
const WORDS: &[&str] = &[
    "[[vm]]",
    "[vm]",
    "[host]",
    "[",
    "]",
    "\n",
    "\n",
    " = ",
    "name = \"a\"",
    "vcpus = ",
    "memory = ",
    "pcpus",
    "kernel",
    "initrd",
    "-1",
    "99999999999999999999",
    "0x10",
    "\"512M\"",
    "\"",
    "é",
    "#",
    "1.5",
    "true",
    "{}",
    "1979-05-27",
    "\0",
];

fn parse(text: &str) -> Result<Config, Failure> {
    Config::parse(text, "x.toml", Path::new("/nowhere"))
}

fn error(text: &str) -> String {
    parse(text).expect_err("must be refused").to_string()
}

#[test]
fn default_is_four_vcpus_on_two_pcpus() {
    let config = Config::load(&RunArgs::default()).expect("is good");
    assert_eq!(config.host.pcpus.value, 2);
    assert_eq!(config.vms.len(), 1);
    assert_eq!(config.vms[0].vcpus.value, 4);
    assert_eq!(config.vms[0].memory.value, 512 * MIB);
    assert_eq!(config.vms[0].kernel.value, Kernel::DebianCloud);
}

#[test]
fn every_file_of_the_repository_is_good() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vms");
    let mut seen = 0;
    for entry in std::fs::read_dir(directory).expect("is there") {
        let path = entry.expect("is readable").path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let args = RunArgs { file: Some(path.clone()), ..RunArgs::default() };
            if let Err(failure) = Config::load(&args) {
                panic!("{}: {failure}", path.display());
            }
            seen += 1;
        }
    }
    assert!(seen >= 4);
}

#[test]
fn boot_modules_have_names_and_exist_on_pcs_only() {
    let file =
        |kernel: &str, initrd: &str| format!("[[vm]]\nname = \"a\"\nkernel = \"{kernel}\"\ninitrd = \"{initrd}\"\n");
    let names = |kernel, initrd| {
        let vm = parse(&file(kernel, initrd)).expect("is good").vms.remove(0);
        match (vm.kernel.value, vm.initrd.value) {
            (Kernel::Module(kernel), Initrd::Module(initrd)) => (kernel, initrd),
            other => panic!("no modules: {other:?}"),
        }
    };
    let pair = |kernel: &str, initrd: &str| (kernel.to_string(), initrd.to_string());
    assert_eq!(names("module", "module"), pair("kernel", "initrd"));
    assert_eq!(names("module:vmlinuz-a", "module:a.img"), pair("vmlinuz-a", "a.img"));
    for (wrong, shown) in [("module:", ""), ("module:a b", "a b"), ("module:payload", "payload"), ("module:$x", "$x")] {
        let text = error(&file(wrong, "none"));
        assert!(text.contains(&format!("x.toml:3: key 'kernel': {shown:?} is not a valid name")), "{text}");
    }

    let on_arm = |kernel, initrd| {
        let mut config = parse(&file(kernel, initrd)).expect("is good");
        let args = RunArgs { arch: Some(Arch::Aarch64), ..RunArgs::default() };
        config.apply(&args).expect_err("must be refused").to_string()
    };
    assert!(on_arm("module", "none").starts_with("x.toml:3: key 'kernel': boot modules exist on x86_64 only"));
    assert!(on_arm("debian", "module").starts_with("x.toml:4: key 'initrd': boot modules exist on x86_64 only"));
}

#[test]
fn vm_with_the_machines_devices_may_leave_its_size_to_the_machine() {
    let vm = |keys: &str| parse(&format!("[[vm]]\nname = \"a\"\n{keys}"));
    let owner = vm("vcpus = \"all\"\nmemory = \"rest\"\ndevices = \"all\"\n").expect("is good").vms.remove(0);
    assert_eq!((owner.vcpus.value, owner.memory.value), (PackedVm::ALL_CPUS, PackedVm::REST));
    let why = owner.is_closed().expect_err("a run has no machine of its own").to_string();
    assert!(why.starts_with("x.toml:3: key 'vcpus': \"all\" is known only where"), "{why}");

    for (keys, line) in [("vcpus = \"all\"\n", 3), ("vcpus = 2\nmemory = \"rest\"\n", 4)] {
        let why = vm(keys).expect_err("has no devices").to_string();
        let word = if line == 3 { "all" } else { "rest" };
        assert!(why.contains(&format!("x.toml:{line}: key ")) && why.contains(&format!("\"{word}\" is for")), "{why}");
    }
    let closed = vm("vcpus = 2\nmemory = \"64M\"\ndevices = \"all\"\n").expect("is good").vms.remove(0);
    assert!(closed.is_closed().is_ok());
}

#[test]
fn functions_are_named_in_a_list_and_belong_to_one_vm() {
    let vm = |name: &str, devices: &str| format!("[[vm]]\nname = \"{name}\"\ndevices = {devices}\n");
    let config = parse(&vm("a", "[\"0000:00:04.0\", \"0000:3a:1f.7\"]")).expect("is good");
    let functions = [(0, 4, 0), (0x3a, 0x1f, 7)].map(|(bus, device, function)| PciFunction { bus, device, function });
    assert_eq!(config.vms[0].devices.value, Devices::These(functions.to_vec()));
    assert_eq!(parse(&vm("a", "\"none\"")).expect("is good").vms[0].devices.value, Devices::None);

    for (devices, says) in [
        ("[\"00:04.0\"]", "'00:04.0' is not the address of a PCI function: it has no segment, or no bus"),
        ("[\"0000:00:04\"]", "'0000:00:04' is not the address of a PCI function\nhelp: write segment:bus:device"),
        ("[\"0000:00:4.0\"]", "'0000:00:4.0' is not the address"),
        ("[\"0000:00:0g.0\"]", "'0000:00:0g.0' is not the address"),
        ("[\"0000:0:0+4.0\"]", "is not the address"),
        ("[\"0000:00:20.0\"]", "'0000:00:20.0' is no address: a bus has devices 00 to 1f"),
        ("[\"0000:00:1f.8\"]", "is no address: a bus has devices 00 to 1f, a device has functions 0 to 7"),
        ("[\"0001:00:04.0\"]", "is in another PCI segment than 0000"),
        ("[\"0000:00:04.0\", \"0000:00:04.0\"]", "0000:00:04.0 is named twice"),
        ("[]", "an empty list\nhelp: name PCI functions"),
        ("[4]", "the number 4 instead of text\nhelp: write devices = \"...\" or devices = ["),
        ("4", "the number 4 instead of text"),
        ("\"0000:00:04.0\"", "is one function, not a list of them\nhelp: write devices = [\"0000:00:04.0\"]"),
        ("\"al\"", "'al' is not a valid choice of the machine's devices\nhelp: did you mean 'all'?"),
    ] {
        let text = error(&vm("a", devices));
        assert!(text.starts_with("x.toml:3: key 'devices': ") && text.contains(says), "{devices}: {text}");
    }
    // Each function of a list has a line of its own.
    let text = error(&vm("a", "[\n  \"0000:00:04.0\",\n  \"0000:00:04\",\n]"));
    assert!(text.starts_with("x.toml:5: key 'devices': '0000:00:04' is not"), "{text}");
    let many: Vec<String> = (0..32).map(|device| format!("\"0000:01:{device:02x}.0\"")).collect();
    assert!(error(&vm("a", &format!("[{}]", many.join(", ")))).contains("32 functions; a VM has at most 31"));

    let one = "[\"0000:00:04.0\"]";
    let text = error(&(vm("a", one) + &vm("b", one)));
    let expected = "x.toml:6: key 'devices': 0000:00:04.0 is another VM's\nhelp: x.toml:3: key 'devices' has it";
    assert!(text.starts_with(expected), "{text}");
    let text = error(&(vm("a", one) + &vm("b", "\"all\"")));
    assert!(text.starts_with("x.toml:3: key 'devices': functions of its own, beside a VM with all devices"), "{text}");
    for key in ["populate = \"touch-4K\"", "decode_cache = \"write-protect\""] {
        let text = error(&(vm("a", one) + key + "\n"));
        assert!(text.starts_with("x.toml:3: key 'devices': devices write to "), "{text}");
    }
}

#[test]
fn unknown_key_is_named_with_the_nearest_known_one() {
    let text = "[host]\npcpus = 2\n\n[[vm]]\nname = \"a\"\n  vcpu = 4\n";
    assert_eq!(
        error(text),
        "x.toml:6:3: key 'vcpu': unknown in [[vm]]\n\
         help: did you mean 'vcpus'? (known here: name, vcpus, memory, kernel, initrd, cmdline, role, devices, apic, hyperv, flush, tags, tag_limit, decode_cache, populate, split, split_rate, dirty_source, weight, cap, pcpus)"
    );
    assert!(error("[hosts]\n").contains("did you mean 'host'?"));
    assert!(error("[host]\nzzz = 1\n[[vm]]\nname='a'").contains("help: known here: arch, pcpus"));
}

#[test]
fn value_out_of_bounds_names_line_key_and_remedy() {
    let text = "[[vm]]\nname = \"a\"\nvcpus = 0\n";
    assert!(error(text).starts_with("x.toml:3: key 'vcpus': 0 vCPUs; a VM needs 1 to 512\nhelp: "));
    for count in ["513", "-1", "99999999999999999999", "4.5", "\"4\"", "true", "[4]"] {
        let text = error(&format!("[[vm]]\nname = \"a\"\nvcpus = {count}\n"));
        assert!(text.starts_with("x.toml:3: key 'vcpus': "), "{text}");
    }
}

#[test]
fn memory_is_checked_where_it_is_written() {
    for (memory, says) in [
        ("0", "needs memory"),
        ("\"0\"", "needs memory"),
        ("512", "has no unit"),
        ("\"1M\"", "not a multiple of 2 MiB"),
        ("\"17T\"", "more than a VM can have\nhelp: \"16T\" is the maximum"),
        ("\"18014398509481983K\"", "more than a VM can have"),
        ("\"lots\"", "is not a unit"),
        ("false", "false instead of text"),
    ] {
        let text = error(&format!("[[vm]]\nname = \"a\"\nmemory = {memory}\n"));
        assert!(text.starts_with("x.toml:3: key 'memory': ") && text.contains(says), "{text}");
    }
}

#[test]
fn text_of_a_file_has_no_meaning_for_the_terminal() {
    for line in ["memory = \"1\\u001b[31mM\"", "vcpus = \"\\n\\u0007\"", "\"\\u001b[2J\" = 1", "kernel = \"\\u001b\""] {
        let text = error(&format!("[[vm]]\nname = \"a\"\n{line}\n"));
        assert!(text.starts_with("x.toml:3:") && text.lines().count() <= 2, "{text:?}");
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
    }
}

#[test]
fn names_are_given_and_differ() {
    assert!(error("[[vm]]\nvcpus = 1\n").starts_with("x.toml:1: [[vm]] has no key 'name'"));
    let text = error("[[vm]]\nname = \"a\"\n[[vm]]\nname = \"a\"\n");
    assert!(text.starts_with("x.toml:4: key 'name': a second VM called 'a'"), "{text}");
    assert!(text.contains("x.toml:2"), "{text}");
    assert!(error("[[vm]]\nname = \"a b\"\n").contains("is not a valid name"));
}

#[test]
fn file_without_vms_is_refused() {
    assert!(error("").starts_with("x.toml: no [[vm]]"));
    assert!(error("vm = 3").contains("list of tables"));
    assert!(error("vm = [3]").contains("list of tables"));
    assert!(error("host = 3").contains("instead of a table"));
}

#[test]
fn syntax_error_has_line_and_column() {
    assert!(error("[[vm]]\nname = \"a\n").starts_with("x.toml:2:"));
}

#[test]
fn missing_kernel_names_the_path_and_the_known_names() {
    let text = error("[[vm]]\nname = \"a\"\nkernel = \"bzImage\"\n");
    assert!(text.starts_with("x.toml:3: key 'kernel': '/nowhere/bzImage' does not exist"), "{text}");
    assert!(text.contains("\"debian-cloud\""), "{text}");
}

#[test]
fn options_override_every_vm_and_are_named_in_errors() {
    let mut config = parse("[[vm]]\nname='a'\n[[vm]]\nname='b'\nvcpus=3").expect("is good");
    let args = RunArgs { vcpus: Some(7), append: Some("debug".to_string()), ..RunArgs::default() };
    config.apply(&args).expect("is good");
    assert!(config.vms.iter().all(|vm| vm.vcpus.value == 7 && vm.cmdline.value == "console=ttyS0 quiet debug"));

    let args = RunArgs { vcpus: Some(0), ..RunArgs::default() };
    let text = config.apply(&args).expect_err("is bad").to_string();
    assert!(text.starts_with("option '--vcpus': 0 vCPUs; a VM needs 1 to 512"), "{text}");
}

#[test]
fn initrds_of_ours_have_the_agent_and_others_do_not() {
    for (name, wanted, has_agent) in [
        ("dunlin", Initrd::Dunlin, true),
        ("workloads", Initrd::Workloads, true),
        ("compile", Initrd::Compile, true),
        ("parent", Initrd::Parent, true),
        ("parent-stock", Initrd::ParentStock, true),
        ("parent-debian", Initrd::ParentDebian, true),
        ("parent-libvirt", Initrd::ParentLibvirt, true),
        ("none", Initrd::None, false),
    ] {
        let config = parse(&format!("[[vm]]\nname = \"a\"\ninitrd = \"{name}\"")).expect("is good");
        assert_eq!((&config.vms[0].initrd.value, wanted.has_agent()), (&wanted, has_agent));

        let mut config = parse("[[vm]]\nname = \"a\"").expect("is good");
        config.apply(&RunArgs { initrd: Some(name.to_string()), ..RunArgs::default() }).expect("is good");
        assert_eq!(config.vms[0].initrd.value, wanted);
    }
    assert!(!Initrd::File("a".into()).has_agent());
    let text = error("[[vm]]\nname = \"a\"\ninitrd = \"workload\"");
    assert!(
        text.contains(
            "one of \"dunlin\", \"workloads\", \"compile\", \"parent\", \"parent-stock\", \"parent-debian\", \
             \"parent-libvirt\", \"none\""
        ),
        "{text}"
    );
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(words in prop::collection::vec(prop::sample::select(WORDS), 0..12)) {
        let text = words.concat();
        let _ = parse(&text);
    }
}

#[test]
fn vm_is_offered_everything_and_uses_epochs_unless_told_otherwise() {
    let config = parse("[[vm]]\nname = \"a\"").expect("is good");
    let translation = &config.vms[0].translation;
    assert_eq!((translation.hyperv, translation.flush), (HyperV::FlushIpi, RemoteFlush::Hypercall));
    assert_eq!((translation.tags, translation.tag_limit), (TagScheme::Epoch, None));
}

#[test]
fn vm_is_a_guest_unless_it_is_the_parent() {
    let role = |lines: &str| parse(&format!("[[vm]]\nname = \"a\"\n{lines}")).map(|config| config.vms[0].role.value);
    assert_eq!(role("").ok(), Some(Role::Guest));
    assert_eq!(role("role = \"parent\"").ok(), Some(Role::Parent));
    for (lines, wanted) in [
        ("role = \"root\"", "x.toml:3: key 'role'"),
        ("role = \"parent\"\nhyperv = \"off\"", "x.toml:3: key 'role': a parent creates VMs by hypercalls"),
        ("role = \"parent\"\n[[vm]]\nname = \"b\"\nrole = \"parent\"", "x.toml:6: key 'role': a second parent"),
    ] {
        let error = error(&format!("[[vm]]\nname = \"a\"\n{lines}\n"));
        assert!(error.starts_with(wanted), "{error}");
    }
}

#[test]
fn keys_about_tlbs_are_read_and_bad_ones_named() {
    let config =
        parse("[[vm]]\nname = \"a\"\nhyperv = \"flush\"\nflush = \"ipi\"\ntags = \"generation\"\ntag_limit = 2");
    let translation = config.expect("is good").vms[0].translation.clone();
    assert_eq!((translation.hyperv, translation.flush), (HyperV::Flush, RemoteFlush::Ipi));
    assert_eq!((translation.tags, translation.tag_limit), (TagScheme::Generation, Some(2)));

    for (lines, wanted) in [
        ("hyperv = \"on\"", "x.toml:3: key 'hyperv'"),
        ("flush = \"nmi\"", "x.toml:3: key 'flush'"),
        ("tags = \"asid\"", "x.toml:3: key 'tags'"),
        ("tag_limit = 0", "x.toml:3: key 'tag_limit': 0 tags; a VM needs 1 to 32767"),
        ("hyperv = \"off\"\nflush = \"hypercall\"", "x.toml:4: key 'flush': the guest has no hypercalls"),
    ] {
        let error = error(&format!("[[vm]]\nname = \"a\"\n{lines}\n"));
        assert!(error.starts_with(wanted), "{error}");
    }
    assert!(parse("[[vm]]\nname = \"a\"\nhyperv = \"off\"").is_ok());
}

#[test]
fn what_is_remembered_of_instructions_is_chosen_by_name() {
    assert_eq!(parse("[[vm]]\nname = \"a\"").expect("is good").vms[0].decode_cache, DecodeCache::Bytes);
    for &wanted in DecodeCache::ALL {
        let config = parse(&format!("[[vm]]\nname = \"a\"\ndecode_cache = \"{wanted}\"")).expect("is good");
        assert_eq!(config.vms[0].decode_cache, wanted);
    }

    for value in ["\"on\"", "\"Bytes\"", "\"write_protect\"", "\"\"", "true", "64"] {
        let text = error(&format!("[[vm]]\nname = \"a\"\ndecode_cache = {value}\n"));
        assert!(text.starts_with("x.toml:3: key 'decode_cache': "), "{text}");
    }
    let text = error("[[vm]]\nname = \"a\"\ndecode_cache = \"write\"\n");
    assert!(text.contains("one of bytes, write-protect, write-protect-tables, off"), "{text}");
}

#[test]
fn console_of_the_other_architecture_has_the_name_that_its_kernels_use() {
    let mut config = parse("[[vm]]\nname = 'a'\ncmdline = 'quiet console=ttyS0 x=console=ttyS0'").expect("is good");
    let args = RunArgs { arch: Some(Arch::Aarch64), ..RunArgs::default() };
    config.apply(&args).expect("is good");
    assert_eq!(config.host.arch.value, Arch::Aarch64);
    assert_eq!(config.vms[0].cmdline.value, "quiet console=ttyAMA0 x=console=ttyS0");

    let mut config = parse("[host]\narch = 'x86_64'\n[[vm]]\nname = 'a'").expect("is good");
    config.apply(&RunArgs::default()).expect("is good");
    assert_eq!(config.vms[0].cmdline.value, "console=ttyS0 quiet");
}

#[test]
fn keys_that_mean_nothing_on_aarch64_are_refused_there() {
    for line in ["apic = 'x2apic'", "hyperv = 'off'", "flush = 'ipi'", "decode_cache = 'bytes'"] {
        let key = line.split(' ').next().expect("is there");
        let aarch64 = RunArgs { arch: Some(Arch::Aarch64), ..RunArgs::default() };
        let mut config = parse(&format!("[[vm]]\nname = 'a'\n[[vm]]\nname = 'b'\n{line}")).expect("is good");
        config.apply(&RunArgs::default()).expect("means something on x86_64");
        let text = config.apply(&aarch64).expect_err("is refused").to_string();
        assert!(
            text.starts_with(&format!("x.toml:5: key '{key}': has no meaning on aarch64\nhelp: leave it out")),
            "{text}"
        );

        let mut config = parse(&format!("[host]\narch = 'aarch64'\n[[vm]]\nname = 'a'\n{line}")).expect("is good");
        let text = config.apply(&RunArgs::default()).expect_err("is refused").to_string();
        assert!(text.starts_with(&format!("x.toml:5: key '{key}': has no meaning on aarch64")), "{text}");
    }

    for line in ["tags = 'generation'\nsplit = 'lazy'", "devices = 'all'"] {
        let mut config = parse(&format!("[[vm]]\nname = 'a'\n{line}")).expect("is good");
        config.apply(&RunArgs { arch: Some(Arch::Aarch64), ..RunArgs::default() }).expect("is good on both");
    }
    let mut config = parse("[[vm]]\nname = 'a'\ndevices = ['0000:00:04.0']").expect("is good");
    let refused = config.apply(&RunArgs { arch: Some(Arch::Aarch64), ..RunArgs::default() });
    let text = refused.expect_err("needs an IOMMU").to_string();
    assert!(
        text.starts_with("x.toml:3: key 'devices': PCI functions exist on x86_64 only\nhelp: write devices = \"all\"")
    );
}

#[test]
fn default_runs_on_every_architecture() {
    for &arch in Arch::ALL {
        let config = Config::load(&RunArgs { arch: Some(arch), ..RunArgs::default() }).expect("is good");
        assert_eq!(config.host.arch.value, arch);
    }
}

#[test]
fn value_that_looks_like_a_name_is_told_which() {
    let text = error("[[vm]]\nname = \"a\"\ndecode_cache = \"byte\"\n");
    assert!(text.contains("did you mean 'bytes'? (one of bytes, write-protect, "), "{text}");
    let text = error("[[vm]]\nname = \"a\"\ntags = \"zzz\"\n");
    assert!(text.ends_with("help: one of epoch, generation, flush-always"), "{text}");
}

#[test]
fn architecture_that_there_is_not_is_refused() {
    let text = error("[host]\narch = 'riscv64'\n[[vm]]\nname = 'a'");
    assert!(text.starts_with("x.toml:2: key 'arch': 'riscv64' is not a valid architecture"), "{text}");
    assert!(text.contains("one of x86_64, aarch64"), "{text}");
}

#[test]
fn how_memory_is_mapped_and_logged_is_chosen_by_name() {
    let vm = |lines: &str| parse(&format!("[[vm]]\nname = 'a'\n{lines}")).expect("is good").vms[0].stage2;
    let usual = DirtyLogging { split: Split::Adaptive, source: None, splits_per_second: None };
    assert_eq!(vm(""), Stage2 { populate: Populate::AtStart, dirty: usual });
    assert_eq!(vm("populate = 'touch-2M'").populate, Populate::Touch2M);
    assert_eq!(vm("populate = 'touch-4K'").populate, Populate::Touch4K);
    let chosen = vm("split = 'lazy'\nsplit_rate = 7\ndirty_source = 'write-protect'").dirty;
    let wanted =
        DirtyLogging { split: Split::Lazy, source: Some(DirtySource::WriteProtect), splits_per_second: Some(7) };
    assert_eq!(chosen, wanted);

    for (line, wanted) in [
        ("populate = 'late'", "x.toml:3: key 'populate': "),
        ("split = 'never'", "x.toml:3: key 'split': "),
        ("split_rate = 0", "x.toml:3: key 'split_rate': "),
        ("split_rate = 'fast'", "x.toml:3: key 'split_rate': "),
        ("dirty_source = 'guest'", "x.toml:3: key 'dirty_source': "),
    ] {
        let text = error(&format!("[[vm]]\nname = 'a'\n{line}\n"));
        assert!(text.starts_with(wanted), "{text}");
    }
}

#[test]
fn share_of_the_pcpus_is_a_weight_a_cap_and_a_set() {
    let share = |keys: &str| parse(&format!("[[vm]]\nname = \"a\"\n{keys}")).expect("is good").vms[0].share.value;
    assert_eq!(share(""), CpuShare::DEFAULT);
    let expected = CpuShare { weight: 300, cap_percent: Some(25), pcpus: Some(0b100_1111) };
    assert_eq!(share("weight = 300\ncap = 25\npcpus = \"0-3, 6\""), expected);
    assert_eq!(share("pcpus = \"63\"").pcpus, Some(1 << 63));
}

#[test]
fn share_that_is_no_share_is_refused_with_what_would_be_right() {
    for (key, why) in [
        ("weight = 0", "a weight of 0; it is 1 to 10000"),
        ("weight = 10001", "a weight of 10001; it is 1 to 10000"),
        ("cap = 0", "a cap of 0 %; it is 1 to 6400"),
        ("cap = -5", "a cap of -5 %; it is 1 to 6400"),
        ("pcpus = \"\"", "'' is not the number of a pCPU"),
        ("pcpus = \"3-1\"", "the range 3-1 ends before it begins"),
        ("pcpus = \"0-64\"", "pCPU 64; the last is 63"),
        ("pcpus = \"a\"", "'a' is not the number of a pCPU"),
    ] {
        let text = error(&format!("[[vm]]\nname = \"a\"\n{key}\n"));
        let name = key.split(' ').next().expect("has one");
        assert!(text.starts_with(&format!("x.toml:3: key '{name}': {why}")), "{text}");
    }
}
