//! What the environment says about the hub and about where files are kept: the variables that
//! huggingface_hub reads, with the same meaning.

use std::path::{Path, PathBuf};

/// The hub as the environment describes it.
#[derive(Clone, Debug)]
pub(crate) struct HubEnv {
    /// Address of the hub, without a slash at its end (`HF_ENDPOINT`).
    pub(crate) endpoint: String,
    /// Sent to the hub and to nobody else (`HF_TOKEN`, `HF_TOKEN_PATH`, `$HF_HOME/token`).
    pub(crate) token: Option<String>,
    /// No downloads at all (`HF_HUB_OFFLINE`).
    pub(crate) offline: bool,
    /// The hub's cache (`HF_HUB_CACHE`, `$HF_HOME/hub`).
    pub(crate) cache: PathBuf,
    /// Certificates to trust instead of Mozilla's, for networks with their own authority
    /// (`REQUESTS_CA_BUNDLE`, `CURL_CA_BUNDLE`, `SSL_CERT_FILE`).
    pub(crate) certificates: Option<PathBuf>,
    /// Our own cache, for what does not come from the hub (`DACAPO_CACHE`).
    pub(crate) own_cache: PathBuf,
}

impl HubEnv {
    /// Reads the process's environment.
    pub(crate) fn read() -> Self {
        Self::from(&|name| std::env::var(name).ok())
    }

    /// Reads any environment; empty values count as not set.
    fn from(var: &dyn Fn(&str) -> Option<String>) -> Self {
        let var = |name: &str| var(name).filter(|value| !value.trim().is_empty());
        let path = |name: &str| var(name).map(PathBuf::from);
        let home = path("HOME").unwrap_or_else(std::env::temp_dir);
        let caches = path("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache"));
        let hf_home = path("HF_HOME").unwrap_or_else(|| caches.join("huggingface"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| hf_home.join("token"));
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Self {
            endpoint: endpoint.trim().trim_end_matches('/').to_owned(),
            token: var("HF_TOKEN")
                .or_else(|| read_token(&token_file))
                .map(|token| token.trim().to_owned()),
            offline: var("HF_HUB_OFFLINE").is_some_and(|value| is_yes(&value)),
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| hf_home.join("hub")),
            certificates: path("REQUESTS_CA_BUNDLE")
                .or_else(|| path("CURL_CA_BUNDLE"))
                .or_else(|| path("SSL_CERT_FILE")),
            own_cache: path("DACAPO_CACHE").unwrap_or_else(|| caches.join("dacapo")),
        }
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
        assert_eq!(env.cache, Path::new("/h/.cache/huggingface/hub"));
        assert_eq!(env.own_cache, Path::new("/h/.cache/dacapo"));
        assert!(!env.offline && env.token.is_none());
    }

    #[test]
    fn every_variable_is_respected() {
        let env = read(&[("HOME", "/h"), ("HF_HOME", "/m"), ("HF_ENDPOINT", "http://a/ ")]);
        assert_eq!((env.cache.as_path(), env.endpoint.as_str()), (Path::new("/m/hub"), "http://a"));
        assert_eq!(read(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/m")]).cache, Path::new("/c"));
        assert_eq!(read(&[("XDG_CACHE_HOME", "/x")]).own_cache, Path::new("/x/dacapo"));
        assert_eq!(read(&[("HF_TOKEN", " hf_1\n")]).token.as_deref(), Some("hf_1"));
        assert!(read(&[("HF_HUB_OFFLINE", "1")]).offline);
        assert!(!read(&[("HF_HUB_OFFLINE", "0")]).offline);
        assert!(read(&[("HF_TOKEN", "")]).token.is_none());
        let certificates = read(&[("SSL_CERT_FILE", "/s"), ("REQUESTS_CA_BUNDLE", "/r")]);
        assert_eq!(certificates.certificates.as_deref(), Some(Path::new("/r")));
    }

    #[test]
    fn the_token_file_is_read() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("token"), "hf_file\n").unwrap();
        let env = read(&[("HF_HOME", folder.path().to_str().unwrap())]);
        assert_eq!(env.token.as_deref(), Some("hf_file"));
    }
}
