//! VMs that come and go while others are at work: what each had is given back, and the others notice nothing.

use std::fs;
use std::path::PathBuf;
use std::process;
use std::thread;
use std::time::{Duration, Instant};

use abi::control::{Answer, Command, Part, Refusal, UPLOAD_CHUNK};
use abi::payload::{
    ApicMode, Blob, CpuShare, DecodeCache, Devices, DirtyLogging, File, HyperV, Populate, RemoteFlush, Role, Split,
    TagScheme, VmConfig,
};
use abi::resources::Resources;
use serde_json::Value;
use system_tests::port::Port;
use system_tests::{Host, Machine, Run, debian_vm, each_machine, finished, measuring_vm, tool, until, within};

/// How often a VM is created, started and destroyed.
const ROUNDS: u32 = 30;
/// The long run takes its number of rounds, and its guest, from these variables. `cargo xtask vms-soak` sets them.
const SOAK_ROUNDS: &str = "DUNLIN_SOAK_ROUNDS";
const SOAK_GUEST: &str = "DUNLIN_SOAK_GUEST";
/// How long the neighbours would work: they are stopped before.
const AT_WORK_SECONDS: u32 = 1_000_000;

/// Figures that are as before when a VM is gone.
const FIGURES: [&str; 8] = [
    "vms",
    "alive_vms",
    "vcpus",
    "heap_used_bytes",
    "tables_reserved_bytes",
    "tables_used_bytes",
    "tags_in_pools",
    "tags_owned",
];

/// Figures whose sum is as before.
const MEMORY: [&str; 2] = ["free_bytes", "heap_bytes"];

/// A host with two VMs at work that check all that they see, and room for more.
struct Busy {
    host: Host,
}

impl Busy {
    /// Starts it, for at most `seconds`.
    fn start(machine: Machine, seconds: u32) -> Self {
        Self::start_with(machine, seconds, "600M", &[])
    }

    fn start_with(machine: Machine, seconds: u32, memory: &str, more: &[&str]) -> Self {
        let neighbours: String = ["left", "right"]
            .map(|name| measuring_vm(name, 2, &format!("experiments=mixed seconds={AT_WORK_SECONDS} seed=5")))
            .concat();
        let toml = format!("memory = \"{memory}\"\n\n{neighbours}");
        let host = Host::start_on(machine, seconds, 2, &toml, |_| more.iter().map(ToString::to_string).collect());
        let busy = Self { host };
        until("two VMs at work", || {
            let stats = busy.host.ask("stats");
            (0..2).all(|vm| stats[vm]["total"]["exits_total"].as_u64() > Some(1000)).then_some(())
        });
        busy
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.host.folder().join(name);
        fs::write(&path, text).expect("a file can be written there");
        path
    }

    fn dunlin(&self, words: &[&str]) -> Run {
        finished(process::Command::new(tool()).args(words).args(["--host", &self.host.pid().to_string()]))
    }

    /// Something that has to work.
    fn does(&self, words: &[&str]) {
        let run = self.dunlin(words);
        assert!(run.status == 0, "{words:?}: {run:#?}\nsaid: {}", self.host.said());
    }

    fn figures(&self) -> Value {
        self.host.ask("host")
    }

    /// Waits until the host has what it had.
    ///
    /// Memory is the pool's or the heap's; the heap keeps a chunk as long as anything is in it, so only their sum is
    /// told.
    fn is_as_before(&self, before: &Value) {
        let number =
            |figures: &Value, name: &str| figures[name].as_u64().unwrap_or_else(|| panic!("{name}: {figures}"));
        let memory = |figures: &Value| MEMORY.iter().map(|name| number(figures, name)).sum();
        let mut last = Value::Null;
        let differences = |now: &Value| -> Vec<String> {
            let of = |name: &str, old: u64, new: u64| (old != new).then(|| format!("{name}: {old} before, {new} now"));
            let figures = FIGURES.iter().filter_map(|name| of(name, number(before, name), number(now, name)));
            figures.chain(of("memory", memory(before), memory(now))).collect()
        };
        for _ in 0..50 {
            last = self.figures();
            if differences(&last).is_empty() {
                return;
            }
        }
        panic!("{:?}\nsaid: {}", differences(&last), self.host.said());
    }

