use alloc::vec::Vec;

use crate::{CpuTags, Flush, Pool, Scheme, TagRange, VcpuTags};

fn pool(scheme: Scheme, tags: u32) -> Pool {
    Pool::new(scheme, TagRange::new(1, tags), true)
}

/// One completed entry. Returns what it flushed.
fn enter(vcpu: &mut VcpuTags, cpu: &mut CpuTags, epoch: u64) -> Flush {
    let entry = vcpu.enter(cpu, epoch);
    let flush = entry.flush();
    entry.completed();
    flush
}

/// vCPUs take turns on pCPUs of their own, `entries` entries at a time.
fn take_turns(vcpus: &mut [VcpuTags], cpus: &mut [CpuTags], rounds: u32, entries: u32) -> u64 {
    let mut flushes = 0;
    for _ in 0..rounds {
        for (number, vcpu) in vcpus.iter_mut().enumerate() {
            let home = number % cpus.len();
            let cpu = &mut cpus[home];
            // The first arrival has no earlier one here, whatever the caller says.
            vcpu.arrive(cpu, true);
            for _ in 0..entries {
                flushes += u64::from(enter(vcpu, cpu, 0) != Flush::Nothing);
            }
        }
    }
    flushes
}

#[test]
fn million_steady_entries_flush_nothing_with_a_tag_for_each_vcpu() {
    let pool = pool(Scheme::Epoch, 48);
    let mut vcpus: Vec<_> = (0..48).map(|_| pool.vcpu()).collect();
    let mut cpus = [pool.cpu(), pool.cpu()];
    take_turns(&mut vcpus, &mut cpus, 1, 1);
    let before = cpus.each_ref().map(CpuTags::counts);

    assert_eq!(take_turns(&mut vcpus, &mut cpus, 1000, 21), 0);
    assert_eq!(cpus.each_ref().map(CpuTags::counts), before, "nor is anything handed out");
}

#[test]
fn tags_suffice_if_they_do_on_each_pcpu() {
    // Eight vCPUs, four tags; but only four vCPUs on each pCPU.
    let pool = pool(Scheme::Epoch, 4);
    let mut vcpus: Vec<_> = (0..8).map(|_| pool.vcpu()).collect();
    let mut cpus = [pool.cpu(), pool.cpu()];
    take_turns(&mut vcpus, &mut cpus, 1, 1);
    assert_eq!(take_turns(&mut vcpus, &mut cpus, 1000, 3), 0);
}

#[test]
fn neighbour_of_a_vm_that_remaps_in_a_loop_flushes_never_with_epochs_and_often_with_generations() {
    for (scheme, neighbour_flushes) in [(Scheme::Epoch, false), (Scheme::Generation, true)] {
        let pool = pool(scheme, 4);
        let mut cpu = pool.cpu();
        let (mut remaps, mut neighbour) = (pool.vcpu(), pool.vcpu());
        for vcpu in [&mut remaps, &mut neighbour] {
            vcpu.arrive(&mut cpu, false);
            let _ = enter(vcpu, &mut cpu, 0);
        }
        let _ = enter(&mut remaps, &mut cpu, 0);

        let mut assigned = 0;
        let mut flushed = 0;
        for epoch in 1..1000 {
            remaps.arrive(&mut cpu, true);
            let _ = enter(&mut remaps, &mut cpu, epoch);
            neighbour.arrive(&mut cpu, true);
            let entry = neighbour.enter(&mut cpu, 0);
            assigned += u32::from(entry.assigned());
            flushed += u32::from(entry.flush() != Flush::Nothing);
            entry.completed();
        }
        assert_eq!(assigned + flushed > 0, neighbour_flushes, "{scheme:?}: {assigned} tags, {flushed} flushes");
    }
}

#[test]
fn generation_is_exhausted_by_as_many_flushes_as_there_are_tags() {
    let pool = pool(Scheme::Generation, 3);
    let mut cpu = pool.cpu();
    let mut vcpu = pool.vcpu();
    vcpu.arrive(&mut cpu, false);
    let flushes: Vec<_> = (0..7)
        .map(|_| {
            vcpu.void();
            enter(&mut vcpu, &mut cpu, 0)
        })
        .collect();
    let (all, none) = (Flush::Everything, Flush::Nothing);
    assert_eq!(flushes, [all, none, none, all, none, none, all]);
    assert_eq!(cpu.counts().generations, 2, "the first generation was there already");
}

