//! Host memory in whole frames.
//!
//! [`Frames`] owns a run of RAM exclusively until it is dropped. But others may change its content at any moment:
//! guests and devices get such memory, and a guest may write from another pCPU during a read. So no reference into it
//! is ever made, because Rust would assume that its target does not change. Bytes are copied in and out by accesses
//! that the compiler neither splits, repeats nor omits, and single words are atomics.
//!
//! A buddy allocator keeps its lists of free frames in the free memory itself. It needs no heap, so the heap can grow
//! from here (see [`HeapSource`]) without a lock cycle.

#![expect(unsafe_code, reason = "raw access to host memory through the direct map; owners and bounds are kept here")]

use core::alloc::{GlobalAlloc, Layout};
#[cfg(not(miri))]
use core::arch::asm;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;
use core::ops::Deref;
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicUsize, Ordering};

use addr::{Hpa, HpaRange, Hva, PAGE_BYTES};
use buddy_system_allocator::Heap;
use crossbeam_utils::CachePadded;
use spin::Mutex;

use crate::arch::paging::{direct_map, direct_map_inverse};

/// Blocks up to 2^47 bytes, half of the direct map.
const ORDERS: u32 = 48;

static POOL: CachePadded<Mutex<Heap<{ ORDERS as usize }>>> = CachePadded::new(Mutex::new(Heap::empty()));

/// The pool has no memory below this, where firmware and the start of other pCPUs have theirs.
pub(super) const LOW_END: Hpa = Hpa(1 << 20);

/// A block for the heap only, for the time when the pool is empty.
static RESERVE: CachePadded<Mutex<Reserve>> = CachePadded::new(Mutex::new(Reserve::new()));

struct Reserve {
    free: Heap<{ ORDERS as usize }>,
    /// Where the block is; empty until it is set aside.
    start: Hpa,
    bytes: u64,
}

impl Reserve {
    const fn new() -> Self {
        Self { free: Heap::empty(), start: Hpa(0), bytes: 0 }
    }

    fn holds(&self, hpa: Hpa) -> bool {
        hpa.0.wrapping_sub(self.start.0) < self.bytes
    }
}

/// A run of host RAM: contiguous, owned, in whole frames. Dropping it returns it to the pool.
#[derive(Debug)]
pub(crate) struct Frames {
    start: Hpa,
    bytes: u64,
}

impl Frames {
    /// Takes a block of 2^`order` bytes, aligned to its size; `None` if there is none.
    pub(crate) fn take_block(order: u32) -> Option<Self> {
        if order < PAGE_BYTES.ilog2() || order >= ORDERS {
            return None;
        }
        let layout = Layout::from_size_align(1 << order, 1 << order).ok()?;
        let block = POOL.lock().alloc(layout).ok()?;
        Some(Self { start: direct_map_inverse(Hva(block.as_ptr() as u64)), bytes: 1 << order })
    }

    /// Takes a block of 2^`order` bytes that ends at or below `end`, if one is among the first blocks of the pool.
    ///
    /// The pool prefers short blocks. On a large machine only memory below 4 GiB has some, so a few attempts find them.
    pub(crate) fn take_block_below(order: u32, end: Hpa) -> Option<Self> {
        const ATTEMPTS: usize = 64;
        // Those that are not wanted return to the pool only after the search.
        let mut others: [Option<Self>; ATTEMPTS] = [const { None }; ATTEMPTS];
        others.iter_mut().find_map(|slot| {
            let block = Self::take_block(order)?;
            if block.start.0 + block.bytes <= end.0 {
                return Some(Some(block));
            }
            *slot = Some(block);
            None
        })?
    }

    /// Takes ownership of a run that was forgotten (`core::mem::forget`).
    ///
    /// # Safety
    /// Exactly this run was forgotten, and nothing uses it any more.
    pub(super) const unsafe fn reclaim(start: Hpa, bytes: u64) -> Self {
        Self { start, bytes }
    }

