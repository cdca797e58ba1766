//! A matrix of each head that is carried from token to token: the gated delta rule and Mamba-2's state space.
//!
//! Of each token, head h has a query, a key, a value, a decay g and a strength β. With S the seat's matrix of the head
//! (key × value elements, f32):
//!
//! `S ← g·S`, `d = β·(v − k·S)` for the delta rule or `d = β·v` for a state space, `S ← S + k ⊗ d`, `y = q·S`.
//!
//! [`Rule::Delta`]: columns are queries, keys, values; queries and keys are divided by their length, queries also by
//! √key; `β = sigmoid(b)`, `g = exp(−exp(a)·softplus(x + dt))`, with b then x of all heads in `gates`.
//! [`Rule::StateSpace`]: columns are values, keys (B), queries (C); `β = softplus(x + dt)`, `g = exp(−exp(a)·β)`, and
//! `skip·v` is added to y.
//!
//! Keys and queries belong to groups of heads: of consecutive ones, or of every `groups`-th. Tokens of a row are taken in
//! order, whatever steps they come in, and nothing depends on the rows beside it: with [`Pick::Fixed`] the same tokens give
//! the same bits in chunks of any size. A sequence's first token finds zeros. Rows without tokens and pad rows change nothing.
//!
//! A step that verifies drafts leaves the matrix as it is after the row's first token, which is no draft, and writes of each
//! draft k, d and g into the seat's log, behind the matrices: keys of all groups, changes of all heads, decays of all heads,
//! at place p mod `logged` for position p. The next step of the seat, of whatever kind, takes the accepted ones from there
//! (`row_replay`, the last before its own tokens) before it goes on: `S ← g·S + k ⊗ d`, in the order and with the roundings of
//! the step that made them. The log has places for the drafts of both steps, so that no place is read and written in one.
//!
//! On a GPU rows of many tokens in bf16 run by chunks on matrix units, unless [`Pick::Fixed`]: then bits depend on how they are cut.

mod chunks;
mod cuda;
mod fast;
pub(crate) mod variant;

use super::{
    Access, Bindable, Contract, Division, Named, SpanVisitor, StepSize, Traffic, require,
    require_carry, require_division, require_matrices, require_scratch, require_vector,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::tables::{Fed, Tables};
use crate::cpu::view::Matrix;
use crate::cuda::launch::Target;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::variant::{Pick, ScanVariant, Variant};
use crate::{DType, Result, Span, StepState};
use serde::{Deserialize, Serialize};

/// Added to the square of the length of queries and keys.
pub(crate) const LENGTH_EPS: f32 = 1e-6;
/// Most elements of a key.
const MOST_KEY: u32 = 256;

/// How a token changes the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// Replaces what the matrix has for the key.
    Delta,
    /// Adds to it.
    StateSpace {
        /// Strengths are at least this.
        least: f32,
    },
}

/// Carries a matrix of each head from token to token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Scan<O: Operands = Bound> {
    /// tokens × (2·groups·key + heads·value).
    pub x: O::Value,
    /// What decays and strengths are made of: columns from `from` on.
    pub gates: O::Value,
    /// The first of them.
    pub from: u32,
    /// Of each head: the logarithm of how fast it forgets.
    pub a: O::Weight,
    /// Of each head: added to what its decay is made of.
    pub dt: O::Weight,
    /// Of each head: how much of the value is added to the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip: Option<O::Weight>,
    /// How a token changes the matrix.
    pub rule: Rule,
    /// Heads that values have.
    pub heads: u32,
    /// Heads that keys and queries have; divides `heads`.
    pub groups: u32,
    /// Groups take turns: head h has the key of group h mod `groups`, not of h · `groups` / `heads`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub turns: bool,
    /// Elements of a key.
    pub key: u32,
    /// Elements of a value.
    pub value: u32,
    /// Of each seat: heads × key × value, f32, then the log.
    pub carry: O::Carry,
    /// tokens × heads·value.
    pub y: O::Value,
    /// Rows and lengths.
    #[serde(skip_serializing_if = "unset")]
    pub state: O::Late<StepState>,
    /// Rows of the bucket.
    #[serde(skip_serializing_if = "unset")]
    pub rows: O::Late<u32>,
    /// Every row has exactly one token.
    #[serde(skip_serializing_if = "unset")]
    pub single: O::Late<bool>,
    /// Tokens of each row of a decode step: more than one verify drafts.
    #[serde(skip_serializing_if = "unset")]
    pub q_len: O::Late<u32>,
    /// What is prepared for chunks; devices say how much they need.
    #[serde(skip_serializing_if = "unset")]
    pub scratch: O::Late<Option<Span>>,
    /// Which kernel.
    #[serde(skip_serializing_if = "unset")]
    pub pick: O::Late<Pick<ScanVariant>>,
}

