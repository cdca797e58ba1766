//! `dacapo run` with invalid, too large or hostile grammars: one error line, exit code 2.

use crate::process;
use crate::smollm2;
use process::fails;
use smollm2::{dacapo, smollm2};
use std::path::Path;

#[test]
fn hostile_grammars_are_refused_in_one_line() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("grammars");
    std::fs::create_dir_all(&folder).unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let links: Vec<String> =
        (0..594).map(|i| format!(r##""d{i}":{{"$ref":"#/$defs/d{}"}}"##, i + 1)).collect();
    let chain = format!(r##"{{"$ref":"#/$defs/d0","$defs":{{{},"d594":true}}}}"##, links.join(","));
    let flat: Vec<String> = (0..5000).map(|i| format!(r#""p{i}":true"#)).collect();
    let flat = format!(r#"{{"type":"object","properties":{{{}}}}}"#, flat.join(","));
    let Some(model) = smollm2() else { return };
    for (flag, value, word) in [
        ("--json-schema", file("chain.json", &chain), "too large"),
        ("--json-schema", file("flat.json", &flat), "too large"),
        ("--json-schema", file("self.json", r##"{"$ref":"#"}"##), "no text satisfies the grammar"),
        ("--json-schema", file("none.json", "{"), "EOF"),
        ("--regex", "(a|b)".repeat(5000), "too large"),
        ("--regex", "[a".to_owned(), ""),
        ("--grammar", file("none.lark", "start: nothing"), ""),
    ] {
        let args = ["run", model, "-p", "hi", "-n", "4", flag, &value];
        let error = fails(dacapo(&args).output().unwrap(), 2);
        assert!(error.contains(word) && !error.contains("panick"), "{flag}: {error}");
    }
}