    /// Memory below 1 MiB, which the pool never has: only one VM at a time gets it, and dropping it frees nothing. Its
    /// content is firmware's.
    ///
    /// # Safety
    /// It is RAM in whole frames below [`LOW_END`], present in the direct map. Nothing else uses it until it is
    /// dropped.
    #[allow(dead_code, reason = "not every architecture has such memory")]
    pub(super) const unsafe fn low(start: Hpa, bytes: u64) -> Self {
        Self { start, bytes }
    }

    /// Keeps the first `bytes` (rounded up to whole frames) and returns the rest to the pool.
    pub(crate) fn truncate(&mut self, bytes: u64) {
        let Some(kept) = bytes.checked_next_multiple_of(PAGE_BYTES).filter(|&kept| kept < self.bytes) else { return };
        let rest = Self { start: Hpa(self.start.0 + kept), bytes: self.bytes - kept };
        self.bytes = kept;
        drop(rest);
    }

    /// Where the run begins.
    pub(crate) const fn hpa(&self) -> Hpa {
        self.start
    }

    /// Its length in bytes, a multiple of 4096.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its first byte in the direct map. Accesses through the pointer must respect that the run has an owner.
    pub(crate) fn pointer(&self) -> *mut u8 {
        direct_map(self.start).0 as *mut u8
    }

    /// Copies bytes from `offset` on. False, and nothing done, when they are not all within the run.
    ///
    /// 1, 2, 4 and 8 bytes are read by one access, atomic when aligned.
    #[must_use]
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        let Some(from) = self.span(offset, into.len()) else { return false };
        // SAFETY: `span` has checked that the source is ours; `into` is a live slice of that length.
        unsafe { copy(from, into.as_mut_ptr(), into.len()) };
        true
    }

    /// Copies bytes to `offset` on. False, and nothing done, when they are not all within the run.
    ///
    /// 1, 2, 4 and 8 bytes are written by one access, atomic when aligned.
    #[must_use]
    pub(crate) fn write(&self, offset: u64, from: &[u8]) -> bool {
        let Some(to) = self.span(offset, from.len()) else { return false };
        // SAFETY: `span` has checked that the target is ours; `from` is a live slice of that length.
        unsafe { copy(from.as_ptr(), to, from.len()) };
        // SAFETY: the bytes that were just written.
        unsafe { write_back(to, from.len()) };
        true
    }

    /// Zeroes the whole run; fast where it is zero already.
    pub(crate) fn zero(&self) {
        self.zero_part(0, self.bytes);
    }

    /// Zeroes a part of the run. `offset` and `bytes` are multiples of 4096; a part outside of the run is ignored.
    pub(crate) fn zero_part(&self, offset: u64, bytes: u64) {
        let start = offset.next_multiple_of(PAGE_BYTES).min(self.bytes);
        let bytes = bytes.min(self.bytes - start) & !(PAGE_BYTES - 1);
        if bytes == 0 {
            return;
        }
        let pointer = self.pointer().wrapping_add(native(start));
        // Look for zeros in memory, not in a cache. A guest that had this memory may have written past the caches,
        // while a cache still held a line of zeros of the direct map. Such a line is clean and never written back. So
        // the check would find zeros, the line would be dropped later, and the next owner would read the last one's
        // data.
        // SAFETY: the run is ours, and this is a part of it.
        unsafe { write_back(pointer, native(bytes)) };
        // SAFETY: as above. It is a multiple of 4096 bytes long, but not empty.
        unsafe { zero(pointer, native(bytes)) };
        // SAFETY: as above.
        unsafe { write_back(pointer, native(bytes)) };
    }

    /// The run as 64-bit words.
    #[cfg(any(test, target_arch = "x86_64"))]
    #[inline]
    pub(crate) fn words(&self) -> &[core::sync::atomic::AtomicU64] {
        // SAFETY: the run is ours as long as the slice lives, present in the direct map, and aligned, because runs
        // start at frames. Rust code accesses it only through atomics and volatile accesses; all bit patterns are valid
        // words.
        unsafe { core::slice::from_raw_parts(self.pointer().cast(), native(self.bytes / 8)) }
    }

    /// Pointer to `offset` if `bytes` from there on are within the run.
    fn span(&self, offset: u64, bytes: usize) -> Option<*mut u8> {
        let end = offset.checked_add(bytes as u64)?;
        (end <= self.bytes).then(|| self.pointer().wrapping_add(native(offset)))
    }
}

