//! The forms: machine code, name, and initial values. If code contains its target's address, the address is filled in
//! later.

/// Status flags.
pub(super) const CF: u64 = 1;
const PF: u64 = 1 << 2;
const AF: u64 = 1 << 4;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;
/// All of them.
pub(super) const STATUS: u64 = CF | PF | AF | ZF | SF | OF;
/// Flags that logic operations leave undefined (APM vol. 3).
const LOGIC: u64 = AF;
/// Flags that bit tests leave undefined; they define the carry flag.
const BITS: u64 = STATUS & !(CF | ZF);

/// Which registers lead where.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// RDI to the target, RSI to scratch memory.
    Destination,
    /// RSI to the target, RDI to scratch memory.
    Source,
    /// RDI to 0x1000, the bases of FS and GS so that FS:RDI and GS:RDI are the target.
    Based,
    /// The last eight bytes of the code are the target's address.
    Absolute,
    /// The last four bytes of the code are the distance to the target from there.
    Relative,
}

/// A form.
#[derive(Clone, Copy)]
pub(super) struct Form {
    pub(super) name: &'static str,
    pub(super) code: &'static [u8],
    pub(super) way: Way,
    /// Bytes of one access. Only four bytes are defined for the APICs; other widths run on unbacked addresses only.
    pub(super) width: u8,
    pub(super) rax: u64,
    pub(super) rcx: u64,
    pub(super) rdx: u64,
    /// RAX, or EDX:EAX and RDX:RAX for CMPXCHG8B and 16B, equals the target's contents.
    pub(super) equal: bool,
    /// Flags that are not compared.
    pub(super) undefined: u64,
    /// It makes more than one access, or one beside the target: not for a single register.
    pub(super) wide: bool,
    /// Direction flag set.
    pub(super) down: bool,
}

const fn form(name: &'static str, width: u8, code: &'static [u8]) -> Form {
    Form {
        name,
        code,
        way: Way::Destination,
        width,
        rax: 0x8877_6655_4433_2211,
        rcx: 5,
        rdx: 0x0102_0304_1020_3040,
        equal: false,
        undefined: 0,
        wide: false,
        down: false,
    }
}

impl Form {
    const fn way(mut self, way: Way) -> Self {
        self.way = way;
        self
    }

    const fn rax(mut self, rax: u64) -> Self {
        self.rax = rax;
        self
    }

    const fn rcx(mut self, rcx: u64) -> Self {
        self.rcx = rcx;
        self
    }

    const fn equal(mut self) -> Self {
        self.equal = true;
        self
    }

    const fn undefined(mut self, flags: u64) -> Self {
        self.undefined = flags;
        self
    }

    const fn wide(mut self) -> Self {
        self.wide = true;
        self
    }

    const fn down(mut self) -> Self {
        self.down = true;
        self
    }
}

