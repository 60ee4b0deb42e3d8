//! Commands for the VMs of a running host: `dunlin create`, `start`, `stop` and `destroy`. And `dunlin host`, which
//! shows the host's free resources.

use abi::control::{About, Answer, Command, Part, Refusal, UPLOAD_CHUNK};
use abi::resources::Resources;
use serde_json::{Value, json};

use crate::args::{CreateArgs, ListArgs, VmArgs};
use crate::assets::Assets;
use crate::config::{Arch, Config, VmConfig};
use crate::control::{Client, refusal};
use crate::failure::Failure;
use crate::payload::{self, Prepared};
use crate::progress::Progress;
use crate::quantity::{percent, seconds, show_size};
use crate::share;
use crate::stats::{self, printable, unexpected};

/// `dunlin create`.
pub(crate) fn run_create(args: &CreateArgs) -> Result<(), Failure> {
    let mut client = share::attach(args.host.host)?;
    let info = stats::host(&mut client)?;
    let arch = [Arch::X86_64, Arch::Aarch64].into_iter().find(|arch| arch.name() == info.arch);
    let arch = arch.ok_or_else(|| Failure::failed(format!("unknown architecture of the host: {}", info.arch)))?;

    // All that can be wrong with the files is found before the host is asked for anything.
    let config = Config::for_host(&args.file, arch)?;
    let assets = Assets::locate().of(arch);
    let prepare = |vm: &VmConfig| payload::prepare(arch, vm, &assets, args.exec.as_deref());
    let prepared = config.vms.iter().map(prepare).collect::<Result<Vec<_>, _>>()?;

    let mut created = Vec::new();
    let result = config.vms.iter().zip(&prepared).try_for_each(|(vm, prepared)| {
        let number = create(&mut client, vm, prepared)?;
        created.push(number);
        Ok(())
    });
    let started = result.and_then(|()| match args.start {
        true => created.iter().try_for_each(|&vm| done(&mut client, &prepared[0].config.name, Command::Start { vm })),
        false => Ok(()),
    });
    if let Err(failure) = started {
        // Either all VMs of the file are created, or none. The first failure is reported.
        for &vm in &created {
            let _ = client.ask_patiently(Command::Destroy { vm });
        }
        return Err(failure);
    }

    let state = if args.start { "started" } else { "created" };
    let names = config.vms.iter().map(|vm| vm.name.value.as_str());
    if args.json {
        let vms: Vec<_> =
            created.iter().zip(names).map(|(vm, name)| json!({ "vm": vm, "name": name, "state": state })).collect();
        println!("{}", Value::from(vms));
    } else {
        created.iter().zip(names).for_each(|(vm, name)| println!("vm \"{name}\": {state}, number {vm}"));
    }
    Ok(())
}

/// Sends a VM and has it created. Gives its number.
fn create(client: &mut Client, vm: &VmConfig, prepared: &Prepared) -> Result<u32, Failure> {
    let Prepared { config, kernel, initrd } = prepared;
    let answer = client.ask(Command::CreateBegin { config: config.clone() })?;
    let upload = match answer {
        Ok(Answer::Upload(upload)) => upload,
        Err(why) => return Err(refused(vm, config.memory_bytes, why)),
        other => return Err(unexpected(other.map_err(refusal))),
    };

    let files = [(Part::Kernel, Some(kernel)), (Part::Initrd, initrd.as_ref())];
    let chunks = files.into_iter().filter_map(|(part, bytes)| Some((part, bytes?))).flat_map(|(part, bytes)| {
        (0_u64..)
            .step_by(UPLOAD_CHUNK)
            .zip(bytes.chunks(UPLOAD_CHUNK))
            .map(move |(offset, bytes)| Command::CreateData { upload, part, offset, bytes: bytes.to_vec() })
    });
    let total = kernel.len() + initrd.as_ref().map_or(0, Vec::len);
    let mut telling = Telling::new(&vm.name.value, total);
    let sent = client.ask_all(chunks, |done| telling.sent(done * UPLOAD_CHUNK))?;
    if let Err(why) = sent {
        let _ = client.ask(Command::CreateAbort { upload });
        return Err(refused(vm, config.memory_bytes, why));
    }

    match client.ask_patiently(Command::CreateFinish { upload })? {
        Ok(Answer::Created { vm }) => Ok(vm),
        Ok(Answer::NotCreated { about, why }) => {
            let why = printable(&why);
            let place = match about {
                About::Memory => &vm.memory.place,
                About::Vcpus => &vm.vcpus.place,
                About::Kernel => &vm.kernel.place,
                About::Devices => &vm.devices.place,
                About::Share => &vm.share.place,
                About::Name | About::Tags | About::State => &vm.name.place,
            };
            let help = match about {
                About::Memory | About::Vcpus => "end or destroy other VMs; `dunlin host` shows the free resources",
                About::Tags => "use the `tags` and `tag_limit` of a running VM; such VMs share their tags",
                About::Kernel => "`dunlin run` shows why a kernel does not start",
                About::Name => "give each VM a different name",
                About::State => "only VMs that are restored have a state",
                About::Devices => "name other functions, or leave 'devices' out (vms/default.toml explains the key)",
                About::Share => "name other pCPUs, or leave 'pcpus' out (vms/default.toml explains the key)",
            };
            Err(Failure::failed(format!("{place}: the host cannot create it: {why}")).help(help))
        }
        Err(why) => Err(refused(vm, config.memory_bytes, why)),
        other => Err(unexpected(other.map_err(refusal))),
    }
}

