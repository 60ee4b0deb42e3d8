//! Memory sizes and durations, as users write and read them.

use std::time::Duration;

/// Bytes in a MiB.
pub(crate) const MIB: u64 = 1 << 20;

/// Reads a size such as `512M` or `2G` (powers of 1024; `MiB` and `MB` mean the same here, as they do to QEMU).
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text);
    let shift = match unit.to_ascii_uppercase().trim_end_matches("IB").trim_end_matches('B') {
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        // Zero needs no unit; the smallest possible size rejects it later.
        "" if number == "0" => 0,
        "" => return Err(format!("'{text}' has no unit; write a size such as 512M or 2G")),
        _ => return Err(format!("'{unit}' is not a unit of memory; write a size such as 512M or 2G")),
    };
    let number: u64 = number.parse().map_err(|_| format!("'{text}' is not a size; write for example 512M or 2G"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is more than any computer has"))
}

/// Writes a size in the largest unit that divides it.
pub(crate) fn show_size(bytes: u64) -> String {
    for (shift, unit) in [(30, "GiB"), (20, "MiB"), (10, "KiB")] {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{} {unit}", bytes >> shift);
        }
    }
    if bytes > 10 * MIB {
        return format!("{:.1} MiB", bytes as f64 / MIB as f64);
    }
    format!("{bytes} bytes")
}

/// Reads a length of time such as `500ms`, `60s`, `5m` or `1h`.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let bad = || format!("'{text}' is not a duration; write for example 60s or 5m");
    let number: u64 = number.parse().map_err(|_| bad())?;
    let millis = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60 * 1000,
        "h" => 3600 * 1000,
        _ => return Err(bad()),
    };
    // A year is as good as forever, and keeps later sums from overflowing.
    match number.checked_mul(millis).map(Duration::from_millis) {
        Some(time) if time.is_zero() => Err("a time limit of zero leaves no time to run".to_string()),
        Some(time) if time <= Duration::from_secs(366 * 24 * 3600) => Ok(time),
        _ => Err(format!("'{text}' is more than a year")),
    }
}

/// Writes a count with a comma between thousands.
pub(crate) fn show_count(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Nanoseconds as seconds.
pub(crate) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// `part` of `whole` in per cent; nothing of nothing is 0.
pub(crate) fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * part as f64 / whole as f64 }
}

fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (&text[..at], text[at..].trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_1024() {
        assert_eq!(parse_size("512M"), Ok(512 * MIB));
        assert_eq!(parse_size("2 GiB"), Ok(2048 * MIB));
        assert_eq!(parse_size("64kb"), Ok(65536));
        assert_eq!(parse_size("0"), Ok(0));
    }

    #[test]
    fn sizes_that_mean_nothing_are_refused() {
        for text in ["", "M", "-1M", "1.5G", "512", "512Q", "99999999999999999999G", "99999999999T"] {
            assert!(parse_size(text).is_err(), "{text} was taken");
        }
    }

    #[test]
    fn times_have_units_and_an_end() {
        assert_eq!(parse_time("60s"), Ok(Duration::from_secs(60)));
        assert_eq!(parse_time("5m"), Ok(Duration::from_secs(300)));
        for text in ["", "60", "0s", "s", "-1s", "9999999h", "99999999999999999999h"] {
            assert!(parse_time(text).is_err(), "{text} was taken");
        }
    }

    #[test]
    fn counts_are_grouped() {
        assert_eq!(show_count(0), "0");
        assert_eq!(show_count(999), "999");
        assert_eq!(show_count(1000), "1,000");
        assert_eq!(show_count(1_234_567), "1,234,567");
    }

    #[test]
    fn sizes_are_shown_in_whole_units() {
        assert_eq!(show_size(512 * MIB), "512 MiB");
        assert_eq!(show_size(2048 * MIB), "2 GiB");
        assert_eq!(show_size(0), "0 bytes");
        assert_eq!(show_size(100 * MIB + 512 * 1025), "100.5 MiB");
    }
}
