//! The hub's cache on disk, in the layout of huggingface_hub, so that models are shared with other
//! tools: `models--org--name/{blobs,refs,snapshots}`.

use super::name::HubId;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// The folder of one repository in the cache.
#[derive(Clone, Debug)]
pub(crate) struct RepoCache {
    root: PathBuf,
    folder: String,
}

impl RepoCache {
    /// The cache of a repository, which may not exist yet.
    pub(crate) fn new(root: &Path, id: &HubId) -> Self {
        let folder = format!("models--{}", id.repo.replace('/', "--"));
        Self { root: root.to_owned(), folder }
    }

    fn dir(&self) -> PathBuf {
        self.root.join(&self.folder)
    }

    /// The folder of a revision, if it has all files to run.
    pub(crate) fn complete_snapshot(&self, id: &HubId) -> Option<PathBuf> {
        let commit = match is_commit(&id.revision) {
            true => id.revision.clone(),
            false => {
                let text = fs::read_to_string(self.dir().join("refs").join(&id.revision)).ok()?;
                text.trim().to_owned()
            }
        };
        let snapshot = is_commit(&commit).then(|| self.snapshot(&commit))?;
        let complete = match &id.file {
            Some(file) => snapshot.join(file).is_file(),
            None => holds_model(&snapshot),
        };
        complete.then_some(snapshot)
    }

    /// The folder of a commit.
    pub(crate) fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir().join("snapshots").join(commit)
    }

    /// The path of the content with this tag.
    pub(crate) fn blob(&self, tag: &str) -> PathBuf {
        self.dir().join("blobs").join(tag)
    }

    /// The path of the content while it is incomplete.
    pub(crate) fn partial(&self, tag: &str) -> PathBuf {
        self.dir().join("blobs").join(format!("{tag}.incomplete"))
    }

    /// Locks a content against other processes and tools while it is downloaded.
    pub(crate) fn lock(&self, tag: &str) -> Result<File> {
        let folder = self.root.join(".locks").join(&self.folder);
        make_folder(&folder)?;
        let path = folder.join(format!("{tag}.lock"));
        let file = File::options().create(true).append(true).open(&path);
        let file = file.with_context(|| path.display().to_string())?;
        file.lock().with_context(|| format!("locking {}", path.display()))?;
        Ok(file)
    }

    /// Links a blob under its name in a commit's folder.
    pub(crate) fn link(&self, commit: &str, file: &str, tag: &str) -> Result<PathBuf> {
        let path = self.snapshot(commit).join(file);
        if fs::canonicalize(&path).ok() == fs::canonicalize(self.blob(tag)).ok() && path.exists() {
            return Ok(path);
        }
        make_folder(path.parent().expect("below the snapshot"))?;
        let up = "../".repeat(2 + file.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{tag}"));
        // Created under another name and renamed, so that a reader sees either the old file or the
        // new one.
        let beside = path.with_file_name(format!(".{tag}.{}", std::process::id()));
        let _ = fs::remove_file(&beside);
        make_link(&target, &self.blob(tag), &beside)?;
        fs::rename(&beside, &path).with_context(|| path.display().to_string())?;
        Ok(path)
    }

    /// Stores the commit of a branch or tag.
    pub(crate) fn write_ref(&self, revision: &str, commit: &str) -> Result<()> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = self.dir().join("refs").join(revision);
        make_folder(path.parent().expect("below refs"))?;
        fs::write(&path, commit).with_context(|| path.display().to_string())
    }

    /// Creates the folder for blobs.
    pub(crate) fn prepare(&self) -> Result<()> {
        make_folder(&self.dir().join("blobs"))
    }
}

/// Whether a revision is a full commit hash.
pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Creates a folder and its parents; the error names it.
pub(crate) fn make_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("creating {}", path.display()))
}

#[cfg(unix)]
fn make_link(target: &Path, _blob: &Path, at: &Path) -> Result<()> {
    std::os::unix::fs::symlink(target, at).with_context(|| at.display().to_string())
}

#[cfg(not(unix))]
fn make_link(_target: &Path, blob: &Path, at: &Path) -> Result<()> {
    fs::hard_link(blob, at).with_context(|| at.display().to_string())
}

/// Whether a folder has a configuration, a tokenizer and every weight file that its index names.
fn holds_model(folder: &Path) -> bool {
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let names: BTreeSet<String> = entries
        .flatten()
        .filter(|entry| entry.path().is_file())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let weights = match fs::read(folder.join(INDEX)) {
        Ok(bytes) => match serde_json::from_slice::<Index>(&bytes) {
            Ok(index) => index.weight_map.values().all(|file| names.contains(file)),
            Err(_) => false,
        },
        Err(_) => names.iter().any(|name| name.ends_with(".safetensors")),
    };
    weights
        && names.contains("config.json")
        && names.iter().any(|name| name.starts_with("tokenizer"))
}

/// The index from weights to files.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

    #[test]
    fn the_layout_is_the_standard_one() {
        let root = tempfile::tempdir().unwrap();
        let id = HubId::main("org/name");
        let cache = RepoCache::new(root.path(), &id);
        cache.prepare().unwrap();
        fs::write(cache.blob("tag"), b"text").unwrap();
        cache.link(COMMIT, "sub/config.json", "tag").unwrap();
        // Linking again changes nothing.
        cache.link(COMMIT, "sub/config.json", "tag").unwrap();
        cache.write_ref("main", COMMIT).unwrap();
        let dir = root.path().join("models--org--name");
        let shown = dir.join("snapshots").join(COMMIT).join("sub/config.json");
        assert_eq!(fs::read_link(&shown).unwrap(), Path::new("../../../blobs/tag"));
        assert_eq!(fs::read(&shown).unwrap(), b"text");
        assert_eq!(fs::read_to_string(dir.join("refs/main")).unwrap(), COMMIT);
    }

    #[test]
    fn a_snapshot_is_complete_when_every_shard_is_there() {
        let root = tempfile::tempdir().unwrap();
        let id = HubId::main("org/name");
        let cache = RepoCache::new(root.path(), &id);
        let put = |file: &str, text: &str| {
            let path = cache.snapshot(COMMIT).join(file);
            make_folder(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("config.json", "{}");
        put("tokenizer.json", "{}");
        put(INDEX, r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#);
        put("one.safetensors", "");
        assert_eq!(cache.complete_snapshot(&id), None, "no ref");
        cache.write_ref("main", COMMIT).unwrap();
        assert_eq!(cache.complete_snapshot(&id), None, "one shard is missing");
        put("two.safetensors", "");
        assert_eq!(cache.complete_snapshot(&id), Some(cache.snapshot(COMMIT)));
        let by_commit = HubId { revision: COMMIT.into(), ..id };
        assert_eq!(cache.complete_snapshot(&by_commit), Some(cache.snapshot(COMMIT)));
    }
}
