//! Vector and floating-point state of guests (APM vol. 2, 11.5).
//!
//! The hypervisor uses no vector registers. So a guest's values stay in the registers across its exits, and across a
//! halt after which the vCPU returns to the same pCPU. They are saved when the vCPU leaves the pCPU, and loaded only if
//! the registers hold another vCPU's state by then. XCR0, which selects the state components, belongs to the guest. It
//! is read back when the vCPU leaves, because not every machine supports the intercept of XSETBV.
//!
//! For the same reason all components of the machine are switched, not only the offered ones: without the intercept, a
//! guest can access the others, and would find another VM's data there. This excludes supervisor components: XSS
//! belongs to the host and stays zero, and guests get neither it nor XSAVES.

#![expect(unsafe_code, reason = "XSAVE and XRSTOR access registers and memory behind the compiler's back")]

use alloc::boxed::Box;
use core::arch::asm;
use core::arch::x86_64::__cpuid_count;
use core::sync::atomic::{AtomicU64, Ordering};

use addr::Hva;
use spin::Once;
use x86_64::registers::control::{Cr4, Cr4Flags};
use x86_defs::xsave;

use super::state::{State as _, gpr};
use super::vcpu::ArchVcpu;
use crate::arch::x86_64::backend::HostContext;
use crate::arch::x86_64::host::processor::has_protection_keys;
use crate::layout::OwnPages;

/// XCR0 at reset: x87 only.
const XCR0_RESET: u64 = 1;

/// State components that a guest may enable: x87, SSE, AVX, AVX-512 (three), protection keys.
pub(crate) const XCR0_OFFERED: u64 = 0b10_1110_0111;

/// A page: XSAVE needs only 64-byte alignment, but no other code may write next to it.
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

const PAGE: usize = 4096;

/// One vCPU's state while it is not in the registers.
pub(crate) struct FpuState {
    area: Box<[Page]>,
    xcr0: u64,
    /// Identifies this state among all ever made; 0 is none.
    identity: u64,
}

static IDENTITIES: AtomicU64 = AtomicU64::new(1);

impl FpuState {
    /// The state after reset.
    pub(crate) fn new() -> Self {
        let area = Box::<[Page]>::new_zeroed_slice((xsave_bytes() as usize).div_ceil(PAGE));
        // SAFETY: all bytes of a page may be zero. (Made in place: pages do not fit on the stack.)
        let area = unsafe { area.assume_init() };
        let mut state = Self { area, xcr0: XCR0_RESET, identity: 0 };
        state.reset();
        state
    }

    /// As after power-on, of a vCPU that is on no pCPU.
    pub(super) fn reset(&mut self) {
        self.changes();
        self.xcr0 = XCR0_RESET;
        let area = self.bytes_mut();
        area.fill(0);
        // An all-zero area is the initial configuration, except for two fields that XRSTOR loads unchanged: FCW 0x037f
        // (all exceptions masked, extended precision) and MXCSR 0x1f80 (all masked).
        area[0..2].copy_from_slice(&0x037f_u16.to_le_bytes());
        area[24..28].copy_from_slice(&0x1f80_u32.to_le_bytes());
        // XSTATE_BV: load x87 and SSE from the area, so that the two fields count.
        area[512] = 3;
    }

    /// Where the state is kept.
    pub(in crate::arch::x86_64) fn own_pages(&self) -> OwnPages {
        OwnPages { what: "XSAVE area", hva: Hva(self.area.as_ptr().addr() as u64), bytes: size_of_val(&*self.area) }
    }

    /// Loads the state into this pCPU's registers, unless it is still there: the vCPU ran here last (`came_back`), and
    /// no other state was loaded since.
    pub(in crate::arch::x86_64) fn load(&mut self, cpu: &HostContext, came_back: bool) {
        if came_back && cpu.fpu_holder.load(Ordering::Relaxed) == self.identity {
            self.load_xcr0();
            return;
        }
        // XRSTOR can only restore what XCR0 enables. Between two guests that is everything ([`enable`],
        // [`Self::save`]), so that components that this guest has not enabled become initial instead of keeping another
        // guest's data.
        // SAFETY: the area is aligned to at least 64 bytes, has the size that CPUID reports for XSAVE of all of
        // `machine_xcr0`, and was filled by `new` or by XSAVE. Both leave a header that XRSTOR accepts.
        unsafe {
            asm!("xrstor64 [{area}]", area = in(reg) self.area.as_ptr(), in("eax") u32::MAX, in("edx") u32::MAX, options(nostack));
        }
        self.load_xcr0();
        cpu.fpu_holder.store(self.identity, Ordering::Relaxed);
    }

