//! The heap: small objects of the hypervisor itself, never guest memory.
//!
//! It grows from the frame pool by chunks of [`CHUNK_BYTES`] and returns chunks that become free. An allocation that
//! cannot be served is a panic, so a VM's memory and its tables are taken from the pool instead, where exhaustion is an answer.
//! A VM's vCPUs are objects of the heap: while they are made, it is seen to that the heap does not use up its
//! [reserve](crate::frames::is_low).

use talc::TalcLock;
use talc::source::GlobalAllocSource;

use crate::arch::ram::HeapSource;
use crate::frames::HEAP_CHUNK_ORDER;

/// The heap's step of growth.
const CHUNK_BYTES: usize = 1 << HEAP_CHUNK_ORDER;

#[global_allocator]
static HEAP: TalcLock<spin::Mutex<()>, GlobalAllocSource<HeapSource>> =
    TalcLock::new(GlobalAllocSource::with_block_size(HeapSource, CHUNK_BYTES));
