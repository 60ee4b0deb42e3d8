//! The input: a struct with named fields, each with its class.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use proc_macro2::TokenStream;
use syn::{Attribute, Data, DeriveInput, Fields, Ident, Result, Type, Visibility, parse2};

/// A struct to be laid out.
pub(crate) struct Block {
    /// All attributes except ours.
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) visibility: Visibility,
    pub(crate) name: Ident,
    /// Whether the fields keep their order.
    pub(crate) is_pinned: bool,
    pub(crate) fields: Vec<Field>,
}

/// One of its fields.
pub(crate) struct Field {
    /// All attributes except ours.
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) visibility: Visibility,
    pub(crate) name: Ident,
    pub(crate) kind: Type,
    pub(crate) role: Role,
}

/// A field's role in the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Owner,
    Mailbox,
    Frozen,
    Cold,
    /// A struct that is itself laid out.
    Nested,
    /// Unused bytes.
    Pad,
}

impl Role {
    const ALL: [Self; 6] = [Self::Owner, Self::Mailbox, Self::Frozen, Self::Cold, Self::Nested, Self::Pad];

    /// As in the attribute.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Mailbox => "mailbox",
            Self::Frozen => "frozen",
            Self::Cold => "cold",
            Self::Nested => "nested",
            Self::Pad => "pad",
        }
    }
}

impl Block {
    pub(crate) fn read(arguments: TokenStream, item: TokenStream) -> Result<Self> {
        let is_pinned = is_pinned(arguments)?;
        let DeriveInput { attrs, vis, ident, generics, data } = parse2(item)?;
        if !generics.params.is_empty() {
            // Nothing can be proven about a struct whose fields have no size yet.
            return Err(syn::Error::new_spanned(generics, "a struct that is laid out cannot be generic"));
        }
        let Data::Struct(data) = data else {
            return Err(syn::Error::new_spanned(ident, "only a struct can be laid out"));
        };
        let Fields::Named(named) = data.fields else {
            return Err(syn::Error::new_spanned(ident, "only a struct with named fields can be laid out"));
        };
        let fields = named.named.into_iter().map(Field::read).collect::<Result<Vec<_>>>()?;
        if fields.is_empty() {
            return Err(syn::Error::new_spanned(ident, "there is no field to lay out"));
        }
        if let Some(pad) = fields.iter().find(|field| field.role == Role::Pad && !is_pinned) {
            return Err(syn::Error::new_spanned(
                &pad.name,
                "classes are kept apart without pads; only `lay_out(pinned)` leaves that to you",
            ));
        }
        Ok(Self { attributes: attrs, visibility: vis, name: ident, is_pinned, fields })
    }
}

fn is_pinned(arguments: TokenStream) -> Result<bool> {
    if arguments.is_empty() {
        return Ok(false);
    }
    let word: Ident = parse2(arguments)?;
    if word == "pinned" { Ok(true) } else { Err(syn::Error::new_spanned(word, "expected `pinned`, or nothing")) }
}

impl Field {
    fn read(field: syn::Field) -> Result<Self> {
        let (ours, attributes): (Vec<_>, Vec<_>) =
            field.attrs.into_iter().partition(|attribute| attribute.path().is_ident("layout"));
        let Some(name) = field.ident else {
            return Err(syn::Error::new_spanned(field.ty, "only a struct with named fields can be laid out"));
        };
        if let Some(conditional) = attributes.iter().find(|attribute| attribute.path().is_ident("cfg")) {
            return Err(syn::Error::new_spanned(conditional, "a field is there or not: one struct has one layout"));
        }
        let [attribute] = ours.as_slice() else {
            let text = format!("`{name}` needs one class: who writes it? {}", wanted());
            return Err(syn::Error::new_spanned(name, text));
        };
        let word: Ident = attribute.parse_args()?;
        let Some(role) = Role::ALL.into_iter().find(|role| word == role.word()) else {
            return Err(syn::Error::new_spanned(&word, format!("there is no class `{word}`: {}", wanted())));
        };
        Ok(Self { attributes, visibility: field.vis, name, kind: field.ty, role })
    }

    /// The type's name, in usual spelling.
    pub(crate) fn kind_name(&self) -> String {
        let kind = &self.kind;
        without_needless_spaces(&quote::quote!(#kind).to_string())
    }
}

fn wanted() -> String {
    let words: Vec<_> = Role::ALL.iter().map(|role| role.word()).collect();
    format!("`#[layout(...)]` takes one of {}", words.join(", "))
}

/// Printed tokens have a space between any two. Keep it between words, and after a comma or semicolon.
pub(crate) fn without_needless_spaces(text: &str) -> String {
    let is_of_word = |letter: char| letter.is_alphanumeric() || letter == '_';
    let mut tidy = String::new();
    for word in text.split_whitespace() {
        let joins_words = tidy.ends_with(is_of_word) && word.starts_with(|first| is_of_word(first) || first == '\'');
        if joins_words || tidy.ends_with([',', ';', '+', '=']) || word.starts_with(['+', '=']) {
            tidy.push(' ');
        }
        tidy.push_str(word);
    }
    tidy
}
