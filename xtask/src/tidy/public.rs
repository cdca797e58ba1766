//! Public items that nothing outside their crate uses. They should be `pub(crate)`, or gone.
//!
//! The check compares names: an item counts as used if its name is an identifier in a crate that depends on its own,
//! or in the tests, examples and benchmarks of its own. So it misses items that share their name with something
//! else, and reports none that is used. What the signature of a used item names is used too. Items made by macros,
//! methods of traits, fields and variants are not looked at.

use super::Problem;
use super::syntax::{identifiers, is_test, is_test_file};
use super::text;
use proc_macro2::{Ident, TokenStream};
use quote::ToTokens;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};
use syn::{
    Field, Fields, ImplItem, Item, ItemEnum, ItemImpl, ItemMacro, ItemMod, ItemStruct, ItemTrait,
    UseTree, Visibility,
};

/// A Rust file.
pub(super) struct Source {
    /// From the root of the tree.
    pub(super) path: String,
    pub(super) text: String,
    pub(super) syntax: syn::File,
}

/// A library and the packages that may use it.
pub(super) struct Library {
    /// Its folder, with a slash at the end.
    pub(super) folder: String,
    /// Folders of the packages that depend on it, with a slash at the end; empty for the root's.
    pub(super) users: Vec<String>,
}

/// Public items of the library that nothing outside it uses.
pub(super) fn check(library: &Library, sources: &[Source]) -> Vec<Problem> {
    let home = format!("{}src/", library.folder);
    let program = format!("{home}main.rs");
    let own = |path: &str| path.starts_with(&home) && path != program;
    let mut surface = Surface::default();
    let mut outside = BTreeSet::new();
    let mut inside: BTreeMap<String, usize> = BTreeMap::new();
    for source in sources {
        let lines = text::lines(&source.text);
        if own(&source.path) {
            examples(&lines, &mut outside);
            for line in &lines {
                words(&line.code, &mut |word| *inside.entry(word).or_default() += 1);
            }
            if !is_test_file(&source.path) {
                surface.path = source.path.clone();
                surface.visit_file(&source.syntax);
            }
        } else if library.sees(&source.path) {
            for line in &lines {
                words(&line.code, &mut |word| outside.extend([word]));
            }
        }
    }
    let used = surface.used(outside);
    let unused = surface.items.iter().filter(|item| !used.contains(&item.name));
    unused
        .map(|item| {
            let advice = match inside.get(&item.name) {
                Some(2..) => "used only within its crate: `pub(crate)` is enough",
                _ => "used by nothing",
            };
            Problem::new(&item.path, item.line, format!("public `{}` is {advice}", item.name))
        })
        .collect()
}

impl Library {
    /// Whether a file outside the library may use it.
    fn sees(&self, path: &str) -> bool {
        // A package in the root has its code in a few folders.
        let root =
            ["src/", "tests/", "examples/", "benches/"].iter().any(|part| path.starts_with(part));
        let users = self.users.iter();
        path.starts_with(&self.folder)
            || users
                .into_iter()
                .any(|user| if user.is_empty() { root } else { path.starts_with(user.as_str()) })
    }
}

/// Calls `visit` with every identifier of a line.
fn words(code: &str, visit: &mut dyn FnMut(String)) {
    let part = |c: char| !(c.is_alphanumeric() || c == '_');
    code.split(part).filter(|word| !word.is_empty()).for_each(|word| visit(word.into()));
}

/// The identifiers of examples in comments: they are compiled as users of the crate.
fn examples(lines: &[text::Line], found: &mut BTreeSet<String>) {
    let mut inside = false;
    for line in lines {
        let comment = line.comment.trim_start_matches(['/', '!']).trim_start();
        if comment.starts_with("```") {
            inside = !inside;
        } else if inside {
            words(comment, &mut |word| found.extend([word]));
        }
    }
}

/// A public item.
struct Public {
    name: String,
    path: String,
    line: usize,
    /// The identifiers of what its users see: signatures and types of public fields.
    shows: BTreeSet<String>,
}

