//! What every program must satisfy, whether a builder or a JSON file made it.

use super::{
    CacheId, CarryId, Dim, InputId, Program, ProgramOp, RopeId, Step, Symbolic, Value, ValueId,
    WeightId, WeightLayout,
};
use crate::{Phase, ShapeKey};
use device::op::{Activation, Kept, KvLayer, Tap};
use device::operand::{Binder, StepShape};
use device::step::{FeatureShape, HostInputs};
use device::{DType, OpenArena, Region, Span, StepLimits, StepState, Tensor};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// Why something is not a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// Not JSON of a program.
    #[error("not a program: {problem}")]
    Json {
        /// The parser's message.
        problem: String,
    },
    /// A weight name used for two different weights.
    #[error("weight `{name}` is declared twice with different shapes")]
    WeightTwice {
        /// The name.
        name: String,
    },
    /// A value name used twice.
    #[error("value `{name}` is made twice")]
    NameTwice {
        /// The name.
        name: String,
    },
    /// Rope or attention outside a layer: there are no pages to use.
    #[error("step `{step}` needs KV pages, so it must be inside a layer")]
    OutsideLayer {
        /// The step.
        step: String,
    },
    /// A layer with two caches.
    #[error("layer {layer} declares a second cache, or one after it was needed")]
    CacheTwice {
        /// The layer.
        layer: u32,
    },
    /// An id that names nothing.
    #[error("step `{step}` names a value or weight that does not exist")]
    Dangling {
        /// The step.
        step: String,
    },
    /// A value without exactly one maker.
    #[error("value `{value}` is made {times} times")]
    Makers {
        /// The value.
        value: String,
        /// How often.
        times: usize,
    },
    /// Shapes that do not go together.
    #[error("step `{step}`: {problem}")]
    Shape {
        /// The step.
        step: String,
        /// What is wrong.
        problem: String,
    },
    /// Not exactly one end, or no embedding.
    #[error(
        "a program embeds, and samples or publishes once; this one has {embeds} embeddings and {ends} ends"
    )]
    Ends {
        /// Embeddings.
        embeds: usize,
        /// Samplers, and ops that publish vectors.
        ends: usize,
    },
    /// A program that drafts and is not built on the one that verifies.
    #[error(
        "`{program}` cannot draft: it samples, has recurrent layers, or other caches or rotations than the program it is for"
    )]
    Drafter {
        /// The program.
        program: String,
    },
    /// A layer whose states are to be kept and that is not there.
    #[error("there is no layer {layer} whose states a drafter could read")]
    Tap {
        /// The layer.
        layer: u32,
    },
    /// Vectors of decode steps.
    #[error("a program that publishes vectors has no decode phase")]
    Decodes,
}

impl Program {
    /// Refuses a program whose ids, shapes or ends do not fit together. One that drafts is a part of a step and has no ends.
    pub fn check(&self) -> Result<(), ProgramError> {
        self.check_body()?;
        self.check_drafter()?;
        if self.drafts() {
            return Ok(());
        }
        let count = |name: &str| self.steps.iter().filter(|s| s.op.name() == name).count();
        match (count("embed"), count("sample") + count("publish")) {
            (1.., 1) if self.publishes().is_some() && self.phases.contains(&Phase::Decode) => {
                Err(ProgramError::Decodes)
            }
            (1.., 1) => Ok(()),
            (embeds, ends) => Err(ProgramError::Ends { embeds, ends }),
        }
    }

    /// Everything but the ends.
    pub(crate) fn check_body(&self) -> Result<(), ProgramError> {
        let mut names = BTreeSet::new();
        if let Some(twice) = self.values.iter().find(|value| !names.insert(&value.name)) {
            return Err(ProgramError::NameTwice { name: twice.name.clone() });
        }
        self.check_ids()?;
        self.check_makers()?;
        self.check_shapes()
    }

    fn check_ids(&self) -> Result<(), ProgramError> {
        for step in &self.steps {
            let value_ok = |id: &ValueId| (id.0 as usize) < self.values.len();
            let weight_ok = |id: &WeightId| (id.0 as usize) < self.weights.len();
            let ids = step.op.reads().into_iter().chain(step.op.made());
            if !ids.into_iter().all(|id| value_ok(&id)) || !step.op.weights().iter().all(weight_ok)
            {
                return Err(ProgramError::Dangling { step: step.name.clone() });
            }
        }
        Ok(())
    }

    fn check_makers(&self) -> Result<(), ProgramError> {
        let mut makers = vec![0; self.values.len()];
        for out in self.steps.iter().filter_map(|step| step.op.made()) {
            makers[out.0 as usize] += 1;
        }
        match (0..makers.len()).find(|&value| makers[value] != 1) {
            Some(index) => Err(ProgramError::Makers {
                value: self.values[index].name.clone(),
                times: makers[index],
            }),
            None => Ok(()),
        }
    }

