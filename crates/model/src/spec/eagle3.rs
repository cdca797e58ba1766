//! An EAGLE-3 head drafts: one layer that was trained to continue the model's hidden states. For the token at position p + 1 it
//! reads that token's embedding and what entered three of the model's layers at p; for further drafts, its own last
//! state. It may know only the likelier tokens. Its keys and values have pages like any layer's.

use super::{Ask, Beside, Drafting};
use crate::LoadError;
use crate::builder::{Builder, Written, tensor};
use crate::config::{HeadConfig, ModelConfig, Rope};
use crate::families::Decoder;
use crate::open::OpenModel;
use crate::weights::Cut;
use device::op::{Activation, Lookup};
use device::step::FeatureShape;
use graph::program::{Drafter, ValueId};
use std::sync::Arc;

pub(super) struct Eagle3;

impl Drafting for Eagle3 {
    fn name(&self) -> &'static str {
        "eagle3"
    }

    fn attach(&self, verifier: &mut Written, ask: &Ask<'_>) -> Result<Option<Beside>, LoadError> {
        let wrong = |problem| LoadError::SpecModel { method: self.name(), problem };
        let source = ask.source.ok_or(wrong("needs a head: add --spec-model"))?;
        let mut model = OpenModel::open(source)?;
        let head = model.config.head.clone();
        let head = head.ok_or(wrong("needs a head: this model has no draft_vocab_size"))?;
        let (own, wanted) = (model.config.vocab, ask.verifier.vocab);
        if own != wanted {
            return Err(LoadError::Vocabulary { own, wanted });
        }
        let shares = !model.has("embed_tokens.weight");
        if shares && model.config.hidden != ask.verifier.hidden {
            return Err(wrong("needs an embedding: its width is not the model's"));
        }
        let taps = head.taps.clone().unwrap_or_else(|| usual_taps(ask.verifier.layers as u32));
        let width = verifier.program.tap(&taps)?;
        let ids = model.drafted_ids(head.vocab, wanted)?;
        let rope = model.config.decoder.ropes().into_iter().next();
        let rope = rope.ok_or(wrong("needs a head with rotations"))?;
        (model.config.vocab, model.config.tied) = (head.vocab, false);
        let [feed, first, next] = [Part::Feed, Part::First, Part::Next].map(|part| {
            let (rope, head) = (rope.clone(), head.clone());
            let layer = Layer { part, width, vocab: wanted, shares, rope, head };
            model.config.decoder = Arc::new(layer);
            let Ask { target, numerics, precision, context, .. } = *ask;
            model.write_drafter(&verifier.program, target, numerics, precision, context)
        });
        let (feed, mut first, next) = (feed?, first?, next?);
        let fed = feed.weights.iter().filter(|weight| !first.weights.contains(weight));
        let fed: Vec<_> = fed.cloned().collect();
        first.weights.extend(fed);
        let features = FeatureShape {
            token: width,
            drafted: model.config.hidden as u32,
            dtype: ask.precision.act,
            ids: ids.as_ref().map(|ids| ids.len() as u32),
        };
        let drafter = Drafter::reading(feed.program, first.program.clone(), next.program, features);
        verifier.program = verifier.program.clone().with_drafter(drafter)?;
        Ok(Some(Beside { model, written: first, ids }))
    }
}

/// The layers whose inputs heads read if nothing else is said: an early, a middle and a late one.
fn usual_taps(layers: u32) -> Vec<u32> {
    vec![2, layers / 2, layers.saturating_sub(3)]
}

/// Which of the head's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Keys and values of the tokens of a step that ran.
    Feed,
    /// The first draft.
    First,
    /// Any other.
    Next,
}

/// One of the head's programs.
#[derive(Debug)]
struct Layer {
    part: Part,
    /// Columns of what is kept of the model's states.
    width: u32,
    /// Tokens of the model.
    vocab: usize,
    /// Whether the model's embedding is the head's, too.
    shares: bool,
    rope: Rope,
    head: HeadConfig,
}