#[test]
fn after_a_refused_entry_whoever_enters_first_pays_and_only_once() {
    let pool = pool(Scheme::Generation, 2);
    let mut cpu = pool.cpu();
    let (mut first, mut second) = (pool.vcpu(), pool.vcpu());
    for vcpu in [&mut first, &mut second] {
        vcpu.arrive(&mut cpu, false);
        let _ = enter(vcpu, &mut cpu, 0);
    }
    // Both tags are assigned: the next entry begins a new generation, and is refused.
    first.void();
    let refused = first.enter(&mut cpu, 0);
    assert_eq!(refused.flush(), Flush::Everything);
    drop(refused);

    assert_eq!(enter(&mut second, &mut cpu, 0), Flush::Everything);
    assert_eq!(enter(&mut first, &mut cpu, 0), Flush::Nothing);
    assert_eq!(enter(&mut second, &mut cpu, 0), Flush::Nothing);
}

#[test]
fn flush_of_one_tag_survives_refusals_and_is_paid_once() {
    let pool = pool(Scheme::Epoch, 2);
    let mut cpu = pool.cpu();
    let mut vcpu = pool.vcpu();
    vcpu.arrive(&mut cpu, false);
    let _ = enter(&mut vcpu, &mut cpu, 0);
    vcpu.void();
    assert!(vcpu.is_void());
    for _ in 0..3 {
        assert_eq!(vcpu.enter(&mut cpu, 0).flush(), Flush::Tag);
    }
    assert_eq!(enter(&mut vcpu, &mut cpu, 0), Flush::Tag);
    assert!(!vcpu.is_void());
    assert_eq!(enter(&mut vcpu, &mut cpu, 0), Flush::Nothing);
}

#[test]
fn same_generation_on_two_pcpus_is_not_the_same() {
    let pool = pool(Scheme::Generation, 8);
    let mut cpus = [pool.cpu(), pool.cpu()];
    let mut vcpu = pool.vcpu();
    let mut other = pool.vcpu();
    vcpu.arrive(&mut cpus[0], false);
    let here = vcpu.enter(&mut cpus[0], 0).tag();
    other.arrive(&mut cpus[1], false);
    assert_eq!(other.enter(&mut cpus[1], 0).tag(), here, "each pCPU begins with the same tag");
    vcpu.arrive(&mut cpus[1], false);
    assert_ne!(vcpu.enter(&mut cpus[1], 0).tag(), here);
    vcpu.arrive(&mut cpus[0], false);
    assert_ne!(vcpu.enter(&mut cpus[0], 0).tag(), here, "it has been away");
}

#[test]
fn home_of_a_vcpu_that_is_gone_is_flushed_before_its_next_owner_runs() {
    let pool = pool(Scheme::Epoch, 1);
    let mut cpu = pool.cpu();
    let mut old = pool.vcpu();
    old.arrive(&mut cpu, false);
    let _ = enter(&mut old, &mut cpu, 0);
    let tag = old.tag();
    pool.release(old);

    let mut new = pool.vcpu();
    // Even if the caller says that it was here before.
    new.arrive(&mut cpu, true);
    assert_eq!(new.enter(&mut cpu, 0).tag(), tag);
    assert_eq!(new.enter(&mut cpu, 0).flush(), Flush::Tag);
}

#[test]
fn homes_are_given_once_and_given_again_when_free() {
    let pool = pool(Scheme::Epoch, 130);
    let mut vcpus: Vec<_> = (0..130).map(|_| pool.vcpu()).collect();
    let mut homes: Vec<_> = vcpus.iter().filter_map(VcpuTags::home).collect();
    homes.sort_unstable();
    assert_eq!(homes, (0..130).collect::<Vec<_>>());
    assert_eq!(pool.vcpu().home(), None, "there are no more");

    pool.release(vcpus.swap_remove(70));
    assert_eq!(pool.vcpu().home(), Some(70));
}

#[test]
fn one_tag_for_many_flushes_at_each_change_of_vcpu_and_no_more() {
    let pool = pool(Scheme::Epoch, 1);
    let mut cpu = pool.cpu();
    let mut vcpus: Vec<_> = (0..5).map(|_| pool.vcpu()).collect();
    let mut flushes = 0;
    for _ in 0..10 {
        for vcpu in &mut vcpus {
            vcpu.arrive(&mut cpu, true);
            for _ in 0..4 {
                flushes += u32::from(enter(vcpu, &mut cpu, 0) == Flush::Tag);
            }
        }
    }
    assert_eq!(flushes, 50);
}

