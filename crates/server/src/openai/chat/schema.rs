//! Prepares the schemas of clients for the grammar compiler.

use super::types::Tool;
use serde_json::{Map, Value, json};

/// Keywords that make parts of a schema depend on each other.
const ENTANGLED: [&str; 6] =
    ["allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"];

/// Adds `additionalProperties: false` to objects that list properties and do not say whether others
/// are allowed. Every value of the result also satisfies the original schema, and a small model
/// cannot invent properties without end. A schema whose parts depend on each other is unchanged.
pub(crate) fn closed(mut schema: Value) -> Value {
    if !entangled(&schema) {
        close(&mut schema);
    }
    schema
}

fn entangled(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => {
            let has = |key: &str| fields.contains_key(key);
            ENTANGLED.iter().any(|key| has(key))
                || has("properties") && (has("$ref") || has("anyOf") || has("oneOf"))
                || fields.values().any(entangled)
        }
        Value::Array(list) => list.iter().any(entangled),
        _ => false,
    }
}

fn close(schema: &mut Value) {
    each_schema(schema, &mut close);
    let Value::Object(fields) = schema else { return };
    let says = |key: &str| fields.contains_key(key);
    if says("properties") && !says("additionalProperties") && !says("patternProperties") {
        fields.insert("additionalProperties".into(), false.into());
    }
}

/// Visits the subschemas of a schema.
fn each_schema(schema: &mut Value, visit: &mut impl FnMut(&mut Value)) {
    let Value::Object(fields) = schema else { return };
    for (key, value) in fields {
        match (key.as_str(), value) {
            // Data, not schema.
            ("const" | "enum" | "default" | "examples" | "required", _) => {}
            // Maps from the user's names to schemas.
            (
                "properties" | "patternProperties" | "dependentSchemas" | "$defs" | "definitions",
                Value::Object(named),
            ) => named.values_mut().for_each(&mut *visit),
            (_, Value::Array(list)) => list.iter_mut().for_each(&mut *visit),
            (_, value) => visit(value),
        }
    }
}

/// The schema of a function's arguments.
pub(super) fn parameters(tool: &Tool) -> Value {
    match &tool.function.parameters {
        Some(schema) => closed(Value::Object(schema.clone())),
        None => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    }
}

/// The schema of a list of calls. Each tool's schema becomes a definition in the list's schema, and
/// its references to itself (`#/$defs/…`) are adjusted.
pub(super) fn call_list(tools: &[Tool], one: bool) -> Value {
    let (mut any, mut definitions) = (Vec::new(), Map::new());
    for (i, tool) in tools.iter().enumerate() {
        let mut schema = parameters(tool);
        move_references(&mut schema, &format!("#/$defs/{i}"));
        definitions.insert(i.to_string(), schema);
        any.push(json!({
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "parameters": {"$ref": format!("#/$defs/{i}")},
            },
            "required": ["name", "parameters"],
            "additionalProperties": false,
        }));
    }
    let items = json!({"anyOf": any});
    let mut list = json!({"type": "array", "minItems": 1, "items": items, "$defs": definitions});
    if one {
        list["maxItems"] = 1.into();
    }
    list
}

/// Rewrites every reference from the document root to start at `root`.
fn move_references(schema: &mut Value, root: &str) {
    each_schema(schema, &mut |part| move_references(part, root));
    if let Some(Value::String(path)) = schema.get_mut("$ref")
        && path.starts_with('#')
    {
        path.replace_range(..1, root);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_objects_are_closed_unless_parts_depend_on_each_other() {
        let open = json!({"type": "object", "properties": {
            "a": {"type": "array", "items": {"type": "object", "properties": {"b": {}}}},
            "properties": {"type": "object"},
            "c": {"properties": {}, "additionalProperties": true},
        }});
        let shut = closed(open.clone());
        assert_eq!(shut["additionalProperties"], false);
        assert_eq!(shut["properties"]["a"]["items"]["additionalProperties"], false);
        assert_eq!(shut["properties"]["c"]["additionalProperties"], true);
        assert!(shut["properties"]["properties"].get("additionalProperties").is_none());
        assert!(shut["properties"].get("additionalProperties").is_none());
        for entangled in [
            json!({"allOf": [open, {"properties": {"z": {}}}]}),
            json!({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}),
            json!({"properties": {"a": {}}, "$ref": "#/$defs/more", "$defs": {"more": open}}),
        ] {
            assert_eq!(closed(entangled.clone()), entangled);
        }
    }

    #[test]
    fn references_in_tools_are_moved_into_the_list() {
        let tool = |name: &str, schema: Value| Tool {
            kind: "function".into(),
            function: crate::openai::chat::types::Function {
                name: name.into(),
                description: None,
                parameters: schema.as_object().cloned(),
                strict: None,
            },
        };
        let inner = json!({
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/Place"}, "$ref": {"const": {"$ref": "#"}}},
            "$defs": {"Place": {"type": "string"}},
        });
        let list = call_list(&[tool("f", Value::Null), tool("g", inner)], true);
        let schema = &list["$defs"]["1"];
        assert_eq!(schema["properties"]["p"]["$ref"], "#/$defs/1/$defs/Place");
        assert_eq!(schema["properties"]["$ref"]["const"]["$ref"], "#");
        let place = list.pointer("/$defs/1/$defs/Place");
        assert_eq!(place, Some(&json!({"type": "string"})));
        assert_eq!(list["items"]["anyOf"][1]["properties"]["parameters"]["$ref"], "#/$defs/1");
        assert_eq!(list["maxItems"], 1);
    }
}
