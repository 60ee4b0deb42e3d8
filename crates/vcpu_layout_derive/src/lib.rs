//! The attribute [`macro@lay_out`] of the crate `vcpu_layout`, whose documentation describes it. It is a crate of its
//! own because the compiler requires that for macros.
//!
//! `input` parses the struct and rejects what cannot be laid out. `output` writes the struct again in its new order,
//! with all proofs about it.

#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod input;
mod output;
#[cfg(test)]
mod tests;

use proc_macro::TokenStream;

/// Lays out a struct by the writers of its fields; see the crate `vcpu_layout`.
#[proc_macro_attribute]
pub fn lay_out(arguments: TokenStream, item: TokenStream) -> TokenStream {
    match input::Block::read(arguments.into(), item.into()) {
        Ok(block) => output::block(&block).into(),
        Err(error) => error.into_compile_error().into(),
    }
}