impl<O: Operands> Bindable for Scan<O> {
    type O = O;
    type Bound = Scan;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Value(&mut self.gates, Access::Read));
        visit(Operand::Weight(&mut self.a));
        visit(Operand::Weight(&mut self.dt));
        if let Some(skip) = &mut self.skip {
            visit(Operand::Weight(skip));
        }
        visit(Operand::Carry(&mut self.carry));
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Scan, B::Error> {
        let size = to.size();
        Ok(Scan {
            x: to.value(self.x)?,
            gates: to.value(self.gates)?,
            from: self.from,
            a: to.weight(self.a)?,
            dt: to.weight(self.dt)?,
            skip: self.skip.map(|skip| to.weight(skip)).transpose()?,
            rule: self.rule,
            heads: self.heads,
            groups: self.groups,
            turns: self.turns,
            key: self.key,
            value: self.value,
            carry: to.carry(self.carry)?,
            y: to.value(self.y)?,
            state: to.state(),
            rows: size.rows,
            single: size.single,
            q_len: size.q_len,
            scratch: None,
            pick: Pick::Best,
        })
    }
}

impl Contract for Scan {
    fn check(&self) -> Result<()> {
        self.state.check()?;
        require_scratch(self.scratch, Self::NAME)?;
        let Scan { x, gates, heads, groups, key, value, y, .. } = self;
        require_matrices(&[(x, "x"), (gates, "gates"), (y, "y")], Self::NAME)?;
        let whole = *heads > 0 && *groups > 0 && heads.is_multiple_of(*groups);
        require(whole, Self::NAME, || format!("{heads} heads in {groups} groups"))?;
        // Kernels divide a column of the matrix among four lanes, and eight columns of it among a warp.
        let fit = |size: u32, most: u32| size > 0 && size.is_multiple_of(8) && size <= most;
        require(fit(*key, MOST_KEY) && fit(*value, 1 << 16), Self::NAME, || {
            format!("keys of {key} and values of {value} elements")
        })?;
        let (keys, values) = (u64::from(groups * key), u64::from(*heads) * u64::from(*value));
        let same = x.rows == y.rows && gates.rows == y.rows;
        let cols = u64::from(x.cols) == 2 * keys + values && u64::from(y.cols) == values;
        require(same && cols, Self::NAME, || {
            format!("x is {x}, y is {y}, not {} and {values} columns", 2 * keys + values)
        })?;
        let read = match self.rule {
            Rule::Delta => 2 * heads,
            Rule::StateSpace { .. } => *heads,
        };
        require(
            u64::from(self.from) + u64::from(read) <= u64::from(gates.cols),
            Self::NAME,
            || format!("{read} gates from column {} on, of {gates}", self.from),
        )?;
        for (vector, what) in
            [(Some(&self.a), "a"), (Some(&self.dt), "dt"), (self.skip.as_ref(), "skip")]
        {
            vector.map_or(Ok(()), |vector| require_vector(vector, *heads, Self::NAME, what))?;
        }
        let limits = &self.state.limits;
        let log = u64::from(limits.logged()) * u64::from(self.log().cols);
        require_carry(&self.carry, values * u64::from(*key) + log, limits, Self::NAME)?;
        require(self.carry.dtype == DType::F32, Self::NAME, || {
            format!("matrices of {:?}, not f32", self.carry.dtype)
        })?;
        let (rows, tokens) = (self.rows, y.rows);
        let even = (self.q_len > 1).then_some(self.q_len);
        require(self.q_len <= limits.tokens_per_row, Self::NAME, || {
            format!("{} tokens a row; states are for {}", self.q_len, limits.tokens_per_row)
        })?;
        let division = Division { rows, tokens, single: self.single, even };
        require_division(&division, limits, Self::NAME)
    }

