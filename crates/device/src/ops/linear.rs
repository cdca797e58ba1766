//! `y = epilogue(norm(x) · wᵀ + bias)`.
//!
//! The norm, when present, is applied to each row of `x` in f32 and rounded to `x`'s dtype before
//! the product. (A device may round `x · weight` instead and apply the row's scale to the f32 sum: the
//! same relative rounding, one exchange fewer.) Products are summed in f32; the epilogue works on the f32 sum and rounds once, when
//! storing. For `SiluMul` the rows of `w` alternate gate and up, so `y` has n/2 columns.
//! Packed weights (`P4`, `P8`) are multiplied with x quantised to 8 bits per 32 columns, as
//! `cpu::pack::quantise` does; sums within a block are then exact integers.
//! With [`crate::variant::Pick::Fixed`] a row's sums are in the same order whatever the number of rows; CPU kernels
//! are so anyway.
//! With `hand` an op prepares its result for the norm of the next one, in scratch that both have; a device
//! without such kernels leaves it and applies the norm as ever.
//! With `rope` the product is qkv, and what `rope_kv` does to it comes next; a device may do that to the f32 sums.
//! Rows of `x` past the `live` count may be left uncomputed; their `y` is then unchanged.

mod cuda;

use super::{
    Access, Contract, SpanVisitor, StepSize, Traffic, norm_bytes, require, require_fit,
    require_float, require_norm, require_scratch, require_vector, require_weights, require_word,
};
use crate::cpu::memory::CpuMemory;
use crate::cpu::pack;
use crate::cpu::view::{Matrix, Words, round_to};
use crate::op::{Epilogue, Hand, Linear};
use crate::variant::{Pick, Variant};
use crate::{DType, Result, Span, Tensor};

mod acts;
mod amx;
mod avx2;
mod fast;
mod finish;
mod ggml;
mod hand;
mod packed;
mod plain;
mod tiles;
pub(crate) mod variant;
mod vnni;
mod wgmma;

impl Contract for Linear {
    const NAME: &'static str = "linear";

    fn check(&self) -> Result<()> {
        let n = match self.epilogue {
            Epilogue::SiluMul => self.w.rows / 2,
            _ => self.w.rows,
        };
        require_fit(&self.x, Self::NAME, "x")?;
        require_weights(&self.w, Self::NAME, "w")?;
        require_fit(&self.y, Self::NAME, "y")?;
        require_float(&self.x, Self::NAME, "x")?;
        require_float(&self.y, Self::NAME, "y")?;
        require(self.x.cols == self.w.cols, Self::NAME, || {
            format!("x has {} columns, w has {}", self.x.cols, self.w.cols)
        })?;
        require(self.y.rows == self.x.rows && self.y.cols == n, Self::NAME, || {
            format!("y is {}×{}, not {}×{n}", self.y.rows, self.y.cols, self.x.rows)
        })?;
        if let Some(norm) = &self.norm {
            require_norm(norm, self.x.cols, Self::NAME)?;
        }
        match &self.hand {
            Hand::Nothing => {}
            Hand::Gives(norm) => require_norm(norm, self.y.cols, Self::NAME)?,
            Hand::Takes => require(self.norm.is_some(), Self::NAME, || {
                "takes a prepared input without a norm".into()
            })?,
        }
        if let Some(bias) = &self.bias {
            require_vector(bias, self.w.rows, Self::NAME, "bias")?;
        }
        if let Some(live) = self.live {
            require_word(live, Self::NAME, "the live count")?;
        }
        require_scratch(self.scratch, Self::NAME)?;
        if let Some(rope) = &self.rope {
            rope.check()?;
            let fits = rope.qkv == self.y && self.epilogue == Epilogue::Store;
            require(fits, Self::NAME, || "what is rotated is not the plain product".into())?;
        }
        match &self.epilogue {
            Epilogue::Residual(residual) => {
                require_fit(residual, Self::NAME, "residual")?;
                require_float(residual, Self::NAME, "residual")?;
                require(residual.rows == self.y.rows && residual.cols == n, Self::NAME, || {
                    "residual and y differ in shape".into()
                })
            }
            Epilogue::SiluMul => require(self.w.rows.is_multiple_of(2), Self::NAME, || {
                "gate and up rows are not paired".into()
            }),
            Epilogue::Store => Ok(()),
        }
    }

