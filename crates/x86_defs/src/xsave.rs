//! An XSAVE area in its two formats, and the change from one to the other (APM vol. 2, 11.5).
//!
//! An area begins with the 512 bytes of FXSAVE and a header of 64 bytes. Behind them are the components from number 2
//! on: in the *standard* format each at its own place, in the *compacted* format one behind the other. CPUID leaf D has
//! the sizes and places.
//!
//! Whoever saves a guest gets a compacted image. What it brings back is checked completely ([`expand`]), because an
//! XRSTOR of a wrong image faults in the hypervisor.

/// Bytes of the first part, which FXSAVE has too.
pub const LEGACY_BYTES: usize = 512;
/// Where components begin, in both formats.
pub const COMPONENTS: usize = 576;
/// Component 0.
pub const X87: u64 = 1 << 0;
/// Component 1, without MXCSR.
pub const SSE: u64 = 1 << 1;

/// MXCSR after reset: all exceptions are masked.
pub const MXCSR_RESET: u32 = 0x1f80;
/// The x87 control word after FNINIT: the same, and extended precision.
pub const FCW_RESET: u16 = 0x037f;

const COMPACTED: u64 = 1 << 63;
const MXCSR: usize = 24;
const X87_REGISTERS: core::ops::Range<usize> = 32..160;
const XMM_REGISTERS: core::ops::Range<usize> = 160..416;
/// The rest of the first part is reserved, or software's.
const USED_LEGACY_BYTES: usize = 416;
const XSTATE_BV: usize = 512;
const XCOMP_BV: usize = 520;

/// The size and the places of a component (CPUID leaf D, its subleaf).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Component {
    /// Bytes (EAX).
    pub bytes: usize,
    /// Place in the standard format (EBX).
    pub offset: usize,
    /// Whether it begins at a multiple of 64 in the compacted format (ECX, bit 1).
    pub is_aligned: bool,
}

/// An image is no valid one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Invalid;

/// The components of `states`, with their places in the compacted format.
fn places(states: u64, component: impl Fn(u32) -> Component) -> impl Iterator<Item = (u32, Component, usize)> {
    let mut next = COMPONENTS;
    (2..63).filter(move |number| states >> number & 1 != 0).map(move |number| {
        let found = component(number);
        let at = if found.is_aligned { next.next_multiple_of(64) } else { next };
        next = at + found.bytes;
        (number, found, at)
    })
}

/// Bytes of a compacted image of `states`.
pub fn compacted_bytes(states: u64, component: impl Fn(u32) -> Component) -> usize {
    places(states, component).last().map_or(COMPONENTS, |(_, component, at)| at + component.bytes)
}

/// Writes the compacted image of the components `states` of `area`, which is in the standard format. `mxcsr_mask` has
/// the bits that MXCSR can have. Returns its size; `None` if it does not fit.
///
/// Equal registers give equal images. So all components are marked as present, with their initial values if the area
/// has none: whether XSAVE marks a component that is initial differs by processor, and a state that never was in
/// registers has no mask of MXCSR.
pub fn compact(
    area: &[u8],
    states: u64,
    component: impl Fn(u32) -> Component,
    mxcsr_mask: u32,
    image: &mut [u8],
) -> Option<usize> {
    let bytes = compacted_bytes(states, &component);
    let image = image.get_mut(..bytes)?;
    image.fill(0);
    image[..USED_LEGACY_BYTES].copy_from_slice(area.get(..USED_LEGACY_BYTES)?);
    image[MXCSR + 4..MXCSR + 8].copy_from_slice(&mxcsr_mask.to_le_bytes());
    put(image, XSTATE_BV, states);
    put(image, XCOMP_BV, COMPACTED | states);
    let present = word(area, XSTATE_BV)?;
    for (number, component, at) in places(states, component) {
        if present >> number & 1 != 0 {
            let from = area.get(component.offset..component.offset + component.bytes)?;
            image[at..at + component.bytes].copy_from_slice(from);
        }
    }
    Some(bytes)
}

