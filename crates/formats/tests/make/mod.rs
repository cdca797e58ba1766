//! Writing the files that the tests read: well-formed GGUF and safetensors, to be broken later.

#![allow(dead_code)]

/// A GGUF file under construction. Counts are taken from what was added unless overridden.
#[derive(Clone)]
pub(crate) struct GgufFile {
    pub(crate) version: u32,
    pub(crate) keys: Vec<Vec<u8>>,
    pub(crate) tensors: Vec<Vec<u8>>,
    pub(crate) key_count: Option<u64>,
    pub(crate) tensor_count: Option<u64>,
    pub(crate) data: Vec<u8>,
}

pub(crate) const U32: u32 = 4;
pub(crate) const I32: u32 = 5;
pub(crate) const F32: u32 = 6;
pub(crate) const BOOL: u32 = 7;
pub(crate) const STRING: u32 = 8;
pub(crate) const ARRAY: u32 = 9;

pub(crate) fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

impl GgufFile {
    pub(crate) fn new() -> Self {
        Self {
            version: 3,
            keys: vec![],
            tensors: vec![],
            key_count: None,
            tensor_count: None,
            data: vec![],
        }
    }

    /// The keys of a small Llama, without tensors.
    pub(crate) fn llama() -> Self {
        Self::new()
            .str("general.architecture", "llama")
            .u32("llama.block_count", 1)
            .u32("llama.context_length", 128)
            .u32("llama.embedding_length", 32)
            .u32("llama.feed_forward_length", 64)
            .u32("llama.attention.head_count", 4)
            .u32("llama.attention.head_count_kv", 2)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    }

    /// Adds a key with a value given as it is in the file.
    pub(crate) fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        self.keys.push([&string(key)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    pub(crate) fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, U32, &value.to_le_bytes())
    }

    pub(crate) fn f32(self, key: &str, value: f32) -> Self {
        self.raw(key, F32, &value.to_le_bytes())
    }

    pub(crate) fn bool(self, key: &str, value: bool) -> Self {
        self.raw(key, BOOL, &[value.into()])
    }

    pub(crate) fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, STRING, &string(value))
    }

    pub(crate) fn array(self, key: &str, kind: u32, items: &[Vec<u8>]) -> Self {
        let head = [&kind.to_le_bytes()[..], &(items.len() as u64).to_le_bytes()].concat();
        self.raw(key, ARRAY, &[head, items.concat()].concat())
    }

    pub(crate) fn strings(self, key: &str, texts: &[String]) -> Self {
        let items: Vec<_> = texts.iter().map(|text| string(text)).collect();
        self.array(key, STRING, &items)
    }

    /// Adds a tensor's entry; `shape` in the file's order, innermost first.
    pub(crate) fn tensor(mut self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Self {
        let mut entry = string(name);
        entry.extend((shape.len() as u32).to_le_bytes());
        shape.iter().for_each(|d| entry.extend(d.to_le_bytes()));
        entry.extend(kind.to_le_bytes());
        entry.extend(offset.to_le_bytes());
        self.tensors.push(entry);
        self
    }

    pub(crate) fn data(mut self, bytes: usize) -> Self {
        self.data = vec![0; bytes];
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        self.keys.iter().chain(&self.tensors).for_each(|part| out.extend(part));
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(&self.data);
        out
    }
}

/// A safetensors file of a header and so many bytes of data.
pub(crate) fn safetensors(header: &str, data: usize) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat()
}
