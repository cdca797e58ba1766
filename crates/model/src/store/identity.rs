//! Whether pages of an earlier process can be used: what they depend on, in one hash.

use crate::open::ModelSource;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes that are read of each end of a file of weights.
const END: u64 = 64 << 10;

/// A hash of the weights (names, sizes, times and both ends of their files) and of `how`: the model's shape, numbers
/// and device, and the version of this program.
pub(crate) fn identity(source: &ModelSource, how: &str) -> io::Result<[u8; 32]> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.update(how.as_bytes());
    match source {
        ModelSource::Checkpoint(path) => {
            for file in files(path)? {
                hash_file(&mut hasher, &file)?;
            }
        }
        ModelSource::Dummy { seed, .. } => drop(hasher.update(&seed.to_le_bytes())),
    }
    Ok(*hasher.finalize().as_bytes())
}

/// The files of a model, in order of their names.
fn files(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.into()]);
    }
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path)? {
        let file = entry?.path();
        let weights = file.extension().is_some_and(|kind| kind == "safetensors" || kind == "json");
        if weights {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn hash_file(hasher: &mut blake3::Hasher, path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let facts = file.metadata()?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let time =
        facts.modified().ok().and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok());
    hasher.update(name.as_bytes());
    hasher.update(&facts.len().to_le_bytes());
    hasher.update(&time.unwrap_or_default().as_nanos().to_le_bytes());
    let mut end = Vec::new();
    file.by_ref().take(END).read_to_end(&mut end)?;
    file.seek(SeekFrom::Start(facts.len().saturating_sub(END)))?;
    file.take(END).read_to_end(&mut end)?;
    hasher.update(&end);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_of_the_weights_counts() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.safetensors");
        let write = |bytes: &[u8]| std::fs::write(&file, bytes).unwrap();
        let source = ModelSource::Checkpoint(folder.path().into());
        let of = |how: &str| identity(&source, how).unwrap();
        let mut weights = vec![1; 300_000];
        write(&weights);
        let first = of("bf16");
        assert_eq!(first, of("bf16"));
        assert_ne!(first, of("fp8"));
        // Restores the time, so that only the bytes differ.
        let time = std::fs::metadata(&file).unwrap().modified().unwrap();
        for at in [0, 299_999] {
            weights[at] += 1;
            write(&weights);
            File::options().write(true).open(&file).unwrap().set_modified(time).unwrap();
            assert_ne!(first, of("bf16"));
        }
        std::fs::write(folder.path().join("notes.txt"), "not read").unwrap();
        let before = of("bf16");
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        assert_ne!(before, of("bf16"));
    }
}