/// Replaces the components `states` of `area`, in the standard format, by those of `image`, in either format.
/// Components that the image has not got become initial. `mxcsr_mask` has the bits that MXCSR can have.
///
/// The first part is an exception: if anything is in it, it counts although the header has the bit of neither of its
/// two components. QEMU 11.1 clears the bits of components that its model of a CPU has not got, and a model without
/// XSAVE has none of them, but XMM registers. No image of [`compact`] lacks a bit.
///
/// Afterwards the area's first part is complete: it says what the registers are, whatever the header's bits.
///
/// # Errors
/// The image has components beyond `states`, a header or an MXCSR that XRSTOR refuses, or is too short. Then the area
/// is as before.
pub fn expand(
    image: &[u8],
    states: u64,
    component: impl Fn(u32) -> Component,
    mxcsr_mask: u32,
    area: &mut [u8],
) -> Result<(), Invalid> {
    let said = word(image, XSTATE_BV).ok_or(Invalid)?;
    let format = word(image, XCOMP_BV).ok_or(Invalid)?;
    let reserved = image.get(XCOMP_BV + 8..COMPONENTS).ok_or(Invalid)?;
    let is_compacted = format & COMPACTED != 0;
    let known = if is_compacted { format & !COMPACTED } else { states };
    let mxcsr = half_word(image, MXCSR).ok_or(Invalid)?;
    let has_legacy = image.iter().take(USED_LEGACY_BYTES).any(|&byte| byte != 0);
    let present = if said & (X87 | SSE) == 0 && has_legacy { said | states & (X87 | SSE) } else { said };
    let is_valid = said & !known == 0
        && known & !states == 0
        && (is_compacted || format == 0)
        && reserved.iter().all(|&byte| byte == 0)
        && mxcsr & !mxcsr_mask == 0;
    if !is_valid || area.len() < COMPONENTS {
        return Err(Invalid);
    }
    let fits = |component: &Component, at: usize| {
        image.len() >= at + component.bytes && area.len() >= component.offset + component.bytes
    };
    let place = |component: &Component, at: usize| if is_compacted { at } else { component.offset };
    let mut all = places(known, &component).filter(|(number, ..)| present >> number & 1 != 0);
    if !all.all(|(_, component, at)| fits(&component, place(&component, at))) {
        return Err(Invalid);
    }

    if states & X87 != 0 {
        let from = [0; LEGACY_BYTES];
        let from = if present & X87 != 0 { image } else { &from[..] };
        area[..MXCSR].copy_from_slice(&from[..MXCSR]);
        area[X87_REGISTERS].copy_from_slice(&from[X87_REGISTERS]);
        if present & X87 == 0 {
            area[..2].copy_from_slice(&FCW_RESET.to_le_bytes());
        }
    }
    if states & SSE != 0 {
        if present & SSE != 0 {
            area[XMM_REGISTERS].copy_from_slice(&image[XMM_REGISTERS]);
        } else {
            area[XMM_REGISTERS].fill(0);
        }
        // The standard format has MXCSR in any case.
        let mxcsr = if present & SSE != 0 || !is_compacted { mxcsr } else { MXCSR_RESET };
        area[MXCSR..MXCSR + 4].copy_from_slice(&mxcsr.to_le_bytes());
    }
    for (number, component, at) in places(known, &component) {
        if present >> number & 1 != 0 {
            let from = place(&component, at);
            let to = &mut area[component.offset..component.offset + component.bytes];
            to.copy_from_slice(&image[from..from + component.bytes]);
        }
    }
    let kept = word(area, XSTATE_BV).ok_or(Invalid)? & !states;
    put(area, XSTATE_BV, kept | present | states & (X87 | SSE));
    put(area, XCOMP_BV, 0);
    Ok(())
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

fn half_word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

/// Callers have checked that there is room.
fn put(bytes: &mut [u8], at: usize, value: u64) {
    if let Some(place) = bytes.get_mut(at..at + 8) {
        place.copy_from_slice(&value.to_le_bytes());
    }
}

#[cfg(test)]
mod tests;
