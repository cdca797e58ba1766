//! compressed-tensors: groups of modules with a scheme each, fp8 (`float-quantized`) or int4 (`pack-quantized`).

use super::fp8::{self, ACTIVATIONS, Spread};
use super::int4::{self, Group, VALUES, WORDS};
use super::names::Names;
use super::tensors::{self, SCALES};
use super::{ScaledRows, ScaledWeight, Settings};
use crate::checkpoint::Checkpoint;
use crate::dtype::DType;
use crate::{Error, Result, limits};
use std::ops::Range;

/// The class of modules that most configurations target: every weight that can be quantised.
const LINEAR: &str = "Linear";

#[derive(Debug)]
pub(super) struct Config {
    ignore: Names,
    groups: Vec<(Names, Weights)>,
}

/// How the weights of a group are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weights {
    Plain,
    Fp8(Spread),
    Int4 {
        group: Group,
        /// Whether there is a tensor of zeros; without one all are 8.
        zeros: bool,
        /// Whether columns must have an order of their own.
        ordered: bool,
    },
}

impl Config {
    pub(super) fn read(settings: &Settings<'_>) -> Result<Self> {
        if let Some(sparsity) = settings.object("sparsity_config")?
            && !matches!(sparsity.text("format")?, None | Some("dense"))
        {
            return Err(sparsity.unsupported("format", "dense"));
        }
        if let Some(transform) = settings.object("transform_config")?
            && transform.object("config_groups")?.is_some_and(|groups| groups.keys().count() > 0)
        {
            return Err(transform.unsupported("config_groups", "none"));
        }
        let Some(groups) = settings.object("config_groups")? else {
            return Err(settings.unsupported("config_groups", "at least one group"));
        };
        let keys: Vec<_> = groups.keys().collect();
        if keys.len() > limits::MODULE_GROUPS {
            let allowed = format!("at most {}", limits::MODULE_GROUPS);
            let field = settings.field("config_groups");
            let found = format!("{} groups", keys.len());
            return Err(Error::invalid(settings.file(), 0, field, found, allowed));
        }
        let names = |settings: &Settings<'_>, key| {
            Names::new(settings.file(), &settings.field(key), &settings.names(key)?)
        };
        let mut read = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(group) = groups.object(key)? else { continue };
            // A group may have a format of its own.
            let owner = if group.get("format").is_some() { &group } else { settings };
            let weights = match group.object("weights")? {
                None => Weights::Plain,
                Some(weights) => match owner.text("format")? {
                    Some("float-quantized" | "naive-quantized") => Weights::fp8(&weights)?,
                    Some("pack-quantized") => Weights::int4(&weights)?,
                    _ => return Err(owner.unsupported("format", "float-quantized, pack-quantized")),
                },
            };
            read.push((names(&group, "targets")?, weights));
        }
        Ok(Self { ignore: names(settings, "ignore")?, groups: read })
    }

    pub(super) fn weight(
        &self,
        checkpoint: &Checkpoint,
        module: &str,
    ) -> Result<Option<ScaledWeight>> {
        let [plain, packed] = ["weight", "weight_packed"].map(|end| format!("{module}.{end}"));
        let name = match (checkpoint.get(&packed), checkpoint.get(&plain)) {
            (Some(_), None) => packed,
            (Some(_), Some(_)) => {
                let found = "also a weight_packed";
                return Err(checkpoint.invalid(&plain, "presence", found, "one of them"));
            }
            (None, Some(info)) if info.dtype == DType::F8_E4M3 => plain,
            (None, Some(info)) => {
                let scale = format!("{module}.weight_scale");
                if checkpoint.get(&scale).is_some() {
                    let allowed = format!("F8_E4M3, because {scale} exists");
                    return Err(checkpoint.invalid(&plain, "dtype", info.dtype, allowed));
                }
                return Ok(None);
            }
            (None, None) => return Ok(None),
        };
        let refuse = |allowed: &str| Err(checkpoint.invalid(&name, "presence", "it", allowed));
        if self.ignore.has(module) || self.ignore.matches(module)? {
            return refuse("a plain weight, because quantization_config.ignore has the module");
        }
        match self.group(module)? {
            Some(Weights::Fp8(spread)) if !name.ends_with("_packed") => {
                let scale = format!("{module}.weight_scale");
                fp8::Stored::weight(checkpoint, module, &scale, spread, false).map(Some)
            }
            Some(Weights::Int4 { group, zeros, ordered }) if name.ends_with("_packed") => {
                Stored::weight(checkpoint, module, group, zeros, ordered).map(Some)
            }
            Some(_) => refuse("a weight as its group in quantization_config.config_groups says"),
            None => refuse("a module that quantization_config.config_groups targets"),
        }
    }

    /// The group of a module: one that names it, else one with an expression that matches, else one for all.
    fn group(&self, module: &str) -> Result<Option<Weights>> {
        if let Some((_, weights)) = self.groups.iter().find(|(targets, _)| targets.has(module)) {
            return Ok(Some(*weights));
        }
        for (targets, weights) in &self.groups {
            if targets.matches(module)? {
                return Ok(Some(*weights));
            }
        }
        Ok(self.groups.iter().find(|(targets, _)| targets.has(LINEAR)).map(|(_, weights)| *weights))
    }
}

