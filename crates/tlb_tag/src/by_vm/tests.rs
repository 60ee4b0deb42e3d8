use alloc::vec::Vec;

use super::{CpuTags, Flush, Pool, VcpuTags, VmTags};
use crate::{Scheme, TagRange};

fn pool(scheme: Scheme, tags: u32) -> Pool {
    Pool::new(scheme, TagRange::new(1, tags), 2)
}

fn enter(vcpu: &mut VcpuTags, cpu: &mut CpuTags, epoch: u64) -> Flush {
    let entry = vcpu.enter(cpu, epoch);
    let flush = entry.flush();
    entry.completed();
    flush
}

/// Arrives, enters once, departs.
fn stay(vcpu: &mut VcpuTags, cpu: &mut CpuTags, came_back: bool) -> Flush {
    vcpu.arrive(cpu, came_back);
    let flush = enter(vcpu, cpu, 0);
    vcpu.depart(cpu);
    flush
}

#[test]
fn million_steady_entries_flush_nothing() {
    for scheme in [Scheme::Epoch, Scheme::Generation] {
        let pool = pool(scheme, 48);
        let vms: Vec<_> = (0..48).map(|_| pool.vm()).collect();
        let mut vcpus: Vec<_> = vms.iter().map(VmTags::vcpu).collect();
        let mut cpu = pool.cpu(0);
        vcpus.iter_mut().for_each(|vcpu| assert_eq!(stay(vcpu, &mut cpu, false), Flush::Nothing));
        let before = cpu.counts();
        for _ in 0..1_000_000 / 48 / 8 {
            for vcpu in &mut vcpus {
                vcpu.arrive(&mut cpu, true);
                (0..8).for_each(|_| assert_eq!(enter(vcpu, &mut cpu, 0), Flush::Nothing));
                vcpu.depart(&mut cpu);
            }
        }
        assert_eq!(cpu.counts(), before, "{scheme:?}");
    }
}

#[test]
fn vcpus_of_a_vm_have_one_tag_and_flush_what_the_other_left() {
    let pool = pool(Scheme::Epoch, 4);
    let (mut cpu, vm) = (pool.cpu(0), pool.vm());
    let (mut a, mut b) = (vm.vcpu(), vm.vcpu());
    assert_eq!(stay(&mut a, &mut cpu, false), Flush::Nothing);
    assert_eq!(stay(&mut b, &mut cpu, false), Flush::OwnTables);
    assert_eq!(a.tag(), b.tag());
    assert_eq!(stay(&mut b, &mut cpu, true), Flush::Nothing);
    assert_eq!(stay(&mut a, &mut cpu, true), Flush::OwnTables);
}

#[test]
fn vcpu_that_was_elsewhere_flushes_what_it_may_have_flushed_there_only() {
    let pool = pool(Scheme::Epoch, 4);
    let (mut here, mut there, vm) = (pool.cpu(0), pool.cpu(1), pool.vm());
    let mut vcpu = vm.vcpu();
    assert_eq!(stay(&mut vcpu, &mut here, false), Flush::Nothing);
    assert_eq!(stay(&mut vcpu, &mut there, false), Flush::Nothing);
    // It arrives, does not enter its guest, and arrives again.
    vcpu.arrive(&mut here, false);
    vcpu.depart(&mut here);
    assert_eq!(stay(&mut vcpu, &mut here, true), Flush::OwnTables);
}

