//! One type over every kind of checkpoint: a safetensors file, a folder of them with or without an
//! index, a GGUF file, a split GGUF.
//!
//! Opening reads headers only. Data is read with positioned reads, from as many threads as the
//! caller likes, straight into memory the caller owns.

use crate::dtype::DType;
use crate::gguf::Gguf;
use crate::safetensors::{self, SafeTensors};
use crate::{Error, Result, limits, quant};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The entry of one tensor in a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name in the checkpoint.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first: `[rows, columns]` of a linear weight.
    pub shape: Vec<usize>,
    /// Length of the data in bytes.
    pub bytes: usize,
}

impl TensorInfo {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The container a checkpoint is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One or more `.safetensors` files; configuration and tokenizer are JSON files beside them.
    Safetensors,
    /// One or more `.gguf` files that carry configuration and tokenizer themselves.
    Gguf,
}

/// An open checkpoint: checked headers and files ready to be read.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    folder: PathBuf,
    files: Vec<(PathBuf, File)>,
    tensors: Vec<TensorInfo>,
    places: Vec<Place>,
    by_name: HashMap<String, usize>,
    gguf: Option<Gguf>,
    metadata: BTreeMap<String, String>,
}

/// Where a tensor's data starts.
#[derive(Clone, Copy, Debug)]
struct Place {
    file: usize,
    offset: u64,
}

const INDEX: &str = "model.safetensors.index.json";

impl Checkpoint {
    /// Opens a `.gguf` or `.safetensors` file, an index file, or a folder that holds one of them.
    pub fn open(path: &Path) -> Result<Self> {
        let kind =
            std::fs::metadata(path).map_err(|source| Error::io(path, "cannot open", source))?;
        if kind.is_dir() {
            return Self::open_folder(path);
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).to_owned();
        let mut checkpoint = Self::empty(path, folder);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.ends_with(".index.json") {
            checkpoint.add_index(path)?;
        } else if starts_with_magic(path)? {
            checkpoint.add_gguf_splits(path)?;
        } else if name.ends_with(".gguf") {
            // The parser reports what is wrong with the magic.
            checkpoint.add_gguf(path)?;
        } else {
            checkpoint.add_safetensors(path)?;
        }
        Ok(checkpoint)
    }

    fn open_folder(folder: &Path) -> Result<Self> {
        let mut checkpoint = Self::empty(folder, folder.to_owned());
        let index = folder.join(INDEX);
        if index.is_file() {
            checkpoint.add_index(&index)?;
            return Ok(checkpoint);
        }
        let names = file_names(folder)?;
        let with = |suffix: &str| names.iter().filter(|n| n.ends_with(suffix)).collect::<Vec<_>>();
        let (safetensors, ggufs) = (with(".safetensors"), with(".gguf"));
        if names.iter().any(|name| name == "model.safetensors") {
            checkpoint.add_safetensors(&folder.join("model.safetensors"))?;
        } else if !safetensors.is_empty() {
            for name in safetensors {
                checkpoint.add_safetensors(&folder.join(name))?;
            }
        } else if let Some(first) = ggufs.first() {
            let same_split = ggufs.iter().all(|name| split_stem(name) == split_stem(first));
            if ggufs.len() > 1 && (split_stem(first).is_none() || !same_split) {
                let found = format!("{} GGUF files", ggufs.len());
                return Err(Error::unsupported(folder, "folder", found, "one; name the file"));
            }
            checkpoint.add_gguf_splits(&folder.join(first))?;
        } else {
            return Err(Error::missing(folder, ".safetensors or .gguf file"));
        }
        Ok(checkpoint)
    }

    fn empty(path: &Path, folder: PathBuf) -> Self {
        Self {
            path: path.to_owned(),
            folder,
            files: Vec::new(),
            tensors: Vec::new(),
            places: Vec::new(),
            by_name: HashMap::new(),
            gguf: None,
            metadata: BTreeMap::new(),
        }
    }

