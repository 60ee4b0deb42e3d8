//! The control port's transport: a port of a virtio console (Virtio 1.2, 5.3), polled.
//!
//! On a device with several ports this is port 1. Such a device is required where no byte may be lost: QEMU's port 0 is
//! for `virtconsole`, which drops output that the other end does not accept at once, while a `virtserialport` makes the
//! sender wait. On a device with one port it is that one.
//!
//! Neither direction ever blocks a pCPU. Bytes to send are copied into free buffers. If the other end does not read,
//! the device keeps the buffers and [`ControlPort::transmit`] accepts nothing. The device is notified once per call,
//! whatever the number of buffers, because the notification is the expensive part.

#![expect(unsafe_code, reason = "memory that a device reads and writes, and its registers")]

use core::ptr::NonNull;

use addr::{Hpa, Hva, PAGE_BYTES};
use spin::Mutex;
use virtio_drivers::queue::VirtQueue;
use virtio_drivers::transport::{DeviceStatus, Transport};
use virtio_drivers::{BufferDirection, Hal, PhysAddr};

use crate::arch::paging::{direct_map, direct_map_inverse, map_mmio};
use crate::arch::virtio::{ConsoleTransport, find_console};
use crate::arch::{clock, contract};
use crate::frames::Frames;

/// Receive queue of the only port; its transmit queue, as always, is the next.
const ONLY_PORT_QUEUE: u16 = 0;
/// Receive queue for control messages.
const CONTROL_QUEUE: u16 = 2;
/// Number of our port among several.
const PORT: u32 = 1;
/// Receive queue of port 1.
const PORT_QUEUE: u16 = 4;

/// Buffers in each direction.
const BUFFERS: usize = 16;
/// Bytes in each buffer.
const BUFFER_BYTES: usize = 4096;

/// VIRTIO_F_VERSION_1: the device is not of the legacy kind.
const VERSION_1: u64 = 1 << 32;
/// VIRTIO_F_ACCESS_PLATFORM: the device's accesses go through the IOMMU, if there is one. It lets them pass.
const ACCESS_PLATFORM: u64 = 1 << 33;
/// VIRTIO_CONSOLE_F_MULTIPORT.
const MULTIPORT: u64 = 1 << 1;

/// Control messages (Virtio 1.2, 5.3.6.2).
const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const CONTROL_BYTES: usize = 8;
/// Time limit for the device to announce its ports, in nanoseconds. It needs milliseconds, unless it is a thread of
/// QEMU on a busy computer: there, 100 ms were too short once in 45 starts.
const PATIENCE: u64 = 5_000_000_000;

/// A byte stream to the tool, in both directions.
pub(crate) struct ControlPort {
    transport: ConsoleTransport,
    receive: Direction,
    transmit: Direction,
    /// The receive buffer being read: its index, the next byte and the end.
    reading: Option<(usize, usize, usize)>,
    /// Queues for control messages. After set-up no code reads them, and the device drops messages without room.
    _control: Option<[Direction; 2]>,
}

// SAFETY: the registers and the memory behind the pointers belong to this object alone, whichever pCPU has it.
unsafe impl Send for ControlPort {}

/// The control port, from [`open`] until the core takes it.
static OPENED: Mutex<Option<ControlPort>> = Mutex::new(None);

/// Opens the control port, if the machine has a working one.
///
/// Only one pCPU may run at the time of the call, see `find_console` of each architecture.
pub(super) fn open() {
    *OPENED.lock() = ControlPort::new();
}

