//! What a VM with the machine's devices gets that asks for all of the machine.
//!
//! Who describes such a VM need not know the machine: the payload may leave open how many CPUs and how much memory it
//! has. They are known when the VM is about to be created. Memory is what nobody else needs:
//!
//! | not the VM's | why |
//! |---|---|
//! | memory of the VMs that follow in the payload | they are created later |
//! | 1/64 of it, and of the machine's | tables for its pages, and a parent's word for each page |
//! | 256 KiB for each vCPU | its state and its stack |
//! | 96 MiB | the hypervisor's heap: VMs that come later, a parent's children, consoles |

use abi::payload::{Devices, MAX_VCPUS, VmConfig};
use addr::PageSize;

use crate::arch::{Arch as _, Machine};
use crate::cpu::scheduler;
use crate::frames;

/// Decides what `config` leaves open. `later` are the VMs that are created after it.
pub(crate) fn settle(config: &mut VmConfig, later: &[VmConfig]) {
    // No other VM can leave it open: its description is refused.
    if config.devices != Devices::All {
        return;
    }
    if config.vcpus == VmConfig::ALL_CPUS {
        let cpus = u32::try_from(scheduler::runners().count()).unwrap_or(MAX_VCPUS);
        config.vcpus = cpus.clamp(1, MAX_VCPUS);
    }
    config.vcpus = Machine::vcpus_with_devices(config.vcpus);
    if config.memory_bytes == VmConfig::REST {
        config.memory_bytes = rest(frames::free_bytes(), frames::total_bytes(), config.vcpus, later);
    }
}

const KEPT: u64 = 96 << 20;
/// The part of memory that its tables take.
const TABLES_PART: u64 = 64;
const OF_A_VCPU: u64 = 256 << 10;

/// Memory for a VM with this number of vCPUs, when so many bytes of the machine's `total` are free.
fn rest(free: u64, total: u64, vcpus: u32, later: &[VmConfig]) -> u64 {
    let of_vcpus = |vcpus: u32| u64::from(vcpus) * OF_A_VCPU;
    let others = later.iter().map(|vm| {
        let tables = vm.memory_bytes / TABLES_PART;
        vm.memory_bytes.saturating_add(tables).saturating_add(of_vcpus(vm.vcpus))
    });
    let kept = [KEPT, total / TABLES_PART, of_vcpus(vcpus)].into_iter().chain(others).fold(0, u64::saturating_add);
    // Memory is given in pages of this size.
    free.saturating_sub(kept) & !(PageSize::Size2M.bytes() - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::config;

    const MIB: u64 = 1 << 20;

    fn vm(memory_mib: u64, vcpus: u32) -> VmConfig {
        VmConfig { memory_bytes: memory_mib * MIB, vcpus, ..config("later", 1) }
    }

    #[test]
    fn rest_is_what_the_hypervisor_and_later_vms_do_not_need() {
        assert_eq!(rest(1900 * MIB, 2048 * MIB, 8, &[]), 1770 * MIB);
        assert_eq!(rest(1900 * MIB, 2048 * MIB, 8, &[vm(512, 4), vm(64, 1)]), (1770 - 576 - 12) * MIB);
        for free in [0, 100 * MIB] {
            assert_eq!(rest(free, 128 * MIB, 1, &[]), 0, "such a VM is refused");
        }
        assert_eq!(rest(u64::MAX, u64::MAX, 1, &[vm(u64::MAX / MIB, u32::MAX)]), 0);
    }

    #[test]
    fn only_a_vm_with_devices_is_given_what_it_leaves_open() {
        let mut open = VmConfig { vcpus: VmConfig::ALL_CPUS, memory_bytes: VmConfig::REST, ..config("open", 1) };
        let before = open.clone();
        settle(&mut open, &[]);
        assert_eq!(open, before);
    }
}
