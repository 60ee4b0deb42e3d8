use std::sync::Arc;
use std::vec;
use std::vec::Vec;

use addr::Gpa;
use hyperv_defs::register::{Register, activity};
use hyperv_defs::{Answer, Code, Control, PartitionId, Status};

use crate::arch::fake::machine::{Simulation, run};
use crate::arch::fake::program::Op;
use crate::arch::hypercall::tests::{DONE, OUTPUT, call, children, create_input, word_at, words};
use crate::arch::hypercall::{Children, Ended};
use crate::sync::Ordering;
use crate::tests::{config, create, prepare};
use crate::vm::Vm;
use crate::vm::child::suspend;

/// A parent with a child of one vCPU.
struct Family {
    parent: Arc<Vm>,
    child: Arc<Vm>,
    id: u64,
    children: Children,
}

fn with_family(script: fn(&Family)) {
    run(1, move |simulation: &Simulation| {
        let configs = [config("parent", 1), config("child", 1)];
        prepare(&configs);
        let parent = create(simulation, 0, &configs[0], vec![vec![]]);
        let child = create(simulation, 1, &configs[1], vec![vec![Op::Stop]]);
        let children = children();
        let control = Control::new(Code::CreatePartition);
        assert_eq!(call(&parent, Some(&children), control, &create_input(), OUTPUT), DONE);
        let id = word_at(&parent, OUTPUT);
        children.add_vm(PartitionId(id), child.clone());
        script(&Family { parent, child, id, children });
    });
}

impl Family {
    /// A call, again and again until it is finished.
    fn call(&self, mut control: Control, input: &[u8]) -> Result<Ended, Status> {
        loop {
            match call(&self.parent, Some(&self.children), control, input, OUTPUT) {
                Ok(Ended::NotYet(rest)) => {
                    assert!(rest.rep_start() > control.rep_start(), "each call does something");
                    control = rest;
                }
                ended => return ended,
            }
        }
    }

    /// HvCallGetVpRegisters, from this element on.
    fn get(&self, vp: u32, names: &[Register], from: u16) -> Result<Ended, Status> {
        let mut input = words(&[self.id, vp.into()]);
        input.extend(names.iter().flat_map(|name| name.number().to_le_bytes()));
        let count = u16::try_from(names.len()).expect("few");
        self.call(Control::new(Code::GetVpRegisters).with_rep_count(count).with_rep_start(from), &input)
    }

    /// HvCallSetVpRegisters.
    fn set(&self, elements: &[(Register, u64)]) -> Result<Ended, Status> {
        let mut input = words(&[self.id, 0]);
        let element = |(name, value): &(Register, u64)| words(&[name.number().into(), 0, *value, 0]);
        input.extend(elements.iter().flat_map(element));
        let count = u16::try_from(elements.len()).expect("few");
        self.call(Control::new(Code::SetVpRegisters).with_rep_count(count), &input)
    }

    fn read(&self, name: Register) -> u64 {
        assert_eq!(self.get(0, &[name], 0), done(1));
        word_at(&self.parent, OUTPUT)
    }
}

fn done(count: u16) -> Result<Ended, Status> {
    Ok(Ended::With(Answer::new(Status::Success, count)))
}

fn refused_behind(count: u16, status: Status) -> Result<Ended, Status> {
    Ok(Ended::With(Answer::new(status, count)))
}

#[test]
fn registers_are_written_in_order_up_to_the_first_that_is_refused() {
    with_family(|family| {
        let list = [(Register::Gpr(3), 5), (Register::Rip, 7), (Register::Gpr(0), 1 << 40), (Register::Gpr(1), 9)];
        assert_eq!(family.set(&list), refused_behind(2, Status::InvalidRegisterValue));
        let read = [Register::Gpr(3), Register::Rip, Register::Gpr(0), Register::Gpr(1)].map(|name| family.read(name));
        assert_eq!(read, [5, 7, 0, 0]);
        let unknown = [(Register::Gpr(1), 9), (Register::Star, 0)];
        assert_eq!(family.set(&unknown), refused_behind(1, Status::InvalidParameter));
        assert_eq!(family.read(Register::Gpr(1)), 9);
    });
}

