//! Size checks for JSON schemas, with references followed.
//!
//! The walk visits what llguidance would compile, in the same order: each schema once, the target
//! of a reference at its first use. It stops at the first exceeded limit, so its cost is bounded by
//! the limits and not by the schema.

use crate::bounds::{Limits, TooLarge, at_most};
use crate::regex;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Refuses a schema that exceeds the limits.
pub(crate) fn check(root: &Value, limits: &Limits) -> Result<(), TooLarge> {
    let counts = [0; 4];
    let mut walk = Walk { root, limits, counts, known: HashMap::new(), combined: 0 };
    walk.schema(root, 1)?;
    // Merging objects compares all their patterns for each combination of alternatives.
    let patterns = walk.counts[Count::Patterns as usize];
    if patterns > 1 && walk.combined.saturating_mul(patterns) > limits.alternatives {
        let allowed = limits.alternatives / patterns;
        return Err(TooLarge { what: "alternatives beside patternProperties", allowed });
    }
    Ok(())
}

/// Quantities counted over the whole schema.
#[derive(Clone, Copy)]
enum Count {
    Schemas,
    Patterns,
    RegexBytes,
    Disjoint,
}

impl Count {
    fn limit(self, limits: &Limits) -> (&'static str, u64) {
        match self {
            Count::Schemas => ("schemas and enum values", limits.schemas),
            Count::Patterns => ("patternProperties", limits.patterns),
            Count::RegexBytes => ("bytes of regular expressions", limits.regex_bytes),
            Count::Disjoint => ("comparisons of oneOf alternatives", limits.comparisons),
        }
    }
}

/// The size of a schema when it is merged with others.
#[derive(Clone, Copy)]
struct Shape {
    /// Alternatives at its top level.
    alternatives: u64,
    /// Schemas in it, including those of inlined references.
    size: u64,
}

const ONE: Shape = Shape { alternatives: 1, size: 1 };

struct Walk<'a> {
    root: &'a Value,
    limits: &'a Limits,
    counts: [u64; 4],
    /// The shapes of followed references; one in progress counts as one schema.
    known: HashMap<&'a str, Shape>,
    /// The most alternatives combined at one point.
    combined: u64,
}

impl<'a> Walk<'a> {
    fn add(&mut self, count: Count, more: u64) -> Result<(), TooLarge> {
        let total = &mut self.counts[count as usize];
        *total = total.saturating_add(more);
        let (what, allowed) = count.limit(self.limits);
        at_most(what, *total, allowed)
    }

    fn schema(&mut self, schema: &'a Value, depth: u64) -> Result<Shape, TooLarge> {
        at_most("levels of nested schemas and references", depth, self.limits.depth)?;
        self.add(Count::Schemas, 1)?;
        let Some(map) = schema.as_object() else { return Ok(ONE) };
        let size = self.parts(map, depth)?;
        self.applicators(map, depth, size)
    }

    /// Walks everything in a schema except alternatives and references; returns the number of
    /// schemas.
    fn parts(&mut self, map: &'a Map<String, Value>, depth: u64) -> Result<u64, TooLarge> {
        let mut size = 1u64;
        for key in ["items", "additionalItems", "additionalProperties"] {
            if let Some(value) = map.get(key) {
                for schema in each(value) {
                    size = size.saturating_add(self.schema(schema, depth + 1)?.size);
                }
            }
        }
        for schema in map.get("prefixItems").map_or(&[][..], each) {
            size = size.saturating_add(self.schema(schema, depth + 1)?.size);
        }
        let named = |key| map.get(key).and_then(Value::as_object);
        let required = map.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        let properties = named("properties").map_or(0, Map::len).max(required) as u64;
        at_most("properties in one object", properties, self.limits.properties)?;
        self.add(Count::Schemas, required as u64)?;
        for schema in named("properties").into_iter().flat_map(Map::values) {
            size = size.saturating_add(self.schema(schema, depth + 1)?.size);
        }
        for (pattern, schema) in named("patternProperties").into_iter().flatten() {
            self.add(Count::Patterns, 1)?;
            self.regex(pattern)?;
            size = size.saturating_add(self.schema(schema, depth + 1)?.size);
        }
        if let Some(pattern) = map.get("pattern").and_then(Value::as_str) {
            self.regex(pattern)?;
        }
        if let Some(of) = map.get("multipleOf").and_then(Value::as_f64) {
            at_most("as the value of multipleOf", of as u64, self.limits.multiple_of)?;
        }
        Ok(size)
    }

