//! Rewrites schemas into what llguidance enforces, and names what cannot be enforced.
//!
//! Every value of the result satisfies the original schema. The walk visits subschemas only: data
//! (`const`, `enum`, `default`, `examples`) is unchanged.

use serde_json::{Map, Value, json};
use std::cell::Cell;

/// Formats that say what a string is for and do not restrict it.
const NOTES: [&str; 14] = [
    "binary",
    "directory-path",
    "double",
    "file-path",
    "float",
    "int32",
    "int64",
    "json-string",
    "multi-line",
    "new-path",
    "path",
    "password",
    "uint32",
    "uint64",
];

const BASE64: &str = "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$";
const BASE64_URL: &str = "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}(?:==)?|[A-Za-z0-9_-]{3}=?)?$";

/// Patterns with look-ahead that pydantic writes, and what they mean. The first is a decimal number
/// with at least one digit.
const PATTERNS: [(&str, &str); 1] =
    [(r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?(?:\d+\.?\d*|\.\d+)$")];

/// The schema in other words; an error names the first keyword that cannot be enforced.
pub(crate) fn rewrite(mut root: Value) -> Result<Value, String> {
    let whole = root.clone();
    schema(&mut root, &Whole { root: &whole, left: Cell::new(WORK) }, "")?;
    Ok(root)
}

/// The most values that are compared or listed for one schema.
const WORK: usize = 1 << 20;

/// The original schema, and how much work may still be done for it. A schema of 256 KiB could
/// otherwise ask for billions of comparisons.
struct Whole<'a> {
    root: &'a Value,
    left: Cell<usize>,
}

impl Whole<'_> {
    /// Whether `cost` more may be spent.
    fn spend(&self, cost: usize) -> bool {
        let left = self.left.get().checked_sub(cost);
        self.left.set(left.unwrap_or(0));
        left.is_some()
    }
}

fn schema(part: &mut Value, root: &Whole<'_>, path: &str) -> Result<(), String> {
    let Value::Object(fields) = part else { return Ok(()) };
    negation(fields, root, path)?;
    unique(fields, root, path)?;
    for word in ["if", "then", "else"] {
        // `then` and `else` without `if` have no meaning, and `if` alone has no effect.
        let conditional = fields.contains_key("if")
            && (fields.contains_key("then") || fields.contains_key("else"));
        if conditional && fields.contains_key(word) {
            return Err(cannot("if", path, "write the cases as anyOf"));
        }
        fields.remove(word);
    }
    format(fields);
    if let Some(Value::String(pattern)) = fields.get_mut("pattern")
        && let Some((_, plain)) = PATTERNS.iter().find(|(known, _)| known == pattern)
    {
        *pattern = (*plain).into();
    }
    if fields.get("oneOf").and_then(Value::as_array).is_some_and(|list| apart(list, root))
        && !fields.contains_key("anyOf")
        && let Some(options) = fields.remove("oneOf")
    {
        fields.insert("anyOf".into(), options);
    }
    for (key, value) in fields {
        let path = format!("{path}/{key}");
        match (key.as_str(), value) {
            ("const" | "enum" | "default" | "examples" | "required", _) => {}
            (
                "properties" | "patternProperties" | "dependentSchemas" | "$defs" | "definitions",
                Value::Object(named),
            ) => {
                for (name, part) in named {
                    schema(part, root, &format!("{path}/{name}"))?;
                }
            }
            (_, Value::Array(list)) => {
                for (i, part) in list.iter_mut().enumerate() {
                    schema(part, root, &format!("{path}/{i}"))?;
                }
            }
            (_, value) => schema(value, root, &path)?,
        }
    }
    Ok(())
}

fn cannot(keyword: &str, path: &str, instead: &str) -> String {
    let place = if path.is_empty() { "the schema".into() } else { format!("the schema at {path}") };
    format!("{keyword} in {place} cannot be enforced; {instead}")
}

