//! Kernels built byte by byte, a guest memory that is a `Vec`, and the expected results.

mod acpi;
mod bzimage;
mod hostile;
mod layout;
mod own_acpi;
mod own_machine;
mod pvh;

use alloc::vec;
use alloc::vec::Vec;

use abi::payload::{ApicMode, Role};
use addr::Gpa;

use crate::bytes::put;
use crate::{Boot, GuestMemory, OutsideMemory};

const MIB: u64 = 1 << 20;

/// RAM from 0 on, as large as the test needs.
struct Ram(Vec<u8>);

impl Ram {
    fn new(bytes: u64) -> Self {
        Self(vec![0; usize::try_from(bytes).expect("a test's RAM fits the host")])
    }

    fn at(&self, gpa: Gpa, bytes: usize) -> &[u8] {
        let start = usize::try_from(gpa.0).expect("inside the RAM");
        &self.0[start..start + bytes]
    }

    fn u32(&self, gpa: u64) -> u32 {
        crate::bytes::u32_at(self.at(Gpa(gpa), 4), 0).expect("four bytes")
    }

    fn u64(&self, gpa: u64) -> u64 {
        crate::bytes::u64_at(self.at(Gpa(gpa), 8), 0).expect("eight bytes")
    }
}

impl GuestMemory for Ram {
    fn write(&mut self, gpa: Gpa, bytes: &[u8]) -> Result<(), OutsideMemory> {
        let outside = OutsideMemory { gpa, bytes: bytes.len() };
        let start = usize::try_from(gpa.0).map_err(|_| outside)?;
        let end = start.checked_add(bytes.len()).ok_or(outside)?;
        self.0.get_mut(start..end).ok_or(outside)?.copy_from_slice(bytes);
        Ok(())
    }
}

/// A guest of 4 vCPUs and 64 MiB without an initrd.
fn boot(kernel: &[u8]) -> Boot<'_> {
    Boot {
        kernel,
        initrd: None,
        cmdline: "console=ttyS0 quiet",
        memory_bytes: 64 * MIB,
        vcpus: 4,
        role: Role::Guest,
        apic: ApicMode::X2Apic,
        machine: None,
    }
}

/// A bzImage of protocol 2.15 that needs 2 MiB at 16 MiB; one sector of setup code, then `PAYLOAD` repeated.
fn bzimage() -> Vec<u8> {
    let mut file = vec![0; 1024];
    file[0x1f1] = 1; // setup_sects
    put(&mut file, 0x1f4, &64_u32.to_le_bytes()); // syssize
    put(&mut file, 0x1fe, &[0x55, 0xaa, 0xeb, 0x6a]); // boot flag, jump
    put(&mut file, 0x202, b"HdrS");
    put(&mut file, 0x206, &0x020f_u16.to_le_bytes()); // version
    put(&mut file, 0x20e, &0x100_u16.to_le_bytes()); // kernel_version
    file[0x211] = 1; // loadflags
    put(&mut file, 0x22c, &0x7fff_ffff_u32.to_le_bytes()); // initrd_addr_max
    put(&mut file, 0x236, &0x7f_u16.to_le_bytes()); // xloadflags
    put(&mut file, 0x238, &2047_u32.to_le_bytes()); // cmdline_size
    put(&mut file, 0x258, &(16 * MIB).to_le_bytes()); // pref_address
    put(&mut file, 0x260, &0x20_0000_u32.to_le_bytes()); // init_size
    put(&mut file, 0x300, b"6.1.0-test (somebody@somewhere) #1 SMP\0");
    file.extend(PAYLOAD.iter().cycle().take(1024));
    file
}

const PAYLOAD: &[u8; 7] = b"payload";

/// A 64-bit ELF with two segments, at 1 MiB (8 KiB, of which 16 bytes are in the file) and at 2 MiB, and a PVH note
/// with the entry 0x10_0004.
fn pvh_elf() -> Vec<u8> {
    let mut file = vec![0; 0x200];
    put(&mut file, 0, &[0x7f, b'E', b'L', b'F', 2, 1, 1]);
    put(&mut file, 16, &2_u16.to_le_bytes()); // ET_EXEC
    put(&mut file, 18, &62_u16.to_le_bytes()); // EM_X86_64
    put(&mut file, 20, &1_u32.to_le_bytes());
    put(&mut file, 32, &64_u64.to_le_bytes()); // e_phoff
    put(&mut file, 52, &64_u16.to_le_bytes()); // e_ehsize
    put(&mut file, 54, &56_u16.to_le_bytes()); // e_phentsize
    put(&mut file, 56, &3_u16.to_le_bytes()); // e_phnum

    let mut header = |n: usize, p_type: u32, offset: u64, paddr: u64, filesz: u64, memsz: u64| {
        let at = 64 + 56 * n;
        put(&mut file, at, &p_type.to_le_bytes());
        put(&mut file, at + 8, &offset.to_le_bytes());
        put(&mut file, at + 16, &(paddr | 0xffff_ffff_8000_0000).to_le_bytes());
        put(&mut file, at + 24, &paddr.to_le_bytes());
        put(&mut file, at + 32, &filesz.to_le_bytes());
        put(&mut file, at + 40, &memsz.to_le_bytes());
        put(&mut file, at + 48, &4_u64.to_le_bytes());
    };
    header(0, 1, 0x180, 0x10_0000, 16, 0x2000);
    header(1, 1, 0x190, 0x20_0000, 16, 16);
    header(2, 4, 0x150, 0, 20, 20);

    put(&mut file, 0x150, &4_u32.to_le_bytes()); // name
    put(&mut file, 0x154, &4_u32.to_le_bytes()); // desc
    put(&mut file, 0x158, &18_u32.to_le_bytes()); // type
    put(&mut file, 0x15c, b"Xen\0");
    put(&mut file, 0x160, &0x10_0004_u32.to_le_bytes());
    put(&mut file, 0x180, b"first segment...second segment..");
    file
}