    /// Sets XCR0, which has the machine's value. Most guests use that, and XSETBV is slow.
    fn load_xcr0(&self) {
        if self.xcr0 != machine_xcr0() {
            write_xcr0(self.xcr0);
        }
    }

    /// XCR0, of a vCPU that is on no pCPU.
    pub(super) fn xcr0(&self) -> u64 {
        self.xcr0
    }

    /// Writes XCR0; `None` for a value that a guest cannot write.
    pub(super) fn set_xcr0(&mut self, value: u64) -> Option<()> {
        is_valid_xcr0(value).then(|| self.xcr0 = value)
    }

    /// The 16 bytes at `place` in the area's first part, of a vCPU that is on no pCPU.
    pub(super) fn register(&self, place: usize) -> &[u8; 16] {
        self.bytes().get(place..).and_then(<[u8]>::first_chunk).unwrap_or(&[0; 16])
    }

    /// Writes them. `None` if MXCSR would have a bit that does not exist, which XRSTOR refuses.
    pub(super) fn set_register(&mut self, place: usize, mut value: [u8; 16]) -> Option<()> {
        if place == MXCSR_PLACE - 8 {
            let [.., a, b, c, d, _, _, _, _] = value;
            if u32::from_le_bytes([a, b, c, d]) & !mxcsr_mask() != 0 {
                return None;
            }
            value[12..].copy_from_slice(&mxcsr_mask().to_le_bytes());
        }
        self.changes();
        let bytes = self.bytes_mut();
        // The values in the area are used, not the components' initial values.
        bytes[512] |= 3;
        bytes[..512].get_mut(place..place + 16)?.copy_from_slice(&value);
        Some(())
    }

    /// Writes the image of these components, in the compacted format. Returns its size; `None` if it does not fit.
    pub(super) fn image(&self, components: u64, image: &mut [u8]) -> Option<usize> {
        xsave::compact(self.bytes(), offered(components), component, mxcsr_mask(), image)
    }

    /// Takes over these components from an image in either format. `None` if XRSTOR would not take it.
    pub(super) fn set_image(&mut self, components: u64, image: &[u8]) -> Option<()> {
        self.changes();
        xsave::expand(image, offered(components), component, mxcsr_mask(), self.bytes_mut()).ok()
    }

    /// PKRU, of a vCPU that is on no pCPU.
    pub(super) fn pkru(&self) -> u32 {
        let [present, ..] = word_at(self.bytes(), xsave::COMPONENTS - 64 + 1);
        let place = component(PKRU).offset;
        let is_initial = present >> (PKRU - 8) & 1 == 0;
        if is_initial || place == 0 { 0 } else { u32::from_le_bytes(word_at(self.bytes(), place)) }
    }

