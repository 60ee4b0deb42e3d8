//! Kernels of x86-64: bzImage, or ELF with a note for PVH.

use abi::payload::{ApicMode, Role};
use addr::{Gpa, GpaRange};
use fuzz::{Input, target};
use x86_boot::layout::ram_layout;
use x86_boot::{Boot, GuestMemory, Mode, OutsideMemory, check, load, probe};

const MIB: u64 = 1 << 20;

/// RAM that stores nothing, and knows where it was written.
struct Ram {
    bytes: u64,
    written: Vec<GpaRange>,
}

impl GuestMemory for Ram {
    fn write(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<(), OutsideMemory> {
        let end = gpa.checked_add(bytes.len() as u64).expect("writes stay in the address space");
        let inside = ram_layout(self.bytes).any(|ram| ram.start <= gpa && end <= ram.end());
        assert!(inside, "{gpa} to {end}");
        self.written.extend(GpaRange::new(gpa, bytes.len() as u64).filter(|_| !bytes.is_empty()));
        Ok(())
    }
}

fn boot_it(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let memory_bytes = input.pick(&[2 * MIB, 16 * MIB, 64 * MIB, 3 << 30, 5 << 30]);
    let initrd = vec![0xa5; input.pick(&[0, 1, 4096, 70_000])];
    let role = if input.byte() & 1 == 0 { Role::Guest } else { Role::Parent };
    let kernel = input.rest();
    let boot = Boot {
        kernel,
        initrd: (!initrd.is_empty()).then_some(&initrd[..]),
        cmdline: "console=ttyS0 quiet",
        memory_bytes,
        vcpus: 4,
        role,
        apic: ApicMode::X2Apic,
        machine: None,
    };
    let mut ram = Ram { bytes: memory_bytes, written: Vec::new() };
    let checked = check(&boot);
    let loaded = load(&boot, &mut ram);
    assert_eq!(checked.is_ok(), loaded.is_ok(), "check foretells load");
    let Ok(entry) = loaded else { return };
    assert!(probe(kernel).is_ok());
    let start = match entry.mode {
        Mode::Long64 { rip, .. } => rip,
        Mode::Protected32 { eip, .. } => Gpa(u64::from(eip)),
    };
    assert!(entry.kernel.contains(start), "it starts inside of itself: {entry:?}");
    assert!(entry.kernel.end().0 <= memory_bytes, "{entry:?}");
    if let Some(initrd) = entry.initrd {
        assert!(!initrd.overlaps(&entry.kernel), "{entry:?}");
        let over = ram.written.iter().filter(|range| range.overlaps(&initrd)).count();
        assert_eq!(over, 1, "nothing is written over the RAM disk: {entry:?}");
    }
}

#[test]
fn any_kernel_is_loaded_into_its_memory_or_refused() {
    target("kernels", boot_it);
}