impl Weights {
    fn fp8(settings: &Settings<'_>) -> Result<Self> {
        check(settings, "float", 8)?;
        if settings.bool("symmetric")? == Some(false) {
            return Err(settings.unsupported("symmetric", "true"));
        }
        match settings.text("strategy")? {
            None if settings.get("group_size").is_none() => Ok(Self::Fp8(Spread::Tensor)),
            Some("tensor") => Ok(Self::Fp8(Spread::Tensor)),
            Some("channel") => Ok(Self::Fp8(Spread::Row)),
            Some("block") => match settings.pair("block_structure")? {
                Some([128, 128]) => Ok(Self::Fp8(Spread::Block)),
                _ => Err(settings.unsupported("block_structure", "[128, 128]")),
            },
            _ => Err(settings.unsupported("strategy", "tensor, channel, block")),
        }
    }

    fn int4(settings: &Settings<'_>) -> Result<Self> {
        check(settings, "int", 4)?;
        let group = match settings.text("strategy")? {
            Some("channel") => Group::Row,
            Some("group") | None if settings.get("group_size").is_some() => Group::read(settings)?,
            _ => return Err(settings.unsupported("strategy", "group, channel")),
        };
        let ordered = match settings.get("actorder").map(|value| (value.as_bool(), value.as_str()))
        {
            None | Some((Some(false), _) | (_, Some("weight" | "static"))) => false,
            Some((Some(true), _) | (_, Some("group" | "dynamic"))) => true,
            _ => return Err(settings.unsupported("actorder", "group, weight, or none")),
        };
        let zeros = settings.bool("symmetric")? == Some(false);
        Ok(Self::Int4 { group, zeros, ordered })
    }
}

/// Checks type and bits of weights, and that they are stored and not computed while the model runs.
fn check(settings: &Settings<'_>, kind: &str, bits: i64) -> Result<()> {
    // The package's defaults.
    if settings.text("type")?.unwrap_or("int") != kind {
        return Err(settings.unsupported("type", kind));
    }
    settings.expect_int("num_bits", Some(settings.int("num_bits")?.unwrap_or(8)), bits)?;
    if settings.get("dynamic").is_some_and(|dynamic| dynamic.as_bool() != Some(false)) {
        return Err(settings.unsupported("dynamic", "false"));
    }
    Ok(())
}

/// An int4 weight: words of eight input features, row by row, and zeros in words of eight output features.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    packed: String,
    scale: String,
    zeros: Option<String>,
    order: Option<Vec<u32>>,
    groups: usize,
}