impl ControlPort {
    /// Takes over the machine's virtio console; `None` if there is no working one.
    fn new() -> Option<Self> {
        let (mut transport, place) = find_console()?;
        let report = |error: &dyn core::fmt::Display| log::warn!("the virtio console at {place} is not used: {error}");

        // Virtio 1.2, 3.1.1: reset, features, queues, go.
        let driver = DeviceStatus::ACKNOWLEDGE | DeviceStatus::DRIVER;
        transport.set_status(DeviceStatus::empty());
        transport.set_status(driver);
        let features = transport.read_device_features() & (VERSION_1 | ACCESS_PLATFORM | MULTIPORT);
        if features & VERSION_1 == 0 {
            report(&"it is of the legacy kind");
            return None;
        }
        transport.write_driver_features(features);
        transport.set_status(driver | DeviceStatus::FEATURES_OK);
        let several = features & MULTIPORT != 0;
        let mut pair = |queue| {
            let receive = Direction::new(&mut transport, queue).inspect_err(|error| report(error)).ok()?;
            let transmit = Direction::new(&mut transport, queue + 1).inspect_err(|error| report(error)).ok()?;
            Some([receive, transmit])
        };
        let mut control = if several { Some(pair(CONTROL_QUEUE)?) } else { None };
        let [mut receive, transmit] = pair(if several { PORT_QUEUE } else { ONLY_PORT_QUEUE })?;
        transport.set_status(driver | DeviceStatus::FEATURES_OK | DeviceStatus::DRIVER_OK);

        receive.offer_all(&mut transport);
        if let Some(control) = &mut control
            && !open_port(&mut transport, control)
        {
            report(&"it has several ports, but not number 1");
            // The buffers are freed next.
            transport.set_status(DeviceStatus::empty());
            return None;
        }
        Some(Self { transport, receive, transmit, reading: None, _control: control })
    }
}

impl contract::ControlPort for ControlPort {
    fn take() -> Option<Self> {
        OPENED.lock().take()
    }

    fn receive(&mut self, into: &mut [u8]) -> usize {
        let mut done = 0;
        while done < into.len() {
            let Some((buffer, next, end)) = self.reading.take().or_else(|| self.receive.take_written()) else { break };
            let bytes = (end - next).min(into.len() - done);
            self.receive.buffers.copy_out(buffer, next, &mut into[done..done + bytes]);
            done += bytes;
            if next + bytes < end {
                self.reading = Some((buffer, next + bytes, end));
            } else {
                self.receive.offer_for_writing(buffer);
            }
        }
        self.receive.notify(&mut self.transport);
        done
    }

    fn transmit(&mut self, bytes: &[u8]) -> usize {
        self.transmit.send(&mut self.transport, bytes)
    }

    fn is_drained(&mut self) -> bool {
        self.transmit.reclaim_read();
        self.transmit.free == u16::MAX
    }
}

/// Tells a device with several ports that the driver is ready, waits for the port's announcement, and opens it.
fn open_port(transport: &mut ConsoleTransport, [receive, transmit]: &mut [Direction; 2]) -> bool {
    receive.offer_all(transport);
    let mut tell = |transport: &mut ConsoleTransport, event| transmit.send(transport, &control_message(event));
    tell(transport, DEVICE_READY);

    let deadline = clock::now() + clock::nanos_to_ticks(PATIENCE);
    while clock::now() < deadline {
        let Some((buffer, _, bytes)) = receive.take_written() else { continue };
        let mut message = [0; CONTROL_BYTES];
        receive.buffers.copy_out(buffer, 0, &mut message);
        if bytes >= CONTROL_BYTES && message[..6] == control_message(PORT_ADD)[..6] {
            tell(transport, PORT_READY);
            tell(transport, PORT_OPEN);
            return true;
        }
    }
    false
}

/// A message about our port: port, event, and the value 1.
fn control_message(event: u16) -> [u8; CONTROL_BYTES] {
    let mut message = [0; CONTROL_BYTES];
    message[..4].copy_from_slice(&PORT.to_le_bytes());
    message[4..6].copy_from_slice(&event.to_le_bytes());
    message[6..].copy_from_slice(&1u16.to_le_bytes());
    message
}

/// One queue and its buffers. A buffer is either free, or lent to the device, or being read by us.
struct Direction {
    index: u16,
    queue: VirtQueue<HostMemory, BUFFERS>,
    buffers: Buffers,
    /// One bit per free buffer.
    free: u16,
    /// By the queue's token: the lent buffer and how much of it was lent.
    lent: [(usize, usize); BUFFERS],
    /// There are buffers that the device was not notified of.
    untold: bool,
}