    /// The neighbours still work, and have found nothing wrong.
    fn neighbours_are_well(self) {
        let exits = |stats: &Value| [0, 1].map(|vm| stats[vm]["total"]["exits_total"].as_u64().unwrap_or(0));
        let before = exits(&self.host.ask("stats"));
        until("neighbours that go on", || {
            let now = exits(&self.host.ask("stats"));
            (0..2).all(|vm| now[vm] > before[vm]).then_some(())
        });
        let said = self.host.said();
        assert!(!said.contains("failure ") && !said.contains("panic"), "{said}");
        for name in ["left", "right"] {
            self.does(&["stop", name]);
        }
        let run = self.host.finish();
        assert_eq!(run.status, 0, "{run:#?}");
    }
}

/// The VM that comes and goes, of the measuring guest.
fn coming_vm() -> String {
    measuring_vm("guest", 2, "experiments=mixed seconds=1000").replace("64M", "18M")
}

each_machine! {
    fn vm_that_is_destroyed_has_left_nothing_behind_however_often(machine) {
        let busy = Busy::start(machine, 600 + 10 * ROUNDS);
        let file = busy.file("guest.toml", &coming_vm());
        let file = file.to_string_lossy();
        // The first conversation about a VM leaves its buffers behind.
        busy.does(&["create", &file]);
        busy.does(&["destroy", "guest"]);
        let before = busy.figures();
        for round in 0..ROUNDS {
            busy.does(&["create", &file]);
            // Some never run, some run for a moment, some for longer.
            if round % 4 != 0 {
                busy.does(&["start", "guest"]);
            }
            if round % 8 == 7 {
                let _ = busy.host.ask("stats");
            }
            busy.does(&["destroy", "guest"]);
            if round < 4 || round % 16 == 0 {
                busy.is_as_before(&before);
            }
        }
        busy.is_as_before(&before);
        busy.neighbours_are_well();
    }
}

/// Draws the moments at which the long run destroys its VMs: the same in each run.
const SOAK_SEED: u64 = 17;

/// When a VM of the long run is destroyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    BeforeItsStart,
    /// So many milliseconds after its start.
    After(u64),
    /// When its guest says so. Only Linux does.
    InUserSpace,
}

impl Moment {
    /// Draws one: from 1 ms to `longest` after the start, and each power of two is as likely as the others.
    fn draw(random: &mut fastrand::Rng, longest: f64) -> Self {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 1 to `longest`")]
        match random.u32(0..8) {
            0 => Self::BeforeItsStart,
            _ => Self::After(longest.powf(random.f64()) as u64),
        }
    }
}