    /// Each op checks its own shapes, as in a step of more tokens than rows.
    fn check_shapes(&self) -> Result<(), ProgramError> {
        let wrong = |step: &Step| {
            let step = step.full_name();
            move |problem: String| ProgramError::Shape { step, problem }
        };
        let shapes = Shapes::of(self).map_err(|problem| match self.steps.first() {
            Some(step) => wrong(step)(problem),
            None => ProgramError::Ends { embeds: 0, ends: 0 },
        })?;
        for step in &self.steps {
            let op = step.op.bind(&shapes).map_err(wrong(step))?;
            op.check().map_err(|error| wrong(step)(problem(error)))?;
            self.check_pairs(step).map_err(wrong(step))?;
        }
        Ok(())
    }

    /// What an activation multiplies must alternate in the weights that made it.
    fn check_pairs(&self, step: &Step) -> Result<(), String> {
        if let ProgramOp::Experts(experts) = &step.op {
            let gated = experts.act != Activation::ReluSquared;
            let wanted = if gated { WeightLayout::GateUpTurns } else { WeightLayout::Rows };
            let problem = "gate and up rows of experts do not take turns of eight";
            let right = self.weight(experts.gate_up).layout == wanted;
            return if right { Ok(()) } else { Err(problem.into()) };
        }
        let ProgramOp::GateMul(gate) = &step.op else { return Ok(()) };
        let maker = self.steps.iter().find(|other| other.op.made() == Some(gate.x));
        let apart = maker.is_some_and(|maker| {
            let ProgramOp::Linear(linear) = &maker.op else { return false };
            self.weight(linear.w).layout != WeightLayout::GateUp
        });
        if apart { Err("gate and up rows do not alternate".into()) } else { Ok(()) }
    }
}

/// The hidden states that a program keeps or reads, as far as its shapes are to be checked.
fn features(program: &Program) -> Option<FeatureShape> {
    let dtype = program.shape.act_dtype;
    let (mut token, mut drafted) = (0, 0);
    let cols = |value: ValueId| program.value(value).cols;
    for step in &program.steps {
        if let ProgramOp::Tap(Tap { x, to, .. }) = &step.op {
            match to {
                Kept::Token(column) => token = token.max(column + cols(*x)),
                Kept::Row => drafted = cols(*x),
            }
        }
        if let ProgramOp::Recall(recall) = &step.op {
            drafted = cols(recall.y);
        }
        if let ProgramOp::Follow(follow) = &step.op {
            if follow.x.is_none() {
                token = cols(follow.y);
            }
            if !follow.own {
                drafted = cols(follow.y);
            }
        }
    }
    let some = token > 0 || drafted > 0;
    some.then(|| FeatureShape { token: token.max(1), drafted: drafted.max(1), dtype, ids: None })
}

/// An op's own error message without the op's name: the step's name is already given.
fn problem(error: device::Error) -> String {
    match error {
        device::Error::Contract { problem, .. } => problem,
        other => other.to_string(),
    }
}

/// Places everything without backing memory, so that ops can check their shapes.
struct Shapes<'a> {
    program: &'a Program,
    arena: RefCell<OpenArena>,
    values: RefCell<BTreeMap<ValueId, Tensor>>,
    state: StepState,
    key: ShapeKey,
}

impl<'a> Shapes<'a> {
    const PAGE_SIZE: u32 = 16;

    fn of(program: &'a Program) -> Result<Shapes<'a>, String> {
        // What recalls states of rows has one token in each.
        let recalls = |step: &Step| matches!(step.op, ProgramOp::Recall(_));
        let key = match program.steps.iter().any(recalls) {
            true => ShapeKey::decode(2),
            false => ShapeKey::prefill(3, 2),
        };
        let ShapeKey { rows, tokens, .. } = key;
        let (page_size, vocab) = (Self::PAGE_SIZE, program.shape.vocab);
        let drafts = !program.is_step();
        let limits = StepLimits {
            seats: rows,
            rows,
            tokens: if drafts { 2 * rows } else { tokens },
            pages_per_seat: 1,
            page_size,
            vocab,
            penalties: false,
            tokens_per_row: if drafts { 2 } else { 1 },
            tables: 1,
        };
        let mut arena = OpenArena::new();
        let state =
            StepState::lay_out(limits, |region, name, bytes| arena.alloc(region, name, bytes));
        let mut state = state.map_err(|error| error.to_string())?;
        if let Some(width) = program.publishes() {
            let alloc = |region, name: &'static str, bytes| arena.alloc(region, name, bytes);
            state = state.with_vectors(width, alloc);
        }
        if drafts {
            let alloc = |region, name: &'static str, bytes| arena.alloc(region, name, bytes);
            state = state.with_drafting(alloc);
            state = state.exchanged().unwrap_or(state);
        }
        if let Some(shape) = features(program) {
            let alloc = |region, name: &'static str, bytes| arena.alloc(region, name, bytes);
            state = state.with_features(shape, alloc);
        }
        let (arena, values) = (RefCell::new(arena), RefCell::default());
        Ok(Shapes { program, arena, values, state, key })
    }

    fn alloc(&self, region: Region, dtype: DType, rows: u32, cols: u32) -> Tensor {
        let bytes = dtype.matrix_bytes(rows as usize, cols as usize) as u64;
        let span = self.arena.borrow_mut().alloc(region, "shapes", bytes);
        Tensor::dense(span, dtype, rows, cols)
    }
}

impl Binder<Symbolic> for Shapes<'_> {
    type Error = String;

