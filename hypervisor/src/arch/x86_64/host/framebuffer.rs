//! The boot loader's framebuffer, as a second output for the log.

#![expect(unsafe_code, reason = "writes to the pixels that the boot loader says are there")]

use addr::{HpaRange, Hva};
use spin::{Mutex, MutexGuard};

use super::{boot, paging};
use crate::boot::handover::{Framebuffer, Handover};
use crate::screen::{MOST_CELLS, Pixels, Screen};

static SCREEN: Mutex<Option<Screen<'static, Mapped>>> = Mutex::new(None);

/// The text on the screen.
static CELLS: Mutex<[u8; MOST_CELLS]> = Mutex::new([0; MOST_CELLS]);

/// Shows the log from now on, on a screen that is empty at first. Once, with the final page tables.
pub(super) fn open(handover: &Handover) {
    if let Some(framebuffer) = usable(handover, paging::physical_end().0) {
        show_on(framebuffer, paging::map_mmio(framebuffer.start, framebuffer.bytes()));
    }
}

/// Like [`open`], while the boot page tables are in use and will stay so, because the start ends here. They map only
/// framebuffers below 4 GiB.
pub(super) fn open_at_boot(handover: &Handover) {
    if let Some(framebuffer) = usable(handover, boot::REACH) {
        show_on(framebuffer, Hva(framebuffer.start.0));
    }
}

/// The framebuffer, if it ends below `end` and pixels there can be nothing else: neither the image nor RAM.
fn usable(handover: &Handover, end: u64) -> Option<&Framebuffer> {
    let framebuffer = handover.framebuffer.as_ref()?;
    let range = HpaRange::new(framebuffer.start, framebuffer.bytes())?;
    let is_taken = range.overlaps(&paging::image()) || handover.memory.ram().iter().any(|ram| ram.overlaps(&range));
    (range.end().0 <= end && !is_taken).then_some(framebuffer)
}

fn show_on(framebuffer: &Framebuffer, start: Hva) {
    let Some(cells) = CELLS.try_lock() else { return };
    let pixels = Mapped { framebuffer: *framebuffer, start: start.0 as *mut u32 };
    let cells: &'static mut [u8; MOST_CELLS] = MutexGuard::leak(cells);
    *SCREEN.lock() = Screen::new(pixels, cells);
}

/// Shows the text. Drops it while another pCPU writes (only in a panic).
pub(super) fn write(text: &[u8]) {
    if let Some(screen) = SCREEN.try_lock().as_deref_mut().and_then(Option::as_mut) {
        screen.write(text);
    }
}

/// Whose the screen is from now on: the caller's. Nothing is shown on it any more, not even in a panic: the next owner
/// may put something else at its place. `None` if there was none, or it is not shown on.
pub(in crate::arch::x86_64) fn give_up() -> Option<Framebuffer> {
    let screen = SCREEN.lock().take()?;
    Some(screen.into_pixels().framebuffer)
}

/// The pixels.
struct Mapped {
    framebuffer: Framebuffer,
    start: *mut u32,
}

// SAFETY: no other code has the pixels, and only the holder of the lock writes them.
unsafe impl Send for Mapped {}

impl Pixels for Mapped {
    fn size(&self) -> (usize, usize) {
        (usize::from(self.framebuffer.width), usize::from(self.framebuffer.height))
    }

    fn set(&mut self, x: usize, y: usize, intensity: u8) {
        let (width, height) = self.size();
        assert!(x < width && y < height, "a pixel of the framebuffer");
        let value = self.framebuffer.shifts.iter().fold(0, |pixel, &shift| pixel | u32::from(intensity) << shift);
        // SAFETY: within the framebuffer, which stays mapped: a row has at least as many pixels as are shown.
        let pixel = unsafe { self.start.add(y * self.framebuffer.row_pixels as usize + x) };
        // SAFETY: as above, and no other code writes there.
        unsafe { pixel.write_volatile(value) };
    }
}
