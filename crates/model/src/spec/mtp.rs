//! A layer of the model's own drafts: one that was trained with it to predict the token after the next (`mtp.…` in the checkpoint, with
//! the names of Qwen3-Next): Llama's block, or what the model's own decoder says. For the token at position p + 1 it joins that token's embedding with the model's last state at p, and for further
//! drafts with its own. Embedding and head are the model's.

use super::{Ask, Beside, Drafting};
use crate::LoadError;
use crate::blocks::{self, Attention};
use crate::builder::{Builder, Source, Written, tensor};
use crate::config::{ModelConfig, Rope};
use crate::families::Decoder;
use crate::open::OpenModel;
use device::op::Activation;
use device::step::FeatureShape;
use graph::program::{Drafter, ValueId};
use std::sync::Arc;

pub(super) struct Mtp;

impl Drafting for Mtp {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn attach(&self, verifier: &mut Written, ask: &Ask<'_>) -> Result<Option<Beside>, LoadError> {
        let wrong = |problem| LoadError::SpecModel { method: self.name(), problem };
        if ask.source.is_some() {
            return Err(wrong("needs no other model: its layer is part of the model"));
        }
        let mut model = OpenModel::open(ask.own)?;
        if !model.has("mtp.fc.weight") {
            return Err(wrong(
                "needs a model with a layer for it: there is no tensor mtp.fc.weight",
            ));
        }
        let own = model.config.decoder.clone();
        let rope = own.ropes().into_iter().next();
        let rope = rope.ok_or(wrong("needs a model with rotations"))?;
        let width = verifier.program.tap_last()?;
        let head_norms = model.has("mtp.layers.0.self_attn.q_norm.weight");
        (model.config.root, model.config.layers) = ("mtp.".into(), 1);
        let [feed, first, next] = [Part::Feed, Part::First, Part::Next].map(|part| {
            let (rope, own) = (rope.clone(), own.clone());
            let layer = Layer { part, rope, head_norms, own };
            model.config.decoder = Arc::new(layer);
            let Ask { target, numerics, precision, context, .. } = *ask;
            model.write_drafter(&verifier.program, target, numerics, precision, context)
        });
        let (feed, first, next) = (feed?, first?, next?);
        let (dtype, ids) = (ask.precision.act, None);
        let features = FeatureShape { token: width, drafted: width, dtype, ids };
        let drafter = Drafter::reading(feed.program, first.program.clone(), next.program, features);
        verifier.program = verifier.program.clone().with_drafter(drafter)?;
        Ok(Some(Beside { model, written: first, ids: None }))
    }
}

/// Which of its programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Keys and values of the tokens of a step that ran.
    Feed,
    /// The first draft.
    First,
    /// Any other.
    Next,
}

/// One of its programs.
#[derive(Debug)]
struct Layer {
    part: Part,
    rope: Rope,
    head_norms: bool,
    /// The model's decoder.
    own: Arc<dyn Decoder>,
}

impl Layer {
    /// The weight of a norm of the residual stream.
    fn norm(&self, config: &ModelConfig, name: &'static str) -> Source {
        let source = tensor(name, "", config.hidden);
        if self.own.norms_less_one() { source.less_one() } else { source }
    }

    /// The embedding and the state, brought together to one row.
    fn joined(&self, config: &ModelConfig, b: &mut Builder<'_>) -> Option<ValueId> {
        let hidden = config.hidden;
        let h = match self.part {
            Part::Next => b.ops().recall("states", hidden as u32, true),
            Part::First => b.ops().recall("states", hidden as u32, false),
            Part::Feed => b.ops().follow("states", hidden as u32),
        };
        let table = b.shared("embed")?;
        let e = b.ops().embed("embed", table);
        Some(b.layer(0, |b| {
            let norm = |name| self.norm(config, name);
            let e = b.rms_norm("embed_norm", e, norm("/mtp.pre_fc_norm_embedding"));
            let h = b.rms_norm("state_norm", h, norm("/mtp.pre_fc_norm_hidden"));
            let fc = [tensor("/mtp.fc", "", hidden)];
            let e = b.linear_columns("fc_embed", e, &fc, (0, 2 * hidden));
            let h = b.linear_columns("fc_state", h, &fc, (hidden, 2 * hidden));
            b.ops().add("joined", e, h)
        }))
    }

    fn layer(&self, config: &ModelConfig, b: &mut Builder<'_>, x: ValueId) -> ValueId {
        let fed = self.part == Part::Feed;
        if let Some(x) = self.own.next_layer(config, b, x, fed) {
            return x;
        }
        let rope = b.rope(&self.rope);
        let norm = |name| self.norm(config, name);
        let h = b.rms_norm("attn_norm", x, norm("input_layernorm"));
        let options = Attention { head_norms: self.head_norms, ..Attention::new(config, rope) };
        let a = blocks::attention(config, b, h, &options);
        if fed {
            return a;
        }
        let o = blocks::output(config, b, a);
        let x = b.ops().add("attn_out", x, o);
        let h = b.rms_norm("mlp_norm", x, norm("post_attention_layernorm"));
        let d = blocks::gated_mlp(config, b, h, Activation::Silu);
        b.ops().add("mlp_out", x, d)
    }
}

impl Decoder for Layer {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let Some(x) = self.joined(config, b) else { return };
        let x = b.layer(0, |b| self.layer(config, b, x));
        if self.part == Part::Feed {
            return;
        }
        let h = b.rms_norm("norm", x, self.norm(config, "/mtp.norm"));
        b.ops().keep("keep", h);
        let Some(head) = b.shared("lm_head").or_else(|| b.shared("embed")) else { return };
        let logits = b.ops().logits("lm_head", h, head);
        b.ops().propose("propose", logits, 1);
    }

    /// The rest of the files is the model's; the first draft needs everything else.
    fn ignores(&self, tensor: &str) -> bool {
        self.part != Part::First || !tensor.starts_with("mtp.")
    }
}
