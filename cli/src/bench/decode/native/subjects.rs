//! The timed operations.

use std::hint::black_box;
use std::sync::Arc;

use abi::payload::DecodeCache;
use addr::Gpa;
use decode_cache::{ByBytes, Bytes, Decoded as _, ModeNumber, Place, Size, Vouching, WriteProtect};
use emulator::Decoded;
use iced_x86::{Decoder, DecoderOptions};
use x86_emulate::{Mode, Walks, decode, fetch};

use super::Operation;
use super::emulator::{Emulator, Vm};
use super::machine::{BETWEEN, FORMS, Form, NEW_PLACES, ROOT, Ram, TABLES, Vcpu};
use crate::args::SETTINGS;

/// The kind of a figure, if it has a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Nothing was promised.
    Other,
    /// A hit with `bytes`.
    Hit,
    /// Whole emulation with `bytes`.
    Emulation,
}

/// A timed operation, and the same without the part of interest.
pub(super) struct Subject {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) operation: Operation,
    pub(super) empty: Operation,
}

impl Subject {
    /// One and the same operation, over and over.
    fn same(name: &str, kind: Kind, operation: impl FnMut() + Send + 'static) -> Self {
        let empty = Box::new(|| {
            black_box(0_u64);
        });
        Self { name: name.to_string(), kind, operation: Box::new(operation), empty }
    }

    /// An operation on a form that is another one each time, in an order that nothing can foresee.
    fn mixed(name: &str, kind: Kind, mut operation: impl FnMut(usize) + Send + 'static) -> Self {
        let (mut order, mut same_order) = (Order::new(), Order::new());
        Self {
            name: name.to_string(),
            kind,
            operation: Box::new(move || operation(order.next())),
            empty: Box::new(move || {
                black_box(same_order.next());
            }),
        }
    }
}

/// A random sequence of numbers, used modulo the number of forms.
struct Order {
    numbers: Box<[u8; Self::LENGTH]>,
    at: usize,
}

impl Order {
    /// Longer than a processor's branch history.
    const LENGTH: usize = 1 << 14;

    fn new() -> Self {
        let mut rng = fastrand::Rng::with_seed(1);
        Self { numbers: Box::new(std::array::from_fn(|_| rng.u8(..))), at: 0 }
    }

    #[inline]
    fn next(&mut self) -> usize {
        self.at = (self.at + 1) % Self::LENGTH;
        usize::from(self.numbers[self.at]) % FORMS.len()
    }
}

/// The caches' number for 64-bit mode.
pub(super) const BITS_64: ModeNumber = ModeNumber(Mode::Bits64 as u8);

/// The forms that drivers use most; their whole emulation is timed.
const KNOWN: [Form; 3] = [FORMS[0], FORMS[1], FORMS[2]];

pub(super) fn all() -> Vec<Subject> {
    let mut all = vec![
        fetching("fetch: walk confirmed, 4 levels", Walks::new()),
        fetching("fetch: walk done", Walks::forgetful()),
        Subject::mixed("decode by yaxpeax-x86: 8 forms in random order", Kind::Other, |form| {
            let _ = black_box(decode(Mode::Bits64, black_box(FORMS[form].code)));
        }),
        Subject::mixed("decode by iced-x86, a decoder each time: the same", Kind::Other, |form| {
            let mut decoder = Decoder::new(64, black_box(FORMS[form].code), DecoderOptions::NONE);
            black_box(decoder.decode());
        }),
    ];

    all.extend(hits());
    for setting in SETTINGS {
        let kind = if setting == DecodeCache::Bytes { Kind::Emulation } else { Kind::Other };
        for form in KNOWN {
            let emulator = Emulator::new(setting, Arc::new(Vm::new(setting)));
            all.push(emulating(setting.name(), kind, emulator, form));
        }
        if setting == DecodeCache::Off {
            // This figure shows the possible gain of a cache once walks are cached, which no instruction cache
            // provides.
            let emulator = Emulator::with_walks(setting, Arc::new(Vm::new(setting)), Walks::new());
            all.push(emulating("off, walks remembered", Kind::Other, emulator, KNOWN[0]));
        }
        if setting == DecodeCache::Bytes {
            all.push(from_new_places());
        }
    }
    all
}

