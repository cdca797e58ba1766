//! Experts on the CPU. Assignments of tokens are sorted by expert; then each expert that has any reads its weights once.
//! All threads share every phase: inputs, gate and up, activation, down, sum.

use super::{Clamp, Experts, TURN};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::pack;
use crate::cpu::simd::{Level, exp, levels};
use crate::cpu::step::{Part, Parts, Scratch, Step, Team, chunks, part};
use crate::cpu::view::{Matrix, Words, load_floats, round_to, store_floats};
use crate::ops::gate_mul::Gate;
use crate::ops::linear::acts::Acts;
use crate::ops::linear::finish::Finish;
use crate::ops::linear::{packed, plain};
use crate::ops::live_rows;
use crate::{DType, Span};

struct ExpertsStep {
    x: Matrix,
    choice: Words,
    top: usize,
    experts: usize,
    gate_up: Weights,
    down: Weights,
    /// `None`: up is cut off at 0 and squared.
    gate: Option<Gate>,
    clamp: Option<Clamp>,
    gate_up_bias: Option<Matrix>,
    down_bias: Option<Matrix>,
    residual: Option<Matrix>,
    y: Matrix,
    live: Option<Span>,
    /// Counters of 64 bits, if any.
    load: Option<Words>,
    memory: CpuMemory,
    level: Level,
}

/// The weights of all experts, and how they are multiplied.
#[derive(Clone, Copy)]
struct Weights {
    all: Matrix,
    /// Rows of an expert.
    rows: usize,
    /// `None` multiplies floats.
    packed: Option<packed::Kind>,
}

impl Experts {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let weights = |tensor, rows| {
            let all = Matrix::new(memory, tensor);
            let is_packed = matches!(all.dtype, DType::P4 | DType::P8);
            Weights { all, rows, packed: is_packed.then(|| packed::Kind::of(lowering)) }
        };
        let wide = self.x.cols as usize;
        Box::new(ExpertsStep {
            x: Matrix::new(memory, &self.x),
            choice: Words::new(memory, &self.choice),
            top: self.top() as usize,
            experts: self.experts as usize,
            gate_up: weights(&self.gate_up, self.up_rows() as usize),
            down: weights(&self.down, wide),
            gate: self.is_gated().then(|| Gate::new(self.act, lowering)),
            clamp: self.clamp,
            gate_up_bias: self.gate_up_bias.as_ref().map(|bias| Matrix::new(memory, bias)),
            down_bias: self.down_bias.as_ref().map(|bias| Matrix::new(memory, bias)),
            residual: self.residual.as_ref().map(|residual| Matrix::new(memory, residual)),
            y: Matrix::new(memory, &self.y),
            live: self.live,
            load: self.load.map(|load| Words::of_span(memory, load)),
            memory: *memory,
            level: lowering.level,
        })
    }
}

/// Where everything lies in the shared scratch.
struct Room {
    /// Where each expert's assignments begin; one more for the end.
    first: Part,
    /// Assignments (token · top + place) by expert.
    order: Part,
    /// Where each assignment is in `order`.
    place: Part,
    /// Experts that have assignments.
    active: Part,
    /// Inputs of gate and up, and of down, one block for each expert.
    inputs: Part,
    acts: Part,
    /// Sums of gate and up, then of down, a row for each assignment in `order`.
    sums: Part,
    outputs: Part,
    bytes: usize,
}

/// The plan of a step: which expert has which assignments.
#[derive(Clone, Copy)]
struct Plan {
    first: *mut u32,
    order: *mut u32,
    place: *mut u32,
    active: *mut u32,
    /// How many experts are active.
    count: usize,
}

// SAFETY: one thread writes the plan before the others read it.
unsafe impl Sync for Plan {}

impl Plan {
    /// Assignments of an expert, as places in `order`.
    fn of(&self, expert: usize) -> std::ops::Range<usize> {
        // SAFETY: the expert and the one after it have a first place.
        unsafe { *self.first.add(expert) as usize..*self.first.add(expert + 1) as usize }
    }

    fn active(&self, index: usize) -> usize {
        assert!(index < self.count);
        // SAFETY: one of the active experts.
        unsafe { *self.active.add(index) as usize }
    }
}

/// Addresses in the shared scratch.
#[derive(Clone, Copy)]
struct Floats(*mut f32);

// SAFETY: chunks write different rows, and all are written before any is read.
unsafe impl Send for Floats {}
// SAFETY: as above.
unsafe impl Sync for Floats {}

