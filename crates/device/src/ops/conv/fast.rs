//! Rows and blocks of channels are divided among the threads. A block takes a row's tokens in order, with the last inputs
//! in scratch.

use crate::cpu::memory::CpuMemory;
use crate::cpu::numerics::Lowering;
use crate::cpu::simd::{Level, fma, levels};
use crate::cpu::step::{Own, Scratch, Step, Team};
use crate::cpu::tables::{Fed, Tables};
use crate::cpu::view::{Matrix, load_floats, store_floats};
use crate::op::{Activation, Conv};
use crate::ops::activate::activate;

/// Channels of a block.
const BLOCK: usize = 512;

struct ConvStep {
    x: Matrix,
    from: usize,
    w: Matrix,
    bias: Option<Matrix>,
    carry: Matrix,
    y: Matrix,
    tables: Tables,
    rows: usize,
    single: bool,
    /// Rows of inputs that a seat carries.
    places: usize,
    /// A row has drafts: all its inputs are kept.
    drafts: bool,
    level: Level,
}

// SAFETY: addresses in an arena that the recording keeps; chunks touch different channels of different rows, and rows of a
// step have different seats.
unsafe impl Send for ConvStep {}
// SAFETY: as above.
unsafe impl Sync for ConvStep {}

impl Conv {
    pub(crate) fn prepare(&self, memory: &CpuMemory, lowering: &Lowering) -> Box<dyn Step> {
        Box::new(ConvStep {
            x: Matrix::new(memory, &self.x),
            from: self.from as usize,
            w: Matrix::new(memory, &self.w),
            bias: self.bias.as_ref().map(|bias| Matrix::new(memory, bias)),
            carry: Matrix::new(memory, &self.carry),
            y: Matrix::new(memory, &self.y),
            tables: Tables::new(memory, &self.state),
            rows: self.rows as usize,
            single: self.single,
            places: self.places() as usize,
            drafts: self.q_len > 1,
            level: lowering.level,
        })
    }
}

impl ConvStep {
    /// Floats of a worker's scratch: the inputs of all taps, their weights by tap, biases and results.
    fn own_floats(&self) -> usize {
        (2 * self.w.cols + 2) * BLOCK
    }

    fn block(&self, fed: &Fed, first: usize, own: Own) {
        let (channels, taps) = (self.w.rows, self.w.cols);
        let count = BLOCK.min(channels - first);
        // SAFETY: this worker's own scratch.
        let own = unsafe { own.floats(self.own_floats()) };
        let (window, own) = own.split_at_mut(taps * BLOCK);
        let (weights, own) = own.split_at_mut(taps * BLOCK);
        let (bias, sums) = own.split_at_mut(BLOCK);
        for c in 0..count {
            (0..taps).for_each(|tap| weights[tap * BLOCK + c] = self.w.get(first + c, tap));
        }
        match &self.bias {
            // SAFETY: elements of the vector.
            Some(own) => unsafe { load_floats(own.dtype, own.at(0, first), &mut bias[..count]) },
            None => bias.fill(0.0),
        }
        let place =
            |position: usize| self.carry.at(fed.seat, position % self.places * channels + first);
        for i in 0..taps - 1 {
            let inputs = &mut window[i * BLOCK..][..count];
            match (fed.before + i).checked_sub(taps - 1) {
                None => inputs.fill(0.0),
                // SAFETY: channels of the seat's inputs.
                Some(at) => unsafe { load_floats(self.carry.dtype, place(at), inputs) },
            }
        }
        let replaced = if self.drafts { 0 } else { fed.tokens.len().saturating_sub(taps - 1) };
        // The newest input's place among the taps; the others follow it, the oldest first.
        let mut newest = taps - 1;
        for (j, token) in fed.tokens.clone().enumerate() {
            let inputs = &mut window[newest * BLOCK..][..count];
            // SAFETY: channels of the token, its results and the seat's inputs, which this chunk alone writes; the level was
            // detected.
            unsafe {
                load_floats(self.x.dtype, self.x.at(token, self.from + first), inputs);
                if j >= replaced {
                    store_floats(self.carry.dtype, place(fed.before + j), inputs);
                }
                sums[..count].copy_from_slice(&bias[..count]);
                for tap in 0..taps {
                    let inputs = &window[(newest + 1 + tap) % taps * BLOCK..][..count];
                    add(self.level, &mut sums[..count], inputs, &weights[tap * BLOCK..][..count]);
                }
                activate(self.level, &mut sums[..count], Activation::Silu);
                store_floats(self.y.dtype, self.y.at(token, first), &sums[..count]);
            }
            newest = (newest + 1) % taps;
        }
    }
}

#[inline(always)]
fn add_body<const FMA: bool>(sums: &mut [f32], inputs: &[f32], weights: &[f32]) {
    for ((sum, input), weight) in sums.iter_mut().zip(inputs).zip(weights) {
        *sum = fma::<FMA>(*input, *weight, *sum);
    }
}

levels! {
    /// Adds a tap.
    fn add(sums: &mut [f32], inputs: &[f32], weights: &[f32]) = add_body;
}

impl Step for ConvStep {
    fn scratch(&self) -> Scratch {
        Scratch { shared: 0, own: self.own_floats() * size_of::<f32>() }
    }

    fn run(&self, team: &Team<'_>) {
        let blocks = self.w.rows.div_ceil(BLOCK);
        team.parallel(self.rows * blocks, &|chunk, worker| {
            if let Some(fed) = self.tables.fed(chunk / blocks, self.single) {
                self.block(&fed, chunk % blocks * BLOCK, team.own(worker));
            }
        });
    }
}
