//! The host's own console as a terminal of the VMs, without a control port: like a PC that GRUB has started.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use system_tests::line::SerialLine;
use system_tests::monitor::Monitor;
use system_tests::{Machine, assets, dunlin, finished, measuring_vm, qemu, until};
use tempfile::TempDir;

/// Ctrl-].
const PREFIX: &str = "\x1d";

/// A PC. Ends with the test.
struct Pc(Child);

impl Pc {
    /// With three CPUs (in QEMU the first runs no vCPUs), and a serial port whose other end is in `folder`.
    fn start(folder: &Path, boot: &[String], more: &[&str]) -> Self {
        Self::spawn(qemu::able(Machine::X86_64, 300), folder, boot, more)
    }

    fn spawn(mut qemu: Command, folder: &Path, boot: &[String], more: &[&str]) -> Self {
        qemu.args(["-smp", "3", "-m", "1G"])
            .args(boot)
            .args(SerialLine::qemu_arguments(folder, "line"))
            .args(more)
            .stdin(Stdio::null());
        Self(qemu.spawn().unwrap_or_else(|error| panic!("QEMU cannot be started: {error}")))
    }

    /// QEMU's status, once the machine is off.
    fn status(&mut self) -> Option<i32> {
        until("the end of QEMU", || self.0.try_wait().ok().flatten()).code()
    }
}

impl Drop for Pc {
    fn drop(&mut self) {
        // `timeout` passes this signal on to QEMU.
        let _ = finished(Command::new("kill").args(["-TERM", &self.0.id().to_string()]));
        let _ = self.0.wait();
    }
}

/// An image of Debian guests with these names, which have a shell on their consoles.
fn image_with_shells(folder: &Path, names: &[&str]) -> String {
    let vm =
        |name: &&str| format!("[[vm]]\nname = \"{name}\"\nvcpus = 1\nmemory = \"160M\"\nkernel = \"debian-cloud\"\n");
    let file = folder.join("vms.toml");
    fs::write(&file, names.iter().map(vm).collect::<String>()).expect("a file can be written");
    let image = folder.join("dunlin.iso").to_string_lossy().into_owned();
    let _run = dunlin(&["image", &file.to_string_lossy(), "--shell", "-o", &image]).expect_status(0);
    image
}

#[test]
fn two_guests_share_the_machines_console() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let image = image_with_shells(folder.path(), &["left", "right"]);
    let mut pc = Pc::start(folder.path(), &["-cdrom".to_string(), image], &["-serial", "chardev:line"]);
    let mut line = SerialLine::attach(folder.path(), "line");
    line.wait_for("Dunlin: left, right");
    line.type_keys(b"\r");

    // The log has whole lines of both VMs, and input there goes to none. A flood of input does no harm.
    line.wait_for("Ctrl-] ? shows the keys");
    line.type_keys(&[b'x'; 5_000]);
    line.wait_for("the log of all VMs takes no input");
    for _ in 0..2 {
        line.wait_for("| Dunlin: user space reached");
    }
    let log = line.heard();
    assert!(log.contains("\nleft| Dunlin: user space") && log.contains("\nright| Dunlin: user space"), "{log}");

    // A shell answers, and its prompt is shown though it was written before.
    line.type_keys(PREFIX.as_bytes());
    line.type_keys(b"0");
    line.wait_for("--- the console of left (VM 0) ---");
    line.wait_for("guest:/root# ");
    line.type_keys(b"name=Left; echo $name-$((6 * 7))\r");
    line.wait_for("Left-42");

    // The other VM sees nothing of that. Output of the first one appears when it is chosen again.
    line.type_keys(b"(sleep 1; echo behind-your-$((1 + 1))-backs) &\r");
    line.wait_for("guest:/root# ");
    line.type_keys(PREFIX.as_bytes());
    line.type_keys(b"n");
    line.wait_for("--- the console of right (VM 1) ---");
    line.wait_for("guest:/root# ");
    line.type_keys(b"sleep 2; echo Right-$name-$((2 * 3))\r");
    let meanwhile = line.wait_for("Right--6");
    assert!(!meanwhile.contains("behind-your-2-backs"), "{meanwhile}");
    line.type_keys(PREFIX.as_bytes());
    line.type_keys(b"0");
    line.wait_for("--- the console of left (VM 0) ---");
    line.wait_for("behind-your-2-backs");

    // A guest that does not read its input loses some of it, and nothing else.
    line.type_keys(
        b"stty raw -echo; echo deaf-$((3 + 4)); sleep 1; timeout 4 cat >/dev/null; stty sane; echo hears-$((4 + 5))\r",
    );
    line.wait_for("deaf-7");
    line.type_keys(&[b'y'; 20_000]);
    line.wait_for("hears-9");
    line.type_keys(b"echo again-$((5 + 6))\r");
    line.wait_for("again-11");

    line.type_keys(b"exit\r");
    line.wait_for("left: power off");
    line.type_keys(b"1\x1dn");
    line.wait_for("--- the console of right (VM 1) ---");
    line.type_keys(b"exit\r");
    line.wait_for("all VMs have ended");
    assert_eq!(pc.status(), Some(0), "{}", line.heard());
}