/// What a library offers.
#[derive(Default)]
struct Surface {
    path: String,
    items: Vec<Public>,
    /// Names that always count as used.
    always: BTreeSet<String>,
    /// A name, and what it is called where it is exported.
    renamed: Vec<(String, String)>,
}

impl Surface {
    fn add(&mut self, visibility: &Visibility, name: &Ident, shows: TokenStream) {
        if matches!(visibility, Visibility::Public(_)) {
            let (path, line) = (self.path.clone(), name.span().start().line);
            let shows = collect(shows);
            self.items.push(Public { name: name.to_string(), path, line, shows });
        }
    }

    /// Everything reachable from the names used outside.
    fn used(&self, outside: BTreeSet<String>) -> BTreeSet<String> {
        let mut used = outside;
        used.extend(self.always.iter().cloned());
        loop {
            let before = used.len();
            for (name, exported) in &self.renamed {
                if used.contains(exported) {
                    used.insert(name.clone());
                }
            }
            for item in &self.items {
                if used.contains(&item.name) {
                    used.extend(item.shows.iter().cloned());
                }
            }
            if used.len() == before {
                return used;
            }
        }
    }

    fn renames(&mut self, tree: &UseTree) {
        match tree {
            UseTree::Path(path) => self.renames(&path.tree),
            UseTree::Group(group) => group.items.iter().for_each(|tree| self.renames(tree)),
            UseTree::Rename(rename) => {
                self.renamed.push((rename.ident.to_string(), rename.rename.to_string()));
            }
            UseTree::Name(_) | UseTree::Glob(_) => {}
        }
    }
}

fn collect(tokens: TokenStream) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    identifiers(tokens, &mut |name| found.extend([name]));
    found
}

fn public_types<'a>(fields: impl IntoIterator<Item = &'a Field>) -> TokenStream {
    let public = fields.into_iter().filter(|field| matches!(field.vis, Visibility::Public(_)));
    public.map(|field| field.ty.to_token_stream()).collect()
}

impl<'ast> Visit<'ast> for Surface {
    fn visit_item(&mut self, item: &'ast Item) {
        match item {
            Item::Fn(item) if !is_test(&item.attrs) => {
                self.add(&item.vis, &item.sig.ident, item.sig.to_token_stream());
            }
            Item::Const(item) => self.add(&item.vis, &item.ident, item.ty.to_token_stream()),
            Item::Static(item) => self.add(&item.vis, &item.ident, item.ty.to_token_stream()),
            Item::Type(item) => self.add(&item.vis, &item.ident, item.ty.to_token_stream()),
            Item::Use(item) if matches!(item.vis, Visibility::Public(_)) => {
                self.renames(&item.tree)
            }
            Item::Mod(_)
            | Item::Struct(_)
            | Item::Enum(_)
            | Item::Trait(_)
            | Item::Impl(_)
            | Item::Macro(_) => {
                visit::visit_item(self, item);
            }
            _ => {}
        }
    }

    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            self.add(&item.vis, &item.ident, TokenStream::new());
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_struct(&mut self, item: &'ast ItemStruct) {
        let mut shows = public_types(&item.fields);
        item.generics.to_tokens(&mut shows);
        self.add(&item.vis, &item.ident, shows);
    }

    fn visit_item_enum(&mut self, item: &'ast ItemEnum) {
        let fields = item.variants.iter().map(|variant| &variant.fields);
        let mut shows: TokenStream = fields.map(Fields::to_token_stream).collect();
        item.generics.to_tokens(&mut shows);
        self.add(&item.vis, &item.ident, shows);
    }

    fn visit_item_trait(&mut self, item: &'ast ItemTrait) {
        self.add(&item.vis, &item.ident, item.to_token_stream());
    }