#[test]
fn void_entries_and_new_epochs_flush_the_whole_tag_once() {
    let pool = pool(Scheme::Epoch, 4);
    let (mut cpu, vm) = (pool.cpu(0), pool.vm());
    let mut vcpu = vm.vcpu();
    vcpu.arrive(&mut cpu, false);
    assert_eq!(enter(&mut vcpu, &mut cpu, 0), Flush::Nothing);
    vcpu.void();
    assert_eq!(vcpu.enter(&mut cpu, 0).flush(), Flush::Tag);
    assert_eq!(enter(&mut vcpu, &mut cpu, 0), Flush::Tag, "a refused entry has paid nothing");
    assert_eq!(enter(&mut vcpu, &mut cpu, 0), Flush::Nothing);
    assert_eq!(enter(&mut vcpu, &mut cpu, 1), Flush::Tag);
    assert_eq!(enter(&mut vcpu, &mut cpu, 1), Flush::Nothing);
    vcpu.depart(&mut cpu);

    // Entries of another vCPU from an older epoch are more than its own tables.
    let mut sibling = vm.vcpu();
    sibling.arrive(&mut cpu, false);
    assert_eq!(enter(&mut sibling, &mut cpu, 2), Flush::Tag);
    sibling.depart(&mut cpu);
}

#[test]
fn vms_without_a_tag_of_their_own_share_one_and_flush_after_each_other() {
    let pool = pool(Scheme::Epoch, 1);
    let mut cpu = pool.cpu(0);
    let mut vcpus = [pool.vm().vcpu(), pool.vm().vcpu()];
    assert_eq!(stay(&mut vcpus[0], &mut cpu, false), Flush::Nothing);
    for _ in 0..3 {
        assert_eq!(stay(&mut vcpus[1], &mut cpu, true), Flush::Tag);
        assert_eq!(stay(&mut vcpus[0], &mut cpu, true), Flush::Tag);
    }
}

#[test]
fn tag_of_a_vm_that_is_gone_is_flushed_before_the_next_one_uses_it() {
    let pool = pool(Scheme::Epoch, 2);
    let mut cpu = pool.cpu(0);
    let mut old = pool.vm().vcpu();
    let tag = old.tag();
    assert_eq!(stay(&mut old, &mut cpu, false), Flush::Nothing);
    drop(old);
    let mut vcpus: Vec<_> = (0..2).map(|_| pool.vm().vcpu()).collect();
    let flushes: Vec<_> = vcpus.iter_mut().map(|vcpu| stay(vcpu, &mut cpu, false)).collect();
    let heir = vcpus.iter().position(|vcpu| vcpu.tag() == tag).expect("there are only two tags");
    assert_eq!(flushes[heir], Flush::Tag);
    assert_eq!(flushes[1 - heir], Flush::Nothing);
}

#[test]
fn rollover_voids_all_tags_but_of_what_runs() {
    let pool = pool(Scheme::Generation, 3);
    let (mut here, mut there) = (pool.cpu(0), pool.cpu(1));
    let vms: Vec<_> = (0..4).map(|_| pool.vm()).collect();
    let mut vcpus: Vec<_> = vms.iter().map(VmTags::vcpu).collect();
    let mut twin = vms[0].vcpu();

    // VM 0 keeps running; the others take turns here, until no tag is left for VM 3.
    vcpus[0].arrive(&mut there, false);
    assert_eq!(enter(&mut vcpus[0], &mut there, 0), Flush::Nothing);
    let tag = vcpus[0].tag();
    assert_eq!(stay(&mut vcpus[1], &mut here, false), Flush::Nothing);
    assert_eq!(stay(&mut vcpus[2], &mut here, false), Flush::Nothing);
    assert_eq!(here.counts().generations, 0);
    assert_eq!(stay(&mut vcpus[3], &mut here, false), Flush::Everything);
    assert_eq!(here.counts().generations, 1);
    assert_ne!(vcpus[3].tag(), tag);

    // VM 0 keeps its tag on both pCPUs, and flushes nothing where it kept running.
    assert_eq!(enter(&mut vcpus[0], &mut there, 0), Flush::Nothing);
    assert_eq!(stay(&mut twin, &mut here, false), Flush::Nothing, "all was flushed here");
    assert_eq!((twin.tag(), vcpus[0].tag()), (tag, tag));
    vcpus[0].depart(&mut there);

    // The other pCPU has not met the new generation.
    assert_eq!(stay(&mut vcpus[3], &mut there, false), Flush::Everything);
    assert_eq!(stay(&mut vcpus[0], &mut there, true), Flush::Nothing, "all was flushed");
}

