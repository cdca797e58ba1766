//! Typed views of arena memory for ops: floats of any dtype, and words.

use super::memory::CpuMemory;
use super::simd::Level;
use super::{pack, quant};
use crate::scaled::{self, e4m3};
use crate::{DType, Span, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::sync::atomic::{AtomicU32, Ordering};

/// A matrix in memory, read and written as f32 whatever its dtype. Indices are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    ptr: *mut u8,
    pub(crate) dtype: DType,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
    /// Where its rows are in the matrix with scales that it is a part of, and how many that has.
    whole: (usize, usize),
}

// SAFETY: a view is an address and a shape; the device orders the accesses made through it.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// Of a tensor whose fit was checked.
    pub(crate) fn new(memory: &CpuMemory, tensor: &Tensor) -> Matrix {
        Matrix {
            ptr: memory.address(tensor.span),
            dtype: tensor.dtype,
            rows: tensor.rows as usize,
            cols: tensor.cols as usize,
            stride: tensor.stride as usize,
            whole: (0, tensor.rows as usize),
        }
    }

    /// A dense matrix of floats at an address.
    pub(crate) fn floats(ptr: *mut f32, rows: usize, cols: usize) -> Matrix {
        Matrix { ptr: ptr.cast(), dtype: DType::F32, rows, cols, stride: cols, whole: (0, rows) }
    }

    /// Some rows of a dense matrix; of a packed one whole groups of rows.
    #[track_caller]
    pub(crate) fn part(&self, rows: std::ops::Range<usize>) -> Matrix {
        assert!(rows.end <= self.rows && self.stride == self.cols, "{rows:?} of {self:?}");
        // The scales of rows are found from the start of the whole matrix.
        let skipped = if scaled::is_scaled(self.dtype) { 0 } else { rows.start * self.cols };
        let ptr = self.ptr.wrapping_add(self.dtype.bytes(skipped));
        let whole = (self.whole.0 + rows.start, self.whole.1);
        Matrix { ptr, rows: rows.len(), whole, ..*self }
    }

    /// The address of an element of a plain dtype.
    #[inline]
    #[track_caller]
    pub(crate) fn at(&self, row: usize, col: usize) -> *mut u8 {
        assert!(row < self.rows && col < self.cols, "({row}, {col}) of {self:?}");
        self.ptr.wrapping_add((row * self.stride + col) * self.dtype.block_bytes())
    }

    /// Writes bytes of a dense matrix from byte `at` on.
    #[track_caller]
    pub(crate) fn write_bytes(&self, at: u64, bytes: &[u8]) {
        let end = at as usize + bytes.len();
        assert!(self.stride == self.cols && end <= self.dtype.matrix_bytes(self.rows, self.cols));
        // SAFETY: inside the matrix, which fits its span.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr.add(at as usize), bytes.len());
        }
    }

    /// The start of the matrix.
    pub(crate) fn start(&self) -> *mut u8 {
        self.ptr
    }

    /// An element of a float dtype.
    #[inline]
    #[track_caller]
    pub(crate) fn get(&self, row: usize, col: usize) -> f32 {
        // SAFETY: `at` checked the index against the shape, which fits the span; spans and rows are
        // aligned to the element.
        unsafe { load(self.dtype, self.at(row, col)) }
    }

    /// Rounds to the dtype and stores.
    #[inline]
    #[track_caller]
    pub(crate) fn set(&self, row: usize, col: usize, value: f32) {
        // SAFETY: as for `get`.
        unsafe { store(self.dtype, self.at(row, col), value) }
    }

    /// A whole row as f32, quantised dtypes included.
    #[track_caller]
    pub(crate) fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        match self.dtype {
            DType::F32 | DType::F16 | DType::BF16 => {
                for (col, value) in out.iter_mut().enumerate() {
                    *value = self.get(row, col);
                }
            }
            DType::P4 | DType::P8 => {
                let bytes = self.dtype.bytes(self.rows * self.cols);
                // SAFETY: a packed matrix is dense, so it takes exactly these bytes of its span.
                let packed = unsafe { std::slice::from_raw_parts(self.ptr, bytes) };
                pack::read_row(self.dtype, packed, self.cols, row, out);
            }
            dtype if scaled::is_scaled(dtype) => {
                let (first, rows) = self.whole;
                let bytes = dtype.matrix_bytes(rows, self.cols);
                // SAFETY: a matrix with scales is dense, so it takes exactly these bytes of its span.
                let all = unsafe { std::slice::from_raw_parts(self.ptr, bytes) };
                scaled::read_row(dtype, all, (rows, self.cols), first + row, out);
            }
            _ => quant::dequantise(self.dtype, self.blocks(row), out),
        }
    }

    /// A whole row of a GGUF block dtype as f32, with the level's instructions, or one of a dtype with scales.
    ///
    /// # Safety
    /// The level is one the processor has.
    #[track_caller]
    pub(crate) unsafe fn read_blocks(&self, level: Level, row: usize, out: &mut [f32]) {
        assert!(row < self.rows && out.len() == self.cols);
        if self.dtype == DType::Mxfp4 {
            let (first, rows) = self.whole;
            let bytes = self.dtype.matrix_bytes(rows, self.cols);
            // SAFETY: a matrix with scales is dense, so it takes exactly these bytes of its span.
            let all = unsafe { std::slice::from_raw_parts(self.ptr, bytes) };
            let (pieces, row) = scaled::mxfp4::strip(all, self.cols, first + row);
            // SAFETY: the caller's promise.
            return unsafe { scaled::mxfp4::read_with(level, pieces, row, out) };
        }
        if scaled::is_scaled(self.dtype) {
            return self.read_row(row, out);
        }
        // SAFETY: the caller's promise.
        unsafe { quant::dequantise_with(level, self.dtype, self.blocks(row), out) };
    }

    /// The blocks of a row of a GGUF block dtype.
    #[track_caller]
    pub(crate) fn blocks(&self, row: usize) -> &[u8] {
        assert!(row < self.rows);
        let start = self.dtype.bytes(row * self.stride);
        // SAFETY: rows are whole blocks and the shape fits the span.
        unsafe { std::slice::from_raw_parts(self.ptr.add(start), self.dtype.bytes(self.cols)) }
    }
}

