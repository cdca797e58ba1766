//! Templates and messages made to hurt: each is refused with one line, in little time, and all of
//! them together within a quarter of a gigabyte. Alone in its process, so that memory can be told.

mod measure;

use formats::chat::ChatTemplate;
use formats::tokenizer::Escaper;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What the slowest takes is about a second; the machine may be busy.
const TIME: Duration = Duration::from_secs(30);
const MEGABYTES: u64 = 256;

/// `part` so many times, in lines of a length that the parser can count.
fn repeat(part: &str, times: usize) -> String {
    let line = part.repeat(100) + "\n";
    line.repeat(times / 100) + &part.repeat(times % 100)
}

/// Templates that the parser must not be given, or that must not run to their end.
fn sources() -> Vec<(&'static str, String)> {
    let mut all: Vec<(&str, String)> = vec![
        // The stack of the parser, and of whatever drops what it made.
        ("not", format!("{{{{ {}x }}}}", repeat("not ", 100_000))),
        ("elif", format!("{{% if a %}}{}{{% endif %}}", repeat("{% elif a %}", 50_000))),
        ("attributes", format!("{{{{ x{} }}}}", repeat(".x", 100_000))),
        ("filters", format!("{{{{ x{} }}}}", repeat("|string", 50_000))),
        ("tests", format!("{{{{ x{} }}}}", repeat(" is defined", 50_000))),
        ("items", format!("{{{{ x{} }}}}", repeat("[0]", 50_000))),
        ("calls", format!("{{{{ x{} }}}}", repeat("()", 50_000))),
        ("minus", format!("{{{{ {}1 }}}}", repeat("-", 100_000))),
        ("spaced minus", format!("{{{{ {}1 }}}}", repeat("- ", 100_000))),
        ("brackets", format!("{{{{ {}1{} }}}}", repeat("(", 50_000), repeat(")", 50_000))),
        ("lists", format!("{{{{ {}1{} }}}}", repeat("[", 50_000), repeat("]", 50_000))),
        ("maps", format!("{{{{ {}1{} }}}}", repeat("{1:", 50_000), repeat("}", 50_000))),
        ("sum", format!("{{{{ 1{} }}}}", repeat("+1", 50_000))),
        ("concat", format!("{{{{ 1{} }}}}", repeat("~1", 50_000))),
        ("power", format!("{{{{ 1{} }}}}", repeat("**1", 50_000))),
        ("or", format!("{{{{ x{} }}}}", repeat(" or x", 50_000))),
        ("compare", format!("{{{{ 1{} }}}}", repeat(" < 1", 50_000))),
        ("if else", format!("{{{{ 1{} }}}}", repeat(" if x else 1", 50_000))),
        ("if", format!("{{{{ 1{} }}}}", repeat(" if x", 50_000))),
        ("targets", format!("{{% set {}a{} = 1 %}}", repeat("(", 50_000), repeat(")", 50_000))),
        ("fields", format!("{{% set a{} = 1 %}}", repeat(".a", 50_000))),
        ("set filters", format!("{{% set a{} %}}{{% endset %}}", repeat("|string", 50_000))),
        (
            "filter blocks",
            format!("{{% filter upper{} %}}{{% endfilter %}}", repeat("|upper", 50_000)),
        ),
        ("blocks of if", repeat("{% if x %}", 50_000)),
        ("blocks of for", repeat("{% for x in y %}", 50_000)),
        ("blocks of macro", repeat("{% macro m() %}", 50_000)),
        ("slices", format!("{{{{ x{} }}}}", repeat("[1:2]", 50_000))),
        ("a chain within limits", format!("{{{{ 1{} }}}}", repeat("~1", 4_000))),
        ("bytes", repeat("x", 2 << 20)),
        ("a long line", "x".repeat(1 << 17)),
        ("many lines", "\n".repeat(1 << 17)),
        ("a long number", format!("{{{{ {} }}}}", "9".repeat(50_000))),
        ("comments", repeat("{#", 100_000)),
        ("unclosed", repeat("{{", 100_000)),
        ("raw", repeat("{% raw %}", 100_000)),
    ];
    let doubling = |step: &str| {
        format!("{{% set s = 'xxxxxxxxxxxxxxxx' %}}{}{{{{ s|length }}}}", repeat(step, 40))
    };
    all.extend([
        // Memory without loops.
        ("doubling by ~", doubling("{% set s = s ~ s %}")),
        ("doubling by +", doubling("{% set s = s + s %}")),
        ("doubling by *", doubling("{% set s = s * 2 %}")),
        ("doubling by replace", doubling("{% set s = s|replace('x', 'xx') %}")),
        ("doubling by a method", doubling("{% set s = s.replace('x', 'xx') %}")),
        ("doubling by join", doubling("{% set s = [s, s]|join %}")),
        ("doubling by join method", doubling("{% set s = s.join(['', '', '']) %}")),
        ("doubling by format", doubling("{% set s = '%s%s'|format(s, s) %}")),
        ("doubling by %", doubling("{% set s = '%s%s' % (s, s) %}")),
        ("doubling by str.format", doubling("{% set s = '{}{}'.format(s, s) %}")),
        ("doubling by tojson", doubling("{% set s = [s, s]|tojson %}")),
        ("doubling by string", doubling("{% set s = [s, s]|string %}")),
        ("doubling by a capture", doubling("{% set s %}{{ s }}{{ s }}{% endset %}")),
        ("doubling by a filter block", doubling("{% set s %}{% filter upper %}{{ s }}{{ s }}{% endfilter %}{% endset %}")),
        ("doubling by a macro", doubling("{% macro m(a) %}{{ a }}{{ a }}{% endmacro %}{% set s = m(s) %}")),
        ("doubling by escape", format!("{{% set s = '&' %}}{}", repeat("{% set s = s|e %}", 40)).replace("'&'", "'&'*99999")),
        ("doubling of lists", doubling("{% set s = (s|list if s is string else s) + (s|list if s is string else s) %}")),
        ("doubling by chain", doubling("{% set s = s|chain(s) %}")),
        ("doubling by reference", doubling("{% set s = [s, s] %}") + "{{ s }}"),
        ("equality by reference", "{% set s = 1 %}{% set t = 1 %}".to_owned() + &repeat("{% set s = [s, s] %}{% set t = [t, t] %}", 40) + "{{ s == t }}"),
        ("doubling of tuples", doubling("{% set s = (s, s) %}{% set t = s|string %}")),
        ("a list of lists", "{% set l = [1] %}".to_owned() + &repeat("{% set l = [l, l, l, l] %}", 40) + "{{ l }}"),
        ("doubling of dicts", doubling("{% set s = {'a': s, 'b': s} %}") + "{{ s }}"),
        // One step that makes much.
        ("indent", "{{ 'a\nb'|indent(100000000000) }}".into()),
        ("indent of lines", "{{ ('a\n' * 1000000)|indent(1000) }}".into()),
        ("indent by text", "{{ ('a\n' * 10000)|indent('x' * 10000) }}".into()),
        ("nested replace", "{{ ('x' * 9999)|replace('x', 'x' * 9999)|replace('x', 'x' * 9999) }}".into()),
        ("empty replace", "{{ ('x' * 9999).replace('', 'y' * 9999) }}".into()),
        ("a wide format", "{{ '%1000000000d'|format(1) }}".into()),
        ("a precise format", "{{ '%.1000000000f'|format(1.5) }}".into()),
        ("a wide format by argument", "{{ '%*d'|format(1000000000, 1) }}".into()),
        ("a wide str.format", "{{ '{:1000000000}'.format(1) }}".into()),
        ("a nested str.format", "{{ '{:{}}'.format(1, 1000000000) }}".into()),
        ("many formats", "{{ ('%4000d' * 9999)|format(*range(9999)) }}".into()),
        ("repeated text", "{{ 'x' * 10 ** 9 }}".into()),
        ("repeated list", "{{ [1] * 10 ** 9 }}".into()),
        ("repeated tuple", "{{ (1,) * 10 ** 9 }}".into()),
        ("repeated often", "{{ 'x' * 10 ** 30 }}".into()),
        ("a range", "{{ range(10 ** 9)|list|length }}".into()),
        ("a range backwards", "{{ range(0, -10 ** 9, -1)|length }}".into()),
        ("power of numbers", "{{ 9 ** 9 ** 9 }}".into()),
        ("batch", "{{ [1]|batch(10 ** 11, 0)|list }}".into()),
        ("slice", "{{ [1]|slice(10 ** 11)|list }}".into()),
        ("batches", "{{ range(99999)|batch(1)|map('batch', 99999, 0)|list }}".into()),
        ("tojson by text", "{{ range(9999)|list|tojson(indent='x' * 9999) }}".into()),
        ("tojson separators", "{{ range(9999)|list|tojson(separators=('x' * 9999, '')) }}".into()),
        ("round", "{{ 1.5|round(10 ** 9) }}{{ 1.5|round(-10 ** 9) }}{{ raise_exception('ok') }}".into()),
        ("join", "{{ range(99999)|join('x' * 99999) }}".into()),
        ("rjust", "{{ 'x'.rjust(10 ** 9) }}".into()),
        ("center", "{{ 'x'|center(10 ** 9) }}".into()),
        ("strftime", "{{ strftime_now('%Y' * 9999999) }}".into()),
        // Loops.
        ("loops", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into()),
        ("filtered loops", "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}".into()),
        ("sorting in loops", "{% set l = range(99999)|list %}{% for a in l %}{% set m = l|sort(reverse=true) %}{% endfor %}".into()),
        ("unique in loops", "{% set l = range(99999)|list %}{% for a in l %}{% set m = l|unique %}{% endfor %}".into()),
        ("groups in loops", "{% set l = range(9999)|list %}{% for a in l %}{% set m = l|groupby('x') %}{% endfor %}".into()),
        ("search in loops", "{% set s = 'x' * 8000000 %}{% for a in range(99999) %}{% if 'y' in s %}{% endif %}{% endfor %}".into()),
        ("length in loops", "{% set s = 'x' * 8000000 %}{% for a in range(99999) %}{{ s|length }}{% endfor %}".into()),
        ("equality in loops", "{% set s = range(99999)|list %}{% set t = range(99999)|list %}{% for a in s %}{% if s == t %}{% endif %}{% endfor %}".into()),
        ("strip in loops", "{% set s = 'x' * 4000000 %}{% for a in range(99999) %}{% if s.strip('yz' * 999) %}{% endif %}{% endfor %}".into()),
        ("text in loops", "{% set x %}{% for a in range(99999) %}TEXT{% endfor %}{% endset %}".replace("TEXT", &repeat("x", 9_999))),
        ("growth in loops", "{% set n = namespace(s='x') %}{% for a in range(99999) %}{% set n.s = n.s ~ n.s %}{% endfor %}".into()),
        ("nesting in loops", "{% set n = namespace(l=[]) %}{% for a in range(99999) %}{% set n.l = [n.l] %}{% endfor %}".into()),
        ("slices in loops", "{% set n = namespace(l=range(99999)|list) %}{% for a in range(99999) %}{% set n.l = n.l[0:] %}{% endfor %}".into()),
        ("fields in loops", "{% set n = namespace() %}{% for a in range(99999) %}{% for b in range(99) %}{% set m = namespace(a=1, b=2, c=3) %}{% endfor %}{% endfor %}".into()),
        // Recursion and circles.
        ("a macro in itself", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into()),
        ("a macro that doubles", "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}".into()),
        ("caller in itself", "{% macro m() %}{% call m() %}{{ caller() }}{% endcall %}{% endmacro %}{{ m() }}".into()),
        ("a loop in itself", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into()),
        ("a namespace in itself", "{% set n = namespace() %}{% set n.n = n %}{{ n }}".into()),
        ("a namespace in a list", "{% set n = namespace() %}{% set n.n = [n] %}{{ n == n }}".into()),
        ("a loop kept", "{% set n = namespace() %}{% for x in [1] recursive %}{% set n.l = loop %}{% endfor %}".into()),
        ("includes", "{% include 'default' %}".into()),
    ]);
    all
}

