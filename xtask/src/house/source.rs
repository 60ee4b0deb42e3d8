//! A minimal lexer for Rust that separates code from comments and strings.
//!
//! [`blank`] replaces comments and the contents of strings by spaces and keeps every line break, so a position in the
//! result is a position in the file. It needs no grammar: only comments (which nest), strings (with escapes, or raw
//! with their hash marks), and characters as opposed to lifetimes.

/// `text` with comments, strings and characters blanked out, byte for byte.
pub(super) fn blank(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let skipped = skipped(rest, out.chars().next_back());
        if skipped == 0 {
            out.push(letter);
            rest = &rest[letter.len_utf8()..];
            continue;
        }
        let (gone, after) = rest.split_at(skipped);
        out.extend(gone.bytes().map(|byte| if byte == b'\n' { '\n' } else { ' ' }));
        rest = after;
    }
    out
}

/// Number of bytes at the start of `rest` that are a comment, string or character.
fn skipped(rest: &str, before: Option<char>) -> usize {
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return block_comment(rest);
    }
    if let Some(content) = rest.strip_prefix('"') {
        return 1 + quoted(content, '"');
    }
    // `r"..."`, `r#"..."#`; an `r` at the end of a name starts no string, a prefix of its own (`br`, `cr`) does.
    let starts_word = before.is_none_or(|letter| !is_word(letter) || letter == 'b' || letter == 'c');
    if rest.starts_with('r') && starts_word {
        let hashes = rest[1..].bytes().take_while(|byte| *byte == b'#').count();
        let opening = 1 + hashes;
        if rest[opening..].starts_with('"') {
            let closing = format!("\"{}", "#".repeat(hashes));
            let content = &rest[opening + 1..];
            return content.find(&closing).map_or(rest.len(), |at| opening + 1 + at + closing.len());
        }
    }
    if let Some(content) = rest.strip_prefix('\'') {
        // `'a'` and `'\n'` are characters, `'a` is a lifetime.
        let mut letters = content.chars();
        let first = letters.next();
        if first == Some('\\') || (first != Some('\'') && letters.next() == Some('\'')) {
            return 1 + quoted(content, '\'');
        }
    }
    0
}

fn block_comment(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        let here = &rest.as_bytes()[at..];
        if here.starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if here.starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

/// Bytes up to and including the closing quote; a backslash keeps the next character from closing.
fn quoted(content: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, letter) in content.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if letter == quote => return at + 1,
            _ => {}
        }
    }
    content.len()
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// The words of blanked code with their positions: names, keywords and numbers.
pub(super) fn identifiers(code: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + code[from..].find(is_word)?;
        let length = code[start..].find(|letter| !is_word(letter)).unwrap_or(code.len() - start);
        from = start + length;
        Some((start, &code[start..from]))
    })
}

/// The line of a position, counted from 1.
pub(super) fn line_of(code: &str, at: usize) -> usize {
    code[..at].bytes().filter(|byte| *byte == b'\n').count() + 1
}