    /// Walks alternatives and references; returns the shape of their conjunction.
    fn applicators(
        &mut self,
        map: &'a Map<String, Value>,
        depth: u64,
        size: u64,
    ) -> Result<Shape, TooLarge> {
        let mut whole = Shape { alternatives: 1, size };
        // Keywords beside a reference make llguidance copy its target.
        let inlined = map.len() > 1;
        for (key, value) in map {
            let part = match key.as_str() {
                "anyOf" | "oneOf" => {
                    let mut sum = Shape { alternatives: 0, size: 1 };
                    for schema in each(value) {
                        let one = self.schema(schema, depth + 1)?;
                        sum.alternatives = sum.alternatives.saturating_add(one.alternatives);
                        sum.size = sum.size.saturating_add(one.size);
                    }
                    let most = self.limits.alternatives;
                    at_most("alternatives at one point", sum.alternatives, most)?;
                    if key == "oneOf" {
                        self.compare(each(value), sum.alternatives)?;
                    }
                    sum
                }
                "enum" | "const" => {
                    let values =
                        if key == "enum" { each(value) } else { std::slice::from_ref(value) };
                    let size = values.iter().map(nodes).sum();
                    self.add(Count::Schemas, size)?;
                    Shape { alternatives: values.len() as u64, size }
                }
                "allOf" => {
                    let mut product = ONE;
                    for schema in each(value) {
                        let one = self.schema(schema, depth + 1)?;
                        product = self.combine(product, one)?;
                    }
                    product
                }
                "$ref" => match value.as_str() {
                    Some(target) => {
                        let shape = self.reference(target, depth)?;
                        if inlined { shape } else { Shape { size: 1, ..shape } }
                    }
                    None => ONE,
                },
                _ => continue,
            };
            whole = self.combine(whole, part)?;
        }
        Ok(whole)
    }

    /// The conjunction of two shapes: each alternative of one with each of the other.
    fn combine(&mut self, a: Shape, b: Shape) -> Result<Shape, TooLarge> {
        let alternatives = a.alternatives.max(1).saturating_mul(b.alternatives.max(1));
        let most = self.limits.alternatives;
        if a.alternatives > 1 && b.alternatives > 1 {
            self.combined = self.combined.max(alternatives);
            at_most("combined alternatives", alternatives, most)?;
        }
        // One side is copied for each alternative of the other.
        let (ours, theirs) = (a.size.saturating_mul(b.alternatives.max(1)), b.size);
        let size = ours.saturating_add(theirs.saturating_mul(a.alternatives.max(1)));
        let size = if a.alternatives.max(b.alternatives) > 1 { size } else { a.size + b.size };
        at_most("schemas after merging alternatives", size, self.limits.merged)?;
        Ok(Shape { alternatives, size })
    }

    fn reference(&mut self, target: &'a str, depth: u64) -> Result<Shape, TooLarge> {
        if let Some(&shape) = self.known.get(target) {
            return Ok(shape);
        }
        self.known.insert(target, ONE);
        let Some(schema) = resolve(self.root, target) else {
            // The compiler reports the unresolved reference.
            return Ok(ONE);
        };
        let shape = self.schema(schema, depth + 1)?;
        self.known.insert(target, shape);
        Ok(shape)
    }

    /// Counts the pairwise comparisons of `oneOf` alternatives; objects are compared by their
    /// required properties.
    fn compare(&mut self, options: &'a [Value], alternatives: u64) -> Result<(), TooLarge> {
        let required = |option: &Value| {
            option.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64
        };
        let most = options.iter().map(required).max().unwrap_or(0);
        let pairs = alternatives.saturating_mul(alternatives) / 2;
        self.add(Count::Disjoint, pairs.saturating_mul(1 + 2 * most))
    }

    fn regex(&mut self, pattern: &str) -> Result<(), TooLarge> {
        self.add(Count::RegexBytes, pattern.len() as u64)?;
        regex::check(pattern, self.limits)
    }
}

/// The schemas of an array, or the single schema in its place.
fn each(value: &Value) -> &[Value] {
    value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice)
}

/// The number of values in a value, including itself. The recursion is bounded: JSON text is at
/// most 128 levels deep.
fn nodes(value: &Value) -> u64 {
    match value {
        Value::Array(values) => 1 + values.iter().map(nodes).sum::<u64>(),
        Value::Object(map) => 1 + map.values().map(nodes).sum::<u64>(),
        _ => 1,
    }
}

/// Resolves a reference like llguidance: within the document, without escapes.
fn resolve<'a>(root: &'a Value, target: &str) -> Option<&'a Value> {
    if target == "#" || target == "#/" {
        return Some(root);
    }
    let mut at = root;
    for segment in target.strip_prefix("#/")?.split('/') {
        at = match at {
            Value::Array(values) => values.get(segment.parse::<usize>().ok()?)?,
            other => other.get(segment)?,
        };
    }
    Some(at)
}
