//! A layout as data: to print, to compare with an earlier one, to send.

use crate::LINE;

/// A struct that [`macro@crate::lay_out`] has laid out by class.
pub trait VcpuLayout {
    /// Its fields and their places.
    const LAYOUT: Layout;
}

/// The places of a struct's fields. Sizes and offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The struct's name, without its path.
    pub name: &'static str,
    /// Size of the whole struct.
    pub size: usize,
    /// Alignment of the whole struct.
    pub align: usize,
    /// In memory order.
    pub fields: &'static [Field],
}

/// The place of one field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its type, as in the source.
    pub kind: &'static str,
    /// From the start of the struct.
    pub offset: usize,
    /// Size of the field.
    pub size: usize,
    /// Its writer.
    pub content: Content,
}

/// Content of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Data of one class.
    Class(Class),
    /// Fields of several classes.
    Nested(&'static Layout),
    /// Nothing.
    Pad,
}

/// The writer of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The pCPU that runs the vCPU.
    Owner,
    /// Any pCPU.
    Mailbox,
    /// No pCPU, after creation.
    Frozen,
    /// Any pCPU, rarely.
    Cold,
}

impl Class {
    /// Its name in `#[layout(...)]`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Mailbox => "mailbox",
            Self::Frozen => "frozen",
            Self::Cold => "cold",
        }
    }
}

/// A row of a printed layout: a field, or unused bytes between fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Nesting depth of the field's struct.
    pub depth: usize,
    /// Bytes from the start of the outermost struct.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// The field; `None` for bytes between fields.
    pub field: Option<&'static Field>,
}

impl Row {
    /// Its first line, counted from the start of the outermost struct.
    #[must_use]
    pub const fn line(&self) -> usize {
        self.offset / LINE
    }
}

impl Layout {
    /// Whether an array of these structs uses all cache sets equally, so that the same line of each struct does not
    /// fall into the same few sets (see [`crate::stagger`]). True if the number of lines is odd.
    #[must_use]
    pub const fn is_staggered(&self) -> bool {
        (self.size / LINE) % 2 == 1
    }

    /// Calls `visit` for each row, in memory order; a struct comes before its nested fields.
    pub fn visit(&self, visit: &mut dyn FnMut(Row)) {
        self.visit_at(0, 0, visit);
    }

    fn visit_at(&self, depth: usize, start: usize, visit: &mut dyn FnMut(Row)) {
        let mut free_from = 0;
        for field in self.fields {
            if field.offset > free_from {
                visit(Row { depth, offset: start + free_from, size: field.offset - free_from, field: None });
            }
            visit(Row { depth, offset: start + field.offset, size: field.size, field: Some(field) });
            if let Content::Nested(inner) = field.content {
                inner.visit_at(depth + 1, start + field.offset, visit);
            }
            free_from = field.offset + field.size;
        }
        if self.size > free_from {
            visit(Row { depth, offset: start + free_from, size: self.size - free_from, field: None });
        }
    }
}
