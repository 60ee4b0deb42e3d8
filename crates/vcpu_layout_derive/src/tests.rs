extern crate std;

use alloc::string::{String, ToString};

use quote::quote;

use super::input::{Block, Role, without_needless_spaces};
use super::output;

/// The error message for `item`.
fn complaint(arguments: proc_macro2::TokenStream, item: proc_macro2::TokenStream) -> String {
    match Block::read(arguments, item) {
        Ok(block) => std::panic!("{} is read", block.name),
        Err(error) => error.to_string(),
    }
}

#[test]
fn what_cannot_be_laid_out_is_refused_with_a_reason() {
    let good = quote! { struct S { #[layout(owner)] a: u8 } };
    assert_eq!(complaint(quote!(packed), good), "expected `pinned`, or nothing");
    for (item, reason) in [
        (quote! { enum E { A } }, "only a struct can be laid out"),
        (quote! { struct S(u8); }, "only a struct with named fields can be laid out"),
        (quote! { struct S {} }, "there is no field to lay out"),
        (quote! { struct S<T> { #[layout(owner)] a: T } }, "a struct that is laid out cannot be generic"),
        (quote! { struct S<'a> { #[layout(owner)] a: &'a u8 } }, "a struct that is laid out cannot be generic"),
        (quote! { struct S { #[cfg(test)] #[layout(owner)] a: u8 } }, "one struct has one layout"),
        (quote! { struct S { a: u8 } }, "`a` needs one class"),
        (quote! { struct S { #[layout(owner)] #[layout(cold)] a: u8 } }, "`a` needs one class"),
        (quote! { struct S { #[layout(hot)] a: u8 } }, "there is no class `hot`: `#[layout(...)]` takes one of owner,"),
        (quote! { struct S { #[layout] a: u8 } }, "expected"),
        (quote! { struct S { #[layout(pad)] a: u8 } }, "classes are kept apart without pads"),
    ] {
        let found = complaint(quote!(), item);
        assert!(found.contains(reason), "{found}");
    }
}

#[test]
fn attributes_of_others_stay_and_ours_go() {
    let item = quote! {
        #[derive(Debug)]
        pub(crate) struct S {
            /// Told.
            #[layout(owner)]
            #[cold_storage]
            pub a: u8,
        }
    };
    let block = Block::read(quote!(pinned), item).expect("it is a struct with a class");
    assert!(block.is_pinned);
    assert_eq!((block.attributes.len(), block.fields.len()), (1, 1));
    assert_eq!((block.fields[0].role, block.fields[0].attributes.len()), (Role::Owner, 2));
    let text = output::block(&block).to_string();
    assert!(!text.contains("layout (owner)"));
    assert_eq!(text.matches("cold_storage").count(), 1, "the struct of values has the documentation alone");
    assert_eq!(text.matches("Told").count(), 2);
}

#[test]
fn types_are_named_as_a_person_writes_them() {
    for name in [
        "Owned<[u64; 16]>",
        "&'static str",
        "[AtomicU64; 4]",
        "Option<(CpuId, crate::cpu::timers::Key)>",
        "Box<dyn Fn(u64, &mut u8) -> u8>",
        "&'static mut u8",
        "[u8; LINE - 8]",
        "Box<dyn A + Send>",
    ] {
        let printed: String = name.parse::<proc_macro2::TokenStream>().expect("a type").to_string();
        let tidy = without_needless_spaces(&printed);
        // Spaces around operators do not matter.
        assert_eq!(tidy.replace(' ', ""), name.replace(' ', ""));
        if !name.contains(['-', '+']) {
            assert_eq!(tidy, name);
        }
    }
}
