//! What may come into the tree of dependencies: licences, sources, and crates that a fresh machine could not build.

use super::Problem;
use cargo_metadata::Metadata;

/// Licences that may be linked into a program that is distributed under Apache-2.0.
const LICENCES: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CDLA-Permissive-2.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// A fresh machine has a Rust toolchain, gcc and Python: nothing that wants cmake, OpenSSL or a C++ library.
const REFUSED: &[(&str, &str)] = &[
    ("aws-lc-sys", "it needs cmake"),
    ("cmake", "it needs cmake"),
    ("onig_sys", "it is a C library, and tokenizers has fancy-regex"),
    ("openssl-sys", "rustls does it"),
    ("native-tls", "rustls does it"),
];

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// A package, as far as the rules go.
struct Package<'a> {
    name: &'a str,
    licence: Option<&'a str>,
    /// `None` for a path inside the repository.
    source: Option<&'a str>,
    /// Dependencies on any version.
    any_version: Vec<&'a str>,
}

/// Every package of the tree that breaks a rule.
pub(super) fn check(metadata: &Metadata) -> Vec<Problem> {
    let package = |package: &'_ cargo_metadata::Package| -> Vec<Problem> {
        let any = package.dependencies.iter().filter(|dependency| {
            dependency.path.is_none() && dependency.req.comparators.is_empty()
        });
        check_one(&Package {
            name: &package.name,
            licence: package.license.as_deref(),
            source: package.source.as_ref().map(|source| source.repr.as_str()),
            any_version: any.map(|dependency| dependency.name.as_str()).collect(),
        })
    };
    metadata.packages.iter().flat_map(package).collect()
}

fn check_one(package: &Package<'_>) -> Vec<Problem> {
    let mut found = Vec::new();
    let mut complain = |why: String| {
        found.push(Problem::new("Cargo.lock", 0, format!("{}: {why}", package.name)));
    };
    if let Some((_, why)) = REFUSED.iter().find(|(name, _)| *name == package.name) {
        complain(format!("refused, because {why}"));
    }
    let Some(source) = package.source else {
        for name in &package.any_version {
            complain(format!("takes any version of {name}; name one"));
        }
        return found;
    };
    if source != REGISTRY {
        complain(format!("comes from {source}, not from the registry"));
    }
    match package.licence {
        None => complain("names no licence".into()),
        Some(licence) if !allowed(licence) => {
            complain(format!("the licence {licence} is not in the list"));
        }
        Some(_) => {}
    }
    found
}

/// Whether a licence expression can be met with the list: one side of each `OR`, both of each `AND`. `/` is an old `OR`.
fn allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    either(&mut rest) && rest.is_empty()
}

fn either(words: &mut &[&str]) -> bool {
    let mut is = both(words);
    while let ["OR", rest @ ..] = *words {
        *words = rest;
        is |= both(words);
    }
    is
}

fn both(words: &mut &[&str]) -> bool {
    let mut is = one(words);
    while let ["AND", rest @ ..] = *words {
        *words = rest;
        is &= one(words);
    }
    is
}

fn one(words: &mut &[&str]) -> bool {
    match *words {
        ["(", rest @ ..] => {
            *words = rest;
            let is = either(words);
            let [")", rest @ ..] = *words else { return false };
            *words = rest;
            is
        }
        [licence, "WITH", exception, rest @ ..] => {
            *words = rest;
            // An exception only permits more.
            LICENCES.contains(&format!("{licence} WITH {exception}").as_str())
                || LICENCES.contains(licence)
        }
        [licence, rest @ ..] => {
            *words = rest;
            LICENCES.contains(licence)
        }
        [] => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licence_expressions_are_met_or_not() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "GPL-3.0 OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0",
            "MIT AND (GPL-2.0 OR Zlib)",
        ] {
            assert!(allowed(good), "{good}");
        }
        for bad in ["GPL-3.0", "MIT AND GPL-3.0", "(MIT", "MIT)", "", "MIT MIT", "OR MIT", "AND"] {
            assert!(!allowed(bad), "{bad}");
        }
    }

    #[test]
    fn planted_packages_are_found() {
        let good = Package {
            name: "serde",
            licence: Some("MIT"),
            source: Some(REGISTRY),
            any_version: vec!["libc"],
        };
        assert_eq!(check_one(&good), []);
        let bad = [
            Package { name: "openssl-sys", ..with(&good) },
            Package { licence: None, ..with(&good) },
            Package { licence: Some("GPL-3.0"), ..with(&good) },
            Package { source: Some("git+https://example.com/x"), ..with(&good) },
            Package { source: None, ..with(&good) },
        ];
        for package in bad {
            assert_eq!(check_one(&package).len(), 1, "{:?}", check_one(&package));
        }
    }

    fn with<'a>(package: &Package<'a>) -> Package<'a> {
        Package { any_version: package.any_version.clone(), ..*package }
    }
}
