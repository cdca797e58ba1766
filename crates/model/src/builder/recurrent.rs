//! Ops of recurrent layers with their weights.

use super::{Arrange, Builder, Cut, Source, WeightUse};
use graph::program::{Gate, Heads, Rule, ValueId};

impl Builder<'_> {
    /// A causal convolution of columns of `x` from `from` on, a channel for each row of `source`.
    pub(crate) fn conv(
        &mut self,
        name: &str,
        (x, from): (ValueId, usize),
        source: Source,
        taps: usize,
        bias: bool,
    ) -> ValueId {
        let parts = vec![self.part(&source.stacked(), ".weight")];
        let w = self.weight(name, parts, taps, Arrange::Stacked, WeightUse::Heads, Cut::Whole);
        let bias_name = format!("{name}_bias");
        let bias = bias.then(|| self.vector(&bias_name, &[source], ".bias", Cut::Whole));
        self.program.conv(name, (x, from as u32), w, bias)
    }

    /// A matrix of each head, carried from token to token; `sources` are the vectors of heads.
    pub(crate) fn scan(
        &mut self,
        name: &str,
        x: ValueId,
        (gates, from): (ValueId, usize),
        sources: (Source, Source, Option<Source>),
        rule: Rule,
        heads: Heads,
    ) -> ValueId {
        let (a, dt, skip) = sources;
        let a = self.vector(&format!("{name}_a"), &[a], "", Cut::Whole);
        let dt = self.vector(&format!("{name}_dt"), &[dt], "", Cut::Whole);
        let skip_name = format!("{name}_skip");
        let skip = skip.map(|skip| self.vector(&skip_name, &[skip], "", Cut::Whole));
        self.program.scan(name, x, (gates, from as u32), (a, dt, skip), rule, heads)
    }

    /// A norm over groups of columns of `x`, before or `after` each is multiplied by the SiLU of one of `z`.
    pub(crate) fn gated_norm(
        &mut self,
        name: &str,
        x: ValueId,
        (z, from): (ValueId, usize),
        (source, group): (Source, usize),
        after: bool,
    ) -> ValueId {
        let weight = self.vector(name, &[source], ".weight", Cut::Whole);
        let norm = Some((weight, self.config.norm_eps, group as u32));
        self.program.gated(name, x, (z, from as u32), Gate::Silu, norm, after)
    }
}
