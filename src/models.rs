//! Finds and downloads the files of a model by name.

mod cache;
mod download;
mod env;
mod hub;
mod name;
mod named;
mod python;

pub(crate) use env::HubEnv;
pub(crate) use name::{DEFAULT, HubId, ModelName};

use crate::exit::bad_input;
use crate::progress;
use anyhow::{Result, bail};
use cache::{INDEX, RepoCache};
use hub::{Hub, RemoteFile};
use std::path::PathBuf;

/// Where a model's files are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Files {
    /// A folder with `config.json` and safetensors.
    Folder(PathBuf),
    /// One GGUF file.
    Gguf(PathBuf),
}

impl Files {
    /// The folder or the file.
    pub(crate) fn path(&self) -> &PathBuf {
        match self {
            Self::Folder(path) | Self::Gguf(path) => path,
        }
    }
}

/// Finds a model on this machine, or downloads it. A cached model is used without checking for a
/// newer version; `dacapo pull` does that.
pub(crate) fn locate(name: &ModelName, env: &HubEnv) -> Result<Files> {
    match name {
        ModelName::Folder(path) => Ok(Files::Folder(path.clone())),
        ModelName::Gguf(path) => Ok(Files::Gguf(path.clone())),
        ModelName::Named(named) => named.locate(env),
        ModelName::Hub(id) => match cached(id, env) {
            Some(files) => Ok(files),
            None => Ok(pull(id, env)?.files),
        },
    }
}

/// The path of the default model, if it is on this machine.
pub(crate) fn default_model(env: &HubEnv) -> Result<Option<PathBuf>> {
    Ok(named::NAMED[0].found(env)?.map(|files| files.path().clone()))
}

/// A hub model that is complete in the cache.
pub(crate) fn cached(id: &HubId, env: &HubEnv) -> Option<Files> {
    let snapshot = RepoCache::new(env.cache().ok()?, id).complete_snapshot(id)?;
    Some(in_snapshot(snapshot, id.file.as_deref()))
}

fn in_snapshot(snapshot: PathBuf, gguf: Option<&str>) -> Files {
    match gguf {
        Some(file) => Files::Gguf(snapshot.join(file)),
        None => Files::Folder(snapshot),
    }
}

/// The result of a pull.
#[derive(Debug)]
pub(crate) struct Pulled {
    pub(crate) files: Files,
    pub(crate) commit: String,
    /// Names and sizes of the files that make up the model.
    pub(crate) parts: Vec<(String, u64)>,
}

/// Downloads the newest version of a hub model into the cache; existing files are kept, and partial
/// downloads are resumed.
pub(crate) fn pull(id: &HubId, env: &HubEnv) -> Result<Pulled> {
    let cache = env.cache()?;
    if env.offline {
        let cache = cache.display();
        return Err(bad_input(format!(
            "{id}: not in {cache}, and HF_HUB_OFFLINE forbids downloads"
        )));
    }
    let hub = Hub::new(env)?;
    let revision = hub.revision(id)?;
    let names = wanted(id, &revision.files)?;
    let asking = progress::spinner(&format!("{id}: {} files", names.len()));
    let parts = names.iter().map(|name| hub.file(id, &revision.commit, name));
    let parts: Vec<RemoteFile> = parts.collect::<Result<_>>()?;
    asking.finish_and_clear();

    let cache = RepoCache::new(cache, id);
    cache.prepare()?;
    let bar = progress::bytes(parts.iter().map(|part| part.size).sum(), &id.to_string());
    for part in &parts {
        bar.set_message(part.name.clone());
        download::fetch(&hub, &cache, part, &bar)?;
        cache.link(&revision.commit, &part.name, &part.tag)?;
    }
    bar.finish_and_clear();
    cache.write_ref(&id.revision, &revision.commit)?;

    let gguf = names.iter().find(|name| name.ends_with(".gguf")).map(String::as_str);
    let files = in_snapshot(cache.snapshot(&revision.commit), gguf);
    let parts = parts.into_iter().map(|part| (part.name, part.size)).collect();
    Ok(Pulled { files, commit: revision.commit, parts })
}

/// The files of a repository to download: configuration, tokenizer, templates, and the weights in
/// one format only.
fn wanted(id: &HubId, files: &[String]) -> Result<Vec<String>> {
    let list = |ending: &str| -> Vec<String> {
        files.iter().filter(|file| file.ends_with(ending)).cloned().collect()
    };
    if let Some(file) = &id.file {
        return match files.contains(file) {
            true => Ok(vec![file.clone()]),
            false => Err(bad_input(format!(
                "{id}: no such file; the repository has {}",
                list(".gguf").join(", ")
            ))),
        };
    }
    let top = |file: &&String| !file.contains('/');
    let mut weights: Vec<String> =
        files.iter().filter(top).filter(|file| file.ends_with(".safetensors")).cloned().collect();
    if files.iter().any(|file| file == INDEX) {
        weights.retain(|file| file.starts_with("model-"));
    } else if weights.iter().any(|file| file == "model.safetensors") {
        weights.retain(|file| file == "model.safetensors");
    }
    if weights.is_empty() {
        return match list(".gguf").as_slice() {
            [] => Err(bad_input(format!(
                "{id}: the repository has neither safetensors nor GGUF files"
            ))),
            [only] => Ok(vec![only.clone()]),
            several => Err(bad_input(format!(
                "{id}: the repository has several GGUF files; name one of {}",
                several
                    .iter()
                    .map(|file| format!("{}/{file}", id.repo))
                    .collect::<Vec<_>>()
                    .join(", ")
            ))),
        };
    }
    if !files.iter().any(|file| file == "config.json") {
        bail!("{id}: the repository has no config.json");
    }
    let describes = |file: &String| {
        ["json", "jinja", "model"].iter().any(|ending| file.ends_with(&format!(".{ending}")))
            || file == "merges.txt"
    };
    let mut wanted: Vec<String> =
        files.iter().filter(top).filter(|f| describes(f)).cloned().collect();
    wanted.extend(weights);
    Ok(wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(id: &str, files: &[&str]) -> Result<Vec<String>> {
        let files: Vec<String> = files.iter().map(|file| (*file).into()).collect();
        wanted(&HubId::parse(id).unwrap(), &files)
    }

    #[test]
    fn only_one_format_of_the_weights_is_downloaded() {
        let files = [
            "config.json",
            "tokenizer.json",
            "README.md",
            "model.safetensors",
            "pytorch_model.bin",
            "onnx/model.onnx",
            "original/consolidated.safetensors",
        ];
        let expected = ["config.json", "tokenizer.json", "model.safetensors"];
        assert_eq!(chosen("a/b", &files).unwrap(), expected);
        let sharded =
            ["config.json", INDEX, "model-1-of-2.safetensors", "consolidated.safetensors"];
        assert_eq!(chosen("a/b", &sharded).unwrap(), &sharded[..3]);
    }

    #[test]
    fn repositories_with_several_gguf_files_need_a_choice() {
        assert_eq!(chosen("a/b", &["x.gguf", "README.md"]).unwrap(), ["x.gguf"]);
        assert_eq!(chosen("a/b/y.gguf", &["x.gguf", "y.gguf"]).unwrap(), ["y.gguf"]);
        let several = chosen("a/b", &["x.gguf", "y.gguf"]).unwrap_err().to_string();
        assert_eq!(
            several,
            "a/b: the repository has several GGUF files; name one of a/b/x.gguf, a/b/y.gguf"
        );
        assert!(chosen("a/b/z.gguf", &["x.gguf"]).is_err());
        assert!(chosen("a/b", &["pytorch_model.bin"]).is_err());
    }
}
