//! `quant_method: fp8`: e4m3 with a scale for each block of 128 × 128, or one for the tensor; and the reading of fp8
//! weights, which compressed-tensors stores the same way.

use super::tensors::{self, SCALES};
use super::{BLOCK, ScaledRows, ScaledWeight, Scheme, Settings};
use crate::checkpoint::Checkpoint;
use crate::dtype::DType;
use crate::{Error, Result};
use std::ops::Range;

/// Scales of activations, which the checkpoint may have for each weight and which are not read.
pub(super) const ACTIVATIONS: &[&str] = &["input_scale", "activation_scale", "output_scale"];

#[derive(Debug)]
pub(super) struct Config {
    blocks: bool,
    /// Whether scales may be bytes that are exponents.
    exponents: bool,
    plain: Vec<String>,
}

impl Config {
    pub(super) fn read(settings: &Settings<'_>) -> Result<Self> {
        if !matches!(settings.text("fmt")?, None | Some("e4m3" | "float8_e4m3fn")) {
            return Err(settings.unsupported("fmt", "e4m3"));
        }
        if !matches!(settings.text("activation_scheme")?, None | Some("dynamic" | "static")) {
            return Err(settings.unsupported("activation_scheme", "dynamic, static"));
        }
        if !matches!(settings.text("expert_dtype")?, None | Some("fp8")) {
            return Err(settings.unsupported("expert_dtype", "fp8"));
        }
        let exponents = match settings.text("scale_fmt")? {
            None | Some("float") => false,
            Some("ue8m0") => true,
            Some(_) => return Err(settings.unsupported("scale_fmt", "float, ue8m0")),
        };
        let blocks = match settings.pair("weight_block_size")? {
            None => false,
            Some([128, 128]) => true,
            Some(_) => return Err(settings.unsupported("weight_block_size", "[128, 128], or none")),
        };
        let mut plain = settings.names("modules_to_not_convert")?;
        plain.extend(settings.names("ignored_layers")?);
        Ok(Self { blocks, exponents, plain: plain.into_iter().map(str::to_owned).collect() })
    }

    pub(super) fn weight(
        &self,
        checkpoint: &Checkpoint,
        module: &str,
    ) -> Result<Option<ScaledWeight>> {
        let weight = format!("{module}.weight");
        let Some(info) = checkpoint.get(&weight) else { return Ok(None) };
        let scales = tensors::present(checkpoint, module, &["weight_scale_inv", "weight_scale"]);
        let scale = match &scales[..] {
            [] if info.dtype != DType::F8_E4M3 || self.is_plain(module) => return Ok(None),
            [] => {
                let end = if self.blocks { "weight_scale_inv" } else { "weight_scale" };
                let missing = format!("tensor {module}.{end}");
                return Err(Error::missing(checkpoint.path(), missing));
            }
            [scale] => scale,
            [first, ..] => {
                let allowed = "one of weight_scale and weight_scale_inv";
                return Err(checkpoint.invalid(first, "presence", "both", allowed));
            }
        };
        let spread = if self.blocks {
            Spread::Block
        } else if tensors::tensor(checkpoint, scale)?.elements() == 1 {
            Spread::Tensor
        } else {
            Spread::Row
        };
        let exponents = self.exponents;
        Stored::weight(checkpoint, module, scale, spread, exponents).map(Some)
    }

    /// Whether the lists of modules that were not converted have this one: whole, or as the first or last parts of
    /// its name.
    fn is_plain(&self, module: &str) -> bool {
        self.plain.iter().any(|name| {
            let rest = module.strip_prefix(name.as_str()).map(|rest| rest.starts_with('.'));
            let before = module.strip_suffix(name.as_str()).map(|before| before.ends_with('.'));
            module == name || rest == Some(true) || before == Some(true)
        })
    }
}

/// What one scale covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spread {
    Tensor,
    Row,
    Block,
}

#[derive(Clone, Debug)]
pub(super) struct Stored {
    weight: String,
    scale: String,
    spread: Spread,
    /// What the elements of `scale` are; a tensor of U8 holds exponents.
    scale_dtype: DType,
}

impl Stored {
    /// The weight of a module with scales of that spread in the tensor `scale`.
    pub(super) fn weight(
        checkpoint: &Checkpoint,
        module: &str,
        scale: &str,
        spread: Spread,
        exponents: bool,
    ) -> Result<ScaledWeight> {
        let weight = format!("{module}.weight");
        let (rows, cols) = tensors::matrix(checkpoint, &weight, &[DType::F8_E4M3])?;
        let mut dtypes = SCALES.to_vec();
        dtypes.push(DType::F8_E8M0);
        if exponents {
            dtypes.push(DType::U8);
        }
        let info = tensors::typed(checkpoint, scale, &dtypes)?;
        let fits = match spread {
            Spread::Tensor => info.elements() == 1,
            Spread::Row => info.shape == [rows, 1] || info.shape == [rows],
            Spread::Block => info.shape == [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)],
        };
        if !fits {
            let allowed = match spread {
                Spread::Tensor => "one element".to_owned(),
                Spread::Row => format!("[{rows}, 1], one per row of {weight}"),
                Spread::Block => {
                    let shape = [rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
                    format!("{shape:?}, one per block of {weight}")
                }
            };
            return Err(checkpoint.invalid(scale, "shape", format!("{:?}", info.shape), allowed));
        }
        let scale_dtype = if info.dtype == DType::U8 { DType::F8_E8M0 } else { info.dtype };
        let scheme = if spread == Spread::Block { Scheme::Fp8Block } else { Scheme::Fp8Row };
        let mut names = vec![weight.clone(), scale.to_owned()];
        names.extend(tensors::present(checkpoint, module, ACTIVATIONS));
        let stored = Self { weight, scale: scale.to_owned(), spread, scale_dtype };
        Ok(ScaledWeight { scheme, rows, cols, stored: super::Stored::Fp8(stored), tensors: names })
    }

    pub(super) fn read(
        &self,
        checkpoint: &Checkpoint,
        cols: usize,
        rows: Range<usize>,
    ) -> Result<ScaledRows> {
        let mut bytes = vec![0; rows.len() * cols];
        checkpoint.read_range(&self.weight, rows.start * cols, &mut bytes)?;
        let floats =
            |start, count| tensors::floats(checkpoint, &self.scale, self.scale_dtype, start, count);
        let scales = match self.spread {
            Spread::Tensor => vec![floats(0, 1)?[0]; rows.len()],
            Spread::Row => floats(rows.start, rows.len())?,
            Spread::Block => {
                let count = cols.div_ceil(BLOCK);
                let first = rows.start / BLOCK;
                let last = rows.end.div_ceil(BLOCK).max(first);
                let blocks = floats(first * count, (last - first) * count)?;
                rows.flat_map(|row| &blocks[(row / BLOCK - first) * count..][..count])
                    .copied()
                    .collect()
            }
        };
        Ok(ScaledRows::Fp8 { bytes, scales })
    }
}
