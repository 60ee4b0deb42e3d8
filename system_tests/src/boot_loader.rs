//! A boot loader that passes arbitrary data: the hypervisor's file with a few of our instructions before its entry.
//!
//! QEMU starts the file by PVH, like the hypervisor's own. The instructions change what QEMU has passed, or pass
//! something else, and jump to the hypervisor's entry.

use std::fs;
use std::path::Path;

/// Physical address of the instructions; their data follows.
const CODE: u32 = 0x0300_0000;
/// Address of [`BootLoader::data`].
pub const DATA: u32 = CODE + 0x1000;

/// Bytes of an ELF64 program header, and the position of this number in the ELF header (System V ABI, 4: ELF header).
const HEADER_BYTES: usize = 56;
const PHOFF: usize = 32;
const PHNUM: usize = 56;

/// Offsets in `hvm_start_info` (Xen, `arch-x86/hvm/start_info.h`).
pub mod start_info {
    /// Number of modules.
    pub const MODULES: u8 = 12;
    /// Where the list of modules is.
    pub const MODULE_LIST: u8 = 16;
    /// Where the command line is.
    pub const COMMAND_LINE: u8 = 24;
    /// Where ACPI's root pointer is.
    pub const RSDP: u8 = 32;
    /// Where the memory map is.
    pub const MEMORY_MAP: u8 = 40;
    /// Number of its entries.
    pub const MEMORY_MAP_ENTRIES: u8 = 48;
}

/// The loader's behaviour.
#[derive(Clone, Debug, Default)]
pub struct BootLoader {
    /// Lies at [`DATA`].
    pub data: Vec<u8>,
    /// Overwrites words of QEMU's start info. Where `true`, the next word is zeroed.
    pub edits: Vec<(u8, u32, bool)>,
    /// Values of EAX and EBX instead of QEMU's.
    pub registers: Option<(u32, u32)>,
    /// Words that it writes to ports, in this order.
    pub outputs: Vec<(u16, u32)>,
}

impl BootLoader {
    /// Writes the file for QEMU's `-kernel`, made of the `hypervisor`.
    ///
    /// # Panics
    /// When the hypervisor's file is not as the linker script has it.
    pub fn write(&self, hypervisor: &Path, to: &Path) {
        let mut file = fs::read(hypervisor).expect("the hypervisor was built: run `make build` first");
        let native = |number: u64| usize::try_from(number).expect("within the file");
        let word = |file: &[u8], at: usize| u64::from_le_bytes(file[at..at + 8].try_into().expect("eight bytes"));

        // The note with the entry: name and descriptor with their lengths, the address last.
        let note =
            file.windows(16).position(|bytes| bytes == b"\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0").expect("a PVH note")
                + 16;
        let entry = u32::try_from(word(&file, note)).expect("below 4 GiB");
        file[note..note + 8].copy_from_slice(&u64::from(CODE).to_le_bytes());

        let table = native(word(&file, PHOFF));
        let count = usize::from(u16::from_le_bytes([file[PHNUM], file[PHNUM + 1]]));
        let mut headers = file[table..table + count * HEADER_BYTES].to_vec();
        for (address, bytes) in [(CODE, self.code(entry)), (DATA, self.data.clone())] {
            file.resize(file.len().next_multiple_of(0x1000), 0);
            let (at, address, length) = (file.len() as u64, u64::from(address), bytes.len() as u64);
            // PT_LOAD, readable and executable: offset, virtual and physical address, bytes in the file and in memory,
            // alignment.
            headers.extend([1u32, 5].into_iter().flat_map(u32::to_le_bytes));
            headers.extend([at, address, address, length, length, 0x1000].into_iter().flat_map(u64::to_le_bytes));
            file.extend(bytes);
        }
        file.resize(file.len().next_multiple_of(8), 0);
        let table = file.len() as u64;
        file[PHOFF..PHOFF + 8].copy_from_slice(&table.to_le_bytes());
        let count = u16::try_from(headers.len() / HEADER_BYTES).expect("a few headers");
        file[PHNUM..PHNUM + 2].copy_from_slice(&count.to_le_bytes());
        file.extend(headers);
        fs::write(to, file).expect("a file can be written there");
    }

    /// The instructions, in 32-bit mode with EBX as QEMU has set it.
    fn code(&self, entry: u32) -> Vec<u8> {
        let mut code = Vec::new();
        for &(port, value) in &self.outputs {
            // mov dx, port; mov eax, value; out dx, eax
            code.extend([0x66, 0xba]);
            code.extend(port.to_le_bytes());
            code.push(0xb8);
            code.extend(value.to_le_bytes());
            code.push(0xef);
        }
        for &(offset, value, is_long) in &self.edits {
            // mov dword ptr [ebx + offset], value
            code.extend([0xc7, 0x43, offset]);
            code.extend(value.to_le_bytes());
            if is_long {
                code.extend([0xc7, 0x43, offset + 4, 0, 0, 0, 0]);
            }
        }
        if let Some((eax, ebx)) = self.registers {
            // mov eax, imm32; mov ebx, imm32
            for (opcode, value) in [(0xb8, eax), (0xbb, ebx)] {
                code.push(opcode);
                code.extend(value.to_le_bytes());
            }
        }
        // mov edx, entry; jmp edx
        code.push(0xba);
        code.extend(entry.to_le_bytes());
        code.extend([0xff, 0xe2]);
        code
    }
}
