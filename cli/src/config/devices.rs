//! The key about the machine's devices: none of them, all, or a list of PCI functions.

use abi::payload::{Devices, MAX_FUNCTIONS, PciFunction};

use super::reader::{Table, TextOrList, did_you_mean};
use super::{Place, Placed, VmConfig};
use crate::failure::Failure;

/// The choices with a name.
const NAMES: [&str; 2] = ["none", "all"];
/// The form of a function's address, for messages.
const FORM: &str = "write segment:bus:device.function in hexadecimal digits, as `lspci -D` shows it: \"0000:00:04.0\"";

/// Reads the key of a VM's table.
pub(super) fn read(table: &mut Table<'_>) -> Result<Placed<Devices>, Failure> {
    let Some((value, place)) = table.text_or_list("devices")? else {
        return Ok(Placed { value: Devices::None, place: table.absent("devices") });
    };
    let value = match value {
        TextOrList::Text(text) => named(&text, &place)?,
        TextOrList::List(list) => Devices::These(functions(&list, &place)?),
    };
    Ok(Placed { value, place })
}

/// Checks what several VMs must not have at once.
pub(super) fn check(vms: &[VmConfig]) -> Result<(), Failure> {
    let mut owners = vms.iter().filter(|vm| vm.devices.value == Devices::All);
    let (all, second) = (owners.next(), owners.next());
    if let (Some(first), Some(second)) = (all, second) {
        let help = format!("the first is at {}; one VM of a host can have them all", first.devices.place);
        return Err(second.devices.place.bad("a second VM with all devices").help(help));
    }
    let mut taken: Vec<(PciFunction, &VmConfig)> = Vec::new();
    for vm in vms {
        let Devices::These(functions) = &vm.devices.value else { continue };
        if let Some(all) = all {
            let help = format!("{} has them all; name functions for each VM, or leave this out", all.devices.place);
            return Err(vm.devices.place.bad("functions of its own, beside a VM with all devices").help(help));
        }
        for function in functions {
            if let Some((_, first)) = taken.iter().find(|(taken, _)| taken == function) {
                let help = format!("{} has it; a function belongs to one VM", first.devices.place);
                return Err(vm.devices.place.bad(format!("{function} is another VM's")).help(help));
            }
        }
        taken.extend(functions.iter().map(|function| (*function, vm)));
    }
    Ok(())
}

fn named(text: &str, place: &Place) -> Result<Devices, Failure> {
    match text {
        "none" => Ok(Devices::None),
        "all" => Ok(Devices::All),
        _ if parse(text).is_ok() => {
            let what = format!("'{text}' is one function, not a list of them");
            Err(place.bad(what).help(format!("write devices = [\"{text}\"]")))
        }
        _ => Err(place.bad(format!("'{text}' is not a valid choice of the machine's devices")).help(did_you_mean(
            text,
            "a list of PCI functions, or one of",
            &NAMES,
        ))),
    }
}

fn functions(list: &[Placed<String>], place: &Place) -> Result<Vec<PciFunction>, Failure> {
    if list.is_empty() {
        return Err(place.bad("an empty list").help("name PCI functions, or leave 'devices' out"));
    }
    if list.len() > MAX_FUNCTIONS {
        let what = format!("{} functions; a VM has at most {MAX_FUNCTIONS}", list.len());
        return Err(place.bad(what).help("its PCI bus has no more slots"));
    }
    let mut functions = Vec::new();
    for Placed { value: text, place } in list {
        let function = parse(text).map_err(|what| place.bad(format!("'{text}' {what}")).help(FORM))?;
        if functions.contains(&function) {
            return Err(place.bad(format!("{function} is named twice")).help("name each function once"));
        }
        functions.push(function);
    }
    Ok(functions)
}

/// The function with this address.
fn parse(text: &str) -> Result<PciFunction, &'static str> {
    const NO_ADDRESS: &str = "is not the address of a PCI function";
    let field = |digits: &str, length: usize| {
        let is_plain = digits.len() == length && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_plain.then(|| u16::from_str_radix(digits, 16).ok()).flatten().ok_or(NO_ADDRESS)
    };
    let mut parts = text.splitn(3, ':');
    let (Some(segment), Some(bus), Some(rest)) = (parts.next(), parts.next(), parts.next()) else {
        return Err("is not the address of a PCI function: it has no segment, or no bus");
    };
    let Some((device, function)) = rest.split_once('.') else { return Err(NO_ADDRESS) };
    let (segment, bus) = (field(segment, 4)?, field(bus, 2)?);
    let (device, function) = (field(device, 2)?, field(function, 1)?);
    if segment != 0 {
        return Err("is in another PCI segment than 0000, the only one that is supported");
    }
    if device > 31 || function > 7 {
        return Err("is no address: a bus has devices 00 to 1f, a device has functions 0 to 7");
    }
    Ok(PciFunction::at(bus << 8 | device << 3 | function))
}
