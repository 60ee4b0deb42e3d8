//! Linux as a parent VM: it may create VMs of its own, by `/dev/mshv`.
//!
//! `cargo xtask parent-tests` builds the kernel, which takes long once, and runs these tests.

use system_tests::{Run, dunlin_run_vms};

/// Boots a parent, and runs `script` in it.
fn parent(vcpus: u32, script: &str) -> Run {
    let vm = format!(
        "[[vm]]\nname = \"parent\"\nvcpus = {vcpus}\nmemory = \"1G\"\nkernel = \"parent\"\ninitrd = \"parent\"\n\
         role = \"parent\"\n"
    );
    dunlin_run_vms(240, &vm, &["--exec", script]).expect_status(0)
}

#[test]
#[ignore = "needs the kernel of a parent: `cargo xtask parent-tests`"]
fn linux_finds_itself_to_be_a_parent_and_complains_of_nothing() {
    // One vCPU for each of the 2 pCPUs, more than that, and many more.
    for vcpus in [2, 4, 20] {
        let log = parent(vcpus, "dmesg -r; ls /dev/mshv; grep Reserved /proc/iomem").stdout;
        for line in ["Hyper-V: running as L1VH partition", "mshv: Hypervisor using core scheduler", "\n/dev/mshv\n"] {
            assert!(log.contains(line), "{vcpus} vCPUs, no '{line}': {log}");
        }
        let pages = format!("{:08x}-3fffffff : Reserved", 0x4000_0000 - vcpus * 0x2000);
        assert!(log.contains(&pages), "{vcpus} vCPUs, no '{pages}': {log}");
        let complaints: Vec<_> =
            log.lines().filter(|line| matches!(line.as_bytes(), [b'<', b'0'..=b'4', b'>', ..])).collect();
        assert!(complaints.is_empty(), "{vcpus} vCPUs: {complaints:#?}");
    }
}
