//! A plan as a picture: nodes from left to right, below them the workspace, every buffer a box as wide
//! as its life. Layers that are alike are drawn once. Heights are logarithmic: otherwise only
//! the logits would be visible.

use crate::plan::{PlacedValue, Plan, bytes};
use std::fmt::Write;
use std::ops::RangeInclusive;

const LEFT: f64 = 20.0;
const COLUMN: f64 = 96.0;
const FOLD: f64 = 150.0;
const TOP: f64 = 64.0;
const STRIP: f64 = 46.0;
const HEIGHT: f64 = 250.0;
const OPS: [&str; 12] = [
    "prologue",
    "embed",
    "linear",
    "attention",
    "rms_norm",
    "layer_norm",
    "rope_kv",
    "activate",
    "gather",
    "pool",
    "sample",
    "publish",
];

/// The contents of a column.
enum Column {
    Node(usize),
    /// Layers that look like the one before them.
    Alike(RangeInclusive<u32>),
}

/// Which node stands where.
struct Columns {
    list: Vec<Column>,
    /// The column of each node.
    of: Vec<usize>,
    /// Where each column begins, and where the last one ends.
    x: Vec<f64>,
}

/// A buffer, and the values that share it.
struct Buffer<'a> {
    value: &'a PlacedValue,
    /// Values after the first that take its place.
    more: usize,
}

impl Plan {
    /// The picture, as SVG.
    pub fn svg(&self) -> String {
        let columns = self.columns();
        let width = columns.x[columns.list.len()] + LEFT;
        let height = TOP + STRIP + HEIGHT + 56.0;
        let mut svg = format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" font-family="sans-serif" font-size="11">"#
        );
        svg.push_str(r##"<rect width="100%" height="100%" fill="#fff"/>"##);
        let _ = write!(
            svg,
            r#"<text x="{LEFT}" y="24" font-size="14">{}</text>"#,
            escape(&self.title())
        );
        self.draw_legend(&mut svg);
        self.draw_nodes(&mut svg, &columns);
        self.draw_buffers(&mut svg, &columns);
        let _ = write!(
            svg,
            r##"<text x="{LEFT}" y="{:.0}" fill="#666">Below a node: what is in the workspace while it runs. A buffer is as wide as its life; heights are logarithmic.{}</text></svg>"##,
            height - 12.0,
            if self.breaks.is_empty() { "" } else { " Red: the backend breakable breaks here." }
        );
        svg.push('\n');
        svg
    }

    /// The layers after the first that have the same nodes as it.
    fn alike(&self) -> Option<RangeInclusive<u32>> {
        let look = |layer: u32| {
            let nodes = self.nodes.iter().filter(move |node| node.layer == Some(layer));
            nodes.map(|node| (node.name.as_str(), node.op.name())).collect::<Vec<_>>()
        };
        let first = look(0);
        let last = self.nodes.iter().filter_map(|node| node.layer).max()?;
        let end = (1..=last).take_while(|&layer| look(layer) == first).last()?;
        (end > 1).then_some(1..=end)
    }

    fn columns(&self) -> Columns {
        let alike = self.alike();
        let (mut list, mut of, mut x) = (Vec::new(), Vec::new(), vec![LEFT]);
        for (index, node) in self.nodes.iter().enumerate() {
            let folded = alike
                .as_ref()
                .filter(|alike| node.layer.is_some_and(|layer| alike.contains(&layer)));
            let again = folded.is_some() && matches!(list.last(), Some(Column::Alike(_)));
            if !again {
                let width = if folded.is_some() { FOLD } else { COLUMN };
                list.push(folded.map_or(Column::Node(index), |alike| Column::Alike(alike.clone())));
                x.push(x[x.len() - 1] + width);
            }
            of.push(list.len() - 1);
        }
        Columns { list, of, x }
    }

    fn draw_legend(&self, svg: &mut String) {
        let used = OPS.iter().filter(|op| self.nodes.iter().any(|node| node.op.name() == **op));
        for (op, x) in used.zip((0..).map(|place| LEFT + 88.0 * f64::from(place))) {
            let _ = write!(
                svg,
                r#"<rect x="{x}" y="38" width="10" height="10" fill="{}"/><text x="{}" y="47">{op}</text>"#,
                colour(op),
                x + 14.0
            );
        }
    }

    fn draw_nodes(&self, svg: &mut String, columns: &Columns) {
        for (column, x) in columns.list.iter().zip(&columns.x) {
            let middle = TOP + STRIP / 2.0 + 4.0;
            let index = match column {
                Column::Node(index) => *index,
                Column::Alike(layers) => {
                    let _ = write!(
                        svg,
                        r##"<rect x="{x:.1}" y="{TOP}" width="{:.1}" height="{STRIP}" fill="#f4f4f4" stroke="#999" stroke-dasharray="4 3"/><text x="{:.1}" y="{middle:.1}" text-anchor="middle" fill="#444">layers {}–{} alike</text>"##,
                        FOLD - 4.0,
                        x + FOLD / 2.0 - 2.0,
                        layers.start(),
                        layers.end()
                    );
                    continue;
                }
            };
            let op = &self.nodes[index].op;
            let breaks = self.breaks.contains(&index);
            let (stroke, thick) = if breaks { ("#d00", 2) } else { ("none", 0) };
            let weights = op.traffic().weights;
            let weights = if weights == 0 { String::new() } else { bytes(weights) };
            let _ = write!(
                svg,
                r##"<rect x="{x:.1}" y="{TOP}" width="{:.1}" height="{STRIP}" rx="3" fill="{}" stroke="{stroke}" stroke-width="{thick}"><title>{index} {}: {}</title></rect><g fill="#fff" text-anchor="middle" pointer-events="none"><text x="{:.1}" y="{:.1}" font-weight="bold">{}</text><text x="{:.1}" y="{:.1}" font-size="10">{weights}</text></g>"##,
                COLUMN - 4.0,
                colour(op.name()),
                escape(&self.node_name(index)),
                escape(&op.describe()),
                x + COLUMN / 2.0 - 2.0,
                if weights.is_empty() { middle } else { middle - 7.0 },
                escape(&self.node_name(index)),
                x + COLUMN / 2.0 - 2.0,
                middle + 9.0,
            );
        }
    }

