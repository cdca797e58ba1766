//! The checks that ops are composed of.

use super::{Access, Contract};
use crate::op::{KvLayer, Norm};
use crate::{ALIGN, DType, Error, Region, Result, Span, StepLimits, Tensor, scaled};

/// A matrix starts at a multiple of this, so that kernels can load several elements at once.
const MATRIX_ALIGN: u64 = 16;

/// A contract violation, unless `holds`.
pub(crate) fn require(holds: bool, op: &str, problem: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Contract { op: op.into(), problem: problem() }) }
}

/// That a span starts at a multiple of `align` bytes.
fn require_aligned(span: Span, align: u64, op: &str, what: &str) -> Result<()> {
    require(span.offset.is_multiple_of(align), op, || {
        format!("{what} starts at byte {}, not at a multiple of {align}", span.offset)
    })
}

/// That a span is not in memory that the host may write at any time: such memory must be read word by word, which
/// matrices are not.
fn require_on_device(span: Span, op: &str, what: &str) -> Result<()> {
    require(span.region != Region::HostMapped, op, || {
        format!("{what} lies in host-mapped memory, which holds words only")
    })
}

/// That a tensor has elements, fits its span, its rows are whole blocks that do not overlap, and kernels can load it.
pub(crate) fn require_fit(tensor: &Tensor, op: &str, what: &str) -> Result<()> {
    let Tensor { span, dtype, rows, cols, stride } = *tensor;
    let block = dtype.block_elems() as u32;
    let whole = cols.is_multiple_of(block) && stride.is_multiple_of(block) && stride >= cols;
    require(whole && rows > 0 && cols > 0, op, || {
        format!("{what}: {rows}×{cols} with stride {stride} is not whole rows of {dtype:?}")
    })?;
    let elems = u128::from(rows - 1) * u128::from(stride) + u128::from(cols);
    let scales = 4 * scaled::scales(dtype, rows as usize, cols as usize) as u128;
    let bytes = elems / u128::from(block) * dtype.block_bytes() as u128 + scales;
    require(bytes <= u128::from(span.len), op, || {
        format!("{what}: {elems} elements of {dtype:?} do not fit {} bytes", span.len)
    })?;
    require_on_device(span, op, what)?;
    require_aligned(span, MATRIX_ALIGN, op, what)
}

/// That a tensor holds floats an op can compute with.
pub(crate) fn require_float(tensor: &Tensor, op: &str, what: &str) -> Result<()> {
    require_float_type(tensor.dtype, op, what)
}

/// That tensors fit, each with its name, and hold floats an op can compute with.
pub(crate) fn require_matrices(tensors: &[(&Tensor, &str)], op: &str) -> Result<()> {
    tensors.iter().try_for_each(|(tensor, what)| {
        require_fit(tensor, op, what)?;
        require_float(tensor, op, what)
    })
}

/// That a tensor, of this name, has the rows and columns of `y`.
pub(crate) fn require_shape_of(y: &Tensor, tensor: &Tensor, op: &str, what: &str) -> Result<()> {
    let same = (tensor.rows, tensor.cols) == (y.rows, y.cols);
    require(same, op, || format!("{what} and y differ in shape"))
}

fn require_float_type(dtype: DType, op: &str, what: &str) -> Result<()> {
    require(matches!(dtype, DType::F32 | DType::F16 | DType::BF16), op, || {
        format!("{what} is {dtype:?}; f32, f16 or bf16 is needed")
    })
}

/// That a tensor is a weight matrix: floats or quantised blocks; packed ones complete and dense.
pub(crate) fn require_weights(tensor: &Tensor, op: &str, what: &str) -> Result<()> {
    require_fit(tensor, op, what)?;
    match tensor.dtype {
        DType::U32 | DType::U8 => require(false, op, || format!("{what} does not hold numbers")),
        DType::P4 | DType::P8 => {
            let (rows, cols) = (tensor.rows, tensor.cols);
            let whole = crate::cpu::pack::whole(rows as usize, cols as usize);
            require(tensor.stride == cols && whole, op, || {
                format!("packed {what} of {rows}×{cols} is not whole blocks")
            })
        }
        dtype if scaled::is_scaled(dtype) => {
            let (rows, cols) = (tensor.rows, tensor.cols);
            let whole = scaled::fits(dtype, rows as usize, cols as usize);
            require(tensor.stride == cols && whole, op, || {
                format!("{what} of {rows}×{cols} {dtype:?} is not dense and whole")
            })
        }
        _ => Ok(()),
    }
}

/// That a tensor is one row of `cols` floats.
pub(crate) fn require_vector(tensor: &Tensor, cols: u32, op: &str, what: &str) -> Result<()> {
    require_fit(tensor, op, what)?;
    require_float(tensor, op, what)?;
    require(tensor.cols == cols && tensor.rows == 1, op, || {
        format!("{what} is {}×{}, not 1×{cols}", tensor.rows, tensor.cols)
    })
}

/// That a norm's weight has one element per column.
pub(crate) fn require_norm(norm: &Norm, cols: u32, op: &str) -> Result<()> {
    require_vector(&norm.weight, cols, op, "norm weight")
}

/// That a table has a word for each of `count` indices.
pub(crate) fn require_indices(table: &Tensor, count: u32, op: &str, what: &str) -> Result<()> {
    require(table.dtype == DType::U32, op, || format!("{what} is {:?}, not u32", table.dtype))?;
    let there = table.rows > 0 && table.cols >= count && table.span.len >= u64::from(count) * 4;
    require(there, op, || {
        let (words, cols) = (table.span.len / 4, table.cols);
        format!("{what} has {cols} columns in {words} words, fewer than {count}")
    })?;
    require_aligned(table.span, 4, op, what)
}

