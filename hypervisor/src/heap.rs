//! The heap: small objects of the hypervisor itself, never guest memory.
//!
//! It grows from the frame pool by chunks of [`CHUNK_BYTES`] and returns chunks that become free. An allocation that
//! cannot be served is a panic, so what a VM's size decides (its memory, its tables) is taken from the pool instead,
//! where exhaustion is an answer.

use talc::TalcLock;
use talc::source::GlobalAllocSource;

use crate::arch::ram::HeapSource;

/// The heap's step of growth.
const CHUNK_BYTES: usize = 1 << 20;

#[global_allocator]
static HEAP: TalcLock<spin::Mutex<()>, GlobalAllocSource<HeapSource>> =
    TalcLock::new(GlobalAllocSource::with_block_size(HeapSource, CHUNK_BYTES));