    fn add_index(&mut self, index: &Path) -> Result<()> {
        let json = read_capped(index, limits::INDEX_BYTES)?;
        let shards = safetensors::read_index(index, &json)?;
        for (shard, names) in shards {
            let path = self.folder.join(&shard);
            self.add_safetensors(&path)?;
            let file = self.files.len() - 1;
            let here = |name: &String| self.by_name.get(name).map(|&i| self.places[i].file);
            if let Some(absent) = names.iter().find(|name| here(name) != Some(file)) {
                return Err(Error::missing(&path, format!("tensor {absent}, which {INDEX} names")));
            }
        }
        Ok(())
    }

    fn add_safetensors(&mut self, path: &Path) -> Result<()> {
        let (file, length) = open_file(path)?;
        let header = SafeTensors::read(path, BufReader::new(&file), length)?;
        self.metadata.extend(header.metadata);
        self.files.push((path.to_owned(), file));
        for tensor in header.tensors {
            self.add(tensor.name, tensor.dtype, tensor.shape, tensor.offset, tensor.bytes)?;
        }
        Ok(())
    }

    /// Adds `path` and, when it is one of a split, the others.
    fn add_gguf_splits(&mut self, path: &Path) -> Result<()> {
        self.add_gguf(path)?;
        let count = self.gguf.as_ref().map_or(Ok(None), |gguf| gguf.uint("split.count"))?;
        let count = count.unwrap_or(1);
        if count <= 1 {
            return Ok(());
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let (Some(stem), true) = (split_stem(&name), count <= limits::GGUF_SPLITS) else {
            let allowed =
                format!("1, or NAME-00001-of-N.gguf with N up to {}", limits::GGUF_SPLITS);
            return Err(Error::invalid(path, 0, "split.count", count, allowed));
        };
        // The first part holds the metadata, so it must be the one whose header is kept.
        *self = Self::empty(&self.path, self.folder.clone());
        for part in 1..=count {
            self.add_gguf(&self.folder.join(format!("{stem}-{part:05}-of-{count:05}.gguf")))?;
        }
        Ok(())
    }

    fn add_gguf(&mut self, path: &Path) -> Result<()> {
        let (file, length) = open_file(path)?;
        let gguf = Gguf::read(path, BufReader::with_capacity(1 << 16, &file), length)?;
        self.files.push((path.to_owned(), file));
        for tensor in gguf.tensors() {
            let shape = tensor.shape.clone();
            self.add(tensor.name.clone(), tensor.dtype, shape, tensor.offset, tensor.bytes)?;
        }
        self.gguf.get_or_insert(gguf);
        Ok(())
    }

    fn add(
        &mut self,
        name: String,
        dtype: DType,
        shape: Vec<usize>,
        offset: u64,
        bytes: u64,
    ) -> Result<()> {
        let file = self.files.len() - 1;
        if let Some(&first) = self.by_name.get(&name) {
            let other = self.files[self.places[first].file].0.display();
            let found = format!("also in {other}");
            return Err(Error::invalid(&self.files[file].0, offset, name, found, "one file"));
        }
        self.by_name.insert(name.clone(), self.tensors.len());
        self.places.push(Place { file, offset });
        self.tensors.push(TensorInfo { name, dtype, shape, bytes: bytes as usize });
        Ok(())
    }

    /// The path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder that holds the checkpoint, where `config.json` and `tokenizer.json` are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The container.
    pub fn format(&self) -> Format {
        if self.gguf.is_some() { Format::Gguf } else { Format::Safetensors }
    }

    /// The GGUF header with its metadata, when the checkpoint is GGUF.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_ref()
    }

