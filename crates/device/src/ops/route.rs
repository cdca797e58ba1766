//! Which experts each token goes to, and with what weight: logits `x · wᵀ` with sums in f32, scores, the `top` best of
//! them. A bias is added to the logits of a softmax, and to the sigmoids that experts are chosen by. Equal scores go to the
//! expert with the lower number. Rows past the `live` count may be left as they are.
//!
//! A row of `y` has `top` expert numbers, best first, then as many weights: the bits of an f32 each.

mod cuda;
mod fast;
pub(crate) mod variant;

use super::{
    Access, Bindable, Contract, Named, SpanVisitor, StepSize, Traffic, live_rows, require,
    require_fit, require_float, require_scratch, require_vector, require_weights, require_word,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::view::{Matrix, Words};
use crate::cuda::launch::Target;
use crate::operand::{Binder, Bound, Operand, OperandVisitor, Operands, unset};
use crate::variant::{Pick, RouteVariant, Variant};
use crate::{DType, Result, Span};
use serde::{Deserialize, Serialize};

/// Most experts of a layer.
pub(crate) const MOST_EXPERTS: u32 = 512;
/// Most experts of a token.
pub(crate) const MOST_TOP: u32 = 32;

/// How a logit becomes a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Softmax over all experts; a bias is a part of the logits.
    Softmax,
    /// Sigmoid of each; a bias counts in the choice, not in the weight.
    Sigmoid,
}

/// How experts are chosen and weighed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Routing {
    /// Experts of a token.
    pub top: u32,
    /// How a logit becomes a weight.
    pub score: Score,
    /// Experts are in so many groups of equal size.
    pub groups: u32,
    /// Only experts of so many groups can be chosen: the best ones.
    pub kept: u32,
    /// A group is as good as the sum of so many of its best scores: 1 or 2.
    pub group_top: u32,
    /// Whether the weights of a token are divided by their sum.
    pub renormalise: bool,
    /// Multiplies every weight.
    pub scale: f32,
}

impl Routing {
    /// Softmax over all experts, weights as they are.
    pub const fn softmax(top: u32) -> Routing {
        Routing {
            top,
            score: Score::Softmax,
            groups: 1,
            kept: 1,
            group_top: 1,
            renormalise: false,
            scale: 1.0,
        }
    }
}

/// Chooses experts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Route<O: Operands = Bound> {
    /// rows × k activations.
    pub x: O::Value,
    /// experts × k weights.
    pub w: O::Weight,
    /// One element per expert: see [`Score`].
    pub bias: Option<O::Weight>,
    /// How experts are chosen and weighed.
    pub routing: Routing,
    /// rows × 2·top words.
    pub y: O::Value,
    /// Rows past this device-side count need not be computed.
    #[serde(skip_serializing_if = "unset")]
    pub live: O::Late<Option<Span>>,
    /// The plan that it makes for the experts after it, if the kernel can: tokens of a task.
    #[serde(skip_serializing_if = "unset")]
    pub plans: O::Late<Option<u32>>,
    /// Where it counts for those experts.
    #[serde(skip_serializing_if = "unset")]
    pub load: O::Late<Option<Span>>,
    /// The scratch of those experts, where their plan is.
    #[serde(skip_serializing_if = "unset")]
    pub scratch: O::Late<Option<Span>>,
    /// Which kernel.
    #[serde(skip_serializing_if = "unset")]
    pub pick: O::Late<Pick<RouteVariant>>,
}

impl<O: Operands> Bindable for Route<O> {
    type O = O;
    type Bound = Route;

    fn operands(&mut self, visit: OperandVisitor<'_, O>) {
        visit(Operand::Value(&mut self.x, Access::Read));
        visit(Operand::Weight(&mut self.w));
        if let Some(bias) = &mut self.bias {
            visit(Operand::Weight(bias));
        }
        visit(Operand::Value(&mut self.y, Access::Write));
    }

    fn bind<B: Binder<O>>(&self, to: &B) -> Result<Route, B::Error> {
        Ok(Route {
            x: to.value(self.x)?,
            w: to.weight(self.w)?,
            bias: self.bias.map(|bias| to.weight(bias)).transpose()?,
            routing: self.routing,
            y: to.value(self.y)?,
            live: to.live(self.x),
            plans: None,
            load: None,
            scratch: None,
            pick: Pick::Best,
        })
    }
}