    /// The buffers to draw: values in the same place for the same time are one buffer, and buffers that
    /// live only within layers that are not drawn are left out.
    fn buffers(&self, columns: &Columns) -> Vec<Buffer<'_>> {
        let mut seen: Vec<Buffer<'_>> = Vec::new();
        for value in &self.values {
            let (first, last) = (columns.of[value.first], columns.of[value.last]);
            if first == last && matches!(columns.list[first], Column::Alike(_)) {
                continue;
            }
            let life =
                |value: &PlacedValue| (value.span.offset, value.span.len, value.first, value.last);
            match seen.iter_mut().find(|buffer| life(buffer.value) == life(value)) {
                Some(buffer) => buffer.more += 1,
                None => seen.push(Buffer { value, more: 0 }),
            }
        }
        seen
    }

    fn draw_buffers(&self, svg: &mut String, columns: &Columns) {
        let buffers = self.buffers(columns);
        let heights = Heights::new(&buffers);
        let bottom = TOP + STRIP + 14.0 + HEIGHT;
        for Buffer { value, more } in &buffers {
            let x = columns.x[columns.of[value.first]];
            let w = columns.x[columns.of[value.last] + 1] - x - 4.0;
            let (from, to) =
                (heights.at(value.span.offset), heights.at(value.span.offset + value.span.len));
            let (y, h) = (bottom - to, (to - from - 2.0).max(1.0));
            let others = match more {
                0 => String::new(),
                more => format!(" and {more} more in its place"),
            };
            let label = format!("{}{others}, {}", value.name, bytes(value.span.len));
            let _ = write!(
                svg,
                r##"<rect x="{x:.1}" y="{y:.1}" width="{w:.1}" height="{h:.1}" rx="2" fill="#4a90d9" fill-opacity="0.28" stroke="#357"><title>{}: {}×{} {:?}, nodes {}–{}</title></rect>"##,
                escape(&label),
                value.rows,
                value.cols,
                value.dtype,
                value.first,
                value.last
            );
            let (middle, at) = (y + h / 2.0, x + 5.0);
            let lines = [value.name.as_str(), &bytes(value.span.len)];
            let _ = match h {
                _ if label.chars().count() as f64 * 6.0 < w && h > 11.0 => write!(
                    svg,
                    r#"<text x="{at:.1}" y="{:.1}" pointer-events="none">{}</text>"#,
                    middle + 4.0,
                    escape(&label)
                ),
                _ if h > 24.0 => write!(
                    svg,
                    r#"<g pointer-events="none"><text x="{at:.1}" y="{:.1}">{}</text><text x="{at:.1}" y="{:.1}">{}</text></g>"#,
                    middle - 2.0,
                    escape(lines[0]),
                    middle + 10.0,
                    lines[1]
                ),
                _ => Ok(()),
            };
        }
    }
}

/// From bytes of the workspace to heights in the picture: the places where a buffer begins or ends
/// keep their order, and what lies between two of them counts by its logarithm.
struct Heights(Vec<(u64, f64)>);

impl Heights {
    fn new(buffers: &[Buffer<'_>]) -> Heights {
        let ends = |span: &device::Span| [span.offset, span.offset + span.len];
        let mut edges: Vec<u64> =
            buffers.iter().flat_map(|buffer| ends(&buffer.value.span)).collect();
        edges.sort_unstable();
        edges.dedup();
        let covered = |from: u64| {
            let spans = buffers.iter().map(|buffer| buffer.value.span);
            spans.into_iter().any(|span| span.offset <= from && from < span.offset + span.len)
        };
        let mut heights = vec![(edges.first().copied().unwrap_or(0), 0.0)];
        for pair in edges.windows(2) {
            let much =
                if covered(pair[0]) { ((pair[1] - pair[0]) as f64 + 2.0).log2() } else { 1.0 };
            heights.push((pair[1], heights[heights.len() - 1].1 + much));
        }
        let whole = heights[heights.len() - 1].1.max(1.0);
        heights.iter_mut().for_each(|(_, height)| *height *= HEIGHT / whole);
        Heights(heights)
    }

    fn at(&self, edge: u64) -> f64 {
        self.0.iter().find(|(known, _)| *known == edge).map_or(0.0, |(_, height)| *height)
    }
}

fn colour(op: &str) -> &'static str {
    match op {
        "prologue" => "#777",
        "embed" => "#3a8a63",
        "linear" => "#2f6a9e",
        "attention" => "#c06a00",
        "rms_norm" | "layer_norm" => "#8a4fb0",
        "rope_kv" => "#a8781e",
        "gather" | "pool" => "#4a7a7a",
        "sample" | "publish" => "#b83232",
        _ => "#555",
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