#[test]
fn list_of_registers_is_read_from_where_the_call_begins() {
    with_family(|family| {
        assert_eq!(family.set(&[(Register::Gpr(1), 11), (Register::Gpr(2), 22)]), done(2));
        let names = [Register::Gpr(1), Register::Gpr(2), Register::InternalActivityState, Register::VpIndex];
        assert_eq!(family.get(0, &names, 2), done(4));
        let seen: Vec<u64> = (0..4).map(|at| word_at(&family.parent, Gpa(OUTPUT.0 + at * 16))).collect();
        assert_eq!(seen, [family.id, 0, 0, 0], "what is before the beginning stays");
        assert_eq!(family.get(0, &names, 0), done(4));
        assert_eq!(word_at(&family.parent, Gpa(OUTPUT.0 + 16)), 22);
        assert_eq!(family.get(0, &[Register::Gpr(1), Register::Star], 0), refused_behind(1, Status::InvalidParameter));
        assert_eq!(family.get(1, &names, 0), Err(Status::InvalidVpIndex));
        let beyond = Control::new(Code::GetVpRegisters).with_rep_count(1);
        assert_eq!(family.call(beyond, &words(&[family.id + 1, 0, 0])), Err(Status::InvalidPartitionId));
    });
}

#[test]
fn vcpu_runs_once_no_reason_against_it_is_left() {
    with_family(|family| {
        let reasons = || family.child.vcpus()[0].suspended().load(Ordering::SeqCst);
        let (explicit, intercept) = (Register::ExplicitSuspend, Register::InterceptSuspend);
        assert_eq!(family.set(&[(explicit, 1), (Register::Gpr(1), 3), (intercept, 1)]), done(3));
        assert_eq!(reasons(), suspend::EXPLICIT | suspend::INTERCEPT);
        assert_eq!([explicit, intercept].map(|name| family.read(name)), [1, 1]);
        assert_eq!(family.set(&[(intercept, 0), (explicit, 2)]), refused_behind(1, Status::InvalidRegisterValue));
        assert_eq!(reasons(), suspend::EXPLICIT);
        assert_eq!(family.get(0, &[intercept, Register::Gpr(1), explicit], 0), done(3));
        let seen = [0, 16, 32].map(|at| word_at(&family.parent, Gpa(OUTPUT.0 + at)));
        assert_eq!(seen, [0, 3, 1]);
        let Ok(Ended::Yielding(answer)) = family.set(&[(explicit, 0)]) else { panic!("its vCPU may run") };
        assert_eq!(Ok(Ended::With(answer)), done(1));
        assert_eq!(reasons(), 0);
        // It runs, and may have ended by now.
        match family.get(0, &[Register::InternalActivityState], 0) {
            Err(ended) => assert_eq!(ended, Status::InvalidVpIndex),
            read => {
                assert_eq!(read, done(1));
                assert_eq!(word_at(&family.parent, OUTPUT) & activity::STARTUP_SUSPEND, 0);
            }
        }
    });
}

#[test]
fn cpuid_is_what_was_registered_for_the_vcpu() {
    with_family(|family| {
        let register = |vp: u64, leaf: u64, subleaf: u64, is_specific: u64| {
            let values = [5_u64, 6, 7, 8].map(|value| 0xffff_ffff << 32 | value);
            let input = [family.id, 2 << 32 | vp, subleaf << 32 | leaf, is_specific, 0, 0, 0, 0];
            let mut input = words(&input);
            // The four results begin at byte 28.
            input.truncate(28);
            input.extend(words(&values));
            family.call(Control::new(Code::RegisterInterceptResult), &input)
        };
        let values = |leaves: &[(u32, u32)]| {
            let mut input = words(&[family.id, 0, 0]);
            input
                .extend(leaves.iter().flat_map(|(leaf, subleaf)| [leaf.to_le_bytes(), subleaf.to_le_bytes()].concat()));
            let count = u16::try_from(leaves.len()).expect("few");
            family.call(Control::new(Code::GetVpCpuidValues).with_rep_count(count), &input)
        };
        assert_eq!(register(0, 7, 1, 1), DONE);
        assert_eq!(register(1, 7, 1, 1), Err(Status::InvalidVpIndex));
        assert_eq!(values(&[(7, 0), (7, 1), (1, 3)]), done(3));
        let seen: Vec<u64> = (0..6).map(|at| word_at(&family.parent, Gpa(OUTPUT.0 + at * 8))).collect();
        assert_eq!(seen, [7, 0, 6 << 32 | 5, 8 << 32 | 7, 3 << 32 | 1, 0]);
    });
}

