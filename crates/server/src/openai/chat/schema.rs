//! What a client's schema becomes before the engine makes a grammar of it.

use super::types::Tool;
use serde_json::{Map, Value, json};

/// Words that make the parts of a schema depend on each other.
const ENTANGLED: [&str; 6] =
    ["allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"];

/// The same schema, with objects closed that name their properties and do not say whether there may
/// be others: whatever satisfies it satisfies the original, and a small model cannot go on inventing
/// properties for ever. A schema whose parts depend on each other stays as it is.
pub(super) fn closed(mut schema: Value) -> Value {
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

/// Visits the schemas that a schema is made of.
fn each_schema(schema: &mut Value, visit: &mut impl FnMut(&mut Value)) {
    let Value::Object(fields) = schema else { return };
    for (key, value) in fields {
        match (key.as_str(), value) {
            // Data, not schema.
            ("const" | "enum" | "default" | "examples" | "required", _) => {}
            // Names of the user's own, each with a schema.
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

/// The schema of a list of calls. A tool's own schema may point into itself (`#/$defs/…`): it becomes
/// a definition of the list's, and its pointers are moved along.
pub(super) fn call_list(tools: &[Tool], one: bool) -> Value {
    let (mut any, mut definitions) = (Vec::new(), Map::new());
    for (i, tool) in tools.iter().enumerate() {
        let mut schema = parameters(tool);
        move_pointers(&mut schema, &format!("#/$defs/{i}"));
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

/// Makes every pointer from the root one from `root`.
fn move_pointers(schema: &mut Value, root: &str) {
    each_schema(schema, &mut |part| move_pointers(part, root));
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
    fn pointers_of_tools_lead_into_the_list() {
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
