//! How the GEMMs of `kernels/experts.cu` are divided: which tiles and units, measured for each format of weights.

use super::Experts;
use crate::cuda::launch::{Arg, Target, TensorMap};
use crate::cuda::lower::{Kernel, aligned};
use crate::ops::linear::hand::tiled;
use crate::ops::linear::scaled::{scales_of, tiled_bytes};
use crate::scaled::{BLOCK, PIECE_ROWS, mxfp4};
use crate::variant::{ExpertsVariant, Pick};
use crate::{DType, Tensor};

/// How weights are stored, and what they are multiplied as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// bf16.
    Halves,
    /// e4m3 with blocks of scales, widened to bf16 in registers.
    Widened,
    /// e4m3 with blocks of scales, multiplied as it is: tokens become e4m3 where they are copied.
    Bytes,
    /// Pieces of MXFP4, widened to bf16 in registers.
    Fp4,
}

impl Form {
    fn is_fp8(self) -> bool {
        matches!(self, Form::Widened | Form::Bytes)
    }

    /// Weight rows that a unit may have besides what was asked for, the most first.
    fn rows(self) -> &'static [u32] {
        match self {
            Form::Halves => &[128, 64],
            Form::Widened | Form::Bytes => &[256, 192, 128, 64],
            Form::Fp4 => &[240, 192, 128, 96, 64, 32, 16],
        }
    }

    fn tiles(self) -> &'static [u32] {
        match self {
            Form::Halves => &[8, 16, 32, 64, 128, 256],
            Form::Widened => &[8, 16, 32, 64, 128],
            Form::Bytes => &[8, 16, 24, 32, 48, 64],
            Form::Fp4 => &[8, 16, 24, 32, 48, 64, 96, 128],
        }
    }
}

/// How the GEMMs are divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) form: Form,
    /// Most tokens of a task.
    pub(super) tile: u32,
    /// Weight rows of a unit of gate and up.
    pub(super) up: u32,
    /// Weight rows of a unit of down.
    pub(super) down: u32,
    /// Chunks of 64 columns in a stage.
    pub(super) depth: u32,
    /// Threads that copy tokens.
    pub(super) copiers: u32,
    /// Whether tokens are copied to the plan's order first, and pairs of blocks copy them for each other.
    pub(super) gathered: bool,
}

/// Shared memory of a block.
const SHARED: u32 = 232_448;

impl Shape {
    /// Threads that multiply, by 64 weight rows each two warps.
    pub(super) fn wide(self) -> u32 {
        self.up.max(self.down).next_multiple_of(64)
    }

    pub(super) fn stage_bytes(self) -> u32 {
        let weights = match self.form {
            Form::Halves => self.wide() * 128 * self.depth,
            Form::Widened | Form::Bytes => self.wide() * 64 * self.depth,
            Form::Fp4 => {
                let pieces = self.up.max(self.down) / PIECE_ROWS as u32 * self.depth;
                // Tokens behind them are swizzled.
                (pieces * mxfp4::PIECE as u32).next_multiple_of(1024)
            }
        };
        let token = if self.form == Form::Bytes { 64 } else { 128 };
        weights + self.tile * token * self.depth
    }

    pub(super) fn stages(self) -> u32 {
        let fixed = 16 * 40 + self.wide() / 64 * self.tile * 8 + self.tile * 4;
        // Tokens in e4m3 have scales.
        let scales = if self.form == Form::Bytes { 4 * self.tile } else { 0 };
        ((SHARED - 1024 - fixed) / (self.stage_bytes() + scales)).min(40)
    }

    /// What copies a stage's rows of weights.
    pub(super) fn weights(self, tensor: &Tensor, rows: u32) -> Arg {
        match self.form {
            Form::Halves => tiled(tensor, rows),
            Form::Widened | Form::Bytes => tiled_bytes(tensor, rows),
            Form::Fp4 => {
                // Words of a piece, pieces beside each other, pieces below each other.
                let piece = mxfp4::PIECE as u64;
                let beside = u64::from(tensor.cols) / mxfp4::COLS as u64;
                Arg::TensorMap(TensorMap {
                    span: tensor.span,
                    dtype: DType::F32,
                    dims: vec![piece / 4, beside, u64::from(tensor.rows) / PIECE_ROWS as u64],
                    strides: vec![piece, piece * beside],
                    tile: vec![mxfp4::PIECE as u32 / 4, self.depth, rows / PIECE_ROWS as u32],
                    swizzle: 0,
                })
            }
        }
    }

    /// The format for the kernel, and its scales as the next arguments.
    pub(super) fn format(self, kernel: Kernel, experts: &Experts) -> Kernel {
        match self.form {
            Form::Halves => kernel.define("WEIGHT", "PLAIN"),
            Form::Fp4 => kernel.define("WEIGHT", "FP4_GROUP"),
            Form::Widened | Form::Bytes => kernel
                .define("WEIGHT", "FP8_BLOCK")
                .define("BYTES", u32::from(self.form == Form::Bytes))
                .spans(&[scales_of(&experts.gate_up), scales_of(&experts.down)]),
        }
    }
}

/// A rule's choice: form, tile, rows of gate and up, rows of down.
type Choice = (Form, u32, u32, u32);

/// For bf16. `each`: about twice the tokens of an expert. In fixed steps a token's sums have the same order for any number.
fn choose_halves(experts: &Experts, each: u32) -> Choice {
    let form = Form::Halves;
    match each {
        _ if experts.pick == Pick::Fixed => (form, 16, 128, 128),
        _ if experts.x.rows <= 1 => (form, 8, 64, 64),
        0..=1 => (form, 8, 96, 128),
        2..=12 => (form, 16, 128, 128),
        13..=32 => (form, 32, 128, 128),
        33..=64 => (form, 64, 128, 128),
        65..=128 => (form, 128, 256, 256),
        // Beside biases the sums of more tokens do not fit the registers.
        _ if experts.biases().next().is_some() => (form, 128, 128, 128),
        _ => (form, 256, 128, 128),
    }
}

