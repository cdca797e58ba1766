//! What a tensor is for, whatever its checkpoint calls it.

/// The place of a tensor in a dense decoder. Layers count from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Token embeddings, `[vocab, hidden]`.
    Embed,
    /// The norm before the head, `[hidden]`.
    FinalNorm,
    /// The output head, `[vocab, hidden]`; absent when tied to the embeddings.
    LmHead,
    /// Norm before attention, `[hidden]`.
    AttnNorm(u32),
    /// Query projection, `[q_heads × head_dim, hidden]`.
    Q(u32),
    /// Key projection, `[kv_heads × head_dim, hidden]`.
    K(u32),
    /// Value projection, `[kv_heads × head_dim, hidden]`.
    V(u32),
    /// Attention output projection, `[hidden, q_heads × head_dim]`.
    O(u32),
    /// Query bias, `[q_heads × head_dim]`.
    QBias(u32),
    /// Key bias, `[kv_heads × head_dim]`.
    KBias(u32),
    /// Value bias, `[kv_heads × head_dim]`.
    VBias(u32),
    /// Per-head query norm, `[head_dim]`.
    QNorm(u32),
    /// Per-head key norm, `[head_dim]`.
    KNorm(u32),
    /// Norm before the MLP, `[hidden]`.
    MlpNorm(u32),
    /// Gate projection, `[intermediate, hidden]`.
    Gate(u32),
    /// Up projection, `[intermediate, hidden]`.
    Up(u32),
    /// Down projection, `[hidden, intermediate]`.
    Down(u32),
}

/// A role within a layer, before it is given a number.
type InLayer = fn(u32) -> Role;

/// (Hugging Face, GGUF, role) of tensors outside the layers.
const GLOBAL: [(&str, &str, Role); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight", Role::Embed),
    ("model.norm.weight", "output_norm.weight", Role::FinalNorm),
    ("lm_head.weight", "output.weight", Role::LmHead),
];

/// (Hugging Face, GGUF, role) of tensors inside a layer.
const LAYER: [(&str, &str, InLayer); 14] = [
    ("input_layernorm.weight", "attn_norm.weight", Role::AttnNorm),
    ("self_attn.q_proj.weight", "attn_q.weight", Role::Q),
    ("self_attn.k_proj.weight", "attn_k.weight", Role::K),
    ("self_attn.v_proj.weight", "attn_v.weight", Role::V),
    ("self_attn.o_proj.weight", "attn_output.weight", Role::O),
    ("self_attn.q_proj.bias", "attn_q.bias", Role::QBias),
    ("self_attn.k_proj.bias", "attn_k.bias", Role::KBias),
    ("self_attn.v_proj.bias", "attn_v.bias", Role::VBias),
    ("self_attn.q_norm.weight", "attn_q_norm.weight", Role::QNorm),
    ("self_attn.k_norm.weight", "attn_k_norm.weight", Role::KNorm),
    ("post_attention_layernorm.weight", "ffn_norm.weight", Role::MlpNorm),
    ("mlp.gate_proj.weight", "ffn_gate.weight", Role::Gate),
    ("mlp.up_proj.weight", "ffn_up.weight", Role::Up),
    ("mlp.down_proj.weight", "ffn_down.weight", Role::Down),
];

impl Role {
    /// The role of a tensor of that name in either naming scheme, `None` for a name that no
    /// dense decoder has.
    pub fn parse(name: &str) -> Option<Self> {
        if let Some((_, _, role)) = GLOBAL.iter().find(|(hf, gguf, _)| name == *hf || name == *gguf)
        {
            return Some(*role);
        }
        let (rest, gguf) = match name.strip_prefix("blk.") {
            Some(rest) => (rest, true),
            None => (name.strip_prefix("model.layers.")?, false),
        };
        let (number, within) = rest.split_once('.')?;
        // "+1" and "01" are numbers to the parser but no layer's name.
        let layer: u32 = number.parse().ok().filter(|n: &u32| n.to_string() == number)?;
        let matches =
            |(hf, ggml, _): &&(&str, &str, InLayer)| within == if gguf { *ggml } else { *hf };
        LAYER.iter().find(matches).map(|(_, _, role)| role(layer))
    }

    /// The layer this tensor belongs to, `None` outside the layers.
    pub fn layer(self) -> Option<u32> {
        use Role::*;
        match self {
            Embed | FinalNorm | LmHead => None,
            AttnNorm(n) | Q(n) | K(n) | V(n) | O(n) | QBias(n) | KBias(n) | VBias(n) | QNorm(n)
            | KNorm(n) | MlpNorm(n) | Gate(n) | Up(n) | Down(n) => Some(n),
        }
    }