/// A page of a run that somebody else owns.
pub(super) struct Borrowed<'a>(ManuallyDrop<Frames>, PhantomData<&'a Frames>);

impl Borrowed<'_> {
    /// The page at this address.
    ///
    /// # Safety
    /// It is a frame of a run whose owner keeps it for as long as this value lives.
    pub(super) const unsafe fn new(page: Hpa) -> Self {
        Self(ManuallyDrop::new(Frames { start: page, bytes: PAGE_BYTES }), PhantomData)
    }
}

impl Deref for Borrowed<'_> {
    type Target = Frames;

    fn deref(&self) -> &Frames {
        &self.0
    }
}

/// A run that is filled once, byte by byte, and then read: never shown to a guest or a device.
#[derive(Debug)]
pub(crate) struct Filled {
    run: Frames,
    filled: usize,
}

impl Filled {
    /// An empty one, with room for the whole run.
    pub(crate) const fn new(run: Frames) -> Self {
        Self { run, filled: 0 }
    }

    /// Adds bytes at the end. False, and nothing done, when there is no room for them.
    #[must_use]
    pub(crate) fn push(&mut self, bytes: &[u8]) -> bool {
        let fits = self.run.write(self.filled as u64, bytes);
        self.filled += if fits { bytes.len() } else { 0 };
        fits
    }

    /// The bytes added so far.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the run is ours, present in the direct map, and `push` has written `filled` bytes of it. Only `push`
        // writes to it, and this borrow must end before that.
        unsafe { core::slice::from_raw_parts(self.run.pointer(), self.filled) }
    }
}

/// A file that the boot loader has put into RAM, outside of the pool. Dropping it gives its pages to the pool.
#[derive(Debug)]
pub(crate) struct LoadedFile {
    range: HpaRange,
}

impl LoadedFile {
    /// The file in this range.
    ///
    /// # Safety
    /// The range is RAM, present in the direct map. No code writes it, and no one else uses the pages above 1 MiB that
    /// it touches.
    #[cfg(any(test, target_arch = "x86_64"))]
    pub(crate) const unsafe fn new(range: HpaRange) -> Self {
        Self { range }
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        let start = direct_map(self.range.start).0 as *const u8;
        // SAFETY: as promised to `new`; the pages are given away when `self` is dropped, and not before.
        unsafe { core::slice::from_raw_parts(start, native(self.range.bytes())) }
    }
}

impl Drop for LoadedFile {
    fn drop(&mut self) {
        if self.range.bytes() == 0 {
            return;
        }
        let start = self.range.start.0.max(LOW_END.0) & !(PAGE_BYTES - 1);
        let Some(end) = self.range.end().0.checked_next_multiple_of(PAGE_BYTES) else { return };
        if let Some(pages) = end.checked_sub(start).and_then(|bytes| HpaRange::new(Hpa(start), bytes)) {
            // SAFETY: whole frames of RAM that only this file used.
            unsafe { donate(pages) };
        }
    }
}

impl Drop for Frames {
    fn drop(&mut self) {
        if self.start < LOW_END {
            return;
        }
        let mut pool = POOL.lock();
        // In blocks that are as large as start and length allow: the ones a buddy allocator knows how to merge.
        while self.bytes != 0 {
            let order = self.start.0.trailing_zeros().min(self.bytes.ilog2()).min(ORDERS - 1);
            let Ok(layout) = Layout::from_size_align(1 << order, 1 << order) else { return };
            if let Some(block) = NonNull::new(self.pointer()) {
                // SAFETY: the run was carved out of blocks of this pool and is given back once; an aligned power of
                // two within a larger block is a block of its own to a buddy allocator.
                unsafe { pool.dealloc(block, layout) };
            }
            self.start = Hpa(self.start.0 + (1 << order));
            self.bytes -= 1 << order;
        }
    }
}

