//! A layer of experts: `y = residual + Σ weight · down_e(act(gate_e(x)) · up_e(x))` over the experts e that [`Route`] chose
//! for a token, in the order of its choice. act(…)·up is rounded to `x`'s dtype; a device may round an expert's output to it,
//! too, before the sum, which is in f32 and rounded once, when storing. No token is dropped, however many one expert
//! gets. Rows past the `live` count may be left as they are. Both GEMMs may have a bias, in the order of the rows of their
//! weights: that of `down` is a part of an expert's output, which the weight multiplies.
//!
//! The weights of all experts are one matrix each. Within an expert's part of `gate_up`, rows of gate and up take turns of
//! eight: gate 0 to 7, up 0 to 7, gate 8 to 15, … With [`Activation::ReluSquared`] there is no gate: act(up_e(x)) takes the
//! place of act(gate_e(x)) · up_e(x), and `gate_up` has the rows of up alone, in their order.
//!
//! [`Route`]: super::route::Route

pub(crate) mod cuda;
mod fast;
mod shape;
pub(crate) mod variant;

use super::linear::reference_sums;
use super::{
    Access, Bindable, Contract, Named, Reuse, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_fit, require_float, require_scratch, require_vector, require_weights, require_word,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::pack;
use crate::cpu::view::{Matrix, Words, round_to};
use crate::op::Activation;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::variant::{ExpertsVariant, Pick, Variant};
use crate::{DType, Result, Span, Tensor, scaled};
use serde::{Deserialize, Serialize};

/// Rows of gate, then as many of up.
pub(crate) const TURN: usize = 8;

/// Limits of gate and up, and what becomes of them: `gate` at most `limit`, `up` within ±`limit`, then
/// `(up + 1) · gate / (1 + e^(−alpha · gate))`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Clamp {
    /// Multiplies the gate in the sigmoid.
    pub alpha: f32,
    /// The largest gate, and the largest magnitude of up.
    pub limit: f32,
}

impl Clamp {
    /// The reference: in f64, rounded once.
    fn apply(self, gate: f32, up: f32) -> f32 {
        let (gate, up) =
            (f64::from(gate.min(self.limit)), f64::from(up.clamp(-self.limit, self.limit)));
        ((up + 1.0) * gate / (1.0 + (-f64::from(self.alpha) * gate).exp())) as f32
    }
}

/// Runs the chosen experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Experts<O: Operands = Bound> {
    /// rows × k activations.
    pub x: O::Value,
    /// rows × 2·top words: what [`crate::op::Route`] made.
    pub choice: O::Value,
    /// How many experts there are.
    pub experts: u32,
    /// (experts · 2n) × k weights; without a gate (experts · n) × k.
    pub gate_up: O::Weight,
    /// (experts · k) × n weights.
    pub down: O::Weight,
    /// One element for each row of `gate_up`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gate_up_bias: Option<O::Weight>,
    /// One element for each row of `down`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub down_bias: Option<O::Weight>,
    /// Applied to the gate, or to up where there is none.
    pub act: Activation,
    /// In place of act(gate)·up, where gates are limited; only with SiLU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamp: Option<Clamp>,
    /// rows × k, added to the sum.
    pub residual: Option<O::Value>,
    /// rows × k.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
    /// Counts what the experts do: [`Experts::load_bytes`], zero at the start. 64 bits for each expert's tokens, then for
    /// the experts that had any, added up over all steps, then for the steps.
    #[serde(skip_serializing_if = "unset")]
    pub load: O::Late<Option<Span>>,
    /// Room for the plan of a step and for what lies between the two GEMMs; the target says how much.
    #[serde(skip_serializing_if = "unset")]
    pub scratch: O::Late<Option<Span>>,
    /// Whether the router before it has made the plan in the scratch.
    #[serde(skip_serializing_if = "unset")]
    pub planned: O::Late<bool>,
    /// Which kernel.
    #[serde(skip_serializing_if = "unset")]
    pub pick: O::Late<Pick<ExpertsVariant>>,
}

