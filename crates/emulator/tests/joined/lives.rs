//! Random lives of a small machine: whatever was remembered, an emulation comes out as one that remembers nothing.

use crate::machine::{
    CODE, DATA, DEVICE, DEVICE_LINEAR, Mistake, PAGE, RDI, RIGHTS, ROOTS, Register, SETTINGS, Setting, Vcpu, Vm, cpu,
    set_mode,
};
use addr::Gpa;
use decode_cache::{Size, Vouching};
use emulator::Event;
use fastrand::Rng;
use x86_emulate::{Cause, CpuState, Memory as _, Outcome, Walks, emulate, fetch};

/// Instructions: loads and stores, some of which are none, or another, in 32-bit mode.
const FORMS: [&[u8]; 10] = [
    &[0x8b, 0x07],
    &[0x89, 0x07],
    &[0x0f, 0xb7, 0x07],
    &[0x44, 0x8b, 0x07],
    &[0x48, 0x8b, 0x07],
    &[0x81, 0x0f, 0x00, 0x00, 0x01, 0x00],
    &[0x87, 0x07],
    &[0x8b, 0x47, 0x20],
    &[0xc7, 0x07, 1, 2, 3, 4],
    &[0x0f, 0xff],
];

/// Where instructions begin in a page of code: the last are on two pages.
const OFFSETS: [u64; 8] = [0, 0x10, 0x20, 0x47, 0x80, 0x800, PAGE - 2, PAGE - 1];

/// How often each event was seen.
type Seen = [u32; 6];

/// The machine under test, and the one beside it that remembers nothing.
struct Life {
    random: Rng,
    vm: Vm,
    vcpus: [Vcpu; 2],
    plain: Vm,
    plain_vcpus: [(CpuState, Register); 2],
    seen: Seen,
}

impl Life {
    fn new(seed: u64, setting: Setting, mistake: Mistake) -> Self {
        let vcpu = || Vcpu::new(setting);
        let plain = || (cpu(), Register::default());
        Self {
            random: Rng::with_seed(seed),
            vm: Vm::with(setting, Size { slots: 8, pages: 8 }, mistake),
            vcpus: [vcpu(), vcpu()],
            plain: Vm::new(Setting::Off),
            plain_vcpus: [plain(), plain()],
            seen: [0; 6],
        }
    }

    /// One thing happens. Says what was wrong with it.
    fn step(&mut self) -> Result<(), String> {
        match self.random.u32(..32) {
            which @ (0 | 1) => {
                let (at, form) = (self.code_place(), FORMS[self.random.usize(..FORMS.len())]);
                for (gpa, byte) in (at..CODE + 2 * PAGE).zip(form) {
                    self.both(|vm| match which {
                        0 => vm.guest_write(gpa, &[*byte]),
                        _ => vm.write(Gpa(gpa), &[*byte]).expect("is memory"),
                    });
                }
            }
            2 => {
                let (space, page) = (self.random.usize(..2), self.random.u64(..2));
                let target = CODE + PAGE * self.random.u64(..2);
                // Sometimes without the accessed bit, which the emulator then sets.
                let rights = self.random.choice([RIGHTS, RIGHTS, RIGHTS & !0x60, 0]).unwrap_or(RIGHTS);
                self.both(|vm| vm.map(space, CODE + PAGE * page, target | rights));
            }
            3 => {
                let space = self.random.usize(..2);
                let entry = self.random.choice([DEVICE.0 | RIGHTS, DEVICE.0 | RIGHTS, DATA | RIGHTS, 0]).unwrap_or(0);
                self.both(|vm| vm.map(space, DEVICE_LINEAR, entry));
            }
            4 => {
                let (vcpu, root) = (self.random.usize(..2), ROOTS[self.random.usize(..2)]);
                self.both_cpus(vcpu, |cpu| cpu.cr3 = root);
            }
            5 => {
                let (vcpu, is_64_bit) = (self.random.usize(..2), self.random.bool());
                self.both_cpus(vcpu, |cpu| set_mode(cpu, is_64_bit));
            }
            6 => {
                let (vcpu, linear) =
                    (self.random.usize(..2), self.random.choice([DEVICE_LINEAR, DATA]).unwrap_or(DATA));
                let offset = self.random.u64(..8) * 4;
                self.both_cpus(vcpu, |cpu| cpu.gprs[RDI] = linear + offset);
            }
            _ => return self.emulate(),
        }
        Ok(())
    }

