//! Which texts a grammar accepts.

use grammar::{CompileError, Compiler, Grammar, Limits, Matcher, Vocabulary, VocabularyError};
use serde_json::json;

/// A compiler for single bytes and an end token.
fn bytes() -> Compiler {
    let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
    bytes.push(b"<end>".to_vec());
    let vocabulary = Vocabulary::new(&bytes, &[256], &[256]).expect("bytes are a vocabulary");
    Compiler::new(vocabulary, Limits::default())
}

/// Whether a grammar accepts a text byte by byte and may end after it.
fn accepts(compiler: &Compiler, grammar: &Grammar, text: &str) -> bool {
    let mut matcher = compiler.compile(grammar).expect("a grammar").matcher();
    let allowed = |matcher: &mut Matcher, token: u32| {
        matcher.mask().expect("a mask").words[token as usize / 32] >> (token % 32) & 1 == 1
    };
    for byte in text.bytes() {
        if !allowed(&mut matcher, byte.into()) {
            return false;
        }
        if matcher.accept(byte.into()).expect("it was allowed") {
            return true;
        }
    }
    allowed(&mut matcher, 256)
}

#[test]
fn json_with_bounded_white_space() {
    let compiler = bytes();
    let schema = json!({
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/list"}},
        "required": ["a", "b"],
        "additionalProperties": false,
        "$defs": {"list": {"type": "array", "items": {"type": "string"}}},
    });
    let schema = Grammar::JsonSchema(schema.to_string());
    for grammar in [schema, Grammar::JsonObject] {
        for text in [
            r#"{"a":1,"b":["x","y"]}"#,
            r#"{"a": 1, "b": ["x", "y"]}"#,
            "{\n  \"a\": 1,\n  \"b\": [\n    \"x\"\n  ]\n}",
            "{\r\n\t\"a\": 1,\r\n\t\"b\": []\r\n}",
        ] {
            assert!(accepts(&compiler, &grammar, text), "{text}");
        }
        for text in ["{  \"a\": 1, \"b\": []}", "{\n\n\"a\": 1, \"b\": []}", "\n\n{"] {
            assert!(!accepts(&compiler, &grammar, text), "{text}");
        }
    }
}