impl Floats {
    /// The address of a row of a matrix of `cols` columns.
    fn at(self, row: usize, cols: usize) -> *mut f32 {
        self.0.wrapping_add(row * cols)
    }

    /// A row of a matrix of `cols` columns.
    ///
    /// # Safety
    /// It lies in the scratch, and no other thread writes it now.
    unsafe fn row<'a>(self, row: usize, cols: usize) -> &'a mut [f32] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.at(row, cols), cols) }
    }
}

impl Weights {
    /// Floats for the inputs of all assignments: a block for each expert, in whole tiles.
    fn room(&self, assignments: usize, experts: usize) -> usize {
        match self.packed {
            None => assignments * self.all.cols,
            Some(_) => {
                let tiles = assignments / TILE + experts.min(assignments);
                (Acts::bytes(TILE, self.all.cols) * tiles).div_ceil(size_of::<f32>())
            }
        }
    }

    /// The inputs of the expert whose assignments begin at `first`, of which there are `count`; `index` experts with
    /// assignments come before it.
    fn acts(&self, start: Floats, index: usize, first: usize, count: usize) -> Acts {
        let tiles = first / TILE + index;
        let bytes = Acts::bytes(TILE, self.all.cols) * tiles;
        Acts::new(start.at(0, 0).cast::<u8>().wrapping_add(bytes), count, self.all.cols)
    }

    /// Bytes of scratch of a worker.
    fn own(&self) -> usize {
        match self.packed {
            None => plain::own_bytes(self.all.cols),
            Some(_) => packed::own_bytes(self.all.cols),
        }
    }

    /// Units of rows that a thread takes.
    fn units(&self) -> usize {
        match self.packed {
            None => self.rows.div_ceil(plain::ROWS),
            Some(_) => self.rows / pack::ROWS,
        }
    }
}

/// Rows of activations that lie together.
const TILE: usize = 16;

impl ExpertsStep {
    fn room(&self) -> Room {
        let most = self.x.rows * self.top;
        let mut parts = Parts::default();
        let first = parts.take(self.experts + 1);
        let order = parts.take(most);
        let place = parts.take(most);
        let active = parts.take(self.experts);
        let inputs = parts.take(self.gate_up.room(most, self.experts));
        let acts = parts.take(self.down.room(most, self.experts));
        let sums = parts.take(most * self.gate_up.rows);
        let outputs = parts.take(most * self.down.rows);
        Room { first, order, place, active, inputs, acts, sums, outputs, bytes: parts.bytes() }
    }

    /// Sorts assignments by expert, each expert's in the order of tokens.
    fn plan(&self, start: *mut u8, room: &Room, assignments: usize) -> Plan {
        let words = |part: &Part| part.of(start).cast::<u32>();
        let expert = |assignment: usize| {
            let (row, place) = (assignment / self.top, assignment % self.top);
            self.choice.get(row * 2 * self.top + place) as usize
        };
        let mut plan = Plan {
            first: words(&room.first),
            order: words(&room.order),
            place: words(&room.place),
            active: words(&room.active),
            count: 0,
        };
        // SAFETY: no other thread runs yet; the parts have room for every expert and assignment.
        unsafe {
            let first = std::slice::from_raw_parts_mut(plan.first, self.experts + 1);
            first.fill(0);
            for assignment in 0..assignments {
                first[expert(assignment) + 1] += 1;
            }
            for e in 0..self.experts {
                if first[e + 1] > 0 {
                    *plan.active.add(plan.count) = e as u32;
                    plan.count += 1;
                }
                first[e + 1] += first[e];
            }
            // From the last to the first: each begin moves down from its expert's end.
            for assignment in (0..assignments).rev() {
                let end = &mut first[expert(assignment) + 1];
                *end -= 1;
                *plan.order.add(*end as usize) = assignment as u32;
                *plan.place.add(assignment) = *end;
            }
            // Every end is now its expert's begin.
            first.copy_within(1.., 0);
            first[self.experts] = assignments as u32;
        }
        plan
    }

    /// Counts the step: each expert's tokens, the experts that have any, the step.
    fn count(&self, load: &Words, plan: &Plan) {
        let add = |at: usize, more: u64| load.publish_u64(2 * at, load.load_u64(2 * at) + more);
        for index in 0..plan.count {
            let expert = plan.active(index);
            add(expert, plan.of(expert).len() as u64);
        }
        add(self.experts, plan.count as u64);
        add(self.experts + 1, 1);
    }