impl Layer {
    /// What the head continues: the model's states brought to its width, or its own last one. They are brought to it once, when
    /// the head is fed.
    fn states(&self, config: &ModelConfig, b: &mut Builder<'_>) -> ValueId {
        let hidden = config.hidden as u32;
        match self.part {
            Part::Next => b.ops().recall("states", hidden, true),
            Part::First => b.ops().recall("states", hidden, false),
            Part::Feed => {
                let kept = b.ops().kept_states("kept", self.width);
                let fc = [tensor("/fc", "", config.hidden)];
                let states = b.linear("fc", kept, &fc, false, Cut::Whole);
                b.ops().follow_made("states", states)
            }
        }
    }

    fn embed(&self, config: &ModelConfig, b: &mut Builder<'_>) -> ValueId {
        match b.shared("embed").filter(|_| self.shares) {
            Some(table) => b.ops().embed("embed", table),
            None => {
                let table = tensor("/embed_tokens", "", self.vocab);
                b.embed_by("embed", table, config.hidden, Lookup::Token)
            }
        }
    }

    fn layer(&self, config: &ModelConfig, b: &mut Builder<'_>, h: ValueId, e: ValueId) -> ValueId {
        let rope = b.rope(&self.rope);
        let (hidden, dim) = (config.hidden, config.head_dim);
        let norm = |name| tensor(name, "", hidden);
        let e = b.rms_norm("embed_norm", e, norm("/midlayer.input_layernorm"));
        let n = b.rms_norm("hidden_norm", h, norm("/midlayer.hidden_norm"));
        let sources = [
            tensor("/midlayer.self_attn.q_proj", "", config.q_width()).rotated(dim),
            tensor("/midlayer.self_attn.k_proj", "", config.kv_width()).rotated(dim),
            tensor("/midlayer.self_attn.v_proj", "", config.kv_width()),
        ];
        // Both are columns of one matrix.
        let of_embed = b.linear_columns("qkv_embed", e, &sources, (0, 2 * hidden));
        let of_state = b.linear_columns("qkv_state", n, &sources, (hidden, 2 * hidden));
        let qkv = b.ops().add("qkv", of_embed, of_state);
        let qkv = b.rope_kv("rope", qkv, None, None, rope);
        if self.part == Part::Feed {
            return qkv;
        }
        let a = b.ops().attention("attn", qkv, (dim as f32).powf(-0.5), None);
        let o = tensor("/midlayer.self_attn.o_proj", "", hidden);
        let o = b.linear("o", a, &[o], false, Cut::Cols);
        let x = b.ops().add("attn_out", if self.head.norm_first { n } else { h }, o);
        let m = b.rms_norm("mlp_norm", x, norm("/midlayer.post_attention_layernorm"));
        let both = ["/midlayer.mlp.gate_proj", "/midlayer.mlp.up_proj"];
        let m = b.gate_up("gate_up", m, both.map(|name| tensor(name, "", config.intermediate)));
        let m = b.ops().gate_mul("act", m, Activation::Silu);
        let down = tensor("/midlayer.mlp.down_proj", "", hidden);
        let m = b.linear("down", m, &[down], false, Cut::Cols);
        b.ops().add("mlp_out", x, m)
    }
}

impl Decoder for Layer {
    fn ropes(&self) -> Vec<Rope> {
        vec![self.rope.clone()]
    }

    fn build(&self, config: &ModelConfig, b: &mut Builder<'_>) {
        let h = self.states(config, b);
        let e = self.embed(config, b);
        let x = b.layer(0, |b| self.layer(config, b, h, e));
        if self.part == Part::Feed {
            return;
        }
        b.ops().keep("keep", x);
        let h = b.rms_norm("norm", x, tensor("/norm", "", config.hidden));
        let logits = b.logits(h);
        b.ops().propose("propose", logits, 1);
    }

    /// Tables of tokens are read apart from weights; the first draft needs every weight but one.
    fn ignores(&self, tensor: &str) -> bool {
        self.part != Part::First || matches!(tensor, "d2t" | "t2d") || tensor.starts_with("fc.")
    }
}
