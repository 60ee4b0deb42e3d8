//! The keys about a VM's share of the pCPUs: its weight, its cap, and the pCPUs that it may use.

use abi::payload::CpuShare;

use super::reader::Table;
use super::{Place, Placed};
use crate::failure::Failure;

/// The greatest weight, as in Linux' control groups.
const MAX_WEIGHT: u32 = 10_000;
/// A host uses no more pCPUs than this.
const MAX_PCPUS: u32 = u64::BITS;
/// How a list of pCPUs is written.
const FORM: &str = "write numbers and ranges: pcpus = \"0-3,6\"; `dunlin host` shows how many there are";

/// Reads the keys of a VM's table.
pub(super) fn read(table: &mut Table<'_>) -> Result<Placed<CpuShare>, Failure> {
    let (value, place) = table.integer("weight", CpuShare::DEFAULT.weight.into())?;
    let weight = weight(value, &place)?;
    let cap_percent = match table.integer("cap", 0)? {
        (_, Place::Absent { .. }) => None,
        (value, place) => Some(cap(value, &place)?),
    };
    // What the host refuses is, as a rule, a pCPU that it has not.
    let (pcpus, place) = match table.text("pcpus")? {
        Some((text, place)) => (Some(pcpus(&text, &place)?), place),
        None => (None, place),
    };
    Ok(Placed { value: CpuShare { weight, cap_percent, pcpus }, place })
}

fn weight(value: i64, place: &Place) -> Result<u32, Failure> {
    match u32::try_from(value) {
        Ok(weight @ 1..=MAX_WEIGHT) => Ok(weight),
        _ => Err(place
            .bad(format!("a weight of {value}; it is 1 to {MAX_WEIGHT}"))
            .help(format!("a VM that names none has {}", CpuShare::DEFAULT.weight))),
    }
}

fn cap(value: i64, place: &Place) -> Result<u32, Failure> {
    let most = 100 * MAX_PCPUS;
    match u32::try_from(value) {
        Ok(percent) if (1..=most).contains(&percent) => Ok(percent),
        _ => Err(place
            .bad(format!("a cap of {value} %; it is 1 to {most}"))
            .help("100 is one pCPU, 50 is half of one, 200 are two; leave 'cap' out for no limit")),
    }
}

/// The set of pCPUs in a list such as `0-3,6`.
fn pcpus(text: &str, place: &Place) -> Result<u64, Failure> {
    let number = |part: &str| {
        let digits = part.trim();
        let number = digits.parse::<u32>().map_err(|_| format!("'{digits}' is not the number of a pCPU"))?;
        if number < MAX_PCPUS { Ok(number) } else { Err(format!("pCPU {number}; the last is {}", MAX_PCPUS - 1)) }
    };
    let range = |part: &str| match part.split_once('-') {
        Some((first, last)) => Ok((number(first)?, number(last)?)),
        None => number(part).map(|number| (number, number)),
    };
    let mut set = 0;
    for part in text.split(',') {
        let (first, last) = range(part).map_err(|what| place.bad(what).help(FORM))?;
        if first > last {
            return Err(place.bad(format!("the range {first}-{last} ends before it begins")).help(FORM));
        }
        set |= (first..=last).fold(0, |set, number| set | 1 << number);
    }
    Ok(set)
}
