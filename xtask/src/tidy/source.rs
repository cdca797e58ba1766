//! Rules for single files: their names, their length, and what they must not contain.

use super::Problem;
use super::text::{self, Line};

/// The longest a file may be: it should be read in one sitting.
const MAX_LINES: usize = 700;

/// File and folder names that do not describe their contents.
const EMPTY_NAMES: &[&str] = &["utils", "util", "helpers", "helper", "common", "misc"];

/// The only crates that may hold `unsafe`: the device, and the allocator that tests count with.
const UNSAFE_HOMES: &[&str] = &["crates/device/", "testing/allocs/"];

/// Words that a crate's code may not contain outside its tests, and why.
const ABSENT: &[(&str, &[&str], &str)] = &[
    (
        "crates/engine/src/",
        &["Instant", "SystemTime", "std::thread", "thread::"],
        "the engine has no clock and no threads: its caller passes the time",
    ),
    (
        "crates/graph/src/",
        &["cudarc", "device::cuda", "cuda::"],
        "`graph` asks `device::Target`, not a kind of device",
    ),
];

/// Macros that mark code as not finished.
const UNFINISHED: &[&str] = &["todo!", "unimplemented!", "dbg!"];

/// Macros that panic where standard output or standard error cannot be written.
const PRINTS: &[&str] = &["println!", "print!", "eprintln!", "eprint!"];

/// Where code runs that is part of the product: its own tests may print, and so may tools, examples and
/// build scripts elsewhere.
fn is_product(path: &str) -> bool {
    let library = path.starts_with("crates/") && path.contains("/src/");
    (path.starts_with("src/") || library)
        && !path.ends_with("/tests.rs")
        && !path.contains("/tests/")
}

/// Words that mark text as not finished. Split, so that this file does not hold them.
const UNFINISHED_WORDS: &[&str] = &[concat!("FIX", "ME"), concat!("XX", "X")];

/// Folders of one machine: a path below them means nothing on another. Split for the same reason.
const MACHINE_FOLDERS: &[&str] =
    &[concat!("/wo", "rk/"), concat!("/ho", "me/"), concat!("/ro", "ot/"), concat!("/Us", "ers/")];

/// Settings that tie a build to a private mirror of a registry.
const REGISTRY_SETTINGS: &[&str] = &[
    concat!("replace", "-with"),
    concat!("index", "-url"),
    concat!("index", "_url"),
    concat!("_auth", "Token"),
    concat!("sparse", "+http"),
];

/// Package sources that a lock file may name.
const LOCK_SOURCES: &[&str] =
    &["https://github.com/rust-lang/crates.io-index", "https://registry.npmjs.org/"];

/// Rules about a file's name.
pub(super) fn check_path(path: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    for part in path.split('/') {
        let stem = part.split('.').next().unwrap_or(part);
        if EMPTY_NAMES.contains(&stem.to_lowercase().as_str()) {
            let what = format!("`{stem}` does not say what is inside; name the noun");
            problems.push(Problem::new(path, 0, what));
        }
    }
    problems
}

/// Rules about a file's text.
pub(super) fn check_text(path: &str, source: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let rust = path.ends_with(".rs");
    if rust || path.ends_with(".cu") || path.ends_with(".cuh") {
        let count = source.lines().count();
        if count > MAX_LINES {
            let what = format!("{count} lines; at most {MAX_LINES} are read in one sitting");
            problems.push(Problem::new(path, 0, what));
        }
    }
    if rust {
        check_code(path, &text::lines(source), &mut problems);
    }
    for (at, line) in source.lines().enumerate() {
        check_words(path, at + 1, line, &mut problems);
    }
    problems
}

fn check_code(path: &str, lines: &[Line], problems: &mut Vec<Problem>) {
    // A file's tests are at its end.
    let tests = lines.iter().position(|line| line.code.contains("#[cfg(test)]"));
    for (at, line) in lines.iter().enumerate() {
        let mut complain = |what: String| problems.push(Problem::new(path, at + 1, what));
        if is_product(path) && tests.is_none_or(|tests| at < tests) {
            for (folder, words, why) in ABSENT {
                for word in words.iter().filter(|_| path.starts_with(folder)) {
                    let name = word.trim_end_matches(':');
                    if text::has_word(&line.code, name) && line.code.contains(word) {
                        complain(format!("`{word}`: {why}"));
                        break;
                    }
                }
            }
            for word in PRINTS {
                let name = word.trim_end_matches('!');
                if text::has_word(&line.code, name) && line.code.contains(word) {
                    complain(format!(
                        "`{word}` panics when its output is closed: use `output` or `notice`"
                    ));
                }
            }
        }
        for word in UNFINISHED {
            if text::has_word(&line.code, word.trim_end_matches('!')) && line.code.contains(word) {
                complain(format!("`{word}`: only finished code lands"));
            }
        }
        if line.code.contains(concat!("#[", "ignore")) {
            complain("an ignored test proves nothing".into());
        }
        if !text::has_word(&line.code, "unsafe") {
            continue;
        }
        if !UNSAFE_HOMES.iter().any(|home| path.starts_with(home)) {
            complain("unsafe code belongs in crates/device only".into());
        } else if needs_reason(&line.code) && !has_reason(lines, at) {
            complain("unsafe without a `// SAFETY:` reason above it".into());
        }
    }
}

