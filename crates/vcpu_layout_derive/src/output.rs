//! The output: the struct in the order of its classes, and the proofs about it.
//!
//! Each class begins with a field of no size that has the alignment of a line. It starts the line, gives the struct its
//! alignment, and so makes its size a whole number of lines. This crate need not know the length of a line on the
//! target. The proofs do not depend on this: they use the compiler's offsets.

use alloc::format;
use alloc::string::ToString;
use alloc::vec::Vec;

use proc_macro2::{Ident, Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;

use crate::input::{Block, Field, Role};

/// The struct and everything that belongs to it.
pub(crate) fn block(block: &Block) -> TokenStream {
    let groups = groups(block);
    let the_struct = the_struct(block, &groups);
    let constructor = constructor(block, groups.len());
    let offsets = offsets(block);
    let description = description(block, &groups);
    let proofs = proofs(block);
    quote! {
        #the_struct
        #constructor
        #offsets
        #description
        #proofs
    }
}

/// The fields in memory order, in groups that each begin on a line of their own. Groups are in the order of their first
/// fields, so the struct's author decides which is first.
fn groups(block: &Block) -> Vec<Vec<&Field>> {
    if block.is_pinned {
        return [block.fields.iter().collect()].into();
    }
    let mut groups: Vec<Vec<&Field>> = Vec::new();
    for field in &block.fields {
        let same = groups.iter_mut().find(|group| field.role != Role::Nested && group[0].role == field.role);
        match same {
            Some(group) => group.push(field),
            None => groups.push([field].into()),
        }
    }
    groups
}

fn line_start(number: usize) -> Ident {
    format_ident!("__line_{number}")
}

fn the_struct(block: &Block, groups: &[Vec<&Field>]) -> TokenStream {
    let Block { attributes, visibility, name, .. } = block;
    let members = groups.iter().enumerate().map(|(number, group)| {
        let start = line_start(number);
        let fields = group.iter().map(|Field { attributes, visibility, name, kind, .. }| {
            quote! { #(#attributes)* #visibility #name: #kind }
        });
        quote! { #start: ::vcpu_layout::LineStart, #(#fields,)* }
    });
    quote! {
        #(#attributes)*
        #[repr(C)]
        #visibility struct #name { #(#members)* }
    }
}

/// A struct of the same fields in any order, and the function that orders them.
fn constructor(block: &Block, groups: usize) -> TokenStream {
    let Block { visibility, name, fields, .. } = block;
    let unordered = format_ident!("{name}Fields", span = name.span());
    let members = fields.iter().map(|field| {
        let Field { visibility, name, kind, .. } = field;
        let docs = field.attributes.iter().filter(|attribute| attribute.path().is_ident("doc"));
        quote! { #(#docs)* #visibility #name: #kind }
    });
    let names: Vec<_> = fields.iter().map(|field| &field.name).collect();
    let starts = (0..groups).map(line_start);
    let about = format!("The fields of [`{name}`], to be laid out.");
    quote! {
        #[doc = #about]
        #[allow(dead_code, reason = "what is made by other means needs no constructor")]
        #visibility struct #unordered { #(#members,)* }

        #[allow(dead_code, reason = "what is made by other means needs no constructor")]
        impl #name {
            /// Puts the fields in their places.
            #[inline]
            #[must_use]
            #visibility fn lay_out(fields: #unordered) -> Self {
                let #unordered { #(#names,)* } = fields;
                Self { #(#starts: ::vcpu_layout::LineStart::HERE,)* #(#names,)* }
            }
        }
    }
}

fn offsets(block: &Block) -> TokenStream {
    let name = &block.name;
    let constants = block.fields.iter().filter(|field| field.role != Role::Pad).map(|field| {
        let Field { visibility, name, .. } = field;
        let constant = format_ident!("OFFSET_{}", name.unraw().to_string().to_uppercase(), span = name.span());
        let about = format!("Bytes from the start of the struct to `{name}`.");
        quote! {
            #[doc = #about]
            #visibility const #constant: usize = ::core::mem::offset_of!(Self, #name);
        }
    });
    quote! {
        #[allow(dead_code, reason = "entry code uses the offsets of few fields")]
        impl #name { #(#constants)* }
    }
}

fn description(block: &Block, groups: &[Vec<&Field>]) -> TokenStream {
    let block_name = &block.name;
    let title = block_name.to_string();
    let fields = groups.iter().flatten().map(|field| {
        let Field { name, kind, role, .. } = field;
        let (label, kind_name) = (name.to_string(), field.kind_name());
        let content = match role {
            Role::Owner => quote! { Class(::vcpu_layout::Class::Owner) },
            Role::Mailbox => quote! { Class(::vcpu_layout::Class::Mailbox) },
            Role::Frozen => quote! { Class(::vcpu_layout::Class::Frozen) },
            Role::Cold => quote! { Class(::vcpu_layout::Class::Cold) },
            Role::Nested => quote! { Nested(&<#kind as ::vcpu_layout::VcpuLayout>::LAYOUT) },
            Role::Pad => quote! { Pad },
        };
        quote! {
            ::vcpu_layout::Field {
                name: #label,
                kind: #kind_name,
                offset: ::core::mem::offset_of!(#block_name, #name),
                size: ::core::mem::size_of::<#kind>(),
                content: ::vcpu_layout::Content::#content,
            }
        }
    });
    quote! {
        impl ::vcpu_layout::VcpuLayout for #block_name {
            const LAYOUT: ::vcpu_layout::Layout = ::vcpu_layout::Layout {
                name: #title,
                size: ::core::mem::size_of::<Self>(),
                align: ::core::mem::align_of::<Self>(),
                fields: &[#(#fields,)*],
            };
        }
    }
}

/// Where an error message points to. The generated code is not the author's, so lints do not apply to it.
fn at(place: &impl Spanned) -> Span {
    Span::call_site().located_at(place.span())
}

fn proofs(block: &Block) -> TokenStream {
    let name = &block.name;
    let text = format!("`{name}` is not made of whole cache lines: two of them in an array would share one");
    let whole = quote_spanned! { at(name) =>
        const _: () = assert!(::vcpu_layout::proof::is_whole::<#name>(), #text);
    };
    let access = block.fields.iter().map(|field| access(block, field));
    let apart =
        block.fields.iter().enumerate().flat_map(|(number, first)| {
            block.fields[number + 1..].iter().map(move |second| apart(block, first, second))
        });
    quote! { #whole #(#access)* #(#apart)* }
}

/// The type of a field lets only its class's writers write it.
fn access(block: &Block, field: &Field) -> TokenStream {
    let Field { name, kind, role, .. } = field;
    let block_name = &block.name;
    let because = |what: &str| format!("`{name}` of `{block_name}` {what}");
    match role {
        Role::Owner => quote_spanned! { at(kind) => const _: () = ::vcpu_layout::proof::owner::<#kind>(); },
        Role::Mailbox => quote_spanned! { at(kind) => const _: () = ::vcpu_layout::proof::mailbox::<#kind>(); },
        Role::Frozen => {
            let by_others = because("is frozen, but its type is one that others write: is it `mailbox`?");
            let by_owner = because("is frozen, but its type is one that its owner writes: is it `owner`?");
            let layout = because("is a struct that is laid out itself: is it `nested`?");
            quote_spanned! { at(kind) =>
                const _: () = {
                    use ::vcpu_layout::proof::Otherwise as _;
                    assert!(!::vcpu_layout::proof::Of::<#kind>::IS_MAILBOX, #by_others);
                    assert!(!::vcpu_layout::proof::Of::<#kind>::IS_OWNER, #by_owner);
                    assert!(!::vcpu_layout::proof::Of::<#kind>::IS_LAID_OUT, #layout);
                };
            }
        }
        Role::Cold => {
            let layout = because("is a struct that is laid out itself: is it `nested`?");
            quote_spanned! { at(kind) =>
                const _: () = {
                    use ::vcpu_layout::proof::Otherwise as _;
                    assert!(!::vcpu_layout::proof::Of::<#kind>::IS_LAID_OUT, #layout);
                };
            }
        }
        Role::Nested => {
            let text = because("is laid out itself, but does not begin and end with a cache line here");
            quote_spanned! { at(kind) =>
                const _: () = assert!(
                    ::vcpu_layout::proof::is_nested_whole::<#kind>(::core::mem::offset_of!(#block_name, #name)),
                    #text
                );
            }
        }
        Role::Pad => TokenStream::new(),
    }
}

/// Proves that two fields share no line.
fn apart(block: &Block, first: &Field, second: &Field) -> TokenStream {
    let share_by_right = first.role == second.role && first.role != Role::Nested;
    if share_by_right || first.role == Role::Pad || second.role == Role::Pad {
        return TokenStream::new();
    }
    let block_name = &block.name;
    let text = format!(
        "`{}` ({}) and `{}` ({}) of `{block_name}` share a cache line",
        first.name,
        first.role.word(),
        second.name,
        second.role.word(),
    );
    let (one, its_kind, other, other_kind) = (&first.name, &first.kind, &second.name, &second.kind);
    quote_spanned! { at(&second.name) =>
        const _: () = assert!(
            ::vcpu_layout::proof::are_apart(
                (::core::mem::offset_of!(#block_name, #one), ::core::mem::size_of::<#its_kind>()),
                (::core::mem::offset_of!(#block_name, #other), ::core::mem::size_of::<#other_kind>()),
            ),
            #text
        );
    }
}