/// The host does not want that VM.
fn refused(vm: &VmConfig, memory_bytes: u64, why: Refusal) -> Failure {
    let name = &vm.name.value;
    match why {
        Refusal::NameTaken => vm
            .name
            .place
            .bad(format!("this host already has a VM '{name}'"))
            .help(format!("choose another name, or 'dunlin destroy {name}' first; 'dunlin list' shows it")),
        Refusal::OutOfMemory => Failure::failed(format!(
            "{}: the host has no memory for the files of a VM of {}",
            vm.memory.place,
            show_size(memory_bytes)
        ))
        .help("end or destroy other VMs; `dunlin host` shows the free resources"),
        Refusal::Busy => {
            Failure::failed(format!("vm \"{name}\": the host is creating another VM")).help("try again later")
        }
        why => Failure::failed(format!("vm \"{name}\": {}", refusal(why))),
    }
}

/// Progress of an upload, reported at intervals.
struct Telling<'a> {
    progress: Progress,
    name: &'a str,
    total: usize,
    told: usize,
}

impl<'a> Telling<'a> {
    /// Number of reports per upload.
    const PARTS: usize = 4;
    /// Files that take no time worth mentioning.
    const SMALL: usize = 4 << 20;

    fn new(name: &'a str, total: usize) -> Self {
        let progress = Progress::new();
        if total > Self::SMALL {
            progress.say(&format!("vm \"{name}\": sending {}", show_size(total as u64)));
        }
        Self { progress, name, total, told: 0 }
    }

    fn sent(&mut self, bytes: usize) {
        let part = bytes.min(self.total) * Self::PARTS / self.total.max(1);
        if self.total > Self::SMALL && part > self.told {
            self.told = part;
            self.progress.say(&format!("vm \"{}\": {} % sent", self.name, part * 100 / Self::PARTS));
        }
    }
}

/// `dunlin start`.
pub(crate) fn run_start(args: &VmArgs) -> Result<(), Failure> {
    command(args, |vm| Command::Start { vm })
}

/// `dunlin stop`.
pub(crate) fn run_stop(args: &VmArgs) -> Result<(), Failure> {
    command(args, |vm| Command::Stop { vm })
}

/// `dunlin destroy`.
pub(crate) fn run_destroy(args: &VmArgs) -> Result<(), Failure> {
    command(args, |vm| Command::Destroy { vm })
}

fn command(args: &VmArgs, command: impl FnOnce(u32) -> Command) -> Result<(), Failure> {
    let mut client = share::attach(args.host.host)?;
    let number = stats::find(&stats::list(&mut client)?, &args.vm)?.number;
    done(&mut client, &args.vm, command(number))
}

fn done(client: &mut Client, name: &str, command: Command) -> Result<(), Failure> {
    match client.ask_patiently(command)? {
        Ok(Answer::Done) => Ok(()),
        Err(why) => Err(Failure::failed(format!("vm \"{name}\": {}", refusal(why)))),
        other => Err(unexpected(other.map_err(refusal))),
    }
}

/// `dunlin host`.
pub(crate) fn run_host(args: &ListArgs) -> Result<(), Failure> {
    let mut client = share::attach(args.host.host)?;
    let info = stats::host(&mut client)?;
    let resources = match client.ask(Command::Resources)? {
        Ok(Answer::Resources(resources)) => resources,
        other => return Err(unexpected(other.map_err(refusal))),
    };
    let Resources {
        at_ns,
        vms,
        alive_vms,
        vcpus,
        total_bytes,
        free_bytes,
        heap_bytes,
        heap_used_bytes,
        tables_reserved_bytes,
        tables_used_bytes,
        tags,
        tags_in_pools,
        tags_owned,
    } = resources;
    if args.json {
        println!(
            "{}",
            json!({ "version": info.version, "arch": info.arch, "processor": info.processor, "pcpus": info.pcpus,
                "at_seconds": seconds(at_ns), "vms": vms, "alive_vms": alive_vms, "vcpus": vcpus,
                "total_bytes": total_bytes, "free_bytes": free_bytes, "heap_bytes": heap_bytes,
                "heap_used_bytes": heap_used_bytes, "tables_reserved_bytes": tables_reserved_bytes,
                "tables_used_bytes": tables_used_bytes, "tags": tags, "tags_in_pools": tags_in_pools,
                "tags_owned": tags_owned })
        );
        return Ok(());
    }
    println!("dunlin {} on {}: {}", printable(&info.version), printable(&info.arch), printable(&info.processor));
    println!("  pCPUs   {} for vCPUs, up {:.1} s", info.pcpus, seconds(at_ns));
    println!("  VMs     {vms}, of which {alive_vms} have memory; {vcpus} vCPUs");
    println!(
        "  memory  {} free of {} ({:.1} %)",
        show_size(free_bytes),
        show_size(total_bytes),
        percent(free_bytes, total_bytes)
    );
    println!("  heap    {} in use of {}", show_size(heap_used_bytes), show_size(heap_bytes));
    println!("  tables  {} in use of {} reserved", show_size(tables_used_bytes), show_size(tables_reserved_bytes));
    println!("  tags    {tags_in_pools} of {tags} in pools, {tags_owned} of them owned");
    Ok(())
}
