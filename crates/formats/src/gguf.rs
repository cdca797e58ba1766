//! GGUF headers, versions 2 and 3, little-endian: metadata and the tensor table.
//!
//! [`Gguf::read`] reads the header once, front to back, and checks every number against what is
//! left of the file before using it. Tensor data is not touched here.

mod cursor;
mod value;

use crate::dtype::{DType, elements};
use crate::{Error, Result, limits};
use cursor::Cursor;
use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::path::{Path, PathBuf};
pub use value::{Array, Value};

/// One tensor of a GGUF file.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufTensor {
    /// Name in the file, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first: the reverse of the order in the file.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A checked GGUF header.
#[derive(Debug)]
pub struct Gguf {
    file: PathBuf,
    version: u32,
    metadata: HashMap<String, Value>,
    tensors: Vec<GgufTensor>,
}

impl Gguf {
    /// Reads the header from `source`, which yields a file of `length` bytes called `file`.
    pub fn read(file: &Path, source: impl Read, length: u64) -> Result<Self> {
        if length == 0 {
            return Err(Error::Empty { file: file.to_owned() });
        }
        let mut at = Cursor::new(file, source, length);
        let magic = at.bytes::<4>("magic")?;
        if &magic != b"GGUF" {
            return Err(at.refuse(0, "magic", format!("{magic:02x?}"), "47 47 55 46 (GGUF)"));
        }
        let version = at.u32("version")?;
        if version.swap_bytes() <= 3 && version > 3 {
            return Err(Error::unsupported(file, "byte order", "big-endian", "little-endian"));
        }
        if !(2..=3).contains(&version) {
            return Err(Error::unsupported(file, "GGUF version", version, "2, 3"));
        }
        let tensor_count = at.count("tensor count", limits::TENSORS, 24)?;
        let key_count = at.count("metadata key count", limits::GGUF_KEYS, 13)?;

        let mut metadata = HashMap::new();
        for _ in 0..key_count {
            let start = at.position();
            let key = at.string("metadata key", limits::GGUF_KEY_BYTES)?;
            let value = value::read(&mut at, &key)?;
            if metadata.contains_key(&key) {
                return Err(at.refuse(start, "metadata key", format!("{key} twice"), "once"));
            }
            metadata.insert(key, value);
        }
        let mut gguf = Self { file: file.to_owned(), version, metadata, tensors: Vec::new() };
        gguf.read_tensors(&mut at, tensor_count)?;
        Ok(gguf)
    }

    fn read_tensors<R: Read>(&mut self, at: &mut Cursor<'_, R>, count: u64) -> Result<()> {
        let mut tensors = Vec::with_capacity(count as usize);
        let mut starts = Vec::with_capacity(count as usize);
        let mut names = HashSet::new();
        for _ in 0..count {
            starts.push(at.position());
            let tensor = read_tensor(at)?;
            if !names.insert(tensor.name.clone()) {
                let found = format!("{} twice", tensor.name);
                return Err(at.refuse(starts[starts.len() - 1], "tensor name", found, "once"));
            }
            tensors.push(tensor);
        }
        // Offsets in the table count from the first aligned byte after the header.
        let alignment = self.alignment()?;
        let base = at.position().next_multiple_of(alignment);
        for (tensor, &start) in tensors.iter_mut().zip(&starts) {
            let field = format!("offset of tensor {}", tensor.name);
            if !tensor.offset.is_multiple_of(alignment) {
                let allowed = format!("a multiple of {alignment}");
                return Err(at.refuse(start, field, tensor.offset, allowed));
            }
            let end = base.checked_add(tensor.offset).and_then(|b| b.checked_add(tensor.bytes));
            if end.is_none_or(|end| end > at.length()) {
                let room = at.length().saturating_sub(base);
                let (from, bytes) = (tensor.offset, tensor.bytes);
                let what = format!("{field}: {from} + {bytes} bytes, of {room} bytes of data");
                return Err(at.cut_short(&what));
            }
            tensor.offset += base;
        }
        refuse_overlap(at, &tensors, &starts)?;
        self.tensors = tensors;
        Ok(())
    }

    fn alignment(&self) -> Result<u64> {
        let key = "general.alignment";
        let alignment = self.uint(key)?.unwrap_or(32);
        if alignment.is_power_of_two() && alignment <= limits::GGUF_ALIGNMENT {
            return Ok(alignment);
        }
        let allowed = format!("a power of two up to {}", limits::GGUF_ALIGNMENT);
        Err(self.refuse(key, alignment, allowed))
    }