/// Gives RAM to the pool permanently.
///
/// # Safety
/// The range is RAM in whole frames, present in the direct map, and unused.
pub(crate) unsafe fn donate(range: HpaRange) {
    let start = native(direct_map(range.start).0);
    // SAFETY: passed on to the caller.
    unsafe { POOL.lock().add_to_heap(start, start + native(range.bytes())) };
}

/// Takes a block of 2^`order` bytes out of the pool permanently, for the heap only. Returns whether there was one. Call
/// it once.
pub(crate) fn set_reserve_aside(order: u32) -> bool {
    let Some(block) = Frames::take_block(order) else { return false };
    let mut reserve = RESERVE.lock();
    (reserve.start, reserve.bytes) = (block.hpa(), block.bytes());
    let start = native(block.pointer() as u64);
    // SAFETY: the block is RAM in whole frames and present in the direct map. Nothing uses it, and its owner was
    // forgotten.
    unsafe { reserve.free.add_to_heap(start, start + native(block.bytes())) };
    core::mem::forget(block);
    true
}

/// Whether the heap has taken something of its reserve, and has not given it back.
pub(crate) fn is_reserve_used() -> bool {
    RESERVE.lock().free.stats_alloc_actual() != 0
}

/// Bytes that the heap has taken, of the pool and of its reserve.
static HEAP_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Bytes that the heap has taken.
pub(crate) fn heap_bytes() -> u64 {
    HEAP_BYTES.load(Ordering::Relaxed) as u64
}

/// Bytes in the pool now, and bytes ever given to it.
pub(crate) fn free_and_total() -> (u64, u64) {
    let pool = POOL.lock();
    let total = pool.stats_total_bytes();
    ((total - pool.stats_alloc_actual()) as u64, total as u64)
}

/// An address or length as the target counts them.
#[expect(clippy::cast_possible_truncation, reason = "both architectures have 64 bits")]
const fn native(number: u64) -> usize {
    number as usize
}

/// Copies, not overlapping, by accesses that are neither repeated nor omitted.
///
/// # Safety
/// `from` is readable and `to` writable for `bytes`. Other writers may change one of them during the copy, if no Rust
/// reference to that memory exists.
unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    macro_rules! one_access {
        ($kind:ty) => {{
            // SAFETY: readable, by the caller's word; unaligned is fine for x86 and for AArch64's normal memory.
            let value = unsafe { ptr::read_volatile(from.cast::<Unaligned<$kind>>()) };
            // SAFETY: writable, by the caller's word.
            unsafe { ptr::write_volatile(to.cast::<Unaligned<$kind>>(), value) };
        }};
    }
    match bytes {
        1 => one_access!(u8),
        2 => one_access!(u16),
        4 => one_access!(u32),
        8 => one_access!(u64),
        // SAFETY: passed on to the caller.
        _ => unsafe { copy_many(from, to, bytes) },
    }
}

/// A value at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T>(T);

/// The general case of [`copy`]: words, then the bytes that remain.
///
/// # Safety
/// As for [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_many(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller guarantees these reads and writes. The direction flag is clear by the calling convention.
    unsafe {
        asm!(
            "rep movsq",
            "mov ecx, {tail:e}",
            "rep movsb",
            tail = in(reg) bytes % 8,
            inout("rcx") bytes / 8 => _,
            inout("rsi") from => _,
            inout("rdi") to => _,
            options(nostack, preserves_flags),
        );
    }
}

