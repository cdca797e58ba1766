//! A `match` over ops names every op: with `_`, an op that is added later would be missed without an error.

use super::Problem;
use super::syntax::is_test;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Arm, ExprMatch, File, ItemFn, ItemImpl, ItemMod, Pat, Path, Type};

/// The enums whose variants are added over time.
const ENUMS: &[&str] = &["Op", "ProgramOp"];

/// Wildcard arms beside arms that name ops, outside tests.
pub(super) fn check(path: &str, file: &File) -> Vec<Problem> {
    let mut finder = Finder { path, of: None, problems: Vec::new() };
    finder.visit_file(file);
    finder.problems
}

struct Finder<'a> {
    path: &'a str,
    /// The enum whose `impl` this is.
    of: Option<String>,
    problems: Vec<Problem>,
}

impl Finder<'_> {
    fn names_op(&self, arm: &Arm) -> Option<String> {
        let mut names = Names { of: self.of.as_deref(), found: None };
        names.visit_pat(&arm.pat);
        names.found
    }
}

/// Finds an op's name in a pattern.
struct Names<'a> {
    of: Option<&'a str>,
    found: Option<String>,
}

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_path(&mut self, node: &'ast Path) {
        let Some(owner) = node.segments.iter().rev().nth(1) else { return };
        let owner = owner.ident.to_string();
        let owner = if owner == "Self" { self.of.unwrap_or("Self") } else { &owner };
        if ENUMS.contains(&owner) {
            self.found.get_or_insert(owner.into());
        }
    }
}

/// Whether a pattern matches everything left.
fn takes_all(pattern: &Pat) -> bool {
    match pattern {
        Pat::Wild(_) => true,
        Pat::Tuple(tuple) => tuple.elems.iter().all(takes_all),
        Pat::Paren(inner) => takes_all(&inner.pat),
        _ => false,
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
            visit::visit_item_fn(self, node);
        }
    }

    fn visit_item_impl(&mut self, node: &'ast ItemImpl) {
        let before = self.of.take();
        if let Type::Path(of) = &*node.self_ty {
            self.of = of.path.segments.last().map(|segment| segment.ident.to_string());
        }
        visit::visit_item_impl(self, node);
        self.of = before;
    }

    fn visit_expr_match(&mut self, node: &'ast ExprMatch) {
        let named = node.arms.iter().find_map(|arm| self.names_op(arm));
        let wild = node.arms.iter().find(|arm| arm.guard.is_none() && takes_all(&arm.pat));
        if let (Some(name), Some(wild)) = (named, wild) {
            let what =
                format!("`_` in a match over `{name}` forgets ops that are added: name them");
            self.problems.push(Problem::new(self.path, wild.pat.span().start().line, what));
        }
        visit::visit_expr_match(self, node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(source: &str) -> Vec<usize> {
        let file = syn::parse_file(source).unwrap();
        check("a.rs", &file).iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn wildcards_over_ops_are_found() {
        let within = |text: &str| format!("fn f() {{\n{text}\n}}");
        for planted in [
            "match op { Op::Add(_) => 1,\n_ => 2 }",
            "match (a, b) { (ProgramOp::Add(_), 1) => 1,\n_ => 2 }",
            "match (a, b) { (device::Op::Add(_), 1) => 1,\n(_, _) => 2 }",
            "match op { Some(Op::Add(_)) | None => 1,\n_ => 2 }",
        ] {
            assert_eq!(lines(&within(planted)), [3], "{planted}");
        }
        let own = "impl Op { fn f(&self) { match self { Self::Add(_) => 1,\n_ => 2 } } }";
        assert_eq!(lines(own), [2]);
    }

    #[test]
    fn other_matches_pass() {
        for good in [
            "fn f() { match op { Op::Add(_) => 1, Op::Embed(_) => 2 } }",
            "fn f() { match kind { Kind::Op(_) => 1, _ => 2 } }",
            "fn f() { matches!(op, Op::Add(_)) }",
            "fn f() { if let Op::Add(_) = op { 1 } else { 2 } }",
            "fn f() { let Op::Add(add) = op else { return }; }",
            "impl Kind { fn f(&self) { match self { Self::Add => 1, _ => 2 } } }",
            "#[cfg(test)] mod tests { fn f() { match op { Op::Add(_) => 1, _ => 2 } } }",
        ] {
            assert_eq!(lines(good), [0; 0], "{good}");
        }
    }
}