/// Reads a float.
///
/// # Safety
/// `ptr` is a readable, aligned element of `dtype`.
#[inline]
pub(crate) unsafe fn load(dtype: DType, ptr: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => *ptr.cast::<f32>(),
            DType::F16 => (*ptr.cast::<f16>()).to_f32(),
            DType::BF16 => (*ptr.cast::<bf16>()).to_f32(),
            DType::E4M3 => e4m3::decode(*ptr),
            other => unreachable!("{other:?} is not a float"),
        }
    }
}

/// Rounds and writes a float.
///
/// # Safety
/// `ptr` is a writable, aligned element of `dtype`.
#[inline]
pub(crate) unsafe fn store(dtype: DType, ptr: *mut u8, value: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => *ptr.cast::<f32>() = value,
            DType::F16 => *ptr.cast::<f16>() = f16::from_f32(value),
            DType::BF16 => *ptr.cast::<bf16>() = bf16::from_f32(value),
            DType::E4M3 => *ptr = e4m3::encode(value),
            other => unreachable!("{other:?} is not a float"),
        }
    }
}

/// A value as it reads back after being stored in `dtype`.
pub(crate) fn round_to(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::E4M3 => e4m3::decode(e4m3::encode(value)),
        _ => value,
    }
}

/// A table of u32 words. Indices are checked. Every access is a relaxed atomic: the host may write its mail, and rows
/// that share a seat may run at the same time; a reader then sees an old or a new word, never a torn one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    ptr: *mut u32,
    len: usize,
}

