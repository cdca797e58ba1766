//! The API of a model hub: the commit of a revision, its files, and their locations.

use super::cache::is_commit;
use super::env::HubEnv;
use super::name::{HubId, is_inside};
use crate::exit::bad_input;
use crate::output::note;
use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use std::path::Path;
use std::time::Duration;
use ureq::Agent;
use ureq::http::{HeaderMap, Response, StatusCode};
use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};

/// The timeout of the first probe.
const PROBE: Duration = Duration::from_secs(3);
/// The timeout of a read from the hub.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// The most files of a repository.
const MAX_FILES: usize = 10_000;
/// The largest response about a repository, in bytes.
const MAX_RESPONSE: u64 = 16 << 20;
/// The largest file verified by git's hash, a SHA-1: hubs store larger files, and so all weights,
/// under their SHA-256.
const MAX_GIT: u64 = 16 << 20;
/// The most redirects before the headers of a file.
const MAX_HOPS: usize = 5;

/// A client of a hub.
pub(crate) struct Hub {
    agent: Agent,
    endpoint: String,
    token: Option<String>,
}

/// The current state of a revision.
#[derive(Debug)]
pub(crate) struct Revision {
    pub(crate) commit: String,
    pub(crate) files: Vec<String>,
}

/// A file of a commit.
#[derive(Clone, Debug)]
pub(crate) struct RemoteFile {
    pub(crate) name: String,
    /// The content's name in the cache: its SHA-256, or its git hash if it is small.
    pub(crate) tag: String,
    pub(crate) size: u64,
    pub(crate) url: String,
}

#[derive(Deserialize)]
struct ModelInfo {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Hub {
    /// A client with the settings and proxies of the environment.
    pub(crate) fn new(env: &HubEnv) -> Result<Self> {
        let config = Agent::config_builder()
            .tls_config(tls(env.certificates.as_deref())?)
            .http_status_as_error(false)
            .redirect_auth_headers(ureq::config::RedirectAuthHeaders::SameHost)
            .user_agent(concat!("dacapo/", env!("CARGO_PKG_VERSION")))
            // The checksum is of the uncompressed bytes.
            .accept_encoding("identity")
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(READ_TIMEOUT))
            .timeout_per_read(Some(READ_TIMEOUT))
            .build();
        let token = env.token.clone();
        if token.is_some() && is_unencrypted(&env.endpoint) {
            let endpoint = &env.endpoint;
            if !env.token_over_http {
                return Err(bad_input(format!(
                    "{endpoint} is not encrypted, so others on the network could read the token of \
                     HF_TOKEN: use https, unset the token, or set DACAPO_TOKEN_OVER_HTTP=1"
                )));
            }
            note!("warning: the token of HF_TOKEN is sent to {endpoint} unencrypted");
        }
        Ok(Self { agent: config.new_agent(), endpoint: env.endpoint.clone(), token })
    }

    /// Checks that the hub responds within three seconds.
    pub(crate) fn probe(&self) -> Result<()> {
        let url = format!("{}/api/models?limit=1", self.endpoint);
        let request = self.agent.head(&url).config().timeout_global(Some(PROBE)).build();
        let answer =
            request.call().with_context(|| format!("{} does not respond", self.endpoint))?;
        if answer.status().is_server_error() {
            bail!("{} returned {}", self.endpoint, answer.status());
        }
        Ok(())
    }

    /// The commit of a revision and its files.
    pub(crate) fn revision(&self, id: &HubId) -> Result<Revision> {
        let revision = id.revision.replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}", self.endpoint, id.repo);
        let mut request = self.agent.get(&url);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut answer = request.call().with_context(|| format!("requesting {}", self.endpoint))?;
        self.check_status(&id.to_string(), answer.status())?;
        let body = answer.body_mut().with_config().limit(MAX_RESPONSE).read_to_vec();
        let body = body.with_context(|| format!("{url}: reading the list of files"))?;
        let info: ModelInfo = serde_json::from_slice(&body)
            .with_context(|| format!("{url}: the response is not from a model hub"))?;
        let commit = info.sha.filter(|sha| is_commit(sha));
        let commit = commit.ok_or_else(|| anyhow!("{url}: the response has no commit"))?;
        let files: Vec<String> = info.siblings.into_iter().map(|file| file.rfilename).collect();
        if files.len() > MAX_FILES {
            bail!(
                "{id}: the repository has {} files; at most {MAX_FILES} are allowed",
                files.len()
            );
        }
        if let Some(bad) = files.iter().find(|file| !is_inside(file)) {
            bail!("{id}: the hub lists a file named {bad:?}, which is outside the cache");
        }
        Ok(Revision { commit, files })
    }

    /// The checksum and size of a file, from the hub's own headers, which are lost after the
    /// redirect to the storage.
    pub(crate) fn file(&self, id: &HubId, commit: &str, name: &str) -> Result<RemoteFile> {
        let path = name.split('/').map(escape).collect::<Vec<_>>().join("/");
        let url = format!("{}/{}/resolve/{commit}/{path}", self.endpoint, id.repo);
        let mut at = url.clone();
        for _ in 0..MAX_HOPS {
            let answer = self.head(&at)?;
            let headers = answer.headers();
            let text = |key: &str| headers.get(key).and_then(|value| value.to_str().ok());
            let tag = text("x-linked-etag").or(text("etag")).and_then(clean_tag);
            if let Some(next) = text("location").filter(|_| answer.status().is_redirection()) {
                // A redirect inside the hub (a renamed repository) is not the file yet.
                if next.starts_with('/') && text("x-linked-etag").is_none() {
                    at = format!("{}{next}", self.endpoint);
                    continue;
                }
            } else {
                self.check_status(&format!("{id}: {name}"), answer.status())?;
            }
            let size = size(headers).ok_or_else(|| anyhow!("{url}: the response has no size"))?;
            let tag = tag.filter(|tag| is_checksum(tag, size)).ok_or_else(|| {
                anyhow!(
                    "{url}: the hub gives no checksum, so the file cannot be verified; download it in \
                     another way and name its folder"
                )
            })?;
            return Ok(RemoteFile { name: name.to_owned(), tag, size, url });
        }
        bail!("{url}: more than {MAX_HOPS} redirects")
    }

    /// Starts reading a file from `offset`.
    pub(crate) fn open(&self, file: &RemoteFile, offset: u64) -> Result<Response<ureq::Body>> {
        let mut request = self.agent.get(&file.url);
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        if offset > 0 {
            request = request.header("range", format!("bytes={offset}-"));
        }
        Ok(request.call()?)
    }

    fn head(&self, url: &str) -> Result<Response<ureq::Body>> {
        let mut request = self.agent.head(url).config().max_redirects(0).build();
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        request.call().with_context(|| format!("requesting {url}"))
    }

    /// Converts an error status to a message that says what to do.
    pub(crate) fn check_status(&self, what: &str, status: StatusCode) -> Result<()> {
        let token = match self.token {
            Some(_) => "the token in HF_TOKEN has no access",
            None => "set HF_TOKEN to a token with access",
        };
        match status.as_u16() {
            200..=299 => Ok(()),
            401 | 403 => Err(bad_input(format!("{what}: private, gated or missing; {token}"))),
            404 => Err(bad_input(format!("{what}: not found on {}", self.endpoint))),
            429 => bail!("{what}: the hub limits requests; retry later"),
            code => bail!("{what}: the hub returned status {code}"),
        }
    }
}