impl<O: Operands> Bindable for Experts<O> {
    type O = O;
    type Bound = Experts;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.choice, Access::Read));
        visit(Operand::Weight(&mut self.gate_up));
        visit(Operand::Weight(&mut self.down));
        for bias in self.gate_up_bias.iter_mut().chain(&mut self.down_bias) {
            visit(Operand::Weight(bias));
        }
        if let Some(residual) = &mut self.residual {
            visit(Operand::Value(residual, Access::Read));
        }
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Experts, B::Error> {
        Ok(Experts {
            x: to.value(self.x)?,
            choice: to.value(self.choice)?,
            experts: self.experts,
            gate_up: to.weight(self.gate_up)?,
            down: to.weight(self.down)?,
            gate_up_bias: self.gate_up_bias.map(|bias| to.weight(bias)).transpose()?,
            down_bias: self.down_bias.map(|bias| to.weight(bias)).transpose()?,
            act: self.act,
            clamp: self.clamp,
            residual: self.residual.map(|residual| to.value(residual)).transpose()?,
            y: to.value(self.y)?,
            live: to.live(self.x),
            load: to.load(self.gate_up),
            scratch: None,
            planned: false,
            pick: Pick::Best,
        })
    }

    fn reuse(&self) -> Option<Reuse<O::Value>> {
        let residual = self.residual.filter(|residual| *residual != self.x)?;
        Some(Reuse { from: residual, to: self.y, must: false })
    }
}

impl Experts {
    /// Experts of a token.
    pub fn top(&self) -> u32 {
        self.choice.cols / 2
    }

    /// Bytes of [`Experts::load`] for so many experts.
    pub fn load_bytes(experts: u32) -> u64 {
        8 * (u64::from(experts) + 2)
    }

    /// The biases it has.
    pub(crate) fn biases(&self) -> impl Iterator<Item = &Tensor> {
        self.gate_up_bias.iter().chain(&self.down_bias)
    }

    /// Outputs of an expert's up, and of its gate if it has one.
    fn inner(&self) -> u32 {
        self.down.cols
    }

    /// Whether experts have a gate.
    pub(crate) fn is_gated(&self) -> bool {
        self.act != Activation::ReluSquared
    }

    /// Rows of an expert in `gate_up`.
    fn up_rows(&self) -> u32 {
        if self.is_gated() { 2 * self.inner() } else { self.inner() }
    }

    /// The weights of all experts that a step of all rows can choose: some if there are few tokens.
    fn chosen_weights(&self) -> u64 {
        let biases = self.biases().map(Tensor::bytes).sum::<u64>();
        let all = self.gate_up.bytes() + self.down.bytes() + biases;
        let most = (u64::from(self.x.rows) * u64::from(self.top())).min(self.experts.into());
        all / u64::from(self.experts) * most
    }
}