    fn value(&self, id: ValueId) -> Result<Tensor, String> {
        if let Some(known) = self.values.borrow().get(&id) {
            return Ok(*known);
        }
        let Value { rows, cols, dtype, .. } = *self.program.value(id);
        // A value that must be made in place has the span of the value it replaces.
        let replaced = self.program.steps.iter().find_map(|step| {
            step.op.reuse().filter(|reuse| reuse.must && reuse.to == id).map(|reuse| reuse.from)
        });
        let tensor = match replaced {
            Some(from) if from != id => {
                let from = self.value(from)?;
                Tensor { rows: rows.size(&self.key), cols, dtype, ..from }
            }
            _ => self.alloc(Region::Workspace, dtype, rows.size(&self.key), cols),
        };
        self.values.borrow_mut().insert(id, tensor);
        Ok(tensor)
    }

    fn load(&self, _: WeightId) -> Option<Span> {
        None
    }

    fn weight(&self, id: WeightId) -> Result<Tensor, String> {
        let weight = self.program.weight(id);
        Ok(self.alloc(Region::Weights, weight.dtype, weight.rows, weight.cols))
    }

    fn table(&self, RopeId(id): RopeId) -> Result<Tensor, String> {
        let table = self.program.ropes.get(id as usize);
        let table = table.ok_or_else(|| format!("there is no rotation table {id}"))?;
        let positions = self.program.shape.max_positions;
        Ok(self.alloc(Region::Weights, DType::F32, positions, table.dim))
    }

    fn cache(&self, id: CacheId) -> Result<KvLayer, String> {
        let Some(cache) = self.program.caches.get(id.0 as usize) else {
            return Err(format!("there is no cache {}", id.0));
        };
        let template = crate::layout::pages_of(cache, Self::PAGE_SIZE, 1);
        let bytes = template.page_bytes();
        let span = self.arena.borrow_mut().alloc(Region::Kv, "shapes", bytes);
        let scales = template.scale_bytes();
        let alloc = || self.arena.borrow_mut().alloc(Region::Weights, "shapes", scales);
        Ok(KvLayer { span, scales: (scales > 0).then(alloc), ..template })
    }

    fn carry(&self, id: CarryId) -> Result<Tensor, String> {
        match self.program.carries.get(id.0 as usize) {
            Some(carry) => {
                let seats = self.state.limits.seats;
                let cols = carry.seat_cols(&self.state.limits);
                Ok(self.alloc(Region::Kv, carry.dtype, seats, cols))
            }
            None => Err(format!("there is no recurrent state {}", id.0)),
        }
    }

    fn input(&self, id: InputId) -> Result<Tensor, String> {
        match self.program.inputs.get(id.0 as usize) {
            Some(input) => Ok(self.alloc(Region::State, input.dtype, input.rows, input.cols)),
            None => Err(format!("there is no input {}", id.0)),
        }
    }

    fn bytes(&self, id: ValueId) -> Result<Span, String> {
        Ok(self.value(id)?.span)
    }

    fn state(&self) -> StepState {
        self.state
    }

    fn state_of(&self, _: CacheId) -> StepState {
        self.state
    }

    fn size(&self) -> StepShape {
        let ShapeKey { rows, tokens, .. } = self.key;
        StepShape { rows, tokens, q_len: 1, single: self.key.single() }
    }

    fn pages(&self) -> u32 {
        1
    }

    fn inputs(&self) -> Option<HostInputs> {
        None
    }

    fn live(&self, _value: ValueId) -> Option<Span> {
        None
    }

    fn by_row(&self, value: ValueId) -> bool {
        self.program.value(value).rows == Dim::Rows
    }

    fn last_only(&self, _value: ValueId) -> bool {
        false
    }

    fn members(&self, members: &[ProgramOp]) -> Result<Vec<device::Op>, String> {
        members.iter().map(|member| member.bind(self)).collect()
    }
}
