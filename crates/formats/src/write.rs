//! Writes safetensors checkpoints: headers first, then data at any place from any thread.
//!
//! All tensors are known before the first byte is written, so nothing is held in memory: each file gets its header and
//! its full length, and [`NewCheckpoint::write`] puts bytes where they belong.

use crate::dtype::DType;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot write: {source}", file.display())]
pub struct WriteError {
    /// The file.
    pub file: PathBuf,
    /// The system's error.
    pub source: std::io::Error,
}

impl WriteError {
    /// Adds the file to an error of the system.
    pub fn of(file: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let file = file.to_owned();
        move |source| Self { file, source }
    }
}

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewTensor {
    /// Its name.
    pub name: String,
    /// The type of its elements: one that safetensors has.
    pub dtype: DType,
    /// Its dimensions, outermost first.
    pub shape: Vec<usize>,
}

impl NewTensor {
    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.block_bytes()) as u64
    }
}

/// A checkpoint whose tensors have their places, but not yet their data.
#[derive(Debug)]
pub struct NewCheckpoint {
    files: Vec<(PathBuf, File)>,
    places: HashMap<String, Place>,
}

#[derive(Debug)]
struct Place {
    file: usize,
    offset: u64,
    bytes: u64,
    written: AtomicU64,
}

impl NewCheckpoint {
    /// Creates the files of a checkpoint in `folder`: one, or several of at most `shard_bytes` bytes of data with an
    /// index. Tensors of one group are in one file. `metadata` is free text for the headers.
    ///
    /// # Panics
    /// If a tensor has a type that safetensors does not have, or two have the same name.
    pub fn create(
        folder: &Path,
        groups: &[Vec<NewTensor>],
        shard_bytes: u64,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self, WriteError> {
        let shards = shards(groups, shard_bytes);
        let mut new = Self { files: Vec::new(), places: HashMap::new() };
        let mut map = BTreeMap::new();
        for (number, shard) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => "model.safetensors".to_owned(),
                count => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
            };
            map.extend(shard.iter().map(|tensor| (tensor.name.clone(), name.clone())));
            new.add(&folder.join(name), shard, metadata)?;
        }
        if shards.len() > 1 {
            let total: u64 = groups.iter().flatten().map(NewTensor::bytes).sum();
            let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
            let path = folder.join("model.safetensors.index.json");
            let text = format!("{index:#}\n");
            std::fs::write(&path, text).map_err(WriteError::of(&path))?;
        }
        Ok(new)
    }

    fn add(
        &mut self,
        path: &Path,
        tensors: &[&NewTensor],
        metadata: &BTreeMap<String, String>,
    ) -> Result<(), WriteError> {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!(metadata));
        let mut end = 0;
        for tensor in tensors {
            assert!(!tensor.dtype.is_quantised(), "{}: {}", tensor.name, tensor.dtype);
            let (from, bytes) = (end, tensor.bytes());
            end += bytes;
            let entry = json!({
                "dtype": tensor.dtype.name(),
                "shape": tensor.shape,
                "data_offsets": [from, end],
            });
            header.insert(tensor.name.clone(), entry);
            let (file, written) = (self.files.len(), AtomicU64::new(0));
            let place = Place { file, offset: from, bytes, written };
            let before = self.places.insert(tensor.name.clone(), place);
            assert!(before.is_none(), "{} twice", tensor.name);
        }
        let mut text = Value::Object(header).to_string();
        // Data starts at a multiple of eight bytes.
        text.extend(std::iter::repeat_n(' ', text.len().next_multiple_of(8) - text.len()));
        let start = 8 + text.len() as u64;
        for tensor in tensors {
            self.places.get_mut(&tensor.name).expect("it was inserted").offset += start;
        }
        let create = || {
            let file = File::create_new(path)?;
            file.write_all_at(&(text.len() as u64).to_le_bytes(), 0)?;
            file.write_all_at(text.as_bytes(), 8)?;
            file.set_len(start + end)?;
            Ok(file)
        };
        let file = create().map_err(WriteError::of(path))?;
        self.files.push((path.to_owned(), file));
        Ok(())
    }

    /// Writes bytes of a tensor from `start` on. Every byte is written once.
    ///
    /// # Panics
    /// If there is no such tensor, or the bytes do not fit into it.
    pub fn write(&self, name: &str, start: u64, bytes: &[u8]) -> Result<(), WriteError> {
        let place = self.places.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        assert!(start + bytes.len() as u64 <= place.bytes, "{name}: past its end");
        let (path, file) = &self.files[place.file];
        file.write_all_at(bytes, place.offset + start).map_err(WriteError::of(path))?;
        place.written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    /// Puts everything onto the disk.
    ///
    /// # Panics
    /// If some tensor does not have all of its bytes.
    pub fn finish(self) -> Result<(), WriteError> {
        for (name, place) in self.places {
            let written = place.written.into_inner();
            assert_eq!(written, place.bytes, "bytes of {name}");
        }
        for (path, file) in self.files {
            file.sync_all().map_err(WriteError::of(&path))?;
        }
        Ok(())
    }
}