/// Arguments for QEMU that start the hypervisor with a measuring guest that soon ends, and these options.
fn short_run(folder: &Path, options: &str) -> [String; 6] {
    let [file, image, payload] =
        ["vms.toml", "dunlin.iso", "payload"].map(|name| folder.join(name).to_string_lossy().into_owned());
    fs::write(&file, measuring_vm("measuring", 1, "experiments=cpuid")).expect("a file can be written");
    let _run = dunlin(&["image", &file, "-o", &image]).expect_status(0);
    let mut extract = Command::new("xorriso");
    extract.args(["-osirrox", "on", "-indev", &image, "-extract", "/boot/payload", &payload]);
    let _run = finished(&mut extract).expect_status(0);
    let hypervisor = assets().join("hypervisor").to_string_lossy().into_owned();
    ["-kernel", &hypervisor, "-initrd", &payload, "-append", options].map(String::from)
}

#[test]
fn machine_that_is_to_stay_is_turned_off_by_a_key_on_com2() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let arguments = short_run(folder.path(), "console=com2 when-idle=stay");
    let mut pc = Pc::start(folder.path(), &arguments, &["-serial", "null", "-serial", "chardev:line"]);
    let mut line = SerialLine::attach(folder.path(), "line");
    line.wait_for("experiment=cpuid");
    line.wait_for("all VMs have ended, and the machine stays on");
    // Neither another key, nor this one alone.
    line.type_keys(b"o\x1d?");
    line.wait_for("Ctrl-] and then");
    assert!(matches!(pc.0.try_wait(), Ok(None)), "{}", line.heard());
    line.type_keys(b"\x1do");
    line.wait_for("all VMs have ended");
    assert_eq!(pc.status(), Some(0), "{}", line.heard());
}

#[test]
fn machine_without_a_serial_line_is_turned_off_by_its_keyboard() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let arguments = short_run(folder.path(), "when-idle=stay");
    let mut more = vec!["-serial", "none"];
    let monitor = Monitor::qemu_arguments(folder.path());
    more.extend(monitor.iter().map(String::as_str));
    let mut pc = Pc::start(folder.path(), &arguments, &more);
    let mut monitor = Monitor::attach(folder.path());
    // Nothing signals the VM's end. Until then the key does nothing.
    let status = until("the end of QEMU", || {
        for key in ["ctrl-bracket_right", "o"] {
            monitor.offer(&format!("sendkey {key}"));
            // QEMU holds a key for a tenth of a second.
            thread::sleep(Duration::from_millis(400));
        }
        pc.0.try_wait().ok().flatten()
    });
    assert_eq!(status.code(), Some(0));
}

#[test]
fn vm_with_the_machines_devices_has_the_screen_and_the_keyboard_if_its_kernel_uses_them() {
    let folder = TempDir::new().expect("a temporary folder can be made");
    let [file, image] = ["vms.toml", "dunlin.iso"].map(|name| folder.path().join(name).to_string_lossy().into_owned());
    let toml = "[[vm]]\nname = \"owner\"\nvcpus = 1\nmemory = \"400M\"\nkernel = \"debian\"\ndevices = \"all\"\n\
                cmdline = \"console=tty0 console=ttyS0 quiet\"\n";
    fs::write(&file, toml).expect("a file can be written");
    let _run = dunlin(&["image", &file, "--shell", "-o", &image]).expect_status(0);
    let mut more = vec!["-vga", "std", "-serial", "chardev:line"];
    let monitor = Monitor::qemu_arguments(folder.path());
    more.extend(monitor.iter().map(String::as_str));
    let qemu = qemu::for_owner(Machine::X86_64, 300);
    let _pc = Pc::spawn(qemu, folder.path(), &["-cdrom".to_string(), image.clone()], &more);
    let mut line = SerialLine::attach(folder.path(), "line");
    line.wait_for("owner: it has the screen and the keyboard from now on");
    line.wait_for("guest:/root# ");
    line.type_keys(b"cat /proc/fb; echo frame-$((6 * 7))\r");
    let said = line.wait_for("frame-42");
    assert!(said.contains("0 VESA VGA"), "{said}");
    // Its keyboard is no terminal of the hypervisor's: these would be the keys that turn the machine off.
    line.type_keys(b"read -r typed </dev/tty1; echo keys-$typed-$((1 + 2))\r");
    line.wait_for("echo keys-");
    let mut monitor = Monitor::attach(folder.path());
    for key in ["ctrl-bracket_right", "o", "backspace", "backspace", "d", "u", "n", "ret"] {
        monitor.say(&format!("sendkey {key}"));
        // QEMU holds a key for a tenth of a second.
        thread::sleep(Duration::from_millis(300));
    }
    let said = line.wait_for("-3\r");
    assert!(said.ends_with("keys-dun"), "{said}");
}
