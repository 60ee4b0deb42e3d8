//! The heap: small objects of the hypervisor itself, never guest memory.
//!
//! It grows from the frame pool by chunks of [`CHUNK_BYTES`] and returns chunks that become free. A failed allocation
//! is a panic. So a VM's memory and its tables come from the pool instead, where the caller handles a failure. A VM's
//! vCPUs are objects of the heap; the code that makes them checks that the heap does not use its
//! [reserve](crate::frames::is_low).

use talc::TalcLock;
use talc::source::GlobalAllocSource;

use crate::arch::ram::HeapSource;
use crate::frames::HEAP_CHUNK_ORDER;

/// The heap's step of growth.
const CHUNK_BYTES: usize = 1 << HEAP_CHUNK_ORDER;

/// Bytes that objects on the heap take.
pub(crate) fn used_bytes() -> u64 {
    HEAP.lock().counters().allocated_bytes as u64
}

#[global_allocator]
static HEAP: TalcLock<spin::Mutex<()>, GlobalAllocSource<HeapSource>> =
    TalcLock::new(GlobalAllocSource::with_block_size(HeapSource, CHUNK_BYTES));
