//! The boot payload: the archive of VMs, kernels and RAM disks.

use abi::payload::{Builder, File, Payload};
use fuzz::{Input, target};

const HEADER: usize = 32;
/// The same checksum as in `abi`, bit by bit.
fn crc(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 != 0 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

fn read(bytes: &[u8]) {
    let _ = Payload::read(bytes);

    // The same with a header that fits: the rest is a manifest, and files.
    let mut input = Input::new(bytes);
    let files = usize::from(input.u16());
    let rest = input.rest();
    let manifest = rest.len().saturating_sub(files);
    let mut sealed = Builder::new(false).finish().expect("an empty payload")[..HEADER].to_vec();
    sealed[12..16].copy_from_slice(&u32::try_from(manifest).expect("inputs are short").to_le_bytes());
    sealed[16..20].copy_from_slice(&crc(&rest[..manifest]).to_le_bytes());
    sealed.extend_from_slice(rest);
    let Ok(payload) = Payload::read(&sealed) else { return };
    for vm in &payload.manifest.vms {
        for blob in [Some(&vm.kernel), vm.initrd.as_ref()].into_iter().flatten().filter_map(File::blob) {
            assert_eq!(payload.blob(blob).len() as u64, blob.bytes, "all of a file is there");
        }
    }

    // What was read can be written, and read again.
    let mut again = Builder::new(payload.manifest.exit_when_idle);
    again.require_iommu(payload.manifest.require_iommu);
    let mut expected = payload.manifest.vms.clone();
    for vm in &mut expected {
        for file in [Some(&mut vm.kernel), vm.initrd.as_mut()].into_iter().flatten() {
            if let File::Blob(blob) = file {
                *blob = again.add_blob(payload.blob(blob));
            }
        }
        again.add_vm(vm.clone());
    }
    let written = again.finish().expect("it was a payload before");
    let second = Payload::read(&written).expect("it was a payload before");
    assert_eq!(second.manifest.vms.len(), expected.len());
    for (first, second_vm) in payload.manifest.vms.iter().zip(&second.manifest.vms) {
        assert_eq!((&first.name, &first.cmdline, first.vcpus), (&second_vm.name, &second_vm.cmdline, second_vm.vcpus));
        if let (Some(first), Some(second_blob)) = (first.kernel.blob(), second_vm.kernel.blob()) {
            assert!(payload.blob(first) == second.blob(second_blob), "the same kernel");
        }
    }
}

#[test]
fn any_payload_is_read_or_refused_and_reads_the_same_after_it_was_written() {
    target("payloads", read);
}