/// Renders with every way in.
fn render(source: &str, messages: &Value, extra: &Map<String, Value>) -> formats::Result<String> {
    let template = ChatTemplate::new(source, BTreeMap::new())?;
    let escaper = Escaper::new(["<|im_end|>", "<|im_start|>"]);
    let escaped = template.render_escaped(messages, None, true, extra, &escaper);
    let plain = template.render(messages, None, true, extra)?;
    assert_eq!(escaped?.visible(), plain);
    Ok(plain)
}

#[track_caller]
fn refused(name: &str, source: &str, messages: &Value, extra: &Map<String, Value>) {
    // What the messages themselves take is not the template's.
    let before = measure::now();
    let start = Instant::now();
    let made = render(source, messages, extra);
    let took = start.elapsed();
    let line = match made {
        Ok(text) => panic!("{name}: rendered {} bytes", text.len()),
        Err(error) => error.to_string(),
    };
    println!("{:>6.0} ms  {name}: {line}", took.as_secs_f64() * 1e3);
    assert!(line.starts_with("chat template: "), "{name}: {line}");
    assert!(!line.contains('\n') && line.len() < 1_000, "{name}: not one line: {line}");
    assert!(took < TIME, "{name}: {took:?}");
    let more = measure::peak().saturating_sub(before);
    assert!(more < MEGABYTES, "{name}: {more} MB");
}