    fn visit_item_impl(&mut self, item: &'ast ItemImpl) {
        if is_test(&item.attrs) {
            return;
        }
        if let Some((_, of, _)) = &item.trait_ {
            self.always.extend(collect(of.to_token_stream()));
        }
        for member in &item.items {
            match member {
                ImplItem::Fn(function) if item.trait_.is_none() && !is_test(&function.attrs) => {
                    self.add(&function.vis, &function.sig.ident, function.sig.to_token_stream());
                }
                ImplItem::Const(constant) if item.trait_.is_none() => {
                    self.add(&constant.vis, &constant.ident, constant.ty.to_token_stream());
                }
                ImplItem::Type(alias) => self.always.extend(collect(alias.ty.to_token_stream())),
                ImplItem::Macro(call) => self.always.extend(collect(call.mac.tokens.clone())),
                _ => {}
            }
        }
    }

    fn visit_item_macro(&mut self, item: &'ast ItemMacro) {
        self.always.extend(collect(item.mac.tokens.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, text: &str) -> Source {
        let syntax = syn::parse_file(text).unwrap();
        Source { path: path.into(), text: text.into(), syntax }
    }

    fn said(library: &str, others: &[(&str, &str)]) -> Vec<String> {
        let home =
            Library { folder: "crates/a/".into(), users: vec!["crates/b/".into(), String::new()] };
        let mut sources = vec![source("crates/a/src/lib.rs", library)];
        sources.extend(others.iter().map(|(path, text)| source(path, text)));
        check(&home, &sources).iter().map(Problem::to_string).collect()
    }

    #[test]
    fn unused_items_are_found() {
        let nothing = |name| format!("crates/a/src/lib.rs:1: public `{name}` is used by nothing");
        for (planted, name) in [
            ("pub fn lost() {}", "lost"),
            ("pub struct Lost;", "Lost"),
            ("pub enum Lost { A }", "Lost"),
            ("pub const LOST: u32 = 1;", "LOST"),
            ("pub trait Lost {}", "Lost"),
            ("pub type Lost = u32;", "Lost"),
            ("pub mod lost {}", "lost"),
            ("impl X { pub fn lost(&self) {} }", "lost"),
        ] {
            assert_eq!(said(planted, &[]), [nothing(name)], "{planted}");
            let uses = [("crates/b/src/lib.rs", format!("use a::{name};"))];
            let uses: Vec<_> = uses.iter().map(|(path, text)| (*path, text.as_str())).collect();
            assert_eq!(said(planted, &uses), [""; 0], "{planted}");
        }
        let inner = "pub fn lost() {}\nfn f() { lost() }";
        let found = "crates/a/src/lib.rs:1: public `lost` is used only within its crate: `pub(crate)` is enough";
        assert_eq!(said(inner, &[]), [found]);
        // A comment, a string and a crate that does not depend on this one are no users.
        let others = [
            ("crates/b/src/lib.rs", "// lost\nconst A: &str = \"lost\";"),
            ("crates/c/src/lib.rs", "fn f() { lost() }"),
        ];
        assert_eq!(said("pub fn lost() {}", &others), [nothing("lost")]);
    }

    #[test]
    fn what_users_see_is_used() {
        let user = [("tests/x.rs", "fn f() { a::make(); }")];
        for good in [
            "pub fn make() -> Made { Made }\npub struct Made;",
            "pub fn make() -> Made { Made }\npub struct Made { pub of: Part }\npub struct Part;",
            "pub fn make() -> Result<(), Bad> { Ok(()) }\npub enum Bad { Worse(Worst) }\npub struct Worst;",
            "pub use inner::build as make;\nmod inner { pub fn build() {} }",
            "/// ```\n/// a::shown();\n/// ```\npub fn make() {}\npub fn shown() {}",
            "pub fn make() {}\n#[cfg(test)]\nmod tests { pub fn only_here() {} }",
            "pub fn make() {}\npub(crate) fn inside() {}",
            "pub fn make() {}\nlist! { pub struct Listed; }",
        ] {
            assert_eq!(said(good, &user), [""; 0], "{good}");
        }
        let private =
            "pub fn make() -> Made { Made }\npub struct Made { of: Part }\npub struct Part;";
        assert_eq!(said(private, &user).len(), 1, "a private field shows nothing");
    }
}