    /// The registers of no pCPU hold this state.
    fn changes(&mut self) {
        self.identity = IDENTITIES.fetch_add(1, Ordering::Relaxed);
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: pages are bytes, one behind the other.
        unsafe { core::slice::from_raw_parts(self.area.as_ptr().cast(), size_of_val(&*self.area)) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and nobody else has a reference.
        unsafe { core::slice::from_raw_parts_mut(self.area.as_mut_ptr().cast(), size_of_val(&*self.area)) }
    }

    /// Saves the state from this pCPU's registers, which keep it.
    pub(in crate::arch::x86_64) fn save(&mut self) {
        self.xcr0 = read_xcr0();
        if self.xcr0 != machine_xcr0() {
            write_xcr0(machine_xcr0());
        }
        // SAFETY: as for XRSTOR above; this code has the only reference to the area.
        unsafe {
            asm!("xsave64 [{area}]", area = in(reg) self.area.as_mut_ptr(), in("eax") u32::MAX, in("edx") u32::MAX, options(nostack));
        }
    }
}

/// The component of protection keys.
const PKRU: u32 = 9;

fn word_at(bytes: &[u8], at: usize) -> [u8; 4] {
    bytes.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or_default()
}

/// The given components that guests have. No bit set means all.
fn offered(components: u64) -> u64 {
    if components == 0 { host_xcr0() } else { components & host_xcr0() }
}

/// A component's places on this machine.
fn component(number: u32) -> xsave::Component {
    let found = __cpuid_count(0xd, number);
    xsave::Component { bytes: found.eax as usize, offset: found.ebx as usize, is_aligned: found.ecx & 2 != 0 }
}

/// Where MXCSR is in the area. Behind it is its mask.
const MXCSR_PLACE: usize = 24;

/// The bits that MXCSR can have on this machine (APM vol. 1, 11.4.4).
fn mxcsr_mask() -> u32 {
    /// Of processors that do not say.
    const DEFAULT: u32 = 0xffbf;
    #[repr(C, align(16))]
    struct Area([u8; 512]);
    static MASK: Once<u32> = Once::new();
    *MASK.call_once(|| {
        let mut area = Area([0; 512]);
        // SAFETY: writes the 512 bytes of the area, which is aligned as FXSAVE requires. CR4.OSFXSR was set by
        // `enable`.
        unsafe { asm!("fxsave64 [{}]", in(reg) &raw mut area, options(nostack, preserves_flags)) };
        let [a, b, c, d] = [28, 29, 30, 31].map(|at: usize| area.0[at]);
        match u32::from_le_bytes([a, b, c, d]) {
            0 => DEFAULT,
            mask => mask,
        }
    })
}

/// Lets this pCPU switch guests' state.
pub(in crate::arch::x86_64) fn enable() {
    // SAFETY: XSAVE exists (`hwvirt::check`), and so does all that came before it. The bits make XSAVE and
    // XSETBV legal, which the switch of guests' state needs, and moves of vector registers, which may hold a
    // hypercall's input.
    unsafe { Cr4::update(|cr4| cr4.insert(Cr4Flags::OSXSAVE | Cr4Flags::OSFXSR)) };
    if has_protection_keys() {
        // SAFETY: protection keys exist, and affect only user pages, of which the hypervisor has none. The bit enables
        // RDPKRU.
        unsafe { Cr4::update(|cr4| cr4.insert(Cr4Flags::PROTECTION_KEY_USER)) };
    }
    write_xcr0(machine_xcr0());
}

/// The first six 128-bit registers of the guest that just left, low half first: they are still in place.
pub(super) fn first_vector_registers() -> [u64; 12] {
    let mut registers = [0; 12];
    // SAFETY: writes the 96 bytes of the array. CR4.OSFXSR was set by `enable` on this pCPU, and the host's CR0
    // has neither EM nor TS.
    unsafe {
        asm!(
            "movups [{to}], xmm0",
            "movups [{to} + 16], xmm1",
            "movups [{to} + 32], xmm2",
            "movups [{to} + 48], xmm3",
            "movups [{to} + 64], xmm4",
            "movups [{to} + 80], xmm5",
            to = in(reg) registers.as_mut_ptr(),
            options(nostack, preserves_flags),
        );
    }
    registers
}

/// The components that both the machine has and a guest may enable.
pub(crate) fn host_xcr0() -> u64 {
    machine_xcr0() & XCR0_OFFERED
}

/// All components that the machine can have enabled (CPUID leaf D, subleaf 0). Together they are always a valid XCR0.
fn machine_xcr0() -> u64 {
    static MACHINE: Once<u64> = Once::new();
    *MACHINE.call_once(|| {
        let leaf = __cpuid_count(0xd, 0);
        u64::from(leaf.edx) << 32 | u64::from(leaf.eax)
    })
}

/// XCR0 of the guest whose state is in the registers.
pub(super) fn read_xcr0() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: CR4.OSXSAVE was set by `enable` on this pCPU.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack)) };
    u64::from(high) << 32 | u64::from(low)
}

/// XSETBV, where the CPU honours its intercept.
pub(in crate::arch::x86_64) fn set_xcr0(arch: &mut ArchVcpu) {
    let value = arch.edx_eax();
    #[expect(clippy::cast_possible_truncation, reason = "XSETBV reads ECX")]
    let register = arch.gprs[gpr::RCX] as u32;
    if register == 0 && arch.hardware.cpl() == 0 && is_valid_xcr0(value) {
        write_xcr0(value);
        arch.skip(3);
    } else {
        arch.general_protection();
    }
}

/// Whether a guest may set XCR0 to `value` (APM vol. 2, 11.5.2): x87 always, AVX only with SSE, AVX-512 only whole and
/// with AVX, and nothing that is not offered.
fn is_valid_xcr0(value: u64) -> bool {
    const SSE: u64 = 1 << 1;
    const AVX: u64 = 1 << 2;
    const AVX512: u64 = 7 << 5;
    value & !host_xcr0() == 0
        && value & 1 != 0
        && (value & AVX == 0 || value & SSE != 0)
        && (value & AVX512 == 0 || (value & AVX512 == AVX512 && value & AVX != 0))
}

/// Sets XCR0 of the guest whose state is in the registers. The value must be valid ([`is_valid_xcr0`]).
fn write_xcr0(value: u64) {
    // SAFETY: the machine supports the value, see the callers; the hypervisor uses no extended state. The instruction
    // reads the lower half of RAX.
    unsafe { asm!("xsetbv", in("rcx") 0, in("rax") value, in("rdx") value >> 32, options(nomem, nostack)) };
}

/// Bytes that XSAVE needs for all components of the machine.
fn xsave_bytes() -> u32 {
    __cpuid_count(0xd, 0).ecx.max(576)
}
