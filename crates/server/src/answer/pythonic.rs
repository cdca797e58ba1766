//! Parses calls in Python syntax with literal arguments: `[f(a=1, b="x"), g()]`.

use super::tools::ToolCall;
use serde_json::{Map, Number, Value};

/// The deepest nesting of arguments; bounds the recursion.
const DEPTH: usize = 64;

/// The calls, or `None` if the text is anything else.
pub(super) fn parse(text: &str) -> Option<Vec<ToolCall>> {
    let mut p = Parser { rest: text };
    p.word("[")?;
    let calls = p.list("]", |p| {
        let name = p.name()?;
        p.word("(")?;
        let arguments = p.list(")", |p| {
            let key = p.name()?;
            p.word("=")?;
            Some((key, p.value(0)?))
        })?;
        let arguments: Map<String, Value> = arguments.into_iter().collect();
        Some((name, Value::Object(arguments).to_string()))
    })?;
    p.rest.trim().is_empty().then_some(calls)
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn word(&mut self, word: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(word)?;
        Some(())
    }

    fn name(&mut self) -> Option<String> {
        let text = self.rest.trim_start();
        let ok = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | '-');
        let end = text.find(|c| !ok(c)).unwrap_or(text.len());
        let starts = text.starts_with(|c: char| c.is_alphabetic() || c == '_');
        self.rest = &text[end..];
        starts.then(|| text[..end].to_string())
    }

    /// Items separated by commas, up to `close`.
    fn list<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        let mut items = Vec::new();
        loop {
            if self.word(close).is_some() {
                return Some(items);
            }
            items.push(item(self)?);
            if self.word(",").is_none() {
                self.word(close)?;
                return Some(items);
            }
        }
    }

    fn value(&mut self, depth: usize) -> Option<Value> {
        if depth > DEPTH {
            return None;
        }
        let text = self.rest.trim_start();
        match text.chars().next()? {
            quote @ ('"' | '\'') => self.string(quote).map(Value::String),
            '[' => {
                self.word("[")?;
                Some(Value::Array(self.list("]", |p| p.value(depth + 1))?))
            }
            '{' => {
                self.word("{")?;
                let pairs = self.list("}", |p| {
                    let quote = p.rest.trim_start().chars().next()?;
                    let key = matches!(quote, '"' | '\'').then(|| p.string(quote))??;
                    p.word(":")?;
                    Some((key, p.value(depth + 1)?))
                })?;
                Some(Value::Object(pairs.into_iter().collect()))
            }
            c if c.is_ascii_digit() || matches!(c, '-' | '+' | '.') => self.number(),
            _ => {
                let word = self.name()?;
                match word.as_str() {
                    "True" | "true" => Some(Value::Bool(true)),
                    "False" | "false" => Some(Value::Bool(false)),
                    "None" | "null" => Some(Value::Null),
                    _ => None,
                }
            }
        }
    }

    fn number(&mut self) -> Option<Value> {
        let text = self.rest.trim_start();
        let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+' | '_');
        let end = text.find(|c| !ok(c)).unwrap_or(text.len());
        let digits = text[..end].replace('_', "");
        self.rest = &text[end..];
        if let Ok(whole) = digits.parse::<i64>() {
            return Some(whole.into());
        }
        Number::from_f64(digits.parse().ok()?).map(Value::Number)
    }

    fn string(&mut self, quote: char) -> Option<String> {
        let text = self.rest.trim_start();
        let mut out = String::new();
        let mut chars = text.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => match chars.next()?.1 {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    'u' => {
                        let hex: String =
                            (0..4).filter_map(|_| chars.next()).map(|(_, c)| c).collect();
                        out.push(char::from_u32(u32::from_str_radix(&hex, 16).ok()?)?);
                    }
                    other => out.push(other),
                },
                c if c == quote => {
                    self.rest = &text[at + c.len_utf8()..];
                    return Some(out);
                }
                c => out.push(c),
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn literals() {
        let text = r#"[f(s="a\"b\n日", t='it''s'), x()]"#;
        assert_eq!(parse(text), None);
        let text = r#" [f(s="a\"b\n日", n=-1, x=2.5, l=[1, None,], d={"k": True}), ns.g()] "#;
        let calls = parse(text).unwrap();
        assert_eq!(calls[0].1, r#"{"s":"a\"b\n日","n":-1,"x":2.5,"l":[1,null],"d":{"k":true}}"#);
        assert_eq!(calls[1], ("ns.g".into(), "{}".into()));
        for bad in ["", "[", "[f(", "[f(1)]", "[f(a=b)]", "[f(a=1)] x", "f(a=1)", "[f(a='x]"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        assert_eq!(parse(&format!("[f(a={})]", "[".repeat(100_000))), None);
    }
}