#[test]
fn no_template_and_no_message_runs_away() {
    let (none, some) = (json!([]), json!([{"role": "user", "content": "hi"}]));
    for (name, source) in sources() {
        refused(name, &source, &some, &Map::new());
    }
    println!("peak: {} MB", measure::peak());
    // Messages as hostile as templates, with a template that is not.
    let simple = "{% for m in messages %}{{ m.content | trim }}{% endfor %}";
    let long = json!([{"role": "user", "content": "x".repeat(9 << 20)}]);
    refused("a long message", simple, &long, &Map::new());
    let mut deep = json!("x");
    for _ in 0..100 {
        deep = json!([deep]);
    }
    refused("deep messages", simple, &deep, &Map::new());
    let mut extra = Map::new();
    extra.insert("messages".into(), json!([]));
    refused("messages twice", simple, &none, &extra);
    // A template that trusts its variables with numbers.
    let width = "{{ 'x'|indent(width, true) }}{{ 'x' * times }}";
    for (name, value) in [("width", json!(1e11 as u64)), ("times", json!(u64::MAX))] {
        let mut extra = Map::from_iter([("width".into(), json!(1)), ("times".into(), json!(1))]);
        extra.insert(name.into(), value);
        refused(name, width, &none, &extra);
    }
    let many: Vec<Value> = (0..400_000).map(|_| json!({"content": ""})).collect();
    refused("many messages", simple, &Value::Array(many), &Map::new());
    extra.clear();
    let lists = json!((0..2_000_000).map(|_| json!([])).collect::<Vec<_>>());
    extra.insert("x".into(), lists);
    refused("many lists", simple, &none, &extra);
}