impl Stored {
    fn weight(
        checkpoint: &Checkpoint,
        module: &str,
        group: Group,
        zeros: bool,
        ordered: bool,
    ) -> Result<ScaledWeight> {
        let [packed, scale, zero_point, g_idx, shape] =
            ["packed", "scale", "zero_point", "g_idx", "shape"]
                .map(|end| format!("{module}.weight_{end}"));
        let (rows, words) = tensors::matrix(checkpoint, &packed, WORDS)?;
        let cols = columns(checkpoint, &shape, rows, words)?;
        let group = group.columns(checkpoint, &packed, cols)?;
        let groups = cols / group;
        tensors::expect(checkpoint, &scale, SCALES, &[rows, groups], &packed)?;
        let mut names = vec![packed.clone(), scale.clone(), shape];
        let zeros = zeros.then(|| zero_point.clone());
        if let Some(zeros) = &zeros {
            let zero_words = rows.div_ceil(VALUES);
            tensors::expect(checkpoint, zeros, WORDS, &[zero_words, groups], &packed)?;
        }
        let mut order = None;
        if ordered || checkpoint.get(&g_idx).is_some() {
            order = int4::order(checkpoint, &g_idx, cols, group, true)?;
        }
        // Symmetric weights of some writers have zeros too, all of them 0, which are not read.
        let more = ["weight_zero_point", "weight_g_idx"];
        names.extend(tensors::present(checkpoint, module, &more));
        names.extend(tensors::present(checkpoint, module, ACTIVATIONS));
        let scheme = int4::scheme(group, order.as_ref());
        let stored = super::Stored::Compressed(Self { packed, scale, zeros, order, groups });
        Ok(ScaledWeight { scheme, rows, cols, stored, tensors: names })
    }

    pub(super) fn read(
        &self,
        checkpoint: &Checkpoint,
        cols: usize,
        rows: Range<usize>,
    ) -> Result<ScaledRows> {
        let count = self.groups;
        let dtype = tensors::typed(checkpoint, &self.scale, SCALES)?.dtype;
        let (start, length) = (rows.start * count, rows.len() * count);
        let scales = tensors::floats(checkpoint, &self.scale, dtype, start, length)?;
        let zeros = match &self.zeros {
            None => vec![8; length],
            Some(name) => self.read_zeros(checkpoint, name, &rows)?,
        };
        let stride = 4 * cols.div_ceil(VALUES);
        let mut values = vec![0; rows.len() * cols];
        let mut words = vec![0; stride];
        for (row, values) in rows.zip(values.chunks_exact_mut(cols)) {
            checkpoint.read_range(&self.packed, row * stride, &mut words)?;
            // Bytes of a word come lowest first, so values come two to a byte in their order.
            for (pair, byte) in values.chunks_mut(2).zip(&words) {
                for (i, value) in pair.iter_mut().enumerate() {
                    *value = byte >> (4 * i) & 15;
                }
            }
        }
        Ok(ScaledRows::Int4 { values, scales, zeros, groups: self.order.clone() })
    }

    /// Zeros of some rows, rows × groups, from words ⌈all rows / 8⌉ × groups.
    fn read_zeros(
        &self,
        checkpoint: &Checkpoint,
        name: &str,
        rows: &Range<usize>,
    ) -> Result<Vec<u8>> {
        let words = int4::words(rows);
        let mut bytes = vec![0; words.len() * self.groups * 4];
        checkpoint.read_range(name, words.start * self.groups * 4, &mut bytes)?;
        let packed = bytes.as_chunks().0;
        let mut zeros = Vec::with_capacity(rows.len() * self.groups);
        for row in rows.clone() {
            let line = &packed[(row / VALUES - words.start) * self.groups..][..self.groups];
            zeros.extend(line.iter().map(|b| int4::value(u32::from_le_bytes(*b), row % VALUES)));
        }
        Ok(zeros)
    }
}

/// Columns of a weight of `words` words per row, from the tensor `shape`, which holds rows and columns.
fn columns(checkpoint: &Checkpoint, shape: &str, rows: usize, words: usize) -> Result<usize> {
    let info = tensors::tensor(checkpoint, shape)?;
    if info.shape != [2] {
        return Err(checkpoint.invalid(shape, "shape", format!("{:?}", info.shape), "[2]"));
    }
    let found = tensors::integers(checkpoint, shape)?;
    let size = |at: usize| found.get(at).and_then(|&size| usize::try_from(size).ok());
    match (size(0), size(1)) {
        (Some(r), Some(cols)) if r == rows && cols.div_ceil(VALUES) == words => Ok(cols),
        _ => {
            let allowed = format!("[{rows}, {}], from the shape of weight_packed", words * VALUES);
            Err(checkpoint.invalid(shape, "contents", format!("{found:?}"), allowed))
        }
    }
}
