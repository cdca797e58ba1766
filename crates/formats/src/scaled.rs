//! Weights of safetensors checkpoints whose scales are tensors of their own: fp8, int4 and MXFP4.
//!
//! `quantization_config` in `config.json` names one of five formats, each with its own tensor names, order of
//! elements and rules. Here they become one form: rows of fp8 or of four-bit values in the order of the model's
//! columns, each row with its own scales ([`ScaledRows`]).
//!
//! The configuration says how quantised weights are stored; which weights are quantised is decided by the tensors in
//! the file, because lists such as `modules_to_not_convert` are read differently by different packages.
//!
//! ```no_run
//! use formats::{checkpoint::Checkpoint, scaled::Quantisation};
//!
//! # fn main() -> Result<(), formats::Error> {
//! let checkpoint = Checkpoint::open("Qwen3-8B-AWQ".as_ref())?;
//! if let Some(quantisation) = Quantisation::of(&checkpoint)? {
//!     let name = "model.layers.0.self_attn.q_proj.weight";
//!     if let Some(weight) = quantisation.weight(&checkpoint, name)? {
//!         let rows = weight.read(&checkpoint, 0..16)?;
//!         let mut floats = vec![0.0; 16 * weight.cols()];
//!         rows.dequantise(weight.cols(), &mut floats);
//!     }
//! }
//! # Ok(())
//! # }
//! ```

mod awq;
mod compressed;
mod fp8;
mod gptq;
mod int4;
mod mxfp4;
mod names;
mod settings;
mod tensors;

use crate::checkpoint::{Checkpoint, Format, read_capped};
use crate::quant;
use crate::{Result, config, limits};
use settings::Settings;
use std::ops::Range;
use std::path::Path;

/// Rows and columns of a block of fp8 elements with one scale.
pub const BLOCK: usize = 128;

/// What a checkpoint's `quantization_config` says, checked.
#[derive(Debug)]
pub struct Quantisation {
    method: Method,
}

#[derive(Debug)]
enum Method {
    Fp8(fp8::Config),
    Compressed(compressed::Config),
    Awq(awq::Config),
    Gptq(gptq::Config),
    Mxfp4(mxfp4::Config),
}

impl Quantisation {
    /// What `quantization_config` (or its older name, `compression_config`) in the checkpoint's `config.json` says;
    /// `None` when there is none, and for GGUF, whose tensors name their types themselves.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let file = checkpoint.folder().join("config.json");
        if checkpoint.format() == Format::Gguf || !file.exists() {
            return Ok(None);
        }
        Self::from_json(&file, &read_capped(&file, limits::CONFIG_BYTES)?)
    }

    /// The same from the contents of `config.json`, read from `file`.
    pub fn from_json(file: &Path, json: &[u8]) -> Result<Option<Self>> {
        let config = config::object(file, json)?;
        let config = Settings::new(file, &config);
        let settings = match config.object("quantization_config")? {
            Some(settings) => Some(settings),
            None => config.object("compression_config")?,
        };
        let Some(settings) = settings else { return Ok(None) };
        let method = match settings.text("quant_method")? {
            Some("fp8") => Method::Fp8(fp8::Config::read(&settings)?),
            Some("compressed-tensors") => Method::Compressed(compressed::Config::read(&settings)?),
            Some("awq") => Method::Awq(awq::Config::read(&settings)?),
            Some("gptq") => Method::Gptq(gptq::Config::read(&settings)?),
            Some("mxfp4") => Method::Mxfp4(mxfp4::Config::read(&settings)?),
            _ => {
                let allowed = "fp8, compressed-tensors, awq, gptq, mxfp4";
                return Err(settings.unsupported("quant_method", allowed));
            }
        };
        Ok(Some(Self { method }))
    }

    /// The format, as `quant_method` calls it.
    pub fn method(&self) -> &'static str {
        match self.method {
            Method::Fp8(_) => "fp8",
            Method::Compressed(_) => "compressed-tensors",
            Method::Awq(_) => "awq",
            Method::Gptq(_) => "gptq",
            Method::Mxfp4(_) => "mxfp4",
        }
    }

    /// How the weight `name` (as in `model.layers.0.self_attn.q_proj.weight`) is stored; `None` when it is a plain
    /// tensor, or when the checkpoint has none of its tensors.
    pub fn weight(&self, checkpoint: &Checkpoint, name: &str) -> Result<Option<ScaledWeight>> {
        let module = name.strip_suffix(".weight");
        match (&self.method, module) {
            (Method::Mxfp4(config), None) => config.weight(checkpoint, name),
            (Method::Fp8(config), Some(module)) => config.weight(checkpoint, module),
            (Method::Compressed(config), Some(module)) => config.weight(checkpoint, module),
            (Method::Awq(config), Some(module)) => config.weight(checkpoint, module),
            (Method::Gptq(config), Some(module)) => config.weight(checkpoint, module),
            (Method::Mxfp4(_), Some(_)) | (_, None) => Ok(None),
        }
    }
}

/// What the elements of a weight are and what one scale covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// e4m3, a scale for each block of 128 × 128.
    Fp8Block,
    /// e4m3, a scale for each row.
    Fp8Row,
    /// Four bits, a scale and a zero for each group of columns of a row.
    Int4 {
        /// Columns of a group; all of them when there is one scale for each row.
        group: usize,
        /// Whether columns belong to groups in an order of their own (`g_idx`), not in runs of `group`.
        ordered: bool,
    },
    /// Four-bit floats, an exponent for each 32 columns of a row.
    Mxfp4,
}

