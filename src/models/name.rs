//! Parses the name of a model.

use super::named::Named;
use crate::exit::bad_input;
use anyhow::Result;
use std::path::{Path, PathBuf};

/// The name of the default model.
pub(crate) const DEFAULT: &str = "smollm2";

/// A parsed model name; the model is not located yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ModelName {
    /// A model with a short name, from the hub or PyPI.
    Named(&'static Named),
    /// A folder with `config.json` and safetensors.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(PathBuf),
    /// A repository of the hub.
    Hub(HubId),
}

/// `org/name[/file.gguf][@revision]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubId {
    /// `org/name`.
    pub(crate) repo: String,
    /// A GGUF file in it, if named.
    pub(crate) file: Option<String>,
    /// A branch, a tag or a commit; `main` by default.
    pub(crate) revision: String,
}

impl ModelName {
    /// Parses a name. Existing files and folders take precedence, so that a path never causes a
    /// download.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let path = Path::new(text);
        if let Some(named) = Named::of(text) {
            return Ok(Self::Named(named));
        }
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.is_file() {
            return match has_extension(path, "gguf") {
                true => Ok(Self::Gguf(path.to_owned())),
                false => Err(bad_input(format!(
                    "{text}: not a model; use a folder or a .gguf file (for safetensors, the folder)"
                ))),
            };
        }
        let looks_like_path = text.starts_with(['.', '/', '~', '\\']);
        if !looks_like_path && let Some(id) = HubId::parse(text) {
            return Ok(Self::Hub(id));
        }
        if looks_like_path || has_extension(path, "gguf") {
            return Err(bad_input(format!("{text}: no such file or folder")));
        }
        if text.contains(char::is_whitespace) {
            return Err(bad_input(format!(
                "{text:?} was taken as MODEL, which is a folder, a .gguf file or a hub id; a prompt \
                 is given with -p: dacapo run -p {text:?}"
            )));
        }
        Err(bad_input(format!(
            "model `{text}`: no such folder or .gguf file, and not a hub id (org/name[@revision])"
        )))
    }
}

impl HubId {
    /// The id of a repository's main branch.
    pub(crate) fn main(repo: &str) -> Self {
        Self { repo: repo.into(), file: None, revision: "main".into() }
    }

    /// `None` if the text is not a hub id.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (path, revision) = text.split_once('@').unwrap_or((text, "main"));
        let mut parts = path.splitn(3, '/');
        let (org, name, file) = (parts.next()?, parts.next()?, parts.next());
        let plain = [org, name].iter().all(|part| is_plain(part));
        if !plain || !is_inside(revision) {
            return None;
        }
        if let Some(file) = file
            && !(is_inside(file) && has_extension(Path::new(file), "gguf"))
        {
            return None;
        }
        Some(Self {
            repo: format!("{org}/{name}"),
            file: file.map(Into::into),
            revision: revision.into(),
        })
    }
}

impl std::fmt::Display for HubId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.repo)?;
        if let Some(file) = &self.file {
            write!(f, "/{file}")?;
        }
        if self.revision != "main" {
            write!(f, "@{}", self.revision)?;
        }
        Ok(())
    }
}

/// One part of a hub id: letters, digits, `.`, `_`, `-`, and not only dots.
fn is_plain(part: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !part.is_empty() && part.len() <= 96 && part.chars().all(allowed) && !part.starts_with('.')
}

/// Whether this is a relative path without `..`. Names from a server must be, because they become
/// paths in the cache.
pub(crate) fn is_inside(path: &str) -> bool {
    let part_is_plain = |part: &str| {
        !part.is_empty()
            && part != "."
            && part != ".."
            && !part.chars().any(|c| c.is_control() || "\\:*?\"<>|".contains(c))
    };
    path.len() <= 255 && path.split('/').all(part_is_plain)
}

/// Whether the file's extension is this one, in any case.
pub(crate) fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(repo: &str, file: Option<&str>, revision: &str) -> ModelName {
        let file = file.map(Into::into);
        ModelName::Hub(HubId { repo: repo.into(), file, revision: revision.into() })
    }

    #[test]
    fn every_kind_of_name_is_parsed() {
        let folder = tempfile::tempdir().unwrap();
        let gguf = folder.path().join("m.GGUF");
        std::fs::write(&gguf, b"").unwrap();
        let name = |text: &str| ModelName::parse(text).unwrap();
        for short in [DEFAULT, "gemma3-270m"] {
            assert!(matches!(name(short), ModelName::Named(named) if named.name == short));
        }
        assert_eq!(name(gguf.to_str().unwrap()), ModelName::Gguf(gguf.clone()));
        let path = folder.path();
        assert_eq!(name(path.to_str().unwrap()), ModelName::Folder(path.into()));
        assert_eq!(name("Qwen/Qwen3-0.6B"), hub("Qwen/Qwen3-0.6B", None, "main"));
        assert_eq!(name("a/b@refs/pr/1"), hub("a/b", None, "refs/pr/1"));
        assert_eq!(name("a/b/q/x.gguf@v1"), hub("a/b", Some("q/x.gguf"), "v1"));
    }

    #[test]
    fn invalid_names_are_errors() {
        let complaint = |text: &str| ModelName::parse(text).unwrap_err().to_string();
        assert_eq!(complaint("./missing"), "./missing: no such file or folder");
        assert_eq!(complaint("missing.gguf"), "missing.gguf: no such file or folder");
        assert!(complaint("missing").contains("not a hub id"));
        for text in ["a/../b.gguf", "a/b@../x", "a/b/c", "../a", "a/", "/", "", "a/b@", "a b/c"] {
            assert!(ModelName::parse(text).is_err() || Path::new(text).exists(), "{text}");
        }
    }

    #[test]
    fn names_from_a_server_stay_inside() {
        for good in ["config.json", "onnx/model.onnx", "a..b", "refs/pr/7"] {
            assert!(is_inside(good), "{good}");
        }
        for bad in ["../x", "a/../../x", "/etc/passwd", "a//b", "", "c:\\x", "a\0b", "a/."] {
            assert!(!is_inside(bad), "{bad}");
        }
    }
}
