//! The framebuffer that a boot loader hands over, as a second way out for the log.

#![expect(unsafe_code, reason = "writes to the pixels that the boot loader says are there")]

use spin::Mutex;

use super::paging;
use crate::boot::handover::Framebuffer;
use crate::screen::{Pixels, Screen};

static SCREEN: Mutex<Option<Screen<Mapped>>> = Mutex::new(None);

/// Shows from now on what is logged, on a screen that is empty at first. Needs the heap.
pub(super) fn open(framebuffer: &Framebuffer) {
    let start = paging::map_mmio(framebuffer.start, framebuffer.bytes());
    *SCREEN.lock() = Screen::new(Mapped { framebuffer: *framebuffer, start: start.0 as *mut u32 });
}

/// Shows the text. Where somebody else does so at this moment (which only a panic can be), it is lost.
pub(super) fn write(text: &[u8]) {
    if let Some(screen) = SCREEN.try_lock().as_deref_mut().and_then(Option::as_mut) {
        screen.write(text);
    }
}

/// The pixels.
struct Mapped {
    framebuffer: Framebuffer,
    start: *mut u32,
}

// SAFETY: the pixels belong to nobody else, and are written by whoever holds the lock.
unsafe impl Send for Mapped {}

impl Pixels for Mapped {
    fn size(&self) -> (usize, usize) {
        (usize::from(self.framebuffer.width), usize::from(self.framebuffer.height))
    }

    fn set(&mut self, x: usize, y: usize, intensity: u8) {
        let (width, height) = self.size();
        assert!(x < width && y < height, "a pixel of the framebuffer");
        let value = self.framebuffer.shifts.iter().fold(0, |pixel, &shift| pixel | u32::from(intensity) << shift);
        // SAFETY: within the framebuffer, which is mapped for good: a row has at least as many pixels as are shown.
        let pixel = unsafe { self.start.add(y * self.framebuffer.row_pixels as usize + x) };
        // SAFETY: the same, and nobody else writes there.
        unsafe { pixel.write_volatile(value) };
    }
}