    fn emulate(&mut self) -> Result<(), String> {
        let (number, rip) = (self.random.usize(..2), self.code_place());
        let (cpu, device) = &mut self.plain_vcpus[number];
        cpu.rip = rip;
        // The hardware may have saved what it has fetched.
        let saved =
            if self.random.u32(..4) == 0 { fetch(cpu, &self.plain, &mut Walks::forgetful()).ok() } else { None };
        let bytes = saved
            .map_or(Vec::new(), |fetched| fetched.window.to_bytes()[..usize::from(fetched.window.length())].to_vec());
        let expected = emulate(cpu, &self.plain, device, Cause::Access(DEVICE));

        let vcpu = &mut self.vcpus[number];
        let (outcome, events) = vcpu.emulate(&self.vm, rip, &bytes);
        events.into_iter().for_each(|event| self.seen[event as usize] += 1);
        if outcome != expected {
            return Err(format!("at {rip:#x}: {outcome:x?} instead of {expected:x?}"));
        }
        if vcpu.cpu != *cpu || vcpu.device != *device {
            return Err(format!("at {rip:#x}: {:x?}, {:x?} instead of {cpu:x?}, {device:x?}", vcpu.cpu, vcpu.device));
        }
        let is_done = matches!(outcome, Outcome::Done { .. } | Outcome::Again);
        if is_done && self.vm.contents() != self.plain.contents() && !self.leaves_bits_alone() {
            return Err(format!("at {rip:#x}: memory differs"));
        }
        Ok(())
    }

    /// Whether memory is the same but for accessed bits: who need not walk to the code does not set them.
    fn leaves_bits_alone(&self) -> bool {
        const ACCESSED: u64 = 0x20;
        let (one, other) = (self.vm.contents(), self.plain.contents());
        let tables = 0..(CODE / 8) as usize;
        one.iter().zip(&other).enumerate().all(|(word, (one, other))| {
            let ignored = if tables.contains(&word) { ACCESSED } else { 0 };
            one | ignored == other | ignored
        })
    }

    fn code_place(&mut self) -> u64 {
        CODE + PAGE * self.random.u64(..2) + OFFSETS[self.random.usize(..OFFSETS.len())]
    }

    fn both(&self, change: impl Fn(&Vm)) {
        change(&self.vm);
        change(&self.plain);
    }

    fn both_cpus(&mut self, number: usize, change: impl Fn(&mut CpuState)) {
        change(&mut self.vcpus[number].cpu);
        change(&mut self.plain_vcpus[number].0);
    }
}

/// Lives until something is wrong, and what was seen in them.
fn lives(setting: Setting, mistake: Mistake, count: u64) -> (Result<(), String>, Seen) {
    let mut seen = Seen::default();
    for seed in 0..count {
        let mut life = Life::new(seed, setting, mistake);
        for step in 0..600 {
            if let Err(what) = life.step() {
                return (Err(format!("{setting:?}, life {seed}, step {step}: {what}")), seen);
            }
        }
        seen.iter_mut().zip(life.seen).for_each(|(all, these)| *all += these);
    }
    (Ok(()), seen)
}

#[test]
fn what_is_remembered_never_changes_what_an_instruction_does() {
    for setting in SETTINGS {
        let (result, seen) = lives(setting, Mistake::None, 60);
        result.unwrap_or_else(|what| panic!("{what}"));
        let never = |event: Event| seen[event as usize] == 0;
        assert_eq!(never(Event::Repeated), setting != Setting::Bytes, "{setting:?}: {seen:?}");
        for event in [Event::Found, Event::Inserted, Event::Replaced] {
            assert_eq!(never(event), setting == Setting::Off, "{setting:?}: {event:?} of {seen:?}");
        }
        assert!(!never(Event::Missed) && !never(Event::Walked));
    }
}

#[test]
fn mistakes_of_the_memory_are_found() {
    let [walk, tables] = [Setting::Place(Vouching::Walk), Setting::Place(Vouching::Tables)];
    for (setting, mistake) in [
        (walk, Mistake::Untold),
        (walk, Mistake::Unprotected),
        (tables, Mistake::Untold),
        (tables, Mistake::Unprotected),
        (walk, Mistake::HostUntold),
        (tables, Mistake::HostUntold),
    ] {
        let (result, _) = lives(setting, mistake, 200);
        assert!(result.is_err(), "{setting:?}: {mistake:?} was not found");
    }
}