#[test]
fn rollover_debt_survives_a_stay_without_entry() {
    let pool = pool(Scheme::Generation, 2);
    let (mut here, mut there) = (pool.cpu(0), pool.cpu(1));
    let mut vcpus: Vec<_> = (0..3).map(|_| pool.vm().vcpu()).collect();
    assert_eq!(stay(&mut vcpus[0], &mut there, false), Flush::Nothing);
    for vcpu in &mut vcpus {
        let _ = stay(vcpu, &mut here, false);
    }
    assert_eq!(here.counts().generations, 1);
    vcpus[1].arrive(&mut there, false);
    vcpus[1].depart(&mut there);
    assert_eq!(stay(&mut vcpus[2], &mut there, false), Flush::Everything);
}

#[test]
fn more_pcpus_than_tags_share_and_flush() {
    let pool = Pool::new(Scheme::Generation, TagRange::new(1, 1), 2);
    let (mut here, mut there) = (pool.cpu(0), pool.cpu(1));
    let mut vcpus: Vec<_> = (0..2).map(|_| pool.vm().vcpu()).collect();
    vcpus[0].arrive(&mut here, false);
    let _ = enter(&mut vcpus[0], &mut here, 0);
    vcpus[1].arrive(&mut there, false);
    let _ = enter(&mut vcpus[1], &mut there, 0);
    assert_eq!(vcpus[0].tag(), vcpus[1].tag());
    vcpus[0].depart(&mut here);
    vcpus[1].depart(&mut there);
    assert_ne!(stay(&mut vcpus[0], &mut there, false), Flush::Nothing);
    assert_ne!(stay(&mut vcpus[1], &mut there, true), Flush::Nothing);
}

#[test]
fn one_tag_for_all_is_flushed_at_each_entry() {
    let pool = pool(Scheme::FlushAlways, 9);
    let mut cpu = pool.cpu(0);
    let mut vcpus = [pool.vm().vcpu(), pool.vm().vcpu()];
    for vcpu in &mut vcpus {
        vcpu.arrive(&mut cpu, false);
        (0..3).for_each(|_| assert_eq!(enter(vcpu, &mut cpu, 0), Flush::Tag));
        vcpu.depart(&mut cpu);
        assert_eq!(vcpu.tag().get(), 1);
    }
}

#[test]
fn tag_to_flush_everywhere_is_the_one_that_vcpus_run_with() {
    let pool = pool(Scheme::Generation, 2);
    let (mut cpu, vm) = (pool.cpu(0), pool.vm());
    assert_eq!(vm.tag(), None);
    let mut vcpu = vm.vcpu();
    vcpu.arrive(&mut cpu, false);
    assert_eq!(vm.tag(), Some(vcpu.tag()));
    vcpu.depart(&mut cpu);
    assert_eq!(vm.tag(), Some(vcpu.tag()));
}

#[test]
fn pool_that_inherits_its_tags_flushes_what_is_under_them_once_on_each_pcpu() {
    for scheme in [Scheme::Epoch, Scheme::Generation] {
        let pool = pool(scheme, 4).inheriting();
        let (mut here, mut there) = (pool.cpu(0), pool.cpu(1));
        let mut vcpus: Vec<_> = (0..4).map(|_| pool.vm().vcpu()).collect();
        assert_eq!(stay(&mut vcpus[0], &mut here, false), Flush::Everything, "{scheme:?}");
        for vcpu in &mut vcpus[1..] {
            assert_eq!(stay(vcpu, &mut here, false), Flush::Nothing, "{scheme:?}");
        }
        assert_eq!(stay(&mut vcpus[2], &mut there, false), Flush::Everything, "{scheme:?}");
    }
}

#[test]
fn homes_are_counted_and_come_back() {
    let pool = pool(Scheme::Epoch, 3);
    let vms: Vec<_> = (0..5).map(|_| pool.vm()).collect();
    assert_eq!(pool.homes(), 3);
    drop(vms);
    assert_eq!(pool.homes(), 0);
}