/// The long run of `cargo xtask vms-soak`: shows where it is, and ends with the host's figures before and after.
fn soak(machine: Machine) {
    /// How often Linux is left alone until it is in user space: once in so many rounds. This takes half a minute.
    const WHOLE_BOOT: u32 = 50;
    /// A boot takes 10 s on an idle computer, and half a minute on a busy one.
    const LONGEST_BOOT: Duration = Duration::from_secs(300);
    let variable = |name| std::env::var(name).ok();
    let rounds: u32 = variable(SOAK_ROUNDS).and_then(|text| text.parse().ok()).unwrap_or(ROUNDS);
    let guest = variable(SOAK_GUEST).unwrap_or_default();
    let is_linux = guest == "linux";
    // How many milliseconds the VM runs at most. Linux is in its decompressor or anywhere in its kernel then.
    let (vm, memory, longest) = match machine {
        _ if !is_linux => (coming_vm(), "600M", 500.0),
        // Most of a round is the sending of the kernel: the smaller of the two, where there are two.
        Machine::X86_64 => (debian_vm("guest", 2).replace("debian-cloud", "debian"), "1100M", 2_000.0),
        Machine::Aarch64 => (debian_vm("guest", 2), "1100M", 2_000.0),
    };
    let busy = Busy::start_with(machine, 600 + 120 * rounds, memory, &[]);
    let file = busy.file("guest.toml", &vm);
    let file = file.to_string_lossy();
    busy.does(&["create", &file]);
    busy.does(&["destroy", "guest"]);
    let before = busy.figures();
    let began = Instant::now();
    let mut random = fastrand::Rng::with_seed(SOAK_SEED);
    let [mut never, mut running, mut booted] = [0; 3];
    for round in 0..rounds {
        let moment = match Moment::draw(&mut random, longest) {
            _ if is_linux && round % WHOLE_BOOT == WHOLE_BOOT - 1 => Moment::InUserSpace,
            drawn => drawn,
        };
        busy.does(&["create", &file]);
        if moment != Moment::BeforeItsStart {
            busy.does(&["start", "guest"]);
        }
        match moment {
            Moment::BeforeItsStart => never += 1,
            Moment::After(millis) => {
                thread::sleep(Duration::from_millis(millis));
                running += 1;
            }
            Moment::InUserSpace => {
                booted += 1;
                let came = within(LONGEST_BOOT, || (user_spaces(&busy.host) == booted).then_some(()));
                assert!(came.is_some(), "round {round}: no user space; the host said\n{}", busy.host.said());
            }
        }
        busy.does(&["destroy", "guest"]);
        busy.is_as_before(&before);
        let done = round + 1;
        if done % 10 == 0 || done == rounds {
            let each = began.elapsed().as_secs_f64() / f64::from(done);
            eprintln!("{} {guest}: {done} of {rounds} VMs, {each:.1} s each", machine.name());
        }
    }
    let after = busy.figures();
    let figures: Vec<_> =
        FIGURES.iter().chain(&MEMORY).map(|name| format!("{name} {} -> {}", before[name], after[name])).collect();
    busy.neighbours_are_well();
    let moments = format!("{never} before their start, {running} at a random moment, {booted} in user space");
    eprintln!("{} {guest}: {rounds} VMs, destroyed {moments}; {}", machine.name(), figures.join(", "));
}

/// How many guests of Linux have come to user space.
fn user_spaces(host: &Host) -> usize {
    host.said().matches("Dunlin: user space reached").count()
}

mod soak {
    use super::{Machine, soak};

    #[test]
    #[ignore = "takes from minutes to hours: `cargo xtask vms-soak`"]
    fn on_x86_64() {
        soak(Machine::X86_64);
    }

    #[test]
    #[ignore = "takes from minutes to hours: `cargo xtask vms-soak`"]
    fn on_aarch64() {
        soak(Machine::Aarch64);
    }
}

/// A VM with a log of its writes, whose memory is mapped as it is touched.
fn config(kernel_bytes: u64) -> VmConfig {
    VmConfig {
        name: "guest".to_string(),
        vcpus: 2,
        memory_bytes: 18 << 20,
        kernel: File::Blob(Blob { offset: 0, bytes: kernel_bytes }),
        initrd: None,
        cmdline: "experiments=mixed seconds=1000".to_string(),
        role: Role::Guest,
        devices: Devices::None,
        apic: ApicMode::X2Apic,
        hyperv: HyperV::FlushIpi,
        flush: RemoteFlush::Hypercall,
        tags: TagScheme::Generation,
        tag_limit: Some(3),
        decode_cache: DecodeCache::Bytes,
        populate: Populate::Touch4K,
        dirty: DirtyLogging { split: Split::Adaptive, source: None, splits_per_second: None },
        share: CpuShare::DEFAULT,
    }
}

