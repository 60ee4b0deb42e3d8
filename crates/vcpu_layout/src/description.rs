//! A layout as data: to be printed, to be compared with how it was, to be sent elsewhere.

use crate::LINE;

/// A struct that is laid out by class, made by [`macro@crate::lay_out`].
pub trait VcpuLayout {
    /// Where its fields are.
    const LAYOUT: Layout;
}

/// Where the fields of a struct are. Sizes and offsets are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The struct's name, without its path.
    pub name: &'static str,
    /// Of the whole struct.
    pub size: usize,
    /// Of the whole struct.
    pub align: usize,
    /// In the order in which they are in memory.
    pub fields: &'static [Field],
}

/// Where one field is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its type, as it was written.
    pub kind: &'static str,
    /// From the start of the struct.
    pub offset: usize,
    /// Of the field.
    pub size: usize,
    /// Who writes it.
    pub content: Content,
}

/// What is in a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Something of one class.
    Class(Class),
    /// Fields of several classes.
    Nested(&'static Layout),
    /// Nothing.
    Pad,
}

/// Who writes a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// The pCPU that runs the vCPU.
    Owner,
    /// Everybody.
    Mailbox,
    /// Nobody, after creation.
    Frozen,
    /// Anybody, seldom.
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

/// A row of a layout to be printed: a field, or bytes between fields that are nobody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// In how many structs the field's struct is nested.
    pub depth: usize,
    /// Bytes from the start of the outermost struct.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// The field; `None` for bytes between fields.
    pub field: Option<&'static Field>,
}

impl Row {
    /// The first of its lines, counted from the start of the outermost struct.
    #[must_use]
    pub const fn line(&self) -> usize {
        self.offset / LINE
    }
}

impl Layout {
    /// Whether in an array of these all places of a page are taken equally often, so that the same line of each does not
    /// fall into the same few sets of a cache (see [`crate::stagger`]): whether the number of lines is odd.
    #[must_use]
    pub const fn is_staggered(&self) -> bool {
        (self.size / LINE) % 2 == 1
    }

    /// Shows each row to `visit`, in the order of memory; a struct comes before what is nested in it.
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
