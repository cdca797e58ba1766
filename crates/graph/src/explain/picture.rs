//! A plan as a picture: nodes from left to right, below them the workspace, every value a box as wide
//! as its life and as high as its bytes.

use crate::plan::{Plan, bytes};
use std::fmt::Write;

const LEFT: f64 = 70.0;
const TOP: f64 = 60.0;
const STRIP: f64 = 26.0;
const HEIGHT: f64 = 420.0;

impl Plan {
    /// The picture, as SVG.
    pub fn svg(&self) -> String {
        let nodes = self.nodes.len().max(1);
        let step = (1400.0 / nodes as f64).clamp(8.0, 60.0);
        let width = LEFT + step * nodes as f64 + 20.0;
        let height = TOP + STRIP + HEIGHT + 40.0;
        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0}" height="{height:.0}" font-family="sans-serif" font-size="11">"#
        );
        let title = format!(
            "{} {} for {}: {} nodes, workspace {}",
            self.program,
            self.key,
            self.target,
            self.nodes.len(),
            bytes(self.workspace)
        );
        svg.push_str(r##"<rect width="100%" height="100%" fill="#fff"/>"##);
        let _ = write!(svg, r#"<text x="{LEFT}" y="24" font-size="14">{}</text>"#, escape(&title));
        self.draw_nodes(&mut svg, step);
        self.draw_values(&mut svg, step);
        let bottom = TOP + STRIP + 10.0 + HEIGHT;
        for (share, y) in [(0.0, bottom), (0.5, bottom - HEIGHT / 2.0), (1.0, bottom - HEIGHT)] {
            let label = bytes((self.workspace as f64 * share) as u64);
            let _ = write!(svg, r#"<text x="4" y="{y:.0}">{label}</text>"#);
        }
        svg.push_str("</svg>\n");
        svg
    }

    fn draw_nodes(&self, svg: &mut String, step: f64) {
        for (index, node) in self.nodes.iter().enumerate() {
            let x = LEFT + step * index as f64;
            let colour = colour(node.op.name());
            let stroke = if self.breaks.contains(&index) { "#c00" } else { "#fff" };
            let _ = write!(
                svg,
                r##"<rect x="{x:.1}" y="{TOP}" width="{:.1}" height="{STRIP}" fill="{colour}" stroke="{stroke}"><title>{index} {}: {}</title></rect>"##,
                step - 1.0,
                escape(&self.node_name(index)),
                escape(&super::describe(&node.op)),
            );
        }
        let mut legend = LEFT;
        for op in ["prologue", "embed", "linear", "attention", "rms_norm", "rope_kv", "sample"] {
            let _ = write!(
                svg,
                r#"<rect x="{legend}" y="36" width="10" height="10" fill="{}"/><text x="{}" y="45">{op}</text>"#,
                colour(op),
                legend + 14.0
            );
            legend += 80.0;
        }
    }

    fn draw_values(&self, svg: &mut String, step: f64) {
        let bottom = TOP + STRIP + 10.0 + HEIGHT;
        let scale = HEIGHT / self.workspace.max(1) as f64;
        let lowest = self.values.iter().map(|value| value.span.offset).min().unwrap_or(0);
        for value in &self.values {
            let offset = value.span.offset - lowest;
            let (x, w) =
                (LEFT + step * value.first as f64, step * (value.last - value.first + 1) as f64);
            let h = value.span.len as f64 * scale;
            let y = bottom - offset as f64 * scale - h;
            let label = format!(
                "{} {}×{} {:?}, {}, nodes {}–{}",
                value.name,
                value.rows,
                value.cols,
                value.dtype,
                bytes(value.span.len),
                value.first,
                value.last
            );
            let _ = write!(
                svg,
                r##"<rect x="{x:.1}" y="{y:.1}" width="{:.1}" height="{h:.1}" fill="#4a90d9" fill-opacity="0.35" stroke="#245"><title>{}</title></rect>"##,
                w - 1.0,
                escape(&label)
            );
            if w > 40.0 && h > 12.0 {
                let _ = write!(
                    svg,
                    r#"<text x="{:.1}" y="{:.1}">{}</text>"#,
                    x + 3.0,
                    y + 11.0,
                    escape(&value.name)
                );
            }
        }
    }
}

fn colour(op: &str) -> &'static str {
    match op {
        "prologue" => "#888",
        "embed" => "#7b9",
        "linear" => "#37a",
        "attention" => "#d80",
        "rms_norm" => "#a6c",
        "rope_kv" => "#fb6",
        "sample" => "#c33",
        _ => "#555",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