// SAFETY: a view is an address and a length; the device orders the accesses made through it.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Of a dense u32 tensor.
    pub(crate) fn new(memory: &CpuMemory, tensor: &Tensor) -> Words {
        Words::of_span(memory, tensor.span)
    }

    /// Of a span.
    pub(crate) fn of_span(memory: &CpuMemory, span: Span) -> Words {
        Words { ptr: memory.address(span).cast(), len: span.len as usize / 4 }
    }

    /// Number of words.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A word.
    #[inline]
    #[track_caller]
    pub(crate) fn get(&self, index: usize) -> u32 {
        self.word(index).load(Ordering::Relaxed)
    }

    /// A word as a float.
    #[track_caller]
    pub(crate) fn float(&self, index: usize) -> f32 {
        f32::from_bits(self.get(index))
    }

    /// Stores a word.
    #[inline]
    #[track_caller]
    pub(crate) fn set(&self, index: usize, word: u32) {
        self.word(index).store(word, Ordering::Relaxed);
    }

    #[inline]
    #[track_caller]
    fn word(&self, index: usize) -> &AtomicU32 {
        assert!(index < self.len, "word {index} of {}", self.len);
        // SAFETY: inside the span; the op's check refused spans that are not aligned; every access to words is
        // atomic.
        unsafe { AtomicU32::from_ptr(self.ptr.add(index)) }
    }

    /// Two words as the one 64-bit number that host and device exchange. The low word, which is written last, is read
    /// with acquire order.
    #[track_caller]
    pub(crate) fn load_u64(&self, index: usize) -> u64 {
        let low = self.word(index).load(Ordering::Acquire);
        u64::from(self.word(index + 1).load(Ordering::Relaxed)) << 32 | u64::from(low)
    }

    /// Publishes a 64-bit number: a thread that reads it sees everything written before.
    #[track_caller]
    pub(crate) fn publish_u64(&self, index: usize, value: u64) {
        self.word(index + 1).store((value >> 32) as u32, Ordering::Relaxed);
        self.word(index).store(value as u32, Ordering::Release);
    }
}

/// Reads `out.len()` floats of a plain dtype.
///
/// # Safety
/// `ptr` is the first of that many readable, aligned elements.
pub(crate) unsafe fn load_floats(dtype: DType, ptr: *const u8, out: &mut [f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(ptr.cast(), out.as_mut_ptr(), out.len()),
            DType::F16 => {
                std::slice::from_raw_parts(ptr.cast::<f16>(), out.len()).convert_to_f32_slice(out)
            }
            DType::BF16 => {
                let from = std::slice::from_raw_parts(ptr.cast::<u16>(), out.len());
                for (out, bits) in out.iter_mut().zip(from) {
                    *out = f32::from_bits(u32::from(*bits) << 16);
                }
            }
            DType::E4M3 => {
                let from = std::slice::from_raw_parts(ptr, out.len());
                for (out, byte) in out.iter_mut().zip(from) {
                    *out = e4m3::decode(*byte);
                }
            }
            other => unreachable!("{other:?} is not a float"),
        }
    }
}

/// Rounds and writes floats of a plain dtype.
///
/// # Safety
/// `ptr` is the first of that many writable, aligned elements.
pub(crate) unsafe fn store_floats(dtype: DType, ptr: *mut u8, values: &[f32]) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => std::ptr::copy_nonoverlapping(values.as_ptr(), ptr.cast(), values.len()),
            DType::F16 => std::slice::from_raw_parts_mut(ptr.cast::<f16>(), values.len())
                .convert_from_f32_slice(values),
            DType::BF16 => {
                let to = std::slice::from_raw_parts_mut(ptr.cast::<bf16>(), values.len());
                for (to, value) in to.iter_mut().zip(values) {
                    *to = bf16::from_f32(*value);
                }
            }
            DType::E4M3 => {
                let to = std::slice::from_raw_parts_mut(ptr, values.len());
                for (to, value) in to.iter_mut().zip(values) {
                    *to = e4m3::encode(*value);
                }
            }
            other => unreachable!("{other:?} is not a float"),
        }
    }
}