/// Creates a VM. What is refused is taken back.
fn create(port: &mut Port, config: &VmConfig, kernel: &[u8]) -> Option<u32> {
    let upload = match port.ask(Command::CreateBegin { config: config.clone() }) {
        Ok(Answer::Upload(upload)) => upload,
        Err(Refusal::OutOfMemory) => return None,
        other => panic!("begin: {other:?}"),
    };
    port.all_done((0..).zip(kernel.chunks(UPLOAD_CHUNK)).map(|(chunk, bytes)| {
        let offset = chunk * UPLOAD_CHUNK as u64;
        Command::CreateData { upload, part: Part::Kernel, offset, bytes: bytes.to_vec() }
    }));
    match port.ask(Command::CreateFinish { upload }) {
        Ok(Answer::Created { vm }) => Some(vm),
        Ok(Answer::NotCreated { why, .. }) => {
            assert!(!why.is_empty());
            None
        }
        other => panic!("finish: {other:?}"),
    }
}

/// The life of a VM from its creation to its end, as far as it gets.
fn live(port: &mut Port, config: &VmConfig, kernel: &[u8]) {
    let Some(vm) = create(port, config, kernel) else { return };
    port.done(Command::Start { vm });
    thread::sleep(Duration::from_millis(20));
    let how = Some(config.dirty);
    match port.ask(Command::DirtyStart { vm, how, mirror: true }) {
        Ok(Answer::Done) => {
            for _ in 0..2 {
                // A guest that touches memory for which there is no table ends meanwhile.
                let round = port.ask(Command::DirtyRound { vm, lose: false });
                assert!(matches!(round, Ok(Answer::Round(_)) | Err(Refusal::NotRunning)), "round: {round:?}");
            }
            let stop = port.ask(Command::DirtyStop { vm });
            assert!(matches!(stop, Ok(Answer::Done) | Err(Refusal::NotRunning)), "stop: {stop:?}");
        }
        Err(Refusal::OutOfMemory | Refusal::NotRunning) => {}
        other => panic!("log: {other:?}"),
    }
    port.done(Command::Destroy { vm });
}

fn resources(port: &mut Port) -> Resources {
    match port.ask(Command::Resources) {
        // The time goes on, and the heap keeps what it has taken.
        Ok(Answer::Resources(all)) => {
            Resources { at_ns: 0, free_bytes: all.free_bytes + all.heap_bytes, heap_bytes: 0, ..all }
        }
        other => panic!("resources: {other:?}"),
    }
}

each_machine! {
    fn running_out_is_an_answer_wherever_in_the_life_of_a_vm_it_happens(machine) {
        let selftest = ["--qemu-arg=-append", "--qemu-arg=selftest=exhaustion"];
        let busy = Busy::start_with(machine, 1800, "600M", &selftest);
        let mut port = Port::of(&busy.host);
        let kernel = fs::read(machine.assets().join("guest")).expect("was built");
        let config = config(kernel.len() as u64);
        let vm = create(&mut port, &config, &kernel).expect("there is room for it");
        port.done(Command::Destroy { vm });
        live(&mut port, &config, &kernel);
        let before = resources(&mut port);
        for count in [1, u64::MAX] {
            let mut failed = 0;
            loop {
                port.ask(Command::Exhaust { first: failed, count }).expect("is armed");
                live(&mut port, &config, &kernel);
                let taken = match port.ask(Command::Exhaust { first: 0, count: 0 }) {
                    Ok(Answer::Taken(taken)) => taken,
                    other => panic!("{other:?}"),
                };
                let after = (0..50).map(|_| resources(&mut port)).find(|after| *after == before);
                assert!(after.is_some(), "{failed}: {before:?}, then {:?}", resources(&mut port));
                if taken <= failed {
                    break;
                }
                failed += 1;
            }
            assert!(failed > 20, "only {failed} could fail");
        }
        drop(port);
        busy.neighbours_are_well();
    }
}