const _: () = assert!(BUFFERS == u16::BITS as usize, "one bit for each buffer");

impl Direction {
    fn new(transport: &mut ConsoleTransport, index: u16) -> virtio_drivers::Result<Self> {
        let mut queue = VirtQueue::new(transport, index, false, false)?;
        // It is polled: no interrupts, please.
        queue.set_dev_notify(false);
        let buffers = Buffers::new().ok_or(virtio_drivers::Error::DmaError)?;
        Ok(Self { index, queue, buffers, free: u16::MAX, lent: [(0, 0); BUFFERS], untold: false })
    }

    /// Copies as many of the bytes as there is room for and gives them to the device.
    fn send(&mut self, transport: &mut ConsoleTransport, bytes: &[u8]) -> usize {
        self.reclaim_read();
        let mut done = 0;
        while done < bytes.len() {
            let Some(buffer) = self.take_free() else { break };
            let chunk = &bytes[done..bytes.len().min(done + BUFFER_BYTES)];
            self.buffers.copy_in(buffer, chunk);
            self.offer_for_reading(buffer, chunk.len());
            done += chunk.len();
        }
        self.notify(transport);
        done
    }

    /// Gives all free buffers to the device, for writing.
    fn offer_all(&mut self, transport: &mut ConsoleTransport) {
        while let Some(buffer) = self.take_free() {
            self.offer_for_writing(buffer);
        }
        self.notify(transport);
    }

    /// A free buffer, which is then the caller's.
    fn take_free(&mut self) -> Option<usize> {
        let buffer = self.free.trailing_zeros();
        self.free &= self.free.wrapping_sub(1);
        (buffer < u16::BITS).then_some(buffer as usize)
    }

    /// Gives the first `bytes` of a buffer to the device, for reading.
    fn offer_for_reading(&mut self, buffer: usize, bytes: usize) {
        // SAFETY: the device does not have it yet, and the slice is only used in the next line.
        let part = unsafe { self.buffers.part(buffer, bytes) };
        // SAFETY: the buffer is left alone until the queue gives it back.
        let lent = unsafe { self.queue.add(&[part], &mut []) };
        self.lend(buffer, bytes, lent);
    }

    /// Gives a buffer to the device, for writing.
    fn offer_for_writing(&mut self, buffer: usize) {
        // SAFETY: as above.
        let part = unsafe { self.buffers.part(buffer, BUFFER_BYTES) };
        // SAFETY: as above.
        let lent = unsafe { self.queue.add(&[], &mut [part]) };
        self.lend(buffer, BUFFER_BYTES, lent);
    }

    fn lend(&mut self, buffer: usize, bytes: usize, lent: virtio_drivers::Result<u16>) {
        // There are as many descriptors as buffers, so that lending one cannot fail.
        match lent {
            Ok(token) => self.lent[usize::from(token)] = (buffer, bytes),
            Err(_) => self.free |= 1 << buffer,
        }
        self.untold = true;
    }

    /// Takes back the buffers that the device has read.
    fn reclaim_read(&mut self) {
        while let Some((token, (buffer, bytes))) = self.next_used() {
            // SAFETY: the device is done with it, and the slice is only used in the next line.
            let part = unsafe { self.buffers.part(buffer, bytes) };
            // SAFETY: the buffer that was lent under this token.
            let taken = unsafe { self.queue.pop_used(token, &[part], &mut []) };
            if taken.is_err() {
                return;
            }
            self.free |= 1 << buffer;
        }
    }

    /// Takes back a buffer that the device has written, with the range of bytes to read.
    fn take_written(&mut self) -> Option<(usize, usize, usize)> {
        let (token, (buffer, bytes)) = self.next_used()?;
        // SAFETY: the device is done with it, and the slice is only used in the next line.
        let part = unsafe { self.buffers.part(buffer, bytes) };
        // SAFETY: the buffer that was lent under this token.
        let written = unsafe { self.queue.pop_used(token, &[], &mut [part]) };
        // No device may cause a read beyond the buffer, whatever length it reports.
        Some((buffer, 0, (written.ok()? as usize).min(bytes)))
    }

