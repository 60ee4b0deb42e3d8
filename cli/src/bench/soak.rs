//! Mixed load for a long time, checked by the guest itself.
//!
//! Interrupts, IPIs, timers, halts, page faults, exits, with registers checked throughout: see the experiment `mixed` of the
//! measuring guest.

use super::{dunlin_run_vms, only_vm, progress};
use crate::args::SoakArgs;
use crate::failure::Failure;

pub(crate) fn run(args: &SoakArgs) -> Result<u8, Failure> {
    progress(&format!("mixed load on {} vCPUs for {} s", args.vcpus, args.seconds));
    let toml = format!(
        "[host]\npcpus = {}\n[[vm]]\nname = \"soak\"\nvcpus = {}\nmemory = \"64M\"\nkernel = \"measuring-guest\"\n\
         initrd = \"none\"\ncmdline = \"experiments=mixed seconds={}\"\n",
        args.pcpus, args.vcpus, args.seconds
    );
    // A stuck vCPU must end the run, not hang it.
    let limit = format!("--time-limit={}s", args.seconds * 2 + 60);
    let run = dunlin_run_vms(&toml, &[&limit])?;
    let vm = only_vm(&run);
    let output = vm["output"].as_str().unwrap_or_default();
    let last = output.lines().last().unwrap_or("(nothing)");
    let clean = last.starts_with("done ") && last.ends_with(" failures=0");
    for line in output.lines().filter(|line| line.starts_with("record ") || line.starts_with("violation ")) {
        println!("{line}");
    }
    println!("{last}");
    println!("exits {}, of which by reason: {}", vm["counters"]["exits_total"], vm["counters"]["exits"]);
    println!("{}", if clean { "clean: no interrupt lost, no vCPU stuck, no register changed" } else { "NOT CLEAN" });
    Ok(u8::from(!clean))
}