/// Zeroes `bytes`, a multiple of 512; does not write words that are zero already.
///
/// Memory that has not been used since power-on is zero. Under an emulator or another hypervisor it is not even backed
/// until it is written. Under QEMU's TCG, 512 MiB take 0.08 s when fresh and 0.12 s when full of data; `rep stosq`
/// takes 0.68 s and 0.14 s, unrolled stores without a check 0.62 s and 0.08 s.
///
/// # Safety
/// `to` is writable for `bytes`, as in [`copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn zero(to: *mut u8, bytes: usize) {
    // SAFETY: the caller guarantees these reads and writes.
    unsafe {
        asm!(
            "2:",
            "xor eax, eax",
            ".set at, 0",
            ".rept 64",
            "or rax, [rdi + at]",
            ".set at, at + 8",
            ".endr",
            "test rax, rax",
            "jnz 4f",
            "3:",
            "add rdi, 512",
            "dec rcx",
            "jnz 2b",
            "jmp 5f",
            "4:",
            "xor eax, eax",
            ".set at, 0",
            ".rept 64",
            "mov [rdi + at], rax",
            ".set at, at + 8",
            ".endr",
            "jmp 3b",
            "5:",
            out("rax") _,
            inout("rcx") bytes / 512 => _,
            inout("rdi") to => _,
            options(nostack),
        );
    }
}

/// The general case of [`copy`]: pairs of words, then the bytes that remain.
///
/// # Safety
/// As for [`copy`].
#[cfg(all(target_arch = "aarch64", not(miri)))]
unsafe fn copy_many(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller guarantees these reads and writes.
    unsafe {
        asm!(
            "2:",
            "subs {pairs}, {pairs}, #1",
            "b.lo 3f",
            "ldp {first}, {second}, [{from}], #16",
            "stp {first}, {second}, [{to}], #16",
            "b 2b",
            "3:",
            "subs {tail}, {tail}, #1",
            "b.lo 4f",
            "ldrb {first:w}, [{from}], #1",
            "strb {first:w}, [{to}], #1",
            "b 3b",
            "4:",
            pairs = inout(reg) bytes / 16 => _,
            tail = inout(reg) bytes % 16 => _,
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            first = out(reg) _,
            second = out(reg) _,
            options(nostack),
        );
    }
}

/// Zeroes `bytes`, a multiple of 512; does not write words that are zero already.
///
/// # Safety
/// `to` is writable for `bytes`, as in [`copy`].
#[cfg(all(target_arch = "aarch64", not(miri)))]
unsafe fn zero(to: *mut u8, bytes: usize) {
    // SAFETY: the caller guarantees these reads and writes.
    unsafe {
        asm!(
            "2:",
            "mov {sum}, xzr",
            ".set at, 0",
            ".rept 32",
            "ldp {first}, {second}, [{to}, #at]",
            "orr {first}, {first}, {second}",
            "orr {sum}, {sum}, {first}",
            ".set at, at + 16",
            ".endr",
            "cbz {sum}, 3f",
            ".set at, 0",
            ".rept 32",
            "stp xzr, xzr, [{to}, #at]",
            ".set at, at + 16",
            ".endr",
            "3:",
            "add {to}, {to}, #512",
            "subs {blocks}, {blocks}, #1",
            "b.ne 2b",
            sum = out(reg) _,
            first = out(reg) _,
            second = out(reg) _,
            to = inout(reg) to => _,
            blocks = inout(reg) bytes / 512 => _,
            options(nostack),
        );
    }
}

/// The general case of [`copy`] for Miri, which executes no assembly: words, then the bytes that remain. What a guest
/// writes meanwhile is no error here, as it is none for the assembly.
///
/// # Safety
/// As for [`copy`].
#[cfg(miri)]
unsafe fn copy_many(from: *const u8, to: *mut u8, bytes: usize) {
    use core::sync::atomic::{AtomicU8, AtomicU64};
    let words = if from.cast::<u64>().is_aligned() { bytes / 8 } else { 0 };
    for at in (0..words).map(|word| 8 * word) {
        // SAFETY: the caller guarantees this read.
        let word = unsafe { &*from.add(at).cast::<AtomicU64>() }.load(Ordering::Relaxed);
        // SAFETY: the caller guarantees this write.
        unsafe { to.add(at).cast::<Unaligned<u64>>().write_volatile(Unaligned(word)) };
    }
    for at in 8 * words..bytes {
        // SAFETY: the caller guarantees this read.
        let byte = unsafe { &*from.add(at).cast::<AtomicU8>() }.load(Ordering::Relaxed);
        // SAFETY: the caller guarantees this write.
        unsafe { to.add(at).write_volatile(byte) };
    }
}

