//! Metadata values. Integer widths are dropped on reading: it does not matter whether a count was
//! written as u8 or u64.

use super::cursor::Cursor;
use crate::error::one_line;
use crate::{Result, limits};
use std::fmt;
use std::io::Read;

/// The value of one metadata key.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// u8, u16, u32 or u64.
    Uint(u64),
    /// i8, i16, i32 or i64.
    Int(i64),
    /// f32 or f64.
    Float(f64),
    /// bool.
    Bool(bool),
    /// UTF-8 text.
    Str(String),
    /// Elements of one type.
    Array(Array),
}

/// A metadata array. Arrays of arrays are in the specification but in no file; they are refused.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    /// u8, u16, u32 or u64 elements.
    Uint(Vec<u64>),
    /// i8, i16, i32 or i64 elements.
    Int(Vec<i64>),
    /// f32 or f64 elements.
    Float(Vec<f64>),
    /// bool elements.
    Bool(Vec<bool>),
    /// UTF-8 text elements.
    Str(Vec<String>),
}

impl Array {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Array::Uint(v) => v.len(),
            Array::Int(v) => v.len(),
            Array::Float(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::Str(v) => v.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element `index` as an integer, `None` beyond the end or for other types.
    pub fn int(&self, index: usize) -> Option<i64> {
        match self {
            Array::Uint(v) => v.get(index).and_then(|&n| i64::try_from(n).ok()),
            Array::Int(v) => v.get(index).copied(),
            _ => None,
        }
    }

    /// Element `index` as a number, `None` beyond the end or for other types.
    pub fn float(&self, index: usize) -> Option<f64> {
        match self {
            Array::Float(v) => v.get(index).copied(),
            _ => self.int(index).map(|n| n as f64),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Uint(n) => write!(f, "{n}"),
            Value::Int(n) => write!(f, "{n}"),
            Value::Float(x) => write!(f, "{x}"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Str(text) => write!(f, "\"{}\"", one_line(text)),
            Value::Array(array) => write!(f, "an array of {} elements", array.len()),
        }
    }
}

/// Type numbers of the specification.
mod number {
    pub(super) const U8: u32 = 0;
    pub(super) const I8: u32 = 1;
    pub(super) const U16: u32 = 2;
    pub(super) const I16: u32 = 3;
    pub(super) const U32: u32 = 4;
    pub(super) const I32: u32 = 5;
    pub(super) const F32: u32 = 6;
    pub(super) const BOOL: u32 = 7;
    pub(super) const STRING: u32 = 8;
    pub(super) const ARRAY: u32 = 9;
    pub(super) const U64: u32 = 10;
    pub(super) const I64: u32 = 11;
    pub(super) const F64: u32 = 12;
}

pub(super) fn read<R: Read>(at: &mut Cursor<'_, R>, key: &str) -> Result<Value> {
    let start = at.position();
    let kind = at.u32("value type")?;
    if kind == number::ARRAY {
        return Ok(Value::Array(read_array(at, key)?));
    }
    Ok(match kind {
        number::U8 | number::U16 | number::U32 | number::U64 => Value::Uint(uint(at, kind, key)?),
        number::I8 | number::I16 | number::I32 | number::I64 => Value::Int(int(at, kind, key)?),
        number::F32 | number::F64 => Value::Float(float(at, kind, key)?),
        number::BOOL => Value::Bool(boolean(at, key)?),
        number::STRING => Value::Str(at.string(key, limits::GGUF_STRING_BYTES)?),
        _ => return Err(at.refuse(start, format!("type of {key}"), kind, "0 to 12")),
    })
}

fn read_array<R: Read>(at: &mut Cursor<'_, R>, key: &str) -> Result<Array> {
    let start = at.position();
    let kind = at.u32("array element type")?;
    let each = match kind {
        number::U8 | number::I8 | number::BOOL => 1,
        number::U16 | number::I16 => 2,
        number::U32 | number::I32 | number::F32 => 4,
        number::U64 | number::I64 | number::F64 | number::STRING => 8,
        _ => {
            let field = format!("element type of {key}");
            return Err(at.refuse(start, field, kind, "0 to 8 or 10 to 12 (no nested arrays)"));
        }
    };
    let count = at.array_count(&format!("length of {key}"), each)?;
    Ok(match kind {
        number::U8 | number::U16 | number::U32 | number::U64 => {
            Array::Uint(collect(count, || uint(at, kind, key))?)
        }
        number::I8 | number::I16 | number::I32 | number::I64 => {
            Array::Int(collect(count, || int(at, kind, key))?)
        }
        number::F32 | number::F64 => Array::Float(collect(count, || float(at, kind, key))?),
        number::BOOL => Array::Bool(collect(count, || boolean(at, key))?),
        _ => Array::Str(collect(count, || at.string(key, limits::GGUF_STRING_BYTES))?),
    })
}

fn collect<T>(count: u64, mut read: impl FnMut() -> Result<T>) -> Result<Vec<T>> {
    let mut elements = Vec::with_capacity(count as usize);
    for _ in 0..count {
        elements.push(read()?);
    }
    Ok(elements)
}

fn uint<R: Read>(at: &mut Cursor<'_, R>, kind: u32, key: &str) -> Result<u64> {
    Ok(match kind {
        number::U8 => u64::from(at.bytes::<1>(key)?[0]),
        number::U16 => u64::from(u16::from_le_bytes(at.bytes(key)?)),
        number::U32 => u64::from(at.u32(key)?),
        _ => at.u64(key)?,
    })
}

fn int<R: Read>(at: &mut Cursor<'_, R>, kind: u32, key: &str) -> Result<i64> {
    Ok(match kind {
        number::I8 => i64::from(i8::from_le_bytes(at.bytes(key)?)),
        number::I16 => i64::from(i16::from_le_bytes(at.bytes(key)?)),
        number::I32 => i64::from(i32::from_le_bytes(at.bytes(key)?)),
        _ => i64::from_le_bytes(at.bytes(key)?),
    })
}

fn float<R: Read>(at: &mut Cursor<'_, R>, kind: u32, key: &str) -> Result<f64> {
    Ok(match kind {
        number::F32 => f64::from(f32::from_le_bytes(at.bytes(key)?)),
        _ => f64::from_le_bytes(at.bytes(key)?),
    })
}

fn boolean<R: Read>(at: &mut Cursor<'_, R>, key: &str) -> Result<bool> {
    let start = at.position();
    match at.bytes::<1>(key)?[0] {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(at.refuse(start, key, other, "0 or 1")),
    }
}
