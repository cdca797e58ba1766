//! No function is longer than a limit.

use super::Problem;
use super::syntax::is_test;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, File, ImplItemFn, ItemFn, ItemMod, Signature, TraitItemFn};

/// A function with more lines is split.
const MAX_LINES: usize = 100;

/// Functions outside tests that are too long.
pub(super) fn check(path: &str, file: &File) -> Vec<Problem> {
    let mut finder = Finder { path, problems: Vec::new() };
    finder.visit_file(file);
    finder.problems
}

struct Finder<'a> {
    path: &'a str,
    problems: Vec<Problem>,
}

impl Finder<'_> {
    fn function(&mut self, signature: &Signature, body: &Block) {
        let first = signature.span().start().line;
        let lines = body.span().end().line + 1 - first;
        if lines > MAX_LINES {
            let name = &signature.ident;
            let what = format!("`{name}` has {lines} lines; at most {MAX_LINES} are allowed");
            self.problems.push(Problem::new(self.path, first, what));
        }
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, node: &'ast ItemMod) {
        if !is_test(&node.attrs) {
            visit::visit_item_mod(self, node);
        }
    }

    fn visit_item_fn(&mut self, node: &'ast ItemFn) {
        if !is_test(&node.attrs) {
            self.function(&node.sig, &node.block);
            visit::visit_item_fn(self, node);
        }
    }

    fn visit_impl_item_fn(&mut self, node: &'ast ImplItemFn) {
        self.function(&node.sig, &node.block);
        visit::visit_impl_item_fn(self, node);
    }

    fn visit_trait_item_fn(&mut self, node: &'ast TraitItemFn) {
        if let Some(body) = &node.default {
            self.function(&node.sig, body);
        }
        visit::visit_trait_item_fn(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(source: &str) -> Vec<String> {
        let file = syn::parse_file(source).unwrap();
        check("a.rs", &file).iter().map(Problem::to_string).collect()
    }

    #[test]
    fn long_functions_are_found_and_tests_are_not() {
        let body = |lines: usize| "    f();\n".repeat(lines);
        let long = format!("fn long() {{\n{}}}\n", body(MAX_LINES - 1));
        let found = "a.rs:1: `long` has 101 lines; at most 100 are allowed";
        assert_eq!(said(&long), [found]);
        assert_eq!(said(&format!("impl A {{\n{long}}}")), [found.replace(":1:", ":2:")]);
        assert_eq!(said(&format!("trait A {{\n{long}}}")), [found.replace(":1:", ":2:")]);
        assert_eq!(said(&format!("mod a {{\n{long}}}")), [found.replace(":1:", ":2:")]);
        assert_eq!(said(&format!("fn right() {{\n{}}}\n", body(MAX_LINES - 2))), [""; 0]);
        assert_eq!(said(&format!("#[cfg(test)]\nmod tests {{\n{long}}}")), [""; 0]);
        assert_eq!(said(&format!("#[test]\n{long}")), [""; 0]);
    }
}
