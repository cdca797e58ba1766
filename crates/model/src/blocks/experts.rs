//! The experts of a layer: a router, the experts it chooses from, and an expert that every token goes through.

use super::{mlp, plain_mlp};
use crate::builder::{Builder, Source, tensor};
use crate::config::Fields;
use crate::weights::Cut;
use device::op::{Activation, Clamp, Routing};
use formats::{Result, limits};
use graph::program::ValueId;

/// Experts in place of the MLP of some layers.
#[derive(Clone, Debug)]
pub(crate) struct Experts {
    /// How many there are.
    pub(crate) count: usize,
    /// How they are chosen and weighed.
    pub(crate) routing: Routing,
    /// The router: one row per expert.
    pub(crate) router: Source,
    /// One number per expert: with a softmax a part of the router's logits, else added to the scores that experts are
    /// chosen by.
    pub(crate) bias: Option<Source>,
    /// Gate, up and down of one expert. With squared ReLU there is no gate, and the first is not read.
    pub(crate) sources: [Source; 3],
    /// Applied to gates, or to up.
    pub(crate) act: Activation,
    /// Their biases.
    pub(crate) biases: Option<[Source; 3]>,
    /// The matrices that make what experts read of a token, and a token of what they make of it, where their vectors are
    /// shorter.
    pub(crate) latent: Option<[Source; 2]>,
    /// Limits of gates, if the model was trained with some.
    pub(crate) clamp: Option<Clamp>,
    /// Which layers have them; the others have an MLP.
    pub(crate) layers: Vec<bool>,
    /// What every token goes through besides.
    pub(crate) shared: Option<Shared>,
}

/// An MLP beside the experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shared {
    /// Gate, up and down; the gate as above.
    pub(crate) sources: [Source; 3],
    /// What its result is multiplied by.
    pub(crate) weight: SharedWeight,
}

/// What the result of a shared expert is multiplied by.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SharedWeight {
    /// The sigmoid of the token times this row.
    Sigmoid(Source),
    /// A number.
    Factor(f32),
}

impl Experts {
    /// Experts in every layer; the weights of a token add up to 1. The number of experts has two names in `config.json`,
    /// whatever the family.
    pub(crate) fn read(
        f: &Fields<'_>,
        layers: usize,
        router: fn(usize) -> Source,
        sources: [Source; 3],
    ) -> Result<Experts> {
        let within = |field: &str, found: usize, most: usize| match (1..=most).contains(&found) {
            true => Ok(found),
            false => Err(f.invalid(field, found, format!("1 to {most}"))),
        };
        let count = match f.size("num_local_experts", "")? {
            Some(count) => count,
            None => f.required("num_experts", "expert_count")?,
        };
        let count = within("num_experts", count, limits::EXPERTS)?;
        let top = f.required("num_experts_per_tok", "expert_used_count")?;
        let top = within("num_experts_per_tok", top, count.min(limits::TOP_EXPERTS))?;
        within("width of experts", sources[0].rows(), limits::WIDTH as usize)?;
        let scale = f.number("", "expert_weights_scale")?.filter(|&scale| scale != 0.0);
        let scale = scale.unwrap_or(1.0) as f32;
        Ok(Experts {
            count,
            routing: Routing { renormalise: true, scale, ..Routing::softmax(top as u32) },
            router: router(count),
            bias: None,
            sources,
            act: Activation::Silu,
            biases: None,
            latent: None,
            clamp: None,
            layers: vec![true; layers],
            shared: None,
        })
    }

    /// The same with weights that add up to 1 only if the configuration says so. GGUF files of such families say nothing:
    /// `usual` holds there.
    pub(crate) fn renormalised(mut self, f: &Fields<'_>, usual: bool) -> Result<Experts> {
        let found = f.bool("norm_topk_prob", "expert_weights_norm")?;
        self.routing.renormalise = found.unwrap_or(f.is_gguf() && usual);
        Ok(self)
    }

    /// `x` and what the experts make of `h`.
    pub(crate) fn build(&self, b: &mut Builder<'_>, x: ValueId, h: ValueId) -> ValueId {
        let choice = b.route("route", h, self.router, self.bias, self.routing);
        let y = match self.latent {
            None => b.experts(h, choice, self, Some(x)),
            Some([into, from]) => {
                let latent = b.linear("experts_in", h, &[into], false, Cut::Whole);
                let o = b.experts(latent, choice, self, None);
                let o = b.linear("experts_out", o, &[from], false, Cut::Whole);
                b.ops().add("experts_add", x, o)
            }
        };
        let Some(shared) = &self.shared else { return y };
        let s = match (self.act, shared.sources) {
            (Activation::ReluSquared, [_, up, down]) => plain_mlp(b, "shared_", h, [up, down]),
            (act, sources) => mlp(b, "shared_", h, sources, act),
        };
        let s = match shared.weight {
            SharedWeight::Sigmoid(gate) => return b.add_gated("shared_out", y, s, h, gate),
            SharedWeight::Factor(1.0) => s,
            SharedWeight::Factor(factor) => b.ops().scale("shared_scale", s, factor),
        };
        b.ops().add("shared_out", y, s)
    }
}

/// Gate, up and down of an expert with `inner` columns, in the order that most checkpoints name them.
pub(crate) fn numbered(inner: usize, hidden: usize) -> [Source; 3] {
    [
        tensor("mlp.experts.{}.gate_proj", "ffn_gate_exps", inner),
        tensor("mlp.experts.{}.up_proj", "ffn_up_exps", inner),
        tensor("mlp.experts.{}.down_proj", "ffn_down_exps", hidden),
    ]
}

/// The router's usual names.
pub(crate) fn router(experts: usize) -> Source {
    tensor("mlp.gate", "ffn_gate_inp", experts)
}
