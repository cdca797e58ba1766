//! What every program must satisfy, whether a builder or a JSON file made it.

use super::{Dim, NormRef, Program, ProgramOp, Value, ValueId, WeightId};
use std::collections::BTreeSet;

/// Why something is not a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Not JSON of a program.
    #[error("not a program: {problem}")]
    Json {
        /// The parser's words.
        problem: String,
    },
    /// A weight name used for two different weights.
    #[error("weight `{name}` is declared twice with different shapes")]
    WeightTwice {
        /// The name.
        name: String,
    },
    /// A value name used twice.
    #[error("value `{name}` is made twice")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// Rope or attention outside a layer: there are no pages to use.
    #[error("step `{step}` needs KV pages, so it must be inside a layer")]
    OutsideLayer {
        /// The step.
        step: String,
    },
    /// An id that names nothing.
    #[error("step `{step}` names a value or weight that does not exist")]
    Dangling {
        /// The step.
        step: String,
    },
    /// A value without exactly one maker.
    #[error("value `{value}` is made {times} times")]
    Makers {
        /// The value.
        value: String,
        /// How often.
        times: usize,
    },
    /// Shapes that do not go together.
    #[error("step `{step}`: {problem}")]
    Shape {
        /// The step.
        step: String,
        /// What is wrong.
        problem: String,
    },
    /// Not exactly one sampler, or no embedding.
    #[error("a program embeds once and samples once; this one has {embeds} and {samples}")]
    Ends {
        /// Embeddings.
        embeds: usize,
        /// Samplers.
        samples: usize,
    },
}

impl Program {
    /// Refuses a program whose ids, shapes or ends do not fit together.
    pub fn check(&self) -> Result<(), ProgramError> {
        let mut names = BTreeSet::new();
        if let Some(twice) = self.values.iter().find(|value| !names.insert(&value.name)) {
            return Err(ProgramError::NameTwice { name: twice.name.clone() });
        }
        self.check_ids()?;
        self.check_makers()?;
        for step in &self.steps {
            self.check_shapes(&step.op).map_err(|problem| ProgramError::Shape {
                step: step.layer.map_or(step.name.clone(), |l| format!("{l}.{}", step.name)),
                problem,
            })?;
        }
        let count = |name: &str| self.steps.iter().filter(|s| s.op.name() == name).count();
        match (count("embed"), count("sample")) {
            (1, 1) => Ok(()),
            (embeds, samples) => Err(ProgramError::Ends { embeds, samples }),
        }
    }

    fn check_ids(&self) -> Result<(), ProgramError> {
        for step in &self.steps {
            let value_ok = |id: &ValueId| (id.0 as usize) < self.values.len();
            let weight_ok = |id: &WeightId| (id.0 as usize) < self.weights.len();
            let ids = step.op.inputs().into_iter().chain(step.op.out());
            if !ids.into_iter().all(|id| value_ok(&id)) || !step.op.weights().iter().all(weight_ok)
            {
                return Err(ProgramError::Dangling { step: step.name.clone() });
            }
        }
        Ok(())
    }

    fn check_makers(&self) -> Result<(), ProgramError> {
        let mut makers = vec![0; self.values.len()];
        for out in self.steps.iter().filter_map(|step| step.op.out()) {
            makers[out.0 as usize] += 1;
        }
        match makers.iter().position(|&times| times != 1) {
            Some(index) => Err(ProgramError::Makers {
                value: self.values[index].name.clone(),
                times: makers[index],
            }),
            None => Ok(()),
        }
    }

    fn check_shapes(&self, op: &ProgramOp) -> Result<(), String> {
        let shape = &self.shape;
        match *op {
            ProgramOp::Embed { table, out } => {
                let (table, out) = (self.weight(table), self.value(out));
                ensure(table.rows == shape.vocab, "the table's rows are not the vocabulary")?;
                ensure(out.cols == table.cols && out.rows == Dim::Tokens, "out has another shape")
            }
            ProgramOp::RmsNorm { x, norm, out } => {
                self.norm_fits(norm, self.value(x).cols)?;
                same_shape(self.value(x), self.value(out))
            }
            ProgramOp::Linear { x, w, bias, out } => {
                let (x, w, out) = (self.value(x), self.weight(w), self.value(out));
                ensure(x.cols == w.cols, "x and w differ in input features")?;
                ensure(out.cols == w.rows && out.rows == x.rows, "out has another shape")?;
                let bias = bias.map(|bias| self.weight(bias));
                ensure(bias.is_none_or(|b| b.cols == w.rows && b.rows == 1), "bias does not fit")
            }
            ProgramOp::Add { a, b, out } => {
                same_shape(self.value(a), self.value(b))?;
                same_shape(self.value(a), self.value(out))
            }
            ProgramOp::SiluMul { x, out } => {
                let (x, out) = (self.value(x), self.value(out));
                ensure(x.cols == 2 * out.cols && x.rows == out.rows, "out is not half as wide as x")
            }
            ProgramOp::RopeKv { qkv, q_norm, k_norm, kv, out } => {
                ensure(kv < shape.layers, "there are no pages for this layer")?;
                ensure(self.value(qkv).cols == shape.qkv_cols(), "qkv is not q, k and v heads")?;
                for norm in [q_norm, k_norm].into_iter().flatten() {
                    self.norm_fits(norm, shape.head_dim)?;
                }
                same_shape(self.value(qkv), self.value(out))
            }
            ProgramOp::Attention { qkv, kv, out, .. } => {
                ensure(kv < shape.layers, "there are no pages for this layer")?;
                let (qkv, out) = (self.value(qkv), self.value(out));
                ensure(qkv.cols == shape.qkv_cols(), "qkv is not q, k and v heads")?;
                ensure(out.cols == shape.q_cols() && out.rows == qkv.rows, "out is not q heads")
            }
            ProgramOp::GatherLast { x, out } => {
                let (x, out) = (self.value(x), self.value(out));
                ensure(
                    x.rows == Dim::Tokens && out.rows == Dim::Rows,
                    "it turns tokens into rows",
                )?;
                ensure(x.cols == out.cols && x.dtype == out.dtype, "x and out differ")
            }
            ProgramOp::Sample { logits } => {
                let logits = self.value(logits);
                ensure(logits.rows == Dim::Rows, "logits are not one row per sequence")?;
                ensure(logits.cols == shape.vocab, "logits are not as wide as the vocabulary")
            }
        }
    }

    fn norm_fits(&self, norm: NormRef, cols: u32) -> Result<(), String> {
        let weight = self.weight(norm.weight);
        ensure(weight.rows == 1 && weight.cols == cols, "the norm's weight has another length")
    }
}

fn ensure(holds: bool, problem: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(problem.to_owned()) }
}

fn same_shape(a: &Value, b: &Value) -> Result<(), String> {
    ensure((a.rows, a.cols) == (b.rows, b.cols), "shapes differ")
}
