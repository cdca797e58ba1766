//! A plan for people.

use super::Plan;
use device::op::{Epilogue, Hand};
use device::variant::Pick;
use device::{DType, Op, Region, Tensor};
use std::fmt;

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} {} for {}: {} nodes, workspace {}",
            self.program,
            self.key,
            self.target,
            self.nodes.len(),
            bytes(self.workspace)
        )?;
        for index in 0..self.nodes.len() {
            let op = &self.nodes[index].op;
            let mark = match (self.breaks.contains(&index), self.splits.contains(&index)) {
                (true, true) => "break+split",
                (true, false) => "break",
                (false, true) => "split",
                (false, false) => "",
            };
            let line = format!(
                "{index:>4}  {:<14} {:<58} {:<24} {mark}",
                self.node_name(index),
                describe(op),
                outputs(op)
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// An op in one line, without spans.
pub fn describe(op: &Op) -> String {
    match op {
        Op::Prologue(op) => format!("prologue {} rows, {} tokens", op.rows, op.tokens),
        Op::Embed(op) => format!("embed {} from {}", shape(&op.out), shape(&op.table)),
        Op::RmsNorm(op) => format!("rms_norm {}", shape(&op.x)),
        Op::Linear(op) => {
            let mut text = format!("linear {} · {}", shape(&op.x), shape(&op.w));
            if op.norm.is_some() {
                let ready = op.hand == Hand::Takes;
                text.insert_str(0, if ready { "prepared norm + " } else { "norm + " });
            }
            if op.bias.is_some() {
                text.push_str(" + bias");
            }
            text.push_str(match op.epilogue {
                Epilogue::Store => "",
                Epilogue::Residual(_) => " + residual",
                Epilogue::SiluMul => ", silu·mul",
            });
            if let Some(rope) = &op.rope {
                text.push_str(if rope.q_norm.is_some() { ", qk-norm + rope" } else { ", rope" });
            }
            if matches!(op.hand, Hand::Gives(_)) {
                text.push_str(", prepares the next norm");
            }
            text.push_str(&pick(&op.pick));
            text
        }
        Op::RopeKv(op) => {
            let norms = if op.q_norm.is_some() { "qk-norm + " } else { "" };
            format!("{norms}rope_kv {} tokens", op.qkv.rows)
        }
        Op::Attention(op) => {
            let mut text = String::new();
            if let Some(rope) = &op.rope {
                text.push_str(if rope.q_norm.is_some() { "qk-norm + rope + " } else { "rope + " });
            }
            let form = if op.single { "decode" } else { "varlen" };
            let (q, kv, dim) = (op.q_heads, op.kv.heads, op.kv.head_dim);
            text.push_str(&format!("attention {form} {} rows {q}/{kv}×{dim}", op.rows));
            if let Some(window) = op.window {
                text.push_str(&format!(" window {window}"));
            }
            if op.last_only {
                text.push_str(", last tokens only");
            }
            text.push_str(&pick(&op.pick));
            text
        }
        Op::Gather(op) => format!("gather {} of {}", shape(&op.y), shape(&op.x)),
        Op::Sample(op) => format!("sample {}", shape(&op.logits)),
        Op::Copy(op) => format!("copy {}", bytes(op.from.len)),
        Op::Fill(op) => format!("fill {} with {:#x}", bytes(op.to.len), op.word),
        Op::Noise(op) => format!("noise {} seed {}", shape(&op.to), op.seed),
        Op::Layers(op) => format!("layers: {} ops as one", op.members.len()),
    }
}

/// Where an op's workspace outputs lie.
pub fn outputs(op: &Op) -> String {
    let (_, writes) = super::check::spans(op);
    let workspace = writes.iter().filter(|span| span.region == Region::Workspace);
    let part = |span: &device::Span| format!("@{}+{}", span.offset, span.len);
    workspace.map(part).collect::<Vec<_>>().join(" ")
}

fn pick<V: std::fmt::Display>(pick: &Pick<V>) -> String {
    if pick.is_best() { String::new() } else { format!(" [{pick}]") }
}

fn shape(tensor: &Tensor) -> String {
    format!("{}×{} {}", tensor.rows, tensor.cols, dtype(tensor.dtype))
}

fn dtype(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// A byte count for people, exact below one KiB.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut unit = 0;
    let mut value = count as f64;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