/// All of them.
pub(super) static FORMS: [Form; 146] = [
    // Loads.
    form("mov-r8-m8", 1, &[0x8a, 0x07]),
    form("mov-ah-m8", 1, &[0x8a, 0x27]),
    form("mov-r15b-m8", 1, &[0x44, 0x8a, 0x3f]),
    form("mov-r16-m16", 2, &[0x66, 0x8b, 0x07]),
    form("mov-r32-m32", 4, &[0x8b, 0x07]),
    form("mov-r9d-m32", 4, &[0x44, 0x8b, 0x0f]),
    form("mov-r64-m64", 8, &[0x48, 0x8b, 0x07]),
    form("movzx-r32-m8", 1, &[0x0f, 0xb6, 0x07]),
    form("movzx-r32-m16", 2, &[0x0f, 0xb7, 0x07]),
    form("movzx-r64-m8", 1, &[0x48, 0x0f, 0xb6, 0x07]),
    form("movzx-r16-m8", 1, &[0x66, 0x0f, 0xb6, 0x07]),
    form("movsx-r32-m8", 1, &[0x0f, 0xbe, 0x07]),
    form("movsx-r32-m16", 2, &[0x0f, 0xbf, 0x07]),
    form("movsx-r64-m8", 1, &[0x48, 0x0f, 0xbe, 0x07]),
    form("movsx-r64-m16", 2, &[0x48, 0x0f, 0xbf, 0x07]),
    form("movsxd-r64-m32", 4, &[0x48, 0x63, 0x07]),
    // Stores.
    form("mov-m8-r8", 1, &[0x88, 0x07]),
    form("mov-m16-r16", 2, &[0x66, 0x89, 0x07]),
    form("mov-m32-r32", 4, &[0x89, 0x07]),
    form("mov-m64-r64", 8, &[0x48, 0x89, 0x07]),
    form("mov-m8-imm8", 1, &[0xc6, 0x07, 0x5a]),
    form("mov-m16-imm16", 2, &[0x66, 0xc7, 0x07, 0x34, 0x12]),
    form("mov-m32-imm32", 4, &[0xc7, 0x07, 0x78, 0x56, 0x34, 0x12]),
    form("mov-m64-imm32", 8, &[0x48, 0xc7, 0x07, 0x78, 0x56, 0x34, 0x92]),
    // Ways to say where.
    form("moffs-load-8", 1, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 0]).way(Way::Absolute),
    form("moffs-load-32", 4, &[0xa1, 0, 0, 0, 0, 0, 0, 0, 0]).way(Way::Absolute),
    form("moffs-load-64", 8, &[0x48, 0xa1, 0, 0, 0, 0, 0, 0, 0, 0]).way(Way::Absolute),
    form("moffs-store-32", 4, &[0xa3, 0, 0, 0, 0, 0, 0, 0, 0]).way(Way::Absolute),
    form("rip-relative-load", 4, &[0x8b, 0x05, 0, 0, 0, 0]).way(Way::Relative),
    form("rip-relative-store", 4, &[0x89, 0x0d, 0, 0, 0, 0]).way(Way::Relative),
    form("sib-scaled", 4, &[0x8b, 0x44, 0x8f, 0xec]),
    form("sib-no-index", 4, &[0x8b, 0x04, 0x27]),
    form("displacement-8", 4, &[0x8b, 0x44, 0xcf, 0xd8]),
    form("displacement-32", 4, &[0x89, 0x94, 0x8f, 0xec, 0xff, 0xff, 0xff]),
    form("ds-override", 1, &[0x3e, 0x8a, 0x07]),
    form("fs-base-load", 4, &[0x64, 0x8b, 0x07]).way(Way::Based),
    form("fs-base-store", 4, &[0x64, 0x89, 0x07]).way(Way::Based),
    form("gs-base-load", 4, &[0x65, 0x8b, 0x07]).way(Way::Based),
    form("gs-base-add", 4, &[0x65, 0x01, 0x07]).way(Way::Based),
    form("gs-base-address-size", 4, &[0x67, 0x65, 0x8b, 0x07]).way(Way::Based),
    // Arithmetic from memory.
    form("add-r32-m32", 4, &[0x03, 0x07]),
    form("or-r32-m32", 4, &[0x0b, 0x07]).undefined(LOGIC),
    form("adc-r32-m32", 4, &[0xf9, 0x13, 0x07]),
    form("sbb-r32-m32", 4, &[0xf9, 0x1b, 0x07]),
    form("and-r32-m32", 4, &[0x23, 0x07]).undefined(LOGIC),
    form("sub-r32-m32", 4, &[0x2b, 0x07]),
    form("xor-r32-m32", 4, &[0x33, 0x07]).undefined(LOGIC),
    form("cmp-r32-m32", 4, &[0x3b, 0x07]),
    form("cmp-m32-r32", 4, &[0x39, 0x07]),
    form("cmp-m8-imm8", 1, &[0x80, 0x3f, 0x81]),
    form("cmp-m32-imm8", 4, &[0x83, 0x3f, 0xff]),
    form("cmp-m64-r64", 8, &[0x48, 0x39, 0x07]),
    form("test-m32-r32", 4, &[0x85, 0x07]).undefined(LOGIC),
    form("test-m8-imm8", 1, &[0xf6, 0x07, 0x81]).undefined(LOGIC),
    form("test-m32-imm32", 4, &[0xf7, 0x07, 0x01, 0x00, 0x00, 0x80]).undefined(LOGIC),
    form("add-r8-m8", 1, &[0x02, 0x07]),
    form("sub-r16-m16", 2, &[0x66, 0x2b, 0x07]),
    form("xor-r64-m64", 8, &[0x48, 0x33, 0x07]).undefined(LOGIC),
    // Arithmetic to memory.
    form("add-m32-r32", 4, &[0x01, 0x07]),
    form("or-m32-r32", 4, &[0x09, 0x07]).undefined(LOGIC),
    form("adc-m32-r32", 4, &[0xf9, 0x11, 0x07]),
    form("sbb-m32-r32", 4, &[0xf9, 0x19, 0x07]),
    form("and-m32-r32", 4, &[0x21, 0x07]).undefined(LOGIC),
    form("sub-m32-r32", 4, &[0x29, 0x07]),
    form("xor-m32-r32", 4, &[0x31, 0x07]).undefined(LOGIC),
    form("add-m8-r8", 1, &[0x00, 0x07]),
    form("add-m16-r16", 2, &[0x66, 0x01, 0x07]),
    form("sub-m64-r64", 8, &[0x48, 0x29, 0x07]),
    form("add-m32-imm8", 4, &[0x83, 0x07, 0xff]),
    form("or-m32-imm32", 4, &[0x81, 0x0f, 0x00, 0x00, 0x01, 0x00]).undefined(LOGIC),
    form("adc-m32-imm8", 4, &[0xf9, 0x83, 0x17, 0x7f]),
    form("sbb-m32-imm8", 4, &[0xf9, 0x83, 0x1f, 0x01]),
    form("and-m32-imm8", 4, &[0x83, 0x27, 0xf0]).undefined(LOGIC),
    form("sub-m32-imm32", 4, &[0x81, 0x2f, 0x78, 0x56, 0x34, 0x12]),
    form("xor-m32-imm8", 4, &[0x83, 0x37, 0xff]).undefined(LOGIC),
    form("and-m8-imm8", 1, &[0x80, 0x27, 0x0f]).undefined(LOGIC),
    form("inc-m32", 4, &[0xff, 0x07]),
    form("dec-m32", 4, &[0xff, 0x0f]),
    form("inc-m8", 1, &[0xfe, 0x07]),
    form("dec-m64", 8, &[0x48, 0xff, 0x0f]),
    form("inc-m32-carry-stays", 4, &[0xf9, 0xff, 0x07]),
    form("not-m32", 4, &[0xf7, 0x17]),
    form("neg-m32", 4, &[0xf7, 0x1f]),
    form("not-m16", 2, &[0x66, 0xf7, 0x17]),
    form("neg-m8", 1, &[0xf6, 0x1f]),
    // Locked.
    form("lock-add", 4, &[0xf0, 0x01, 0x07]),
    form("lock-or-imm", 4, &[0xf0, 0x83, 0x0f, 0x08]).undefined(LOGIC),
    form("lock-and", 4, &[0xf0, 0x21, 0x07]).undefined(LOGIC),
    form("lock-xor", 4, &[0xf0, 0x31, 0x07]).undefined(LOGIC),
    form("lock-sub", 4, &[0xf0, 0x29, 0x07]),
    form("lock-adc", 4, &[0xf9, 0xf0, 0x11, 0x07]),
    form("lock-inc", 4, &[0xf0, 0xff, 0x07]),
    form("lock-dec", 4, &[0xf0, 0xff, 0x0f]),
    form("lock-not", 4, &[0xf0, 0xf7, 0x17]),
    form("lock-neg", 4, &[0xf0, 0xf7, 0x1f]),
    form("lock-xadd", 4, &[0xf0, 0x0f, 0xc1, 0x07]),
    form("lock-bts-imm", 4, &[0xf0, 0x0f, 0xba, 0x2f, 0x03]).undefined(BITS),
    form("lock-cmpxchg-equal", 4, &[0xf0, 0x0f, 0xb1, 0x17]).equal(),
    form("lock-cmpxchg8b", 8, &[0xf0, 0x0f, 0xc7, 0x0f]).wide(),
    // Exchange.
    form("xchg-m32-r32", 4, &[0x87, 0x07]),
    form("xchg-m8-r8", 1, &[0x86, 0x07]),
    form("xchg-m16-r16", 2, &[0x66, 0x87, 0x07]),
    form("xchg-m64-r64", 8, &[0x48, 0x87, 0x07]),
    form("xadd-m32-r32", 4, &[0x0f, 0xc1, 0x07]),
    form("xadd-m8-r8", 1, &[0x0f, 0xc0, 0x07]),
    form("xadd-m64-r64", 8, &[0x48, 0x0f, 0xc1, 0x07]),
    form("cmpxchg-m32-differs", 4, &[0x0f, 0xb1, 0x17]),
    form("cmpxchg-m32-equal", 4, &[0x0f, 0xb1, 0x17]).equal(),
    form("cmpxchg-m8-differs", 1, &[0x0f, 0xb0, 0x17]),
    form("cmpxchg-m64-equal", 8, &[0x48, 0x0f, 0xb1, 0x17]).equal(),
    form("cmpxchg8b-equal", 8, &[0x0f, 0xc7, 0x0f]).equal().wide(),
    form("cmpxchg16b-differs", 16, &[0x48, 0x0f, 0xc7, 0x0f]).wide(),
    form("cmpxchg16b-equal", 16, &[0x48, 0x0f, 0xc7, 0x0f]).equal().wide(),
    // Bits. The register form reaches beyond the operand, in both directions.
    form("bt-m32-imm", 4, &[0x0f, 0xba, 0x27, 0x04]).undefined(BITS),
    form("bts-m32-imm", 4, &[0x0f, 0xba, 0x2f, 0x03]).undefined(BITS),
    form("btr-m32-imm", 4, &[0x0f, 0xba, 0x37, 0x04]).undefined(BITS),
    form("btc-m32-imm", 4, &[0x0f, 0xba, 0x3f, 0x05]).undefined(BITS),
    form("bts-m32-imm-beyond", 4, &[0x0f, 0xba, 0x2f, 0x23]).undefined(BITS),
    form("btc-m32-imm-beyond", 4, &[0x0f, 0xba, 0x3f, 0x25]).undefined(BITS),
    form("btc-m16-imm-beyond", 2, &[0x66, 0x0f, 0xba, 0x3f, 0x85]).undefined(BITS),
    form("bt-m32-r32", 4, &[0x0f, 0xa3, 0x0f]).undefined(BITS),
    form("bts-m32-r32", 4, &[0x0f, 0xab, 0x0f]).rcx(1).undefined(BITS),
    form("bts-beyond", 4, &[0x0f, 0xab, 0x4f, 0xf0]).rcx(128 + 9).undefined(BITS),
    form("btr-beyond", 4, &[0x0f, 0xb3, 0x4f, 0xf0]).rcx(128 + 4).undefined(BITS),
    form("btc-below", 4, &[0x0f, 0xbb, 0x4f, 0x20]).rcx(0xffff_ff03).undefined(BITS),
    form("bt-below", 4, &[0x0f, 0xa3, 0x4f, 0x20]).rcx(0xffff_ff05).undefined(BITS),
    form("bts-m64-beyond", 8, &[0x48, 0x0f, 0xab, 0x4f, 0xe0]).rcx(256 + 7).undefined(BITS),
    // The stack.
    form("push-m64", 8, &[0xff, 0x37]),
    form("push-m16", 2, &[0x66, 0xff, 0x37]),
    form("pop-m64", 8, &[0x8f, 0x07]),
    form("pop-m16", 2, &[0x66, 0x8f, 0x07]),
    // Strings.
    form("stosd", 4, &[0xab]),
    form("stosb", 1, &[0xaa]),
    form("rep-stosd", 4, &[0xf3, 0xab]).rcx(1),
    form("rep-stosq-many", 8, &[0xf3, 0x48, 0xab]).rcx(37).wide(),
    form("rep-stosb-down", 1, &[0xf3, 0xaa]).rcx(21).wide().down(),
    form("rep-stosd-none", 4, &[0xf3, 0xab]).rcx(0),
    form("movsd-to-device", 4, &[0xa5]),
    form("movsd-from-device", 4, &[0xa5]).way(Way::Source),
    form("rep-movsb-from-device", 1, &[0xf3, 0xa4]).way(Way::Source).rcx(32).wide(),
    form("rep-movsq-to-device", 8, &[0xf3, 0x48, 0xa5]).rcx(8).wide(),
    form("lodsd", 4, &[0xad]).way(Way::Source),
    form("rep-lodsw", 2, &[0xf3, 0x66, 0xad]).way(Way::Source).rcx(9).wide(),
    form("repe-cmpsd", 4, &[0xf3, 0xa7]).way(Way::Source).rcx(9).wide(),
    form("repne-scasd", 4, &[0xf2, 0xaf]).rcx(9).rax(0x1234).wide(),
    form("repe-scasb-down", 1, &[0xf3, 0xae]).rcx(9).rax(0xff).wide().down(),
];
