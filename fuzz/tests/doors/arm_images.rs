//! Kernels of AArch64.

use aarch64_defs::image::place;
use fuzz::{Input, target};

fn read(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let (initrd, memory) = (input.u64() >> input.below(64), input.u64() >> input.below(64));
    let kernel = input.rest();
    let Ok(placement) = place(kernel, initrd, memory) else { return };
    let kernel_end = placement.kernel + kernel.len() as u64;
    assert!(kernel_end <= placement.device_tree, "{placement:?}");
    assert!(placement.device_tree < placement.initrd, "{placement:?}");
    assert!(placement.initrd.checked_add(initrd).is_some_and(|end| end <= memory), "{placement:?}");
}

#[test]
fn any_image_is_placed_in_its_memory_or_refused() {
    target("arm_images", read);
}
