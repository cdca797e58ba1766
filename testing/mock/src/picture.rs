//! A drawing of an invented Plan.

use std::fmt::Write;

/// Draws the ops of two layers as boxes in order, with their spans in the arena below.
pub(super) fn plan(rows: u32) -> String {
    let mut ops = vec!["advance", "embed"];
    for _ in 0..2 {
        ops.extend(["norm", "qkv", "rope+kv", "attention", "o_proj", "norm", "gate_up", "down"]);
    }
    ops.extend(["norm", "lm_head", "sample"]);
    let (wide, step) = (72, 84);
    let width = ops.len() * step + 16;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} 150\" \
         font-family=\"monospace\" font-size=\"11\">"
    );
    for (i, op) in ops.iter().enumerate() {
        let x = 8 + i * step;
        let hue = match *op {
            "attention" => 20,
            "norm" => 210,
            "sample" | "advance" => 290,
            _ => 150,
        };
        // Two ping-pong spans and one workspace, as a liveness pass would place them.
        let (y, tall) = if *op == "attention" { (104, 34) } else { (78 + (i % 2) * 13, 12) };
        let _ = write!(
            svg,
            "<rect x=\"{x}\" y=\"10\" width=\"{wide}\" height=\"40\" rx=\"5\" \
             fill=\"hsl({hue} 45% 45%)\"/>\
             <text x=\"{tx}\" y=\"28\" text-anchor=\"middle\" fill=\"#fff\">{op}</text>\
             <text x=\"{tx}\" y=\"43\" text-anchor=\"middle\" fill=\"#fff\" \
             font-size=\"9\">{rows} rows</text>\
             <rect x=\"{x}\" y=\"{y}\" width=\"{step}\" height=\"{tall}\" \
             fill=\"hsl({hue} 45% 45%)\" opacity=\"0.45\"/>",
            tx = x + wide / 2,
        );
        if i + 1 < ops.len() {
            let _ = write!(
                svg,
                "<path d=\"M{} 30h{}\" stroke=\"currentColor\" opacity=\"0.6\"/>",
                x + wide,
                step - wide
            );
        }
    }
    svg.push_str("</svg>");
    svg
}