    fn describe(&self) -> String {
        let mut text = format!("linear {} · {}", self.x, self.w);
        if self.norm.is_some() {
            let ready = self.hand == Hand::Takes;
            text.insert_str(0, if ready { "prepared norm + " } else { "norm + " });
        }
        if self.bias.is_some() {
            text.push_str(" + bias");
        }
        text.push_str(match self.epilogue {
            Epilogue::Store => "",
            Epilogue::Residual(_) => " + residual",
            Epilogue::SiluMul => ", silu·mul",
        });
        if let Some(rope) = &self.rope {
            text.push_str(if rope.q_norm.is_some() { ", qk-norm + rope" } else { ", rope" });
        }
        if matches!(self.hand, Hand::Gives(_)) {
            text.push_str(", prepares the next norm");
        }
        text + &self.pick.suffix()
    }

    fn traffic(&self) -> Traffic {
        let residual = match &self.epilogue {
            Epilogue::Residual(residual) => residual.bytes(),
            Epilogue::Store | Epilogue::SiluMul => 0,
        };
        let bias = self.bias.as_ref().map_or(0, Tensor::bytes);
        let rope = self.rope.as_ref().map_or(0, |rope| rope.norm_bytes());
        Traffic {
            weights: self.w.bytes() + bias + norm_bytes(&self.norm) + rope,
            values: self.x.bytes() + self.y.bytes() + residual,
        }
    }

    fn step_size(&self) -> StepSize {
        StepSize::ANY
    }

    fn scratch_slot(&mut self) -> Option<&mut Option<Span>> {
        Some(&mut self.scratch)
    }

    fn pick(&self) -> Option<Pick<Variant>> {
        Some(self.pick.map(Variant::Linear))
    }

    fn set_pick(&mut self, pick: Pick<Variant>) -> bool {
        self.pick = match pick {
            Pick::Best => Pick::Best,
            Pick::Rule => Pick::Rule,
            Pick::Fixed => Pick::Fixed,
            Pick::Named(Variant::Linear(variant)) => Pick::Named(variant),
            Pick::Named(Variant::Attention(_) | Variant::OneNode) => return false,
        };
        true
    }

    fn visit_spans(&self, visit: SpanVisitor<'_>) {
        visit(self.x.span, Access::Read);
        visit(self.w.span, Access::Read);
        if let Some(norm) = &self.norm {
            visit(norm.weight.span, Access::Read);
        }
        if let Some(bias) = &self.bias {
            visit(bias.span, Access::Read);
        }
        if let Epilogue::Residual(residual) = &self.epilogue {
            visit(residual.span, Access::Read);
        }
        if let Some(live) = self.live {
            visit(live, Access::Read);
        }
        if let Hand::Gives(norm) = &self.hand {
            visit(norm.weight.span, Access::Read);
        }
        if let Some(scratch) = self.scratch {
            let takes = self.hand == Hand::Takes;
            visit(scratch, if takes { Access::Update } else { Access::Write });
        }
        visit(self.y.span, Access::Write);
        if let Some(rope) = &self.rope {
            // What it rewrites, this op has just written.
            rope.visit_spans(&mut |span, access| {
                if span != self.y.span {
                    visit(span, access);
                }
            });
        }
    }

    fn in_place(&self) -> Option<(&Tensor, &Tensor)> {
        match &self.epilogue {
            Epilogue::Residual(residual) => Some((residual, &self.y)),
            _ => None,
        }
    }
}

