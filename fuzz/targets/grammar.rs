//! Any schema, regular expression or Lark grammar: refused with one line, or compiled with masks of
//! bounded cost. The first byte selects the kind; a schema is text, or built from the bytes,
//! because random text is rarely a schema.
#![no_main]

use grammar::{Compiler, Grammar, Limits, Vocabulary};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value, json};
use std::sync::LazyLock;
use std::time::Duration;

static COMPILER: LazyLock<Compiler> = LazyLock::new(|| {
    // The compiler catches panics of llguidance; any other panic is a finding.
    let finding = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() != Some("grammar") {
            finding(info);
        }
    }));
    let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|byte| vec![byte]).collect();
    for a in b'a'..=b'z' {
        for b in b"aeiou \"{}[]:,0" {
            bytes.push(vec![a, *b]);
            bytes.push(vec![b' ', a, *b, a]);
        }
    }
    bytes.push(b"<end>".to_vec());
    let end = bytes.len() as u32 - 1;
    let vocabulary = Vocabulary::new(&bytes, &[end], &[end]).expect("a vocabulary");
    // A compilation that exceeds the fuzzer's timeout is a finding.
    let limits = Limits { time: Duration::from_secs(60), kept: 4, ..Limits::default() };
    Compiler::new(vocabulary, limits)
});

fuzz_target!(|data: &[u8]| {
    let Some((&kind, rest)) = data.split_first() else { return };
    let text = || String::from_utf8_lossy(rest).into_owned();
    let grammar = match kind % 5 {
        0 => Grammar::JsonSchema(text()),
        1 => Grammar::Regex(text()),
        2 => Grammar::Lark(text()),
        _ => {
            let mut bytes = Bytes { rest, left: 3000 };
            let mut schema = bytes.schema(0);
            let defs: Map<String, Value> =
                (0..8).map(|i| (format!("d{i}"), bytes.schema(0))).collect();
            if let Value::Object(map) = &mut schema {
                map.insert("$defs".into(), defs.into());
            }
            Grammar::JsonSchema(schema.to_string())
        }
    };
    let compiled = match COMPILER.compile(&grammar) {
        Ok(compiled) => compiled,
        Err(error) => {
            let text = error.to_string();
            assert!(!text.contains('\n') && text.len() < 1000, "{text}");
            return;
        }
    };
    let mut matcher = compiled.matcher();
    for step in 0..40usize {
        let Ok(mask) = matcher.mask() else { return };
        assert!(mask.cost < 100_000, "a mask costs {}", mask.cost);
        let tokens = mask.words.len() as u32 * 32;
        let allowed = |token: &u32| mask.words[*token as usize / 32] >> (token % 32) & 1 == 1;
        let from = rest.get(step % rest.len().max(1)).map_or(0, |byte| u32::from(*byte) * 5);
        let Some(token) = (from..tokens).chain(0..from).find(allowed) else { return };
        if matcher.ends_with(token) || !matches!(matcher.accept(token), Ok(false)) {
            return;
        }
    }
});

struct Bytes<'a> {
    rest: &'a [u8],
    /// Schemas that may still be generated.
    left: u32,
}

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        first
    }

    fn size(&mut self) -> usize {
        match self.byte() {
            byte @ 0..=199 => usize::from(byte % 5),
            byte => usize::from(byte - 190) * 40,
        }
    }

    fn number(&mut self) -> Value {
        match self.byte() % 8 {
            0 => json!(0),
            1 => json!(u64::from(self.byte())),
            2 => json!(-1),
            3 => json!(1e300),
            4 => json!(4_000_000_000u64),
            5 => json!(0.1),
            6 => json!(f64::from(self.byte()) * 1e-7),
            _ => json!(u64::MAX),
        }
    }

    fn name(&mut self) -> String {
        match self.byte() {
            byte @ 0..=63 => format!("p{byte}"),
            byte @ 64..=127 => "é\u{1f600}\"\\".repeat(usize::from(byte - 63)),
            byte => format!("^{}[a-z]{{0,{}}}$", byte % 9, self.byte()),
        }
    }

    fn pattern(&mut self) -> String {
        let count = self.size();
        let piece = |byte: u8| match byte % 12 {
            0 => "a".to_owned(),
            1 => "(a|b)*".into(),
            2 => "[a-z]{0,1000}".into(),
            3 => ".*".into(),
            4 => "(".into(),
            5 => ")".into(),
            6 => "\\d+".into(),
            7 => "(?i)é".into(),
            8 => "^x|y$".into(),
            9 => "\\p{L}{1,50}".into(),
            10 => "(?:ab?){9}".into(),
            _ => char::from(byte).to_string(),
        };
        (0..count).map(|_| piece(self.byte())).collect()
    }

    fn schemas(&mut self, depth: u32) -> Vec<Value> {
        (0..self.size()).map(|_| self.schema(depth)).collect()
    }

    fn named(&mut self, depth: u32) -> Value {
        let pairs = (0..self.size()).map(|_| (self.name(), self.schema(depth)));
        pairs.collect::<Map<String, Value>>().into()
    }

    fn schema(&mut self, depth: u32) -> Value {
        if self.left == 0 || depth > 90 {
            return json!(true);
        }
        self.left -= 1;
        let mut map = Map::new();
        for _ in 0..1 + self.byte() % 4 {
            let depth = depth + 1;
            let (key, value) = match self.byte() % 32 {
                0 => ("type", json!(["string", "object", "array"][usize::from(self.byte() % 3)])),
                1 => ("type", json!(["integer", "number", "null"][usize::from(self.byte() % 3)])),
                2 => ("type", json!(["string", "object", "integer"])),
                3 => ("$ref", json!(format!("#/$defs/d{}", self.byte() % 9))),
                4 => ("$ref", json!("#")),
                5 => ("anyOf", self.schemas(depth).into()),
                6 => ("oneOf", self.schemas(depth).into()),
                7 => ("allOf", self.schemas(depth).into()),
                8 => ("items", self.schema(depth)),
                9 => ("prefixItems", self.schemas(depth).into()),
                10 => ("properties", self.named(depth)),
                11 => ("patternProperties", self.named(depth)),
                12 => ("additionalProperties", self.schema(depth)),
                13 => ("required", (0..self.size()).map(|_| self.name()).collect()),
                14 => ("pattern", self.pattern().into()),
                15 => ("minLength", self.number()),
                16 => ("maxLength", self.number()),
                17 => ("minItems", self.number()),
                18 => ("maxItems", self.number()),
                19 => ("minProperties", self.number()),
                20 => ("maxProperties", self.number()),
                21 => ("minimum", self.number()),
                22 => ("maximum", self.number()),
                23 => ("multipleOf", self.number()),
                24 => ("const", self.schema(depth)),
                25 => ("format", json!(["date-time", "uuid", "email", "pear"][self.size() % 4])),
                26 => ("not", self.schema(depth)),
                27 => ("uniqueItems", json!(self.byte().is_multiple_of(2))),
                28 => ("if", self.schema(depth)),
                29 => (["then", "else"][self.size() % 2], self.schema(depth)),
                30 => ("format", json!(["path", "byte", "base64url", "int64"][self.size() % 4])),
                _ => ("enum", (0..self.size()).map(|_| self.name()).collect()),
            };
            map.insert(key.into(), value);
        }
        map.into()
    }
}
