//! What the passes work on: one stage becomes one node.

use crate::program::{Mark, NormRef, ValueId, WeightId};

/// How q and k are prepared and where k and v go; a stage of its own or part of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// Rewritten in place.
    pub qkv: ValueId,
    /// Per-head norm of q.
    pub q_norm: Option<NormRef>,
    /// Per-head norm of k.
    pub k_norm: Option<NormRef>,
    /// Which layer's pages.
    pub kv: u32,
    /// `qkv` under its new name.
    pub out: ValueId,
}

/// What a linear does with its product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fold {
    /// Stores it.
    Store,
    /// Adds a value.
    Residual(ValueId),
    /// silu(gate) · up.
    SiluMul,
}

/// What a stage does.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// Applies the mail and derives the tables.
    Prologue,
    /// Embedding rows.
    Embed {
        /// The table.
        table: WeightId,
        /// Out.
        out: ValueId,
    },
    /// A norm alone.
    RmsNorm {
        /// In.
        x: ValueId,
        /// Weight and epsilon.
        norm: NormRef,
        /// Out.
        out: ValueId,
    },
    /// A product with its prologue and epilogue.
    Linear {
        /// In.
        x: ValueId,
        /// Weight.
        w: WeightId,
        /// Bias.
        bias: Option<WeightId>,
        /// Applied to `x` first.
        norm: Option<NormRef>,
        /// Applied last.
        fold: Fold,
        /// Out.
        out: ValueId,
    },
    /// Rope and KV write alone.
    RopeKv(Rope),
    /// Attention, with or without the rope in front.
    Attention {
        /// In: rotated, or not yet if `rope` is set.
        qkv: ValueId,
        /// The fused form.
        rope: Option<Rope>,
        /// Multiplies q·k.
        scale: f32,
        /// Sliding window.
        window: Option<u32>,
        /// Which layer's pages.
        kv: u32,
        /// Out.
        out: ValueId,
    },
    /// Last tokens.
    Gather {
        /// In.
        x: ValueId,
        /// Out.
        out: ValueId,
    },
    /// The sampler.
    Sample {
        /// In.
        logits: ValueId,
    },
}

/// A node in the making.
#[derive(Clone, Debug, PartialEq)]
pub struct Stage {
    /// What it does.
    pub kind: Kind,
    /// Its name within the layer.
    pub name: String,
    /// Which layer.
    pub layer: Option<u32>,
    /// A mark of the model.
    pub mark: Option<Mark>,
}

impl Stage {
    /// The device op's name it becomes.
    pub const fn op_name(&self) -> &'static str {
        match self.kind {
            Kind::Prologue => "prologue",
            Kind::Embed { .. } => "embed",
            Kind::RmsNorm { .. } => "rms_norm",
            Kind::Linear { .. } => "linear",
            Kind::RopeKv(_) => "rope_kv",
            Kind::Attention { .. } => "attention",
            Kind::Gather { .. } => "gather",
            Kind::Sample { .. } => "sample",
        }
    }

    /// Layer and name.
    pub fn full_name(&self) -> String {
        self.layer.map_or(self.name.clone(), |layer| format!("{layer}.{}", self.name))
    }

    /// The values it reads.
    pub fn reads(&self) -> Vec<ValueId> {
        match self.kind {
            Kind::Prologue | Kind::Embed { .. } => vec![],
            Kind::RmsNorm { x, .. } | Kind::Gather { x, .. } => vec![x],
            Kind::Linear { x, fold: Fold::Residual(r), .. } => vec![x, r],
            Kind::Linear { x, .. } => vec![x],
            Kind::RopeKv(rope) => vec![rope.qkv],
            Kind::Attention { qkv, .. } => vec![qkv],
            Kind::Sample { logits } => vec![logits],
        }
    }

    /// The value it makes.
    pub const fn out(&self) -> Option<ValueId> {
        match &self.kind {
            Kind::Prologue | Kind::Sample { .. } => None,
            Kind::Embed { out, .. }
            | Kind::RmsNorm { out, .. }
            | Kind::Linear { out, .. }
            | Kind::Attention { out, .. }
            | Kind::Gather { out, .. } => Some(*out),
            Kind::RopeKv(rope) => Some(rope.out),
        }
    }

    /// Replaces a value it reads.
    pub fn redirect(&mut self, from: ValueId, to: ValueId) {
        let swap = |id: &mut ValueId| {
            if *id == from {
                *id = to;
            }
        };
        match &mut self.kind {
            Kind::Prologue | Kind::Embed { .. } => {}
            Kind::RmsNorm { x, .. } | Kind::Gather { x, .. } => swap(x),
            Kind::Linear { x, fold, .. } => {
                swap(x);
                if let Fold::Residual(residual) = fold {
                    swap(residual);
                }
            }
            Kind::RopeKv(rope) => swap(&mut rope.qkv),
            Kind::Attention { qkv, rope, .. } => {
                swap(qkv);
                if let Some(rope) = rope {
                    swap(&mut rope.qkv);
                }
            }
            Kind::Sample { logits } => swap(logits),
        }
    }
}

/// Indices of the stages that read `value`.
pub fn readers(stages: &[Stage], value: ValueId) -> Vec<usize> {
    let reads = |stage: &Stage| stage.reads().contains(&value);
    stages.iter().enumerate().filter(|(_, stage)| reads(stage)).map(|(index, _)| index).collect()
}

/// Whether nothing but gathers reads `value`: of its rows only some are ever looked at.
pub fn only_gathered(stages: &[Stage], value: ValueId) -> bool {
    let readers = readers(stages, value);
    let gather = |&reader: &usize| matches!(stages[reader].kind, Kind::Gather { .. });
    !readers.is_empty() && readers.iter().all(gather)
}