impl Linear {
    /// Rows that must be computed now.
    pub(crate) fn live_rows(&self, memory: &CpuMemory) -> usize {
        let rows = self.x.rows as usize;
        self.live.map_or(rows, |live| rows.min(Words::of_span(memory, live).get(0) as usize))
    }

    pub(crate) fn reference(&self, memory: &CpuMemory) {
        let x = Matrix::new(memory, &self.x);
        let input = |row: usize| {
            let mut values = vec![0.0; x.cols];
            x.read_row(row, &mut values);
            if let Some(norm) = &self.norm {
                norm.apply(memory, &mut values);
                values.iter_mut().for_each(|value| *value = round_to(self.x.dtype, *value));
            }
            values
        };
        let inputs: Vec<Vec<f32>> = (0..self.live_rows(memory)).map(input).collect();
        let mut products = vec![vec![0.0f32; self.w.rows as usize]; inputs.len()];
        match self.w.dtype {
            DType::P4 | DType::P8 => self.reference_packed(memory, &inputs, &mut products),
            _ => self.reference_plain(memory, &inputs, &mut products),
        }
        for (row, products) in products.iter_mut().enumerate() {
            if let Some(bias) = &self.bias {
                let bias = Matrix::new(memory, bias);
                products.iter_mut().enumerate().for_each(|(n, p)| *p += bias.get(0, n));
            }
            self.reference_store(memory, row, products);
        }
        if let Some(rope) = &self.rope {
            rope.reference(memory);
        }
    }

    fn reference_plain(&self, memory: &CpuMemory, inputs: &[Vec<f32>], products: &mut [Vec<f32>]) {
        let w = Matrix::new(memory, &self.w);
        let mut weights = vec![0.0; w.cols];
        for n in 0..w.rows {
            w.read_row(n, &mut weights);
            for (x, products) in inputs.iter().zip(&mut *products) {
                let terms = x.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
                products[n] = terms.sum::<f64>() as f32;
            }
        }
    }

    fn reference_packed(&self, memory: &CpuMemory, inputs: &[Vec<f32>], products: &mut [Vec<f32>]) {
        let (w, dtype) = (Matrix::new(memory, &self.w), self.w.dtype);
        // SAFETY: a packed matrix is dense, so it takes exactly these bytes of its span.
        let packed = unsafe { std::slice::from_raw_parts(w.start(), dtype.bytes(w.rows * w.cols)) };
        for (x, products) in inputs.iter().zip(products) {
            let x: Vec<_> = x.chunks_exact(pack::COLS).map(pack::quantise).collect();
            for (n, product) in products.iter_mut().enumerate() {
                let terms = x.iter().enumerate().map(|(at, x)| {
                    let block = pack::block(dtype, packed, w.cols, n, at);
                    let values =
                        (0..pack::COLS).map(|c| pack::element(dtype, block, n % pack::ROWS, c));
                    let dot: i32 = values.zip(x.q).map(|((_, _, w), x)| w * i32::from(x)).sum();
                    let (d, m, _) = pack::element(dtype, block, n % pack::ROWS, 0);
                    f64::from(d) * f64::from(x.d) * f64::from(dot) + f64::from(m) * f64::from(x.s)
                });
                *product = terms.sum::<f64>() as f32;
            }
        }
    }

    fn reference_store(&self, memory: &CpuMemory, row: usize, products: &[f32]) {
        let y = Matrix::new(memory, &self.y);
        for col in 0..y.cols {
            let value = match &self.epilogue {
                Epilogue::Store => products[col],
                Epilogue::Residual(residual) => {
                    Matrix::new(memory, residual).get(row, col) + products[col]
                }
                Epilogue::SiluMul => {
                    let (gate, up) = (products[2 * col], products[2 * col + 1]);
                    gate / (1.0 + (-gate).exp()) * up
                }
            };
            y.set(row, col, value);
        }
    }
}