    fn describe(&self) -> String {
        let Scan { heads, key, value, rows, .. } = self;
        let kind = if self.single || self.q_len > 1 { "decode" } else { "varlen" };
        let rule = match self.rule {
            Rule::Delta => "delta",
            Rule::StateSpace { .. } => "state space",
        };
        let pick = self.pick.suffix();
        format!("scan {rule} {kind} {rows} rows, {heads} heads {key}×{value}{pick}")
    }

    fn traffic(&self) -> Traffic {
        let states = u64::from(self.rows) * u64::from(self.matrices()) * 4;
        // Drafts that are logged, and as many that were.
        let log = 2 * u64::from(self.q_len - 1) * u64::from(self.rows * self.log().cols) * 4;
        let values = self.x.bytes() + self.gates.bytes() + self.y.bytes() + 2 * states + log;
        Traffic { weights: self.a.bytes() + self.dt.bytes(), values }
    }

    fn step_size(&self) -> StepSize {
        StepSize::rows(self.rows)
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn scratch_bytes(&self, target: &Target) -> u64 {
        self.chunk_room(target)
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        Some(self.pick.map(Variant::Scan))
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        pick.narrow(Variant::scan).map(|pick| self.pick = pick).is_some()
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        for tensor in [&self.x, &self.gates, &self.a, &self.dt] {
            visit(tensor.span, Access::Read);
        }
        if let Some(skip) = &self.skip {
            visit(skip.span, Access::Read);
        }
        super::visit_step_tables(&self.state, visit);
        self.state.row_replay.iter().for_each(|table| visit(table.span, Access::Read));
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        visit(self.carry.span, Access::Update);
        visit(self.y.span, Access::Write);
    }
}

/// The first columns of queries, keys and values of a head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Columns {
    pub(crate) query: usize,
    pub(crate) key: usize,
    pub(crate) value: usize,
}

/// What the log has of a token: where each part begins, and how many columns there are.
#[derive(Clone, Copy, Debug)]
struct Log {
    changes: usize,
    decays: usize,
    cols: u32,
}

impl Log {
    fn new(heads: u32, groups: u32, key: u32, value: u32) -> Log {
        let (changes, decays) = (groups * key, groups * key + heads * value);
        // Seats begin where eight columns of a matrix are one sector of memory.
        let cols = (decays + heads).next_multiple_of(8);
        Log { changes: changes as usize, decays: decays as usize, cols }
    }
}

impl Scan {
    /// Elements of a token in the log of a state with these heads.
    pub fn log_cols(heads: u32, groups: u32, key: u32, value: u32) -> u32 {
        Log::new(heads, groups, key, value).cols
    }

    fn log(&self) -> Log {
        Log::new(self.heads, self.groups, self.key, self.value)
    }

    /// Elements of a seat's matrices.
    fn matrices(&self) -> u32 {
        self.heads * self.key * self.value
    }

    /// The column of the seat's row where the log has the token of a position.
    fn logged(&self, position: usize) -> usize {
        let place = position % self.state.limits.logged() as usize;
        self.matrices() as usize + place * self.log().cols as usize
    }

    pub(crate) fn columns(&self, head: usize) -> Columns {
        let Scan { heads, groups, turns, key, value, .. } = *self;
        let keys = (groups * key) as usize;
        let group = match turns {
            true => head % groups as usize,
            false => head / (heads / groups) as usize,
        };
        let group = group * key as usize;
        let at = head * value as usize;
        match self.rule {
            Rule::Delta => Columns { query: group, key: keys + group, value: 2 * keys + at },
            Rule::StateSpace { .. } => {
                let values = (heads * value) as usize;
                Columns { query: values + keys + group, key: values + group, value: at }
            }
        }
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let tables = Tables::new(memory, &self.state);
        for row in 0..self.rows as usize {
            if let Some(fed) = tables.fed(row, self.single) {
                (0..self.heads as usize).for_each(|head| self.reference_head(memory, &fed, head));
            }
        }
    }

