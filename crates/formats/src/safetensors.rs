//! Safetensors headers and the index of a sharded checkpoint.
//!
//! A file is eight bytes of header length, a JSON header, and data that the header's tensors tile
//! exactly: no hole, no overlap, no byte left over. All of that is checked here; data is not read.

use crate::dtype::{DType, elements};
use crate::{Error, Result, limits};
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::io::Read;
use std::path::Path;

/// One tensor of a safetensors file.
#[derive(Clone, Debug, PartialEq)]
pub struct SafeTensor {
    /// Name in the file, such as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A checked safetensors header.
#[derive(Debug)]
pub struct SafeTensors {
    /// The `__metadata__` map: free text from the writer.
    pub metadata: BTreeMap<String, String>,
    /// The tensors, in the order of their data.
    pub tensors: Vec<SafeTensor>,
}

impl SafeTensors {
    /// Reads the header from `source`, which yields a file of `length` bytes called `file`.
    pub fn read(file: &Path, mut source: impl Read, length: u64) -> Result<Self> {
        let mut fill = |buffer: &mut [u8]| {
            source
                .read_exact(buffer)
                .map_err(|source| Error::io(file, "cannot read the header", source))
        };
        if length < 8 {
            let found = format!("a file of {length} bytes");
            return Err(Error::invalid(file, 0, "header length", found, "at least 8 bytes"));
        }
        let mut prefix = [0; 8];
        fill(&mut prefix)?;
        let header_bytes = u64::from_le_bytes(prefix);
        let allowed = limits::SAFETENSORS_HEADER_BYTES.min(length - 8);
        if header_bytes > allowed {
            let allowed = format!("at most {allowed} bytes");
            return Err(Error::invalid(file, 0, "header length", header_bytes, allowed));
        }
        let mut json = vec![0; header_bytes as usize];
        fill(&mut json)?;
        let header: Header = serde_json::from_slice(&json)
            .map_err(|error| json_error(file, 8, "header", &json, &error))?;
        let base = 8 + header_bytes;
        let tensors = check(file, header.tensors, base, length - base)?;
        Ok(Self { metadata: header.metadata, tensors })
    }
}

fn check(
    file: &Path,
    entries: Vec<(String, Entry)>,
    base: u64,
    room: u64,
) -> Result<Vec<SafeTensor>> {
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let refuse = |what: &str, found: String, allowed: String| {
            Err(Error::invalid(file, 8, format!("{what} of tensor {name}"), found, allowed))
        };
        let Some(dtype) = DType::from_safetensors(&entry.dtype) else {
            let names: Vec<_> =
                DType::ALL.iter().filter(|t| !t.is_quantised()).map(|t| t.name()).collect();
            let field = format!("dtype of tensor {name}");
            return Err(Error::unsupported(file, field, entry.dtype, names.join(", ")));
        };
        if entry.shape.len() > limits::TENSOR_DIMS {
            let found = format!("{} dimensions", entry.shape.len());
            return refuse("shape", found, format!("at most {}", limits::TENSOR_DIMS));
        }
        let [begin, end] = entry.data_offsets;
        if begin > end || end > room {
            let found = format!("[{begin}, {end}]");
            return refuse("data_offsets", found, format!("ascending, within {room} bytes"));
        }
        let bytes = elements(&entry.shape).and_then(|n| dtype.bytes_for(n));
        if bytes.map(|n| n as u64) != Some(end - begin) {
            let found = format!("{:?} of {dtype}", entry.shape);
            return refuse("shape", found, format!("{} bytes, as data_offsets say", end - begin));
        }
        let shape = entry.shape.into_iter().map(|d| d as usize).collect();
        tensors.push(SafeTensor { name, dtype, shape, offset: begin, bytes: end - begin });
    }
    tensors.sort_by_key(|tensor| (tensor.offset, tensor.bytes));
    let mut next = 0;
    for tensor in &mut tensors {
        if tensor.offset != next {
            let field = format!("data_offsets of tensor {}", tensor.name);
            let allowed = format!("{next}, where the tensor before it ends");
            return Err(Error::invalid(file, 8, field, tensor.offset, allowed));
        }
        next += tensor.bytes;
        tensor.offset += base;
    }
    if next != room {
        let found = format!("{room} bytes of data");
        return Err(Error::invalid(file, base, "data", found, format!("{next}, the tensors' sum")));
    }
    Ok(tensors)
}

/// A JSON error with the byte it happened at; serde_json itself counts lines and columns.
pub(crate) fn json_error(
    file: &Path,
    start: u64,
    field: &str,
    json: &[u8],
    error: &serde_json::Error,
) -> Error {
    let lines_before = error.line().saturating_sub(1);
    let line_start: usize =
        json.split_inclusive(|&b| b == b'\n').take(lines_before).map(<[u8]>::len).sum();
    let offset = start + (line_start + error.column().saturating_sub(1)).min(json.len()) as u64;
    Error::invalid(file, offset, field, error, "JSON of the documented form")
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The JSON object at the head of a file. Read by hand because serde's maps keep the last of two
/// equal keys, and a file in which two parsers see different tensors is an attack.
struct Header {
    metadata: BTreeMap<String, String>,
    tensors: Vec<(String, Entry)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Visit;
        impl<'de> Visitor<'de> for Visit {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Header, A::Error> {
                let mut header = Header { metadata: BTreeMap::new(), tensors: Vec::new() };
                let mut seen = HashSet::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name.len() as u64 > limits::TENSOR_NAME_BYTES {
                        let cap = limits::TENSOR_NAME_BYTES;
                        return Err(A::Error::custom(format!("a name longer than {cap} bytes")));
                    }
                    if !seen.insert(name.clone()) {
                        return Err(A::Error::custom(format!("{name} twice")));
                    }
                    if name == "__metadata__" {
                        header.metadata = map.next_value()?;
                        continue;
                    }
                    if header.tensors.len() as u64 == limits::TENSORS {
                        let cap = limits::TENSORS;
                        return Err(A::Error::custom(format!("more than {cap} tensors")));
                    }
                    header.tensors.push((name, map.next_value()?));
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Visit)
    }
}

/// The shard files that an index (`model.safetensors.index.json`, read from `file`) names, each
/// with the tensors it must hold. Shard names are plain file names: an index cannot point out of
/// its folder.
pub fn read_index(file: &Path, json: &[u8]) -> Result<BTreeMap<String, BTreeSet<String>>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let index: Index =
        serde_json::from_slice(json).map_err(|error| json_error(file, 0, "index", json, &error))?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, shard) in index.weight_map {
        let plain = !shard.contains(['/', '\\', '\0']) && shard.ends_with(".safetensors");
        if !plain {
            let field = format!("shard of tensor {tensor}");
            return Err(Error::invalid(file, 0, field, shard, "a file name *.safetensors"));
        }
        shards.entry(shard).or_default().insert(tensor);
    }
    if shards.len() > limits::SHARDS {
        let allowed = format!("at most {}", limits::SHARDS);
        return Err(Error::invalid(
            file,
            0,
            "weight_map",
            format!("{} shards", shards.len()),
            allowed,
        ));
    }
    Ok(shards)
}