impl Contract for Route {
    fn check(&self) -> Result<()> {
        let Routing { top, groups, kept, group_top, scale, .. } = self.routing;
        let (rows, experts) = (self.x.rows, self.w.rows);
        require_fit(&self.x, Self::NAME, "x")?;
        require_float(&self.x, Self::NAME, "x")?;
        require_weights(&self.w, Self::NAME, "w")?;
        require(self.x.cols == self.w.cols, Self::NAME, || {
            format!("x has {} columns, w has {}", self.x.cols, self.w.cols)
        })?;
        require(
            experts <= MOST_EXPERTS && (1..=MOST_TOP.min(experts)).contains(&top),
            Self::NAME,
            || format!("{top} of {experts} experts; at most {MOST_TOP} of {MOST_EXPERTS}"),
        )?;
        let even = (1..=MOST_GROUPS as u32).contains(&groups) && experts.is_multiple_of(groups);
        let enough = even && (1..=groups).contains(&kept) && top <= kept * (experts / groups);
        let best = (1..=2).contains(&group_top) && even && group_top <= experts / groups;
        require(enough && best, Self::NAME, || {
            format!(
                "{kept} of {groups} groups by their {group_top} best do not give {top} of {experts} experts"
            )
        })?;
        require(scale.is_finite(), Self::NAME, || format!("weights are multiplied by {scale}"))?;
        if let Some(bias) = &self.bias {
            require_vector(bias, experts, Self::NAME, "bias")?;
        }
        let fits = self.y.dtype == DType::U32 && (self.y.rows, self.y.cols) == (rows, 2 * top);
        require(fits && self.y.stride == self.y.cols, Self::NAME, || {
            format!("y is {}, not {rows}×{} dense words", self.y, 2 * top)
        })?;
        require_fit(&self.y, Self::NAME, "y")?;
        if let Some(live) = self.live {
            require_word(live, Self::NAME, "the live count")?;
        }
        require_scratch(self.scratch, Self::NAME)
    }

    fn describe(&self) -> String {
        let Routing { top, score, groups, kept, renormalise, .. } = self.routing;
        let score = match score {
            Score::Softmax => "softmax",
            Score::Sigmoid => "sigmoid",
        };
        let groups =
            if groups > 1 { format!(", {kept} of {groups} groups") } else { String::new() };
        let sum = if renormalise { ", renormalised" } else { "" };
        let plan = if self.plans.is_some() { " and plan" } else { "" };
        let biased = self.bias.is_some() && self.routing.score == Score::Softmax;
        let bias = if biased { ", bias" } else { "" };
        let (x, experts) = (&self.x, self.w.rows);
        format!("route{plan} {x} to {top} of {experts} experts by {score}{groups}{sum}{bias}")
    }

    fn traffic(&self) -> Traffic {
        let bias = self.bias.as_ref().map_or(0, |bias| bias.bytes());
        Traffic { weights: self.w.bytes() + bias, values: self.x.bytes() + self.y.bytes() }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.w.span, Access::Read);
        if let Some(bias) = &self.bias {
            visit(bias.span, Access::Read);
        }
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        if let Some(scratch) = self.scratch {
            visit(scratch, Access::Write);
        }
        if let Some(load) = self.load {
            visit(load, Access::Update);
        }
        visit(self.y.span, Access::Write);
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn scratch_bytes(&self, _target: &Target) -> u64 {
        self.plan_room(self.x.span).map_or(0, |room| room.bytes)
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        Some(self.pick.map(Variant::Route))
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        pick.narrow(Variant::route).map(|pick| self.pick = pick).is_some()
    }

    fn detach(&mut self) {
        (self.live, self.plans, self.load) = (None, None, None);
    }
}