    fn reference_head(&self, memory: &CpuMemory, fed: &Fed, head: usize) {
        let (x, gates) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.gates));
        let (carry, y) = (Matrix::new(memory, &self.carry), Matrix::new(memory, &self.y));
        let number = |vector: &crate::Tensor| f64::from(Matrix::new(memory, vector).get(0, head));
        let (a, dt) = (number(&self.a), number(&self.dt));
        let skip = self.skip.as_ref().map_or(0.0, number);
        let (keys, values) = (self.key as usize, self.value as usize);
        let from = head * keys * values;
        let old = |i| if fed.before == 0 { 0.0 } else { f64::from(carry.get(fed.seat, from + i)) };
        let mut matrix: Vec<f64> = (0..keys * values).map(old).collect();
        let at = self.columns(head);
        let (log, group) = (self.log(), at.key - self.columns(0).key);
        let replayed = Tables::new(memory, &self.state).replay(fed.row).min(fed.before);
        for position in fed.before - replayed..fed.before {
            let entry = |part: usize| f64::from(carry.get(fed.seat, self.logged(position) + part));
            let decay = entry(log.decays + head);
            for (i, line) in matrix.chunks_exact_mut(values).enumerate() {
                let k = entry(group + i);
                let change = |j: usize| entry(log.changes + head * values + j);
                (0..values).for_each(|j| line[j] = line[j] * decay + k * change(j));
            }
        }
        let drafts = self.q_len > 1;
        let put = |matrix: &[f64]| {
            let elements = matrix.iter().enumerate();
            elements.for_each(|(i, value)| carry.set(fed.seat, from + i, *value as f32));
        };
        for (index, token) in fed.tokens.clone().enumerate() {
            let logged = (drafts && index > 0).then(|| self.logged(fed.before + index));
            let keep = |part: usize, value: f64| {
                logged.inspect(|at| carry.set(fed.seat, at + part, value as f32));
            };
            let read = |from: usize, count: usize| -> Vec<f64> {
                (from..from + count).map(|col| f64::from(x.get(token, col))).collect()
            };
            let (mut q, mut k) = (read(at.query, keys), read(at.key, keys));
            let v = read(at.value, values);
            let gate = |i: usize| f64::from(gates.get(token, self.from as usize + i));
            let softplus = |x: f64| if x > 20.0 { x } else { x.exp().ln_1p() };
            let (decay, strength) = match self.rule {
                Rule::Delta => {
                    for vector in [&mut q, &mut k] {
                        let square = vector.iter().map(|x| x * x).sum::<f64>();
                        let length = (square + f64::from(LENGTH_EPS)).sqrt();
                        vector.iter_mut().for_each(|x| *x /= length);
                    }
                    q.iter_mut().for_each(|x| *x /= (keys as f64).sqrt());
                    let step = softplus(gate(self.heads as usize + head) + dt);
                    (-a.exp() * step, 1.0 / (1.0 + (-gate(head)).exp()))
                }
                Rule::StateSpace { least } => {
                    let step = softplus(gate(head) + dt).max(f64::from(least));
                    (-a.exp() * step, step)
                }
            };
            let decay = decay.exp();
            keep(log.decays + head, decay);
            (0..keys).for_each(|i| keep(group + i, k[i]));
            matrix.iter_mut().for_each(|x| *x *= decay);
            for j in 0..values {
                let product = |vector: &[f64], matrix: &[f64]| -> f64 {
                    (0..keys).map(|i| vector[i] * matrix[i * values + j]).sum()
                };
                let known = if self.rule == Rule::Delta { product(&k, &matrix) } else { 0.0 };
                let change = strength * (v[j] - known);
                keep(log.changes + head * values + j, change);
                (0..keys).for_each(|i| matrix[i * values + j] += k[i] * change);
                let result = product(&q, &matrix) + skip * v[j];
                y.set(token, head * values + j, result as f32);
            }
            if drafts && index == 0 {
                put(&matrix);
            }
        }
        if !drafts {
            put(&matrix);
        }
    }
}