    /// The next buffer that the device is done with. A token that was never given out ends the conversation.
    fn next_used(&self) -> Option<(u16, (usize, usize))> {
        let token = self.queue.peek_used()?;
        self.lent.get(usize::from(token)).map(|&lent| (token, lent))
    }

    fn notify(&mut self, transport: &mut ConsoleTransport) {
        if core::mem::take(&mut self.untold) && self.queue.should_notify() {
            transport.notify(self.index);
        }
    }
}

/// Memory for the buffers of one direction. Only touched while they are not lent.
struct Buffers(Frames);

impl Buffers {
    fn new() -> Option<Self> {
        let frames = Frames::allocate((BUFFERS * BUFFER_BYTES) as u64, PAGE_BYTES).ok()?;
        frames.zero();
        Some(Self(frames))
    }

    fn copy_in(&self, buffer: usize, from: &[u8]) {
        let whole = self.0.write((buffer * BUFFER_BYTES) as u64, from);
        debug_assert!(whole, "within the buffers");
    }

    fn copy_out(&self, buffer: usize, at: usize, into: &mut [u8]) {
        let whole = self.0.read((buffer * BUFFER_BYTES + at) as u64, into);
        debug_assert!(whole, "within the buffers");
    }

    /// The first `bytes` of a buffer, as a slice for the queue, which only uses its address.
    ///
    /// # Safety
    /// The device does not have the buffer, and the slice is dropped before the device gets it.
    unsafe fn part<'a>(&self, buffer: usize, bytes: usize) -> &'a mut [u8] {
        debug_assert!(buffer < BUFFERS && bytes <= BUFFER_BYTES);
        let start = self.0.pointer().wrapping_add(buffer * BUFFER_BYTES);
        // SAFETY: within the run, initialized, and the caller guarantees that nothing else uses it.
        unsafe { core::slice::from_raw_parts_mut(start, bytes) }
    }
}

/// How the driver crate gets at memory and registers: the device sees physical addresses. An IOMMU lets it.
pub(super) struct HostMemory;

// SAFETY: memory comes from the pool in whole owned pages, zeroed, and never leaves the direct map.
unsafe impl Hal for HostMemory {
    fn dma_alloc(pages: usize, _: BufferDirection) -> (PhysAddr, NonNull<u8>) {
        let frames = Frames::allocate(pages as u64 * PAGE_BYTES, PAGE_BYTES).ok();
        let pointer = frames.as_ref().and_then(|frames| NonNull::new(frames.pointer()));
        let (Some(frames), Some(pointer)) = (frames, pointer) else {
            // The crate takes the address 0 as "no memory".
            return (0, NonNull::dangling());
        };
        frames.zero();
        let hpa = frames.hpa().0;
        core::mem::forget(frames);
        (hpa, pointer)
    }

    unsafe fn dma_dealloc(hpa: PhysAddr, _: NonNull<u8>, pages: usize) -> i32 {
        // SAFETY: memory from `dma_alloc`, by the trait's rules.
        drop(unsafe { Frames::reclaim(Hpa(hpa), pages as u64 * PAGE_BYTES) });
        0
    }

    unsafe fn mmio_phys_to_virt(hpa: PhysAddr, bytes: usize) -> NonNull<u8> {
        let start = map_mmio(Hpa(hpa), bytes as u64);
        NonNull::new(start.0 as *mut u8).expect("device registers are not at address 0")
    }

    unsafe fn share(buffer: NonNull<[u8]>, _: BufferDirection) -> PhysAddr {
        let hpa = direct_map_inverse(Hva(buffer.cast::<u8>().as_ptr() as u64));
        debug_assert!(direct_map(hpa).0 == buffer.cast::<u8>().as_ptr() as u64);
        hpa.0
    }

    unsafe fn unshare(_: PhysAddr, _: NonNull<[u8]>, _: BufferDirection) {}
}
