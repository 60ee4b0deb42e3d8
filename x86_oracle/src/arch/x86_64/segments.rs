//! Segments: descriptors in the process's local descriptor table, and the registers that refer to it.

use crate::machine::{Case, DESCRIPTORS, Descriptor, Kind};
use core::arch::asm;
use x86_emulate::{Mode, Segment};

/// Linux's selector for 64-bit processes.
const LONG_CODE: u16 = 0x33;
const LONG_STACK: u16 = 0x2b;

/// Values of the segment registers, and of the bases of FS and GS where selectors do not give them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Selectors {
    pub(super) cs: u16,
    pub(super) ss: u16,
    pub(super) ds: u16,
    pub(super) es: u16,
    pub(super) fs: u16,
    pub(super) gs: u16,
    /// Of FS and GS, in 64-bit mode.
    pub(super) bases: Option<[u64; 2]>,
}

impl Selectors {
    pub(super) fn of(case: &Case) -> Self {
        if case.mode == Mode::Bits64 {
            let bases = Some(case.bases);
            return Self { cs: LONG_CODE, ss: LONG_STACK, ds: 0, es: 0, fs: 0, gs: 0, bases };
        }
        // In the local table, with the rights of a process (APM vol. 2, 4.5.1).
        let selector = |segment: Segment| match case.segments[segment as usize] {
            0 => 0,
            number => u16::from(number) << 3 | 7,
        };
        let [es, cs, ss, ds, fs, gs] =
            [Segment::Es, Segment::Cs, Segment::Ss, Segment::Ds, Segment::Fs, Segment::Gs].map(selector);
        Self { cs, ss, ds, es, fs, gs, bases: None }
    }

    /// Loads those that 64-bit code does not use.
    pub(super) fn load_unused(&self) {
        load_data(self.ds, self.es, self.gs);
        if let Some([_, gs]) = self.bases
            && has_base_instructions()
        {
            // SAFETY: the kernel allows it, the base is canonical, and nothing in a process uses GS.
            unsafe { asm!("wrgsbase {}", in(reg) gs, options(nomem, nostack, preserves_flags)) };
        }
    }

    /// Loads FS, which belongs to the threads of the process.
    ///
    /// # Safety
    /// Nothing that is local to a thread is used before [`restore_fs`].
    pub(super) unsafe fn load_fs(&self) {
        // SAFETY: the selector is 0 or in our table; the caller guarantees the rest.
        unsafe { asm!("mov fs, {:e}", in(reg) u32::from(self.fs), options(nomem, nostack, preserves_flags)) };
        if let Some([fs, _]) = self.bases {
            // SAFETY: the kernel allows it where this is called, and the base is canonical.
            unsafe { asm!("wrfsbase {}", in(reg) fs, options(nomem, nostack, preserves_flags)) };
        }
    }
}

/// As after the start of the process.
pub(super) fn unload_unused() {
    load_data(0, 0, 0);
}

fn load_data(ds: u16, es: u16, gs: u16) {
    // SAFETY: selectors are 0 or in our table, and 64-bit code uses none of the three registers.
    unsafe {
        asm!(
            "mov ds, {:e}",
            "mov es, {:e}",
            "mov gs, {:e}",
            in(reg) u32::from(ds),
            in(reg) u32::from(es),
            in(reg) u32::from(gs),
            options(nomem, nostack, preserves_flags)
        );
    }
}

/// The base of FS.
///
/// # Safety
/// [`has_base_instructions`].
pub(super) unsafe fn fs_base() -> u64 {
    let base;
    // SAFETY: the caller's.
    unsafe { asm!("rdfsbase {}", out(reg) base, options(nomem, nostack, preserves_flags)) };
    base
}

/// Restores FS.
///
/// # Safety
/// [`has_base_instructions`] is true, and `base` is the earlier value of [`fs_base`] of this thread.
pub(super) unsafe fn restore_fs(base: u64) {
    // SAFETY: nothing is used by way of FS between here and the next line.
    unsafe {
        asm!("mov fs, {:e}", "wrfsbase {}", in(reg) 0, in(reg) base, options(nomem, nostack, preserves_flags));
    }
}

/// Whether the kernel lets processes change the bases of FS and GS.
pub(super) fn has_base_instructions() -> bool {
    const FSGSBASE: u64 = 1 << 1;
    // SAFETY: reads a start parameter of the process.
    let features = unsafe { libc::getauxval(libc::AT_HWCAP2) };
    features & FSGSBASE != 0
}

/// The argument of `modify_ldt`.
#[repr(C)]
struct UserDescriptor {
    number: u32,
    base: u32,
    limit: u32,
    flags: u32,
}

/// Writes all descriptors into the local table. Returns whether the kernel allows that.
pub(super) fn describe() -> bool {
    const WRITE: u64 = 0x11;
    let numbered = (0..).zip(&DESCRIPTORS).filter(|(_, descriptor)| descriptor.kind != Kind::Absent);
    numbered.map(|(number, descriptor)| user_descriptor(number, descriptor)).all(|descriptor| {
        // SAFETY: the kernel reads the structure, and checks it. Nothing else uses the local table.
        let result =
            unsafe { libc::syscall(libc::SYS_modify_ldt, WRITE, &raw const descriptor, size_of_val(&descriptor)) };
        result == 0
    })
}

fn user_descriptor(number: u32, descriptor: &Descriptor) -> UserDescriptor {
    const BIG: u32 = 1 << 0;
    const DOWN: u32 = 1 << 1;
    const CODE: u32 = 2 << 1;
    const ONLY: u32 = 1 << 3;
    const PAGES: u32 = 1 << 4;
    const USEABLE: u32 = 1 << 6;
    let kind = match descriptor.kind {
        Kind::Absent => 0,
        Kind::Data { can_be_written, expands_down } => {
            (if can_be_written { 0 } else { ONLY }) | if expands_down { DOWN } else { 0 }
        }
        Kind::Code { can_be_read } => CODE | if can_be_read { 0 } else { ONLY },
    };
    let (limit, granularity) =
        if descriptor.limit < 1 << 20 { (descriptor.limit, 0) } else { (descriptor.limit >> 12, PAGES) };
    let big = if descriptor.is_big { BIG } else { 0 };
    UserDescriptor { number, base: descriptor.base, limit, flags: kind | granularity | big | USEABLE }
}