fn emulating(what: &str, kind: Kind, mut emulator: Emulator, form: Form) -> Subject {
    Subject::same(&format!("whole emulation, {what}: {}", form.name), kind, move || {
        black_box(emulator.emulate(form.rip()));
    })
}

/// The cost of an access from a new address whose bytes are cached.
fn from_new_places() -> Subject {
    let mut emulator = Emulator::new(DecodeCache::Bytes, Arc::new(Vm::new(DecodeCache::Bytes)));
    let [mut rip, mut other] = NEW_PLACES;
    let name = format!("whole emulation, bytes, from a new place: {}", KNOWN[0].name);
    Subject::same(&name, Kind::Emulation, move || {
        black_box(emulator.emulate(rip));
        std::mem::swap(&mut rip, &mut other);
    })
}

fn fetching(name: &str, mut walks: Walks<Ram>) -> Subject {
    let vm = Vm::new(DecodeCache::Off);
    let vcpu = Vcpu::new();
    Subject::same(name, Kind::Other, move || {
        let _ = black_box(fetch(black_box(&vcpu.cpu), &vm.ram, &mut walks));
    })
}

/// The fetched bytes of a form: the form itself, and the bytes after it on its page.
pub(super) fn fetched(form: Form) -> Bytes {
    let mut bytes = [BETWEEN; decode_cache::MAX_LENGTH];
    bytes[..form.code.len()].copy_from_slice(form.code);
    Bytes::new(&bytes)
}

pub(super) fn place(form: Form) -> Place {
    Place { rip: form.rip(), space: ROOT, mode: BITS_64, gpa: Some(Gpa(form.rip())) }
}

pub(super) fn known(form: Form) -> Decoded {
    Decoded(decode(Mode::Bits64, form.code).expect("the forms are known instructions"))
}

/// A cache of bytes that knows all forms.
pub(super) fn by_bytes() -> Box<ByBytes<Decoded>> {
    let mut cache = Box::<ByBytes<Decoded>>::default();
    for form in FORMS {
        cache.insert(BITS_64, &fetched(form), known(form));
    }
    cache
}

/// A cache of places that knows all forms.
pub(super) fn by_place(vouching: Vouching) -> WriteProtect<Decoded> {
    let (cache, ram) = (WriteProtect::new(Size::default(), vouching), Ram::new());
    for form in FORMS {
        let _ = cache.insert(&place(form), &fetched(form), known(form), &TABLES, &ram, || true);
    }
    cache
}

/// Lookups that find their entry.
fn hits() -> Vec<Subject> {
    let (one, many) = (by_bytes(), by_bytes());
    let (walked, vouched) = (by_place(Vouching::Walk), by_place(Vouching::Tables));
    let (bytes, places) = (FORMS.map(fetched), FORMS.map(place));
    let packed = FORMS.map(|form| known(form).pack());
    vec![
        Subject::same("hit, bytes: one form", Kind::Hit, move || {
            black_box(one.find(BITS_64, black_box(&bytes[0])));
        }),
        Subject::mixed("hit, bytes: 8 forms in random order", Kind::Hit, move |form| {
            black_box(many.find(BITS_64, black_box(&bytes[form])));
        }),
        Subject::mixed("hit, write-protect: the same", Kind::Other, move |form| {
            black_box(walked.find(black_box(&places[form])));
        }),
        Subject::mixed("  of that, unpacking the instruction", Kind::Other, move |form| {
            black_box(Decoded::unpack(black_box(packed[form])));
        }),
        Subject::mixed("hit, write-protect-tables: the same, and no fetch", Kind::Other, move |form| {
            black_box(vouched.find(black_box(&places[form])));
        }),
    ]
}