impl Contract for Experts {
    fn check(&self) -> Result<()> {
        let (rows, wide) = (self.x.rows, self.x.cols);
        require(self.act.is_epilogue() || !self.is_gated(), Self::NAME, || {
            format!("no kernel applies {} to its sums", self.act.name())
        })?;
        if let Some(Clamp { alpha, limit }) = self.clamp {
            let fit = alpha.is_finite() && limit.is_finite() && limit > 0.0;
            require(fit && self.act == Activation::Silu, Self::NAME, || {
                format!("{} of gates up to {limit} times {alpha}", self.act.name())
            })?;
        }
        for (tensor, what) in [(&self.x, "x"), (&self.y, "y")]
            .into_iter()
            .chain(self.residual.as_ref().map(|residual| (residual, "residual")))
        {
            require_fit(tensor, Self::NAME, what)?;
            require_float(tensor, Self::NAME, what)?;
            require((tensor.rows, tensor.cols) == (rows, wide), Self::NAME, || {
                format!("{what} is {tensor}, not {rows}×{wide}")
            })?;
        }
        require_fit(&self.choice, Self::NAME, "the choice")?;
        let words = self.choice.dtype == DType::U32 && self.choice.stride == self.choice.cols;
        let (pairs, top) = (self.choice.cols.is_multiple_of(2), self.top());
        let fits = pairs && self.choice.rows == rows && (1..=self.experts).contains(&top);
        require(words && fits, Self::NAME, || {
            format!("the choice is {}, not {rows} dense rows of numbers and weights", self.choice)
        })?;
        require_weights(&self.gate_up, Self::NAME, "gate_up")?;
        require_weights(&self.down, Self::NAME, "down")?;
        let inner = self.inner();
        let whole = inner.is_multiple_of(TURN as u32)
            && u64::from(self.gate_up.rows) == u64::from(self.experts) * u64::from(self.up_rows())
            && u64::from(self.down.rows) == u64::from(self.experts) * u64::from(wide)
            && self.gate_up.cols == wide;
        let dense = self.gate_up.stride == self.gate_up.cols && self.down.stride == inner;
        require(whole && dense, Self::NAME, || {
            let (up, down, experts) = (&self.gate_up, &self.down, self.experts);
            format!("{up} and {down} are not {experts} experts of {wide} and a multiple of {TURN}")
        })?;
        for (bias, rows, what) in [
            (&self.gate_up_bias, self.gate_up.rows, "the bias of gate_up"),
            (&self.down_bias, self.down.rows, "the bias of down"),
        ] {
            if let Some(bias) = bias {
                require_vector(bias, rows, Self::NAME, what)?;
            }
        }
        for (w, rows) in [(&self.gate_up, self.up_rows()), (&self.down, wide)] {
            let packed = matches!(w.dtype, DType::P4 | DType::P8);
            require(!packed || rows.is_multiple_of(pack::ROWS as u32), Self::NAME, || {
                format!("packed weights of {rows} rows for an expert are not whole blocks")
            })?;
        }
        if let Some(live) = self.live {
            require_word(live, Self::NAME, "the live count")?;
        }
        require_load(self.load, self.experts, Self::NAME)?;
        require_scratch(self.scratch, Self::NAME)
    }

    fn describe(&self) -> String {
        let (top, all, inner) = (self.top(), self.experts, self.inner());
        let act = if self.clamp.is_some() { "clamped silu" } else { self.act.name() };
        let mul = if self.is_gated() { "·mul" } else { "" };
        let biases = if self.biases().next().is_some() { ", biases" } else { "" };
        let residual = if self.residual.is_some() { " + residual" } else { "" };
        let stored = match self.gate_up.dtype {
            DType::Mxfp4 => " in mxfp4",
            dtype if scaled::is_fp8(dtype) => " in fp8",
            _ => "",
        };
        format!(
            "{top} of {all} experts{stored} {} → {inner} {act}{mul} → {}{biases}{residual}",
            self.x, self.y.cols
        )
    }

    fn traffic(&self) -> Traffic {
        let residual = self.residual.as_ref().map_or(0, Tensor::bytes);
        let values = self.x.bytes() + self.choice.bytes() + self.y.bytes() + residual;
        Traffic { weights: self.chosen_weights(), values }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn in_place(&self) -> Option<(Tensor, Tensor)> {
        self.residual.map(|residual| (residual, self.y))
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        let read = [&self.x, &self.choice, &self.gate_up, &self.down];
        for tensor in read.into_iter().chain(self.biases()) {
            visit(tensor.span, Access::Read);
        }
        if let Some(residual) = &self.residual {
            visit(residual.span, Access::Read);
        }
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        if let Some(load) = self.load.filter(|_| !self.planned) {
            visit(load, Access::Update);
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, if self.planned { Access::Update } else { Access::Write });
        }
        visit(self.y.span, Access::Write);
    }

    fn scratch_bytes(&self, target: &crate::cuda::launch::Target) -> u64 {
        self.cuda_scratch(target)
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        Some(self.pick.map(Variant::Experts))
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        pick.narrow(Variant::experts).map(|pick| self.pick = pick).is_some()
    }

    fn detach(&mut self) {
        (self.live, self.load, self.planned) = (None, None, false);
    }
}

