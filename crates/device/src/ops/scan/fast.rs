//! Rows and heads are divided among the threads; a head's matrix is changed where it lies. Drafts change a copy in scratch.

use super::{Columns, LENGTH_EPS, Log};
use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, dot, fma, levels};
use crate::cpu::step::{Own, Scratch, Step, Team};
use crate::cpu::tables::{Fed, Tables};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{Rule, Scan};

struct ScanStep {
    x: Matrix,
    gates: Matrix,
    from: usize,
    a: Matrix,
    dt: Matrix,
    skip: Option<Matrix>,
    rule: Rule,
    heads: usize,
    key: usize,
    value: usize,
    columns: Vec<Columns>,
    carry: Matrix,
    y: Matrix,
    tables: Tables,
    rows: usize,
    single: bool,
    /// Rows have drafts.
    drafts: bool,
    log: Log,
    /// Tokens in the log.
    logged: usize,
    level: Level,
}

// SAFETY: addresses in an arena that the recording keeps; chunks touch different heads of different rows, and rows of a
// step have different seats.
unsafe impl Send for ScanStep {}
// SAFETY: as above.
unsafe impl Sync for ScanStep {}

impl Scan {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        let heads = self.heads as usize;
        Box::new(ScanStep {
            x: Matrix::new(memory, &self.x),
            gates: Matrix::new(memory, &self.gates),
            from: self.from as usize,
            a: Matrix::new(memory, &self.a),
            dt: Matrix::new(memory, &self.dt),
            skip: self.skip.as_ref().map(|skip| Matrix::new(memory, skip)),
            rule: self.rule,
            heads,
            key: self.key as usize,
            value: self.value as usize,
            columns: (0..heads).map(|head| self.columns(head)).collect(),
            carry: Matrix::new(memory, &self.carry),
            y: Matrix::new(memory, &self.y),
            tables: Tables::new(memory, &self.state),
            rows: self.rows as usize,
            single: self.single,
            drafts: self.q_len > 1,
            log: self.log(),
            logged: self.state.limits.logged() as usize,
            level: lowering.level,
        })
    }
}

impl ScanStep {
    /// Floats of a worker's scratch: a query, a key, a value, products of key and query with the matrix, and the matrix after
    /// drafts.
    fn own_floats(&self) -> usize {
        let copy = if self.drafts { self.key * self.value } else { 0 };
        2 * self.key + 3 * self.value + copy
    }

    /// Where the log of a seat has a position's token.
    fn place(&self, seat: usize, position: usize) -> *mut f32 {
        let place = position % self.logged * self.log.cols as usize;
        self.carry.at(seat, self.heads * self.key * self.value + place).cast()
    }

    /// The first column of a head's keys in the log.
    fn group(&self, head: usize) -> usize {
        self.columns[head].key - self.columns[0].key
    }

    /// Takes the accepted drafts of the last step from the log.
    fn replay(&self, fed: &Fed, head: usize, matrix: &mut [f32]) {
        let count = self.tables.replay(fed.row).min(fed.before);
        for position in fed.before - count..fed.before {
            let from = self.place(fed.seat, position);
            // SAFETY: parts of the token's entry, which no chunk writes in this step: the log has other places for its drafts. The
            // level was detected.
            unsafe {
                let k = std::slice::from_raw_parts(from.add(self.group(head)), self.key);
                let at = self.log.changes + head * self.value;
                let change = std::slice::from_raw_parts(from.add(at), self.value);
                again(self.level, matrix, k, change, *from.add(self.log.decays + head));
            }
        }
    }

    /// Writes a draft into the log; the first head of a group has its key.
    fn keep(
        &self,
        fed: &Fed,
        head: usize,
        index: usize,
        (k, change, decay): (&[f32], &[f32], f32),
    ) {
        let to = self.place(fed.seat, fed.before + index);
        // SAFETY: parts of the entry that this chunk alone writes and no chunk reads in this step.
        unsafe {
            if self.columns[..head].iter().all(|other| other.key < self.columns[head].key) {
                k.as_ptr().copy_to_nonoverlapping(to.add(self.group(head)), k.len());
            }
            let at = self.log.changes + head * self.value;
            change.as_ptr().copy_to_nonoverlapping(to.add(at), change.len());
            to.add(self.log.decays + head).write(decay);
        }
    }

    /// The decay and the strength of a head for a token.
    fn gates(&self, token: usize, head: usize) -> (f32, f32) {
        let gate = |i: usize| self.gates.get(token, self.from + i);
        let softplus = |x: f32| if x > 20.0 { x } else { x.exp().ln_1p() };
        let (a, dt) = (self.a.get(0, head), self.dt.get(0, head));
        let (step, strength) = match self.rule {
            Rule::Delta => {
                let step = softplus(gate(self.heads + head) + dt);
                (step, 1.0 / (1.0 + (-gate(head)).exp()))
            }
            Rule::StateSpace { least } => {
                let step = softplus(gate(head) + dt).max(least);
                (step, step)
            }
        };
        ((-a.exp() * step).exp(), strength)
    }