/// For blocks of e4m3: with few tokens making them e4m3 is much less work than widening all weights.
fn choose_fp8(experts: &Experts, each: u32) -> Choice {
    match each {
        _ if experts.pick == Pick::Fixed => (Form::Widened, 16, 128, 128),
        _ if experts.x.rows <= 1 => (Form::Widened, 8, 64, 64),
        _ if experts.x.rows <= 4 => (Form::Bytes, 8, 192, 256),
        0..=1 => (Form::Bytes, 8, 256, 256),
        2..=12 => (Form::Bytes, 16, 256, 256),
        13..=32 => (Form::Bytes, 32, 256, 256),
        33..=128 => (Form::Widened, 64, 192, 128),
        _ => (Form::Widened, 128, 128, 128),
    }
}

/// For MXFP4: 240 is the most that divides the matrices of gpt-oss and fits.
fn choose_fp4(experts: &Experts, each: u32) -> Choice {
    let form = Form::Fp4;
    match each {
        _ if experts.pick == Pick::Fixed => (form, 16, 240, 240),
        _ if experts.x.rows <= 1 => (form, 8, 192, 192),
        0..=4 => (form, 8, 240, 240),
        5..=24 => (form, 16, 240, 240),
        25..=80 => (form, 48, 240, 240),
        _ => (form, 128, 128, 128),
    }
}

impl Experts {
    /// How the fast kernels divide this op; `None` where they cannot run it.
    pub(super) fn shape(&self, target: &Target) -> Option<Shape> {
        let (wide, inner, top) = (self.x.cols, self.inner(), self.top());
        let halves = |tensor: &Tensor| tensor.dtype == DType::BF16 && aligned(tensor);
        let values = [&self.x, &self.y].into_iter().chain(&self.residual).all(halves);
        let rows = [&self.y].into_iter().chain(&self.residual).all(|tensor| tensor.stride == wide);
        let whole = wide.is_multiple_of(64) && inner.is_multiple_of(64) && wide <= 8192;
        let fits = self.experts <= 512 && top <= 32 && self.x.rows <= 1 << 20;
        if target.capability.0 != 9 || !(values && rows && whole && fits && self.is_gated()) {
            return None;
        }
        let each = 2 * self.x.rows * top / self.experts;
        let blocks = [wide, inner].iter().all(|cols| cols.is_multiple_of(BLOCK as u32));
        let (form, tile, up, down) = match (self.gate_up.dtype, self.down.dtype) {
            (DType::BF16, DType::BF16) if halves(&self.gate_up) && halves(&self.down) => {
                choose_halves(self, each)
            }
            (DType::F8Turns, DType::F8Block) if blocks => choose_fp8(self, each),
            (DType::Mxfp4, DType::Mxfp4) => choose_fp4(self, each),
            _ => return None,
        };
        let named = match self.pick {
            Pick::Named(named) if named.reference => return None,
            Pick::Named(named) => named,
            Pick::Best | Pick::Rule | Pick::Fixed => ExpertsVariant::default(),
        };
        let tile = named.tile.unwrap_or(tile);
        let divides = |all: u32, wanted: u32| {
            let fitting = |rows: &u32| {
                *rows <= wanted.min(256) && rows.is_multiple_of(16) && all.is_multiple_of(*rows)
            };
            [wanted].into_iter().chain(form.rows().iter().copied()).find(fitting)
        };
        let up = divides(2 * inner, named.up.unwrap_or(up))?;
        let down = divides(wide, named.down.unwrap_or(down))?;
        let depth = self.depth(form, tile, named.depth);
        let gathered = match form {
            Form::Halves => tile == 256,
            Form::Widened => tile == 128,
            Form::Bytes | Form::Fp4 => false,
        };
        let pairs = (2 * inner / up).is_multiple_of(2) && (wide / down).is_multiple_of(2);
        let gathered = gathered && pairs;
        let copiers = match (form, tile) {
            _ if gathered => 8,
            (Form::Bytes, 8) => 32,
            (Form::Bytes, 16) => 64,
            (Form::Bytes, _) => 96,
            (Form::Fp4, 8) => 32,
            (_, 8) => 16,
            (_, 16) | (Form::Widened, 32) => 32,
            _ => 64,
        };
        let copiers = named.copiers.unwrap_or(copiers);
        let shape = Shape { form, tile, up, down, depth, copiers, gathered };
        let copied = match form {
            Form::Bytes => matches!(copiers, 32 | 64 | 96),
            _ => matches!(copiers, 8 | 16 | 32 | 64 | 96),
        };
        (copied && form.tiles().contains(&tile) && shape.stages() >= 2).then_some(shape)
    }

    /// Chunks of 64 columns in a stage: they must divide both inner dimensions.
    fn depth(&self, form: Form, tile: u32, named: Option<u32>) -> u32 {
        let chunks = [self.inner() / 64, self.x.cols / 64];
        let divided = |depth: &u32| chunks.iter().all(|chunks| chunks.is_multiple_of(*depth));
        match form {
            // A scale is for 128 columns.
            form if form.is_fp8() => 2,
            Form::Fp4 => named.filter(divided).or((1..=5).rev().find(divided)).unwrap_or(1),
            _ if tile <= 64 && named != Some(1) || named == Some(2) => {
                Some(2).filter(divided).unwrap_or(1)
            }
            _ => 1,
        }
    }
}