/// Whether an unsafe block or implementation starts here. Declarations (`unsafe fn`, `unsafe
/// extern`, a type or a trait) pass the duty on to the caller, who has an unsafe block.
fn needs_reason(code: &str) -> bool {
    code.match_indices("unsafe").any(|(at, word)| {
        let rest = code[at + word.len()..].trim_start();
        rest.is_empty() || rest.starts_with('{') || rest.starts_with("impl")
    })
}

/// Whether a reason is on the line, or above it with only the same statement in between.
fn has_reason(lines: &[Line], at: usize) -> bool {
    let names_reason = |line: &Line| line.comment.contains("SAFETY:");
    if names_reason(&lines[at]) {
        return true;
    }
    for line in lines[..at].iter().rev() {
        if names_reason(line) {
            return true;
        }
        let code = line.code.trim_end();
        let statement_ends = code.ends_with(';') || code.ends_with('}');
        if statement_ends || (code.is_empty() && line.comment.is_empty()) {
            return false;
        }
    }
    false
}

fn check_words(path: &str, number: usize, line: &str, problems: &mut Vec<Problem>) {
    let mut complain = |what: String| problems.push(Problem::new(path, number, what));
    for word in UNFINISHED_WORDS {
        if text::has_word(line, word) {
            complain(format!("`{word}`: only finished work lands"));
        }
    }
    for folder in MACHINE_FOLDERS {
        // In the middle of a longer path or an address it is a name like any other.
        let starts_a_path = line.match_indices(folder).any(|(at, _)| {
            !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-~}*)".contains(c))
        });
        if starts_a_path {
            complain(format!("`{folder}…` exists on one machine only"));
        }
    }
    for setting in REGISTRY_SETTINGS {
        if line.contains(setting) {
            complain(format!("`{setting}` ties the build to one mirror"));
        }
    }
    let is_lock = path.ends_with(".lock") || path.ends_with("package-lock.json");
    if is_lock && (line.contains("source = ") || line.contains("\"resolved\":")) {
        let known = LOCK_SOURCES.iter().any(|source| line.contains(source));
        if !known {
            complain("a package from a place that others do not have".into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(path: &str, source: &str) -> Vec<String> {
        check_text(path, source).into_iter().map(|p| format!("{}: {}", p.line, p.what)).collect()
    }

    #[test]
    fn a_good_file_passes() {
        let good =
            "//! A file.\n\n/// A line of `todo`s: none.\nfn main() { let a = \"unsafe\"; }\n";
        assert_eq!(said("src/main.rs", good), [""; 0]);
        assert_eq!(check_path("crates/device/src/ops/rms_norm.rs"), []);
    }

    #[test]
    fn names_that_say_nothing_are_found() {
        for path in ["src/utils.rs", "crates/helpers/src/lib.rs", "tests/common/mod.rs"] {
            assert_eq!(check_path(path).len(), 1, "{path}");
        }
        assert_eq!(check_path("src/commonplace.rs"), []);
    }

    #[test]
    fn long_files_are_found() {
        let long = "// line\n".repeat(MAX_LINES + 1);
        assert_eq!(
            said("crates/device/kernels/a.cu", &long),
            ["0: 701 lines; at most 700 are read in one sitting"]
        );
        assert_eq!(said("docs/long.md", &long), [""; 0]);
        assert_eq!(said("src/a.rs", &"// line\n".repeat(MAX_LINES)), [""; 0]);
    }

    #[test]
    fn unfinished_code_is_found() {
        for planted in ["todo!()", "unimplemented!(\"later\")", "let a = dbg!(b);", "#[ignore]"] {
            assert_eq!(said("src/a.rs", planted).len(), 1, "{planted}");
        }
        assert_eq!(said("src/a.rs", "// todo!() in a comment is a word"), [""; 0]);
        let word = UNFINISHED_WORDS[0];
        assert_eq!(said("docs/a.md", &format!("{word}: later")).len(), 1);
        assert_eq!(said("tools/a.py", &format!("# {}", UNFINISHED_WORDS[1])).len(), 1);
    }

    #[test]
    fn prints_that_can_panic_are_found() {
        for planted in
            ["println!(\"a\");", "eprintln!();", "print!(\"{a}\");", "x => eprint!(\"b\"),"]
        {
            for path in ["src/a.rs", "src/bench/a.rs", "crates/device/src/cuda/a.rs"] {
                assert_eq!(said(path, planted).len(), 1, "{path}: {planted}");
            }
            for path in ["tests/a.rs", "crates/device/build.rs", "xtask/src/a.rs", "src/a/tests.rs"]
            {
                assert_eq!(said(path, planted), [""; 0], "{path}: {planted}");
            }
        }
        let tests = "#[cfg(test)]\nmod tests {\n    println!(\"a\");\n}\n";
        assert_eq!(said("src/a.rs", tests), [""; 0]);
        assert_eq!(said("src/a.rs", "//! println!(\"a\")\nlet b = \"print!\";"), [""; 0]);
    }

    #[test]
    fn clocks_threads_and_cuda_are_found_where_they_are_not_allowed() {
        for planted in [
            "use std::time::Instant;",
            "let now = std::time::SystemTime::now();",
            "std::thread::spawn(f);",
            "use std::thread;",
            "thread::scope(f);",
        ] {
            assert_eq!(said("crates/engine/src/sched/a.rs", planted).len(), 1, "{planted}");
            assert_eq!(said("crates/model/src/a.rs", planted), [""; 0], "{planted}");
            let test = format!("#[cfg(test)]\nmod tests {{ {planted} }}");
            assert_eq!(said("crates/engine/src/sched/a.rs", &test), [""; 0], "{planted}");
        }
        for planted in
            ["use device::cuda::launch::Launch;", "use device::{cuda::Gpu};", "cudarc::x()"]
        {
            assert_eq!(said("crates/graph/src/compile/a.rs", planted).len(), 1, "{planted}");
            assert_eq!(said("crates/graph/tests/a.rs", planted), [""; 0], "{planted}");
        }
        assert_eq!(said("crates/graph/src/a.rs", "DeviceKind::Cuda => 1,"), [""; 0]);
    }

    #[test]
    fn unsafe_outside_its_home_is_found() {
        let block = "// SAFETY: none\nunsafe { f() }\n";
        assert_eq!(said("src/a.rs", block), ["2: unsafe code belongs in crates/device only"]);
        assert_eq!(said("crates/device/src/a.rs", block), [""; 0]);
    }

    #[test]
    fn unsafe_without_a_reason_is_found() {
        let home = "crates/device/src/a.rs";
        for planted in [
            "fn a() {\n    unsafe { f() }\n}",
            "// SAFETY: of the first\nunsafe { f() };\nlet b = unsafe { g() };",
            "// SAFETY: far above\n\nlet b = unsafe { g() };",
            "unsafe impl Send for A {}",
        ] {
            assert_eq!(said(home, planted).len(), 1, "{planted}");
        }
        for good in [
            "// SAFETY: it is live.\nlet b = unsafe { g() };",
            "// SAFETY: it is live,\n// and long.\nlet b =\n    call(unsafe { g() });",
            "let b = unsafe { g() }; // SAFETY: it is live.",
            "// SAFETY: only bytes.\n#[allow(clippy::all)]\nunsafe impl Send for A {}",
            "pub unsafe fn f();",
            "unsafe extern \"C\" {",
        ] {
            assert_eq!(said(home, good), [""; 0], "{good}");
        }
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        for folder in MACHINE_FOLDERS {
            assert_eq!(said("docs/a.md", &format!("see {folder}x")).len(), 1, "{folder}");
        }
        assert_eq!(said("docs/a.md", "~/home/x, docs/work/y, https://a.org/home/z"), [""; 0]);
    }

    #[test]
    fn mirrors_are_found() {
        let mirror = format!("{} = \"mine\"", REGISTRY_SETTINGS[0]);
        assert_eq!(said(".cargo/config.toml", &mirror).len(), 1);
        let lock = "source = \"registry+https://mirror.example/index\"";
        assert_eq!(said("Cargo.lock", lock).len(), 1);
        let crates = "source = \"registry+https://github.com/rust-lang/crates.io-index\"";
        assert_eq!(said("Cargo.lock", crates), [""; 0]);
    }
}