#[test]
fn messages_about_cpuid_can_be_asked_for_and_others_cannot() {
    with_family(|family| {
        let install = |access: u64, kind: u64| {
            family.call(Control::new(Code::InstallIntercept), &words(&[family.id, kind << 32 | access, 0]))
        };
        assert_eq!(install(4, 2), DONE);
        assert_eq!(install(3, 1), Err(Status::FeatureUnavailable));
        assert_eq!(install(0, 1), DONE, "none at all");
    });
}

#[test]
fn state_is_in_pages_of_the_parent_or_in_the_call() {
    const PAGE: u64 = 5;
    with_family(|family| {
        let header = |kind: u64| [family.id, 0, kind, 0, 7];
        let variable = |code, count| Control::new(code).with_variable_words(count);
        let local_apic =
            |code, page: u64| family.call(variable(code, 1), &words(&[&header(0x8000_0000)[..], &[page]].concat()));
        assert_eq!(family.set(&[(Register::Gpr(1), 11), (Register::Gpr(2), 22)]), done(2));
        assert_eq!(local_apic(Code::GetVpState, PAGE), DONE);
        let at = |word: u64| word_at(&family.parent, Gpa(PAGE * 4096 + word * 8));
        assert_eq!([0, 1, 2, 15, 16].map(at), [0, 11, 22, 0, 0]);
        assert!(family.parent.memory.write(Gpa(PAGE * 4096 + 8), &[33]));
        assert_eq!(local_apic(Code::SetVpState, PAGE), DONE);
        assert_eq!([1, 2].map(|number| family.read(Register::Gpr(number))), [33, 22]);
        assert_eq!(
            local_apic(Code::GetVpState, 1 << 20),
            Err(Status::InvalidParameter),
            "the parent has no page there"
        );
        assert_eq!(local_apic(Code::SetVpState, 1 << 20), Err(Status::InvalidParameter));
        assert!(family.parent.memory.write(Gpa(PAGE * 4096), &[0xff]));
        assert_eq!(local_apic(Code::SetVpState, PAGE), Err(Status::InvalidParameter), "a state that no vCPU can have");

        let timers: Vec<u64> = (40..65).collect();
        let set = words(&[&header(4)[..], &timers].concat());
        assert_eq!(family.call(variable(Code::SetVpState, 25), &set), DONE);
        assert_eq!(family.call(Control::new(Code::GetVpState), &words(&header(4))), DONE);
        assert_eq!([0, 15].map(|word| word_at(&family.parent, Gpa(OUTPUT.0 + word * 8))), [40, 55]);
    });
}

#[test]
fn translation_tells_the_page_or_why_there_is_none() {
    with_family(|family| {
        let translate = |page: u64| {
            let input = words(&[family.id, 0, 2, page]);
            assert_eq!(family.call(Control::new(Code::TranslateVirtualAddress), &input), DONE);
            let code = word_at(&family.parent, OUTPUT) & 0xffff_ffff;
            (code, word_at(&family.parent, Gpa(OUTPUT.0 + 8)))
        };
        assert_eq!(translate(0x77), (0, 0x77));
        assert_eq!(translate(0), (1, 0));
    });
}

#[test]
fn interrupts_of_all_kinds_but_one_are_accepted() {
    with_family(|family| {
        let [smi, remote_read, external, lint0, lint1] = [2, 3, 7, 8, 9];
        let assert = |kind: u64, vector: u64| {
            family.call(Control::new(Code::AssertVirtualInterrupt), &words(&[family.id, kind, 0, vector]))
        };
        for kind in [smi, external, lint0, lint1] {
            assert_eq!(assert(kind, 0x41), DONE, "{kind}");
        }
        assert_eq!(assert(external, 0), DONE, "none waits any more");
        assert_eq!(assert(remote_read, 0x41), Err(Status::InvalidParameter));
        assert_eq!(assert(0, 15), Err(Status::InvalidParameter), "the vector of an exception");
        assert_eq!(assert(0, 0x41), DONE);
    });
}