/// One quantised weight of a checkpoint: the tensors that it is made of, with their shapes checked.
#[derive(Clone, Debug)]
pub struct ScaledWeight {
    scheme: Scheme,
    rows: usize,
    cols: usize,
    stored: Stored,
    tensors: Vec<String>,
}

#[derive(Clone, Debug)]
enum Stored {
    Fp8(fp8::Stored),
    Compressed(compressed::Stored),
    Awq(awq::Stored),
    Gptq(gptq::Stored),
    Mxfp4(mxfp4::Stored),
}

impl ScaledWeight {
    /// What its elements are.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The tensors of the checkpoint that belong to this weight, also those that are not read, such as the scale of
    /// static activations.
    pub fn tensors(&self) -> Vec<&str> {
        self.tensors.iter().map(String::as_str).collect()
    }

    /// Some of the rows, of which it reads only what these rows need. AWQ and GPTQ store a weight transposed; there a
    /// few columns of every stored row are read, so a call should ask for many rows.
    pub fn read(&self, checkpoint: &Checkpoint, rows: Range<usize>) -> Result<ScaledRows> {
        if rows.start > rows.end || rows.end > self.rows {
            let first = self.tensors.first().map_or("", String::as_str);
            let allowed = format!("within {}", self.rows);
            return Err(checkpoint.invalid(first, "rows", format!("{rows:?}"), allowed));
        }
        match &self.stored {
            Stored::Fp8(stored) => stored.read(checkpoint, self.cols, rows),
            Stored::Compressed(stored) => stored.read(checkpoint, self.cols, rows),
            Stored::Awq(stored) => stored.read(checkpoint, self.cols, rows),
            Stored::Gptq(stored) => stored.read(checkpoint, self.cols, rows),
            Stored::Mxfp4(stored) => stored.read(checkpoint, self.cols, rows),
        }
    }
}

/// Some rows of a weight, in the same form whatever format they come from.
#[derive(Clone, Debug, PartialEq)]
pub enum ScaledRows {
    /// Weights are element times scale.
    Fp8 {
        /// e4m3, rows × columns.
        bytes: Vec<u8>,
        /// Rows × ⌈columns / 128⌉ for blocks (rows of one block have equal ones), rows × 1 otherwise (a scale of the
        /// whole tensor is repeated).
        scales: Vec<f32>,
    },
    /// Weights are (value − zero) × scale.
    Int4 {
        /// 0 to 15, rows × columns, in the order of the model's columns.
        values: Vec<u8>,
        /// Rows × groups.
        scales: Vec<f32>,
        /// 0 to 15, rows × groups.
        zeros: Vec<u8>,
        /// The group of each column, when columns do not belong to them in runs. All groups are equally large.
        groups: Option<Vec<u32>>,
    },
    /// Weights are element times a power of 2.
    Mxfp4 {
        /// Rows × columns / 2: the lower half of a byte is an even column.
        bytes: Vec<u8>,
        /// Rows × columns / 32: exponents as e8m0 stores them.
        exponents: Vec<u8>,
    },
}

impl ScaledRows {
    /// Rows of GGUF's blocks of MXFP4 in the order of these rows.
    pub fn of_mxfp4_blocks(blocks: &[u8]) -> ScaledRows {
        mxfp4::from_blocks(blocks)
    }

    /// The weights in f32, rows × `cols`, as the packages that write these formats compute them.
    pub fn dequantise(&self, cols: usize, out: &mut [f32]) {
        if cols == 0 {
            return;
        }
        match self {
            Self::Fp8 { bytes, scales } => {
                let count = per_row(scales.len(), bytes.len(), cols);
                let rows = bytes.chunks(cols).zip(scales.chunks(count)).zip(out.chunks_mut(cols));
                for ((bytes, scales), out) in rows {
                    for (column, (&byte, out)) in bytes.iter().zip(out).enumerate() {
                        let scale = scales[if count == 1 { 0 } else { column / BLOCK }];
                        *out = quant::fp8::e4m3(byte) * scale;
                    }
                }
            }
            Self::Int4 { values, scales, zeros, groups } => {
                let count = per_row(scales.len(), values.len(), cols);
                let group = cols.div_ceil(count);
                let factors = scales.chunks(count).zip(zeros.chunks(count));
                let rows = values.chunks(cols).zip(factors).zip(out.chunks_mut(cols));
                for ((values, (scales, zeros)), out) in rows {
                    for (column, (&value, out)) in values.iter().zip(out).enumerate() {
                        let g = groups.as_ref().map_or(column / group, |g| g[column] as usize);
                        *out = f32::from(i16::from(value) - i16::from(zeros[g])) * scales[g];
                    }
                }
            }
            Self::Mxfp4 { bytes, exponents } => {
                let groups = out.chunks_mut(mxfp4::GROUP).zip(exponents);
                for ((out, exponent), bytes) in groups.zip(bytes.chunks(mxfp4::GROUP / 2)) {
                    let power = quant::fp8::e8m0(*exponent);
                    for (at, out) in out.iter_mut().enumerate() {
                        *out = quant::fp4::e2m1(bytes[at / 2] >> (at % 2 * 4) & 15) * power;
                    }
                }
            }
        }
    }
}

/// Scales of one row, at least one, where all rows have `scales` and `elements`.
fn per_row(scales: usize, elements: usize, cols: usize) -> usize {
    (scales / (elements / cols).max(1)).max(1)
}