/// That a span holds a word.
pub(crate) fn require_word(span: Span, op: &str, what: &str) -> Result<()> {
    require(span.len >= 4, op, || format!("{what} has {} bytes, not a word", span.len))?;
    require_aligned(span, 4, op, what)
}

/// That a count of live rows, if there is one, is a word.
pub(crate) fn require_live(live: Option<Span>, op: &str) -> Result<()> {
    live.map_or(Ok(()), |live| require_word(live, op, "the live count"))
}

/// How the tokens of a step are divided into rows.
pub(crate) struct Division {
    pub(crate) rows: u32,
    pub(crate) tokens: u32,
    /// Every row has one token.
    pub(crate) single: bool,
    /// Every row has so many, more than one.
    pub(crate) even: Option<u32>,
}

/// That the tables have that many rows and tokens, and that rows have the tokens they are said to have.
pub(crate) fn require_division(division: &Division, limits: &StepLimits, op: &str) -> Result<()> {
    let Division { rows, tokens, single, even } = *division;
    require(rows <= limits.rows && tokens <= limits.tokens, op, || {
        let (most_rows, most_tokens) = (limits.rows, limits.tokens);
        format!("{rows} rows and {tokens} tokens; the tables have {most_rows} and {most_tokens}")
    })?;
    require(!single || rows == tokens, op, || "a decode step has one token per row".into())?;
    let divides = |each: u32| each > 1 && !single && rows.checked_mul(each) == Some(tokens);
    require(even.is_none_or(divides), op, || {
        format!("{tokens} tokens in {rows} rows of {even:?} each")
    })
}

/// That scratch, if there is any, starts where kernels expect it.
pub(crate) fn require_scratch(scratch: Option<Span>, op: &str) -> Result<()> {
    let Some(span) = scratch else { return Ok(()) };
    require_on_device(span, op, "scratch")?;
    require_aligned(span, ALIGN, op, "scratch")
}

/// That recurrent states have a row of `cols` elements for each seat.
pub(crate) fn require_carry(
    carry: &Tensor,
    cols: u64,
    limits: &StepLimits,
    op: &str,
) -> Result<()> {
    require_fit(carry, op, "the recurrent state")?;
    require_float(carry, op, "the recurrent state")?;
    let fits = carry.rows >= limits.seats && u64::from(carry.cols) == cols;
    require(fits, op, || {
        format!("states {carry}, not {cols} elements for each of {} seats", limits.seats)
    })
}

/// That a layer's pages hold keys and values and fit its span, and that the step's tables can address all of them.
pub(crate) fn require_pages(kv: &KvLayer, page_size: u32, op: &str) -> Result<()> {
    require(kv.latent.is_none(), op, || "pages of latents are for latent attention".into())?;
    require_paged(kv, page_size, op)
}

/// The same for pages of latents.
pub(crate) fn require_latents(kv: &KvLayer, page_size: u32, op: &str) -> Result<()> {
    let KvLayer { heads, head_dim, latent, .. } = *kv;
    require(
        latent.is_some_and(|latent| (1..head_dim).contains(&latent)) && heads == 1,
        op,
        || format!("{heads} heads of {head_dim} with values of {latent:?} are no latents"),
    )?;
    require_float_type(kv.dtype, op, "a page of latents")?;
    require_paged(kv, page_size, op)
}

fn require_paged(kv: &KvLayer, page_size: u32, op: &str) -> Result<()> {
    let KvLayer { span, dtype, pages, heads, head_dim, .. } = *kv;
    if dtype == DType::E4M3 {
        let scales = kv.scales.filter(|scales| scales.len >= kv.scale_bytes());
        require(scales.is_some(), op, || "pages of e4m3 have no scales".into())?;
        scales.map_or(Ok(()), |scales| require_aligned(scales, 4, op, "the scales of pages"))?;
    } else {
        require_float_type(dtype, op, "a KV page")?;
    }
    require(pages > 0 && heads > 0 && head_dim > 0, op, || {
        format!("{pages} pages of {heads} heads of {head_dim}")
    })?;
    require(kv.page_size == page_size && page_size > 0, op, || {
        format!("pages of {} tokens in a step with pages of {page_size}", kv.page_size)
    })?;
    let slots = u64::from(pages) * u64::from(page_size);
    require(slots <= u64::from(u32::MAX), op, || format!("{pages} pages have too many slots"))?;
    let heads = u128::from(kv.parts()) * u128::from(heads);
    let elems = u128::from(slots) * heads * u128::from(head_dim);
    require(elems * dtype.block_bytes() as u128 <= u128::from(span.len), op, || {
        format!("{pages} pages do not fit the layer's span")
    })?;
    require_on_device(span, op, "a KV page")?;
    require_aligned(span, MATRIX_ALIGN, op, "the first KV page")
}

/// That the outputs of an op share no byte with anything else it touches, except for an in-place output.
pub(super) fn require_apart<C: Contract>(op: &C) -> Result<()> {
    if !op.is_one_op() {
        return Ok(());
    }
    let mut spans: Vec<(Span, Access)> = Vec::new();
    op.visit_spans(&mut |span, access| spans.push((span, access)));
    let in_place = op.in_place().filter(|(a, b)| a == b).map(|(_, y)| y.span);
    for (index, (a, a_access)) in spans.iter().enumerate() {
        for (b, b_access) in &spans[index + 1..] {
            let written = *a_access != Access::Read || *b_access != Access::Read;
            let allowed = a == b && in_place == Some(*a);
            require(!written || allowed || !a.overlaps(*b), C::NAME, || {
                let name = a.region.name();
                format!(
                    "bytes {}..{} and {}..{} of {name} overlap, and one of them is written",
                    a.offset,
                    a.end(),
                    b.offset,
                    b.end()
                )
            })?;
        }
    }
    Ok(())
}
