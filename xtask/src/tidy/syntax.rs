//! What the rules that need a syntax tree share: which code is a test, and which identifiers stand in it.

use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Meta};

/// Whether a file holds tests only: nothing there is part of a program.
pub(super) fn is_test_file(path: &str) -> bool {
    let part = |name| path.split('/').any(|part| part == name);
    part("tests") || part("benches") || path.ends_with("/tests.rs")
}

/// Whether an item is compiled for tests only, or is one.
pub(super) fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        Meta::NameValue(_) => false,
    })
}

/// Calls `visit` with every identifier among the tokens.
pub(super) fn identifiers(tokens: TokenStream, visit: &mut dyn FnMut(String)) {
    for tree in tokens {
        match tree {
            TokenTree::Group(group) => identifiers(group.stream(), visit),
            TokenTree::Ident(ident) => visit(ident.to_string()),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}