impl Route {
    /// Logits summed in f64, everything after them in f32.
    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let (x, w) = (Matrix::new(memory, &self.x), Matrix::new(memory, &self.w));
        let bias = self.bias.as_ref().map(|bias| Matrix::new(memory, bias));
        let y = Words::new(memory, &self.y);
        let (mut input, mut weights) = (vec![0.0; x.cols], vec![0.0; x.cols]);
        let mut logits = vec![0.0f32; w.rows];
        let mut keys = vec![0; w.rows];
        for row in 0..live_rows(memory, self.live, x.rows) {
            x.read_row(row, &mut input);
            for (expert, logit) in logits.iter_mut().enumerate() {
                w.read_row(expert, &mut weights);
                let terms = input.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
                *logit = self.routing.logit(terms.sum::<f64>() as f32, bias.as_ref(), expert);
            }
            self.routing.choose(&logits, bias.as_ref(), &mut keys, row, &y);
        }
    }
}

impl Routing {
    /// An expert's logit from the sum of its products.
    fn logit(self, sum: f32, bias: Option<&Matrix>, expert: usize) -> f32 {
        match (self.score, bias) {
            (Score::Softmax, Some(bias)) => sum + bias.get(0, expert),
            (Score::Softmax, None) | (Score::Sigmoid, _) => sum,
        }
    }

    /// Writes the experts of a row with these logits. `keys` has room for one word per expert. The experts of a row
    /// differ, whatever the logits are: rows that are not live may hold anything.
    fn choose(
        &self,
        logits: &[f32],
        bias: Option<&Matrix>,
        keys: &mut [u32],
        row: usize,
        y: &Words,
    ) {
        let top = self.top as usize;
        let score = |expert: usize| match self.score {
            Score::Softmax => logits[expert],
            Score::Sigmoid => {
                sigmoid(logits[expert]) + bias.map_or(0.0, |bias| bias.get(0, expert))
            }
        };
        keys.iter_mut().enumerate().for_each(|(expert, key)| *key = key_of(score(expert)));
        self.drop_groups(&score, keys);
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |logit: f32| match self.score {
            Score::Softmax => (logit - most).exp(),
            Score::Sigmoid => sigmoid(logit),
        };
        let at = row * 2 * top;
        let mut chosen = 0.0f32;
        for place in 0..top {
            let best =
                (1..keys.len()).fold(0, |best, at| if keys[at] > keys[best] { at } else { best });
            keys[best] = TAKEN;
            chosen += weight(logits[best]);
            y.set(at + place, best as u32);
        }
        let sum = match (self.renormalise, self.score) {
            (true, Score::Softmax) => chosen,
            (true, Score::Sigmoid) => chosen + 1e-20,
            (false, Score::Softmax) => logits.iter().map(|logit| weight(*logit)).sum(),
            (false, Score::Sigmoid) => 1.0,
        };
        for place in 0..top {
            let logit = logits[y.get(at + place) as usize];
            y.set(at + top + place, (weight(logit) / sum * self.scale).to_bits());
        }
    }

    /// Marks the experts of all groups but the best ones as taken.
    fn drop_groups(&self, score: &dyn Fn(usize) -> f32, keys: &mut [u32]) {
        if self.groups == 1 {
            return;
        }
        let size = keys.len() / self.groups as usize;
        let mut strengths = [f32::NEG_INFINITY; MOST_GROUPS];
        let strengths = &mut strengths[..self.groups as usize];
        for (group, strength) in strengths.iter_mut().enumerate() {
            let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
            for score in (group * size..(group + 1) * size).map(score) {
                if score > best {
                    (best, second) = (score, best);
                } else if score > second {
                    second = score;
                }
            }
            *strength = if self.group_top == 2 { best + second } else { best };
        }
        for (group, members) in keys.chunks_exact_mut(size).enumerate() {
            let mine = strengths[group];
            let above = strengths.iter().enumerate().filter(|(other, strength)| {
                **strength > mine || **strength == mine && *other < group
            });
            if above.count() >= self.kept as usize {
                members.fill(TAKEN);
            }
        }
    }
}

/// Most groups of experts.
const MOST_GROUPS: usize = 32;

/// Below the key of every score.
const TAKEN: u32 = 0;

/// Larger numbers have larger keys.
fn key_of(score: f32) -> u32 {
    let bits = score.to_bits();
    (bits ^ if bits >> 31 == 1 { u32::MAX } else { 1 << 31 }).max(TAKEN + 1)
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
