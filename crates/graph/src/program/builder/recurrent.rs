//! Ops of recurrent layers.

use super::{ProgramBuilder, Value, ValueId, WeightRef};
use crate::program::{Carry, CarryId, Gate, More, Rule};
use device::DType;
use device::op::{Conv, Gated, GatedNorm, Scan};
use device::operand::Unset;

/// The heads of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Heads that values have.
    pub heads: u32,
    /// Heads that keys and queries have.
    pub groups: u32,
    /// Groups take turns: head h has the key of group h mod `groups`.
    pub turns: bool,
    /// Elements of a key.
    pub key: u32,
    /// Elements of a value.
    pub value: u32,
}

impl ProgramBuilder {
    fn carry(&mut self, cols: u32, dtype: DType, more: More) -> CarryId {
        self.program.carries.push(Carry { cols, dtype, more });
        CarryId(self.program.carries.len() as u32 - 1)
    }

    /// A causal convolution of columns of `x` from `from` on, and SiLU: `w` has a row of taps for each channel.
    pub fn conv(
        &mut self,
        name: &str,
        (x, from): (ValueId, u32),
        w: WeightRef,
        bias: Option<WeightRef>,
    ) -> ValueId {
        let Value { rows, dtype, .. } = *self.program.value(x);
        let (channels, taps) = (w.rows, w.cols);
        let w = self.weight(w);
        let bias = bias.map(|bias| self.weight(bias));
        let carry = self.carry(channels * taps.saturating_sub(1), dtype, More::Inputs(channels));
        let (state, step_rows, single) = (Unset, Unset, Unset);
        self.make(name, rows, channels, dtype, |y| Conv {
            x,
            from,
            w,
            bias,
            carry,
            y,
            state,
            rows: step_rows,
            single,
            q_len: Unset,
        })
    }

    /// A matrix of each head, carried from token to token. `vectors` are of each head: how fast it forgets, what is added
    /// to its decay, and how much of the value is added to the result.
    pub fn scan(
        &mut self,
        name: &str,
        x: ValueId,
        (gates, from): (ValueId, u32),
        vectors: (WeightRef, WeightRef, Option<WeightRef>),
        rule: Rule,
        heads: Heads,
    ) -> ValueId {
        let Value { rows, dtype, .. } = *self.program.value(x);
        let Heads { heads, groups, turns, key, value } = heads;
        let (a, dt, skip) = vectors;
        let (a, dt) = (self.weight(a), self.weight(dt));
        let skip = skip.map(|skip| self.weight(skip));
        let log = More::Log(Scan::log_cols(heads, groups, key, value));
        let carry = self.carry(heads * key * value, DType::F32, log);
        self.make(name, rows, heads * value, dtype, |y| Scan {
            x,
            gates,
            from,
            a,
            dt,
            skip,
            rule,
            heads,
            groups,
            turns,
            key,
            value,
            carry,
            y,
            state: Unset,
            rows: Unset,
            single: Unset,
            q_len: Unset,
            scratch: Unset,
            pick: Unset,
        })
    }

    /// `x` times the gate of columns of `z` from `from` on. With a norm (weight, epsilon, columns that are normalised
    /// together) of `x` before that, or `after` it of the products.
    pub fn gated(
        &mut self,
        name: &str,
        x: ValueId,
        (z, from): (ValueId, u32),
        gate: Gate,
        norm: Option<(WeightRef, f32, u32)>,
        after: bool,
    ) -> ValueId {
        let Value { rows, cols, dtype, .. } = *self.program.value(x);
        let norm = norm.map(|(weight, eps, group)| {
            let norm = self.norm(weight, eps);
            GatedNorm { norm, group, after }
        });
        let live = Unset;
        self.make(name, rows, cols, dtype, |y| Gated { x, z, from, gate, norm, y, live })
    }
}