#[test]
fn clients_cannot_set_compiler_options() {
    let compiler = bytes();
    let schema = json!({
        "type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}},
        "x-guidance": {"whitespace_pattern": "[ ]*", "item_separator": ";"},
    });
    let grammar = Grammar::JsonSchema(schema.to_string());
    assert!(accepts(&compiler, &grammar, r#"{"a":1,"b":2}"#));
    assert!(!accepts(&compiler, &grammar, r#"{"a":1;"b":2}"#));
    assert!(!accepts(&compiler, &grammar, r#"{    "a":1}"#));
}

#[test]
fn definitions_inside_definitions() {
    let compiler = bytes();
    let call = json!({
        "type": "object",
        "properties": {"name": {"const": "f"}, "parameters": {"$ref": "#/$defs/0"}},
        "required": ["name", "parameters"],
        "additionalProperties": false,
    });
    let schema = json!({
        "type": "array", "minItems": 1, "maxItems": 1, "items": {"anyOf": [call]},
        "$defs": {"0": {
            "type": "object",
            "properties": {"to": {"$ref": "#/$defs/0/$defs/Place"}},
            "required": ["to"],
            "additionalProperties": false,
            "$defs": {"Place": {"enum": ["here", "there"]}},
        }},
    });
    let grammar = Grammar::JsonSchema(schema.to_string());
    let call = |to: &str| format!(r#"{{"name": "f", "parameters": {{"to": "{to}"}}}}"#);
    assert!(accepts(&compiler, &grammar, &format!("[{}]", call("there"))));
    assert!(!accepts(&compiler, &grammar, &format!("[{}]", call("away"))));
    assert!(!accepts(&compiler, &grammar, &format!("[{}, {}]", call("here"), call("here"))));
    assert!(!accepts(&compiler, &grammar, "[]"));
}

#[test]
fn recursive_schemas() {
    let compiler = bytes();
    let tree = json!({
        "type": "object", "required": ["left"], "additionalProperties": false,
        "properties": {"left": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    });
    let grammar = Grammar::JsonSchema(tree.to_string());
    assert!(accepts(&compiler, &grammar, r#"{"left":{"left":{"left":null}}}"#));
    assert!(!accepts(&compiler, &grammar, r#"{"left":{"left":{"right":null}}}"#));
}

#[test]
fn five_hundred_properties_are_accepted() {
    let compiler = bytes();
    let names: Vec<String> = (0..500).map(|i| format!("p{i}")).collect();
    let properties: serde_json::Map<_, _> =
        names.iter().map(|name| (name.clone(), json!({"type": "integer"}))).collect();
    let schema = json!({"type": "object", "properties": properties, "additionalProperties": false});
    let optional = Grammar::JsonSchema(schema.to_string());
    assert!(accepts(&compiler, &optional, r#"{"p0":1,"p499":2}"#));
    assert!(!accepts(&compiler, &optional, r#"{"p500":1}"#));
    let mut schema = schema;
    schema["required"] = json!(names);
    let required = Grammar::JsonSchema(schema.to_string());
    let all: Vec<String> = names.iter().map(|name| format!("\"{name}\":0")).collect();
    assert!(accepts(&compiler, &required, &format!("{{{}}}", all.join(","))));
    assert!(!accepts(&compiler, &required, r#"{"p0":1}"#));
}

#[test]
fn invalid_schemas_get_one_line_errors() {
    let compiler = bytes();
    for schema in ["", "{", "7", r#"{"type": "pear"}"#, r##"{"$ref": "#/nowhere"}"##] {
        let error = compiler.compile(&Grammar::JsonSchema(schema.into())).unwrap_err();
        assert!(matches!(error, CompileError::Invalid(_)), "{schema}: {error:?}");
        let text = error.to_string();
        assert!(!text.contains('\n') && text.len() < 300, "{schema}: {text}");
    }
    let error = compiler.compile(&Grammar::JsonSchema(r##"{"$ref": "#"}"##.into())).unwrap_err();
    assert_eq!(error.to_string(), "no text satisfies the grammar");
}

#[test]
fn a_vocabulary_needs_an_end_token() {
    let one = [vec![b'a']];
    assert_eq!(Vocabulary::new(&one, &[], &[]).unwrap_err(), VocabularyError::NoEos);
    assert_eq!(Vocabulary::new(&one, &[], &[7]).unwrap_err(), VocabularyError::OutOfRange(7));
}

#[test]
fn recent_grammars_are_cached() {
    let compiler = bytes();
    let one = Grammar::Regex("[a-c]+".into());
    let first = compiler.compile(&one).unwrap();
    assert!(compiler.compile(&one).unwrap().is_same(&first));
    assert_eq!(compiler.compilations(), 1);
    for i in 0..Limits::default().kept {
        compiler.compile(&Grammar::Regex(format!("a{{{}}}", i + 1))).unwrap();
    }
    assert!(!compiler.compile(&one).unwrap().is_same(&first), "the grammar was evicted");
    // Errors are cached too.
    let wrong = Grammar::Regex("[a".into());
    compiler.compile(&wrong).unwrap_err();
    let before = compiler.compilations();
    compiler.compile(&wrong).unwrap_err();
    assert_eq!(compiler.compilations(), before);
}

#[test]
fn matchers_share_no_state() {
    let compiler = bytes();
    let compiled = compiler.compile(&Grammar::Regex("ab|cd".into())).unwrap();
    let (mut one, mut other) = (compiled.matcher(), compiled.matcher());
    assert!(!one.accept(b'a'.into()).unwrap());
    assert!(!other.accept(b'c'.into()).unwrap());
    let mut fork = one.clone();
    assert!(one.accept(b'b'.into()).unwrap());
    assert!(other.accept(b'd'.into()).unwrap());
    assert!(fork.accept(b'b'.into()).unwrap());
}

/// Schemas as pydantic and zod write them: what they accept is what their authors mean.
#[test]
fn schemas_of_pydantic_and_zod() {
    let compiler = bytes();
    let pet = |kind: &str| {
        json!({
            "type": "object",
            "properties": {"kind": {"const": kind, "type": "string"}},
            "required": ["kind"],
            "additionalProperties": false,
        })
    };
    let union = json!({
        "$defs": {"Cat": pet("cat"), "Dog": pet("dog")},
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    });
    let set = json!({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": true});
    let decimal = json!({"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}]});
    let optional = json!({
        "type": "object",
        "properties": {"path": {"type": "string", "format": "path"}, "never": {"not": {}}},
        "required": ["path"],
        "additionalProperties": false,
    });
    for (schema, yes, no) in [
        (union, vec![r#"{"kind":"cat"}"#, r#"{"kind":"dog"}"#], vec![r#"{"kind":"cow"}"#, "1"]),
        (set, vec!["[]", r#"["b","a"]"#, r#"["a"]"#], vec![r#"["a","a"]"#, r#"["c"]"#]),
        (
            decimal,
            vec!["1.5", r#""+1.5""#, r#""1.""#, r#"".5""#],
            vec![r#"".""#, r#""x""#, r#""+""#],
        ),
        (optional, vec![r#"{"path":"/tmp/x"}"#], vec![r#"{"path":1}"#, r#"{"path":"","never":1}"#]),
        (
            json!({"type": "string", "format": "byte"}),
            vec![r#""""#, r#""Zm9v""#, r#""Zg==""#],
            vec![r#""Z""#],
        ),
        (json!({"enum": [1, 2], "not": {"const": 2}}), vec!["1"], vec!["2"]),
    ] {
        let grammar = Grammar::JsonSchema(schema.to_string());
        for text in yes {
            assert!(accepts(&compiler, &grammar, text), "{schema}: {text}");
        }
        for text in no {
            assert!(!accepts(&compiler, &grammar, text), "{schema}: {text}");
        }
    }
    for (schema, keyword) in [
        (json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}), "uniqueItems"),
        (json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}}), "if"),
        (json!({"type": "string", "not": {"pattern": "x"}}), "not"),
        (
            json!({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}),
            "dependentSchemas",
        ),
    ] {
        let error = compiler.compile(&Grammar::JsonSchema(schema.to_string())).unwrap_err();
        assert!(error.to_string().contains(keyword), "{error}");
    }
}
