//! Finds virtio devices on this architecture: at addresses in the device tree (Virtio 1.2, 4.2).

#![expect(unsafe_code, reason = "registers in memory")]

use core::ptr::NonNull;

use addr::HpaRange;
use spin::Once;
use virtio_drivers::transport::mmio::{MmioTransport, VirtIOHeader};
use virtio_drivers::transport::{DeviceType, Transport};

use super::{boot, paging};

/// Registers of the console that the hypervisor uses.
static USED: Once<HpaRange> = Once::new();

/// The console's registers, if one was found.
pub(in crate::arch::aarch64) fn used() -> Option<&'static HpaRange> {
    USED.get()
}

/// How a virtio console is reached.
pub(crate) type ConsoleTransport = MmioTransport<'static>;

/// Finds the virtio console at the lowest address, and returns its address.
pub(crate) fn find_console() -> Option<(ConsoleTransport, impl core::fmt::Display)> {
    let places = boot::machine()?.virtio.iter().flatten();
    let mut consoles = places.filter_map(|place| {
        let start = paging::map_mmio(place.start, place.bytes());
        let header = NonNull::new(start.0 as *mut VirtIOHeader)?;
        // SAFETY: a transport's registers, from the device tree, never unmapped; only one driver uses them.
        let transport = unsafe { MmioTransport::new(header, usize::try_from(place.bytes()).ok()?) }.ok()?;
        (transport.device_type() == DeviceType::Console).then_some((transport, *place))
    });
    let (transport, place) = consoles.next()?;
    USED.call_once(|| place);
    Some((transport, place.start))
}