    fn head(&self, fed: &Fed, head: usize, own: Own) {
        let (key, value, level) = (self.key, self.value, self.level);
        let at = self.columns[head];
        // SAFETY: this worker's own scratch.
        let own = unsafe { own.floats(self.own_floats()) };
        let (q, own) = own.split_at_mut(key);
        let (k, own) = own.split_at_mut(key);
        let (v, own) = own.split_at_mut(value);
        let (known, own) = own.split_at_mut(value);
        let (result, copy) = own.split_at_mut(value);
        let place = self.carry.at(fed.seat, head * key * value).cast::<f32>();
        // SAFETY: the head's matrix of the seat, f32, which this chunk alone touches.
        let mut matrix = unsafe { std::slice::from_raw_parts_mut(place, key * value) };
        if fed.before == 0 {
            matrix.fill(0.0);
        }
        self.replay(fed, head, matrix);
        let mut copy = Some(copy);
        let skip = self.skip.as_ref().map_or(0.0, |skip| skip.get(0, head));
        for (index, token) in fed.tokens.clone().enumerate() {
            if self.drafts
                && index > 0
                && let Some(copy) = copy.take()
            {
                copy.copy_from_slice(matrix);
                matrix = copy;
            }
            let (decay, strength) = self.gates(token, head);
            // SAFETY: parts of the token's row.
            unsafe {
                load_floats(self.x.dtype, self.x.at(token, at.query), q);
                load_floats(self.x.dtype, self.x.at(token, at.key), k);
                load_floats(self.x.dtype, self.x.at(token, at.value), v);
            }
            let delta = self.rule == Rule::Delta;
            // SAFETY: the level was detected; the result's place is this chunk's.
            unsafe {
                if delta {
                    unit(level, q, (key as f32).powf(-0.5));
                    unit(level, k, 1.0);
                }
                products(level, matrix, q, k, decay, known, result);
                change(level, matrix, q, k, v, known, result, (strength, delta, skip));
                let to = self.y.at(token, head * value);
                store_floats(self.y.dtype, to, result);
            }
            if self.drafts && index > 0 {
                self.keep(fed, head, index, (k, known, decay));
            }
        }
    }
}

/// Divides a vector by its length and multiplies it by `factor`.
#[inline(always)]
fn unit_body<const FMA: bool>(vector: &mut [f32], factor: f32) {
    let scale = factor / (dot::<FMA>(vector, vector) + LENGTH_EPS).sqrt();
    vector.iter_mut().for_each(|x| *x *= scale);
}

/// Decays the matrix, and multiplies key and query with it.
#[inline(always)]
fn products_body<const FMA: bool>(
    matrix: &mut [f32],
    q: &[f32],
    k: &[f32],
    decay: f32,
    known: &mut [f32],
    result: &mut [f32],
) {
    known.fill(0.0);
    result.fill(0.0);
    for ((line, q), k) in matrix.chunks_exact_mut(known.len()).zip(q).zip(k) {
        for ((x, known), result) in line.iter_mut().zip(&mut *known).zip(&mut *result) {
            *x *= decay;
            *known = fma::<FMA>(*k, *x, *known);
            *result = fma::<FMA>(*q, *x, *result);
        }
    }
}

/// Adds the token to the matrix, and what that changes to the result. `known` becomes the change.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "parts of one scratch")]
fn change_body<const FMA: bool>(
    matrix: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    known: &mut [f32],
    result: &mut [f32],
    (strength, delta, skip): (f32, bool, f32),
) {
    let both = dot::<FMA>(q, k);
    for ((known, result), v) in known.iter_mut().zip(&mut *result).zip(v) {
        *known = strength * (v - if delta { *known } else { 0.0 });
        *result = fma::<FMA>(both, *known, *result) + skip * v;
    }
    for (line, k) in matrix.chunks_exact_mut(known.len()).zip(k) {
        line.iter_mut().zip(&*known).for_each(|(x, change)| *x = fma::<FMA>(*k, *change, *x));
    }
}

/// Decays the matrix and adds a token to it that was added before.
#[inline(always)]
fn again_body<const FMA: bool>(matrix: &mut [f32], k: &[f32], change: &[f32], decay: f32) {
    for (line, k) in matrix.chunks_exact_mut(change.len()).zip(k) {
        line.iter_mut()
            .zip(change)
            .for_each(|(x, change)| *x = fma::<FMA>(*k, *change, *x * decay));
    }
}

levels! {
    /// Divides a vector by its length and multiplies it by `factor`.
    fn unit(vector: &mut [f32], factor: f32) = unit_body;
}

levels! {
    /// Decays the matrix, and multiplies key and query with it.
    fn products(matrix: &mut [f32], q: &[f32], k: &[f32], decay: f32, known: &mut [f32], result: &mut [f32]) = products_body;
}

levels! {
    /// Decays the matrix and adds a token to it that was added before.
    fn again(matrix: &mut [f32], k: &[f32], change: &[f32], decay: f32) = again_body;
}

levels! {
    /// Adds the token to the matrix, and what that changes to the result.
    fn change(matrix: &mut [f32], q: &[f32], k: &[f32], v: &[f32], known: &mut [f32], result: &mut [f32], how: (f32, bool, f32)) = change_body;
}

impl Step for ScanStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: self.own_floats() * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        team.parallel(self.rows * self.heads, &|chunk, worker| {
            if let Some(fed) = self.tables.fed(chunk / self.heads, self.single) {
                self.head(&fed, chunk % self.heads, team.own(worker));
            }
        });
    }
}