/// `not`: of everything it is nothing; of values it removes them from an `enum`; of types it
/// leaves the others.
fn negation(fields: &mut Map<String, Value>, whole: &Whole<'_>, path: &str) -> Result<(), String> {
    let Some(not) = fields.remove("not") else { return Ok(()) };
    let inner = match &not {
        Value::Bool(true) => {
            *fields = nothing();
            return Ok(());
        }
        Value::Bool(false) => return Ok(()),
        Value::Object(inner) => inner,
        _ => return Err("not must be a schema".into()),
    };
    if inner.is_empty() {
        *fields = nothing();
        return Ok(());
    }
    let only = |key: &str| inner.len() == 1 && inner.contains_key(key);
    let list = |value: &Value| match value {
        Value::Array(list) => list.clone(),
        one => vec![one.clone()],
    };
    if only("const") || only("enum") {
        let removed: Vec<Value> = match inner.get("const") {
            Some(value) => vec![value.clone()],
            None => list(&inner["enum"]),
        };
        if let Some(Value::Array(values)) = fields.get_mut("enum") {
            if !whole.spend(values.len().saturating_mul(removed.len())) {
                return Err(cannot("not", path, "list fewer values"));
            }
            values.retain(|value| !removed.contains(value));
            return Ok(());
        }
        if let Some(value) = fields.get("const") {
            if removed.contains(value) {
                *fields = nothing();
            }
            return Ok(());
        }
    }
    if only("type") {
        let removed = list(&inner["type"]);
        let all = ["null", "boolean", "object", "array", "number", "string"];
        let all: Vec<Value> = all.iter().map(|word| json!(word)).collect();
        let types = fields.get("type").map_or(all, &list);
        // An integer is a number.
        let gone = |word: &Value| {
            removed.contains(word) || word == "integer" && removed.contains(&json!("number"))
        };
        let split = types.contains(&json!("number")) && removed.contains(&json!("integer"));
        let left: Vec<Value> = types.into_iter().filter(|word| !gone(word)).collect();
        if !split {
            fields.insert("type".into(), left.into());
            return Ok(());
        }
    }
    Err(cannot("not", path, "list the allowed values with enum, or the allowed types"))
}

/// A schema that no value satisfies, as llguidance knows it.
fn nothing() -> Map<String, Value> {
    let mut fields = Map::new();
    fields.insert("enum".into(), json!([]));
    fields
}

/// `uniqueItems` of arrays that have one item at most holds anyway. Items of a few values are
/// listed in every order.
fn unique(fields: &mut Map<String, Value>, whole: &Whole<'_>, path: &str) -> Result<(), String> {
    match fields.get("uniqueItems") {
        None => return Ok(()),
        Some(Value::Bool(true)) => {}
        Some(_) => {
            fields.remove("uniqueItems");
            return Ok(());
        }
    }
    let most = fields.get("maxItems").and_then(Value::as_u64);
    let no_array = fields.get("type").and_then(words).is_some_and(|list| !list.contains(&"array"));
    if no_array || most.is_some_and(|most| most <= 1) {
        fields.remove("uniqueItems");
        return Ok(());
    }
    let values = fields.get("items").and_then(few_values);
    let beside = ["prefixItems", "enum", "const"].iter().any(|key| fields.contains_key(*key));
    let Some(values) = values.filter(|_| !beside && whole.spend(ORDERS)) else {
        let instead = "remove it, or list the possible items with enum (at most 4)";
        return Err(cannot("uniqueItems", path, instead));
    };
    let least = fields.get("minItems").and_then(Value::as_u64).unwrap_or(0) as usize;
    let most = most.map_or(values.len(), |most| values.len().min(most as usize));
    let mut orders = Vec::new();
    arrange(&values, &mut Vec::new(), most, &mut orders);
    orders.retain(|order| order.len() >= least);
    for key in ["uniqueItems", "items", "minItems", "maxItems", "type"] {
        fields.remove(key);
    }
    fields.insert("enum".into(), orders.into_iter().map(Value::Array).collect());
    Ok(())
}

/// What listing the orders of four values costs: 65 lists of up to four values, with their copies.
const ORDERS: usize = 1024;

/// The values of a schema that has at most four. Equal numbers may be written in several ways, so
/// only integers are compared.
fn few_values(items: &Value) -> Option<Vec<Value>> {
    let values = match items.get("enum") {
        Some(Value::Array(values)) => values.clone(),
        _ if items.get("const").is_some() => vec![items["const"].clone()],
        _ if items.get("type") == Some(&json!("boolean")) => vec![json!(false), json!(true)],
        _ => return None,
    };
    let exact = |value: &Value| !value.is_f64() && !value.is_array() && !value.is_object();
    (values.len() <= 4 && values.iter().all(exact)).then_some(values)
}