/// The trusted certificates: Mozilla's list, or those in a file.
fn tls(file: Option<&Path>) -> Result<TlsConfig> {
    let roots = match file {
        None => RootCerts::WebPki,
        Some(path) => {
            let pem = std::fs::read(path).with_context(|| path.display().to_string())?;
            let items = parse_pem(&pem).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            RootCerts::from(items)
        }
    };
    Ok(TlsConfig::builder().root_certs(roots).build())
}

/// Whether a connection is unencrypted: neither https nor local.
fn is_unencrypted(endpoint: &str) -> bool {
    let Some((scheme, rest)) = endpoint.split_once("://") else { return true };
    if scheme.eq_ignore_ascii_case("https") {
        return false;
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let host = authority.rsplit('@').next().unwrap_or_default();
    let host = match host.strip_prefix('[') {
        Some(six) => six.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    let local = host.eq_ignore_ascii_case("localhost")
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    !local
}

/// Whether a tag identifies the content: a SHA-256, or for a small file git's hash.
fn is_checksum(tag: &str, size: u64) -> bool {
    let hex = tag.bytes().all(|b| b.is_ascii_hexdigit());
    hex && (tag.len() == 64 || (tag.len() == 40 && size <= MAX_GIT))
}

/// The size of the linked content, or of the file itself.
fn size(headers: &HeaderMap) -> Option<u64> {
    let number = |key: &str| headers.get(key)?.to_str().ok()?.trim().parse().ok();
    number("x-linked-size").or_else(|| number("content-length"))
}

/// An entity tag as a file name: without quotes and weak mark, only letters, digits, `-` and `_`.
fn clean_tag(raw: &str) -> Option<String> {
    let tag = raw.trim().trim_start_matches("W/").trim_matches('"');
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (!tag.is_empty() && tag.len() <= 128 && tag.chars().all(plain)).then(|| tag.to_owned())
}

/// Percent-encodes one part of a path.
fn escape(part: &str) -> String {
    let mut escaped = String::new();
    for byte in part.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'.' | b'_' | b'-' | b'~' => {
                escaped.push(byte as char);
            }
            other => escaped.push_str(&format!("%{other:02X}")),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_become_safe_names() {
        assert_eq!(clean_tag("\"abc\"").as_deref(), Some("abc"));
        assert_eq!(clean_tag("W/\"abc\"").as_deref(), Some("abc"));
        for bad in ["\"../x\"", "", "\"\"", "a b", "a/b"] {
            assert_eq!(clean_tag(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_hashes_are_checksums() {
        let (sha256, git) = ("a1".repeat(32), "0F".repeat(20));
        assert!(is_checksum(&sha256, u64::MAX) && is_checksum(&git, MAX_GIT));
        assert!(!is_checksum(&git, MAX_GIT + 1), "large files need a SHA-256");
        for other in ["", "d41d8cd98f00b204e9800998ecf8427e", "65f1-5a9", &"g".repeat(64)] {
            assert!(!is_checksum(other, 1), "{other}");
        }
    }

    #[test]
    fn unencrypted_endpoints() {
        for closed in [
            "https://a.org",
            "HTTPS://a",
            "http://127.0.0.1:80",
            "http://localhost/x",
            "http://[::1]:8",
        ] {
            assert!(!is_unencrypted(closed), "{closed}");
        }
        for open in [
            "http://a.org",
            "http://localhost.a.org",
            "http://127.0.0.1@a.org/",
            "a.org",
            "http://[::2]",
        ] {
            assert!(is_unencrypted(open), "{open}");
        }
    }

    #[test]
    fn paths_are_escaped() {
        assert_eq!(escape("a b#c.gguf"), "a%20b%23c.gguf");
    }
}
