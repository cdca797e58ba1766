//! Environment variables of the hub and its cache: those of huggingface_hub, with the same meaning.

use crate::exit::bad_input;
use anyhow::Result;
use device::private::{self, NotPrivate};
use std::path::{Path, PathBuf};

/// The settings of the hub from the environment.
#[derive(Clone, Debug)]
pub(crate) struct HubEnv {
    /// URL of the hub, without a trailing slash (`HF_ENDPOINT`).
    pub(crate) endpoint: String,
    /// The token, sent only to the hub (`HF_TOKEN`, `HF_TOKEN_PATH`, `$HF_HOME/token`).
    pub(crate) token: Option<String>,
    /// Whether downloads are forbidden (`HF_HUB_OFFLINE`).
    pub(crate) offline: bool,
    /// Whether the token may be sent unencrypted to another machine (`DACAPO_TOKEN_OVER_HTTP`).
    pub(crate) token_over_http: bool,
    /// The hub's cache (`HF_HUB_CACHE`, `$HF_HOME/hub`); `None` if no variable names a folder.
    cache: Option<PathBuf>,
    /// Certificates to trust instead of Mozilla's, for networks with their own certificate
    /// authority (`REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`, `SSL_CERT_FILE`).
    pub(crate) certificates: Option<PathBuf>,
    /// Dacapo's own cache, for files that are not from the hub (`DACAPO_CACHE`).
    own_cache: Result<PathBuf, NotPrivate>,
}

impl HubEnv {
    /// Reads the environment of the process.
    pub(crate) fn read() -> Self {
        Self::from(&|name| std::env::var(name).ok())
    }

    /// Reads a given environment; empty values count as unset.
    fn from(var: &dyn Fn(&str) -> Option<String>) -> Self {
        let var = |name: &str| var(name).filter(|value| !value.trim().is_empty());
        let path = |name: &str| var(name).map(PathBuf::from);
        // A relative path would depend on the current folder.
        let whole = |name: &str| path(name).filter(|path| path.is_absolute());
        let in_home = || whole("HOME").map(|home| home.join(".cache"));
        let caches = whole("XDG_CACHE_HOME").or_else(in_home);
        let hf_home = path("HF_HOME").or_else(|| Some(caches?.join("huggingface")));
        let in_hf_home = |name: &str| hf_home.as_ref().map(|home| home.join(name));
        let token_file = path("HF_TOKEN_PATH").or_else(|| in_hf_home("token"));
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            endpoint: endpoint.trim().trim_end_matches('/').to_owned(),
            token: var("HF_TOKEN")
                .or_else(|| read_token(&token_file?))
                .map(|token| token.trim().to_owned()),
            offline: var("HF_HUB_OFFLINE").is_some_and(|value| is_yes(&value)),
            token_over_http: var("DACAPO_TOKEN_OVER_HTTP").is_some_and(|value| is_yes(&value)),
            cache: path("HF_HUB_CACHE").or_else(|| in_hf_home("hub")),
            certificates: path("REQUESTS_CA_BUNDLE")
                .or_else(|| path("CURL_CA_BUNDLE"))
                .or_else(|| path("SSL_CERT_FILE")),
            own_cache: private::cache_root_in(&|name| var(name).map(Into::into)),
        }
    }

    /// The hub's cache.
    pub(crate) fn cache(&self) -> Result<&Path> {
        self.cache
            .as_deref()
            .ok_or_else(|| bad_input("no folder for models: set HOME, HF_HOME or HF_HUB_CACHE"))
    }

    /// Dacapo's own cache, which must be private to the user.
    pub(crate) fn own_cache(&self) -> Result<&Path> {
        let found = self.own_cache.as_deref().map_err(Clone::clone);
        let checked = found.and_then(|root| private::check(root).map(|()| root));
        checked.map_err(|problem| bad_input(problem.to_string()))
    }
}

fn read_token(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().filter(|token| !token.trim().is_empty())
}

fn is_yes(value: &str) -> bool {
    matches!(value.trim().to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(vars: &[(&str, &str)]) -> HubEnv {
        HubEnv::from(&|name| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).into())
        })
    }

    #[test]
    fn defaults_are_those_of_huggingface_hub() {
        let env = read(&[("HOME", "/h")]);
        assert_eq!(env.endpoint, "https://huggingface.co");
        assert_eq!(env.cache().unwrap(), Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(env.own_cache().unwrap(), Path::new("/h/.cache/dacapo"));
        assert!(!env.offline && env.token.is_none());
    }

    #[test]
    fn every_variable_is_used() {
        let env = read(&[("HOME", "/h"), ("HF_HOME", "/m"), ("HF_ENDPOINT", "http://a/ ")]);
        assert_eq!(
            (env.cache().unwrap(), env.endpoint.as_str()),
            (Path::new("/m/hub"), "http://a")
        );
        let env = read(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/m")]);
        assert_eq!(env.cache().unwrap(), Path::new("/c"));
        let env = read(&[("XDG_CACHE_HOME", "/x")]);
        assert_eq!(env.own_cache().unwrap(), Path::new("/x/dacapo"));
        assert_eq!(read(&[("HF_TOKEN", " hf_1\n")]).token.as_deref(), Some("hf_1"));
        assert!(read(&[("HF_HUB_OFFLINE", "1")]).offline);
        assert!(!read(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert!(read(&[("HF_TOKEN", "")]).token.is_none());
        let certificates = read(&[("SSL_CERT_FILE", "/s"), ("REQUESTS_CA_BUNDLE", "/r")]);
        assert_eq!(certificates.certificates.as_deref(), Some(Path::new("/r")));
    }

    #[test]
    fn without_a_home_there_are_no_caches() {
        let env = read(&[]);
        assert!(env.cache().unwrap_err().to_string().contains("set HOME"));
        assert!(env.own_cache().unwrap_err().to_string().contains("nor HOME"));
        assert!(env.token.is_none());
        assert!(read(&[("HOME", "relative")]).cache().is_err());
    }

    #[test]
    fn the_token_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let env = read(&[("HF_HOME", folder.path().to_str().unwrap())]);
        assert_eq!(env.token.as_deref(), Some("hf_file"));
    }
}