/// Where row `row` of gate or up lies in an expert's part of `gate_up`.
fn gate_row(row: usize, up: bool) -> usize {
    row / TURN * 2 * TURN + if up { TURN } else { 0 } + row % TURN
}

/// That counters of the load, if there are any, have room for so many experts.
pub(crate) fn require_load(load: Option<Span>, experts: u32, op: &str) -> Result<()> {
    let Some(span) = load else { return Ok(()) };
    require_scratch(load, op)?;
    let needed = Experts::load_bytes(experts);
    require(span.len >= needed, op, || {
        format!("the load has {} bytes, and {experts} experts need {needed}", span.len)
    })
}

impl Experts {
    /// Counts a step, given the expert of each assignment.
    fn count(&self, memory: &CpuMemory, chosen: impl Iterator<Item = usize>) {
        let Some(load) = self.load else { return };
        let words = Words::of_span(memory, load);
        let add = |at: usize, more: u64| words.publish_u64(2 * at, words.load_u64(2 * at) + more);
        let mut tokens = vec![0; self.experts as usize];
        chosen.for_each(|expert| tokens[expert] += 1);
        for (expert, &count) in tokens.iter().enumerate().filter(|(_, count)| **count > 0) {
            add(expert, count);
            add(tokens.len(), 1);
        }
        add(tokens.len() + 1, 1);
    }

    /// Token by token, sums in f64.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, y) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.y));
        let residual = self.residual.as_ref().map(|residual| Matrix::new(memory, residual));
        let choice = Words::new(memory, &self.choice);
        let (top, inner, wide) = (self.top() as usize, self.inner() as usize, x.cols);
        let (up, down) = (Matrix::new(memory, &self.gate_up), Matrix::new(memory, &self.down));
        let [up_bias, down_bias] = [&self.gate_up_bias, &self.down_bias]
            .map(|bias| bias.as_ref().map(|bias| Matrix::new(memory, bias)));
        let sums = |w: &Matrix, bias: &Option<Matrix>, rows: usize, expert: usize, x: Vec<f32>| {
            let mut sums = vec![vec![0.0; rows]];
            reference_sums(w, expert * rows..(expert + 1) * rows, &[x], &mut sums);
            let bias = |i| bias.as_ref().map_or(0.0, |bias| bias.get(0, expert * rows + i));
            sums.remove(0)
                .into_iter()
                .enumerate()
                .map(|(i, sum)| sum + bias(i))
                .collect::<Vec<f32>>()
        };
        let mut input = vec![0.0; wide];
        let rows = live_rows(memory, self.live, x.rows);
        let chosen = (0..rows * top).map(|i| choice.get(i / top * 2 * top + i % top) as usize);
        self.count(memory, chosen);
        for row in 0..rows {
            x.read_row(row, &mut input);
            let mut total = vec![0.0f64; wide];
            for place in 0..top {
                let expert = choice.get(row * 2 * top + place) as usize;
                let weight = choice.float(row * 2 * top + top + place);
                let both = sums(&up, &up_bias, self.up_rows() as usize, expert, input.clone());
                let gated = |i: usize| {
                    let (gate, up) = (both[gate_row(i, false)], both[gate_row(i, true)]);
                    match self.clamp {
                        Some(clamp) => clamp.apply(gate, up),
                        None => (self.act.apply(gate) * f64::from(up)) as f32,
                    }
                };
                let act = |i: usize| match self.is_gated() {
                    true => round_to(self.x.dtype, gated(i)),
                    false => round_to(self.x.dtype, self.act.apply(both[i]) as f32),
                };
                let act: Vec<f32> = (0..inner).map(act).collect();
                for (sum, out) in total.iter_mut().zip(sums(&down, &down_bias, wide, expert, act)) {
                    *sum += f64::from(weight) * f64::from(out);
                }
            }
            for (col, sum) in total.iter().enumerate() {
                let before = residual.as_ref().map_or(0.0, |residual| residual.get(row, col));
                y.set(row, col, (f64::from(before) + sum) as f32);
            }
        }
    }
}
