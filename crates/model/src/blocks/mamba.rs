//! Mamba-2 layers: a state space of each head that is carried from token to token instead of keys and values.

use super::{last_token, last_tokens};
use crate::Builder;
use crate::builder::tensor;
use crate::config::{Fields, ModelConfig};
use crate::weights::Cut;
use formats::{Result, limits};
use graph::program::{Heads, Rule, ValueId};

/// What a family calls the fields of its `config.json`; in GGUF files they have the same names in all families.
pub(crate) struct FieldNames {
    pub(crate) heads: &'static str,
    pub(crate) groups: &'static str,
    /// Elements of a state.
    pub(crate) state: &'static str,
    pub(crate) head_dim: &'static str,
    pub(crate) taps: &'static str,
    pub(crate) conv_bias: &'static str,
}

/// What a family calls the tensors of a layer outside GGUF files.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorNames {
    pub(crate) input: &'static str,
    pub(crate) conv: &'static str,
    pub(crate) a: &'static str,
    pub(crate) dt: &'static str,
    pub(crate) skip: &'static str,
    pub(crate) norm: &'static str,
    pub(crate) output: &'static str,
}

/// Names in GGUF metadata.
const HEADS: &str = "ssm.time_step_rank";
const GROUPS: &str = "ssm.group_count";
const STATE: &str = "ssm.state_size";
const INNER: &str = "ssm.inner_size";
const TAPS: &str = "ssm.conv_kernel";

/// The numbers of Mamba-2 layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mamba {
    heads: Heads,
    taps: usize,
    conv_bias: bool,
    /// Steps are at least this long.
    least: f32,
    names: TensorNames,
}

impl Mamba {
    /// The fields of layers. `usual` elements of a head where the configuration does not say.
    pub(crate) fn read(
        f: &Fields<'_>,
        fields: &FieldNames,
        names: TensorNames,
        usual: impl FnOnce(usize) -> usize,
        least: f64,
    ) -> Result<Mamba> {
        let wide = limits::WIDTH as usize;
        let within = |name: &str, found: usize, most: usize, unit: usize| match (1..=most)
            .contains(&found)
            && found.is_multiple_of(unit)
        {
            true => Ok(found),
            false => Err(f.invalid(name, found, format!("a multiple of {unit} up to {most}"))),
        };
        let name = f.called(fields.heads, HEADS);
        let heads = within(&name, f.required(fields.heads, HEADS)?, wide, 1)?;
        let name = f.called(fields.groups, GROUPS);
        let groups = within(&name, f.size(fields.groups, GROUPS)?.unwrap_or(1), heads, 1)?;
        if !heads.is_multiple_of(groups) {
            return Err(f.invalid(&name, groups, format!("a part of {heads}")));
        }
        let name = f.called(fields.state, STATE);
        let state = within(&name, f.required(fields.state, STATE)?, 256, 8)?;
        let value = match f.text(fields.head_dim, "") {
            Ok(Some("auto")) => None,
            _ => f.size(fields.head_dim, "")?,
        };
        let value = match f.is_gguf() {
            true => inner_of_head(f, heads)?,
            false => value.unwrap_or_else(|| usual(heads)),
        };
        let value = within(&f.called(fields.head_dim, INNER), value, wide, 8)?;
        let all = 2 * heads.saturating_mul(value) + 2 * groups.saturating_mul(state) + heads;
        within("columns of a Mamba layer", all, wide, 1)?;
        let name = f.called(fields.taps, TAPS);
        let taps = within(&name, f.size(fields.taps, TAPS)?.unwrap_or(4), 8, 1)?;
        if taps < 2 {
            return Err(f.invalid(&name, taps, "2 to 8"));
        }
        if !(least.is_finite() && least >= 0.0) {
            return Err(f.invalid("the shortest step", least, "a finite number from 0 on"));
        }
        let [heads, groups, key, value] = [heads, groups, state, value].map(|n| n as u32);
        Ok(Mamba {
            heads: Heads { heads, groups, turns: false, key, value },
            taps,
            conv_bias: match f.checkpoint() {
                Some(file) => file.tensors().any(|t| t.name.ends_with(".ssm_conv1d.bias")),
                None => f.bool(fields.conv_bias, "")?.unwrap_or(true),
            },
            least: least as f32,
            names,
        })
    }

    /// What a layer makes of `h`, and `stream`: in the last layer of the last token of each row only.
    pub(crate) fn build(
        &self,
        config: &ModelConfig,
        b: &mut Builder<'_>,
        h: ValueId,
        stream: ValueId,
    ) -> (ValueId, ValueId) {
        let Heads { heads, groups, key, value, .. } = self.heads;
        let [heads, groups, key, value] = [heads, groups, key, value].map(|n| n as usize);
        let (values, channels) = (heads * value, heads * value + 2 * groups * key);
        let TensorNames { input, conv, a, dt, skip, norm, output } = self.names;
        // Gates, channels of the convolution, steps.
        let source = tensor(input, "ssm_in", values + channels + heads);
        let x = b.linear("mamba_in", h, &[source], false, Cut::Whole);
        let conv = tensor(conv, "ssm_conv1d", channels);
        let c = b.conv("conv", (x, values), conv, self.taps, self.conv_bias);
        let a = tensor(a, "ssm_a", heads).decay();
        let dt = tensor(dt, "ssm_dt.bias", heads);
        let vectors = (a, dt, Some(tensor(skip, "ssm_d", heads)));
        let rule = Rule::StateSpace { least: self.least };
        let o = b.scan("scan", c, (x, values + channels), vectors, rule, self.heads);
        let (o, stream) = last_tokens(b, o, stream);
        let x = last_token(b, "gate_last", x);
        let norm = (tensor(norm, "ssm_norm", values).folded(groups), values / groups);
        let o = b.gated_norm("scan_norm", o, (x, 0), norm, true);
        let source = tensor(output, "ssm_out", config.hidden);
        (b.linear("mamba_out", o, &[source], false, Cut::Cols), stream)
    }
}

/// Elements of a head of a GGUF file, which says those of all heads.
pub(super) fn inner_of_head(f: &Fields<'_>, heads: usize) -> Result<usize> {
    let inner = f.required("", INNER)?;
    match heads > 0 && inner.is_multiple_of(heads) {
        true => Ok(inner / heads),
        false => Err(f.invalid(&f.called("", INNER), inner, format!("a multiple of {heads}"))),
    }
}