/// Zeroes `bytes`, for Miri.
///
/// # Safety
/// `to` is writable for `bytes`, as in [`copy`].
#[cfg(miri)]
unsafe fn zero(to: *mut u8, bytes: usize) {
    // SAFETY: the caller guarantees these writes.
    unsafe { to.write_bytes(0, bytes) };
}

/// Makes writes visible to reads that bypass the caches. x86 has no such reads.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
const unsafe fn write_back(_at: *const u8, _bytes: usize) {}

/// Makes writes visible to reads that bypass the caches: a guest's reads do until it enables its caches (Arm ARM,
/// D7.5). It also invalidates the lines, so that later reads here see the guest's uncached writes. A clean alone would
/// leave lines that are right now and wrong later. Stage 2 could force guests to use the caches instead (FEAT_S2FWB),
/// but not on processors before Armv8.4.
///
/// # Safety
/// `at` is readable for `bytes`.
#[cfg(target_arch = "aarch64")]
pub(super) unsafe fn write_back(at: *const u8, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: cleaning and invalidating changes nothing that is read through the caches.
    unsafe {
        asm!(
            "mrs {line}, ctr_el0",
            "ubfx {line}, {line}, #16, #4",
            "mov {step}, #4",
            "lsl {step}, {step}, {line}",
            "sub {line}, {step}, #1",
            "bic {at}, {at}, {line}",
            "2:",
            "dc civac, {at}",
            "add {at}, {at}, {step}",
            "cmp {at}, {end}",
            "b.lo 2b",
            "dsb sy",
            line = out(reg) _,
            step = out(reg) _,
            at = inout(reg) at => _,
            end = in(reg) at.wrapping_add(bytes),
            options(nostack),
        );
    }
}

/// The heap's source of memory: the pool, or the reserve if the pool is empty. A free chunk goes back to where it came
/// from.
#[derive(Debug)]
pub(crate) struct HeapSource;

// SAFETY: blocks come from the pool or the reserve, and each exists once. A block is at least as large and as aligned
// as requested. It goes back to where it came from.
unsafe impl GlobalAlloc for HeapSource {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let bytes = layout.size().max(layout.align()).max(native(PAGE_BYTES));
        let Some(bytes) = bytes.checked_next_power_of_two() else { return ptr::null_mut() };
        if let Some(block) = Frames::take_block(bytes.ilog2()) {
            HEAP_BYTES.fetch_add(bytes, Ordering::Relaxed);
            let pointer = block.pointer();
            core::mem::forget(block);
            return pointer;
        }
        let Ok(layout) = Layout::from_size_align(bytes, bytes) else { return ptr::null_mut() };
        let Ok(block) = RESERVE.lock().free.alloc(layout) else { return ptr::null_mut() };
        HEAP_BYTES.fetch_add(bytes, Ordering::Relaxed);
        block.as_ptr()
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        let bytes = layout.size().max(layout.align()).max(native(PAGE_BYTES)).next_power_of_two();
        HEAP_BYTES.fetch_sub(bytes, Ordering::Relaxed);
        let start = direct_map_inverse(Hva(pointer as u64));
        let mut reserve = RESERVE.lock();
        if !reserve.holds(start) {
            drop(reserve);
            drop(Frames { start, bytes: bytes as u64 });
        } else if let (Some(block), Ok(layout)) = (NonNull::new(pointer), Layout::from_size_align(bytes, bytes)) {
            // SAFETY: it was taken from the reserve with this layout, and is given back once.
            unsafe { reserve.free.dealloc(block, layout) };
        }
    }
}
