//! Numbers for readers: three significant digits, separated thousands, the spread next to the median.

use crate::bench::Spread;

/// A number.
pub(super) fn number(value: f64) -> String {
    let magnitude = value.abs();
    if !value.is_finite() {
        return "–".to_string();
    }
    if magnitude >= 1e15 {
        return format!("{value:.2e}");
    }
    if value.fract() == 0.0 || magnitude >= 100.0 {
        return grouped(value);
    }
    match magnitude {
        10.0.. => format!("{value:.1}"),
        0.1..10.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// A median, and minimum and maximum if they differ from it.
pub(super) fn spread(spread: Spread) -> String {
    let Spread { median, least, greatest } = spread;
    let (least, greatest) = (number(least), number(greatest));
    if least == greatest { number(median) } else { format!("{} ({least}–{greatest})", number(median)) }
}

/// The same in another unit.
pub(super) fn scaled(spread: Spread, by: f64) -> Spread {
    Spread { median: spread.median * by, least: spread.least * by, greatest: spread.greatest * by }
}

/// A whole number with a thin space between thousands.
fn grouped(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    if value < 0.0 && digits != "0" { format!("−{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_digits_that_matter() {
        let shown = [0.0, 195.0, 1234.56, 9_876_543.0, -1500.0, 12.34, 9.876, 0.0321, f64::NAN, 1e20].map(number);
        let expected = [
            "0",
            "195",
            "1\u{202f}235",
            "9\u{202f}876\u{202f}543",
            "−1\u{202f}500",
            "12.3",
            "9.88",
            "0.0321",
            "–",
            "1.00e20",
        ];
        assert_eq!(shown, expected);
    }

    #[test]
    fn spread_is_shown_where_there_is_one() {
        let of = |values: &[f64]| spread(Spread::of(values).expect("has values"));
        assert_eq!((of(&[5.0, 5.0]), of(&[1.0, 2.5, 3.0])), ("5".to_string(), "2.50 (1–3)".to_string()));
    }
}