    /// Prepares one input row for each assignment; `load` gives the row of an expert's place in the order.
    fn inputs(
        &self,
        team: &Team<'_>,
        plan: &Plan,
        weights: &Weights,
        to: Floats,
        load: &(dyn Fn(usize, usize, &mut [f32]) + Sync),
    ) {
        let cols = weights.all.cols;
        let cuts = chunks(plan.count, team.threads());
        team.parallel(cuts, &|chunk, worker| {
            for index in part(plan.count, cuts, chunk) {
                let expert = plan.active(index);
                let places = plan.of(expert);
                let acts = weights.acts(to, index, places.start, places.len());
                for (at, place) in places.enumerate() {
                    let Some(kind) = weights.packed else {
                        // SAFETY: this chunk alone writes this expert's rows.
                        load(expert, place, unsafe { to.row(place, cols) });
                        continue;
                    };
                    // SAFETY: this worker's scratch; this chunk alone writes this expert's rows.
                    unsafe {
                        let values = team.own(worker).floats(cols);
                        load(expert, place, values);
                        acts.store(self.level, at, values);
                        if let packed::Kind::Ggml { .. } = kind {
                            acts.round_sums(at);
                        }
                    }
                }
            }
        });
    }

    /// Inputs times weights of every active expert.
    fn multiply(&self, team: &Team<'_>, plan: &Plan, weights: &Weights, from: Floats, to: Floats) {
        let (cols, units) = (weights.all.cols, weights.units());
        // A few chunks for each thread, however many experts there are.
        let cuts = (8 * team.threads()).div_ceil(plan.count.max(1)).clamp(1, units);
        team.parallel(plan.count * cuts, &|chunk, worker| {
            let (index, piece) = (chunk / cuts, chunk % cuts);
            let expert = plan.active(index);
            let places = plan.of(expert);
            let w = weights.all.part(expert * weights.rows..(expert + 1) * weights.rows);
            let y = to.at(places.start, weights.rows);
            let finish = Finish::store_to(Matrix::floats(y, places.len(), weights.rows));
            let groups = part(units, cuts, piece);
            let own = team.own(worker).bytes(weights.own());
            match weights.packed {
                None => {
                    let inputs = from.at(places.start, cols);
                    let (rows, finish, level) = (places.len(), &finish, self.level);
                    let task = plain::Task { w: &w, inputs, rows, finish, level };
                    for unit in groups {
                        // SAFETY: rows of w, inputs prepared before, this worker's scratch.
                        unsafe { task.run(unit * plain::ROWS, own.cast()) };
                    }
                }
                Some(kind) => {
                    let acts = weights.acts(from, index, places.start, places.len());
                    let (rows, dtype) = (places.len(), w.dtype);
                    let task = packed::Task {
                        dtype,
                        w: w.start(),
                        acts: &acts,
                        rows,
                        finish: &finish,
                        own,
                    };
                    // SAFETY: groups of w, rows prepared before; the kind was detected.
                    unsafe { task.run(kind, groups) };
                }
            }
        });
    }

    /// act(gate) · up of one assignment of an expert, or act(up), rounded to x's dtype.
    fn activate(&self, expert: usize, sums: &mut [f32], out: &mut [f32]) {
        add_bias(self.gate_up_bias.as_ref(), expert, sums);
        match &self.gate {
            Some(gate) => self.multiply_gates(gate, sums, out),
            None => out.iter_mut().zip(sums).for_each(|(out, up)| *out = up.max(0.0) * up.max(0.0)),
        }
        if self.x.dtype != DType::F32 {
            out.iter_mut().for_each(|value| *value = round_to(self.x.dtype, *value));
        }
    }

    /// act(gate) · up, which take turns in `sums`.
    fn multiply_gates(&self, gate: &Gate, sums: &[f32], out: &mut [f32]) {
        for (both, out) in sums.chunks_exact(2 * TURN).zip(out.chunks_exact_mut(TURN)) {
            let pairs: [f32; 2 * TURN] = std::array::from_fn(|i| both[i % 2 * TURN + i / 2]);
            let out: &mut [f32; TURN] = out.try_into().expect("a chunk of eight");
            if let Some(clamp) = self.clamp {
                // SAFETY: the level was detected.
                unsafe { clamped_mul(self.level, both, clamp, out) };
                continue;
            }
            gate.row16(&pairs, out);
        }
    }