/// Divides groups into files. In a file the largest elements come first, so that each tensor starts at a multiple of the
/// size of its elements, which readers that map files need.
fn shards(groups: &[Vec<NewTensor>], most: u64) -> Vec<Vec<&NewTensor>> {
    let mut shards: Vec<Vec<&NewTensor>> = vec![Vec::new()];
    let mut size = 0;
    for group in groups {
        let bytes: u64 = group.iter().map(NewTensor::bytes).sum();
        if size > 0 && size + bytes > most {
            shards.push(Vec::new());
            size = 0;
        }
        size += bytes;
        shards.last_mut().expect("there is one").extend(group);
    }
    for shard in &mut shards {
        shard.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype.block_bytes()));
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::Checkpoint;

    fn tensor(name: &str, dtype: DType, shape: &[usize]) -> NewTensor {
        NewTensor { name: name.into(), dtype, shape: shape.into() }
    }

    fn byte(name: &str, at: u64) -> u8 {
        (name.len() as u64 * 37 + at * 11) as u8
    }

    fn write(folder: &Path, groups: &[Vec<NewTensor>], most: u64) {
        let metadata = BTreeMap::from([("format".into(), "pt".into())]);
        let new = NewCheckpoint::create(folder, groups, most, &metadata).unwrap();
        for tensor in groups.iter().flatten() {
            let half = tensor.bytes() / 2;
            for range in [half..tensor.bytes(), 0..half] {
                let bytes: Vec<u8> = range.clone().map(|at| byte(&tensor.name, at)).collect();
                new.write(&tensor.name, range.start, &bytes).unwrap();
            }
        }
        new.finish().unwrap();
    }

    fn groups() -> Vec<Vec<NewTensor>> {
        vec![
            vec![tensor("a.weight", DType::F8_E4M3, &[3, 5]), tensor("a.scale", DType::F32, &[1])],
            vec![tensor("norm", DType::BF16, &[7])],
            vec![tensor("bb.packed", DType::I32, &[3, 2]), tensor("bb.shape", DType::I64, &[2])],
            vec![tensor("empty", DType::F16, &[0, 4])],
        ]
    }

    /// The package that everybody reads such files with, and our own reader, find every byte; every tensor is aligned.
    #[test]
    fn readers_find_what_was_written() {
        for (most, files) in [(u64::MAX, 1), (40, 2), (1, 4)] {
            let folder = tempfile::tempdir().unwrap();
            write(folder.path(), &groups(), most);
            let checkpoint = Checkpoint::open(folder.path()).unwrap();
            assert_eq!(checkpoint.metadata()["format"], "pt");
            let mut read = 0;
            for entry in std::fs::read_dir(folder.path()).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_none_or(|end| end != "safetensors") {
                    continue;
                }
                read += 1;
                let bytes = std::fs::read(&path).unwrap();
                let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
                let base = bytes.as_ptr() as usize;
                for (name, view) in theirs.tensors() {
                    let info = checkpoint.get(&name).unwrap();
                    assert_eq!(view.shape(), info.shape);
                    let expected: Vec<u8> =
                        (0..info.bytes as u64).map(|at| byte(&name, at)).collect();
                    assert_eq!(view.data(), expected, "{name}");
                    let mut ours = vec![0; info.bytes];
                    checkpoint.read_into(&name, &mut ours).unwrap();
                    assert_eq!(ours, expected, "{name}");
                    let offset = view.data().as_ptr() as usize - base;
                    assert!(offset.is_multiple_of(info.dtype.block_bytes()), "{name}: {offset}");
                }
            }
            assert_eq!((read, checkpoint.tensors().len()), (files, 6), "shards of {most}");
            let index = folder.path().join("model.safetensors.index.json");
            assert_eq!(index.exists(), files > 1);
        }
    }

    #[test]
    #[should_panic(expected = "bytes of norm")]
    fn a_tensor_without_all_of_its_bytes_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let groups = [vec![tensor("norm", DType::BF16, &[7])]];
        let new =
            NewCheckpoint::create(folder.path(), &groups, u64::MAX, &BTreeMap::new()).unwrap();
        new.write("norm", 2, &[1; 12]).unwrap();
        let _ = new.finish();
    }

    #[test]
    fn a_file_that_exists_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &groups(), u64::MAX);
        let again = NewCheckpoint::create(folder.path(), &groups(), u64::MAX, &BTreeMap::new());
        assert!(again.unwrap_err().to_string().contains("model.safetensors: cannot write"));
    }
}
