//! Lines that guests write: a kind, and then `key=value` words. Text with spaces is in double quotes.

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Record {
    kind: String,
    fields: Vec<(String, String)>,
}

impl Record {
    /// The record in a line. Words that are no `key=value` are passed over.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let mut words = words(line).into_iter();
        let kind = words.next()?;
        let field = |word: String| word.split_once('=').map(|(key, value)| (key.to_string(), value.to_string()));
        Some(Self { kind, fields: words.filter_map(field).collect() })
    }

    /// All records of a kind in a guest's output.
    pub(super) fn all<'a>(output: &'a str, kind: &'a str) -> impl Iterator<Item = Self> + 'a {
        output.lines().filter_map(Self::parse).filter(move |record| record.kind == kind)
    }

    /// The value of a key.
    pub(super) fn text(&self, key: &str) -> Option<&str> {
        self.fields.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
    }

    /// All keys and their values.
    pub(super) fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The value of a key, if it is a number.
    pub(super) fn number<T: std::str::FromStr>(&self, key: &str) -> Option<T> {
        self.text(key)?.parse().ok()
    }
}

/// The words of a line: split at spaces outside of quotes, without the quotes.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '"' => quoted = !quoted,
            c if c.is_ascii_whitespace() && !quoted => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_name_and_quotes_hold_words_together() {
        let record = Record::parse("record experiment=a  mean_ns=12 why=\"b c=d\" odd\r").expect("is a record");
        assert_eq!((record.text("experiment"), record.number("mean_ns")), (Some("a"), Some(12)));
        assert_eq!((record.text("why"), record.text("c"), record.text("odd")), (Some("b c=d"), None, None));
        assert_eq!(record.number::<u64>("experiment"), None);
    }

    #[test]
    fn only_lines_of_the_kind_count() {
        let output = "hello guest=x\r\nrecord a=1\r\n\r\nprogress a=2\r\nrecord a=3\r\n";
        let all: Vec<_> = Record::all(output, "record").filter_map(|record| record.number::<u32>("a")).collect();
        assert_eq!(all, [1, 3]);
        assert_eq!(Record::parse(" \r\n"), None);
    }
}
