//! Downloads one file from the hub: resumes partial downloads and verifies the checksum.

use super::cache::RepoCache;
use super::hub::{Hub, RemoteFile};
use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;
use ring::digest;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

/// Consecutive attempts without data before the download fails.
const MAX_EMPTY_ATTEMPTS: u32 = 4;
/// Complete downloads with a wrong checksum before the download fails.
const MAX_WRONG: u32 = 2;
/// The pause after the first empty attempt; doubled after each.
const FIRST_PAUSE: Duration = Duration::from_millis(200);

/// Downloads a file's content into the cache unless it is there. The bar advances by the bytes
/// received.
pub(crate) fn fetch(
    hub: &Hub,
    cache: &RepoCache,
    file: &RemoteFile,
    bar: &ProgressBar,
) -> Result<()> {
    let blob = cache.blob(&file.tag);
    let _lock = cache.lock(&file.tag)?;
    let whole = fs::metadata(&blob).is_ok_and(|found| found.len() == file.size);
    if whole && verify(&blob, &file.tag).is_ok() {
        bar.inc(file.size);
        return Ok(());
    }
    let partial = cache.partial(&file.tag);
    let mut wrong = 0;
    loop {
        download_rest(hub, file, &partial, bar)?;
        match verify(&partial, &file.tag) {
            Ok(()) => break,
            Err(error) => {
                wrong += 1;
                fs::remove_file(&partial).with_context(|| partial.display().to_string())?;
                if wrong == MAX_WRONG {
                    return Err(
                        error.context(format!("{}: the checksum was wrong twice", file.url))
                    );
                }
                bar.set_position(bar.position().saturating_sub(file.size));
            }
        }
    }
    fs::rename(&partial, &blob).with_context(|| blob.display().to_string())
}

/// Downloads the rest of the partial file, over several connections if needed.
fn download_rest(hub: &Hub, file: &RemoteFile, partial: &Path, bar: &ProgressBar) -> Result<()> {
    let length = |path: &Path| fs::metadata(path).map_or(0, |found| found.len());
    if length(partial) > file.size {
        fs::remove_file(partial).with_context(|| partial.display().to_string())?;
    }
    bar.inc(length(partial));
    let mut empty = 0;
    loop {
        let before = length(partial);
        if before == file.size && partial.exists() {
            return Ok(());
        }
        let error = match attempt(hub, file, partial, before, bar) {
            Ok(()) => continue,
            Err(Stop::Fail(error)) => return Err(error),
            Err(Stop::Retry(error)) => error,
        };
        empty = if length(partial) > before { 0 } else { empty + 1 };
        if empty == MAX_EMPTY_ATTEMPTS {
            return Err(
                error.context(format!("{}: the download failed at byte {before}", file.url))
            );
        }
        if empty > 0 {
            std::thread::sleep(FIRST_PAUSE * (1 << (empty - 1)));
        }
    }
}

/// Why an attempt ended early.
enum Stop {
    /// Temporary: try again.
    Retry(anyhow::Error),
    /// Permanent.
    Fail(anyhow::Error),
}

fn attempt(
    hub: &Hub,
    file: &RemoteFile,
    partial: &Path,
    mut offset: u64,
    bar: &ProgressBar,
) -> Result<(), Stop> {
    let mut answer = hub.open(file, offset).map_err(Stop::Retry)?;
    let status = answer.status();
    if status.is_server_error() || status.as_u16() == 429 {
        return Err(Stop::Retry(anyhow!("the hub returned {status}")));
    }
    hub.check_status(&file.name, status).map_err(Stop::Fail)?;
    if offset > 0 && !resumes_at(&answer, offset) {
        // The server sends the file from the beginning, so the partial file is overwritten.
        bar.set_position(bar.position().saturating_sub(offset));
        offset = 0;
    }
    let disk =
        |error: std::io::Error| Stop::Fail(anyhow!(error).context(partial.display().to_string()));
    let mut out = File::options()
        .create(true)
        .write(true)
        .truncate(offset == 0)
        .append(offset > 0)
        .open(partial)
        .map_err(disk)?;
    let mut body = answer.body_mut().as_reader();
    let mut buffer = vec![0; 256 << 10];
    while offset < file.size {
        let count = body.read(&mut buffer).map_err(|error| Stop::Retry(anyhow!(error)))?;
        if count == 0 {
            let (have, size) = (offset, file.size);
            return Err(Stop::Retry(anyhow!("the connection closed at byte {have} of {size}")));
        }
        let take = count.min((file.size - offset) as usize);
        out.write_all(&buffer[..take]).map_err(disk)?;
        offset += take as u64;
        bar.inc(take as u64);
        if take < count {
            return Err(Stop::Fail(too_long(file)));
        }
    }
    // Nothing may follow the declared size; a connection error at this point is harmless.
    match body.read(&mut buffer[..1]) {
        Ok(1..) => Err(Stop::Fail(too_long(file))),
        _ => Ok(()),
    }
}

fn too_long(file: &RemoteFile) -> anyhow::Error {
    anyhow!("{}: the hub declared {} bytes and sent more", file.url, file.size)
}

/// Whether the response continues exactly where the partial file ends.
fn resumes_at(answer: &ureq::http::Response<ureq::Body>, offset: u64) -> bool {
    let range = answer.headers().get("content-range").and_then(|value| value.to_str().ok());
    answer.status().as_u16() == 206
        && range
            .and_then(|range| range.strip_prefix("bytes ")?.split('-').next()?.parse().ok())
            .is_some_and(|start: u64| start == offset)
}

/// Checks a file against its tag: 64 hex digits are its SHA-256, 40 are git's hash of a blob. Other
/// tags do not identify the content and are an error.
fn verify(path: &Path, tag: &str) -> Result<()> {
    let found = match tag.len() {
        64 => sha256(path)?,
        40 => {
            let size = fs::metadata(path)?.len();
            let start = format!("blob {size}\0");
            hash(path, &digest::SHA1_FOR_LEGACY_USE_ONLY, start.as_bytes())?
        }
        _ => bail!("the hub gave no checksum"),
    };
    if !found.eq_ignore_ascii_case(tag) {
        bail!("the checksum is {found}, but the hub gave {tag}");
    }
    Ok(())
}

/// The SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    hash(path, &digest::SHA256, b"")
}

fn hash(path: &Path, algorithm: &'static digest::Algorithm, start: &[u8]) -> Result<String> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    let mut context = digest::Context::new(algorithm);
    context.update(start);
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).with_context(|| path.display().to_string())? {
            0 => break,
            count => context.update(&buffer[..count]),
        }
    }
    Ok(context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_match_sha256sum_and_git() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), b"hello\n").unwrap();
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        assert_eq!(sha256(file.path()).unwrap(), sha);
        verify(file.path(), sha).unwrap();
        verify(file.path(), "ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        assert!(verify(file.path(), "opaque-tag").is_err());
        assert!(verify(file.path(), "b1946ac92492d2347c6235b4d2611184").is_err(), "an MD5");
        let wrong = verify(file.path(), &sha.replace('5', "6")).unwrap_err().to_string();
        assert!(wrong.starts_with("the checksum is 5891b5"), "{wrong}");
    }
}