/// All lists of different values, up to a length.
fn arrange(values: &[Value], begun: &mut Vec<Value>, most: usize, out: &mut Vec<Vec<Value>>) {
    out.push(begun.clone());
    if begun.len() == most {
        return;
    }
    for value in values {
        if !begun.contains(value) {
            begun.push(value.clone());
            arrange(values, begun, most, out);
            begun.pop();
        }
    }
}

/// Removes formats that do not restrict a value; writes those of base64 as patterns.
fn format(fields: &mut Map<String, Value>) {
    let Some(name) = fields.get("format").and_then(Value::as_str) else { return };
    let pattern = match name {
        "byte" | "base64" => Some(BASE64),
        "base64url" => Some(BASE64_URL),
        name if NOTES.contains(&name) => None,
        _ => return,
    };
    fields.remove("format");
    if let Some(pattern) = pattern
        && !fields.contains_key("pattern")
    {
        fields.insert("pattern".into(), pattern.into());
    }
}

/// Whether no value satisfies two of these schemas; false if that is not known.
fn apart(options: &[Value], whole: &Whole<'_>) -> bool {
    let options: Vec<&Value> = options.iter().map(|option| resolve(option, whole.root)).collect();
    let later = |i: usize| options[i + 1..].iter();
    options.iter().enumerate().all(|(i, one)| later(i).all(|other| disjoint(one, other, whole)))
}

/// Follows references, a bounded number of times.
fn resolve<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut at = schema;
    for _ in 0..16 {
        let Some(target) = at.get("$ref").and_then(Value::as_str) else { break };
        match target.strip_prefix('#').and_then(|path| root.pointer(path)) {
            Some(found) => at = found,
            None => break,
        }
    }
    at
}

fn disjoint(one: &Value, other: &Value, whole: &Whole<'_>) -> bool {
    if !whole.spend(16) {
        return false;
    }
    if let (Some(a), Some(b)) = (values(one), values(other)) {
        return none_shared(a, b, whole);
    }
    if let (Some(a), Some(b)) = (types(one), types(other)) {
        let same = |a: &str, b: &str| {
            a == b || matches!((a, b), ("integer", "number") | ("number", "integer"))
        };
        if !a.iter().any(|a| b.iter().any(|b| same(a, b))) {
            return true;
        }
        // Only objects can be told apart by their properties.
        if a != ["object"] || b != ["object"] {
            return false;
        }
    } else {
        return false;
    }
    let required = |schema: &'_ Value, name: &str| {
        let list = schema.get("required").and_then(Value::as_array);
        list.is_some_and(|list| whole.spend(list.len()) && list.iter().any(|one| one == name))
    };
    let Some(properties) = one.get("properties").and_then(Value::as_object) else { return false };
    if !whole.spend(properties.len()) {
        return false;
    }
    properties.iter().any(|(name, ours)| {
        let theirs = other.get("properties").and_then(|all| all.get(name));
        let ours = values(resolve(ours, whole.root));
        let theirs = theirs.and_then(|theirs| values(resolve(theirs, whole.root)));
        match (ours, theirs) {
            (Some(a), Some(b)) => {
                required(one, name) && required(other, name) && none_shared(a, b, whole)
            }
            _ => false,
        }
    })
}

/// Whether two lists have no common value; false if the lists are too long to compare.
fn none_shared(a: &[Value], b: &[Value], whole: &Whole<'_>) -> bool {
    whole.spend(a.len().saturating_mul(b.len())) && !a.iter().any(|value| b.contains(value))
}

/// The values of a schema that lists them.
fn values(schema: &Value) -> Option<&[Value]> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(std::slice::from_ref(value)),
        (None, Some(Value::Array(list))) => Some(list),
        _ => None,
    }
}

fn types(schema: &Value) -> Option<Vec<&str>> {
    words(schema.get("type")?)
}

