//! The attribute [`macro@lay_out`]: part of the crate `vcpu_layout`, apart from it because the compiler wants macros in
//! crates of their own. What it means is explained there.
//!
//! Two steps: `input` reads the struct and complains about what cannot be laid out, `output` writes it again in its
//! new order, with all that is to be proven about it.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod input;
mod output;
#[cfg(test)]
mod tests;

use proc_macro::TokenStream;

/// Lays out a struct by who writes its fields; see the crate `vcpu_layout`.
#[proc_macro_attribute]
pub fn lay_out(arguments: TokenStream, item: TokenStream) -> TokenStream {
    match input::Block::read(arguments.into(), item.into()) {
        Ok(block) => output::block(&block).into(),
        Err(error) => error.into_compile_error().into(),
    }
}