    /// The free text of safetensors headers (`__metadata__`); empty for GGUF.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Every tensor, in the order of its data within each file.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes as u64).sum()
    }

    /// Fills `buffer`, which has exactly the tensor's length, with the tensor's bytes.
    pub fn read_into(&self, name: &str, buffer: &mut [u8]) -> Result<()> {
        let (info, _) = self.find(name)?;
        if info.bytes != buffer.len() {
            let allowed = format!("{} bytes", info.bytes);
            return Err(Error::invalid(&self.path, 0, name, buffer.len(), allowed));
        }
        self.read_range(name, 0, buffer)
    }

    /// Fills `buffer` with the tensor's bytes from `start` on.
    pub fn read_range(&self, name: &str, start: usize, buffer: &mut [u8]) -> Result<()> {
        let (info, place) = self.find(name)?;
        let (path, file) = &self.files[place.file];
        if start.checked_add(buffer.len()).is_none_or(|end| end > info.bytes) {
            let found = format!("{} bytes from {start}", buffer.len());
            let allowed = format!("within {} bytes", info.bytes);
            return Err(Error::invalid(path, place.offset, name, found, allowed));
        }
        file.read_exact_at(buffer, place.offset + start as u64)
            .map_err(|source| Error::io(path, "cannot read tensor data", source))
    }

    /// The whole tensor as f32. For small tensors, tests and tools; weights are loaded as stored.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>> {
        let (info, place) = self.find(name)?;
        let mut bytes = vec![0; info.bytes];
        self.read_into(name, &mut bytes)?;
        let mut elements = vec![0.0; info.elements()];
        quant::dequantise(info.dtype, &bytes, &mut elements).map_err(|error| {
            Error::unsupported(&self.files[place.file].0, name, error, "a floating-point type")
        })?;
        Ok(elements)
    }

    /// The refusal of a tensor's dtype, shape or contents, with the file and byte where its data starts.
    pub(crate) fn invalid(
        &self,
        name: &str,
        what: &str,
        found: impl std::fmt::Display,
        allowed: impl std::fmt::Display,
    ) -> Error {
        match self.find(name) {
            Ok((_, place)) => {
                let field = format!("{what} of tensor {name}");
                Error::invalid(&self.files[place.file].0, place.offset, field, found, allowed)
            }
            Err(missing) => missing,
        }
    }

    fn find(&self, name: &str) -> Result<(&TensorInfo, Place)> {
        match self.by_name.get(name) {
            Some(&i) => Ok((&self.tensors[i], self.places[i])),
            None => Err(Error::missing(&self.path, format!("tensor {name}"))),
        }
    }
}

fn open_file(path: &Path) -> Result<(File, u64)> {
    let fail = |source| Error::io(path, "cannot open", source);
    let file = File::open(path).map_err(fail)?;
    let metadata = file.metadata().map_err(fail)?;
    // A pipe or device has no length to check sizes against, and reading one may never end.
    if !metadata.is_file() {
        return Err(Error::unsupported(path, "file kind", "not a regular file", "regular files"));
    }
    Ok((file, metadata.len()))
}

/// The whole file, refused unread when it is longer than `cap`.
pub fn read_capped(path: &Path, cap: u64) -> Result<Vec<u8>> {
    let (file, length) = open_file(path)?;
    if length > cap {
        let allowed = format!("at most {cap} bytes");
        return Err(Error::invalid(path, 0, "length", format!("{length} bytes"), allowed));
    }
    let mut bytes = Vec::with_capacity(length as usize);
    file.take(cap).read_to_end(&mut bytes).map_err(|e| Error::io(path, "cannot read", e))?;
    Ok(bytes)
}

fn starts_with_magic(path: &Path) -> Result<bool> {
    let (file, _) = open_file(path)?;
    let mut magic = [0; 4];
    Ok(file.read_exact_at(&mut magic, 0).is_ok() && &magic == b"GGUF")
}

/// Names of the regular files (or links to them) in `folder`, sorted.
fn file_names(folder: &Path) -> Result<Vec<String>> {
    let fail = |source| Error::io(folder, "cannot list", source);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        if let Ok(name) = entry.file_name().into_string()
            && entry.path().is_file()
        {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// `NAME` of a split file's `NAME-00001-of-00003.gguf`.
fn split_stem(name: &str) -> Option<&str> {
    let stem = name.strip_suffix(".gguf")?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let number = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    (number(total) && number(part)).then_some(stem)
}