    /// The file this header came from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// Every metadata key with its value, in no particular order.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The value of `key`.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// `key` as a non-negative integer; `None` when absent, an error when of another type.
    pub fn uint(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, "a non-negative integer", |value| match *value {
            Value::Uint(n) => Some(n),
            Value::Int(n) => u64::try_from(n).ok(),
            _ => None,
        })
    }

    /// `key` as a number; `None` when absent, an error when of another type.
    pub fn float(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", |value| match *value {
            Value::Float(x) => Some(x),
            Value::Uint(n) => Some(n as f64),
            Value::Int(n) => Some(n as f64),
            _ => None,
        })
    }

    /// `key` as a truth value; `None` when absent, an error when of another type.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "a bool", |value| match *value {
            Value::Bool(b) => Some(b),
            _ => None,
        })
    }

    /// `key` as text; `None` when absent, an error when of another type.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.typed(key, "a string", |value| match value {
            Value::Str(text) => Some(text.as_str()),
            _ => None,
        })
    }

    /// `key` as an array; `None` when absent, an error when of another type.
    pub fn array(&self, key: &str) -> Result<Option<&Array>> {
        self.typed(key, "an array", |value| match value {
            Value::Array(array) => Some(array),
            _ => None,
        })
    }

    /// `key` as an array of strings; `None` when absent, an error when of another type.
    pub fn strings(&self, key: &str) -> Result<Option<&[String]>> {
        self.typed(key, "an array of strings", |value| match value {
            Value::Array(Array::Str(strings)) => Some(strings.as_slice()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        allowed: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.metadata.get(key) else { return Ok(None) };
        match read(value) {
            Some(found) => Ok(Some(found)),
            None => Err(self.refuse(key, value, allowed)),
        }
    }

    /// A refusal of the value of `key`. Metadata has no fixed place, so the offset is the table's.
    pub(crate) fn refuse(
        &self,
        key: &str,
        found: impl std::fmt::Display,
        allowed: impl std::fmt::Display,
    ) -> Error {
        Error::invalid(&self.file, METADATA_START, key, found, allowed)
    }
}

/// Where metadata begins: after magic, version and the two counts.
const METADATA_START: u64 = 24;

fn read_tensor<R: Read>(at: &mut Cursor<'_, R>) -> Result<GgufTensor> {
    let name = at.string("tensor name", limits::TENSOR_NAME_BYTES)?;
    let start = at.position();
    let dims = at.u32("tensor dimensions")?;
    if dims == 0 || dims > limits::GGUF_TENSOR_DIMS {
        let field = format!("dimensions of tensor {name}");
        return Err(at.refuse(start, field, dims, format!("1 to {}", limits::GGUF_TENSOR_DIMS)));
    }
    let mut shape = Vec::with_capacity(dims as usize);
    for _ in 0..dims {
        shape.push(at.u64("tensor dimension")?);
    }
    let number_at = at.position();
    let number = at.u32("tensor type")?;
    let dtype = DType::from_ggml(number).map_err(|known| {
        let field = format!("byte {number_at}: type of tensor {name}");
        let names: Vec<_> = (0..=30).filter_map(|n| DType::from_ggml(n).ok()).collect();
        let allowed = names.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
        Error::unsupported(at.file(), field, format!("{known} ({number})"), allowed)
    })?;
    let bytes = elements(&shape)
        .filter(|_| shape[0].is_multiple_of(dtype.block_elems() as u64))
        .and_then(|n| dtype.bytes_for(n));
    let Some(bytes) = bytes else {
        let allowed = format!(
            "rows of whole blocks of {}, and fewer than 2^64 bytes in all",
            dtype.block_elems()
        );
        let field = format!("shape of tensor {name} ({dtype})");
        return Err(at.refuse(start, field, format!("{shape:?}"), allowed));
    };
    if bytes as u64 > at.length() {
        let length = at.length();
        return Err(at.cut_short(&format!("tensor {name} has {bytes} bytes, the file {length}")));
    }
    let offset = at.u64("tensor offset")?;
    let shape = shape.into_iter().rev().map(|d| d as usize).collect();
    Ok(GgufTensor { name, dtype, shape, offset, bytes: bytes as u64 })
}

/// Two tensors over the same bytes are a sign of a forged table; no writer makes them.
fn refuse_overlap<R: Read>(
    at: &Cursor<'_, R>,
    tensors: &[GgufTensor],
    starts: &[u64],
) -> Result<()> {
    let mut order: Vec<usize> = (0..tensors.len()).filter(|&i| tensors[i].bytes > 0).collect();
    order.sort_by_key(|&i| tensors[i].offset);
    for pair in order.windows(2) {
        let (first, second) = (&tensors[pair[0]], &tensors[pair[1]]);
        if first.offset + first.bytes > second.offset {
            let field = format!("offset of tensor {}", second.name);
            let found = format!("{}, inside tensor {}", second.offset, first.name);
            return Err(at.refuse(starts[pair[1]], field, found, "tensors apart"));
        }
    }
    Ok(())
}
