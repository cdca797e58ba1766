//! A generator of schemas and regular expressions that are hard to compile or invalid.

use crate::draw::Draw;
use serde_json::{Map, Value, json};

/// A hostile schema.
pub(crate) fn schema(draw: &mut Draw) -> Value {
    match draw.below(16) {
        0 => chain(draw, |next| next),
        1 => chain(draw, |next| json!({"allOf": [next]})),
        2 => chain(draw, |next| json!({"anyOf": [next, {"type": "null"}]})),
        3 => chain(draw, |next| json!({"type": "array", "items": next})),
        4 => chain(draw, |next| json!({"type": "object", "properties": {"a": next}})),
        5 => properties(draw),
        6 => patterns(draw),
        7 => json!({"type": "string", "pattern": expression(draw, 4)}),
        8 => nested(draw),
        9 => alternatives(draw),
        10 => {
            json!({"$ref": draw.pick(&["#", "#/$defs/a", "#/nowhere", "http://a.example/s", ""])})
        }
        11 => looped(draw),
        12 => extremes(draw),
        13 => wrong(draw),
        14 => {
            let several = ["allOf", "anyOf", "oneOf"];
            let key = draw.pick(&several);
            let list: Vec<Value> = (0..draw.below(6)).map(|_| schema(draw)).collect();
            json!({key: list})
        }
        _ => json!({"type": "object", "properties": {"a": schema_leaf(draw)}, "required": ["a"]}),
    }
}

/// A simple valid schema.
pub(crate) fn schema_leaf(draw: &mut Draw) -> Value {
    draw.pick(&[
        json!({"type": "string", "maxLength": 4}),
        json!({"type": "integer", "minimum": 0, "maximum": 9}),
        json!({"type": "boolean"}),
        json!({"enum": ["a", "b"]}),
    ])
}

fn chain(draw: &mut Draw, link: impl Fn(Value) -> Value) -> Value {
    let links = draw.size(4, 2500);
    let to = |i: usize| json!({"$ref": format!("#/$defs/d{i}")});
    let mut defs: Map<String, Value> =
        (0..links).map(|i| (format!("d{i}"), link(to(i + 1)))).collect();
    let end = if draw.one_in(8) { to(0) } else { json!({"type": "string"}) };
    defs.insert(format!("d{links}"), end);
    json!({"$ref": "#/$defs/d0", "$defs": defs})
}

fn properties(draw: &mut Draw) -> Value {
    let names: Vec<String> = (0..draw.size(8, 6000)).map(|i| format!("p{i}")).collect();
    let all: Map<String, Value> =
        names.iter().map(|name| (name.clone(), schema_leaf(draw))).collect();
    let mut schema = json!({"type": "object", "properties": all});
    match draw.below(3) {
        0 => schema["required"] = json!(names),
        1 => schema["additionalProperties"] = json!(true),
        _ => {}
    }
    schema
}

fn patterns(draw: &mut Draw) -> Value {
    let count = draw.size(4, 600);
    let all: Map<String, Value> =
        (0..count).map(|i| (format!("^p{i}{}$", expression(draw, 2)), schema_leaf(draw))).collect();
    json!({"type": "object", "patternProperties": all})
}

fn nested(draw: &mut Draw) -> Value {
    let mut schema = schema_leaf(draw);
    let key = draw.pick(&["allOf", "anyOf", "oneOf", "items", "not", "if", "properties"]);
    for _ in 0..draw.size(4, 200) {
        schema = match key {
            "items" | "not" | "if" => json!({key: schema}),
            "properties" => json!({"type": "object", "properties": {"a": schema}}),
            _ => json!({key: [schema]}),
        };
    }
    schema
}

fn alternatives(draw: &mut Draw) -> Value {
    let count = draw.size(4, 3000);
    match draw.below(3) {
        0 => json!({"enum": (0..count).map(|i| format!("value {i}")).collect::<Vec<_>>()}),
        1 => {
            let one = |i: usize| json!({"type": "object", "properties": {format!("k{i}"): {}}});
            json!({"anyOf": (0..count).map(one).collect::<Vec<_>>()})
        }
        _ => {
            let one = |i: usize| json!({"type": "string", "pattern": format!("a{{{i}}}b*")});
            json!({"oneOf": (0..count.min(400)).map(one).collect::<Vec<_>>()})
        }
    }
}

fn looped(draw: &mut Draw) -> Value {
    let a = draw.pick(&[
        json!({"$ref": "#/$defs/b"}),
        json!({"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/a"}]}),
        json!({"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}),
        json!({"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}),
    ]);
    json!({"$ref": "#/$defs/a", "$defs": {"a": a, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}})
}

fn extremes(draw: &mut Draw) -> Value {
    let large = draw.pick(&[1_000u64, 100_000, 1 << 31, 1 << 53]);
    draw.pick(&[
        json!({"type": "string", "minLength": large}),
        json!({"type": "string", "maxLength": large}),
        json!({"type": "array", "items": {"type": "string"}, "minItems": large}),
        json!({"type": "array", "items": {"enum": ["a"]}, "maxItems": large}),
        json!({"type": "object", "minProperties": large}),
        json!({"type": "integer", "multipleOf": large}),
        json!({"type": "number", "multipleOf": 1e-9, "minimum": 0.1, "maximum": 1e300}),
        json!({"type": "integer", "minimum": large, "maximum": 0}),
        json!({"type": "array", "prefixItems": vec![json!({"type": "null"}); 500]}),
    ])
}

fn wrong(draw: &mut Draw) -> Value {
    let anything = draw.pick(&[json!(5), json!(null), json!([]), json!("x"), json!({"a": 1})]);
    let keys = [
        "type",
        "properties",
        "required",
        "items",
        "enum",
        "pattern",
        "minLength",
        "anyOf",
        "$ref",
        "$defs",
        "additionalProperties",
        "format",
        "const",
        "dependentSchemas",
        "$dynamicRef",
    ];
    let key = draw.pick(&keys);
    json!({"type": "object", key: anything})
}

/// A regular expression, sometimes invalid.
pub(crate) fn expression(draw: &mut Draw, depth: u32) -> String {
    if depth == 0 || draw.one_in(6) {
        let atoms = [
            "a", "[a-z]", ".", "\\d", "\\w", "\\p{L}", "[^x]", "日", "(?i:b)", "\\s", "[", "(?=a)",
            "\\1", "x{2,1}",
        ];
        return draw.pick(&atoms).into();
    }
    let inner = expression(draw, depth - 1);
    match draw.below(7) {
        0 => format!("({inner})*"),
        1 => format!("({inner})+"),
        2 => format!("({inner}){{1,{}}}", draw.size(2, 20_000)),
        3 => format!("({inner}|{})", expression(draw, depth - 1)),
        4 => format!("({inner}){}", expression(draw, depth - 1)),
        5 => inner.repeat(draw.size(1, 300)),
        _ => format!("(?:{inner})?"),
    }
}