    /// The residual and the weighed outputs of a row's experts, in the order of its choice.
    fn sum(&self, row: usize, plan: &Plan, outputs: Floats, total: &mut [f32]) {
        match &self.residual {
            // SAFETY: a row of the residual.
            Some(residual) => unsafe { load_floats(residual.dtype, residual.at(row, 0), total) },
            None => total.fill(0.0),
        }
        for place in 0..self.top {
            let weight = self.choice.float(row * 2 * self.top + self.top + place);
            // SAFETY: a place of the plan, and outputs that are complete.
            let output = unsafe {
                let at = *plan.place.add(row * self.top + place) as usize;
                outputs.row(at, self.y.cols)
            };
            let expert = self.choice.get(row * 2 * self.top + place) as usize;
            add_bias(self.down_bias.as_ref(), expert, output);
            total.iter_mut().zip(output.iter()).for_each(|(sum, out)| *sum += weight * *out);
        }
        // SAFETY: this chunk alone writes this row.
        unsafe { store_floats(self.y.dtype, self.y.at(row, 0), total) };
    }
}

impl Step for ExpertsStep {
    fn scratch(&self) -> Scratch {
        let row = self.x.cols.max(self.down.all.cols) * size_of::<f32>();
        let own = row.max(self.gate_up.own()).max(self.down.own());
        Scratch { shared: self.room().bytes, own }
    }

    fn run(&self, team: &Team<'_>) {
        let rows = live_rows(&self.memory, self.live, self.x.rows);
        let room = self.room();
        let start = team.shared(room.bytes);
        let plan = self.plan(start, &room, rows * self.top);
        if let Some(load) = &self.load {
            self.count(load, &plan);
        }
        let at = |part: &Part| Floats(part.of(start));
        let (inputs, acts) = (at(&room.inputs), at(&room.acts));
        let (sums, outputs) = (at(&room.sums), at(&room.outputs));
        let order = &plan;
        self.inputs(team, &plan, &self.gate_up, inputs, &|_, place, values| {
            // SAFETY: a place of the plan, and a row of x.
            unsafe {
                let row = *order.order.add(place) as usize / self.top;
                load_floats(self.x.dtype, self.x.at(row, 0), values);
            }
        });
        self.multiply(team, &plan, &self.gate_up, inputs, sums);
        self.inputs(team, &plan, &self.down, acts, &|expert, place, values| {
            // SAFETY: sums that are complete, of an assignment that this chunk alone has.
            self.activate(expert, unsafe { sums.row(place, self.gate_up.rows) }, values);
        });
        self.multiply(team, &plan, &self.down, acts, outputs);
        let cuts = chunks(rows, team.threads());
        team.parallel(cuts, &|chunk, worker| {
            // SAFETY: this worker's own scratch.
            let total = unsafe { team.own(worker).floats(self.y.cols) };
            for row in part(rows, cuts, chunk) {
                self.sum(row, &plan, outputs, total);
            }
        });
    }
}

/// Elements of a bias that are read at a time.
const BIASES: usize = 64;

/// Adds an expert's part of a bias, if there is one, to the sums of one of its tokens.
fn add_bias(bias: Option<&Matrix>, expert: usize, sums: &mut [f32]) {
    let Some(bias) = bias else { return };
    let (mut some, from) = ([0.0; BIASES], expert * sums.len());
    for (at, sums) in sums.chunks_mut(BIASES).enumerate() {
        let some = &mut some[..sums.len()];
        // SAFETY: the last of them is an element of the bias, whose elements lie side by side.
        unsafe {
            bias.at(0, from + at * BIASES + some.len() - 1);
            load_floats(bias.dtype, bias.at(0, from + at * BIASES), some);
        }
        sums.iter_mut().zip(some).for_each(|(sum, bias)| *sum += *bias);
    }
}

#[inline(always)]
fn clamped_mul_body<const FMA: bool>(both: &[f32], clamp: Clamp, out: &mut [f32; TURN]) {
    let Clamp { alpha, limit } = clamp;
    let (gates, ups) = both.split_at(TURN);
    for ((out, gate), up) in out.iter_mut().zip(gates).zip(ups) {
        let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
        *out = gate / (1.0 + exp::<FMA>(-alpha * gate)) * (up + 1.0);
    }
}

levels! {
    /// Combines eight gates and the eight ups behind them where gates are limited.
    fn clamped_mul(both: &[f32], clamp: Clamp, out: &mut [f32; TURN]) = clamped_mul_body;
}