    /// The name in a Hugging Face checkpoint.
    pub fn hf_name(self) -> String {
        match self.names() {
            (hf, _, None) => hf.to_owned(),
            (hf, _, Some(layer)) => format!("model.layers.{layer}.{hf}"),
        }
    }

    /// The name in a GGUF file.
    pub fn gguf_name(self) -> String {
        match self.names() {
            (_, gguf, None) => gguf.to_owned(),
            (_, gguf, Some(layer)) => format!("blk.{layer}.{gguf}"),
        }
    }

    fn names(self) -> (&'static str, &'static str, Option<u32>) {
        let layer = self.layer();
        let mut all = GLOBAL.iter().map(|&(hf, gguf, role)| (hf, gguf, role)).chain(
            LAYER.iter().map(|&(hf, gguf, role)| (hf, gguf, role(layer.unwrap_or_default()))),
        );
        let (hf, gguf, _) = all.find(|&(_, _, role)| role == self).expect("the tables are whole");
        (hf, gguf, layer)
    }

    /// Whether rows of this tensor are query or key rows, whose order [`RopeLayout`] describes.
    pub fn is_rotated(self) -> bool {
        matches!(self, Role::Q(_) | Role::K(_) | Role::QBias(_) | Role::KBias(_))
    }
}

/// Whether a tensor that has no [`Role`] may be left unread: buffers that old exporters wrote and
/// frequency factors that [`crate::config::ModelConfig`] has already taken in.
pub fn is_ignorable(name: &str) -> bool {
    name == "rope_freqs.weight"
        || name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn_rot_embd")
        || name.ends_with(".self_attn.masked_bias")
}

/// Order of the rows of one head in query and key weights.
///
/// Rotary embedding turns pairs of elements. Hugging Face pairs element `i` with `i + d/2`; the
/// `llama` architecture of GGUF pairs `2i` with `2i + 1` and stores the rows accordingly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeLayout {
    /// First half of the head against the second: what Dacapo computes with.
    Halves,
    /// Even rows against odd ones: to be read in the order of [`RopeLayout::stored_row`].
    Interleaved,
}

impl RopeLayout {
    /// The row of the checkpoint that holds row `row` of the [`RopeLayout::Halves`] order.
    pub fn stored_row(self, row: usize, head_dim: usize) -> usize {
        match self {
            RopeLayout::Halves => row,
            RopeLayout::Interleaved => {
                let (head, within) = (row / head_dim, row % head_dim);
                let (half, i) = (within / (head_dim / 2), within % (head_dim / 2));
                head * head_dim + 2 * i + half
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_schemes_name_every_role() {
        for (_, _, role) in GLOBAL {
            assert_eq!(Role::parse(&role.hf_name()), Some(role));
            assert_eq!(Role::parse(&role.gguf_name()), Some(role));
        }
        for (_, _, role) in LAYER {
            let role = role(17);
            assert_eq!(role.layer(), Some(17));
            assert_eq!(Role::parse(&role.hf_name()), Some(role));
            assert_eq!(Role::parse(&role.gguf_name()), Some(role));
        }
        let strange = [
            "blk.0.self_attn.q_proj.weight",
            "model.layers.+1.mlp.up_proj.weight",
            "model.layers.01.mlp.up_proj.weight",
            "model.layers.99999999999.mlp.up_proj.weight",
            "model.layers..mlp.up_proj.weight",
            "blk.1.ffn_gate_exps.weight",
        ];
        for name in strange {
            assert_eq!(Role::parse(name), None, "{name}");
        }
    }

    #[test]
    fn interleaved_rows_are_a_permutation_within_each_head() {
        // What the converter does: view the head as (2, d/2), swap the two, flatten.
        let (heads, d) = (3, 8);
        let mut stored = vec![0; heads * d];
        for head in 0..heads {
            for half in 0..2 {
                for i in 0..d / 2 {
                    stored[head * d + i * 2 + half] = head * d + half * (d / 2) + i;
                }
            }
        }
        for row in 0..heads * d {
            assert_eq!(stored[RopeLayout::Interleaved.stored_row(row, d)], row);
            assert_eq!(RopeLayout::Halves.stored_row(row, d), row);
        }
    }
}