#[test]
fn without_flush_of_one_tag_everything_is_flushed() {
    let pool = Pool::new(Scheme::Epoch, TagRange::new(1, 4), false);
    let mut cpu = pool.cpu();
    let mut vcpu = pool.vcpu();
    vcpu.arrive(&mut cpu, false);
    assert_eq!(enter(&mut vcpu, &mut cpu, 0), Flush::Everything);
    assert_eq!(enter(&mut vcpu, &mut cpu, 0), Flush::Nothing);
}

#[test]
fn scheme_without_tags_flushes_everything_always() {
    let pool = pool(Scheme::FlushAlways, 7);
    let mut cpu = pool.cpu();
    let mut vcpus = [pool.vcpu(), pool.vcpu()];
    for vcpu in &mut vcpus {
        vcpu.arrive(&mut cpu, true);
        assert!(vcpu.is_void(), "single pages need not be flushed");
        for _ in 0..3 {
            let entry = vcpu.enter(&mut cpu, 0);
            assert_eq!((entry.tag().get(), entry.flush()), (1, Flush::Everything));
            entry.completed();
        }
    }
}

#[test]
fn no_tag_is_zero_and_none_is_beyond_the_range() {
    for scheme in [Scheme::FlushAlways, Scheme::Generation, Scheme::Epoch] {
        for range in [TagRange::new(0, 0), TagRange::new(5, 3), TagRange::new(u32::MAX, 9)] {
            let pool = Pool::new(scheme, range, true);
            let first = range.first().get();
            let last = first + (range.count() - 1);
            let mut cpu = pool.cpu();
            for _ in 0..20 {
                let mut vcpu = pool.vcpu();
                vcpu.arrive(&mut cpu, false);
                let tag = vcpu.enter(&mut cpu, 0).tag().get();
                assert!(tag != 0 && (first..=last).contains(&tag), "{scheme:?} {range:?}: {tag}");
            }
        }
    }
}

#[test]
fn last_epochs_are_told_apart_from_a_void_vcpu() {
    let pool = pool(Scheme::Epoch, 2);
    let mut cpu = pool.cpu();
    let mut vcpu = pool.vcpu();
    vcpu.arrive(&mut cpu, false);
    for epoch in [(1 << 63) - 2, (1 << 63) - 1] {
        assert_eq!(enter(&mut vcpu, &mut cpu, epoch), Flush::Tag);
        assert_eq!(enter(&mut vcpu, &mut cpu, epoch), Flush::Nothing);
        vcpu.void();
        assert_eq!(vcpu.enter(&mut cpu, epoch).flush(), Flush::Tag);
    }
}

#[test]
fn chance_evicts_less_than_the_order_of_use_would() {
    // Six vCPUs take turns over four tags. Evicting the least recently used one would always hit the next one.
    let pool = pool(Scheme::Epoch, 4);
    let mut cpu = pool.cpu();
    let homeless: Vec<_> = (0..4).map(|_| pool.vcpu()).collect();
    let mut vcpus: Vec<_> = (0..6).map(|_| pool.vcpu()).collect();
    drop(homeless);
    let flushes = take_turns(&mut vcpus, core::slice::from_mut(&mut cpu), 1000, 1);
    assert!(flushes < 6 * 1000 * 3 / 4, "{flushes} of 6000 turns");
}

/// What was under the tags of a pool that is gone, and is now under those of the next pool.
#[test]
fn tags_of_a_pool_that_is_gone_are_flushed_before_the_next_pool_uses_them() {
    for can_flush_one_tag in [false, true] {
        for scheme in [Scheme::FlushAlways, Scheme::Generation, Scheme::Epoch] {
            let pool = Pool::new(scheme, TagRange::new(1, 4), can_flush_one_tag);
            let mut cpu = pool.cpu();
            let mut flushed = [false; 5];
            for _ in 0..4 {
                let mut vcpu = pool.vcpu();
                vcpu.arrive(&mut cpu, false);
                let entry = vcpu.enter(&mut cpu, 0);
                match entry.flush() {
                    Flush::Nothing => {}
                    Flush::Tag => flushed[entry.tag().get() as usize] = true,
                    Flush::Everything => flushed = [true; 5],
                }
                assert!(flushed[entry.tag().get() as usize], "{scheme:?}: entered with what another pool has left");
                entry.completed();
            }
        }
    }
}

#[test]
fn homes_are_counted_and_come_back() {
    let pool = pool(Scheme::Epoch, 70);
    let vcpus: Vec<_> = (0..80).map(|_| pool.vcpu()).collect();
    assert_eq!(pool.homes(), 70);
    vcpus.into_iter().for_each(|vcpu| pool.release(vcpu));
    assert_eq!(pool.homes(), 0);
}