fn words(types: &Value) -> Option<Vec<&str>> {
    match types {
        Value::String(word) => Some(vec![word]),
        Value::Array(list) => list.iter().map(Value::as_str).collect(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_that_exclude_each_other_are_any_of() {
        let pet = |kind: &str| {
            json!({
                "type": "object",
                "properties": {"kind": {"const": kind, "type": "string"}},
                "required": ["kind"],
            })
        };
        let union = json!({
            "$defs": {"Cat": pet("cat"), "Dog": pet("dog")},
            "discriminator": {"propertyName": "kind"},
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        });
        let made = rewrite(union.clone()).unwrap();
        assert_eq!(made["anyOf"], union["oneOf"]);
        assert!(made.get("oneOf").is_none());
        let types = json!({"oneOf": [{"type": "string"}, {"type": "null"}]});
        assert!(rewrite(types).unwrap().get("anyOf").is_some());
        for overlapping in [
            json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
            json!({"oneOf": [pet("cat"), {"type": "object"}]}),
            json!({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}),
        ] {
            assert_eq!(rewrite(overlapping.clone()).unwrap(), overlapping);
        }
    }

    #[test]
    fn formats_and_patterns() {
        let path = json!({"type": "string", "format": "path"});
        assert_eq!(rewrite(path).unwrap(), json!({"type": "string"}));
        let byte = rewrite(json!({"type": "string", "format": "byte"})).unwrap();
        assert_eq!(byte["pattern"], BASE64);
        let uuid = json!({"type": "string", "format": "uuid"});
        assert_eq!(rewrite(uuid.clone()).unwrap(), uuid);
        let decimal = json!({"pattern": PATTERNS[0].0, "default": {"format": "path"}});
        let made = rewrite(decimal).unwrap();
        assert_eq!(made["pattern"], PATTERNS[0].1);
        assert_eq!(made["default"]["format"], "path");
        let named = json!({"properties": {"format": {"type": "string"}, "not": {"type": "null"}}});
        assert_eq!(rewrite(named.clone()).unwrap(), named);
    }

    #[test]
    fn negations_and_sets() {
        let never = rewrite(json!({"not": {}})).unwrap();
        assert_eq!(never, json!({"enum": []}));
        let some = rewrite(json!({"enum": [1, 2, 3], "not": {"const": 2}})).unwrap();
        assert_eq!(some, json!({"enum": [1, 3]}));
        let typed = rewrite(json!({"type": ["string", "null"], "not": {"type": "null"}})).unwrap();
        assert_eq!(typed, json!({"type": ["string"]}));
        let set = json!({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": true});
        let made = rewrite(set).unwrap();
        assert_eq!(made["enum"], json!([[], ["a"], ["a", "b"], ["b"], ["b", "a"]]));
        let one = json!({"type": "array", "maxItems": 1, "uniqueItems": true});
        assert!(rewrite(one).unwrap().get("uniqueItems").is_none());
        let text = json!({"type": "string", "items": {"enum": ["a"]}, "uniqueItems": true});
        assert_eq!(rewrite(text).unwrap()["type"], "string");
    }

    /// Work that grows with the square of the schema, or more, ends early.
    #[test]
    fn large_schemas_are_rewritten_quickly() {
        let many: Vec<Value> = (0..20_000).map(Value::from).collect();
        let names: Vec<String> = (0..2000).map(|i| format!("p{i}")).collect();
        let properties: Map<String, Value> =
            names.iter().map(|name| (name.clone(), json!({"enum": [1, 2]}))).collect();
        let object = json!({"type": "object", "properties": properties, "required": names});
        let option = json!({"$ref": "#/$defs/object"});
        let set = json!({"type": "array", "items": {"enum": [1, 2, 3, 4]}, "uniqueItems": true});
        let began = std::time::Instant::now();
        for (schema, enforced) in [
            (json!({"enum": many, "not": {"enum": many}}), false),
            (json!({"oneOf": [{"enum": many}, {"enum": many}]}), true),
            (json!({"$defs": {"object": object}, "oneOf": vec![option; 60]}), true),
            (json!({"prefixItems": vec![set; 4000]}), false),
        ] {
            assert_eq!(rewrite(schema).is_ok(), enforced);
        }
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }

    #[test]
    fn what_cannot_be_enforced_is_named_with_its_place() {
        for (schema, keyword) in [
            (
                json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true}),
                "uniqueItems",
            ),
            (json!({"type": "string", "not": {"const": "x"}}), "not"),
            (json!({"not": {"required": ["a"]}}), "not"),
            (json!({"if": {"required": ["a"]}, "then": {"required": ["b"]}}), "if"),
        ] {
            let inside = json!({"type": "object", "properties": {"p": schema}});
            let error = rewrite(inside).unwrap_err();
            assert!(
                error.starts_with(&format!("{keyword} in the schema at /properties/p ")),
                "{error}"
            );
        }
        let bare = rewrite(json!({"if": {"required": ["a"]}})).unwrap();
        assert_eq!(bare, json!({}));
    }
}
